import math
from collections.abc import Mapping
from typing import get_args

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import Parameter

from spes_p2p.config import OptimizerName, TrainConfig
from spes_p2p.optim.inner import InnerOptimizer

TRAIN = TrainConfig(clip_norm=0.5)
SHAPES = {"layers.0.gate_up": (70, 60), "layers.0.down": (5, 3)}
"""One large enough for 8-bit state, with a block that is not full, and one that is not."""
NAMES = get_args(OptimizerName)
every_optimizer = pytest.mark.parametrize("name", NAMES)


def draw(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Parameter]:
    return {name: Parameter(torch.randn(shape)) for name, shape in shapes.items()}


class Trained:
    """A shared group, some slots, and gradients that depend on nothing but the step."""

    def __init__(self, seed: int, slots: tuple[int, ...] = (3, 1), name: OptimizerName = "adamw") -> None:
        torch.manual_seed(seed)
        self.shared = draw({"embed": (7, 5), "norm": (5,)})
        self.slots = {slot: draw(SHAPES) for slot in sorted(slots)}
        self.optimizer = InnerOptimizer(self.shared, {slot: self.slots[slot] for slot in slots}, TRAIN, name)

    def params(self) -> list[Parameter]:
        return [p for params in (self.shared, *self.slots.values()) for p in params.values()]

    def step(self, number: int, lr: float = 1e-2) -> float:
        generator = torch.Generator().manual_seed(number)
        for param in self.params():
            param.grad = torch.randn(param.shape, generator=generator)
        norm = self.optimizer.step(lr)
        self.optimizer.zero_grad()
        return norm


