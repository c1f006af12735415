"""Between a peer's rounds and its checkpoints: what is saved of them, and taken up again; all ranks together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spes_p2p.errors import DataError
from spes_p2p.swarm.roster import SHARED, moments_name, slot_name
from spes_p2p.training.checkpoint import PeerCheckpoint, PeerState, Saved
from spes_p2p.training.process_group import ProcessGroup
from spes_p2p.training.round_work import StateUpdate
from spes_p2p.training.synchroniser import Synchroniser
from spes_p2p.training.trainer import Trainer

LAST_SECONDS = 120.0
"""Longest a peer that has ended stays for its last save."""
MOMENTS, REMAINDERS, RANDOM = "moments/", "remainders/", "random/"


class Checkpointer:
    """Saves where a peer stands, and puts it back there.

    Args:
        checkpoint: Where to; None saves nothing.
        run_id: The run's name.
        trainer: This rank's share of the training.
        group: The peer's ranks.
        sync: The leader's dealings with the swarm; None on other ranks.
    """

    def __init__(
        self,
        checkpoint: PeerCheckpoint | None,
        run_id: str,
        trainer: Trainer,
        group: ProcessGroup,
        sync: Synchroniser | None,
    ) -> None:
        self._checkpoint, self._run_id = checkpoint, run_id
        self._trainer, self._group, self._sync = trainer, group, sync

    def save(self, round: int, steps: int, total_tokens: int, data: Mapping[str, object], *, is_last: bool) -> None:
        """Begin to save a committed round, unless the save before is still under way; the last one waits for that.

        Args:
            round: That was committed.
            steps: Local steps when it ended.
            total_tokens: RoundWork by then.
            data: State of the token source then.
            is_last: No other follows.
        """
        checkpoint, patience = self._checkpoint, LAST_SECONDS if is_last else 0.0
        if checkpoint is None or not self._group.from_leader(lambda: checkpoint.wait(patience)):
            return
        moments = self._trainer.state_tensors()  # copies
        if self._sync is None:
            return
        swarm = self._sync.swarm
        versions = tuple(swarm.versions().values())
        state = PeerState(self._run_id, round, self._trainer.slots, steps, total_tokens, data, versions)
        tensors = {f"{MOMENTS}{name}": tensor for name, tensor in moments.items()}
        tensors |= {f"{REMAINDERS}{name}": tensor for name, tensor in swarm.residuals().items()}
        tensors |= {f"{RANDOM}{name}": tensor for name, tensor in self._random_state().items()}
        checkpoint.save(state, tensors)

    def close(self) -> None:
        """Let a save under way end."""
        if self._checkpoint is not None:
            self._checkpoint.wait(LAST_SECONDS)

    def take_up(self, saved: Saved, update: StateUpdate) -> None:
        """Go on from a checkpoint, after the model was brought to the swarm's state.

        Args:
            saved: The checkpoint; moments of slots no longer held are left out.
            update: What the model was brought to.
        """
        self._trainer.steps = saved.state.steps
        self._trainer.data.load_state_dict(dict(saved.state.data))
        groups = (SHARED, *map(slot_name, self._trainer.slots))
        moments = _under(MOMENTS, saved.tensors)
        self.load_moments({name: tensor for name, tensor in moments.items() if name.split("/")[0] in groups})
        self._load_random_state(_under(RANDOM, saved.tensors))
        newer: dict[str, Tensor] = {}
        if self._sync is not None:
            here = {version.name: version.digest for version in saved.state.versions}
            there = self._sync.swarm.versions()
            if there[SHARED].digest == here.get(SHARED):
                self._sync.swarm.restore_residuals(_under(REMAINDERS, saved.tensors))
            # What the swarm has averaged since is worth more than this peer's own; not what a round had made that is
            # made again. Of a slot that has fallen to this peer since, it had none.
            own = {moments_name(name.split("/")[0]) for name in moments}
            newer = {
                n: flat
                for n, flat in update.vectors.items()
                if n.startswith("moments-")
                and (n not in own or (there[n].digest != here.get(n) and there[n].round <= there[SHARED].round))
            }
        self._trainer.load(newer if self._sync is not None else None)

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
                f"wrote them, or delete the checkpoint's folder to go on without them"
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
