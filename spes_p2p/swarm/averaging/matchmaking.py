"""Matchmaking: how members of a run form a group, through the DHT, or without it when they redo a round."""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
import time
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import msgpack
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.averaging.matchmaking import Matchmaking, MatchmakingException, PotentialLeaders
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.timed_storage import get_dht_time

from spes_p2p.errors import ExchangeError, RecordError
from spes_p2p.swarm.certificate import Body, max_strangers
from spes_p2p.swarm.hivemind_fixes.dht import SwarmDHT
from spes_p2p.swarm.invites import GuestList
from spes_p2p.swarm.names import SHARED
from spes_p2p.swarm.records import MAX_LIFETIME_SECONDS
from spes_p2p.swarm.roster import Member, Roster
from spes_p2p.swarm.validation import owner_of

log = logging.getLogger(__name__)

ASK_AGAIN_SECONDS = 0.1
LIAR_SECONDS = 600.0
"""Time for which a leader that has lied about its group is not followed."""
TIME_IS_UP = 0.25
"""Seconds before the end of a meeting from which on a leader closes its group with those that are there."""
MAX_ENTRY_BYTES = 2**16 + 2**10
"""Largest entry that a leader accepts from a follower: the longest roster entry, and hivemind's own fields."""
MAX_STRANGE_BYTES = 2**19
"""Bytes of all strangers' entries that a leader accepts: followers read no answer of more than a megabyte."""
MAX_GATHERED_BYTES = 2**17
"""Largest entry that is decoded of those that a leader has gathered."""


class Survivors(NamedTuple):
    """The members of a failed attempt that meet to redo it. They know each other, and need no DHT.

    Attributes:
        peers: Those that this peer has not lost.
        leaders: Those of them that the others can call, this peer perhaps included; each follows the ones before it.
    """

    peers: frozenset[PeerID]
    leaders: tuple[PeerID, ...]

    @classmethod
    def of(cls, roster: Roster, *, me: str, lost: str, proposer: str, is_redone: bool = False) -> Self:
        """Return those left of the members that average `shared`.

        Where strangers, one after the other, take no part in an attempt, the voters go on among themselves.

        Args:
            roster: Of the failed attempt.
            me: Id of this peer, which others may have lost.
            lost: Id of the peer to blame; empty if there is none.
            proposer: Id of the attempt's proposer; it leads last, because it may be dead.
            is_redone: Whether the failed attempt was one of survivors.
        """
        names = set(roster.groups[SHARED]) - ({lost} - {me})
        voters = roster.last.voters if roster.last is not None else ()
        if is_redone and lost and lost not in voters:  # guard: voters-redo
            names &= {me, *voters}
        left = {PeerID.from_base58(member.peer_id): member for member in roster if member.peer_id in names}
        able = (peer for peer, member in left.items() if not member.calls_only)
        order = sorted(able, key=lambda peer: (left[peer].peer_id == proposer, peer.to_bytes()))
        return cls(frozenset(left), tuple(order))

    def before(self, peer: PeerID, *, can_lead: bool) -> list[PeerID]:
        """Return the leaders that a peer follows: all others if it cannot lead itself."""
        is_leader = can_lead and peer in self.leaders
        first = self.leaders[: self.leaders.index(peer)] if is_leader else self.leaders
        return [leader for leader in first if leader != peer]


