"""Averaging that lies, stalls, or waits at a gate for its fate, in the phase of a round that a test names.

Only the processes of rogue peers change anything by it. What a rogue says in the meeting and in the decision stands in
the tests of the agreement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import torch
from torch import Tensor

from spes_p2p.swarm.averaging import averaging, group
from spes_p2p.swarm.averaging.averaging import Averaged
from spes_p2p.swarm.averaging.group import MEAN, PART
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.p2p.channel import Channel
from spes_p2p.swarm.roster import Roster

GATE_SECONDS = 60.0
ROSTER, FIRST_BYTE = "has just seen the roster", "is about to send"
SENDING, REDUCING = "has sent half", "has sent all, and none of its means"
DECIDING = "has averaged, and is about to state its result"
INVENTS = "states what it has not averaged"

_behaviour = ""
_gates: list[Connection] = []
_framed: list[str] = []
"""The member to which a liar sends other means than to the rest."""


def open_gate(gate: Connection) -> None:
    """Be a rogue from now on, and wait at this gate, in a peer's process."""
    _gates.append(gate)
    averaging.Group = RogueGroup  # type: ignore[misc]
    averaging.Averaging.average = _average(averaging.Averaging.average)  # type: ignore[method-assign]
    group.reduce_message = _reduce_message(group.reduce_message)


def misbehave(how: str) -> None:
    """Misbehave from now on; not any more if `how` is empty."""
    global _behaviour
    while _gates[0].poll():
        _gates[0].recv()  # opened for a moment that never came
    _framed.clear()
    _behaviour = how


def _is(name: str) -> bool:
    return _behaviour == name


def _reach(phase: str) -> None:
    """Stand still, with everything in the event loop, until the test lets us go on; once in a round."""
    if _is(phase):
        misbehave("")
        _gates[0].send(phase)
        assert _gates[0].poll(GATE_SECONDS), "the gate was not opened"
        _gates[0].recv()


def nested_tuples(depth: int) -> bytes:
    """Return tuples within one another, as hivemind writes them; 220 ended the process that decoded them."""
    data = b"\x90"
    for _ in range(depth):
        data = msgpack.packb([msgpack.ExtType(0x40, data)])
    return data


def _average(honest: Callable) -> Callable:
    async def average(self: Any, roster: Roster, attempt: int, encoded: Mapping[VectorName, Tensor]) -> Averaged:
        _reach(ROSTER)
        _reach(FIRST_BYTE)
        averaged = await honest(self, roster, attempt, encoded)
        _reach(DECIDING)
        if _is(INVENTS):
            averaged = replace(averaged, means={name: torch.zeros_like(each) for name, each in averaged.means.items()})
        return averaged

    return average


def _reduce_message(honest: Callable) -> Callable:
    def reduce_message(*args: Any) -> tuple[Tensor, Tensor]:
        encoded, residual = honest(*args)
        if _is("means the opposite"):
            encoded = (-encoded.view(torch.float32)).view(torch.uint8)
        if _is("means a hundred times the opposite") and args[1][0].segment == 0:
            encoded = (-100 * encoded.view(torch.float32)).view(torch.uint8)
        return (encoded.fill_(255) if _is("means NaN") else encoded), residual

    return reduce_message


class RogueGroup(group.Group):
    """Sends, over each stream, what its behaviour says."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._is_shared = settings["open"].args[1] == SHARED
        self._num_sent = 0
        self._num_parts = sum(map(len, self.plan.slices)) - len(self._mine)
        self._peers: dict[Channel, str] = {}

    async def _send(self, channel: Channel, kind: bytes, data: Tensor) -> None:
        changed = await (self._part(data) if kind == PART else self._mean(channel, data))
        self._num_sent += kind == PART
        await super()._send(channel, kind, changed)

    async def _part(self, data: Tensor) -> Tensor:
        if self._is_shared and 2 * self._num_sent > self._num_parts:
            _reach(SENDING)
        if _is("sends nothing at all") or (_is("stalls in the middle") and self._num_sent):
            await asyncio.Event().wait()
        if self._num_sent and _is("sends a wrong shape"):
            return data[:3]
        return torch.full_like(data, 255) if self._num_sent and _is("sends NaN") else data

    async def _mean(self, channel: Channel, data: Tensor) -> Tensor:
        if _is(REDUCING) and self._is_shared:
            await asyncio.wait(self._asking, timeout=GATE_SECONDS)  # its last mean comes after all has been sent
            _reach(REDUCING)
        peer = self._peers[channel]
        if _is("tells one another mean") and self._is_shared and not _framed:
            _framed.append(peer)
        if _is("tells each another mean") or (_is("tells one another mean") and peer in _framed):
            return (data.view(torch.float32) + 1 + self.plan.peers.index(peer)).view(torch.uint8)
        return torch.cat([data, data]) if _is("means too much") else data

    async def _send_parts(self, channel: Channel, messages: Any) -> None:
        await super()._send_parts(channel, messages)
        while _is("sends without end"):
            await channel.send(PART, bytes(2**17))

    async def _send_means(self, channel: Channel, peer: str, lane: int) -> None:
        self._peers[channel] = peer
        await super()._send_means(channel, peer, lane)
        while _is("answers without end"):
            await channel.send(MEAN, bytes(2**17))
