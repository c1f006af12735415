"""Slots travel in the form in which they are kept: only holders and replicas have fp32 versions."""

import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from virtual import VirtualPeer, World, run_peers, tiny_run

from spes_p2p.codecs.kept import KeptForm
from spes_p2p.codecs.vectors import digest
from spes_p2p.config import CodecConfig, MachineConfig, OuterConfig, RoundConfig, RunConfig, check_machine
from spes_p2p.errors import ConfigError
from spes_p2p.swarm.averaging.encoding import Contribution
from spes_p2p.swarm.averaging.outcome import RoundResult, Staged
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.names import SHARED, VectorName
from tests.unit.model.plain import NF4

FEW_BITS = CodecConfig(shared="int4", slots="int4", moments="int8")
FORMS = ["bf16", "int8", NF4]
SLOTS = [VectorName.of_slot(slot) for slot in range(4)]


def run_of(storage: str, *, total: int = 3, peers: int = 3, **changes: Any) -> RunConfig:
    rounds = RoundConfig(
        mode="steps",
        steps=2,
        total=total,
        min_peers=peers,
        max_seconds=60,
        exchange_seconds=20,
        **changes.pop("round", {}),
    )
    return tiny_run(frozen_storage=storage, round=rounds, **changes)


class Alive:
    """Peers of one run in one process.

    Args:
        run: The run's settings.
        slots: Slots that each peer trains at most.
        hidden: Peers that no other can call.
    """

    def __init__(self, run: RunConfig, slots: Sequence[int], hidden: Collection[int] = ()) -> None:
        self.world = World()
        swarms = [self.world.swarm(index, client_mode=index in hidden) for index in range(len(slots))]
        self.peers = [
            VirtualPeer(run, self.world, swarms[index], index=index, max_slots=count)
            for index, count in enumerate(slots)
        ]

    def live(self, on_round: Callable[[VirtualPeer, Any], None] = lambda peer, report: None) -> None:
        run_peers(self.peers, on_round)


def replicated_by(peer: VirtualPeer) -> set[str]:
    """The slots that a peer replicates after the last round."""
    return {f"slot-{slot}" for slot in peer.sync.held.replicates}


@pytest.mark.parametrize("storage", FORMS)
def test_peers_that_do_not_hold_a_slot_have_its_kept_form_alone(storage):
    alive = Alive(run_of(storage, codecs=FEW_BITS), [2, 1, 1])
    alive.live()
    states = alive.world.bodies[-1].slots
    form = KeptForm(storage, alive.peers[0].trainer.layouts["slot"].numel)
    for peer in alive.peers:
        versions = peer.swarm.versions()
        masters = {VectorName.of_slot(slot) for slot in peer.slots}
        assert len(peer.slots) < 4
        assert {name for name in SLOTS if name in versions} == masters | replicated_by(peer)
        for name in SLOTS:
            assert versions[name.kept].digest == states[name.slot].kept
            if name in versions:
                assert versions[name].digest == states[name.slot].digest
                assert digest(form.encode(peer.swarm.load(name)[: form.numel])) == states[name.slot].kept
            if name not in masters:  # the model has these bytes, whatever else is here
                own = peer.trainer.layouts["slot"].flatten(peer.trainer.model.slot_weights(name.slot))
                assert torch.equal(own, form.values(peer.swarm.load(name.kept)))


@pytest.mark.parametrize("storage", FORMS)
def test_rounds_end_in_the_weights_that_peers_with_fp32_versions_and_the_same_storage_end_in(storage, monkeypatch):
    """What a peer computes with is the same: only what travels differs."""
    ends = []
    for has_kept in (True, False):
        if not has_kept:
            monkeypatch.setattr(RunConfig, "kept_form", None)
        alive = Alive(run_of(storage), [2, 1, 1])
        alive.live()
        ends.append([(body.shared, [state.digest for state in body.slots]) for body in alive.world.bodies])
    assert ends[0] == ends[1]


