"""Messages about a run's decisions on a virtual network: what passes, what strangers cost, and what waits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import tracemalloc
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
from agreement import Round

from spes_p2p.errors import ExchangeError
from spes_p2p.sim.network import VirtualNetwork
from spes_p2p.swarm import wire as wires
from spes_p2p.swarm.certificate import (
    DIGEST_LETTERS,
    MAX_MEMBERS,
    MAX_SKIPPED,
    Body,
    Certificate,
    Certificates,
    Goodbye,
    MemberEntry,
    Point,
    Question,
    SlotState,
    genesis,
    vote_for,
)
from spes_p2p.swarm.p2p.channel import Channel
from spes_p2p.swarm.p2p.identity import Identity, IdentityKeys
from spes_p2p.swarm.proposal import Entered, Entry, Proposal, Result, Turn
from spes_p2p.swarm.wire import (
    MAX_LINES,
    MAX_READ_OF_ONE,
    MAX_STRANGE_BYTES,
    MAX_UNSENT,
    PART_BYTES,
    SEND_SECONDS,
    Envelope,
    PeerWire,
    Wired,
    certificates_bytes,
    message_bytes,
    packed,
    shortened,
)

pytestmark = pytest.mark.timeout(120)

FLOOD_BYTES, UNPACKED_BYTES = 15_000, 2**22
Peers = dict[str, "Peer"]


class Peer:
    """A peer with a key, a wire, and the messages that have come through it."""

    def __init__(
        self,
        network: VirtualNetwork,
        identity: Identity,
        last: Body,
        *,
        client_mode: bool = False,
        through: Collection[str] = (),
    ) -> None:
        self.last = last
        self.identity = identity
        self.keys = IdentityKeys(identity)
        self.keys.held = {*last.voters}
        self.peer_id = identity.peer_id
        self.node = network.node(identity.peer_id, "run", client_mode=client_mode)
        self.got: list[tuple[str, Wired]] = []
        take = lambda peer, message: self.got.append((peer, message))  # noqa: E731
        self.wire = PeerWire(self.node, self.keys, lambda: self.last, tuple, lambda peer: False, take, through)
        self.node.run(self.wire.serve(), SEND_SECONDS)

    def post(self, peer: Peer, *messages: Wired, seconds: float = 5.0) -> None:
        """Post messages at once, and let some time pass."""

        async def post() -> None:
            for message in messages:
                self.wire.post(peer.peer_id, message)
            await asyncio.sleep(seconds)

        self.node.run(post(), 100.0)

    def send(self, peer: Peer, *data: bytes, seconds: float = 5.0) -> None:
        """Send bytes in a stream each, all at once, and let some time pass."""

        async def send() -> None:
            await asyncio.gather(*(self.write(peer, each) for each in data), asyncio.sleep(seconds))

        self.node.run(send(), seconds + 100.0)

    async def write(self, peer: Peer, data: bytes | None) -> None:
        """Open a stream and send bytes; nothing for None."""
        channel = await self.open(peer)
        with contextlib.closing(channel), contextlib.suppress(ExchangeError, TimeoutError):
            await (channel.send_last(data) if data is not None else asyncio.sleep(2 * SEND_SECONDS))

    async def open(self, peer: Peer) -> Channel:
        return await self.node.open(peer.peer_id, peer.wire._service, 100.0)

    def goodbye(self) -> Goodbye:
        """Return a statement that this peer has signed."""
        return Goodbye(run="run", round=8, attempt=0, peer_id=self.peer_id).signed(self.keys)

    def entered(self) -> Entered:
        body = {"run": "run", "round": 8, "previous": self.last.digest, "attempt": 1, "member": "0" * 64}
        return Entered(entry=Entry(peer_id=self.peer_id, **body).signed(self.keys))

    def result(self) -> Result:
        """Return what a member of a roster states."""
        body = {"run": "run", "round": 8, "previous": self.last.digest, "attempt": 0, "roster": "0" * 64}
        return Result(peer_id=self.peer_id, digests={"shared": "1" * 64}, **body).signed(self.keys)


def question(points: int = 1, round: int = 7) -> Question:
    return Question(points=(Point(round=round, digest="0" * 64),) * points)


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder: Path = tmp_path_factory.mktemp("keys")
    return [Identity(folder / str(index)) for index in range(6)]


@pytest.fixture(autouse=True)
def another_minute() -> None:
    """Let this test's lines into the log, whatever the tests before it have written."""
    for each in wires.log.filters:
        each._minute = 0  # type: ignore[union-attr]


