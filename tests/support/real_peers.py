"""Real peers for tests: each a process of its own with p2pd and DHT, driven through a pipe."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path

import psutil
import torch
from peer_server import NO_START, NUMELS, RUN_ID, Setting, serve, with_arrays, with_tensors

from spes_p2p.swarm.averaging.encoding import Contribution
from spes_p2p.swarm.averaging.outcome import RoundResult
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.p2p.identity import Identity, hashed_peer_id
from spes_p2p.swarm.roster import Member

__all__ = ["NUMELS", "RUN_ID"]

START_SECONDS = 120.0
CALL_SECONDS = 60.0
"""Longest that a call may take: two attempts with all their phases, and as much again for a busy machine."""
MEETING_SECONDS = 10.0
"""Time for everybody to show up, on a machine whose cores are shared; who is complete does not wait for it."""

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["spes_p2p.swarm.manifest"])


_voters: dict[tuple[str, ...], tuple[str, ...]] = {}
"""Voters of the swarm that one joins through these addresses."""


def identities(directory: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Make the keys of peers that are still to be started; return their ids."""
    return tuple(Identity(directory / name / "key").peer_id for name in names)


class PeerProcess:
    """One peer: a Node and a HivemindSwarm in a process that can be killed.

    Args:
        directory: See `Setting`.
        initial_peers: See `Setting`.
        is_rogue: Misbehaves on demand, see `misbehaving.py`.
        setting: The rest of the `Setting`.
    """

    def __init__(
        self, directory: Path, initial_peers: Sequence[str] = (), *, is_rogue: bool = False, **setting: object
    ) -> None:
        self.identity = Identity(directory / "key")
        self.peer_id = self.identity.peer_id
        voters = setting.pop("voters", None) or _voters.get(tuple(initial_peers)) or (self.peer_id,)
        self.voters = tuple(voters)
        self.pipe, theirs = _processes.Pipe()
        self.gate, their_gate = _processes.Pipe() if is_rogue else (None, None)
        settings = Setting(directory, list(initial_peers), voters=self.voters, **setting)
        self.process = _processes.Process(target=serve, args=(theirs, settings, their_gate))
        self.process.start()
        theirs.close()
        if their_gate is not None:
            their_gate.close()
        self.addresses: list[str] = []

    def wait_until_ready(self) -> PeerProcess:
        self.addresses = self.finish(START_SECONDS)
        _voters[tuple(self.addresses)] = self.voters
        return self

    def begin(self, method: str, *args, **kwargs) -> None:
        """Call a method of the swarm; `finish` returns its result."""
        self.pipe.send((method, args, kwargs))

    def finish(self, timeout: float = CALL_SECONDS):
        """Return what the call under way returned, or raise what it raised; it must end within `timeout` seconds."""
        assert self.pipe.poll(timeout), f"{self.peer_id[-6:]} did not answer within {timeout} s"
        is_fine, result = self.pipe.recv()
        if not is_fine:
            raise RuntimeError(result)
        return with_tensors(result)

    def is_done(self) -> bool:
        """Whether `finish` would return at once."""
        return self.pipe.poll()

    def call(self, method: str, *args, **kwargs):
        self.begin(method, *args, **kwargs)
        return self.finish()

    def descendants(self) -> list[psutil.Process]:
        """Return its p2pd and DHT processes."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(CALL_SECONDS)

    def close(self) -> None:
        """Let it leave; kill it if it does not."""
        self.pipe.close()
        self.process.join(20)
        if self.process.is_alive():
            self.kill()


# ---------------------------------------------------------------------- swarms of them


def start_swarm(directory: Path, count: int, codec: str = "fp32", **setting: object) -> list[PeerProcess]:
    """Return honest peers that know each other, and decide the first round."""
    setting = {"voters": identities(directory, (f"peer{i}" for i in range(count))), **setting}
    first = PeerProcess(directory / "peer0", codec=codec, **setting).wait_until_ready()
    rest = [PeerProcess(directory / f"peer{i}", first.addresses, codec=codec, **setting) for i in range(1, count)]
    return [first, *(peer.wait_until_ready() for peer in rest)]


def close_all(peers: Iterable[PeerProcess]) -> None:
    threads = [threading.Thread(target=peer.close) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def contribution(
    peer_id: str,
    generator: torch.Generator,
    *,
    slots=(),
    tokens=100,
    shared_numel=NUMELS[SHARED],
    slot_numel=NUMELS["slot"],
    **changes,
) -> Contribution:
    """Return a contribution with random deltas; it starts from the last certificate unless changed."""
    names = [SHARED, *map(VectorName.of_slot, slots)]
    fields = {
        "round": 0,
        "previous": NO_START,
        "tokens_per_second": 10.0,
        "ready_at": time.time(),
        "sync_seconds": 0.0,
    }
    member = Member(peer_id=peer_id, tokens=tokens, slots=tuple(slots), **(fields | changes))
    numels = {name: shared_numel if name == SHARED else slot_numel for name in names}
    deltas = {name: torch.randn(numel, generator=generator) for name, numel in numels.items()}
    return Contribution(member, deltas)


def begin_average(peers, contributions, *, expected: int, meeting_seconds: float = MEETING_SECONDS) -> None:
    """Let peers average; those that are expected beyond them do not come."""
    ids = [peer.peer_id for peer in peers]
    ids += [hashed_peer_id(f"absent {number}".encode()) for number in range(expected - len(ids))]
    for peer, item in zip(peers, contributions, strict=True):
        closes_from = time.time() + meeting_seconds
        peer.begin("average", item.member, with_arrays(item.deltas), expected=ids, closes_from=closes_from)


def finish_in_turn(peers: Iterable[PeerProcess], timeout: float) -> Iterator[tuple[PeerProcess, RoundResult]]:
    """Yield each peer and what its call under way returned, in the order in which they end; within `timeout` seconds.

    Raises:
        TimeoutError: not all of them did.
    """
    waiting = {peer.pipe: peer for peer in peers}
    deadline = time.monotonic() + timeout
    while waiting:
        ready = connection.wait(list(waiting), deadline - time.monotonic())
        if not ready:
            raise TimeoutError(f"{[peer.peer_id[-6:] for peer in waiting.values()]} did not answer in {timeout} s")
        for pipe in ready:
            peer = waiting.pop(pipe)
            yield peer, peer.finish()


def average(peers, contributions, **kwargs) -> list[RoundResult]:
    """Let all peers average at once; return their results in the same order."""
    begin_average(peers, contributions, **kwargs)
    return [peer.finish() for peer in peers]


def plain_mean(contributions: Sequence[Contribution], name: str) -> torch.Tensor:
    """Return the weighted mean of what the contributors bring of a group, in float64."""
    parts = [(item.member.tokens, item.deltas[name].double()) for item in contributions if name in item.deltas]
    return sum(tokens * part for tokens, part in parts) / sum(tokens for tokens, _ in parts)