def test_a_run_with_fp32_storage_has_no_kept_forms():
    alive = Alive(run_of("fp32"), [2, 1, 1])
    alive.live()
    assert all(state.kept is None for state in alive.world.bodies[-1].slots)
    assert not any(VectorName(name).is_kept for peer in alive.peers for name in peer.swarm.versions())


def test_experts_that_do_not_divide_into_blocks_travel_in_fp32():
    run = run_of("int8")
    assert run.kept_form == "int8"
    odd = run.model_copy(update={"model": run.model.model_copy(update={"intermediate_size": 9})})
    assert odd.kept_form is None


def test_a_machine_holds_what_travels():
    run = run_of("int8")
    for storage in (None, "int8"):
        check_machine(run, MachineConfig(storage=storage))
    with pytest.raises(ConfigError, match=r"storage=bf16 is not .*frozen_storage=int8; leave it out"):
        check_machine(run, MachineConfig(storage="bf16"))
    check_machine(run_of("fp32"), MachineConfig(storage="nf4"))


@pytest.mark.parametrize("copies", [2, 1])
def test_a_dead_holders_slot_goes_on_from_a_replica_or_else_from_its_kept_form(copies, caplog):
    caplog.set_level(logging.WARNING)
    alive = Alive(run_of("int8", total=10, round={"copies": copies}), [2, 2, 2])
    doomed: list[VirtualPeer] = []
    sole: set[int] = set()

    def doom(peer: VirtualPeer, report: Any) -> None:
        others = {slot for other in alive.peers if other is not peer for slot in other.slots}
        if report.round == 2 and set(peer.slots) - others and not doomed:
            doomed.append(peer)
            sole.update(set(peer.slots) - others)
            peer.interrupt(after_seconds=0.0)

    alive.live(doom)
    assert sole
    said = [f"slot-{slot}: no peer has its fp32 weights of round 2; going on from its kept form" for slot in sole]
    assert [any(line in record.getMessage() for record in caplog.records) for line in said] == [copies == 1] * len(said)
    last = alive.world.bodies[-1]
    assert last.round == 10 and all(state.round > 2 for state in last.slots)


def test_a_slot_that_nobody_has_trained_is_drawn_by_the_peer_that_adopts_it():
    """All that others have of it is rounded, and its holders must begin with the same bits."""
    alive = Alive(run_of("int8", total=2, peers=2), [1, 1])
    initial = alive.peers[0].initial()
    alive.live()
    held = alive.peers[0].sync.held
    untrained = next(name for name in SLOTS if not alive.world.bodies[-1].slots[name.slot].digest)
    held._make_masters([untrained])
    assert torch.equal(alive.peers[0].swarm.load(untrained), initial[untrained])


def lie(peer: VirtualPeer) -> None:
    """Let the kept forms that a peer makes follow from other weights than it has."""
    form = peer.anchors.form
    assert form is not None
    false = form.encode(torch.full((form.numel,), 1e-3))
    peer.anchors.kept_form = lambda name, bundle: bundle if name == SHARED else false  # type: ignore[method-assign]


def test_replicas_refuse_by_name_a_kept_form_that_does_not_follow_from_the_weights(caplog):
    caplog.set_level(logging.WARNING)
    alive = Alive(run_of("int8", total=4, peers=4), [1, 1, 1, 1])
    liar = alive.peers[1]
    lie(liar)
    alive.live()
    honest = [peer for peer in alive.peers if peer is not liar]
    accusing = {peer.index for peer in honest if any(who == liar.swarm.peer_id for _, who in peer.swarm.bans.accused)}
    assert accusing, "a replica has its weights, and so its form"
    assert not any(who != liar.swarm.peer_id for peer in honest for _, who in peer.swarm.bans.accused)
    (slot,) = liar.slots
    said = f"refused the kept form of slot-{slot}, made by {liar.swarm.peer_id[-6:]}: it does not follow"
    assert any(said in record.getMessage() for record in caplog.records)
    false = alive.world.bodies[-1].slots[slot].kept
    for index in accusing:
        assert alive.peers[index].swarm.versions()[f"kept-slot-{slot}"].digest != false


