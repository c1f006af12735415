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

from spes_p2p.codecs import Format, Part, encode_with_error
from spes_p2p.errors import ExchangeError

MESSAGE_BYTES = 2**17
"""Parts travel together up to this size; hivemind's streams cost twice the CPU beyond 256 KiB (facts: wan 4)."""
Message = tuple[Part, ...]


def weighted_mean(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return sum(w_i x_i) / sum(w_i), added up in the order given.

    The one definition of a mean in the swarm: both implementations of the seam use it, so their digests agree.

    Args:
        parts: Tensors of one shape, fp32.
        weights: Non-negative, not all zero.
    """
    total = torch.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        if weight > 0:
            total.add_(part, alpha=weight)
    return total.div_(sum(weights))


def reduced_shares(uplinks: Sequence[float]) -> list[float]:
    """Return the share of a vector that each of n members reduces, so that all uplinks end at the same time.

    Who reduces the share f of a vector of size S sends `S (1 - f)` as a member and `S f (n - 1)` as a reducer. The
    shares level `(1 + f (n - 2)) / u`; a member too slow for that reduces nothing. Facts: wan 2.

    Args:
        uplinks: Each member's u, in any unit.
    """
    n = len(uplinks)
    if n <= 2:
        return [1 / n] * n
    active = sorted(range(n), key=lambda i: (-uplinks[i], i))
    while True:
        # Sum of f over the active is 1: sum(T u - 1) = n - 2, with T in units of S.
        level = (n - 2 + len(active)) / sum(uplinks[i] for i in active)
        if level * uplinks[active[-1]] >= 1:
            break
        active.pop()
    return [(level * uplinks[i] - 1) / (n - 2) if i in set(active) else 0.0 for i in range(n)]


def slices(format: Format, shares: Sequence[float]) -> list[list[Message]]:
    """Return what each member reduces: its parts of the vector, in the messages that carry them."""
    sizes = [part.byte_stop - part.byte_start for part in format.parts]
    ends = [round(end * len(sizes)) for end in itertools.accumulate(shares)]
    ends[-1] = len(sizes)
    return [
        _messages(format.parts[start:end], sizes[start:end])
        for start, end in itertools.pairwise([0, *itertools.accumulate(ends, max)])
    ]


def _messages(parts: Sequence[Part], sizes: Sequence[int]) -> list[Message]:
    messages: list[Message] = []
    batch: list[Part] = []
    room = MESSAGE_BYTES
    for part, size in zip(parts, sizes, strict=True):
        if batch and size > room:
            messages.append(tuple(batch))
            batch, room = [], MESSAGE_BYTES
        batch.append(part)
        room -= size
    return [*messages, tuple(batch)] if batch else messages


def reduce_message(
    format: Format, message: Message, decoded: Sequence[Tensor], weights: Sequence[float], error: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the encoded mean of a message's parts, and what encoding them has left over.

    Args:
        format: The vector's.
        message: Consecutive parts.
        decoded: Each sender's values of these parts, one behind the other; of those with a weight.
        weights: Of the same senders.
        error: What was left over of these parts' deltas before; None where the codec is exact.

    Raises:
        ValueError: the mean is not finite.
    """
    mean_N, start = weighted_mean(decoded, weights), message[0].start
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
    if data.numel() != stop - start:
        raise ExchangeError(f"a message of {data.numel()} bytes, expected {stop - start}")
    pieces = [format.decode_part(part, data[part.byte_start - start : part.byte_stop - start]) for part in message]
    return torch.cat(pieces)


@dataclass(frozen=True)
class GroupPlan:
    """Who reduces what in a group; derived from the roster, the same on all members.

    Attributes:
        peers: Members, ascending.
        weights: Of each member's contribution; 0 only receives.
        format: How the vector travels.
        slices: Messages that each member reduces.
        delta_numel: Elements of the vector's delta, whose rounding is fed back; 0 if the format is exact.
    """

    peers: tuple[str, ...]
    weights: tuple[float, ...]
    format: Format
    slices: list[list[Message]]
    delta_numel: int

    @classmethod
    def of(cls, peers: Sequence[str], weights: Sequence[float], uplinks: Sequence[float], format: Format) -> GroupPlan:
        """Return the plan of a group whose members, ascending, have these weights and uplinks."""
        numel = 0 if format.is_exact else format.segments[0].numel
        return cls(tuple(peers), tuple(weights), format, slices(format, reduced_shares(uplinks)), numel)

    def span(self, peer: str) -> tuple[int, int]:
        """Return the elements of the delta that a member reduces and encodes anew; none where it is alone."""
        mine = self.slices[self.peers.index(peer)]
        if not mine or len(self.peers) == 1:
            return 0, 0
        start, stop = mine[0][0].start, mine[-1][-1].stop
        return min(start, self.delta_numel), min(stop, self.delta_numel)