@pytest.fixture
def network() -> Iterator[VirtualNetwork]:
    network = VirtualNetwork()
    yield network
    network.close()


@pytest.fixture
def last(identities: list[Identity]) -> Body:
    """The last certificate's body: of six peers three vote, the third of which cannot be called."""
    voters = tuple(each.peer_id for each in identities[:3])
    members = [MemberEntry(peer_id=peer, tokens=1, calls_only=peer == voters[2]) for peer in sorted(voters)]
    fields = {"run": "run", "founder": voters[0], "round": 7, "previous": "0" * 64, "ends_at": 1.0, "slots": ()}
    return Body(voters=voters, members=tuple(members), **fields)


@pytest.fixture
def peers(network: VirtualNetwork, identities: list[Identity], last: Body) -> Peers:
    names = ("one", "two", "hidden", "stranger", "other", "third")
    return {n: Peer(network, key, last, client_mode=n == "hidden") for n, key in zip(names, identities, strict=True)}


# ---------------------------------------------------------------------- keys


def knows(peer: Peer, other: Peer) -> bool:
    return bool(peer.keys.public_key(other.peer_id))


def test_a_message_brings_the_keys_that_check_it_once(peers: Peers) -> None:
    one, two = peers["one"], peers["two"]
    one.post(two, one.goodbye())
    assert two.got[0][1].is_signed(two.keys)
    two.keys._known.pop(one.peer_id)
    one.post(two, one.goodbye())
    assert not knows(two, one), "the same peer was told twice"
    two.post(one, question())  # it has started again
    one.post(two, one.goodbye())
    assert knows(two, one)


def test_a_message_that_was_lost_leaves_no_peer_without_its_keys(peers: Peers, network: VirtualNetwork) -> None:
    one, two = peers["one"], peers["two"]
    network.cuts.add((one.peer_id, two.peer_id))
    one.post(two, one.goodbye(), seconds=SEND_SECONDS + 1)
    network.cuts.clear()
    one.post(two, one.goodbye())
    assert len(two.got) == 1 and knows(two, one)


def test_only_keys_that_a_message_needs_are_learnt(peers: Peers) -> None:
    one, stranger, other = (peers[name] for name in ("one", "stranger", "other"))
    keys = tuple(each.identity.public_key.decode() for each in (stranger, other))
    stranger.send(one, packed(stranger.goodbye(), (*keys, "no key")))
    assert one.got and knows(one, stranger) and not knows(one, other)


# ---------------------------------------------------------------------- bounds

SOUND = question()
MANY = Certificates(
    certificates=(
        Certificate(
            body=Body(
                run="run",
                founder="Qm" + "1" * 44,
                round=1,
                previous="0" * 64,
                ends_at=1.0,
                voters=("Qm" + "1" * 44,),
                slots=(SlotState(round=0),) * 1600,
            ),
            attempt=0,
            signatures={},
        ),
    )
)
BAD: dict[str, bytes] = {
    "no message": Envelope().pack(),
    "two messages": Envelope(question=SOUND, certificates=Certificates(certificates=())).pack(),
    "half a message": packed(SOUND)[:-1],
    "more than a message": packed(SOUND) + b"0",
    "much more than a message": packed(SOUND).ljust(3 * PART_BYTES, b"0"),
    "not packed": Envelope(question=SOUND).encode(),
    "no JSON": zlib.compress(b"\xff" * 100),
    "too long": packed(SOUND).ljust(MAX_STRANGE_BYTES + 1),
    "too long, unpacked": zlib.compress(Envelope(question=SOUND).encode().ljust(MAX_STRANGE_BYTES + 1)),
    "too many objects": packed(MANY),
}


