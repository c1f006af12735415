"""A dishonest peer of each kind among real ones: it harms no one, and is out two rounds later if it can be detected."""

from __future__ import annotations

import pytest
from attacked_lab import FOUND_OUT, ROUNDS_AFTER, AttackedLab, Outcome
from lab_liar import KINDS

pytestmark = [pytest.mark.timeout(2400), pytest.mark.full]

ROUNDS_TO_LIE = 2
MOST_MOVED = 5.0
"""Lengths; seen is 1.7, and a plain mean is moved by seventeen by what is a hundred times too long."""


@pytest.fixture(scope="module", params=KINDS)
def attacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Outcome]:
    """A kind of liar, and what came of it among five honest peers."""
    lab = AttackedLab(tmp_path_factory.mktemp("attacked") / "lab", request.param)
    with lab.running():
        lab.attack()
    outcome = lab.outcome()
    print(request.param, outcome)
    return request.param, outcome


def test_honest_peers_go_on_and_lose_nothing(attacked: tuple[str, Outcome]) -> None:
    _, seen = attacked
    assert len(seen.rounds) >= ROUNDS_AFTER
    assert seen.verdict.means > 50 and seen.verdict.versions > 50 and seen.verdict.accepted > 20
    assert not seen.verdict.wrong
    assert not seen.verdict.lost, seen.verdict.story
    assert seen.moved < MOST_MOVED
    assert not seen.accused


def test_who_brings_what_no_honest_peer_would_is_in_no_group_two_rounds_later(attacked: tuple[str, Outcome]) -> None:
    kind, seen = attacked
    if kind not in FOUND_OUT:
        pytest.skip("what it does, an honest peer might do")
    assert seen.left_out, "it still comes, and the others do not want it"
    assert len(seen.took_part) <= ROUNDS_TO_LIE and max(seen.took_part, default=0) < min(seen.left_out)
