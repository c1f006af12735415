"""The arithmetic of a group's weighted mean: who reduces what, in which order, to which bytes.

Every member reduces a slice: it takes the others' encoded parts of it, adds them up in the order of the roster,
encodes the mean, and sends those bytes to everybody, itself included. So all members end with the same bytes, whatever
the codec, and whatever arrived when.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spes_p2p.codecs import Format, Part, encode_with_error, joined
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.averaging.audit import Auditor, capped_tokens
from spes_p2p.swarm.roster import Member, credits, uplinks, usual_tokens

MESSAGE_BYTES = 2**17
"""Parts travel together up to this size; hivemind's streams cost twice the CPU beyond 256 KiB (facts: wan 4)."""
Message = tuple[Part, ...]


def weighted_mean(parts: Sequence[Tensor], weights: Sequence[float], total: float | None = None) -> Tensor:
    """Return sum(w_i x_i) / sum(w_i), added up in the order given.

    The one definition of a mean in the swarm: both implementations of the seam use it, so their digests agree.

    Args:
        parts: Tensors of one shape, fp32.
        weights: Non-negative, not all zero.
        total: Divides by this instead.
    """
    mean = torch.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        if weight > 0:
            mean.add_(part, alpha=weight)
    return mean.div_(sum(weights) if total is None else total)


def reduced_shares(uplinks: Sequence[float]) -> list[float]:
    """Return the share of a vector that each of n members reduces, so that all uplinks end at the same time.

    Who reduces the share f of a vector of size S sends `S (1 - f)` as a member and `S f (n - 1)` as a reducer. The
    shares level `(1 + f (n - 2)) / u`; a member too slow for that reduces nothing. Facts: wan 2.

    Args:
        uplinks: Each member's u, in any unit; 0 of those who reduce nothing, which not all may be.
    """
    n = len(uplinks)
    if n <= 2:
        able = [float(uplink > 0 or not any(uplinks)) for uplink in uplinks]
        return [share / sum(able) for share in able]
    active = sorted(range(n), key=lambda i: (-uplinks[i], i))
    while True:
        # Sum of f over the active is 1: sum(T u - 1) = n - 2, with T in units of S.
        level = (n - 2 + len(active)) / sum(uplinks[i] for i in active)
        if level * uplinks[active[-1]] >= 1:
            break
        active.pop()
    return [(level * uplinks[i] - 1) / (n - 2) if i in set(active) else 0.0 for i in range(n)]


def slices(format: Format, shares: Sequence[float]) -> list[list[Message]]:
    """Return what each member reduces: its parts of the vector, in the messages that carry them.

    Everybody has its share of every segment, the delta's first, so that all who reduce see what others bring of it.
    """
    given: list[list[Message]] = [[] for _ in shares]
    for number in range(len(format.segments)):
        parts = [part for part in format.parts if part.segment == number]
        ends = [round(end * len(parts)) for end in itertools.accumulate(shares)]
        ends[-1] = len(parts)
        for messages, (start, end) in zip(
            given, itertools.pairwise([0, *itertools.accumulate(ends, max)]), strict=True
        ):
            messages += _messages(parts[start:end])
    return given


def _messages(parts: Sequence[Part]) -> list[Message]:
    messages: list[Message] = []
    batch: list[Part] = []
    room = MESSAGE_BYTES
    for part in parts:
        if batch and part.num_bytes > room:
            messages.append(joined(batch))
            batch, room = [], MESSAGE_BYTES
        batch.append(part)
        room -= part.num_bytes
    return [*messages, joined(batch)] if batch else messages


