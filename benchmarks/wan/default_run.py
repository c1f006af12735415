"""The default local run on emulated links: real peers, their training included, and where their time goes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path

from benchmarks.accounts import Account, account
from benchmarks.testbed import TestBed
from spes_p2p.errors import SpesError
from spes_p2p.monitor.events import METRICS_FILE, replay
from spes_p2p.peer.joining import ADDRESS_FILE
from spes_p2p.swarm.hivemind_fixes.processes import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
RUN_ID = "default"
CONFIG = "configs/local_experiment.yaml"
START_SECONDS, RUN_SECONDS = 240.0, 3600.0
POLL_SECONDS = 0.5


def account_of_default_run(bed: TestBed, folder: Path, *, peers: int, slots: int, settings: Sequence[str]) -> Account:
    """Make the default experiment's run, each peer in its namespace; return its account.

    Args:
        bed: With one namespace more than there are peers, for the monitor.
        folder: For outputs and logs.
        peers: Number of peers.
        slots: Number of slots of each peer.
        settings: Flags of the run, for its founder.

    Raises:
        SpesError: a process failed, or took too long.
    """
    processes: list[ForkProcess] = []
    try:
        founding = ["--config", CONFIG, f"--run.round.min-peers={peers}", *settings]
        processes.append(_start_peer(bed, folder, 0, slots, founding))
        address = folder / "peer-0" / ADDRESS_FILE
        _wait(address.exists, processes, START_SECONDS, folder)
        joining = ["--initial-peers", address.read_text().strip()]
        processes += [_start_peer(bed, folder, peer, slots, joining) for peer in range(1, peers)]
        watching = ["--output", str(folder / "monitor"), "--held-out-sequences", "0", "--console", "none"]
        arguments = ["--run-id", RUN_ID, *joining, *watching]
        processes.append(_start(bed, folder, "monitor", peers, "monitor/run_monitor.py", arguments))
        _wait(lambda: not any(process.is_alive() for process in processes), processes, RUN_SECONDS, folder)
    finally:
        for process in processes:
            process.terminate()
            process.join(START_SECONDS)
    return account(replay(folder / "monitor" / METRICS_FILE)[0])


def _start_peer(bed: TestBed, folder: Path, peer: int, slots: int, arguments: Sequence[str]) -> ForkProcess:
    where = ["--host", bed.address(peer), "--output", str(folder / f"peer-{peer}")]
    chosen = ["--run-id", RUN_ID, "--max-slots", str(slots), "--threads", "1", "--data-seed", str(peer)]
    return _start(bed, folder, f"peer-{peer}", peer, "peers/run_peer.py", [*chosen, *where, *arguments])


def _start(bed: TestBed, folder: Path, name: str, place: int, script: str, arguments: Sequence[str]) -> ForkProcess:
    folder.mkdir(parents=True, exist_ok=True)
    return bed.run_in(place, _follow, folder / f"{name}.log", [sys.executable, str(ROOT / script), *arguments])


def _follow(log: Path, command: Sequence[str]) -> None:
    """Run a program that writes to a log; end as it ends, and the other way round."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    dies = functools.partial(die_with_parent, os.getpid())
    with log.open("wb") as file:
        ended = subprocess.run(command, stdout=file, stderr=file, cwd=ROOT, env=environment, preexec_fn=dies)
    sys.exit(ended.returncode)


def _wait(done: Callable[[], bool], processes: Sequence[ForkProcess], seconds: float, folder: Path) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if any(process.exitcode for process in processes) or time.monotonic() > deadline:
            raise SpesError(f"the run failed, or took longer than {seconds:.0f} s; see the logs in {folder}")
        time.sleep(POLL_SECONDS)
