"""Formats: a vector of several segments, in parts or whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spes_p2p.codecs import CODECS
from spes_p2p.codecs.format import PART_NUMEL, Format, Segment, codec_named, part_numel
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.averaging.encoding import DeltaEncoding

LENGTHS = st.one_of(
    st.integers(0, 300), st.sampled_from([64, 128]), st.sampled_from([PART_NUMEL - 1, PART_NUMEL, PART_NUMEL + 1])
)
SEGMENTS = st.one_of(
    st.builds(Segment, LENGTHS, st.sampled_from(sorted(CODECS))),
    st.builds(Segment, LENGTHS, st.sampled_from(sorted(name for name in CODECS if CODECS[name][1])), st.just(True)),
)
SEVERAL = [
    Segment(PART_NUMEL + 77, "int4"),
    Segment(3, "fp32"),
    Segment(PART_NUMEL * 2, "bf16"),
    Segment(1001, "int8", non_negative=True),
    Segment(99, "int4"),
]


def vector(segments: list[Segment], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    pieces = [torch.randn(segment.numel, generator=generator) for segment in segments]
    pieces = [
        piece.square() if segment.non_negative else piece for piece, segment in zip(pieces, segments, strict=True)
    ]
    return torch.cat([torch.empty(0), *pieces])


@given(st.lists(SEGMENTS, max_size=4))
def test_parts_cover_the_vector_and_none_lies_in_two_segments(segments):
    whole, remaining = Format(segments), []
    assert whole.numel == sum(segment.numel for segment in segments)
    for segment in segments:
        size = part_numel(segment.numel)
        remaining += [(segment, numel) for numel in [size] * (segment.numel // size)]
        remaining += [(segment, segment.numel % size)] if segment.numel % size else []
    start = byte_start = 0
    for part, (segment, numel) in zip(whole.parts, remaining, strict=True):
        assert (part.start, part.stop, part.byte_start) == (start, start + numel, byte_start)
        assert part.codec == codec_named(segment.codec, segment.non_negative)
        start, byte_start = part.stop, part.byte_stop
    assert (start, byte_start) == (whole.numel, whole.num_bytes)


@given(st.lists(SEGMENTS, max_size=4), st.integers(0, 2**31))
def test_the_whole_is_its_parts(segments, seed):
    whole, flat_N = Format(segments), vector(segments, seed)
    before_N = flat_N.clone()
    data = whole.encode(flat_N)
    assert torch.equal(flat_N, before_N) and data.dtype == torch.uint8 and data.shape == (whole.num_bytes,)
    decoded_N = whole.decode(data)
    assert decoded_N.dtype == torch.float32 and decoded_N.shape == flat_N.shape
    for part in whole.parts:
        data_part, flat_part_N = data[part.byte_start : part.byte_stop], flat_N[part.start : part.stop]
        assert torch.equal(whole.encode_part(part, flat_part_N), data_part)
        assert torch.equal(whole.decode_part(part, data_part), decoded_N[part.start : part.stop])
        assert torch.equal(whole.decode_part(part, data_part.numpy().tobytes()), decoded_N[part.start : part.stop])


def test_a_segment_is_as_if_it_were_alone(seed):
    flat_N = vector(SEVERAL, seed)
    pieces = flat_N.split([segment.numel for segment in SEVERAL])
    alone = [Format([segment]).encode(piece) for segment, piece in zip(SEVERAL, pieces, strict=True)]
    assert torch.equal(Format(SEVERAL).encode(flat_N), torch.cat(alone))


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_bytes_are_decoded_wherever_they_lie(offset, seed):
    whole = Format(SEVERAL)
    data = whole.encode(vector(SEVERAL, seed))
    decoded_N = whole.decode(data)
    received = bytearray(offset) + bytearray(data.numpy().tobytes())
    assert torch.equal(whole.decode(memoryview(received)[offset:]), decoded_N)
    assert torch.equal(whole.decode(memoryview(bytes(received))[offset:]), decoded_N)
    assert torch.equal(whole.decode(torch.frombuffer(received, dtype=torch.uint8)[offset:]), decoded_N)


def test_encode_and_decode_use_the_room_they_are_given(seed):
    whole, flat_N = Format(SEVERAL), vector(SEVERAL, seed)
    before_N = flat_N.clone()
    data, decoded_N = torch.empty(whole.num_bytes, dtype=torch.uint8), torch.empty(whole.numel)
    assert whole.encode(flat_N, out=data) is data and whole.decode(data, out=decoded_N) is decoded_N
    assert torch.equal(flat_N, before_N)
    assert torch.equal(whole.encode(flat_N.requires_grad_()), data) and torch.equal(whole.decode(data), decoded_N)


def test_decoded_values_do_not_share_the_memory_of_the_bytes():
    whole = Format([Segment(100, "fp32")])
    data = whole.encode(torch.rand(100))
    decoded_N = whole.decode(data)
    data.zero_()
    assert decoded_N.any()


@pytest.mark.parametrize("change", [-1, 1, 128])
@pytest.mark.parametrize("name", CODECS)
def test_another_length_is_refused(name, change):
    whole = Format([Segment(300, name)])
    data = bytes(whole.num_bytes + change)
    with pytest.raises(ExchangeError, match=f"payload of {len(data)} bytes, expected {whole.num_bytes}"):
        whole.decode(data)
    with pytest.raises(ExchangeError, match=f"payload of {len(data)} bytes, expected {whole.num_bytes}"):
        whole.decode_part(whole.parts[0], torch.zeros(len(data), dtype=torch.uint8))
    with pytest.raises(ValueError, match=f"vector of {300 + change} elements, expected 300"):
        whole.encode(torch.zeros(300 + change))
    with pytest.raises(ValueError, match=f"vector of {300 + change} elements, expected 300"):
        whole.encode_part(whole.parts[0], torch.zeros(300 + change))


def test_only_fp32_throughout_is_exact():
    assert Format([Segment(5, "fp32"), Segment(5, "fp32", non_negative=True)]).is_exact
    assert not Format([Segment(5, "fp32"), Segment(5, "bf16")]).is_exact


def test_moments_travel_in_rounds_that_are_multiples_of_their_interval():
    delta, first, second = Segment(10, "int4"), Segment(10, "bf16", interval=2), Segment(10, "int8", True, interval=3)
    encoding = DeltaEncoding({"shared": [delta, first, second]})
    travelling = [encoding.format("shared", round).segments for round in range(7)]
    assert travelling[0] == travelling[6] == (delta, first, second)
    assert travelling[1] == travelling[5] == (delta,) and travelling[2] == travelling[4] == (delta, first)
    assert travelling[3] == (delta, second)


@pytest.mark.parametrize(("numel", "interval"), [(-1, 1), (1, 0)])
def test_a_segment_of_no_sense_is_refused(numel, interval):
    with pytest.raises(AssertionError, match=f"numel={numel}, interval={interval}"):
        Segment(numel, "fp32", interval=interval)
