"""What starting from a checkpoint and fine-tuning it cost and reach, against transformers and peft.

    .venv/bin/python -m benchmarks.tuning [--only memory --only loading ...] [--output benchmarks/results]

Each part is measured by itself; `--output` keeps what other runs have measured of the other parts.

Memory is a process's own: it is read from `/proc/self`, and each case has a process. Times are CPU seconds of one
thread, because others may be at work on the machine. The swarm's runs are simulated, with the real trainer, rounds and
codecs, over a base that is trained here on the Python standard library's own text; the text to adapt to is the same
text in capital letters.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.machine import Circumstances, load_average
from benchmarks.tables import HEAD, Row, markdown_table
from spes_p2p.cli import entry_point
from spes_p2p.config import (
    AdapterConfig,
    CommandConfig,
    DataConfig,
    LogLevel,
    MachineConfig,
    ModelConfig,
    PositiveInt,
    RunConfig,
    TrainConfig,
)
from spes_p2p.data.packing import train_sources
from spes_p2p.data.sources import split_documents
from spes_p2p.data.tokenizer import resolve_tokenizer
from spes_p2p.model.adapted import InitialFactors, build_adapted
from spes_p2p.model.build import build_slot_model, outline
from spes_p2p.model.export import INDEX, save_checkpoint
from spes_p2p.model.start import StartWeights, model_of
from spes_p2p.planner.memory import Setup, base_bytes
from spes_p2p.planner.size import model_size, run_size
from spes_p2p.planner.traffic import round_traffic
from spes_p2p.presentation import say
from spes_p2p.sim.simulator import Scenario, SimulationResult, simulate
from spes_p2p.training.build import build_trainer
from spes_p2p.training.ranks import Ranks
from spes_p2p.training.trainer import Trainer

MIB = 2**20
MAX_MEMORY, MAX_RECOMPUTED, MAX_STEP = 0.6, 0.3, 0.7
MAX_BF16, MAX_INT8 = 1.15, 1.2
MAX_SHARE, MAX_LOSS = 0.01, 1.02
MAX_FIRST_SECONDS, CONVERSATIONS = 60, 200
TOKENS, WARM_UP, STEPS = 512, 2, 5
Part = Literal["memory", "loading", "bytes", "dense", "mixture", "first"]
PARTS: tuple[Part, ...] = get_args(Part)


class TuningConfig(CommandConfig):
    """Checkpoints and adapters, measured."""

    only: list[Part] = [*PARTS]
    """Parts to measure."""
    rounds: PositiveInt = 12
    """Rounds of the simulated runs."""
    output: Path | None = None
    """Folder in which to leave the figures."""
    cache: Path = Path("~/.cache/spes_p2p")
    """Where tokenizers and tokenised text are kept."""
    log_level: LogLevel = "warning"


def main(config: TuningConfig) -> int:
    """Measure, print and write the figures; return the exit code."""
    parts: Mapping[Part, Callable[[Path], Iterator[Row]]] = {
        "memory": memory_rows,
        "loading": loading_rows,
        "bytes": traffic_rows,
        "dense": lambda folder: swarm_rows(folder, "dense", config),
        "mixture": lambda folder: swarm_rows(folder, "mixture", config),
        "first": lambda folder: first_rows(folder, config),
    }
    for part in config.only:
        load, rows = load_average(), []
        with tempfile.TemporaryDirectory(prefix="tuning-") as folder:
            for row in parts[part](Path(folder)):
                rows.append(row)
                say(" | ".join(row.cells))
        if config.output is not None:
            _write(config.output, part, rows, Circumstances.now(load, None))
    return 0


def _write(folder: Path, part: Part, rows: Sequence[Row], circumstances: Circumstances) -> None:
    """Put a part's rows in place of older ones, and write the table of all parts."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "tuning.json"
    measured = json.loads(file.read_text()) if file.exists() else {}
    measured[part] = {"rows": [row._asdict() for row in rows], "circumstances": asdict(circumstances)}
    measured = {each: measured[each] for each in PARTS if each in measured}
    file.write_text(json.dumps(measured, indent=1) + "\n")
    cells = [Row(**row).cells for found in measured.values() for row in found["rows"]]
    where = {each: Circumstances(**found["circumstances"]).where for each, found in measured.items()}
    lines = [f"- {each}: {place}" for each, place in where.items()]
    text = "\n".join(["# Fine-tuning", "", "Times are CPU seconds of one thread.", "", *lines])
    (folder / "tuning.md").write_text(f"{text}\n\n{markdown_table(HEAD, cells)}")


# ---------------------------------------------------------------------- memory and time of a step


