"""Arithmetic of a group's weighted mean: which member reduces which slice, in which order, to which bytes.

Each member reduces a slice: it takes the encoded parts that the others send, adds them up in the order of the roster,
encodes the mean, and sends those bytes to all members, itself included. Therefore all members end with the same bytes,
with any codec and any order of arrival.
"""

from __future__ import annotations

import hashlib
import itertools
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spes_p2p.codecs.format import Format, Part, encode_with_error, join_parts
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.roster import MAX_TIMES_MEDIAN, Roster

MESSAGE_BYTES = 2**17
"""Parts travel together up to this size; hivemind's streams cost twice the CPU beyond 256 KiB."""
MESSAGE_NUMEL = 2**19
"""Elements of a message at most: a reducer has those of all senders in memory."""
LANES, STREAMS = 4, 12
"""Largest number of streams from one member to one reducer, and about the number of streams from one member in all.
A stream begins with a narrow window, which widens by round trips: one or two streams leave a fast link idle for most of
a slice, and many cost processor time."""
ALL_REDUCE = 2
"""Attempts in which all members reduce that can."""
MAX_RESIDUAL = 4.0
"""Longest that the residual of a sparse mean may be, in lengths of the mean: more is what liars sent."""
MIN_SENDERS = 5
"""Senders below which an outlier cannot be told from the others."""
Message = tuple[Part, ...]
Weigh = Callable[[Part, Sequence[Tensor | None]], Sequence[float]]
"""Returns each sender's weight in the mean of a part, from their values; None where these are unreadable."""


def capped_tokens(tokens: Sequence[float]) -> list[float]:
    """Return the tokens that members count with: at most `MAX_TIMES_MEDIAN` times the median if enough trained.

    Tokens are a member's own claim. A fast machine among laptops is capped too; that is the price.
    """
    trained = [count for count in tokens if count > 0]
    if len(trained) < MIN_SENDERS:
        return list(tokens)
    most = MAX_TIMES_MEDIAN * statistics.median(trained)
    return [min(count, most) for count in tokens]  # guard: first


def weighted_mean(parts: Sequence[Tensor], weights: Sequence[float], total: float | None = None) -> Tensor:
    """Return sum(w_i x_i) / sum(w_i), added up in the order given.

    The swarm's only definition of a mean.

    Args:
        parts: Tensors of one shape, fp32.
        weights: Non-negative, not all zero.
        total: Divisor; the sum of the weights by default.
    """
    mean = torch.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        if weight > 0:
            mean.add_(part, alpha=weight)
    return mean.div_(sum(weights) if total is None else total)


def reduced_shares(uplinks: Sequence[float]) -> list[float]:
    """Return the share of a vector that each of n members reduces, so that all uplinks finish at the same time.

    A member that reduces the share f of a vector of size S sends `S (1 - f)` as a member and `S f (n - 1)` as a
    reducer. The shares level `(1 + f (n - 2)) / u`; a member that is too slow for that reduces nothing.

    Args:
        uplinks: Each member's u, in any unit; 0 for members that reduce nothing, which must not be all.
    """
    n = len(uplinks)
    if n <= 2:
        able = [float(uplink > 0 or not any(uplinks)) for uplink in uplinks]
        return [share / sum(able) for share in able]
    active = sorted(range(n), key=lambda i: (-uplinks[i], i))
    while True:
        # The shares of the active members sum to 1: sum(T u - 1) = n - 2, with T in units of S.
        level = (n - 2 + len(active)) / sum(uplinks[i] for i in active)
        if level * uplinks[active[-1]] >= 1:
            break
        active.pop()
    return [(level * uplinks[i] - 1) / (n - 2) if i in set(active) else 0.0 for i in range(n)]


