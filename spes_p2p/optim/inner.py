"""The inner optimizer: AdamW over what this peer trains, one group for the shared parameters and one per slot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from spes_p2p.config import TrainConfig

SHARED = "shared"
BETAS = {"exp_avg": "beta1", "exp_avg_sq": "beta2"}
"""The moments, and the setting each decays by."""
STATE_KINDS = (*BETAS, "step")
SETTLED_STEPS = 1e6
"""Step count of moments that need no bias correction any more: averaged ones, which are corrected before."""


class InnerOptimizer:
    """AdamW whose groups come and go with a peer's claims.

    Weight decay acts on every parameter, embeddings and norms too, as in SPES. The moments of a slot leave with it as a
    payload of plain tensors, and a later holder who installs the payload continues bit for bit. Parameters are kept by
    reference; state goes in and out by copy. The fused kernel is the fast one and the one without temporaries: on a CPU
    it takes a third of the time of `foreach`, which also needs a fourth of the trained bytes more.

    State names are `<group>/<parameter>/<kind>`, the group being `shared` or `slot-<e>`, the kind `exp_avg`,
    `exp_avg_sq` (both of the parameter's shape and dtype) or `step` (fp32 scalar). A parameter that was never stepped
    has no state.

    Source: AdamW (https://arxiv.org/abs/1711.05101) in `torch.optim`; hyperparameters from SPES.

    Args:
        shared: The shared parameters by name.
        slots: The parameters of each claimed slot by name.
        train: Betas, epsilon, weight decay and clipping norm; the learning rate comes with each step.
    """

    def __init__(
        self, shared: Mapping[str, Parameter], slots: Mapping[int, Mapping[str, Parameter]], train: TrainConfig
    ) -> None:
        self._clip_norm = train.clip_norm
        self._betas = {kind: getattr(train, beta) for kind, beta in BETAS.items()}
        self._groups: dict[str, dict[str, Parameter]] = {SHARED: dict(shared)}
        self._adamw = torch.optim.AdamW(
            [{"params": list(shared.values()), "name": SHARED}],
            lr=train.lr,
            betas=(train.beta1, train.beta2),
            eps=train.eps,
            weight_decay=train.weight_decay,
            fused=True,
        )
        for slot, params in slots.items():
            self.add_slot(slot, params)

    @property
    def slots(self) -> list[int]:
        """The slots with a group, ascending."""
        return sorted(int(group.removeprefix("slot-")) for group in self._groups if group != SHARED)

    def step(self, lr: float) -> float:
        """One AdamW step at rate `lr`, gradients scaled down to the clipping norm first.

        Returns:
            The global gradient norm before clipping. If it is not finite nothing was changed: the caller counts the
            step as skipped and goes on with `zero_grad`.
        """
        # Shared first, then slots ascending: the norm is a sum, and its last bits must not depend on the order in
        # which slots were claimed.
        groups = [SHARED, *(_group_name(slot) for slot in self.slots)]
        params = [p for group in groups for p in self._groups[group].values() if p.grad is not None]
        norm = get_total_norm([p.grad for p in params if p.grad is not None])
        if not math.isfinite(norm.item()):
            return norm.item()
        clip_grads_with_norm_(params, self._clip_norm, norm)
        for param_group in self._adamw.param_groups:
            param_group["lr"] = lr
        self._adamw.step()
        return norm.item()

    def zero_grad(self) -> None:
        """Drops all gradients."""
        self._adamw.zero_grad(set_to_none=True)

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
        state = _checked_state(params, payload or {}, group)
        self._groups[group] = dict(params)
        self._adamw.add_param_group({"params": list(params.values()), "name": group})
        self._adamw.state.update(state)

    def remove_slot(self, slot: int) -> dict[str, Tensor]:
        """Stops training a slot.

        Returns:
            Its state as CPU tensors named `<parameter>/<kind>`, for whoever trains the slot next.
        """
        group = _group_name(slot)
        params = self._groups.pop(group)
        payload = self._state_of(params)
        self._adamw.param_groups = [entry for entry in self._adamw.param_groups if entry["name"] != group]
        for param in params.values():
            self._adamw.state.pop(param, None)
        return payload

    def moments(self, group: str, kinds: Sequence[str]) -> list[dict[str, Tensor]]:
        """The bias-corrected moments of a group by parameter, zeros where nothing was stepped.

        Corrected, the moments of peers that have made different numbers of steps have the same meaning, and so a mean.

        Source: Adam, Algorithm 1 (https://arxiv.org/abs/1412.6980).

        Args:
            group: `shared` or `slot-<e>`.
            kinds: Of `BETAS`; one dictionary is returned for each.
        """
        return [{name: self._corrected(param, kind) for name, param in self._groups[group].items()} for kind in kinds]

    def set_moments(self, group: str, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Goes on from averaged, bias-corrected moments, and from its own in whatever kind was not averaged.

        Args:
            group: `shared` or `slot-<e>`.
            moments: By kind, tensors of every parameter's shape. Second moments below zero count as zero, for a
                low-bit mean may round there.
        """
        for name, param in self._groups[group].items():
            state = {
                kind: moments[kind][name].to(param.device, param.dtype, copy=True)
                if kind in moments
                else self._corrected(param, kind)
                for kind in BETAS
            }
            state["exp_avg_sq"].clamp_(min=0)
            self._adamw.state[param] = {"step": torch.tensor(SETTLED_STEPS, device=param.device), **state}

    def _corrected(self, param: Parameter, kind: str) -> Tensor:
        state = self._adamw.state.get(param)
        step = state["step"].item() if state else 0.0
        return state[kind] / (1.0 - self._betas[kind] ** step) if state and step else torch.zeros_like(param)

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
        state: dict[Tensor, dict[str, Tensor]] = {}
        unread = dict(tensors)
        for group, params in self._groups.items():
            prefix = f"{group}/"
            own = {name.removeprefix(prefix): unread.pop(name) for name in tensors if name.startswith(prefix)}
            state |= _checked_state(params, own, group)
        if unread:
            raise ValueError(
                f"optimizer state for {min(unread)!r}, but this peer trains {', '.join(self._groups)}; "
                f"claim the same slots before loading"
            )
        self._adamw.state.clear()
        self._adamw.state.update(state)

    def _state_of(self, params: Mapping[str, Parameter]) -> dict[str, Tensor]:
        return {
            f"{name}/{kind}": self._adamw.state[param][kind].detach().to("cpu", copy=True)
            for name, param in params.items()
            if param in self._adamw.state
            for kind in STATE_KINDS
        }


def _group_name(slot: int) -> str:
    return f"slot-{slot}"


def _checked_state(
    params: Mapping[str, Parameter], tensors: Mapping[str, Tensor], group: str
) -> dict[Tensor, dict[str, Tensor]]:
    """Copies of `tensors` (by `<parameter>/<kind>`) as AdamW's state, after checking every one of them.

    Raises:
        ValueError: A parameter is unknown or has only part of its state, or a tensor has the wrong shape or dtype, or
            values that AdamW cannot have produced.
    """
    state: dict[Tensor, dict[str, Tensor]] = {}
    unread = dict(tensors)
    for name, param in params.items():
        own = {kind: unread.pop(f"{name}/{kind}") for kind in STATE_KINDS if f"{name}/{kind}" in tensors}
        if not own:
            continue
        if len(own) < len(STATE_KINDS):
            missing = sorted(set(STATE_KINDS) - set(own))
            raise ValueError(f"optimizer state of {group}/{name} lacks {', '.join(missing)}; give all of it or none")
        for kind, tensor in own.items():
            _check_tensor(f"{group}/{name}/{kind}", kind, tensor, param)
        state[param] = {kind: tensor.detach().to(param.device, copy=True) for kind, tensor in own.items()}
    if unread:
        raise ValueError(f"optimizer state for {group}/{min(unread)!s}, which this model does not have")
    return state


def _check_tensor(where: str, kind: str, tensor: Tensor, param: Parameter) -> None:
    shape, dtype = (torch.Size([]), torch.float32) if kind == "step" else (param.shape, param.dtype)
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"{where} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(shape)}")
    if not tensor.isfinite().all():
        raise ValueError(f"{where} has values that are not finite; start this group without state")
    if kind != "exp_avg" and tensor.numel() and tensor.min() < 0:
        raise ValueError(f"{where} is negative ({tensor.min().item():g}); start this group without state")
