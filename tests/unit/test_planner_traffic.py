"""Bytes and seconds of a round, against what simulated peers move and the bound of the WAN study."""

from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer_processes import TINY, write_corpus

from spes_p2p.codecs.vectors import HASH_BYTES
from spes_p2p.config import CodecConfig, MachineConfig, RunConfig
from spes_p2p.planner.memory import Setup
from spes_p2p.planner.size import ModelSize, model_size
from spes_p2p.planner.tables import time_lines
from spes_p2p.planner.traffic import (
    RoundSeconds,
    RoundTraffic,
    newcomer_bytes,
    of_moments_round,
    round_traffic,
    rounds_for_links,
    training_seconds,
    transfer_seconds,
)
from spes_p2p.sim.simulator import Scenario, simulate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planner")
    write_corpus(folder / "corpus.jsonl")
    return folder


@pytest.mark.parametrize(
    ("peers", "slots", "outer", "codecs", "optimizer"),
    [
        (3, 4, {"moments": "both"}, {}, "adamw"),
        (3, 3, {"moments": "both"}, {}, "muon"),
        pytest.param(4, 1, {"moments": "second"}, {}, "adamw", marks=pytest.mark.full),
        pytest.param(3, 2, {"moments": "local"}, {}, "adamw", marks=pytest.mark.full),
        (2, 3, {"moments": "local", "optimizer": "nesterov"}, {}, "adamw"),
        (3, 2, {"moments": "local", "optimizer": "nesterov"}, {"shared": "int4", "slots": "int8"}, "adamw"),
        (3, 4, {"moments": "both"}, {"shared": "int8", "slots": "bf16", "moments": "int8"}, "adamw"),
    ],
)
def test_a_round_moves_what_simulated_peers_move(folder, peers, slots, outer, codecs, optimizer):
    rounds = {"mode": "steps", "steps": 1, "total": 3}
    train = TINY["train"] | {"optimizer": optimizer}
    settings = {"round": {**TINY["round"], **rounds}, "train": train, "outer": outer, "codecs": codecs}
    run = RunConfig.model_validate({**TINY, **settings})
    scenario = Scenario(run=run, peers=peers, max_slots=slots, text=[folder / "corpus.jsonl"], threads=1)
    reports = simulate(scenario, cache=folder / "cache").reports
    vocab_size = TINY["data"]["vocab_size"]
    traffic = round_traffic(model_size(run.model, vocab_size), slots, peers, Setup.of(run, MachineConfig(), None))
    for direction in ("bytes_in", "bytes_out"):
        in_one_round = mean(getattr(own[2], direction) - getattr(own[1], direction) for own in reports)
        # A byte of rounding to each group and peer, and the hashes of the blocks of what is fetched; codecs fill up the
        # last block of a vector, and there are few here; a report may come before others have fetched from its peer.
        least = 4 * 5 + HASH_BYTES * (4 - slots)
        assert in_one_round == pytest.approx(traffic.total, abs=least, rel=0.03 if codecs else 0.01)


@given(peers=st.integers(1, 200), slots=st.integers(1, 64), shared=st.integers(0, 10**10), slot=st.integers(1, 10**10))
def test_equal_links_take_the_physical_bound(peers, slots, shared, slot):
    """`[2 S (N - 1) + X (N - 1) + X (h - 1)] / (N r)`, where every slot has at least one holder."""
    size = ModelSize(shared, slot, 64)
    if peers * slots < 64 or peers == 1:
        return
    traffic = round_traffic(size, slots, peers, Setup(averaged_moments=0))
    experts, holders = 64 * slot, peers * slots / 64
    bound = 4 * (2 * shared * (peers - 1) + experts * (peers - 1) + experts * (holders - 1)) / peers
    assert traffic.total == pytest.approx(bound, rel=1e-9, abs=4)
    assert transfer_seconds(traffic, 80, 800).total == pytest.approx(bound / 1e7, rel=1e-9, abs=1e-6)


def test_a_lone_peer_moves_nothing():
    assert round_traffic(ModelSize(1000, 300, 8), 3, 1, Setup()).total == 0


def test_moments_travel_with_deltas_and_momentum_with_slots():
    size = ModelSize(1000, 300, 8)
    plain, both, nesterov = (
        round_traffic(size, 4, 4, setup)
        for setup in (
            Setup(averaged_moments=0),
            Setup(averaged_moments=2),
            Setup(averaged_moments=0, outer_momentum=True),
        )
    )
    assert (both.shared, both.slots, both.fetched) == (3 * plain.shared, 3 * plain.slots, plain.fetched)
    assert (nesterov.averaged, nesterov.fetched) == (plain.averaged, 2 * plain.fetched)


def test_moments_that_travel_seldom_count_by_the_round():
    size, setup = ModelSize(10**6, 10**5, 8), Setup(averaged_moments=2)
    every, seldom, local = (
        round_traffic(
            size, 8, 4, replace(setup, averaged_moments=moments, codecs=CodecConfig(moments_interval=interval))
        )
        for moments, interval in ((2, 1), (2, 5), (0, 1))
    )
    assert seldom.averaged == pytest.approx(local.averaged + (every.averaged - local.averaged) / 5)
    assert seldom.fetched == every.fetched


def test_a_smaller_budget_spares_bytes():
    size, local = ModelSize(1000, 640, 16), Setup(averaged_moments=0)
    copies = [round_traffic(size, 4, 4, replace(local, refresh_slots=slots)).fetched for slots in (None, 99, 12, 6, 3)]
    assert copies == [4 * 640 * slots for slots in (12, 12, 12, 6, 3)]


