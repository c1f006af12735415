"""What others publish of their slots is put to use only if the model does not get worse by it."""

import math
from collections.abc import Callable

import pytest
import torch
from virtual import VOCAB, RandomTokens, VirtualPeer, World, make_peer, peer_id, run_peers, tiny_run

from spes_p2p.codecs.vectors import digest
from spes_p2p.config import ModelConfig, RoundConfig
from spes_p2p.data.shared import PROBE_TOKENS
from spes_p2p.data.windows import CONTEXT
from spes_p2p.errors import ExchangeError
from spes_p2p.planner.size import model_size
from spes_p2p.sim.attacks import Attack, AttackingSwarm, Spoiler
from spes_p2p.sim.peer import Leaves
from spes_p2p.swarm.certificate import genesis
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.training import loss_gate as gate_module
from spes_p2p.training.loss_gate import MAX_CHANCE, MAX_LONGER, MAX_WORSE, LossGate, public_text

PEERS, ATTACKER, FROM_ROUND, ROUNDS = 6, 5, 4, 10


def run_of(slots: int = PEERS):
    """A run in which each of six peers holds one slot alone."""
    model = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 8}
    return tiny_run(
        model=ModelConfig(**model, num_experts=slots, top_k=2),
        round=RoundConfig(
            mode="steps", steps=3, total=ROUNDS, min_peers=PEERS, max_seconds=60, exchange_seconds=20, copies=1
        ),
    )


def live(attacks: list[Attack]) -> list[VirtualPeer]:
    peers = peers_beside(AttackingSwarm, attacks)
    run_peers(peers)
    return peers


def peers_beside(kind: type[AttackingSwarm], attacks: list[Attack]) -> list[VirtualPeer]:
    """Return peers, of which the last one makes these attacks, if any."""
    run, world = run_of(), World(PEERS)
    size = model_size(run.model, VOCAB)
    spoiler = Spoiler(attacks, {SHARED: size.shared_params, "slot": size.slot_params})
    swarms = [
        world.swarm(index, kind, spoiler) if attacks and index == ATTACKER else world.swarm(index)
        for index in range(PEERS)
    ]
    return [VirtualPeer(run, world, swarm, index=index, max_slots=1) for index, swarm in enumerate(swarms)]


def loss_of(peer: VirtualPeer) -> float:
    return peer.trainer.loss_on(peer.probe_BT1)


@pytest.fixture(scope="module")
def undisturbed():
    return live([])


@pytest.mark.full
def test_honest_slots_pass(undisturbed):
    for peer in undisturbed:
        assert not peer.swarm.bans.accused
        rounds = {name: version.round for name, version in peer.swarm.versions().items()}
        assert {rounds[VectorName.of_slot(slot)] for slot in range(PEERS)} == {ROUNDS}


def test_the_only_holder_of_a_slot_cannot_spoil_it_for_the_others(undisturbed):
    peers = live([Attack(peer=ATTACKER, kind="scale", factor=3000.0, groups="slots", from_round=FROM_ROUND)])
    honest, liar = peers[:ATTACKER], peers[ATTACKER]
    for peer in honest:
        assert loss_of(peer) < loss_of(undisturbed[0]) + MAX_WORSE
        accused = {(round, who) for round, who in peer.swarm.bans.accused}
        assert accused == {(FROM_ROUND, liar.swarm.peer_id), (FROM_ROUND + 1, liar.swarm.peer_id)}
        assert liar.swarm.peer_id in peer.sync.held.distrusted
    held = {slot for peer in honest for slot in peer.slots}
    assert len(held) == len(honest), "each had room for one slot"


class Lingering(AttackingSwarm):
    """Goes on serving what it has published when its peer has left."""

    def close(self) -> None:
        pass


