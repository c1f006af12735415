"""What one member does in one group: reduce it, confirm it with the others, or say why not."""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgpack
import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import P2PContext
from hivemind.p2p.servicer import StubBase
from hivemind.proto import averaging_pb2, runtime_pb2
from torch import Tensor

from spes_p2p.codecs import to_bytes
from spes_p2p.errors import ExchangeError, RecordError
from spes_p2p.swarm.averaging.audit import Evidence
from spes_p2p.swarm.averaging.buffers import Buffers
from spes_p2p.swarm.averaging.partition import GroupPlan, Message, decode_message, reduce_message
from spes_p2p.swarm.clock import AdaptiveTimeout
from spes_p2p.swarm.invites import GuestList
from spes_p2p.swarm.p2p.rate_limit import RateLimit
from spes_p2p.swarm.roster import SHARED, Member

Stream = AsyncIterator[averaging_pb2.AveragingData]
OpenStream = Callable[[str, Stream], Awaitable[Stream]]

LANES, STREAMS = 4, 12
"""Most streams over which a member sends one reducer its parts, and about as many as it sends over in all.
A stream begins with a narrow window, which widens by round trips: a few alone leave a fast link idle for most of a
slice, and many cost processor time."""
REPLY_PATIENCE = 2.0
"""A reducer is given so much more time than a sender: it waits for senders itself, and should be the one to tell."""


