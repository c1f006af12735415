"""A dishonest peer in the laboratory: an honest one in all else, that lies from the moment at which it is told to.

What it brings is spoiled before the laboratory's scribe sees it: the history holds what it truly sent. It lies as a
virtual peer does (`spes_p2p/sim/attacks.py`), or as averaging that misbehaves (`misbehaving.py`).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import lab_peer
import misbehaving
import torch
from lab_peer import Life, Scribe, live, wrap
from torch import Tensor

from spes_p2p.sim.attacks import Attack, AttackingSwarm
from spes_p2p.sim.hub import MemoryHub
from spes_p2p.swarm.averaging.encoding import DeltaEncoding
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.interface import Contribution, RoundResult

FACTOR = 100.0
BRINGS = ("sign_flip", "scale", "nan", "stale", "copy", "silent")
"""What a virtual peer does with what it brings, or does not bring."""
AVERAGES = {
    "lying_reducer": "means a hundred times the opposite",
    "mute": "sends nothing at all",
    "endless_parts": "sends without end",
    "endless_means": "answers without end",
}
"""What its averaging does."""
KINDS = (*BRINGS, *AVERAGES)


def live_dishonestly(kind: str, lies: Event, life: Life, pipe: Connection) -> None:
    """Be a peer that lies in one of these ways once `lies` is set."""

    def record(stock: Callable, scribe: Scribe) -> None:
        stock(scribe)
        wrap(HivemindSwarm, "agree", Liar(kind, lies, scribe).agree)  # around what is written down

    wrap(lab_peer, "record", record)
    if kind == "nan":
        wrap(DeltaEncoding, "encode", _encode)
    if kind in AVERAGES:
        gate, _ours = multiprocessing.Pipe()  # one at which it never stands
        misbehaving.open_gate(gate)
    live(life, pipe)


def _encode(stock: Callable, encoding: DeltaEncoding, contribution: Contribution) -> Any:
    """Return what honest software refuses to write, too: fp32 travels as it is."""
    if all(bool(flat_N.isfinite().all()) for flat_N in contribution.deltas.values()):
        return stock(encoding, contribution)
    return contribution.member, {name: flat_N.view(torch.uint8) for name, flat_N in contribution.deltas.items()}


class Liar:
    """What a dishonest peer does in place of its averaging.

    Args:
        kind: How it lies.
        lies: Whether it does.
        scribe: Takes down from which round on.
    """

    def __init__(self, kind: str, lies: Event, scribe: Scribe) -> None:
        self._kind, self._lies, self._scribe = kind, lies, scribe
        self._began = False
        self._virtual: _VirtualLiar | None = None

    def agree(
        self, stock: Callable, swarm: HivemindSwarm, contribution: Contribution, stage: Callable, **settings: Any
    ) -> Any:
        if self._virtual is None:
            self._virtual = _VirtualLiar(swarm)
        virtual = self._virtual
        if self._lies.is_set() and not self._began:
            self._begin(swarm, contribution.member.round)
        if self._began and self._kind == "silent":
            last, ends = swarm.last(), settings["closes_from"] + swarm._rounds.averaging_seconds
            while swarm.last() == last and swarm.now() < ends and not swarm.wait(0.1):
                pass
            return swarm.certified(last.round + 1)

        def learns(result: RoundResult) -> Any:
            virtual.learn(result)
            return stage(result)

        return stock(swarm, virtual.spoiled(contribution), learns, **settings)

    def _begin(self, swarm: HivemindSwarm, round: int) -> None:
        self._began = True
        self._scribe.note("lies", peer=swarm.peer_id, round=round + 1, kind=self._kind)
        if self._kind in AVERAGES:
            misbehaving.misbehave(AVERAGES[self._kind])
        else:
            self._virtual.begin(self._kind, round)  # type: ignore[union-attr]


class _VirtualLiar(AttackingSwarm):
    """The virtual peer that tells the real one what to bring; it meets nobody itself."""

    def __init__(self, swarm: HivemindSwarm) -> None:
        numels = {kind: segments[0].numel for kind, segments in swarm._vectors.segments.items()}
        super().__init__(MemoryHub("lab"), swarm.peer_id, [], numels)

    def begin(self, kind: str, round: int) -> None:
        self._attacks = [Attack.model_validate({"peer": 0, "kind": kind, "from_round": round, "factor": FACTOR})]

    def spoiled(self, contribution: Contribution) -> Contribution:
        """Return what it brings in place of what it has trained."""
        round = contribution.member.round
        return replace(contribution, deltas={n: self._brings(n, f, round) for n, f in contribution.deltas.items()})

    def _brings(self, name: str, flat_N: Tensor, round: int) -> Tensor:
        spoiled_N = self._spoil(name, flat_N, round)
        return torch.full_like(spoiled_N, torch.nan) if self._does("nan", round) else spoiled_N

    def learn(self, result: RoundResult) -> None:
        """Remember means, which it may bring as its own."""
        self._means |= {name: mean.clone() for name, mean in result.means.items()}
