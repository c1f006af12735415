"""What checkpoints cost: training time lost to saving, in the local experiment's settings.

    .venv/bin/python -m benchmarks.checkpointing [--pairs 12] [--output benchmarks/results/checkpointing.json]

One peer's trainer makes a round's steps again and again, and before each round publishes the versions of a whole round
to a store on disk. Every second round is saved as a peer does it: the copy of the optimizer's state before training
goes on, the writing beside it. Saved and unsaved rounds take turns, each pair the other way round than the one before.
On a machine where others are at work the wall's clock says little; a save's own processor time does: where no core is
idle, training lacks so much.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.machine import Circumstances, load_average
from benchmarks.records import write_json
from benchmarks.tables import HEAD, Row, markdown_table
from spes_p2p.cli import entry_point
from spes_p2p.codecs.vectors import to_bytes
from spes_p2p.config import CommandConfig, LogLevel, PositiveInt, RunConfig
from spes_p2p.data.packing import train_sources
from spes_p2p.data.tokenizer import resolve_tokenizer
from spes_p2p.presentation import say
from spes_p2p.swarm.exchange.store import VersionStore
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.build import build_trainer
from spes_p2p.training.checkpoint import PeerCheckpoint, PeerState
from spes_p2p.training.ranks import Ranks
from spes_p2p.training.trainer import Trainer

MAX_LOST = 0.02
RUN_ID = "checkpointing"


class CheckpointingConfig(CommandConfig):
    """Training time lost to checkpointing."""

    config: Path = Path("configs/local_experiment.yaml")
    """YAML file with the run's settings under `run`."""
    run: RunConfig = RunConfig()
    """The run's settings."""
    max_slots: PositiveInt = 8
    """Slots that the peer holds."""
    steps: PositiveInt = 13
    """Local steps of a round: of four peers, a fourth of its tokens."""
    pairs: PositiveInt = 12
    """Rounds with saving, and as many without."""
    directory: Path | None = None
    """Where to save to: a folder on the disk to be measured; by default the system's for temporary files."""
    output: Path = Path("benchmarks/results/checkpointing.json")
    """JSON file to write."""
    cache: Path = Path("~/.cache/spes_p2p")
    """Where tokenizers and tokenised text are kept."""
    log_level: LogLevel = "warning"


@dataclass(frozen=True)
class Round:
    """One round's cost, in seconds.

    Attributes:
        blocked: For which training stood still to be saved.
        wall: Wall time of saves and steps.
        cpu: Of this process meanwhile, its writing thread included.
    """

    blocked: float
    wall: float
    cpu: float


@dataclass(frozen=True)
class Lost:
    """What saving cost.

    Attributes:
        saved: Rounds that were saved.
        unsaved: Those that were not.
        saves: Processor seconds of saves beside which nothing else ran.
        checkpoint_bytes: Of one checkpoint, links left out.
    """

    saved: Sequence[Round]
    unsaved: Sequence[Round]
    saves: Sequence[float]
    checkpoint_bytes: int

    @property
    def blocked(self) -> float:
        """Share of a saved round for which training stood still."""
        return statistics.median(round.blocked / round.wall for round in self.saved)

    @property
    def wall(self) -> float:
        """Share by which saved rounds take longer: what is blocked, and the steps' slowdown while it is written."""
        return statistics.median(a.wall / b.wall for a, b in zip(self.saved, self.unsaved, strict=True)) - 1

    @property
    def cpu(self) -> float:
        """Processor time of a save over that of a round's steps: what is lost where no core is idle.

        Other programs on the machine can take nothing away from it, as they can from the wall's time.
        """
        return statistics.median(self.saves) / statistics.median(round.cpu for round in self.unsaved)


