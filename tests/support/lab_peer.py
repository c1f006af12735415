"""A real peer in the laboratory: it writes down what it brings, commits and has, and dies where it is told to.

Everything runs as in `peers/run_peer.py`; methods of the swarm are wrapped, none is replaced.
"""

from __future__ import annotations

import functools
import json
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hivemind.utils.mpfuture import MPFuture
from torch import Tensor

from spes_p2p.cli import entry_point
from spes_p2p.codecs.vectors import digest, to_bytes
from spes_p2p.config import PeerConfig
from spes_p2p.peer import life as peer
from spes_p2p.swarm.averaging.group import Group
from spes_p2p.swarm.averaging.outcome import RoundResult
from spes_p2p.swarm.exchange import store as version_store
from spes_p2p.swarm.exchange.store import VersionStore, write_whole
from spes_p2p.swarm.exchange.versions import is_document
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.training import checkpoint
from spes_p2p.training.trainer import Trainer

PHASES = ("join", "download", "train", "matchmaking", "all-reduce", "decision", "checkpoint", "publish", "exit")
"""Where a peer can be told to die."""
STEP_SECONDS = 0.4
"""What a step takes longer than it must: slow machines, of which eight can share two cores."""
MEETING_SECONDS = 0.1
"""After which a peer that dies in matchmaking is amid it."""


@dataclass(frozen=True)
class Life:
    """How a peer is started.

    Attributes:
        argv: Its command line.
        history: Folder that its notes go to.
        log: File that its output goes to.
        phase: Where it dies as soon as it gets there; "" lives on.
    """

    argv: list[str]
    history: Path
    log: Path
    phase: str = ""


class Scribe:
    """Writes events down, one line of JSON each, and vectors by their digest.

    Args:
        folder: Shared by all peers and lives.
    """

    def __init__(self, folder: Path, pipe: Connection) -> None:
        self._folder, self._pipe, self._writing = folder, pipe, threading.Lock()
        self._path = folder / f"{time.time_ns()}.{os.getpid()}.jsonl"

    def note(self, event: str, **content: Any) -> None:
        line = json.dumps({"event": event, "at": time.time(), **content})
        with self._writing:
            with self._path.open("a") as file:
                file.write(line + "\n")
            self._pipe.send((event, content.get("round", 0)))

    def keep(self, flats: Mapping[str, Tensor]) -> dict[str, str]:
        """Store vectors; return their digests."""
        digests = {name: digest(flat) for name, flat in flats.items()}
        for name, flat in flats.items():
            path = self._folder / "vectors" / digests[name]
            if not path.exists():
                write_whole(path, to_bytes(flat))
        return digests


class Fate:
    """Where this peer is to die, as the laboratory says."""

    def __init__(self, pipe: Connection, phase: str) -> None:
        self._pipe, self._shared = pipe, mmap.mmap(-1, 1)  # inherited by forks
        self._told(phase)

    def _told(self, phase: str) -> None:
        self._shared[0] = PHASES.index(phase) + 1 if phase else 0

    def listen(self) -> None:
        """Take orders until the laboratory hangs up."""
        try:
            while True:
                self._told(self._pipe.recv())
        except EOFError:
            os.kill(os.getpid(), signal.SIGINT)

    def is_at(self, phase: str) -> bool:
        return self._shared[0] == PHASES.index(phase) + 1

    def strikes(self, phase: str, victim: int | None = None) -> None:
        """Die here, if this is the phase."""
        if self.is_at(phase):
            os.kill(victim or os.getpid(), signal.SIGKILL)


