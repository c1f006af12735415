"""What a peer decides before it takes part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spes_p2p.config import ModelConfig, PeerConfig, RunConfig
from spes_p2p.errors import ConfigError
from spes_p2p.peer import joining
from spes_p2p.planner.memory import Setup, peer_bytes, peer_memory
from spes_p2p.planner.size import model_size
from spes_p2p.swarm.records import MAX_CLAIMED

RUN = RunConfig(model=ModelConfig(num_experts=200))
SIZE = model_size(RUN.model, 4096)


def chosen(slots: int | str) -> PeerConfig:
    return PeerConfig(run_id="r", max_slots=slots)  # type: ignore[call-arg, arg-type]


def setup_of(config: PeerConfig) -> Setup:
    return Setup.of(RUN, config, 4096, num_ranks=1, on_gpu=False)


def test_a_chosen_number_of_slots_that_does_not_fit_is_refused_and_those_that_fit_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = setup_of(chosen(4))
    monkeypatch.setattr(joining, "free_memory_bytes", lambda: peer_bytes(SIZE, 60, setup))
    assert joining._max_slots(chosen(60), SIZE, setup) == 60
    assert joining._max_slots(chosen("auto"), SIZE, setup) == 60
    with pytest.raises(ConfigError, match=r"max_slots=61: training 61 slots needs .*; claim at most 60"):
        joining._max_slots(chosen(61), SIZE, setup)


def test_of_a_peer_that_trains_on_a_gpu_the_hosts_share_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = replace(setup_of(chosen(4)), on_gpu=True)
    monkeypatch.setattr(joining, "free_memory_bytes", lambda: peer_memory(SIZE, 60, setup).host_bytes)
    assert joining._max_slots(chosen(60), SIZE, setup) == 60
    with pytest.raises(ConfigError, match=r"max_slots=100: .* on the host"):
        joining._max_slots(chosen(100), SIZE, setup)


def test_no_peer_has_more_slots_than_a_claim_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "free_memory_bytes", lambda: 2**50)
    assert joining._max_slots(chosen("auto"), SIZE, setup_of(chosen("auto"))) == MAX_CLAIMED
    with pytest.raises(ConfigError, match="max_slots=150 exceeds the 128 slots that a claim can hold"):
        joining._check_choices(chosen(150), RUN)
