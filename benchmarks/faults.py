"""What becomes of a round when a member is killed, frozen or cut off, and whether peers ever meet in two groups.

    .venv/bin/python benchmarks/faults.py [--repeats 20] [--splits 200]

Four real peers; one is struck in a chosen phase of a round. A referee, which follows every peer's arithmetic in
memory, then holds what the others commit to the weighted mean of exactly the members of their roster, bit for bit.
It keeps each case at once, and goes on from those on record with the same code.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import NonNegativeInt

from benchmarks.cluster import ROOT, support
from benchmarks.machine import Circumstances, load_average
from benchmarks.records import swarm_digest
from benchmarks.testbed import TestBed, available
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, LogLevel
from spes_p2p.fs import write_atomic
from spes_p2p.presentation import say

CODECS = ("fp32", "fp32", "fp32", "int8")
"""Of every four repeats."""
NUM_PEERS = 8
SURVIVORS = 3
JUDGES = ("fault_cluster.py", "fault_cases.py", "meetings.py", "misbehaving.py", "peer_server.py", "referee.py")


class FaultsConfig(CommandConfig):
    """Faults in every phase of a round, and meetings."""

    repeats: NonNegativeInt = 20
    """Times that each fault strikes in each phase."""
    splits: NonNegativeInt = 200
    """Rounds of eight peers that come within a second of each other."""
    faults: tuple[Literal["kill", "freeze", "cut"], ...] = ("kill", "freeze", "cut")
    """Faults to try."""
    seed: int | None = None
    """Of all that is drawn; drawn itself by default."""
    output: Path = ROOT / "benchmarks" / "results"
    """Folder for faults.json and faults.md."""
    log_level: LogLevel = "warning"


def main(config: FaultsConfig) -> int:
    """Strike, count and report; return 1 if anything wrong or partial was committed."""
    torch.set_num_threads(1)
    load_before, began = load_average(), time.monotonic()
    measured = _begun(config)
    say(f"seed {measured['seed']}, {len(measured['cases'])} cases and {len(measured['meetings'])} meetings on record")
    minutes_before = measured["minutes"]
    for name, found in _found(config, measured):
        measured[name].append(asdict(found))
        measured["minutes"] = round(minutes_before + (time.monotonic() - began) / 60, 1)
        measured["circumstances"] = asdict(Circumstances.now(load_before, None))
        with write_atomic(config.output / "faults.json") as stream:
            stream.write((json.dumps(measured, indent=1) + "\n").encode())
    text = "\n".join(report(measured)) + "\n"
    (config.output / "faults.md").write_text(text)
    say(text)
    return 1 if any(case["wrong"] for case in measured["cases"]) else 0


def _begun(config: FaultsConfig) -> dict[str, Any]:
    """Return what is on record of this code and, where one is named, this seed; else nothing but a seed."""
    config.output.mkdir(parents=True, exist_ok=True)
    file, code = config.output / "faults.json", swarm_digest(*JUDGES)
    known = json.loads(file.read_text()) if file.exists() else {}
    if known.get("code") == code and config.seed in (None, known["seed"]):
        return known
    seed = secrets.randbits(31) if config.seed is None else config.seed
    deadline = support("fault_cases").DEADLINE_SECONDS
    begun: dict[str, Any] = {"code": code, "seed": seed, "minutes": 0.0, "deadline_seconds": deadline}
    return begun | {"skipped": {}, "cases": [], "meetings": []}


def _found(config: FaultsConfig, measured: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each case and meeting that is not on record yet."""
    for fault in config.faults:
        if fault == "cut" and (reason := available()):
            measured["skipped"][fault] = reason
            continue
        for codec in sorted(set(CODECS)):
            done = sum((case["fault"], case["codec"]) == (fault, codec) for case in measured["cases"])
            yield from (("cases", case) for case in _cases(fault, codec, config.repeats, measured["seed"], done))
    done = len(measured["meetings"])
    yield from (("meetings", note) for note in _meetings(range(done, config.splits), measured["seed"]))


def _cases(fault: str, codec: str, repeats: int, seed: int, num_done: int) -> Iterator[Any]:
    phases = support("fault_cases").PHASES.items()
    mine = sum(CODECS[number % len(CODECS)] == codec for number in range(repeats))
    strikes = [(phase, moments[number % len(moments)]) for number in range(mine) for phase, moments in phases]
    with contextlib.ExitStack() as closing:
        if num_done >= len(strikes):
            return
        bed = closing.enter_context(TestBed(peers=4, rtt_ms=10, seed=seed)) if fault == "cut" else None
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        cluster = support("fault_cluster").FaultCluster(folder, seed, codec, bed)
        closing.callback(cluster.close)
        cluster.start()
        for phase, moment in strikes[num_done:]:
            case = _strike(cluster, fault, phase, moment)
            say(
                f"{fault}, {codec}, the victim {case.moment}: {case.committed} of {SURVIVORS} survivors committed, "
                f"{case.seconds:.1f} s; {case.victim}; {'; '.join(case.wrong) or 'nothing wrong'}"
            )
            yield case
            if not case.victim:
                return


