"""Codecs: the error of decoded values, and equal values on every machine."""

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spes_p2p.codecs import CODECS
from spes_p2p.codecs.format import Format, Segment, codec_named
from spes_p2p.codecs.vectors import BLOCK_BYTES, BlockHasher, block_hashes, digest, hashes_of_file
from spes_p2p.config.run import CodecName, MomentCodecName

LARGEST = torch.finfo(torch.float32).max
FP32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
BITS = {"fp32": 32, "bf16": 16, "int8": 8.125, "int4": 4.25}
BITS |= {"sparse-8": 3616 / 4096, "sparse-16": 2080 / 4096, "sparse-32": 1184 / 4096, "sparse-64": 672 / 4096}
FOR_MOMENTS = [name for name, (_, for_moments) in CODECS.items() if for_moments]
LOSSY = [name for name in CODECS if codec_named(name).max_error]


@st.composite
def vectors(draw: st.DrawFn) -> Tensor:
    """Anything from nothing to a few blocks: Gaussian, of any magnitudes, or with a few outliers."""
    numel = draw(st.integers(0, 300))
    if draw(st.booleans()):
        return torch.tensor(draw(st.lists(FP32, min_size=numel, max_size=numel)), dtype=torch.float32)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    flat_N = torch.randn(numel, generator=generator) * 2.0 ** draw(st.integers(-60, 60))
    for where in draw(st.lists(st.integers(0, max(0, numel - 1)), max_size=3 if numel else 0)):
        flat_N[where] = draw(FP32)
    return flat_N


