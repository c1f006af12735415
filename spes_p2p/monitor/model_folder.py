"""The model of any round that a peer's or a monitor's folder keeps, written as a Hugging Face checkpoint.

The folder is only read: nothing here needs a swarm, and the folder's peer may go on meanwhile.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
import torch
from jinja2 import Environment, StrictUndefined
from safetensors import SafetensorError
from torch import Tensor

from spes_p2p import __version__
from spes_p2p.codecs.kept import KeptForm
from spes_p2p.codecs.vectors import BlockHasher, digest, digest_of
from spes_p2p.data.confined_tokenizer import ConfinedTokenizer
from spes_p2p.data.tokenizer import write_tokenizer_settings
from spes_p2p.errors import ConfigError, DataError, ExchangeError
from spes_p2p.model.adapted import Base
from spes_p2p.model.base_files import BaseFiles, BaseLayout, base_digests, encode_base, local_base
from spes_p2p.model.build import outline
from spes_p2p.model.export import save_checkpoint
from spes_p2p.model.peft_files import Factors, save_adapter, save_merged
from spes_p2p.model.slot_model import SlotModel
from spes_p2p.model.start import StartWeights
from spes_p2p.monitor.credit import seen
from spes_p2p.monitor.events import METRICS_FILE, replay
from spes_p2p.planner.tables import params_text
from spes_p2p.presentation import printable
from spes_p2p.swarm.exchange.store import PIECE_BYTES, file_name, versions_in
from spes_p2p.swarm.exchange.versions import MANIFEST, TOKENIZER, Version
from spes_p2p.swarm.manifest import REVISION_FILE, Manifest, kept_revisions, read_manifest
from spes_p2p.swarm.names import SHARED, VectorName, slot_ranges
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.build import outline_of
from spes_p2p.training.checkpoint import STATE, PeerCheckpoint

log = logging.getLogger(__name__)

VERSIONS = "versions"
MARKERS = ("config.json", "adapter_config.json")
"""Files of which each checkpoint has one."""
ATTEMPTS = 3
"""Times that a folder is read anew because its peer has deleted a version meanwhile."""
UNKNOWN = "not known where this was exported; a monitor's folder has it"


class OnDisk(NamedTuple):
    """A version and the file of its bytes."""

    version: Version
    file: Path


Source = Mapping[str, OnDisk]
"""Versions by name that were one peer's at one moment."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    run_id: str
    round: int
    """Of the shared parameters."""
    num_params: int
    other_rounds: Mapping[int, int] = field(default_factory=dict)
    """Rounds of those slots whose newest version in the folder is of another round."""
    kind: Literal["model", "adapter", "merged"] = "model"
    """All of the model, the run's adapters, or the base with the adapters added."""
    kept: tuple[int, ...] = ()
    """Slots that the folder has in their kept form alone: rounded."""
    form: str = "fp32"
    """The kept form."""

    def __str__(self) -> str:
        what = {"model": "in fp32", "adapter": "of adapters", "merged": "with the adapters merged"}[self.kind]
        text = f"round {self.round} of run {self.run_id!r}, {params_text(self.num_params)} parameters {what}"
        text += f"; slots {slot_ranges(self.kept)} from their kept form, {self.form}" if self.kept else ""
        return f"{text}; of other rounds: {_by_round(self.other_rounds)}" if self.other_rounds else text


