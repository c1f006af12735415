"""What a peer needs of memory, by part.

Legend: S shared parameters, P parameters of one slot, E experts, C claimed slots, N = S + C P trained parameters,
M = (E - C) P frozen parameters, L layers, b bytes of a frozen parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.codecs import INT8_BLOCK
from spes_p2p.config import EIGHT_BIT, OptimizerName, Storage
from spes_p2p.planner.encoded import FP32, element_bytes, is_exact
from spes_p2p.planner.setup import Setup
from spes_p2p.planner.size import ModelSize

FROZEN_BYTES: dict[Storage, float] = {"fp32": 4, "bf16": 2, "int8": 1 + 4 / INT8_BLOCK, "nf4": 0.5 + 4 / 64}
"""Per frozen parameter; int8 and nf4 with an fp32 scale to every block, nf4's of 64."""
MOMENTS: dict[OptimizerName, int] = {"adamw": 2, "adamw8bit": 2, "lion8bit": 1, "lamb": 2, "muon": 2}
"""Kept of a parameter; Muon keeps one of the matrices, and AdamW's two of the rest."""
EIGHT_BIT_BYTES = 1 + 4 / 256
"""Bytes of an 8-bit moment, with an fp32 scale to every block of 256."""


@dataclass(frozen=True)
class PeerMemory:
    """Bytes by part; the first seven of each rank, the others of the leader's dealings with the swarm, on the host.

    Attributes:
        shared_weights: 4 S.
        slot_weights: 4 C P.
        gradients: 4 N; not held at a round's end.
        optimizer: 8 N for AdamW.
        frozen: b M.
        activations: See `Activations.num_bytes`; of training only.
        gathered: What a rank has of others' for a moment; see `gathered_bytes`.
        vectors: Flat vectors held between rounds; see `vector_bytes`.
        round_vectors: Flat vectors at a round's end, at their peak.
        opening: Models and flat vectors while the peer enters the swarm.
        overlaps: A round is averaged while the next one trains, so that its vectors come on top.
        num_ranks: Ranks that need the above.
        on_gpu: The ranks' part lies on GPUs.
    """

    shared_weights: int
    slot_weights: int
    gradients: int
    optimizer: int
    frozen: int
    activations: int
    gathered: int
    vectors: int
    round_vectors: int
    opening: int
    overlaps: bool
    num_ranks: int
    on_gpu: bool

    @property
    def static_bytes(self) -> int:
        """What one rank holds between two steps: weights, gradients, optimizer state, frozen experts."""
        return self.shared_weights + self.slot_weights + self.gradients + self.optimizer + self.frozen

    @property
    def rank_bytes(self) -> int:
        """What one rank holds while it trains."""
        return self.static_bytes + self.activations + self.gathered

    @property
    def training_bytes(self) -> int:
        """All ranks and the leader's vectors, while they train."""
        return self.num_ranks * self.rank_bytes + (self.round_vectors if self.overlaps else self.vectors)

    @property
    def round_bytes(self) -> int:
        """The same at a round's end: gradients and activations are gone, and there are more vectors."""
        return self.num_ranks * (self.static_bytes - self.gradients + self.gathered) + self.round_vectors

    @property
    def host_bytes(self) -> int:
        """The machine's memory at its fullest."""
        if self.on_gpu:
            return max(self.round_vectors, self.opening)
        return max(self.training_bytes, self.round_bytes, self.opening)

    @property
    def device_bytes(self) -> int:
        """What the memory that is trained in must hold: one GPU's, or the machine's."""
        return self.rank_bytes if self.on_gpu else self.host_bytes


def peer_memory(size: ModelSize, claimed: int, setup: Setup) -> PeerMemory:
    """Returns what a peer needs that trains `claimed` slots.

    Not in it: Python and its libraries (half a GB to a peer of one rank), and data.

    Args:
        size: From `model_size`.
        claimed: C, in [0, E].
        setup: How it trains.
    """
    assert 0 <= claimed <= size.num_slots, f"{claimed} of {size.num_slots} slots"
    shares = setup.num_ranks if setup.shard == "fsdp" else 1
    trained = size.trained_params(claimed)
    held, peak = vector_bytes(size, claimed, setup)
    return PeerMemory(
        shared_weights=FP32 * size.shared_params // shares,
        slot_weights=FP32 * claimed * size.slot_params // shares,
        gradients=setup.gradient_bytes * trained // shares,
        optimizer=optimizer_bytes(size, claimed, setup.optimizer) // shares,
        frozen=round(FROZEN_BYTES[setup.storage] * size.frozen_params(claimed)),
        activations=setup.activations.num_bytes if setup.activations else 0,
        gathered=gathered_bytes(size, claimed, setup),
        vectors=held,
        round_vectors=peak,
        opening=opening_bytes(size, claimed, setup),
        overlaps=setup.overlaps,
        num_ranks=setup.num_ranks,
        on_gpu=setup.on_gpu,
    )


def optimizer_bytes(size: ModelSize, claimed: int, optimizer: OptimizerName) -> int:
    """Returns the bytes of an inner optimizer's state for everything that is trained.

    8 per parameter for AdamW and LAMB; for their 8-bit kind 2 + 8/256 where a tensor has 4096 elements, else 8; for
    Lion in 8 bits half of that; for Muon 4 in matrices of attention, routers and experts, else AdamW's 8.
    """
    trained = size.trained_params(claimed)
    if optimizer == "muon":
        return FP32 * (2 * trained - size.matrix_params - claimed * size.slot_params)
    if optimizer not in EIGHT_BIT:
        return FP32 * MOMENTS[optimizer] * trained
    small = size.small_shared_params + claimed * size.small_slot_params
    return round(MOMENTS[optimizer] * (FP32 * small + EIGHT_BIT_BYTES * (trained - small)))


