"""What a machine's choices and a run's settings must be to each other, checked before anything starts."""

from __future__ import annotations

from spes_p2p.config.machine import MachineConfig
from spes_p2p.config.run import OptimizerName, RunConfig, TrainConfig
from spes_p2p.errors import ConfigError

EIGHT_BIT: tuple[OptimizerName, ...] = ("adamw8bit", "lion8bit")
"""Optimizers of bitsandbytes."""
MAX_NARROW_SUMS = 8
"""Microbatches whose gradients may be added up in bf16: the sum is off by 0.3 % then, by 3 % with 128."""


def check_machine(run: RunConfig, machine: MachineConfig, num_ranks: int = 1) -> None:
    """Refuses choices with which a machine could not train the run, or would not make the run's steps.

    AdamW in 8 bits makes AdamW's steps; all others read `train.lr` in another way. LAMB's moments are AdamW's, but its
    steps are not.

    Args:
        run: The run's settings.
        machine: The machine's choices.
        num_ranks: Its processes.

    Raises:
        ConfigError: the two do not go together.
    """
    name = machine.inner_optimizer
    if name not in (None, run.train.optimizer) and {name, run.train.optimizer} != {"adamw", "adamw8bit"}:
        raise ConfigError(
            f"inner_optimizer={name} does not make the steps of the run's train.optimizer={run.train.optimizer}; "
            f"leave it out (only adamw and adamw8bit stand in for each other)"
        )
    if machine.refresh_slots is not None and run.merge.alpha:
        raise ConfigError(
            f"refresh_slots={machine.refresh_slots} goes with no run that merges experts "
            f"(merge.alpha={run.merge.alpha:g}), which takes every slot's newest version; leave it out"
        )
    check_training(run.train, machine, num_ranks)


def check_training(train: TrainConfig, machine: MachineConfig, num_ranks: int) -> None:
    """Refuses choices that cannot be combined, whatever the run.

    Raises:
        ConfigError: the batch does not split over the ranks, or an optimizer cannot take the gradients or parameters.
    """
    optimizer = machine.inner_optimizer or train.optimizer
    if train.batch_size % num_ranks:
        raise ConfigError(
            f"train.batch_size={train.batch_size} does not split over {num_ranks} ranks; "
            f"start a divisor of it with --nproc-per-node"
        )
    if machine.shard == "fsdp" and num_ranks > 1 and optimizer != "adamw":
        raise ConfigError(
            f"inner optimizer {optimizer} cannot work with --shard fsdp, where a rank has parts of parameters; "
            f"use adamw, or --shard ddp"
        )
    if machine.gradients == "fp32":
        return
    if optimizer not in EIGHT_BIT:
        raise ConfigError(
            f"gradients=bf16 goes with the optimizers {' and '.join(EIGHT_BIT)}, not with {optimizer}; "
            f"set inner_optimizer to one of them, or gradients=fp32"
        )
    if num_ranks > 1:
        raise ConfigError(f"gradients=bf16 works with one rank, not with {num_ranks}; set gradients=fp32")
    sums = -(-train.batch_size // sequences_at_once(train, machine))
    if sums > MAX_NARROW_SUMS:
        raise ConfigError(
            f"gradients=bf16 adds up {sums} microbatches, and rounds too much from {MAX_NARROW_SUMS + 1} on; "
            f"set micro_batch_size to {-(-train.batch_size // MAX_NARROW_SUMS)} or more, or gradients=fp32"
        )


def sequences_at_once(train: TrainConfig, machine: MachineConfig, num_ranks: int = 1) -> int:
    """Returns the sequences of a rank's forward pass."""
    share = max(1, train.batch_size // num_ranks)
    return min(machine.micro_batch_size or share, share)
