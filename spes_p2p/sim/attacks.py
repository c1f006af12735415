"""What a dishonest peer does to the swarm, for simulations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from spes_p2p.codecs import Format
from spes_p2p.config import Frozen, PositiveFloat
from spes_p2p.sim.swarm import Lie, MemoryHub, MemorySwarm
from spes_p2p.swarm.averaging.partition import Message, decode_message, encode_message
from spes_p2p.swarm.interface import Contribution, RoundResult
from spes_p2p.swarm.roster import MAX_MEMBER_TOKENS, SHARED, Member, Roster, kind_of


class Attack(Frozen):
    """What a virtual peer does to the vectors it brings, or to the means that others rely on it for."""

    peer: Annotated[int, Field(ge=0)]
    """Which, from 0."""
    kind: Literal[
        "sign_flip", "scale", "nan", "noise", "stale", "copy", "moments", "inflate", "lying_reducer", "silent"
    ]
    """`noise` is as long as the honest delta; `stale` brings the deltas of its last honest round over and over, `copy`
    the last round's mean for its own; `moments` scales its optimizer moments, `inflate` the tokens it says it has
    trained; `lying_reducer` turns and scales the means of its slices; `silent` trains and never comes to a meeting."""
    from_round: Annotated[int, Field(ge=0)] = 0
    """The first anchor's round whose deltas it spoils."""
    factor: PositiveFloat = 10.0
    """Of `scale`, `moments`, `inflate` and `lying_reducer`."""
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
        self._means: dict[str, Tensor] = {}

    def average(self, contribution: Contribution, *, expected: int, starts_at: float) -> RoundResult:
        member = contribution.member
        if self._does("silent", member.round):
            self.clock.advance(max(0.0, starts_at - self.now()) + self._hub.matchmaking_seconds)
            return RoundResult(Roster([member]), dropped=dict.fromkeys(contribution.deltas, "this peer met nobody"))
        for attack in self._does("inflate", member.round):
            tokens = min(int(member.tokens * attack.factor), MAX_MEMBER_TOKENS)
            contribution = replace(contribution, member=member.model_copy(update={"tokens": tokens}))
        result = super().average(contribution, expected=expected, starts_at=starts_at)
        self._means |= result.committed
        return result

    def _does(self, kind: str, round: int) -> list[Attack]:
        return [attack for attack in self._attacks if attack.kind == kind and round >= attack.from_round]

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
            if attack.kind == "moments":
                moments = moments * attack.factor
            else:
                delta = self._instead_of(delta, attack, name, round)
        return torch.cat([delta, moments])

    def _instead_of(self, delta: Tensor, attack: Attack, name: str, round: int) -> Tensor:
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

    def _lie(self, round: int) -> Lie | None:
        if all(round < attack.from_round for attack in self._attacks):
            return None
        factor = next((-attack.factor for attack in self._does("lying_reducer", round)), 1.0)

        def lie(format: Format, message: Message, mean: Tensor) -> Tensor:
            values = decode_message(format, message, mean)
            is_delta = torch.cat([torch.full((part.numel,), part.segment == 0) for part in message])
            return encode_message(format, message, torch.where(is_delta, values * factor, values))

        return lie