def memory_rows(folder: Path) -> Iterator[Row]:
    """Yield the memory and the CPU time of a step of expert adapters, against peft's."""
    source = _write_moe(folder / "facts", num_layers=4, hidden=512, inner=512, experts=16, dtype=torch.float32)
    cases = {
        (kind, again): _in_child(_steps, kind, source, again) for kind in ("ours", "peft") for again in (False, True)
    }
    (own, own_seconds), (theirs, their_seconds) = cases["ours", False], cases["peft", False]
    (own_again, again_seconds), (their_again, _) = cases["ours", True], cases["peft", True]
    shape = f"16 experts of 512 in 4 layers of width 512, {TOKENS} tokens, rank 8"
    yield Row(f"expert LoRA, {shape}: MiB above the loaded base, ours / peft's", f"{own:.0f} / {theirs:.0f}")
    yield _at_most("- ratio", own / theirs, MAX_MEMORY)
    yield Row("- with recomputation, MiB", f"{own_again:.0f} / {their_again:.0f}")
    yield _at_most("- ours with recomputation / peft's plain", own_again / theirs, MAX_RECOMPUTED)
    yield Row("- CPU seconds of a step, ours / peft's", f"{own_seconds:.2f} / {their_seconds:.2f}")
    yield _at_most("- ratio", own_seconds / their_seconds, MAX_STEP)
    yield Row("- ours with recomputation, CPU seconds", f"{again_seconds:.2f}")


def _at_most(figure: str, ratio: float, most: float) -> Row:
    return Row(figure, f"{ratio:.4f}" if most < 0.1 else f"{ratio:.3f}", f"<= {most}", ratio <= most)


def _in_child(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def _steps(kind: str, source: Path, recomputes: bool) -> tuple[float, float]:
    """Train some steps; return the peak in MiB over the loaded model, and the CPU seconds of a step."""
    torch.set_num_threads(1)
    tokens = torch.randint(256, (1, TOKENS + 1))
    step = (_own_step if kind == "ours" else _peft_step)(source, recomputes, tokens)
    loaded = _rss()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    seconds = []
    for number in range(WARM_UP + STEPS):
        began = time.process_time()
        step()
        if number >= WARM_UP:
            seconds.append(time.process_time() - began)
    return (_rss("VmHWM") - loaded) / MIB, sorted(seconds)[len(seconds) // 2]


def _rss(field: str = "VmRSS") -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def _own_step(source: Path, recomputes: bool, tokens: torch.Tensor) -> Callable[[], Any]:
    run = _run_over(source, TOKENS, targets=["experts"])
    base = StartWeights(source, outline(run.model, 256, TOKENS))
    model = build_adapted(run, base, vocab_size=256, storage="fp32")
    model.load_shared(InitialFactors(model, 0).read(None))
    machine = MachineConfig(activation_checkpointing=recomputes)
    trainer = Trainer(model, run.train, _Same(tokens), Ranks("cpu"), machine)
    return lambda: trainer.step(1e-3)


class _Same:
    """A token source of one batch."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens = tokens

    def next_batch(self, num_sequences: int) -> Any:
        assert num_sequences == len(self._tokens)
        return self._tokens

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def _peft_step(source: Path, recomputes: bool, tokens: torch.Tensor) -> Callable[[], Any]:
    from peft import LoraConfig, get_peft_model

    names = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    settings = LoraConfig(r=8, lora_alpha=16, target_modules=[], target_parameters=names)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), settings)
    model.train()
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    def step() -> None:
        logits = model(tokens[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _run_over(source: Path, sequence_length: int, **adapter: Any) -> RunConfig:
    train = TrainConfig(batch_size=1, balance_loss=0.0, router_z_loss=0.0)
    data = DataConfig(sequence_length=sequence_length)
    return RunConfig(model=model_of(source), data=data, train=train, adapter=AdapterConfig(**adapter))


def _write_moe(folder: Path, *, num_layers: int, hidden: int, inner: int, experts: int, dtype: torch.dtype) -> Path:
    """Write a Qwen3-MoE with random weights, a file for each layer."""
    settings: dict[str, Any] = {
        **{"vocab_size": 1024, "hidden_size": hidden, "intermediate_size": inner, "moe_intermediate_size": inner},
        **{"num_hidden_layers": num_layers, "num_attention_heads": 8, "num_key_value_heads": 8},
        **{"head_dim": hidden // 8, "num_experts": experts, "num_experts_per_tok": 2, "max_position_embeddings": 1024},
        **{"architectures": ["Qwen3MoeForCausalLM"], "pad_token_id": None, "tie_word_embeddings": True},
        "dtype": str(dtype).removeprefix("torch."),
    }
    config = Qwen3MoeConfig(**settings)
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()}
    where: dict[str, str] = {}
    for layer in (None, *range(num_layers)):
        tensors: dict[str, torch.Tensor] = {}
        for name, shape in shapes.items():
            is_here = name.startswith(f"model.layers.{layer}.") if layer is not None else "layers" not in name
            if not is_here or name == "lm_head.weight":
                continue
            if ".experts." not in name:
                drawn = torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape)
                tensors[name] = drawn.to(dtype)
                continue
            prefix, _, kind = name.rpartition(".")
            for expert in range(experts):
                for part in ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",):
                    size = (inner, hidden) if part != "down_proj" else (hidden, inner)
                    tensors[f"{prefix}.{expert}.{part}.weight"] = (0.02 * torch.randn(size)).to(dtype)
        file = f"model-{layer}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


# ---------------------------------------------------------------------- loading


def loading_rows(folder: Path) -> Iterator[Row]:
    """Yield the peak memory of loading a checkpoint of 1.4 GB, over what is kept of it, and against transformers."""
    source = _write_moe(folder / "large", num_layers=9, hidden=1024, inner=768, experts=32, dtype=torch.bfloat16)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    stock = _in_child(_load, "stock", source)[0]
    yield Row(f"loading {size / 1e9:.2f} GB of bf16: peak PSS by from_pretrained in fp32, MiB", f"{stock / MIB:.0f}")
    for storage, most in (("bf16", MAX_BF16), ("int8", MAX_INT8)):
        peak, kept = _in_child(_load, storage, source)
        yield Row(
            f"- as a frozen base in {storage}: peak PSS and what is kept, MiB", f"{peak / MIB:.0f}, {kept / MIB:.0f}"
        )
        yield _at_most("  - ratio", peak / kept, most)
        yield _at_most("  - against from_pretrained", peak / stock, 0.5)


def _load(how: str, source: Path) -> tuple[int, int]:
    """Load a checkpoint; return the peak of the process's PSS above that before, and the bytes that are kept."""
    torch.set_num_threads(1)
    run = _run_over(source, 128, targets=["attention"])
    outline(run.model, 1024, 128)  # imports and allocates what it must
    before, peak, done = _pss(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, _pss())

    watcher = threading.Thread(target=watch)
    watcher.start()
    if how == "stock":
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        kept = sum(parameter.nbytes for parameter in model.parameters())
    else:
        base = StartWeights(source, outline(run.model, 1024, 128))
        machine = MachineConfig(storage=how)  # type: ignore[arg-type]
        data = _Same(torch.zeros(1, 129, dtype=torch.long))
        model = build_trainer(run, 1024, data, Ranks("cpu"), machine=machine, base=base)
        kept = base_bytes(run_size(run, 1024), how)  # type: ignore[arg-type]
    done.set()
    watcher.join()
    assert model is not None
    return max(peak, _pss()) - before, kept


def _pss() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])


