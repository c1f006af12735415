"""What runs in a real peer's process: a Node and a HivemindSwarm that do what comes through a pipe."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from hivemind.utils.mpfuture import MPFuture

from spes_p2p.codecs import Segment
from spes_p2p.config import RoundConfig
from spes_p2p.swarm.base import Contribution, RoundResult
from spes_p2p.swarm.identity import Identity
from spes_p2p.swarm.outcome import Attempt
from spes_p2p.swarm.processes import die_with_parent
from spes_p2p.swarm.roster import SHARED
from spes_p2p.swarm.wire import Vectors

RUN_ID = "run"
ROUNDS = RoundConfig(matchmaking_seconds=3.0, averaging_seconds=6.0, lease_seconds=6.0, heartbeat_seconds=1.5)
NUMELS = {SHARED: 1_500_000, "slot": 700}
"""Shared deltas of several parts per reducer, so that a peer can die between two of them; slots of a single part."""
MAX_SLOTS = 4


class Setting(NamedTuple):
    """What a peer is started with.

    Attributes:
        directory: Holds the identity and the versions.
        initial_peers: Addresses to join; none starts a swarm.
        codec: How deltas travel.
        namespace: Network namespace to live in; none is this machine's own.
        host: Address to listen on.
        shared_numel: Elements of the shared delta.
    """

    directory: Path
    initial_peers: Sequence[str] = ()
    codec: str = "fp32"
    namespace: str | None = None
    host: str = "127.0.0.1"
    shared_numel: int = NUMELS[SHARED]

    @property
    def segments(self) -> dict[str, tuple[Segment, ...]]:
        """What its vectors consist of."""
        numels = NUMELS | {SHARED: self.shared_numel}
        return {kind: (Segment(numel, self.codec),) for kind, numel in numels.items()}


class AttemptNote(NamedTuple):
    """What a test may want to know of an attempt at a round that the round's result does not tell."""

    failure: str
    refused: Mapping[str, str]
    lost: frozenset[str]
    roster: tuple[str, ...]
    status: Mapping[str, str]
    matchmaking_seconds: float
    averaging_seconds: float

    @classmethod
    def of(cls, attempt: Attempt) -> AttemptNote:
        roster = tuple(member.peer_id for member in attempt.roster)
        times = attempt.matchmaking_seconds, attempt.averaging_seconds
        return cls(attempt.failure, dict(attempt.refused), attempt.lost, roster, dict(attempt.status), *times)


def serve(pipe: Connection, setting: Setting, gate: Connection | None) -> None:
    """Be a peer, and do what comes through the pipe; with a gate a rogue one, see `misbehaving.py`.

    It dies with the fork server, and so with the test: a peer that is frozen then would never read that its pipe ended.
    """
    die_with_parent(os.getppid())
    if setting.namespace is not None:
        from benchmarks.testbed import enter_namespace

        enter_namespace(setting.namespace)
    from spes_p2p.swarm import hivemind_swarm
    from spes_p2p.swarm.node import Node

    MPFuture.reset_backend()  # its locks are inherited too: a peer that is killed would keep them from the others
    multiprocessing.set_start_method("fork", force=True)  # hivemind's processes are forks, of a child of any kind
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(process)d %(name)s: %(message)s")
    torch.set_num_threads(1)
    if gate is not None:
        import misbehaving

        misbehaving.open_gate(gate)
        hivemind_swarm.SparseAverager = misbehaving.SparseAverager
    try:
        node = Node(Identity(setting.directory / "key"), RUN_ID, initial_peers=setting.initial_peers, host=setting.host)
        swarm = hivemind_swarm.HivemindSwarm(node, setting.directory / "versions")
        swarm.enter(ROUNDS, Vectors(NUMELS, setting.segments), max_slots=MAX_SLOTS)
    except Exception as error:
        pipe.send((False, repr(error)))
        raise
    notes = _take_notes(swarm)
    pipe.send((True, swarm.node.addresses()))
    while True:
        try:
            method, args, kwargs = pipe.recv()
        except EOFError:
            break
        try:
            result = notes[:] if method == "notes" else with_arrays(_call(swarm, method, args, kwargs))
            pipe.send((True, result))
        except Exception as error:  # noqa: BLE001 - the test decides what to make of it
            pipe.send((False, repr(error)))
    swarm.close()


def _take_notes(swarm) -> list[AttemptNote]:
    """Return a list of the attempts at the latest round, the current one's while it lasts."""
    notes: list[AttemptNote] = []
    average, attempt = swarm.average, swarm._averager.attempt

    def noted_average(*args, **kwargs) -> RoundResult:
        notes.clear()
        return average(*args, **kwargs)

    def noted_attempt(*args, **kwargs) -> Attempt:
        made = attempt(*args, **kwargs)
        notes.append(AttemptNote.of(made))
        return made

    swarm.average, swarm._averager.attempt = noted_average, noted_attempt
    return notes


def _call(swarm, method: str, args: tuple, kwargs: dict):
    if method == "misbehave":
        return swarm._averager.misbehave(*args)
    if method == "average":
        args = (Contribution(args[0], with_tensors(args[1])),)
    if method == "publish":
        args = (args[0], with_tensors(args[1]))
    return getattr(swarm, method)(*args, **kwargs)


# Tensors would cross a pipe as shared memory that dies with its sender; arrays cross as bytes.


def with_arrays(value):
    """Return a value with arrays for its tensors."""
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, RoundResult):
        return dataclasses.replace(value, committed=with_arrays(dict(value.committed)))
    if isinstance(value, Mapping):
        return {key: with_arrays(item) for key, item in value.items()}
    return value


def with_tensors(value):
    """Return a value with tensors for its arrays."""
    if type(value).__module__ == "numpy":
        return torch.from_numpy(value)
    if isinstance(value, RoundResult):
        return dataclasses.replace(value, committed=with_tensors(value.committed))
    if isinstance(value, dict):
        return {key: with_tensors(item) for key, item in value.items()}
    return value
