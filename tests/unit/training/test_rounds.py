"""Whole rounds of real trainers over a virtual network."""

import logging
import math
import random
from typing import Any

import pytest
import torch
from lanes import sample
from pydantic import ValidationError
from virtual import VirtualPeer, World, make_peer, peer_id, run_peers, run_virtual, tiny_run

from spes_p2p.codecs.vectors import digest
from spes_p2p.config import CodecConfig, MergeConfig, OuterConfig, RoundConfig, RunConfig, TrainConfig
from spes_p2p.config.controls import Intent
from spes_p2p.errors import DataError
from spes_p2p.swarm.averaging.encoding import Contribution
from spes_p2p.swarm.averaging.outcome import RoundResult
from spes_p2p.swarm.averaging.partition import weighted_mean
from spes_p2p.swarm.clock import round_end
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.records import Progress
from spes_p2p.swarm.roster import Roster
from spes_p2p.training import opening
from spes_p2p.training.round import MAX_FRUITLESS
from spes_p2p.training.synchroniser import Trained
from spes_p2p.training.trainer import Trainer


@pytest.mark.parametrize(  # full: one change each, of which golden runs have two rounds or more
    "changes",
    [
        {},
        pytest.param({"outer": OuterConfig(optimizer="nesterov")}, marks=pytest.mark.full),
        pytest.param({"outer": OuterConfig(moments="local")}, marks=pytest.mark.full),
        pytest.param({"outer": OuterConfig(moments="second")}, marks=pytest.mark.full),
        pytest.param({"merge": MergeConfig(alpha=0.1, decay_rounds=10)}, marks=pytest.mark.full),
        {"outer": OuterConfig(optimizer="nesterov"), "merge": MergeConfig(alpha=0.1)},
        pytest.param(
            {"round": RoundConfig(mode="tokens", tokens=2000, min_seconds=0.2, max_seconds=2, total=3, min_peers=2)},
            marks=pytest.mark.full,
        ),
    ],
    ids=["mean", "nesterov", "own-moments", "second-moments", "merge", "nesterov-merge", "tokens"],
)
def test_all_members_end_each_round_bit_identical(changes):
    peers = run_virtual(tiny_run(**changes), num_peers=3, max_slots=3)
    for reports in zip(*(peer.reports for peer in peers), strict=True):
        assert len({report.shared_digest for report in reports}) == 1
        assert {report.num_members for report in reports} == {3}
        assert all(not report.dropped for report in reports)
    digests = {tuple(peer.reports[i].shared_digest for i in range(3)) for peer in peers}
    assert len({digest for row in digests for digest in row}) == 3, "every round changes the shared anchor"
    for slot in range(4):
        holders = [peer for peer in peers if slot in peer.slots]
        assert holders, "every slot is held"
        assert len({digest(peer.anchors.weights(VectorName.of_slot(slot))) for peer in holders}) == 1


def test_reducers_keep_what_a_committed_mean_was_rounded_by():
    peers = run_virtual(tiny_run(codecs=CodecConfig(shared="int4")), num_peers=3, max_slots=3)
    kept = [peer.swarm._averaging._residuals.get(SHARED) for peer in peers]
    assert any(residual is not None and residual.any() for residual in kept)


def test_frozen_experts_are_the_holders_versions_after_a_round():
    peers = run_virtual(tiny_run(), num_peers=2, max_slots=2)
    for slot in range(4):
        expected = next(peer for peer in peers if slot in peer.slots).anchors.weights(VectorName.of_slot(slot))
        for peer in peers:
            actual = peer.trainer.layouts["slot"].flatten(peer.trainer.model.slot_weights(slot))
            assert torch.equal(actual, expected)


