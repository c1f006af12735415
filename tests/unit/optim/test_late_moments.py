"""Averaged moments that come some steps late lead where they would have led had they come in time."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from spes_p2p.config import OptimizerName, TrainConfig
from spes_p2p.optim.inner import InnerOptimizer

NAMES = get_args(OptimizerName)
SHAPES = {"large": (70, 60), "small": (9, 4), "norm": (60,)}
BEFORE, SINCE = 3, 4
HALF_STEP = 0.9 / 64 / 2
"""Most that 8 bits take from a value, as a share of its block's largest: half of the widest gap of the signed map."""


def make(seed: int, name: OptimizerName = "adamw") -> tuple[InnerOptimizer, dict[str, Parameter]]:
    torch.manual_seed(seed)
    params = {key: Parameter(torch.randn(shape)) for key, shape in SHAPES.items()}
    return InnerOptimizer(params, {}, TrainConfig(clip_norm=1e9), name), params


def step(optimizer: InnerOptimizer, params: dict[str, Parameter], numbers: range) -> None:
    """Steps whose gradients depend on their numbers alone."""
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for key, shape in SHAPES.items():
            params[key].grad = torch.randn(shape, generator=generator)
        optimizer.step(1e-3)
        optimizer.zero_grad()


def moments_of(optimizer: InnerOptimizer) -> dict[str, dict[str, Tensor]]:
    return dict(zip(optimizer.kinds("shared"), optimizer.moments("shared", optimizer.kinds("shared")), strict=True))


def of_others(seed: int, optimizer: InnerOptimizer) -> dict[str, dict[str, Tensor]]:
    """Moments such as an average of several peers' might be."""
    torch.manual_seed(seed + 1)
    first, second = ({key: torch.rand(shape) for key, shape in SHAPES.items()} for _ in range(2))
    return {kind: {"exp_avg": first, "exp_avg_sq": second}[kind] for kind in optimizer.kinds("shared")}


def late_and_in_time(
    seed: int, name: OptimizerName
) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Tensor]]]:
    (prompt, prompted), (late, delayed) = make(seed, name), make(seed, name)
    averaged = of_others(seed, prompt)
    step(prompt, prompted, range(BEFORE))
    step(late, delayed, range(BEFORE))
    before = moments_of(late)
    prompt.set_moments("shared", averaged)
    step(prompt, prompted, range(BEFORE, BEFORE + SINCE))
    step(late, delayed, range(BEFORE, BEFORE + SINCE))
    late.set_moments("shared", averaged, before, SINCE)
    return moments_of(late), moments_of(prompt)


@pytest.mark.parametrize("name", NAMES)
def test_late_moments_are_those_that_would_have_come_of_them_in_time(seed: int, name: OptimizerName) -> None:
    """In 8 bits up to a rounding of each step; the bias of the first steps is no part of what is kept."""
    late, prompt = late_and_in_time(seed, name)
    for kind, expected in prompt.items():
        for key, tensor in expected.items():
            exact = "8bit" not in name or key != "large"
            atol = 1e-6 if exact else 2 * (SINCE + 1) * HALF_STEP * tensor.abs().max().item()
            torch.testing.assert_close(late[kind][key], tensor, rtol=1e-5, atol=atol, msg=lambda m, k=key: f"{k}: {m}")


def test_the_steps_after_late_moments_are_corrected_for_no_bias_any_more(seed: int) -> None:
    optimizer, params = make(seed)
    step(optimizer, params, range(BEFORE))
    optimizer.set_moments("shared", of_others(seed, optimizer), moments_of(optimizer), 0)
    raw = optimizer.state_tensors()
    for kind, tensors in moments_of(optimizer).items():
        assert all(torch.equal(raw[f"shared/{key}/{kind}"], tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize("name", NAMES)
def test_with_no_step_since_late_moments_are_the_averaged_ones(seed: int, name: OptimizerName) -> None:
    (one, ones), (other, others) = make(seed, name), make(seed, name)
    averaged = of_others(seed, one)
    for optimizer, params in ((one, ones), (other, others)):
        step(optimizer, params, range(BEFORE))
    one.set_moments("shared", averaged, moments_of(one), 0)
    other.set_moments("shared", averaged)
    expected = other.state_tensors()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in one.state_tensors().items())


def test_a_parameter_that_was_never_stepped_takes_the_averaged_moments(seed: int) -> None:
    optimizer, _ = make(seed)
    averaged = of_others(seed, optimizer)
    optimizer.set_moments("shared", averaged, moments_of(optimizer), SINCE)
    for kind, tensors in moments_of(optimizer).items():
        assert all(torch.equal(tensors[key], tensor) for key, tensor in averaged[kind].items())


def test_a_late_second_moment_never_falls_below_what_is_left_of_the_averaged_one(seed: int) -> None:
    """Not even where the peer's own of then and now have been rounded past each other."""
    optimizer, params = make(seed)
    step(optimizer, params, range(BEFORE + SINCE))
    averaged = of_others(seed, optimizer)
    before = {kind: {key: 100 * t + 1 for key, t in own.items()} for kind, own in moments_of(optimizer).items()}
    optimizer.set_moments("shared", averaged, before, SINCE)
    left = TrainConfig().beta2 ** SINCE
    for key, tensor in moments_of(optimizer)["exp_avg_sq"].items():
        torch.testing.assert_close(tensor, left * averaged["exp_avg_sq"][key])


def test_a_kind_that_is_not_averaged_goes_on_from_what_it_is(seed: int) -> None:
    optimizer, params = make(seed)
    step(optimizer, params, range(BEFORE))
    before = moments_of(optimizer)
    step(optimizer, params, range(BEFORE, BEFORE + SINCE))
    now, averaged = moments_of(optimizer), of_others(seed, optimizer)
    optimizer.set_moments("shared", {"exp_avg_sq": averaged["exp_avg_sq"]}, before, SINCE)
    after = moments_of(optimizer)
    assert all(torch.equal(after["exp_avg"][key], tensor) for key, tensor in now["exp_avg"].items())
    assert not any(torch.equal(after["exp_avg_sq"][key], tensor) for key, tensor in now["exp_avg_sq"].items())
