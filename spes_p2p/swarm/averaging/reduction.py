"""One group's all-reduce under way: its streams, what has come, what is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import torch
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2, runtime_pb2
from torch import Tensor

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.averaging.reduce import GroupPlan, Message, decode_message, reduce_message
from spes_p2p.swarm.clock import Patience
from spes_p2p.swarm.pacing import Pace

Stream = AsyncIterator[averaging_pb2.AveragingData]
OpenStream = Callable[[str, Stream], Awaitable[Stream]]

LANES, STREAMS = 4, 12
"""Most streams over which a member sends one reducer its parts, and about as many as it sends over in all.
A stream begins with a narrow window, which widens by round trips: a few alone leave a fast link idle for most of a
slice, and many cost processor time."""
REPLY_PATIENCE = 2.0
"""A reducer is given so much more time than a sender: it waits for senders itself, and should be the one to tell."""


class Reduction:
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
        patience: Patience,
        pace: Pace,
        open_stream: OpenStream,
    ) -> None:
        self._plan, self._me, self._group_id = plan, plan.peers.index(me), group_id
        self._source, self._result, self._error, self._new_error = source, result, error, new_error
        self._patience, self._pace, self._open_stream = patience, pace, open_stream
        self._mine = plan.slices[self._me]
        self._num_lanes = num_lanes(plan, self._me)
        self.witness = plan.witness(me)
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
            for peer, seen in self.witness.liars().items():  # guard: lying-mean
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
            self.witness.proves(index, f"sent a mean that is none: {error}")
            raise
        self._result[message[0].byte_start : message[-1].byte_stop] = _tensor(data)
        self.witness.receive(index, message, mean_N, self._source)

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
            self.witness.proves(index, f"sent what is no delta: {error}")
            if not self.witness.can_judge:  # guard: unreadable-part
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
            encoded, left = reduce_message(self._plan.format, message, decoded, weights, kept, self.witness)
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