def same_bits(left: list[Parameter], right: list[Parameter]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_matches_torch_adamw_with_clipping(seed):
    trained, reference = Trained(seed), Trained(seed)
    adamw = torch.optim.AdamW(
        reference.params(), betas=(TRAIN.beta1, TRAIN.beta2), eps=TRAIN.eps, weight_decay=TRAIN.weight_decay
    )
    for number, lr in enumerate((1e-2, 3e-3, 0.0, 1e-3)):
        norm = trained.step(number, lr)
        generator = torch.Generator().manual_seed(number)
        for param in reference.params():
            param.grad = torch.randn(param.shape, generator=generator)
        expected = torch.nn.utils.clip_grad_norm_(reference.params(), TRAIN.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        assert norm == pytest.approx(expected.item(), rel=1e-6)
        for ours, theirs in zip(trained.params(), reference.params(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_small_gradients_are_not_scaled_up(seed):
    trained = Trained(seed)
    for param in trained.params():
        param.grad = torch.full_like(param, 1e-4)
    norm = trained.optimizer.step(1e-3)
    num_params = sum(p.numel() for p in trained.params())
    assert norm == pytest.approx(1e-4 * math.sqrt(num_params), rel=1e-5)
    moment = trained.optimizer.state_tensors()["shared/norm/exp_avg"]
    torch.testing.assert_close(moment, torch.full((5,), (1 - TRAIN.beta1) * 1e-4))


@every_optimizer
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(seed, bad, name):
    trained, reference = Trained(seed, name=name), Trained(seed, name=name)
    for run in (trained, reference):
        run.step(0)
    for param in trained.params():
        param.grad = torch.ones_like(param)
    assert trained.slots[3]["layers.0.down"].grad is not None
    trained.slots[3]["layers.0.down"].grad[0, 0] = bad
    assert not math.isfinite(trained.optimizer.step(1e-2))
    trained.optimizer.zero_grad()
    assert all(param.grad is None for param in trained.params())
    trained.step(1)
    reference.step(1)
    assert same_bits(trained.params(), reference.params())


@every_optimizer
def test_a_slot_that_leaves_and_returns_with_its_payload_continues_bit_for_bit(seed, name):
    moved, reference = Trained(seed, name=name), Trained(seed, name=name)
    for number in range(3):
        moved.step(number)
        reference.step(number)
    for slot in (3, 1, 3):
        payload = moved.optimizer.remove_slot(slot)
        assert slot not in moved.optimizer.slots
        # Another machine: parameters are other objects, and the payload has crossed the network.
        params = {name: Parameter(param.detach().clone()) for name, param in moved.slots[slot].items()}
        moved.slots[slot] = params
        moved.optimizer.add_slot(slot, params, safetensors.torch.load(safetensors.torch.save(payload)))
    for number in range(3, 7):
        assert moved.step(number) == reference.step(number)
    assert moved.optimizer.slots == [1, 3] and same_bits(moved.params(), reference.params())


@every_optimizer
def test_a_slot_without_payload_starts_with_empty_moments(seed, name):
    warm, cold = Trained(seed, name=name), Trained(seed, name=name)
    for run in (warm, cold):
        run.step(0)
    cold.optimizer.remove_slot(3)
    cold.optimizer.add_slot(3, cold.slots[3])
    assert not any(name.startswith("slot-3/") for name in cold.optimizer.state_tensors())
    for run in (warm, cold):
        run.step(1)
    assert same_bits(list(warm.slots[1].values()), list(cold.slots[1].values()))
    assert not same_bits(list(warm.slots[3].values()), list(cold.slots[3].values()))


@every_optimizer
def test_a_removed_slot_is_no_longer_trained(seed, name):
    trained = Trained(seed, name=name)
    trained.step(0)
    trained.optimizer.remove_slot(1)
    before = [param.detach().clone() for param in trained.slots[1].values()]
    trained.step(1)
    assert all(torch.equal(old, param) for old, param in zip(before, trained.slots[1].values(), strict=True))


@every_optimizer
def test_state_goes_through_a_file_and_continues_bit_for_bit(seed, tmp_path, name):
    saved, reference = Trained(seed, name=name), Trained(seed, name=name)
    for number in range(3):
        saved.step(number)
        reference.step(number)
    safetensors.torch.save_file(saved.optimizer.state_tensors(), tmp_path / "state.safetensors")
    # Claimed in the other order: names, not positions, carry the state.
    resumed = Trained(seed, slots=(1, 3), name=name)
    for target, source in zip(resumed.params(), saved.params(), strict=True):
        target.data.copy_(source.data)
    resumed.optimizer.load_state_tensors(safetensors.torch.load_file(tmp_path / "state.safetensors"))
    for number in range(3, 6):
        assert resumed.step(number) == reference.step(number)
    assert same_bits(resumed.params(), reference.params())


def test_state_names_are_flat_and_complete(seed):
    trained = Trained(seed)
    assert trained.optimizer.state_tensors() == {}
    trained.step(0)
    names = trained.optimizer.state_tensors().keys()
    assert len(names) == 3 * len(trained.params())
    assert {"shared/embed/exp_avg", "slot-3/layers.0.down/exp_avg_sq", "slot-1/layers.0.gate_up/step"} <= names


@every_optimizer
def test_state_is_copied_in_and_out(seed, name):
    trained, reference = Trained(seed, name=name), Trained(seed, name=name)
    for run in (trained, reference):
        run.step(0)
    for tensor in trained.optimizer.state_tensors().values():
        tensor.fill_(5)
    tensors = trained.optimizer.state_tensors()
    trained.optimizer.load_state_tensors(tensors)
    payload = trained.optimizer.remove_slot(1)
    trained.optimizer.add_slot(1, trained.slots[1], payload)
    for tensor in (*tensors.values(), *payload.values()):
        tensor.fill_(5)
    for run in (trained, reference):
        run.step(1)
    assert same_bits(trained.params(), reference.params())


def _without(key: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != key}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("layers.0.down/exp_avg", torch.zeros(3, 5), r"slot-3/layers.0.down/exp_avg is .*\[3, 5\]; expected"),
        ("layers.0.down/exp_avg", torch.zeros(5, 3, dtype=torch.bfloat16), "expected torch.float32"),
        ("layers.0.down/exp_avg", torch.full((5, 3), math.nan), "not finite"),
        ("layers.0.down/exp_avg_sq", torch.full((5, 3), math.inf), "not finite"),
        ("layers.0.down/exp_avg_sq", torch.full((5, 3), -1.0), "negative"),
        ("layers.0.down/step", torch.tensor(-1.0), "negative"),
        ("layers.0.down/step", torch.ones(1), r"step is .*\[1\]"),
        ("layers.0.down/step", None, "lacks step"),
        ("layers.0.up/exp_avg", torch.zeros(5, 3), "slot-3/layers.0.up/exp_avg, which this model does not have"),
        ("layers.0.down/max_exp_avg_sq", torch.zeros(5, 3), "does not have"),
    ],
)
def test_a_bad_payload_is_refused_and_adds_nothing(seed, key, value, message):
    trained, reference = Trained(seed), Trained(seed)
    for run in (trained, reference):
        run.step(0)
    payload = trained.optimizer.remove_slot(3)
    bad = _without(key, payload) if value is None else payload | {key: value}
    with pytest.raises(ValueError, match=message):
        trained.optimizer.add_slot(3, trained.slots[3], bad)
    assert trained.optimizer.slots == [1]
    trained.optimizer.add_slot(3, trained.slots[3], payload)
    for run in (trained, reference):
        run.step(1)
    assert same_bits(trained.params(), reference.params())


@pytest.mark.parametrize("name", ["slot-9/layers.0.down/step", "slot-31/layers.0.down/step", "junk"])
def test_state_of_other_slots_is_refused_and_changes_nothing(seed, name):
    trained, reference = Trained(seed), Trained(seed)
    for run in (trained, reference):
        run.step(0)
    zeros = {key: torch.zeros_like(tensor) for key, tensor in trained.optimizer.state_tensors().items()}
    with pytest.raises(ValueError, match=f"'{name}'.*shared, slot-3, slot-1"):
        trained.optimizer.load_state_tensors(zeros | {name: torch.tensor(1.0)})
    for run in (trained, reference):
        run.step(1)
    assert same_bits(trained.params(), reference.params())


@every_optimizer
def test_a_parameter_without_gradient_stays(seed, name):
    trained = Trained(seed, name=name)
    before = trained.shared["norm"].detach().clone()
    trained.shared["embed"].grad = torch.ones(7, 5)
    assert trained.optimizer.step(1e-2) == pytest.approx(math.sqrt(35))
    assert torch.equal(before, trained.shared["norm"])


def test_moments_are_adams_bias_corrected_estimates(seed):
    """Adam, Algorithm 1: m / (1 - beta1^t) and v / (1 - beta2^t), whatever t is."""
    trained = Trained(seed, slots=(3,))
    for number in range(3):
        trained.step(number)
    state = trained.optimizer.state_tensors()
    betas = {"exp_avg": TRAIN.beta1, "exp_avg_sq": TRAIN.beta2}
    for group in ("shared", "slot-3"):
        for moments, (kind, beta) in zip(trained.optimizer.moments(group, list(betas)), betas.items(), strict=True):
            for name, tensor in moments.items():
                torch.testing.assert_close(tensor, state[f"{group}/{name}/{kind}"] / (1 - beta**3))


@every_optimizer
def test_a_group_that_was_never_stepped_has_moments_of_zero(seed, name):
    (moments,) = Trained(seed, name=name).optimizer.moments("slot-1", ["exp_avg_sq"])
    assert {name: tuple(tensor.shape) for name, tensor in moments.items()} == SHAPES
    assert not any(tensor.any() for tensor in moments.values())


@pytest.mark.parametrize("kinds", [("exp_avg_sq",), ("exp_avg", "exp_avg_sq")], ids=["second", "both"])
def test_the_step_after_an_average_goes_by_the_averaged_moments(seed, kinds):
    """Compared with the update rule written out: averaged moments have no bias, and one's own is corrected once."""
    trained = Trained(seed, slots=(3,))
    trained.step(0)
    both = ("exp_avg", "exp_avg_sq")
    own = dict(zip(both, trained.optimizer.moments("slot-3", both), strict=True))
    averaged = {kind: {name: torch.rand(shape) for name, shape in SHAPES.items()} for kind in kinds}
    trained.optimizer.set_moments("slot-3", averaged)
    start = own | averaged
    before = {name: param.detach().clone() for name, param in trained.slots[3].items()}
    for param in trained.params():
        param.grad = torch.full_like(param, 1e-3)
    trained.optimizer.step(1e-2)
    for name, param in trained.slots[3].items():
        m = TRAIN.beta1 * start["exp_avg"][name] + (1 - TRAIN.beta1) * 1e-3
        v = TRAIN.beta2 * start["exp_avg_sq"][name] + (1 - TRAIN.beta2) * 1e-6
        expected = before[name] * (1 - 1e-2 * TRAIN.weight_decay) - 1e-2 * m / (v.sqrt() + TRAIN.eps)
        torch.testing.assert_close(param.detach(), expected)


@every_optimizer
def test_second_moments_below_zero_count_as_zero(seed, name):
    trained = Trained(seed, slots=(3,), name=name)
    below = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
    trained.optimizer.set_moments("slot-3", {"exp_avg_sq": below})
    trained.step(0)
    assert all(torch.isfinite(param).all() for param in trained.slots[3].values())