# ---------------------------------------------------------------------- bytes of a round


def traffic_rows(folder: Path) -> Iterator[Row]:
    """Yield the bytes that a peer sends in a round, planned for OLMoE-1B-7B, with adapters and without."""
    model = ModelConfig(
        hidden_size=2048,
        num_layers=16,
        num_heads=16,
        num_kv_heads=16,
        intermediate_size=1024,
        num_experts=64,
        top_k=8,
        tie_embeddings=False,
    )
    vocab, peers = 50_304, 4
    whole, setup = RunConfig(model=model), Setup.of(RunConfig(model=model), MachineConfig(), None)
    full = round_traffic(model_size(whole.model, vocab), 64, peers, setup).total
    for name, adapter in (
        ("attention and all experts", AdapterConfig()),
        ("attention", AdapterConfig(targets=["attention"])),
    ):
        run = RunConfig(model=model, adapter=adapter)
        sent = round_traffic(run_size(run, vocab), 0, peers, Setup.of(run, MachineConfig(), None)).total
        yield Row(f"bytes a round, OLMoE-1B-7B, {peers} peers, rank 8: {name}", f"{sent / 1e6:.1f} MB")
        yield _at_most("- over those of all parameters, all slots held", sent / full, MAX_SHARE)


# ---------------------------------------------------------------------- the swarm against one process


BASES: Mapping[str, Mapping[str, Any]] = {
    "dense": {"family": "llama", "num_experts": 0, "top_k": 0, "intermediate_size": 192},
    "mixture": {"family": "olmoe", "num_experts": 8, "top_k": 2, "intermediate_size": 96},
}
CASES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "dense": {"a dense model": {}},
    "mixture": {
        "experts by slots, two holders": {"experts": "slots"},
        "attention only": {"targets": ["attention"]},
        "all experts everywhere": {},
    },
}
SEQUENCE, VOCAB, BATCH, LOCAL_STEPS = 64, 1024, 4, 8


def swarm_rows(folder: Path, kind: str, config: TuningConfig) -> Iterator[Row]:
    """Yield the held-out loss of three peers' adapters, of one process with their batches, and of each peer alone."""
    texts, source = _texts(folder), _pretrained(folder / kind, kind, config)
    for name, adapter in CASES[kind].items():
        yield from _swarm_rows(name, source, texts, adapter, config)


