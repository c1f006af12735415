"""What runs in a real peer's process: a Node and a HivemindSwarm that do what comes through a pipe."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import multiprocessing
import operator
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from hivemind.p2p import PeerID
from hivemind.utils.mpfuture import MPFuture

from spes_p2p.codecs.format import Segment
from spes_p2p.codecs.vectors import digest
from spes_p2p.config import RoundConfig
from spes_p2p.swarm.averaging.averaging import Averaged
from spes_p2p.swarm.averaging.encoding import Contribution, Vectors
from spes_p2p.swarm.averaging.outcome import RoundResult, Staged
from spes_p2p.swarm.certificate import Body, SlotState
from spes_p2p.swarm.hivemind_fixes.processes import die_with_parent
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.records import Claim
from spes_p2p.swarm.roster import Member, Roster

RUN_ID = "run"
ROUNDS = RoundConfig(
    matchmaking_seconds=3.0, averaging_seconds=12.0, lease_seconds=6.0, heartbeat_seconds=1.5, min_peers=16
)
NUMELS = {SHARED: 1_500_000, "slot": 700}
"""Shared deltas of several parts per reducer, so that a peer can die between two of them; slots of a single part."""
NUM_SLOTS, MAX_SLOTS = 8, 4
ATTEMPTS = 3
"""Attempts at a round, as a synchroniser makes them."""
NO_START = "0" * 64
"""In an entry: it starts from the last certificate that its peer knows."""


def start_of(voters: Sequence[str], num_slots: int = NUM_SLOTS) -> Body:
    """Return the body before the first round of a swarm in which all these peers vote."""
    return Body(
        run=RUN_ID,
        founder=voters[0],
        round=0,
        previous=digest(RUN_ID.encode()),
        ends_at=0.0,
        voters=tuple(sorted(voters)),
        seats=dict.fromkeys(voters, ""),
        slots=(SlotState(round=0),) * num_slots,
    )


@dataclasses.dataclass(frozen=True)
class Outcome(RoundResult):
    """What a round brought a peer.

    Attributes:
        committed: What of an attempt's means the round's certificate names.
        attempt: Number of that attempt.
        is_behind: The others have decided the round without this peer's result.
    """

    committed: Mapping[VectorName, torch.Tensor] = dataclasses.field(default_factory=dict)
    attempt: int = 0
    is_behind: bool = False


def average(
    swarm,
    member: Member,
    deltas: Mapping[str, torch.Tensor],
    *,
    expected: Collection[str],
    closes_from: float,
    notes: Sequence[AttemptNote] = (),
) -> Outcome:
    """Make a round, as a synchroniser does; a peer's version is its mean. `notes` grow with each attempt."""
    start = swarm.last()
    if member.previous == NO_START:
        member = member.model_copy(update={"previous": start.digest, "round": start.round})
    item = Contribution(member, {VectorName(name): delta for name, delta in deltas.items()})
    brought = {name: digest(delta) for name, delta in item.deltas.items()}
    tried: list[tuple[RoundResult, dict[VectorName, torch.Tensor], dict[VectorName, str]]] = []

    def stage(result: RoundResult) -> Staged:
        means = {name: mean.clone() for name, mean in result.means.items()}
        tried.append((result, means, {name: digest(mean) for name, mean in means.items()}))
        return tried[-1][2], swarm.now() + 1.0

    body = swarm.agree(item, stage, expected=expected, closes_from=closes_from)
    assert {name: digest(delta) for name, delta in item.deltas.items()} == brought, "contributions stay as they were"
    certified = {VectorName.of_slot(slot): state.digest for slot, state in enumerate(body.slots)} if body else {}
    certified |= {SHARED: body.shared} if body else {}
    own_tries = [each for each in tried if body is not None and each[2].get(SHARED) == body.shared]
    is_own = bool(own_tries)
    result, means, digests = (own_tries or tried or [(RoundResult(), {}, {})])[-1]
    own = [name for name, found in digests.items() if is_own and certified[name] == found]
    swarm.keep_residuals(result, own)
    lost = {name: "the round's certificate names another version" for name in item.deltas if name not in own}
    return Outcome(
        **{field.name: getattr(result, field.name) for field in dataclasses.fields(RoundResult)}
        | {
            "means": means,
            "dropped": lost | {name: reason for name, reason in result.dropped.items() if name not in own},
        },
        committed={name: means[name] for name in own},
        attempt=next((note.attempt for each, note in zip(tried, notes, strict=False) if each[0] is result), 0),
        is_behind=not is_own and swarm.last().digest != start.digest,
    )


