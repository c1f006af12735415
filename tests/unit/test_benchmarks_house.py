"""Each figure of the house is counted on small trees that break it, beside what looks alike and does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import house
from benchmarks.house import (
    BY_HAND,
    COUNTS,
    LONE,
    NOT_MEASURED,
    Figure,
    answer_seconds,
    counted,
    lane_figures,
    measured_by_hand,
    record_before,
)
from spes_p2p.errors import ConfigError, SpesError

LONG_DOCSTRING = 'def f():\n    """\n' + "    more\n" * 50 + '    """\n' + "    x = 1\n" * 59
ENTRIES = '''class A:
    """For a test.

    Args:
        a: Which.
        b: Whose
            peers.
        c: This one has more words,
            on two lines.

    Raises:
        ValueError: never.
        KeyError: never.
    """

def f():
    """Return something.

    Returns:
        Seconds.
    """
'''
BASH = "# Name\n\n```\noutput\n```\n\n```bash\n# what it does\n\n./run.sh\n```\n"
PARAMETERS = "a, b, c, d, /, e, f, *, g, h"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("count", "files", "expected"),
    [
        (house.num_lines, {"spes_p2p/__init__.py": "a\nb\n", "monitor/c/d.py": "e", "peers/f.py": "g\n"}, 3),
        (house.num_files, {"spes_p2p/__init__.py": "", "monitor/c/d.py": "", "peers/f.py": "", "monitor/g.js": ""}, 2),
        (house.num_tuple_assignments, {"spes_p2p/a.py": "def f(x):\n    x.a, x.b = 1, 2\n    c, x.d, x.e = g()\n"}, 2),
        (house.num_tuple_assignments, {"monitor/a.py": "a.x, b = 1, 2\nc, d = 1, 2\na.e = a.f = 1\n"}, 0),
        (house.num_odd_lines_of_code, {"scripts/a.py": "# Who knows whom\nx = 1  # nobody\n"}, 2),
        (house.num_odd_lines_of_code, {"spes_p2p/a.py": "whole, nobody_asked, whose, for_who = 1, 2, 3, 4\n"}, 0),
        (house.num_odd_lines_of_code, {"tests/a.py": "# who\n", "docs/a.md": "who"}, 0),
        (house.num_odd_lines_of_docs, {"README.md": "Whoever\nwhole", "docs/b/c.md": "who\n", "a.md": "who"}, 2),
        (lambda root: house.num_stubs(root, 1), {"spes_p2p/a.py": ENTRIES}, 2),
        (lambda root: house.num_stubs(root, 2), {"spes_p2p/a.py": ENTRIES}, 1),
        (house.num_long_functions, {"benchmarks/a.py": "async def f():\n" + "    x = 1\n" * 60}, 1),
        (house.num_long_functions, {"benchmarks/a.py": "def f():\n" + "    x = 1\n" * 59}, 0),
        (house.num_long_functions, {"monitor/a.py": LONG_DOCSTRING}, 0),
        (house.num_long_functions, {"monitor/a.py": LONG_DOCSTRING + "    x = 1\n"}, 1),
        (house.num_long_constructors, {"peers/a.py": f"class A:\n    def __init__(self, {PARAMETERS}, i): ...\n"}, 1),
        (house.num_long_constructors, {"peers/a.py": f"class A:\n    def __init__(self, {PARAMETERS}): ...\n"}, 0),
        (house.num_long_constructors, {"peers/a.py": f"class A:\n    def f(self, {PARAMETERS}, i): ...\n"}, 0),
        (house.num_long_constructors, {"peers/a.py": "class A:\n" + "".join(f"    f{i}: int\n" for i in range(9))}, 0),
        (house.first_command_line, {"README.md": BASH}, 10),
        (house.first_command_line, {"README.md": "a\n\nb\n"}, 3),
        (lambda root: house.table_share(root, lambda _: 1), {"README.md": "a b c d\n| e |\n\nf\n"}, 25),
        (lambda root: house.table_share(root, len), {"README.md": "abc\n| d |\n"}, 62.5),
    ],
)
def test_a_figure_is_counted(
    tmp_path: Path, count: Callable[[Path], float], files: dict[str, str], expected: float
) -> None:
    write(tmp_path, files)
    assert count(tmp_path) == expected


def test_every_way_to_import_a_module_counts_and_so_does_a_reexport(tmp_path: Path) -> None:
    texts = {
        "__init__.py": "from spes_p2p.exported import x",
        "exported.py": "import os",
        "room/__init__.py": "from . import relative\nfrom .. import above",
        "room/relative.py": "from .relative import itself",
        "room/user.py": "def f():\n    import spes_p2p.lazy\n    from ..twice import x, y",
        "twice.py": "",
        **{"above.py": "", "lazy.py": "", "shared.py": "", "unused.py": "", "dotted.py": ""},
        "other.py": "from spes_p2p import shared, room\nfrom spes_p2p.shared import x",
    }
    write(tmp_path, {f"spes_p2p/{name}": text for name, text in texts.items()})
    write(tmp_path, {"monitor/a.py": "from spes_p2p import shared\nif True:\n    from spes_p2p.dotted import x as y"})
    write(tmp_path, {"peers/a.py": "import spes_p2p.unused"})
    assert house.lone_modules(tmp_path) == {
        "spes_p2p.exported": "spes_p2p",
        "spes_p2p.room.relative": "spes_p2p.room",
        "spes_p2p.above": "spes_p2p.room",
        "spes_p2p.lazy": "spes_p2p.room.user",
        "spes_p2p.twice": "spes_p2p.room.user",
        "spes_p2p.room": "spes_p2p.other",
        "spes_p2p.dotted": "monitor.a",
    }


def test_a_module_moved_with_its_package_is_counted_under_its_new_name(tmp_path: Path) -> None:
    write(tmp_path, {"spes_p2p/monitor/peer.py": "from spes_p2p.monitor import watch", "spes_p2p/monitor/watch.py": ""})
    write(tmp_path, {"monitor/run_monitor.py": "from spes_p2p.monitor.peer import main"})
    alone = house.lone_modules(tmp_path)
    assert alone == {"spes_p2p.monitor.peer": "monitor.run_monitor", "spes_p2p.monitor.watch": "spes_p2p.monitor.peer"}
    assert house.num_files(tmp_path) == 3


def figures(root: Path, reasons: dict[str, str]) -> dict[str, Figure]:
    return {figure.row.figure: figure for figure in counted({count.figure: 7.0 for count in COUNTS}, root, reasons)}


def test_a_goal_is_reached_by_few_enough_and_by_lone_modules_only_with_reasons(tmp_path: Path) -> None:
    write(
        tmp_path, {"README.md": "a\n" * 200, "spes_p2p/a.py": "x.a, x.b = 1, 2\n", "spes_p2p/b.py": "import spes_p2p.a"}
    )
    without, with_reason = figures(tmp_path, {}), figures(tmp_path, {"spes_p2p.a": "for a test"})
    assert without["README, lines"].cells == ("README, lines", "7", "200", "200", "yes")
    assert without["assignments of a tuple to several attributes"].cells[2:] == ("1", "0", "NO")
    assert without["- share of tables, by lines"].cells[1:] == ("7 %", "0 %", "10 %", "yes")
    assert without["- of two words"].cells[3:] == ("", "")
    assert without[LONE.figure].cells[2:] == ("1, 0 with a reason", "12, each with a reason", "NO")
    assert with_reason[LONE.figure].cells[2:] == ("1, 1 with a reason", "12, each with a reason", "yes")
    write(tmp_path, {"README.md": "a\n" * 201})
    assert figures(tmp_path, {})["README, lines"].row.is_reached is False


def runs(*minutes: float | None) -> list[dict[str, object]]:
    return [{"seconds": 60 * (each or 1), "passed": each is not None} for each in minutes]


@pytest.mark.parametrize(
    ("given", "minutes", "in_a_row"),
    [
        ([], (NOT_MEASURED, ""), (NOT_MEASURED, "")),
        (runs(30, *[11] * 9, 12), ("12.0", "yes"), ("11", "yes")),
        (runs(None, 13, *[11] * 8), ("13.0", "NO"), ("9", "NO")),
        (runs(*[11] * 10, None), ("-", ""), ("0", "NO")),
    ],
)
def test_the_lane_is_judged_by_its_last_runs_without_a_red(
    given: list[dict[str, object]], minutes: tuple[str, str], in_a_row: tuple[str, str]
) -> None:
    first, second = (figure.cells for figure in lane_figures(given))
    assert (first[2], first[4]) == minutes and (second[2], second[4]) == in_a_row


def test_what_was_measured_elsewhere_is_read_and_a_misspelt_row_is_refused() -> None:
    figure, *others = measured_by_hand({"delta_places": {"value": 10}})
    assert figure.cells == (BY_HAND["delta_places"].figure, "22", "10", "10", "yes")
    assert {other.cells[2] for other in others} == {NOT_MEASURED} and {other.cells[4] for other in others} == {""}
    assert next(measured_by_hand({"delta_places": {"value": 11}})).row.is_reached is False
    with pytest.raises(ConfigError, match="no row is called 'delta_place'"):
        list(measured_by_hand({"delta_place": {"value": 10}}))


def test_without_history_the_recorded_counts_stand_and_without_a_record_it_says_what_to_do(tmp_path: Path) -> None:
    recorded = {count.figure: 7.0 for count in COUNTS}
    record_before(None, recorded)
    assert set(recorded.values()) == {7.0}
    del recorded[LONE.figure]
    with pytest.raises(ConfigError, match="git fetch --unshallow"):
        record_before(None, recorded)
    write(tmp_path, {"README.md": "a\n", "spes_p2p/a.py": "b\n"})
    record_before(tmp_path, recorded)
    assert recorded[LONE.figure] == 0 and recorded["- files"] == 1


def test_no_two_rows_share_a_name() -> None:
    names = [row.figure for row in (*COUNTS, *BY_HAND.values())]
    assert len(set(names)) == len(names)


PROGRAM = """import sys, time
time.sleep(0.2)
print("--help, --run-id" if "--help" in sys.argv else "error: unknown " + sys.argv[1])
sys.exit(0 if "--help" in sys.argv else {code})
"""


def test_an_answer_is_timed_and_another_answer_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"good.py": PROGRAM.format(code=2), "mute.py": PROGRAM.format(code=0)})
    assert 0.2 <= answer_seconds(tmp_path, ["good.py"], "--help") < 60
    assert 0.2 <= answer_seconds(tmp_path, ["good.py"], "--no-such-flag", "1") < 60
    with pytest.raises(SpesError, match="ended with 0"):
        answer_seconds(tmp_path, ["mute.py"], "--no-such-flag", "1")
