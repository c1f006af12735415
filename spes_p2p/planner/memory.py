"""The memory that a peer needs, the slots that fit, and what to set if they do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from spes_p2p.codecs.kept import INT8_BLOCK
from spes_p2p.config import (
    CodecConfig,
    MachineConfig,
    OptimizerName,
    RunConfig,
    Storage,
    sequences_at_once,
)
from spes_p2p.errors import ConfigError
from spes_p2p.planner.activations import NARROW, Activations
from spes_p2p.planner.size import FP32, ModelSize, element_bytes, is_exact


@dataclass(frozen=True)
class Setup:
    """The settings of run and machine that determine a peer's memory and traffic.

    Attributes:
        storage: Precision of the frozen experts.
        optimizer: Inner optimizer.
        averaged_moments: Number of its moments that are averaged with the deltas of `shared`.
        copies: Fewest peers that should hold a slot.
        outer_momentum: Whether anchors have an outer momentum, which travels with them.
        codecs: Codecs of deltas and averaged moments.
        refresh_slots: Other peers' slots fetched per round; None fetches all.
        merges: Whether similar experts are merged.
        num_ranks: Processes of the peer on this machine.
        shard: `ddp`: each rank holds all that is trained; `fsdp`: a shard of it. Frozen experts are never sharded.
        on_gpu: Whether each rank trains on its own GPU, so that only the swarm's vectors are on the host.
        activations: One forward pass of a rank; None leaves activations out.
        accumulates: Whether a rank's step has several forward passes.
        gradient_bytes: Bytes of one parameter's gradient: 4, or 2 if the machine keeps gradients in bf16.
        base: Precision of the documents of an adapters' base.
        kept: The form in which slots travel to peers that do not train them; None if these take fp32 versions.
        is_alone: Whether the run has no other peer, with which it would exchange anything.
        programs: Bytes of Python, its libraries and the peer's other processes; see `with_programs`.
    """

    storage: Storage = "bf16"
    optimizer: OptimizerName = "adamw"
    averaged_moments: int = 2
    copies: int = 1
    outer_momentum: bool = False
    codecs: CodecConfig = field(default_factory=CodecConfig)
    refresh_slots: int | None = None
    merges: bool = False
    num_ranks: int = 1
    shard: Literal["ddp", "fsdp"] = "ddp"
    on_gpu: bool = False
    activations: Activations | None = None
    accumulates: bool = False
    gradient_bytes: Literal[4, 2] = 4
    base: Storage = "bf16"
    kept: Storage | None = None
    is_alone: bool = False
    programs: int = 0

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
        """Return the setup of a peer of a run.

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
                run.model.embedding_rows(vocab_size),
                sequences=sequences,
                sequence_length=run.data.sequence_length,
                precision=run.train.precision,
                checkpointing=machine.activation_checkpointing,
                keeps_scores=machine.attention == "eager",
                keeps_masks=machine.attention == "sdpa" and run.data.are_separate,
                has_frozen_base=run.adapter is not None,
                stacks_experts=on_gpu and not run.model.is_dense,
            )
        return cls(
            storage=machine.storage or run.frozen_storage,
            optimizer=machine.inner_optimizer or run.train.optimizer,
            averaged_moments=len(run.averaged_moments("shared")),
            copies=run.round.copies,
            outer_momentum=run.outer.has_momentum,
            codecs=run.codecs,
            refresh_slots=machine.refresh_slots,
            merges=run.merge.alpha > 0,
            num_ranks=num_ranks,
            shard=machine.shard,
            gradient_bytes=2 if machine.gradients == "bf16" else 4,
            on_gpu=on_gpu,
            activations=activations,
            accumulates=sequences * num_ranks < run.train.batch_size,
            base=run.adapter.base if run.adapter is not None else "bf16",
            kept=run.kept_form,
        )

    @property
    def slot_moments(self) -> int:
        """Number of moments that are averaged with the deltas of a slot: Muon keeps one of matrices."""
        return min(self.averaged_moments, 1) if self.optimizer == "muon" else self.averaged_moments