@pytest.mark.parametrize("name", BAD)
def test_a_message_that_is_not_one_is_dropped(peers: Peers, name: str, caplog: pytest.LogCaptureFixture) -> None:
    one, stranger = peers["one"], peers["stranger"]
    with caplog.at_level(logging.INFO, "spes_p2p"):
        stranger.send(one, BAD[name])
    assert "dropped a message of " + stranger.peer_id[-6:] in caplog.text
    assert not one.got
    stranger.send(one, packed(SOUND))
    assert one.got == [(stranger.peer_id, SOUND)]


def test_a_voter_may_send_what_the_runs_numbers_allow_and_a_stranger_no_more_than_64_kb(peers: Peers) -> None:
    one, two, stranger = (peers[name] for name in ("one", "two", "stranger"))
    most = message_bytes(one.last)
    for num_bytes in (MAX_STRANGE_BYTES + 1, most, most + 1):
        for sender in (two, stranger):
            sender.send(one, zlib.compress(Envelope(question=SOUND).encode().ljust(num_bytes)))
    assert [peer for peer, _ in one.got] == [two.peer_id] * 2


def test_a_thousand_peers_may_meet_in_the_first_round_whose_members_no_body_names() -> None:
    round = Round()
    meeting = round.meeting()
    meeting = meeting.model_copy(update={"entered": (meeting.entered * MAX_MEMBERS)[:MAX_MEMBERS]})
    start = genesis("run", round.last.founder, "0" * 64, 64)
    assert len(Envelope(meeting=meeting).encode()) <= message_bytes(start)


def test_who_was_asked_may_answer_with_two_certificates_of_the_largest_run(peers: Peers) -> None:
    one, stranger = peers["one"], peers["stranger"]
    most = certificates_bytes(0)
    answers = [zlib.compress(Envelope(question=SOUND).encode().ljust(size)) for size in (most, most + 1)]
    stranger.send(one, *answers)
    assert not one.got
    one.post(stranger, SOUND)
    stranger.send(one, *answers)
    assert len(one.got) == 1
    sent = shortened(Certificates(certificates=MANY.certificates * 60))
    assert len(sent.certificates) == 2, "a chain travels in parts that a newcomer reads"
    skipping = sent.certificates[0].model_copy(update={"skipped": "0" * DIGEST_LETTERS * MAX_SKIPPED})
    both = Envelope(certificates=Certificates(certificates=(skipping,) * 2))
    assert len(both.encode()) <= certificates_bytes(len(skipping.body.slots)), "of a long run, too"
    short = MANY.certificates[0].body.model_copy(update={"slots": ()})
    many = (MANY.certificates[0].model_copy(update={"body": short}),) * 60
    assert len(shortened(Certificates(certificates=many)).certificates) == 60


