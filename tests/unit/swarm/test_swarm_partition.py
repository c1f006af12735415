"""The swarm's weighted mean, and its partition among reducers."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.codecs.format import Format, Segment
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.averaging.partition import (
    MESSAGE_BYTES,
    MESSAGE_NUMEL,
    GroupPlan,
    decode_message,
    encode_message,
    reduce_message,
    reduced_shares,
    slices,
    weighted_mean,
)
from spes_p2p.swarm.roster import Member, Roster
from tests.support.agreement import last_body

weights = st.lists(st.integers(0, 10**6), min_size=1, max_size=6).filter(any)
NUM_ELEMENTS = 33
PEERS = [f"Qm{'P' * 43}{letter}" for letter in "ABC"]


def draw_parts(count, seed):
    return list(torch.randn(count, NUM_ELEMENTS, generator=torch.Generator().manual_seed(seed)))


@given(weights, st.integers(0, 2**31))
def test_weighted_mean_is_the_plain_one_in_float64(tokens, seed):
    parts = draw_parts(len(tokens), seed)
    plain = sum(count * part.double() for count, part in zip(tokens, parts, strict=True)) / sum(tokens)
    torch.testing.assert_close(weighted_mean(parts, list(map(float, tokens))).double(), plain, atol=2e-6, rtol=1e-6)


@given(weights, st.integers(0, 2**31))
def test_weighted_mean_stays_between_the_parts_and_leaves_them_alone(tokens, seed):
    parts = draw_parts(len(tokens), seed)
    before = [part.clone() for part in parts]
    mean = weighted_mean(parts, list(map(float, tokens)))
    counted = torch.stack([part for part, count in zip(parts, tokens, strict=True) if count])
    assert (mean >= counted.amin(0) - 1e-5).all() and (mean <= counted.amax(0) + 1e-5).all()
    assert all(torch.equal(part, old) for part, old in zip(parts, before, strict=True))


@given(weights, st.integers(0, 2**31), st.integers(0, 6))
def test_who_trained_nothing_changes_no_bit_not_even_with_nan(tokens, seed, position):
    parts = draw_parts(len(tokens), seed)
    with_idle = [*parts[:position], torch.full((NUM_ELEMENTS,), float("nan")), *parts[position:]]
    with_zero = [*tokens[:position], 0, *tokens[position:]]
    assert torch.equal(weighted_mean(with_idle, with_zero), weighted_mean(parts, tokens))


speeds = st.lists(st.floats(0.01, 1e4), min_size=1, max_size=12)


@given(speeds)
def test_shares_add_up_to_the_vector_and_level_the_uplinks(uplinks):
    shares, n = reduced_shares(uplinks), len(uplinks)
    assert all(share >= 0 for share in shares)
    assert sum(shares) == pytest.approx(1.0)
    if n > 2:
        seconds = [(1 + share * (n - 2)) / uplink for share, uplink in zip(shares, uplinks, strict=True)]
        busiest = max(second for second, share in zip(seconds, shares, strict=True) if share)
        for second, share in zip(seconds, shares, strict=True):
            assert second == pytest.approx(busiest) if share else second >= busiest * (1 - 1e-9)


@pytest.mark.parametrize("uplinks", [[5.0, 0.0], [0.0, 1e-3, 0.0, 100.0], [0.0, 0.0, 1.0]])
def test_whoever_cannot_be_called_reduces_nothing(uplinks):
    shares = reduced_shares(uplinks)
    assert sum(shares) == pytest.approx(1.0)
    assert all(not share for share, uplink in zip(shares, uplinks, strict=True) if not uplink)


def test_equal_members_reduce_equal_slices():
    assert reduced_shares([100.0] * 4) == pytest.approx([0.25] * 4)


def test_a_member_with_a_slow_uplink_reduces_nothing():
    shares = reduced_shares([100.0, 20.0, 100.0, 100.0])
    assert shares[1] == 0 and shares[0] == pytest.approx(1 / 3)


@given(st.integers(1, 2_000_000), speeds, st.sampled_from(["fp32", "bf16", "int8", "int4", "sparse-32"]))
def test_slices_hold_every_part_once_and_in_order(numel, uplinks, codec):
    format = Format([Segment(numel, codec), Segment(numel // 3, "fp32")])
    cut = slices(format, reduced_shares(uplinks))
    assert len(cut) == len(uplinks)
    travelling = [part for messages in cut for message in messages for part in message]
    starts = [
        (part.start + row * part.numel // part.rows, part.byte_start + row * part.num_bytes // part.rows)
        for part in travelling
        for row in range(part.rows)
    ]
    assert sorted(starts) == [(part.start, part.byte_start) for part in format.parts]
    assert max(part.stop for part in travelling) == format.numel
    for messages in cut:
        here = [part for message in messages for part in message]
        assert all(
            part.stop == after.start for part, after in itertools.pairwise(here) if part.segment == after.segment
        )
        assert [part.segment for part in here] == sorted(part.segment for part in here)
    for messages in cut:
        for message in messages:
            size = message[-1].byte_stop - message[0].byte_start
            assert size <= MESSAGE_BYTES or len(message) == 1
            assert message[-1].stop - message[0].start <= MESSAGE_NUMEL


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "sparse-32"])
def test_a_mean_reduced_by_messages_is_the_mean_and_its_error_what_is_missing(seed, codec):
    numel = 200_001
    format = Format([Segment(numel, codec), Segment(numel, "fp32")])
    parts = torch.randn(3, 2 * numel, generator=torch.Generator().manual_seed(seed))
    tokens = [3, 1, 2]
    encoded = [format.encode(part) for part in parts]
    values = [format.decode(data) for data in encoded]
    last, times = last_body(PEERS), {"tokens_per_second": 1.0, "ready_at": 1.0, "sync_seconds": 0.0}
    start = {"round": last.round, "previous": last.digest, "slots": ()}
    entries = [Member(peer_id=peer, tokens=n, **start, **times) for peer, n in zip(PEERS, tokens, strict=True)]
    plan = GroupPlan.in_roster(Roster(entries, last), PEERS, format)
    error = 0.01 * torch.randn(numel, generator=torch.Generator().manual_seed(seed + 1))
    result, left = torch.empty(format.num_bytes, dtype=torch.uint8), torch.zeros(numel)
    for messages in plan.slices:
        for message in messages:
            place = slice(message[0].byte_start, message[-1].byte_stop)
            span = slice(min(message[0].start, plan.delta_numel), min(message[-1].stop, plan.delta_numel))
            decoded = [decode_message(format, message, data[place]) for data in encoded]
            result[place], left[span] = reduce_message(plan, message, decoded, error[span])
    mean = format.decode(result)
    true = weighted_mean(values, tokens)
    if codec == "fp32":
        assert torch.equal(mean, true) and not left.any()
    else:
        torch.testing.assert_close(mean[:numel] + left, true[:numel] + error, atol=1e-5, rtol=1e-5)
        assert left.any()
    assert torch.equal(mean[numel:], true[numel:]), "moments are states, and are not fed back"


def test_the_residual_of_a_sparse_mean_is_at_most_four_times_the_mean(seed):
    """Otherwise what a liar sent once would come back for many rounds."""
    last, format = last_body(PEERS[:2]), Format([Segment(4096, "sparse-32")])
    start = {"round": last.round, "previous": last.digest, "slots": (), "tokens_per_second": 1.0}
    entries = [Member(peer_id=peer, tokens=1, **start, ready_at=1.0, sync_seconds=0.0) for peer in PEERS[:2]]
    plan = GroupPlan.in_roster(Roster(entries, last), PEERS[:2], format)
    (message,) = next(messages for messages in plan.slices if messages)
    values = format.decode(format.encode(torch.randn(4096, generator=torch.Generator().manual_seed(seed))))
    for times in (1.0, 100.0):
        residual = times * torch.randn(4096, generator=torch.Generator().manual_seed(seed + 1))
        data, left = reduce_message(plan, message, [values, values], residual)
        whole = values + residual - format.decode(data)
        cosine = (left @ whole) / (left.norm() * whole.norm())
        assert left.norm() == pytest.approx(min(whole.norm(), 4 * values.norm())) and cosine > 0.9999


def test_a_message_of_another_length_is_refused():
    format = Format([Segment(1000, "int8")])
    [message] = slices(format, [1.0])[0]
    data = encode_message(format, message, torch.ones(1000))
    for wrong in (data[:-1], torch.cat([data, data[:1]]), data[:0]):
        with pytest.raises(ExchangeError, match="bytes"):
            decode_message(format, message, wrong)


def test_everybody_who_reduces_sees_what_others_bring_of_the_delta():
    format = Format([Segment(10**6, "fp32"), Segment(10**6, "int8"), Segment(10**6, "int8")])
    for messages in slices(format, reduced_shares([1.0] * 8)):
        assert {message[0].segment for message in messages} == {0, 1, 2}
