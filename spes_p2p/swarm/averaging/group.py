"""One member's part in a group's all-reduce over streams: whole, or missing for all members at once.

Each member opens a few streams to each reducer. Over each it sends its parts of the reducer's slice ahead, and gets
their means on the same stream in the same order; it hangs up when it has them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.averaging.audit import Auditor
from spes_p2p.swarm.averaging.partition import GroupPlan, Message, bytes_of, decode_message, num_lanes, reduce_message
from spes_p2p.swarm.p2p.channel import Channel, DisconnectedError
from spes_p2p.swarm.p2p.rate_limit import RateLimit

PART, MEAN, LOST = b"p", b"m", b"l"
"""Kinds of messages: encoded parts, their encoded mean, and the id of the member that has made a group fail."""
MAX_ID_BYTES = 128
REPLY_TIMES = 2.0
"""A reducer may be silent this many times as long as a sender, because it waits for senders itself."""
LINGER_SECONDS = 5.0
"""Time from the last message of a failed group until its streams are closed: what is on its way then may be lost."""


class LostError(ExchangeError):
    """A group has lost a member, `peer`; none if it is empty."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class Limits(NamedTuple):
    """Timeouts and upload rate of a peer's groups in one attempt.

    Attributes:
        attempt_seconds: Longest duration of a group's all-reduce.
        silence_seconds: Longest time in which a member may send no whole message.
    """

    attempt_seconds: float
    silence_seconds: float
    upload: RateLimit


