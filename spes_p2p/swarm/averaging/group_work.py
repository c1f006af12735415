"""What one member does in one group: reduce it, confirm it with the others, or say why not."""

from __future__ import annotations

import asyncio
import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p.servicer import StubBase
from hivemind.proto import runtime_pb2
from torch import Tensor

from spes_p2p.codecs import to_bytes
from spes_p2p.errors import RecordError
from spes_p2p.swarm.averaging.buffers import Buffers
from spes_p2p.swarm.averaging.reduce import GroupPlan
from spes_p2p.swarm.averaging.reduction import Reduction
from spes_p2p.swarm.averaging.witness import Evidence
from spes_p2p.swarm.clock import Patience
from spes_p2p.swarm.invites import GuestList
from spes_p2p.swarm.pacing import Pace
from spes_p2p.swarm.roster import SHARED, Member

MAX_ENTRY_BYTES = 2**17
CONFIRMED = b"confirmed"
"""Asks a member not for its result, but whether it knows that everybody has it."""
DIGEST_BYTES = 32
Answers = Mapping[str, bytes | BaseException]
"""Of members: the digests of their results, nothing where they failed, or why they did not answer."""


class GroupWork:
    """One group of a roster, as one of its members works on it, or as somebody else knows of it.

    Args:
        plan: Who reduces what.
        me: This peer.
        gid: The group's id.
        ask: Returns a stub to call a peer with.
    """

    def __init__(self, plan: GroupPlan, me: str, gid: bytes, ask: Callable[[str], StubBase]) -> None:
        self.plan, self.lost = plan, ""
        self.evidence: Mapping[str, Evidence] = {}
        self.reduction: asyncio.Future[Reduction] = asyncio.get_running_loop().create_future()
        self._me, self._gid, self._ask = me, gid, ask
        self._digest: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._is_confirmed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def run(self, buffers: Buffers, patience: Patience, silence: Patience, pace: Pace) -> str:
        """Average into the buffers' result; return why that failed, or "" once all members have confirmed it."""
        try:
            if not sum(self.plan.weights):
                return "nobody trained"
            size = self.plan.format.num_bytes
            if len(self.plan.peers) == 1:
                buffers.result[:size] = buffers.source[:size]
                return ""
            await self._average(buffers, size, patience, silence, pace)  # guard: confirmation-time
        except (AllreduceException, OSError, ValueError) as error:
            return str(error) or repr(error)  # an empty reason would be success
        finally:
            self.close()
        return ""

    async def _average(self, buffers: Buffers, size: int, patience: Patience, silence: Patience, pace: Pace) -> None:
        reduction = Reduction(
            self.plan,
            self._me,
            group_id=self._gid,
            source=buffers.source[:size],
            result=buffers.result[:size],
            error=buffers.error if self.plan.delta_numel else None,
            new_error=buffers.new_error,
            patience=silence,
            pace=pace,
            open_stream=lambda peer, stream: self._ask(peer).rpc_aggregate_part(stream),
        )
        self.reduction.set_result(reduction)
        try:
            # Not the confirmations, which end by themselves: whoever gave them up together with the rest of its time
            # would not learn that somebody has committed.
            await asyncio.wait_for(reduction.run(), patience.seconds)
        except TimeoutError as error:
            raise AllreduceException(f"not done within {patience.seconds:.1f} s") from error
        finally:
            self.lost, self.evidence = reduction.lost, reduction.witness.evidence()
        mine = await asyncio.to_thread(digests, self.plan, buffers.result[:size])
        self._digest.set_result(mine)
        # Two who cannot call each other both ask those whom everybody can.
        plan = self.plan
        others = [p for p in plan.peers if p != self._me and (p in plan.called or self._me in plan.called)]
        theirs = await self._ask_all(others, silence)
        try:
            self._confirm(mine, theirs)
        except AllreduceException:
            self._is_confirmed.set_result(False)
            if not await self._is_confirmed_by_any(mine, theirs, silence):  # guard: committed-by-one
                raise
            self.lost = ""
        else:
            self._is_confirmed.set_result(True)

    def _confirm(self, mine: bytes, theirs: Answers) -> None:
        """Demand that all others have this result, and name who is to blame if they have not."""
        for peer, answer in theirs.items():
            if not isinstance(answer, bytes):
                self.lost = peer
                raise AllreduceException(f"lost {peer}: it did not confirm: {answer!r}") from answer
        there = {peer: answer for peer, answer in theirs.items() if isinstance(answer, bytes) and answer}
        different = {peer: answer for peer, answer in there.items() if answer != mine}
        if different:  # guard: unconfirmed-mean
            # One among many is to blame; if several differ, a reducer has told each something else.
            self.lost = (
                next(iter(different))
                if len(different) == 1
                else self._two_faced(mine, different)  # guard: two-faced-reducer
            )
            raise AllreduceException(f"{' and '.join(different)} did not confirm the same digest")
        if gave_up := [peer for peer in theirs if peer not in there]:
            # Among those who have the same result it is the one to do without, whatever stopped it.
            self.lost = gave_up[0] if len(gave_up) == 1 < len(there) else ""  # guard: only-quitter
            raise AllreduceException(f"{' and '.join(gave_up)} gave up")

    def _two_faced(self, mine: bytes, different: Mapping[str, bytes]) -> str:
        """Return the reducer in whose slice alone the others' results differ from ours; whatever it says itself."""
        for place, peer in enumerate(self.plan.peers):
            rest = [theirs for other, theirs in different.items() if other != peer]
            if peer != self._me and rest and all(differing(mine, theirs) == {place} for theirs in rest):
                self.evidence = {**self.evidence, peer: Evidence("it has sent others different means", False)}
                return peer
        return ""

    async def _is_confirmed_by_any(self, mine: bytes, theirs: Answers, silence: Patience) -> bool:
        """Tell whether somebody has heard of everybody that they have this result, and so has committed it.

        Who then does not would make another of this round with those who have not heard it either. Nobody knows that
        who has another result, or none.
        """
        able = [
            peer
            for peer, answer in theirs.items()
            if answer == mine or not isinstance(answer, bytes)  # guard: no-result-confirms
        ]
        answers = await self._ask_all([peer for peer in able if peer != self.lost], silence, CONFIRMED)
        return mine in answers.values()

    async def _ask_all(self, peers: Sequence[str], silence: Patience, question: bytes = b"") -> Answers:
        """Return what each member answers: the digests of its result, or nothing; or why there is no answer."""
        calls = (self._call(peer, silence, question) for peer in peers)
        return dict(zip(peers, await asyncio.gather(*calls, return_exceptions=True), strict=True))

    async def _call(self, peer: str, silence: Patience, question: bytes = b"") -> bytes:
        request = runtime_pb2.ExpertRequest(uid=self._gid.hex(), metadata=question)
        return (await self._ask(peer).rpc_confirm(request, timeout=2 * silence.seconds)).metadata

    async def answer(self, question: bytes, timeout: float) -> bytes:
        """Return the digests of this member's result once there is one; empty if it failed.

        Args:
            question: If `CONFIRMED`, whether all others have told this member that they have it, too; empty if not.
            timeout: Seconds to wait for it.

        Raises:
            TimeoutError: neither within that time.
        """
        if question == CONFIRMED and not await asyncio.wait_for(asyncio.shield(self._is_confirmed), timeout):
            return b""
        return await asyncio.wait_for(asyncio.shield(self._digest), timeout)

    def close(self) -> None:
        """Tell whoever waits for this member's result that there will be none."""
        if not self._digest.done():
            self._digest.set_result(b"")
        if not self._is_confirmed.done():
            self._is_confirmed.set_result(False)
        self.reduction.cancel()


