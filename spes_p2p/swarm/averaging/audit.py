"""What one member of a group sees of the others in a round: how much to trust them now, and whom it caught.

Shape legend: n vectors, one of each member.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spes_p2p.codecs import Format, Part, Segment

MIN_SENDERS = 5
"""Members below which nobody can say for sure who is the odd one."""
CLIP = 3.0
"""Median distances from the centre beyond which a vector is pulled in; honest ones are seen at 2.1 at most."""
OWN_CLIP = 4.0
"""In smaller groups: how many times as long as the reducer's own another's may be; honest ones are seen at 2.8."""
STEPS = 3
MIN_SPREAD = 1e-3
"""Of the median length: below it, distances are rounding."""
MAX_TIMES_MEDIAN = 4.0
"""Of the members' tokens: what one may weigh at most where there are judges, and what makes room for longer vectors."""


def capped_tokens(tokens: Sequence[float]) -> list[float]:
    """Return what members are taken to have trained: with enough judges no more than so many times the median.

    Tokens are a member's own word. A fast machine among laptops is cut too, and that is the price.
    """
    trained = [count for count in tokens if count > 0]
    if len(trained) < MIN_SENDERS:
        return list(tokens)
    most = MAX_TIMES_MEDIAN * statistics.median(trained)
    return [min(count, most) for count in tokens]  # guard: weight-cap


def max_length_ratios(tokens: Sequence[float], own: int, usual: float = 0.0) -> list[float]:
    """Return how many times as long as ours each member's delta may be for the tokens that it says it has trained.

    In a small group nobody can contradict them, so they make no more room than so many times our own tokens, which we
    know, or those of the roster's usual member: who has just joined, and made a step or two, must let the others pass.

    Args:
        tokens: Of all; ours are positive.
        own: Our place.
        usual: What members of the roster usually have trained, by `usual_tokens`; 0 if that is not known.
    """
    most = MAX_TIMES_MEDIAN * max(tokens[own], usual)
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


