"""The watch: poll the records, feed the sinks, evaluate each new round, and take the last one home."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from enum import Enum

from spes_p2p.config import RoundConfig
from spes_p2p.errors import ExchangeError
from spes_p2p.monitor.archive import Archive
from spes_p2p.monitor.sinks import Sink
from spes_p2p.monitor.view import Snapshot, SwarmView, fold
from spes_p2p.swarm.interface import Swarm
from spes_p2p.swarm.p2p.watchdog import Watchdog
from spes_p2p.swarm.records import Archived, Claim, Metrics, Progress

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


class Watch:
    """Follows a run to its end.

    Polling goes on while a model is pulled and evaluated in another thread: a peer's report of a round is replaced by
    its next one, and what is not read in between is lost.

    Args:
        swarm: The monitor's; in client mode.
        rounds: The run's round settings.
        archive: The swarm's model; used by one thread at a time.
        sink: Where views go.
        view: Where to start: empty, or replayed.
        save: Writes the archive's model as a checkpoint.
        watchdog: Knows whether the records still come from the swarm: without its DHT process a monitor reads for ever
            what it has read last, and without p2pd nothing, as if all peers had gone.
        evaluate_every: Rounds between evaluations.
        poll_seconds: Interval of reading the records.
    """

    def __init__(
        self,
        swarm: Swarm,
        rounds: RoundConfig,
        archive: Archive,
        sink: Sink,
        view: SwarmView,
        *,
        save: Callable[[], None],
        watchdog: Watchdog,
        evaluate_every: int = 1,
        poll_seconds: float = 1.0,
    ) -> None:
        self._swarm, self._rounds, self._archive, self._sink = swarm, rounds, archive, sink
        self._save, self._watchdog = save, watchdog
        self._every, self._poll_seconds = evaluate_every, poll_seconds
        self.view = view
        self._archived = 0 if 0 in view.held_out else -1
        self._job: Future[tuple[int, float | None]] | None = None
        self._retry_at = 0.0
        self._seen_at = time.monotonic()

    def run(self) -> Ending:
        """Follow the run until its last round is archived, its peers or the way to them are gone, or the user stops.

        Raises:
            ConfigError, DataError: the held-out text cannot be read, or the checkpoint not be written.
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
        """Tell whether nothing more will come; a job is waited for, which ends by itself."""
        is_silent = time.monotonic() - self._seen_at > VANISHED_LEASES * self._rounds.lease_seconds
        if self._watchdog.check() if is_silent else self._watchdog.death:
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

    # ------------------------------------------------------------------ the model

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
        last, published = self._archived, self.view.published
        if last < 0:
            return True
        return published > last and (published >= self._rounds.total or published // self._every > last // self._every)

    def _take(
        self, number: int, holders: Mapping[int, Sequence[str]], peers: Sequence[str]
    ) -> tuple[int, float | None]:
        """Bring the archive to a round, evaluate it, and save it if it is the last one; in the job's thread."""
        if number > 0:
            pulled = self._archive.pull(number, holders, peers)
            if pulled.stale:
                log.warning("round %d: slots of older rounds: %s", pulled.round, dict(pulled.stale))
        loss = self._archive.evaluate()
        if self._archive.round >= self._rounds.total:
            self._save()
        return self._archive.round, loss

    def _collect(self) -> int:
        """Take the job's result if there is one; return the newest archived round."""
        if self._job is None or not self._job.done():
            return self._archived
        job, self._job = self._job, None
        try:
            number, loss = job.result()
        except (ExchangeError, OSError) as error:  # a timeout, too, is an OSError
            self._retry_at = time.monotonic() + RETRY_SECONDS
            log.warning("%s; trying again in %.0f s", str(error) or "peers took too long", RETRY_SECONDS)
            return self._archived
        self._archived = number
        if loss is not None and number not in self.view.held_out:
            self.view = self.view.evaluated(number, loss)
            log.info("round %d: held-out loss %.4f", number, loss)
            self._sink.evaluated(self.view, number, loss)
        return self._archived


def _in_thread(work: Callable[[], tuple[int, float | None]]) -> Future[tuple[int, float | None]]:
    """Run `work` in a daemon thread: unlike an executor's, it does not hold up an interrupted process."""
    future: Future[tuple[int, float | None]] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised again where the result is taken
            future.set_exception(error)

    threading.Thread(target=run, name="archive", daemon=True).start()
    return future
