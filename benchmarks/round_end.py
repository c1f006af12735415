"""How much longer a round takes, besides training, than in an older version of this program.

    .venv/bin/python -m benchmarks.round_end [--before COMMIT] [--pairs 3]

Four peers in network namespaces, 40 ms apart, train a tiny model in rounds of one second. Both versions run in turn, as
their own commands; of each, the median time between two reports of a round counts, without the first rounds.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.cluster import ROOT, support
from benchmarks.testbed import TestBed
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, PositiveInt
from spes_p2p.errors import SpesError
from spes_p2p.presentation import say
from spes_p2p.swarm.hivemind_fixes.processes import die_with_parent

NUM_PEERS, RTT_MS, NUM_WARM = 4, 40.0, 5
ROUND = {"mode": "tokens", "tokens": 10**9, "min_seconds": 0.5, "max_seconds": 1.0, "min_peers": NUM_PEERS}
SECONDS = 300.0
REPORT = re.compile(rf"round (\d+): {NUM_PEERS} peers, .* (\d+\.\d) s training")


class RoundEndConfig(CommandConfig):
    """The time of a round's end, against an older version."""

    before: str = "09350f3"
    """Commit of the older version: by default the last one without certificates."""
    pairs: PositiveInt = 3
    """Runs of each version."""
    rounds: PositiveInt = 25
    """Rounds of a run."""


def measure_round_ends(config: RoundEndConfig) -> dict[str, Any]:
    """Return the seconds of a round of both versions by run, and the median change between paired runs."""
    found: dict[str, list[float]] = {"before": [], "now": []}
    with tempfile.TemporaryDirectory(prefix="round-end-") as name, _checkout(config.before, Path(name)) as before:
        roots = {"before": before, "now": ROOT}
        for pair in range(config.pairs):
            for version in sorted(roots, reverse=bool(pair % 2)):
                found[version].append(_run(roots[version], Path(name) / f"{version}{pair}", config.rounds))
                say(f"{version}: {found[version][-1]:.2f} s")
    change = statistics.median(now - old for old, now in zip(found["before"], found["now"], strict=True))
    return {**found, "change_seconds": change}


@contextmanager
def _checkout(commit: str, folder: Path) -> Iterator[Path]:
    path = folder / "before"
    subprocess.run(["git", "worktree", "add", "--detach", path, commit], cwd=ROOT, check=True, capture_output=True)
    try:
        yield path
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", path], cwd=ROOT, check=True, capture_output=True)


def _run(root: Path, folder: Path, rounds: int) -> float:
    """Return the median seconds of a round besides training, by the first peer's log."""
    processes = support("peer_processes")
    folder.mkdir()
    settings = processes.write_settings(folder / "run.yaml", round={**ROUND, "total": rounds, "lease_seconds": 20.0})
    corpus = processes.write_corpus(folder / "corpus.jsonl")
    with TestBed(peers=NUM_PEERS, rtt_ms=RTT_MS) as bed, ExitStack() as stack:
        words = ["--run-id", "pair", "--text", corpus, "--seed-seconds", "0", "--port", "4001"]
        founder = stack.enter_context(_peer(root, bed, 0, folder, [*words, "--config", settings]))
        address = folder / "0" / "address"
        _wait(lambda: address.exists(), founder)
        for place in range(1, NUM_PEERS):
            stack.enter_context(
                _peer(root, bed, place, folder, [*words, "--initial-peers", address.read_text().strip()])
            )
        log = folder / "0.log"
        _wait(lambda: len(_reports(log)) >= rounds - NUM_WARM or founder.poll() is not None, founder)
        return statistics.median(_reports(log)[NUM_WARM:])


@contextmanager
def _peer(root: Path, bed: TestBed, place: int, folder: Path, words: Sequence[Any]) -> Iterator[subprocess.Popen]:
    command: list[Any] = ["ip", "netns", "exec", bed.namespace(place), sys.executable, "-m", "spes_p2p", "peer", *words]
    command += ["--output", folder / str(place), "--host", bed.address(place), "--device", "cpu", "--threads", "1"]
    command += ["--cache", folder / "cache"]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    parent = os.getpid()
    with (folder / f"{place}.log").open("wb") as log:
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=root,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: die_with_parent(parent),
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _reports(log: Path) -> list[float]:
    """Return the seconds between successive reports of the rounds of all peers, less those of training."""
    ends, seconds = [], []
    for line in log.read_text(errors="replace").splitlines():
        if found := REPORT.search(line):
            ends.append(_time_of(line))
            if len(ends) > 1:
                seconds.append(ends[-1] - ends[-2] - float(found[2]))
    return seconds


def _time_of(line: str) -> float:
    """Return the time of day at which a line was logged, in seconds."""
    hours, minutes, seconds = re.search(r"(\d+):(\d+):(\d+(?:[.,]\d+)?)", line).groups()  # type: ignore[union-attr]
    return 3600 * int(hours) + 60 * int(minutes) + float(seconds.replace(",", "."))


def _wait(is_done: Any, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_done():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SpesError(f"the founder ended with {process.poll()}, or took more than {SECONDS:.0f} s")
        time.sleep(0.2)


def main(config: RoundEndConfig) -> int:
    """Measure and print."""
    found = measure_round_ends(config)
    say(f"a round takes {found['change_seconds']:+.2f} s besides training")
    return 0


if __name__ == "__main__":
    entry_point(RoundEndConfig, main)
