"""An elastic swarm: what is lost when peers die, how fast others take over, how soon a newcomer counts.

    .venv/bin/python benchmarks/elastic.py [--only kills newcomer claims] [--repeats 25] [--write]

Kills: eight real peers die in each phase of their lives, one at a time, and come back; their history is then compared
with four promises (`tests/support/history.py`).
"""

from __future__ import annotations

import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from benchmarks.cluster import ROOT, support
from benchmarks.records import measure_parts
from benchmarks.tables import Row
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, LogLevel, PositiveInt
from spes_p2p.presentation import say

NUM_PEERS, MIN_KILLS, REPEATS_PER_LAB = 8, 200, 5
FREEZE_SECONDS = (2.0, 12.0)
"""Less than a round of the laboratory's, and more than a lease."""
CUT_SECONDS = (2.0, 8.0)
"""Less than the patience of a peer's watchdog, which would start it anew."""
CONFIG = ROOT / "configs" / "local_experiment.yaml"
NUM_OLD, NUM_NEWCOMERS, JOIN_SECONDS = 3, 5, 300.0
NEWCOMER_AFTER, MAX_ROUNDS_TO_COUNT = 3, 2
"""Rounds that the others make among themselves before a newcomer is started; rounds until its first one counts."""
SEEDS, PEERS, MAX_COVERED = 300, (4, 16), (45.0, 90.0)


def kills(repeats: int, seed: int) -> Iterator[Row]:
    """Yield what killing peers in each phase costs, and stopping or cutting off some, in one swarm after another."""
    reports = [
        _report(seed + done, min(REPEATS_PER_LAB, repeats - done)) for done in range(0, repeats, REPEATS_PER_LAB)
    ]
    verdicts = [report.verdict for report in reports]
    lost, refused, wrong = (sum(len(getattr(each, kind)) for each in verdicts) for kind in ("lost", "refused", "wrong"))
    accepted, means, versions = (
        sum(getattr(each, kind) for each in verdicts) for kind in ("accepted", "means", "versions")
    )
    strikes = [strike for report in reports for strike in report.strikes if strike.kind not in ("freeze", "cut")]
    yield Row(
        "SIGKILL in each of 9 phases, newest code: accepted versions lost",
        f"{lost} of {accepted:,} in {len(strikes)} kills",
        f"0 of {MIN_KILLS}",
        not lost and len(strikes) >= MIN_KILLS,
    )
    yield Row("- honest versions that a peer refused for harm to its model", f"{refused}", "0", not refused)
    checked = f"{wrong} of {means:,} means and {versions:,} versions, {sum(report.rounds for report in reports)} rounds"
    yield Row("- means and versions that the replay does not confirm; versions that went back", checked, "0", not wrong)
    seconds = [strike.committed_after for strike in strikes]
    told = f"{median(seconds):.1f} / {max(seconds):.1f} s"
    yield Row("- until all others had committed two rounds more, p50 / max", told)


def _report(seed: int, repeats: int) -> Any:
    """Return what came of one swarm in which each phase has cost peers their lives so often."""
    lab_of = support("lab")
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        lab = lab_of.Lab(Path(folder) / "lab", seed, NUM_PEERS)
        with lab.running():
            for number, (phase, anew) in enumerate(lab_of.schedule(repeats, seed)):
                strike = lab.kill(phase, anew=anew)
                say(f"  killed in {phase}; all others went on after {strike.committed_after:.1f} s")
                if number % len(lab_of.PHASES) == 0:
                    for harm, lengths in ((lab.freeze, FREEZE_SECONDS), (lab.cut, CUT_SECONDS)):
                        strike = harm(lab.random.choice(lengths))
                        say(f"  {strike.kind} for a while; all others went on after {strike.committed_after:.1f} s")
            lab.recover()
        report = lab.judge()
        if report.verdict.lost or report.verdict.wrong or report.verdict.refused:
            kept = Path(tempfile.gettempdir()) / f"lab-{seed}"
            large = shutil.ignore_patterns("vectors", "cache", "peer-*[0-9]")
            shutil.copytree(lab.folder, kept, ignore=large, dirs_exist_ok=True)
            say(f"  what its peers wrote down, and their logs, are in {kept}")
        return report


