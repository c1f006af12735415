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

from spes_p2p.sim.attacks import Attack, Spoiler
from spes_p2p.swarm.averaging.encoding import Contribution, DeltaEncoding
from spes_p2p.swarm.averaging.outcome import RoundResult
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm

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
        self._spoiler: Spoiler | None = None

    def agree(
        self, stock: Callable, swarm: HivemindSwarm, contribution: Contribution, stage: Callable, **settings: Any
    ) -> Any:
        if self._spoiler is None:
            self._spoiler = Spoiler([], {kind: parts[0].numel for kind, parts in swarm._vectors.segments.items()})
        spoiler = self._spoiler
        if self._lies.is_set() and not self._began:
            self._begin(swarm, contribution.member.round)
        if self._began and self._kind == "silent":
            last, ends = swarm.last(), settings["closes_from"] + swarm._rounds.averaging_seconds
            while swarm.last() == last and swarm.now() < ends and not swarm.wait(0.1):
                pass
            return swarm.consensus.body_at(last.round + 1)

        def learns(result: RoundResult) -> Any:
            spoiler.learn(result.means)
            return stage(result)

        brought, round = spoiler.spoiled(contribution), contribution.member.round
        if spoiler.does("nan", round):
            nan = {name: torch.full_like(flat_N, torch.nan) for name, flat_N in brought.deltas.items()}
            brought = replace(brought, deltas=nan)
        return stock(swarm, brought, learns, **settings)

    def _begin(self, swarm: HivemindSwarm, round: int) -> None:
        self._began = True
        self._scribe.note("lies", peer=swarm.peer_id, round=round + 1, kind=self._kind)
        if self._kind in AVERAGES:
            misbehaving.misbehave(AVERAGES[self._kind])
        else:
            attack = {"peer": 0, "kind": self._kind, "from_round": round, "factor": FACTOR}
            self._spoiler.attacks = [Attack.model_validate(attack)]  # type: ignore[union-attr]
