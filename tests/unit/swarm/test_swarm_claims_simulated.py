"""Simulated swarms keep their promises under every fault; without any one of the protocol's guards they do not.

Seeds are fixed here, so that one swarm in a thousand does not stop everybody's work; `python -m benchmarks.claims`
tries as many others as there is time for.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable

import pytest
from lanes import sample

from benchmarks.claims import __main__ as command
from benchmarks.claims.checker import Checker
from benchmarks.claims.dht import LossyDht
from benchmarks.claims.faults import live_through
from benchmarks.claims.simulation import Simulation
from benchmarks.claims.summary import Summary
from spes_p2p.config import RoundConfig
from spes_p2p.swarm import claims

FEW, NUM_BLOCKS, BLOCK = (4, 16), 10, 30
MANY = (4, 64)
UNEVEN = [362, 2367, 4257, 4463, 4731, 5355, 6485, 7347]


def faulty(seeds: Iterable[int]) -> dict[int, list[str]]:
    """Return what these swarms of 4 to 64 peers violate."""
    found = {seed: live_through(seed, MANY).violations for seed in seeds}
    return {seed: violations for seed, violations in found.items() if violations}


@pytest.mark.parametrize("block", sample(range(NUM_BLOCKS), range(2)))
def test_swarms_keep_their_promises(block):
    summary = Summary()
    for seed in range(BLOCK * block, BLOCK * (block + 1)):
        summary.add(seed, live_through(seed, FEW))
    assert not summary.faulty, summary.faulty
    figures = summary.figures()
    assert figures["changes_per_peer_hour"] > 1, "nothing happened; the test tests nothing"
    assert figures["orphaned_seconds"]["death"]["p50"] <= 45
    assert figures["orphaned_seconds"]["death"]["p99"] <= 90


def test_few_peers_with_many_slots_end_evenly():
    """Each of these swarms was uneven when its peers exchanged one slot at once."""
    assert not faulty(UNEVEN)


def test_the_same_seed_gives_the_same_history(seed):
    assert live_through(seed, FEW) == live_through(seed, FEW)


# ---------------------------------------------------------------------- every guard matters


def violations(told: str, first_seed: int = 0, **changes) -> bool:
    """Tell whether the checker says so of any of a few swarms."""
    seeds = range(first_seed, first_seed + 60)
    return any(told in violation for seed in seeds for violation in live_through(seed, FEW, **changes).violations)


def test_without_the_cooldown_peers_change_their_minds():
    assert violations("changes its mind", cooldown_seconds=0.0)


def test_without_orphans_first_slots_wait_for_a_holder(monkeypatch):
    exchange = claims._exchange
    monkeypatch.setattr(claims, "_exchange", lambda *given, most=None: None if most == 0 else exchange(*given))
    assert violations("an orphan", first_seed=120)


def test_a_peer_that_comes_and_goes_does_not_make_the_others_exchange_slots_each_time(seed):
    """The others even out with it and without it, each when it sees the need, which may be many cycles later."""
    simulation = Simulation(random.Random(seed), RoundConfig(), 8, round_seconds=15.0)
    coming_and_going, *others = [simulation.join(3) for _ in range(6)]
    simulation.run_until(200)
    held = {peer: simulation.peers[peer].slots for peer in others}
    num_exchanges = 0
    for away in itertools.islice(itertools.cycle([10, 35, 50, 20]), 16):
        simulation.crash(coming_and_going)
        for seconds in (away, 25):
            simulation.run_until(simulation.now + seconds)
            now_held = {peer: simulation.peers[peer].slots for peer in others}
            num_exchanges += sum(now_held[peer] != held[peer] for peer in others)
            held = now_held
            if coming_and_going not in simulation.peers:
                simulation.restart(coming_and_going)
    assert num_exchanges <= len(others), f"in 16 cycles, {len(others)} others exchanged slots {num_exchanges} times"


# ---------------------------------------------------------------------- the instruments


def test_the_checker_tells_every_kind_of_violation():
    checker = Checker(2, 30.0)
    checker.look(0, 0, [(0,)], True, "death")
    checker.look(200, 0, [(0, 1)], True, "change")
    checker.change(10, "peer", (0,), (1,), False)
    checker.change(20, "peer", (1,), (0,), False)
    told = " ".join(checker.report.violations)
    for words in ("slot 1 has been an orphan for 200 s", "changes its mind about slot 0"):
        assert words in told


def test_figures_are_written_as_the_swarms_go_by(tmp_path, monkeypatch):
    """The long form takes an hour, and may be stopped."""

    def live_until_the_third(seed, peers):
        if seed == 2:
            raise KeyboardInterrupt
        return live_through(seed, peers)

    monkeypatch.setattr(command, "SWARMS_PER_WRITING", 1)
    monkeypatch.setattr(command, "live_through", live_until_the_third)
    with pytest.raises(KeyboardInterrupt):
        command.main(command.ClaimsConfig(seeds=5, peers="4-5", output=tmp_path))
    assert json.loads((tmp_path / "claims.json").read_text())["swarms"]["4-5"]["seeds"] == 2
    assert "Swarms: 2, of which **0** violated anything" in (tmp_path / "claims.md").read_text()


def test_a_partition_keeps_records_apart_until_it_heals(seed):
    simulation = Simulation(random.Random(seed), RoundConfig(), 4)
    here, there = simulation.join(2), simulation.join(2)
    simulation.run_until(60)
    dht = LossyDht(random.Random(seed))
    claim = {name: simulation.peers[name].claim() for name in (here, there)}
    dht.split(2)
    for attempt in range(5):  # most replicas get most of them
        for side, name in enumerate((here, there)):
            dht.store(side, claim[name], 100.0 + attempt)
    assert set(dht.read(0, 50)) <= {here} and set(dht.read(1, 50)) <= {there}
    dht.heal()
    assert set(dht.read(0, 50)) == {here, there} and not dht.read(0, 200)