class Peer:
    """A trainer with a version store and a checkpoint on disk, without a swarm."""

    def __init__(self, config: CheckpointingConfig, folder: Path) -> None:
        self._config = config
        self._run = config.run
        self._store = VersionStore(folder / "versions")
        self._checkpoint = PeerCheckpoint(folder)
        self._trainer = _trainer(config)
        self._sizes = Anchors(self._run, {kind: layout.numel for kind, layout in self._trainer.layouts.items()})
        self._round = 0
        self.checkpoint_bytes = 0

    def round(self, is_saved: bool) -> Round:
        """Publish, save if asked to, train; return what the latter two cost."""
        assert self._checkpoint.wait(600)
        self._round += 1
        self._publish()
        began, cpu_began = time.monotonic(), time.process_time()
        if is_saved:
            self._save()
        blocked = time.monotonic() - began
        for _ in range(self._config.steps):
            self._trainer.step(1e-3)
        wall = time.monotonic() - began
        assert self._checkpoint.wait(600)  # what it has not written by now takes processor time from the next round
        return Round(blocked, wall, time.process_time() - cpu_began)

    def save_alone(self) -> float:
        """Publish, and save while nothing is trained; return the processor seconds of the latter."""
        self._round += 1
        self._publish()
        began = time.process_time()
        self._save()
        assert self._checkpoint.wait(600)
        return time.process_time() - began

    def _publish(self) -> None:
        """Make a round's versions: of everything held, and of the others' slots."""
        sizes = self._sizes.bundle_numel()
        slots = [VectorName.of_slot(slot) for slot in range(self._run.model.num_experts)]
        numels = {SHARED: sizes[SHARED], **dict.fromkeys(slots, sizes["slot"])}
        items = {}
        for name, numel in numels.items():
            data = to_bytes(torch.randn(numel))
            items[name] = Version.of(name, self._round, data), data
        self._store.add(items)

    def _save(self) -> None:
        tensors = {f"moments/{name}": tensor for name, tensor in self._trainer.state_tensors().items()}
        self.checkpoint_bytes = sum(tensor.nbytes for tensor in tensors.values())
        versions, trainer = tuple(self._store.newest().values()), self._trainer
        data = trainer.data.state_dict()
        self._checkpoint.save(PeerState(RUN_ID, self._round, trainer.slots, trainer.steps, 0, data, versions), tensors)


def _trainer(config: CheckpointingConfig) -> Trainer:
    run, cache = config.run, config.cache
    tokenizer = resolve_tokenizer(run.data, (), cache)
    data = train_sources(run.data, tokenizer, paths=(), cache=cache)(0)
    trainer = build_trainer(run, len(tokenizer), data, Ranks("cpu"))
    # A trainer's weights come from its run; here any small ones do.
    names = [SHARED, *map(VectorName.of_slot, range(run.num_slots))]
    weights = {name: 0.02 * torch.randn(trainer.layouts[name.kind].numel) for name in names}
    held, others = names[1 : 1 + config.max_slots], [SHARED, *names[1 + config.max_slots :]]
    trainer.set_slots(range(config.max_slots), {name: weights[name] for name in held})
    trainer.load({name: weights[name] for name in others})
    return trainer


def measure(config: CheckpointingConfig) -> Lost:
    """Measure saved and unsaved rounds in turns."""
    torch.set_num_threads(1)
    saved: list[Round] = []
    unsaved: list[Round] = []
    saves: list[float] = []
    with tempfile.TemporaryDirectory(dir=config.directory) as folder:
        peer = Peer(config, Path(folder))
        peer.round(is_saved=True)  # the first use allocates
        for pair in range(config.pairs):
            for is_saved in (True, False) if pair % 2 else (False, True):
                (saved if is_saved else unsaved).append(peer.round(is_saved))
            saves.append(peer.save_alone())
    return Lost(saved, unsaved, saves, peer.checkpoint_bytes)


def rows(lost: Lost) -> Iterator[Row]:
    """Yield the table's rows."""
    what = "training time lost to checkpointing, local experiment, no core idle"
    yield Row(what, f"{lost.cpu:.2%}", f"<= {MAX_LOST:.0%}", lost.cpu <= MAX_LOST)
    yield Row("- for which training stands still", f"{lost.blocked:.2%}")
    yield Row("- wall time of rounds with a checkpoint against rounds without one, alternately", f"{lost.wall:+.2%}")
    yield Row("- bytes written per checkpoint, hard links not counted", f"{lost.checkpoint_bytes / 1e6:.1f} MB")


def main(config: CheckpointingConfig) -> int:
    """Measure, and say what came of it; return the exit code."""
    load_before = load_average()
    lost = measure(config)
    found = list(rows(lost))
    say(markdown_table(HEAD, [row.cells for row in found]))
    figures = {
        "rows": [row._asdict() for row in found],
        "saved": [asdict(round) for round in lost.saved],
        "unsaved": [asdict(round) for round in lost.unsaved],
        "saves_cpu_seconds": list(lost.saves),
    }
    write_json(config.output, Circumstances.now(load_before, None), **figures)
    return 0


if __name__ == "__main__":
    entry_point(CheckpointingConfig, main)
