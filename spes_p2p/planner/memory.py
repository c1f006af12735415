"""The memory that a peer needs, and the slots that fit.

Legend: S shared parameters, P parameters of a slot, E slots, C claimed slots, L layers, N = S + C P trained parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from spes_p2p.codecs.kept import INT8_BLOCK
from spes_p2p.config import CodecConfig, MachineConfig, OptimizerName, RunConfig, Storage, sequences_at_once
from spes_p2p.errors import ConfigError
from spes_p2p.planner.activations import NARROW, Activations
from spes_p2p.planner.size import FP32, ModelSize, element_bytes, is_exact

FROZEN_BYTES: dict[Storage, float] = {"fp32": 4, "bf16": 2, "int8": 1 + 4 / INT8_BLOCK, "nf4": 0.5 + 4 / 64}
"""Bytes per frozen parameter; int8 and nf4 have an fp32 scale per block, nf4's of 64."""
EIGHT_BIT_BYTES = 1 + 4 / 256
"""Bytes of an 8-bit moment, with an fp32 scale per block of 256."""
PEER_PROGRAM_BYTES, RANK_PROGRAM_BYTES = 800_000_000, 250_000_000
"""Proportional set size of a peer's processes without a model, and of each further rank (docs/planning.md)."""


@dataclass(frozen=True)
class Setup:
    """The settings of run and machine that determine a peer's memory and traffic."""

    storage: Storage = "bf16"  # of frozen experts
    optimizer: OptimizerName = "adamw"
    averaged_moments: int = 2  # moments that are averaged with the deltas of `shared`
    copies: int = 1  # fewest peers that should hold a slot
    outer_momentum: bool = False  # whether anchors have one, which travels with them
    codecs: CodecConfig = field(default_factory=CodecConfig)
    refresh_slots: int | None = None  # others' slots fetched per round; None fetches all
    merges: bool = False  # whether similar experts are merged
    num_ranks: int = 1
    shard: Literal["ddp", "fsdp"] = "ddp"  # frozen experts are never sharded
    on_gpu: bool = False  # whether each rank has a GPU, so that only the swarm's vectors are on the host
    activations: Activations | None = None  # of a rank's forward pass; None leaves them out
    accumulates: bool = False  # whether a rank's step has several forward passes
    gradient_bytes: Literal[4, 2] = 4
    base: Storage = "bf16"  # of the documents of an adapters' base
    kept: Storage | None = None  # form in which slots travel to peers that do not train them; None for fp32 versions
    is_alone: bool = False  # whether the run has no other peer
    programs: int = 0  # bytes of Python, its libraries and the peer's other processes; see `with_programs`

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
        """Moments that are averaged with the deltas of a slot: Muon keeps one of matrices."""
        return min(self.averaged_moments, 1) if self.optimizer == "muon" else self.averaged_moments

    @property
    def anchors(self) -> int:
        """fp32 vectors in a version: 2 with outer momentum."""
        return 1 + self.outer_momentum


def with_programs(setup: Setup) -> Setup:
    """Return the setup of a peer that is not yet started: it needs memory for its programs, too."""
    return replace(setup, programs=PEER_PROGRAM_BYTES + (setup.num_ranks - 1) * RANK_PROGRAM_BYTES)


