"""One version comes here, from as many peers as that takes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.exchange.downloads import RANGE_BYTES, Download, DownloadBudget, Range, shares_of
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

log = logging.getLogger(__name__)

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.25, 5.0
"""Pauses after BUSY double, and are drawn at random, so that those turned away do not return together."""
PROBE_SECONDS = 1.0
"""How long the one that asks first after a pause is awaited before another does."""


class Backoff:
    """When busy peers may be asked again; times are the event loop's seconds.

    A peer that has no time for one download has none for the others either: one of them asks again, and once that gets
    something, they all do.
    """

    def __init__(self) -> None:
        self._rests: dict[str, _Rest] = {}

    def until(self, peer: str) -> float:
        """Return when a peer may be asked; 0 for one that was not busy."""
        return self._rests[peer].until if peer in self._rests else 0.0

    def was_busy(self, peer: str, now: float) -> None:
        """Note that it said BUSY."""
        rest = self._rests.setdefault(peer, _Rest())
        if rest.is_asked or now >= rest.until:  # else it has said so to several downloads at once
            rest.is_asked, rest.until = False, now + rest.pause * random.uniform(0.5, 1.0)
            rest.pause = min(2 * rest.pause, MAX_PAUSE_SECONDS)

    def asks(self, peer: str, now: float) -> None:
        """Note that a download asks it."""
        if peer in self._rests:
            self._rests[peer].is_asked, self._rests[peer].until = True, now + PROBE_SECONDS

    def was_free(self, peer: str) -> None:
        """Note that it sends something."""
        self._rests.pop(peer, None)


@dataclass
class _Rest:
    until: float = 0.0
    pause: float = MIN_PAUSE_SECONDS
    is_asked: bool = False


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


class PullContext(Protocol):
    """Where a pull takes place: what it needs of the exchange."""

    peer_id: str
    run_id: str
    turns: DownloadBudget
    """Limits how many versions are fetched at a time, and so the memory they take."""
    rests: Backoff
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

    def __init__(self, wanted: Wanted, have: str, station: PullContext) -> None:
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
            DisconnectedError: it broke off, or must be asked anew.
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
                raise DisconnectedError("offers another version than those before")
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
                    raise DisconnectedError("was overtaken")


MAX_SEEDS = 4
"""Peers that one version comes from at a time, where it is large."""
OFFER_SECONDS = 2.0
"""Time for a peer to make an offer before the next one is asked as well."""
RELAY_SECONDS = 5.0
"""Time for a relay to begin to pass on its share before that may come from others."""
BREAK_SECONDS = 0.25
"""Pause after a peer has broken off."""
MAX_BREAKS = 3
"""Times in a row that a peer may break off with next to nothing sent."""


class Pull:
    """Fetches one version.

    Args:
        wanted: What.
        peers: Who may have it; those named first are preferred.
        have: Digest of this peer's newest version of it.
        station: Where.
    """

    def __init__(self, wanted: Wanted, peers: Sequence[str], have: str, station: PullContext) -> None:
        self._wanted, self._station, me = wanted, station, station.peer_id
        self._fetch = Fetch(wanted, have, station)
        self._peers = [Candidate(peer) for peer in dict.fromkeys(peers) if peer != me]
        self._relays = [Candidate(peer, is_relay=True) for peer in self._fetch.relays if peer != me]
        self._fetch.num_peers = len(self._peers)
        self._suspect: Download | None = None
        self._reasons = ["nobody has it"]

    async def run(self, deadline: float) -> str:
        """Return why it could not be had by `deadline`, in the loop's seconds; nothing if it is here."""
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

    # ------------------------------------------------------------------ whom to ask

    async def _gather(self, deadline: float) -> None:
        """Ask peers until everything is here, nobody is left to ask, or the time is up."""
        loop = asyncio.get_running_loop()
        try:
            while not self._fetch.is_complete:
                self._collect(loop.time())
                now = loop.time()
                if now >= deadline:
                    late = [c.peer[-6:] for c in self._everybody() if c.task or self._rests_until(c)]
                    self._reasons.append(f"out of time, waiting for {', '.join(late) or 'nobody'}")
                    return
                if not self._everybody():
                    return
                self._ask(now, deadline)
                idle = [self._rests_until(c) for c in self._everybody() if c.task is None]
                resting = [until for until in idle if until > now]
                await self._fetch.changed.wait(min([deadline, now + OFFER_SECONDS / 2, *resting]) - now)
        finally:
            await self._stop()

    def _everybody(self) -> list[Candidate]:
        return [*self._peers, *(self._relays if self._is_relayed else ())]

    @property
    def _is_relayed(self) -> bool:
        return self._fetch.download is not None and len(self._relays) > 0 and self._suspect is None

    def _ask(self, now: float, deadline: float) -> None:
        """Ask more peers where those asked are too few, or slow to answer."""
        asked = [c for c in self._peers if c.task is not None]
        promising = [c for c in asked if c.has_offered or now - c.asked < OFFER_SECONDS]
        idle = [c for c in self._peers if c.task is None and self._rests_until(c) <= now]
        for candidate in idle[: max(0, min(self._num_wanted() - len(promising), MAX_SEEDS - len(asked)))]:
            self._start(candidate, now, deadline)
        if self._is_relayed and self._fetch.download is not None:
            for relay in self._relays:
                if relay.task is None and self._rests_until(relay) <= now:
                    self._start(relay, now, deadline)
                elif not relay.has_offered and relay.asked and now - relay.asked > RELAY_SECONDS:
                    self._fetch.download.release(relay.peer)

    def _rests_until(self, candidate: Candidate) -> float:
        return max(candidate.not_before, self._station.rests.until(candidate.peer))

    def _num_wanted(self) -> int:
        """Return how many peers to fetch from at once: one, unless much is to come, or it comes slowly."""
        if self._suspect is not None:
            return 1
        if self._fetch.download is not None and self._fetch.download.slowest(self._fetch.slow_seconds) is not None:
            return MAX_SEEDS
        num_bytes = self._wanted.num_bytes if self._fetch.download is None else self._fetch.download.num_bytes
        return MAX_SEEDS if num_bytes > AT_ONCE_BYTES and not self._relays else 1

    def _start(self, candidate: Candidate, now: float, deadline: float) -> None:
        candidate.asked, candidate.has_offered = now, False
        self._station.rests.asks(candidate.peer, now)
        candidate.task = asyncio.create_task(self._fetch.run(candidate, deadline))
        candidate.task.add_done_callback(lambda _: self._fetch.changed.fire())

    def _collect(self, now: float) -> None:
        """Decide what becomes of peers that have stopped sending."""
        for candidate in self._everybody():
            if candidate.task is None or not candidate.task.done():
                continue
            error, candidate.task = candidate.task.exception(), None
            if error is None:
                continue
            is_busy = isinstance(error, BusyError)  # which is how turns are taken, and nothing to tell anybody
            level = logging.DEBUG if is_busy else logging.INFO
            log.log(level, "could not pull %s from %s: %r", self._wanted.name, candidate.peer[-6:], error)
            self._reasons.append(f"{candidate.peer[-6:]}: {error!r}")
            is_useful = is_busy or candidate.num_bytes >= RANGE_BYTES
            candidate.breaks, candidate.num_bytes = 0 if is_useful else candidate.breaks + 1, 0
            if self._suspect is not None:
                self._fetch.drop()  # what two have sent could be blamed on neither
            elif self._fetch.download is not None:
                self._fetch.download.release(candidate.peer)
            if isinstance(error, BusyError):
                self._station.rests.was_busy(candidate.peer, now)
            elif isinstance(error, DisconnectedError) and candidate.breaks < MAX_BREAKS:
                candidate.not_before = now + BREAK_SECONDS
            elif isinstance(error, AbsentError) and self._passes_on(candidate):
                candidate.not_before = now + OFFER_SECONDS
            else:
                self._exclude({candidate.peer})

    def _passes_on(self, candidate: Candidate) -> bool:
        """Tell whether a peer has to fetch first what it is asked for; whoever makes it has it by now or never."""
        authors = self._wanted.authors
        return bool(authors) and candidate.peer not in authors and not candidate.is_relay

    def _exclude(self, peers: set[str]) -> None:
        self._peers = [c for c in self._peers if c.peer not in peers]
        self._relays = [c for c in self._relays if c.peer not in peers]
        self._fetch.num_peers = len(self._peers)

    async def _stop(self) -> None:
        tasks = [c.task for c in (*self._peers, *self._relays) if c.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for candidate in (*self._peers, *self._relays):
            candidate.task = None

    # ------------------------------------------------------------------ verifying

    async def _verify(self) -> bool:
        """Store what has come; if it is not what it should be, see to it that the next try goes otherwise."""
        version, download = self._fetch.unchanged, self._fetch.download
        try:
            if version is not None:
                await self._station.accept(version, None)
            else:
                assert download is not None
                await self._station.accept(download.version, download)
        except ExchangeError as error:
            self._blame(download if version is None else None, error)
            self._fetch.drop()
            return False
        if self._suspect is not None and download is not None:
            liars = sorted(self._suspect.unlike(download))
            log.warning("%s: %s sent other bytes than belong to it", self._wanted.name, ", ".join(liars))
        return True

    def _blame(self, download: Download | None, error: ExchangeError) -> None:
        self._fetch.relays, self._relays = (), []
        if download is None:
            self._fetch.have, self._fetch.max_deltas = "", 0
            return
        names = ", ".join(sorted(peer[-6:] for peer in download.senders))
        self._reasons.append(f"{names}: {error!r}")
        log.warning("%s from %s: %s", self._wanted.name, names, error)
        if download.answer.state == "deltas":
            self._fetch.max_deltas = 0
        elif len(download.senders) > 1:
            self._suspect = download
        else:
            self._exclude(download.senders)  # guard: bad-sender
