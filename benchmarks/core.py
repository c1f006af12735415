"""The core's redesign in two tables: what it took out, and what a round costs beside the code before it.

    .venv/bin/python -m benchmarks.core [--table agreement] [--only links processor ...] [--before DIR]

Each part is another benchmark's command. `--before` names a clone of an earlier commit with an environment of its own:
parts whose figures depend on the machine are run there too, right before. What a part printed is kept in
benchmarks/results/core.json, so the table shows what was measured last.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.cluster import ROOT
from benchmarks.machine import Circumstances, load_average
from benchmarks.tables import HEAD, Row, markdown_table
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig
from spes_p2p.errors import ConfigError
from spes_p2p.presentation import say

RESULTS = ROOT / "benchmarks" / "results" / "core.json"
STUDY = ROOT / "benchmarks" / "studies" / "default_model.yaml"
"""Of which earlier code has no copy."""
PARTS: dict[str, str] = {
    "house": "-m benchmarks.rest --core",
    "windows": "tests/support/at_most_once.py",
    "newcomer": "benchmarks/newcomer.py",
    "kills": "benchmarks/elastic.py --only kills --repeats 23",
    "orphans": "benchmarks/elastic.py --only claims",
    "losses": "-m spes_p2p simulate {study} --output {folder}",
    "links": "benchmarks/network.py --only rounds low_bits",
    "sizes": "benchmarks/network.py --only scaling",
    "joiners": "benchmarks/network.py --only joiners",
    "processor": "benchmarks/real_size.py --only processor",
    "experiment": "-m benchmarks.accounts runs/local",
    "simulator": "benchmarks/simulator_speed.py",
    "plans": "-m spes_p2p plan --config",
    "histories": "-m json.tool benchmarks/results/histories.json",
    "cuts": "-m benchmarks.history_cuts --voters 5 --kinds minority",
    "flood": "-m benchmarks.decisions flood",
    "bytes": "-m benchmarks.decisions bytes",
    "first": "-m benchmarks.first_command {tree}",
    "adamw": "benchmarks/local_experiment.py --pace --experiment runs/adamw",
    "simulator_16": "benchmarks/simulator_speed.py --peers 16 --pairs 1",
    "many": "benchmarks/real_size.py --only many",
}
"""The arguments of Python that measure each part; a fresh folder, or a simulation would show its earlier results.

