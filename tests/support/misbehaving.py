"""An averager that lies, stalls, or waits at a gate for its fate, in the phase of a round that a test names.

Only the processes of rogue peers change anything by it.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from multiprocessing.connection import Connection
from typing import AsyncIterator  # noqa: UP035 - hivemind recognises only typing's

import msgpack
import torch
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2, runtime_pb2

from spes_p2p.swarm import hivemind_swarm
from spes_p2p.swarm.averaging import allreduce, averager, matchmaking
from spes_p2p.swarm.averaging.partition import num_lanes
from spes_p2p.swarm.roster import SHARED

GATE_SECONDS = 60.0
NUM_PEERS = 4
MATCHMAKING, ROSTER = "waits to be met", "has just seen the roster"
FIRST_BYTE, SENDING = "is about to send", "has sent half"
REDUCING = "has sent all, and none of its means"
CONFIRMING, DECIDING = "is asked to confirm", "has averaged, and is about to confirm to the proposer"
INVENTS = "confirms to the proposer what it has not averaged"
FORGES, HEAD_START_SECONDS = "leads, and takes its followers' weight", 1.0
SLOW, SLOW_SECONDS = "leads, and is slow to answer whoever asks first", 2.0
FORGERIES = {
    "claims a weight of 1e12": {"tokens": 10**12},
    "claims a weight that is no number": {"tokens": "many"},
    "claims a negative weight": {"tokens": -1},
    "claims a clock of infinity": {"ready_at": float("inf")},
    "enters in another's name": {"peer_id": "Qm" + "a" * 44},
    "enters with another certificate": {"previous": "6" * 64},
}

_behaviour = multiprocessing.get_context("fork").Array("c", 64)
_gates: list[Connection] = []
_framed: list[str] = []
"""The member to which a liar sends other means than to the rest."""


def open_gate(gate: Connection) -> None:
    """Wait at this gate from now on, in a peer's process before it forks."""
    _gates.append(gate)


def _is(name: str) -> bool:
    return _behaviour.value.decode() == name


def _reach(phase: str) -> None:
    """Stand still, with everything in this process, until the test lets us go on; once in a round."""
    if _is(phase):
        _behaviour.value = b""
        _gates[0].send(phase)
        assert _gates[0].poll(GATE_SECONDS), "the gate was not opened"
        _gates[0].recv()


def _forged(user: bytes) -> bytes:
    """Return what a peer gives the matchmaking, with its roster entry as the test wants it."""
    expected, entry = msgpack.unpackb(user)
    for how, change in FORGERIES.items():
        if _is(how):
            entry = json.dumps(json.loads(entry) | change)
    if _is("enters with too long an entry"):
        entry += " " * 2**16
    if _is("enters with a malformed entry"):
        entry = entry[:-7]
    if _is("enters with a nested entry"):
        return nested_tuples(700)
    return msgpack.packb(msgpack.ExtType(42, b"0" * 64) if _is("enters with no entry") else [expected, entry])


def _forge(message: averaging_pb2.MessageFromLeader, follower: bytes) -> None:
    """Take a follower's weight in what its leader says that all have said."""
    place = list(message.ordered_peer_ids).index(follower)
    bandwidth, mode, user = msgpack.unpackb(message.gathered[place])
    expected, entry = msgpack.unpackb(user)
    entry = json.dumps(json.loads(entry) | {"tokens": 0})
    message.gathered[place] = msgpack.packb([bandwidth, mode, msgpack.packb([expected, entry])])


def nested_tuples(depth: int) -> bytes:
    """Return tuples within one another, as hivemind writes them; 220 ended the process that decoded them."""
    data = b"\x90"
    for _ in range(depth):
        data = msgpack.packb([msgpack.ExtType(0x40, data)])
    return data


class RogueDeclarations(matchmaking.Declarations):
    async def update_key_on_group_assembled(self, group_info) -> None:
        """As a leader, before the others know of the roster; as a follower, after."""
        _reach(ROSTER)


class RogueMatchmaking(matchmaking.SwarmMatchmaking):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        paused = self.potential_leaders.pause_search

        def pause_search():
            _reach(MATCHMAKING)  # a leader has accepted us
            return paused()

        self.potential_leaders.pause_search = pause_search