@dataclass(frozen=True)
class PeerMemory:
    """Bytes by part: the first seven of each rank, the next three of the leader's host."""

    shared_weights: int
    slot_weights: int
    gradients: int  # freed at a round's end
    optimizer: int
    frozen: int
    activations: int  # only while training
    gathered: int  # parameters and gradients of other ranks
    vectors: int  # flat vectors held between rounds
    round_vectors: int  # at their peak, at a round's end
    loading: int  # models and flat vectors while the peer joins
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
    """Return the memory of a peer that trains `claimed` of the slots, without its data."""
    assert 0 <= claimed <= size.num_slots, f"{claimed} of {size.num_slots} slots"
    shares = setup.num_ranks if setup.shard == "fsdp" else 1
    held, peak = vector_bytes(size, claimed, setup)
    return PeerMemory(
        shared_weights=FP32 * size.shared_params // shares,
        slot_weights=FP32 * claimed * size.slot_params // shares,
        gradients=setup.gradient_bytes * size.trained_params(claimed) // shares,
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
    """Return the bytes that a peer holds frozen: with adapters the base, and in fp32 the factors of others' slots."""
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
        return 2 * FP32 * trained
    small = size.small_shared_params + claimed * size.small_slot_params
    return round(2 * (FP32 * small + EIGHT_BIT_BYTES * (trained - small)))


def gathered_bytes(size: ModelSize, claimed: int, setup: Setup) -> int:
    """Return the bytes that each of several ranks needs to exchange parameters and gradients.

    DDP's buckets take 4 N. FSDP (an estimate) gathers weights and gradients of the embedding and the head for a whole
    step, those of one layer at a time with the next layer's weights, and keeps gradients whole while it accumulates.
    """
    trained = size.trained_params(claimed)
    if setup.num_ranks == 1:
        return 0
    if setup.shard == "ddp":
        return FP32 * trained
    layer = (size.matrix_params + claimed * size.slot_params) // size.num_layers
    gradients = trained if setup.accumulates else 0
    return FP32 * (2 * (size.shared_params - size.matrix_params) + 3 * layer + gradients)


@dataclass(frozen=True)
class _Vectors:
    """Flat vectors of the trained parameters of one kind, `shared` or slots."""

    numel: int
    largest: int  # parameters of one vector
    copies: int  # fp32 vectors in a contribution: the delta, and the averaged moments
    encoded: float  # bytes per parameter of an encoded contribution, with moments
    is_exact: bool  # whether the codec of deltas is lossless

    @property
    def made_bytes(self) -> float:
        """Bytes per parameter of a contribution while it is read, put together with its moments, and encoded."""
        if self.copies > 1:
            return 2 * FP32 * self.copies
        return 0.0 if self.is_exact else FP32 + self.encoded


def _vectors(size: ModelSize, claimed: int, setup: Setup) -> list[_Vectors]:
    """Return the vectors of the shared parameters and of the claimed slots."""
    moment, codecs = element_bytes(setup.codecs.moments), setup.codecs
    kinds = (
        (size.shared_params, 1, codecs.shared, setup.averaged_moments),
        (size.slot_params, claimed, codecs.slots, setup.slot_moments),
    )
    return [
        _Vectors(
            numel=count * numel,
            largest=numel if count else 0,
            copies=1 + moments,
            encoded=element_bytes(codec) + moments * moment,
            is_exact=is_exact(codec),
        )
        for numel, count, codec, moments in kinds
    ]


def vector_bytes(size: ModelSize, claimed: int, setup: Setup) -> tuple[int, int]:
    """Return the bytes of a leader's flat vectors, between rounds and at their peak.

    k is 1 + the number of averaged moments, a is 2 with outer momentum and else 1, e is the encoded bytes of k numbers.
    Anchors and a peer's own residuals lie on its disk. Between rounds, a lossy codec takes 2 bytes per trained
    parameter: residuals of the part that a member of two reduces. A round's end adds 2 e (what averaging sends and
    outputs), with a lossy codec 2 (new residuals), the kept forms of the trained slots, and the larger of two sums:

    - what is brought: 4 + e of the largest vector, which is read and encoded by itself, or 8 k with averaged moments;
      nothing if k = 1 and the codec is exact; with FSDP each other rank puts the vector together, too;
    - results: 4 k decoded, unless exact, which take no memory of their own; and the largest of: all slots for the merge
      (E P, and a layer of them three times more), versions to publish (a, unless they take the memory of a decoded
      result), and a fetched slot (3 a P).

    A peer that is alone reduces and fetches nothing: it has neither these residuals nor what averaging takes.

    Source: the code of `training/` and `swarm/`; measured in docs/planning.md.
    """
    vectors, anchors = _vectors(size, claimed, setup), setup.anchors
    shifts = claimed * size.slot_params if setup.merges else 0
    every_slot = size.num_slots * size.slot_params
    phases = (
        every_slot + 3 * every_slot // size.num_layers + shifts if setup.merges else 0,
        sum(each.numel * anchors for each in vectors if each.is_exact or anchors > 1) + shifts,
        3 * anchors * size.slot_params + shifts if size.frozen_params(claimed) and not setup.is_alone else 0,
    )
    forms = FROZEN_BYTES[setup.kept] * claimed * size.slot_params if setup.kept is not None else 0
    held = 0 if setup.is_alone else sum(each.numel * FP32 // 2 for each in vectors if not each.is_exact)
    sent = held + (1 if setup.is_alone else 2) * sum(each.numel * each.encoded for each in vectors)
    are_exact = not setup.averaged_moments or is_exact(setup.codecs.moments)
    results = sum(each.copies * each.numel for each in vectors if not (each.is_exact and are_exact)) + max(phases)
    others = setup.num_ranks - 1 if setup.shard == "fsdp" else 0
    brought = max(each.largest * (each.made_bytes + others * FP32 * max(1, 2 * each.copies - 2)) for each in vectors)
    return held, round(held + forms + sent + max(brought, FP32 * results))


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
    return setup.num_ranks * models + FP32 * setup.anchors * max(size.shared_params, size.slot_params)


def peer_bytes(size: ModelSize, claimed: int, setup: Setup) -> int:
    """Return a peer's peak bytes where it trains: of the machine, or of one GPU if `setup.on_gpu`."""
    return peer_memory(size, claimed, setup).device_bytes


def disk_bytes(size: ModelSize, claimed: int, num_checkpoints: int, setup: Setup) -> int:
    """Return the bytes that a peer's checkpoints and versions take at most, the newest checkpoint not yet complete.

    Each has all versions in fp32, with their outer momentum; of what is trained also parameters, two moments, and what
    a lossy codec has rounded off. With kept forms it has those of all slots, and versions of the slots trained and of
    as many for others. Beside them lies the base of adapters.
    """
    rounded_off = sum(each.numel for each in _vectors(size, claimed, setup) if not each.is_exact)
    num_slots = size.num_slots if setup.kept is None else 2 * claimed
    versions = setup.anchors * (size.shared_params + num_slots * size.slot_params)
    forms = 0.0 if setup.kept is None else FROZEN_BYTES[setup.kept] * size.num_slots * size.slot_params
    base = base_bytes(size, setup.base) if size.is_adapted else 0
    return base + num_checkpoints * round(FP32 * (versions + 3 * size.trained_params(claimed) + rounded_off) + forms)


def fits(size: ModelSize, claimed: int, setup: Setup, memory_bytes: int, host_bytes: int | None = None) -> bool:
    """Check whether `claimed` slots fit; arguments as in `slots_that_fit`."""
    memory = peer_memory(size, claimed, setup)
    return memory.device_bytes <= memory_bytes and (host_bytes is None or memory.host_bytes <= host_bytes)


def slots_that_fit(size: ModelSize, setup: Setup, memory_bytes: int, host_bytes: int | None = None) -> int:
    """Return the most slots that a peer can claim.

    Args:
        size: Result of `model_size`.
        setup: The peer's settings.
        memory_bytes: Memory of the machine, or of one GPU if `setup.on_gpu`.
        host_bytes: With GPUs, memory of the host; None sets no limit.

    Raises:
        ConfigError: not even one slot fits, or a dense model; tells what is missing, and what takes less.
    """
    least = min(1, size.num_slots)
    fitting = [k for k in range(least, size.num_slots + 1) if fits(size, k, setup, memory_bytes, host_bytes)]
    if not fitting:
        raise ConfigError(shortage(size, least, setup, memory_bytes, host_bytes))
    return max(fitting)


def shortage(size: ModelSize, claimed: int, setup: Setup, memory_bytes: int, host_bytes: int | None = None) -> str:
    """Return by how much `claimed` slots do not fit, and which flags take less memory, in one line."""
    memory, activations = peer_memory(size, claimed, setup), setup.activations
    slots = {0: "the model", 1: "1 slot"}.get(claimed, f"{claimed} slots")
    where, needed, there = "", memory.device_bytes, memory_bytes
    if needed <= there and host_bytes is not None:
        where, needed, there = " on the host", memory.host_bytes, host_bytes
    most = max((k for k in range(1, claimed) if fits(size, k, setup, memory_bytes, host_bytes)), default=0)
    savers = {
        "--storage nf4": setup.kept is None and setup.storage != "nf4",
        "--inner-optimizer adamw8bit": setup.optimizer == "adamw" and setup.shard == "ddp",
        "--gradients bf16": setup.optimizer == "adamw8bit" and setup.gradient_bytes == FP32 and setup.num_ranks == 1,
        "--micro-batch-size 1": activations is not None and activations.sequences > 1,
        "--activation-checkpointing": activations is not None and not activations.checkpointing,
    }
    ways = [f"claim at most {most}"] if most else []
    if flags := [flag for flag, helps in savers.items() if helps]:
        ways.append(f"save memory with {', '.join(flags)}")
    return (
        f"training {slots} needs {_gb(needed)}{where}, {_gb(needed - there)} more than the {_gb(there)} there are; "
        f"{', or '.join([*ways, 'join a run with a smaller model'])} (docs/trouble.md#memory)"
    )


def _gb(num_bytes: int) -> str:
    if num_bytes >= 1e11:
        return f"{num_bytes / 1e9:,.0f} GB"
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3g} MB"