class ModelFolder:
    """What the output folder of a peer or a monitor keeps of its run's model.

    Raises:
        DataError: it is no such folder, or what it keeps is damaged.
        JoinError: another version of this software has written the manifest.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        run_id = _run_of(folder)
        states = PeerCheckpoint(folder).states(run_id)
        self.tokens = {state.round: state.total_tokens for state in reversed(states.values())}
        """That this folder's peer had trained by each round of its checkpoints."""
        self._sources = [*_stored(folder), *(_files(where, state.versions) for where, state in states.items())]
        self.manifest: Manifest = read_manifest(self.document)

    def document(self, name: str, *, before: bool = False) -> bytes:
        """Return the verified bytes of the manifest, the tokenizer, or of the newest revision or the one before it.

        Raises:
            ExchangeError: no undamaged one is here.
        """
        found: dict[str, bytes] = {}
        for version, file in (source[name] for source in self._sources if name in source):
            if file.is_file() and digest(data := file.read_bytes()) == version.digest:
                found[version.digest] = data
                if len(found) > before:
                    return data
        raise ExchangeError(f"{self.folder} has no undamaged {name}; export from another peer's folder")

    @property
    def rounds(self) -> list[int]:
        """Rounds of which the folder has the shared parameters, ascending."""
        return sorted({source[SHARED].version.round for source in self._sources if SHARED in source})

    def total_rounds(self) -> int:
        """Return the run's rounds, as its founder's newest revision has left them."""
        return kept_revisions(self.manifest, self.document, self.folder / REVISION_FILE)[-1].config.round.total

    def choose(self, round: int | None) -> tuple[int, dict[VectorName, OnDisk]]:
        """Return a round, by default the newest, and the version of each vector of its model.

        A slot without a version of that round comes in the one that its peer used with it, or else in the one nearest.

        Raises:
            DataError: the folder lacks the round, or has no version of some slot.
        """
        with_model = [source for source in self._sources if SHARED in source]
        if not with_model:
            raise DataError(f"{self.folder} holds no model yet; export once a round is there, or another peer's folder")
        if round is None:
            round = with_model[0][SHARED].version.round
        of_round = [source for source in with_model if source[SHARED].version.round == round]
        if not of_round:
            rounds = ", ".join(map(str, self.rounds))
            raise DataError(
                f"{self.folder} does not keep round {round}, but {rounds}; set --round to one of them (peers keep more "
                f"with --keep-last and --keep-every)"
            )
        base = max(of_round, key=lambda source: sum(each.version.round == round for each in source.values()))
        names = [VectorName.of_slot(slot) for slot in range(self.manifest.config.num_slots)]
        chosen = {SHARED: base[SHARED]}
        for name in names:
            found = [s[form] for s in (base, *self._sources) for form in (name, name.kept) if form in s]
            if found:
                used = base.get(name.kept if name.kept in base else name)
                chosen[name] = max(found, key=lambda each: _preference(each, round, used))
        if lacking := [name.slot or 0 for name in names if name not in chosen]:
            raise DataError(
                f"{self.folder} has no version of slots {slot_ranges(lacking)} at all; export another peer's folder, "
                f"or the running swarm's newest round with --run-id and --initial-peers"
            )
        return round, chosen

    def copies(self, version: Version) -> Iterator[Path]:
        """Yield the files that should hold a version's bytes."""
        name, digest = version.name, version.digest
        yield from {s[name].file: None for s in self._sources if name in s and s[name].version.digest == digest}


def export(
    folder: Path,
    output: Path,
    round: int | None = None,
    *,
    overwrite: bool = False,
    held_out: float | None = None,
    merges: bool = False,
    base: Path | None = None,
) -> Exported:
    """Write the model of a round that a folder keeps, with tokenizer and model card, whole or not at all.

    Memory holds one slot at a time, or small ones up to a file's size. Of a run with adapters, that is the adapters in
    peft's layout, or with `merges` their base with the adapters added.

    Args:
        folder: The output of a peer or a monitor.
        output: Folder to write.
        round: By default the newest.
        held_out: The round's held-out loss, if the folder's metrics do not have it yet.
        merges: Add the adapters to their base; of no effect in a run without adapters.
        base: Folder of the base; by default as peers have sent it, if they sent it unquantised.

    Raises:
        ConfigError: `output` cannot be written, or holds something.
        DataError: `folder` does not keep the round, or what it keeps is damaged.
        JoinError: another version of this software has written the manifest.
    """
    for left in reversed(range(ATTEMPTS)):
        try:
            source = ModelFolder(folder)
            source.choose(round)  # a round that is not there goes before an output that is
            check_free(output, overwrite=overwrite)
            return _export(source, output, round, held_out, merges=merges, base=base)
        except FileNotFoundError as error:
            if not left:
                raise DataError(
                    f"{error.filename} is gone; stop the peer that uses {folder}, and export again"
                ) from error
            log.info("%s was deleted meanwhile by the peer that uses it; reading again", error.filename)
    raise AssertionError("unreachable")