class Setting(NamedTuple):
    """What a peer is started with.

    Attributes:
        directory: Holds the identity and the versions.
        initial_peers: Addresses to join; none starts a swarm.
        codec: How deltas travel.
        namespace: Network namespace to live in; none is this machine's own.
        host: Address to listen on.
        shared_numel, slot_numel: Elements of the shared delta, and of a slot's.
        max_slots: Slots that it may hold.
        falls_back: Goes into client mode where it finds that nobody can call it.
        known_peers: Keeps the addresses of others in a file of its directory.
        rounds: The run's deadlines.
        collects: Collects garbage all the time.
        voters: Peers that decide the first round.
    """

    directory: Path
    initial_peers: Sequence[str] = ()
    codec: str = "fp32"
    namespace: str | None = None
    host: str = "127.0.0.1"
    shared_numel: int = NUMELS[SHARED]
    slot_numel: int = NUMELS["slot"]
    max_slots: int = MAX_SLOTS
    falls_back: bool = False
    known_peers: bool = False
    rounds: RoundConfig = ROUNDS
    collects: bool = False
    voters: tuple[str, ...] = ()

    @property
    def numels(self) -> dict[str, int]:
        """Elements of its vectors."""
        return {SHARED: self.shared_numel, "slot": self.slot_numel}

    @property
    def segments(self) -> dict[str, tuple[Segment, ...]]:
        """What its vectors consist of."""
        return {kind: (Segment(numel, self.codec),) for kind, numel in self.numels.items()}


class AttemptNote(NamedTuple):
    """What a test may want to know of an attempt at a round that the round's result does not tell."""

    attempt: int
    lost: str
    roster: tuple[str, ...]
    failures: Mapping[str, str]
    averaging_seconds: float


def serve(pipe: Connection, setting: Setting, gate: Connection | None) -> None:
    """Be a peer, and do what comes through the pipe; with a gate a rogue one, see `misbehaving.py`.

    It dies with the fork server, and so with the test: a peer that is frozen then would never read that its pipe ended.
    """
    die_with_parent(os.getppid())
    if setting.namespace is not None:
        from benchmarks.testbed import enter_namespace

        enter_namespace(setting.namespace)

    MPFuture.reset_backend()  # a killed process may hold the locks
    multiprocessing.set_start_method("fork", force=True)  # hivemind's processes are forks, of a child of any kind
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(process)d %(name)s: %(message)s")
    torch.set_num_threads(1)
    if gate is not None:
        import misbehaving

        misbehaving.open_gate(gate)
    if setting.collects:
        _collect_all_the_time()
    try:
        swarm = _start(setting)
        vectors = Vectors(setting.numels, setting.segments)
        me, max_slots = swarm.peer_id, setting.max_slots
        start = start_of(setting.voters or (me,), max(NUM_SLOTS, max_slots))
        swarm.enter(setting.rounds, vectors, start, max_slots=max_slots, is_new=True)
        swarm.announce(Claim(peer_id=me, state="active", max_slots=max_slots, since=swarm.now()))
    except Exception as error:
        pipe.send((False, repr(error)))
        raise
    notes = _take_notes(swarm)
    pipe.send((True, list(swarm.node.contacts())))
    while True:
        try:
            method, args, kwargs = pipe.recv()
        except EOFError:
            break
        try:
            if method == "average":
                notes.clear()
                kwargs["notes"] = notes
            result = notes[:] if method == "notes" else with_arrays(_call(swarm, method, args, kwargs))
            pipe.send((True, result))
        except Exception as error:  # noqa: BLE001 - the test decides what to make of it
            pipe.send((False, repr(error)))
    swarm.close()


