import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.config import RoundConfig, RunConfig, TrainConfig
from spes_p2p.optim.schedule import learning_rate, rate_of_step


def test_warms_up_linearly_then_follows_the_cosine_to_the_final_ratio():
    train = TrainConfig(lr=1.0, warmup_rounds=2, final_lr_ratio=0.1)
    points = {0.0: 0.0, 0.5: 0.25, 2.0: 1.0, 6.0: 0.55, 10.0: 0.1}
    points[4.0] = 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2
    for rounds, expected in points.items():
        assert learning_rate(train, rounds, 10) == pytest.approx(expected)


def test_a_warm_up_may_start_above_zero_and_a_decay_may_end_before_the_run():
    """As SPES's does: from a tenth of the peak, and over the first half of its 9B run."""
    train = TrainConfig(lr=1.0, warmup_rounds=2, warmup_start_ratio=0.1, schedule_rounds=10, final_lr_ratio=0.1)
    points = {0.0: 0.1, 1.0: 0.55, 2.0: 1.0, 6.0: 0.55, 10.0: 0.1, 15.0: 0.1, 20.0: 0.1}
    for rounds, expected in points.items():
        assert learning_rate(train, rounds, 20) == pytest.approx(expected)


def test_matches_torch_cosine_annealing():
    import torch

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8, eta_min=0.03)
    train = TrainConfig(lr=0.3, warmup_rounds=0, final_lr_ratio=0.1)
    for rounds in range(9):
        assert learning_rate(train, rounds, 8) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()


def test_constant_keeps_the_peak_after_the_warm_up():
    train = TrainConfig(lr=0.5, schedule="constant", warmup_rounds=1)
    assert [learning_rate(train, rounds, 4) for rounds in (0.5, 1, 3, 99)] == [0.25, 0.5, 0.5, 0.5]


def test_wsd_warms_up_stays_at_the_peak_and_decays_linearly_at_the_end():
    train = TrainConfig(lr=1.0, schedule="wsd", warmup_rounds=2, decay_fraction=0.4, final_lr_ratio=0.1)
    points = {0.0: 0.0, 1.0: 0.5, 2.0: 1.0, 4.0: 1.0, 6.0: 1.0, 7.0: 0.775, 8.0: 0.55, 10.0: 0.1, 99.0: 0.1}
    assert [learning_rate(train, rounds, 10) for rounds in points] == pytest.approx(list(points.values()))


def test_a_wsd_run_that_ends_later_is_the_same_until_the_earlier_ones_decay():
    """Which is what the plateau is for: a run may be prolonged before it decays."""
    train = TrainConfig(schedule="wsd", decay_fraction=0.2)
    for rounds in (0.1, 0.5, 3.0, 7.9):
        assert learning_rate(train, rounds, 10) == learning_rate(train, rounds, 100)


def test_wsd_without_plateau_or_warm_up_is_a_straight_line():
    train = TrainConfig(lr=1.0, schedule="wsd", warmup_rounds=0, decay_fraction=1.0, final_lr_ratio=0.0)
    assert [learning_rate(train, rounds, 4) for rounds in range(5)] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_past_the_end_the_rate_stays(schedule):
    train = TrainConfig.model_validate({"schedule": schedule})
    assert learning_rate(train, 10, 10) == learning_rate(train, 10.5, 10) == learning_rate(train, 1e9, 10)


def test_a_warm_up_longer_than_the_run_is_cut_off():
    train = TrainConfig(lr=1.0, warmup_rounds=8)
    assert [learning_rate(train, rounds, 4) for rounds in (2, 4, 100)] == [0.25, 0.5, 0.5]
    assert learning_rate(TrainConfig(lr=1.0, warmup_rounds=4), 4, 4) == 1.0


@given(
    rounds=st.floats(-5, 100),
    total=st.integers(1, 50),
    warmup=st.floats(0, 20),
    schedule=st.sampled_from(["cosine", "wsd", "constant"]),
)
def test_stays_between_zero_and_the_peak(rounds, total, warmup, schedule):
    train = TrainConfig.model_validate({"lr": 0.7, "warmup_rounds": warmup, "schedule": schedule})
    assert 0 <= learning_rate(train, rounds, total) <= 0.7


@given(st.integers(0, 60), st.floats(0, 80))
def test_growing_rounds_amount_to_the_sum_of_their_shares(growing, elapsed):
    config = RoundConfig(growing=growing, total=80)
    whole = math.floor(elapsed)
    shares = sum(map(config.share, range(1, whole + 1))) + (elapsed - whole) * config.share(whole + 1)
    assert config.full_rounds(elapsed) == pytest.approx(shares, abs=1e-6)


def test_the_schedule_counts_full_rounds():
    """A run of 124 rounds, 30 of which grow, is as long as one of 100, and has its rates."""
    train = TrainConfig(lr=1.0, warmup_rounds=5, final_lr_ratio=0.1)
    grown = RunConfig(train=train, round=RoundConfig(mode="steps", growing=30, total=124))
    fixed = RunConfig(train=train, round=RoundConfig(mode="steps", total=100))
    assert grown.round.full_rounds(124) == pytest.approx(100, abs=0.1)
    assert grown.round.steps_of(1) == 1 and grown.round.steps_of(31) == grown.round.steps
    for rounds in (0, 1, 5, 29, 30, 31.5, 90, 124):
        expected = rate_of_step(fixed, grown.round.full_rounds(rounds))
        assert rate_of_step(grown, rounds) == pytest.approx(expected, abs=2e-3)
    assert rate_of_step(grown, 124) == pytest.approx(0.1)
