"""One peer is asked for what is missing of one version."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.exchange.channel import BUSY, DATA, Channel, CutShortError, Signal
from spes_p2p.swarm.exchange.downloads import RANGE_BYTES, Download, Range, Turns, shares_of
from spes_p2p.swarm.exchange.messages import MAX_WAIT_SECONDS, Answer, Request, Wanted
from spes_p2p.swarm.exchange.rests import Rests
from spes_p2p.swarm.exchange.versions import Version

AT_ONCE_BYTES = 2 * RANGE_BYTES
"""Vectors up to this size come from one peer, unless it is slow."""
RANGES_AHEAD = 2
"""Ranges that a peer was asked for at any time, so that it never waits for the next."""
SLOW_SECONDS, RELAYED_SECONDS = 2.0, 10.0
STALE_SECONDS = 20.0
"""Who has waited longer for its turn asks anew: its stream may be given up at the other end."""
IDLE_SECONDS = 1.0
"""How often a peer with nothing left to send looks whether another is slow."""


class BusyError(ExchangeError):
    """The peer serves others; ask it again later."""


class AbsentError(ExchangeError):
    """The peer does not have it, or not yet."""


@dataclass
class Candidate:
    """A peer that may have it.

    Attributes:
        peer: Its id.
        is_relay: It fetches the version too, and passes its share on.
        not_before: When to ask it after it broke off, in the loop's seconds.
        breaks: How often it broke off.
        task: Asks it now.
        asked: Since when.
        has_offered: It has made an offer.
        num_bytes: What has come of it.
    """

    peer: str
    is_relay: bool = False
    not_before: float = 0.0
    breaks: int = 0
    task: asyncio.Task[None] | None = None
    asked: float = 0.0
    has_offered: bool = False
    num_bytes: int = 0


class Station(Protocol):
    """Where a pull takes place: what it needs of the exchange."""

    peer_id: str
    run_id: str
    turns: Turns
    """Limits how many versions are fetched at a time, and so the memory they take."""
    rests: Rests
    """Which peers were busy, for all versions together."""

    async def connect(self, peer: str) -> Channel:
        """Open a channel to a peer that serves versions."""

    async def accept(self, version: Version, download: Download | None) -> None:
        """Verify and store a complete download, or, without one, note that a version is what this peer has.

        Raises:
            ExchangeError: it is not what it should be.
        """

    def share(self, name: str, download: Download | None) -> None:
        """Let relays have what has arrived of a version so far, until told that nothing more comes."""

    def count(self, num_bytes: int) -> None:
        """Count payload bytes that have come."""


class Fetch:
    """What has come of one version, and how a peer adds to it.

    Args:
        wanted: The version.
        have: Digest of this peer's newest version of it.
        station: Where it is fetched to.

    Attributes:
        download: What has come, once a peer has offered anything.
        unchanged: The version offered, where that is what this peer has.
        have: Digest of the version that deltas may start from, or that nothing need come of.
        max_deltas: Most of them that help.
        relays: All who share it out among themselves; nobody once that has failed.
        num_peers: Those left that have it for certain, relays aside.
        changed: Fires when there is an offer.
    """

    def __init__(self, wanted: Wanted, have: str, station: Station) -> None:
        self.wanted, self.have, self._station = wanted, have, station
        self.max_deltas = wanted.max_deltas if have else 0
        self.relays = wanted.relays if station.peer_id in wanted.relays and len(wanted.relays) > 1 else ()
        self.num_peers = 1
        self.download: Download | None = None
        self.unchanged: Version | None = None
        self.changed = Signal()
        self._turn: asyncio.Future | None = None
        self._turn_of = "", 0
        self._is_sent_at_once = False

    @property
    def slow_seconds(self) -> float:
        """How long a range may take before another peer helps; relays are no faster than what they pass on comes."""
        return RELAYED_SECONDS if self.relays else SLOW_SECONDS

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing."""
        return self.unchanged is not None or (self.download is not None and self.download.is_complete)

    def drop(self) -> None:
        """Throw away what has come."""
        if self.download is not None:
            self.download.close()
            self._station.share(self.wanted.name, None)
        self.download = self.unchanged = None

    def close(self) -> None:
        """Let the next version have its turn."""
        self.drop()
        if self._turn is not None and not self._turn.cancel():
            self._station.turns.release(*self._turn_of)
        self._turn = None

    async def run(self, candidate: Candidate, deadline: float) -> None:
        """Fetch from one peer whatever is missing, until nothing is.

        Raises:
            BusyError: it has no time.
            AbsentError: it does not have what is wanted.
            CutShortError: it broke off, or must be asked anew.
            TimeoutError: it was silent for too long.
            ExchangeError: it refuses to answer, or sends something else.
            RecordError: its version is not what its author signed.
        """
        loop = asyncio.get_running_loop()
        while True:
            request = self._request(min(max(0.0, deadline - loop.time()), MAX_WAIT_SECONDS))
            channel = await self._station.connect(candidate.peer)
            with contextlib.closing(channel), self._sent_at_once(request):
                await channel.send_text(request.model_dump_json())
                offer = self._check(request, Answer.parse(await channel.receive_text()))
                if offer is None:
                    return
                version, answer, num_bytes = offer
                candidate.has_offered, began = True, loop.time()
                await self._take_turn(candidate.peer, num_bytes)
                is_first = self.download is None
                if loop.time() - began < STALE_SECONDS and (is_first or not request.at_once):
                    download = self._join(candidate, version, answer, num_bytes, deadline)
                    return await self._receive_all(channel, candidate, download, at_once=request.at_once)

    @contextlib.contextmanager
    def _sent_at_once(self, request: Request) -> Iterator[None]:
        """Let nobody else send everything unasked while one peer may."""
        self._is_sent_at_once |= request.at_once
        try:
            yield
        finally:
            self._is_sent_at_once &= not request.at_once

    def _check(self, request: Request, answer: Answer) -> tuple[Version, Answer, int] | None:
        """Return what a peer offers, and its bytes; None if nothing need come, for nothing has changed."""
        if answer.state == "busy":
            raise BusyError("is busy")
        if answer.state in ("absent", "refused"):
            kind = AbsentError if answer.state == "absent" else ExchangeError
            raise kind(f"has no version of round {self.wanted.min_round} ({answer.state})")
        version = Version.verify(answer.version, self._station.run_id)
        self.wanted.check(version)
        if answer.state != "same":
            return version, answer, self.wanted.payload_bytes(version, answer, request.max_deltas)
        if not self.have or version.digest != self.have:  # guard: nothing-changed
            raise ExchangeError("says that nothing has changed, which is not so")
        self.unchanged = version
        return None

    def _request(self, seconds: float) -> Request:
        known, is_small = self.download, self.wanted.num_bytes <= AT_ONCE_BYTES
        return Request(
            name=self.wanted.name,
            min_round=self.wanted.min_round,
            timeout=seconds,
            have=self.have,
            max_deltas=self.max_deltas if known is None else known.answer.num_deltas,
            digest="" if known is None else known.version.digest,
            at_once=known is None and not self._is_sent_at_once and not self.relays and is_small,
        )

    async def _take_turn(self, peer: str, num_bytes: int) -> None:
        if not self.relays:  # who waits for another that waits for its turn might wait for ever
            if self._turn is None:
                self._turn_of = peer, num_bytes
                self._turn = asyncio.ensure_future(self._station.turns.acquire(peer, num_bytes))
            await asyncio.shield(self._turn)

    def _join(
        self, candidate: Candidate, version: Version, answer: Answer, num_bytes: int, deadline: float
    ) -> Download:
        """Return the download to which a peer can add what it offers: a new one, if the one so far gets nowhere."""
        known = self.download
        if known is not None:
            offered = version.digest, answer.state, num_bytes
            if offered == (known.version.digest, known.answer.state, known.num_bytes):
                return known
            if not known.is_hopeless(deadline):
                raise CutShortError("offers another version than those before")
            self.drop()
        links, me = self.wanted.uplinks, self._station.peer_id
        shares = shares_of(self.relays, me, candidate.peer, links) if self.relays else None
        self.download = Download(answer, version, self.have, num_bytes, shares)
        if shares:
            self._station.share(version.name, self.download)
        self.changed.fire()
        return self.download

    async def _receive_all(self, channel: Channel, candidate: Candidate, download: Download, *, at_once: bool) -> None:
        asked: list[Range] = []
        if at_once and (everything := download.claim(candidate.peer, download.num_bytes)):
            asked.append(everything)
        try:
            while asked or not (download.is_complete or download.is_over):
                while len(asked) < RANGES_AHEAD:
                    range = self._claim(candidate, download, may_take_over=not asked)
                    if range is None:
                        break
                    asked.append(range)
                    await channel.send_range(range.start, range.requested)
                if asked:
                    await self._receive(channel, candidate, download, asked[0])
                    download.give_back(asked.pop(0))
                else:
                    await download.wait(IDLE_SECONDS)
        finally:
            for range in asked:
                download.give_back(range)

    def _claim(self, candidate: Candidate, download: Download, *, may_take_over: bool) -> Range | None:
        is_relay = candidate.is_relay and self.num_peers > 0  # without a holder, relays may have it all by now
        most = RANGE_BYTES if self.num_peers > 1 and not self.relays else download.num_bytes
        range = download.claim(candidate.peer, most, only_its_share=is_relay)
        return (
            download.take_over(candidate.peer, self.slow_seconds)
            if range is None and may_take_over and not is_relay
            else range
        )

    async def _receive(self, channel: Channel, candidate: Candidate, download: Download, range: Range) -> None:
        range.began = asyncio.get_running_loop().time()
        while range.start < range.requested:
            kind, num_bytes = await channel.receive_header()
            if kind == BUSY:
                raise BusyError("broke off: is busy")
            if kind != DATA or not 0 < num_bytes <= range.requested - range.start:  # guard: bytes-wanted
                raise ExchangeError(f"sent {num_bytes} bytes, {kind!r}, more than were asked for")
            self._station.rests.was_free(candidate.peer)
            while num_bytes:
                data = await channel.read(num_bytes)
                num_bytes -= len(data)
                candidate.num_bytes += len(data)
                self._station.count(len(data))
                download.take(range, data)
                if download.is_over or range.start == range.stop < range.requested:
                    raise CutShortError("was overtaken")
