"""The inner learning rate over a run, counted in rounds."""

from __future__ import annotations

import math

from spes_p2p.config import RunConfig, TrainConfig

LEAST_SHARE = 0.25
"""Of the rate at its round's end: with how much of it a step is made at least, in rounds that end by the clock."""


def learning_rate(train: TrainConfig, rounds_elapsed: float, total_rounds: int) -> float:
    """Learning rate at one point of the run: linear warm-up, then a cosine, a plateau with a decay, or a constant.

    Rounds, not steps, are the clock that all peers share: a slow peer makes fewer steps in a round, and stays on the
    same schedule. A newcomer therefore starts in the middle of it.

    Args:
        train: Peak, warm-up, shape, decay and final share.
        rounds_elapsed: Rounds since the run began, a fraction within a round; clamped to [0, `total_rounds`].
        total_rounds: Rounds in the run. A warm-up that is longer is cut off by the run's end.

    Returns:
        The rate for the next optimizer step: 0 at the very start if there is a warm-up, `train.lr` at the warm-up's
        end, with `cosine` and `wsd` `train.lr * train.final_lr_ratio` at `total_rounds` and after.

    Source: SGDR's cosine without restarts (https://arxiv.org/abs/1608.03983), as SPES uses it; warm-up, stable, decay
    from MiniCPM (https://arxiv.org/abs/2404.06395), with the linear decay of https://arxiv.org/abs/2405.18392.
    """
    elapsed = min(max(rounds_elapsed, 0.0), float(total_rounds))
    if elapsed < train.warmup_rounds:
        return train.lr * elapsed / train.warmup_rounds
    if train.schedule == "constant" or total_rounds <= train.warmup_rounds:
        return train.lr
    if train.schedule == "wsd":
        left = min(1.0, (total_rounds - elapsed) / (total_rounds * train.decay_fraction))
        return train.lr * (train.final_lr_ratio + (1 - train.final_lr_ratio) * left)
    progress = (elapsed - train.warmup_rounds) / (total_rounds - train.warmup_rounds)
    ratio = train.final_lr_ratio + (1 - train.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    return train.lr * ratio


def rate_of_step(run: RunConfig, rounds_elapsed: float) -> float:
    """Learning rate of a local step, where one may be a peer's only one in its round.

    In a warm-up's first round such a step, at the round's beginning, would be for nothing, and so short that what the
    others have made of the same round looks beyond all measure to who made it (docs/trust.md).

    Args:
        run: The run's settings.
        rounds_elapsed: Rounds since the run began, a fraction within a round.

    Returns:
        That of `learning_rate`; in rounds that end by the clock a quarter of that at the round's end at least.
    """
    train, total = run.train, run.round.total
    rate = learning_rate(train, rounds_elapsed, total)
    if run.round.mode == "steps":  # all make as many
        return rate
    return max(rate, LEAST_SHARE * learning_rate(train, math.floor(rounds_elapsed) + 1, total))
