"""What a dishonest peer does to the deltas it brings, for simulations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from spes_p2p.config import Frozen, PositiveFloat
from spes_p2p.swarm.base import Contribution
from spes_p2p.swarm.memory import MemoryHub, MemorySwarm
from spes_p2p.swarm.roster import SHARED, Member, kind_of


class Attack(Frozen):
    """What a virtual peer does to the deltas it brings; its optimizer moments stay honest."""

    peer: Annotated[int, Field(ge=0)]
    """Which, from 0."""
    kind: Literal["sign_flip", "scale", "nan", "stale"]
    """`stale` brings the deltas of its last honest round over and over."""
    from_round: Annotated[int, Field(ge=0)] = 0
    """The first anchor's round whose deltas it spoils."""
    factor: PositiveFloat = 10.0
    """Of `scale`."""
    groups: Literal["all", "shared", "slots"] = "all"
    """Whose deltas it spoils."""

    def concerns(self, name: str, round: int) -> bool:
        """Tell whether it spoils this group's delta in this round."""
        return round >= self.from_round and self.groups in ("all", "shared" if name == SHARED else "slots")


class AttackingSwarm(MemorySwarm):
    """A virtual peer's swarm that lies for it.

    Args:
        hub: Where the others are.
        peer_id: This peer's.
        attacks: Done one after the other.
        delta_numel: Elements of a delta, for `shared` and `slot`.
    """

    def __init__(self, hub: MemoryHub, peer_id: str, attacks: Sequence[Attack], delta_numel: Mapping[str, int]) -> None:
        super().__init__(hub, peer_id)
        self._attacks, self._delta_numel = attacks, delta_numel
        self._honest: dict[str, Tensor] = {}

    def _encode(self, contribution: Contribution) -> tuple[Member, dict[str, Tensor]]:
        round = contribution.member.round
        deltas = {name: self._spoil(name, flat_N, round) for name, flat_N in contribution.deltas.items()}
        member, encoded = super()._encode(replace(contribution, deltas=deltas))
        for attack in self._attacks:
            for name in encoded if attack.kind == "nan" else ():
                if attack.concerns(name, round):
                    encoded[name].fill_(255)  # no number in any codec; an honest encoder would refuse to write it
        return member, encoded

    def _spoil(self, name: str, flat_N: Tensor, round: int) -> Tensor:
        numel = self._delta_numel[kind_of(name)]
        delta, moments = flat_N[:numel], flat_N[numel:]
        attacks = [attack for attack in self._attacks if attack.concerns(name, round)]
        if not attacks:
            self._honest[name] = delta
            return flat_N
        for attack in attacks:
            if attack.kind == "stale":
                delta = self._honest.setdefault(name, delta)
            else:
                delta = delta * {"sign_flip": -1.0, "scale": attack.factor, "nan": 1.0}[attack.kind]
        return torch.cat([delta, moments])
