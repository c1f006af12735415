"""How a peer's vectors travel: in which formats, and with what earlier rounds have left over."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
from torch import Tensor

from spes_p2p.codecs import Feedback, Format, Segment, format_of, from_bytes, to_bytes
from spes_p2p.swarm.exchange.versions import CodecKind, vector_names
from spes_p2p.swarm.interface import Contribution
from spes_p2p.swarm.records import MAX_SLOTS
from spes_p2p.swarm.roster import Member, kind_of

log = logging.getLogger(__name__)

PROMPT_SECONDS = 1.0
"""Vectors that took longer to encode are encoded before others are met."""


@dataclass(frozen=True)
class Vectors:
    """The vectors that a run averages and publishes; the same on all of its peers.

    Attributes:
        bundle_numel: Elements of a published vector, by kind: `shared`, `slot`, and of their moments.
        segments: What a group averages and how it travels, for `shared` and for `slot`: the delta, then moments.
        advance: From a name, its bundle and the mean delta, makes the bundle that follows; None has all versions come
            whole.
        keyframe_rounds: Most deltas that lead from one version to another.
        coded: Of published vectors that do not lie and travel in fp32, how they do, by kind.
        num_slots: Experts per layer of the run's model; by default as many as there are names for.
    """

    bundle_numel: Mapping[str, int] = field(default_factory=dict)
    segments: Mapping[str, tuple[Segment, ...]] = field(default_factory=dict)
    advance: Callable[[str, Tensor, Tensor], Tensor] | None = None
    keyframe_rounds: int = 0
    coded: Mapping[str, tuple[Segment, ...]] = field(default_factory=dict)
    num_slots: int = MAX_SLOTS

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the run's vectors."""
        return vector_names(self.num_slots)

    def strange(self, names: Iterable[str]) -> dict[str, str]:
        """Return why nobody may be asked for them, of those names that the run does not have."""
        return {name: "this run has no such version" for name in names if name not in self.names}

    @cached_property
    def formats(self) -> Mapping[str, Format]:
        """How the coded ones are written, by kind."""
        return {kind: Format(segments) for kind, segments in self.coded.items()}

    def codec(self, name: str) -> CodecKind:
        """Return what a published vector's version says that its bytes are."""
        return "coded" if kind_of(name) in self.formats else "fp32"

    def num_bytes(self, name: str) -> int:
        """Return the length of a published vector."""
        kind = kind_of(name)
        return self.formats[kind].num_bytes if kind in self.formats else 4 * self.bundle_numel[kind]

    def encode(self, name: str, flat_N: Tensor) -> memoryview:
        """Return the bytes that are published of a vector."""
        format = self.formats.get(kind_of(name))
        return to_bytes(flat_N if format is None else format.encode(flat_N))

    def decode(self, name: str, data: bytes) -> Tensor:
        """Return the vector that was published so, as a new tensor.

        Raises:
            ExchangeError: wrong length, or a value that is not finite.
        """
        format = self.formats.get(kind_of(name))
        return from_bytes(data, self.bundle_numel[kind_of(name)]) if format is None else format.decode(data)


