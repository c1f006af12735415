"""The learning rate at each point of a run."""

from __future__ import annotations

import math

from spes_p2p.config import RunConfig, TrainConfig

MIN_RATE_SHARE = 0.25
"""Smallest rate of a step in rounds that end by the clock, as a share of the rate at the round's end."""


def learning_rate(train: TrainConfig, rounds_elapsed: float, total_rounds: float) -> float:
    """Return the learning rate at one point of the run: linear warm-up, then cosine, warm-up-stable-decay or constant.

    The schedule counts rounds, not steps, because all peers share rounds: a slow peer makes fewer steps in a round.

    Args:
        rounds_elapsed: Full rounds since the run began, a fraction within a round; clamped to [0, `total_rounds`].
        total_rounds: Full rounds in the run; `train.schedule_rounds` replaces them.

    Source: SGDR's cosine without restarts (https://arxiv.org/abs/1608.03983), as SPES uses it; warm-up, stable, decay
    from MiniCPM (https://arxiv.org/abs/2404.06395), with the linear decay of https://arxiv.org/abs/2405.18392.
    """
    total_rounds, start = train.schedule_rounds or total_rounds, train.lr * train.warmup_start_ratio
    elapsed = min(max(rounds_elapsed, 0.0), float(total_rounds))
    if elapsed < train.warmup_rounds:
        return start + (train.lr - start) * elapsed / train.warmup_rounds
    if train.schedule == "constant" or total_rounds <= train.warmup_rounds:
        return train.lr
    if train.schedule == "wsd":
        left = min(1.0, (total_rounds - elapsed) / (total_rounds * train.decay_fraction))
        return train.lr * (train.final_lr_ratio + (1 - train.final_lr_ratio) * left)
    progress = (elapsed - train.warmup_rounds) / (total_rounds - train.warmup_rounds)
    ratio = train.final_lr_ratio + (1 - train.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    return train.lr * ratio


def rate_of_step(run: RunConfig, rounds_elapsed: float) -> float:
    """Return the learning rate of a local step, with a floor in rounds that end by the clock.

    There a step may be a slow peer's only one in its round. Without the floor, the first step of a warm-up's first
    round has rate 0, and the peer's delta is so short that it rejects the other peers' as outliers (docs/security.md).
    """
    train, full = run.train, run.round.full_rounds
    total = full(run.round.total)
    rate = learning_rate(train, full(rounds_elapsed), total)
    if run.round.mode == "steps":  # all peers make equally many steps
        return rate
    return max(rate, MIN_RATE_SHARE * learning_rate(train, full(math.floor(rounds_elapsed) + 1), total))
