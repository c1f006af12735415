"""One member's work in one group: the all-reduce of its vector, and the confirmation that all have one result."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import P2PContext
from hivemind.p2p.servicer import StubBase
from hivemind.proto import averaging_pb2, runtime_pb2
from torch import Tensor

from spes_p2p.codecs.vectors import to_bytes
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.averaging.audit import Auditor, Evidence
from spes_p2p.swarm.averaging.buffers import Buffers
from spes_p2p.swarm.averaging.partition import (
    GroupPlan,
    Message,
    bytes_of,
    decode_message,
    num_lanes,
    reduce_message,
)
from spes_p2p.swarm.clock import AdaptiveTimeout
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.p2p.rate_limit import RateLimit

Stream = AsyncIterator[averaging_pb2.AveragingData]
OpenStream = Callable[[str, Stream], Awaitable[Stream]]

REPLY_TIMES = 2.0
"""A reducer may be silent this many times as long as a sender, because it waits for senders itself."""


class Limits(NamedTuple):
    """Timeouts and upload rate of a peer's groups in one attempt.

    Attributes:
        attempt: Duration of a group's all-reduce, confirmations not included.
        silence: Time for which a member may be silent.
        upload: Upload rate of this peer.
        learns: Whether the timeouts learn from it; not from an attempt that is redone without the slow.
    """

    attempt: AdaptiveTimeout
    silence: AdaptiveTimeout
    upload: RateLimit
    learns: bool = True


class ButterflyAllreduce:
    """One member's part in a group's butterfly all-reduce, in which each member reduces a slice.

    Args:
        plan: The group's partition.
        me: This member.
        group_id: Name of the group in messages.
        buffers: `source` is sent and `result` takes the mean, both in the plan's format; rounding the mean of this
            member's slice adds `residual` and leaves `new_residual`.
        limits: Timeouts and upload rate; the silence timeout learns from this group.
        open_stream: Calls a member's `rpc_aggregate_part`.

    Attributes:
        auditor: This member's audit of the others.
        lost: The member that made the group fail; empty if none is known.
        was_silent: Whether a member was silent for too long.
    """

    def __init__(
        self, plan: GroupPlan, me: str, group_id: bytes, buffers: Buffers, limits: Limits, open_stream: OpenStream
    ) -> None:
        self._plan = plan
        self._me = plan.peers.index(me)
        self._group_id = group_id
        self._buffers = buffers
        self._silence = limits.silence
        self._patience = limits.attempt.seconds if me in plan.replicas else REPLY_TIMES * limits.silence.seconds
        self._learns = limits.learns
        self.was_silent = False
        self._upload = limits.upload
        self._open_stream = open_stream
        self._mine = plan.slices[self._me]
        self._num_lanes = num_lanes(plan, self._me)
        self._inbox: list[dict[int, Tensor | None]] = [{} for _ in self._mine]
        loop = asyncio.get_running_loop()
        self._reduced: list[asyncio.Future[bytes]] = [loop.create_future() for _ in self._mine]
        self._streams: dict[tuple[str, int], asyncio.Future[Stream]] = {
            (peer, lane): loop.create_future() for peer in plan.peers for lane in range(self._num_lanes)
        }
        self._failed: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._longest_gap = 0.0
        self.auditor = Auditor(plan, me)
        self.lost = ""

    async def run(self) -> None:
        """Fill the buffers' result.

        Raises:
            AllreduceException: a member was lost, or lied; `lost` names it.
        """
        others = [index for index in range(len(self._plan.peers)) if index != self._me]
        senders = [index for index in self._plan.senders if index != self._me]
        work = [(i, self._receive_parts(i, lane)) for i in senders for lane in range(self._num_lanes)]
        work += [(i, self._exchange(i, lane)) for i in others for lane in range(num_lanes(self._plan, i))]
        tasks = [asyncio.create_task(self._blaming(index, part)) for index, part in work]
        everything = asyncio.gather(*tasks, *self._reduced)
        try:
            if not senders:
                for number in range(len(self._mine)):
                    self._reduce(number)
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
            self._ended.set_result(None)
        if self._longest_gap and self._learns:
            self._silence.observe(self._longest_gap)

    async def _blaming(self, index: int, work: Awaitable[None]) -> None:
        """Run work that depends on one member; a failure is that member's."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except TimeoutError:
            self.was_silent = True
            self.fail(self._plan.peers[index], "silent for too long")
        except Exception as error:  # noqa: BLE001 - of any type: the member has caused it
            self.fail(self._plan.peers[index], f"{type(error).__name__}: {error}")

    def fail(self, peer: str, reason: str) -> None:
        """End the group because of a member, or of none (""); only the first call counts."""
        if self._failed.done():
            return
        self.lost = peer
        self._failed.set_exception(AllreduceException(f"lost {peer}: {reason}" if peer else reason))
        for future in self._reduced:
            if not future.done():
                future.cancel()

    # ------------------------------------------------------------------ sending parts, receiving means

    async def _exchange(self, index: int, lane: int) -> None:
        """Send a reducer one lane of its parts of our vector and receive their means; then close the stream."""
        messages = self._plan.slices[index][lane :: num_lanes(self._plan, index)]
        peer = self._plan.peers[index]
        stream = await asyncio.wait_for(self._open_stream(peer, self._outgoing(messages, lane)), self._silence.seconds)
        try:
            for message in messages:
                answer = await asyncio.wait_for(anext(stream), self._patience)
                if answer.code == averaging_pb2.CANCELLED:
                    blamed = [member for member in self._plan.peers if member.encode() == answer.peer_id]
                    self.fail(blamed[0] if blamed else "", f"{peer} gave up")
                    return
                if answer.code != averaging_pb2.AVERAGED_PART:
                    raise AllreduceException(f"answered {averaging_pb2.MessageCode.Name(answer.code)}")
                self._take_mean(index, message, _tensor(answer.tensor_part.buffer))
        except StopAsyncIteration as error:
            raise AllreduceException("hung up before it had sent all means") from error
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    async def _outgoing(self, messages: list[Message], lane: int) -> Stream:
        greeting = averaging_pb2.PART_FOR_AVERAGING
        yield averaging_pb2.AveragingData(code=greeting, group_id=self._group_id, weight=float(lane))
        if self._me in self._plan.senders:
            for message in messages:
                data = self._buffers.source[bytes_of(message)].numpy().tobytes()
                await self._upload.take(len(data))
                yield averaging_pb2.AveragingData(tensor_part=runtime_pb2.Tensor(buffer=data))

    def _take_mean(self, index: int, message: Message, data: Tensor) -> None:
        try:
            mean_N = decode_message(self._plan.format, message, data)
        except ExchangeError as error:
            self.auditor.record_proof(index, f"sent a mean that is none: {error}")
            raise
        self._buffers.result[bytes_of(message)] = data
        self.auditor.observe_mean(index, message, mean_N, self._buffers.source)

    # ------------------------------------------------------------------ reducing

    async def rpc_aggregate_part(self, stream: Stream, context: P2PContext, lane: float) -> Stream:
        """Receive one lane of a member's parts of our slice, and send their means.

        The member closes the stream: if the server closes it first, its tail may be lost on the way.
        """
        awaited = self._streams.get((context.remote_id.to_base58(), lane))  # type: ignore[arg-type]
        if awaited is None or awaited.done():
            yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        awaited.set_result(stream)
        if context.remote_id.to_base58() in self._plan.replicas:
            await asyncio.wait({self._ended})  # the holders come first
        for future in self._reduced[int(lane) :: self._num_lanes]:
            await asyncio.wait({future})
            if future.cancelled():
                yield averaging_pb2.AveragingData(code=averaging_pb2.CANCELLED, peer_id=self.lost.encode())
                break
            mean = runtime_pb2.Tensor(buffer=future.result())
            await self._upload.take(len(mean.buffer))
            yield averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=mean)
        await asyncio.sleep(REPLY_TIMES * self._silence.seconds)

    async def _receive_parts(self, index: int, lane: int) -> None:
        opened = self._streams[self._plan.peers[index], lane]
        stream = await asyncio.wait_for(asyncio.shield(opened), self._silence.seconds)
        for number in range(lane, len(self._mine), self._num_lanes):
            began = time.monotonic()
            try:
                sent = await asyncio.wait_for(anext(stream), self._silence.seconds)
            except StopAsyncIteration as error:
                if self._plan.slices[index]:
                    # If the member has given up, it names the one to blame in its answer to our request for means.
                    await asyncio.wait({self._failed}, timeout=self._silence.seconds)
                raise AllreduceException(f"hung up before message {number} of {len(self._mine)}") from error
            self._longest_gap = max(self._longest_gap, time.monotonic() - began)
            self._accept(number, index, _tensor(sent.tensor_part.buffer))
        # Otherwise the last message counts as unhandled until all members have sent theirs, and the lanes of many
        # groups hold back each other's (`WAITING_MESSAGES`).
        await stream.aclose()  # type: ignore[attr-defined]

    def _accept(self, number: int, index: int, data: Tensor) -> None:
        """Take another sender's message; reduce it once those of all senders are here."""
        inbox = self._inbox[number]
        inbox[index] = self.auditor.decode(index, self._mine[number], data)
        if self._plan.is_sole:
            self._finish(number, data)
        elif len(inbox) == len(self._plan.senders) - (self._me in self._plan.senders):
            self._reduce(number)

    def _reduce(self, number: int) -> None:
        """Reduce a message of all senders; this member's own is decoded only now."""
        message, inbox, senders = self._mine[number], self._inbox[number], self._plan.senders
        if self._plan.is_sole:
            return self._finish(number, self._buffers.source[bytes_of(message)])
        if self._me in senders:
            inbox[self._me] = self.auditor.decode(self._me, message, self._buffers.source[bytes_of(message)])
        span, decoded = self._plan.residual_span(message), [inbox[sender] for sender in senders]
        inbox.clear()
        try:
            encoded, new_residual = reduce_message(
                self._plan, message, decoded, self._buffers.residual[span], self.auditor.weigh
            )
        except ValueError as error:  # every contribution is finite, their sum is not
            self.fail("", f"the mean cannot be sent: {error}")
            return
        self._buffers.new_residual[span] = new_residual
        self._buffers.result[bytes_of(message)] = encoded
        self._finish(number, encoded)

    def _finish(self, number: int, encoded: Tensor) -> None:
        """Send the mean of a message; a sole holder's own vector is its mean."""
        if self._plan.is_sole and self._me not in self._plan.senders:
            self._buffers.result[bytes_of(self._mine[number])] = encoded
        if not self._reduced[number].done():
            self._reduced[number].set_result(encoded.numpy().tobytes())


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


