"""How long a peer waits for others before it averages with those that are there."""

import asyncio
import contextlib
import math
from types import SimpleNamespace

import pytest
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import get_dht_time

from spes_p2p.errors import ExchangeError
from spes_p2p.sim.network import VirtualNetwork
from spes_p2p.swarm.averaging.matchmaking import Declarations, Leaders, Survivors, SwarmMatchmaking
from spes_p2p.swarm.averaging.outcome import Attempt
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.interface import Contribution
from spes_p2p.swarm.membership import Membership
from spes_p2p.swarm.records import Claim
from spes_p2p.swarm.roster import Member, Roster
from tests.support.certificates import PEERS, last_body

MEETING_SECONDS = 0.5


def roster_of(*peers: PeerID) -> Roster:
    """Return the roster of a first meeting after a certificate that names all these peers."""
    last = last_body([peer.to_base58() for peer in peers])
    entry = {"round": last.round, "previous": last.digest, "tokens": 1, "slots": (), "tokens_per_second": 1.0}
    return Roster((Member(peer_id=peer.to_base58(), ready_at=0.0, sync_seconds=1.0, **entry) for peer in peers), last)


def test_no_time_is_up_when_a_peer_declares_for_the_first_time():
    """A follower that was there by then would be the only one: its leader began at once."""

    async def search() -> tuple[float, float]:
        me = PeerID(b"me")
        leaders = Leaders(me, MEETING_SECONDS, 4)
        known = Declarations(SimpleNamespace(peer_id=me), "", "", 4)
        known.survivors, known.leaders = Survivors(frozenset(), ()), leaders
        now = get_dht_time()
        step = SimpleNamespace(scheduled_time=now + MEETING_SECONDS, deadline=now + 60)
        async with leaders.begin_search(step, known):
            with pytest.raises(TimeoutError):
                await leaders.pop_next_leader()
        return now, get_dht_time()

    began, ended = asyncio.run(search())
    assert ended - began >= MEETING_SECONDS, "the peer gave the others no time"


def test_when_a_round_is_redone_a_peer_leads_only_if_the_others_can_call_it_and_the_failed_proposer_last():
    """The smallest id led.

    Where it was behind a router, the others took the next one, and it was left out. Where it was the proposer, cut off
    before it could propose, the others asked it for six seconds and met in the attempt after the next.
    """
    routed, proposer, third, fourth = peers = [PeerID.from_base58(peer) for peer in sorted(PEERS[:4])]
    roster = roster_of(*peers)
    roster = Roster([roster[0].model_copy(update={"calls_only": True}), *roster[1:]], roster.last)
    failed = {"me": third.to_base58(), "proposer": proposer.to_base58()}

    def followed(me: PeerID) -> list[PeerID]:
        known = Declarations(SimpleNamespace(peer_id=me, client_mode=me == routed), "", "", 3)
        known.survivors = Survivors.of(roster, lost="", **failed)
        return [peer for peer, _ in asyncio.run(known.get_averagers("", only_active=True))]

    assert [followed(me) for me in (routed, third, fourth, proposer)] == [
        [third, fourth, proposer],
        [],
        [third],
        [third, fourth],
    ]
    left = Survivors.of(roster, lost=proposer.to_base58(), **failed)
    assert left.peers == {routed, third, fourth} and left.leaders == (third, fourth)
    assert Survivors.of(roster, lost=third.to_base58(), **failed).peers == set(peers), "others have lost this peer"


def test_only_members_that_average_the_shared_parameters_redo_a_round():
    """A member of another certificate is never lost, because it is in no group: the others waited for it, or asked it
    first, for all of the meeting's time."""
    behind, *others = [PeerID.from_base58(peer) for peer in sorted(PEERS[:4])]
    roster = roster_of(behind, *others)
    roster = Roster([roster[0].model_copy(update={"previous": "0" * 64}), *roster[1:]], roster.last)
    left = Survivors.of(roster, me=others[0].to_base58(), lost="", proposer="")
    assert left.peers == set(others) and set(left.leaders) == set(others)


@pytest.fixture
def matchmaking() -> SwarmMatchmaking:
    """A matchmaking that can be prepared, and has no network."""
    matchmaking = SwarmMatchmaking.__new__(SwarmMatchmaking)
    matchmaking.group_key_manager, matchmaking.potential_leaders = SimpleNamespace(), SimpleNamespace()
    return matchmaking


