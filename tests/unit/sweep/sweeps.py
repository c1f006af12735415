"""Tiny sweeps, and results made up for those that test arithmetic and reports."""

import json
from pathlib import Path
from typing import Any

import yaml

from spes_p2p import __version__
from spes_p2p.sim.sweep import PeerAccount, Point, RunResult, Sweep, load_sweep

TINY: dict[str, Any] = {
    "max_slots": 4,
    "held_out_tokens": 256,
    "run": {
        "model": {
            **{"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 8},
            **{"num_experts": 4},
        },
        "data": {"source": "files", "vocab_size": 280, "sequence_length": 16, "held_out_fraction": 0.3},
        "train": {"batch_size": 2},
        "round": {"mode": "steps", "steps": 1, "total": 2},
    },
}
SOLO: dict[str, Any] = {"peers": 1, "max_slots": 4}
PAIR: dict[str, Any] = {"peers": 2, "max_slots": 2}


def write_sweep(folder: Path, variants: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write a sweep of tiny scenarios over a text of its own; return its file."""
    text = folder / "text.jsonl"
    if not text.exists():
        words = ("peer", "slot", "round", "swarm", "token", "expert")
        rows = [" ".join(words[(i * j + i) % 6] for j in range(40)) + f" {i}" for i in range(80)]
        text.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    content = {"base": TINY | {"text": [str(text)]}, "variants": variants or {"solo": SOLO, "ours": PAIR}, **changes}
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def made_up(
    sweep: Sweep, variant: str, seed: int, losses: list[float], round_tokens: int = 100, **changes: Any
) -> RunResult:
    """Return a result of one of a sweep's runs, with these losses after rounds 1, 2, ..., however many it should have.

    Every peer trains `round_tokens` in a round.
    """
    scenario = sweep.variants[variant].scenarios[seed]
    sent = 0 if scenario.peers == 1 else 2_000_000
    points = [
        Point(round=i, tokens_per_peer=round_tokens * i, bytes_out_per_peer=sent * i, loss=loss)
        for i, loss in enumerate(losses, 1)
    ]
    peer = PeerAccount(
        tokens=round_tokens * len(losses),
        bytes_in=sent,
        bytes_out=sent * len(losses),
        expert_bytes=3_000_000,
        memory_bytes=4_000_000,
    )
    fields = {
        **{"variant": variant, "seed": seed, "scenario": scenario.model_dump(mode="json")},
        **{"evaluations": points, "peers": [peer] * scenario.peers, "virtual_seconds": 10.0},
        **{"wall_seconds": 7.0, "software": __version__, "finished_at": "2026-01-02T03:04:05+00:00"},
    }
    return RunResult(**(fields | changes))


def made_up_sweep(folder: Path, variants: dict[str, Any] | None = None, **changes: Any) -> Sweep:
    """Return a tiny sweep that is not to be run."""
    return load_sweep(write_sweep(folder, variants, **changes))
