"""The figures of the redrawn house as a Markdown table: at f5f8ccb, now, and to reach.

    .venv/bin/python benchmarks/house.py [--write] [--quick]

Sizes are counted in the sources. The answers to `--help` are timed here, those of f5f8ccb too. What takes a person or
a fresh machine is read from `results/house_measured.json`, and the commit lane's runs from `results/lanes.json`.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_settings import SettingsConfigDict

from benchmarks.cluster import ROOT
from benchmarks.machine import Circumstances, load_average
from benchmarks.tables import HEAD, Row, markdown_table
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, LogLevel
from spes_p2p.errors import ConfigError, SpesError
from spes_p2p.presentation import say

BASE = "f5f8ccb"
RESULTS = ROOT / "benchmarks" / "results"
GOLDEN = "tests/unit/test_golden_runs.py"
REASONS = {
    "spes_p2p.commands.evaluate": "a command, whose table a monitor's tasks print too",
    "spes_p2p.commands.monitor": "a command, which the local experiment starts too",
    "spes_p2p.data.token_parts": "all that a tokenising process imports, so that it starts without torch",
    "spes_p2p.data.tokenise": "the work without the command's flags",
    "spes_p2p.data.tokenizer_child": "the program of a process of its own",
    "spes_p2p.monitor.tasks": "runs lm-eval in a process beside the watch",
    "spes_p2p.peer.settings": "what a founder decides before there is a swarm, tested without one",
    "spes_p2p.swarm.decision": "what a voter does in a round, on messages alone; the consensus has network and disk",
    "spes_p2p.__main__": "the one command, which entry scripts start",
    "spes_p2p.swarm.averaging.averager": "the averager's process; the swarm starts it",
    "spes_p2p.swarm.exchange.client": "the pulling side of the exchange",
    "spes_p2p.swarm.membership": "records of the live peers, tested without an averager",
    "spes_p2p.training.checkpointer": "what a checkpoint holds; `checkpoint` only knows how it lies on disk",
    "spes_p2p.monitor.report": "the final page, drawn from a view alone; the benchmarks draw it too",
    "spes_p2p.peer.page": "reads the swarm's records beside the training, for the page alone",
    "spes_p2p.optim.blockwise": "all that is known of bitsandbytes, which is optional",
    "spes_p2p.swarm.averaging.allreduce": "one group's exchange of vectors; the averager runs many at a time",
    "spes_p2p.swarm.averaging.matchmaking": "how members find each other, before they exchange anything",
    "spes_p2p.training.fetch_plan": "pure functions, tested without a network",
    "spes_p2p.monitor.checkpoints": "checkpoints on their way to stores, in threads beside the watch",
    "spes_p2p.optim.inner": "the update rules, which a reader looks for by their name",
    "spes_p2p.swarm.p2p.introductions": "who can call whom, with bounds on what a stranger can cause",
    "spes_p2p.swarm.p2p.port_map": "the only caller of miniupnpc, which is optional",
}
"""Why a module with exactly one importer stands alone."""
MAX_LANE_MINUTES, LANE_RUNS = 12, 10
MAX_ANSWER_SECONDS, NUM_ANSWERS = 1.0, 5
ANSWER_TIMEOUT_SECONDS, GOLDEN_TIMEOUT_SECONDS = 120, 3600
COMMANDS = ("peer", "monitor", "local", "plan", "invite", "evaluate", "upcycle", "export", "simulate", "health")
NOT_MEASURED = "not measured"
LIBRARY = ("spes_p2p", "monitor")
CODE = (*LIBRARY, "peers", "scripts", "benchmarks")
WORDS = ("whoever", "whom", "who", "nobody")
MAX_FUNCTION_LINES, MAX_PARAMETERS = 60, 8


def sources(root: Path, folders: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Yield path and text of each Python file in some of the repository's folders."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            yield path, path.read_text(encoding="utf-8")


def nodes(root: Path, folders: Sequence[str]) -> Iterator[ast.AST]:
    """Yield each node of the syntax trees of these files."""
    for _, text in sources(root, folders):
        yield from ast.walk(ast.parse(text))


def num_lines(root: Path) -> int:
    """Count the library's lines."""
    return sum(len(text.splitlines()) for _, text in sources(root, LIBRARY))