def test_a_peer_that_sees_few_others_closes_no_group_below_the_smallest_size(matchmaking):
    """One whose p2pd had stood still for some seconds led four of eight, which five have to certify: 27 s were lost."""
    matchmaking.prepare(4, 5, None)
    assert matchmaking.target_group_size == matchmaking.group_key_manager.target_group_size == 5


def test_who_redoes_a_round_does_not_wait_for_the_peer_that_was_lost(matchmaking):
    """The leader waited for as many as before, to the end of the meeting's time: three seconds in each such round."""
    survivors = Survivors(frozenset(map(PeerID.from_base58, PEERS[:3])), ())
    for expected in (4, 2):  # a leader that saw fewer claims left one of them behind
        matchmaking.prepare(expected, 2, survivors)
        assert matchmaking.target_group_size == matchmaking.group_key_manager.target_group_size == 3


def test_only_those_that_have_met_redo_a_round_and_all_meet_for_a_new_one():
    """Those that had met without tokens redid the next round, and a peer that had come since was left out."""
    redone: list[bool] = []
    roster, last = roster_of(PeerID.from_base58(PEERS[0])), last_body(PEERS[:4])
    met = iter([roster, roster, roster, Roster(), roster])

    def attempt(*_, is_redone: bool, **__) -> Attempt:
        redone.append(is_redone)
        return Attempt(next(met))

    swarm = SimpleNamespace(
        consensus=SimpleNamespace(quorum=2, attempt=0, body_at=lambda round: last),
        _network=SimpleNamespace(client_mode=False),
        bans=SimpleNamespace(distrusted=lambda round: ()),
        peer_id=PEERS[0],
        _averager=SimpleNamespace(attempt=attempt),
        _membership=SimpleNamespace(guests=None, last_read=lambda kind: {}),
        _encoding=SimpleNamespace(encode=lambda contribution: (contribution.member, {})),
        _encoded_deltas=None,
        _has_met=False,
        _is_cut_off=lambda *_: False,
        _stated_links=lambda _: (),
        _reserve_uplink=lambda: None,
    )
    swarm._meet = lambda *items: HivemindSwarm._meet(swarm, *items)
    for tries in (3, 2):
        contribution = Contribution(roster[0], {})
        for _ in range(tries):
            with contextlib.suppress(AttributeError):  # what comes after the meeting has no network here
                HivemindSwarm.average(swarm, contribution, expected=2, closes_from=0.0)
    assert redone == [False, True, True, False, False]


def test_a_peer_that_leaves_counts_as_gone_and_a_paused_one_does_not():
    stated = zip(PEERS, (("active", 2), ("active", 0), ("joining", 0)), strict=False)
    claims = {peer: Claim(peer_id=peer, state=state, max_slots=slots, since=0.0) for peer, (state, slots) in stated}
    swarm = SimpleNamespace(peer_id=PEERS[3], _membership=SimpleNamespace(last_read=lambda kind: claims))
    assert [HivemindSwarm._is_gone(swarm, peer) for peer in PEERS[:5]] == [False, False, True, False, True]
    claims.clear()
    assert not HivemindSwarm._is_gone(swarm, PEERS[2]), "nothing is known"


def test_where_strangers_fail_one_attempt_after_the_other_the_voters_go_on_among_themselves():
    voters, strangers = sorted(PEERS[:3]), sorted(PEERS[3:5])
    last = last_body(voters)
    entry = {"round": last.round, "previous": last.digest, "tokens": 1, "slots": (), "tokens_per_second": 1.0}
    members = (Member(peer_id=peer, ready_at=0.0, sync_seconds=1.0, **entry) for peer in (*voters, *strangers))
    roster, failed = Roster(members, last), {"me": voters[0], "proposer": voters[1]}

    def left(lost: str, *, is_redone: bool) -> set[str]:
        return {peer.to_base58() for peer in Survivors.of(roster, lost=lost, is_redone=is_redone, **failed).peers}

    assert left(strangers[0], is_redone=False) == {*voters, strangers[1]}
    assert left(strangers[0], is_redone=True) == set(voters)
    assert left(voters[2], is_redone=True) == {*voters[:2], *strangers}, "a voter's death costs no other its work"


