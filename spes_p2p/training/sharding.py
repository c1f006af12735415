"""How a peer's ranks share the work: each with a copy of all that is trained, or each with a part of it."""

from __future__ import annotations

import contextlib
from typing import Literal, Protocol

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from spes_p2p.model.loss import TrainingLoss
from spes_p2p.training.process_group import ProcessGroup


class Sharding(Protocol):
    """One way in which ranks train together."""

    splits: bool
    """Whether each rank keeps only a part of what is trained, so that all must join in looking at the whole."""

    def wrap(self, loss: TrainingLoss) -> nn.Module:
        """Return what to call for the loss; called again whenever the slots have changed."""

    def accumulating(self, wrapped: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Within it, gradients stay this rank's own."""

    def settle(self, wrapped: nn.Module) -> None:
        """Be as before a forward pass that no backward pass has followed."""


class Alone:
    """One process."""

    splits = False

    def wrap(self, loss: TrainingLoss) -> nn.Module:
        return loss

    def settle(self, wrapped: nn.Module) -> None:
        pass

    def accumulating(self, wrapped: nn.Module) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Copies:
    """DDP: every rank keeps all that is trained, and gradients are averaged.

    DDP notices only the parameters it was built with, so it is built anew whenever the slots change.
    """

    splits = False

    def wrap(self, loss: TrainingLoss) -> nn.Module:
        return DistributedDataParallel(loss, broadcast_buffers=False)

    def accumulating(self, wrapped: nn.Module) -> contextlib.AbstractContextManager[None]:
        assert isinstance(wrapped, DistributedDataParallel)
        return wrapped.no_sync()

    def settle(self, wrapped: nn.Module) -> None:
        pass


class Parts:
    """FSDP2: every rank keeps a part of each parameter, of its gradient and of its optimizer state.

    What one layer trains is gathered for the layer's turn and dropped after it. Frozen experts are not split.

    Source: PyTorch FSDP (https://arxiv.org/abs/2304.11277), `torch.distributed.fsdp.fully_shard`.

    Args:
        group: This peer's ranks, connected.
    """

    splits = True

    def __init__(self, group: ProcessGroup) -> None:
        self._mesh = init_device_mesh(group.device.type, (group.world_size,))

    def wrap(self, loss: TrainingLoss) -> nn.Module:
        module = loss.module
        for claimed in loss.slot_model.claimed_modules():
            self._shard(claimed)
        for layer in module.model.layers:
            self._shard(layer)
        self._shard(module)
        return loss

    def _shard(self, module: nn.Module) -> None:
        if not isinstance(module, FSDPModule) and any(True for _ in module.parameters()):
            fully_shard(module, mesh=self._mesh)

    @contextlib.contextmanager
    def accumulating(self, wrapped: nn.Module):
        assert isinstance(wrapped, TrainingLoss) and isinstance(wrapped.module, FSDPModule)
        wrapped.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            wrapped.module.set_requires_gradient_sync(True)

    def settle(self, wrapped: nn.Module) -> None:
        for part in wrapped.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # some keep their parameters whole for a backward pass


def sharding_of(name: Literal["ddp", "fsdp"], group: ProcessGroup) -> Sharding:
    """Return the way to share the work of a peer's ranks.

    Args:
        name: As the machine's settings have it; nothing is shared by one rank alone.
        group: This peer's ranks, connected.
    """
    if group.world_size == 1:
        return Alone()
    return Copies() if name == "ddp" else Parts(group)
