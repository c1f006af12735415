"""Memory that a trained model takes, each measured in a process of its own, beside what the planner says.

Counted is the resident set above that of the interpreter with everything imported and used once, after two steps and
with the last gradients in place: weights, gradients, optimizer state and frozen experts, without activations.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import psutil
import torch

from benchmarks.cluster import ROOT
from benchmarks.tables import Row
from spes_p2p.config import ModelConfig, OptimizerName, Storage, TrainConfig
from spes_p2p.model.build import build_slot_model
from spes_p2p.model.loss import TrainingLoss
from spes_p2p.optim.inner import InnerOptimizer
from spes_p2p.planner.memory import Setup, peer_memory
from spes_p2p.planner.size import model_size

MODEL = ModelConfig(hidden_size=512, num_layers=4, num_heads=8, num_kv_heads=8, intermediate_size=512)
"""The shape of the facts: 16 experts, top 2, 57 M parameters."""
VOCAB, SEQUENCE = 4096, 64
STORAGES: tuple[Storage, ...] = ("fp32", "bf16", "int8", "nf4")
CLAIMED = (16, 4, 2)
MAX_ERROR, MAX_SHARE = 0.03, 0.20
MIB = 2**20
# Large blocks go back to the system when they are freed, so that the resident set is what is in use.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Case:
    """One way to train the model.

    Attributes:
        storage: Storage format of the frozen experts.
        claimed: Slots trained, of 16.
        optimizer: Inner optimizer.
    """

    storage: Storage
    claimed: int
    optimizer: OptimizerName

    def planned(self) -> int:
        """Return the planner's bytes."""
        setup = Setup(storage=self.storage, optimizer=self.optimizer)
        return peer_memory(model_size(MODEL, VOCAB), self.claimed, setup).static_bytes

    def measured(self) -> int:
        """Return the bytes that a fresh process needs."""
        environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.memory", json.dumps(asdict(self))]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        return int(done.stdout.splitlines()[-1])


def resident_bytes() -> int:
    """Return this process's resident set, after giving back what is free."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def steps(case: Case, model: ModelConfig) -> object:
    """Train two steps and return what must stay in memory, gradients included."""
    claimed = range(case.claimed * model.num_experts // MODEL.num_experts)
    slots = list(claimed)
    built = build_slot_model(
        model, vocab_size=VOCAB, sequence_length=SEQUENCE, seed=0, claimed=slots, storage=case.storage
    )
    train = TrainConfig(optimizer=case.optimizer)
    loss = TrainingLoss(built, train)
    optimizer = InnerOptimizer(built.shared_parameters(), {s: built.slot_parameters(s) for s in slots}, train)
    tokens_BT1 = torch.randint(VOCAB, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        optimizer.zero_grad()
        loss(tokens_BT1).total.backward()
        optimizer.step(1e-3)
    return loss, optimizer


def child(case: Case) -> int:
    """Return the bytes that training takes in this process."""
    torch.set_num_threads(1)
    small = MODEL.model_copy(update={"hidden_size": 64, "intermediate_size": 64, "num_layers": 1})
    steps(case, small)  # libraries allocate at their first use
    before = resident_bytes()
    kept = steps(case, MODEL)
    after = resident_bytes()
    del kept
    return after - before


def rows() -> Iterator[Row]:
    """Measure; yield the rows of memory."""
    everything = Case("fp32", 16, "adamw")
    yield _row(everything, whole := everything.measured())
    for storage in STORAGES:
        for claimed in CLAIMED[1:]:
            yield _row(case := Case(storage, claimed, "adamw"), case.measured())
    least = Case("int8", 2, "adamw8bit")
    yield _row(least, small := least.measured())
    yield Row("- that, against all slots in fp32 AdamW", f"{small / whole:.3f}", "0.20", small <= MAX_SHARE * whole)


def _row(case: Case, measured: int) -> Row:
    planned = case.planned()
    error = measured / planned - 1
    slots = f"{case.claimed} of 16 slots" + (f", the others in {case.storage}" if case.claimed < 16 else "")
    text = f"{measured / MIB:,.0f} / {planned / MIB:,.0f} MiB ({error:+.1%})"
    return Row(f"memory, measured / planned: {slots}, {case.optimizer}", text, "3 %", abs(error) <= MAX_ERROR)


def main(arguments: Sequence[str]) -> None:
    """Measure one case, and print its bytes; or, without a case, all of them as a table."""
    if arguments:
        print(child(Case(**json.loads(arguments[0]))))
        return
    for row in rows():
        print(*row.cells, sep="  ")


if __name__ == "__main__":
    main(sys.argv[1:])
