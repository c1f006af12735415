"""Fetches one version from as many peers as that takes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.exchange.downloads import RANGE_BYTES, Download, Range
from spes_p2p.swarm.exchange.protocol import (
    BUSY,
    DATA,
    MAX_WAIT_SECONDS,
    Answer,
    Channel,
    DisconnectedError,
    Request,
    Signal,
    Wanted,
)
from spes_p2p.swarm.exchange.versions import Version

if TYPE_CHECKING:
    from spes_p2p.swarm.exchange.exchange import Exchange

log = logging.getLogger(__name__)

MIN_PAUSE_SECONDS = 0.25
MAX_PAUSE_SECONDS = 5.0
"""Pauses after BUSY double, with jitter, so that callers do not return together."""
PROBE_SECONDS = 1.0
"""Time for the first request after a pause to be answered before other downloads ask too."""
MAX_AT_ONCE_BYTES = 2 * RANGE_BYTES
"""Payloads up to this size come from one peer, unless it is slow."""
PIPELINED_RANGES = 2
"""Ranges requested from a peer at any time, so that it never waits for a request."""
SLOW_SECONDS = 2.0
"""Time for a range before another peer helps."""
STALE_SECONDS = 20.0
"""Wait for the download budget after which a new stream is opened: the peer may have given this one up."""
IDLE_SECONDS = 1.0
"""Pause between two checks of a peer with nothing left to send for another's slow range."""
MAX_SENDERS = 4
"""Peers that one large payload comes from at a time."""
OFFER_SECONDS = 2.0
"""Time for a peer to make an offer before the next one is asked as well."""
RECONNECT_SECONDS = 0.25
MAX_DISCONNECTS = 3
"""Disconnects in a row, each with little sent, after which a peer is excluded."""


class Backoff:
    """Tells when busy peers may be asked again; times are the event loop's seconds.

    It is shared by all downloads: one of them probes a busy peer, and once the peer sends, the others follow.
    """

    def __init__(self) -> None:
        self._busy: dict[str, _BusyPeer] = {}

    def retry_at(self, peer: str) -> float:
        """Return when a peer may be asked; 0 if it is not busy."""
        return self._busy[peer].retry_at if peer in self._busy else 0.0

    def record_busy(self, peer: str, now: float) -> None:
        """Note that a peer answered BUSY."""
        busy = self._busy.setdefault(peer, _BusyPeer())
        if busy.is_probed or now >= busy.retry_at:  # otherwise it has just told several downloads
            busy.is_probed = False
            busy.retry_at = now + busy.pause * random.uniform(0.5, 1.0)
            busy.pause = min(2 * busy.pause, MAX_PAUSE_SECONDS)

    def record_request(self, peer: str, now: float) -> None:
        """Note that a download asks a peer."""
        if peer in self._busy:
            self._busy[peer].is_probed = True
            self._busy[peer].retry_at = now + PROBE_SECONDS

    def reset(self, peer: str) -> None:
        """Note that a peer sends."""
        self._busy.pop(peer, None)


@dataclass
class _BusyPeer:
    retry_at: float = 0.0
    pause: float = MIN_PAUSE_SECONDS
    is_probed: bool = False


class BusyError(ExchangeError):
    """The peer is busy; it may be asked again later."""


class LackingError(ExchangeError):
    """The peer does not have the version, or not yet."""


@dataclass
class Candidate:
    """A peer that may have the version; times are the event loop's seconds."""

    peer: str
    retry_at: float = 0.0
    num_disconnects: int = 0
    """In a row, each with little sent."""
    task: asyncio.Task[None] | None = None
    asked_at: float = 0.0
    has_offered: bool = False
    num_bytes: int = 0


