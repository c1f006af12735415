"""Constant churn: which peers are replaced and when, what the simulator does, and what the benchmark counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peer_processes import TINY, write_corpus
from pydantic import ValidationError

from benchmarks.churn import churn_rows, loss_at
from spes_p2p.config import RunConfig
from spes_p2p.sim.scenario import Churn, Event, Scenario
from spes_p2p.sim.simulator import simulate
from spes_p2p.sim.sweep import PeerAccount, Point, RunResult, load_sweep, run_result, save_result

SWEEP = Path("configs/churn.yaml")


def present_by_round(events: list[Event], present: int, total: int) -> list[int]:
    """Count the peers that are present while each round after the first is trained, the dead not included."""
    counts = []
    for round in range(1, total):
        came = sum(event.kind == "join" and event.round <= round for event in events)
        gone = sum(event.kind in ("leave", "kill") and event.round <= round for event in events)
        counts.append(present + came - gone)
    return counts


@pytest.mark.parametrize("seed", range(20))
def test_as_many_are_replaced_as_was_asked_and_nobody_before_it_has_come(seed: int) -> None:
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
def test_a_swarm_goes_on_while_its_peers_are_replaced(tmp_path: Path) -> None:
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
def test_churn_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        small(tmp_path, **changes)


# ---------------------------------------------------------------------- what the benchmark says


def points(*of: tuple[int, float]) -> list[Point]:
    return [
        Point(round=number, tokens_per_peer=0, committed_tokens=tokens, bytes_out_per_peer=0.0, loss=loss)
        for number, (tokens, loss) in enumerate(of, 1)
    ]


def test_the_loss_at_some_tokens_lies_between_the_evaluations_before_and_after() -> None:
    curve = points((100, 6.0), (200, 5.0), (400, 4.0))
    assert [loss_at(curve, tokens) for tokens in (100, 150, 200, 300, 400)] == [6.0, 5.5, 5.0, 4.5, 4.0]


def test_rounds_that_were_begun_and_not_committed_count_and_losses_are_compared_at_equal_tokens(tmp_path: Path) -> None:
    sweep = load_sweep(SWEEP)
    for seed in (0, 1):
        for variant, curve in {
            "undisturbed": points((500, 6.0), (1000, 5.0)),
            "churn": points((400, 6.5), (900, 5.2), (1100, 4.9)),  # 5.05 at 1000
        }.items():
            peer = PeerAccount(
                tokens=0,
                begun_rounds=10,
                committed_rounds=9 + seed,
                bytes_in=0,
                bytes_out=0,
                expert_bytes=0,
                memory_bytes=0,
            )
            scenario = sweep.variants[variant].scenarios[seed]
            result = RunResult(
                variant=variant,
                seed=seed,
                scenario=scenario.model_dump(mode="json"),
                evaluations=curve,
                peers=[peer] * scenario.peers,
                virtual_seconds=3000.0,
                wall_seconds=1.0,
                software="",
                finished_at="",
            )
            save_result(tmp_path, result)
    replaced, committed, loss = churn_rows(SWEEP, tmp_path)
    assert replaced.measured == "30.0 %" and replaced.is_reached  # 12 of 8 peers in 50 minutes
    assert committed.measured.startswith("95.0 % (380 of 400") and committed.is_reached
    assert loss.measured == "+1.00 % ± 0.00" and "2 seeds" in loss.figure
    assert not list(churn_rows(SWEEP, tmp_path / "nowhere"))