`experiment` and `adamw` read `spes local --output runs/local`, and that with `--run.train.optimizer adamw --output
runs/adamw`; `histories` shows what `python -m benchmarks.histories --write` has left.
"""
TIMED = {"losses", "links", "sizes", "joiners", "processor", "simulator", "plans", "first"}
"""Parts that are measured in the earlier code, too."""
SHIPPED = "spes_1b", "spes_2b", "spes_7b", "spes_9b", "home_1b", "home_7b", "tune_1b", "tune_2b", "tune_9b"
"""Configurations whose traffic is planned: the others need their checkpoint."""


class Figure(NamedTuple):
    """A number that a part prints: the first that its pattern's group finds in the output.

    Attributes:
        part: Which prints it.
        what: Its name in the table.
        pattern: Where it stands.
        bound: What to reach.
        is_least: Whether the bound is the least value, and not the most.
        is_share: Whether the bound is a share of the value in the earlier code.
    """

    part: str
    what: str
    pattern: str
    bound: float | None
    is_least: bool = False
    is_share: bool = False

    def read(self, text: str) -> float | None:
        """Return the number; None if the output has none."""
        found = re.search(self.pattern, text)
        return float(found[1].replace(",", "")) if found else None


ROW, LINES = r"[^\n]*?", r"(?:.*\n)*?"
FIGURES = (
    Figure("house", "lines: swarm + training + peer + sim", r"training, peer, sim \| ([\d,]+)", 17_500),
    Figure("house", "calls of `from_leader`", r"from_leader` \| (\d+)", 0),
    Figure("house", "tests of `sync` for None", r"`sync` for None \| (\d+)", 0),
    Figure("house", "functions that pull versions", r"pull versions \| (\d+)", 1),
    Figure("kills", "certified versions lost to SIGKILL, newest code", rf"newest code{ROW}(\d+) of", 0),
    Figure("kills", "- kills; all others went on", rf"newest code{ROW}in (\d+) kills", 100, True),
    Figure("orphans", "an orphan has a holder again, p50, s", rf"orphaned slot{ROW}p99\s+(\d+) /", 30),
    Figure("orphans", "- p99, s", rf"orphaned slot{ROW}p99\s+\d+ / (\d+)", 60),
    Figure("links", "4 peers, 100 Mbit/s, 40 ms, fp32: x floor", rf"exchange{ROW}([\d.]+) x", 1.25),
    Figure("links", "- int8: x floor", rf"int8{ROW}([\d.]+) x", None),
    Figure("links", "- int4: x floor", rf"int4{ROW}([\d.]+) x", 1.8),
    Figure("sizes", "16 peers over 4, at equal bytes", r"at equal bytes\s+([\d.]+)", 1.4),
    Figure("joiners", "a round beside eight joiners, %", r"undisturbed, median of pairs\s+\+?(-?\d+)%", 6),
    Figure("newcomer", "downloaded over needed, one of three slow", r"one slow  ([\d.]+)", 1.02),
    Figure("newcomer", "- one slow, one lying", r"one lying  ([\d.]+)", 1.1),
    Figure("processor", "processor seconds of a round besides training, per 1e9", r"0.27B\s+([\d.]+) s", 25),
    Figure("losses", "held-out loss of the default model, equal steps", r"four peers\D+\d of \d\D+([\d.]+)", None),
    Figure("losses", "- sample standard deviation over three seeds", rf"four peers{ROW}± ([\d.]+)", None),
    Figure("experiment", "local experiment, wall time not training, %", r"not training\s+([\d.]+)", 24),
    Figure("windows", "windows of an epoch that a steady four trains", r"twice: ([\d.]+)", 0.8, True),
    Figure("windows", "- twice", r"twice: [\d.]+; (\d+)", 0),
    Figure("simulator", "simulator's speed, of plain training", r"median of \d+ pairs: ratio ([\d.]+)", 0.8, True),
    *(
        Figure("plans", f"GB a round, up, by plan: {name}", rf"{name}\n(?:.*\n)*?  = in all\s+([\d.]+)", None)
        for name in SHIPPED
    ),
)


def again(what: str, bound: float) -> Figure:
    """Return a figure of the first table with another bound."""
    return next(figure for figure in FIGURES if figure.what == what)._replace(bound=bound)


def history(what: str, key: str, bound: float | None, is_least: bool = False, kind: str = "honest") -> Figure:
    """Return a figure of the histories on record."""
    return Figure("histories", what, rf'"{kind}": {{[^}}]*?"{key}": (\d+)', bound, is_least)


DECISION, FLOOD = r"\| 64 \| 64 \| ", r"unpack to 4\.\d MB: memory of one\s+"
AGREEMENT = (
    again("lines: swarm + training + peer + sim", 14_500),
    Figure("house", "- decision, meeting and agreement", r"meeting and agreement \| ([\d,]+)", 1_000),
    Figure("house", "rows of hivemind_fixes/README.md", r"fixes/README.md \| (\d+)", 22),
    Figure("house", "constants `*_SECONDS` and `MAX_*`", r"in the core \| (\d+)", 95),
    Figure("house", "lines of docs/certificate.md", r"docs/certificate.md \| (\d+)", 90),
    history("histories with liars", "histories", 10_000, True),
    history("- certified rounds lost while a peer has them", "lost", 0),
    history("- forks without a shrunk body", "forks", 0),
    history("- runs that stand though more than half of the voters answer", "stands", 0),
    history("- healed after, s, at most", "healed", 3_599),
    history("- forks without a proof, beside a voter that signs twice", "unproven", 0, kind="twice"),
    Figure("cuts", "pace of 3 voters, 2 cut off for 12 minutes, of 5", r"minority \| 12 \| ([\d.]+)", 0.8, True),
    Figure("cuts", "- for 30 minutes", r"minority \| 30 \| ([\d.]+)", 0.8, True),
    again("certified versions lost to SIGKILL, newest code", 0),
    again("- kills; all others went on", 200),
    Figure("flood", "15 KB that unpack to 4 MB: KiB allocated", rf"{FLOOD}([\d.]+) KiB", 64),
    Figure("flood", "- processor milliseconds", rf"{FLOOD}.*\n- processor time of one\s+([\d.]+) ms", 10),
    Figure("first", "a peer of the local experiment: PSS, GB, at most", r"PSS of a peer ([\d.]+) GB", 0.75),
    Figure("first", "- processes", r"GB, (\d+) processes", 3),
    Figure("first", "first command: processor seconds to round 1", r"first command: ([\d.]+)", 2 / 3, is_share=True),
    Figure("adamw", "AdamW: wall time not training, %", r"not training\s+([\d.]+)", 17),
    Figure("adamw", "- summed throughput / stock", r"([\d.]+) of stock throughput", 0.75, True),
    again("local experiment, wall time not training, %", 20),
    again("4 peers, 100 Mbit/s, 40 ms, fp32: x floor", 1.2),
    again("- int8: x floor", 1.5),
    again("- int4: x floor", 1.7),
    again("16 peers over 4, at equal bytes", 1.35),
    Figure("bytes", "a decision among 64 peers, sent by one, mean, KB", rf"{DECISION}([\d.]+) KB", 80),
    Figure("bytes", "- most, the leader, KB", rf"{DECISION}[\d.]+ KB \| ([\d.]+) KB", 400),
    Figure("simulator_16", "simulator, 16 peers, of plain training", r"median of \d+ pairs: ratio ([\d.]+)", 0.8, True),
    Figure("many", "peers of 256 that commit round 2 in one simulation", r"same round 2\s+(\d+) of 256", 256, True),
)
TABLES = {"core": FIGURES, "agreement": AGREEMENT}


class CoreConfig(CommandConfig):
    """The core's figures."""

    table: Literal["core", "agreement"] = "core"
    """Which table to print: the core's first part, or agreement, its second."""
    only: list[str] | None = None
    """Parts to measure now; by default none, and the table shows what is on record."""
    before: Path | None = None
    """Clone of an earlier commit, with its `.venv`."""


