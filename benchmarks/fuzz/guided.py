"""Coverage-guided fuzzing: atheris sees what of our code an input reaches, and goes on from those that reach more."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster import ROOT
from benchmarks.fuzz.guided_process import RESULTS, SLOWEST_PER_SECOND
from spes_p2p.errors import ConfigError, SpesError

SOURCE = "benchmarks.fuzz.decoders"
START_SECONDS = 3600.0
"""For everything but the executions: imports, and each decoder's own start."""


@dataclass(frozen=True)
class Guided:
    """What came of one decoder.

    Attributes:
        name: The decoder's.
        executions: How often it was run.
        seconds: How long that took, its process's start included.
        untyped: How often it raised which error that it should not have, or how it ended its process.
    """

    name: str
    executions: int
    seconds: float
    untyped: dict[str, int]


def guide(executions: int, seed: int, source: str = SOURCE) -> list[Guided]:
    """Run every decoder on what atheris makes of sound messages and nested ones.

    Args:
        executions: Over all decoders; 0 starts nothing.
        seed: Seed of the draws.
        source: The module whose `decoders` are run; it and the library are instrumented.

    Raises:
        ConfigError: atheris is not installed.
        SpesError: no decoder could be run.
    """
    if not executions:
        return []
    if importlib.util.find_spec("atheris") is None:
        raise ConfigError("guided executions need atheris, which is not installed; run: pip install atheris")
    with tempfile.TemporaryDirectory(prefix="guided-") as folder:
        # A process of its own: only what is imported after atheris can be instrumented.
        command = [sys.executable, "-m", "benchmarks.fuzz.guided_process", folder, str(executions), str(seed), source]
        seconds = START_SECONDS + executions / SLOWEST_PER_SECOND
        code, said = _run(command, seconds)
        results = Path(folder) / RESULTS
        if not results.exists():
            raise SpesError(f"guided executions ended with exit code {code} and no result: {said[-2000:]}")
        return [Guided(**result) for result in json.loads(results.read_text(encoding="utf-8"))]


def _run(command: list[str], seconds: float) -> tuple[int, str]:
    """Return the command's exit code and what it has said; leave none of its forks behind."""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, text=True, errors="replace", start_new_session=True, **streams) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise SpesError(f"guided executions took longer than {seconds:.0f} s; ask for fewer") from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


def untyped(guided: list[Guided]) -> Counter[tuple[str, str]]:
    """Return how often which decoder raised what it should not have."""
    return Counter({(one.name, error): count for one in guided for error, count in one.untyped.items()})