def test_of_a_slot_that_is_released_the_model_has_what_was_committed():
    """What the peer trained is not that: with an outer optimizer, or beside another holder."""
    run = tiny_run(outer=OuterConfig(optimizer="nesterov"))
    run = run.model_copy(update={"round": run.round.model_copy(update={"min_peers": 1})})
    peer = make_peer(run, 4)

    def limit(*_: object) -> None:
        peer.loop._wanted = lambda *_: Intent(slots=2)

    run_peers([peer], limit)
    assert len(peer.slots) == 2
    for slot in range(4):
        actual = peer.trainer.layouts["slot"].flatten(peer.trainer.model.slot_weights(slot))
        assert torch.equal(actual, peer.sync.held.load(VectorName.of_slot(slot))), slot


def replay(run: RunConfig, peer: VirtualPeer) -> tuple[Trainer, dict[str, torch.Tensor]]:
    """Train the first round's three steps as a peer did, but alone; return its trainer and the run's start."""
    world = World()
    alone = VirtualPeer(run, world, world.swarm(peer.index), index=peer.index, max_slots=len(peer.slots))
    initial = alone.initial()
    alone.trainer.load(initial)
    alone.trainer.set_slots(peer.slots, {VectorName.of_slot(s): initial[VectorName.of_slot(s)] for s in peer.slots})
    for step in range(3):
        alone.trainer.step(*alone.loop._rates(step / 3))
    return alone.trainer, initial


# Full: optimizers whose states have the names and formats of these; the optimizers' own tests have each of them.
@pytest.mark.parametrize(
    ("optimizer", "moments"),
    sample(
        [("adamw", "second"), *((name, "both") for name in ("adamw", "adamw8bit", "lamb", "muon"))],
        commit=[("adamw", "second"), ("adamw8bit", "both"), ("muon", "both")],
    ),
)
def test_after_a_round_members_share_the_mean_of_their_moments(optimizer, moments):
    """Compared with a plain replay: each peer trained alone from the same start, its moments averaged by hand."""
    outer = OuterConfig(moments=moments)
    rounds = RoundConfig(mode="steps", steps=3, total=1, min_peers=2, max_seconds=60)
    run = tiny_run(round=rounds, outer=outer, train=TrainConfig(batch_size=4, lr=1e-3, optimizer=optimizer))
    peers = run_virtual(run, num_peers=2, max_slots=3)
    replays = {peer.swarm.peer_id: replay(run, peer)[0] for peer in peers}
    for name in (SHARED, *map(VectorName.of_slot, range(4))):
        holders = [p for p in peers if name == SHARED or int(name.removeprefix("slot-")) in p.slots]
        kinds = run.averaged_moments(VectorName(name).kind)
        expected = weighted_mean(
            [replays[id].moments(name, kinds) for id in sorted(p.swarm.peer_id for p in holders)],
            [192.0] * len(holders),
        )
        for peer in holders:
            torch.testing.assert_close(peer.trainer.moments(name, kinds), expected, rtol=1e-6, atol=0)


def test_a_run_with_moments_of_its_own_leaves_them_to_each_peer():
    peers = run_virtual(tiny_run(outer=OuterConfig(moments="local")), num_peers=2, max_slots=2)
    assert not torch.equal(*(peer.trainer.moments(SHARED, ["exp_avg_sq"]) for peer in peers))


def test_a_round_is_the_token_weighted_mean_of_what_the_members_trained():
    """Compared with a plain replay: each peer trained alone from the same start, averaged by hand."""
    run = tiny_run(round=RoundConfig(mode="steps", steps=3, total=1, min_peers=2, max_seconds=60))
    peers = run_virtual(run, num_peers=2, max_slots=2)
    replays = []
    for peer in peers:
        trainer, initial = replay(run, peer)
        replays.append({name: trainer.vector(name) for name in (SHARED, *map(VectorName.of_slot, peer.slots))})
    order = sorted(range(2), key=lambda i: peers[i].swarm.peer_id)
    deltas = [initial[SHARED] - replays[i][SHARED] for i in order]
    expected = initial[SHARED] - weighted_mean(deltas, [192.0, 192.0])
    assert torch.equal(peers[0].anchors.weights(SHARED), expected)
    for peer, replayed in zip(peers, replays, strict=True):
        for slot in peer.slots:
            name = VectorName.of_slot(slot)
            assert torch.equal(peer.anchors.weights(name), initial[name] - (initial[name] - replayed[name]))


