"""Fetches versions in blocks, in random order, from all peers that have them, unfinished files included."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from spes_p2p.codecs.vectors import BLOCK_BYTES
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.exchange.blocks import LIST, Unfinished, has_part, most_have_bytes, parse_have
from spes_p2p.swarm.exchange.protocol import ABSENT, BUSY, DATA, GET, HAVE, WANT, pack_get
from spes_p2p.swarm.p2p.channel import FRAME_BYTES, Channel, DisconnectedError

log = logging.getLogger(__name__)

MAX_SOURCES = 64
"""Peers that a fetch is connected to at a time."""
MAX_REQUESTED = 16
MAX_REQUESTED_BYTES = 2 * BLOCK_BYTES
"""Parts requested over a stream at any time, and bytes after which no more are: the source must not wait for a request.
Of several streams to a source each requests one block at a time, as the others fill its pauses."""
MAX_STREAMS = 12
MAX_STREAMS_PER_SOURCE = 4
"""Streams to all sources together, and to one. If both ends send much, a request or an acknowledgement of yamux waits
behind the other direction's blocks; over one stream the link idles meanwhile, and others are overloaded."""
SLOW_SECONDS = 1.0
"""Time of a block from which on its source is asked over one stream: what waits there could come from others."""
POLL_SECONDS = 0.1
MAX_POLL_SECONDS = 1.0
"""Pauses between two questions to a source that lacks what is missing here; they double while it gets nothing new."""
PAUSE_SECONDS = 0.25
MAX_PAUSE_SECONDS = 5.0
"""Pauses of a source that is busy or has failed; they double, with jitter, so that callers do not return together."""
MAX_FAILURES = 3
"""Failures in a row, with no part between them, after which a source is given up."""
LATE_SECONDS = 2.0
"""Least age of a request before an idle source is asked for the same part."""
ABSENT_SECONDS = 10.0
"""Time after which a version is given up if no source has shown any of it."""
CHECK_SECONDS = 0.5
MAX_REASONS = 4
"""Failures of sources that a reason names."""

Part = tuple[int, int]
"""Index of a file, and of a block of it or LIST."""


class BusyError(ExchangeError):
    """The source serves others first; it may be asked again later."""


@dataclass(eq=False)
class Source:
    """A peer that may have blocks.

    Attributes:
        have: What it has of each version; None until it has answered.
        num_parts: Parts that came from it.
        num_streams: Streams over which it is asked.
        num_failures: Failures since the last part.
        block_seconds: Time that its last block took; 0 before one has come.
        task: Talks to it; None until it does, and once it is given up.
    """

    peer: str
    have: Sequence[int] | None = None
    num_parts: int = 0
    num_streams: int = 1
    num_failures: int = 0
    block_seconds: float = 0.0
    task: asyncio.Task[None] | None = None


@dataclass(eq=False)
class _File:
    """A version on its way; `open` has the parts that are neither here nor requested, in random order."""

    unfinished: Unfinished
    open: list[int] = field(default_factory=list)
    seen_at: float = 0.0
    """Time at which a source last had a part of it that is missing here."""
    failure: str = ""
    is_stored: bool = False
    storing: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        return self.is_stored or bool(self.failure)

    @property
    def lacks_parts(self) -> bool:
        return not self.is_over and self.storing is None


