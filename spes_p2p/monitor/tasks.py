"""lm-eval tasks on the swarm's model during a run, as `spes evaluate` runs them, in a process of their own.

The process shares nothing with the monitor but files: a task that fails, hangs or takes all memory costs the monitor no
record, no held-out loss and no model.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from spes_p2p.errors import SpesError

log = logging.getLogger(__name__)

TASKS_DIRECTORY = "tasks"
END_SECONDS = 10.0
"""Time that a process has to end once it has been told to."""
MAX_SHOWN = 8
"""Tasks whose accuracy the log shows; the files have all."""


class TaskEvaluations:
    """Runs tasks on one round's model at a time, and leaves `round-N.json` and `round-N.md` in a folder.

    `flags` are those of `spes evaluate` that name the tasks; `save` writes the newest model to a folder.
    """

    def __init__(
        self, folder: Path, flags: Sequence[str], save: Callable[[Path], object], threads: int | None = None
    ) -> None:
        self._folder = folder
        self._flags = list(flags)
        self._save = save
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SPES_")}
        self._environment = environment | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
        self._process: subprocess.Popen[bytes] | None = None
        self._reporter: threading.Thread | None = None
        self._round = 0

    def start(self, round: int) -> None:
        """Save the model of `round` and run the tasks on it, unless the last ones still run.

        What goes wrong is logged, and ends no watch.
        """
        if self._reporter is not None and self._reporter.is_alive():
            log.info("no tasks on round %d: those on round %d still run", round, self._round)
            return
        model, table = self._folder / "model", self._table(round)
        files = ["--json", str(table.with_suffix(".json")), "--markdown", str(table.with_suffix(".md"))]
        command = [sys.executable, "-m", "spes_p2p", "evaluate", str(model), *self._flags, *files]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._save(model)
            with self._log_file.open("wb") as output:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._environment
                )
        except (OSError, SpesError) as error:
            log.error("cannot run tasks on round %d: %s; the watch goes on without them", round, error)
            return
        self._round = round
        self._reporter = threading.Thread(target=self._report, args=(self._process, round), name="tasks", daemon=True)
        self._reporter.start()

    def finish(self, round: int) -> None:
        """Run the tasks on the run's last model, after what still runs, and wait for them."""
        self._wait()
        self.start(round)
        self._wait()

    def close(self) -> None:
        """End what still runs, and delete the evaluated checkpoint. Idempotent."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(self._folder / "model", ignore_errors=True)

    def _wait(self) -> None:
        if self._reporter is not None and self._reporter.is_alive():
            log.info("waiting for the tasks on round %d", self._round)
            self._reporter.join()

    def _table(self, round: int) -> Path:
        return self._folder / f"round-{round:06d}"

    @property
    def _log_file(self) -> Path:
        return self._folder / "evaluate.log"

    def _report(self, process: subprocess.Popen[bytes], round: int) -> None:
        """Wait for the process and log how it went; in a thread of its own."""
        code = process.wait()
        try:
            if code:
                log.error("the tasks on round %d failed (%d): %s", round, code, self._last_line())
            if not code or self._table(round).with_suffix(".json").exists():
                log.info("round %d: %s", round, self._accuracies(round))
        except (OSError, ValueError) as error:
            log.error("the tasks on round %d left nothing to read: %s", round, error)

    def _last_line(self) -> str:
        lines = self._log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), f"it said nothing; see {self._log_file}")

    def _accuracies(self, round: int) -> str:
        table = self._table(round)
        values = json.loads(table.with_suffix(".json").read_text(encoding="utf-8"))
        shown = [f"{task} {fields['acc']:.4f}" for task, fields in values.items() if "acc" in fields]
        return ", ".join([*shown[:MAX_SHOWN], f"see {table.with_suffix('.md')}"])