BY_THE_CLOCK = RoundConfig(mode="tokens", tokens=2000, min_seconds=0.2, max_seconds=2, total=1)
IDLE = Trained({}, 0, 100.0, 0.0)


def test_a_round_of_samples_ends_when_the_swarm_has_read_so_many_sequences():
    """Whatever is learned of each: the speed that a peer states counts all tokens of its sequences."""
    run = tiny_run(round=BY_THE_CLOCK.model_copy(update={"samples": 40, "min_seconds": 0.01, "max_seconds": 50}))
    peer = run_virtual(run, num_peers=1, max_slots=4)[0]
    work = Trained({}, 0, tokens_per_second=5.0, places_per_second=64.0, seconds=1.0)
    entry = peer.sync._contribution(work, peer.swarm.now()).member
    ends_at = round_end(run.round, 1, run.round_tokens, [entry])
    assert ends_at - entry.ready_at - entry.sync_seconds == pytest.approx(40 * 16 / 64)
    peer.sync.run = peer.sync.run.model_copy(update={"round": BY_THE_CLOCK})
    assert peer.sync._contribution(work, 0.0).member.tokens_per_second == 5.0


def test_rounds_of_samples_are_rounds_of_as_many_tokens_where_all_are_learned():
    changed = {"tokens": 10**9, "samples": 125}
    runs = [BY_THE_CLOCK, BY_THE_CLOCK.model_copy(update=changed)]
    first, second = (run_virtual(tiny_run(round=rounds), num_peers=2, max_slots=2)[0] for rounds in runs)
    assert [report.tokens for report in first.reports] == [report.tokens for report in second.reports]
    assert torch.equal(first.anchors.weights(SHARED), second.anchors.weights(SHARED))


def test_samples_go_with_rounds_that_end_by_the_clock():
    with pytest.raises(ValidationError, match=r"round.samples=8 ends rounds of mode tokens.*set round.mode=tokens"):
        RoundConfig(mode="steps", samples=8)


def test_a_peer_that_was_left_out_and_then_meets_no_other_knows_when_its_next_round_ends():
    peer = run_virtual(tiny_run(round=BY_THE_CLOCK), num_peers=2, max_slots=2)[0]
    entry = peer.sync._contribution(IDLE, peer.swarm.now()).member
    peer.sync.held.distrusted = frozenset({entry.peer_id})
    for roster in (Roster([entry], peer.swarm.last()), Roster()):
        seconds = peer.sync.next_end(RoundResult(roster), 2) - peer.swarm.now()
        assert BY_THE_CLOCK.min_seconds - 1e-6 <= seconds <= BY_THE_CLOCK.max_seconds + BY_THE_CLOCK.exchange_seconds


def test_clocks_of_members_without_a_vote_do_not_prolong_a_round():
    """Otherwise a few new identities would decide when it begins."""
    peer = run_virtual(tiny_run(round=BY_THE_CLOCK), num_peers=2, max_slots=2)[0]
    entry = peer.sync._contribution(IDLE, peer.swarm.now()).member
    late = [
        entry.model_copy(update={"peer_id": peer_id(20 + index), "ready_at": peer.swarm.now() + 900.0, **SILENT})
        for index in range(3)
    ]
    mine = peer.sync.next_end(RoundResult(Roster([entry], peer.swarm.last())), 2)
    assert peer.sync.next_end(RoundResult(Roster([entry, *late], peer.swarm.last())), 2) == mine


SILENT = {"tokens_per_second": 0.0}


