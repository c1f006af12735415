"""The watch: poll the swarm's records, feed the sinks, evaluate each new round, and save the last round's model."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torch import LongTensor

from spes_p2p.config import RoundConfig
from spes_p2p.errors import ExchangeError
from spes_p2p.model.build import hf_config
from spes_p2p.model.export import save_checkpoint
from spes_p2p.model.loss import held_out_loss
from spes_p2p.monitor.sinks import Sink
from spes_p2p.monitor.view import Snapshot, SwarmView, fold
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.manifest import Manifest
from spes_p2p.swarm.names import SHARED, VectorName, by_reason
from spes_p2p.swarm.records import Archived, Claim, Metrics, Progress
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.build import WholeModel

log = logging.getLogger(__name__)

VANISHED_LEASES = 2
"""Lease times without a single claim after which the swarm counts as gone."""
RETRY_SECONDS = 5.0


class Ending(Enum):
    """How a watch ended."""

    FINISHED = "finished: the last round is archived"
    VANISHED = "ended early: all peers are gone"
    CUT_OFF = "cut off: this monitor's own p2pd or DHT process has died"
    STOPPED = "stopped by its user before the last round"


@dataclass(frozen=True)
class PullPlan:
    """The peers to ask for each version.

    Attributes:
        current: Peers by name, for versions of the round wanted.
        older: Peers by name by round, for slots that have no version of that round yet, or never will.
    """

    current: dict[VectorName, list[str]]
    older: dict[int, dict[VectorName, list[str]]]


def plan_pull(
    round: int, inventory: Mapping[str, Mapping[str, Version]], holders: Mapping[int, Sequence[str]], num_slots: int
) -> PullPlan:
    """Return the peers to ask for the model of `round`.

    Only peers with the shared version that most peers have are asked: a peer that offers a false `shared` may offer
    false slots too.
    """
    offers = {
        peer: (versions[SHARED].round, versions[SHARED].digest)
        for peer, versions in inventory.items()
        if SHARED in versions and versions[SHARED].round >= round
    }
    counts = Counter(offers.values())
    # Between two rounds the swarm offers two versions, both honest; of equal counts the older one is complete.
    agreed = min(counts, key=lambda offer: (-counts[offer], offer)) if counts else None
    trusted = sorted(peer for peer, offer in offers.items() if offer == agreed)
    plan = PullPlan(current={SHARED: trusted} if trusted else {}, older={})
    for slot in range(num_slots):
        name = VectorName.of_slot(slot)
        rounds = {peer: inventory[peer][name].round for peer in trusted if name in inventory[peer]}
        if fresh := [peer for peer, number in rounds.items() if number >= round]:
            plan.current[name] = fresh
            continue
        if about_to_publish := [peer for peer in holders.get(slot, ()) if peer in trusted]:
            plan.current[name] = about_to_publish
        if rounds:
            newest = max(rounds.values())
            plan.older.setdefault(newest, {})[name] = [peer for peer, number in rounds.items() if number == newest]
    return plan


class Archive:
    """The swarm's whole model in fp32 on the CPU: pulled, evaluated on held-out text, saved as a checkpoint.

    At first it is the anchor of round 0, as the run's seed draws it.

    Args:
        swarm: Source of the versions.
        manifest: The run's manifest.
        held_out: Makes the held-out batches `[B, T + 1]` when the first evaluation needs them; an empty list
            evaluates nothing.

    Attributes:
        anchors: Sizes of the run's versions, and how a published delta advances one; holds no values.
        round: Round of the shared parameters.
    """

    def __init__(
        self, swarm: HivemindSwarm, manifest: Manifest, held_out: Callable[[], Sequence[LongTensor]] = list
    ) -> None:
        self._swarm = swarm
        self._run = manifest.config
        self._vocab_size = manifest.vocab_size
        self._held_out = held_out
        self._batches: Sequence[LongTensor] | None = None
        self._model = WholeModel(self._run, manifest.vocab_size)
        self.anchors = Anchors(self._run, self._model.numels)
        self.round = 0

    @property
    def has_versions(self) -> bool:
        """Whether the versions directory holds a model to load."""
        return SHARED in self._swarm.versions()

    def pull(self, round: int, holders: Mapping[int, Sequence[str]], peers: Sequence[str]) -> None:
        """Bring the model to `round`, or to a later round if the swarm has moved on.

        A slot without a version of that round (an orphan, or its holder died) comes in its newest version.

        Args:
            round: Round wanted.
            holders: Peers that train each slot.
            peers: All peers to ask.

        Raises:
            ExchangeError: no peer sent the shared parameters; the model stays as it was.
        """
        inventory = self._swarm.inventory(peers) if peers else {}
        plan = plan_pull(round, inventory, holders, self._run.model.num_experts)
        failures = dict(self._swarm.pull(plan.current, min_round=round, timeout=self._run.round.exchange_seconds))
        if SHARED in failures or SHARED not in plan.current:
            raise ExchangeError(f"no shared version of round {round}: {failures.get(SHARED, 'no peer has it')}")
        for older, wanted in sorted(plan.older.items()):
            self._pull_older(older, {n: p for n, p in wanted.items() if n in failures or n not in plan.current})
        for reason, names in by_reason(failures).items():
            log.warning("no version of %s of round %d: %s", names, round, reason)
        self.load()

    def _pull_older(self, round: int, wanted: Mapping[VectorName, Sequence[str]]) -> None:
        own = self._swarm.versions()
        missing = {name: peers for name, peers in wanted.items() if name not in own or own[name].round < round}
        if missing:
            failures = self._swarm.pull(missing, min_round=round, timeout=self._run.round.exchange_seconds)
            for reason, names in by_reason(failures).items():
                log.warning("no version of %s, not even of round %d: %s", names, round, reason)

    def load(self) -> None:
        """Load the versions directory; slots without a version keep their values.

        Raises:
            ExchangeError: the shared parameters are missing, or a file is damaged.
        """
        rounds = self._model.load(self._swarm)
        self.round = self._swarm.versions()[SHARED].round
        if stale := {slot: number for slot, number in rounds.items() if number < self.round}:
            log.warning("round %d: slots of older rounds: %s", self.round, stale)

    def evaluate(self) -> float | None:
        """Return the model's held-out loss in nats per token; None without held-out text.

        Raises:
            ConfigError, DataError: the held-out text cannot be read.
        """
        if self._batches is None:
            self._batches = self._held_out()
        return held_out_loss(self._model.module, self._batches) if self._batches else None

    def save(self, directory: Path, tokenizer: Any = None) -> None:
        """Write the model as a Hugging Face checkpoint, whole or not at all; see `save_checkpoint`."""
        config = hf_config(self._run.model, self._vocab_size, self._run.data.sequence_length)
        save_checkpoint(config, self._model.stock_state_dict(), directory, tokenizer)


class Watch:
    """Follows a run to its end.

    A model is pulled and evaluated in another thread while polling goes on: each report replaces the peer's previous
    one in the DHT, so a report that is not read in time is lost.

    Args:
        swarm: The monitor's own, in client mode. Its watchdog tells silence of the swarm from a failure of this
            machine: without its DHT process a monitor reads old records for ever, and without p2pd it reads none.
        rounds: The run's round settings.
        archive: The swarm's model; used by one thread at a time.
        sink: Receives each view.
        view: Where to start: empty, or replayed.
        save: Writes the archive's model as a checkpoint.
        evaluated: Is told each round whose model has been evaluated, except the first and the last, in the thread that
            uses the archive.
        evaluate_every: Rounds between evaluations.
        poll_seconds: Interval of reading the records.
    """

    def __init__(
        self,
        swarm: HivemindSwarm,
        rounds: RoundConfig,
        archive: Archive,
        sink: Sink,
        view: SwarmView,
        *,
        save: Callable[[], None],
        evaluated: Callable[[int], None] | None = None,
        evaluate_every: int = 1,
        poll_seconds: float = 1.0,
    ) -> None:
        self._swarm = swarm
        self._rounds = rounds
        self._archive = archive
        self._sink = sink
        self._save = save
        self._evaluated = evaluated
        self._evaluate_every = evaluate_every
        self._poll_seconds = poll_seconds
        self.view = view
        self._archived = 0 if 0 in view.held_out else -1
        self._job: Future[tuple[int, float | None]] | None = None
        self._retry_at = 0.0
        self._seen_at = time.monotonic()

    def run(self) -> Ending:
        """Follow the run until its last round is archived, the swarm is gone or out of reach, or the user stops.

        Raises:
            ConfigError, DataError: the held-out text cannot be read, or the checkpoint cannot be written.
        """
        while True:
            self._poll()
            if self._collect() >= self._rounds.total:
                self._swarm.report(Archived(peer_id=self._swarm.peer_id, round=self._archived))
                return Ending.FINISHED
            if self._job is None and (ending := self._lost()):
                return ending
            self._start_job()
            if self._swarm.wait(self._poll_seconds):
                return Ending.STOPPED

    def _lost(self) -> Ending | None:
        """Tell whether the swarm is gone or out of reach; called without a job, since a job ends by itself."""
        is_silent = time.monotonic() - self._seen_at > VANISHED_LEASES * self._rounds.lease_seconds
        watchdog = self._swarm.watchdog
        if watchdog.check() if is_silent else watchdog.death:
            return Ending.CUT_OFF
        return Ending.VANISHED if is_silent else None

    def _poll(self) -> None:
        try:
            claims, progress, metrics = (self._swarm.read(kind) for kind in (Claim, Progress, Metrics))
        except TimeoutError:
            log.warning("the DHT did not answer; reading its records again in %.1f s", self._poll_seconds)
            return
        if claims:
            self._seen_at = time.monotonic()
        # Each record was validated as its kind when it was read.
        self.view = fold(self.view, Snapshot(self._swarm.now(), claims, progress, metrics))  # type: ignore[arg-type]
        self._sink.update(self.view)

    def _start_job(self) -> None:
        if self._job is not None or time.monotonic() < self._retry_at or not self._is_due():
            return
        number = self.view.published if self._archived >= 0 else 0
        holders: dict[int, list[str]] = {}
        for peer in self.view.active:
            for slot in peer.slots:
                holders.setdefault(slot, []).append(peer.peer_id)
        peers = [peer.peer_id for peer in self.view.peers.values() if peer.state != "left"]
        self._job = _in_thread(lambda: self._take(number, holders, peers))

    def _is_due(self) -> bool:
        last, published, every = self._archived, self.view.published, self._evaluate_every
        if last < 0:
            return True
        return published > last and (published >= self._rounds.total or published // every > last // every)

    def _take(
        self, number: int, holders: Mapping[int, Sequence[str]], peers: Sequence[str]
    ) -> tuple[int, float | None]:
        """Bring the archive to a round, evaluate it, and save it after the last round; in the job's thread."""
        if number > 0:
            self._archive.pull(number, holders, peers)
        loss = self._archive.evaluate()
        if self._archive.round >= self._rounds.total:
            self._save()
        elif self._archive.round > 0 and self._evaluated is not None:
            self._evaluated(self._archive.round)
        return self._archive.round, loss

    def _collect(self) -> int:
        """Take the job's result if there is one; return the newest archived round."""
        if self._job is None or not self._job.done():
            return self._archived
        job, self._job = self._job, None
        try:
            number, loss = job.result()
        except (ExchangeError, OSError) as error:  # a TimeoutError is an OSError
            self._retry_at = time.monotonic() + RETRY_SECONDS
            log.warning("%s; trying again in %.0f s", str(error) or "peers took too long", RETRY_SECONDS)
            return self._archived
        self._archived = number
        if loss is not None and number not in self.view.held_out:
            self.view = self.view.evaluated(number, loss)
            self._sink.evaluated(self.view, number, loss)
        return self._archived


def _in_thread(work: Callable[[], tuple[int, float | None]]) -> Future[tuple[int, float | None]]:
    """Run `work` in a daemon thread: unlike an executor's, it does not hold up an interrupted process."""
    future: Future[tuple[int, float | None]] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again by `Future.result`
            future.set_exception(error)

    threading.Thread(target=run, name="archive", daemon=True).start()
    return future