def drawn_uplinks(peers: Sequence[str], uplinks: Sequence[float], attempt: int) -> list[float]:
    """Return the uplinks of the members that reduce in an attempt: from the third on of about half, others each time.

    A reducer that sends members different means is never named, and would make every attempt fail.
    """
    if attempt < ALL_REDUCE:
        return list(uplinks)
    drawn = [
        uplink if hashlib.sha256(f"{attempt} {peer}".encode()).digest()[0] % 2 else 0.0
        for peer, uplink in zip(peers, uplinks, strict=True)
    ]
    return drawn if any(drawn) else list(uplinks)  # guard: never


def slices(format: Format, shares: Sequence[float]) -> list[list[Message]]:
    """Return the parts of the vector that each member reduces, in the messages that carry them.

    Each member gets its share of every segment, the delta's first, so that every reducer can audit the deltas.
    """
    given: list[list[Message]] = [[] for _ in shares]
    for number in range(len(format.segments)):
        parts = [part for part in format.parts if part.segment == number]
        ends = [round(end * len(parts)) for end in itertools.accumulate(shares)]
        ends[-1] = len(parts)
        edges = itertools.pairwise([0, *itertools.accumulate(ends, max)])
        for messages, (start, end) in zip(given, edges, strict=True):
            messages += _messages(parts[start:end])
    return given


def _messages(parts: Sequence[Part]) -> list[Message]:
    messages: list[Message] = []
    batch: list[Part] = []
    for part in parts:
        first = batch[0] if batch else part
        is_full = part.byte_stop - first.byte_start > MESSAGE_BYTES or part.stop - first.start > MESSAGE_NUMEL
        if batch and is_full:
            messages.append(join_parts(batch))
            batch = []
        batch.append(part)
    return [*messages, join_parts(batch)] if batch else messages


def bytes_of(message: Message) -> slice:
    """Return the place of a message's parts in the encoded vector."""
    return slice(message[0].byte_start, message[-1].byte_stop)


