"""What a peer saves of each round, and restores after a restart."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from spes_p2p.codecs.paged import PagedVector
from spes_p2p.swarm.names import SHARED
from spes_p2p.training.checkpoint import PeerCheckpoint, PeerState, Saved
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
        trainer: The leader's.
        sync: The connection to the swarm.
    """

    def __init__(self, checkpoint: PeerCheckpoint | None, trainer: Trainer, sync: Synchroniser) -> None:
        self._checkpoint = checkpoint
        self._trainer = trainer
        self._sync = sync

    def save(self, round: int, steps: int, total_tokens: int, data: Mapping[str, object], *, is_last: bool) -> None:
        """Start to save a committed round, unless the previous save is still under way.

        The last round, and one whose checkpoint is kept for ever, wait for that.
        """
        checkpoint = self._checkpoint
        if checkpoint is None:
            return
        timeout = LAST_SECONDS if is_last or checkpoint.is_kept(round) else 0.0
        if not checkpoint.wait(timeout):
            return
        moments = self._trainer.state_tensors()  # copies
        swarm = self._sync.swarm
        versions = tuple(swarm.versions().values())
        state = PeerState(self._sync.held.run_id, round, self._trainer.slots, steps, total_tokens, data, versions)
        tensors: dict[str, Tensor | PagedVector] = {f"{MOMENTS}{name}": tensor for name, tensor in moments.items()}
        tensors |= {f"{RESIDUALS}{name}": residual for name, residual in swarm.residuals().items()}
        tensors |= {f"{RANDOM}{name}": tensor for name, tensor in self._trainer.random_state().items()}
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
        self._trainer.restore(saved.state.steps, saved.state.data, _under(RANDOM, saved.tensors))
        if saved.skips_optimizer:
            return
        moments = _under(MOMENTS, saved.tensors)
        self._trainer.load_state_tensors({k: m for k, m in moments.items() if k.split("/")[0] in self._trainer.names})
        saved_digests = {version.name: version.digest for version in saved.state.versions}
        versions = self._sync.swarm.versions()
        if versions[SHARED].digest == saved_digests.get(SHARED):
            self._sync.swarm.restore_residuals(_under(RESIDUALS, saved.tensors))


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
