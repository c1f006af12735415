"""A robust mean is the plain one while all are honest, and near the honest ones' however loud a few are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.swarm.averaging.audit import (
    CLIP,
    OWN_CLIP,
    centered_clip_weights,
    gram,
    length_clipped_weights,
    max_length_ratios,
    vouched_weights,
)
from spes_p2p.swarm.averaging.partition import MIN_SENDERS, capped_tokens, weighted_mean
from spes_p2p.swarm.roster import MAX_TIMES_MEDIAN

NUMEL = 2000
seeds = st.integers(0, 2**31)
counts = st.integers(MIN_SENDERS, 12)


def draw_honest(count, seed):
    """A signal that all share, each with noise of its own."""
    generator = torch.Generator().manual_seed(seed)
    signal = torch.randn(NUMEL, generator=generator)
    return [signal + 0.7 * torch.randn(NUMEL, generator=generator) for _ in range(count)]


def robust_mean(parts, weights):
    return weighted_mean(parts, centered_clip_weights(gram(parts), weights, weights), sum(weights))


@given(counts, seeds, st.data())
def test_where_nobody_stands_out_the_weights_are_those_given(count, seed, data):
    weights = [float(data.draw(st.integers(80, 120))) for _ in range(count)]
    parts = [part * weight / 100 for part, weight in zip(draw_honest(count, seed), weights, strict=True)]
    assert centered_clip_weights(gram(parts), weights, weights) == weights


def test_who_counts_less_is_no_outlier_for_that(seed):
    parts, weights, tokens = draw_honest(8, seed), [0.05, *[1.0] * 7], [1.0] * 8
    assert centered_clip_weights(gram(parts), weights, tokens) == weights
    assert length_clipped_weights(gram(parts[:2]), weights[:2], tokens[:2], 0) == weights[:2]
    parts[0] = parts[0] * -100.0
    kept = centered_clip_weights(gram(parts), weights, tokens)
    assert kept[0] < 0.05 and weighted_mean(parts, kept, sum(weights)).norm() < 2 * parts[1].norm()


@pytest.mark.parametrize("times", [1 / 4, 4.0])
def test_a_machine_that_is_slower_or_faster_by_far_is_no_outlier(seed, times):
    weights = [times, *[1.0] * 7]
    parts = [part * weight for part, weight in zip(draw_honest(8, seed), weights, strict=True)]
    assert centered_clip_weights(gram(parts), weights, weights) == weights


@given(st.integers(MIN_SENDERS, 12), seeds, st.sampled_from([-100.0, -10.0, 20.0, 1e4, 1e30]), st.data())
def test_a_minority_however_loud_moves_the_mean_by_no_more_than_the_clip(count, seed, factor, data):
    parts = draw_honest(count, seed)
    bad = data.draw(st.integers(1, (count - 1) // 4))
    honest, weights = parts[bad:], [1.0] * count
    attacked = [part * factor for part in parts[:bad]] + honest
    mean, true = robust_mean(attacked, weights), weighted_mean(honest, weights[bad:])
    spread = max((part - true).norm().item() for part in honest)
    assert (mean - true).norm().item() <= 3 * CLIP * spread * bad / count
    plain = weighted_mean(attacked, weights)
    assert not (plain - true).norm().item() <= 3 * CLIP * spread * bad / count


@given(counts, seeds, st.floats(5, 1e6), st.permutations(range(12)))
def test_the_order_of_members_makes_no_difference(count, seed, factor, order):
    parts = draw_honest(count, seed)
    parts[0] = parts[0] * factor
    weights = [1.0 + index % 3 for index in range(count)]
    order = [place for place in order if place < count]
    mean = robust_mean(parts, weights)
    shuffled = robust_mean([parts[place] for place in order], [weights[place] for place in order])
    torch.testing.assert_close(shuffled, mean, rtol=1e-3, atol=1e-3)


@given(counts, seeds)
def test_a_mean_of_squares_stays_positive_whatever_is_among_them(count, seed):
    parts = [part.square() for part in draw_honest(count, seed)]
    parts[-1] = parts[-1] * 1e6
    mean = robust_mean(parts, [1.0] * count)
    assert (mean >= 0).all() and mean.norm() < 10 * parts[0].norm()


def test_equal_vectors_have_themselves_as_their_mean_and_nobody_divides_by_nothing():
    parts = [torch.zeros(5)] * 4 + [torch.ones(5)]
    assert robust_mean(parts, [1.0] * 5).norm() < 1e-6
    assert centered_clip_weights(gram([torch.ones(5)] * 6), [1.0] * 6, [1.0] * 6) == [1.0] * 6


@given(st.integers(2, 4), seeds, st.floats(OWN_CLIP * 2, 1e6))
def test_in_a_small_group_nobody_is_much_longer_than_ourselves(count, seed, factor):
    parts, weights = draw_honest(count, seed), [3.0] * count
    assert length_clipped_weights(gram(parts), weights, weights, 0) == weights
    parts[1] = parts[1] * factor
    kept = length_clipped_weights(gram(parts), weights, weights, 0)
    assert kept[0] == 3.0
    length = parts[1].norm().item() * kept[1] / weights[1]
    assert length == pytest.approx(OWN_CLIP * parts[0].norm().item(), rel=1e-3)


def test_who_has_trained_more_may_be_longer_than_ourselves_in_a_small_group(seed):
    parts, weights = draw_honest(2, seed), [1.0, 3.0]
    parts[1] = parts[1] * 8.0
    assert length_clipped_weights(gram(parts), weights, weights, 0) == weights
    assert length_clipped_weights(gram(parts), weights[::-1], weights[::-1], 0) != weights[::-1]


@given(st.lists(st.integers(1, 2**34), min_size=1, max_size=4), st.integers(0, 10**6))
def test_tokens_make_room_for_a_few_times_ours_or_the_usual_ones_and_no_more(tokens, usual):
    times = max_length_ratios(tokens, 0, usual)
    assert times[0] == 1 and all(1 <= ratio <= MAX_TIMES_MEDIAN * max(1, usual / tokens[0]) for ratio in times)
    for ratio, count in zip(times, tokens, strict=True):
        if tokens[0] <= count <= MAX_TIMES_MEDIAN * max(tokens[0], usual):
            assert ratio == count / tokens[0]


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=12))
def test_nobody_weighs_more_than_a_few_times_the_median_where_there_are_judges(tokens):
    fair = capped_tokens(tokens)
    trained = sorted(count for count in tokens if count)
    assert all(0 <= weight <= count for weight, count in zip(fair, tokens, strict=True))
    if len(trained) < MIN_SENDERS:
        assert fair == tokens
    else:
        middle = (trained[(len(trained) - 1) // 2] + trained[len(trained) // 2]) / 2
        assert max(fair) <= MAX_TIMES_MEDIAN * middle
        assert [w for w, t in zip(fair, tokens, strict=True) if t <= middle] == [t for t in tokens if t <= middle]


def test_a_guest_counts_in_a_small_group_only_if_it_goes_the_voters_way(seed):
    parts, weights = draw_honest(3, seed), [1.0, 1.0, 1.0]

    def kept(guest, *, is_guest=(False, False, True), weights=weights):
        return vouched_weights(gram([*parts[:2], guest]), weights, weights, is_guest)

    assert kept(parts[2]) == weights
    assert kept(parts[2] / 20, weights=[1.0, 1.0, 0.05]) == [1.0, 1.0, 0.05], "it has trained less"
    for spoilt in (-parts[2], parts[2] * 1e-6, parts[2] * 0):
        assert kept(spoilt) == [1.5, 1.5, 0.0]
        assert kept(spoilt, is_guest=[False] * 3) == kept(spoilt, is_guest=[True] * 3) == weights, "none is judge"
