"""The local processes of one peer: the leader rank runs the program, and the others do what its trainer does.

A method of the trainer that needs all ranks is marked `on_all_ranks`. The leader's call of it is repeated by `obey` on
every other rank, so the code that calls it reads as that of one process. With one rank it is a plain call.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from spes_p2p.errors import ConfigError, SpesError

log = logging.getLogger(__name__)
Name = TypeVar("Name", bound=str)
Method = TypeVar("Method", bound=Callable[..., Any])

COLLECTIVE_TIMEOUT = datetime.timedelta(hours=2)
"""Longest that a rank waits for a collective operation."""
LEADER_TIMEOUT = datetime.timedelta(weeks=52)
"""Longest that a rank waits for the leader, which waits for the swarm while it is unreachable. A leader that has
died is noticed at once: its connections break, and `torchrun` ends the other ranks."""
SHARED_AT_ONCE = 2**26
"""Elements of a vector that go to the other ranks at once."""
NVIDIA_DRIVER = "/proc/driver/nvidia/version"
"""Exists where NVIDIA's driver is loaded."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's `malloc.h`."""
LARGE_BYTES = 2**25
"""Blocks from this size on go back to the system as soon as they are freed, as large tensors of real models should.
32 MiB is the most that mallopt(3) promises to take."""
LEAST_MAPPED_BYTES = 2**17
"""The same while a model is read."""


def keep_freed() -> None:
    """Keep what a training step frees for the next step, until `give_back_freed`.

    glibc would give it back after each step, and the next step would fault each page in again: ten thousand faults, and
    an eighth of the time of a step of the local experiment.
    """
    if (mallopt := _glibc("mallopt")) is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


@contextlib.contextmanager
def freed_at_once() -> Iterator[None]:
    """Return what the block frees to the system at once.

    Reading a model allocates and frees each weight in its stored precision, between those that stay: half as much again
    as what stays would remain with the process.
    """
    if (mallopt := _glibc("mallopt")) is not None:
        mallopt(M_MMAP_THRESHOLD, LEAST_MAPPED_BYTES)
    try:
        yield
    finally:
        keep_freed()


def give_back_freed() -> None:
    """Return this process's freed memory to the system."""
    if (trim := _glibc("malloc_trim")) is not None:
        trim(0)


def _glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


@functools.cache  # a peer looks for its device several times
def _warn_of_unused_gpu() -> None:
    if torch.version.cuda is None:
        why = "is a build without CUDA; install one with it, see https://pytorch.org"
    else:
        why = (
            f"was built for CUDA {torch.version.cuda}, which the driver does not run; update the driver, or install "
            f"PyTorch for an older CUDA, see https://pytorch.org"
        )
    said = "this machine has an NVIDIA GPU, but training is on the CPU (docs/trouble.md#gpu): PyTorch %s %s"
    log.warning(said, torch.__version__, why)