def check_free(output: Path, *, overwrite: bool) -> None:
    """Raise ConfigError if an output holds something, unless it is a checkpoint that is to be replaced."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not any((output / marker).is_file() for marker in MARKERS):
        raise ConfigError(f"--output {output} exists and is no checkpoint; name another folder")
    if not overwrite:
        raise ConfigError(f"--output {output} exists; add --overwrite to replace the checkpoint there, or name another")


def _export(
    source: ModelFolder, output: Path, round: int | None, held_out: float | None, *, merges: bool, base: Path | None
) -> Exported:
    round, chosen = source.choose(round)
    run = source.manifest.config
    with ExitStack() as stack:
        # Open files outlive their deletion by a running peer.
        opened = {name: _open_all(source, each, stack) for name, each in chosen.items()}
        model = outline_of(run, source.manifest.vocab_size)
        layouts = model.layouts()
        anchors = Anchors(run, {kind: layout.numel for kind, layout in layouts.items()})
        sizes = anchors.bundle_numel()

        def read(slot: int | None) -> dict[str, Tensor]:
            name = SHARED if slot is None else VectorName.of_slot(slot)
            layout, each, files = layouts[name.kind], chosen[name], opened[name]
            if anchors.form is not None and VectorName(each.version.name).is_kept:
                return layout.unflatten(anchors.form.values(_kept_form(each, files, anchors.form)))
            return layout.unflatten(_weights(each, files, layout.numel, sizes[name.kind]))

        slots = {name.slot: each.version.round for name, each in chosen.items() if name.slot is not None}
        stale = {slot: number for slot, number in slots.items() if number != round}
        kept = [slot for slot in slots if VectorName(chosen[VectorName.of_slot(slot)].version.name).is_kept]
        num_params = sum(layouts[name.kind].numel for name in chosen)
        kind: Literal["model", "adapter", "merged"] = "model"
        if run.adapter is not None:
            kind = "merged" if merges else "adapter"
        exported = Exported(source.manifest.run_id, round, num_params, stale, kind, tuple(kept), run.frozen_storage)
        card, tokenizer = _card(source, exported, held_out), _Tokenizer(source)
        try:
            if kind == "model":
                save_checkpoint(model, output, read, tokenizer=tokenizer, card=card)
            elif kind == "adapter":
                hub = run.model.start.source if run.model.start is not None else None
                base_name = hub or local_base(source.folder)
                save_adapter(Factors(model, run, read), output, tokenizer=tokenizer, card=card, base=base_name)
            else:
                whole = outline(run.model, source.manifest.vocab_size, run.data.sequence_length)
                weights, factors = _base(source, base, whole), Factors(model, run, read)
                num_params = save_merged(whole, factors, weights, output, tokenizer=tokenizer, card=card)
                exported = replace(exported, num_params=num_params)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot write --output {output}: {error}; make room there, or name another") from error
    return exported


def _base(source: ModelFolder, folder: Path | None, model: SlotModel) -> Base:
    """Return the unquantised base of a run's adapters, verified by the manifest; ConfigError if there is none."""
    run = source.manifest.config
    assert run.adapter is not None
    layout, digests = BaseLayout(run, source.manifest.vocab_size), base_digests(run)
    if folder is None:
        if run.adapter.base not in ("fp32", "bf16"):
            raise ConfigError(
                f"peers have sent the base in {run.adapter.base}; name the unquantised checkpoint with --from"
            )
        return BaseFiles(source.folder / VERSIONS, layout, digests)
    weights = StartWeights(folder, model)
    for slot, expected in digests.items():
        if digest(encode_base(weights, layout, slot)) != expected:
            raise ConfigError(f"{folder} is not the base of the run's adapters; name another with --from")
    return weights


class _Tokenizer:
    """Saves the run's tokenizer with the checkpoint; it is read in a process of its own, as a stranger's."""

    def __init__(self, source: ModelFolder) -> None:
        self._document = source.document(TOKENIZER)
        self._max_entries = source.manifest.vocab_size
        self._template = source.manifest.config.data.chat_template or ""
        start = source.manifest.config.model.start
        self._settings = start.tokenizer if start is not None else None

    def save_pretrained(self, directory: Path) -> None:
        confined = ConfinedTokenizer(self._document, directory, self._max_entries, self._template)
        confined.close()
        self.eos_token_id = confined.eos_token_id
        if self._settings is not None:
            write_tokenizer_settings(directory, self._settings)


# ---------------------------------------------------------------------- reading


def _run_of(folder: Path) -> str:
    """Return the name of the run that a folder belongs to."""
    files = [*sorted((folder / "checkpoint").glob(f"*/{STATE}")), *(folder / VERSIONS).glob(f"{MANIFEST}.*.bin")]
    for file in files:
        try:
            return str(json.loads(file.read_bytes())["run_id"])
        except (ValueError, KeyError, TypeError):
            continue  # a damaged file, which is reported when it is verified
    raise DataError(f"{folder} is no folder of a peer or a monitor; name what their --output names")


def _stored(folder: Path) -> list[Source]:
    """Return a store's newest versions, and those before them."""
    kept = versions_in(folder / VERSIONS).values()
    depth = max(map(len, kept), default=0)
    return [_files(folder / VERSIONS, (each[age] for each in kept if age < len(each))) for age in range(depth)]


def _files(folder: Path, versions: Iterable[Version]) -> dict[str, OnDisk]:
    found = (OnDisk(version, folder / file_name(version)) for version in versions)
    return {each.version.name: each for each in found if each.file.exists()}  # a copied folder may lack some