FROZEN_BYTES: dict[Storage, float] = {"fp32": 4, "bf16": 2, "int8": 1 + 4 / INT8_BLOCK, "nf4": 0.5 + 4 / 64}
"""Bytes per frozen parameter; int8 and nf4 have an fp32 scale per block, nf4's of 64."""
MOMENTS: dict[OptimizerName, int] = {"adamw": 2, "adamw8bit": 2, "lamb": 2, "muon": 2}
"""Moments per parameter; Muon keeps one of the matrices, and AdamW's two of the rest."""
EIGHT_BIT_BYTES = 1 + 4 / 256
"""Bytes of an 8-bit moment, with an fp32 scale per block of 256."""
PEER_PROGRAM_BYTES, RANK_PROGRAM_BYTES = 800_000_000, 250_000_000
"""Proportional set size of a peer's five processes without a model, and of each further rank (docs/planning.md)."""


def with_programs(setup: Setup) -> Setup:
    """Return the setup of a peer that is not yet started: it needs memory for its programs, too."""
    return replace(setup, programs=PEER_PROGRAM_BYTES + (setup.num_ranks - 1) * RANK_PROGRAM_BYTES)


@dataclass(frozen=True)
class PeerMemory:
    """Bytes by part: the first seven of each rank, the next three of the leader's host.

    Attributes:
        shared_weights: 4 S.
        slot_weights: 4 C P.
        gradients: 4 N for N trained parameters; freed at a round's end.
        optimizer: 8 N for AdamW.
        frozen: b M for M frozen parameters of b bytes.
        activations: See `Activations.num_bytes`; only while training.
        gathered: Parameters and gradients of other ranks; see `gathered_bytes`.
        vectors: Flat vectors held between rounds; see `vector_bytes`.
        round_vectors: Flat vectors at their peak, at a round's end.
        loading: Models and flat vectors while the peer joins.
        setup: The peer's settings, on which the sums depend.
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
    loading: int
    setup: Setup

    @property
    def static_bytes(self) -> int:
        """Bytes of one rank between two steps: weights, gradients, optimizer state, frozen experts."""
        return self.shared_weights + self.slot_weights + self.gradients + self.optimizer + self.frozen

    @property
    def rank_bytes(self) -> int:
        """Bytes of one rank while it trains."""
        return self.static_bytes + self.activations + self.gathered

    @property
    def training_bytes(self) -> int:
        """Bytes of all ranks and the leader's vectors while they train."""
        return self.setup.programs + self.setup.num_ranks * self.rank_bytes + self.vectors

    @property
    def round_bytes(self) -> int:
        """Bytes at a round's end, without gradients and activations but with more vectors; on a GPU's host, these."""
        ranks = 0 if self.setup.on_gpu else self.setup.num_ranks * (self.static_bytes - self.gradients + self.gathered)
        return self.setup.programs + ranks + self.round_vectors

    @property
    def startup_bytes(self) -> int:
        """Bytes while the peer joins."""
        return self.setup.programs + self.loading

    @property
    def host_bytes(self) -> int:
        """The host's bytes at their peak."""
        at_ends = max(self.round_bytes, self.startup_bytes)
        return at_ends if self.setup.on_gpu else max(self.training_bytes, at_ends)

    @property
    def device_bytes(self) -> int:
        """Peak bytes where the peer trains: one GPU's memory, or the machine's."""
        return self.rank_bytes if self.setup.on_gpu else self.host_bytes