def reduce_message(
    format: Format,
    message: Message,
    decoded: Sequence[Tensor | None],
    weights: Sequence[float],
    error: Tensor | None,
    auditor: Auditor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the encoded mean of a message's parts, and what encoding them has left over.

    Args:
        format: The vector's.
        message: Consecutive parts.
        decoded: Each sender's values of these parts, one behind the other; of those with a weight. None counts as if
            its sender had none.
        weights: Of the same senders.
        error: What was left over of these parts' deltas before; None where the codec is exact.
        auditor: Says what each part may weigh; without one, all of them weigh what they should.

    Raises:
        ValueError: the mean is not finite, or nobody sent anything.
    """
    mean_N, start = _mean(message, decoded, weights, auditor), message[0].start
    if error is None:
        return encode_message(format, message, mean_N), None
    encoded: list[Tensor] = []
    left: list[Tensor] = []
    for part in message:
        here = slice(part.start - start, part.stop - start)
        if here.stop <= error.numel():
            data, rest = encode_with_error(part, mean_N[here], error[here])
            left.append(rest)
        else:
            data = format.encode_part(part, mean_N[here])
        encoded.append(data)
    return torch.cat(encoded), torch.cat(left)


def _mean(
    message: Message, decoded: Sequence[Tensor | None], weights: Sequence[float], auditor: Auditor | None
) -> Tensor:
    start, means = message[0].start, []
    total = sum(weight for weight, values in zip(weights, decoded, strict=True) if values is not None)
    if not total:
        raise ValueError("nobody sent a value of it")
    for part in message:
        pieces = [None if v is None else v[part.start - start : part.stop - start] for v in decoded]
        kept = weights if auditor is None else auditor.weigh(part, pieces)
        sent = [(piece, weight) for piece, weight in zip(pieces, kept, strict=True) if piece is not None]
        means.append(weighted_mean([piece for piece, _ in sent], [weight for _, weight in sent], total))
    return torch.cat(means)


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
    if data.numel() != stop - start:  # guard: part-size
        raise ExchangeError(f"a message of {data.numel()} bytes, expected {stop - start}")
    pieces = [format.decode_part(part, data[part.byte_start - start : part.byte_stop - start]) for part in message]
    return torch.cat(pieces)


@dataclass(frozen=True)
class GroupPlan:
    """Who reduces what in a group; derived from the roster, the same on all members.

    Attributes:
        peers: Members, ascending.
        tokens: That each member has trained, within reason; 0 only receives.
        weights: Of each member's contribution: its tokens by its credit.
        format: How the vector travels.
        slices: Messages that each member reduces.
        called: Members that everybody can call, and so ask for a digest.
        delta_numel: Elements of the vector's delta, whose rounding is fed back; 0 if the format is exact.
        usual_tokens: That members of the roster usually have trained; 0 if that is not known.
    """

    peers: tuple[str, ...]
    tokens: tuple[float, ...]
    weights: tuple[float, ...]
    format: Format
    slices: list[list[Message]]
    called: frozenset[str]
    delta_numel: int
    usual_tokens: float = 0.0

    @classmethod
    def of(
        cls,
        peers: Sequence[str],
        tokens: Sequence[float],
        uplinks: Sequence[float],
        format: Format,
        credits: Sequence[float] | None = None,
        usual: float = 0.0,
    ) -> GroupPlan:
        """Return the plan of a group whose members, ascending, have these tokens, uplinks and, if not 1, credits."""
        numel = 0 if format.is_exact else format.segments[0].numel
        called = frozenset(peer for peer, uplink in zip(peers, uplinks, strict=True) if uplink)
        fair = tuple(
            capped_tokens(tokens)  # guard: fair-weights
        )
        weights = tuple(count * credit for count, credit in zip(fair, credits or [1.0] * len(fair), strict=True))
        return cls(tuple(peers), fair, weights, format, slices(format, reduced_shares(uplinks)), called, numel, usual)

    @classmethod
    def in_roster(cls, roster: Sequence[Member], peers: Sequence[str], format: Format) -> GroupPlan:
        """Return the plan of the group of these members of a roster, ascending.

        What their tokens are worth the whole roster says: most slots have too few holders to tell who claims too many.
        """
        credit, speeds = credits(roster), uplinks(roster)
        fair = capped_tokens([float(member.tokens) for member in roster])  # guard: slot-weights
        tokens = dict(zip([member.peer_id for member in roster], fair, strict=True))
        return cls.of(
            peers,
            [tokens[peer] for peer in peers],
            [speeds[peer] for peer in peers],
            format,
            [credit[peer] for peer in peers],
            usual_tokens(roster),
        )

    def auditor(self, peer: str) -> Auditor:
        """Return a member's eyes."""
        place = self.peers.index(peer)
        return Auditor(self.peers, self.tokens, self.weights, place, self.format, self.usual_tokens)

    def span(self, peer: str) -> tuple[int, int]:
        """Return the elements of the delta that a member reduces and encodes anew; none where it is alone."""
        mine = [message for message in self.slices[self.peers.index(peer)] if message[0].segment == 0]
        if not mine or len(self.peers) == 1 or not self.delta_numel:
            return 0, 0
        return mine[0][0].start, mine[-1][-1].stop
