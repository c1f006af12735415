"""The list of guards says what is in the library, and the script that removes them can tell who misses one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.guards import FAILED, PASSED, Guard, faults_of, guard_row, load_guards, run_tests
from benchmarks.tables import Row

GUARD = Guard("nothing odd", "H1", "code.py", "if odd:", "if False:", ("test_code.py::test_odd",))
CODE = "def check(odd):\n    if odd:\n        raise ValueError\n"
TEST = """import code_, pytest
def test_odd():
    with pytest.raises(ValueError):
        code_.check(True)
"""


def test_every_guard_is_where_the_list_says_and_so_are_its_tests() -> None:
    guards = load_guards()
    assert len(guards) >= 100 and len({guard.name for guard in guards}) == len(guards)
    assert [fault for guard in guards for fault in faults_of(guard)] == []


def test_every_weakness_of_stock_hivemind_that_is_ours_to_close_has_a_guard() -> None:
    closed = {guard.closes for guard in load_guards()}
    assert closed >= {f"H{number}" for number in range(1, 16)} | {"H3b", "H3c"}


@pytest.fixture
def house(tmp_path: Path) -> Path:
    (tmp_path / "code_.py").write_text(CODE)
    (tmp_path / "test_code.py").write_text(TEST)
    return tmp_path


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda guard: replace(guard, text="if even:"), "holds 0 times"),
        (lambda guard: replace(guard, text="d"), "times 'd'"),
        (lambda guard: replace(guard, without="if:"), "invalid syntax"),
        (lambda guard: replace(guard, without=guard.text), "takes nothing away"),
        (lambda guard: replace(guard, tests=()), "names no test"),
        (lambda guard: replace(guard, tests=("test_code.py::test_even",)), "no test test_code.py::test_even"),
        (lambda guard: replace(guard, tests=("test_gone.py::test_odd",)), "no test test_gone.py::test_odd"),
        (lambda guard: replace(guard, file="gone.py"), "No such file"),
    ],
)
def test_an_entry_that_is_out_of_date_is_found(house: Path, spoil: Callable[[Guard], Guard], says: str) -> None:
    guard = replace(GUARD, file="code_.py")
    assert list(faults_of(guard, house)) == []
    assert says in " ".join(faults_of(spoil(guard), house))


def test_a_failure_is_told_from_a_test_that_cannot_run(house: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("reports")
    passes = run_tests(house, GUARD.tests, 60.0, folder)
    assert (passes.code, passes.failures, passes.tests) == (PASSED, 0, 1)
    (house / "code_.py").write_text(replace(GUARD, file="code_.py").removed_from(CODE))
    fails = run_tests(house, GUARD.tests, 60.0, folder)
    assert (fails.code, fails.failures) == (FAILED, 1)
    (house / "code_.py").write_text("import nothing_of_that_name\n")
    assert run_tests(house, GUARD.tests, 60.0, folder).code not in (PASSED, FAILED)


def test_the_row_is_reached_only_if_all_are_missed() -> None:
    other = replace(GUARD, name="nothing even")
    assert guard_row([GUARD, other], []) == Row("guards whose removal turns a test red", "2 of 2", "all", True)
    assert guard_row([GUARD, other], [other]).cells[1:] == ("1 of 2", "all", "NO")
    assert not guard_row([], []).is_reached