class Fetch:
    """The bytes of one version so far, and how one peer adds to them.

    Args:
        wanted: The version.
        have: Digest of this peer's newest version of that name; "" for none.
        exchange: Connects, counts and stores.

    Attributes:
        unchanged: The offered version, if its bytes are this peer's own.
        num_peers: Candidates left.
        changed: Fires at an offer, and when a candidate's task ends.
    """

    def __init__(self, wanted: Wanted, have: str, exchange: Exchange) -> None:
        self.wanted = wanted
        self.have = have
        self.num_peers = 1
        self.download: Download | None = None
        self.unchanged: Version | None = None
        self.changed = Signal()
        self._exchange = exchange
        self._reservation: asyncio.Future | None = None
        self._reserved = "", 0
        self._is_sent_at_once = False

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing."""
        return self.unchanged is not None or (self.download is not None and self.download.is_complete)

    def drop(self) -> None:
        """Drop the bytes so far."""
        if self.download is not None:
            self.download.close()
        self.download = self.unchanged = None

    def close(self) -> None:
        """Drop the bytes, and release their share of the download budget."""
        self.drop()
        if self._reservation is not None and not self._reservation.cancel():
            self._exchange.budget.release(*self._reserved)
        self._reservation = None

    async def run(self, candidate: Candidate, deadline: float) -> None:
        """Fetch what is missing from one peer.

        Raises:
            ExchangeError: `BusyError`, `LackingError`, `DisconnectedError`, or what the peer did wrong.
            TimeoutError: the peer was silent for too long.
            RecordError: the offered version is not what its author signed.
        """
        loop = asyncio.get_running_loop()
        while True:
            request = self._request(min(max(0.0, deadline - loop.time()), MAX_WAIT_SECONDS))
            channel = await self._exchange.connect(candidate.peer)
            with contextlib.closing(channel), self._sent_at_once(request):
                await channel.send_text(request.model_dump_json())
                offer = self._check(Answer.parse(await channel.receive_text()))
                if offer is None:
                    return
                candidate.has_offered = True
                offered_at = loop.time()
                await self._reserve(candidate.peer, offer.num_bytes)
                is_first = self.download is None
                if loop.time() - offered_at < STALE_SECONDS and (is_first or not request.at_once):
                    download = self._join(offer, deadline)
                    return await self._receive_all(channel, candidate, download, at_once=request.at_once)

    @contextlib.contextmanager
    def _sent_at_once(self, request: Request) -> Iterator[None]:
        """Let no other peer send the whole payload unasked while this one may."""
        self._is_sent_at_once |= request.at_once
        try:
            yield
        finally:
            self._is_sent_at_once &= not request.at_once

    def _check(self, answer: Answer) -> Version | None:
        """Return a verified offer; None if this peer's version is the newest."""
        if answer.state == "busy":
            raise BusyError("is busy")
        if answer.state in ("absent", "refused"):
            kind = LackingError if answer.state == "absent" else ExchangeError
            raise kind(f"has no version of round {self.wanted.min_round} ({answer.state})")
        version = Version.verify(answer.version, self._exchange.run_id)
        self.wanted.check(version)
        if answer.state != "same":
            return version
        if not self.have or version.digest != self.have:  # guard: nothing-changed
            raise ExchangeError("says that nothing has changed, which is not so")
        self.unchanged = version
        return None

    def _request(self, seconds: float) -> Request:
        download = self.download
        is_small = self.wanted.num_bytes <= MAX_AT_ONCE_BYTES
        return Request(
            name=self.wanted.name,
            min_round=self.wanted.min_round,
            timeout=seconds,
            have=self.have,
            digest="" if download is None else download.version.digest,
            at_once=download is None and not self._is_sent_at_once and is_small,
        )

    async def _reserve(self, peer: str, num_bytes: int) -> None:
        """Wait for a share of the download budget."""
        if self._reservation is None:
            self._reserved = peer, num_bytes
            self._reservation = asyncio.ensure_future(self._exchange.budget.acquire(peer, num_bytes))
        await asyncio.shield(self._reservation)

    def _join(self, version: Version, deadline: float) -> Download:
        """Return the download to which an offer adds: a new one if the present one will miss the deadline."""
        download = self.download
        if download is not None:
            if version.digest == download.version.digest:
                return download
            if not download.will_miss(deadline):
                raise DisconnectedError("offers another version than those before")
            self.drop()
        self.download = Download(version)
        self.changed.fire()
        return self.download

    async def _receive_all(self, channel: Channel, candidate: Candidate, download: Download, *, at_once: bool) -> None:
        requested: list[Range] = []
        if at_once and (everything := download.claim(candidate.peer, download.num_bytes)):
            requested.append(everything)
        try:
            while requested or not (download.is_complete or download.is_closed):
                while len(requested) < PIPELINED_RANGES:
                    range = self._claim(candidate, download, may_take_over=not requested)
                    if range is None:
                        break
                    requested.append(range)
                    await channel.send_range(range.position, range.requested)
                if requested:
                    await self._receive(channel, candidate, download, requested[0])
                    download.finish(requested.pop(0))
                else:
                    await download.changed.wait(IDLE_SECONDS)
        finally:
            for range in requested:
                download.finish(range)

    def _claim(self, candidate: Candidate, download: Download, *, may_take_over: bool) -> Range | None:
        range = download.claim(candidate.peer, RANGE_BYTES if self.num_peers > 1 else download.num_bytes)
        if range is None and may_take_over:
            return download.take_over(candidate.peer, SLOW_SECONDS)
        return range

    async def _receive(self, channel: Channel, candidate: Candidate, download: Download, range: Range) -> None:
        range.started_at = asyncio.get_running_loop().time()
        while range.position < range.requested:
            kind, num_bytes = await channel.receive_header()
            if kind == BUSY:
                raise BusyError("broke off: is busy")
            if kind != DATA or not 0 < num_bytes <= range.requested - range.position:  # guard: bytes-wanted
                raise ExchangeError(f"sent {num_bytes} bytes, {kind!r}, more than were asked for")
            self._exchange.backoff.reset(candidate.peer)
            while num_bytes:
                data = await channel.read(num_bytes)
                num_bytes -= len(data)
                candidate.num_bytes += len(data)
                self._exchange.bytes_in += len(data)
                download.write(range, data)
                if download.is_closed or range.position == range.stop < range.requested:
                    raise DisconnectedError("was overtaken")