def _strike(cluster: Any, fault: str, phase: str, moment: str) -> Any:
    try:
        case = cluster.run(fault, phase, moment)
        if not case.is_reached:
            case.wrong.append("the victim never came to that moment")
    except (AssertionError, RuntimeError, TimeoutError) as error:  # no answer within twice the deadline, or a bug
        case = support("fault_cases").Case(fault, phase, moment, cluster.codec, wrong=[repr(error)])
    return case


def _meetings(rounds: range, seed: int) -> Iterator[Any]:
    meetings, peers = support("meetings"), support("real_peers")
    with contextlib.ExitStack() as closing:
        if not rounds:
            return
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="meetings-")))
        cluster = meetings.start_meeting(folder, NUM_PEERS)
        closing.callback(peers.close_all, cluster)
        for number in rounds:
            note = meetings.meet(cluster, seed + number)
            if note.sizes != (NUM_PEERS,) or note.dropped:
                say(f"round {number} of {NUM_PEERS} peers: {note}")
            yield note


# ---------------------------------------------------------------------- what to say of it

HEAD = (
    *("fault", "phase", "rounds", "wrong or partial", "all survivors committed", "some did", "none did", "redone"),
    *("seconds, median", "maximum", "whole again after, median", "maximum"),
)


def report(measured: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a Markdown report."""
    cases, notes = measured["cases"], measured["meetings"]
    wrong = sum(bool(case["wrong"]) for case in cases)
    yield "# Faults in a round, measured"
    yield ""
    yield f"Rounds with a wrong or partial mean committed: **{wrong} of {len(cases)}**."
    yield ""
    yield f"| {' | '.join(HEAD)} |"
    yield f"| --- | --- | {' | '.join(['---:'] * (len(HEAD) - 2))} |"
    for fault, phase in dict.fromkeys((case["fault"], case["phase"]) for case in cases):
        mine = [case for case in cases if (case["fault"], case["phase"]) == (fault, phase)]
        yield f"| {' | '.join([fault, phase, *_cells(mine)])} |"
    for fault, reason in measured["skipped"].items():
        yield f"| {fault} | not tried: {reason} | {' | '.join([''] * (len(HEAD) - 2))} |"
    yield ""
    if notes:
        yield from _meeting_lines(notes)
    yield from _explanation(measured)


def _cells(cases: Sequence[dict[str, Any]]) -> list[str]:
    committed = [case["committed"] for case in cases]
    seconds = [case["seconds"] for case in cases]
    healing = [case["healing_seconds"] for case in cases]
    counts = [
        len(cases),
        sum(bool(case["wrong"]) for case in cases),
        committed.count(SURVIVORS),
        sum(0 < count < SURVIVORS for count in committed),
        committed.count(0),
        sum(case["attempts"] > 1 for case in cases),
    ]
    times = [statistics.median(seconds), max(seconds), statistics.median(healing), max(healing)]
    return [*map(str, counts), *(f"{value:.1f}" for value in times)]


def _meeting_lines(notes: Sequence[dict[str, Any]]) -> Iterator[str]:
    splits = sum(len(note["sizes"]) > 1 or note["sizes"][0] < NUM_PEERS for note in notes)
    seconds = [note["seconds"] for note in notes]
    yield f"Of {len(notes)} rounds of {NUM_PEERS} peers that came within a second of each other, **{splits}** split."
    yield f"From the last arrival until all had the roster: median {statistics.median(seconds):.2f} s, "
    yield f"maximum {max(seconds):.2f} s. Rounds dropped: {sum(bool(note['dropped']) for note in notes)}."
    yield ""


def _explanation(measured: dict[str, Any]) -> Iterator[str]:
    cases, circumstances = measured["cases"], measured["circumstances"]
    ends = Counter(case["victim"] for case in cases)
    codecs = Counter(case["codec"] for case in cases)
    packages = ", ".join(f"{name} {version}" for name, version in circumstances["packages"].items())
    yield from (
        "## What is counted",
        "",
        "- Kill: SIGKILL of the peer; the kernel takes its p2pd and DHT along. Freeze: SIGSTOP of all three.",
        "  Cut: every packet from and to it is lost, in an emulated internet of 10 ms. In each case the victim stands",
        "  still at the moment named while it is struck.",
        "- Wrong or partial: what a peer commits, in that round or later, is not bit for bit the weighted mean over",
        "  the current members of its roster; survivors commit different bytes; a group is dropped without a reason;",
        f"  a survivor takes longer than a round's {measured['deadline_seconds']:.0f} s; or the swarm is not",
        "  whole again after six more rounds.",
        "- Seconds: from the fault until the last survivor's result. Whole again: from there until everybody, the",
        "  victim or its replacement included, has averaged together; most of that are the victim's own deadlines.",
        f"- Codecs: {', '.join(f'{count} with {codec}' for codec, count in codecs.items())}.",
        f"- The victim's own round: {'; '.join(f'{count} {end}' for end, count in ends.most_common())}.",
        "",
        "## Circumstances",
        "",
        f"- {circumstances['date']}, commit {circumstances['commit']}, {measured['minutes']} minutes",
        f"- {circumstances['cpu']}, {circumstances['cores']} cores, {circumstances['memory_gib']} GiB",
        f"- load average before the start {circumstances['load_before']:.2f}; seed {measured['seed']}",
        f"- Python {circumstances['python']}, {packages}",
    )


if __name__ == "__main__":
    entry_point(FaultsConfig, main)