class Group:
    """One member's part in a group's butterfly all-reduce, in which each member reduces a slice.

    Args:
        source: Its encoded vector, uint8 in the plan's format; None of a replica.
        residual: Rounding error that earlier means left in this reducer's slices, fp32 [delta_numel]; it is not
            changed.
        open: Opens a stream to a member, given its id and the lane.
        work: Runs a function in the thread for tensors.

    Attributes:
        mean: The encoded mean, uint8; whole once `run` has returned "".
        residuals: First element of the delta that is reduced here, and its new rounding errors, fp32.
        lost: The member that made the group fail; empty if none is known.
        was_silent: Whether a member was silent for too long.
        longest_gap: Longest time for which a sender was waited for, in seconds.
    """

    def __init__(
        self,
        plan: GroupPlan,
        me: str,
        source: Tensor | None,
        residual: Tensor,
        *,
        limits: Limits,
        open: Callable[[str, int], Awaitable[Channel]],
        work: Callable[..., Awaitable[Any]],
    ) -> None:
        self.plan = plan
        self.auditor = Auditor(plan, me)
        self.lost = ""
        self.was_silent = False
        self.longest_gap = 0.0
        self._me = plan.peers.index(me)
        self._is_own = plan.is_sole and self._me in plan.senders
        self._source = torch.empty(0, dtype=torch.uint8) if source is None else source
        self.mean = self._source if self._is_own else torch.empty(plan.format.num_bytes, dtype=torch.uint8)
        self._residual = residual
        start, stop = plan.span(me)
        self.residuals = start, torch.zeros(stop - start)
        self._limits = limits
        self._open = open
        self._work = work
        self._mine = plan.slices[self._me]
        self._inbox: list[dict[int, bytes]] = [{} for _ in self._mine]
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._reduced: list[asyncio.Future[Tensor]] = [loop.create_future() for _ in self._mine]
        others = [peer for peer in plan.peers if peer != me]
        lanes = range(num_lanes(plan, self._me)) if others else ()
        self._opened: dict[tuple[str, int], asyncio.Future[None]] = {
            (peer, lane): loop.create_future() for peer in others for lane in lanes
        }
        self._failed: asyncio.Future[str] = loop.create_future()
        self._ended = asyncio.Event()
        self._asking: list[asyncio.Task[None]] = []
        self._reducing: list[asyncio.Task[None]] = []

    async def run(self) -> str:
        """Average; return the reason of a failure, or ""."""
        try:
            if not any(self.plan.weights):
                self.fail("", "no member trained")
            elif not self._is_own:
                await self._average()
            else:  # its vector is the mean; if others cannot call this member, it sends a replica all of it
                for future, message in zip(self._reduced, self._mine, strict=True):
                    future.set_result(self._source[bytes_of(message)])
                self._ask_all()
        except BaseException:
            self.fail("", "given up")
            raise
        finally:
            self._ended.set()
            for task in self._reducing:
                task.cancel()
        return self._failed.result() if self._failed.done() else ""

    async def _average(self) -> None:
        self._ask_all()
        senders = {self.plan.peers[place] for place in self.plan.senders if place != self._me}
        if not senders:
            self._reducing = [asyncio.create_task(self._reduce(number)) for number in range(len(self._mine))]
        work: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._await_streams(senders))]
        work += [*self._asking, *self._reduced]
        everything = asyncio.ensure_future(asyncio.wait(work, return_when=asyncio.FIRST_EXCEPTION))
        seconds = self._limits.attempt_seconds
        ends: set[asyncio.Future[Any]] = {everything, self._failed}
        await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not everything.done():
            everything.cancel()
            return self.fail("", f"not done within {seconds:.1f} s")
        for each in work:
            if each.done():
                each.result()  # raises a bug of ours
        for peer, seen in (await self._work(self.auditor.liars)).items():  # guard: never
            return self.fail(peer, seen.reason)

    def _ask_all(self) -> None:
        others = [place for place in range(len(self.plan.peers)) if place != self._me]
        lanes = [(place, lane) for place in others for lane in range(num_lanes(self.plan, place))]
        self._asking = [asyncio.create_task(self._ask(*each)) for each in lanes]

    def fail(self, peer: str, reason: str) -> None:
        """End the group because of a member, or of none (""); only the first call counts, and none after the end."""
        if self._failed.done() or self._ended.is_set():
            return
        self.lost = peer
        self._failed.set_result(f"lost {peer}: {reason}" if peer else reason)

    # ------------------------------------------------------------------ streams

    async def _ask(self, reducer: int, lane: int) -> None:
        """Send a reducer one lane of its parts of our vector, and take their means."""
        peer = self.plan.peers[reducer]
        messages = self.plan.slices[reducer][lane :: num_lanes(self.plan, reducer)]
        try:
            async with asyncio.timeout(self._limits.silence_seconds):
                channel = await self._open(peer, lane)
        except (ExchangeError, TimeoutError) as error:
            return self._blame(peer, error)
        with contextlib.closing(channel):
            sending = self._send_parts(channel, messages if self._me in self.plan.senders else ())
            receiving = self._blaming(peer, self._take_means(channel, reducer, messages))
            await self._converse(channel, sending, receiving)

    async def serve(self, channel: Channel, peer: str, lane: int) -> None:
        """Take one lane of a member's parts of our slice, and send their means, until it hangs up.

        Raises:
            ExchangeError: the peer is no member, or has opened this lane before.
        """
        opened = self._opened.get((peer, lane))
        if opened is None or opened.done():  # guard: never
            raise ExchangeError("opened a stream that is none of the group's, or one of them again")
        opened.set_result(None)
        place = self.plan.peers.index(peer)
        receiving = self._blaming(peer, self._take_parts(channel, place, lane))
        await self._converse(channel, self._send_means(channel, peer, lane), receiving)

    async def _converse(
        self, channel: Channel, sending: Coroutine[Any, Any, None], receiving: Coroutine[Any, Any, None]
    ) -> None:
        """Send and receive over a stream until all has come; if the group fails first, say which member it has lost."""
        # A peer that does not read is noticed by what it does not send.
        tasks = [asyncio.create_task(_quietly(sending)), asyncio.create_task(receiving)]
        ends: set[asyncio.Future[Any]] = {tasks[1], self._failed}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        if self._failed.done():
            await _quietly(channel.send(LOST, self.lost.encode()))
            await asyncio.sleep(LINGER_SECONDS)
        else:
            tasks[1].result()  # raises a bug of ours

    async def _blaming(self, peer: str, work: Awaitable[None]) -> None:
        """Run work that depends on one member, which is to blame for a failure."""
        try:
            await work
        except (ExchangeError, TimeoutError) as error:
            self._blame(peer, error)

    def _blame(self, peer: str, error: Exception) -> None:
        if isinstance(error, LostError):
            self.fail(error.peer if error.peer in self.plan.peers else "", f"{peer} {error}")
        elif isinstance(error, TimeoutError):
            self.was_silent = True
            self.fail(peer, "silent for too long")
        else:
            self.fail(peer, str(error))

    async def _await_streams(self, senders: Collection[str]) -> None:
        """Blame a sender that does not open its streams."""
        opened = {future: peer for (peer, _), future in self._opened.items() if peer in senders}
        late = (await asyncio.wait(opened, timeout=self._limits.silence_seconds))[1] if opened else ()
        if late:
            self._blame(min(opened[future] for future in late), TimeoutError())

    # ------------------------------------------------------------------ sending parts, taking means

    async def _send_parts(self, channel: Channel, messages: Sequence[Message]) -> None:
        for message in messages:
            await self._send(channel, PART, self._source[bytes_of(message)])

    async def _send(self, channel: Channel, kind: bytes, data: Tensor) -> None:
        await self._limits.upload.take(data.numel())
        await channel.send(kind, memoryview(data.numpy()))  # type: ignore[arg-type]

    async def _receive(self, channel: Channel, kind: bytes, num_bytes: int, seconds: float) -> bytes:
        """Return a message of the plan; raise LostError if its sender's group has failed."""
        async with asyncio.timeout(seconds):
            came, data = await channel.receive({kind: num_bytes, LOST: MAX_ID_BYTES})
        if came == LOST:
            raise LostError(data.decode(errors="replace"), "gave up")
        if len(data) < num_bytes:  # guard: never
            raise ExchangeError(f"sent a message of {len(data)} bytes in place of {num_bytes}")
        return data

    async def _take_means(self, channel: Channel, reducer: int, messages: Sequence[Message]) -> None:
        is_replica = self.plan.peers[self._me] in self.plan.replicas
        patience = self._limits.attempt_seconds if is_replica else REPLY_TIMES * self._limits.silence_seconds
        for message in messages:
            data = await self._receive(channel, MEAN, num_bytes_of(message), patience)
            if not self._is_own:  # otherwise the answer says only that a replica has our vector
                await self._work(self._keep_mean, reducer, message, data)

    def _keep_mean(self, reducer: int, message: Message, data: bytes) -> None:
        """Keep a mean, and compare it with what this member has sent; in the thread for tensors."""
        place = bytes_of(message)
        self.mean[place] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        try:
            mean_N = decode_message(self.plan.format, message, self.mean[place])
        except ExchangeError as error:
            self.auditor.record_proof(reducer, f"sent a mean that is none: {error}")
            raise
        self.auditor.observe_mean(reducer, message, mean_N, self._source)

    # ------------------------------------------------------------------ reducing

    async def _take_parts(self, channel: Channel, place: int, lane: int) -> None:
        """Take a sender's parts; then wait until it hangs up."""
        is_sender = place in self.plan.senders
        try:
            for number in range(lane, len(self._mine), num_lanes(self.plan, self._me)) if is_sender else ():
                began, num_bytes = self._clock(), num_bytes_of(self._mine[number])
                data = await self._receive(channel, PART, num_bytes, self._limits.silence_seconds)
                self.longest_gap = max(self.longest_gap, self._clock() - began)
                self._accept(number, place, data)
            if await self._has_given_up(channel) and is_sender:  # guard: operand
                raise LostError("", "gave up")
        except LostError as error:
            # A sender's word blames nobody else: what it has noticed, this reducer notices too.
            await asyncio.wait({self._failed}, timeout=self._limits.silence_seconds)
            raise ExchangeError(str(error)) from error

    async def _has_given_up(self, channel: Channel) -> bool:
        """Wait until a member hangs up, or says that its group has failed; what else it sends is not read."""
        try:
            await channel.receive({LOST: MAX_ID_BYTES})
        except (DisconnectedError, TimeoutError):
            return False
        except ExchangeError:
            await asyncio.sleep(self._limits.attempt_seconds)
            return False
        return True

    def _accept(self, number: int, place: int, data: bytes) -> None:
        """Keep another sender's message; reduce it once those of all senders are here."""
        inbox = self._inbox[number]
        inbox[place] = data
        if len(inbox) == len(self.plan.senders) - (self._me in self.plan.senders):
            self._reducing.append(asyncio.create_task(self._reduce(number)))

    async def _reduce(self, number: int) -> None:
        inbox, self._inbox[number] = self._inbox[number], {}
        try:
            mean = await self._work(self._mean_of, self._mine[number], inbox)
        except LostError as error:
            self.fail(error.peer, str(error))
        except ValueError as error:  # every contribution is finite, their sum is not
            self.fail("", f"the mean cannot be sent: {error}")
        except Exception as error:  # noqa: BLE001 - a bug of ours, which `run` raises
            self._reduced[number].set_exception(error)
        else:
            self._reduced[number].set_result(mean)

    def _mean_of(self, message: Message, inbox: dict[int, bytes]) -> Tensor:
        """Return the encoded mean of a message, and keep it; in the thread for tensors."""
        place, plan = bytes_of(message), self.plan
        sent = {sender: torch.frombuffer(bytearray(data), dtype=torch.uint8) for sender, data in inbox.items()}
        sent[self._me] = self._source[place]
        decoded: list[Tensor | None] = []
        for sender in plan.senders:
            try:
                decoded.append(self.auditor.decode(sender, message, sent[sender]))
            except ExchangeError as error:
                raise LostError(plan.peers[sender], str(error)) from error
        if plan.is_sole:
            (mean,) = (sent[sender] for sender in plan.senders)
        else:
            span, (start, new_residual) = plan.residual_span(message), self.residuals
            mean, error_N = reduce_message(plan, message, decoded, self._residual[span], self.auditor.weigh)
            new_residual[span.start - start : span.stop - start] = error_N
        self.mean[place] = mean
        return mean

    async def _send_means(self, channel: Channel, peer: str, lane: int) -> None:
        if peer in self.plan.replicas and self.plan.peers[self._me] not in self.plan.replicas:
            await self._ended.wait()  # the holders come first
        for future in self._reduced[lane :: num_lanes(self.plan, self._me)]:
            await self._send(channel, MEAN, await asyncio.shield(future))


def num_bytes_of(message: Message) -> int:
    """Return the length of a message."""
    return message[-1].byte_stop - message[0].byte_start


async def _quietly(work: Awaitable[None]) -> None:
    with contextlib.suppress(ExchangeError, TimeoutError):
        await work