def digests(plan: GroupPlan, result: Tensor) -> bytes:
    """Return the SHA-256 of what each reducer has made of a result (uint8), one after the other."""
    hashes = [hashlib.sha256() for _ in plan.peers]
    for place, messages in enumerate(plan.slices):
        for message in messages:
            hashes[place].update(to_bytes(result[message[0].byte_start : message[-1].byte_stop]))
    return b"".join(each.digest() for each in hashes)


def differing(mine: bytes, theirs: bytes) -> set[int]:
    """Return the places of the reducers in whose slices two results differ, by their digests; -1 if one is none."""
    if len(mine) != len(theirs):
        return {-1}
    starts = range(0, len(mine), DIGEST_BYTES)
    return {at // DIGEST_BYTES for at in starts if mine[at : at + DIGEST_BYTES] != theirs[at : at + DIGEST_BYTES]}


async def finish_all(running: Mapping[str, asyncio.Task[str]]) -> dict[str, str]:
    """Return each group's reason of failure; once `shared` has failed, wait for no other.

    Nothing counts without `shared`, and whoever lingers in a slot's group misses the others' second attempt.
    """
    try:
        if SHARED in running and await running[SHARED]:
            for task in running.values():
                task.cancel()
        if running:
            await asyncio.wait(running.values())
    finally:
        for task in running.values():
            task.cancel()
    return {name: "shared was dropped" if task.cancelled() else task.result() for name, task in running.items()}


# ---------------------------------------------------------------------- what the matchmaking gathered


def read_roster(group_info: GroupInfo, guests: GuestList | None = None) -> tuple[list[Member], dict[str, str]]:
    """Return a group's roster, and why others who met are not on it; the same on all members.

    Args:
        group_info: What the matchmaking gathered.
        guests: Who may take part; None for everybody.
    """
    roster: list[Member] = []
    refused: dict[str, str] = {}
    for peer, gathered in zip(group_info.peer_ids, group_info.gathered, strict=True):
        try:
            roster.append(Member.decode(peer.to_base58(), _user_part(gathered)[1]))
        except (RecordError, ValueError, TypeError) as error:  # guard: unreadable-entry
            refused[peer.to_base58()] = str(error)
    if guests is not None and roster:  # guard: closed-roster
        shown = {member.peer_id: member.invite for member in roster}
        ever_invited = [member for member in roster if member.peer_id not in guests.refusals(shown, now=0.0)]
        # Of those, nobody's own clock: all must agree who is late.
        now = statistics.median([member.ready_at for member in ever_invited] or [0.0])  # guard: invite-clock
        strangers = guests.refusals(shown, now)
        roster = [member for member in roster if member.peer_id not in strangers]
        refused |= strangers
    return roster, refused


def group_id(group_info: GroupInfo, name: str) -> bytes:
    """Return by what members call a group that follows from a roster."""
    return group_info.group_id + name.encode()


def expected_of(gathered: bytes) -> int | None:
    """Return how many peers this one expects to meet, of what it gives the matchmaking."""
    expected = _user_part(gathered)[0]
    return expected if isinstance(expected, int) and expected >= 2 else None


def _user_part(gathered: bytes) -> list[Any]:
    """Return [expected, roster entry] from what hivemind gathered, decoded without msgpack's extension types."""
    if len(gathered) > MAX_ENTRY_BYTES:
        raise ValueError("roster entry is too large")
    try:
        _bandwidth, _mode, user = msgpack.unpackb(gathered, raw=False)
        part = msgpack.unpackb(user, raw=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"roster entry is malformed: {error}") from error
    if not isinstance(part, list) or len(part) != 2:
        raise ValueError("roster entry is not a pair")
    return part
