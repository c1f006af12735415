"""Audit of a group's all-reduce by one member: robust weights for its means, and evidence against other members.

Shape legend: n vectors, one of each member; s segments; N elements.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spes_p2p.codecs.format import Part, Segment
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.averaging.partition import MIN_SENDERS, GroupPlan, Message, decode_message
from spes_p2p.swarm.roster import MAX_TIMES_MEDIAN

CLIP = 3.0
"""Median distances from the centre beyond which a vector is pulled in."""
CLIP_NOISE = 1e-6
"""Share of a weight that rounding may cost; what loses more was clipped."""
OWN_CLIP = 4.0
"""In smaller groups: how many times as long as the reducer's own vector another may be."""
STEPS = 3
MIN_SPREAD = 1e-3
"""Share of the median length below which distances are rounding errors."""
MIN_AGREEMENT = 0.2
"""Cosine with the sum of the others that the median member must reach; below it no member is blamed."""
OUTLIER_SHARE = 0.2
"""Share of the median member's cosine below which a delta is unrelated to the others'. Means below minus this share
point the other way."""
SPARSE_AGREEMENT, SPARSE_SHARE = 0.4, 0.0
"""Both of sparse deltas: what a peer brings after a pause is honest, and unrelated to the others'."""
FAR = 6.0
"""Typical distances from the centre beyond which a delta is evidence."""
MAX_TIMES_OWN = 10.0
"""How many times as long as one's own vector a mean may be, for equal tokens; squared for second moments."""


def max_length_ratios(tokens: Sequence[float], own: int, usual: float = 0.0) -> list[float]:
    """Return how many times as long as ours each member's delta may be, given the tokens that it claims.

    A small group cannot contradict a claim, so claims count up to `MAX_TIMES_MEDIAN` times our own tokens, which we
    know, or the roster's usual tokens: otherwise a member that has just joined would clip all others.

    Args:
        tokens: Tokens of all members; ours are positive.
        usual: Tokens that members of the roster usually train; 0 if unknown.
    """
    most = MAX_TIMES_MEDIAN * max(tokens[own], usual)
    return [max(min(count, most) / tokens[own], 1.0) for count in tokens]  # guard: min(count, most) -> count


def gram(parts: Sequence[Tensor]) -> Tensor:
    """Return the inner products of vectors, float64 [n, n]."""
    parts_nN = torch.stack(list(parts)).double()
    return parts_nN @ parts_nN.T