class DeltaEncoding:
    """Encodes one peer's contributions and decodes the swarm's means; the same for every kind of swarm.

    Error feedback: what rounding takes from a delta is added to the next one of the same group that is committed, so
    that nothing is lost for good, however few the bits.

    Source: Seide et al., 1-bit stochastic gradient descent (Interspeech 2014); Karimireddy et al.,
    https://arxiv.org/abs/1901.09847.

    Args:
        segments: What a vector consists of, for the kinds `shared` and `slot`: the delta, then averaged moments.
    """

    def __init__(self, segments: Mapping[str, Sequence[Segment]]) -> None:
        self._segments = {kind: tuple(parts) for kind, parts in segments.items()}
        self._formats: dict[tuple[Segment, ...], Format] = {}
        self._feedback = Feedback()
        self._pending: dict[str, Tensor | None] = {}
        self._encode_seconds = math.inf

    @property
    def description(self) -> str:
        """Names the formats: peers that disagree about them must not meet."""
        return repr(sorted(self._segments.items()))

    def format(self, name: str, round: int) -> Format:
        """Return how a group's vector travels when this round is committed."""
        return self._cached([part for part in self._segments[kind_of(name)] if round % part.interval == 0])

    def largest(self, name: str) -> Format:
        """Return the format of a group in rounds in which everything travels."""
        return self._cached(self._segments[kind_of(name)])

    def _cached(self, segments: Iterable[Segment]) -> Format:
        key = tuple(segments)
        if key not in self._formats:
            self._formats[key] = format_of(key, 0)
        return self._formats[key]

    def delta_bytes(self, kind: str) -> int:
        """Return the size of an encoded delta; 0 where it travels exactly, and so is as large as what it leads to."""
        delta = self._cached(self._segments[kind][:1])
        return 0 if delta.is_exact else delta.num_bytes

    # ------------------------------------------------------------------ contributions

    def entry(self, contribution: Contribution) -> Member:
        """Return the roster entry that `encode` will return, unless a codec refuses what is finite; takes a glance."""
        for flat_N in contribution.deltas.values():
            if flat_N.numel() and not all(torch.isfinite(extreme) for extreme in flat_N.aminmax()):
                return contribution.member.model_copy(update={"tokens": 0})
        return contribution.member

    def encode(self, contribution: Contribution) -> tuple[Member, dict[str, Tensor]]:
        """Return a contribution's roster entry, and its vectors as uint8.

        A peer whose own vectors hold NaN or infinity enters without weight: its work of the round is lost, nobody
        else's is.
        """
        member, round = contribution.member, contribution.member.round + 1
        for name in set(self._feedback.names) - set(contribution.deltas):
            self._feedback.forget(name)
        encoded: dict[str, Tensor] = {}
        self._pending = {}
        try:
            for name, flat_N in contribution.deltas.items():
                encoded[name], self._pending[name] = self._feedback.encode(name, self.format(name, round), flat_N)
        except ValueError as error:
            log.warning("round %d: throwing away this peer's work, of which it cannot send %s: %s", round, name, error)
            self._pending = {}
            formats = {name: self.format(name, round) for name in contribution.deltas}
            zeros = {name: torch.zeros(format.num_bytes, dtype=torch.uint8) for name, format in formats.items()}
            return member.model_copy(update={"tokens": 0}), zeros
        return member, encoded

    def commit(self, committed: Iterable[str]) -> None:
        """Keep what was left over of the groups that were committed; the others' deltas go nowhere, with their rest."""
        for name in committed:
            error = self._pending.get(name)
            if error is not None:
                self._feedback.keep(name, error)
        self._pending = {}

    def residuals(self) -> dict[str, Tensor]:
        """Return what is left over, by group, to outlive this process."""
        return self._feedback.kept()

    def restore_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Go on with what an earlier process had left over of the same anchors."""
        for name, error_N in residuals.items():
            self._feedback.keep(name, error_N.clone())

    def forget(self) -> None:
        """Give up what was left over, because the anchors have been replaced."""
        self._pending = {}
        for name in list(self._feedback.names):
            self._feedback.forget(name)

    def encoder(self, contribution: Contribution) -> Callable[[], tuple[Member, Mapping[str, Tensor]]]:
        """Return what encodes a contribution, once: when it is called if that is quick, or else now.

        While a peer encodes, those who have met it wait for its first byte, and not for long.
        """

        @cache
        def encode() -> tuple[Member, Mapping[str, Tensor]]:
            began = time.monotonic()
            encoded = self.encode(contribution)
            self._encode_seconds = time.monotonic() - began
            return encoded

        if self._encode_seconds > PROMPT_SECONDS:
            encode()
        return encode

    # ------------------------------------------------------------------ means

    def decode(self, name: str, round: int, data: Tensor) -> Tensor:
        """Return a mean's values.

        Raises:
            ExchangeError: one is not finite.
        """
        return self.format(name, round).decode(data)

    def delta_of(self, name: str, data: Tensor) -> bytes:
        """Return the delta's bytes of an encoded mean; none where it travels exactly."""
        return data[: self.delta_bytes(kind_of(name))].numpy().tobytes()

    def decode_delta(self, name: str, delta: bytes) -> Tensor:
        """Return the values of an encoded mean delta.

        Raises:
            ExchangeError: wrong length, or a value that is not finite.
        """
        return self._cached(self._segments[kind_of(name)][:1]).decode(delta)