def newcomer() -> Iterator[Row]:
    """Yield how many rounds of the default run pass until a newcomer's first one counts; one after the other joins."""
    commands_in = support("peer_processes").commands_in
    rounds, seconds = [], []
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder, commands_in(Path(folder)) as commands:
        flags = ["--run-id", "newcomer", "--max-slots", "8"]
        founder = commands.peer("peer-0", *flags, "--config", CONFIG, "--run.round.min-peers", str(NUM_OLD))
        address = founder.wait_for(r"--initial-peers (/ip4/\S+)", JOIN_SECONDS)[1]
        for index in range(1, NUM_OLD):
            commands.peer(f"peer-{index}", *flags, "--initial-peers", address)
        for index in range(NUM_NEWCOMERS):
            for _ in range(NEWCOMER_AFTER):
                whole = rf"round (\d+): {NUM_OLD} peers"
                at = int(founder.wait_for(whole, JOIN_SECONDS, after=len(founder.lines))[1])
            began = time.monotonic()
            late = commands.peer(f"late-{index}", *flags, "--initial-peers", address)
            rounds.append(int(late.wait_for(rf"round (\d+): {NUM_OLD + 1} peers", JOIN_SECONDS)[1]) - at)
            seconds.append(time.monotonic() - began)
            late.signal(signal.SIGINT)
            late.end(JOIN_SECONDS)
    measured = f"{median(rounds):.0f} rounds ({max(rounds)} at most), {median(seconds):.0f} s"
    what = f"newcomer in the default run, {NUM_NEWCOMERS} in turn: start to first counted round"
    yield Row(what, measured, "2 rounds", median(rounds) <= MAX_ROUNDS_TO_COUNT)


def claims() -> Iterator[Row]:
    """Yield what simulated swarms do to their claims."""
    simulated = support("simulated_claims.faults")
    total, faulty = simulated.live_through_all(range(SEEDS), PEERS)
    what = f"simulated claims, {PEERS[0]}-{PEERS[1]} peers: seeds violated"
    yield Row(what, f"{len(faulty)} of {SEEDS}", f"0 of {SEEDS}", not faulty)
    waits = total.orphaned_seconds["death"]
    half, most = (simulated.quantile(waits, share) for share in (0.5, 0.99))
    what = "orphaned slot covered again, simulated, lease 30 s, heartbeat 10 s: p50 / p99"
    measured = f"{half:.0f} / {most:.0f} s in {len(waits):,} cases"
    yield Row(what, measured, "45 / 90 s", half <= MAX_COVERED[0] and most <= MAX_COVERED[1])


class ElasticConfig(CommandConfig):
    """Peers that come, go and die."""

    only: list[Literal["kills", "newcomer", "claims"]] = []
    """Parts of the table to measure; by default all."""
    repeats: PositiveInt = 25
    """Kills in each of the nine phases."""
    seed: int | None = None
    """Of all that is drawn; drawn itself by default."""
    write: bool = False
    """Keep the rows in benchmarks/results/elastic.json and .md."""
    log_level: LogLevel = "warning"


def main(config: ElasticConfig) -> int:
    """Measure and print; return 1 if a goal was missed."""
    torch.set_num_threads(1)
    seed = secrets.randbits(31) if config.seed is None else config.seed
    say(f"seed {seed}")
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "kills": partial(kills, config.repeats, seed),
        "newcomer": newcomer,
        "claims": claims,
    }
    return measure_parts("elastic", parts, config.only, config.write)


if __name__ == "__main__":
    entry_point(ElasticConfig, main)
