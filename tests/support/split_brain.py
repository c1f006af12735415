"""Real peers that lose each other, or their p2pd, and how long it takes until that is mended or seen."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence

import psutil
from real_peers import PeerProcess

FREEZE_SECONDS = 5.0
PATIENCE_SECONDS = 60.0
"""Twice what is promised."""


def split_and_heal(half: Sequence[PeerProcess], other: Sequence[PeerProcess]) -> float:
    """Let two halves of a swarm forget each other; return the seconds until everybody knows everybody again.

    Each half in turn is frozen, all its processes, while the others find that it does not answer. What lay in sockets
    when they thaw makes some of them known again, so in the end those are forgotten by hand: time counts from the
    moment when nobody knows anybody of the other half.

    Raises:
        AssertionError: they do not forget, or do not find each other.
    """
    with frozen(half):
        _wait_until_forgotten(half, other)
    with frozen(other):
        _wait_until_forgotten(other, half)
    _forget(half, other)
    began = time.monotonic()
    while lost := [(one, two) for one in (*half, *other) for two in _strangers(one, (*half, *other))]:
        assert time.monotonic() - began < PATIENCE_SECONDS, f"{len(lost)} pairs did not find each other again"
        threading.Event().wait(0.2)
    return time.monotonic() - began


def seconds_until_death_is_seen(peer: PeerProcess) -> float:
    """Kill a peer's p2pd with SIGKILL; return the seconds until the peer knows.

    Raises:
        AssertionError: it never does.
    """
    (p2pd,) = (process for process in peer.descendants() if process.name() == "p2pd")
    p2pd.kill()
    began = time.monotonic()
    while not peer.call("death"):
        assert time.monotonic() - began < PATIENCE_SECONDS, "nobody noticed that p2pd is dead"
        threading.Event().wait(0.1)
    return time.monotonic() - began


@contextlib.contextmanager
def frozen(peers: Sequence[PeerProcess]) -> Iterator[None]:
    """Stop all processes of peers, for five seconds at least."""
    began = time.monotonic()
    processes = [process for peer in peers for process in (psutil.Process(peer.process.pid), *peer.descendants())]
    try:
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        yield
        threading.Event().wait(max(0.0, FREEZE_SECONDS - (time.monotonic() - began)))
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def _wait_until_forgotten(peers: Sequence[PeerProcess], others: Sequence[PeerProcess]) -> None:
    """Return when none of `others` knows any of `peers`."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(len(_strangers(other, peers)) < len(peers) for other in others):
        assert time.monotonic() < deadline, "a node remembers whoever has not answered for a minute"
        threading.Event().wait(0.2)


def _forget(half: Sequence[PeerProcess], other: Sequence[PeerProcess]) -> None:
    """Let all forget those of the other half, until all have at once."""
    pairs = [(peer, [one.peer_id for one in far]) for near, far in ((half, other), (other, half)) for peer in near]
    for _ in range(50):
        for peer, far in pairs:
            peer.call("forget", far)
        if all(len(peer.call("strangers", far)) == len(far) for peer, far in pairs):
            return
    raise AssertionError("the halves did not forget each other")


def _strangers(peer: PeerProcess, others: Sequence[PeerProcess]) -> list[str]:
    return peer.call("strangers", [other.peer_id for other in others if other is not peer])