def centered_clip_weights(
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
        weights: Positive, at least `MIN_SENDERS`.
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
    least = MIN_SPREAD * gram_nn.diagonal().sqrt().median()
    return torch.maximum(spread, least).clamp(min=1e-30) * share_n.clamp(max=1.0).rsqrt()


def length_clipped_weights(
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
    times_n = torch.tensor(max_length_ratios(tokens, own, usual), dtype=torch.float64)
    limit_n = clip * length_n[own] * times_n
    if not length_n[own] > 0 or bool((length_n <= limit_n).all()):  # guard: length-clip
        return list(weights)
    pull_n = (limit_n / length_n).clamp(max=1.0)
    return [weight * pull for weight, pull in zip(weights, pull_n.tolist(), strict=True)]


AGREEMENT = 0.2
"""Least cosine with the others that the median member must have for anybody to be blamed; seen are 0.6 to 0.96."""
ODD = 0.2
"""Share of the median member's cosine below which a delta has nothing to do with the others'; honest ones have half of
it at least. As a negative share: below which a mean is turned round."""
FAR = 6.0
"""Usual distances from the centre at which a delta is no accident."""
MAX_TIMES_OWN = 10.0
"""How many times as long as one's own vector, for as many tokens, its mean may be; second moments, the square of it."""


class Evidence(NamedTuple):
    """Why a member is not trusted.

    Attributes:
        reason: What it did.
        is_proof: No honest software does that.
    """

    reason: str
    is_proof: bool


class Auditor:
    """One member's eyes in a group's all-reduce.

    Args:
        peers: All members.
        tokens: That each one has trained.
        weights: Of each one's contribution.
        me: This member's place among them.
        format: How the group's vector travels; its first segment is the delta, and only that is evidence.
        usual: Tokens that members of the roster usually have trained; 0 if that is not known.
    """

    def __init__(
        self,
        peers: Sequence[str],
        tokens: Sequence[float],
        weights: Sequence[float],
        me: int,
        format: Format,
        usual: float = 0.0,
    ) -> None:
        self._peers, self._tokens, self._weights, self._me, self._format = peers, tokens, weights, me, format
        self._usual = usual
        self._senders = [index for index, weight in enumerate(weights) if weight > 0]
        self._gram_snn = torch.zeros(len(format.segments), len(self._senders), len(self._senders), dtype=torch.float64)
        others = [index for index in range(len(peers)) if index != me]
        self._means = {index: torch.zeros(len(format.segments), 3, dtype=torch.float64) for index in others}
        self._proofs: dict[str, Evidence] = {}

    @property
    def can_tell_outliers(self) -> bool:
        """Whether so many bring something that the odd one can be told from the others."""
        return len(self._senders) >= MIN_SENDERS

    # ------------------------------------------------------------------ as a reducer

    def weigh(self, part: Part, values: Sequence[Tensor | None]) -> list[float]:
        """Return what each sender weighs in the mean of a part, to be divided by the sum of those who sent it.

        Args:
            part: Which.
            values: What they have sent of it; None where that could not be read.
        """
        here = [place for place, value in enumerate(values) if value is not None]
        kept = [0.0] * len(values)
        if not here:
            return kept
        weights = [self._weights[self._senders[place]] for place in here]
        gram_nn = gram([values[place] for place in here])  # type: ignore[misc]
        if len(here) == len(values):
            self._gram_snn[part.segment] += gram_nn
        for place, weight in zip(here, self._robust(part, gram_nn, weights, here), strict=True):
            kept[place] = weight
        return kept

    def _robust(self, part: Part, gram_nn: Tensor, weights: list[float], here: Sequence[int]) -> list[float]:
        power = _power(self._format.segments[part.segment])
        tokens = [self._tokens[self._senders[place]] for place in here]
        if len(here) >= MIN_SENDERS:
            grown = tokens if part.segment == 0 else [1.0] * len(here)
            return centered_clip_weights(gram_nn, weights, grown, CLIP**power)
        own = [number for number, place in enumerate(here) if self._senders[place] == self._me]
        return (
            length_clipped_weights(gram_nn, weights, tokens, own[0], OWN_CLIP**power, self._usual) if own else weights
        )

    # ------------------------------------------------------------------ as a receiver

    def observe_mean(self, reducer: int, message: Sequence[Part], mean_N: Tensor, source: Tensor) -> None:
        """Take note of the mean that a reducer has sent, beside what this member brought.

        Args:
            reducer: Its place.
            message: The mean's parts.
            mean_N: Its values.
            source: This member's whole encoded vector, uint8.
        """
        for part in message if self._weights[self._me] > 0 else ():
            own_N = torch.empty(part.numel)
            part.decode(source[part.byte_start : part.byte_stop], own_N)
            here_N, own_N = mean_N[part.start - message[0].start :][: part.numel].double(), own_N.double()
            self._means[reducer][part.segment] += torch.stack([here_N @ own_N, here_N @ here_N, own_N @ own_N])

    def liars(self) -> dict[str, Evidence]:
        """Return the reducers whose means cannot be what they should."""
        found: dict[str, Evidence] = {}
        if not self._weights[self._me] > 0:
            return found
        cosines: dict[int, float] = {}
        for index, seen in self._means.items():
            for segment, (_, mean, own) in zip(self._format.segments, seen.tolist(), strict=True):
                if own > 0 and math.sqrt(mean / own) > self._longest_mean(segment):  # guard: mean-size
                    times = math.sqrt(mean / own)
                    found[self._peers[index]] = Evidence(f"its mean is {times:.3g} times as long as ours", False)
            inner, mean, own = seen[0].tolist()
            if own > 0:
                cosines[index] = inner / math.sqrt(mean * own) if mean > 0 else 0.0
        if len(cosines) >= MIN_SENDERS - 1:  # guard: mean-direction
            # One's own delta may be small, and mostly noise; that a mean points the other way is no accident.
            for index in odd(list(cosines.values()), -ODD):
                peer = self._peers[list(cosines)[index]]
                found.setdefault(peer, Evidence("its mean points away from our delta", False))
        return found

    def _longest_mean(self, segment: Segment) -> float:
        """Return how many times as long as our part of a segment its mean may be; few tokens make noise of moments."""
        return MAX_TIMES_OWN ** _power(segment) * max(max_length_ratios(self._tokens, self._me, self._usual))

    # ------------------------------------------------------------------ what it comes to

    def record_proof(self, index: int, reason: str) -> None:
        """Take note of what no honest member does."""
        self._proofs[self._peers[index]] = Evidence(reason, True)  # guard: unreadable-proof

    def evidence(self) -> Mapping[str, Evidence]:
        """Return what this member holds against others, by their ids."""
        return (self._suspects() if self.can_tell_outliers else {}) | self.liars() | self._proofs

    def _suspects(self) -> dict[str, Evidence]:
        """Return the senders whose deltas are unlike all others', or whose moments are beyond all measure."""
        found: dict[str, Evidence] = {}
        for segment, gram_nn in list(zip(self._format.segments, self._gram_snn, strict=True))[1:]:
            length_n = gram_nn.diagonal().sqrt()
            most = MAX_TIMES_OWN ** _power(segment) * length_n.median()
            for place in (length_n > most).nonzero().flatten().tolist():  # guard: moments-strike
                found[self._peers[self._senders[place]]] = Evidence("its moments are beyond all measure", False)
        gram_nn = self._gram_snn[0]
        if not bool((gram_nn.diagonal() > 0).any()):
            return {}
        scaled_nn, share_n = per_token(gram_nn, [self._tokens[index] for index in self._senders])
        centre_n = medoid(scaled_nn)
        times = (distances(scaled_nn, centre_n) / room(scaled_nn, centre_n, share_n)).tolist()
        against = odd(_cosines(gram_nn))
        for place, index in enumerate(self._senders):
            if times[place] > FAR:  # guard: far-delta
                found[self._peers[index]] = Evidence(f"its delta is {times[place]:.3g} usual distances off", False)
            elif place in against:  # guard: opposed-delta
                found[self._peers[index]] = Evidence("its delta has nothing to do with the others'", False)
        found.pop(self._peers[self._me], None)
        return found


def _power(segment: Segment) -> int:
    """Return 2 for second moments: what is three times as long in a gradient is nine times as long in its square."""
    return 2 if segment.non_negative else 1


def _cosines(gram_nn: Tensor) -> list[float]:
    """Return each vector's cosine with the sum of the others, all of them taken to be of one length."""
    length_n = gram_nn.diagonal().sqrt()
    unit_nn = gram_nn / torch.outer(length_n, length_n).clamp(min=1e-300)
    own_n, inner_n = unit_nn.diagonal(), unit_nn.sum(dim=1) - unit_nn.diagonal()
    others_n = (unit_nn.sum() - 2 * inner_n - own_n).clamp(min=1e-30).sqrt()
    return (inner_n / others_n).tolist()


def odd(cosines: Sequence[float], share: float = ODD) -> set[int]:
    """Return the places of those below so large a share of the median, while most agree with the others."""
    median = sorted(cosines)[len(cosines) // 2]
    return (
        {place for place, cosine in enumerate(cosines) if cosine < share * median}
        if median > AGREEMENT  # guard: no-agreement
        else set()
    )
