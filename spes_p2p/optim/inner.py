"""The inner optimizer over what this peer trains, one group for the shared parameters and one per slot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from spes_p2p.config import OptimizerName, RunConfig, TrainConfig
from spes_p2p.dtensor import distribute_like, full_tensor
from spes_p2p.optim.rules import MOMENTS, Rule, make_rules

LEAST_SHARE = 0.25
"""Of the rate at its round's end: with how much of it a step is made at least, in rounds that end by the clock."""


def learning_rate(train: TrainConfig, rounds_elapsed: float, total_rounds: int) -> float:
    """Learning rate at one point of the run: linear warm-up, then a cosine, a plateau with a decay, or a constant.

    Rounds, not steps, are the clock that all peers share: a slow peer makes fewer steps in a round, and stays on the
    same schedule. A newcomer therefore starts in the middle of it.

    Args:
        train: Peak, warm-up, shape, decay and final share.
        rounds_elapsed: Rounds since the run began, a fraction within a round; clamped to [0, `total_rounds`].
        total_rounds: Rounds in the run. A warm-up that is longer is cut off by the run's end.

    Returns:
        The rate for the next optimizer step: 0 at the very start if there is a warm-up, `train.lr` at the warm-up's
        end, with `cosine` and `wsd` `train.lr * train.final_lr_ratio` at `total_rounds` and after.

    Source: SGDR's cosine without restarts (https://arxiv.org/abs/1608.03983), as SPES uses it; warm-up, stable, decay
    from MiniCPM (https://arxiv.org/abs/2404.06395), with the linear decay of https://arxiv.org/abs/2405.18392.
    """
    elapsed = min(max(rounds_elapsed, 0.0), float(total_rounds))
    if elapsed < train.warmup_rounds:
        return train.lr * elapsed / train.warmup_rounds
    if train.schedule == "constant" or total_rounds <= train.warmup_rounds:
        return train.lr
    if train.schedule == "wsd":
        left = min(1.0, (total_rounds - elapsed) / (total_rounds * train.decay_fraction))
        return train.lr * (train.final_lr_ratio + (1 - train.final_lr_ratio) * left)
    progress = (elapsed - train.warmup_rounds) / (total_rounds - train.warmup_rounds)
    ratio = train.final_lr_ratio + (1 - train.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    return train.lr * ratio


def rate_of_step(run: RunConfig, rounds_elapsed: float) -> float:
    """Learning rate of a local step, where one may be a peer's only one in its round.

    In a warm-up's first round such a step, at the round's beginning, would be for nothing, and so short that what the
    others have made of the same round looks beyond all measure to who made it (docs/trust.md).

    Args:
        run: The run's settings.
        rounds_elapsed: Rounds since the run began, a fraction within a round.

    Returns:
        That of `learning_rate`; in rounds that end by the clock a quarter of that at the round's end at least.
    """
    train, total = run.train, run.round.total
    rate = learning_rate(train, rounds_elapsed, total)
    if run.round.mode == "steps":  # all make as many
        return rate
    return max(rate, LEAST_SHARE * learning_rate(train, math.floor(rounds_elapsed) + 1, total))


SHARED = "shared"


class InnerOptimizer:
    """AdamW, or another by name, whose groups come and go with a peer's claims.

    Weight decay acts on every parameter, embeddings and norms too, as in SPES. The moments of a slot leave with it as a
    payload of plain tensors, and a later holder who installs the payload continues bit for bit. Parameters are kept by
    reference; state goes in and out by copy. AdamW's fused kernel is the fast one and the one without temporaries: on a
    CPU it takes a third of the time of `foreach`, which also needs a fourth of the trained bytes more.

    State names are `<group>/<parameter>/<kind>`, the group being `shared` or `slot-<e>`, the kind as the parameter's
    rule has it: with AdamW `exp_avg`, `exp_avg_sq` (both of the parameter's shape and dtype) and `step` (fp32 scalar).
    A parameter that was never stepped has no state.

    Source: AdamW (https://arxiv.org/abs/1711.05101) in `torch.optim`; hyperparameters from SPES. The others: `rules`.

    Args:
        shared: The shared parameters by name, on the device where they are trained.
        slots: The parameters of each claimed slot by name.
        train: Optimizer, betas, epsilon, weight decay and clipping norm; the learning rate comes with each step.
        name: Another optimizer than `train.optimizer`.
        gradients: Precision in which gradients are kept until the step; `bf16` for the 8-bit optimizers alone.

    Raises:
        ConfigError: the optimizer cannot work here.
    """

    def __init__(
        self,
        shared: Mapping[str, Parameter],
        slots: Mapping[int, Mapping[str, Parameter]],
        train: TrainConfig,
        name: OptimizerName | None = None,
        gradients: Literal["fp32", "bf16"] = "fp32",
    ) -> None:
        self._gradient_dtype = torch.bfloat16 if gradients == "bf16" else None
        self._clip_norm = train.clip_norm
        self._groups: dict[str, dict[str, Parameter]] = {}
        self._rules = make_rules(name or train.optimizer, train, next(iter(shared.values())).device)
        self._add(SHARED, shared)
        for slot, params in slots.items():
            self.add_slot(slot, params)

    @property
    def slots(self) -> list[int]:
        """The slots with a group, ascending."""
        return sorted(int(group.removeprefix("slot-")) for group in self._groups if group != SHARED)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of moments that there are, in the order in which they lie behind a delta."""
        return tuple(kind for kind in MOMENTS if any(kind in rule.moments for rule in self._rules))

    def step(self, lr: float) -> float:
        """One step at rate `lr`, gradients scaled down to the clipping norm first.

        Returns:
            The global gradient norm before clipping. If it is not finite nothing was changed: the caller counts the
            step as skipped and goes on with `zero_grad`.
        """
        # Shared first, then slots ascending: the norm is a sum, and its last bits must not depend on the order in
        # which slots were claimed.
        groups = [SHARED, *(_group_name(slot) for slot in self.slots)]
        params = [p for group in groups for p in self._groups[group].values() if p.grad is not None]
        norm = full_tensor(get_total_norm([p.grad for p in params if p.grad is not None]))
        if not math.isfinite(norm.item()):
            return norm.item()
        clip_grads_with_norm_(params, self._clip_norm, norm)
        for rule in self._rules:
            for param_group in rule.optimizer.param_groups:
                param_group["lr"] = lr
            rule.optimizer.step()
        return norm.item()

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for rule in self._rules:
            rule.optimizer.zero_grad(set_to_none=True)

    def add_slot(self, slot: int, params: Mapping[str, Parameter], payload: Mapping[str, Tensor] | None = None) -> None:
        """Starts to train a slot.

        Args:
            slot: Expert index, not yet among this optimizer's.
            params: The slot's parameters by name.
            payload: What `remove_slot` returned, here or on another peer; None starts with empty moments.

        Raises:
            ValueError: The payload's names, shapes, dtypes or values do not fit `params`; nothing was added.
        """
        group = _group_name(slot)
        assert group not in self._groups, f"slot {slot} is trained already"
        state = self._checked_state(params, payload or {}, group)
        self._add(group, params)
        self._write(params, state)

    def _add(self, group: str, params: Mapping[str, Parameter]) -> None:
        self._groups[group] = dict(params)
        if self._gradient_dtype is not None:
            for param in params.values():
                param.grad_dtype = self._gradient_dtype
        for rule in self._rules:
            own = [param for name, param in params.items() if self._rule(name, param) is rule]
            if own:
                rule.optimizer.add_param_group({"params": own, "name": group})

    def _rule(self, name: str, param: Parameter) -> Rule:
        return next(rule for rule in self._rules if rule.takes(name, param))

    def remove_slot(self, slot: int) -> dict[str, Tensor]:
        """Stops training a slot.

        Returns:
            Its state as CPU tensors named `<parameter>/<kind>`, for whoever trains the slot next.
        """
        group = _group_name(slot)
        params = self._groups.pop(group)
        payload = self._state_of(params)
        for rule in self._rules:
            optimizer = rule.optimizer
            optimizer.param_groups = [entry for entry in optimizer.param_groups if entry["name"] != group]
            for param in params.values():
                optimizer.state.pop(param, None)
        return payload

    def moments(self, group: str, kinds: Sequence[str]) -> list[dict[str, Tensor]]:
        """The bias-corrected moments of a group by parameter, zeros where nothing was stepped and where there is none.

        Corrected, the moments of peers that have made different numbers of steps have the same meaning, and so a mean.
        The momenta of Lion and Muon count as first moments; they are used uncorrected, and stay so.

        Source: Adam, Algorithm 1 (https://arxiv.org/abs/1412.6980).

        Args:
            group: `shared` or `slot-<e>`.
            kinds: Of `MOMENTS`; one dictionary is returned for each, whatever the optimizer keeps.
        """
        params = self._groups[group]
        return [{name: self._rule(name, param).moment(param, kind) for name, param in params.items()} for kind in kinds]

    def set_moments(self, group: str, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Goes on from averaged, bias-corrected moments, and from its own in whatever kind was not averaged.

        Args:
            group: `shared` or `slot-<e>`.
            moments: By kind, tensors of every parameter's shape. Second moments below zero count as zero, for a
                low-bit mean may round there. Kinds that a parameter's rule does not keep are ignored.
        """
        for name, param in self._groups[group].items():
            self._rule(name, param).settle(param, {kind: tensors[name] for kind, tensors in moments.items()})

    def set_moments_late(
        self,
        group: str,
        moments: Mapping[str, Mapping[str, Tensor]],
        before: Mapping[str, Mapping[str, Tensor]],
        steps: int,
    ) -> None:
        """Does what `set_moments` would have done `steps` steps ago; the gradients met since count as they would have.

        Exact but for rounding, and for steps in which the other moments would have led elsewhere. Whatever kind was not
        averaged goes on from what it is now. 8-bit state is rounded once more.

        Args:
            group: `shared` or `slot-<e>`.
            moments: As `set_moments` takes them.
            before: What `moments` returned `steps` steps ago, by kind.
            steps: Steps made since.
        """
        for name, param in self._groups[group].items():
            self._rule(name, param).settle_late(
                param,
                {kind: tensors[name] for kind, tensors in moments.items()},
                {kind: tensors[name] for kind, tensors in before.items()},
                steps,
            )

    def state_tensors(self) -> dict[str, Tensor]:
        """All state, as copies on the CPU, under flat names that safetensors takes."""
        return {
            f"{group}/{name}": tensor
            for group, params in self._groups.items()
            for name, tensor in self._state_of(params).items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces all state by `state_tensors()` of an optimizer over the same names and shapes.

        Raises:
            ValueError: A name, shape, dtype or value does not fit; the state is as before.
        """
        state: dict[str, dict[str, dict[str, Tensor]]] = {}
        unread = dict(tensors)
        for group, params in self._groups.items():
            prefix = f"{group}/"
            own = {name.removeprefix(prefix): unread.pop(name) for name in tensors if name.startswith(prefix)}
            state[group] = self._checked_state(params, own, group)
        if unread:
            raise ValueError(
                f"optimizer state for {min(unread)!r}, but this peer trains {', '.join(self._groups)}; "
                f"claim the same slots before loading"
            )
        for rule in self._rules:
            rule.optimizer.state.clear()
        for group, params in self._groups.items():
            self._write(params, state[group])

    def _state_of(self, params: Mapping[str, Parameter]) -> dict[str, Tensor]:
        return {
            f"{name}/{kind}": full_tensor(tensor).detach().to("cpu", copy=True)
            for name, param in params.items()
            for kind, tensor in self._rule(name, param).read(param).items()
        }

    def _write(self, params: Mapping[str, Parameter], state: Mapping[str, Mapping[str, Tensor]]) -> None:
        for name, own in state.items():
            self._rule(name, params[name]).write(params[name], own)

    def _checked_state(
        self, params: Mapping[str, Parameter], tensors: Mapping[str, Tensor], group: str
    ) -> dict[str, dict[str, Tensor]]:
        """Copies of `tensors` (by `<parameter>/<kind>`) by parameter and kind, after checking every one of them.

        Raises:
            ValueError: A parameter is unknown or has only part of its state, or a tensor has the wrong shape or dtype,
                or values that the optimizer cannot have produced.
        """
        state: dict[str, dict[str, Tensor]] = {}
        unread = dict(tensors)
        for name, param in params.items():
            layout = self._rule(name, param).layout(param)
            own = {kind: unread.pop(f"{name}/{kind}") for kind in layout if f"{name}/{kind}" in tensors}
            if not own:
                continue
            if missing := sorted(layout.keys() - own.keys()):
                raise ValueError(
                    f"optimizer state of {group}/{name} lacks {', '.join(missing)}; give all of it or none"
                )
            for kind, tensor in own.items():
                _check_tensor(f"{group}/{name}/{kind}", kind, tensor, *layout[kind])
            state[name] = {kind: _on_ranks_of(param, tensor.detach().clone()) for kind, tensor in own.items()}
        if unread:
            raise ValueError(f"optimizer state for {group}/{min(unread)!s}, which this model does not have")
        return state


def _on_ranks_of(param: Parameter, tensor: Tensor) -> Tensor:
    """State beside its parameter: in parts where that is, but for what has another shape."""
    return distribute_like(tensor, param) if tensor.shape == param.shape else tensor.to(param.device)


def _group_name(slot: int) -> str:
    return f"slot-{slot}"


def _check_tensor(where: str, kind: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"{where} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(shape)}")
    if not tensor.isfinite().all():
        raise ValueError(f"{where} has values that are not finite; start this group without state")
    if kind != "exp_avg" and tensor.numel() and tensor.min() < 0:
        raise ValueError(f"{where} is negative ({tensor.min().item():g}); start this group without state")
