"""Unequal machines: slow ones, and ones that pause for a while. No peer waits for them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_processes import TINY, write_corpus
from pydantic import ValidationError

from spes_p2p.config import RunConfig
from spes_p2p.sim.peer import VirtualSwarm
from spes_p2p.sim.scenario import Event, Scenario
from spes_p2p.sim.simulator import SimulationResult, simulate
from spes_p2p.swarm.averaging.encoding import Contribution
from spes_p2p.swarm.averaging.outcome import RoundResult
from spes_p2p.swarm.records import Metrics

STEP_TOKENS = 4 * 16
FAST, SLOW = 64.0, 16.0
"""Tokens per virtual second: a step takes one second, or four."""
TOKENS = 20 * 208
"""What three fast peers and a slow one train in 20 seconds."""
PAUSED = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unequal")
    write_corpus(folder / "corpus.jsonl")
    return folder


def run(folder: Path, *, round: dict[str, Any] | None = None, **changes: Any) -> SimulationResult:
    """Simulate rounds by tokens of a tiny model."""
    rounds = {**TINY["round"], "mode": "tokens", "tokens": TOKENS, "min_seconds": 1.0, "total": 4, **(round or {})}
    settings = RunConfig(**{**TINY, "round": rounds})  # type: ignore[arg-type]
    fields = {"peers": 4, "max_slots": 2, "speeds": FAST, "threads": 1, "evaluate_rounds": 100}
    scenario = Scenario(run=settings, text=[folder / "corpus.jsonl"], **(fields | changes))
    return simulate(scenario, cache=folder / "cache")


@pytest.fixture
def meetings(monkeypatch):
    """What everybody brought to every averaging, and got out of it."""
    seen, agree = list[tuple[Contribution, RoundResult]](), VirtualSwarm.agree

    def noted(swarm: VirtualSwarm, contribution: Contribution, stage: Callable, **how: Any) -> Any:
        copied = Contribution(contribution.member, {name: each.clone() for name, each in contribution.deltas.items()})

        def staged(result: RoundResult) -> Any:
            means = {name: mean.clone() for name, mean in result.means.items()}
            seen.append((copied, replace(result, means=means)))
            return stage(result)

        return agree(swarm, replace(contribution, deltas=copied.deltas), staged, **how)

    monkeypatch.setattr(VirtualSwarm, "agree", noted)
    yield seen


@pytest.mark.full
def test_a_round_lasts_as_long_as_all_speeds_together_take_for_its_tokens(folder):
    unequal, equal = (run(folder, speeds=speeds) for speeds in ([FAST, FAST, FAST, SLOW], FAST))
    for result, seconds in ((unequal, TOKENS / (3 * FAST + SLOW)), (equal, TOKENS / (4 * FAST))):
        for report in result.reports[0]:
            assert report.train_seconds == pytest.approx(seconds, abs=1.0), "to a step"
        for number in range(4):
            tokens = sum(reports[number].tokens for reports in result.reports)
            assert tokens == pytest.approx(TOKENS, abs=4 * STEP_TOKENS), "to a step of each"


def test_a_slow_peer_weighs_what_it_trained(folder, meetings):
    """A fourth of the speed is a fourth of the tokens, and the mean that all commit is that of the deltas by tokens."""
    result = run(folder, speeds=[FAST, FAST, FAST, SLOW], round={"total": 2})
    for number in range(2):
        tokens = {reports[number].peer_id: reports[number].tokens for reports in result.reports}
        if number:  # it is still getting ready when the first round begins
            assert result.reports[3][number].tokens == pytest.approx(20 * SLOW, abs=STEP_TOKENS)
        brought = [(own, got) for own, got in meetings if own.member.round == number and own.member.tokens]
        assert len(brought) == 4
        replayed = sum(own.deltas["shared"].double() * tokens[own.member.peer_id] for own, _ in brought)
        for _, got in brought:
            mean = got.means["shared"].double()
            torch.testing.assert_close(mean, replayed / sum(tokens.values()), rtol=1e-5, atol=1e-7)


@pytest.mark.full
def test_the_only_step_of_a_warm_ups_first_round_is_not_for_nothing(folder, meetings):
    """For its tokens it moves a peer as far as others: a peer that moved less took their mean for a lie."""
    result = run(folder, speeds=[FAST] * 4 + [SLOW / 2], peers=5, round={"total": 2, "tokens": 12 * 264})
    first = [(own, got) for own, got in meetings if own.member.round == 0 and own.member.tokens]
    steps = {own.member.peer_id: own.member.tokens / STEP_TOKENS for own, _ in first}
    slow = result.reports[4][0].peer_id
    assert steps.pop(slow) == 1 < min(steps.values())
    moved = dict[str, float]()
    for own, got in first:
        delta_N = own.deltas["shared"].chunk(3)[0]  # two moments follow
        moved[own.member.peer_id] = float(delta_N.norm()) / own.member.tokens
        assert not got.dropped
    assert moved[slow] > max(moved.values()) / 4


@pytest.mark.full
@pytest.mark.parametrize("tokens", [TOKENS, TOKENS - 3 * 208])
def test_nobody_waits_for_a_slow_peer_and_its_work_always_counts(folder, tokens):
    """Its steps, longer than the others wait, end with the round or some time before it, and never too late for it."""
    result = run(folder, speeds=[FAST, FAST, FAST, SLOW], round={"tokens": tokens})
    assert [report.round for report in result.reports[3]] == [1, 2, 3, 4]
    for reports in result.reports:
        assert all(report.committed and report.num_members == 4 for report in reports)
    for reports in result.reports[:3]:
        for report in reports:
            waited = report.matchmaking_seconds + report.averaging_seconds + report.exchange_seconds
            assert waited <= TINY["round"]["matchmaking_seconds"], "its last step is not waited for to the end"


LEASE, MATCHMAKING = 30.0, 3.0
SPEED = 16.0
STEP_SECONDS = STEP_TOKENS / SPEED
ROUNDS = 6
LONG = {"tokens": int(4 * 40 * SPEED), "total": ROUNDS, "lease_seconds": LEASE, "heartbeat_seconds": 10.0}
LONG |= {"matchmaking_seconds": MATCHMAKING}
"""Rounds of 40 seconds with four peers, and deadlines as they are by default."""


def paused(folder: Path, seconds: float, after_seconds: float = 20.0, **round: Any) -> SimulationResult:
    event = Event(peer=PAUSED, kind="pause", round=3, after_seconds=after_seconds, seconds=seconds)
    return run(folder, round={**LONG, **round}, speeds=SPEED, events=[event])


def seconds_beside_training(report: Metrics) -> float:
    phases = report.matchmaking_seconds, report.averaging_seconds, report.exchange_seconds, report.other_seconds
    return sum(phases)


@pytest.mark.full
@pytest.mark.parametrize("after_seconds", [1.0, 37.0])
def test_a_peer_that_stops_for_a_minute_holds_nobody_up(folder, after_seconds):
    """At the worst its lease still runs when the round ends: then the others wait for it as long as for anybody."""
    result = paused(folder, 60.0, after_seconds)
    alone = LONG["tokens"] / (3 * SPEED)
    for peer in {0, 1, 2, 3} - {PAUSED}:
        reports = result.reports[peer]
        assert [report.round for report in reports] == list(range(1, ROUNDS + 1))
        assert all(report.committed and not report.dropped for report in reports)
        assert max(map(seconds_beside_training, reports[1:])) <= MATCHMAKING + STEP_SECONDS
        assert reports[4].train_seconds == pytest.approx(alone, abs=MATCHMAKING + STEP_SECONDS), (
            "and three go on as three"
        )


def test_what_a_peer_had_trained_before_it_stopped_does_not_count_and_what_it_trains_afterwards_does(folder, meetings):
    result = paused(folder, 60.0)
    mine = {report.round: report for report in result.reports[PAUSED]}
    stale = [report for report in mine.values() if not report.committed]
    assert len(stale) == 1 and stale[0].tokens > 0, "it came back to find that the others had gone on"
    assert [number for number in range(stale[0].round + 1, ROUNDS + 1) if not mine[number].committed] == []
    assert mine[ROUNDS].num_members == 4 and mine[ROUNDS].shared_digest == result.digests[ROUNDS]["shared"][:16]
    peer_id = mine[ROUNDS].peer_id
    rounds = [own.member.round for own, got in meetings if own.member.peer_id == peer_id and own.member.tokens]
    assert 3 not in rounds, "the delta against the anchor of round 3 was never offered to anybody"


@pytest.mark.full
def test_slots_of_a_peer_that_stopped_are_covered_until_it_is_back(folder):
    """It alone held it; in the middle of the round somebody adopts it and trains it on."""
    rounds = {**LONG, "tokens": 2 * LONG["tokens"], "total": 8}
    event = Event(peer=PAUSED, kind="pause", round=3, after_seconds=5.0, seconds=200.0)
    result = run(folder, round=rounds, speeds=SPEED, max_slots=[1, 1, 1, 2], seed=0, events=[event])
    mine = {report.round: report for report in result.reports[PAUSED]}
    back = next(report for report in mine.values() if not report.committed)
    (slot,) = mine[3].slots
    assert not [peer for peer in {0, 1, 2, 3} - {PAUSED} if slot in result.reports[peer][2].slots], (
        "another seed will do"
    )
    meanwhile = range(4, back.round)  # its lease runs out in the middle of round 4
    assert len(meanwhile) >= 1
    for number in meanwhile:
        others = [r for peer in range(4) if peer != PAUSED for r in result.reports[peer] if r.round == number]
        assert len(others) == 3 and {*range(4)} == {held for report in others for held in report.slots}
        assert result.digests[number][f"slot-{slot}"] != result.digests[number - 1][f"slot-{slot}"], "it is trained"
    last = [reports[-1] for reports in result.reports]
    assert {report.round for report in last} == {8} and all(report.committed for report in last)
    assert {held for report in last for held in report.slots} == {*range(4)} and mine[8].slots


@pytest.mark.full
def test_a_stop_that_ends_before_the_round_costs_only_its_own_time(folder):
    result = paused(folder, 10.0, after_seconds=5.0)
    mine, other = result.reports[PAUSED][3], result.reports[0][3]
    assert mine.committed and mine.tokens == pytest.approx(other.tokens - 10 * SPEED, abs=STEP_TOKENS)
    assert all(report.num_members == 4 for reports in result.reports for report in reports)


@pytest.mark.parametrize(("kind", "seconds"), [("pause", None), ("kill", 3.0), ("pause", 0.0)])
def test_only_a_pause_lasts_and_every_pause_does(kind, seconds):
    with pytest.raises(ValidationError, match=r"give them to pauses|greater than"):
        Event(peer=0, kind=kind, round=1, seconds=seconds)