def test_a_peer_that_has_caught_up_trains_until_the_round_of_the_others_ends(monkeypatch):
    """The roster that it missed knows of a round that is over by then."""
    peer = run_virtual(tiny_run(round=BY_THE_CLOCK), num_peers=2, max_slots=2)[0]
    ends_at = peer.swarm.now() + 1.5
    last = peer.swarm.last()
    monkeypatch.setattr(peer.swarm, "last", lambda: last.model_copy(update={"round": 2, "previous": last.digest}))
    monkeypatch.setattr(peer.sync.held, "expected", lambda claims: {peer_id(0), peer_id(1)})
    monkeypatch.setattr(opening, "rejoin", lambda *_: ends_at)
    peer.loop._one_round(IDLE)
    assert peer.loop._round_ends == ends_at and peer.sync.round == 2


def test_a_peer_whose_branch_was_given_up_catches_up_though_the_other_is_no_longer(monkeypatch):
    """It went to average without `shared`, and ended with a traceback."""
    peer = run_virtual(tiny_run(round=BY_THE_CLOCK), num_peers=2, max_slots=2)[0]
    other, caught_up = {"shared": digest(b"of the other branch")}, list[object]()
    other = peer.swarm.last().model_copy(update=other)
    monkeypatch.setattr(peer.swarm, "last", lambda: other)
    assert peer.swarm.last().round == peer.sync.round and peer.sync.held.is_astray
    monkeypatch.setattr(peer.sync.held, "expected", lambda claims: {peer_id(0), peer_id(1)})
    monkeypatch.setattr(opening, "try_to_fetch", lambda sync, routed: caught_up.append(routed))
    monkeypatch.setattr(opening, "rejoin", lambda *_: None)
    monkeypatch.setattr(peer.swarm, "agree", lambda *_, **__: pytest.fail("it has nothing to average"))
    peer.loop._one_round(IDLE)
    assert len(caught_up) == 1


def test_a_peer_reports_each_round_that_it_commits_also_the_one_that_it_meets_the_others_in(monkeypatch):
    """Two train by the clock; a third comes before their records reach it, and meets them at the end of a round."""
    random.seed(4)  # in another order of what it fetches it comes too late for that meeting
    rounds = RoundConfig(mode="tokens", tokens=500, min_seconds=0.5, max_seconds=1.0, total=5, min_peers=2)
    run = tiny_run(round=rounds)
    world = World()
    peers = [make_peer(run, 3, world) for _ in range(3)]
    late, committed = peers[2], list[int]()
    commit, rejoin = late.sync.commit, opening.rejoin

    def noted(*args: Any) -> None:
        commit(*args)
        committed.append(late.sync.round)

    def wait_and_live() -> None:
        while len(peers[0].reports) < 2:
            world.wait(0.1)
        late.live(late.initial, lambda report: None)

    monkeypatch.setattr(late.sync, "commit", noted)
    monkeypatch.setattr(opening, "rejoin", lambda sync, *_: None if sync is late.sync else rejoin(sync, *_))
    lives = [lambda peer=peer: peer.live(peers[0].initial, lambda report: None) for peer in peers[:2]]
    world.run([*lives, wait_and_live])
    first = late.reports[0]
    assert (first.tokens, first.total_tokens, first.loss, first.num_members) == (0, 0, None, 3), "it only met them"
    assert [report.round for report in late.reports] == committed == list(range(first.round, rounds.total + 1))
    assert {first.shared_digest} == {r.shared_digest for p in peers for r in p.reports if r.round == first.round}


def test_a_peer_that_has_left_its_run_waits_for_no_other(monkeypatch):
    """Its synchronisation may go on beside its end; it used to ask again and again, without a pause."""
    peer = run_virtual(tiny_run(round=RoundConfig(mode="steps", steps=2, total=1)), num_peers=2, max_slots=3)[0]
    late = Progress(peer_id=peer_id(1), round=0, ends_at=0.0)
    monkeypatch.setattr(peer.sync, "records", lambda peers: [late])
    looks: list[None] = []
    claims = peer.sync.held.claims
    monkeypatch.setattr(peer.sync.held, "claims", lambda: looks.append(None) or claims())
    peer.swarm.close()
    peer.sync.await_steps()
    peer.sync.round = -1  # the others have gone on
    opening.rejoin(peer.sync)
    assert len(looks) == 2, "one look each"


