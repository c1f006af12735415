"""Kept forms: the same bytes everywhere, and the same again of what they hold."""

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spes_p2p.codecs.kept import INT8_BLOCK, NF4_LEVELS, KeptForm, dequantise_nf4, quantise_nf4
from spes_p2p.errors import ExchangeError
from spes_p2p.model.frozen import FrozenStore
from tests.unit.model.plain import NEEDS_BITSANDBYTES

FP32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
FORMS = ["bf16", "int8", "nf4"]
GOLDEN = {
    "bf16": "a60202cdb47d93248777b861ad2259180bacde29b496188e24d012a962a9d381",
    "int8": "4b133065f72eee688f79233759aac2307ca1ef8f865db3449827e177e4e69115",
    "nf4": "051584decf5ab4467df52ea2351537fb08d0ae9b72ad92b4cdd25950d173f086",
}
"""SHA-256 of the form of `fixed(5000)`, on record: all peers of a run must make these bytes."""


def fixed(numel: int) -> Tensor:
    """Values of very different magnitudes that every machine computes exactly, without a generator."""
    index_N = torch.arange(numel, dtype=torch.int64)
    mixed_N = (index_N * 2_654_435_761 + 12_345) % 2**23 - 2**22
    return mixed_N.float() * 2.0 ** (index_N // 64 % 40 - 45).float()


def magnitudes(numel: int) -> Tensor:
    magnitude_N = 10.0 ** torch.empty(-(-numel // INT8_BLOCK)).uniform_(-9, 9).repeat_interleave(INT8_BLOCK)
    return torch.randn(numel) * magnitude_N[:numel]


@pytest.mark.parametrize("storage", FORMS)
def test_a_form_has_the_bytes_on_record(storage):
    form = KeptForm(storage, 5000).encode(fixed(5000))
    assert hashlib.sha256(form.numpy().tobytes()).hexdigest() == GOLDEN[storage]


def test_nf4_packs_two_codes_a_byte_behind_which_come_the_scales():
    form = KeptForm("nf4", 66)
    data = form.encode(torch.tensor([4.0, -4.0, 0.0, 2.9, *[0.0] * 60, -0.5, 0.25]))
    assert data[:2].tolist() == [0xF0, 0x7E] and set(data[2:32].tolist()) == {0x77}
    assert data[32:34].tolist() == [0x0C, 0x77] and form.num_bytes == len(data) == 2 * 32 + 2 * 4
    assert data[64:].clone().view(torch.float32).tolist() == [4.0, 0.5]


def test_nf4_takes_the_nearest_level(seed):
    flat_N = magnitudes(64 * 500)
    packed, scales_B = quantise_nf4(flat_N)
    share_BW = flat_N.view(-1, 64).double() / scales_B[:, None].double()
    distance_BWL = (share_BW[..., None] - torch.tensor(NF4_LEVELS).double()).abs()
    found_BW = dequantise_nf4(packed, scales_B).view(-1, 64).double() / scales_B[:, None].double()
    # A value half-way between two levels may go either way.
    assert ((found_BW - share_BW).abs() - distance_BWL.amin(dim=-1)).abs().max() < 1e-6


@pytest.mark.parametrize("storage", FORMS)
@given(values=st.lists(FP32, min_size=1, max_size=300))
def test_the_form_of_what_a_form_holds_is_the_same_bytes(storage, values):
    form, flat_N = KeptForm(storage, len(values)), torch.tensor(values, dtype=torch.float32)
    if storage == "bf16" and not torch.isfinite(flat_N.bfloat16()).all():
        return  # refused, like infinity
    data = form.encode(flat_N)
    assert torch.isfinite(form.values(data)).all() and torch.equal(form.encode(form.values(data)), data)
    assert torch.equal(form.decode(data.numpy().tobytes()), data)


@pytest.mark.parametrize("storage", FORMS)
def test_pieces_change_no_byte(storage, monkeypatch, seed):
    flat_N = magnitudes(1000)
    form = KeptForm(storage, 1000)
    whole, values, length = form.encode(flat_N), form.values(form.encode(flat_N)), form.length(form.encode(flat_N))
    monkeypatch.setattr("spes_p2p.codecs.kept.PIECE_NUMEL", 128)
    assert torch.equal(form.encode(flat_N), whole) and torch.equal(form.values(whole), values)
    assert form.length(whole) == pytest.approx(length) == pytest.approx(float(values.double().norm()), rel=1e-5)


@pytest.mark.parametrize("storage", ["bf16", "int8", pytest.param("nf4", marks=NEEDS_BITSANDBYTES)])
def test_a_store_takes_from_a_form_what_it_would_make_of_the_weights(storage, seed):
    """So loading a form is the same as loading the fp32 weights."""
    shapes = {"down": (16, 8), "up": (32, 8), "wide": (3, 128)}
    sizes = [16 * 8, 32 * 8, 3 * 128]
    flat_N = magnitudes(sum(sizes))
    form, start = KeptForm(storage, len(flat_N)), 0
    data = form.encode(flat_N)
    plain, ours = FrozenStore(storage), FrozenStore(storage)
    for (name, shape), size in zip(shapes.items(), sizes, strict=True):
        plain.put(0, {name: flat_N[start : start + size].view(shape)})
        ours.put_parts(0, name, form.parts(data, start, start + size), shape)
        expected, found = plain.stored(0, name), ours.stored(0, name)
        for part in expected.PARTS:
            assert torch.equal(getattr(found, part), getattr(expected, part)), (name, part)
        dense = found.dense(torch.float32)  # by bitsandbytes, of nf4
        assert torch.equal(dense.view(-1), form.values(data)[start : start + size])
        start += size


@NEEDS_BITSANDBYTES
def test_bitsandbytes_makes_nearly_the_same_nf4(seed):
    """It rounds quotients otherwise: a share of a value in a thousand may differ, and no more."""
    from bitsandbytes.functional import quantize_4bit

    flat_N = magnitudes(2**16)
    theirs, state = quantize_4bit(flat_N, blocksize=64, quant_type="nf4")
    packed, scales_B = quantise_nf4(flat_N)
    assert torch.equal(state.absmax, scales_B) and (theirs.view(-1) != packed).float().mean() < 1e-3


@pytest.mark.parametrize("storage", FORMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_without_a_form_are_refused(storage, bad):
    flat_N = torch.ones(300)
    flat_N[290] = bad
    with pytest.raises(ValueError, match=f"NaN or infinity cannot be held in {storage}"):
        KeptForm(storage, 300).encode(flat_N)
    with pytest.raises(AssertionError, match="a slot of 299 elements, not 300"):
        KeptForm(storage, 300).encode(flat_N[:299])


@pytest.mark.parametrize("storage", FORMS)
def test_bytes_that_no_encoder_writes_are_refused(storage):
    form = KeptForm(storage, 300)
    data = bytearray(form.encode(torch.randn(300)).numpy().tobytes())
    with pytest.raises(ExchangeError, match=f"payload of {len(data) - 1} bytes, expected {len(data)}"):
        form.decode(bytes(data[:-1]))
    data[-2:] = b"\xc0\x7f"  # NaN, as bf16 and as fp32
    with pytest.raises(ExchangeError, match=f"{storage} values that are not finite"):
        form.decode(bytes(data))