@pytest.mark.full
def test_nobody_takes_up_the_slot_of_a_liar_that_gives_it_up_as_the_liar_left_it():
    """Whoever did would publish what follows from it, and be banned for what another has done."""
    attack = Attack(peer=ATTACKER, kind="scale", factor=3000.0, groups="slots", from_round=FROM_ROUND)
    peers = peers_beside(Lingering, [attack])
    liar = peers[ATTACKER].swarm

    def leave(peer: VirtualPeer, report) -> None:
        if peer.index == ATTACKER and report.round == FROM_ROUND + 1:
            for peer in peers[:ATTACKER]:
                peer.sync.held._max_slots = 2  # from now on there is room for the orphan
                peer.sync.held.limit(None)
            raise Leaves

    run_peers(peers, leave)
    spoilt = peers[ATTACKER].slots
    assert len(spoilt) == 1 and any(set(spoilt) <= set(peer.slots) for peer in peers[:ATTACKER]), "it was adopted"
    for peer in peers[:ATTACKER]:
        assert peer.swarm.bans.accused == {(FROM_ROUND, liar.peer_id)}, peer.swarm.bans.accused
        assert peer.swarm.versions()[VectorName.of_slot(spoilt[0])].round == ROUNDS


@pytest.fixture
def by_loss_alone(monkeypatch):
    monkeypatch.setattr(gate_module, "MAX_LONGER", math.inf)


def test_a_broken_model_blames_nobody(by_loss_alone):
    """Whose own part is not finite measures nothing, and must take what comes."""
    gate, peer, newer = opened()
    with torch.no_grad():
        next(iter(peer.trainer.model.shared_parameters().values())).fill_(math.nan)
    gate.load(newer(1e3))
    assert peer.swarm.versions()[VectorName.of_slot(1)].round == 1


def opened(slots: int = 2):
    """Return a gate that has measured a peer's model, the peer, and how to publish a newer slot-1 for it to load."""
    peer = make_peer(run_of(slots), 1)
    initial = peer.initial()
    peer.swarm.publish(0, initial)
    gate = LossGate(peer.trainer, peer.sync, peer.probe_BT1)
    peer.trainer.load(initial)
    peer.trainer.set_slots([0], {VectorName.of_slot(0): initial[VectorName.of_slot(0)]})
    for _ in range(40):
        peer.trainer.step(1e-2)
    peer.sync.num_committed = 1
    gate.load({VectorName.of_slot(1): peer.sync.held.load(VectorName.of_slot(1))})

    def newer(scale: float, round: int = 1) -> dict[str, torch.Tensor]:
        peer.swarm.publish(round, {VectorName.of_slot(1): initial[VectorName.of_slot(1)] * scale})
        return {VectorName.of_slot(1): peer.sync.held.load(VectorName.of_slot(1))}

    return gate, peer, newer


def test_a_slot_that_makes_the_model_worse_is_taken_back_and_refused(by_loss_alone):
    gate, peer, newer = opened()
    before, loss = peer.trainer.model.slot_weights(1), loss_of(peer)
    gate.load(newer(1e3))
    after = peer.trainer.model.slot_weights(1)
    assert all(torch.equal(after[name], before[name]) for name in before) and loss_of(peer) == loss
    assert peer.swarm.versions()[VectorName.of_slot(1)].round == 0
    with pytest.raises(ExchangeError, match="before its newest"):
        peer.swarm.load(VectorName.of_slot(1), before=True)


def test_whoever_adopts_a_slot_that_makes_the_model_worse_trains_on_from_the_version_before():
    gate, peer, newer = opened()
    before, vectors = peer.trainer.model.slot_weights(1), newer(1e3)
    peer.sync.anchors.set(VectorName.of_slot(1), peer.swarm.mapped(VectorName.of_slot(1)))
    peer.trainer.set_slots([0, 1], vectors)
    gate.load(vectors, adopted={VectorName.of_slot(1)})
    after = peer.trainer.model.slot_weights(1)
    assert all(torch.equal(after[name], before[name]) for name in before)
    anchor, version = peer.sync.anchors.weights(VectorName.of_slot(1)), peer.swarm.versions()[VectorName.of_slot(1)]
    assert version.round == 0 and torch.equal(anchor, peer.swarm.load(VectorName.of_slot(1))), (
        "its delta is what it trains"
    )


