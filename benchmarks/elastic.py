"""An elastic swarm's scoreboard: what is lost when peers die, how fast others take over, what coming and going costs.

    .venv/bin/python benchmarks/elastic.py [--only kills newcomer ...] [--repeats 25] [--write]

Eight real peers die in each phase of their lives, one at a time, and come back; their history is then held against four
promises (`tests/support/history.py`). The other parts are told where they are measured.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from benchmarks.checkpointing import CheckpointingConfig
from benchmarks.checkpointing import measure as measure_saving
from benchmarks.checkpointing import rows as saving_rows
from benchmarks.churn import churn_rows
from benchmarks.claims.faults import live_through
from benchmarks.claims.summary import Summary
from benchmarks.cluster import ROOT, support
from benchmarks.connection import DEATH_SECONDS, HEAL_SECONDS
from benchmarks.connection import measure as measure_connection
from benchmarks.records import swarm_digest
from benchmarks.scoreboard import Scoreboard
from benchmarks.tables import Row
from spes_p2p.cli import entry_point, load_settings
from spes_p2p.config import CommandConfig, LogLevel, PositiveInt
from spes_p2p.presentation import say

NUM_PEERS, MIN_KILLS, REPEATS_PER_LAB = 8, 200, 5
FREEZE_SECONDS = (2.0, 12.0)
"""Less than a round of the laboratory's, and more than a lease."""
CUT_SECONDS = (2.0, 8.0)
"""Less than the patience of a peer's watchdog, which would start it anew."""
RESULTS = ROOT / "benchmarks" / "results" / "elastic.json"
CONFIG = ROOT / "configs" / "local_experiment.yaml"
NUM_OLD, NUM_NEWCOMERS = 3, 5
NEWCOMER_AFTER, MAX_ROUNDS_TO_COUNT = 3, 2
"""Rounds that the others make among themselves before a newcomer is started; rounds until its first one counts."""
JOIN_SECONDS = 300.0
CI_SEEDS, CI_PEERS, LONG_SEEDS = 300, (4, 16), 10_000
LONG_CLAIMS = ROOT / "benchmarks" / "results" / "claims.json"
MAX_COVERED = 45.0, 90.0
CONNECTION_REPEATS = 5


@dataclass
class Bench:
    """What all measurements share.

    Attributes:
        repeats: Kills in each phase.
        seed: Seed of all random draws.
        seen: Everything measured, for the record.
    """

    repeats: int
    seed: int
    seen: dict[str, Any] = field(default_factory=dict)


def kills(bench: Bench) -> Iterator[Row]:
    """Yield what killing peers in each phase costs, and stopping or cutting off some, in one swarm after another.

    Swarms on record count too, because 200 kills take some hours: for lost versions those of all code since rounds
    end with certificates, for the other rows those of today's code.
    """
    code = _code()
    bench.seen["labs"] = labs = _on_record()
    with _interrupts() as is_interrupted:
        for done in range(0, bench.repeats, REPEATS_PER_LAB):
            if not is_interrupted.is_set():
                report = _report(bench.seed + done, min(REPEATS_PER_LAB, bench.repeats - done), is_interrupted)
                labs.append({"code": code, "seed": bench.seed + done, **asdict(report)})
    states = len({lab["code"] for lab in labs})
    lost, accepted, count = _lost(labs)
    yield Row(
        "SIGKILL in each of 9 phases: accepted versions lost",
        f"{lost} of {accepted:,} in {count} kills, {states} states of the code",
        f"0 of {MIN_KILLS}",
        not lost and count >= MIN_KILLS,
    )
    labs = [lab for lab in labs if lab["code"] == code]
    yield Row("- with the newest code", "{} of {:,} in {} kills".format(*_lost(labs)))
    verdicts = [lab["verdict"] for lab in labs]
    refused, wrong = (sum(len(verdict[kind]) for verdict in verdicts) for kind in ("refused", "wrong"))
    means, versions = (sum(verdict[kind] for verdict in verdicts) for kind in ("means", "versions"))
    checked = f"{wrong} of {means:,} means and {versions:,} versions, {sum(lab['rounds'] for lab in labs)} rounds"
    yield Row("- honest versions that a peer refused for harm to its model", f"{refused}", "0", not refused)
    yield Row("- means and versions that the replay does not confirm; versions that went back", checked, "0", not wrong)
    seconds = [seconds for lab in labs for seconds in _kill_seconds(lab)]
    yield Row(
        "- until all others had committed two rounds more, p50 / max", f"{median(seconds):.1f} / {max(seconds):.1f} s"
    )


