"""With a sparse codec each peer trains on with what it has not sent: its weights are the anchor minus the residual."""

import pytest
import torch
from virtual import World, make_peer, peer_id, run_peers, tiny_run

from spes_p2p.codecs.format import Format, Segment
from spes_p2p.config import CodecConfig, OuterConfig
from spes_p2p.config.run import RunConfig
from spes_p2p.swarm import hivemind_swarm
from spes_p2p.swarm.averaging.encoding import Contribution, DeltaEncoding
from spes_p2p.swarm.averaging.outcome import result_of
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.roster import Member
from spes_p2p.training.checkpoint import MOMENTS, RESIDUALS, PeerState, Saved
from spes_p2p.training.loss_gate import LossGate

SPARSE = CodecConfig(shared="sparse-8", slots="sparse-8")
SLOT = VectorName.of_slot(0)


def sparse_run(total=3, min_peers=2, **changes) -> RunConfig:
    run = tiny_run(outer=OuterConfig(moments="local"), codecs=SPARSE, **changes)
    return run.model_copy(update={"round": run.round.model_copy(update={"total": total, "min_peers": min_peers})})


def local(peer):
    return {name: peer.trainer.vector(name).clone() for name in peer.trainer.names}


def residuals(peer):
    return {name: each.whole().clone() for name, each in peer.swarm.residuals().items()}


def anchors(peer):
    return {name: peer.anchors.weights(name).clone() for name in peer.trainer.names}


def has_kept(peer):
    """Check that a peer's weights are its anchors minus what it has not sent."""
    left, own = residuals(peer), local(peer)
    assert left.keys() <= own.keys()
    for name, weights in anchors(peer).items():
        expected = weights - left[name] if name in left else weights
        assert torch.equal(own[name], expected), name
    return any(each.any() for each in left.values())


def test_a_peer_alone_trains_as_if_there_were_no_rounds():
    """What a round rounds away stays in the weights: compared with a trainer that makes the same steps in a row."""
    run = sparse_run(total=4, min_peers=1)
    peer, alone = make_peer(run, 4), make_peer(run, 4)
    run_peers([peer])
    start = alone.initial()
    alone.trainer.load(start)
    alone.trainer.set_slots(range(4), {n: each for n, each in start.items() if n != SHARED})
    for step in range(12):
        alone.trainer.step(*alone.loop._rates(step / 3))
    for name, found in local(peer).items():
        moved = (alone.trainer.vector(name) - start[name]).norm()
        assert (found - alone.trainer.vector(name)).norm() < 1e-3 * moved, name
        assert (peer.anchors.weights(name) - found).norm() > 0.05 * moved, "the anchor has most of it, not all"


