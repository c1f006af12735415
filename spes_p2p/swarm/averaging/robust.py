"""A mean that few liars cannot move far, and that is the plain weighted mean to the bit where nobody stands out.

All of it happens in the space of the n members: from the Gram matrix of their vectors follow their distances from any
weighted sum of them, so a robust mean is a weighted sum with other weights.

Shape legend: n vectors, one of each member.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

LEAST_JUDGES = 5
"""Members below which nobody can say for sure who is the odd one."""
CLIP = 3.0
"""Median distances from the centre beyond which a vector is pulled in; honest ones are seen at 2.1 at most."""
OWN_CLIP = 4.0
"""In smaller groups: how many times as long as the reducer's own another's may be; honest ones are seen at 2.8."""
STEPS = 3
LEAST_SPREAD = 1e-3
"""Of the median length: below it, distances are rounding."""
MOST_TIMES_MEDIAN = 4.0
"""Of the members' tokens: what one may weigh at most where there are judges, and what makes room for longer vectors."""


def fair_tokens(tokens: Sequence[float]) -> list[float]:
    """Return what members are taken to have trained: with enough judges no more than so many times the median.

    Tokens are a member's own word. A fast machine among laptops is cut too, and that is the price.
    """
    trained = [count for count in tokens if count > 0]
    if len(trained) < LEAST_JUDGES:
        return list(tokens)
    most = MOST_TIMES_MEDIAN * statistics.median(trained)
    return [min(count, most) for count in tokens]  # guard: weight-cap


def times_ours(tokens: Sequence[float], own: int, usual: float = 0.0) -> list[float]:
    """Return how many times as long as ours each member's delta may be for the tokens that it says it has trained.

    In a small group nobody can contradict them, so they make no more room than so many times our own tokens, which we
    know, or those of the roster's usual member: who has just joined, and made a step or two, must let the others pass.

    Args:
        tokens: Of all; ours are positive.
        own: Our place.
        usual: What members of the roster usually have trained, by `usual_tokens`; 0 if that is not known.
    """
    most = MOST_TIMES_MEDIAN * max(tokens[own], usual)
    return [max(min(count, most) / tokens[own], 1.0) for count in tokens]  # guard: untrained-tokens


def gram(parts: Sequence[Tensor]) -> Tensor:
    """Return the inner products of vectors, float64 [n, n]."""
    parts_nN = torch.stack(list(parts)).double()
    return parts_nN @ parts_nN.T


def per_token(gram_nn: Tensor, tokens: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the Gram matrix of deltas as if all had trained the median's tokens, and each one's share of those, [n].

    Within a round a delta grows about as its tokens do: a machine of a quarter of the speed brings a quarter of it.
    """
    share_n = torch.tensor(tokens, dtype=torch.float64) / statistics.median(tokens)
    return gram_nn / torch.outer(share_n, share_n), share_n


def robust_weights(
    gram_nn: Tensor, weights: Sequence[float], tokens: Sequence[float], clip: float = CLIP
) -> list[float]:
    """Return the weights of a robust mean, to be divided by the sum of `weights`; these if nobody stands out.

    CenteredClip: from a centre v, the next is the weighted mean of `v + (x_i - v) min(1, tau / |x_i - v|)`. Here v
    starts at the member whose median distance to the others is least, and tau is a multiple of the median distance
    from v, so that it needs neither history nor a setting. What lies so far apart only because it took few tokens is
    given more room, as the noise of fewer steps is larger.

    Source: Karimireddy et al., Learning from History for Byzantine Robust Optimization
    (https://arxiv.org/abs/2012.10333), eq. (CC); per partition as in Gorbunov et al., https://arxiv.org/abs/2106.11257.

    Args:
        gram_nn: Of the vectors.
        weights: Positive, at least `LEAST_JUDGES`.
        tokens: With which the vectors have grown; the same of all for those that do not, as moments.
        clip: Median distances from the centre that are let pass.
    """
    scaled_nn, share_n = per_token(gram_nn, tokens)
    weight_n = torch.tensor(weights, dtype=torch.float64)
    pull_n, centre_n = torch.ones_like(weight_n), medoid(scaled_nn)
    for _ in range(STEPS):
        ratio_n = distances(scaled_nn, centre_n) / room(scaled_nn, centre_n, share_n)
        pull_n = (clip / ratio_n).clamp(max=1.0)
        part_n = weight_n / weight_n.sum() * pull_n
        centre_n = centre_n * (1 - part_n.sum()) + part_n
    if bool((pull_n == 1.0).all()):  # guard: centered-clip
        return list(weights)
    # Each delta, pulled towards the centre and then as long again as its tokens make it, as weights of the deltas.
    kept_n = weight_n * pull_n + (weight_n * share_n * (1 - pull_n)).sum() * centre_n / share_n
    return kept_n.tolist()


def medoid(gram_nn: Tensor) -> Tensor:
    """Return, as weights, the vector whose median distance to the others is least."""
    square_n = gram_nn.diagonal()
    apart_nn = (square_n[:, None] + square_n[None, :] - 2 * gram_nn).clamp(min=0).sqrt()
    best = apart_nn.median(dim=1).values.argmin()  # guard: centre-member
    return torch.nn.functional.one_hot(best, len(gram_nn)).double()


def distances(gram_nn: Tensor, centre_n: Tensor) -> Tensor:
    """Return each vector's distance from a weighted sum of them, [n]."""
    inner_n = gram_nn @ centre_n
    return (gram_nn.diagonal() - 2 * inner_n + centre_n @ inner_n).clamp(min=0).sqrt()


def room(gram_nn: Tensor, centre_n: Tensor, share_n: Tensor) -> Tensor:
    """Return the distance from a centre that is usual for each vector, [n]."""
    spread = distances(gram_nn, centre_n).median()
    least = LEAST_SPREAD * gram_nn.diagonal().sqrt().median()
    return torch.maximum(spread, least).clamp(min=1e-30) * share_n.clamp(max=1.0).rsqrt()


def own_weights(
    gram_nn: Tensor,
    weights: Sequence[float],
    tokens: Sequence[float],
    own: int,
    clip: float = OWN_CLIP,
    usual: float = 0.0,
) -> list[float]:
    """Return weights that make no vector longer than so many times one's own; `weights` if none is.

    For groups in which nobody is a majority: what a reducer knows to be honest there is what it has trained itself.
    To be divided by the sum of `weights`.

    Args:
        gram_nn: Of the vectors.
        weights: Positive.
        tokens: Likewise.
        own: The reducer's own.
        clip: Times its length that others may have, and more for as many times its tokens, within reason.
        usual: What members of the roster usually have trained.
    """
    length_n = gram_nn.diagonal().sqrt()
    times_n = torch.tensor(times_ours(tokens, own, usual), dtype=torch.float64)
    limit_n = clip * length_n[own] * times_n
    if not length_n[own] > 0 or bool((length_n <= limit_n).all()):  # guard: length-clip
        return list(weights)
    pull_n = (limit_n / length_n).clamp(max=1.0)
    return [weight * pull for weight, pull in zip(weights, pull_n.tolist(), strict=True)]