class ButterflyAllreduce:
    """One member's part in a group's all-reduce.

    Args:
        plan: Who reduces what.
        me: This member.
        group_id: Names the group in messages.
        source: This member's encoded vector, uint8; left as it is.
        result: Takes the encoded mean, uint8.
        error: What earlier rounds have left over of the whole delta, fp32; None where the format is exact.
        new_error: Takes what this round leaves over of this member's slice.
        patience: How long a sender may be silent; learns from this group.
        pace: Of what this member sends.
        open_stream: Calls a member's `rpc_aggregate_part`.
    """

    def __init__(
        self,
        plan: GroupPlan,
        me: str,
        *,
        group_id: bytes,
        source: Tensor,
        result: Tensor,
        error: Tensor | None,
        new_error: Tensor | None,
        patience: AdaptiveTimeout,
        pace: RateLimit,
        open_stream: OpenStream,
    ) -> None:
        self._plan, self._me, self._group_id = plan, plan.peers.index(me), group_id
        self._source, self._result, self._error, self._new_error = source, result, error, new_error
        self._patience, self._pace, self._open_stream = patience, pace, open_stream
        self._mine = plan.slices[self._me]
        self._num_lanes = num_lanes(plan, self._me)
        self.auditor = plan.auditor(me)
        self._inbox: list[dict[int, Tensor | None]] = [{} for _ in self._mine]
        loop = asyncio.get_running_loop()
        self._reduced: list[asyncio.Future[bytes]] = [loop.create_future() for _ in self._mine]
        self._streams: dict[tuple[str, int], asyncio.Future[Stream]] = {
            (peer, lane): loop.create_future() for peer in plan.peers for lane in range(self._num_lanes)
        }
        self._failed: asyncio.Future[None] = loop.create_future()
        self._longest_gap = 0.0
        self.lost = ""

    async def run(self) -> None:
        """Fill the result.

        Raises:
            AllreduceException: a member was lost, or lied; `lost` names it.
        """
        others = [index for index in range(len(self._plan.peers)) if index != self._me]
        senders = [i for i in others if self._plan.weights[i] > 0]
        work = [(i, self._receive_parts(i, lane)) for i in senders for lane in range(self._num_lanes)]
        work += [(i, self._exchange(i, lane)) for i in others for lane in range(num_lanes(self._plan, i))]
        tasks = [asyncio.create_task(self._blaming(index, part)) for index, part in work]
        everything = asyncio.gather(*tasks, *self._reduced)
        try:
            if self._plan.weights[self._me] > 0:
                for number, message in enumerate(self._mine):
                    self._accept(number, self._me, self._bytes_of(message))
            await asyncio.wait([everything, self._failed], return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
            if self._failed.done():
                self._failed.result()
            await everything
            for peer, seen in self.auditor.liars().items():  # guard: lying-mean
                self.lost = peer
                raise AllreduceException(f"lost {peer}: {seen.reason}")
        finally:
            everything.cancel()
            await asyncio.gather(everything, return_exceptions=True)
            self._failed.cancel()
        if self._longest_gap:
            self._patience.observe(self._longest_gap)

    async def _blaming(self, index: int, work: Awaitable[None]) -> None:
        """Do what depends on one member; name it if that fails."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except TimeoutError:
            self.fail(self._plan.peers[index], "silent for too long")
        except Exception as error:  # noqa: BLE001 - of any type: whatever stopped it, this member is to blame
            self.fail(self._plan.peers[index], f"{type(error).__name__}: {error}")

    def fail(self, peer: str, reason: str) -> None:
        """End the group, because of a member or of nobody (""); the first to be named stays the one."""
        if self._failed.done():
            return
        self.lost = peer
        self._failed.set_exception(AllreduceException(f"lost {peer}: {reason}" if peer else reason))
        for future in self._reduced:
            if not future.done():
                future.cancel()

    # ------------------------------------------------------------------ sending, and taking means

    async def _exchange(self, index: int, lane: int) -> None:
        """Send a reducer a lane of its parts of our vector and take their means; hang up once we have them all."""
        messages = self._plan.slices[index][lane :: num_lanes(self._plan, index)]
        peer = self._plan.peers[index]
        stream = await asyncio.wait_for(self._open_stream(peer, self._outgoing(messages, lane)), self._patience.seconds)
        try:
            for message in messages:
                wait = REPLY_PATIENCE * self._patience.seconds
                answer = await asyncio.wait_for(anext(stream), wait)
                if answer.code == averaging_pb2.CANCELLED:
                    blamed = [member for member in self._plan.peers if member.encode() == answer.peer_id]
                    self.fail(blamed[0] if blamed else "", f"{peer} gave up")
                    return
                if answer.code != averaging_pb2.AVERAGED_PART:
                    raise AllreduceException(f"answered {averaging_pb2.MessageCode.Name(answer.code)}")
                self._take_mean(index, message, answer.tensor_part.buffer)
        except StopAsyncIteration as error:
            raise AllreduceException("hung up before it had sent all means") from error
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    async def _outgoing(self, messages: list[Message], lane: int) -> Stream:
        greeting = averaging_pb2.PART_FOR_AVERAGING
        yield averaging_pb2.AveragingData(code=greeting, group_id=self._group_id, weight=float(lane))
        if self._plan.weights[self._me] > 0:
            for message in messages:
                data = self._bytes_of(message).numpy().tobytes()
                await self._pace.take(len(data))
                yield averaging_pb2.AveragingData(tensor_part=runtime_pb2.Tensor(buffer=data))

    def _bytes_of(self, message: Message) -> Tensor:
        return self._source[message[0].byte_start : message[-1].byte_stop]

    def _take_mean(self, index: int, message: Message, data: bytes) -> None:
        try:
            mean_N = decode_message(self._plan.format, message, _tensor(data))
        except ExchangeError as error:
            self.auditor.record_proof(index, f"sent a mean that is none: {error}")
            raise
        self._result[message[0].byte_start : message[-1].byte_stop] = _tensor(data)
        self.auditor.observe_mean(index, message, mean_N, self._source)

    # ------------------------------------------------------------------ reducing

    async def rpc_aggregate_part(self, stream: Stream, context: P2PContext, lane: float) -> Stream:
        """Take a lane of a member's parts of our slice and send it their means.

        The member hangs up: a stream that its server closes first may lose its tail on the way.
        """
        awaited = self._streams.get((context.remote_id.to_base58(), lane))  # type: ignore[arg-type]
        if awaited is None or awaited.done():
            yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        awaited.set_result(stream)
        for future in self._reduced[int(lane) :: self._num_lanes]:
            await asyncio.wait({future})
            if future.cancelled():
                yield averaging_pb2.AveragingData(code=averaging_pb2.CANCELLED, peer_id=self.lost.encode())
                break
            mean = runtime_pb2.Tensor(buffer=future.result())
            await self._pace.take(len(mean.buffer))
            yield averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=mean)
        await asyncio.sleep(REPLY_PATIENCE * self._patience.seconds)

    async def _receive_parts(self, index: int, lane: int) -> None:
        opened = self._streams[self._plan.peers[index], lane]
        stream = await asyncio.wait_for(asyncio.shield(opened), self._patience.seconds)
        for number in range(lane, len(self._mine), self._num_lanes):
            began = time.monotonic()
            try:
                sent = await asyncio.wait_for(anext(stream), self._patience.seconds)
            except StopAsyncIteration as error:
                if self._plan.slices[index]:
                    # It may have given up; if so, it tells because of whom where we ask it for means.
                    await asyncio.wait({self._failed}, timeout=self._patience.seconds)
                raise AllreduceException(f"hung up before message {number} of {len(self._mine)}") from error
            self._longest_gap = max(self._longest_gap, time.monotonic() - began)
            self._accept(number, index, _tensor(sent.tensor_part.buffer))

    def _accept(self, number: int, index: int, data: Tensor) -> None:
        """Take a sender's message; send everybody the mean once all have come."""
        message, inbox = self._mine[number], self._inbox[number]
        try:
            inbox[index] = decode_message(self._plan.format, message, data)
        except ExchangeError as error:
            self.auditor.record_proof(index, f"sent what is no delta: {error}")
            if not self.auditor.can_tell_outliers:  # guard: unreadable-part
                raise
            inbox[index] = None
        senders = [i for i, weight in enumerate(self._plan.weights) if weight > 0]
        if len(inbox) < len(senders):
            return
        span = slice(*(min(edge, self._plan.delta_numel) for edge in (message[0].start, message[-1].stop)))
        kept = self._error[span] if self._error is not None and span.start < span.stop else None
        decoded, weights = [inbox[i] for i in senders], [self._plan.weights[i] for i in senders]
        inbox.clear()
        try:
            encoded, left = reduce_message(self._plan.format, message, decoded, weights, kept, self.auditor)
        except ValueError as error:  # every contribution is finite, their sum is not
            self.fail("", f"the mean cannot be sent: {error}")
            return
        if left is not None:
            assert self._new_error is not None
            self._new_error[span] = left
        self._result[message[0].byte_start : message[-1].byte_stop] = encoded
        if not self._reduced[number].done():
            self._reduced[number].set_result(encoded.numpy().tobytes())


def num_lanes(plan: GroupPlan, reducer: int) -> int:
    """Return over how many streams each other member sends a reducer its parts."""
    return min(LANES, -(-STREAMS // (len(plan.peers) - 1)), len(plan.slices[reducer]))


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


MAX_ENTRY_BYTES = 2**17
CONFIRMED = b"confirmed"
"""Asks a member not for its result, but whether it knows that everybody has it."""
DIGEST_BYTES = 32
Answers = Mapping[str, bytes | BaseException]
"""Of members: the digests of their results, nothing where they failed, or why they did not answer."""


class GroupAllreduce:
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
        self.reduction: asyncio.Future[ButterflyAllreduce] = asyncio.get_running_loop().create_future()
        self._me, self._gid, self._ask = me, gid, ask
        self._digest: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._is_confirmed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def run(self, buffers: Buffers, patience: AdaptiveTimeout, silence: AdaptiveTimeout, pace: RateLimit) -> str:
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

    async def _average(
        self, buffers: Buffers, size: int, patience: AdaptiveTimeout, silence: AdaptiveTimeout, pace: RateLimit
    ) -> None:
        reduction = ButterflyAllreduce(
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
            self.lost, self.evidence = reduction.lost, reduction.auditor.evidence()
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

    async def _is_confirmed_by_any(self, mine: bytes, theirs: Answers, silence: AdaptiveTimeout) -> bool:
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

    async def _ask_all(self, peers: Sequence[str], silence: AdaptiveTimeout, question: bytes = b"") -> Answers:
        """Return what each member answers: the digests of its result, or nothing; or why there is no answer."""
        calls = (self._call(peer, silence, question) for peer in peers)
        return dict(zip(peers, await asyncio.gather(*calls, return_exceptions=True), strict=True))

    async def _call(self, peer: str, silence: AdaptiveTimeout, question: bytes = b"") -> bytes:
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