class Declarations(GroupKeyManager):
    """Declares until when this peer waits for others, and reads the same of them.

    In stock hivemind the declaration itself expires at that time, and a DHT keeps the record that expires later: after
    one plan to wait until noon, a peer could not be found before noon, not even to redo a failed round. Here the time
    is the declaration's value, and each declaration outlives the last.

    A DHT takes seconds to notice that one of its nodes is gone; nothing here waits for a store.
    """

    dht: SwarmDHT
    leaders: Leaders
    """The search that reads the declarations."""
    survivors: Survivors | None = None
    """Peers to meet when a round is redone."""
    _expires_at = 0.0

    async def declare_averager(
        self, group_key: str, peer_id: PeerID, expiration_time: float, looking_for_group: bool = True
    ) -> bool:
        if self.survivors is not None:
            return True
        lives_until = min(expiration_time, time.time() + MAX_LIFETIME_SECONDS)
        self._expires_at = max(lives_until, math.nextafter(self._expires_at, math.inf))
        self.dht.store(
            key=group_key,
            subkey=self.dht.subkey,
            value=expiration_time if looking_for_group else 0.0,
            expiration_time=self._expires_at,
            return_future=True,
        )
        return True

    async def get_averagers(self, group_key: str, only_active: bool) -> list[tuple[PeerID, float]]:
        if self.survivors is not None:
            return await self._survivors_to_follow()
        found = await self.dht.get(group_key, latest=True, return_future=True)
        if found is None or not isinstance(found.value, dict):
            return []
        waiting = {owner_of(subkey): item.value for subkey, item in found.value.items()}
        # A peer that waits for longer than this search lasts cannot lead it.
        until_when = self.leaders.search_end_time
        return [
            (PeerID.from_base58(peer), end)
            for peer, end in waiting.items()
            if time.time() < end <= until_when  # guard: long-wait
        ]

    async def _survivors_to_follow(self) -> list[tuple[PeerID, float]]:
        """Return the leaders that this peer follows, anew each time."""
        assert self.survivors is not None
        await asyncio.sleep(ASK_AGAIN_SECONDS)
        soon = time.time() + 3 * ASK_AGAIN_SECONDS
        leaders = self.survivors.before(self.peer_id, can_lead=not self.dht.client_mode)
        return [(peer, soon + 1e-6 * rank) for rank, peer in enumerate(leaders)]  # hivemind asks once under one time

    async def update_key_on_group_assembled(self, group_info: GroupInfo) -> None:
        """Keep the key: there is only one, and a group may be larger than a member expected."""

    async def update_key_on_not_enough_peers(self) -> None:
        """Keep the key."""


class Leaders(PotentialLeaders):
    """The peers that this one may follow, until its own time is up.

    In stock hivemind any declaration ends the time, even the first one of a search: a peer with a follower began with
    it as soon as half of the expected peers were there, and the third of three was left behind. Stock also stops
    looking once a peer has declared a long wait, so that one lie kept all others from each other.
    """

    seen_expiration = math.inf
    """End of this peer's waiting, as far as this search knows."""
    max_assured_time = property(lambda self: -math.inf, lambda self, time: None)  # guard: no-assured-time
    """Time before which, by the declarations seen, no unseen peer can lead; declarations assure nothing here."""

    def ask_again(self, leader: PeerID, answer_seconds: float) -> None:
        """Allow another request to a leader that has not accepted us, after half of the time in which it would answer.

        Stock asks each leader once: a leader that was busy for that second met the others without this peer. A request
        whose answer would come too late is not repeated, because this peer's own followers would wait for it.
        """
        if get_dht_time() + 1.5 * answer_seconds < self.declared_expiration_time:
            asked = {attempt for attempt in self.past_attempts if attempt[0] == leader}
            loop = asyncio.get_running_loop()
            loop.call_later(answer_seconds / 2, self.past_attempts.difference_update, asked)

    async def pop_next_leader(self) -> PeerID:
        while True:
            try:
                return await super().pop_next_leader()
            except TimeoutError:
                before, self.seen_expiration = self.seen_expiration, self.declared_expiration_time
                if math.isfinite(before):
                    raise


