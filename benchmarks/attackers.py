"""What one dishonest peer of eight can do to a run: the model's loss, and how soon it is left out.

    .venv/bin/python benchmarks/attackers.py

Each attack in turn, in the simulator: the real trainer, rounds, reducers and bans, at as many tokens as the same swarm
undisturbed. Runs that are in the results are not made again; delete the file to make them all.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args
from unittest import mock

from torch import Tensor

from benchmarks.records import say_rows
from benchmarks.tables import Row
from spes_p2p.cli import entry_point
from spes_p2p.commands.simulate import Spread
from spes_p2p.config import CommandConfig
from spes_p2p.errors import SimulationError
from spes_p2p.presentation import say
from spes_p2p.sim.attacks import Attack
from spes_p2p.sim.scenario import Scenario
from spes_p2p.sim.simulator import simulate
from spes_p2p.swarm.names import VectorName
from spes_p2p.training.loss_gate import LossGate

RESULTS = Path("benchmarks/results/attackers.json")
SEEDS = (0, 1, 2)
ATTACKER, FIRST, FACTOR, SOLE_FACTOR = 2, 3, 100.0, 1e4
"""The attacker, its first round, its factor, and its factor on slots that it alone holds."""
UNDISTURBED = "undisturbed"
SOLE_UNDISTURBED, SOLE, SOLE_UNGATED = "sole undisturbed", "sole scale", "sole scale ungated"
"""Runs in which each slot has one holder, whose deltas no other peer sees."""
EXCLUDABLE = ("sign_flip", "scale", "nan", "noise", "moments", "lying_reducer")
"""Those that bring what no honest peer would; the rest does no more harm than one that is absent."""
MAX_WORSE, MAX_ROUNDS, MAX_REJECTED = 2.0, 2, 1.0
"""Per cent, rounds, per cent."""
SMALL: Mapping[str, tuple[int, int, Sequence[str]]] = {
    "2 friends": (2, 2, ()),
    "3 friends": (3, 3, ()),
    "5 friends": (5, 5, ()),
    "2 friends and a flipped delta": (3, 2, ("sign_flip", "inflate")),
    "3 friends and a flipped delta": (4, 3, ("sign_flip", "inflate")),
    "2 friends and a tiny delta": (3, 2, ("scale", "inflate")),
    "3 friends and a tiny delta": (4, 3, ("scale", "inflate")),
    "2 friends and a liar that reduces": (3, 2, ("lying_reducer",)),
    "a founder and 2 strangers": (3, 1, ()),
    "a founder and 4 strangers": (5, 1, ()),
}
"""Peers of a small run, those of them that vote, and what the last of them does."""
SMALL_ROWS = (
    *((what, what.partition(" and")[0], MAX_WORSE) for what, (_, _, attacks) in SMALL.items() if attacks),
    ("a founder and 2 strangers", "3 friends", None),
    ("a founder and 4 strangers", "5 friends", 3.0),
)
"""Runs, those that they are compared with at as many tokens of each honest peer, and by how many per cent at most."""
LIES = {"inflate": 1e6, "scale": 1e-6}
PEERS = 8
RUN: Mapping[str, Any] = {
    "model": {
        **{"family": "olmoe", "hidden_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2},
        **{"intermediate_size": 32, "num_experts": 8, "top_k": 2},
    },
    "data": {"source": "embedded", "vocab_size": 2048, "sequence_length": 64},
    "train": {"batch_size": 2, "lr": 6e-3, "warmup_rounds": 1},
    "round": {"mode": "steps", "steps": 8, "total": 16},
    "outer": {"moments": "both"},
    "frozen_storage": "fp32",
}


class AttackersBenchmarkConfig(CommandConfig):
    """What one dishonest peer of eight can do."""

    results: Path = RESULTS
    """Where each run's figures are kept."""