def blocks(name: str, *vectors_N: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same block of each vector, in fp64."""
    if vectors_N[0].numel():
        yield from zip(*(flat_N.double().split(codec_named(name).block) for flat_N in vectors_N), strict=True)


def there_and_back(name: str, flat_N: Tensor, non_negative: bool = False) -> Tensor:
    whole = Format([Segment(flat_N.numel(), name, non_negative)])
    return whole.decode(whole.encode(flat_N))


def plainly_decoded(name: str, data: bytes, numel: int, root: bool = False) -> list[float]:
    """The values of encoded bytes as the formats are described, element by element, in Python's own exact numbers."""
    block, bits = {"int8": (128, 8), "int4": (64, 4)}[name]
    num_blocks = -(-numel // block)
    words = np.frombuffer(data, "<u2", num_blocks)
    shift = 16 if name == "int4" else 15
    scale = [float(s) for s in (words.astype("<u4") << shift).view("<f4")]
    codes = data[2 * num_blocks :]
    values = []
    for element in range(numel):
        lane, byte = divmod(element, len(codes))
        code = codes[byte] >> (bits * lane) & (2**bits - 1)
        value = scale[element // block] * (code if root or code < 2 ** (bits - 1) else code - 2**bits)
        values.append(float(np.float32(value * value)) if root else value)
    return values


def test_the_config_offers_all_codecs_and_no_others():
    assert list(get_args(CodecName)) == list(CODECS) and list(get_args(MomentCodecName)) == FOR_MOMENTS
    assert all(codec_named(name, True).non_negative for name in FOR_MOMENTS)
    page = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
    assert all(f"`{name}`" in page for name in CODECS)


@pytest.mark.parametrize("name", BITS)
def test_an_element_takes_so_many_bits(name):
    numel = 1 << 16
    assert codec_named(name).num_bytes(numel) * 8 == numel * BITS[name]


@pytest.mark.parametrize("name", CODECS)
def test_parts_are_whole_blocks_and_error_feedback_converges(name):
    codec = codec_named(name)
    assert (codec.is_sparse or 1024 % codec.block == 0) and 0 <= codec.max_error < 1


@given(vectors())
def test_fp32_gives_back_every_bit(flat_N):
    assert torch.equal(there_and_back("fp32", flat_N).view(torch.int32), flat_N.view(torch.int32))


@pytest.mark.parametrize("name", LOSSY)
@given(vectors())
def test_what_rounding_leaves_over_is_smaller_than_what_was_rounded_in_every_block(name, flat_N):
    flat_N = flat_N.clamp(-3e38, 3e38)
    flat_N[flat_N.abs() < 1e-25] = 0  # below that scales end
    for actual, block in blocks(name, there_and_back(name, flat_N), flat_N):
        assert (actual - block).norm() <= codec_named(name).max_error * block.norm()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("outlier", [1e-20, -1.0, 3e38, -3e38])
@pytest.mark.parametrize("numel", [1, 128, 200])
def test_one_outlier_among_zeros_comes_through(name, outlier, numel):
    flat_N = torch.zeros(numel)
    flat_N[numel // 2] = outlier
    decoded_N = there_and_back(name, flat_N)
    assert torch.allclose(decoded_N, flat_N, rtol=0.01, atol=0)


@pytest.mark.parametrize("name", LOSSY)
@given(vectors())
def test_the_tiniest_blocks_become_zeros_and_nothing_worse(name, flat_N):
    tiny_N = flat_N.nan_to_num().clamp(-1e-31, 1e-31)
    decoded_N = there_and_back(name, tiny_N)
    assert ((decoded_N - tiny_N).abs() <= tiny_N.abs() * 0.01 + 1.1e-31).all()


@pytest.mark.parametrize(("name", "share"), [("bf16", 0.0017), ("int8", 0.0068), ("int4", 0.1)])
@pytest.mark.parametrize("magnitude", [1e-12, 1.0, 1e12])
def test_gaussian_values_keep_this_share_of_their_norm_as_error(name, share, magnitude, seed):
    flat_N = torch.randn(200_000, generator=torch.Generator().manual_seed(seed)) * magnitude
    assert (there_and_back(name, flat_N) - flat_N).norm() < share * flat_N.norm()


@pytest.mark.parametrize(("name", "levels"), [("int8", 127), ("int4", 8)])
@given(vectors())
def test_even_levels_err_by_half_a_step_at_most(name, levels, flat_N):
    flat_N = flat_N.clamp(-3e38, 3e38)
    for actual, block in blocks(name, there_and_back(name, flat_N), flat_N):
        step = block.abs().max() / levels
        error = (actual - block).abs()
        # 0 is one of the 16: there is no level eight steps from it on the side where the largest value is not
        extreme = block.max() if block.max() >= -block.min() else block.min()
        is_cut = (block * extreme < 0) & (block.abs() > 7.4 * step) & (name == "int4")
        assert (error <= torch.where(is_cut, 1.05, 0.503) * step + 1e-28).all()


@pytest.mark.parametrize("name", CODECS)
@given(vectors())
def test_what_was_decoded_once_is_not_rounded_again(name, flat_N):
    decoded_N = there_and_back(name, flat_N.clamp(-3e38, 3e38))
    assert torch.equal(there_and_back(name, decoded_N), decoded_N)


@pytest.mark.parametrize("name", ["int8", "int4"])
@given(vectors())
def test_the_bytes_mean_what_the_codec_says_to_the_last_bit(name, flat_N):
    whole = Format([Segment(flat_N.numel(), name)])
    data = whole.encode(flat_N)
    assert whole.decode(data).tolist() == plainly_decoded(name, data.numpy().tobytes(), flat_N.numel())


@given(vectors())
def test_the_bytes_of_second_moments_mean_squares(flat_N):
    flat_N = flat_N.abs().clamp(1e-20)  # squares too small for fp32 are another matter
    whole = Format([Segment(flat_N.numel(), "int8", non_negative=True)])
    data = whole.encode(flat_N)
    assert whole.decode(data).tolist() == plainly_decoded("int8", data.numpy().tobytes(), flat_N.numel(), root=True)


@given(vectors())
def test_bf16_is_the_nearest_to_even(flat_N):
    flat_N = flat_N.clamp(-3e38, 3e38)
    bits_N = flat_N.view(torch.int32).long() & 0xFFFFFFFF
    nearest_N = (bits_N + 0x7FFF + (bits_N >> 16 & 1)) >> 16 << 16
    assert torch.equal(there_and_back("bf16", flat_N).view(torch.int32).long() & 0xFFFFFFFF, nearest_N)


@pytest.mark.parametrize("name", FOR_MOMENTS)
@given(vectors())
def test_no_second_moment_becomes_negative_and_no_positive_one_zero(name, flat_N):
    flat_N = flat_N.abs().clamp(max=3e38)
    decoded_N = there_and_back(name, flat_N, non_negative=True)
    assert (decoded_N >= 0).all() and torch.isfinite(decoded_N).all()
    assert torch.equal(decoded_N > 0, flat_N > 0)
    assert torch.equal(there_and_back(name, decoded_N, non_negative=True), decoded_N)


@pytest.mark.parametrize("name", FOR_MOMENTS)
@pytest.mark.parametrize("value", [1e-45, 1e-40, 2.0**-126, 1e-38, 1e-30, 3e38])
def test_the_tiniest_second_moment_stays_positive_beside_the_largest(name, value):
    flat_N = torch.tensor([value, 0.0, 3e38, value])
    decoded_N = there_and_back(name, flat_N, non_negative=True)
    assert (decoded_N[[0, 2, 3]] > 0).all() and decoded_N[1] == 0
    alone_N = there_and_back(name, flat_N[:1], non_negative=True)
    assert value * 0.99 <= alone_N.item() <= max(value * 1.01, 2.0**-126)


@given(vectors())
def test_the_root_of_a_second_moment_is_rounded_up_by_less_than_a_step(flat_N):
    flat_N = flat_N.abs().clamp(1e-20, 3e38)
    for actual, block in blocks("int8", there_and_back("int8", flat_N, non_negative=True), flat_N):
        assert (actual.sqrt() >= block.sqrt() * (1 - 1e-6)).all()
        assert (actual.sqrt() - block.sqrt() <= block.max().sqrt() / 254 * 1.001).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_largest_numbers_stay_finite_in_few_bits(name):
    flat_N = torch.tensor([LARGEST, -LARGEST, LARGEST / 2] * 50)
    decoded_N = there_and_back(name, flat_N)
    assert torch.isfinite(decoded_N).all()
    assert ((decoded_N.double() - flat_N.double()).norm() <= codec_named(name).max_error * flat_N.double().norm()).all()
    assert there_and_back("int8", flat_N.abs(), non_negative=True).isfinite().all()


ON_ANOTHER_MACHINE = """
import torch
from spes_p2p.codecs import CODECS
from spes_p2p.codecs.format import Format, Segment
from spes_p2p.codecs.vectors import digest
torch.set_num_threads(1)
generator = torch.Generator().manual_seed({seed})
bits = torch.randint(-(2**31), 2**31, (70_001,), generator=generator).to(torch.int32)
flat = torch.cat((bits.view(torch.float32).nan_to_num(0, 1, -1).clamp(-1e38, 1e38), bits / 2.0**40))
for name, classes in CODECS.items():
    for non_negative in range(2 if classes[1] else 1):
        whole = Format([Segment(len(flat), name, bool(non_negative))])
        data = whole.encode(flat.abs() if non_negative else flat)
        print(name, digest(data), digest(whole.decode(data)))
"""


@pytest.mark.full  # two processes that import torch; only another arithmetic or another torch can break it
def test_a_processor_with_other_vectors_writes_and_reads_the_same_bytes(seed):
    script, outputs = ON_ANOTHER_MACHINE.format(seed=seed), []
    for settings in ({}, {"ATEN_CPU_CAPABILITY": "default"}):
        done = subprocess.run(
            [sys.executable, "-c", script], env=os.environ | settings, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0].count("\n") == len(CODECS) + len(FOR_MOMENTS) and outputs[0] == outputs[1]


def test_a_digest_is_that_of_the_bytes_whatever_holds_them():
    data = torch.randint(0, 256, (1001,), dtype=torch.uint8)
    assert digest(data) == digest(data.numpy().tobytes()) == digest(memoryview(data.numpy().tobytes()))
    floats = torch.randn(10)
    assert digest(floats) == digest(floats.view(torch.uint8))


@pytest.mark.parametrize("num_bytes", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES - 7])
def test_a_digest_is_the_hash_of_the_hashes_of_blocks_of_a_mebibyte_however_the_bytes_come(tmp_path, num_bytes):
    data = random.randbytes(num_bytes)
    blocks = [data[start : start + BLOCK_BYTES] for start in range(0, max(1, num_bytes), BLOCK_BYTES)]
    hashes = b"".join(hashlib.sha256(block).digest() for block in blocks)
    assert digest(data) == hashlib.sha256(hashes).hexdigest() and block_hashes(data) == hashes
    hasher, start = BlockHasher(), 0
    while start < num_bytes:
        size = random.choice((1, 1000, BLOCK_BYTES, 2 * BLOCK_BYTES))
        hasher.update(data[start : start + size])
        start += size
    (tmp_path / "file").write_bytes(data)
    assert hasher.finish() == hashes == hashes_of_file(tmp_path / "file")