def test_a_trouble_of_many_vectors_is_one_line_of_the_log(monkeypatch, caplog):
    """A round that is dropped under load used to take a line for each slot, and the fetch after it as many."""
    peer = run_virtual(tiny_run(), num_peers=2, max_slots=3)[0]
    slots = [VectorName.of_slot(slot) for slot in range(3)]
    dropped = dict.fromkeys([SHARED, *slots[:2]], "lost a peer") | {slots[2]: "NaN"}
    monkeypatch.setattr(peer.swarm, "agree", lambda _, stage, **__: stage(RoundResult(dropped=dropped)) and None)
    monkeypatch.setattr(peer.swarm, "wait", lambda seconds: False)  # it has left its run
    peer.loop._one_round(Trained({}, 64, 100.0, 1.0))
    round = peer.sync.round + 1
    monkeypatch.setattr(peer.swarm, "pull", lambda *_, **__: dict.fromkeys(slots, "their disk is full"))
    peer.sync.held._pull({slot: (1, "0" * 64) for slot in slots}, ["peer"])
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [line.partition(" (")[0] for line in lines] == [  # a filter of an earlier test may count the first ones
        f"round {round}: dropped shared, slot-0, slot-1: lost a peer",
        f"round {round}: dropped slot-2: NaN",
        "could not fetch slot-0, slot-1, slot-2: their disk is full",
    ]


def test_attempts_without_a_certificate_are_given_up_and_change_nothing(monkeypatch):
    peer = run_virtual(tiny_run(), num_peers=2, max_slots=3)[0]
    before, attempts = peer.swarm.versions(), list[RoundResult]()

    def agree(contribution, stage, **_):
        attempts.append(averaged_alone(peer, contribution))
        stage(attempts[-1])

    monkeypatch.setattr(peer.swarm, "agree", agree)
    peer.trainer.load({SHARED: peer.anchors.weights(SHARED) + 1})
    work = Trained(peer.loop._deltas(), 64, 100.0, 1.0)
    monkeypatch.setattr(peer.sync.held, "expected", lambda claims: {peer.swarm.peer_id})
    monkeypatch.setattr(peer.sync, "await_steps", lambda: None)
    monkeypatch.setattr(peer.swarm, "wait", lambda seconds: False)  # it has left its run
    peer.loop._one_round(work)
    assert len(attempts) == 1 and SHARED in attempts[0].means
    assert peer.sync.round == 3 and peer.swarm.versions() == before and not peer.swarm.residuals()
    assert all(torch.equal(peer.trainer.vector(name), peer.anchors.weights(name)) for name in peer.trainer.names)


def averaged_alone(peer: VirtualPeer, contribution: Contribution) -> RoundResult:
    return RoundResult(Roster([contribution.member], peer.swarm.last()), dict(contribution.deltas))


@pytest.mark.parametrize(("rounds", "goes_on"), [(BY_THE_CLOCK, True), (tiny_run().round, False)])
def test_a_lone_peer_that_lacks_its_own_certified_version_goes_on_from_the_one_before(rounds, goes_on, monkeypatch):
    """After a kill between the certificate and the checkpoint; in mode `steps` it makes the round again."""
    peer = run_virtual(tiny_run(round=rounds), num_peers=1, max_slots=4)[0]
    last, sync = peer.swarm.last(), peer.sync
    lost = last.model_copy(update={"round": last.round + 1, "previous": last.digest, "shared": "f" * 64})
    monkeypatch.setattr(peer.swarm, "last", lambda: lost)
    monkeypatch.setattr(sync.held, "others", list)
    sync.held.unoffered = {SHARED}
    assert sync.held.model_round() == (lost if goes_on else last).round
    # Made again, it has another result, as on another device.

    def agree(contribution, stage, **_):
        stage(averaged_alone(peer, contribution))
        return lost

    monkeypatch.setattr(peer.swarm, "agree", agree)
    monkeypatch.setattr(sync.held, "expected", lambda claims: {peer.swarm.peer_id})
    monkeypatch.setattr(sync, "await_steps", lambda: None)
    monkeypatch.setattr(peer.swarm, "wait", lambda seconds: False)
    peer.loop._one_round(Trained(peer.loop._deltas(), 64, 100.0, 1.0))
    assert sync.round == lost.round