def test_a_newcomer_fetches_the_model_and_the_masters_of_what_it_trains():
    size, none = ModelSize(1000, 300, 8), Setup(averaged_moments=0)
    assert newcomer_bytes(size, 2, none) == 4 * 3400
    assert newcomer_bytes(size, 2, replace(none, kept="bf16")) == 4 * 1000 + 2 * 8 * 300 + 2 * 4 * 300


def test_slots_without_a_holder_are_not_fetched():
    few = round_traffic(ModelSize(1000, 300, 64), 2, 4, Setup())
    assert few.slots == 0 and few.fetched == 4 * (4 * 2 - 2) * 300


def test_the_slower_direction_sets_the_time():
    traffic = RoundTraffic(shared=10**6, slots=10**6, fetched=4 * 10**6)
    for links in ((8, 100), (100, 8), (8, 8)):
        seconds = transfer_seconds(traffic, *links)
        assert (seconds.averaging, seconds.fetching, seconds.total) == (2.0, 4.0, 6.0)


def test_training_takes_what_the_rounds_mode_says():
    steps = {"round": {"mode": "steps", "steps": 10}, "train": {"batch_size": 4}, "data": {"sequence_length": 100}}
    assert training_seconds(RunConfig.model_validate(steps), 7, 400.0) == 10.0
    tokens = {"round": {"mode": "tokens", "tokens": 8000, "min_seconds": 5, "max_seconds": 60}}
    run = RunConfig.model_validate(tokens)
    assert [training_seconds(run, 4, speed) for speed in (100.0, 1000.0, 1.0)] == [20.0, 5.0, 60.0]
    samples = {"round": tokens["round"] | {"samples": 80}, "data": {"sequence_length": 100}}
    assert training_seconds(RunConfig.model_validate(samples), 4, 200.0) == 10.0


@pytest.mark.parametrize(
    ("chosen", "is_trained", "growing"),
    [
        ({"total": 500}, False, 15),
        ({"total": 100}, False, 5),
        ({"total": 500}, True, 0),
        ({"total": 500, "growing": 0}, False, 0),
        ({"total": 500, "growing": 30}, False, 30),
        ({"total": 500, "min_seconds": 3880, "max_seconds": 3880}, False, 0),
    ],
)
def test_the_first_of_rounds_that_links_make_long_are_shorter_if_the_model_is_new(chosen, is_trained, growing):
    run = RunConfig.model_validate({"round": chosen})
    slow = rounds_for_links(run, RoundSeconds(averaging=80.0, fetching=40.0), is_trained=is_trained)
    assert (slow.growing, slow.min_seconds, slow.total) == (growing, 3880, chosen["total"])
    fast = rounds_for_links(run, RoundSeconds(0.001, 0.001), is_trained=is_trained)
    assert fast.growing == run.round.growing, "short rounds do not let peers drift apart"


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, (3880, 3880, 240, 120)),
        ({"tokens": 10**6}, (3880, 3880, 240, 120)),
        ({"max_seconds": 1000}, (1000, 1000, 240, 120)),
        ({"min_seconds": 7}, (7, 600, 240, 120)),
        ({"mode": "steps"}, (5, 600, 240, 120)),
        ({"growing": 9}, (3880, 3880, 240, 120)),
        ({"averaging_seconds": 50, "exchange_seconds": 70}, (3880, 3880, 50, 70)),
    ],
)
def test_rounds_are_as_long_as_links_ask_for_where_the_founder_leaves_that_open(chosen, expected):
    run = RunConfig.model_validate({"round": chosen})
    rounds = rounds_for_links(run, RoundSeconds(averaging=80.0, fetching=40.0))
    assert (rounds.min_seconds, rounds.max_seconds, rounds.averaging_seconds, rounds.exchange_seconds) == expected
    changed = {"min_seconds", "max_seconds", "averaging_seconds", "exchange_seconds"}
    assert rounds.model_dump(exclude=changed) == run.round.model_dump(exclude=changed)
    with_moments = rounds_for_links(run, RoundSeconds(80.0, 40.0), RoundSeconds(200.0, 90.0))
    assert with_moments.min_seconds == rounds.min_seconds, "by the mean round"
    if "averaging_seconds" not in chosen:
        assert (with_moments.averaging_seconds, with_moments.exchange_seconds) == (600, 270), "by the longest"
    assert not rounds.growing or "growing" in chosen, "a run of ten rounds is too short"
    fast = rounds_for_links(run, RoundSeconds(0.001, 0.001))
    assert fast == run.round, "the defaults are enough on fast links"
    slow = rounds_for_links(run, RoundSeconds(1e6, 1e6))
    assert RunConfig.model_validate({"round": slow.model_dump()}).round == slow, "within what a run may have"


def test_rounds_that_carry_the_moments_are_told_apart_and_compared_with_the_deadline():
    """Every fourth round could not commit, and the plan said nothing."""
    codecs = {"shared": "int4", "slots": "int4", "moments": "int8", "moments_interval": 4}
    run = RunConfig.model_validate({"codecs": codecs, "round": {"averaging_seconds": 600}})
    size, setup = ModelSize(400_000_000, 1_000_000, 16), Setup.of(run, MachineConfig(), None)
    mean, fullest = (round_traffic(size, 4, 8, each) for each in (setup, of_moments_round(setup)))
    assert fullest.averaged > 2 * mean.averaged
    told = "\n".join(time_lines(run, (mean, fullest), 8, (20.0, 20.0), None))
    seconds = 8 * fullest.averaged / 20e6
    assert f"{seconds:.0f} in a round with moments" in told and "longer than round.averaging_seconds=600" in told
    assert "with moments" not in "\n".join(time_lines(run, (mean, mean), 8, (20.0, 20.0), None))
