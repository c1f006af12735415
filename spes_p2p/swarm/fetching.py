"""One peer is asked for what is missing of one version."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Protocol

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.channel import BUSY, DATA, Channel, CutShortError, Signal
from spes_p2p.swarm.downloads import RANGE_BYTES, Download, Range, Turns, shares_of
from spes_p2p.swarm.messages import MAX_WAIT_SECONDS, Answer, Request, Wanted
from spes_p2p.swarm.versions import Version

LEAST_PAUSE_SECONDS = 0.25
RANGES_AHEAD = 2
"""Ranges that a peer was asked for at any time, so that it never waits for the next."""
SLOW_SECONDS, RELAYED_SECONDS = 2.0, 10.0
IDLE_SECONDS = 1.0
"""How often a peer with nothing left to send looks whether another is slow."""


class BusyError(ExchangeError):
    """The peer serves others; ask it again later."""


@dataclass
class Candidate:
    """A peer that may have it.

    Attributes:
        peer: Its id.
        is_relay: It fetches the version too, and passes its share on.
        not_before: When to ask it, in the loop's seconds.
        pause: How long to leave it alone after the next BUSY.
        breaks: How often it broke off.
        task: Asks it now.
        asked: Since when.
        has_offered: It has made an offer.
        num_bytes: What has come of it.
    """

    peer: str
    is_relay: bool = False
    not_before: float = 0.0
    pause: float = LEAST_PAUSE_SECONDS
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
        self._turn_bytes = 0

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
            self._station.turns.release(self._turn_bytes)
        self._turn = None

    async def run(self, candidate: Candidate, deadline: float) -> None:
        """Fetch from one peer whatever is missing, until nothing is.

        Raises:
            BusyError: it has no time.
            CutShortError: it broke off, or must be asked anew.
            TimeoutError: it was silent for too long.
            ExchangeError: it does not have what is wanted, or sends something else.
            RecordError: its version is not what its author signed.
        """
        remaining = max(0.0, deadline - asyncio.get_running_loop().time())
        request = self._request(min(remaining, MAX_WAIT_SECONDS))
        channel = await self._station.connect(candidate.peer)
        with contextlib.closing(channel):
            await channel.send_text(request.model_dump_json())
            answer = Answer.parse(await channel.receive_text())
            if answer.state == "busy":
                raise BusyError("is busy")
            if answer.state in ("absent", "refused"):
                raise ExchangeError(f"has no version of round {self.wanted.min_round} ({answer.state})")
            version = Version.verify(answer.version, self._station.run_id)
            self.wanted.check(version)
            if answer.state == "same":
                if not self.have or version.digest != self.have:
                    raise ExchangeError("says that nothing has changed, which is not so")
                self.unchanged = version
                return
            num_bytes = self.wanted.payload_bytes(version, answer, request.max_deltas)
            candidate.has_offered = True
            await self._take_turn(num_bytes)
            await self._receive_all(channel, candidate, self._join(candidate, version, answer, num_bytes, deadline))

    def _request(self, seconds: float) -> Request:
        known = self.download
        return Request(
            name=self.wanted.name,
            min_round=self.wanted.min_round,
            timeout=seconds,
            have=self.have,
            max_deltas=self.max_deltas if known is None else known.answer.num_deltas,
            digest="" if known is None else known.version.digest,
        )

    async def _take_turn(self, num_bytes: int) -> None:
        if not self.relays:  # who waits for another that waits for its turn might wait for ever
            if self._turn is None:
                self._turn = asyncio.ensure_future(self._station.turns.acquire(num_bytes))
                self._turn_bytes = num_bytes
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

    async def _receive_all(self, channel: Channel, candidate: Candidate, download: Download) -> None:
        asked: list[Range] = []
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
        while range.start < range.requested:
            kind, num_bytes = await channel.receive_header()
            if kind == BUSY:
                raise BusyError("broke off: is busy")
            if kind != DATA or not 0 < num_bytes <= range.requested - range.start:
                raise ExchangeError(f"sent {num_bytes} bytes, {kind!r}, more than were asked for")
            while num_bytes:
                data = await channel.read(num_bytes)
                num_bytes -= len(data)
                candidate.num_bytes += len(data)
                self._station.count(len(data))
                download.take(range, data)
                if download.is_over or range.start == range.stop < range.requested:
                    raise CutShortError("was overtaken")
