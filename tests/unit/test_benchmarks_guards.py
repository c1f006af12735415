"""The list of guards agrees with the comments in the code, and the tool that removes guards tells if a test notices."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cluster import ROOT
from benchmarks.guards import (
    NO_CONTEXT,
    Guard,
    faults_of,
    find_markers,
    guard_row,
    load_guards,
    removed_from,
    unlisted,
    without,
)
from benchmarks.passing import FAILED, PASSED, run_tests
from benchmarks.tables import Row
from spes_p2p.errors import DataError

GUARD = Guard("odd-refused", "nothing odd", "H1", "never", ("test_code.py::test_odd",))
CODE = """def check(odd):
    if odd:  # guard: odd-refused
        raise ValueError
"""
TEST = """import sys
sys.path.insert(0, "spes_p2p")
import code_, pytest
def test_odd():
    with pytest.raises(ValueError):
        code_.check(True)
"""


def test_every_guard_is_marked_once_in_the_code_and_its_tests_exist() -> None:
    guards, markers = load_guards(), find_markers()
    assert len(guards) >= 100
    assert len({guard.id for guard in guards}) == len({guard.name for guard in guards}) == len(guards)
    assert [fault for guard in guards for fault in faults_of(guard, markers)] == []
    assert unlisted(guards, markers) == []


@pytest.mark.full  # the tool that removes guards refuses such a case as well
def test_every_case_that_must_notice_a_guards_removal_exists(tmp_path: Path) -> None:
    """Its parameters too, which `faults_of` does not read."""
    tests = sorted({test for guard in load_guards() for test in guard.tests})
    found = run_tests(ROOT, tests, 100, tmp_path, "--collect-only")
    assert found.code == PASSED, found.output


def test_every_weakness_of_stock_hivemind_that_is_ours_to_close_has_a_guard() -> None:
    closed = {guard.closes for guard in load_guards()}
    assert closed >= {f"H{number}" for number in range(1, 16)} | {"H3b", "H3c"}


@pytest.mark.parametrize(
    ("remove", "marked", "removed"),
    [
        ("never", "if odd:  # guard: x\n    pass", "if False:\n    pass"),
        ("never", "if a:\n    pass\nelif odd:  # guard: x\n    pass", "if a:\n    pass\nelif False:\n    pass"),
        ("never", "while (\n    odd\n    and even\n):  # guard: x\n    pass", "while False:\n    pass"),
        ("never", "if any(x for x in odd if x):  # guard: x\n    pass", "if False:\n    pass"),
        ("never", "y = 1 if odd else 2  # guard: x", "y = 1 if False else 2"),
        ("never", "for x in odd:  # guard: x\n    pass", "for x in ():\n    pass"),
        ("never", "try:\n    f()\nexcept Odd as e:  # guard: x\n    pass", "try:\n    f()\nexcept () as e:\n    pass"),
        ("always", "y = [x for x in odd if x]  # guard: x", "y = [x for x in odd if True]"),
        (
            "always",
            "if y := [\n    x\n    for x in odd\n    if x  # guard: x\n]:\n    pass",
            "if y := [x for x in odd if True]: pass",
        ),
        ("skip", "refuse(\n    odd  # guard: x\n)", "pass"),
        ("skip", "class A:\n    @odd\n    def f(self):  # guard: x\n        return 1", "class A:\n    pass"),
        ("skip", "with odd(1):  # guard: x\n    f()", f"with {NO_CONTEXT}:\n    f()"),
        ("operand", "if a or b or odd:  # guard: x\n    pass", "if a or b:\n    pass"),
        ("operand", "y = a and (\n    odd  # guard: x\n    or b\n)", "y = a and b"),
        ("operand", "y = a and (b or odd)  # guard: x", "y = a"),
        ("first", "y = fair(é[0])  # guard: x", "y = é[0]"),
        ("first", "y: Annotated[int, Field(ge=0)]  # guard: x", "y: int"),
        (("1", "2"), "y = f(\n    a=1,  # guard: x\n)", "y = f(a=2)"),
        (("x", "y"), "if x:  # guard: x\n    x()", "if y:\n    x()"),
    ],
)
def test_each_kind_of_removal_edits_the_marked_line(remove: str | tuple[str, str], marked: str, removed: str) -> None:
    (line,) = [number for number, text in enumerate(marked.split("\n"), 1) if "# guard: x" in text]
    assert ast.dump(ast.parse(removed_from(marked, line, remove))) == ast.dump(ast.parse(removed))


@pytest.mark.parametrize(
    ("remove", "line", "says"),
    [
        ("never", "f()", "0 conditions"),
        ("never", "y = [a if b else c, d if e else f]", "2 conditions"),
        ("always", "for x in y: \n    pass", "needs a condition"),
        ("operand", "y = a", "0 operations"),
        ("first", "y = f(1) + g(2)", "2 calls"),
        ("skip", "# nothing", "not on a statement's line"),
        ("drop", "y = a", "unknown removal 'drop'"),
        (("a", "b"), "a = a", "2 times"),
    ],
)
def test_a_removal_that_does_not_fit_the_line_is_refused(remove: str | tuple[str, str], line: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        removed_from(line, 1, remove)


@pytest.fixture
def house(tmp_path: Path) -> Path:
    (tmp_path / "spes_p2p").mkdir()
    (tmp_path / "spes_p2p" / "code_.py").write_text(CODE)
    (tmp_path / "compose.yaml").write_text("read_only: true  # guard: root-read-only\n")
    (tmp_path / "test_code.py").write_text(TEST)
    return tmp_path


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda guard: replace(guard, id="even-refused"), "occurs 0 times"),
        (lambda guard: replace(guard, id="Odd"), "two to five lower-case words"),
        (lambda guard: replace(guard, remove=("odd", "")), "invalid syntax"),
        (lambda guard: replace(guard, remove=("odd", "odd")), "changes nothing"),
        (lambda guard: replace(guard, remove="operand"), "spes_p2p/code_.py:2: 0 operations"),
        (lambda guard: replace(guard, tests=()), "names no test"),
        (lambda guard: replace(guard, tests=("test_code.py::test_even",)), "no test test_code.py::test_even"),
        (lambda guard: replace(guard, tests=("test_gone.py::test_odd",)), "no test test_gone.py::test_odd"),
    ],
)
def test_an_entry_that_is_out_of_date_is_found(house: Path, spoil: Callable[[Guard], Guard], says: str) -> None:
    markers = find_markers(house)
    assert list(faults_of(GUARD, markers, house)) == []
    assert says in " ".join(faults_of(spoil(GUARD), markers, house))


def test_a_marker_that_occurs_twice_or_has_no_entry_is_found(house: Path) -> None:
    assert unlisted([GUARD], find_markers(house)) == ["root-read-only"]
    (house / "spes_p2p" / "more.py").write_text(CODE)
    assert "occurs 2 times" in " ".join(faults_of(GUARD, find_markers(house), house))


def test_outside_python_only_the_marked_line_is_edited(house: Path) -> None:
    guard = replace(GUARD, id="root-read-only", remove=("true", "false"))
    assert without(guard, find_markers(house), house)[1] == "read_only: false\n"
    assert "is for Python" in " ".join(faults_of(replace(guard, remove="never"), find_markers(house), house))


@pytest.mark.full
def test_a_failure_is_told_from_a_test_that_cannot_run(house: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("reports")
    passes = run_tests(house, GUARD.tests, 60.0, folder)
    assert (passes.code, passes.failures, passes.tests) == (PASSED, 0, 1)
    file, content = without(GUARD, find_markers(house), house)
    file.write_text(content)
    fails = run_tests(house, GUARD.tests, 60.0, folder)
    assert (fails.code, fails.failures) == (FAILED, 1)
    file.write_text("import nothing_of_that_name\n")
    assert run_tests(house, GUARD.tests, 60.0, folder).code not in (PASSED, FAILED)


def test_the_row_is_reached_only_if_all_are_missed() -> None:
    other = replace(GUARD, id="even-refused")
    assert guard_row([GUARD, other], []) == Row("guards whose removal turns a test red", "2 of 2", "all", True)
    assert guard_row([GUARD, other], [other]).cells[1:] == ("1 of 2", "all", "NO")
    assert not guard_row([], []).is_reached
