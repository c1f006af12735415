"""The committed parameters that a round starts from, and the arithmetic that steps them; callers decide when."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from spes_p2p.codecs.format import Segment, codec_named
from spes_p2p.codecs.kept import KeptForm
from spes_p2p.codecs.paged import PagedVector
from spes_p2p.codecs.vectors import Layout
from spes_p2p.config import MergeConfig, RunConfig
from spes_p2p.optim.outer import merge_alpha, merge_experts, outer_optimizer
from spes_p2p.swarm.averaging.encoding import Vectors
from spes_p2p.swarm.names import SHARED, VectorName


class Anchors:
    """Anchors of `shared` and of the held slots, fp32, with their outer momentum.

    A *bundle* is what is published of an anchor: its weights, followed by its momentum if its outer optimizer has any,
    in one flat vector. A peer that fetches it steps on exactly as its holders do. An anchor lies where its bundle does,
    which is a peer's disk: little of it is in memory at a time.

    Args:
        numels: Elements of the `shared` and of a `slot` vector.
    """

    def __init__(self, run: RunConfig, numels: Mapping[str, int]) -> None:
        self._outer = outer_optimizer(run.outer)
        self._moments = {kind: run.averaged_moments(kind) for kind in numels}
        self._run = run
        self._codecs = run.codecs
        self._numels = dict(numels)
        self.form = KeptForm(run.kept_form, numels["slot"]) if run.kept_form is not None else None
        """The form in which other peers keep a slot; None if they keep its fp32 version."""
        self._weights: dict[VectorName, PagedVector] = {}
        self._momenta: dict[VectorName, PagedVector] = {}

    @property
    def names(self) -> tuple[VectorName, ...]:
        """Names of the anchors."""
        return tuple(self._weights)

    # ------------------------------------------------------------------ sizes

    def bundle_numel(self) -> dict[str, int]:
        """Return the elements of bundles, by kind."""
        return {kind: (2 if self._outer.has_state else 1) * numel for kind, numel in self._numels.items()}

    def segments(self) -> dict[str, tuple[Segment, ...]]:
        """Return the segments of a contribution, by kind: the delta, then each averaged moment."""
        codecs, interval = self._codecs, self._codecs.moments_interval
        return {
            kind: (
                Segment(numel, codec := self._codec(kind), dense_rounds=codecs.dense_rounds_of(codec)),
                *(
                    Segment(numel, codecs.moments, non_negative=moment == "exp_avg_sq", interval=interval)
                    for moment in self._moments[kind]
                ),
            )
            for kind, numel in self._numels.items()
        }

    def _codec(self, name: str) -> str:
        return self._codecs.shared if name == SHARED else self._codecs.slots

    def vectors(self) -> Vectors:
        """Return what a swarm must know of the run's vectors."""
        initial = {str(name): digest for name, digest in start_digests(self._run).items()}
        return Vectors(self.bundle_numel(), self.segments(), self._run.num_slots, initial, self.form)

    def averages_moments(self, round: int) -> bool:
        """Tell whether the averaging that commits `round` carries moments."""
        return any(self._moments.values()) and round % self._codecs.moments_interval == 0

    # ------------------------------------------------------------------ bundles

    def set(self, name: VectorName, bundle: PagedVector) -> None:
        """Take a published bundle, which nothing changes any more, as the anchor."""
        name, numel = VectorName(name), self._numels[name.kind]
        self._weights[name] = bundle.part(0, numel)
        if self._outer.has_state:
            self._momenta[name] = bundle.part(numel, 2 * numel)

    def bundle(self, weights: Tensor) -> Tensor:
        """Return weights as a bundle whose outer momentum is zero."""
        return torch.cat([weights, torch.zeros_like(weights)]) if self._outer.has_state else weights

    def kept_name(self, name: VectorName) -> VectorName:
        """Return the name under which other peers store these weights: a slot's kept form, if the run has such."""
        return name if self.form is None or name.slot is None else name.kept

    def kept_form(self, name: VectorName, bundle: Tensor) -> Tensor:
        """Return what is stored under that name of a bundle: its kept form, uint8, or the bundle itself."""
        if self.form is None or name.slot is None:
            return bundle
        return self.form.encode(self.weights_of(name, bundle))

    def weights_of(self, name: VectorName, data: Tensor) -> Tensor:
        """Return the fp32 weights of a bundle, a view, or of a kept form."""
        return self.form.values(data) if self.form is not None and name.is_kept else data[: self._numels[name.kind]]

    def from_kept(self, name: VectorName, data: Tensor) -> Tensor:
        """Return the bundle that goes on from a slot's kept form: rounded weights, and no momentum."""
        return self.bundle(self.weights_of(name, data))

    def weights(self, name: VectorName) -> Tensor:
        """Return the anchor's weights; do not change them."""
        return self._weights[name].whole()

    def forget(self, name: VectorName) -> None:
        """Drop the anchor of a released slot."""
        self._weights.pop(name, None)
        self._momenta.pop(name, None)

    # ------------------------------------------------------------------ steps

    def contribution(self, name: VectorName, local: Tensor, moments: Tensor | None, round: int) -> Tensor:
        """Return what this peer brings to a group: anchor minus local (DiLoCo's pseudo-gradient), then its moments.

        Args:
            local: Its parameters now; the delta takes their memory.
            moments: Its moments; None counts as zeros if moments are averaged.
            round: The round to be committed; moments travel in some rounds only.
        """
        self.less(name, local, local)
        if not self.averages_moments(round):
            return local
        if moments is None:
            moments = local.new_zeros(len(self._moments[name.kind]) * local.numel())
        return torch.cat([local, moments])

    def less(self, name: VectorName, other: Tensor, out: Tensor) -> Tensor:
        """Return the anchor minus another vector, in `out`, which may be that vector."""
        for here, anchor in self._weights[name].pieces():
            torch.sub(anchor, other[here], out=out[here])
        return out

    def stepped(self, name: VectorName, mean: Tensor, shift: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return a member's next bundle, from a mean contribution and a merge's shift, and the mean moments, if any.

        The anchor stays as it is; `set` takes the bundle.

        Args:
            mean: The mean delta, and moments where they are averaged. A rounded one's memory is this peer's own, and
                the bundle may take it; an exact one lies where it is sent from.
        """
        numel, momentum = self._numels[name.kind], self._momenta.get(name)
        has_state = self._outer.has_state
        is_own = codec_named(self._codec(name)).max_error > 0
        bundle = mean[:numel] if is_own and not has_state else mean.new_empty((1 + has_state) * numel)
        momenta = (piece for _, piece in momentum.pieces()) if momentum is not None else itertools.repeat(None)
        for (here, anchor), before in zip(self._weights[name].pieces(), momenta, strict=False):
            weights, after = self._outer.step(anchor, mean[:numel][here], before)
            bundle[:numel][here] = weights if shift is None else weights + shift[here]
            if after is not None:
                bundle[numel:][here] = after
        moments = mean[numel:]
        return bundle, moments.clone() if moments.numel() else None  # a mean's memory is used again


def merge_shifts(
    merge: MergeConfig, round: int, layout: Layout, all_slots: Mapping[int, Tensor], held: tuple[int, ...]
) -> dict[VectorName, Tensor]:
    """Return how far SPES's merge warm-up moves each held slot in this round.

    The merge uses the anchors that the round started from: all holders of a slot share them, and so move the slot by
    the same bits. SPES's server merges the round's results, of which a peer here has only its own in time; to first
    order in alpha the two agree.

    Source: SPES (https://arxiv.org/abs/2602.11543), expert merging.

    Args:
        round: The round being committed.
        all_slots: Flat weights of every slot at the round's start.
    """
    if not (alpha := merge_alpha(merge, round)):
        return {}
    rows = {slot: row for row, slot in enumerate(sorted(all_slots))}
    tensors = [layout.unflatten(all_slots[slot]) for slot in rows]
    shifts = {slot: torch.zeros(layout.numel) for slot in held}
    views = {slot: layout.unflatten(flat) for slot, flat in shifts.items()}
    for gate_up in (name for name in layout.shapes if name.endswith("gate_up_proj")):
        down = gate_up.replace("gate_up_proj", "down_proj")
        before = [torch.stack([slot[name] for slot in tensors]) for name in (gate_up, down)]
        after = merge_experts(before[0], before[1], alpha, merge.top_k)
        for slot in held:
            for name, old_EOI, new_EOI in zip((gate_up, down), before, after, strict=True):
                views[slot][name].copy_(new_EOI[rows[slot]] - old_EOI[rows[slot]])
    return {VectorName.of_slot(slot): flat for slot, flat in shifts.items()}


def start_digests(run: RunConfig) -> dict[VectorName, str]:
    """Return the digest of each vector's version of round 0, if the run starts from files; nothing if from its seed.

    With adapters, the checkpoint is the base, which is no vector; the adapters' start counts.
    """
    start = run.model.start if run.adapter is None else run.adapter.start
    if start is None:
        return {}
    digests = {SHARED: start.shared} | {VectorName.of_slot(slot): each for slot, each in enumerate(start.slots)}
    forms = run.model.start.kept if run.kept_form is not None and run.model.start is not None else ()
    return digests | {VectorName.of_slot(slot).kept: each for slot, each in enumerate(forms)}
