"""From a run's settings to one peer's trainer and synchroniser, and from published versions to the whole model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from spes_p2p.codecs.kept import KeptForm
from spes_p2p.codecs.vectors import Layout, LazyVectors, digest
from spes_p2p.config import AdapterStart, MachineConfig, RunConfig, check_machine
from spes_p2p.data.packing import TokenSource
from spes_p2p.errors import ConfigError, ExchangeError
from spes_p2p.model.adapted import Base, InitialFactors, build_adapted, outline_adapted
from spes_p2p.model.base_files import BaseLayout, encode_base
from spes_p2p.model.build import InitialWeights, build_slot_model, outline
from spes_p2p.model.peft_files import AdapterFiles
from spes_p2p.model.slot_model import SlotModel
from spes_p2p.model.start import NO_DIGEST, StartWeights, another_checkpoint
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.training.anchors import Anchors, start_digests
from spes_p2p.training.ranks import Ranks, freed_at_once
from spes_p2p.training.slots import HeldSlots
from spes_p2p.training.synchroniser import Synchroniser
from spes_p2p.training.trainer import Trainer


def build_trainer(
    run: RunConfig,
    vocab_size: int,
    data: TokenSource,
    ranks: Ranks,
    *,
    machine: MachineConfig | None = None,
    clock: Callable[[], float] = time.monotonic,
    base: Base | None = None,
) -> Trainer:
    """Return a trainer of the run's model, which holds no slot yet and no weights: `TrainingLoop.open` loads them.

    Args:
        base: The frozen weights under the run's adapters, if it has any.

    Raises:
        ConfigError: this machine cannot compute so.
        DataError: the base is damaged.
    """
    machine = machine or MachineConfig()
    check_machine(run, machine, ranks.world_size)
    storage = machine.storage or run.frozen_storage
    if run.adapter is not None:
        assert base is not None
        with freed_at_once():
            model = build_adapted(
                run, base, vocab_size=vocab_size, storage=storage, attention=machine.attention, device=ranks.device
            )
    else:
        model = build_slot_model(
            run.model,
            vocab_size=vocab_size,
            sequence_length=run.data.sequence_length,
            seed=None,
            claimed=(),
            storage=storage,
            kernel=machine.kernel,
            attention=machine.attention,
            device=ranks.device,
        )
    return Trainer(model, run.train, data, ranks, machine, clock=clock)


def build_synchroniser(
    swarm: HivemindSwarm,
    run: RunConfig,
    trainer: Trainer,
    *,
    run_id: str,
    max_slots: int,
    machine: MachineConfig | None = None,
) -> Synchroniser:
    """Return a synchroniser without anchors or claims, in the trainer's time."""
    machine = machine or MachineConfig()
    anchors = Anchors(run, {kind: layout.numel for kind, layout in trainer.layouts.items()})
    vocab_size = trainer.model.config.vocab_size

    @cache
    def drawn() -> LazyVectors[VectorName]:
        return build_initial(run, vocab_size, anchors, trainer.layouts)

    holdings = HeldSlots(
        swarm,
        run,
        run_id=run_id,
        anchors=anchors,
        max_slots=max_slots,
        refresh_slots=machine.refresh_slots,
        draw=(lambda name: drawn()[name]) if not start_digests(run) else None,
        clock=trainer.clock,
    )
    return Synchroniser(swarm, run, held=holdings, anchors=anchors, layout=trainer.layouts["slot"], machine=machine)


def build_initial(
    run: RunConfig, vocab_size: int, anchors: Anchors, layouts: Mapping[str, Layout]
) -> LazyVectors[VectorName]:
    """Return the bundles of a run that starts from its seed, drawn when they are asked for; the same on every peer."""
    weights: InitialFactors | InitialWeights = (
        InitialWeights(run.model, vocab_size, run.data.sequence_length, run.seed)
        if run.adapter is None
        else InitialFactors(outline_adapted(run, vocab_size), run.seed)
    )
    names = (SHARED, *map(VectorName.of_slot, range(run.num_slots)))
    return LazyVectors(names, lambda name: anchors.bundle(layouts[name.kind].flatten(weights.read(name.slot))))