class Fetch:
    """Fetches some versions at once, over one stream to each source, or several if the sources are few.

    The list of a version's block hashes comes first: it hashes to the digest that is wanted, whoever sent it. Each
    block is compared with its hash as it comes, and a source that sent another is asked no more. A part that is late
    is also requested from a source with nothing else to send.

    Args:
        files: Where the parts go; what is there already is not fetched.
        peers: Peers to ask; of more than MAX_SOURCES the first ones.
        connect: Opens a stream to a peer.
        store: Verifies and stores a complete version; raises ExchangeError if its content is of no use.
        count: Gets the number of bytes that have come.
    """

    def __init__(
        self,
        files: Sequence[Unfinished],
        peers: Iterable[str],
        *,
        connect: Callable[[str], Awaitable[Channel]],
        store: Callable[[Unfinished], Awaitable[None]],
        count: Callable[[int], None],
    ) -> None:
        self._files = [_File(each) for each in files]
        self._sources = [Source(peer) for peer in dict.fromkeys(peers)]
        self._num_streams = max(1, min(MAX_STREAMS // max(len(self._sources), 1), MAX_STREAMS_PER_SOURCE))
        self._connect = connect
        self._store = store
        self._count = count
        self._order = random.sample(range(len(files)), len(files))
        """All sources send parts of the same version first, and each peer fetches versions in an order of its own."""
        self._requested: dict[Part, tuple[float, Source]] = {}
        """Parts on their way: when they were last requested, and from which source."""
        self._changed = asyncio.Event()
        self._reasons: deque[str] = deque(maxlen=MAX_REASONS)

    async def run(self, deadline: float) -> list[str]:
        """Fetch until all is here or given up, or the deadline in the loop's seconds; return each version's failure."""
        loop = asyncio.get_running_loop()
        try:
            for file in self._files:
                file.seen_at = loop.time()
                self._draw(file)
            while lacking := [file for file in self._files if not file.is_over]:
                now = loop.time()
                if now >= deadline:
                    self._give_up([file for file in lacking if file.storing is None], "out of time")
                    break
                self._start()
                self._give_up(self._absent(now), "no peer has it")
                await self._wait(min(deadline - now, CHECK_SECONDS))
        finally:
            await self._stop()
        return [file.failure for file in self._files]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, seconds: float) -> None:
        """Wait until something has changed, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    # ------------------------------------------------------------------ versions

    def _draw(self, file: _File) -> None:
        """Draw the order of the parts that are missing; store a version that is complete."""
        missing = file.unfinished.missing()
        file.open = random.sample(missing, len(missing))
        if not missing and file.storing is None:
            file.storing = asyncio.create_task(self._finish(file))
        self._wake()

    async def _finish(self, file: _File) -> None:
        try:
            await self._store(file.unfinished)
            file.is_stored = True
        except (ExchangeError, OSError) as error:
            file.failure = str(error)
        self._wake()

    def _absent(self, now: float) -> list[_File]:
        """Return the versions of which no source has had a missing part for long, or may ever have one."""
        live = [source for source in self._sources if source.task is not None]
        absent = []
        for index, file in enumerate(self._files):
            if not file.lacks_parts:
                continue
            has = any(each.have is None or _last_of(each.have[index], file.open) is not None for each in live)
            if has or any(part[0] == index for part in self._requested):
                file.seen_at = now
            elif not live or now - file.seen_at > ABSENT_SECONDS:
                absent.append(file)
        return absent

    def _give_up(self, files: Iterable[_File], reason: str) -> None:
        for file in files:
            file.failure = "; ".join([reason, *self._reasons])
            file.open = []
            self._wake()

    # ------------------------------------------------------------------ sources

    def _start(self) -> None:
        num_live = sum(source.task is not None for source in self._sources)
        for source in self._sources:
            if source.task is not None and source.task.done():
                source.task.result()
        waiting = [each for each in self._sources if each.task is None and each.num_failures < MAX_FAILURES]
        for source in waiting[: MAX_SOURCES - num_live]:
            source.task = asyncio.create_task(self._ask(source))

    async def _stop(self) -> None:
        tasks = [source.task for source in self._sources if source.task is not None]
        for task in tasks:
            task.cancel()
        storing = [file.storing for file in self._files if file.storing is not None]
        await asyncio.gather(*tasks, *storing, return_exceptions=True)

    async def _ask(self, source: Source) -> None:
        """Take parts from a source until no version lacks any, or the source is given up."""
        pause = PAUSE_SECONDS
        while source.num_failures < MAX_FAILURES:
            before = source.num_parts
            try:
                return await self._talk_all(source)
            except (ExchangeError, TimeoutError) as error:
                reason = f"{source.peer[-6:]} {error}"
                if isinstance(error, DisconnectedError | TimeoutError):
                    source.num_failures += 1
                elif not isinstance(error, BusyError):
                    source.num_failures = MAX_FAILURES  # guard: skip
                    log.warning("asking %s no more: it %s", source.peer, error)
            if reason not in self._reasons:
                self._reasons.append(reason)
            pause = PAUSE_SECONDS if source.num_parts > before else min(2 * pause, MAX_PAUSE_SECONDS)
            if source.num_failures < MAX_FAILURES:
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        source.task = None
        self._wake()

    async def _talk_all(self, source: Source) -> None:
        """Take parts over one stream, and more once a block has come fast; the first failure ends all."""
        source.num_streams, source.block_seconds = 1, 0.0
        talks = [asyncio.create_task(self._talk(source, number)) for number in range(self._num_streams)]
        try:
            await asyncio.gather(*talks)
        finally:
            for talk in talks:
                talk.cancel()
            await asyncio.gather(*talks, return_exceptions=True)

    async def _talk(self, source: Source, number: int) -> None:
        """Take parts over one stream; return when no version lacks any."""
        while number and not 0 < source.block_seconds < SLOW_SECONDS:
            if not any(file.lacks_parts for file in self._files):
                return
            await self._wait(POLL_SECONDS)
        source.num_streams = max(source.num_streams, 1 + number)
        requested: deque[Part] = deque()
        pause = POLL_SECONDS
        loop = asyncio.get_running_loop()
        channel = await self._connect(source.peer)
        with contextlib.closing(channel):
            try:
                digests = (file.unfinished.version.digest for file in self._files)
                await self._hear(channel, source, b"".join(map(bytes.fromhex, digests)))
                heard_at = loop.time()
                while any(file.lacks_parts for file in self._files):
                    while part := self._choose(source, requested):
                        requested.append(part)
                        await channel.send(GET, pack_get(self._files[part[0]].unfinished.version.digest, part[1]))
                    if requested:
                        await self._receive(channel, source, requested[0])
                        requested.popleft()
                        pause = POLL_SECONDS
                    elif (left := heard_at + pause - loop.time()) > 0:
                        await self._wait(left)
                    else:
                        await self._hear(channel, source)
                        heard_at, pause = loop.time(), min(2 * pause, MAX_POLL_SECONDS)
            finally:
                for part in requested:
                    self._release(part, source)

    async def _hear(self, channel: Channel, source: Source, digests: bytes = b"") -> None:
        """Ask what a source has of each version."""
        await channel.send(WANT, digests)
        sizes = [file.unfinished.num_blocks for file in self._files]
        _, data = await channel.receive({HAVE: sum(map(most_have_bytes, sizes))})
        source.have = parse_have(data, sizes)

    # ------------------------------------------------------------------ parts

    def _choose(self, source: Source, requested: Collection[Part]) -> Part | None:
        """Request one more part of a source: one that is missing, or, if the source is idle, one that is late."""
        num_bytes = sum(self._files[index].unfinished.part_bytes(number) for index, number in requested)
        most_bytes = MAX_REQUESTED_BYTES if source.num_streams == 1 else BLOCK_BYTES
        if len(requested) >= MAX_REQUESTED or num_bytes >= most_bytes:
            return None
        have = source.have or ()
        now = asyncio.get_running_loop().time()
        for index in self._order:
            if (number := _last_of(have[index], self._files[index].open)) is not None:
                self._files[index].open.remove(number)
                self._requested[index, number] = now, source
                return index, number
        late = max(LATE_SECONDS, 2 * source.block_seconds)
        waiting = [
            (since, part)
            for part, (since, other) in self._requested.items()
            if other is not source and now - since > late and has_part(have[part[0]], part[1])
        ]
        if requested or not waiting:
            return None
        _, part = min(waiting)
        self._requested[part] = now, source
        return part

    def _release(self, part: Part, source: Source) -> None:
        """Have a part requested again, unless it has come meanwhile or another source was asked for it last."""
        if part in self._requested and self._requested[part][1] is source:
            del self._requested[part]
            self._files[part[0]].open.append(part[1])
            self._wake()

    async def _receive(self, channel: Channel, source: Source, part: Part) -> None:
        """Receive a part, verify it, and keep it."""
        loop = asyncio.get_running_loop()
        file, began = self._files[part[0]], loop.time()
        num_bytes, data = file.unfinished.part_bytes(part[1]), bytearray()
        while len(data) < num_bytes:
            most = {DATA: min(FRAME_BYTES, num_bytes - len(data)), **({} if data else {BUSY: 0, ABSENT: 0})}
            kind, frame = await channel.receive(most)
            if kind != DATA:
                raise BusyError("is busy") if kind == BUSY else DisconnectedError("has it no more")
            if not frame:  # guard: never
                raise ExchangeError("sent nothing in place of a block")
            data += frame
            self._count(len(frame))
        try:
            is_new = await loop.run_in_executor(None, file.unfinished.write, part[1], data)
        except OSError as error:
            return self._give_up([file], f"cannot be stored: {error.strerror or error}")
        if part[1] != LIST:
            source.block_seconds = loop.time() - began
        source.num_parts += 1
        source.num_failures = 0
        self._requested.pop(part, None)
        if is_new and (part[1] == LIST or file.unfinished.is_complete):
            self._draw(file)


def _last_of(have: int, numbers: Sequence[int]) -> int | None:
    """Return the last of some parts that a peer has."""
    return next((number for number in reversed(numbers) if has_part(have, number)), None)
