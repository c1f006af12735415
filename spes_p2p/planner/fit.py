"""How many slots fit, and what to set where they do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from spes_p2p.config import EIGHT_BIT, OptimizerName, Storage
from spes_p2p.errors import ConfigError
from spes_p2p.planner.activations import Activations
from spes_p2p.planner.memory import FROZEN_BYTES, peer_bytes, peer_memory
from spes_p2p.planner.setup import Setup
from spes_p2p.planner.size import ModelSize


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
