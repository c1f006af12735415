"""Local steps of one peer: batches, ranks, the inner optimizer, and the set of slots it trains.

Shape legend: B sequences, T tokens per sequence.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import LongTensor, Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from spes_p2p.config import DataConfig, MachineConfig, TrainConfig, check_training, sequences_at_once
from spes_p2p.data.mixture import MixedSource
from spes_p2p.data.packing import TokenSource
from spes_p2p.data.shared import SharedOrder
from spes_p2p.errors import DataError
from spes_p2p.model.compiled import compile_parts
from spes_p2p.model.loss import TrainingLoss, num_targets
from spes_p2p.model.slot_model import SlotModel
from spes_p2p.optim.inner import InnerOptimizer
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.training.ranks import Ranks, give_back_freed, on_all_ranks


class SingleRank:
    """One process; the base of the ways in which ranks train together."""

    is_sharded = False
    """Whether each rank keeps only a shard of each parameter, so that all ranks must join to gather one."""

    def wrap(self, loss: TrainingLoss) -> nn.Module:
        """Return the module that computes the loss; called again after each change of slots."""
        return loss

    def accumulating(self, wrapped: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context in which gradients are not reduced over ranks."""
        return contextlib.nullcontext()

    def reset(self, wrapped: nn.Module) -> None:
        """Undo a forward pass that no backward pass follows."""


class DDP(SingleRank):
    """Every rank keeps all trained parameters, and gradients are averaged.

    DDP registers parameters when it is built, so it is built again after each change of slots.
    """

    def wrap(self, loss: TrainingLoss) -> nn.Module:
        with warnings.catch_warnings():  # torch 2.13 renames it, and has no other way yet to leave buffers alone
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            return DistributedDataParallel(loss, broadcast_buffers=False)

    def accumulating(self, wrapped: nn.Module) -> contextlib.AbstractContextManager[None]:
        assert isinstance(wrapped, DistributedDataParallel)
        return wrapped.no_sync()


class FSDP(SingleRank):
    """FSDP2: every rank keeps a shard of each parameter, of its gradient and of its optimizer state.

    A layer's trained parameters are gathered for its forward and backward pass. Frozen experts are not sharded.

    Source: PyTorch FSDP (https://arxiv.org/abs/2304.11277), `torch.distributed.fsdp.fully_shard`.

    Args:
        ranks: This peer's, connected.
    """

    is_sharded = True

    def __init__(self, ranks: Ranks) -> None:
        self._mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))

    def wrap(self, loss: TrainingLoss) -> nn.Module:
        module = loss.module
        for claimed in loss.slot_model.claimed_modules():
            # After a change of slots each is a root of its own, which stays gathered after a pass unless told.
            self._shard(claimed, reshard_after_forward=True)
        for layer in module.model.layers:
            self._shard(layer)
        self._shard(module)
        return loss

    def _shard(self, module: nn.Module, *, reshard_after_forward: bool | None = None) -> None:
        if not isinstance(module, FSDPModule) and any(True for _ in module.parameters()):
            fully_shard(module, mesh=self._mesh, reshard_after_forward=reshard_after_forward)

    @contextlib.contextmanager
    def accumulating(self, wrapped: nn.Module):
        assert isinstance(wrapped, TrainingLoss) and isinstance(wrapped.module, FSDPModule)
        wrapped.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            wrapped.module.set_requires_gradient_sync(True)

    def reset(self, wrapped: nn.Module) -> None:
        for part in wrapped.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # some keep their parameters gathered for a backward pass


ROUTING_BATCHES = 16
"""Batches of own data by whose routing slots are chosen."""
CALIBRATION_PASSES = 2
"""Passes over a microbatch, after the first, of which the last is measured."""
WARM_SECONDS = 1.0
"""A pass that lasts longer is measured, and the last, though it was the first."""


@dataclass(frozen=True)
class Step:
    """What one optimizer step did.

    Attributes:
        loss: Mean cross entropy of the batch, nats per token.
        tokens: Tokens trained on, over all ranks; 0 if the gradient was not finite and nothing was changed.
    """

    loss: float
    tokens: int


