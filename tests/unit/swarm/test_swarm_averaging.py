"""Members of a roster average its groups over a virtual network, whatever one of them does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from plain_average import Entry, average_entries
from torch import Tensor

from spes_p2p.codecs.format import Segment
from spes_p2p.config import RoundConfig
from spes_p2p.sim.network import VirtualNetwork, VirtualNode
from spes_p2p.swarm.averaging import group
from spes_p2p.swarm.averaging.averaging import Averaged, Averaging, Greeting, meeting_of
from spes_p2p.swarm.averaging.encoding import Contribution, DeltaEncoding
from spes_p2p.swarm.averaging.group import LOST, MEAN, PART
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.p2p.channel import TEXT, Channel
from spes_p2p.swarm.roster import Member, Roster
from tests.support.agreement import PEERS, last_body

NUMEL = 150_000
LAST = last_body(PEERS[:8])
ROUNDS = RoundConfig(averaging_seconds=40.0)
SILENCE_SECONDS = 10.0
SLOT = VectorName("slot-1")
Tamper = Callable[[bytes, bytes], list[tuple[bytes, bytes]] | None]
"""Gets what a rogue would send; returns what it sends in its place, or None to die."""


def segments(codec: str = "int4") -> dict[str, list[Segment]]:
    moments = Segment(20_000, "fp32" if codec == "fp32" else "int8", non_negative=True)
    return {"shared": [Segment(NUMEL, codec), moments], "slot": [Segment(NUMEL // 2, codec)]}


def member(peer: str, **changes: Any) -> Member:
    fields = {"round": LAST.round, "previous": LAST.digest, "tokens": 100, "slots": (1,)}
    times = {"tokens_per_second": 1.0, "ready_at": 1.0, "sync_seconds": 0.0}
    return Member(peer_id=peer, **fields | times | changes)


class Peer:
    """A member with its deltas; a rogue's messages pass through `tamper`."""

    def __init__(self, network: VirtualNetwork, entry: Member, codec: str, tamper: Tamper | None = None) -> None:
        self.member = entry
        self.node = network.node(entry.peer_id, "run", client_mode=entry.calls_only, uplink_mbit=entry.uplink_mbit or 0)
        self.encoding = DeltaEncoding(segments(codec))
        network = Rogue(self.node, tamper) if tamper else self.node
        self.averaging = Averaging(network, self.encoding, ROUNDS, entry.uplink_mbit)
        self.encoded: Mapping[VectorName, Tensor] = {}
        self.errors: dict[VectorName, Tensor] = {}

    def draw(self, generator: torch.Generator) -> None:
        """Draw this round's deltas: what all have in common, and noise; then moments."""
        names = [SHARED, *map(VectorName.of_slot, self.member.slots)]
        common = torch.randn(NUMEL, generator=torch.Generator().manual_seed(generator.initial_seed()))
        deltas = {name: common[: NUMEL // (1 + (name != SHARED))] for name in names}
        deltas = {name: each + torch.randn(each.numel(), generator=generator) for name, each in deltas.items()}
        deltas[SHARED] = torch.cat([deltas[SHARED], torch.rand(20_000, generator=generator)])
        self.member, self.encoded = self.encoding.encode(Contribution(self.member, deltas))

    async def die(self) -> None:
        self.node.close()


class Rogue:
    """A peer's network whose streams send something else."""

    def __init__(self, node: VirtualNode, tamper: Tamper) -> None:
        self._node, self._tamper = node, tamper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    async def open(self, peer: str, service: str, seconds: float) -> Channel:
        return self._tampered(await self._node.open(peer, service, seconds))

    async def serve(self, service: str, seconds: float, answer: Callable[[Channel, str], Any]) -> None:
        await self._node.serve(service, seconds, lambda channel, peer: answer(self._tampered(channel), peer))

    def _tampered(self, channel: Channel) -> Channel:
        send = channel.send

        async def tampered(kind: bytes, data: Any = b"") -> None:
            messages = self._tamper(kind, bytes(data)) if kind != TEXT else [(kind, data)]
            if messages is None:
                self._node.close()
                await asyncio.sleep(1e6)
            for each in messages or ():
                await send(*each)

        channel.send = tampered  # type: ignore[method-assign]
        return channel


class Swarm:
    """Peers of one roster, on one virtual network."""

    def __init__(
        self, members: Sequence[Member], codec: str = "int4", *, rogue: int = -1, tamper: Tamper | None = None
    ) -> None:
        self.network = VirtualNetwork(seed=1)
        self.network.delay = lambda sender, receiver: 0.02
        self.peers = {
            each.peer_id: Peer(self.network, each, codec, tamper if number == rogue else None)
            for number, each in enumerate(members)
        }
        for peer in self.peers.values():
            self.call(peer.averaging.serve())
        self.draw(0)

    def draw(self, seed: int) -> None:
        for number, peer in enumerate(self.peers.values()):
            peer.draw(torch.Generator().manual_seed(100 * seed + number))
        self.roster = Roster((peer.member for peer in self.peers.values()), LAST)

    def call(self, work: Any) -> Any:
        return self.network.loop.call(work, 1e4)

    def average(self, attempt: int = 0, *, late: Mapping[str, float] | None = None) -> dict[str, Averaged]:
        """Return each living peer's outcome of averaging the roster."""

        async def one(name: str, peer: Peer) -> Averaged:
            await asyncio.sleep((late or {}).get(name, 0.0))
            return await peer.averaging.average(self.roster, attempt, peer.encoded)

        async def everybody() -> list[Averaged]:
            return await asyncio.gather(*(one(*each) for each in here.items()))

        here = {name: peer for name, peer in self.peers.items() if not peer.node.is_closed}
        return dict(zip(here, self.call(everybody()), strict=True))

    def expected(self) -> dict[str, Any]:
        """Return what one process makes of the same entries."""
        met = {name: Entry(peer.member, peer.encoded, peer.encoding, peer.errors) for name, peer in self.peers.items()}
        return average_entries(met, LAST)

    def close(self) -> None:
        self.network.close()


@contextlib.contextmanager
def swarm(*args: Any, **kwargs: Any):
    here = Swarm(*args, **kwargs)
    try:
        yield here
    finally:
        here.close()


def assert_failed(averaged: Mapping[str, Averaged], lost: str, name: VectorName = SHARED) -> None:
    """All but the lost member lack the group, and know whom they have lost."""
    for peer, each in averaged.items():
        if peer != lost:
            assert each.lost == lost, (peer, each.failures)
            assert name in each.failures and name not in each.means


ROSTERS = {
    "two": [{}, {"uplink_mbit": 5.0}],
    "three unequal": [{"uplink_mbit": 50.0}, {"uplink_mbit": 10.0}, {"uplink_mbit": 1.0, "slots": ()}],
    "eight": [{"tokens": 50 + 10 * n, "slots": (n % 3,)} for n in range(8)],
    "a replica and one that trained nothing": [
        *({}, {}),
        {"slots": (), "replicates": (1,)},
        {"tokens": 0, "slots": (0,)},
    ],
    "a sole holder": [{}, {"slots": (), "replicates": (1,)}, {"slots": ()}],
    "a sole holder that takes no calls": [
        {"calls_only": True},
        {"slots": (), "replicates": (1,)},
        {"slots": (), "replicates": (1,)},
    ],
    "two that take no calls": [{"calls_only": True}, {"calls_only": True}, {}, {"slots": ()}],
}


@pytest.mark.parametrize("codec", ["int4", "fp32", "sparse-32"])
@pytest.mark.parametrize("entries", ROSTERS.values(), ids=ROSTERS)
def test_all_members_get_the_bytes_that_one_process_makes_round_after_round(entries, codec):
    with swarm([member(peer, **each) for peer, each in zip(PEERS, entries, strict=False)], codec) as here:
        for round in range(3):
            here.draw(round)
            averaged, expected = here.average(), here.expected()
            for peer, theirs in expected.items():
                mine = averaged[peer]
                groups = {name for name, reason in theirs.status.items() if not reason}
                assert mine.means.keys() == groups and mine.failures.keys() == theirs.status.keys() - groups
                assert all(torch.equal(mine.means[name], theirs.averaged[name]) for name in groups)
                assert mine.evidence == theirs.evidence and not mine.lost
                for name, (start, error) in theirs.residuals.items():
                    assert mine.residuals[name][0] == start and torch.equal(mine.residuals[name][1], error)
                    here.peers[peer].errors[name][start : start + error.numel()] = error
                here.call(here.peers[peer].averaging.keep_residuals(mine, groups))


def test_a_residual_ends_where_another_member_reduces_the_slice():
    """Otherwise it would come back, rounds later, to a mean that it is no part of."""
    with swarm([member(peer) for peer in PEERS[:3]]) as here:
        for count in (3, 2):
            for peer in list(here.peers)[count:]:
                here.peers.pop(peer)
            here.draw(count)
            averaged = here.average()
            for peer, each in averaged.items():
                here.call(here.peers[peer].averaging.keep_residuals(each, [SHARED]))
        start, error = averaged[PEERS[1]].residuals[SHARED]
        kept = here.peers[PEERS[1]].averaging._residuals[SHARED]
        assert 0 < NUMEL // 3 < start and torch.equal(kept[start : start + error.numel()], error)
        assert error.any() and not kept[:start].any()


def test_residuals_end_with_a_round_that_does_not_commit():
    with swarm([member(peer) for peer in PEERS[:3]]) as here:
        first = here.average()
        for peer, each in first.items():
            here.call(here.peers[peer].averaging.keep_residuals(each, []))
        again = here.average()
        assert all(torch.equal(first[peer].means[SHARED], again[peer].means[SHARED]) for peer in first)


def test_a_member_that_learns_the_roster_late_is_waited_for():
    with swarm([member(peer) for peer in PEERS[:3]]) as here:
        averaged = here.average(late={PEERS[1]: 0.8 * SILENCE_SECONDS})
        assert not any(each.failures for each in averaged.values())


def test_nothing_waits_for_answers():
    """Each of four equal members sends three quarters of its vectors as parts, and as much as means."""
    with swarm([member(peer, uplink_mbit=1.0) for peer in PEERS[:4]]) as here:
        here.network.delay = lambda sender, receiver: 0.3
        averaged = here.average()
        num_bytes = sum(data.numel() for data in here.peers[PEERS[0]].encoded.values())
        least = 2 * 3 / 4 * num_bytes * 8 / 1e6
        assert least <= max(each.seconds for each in averaged.values()) < 1.1 * least + 5 * 0.3


def test_members_that_cannot_call_each_other_blame_nobody():
    with swarm([member(peer, calls_only=True) for peer in PEERS[:3]]) as here:
        for each in here.average().values():
            assert SHARED in each.failures and not each.lost


def test_a_bug_of_ours_is_not_taken_for_a_lost_member(monkeypatch):
    def divide(*args: object) -> None:
        raise ZeroDivisionError

    with swarm([member(peer) for peer in PEERS[:3]]) as here:
        monkeypatch.setattr(group, "reduce_message", divide)
        with pytest.raises(ZeroDivisionError):
            here.average()


# ---------------------------------------------------------------------- members that are lost


def dies_after(num_messages: int, kinds: bytes = PART + MEAN) -> Tamper:
    left = [num_messages]

    def tamper(kind: bytes, data: bytes) -> list[tuple[bytes, bytes]] | None:
        left[0] -= kind in kinds
        return [(kind, data)] if left[0] >= 0 else None

    return tamper


@pytest.mark.parametrize("num_messages", [0, 1, 3, 6])
@pytest.mark.parametrize("size", [3, 6])
def test_all_learn_at_once_which_member_has_died(size, num_messages):
    with swarm([member(peer) for peer in PEERS[:size]], rogue=1, tamper=dies_after(num_messages)) as here:
        began = here.network.loop.time()
        assert_failed(here.average(), PEERS[1])
        assert here.network.loop.time() - began < 3 * SILENCE_SECONDS


def test_a_member_that_gives_an_attempt_up_ends_it_for_all_at_once_and_blames_nobody():
    with swarm([member(peer) for peer in PEERS[:4]]) as here:
        gives_up = here.peers[PEERS[1]].averaging
        average = gives_up.average

        async def cancelled(*args: Any) -> Averaged:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(average(*args), 0.05)
            return Averaged()

        gives_up.average = cancelled  # type: ignore[method-assign]
        averaged = here.average()
        others = [each for peer, each in averaged.items() if peer != PEERS[1]]
        assert not averaged[PEERS[1]].means
        assert all(SHARED in each.failures and not each.lost and each.seconds < 1.0 for each in others)


def test_one_that_is_dead_from_the_start_is_named():
    with swarm([member(peer) for peer in PEERS[:4]]) as here:
        here.peers[PEERS[2]].node.close()
        averaged = here.average()
        assert_failed(averaged, PEERS[2])
        assert max(each.seconds for each in averaged.values()) < SILENCE_SECONDS


@pytest.mark.parametrize("hidden", [False, True])
def test_one_that_falls_silent_is_named_by_all_in_time(hidden):
    def tamper(kind: bytes, data: bytes) -> list[tuple[bytes, bytes]]:
        return []

    entries = [member(peer, calls_only=hidden and peer == PEERS[1]) for peer in PEERS[:4]]
    with swarm(entries, rogue=1, tamper=tamper) as here:
        averaged = here.average()
        assert_failed(averaged, PEERS[1])
        others = [each for peer, each in averaged.items() if peer != PEERS[1]]
        assert max(each.seconds for each in others) < 1.2 * SILENCE_SECONDS


def test_once_shared_has_failed_no_slot_is_waited_for():
    def tamper(kind: bytes, data: bytes) -> list[tuple[bytes, bytes]]:
        return []

    entries = [member(peer, slots=(0,) if peer == PEERS[3] else (1,)) for peer in PEERS[:4]]
    with swarm(entries, rogue=3, tamper=tamper) as here:
        averaged = here.average()
        assert_failed(averaged, PEERS[3])
        assert set(averaged[PEERS[0]].failures) <= {SHARED, SLOT}


def test_a_slots_group_fails_alone():
    with swarm([member(peer) for peer in PEERS[:3]]) as here:
        rogue = here.peers[PEERS[1]]
        rogue.encoded = {**rogue.encoded, SLOT: torch.full_like(rogue.encoded[SLOT], 0xFF)}
        averaged = here.average()
        for peer in (PEERS[0], PEERS[2]):
            assert averaged[peer].means.keys() == {SHARED} and averaged[peer].failures.keys() == {SLOT}
            assert not averaged[peer].lost


WRONG = {
    "one byte short, and no more": lambda kind, data: [(kind, data[:-1])],
    "one byte more": lambda kind, data: [(kind, data + b"x")],
    "nothing": lambda kind, data: [(kind, b"")],
    "another kind": lambda kind, data: [(b"?", data)],
    "what is no delta": lambda kind, data: [(kind, b"\xff" * len(data))],
    "a megabyte": lambda kind, data: [(kind, bytes(2**20))],
}


@pytest.mark.parametrize(("wrong", "kind"), [*((each, PART) for each in WRONG), *((each, MEAN) for each in WRONG)])
def test_one_that_sends_what_is_impossible_is_named(wrong, kind):
    def tamper(sent: bytes, data: bytes) -> list[tuple[bytes, bytes]]:
        return WRONG[wrong](sent, data) if sent == kind else [(sent, data)]

    with swarm([member(peer) for peer in PEERS[:3]], "fp32", rogue=1, tamper=tamper) as here:
        assert_failed(here.average(), PEERS[1])


def test_what_cannot_be_read_is_left_out_where_enough_others_send_and_proves_its_sender_a_liar():
    with swarm([member(peer) for peer in PEERS[:7]], "fp32") as here:
        rogue = here.peers[PEERS[1]]
        rogue.encoded = {name: torch.full_like(data, 0xFF) for name, data in rogue.encoded.items()}
        averaged = here.average()
        means = [each.means[SHARED] for peer, each in averaged.items() if peer != PEERS[1]]
        assert all(torch.equal(mean, means[0]) for mean in means)
        honest = [peer.encoded[SHARED].view(torch.float32) for peer in here.peers.values() if peer is not rogue]
        torch.testing.assert_close(means[0].view(torch.float32), torch.stack(honest).mean(0))
        assert all(each.evidence[PEERS[1]].is_proof for peer, each in averaged.items() if peer != PEERS[1])


def test_a_mean_that_cannot_be_one_fails_its_group():
    def tamper(kind: bytes, data: bytes) -> list[tuple[bytes, bytes]]:
        values = torch.frombuffer(bytearray(data), dtype=torch.float32) if kind == MEAN else torch.empty(0)
        return [(kind, (1000 * values).numpy().tobytes() if kind == MEAN else data)]

    with swarm([member(peer) for peer in PEERS[:3]], "fp32", rogue=1, tamper=tamper) as here:
        averaged = here.average()
        assert_failed(averaged, PEERS[1])
        assert PEERS[1] in averaged[PEERS[0]].evidence


def test_a_reducer_that_tells_each_member_another_mean_does_not_fail_every_attempt():
    values = iter(range(1, 10**6))

    def tamper(kind: bytes, data: bytes) -> list[tuple[bytes, bytes]]:
        if kind == MEAN:
            data = (
                (torch.frombuffer(bytearray(data), dtype=torch.float32) * (1 + 0.01 * next(values) % 1))
                .numpy()
                .tobytes()
            )
        return [(kind, data)]

    def is_one_mean(averaged: dict[str, Averaged]) -> bool:
        means = [each.means[SHARED] for peer, each in averaged.items() if peer != PEERS[1]]
        return all(torch.equal(mean, means[0]) for mean in means)

    with swarm([member(peer) for peer in PEERS[:4]], "fp32", rogue=1, tamper=tamper) as here:
        agreed = [is_one_mean(here.average(attempt)) for attempt in range(8)]
        assert not agreed[0] and any(agreed)


@pytest.mark.parametrize("kind", [PART, MEAN], ids=["parts", "means"])
def test_one_that_goes_on_and_on_is_not_listened_to(kind):
    counts = [0, 0]  # of an honest attempt, and of one that ends with more
    extra: list[bytes] = []

    def tamper(sent: bytes, data: bytes) -> list[tuple[bytes, bytes]]:
        counts[attempt] += sent == kind
        if attempt and sent == kind and counts[1] == counts[0]:
            extra.extend([data] * 5)
        return [(sent, data)] + [(kind, each) for each in extra]

    with swarm([member(peer) for peer in PEERS[:3]], "fp32", rogue=1, tamper=tamper) as here:
        for attempt in range(2):
            assert not any(each.failures for each in here.average(attempt).values())
        assert extra


def test_a_senders_word_blames_nobody_but_itself():
    def tamper(kind: bytes, data: bytes) -> list[tuple[bytes, bytes]]:
        return [(LOST, PEERS[0].encode())]

    entries = [member(peer, calls_only=peer == PEERS[1]) for peer in PEERS[:4]]
    with swarm(entries, rogue=1, tamper=tamper) as here:
        assert_failed(here.average(), PEERS[1])


# ---------------------------------------------------------------------- replicas, and strangers


@pytest.mark.parametrize("last", [(), (LOST, PEERS[0].encode()), (PART, b"of nothing")], ids=["", "blames", "sends"])
def test_a_lost_replica_is_no_lost_member(last):
    """Its streams of the slot end, perhaps with a word that blames a holder, or with what nobody asked for."""
    entries = [member(PEERS[0]), member(PEERS[1], uplink_mbit=0.2), member(PEERS[2], slots=(), replicates=(1,))]
    with swarm(entries) as here:
        replica = here.peers[PEERS[2]].averaging
        open_stream = replica._open

        async def open_and_leave(meeting: str, name: VectorName, peer: str, lane: int) -> Channel:
            channel = await open_stream(meeting, name, peer, lane)
            if name == SLOT:
                if last:
                    await channel.send(*last)
                channel.close()
            return channel

        replica._open = open_and_leave  # type: ignore[method-assign]
        averaged = here.average(late={PEERS[1]: 0.8 * SILENCE_SECONDS})
        assert averaged[PEERS[0]].seconds > SILENCE_SECONDS, (
            "the group lasts longer than the replica's word is pondered"
        )
        assert averaged[PEERS[2]].failures.keys() == {SLOT}
        assert all(averaged[peer].means.keys() == {SHARED, SLOT} for peer in PEERS[:2])


def test_a_stranger_and_one_that_comes_twice_are_refused():
    with swarm([member(peer) for peer in PEERS[:3]]) as here:
        stranger = here.network.node(PEERS[9], "run")
        rogue = here.peers[PEERS[1]].node

        async def intrude(node: VirtualNode, lane: int) -> None:
            channel = await node.open(PEERS[0], here.peers[PEERS[0]].averaging._service, 5.0)
            greeting = Greeting(meeting=meeting_of(here.roster, 0), group=SHARED, lane=lane)
            await channel.send_text(greeting.model_dump_json())
            with pytest.raises(Exception, match="hung up"):
                await channel.receive({MEAN: 2**20})

        async def both() -> list[Any]:
            return await asyncio.gather(
                *(peer.averaging.average(here.roster, 0, peer.encoded) for peer in here.peers.values()),
                *(intrude(stranger, 0), later()),
            )

        async def later() -> None:
            await asyncio.sleep(0.1)
            await intrude(rogue, 0)

        averaged = here.call(both())[:3]
        assert not any(each.failures for each in averaged)
