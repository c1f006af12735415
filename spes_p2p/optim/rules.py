"""The update rules behind the inner optimizers' names, and what each keeps of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from spes_p2p.config import OptimizerName, TrainConfig
from spes_p2p.dtensor import distribute_like
from spes_p2p.errors import ConfigError


class Lamb(torch.optim.Optimizer):
    """AdamW whose step, with its decay, is stretched to `lr` times the tensor's own norm.

    State is AdamW's: `exp_avg`, `exp_avg_sq`, and `step` as an fp32 scalar. Where a tensor or its step is zero, the
    step is AdamW's. The paper's `phi` is the identity, as in its experiments.

    Source: LAMB, Algorithm 2 (https://arxiv.org/abs/1904.00962).

    Args:
        groups: Parameter groups.
        lr: Share of a tensor's norm that one step covers.
        betas: Decays of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
    """

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        super().__init__(
            [dict(group) for group in groups], {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    update = self._update(param, group)
                    norm, update_norm = torch.linalg.vector_norm(param), torch.linalg.vector_norm(update)
                    ratio = torch.where((norm > 0) & (update_norm > 0), norm / update_norm, 1.0)
                    param.sub_(update.mul_(ratio * group["lr"]))

    def _update(self, param: Tensor, group: Mapping[str, Any]) -> Tensor:
        """The paper's `r_t + lambda x_t`; moves the moments on."""
        (beta1, beta2), state = group["betas"], self.state[param]
        if not state:
            state["step"] = torch.zeros((), device=param.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["step"] += 1
        step = state["step"].item()
        state["exp_avg"].lerp_(param.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        return (state["exp_avg"] / (1 - beta1**step)).div_(root).add_(param, alpha=group["weight_decay"])


MOMENTS = ("exp_avg", "exp_avg_sq")
"""The kinds of moments, by torch's names, in the order in which they lie behind a delta."""
SETTLED_STEPS = 1e6
"""Step count of moments that need no bias correction any more: averaged ones, which are corrected before."""
MIN_8BIT_SIZE = 4096
"""Parameters with fewer elements keep their state in fp32, as bitsandbytes has it."""
BLOCK_SIZE = 256
"""Elements that share a scale in 8-bit state; fixed in bitsandbytes."""
NOT_HIDDEN = ("embed_tokens", "lm_head")
"""Modules whose matrices Muon leaves to AdamW, by their stock names."""

Group = dict[str, Any]


class Rule:
    """A torch optimizer, and how what it keeps of one parameter is read and written.

    State is a dictionary of tensors by kind: the moments that the rule has, of the parameter's shape and dtype, and
    `step`, an fp32 scalar, where a bias correction needs it.

    Args:
        optimizer: Still without parameters; whoever adds a group to it adds its state here.
        keys: Names that the optimizer's own state has for the kinds.
        decays: What one step leaves of each moment.
        is_biased: Whether moments begin at zero and are corrected for it when they are used.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        keys: Mapping[str, str],
        decays: Mapping[str, float],
        *,
        is_biased: bool = True,
    ) -> None:
        self.optimizer, self._keys, self._decays, self._is_biased = optimizer, dict(keys), dict(decays), is_biased
        optimizer.param_groups.clear()  # torch wants one group to begin with

    @property
    def moments(self) -> tuple[str, ...]:
        """The kinds of moments that this rule keeps."""
        return tuple(kind for kind in MOMENTS if kind in self._keys)

    def takes(self, name: str, param: Parameter) -> bool:
        """Whether this rule updates a parameter that no rule before it takes."""
        return True

    def layout(self, param: Parameter) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of the state of a parameter, by kind."""
        step = (torch.Size([]), torch.float32)
        return {kind: step if kind == "step" else (param.shape, param.dtype) for kind in self._keys}

    def read(self, param: Parameter) -> dict[str, Tensor]:
        """The state of a parameter by kind, by reference; empty if it was never stepped."""
        state = self.optimizer.state.get(param)
        return {kind: torch.as_tensor(state[self._keys[kind]]) for kind in self.layout(param)} if state else {}

    def write(self, param: Parameter, state: Mapping[str, Tensor]) -> None:
        """Replaces the state of a parameter; keeps the tensors, which must lie on its device."""
        self.optimizer.state[param] = {self._keys[kind]: state[kind] for kind in self.layout(param)}

    def moment(self, param: Parameter, kind: str) -> Tensor:
        """A copy of a moment, bias-corrected where that is due; zeros if there is none."""
        state = self.read(param)
        if not state or kind not in self._keys:
            return torch.zeros_like(param)
        value = self._decode(param, kind, state)
        if not self._is_biased:
            return value.clone()
        step = state["step"].item()
        return value / (1.0 - self._decays[kind] ** step) if step else torch.zeros_like(param)

    def settle(self, param: Parameter, moments: Mapping[str, Tensor]) -> None:
        """Goes on from bias-corrected moments, and from its own in whatever kind is not given."""
        given = {kind: moments[kind].to(param.dtype, copy=True) for kind in self.moments if kind in moments}
        self._put(param, {kind: distribute_like(tensor, param) for kind, tensor in given.items()})

    def settle_late(
        self, param: Parameter, moments: Mapping[str, Tensor], before: Mapping[str, Tensor], steps: int
    ) -> None:
        """Goes on as if it had settled on these moments `steps` steps ago, and met the same gradients since.

        With decay b, n steps from a moment m lead to b^n m + g, g being of the gradients since alone. So from the own m
        of then and of now, g = m_now - b^n m_then, and from the moment a that it should have settled on, b^n a + g.
        What `moment` returned then is m_then / (1 - b^t) where t steps led there from zero; a needs no correction. g of
        a second moment is a sum of squares: it is rounding, or 8-bit state, that makes it negative.

        Args:
            param: The parameter.
            moments: As of `settle`; all kinds that are given are in `before`, too.
            before: What `moment` returned `steps` steps ago.
            steps: Steps made since, at most: a parameter without gradients makes none.
        """
        state, late = self.read(param), {}
        total = state["step"].item() if "step" in state else float(steps)
        for kind in (kind for kind in self.moments if kind in moments):
            made = min(float(steps), total) if state else 0.0
            left = self._decays[kind] ** made
            late[kind] = distribute_like(moments[kind].to(param.dtype, copy=True), param).mul_(left)
            if made:
                share = left * (1.0 - self._decays[kind] ** (total - made)) if self._is_biased else left
                since = self._decode(param, kind, state) - distribute_like(before[kind].to(param.dtype), param) * share
                late[kind] += since.clamp_(min=0) if kind == "exp_avg_sq" else since
        self._put(param, late)

    def _put(self, param: Parameter, values: Mapping[str, Tensor]) -> None:
        """Makes these values its moments, for good; where one is missing its own goes on, corrected."""
        state = {"step": torch.tensor(SETTLED_STEPS, device=param.device)}
        for kind in self.moments:
            value = values[kind] if kind in values else self.moment(param, kind)
            state |= self._encode(param, kind, value.clamp_(min=0) if kind == "exp_avg_sq" else value)
        self.write(param, state)

    def _decode(self, param: Parameter, kind: str, state: Mapping[str, Tensor]) -> Tensor:
        return state[kind]

    def _encode(self, param: Parameter, kind: str, value: Tensor) -> dict[str, Tensor]:
        return {kind: value}


class MuonRule(Rule):
    """Muon, for the hidden matrices only: those of attention, of routers and of experts.

    Embeddings, head and norms are AdamW's, as with Moonlight. A fused gate and up projection is one matrix.

    Source: Muon is Scalable for LLM Training (https://arxiv.org/abs/2502.16982).
    """

    def takes(self, name: str, param: Parameter) -> bool:
        return param.dim() == 2 and not any(part in NOT_HIDDEN for part in name.split("."))


class BlockwiseRule(Rule):
    """A bitsandbytes optimizer, whose moments are 8-bit numbers with a scale per block.

    `exp_avg` and `exp_avg_sq` are uint8 of the parameter's shape; `exp_avg_absmax` and `exp_avg_sq_absmax` hold the
    scales. A small parameter has fp32 moments without scales. The maps from numbers to values are constants.

    Source: 8-bit Optimizers via Block-wise Quantization (https://arxiv.org/abs/2110.02861).
    """

    def layout(self, param: Parameter) -> dict[str, tuple[torch.Size, torch.dtype]]:
        layout = super().layout(param)
        blocks = torch.Size([-(-param.numel() // BLOCK_SIZE)])
        for kind in self.moments:
            layout[kind] = (param.shape, torch.uint8 if _is_quantised(param) else torch.float32)
            layout[f"{kind}_absmax"] = (blocks, torch.float32)
        return {kind: spec for kind, spec in layout.items() if _is_quantised(param) or not kind.endswith("_absmax")}

    def read(self, param: Parameter) -> dict[str, Tensor]:
        state = super().read(param)
        return state | {"step": state["step"].float()} if state else {}

    def write(self, param: Parameter, state: Mapping[str, Tensor]) -> None:
        super().write(param, state)
        own = self.optimizer.state[param]
        own["step"] = int(state["step"].item())
        if _is_quantised(param):
            own |= {f"qmap{number}": self._map(kind, param) for number, kind in enumerate(self.moments, 1)}

    def _map(self, kind: str, param: Parameter) -> Tensor:
        """The values that the 256 numbers of a moment stand for."""
        maps, name = self.optimizer.name2qmap, "dynamic" if kind == "exp_avg" else "udynamic"  # type: ignore[attr-defined]
        maps[name] = maps[name].to(param.device)
        return maps[name]

    def _decode(self, param: Parameter, kind: str, state: Mapping[str, Tensor]) -> Tensor:
        if not _is_quantised(param):
            return state[kind]
        from bitsandbytes.functional import dequantize_blockwise

        code = self._map(kind, param)
        return dequantize_blockwise(state[kind], absmax=state[f"{kind}_absmax"], code=code, blocksize=BLOCK_SIZE)

    def _encode(self, param: Parameter, kind: str, value: Tensor) -> dict[str, Tensor]:
        if not _is_quantised(param):
            return {kind: value}
        from bitsandbytes.functional import quantize_blockwise

        numbers, scale = quantize_blockwise(value, code=self._map(kind, param), blocksize=BLOCK_SIZE)
        return {kind: numbers, f"{kind}_absmax": scale.absmax}


def _is_quantised(param: Parameter) -> bool:
    return param.numel() >= MIN_8BIT_SIZE


def make_rules(name: OptimizerName, train: TrainConfig, device: torch.device) -> tuple[Rule, ...]:
    """The rules of an inner optimizer, without parameters; the first that takes a parameter updates it.

    Args:
        name: Which.
        train: Betas, epsilon and weight decay.
        device: Where the parameters will lie.

    Raises:
        ConfigError: bitsandbytes is missing, or cannot work on this device.
    """
    decays = {"exp_avg": train.beta1, "exp_avg_sq": train.beta2}
    settings: dict[str, Any] = {"lr": train.lr, "betas": tuple(decays.values()), "weight_decay": train.weight_decay}
    both = {kind: kind for kind in (*MOMENTS, "step")}
    none: list[Group] = [{"params": []}]
    if name == "lamb":
        return (Rule(Lamb(none, eps=train.eps, **settings), both, decays),)
    if name == "adamw8bit":
        optimizer = _blockwise("AdamW8bit", name, device)(none, eps=train.eps, **settings)
        keys = {
            "exp_avg": "state1",
            "exp_avg_absmax": "absmax1",
            "exp_avg_sq": "state2",
            "exp_avg_sq_absmax": "absmax2",
        }
        return (BlockwiseRule(optimizer, {**keys, "step": "step"}, decays),)
    if name == "lion8bit":
        optimizer = _blockwise("Lion8bit", name, device)(none, **settings)
        keys = {"exp_avg": "state1", "exp_avg_absmax": "absmax1", "step": "step"}
        # Lion steps by beta1 of its momentum, but keeps beta2 of it.
        return (BlockwiseRule(optimizer, keys, {"exp_avg": train.beta2}, is_biased=False),)
    adamw = Rule(torch.optim.AdamW(none, eps=train.eps, fused=True, **settings), both, decays)
    return (_muon(none, train), adamw) if name == "muon" else (adamw,)


def _muon(groups: list[Group], train: TrainConfig) -> MuonRule:
    muon = torch.optim.Muon(
        groups,
        lr=train.lr,
        momentum=train.beta1,
        weight_decay=train.weight_decay,
        adjust_lr_fn="match_rms_adamw",  # train.lr keeps its meaning
    )
    return MuonRule(muon, {"exp_avg": "momentum_buffer"}, {"exp_avg": train.beta1}, is_biased=False)


def _blockwise(cls: str, name: str, device: torch.device) -> Callable[..., torch.optim.Optimizer]:
    """An optimizer class of bitsandbytes, after trying it on a small tensor.

    Raises:
        ConfigError: it cannot work here.
    """
    remedy = "pip install 'bitsandbytes>=0.50', or set adamw"
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(f"optimizer {name} needs bitsandbytes, which does not import ({error}); {remedy}") from error
    trial = Parameter(torch.zeros(MIN_8BIT_SIZE, device=device))
    trial.grad = torch.zeros_like(trial)
    made = getattr(bitsandbytes.optim, cls)
    try:
        made([trial]).step()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"optimizer {name} does not work on {device.type} here ({reason}); {remedy}") from error
    return _widening(made)


def _widening(base: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """An optimizer of bitsandbytes that takes gradients narrower than their parameters, which stock reads as if equal.

    One gradient at a time is widened, and dropped after its parameter's step.
    """

    class Widening(base):  # type: ignore[misc, valid-type]
        def update_step(self, group: Group, p: Parameter, gindex: int, pindex: int) -> None:
            narrow = p.grad_dtype
            if p.grad is None or p.grad.dtype == p.dtype:
                super().update_step(group, p, gindex, pindex)
                return
            grad, p.grad = p.grad, None
            p.grad_dtype = p.dtype
            p.grad = grad.to(p.dtype)
            super().update_step(group, p, gindex, pindex)
            p.grad, p.grad_dtype = None, narrow

    return Widening