@pytest.mark.parametrize(
    ("num_voters", "num_known", "ends_in", "closes"),
    [
        (2, 0, 9.0, False),
        (3, 0, 9.0, True),
        (2, 0, 0.0, True),
        (3, 5, 9.0, False),
        (3, 3, 9.0, True),
        (3, 5, 0.0, True),
    ],
)
def test_a_full_group_is_closed_before_its_time_only_with_a_quorum(
    num_voters, num_known, ends_in, closes, matchmaking, monkeypatch
):
    """Strangers that came first filled it, or had the places of other voters."""
    closed = []

    async def assemble(self) -> None:
        closed.append(self)

    monkeypatch.setattr(Matchmaking, "leader_assemble_group", assemble)
    voters, strangers = ([PeerID.from_base58(peer) for peer in part] for part in (PEERS[:5], PEERS[5:10]))
    matchmaking.prepare(5, 3, None, last_body(PEERS[:5]), num_known)
    matchmaking.peer_id, *followers = [*voters[:num_voters], *strangers][:5]
    matchmaking.current_followers = dict.fromkeys(followers)
    matchmaking.step_control = SimpleNamespace(scheduled_time=get_dht_time() + ends_in)
    matchmaking.potential_leaders.declared_expiration_time = get_dht_time() + 9.0  # renewed as soon as it is up
    asyncio.run(matchmaking.leader_assemble_group())
    assert bool(closed) == closes


def test_a_leader_that_sends_no_message_of_ours_is_not_asked_again(matchmaking, monkeypatch):
    """Its bytes ended the whole search."""
    asked = []

    async def ask(self, leader) -> None:
        asked.append(leader)
        raise ExchangeError("sent 2 MiB")

    monkeypatch.setattr(Matchmaking, "_request_join_group", ask)
    matchmaking._liars, leader = {}, PeerID.from_base58(PEERS[0])
    assert [asyncio.run(matchmaking._request_join_group(leader)) for _ in range(2)] == [None, None]
    assert asked == [leader]


def test_a_ghost_is_no_swarm_that_a_survivor_waits_for():
    """One active claim kept the last peer of a run from going on for ever."""
    network = VirtualNetwork()
    survivor, ghost = (network.node(peer, "run") for peer in PEERS[:2])
    ghost.store(Claim(peer_id=PEERS[1], state="active", max_slots=1, since=0.0), 600.0)
    membership = Membership(survivor)
    waits = [membership.wait_for_live_peers(3, known, 60.0) for known in (None, {PEERS[0]}, {PEERS[1]})]
    assert waits == [True, False, True]
    network.close()


@pytest.mark.parametrize("waits_for", [[], [math.inf], [1e308], [8.0, 4.0]], ids=str)
def test_whoever_says_to_wait_for_long_keeps_nobody_from_looking_on(waits_for, monkeypatch):
    """`waits_for`: declared waiting times, in seconds from now; the real leader is declared a moment later."""
    me, leader, now = PeerID(b"me"), PeerID(b"another that leads"), get_dht_time()
    liars = [PeerID(b"one that lies, %d" % number) for number in range(len(waits_for))]
    monkeypatch.setattr("spes_p2p.swarm.averaging.matchmaking.owner_of", lambda peer: peer.to_base58())

    class Found(SimpleNamespace):
        looks = 0

        async def get(self, *_, **__):
            self.looks += 1
            await asyncio.sleep(0.01)
            until = {liar: now + seconds for liar, seconds in zip(liars, waits_for, strict=True)}
            until |= {leader: now + 2.5} if self.looks > 3 else {}
            return SimpleNamespace(value={peer: SimpleNamespace(value=time) for peer, time in until.items()})

        def store(self, **_): ...

    async def search() -> PeerID:
        leaders, dht = Leaders(me, 3.0, 4), Found(peer_id=me, subkey=b"")
        known = Declarations(dht, "run", "", 4)
        known.leaders = leaders
        step = SimpleNamespace(scheduled_time=now + 3.0, deadline=now + 10.0)
        async with leaders.begin_search(step, known):
            while True:
                try:
                    return await asyncio.wait_for(leaders.pop_next_leader(), 2.0)
                except TimeoutError:
                    assert dht.looks > 3, "it does not look any further"

    assert asyncio.run(search()) == leader