def num_files(root: Path) -> int:
    """Count the library's files."""
    return sum(1 for _ in sources(root, LIBRARY))


def lone_modules(root: Path) -> dict[str, str]:
    """Map each module that exactly one other module of the library imports to this importer.

    Imports inside functions count, and so does an `__init__` that re-exports a name.
    """
    texts = {_module_name(path.relative_to(root)): (path, text) for path, text in sources(root, LIBRARY)}
    importers = defaultdict(set)
    for importer, (path, text) in texts.items():
        package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
        for node in ast.walk(ast.parse(text)):
            for name in _imported(node, package, texts):
                if name in texts and name != importer:
                    importers[name].add(importer)
    return {name: min(found) for name, found in sorted(importers.items()) if len(found) == 1}


def _module_name(path: Path) -> str:
    return ".".join(path.parent.parts if path.name == "__init__.py" else path.with_suffix("").parts)


def _imported(node: ast.AST, package: str, modules: Mapping[str, object]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            yield name if (name := f"{base}.{alias.name}") in modules else base


def num_tuple_assignments(root: Path) -> int:
    """Count the library's statements such as `self.a, self.b = a, b`."""
    targets = (t for node in nodes(root, LIBRARY) if isinstance(node, ast.Assign) for t in node.targets)
    tuples = (target.elts for target in targets if isinstance(target, ast.Tuple))
    return sum(sum(isinstance(element, ast.Attribute) for element in elements) >= 2 for elements in tuples)


def _num_with_words(text: str) -> int:
    pattern = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
    return sum(bool(pattern.search(line)) for line in text.splitlines())


def num_odd_lines_of_code(root: Path) -> int:
    """Count lines with one of `WORDS` in all code but the tests."""
    return sum(_num_with_words(text) for _, text in sources(root, CODE))


def num_odd_lines_of_docs(root: Path) -> int:
    """Count lines with one of `WORDS` in docs/ and README.md."""
    pages = [*(root / "docs").rglob("*.md"), root / "README.md"]
    return sum(_num_with_words(page.read_text(encoding="utf-8")) for page in pages)


def num_stubs(root: Path, num_words: int) -> int:
    """Count entries of the library's docstrings whose text has exactly `num_words` words."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = (ast.get_docstring(node) for node in nodes(root, LIBRARY) if isinstance(node, documented))
    return sum(len(entry.split()) == num_words for text in docstrings for entry in _entries(text or ""))


def _entries(docstring: str) -> Iterator[str]:
    """Yield the texts, without their names, of a docstring's Args, Attributes and Returns."""
    for section in re.findall(r"^(?:Args|Attributes|Returns):\n((?: .*\n?|\n)+)", docstring, re.MULTILINE):
        for entry in re.split(r"^ {4}(?! )", section, flags=re.MULTILINE)[1:]:
            yield entry.partition(": ")[2] or entry


def num_long_functions(root: Path) -> int:
    """Count functions of more than 60 lines, docstrings not counted, in all code but the tests."""
    functions = (node for node in nodes(root, CODE) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return sum(_num_body_lines(function) > MAX_FUNCTION_LINES for function in functions)


def _num_body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    docstring = function.body[:1] if ast.get_docstring(function) is not None else []
    whole, *without = ((node.end_lineno or node.lineno) - node.lineno + 1 for node in (function, *docstring))
    return whole - sum(without)


def num_long_constructors(root: Path) -> int:
    """Count the `__init__` with more than 8 parameters, `self` excluded, in all code but the tests."""
    classes = (node for node in nodes(root, CODE) if isinstance(node, ast.ClassDef))
    members = (member for class_ in classes for member in class_.body if isinstance(member, ast.FunctionDef))
    arguments = (member.args for member in members if member.name == "__init__")
    return sum(len([*a.posonlyargs, *a.args, *a.kwonlyargs]) - 1 > MAX_PARAMETERS for a in arguments)


def readme_lines(root: Path) -> list[str]:
    """Return README's lines."""
    return (root / "README.md").read_text(encoding="utf-8").splitlines()


def first_command_line(root: Path) -> int:
    """Return the number of the first command's line in README; the number of lines if there is none."""
    lines, is_inside = readme_lines(root), False
    for number, line in enumerate(lines, start=1):
        if line.startswith("```"):
            is_inside = line.strip() == "```bash"
        elif is_inside and line.strip() and not line.startswith("#"):
            return number
    return len(lines)


def table_share(root: Path, size: Callable[[str], int]) -> float:
    """Return the percentage of README that stands in tables, by a line's size."""
    lines = readme_lines(root)
    return 100 * sum(size(line) for line in lines if line.startswith("|")) / sum(map(size, lines))


class HouseConfig(CommandConfig):
    """Count and time what issue 23 asks for, and print it beside the goals."""

    model_config = SettingsConfigDict(cli_prog_name="house.py")

    write: bool = False
    """Write the table to benchmarks/results/house.md, and the figures to house.json."""
    quick: bool = False
    """Only count: time no command and run no golden test."""
    log_level: LogLevel = "warning"


class Count(NamedTuple):
    """A figure counted in the sources, and the most it may come to, if there is a goal."""

    figure: str
    measure: Callable[[Path], float]
    most: float | None
    unit: str = ""

    def text(self, value: float) -> str:
        """Return a value with its unit."""
        return f"{value:,.0f}{self.unit}"


LONE = Count("modules with exactly one importer", lambda root: len(lone_modules(root)), 12)
COUNTS = (
    Count("library and monitor, lines", num_lines, 21_500),
    Count("- files", num_files, 125),
    LONE,
    Count("assignments of a tuple to several attributes", num_tuple_assignments, 0),
    Count(f"lines with {', '.join(WORDS)}: code", num_odd_lines_of_code, 40),
    Count("- docs and README", num_odd_lines_of_docs, 20),
    Count("docstring entries of one word", lambda root: num_stubs(root, 1), 0),
    Count("- of two words", lambda root: num_stubs(root, 2), None),
    Count(f"functions over {MAX_FUNCTION_LINES} lines", num_long_functions, 0),
    Count(f"constructors with more than {MAX_PARAMETERS} parameters", num_long_constructors, 0),
    Count("README, lines", lambda root: len(readme_lines(root)), 200),
    Count("- line of the first command", first_command_line, 15),
    Count("- share of tables, by lines", lambda root: table_share(root, lambda _: 1), 10, " %"),
    Count("- share of tables, by words", lambda root: table_share(root, lambda line: len(line.split())), 10, " %"),
)


class ByHand(NamedTuple):
    """A figure that a person or another script measures: at f5f8ccb, and the most it may come to."""

    figure: str
    before: str
    most: float


BY_HAND = {
    "delta_places": ByHand("places that a delta visits from trainer to commit", "22", 10),
    "delta_files": ByHand("- files visited", "9", 5),
    "delta_returns": ByHand("- returns", "13", 4),
    "first_line_seconds": ByHand("first command, environment made already: first line, s", "5", 2),
    "first_round_seconds": ByHand("- first round, s", "94", 45),
    "first_command_minutes": ByHand("- whole, on two quiet cores, min", "10 to 15", 10),
    "install_minutes": ByHand("installation, cold, with a CPU build of torch: min", "7.4", 5),
    "install_gb": ByHand("- size, GB", "1.7", 1.3),
    "install_silence_seconds": ByHand("- longest silence, s", "441", 10),
    "stumbles_without_test": ByHand("parts of item 8 without a test", "", 0),
    "reader_minutes": ByHand("minutes until a new reader can tell what happens between two commits", "", 20),
}


class Figure(NamedTuple):
    """A row of the table, and its value at f5f8ccb."""

    before: str
    row: Row

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        return self.row.figure, self.before, *self.row.cells[1:]


def counted(before: Mapping[str, float], root: Path, reasons: Mapping[str, str]) -> Iterator[Figure]:
    """Yield what the sources come to."""
    for count in COUNTS:
        now = count.measure(root)
        text, goal, is_reached = count.text(now), "", None
        if count.most is not None:
            goal, is_reached = count.text(count.most), now <= count.most
        if count is LONE:
            alone = lone_modules(root).keys()
            text, goal = f"{text}, {len(alone & reasons.keys())} with a reason", f"{goal}, each with a reason"
            is_reached = bool(is_reached) and alone <= reasons.keys()
        yield Figure(count.text(before[count.figure]), Row(count.figure, text, goal, is_reached))


def lane_figures(runs: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    """Yield how long the commit lane took, at most, in the last runs without a red, and how many these are."""
    last_red = max((number for number, run in enumerate(runs, start=1) if not run["passed"]), default=0)
    green = runs[last_red:]
    minutes = max((run["seconds"] / 60 for run in green[-LANE_RUNS:]), default=None)
    time_text, green_text = NOT_MEASURED, NOT_MEASURED
    if runs:
        time_text, green_text = "-" if minutes is None else f"{minutes:.1f}", str(len(green))
    is_fast = minutes <= MAX_LANE_MINUTES if minutes is not None else None
    yield Figure("26 to 39", Row("commit lane on two cores, min", time_text, f"{MAX_LANE_MINUTES}", is_fast))
    is_steady = len(green) >= LANE_RUNS if runs else None
    yield Figure("", Row("- runs in a row without a red", green_text, f"{LANE_RUNS} of {LANE_RUNS}", is_steady))


def measured_by_hand(measured: Mapping[str, Mapping[str, Any]]) -> Iterator[Figure]:
    """Yield what was measured elsewhere.

    Raises:
        ConfigError: a value belongs to no row.
    """
    if unknown := sorted(measured.keys() - BY_HAND.keys()):
        raise ConfigError(f"house_measured.json: no row is called {unknown[0]!r}; choose from {', '.join(BY_HAND)}")
    for key, (figure, before, most) in BY_HAND.items():
        value = measured.get(key, {}).get("value")
        text, is_reached = (NOT_MEASURED, None) if value is None else (f"{value:g}", value <= most)
        yield Figure(before, Row(figure, text, f"{most:g}", is_reached))


def answer_seconds(tree: Path, program: Sequence[str], *flags: str) -> float:
    """Return the median time in which a program answers `--help` or a wrong flag.

    Raises:
        SpesError: it answered something else.
    """
    words, environment = [sys.executable, *program, *flags], {**os.environ, "PYTHONPATH": str(tree)}
    seconds = []
    for _ in range(NUM_ANSWERS):
        began = time.monotonic()
        ended = subprocess.run(
            words, cwd=tree, env=environment, capture_output=True, text=True, timeout=ANSWER_TIMEOUT_SECONDS
        )
        seconds.append(time.monotonic() - began)
        said = ended.stdout + ended.stderr
        if (ended.returncode == 0) != (flags[0] == "--help") or flags[0] not in said:
            raise SpesError(f"{' '.join(words)} ended with {ended.returncode}; it said:\n{said[-1000:]}")
    return statistics.median(seconds)


def timed(base: Path | None, recorded: dict[str, float]) -> Iterator[Figure]:
    """Yield the slowest answer of all programs, beside that of `peers/run_peer.py` at f5f8ccb, which is recorded."""
    peer = ("peers/run_peer.py",)
    usage = subprocess.run([sys.executable, "-m", "spes_p2p", "--help"], cwd=ROOT, capture_output=True, text=True)
    programs = [peer, *(("-m", "spes_p2p", name) for name in COMMANDS if f"\n  {name} " in usage.stdout)]
    for figure, *flags in (("`--help`, s until answered", "--help"), ("- a wrong flag", "--no-such-flag", "1")):
        if base is not None:
            recorded[figure] = round(answer_seconds(base, peer, *flags), 2)
        slowest, program = max((answer_seconds(ROOT, program, *flags), program) for program in programs)
        text = f"{slowest:.2f}, {program[-1]}, slowest of {len(programs)}"
        row = Row(figure, text, f"{MAX_ANSWER_SECONDS:g}", slowest <= MAX_ANSWER_SECONDS)
        yield Figure(f"{recorded[figure]:.2f}" if figure in recorded else "", row)


def golden() -> Figure:
    """Return whether simulated runs still have the digests that were committed before the first move."""
    text, is_reached = NOT_MEASURED, None
    if (ROOT / GOLDEN).exists():
        words = [sys.executable, "-m", "pytest", "-q", "-m", "", GOLDEN]
        ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=GOLDEN_TIMEOUT_SECONDS)
        text = ended.stdout.strip().rpartition("\n")[2].strip("= ")
        is_reached = ended.returncode == 0 and "skipped" not in text
    return Figure("", Row("golden digests equal", text, "all", is_reached))


def extract_base(folder: Path) -> Path | None:
    """Put the sources of f5f8ccb into a folder and return it; None if the history does not reach that far."""
    command = ["git", "archive", BASE, *CODE, "docs", "README.md"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True)
    if ended.returncode != 0:
        return None
    with tarfile.open(fileobj=io.BytesIO(ended.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def record_before(base: Path | None, recorded: dict[str, float]) -> None:
    """Record the counts of f5f8ccb; without its sources, those recorded earlier stay.

    Raises:
        ConfigError: there are none.
    """
    if base is not None:
        recorded.update({count.figure: round(count.measure(base), 1) for count in COUNTS})
    elif missing := [count.figure for count in COUNTS if count.figure not in recorded]:
        raise ConfigError(f"no history back to {BASE}, no record of {missing[0]!r}; run `git fetch --unshallow`")


def notes(alone: Mapping[str, str], measured: Mapping[str, Mapping[str, Any]], circumstances: Circumstances) -> str:
    """Return which modules stand alone and why, how the figures from elsewhere were measured, and where these were."""
    lines = [f"`{name}`, imported by `{by}`: {REASONS.get(name, 'no reason given')}" for name, by in alone.items()]
    lines += [f"`{name}`: has a reason in REASONS and needs none" for name in sorted(REASONS.keys() - alone.keys())]
    for key, entry in measured.items():
        lines.append(f"{BY_HAND[key].figure.removeprefix('- ')}: {entry['note']}; {entry['date']}, {entry['machine']}")
    lines.append(
        f"counted and timed at {circumstances.commit}, {circumstances.date}: {circumstances.cpu}, "
        f"{circumstances.cores} cores, {circumstances.memory_gib:g} GiB, load average {circumstances.load_before:.2f}"
    )
    return "\n".join(f"- {line}" for line in lines) + "\n"


def _read(name: str, default: Any) -> Any:
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else default


def main(config: HouseConfig) -> int:
    """Measure, print and write; return 0 whether or not the goals are reached.

    Raises:
        ConfigError: the page would lack rows.
    """
    if config.quick and config.write:
        raise ConfigError("--quick leaves rows out, so there is nothing to --write; take one of them away")
    load_before = load_average()
    before, measured = _read("house.json", {"before": {}})["before"], _read("house_measured.json", {})
    with tempfile.TemporaryDirectory() as folder:
        base = extract_base(Path(folder))
        record_before(base, before)
        figures = [*counted(before, ROOT, REASONS), *lane_figures(_read("lanes.json", [])), *measured_by_hand(measured)]
        if not config.quick:
            figures += [*timed(base, before), golden()]
    circumstances = Circumstances.now(load_before, None)
    table = markdown_table((HEAD[0], "before", "now", *HEAD[2:]), [figure.cells for figure in figures])
    page = f"{table}\n{notes(lone_modules(ROOT), measured, circumstances)}"
    say(page)
    if config.write:
        (RESULTS / "house.md").write_text(f"# The house, counted and timed\n\n{page}", encoding="utf-8")
        now = {figure.row.figure: figure.row.measured for figure in figures}
        document = {"before": before, "now": now, "circumstances": asdict(circumstances)}
        (RESULTS / "house.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    entry_point(HouseConfig, main)
