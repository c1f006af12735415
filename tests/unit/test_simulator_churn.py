"""Constant churn: which peers are replaced and when, and what the simulator does."""

from pathlib import Path
from typing import Any

import pytest
from peer_processes import TINY, write_corpus
from pydantic import ValidationError

from spes_p2p.config import RunConfig
from spes_p2p.sim.scenario import Churn, Event, Scenario
from spes_p2p.sim.simulator import simulate
from spes_p2p.sim.sweep import run_result


def present_by_round(events: list[Event], present: int, total: int) -> list[int]:
    """Count the peers that are present while each round after the first is trained, the dead not included."""
    counts = []
    for round in range(1, total):
        came = sum(event.kind == "join" and event.round <= round for event in events)
        gone = sum(event.kind in ("leave", "kill") and event.round <= round for event in events)
        counts.append(present + came - gone)
    return counts


@pytest.mark.parametrize("seed", range(20))
def test_as_many_are_replaced_as_was_asked_and_nobody_before_it_has_come(seed):
    churn = Churn(present=8, share=0.3, rounds=10, within_seconds=60.0)
    events = churn.events(seed, 50)
    assert events == churn.events(seed, 50) != churn.events(seed + 1, 50)
    ends = [event for event in events if event.kind != "join"]
    joins = {event.peer: event.round for event in events if event.kind == "join"}
    assert len(ends) == len(joins) == 12 and sum(event.kind == "kill" for event in ends) == 6
    assert set(joins) == set(range(8, 20)) and len({event.peer for event in ends}) == 12
    assert all(event.round > joins.get(event.peer, 0) and event.after_seconds <= 60.0 for event in ends)
    for window in range(0, 40, 10):
        assert 1 <= sum(window < event.round <= window + 10 for event in ends) <= 4
    counts = present_by_round(events, 8, 50)
    assert max(counts) == 8 and min(counts) >= 6, "a newcomer comes when the one before it has gone"


def small(folder: Path, **changes: Any) -> Scenario:
    write_corpus(folder / "corpus.jsonl")
    rounds = {**TINY["round"], "mode": "tokens", "tokens": 2400, "min_seconds": 1.0, "total": 10}
    run = RunConfig(**{**TINY, "round": rounds})  # type: ignore[arg-type]
    fields: dict[str, Any] = {"churn": Churn(present=4, share=0.5, within_seconds=5.0), "peers": 6, "speeds": 64.0}
    fields |= {"max_slots": 2, "threads": 1, **changes}
    return Scenario(run=run, text=[folder / "corpus.jsonl"], **fields)


@pytest.mark.full
def test_a_swarm_goes_on_while_its_peers_are_replaced(tmp_path):
    scenario = small(tmp_path)
    result = simulate(scenario, cache=tmp_path / "cache")
    assert sorted(result.digests) == list(range(1, 11))
    killed = {event.peer for event in scenario.schedule if event.kind == "kill"}
    for peer, reports in enumerate(result.reports):
        committed = [report for report in reports if report.committed]
        assert result.begun_rounds[peer] >= len(reports) + (peer in killed), "a dead peer's last round is not reported"
        assert all(report.shared_digest == result.digests[report.round]["shared"][:16] for report in committed)
    tokens = [report.tokens for reports in result.reports for report in reports if report.committed]
    points = run_result("churn", 0, scenario, result).evaluations
    assert points[-1].committed_tokens == sum(tokens) > (points[-2].committed_tokens or 0)
    assert {slot for reports in result.reports[4:] for report in reports for slot in report.slots}, "newcomers train"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peers": 5}, "takes 6 peers, newcomers included, and peers=5; set it to 6"),
        ({"events": [Event(peer=0, kind="kill", round=1)]}, "there are 1 events beside it"),
        (
            {"churn": Churn(present=2, share=1, rounds=1), "peers": 22, "max_slots": 2},
            "churn replaces all peers before round",
        ),
        ({"max_slots": [2, 2, 2, 2]}, "max_slots lists 4 peers, peers=6"),
    ],
    ids=str,
)
def test_churn_that_cannot_be_is_refused(tmp_path, changes, message):
    with pytest.raises(ValidationError, match=message):
        small(tmp_path, **changes)
