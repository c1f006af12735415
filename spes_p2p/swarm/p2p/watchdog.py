"""Keeps a peer connected: dials lost peers again, and notices when p2pd or the DHT has died."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, P2PDaemonError

from spes_p2p.swarm.p2p.node import Node

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 4.0
"""Pause between two checks."""
STOP_SECONDS = 1.0
MAX_SILENT_CHECKS = 3
"""Checks in a row without an answer after which a running p2pd counts as dead; a busy machine may miss one or two."""


class Watchdog:
    """Checks every few seconds that p2pd and the DHT live, and dials the known peers that are not connected.

    A DHT node forgets each peer that fails to answer once, and dials its initial peers only at its start. After an
    outage of its link it has forgotten the swarm and the swarm has forgotten it; without these dials two halves of a
    swarm would stay apart for ever.

    Attributes:
        death: What has died; "" as long as all is well.
        neighbours: Other peers that the DHT knew at the last check.
    """

    def __init__(self, node: Node) -> None:
        self.death = ""
        self.neighbours = 0
        self._node = node
        self._num_silent = 0
        self._alone_since: float | None = None
        self._act: Callable[[], None] = lambda: None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to check."""
        self._thread.start()

    def on_death(self, act: Callable[[], None]) -> None:
        """Call `act`, in the watchdog's thread, when p2pd or the DHT dies; at once if one has died already."""
        self._act = act
        if self.death:
            act()

    def stop(self) -> None:
        """End the checks, before p2pd and the DHT are closed on purpose. Idempotent."""
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(STOP_SECONDS)

    @property
    def seconds_alone(self) -> float:
        """Time for which no peer has been within reach."""
        since = self._alone_since
        return 0.0 if since is None else time.monotonic() - since

    def check(self) -> str:
        """Check now; return what has died, or ""."""
        if not self.death:
            self.death = self._find_death()
        return self.death

    def _watch(self) -> None:
        while not self._stopped.wait(INTERVAL_SECONDS):
            death = self._find_death()
            if self._stopped.is_set():
                return
            if death:
                self.death = death
                log.error("%s", death)
                self._act()
                return
            self._reconnect()

    def _find_death(self) -> str:
        if not self._node.p2p.is_running():  # guard: never
            return f"p2pd, which connects this peer to others, has died ({self._node.p2p.ending}; docs/trouble.md#p2pd)"
        if not self._node.dht.is_alive():  # guard: never
            return "this peer's DHT process has died"
        if self._node.p2p.has_lost_sockets():
            return f"p2pd's sockets in {self._node.p2p.folder} were deleted; keep cleaners of temporary files away"
        try:
            answers = self._node.p2pd_answers(INTERVAL_SECONDS)
        except TimeoutError:  # this machine stood still, which says nothing of p2pd
            return ""
        except Exception:  # of any type: without a watch, no dead p2pd would be noticed  # guard: never
            log.exception("could not ask p2pd whether it lives")
            answers = False
        self._num_silent = 0 if answers else self._num_silent + 1
        return "p2pd does not answer any more" if self._num_silent >= MAX_SILENT_CHECKS else ""  # guard: never

    def _reconnect(self) -> None:
        try:
            self.neighbours = self._node.ping(self._node.peerstore.addresses())
        except (OSError, EOFError, ControlFailure, P2PDaemonError):
            return  # the DHT's process is too busy to answer, or p2pd has died since: the next check tells
        except Exception:  # of any type: without a watch, no lost peer would be called  # guard: never
            log.exception("could not ping the known peers")
            return
        if self.neighbours:
            if self._alone_since is not None:
                log.info("peers are within reach again after %.0f s", self.seconds_alone)
            self._alone_since = None
        elif self._alone_since is None and self._node.peerstore.addresses():
            self._alone_since = time.monotonic()