def outline_of(run: RunConfig, vocab_size: int) -> SlotModel:
    """Return the outline of what a run trains: of its model, or of the model's adapters."""
    if run.adapter is not None:
        return outline_adapted(run, vocab_size)
    return outline(run.model, vocab_size, run.data.sequence_length)


class StartBundles(LazyVectors[VectorName]):
    """The bundles of a run that starts from a checkpoint, each read from the disk when it is asked for, and verified.

    Of a run with adapters they are those of an adapter's folder.

    Raises:
        ConfigError: the run starts from no checkpoint, or the adapter does not fit it.
        DataError: the checkpoint is damaged.
    """

    def __init__(self, run: RunConfig, vocab_size: int, source: Path) -> None:
        if run.model.start is None:
            raise ConfigError(f"this run starts from no checkpoint, but from its seed; drop --from {source}")
        model = outline_of(run, vocab_size)
        self._source = source
        self._layouts = model.layouts()
        self.anchors = Anchors(run, {kind: layout.numel for kind, layout in self._layouts.items()})
        self._digests = {name: each for name, each in start_digests(run).items() if not name.is_kept}
        self._weights: AdapterFiles | StartWeights = (
            StartWeights(source, model) if run.adapter is None else AdapterFiles(source, model, run)
        )
        super().__init__(self._digests, self._verified)

    def _verified(self, name: VectorName) -> Tensor:
        bundle_N = self.read(name)
        if digest(bundle_N) != self._digests[name]:  # guard: never
            raise another_checkpoint(self._source, name)
        return bundle_N

    def check(self) -> None:
        """Read all bundles, which verifies them."""
        for name in self:
            self[name]

    def read(self, name: VectorName) -> Tensor:
        """Return a bundle unverified."""
        return self.anchors.bundle(self._layouts[name.kind].flatten(self._weights.read(name.slot)))


def with_digests(run: RunConfig, vocab_size: int, source: Path, hub_name: str | None = None) -> RunConfig:
    """Return a run's settings with the digests of the weights of the checkpoint that it starts from.

    Memory holds one bundle at a time, or one document of an adapters' base.

    Args:
        run: Settings with the checkpoint's model, as `model_of` returns it.
        hub_name: The checkpoint on the hub, with its commit.

    Raises:
        ConfigError: the tokenizer has more entries than the model, or sequences are longer than it allows.
        DataError: the checkpoint is missing or damaged.
    """
    assert run.model.start is not None
    kept: list[str] = []
    if run.adapter is None:
        shared, slots, kept = _digests_of(run, vocab_size, source)
    else:
        base = StartWeights(source, outline(run.model, vocab_size, run.data.sequence_length))
        layout = BaseLayout(run, vocab_size)
        shared, *slots = (digest(encode_base(base, layout, slot)) for slot in (None, *range(run.model.num_experts)))
    start = run.model.start.model_copy(update={"shared": shared, "slots": slots, "kept": kept, "source": hub_name})
    return run.model_copy(update={"model": run.model.model_copy(update={"start": start})})


def with_adapter(run: RunConfig, vocab_size: int, source: Path) -> RunConfig:
    """Return a run's settings with the digests of the adapter that it goes on from.

    Args:
        run: Settings with `adapter` and a base.
        source: Folder of the adapter, in peft's layout.

    Raises:
        ConfigError: the adapter is of another base, or of a kind that a run cannot go on from.
        DataError: it is missing or damaged.
    """
    assert run.adapter is not None
    none = AdapterStart(shared=NO_DIGEST, slots=[NO_DIGEST] * run.num_slots)
    shared, slots, _ = _digests_of(_starting(run, none), vocab_size, source)
    return _starting(run, AdapterStart(shared=shared, slots=slots))