def test_rounds_are_those_of_a_plain_replay():
    """Two trainers without a swarm, averaged by hand: the largest of anchor - local travel, and those of the mean."""
    run, world, again = sparse_run(total=4), World(), World()
    peers = [make_peer(run, 4, world) for _ in range(2)]
    run_peers(peers)
    replays = [make_peer(run, 4, again) for _ in range(2)]
    anchor = replays[0].initial()
    for replay in replays:
        replay.trainer.load(anchor)
        replay.trainer.set_slots(range(4), {n: each for n, each in anchor.items() if n != SHARED})
    formats = {name: Format([Segment(each.numel(), "sparse-8")]) for name, each in anchor.items()}
    left = {name: torch.zeros_like(each) for name, each in anchor.items()}
    for round in range(4):
        for replay in replays:
            for step in range(3):
                replay.trainer.step(*replay.loop._rates(round + step / 3))
        for name, format in formats.items():
            deltas = [anchor[name] - replay.trainer.vector(name) for replay in replays]
            sent = [format.decode(format.encode(delta)) for delta in deltas]
            mean = sum(sent) / 2 + left[name]
            step = format.decode(format.encode(mean))
            left[name], anchor[name] = mean - step, anchor[name] - step
            for replay, delta, part in zip(replays, deltas, sent, strict=True):
                replay.trainer.load({name: anchor[name] - (delta - part)})
    for name, expected in anchor.items():
        for peer, replay in zip(peers, replays, strict=True):
            torch.testing.assert_close(peer.anchors.weights(name), expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(peer.trainer.vector(name), replay.trainer.vector(name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dense_rounds", [0, 2])
def test_after_each_round_weights_are_the_anchors_minus_the_residuals_and_anchors_are_the_same(dense_rounds):
    run, world = sparse_run(total=4, min_peers=3), World()
    run = run.model_copy(update={"codecs": SPARSE.model_copy(update={"dense_rounds": dense_rounds})})
    peers, seen = [make_peer(run, 3, world) for _ in range(3)], []

    def check(peer, report):
        seen.append((report.round, has_kept(peer)))

    run_peers(peers, check)
    assert len(seen) == 12 and all(has for _, has in seen)
    for reports in zip(*(peer.reports for peer in peers), strict=True):
        assert len({report.shared_digest for report in reports}) == 1
    assert not torch.equal(*(peer.trainer.vector(SHARED) for peer in peers[:2])), "each trains on from its own weights"


def test_dense_rounds_come_first():
    encoding = DeltaEncoding({"shared": (Segment(4096, "sparse-32", dense_rounds=2), Segment(10, "int8", True))})
    codecs = [encoding.format("shared", round).segments[0].codec for round in (1, 2, 3)]
    assert codecs == ["int4", "int4", "sparse-32"] and encoding.keeps("shared")
    run = sparse_run().model_copy(update={"codecs": SPARSE.model_copy(update={"dense_rounds": 2, "slots": "fp32"})})
    peer = make_peer(run, 4)
    segments = peer.anchors.segments()
    assert [segments[kind][0].dense_rounds for kind in ("shared", "slot")] == [2, 0]


def test_a_run_without_dense_rounds_says_nothing_of_them():
    assert "dense_rounds" not in CodecConfig().model_dump_json()
    assert CodecConfig.model_validate_json(CodecConfig(dense_rounds=3).model_dump_json()).dense_rounds == 3


def test_a_slot_that_the_certificate_does_not_name_keeps_its_weights(monkeypatch):
    """In round 2 the group of slot 0 fails for all its members."""

    def without_slot(roster, averaged, contribution, encoding, seconds):
        averaged.means.pop(SLOT, None) if roster.round == 1 else None
        return result_of(roster, averaged, contribution, encoding, seconds)

    monkeypatch.setattr(hivemind_swarm, "result_of", without_slot)
    run, world, ends, after = sparse_run(total=3), World(), {}, {}
    peers = [make_peer(run, 4, world) for _ in range(2)]
    for peer in peers:
        deltas = peer.loop._deltas

        def noting(peer=peer, deltas=deltas):
            ends[peer.index, peer.sync.round + 1] = local(peer)[SLOT]
            return deltas()

        peer.loop._deltas = noting

    def check(peer, report):
        assert has_kept(peer)
        after[peer.index, report.round] = local(peer)[SLOT], anchors(peer)[SLOT]

    run_peers(peers, check)
    for index in (0, 1):
        weights, anchor = after[index, 2]
        assert torch.equal(anchor, after[index, 1][1]), "the certificate leaves it as it was"
        trained = ends[index, 2] - after[index, 1][0]
        assert trained.norm() > 0 and (weights - ends[index, 2]).norm() < 1e-5 * trained.norm()
        assert not torch.equal(after[index, 3][1], anchor), "and the next delta contains it"


def encoding_of(numel=4096):
    encoding = DeltaEncoding({kind: (Segment(numel, "sparse-32"),) for kind in ("shared", "slot")})
    fields = {"peer_id": peer_id(0), "previous": "0" * 64, "slots": (0,), "tokens_per_second": 1.0}

    def encode(round, tokens=1, **deltas):
        member = Member(**fields, round=round, tokens=tokens, ready_at=1.0, sync_seconds=0.0)
        named = {VectorName(name.replace("_", "-")): each for name, each in deltas.items()}
        return encoding.encode(Contribution(member, named))[1]

    return encoding, encode


def kept_of(encoding):
    return {name: each.whole().clone() for name, each in encoding.kept().items()}


@pytest.mark.parametrize("is_missed", [True, False], ids=["missed", "without tokens"])
def test_a_round_that_does_not_count_leaves_the_older_residual(is_missed):
    encoding, encode = encoding_of()
    encode(1, shared=torch.randn(4096), slot_0=torch.randn(4096))
    encoding.commit([SHARED, SLOT])
    older = kept_of(encoding)
    assert older.keys() == {SHARED, SLOT} and all(each.any() for each in older.values())
    encode(2, int(is_missed), shared=torch.randn(4096), slot_0=torch.randn(4096))
    if is_missed:
        encoding.forget()
    else:
        encoding.commit([SHARED, SLOT])
    assert all(torch.equal(each, older[name]) for name, each in kept_of(encoding).items())


def test_a_delta_contains_the_residual_so_it_is_not_added_again():
    encoding, encode = encoding_of()
    delta = torch.randn(4096)
    encode(1, shared=delta)
    encoding.commit([SHARED])
    left = kept_of(encoding)[SHARED]
    sent = encoding.format(SHARED, 2).decode(encode(2, shared=left)[SHARED])
    encoding.commit([SHARED])
    assert torch.allclose(kept_of(encoding)[SHARED] + sent, left, atol=1e-6)


def test_of_another_version_that_the_certificate_names_the_older_residual_stays():
    encoding, encode = encoding_of()
    encode(1, shared=torch.randn(4096), slot_0=torch.randn(4096))
    encoding.commit([SHARED, SLOT])
    older = kept_of(encoding)[SLOT]
    encode(2, shared=torch.randn(4096), slot_0=torch.randn(4096))
    encoding.commit([SHARED], unchanged=[])
    assert torch.equal(kept_of(encoding)[SLOT], older)


def test_a_slot_given_up_drops_its_residual():
    encoding, encode = encoding_of()
    encode(1, shared=torch.randn(4096), slot_0=torch.randn(4096))
    encoding.commit([SHARED, SLOT])
    encoding.hold([SHARED])
    assert encoding.kept().keys() == {SHARED}


def test_a_restart_with_its_checkpoint_keeps_residuals_also_over_other_anchors():
    encoding, _ = encoding_of()
    encoding.restore({SHARED: torch.ones(4096)}, has_same_anchors=False)
    assert torch.equal(kept_of(encoding)[SHARED], torch.ones(4096))
    dense = DeltaEncoding({"shared": (Segment(64, "int4"),)})
    dense.restore({SHARED: torch.ones(64)}, has_same_anchors=False)
    assert not dense.feedback.names
    dense.restore({SHARED: torch.ones(64)}, has_same_anchors=True)
    assert dense.feedback.names == {SHARED} and not dense.kept()


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_restart_goes_on_with_what_was_not_sent_if_there_is_a_checkpoint(has_checkpoint):
    run = sparse_run(total=9, min_peers=1)
    peer, before = make_peer(run, 4), make_peer(run, 4)
    before.trainer.set_slots(range(4), {n: each for n, each in before.initial().items() if n != SHARED})
    before.trainer.step(1e-2)
    peer.swarm.publish(7, peer.initial())
    tensors = {f"{MOMENTS}{name}": each for name, each in before.trainer.state_tensors().items()}
    tensors[f"{RESIDUALS}{SHARED}"] = torch.full_like(peer.trainer.vector(SHARED), 0.1)
    tensors[f"{RESIDUALS}slot-9"] = torch.ones(3)  # a slot that others hold now
    state = PeerState("run", 5, (0, 1, 2, 3), 21, 999, {"position": 40})
    peer.loop.open(None, Saved(state, tensors) if has_checkpoint else None)
    assert has_kept(peer) == has_checkpoint and residuals(peer).keys() == ({SHARED} if has_checkpoint else set())


def test_the_loss_gate_measures_the_anchors(monkeypatch):
    run, world, measured = sparse_run(total=3), World(), []
    peers = [make_peer(run, 2, world) for _ in range(2)]
    measure = LossGate._measure
    names = {peer.loop._gate: peer for peer in peers}

    def noting(gate):
        peer = names[gate]
        if residuals(peer) and peer.sync.num_committed:
            measured.append(all(torch.equal(local(peer)[n], each) for n, each in anchors(peer).items()))
        return measure(gate)

    monkeypatch.setattr(LossGate, "_measure", noting)
    run_peers(peers)
    assert measured and all(measured)
