"""Checkpoints during a run: written as the model is evaluated, the best and the newest kept, and uploaded.

The watch never waits for an upload. One that fails logs one warning, and is tried again until it works.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spes_p2p.errors import SpesError
from spes_p2p.fs import digest_of_file, link_file, scratch_path, write_atomic
from spes_p2p.monitor.uploads import INFO_FILE, SUMS_FILE, Checkpoint, Store, StoreError, open_place, to_keep
from spes_p2p.swarm.manifest import Manifest

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""In a monitor's output."""
LAST_ATTEMPTS = 5
"""Attempts to upload a run's last model before the monitor ends without."""
CLOSE_SECONDS = 5.0


class Checkpoints:
    """A monitor's checkpoints of a run; a thread uploads those to keep, the newest first.

    `save` writes the model of a round, with its held-out loss, to a folder. Without `every`, only the run's last model
    becomes a checkpoint. The best and the newest `keep_last` are kept, here and at the `upload` place.
    """

    def __init__(
        self,
        folder: Path,
        run: Manifest,
        save: Callable[[Path, int, float | None], object],
        *,
        every: int | None,
        keep_last: int,
        upload: str | None = None,
        retry_seconds: float = 60.0,
    ) -> None:
        self._folder = folder
        self._run = run
        self._save = save
        self._every = every
        self._keep_last = keep_last
        self._place = upload
        self._retry_seconds = retry_seconds
        here = self._here()
        self._last = max(here, default=0)
        self._busy: int | None = None
        """The round that is being uploaded; its folder must stay."""
        self._asked, self._done = max(here, default=-1), -1
        """Newest round of which an upload was asked, and with which one has ended."""
        self._attempts_left = -1
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
        if upload is not None:
            self._thread.start()

    def evaluated(self, round: int, loss: float | None) -> None:
        """Write the model of a round that has been evaluated, if one is due; what goes wrong ends no watch."""
        if self._every is not None and round // self._every > self._last // self._every:
            self.take(round, loss)

    def take(self, round: int, loss: float | None, made: Path | None = None) -> None:
        """Write the model of a round, or link it from the folder where it is already; delete what is not kept."""
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
                describe(scratch, self._run, round, loss)
                scratch.rename(target)
            self._last = round
            with self._changed:  # else the thread would begin with a folder that is deleted here
                self._asked = round
                self._changed.notify_all()
                busy = () if self._busy is None else (self._busy,)
                Store(str(self._folder)).tidy({*to_keep(self._here().values(), self._keep_last), *busy})
        except (OSError, SpesError) as error:
            log.error("cannot write a checkpoint of round %d: %s; the watch goes on without", round, error)

    def finish(self) -> None:
        """Wait until the checkpoints to keep are uploaded, for a few attempts."""
        with self._changed:
            self._attempts_left = LAST_ATTEMPTS
            if not self._is_done():
                log.info("uploading round %d to %s", self._asked, self._place)
            self._changed.wait_for(lambda: self._is_done() or not self._attempts_left)
            if not self._is_done():
                log.error("the run's last model was not uploaded; it is in %s", self._folder)

    def close(self) -> None:
        """Stop between two files; the next start resumes the upload. Idempotent.

        A process that ends anyway takes the thread with it.
        """
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    def _here(self) -> dict[int, Checkpoint]:
        return Store(str(self._folder)).checkpoints() if self._folder.is_dir() else {}

    def _is_done(self) -> bool:
        return self._place is None or self._done == self._asked

    def _work(self) -> None:
        is_failing = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped.is_set() or not self._is_done())
                asked = self._asked
            if self._stopped.is_set():
                return
            try:
                self._upload()
            except BaseException as error:  # a panic of obstore too: `finish` waits for this thread
                if not is_failing and not self._stopped.is_set():
                    log.warning(
                        "cannot upload round %s to %s: %s; the watch goes on, and an upload is tried every %.0f s",
                        *(self._busy or asked, self._place, error, self._retry_seconds),
                        exc_info=None if isinstance(error, OSError | SpesError) else error,  # a bug
                    )
                is_failing = True
                with self._changed:
                    self._attempts_left -= self._attempts_left > 0
                    self._changed.notify_all()
                self._stopped.wait(self._retry_seconds)
            else:
                is_failing = False
                with self._changed:
                    self._done = asked
                    self._changed.notify_all()
            finally:
                self._busy = None

    def _upload(self) -> None:
        """Upload what is to be kept, and delete the rest there, until nothing is missing there."""
        assert self._place is not None
        place = open_place(self._place)
        sent: set[int] = set()
        while not self._stopped.is_set():
            there, began = place.checkpoints(), time.monotonic()
            if any(each.manifest != self._run.digest for each in there.values()):
                raise StoreError(f"{self._place} has checkpoints of another run; name another place with --upload")
            place.tidy(to_keep(there.values(), self._keep_last))
            with self._changed:
                here = self._here()
                wanted = to_keep({**there, **here}.values(), self._keep_last) & here.keys() - there.keys() - sent
                if not wanted:
                    return
                self._busy = max(wanted)
            num_bytes = place.upload(self._folder / here[self._busy].name, self._stopped)
            sent.add(self._busy)
            seconds = time.monotonic() - began
            log.info("round %d is in %s: %.1f MB in %.1f s", self._busy, self._place, num_bytes / 1e6, seconds)


def describe(folder: Path, run: Manifest, round: int, held_out: float | None) -> None:
    """Write SHA256SUMS and checkpoint.json of the model in a folder."""
    files = sorted(path for path in folder.iterdir() if path.name not in (INFO_FILE, SUMS_FILE))
    with write_atomic(folder / SUMS_FILE) as file:
        file.writelines(f"{digest_of_file(path)}  {path.name}\n".encode() for path in files)
    loss = held_out if held_out is not None and math.isfinite(held_out) else None
    facts: Mapping[str, Any] = {
        "run_id": run.run_id,
        "manifest": run.digest,
        "founder": run.founder,
        "round": round,
        "held_out": loss,
    }
    made = Checkpoint(**facts, written_at=time.time(), sums=digest_of_file(folder / SUMS_FILE))
    with write_atomic(folder / INFO_FILE) as file:
        file.write(made.model_dump_json().encode())


def _link_all(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.iterdir():
        if not link_file(path, target / path.name):
            shutil.copyfile(path, target / path.name)