def _starting(run: RunConfig, start: AdapterStart) -> RunConfig:
    assert run.adapter is not None
    return run.model_copy(update={"adapter": run.adapter.model_copy(update={"start": start})})


def _digests_of(run: RunConfig, vocab_size: int, source: Path) -> tuple[str, list[str], list[str]]:
    """Return the digests of the shared bundle, of each slot's, and of the slots' kept forms, if the run has such."""
    slots: list[str] = []
    kept: list[str] = []
    bundles = StartBundles(run, vocab_size, source)
    shared = digest(bundles.read(SHARED))
    for name in map(VectorName.of_slot, range(run.num_slots)):
        bundle_N = bundles.read(name)
        slots.append(digest(bundle_N))
        if bundles.anchors.form is not None:
            kept.append(digest(bundles.anchors.kept_form(name, bundle_N)))
    return shared, slots, kept


class WholeModel:
    """The whole model in fp32, initially as the run's seed draws it: the anchor of round 0.

    Args:
        base: The frozen weights under the run's adapters, if it has any; held in `adapter.base`.
    """

    def __init__(
        self, run: RunConfig, vocab_size: int, device: torch.device | None = None, base: Base | None = None
    ) -> None:
        self._num_slots = run.num_slots
        self._starts_from_checkpoint = bool(start_digests(run))
        if run.adapter is None:
            self._model = build_slot_model(
                run.model,
                vocab_size=vocab_size,
                sequence_length=run.data.sequence_length,
                seed=run.seed,
                claimed=(),
                storage="fp32",
            )
        else:
            assert base is not None
            with freed_at_once():
                self._model = build_adapted(run, base, vocab_size=vocab_size, storage=run.adapter.base)
            initial = InitialFactors(self._model, run.seed)
            self._model.load_shared(initial.read(None))
            for slot in range(self._num_slots):
                self._model.load_slot(slot, initial.read(slot))
        self.module = torch.nn.Module.to(self._model.module, device)
        self._layouts = self._model.layouts()
        self._form = KeptForm(run.kept_form, self._layouts["slot"].numel) if run.kept_form is not None else None

    @property
    def numels(self) -> dict[str, int]:
        """Elements of the weights of `shared` and of a `slot`."""
        return {kind: layout.numel for kind, layout in self._layouts.items()}

    def load(self, versions: Mapping[str, Version], read: Callable[[VectorName], Tensor]) -> dict[int, int]:
        """Load a peer's versions, of slots the newer of fp32 and kept form; return each slot's round.

        It is 0 for slots without a version.

        Args:
            versions: The newest of each name.
            read: Returns the values of one, or the bytes of a kept form.

        Raises:
            ExchangeError: it lacks `shared`, or a slot of a run that starts from a checkpoint, or a file is damaged.
        """
        names = {slot: VectorName.of_slot(slot) for slot in range(self._num_slots)}
        forms = {
            slot: max((form for form in (name, name.kept) if form in versions), key=lambda form: versions[form].round)
            for slot, name in names.items()
            if name in versions or name.kept in versions
        }
        if self._starts_from_checkpoint and len(forms) < self._num_slots:  # guard: never
            raise ExchangeError(f"{self._num_slots - len(forms)} slots have no version yet, not even of round 0")
        vectors = {name: read(name) for name in [SHARED, *forms.values()]}
        self._model.load_shared(self._unflatten(SHARED, vectors[SHARED]))
        for slot, form in forms.items():
            found = vectors[form]
            if form.is_kept:
                assert self._form is not None
                found = self._form.values(found)
            self._model.load_slot(slot, self._unflatten("slot", found))
        return {slot: versions[forms[slot]].round if slot in forms else 0 for slot in range(self._num_slots)}

    def _unflatten(self, kind: str, bundle_N: Tensor) -> dict[str, Tensor]:
        return self._layouts[kind].unflatten(bundle_N[: self._layouts[kind].numel])