def _lost(labs: Sequence[Mapping[str, Any]]) -> tuple[int, int, int]:
    """Return the lost versions, the accepted ones, and the kills of these swarms."""
    verdicts = [lab["verdict"] for lab in labs]
    kills = sum(len(_kill_seconds(lab)) for lab in labs)
    return sum(len(verdict["lost"]) for verdict in verdicts), sum(verdict["accepted"] for verdict in verdicts), kills


def _kill_seconds(lab: Mapping[str, Any]) -> list[float]:
    """Return how long after each kill all others had committed two rounds more."""
    return [strike["committed_after"] for strike in lab["strikes"] if strike["kind"] not in ("freeze", "cut")]


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets the first time, so that a swarm under way is judged by what has befallen it."""
    asked = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def ask(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        asked.set()
        say("stops after this kill, and judges; Ctrl-C again ends at once")

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _on_record() -> list[dict[str, Any]]:
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return document.get("kills", {}).get("seen", {}).get("labs", [])


def _code() -> str:
    return swarm_digest("lab.py", "lab_peer.py", "history.py")


def _report(seed: int, repeats: int, is_interrupted: threading.Event) -> Any:
    """Return what came of one swarm in which each phase has cost peers their lives so often, unless interrupted."""
    lab_of = support("lab")
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        lab = lab_of.Lab(Path(folder) / "lab", seed, NUM_PEERS)
        with lab.running():
            for number, (phase, anew) in enumerate(lab_of.schedule(repeats, seed)):
                if is_interrupted.is_set():
                    break
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
            shutil.copytree(
                lab.folder, kept, ignore=shutil.ignore_patterns("vectors", "cache", "peer-*[0-9]"), dirs_exist_ok=True
            )
            say(f"  what its peers wrote down, and their logs, are in {kept}")
        return report


def newcomer(bench: Bench) -> Iterator[Row]:
    """Yield how many rounds of the default run pass until a newcomer's first one counts; one after the other joins."""
    commands_in = support("peer_processes").commands_in
    whole = rf"round (\d+): {NUM_OLD} peers"
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder, commands_in(Path(folder)) as commands:
        flags = ["--run-id", "newcomer", "--max-slots", "8"]
        founder = commands.peer("peer-0", *flags, "--config", CONFIG, "--run.round.min-peers", str(NUM_OLD))
        address = founder.wait_for(r"--initial-peers (/ip4/\S+)", JOIN_SECONDS)[1]
        for index in range(1, NUM_OLD):
            commands.peer(f"peer-{index}", *flags, "--initial-peers", address)
        seen = bench.seen["newcomers"] = []
        for index in range(NUM_NEWCOMERS):
            for _ in range(NEWCOMER_AFTER):
                at = int(founder.wait_for(whole, JOIN_SECONDS, after=len(founder.lines))[1])
            began = time.monotonic()
            late = commands.peer(f"late-{index}", *flags, "--initial-peers", address)
            counted = int(late.wait_for(rf"round (\d+): {NUM_OLD + 1} peers", JOIN_SECONDS)[1])
            seen.append({"started_after": at, "counted_in": counted, "seconds": time.monotonic() - began})
            late.signal(signal.SIGINT)
            late.end(JOIN_SECONDS)
    rounds = [one["counted_in"] - one["started_after"] for one in seen]
    measured = f"{median(rounds):.0f} rounds ({max(rounds)} at most), {median(one['seconds'] for one in seen):.0f} s"
    what = f"newcomer in the default run, {NUM_NEWCOMERS} in turn: start to first counted round"
    yield Row(what, measured, "2 rounds", median(rounds) <= MAX_ROUNDS_TO_COUNT)