DIGEST_BYTES = 32
Answers = Mapping[str, bytes | BaseException]
"""By member: the digests of its result, nothing if it failed, or the reason for a missing answer."""


class GroupAllreduce:
    """One group of a roster. A member runs and confirms it; another peer only answers questions about it.

    Attributes:
        running: The all-reduce once it runs; cancelled if it never will.
        lost: The member that made the group fail; empty if none is known.
        was_silent: Whether a member was silent for too long.
        evidence: This peer's evidence against members.
        clipped: Parts that this peer has clipped, by sender.
    """

    def __init__(
        self, plan: GroupPlan, me: str, group_id: bytes, limits: Limits, stub_of: Callable[[str], StubBase]
    ) -> None:
        self.plan = plan
        self.lost = ""
        self.was_silent = False
        self.evidence: Mapping[str, Evidence] = {}
        self.clipped: Mapping[str, int] = {}
        loop = asyncio.get_running_loop()
        self.running: asyncio.Future[ButterflyAllreduce] = loop.create_future()
        self._me = me
        self._group_id = group_id
        self._limits = limits
        self._stub_of = stub_of
        self._digest: asyncio.Future[bytes] = loop.create_future()

    async def run(self, buffers: Buffers) -> str:
        """Average into the buffers' result; return why that failed, or "" once most of those asked confirm it."""
        try:
            if not sum(self.plan.weights):
                return "no member trained"
            if len(self.plan.peers) == 1:  # its source is its mean
                return ""
            await self._average(buffers)
        except (AllreduceException, OSError, ValueError) as error:
            return str(error) or repr(error)  # an empty reason would be success
        finally:
            self.close()
        return ""

    async def _average(self, buffers: Buffers) -> None:
        def open_stream(peer: str, stream: Stream) -> Awaitable[Stream]:
            return self._stub_of(peer).rpc_aggregate_part(stream)

        allreduce = ButterflyAllreduce(self.plan, self._me, self._group_id, buffers, self._limits, open_stream)
        self.running.set_result(allreduce)
        seconds = self._limits.attempt.seconds
        try:
            # The confirmations have timeouts of their own: if the rest of the attempt's time ended them, this member
            # would not learn that another has committed.
            await asyncio.wait_for(allreduce.run(), seconds)
        except TimeoutError as error:
            raise AllreduceException(f"not done within {seconds:.1f} s") from error
        finally:
            self.lost = allreduce.lost
            self.was_silent = allreduce.was_silent
            self.evidence = allreduce.auditor.evidence()
            self.clipped = allreduce.auditor.clipped
        is_own = self.plan.is_sole and self._me not in self.plan.replicas
        mine = await asyncio.to_thread(digests, self.plan, buffers.mean(is_own=is_own))
        self._digest.set_result(mine)
        self._confirm(
            mine, await self._ask_all([p for p in self.plan.peers if p != self._me and p in self.plan.reachable])
        )

    def _confirm(self, mine: bytes, theirs: Answers) -> None:
        """Require that more than half of those asked have this result; otherwise name the member to blame.

        The certificate decides what counts. This tells early that an attempt has failed, and who has lied.
        """
        there = {peer: answer for peer, answer in theirs.items() if isinstance(answer, bytes) and answer}
        different = {peer: answer for peer, answer in there.items() if answer != mine}
        # If several differ, a reducer has sent members different means.
        liar = self._two_faced(mine, different) if len(different) > 1 else ""  # guard: two-faced-reducer
        if 2 * (1 + len(there) - len(different)) > 1 + len(theirs):  # guard: unconfirmed-mean
            return
        for peer, answer in theirs.items():
            if not isinstance(answer, bytes):
                self.lost = peer
                raise AllreduceException(f"lost {peer}: it did not confirm: {answer!r}") from answer
        if different:
            self.lost = next(iter(different)) if len(different) == 1 else liar
            raise AllreduceException(f"{' and '.join(different)} did not confirm the same digest")
        raise AllreduceException(f"{' and '.join(peer for peer in theirs if peer not in there)} gave up")

    def _two_faced(self, mine: bytes, different: Mapping[str, bytes]) -> str:
        """Return the reducer whose slice alone differs between the others' results and ours, its own result aside."""
        for place, peer in enumerate(self.plan.peers):
            rest = [theirs for other, theirs in different.items() if other != peer]
            if peer != self._me and rest and all(differing(mine, theirs) == {place} for theirs in rest):
                self.evidence = {**self.evidence, peer: Evidence("it has sent others different means", False)}
                return peer
        return ""

    async def _ask_all(self, peers: Sequence[str]) -> Answers:
        request = runtime_pb2.ExpertRequest(uid=self._group_id.hex())

        async def ask(peer: str) -> bytes:
            return (await self._stub_of(peer).rpc_confirm(request, timeout=2 * self._limits.silence.seconds)).metadata

        return dict(zip(peers, await asyncio.gather(*map(ask, peers), return_exceptions=True), strict=True))

    async def answer(self, timeout: float) -> bytes:
        """Return the digests of this member's result once there is one; empty if it failed.

        Raises:
            TimeoutError: there was no result within `timeout` seconds.
        """
        return await asyncio.wait_for(asyncio.shield(self._digest), timeout)

    def close(self) -> None:
        """Tell members that wait for this one's result that there will be none."""
        if not self._digest.done():
            self._digest.set_result(b"")
        self.running.cancel()


def digests(plan: GroupPlan, result: Tensor) -> bytes:
    """Return the SHA-256 of each reducer's slice of a result (uint8), concatenated."""
    hashes = [hashlib.sha256() for _ in plan.peers]
    for place, messages in enumerate(plan.slices):
        for message in messages:
            hashes[place].update(to_bytes(result[bytes_of(message)]))
    return b"".join(each.digest() for each in hashes)


def differing(mine: bytes, theirs: bytes) -> set[int]:
    """Return the places of the reducers in whose slices two results differ, by their digests; -1 if one is none."""
    if len(mine) != len(theirs):
        return {-1}
    starts = range(0, len(mine), DIGEST_BYTES)
    return {at // DIGEST_BYTES for at in starts if mine[at : at + DIGEST_BYTES] != theirs[at : at + DIGEST_BYTES]}


async def finish_all(running: Mapping[VectorName, asyncio.Task[str]]) -> dict[VectorName, str]:
    """Return each group's reason of failure; once `shared` has failed, wait for no other group.

    Nothing counts without `shared`, and a peer that waits for a slot's group would miss the others' next attempt.
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
