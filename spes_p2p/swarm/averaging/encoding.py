"""Sizes of the vectors that peers publish; encoding of those that they average, and the residuals of rounding."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from spes_p2p.codecs.format import ErrorFeedback, Format, Segment, codec_named
from spes_p2p.codecs.kept import KeptForm
from spes_p2p.codecs.paged import PagedVector
from spes_p2p.codecs.vectors import from_bytes
from spes_p2p.swarm.names import SHARED, AnyName, VectorName
from spes_p2p.swarm.records import MAX_SLOTS
from spes_p2p.swarm.roster import Member

log = logging.getLogger(__name__)

KEPT_SLOT = "kept-slot"
"""Kind of the kept forms."""


@dataclass(frozen=True)
class Contribution:
    """What a peer brings to a round.

    Attributes:
        deltas: Flat fp32 vectors of `shared` and of each of the member's slots: the delta, followed by the optimizer
            moments if the run averages them.
    """

    member: Member
    deltas: Mapping[VectorName, Tensor]


@dataclass(frozen=True)
class Vectors:
    """The vectors that a run averages and publishes; the same on all of its peers.

    Attributes:
        bundle_numel: Elements of a published fp32 vector, for the kinds `shared` and `slot`.
        segments: Contents and codecs of an averaged vector, for the kinds `shared` and `slot`: the delta, then moments.
        num_slots: Experts per layer of the run's model; by default as many as there are names for.
        initial: Digests of the versions of round 0 by name, if the run starts from a checkpoint.
        kept: The form in which slots travel to peers that do not train them; None if these take fp32 versions.
    """

    bundle_numel: Mapping[str, int] = field(default_factory=dict)
    segments: Mapping[str, tuple[Segment, ...]] = field(default_factory=dict)
    num_slots: int = MAX_SLOTS
    initial: Mapping[str, str] = field(default_factory=dict)
    kept: KeptForm | None = None

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the run's vectors; a version of another name fits no part of the model."""
        slots = [VectorName.of_slot(slot) for slot in range(self.num_slots)]
        return frozenset([SHARED, *slots, *(name.kept for name in slots if self.kept is not None)])

    def unknown(self, names: Iterable[AnyName]) -> dict[AnyName, str]:
        """Return those of the names that the run does not have, each with the reason for not pulling it."""
        return {name: "this run has no such version" for name in names if name not in self.names}

    @cached_property
    def formats(self) -> Mapping[str, KeptForm]:
        """Formats of the coded kinds."""
        return {} if self.kept is None else {KEPT_SLOT: self.kept}

    def num_bytes(self, name: str) -> int:
        """Return the length of a published vector."""
        kind = VectorName(name).kind
        return self.formats[kind].num_bytes if kind in self.formats else 4 * self.bundle_numel[kind]

    def decode(self, name: str, data: bytes) -> Tensor:
        """Return the values of a published vector, or the bytes of a kept form, as a new tensor.

        Raises:
            ExchangeError: wrong length, or a value that is not finite.
        """
        kind = VectorName(name).kind
        format = self.formats.get(kind)
        return from_bytes(data, self.bundle_numel[kind]) if format is None else format.decode(data)


