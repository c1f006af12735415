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

from spes_p2p.errors import ConfigError

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torch.distributed reads."""
ONE_PER_NODE = "start one process per node"
UNSET = "unset RANK and WORLD_SIZE, or start one peer per node with spes cluster"


@dataclass(frozen=True)
class Place:
    """Where in a job a node's peer stands.

    Attributes:
        name: The node's name in the job; the same after a requeue on another machine.
        num_ranks: Processes of the peer.
    """

    name: str
    num_ranks: int


def check_ranks(environ: Mapping[str, str], *, founds: bool = False) -> None:
    """Refuse variables with which a peer's ranks would not find each other.

    Raises:
        ConfigError: torchrun would not set them so.
    """
    number = {name: _number(environ, name) for name in RANK_VARIABLES if name != "MASTER_ADDR"}
    rank, world_size, local_rank = number["RANK"], number["WORLD_SIZE"], number["LOCAL_RANK"]
    if world_size == 0:
        raise ConfigError(f"WORLD_SIZE=0: a peer has one rank or more; {UNSET}")
    if rank and world_size is None:
        raise ConfigError(f"RANK={rank} without WORLD_SIZE: a peer of one process has rank 0; {UNSET}")
    if rank is not None and world_size is not None and rank >= world_size:
        raise ConfigError(f"RANK={rank} does not fit WORLD_SIZE={world_size}, whose ranks begin with 0; {UNSET}")
    if (world_size or 1) > 1:
        if rank is None:
            raise ConfigError(f"WORLD_SIZE={world_size} without RANK: this process has no number; {UNSET}")
        if local_rank is None:
            raise ConfigError(
                f"WORLD_SIZE={world_size} without LOCAL_RANK: torchrun sets both, a scheduler counts nodes; {UNSET}"
            )
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]:
            raise ConfigError(f"WORLD_SIZE={world_size} without {missing[0]}: ranks meet there; {UNSET}")
    if local_rank is not None and local_rank >= (number["LOCAL_WORLD_SIZE"] or world_size or 1):
        raise ConfigError(
            f"LOCAL_RANK={local_rank} does not fit {number['LOCAL_WORLD_SIZE'] or world_size or 1} ranks on this "
            f"machine; unset LOCAL_RANK, or start the ranks with torchrun --nproc-per-node"
        )
    if founds and (world_size or 1) == 1 and (_number(environ, "SLURM_PROCID") or 0) > 0:
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
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    _check_launcher(environ)
    in_slurm = "SLURM_JOB_ID" in environ
    if in_slurm:
        _check_slurm(environ, rank)
    elif rank is None and (missing := next((name for name in ("WORLD_SIZE", "MASTER_ADDR") if name in environ), "")):
        raise ConfigError(
            f"{missing}={environ[missing]} without RANK: all nodes would have one number; "
            f"set RANK to this node's, 0 or more"
        )
    elif rank is not None and world_size is not None and rank >= world_size:
        raise ConfigError(
            f"RANK={rank} does not fit WORLD_SIZE={world_size}: nodes are counted from 0; set RANK to {world_size - 1} "
            f"or less, or WORLD_SIZE to the number of nodes"
        )
    task, array = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_ARRAY_TASK_ID")
    index = task if in_slurm and task is not None else rank
    parts = [str(part) for part in (array, index) if part is not None]
    name = "-".join(parts) or re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname())
    return Place(name, _num_ranks(environ, on_gpu=on_gpu))


def _check_launcher(environ: Mapping[str, str]) -> None:
    """Refuse a launcher that starts several processes on this node."""
    local_rank, local_size = _number(environ, "LOCAL_RANK"), _number(environ, "LOCAL_WORLD_SIZE")
    if (local_size or 1) > 1 or local_rank:
        shown = f"LOCAL_WORLD_SIZE={local_size}" if (local_size or 1) > 1 else f"LOCAL_RANK={local_rank}"
        raise ConfigError(
            f"{shown}: spes cluster starts a node's ranks itself; {ONE_PER_NODE} (torchrun --nproc-per-node 1), "
            f"and set NPROC_PER_NODE to the number of ranks"
        )


def _check_slurm(environ: Mapping[str, str], rank: int | None) -> None:
    """Refuse a SLURM job whose tasks are not one per node."""
    nodes = _number(environ, "SLURM_STEP_NUM_NODES") or _number(environ, "SLURM_JOB_NUM_NODES") or 1
    tasks, task = _number(environ, "SLURM_STEP_NUM_TASKS") or 1, _number(environ, "SLURM_PROCID")
    if "SLURM_STEP_ID" not in environ and nodes > 1:
        raise ConfigError(f"the job has {nodes} nodes, and this is no task of srun; write srun before spes cluster")
    if tasks > nodes:
        raise ConfigError(
            f"srun starts {tasks} tasks on {nodes} nodes; {ONE_PER_NODE} (--ntasks-per-node 1), and set NPROC_PER_NODE "
            f"to the number of ranks"
        )
    if rank is not None and task is not None and rank != task and "SLURM_STEP_ID" in environ:
        raise ConfigError(f"RANK={rank} and SLURM_PROCID={task} number this node differently; unset RANK")


def _num_ranks(environ: Mapping[str, str], *, on_gpu: bool) -> int:
    gpus = _number(environ, "SLURM_GPUS_ON_NODE") if on_gpu else None
    ranks = _number(environ, "NPROC_PER_NODE")
    if ranks == 0:
        raise ConfigError("NPROC_PER_NODE=0: a peer has one rank or more; set it to 1, or to the number of GPUs")
    if ranks is not None and gpus and ranks > gpus:
        raise ConfigError(f"NPROC_PER_NODE={ranks} exceeds SLURM_GPUS_ON_NODE={gpus}; set it to {gpus} or less")
    return ranks or gpus or 1


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """Return a variable's number; None if it is not set.

    Raises:
        ConfigError: it is no number from 0 on.
    """
    text = environ.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigError(f"{name}={text!r} is no number from 0 on; set it to one, or unset it")
    return int(text)