def peer_memory(size: ModelSize, claimed: int, setup: Setup) -> PeerMemory:
    """Return the memory of a peer that trains `claimed` slots, without its data.

    Args:
        size: Result of `model_size`.
        claimed: C, in [0, E].
        setup: The peer's settings.
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
        frozen=frozen_bytes(size, claimed, setup.storage),
        activations=setup.activations.num_bytes if setup.activations else 0,
        gathered=gathered_bytes(size, claimed, setup),
        vectors=held,
        round_vectors=peak,
        loading=loading_bytes(size, setup),
        setup=setup,
    )


def frozen_bytes(size: ModelSize, claimed: int, storage: Storage) -> int:
    """Return the bytes of what a peer with `claimed` slots holds frozen.

    Without adapters that is `b M` for M parameters of b bytes. With adapters it is the whole base, and in fp32 the
    factors of slots that others train.
    """
    if not size.is_adapted:
        return round(FROZEN_BYTES[storage] * size.frozen_params(claimed))
    return base_bytes(size, storage) + FP32 * size.frozen_params(claimed)


def base_bytes(size: ModelSize, storage: Storage) -> int:
    """Return the bytes of the frozen base of adapters, in memory or as documents on disk."""
    tables = (FP32 if storage == "fp32" else NARROW["bf16"]) * size.table_params
    return round(FROZEN_BYTES[storage] * size.base_params) + tables + FP32 * size.kept_params


def optimizer_bytes(size: ModelSize, claimed: int, optimizer: OptimizerName) -> int:
    """Return the bytes of an inner optimizer's state for all trained parameters.

    Per parameter: 8 for AdamW and LAMB; for 8-bit AdamW 2 + 8/256 in tensors of 4096 elements or more, else 8;
    for Muon 4 in matrices of attention, routers and experts, else 8.
    """
    trained = size.trained_params(claimed)
    if optimizer == "muon":
        return FP32 * (2 * trained - size.matrix_params - claimed * size.slot_params)
    if optimizer != "adamw8bit":
        return FP32 * MOMENTS[optimizer] * trained
    small = size.small_shared_params + claimed * size.small_slot_params
    return round(MOMENTS[optimizer] * (FP32 * small + EIGHT_BIT_BYTES * (trained - small)))


def gathered_bytes(size: ModelSize, claimed: int, setup: Setup) -> int:
    """Return the bytes that each of several ranks needs to exchange parameters and gradients.

    DDP's buckets take 4 N. FSDP (an estimate) gathers weights and gradients of the embedding and the head for a whole
    step, and those of one layer at a time with the next layer's weights. It keeps gradients unsharded if a step has
    several forward passes.
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
    """Return the bytes of a leader's flat vectors, between rounds and at their peak.

    k is 1 + the number of averaged moments, a is 2 with outer momentum and else 1, e is the encoded bytes of k numbers.
    Anchors and a peer's own residuals lie on its disk. Between rounds, a lossy codec takes 2 bytes per trained
    parameter: residuals of the part that a member of two reduces. A round's end adds 2 e (what averaging sends and
    outputs), with a lossy codec 2 (new residuals), the kept forms of the trained slots, and the larger of two sums:

    - what is brought: 4 + e of the largest vector, which is read and encoded by itself, or 8 k with averaged moments;
      nothing if k = 1 and the codec is exact, because it is sent from where it is read; where FSDP shards, each
      other rank puts the vector together, too;
    - results: 4 k decoded, unless exact, which take no memory of their own; and the largest of: all slots for the merge
      (E P, and a layer of them three times more), versions to publish (a, unless they take the memory of a decoded
      result), and a fetched slot (3 a P).

    A peer that is alone reduces and fetches nothing: it has neither these residuals nor what averaging takes.

    Source: the code of `training/` and `swarm/`; measured in docs/planning.md.
    """
    vectors = _group_vectors(size, claimed, setup)
    num_sides = 1 if setup.is_alone else 2  # inputs, and outputs
    shifts = claimed * size.slot_params if setup.merges else 0
    every_slot = size.num_slots * size.slot_params
    phases = (
        every_slot + 3 * every_slot // size.num_layers + shifts if setup.merges else 0,
        sum(group.numel * group.anchors for group in vectors if group.is_exact or group.anchors > 1) + shifts,
        3 * vectors[1].anchors * size.slot_params + shifts if size.frozen_params(claimed) and not setup.is_alone else 0,
    )
    forms = FROZEN_BYTES[setup.kept] * claimed * size.slot_params if setup.kept is not None else 0
    held = 0 if setup.is_alone else sum(group.numel * group.residual_bytes for group in vectors)
    sent = held + num_sides * sum(group.numel * group.encoded for group in vectors)
    are_exact = not setup.averaged_moments or is_exact(setup.codecs.moments)
    results = sum(group.copies * group.numel for group in vectors if not (group.is_exact and are_exact)) + max(phases)
    others = setup.num_ranks - 1 if setup.shard == "fsdp" else 0
    brought = max(
        group.largest * (group.made_bytes + others * FP32 * max(1, 2 * group.copies - 2)) for group in vectors
    )
    largest = max(brought, FP32 * results)
    return round(held), round(held + forms + sent + largest)


