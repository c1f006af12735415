"""One version comes here, from as many peers as that takes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.exchange.channel import CutShortError
from spes_p2p.swarm.exchange.downloads import RANGE_BYTES, Download
from spes_p2p.swarm.exchange.fetching import AT_ONCE_BYTES, AbsentError, BusyError, Candidate, Fetch, Station
from spes_p2p.swarm.exchange.messages import Wanted

log = logging.getLogger(__name__)

MAX_SEEDS = 4
"""Peers that one version comes from at a time, where it is large."""
PATIENCE_SECONDS = 2.0
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

    def __init__(self, wanted: Wanted, peers: Sequence[str], have: str, station: Station) -> None:
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
                await self._fetch.changed.wait(min([deadline, now + PATIENCE_SECONDS / 2, *resting]) - now)
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
        promising = [c for c in asked if c.has_offered or now - c.asked < PATIENCE_SECONDS]
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
            elif isinstance(error, CutShortError) and candidate.breaks < MAX_BREAKS:
                candidate.not_before = now + BREAK_SECONDS
            elif isinstance(error, AbsentError) and self._passes_on(candidate):
                candidate.not_before = now + PATIENCE_SECONDS
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
