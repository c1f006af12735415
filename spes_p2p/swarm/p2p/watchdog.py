"""Looks after a peer's connections: finds those it has lost again, and notices when its own p2pd has died."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from spes_p2p.swarm.p2p.node import Node

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 4.0
"""Between two looks; one that dials in vain takes 3 s more, so a peer that is lost is called about every 5 s."""
STOP_SECONDS = 1.0
MAX_SILENT_CHECKS = 3
"""Looks in a row at which p2pd runs but does not answer, until it counts as dead: a busy machine skips one or two."""


class Watchdog:
    """Looks every few seconds whether p2pd and the DHT live and the others are within reach.

    A DHT node forgets whoever fails to answer once, and asks its initial peers only at its start. Where its own link
    was down, it has forgotten everybody and been forgotten by all: two halves of a swarm would stay apart for ever. So
    all peers known are called until the DHT knows them again.

    Args:
        node: What it looks after.
    """

    def __init__(self, node: Node) -> None:
        self.death = ""
        """What has died, once something has."""
        self.neighbours = 0
        """Other peers that the DHT knew at the last look."""
        self._node = node
        self._silences = 0
        self._alone_since: float | None = None
        self._on_death: Callable[[], None] = lambda: None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look; not before the averager has been forked, for a fork of a thread's locks stays locked."""
        self._thread.start()

    def on_death(self, act: Callable[[], None]) -> None:
        """Call `act`, in the watchdog's thread, when p2pd or the DHT has died, whether it does later or already has."""
        self._on_death = act
        if self.death:
            act()

    def stop(self) -> None:
        """Look no more: what dies from now on is meant to. Idempotent."""
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(STOP_SECONDS)

    @property
    def seconds_alone(self) -> float:
        """For how long nobody has been within reach."""
        since = self._alone_since
        return 0.0 if since is None else time.monotonic() - since

    def check(self) -> str:
        """Return what has died, looking now; "" if all is well."""
        if not self.death:
            self.death = self._dead()
        return self.death

    def _watch(self) -> None:
        while not self._stopped.wait(INTERVAL_SECONDS):
            dead = self._dead()
            if self._stopped.is_set():
                return
            if dead:
                self.death = dead
                log.error("%s", dead)
                self._on_death()
                return
            self._look_around()

    def _dead(self) -> str:
        if not self._node.p2p.is_running():  # guard: daemon-death
            return f"p2pd, through which this peer talks to all others, has died ({self._node.p2p.ending})"
        if not self._node.dht.is_alive():  # guard: dht-death
            return "this peer's DHT process has died"
        self._silences = 0 if self._node.p2pd_answers(INTERVAL_SECONDS) else self._silences + 1
        return "p2pd does not answer any more" if self._silences >= MAX_SILENT_CHECKS else ""  # guard: daemon-silence

    def _look_around(self) -> None:
        try:
            self.neighbours = self._node.ping(self._node.known.addresses())
        except OSError:
            return  # the DHT's process is too busy to say, or p2pd has died since: the next look tells
        if self.neighbours:
            if self._alone_since is not None:
                log.info("peers are within reach again after %.0f s", self.seconds_alone)
            self._alone_since = None
        elif self._alone_since is None and self._node.known.addresses():
            self._alone_since = time.monotonic()