@dataclass(frozen=True)
class _GroupVectors:
    """Flat vectors of the trained parameters of one kind.

    Attributes:
        numel: Number of parameters.
        largest: Those of one vector.
        copies: fp32 vectors in a contribution: the delta, and the averaged moments (k).
        anchors: fp32 vectors in a version: 2 with outer momentum, else 1.
        encoded: Bytes per parameter of an encoded contribution, with moments.
        is_exact: Whether the codec of deltas is lossless.
    """

    numel: int
    largest: int
    copies: int
    anchors: int
    encoded: float
    is_exact: bool

    @property
    def made_bytes(self) -> float:
        """Bytes per parameter of a contribution while it is read, put together with its moments, and encoded."""
        if self.copies > 1:
            return 2 * FP32 * self.copies
        return 0.0 if self.is_exact else FP32 + self.encoded

    @property
    def residual_bytes(self) -> int:
        """Bytes per parameter of the residuals of results, in the half that a member of two reduces."""
        return 0 if self.is_exact else FP32 // 2


def _group_vectors(size: ModelSize, claimed: int, setup: Setup) -> tuple[_GroupVectors, _GroupVectors]:
    """Return the vectors of the shared parameters and of the claimed slots."""
    moment = element_bytes(setup.codecs.moments)
    shared, slots = setup.codecs.shared, setup.codecs.slots
    return (
        _GroupVectors(
            numel=size.shared_params,
            largest=size.shared_params,
            copies=1 + setup.averaged_moments,
            anchors=1 + setup.outer_momentum,
            encoded=element_bytes(shared) + setup.averaged_moments * moment,
            is_exact=is_exact(shared),
        ),
        _GroupVectors(
            numel=claimed * size.slot_params,
            largest=size.slot_params if claimed else 0,
            copies=1 + setup.slot_moments,
            anchors=1 + setup.outer_momentum,
            encoded=element_bytes(slots) + setup.slot_moments * moment,
            is_exact=is_exact(slots),
        ),
    )


def loading_bytes(size: ModelSize, setup: Setup) -> int:
    """Return the host's bytes while a peer joins.

    Every rank holds the model with all slots frozen. The leader draws and publishes, or fetches, and then loads one
    vector of the run's state after the other, of which one copy is in memory at a time.
    """
    models = FP32 * size.shared_params + frozen_bytes(size, 0, setup.storage)
    if size.is_adapted:  # one document of the base, as its founder or a joiner gets it: the shared part or a slot
        models += max(
            base_bytes(replace(size, base_params=size.base_params - size.expert_params), setup.base),
            round(FROZEN_BYTES[setup.base] * size.slot_base_params),
        )
    largest = (1 + setup.outer_momentum) * max(size.shared_params, size.slot_params)
    return setup.num_ranks * models + FP32 * largest


def peer_bytes(size: ModelSize, claimed: int, setup: Setup) -> int:
    """Return a peer's peak bytes where it trains: of the machine, or of one GPU if `setup.on_gpu`."""
    return peer_memory(size, claimed, setup).device_bytes