def main(config: AttackersBenchmarkConfig) -> int:
    """Make the runs that are missing, and print the rows; return 1 if a goal was missed."""
    document = json.loads(config.results.read_text()) if config.results.exists() else {"runs": {}}
    for seed in SEEDS:
        for kind in (UNDISTURBED, *kinds(), SOLE_UNDISTURBED, SOLE, SOLE_UNGATED, *SMALL):
            if f"{kind} {seed}" not in document["runs"]:
                document["runs"][f"{kind} {seed}"] = run = measure(kind, seed)
                config.results.write_text(json.dumps(document, indent=1) + "\n")
                what = f"loss {run['loss']:.4f}" if "ended" not in run else run["ended"]
                say(f"{kind} {seed}: {what}, left out from round {run['left_out_from']}")
    rows = say_rows(attacker_rows(document))
    return 0 if all(row.is_reached is not False for row in rows) else 1


def kinds() -> tuple[str, ...]:
    """Return all attacks."""
    return get_args(Attack.model_fields["kind"].annotation)


def scenario(kind: str, seed: int) -> Scenario:
    """Return a run of eight peers with one attacker, or without one; or a small run, whose peers train all slots."""
    settings: dict[str, Any] = {"run": RUN, "seed": seed, "threads": 1, "evaluate_rounds": 100, "held_out_tokens": 8192}
    if kind in SMALL:
        peers, voters, told = SMALL[kind]
        lies = [{"peer": peers - 1, "kind": each, "factor": LIES.get(each, 1.0)} for each in told]
        return Scenario.model_validate({**settings, "peers": peers, "voters": voters, "attacks": lies})
    attack = {"peer": ATTACKER, "kind": kind, "from_round": FIRST, "factor": FACTOR}
    if is_sole := kind in (SOLE_UNDISTURBED, SOLE, SOLE_UNGATED):
        attack |= {"kind": "scale", "groups": "slots", "factor": SOLE_FACTOR}
    attacks = [attack] if kind in (*kinds(), SOLE, SOLE_UNGATED) else []
    return Scenario.model_validate({**settings, "peers": PEERS, "max_slots": 1 if is_sole else 2, "attacks": attacks})


def measure(kind: str, seed: int) -> dict[str, Any]:
    """Return what came of a run, which has no loss if it did not live to its end."""
    run = scenario(kind, seed)
    try:
        with mock.patch.object(LossGate, "load", _ungated) if kind == SOLE_UNGATED else contextlib.nullcontext():
            result = simulate(run)
    except SimulationError as error:
        return {**{"loss": None, "left_out_from": None, "rejected": 0, "contributions": 0}, "ended": str(error)}
    attackers = {attack.peer for attack in run.attacks}
    honest = [peer for peer in range(run.peers) if peer not in attackers]
    rejected = {(round, peer) for round, peers in result.accused.items() for peer in peers if peer in honest}
    rejected |= {(round, peer) for round, peers in result.left_out.items() for peer in peers if peer in honest}
    return {
        "loss": result.evaluations[-1].loss,
        "left_out_from": min((round for round, peers in result.left_out.items() if attackers & {*peers}), default=None),
        "rejected": len(rejected),
        "contributions": len(honest) * len(result.left_out),
    }


