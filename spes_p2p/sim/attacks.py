"""Dishonest peers for simulations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from spes_p2p.config import MAX_PEER_TOKENS, Frozen, PositiveFloat
from spes_p2p.sim.hub import MemoryHub
from spes_p2p.sim.swarm import MemorySwarm
from spes_p2p.swarm.interface import Contribution, RoundResult
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.roster import Member


class Attack(Frozen):
    """How a virtual peer falsifies its own vectors, or the means that it reduces."""

    peer: Annotated[int, Field(ge=0)]
    """The attacker's index, from 0."""
    kind: Literal[
        "sign_flip", "scale", "nan", "noise", "stale", "copy", "moments", "inflate", "lying_reducer", "silent"
    ]
    """`noise` has the norm of the honest delta; `stale` repeats the deltas of the last honest round, `copy` the last
    round's mean; `moments` scales the optimizer moments, `inflate` the number of tokens that it claims to have trained;
    `lying_reducer` negates and scales the means of its slices; `silent` trains and never takes part in averaging."""
    from_round: Annotated[int, Field(ge=0)] = 0
    """Round of the first anchor that is attacked."""
    factor: PositiveFloat = 10.0
    """Factor of `scale`, `moments`, `inflate` and `lying_reducer`."""
    groups: Literal["all", "shared", "slots"] = "all"
    """Groups whose deltas are falsified."""

    def concerns(self, name: VectorName, round: int) -> bool:
        """Tell whether the attack falsifies this group's delta in this round."""
        return round >= self.from_round and self.groups in ("all", "shared" if name == SHARED else "slots")


class AttackingSwarm(MemorySwarm):
    """The swarm of an attacker: it falsifies vectors and means on the peer's behalf.

    Args:
        hub: Shared by all peers of the simulation.
        peer_id: This peer's id.
        attacks: Applied one after the other.
        delta_numel: Elements of a delta, for `shared` and `slot`.
    """

    def __init__(self, hub: MemoryHub, peer_id: str, attacks: Sequence[Attack], delta_numel: Mapping[str, int]) -> None:
        super().__init__(hub, peer_id)
        self._attacks = attacks
        self._delta_numel = delta_numel
        self._honest: dict[VectorName, Tensor] = {}
        self._means: dict[VectorName, Tensor] = {}

    def average(self, contribution: Contribution, *, expected: int, closes_from: float) -> RoundResult:
        member = contribution.member
        if self._does("silent", member.round):
            self._open = self.last(), self._hub.attempt
            self.clock.advance(max(0.0, closes_from - self.now()) + self._hub.matchmaking_seconds)
            return RoundResult(dropped=dict.fromkeys(contribution.deltas, "this peer met no other"))
        for attack in self._does("inflate", member.round):
            tokens = min(int(member.tokens * attack.factor), MAX_PEER_TOKENS)
            contribution = replace(contribution, member=member.model_copy(update={"tokens": tokens}))
        result = super().average(contribution, expected=expected, closes_from=closes_from)
        self._means |= result.means
        return result

    def _does(self, kind: str, round: int) -> list[Attack]:
        return [attack for attack in self._attacks if attack.kind == kind and round >= attack.from_round]

    def _encode(self, contribution: Contribution) -> tuple[Member, dict[VectorName, Tensor]]:
        round = contribution.member.round
        deltas = {name: self._spoil(name, flat_N, round) for name, flat_N in contribution.deltas.items()}
        member, encoded = super()._encode(replace(contribution, deltas=deltas))
        for attack in self._attacks:
            for name in encoded if attack.kind == "nan" else ():
                if attack.concerns(name, round):
                    encoded[name].fill_(255)  # not a number in any codec; an honest encoder would refuse to write it
        return member, encoded

    def _spoil(self, name: VectorName, flat_N: Tensor, round: int) -> Tensor:
        numel = self._delta_numel[VectorName(name).kind]
        delta, moments = flat_N[:numel], flat_N[numel:]
        attacks = [attack for attack in self._attacks if attack.concerns(name, round)]
        if not attacks:
            self._honest[name] = delta
            return flat_N
        for attack in attacks:
            if attack.kind == "moments":
                moments = moments * attack.factor
            else:
                delta = self._instead_of(delta, attack, name, round)
        return torch.cat([delta, moments])

    def _instead_of(self, delta: Tensor, attack: Attack, name: VectorName, round: int) -> Tensor:
        match attack.kind:
            case "sign_flip":
                return -delta
            case "scale":
                return delta * attack.factor
            case "stale":
                return self._honest.setdefault(name, delta)
            case "copy":
                return self._means.get(name, delta)[: delta.numel()]
            case "noise":
                noise = torch.randn(delta.shape, generator=torch.Generator().manual_seed(round))
                return noise * (delta.norm() / noise.norm())
            case _:
                return delta

    def _lie(self, round: int) -> float | None:
        if all(round < attack.from_round for attack in self._attacks):
            return None
        return next((-attack.factor for attack in self._does("lying_reducer", round)), 1.0)