@pytest.mark.parametrize("spoiled", [1, 3])
def test_steps_that_are_not_finite_cost_their_own_tokens_alone(spoiled, monkeypatch, caplog):
    """One of three peers computes NaN in its second round: in one of three steps, or in all."""
    stock, victim = Trainer._backward, []

    def backward(trainer: Trainer, *args) -> float:
        loss = stock(trainer, *args)
        victim[:] = victim or [trainer]
        if trainer is not victim[0] or not 3 <= trainer.steps < 3 + spoiled:
            return loss
        next(iter(trainer.model.shared_parameters().values())).grad.fill_(math.nan)
        return math.nan

    monkeypatch.setattr(Trainer, "_backward", backward)
    rounds = RoundConfig(mode="steps", steps=3, total=4, max_seconds=60, exchange_seconds=20)
    run = tiny_run(round=rounds)
    peers = run_virtual(run, num_peers=3, max_slots=2)
    for peer in peers:
        is_victim = peer.trainer is victim[0]
        lost = [spoiled if is_victim and report.round == 2 else 0 for report in peer.reports]
        assert [report.tokens for report in peer.reports] == [(3 - number) * 64 for number in lost]
        assert [report.loss is None for report in peer.reports] == [number == 3 for number in lost]
        assert {report.num_members for report in peer.reports} == {3}
        assert all(flat_N.isfinite().all() for flat_N in moments_of(peer, run))
    for reports in zip(*(peer.reports for peer in peers), strict=True):
        assert len({report.shared_digest for report in reports}) == 1
    assert ("none of 3 steps had a finite gradient" in caplog.text) == (spoiled == 3)
    seconds = max(report.matchmaking_seconds + report.other_seconds for peer in peers for report in peer.reports)
    assert seconds < rounds.max_seconds / 2, "others wait for it as if it were still training"


def moments_of(peer: VirtualPeer, run: RunConfig) -> list[torch.Tensor]:
    names = peer.trainer.names
    return [peer.trainer.moments(name, run.averaged_moments(name.kind)) for name in names]


@pytest.mark.parametrize(
    ("num_spoiled", "ends"), [(MAX_FRUITLESS, True), (MAX_FRUITLESS - 1, False), (10**9, True)], ids=["5", "4", "all"]
)
def test_a_run_without_a_finite_step_ends_after_five_attempts_and_says_what_helps(
    num_spoiled, ends, monkeypatch, caplog
):
    """It repeated one round for ever, with a warning a minute."""
    stock = Trainer._backward

    def backward(trainer: Trainer, *args) -> float:
        loss = stock(trainer, *args)
        if 3 <= trainer.steps < 3 * (1 + num_spoiled):  # the first round's three steps are fine
            next(iter(trainer.model.shared_parameters().values())).grad.fill_(math.nan)
        return loss

    monkeypatch.setattr(Trainer, "_backward", backward)
    rounds = RoundConfig(mode="steps", steps=3, total=3, min_peers=1, max_seconds=60)
    if not ends:
        [peer] = run_virtual(tiny_run(round=rounds), num_peers=1, max_slots=4)
        assert [report.tokens for report in peer.reports] == [192] * 3
        return
    with pytest.raises(DataError, match=r"round 2.* 5th time in a row.*train\.lr.*--device cpu"):
        run_virtual(tiny_run(round=rounds), num_peers=1, max_slots=4)
    assert caplog.text.count("had a finite gradient") == MAX_FRUITLESS - 1