def attacker_rows(document: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the table's rows; of attacks that have been run at least once."""
    for kind in kinds():
        yield from _attack_rows(kind, document["runs"])
    yield from _sole_rows(document["runs"])
    yield from small_rows(document["runs"])
    yield from _honest_rows(document["runs"])


def _honest_rows(runs: Mapping[str, Any]) -> Iterator[Row]:
    rejected, contributions = (sum(run[what] for run in runs.values()) for what in ("rejected", "contributions"))
    share = 100 * rejected / max(contributions, 1)
    figure = f"{share:.2f} % ({rejected} of {contributions})"
    yield Row("honest contributions accused or left out", figure, f"< {MAX_REJECTED:g} %", share < MAX_REJECTED)


def _attack_rows(kind: str, runs: Mapping[str, Any]) -> Iterator[Row]:
    seeds = [seed for seed in SEEDS if f"{kind} {seed}" in runs]
    if not seeds:
        return
    worse = _worse(kind, UNDISTURBED, seeds, runs)
    what = f"{kind}: held-out loss against undisturbed, equal tokens, {len(seeds)} seeds"
    yield Row(what, _figure(worse), f"+{MAX_WORSE:g} %", worse.mean <= MAX_WORSE)
    counted = [_rounds(runs[f"{kind} {seed}"]) for seed in seeds]
    figure = ", ".join("never left out" if rounds is None else f"{rounds}" for rounds in counted)
    what = f"{kind}: rounds in which it took part before it was left out"
    if kind in EXCLUDABLE:
        is_reached = all(rounds is not None and rounds <= MAX_ROUNDS for rounds in counted)
        yield Row(what, figure, f"<= {MAX_ROUNDS}", is_reached)
    else:
        yield Row(what, figure)


def _sole_rows(runs: Mapping[str, Any]) -> Iterator[Row]:
    """Yield what the only holder of a slot can do to it, and what it could without the loss gate."""
    seeds = [seed for seed in SEEDS if f"{SOLE} {seed}" in runs]
    if not seeds:
        return
    worse = _worse(SOLE, SOLE_UNDISTURBED, seeds, runs)
    counted = [_rounds(runs[f"{SOLE} {seed}"]) for seed in seeds]
    most = max(math.inf if count is None else count for count in counted)
    what = (
        f"held-out loss if a slot's only holder scales its delta by {SOLE_FACTOR:g}, equal tokens, {len(seeds)} seeds"
    )
    yield Row(what, _figure(worse), f"+{MAX_WORSE:g} %", worse.mean <= MAX_WORSE)
    yield Row(
        "- rounds in which it took part before it was left out", f"{most:g}", f"<= {MAX_ROUNDS}", most <= MAX_ROUNDS
    )
    ungated = [seed for seed in seeds if f"{SOLE_UNGATED} {seed}" in runs]
    if ungated:
        yield Row("- without the loss gate", _figure(_worse(SOLE_UNGATED, SOLE_UNDISTURBED, ungated, runs)))


def small_rows(runs: Mapping[str, Any]) -> Iterator[Row]:
    """Yield what those that may not vote do to small runs."""
    for kind, other, most in SMALL_ROWS:
        seeds = [seed for seed in SEEDS if f"{kind} {seed}" in runs]
        if seeds:
            worse = _worse(kind, other, seeds, runs)
            what = f"{kind}: held-out loss against {other}, equal tokens, {len(seeds)} seeds"
            yield Row(what, _figure(worse), *(() if most is None else (f"+{most:g} %", worse.mean <= most)))


def _rounds(run: Mapping[str, Any]) -> int | None:
    """Return in how many rounds an attacker took part before it was left out; None if it never was."""
    return None if run["left_out_from"] is None else run["left_out_from"] - FIRST - 1


def _worse(kind: str, other: str, seeds: list[int], runs: Mapping[str, Any]) -> Spread:
    losses = {seed: [runs[f"{of} {seed}"]["loss"] for of in (kind, other)] for seed in seeds}
    ratios = {seed: math.inf if None in pair else pair[0] / pair[1] for seed, pair in losses.items()}
    return Spread({seed: 100 * (ratio - 1) for seed, ratio in ratios.items()})


def _figure(worse: Spread) -> str:
    if ended := sum(map(math.isinf, worse.values.values())):
        return f"{ended} of {len(worse.values)} runs ended early"
    return f"{worse.mean:+.2f} %" + (f" ± {worse.deviation:.2f}" if worse.deviation is not None else "")


def _ungated(gate: LossGate, vectors: Mapping[VectorName, Tensor], adopted: Collection[VectorName] = ()) -> None:
    gate._trainer.load(vectors)


if __name__ == "__main__":
    entry_point(AttackersBenchmarkConfig, main)