def disk_bytes(size: ModelSize, claimed: int, num_checkpoints: int, setup: Setup) -> int:
    """Return the bytes that a peer's checkpoints and versions take at most, the newest checkpoint not yet complete.

    Each has all versions in fp32, with their outer momentum; of what is trained also parameters, two moments, and what
    a lossy codec has rounded off. With kept forms it has those of all slots, and versions of the slots trained and of
    as many for others. Beside them lies the base of adapters.
    """
    shared, slots = _group_vectors(size, claimed, setup)
    state = 3 * size.trained_params(claimed) + sum(each.numel for each in (shared, slots) if not each.is_exact)
    num_slots = size.num_slots if setup.kept is None else 2 * claimed
    versions = shared.anchors * size.shared_params + num_slots * slots.anchors * size.slot_params
    forms = 0.0 if setup.kept is None else FROZEN_BYTES[setup.kept] * size.num_slots * size.slot_params
    base = base_bytes(size, setup.base) if size.is_adapted else 0
    return base + num_checkpoints * round(FP32 * (versions + state) + forms)


def fits(size: ModelSize, claimed: int, setup: Setup, memory_bytes: int, host_bytes: int | None = None) -> bool:
    """Tell whether `claimed` slots fit; arguments as in `slots_that_fit`."""
    memory = peer_memory(size, claimed, setup)
    host_fits = host_bytes is None or memory.host_bytes <= host_bytes
    return memory.device_bytes <= memory_bytes and host_fits


def slots_that_fit(size: ModelSize, setup: Setup, memory_bytes: int, host_bytes: int | None = None) -> int:
    """Return the most slots that a peer can claim.

    Args:
        size: Result of `model_size`.
        setup: The peer's settings.
        memory_bytes: Memory of the machine, or of one GPU if `setup.on_gpu`.
        host_bytes: With GPUs, memory of the host; None sets no limit.

    Raises:
        ConfigError: not even one slot fits, or a dense model; tells what is missing, and a remedy.
    """
    least = min(1, size.num_slots)
    fitting = [k for k in range(least, size.num_slots + 1) if fits(size, k, setup, memory_bytes, host_bytes)]
    if not fitting:
        raise ConfigError(shortage(size, least, setup, memory_bytes, host_bytes))
    return max(fitting)


def shortage(size: ModelSize, claimed: int, setup: Setup, memory_bytes: int, host_bytes: int | None = None) -> str:
    """Return by how much `claimed` slots do not fit, and what to set instead, in one line."""
    memory = peer_memory(size, claimed, setup)
    slots = {0: "the model", 1: "1 slot"}.get(claimed, f"{claimed} slots")
    where, needed, there = "", memory.device_bytes, memory_bytes
    if needed <= there and host_bytes is not None:
        where, needed, there = " on the host", memory.host_bytes, host_bytes
    said = f"training {slots} needs {_gb(needed)}{where}, {_gb(needed - there)} more than the {_gb(there)} there are; "
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
    """Yield flags and setups that make the same steps with less memory, in order of their effect on the result."""
    # Only 8-bit AdamW may replace an optimizer, AdamW, and it cannot step the shards of FSDP.
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
            accumulates = setup.accumulates or "--micro-batch-size 1" in more_flags
            yield " ".join([*flags, *more_flags]), replace(other, activations=activations, accumulates=accumulates)
    # bf16 gradients need an 8-bit optimizer and one rank, and accumulate inaccurately.
    if setup.num_ranks == 1 and not setup.accumulates:
        for flags, other in smaller:
            if other.optimizer == "adamw8bit":
                yield " ".join([*flags, "--gradients bf16"]), replace(other, gradient_bytes=2)


def _smaller_storages(setup: Setup, optimizer: OptimizerName) -> Iterator[tuple[Storage, list[str]]]:
    """Yield storages no larger than the setup's that the run allows, and the flags that set them and the optimizer."""
    for storage in get_args(Storage) if setup.kept is None else (setup.storage,):
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