def test_what_unpacks_to_four_megabytes_is_refused_within_64_kib(peers: Peers) -> None:
    """Of each of 24 such messages 164 MiB were built, in 1.1 s."""
    blank = b'{"keys":[' + b'"",' * (UNPACKED_BYTES // 3)
    data = zlib.compress(blank)
    data = data.ljust(FLOOD_BYTES, b"0")
    tracemalloc.start()
    try:
        with pytest.raises(ExchangeError, match="longer than 65536 bytes"):
            Envelope.unpack(data, MAX_STRANGE_BYTES)
        assert tracemalloc.get_traced_memory()[1] <= 2**16
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------------- turns and quotas


def test_of_one_peer_only_a_few_messages_are_read_at_the_same_time(peers: Peers) -> None:
    """They would fill the memory, or keep the others' messages out."""
    one, two, stranger = (peers[name] for name in ("one", "two", "stranger"))

    async def stall() -> None:
        stalled = [asyncio.ensure_future(stranger.write(one, None)) for _ in range(MAX_READ_OF_ONE)]
        await asyncio.sleep(1.0)
        await stranger.write(one, packed(SOUND))
        await two.write(one, packed(SOUND))
        await asyncio.wait(stalled)

    stranger.node.run(stall(), 100.0)
    assert one.got == [(two.peer_id, SOUND)]
    stranger.send(one, packed(SOUND))
    assert one.got[1:] == [(stranger.peer_id, SOUND)]


def test_many_messages_to_one_peer_are_sent_as_it_reads_them(peers: Peers) -> None:
    one, two = peers["one"], peers["two"]
    one.post(two, *(question(round=number) for number in range(MAX_UNSENT)))
    assert sorted(message.points[0].round for _, message in two.got) == list(range(MAX_UNSENT))


def test_few_messages_wait_for_a_peer_that_does_not_answer(peers: Peers, network: VirtualNetwork) -> None:
    one, two = peers["one"], peers["two"]
    network.cuts.add((one.peer_id, two.peer_id))
    one.post(two, *[SOUND] * 100)
    assert len(one.wire._tasks) == MAX_UNSENT
    network.cuts.clear()
    one.post(two, seconds=2 * SEND_SECONDS)
    assert not one.wire._tasks and not one.wire._lanes
    one.post(two, SOUND)
    assert two.got


def test_strangers_that_send_nothing_keep_no_voter_waiting(peers: Peers) -> None:
    """Four of them held all places, and each message of a voter was dropped."""
    one, two, other = (peers[name] for name in ("one", "two", "other"))
    one.wire._turns[False] = asyncio.Semaphore(MAX_READ_OF_ONE)  # in place of as many for four strangers

    async def stall() -> None:
        stalled = [asyncio.ensure_future(peers["stranger"].write(one, None)) for _ in range(MAX_READ_OF_ONE)]
        await asyncio.sleep(1.0)
        sent = [asyncio.ensure_future(sender.write(one, packed(SOUND))) for sender in (two, other)]
        await asyncio.wait(sent, timeout=2.0)
        assert one.got == [(two.peer_id, SOUND)]
        await asyncio.wait([*stalled, *sent])

    two.node.run(stall(), 100.0)


def test_strangers_together_have_one_quota_of_processor_time_and_each_voter_its_own(
    peers: Peers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wires, "BURST_SECONDS", 1e-6)
    monkeypatch.setattr(wires, "SHARE", 1e-6)
    one, two, stranger, other = (peers[name] for name in ("one", "two", "stranger", "other"))
    monkeypatch.setattr(one.node, "processor_seconds", time.thread_time)
    with caplog.at_level(logging.INFO, "spes_p2p"):
        for sender in (stranger, other, stranger, two):
            sender.send(one, packed(SOUND))
    assert [peer for peer, _ in one.got] == [stranger.peer_id, two.peer_id]
    assert caplog.text.count("have taken too much time") == 2
    stranger.send(one, packed(SOUND), seconds=3600.0)
    stranger.send(one, packed(SOUND))
    assert len(one.got) == 3, "time is saved up"


def test_answers_that_this_peer_has_asked_for_cost_their_sender_nothing(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wires, "BURST_SECONDS", 1e-6)
    monkeypatch.setattr(wires, "SHARE", 0.0)
    one, stranger = peers["one"], peers["stranger"]
    one.post(stranger, SOUND)
    for _ in range(3):
        stranger.send(one, packed(Certificates(certificates=())))
    assert len(one.got) == 3


def test_strangers_write_a_few_lines_a_minute_into_the_log(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    """One wrote 190 a second."""
    with caplog.at_level(logging.INFO, "spes_p2p"):
        for _ in range(50):
            for name in ("stranger", "other"):
                peers[name].send(peers["one"], *[b"0"] * MAX_READ_OF_ONE, seconds=0.5)
        wires.log.warning("this peer's own")
    lines = [record for record in caplog.records if "dropped" in record.message]
    assert 0 < len(lines) <= 2 * MAX_LINES  # a minute may begin meanwhile
    assert "this peer's own" in caplog.text


# ---------------------------------------------------------------------- passing on


def test_a_peer_that_cannot_be_called_gets_entries_through_another(peers: Peers, network: VirtualNetwork) -> None:
    one, two, hidden = (peers[name] for name in ("one", "two", "hidden"))
    network.cuts |= {(one.peer_id, hidden.peer_id)}
    one.post(hidden, one.entered(), one.goodbye(), seconds=3 * SEND_SECONDS)
    assert [peer for peer, _ in hidden.got] == [two.peer_id]
    message = hidden.got[0][1]
    assert message.entry.peer_id == one.peer_id and message.entry.is_signed(hidden.keys), "its author's key came along"


def test_a_peer_that_does_not_train_passes_on_what_members_behind_routers_have_signed(
    identities: list[Identity], network: VirtualNetwork, last: Body
) -> None:
    """Of a run behind routers nobody can be called but the node where its peers have met."""
    members = tuple(member.model_copy(update={"calls_only": True}) for member in last.members)
    last = last.model_copy(update={"members": members})
    rendezvous = Peer(network, identities[5], last)
    one, two = (Peer(network, each, last, client_mode=True, through=[rendezvous.peer_id]) for each in identities[:2])
    network.cuts |= {(one.peer_id, two.peer_id)}
    one.post(two, one.entered(), one.result(), one.goodbye(), seconds=3 * SEND_SECONDS)
    assert [peer for peer, _ in two.got] == [rendezvous.peer_id] * 2
    assert {type(message) for _, message in two.got} == {Entered, Result}


def passes_on(sender: str, to: str, make: Callable[[Peer], Wired]) -> Callable[[Peers], tuple[Peer, Peer, bytes]]:
    return lambda peers: (peers[sender], peers[to], packed(make(peers[sender]), to=peers[to].peer_id))


@pytest.mark.parametrize(
    "which",
    [
        passes_on("stranger", "hidden", Peer.entered),
        passes_on("two", "third", Peer.entered),
        passes_on("two", "hidden", lambda peer: question()),
    ],
    ids=["a stranger's", "to a peer that does not vote", "a question"],
)
def test_nothing_else_is_passed_on(peers: Peers, which: Callable[[Peers], tuple[Peer, Peer, bytes]]) -> None:
    """A stranger would use up the quota of the peer that passes its messages on."""
    sender, receiver, data = which(peers)
    sender.send(peers["one"], data)
    assert not receiver.got and not peers["one"].got
    peers["two"].send(peers["one"], packed(peers["two"].entered(), to=peers["hidden"].peer_id))
    assert [peer for peer, _ in peers["hidden"].got] == [peers["one"].peer_id]


# ---------------------------------------------------------------------- proposals


@pytest.mark.parametrize("late_seconds", [0.0, 0.3, None], ids=["all are there", "one is late", "one is lost"])
def test_a_proposal_names_results_that_voters_have_from_their_authors(peers: Peers, late_seconds: float | None) -> None:
    one, two, other = (peers[name] for name in ("one", "two", "hidden"))
    results = tuple(each.result() for each in (one, two, other))
    turn = Turn(vote=vote_for(one.last, 0, one.peer_id).signed(one.keys))
    proposal = Proposal(body=one.last, turns=(turn,), results=results)
    assert len(packed(proposal, names_results=True)) < len(packed(proposal)) - 2 * 256
    for author, receiver, result in ((one, two, results[0]), (two, one, results[1]), (other, one, results[2])):
        author.post(receiver, result)

    async def propose() -> None:
        one.wire.post(two.peer_id, proposal)
        if late_seconds is not None:
            one.wire._proposed = None  # it is not asked for the results
            await asyncio.sleep(late_seconds)
            other.wire.post(two.peer_id, results[2])
        await asyncio.sleep(5.0)

    one.node.run(propose(), 100.0)
    assert (one.peer_id, proposal) in two.got
