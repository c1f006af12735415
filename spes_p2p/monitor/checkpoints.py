"""Checkpoints during a run: written as the model is evaluated, the best and the newest kept, and uploaded.

The watch never waits for an upload. One that fails is said once, and tried again until it works.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from spes_p2p.errors import SpesError
from spes_p2p.fs import link_file, scratch_path
from spes_p2p.monitor.stores import StoreError
from spes_p2p.monitor.uploads import CheckpointManifest, Destination, describe, drop, read_checkpoints, to_keep
from spes_p2p.swarm.manifest import Manifest

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""In a monitor's output."""
RETRY_SECONDS = 60.0
LAST_ATTEMPTS = 5
"""Attempts to upload a run's last model before the monitor ends without."""
CLOSE_SECONDS = 5.0


class Uploads:
    """Uploads one checkpoint after another in a thread: always the newest, then the best if it was skipped.

    Args:
        place: Where to, for messages.
        open: Opens it; called again after a failure.
        keep_last: Newest checkpoints that stay there, besides the best.
        mbit: Rate in 10^6 bits per second, kept on average; None for no limit.
        retry_seconds: Pause after a failure.
    """

    def __init__(
        self,
        place: str,
        open: Callable[[], Destination],
        *,
        keep_last: int,
        mbit: float | None = None,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._place = place
        self._open = open
        self._keep_last = keep_last
        self._mbit = mbit
        self._retry_seconds = retry_seconds
        self._wanted: tuple[Path, CheckpointManifest] | None = None
        self._current: tuple[Path, CheckpointManifest] | None = None
        self._best: tuple[Path, CheckpointManifest] | None = None
        self._sent: set[int] = set()
        """Rounds that were uploaded: none twice, though the store may have kept better ones of an earlier monitor."""
        self._attempts_left = -1
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._is_failing = False
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
        self._thread.start()

    @property
    def folders(self) -> list[Path]:
        """What is being uploaded, and will be next; they must stay."""
        return [each[0] for each in (self._current, self._wanted) if each is not None]

    def start(self, *checkpoints: tuple[Path, CheckpointManifest]) -> None:
        """Upload the last of these checkpoints, each with its folder, in place of one that is not finished."""
        with self._changed:
            for each in checkpoints:
                self._wanted, loss = each, each[1].held_out
                best = self._best[1].held_out if self._best is not None else None
                if loss is not None and (best is None or loss <= best):
                    self._best = each
            self._changed.notify_all()

    def finish(self) -> bool:
        """Wait for what is not finished; tell whether it was uploaded."""
        with self._changed:
            self._attempts_left = LAST_ATTEMPTS
            if self._wanted is not None:
                log.info("uploading round %d to %s", self._wanted[1].round, self._place)
            while self._wanted is not None and self._attempts_left:
                self._changed.wait()
            return self._wanted is None

    def close(self) -> None:
        """Stop between two parts. Idempotent; a process that ends anyway takes the thread with it."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        while not self._stopped.is_set():
            with self._changed:
                while self._wanted is None and not self._stopped.is_set():
                    self._changed.wait()
                wanted = self._current = self._wanted
            if wanted is None:
                return
            try:
                kept = self._upload(*wanted)
            except Exception as error:  # noqa: BLE001 - a store may answer anything, and `finish` waits for this thread
                self._failed(wanted[1], error)
            else:
                with self._changed:
                    self._current = None
                    self._sent.add(wanted[1].round)
                    if self._wanted is wanted:
                        is_there = self._best is None or self._best[1].round in {*kept, *self._sent}
                        self._wanted = None if is_there else self._best  # an upload that took long has skipped it
                    self._changed.notify_all()

    def _upload(self, folder: Path, checkpoint: CheckpointManifest) -> list[int]:
        """Upload a checkpoint; return the rounds that are there."""
        began, destination = time.monotonic(), self._open()
        uploaded = destination.upload(folder, checkpoint, lambda sent: self._pace(began, sent))
        kept = destination.tidy(self._keep_last)
        self._is_failing = False
        log.info(
            "round %d is in %s: %.1f MB sent, %.1f MB there already, %.1f s; it has rounds %s",
            *(checkpoint.round, self._place, uploaded.sent_bytes / 1e6, uploaded.kept_bytes / 1e6),
            *(time.monotonic() - began, ", ".join(map(str, kept))),
        )
        return kept

    def _pace(self, began: float, sent: int) -> None:
        due = began + sent * 8 / (self._mbit * 1e6) if self._mbit else 0.0
        if self._stopped.wait(max(0.0, due - time.monotonic())):
            raise StoreError("this monitor ends")

    def _failed(self, checkpoint: CheckpointManifest, error: Exception) -> None:
        if self._stopped.is_set():
            return
        if not self._is_failing:
            log.warning(
                "cannot upload round %d to %s: %s; the watch goes on, and the newest checkpoint is tried every %.0f s",
                *(checkpoint.round, self._place, error, self._retry_seconds),
                exc_info=None if isinstance(error, OSError | SpesError) else error,  # a bug, or a strange store
            )
        self._is_failing = True
        with self._changed:
            if self._attempts_left > 0:
                self._attempts_left -= 1
            self._changed.notify_all()
        self._stopped.wait(self._retry_seconds)


class Checkpoints:
    """A monitor's checkpoints of a run.

    Args:
        folder: Theirs, in the monitor's output; those of an earlier start count.
        run: The run's manifest.
        save: Writes the model of a round, with its held-out loss, to a folder.
        every: Rounds between them; None for the run's last alone.
        keep_last: Newest ones to keep, besides the best.
        uploads: Where they go; None for nowhere.
    """

    def __init__(
        self,
        folder: Path,
        run: Manifest,
        save: Callable[[Path, int, float | None], object],
        *,
        every: int | None,
        keep_last: int,
        uploads: Uploads | None = None,
    ) -> None:
        self._folder = folder
        self._run = run
        self._save = save
        self._every = every
        self._keep_last = keep_last
        self._uploads = uploads
        found = read_checkpoints(folder)
        self._last = max(found, default=0)
        if uploads is not None:
            uploads.start(*(found[number] for number in sorted(found)))  # of the newest a part may have been sent

    def evaluated(self, round: int, loss: float | None) -> None:
        """Write the model of a round that has been evaluated, if one is due; what goes wrong ends no watch."""
        if self._every is not None and round // self._every > self._last // self._every:
            self.take(round, loss)

    def take(self, round: int, loss: float | None, made: Path | None = None) -> None:
        """Write the model of a round, and delete those that are neither the best nor among the newest.

        Args:
            round: The round.
            loss: Its held-out loss.
            made: A folder that has the checkpoint already.
        """
        target = self._folder / f"round-{round:06d}"
        try:
            if target.exists():
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            with scratch_path(target) as scratch:
                if made is None:
                    self._save(scratch, round, loss)
                else:
                    _link_all(made, scratch)
                run = self._run
                checkpoint = describe(
                    scratch, run_id=run.run_id, manifest=run.digest, founder=run.founder, round=round, held_out=loss
                )
                scratch.rename(target)
            self._last = round
            if self._uploads is not None:
                self._uploads.start((target, checkpoint))
            self._tidy(read_checkpoints(self._folder))
        except (OSError, SpesError) as error:
            log.error("cannot write a checkpoint of round %d: %s; the watch goes on without", round, error)

    def finish(self) -> None:
        """Wait until the newest checkpoint is uploaded."""
        if self._uploads is not None and not self._uploads.finish():
            log.error("the run's last model was not uploaded; it is in %s", self._folder)

    def close(self) -> None:
        """End what is still being uploaded; the next start goes on with it. Idempotent."""
        if self._uploads is not None:
            self._uploads.close()

    def _tidy(self, found: Mapping[int, tuple[Path, CheckpointManifest]]) -> None:
        kept = to_keep((checkpoint for _, checkpoint in found.values()), self._keep_last)
        busy = self._uploads.folders if self._uploads is not None else []
        for number, (folder, _) in found.items():
            if number not in kept and folder not in busy:
                drop(folder)


def _link_all(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.iterdir():
        if not link_file(path, target / path.name):
            shutil.copyfile(path, target / path.name)
