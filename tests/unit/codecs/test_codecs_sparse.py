"""Sparse codecs: which elements are kept, what the bytes mean, and which are refused."""

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spes_p2p.codecs import CODECS
from spes_p2p.codecs.format import Format, Segment, codec_named
from spes_p2p.errors import ExchangeError

SPARSE = [name for name in CODECS if codec_named(name).is_sparse]
NUMELS = [1, 2, 7, 32, 33, 100, 1024, 4095, 4096, 4097, 9000, 70_001]
GOLDEN = {
    "sparse-8": "384c1b6ff2b2",
    "sparse-32": "4df8dce56af1",
}
"""SHA-256 of the bytes of `fixed(70_001)`, on record: all peers of a run must make these bytes."""


def fixed(numel: int) -> Tensor:
    """Values of very different magnitudes that every machine computes exactly, without a generator."""
    index_N = torch.arange(numel, dtype=torch.int64)
    mixed_N = (index_N * 2_654_435_761 + 12_345) % 2**23 - 2**22
    return mixed_N.float() * 2.0 ** (index_N // 64 % 40 - 45).float()


def rounded(scale: float) -> float:
    """To nine significant bits; ties away from zero."""
    fraction, exponent = math.frexp(scale)
    return math.ldexp(math.floor(fraction * 512 + 0.5), exponent - 9) if scale >= 2.0**-100 else 0.0


def plainly(name: str, values: list[float]) -> list[float]:
    """What comes back, chunk by chunk, as the codec is described."""
    found = []
    for start in range(0, len(values), 4096):
        chunk = values[start : start + 4096]
        kept = sorted(range(len(chunk)), key=lambda place: (-abs(chunk[place]), place))
        sizes = {place: abs(chunk[place]) for place in kept[: -(-len(chunk) // int(name.split("-")[1]))]}
        border = math.fsum(sizes.values()) / len(sizes)
        for _ in range(3):
            large = [size for size in sizes.values() if size > border]
            small = [size for size in sizes.values() if size <= border]
            means = [math.fsum(group) / len(group) for group in (small or large, large or small)]
            last, border = border, sum(means) / 2
        scales = [rounded(mean) for mean in means]
        back = [0.0] * len(chunk)
        for place, size in sizes.items():
            back[place] = math.copysign(scales[size > last], chunk[place])
        found += back
    return found


def there_and_back(name: str, flat_N: Tensor) -> Tensor:
    whole = Format([Segment(flat_N.numel(), name)])
    return whole.decode(whole.encode(flat_N))


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("numel", NUMELS)
def test_the_largest_come_back_in_two_magnitudes_and_nothing_else(name, numel, seed):
    generator = torch.Generator().manual_seed(seed)
    flat_N = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator).pow(3)
    parts = zip(
        *(each.split(Format([Segment(numel, name)]).parts[0].numel) for each in (flat_N, there_and_back(name, flat_N))),
        strict=True,
    )
    for part_N, found_N in parts:
        assert torch.allclose(found_N, torch.tensor(plainly(name, part_N.tolist())), rtol=2.0**-8, atol=0)
        assert torch.equal(found_N != 0, torch.tensor(plainly(name, part_N.tolist())) != 0)


@pytest.mark.parametrize("name", SPARSE)
def test_of_equal_magnitudes_the_first_are_kept(name):
    kept = 4096 // int(name.split("-")[1])
    found_N = there_and_back(name, torch.cat([torch.ones(4096), -torch.ones(4096)]))
    assert torch.equal(found_N[:4096], torch.cat([torch.ones(kept), torch.zeros(4096 - kept)]))
    assert torch.equal(found_N[4096:], -found_N[:4096])


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bytes_are_those_on_record(name):
    data = Format([Segment(70_001, name)]).encode(fixed(70_001))
    assert hashlib.sha256(data.numpy().tobytes()).hexdigest()[:12] == GOLDEN[name]


@pytest.mark.parametrize("name", SPARSE)
@given(seed=st.integers(0, 2**31), magnitude=st.integers(-120, 120), numel=st.sampled_from(NUMELS[:-1]))
def test_encoding_what_was_decoded_gives_the_same_bytes(name, seed, magnitude, numel):
    """Also if some scales become 0."""
    generator = torch.Generator().manual_seed(seed)
    flat_N = torch.randn(numel, generator=generator) * 2.0 ** (magnitude * torch.rand(numel, generator=generator))
    whole = Format([Segment(numel, name)])
    data = whole.encode(flat_N)
    assert torch.equal(whole.encode(whole.decode(data)), data)


def test_values_beyond_the_largest_scale_stay_finite():
    flat_N = torch.full((5000,), torch.finfo(torch.float32).max)
    for name in SPARSE:
        assert there_and_back(name, flat_N).isfinite().all()


def encoded(
    name: str, numel: int, scales: tuple[float, float], large: list[int], negative: list[int], places: list[int]
) -> bytes:
    """Bytes of one chunk as the codec is described, bit by bit."""
    kept = len(places)
    low = int(math.log2(numel / kept))
    bits = [*large, *negative, *(place >> bit & 1 for bit in range(low) for place in places)]
    high = [0] * (kept + ((numel - 1) >> low))
    for index, place in enumerate(places):
        high[(place >> low) + index] = 1
    words = np.array(scales, dtype="<f4").view("<u4") >> 15
    return words.astype("<u2").tobytes() + np.packbits(bits + high).tobytes()


CHUNK = {"scales": (1.0, 2.0), "large": [1, 0, 0, 0], "negative": [0, 1, 0, 0], "places": [3, 40, 77, 127]}


def test_the_bytes_mean_what_the_codec_says():
    whole, flat_N = Format([Segment(128, "sparse-32")]), torch.zeros(128)
    flat_N[[3, 40, 77, 127]] = torch.tensor([2.0, -1.0, 1.0, 1.0])
    data = encoded("sparse-32", 128, **CHUNK)
    assert torch.equal(whole.decode(data), flat_N) and whole.encode(flat_N).numpy().tobytes() == data


@pytest.mark.parametrize(
    "bad",
    [
        {"places": [3, 77, 77, 127]},
        {"places": [3, 41, 40, 127]},  # within one value of the high bits
        {"scales": (2.0, 1.0)},
        {"scales": (1.0, 1.0)},
        {"large": [0, 0, 0, 0]},
        {"large": [1, 1, 1, 1]},
        {"scales": (0.0, 2.0)},  # minus zero
        {"scales": (1.0, float("inf"))},
        {"scales": (1.0, float("nan"))},
        {"scales": (2.0**-101, 1.0)},
    ],
    ids=str,
)
def test_what_no_encoder_writes_is_refused(bad):
    with pytest.raises(ExchangeError, match=r"payload holds .*; fetch it from another peer"):
        Format([Segment(128, "sparse-32")]).decode(encoded("sparse-32", 128, **CHUNK | bad))


def test_a_position_beyond_the_chunk_is_refused():
    data = encoded("sparse-32", 100, **CHUNK | {"places": [3, 40, 77, 99]})
    whole = Format([Segment(100, "sparse-32")])
    assert whole.decode(data).count_nonzero() == 4
    beyond = encoded("sparse-32", 100, **CHUNK | {"places": [3, 40, 77, 111]})
    with pytest.raises(ExchangeError, match="fetch it from another peer"):
        whole.decode(beyond)


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("numel", [100, 4096, 5000])
def test_every_flipped_bit_is_refused_or_moves_one_value(name, numel, seed):
    whole = Format([Segment(numel, name)])
    data = whole.encode(torch.randn(numel, generator=torch.Generator().manual_seed(seed)))
    true_N, refused = whole.decode(data), 0
    for bit in range(0, 8 * len(data), 1 if numel == 100 else 37):
        flipped = data.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found_N = whole.decode(flipped)
        except ExchangeError:
            refused += 1
        else:
            assert found_N.isfinite().all() and not torch.equal(found_N, true_N)
            assert found_N.count_nonzero() == true_N.count_nonzero()
    assert refused


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("byte", [0, 255])
def test_constant_bytes_are_refused(name, byte):
    whole = Format([Segment(5000, name)])
    with pytest.raises(ExchangeError, match="fetch it from another peer"):
        whole.decode(bytes([byte]) * whole.num_bytes)
