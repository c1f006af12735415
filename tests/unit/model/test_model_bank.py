"""Edges of the expert bank: precision, empty batches, starved experts, moves."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from spes_p2p.errors import ConfigError
from spes_p2p.model.bank import ExpertBank
from spes_p2p.model.frozen import FrozenStore
from spes_p2p.model.kernels import kernel

EXPERTS, WIDTH, INNER, TOP_K = 5, 16, 8, 2


class Experts(nn.Module):
    """A stock experts module's surface, computed one token at a time in the plainest way."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) / 4)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
        self.act_fn = nn.SiLU()

    def forward(self, x_TD, index_TK, weights_TK):
        rows = [torch.zeros(0, WIDTH, dtype=x_TD.dtype)]
        for x_D, experts, weights in zip(x_TD, index_TK.tolist(), weights_TK, strict=True):
            y_D = torch.zeros(WIDTH)
            for expert, weight in zip(experts, weights, strict=True):
                gate, up = (self.gate_up_proj[expert] @ x_D).chunk(2)
                y_D = y_D + weight * (self.down_proj[expert] @ (self.act_fn(gate) * up))
            rows.append(y_D[None])
        return torch.cat(rows)


def routed(num_tokens: int, experts: int = EXPERTS):
    x_TD = torch.randn(num_tokens, WIDTH, requires_grad=True)
    index_TK = torch.rand(num_tokens, experts).argsort(-1)[:, :TOP_K]
    return x_TD, index_TK, torch.rand(num_tokens, TOP_K, requires_grad=True)


def bank_of(stock: Experts, claimed, storage="fp32") -> ExpertBank:
    return ExpertBank(stock, claimed, storage, kernel("loop"))


@pytest.mark.parametrize("num_tokens", [0, 1, 13])
@pytest.mark.parametrize("claimed", [[], [3, 1], range(EXPERTS)], ids=["none", "some", "all"])
def test_equals_the_plain_sum_for_any_batch(seed, num_tokens, claimed):
    stock = Experts()
    bank = bank_of(stock, claimed)
    x_TD, index_TK, weights_TK = routed(num_tokens)
    expected, actual = stock(x_TD, index_TK, weights_TK), bank(x_TD, index_TK, weights_TK)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    if not num_tokens:
        assert actual.shape == (0, WIDTH)
        return
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (x_TD, weights_TK), grad)
    torch.testing.assert_close(torch.autograd.grad(actual, (x_TD, weights_TK), grad), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [0, 7])
def test_starved_claimed_expert_gets_zeros_and_not_none(seed, num_tokens):
    bank = bank_of(Experts(), [0, 4])
    x_TD, index_TK, weights_TK = routed(num_tokens, experts=4)
    bank(x_TD, index_TK, weights_TK).sum().backward()
    for parameter in bank.parameters_of(4).values():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_frozen_experts_are_no_parameters_and_save_nothing_of_their_input(seed):
    bank = bank_of(Experts(), [])
    assert not list(bank.parameters()) and not list(bank.buffers()) and not bank.state_dict()
    saved = []
    x_RI, weight_OI = torch.randn(6, WIDTH, requires_grad=True), bank.frozen.stored(0, "gate_up_proj")
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda t: t):
        bank.kernel.grouped_linear(x_RI, [6], [weight_OI])
    assert not saved
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda t: t):
        bank.kernel.grouped_linear(x_RI, [6], [nn.Parameter(weight_OI.clone())])
    assert any(tensor.data_ptr() == x_RI.data_ptr() for tensor in saved), "the probe does not see what is saved"