def live(life: Life, pipe: Connection) -> None:
    """Be a peer, to its end."""
    descriptor = os.open(life.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # as in a process that no server forked
    MPFuture.reset_backend()  # a killed process may hold the locks
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    scribe, fate = Scribe(life.history, pipe), Fate(pipe, life.phase)
    threading.Thread(target=fate.listen, daemon=True).start()
    record(scribe)
    place(fate)
    sys.argv = ["run_peer.py", *life.argv]
    entry_point(PeerConfig, peer.main)


# ---------------------------------------------------------------------- what is written down


def record(scribe: Scribe) -> None:
    """Have the swarm's methods write down what goes in and out."""

    def has(swarm: HivemindSwarm) -> None:
        versions = {name: [v.round, v.digest] for name, v in swarm.versions().items() if not is_document(name)}
        scribe.note("has", peer=swarm.peer_id, versions=versions)

    def agree(stock: Callable, swarm: HivemindSwarm, contribution, stage: Callable, **settings):
        deltas = scribe.keep(contribution.deltas)
        starts = {name: version.digest for name, version in swarm.versions().items()}
        scribe.note("brings", peer=swarm.peer_id, member=contribution.member.model_dump(), deltas=deltas)
        tried: dict[str, tuple[RoundResult, Mapping[VectorName, str]]] = {}
        """Results of attempts by the digest of what would follow of `shared`."""

        def staged(result: RoundResult):
            means = {name: mean.clone() for name, mean in result.means.items()}
            made = stage(result)
            if made is not None:
                tried[made[0].get(SHARED, "")] = replace(result, means=means), made[0]
            return made

        body = stock(swarm, contribution, staged, **settings)
        if body is not None:
            result, digests = tried.get(body.shared, (RoundResult(), {}))
            certified = {VectorName.of_slot(slot): state.digest for slot, state in enumerate(body.slots)}
            certified[SHARED] = body.shared
            own = [name for name, found in digests.items() if found == certified.get(name)]
            if own:
                scribe.note(
                    "commits",
                    peer=swarm.peer_id,
                    round=body.round,
                    last=result.roster.last.model_dump(),
                    roster=[entry.model_dump() for entry in result.roster],
                    means=scribe.keep({name: result.means[name] for name in own}),
                    before={name: starts[name] for name in own},
                )
        return body

    def publish(stock: Callable, swarm: HivemindSwarm, round: int, bundles):
        digests = scribe.keep({name: bundle for name, bundle in bundles.items() if name.is_weights})
        # Before any of it is there: it may die with a part of it, and others go on from that.
        scribe.note("publishes", peer=swarm.peer_id, round=round, versions=digests)
        versions = stock(swarm, round, bundles)
        has(swarm)
        return versions

    def pull(stock: Callable, swarm: HivemindSwarm, *args, **settings):
        failures = stock(swarm, *args, **settings)
        has(swarm)
        return failures

    def refuse(stock: Callable, swarm: HivemindSwarm, name: str, suspects) -> None:
        scribe.note("refuses", peer=swarm.peer_id, name=name, version=swarm.versions()[name].digest)
        stock(swarm, name, suspects)

    for method in (agree, publish, pull, refuse):
        wrap(HivemindSwarm, method.__name__, method)


def wrap(owner: Any, name: str, wrapper: Callable) -> None:
    """Put `wrapper(stock, ...)` in the place of a function."""
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def wrapped(*args, **settings):
        return wrapper(stock, *args, **settings)

    setattr(owner, name, wrapped)


# ---------------------------------------------------------------------- where it dies


def place(fate: Fate) -> None:
    """Have the peer die at the phase that it was told."""
    me, publishing = os.getpid(), threading.Event()

    def before(owner: Any, name: str, phase: str) -> None:
        def wrapper(stock: Callable, *args, **settings):
            fate.strikes(phase, me)
            return stock(*args, **settings)

        wrap(owner, name, wrapper)

    def decides(stock: Callable, *args, **settings):
        """Die with a result, before another peer hears of it."""
        outcome = stock(*args, **settings)
        fate.strikes("decision", me)
        return outcome

    def meets(stock: Callable, *args, **settings):
        if fate.is_at("matchmaking"):
            threading.Timer(MEETING_SECONDS, fate.strikes, ["matchmaking"]).start()
        return stock(*args, **settings)

    def publishes(stock: Callable, *args, **settings):
        publishing.set()
        try:
            return stock(*args, **settings)
        finally:
            publishing.clear()

    def writes(stock: Callable, path: Path, data) -> None:
        stock(path, data)
        if publishing.is_set():
            fate.strikes("publish")  # the first of several files is there

    def trains(stock: Callable, *args, **settings):
        fate.strikes("train")
        if fate.is_at("exit"):
            os.kill(me, signal.SIGINT)
        time.sleep(STEP_SECONDS)
        return stock(*args, **settings)

    before(HivemindSwarm, "enter", "join")
    before(VersionStore, "finish", "download")
    before(Group, "_average", "all-reduce")
    before(HivemindSwarm, "close", "exit")
    before(checkpoint, "save_tensors", "checkpoint")
    wrap(HivemindSwarm, "_take", decides)
    wrap(HivemindSwarm, "agree", meets)
    wrap(HivemindSwarm, "publish", publishes)
    wrap(version_store, "write_whole", writes)
    wrap(Trainer, "step", trains)