def test_a_slot_that_does_a_little_harm_in_each_round_is_refused_before_long(by_loss_alone):
    gate, peer, newer = opened()
    losses, scale = [loss_of(peer)], 1.0
    while peer.swarm.versions()[VectorName.of_slot(1)].round == len(losses) - 1:
        assert len(losses) < 50, "it may go on for ever"
        while True:  # a step that does so little harm that it passes for an accident
            scale *= 1.01
            peer.trainer.load({VectorName.of_slot(1): newer(scale, round=len(losses))[VectorName.of_slot(1)]})
            if loss_of(peer) > losses[-1] + MAX_WORSE / 4:
                break
        peer.trainer.load({VectorName.of_slot(1): peer.sync.held.load(VectorName.of_slot(1), before=True)})
        gate.load({VectorName.of_slot(1): peer.sync.held.load(VectorName.of_slot(1))})
        losses.append(loss_of(peer))
    assert losses[-1] <= losses[0] + 1.5 * MAX_WORSE and not peer.swarm.bans.accused


def least_scale(harm_of: Callable[[float], float], by: float, low: float) -> float:
    """Return the least scale, to two percent, that does more harm than `by`: doubled from `low`, then bisected."""
    high = low
    while harm_of(high) <= by:
        low, high = high, 2 * high
    while high > 1.02 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if harm_of(middle) > by else (middle, high)
    return high


def shared_that_is_worse(peer, by: float) -> dict[str, torch.Tensor]:
    """Return a `shared` with which a peer's model is worse by so many nats, or a little more."""
    own, loss = peer.trainer.vector(SHARED), loss_of(peer)
    noise = torch.randn(len(own), generator=torch.Generator().manual_seed(0))

    def harm_of(scale: float) -> float:
        peer.trainer.load({SHARED: own + scale * noise})
        return loss_of(peer) - loss

    scale = least_scale(harm_of, by, 1e-3)
    peer.trainer.load({SHARED: own})
    return {SHARED: own + scale * noise}


