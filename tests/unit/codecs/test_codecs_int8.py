"""Codecs: what comes back, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spes_p2p.codecs.kept import INT8_BLOCK, dequantise_int8, num_int8_blocks, quantise_int8

LARGEST = torch.finfo(torch.float32).max
FP32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
LENGTHS = [1, INT8_BLOCK - 1, INT8_BLOCK, INT8_BLOCK + 1, 3 * INT8_BLOCK, 5 * INT8_BLOCK + 77]


def vector(numel: int) -> Tensor:
    """Blocks of very different magnitude."""
    magnitude_N = 10.0 ** torch.empty(num_int8_blocks(numel)).uniform_(-9, 9).repeat_interleave(INT8_BLOCK)
    return torch.randn(numel) * magnitude_N[:numel]


def plain_int8(block: Tensor) -> Tensor:
    """The nearest multiples of a block's largest magnitude over 127."""
    scale = block.double().abs().max() / 127
    return (block.double() / scale).round() * scale


@pytest.mark.parametrize("numel", LENGTHS)
def test_int8_is_the_nearest_of_127_steps_in_every_block(numel):
    flat_N = vector(numel)
    values_N, scales_B = quantise_int8(flat_N)
    assert values_N.dtype == torch.int8 and scales_B.dtype == torch.float32
    assert values_N.shape == flat_N.shape and scales_B.shape == (num_int8_blocks(numel),)
    decoded_N = dequantise_int8(values_N, scales_B)
    for actual, block in zip(decoded_N.split(INT8_BLOCK), flat_N.split(INT8_BLOCK), strict=True):
        largest = block.abs().max()
        assert (actual - block).abs().max() <= largest / 127 * 0.501
        # a value half-way between two steps may go either way
        assert ((actual - plain_int8(block)).abs() > largest * 1e-4).float().mean() < 0.02


@given(st.lists(FP32, max_size=300))
def test_int8_of_what_int8_gave_is_the_same_bytes(values):
    values_N, scales_B = quantise_int8(torch.tensor(values, dtype=torch.float32))
    decoded_N = dequantise_int8(values_N, scales_B)
    assert torch.isfinite(decoded_N).all()
    again_N, again_B = quantise_int8(decoded_N)
    assert torch.equal(again_N, values_N) and torch.equal(again_B, scales_B)


@given(st.floats(width=32, min_value=2.0**-118, max_value=float(2.0**127)), st.integers(-127, 127))
def test_int8_decodes_exactly_so_that_every_machine_agrees(largest, step):
    values_N, scales_B = quantise_int8(torch.tensor([largest, largest * step / 127]))
    exact = values_N.double() * scales_B.double()
    assert torch.equal(dequantise_int8(values_N, scales_B).double(), exact)


@pytest.mark.parametrize("flat_N", [torch.zeros(300), torch.full((200,), 1e-40), torch.zeros(0)])
def test_int8_of_nothing_is_zeros(flat_N):
    values_N, scales_B = quantise_int8(flat_N)
    assert not values_N.any() and not scales_B.any()
    assert torch.equal(dequantise_int8(values_N, scales_B), torch.zeros_like(flat_N))


def test_int8_of_the_largest_numbers_stays_finite():
    flat_N = torch.tensor([LARGEST, -LARGEST, LARGEST / 2])
    decoded_N = dequantise_int8(*quantise_int8(flat_N))
    assert torch.isfinite(decoded_N).all()
    assert ((decoded_N.double() - flat_N.double()).abs() <= 0.01 * LARGEST).all()


def test_int8_of_bf16_is_that_of_the_same_numbers_in_fp32():
    flat_N = vector(500).bfloat16()
    for actual, expected in zip(quantise_int8(flat_N), quantise_int8(flat_N.float()), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 130, 299])
def test_int8_refuses_what_is_not_finite(bad, where):
    flat_N = torch.randn(300)
    flat_N[where] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantise_int8(flat_N)


def test_int8_needs_a_scale_for_every_block():
    values_N, scales_B = quantise_int8(torch.randn(300))
    with pytest.raises(AssertionError, match="2 scales, 300 values"):
        dequantise_int8(values_N, scales_B[:2])
