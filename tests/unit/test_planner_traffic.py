"""Bytes and seconds of a round, against what simulated peers move and the bound of the WAN study."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer_processes import TINY, write_corpus

from spes_p2p.config import MachineConfig, RunConfig
from spes_p2p.planner import (
    ModelSize,
    RoundTraffic,
    Setup,
    model_size,
    round_traffic,
    training_seconds,
    transfer_seconds,
)
from spes_p2p.simulator import Scenario, simulate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planner")
    write_corpus(folder / "corpus.jsonl")
    return folder


@pytest.mark.parametrize(
    ("peers", "slots", "outer"),
    [
        (3, 4, {"moments": "both"}),
        (4, 1, {"moments": "second"}),
        (3, 2, {"moments": "local"}),
        (2, 3, {"moments": "local", "optimizer": "nesterov"}),
    ],
)
def test_a_round_moves_what_simulated_peers_move(folder: Path, peers: int, slots: int, outer: dict[str, Any]) -> None:
    rounds = {"mode": "steps", "steps": 1, "total": 3}
    run = RunConfig.model_validate({**TINY, "round": {**TINY["round"], **rounds}, "outer": outer})
    scenario = Scenario(run=run, peers=peers, max_slots=slots, text=[folder / "corpus.jsonl"], threads=1)
    reports = simulate(scenario, cache=folder / "cache").reports
    vocab_size = TINY["data"]["vocab_size"]
    traffic = round_traffic(model_size(run.model, vocab_size), slots, peers, Setup.of(run, MachineConfig(), None))
    for direction in ("bytes_in", "bytes_out"):
        in_one_round = mean(getattr(own[2], direction) - getattr(own[1], direction) for own in reports)
        assert in_one_round == pytest.approx(traffic.total, abs=4 * 5)  # a byte of rounding to each group and peer


@given(
    peers=st.integers(1, 200),
    slots=st.integers(1, 64),
    shared=st.integers(0, 10**10),
    slot=st.integers(1, 10**10),
)
def test_equal_links_take_the_physical_bound(peers: int, slots: int, shared: int, slot: int) -> None:
    """`[2 S (N - 1) + X (N - 1) + X (h - 1)] / (N r)`, where every slot has at least one holder (facts: wan 2)."""
    size = ModelSize(shared, slot, 64)
    if peers * slots < 64 or peers == 1:
        return
    traffic = round_traffic(size, slots, peers, Setup(averaged_moments=0))
    experts, holders = 64 * slot, peers * slots / 64
    bound = 4 * (2 * shared * (peers - 1) + experts * (peers - 1) + experts * (holders - 1)) / peers
    assert traffic.total == pytest.approx(bound, rel=1e-9, abs=4)
    assert transfer_seconds(traffic, 80, 800).total == pytest.approx(bound / 1e7, rel=1e-9, abs=1e-6)


def test_a_lone_peer_moves_nothing() -> None:
    assert round_traffic(ModelSize(1000, 300, 8), 3, 1, Setup()).total == 0


def test_moments_travel_with_deltas_and_momentum_with_slots() -> None:
    size = ModelSize(1000, 300, 8)
    plain, both, nesterov = (
        round_traffic(size, 4, 4, setup)
        for setup in (
            Setup(averaged_moments=0),
            Setup(averaged_moments=2),
            Setup(averaged_moments=0, outer_momentum=True),
        )
    )
    assert (both.shared, both.slots, both.pulled) == (3 * plain.shared, 3 * plain.slots, plain.pulled)
    assert (nesterov.averaged, nesterov.pulled) == (plain.averaged, 2 * plain.pulled)


def test_slots_without_a_holder_are_not_fetched() -> None:
    few = round_traffic(ModelSize(1000, 300, 64), 2, 4, Setup())
    assert few.slots == 0 and few.pulled == 4 * (4 * 2 - 2) * 300


def test_the_slower_direction_sets_the_time() -> None:
    traffic = RoundTraffic(shared=10**6, slots=10**6, pulled=4 * 10**6)
    for links in ((8, 100), (100, 8), (8, 8)):
        seconds = transfer_seconds(traffic, *links)
        assert (seconds.averaging, seconds.pulling, seconds.total) == (2.0, 4.0, 6.0)


def test_training_takes_what_the_rounds_mode_says() -> None:
    steps = {"round": {"mode": "steps", "steps": 10}, "train": {"batch_size": 4}, "data": {"sequence_length": 100}}
    assert training_seconds(RunConfig.model_validate(steps), 7, 400.0) == 10.0
    tokens = {"round": {"mode": "tokens", "tokens": 8000, "min_seconds": 5, "max_seconds": 60}}
    run = RunConfig.model_validate(tokens)
    assert [training_seconds(run, 4, speed) for speed in (100.0, 1000.0, 1.0)] == [20.0, 5.0, 60.0]