def gathered_bytes(size: ModelSize, claimed: int, setup: Setup) -> int:
    """Returns what each of several ranks needs for what they exchange.

    DDP's buckets take 4 N. FSDP gathers the embedding and the head for a whole step, weights and gradients, and of the
    layers one after the other, with the next one's weights; and it keeps gradients whole where a step has several
    forward passes. That is an estimate.
    """
    trained = size.trained_params(claimed)
    if setup.num_ranks == 1:
        return 0
    if setup.shard == "ddp":
        return FP32 * trained
    layer = (size.matrix_params + claimed * size.slot_params) // size.num_layers
    gradients = trained if setup.accumulates else 0
    return FP32 * (2 * (size.shared_params - size.matrix_params) + 3 * layer + gradients)


def vector_bytes(size: ModelSize, claimed: int, setup: Setup) -> tuple[int, int]:
    """Returns the bytes of a leader's flat vectors, between rounds and at their peak.

    With k = 1 + the number of averaged moments, a = 2 with outer momentum, else 1, and e the bytes in which k numbers
    travel, it holds per trained parameter the anchor (4 a) and the averager's inputs and outputs (2 e), and, where
    deltas do not travel exactly, what rounding left over: of its own (4) and of the part that it reduces (4 at most).
    A round's end adds what was taken of the model (4 k), the contribution made of it (4 k) and the result, or its parts
    while they come in (4 k), and then what is left over anew (4) and one more copy as it travels (e); and one after the
    other: a group's parts being put together (k), all slots for the merge (E P, a layer of them three times more),
    bundles to publish (a), and every slot that was fetched (M) with some on their way (3 a P). Where ranks have parts,
    each of them puts the whole together at first (k).

    Source: the code of `training/` and `swarm/`; measured in docs/planning.md with exact deltas.
    """
    copies, vectors = 1 + setup.averaged_moments, _group_vectors(size, claimed, setup)
    trained, frozen = size.trained_params(claimed), size.frozen_params(claimed)
    shifts = claimed * size.slot_params if setup.merges else 0
    every_slot = size.num_slots * size.slot_params
    phases = (
        copies * max(size.shared_params, size.slot_params if claimed else 0),
        every_slot + 3 * every_slot // size.num_layers + shifts if setup.merges else 0,
        sum(group.numel * group.anchors for group in vectors) + shifts,
        frozen + 3 * vectors[1].anchors * size.slot_params + shifts if frozen else 0,
        (setup.num_ranks - 3) * copies * trained if setup.shard == "fsdp" else 0,
    )
    held = sum(group.numel * group.held_bytes for group in vectors)
    peak = sum(group.numel * (group.held_bytes + group.round_bytes) for group in vectors)
    return round(held), round(peak + FP32 * (3 * copies * trained + max(phases)))


@dataclass(frozen=True)
class _GroupVectors:
    """What is held of the trained parameters of one kind.

    Attributes:
        numel: Parameters.
        anchors: Copies that a bundle has: 2 with outer momentum.
        encoded: Bytes to a parameter of a contribution as it travels, with moments.
        is_exact: Whether nothing is left over.
    """

    numel: int
    anchors: int
    encoded: float
    is_exact: bool

    @property
    def held_bytes(self) -> float:
        """Of one parameter, between rounds."""
        return FP32 * self.anchors + 2 * self.encoded + (0 if self.is_exact else 2 * FP32)

    @property
    def round_bytes(self) -> float:
        """Of one parameter, more at a round's end."""
        return 0 if self.is_exact else FP32 + self.encoded


def _group_vectors(size: ModelSize, claimed: int, setup: Setup) -> tuple[_GroupVectors, _GroupVectors]:
    """The shared parameters' and the claimed slots' vectors."""
    moments = setup.averaged_moments * element_bytes(setup.codecs.moments)
    shared, slots = setup.codecs.shared, setup.codecs.slots
    return (
        _GroupVectors(size.shared_params, 1 + setup.shared_momentum, element_bytes(shared) + moments, is_exact(shared)),
        _GroupVectors(
            claimed * size.slot_params, 1 + setup.slot_momentum, element_bytes(slots) + moments, is_exact(slots)
        ),
    )


def opening_bytes(size: ModelSize, claimed: int, setup: Setup) -> int:
    """Returns the host's bytes while a peer enters the swarm.

    Every rank has the model with all slots frozen, and the leader the averager's buffers. It draws the run's initial
    weights, flattens them and makes bundles of them: the whole model in fp32 two times, and once or twice more.
    """
    models = FP32 * size.shared_params + round(FROZEN_BYTES[setup.storage] * size.frozen_params(0))
    buffers = sum(2 * group.encoded * group.numel for group in _group_vectors(size, claimed, setup))
    shared, slots = 3 + setup.shared_momentum, 3 + setup.slot_momentum
    initial = FP32 * (shared * size.shared_params + slots * size.num_slots * size.slot_params)
    return setup.num_ranks * models + round(buffers) + initial


def peer_bytes(size: ModelSize, claimed: int, setup: Setup) -> int:
    """Returns all memory of `peer_memory` that is trained in: the machine's, or one GPU's if `setup.on_gpu`."""
    return peer_memory(size, claimed, setup).device_bytes
