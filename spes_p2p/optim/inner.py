"""The inner optimizer: its update rules, and its state per shared parameter and slot.

A rule is one torch optimizer with the state that it keeps per parameter; `InnerOptimizer` adds and removes slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from spes_p2p.config import OptimizerName, TrainConfig
from spes_p2p.dtensor import distribute_like, full_tensor
from spes_p2p.optim.blockwise import BLOCK_SIZE, adamw8bit, is_quantised

SHARED = "shared"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""The kinds of moments, by torch's names, in the order in which they follow a delta."""
UNBIASED_STEPS = 1e6
"""Step count of averaged moments: they are corrected already, and at this count the correction has no effect."""
NOT_HIDDEN = ("embed_tokens", "lm_head")
"""Modules whose matrices Muon leaves to AdamW, by their stock names."""


class Lamb(torch.optim.Optimizer):
    """AdamW whose step, decay included, is scaled to `lr` times the tensor's norm.

    State and defaults are AdamW's, `step` being an fp32 scalar. If a tensor or its step is zero, the step is AdamW's.
    The paper's `phi` is the identity, as in its experiments.

    Source: LAMB, Algorithm 2 (https://arxiv.org/abs/1904.00962).
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    update = self._update(param, group)
                    norm, update_norm = torch.linalg.vector_norm(param), torch.linalg.vector_norm(update)
                    ratio = torch.where((norm > 0) & (update_norm > 0), norm / update_norm, 1.0)
                    param.sub_(update.mul_(ratio * group["lr"]))

    def _update(self, param: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Update the moments and return the paper's `r_t + lambda x_t`."""
        (beta1, beta2), state = group["betas"], self.state[param]
        if not state:
            state["step"] = torch.zeros((), device=param.device)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        state["step"] += 1
        step = state["step"].item()
        state["exp_avg"].lerp_(param.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        return (state["exp_avg"] / (1 - beta1**step)).div_(root).add_(param, alpha=group["weight_decay"])


class Fp32Muon(torch.optim.Muon):
    """Muon whose Newton-Schulz iterations are in fp32, for CPUs: without instructions for bf16, torch's take 20 times
    as long. The momentum is Nesterov's, and the learning rate is scaled as by `match_rms_adamw`.

    Source: torch.optim.Muon, and Muon is Scalable for LLM Training (https://arxiv.org/abs/2502.16982).
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                momentum = state["momentum_buffer"].lerp_(param.grad, 1 - group["momentum"])
                update = orthogonalised(torch.lerp(param.grad, momentum, group["momentum"]), group)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(update, alpha=-0.2 * group["lr"] * math.sqrt(max(param.shape)))


def orthogonalised(matrix: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Return a matrix with about the same singular vectors, and all singular values near 1; settings are Muon's."""
    (a, b, c), is_tall = settings["ns_coefficients"], matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=settings["eps"])
    for _ in range(settings["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class Rule:
    """A torch optimizer, with access to the state that it keeps of one parameter.

    State is a dictionary of tensors by kind: the rule's moments, of the parameter's shape and dtype, and if a bias
    correction needs it `step`, an fp32 scalar.

    Args:
        keys: The optimizer's own names of the kinds.
        decays: Factor of each moment per step.
        is_biased: Whether moments start at zero and are corrected for it on use.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        keys: Mapping[str, str],
        decays: Mapping[str, float],
        *,
        is_biased: bool = True,
    ) -> None:
        self.optimizer = optimizer
        self._keys = dict(keys)
        self._decays = dict(decays)
        self._is_biased = is_biased

    @property
    def group(self) -> dict[str, Any]:
        """Torch's only group of parameters: one launch steps them all."""
        return self.optimizer.param_groups[0]

    @property
    def moments(self) -> tuple[str, ...]:
        """Kinds of moments that this rule keeps."""
        return tuple(kind for kind in MOMENTS if kind in self._keys)

    def takes(self, name: str, param: Parameter) -> bool:
        """Tell whether this rule updates a parameter that no earlier rule takes."""
        return True

    def layout(self, param: Parameter) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return the shape and dtype of a parameter's state, by kind."""
        step = (torch.Size([]), torch.float32)
        return {kind: step if kind == "step" else (param.shape, param.dtype) for kind in self._keys}

    def read(self, param: Parameter) -> dict[str, Tensor]:
        """Return a parameter's state by kind, by reference; empty before its first step."""
        state = self.optimizer.state.get(param)
        return {kind: torch.as_tensor(state[self._keys[kind]]) for kind in self.layout(param)} if state else {}

    def write(self, param: Parameter, state: Mapping[str, Tensor]) -> None:
        """Replace a parameter's state; keep references to the tensors, which must lie on its device."""
        self.optimizer.state[param] = {self._keys[kind]: state[kind] for kind in self.layout(param)}

    def moment(self, param: Parameter, kind: str) -> Tensor:
        """Return a copy of a moment, bias-corrected if the rule corrects; zeros before the first step."""
        state = self.read(param)
        if not state or kind not in self._keys:
            return torch.zeros_like(param)
        value = self._decode(param, kind, state)
        if not self._is_biased:
            return value.clone()
        step = state["step"].item()
        return value / (1.0 - self._decays[kind] ** step) if step else torch.zeros_like(param)

    def set_moments(self, param: Parameter, moments: Mapping[str, Tensor]) -> None:
        """Replace the moments of the given kinds by bias-corrected ones; a missing kind keeps its own value."""
        state = {"step": torch.tensor(UNBIASED_STEPS, device=param.device)}
        for kind in self.moments:
            value = self.moment(param, kind)
            if kind in moments:
                value = distribute_like(moments[kind].to(param.dtype, copy=True), param)
            state |= self._encode(param, kind, value.clamp_(min=0) if kind == "exp_avg_sq" else value)
        self.write(param, state)

    def _decode(self, param: Parameter, kind: str, state: Mapping[str, Tensor]) -> Tensor:
        return state[kind]

    def _encode(self, param: Parameter, kind: str, value: Tensor) -> dict[str, Tensor]:
        return {kind: value}


class MuonRule(Rule):
    """Muon for the hidden matrices: those of attention, routers and experts.

    AdamW updates embeddings, head and norms, as in Moonlight. A fused gate and up projection is one matrix.

    Source: Muon is Scalable for LLM Training (https://arxiv.org/abs/2502.16982).
    """

    def takes(self, name: str, param: Parameter) -> bool:
        return param.dim() == 2 and not any(part in NOT_HIDDEN for part in name.split("."))


class BlockwiseRule(Rule):
    """AdamW of bitsandbytes, whose moments are 8-bit codes with a scale per block.

    `exp_avg` and `exp_avg_sq` are uint8 of the parameter's shape; `exp_avg_absmax` and `exp_avg_sq_absmax` hold the
    scales. A small parameter has fp32 moments without scales. The maps from codes to values are constants.

    Source: 8-bit Optimizers via Block-wise Quantization (https://arxiv.org/abs/2110.02861).
    """

    def layout(self, param: Parameter) -> dict[str, tuple[torch.Size, torch.dtype]]:
        layout = super().layout(param)
        blocks = torch.Size([-(-param.numel() // BLOCK_SIZE)])
        for kind in self.moments:
            layout[kind] = (param.shape, torch.uint8 if is_quantised(param) else torch.float32)
            layout[f"{kind}_absmax"] = (blocks, torch.float32)
        return {kind: spec for kind, spec in layout.items() if is_quantised(param) or not kind.endswith("_absmax")}

    def read(self, param: Parameter) -> dict[str, Tensor]:
        state = super().read(param)
        return state | {"step": state["step"].float()} if state else {}

    def write(self, param: Parameter, state: Mapping[str, Tensor]) -> None:
        super().write(param, state)
        own = self.optimizer.state[param]
        own["step"] = int(state["step"].item())
        if is_quantised(param):
            own |= {f"qmap{number}": self._map(kind, param) for number, kind in enumerate(self.moments, 1)}

    def _map(self, kind: str, param: Parameter) -> Tensor:
        """Return the values that the 256 codes of a moment stand for."""
        maps, name = self.optimizer.name2qmap, "dynamic" if kind == "exp_avg" else "udynamic"  # type: ignore[attr-defined]
        maps[name] = maps[name].to(param.device)
        return maps[name]

    def _decode(self, param: Parameter, kind: str, state: Mapping[str, Tensor]) -> Tensor:
        if not is_quantised(param):
            return state[kind]
        from bitsandbytes.functional import dequantize_blockwise

        code = self._map(kind, param)
        return dequantize_blockwise(state[kind], absmax=state[f"{kind}_absmax"], code=code, blocksize=BLOCK_SIZE)

    def _encode(self, param: Parameter, kind: str, value: Tensor) -> dict[str, Tensor]:
        if not is_quantised(param):
            return {kind: value}
        from bitsandbytes.functional import quantize_blockwise

        numbers, scale = quantize_blockwise(value, code=self._map(kind, param), blocksize=BLOCK_SIZE)
        return {kind: numbers, f"{kind}_absmax": scale.absmax}


def make_rules(name: OptimizerName, train: TrainConfig, device: torch.device) -> tuple[Rule, ...]:
    """Make the rules of an inner optimizer, without parameters; the first rule that takes a parameter updates it.

    Raises:
        ConfigError: bitsandbytes is missing, or does not work on this device.
    """
    decays = {"exp_avg": train.beta1, "exp_avg_sq": train.beta2}
    settings: dict[str, Any] = {"lr": train.lr, "betas": tuple(decays.values()), "weight_decay": train.weight_decay}
    both = {kind: kind for kind in (*MOMENTS, "step")}
    options: dict[str, Any]
    if name == "lamb":
        return (Rule(Lamb(_no_params(), {"eps": train.eps, **settings}), both, decays),)
    if name == "adamw8bit":
        optimizer = adamw8bit(device)(_no_params(), eps=train.eps, **settings)
        first = {"exp_avg": "state1", "exp_avg_absmax": "absmax1"}
        second = {"exp_avg_sq": "state2", "exp_avg_sq_absmax": "absmax2"}
        return (BlockwiseRule(optimizer, first | second | {"step": "step"}, decays),)
    adamw = Rule(torch.optim.AdamW(_no_params(), eps=train.eps, fused=True, **settings), both, decays)
    if name != "muon":
        return (adamw,)
    options = {"lr": train.lr, "momentum": train.beta1, "weight_decay": train.weight_decay}
    make = torch.optim.Muon if device.type == "cuda" else Fp32Muon
    muon = make(_no_params(), adjust_lr_fn="match_rms_adamw", **options)  # so that train.lr keeps its meaning
    return (MuonRule(muon, {"exp_avg": "momentum_buffer"}, {"exp_avg": train.beta1}, is_biased=False), adamw)


def _no_params() -> list[dict[str, Any]]:
    return [{"params": []}]


class InnerOptimizer:
    """AdamW, or another optimizer by name, of the shared parameters and of those of each claimed slot.

    Weight decay acts on every parameter, embeddings and norms too, as in SPES. Removing a slot returns its state as
    plain tensors; another peer that adds the slot with them continues bit for bit. Parameters are held by reference;
    state is copied in and out. AdamW uses torch's fused kernel, which is the fastest and needs no temporaries.

    State names are `<group>/<parameter>/<kind>`: the group is `shared` or `slot-<e>`, the kind is the rule's, with
    AdamW `exp_avg`, `exp_avg_sq` (both of the parameter's shape and dtype) and `step` (fp32 scalar). A parameter has no
    state before its first step.

    Source: AdamW (https://arxiv.org/abs/1711.05101) in `torch.optim`; hyperparameters from SPES.

    Args:
        name: Optimizer in place of `train.optimizer`.
        gradients: Precision of the gradients until the step; `bf16` only with the 8-bit optimizers.

    Raises:
        ConfigError: the optimizer does not work on this machine.
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
        """Slots with a group, ascending."""
        return sorted(int(group.removeprefix("slot-")) for group in self._groups if group != SHARED)

    def kinds(self, group: str) -> tuple[str, ...]:
        """Return the kinds of moments that a slot's rules keep, or any rule for `shared`, as ordered behind a delta."""
        rules = self._rules if group == SHARED else [self._rule(*item) for item in self._groups[group].items()]
        return tuple(kind for kind in MOMENTS if any(kind in rule.moments for rule in rules))

    def step(self, lr: float) -> float:
        """Clip the gradients to the clipping norm and make one step at rate `lr`.

        Returns:
            The global gradient norm before clipping. If it is not finite, nothing has changed: count the step as
            skipped and call `zero_grad`.
        """
        # Shared first, then slots ascending: the norm is a sum, and its last bits must not depend on the order of
        # claims.
        groups = [SHARED, *(_group_name(slot) for slot in self.slots)]
        params = [p for group in groups for p in self._groups[group].values() if p.grad is not None]
        norm = full_tensor(get_total_norm([p.grad for p in params if p.grad is not None]))
        if not math.isfinite(norm.item()):
            return norm.item()
        clip_grads_with_norm_(params, self._clip_norm, norm)
        for rule in self._rules:
            rule.group["lr"] = lr
            rule.optimizer.step()
        return norm.item()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for rule in self._rules:
            rule.optimizer.zero_grad(set_to_none=True)

    def add_slot(self, slot: int, params: Mapping[str, Parameter], payload: Mapping[str, Tensor] | None = None) -> None:
        """Start to train a slot, from the result of `remove_slot` or with empty moments."""
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
        for name, param in params.items():
            self._rule(name, param).group["params"].append(param)

    def _rule(self, name: str, param: Parameter) -> Rule:
        return next(rule for rule in self._rules if rule.takes(name, param))

    def remove_slot(self, slot: int) -> dict[str, Tensor]:
        """Stop training a slot; return its state as CPU tensors named `<parameter>/<kind>`, for `add_slot`."""
        group = _group_name(slot)
        params = self._groups.pop(group)
        payload = self._state_of(params)
        gone = set(params.values())
        for rule in self._rules:
            rule.group["params"] = [param for param in rule.group["params"] if param not in gone]
            for param in gone:
                rule.optimizer.state.pop(param, None)
        return payload

    def moments(self, group: str, kinds: Sequence[str]) -> list[dict[str, Tensor]]:
        """Return a group's bias-corrected moments by parameter, one dictionary for each of `kinds`.

        Correction makes the moments of peers with different numbers of steps comparable, so that they can be averaged.
        Muon's momentum counts as a first moment; it is used uncorrected, and stays so. Moments that the
        optimizer does not keep, or has not stepped yet, are zeros.

        Source: Adam, Algorithm 1 (https://arxiv.org/abs/1412.6980).
        """
        params = self._groups[group]
        return [{name: self._rule(name, param).moment(param, kind) for name, param in params.items()} for kind in kinds]

    def set_moments(self, group: str, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace a group's moments by averaged, bias-corrected ones, by kind and parameter; other kinds stay.

        Second moments below zero, which a low-bit mean may produce, count as zero. Kinds that a parameter's rule does
        not keep are ignored.
        """
        for name, param in self._groups[group].items():
            self._rule(name, param).set_moments(param, {kind: tensors[name] for kind, tensors in moments.items()})

    def state_tensors(self) -> dict[str, Tensor]:
        """Copy all state to the CPU, under flat names for safetensors."""
        return {
            f"{group}/{name}": tensor
            for group, params in self._groups.items()
            for name, tensor in self._state_of(params).items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all state by the `state_tensors()` of an optimizer over the same names and shapes."""
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
        """Check tensors named `<parameter>/<kind>`; return copies by parameter and kind."""
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
            state[name] = {}
            for kind, tensor in own.items():
                _check_tensor(f"{group}/{name}/{kind}", kind, tensor, *layout[kind])
                copy = tensor.detach().clone()
                is_sharded = copy.shape == param.shape  # other state is whole on every rank
                state[name][kind] = distribute_like(copy, param) if is_sharded else copy.to(param.device)
        if unread:
            raise ValueError(f"optimizer state for {group}/{min(unread)!s}, which this model does not have")
        return state


def _group_name(slot: int) -> str:
    return f"slot-{slot}"


def _check_tensor(where: str, kind: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"{where} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(shape)}")
    if not tensor.isfinite().all():
        raise ValueError(f"{where} has values that are not finite; start this group without state")
    if kind != "exp_avg" and tensor.numel() and tensor.min() < 0:
        raise ValueError(f"{where} is negative ({tensor.min().item():g}); start this group without state")
