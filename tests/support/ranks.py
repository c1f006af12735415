"""Ranks of a process group as forks of one process that has imported the library, which takes longer than they do."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

PRELOADED = ["torch.distributed.fsdp", "transformers", "spes_p2p.training.build", "spes_p2p.sim.peer", "pytest"]


def run_ranks(main: Callable[..., None], args: tuple[Any, ...], num_ranks: int) -> None:
    """Run `main(rank, *args)` in as many processes on loopback, and raise what one of them raises.

    Forks of this process could not use autograd, which has started threads here.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(_run, args=(main, args), nprocs=num_ranks, start_method="forkserver")


def _run(rank: int, main: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the server has the environment of the first test
    main(rank, *args)