def _collect_all_the_time() -> None:
    """Collect garbage all the time, so that a task which nothing holds ends."""

    def collect() -> None:
        while True:
            gc.collect()
            time.sleep(0.1)

    gc.freeze()  # what is there already would make each collection take a second
    threading.Thread(target=collect, daemon=True).start()


def _start(setting: Setting):
    """Return a swarm over a node of its own."""
    from spes_p2p.swarm import hivemind_swarm
    from spes_p2p.swarm.p2p.node import ListenConfig, Node
    from spes_p2p.swarm.p2p.peerstore import FILE, Peerstore

    listen, seen = ListenConfig(setting.host), None
    if setting.falls_back:
        from spes_p2p.peer.joining import as_seen

        seen = functools.partial(as_seen, listen)
    node = Node(
        Identity(setting.directory / "key"),
        RUN_ID,
        initial_peers=setting.initial_peers,
        peerstore=Peerstore(setting.directory / FILE) if setting.known_peers else None,
        listen=listen,
        seen=seen,
    )
    return hivemind_swarm.HivemindSwarm(node, setting.directory / "versions")


def _take_notes(swarm) -> list[AttemptNote]:
    """Return a list of the attempts at the latest round, the current one's while it lasts."""
    notes: list[AttemptNote] = []
    average_roster = swarm._averaging.average

    async def noted(roster: Roster, attempt: int, encoded: Mapping[VectorName, torch.Tensor]) -> Averaged:
        averaged = await average_roster(roster, attempt, encoded)
        peers = tuple(member.peer_id for member in roster)
        notes.append(AttemptNote(attempt, averaged.lost, peers, dict(averaged.failures), averaged.seconds))
        return averaged

    swarm._averaging.average = noted
    return notes


def _call(swarm, method: str, args: tuple, kwargs: dict):
    from spes_p2p.swarm.hivemind_fixes import dht

    if method == "misbehave":
        import misbehaving

        return misbehaving.misbehave(*args)
    if method == "average":
        return average(swarm, args[0], with_tensors(args[1]), **kwargs)
    if method == "strangers":
        return swarm.node._run_in_dht(functools.partial(dht.unknown_peers, *args))
    if method == "wait_for_links":
        return _wait_for_links(swarm, *args)
    if method == "client_mode":
        return swarm.node.client_mode
    if method == "forget":
        return swarm.node._run_in_dht(functools.partial(_forget, *args))
    if method == "death":
        return swarm.watchdog.death
    if method == "publish":
        args = (args[0], with_tensors(args[1]))
    return operator.attrgetter(method)(swarm)(*args, **kwargs)


def _wait_for_links(swarm, count: int, seconds: float) -> bool:
    """Tell whether this peer is connected to so many others in time."""
    deadline, found = time.monotonic() + seconds, 0
    while found < count and time.monotonic() < deadline:
        found = len(swarm._stated_links(swarm.last()))
        time.sleep(0.1)
    return found >= count


async def _forget(peers, dht, node) -> None:
    """Strike peers out of a DHT node's routing table, as it does when they fail to answer; runs in its process."""
    table = node.protocol.routing_table
    for uid in [table.get(peer_id=PeerID.from_base58(peer)) for peer in peers]:
        if uid is not None:
            del table[uid]


# Tensors would cross a pipe as shared memory that dies with its sender; arrays cross as bytes.


def with_arrays(value):
    """Return a value with arrays for its tensors."""
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, RoundResult):
        return dataclasses.replace(value, means={}, committed=with_arrays(dict(value.committed)))
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
