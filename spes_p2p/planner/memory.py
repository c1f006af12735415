"""How many slots fit, and what to set where they do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from spes_p2p.codecs import INT8_BLOCK
from spes_p2p.config import (
    EIGHT_BIT,
    CodecConfig,
    MachineConfig,
    ModelConfig,
    OptimizerName,
    RunConfig,
    Storage,
    sequences_at_once,
)
from spes_p2p.errors import ConfigError
from spes_p2p.planner.size import FP32, ModelSize, element_bytes, is_exact

WIDE = 4
"""Bytes of what stays fp32 under autocast: the residual stream, norms, router scores, logits."""
NARROW = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Activations:
    """One forward pass of a rank.

    Attention is taken to be fused (its scores are never whole in memory), experts to be an `ExpertBank`'s.

    Attributes:
        model: Shapes.
        vocab_size: Width of the logits.
        sequences: Of one microbatch.
        sequence_length: Tokens of each.
        precision: The run's.
        checkpointing: Keep each layer's input only, and compute the rest again.
    """

    model: ModelConfig
    vocab_size: int
    sequences: int
    sequence_length: int
    precision: Literal["fp32", "bf16"] = "fp32"
    checkpointing: bool = False

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence_length

    @property
    def kept_bytes(self) -> int:
        """What the forward pass leaves behind: `L layer + norm + 4 V` per token, with checkpointing `4 L D + ...`.

        Under autocast the matrices of attention, routers and the head are kept once more, as they were rounded.
        """
        layer = WIDE * self.model.hidden_size if self.checkpointing else self._layer()
        per_token = self.model.num_layers * layer + self._norm() + WIDE * self.vocab_size
        return self.tokens * per_token + self._rounded_weights()

    @property
    def num_bytes(self) -> int:
        """At the peak of the backward pass.

        That is at the logits, where there are two gradients of their size, or, where the vocabulary is small, in a
        layer: its gradients take about what it has kept. With checkpointing it has to be computed again as well.
        """
        logits = WIDE * self.vocab_size
        in_a_layer = 2 * self._layer() - self._norm() if self.checkpointing else self._layer()
        return self.kept_bytes + self.tokens * max(2 * logits, in_a_layer - logits)

    def _norm(self) -> int:
        """Bytes that the last norm keeps per token: its input, what it normalised, and its output."""
        return (2 * WIDE + NARROW[self.precision]) * self.model.hidden_size

    def _layer(self) -> int:
        """Bytes that one layer keeps per token.

        In fp32 `4 (10 D + 4 F + 2 K I + 4 E + 4 K)`; where queries and keys have no norms, `8 (D + F)` less.
        """
        model, narrow = self.model, NARROW[self.precision]
        width, key_width = model.hidden_size, _key_width(model)
        # Each norm's input, what it normalised, and its output: autocast rounds that for every module it goes to.
        norms = 2 * 2 * WIDE * width + narrow * width * (2 if self.precision == "fp32" else 5)
        attention = narrow * (2 * width + 2 * key_width)  # queries, keys, values and the output
        if model.family != "mixtral":  # queries and keys are normalised
            attention += (WIDE + narrow) * (width + key_width)
        router = 4 * WIDE * (model.num_experts + model.top_k)  # scores on their way to the losses, and the sorting
        experts = 2 * narrow * model.top_k * model.intermediate_size  # gate and up
        return norms + attention + router + experts

    def _rounded_weights(self) -> int:
        if self.precision == "fp32":
            return 0
        model, width = self.model, self.model.hidden_size
        layer = 2 * width * (width + _key_width(model)) + model.num_experts * width
        num_layers = 1 if self.checkpointing else model.num_layers
        return NARROW[self.precision] * (num_layers * layer + self.vocab_size * width)


def _key_width(model: ModelConfig) -> int:
    return model.hidden_size // model.num_heads * model.num_kv_heads


@dataclass(frozen=True)
class Setup:
    """How a peer trains, as far as memory and traffic go.

    Attributes:
        storage: Precision of the frozen experts.
        optimizer: Inner optimizer.
        averaged_moments: How many of its moments are averaged with the deltas.
        kept_moments: How many of them are published of every slot.
        copies: Peers on which a slot lives at least.
        shared_momentum: Whether the shared anchor moves with a momentum, which it then has and travels with.
        slot_momentum: Whether the slots' do.
        codecs: How deltas and averaged moments travel.
        refresh_slots: Slots of others that it fetches in a round; None fetches all.
        overlaps: Whether a round is averaged while the next one trains.
        merges: Whether experts are pulled together.
        num_ranks: Processes of the peer on this machine.
        shard: Whether each holds what is trained, or a share of it; frozen experts are whole in each.
        on_gpu: The ranks' part lies on GPUs, one to each, and only the swarm's share on the host.
        activations: One forward pass of a rank; None leaves it out.
        accumulates: Whether a step of a rank has several of them.
        gradient_bytes: Of one parameter's gradient: 4, or 2 where the machine keeps gradients in bf16.
    """

    storage: Storage = "bf16"
    optimizer: OptimizerName = "adamw"
    averaged_moments: int = 2
    kept_moments: int = 0
    copies: int = 1
    shared_momentum: bool = False
    slot_momentum: bool = False
    codecs: CodecConfig = field(default_factory=CodecConfig)
    refresh_slots: int | None = None
    overlaps: bool = False
    merges: bool = False
    num_ranks: int = 1
    shard: Literal["ddp", "fsdp"] = "ddp"
    on_gpu: bool = False
    activations: Activations | None = None
    accumulates: bool = False
    gradient_bytes: Literal[4, 2] = 4

    @classmethod
    def of(
        cls,
        run: RunConfig,
        machine: MachineConfig,
        vocab_size: int | None,
        *,
        num_ranks: int = 1,
        on_gpu: bool = False,
    ) -> Setup:
        """A peer of a run.

        Args:
            run: The run's settings.
            machine: This machine's choices.
            vocab_size: Entries of the run's tokenizer; None leaves activations out.
            num_ranks: Processes on this machine.
            on_gpu: Whether they train on GPUs.
        """
        sequences = sequences_at_once(run.train, machine, num_ranks)
        activations = None
        if vocab_size is not None:
            activations = Activations(
                run.model,
                vocab_size,
                sequences=sequences,
                sequence_length=run.data.sequence_length,
                precision=run.train.precision,
                checkpointing=machine.activation_checkpointing,
            )
        return cls(
            storage=machine.storage or run.frozen_storage,
            optimizer=machine.inner_optimizer or run.train.optimizer,
            averaged_moments=len(run.averaged_moments),
            kept_moments=len(run.kept_moments),
            copies=run.round.copies,
            shared_momentum=run.outer.has_momentum,
            slot_momentum=run.outer.of_slots.has_momentum,
            codecs=run.codecs,
            refresh_slots=machine.refresh_slots,
            overlaps=run.round.overlap > 0,
            merges=run.merge.alpha > 0,
            num_ranks=num_ranks,
            shard=machine.shard,
            gradient_bytes=2 if machine.gradients == "bf16" else 4,
            on_gpu=on_gpu,
            activations=activations,
            accumulates=sequences * num_ranks < run.train.batch_size,
        )


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


def fits(size: ModelSize, claimed: int, setup: Setup, memory_bytes: int, host_bytes: int | None = None) -> bool:
    """Tells whether `claimed` slots fit; the arguments are those of `slots_that_fit`."""
    memory = peer_memory(size, claimed, setup)
    host_fits = host_bytes is None or memory.host_bytes <= host_bytes
    return memory.device_bytes <= memory_bytes and host_fits


def slots_that_fit(size: ModelSize, setup: Setup, memory_bytes: int, host_bytes: int | None = None) -> int:
    """Returns the most slots that a peer can claim.

    Args:
        size: From `model_size`.
        setup: How it trains.
        memory_bytes: What there is: of the machine, or of one GPU if `setup.on_gpu`.
        host_bytes: With GPUs, what there is on the host; None does not look.

    Raises:
        ConfigError: Not even one slot fits; says by how much, and what would.
    """
    fitting = [k for k in range(1, size.num_slots + 1) if fits(size, k, setup, memory_bytes, host_bytes)]
    if not fitting:
        raise ConfigError(shortage(size, 1, setup, memory_bytes, host_bytes))
    return max(fitting)


def shortage(size: ModelSize, claimed: int, setup: Setup, memory_bytes: int, host_bytes: int | None = None) -> str:
    """Returns by how much `claimed` slots do not fit, and what to set instead, in one line."""
    memory = peer_memory(size, claimed, setup)
    slots = "1 slot" if claimed == 1 else f"{claimed} slots"
    missing = memory.device_bytes - memory_bytes
    where, needed, there = "", memory.device_bytes, memory_bytes
    if missing <= 0 and host_bytes is not None:
        where, needed, there = " on the host", memory.host_bytes, host_bytes
        missing = needed - there
    said = f"training {slots} needs {_gb(needed)}{where}, {_gb(missing)} more than the {_gb(there)} there are; "
    return said + _remedy(size, claimed, setup, memory_bytes, host_bytes)


def _remedy(size: ModelSize, claimed: int, setup: Setup, memory_bytes: int, host_bytes: int | None) -> str:
    most = max((k for k in range(1, claimed) if fits(size, k, setup, memory_bytes, host_bytes)), default=0)
    ways = [f"claim at most {most}"] if most else []
    for flags, other in _smaller_setups(setup):
        if fits(size, claimed, other, memory_bytes, host_bytes):
            ways.append(f"set {flags} ({_gb(peer_bytes(size, claimed, other))})")
            break
    return ", or ".join(ways or ["free some memory or join a run with a smaller model"])


def _smaller_setups(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Flags and setups that make the same steps with less, what changes the result least first."""
    # AdamW in 8 bits makes AdamW's steps; no other optimizer may stand in for the run's.
    # Nor can it work on the parts of parameters that FSDP leaves to a rank.
    is_whole = setup.num_ranks == 1 or setup.shard == "ddp"
    may_shrink = setup.optimizer == "adamw" and is_whole
    optimizers: list[OptimizerName] = ["adamw", "adamw8bit"] if may_shrink else [setup.optimizer]
    smaller = [
        (flags, replace(setup, storage=storage, optimizer=optimizer))
        for optimizer in optimizers
        for storage, flags in _smaller_storages(setup, optimizer)
    ]
    for flags, other in smaller:
        for more_flags, activations in _smaller_activations(setup.activations):
            yield " ".join([*flags, *more_flags]), replace(other, activations=activations)
    # Gradients of two bytes are for the 8-bit optimizers and one rank, and add up badly.
    if setup.num_ranks == 1 and not setup.accumulates:
        for flags, other in smaller:
            if other.optimizer in EIGHT_BIT:
                yield " ".join([*flags, "--gradients bf16"]), replace(other, gradient_bytes=2)


def _smaller_storages(setup: Setup, optimizer: OptimizerName) -> Iterator[tuple[Storage, list[str]]]:
    """Storages no larger than the setup's, and the flags that set them and the optimizer."""
    for storage in get_args(Storage):
        if FROZEN_BYTES[storage] <= FROZEN_BYTES[setup.storage]:
            flags = [f"--storage {storage}"] if storage != setup.storage else []
            yield storage, flags + ([f"--inner-optimizer {optimizer}"] if optimizer != setup.optimizer else [])


def _smaller_activations(activations: Activations | None) -> Iterator[tuple[list[str], Activations | None]]:
    yield [], activations
    if activations is None:
        return
    smallest = replace(activations, sequences=1)
    if activations.sequences > 1:
        yield ["--micro-batch-size 1"], smallest
    if not activations.checkpointing:
        yield ["--activation-checkpointing"], replace(activations, checkpointing=True)
        if activations.sequences > 1:
            yield ["--micro-batch-size 1", "--activation-checkpointing"], replace(smallest, checkpointing=True)


def _gb(num_bytes: int) -> str:
    if num_bytes >= 1e11:
        return f"{num_bytes / 1e9:,.0f} GB"
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3g} MB"