class Pull:
    """Fetches one version, from the first candidates that offer it; preferred ones come first in `peers`."""

    def __init__(self, wanted: Wanted, peers: Sequence[str], have: str, exchange: Exchange) -> None:
        self._wanted = wanted
        self._exchange = exchange
        self._fetch = Fetch(wanted, have, exchange)
        self._peers = [Candidate(peer) for peer in dict.fromkeys(peers) if peer != exchange.peer_id]
        self._fetch.num_peers = len(self._peers)
        self._suspect: Download | None = None
        """A payload from several peers that failed verification: the next one comes from a single peer."""
        self._reasons = ["no peer has it"]

    async def run(self, deadline: float) -> str:
        """Fetch and store the version; return "", or the reason for a failure by `deadline`, in the loop's seconds."""
        try:
            while True:
                await self._gather(deadline)
                if not self._fetch.is_complete:
                    return "; ".join(self._reasons[-3:])
                if await self._verify():
                    return ""
        finally:
            await self._stop()
            self._fetch.close()

    # ------------------------------------------------------------------ choosing peers

    async def _gather(self, deadline: float) -> None:
        """Ask candidates until the payload is complete, no candidate is left, or the time is up."""
        loop = asyncio.get_running_loop()
        try:
            while not self._fetch.is_complete:
                self._collect(loop.time())
                now = loop.time()
                if now >= deadline:
                    late = [c.peer[-6:] for c in self._peers if c.task or self._retry_at(c)]
                    self._reasons.append(f"out of time, waiting for {', '.join(late) or 'no peer'}")
                    return
                if not self._peers:
                    return
                self._ask(now, deadline)
                idle = [self._retry_at(c) for c in self._peers if c.task is None]
                paused = [retry_at for retry_at in idle if retry_at > now]
                await self._fetch.changed.wait(min([deadline, now + OFFER_SECONDS / 2, *paused]) - now)
        finally:
            await self._stop()

    def _ask(self, now: float, deadline: float) -> None:
        """Ask more candidates if too few are asked, or those asked are slow."""
        asked = [c for c in self._peers if c.task is not None]
        promising = [c for c in asked if c.has_offered or now - c.asked_at < OFFER_SECONDS]
        idle = [c for c in self._peers if c.task is None and self._retry_at(c) <= now]
        for candidate in idle[: max(0, min(self._num_senders() - len(promising), MAX_SENDERS - len(asked)))]:
            self._start(candidate, now, deadline)

    def _retry_at(self, candidate: Candidate) -> float:
        return max(candidate.retry_at, self._exchange.backoff.retry_at(candidate.peer))

    def _num_senders(self) -> int:
        """Return the number of peers to fetch from at once: one, unless the payload is large or comes slowly."""
        if self._suspect is not None:
            return 1
        if self._fetch.download is not None and self._fetch.download.slowest(SLOW_SECONDS) is not None:
            return MAX_SENDERS
        num_bytes = self._wanted.num_bytes if self._fetch.download is None else self._fetch.download.num_bytes
        return MAX_SENDERS if num_bytes > MAX_AT_ONCE_BYTES else 1

    def _start(self, candidate: Candidate, now: float, deadline: float) -> None:
        candidate.asked_at = now
        candidate.has_offered = False
        self._exchange.backoff.record_request(candidate.peer, now)
        candidate.task = asyncio.create_task(self._fetch.run(candidate, deadline))
        candidate.task.add_done_callback(lambda _: self._fetch.changed.fire())

    def _collect(self, now: float) -> None:
        """Handle the candidates whose fetch has failed: retry them later, or exclude them."""
        for candidate in list(self._peers):
            if candidate.task is None or not candidate.task.done():
                continue
            error = candidate.task.exception()
            candidate.task = None
            if error is None:
                continue
            is_busy = isinstance(error, BusyError)
            log.debug("could not pull %s from %s: %r", self._wanted.name, candidate.peer[-6:], error)
            self._reasons.append(f"{candidate.peer[-6:]}: {error!r}")
            is_useful = is_busy or candidate.num_bytes >= RANGE_BYTES
            candidate.num_disconnects = 0 if is_useful else candidate.num_disconnects + 1
            candidate.num_bytes = 0
            if self._suspect is not None:
                self._fetch.drop()  # with bytes of two peers, a failed verification would not show the liar
            if is_busy:
                self._exchange.backoff.record_busy(candidate.peer, now)
            elif isinstance(error, DisconnectedError) and candidate.num_disconnects < MAX_DISCONNECTS:
                candidate.retry_at = now + RECONNECT_SECONDS
            elif isinstance(error, LackingError) and self._may_fetch_it_first(candidate):
                candidate.retry_at = now + OFFER_SECONDS
            else:
                self._exclude({candidate.peer})

    def _may_fetch_it_first(self, candidate: Candidate) -> bool:
        """Tell whether a peer without the version may get it later; its author has it by now or never."""
        authors = self._wanted.authors
        return bool(authors) and candidate.peer not in authors

    def _exclude(self, peers: set[str]) -> None:
        self._peers = [c for c in self._peers if c.peer not in peers]
        self._fetch.num_peers = len(self._peers)

    async def _stop(self) -> None:
        tasks = [c.task for c in self._peers if c.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for candidate in self._peers:
            candidate.task = None

    # ------------------------------------------------------------------ verifying

    async def _verify(self) -> bool:
        """Store the version; if its bytes are wrong, return False and fetch them in another way the next time."""
        version, download = self._fetch.unchanged, self._fetch.download
        try:
            if version is not None:
                await self._exchange.accept(version, None)
            else:
                assert download is not None
                await self._exchange.accept(download.version, download)
        except ExchangeError as error:
            self._blame(download if version is None else None, error)
            self._fetch.drop()
            return False
        if self._suspect is not None and download is not None:
            liars = sorted(self._suspect.senders_unlike(download))
            log.warning("%s: %s sent other bytes than belong to it", self._wanted.name, ", ".join(liars))
        return True

    def _blame(self, download: Download | None, error: ExchangeError) -> None:
        """Give up parallel senders, or the only sender."""
        if download is None:
            self._fetch.have = ""
            return
        names = ", ".join(sorted(peer[-6:] for peer in download.senders))
        self._reasons.append(f"{names}: {error!r}")
        log.warning("%s from %s: %s", self._wanted.name, names, error)
        if len(download.senders) > 1:
            self._suspect = download
        else:
            self._exclude(download.senders)  # guard: bad-sender