class SwarmMatchmaking(Matchmaking):
    """One peer's search for a group: all peers in the DHT, or those whose last attempt has just failed together."""

    group_key_manager: Declarations
    potential_leaders: Leaders
    _servicer_type: Any
    _last: Body | None = None
    _num_known = 0

    def __init__(self, p2p, schema_hash: bytes, dht, **kwargs) -> None:
        super().__init__(p2p, schema_hash, dht, **kwargs)
        self.potential_leaders = Leaders(self.peer_id, self.min_matchmaking_time, self.target_group_size)
        self.group_key_manager = Declarations(dht, self._prefix, "", self.target_group_size)
        self.group_key_manager.leaders = self.potential_leaders
        self._servicer_type = _PromptStubs(self._servicer_type, self.request_timeout)
        self._liars: dict[PeerID, float] = {}

    def prepare(
        self,
        target: int | None,
        least: int,
        survivors: Survivors | None,
        last: Body | None = None,
        num_known: int = 0,
    ) -> None:
        """Prepare the next search.

        Args:
            target: Size at which the group is complete.
            least: Its smallest size.
            survivors: The peers to redo a round with; None for all.
            last: Body of the last certificate.
            num_known: Voters and candidates among those that complete the group.
        """
        self._last = last
        if target is not None:
            if survivors is not None:
                target = len(survivors.peers)
            # A leader that was cut off sees few others, and would close a group that no quorum can certify.
            target = max(target, least)
        self.target_group_size = target
        self._num_known = min(num_known, target or 0) if survivors is None else 0
        self.min_group_size = least
        self.group_key_manager.target_group_size = target
        self.group_key_manager.survivors = survivors
        self.potential_leaders.seen_expiration = math.inf

    def get_request_expiration_time(self) -> float:
        if self.group_key_manager.survivors is not None:
            # The others may have failed a little later than we, so that their search began later.
            return self.potential_leaders.search_end_time
        return super().get_request_expiration_time()

    async def _request_join_group(self, leader: PeerID) -> GroupInfo | None:
        """Ask to join a leader's group; a leader that has lied about one is not asked for a while.

        Stock gives up the whole search for one lie: a liar that always leads first would end all averaging.
        """
        if self._liars.get(leader, 0.0) > time.monotonic():
            return None
        try:
            group = await super()._request_join_group(leader)
        except MatchmakingException as error:  # guard: lying-leader
            log.warning("looking for another group: %s", error)
            return None
        except ExchangeError as error:  # guard: unreadable-leader
            self._liars[leader] = time.monotonic() + LIAR_SECONDS
            log.warning("looking for another group: leader %s %s", leader, error)
            return None
        except OSError as error:  # its connection has ended
            log.info("looking for another group: lost the leader %s: %s", leader, error)
            return None
        if group is None:
            self.potential_leaders.ask_again(leader, self.request_timeout)
        return group

    async def follower_assemble_group(self, leader: PeerID, msg: averaging_pb2.MessageFromLeader) -> GroupInfo:
        try:
            check_snapshot(msg, leader, self.peer_id, self.step_control.data_for_gather)
        except MatchmakingException:
            self._liars[leader] = time.monotonic() + LIAR_SECONDS
            raise
        return await super().follower_assemble_group(leader, msg)

    async def leader_assemble_group(self) -> GroupInfo:
        """Close the group; before the time is up, only if strangers are there in no expected peer's place.

        The time is the step's: when a declared one is up, another has been declared already.
        """
        assert self.step_control is not None
        if self._last is not None and get_dht_time() < self.step_control.scheduled_time - TIME_IS_UP:
            met = {peer.to_base58() for peer in (self.peer_id, *self.current_followers)}
            quorum = min(self.min_group_size, len(self._last.voters))
            num_known = len(met & self._last.known)
            if len(met.intersection(self._last.voters)) < quorum or num_known < self._num_known:  # guard: voters-first
                return None  # type: ignore[return-value]  # who asks before the time is up does not look at it
        return await super().leader_assemble_group()

    def _check_reasons_to_reject(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> averaging_pb2.MessageFromLeader | None:
        survivors = self.group_key_manager.survivors
        if survivors is not None and context.remote_id not in survivors.peers:  # guard: survivors-only
            return averaging_pb2.MessageFromLeader(code=averaging_pb2.NOT_LOOKING_FOR_GROUP)
        if len(request.gather) > MAX_ENTRY_BYTES:  # guard: entry-size
            # The other members would have to take it from the leader.
            return averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
        reason = super()._check_reasons_to_reject(request, context)
        if self._last is None or (reason is not None and reason.code != averaging_pb2.GROUP_IS_FULL):
            return reason
        new = {peer.to_base58() for peer in (context.remote_id, *self.current_followers)} - self._last.known
        if context.remote_id.to_base58() not in new:  # guard: full-of-strangers
            return None  # a full group that is not closed lacks voters
        if self._last.round and len(new) > max_strangers(len(self._last.voters)):  # guard: strangers-join
            return averaging_pb2.MessageFromLeader(code=averaging_pb2.GROUP_IS_FULL)
        theirs = (other.gather for peer, other in self.current_followers.items() if peer.to_base58() in new)
        num_bytes = sum(map(len, theirs), len(request.gather))
        if self._last.round and num_bytes > MAX_STRANGE_BYTES:  # guard: strange-bytes
            return averaging_pb2.MessageFromLeader(code=averaging_pb2.GROUP_IS_FULL)
        return reason


def check_snapshot(msg: averaging_pb2.MessageFromLeader, leader: PeerID, me: PeerID, mine: bytes) -> None:
    """Compare a leader's description of its group with what a follower knows.

    Entries carry no signatures; each member checks its own, `mine`, so that a leader cannot change any. The bandwidths
    and modes that hivemind gathers beside them are not used.

    Raises:
        MatchmakingException: that cannot be the group.
    """
    peers = list(msg.ordered_peer_ids)
    if (  # guard: group-is-one
        len(peers) != len(msg.gathered) or len(set(peers)) != len(peers) or len(msg.group_id) != DHTID.HASH_NBYTES
    ):
        raise MatchmakingException(f"leader {leader} sent no group: {len(peers)} peers, {len(msg.gathered)} entries")
    if leader.to_bytes() not in peers:  # guard: leader-in-group
        raise MatchmakingException(f"leader {leader} is no member of its own group")
    if (  # guard: leader-edits-entry
        [entry for peer, entry in zip(peers, msg.gathered, strict=True) if peer == me.to_bytes()] != [mine]
    ):
        raise MatchmakingException(f"leader {leader} has changed this peer's entry, or left it out")


class _PromptStubs:
    """Replaces the servicer class in `Matchmaking`, which would wait for a frozen peer's stream forever."""

    def __init__(self, servicer, seconds: float) -> None:
        self._servicer = servicer
        self._seconds = seconds

    def get_stub(self, p2p, peer: PeerID, *, namespace: str | None) -> SimpleNamespace:
        stub = self._servicer.get_stub(p2p, peer, namespace=namespace)
        return SimpleNamespace(
            rpc_join_group=lambda request: asyncio.wait_for(stub.rpc_join_group(request), self._seconds)
        )


# ---------------------------------------------------------------------- what the matchmaking has gathered


def read_roster(group_info: GroupInfo, last: Body, guests: GuestList | None = None) -> tuple[Roster, dict[str, str]]:
    """Return the roster of a group, and why other peers that met are not on it; the same on all members.

    Args:
        group_info: Result of the matchmaking.
        last: Body of the last certificate.
        guests: Peers that may take part; None for all.
    """
    members: list[Member] = []
    refused: dict[str, str] = {}
    for peer, gathered in zip(group_info.peer_ids, group_info.gathered, strict=True):
        try:
            members.append(Member.decode(peer.to_base58(), _user_part(gathered)[1]))
        except (RecordError, ValueError, TypeError) as error:  # guard: unreadable-entry
            refused[peer.to_base58()] = str(error)
    roster = Roster(members, last)
    if guests is not None and roster:  # guard: closed-roster
        shown = {member.peer_id: member.invite for member in roster}
        ever_invited = roster.without(guests.refusals(shown, now=0.0))
        # The members' clocks, not this peer's own: all members must agree which invite has expired.
        now = statistics.median([member.ready_at for member in ever_invited] or [0.0])  # guard: invite-clock
        uninvited = guests.refusals(shown, now)
        roster = roster.without(uninvited)
        refused |= uninvited
    return roster, refused


def expected_of(gathered: bytes) -> int | None:
    """Return the number of peers that this peer expects to meet, from what it gives the matchmaking."""
    expected = _user_part(gathered)[0]
    return expected if isinstance(expected, int) and expected >= 2 else None


def _user_part(gathered: bytes) -> list[Any]:
    """Return [expected, roster entry] from what hivemind gathered, decoded without msgpack's extension types."""
    if len(gathered) > MAX_GATHERED_BYTES:
        raise ValueError("roster entry is too large")
    try:
        _bandwidth, _mode, user = msgpack.unpackb(gathered, raw=False)
        part = msgpack.unpackb(user, raw=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"roster entry is malformed: {error}") from error
    if not isinstance(part, list) or len(part) != 2:
        raise ValueError("roster entry is not a pair")
    return part