@pytest.mark.parametrize("mode", ["autocast", "activations"])
def test_bf16_products_are_bf16_and_gradients_fp32(seed, mode, monkeypatch):
    stock = Experts()
    bank = bank_of(stock, [1, 2])
    x_TD, index_TK, weights_TK = routed(11)
    seen, mm = set(), torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **options: seen.add(a.dtype) or mm(a, b, **options))
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        inputs_TD = x_TD if mode == "autocast" else x_TD.bfloat16()
        actual = bank(inputs_TD, index_TK, weights_TK)
    assert actual.dtype == inputs_TD.dtype
    actual.float().square().sum().backward()
    assert seen == {torch.bfloat16}
    expected = stock(x_TD, index_TK, weights_TK)
    expected.square().sum().backward()
    assert (actual - expected).abs().max() < 3e-2 * expected.abs().max()
    for slot in (1, 2):
        for name, parameter in bank.parameters_of(slot).items():
            wanted = getattr(stock, name).grad[slot]
            assert parameter.grad.dtype == torch.float32
            assert (parameter.grad - wanted).abs().max() <= 5e-2 * wanted.abs().max() + 1e-6


def test_parameter_order_does_not_depend_on_the_order_of_claims(seed):
    """DDP pairs parameters across ranks by order."""
    stock = Experts()
    grown = bank_of(stock, [4])
    grown.adopt(2)
    grown.adopt(0)
    grown.release(4)
    grown.adopt(4)
    assert grown.claimed == (0, 2, 4)
    expected = [name for name, _ in bank_of(stock, [2, 0, 4]).named_parameters()]
    assert [name for name, _ in grown.named_parameters()] == expected


def test_moves_and_copies_carry_frozen_experts(seed):
    bank = bank_of(Experts(), [0], "bf16")
    before = bank.weights_of(3)
    twin = copy.deepcopy(bank).to("cpu").double().float()
    for name, tensor in twin.weights_of(3).items():
        assert torch.equal(tensor, before[name])
    twin.frozen.put(3, {name: tensor + 1 for name, tensor in before.items()})
    assert torch.equal(bank.weights_of(3)["down_proj"], before["down_proj"])
    moved = twin.to("meta")
    assert moved.frozen.stored(3, "down_proj").device.type == "meta"
    assert moved.frozen.stored(3, "down_proj").dtype == torch.bfloat16


def test_version_swapped_in_between_forward_and_backward_does_not_mix(seed):
    stock = Experts()
    bank = bank_of(stock, [])
    x_TD, index_TK, weights_TK = routed(9)
    (wanted,) = torch.autograd.grad(stock(x_TD, index_TK, weights_TK).sum(), x_TD)
    loss = bank(x_TD, index_TK, weights_TK).sum()
    for slot in range(EXPERTS):
        bank.load(slot, {name: tensor * 2 for name, tensor in bank.weights_of(slot).items()})
    torch.testing.assert_close(torch.autograd.grad(loss, x_TD)[0], wanted, rtol=1e-5, atol=1e-6)


def test_store_counts_its_bytes_and_forgets():
    store = FrozenStore("bf16")
    store.put(7, {"a": torch.ones(3, 4), "b": torch.ones(2)})
    assert store.nbytes() == 2 * 14 and len(store) == 1
    store.remove(7)
    assert store.nbytes() == 0 and 7 not in store


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_store_shares_no_memory_with_its_callers(precision):
    store = FrozenStore(precision)
    given = torch.ones(3, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    store.put(0, {"a": given})
    given.zero_()
    store.get(0, given.dtype)["a"].zero_()
    assert torch.equal(store.get(0, torch.float32)["a"], torch.ones(3))


def test_unknown_names_say_what_is_known(seed):
    with pytest.raises(ConfigError, match=r"'fast'.*loop"):
        kernel("fast")
    with pytest.raises(ConfigError, match=r"'int3'.*fp32, bf16"):
        FrozenStore("int3")


def test_kernel_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setattr(type(kernel("loop")), "available", lambda self: "no such hardware")
    with pytest.raises(ConfigError, match="no such hardware"):
        kernel("loop")


def test_experts_of_another_layout_are_refused(seed):
    stock = Experts()
    stock.has_bias = True
    with pytest.raises(ConfigError, match="has_bias=True"):
        bank_of(stock, [0])
