"""How members of a run find each other in the DHT when a round is due, and without it when they redo one."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.averaging.matchmaking import Matchmaking, MatchmakingException, PotentialLeaders
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.servicer import StubBase
from hivemind.proto import averaging_pb2
from hivemind.utils.timed_storage import get_dht_time

from spes_p2p.swarm.hivemind_fixes.dht import SwarmDHT
from spes_p2p.swarm.records import MAX_LIFETIME_SECONDS
from spes_p2p.swarm.validation import owner_of

log = logging.getLogger(__name__)

ASK_AGAIN_SECONDS = 0.1
LIAR_SECONDS = 600.0
"""For so long nobody follows a leader that has lied about its group."""
MAX_ENTRY_BYTES = 2**16 + 2**10
"""Of what a peer gives the matchmaking: a roster entry of the greatest length, and hivemind's own."""


class Declarations(GroupKeyManager):
    """Declares until when this peer waits for others, and reads the same of them.

    Stock lets the declaration itself expire at that time, and a DHT keeps whichever of two records expires later:
    who once planned to wait until noon could be found by nobody before noon, not even to redo a failed round. Here
    the time is the declaration's value, and each declaration outlives the last.

    A DHT takes seconds to notice that one of its nodes is gone, and nothing here waits for what it stores.
    """

    dht: SwarmDHT
    leaders: Leaders
    """Of the search that this one reads for."""
    survivors: Sequence[PeerID] | None = None
    """Whom to meet where a round is redone: they know each other, and need no DHT."""
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
        # Whoever waits for longer than this search lasts can be followed by nobody in it.
        until_when = self.leaders.search_end_time
        return [
            (PeerID.from_base58(peer), end)
            for peer, end in waiting.items()
            if time.time() < end <= until_when  # guard: long-wait
        ]

    async def _survivors_to_follow(self) -> list[tuple[PeerID, float]]:
        """Return the survivors with lesser ids, again and again: whoever has the least of all leads."""
        assert self.survivors is not None
        await asyncio.sleep(ASK_AGAIN_SECONDS)
        me, soon = self.peer_id.to_bytes(), time.time() + 3 * ASK_AGAIN_SECONDS
        lesser = sorted(peer.to_bytes() for peer in self.survivors if peer.to_bytes() < me)
        # Whom it has asked once under the same time, hivemind does not ask again.
        return [(PeerID(peer), soon + 1e-6 * rank) for rank, peer in enumerate(lesser)]

    async def update_key_on_group_assembled(self, group_info: GroupInfo) -> None:
        """Meet under the same key next time: there is one, and a group may be larger than a member expected."""

    async def update_key_on_not_enough_peers(self) -> None:
        """Meet under the same key next time."""


class Leaders(PotentialLeaders):
    """Whom a peer may follow, until its own time is up.

    Stock takes any declaration for a time that is up, the first of a search too: whoever had a follower by then began
    with that one alone, as soon as half of those expected were there, and the third of three was left behind. It also
    looks no further once somebody has said to wait for long: one who lies about that kept all others from each other.
    """

    heeded = math.inf
    """Until when this peer waits, as far as this search knows."""
    max_assured_time = property(lambda self: -math.inf, lambda self, time: None)  # guard: no-assured-time
    """Until when nobody unseen can lead, by the declarations seen: they assure of nothing."""

    def ask_again(self, leader: PeerID, answer_seconds: float) -> None:
        """Ask a leader once more that has not taken us, after half of the time in which it would have answered.

        Stock asks each of them once: a leader busy for that second met the others without whoever had asked in it. Who
        asks too late for an answer in time would keep its own followers waiting.
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
                before, self.heeded = self.heeded, self.declared_expiration_time
                if math.isfinite(before):
                    raise


class SwarmMatchmaking(Matchmaking):
    """One peer's search for a group: of everybody in the DHT, or of those who have just failed together."""

    group_key_manager: Declarations
    potential_leaders: Leaders
    _servicer_type: Any

    def __init__(self, p2p, schema_hash: bytes, dht, **kwargs) -> None:
        super().__init__(p2p, schema_hash, dht, **kwargs)
        self.potential_leaders = Leaders(self.peer_id, self.min_matchmaking_time, self.target_group_size)
        self.group_key_manager = Declarations(dht, self._prefix, "", self.target_group_size)
        self.group_key_manager.leaders = self.potential_leaders
        self._servicer_type = _PromptStubs(self._servicer_type, self.request_timeout)
        self._liars: dict[PeerID, float] = {}

    def prepare(self, target: int | None, least: int, survivors: Sequence[PeerID] | None) -> None:
        """Set the size at which the next group stands at once, and the least; `survivors` to redo a round with them."""
        self.target_group_size, self.min_group_size = target, least
        self.group_key_manager.target_group_size = target
        self.group_key_manager.survivors = survivors
        self.potential_leaders.heeded = math.inf

    def get_request_expiration_time(self) -> float:
        if self.group_key_manager.survivors is not None:
            # Others may have failed a little later than we, so their search for a group began later.
            return self.potential_leaders.search_end_time
        return super().get_request_expiration_time()

    async def _request_join_group(self, leader: PeerID) -> GroupInfo | None:
        """Ask to join a leader's group; one that has lied about a group is not asked for a while.

        Stock gives up the whole search for one lie: who always leads first would end all averaging.
        """
        if self._liars.get(leader, 0.0) > time.monotonic():
            return None
        try:
            group = await super()._request_join_group(leader)
        except MatchmakingException as error:  # guard: lying-leader
            log.warning("looking for another group: %s", error)
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

    def _check_reasons_to_reject(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> averaging_pb2.MessageFromLeader | None:
        survivors = self.group_key_manager.survivors
        if survivors is not None and context.remote_id not in survivors:  # guard: survivors-only
            return averaging_pb2.MessageFromLeader(code=averaging_pb2.NOT_LOOKING_FOR_GROUP)
        if len(request.gather) > MAX_ENTRY_BYTES:  # guard: entry-size
            # The others would have to take it from the leader.
            return averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
        return super()._check_reasons_to_reject(request, context)


def check_snapshot(msg: averaging_pb2.MessageFromLeader, leader: PeerID, me: PeerID, mine: bytes) -> None:
    """Compare what a leader says of a group with what its follower knows.

    Entries carry no signatures: that everybody looks for its own keeps a leader from changing them. Bandwidths and
    modes, which hivemind gathers beside them, are used by nobody here.

    Args:
        msg: From the leader.
        leader: Who it is.
        me: The follower.
        mine: What it has sent.

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
    """Stands in for a servicer class in `Matchmaking`, which would wait for a frozen peer's stream for ever."""

    def __init__(self, servicer, seconds: float) -> None:
        self._servicer, self._seconds = servicer, seconds

    def get_stub(self, p2p, peer: PeerID, *, namespace: str | None) -> _PromptStub:
        return _PromptStub(self._servicer.get_stub(p2p, peer, namespace=namespace), self._seconds)


class _PromptStub:
    def __init__(self, stub: StubBase, seconds: float) -> None:
        self._stub, self._seconds = stub, seconds

    async def rpc_join_group(self, request: averaging_pb2.JoinRequest):
        return await asyncio.wait_for(self._stub.rpc_join_group(request), self._seconds)
