"""The committed parameters that a round starts from, and the one place where they change."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spes_p2p.codecs import Layout, Segment, digest
from spes_p2p.config import MergeConfig, RunConfig
from spes_p2p.optim.outer import OuterOptimizer, merge_alpha, merge_experts
from spes_p2p.swarm.averaging.encoding import Vectors
from spes_p2p.swarm.roster import SHARED, kind_of, slot_name


class Anchors:
    """Anchors of `shared` and of the held slots, fp32 on the CPU, with their outer momentum.

    A *bundle* is what is published of one: its weights, followed by its momentum if its outer optimizer has any, in
    one flat vector, so that whoever pulls it steps on exactly as its holders do.

    Args:
        run: How averaged deltas move an anchor, which moments are averaged with them, and how all of it travels.
        numels: Elements of the `shared` and of a `slot` vector.
    """

    def __init__(self, run: RunConfig, numels: Mapping[str, int]) -> None:
        self._outers = {SHARED: OuterOptimizer(run.outer), "slot": OuterOptimizer(run.outer.of_slots)}
        self._moments, self._kept, self._codecs = run.averaged_moments, run.kept_moments, run.codecs
        self._numels, self._num_slots = dict(numels), run.model.num_experts
        self._weights: dict[str, Tensor] = {}
        self._momenta: dict[str, Tensor] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names that have an anchor here."""
        return tuple(self._weights)

    # ------------------------------------------------------------------ sizes

    def bundle_numel(self) -> dict[str, int]:
        """Return the elements of what is published, by kind: bundles, and moments where the run keeps any."""
        bundles = {kind: (2 if self._outers[kind].has_state else 1) * numel for kind, numel in self._numels.items()}
        moments = {f"moments-{kind}": len(self._kept) * numel for kind, numel in self._numels.items()}
        return bundles | (moments if self._kept else {})

    def segments(self) -> dict[str, tuple[Segment, ...]]:
        """Return what a contribution is made of, by kind: the delta, then each averaged moment."""
        deltas = {SHARED: self._codecs.shared, "slot": self._codecs.slots}
        return {
            kind: (Segment(numel, deltas[kind]), *(self._moment_segment(numel, moment) for moment in self._moments))
            for kind, numel in self._numels.items()
        }

    def _moment_segment(self, numel: int, moment: str) -> Segment:
        return Segment(
            numel,
            self._codecs.moments,
            non_negative=moment == "exp_avg_sq",
            interval=self._codecs.moments_interval,
        )

    def coded(self) -> dict[str, tuple[Segment, ...]]:
        """Return how moments are published, by kind, where that is in fewer bits than fp32's."""
        if self._codecs.moments == "fp32" or not self._kept:
            return {}
        return {
            f"moments-{kind}": tuple(self._moment_segment(numel, moment) for moment in self._kept)
            for kind, numel in self._numels.items()
        }

    def vectors(self) -> Vectors:
        """Return what a swarm must know of the run's vectors."""
        keyframes = self._codecs.keyframe_rounds
        return Vectors(
            self.bundle_numel(), self.segments(), self.advance, keyframes, self.coded(), num_slots=self._num_slots
        )

    def averages_moments(self, round: int) -> bool:
        """Tell whether moments travel in the averaging that commits `round`."""
        return bool(self._moments) and round % self._codecs.moments_interval == 0

    def publishes_moments(self, round: int) -> bool:
        """Tell whether holders publish moments with the versions of `round`."""
        return bool(self._kept) and round % self._codecs.moments_interval == 0

    # ------------------------------------------------------------------ bundles

    def set(self, name: str, bundle: Tensor) -> None:
        """Take a published bundle as the anchor."""
        weights, momentum = self.split(name, bundle)
        self._weights[name] = weights.clone()
        if momentum is not None:
            self._momenta[name] = momentum.clone()

    def split(self, name: str, bundle: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return a bundle's weights and momentum, as views."""
        numel = self._numels[kind_of(name)]
        return bundle[:numel], bundle[numel:] if self._outers[kind_of(name)].has_state else None

    def bundle(self, name: str) -> Tensor:
        """Return the bundle to publish, as a new vector."""
        return _join(self._weights[name], self._momenta.get(name))

    def weights(self, name: str) -> Tensor:
        """Return the anchor's weights; do not change them."""
        return self._weights[name]

    def digest(self, name: str) -> str:
        """Return the first half of the bundle's digest, as rosters carry it."""
        return digest(self.bundle(name))[:16]

    def forget(self, name: str) -> None:
        """Drop the anchor of a slot that is no longer held."""
        self._weights.pop(name, None)
        self._momenta.pop(name, None)

    # ------------------------------------------------------------------ steps

    def contribution(self, name: str, local: Tensor, moments: Tensor | None, round: int) -> Tensor:
        """Return what this peer brings to a group: anchor minus local (DiLoCo's pseudo-gradient), then its moments.

        Args:
            name: The group.
            local: Its parameters now.
            moments: Its moments; None counts as zeros, where any are averaged.
            round: To be committed; in many a round moments stay at home.
        """
        delta = self._weights[name] - local
        if not self.averages_moments(round):
            return delta
        if moments is None:
            moments = delta.new_zeros(len(self._moments) * delta.numel())
        return torch.cat([delta, moments])

    def commit(self, name: str, mean: Tensor, shift: Tensor | None = None) -> Tensor | None:
        """Step the anchor by a mean contribution, and by a merge's shift; return the mean moments if it has any."""
        numel = self._numels[kind_of(name)]
        mean_delta, moments = mean[:numel], mean[numel:]
        weights, momentum = self._step(name, self._weights[name], self._momenta.get(name), mean_delta)
        self._weights[name] = weights if shift is None else weights + shift
        if momentum is not None:
            self._momenta[name] = momentum
        return moments if moments.numel() else None

    def advance(self, name: str, bundle: Tensor, mean_delta: Tensor) -> Tensor:
        """Return the bundle that a mean delta makes of the one before: the bits that the holders of it publish.

        Whoever does not hold `name` follows its holders so, from what they average; not over a merge's shift.

        Args:
            name: Whose bundle.
            bundle: The version that the holders started the round from; stays as it is.
            mean_delta: What they committed, as it was decoded.
        """
        return _join(*self._step(name, *self.split(name, bundle), mean_delta))

    def _step(
        self, name: str, weights: Tensor, momentum: Tensor | None, mean_delta: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return self._outers[kind_of(name)].step(weights, mean_delta, momentum)


def _join(weights: Tensor, momentum: Tensor | None) -> Tensor:
    return weights.clone() if momentum is None else torch.cat([weights, momentum])


def merge_shifts(
    merge: MergeConfig, round: int, layout: Layout, all_slots: Mapping[int, Tensor], held: tuple[int, ...]
) -> dict[str, Tensor]:
    """Return how far SPES's merge warm-up moves each held slot in this round.

    It looks at the anchors that the round started from, which all holders of a slot share, rather than at the
    round's results, of which a peer sees only its own in time: so all holders move a slot by the same bits. SPES's
    server merges the results themselves; to first order in alpha the two agree.

    Args:
        merge: The run's merge settings.
        round: The round being committed; nothing moves unless it is a multiple of the interval.
        layout: Layout of one slot.
        all_slots: Flat weights of every slot at the round's start.
        held: Slots to move.
    """
    alpha = merge_alpha(merge, round)
    if not alpha or round % merge.interval_rounds:
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
    return {slot_name(slot): flat for slot, flat in shifts.items()}


def initial_bundles(
    anchors: Anchors, layouts: Mapping[str, Layout], state_dict: Mapping[str, Tensor], num_slots: int
) -> dict[str, Tensor]:
    """Return the bundles of `shared` and every slot at the run's start, the same on every peer.

    Args:
        anchors: Anchors of the run's sizes.
        layouts: Layouts of `shared` and of a `slot`.
        state_dict: The freshly initialised stock model's; experts fused as `[E, ...]`.
        num_slots: Experts E per layer.
    """
    flats = {SHARED: layouts[SHARED].flatten({name: state_dict[name] for name in layouts[SHARED].shapes})}
    for slot in range(num_slots):
        tensors = {name: state_dict[name][slot] for name in layouts["slot"].shapes}
        flats[slot_name(slot)] = layouts["slot"].flatten(tensors)
    sizes = anchors.bundle_numel()
    return {n: torch.cat([flat, flat.new_zeros(sizes[kind_of(n)] - flat.numel())]) for n, flat in flats.items()}