def claims(bench: Bench) -> Iterator[Row]:
    """Yield what simulated swarms do to their claims: CI's seeds now, and the long form as it was last left."""
    summary = Summary()
    for seed in range(CI_SEEDS):
        summary.add(seed, live_through(seed, CI_PEERS))
    yield _seeds(f"simulated claims, {CI_PEERS[0]}-{CI_PEERS[1]} peers: seeds violated", CI_SEEDS, summary.figures())
    kept = json.loads(LONG_CLAIMS.read_text())["swarms"] if LONG_CLAIMS.exists() else {}
    bench.seen["claims"] = {"now": summary.figures(), "long": kept}
    for peers, figures in kept.items():
        yield _seeds(f"- the long form, {peers} peers", 1 if peers == "1000" else LONG_SEEDS, figures)
    waits = next(iter(kept.values()), summary.figures())["orphaned_seconds"]["death"]
    what = "orphaned slot covered again, simulated, lease 30 s, heartbeat 10 s: p50 / p99"
    measured = f"{waits['p50']:.0f} / {waits['p99']:.0f} s in {waits['cases']:,} cases"
    yield Row(what, measured, "45 / 90 s", waits["p50"] <= MAX_COVERED[0] and waits["p99"] <= MAX_COVERED[1])


def _seeds(what: str, wanted: int, figures: Mapping[str, Any]) -> Row:
    violated, seeds = len(figures["faulty"]), figures["seeds"]
    return Row(what, f"{violated} of {seeds:,}", f"0 of {wanted:,}", not violated and seeds >= wanted)


def connection(bench: Bench) -> Iterator[Row]:
    """Yield how fast a split swarm heals, and the death of p2pd is noticed."""
    with tempfile.TemporaryDirectory(prefix="connection-") as folder:
        healing, deaths = measure_connection(Path(folder), CONNECTION_REPEATS, bench.seed)
    bench.seen["connection"] = {"healing": healing, "deaths": deaths}
    for what, seconds, most in (
        ("split brain healed", healing, HEAL_SECONDS),
        ("p2pd death seen", deaths, DEATH_SECONDS),
    ):
        measured = f"{median(seconds):.1f} / {max(seconds):.1f} s in {len(seconds)} cases"
        yield Row(f"{what}, median / maximum", measured, f"{most:.0f} s", max(seconds) <= most)


def churn(bench: Bench) -> Iterator[Row]:
    """Yield the rows of the sweep of churn; `spes_p2p simulate configs/churn.yaml` makes it anew."""
    yield from churn_rows()


def saving(bench: Bench) -> Iterator[Row]:
    """Yield what checkpoints cost."""
    lost = measure_saving(load_settings(CheckpointingConfig, []))
    bench.seen["saving"] = {"saves_cpu_seconds": list(lost.saves)}
    yield from saving_rows(lost)


Part = Literal["kills", "claims", "churn", "newcomer", "connection", "saving"]
PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "kills": kills,
    "claims": claims,
    "churn": churn,
    "newcomer": newcomer,
    "connection": connection,
    "saving": saving,
}
BOARD = Scoreboard(RESULTS, Path("benchmarks/results/elastic.md"), "ELASTIC", PARTS)


class ElasticConfig(CommandConfig):
    """Peers that come, go and die."""

    only: list[Part] = []
    """Parts of the table to measure; by default all."""
    repeats: PositiveInt = 25
    """Kills in each of the nine phases, beside those that are on record with the same code."""
    seed: int | None = None
    """Of all that is drawn; drawn itself by default."""
    write: bool = False
    """Leave what was measured in benchmarks/results/elastic.json, and in elastic.md beside it."""
    log_level: LogLevel = "warning"


def main(config: ElasticConfig) -> int:
    """Measure and print; return 1 if a goal was missed."""
    torch.set_num_threads(1)
    seed = secrets.randbits(31) if config.seed is None else config.seed
    say(f"seed {seed}")
    is_reached = BOARD.run(
        config.only,
        lambda name: Bench(config.repeats, seed),
        (lambda bench: {"seed": seed, "seen": bench.seen}) if config.write else None,
    )
    return 0 if is_reached else 1


if __name__ == "__main__":
    entry_point(ElasticConfig, main)