def _preference(each: OnDisk, round: int, of_base: OnDisk | None) -> tuple[bool, bool, bool, bool, int]:
    """Rank a slot's versions: in fp32 of the round, of the round, used with it, older than it, near to it."""
    number = each.version.round
    is_exact = number == round and not VectorName(each.version.name).is_kept
    return is_exact, number == round, each == of_base, number <= round, -abs(number - round)


def _open_all(source: ModelFolder, each: OnDisk, stack: ExitStack) -> list[BinaryIO]:
    """Open the copies of a version; FileNotFoundError if all are gone, DataError if one cannot be opened."""
    opened: dict[int, BinaryIO] = {}
    for path in source.copies(each.version):
        try:
            file = stack.enter_context(path.open("rb"))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; make it readable (ulimit -n, chmod)") from error
        opened[os.fstat(file.fileno()).st_ino] = file
    if not opened:
        raise FileNotFoundError(2, "no such file", str(each.file))
    return list(opened.values())


def _weights(each: OnDisk, files: Sequence[BinaryIO], numel: int, bundle_numel: int) -> Tensor:
    """Return the verified weights `[numel]` of a version; DataError if no file has them. The rest is read in pieces."""
    version = each.version
    if not VectorName(version.name).is_kept and version.num_bytes == 4 * bundle_numel:
        for file in files:
            flat_N = np.empty(numel, dtype="<f4")
            hasher = BlockHasher()
            if file.readinto(flat_N.data.cast("B")) == flat_N.nbytes:  # type: ignore[attr-defined]
                hasher.update(flat_N.data.cast("B"))
                while piece := file.read(PIECE_BYTES):
                    hasher.update(piece)
                if digest_of(hasher.finish()) == version.digest:
                    return torch.from_numpy(flat_N)
    raise _damaged(each)


def _kept_form(each: OnDisk, files: Sequence[BinaryIO], form: KeptForm) -> Tensor:
    """Return the verified kept form, uint8, that a version's files hold; raise DataError if all are damaged."""
    for file in files:
        data = file.read(form.num_bytes + 1)
        if digest(data) == each.version.digest:
            return form.decode(data)
    raise _damaged(each)


def _damaged(each: OnDisk) -> DataError:
    return DataError(
        f"{each.file} is damaged: it does not hold {each.version.name} of round {each.version.round}; set --round to "
        f"another round, or export another peer's folder"
    )


# ---------------------------------------------------------------------- the model card


def _card(source: ModelFolder, exported: Exported, held_out: float | None) -> str:
    """Return the text of README.md. Names that other people chose stand in it as code, without control characters."""
    tokens, losses = _history(source, exported.round, held_out)
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["code"] = _code
    template = environment.from_string((resources.files("spes_p2p.monitor") / "model_card.md").read_text("utf-8"))
    return template.render(
        manifest=source.manifest,
        run=source.manifest.config,
        exported=exported,
        others=_by_round(exported.other_rounds),
        total_rounds=source.total_rounds(),
        tokens=tokens,
        losses=losses,
        credit=seen(source.folder),
        version=__version__,
        code=_code,
        params_text=params_text,
        slot_ranges=slot_ranges,
    )


def _history(source: ModelFolder, round: int, held_out: float | None) -> tuple[str, list[str]]:
    """Return what a folder knows of tokens and losses until a round."""
    tokens, losses = UNKNOWN, []
    if (own := source.tokens.get(round)) is not None:
        tokens = f"{own:,} by the one peer whose folder this was exported from; the swarm's are not known there"
    path = source.folder / METRICS_FILE
    if path.is_file():
        try:
            view, _ = replay(path)
        except DataError as error:
            log.warning("%s; the model card goes without tokens and losses", error)
        else:
            tokens = f"{view.tokens_until(round):,}, as {len(view.rounds)} rounds' reports say"
            held_out = view.held_out.get(round) if held_out is None else held_out
            if round in view.rounds and math.isfinite(loss := view.rounds[round].loss):
                losses.append(f"Training loss in this round: {loss:.4f} nats per token")
    if held_out is not None and math.isfinite(held_out):
        losses.insert(0, f"Held-out loss: {held_out:.4f} nats per token")
    return tokens, losses or [f"Loss: {UNKNOWN}"]


def _by_round(rounds: Mapping[int, int]) -> str:
    """Return slots by their round in short: `slots 3,5-7 (round 10)`."""
    numbers = sorted(set(rounds.values()))
    return ", ".join(
        f"slots {slot_ranges(sorted(slot for slot in rounds if rounds[slot] == number))} (round {number})"
        for number in numbers
    )


def _code(text: str) -> str:
    return "`" + printable(text).replace("`", " ") + "`"  # guard: .replace("`", " ") ->