class Ranks:
    """A peer's ranks, started by `torchrun`, or this process alone.

    Args:
        device: "auto", "cpu" or "cuda".

    Raises:
        ConfigError: "cuda" where there is none, or more ranks than GPUs.
    """

    def __init__(self, device: str = "auto") -> None:
        keep_freed()
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device=cuda, but PyTorch finds no CUDA device; set --device cpu (docs/trouble.md#gpu)")
        use_cuda = device != "cpu" and torch.cuda.is_available()
        if device == "auto" and not use_cuda and Path(NVIDIA_DRIVER).exists():
            _warn_of_unused_gpu()
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if use_cuda and 0 < local_rank >= (num_gpus := torch.cuda.device_count()):
            raise ConfigError(
                f"LOCAL_RANK={local_rank} needs {local_rank + 1} GPUs, and PyTorch finds {num_gpus}; start fewer ranks"
            )
        self.device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
        self._words: dist.ProcessGroup | None = None
        self._are_listening = False

    @property
    def is_leader(self) -> bool:
        """Rank 0: the only one on the network."""
        return self.rank == 0

    def connect(self) -> None:
        """Join the other ranks; after everything that forks, because forks and GPU contexts do not mix."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.device)  # NCCL and FSDP take the current device, which is GPU 0 on every rank
        if self.world_size > 1:
            device_id = self.device if on_gpu else None
            dist.init_process_group("nccl" if on_gpu else "gloo", timeout=COLLECTIVE_TIMEOUT, device_id=device_id)
            # On the CPU: a GPU that waits for a message would be busy all the time.
            self._words = dist.new_group(backend="gloo", timeout=LEADER_TIMEOUT)

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """End the other ranks as the leader's block ends: without an error, or with the same one.

        After an error of another kind they notice that the connection breaks.
        """
        self._are_listening = self.world_size > 1
        try:
            yield
        except (SpesError, KeyboardInterrupt) as error:
            self._end(error if isinstance(error, SpesError) else KeyboardInterrupt())
            raise
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        # A rank that has met the same error has ended. One that waits for half a message must not take this for it.
        if self._are_listening:
            with contextlib.suppress(RuntimeError):
                self.say(error)

    def obey(self, trainer: Any) -> None:
        """Do on this rank with its trainer what the leader does with its own, until the leader ends.

        Raises:
            SpesError, KeyboardInterrupt: what has ended the leader.
        """
        while (command := self.hear()) is not None:
            method, arguments = command
            getattr(trainer, method)(**arguments)

    def say(self, message: object) -> None:
        """Send a message to the ranks that `hear` it: an exception to be raised, a command, or None to end them."""
        if self.world_size > 1 and self.is_leader:
            self._are_listening = False
            dist.broadcast_object_list([message], src=0, group=self._words)
            self._are_listening = message is not None and not isinstance(message, BaseException)

    def hear(self) -> Any:
        """Return the leader's next message, however long that takes; raise it if it is an exception."""
        messages: list[Any] = [None]
        dist.broadcast_object_list(messages, src=0, group=self._words)
        if isinstance(messages[0], BaseException):
            raise messages[0]
        return messages[0]

    def share(self, tensors: Mapping[Name, Tensor] | None) -> Iterator[tuple[Name, Tensor]]:
        """Yield the leader's CPU tensors on every rank, one at a time; all ranks must take all of them.

        Args:
            tensors: May read each tensor when it is asked for; None on other ranks.

        Raises:
            SpesError: what reading a tensor raised, on every rank.
        """
        if not self.is_leader:
            for name in self.hear():
                shape, dtype = self.hear()
                yield name, self._broadcast(torch.empty(shape, dtype=dtype))
            return
        assert tensors is not None
        self.say(list(tensors))
        for name in tensors:
            try:
                tensor = tensors[name]
            except SpesError as error:
                self.say(error)
                raise
            self.say((tensor.shape, tensor.dtype))
            yield name, self._broadcast(tensor)

    def _broadcast(self, tensor: Tensor) -> Tensor:
        # In pieces: a GPU that holds a shard of the model may lack room for all of it.
        for piece in tensor.reshape(-1).split(SHARED_AT_ONCE) if self.world_size > 1 else ():
            on_device = piece.to(self.device)
            dist.broadcast(on_device, src=0)
            if not self.is_leader:
                piece.copy_(on_device)
        return tensor

    def mean(self, value: float) -> float:
        """Return the mean of a number over ranks."""
        if self.world_size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item() / self.world_size

    def close(self) -> None:
        """Leave the group. Idempotent."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def on_all_ranks(*kept: str, if_sharded: bool = False) -> Callable[[Method], Method]:
    """Make the leader's call of a trainer's method run on all of its `ranks`.

    Args:
        kept: Arguments that stay with the leader; other ranks get None, and may `share` the leader's.
        if_sharded: Whether other ranks are needed only if each keeps a shard of the parameters (`is_sharded`).
    """

    def wrap(method: Method) -> Method:
        names = tuple(inspect.signature(method).parameters)[1:]

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_sharded or not if_sharded:
                given = {**dict(zip(names, args, strict=False)), **kwargs}
                self.ranks.say((method.__name__, given | {name: None for name in kept}))
            return method(self, *args, **kwargs)

        return cast(Method, call)

    return wrap
