"""Real peers for tests: each a process of its own with p2pd, DHT and averager on loopback, driven through a pipe."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import torch

from spes_p2p.config import RoundConfig
from spes_p2p.swarm.base import Contribution, RoundResult
from spes_p2p.swarm.identity import Identity
from spes_p2p.swarm.roster import SHARED, Member, slot_name

RUN_ID = "run"
ROUNDS = RoundConfig(matchmaking_seconds=3.0, averaging_seconds=6.0, lease_seconds=6.0, heartbeat_seconds=1.5)
NUMELS = {SHARED: 1_500_000, "slot": 700}
"""Shared deltas of several parts per reducer, so that a peer can die between two of them; slots of a single part."""
MAX_SLOTS = 4
START_SECONDS = 120.0
CALL_SECONDS = 60.0
"""Longest that a call may take: two attempts with all their phases, and as much again for a busy machine."""
MEETING_SECONDS = 10.0
"""Time for everybody to show up, on a machine whose cores are shared; who is complete does not wait for it."""

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["spes_p2p.swarm.manifest"])


class PeerProcess:
    """One peer: a Node and a HivemindSwarm in a process that can be killed.

    Args:
        directory: Holds the identity and the versions.
        initial_peers: Addresses to join; none starts a swarm.
        is_rogue: Misbehaves on demand, see `misbehaving.py`.
    """

    def __init__(self, directory: Path, initial_peers: Sequence[str] = (), *, is_rogue: bool = False) -> None:
        self.identity = Identity(directory / "key")
        self.peer_id = self.identity.peer_id
        self._pipe, theirs = _processes.Pipe()
        self.process = _processes.Process(target=_serve, args=(theirs, directory, list(initial_peers), is_rogue))
        self.process.start()
        theirs.close()
        self.addresses: list[str] = []

    def wait_until_ready(self) -> PeerProcess:
        self.addresses = self.finish(START_SECONDS)
        return self

    def begin(self, method: str, *args, **kwargs) -> None:
        """Call a method of the swarm; `finish` returns its result."""
        self._pipe.send((method, args, kwargs))

    def finish(self, timeout: float = CALL_SECONDS):
        """Return what the call under way returned, or raise what it raised; it must end within `timeout` seconds."""
        assert self._pipe.poll(timeout), f"{self.peer_id[-6:]} did not answer within {timeout} s"
        is_fine, result = self._pipe.recv()
        if not is_fine:
            raise RuntimeError(result)
        return _with_tensors(result)

    def call(self, method: str, *args, **kwargs):
        self.begin(method, *args, **kwargs)
        return self.finish()

    def descendants(self) -> list[psutil.Process]:
        """Return its p2pd, DHT and averager processes."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(CALL_SECONDS)

    def close(self) -> None:
        """Let it leave; kill it if it does not."""
        self._pipe.close()
        self.process.join(20)
        if self.process.is_alive():
            self.kill()


def _serve(pipe: Connection, directory: Path, initial_peers: list[str], is_rogue: bool) -> None:
    from spes_p2p.swarm import hivemind_swarm
    from spes_p2p.swarm.node import Node

    multiprocessing.set_start_method("fork", force=True)  # hivemind's processes are forks, of a child of any kind
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    if is_rogue:
        import misbehaving

        hivemind_swarm.SparseAverager = misbehaving.SparseAverager
    try:
        swarm = hivemind_swarm.HivemindSwarm(
            Node(Identity(directory / "key"), RUN_ID, initial_peers=initial_peers), directory / "versions"
        )
        swarm.enter(ROUNDS, bundle_numel=NUMELS, averaged_numel=NUMELS, max_slots=MAX_SLOTS)
    except Exception as error:
        pipe.send((False, repr(error)))
        raise
    pipe.send((True, swarm.node.addresses()))
    while True:
        try:
            method, args, kwargs = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, _with_arrays(_call(swarm, method, args, kwargs))))
        except Exception as error:  # noqa: BLE001 - the test decides what to make of it
            pipe.send((False, repr(error)))
    swarm.close()


def _call(swarm, method: str, args: tuple, kwargs: dict):
    if method == "misbehave":
        return swarm._averager.misbehave(*args)
    if method == "average":
        args = (Contribution(args[0], _with_tensors(args[1])),)
    if method == "publish":
        args = (args[0], _with_tensors(args[1]))
    return getattr(swarm, method)(*args, **kwargs)


# Tensors would cross a pipe as shared memory that dies with its sender; arrays cross as bytes.


def _with_arrays(value):
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, RoundResult):
        return dataclasses.replace(value, committed=_with_arrays(dict(value.committed)))
    if isinstance(value, Mapping):
        return {key: _with_arrays(item) for key, item in value.items()}
    return value


def _with_tensors(value):
    if type(value).__module__ == "numpy":
        return torch.from_numpy(value)
    if isinstance(value, RoundResult):
        return dataclasses.replace(value, committed=_with_tensors(value.committed))
    if isinstance(value, dict):
        return {key: _with_tensors(item) for key, item in value.items()}
    return value


# ---------------------------------------------------------------------- swarms of them


def start_swarm(directory: Path, count: int) -> list[PeerProcess]:
    """Return honest peers that know each other."""
    first = PeerProcess(directory / "peer0").wait_until_ready()
    rest = [PeerProcess(directory / f"peer{i}", first.addresses) for i in range(1, count)]
    return [first, *(peer.wait_until_ready() for peer in rest)]


def close_all(peers: Iterable[PeerProcess]) -> None:
    threads = [threading.Thread(target=peer.close) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def contribution(peer_id: str, generator: torch.Generator, *, slots=(), tokens=100, **changes) -> Contribution:
    """Return a contribution with random deltas; its round and anchors are everybody's unless changed."""
    names = [SHARED, *map(slot_name, slots)]
    fields = {
        "round": 3,
        "anchors": dict.fromkeys(names, "5" * 16),
        "tokens_per_second": 10.0,
        "ready_at": time.time(),
        "sync_seconds": 0.0,
    }
    member = Member(peer_id=peer_id, tokens=tokens, slots=tuple(slots), **(fields | changes))
    deltas = {name: torch.randn(NUMELS[SHARED if name == SHARED else "slot"], generator=generator) for name in names}
    return Contribution(member, deltas)


def begin_average(peers, contributions, *, expected: int, meeting_seconds: float = MEETING_SECONDS) -> None:
    for peer, item in zip(peers, contributions, strict=True):
        starts_at = time.time() + meeting_seconds
        peer.begin("average", item.member, _with_arrays(item.deltas), expected=expected, starts_at=starts_at)


def average(peers, contributions, **kwargs) -> list[RoundResult]:
    """Let all peers average at once; return their results in the same order."""
    begin_average(peers, contributions, **kwargs)
    return [peer.finish() for peer in peers]


def plain_mean(contributions: Sequence[Contribution], name: str) -> torch.Tensor:
    """Return the weighted mean of what the contributors bring of a group, in float64."""
    parts = [(item.member.tokens, item.deltas[name].double()) for item in contributions if name in item.deltas]
    return sum(tokens * part for tokens, part in parts) / sum(tokens for tokens, _ in parts)