def _swarm_rows(
    name: str, source: Path, texts: Sequence[Path], adapter: Mapping[str, Any], config: TuningConfig
) -> Iterator[Row]:
    def run(peers: int, batch: int, seed: int = 0, **more: Any) -> float:
        settings = {
            "data": {"source": "files", "sequence_length": SEQUENCE, "held_out_fraction": 0.1},
            "train": {"batch_size": batch, "lr": 1e-2, "weight_decay": 0.0},
            "adapter": dict(adapter),
            "round": {"mode": "steps", "steps": LOCAL_STEPS, "total": config.rounds},
        }
        scenario = Scenario(
            run=RunConfig.model_validate(settings),
            peers=peers,
            text=list(texts),
            start_from=source,
            threads=1,
            max_slots=8 if peers == 1 else [6, 5, 5],  # each of the 8 slots, if there are any, has two holders
            evaluate_rounds=config.rounds,
            held_out_tokens=16_384,
            seed=seed,
            **more,
        )
        result: SimulationResult = simulate(scenario, cache=config.cache)
        return result.evaluations[-1].loss

    swarm, together = run(3, BATCH), run(1, 3 * BATCH)
    alone = [run(1, BATCH, seed) for seed in range(3)]
    yield Row(
        f"LoRA of 3 peers, {name}: held-out loss of the swarm, of one process with their batches, of each alone",
        f"{swarm:.4f}, {together:.4f}, {', '.join(f'{loss:.4f}' for loss in alone)}",
    )
    yield _at_most("  - swarm / one process", swarm / together, MAX_LOSS)
    yield Row("  - below each alone", f"{min(alone) - swarm:.4f}", "> 0", swarm < min(alone))


def _texts(folder: Path) -> list[Path]:
    """Write text of another style than the base's: the standard library's in capital letters."""
    path = folder / "capitals.jsonl"
    with path.open("w") as file:
        for number, document in enumerate(split_documents(DataConfig(), [], held_out=False)):
            if number % 7 == 0:
                file.write(json.dumps({"text": document.text[:4000].upper()}) + "\n")
            if number > 2000:
                break
    return [path]


def _pretrained(folder: Path, kind: str, config: TuningConfig, steps: int = 400) -> Path:
    """Train a small base on the standard library's text, and save it with its tokenizer."""
    data = DataConfig(sequence_length=SEQUENCE, vocab_size=VOCAB)
    shape = {"hidden_size": 96, "num_layers": 3, "num_heads": 4, "num_kv_heads": 4, **BASES[kind]}
    train = TrainConfig(batch_size=16, lr=3e-3)
    tokenizer = resolve_tokenizer(data, [], config.cache)
    model = build_slot_model(
        ModelConfig.model_validate(shape),
        vocab_size=len(tokenizer),
        sequence_length=SEQUENCE,
        seed=0,
        claimed=range(shape["num_experts"]),
        storage="fp32",
    )
    source = train_sources(data, tokenizer, paths=[], cache=config.cache)(0)
    trainer = Trainer(model, train, source, Ranks("cpu"))
    for step in range(steps):
        trainer.step(3e-3 * min(1.0, (step + 1) / 40) * (1 - 0.9 * step / steps))
    save_checkpoint(model, folder, tokenizer=tokenizer)
    return folder


# ---------------------------------------------------------------------- the first round


def first_rows(folder: Path, config: TuningConfig) -> Iterator[Row]:
    """Yield how long one command takes from nothing to the end of its first round, with a small model."""
    source, chats = _pretrained(folder / "base", "mixture", config, steps=0), folder / "chats.jsonl"
    with chats.open("w") as file:
        for number in range(CONVERSATIONS):
            asked = {"role": "user", "content": f"What is {number} plus {number}?"}
            replied = {"role": "assistant", "content": f"It is {2 * number}, my friend."}
            file.write(json.dumps({"messages": [asked, replied]}) + "\n")
    words = ["--run-id", "first", "--from", source, "--adapter", "lora", "--data", chats, "--output", folder / "peer"]
    words += ["--cache", folder / "cache", "--run.round.total", "1", "--seed-seconds", "0", "--host", "127.0.0.1"]
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "spes_p2p", "peer", *map(str, words)], check=True, timeout=600)
    seconds = time.monotonic() - began
    figure = f"seconds from nothing to the first round of adapters, small mixture, {CONVERSATIONS} conversations"
    yield Row(figure, f"{seconds:.0f}", f"<= {MAX_FIRST_SECONDS}", seconds <= MAX_FIRST_SECONDS)


if __name__ == "__main__":
    entry_point(TuningConfig, main)
