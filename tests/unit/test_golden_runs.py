"""A dozen small runs end, bit for bit, in the digests on record: a change that should change nothing changes none.

A part that differs says what has moved: `digests` the weights, `reports` what peers say of their rounds, `times` the
virtual seconds, `blame` the peers that were left out or accused, `losses` the held-out losses, `traffic` the bytes.

After a change that should change results, rewrite them and say in the commit why they differ:
`SPES_REWRITE_GOLDENS=1 python -m pytest -m "" tests/unit/test_golden_runs.py`, without `-n`.

This file is a program, too: `python tests/unit/test_golden_runs.py` measures the runs named on its standard input.
"""

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import math
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from lanes import sample

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "golden" / "digests.json"
REWRITE = "SPES_REWRITE_GOLDENS"
ARITHMETIC = {
    **{"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    **{"OPENBLAS_CORETYPE": "Nehalem", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"},
}
"""Environment in which x86-64 processors of all makes compute the same bits, as far as libraries let them."""
FORK = multiprocessing.get_context("fork")

SETTINGS = {
    "model": {
        **{"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 8},
        **{"num_experts": 4, "top_k": 2},
    },
    "data": {"source": "files", "sequence_length": 16, "vocab_size": 300, "held_out_fraction": 0.3},
    "train": {"batch_size": 4, "lr": 1e-2},
    "round": {
        **{"mode": "steps", "steps": 3, "total": 3, "min_peers": 1, "max_seconds": 60, "exchange_seconds": 20},
        **{"matchmaking_seconds": 2.0, "averaging_seconds": 20, "lease_seconds": 6.0, "heartbeat_seconds": 2.0},
    },
}
FEW_BITS = {"shared": "int4", "slots": "int4", "moments": "int8", "moments_interval": 2}
BY_TIME = {"mode": "tokens", "tokens": 800, "min_seconds": 1.0}
UNEQUAL = [64.0, 100.0, 150.0]
CHURN = [
    {"peer": 3, "kind": "join", "round": 2},
    {"peer": 4, "kind": "join", "round": 4},
    {"peer": 0, "kind": "leave", "round": 3},
    {"peer": 1, "kind": "kill", "round": 5, "after_seconds": 1.5},
    {"peer": 2, "kind": "pause", "round": 2, "seconds": 9.0},
]
SIMULATED: dict[str, dict[str, Any]] = {
    "plain": {},
    "by-time": {"run": {"round": BY_TIME}, "speeds": UNEQUAL, "evaluate_rounds": 1},
    "int4": {"run": {"codecs": FEW_BITS, "round": {"total": 4}}},
    "int8-by-time": {"run": {"codecs": {"shared": "int8", "slots": "int4"}, "round": BY_TIME}, "speeds": UNEQUAL},
    "churn": {"run": {"round": {"total": 9, "steps": 2}}, "peers": 5, "events": CHURN, "evaluate_rounds": 3},
    "moments-local": {"run": {"outer": {"moments": "local"}}},
    "moments-local-one-copy": {"run": {"outer": {"moments": "local"}, "round": {"copies": 1}}},
    "moments-second": {"run": {"outer": {"moments": "second"}, "codecs": {"moments": "bf16"}}},
    "moments-both": {"run": {"outer": {"moments": "both"}, "codecs": {"moments": "int8"}}},
    "attacker-scale": {
        "run": {"round": {"total": 4}},
        "peers": 4,
        "attacks": [{"peer": 1, "kind": "scale", "factor": 300.0, "from_round": 1}],
    },
    "attacker-lying-reducer": {
        "run": {"round": {"total": 4, "steps": 2}, "model": {"num_layers": 1}},
        "peers": 5,
        "max_slots": 1,
        "attacks": [{"peer": 1, "kind": "lying_reducer", "factor": 1000.0, "from_round": 1}],
    },
    "attacker-left-out": {  # by the majority: the vector is large enough that every peer reduces a part of it
        "run": {"round": {"total": 5, "steps": 1}, "model": {"hidden_size": 96, "num_layers": 1, "num_experts": 2}},
        "peers": 5,
        "attacks": [{"peer": 1, "kind": "nan", "groups": "shared", "from_round": 1}],
    },
    "nesterov": {"run": {"outer": {"optimizer": "nesterov"}}},
    "merge": {"run": {"merge": {"alpha": 0.2, "interval_rounds": 2, "decay_rounds": 4, "top_k": 2}}},
    "refresh-budget": {"machine": {"refresh_slots": 1}, "max_slots": 1, "run": {"round": {"total": 5}}},
    "frozen-fp32": {"run": {"frozen_storage": "fp32", "codecs": FEW_BITS}},
    "frozen-int8": {"run": {"frozen_storage": "int8"}},
    "frozen-nf4": {"run": {"frozen_storage": "nf4"}},
}
"""What differs from three peers of two slots each: settings of the run and of all machines, and of the scenario."""
FULL = ("int4", "int8-by-time", "moments-local-one-copy", "moments-second", "attacker-lying-reducer")
FULL += ("refresh-budget", "frozen-int8")
"""Runs of the full lane: each has one setting more or less than another one here, and half of all the time."""
NEEDS_BITSANDBYTES = {"frozen-nf4"}
SECONDS = ("tokens_per_second", "train_seconds", "matchmaking_seconds", "averaging_seconds", "exchange_seconds")
SECONDS += ("other_seconds",)
"""Of a report: virtual in a simulation, and the clock's elsewhere."""


def settings(changes: Mapping[str, Mapping[str, Any]]) -> Any:
    from spes_p2p.config import RunConfig

    changed = {key: {**values, **changes.get(key, {})} for key, values in SETTINGS.items()}
    return RunConfig.model_validate({**changes, **changed})


def simulated(folder: Path, *, run: Mapping[str, Any] | None = None, machine: Mapping[str, Any] | None = None, **rest):
    """Run a scenario; return what is to be compared."""
    from spes_p2p.sim.simulator import Scenario, simulate

    if machine:
        set_machine(machine)
    corpus = folder / "corpus.jsonl"
    corpus.write_text(
        "\n".join(f'{{"text": "{n} plus {n} is {2 * n}, and {n % 7} is left of it"}}' for n in range(400))
    )
    common = {"peers": 3, "max_slots": 2, "speeds": 64.0, "threads": 1, "evaluate_rounds": 100, "device": "cpu"}
    fields = {**common, "run": settings(run or {}).model_dump(), "text": [corpus], **rest}
    result = simulate(Scenario.model_validate(fields), cache=folder / "cache")
    reports = [[report.model_dump(mode="json") for report in own] for own in result.reports]
    return {
        "digests": result.digests,
        "reports": [without_seconds(reports), result.begun_rounds, result.slots],
        "times": [[[report[key] for key in SECONDS] for report in own] for own in reports] + [result.virtual_seconds],
        "blame": [result.left_out, result.accused],
        "losses": [(each.round, each.tokens_per_peer, repr(each.loss)) for each in result.evaluations],
        "traffic": [result.bytes_in, result.bytes_out],
    }


def set_machine(values: Mapping[str, Any]) -> None:
    """Change the default machine of this process, as a scenario has no machines of its own."""
    from spes_p2p.config import MachineConfig

    for name, value in values.items():
        MachineConfig.model_fields[name].default = value
    MachineConfig.model_rebuild(force=True)


class Kept:
    """In place of a peer's checkpoint: keeps the newest in memory."""

    def __init__(self) -> None:
        self.state: Any = None
        self.tensors: dict[str, Any] = {}

    def is_kept(self, round: int) -> bool:
        return False

    def wait(self, seconds: float) -> bool:
        return True

    def save(self, state: Any, tensors: Mapping[str, Any]) -> None:
        from spes_p2p.codecs.paged import PagedVector

        plain = {name: each.whole() if isinstance(each, PagedVector) else each for name, each in tensors.items()}
        self.state, self.tensors = state, {name: tensor.clone() for name, tensor in plain.items()}

    def on_disk(self) -> bytes:
        """Return the state's file, which has the digest of the tensors' file in it."""
        from safetensors.torch import save

        from spes_p2p.training.checkpoint import encode_state

        return encode_state(self.state, hashlib.sha256(save(self.tensors)).hexdigest())


class Interrupted(Exception):
    """Ends a peer after a round."""


def lone_peer(
    run: Any, folder: Path, *, shard: str = "ddp", kept: Kept | None = None, until: int = 99
) -> dict[str, Any]:
    """Run all ranks' share of one peer; return what is to be compared, of the leader.

    Args:
        run: The run's settings.
        folder: The peer's; one that was interrupted there goes on from `kept`.
        shard: How ranks share the work.
        kept: Where the peer is saved.
        until: The round after which it is interrupted.
    """
    from virtual import VOCAB, RandomTokens, peer_id

    from spes_p2p.config import MachineConfig
    from spes_p2p.sim.network import VirtualNetwork
    from spes_p2p.sim.peer import VirtualSwarm
    from spes_p2p.swarm.certificate import genesis
    from spes_p2p.training.build import build_initial, build_synchroniser, build_trainer
    from spes_p2p.training.checkpoint import Saved
    from spes_p2p.training.ranks import Ranks
    from spes_p2p.training.round import TrainingLoop

    ranks = Ranks("cpu")
    ranks.connect()
    machine = MachineConfig(shard=shard)
    ticks = itertools.count()  # a clock that runs while the peer waits, though there are no other peers
    clock = lambda: 0.05 * next(ticks)  # noqa: E731
    trainer = build_trainer(run, VOCAB, RandomTokens(0, 16), ranks, machine=machine, clock=clock)
    if not ranks.is_leader:
        ranks.obey(trainer)
        trainer.close()
        ranks.close()
        return {}
    reports, saved = [], None
    network = VirtualNetwork()
    swarm = VirtualSwarm(network.node(peer_id(0), "run"), folder)
    sync = build_synchroniser(swarm, run, trainer, run_id="run", max_slots=3, machine=machine)
    start, is_new = genesis("run", peer_id(0), "0" * 64, run.num_slots, map(peer_id, range(16))), not swarm.versions()
    swarm.enter(run.round, sync.anchors.vectors(), start, max_slots=3, is_new=is_new)
    initial = lambda: build_initial(run, VOCAB, sync.anchors, trainer.layouts)  # noqa: E731
    if not is_new:
        sync.held.resume(kept.state.slots)
        initial, saved = None, Saved(kept.state, kept.tensors)

    def report(metrics: Any) -> None:
        reports.append(metrics.model_dump(mode="json"))
        if metrics.round == until:
            raise Interrupted

    with ranks.leading():
        rounds = TrainingLoop(run, trainer, sync, checkpoint=kept)
        rounds.open(initial, saved)
        with contextlib.suppress(Interrupted):
            rounds.run(report)
        weights = {name: trainer.vector(name) for name in trainer.names}
        moments = trainer.state_tensors()
    trainer.close()
    ranks.close()
    network.close()
    return {
        "digests": {name: version.digest for name, version in swarm.versions().items()},
        "reports": without_seconds([reports]),
        "weights": {name: bits(tensor) for name, tensor in weights.items()},
        "moments": {name: bits(tensor) for name, tensor in moments.items()},
    }


def resumed(folder: Path) -> dict[str, Any]:
    """A peer that was interrupted after its second round goes on from its checkpoint."""
    run = settings({"codecs": FEW_BITS, "outer": {"optimizer": "nesterov"}, "round": {"total": 4}})
    kept = Kept()
    until = lone_peer(run, folder, kept=kept, until=2)
    saved = kept.on_disk()
    since = lone_peer(run, folder, kept=kept)
    return {**since, "before": until, "saved": saved.decode(), "saved_last": kept.on_disk().decode()}


def sharded(folder: Path) -> dict[str, Any]:
    """Two ranks train the run of one peer, each with a part of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [FORK.Process(target=rank_main, args=(rank, port, folder)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    return json.loads((folder / "leader.json").read_text())


def rank_main(rank: int, port: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    measured = lone_peer(settings({"round": {"total": 2}}), folder, shard="fsdp")
    if measured:
        (folder / "leader.json").write_text(json.dumps(measured))


RUNS: dict[str, Callable[[Path], dict[str, Any]]] = {"resume": resumed, "fsdp": sharded}
NAMES = (*SIMULATED, *RUNS)


def measure(name: str) -> dict[str, str]:
    """Return a digest of each part of what a run ends in, or of this machine's arithmetic."""
    if name == "probe":
        return probe()
    with tempfile.TemporaryDirectory() as folder:
        parts = RUNS[name](Path(folder)) if name in RUNS else simulated(Path(folder), **SIMULATED[name])
    return {part: short(json.dumps(value, sort_keys=True).encode()) for part, value in parts.items()}


def without_seconds(reports: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    return [[{key: value for key, value in each.items() if key not in SECONDS} for each in own] for own in reports]


def bits(tensor: Any) -> str:
    return short(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.detach().contiguous().numpy().tobytes())


def short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def probe() -> dict[str, str]:
    """Return the versions of what computes, and digests of what it makes of fixed numbers."""
    made = {name: installed(name) for name in ("torch", "transformers", "tokenizers")}
    made["operations"] = short("".join(map(bits, operations())).encode() + repr(math.cos(0.3) * math.exp(0.7)).encode())
    made["bitsandbytes"] = installed("bitsandbytes")
    if made["bitsandbytes"]:
        made["nf4"] = short("".join(map(bits, four_bits())).encode())
    return made


def installed(package: str) -> str:
    try:
        return importlib.metadata.version(package).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def operations() -> Iterable[Any]:
    """Yield what torch makes of the operations of which a training step consists."""
    import torch
    import torch.nn.functional as F

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    for rows, inner, columns in ((64, 16, 300), (64, 16, 8), (3, 5, 7), (128, 64, 128), (64, 300, 16)):
        yield draw(rows, inner) @ draw(inner, columns)
        yield F.linear(draw(rows, inner), draw(columns, inner))
        yield torch.bmm(draw(4, rows, inner), draw(4, inner, columns))
    values = draw(64, 300)
    yield from (values.softmax(-1), values.exp(), values.logsumexp(-1), values.cos(), values.sin(), F.silu(values))
    yield from (torch.rsqrt(values.square().mean(-1) + 1e-5), values.sum(), values.norm(), values.abs().amax(-1))
    yield from (
        values.bfloat16().float(),
        values.round(),
        values.cumsum(-1),
        values / 7,
        torch.lerp(values, -values, 0.3),
    )
    yield from values.topk(2)
    yield torch.zeros(9, 300).index_add(0, torch.arange(64) % 9, values)
    yield F.scaled_dot_product_attention(*(draw(4, 2, 16, 8) for _ in range(3)), is_causal=True)
    weight = draw(300, 16).requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        loss = F.cross_entropy(F.silu(draw(64, 16)) @ weight.T, torch.arange(64))
        loss.backward()
        yield torch.nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()
        yield from (loss, weight, weight.grad)
        optimizer.zero_grad()


def four_bits() -> Iterable[Any]:
    """Yield what bitsandbytes decodes from nf4; the program encodes it itself."""
    import torch
    from bitsandbytes import functional

    packed = torch.arange(256, dtype=torch.uint8).repeat(2)
    scales, code = torch.rand(16, generator=torch.Generator().manual_seed(0)), functional.get_4bit_type("nf4", "cpu")
    for dtype in (torch.float32, torch.bfloat16):
        state = functional.QuantState(scales, torch.Size((16, 64)), code, blocksize=64, quant_type="nf4", dtype=dtype)
        yield functional.dequantize_4bit(packed.view(-1, 1), state).float()


def main() -> None:
    """Answer each name on standard input with a line of JSON.

    Each is measured in a fork, in which no other has left anything, and nothing needs to be imported again.
    """
    warm_up()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        child = FORK.Process(target=answer, args=(line.strip(), answers))
        child.start()
        child.join()
        if child.exitcode:
            answers.write(json.dumps({"exit code": str(child.exitcode)}) + "\n")
            answers.flush()


def warm_up() -> None:
    """Import what the first peer would import; a process that had gone through a backward pass could not fork."""
    import torch.distributed.fsdp  # noqa: F401
    from virtual import make_peer, tiny_run

    import spes_p2p.sim.simulator  # noqa: F401

    peer = make_peer(tiny_run(), 2)
    peer.initial()
    peer.world.close()
    if installed("bitsandbytes"):
        list(four_bits())


def answer(name: str, answers: Any) -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)  # a peer's checkpoint holds the state of torch's generator
    measured = json.dumps(measure(name))
    answers.write(f"{measured}\n")
    answers.flush()


class Worker:
    """That process.

    Args:
        log: A file for its errors.
    """

    def __init__(self, log: Path) -> None:
        path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, **ARITHMETIC, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def measure(self, name: str) -> dict[str, str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line and "exit code" not in line, f"{name} failed: {line}{self._log.read_text()[-4000:]}"
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    worker = Worker(tmp_path_factory.mktemp("golden") / "errors.txt")
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def arithmetic(worker):
    return worker.measure("probe")


@pytest.fixture(scope="module")
def rewritten(arithmetic, request):
    """What is measured, to be on record from now on; None unless REWRITE is set."""
    if not os.environ.get(REWRITE):
        yield None
        return
    assert "PYTEST_XDIST_WORKER" not in os.environ, f"two processes would write {RECORD.name}; leave out -n"
    assert not request.config.getoption("markexpr"), 'those of the full lane would keep their old digests; add -m ""'
    measured: dict[str, dict[str, str]] = {}
    yield measured
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    old = record.get("runs", {}) if record.get("probe") == arithmetic else {}
    runs = {name: run for name in NAMES if (run := measured.get(name, old.get(name)))}
    RECORD.write_text(json.dumps({"probe": arithmetic, "runs": runs}, indent=1) + "\n")


def of_this_run(probe: Mapping[str, str], name: str) -> dict[str, str]:
    """Return the part of a probe on which a run's result depends."""
    return {
        key: value for key, value in probe.items() if name in NEEDS_BITSANDBYTES or key not in ("bitsandbytes", "nf4")
    }


@pytest.mark.parametrize("name", sample(NAMES, set(NAMES) - set(FULL)))
def test_a_simulated_run_ends_in_the_digests_on_record(name, worker, arithmetic, rewritten):
    if name in NEEDS_BITSANDBYTES and not arithmetic["bitsandbytes"]:
        pytest.skip("bitsandbytes is not installed")
    if rewritten is not None:
        rewritten[name] = worker.measure(name)
        return
    record = json.loads(RECORD.read_text())
    here, there = of_this_run(arithmetic, name), of_this_run(record["probe"], name)
    if here != there:
        pytest.skip(
            f"this machine's arithmetic {here} is not that of the record, {there}; "
            f"rewrite it with {REWRITE}=1 on an unchanged commit, then compare"
        )
    assert worker.measure(name) == record["runs"][name]


def test_every_run_is_on_record_and_nothing_else(rewritten):
    if rewritten is None:
        assert list(json.loads(RECORD.read_text())["runs"]) == list(NAMES)


if __name__ == "__main__":
    main()