class DeltaEncoding:
    """Encodes one peer's contributions and decodes the swarm's means.

    The residual of a committed delta is added to the next delta of the same group (`ErrorFeedback`). With a sparse
    codec the residual is most of the delta, so the peer *keeps* it in its own weights, where the next delta finds it.

    Args:
        segments: Contents and codecs of a vector, for the kinds `shared` and `slot`: the delta, then averaged moments.
        folder: Where large residuals lie; None keeps them in memory.
    """

    def __init__(self, segments: Mapping[str, Sequence[Segment]], folder: Path | None = None) -> None:
        self._segments = {kind: tuple(parts) for kind, parts in segments.items()}
        self._formats: dict[tuple[Segment, ...], Format] = {}
        self.feedback = ErrorFeedback(folder)
        """The residuals of committed deltas, by group."""
        self._pending: dict[str, PagedVector | None] = {}
        self._sent: dict[VectorName, tuple[Format, Tensor]] = {}

    def keeps(self, name: str) -> bool:
        """Check whether peers keep the residuals of a group's deltas in their weights."""
        return codec_named(self._segments[VectorName(name).kind][0].codec).is_sparse

    def format(self, name: str, round: int) -> Format:
        """Return the format of a group's vector in the round that commits it."""
        parts = self._segments[VectorName(name).kind]
        segments = tuple(part.at(round) for part in parts if round % part.interval == 0)
        if segments not in self._formats:
            self._formats[segments] = Format(segments)
        return self._formats[segments]

    def encode(self, contribution: Contribution) -> tuple[Member, dict[VectorName, Tensor]]:
        """Return a contribution's roster entry, and its vectors as uint8; one of them is in fp32 at a time.

        A peer whose own vectors hold NaN or infinity enters without weight: it loses its own work of the round, and
        the others lose nothing.
        """
        member, round = contribution.member, contribution.member.round + 1
        self._drop(name for name in self.feedback.names - set(contribution.deltas) if not self.keeps(name))
        encoded: dict[VectorName, Tensor] = {}
        self._pending = {}
        formats = {VectorName(name): self.format(name, round) for name in contribution.deltas}
        try:
            for name, format in formats.items():
                encoded[name], self._pending[name] = self.feedback.encode(
                    name, format, contribution.deltas[name], has_residual=self.keeps(name)
                )
        except ValueError as error:
            words = "round %d: dropping this peer's work, because %s cannot be encoded: %s (docs/trouble.md#loss)"
            log.warning(words, round, name, error)
            self._pending = {}
            zeros = {name: torch.zeros(format.num_bytes, dtype=torch.uint8) for name, format in formats.items()}
            return member.model_copy(update={"tokens": 0}), zeros
        self._sent = {name: (format, encoded[name]) for name, format in formats.items()}
        if not member.tokens:
            self._pending = {}  # nothing of it counts, so the residual is still to be sent
        return member, encoded

    def commit(self, committed: Collection[str], unchanged: Collection[str] = ()) -> None:
        """Keep the residuals of the committed groups; those of the others are dropped together with their deltas.

        Args:
            unchanged: Groups whose vectors the round's certificate leaves as they were: of a kept delta nothing counts
                as sent.
        """
        for name, residual in self._pending.items():
            is_unsent = name in unchanged and self.keeps(name)
            if residual is None or not (is_unsent or name in committed):
                continue
            if is_unsent:
                format, data = self._sent[VectorName(name)]
                sent_N = format.decode(data)
                for here, piece in residual.pieces():
                    piece += sent_N[here]
            self.feedback.keep(name, residual)
        self._pending, self._sent = {}, {}

    def forget(self) -> None:
        """Discard the deltas of a round that the peer did not commit, and residuals that are not kept in weights."""
        self._pending, self._sent = {}, {}
        self._drop(name for name in self.feedback.names if not self.keeps(name))

    def hold(self, names: Collection[str]) -> None:
        """Drop the kept residuals of slots that this peer does not train any more, or only from now on."""
        self._drop(name for name in self.feedback.names - set(names) if self.keeps(name))

    def kept(self) -> dict[str, PagedVector]:
        """Return the residuals that the weights of this peer have from its own anchors."""
        return {name: residual for name, residual in self.feedback.residuals().items() if self.keeps(name)}

    def restore(self, residuals: Mapping[str, Tensor], *, has_same_anchors: bool) -> None:
        """Go on with the residuals of an earlier process; only kept ones fit other anchors."""
        self.feedback.restore({n: each for n, each in residuals.items() if has_same_anchors or self.keeps(n)})

    def _drop(self, names: Iterable[str]) -> None:
        for name in [*names]:
            self.feedback.drop(name)

    def decode(self, name: str, round: int, data: Tensor) -> Tensor:
        """Return the values of a mean, in the memory of its bytes if the format is exact.

        Raises:
            ExchangeError: a value is not finite.
        """
        format = self.format(name, round)
        return format.decode(data, data.view(torch.float32) if format.is_exact else None)
