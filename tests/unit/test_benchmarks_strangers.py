"""The strangers' rows say what was seen, bad news too."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import strangers
from benchmarks.bit_flips import Flips
from benchmarks.fuzz.guided import Guided
from benchmarks.passing import FAILED, PASSED, Outcome
from benchmarks.strangers import BOARD, MIN_EXECUTIONS, MIN_FLIPS, PARTS, Bench
from benchmarks.tables import Row
from spes_p2p.errors import ConfigError

ROOT = Path(__file__).parents[2]


def bench(inputs: int = 200, cases: int = 20) -> Bench:
    return Bench(seed=1, inputs=inputs, cases=cases, executions=0, flips=10)


def rows_of(part: Iterator[Row]) -> list[tuple[str, bool | None]]:
    return [(row.measured, row.is_reached) for row in part]


def outcomes(monkeypatch: pytest.MonkeyPatch, *found: Outcome) -> None:
    left = list(found)
    monkeypatch.setattr(strangers, "run_tests", lambda *args: left.pop(0))


def test_a_corpus_counts_only_if_all_of_it_ran_and_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, wire = Outcome(PASSED, 0, 400, ""), Outcome(PASSED, 0, 150, "")
    outcomes(monkeypatch, whole, wire)
    (measured, is_reached), other = rows_of(strangers.corpus(bench()))
    number, _, of = measured.partition(" of ")
    assert number == of and int(of) >= 200 and is_reached and other == ("150 of 150", True)
    for bad in (Outcome(FAILED, 1, 400, ""), Outcome(PASSED, 0, 150, ""), Outcome(None, 0, 0, "too late")):
        outcomes(monkeypatch, bad, wire)
        (measured, is_reached), _ = rows_of(strangers.corpus(bench()))
        assert not is_reached
    assert measured.startswith("0 of")


def test_a_short_fuzz_finds_nothing_and_is_not_called_a_long_one() -> None:
    seen = bench()
    assert rows_of(strangers.fuzz(seen)) == [("0 of 200", False), ("0 of 20", False), ("0 of 0", False)]
    assert seen.seen["mutants"] == {"count": 200, "untyped": []}


@pytest.mark.parametrize(
    ("guided", "row"),
    [
        ([Guided("a", MIN_EXECUTIONS, 1.0, {})], ("0 of 200,000", True)),
        ([Guided("a", MIN_EXECUTIONS - 1, 1.0, {})], ("0 of 199,999", False)),
        ([Guided("a", MIN_EXECUTIONS, 1.0, {"KeyError()": 2}), Guided("b", 1, 1.0, {})], ("2 of 200,001", False)),
        (None, ("not run: no atheris", False)),
    ],
)
def test_guided_executions_count_as_they_were_made(
    monkeypatch: pytest.MonkeyPatch, guided: list[Guided] | None, row: tuple[str, bool]
) -> None:
    def guide(executions: int, seed: int) -> list[Guided]:
        if guided is None:
            raise ConfigError("no atheris")
        return guided

    monkeypatch.setattr(strangers, "guide", guide)
    assert rows_of(strangers.fuzz(bench(0, 0)))[-1] == row


@pytest.mark.parametrize(
    ("flips", "reached"),
    [
        (Flips(1, refused=Counter(bytes=MIN_FLIPS)), [True, True]),
        (Flips(1, refused=Counter(bytes=MIN_FLIPS - 1)), [False, True]),
        (Flips(1, refused=Counter(bytes=MIN_FLIPS), loaded=Counter(deltas=1)), [False, True]),
        (Flips(1, refused=Counter(bytes=MIN_FLIPS), unnamed=Counter(bytes=1)), [True, False]),
        (Flips(1, refused=Counter(bytes=MIN_FLIPS), harmless=Counter(descriptions=2)), [True, True, None]),
    ],
)
def test_flips_are_counted_by_what_came_of_them(
    monkeypatch: pytest.MonkeyPatch, flips: Flips, reached: list[bool | None]
) -> None:
    monkeypatch.setattr(strangers, "flip_downloads", lambda *args: flips)
    seen = bench()
    assert [is_reached for _, is_reached in rows_of(strangers.downloads(seen))] == reached
    assert json.loads(json.dumps(seen.seen))["flips"]["refused"] == dict(flips.refused)


def test_the_table_has_a_place_in_the_readme() -> None:
    page = (ROOT / BOARD.page).read_text(encoding="utf-8")
    assert page.count(f"<!-- {BOARD.marker} -->") == page.count(f"<!-- /{BOARD.marker} -->") == 1
    assert set(BOARD.parts) == set(PARTS)
