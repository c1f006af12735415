"""What a peer saves of each round, and restores after a restart; on all ranks together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spes_p2p.codecs.paged import PagedVector
from spes_p2p.errors import DataError
from spes_p2p.swarm.names import SHARED
from spes_p2p.training.checkpoint import PeerCheckpoint, PeerState, Saved
from spes_p2p.training.process_group import ProcessGroup
from spes_p2p.training.synchroniser import Synchroniser
from spes_p2p.training.trainer import Trainer

LAST_SECONDS = 120.0
"""Longest that a peer that has ended waits for its last save."""
MOMENTS = "moments/"
RESIDUALS = "remainders/"
RANDOM = "random/"


class Checkpointer:
    """Saves a peer's state after a round, and restores it.

    Args:
        checkpoint: Where to; None saves nothing.
        trainer: This rank's share of the training.
        group: The peer's ranks.
        sync: The leader's connection to the swarm; None on other ranks.
    """

    def __init__(
        self,
        checkpoint: PeerCheckpoint | None,
        trainer: Trainer,
        group: ProcessGroup,
        sync: Synchroniser | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._trainer = trainer
        self._group = group
        self._sync = sync

    def save(self, round: int, steps: int, total_tokens: int, data: Mapping[str, object], *, is_last: bool) -> None:
        """Start to save a committed round, unless the previous save is still under way.

        The last round, and one whose checkpoint is kept for ever, wait for that.
        """
        checkpoint = self._checkpoint
        if checkpoint is None:
            return
        timeout = LAST_SECONDS if is_last or checkpoint.is_kept(round) else 0.0
        if not self._group.from_leader(lambda: checkpoint.wait(timeout)):
            return
        moments = self._trainer.state_tensors()  # copies
        if self._sync is None:
            return
        swarm = self._sync.swarm
        versions = tuple(swarm.versions().values())
        state = PeerState(self._sync.held.run_id, round, self._trainer.slots, steps, total_tokens, data, versions)
        tensors: dict[str, Tensor | PagedVector] = {f"{MOMENTS}{name}": tensor for name, tensor in moments.items()}
        tensors |= {f"{RESIDUALS}{name}": residual for name, residual in swarm.residuals().items()}
        tensors |= {f"{RANDOM}{name}": tensor for name, tensor in self._random_state().items()}
        checkpoint.save(state, tensors)

    def close(self) -> None:
        """Let a save under way end."""
        if self._checkpoint is not None:
            self._checkpoint.wait(LAST_SECONDS)

    def restore(self, saved: Saved) -> None:
        """Continue from a checkpoint, after the model was brought to the swarm's state.

        Args:
            saved: The checkpoint; moments of slots that are no longer held are left out.
        """
        self._trainer.steps = saved.state.steps
        self._trainer.data.load_state_dict(dict(saved.state.data))
        self._load_random_state(_under(RANDOM, saved.tensors))
        if saved.skips_optimizer:
            return
        moments = _under(MOMENTS, saved.tensors)
        self.load_moments({key: m for key, m in moments.items() if key.split("/")[0] in self._trainer.names})
        if self._sync is not None:
            saved_digests = {version.name: version.digest for version in saved.state.versions}
            versions = self._sync.swarm.versions()
            if versions[SHARED].digest == saved_digests.get(SHARED):
                self._sync.swarm.restore_residuals(_under(RESIDUALS, saved.tensors))

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Put saved moments into the optimizer.

        Raises:
            DataError: they are another optimizer's.
        """
        try:
            self._trainer.optimizer.load_state_tensors(moments)
        except ValueError as error:
            raise DataError(
                f"the checkpoint's moments do not fit this optimizer ({error}); resume with the --inner-optimizer that "
                f"wrote them, or go on without them with --skip-optimizer"
            ) from error

    def _random_state(self) -> dict[str, Tensor]:
        """Return the state of torch's generators: nothing draws from them today, but a kernel or a loss may."""
        device = self._group.device
        own = {"cpu": torch.get_rng_state()}
        return own if device.type == "cpu" else own | {"cuda": torch.cuda.get_rng_state(device)}

    def _load_random_state(self, states: Mapping[str, Tensor]) -> None:
        device = self._group.device
        if "cpu" in states:
            torch.set_rng_state(states["cpu"])
        if "cuda" in states and device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], device)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
