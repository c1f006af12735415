"""The swarm's whole model, put together from published versions."""

from __future__ import annotations

import torch
from torch import Tensor

from spes_p2p.codecs import Layout
from spes_p2p.config import RunConfig
from spes_p2p.model.build import build_slot_model
from spes_p2p.swarm.base import Swarm
from spes_p2p.swarm.roster import SHARED, slot_name


class WholeModel:
    """Every parameter in fp32, at first as the run's seed draws it: the anchor of round 0.

    Args:
        run: The run's settings.
        vocab_size: Entries of the run's tokenizer.
        device: Where it lies.
    """

    def __init__(self, run: RunConfig, vocab_size: int, device: torch.device | None = None) -> None:
        self._num_slots = run.model.num_experts
        self._model = build_slot_model(
            run.model,
            vocab_size=vocab_size,
            sequence_length=run.data.sequence_length,
            seed=run.seed,
            claimed=(),
            storage="fp32",
        )
        self.module = torch.nn.Module.to(self._model.module, device)
        self._layouts = {SHARED: Layout(self._model.shared_shapes()), "slot": Layout(self._model.slot_shapes())}

    @property
    def numels(self) -> dict[str, int]:
        """Elements of the weights of `shared` and of a `slot`."""
        return {kind: layout.numel for kind, layout in self._layouts.items()}

    def load(self, swarm: Swarm) -> dict[int, int]:
        """Load the versions that a peer has, and return each slot's round; slots that it lacks stay, and have round 0.

        Raises:
            ExchangeError: it lacks `shared`, or a file is damaged.
        """
        versions = swarm.versions()
        slots = [slot for slot in range(self._num_slots) if slot_name(slot) in versions]
        flats = {name: swarm.load(name) for name in [SHARED, *map(slot_name, slots)]}
        self._model.load_shared(self._unflatten(SHARED, flats[SHARED]))
        for slot in slots:
            self._model.load_slot(slot, self._unflatten("slot", flats[slot_name(slot)]))
        return {slot: versions[slot_name(slot)].round if slot in slots else 0 for slot in range(self._num_slots)}

    def _unflatten(self, kind: str, bundle_N: Tensor) -> dict[str, Tensor]:
        return self._layouts[kind].unflatten(bundle_N[: self._layouts[kind].numel])

    def stock_state_dict(self) -> dict[str, Tensor]:
        """Return a snapshot under the stock class's names; see `SlotModel.stock_state_dict`."""
        return self._model.stock_state_dict()