def slot_that_does_harm(peer, newer, by: float, beside: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the first slot-1 found that makes a peer's model worse by so many nats, with this `shared` beside it."""
    own, before = peer.trainer.vector(SHARED), peer.sync.held.load(VectorName.of_slot(1))
    peer.trainer.load(beside)
    loss = loss_of(peer)

    def harm_of(scale: float) -> float:
        peer.trainer.load({VectorName.of_slot(1): before * scale})
        return loss_of(peer) - loss

    scale = least_scale(harm_of, by, 1.0)
    assert harm_of(scale) < 1.2 * by, "the search is too coarse"
    peer.trainer.load({SHARED: own, VectorName.of_slot(1): before})
    return newer(scale)


def test_chance_that_moves_all_of_the_model_is_not_held_against_a_slot():
    """What training by itself has just done to the loss, a slot's holder may do as well."""
    gate, peer, newer = opened()
    worse = shared_that_is_worse(peer, 1.1 * MAX_WORSE)
    gate.load(worse | slot_that_does_harm(peer, newer, 0.7 * MAX_WORSE, worse))
    assert peer.swarm.versions()[VectorName.of_slot(1)].round == 1


def test_no_more_is_put_down_to_chance_than_chance_has_done():
    gate, peer, newer = opened()
    worse = shared_that_is_worse(peer, 10 * MAX_CHANCE)
    gate.load(worse | slot_that_does_harm(peer, newer, 0.7 * (MAX_WORSE + MAX_CHANCE), worse))
    assert peer.swarm.versions()[VectorName.of_slot(1)].round == 0


@pytest.mark.parametrize("adopted", [set(), {VectorName.of_slot(1)}], ids=["held elsewhere", "adopted"])
def test_what_a_slot_does_is_not_put_down_to_chance(adopted):
    gate, peer, newer = opened()
    vectors = slot_that_does_harm(peer, newer, 1.2 * MAX_WORSE, {})
    if adopted:
        peer.trainer.set_slots([0, 1], vectors)
    gate.load(vectors, adopted)
    assert peer.swarm.versions()[VectorName.of_slot(1)].round == 0


@pytest.mark.parametrize(
    "alone", [0.9, 1.2], ids=["nor is the second held to account", "but one that does it alone is"]
)
def test_two_slots_that_do_harm_together_are_not_both_taken(alone):
    """Each holder trains against the others' slots as they were: what two have mended, both may overdo."""
    gate, peer, _ = opened(slots=3)
    before = {name: peer.sync.held.load(name) for name in (VectorName.of_slot(1), VectorName.of_slot(2))}
    noise = torch.randn(len(before[VectorName.of_slot(1)]), generator=torch.Generator().manual_seed(0))
    newer, harms, loss = {}, {}, loss_of(peer)
    for name, harm in ((VectorName.of_slot(1), 0.4 * MAX_WORSE), (VectorName.of_slot(2), alone * MAX_WORSE)):

        def harm_of(scale: float, name: VectorName = name) -> float:
            newer[name] = before[name] + scale * noise
            peer.trainer.load({name: newer[name]})
            return loss_of(peer) - loss

        harms[name] = harm_of(least_scale(harm_of, harm, 1e-3))
        peer.trainer.load({name: before[name]})
    peer.trainer.load(newer)
    assert harms[VectorName.of_slot(1)] < 0.5 * MAX_WORSE and (harms[VectorName.of_slot(2)] > MAX_WORSE) == (alone > 1)
    assert loss_of(peer) > loss + harms[VectorName.of_slot(1)] + MAX_WORSE, "together they do what neither does alone"
    peer.trainer.load(before)
    peer.swarm.publish(1, newer)
    peer.sync.held.makers = dict.fromkeys(newer, (peer.swarm.peer_id,))
    gate.load(newer)
    assert {name: peer.swarm.versions()[name].round for name in newer} == {
        VectorName.of_slot(1): 1,
        VectorName.of_slot(2): 0,
    }
    assert bool(peer.swarm.bans.accused) == (alone > 1)


def test_who_catches_up_takes_what_the_others_have_taken():
    """Its model is another's then, and the losses of the one before say nothing of it."""
    gate, peer, newer = opened()
    peer.sync.num_committed = 0
    gate.load(newer(1e3))
    assert peer.swarm.versions()[VectorName.of_slot(1)].round == 1
    peer.sync.num_committed = 1
    gate.load(newer(1e3, round=2))
    assert peer.swarm.versions()[VectorName.of_slot(1)].round == 2, "it is no worse than the one that it has taken"


@pytest.mark.parametrize(("length", "sequences"), [(16, 64), (1000, 2), (4096, 2)])
def test_the_public_text_is_long_enough_to_measure_by(length, sequences):
    probe_BT1 = public_text(lambda seed: RandomTokens(seed, length), length)
    assert probe_BT1.shape == (sequences, length + 1) and sequences * length >= PROBE_TOKENS


class Replies(RandomTokens):
    """Of each sequence the last tokens are learned."""

    def __init__(self, seed: int, length: int, learned: int) -> None:
        super().__init__(seed, length)
        self._learned = learned

    def next_batch(self, num_sequences: int) -> torch.Tensor:
        tokens = super().next_batch(num_sequences)
        tokens[:, : -self._learned] += CONTEXT
        return tokens


@pytest.mark.parametrize(("learned", "sequences"), [(64, 16), (32, 16), (16, 32), (1, 128)])
def test_of_sequences_that_teach_little_more_are_measured(learned, sequences):
    probe_BT1 = public_text(lambda seed: Replies(seed, 64, learned), 64)
    assert len(probe_BT1) == sequences


def test_a_slot_that_no_training_makes_so_long_is_refused_whatever_its_loss(monkeypatch):
    monkeypatch.setattr(gate_module, "MAX_WORSE", math.inf)
    gate, peer, newer = opened()
    gate.load(newer(0.9 * MAX_LONGER))
    assert peer.swarm.versions()[VectorName.of_slot(1)].round == 1
    before = peer.trainer.model.slot_weights(1)
    gate.load(newer(1.1 * MAX_LONGER, round=2))  # it was shorter within the last rounds
    after = peer.trainer.model.slot_weights(1)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert peer.swarm.versions()[VectorName.of_slot(1)].round == 1


def test_later_versions_are_not_compared_with_one_that_was_refused(monkeypatch):
    """One version, far too short, would have all honest ones after it refused, and their makers named."""
    gate, peer, newer = opened()
    monkeypatch.setattr(gate_module, "MAX_WORSE", -math.inf)
    gate.load(newer(1e-3))
    assert peer.swarm.versions()[VectorName.of_slot(1)].round == 0
    monkeypatch.setattr(gate_module, "MAX_WORSE", math.inf)
    gate.load(newer(1.001, round=2))
    assert peer.swarm.versions()[VectorName.of_slot(1)].round == 2


def test_a_slot_that_does_not_is_kept():
    gate, peer, newer = opened()
    gate.load(newer(1.001))
    assert peer.swarm.versions()[VectorName.of_slot(1)].round == 1
    assert torch.equal(
        peer.trainer.layouts["slot"].flatten(peer.trainer.model.slot_weights(1)), peer.swarm.load(VectorName.of_slot(1))
    )


def test_measuring_leaves_no_trace():
    _, peer, _ = opened()
    peer.trainer.routed_tokens()
    peer.trainer.step(1e-3)
    random = torch.get_rng_state()
    routed = dict(peer.trainer.routed_tokens())
    peer.trainer.step(1e-3)
    loss_of(peer)
    assert sum(peer.trainer.routed_tokens().values()) == sum(routed.values())
    assert torch.equal(torch.get_rng_state(), random)


def test_what_makes_the_model_worse_is_named_and_the_model_stays_as_it_is():
    gate, peer, _ = opened()
    shared, loss, slot = peer.trainer.vector(SHARED), loss_of(peer), VectorName.of_slot(1)
    peer.sync.anchors.set(SHARED, peer.swarm.mapped(SHARED))
    other = peer.sync.held.load(slot)
    assert gate.harmful({SHARED: shared, slot: other}) == set()
    assert gate.harmful({SHARED: -shared, slot: other * 1e3}) == {SHARED, slot}
    assert torch.equal(peer.trainer.vector(SHARED), shared) and loss_of(peer) == loss


def test_without_a_guest_whose_part_no_voter_confirms_the_round_is_made_again(monkeypatch):
    monkeypatch.setattr(gate_module, "MAX_SHARED_WORSE", -10.0)
    run, world = run_of(), World(PEERS, genesis("run", peer_id(0), digest(b"run"), PEERS, [peer_id(0)]))
    run = run.model_copy(update={"round": run.round.model_copy(update={"min_peers": 2, "total": 4})})
    founder, guest = (VirtualPeer(run, world, world.swarm(at), index=at, max_slots=PEERS) for at in range(2))
    run_peers([founder, guest])
    assert [report.num_members for report in founder.reports] == [1] * 4
    chain = founder.swarm.consensus._agreement.chain
    assert [certificate.attempt for certificate in chain.certificates] == [1, 0, 0, 0], "it sits out some rounds"
    assert guest.swarm.last().round == 4, "it follows"


def test_little_harm_adds_up_before_it_is_confirmed(monkeypatch):
    gate, peer, _ = opened()
    slot, before = VectorName.of_slot(1), loss_of(peer)
    spoilt = peer.sync.held.load(slot) * 30
    peer.trainer.load({slot: spoilt})
    monkeypatch.setattr(gate_module, "MAX_WORSE", 1.5 * (loss_of(peer) - before))
    peer.trainer.load({slot: peer.sync.held.load(slot)})
    assert gate_module.MAX_WORSE > 0 and [gate.harmful({slot: spoilt}) for _ in range(2)] == [set(), {slot}]
