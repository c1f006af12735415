"""Codecs refuse values that have no use, and bytes that no peer can have written."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.codecs import CODECS
from spes_p2p.codecs.format import Format, Segment, codec_named
from spes_p2p.errors import ConfigError, ExchangeError

LARGEST, LARGEST_BF16 = torch.finfo(torch.float32).max, torch.finfo(torch.bfloat16).max


@pytest.mark.parametrize("name", ["fp16", "", "nf4"])
def test_an_unknown_codec_is_refused_with_those_that_exist(name):
    with pytest.raises(ConfigError, match=f"{name} is not a codec; choose one of {', '.join(CODECS)}"):
        codec_named(name)


def test_second_moments_cannot_travel_in_so_few_bits():
    with pytest.raises(ConfigError, match="int4 is not a codec of second moments; choose one of fp32, bf16, int8"):
        Format([Segment(100, "fp32"), Segment(100, "int4", non_negative=True)])


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 100, 299])
def test_what_is_not_finite_is_not_encoded(name, bad, where):
    flat_N = torch.randn(300)
    flat_N[where] = bad
    with pytest.raises(ValueError, match="NaN or infinity cannot be encoded"):
        Format([Segment(300, name)]).encode(flat_N)


@pytest.mark.parametrize("name", [name for name in CODECS if CODECS[name][1]])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1.0, -1e-30])
def test_a_second_moment_that_is_negative_or_not_finite_is_not_encoded(name, bad):
    flat_N = torch.rand(300)
    flat_N[250] = bad
    with pytest.raises(ValueError, match="or a negative second moment cannot be encoded"):
        Format([Segment(300, name, non_negative=True)]).encode(flat_N)


def test_bf16_does_not_turn_a_large_number_into_infinity():
    whole = Format([Segment(2, "bf16")])
    assert whole.decode(whole.encode(torch.tensor([3.3895e38, -3.3895e38]))).isfinite().all()
    with pytest.raises(ValueError, match="infinity cannot be encoded"):
        whole.encode(torch.tensor([1.0, LARGEST]))


def bad_scales() -> list[tuple[str, bool, int]]:
    """Codec, non-negative, and the 16 bits of a scale that it would not have written."""
    nine_bits = {"NaN": 0xFF80, "infinity": 0xFF00, "subnormal": 0x0001, "too large": 0xFEFF, "tiny": 0x1AFF}
    signed = {"NaN": 0x7FC0, "infinity": 0x7F80, "-infinity": 0xFF80, "subnormal": 0x0001, "too large": 0x7F7F}
    cases = [("int8", False, bits) for bits in nine_bits.values()]
    cases += [("int8", True, bits) for bits in nine_bits.values()]
    return cases + [("int4", False, bits) for bits in signed.values()]


@pytest.mark.parametrize(("name", "non_negative", "bits"), bad_scales())
@pytest.mark.parametrize("block", [0, 2])
def test_a_strangers_scale_is_refused_where_its_values_would_not_be_finite(name, non_negative, bits, block):
    whole = Format([Segment(500, name, non_negative)])
    data = bytearray(whole.encode(torch.rand(500)).numpy().tobytes())
    whole.decode(bytes(data))
    data[2 * block : 2 * block + 2] = bits.to_bytes(2, "little")
    with pytest.raises(ExchangeError, match=r"payload holds a scale of .*; fetch it from another peer"):
        whole.decode(bytes(data))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1.0])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_strangers_numbers_are_refused_where_they_are_not_finite_or_negative(name, bad):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    data = torch.tensor([1.0, bad, 2.0], dtype=dtype).view(torch.uint8)
    if bad != -1.0:
        with pytest.raises(ExchangeError, match="payload holds NaN or infinity"):
            Format([Segment(3, name)]).decode(data)
    with pytest.raises(ExchangeError, match="or a negative second moment; fetch it from another peer"):
        Format([Segment(3, name, non_negative=True)]).decode(data)


def test_a_strangers_int8_of_no_level_is_refused():
    whole = Format([Segment(3, "int8")])
    data = whole.encode(torch.rand(3))
    data[3] = 0x80
    with pytest.raises(ExchangeError, match="int8 -128"):
        whole.decode(data)


@pytest.mark.parametrize("name", [name for name in CODECS if not codec_named(name).is_sparse])  # test_codecs_sparse.py
@given(data=st.data())
def test_no_bytes_of_a_stranger_decode_to_anything_but_finite_numbers(name, data):
    numel = data.draw(st.integers(1, 300))
    for non_negative in (False, True) if CODECS[name][1] else (False,):
        whole = Format([Segment(numel, name, non_negative)])
        # sparse, as all random scales together are hardly ever good ones
        payload = bytearray(whole.num_bytes)
        for place in data.draw(st.lists(st.integers(0, whole.num_bytes - 1), max_size=20)):
            payload[place] = data.draw(st.integers(0, 255))
        try:
            decoded_N = whole.decode(bytes(payload))
        except ExchangeError:
            continue
        assert torch.isfinite(decoded_N).all() and not (non_negative and (decoded_N < 0).any())


@pytest.mark.parametrize("name", CODECS)
def test_the_largest_numbers_with_a_byte_changed_are_refused_or_finite(name):
    """A codec that decodes a code, or a scale, that it never writes gets infinity or NaN here."""
    for non_negative in (False, True) if CODECS[name][1] else (False,):
        whole = Format([Segment(9, name, non_negative)])
        sound = whole.encode(torch.full((9,), LARGEST_BF16)).numpy().tobytes()
        for place, byte in itertools.product((0, 1, 2, 3, 4), range(256)):
            payload = bytearray(sound)
            payload[place] = byte
            try:
                assert whole.decode(payload).isfinite().all(), (non_negative, place, byte)
            except ExchangeError:
                continue