class Trainer:
    """Trains the shared parameters and the claimed slots of a model on all of a peer's ranks.

    Every rank draws the whole batch and takes its rows, and every loss is a mean over targets, weighted by their
    number, so that the result does not depend on how a batch is split over ranks and microbatches. The leader rank
    calls the methods; the other ranks have a trainer of the same settings, which obeys (`Ranks.obey`).

    Args:
        model: The model, on the CPU; moved to the ranks' device.
        data: Batches, in the same order on every rank.
        machine: How this machine computes; by default as the run says.

    Raises:
        ConfigError: the machine's choices cannot be combined, or the optimizer cannot work here.
    """

    def __init__(
        self,
        model: SlotModel,
        train: TrainConfig,
        data: TokenSource,
        ranks: Ranks,
        machine: MachineConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        machine = machine or MachineConfig()
        check_training(train, machine, ranks.world_size)
        self.model = model
        self.data = data
        self._train = train
        self.ranks = ranks
        self.clock = clock
        self._micro = sequences_at_once(train, machine, ranks.world_size)
        torch.nn.Module.to(model.module, ranks.device)
        if machine.activation_checkpointing:
            model.module.activation_checkpointing_enable({"use_reentrant": False})
        if machine.compile == "auto":
            compile_parts(model.module, ranks.device)
        self.layouts = model.layouts()
        self._loss = TrainingLoss(model, train)
        self._sharding = SingleRank() if ranks.world_size == 1 else DDP() if machine.shard == "ddp" else FSDP(ranks)
        self.is_sharded = self._sharding.is_sharded
        self._wrapped = self._sharding.wrap(self._loss)
        slots = {slot: model.slot_parameters(slot) for slot in model.claimed}
        self.optimizer = InnerOptimizer(
            model.shared_parameters(), slots, train, machine.inner_optimizer, machine.gradients
        )
        self.steps = 0

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots trained here, ascending."""
        return self.model.claimed

    def close(self) -> None:
        """Drop the DDP wrapper: its destructor may wait forever for a process group that has ended."""
        self._wrapped = self._loss

    # ------------------------------------------------------------------ steps

    @on_all_ranks()
    def step(self, lr: float, claimed_factor: float = 1.0) -> Step:
        """Train on one batch.

        Args:
            claimed_factor: SPES's factor on the claimed experts' counts in the balance loss.
        """
        tokens_BT1 = self.data.next_batch(self._train.batch_size)
        loss = self._backward(tokens_BT1, claimed_factor)
        targets = num_targets(tokens_BT1)
        is_stepped = targets > 0 and math.isfinite(self.optimizer.step(lr))  # decay alone is no step
        self.optimizer.zero_grad()
        self.steps += 1
        return Step(loss=self.ranks.mean(loss), tokens=targets if is_stepped else 0)

    def _backward(self, tokens_BT1: Tensor, claimed_factor: float) -> float:
        """Accumulate the batch's mean gradient; return this rank's share of its mean cross entropy."""
        micros = tokens_BT1[self.ranks.rank :: self.ranks.world_size].split(self._micro)
        num_on_average = max(num_targets(tokens_BT1), 1) / self.ranks.world_size
        # In double precision, as floats add up, and on the device: reading it would wait for each microbatch.
        loss = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for index, micro_BT1 in enumerate(micros):
            share = num_targets(micro_BT1) / num_on_average
            is_last = index == len(micros) - 1
            with contextlib.nullcontext() if is_last else self._sharding.accumulating(self._wrapped):
                parts = self._wrapped(micro_BT1.to(self.ranks.device), claimed_factor)
                (parts.total * share).backward()
            loss += parts.cross_entropy.double() * share
        return loss.item()

    def calibrate(self, *, measures: bool = True) -> tuple[float, float]:
        """Return the learned tokens, and all tokens, per second of forward and backward; model and data order stay.

        Args:
            measures: If False, only warm up, and return zeros.
        """
        state = self.data.state_dict()
        per_second = 0.0, 0.0
        for _ in range(1 + CALIBRATION_PASSES if measures else 1):
            started = self.clock()
            tokens_BT1 = self.data.next_batch(self._micro * self.ranks.world_size)
            self.warm_up(tokens_BT1)
            seconds = self.clock() - started
            per_second = max(num_targets(tokens_BT1), 1) / seconds, tokens_BT1[:, 1:].numel() / seconds
            if seconds > WARM_SECONDS:  # what a first use allocates and compiles is little of it
                break
        self.data.load_state_dict(state)
        return per_second if measures else (0.0, 0.0)

    @on_all_ranks()
    def warm_up(self, tokens_BT1: Tensor) -> None:
        """Run a forward and backward pass over sequences `[B, T + 1]`, and forget its gradients."""
        routed_E, self._loss.routed_E = self._loss.routed_E, None
        self._backward(tokens_BT1, 1.0)
        self.optimizer.zero_grad()
        self._loss.routed_E = routed_E

    @on_all_ranks(if_sharded=True)
    def loss_on(self, tokens_BT1: LongTensor) -> float:
        """Return the mean cross entropy of sequences `[B, T + 1]`, nats per token, without training."""
        routed_E, self._loss.routed_E = self._loss.routed_E, None
        parts = [(part, count) for part in tokens_BT1.split(self._micro) if (count := num_targets(part))]
        total = sum(count for _, count in parts)
        with torch.no_grad():
            loss = math.fsum(
                self._loss(part.to(self.ranks.device)).cross_entropy.item() * (count / total) for part, count in parts
            )
        self._sharding.reset(self._loss)
        self._loss.routed_E = routed_E
        return loss

    def routed_tokens(self) -> dict[int, int]:
        """Return the tokens that this rank has routed to each slot, over all layers, since the last call."""
        routed_E, self._loss.routed_E = self._loss.routed_E, None
        return dict(enumerate(routed_E.tolist())) if routed_E is not None else {}

    @on_all_ranks(if_sharded=True)
    def routing_of_data(self) -> dict[int, int]:
        """Return the tokens of the next batches that are routed to each slot; model and data order stay."""
        state, _ = self.data.state_dict(), self.routed_tokens()
        with torch.no_grad():
            for _ in range(ROUTING_BATCHES):
                for micro_BT1 in self.data.next_batch(self._train.batch_size).split(self._micro):
                    self._loss(micro_BT1.to(self.ranks.device))
        self.data.load_state_dict(state)
        self._sharding.reset(self._loss)
        return self.routed_tokens()

    @on_all_ranks()
    def deal(self, share: range, own: str) -> None:
        """Draw this share of shared data from now on, and then in the order of this name."""
        cast(SharedOrder, self.data).deal(share, own)

    @on_all_ranks()
    def amend(self, data: DataConfig) -> None:
        """Draw from a mixture by the weights in these settings from now on."""
        cast(MixedSource, self.data).amend(data)

    @on_all_ranks()
    def use_threads(self, num_threads: int) -> None:
        """Compute with so many CPU threads a rank from now on."""
        torch.set_num_threads(num_threads)

    @on_all_ranks()
    def give_back(self) -> None:
        """Return the memory that steps, or vectors that were loaded, have freed to the system."""
        give_back_freed()

    # ------------------------------------------------------------------ parameters

    @property
    def names(self) -> tuple[VectorName, ...]:
        """`shared` and the slots trained here."""
        return (SHARED, *map(VectorName.of_slot, self.slots))

    @on_all_ranks(if_sharded=True)
    def state_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's state for a checkpoint."""
        return self.optimizer.state_tensors()

    def random_state(self) -> dict[str, Tensor]:
        """Return the state of torch's generators: nothing draws from them today, but a kernel or a loss may."""
        device = self.ranks.device
        own = {"cpu": torch.get_rng_state()}
        return own if device.type == "cpu" else own | {"cuda": torch.cuda.get_rng_state(device)}

    @on_all_ranks()
    def restore(self, steps: int, data: Mapping[str, Any], random: Mapping[str, Tensor]) -> None:
        """Go on after so many steps, with this state of the data and of torch's generators."""
        self.steps = steps
        self.data.load_state_dict(dict(data))
        if "cpu" in random:
            torch.set_rng_state(random["cpu"])
        if "cuda" in random and self.ranks.device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"], self.ranks.device)

    @on_all_ranks("state")
    def load_state_tensors(self, state: Mapping[str, Tensor] | None) -> None:
        """Replace the optimizer's state by what `state_tensors` has returned.

        Raises:
            DataError: it is another optimizer's.
        """
        try:
            self.optimizer.load_state_tensors(dict(self.ranks.share(state)))
        except ValueError as error:
            raise DataError(
                f"the checkpoint's moments do not fit this optimizer ({error}); resume with the --inner-optimizer that "
                f"wrote them, or go on without them with --skip-optimizer"
            ) from error

    @on_all_ranks(if_sharded=True)
    def vector(self, name: VectorName) -> Tensor:
        """Return the current parameters of `shared` or of a trained slot as a flat fp32 CPU vector."""
        return self.layouts[name.kind].flatten(self._parameters(name))

    def _parameters(self, name: VectorName) -> Mapping[str, Tensor]:
        return self.model.shared_parameters() if name.slot is None else self.model.slot_parameters(name.slot)

    @on_all_ranks(if_sharded=True)
    def moments(self, name: VectorName, kinds: Sequence[str]) -> Tensor:
        """Return bias-corrected moments of these kinds, concatenated, flat on the CPU."""
        layout = self.layouts[name.kind]
        return torch.cat([layout.flatten(tensors) for tensors in self.optimizer.moments(name, kinds)])

    @on_all_ranks("vectors")
    def load(self, vectors: Mapping[VectorName, Tensor] | None) -> None:
        """Load flat vectors.

        Args:
            vectors: `shared`, any slots, trained here or frozen, and moments of what is trained here, in fp32; or the
                kept forms, uint8, of frozen slots.
        """
        for name, flat in self.ranks.share(vectors):
            group = name.weights
            layout = self.layouts[group.kind]
            if name != group:
                parts = flat.split(layout.numel)
                kinds = self.optimizer.kinds(group)[-len(parts) :]  # a single one is the last kind
                moments = {kind: layout.unflatten(part) for kind, part in zip(kinds, parts, strict=True)}
                self.optimizer.set_moments(group, moments)
            elif name.slot is None:
                self.model.load_shared(layout.unflatten(flat))
            elif flat.dtype == torch.uint8:
                self.model.load_kept(name.slot, flat)
            else:
                self.model.load_slot(name.slot, layout.unflatten(flat))
            del flat  # before the next is read

    @on_all_ranks("masters")
    def set_slots(self, slots: Iterable[int], masters: Mapping[VectorName, Tensor] | None) -> None:
        """Train these slots from now on.

        Args:
            masters: Flat fp32 weights of the slots that are new.
        """
        new, old = set(slots), set(self.slots)
        if new == old:
            return
        # With sharded parameters, all slots are sharded again, and their optimizer state must follow.
        renewed = old if self.is_sharded else old - new
        payloads = {slot: self.optimizer.remove_slot(slot) for slot in sorted(renewed)}
        if self.is_sharded:
            self.model.gather()
        for slot in sorted(old - new):
            self.model.release(slot)
        for name, flat in self.ranks.share(masters):
            assert name.slot is not None
            self.model.adopt(name.slot, self.layouts["slot"].unflatten(flat))
            del flat  # before the next is read
        assert set(self.slots) == new, f"masters of {sorted(new - old)} are needed"
        self._wrapped = self._sharding.wrap(self._loss)
        for slot in sorted((new - old) | (renewed & new)):
            self.optimizer.add_slot(slot, self.model.slot_parameters(slot), payloads.get(slot))
