"""Dishonest peers for simulations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from spes_p2p.config import MAX_PEER_TOKENS, Frozen, PositiveFloat
from spes_p2p.sim.network import VirtualNode
from spes_p2p.sim.peer import VirtualSwarm
from spes_p2p.swarm.averaging.encoding import Contribution
from spes_p2p.swarm.averaging.group import Group
from spes_p2p.swarm.averaging.outcome import RoundResult, Staged
from spes_p2p.swarm.averaging.partition import Message, bytes_of, decode_message, encode_message
from spes_p2p.swarm.certificate import Body
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


class Spoiler:
    """Falsifies what one peer brings to rounds.

    Args:
        attacks: Applied one after the other.
        delta_numel: Elements of a delta, for `shared` and `slot`.
    """

    def __init__(self, attacks: Sequence[Attack], delta_numel: Mapping[str, int]) -> None:
        self.attacks = attacks
        self._delta_numel = delta_numel
        self._honest: dict[VectorName, Tensor] = {}
        self._means: dict[VectorName, Tensor] = {}

    def does(self, kind: str, round: int) -> list[Attack]:
        """Return the attacks of a kind that are under way in a round."""
        return [attack for attack in self.attacks if attack.kind == kind and round >= attack.from_round]

    def spoiled(self, contribution: Contribution) -> Contribution:
        """Return what the peer brings in place of what it has trained."""
        member = contribution.member
        for attack in self.does("inflate", member.round):
            tokens = min(int(member.tokens * attack.factor), MAX_PEER_TOKENS)
            member = member.model_copy(update={"tokens": tokens})
        deltas = {name: self._spoil(name, flat_N, member.round) for name, flat_N in contribution.deltas.items()}
        return Contribution(member, deltas)

    def learn(self, means: Mapping[VectorName, Tensor]) -> None:
        """Remember means, which the peer may bring as its own."""
        if any(attack.kind == "copy" for attack in self.attacks):
            self._means |= {name: mean.clone() for name, mean in means.items()}

    def overwrite(self, encoded: Mapping[VectorName, Tensor], round: int) -> None:
        """Make encoded vectors those of NaN, in any codec; an honest encoder would refuse to write it."""
        for attack in self.does("nan", round):
            for name in encoded:
                if attack.concerns(name, round):
                    encoded[name].fill_(255)

    def _spoil(self, name: VectorName, flat_N: Tensor, round: int) -> Tensor:
        numel = self._delta_numel[VectorName(name).kind]
        delta, moments = flat_N[:numel], flat_N[numel:]
        attacks = [attack for attack in self.attacks if attack.concerns(name, round)]
        if not attacks:
            self._honest[name] = delta.clone()
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


class AttackingSwarm(VirtualSwarm):
    """The swarm of an attacker: it falsifies vectors and means on the peer's behalf."""

    def __init__(self, network: VirtualNode, folder: Path, spoiler: Spoiler) -> None:
        super().__init__(network, folder)
        self._spoiler = spoiler

    def agree(
        self, contribution: Contribution, stage: Callable[[RoundResult], Staged | None], **when: Any
    ) -> Body | None:
        round, spoiler = contribution.member.round, self._spoiler

        def learns(result: RoundResult) -> Staged | None:
            spoiler.learn(result.means)
            return stage(result)

        if spoiler.does("silent", round):
            self.wait(max(0.0, when["closes_from"] - self.now()) + self._rounds.matchmaking_seconds)
            return None
        assert self._averaging is not None, "the run is entered"
        lies = spoiler.does("lying_reducer", round)
        self._averaging.group = partial(LyingGroup, lies[0].factor) if lies else Group
        return super().agree(spoiler.spoiled(contribution), learns, **when)

    def _encode(self, contribution: Contribution) -> tuple[Member, dict[VectorName, Tensor]]:
        member, encoded = super()._encode(contribution)
        self._spoiler.overwrite(encoded, member.round)
        return member, encoded


class LyingGroup(Group):
    """A reducer that negates and scales the deltas in its means; the other arguments are `Group`'s."""

    def __init__(self, factor: float, *group: Any, **settings: Any) -> None:
        super().__init__(*group, **settings)
        self._factor = -factor

    def _mean_of(self, message: Message, inbox: dict[int, bytes]) -> Tensor:
        values = decode_message(self.plan.format, message, super()._mean_of(message, inbox))
        factors = [torch.full((part.numel,), 1.0 if part.segment else self._factor) for part in message]
        place = bytes_of(message)
        self.mean[place] = encode_message(self.plan.format, message, values * torch.cat(factors))
        return self.mean[place]
