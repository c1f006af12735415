"""How a peer trains, as far as its memory and its traffic go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from spes_p2p.config import CodecConfig, MachineConfig, OptimizerName, RunConfig, Storage, sequences_at_once
from spes_p2p.planner.activations import Activations


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