def test_holders_that_differ_about_a_kept_form_leave_the_slot_as_it_was():
    """The founder certifies the first round alone."""
    alive = Alive(run_of("int8", total=4, peers=2), [4, 4])
    lie(alive.peers[1])
    alive.live()
    assert [state.round for state in alive.world.bodies[-1].slots] == [1] * 4


def test_a_replica_keeps_the_certified_master_of_a_slot_that_a_round_left_as_it_was(monkeypatch):
    """Its holder may be gone; the new replica fetches the master only once the slot changes."""
    alive = Alive(run_of("int8"), [2, 1, 1])
    alive.live()
    peer, name = next((peer, name) for peer in alive.peers for name in sorted(replicated_by(peer)))
    held = peer.sync.held
    held.replicates = ()
    held._drop_masters()
    assert name in peer.swarm.versions()
    monkeypatch.setattr(held, "is_certified", lambda name: False)
    held._drop_masters()
    assert name not in peer.swarm.versions()


def test_a_holder_whose_own_result_did_not_count_trains_on_from_the_version_that_does(monkeypatch):
    """It fetched that version, trained on from its old anchor, and confirmed wrong results from then on."""
    alive = Alive(run_of("int8", total=6, peers=3), [4, 4, 4])
    swarm, name = alive.peers[2].swarm, VectorName.of_slot(1)
    honest = swarm.agree

    def agree(contribution: Contribution, stage: Callable, **kwargs: Any) -> Body | None:
        def staged(result: RoundResult) -> Staged | None:
            if contribution.member.round == 2 and name in result.means:
                result = dataclasses.replace(result, means={**result.means, name: result.means[name] + 1.0})
            return stage(result)

        return honest(contribution, staged, **kwargs)

    monkeypatch.setattr(swarm, "agree", agree)
    alive.live()
    certified = alive.world.bodies[-1].slots[1]
    assert certified.round == 6 and not alive.peers[2].reports[-1].dropped
    first, *others = (peer.anchors.weights(name) for peer in alive.peers)
    assert all(torch.equal(first, other) for other in others)


def test_peers_that_no_other_can_call_get_kept_forms_from_replicas():
    alive = Alive(run_of("int8"), [2, 1, 1], hidden=[1, 2])
    alive.live()
    for peer in alive.peers:
        assert {peer.swarm.versions()[name.kept].round for name in SLOTS} == {3}
        assert not any(report.dropped for report in peer.reports)


@pytest.mark.parametrize("moments", ["local", "both"])
def test_a_budget_and_momentum_go_with_kept_forms(moments, monkeypatch):
    outer = OuterConfig(optimizer="nesterov", moments=moments)
    alive = Alive(run_of("int8", total=5, outer=outer, codecs=FEW_BITS), [2, 1, 1])
    for peer in alive.peers:
        peer.sync.held.refresh_slots = 1
    alive.live()
    states = alive.world.bodies[-1].slots
    for peer in alive.peers:
        behind = [states[name.slot].round - peer.swarm.versions()[name.kept].round for name in SLOTS]
        assert 0 <= max(behind) <= 3 and peer.reports[-1].committed


def test_merging_moves_a_slot_by_the_same_bits_on_all_of_its_holders():
    """It sees slots as all peers have them, also those that it holds in fp32."""
    run = run_of("int8", total=3)
    merging = run.model_copy(update={"merge": run.merge.model_copy(update={"alpha": 0.2, "top_k": 2})})
    alive = Alive(merging, [3, 3, 3])
    alive.live()
    assert [state.round for state in alive.world.bodies[-1].slots] == [3] * 4
