"""The process that atheris guides: python -m benchmarks.fuzz.guided_process FOLDER EXECUTIONS SEED SOURCE.

It instruments the library and SOURCE as it imports them, so nothing here may import either before; then it forks once
for each decoder, since libFuzzer ends its process. What came of all lies in FOLDER then.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.fuzz.decoder import Decoder
from benchmarks.fuzz.inputs import beginnings, decoded, mutant

RESULTS, FOUND, LOG = "results.json", "found", "log"
INSTRUMENTED = ("spes_p2p", "base58", "multihash")
"""Packages. Of hivemind, decoders reach few lines, and to instrument all of it takes longer than to import it."""
INPUT_SECONDS = 30
"""For one input; one that takes longer has hung its decoder."""
START_SECONDS, SLOWEST_PER_SECOND = 120.0, 20
"""For a decoder's own start, and its executions; it runs thousands a second."""
MIN_BYTES = 4096
"""Least limit of an input's length; else twice the longest initial input."""


def main(folder: Path, executions: int, seed: int, source: str) -> None:
    """Run each of the source's decoders its share of the executions."""
    import atheris

    with atheris.instrument_imports(include=[*INSTRUMENTED, source.partition(".")[0]]):
        module = importlib.import_module(source)
    targets: list[Decoder] = module.decoders(folder)
    runs = -(-executions // len(targets))
    results = [_run(target, folder / str(number), runs, seed) for number, target in enumerate(targets)]
    (folder / RESULTS).write_text(json.dumps(results), encoding="utf-8")


def _run(target: Decoder, folder: Path, runs: int, seed: int) -> dict[str, Any]:
    """Have a process run one decoder; return what `Guided` takes."""
    (folder / "corpus").mkdir(parents=True)
    sound = [data for content in target.seeds for data in beginnings(content, is_packed=target.is_packed)]
    for number, data in enumerate(sound):
        (folder / "corpus" / str(number)).write_bytes(data)
    flags = {
        "runs": runs,
        "seed": 1 + seed % (2**31 - 1),  # libFuzzer draws one itself for 0
        "max_len": max(MIN_BYTES, 2 * max(map(len, sound))),
        "len_control": 0,  # or it would begin with inputs as short as the sound ones
        "timeout": INPUT_SECONDS,
        "artifact_prefix": f"{folder}/",
        "print_final_stats": 1,
    }
    arguments = [*(f"-{name}={value}" for name, value in flags.items()), str(folder / "corpus")]
    began = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=_fuzz, args=(target, folder, arguments))
    process.start()
    process.join(START_SECONDS + runs / SLOWEST_PER_SECOND)
    process.kill()
    process.join(START_SECONDS)
    log = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    counted = re.search(r"number_of_executed_units:\s+(\d+)", log)
    errors = Counter((folder / FOUND).read_text(encoding="utf-8").splitlines())
    if process.exitcode:
        errors[f"ended its process with exit code {process.exitcode}{_last_input(folder)}"] += 1
    seconds = time.monotonic() - began
    return {"name": target.name, "executions": int(counted[1]) if counted else 0, "seconds": seconds, "untyped": errors}


def _last_input(folder: Path) -> str:
    """Return what libFuzzer has left of the input that ended its process."""
    left = [path for kind in ("crash", "timeout", "oom") for path in folder.glob(f"{kind}-*")]
    return f" at {left[0].read_bytes()[:200]!r}" if left else ""


def _fuzz(target: Decoder, folder: Path, arguments: list[str]) -> None:
    """Become libFuzzer, which ends this process; go on after an untyped error, to find others."""
    import atheris

    with (folder / LOG).open("wb") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    found = (folder / FOUND).open("w", encoding="utf-8", errors="backslashreplace", buffering=1)

    def run(data: bytes) -> None:
        error = target.is_refused_properly(data)
        if error is not None:
            found.write(repr(error)[:200].replace("\n", " ") + "\n")

    def mutate(data: bytes, max_bytes: int, seed: int) -> bytes:
        return _changed(data, max_bytes, random.Random(seed), target.is_packed) or atheris.Mutate(data, max_bytes)

    atheris.Setup([target.name, *arguments], run, custom_mutator=mutate)
    atheris.Fuzz()


def _changed(data: bytes, max_bytes: int, draw: random.Random, is_packed: bool) -> bytes | None:
    """Return what comes of a change to the structure; None half the time, and where there is none, or it is too long.

    What parses is hard to hit by bytes alone: the parsers are no Python, and atheris does not see into them.
    """
    if draw.random() < 0.5:
        return None
    try:
        changed = mutant(decoded(data, is_packed=is_packed), is_packed=is_packed, draw=draw)
    except (ValueError, TypeError, RecursionError):
        return None
    return changed if len(changed) <= max_bytes else None


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
