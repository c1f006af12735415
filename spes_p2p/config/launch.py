"""What the variables of schedulers and launchers mean to a peer, and which of them do not fit together.

torchrun numbers processes (RANK, LOCAL_RANK, WORLD_SIZE), SPES's scripts and many schedulers number nodes by the same
names (RANK, WORLD_SIZE), and SLURM numbers tasks (SLURM_PROCID). A peer that takes one for the other waits for ranks
that do not exist, or has no leader.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spes_p2p.errors import ConfigError

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torch.distributed reads."""
SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS")


@dataclass(frozen=True)
class Place:
    """Where in a job a node's peer stands."""

    name: str  # of the node; the same after a requeue on another machine
    num_ranks: int


def check_ranks(environ: Mapping[str, str], *, founds: bool = False) -> None:
    """Refuse variables with which a peer's ranks would not find each other.

    Raises:
        ConfigError: torchrun would not set them so.
    """
    rank, world_size = _number(environ, "RANK") or 0, _number(environ, "WORLD_SIZE", 1)
    local_rank, local_size = _number(environ, "LOCAL_RANK") or 0, _number(environ, "LOCAL_WORLD_SIZE", world_size)
    _number(environ, "MASTER_PORT")
    is_alone = (rank, world_size, local_rank) == (0, 1, 0)
    is_whole = all(environ.get(name) for name in RANK_VARIABLES if name != "LOCAL_WORLD_SIZE")
    if not is_alone and not (is_whole and rank < world_size and local_rank < local_size):
        raise ConfigError(
            f"{_shown(environ)}: torchrun sets {', '.join(RANK_VARIABLES)} together; start ranks with it, or one peer "
            f"per node with spes cluster, or unset RANK and WORLD_SIZE"
        )
    if founds and world_size == 1 and _number(environ, "SLURM_PROCID"):
        raise ConfigError(
            f"SLURM_PROCID={environ['SLURM_PROCID']}: each task of srun would found a run of its own; "
            f"start them with spes cluster, or set --initial-peers"
        )


def place_of(environ: Mapping[str, str], *, on_gpu: bool) -> Place:
    """Return a node's place in its job.

    SLURM's task and array numbers name it, or RANK, or else the machine's host name. NPROC_PER_NODE is the number of
    ranks; by default one per GPU that SLURM gives, or one.

    Raises:
        ConfigError: the variables contradict each other, or start several peers on a node.
    """
    rank, world_size = (_number(environ, name) for name in ("RANK", "WORLD_SIZE"))
    nodes = _number(environ, "SLURM_STEP_NUM_NODES") or _number(environ, "SLURM_JOB_NUM_NODES") or 1
    several = (_number(environ, "LOCAL_WORLD_SIZE") or 1) > 1 or _number(environ, "LOCAL_RANK")
    if several or (_number(environ, "SLURM_STEP_NUM_TASKS") or 1) > nodes:
        raise ConfigError(
            f"{_shown(environ)}: spes cluster starts a node's ranks itself; start one process per node (srun "
            f"--ntasks-per-node 1, torchrun --nproc-per-node 1), and set NPROC_PER_NODE to the number of ranks"
        )
    task, in_step = _number(environ, "SLURM_PROCID"), "SLURM_STEP_ID" in environ
    if "SLURM_JOB_ID" in environ:
        is_unclear = rank not in (None, task) if in_step else nodes > 1
    else:
        task = None
        is_unclear = rank is None and not environ.keys().isdisjoint(("WORLD_SIZE", "MASTER_ADDR"))
        is_unclear |= rank is not None and world_size is not None and rank >= world_size
    if is_unclear:
        raise ConfigError(
            f"{_shown(environ)}: which node is this? Set RANK to its number, from 0 to WORLD_SIZE - 1; in a SLURM job "
            f"unset RANK, and write srun before spes cluster"
        )
    numbers = (_number(environ, "SLURM_ARRAY_TASK_ID"), rank if task is None else task)
    name = "-".join(str(number) for number in numbers if number is not None)
    gpus, ranks = _number(environ, "SLURM_GPUS_ON_NODE") if on_gpu else None, _number(environ, "NPROC_PER_NODE")
    if ranks == 0 or (ranks and gpus and ranks > gpus):
        raise ConfigError(
            f"NPROC_PER_NODE={ranks} processes cannot form a peer; set it to 1 to {gpus or 'one per GPU'}"
        )
    return Place(name or re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname()), ranks or gpus or 1)


def _shown(environ: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={environ[name]}" for name in (*RANK_VARIABLES, *SLURM_VARIABLES) if name in environ)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> Any:
    """Return a variable's number, or `default` if it is not set.

    Raises:
        ConfigError: it is no number from 0 on.
    """
    text = environ.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigError(f"{name}={text!r} is no number from 0 on; set it to one, or unset it")
    return int(text)