def per_token(gram_nn: Tensor, tokens: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the Gram matrix of deltas scaled to the median's tokens, and each member's share of those, [n].

    Within a round a delta grows about in proportion to its tokens.
    """
    share_n = torch.tensor(tokens, dtype=torch.float64) / statistics.median(tokens)
    return gram_nn / torch.outer(share_n, share_n), share_n


def centered_clip_weights(
    gram_nn: Tensor, weights: Sequence[float], tokens: Sequence[float], clip: float = CLIP
) -> list[float]:
    """Return the weights of a robust mean, to be divided by the sum of `weights`; `weights` if there is no outlier.

    CenteredClip: from a centre v, the next is the weighted mean of `v + (x_i - v) min(1, tau / |x_i - v|)`. Here v
    starts at the member with the least median distance to the others, and tau is a multiple of the median distance
    from v, so that it needs neither history nor a setting. Vectors of few tokens may lie further away, because the
    noise of fewer steps is larger.

    Source: Karimireddy et al., Learning from History for Byzantine Robust Optimization
    (https://arxiv.org/abs/2012.10333), eq. (CC); per partition as in Gorbunov et al., https://arxiv.org/abs/2106.11257.

    Args:
        weights: Positive, at least `MIN_SENDERS`.
        tokens: Tokens that the vectors have grown with; equal for vectors that do not grow with them, as moments, and
            sparse deltas, which are mostly of earlier rounds.
        clip: Median distances from the centre that are not clipped.
    """
    scaled_nn, share_n = per_token(gram_nn, tokens)
    weight_n = torch.tensor(weights, dtype=torch.float64)
    pull_n, centre_n = torch.ones_like(weight_n), medoid(scaled_nn)
    for _ in range(STEPS):
        ratio_n = distances(scaled_nn, centre_n) / typical_distances(scaled_nn, centre_n, share_n)
        pull_n = (clip / ratio_n).clamp(max=1.0)
        part_n = weight_n / weight_n.sum() * pull_n
        centre_n = centre_n * (1 - part_n.sum()) + part_n
    if bool((pull_n == 1.0).all()):  # guard: always
        return list(weights)
    # Each delta, pulled towards the centre and scaled back to its tokens, as weights of the deltas.
    kept_n = weight_n * pull_n + (weight_n * share_n * (1 - pull_n)).sum() * centre_n / share_n
    return kept_n.tolist()


def medoid(gram_nn: Tensor) -> Tensor:
    """Return the vector with the least median distance to the others, as weights [n]."""
    square_n = gram_nn.diagonal()
    apart_nn = (square_n[:, None] + square_n[None, :] - 2 * gram_nn).clamp(min=0).sqrt()
    best = apart_nn.median(dim=1).values.argmin()  # guard: argmin -> argmax
    return torch.nn.functional.one_hot(best, len(gram_nn)).double()


def distances(gram_nn: Tensor, centre_n: Tensor) -> Tensor:
    """Return each vector's distance from a weighted sum of them, [n]."""
    inner_n = gram_nn @ centre_n
    return (gram_nn.diagonal() - 2 * inner_n + centre_n @ inner_n).clamp(min=0).sqrt()


def typical_distances(gram_nn: Tensor, centre_n: Tensor, share_n: Tensor) -> Tensor:
    """Return the distance from a centre that is typical for each vector's tokens, [n]."""
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
    """Return weights that clip each vector to a multiple of the reducer's own length; `weights` if none is longer.

    For groups without a majority: there a reducer knows only its own vector to be honest. To be divided by the sum of
    `weights`.

    Args:
        weights: Aggregation weights of the members, positive.
        own: The reducer's place.
        clip: Multiple of its length for equal tokens; `max_length_ratios` extends it for more tokens.
        usual: Tokens that members of the roster usually train.
    """
    length_n = gram_nn.diagonal().sqrt()
    ratio_n = torch.tensor(max_length_ratios(tokens, own, usual), dtype=torch.float64)
    limit_n = clip * length_n[own] * ratio_n
    if not length_n[own] > 0 or bool((length_n <= limit_n).all()):  # guard: always
        return list(weights)
    pull_n = (limit_n / length_n).clamp(max=1.0)
    return [weight * pull for weight, pull in zip(weights, pull_n.tolist(), strict=True)]


def vouched_weights(
    gram_nn: Tensor, weights: Sequence[float], tokens: Sequence[float], guests: Sequence[bool]
) -> list[float]:
    """Return weights that leave out guests whose vectors point away from the voters', or are far too short.

    For groups without a majority, where the voters are all that one knows. The others get the weight of those left out.

    Args:
        weights: Aggregation weights of the members, positive.
        tokens: Tokens that the vectors have grown with; equal for vectors that do not grow, as moments.
        guests: Whether each member may not vote.
    """
    weight_n, is_guest_n = torch.tensor(weights, dtype=torch.float64), torch.tensor(guests)
    speed_n = gram_nn.diagonal().sqrt() / torch.tensor(tokens, dtype=torch.float64)
    if is_guest_n.all() or not is_guest_n.any():
        return list(weights)
    is_opposed_n = gram_nn @ (weight_n * ~is_guest_n) < 0
    is_short_n = OWN_CLIP * speed_n < speed_n[~is_guest_n].min()
    kept_n = weight_n * ~(is_guest_n & (is_opposed_n | is_short_n))  # guard: kept_n = weight_n * 1
    return (kept_n * (weight_n.sum() / kept_n.sum())).tolist()


class Evidence(NamedTuple):
    """Reason to distrust a member.

    Attributes:
        reason: What it did.
        is_proof: Honest software never does it.
    """

    reason: str
    is_proof: bool


class Auditor:
    """One member's audit of a group's all-reduce; members go by their places in the plan.

    Attributes:
        clipped: Parts that this reducer has clipped, by sender's id.
    """

    def __init__(self, plan: GroupPlan, me: str) -> None:
        self._plan = plan
        self._me = plan.peers.index(me)
        num_segments, num_senders = len(plan.format.segments), len(plan.senders)
        self._gram_snn = torch.zeros(num_segments, num_senders, num_senders, dtype=torch.float64)
        others = [index for index in range(len(plan.peers)) if index != self._me]
        self._is_sparse = any(part.codec.is_sparse for part in plan.format.parts)
        self._share, self._least_agreement = OUTLIER_SHARE, MIN_AGREEMENT
        if self._is_sparse:
            self._share, self._least_agreement = SPARSE_SHARE, SPARSE_AGREEMENT
        self._means = {index: torch.zeros(num_segments, 3, dtype=torch.float64) for index in others}
        self._proofs: dict[str, Evidence] = {}
        self.clipped = Counter[str]()

    @property
    def can_tell_outliers(self) -> bool:
        """Whether enough members send to tell an outlier from the others."""
        return len(self._plan.senders) >= MIN_SENDERS

    # ------------------------------------------------------------------ as a reducer

    def decode(self, sender: int, message: Message, data: Tensor) -> Tensor | None:
        """Return a sender's values of a message; None if they are unreadable, but there are enough other senders.

        Raises:
            ExchangeError: they are unreadable, and too few others send.
        """
        try:
            return decode_message(self._plan.format, message, data)
        except ExchangeError as error:
            self.record_proof(sender, f"sent what is no delta: {error}")
            if not self.can_tell_outliers:  # guard: always
                raise
            return None

    def weigh(self, part: Part, values: Sequence[Tensor | None]) -> list[float]:
        """Return each sender's weight in the mean of a part, to be divided by the sum of the senders' weights.

        Args:
            values: Each sender's values of it; None where they are unreadable.
        """
        here = [place for place, value in enumerate(values) if value is not None]
        kept = [0.0] * len(values)
        if not here:
            return kept
        weights = [self._plan.weights[self._plan.senders[place]] for place in here]
        gram_nn = gram([values[place] for place in here])  # type: ignore[misc]
        if len(here) == len(values):
            self._gram_snn[part.segment] += gram_nn
        for place, weight in zip(here, self._robust(part, gram_nn, weights, here), strict=True):
            kept[place] = weight
        for place, weight in zip(here, weights, strict=True):
            if kept[place] < (1 - CLIP_NOISE) * weight:
                self.clipped[self._plan.peers[self._plan.senders[place]]] += 1
        return kept

    def _robust(self, part: Part, gram_nn: Tensor, weights: list[float], here: Sequence[int]) -> list[float]:
        plan, power = self._plan, _power(self._plan.format.segments[part.segment])
        tokens = [plan.tokens[plan.senders[place]] for place in here]
        grows = part.segment == 0 and not self._is_sparse
        if len(here) >= MIN_SENDERS:
            return centered_clip_weights(gram_nn, weights, tokens if grows else [1.0] * len(here), CLIP**power)
        own = [number for number, place in enumerate(here) if plan.senders[place] == self._me]
        guests = [plan.peers[plan.senders[place]] in plan.guests for place in here]
        weights = vouched_weights(gram_nn, weights, weights if grows else [1.0] * len(here), guests)
        if not own:
            return weights
        return length_clipped_weights(gram_nn, weights, tokens, own[0], OWN_CLIP**power, plan.usual_tokens)

    # ------------------------------------------------------------------ as a receiver

    def observe_mean(self, reducer: int, message: Sequence[Part], mean_N: Tensor, source: Tensor) -> None:
        """Compare the mean that a reducer has sent with what this member sent.

        Args:
            message: The mean's parts.
            mean_N: The mean's values.
            source: This member's whole encoded vector, uint8.
        """
        for part in message if self._me in self._plan.senders else ():
            own_N = torch.empty(part.numel)
            part.decode(source[part.byte_start : part.byte_stop], own_N)
            here_N, own_N = mean_N[part.start - message[0].start :][: part.numel].double(), own_N.double()
            self._means[reducer][part.segment] += torch.stack([here_N @ own_N, here_N @ here_N, own_N @ own_N])

    def liars(self) -> dict[str, Evidence]:
        """Return the reducers whose means cannot be right."""
        found: dict[str, Evidence] = {}
        if self._me not in self._plan.senders:
            return found
        cosines: dict[int, float] = {}
        ratio = max(max_length_ratios(self._plan.tokens, self._me, self._plan.usual_tokens))
        for index, seen in self._means.items():
            for segment, (_, mean, own) in zip(self._plan.format.segments, seen.tolist(), strict=True):
                times = math.sqrt(mean / own) if own > 0 else 0.0
                if times > MAX_TIMES_OWN ** _power(segment) * ratio:  # guard: never
                    found[self._plan.peers[index]] = Evidence(f"its mean is {times:.3g} times as long as ours", False)
            inner, mean, own = seen[0].tolist()
            if own > 0:
                cosines[index] = inner / math.sqrt(mean * own) if mean > 0 else 0.0
        if len(cosines) >= MIN_SENDERS - 1:  # guard: never
            # Our own delta may be small, and mostly noise; a mean that points the other way is no accident.
            for index in outliers(list(cosines.values()), -OUTLIER_SHARE, self._least_agreement):
                peer = self._plan.peers[list(cosines)[index]]
                found.setdefault(peer, Evidence("its mean points away from our delta", False))
        return found

    # ------------------------------------------------------------------ evidence

    def record_proof(self, index: int, reason: str) -> None:
        """Record what an honest member never does."""
        self._proofs[self._plan.peers[index]] = Evidence(reason, True)  # guard: skip

    def evidence(self) -> Mapping[str, Evidence]:
        """Return this member's evidence against others, by peer."""
        return (self._suspects() if self.can_tell_outliers else {}) | self.liars() | self._proofs

    def _suspects(self) -> dict[str, Evidence]:
        """Return the senders whose deltas are unrelated to all others', or whose moments are far too large."""
        found: dict[str, Evidence] = {}
        peers, senders = self._plan.peers, self._plan.senders
        for segment, gram_nn in list(zip(self._plan.format.segments, self._gram_snn, strict=True))[1:]:
            length_n = gram_nn.diagonal().sqrt()
            most = MAX_TIMES_OWN ** _power(segment) * length_n.median()
            for place in (length_n > most).nonzero().flatten().tolist():  # guard: never
                found[peers[senders[place]]] = Evidence("its moments are beyond all measure", False)
        gram_nn = self._gram_snn[0]
        if not bool((gram_nn.diagonal() > 0).any()):
            return {}
        tokens = [1.0 if self._is_sparse else self._plan.tokens[index] for index in senders]
        scaled_nn, share_n = per_token(gram_nn, tokens)
        centre_n = medoid(scaled_nn)
        times = (distances(scaled_nn, centre_n) / typical_distances(scaled_nn, centre_n, share_n)).tolist()
        against = outliers(_cosines(gram_nn), self._share, self._least_agreement)
        for place, index in enumerate(senders):
            if times[place] > FAR:  # guard: never
                found[peers[index]] = Evidence(f"its delta is {times[place]:.3g} usual distances off", False)
            elif place in against:  # guard: never
                found[peers[index]] = Evidence("its delta has nothing to do with the others'", False)
        found.pop(peers[self._me], None)
        return found


def _power(segment: Segment) -> int:
    """Return 2 for second moments: a gradient three times as long has a square nine times as long."""
    return 2 if segment.non_negative else 1


def _cosines(gram_nn: Tensor) -> list[float]:
    """Return each vector's cosine with the sum of the others, all of them scaled to one length."""
    length_n = gram_nn.diagonal().sqrt()
    unit_nn = gram_nn / torch.outer(length_n, length_n).clamp(min=1e-300)
    own_n, inner_n = unit_nn.diagonal(), unit_nn.sum(dim=1) - unit_nn.diagonal()
    others_n = (unit_nn.sum() - 2 * inner_n - own_n).clamp(min=1e-30).sqrt()
    return (inner_n / others_n).tolist()


def outliers(
    cosines: Sequence[float], share: float = OUTLIER_SHARE, least_agreement: float = MIN_AGREEMENT
) -> set[int]:
    """Return the places of cosines below this share of the median; none if the median member disagrees too."""
    median = sorted(cosines)[len(cosines) // 2]
    return (
        {place for place, cosine in enumerate(cosines) if cosine < share * median}
        if median > least_agreement  # guard: always
        else set()
    )