class SparseAverager(averager.SparseAverager):
    """Remote names of methods contain the class's name, so it must be the same in all peers."""

    def misbehave(self, how: str) -> None:
        """Misbehave from now on; not any more if `how` is empty."""
        while _gates[0].poll():
            _gates[0].recv()  # opened for a moment that never came
        _behaviour.value = how.encode()

    def run(self) -> None:
        matchmaking.Declarations = RogueDeclarations
        averager.SwarmMatchmaking, allreduce.ButterflyAllreduce = RogueMatchmaking, RogueButterflyAllreduce
        honest = allreduce.reduce_message

        def reduce_message(*args):
            encoded, residual = honest(*args)
            if _is("means the opposite"):
                encoded = (-encoded.view(torch.float32)).view(torch.uint8)
            if _is("means a hundred times the opposite") and args[1][0].segment == 0:
                encoded = (-100 * encoded.view(torch.float32)).view(torch.uint8)
            return (encoded.fill_(255) if _is("means NaN") else encoded), residual

        allreduce.reduce_message = reduce_message
        expected = averager.expected_of
        entries = "enters with no entry", "enters with a nested entry"
        averager.expected_of = lambda gathered: NUM_PEERS if any(map(_is, entries)) else expected(gathered)
        super().run()

    async def _step(self, *, step, future_for_init) -> None:
        bandwidth, mode, user = msgpack.unpackb(step.data_for_gather)
        step._data_for_gather = msgpack.packb([bandwidth, mode, _forged(user)])
        if _is(FORGES) or _is(SLOW):
            step.scheduled_time -= HEAD_START_SECONDS  # whose time is up first leads
            self._matchmaking.potential_leaders.min_matchmaking_time = 0.0
        await super()._step(step=step, future_for_init=future_for_init)

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        if _is(SLOW):
            _behaviour.value = b""
            await asyncio.sleep(SLOW_SECONDS)
        async for message in super().rpc_join_group(request, context):
            if _is(FORGES) and message.code == averaging_pb2.BEGIN_ALLREDUCE:
                _forge(message, context.remote_id.to_bytes())
            yield message
            if message.code == averaging_pb2.ACCEPTED:
                _reach(MATCHMAKING)

    async def _aggregate_with_group(self, group_info, min_vector_size: int, weight: float, **kwargs) -> dict:
        _reach(FIRST_BYTE)
        return await super()._aggregate_with_group(group_info, min_vector_size, weight, **kwargs)

    async def rpc_confirm(self, request: runtime_pb2.ExpertRequest, context: P2PContext) -> runtime_pb2.ExpertResponse:
        answer = await super().rpc_confirm(request, context)
        if bytes.fromhex(request.uid).endswith(SHARED.encode()):
            _reach(CONFIRMING)
        if _is("never confirms"):
            await asyncio.Event().wait()
        if _is("confirms another digest"):
            return runtime_pb2.ExpertResponse(metadata=b"0" * 64)
        return answer


class RogueButterflyAllreduce(allreduce.ButterflyAllreduce):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._is_shared = self._group_id.endswith(SHARED.encode())
        lanes = [num_lanes(self._plan, reducer) for reducer in range(len(self._plan.peers))]
        self._open = sum(lanes) - lanes[self._me]
        self._all_sent = asyncio.Event()

    async def _exchange(self, index: int, lane: int) -> None:
        await super()._exchange(index, lane)
        self._open -= 1  # the last mean arrives after everything was sent
        if not self._open:
            if self._is_shared:
                _reach(REDUCING)
            self._all_sent.set()

    async def _outgoing(self, messages: list, lane: int) -> AsyncIterator[averaging_pb2.AveragingData]:
        sent = 0
        async for message in super()._outgoing(messages, lane):
            if self._is_shared and sent > len(messages) // 2:
                _reach(SENDING)
            if sent and _is("sends a wrong shape"):
                message.tensor_part.buffer = b"123"
            if sent and _is("sends NaN"):
                message.tensor_part.buffer = b"\xff" * len(message.tensor_part.buffer)
            if _is("sends nothing at all") or (_is("stalls in the middle") and sent == 2):
                await asyncio.Event().wait()
            yield message
            sent += 1
        while _is("sends without end"):
            yield averaging_pb2.AveragingData(tensor_part=runtime_pb2.Tensor(buffer=b"0" * 2**17))

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext, lane: float
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in super().rpc_aggregate_part(stream, context, lane):
            if _is(REDUCING) and self._is_shared:
                await asyncio.wait_for(self._all_sent.wait(), GATE_SECONDS)
            peer = context.remote_id.to_base58()
            if _is("tells one another mean") and self._is_shared and not _framed:
                _framed.append(peer)
            if _is("tells each another mean") or (_is("tells one another mean") and peer in _framed):
                mean = torch.frombuffer(bytearray(message.tensor_part.buffer), dtype=torch.float32)
                mean += 1 + self._plan.peers.index(peer)
                message.tensor_part.buffer = mean.numpy().tobytes()
            if _is("means too much"):
                message.tensor_part.buffer += message.tensor_part.buffer
            yield message
        while _is("answers without end"):
            yield averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART)


class HivemindSwarm(hivemind_swarm.HivemindSwarm):
    """Misbehaves in the decision of a round."""

    def decide(self, result, digests, *others):
        _reach(DECIDING)
        if _is(INVENTS):
            digests = dict.fromkeys(digests, "6" * 64)
        return super().decide(result, digests, *others)
