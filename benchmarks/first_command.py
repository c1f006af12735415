"""What the README's first command takes until the first round, and what a peer of its experiment takes after it.

    .venv/bin/python -m benchmarks.first_command [TREE]

TREE is a checkout with its `.venv`, by default this one. Tokenizer and tokens are made each time, as on a new machine.
Memory is the proportional set size over a peer's processes, every half second of the second round.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

from benchmarks.cluster import ROOT
from benchmarks.large_peers import SAMPLE_SECONDS, family, processor_seconds, proportional_bytes
from spes_p2p.errors import SpesError
from spes_p2p.presentation import say
from spes_p2p.swarm.hivemind_fixes.processes import die_with_parent

REPEATS, NUM_PEERS = 5, 4
DEADLINE_SECONDS, STOP_SECONDS = 900.0, 120.0


def two_rounds(tree: Path, folder: Path) -> tuple[float, int, int]:
    """Run a checkout's local experiment for two rounds.

    Returns the processor seconds of all its processes until the first round, and the most bytes and processes of a peer
    in the second.

    Raises:
        SpesError: the second round did not come.
    """
    words = [f"{tree}/.venv/bin/spes", "local", "--output", f"{folder}/run", "--cache", f"{folder}/cache"]
    dies = functools.partial(die_with_parent, os.getpid())
    with (output := folder / "output").open("wb") as stream:
        local = subprocess.Popen(words, cwd=tree, stdout=stream, stderr=stream, preexec_fn=dies)
    seconds, num_bytes, num_processes = 0.0, 0, 0
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while "round 2/" not in (said := output.read_text(errors="replace")):
            if local.poll() is not None or time.monotonic() > deadline:
                raise SpesError(f"the local experiment of {tree} made no second round:\n{said[-2000:]}")
            if "round 1/" not in said:
                seconds = processor_seconds(local.pid)
            else:  # the launcher makes its peers first
                children = sorted(psutil.Process(local.pid).children(), key=psutil.Process.create_time)
                peers = [family(child.pid) for child in children[:NUM_PEERS]]
                num_bytes = max(num_bytes, *(sum(map(proportional_bytes, peer)) for peer in peers))
                num_processes = max(map(len, peers))
            time.sleep(SAMPLE_SECONDS)
    finally:
        processes = family(local.pid)
        local.terminate()
        for process in psutil.wait_procs(processes, timeout=STOP_SECONDS)[1]:
            process.kill()
    return seconds, num_bytes, num_processes


def main() -> None:
    """Start the experiment some times; print the medians."""
    tree = Path(sys.argv[1]).resolve() if sys.argv[1:] else ROOT
    starts = []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory(prefix="first-") as folder:
            starts.append(two_rounds(tree, Path(folder)))
    seconds, num_bytes, num_processes = zip(*starts, strict=True)
    spread = f"median of {min(seconds):.1f} to {max(seconds):.1f}"
    say(f"first command: {median(seconds):.1f} processor seconds until round 1, {spread}")
    say(f"PSS of a peer {median(num_bytes) / 1e9:.3f} GB, {max(num_processes)} processes, the most in each start")


if __name__ == "__main__":
    main()