def main(config: CoreConfig) -> int:
    """Measure the parts asked for, and print the table; return 1 if a bound is missed."""
    if unknown := set(config.only or ()) - PARTS.keys():
        raise ConfigError(f"--only {' '.join(unknown)}: no part of the tables; choose from {', '.join(PARTS)}")
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part in config.only or ():
        load = load_average()
        earlier = config.before if part in TIMED else None
        before = run(part, earlier.resolve()) if earlier else kept.get(part, {}).get("before", "")
        text = run(part, ROOT)
        where = asdict(Circumstances.now(load, PARTS[part].split()))
        kept[part] = {"now": text, "before": before, "circumstances": where}
        RESULTS.write_text(json.dumps({name: kept[name] for name in PARTS if name in kept}, indent=1) + "\n")
    figures = TABLES[config.table]
    rows = [row_of(figure, kept.get(figure.part, {})) for figure in figures]
    say(markdown_table(HEAD, [row.cells for row in rows]))
    for part in [part for part in kept if any(figure.part == part for figure in figures)]:
        where = kept[part]["circumstances"]
        say(f"{part}: {where['date']}, {where['commit']}, load before {where['load_before']:.1f}, {where['cpu']}")
    return 0 if all(row.is_reached is not False for row in rows) else 1


def run(part: str, tree: Path) -> str:
    """Return what a part's command prints in a checkout."""
    home = ROOT if "{tree}" in PARTS[part] else tree  # else the earlier code has the benchmark itself
    python = home / ".venv" / "bin" / "python"
    printed = ""
    with tempfile.TemporaryDirectory() as folder:
        words = [str(python), *PARTS[part].format(study=STUDY, folder=folder, tree=tree).split()]
        commands = [[*words, f"configs/{name}.yaml"] for name in SHIPPED] if part == "plans" else [words]
        for command in commands:
            say(f"{part}: {' '.join(command)}")
            ended = subprocess.run(command, cwd=home, capture_output=True, text=True)
            printed += f"{command[-1].removesuffix('.yaml')}\n{ended.stdout}"
            printed += ended.stderr[-2_000:] if ended.returncode not in (0, 1) or not ended.stdout else ""
    return printed


def row_of(figure: Figure, kept: dict[str, str]) -> Row:
    """Return a figure beside its bound, and what it was before."""
    value = figure.read(kept.get("now", ""))
    earlier = figure.read(kept.get("before", ""))
    goal = "" if figure.bound is None else f"{figure.bound:,.3g} of before" if figure.is_share else f"{figure.bound:,g}"
    if value is None:
        return Row(figure.what, "not measured", goal, False)
    told = f"{value:,g}" + ("" if earlier is None else f" (before: {earlier:,g})")
    if figure.bound is None:
        return Row(figure.what, told)
    bound = figure.bound * (earlier or 0.0) if figure.is_share else figure.bound
    return Row(figure.what, told, goal, value >= bound if figure.is_least else value <= bound)


if __name__ == "__main__":
    entry_point(CoreConfig, main)
