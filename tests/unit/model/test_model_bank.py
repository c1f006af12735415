"""The expert bank: adopting and releasing experts, and what it costs."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from spes_p2p.errors import ConfigError
from spes_p2p.model.bank import ExpertBank
from tests.unit.model.plain import EXPERTS, STORAGES, PlainExperts, bank_of, routed


def test_parameter_order_does_not_depend_on_the_order_of_claims(seed):
    """DDP pairs parameters across ranks by order."""
    stock = PlainExperts()
    grown = bank_of(stock, [4])
    grown.adopt(2)
    grown.adopt(0)
    grown.release(4)
    grown.adopt(4)
    assert grown.claimed == (0, 2, 4)
    expected = [name for name, _ in bank_of(stock, [2, 0, 4]).named_parameters()]
    assert [name for name, _ in grown.named_parameters()] == expected


def test_frozen_experts_are_no_parameters(seed):
    bank = bank_of(PlainExperts(), [])
    assert not list(bank.parameters()) and not list(bank.buffers()) and not bank.state_dict()


@pytest.mark.parametrize("storage", STORAGES)
def test_moves_and_copies_carry_frozen_experts_as_they_are_stored(seed, storage):
    bank = bank_of(PlainExperts(), [0], storage)
    before = bank.weights_of(3)
    twin = copy.deepcopy(bank).to("cpu").double().float()
    for name, tensor in twin.weights_of(3).items():
        assert torch.equal(tensor, before[name])
    twin.frozen.put(3, {name: tensor + 1 for name, tensor in before.items()})
    assert torch.equal(bank.weights_of(3)["down_proj"], before["down_proj"])
    kept, moved = bank.frozen.stored(3, "down_proj"), twin.to("meta").frozen.stored(3, "down_proj")
    for part in kept.PARTS:
        assert getattr(moved, part).device.type == "meta"
        assert getattr(moved, part).dtype == getattr(kept, part).dtype


def test_version_swapped_in_between_forward_and_backward_does_not_mix(seed):
    stock = PlainExperts()
    bank = bank_of(stock, [])
    x_TD, index_TK, weights_TK = routed(9)
    (wanted,) = torch.autograd.grad(stock(x_TD, index_TK, weights_TK).sum(), x_TD)
    loss = bank(x_TD, index_TK, weights_TK).sum()
    for slot in range(EXPERTS):
        bank.load(slot, {name: tensor * 2 for name, tensor in bank.weights_of(slot).items()})
    torch.testing.assert_close(torch.autograd.grad(loss, x_TD)[0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("storage", STORAGES)
def test_released_and_adopted_with_its_weights_is_bit_exact(seed, storage):
    bank = bank_of(PlainExperts(), [1, 2], storage)
    exact = bank.weights_of(2)
    bank.release(2)
    rounded = bank.weights_of(2)
    assert all(torch.equal(tensor, exact[name]) for name, tensor in rounded.items()) == (storage == "fp32")
    bank.adopt(2, exact)
    assert all(torch.equal(tensor, exact[name]) for name, tensor in bank.weights_of(2).items())
    bank.release(2)
    bank.adopt(2)
    assert all(torch.equal(tensor, rounded[name]) for name, tensor in bank.weights_of(2).items())


@pytest.mark.parametrize("before", STORAGES)
@pytest.mark.parametrize("after", STORAGES)
def test_expert_passes_between_peers_of_any_storage(seed, before, after):
    giver, taker = bank_of(PlainExperts(), [0], before), bank_of(PlainExperts(), [], after)
    for slot in range(EXPERTS):
        given = giver.weights_of(slot)
        taker.load(slot, given)
        taker.adopt(slot, given)
        assert all(torch.equal(tensor, given[name]) for name, tensor in taker.weights_of(slot).items())


class BytesMade(TorchDispatchMode):
    """Counts the bytes of all results; a result that is another's view counts too."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            self.total += tensor.nbytes if isinstance(tensor, Tensor) else 0
        return result


@pytest.mark.parametrize("storage", STORAGES)
def test_adopting_and_releasing_touch_one_slot_alone(seed, storage):
    costs = {}
    for experts in (4, 32):
        bank = bank_of(PlainExperts(experts), [0, 2], storage)
        others = [slot for slot in range(experts) if slot != 2]
        before = {slot: _places(bank, slot) for slot in others}
        with BytesMade() as made:
            bank.release(2)
            bank.adopt(2)
        assert {slot: _places(bank, slot) for slot in others} == before
        costs[experts] = made.total - 3 * experts * 8 * 2  # the table of ranks, a few bytes per expert
    assert costs[32] <= 1.1 * costs[4]


def _places(bank: ExpertBank, slot: int) -> list[int]:
    """Where an expert lies in memory."""
    if slot in bank.frozen:
        stored = [bank.frozen.stored(slot, name) for name in bank.shapes]
        return [getattr(weight, part).data_ptr() for weight in stored for part in weight.PARTS]
    return [param.data_ptr() for param in bank.parameters_of(slot).values()]


def test_experts_of_another_layout_are_refused(seed):
    stock = PlainExperts()
    stock.has_bias = True
    with pytest.raises(ConfigError, match="has_bias=True"):
        bank_of(stock, [0])


def test_experts_of_another_activation_are_refused(seed):
    stock = PlainExperts()
    stock.act_fn = nn.GELU()
    with pytest.raises(ConfigError, match=r"GELU.*only SiLU"):
        bank_of(stock, [0])