def reduce_message(
    plan: GroupPlan,
    message: Message,
    decoded: Sequence[Tensor | None],
    residual: Tensor,
    weigh: Weigh | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the encoded mean of a message's parts, and their new residual.

    Args:
        message: Consecutive parts.
        decoded: Values of these parts, concatenated, from each of the plan's senders; None where they are unreadable,
            which counts as if their sender had no weight.
        residual: Rounding error of these parts of the delta so far, fp32; empty where the codec is exact.
        weigh: Returns lower weights for outliers; by default all senders have the plan's.

    Raises:
        ValueError: the mean is not finite, or there are no values.
    """
    weights = [plan.weights[sender] for sender in plan.senders]
    total = sum(weight for weight, values in zip(weights, decoded, strict=True) if values is not None)
    if not total:
        raise ValueError("no member sent a readable value of it")
    encoded: list[Tensor] = []
    residuals: list[Tensor] = []
    for part in message:
        here = slice(part.start - message[0].start, part.stop - message[0].start)
        pieces = [None if values is None else values[here] for values in decoded]
        kept = weights if weigh is None else weigh(part, pieces)
        sent = [(piece, weight) for piece, weight in zip(pieces, kept, strict=True) if piece is not None]
        mean_N = weighted_mean([piece for piece, _ in sent], [weight for _, weight in sent], total)
        if here.stop <= residual.numel():
            data, new_residual = encode_with_error(part, mean_N, residual[here])
            if part.codec.is_sparse:
                longest = MAX_RESIDUAL * float(mean_N.norm())
                new_residual *= min(1.0, longest / max(float(new_residual.norm()), 1e-30))
            residuals.append(new_residual)
        else:
            data = plan.format.encode_part(part, mean_N)
        encoded.append(data)
    return torch.cat(encoded), torch.cat(residuals) if residuals else residual


def encode_message(format: Format, message: Message, flat_N: Tensor) -> Tensor:
    """Return the bytes of consecutive parts, uint8."""
    start = message[0].start
    return torch.cat([format.encode_part(part, flat_N[part.start - start : part.stop - start]) for part in message])


def decode_message(format: Format, message: Message, data: Tensor) -> Tensor:
    """Return the values of consecutive parts.

    Raises:
        ExchangeError: wrong length, or a value that is not finite.
    """
    start, stop = message[0].byte_start, message[-1].byte_stop
    if data.numel() != stop - start:  # guard: never
        raise ExchangeError(f"a message of {data.numel()} bytes, expected {stop - start}")
    pieces = [format.decode_part(part, data[part.byte_start - start : part.byte_stop - start]) for part in message]
    return torch.cat(pieces)


@dataclass(frozen=True)
class GroupPlan:
    """Partition of a group's vector among its reducers; derived from the roster, the same on all members.

    Attributes:
        peers: Members, ascending, replicas among them.
        tokens: Tokens that each member has trained, capped; a member with 0 only receives.
        weights: Weight of each member's contribution.
        slices: Messages that each member reduces.
        delta_numel: Elements of the vector's delta, which has a residual; 0 if the format is exact.
        usual_tokens: Tokens that members of the roster usually train; 0 if unknown.
        replicas: Members without weight, which get the means after the others.
        guests: Members that may not vote.
    """

    peers: tuple[str, ...]
    tokens: tuple[float, ...]
    weights: tuple[float, ...]
    format: Format
    slices: list[list[Message]]
    delta_numel: int
    usual_tokens: float
    replicas: frozenset[str]
    guests: frozenset[str]

    @classmethod
    def in_roster(
        cls, roster: Roster, peers: Sequence[str], format: Format, replicas: Collection[str] = (), attempt: int = 0
    ) -> GroupPlan:
        """Return the plan of the group of these members of a roster, ascending, and of its replicas.

        Tokens are capped within the whole roster: most slots have too few holders to tell which of them overstates.
        The attempt at the round, from 0, decides who reduces (`drawn_uplinks`).
        """
        stated = capped_tokens([float(member.tokens) for member in roster])  # guard: first
        tokens = dict(zip([member.peer_id for member in roster], stated, strict=True))
        tokens |= dict.fromkeys(replicas, 0.0)  # guard: skip
        peers = sorted((*peers, *replicas))
        capped = capped_tokens([tokens[peer] for peer in peers])  # guard: first
        uplinks = drawn_uplinks(peers, roster.reducing(peers, replicas), attempt)
        return cls(
            peers=tuple(peers),
            tokens=tuple(capped),
            weights=tuple(min(count, roster.weights[peer]) for peer, count in zip(peers, capped, strict=True)),
            format=format,
            slices=slices(format, reduced_shares(uplinks)),
            delta_numel=0 if format.is_exact else format.segments[0].numel,
            usual_tokens=roster.usual_tokens,
            replicas=frozenset(replicas),
            guests=roster.guests,
        )

    @property
    def is_sole(self) -> bool:
        """Whether one member holds the vector, so that what it sends is the mean."""
        return len(self.peers) - len(self.replicas) == 1

    @cached_property
    def senders(self) -> tuple[int, ...]:
        """Places of the members whose contributions have a weight."""
        return tuple(place for place, weight in enumerate(self.weights) if weight > 0)

    def residual_span(self, message: Message) -> slice:
        """Return the elements of a message that belong to the delta's residual; an empty slice if none do."""
        return slice(*(min(edge, self.delta_numel) for edge in (message[0].start, message[-1].stop)))

    def span(self, peer: str) -> tuple[int, int]:
        """Return the elements of the delta that a member reduces and so rounds; none where it is alone."""
        mine = [message for message in self.slices[self.peers.index(peer)] if message[0].segment == 0]
        if not mine or self.is_sole or not self.delta_numel:
            return 0, 0
        return mine[0][0].start, mine[-1][-1].stop


def num_lanes(plan: GroupPlan, reducer: int) -> int:
    """Return the number of streams over which each other member sends a reducer its parts."""
    most = 1 if plan.is_sole else LANES  # a peer may replicate many slots
    return min(most, -(-STREAMS // (len(plan.peers) - 1)), len(plan.slices[reducer]))
