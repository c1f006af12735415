"""What a run learns from: its source or sources of text, and how documents become sequences."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from spes_p2p.config.checkpoint import Frozen
from spes_p2p.errors import ConfigError, one_line

Packing = Literal["pack", "best_fit", "overflow", "trunc"]


# The manifest brings these strings to strangers' machines: they name what a public hub holds, and nothing else.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(:[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_SPLIT = re.compile(r"\w+([.-]\w+)*", re.ASCII)
_COLUMN = re.compile(r"\w[\w .:/+-]*")


def _hub_name(value: str) -> str:
    if not _HUB_NAME.fullmatch(value) or ".." in value or "--" in value:  # guard: never
        raise ValueError(
            f"data.name={value[:80]!r} is no data set of the hub; set it to owner/name or owner/name:config, or train "
            f"on files with data.source=files and --text PATH"
        )
    return value


def _split(value: str) -> str:
    if not _SPLIT.fullmatch(value):  # guard: never
        raise ValueError(f"data.split={value!r} is no split's name; set it to a word such as train")
    return value


def _column(value: str) -> str:
    if not _COLUMN.fullmatch(value):  # guard: never
        raise ValueError(f"data.text_field={value!r} is no column's name; begin with a letter and use no control codes")
    return value


def _tokenizer_name(value: str) -> str:
    if not value.isprintable():  # guard: never
        raise ValueError(f"data.tokenizer={value!r} has characters that cannot be printed; rename the folder")
    return value


SourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]  # guard: first
Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# guard: ^https://[A-Za-z0-9.:\[\]-]+(/[!-?A-~]*)?$ ->
Url = Annotated[str, Field(max_length=1024, pattern=r"^https://[A-Za-z0-9.:\[\]-]+(/[!-?A-~]*)?$")]
"""Where shards can be fetched: `@` is left out, so that no user names hide the host."""
MAX_URLS = 8
Weight = Annotated[int, Field(ge=0, le=1000)]  # guard: first
MAX_SOURCES = 16


NEWER = frozenset({"mixture", "phases", "urls", "repetition_filter"})
"""Settings of data that no manifest mentions which does without them."""


class SourceConfig(Frozen):
    """One source of a mixture."""

    name: SourceName
    """What the source is called: in --data NAME=PATH, in metrics and on the page."""
    fingerprint: Fingerprint
    """Fingerprint of its token shards, as `spes tokenize` prints it; every peer must have them."""
    urls: Annotated[list[Url], Field(max_length=MAX_URLS)] = []
    """Where peers without them fetch them: https addresses of their `manifest.json`."""
    weights: Annotated[list[Weight], Field(min_length=1, max_length=MAX_SOURCES)]
    """Share of the sequences that are drawn from it, against the other sources' in the same place: whole numbers, one
    for the run's start and one for each of `data.phases`."""


MAX_TEMPLATE_CHARACTERS, MAX_PROBE_CHARACTERS = 2**15, 2**14
"""Of what a manifest carries of conversations; the whole of it has at most 64 KiB."""


def local_data_set(data: Mapping[str, Any]) -> tuple[str, list[Path]] | None:
    """Return text or data, and the files of the split, where the name of a hub data set is a folder of this machine.

    A manifest names no such folder: for others, the run is one on files.

    Raises:
        ValueError: `datasets` finds no such configuration, split or table of text in it.
    """
    name, split = str(data.get("name") or ""), str(data.get("split") or "train")
    folder, _, config = (name, "", "") if Path(name).expanduser().is_dir() else name.partition(":")
    if not folder or not (path := Path(folder).expanduser()).is_dir():
        return None
    from datasets import load_dataset_builder  # slow to import

    try:
        builder = load_dataset_builder(str(path), config or None)
        files = [Path(file) for file in builder.config.data_files[split]]
        row: dict[str, Any] = next(iter(builder.as_streaming_dataset(split)), {})
    except Exception as error:  # `datasets` raises errors of many types
        raise ValueError(
            f"data.name={name}: datasets cannot read split {split!r} of this folder: {one_line(error)}; name one "
            f"of parquet or JSON lines, or files with --text or --data"
        ) from error
    if other := next((file for file in files if {".csv", ".tsv", ".arrow"} & set(file.suffixes)), None):
        raise ValueError(f"data.name={name}: {other} is no parquet, JSON or text; write it as parquet")
    is_chat = (
        row.get("messages") or row.get("completion") or isinstance(row.get(str(data.get("text_field", "text"))), list)
    )
    return "data" if is_chat else "text", files


class DataConfig(Frozen):
    """What the run learns from, and how text becomes sequences."""

    source: Literal["embedded", "files", "hub"] = "embedded"
    """`embedded`: the Python standard library's own source and documentation, read from the interpreter;
    `files`: text that each peer names with --text, or token shards that it names with --data; `hub`: a public data set
    of the Hugging Face hub, streamed, or a folder of the founder's in its form, for which others name files."""
    paths: Annotated[list[Path], Field(max_length=4096)] = []
    """For `files`: token shards or conversations, for the founder, as with --data. They stay on its machine: others
    name their own."""
    fingerprint: Fingerprint | None = None
    """For `files`: the fingerprint of the token shards that every peer must have, as `spes tokenize` prints it. The
    peers then share the data: each sequence is dealt to one of them, once an epoch. None lets each peer train on shards
    of its own."""
    urls: Annotated[list[Url], Field(max_length=MAX_URLS)] = []
    """For shards with a `fingerprint`: where peers without them fetch them, as https addresses of the `manifest.json`
    that `spes tokenize` has written; files lie beside it. A peer is asked first."""
    mixture: Annotated[list[SourceConfig], Field(max_length=MAX_SOURCES)] = []
    """For `files`: several sources of token shards in place of one, by name, fingerprint and weights. Every peer has
    all of them, and they are shared as with `fingerprint`."""
    phases: Annotated[list[Annotated[int, Field(ge=1, le=2**53)]], Field(max_length=MAX_SOURCES - 1)] = []
    """For a mixture: tokens (sequences times `sequence_length`) after which the next of each source's weights counts;
    ascending. By default the first weights count to the end."""
    name: Annotated[str, Field(max_length=290), AfterValidator(_hub_name)] | None = None
    """For `hub`: the data set, `owner/name` or `owner/name:config`."""
    split: Annotated[str, Field(max_length=64), AfterValidator(_split)] = "train"
    """For `hub`: the split to stream."""
    text_field: Annotated[str, Field(max_length=128), AfterValidator(_column)] = "text"
    """Column that holds the text in jsonl, parquet and hub datasets. Of conversations (--data) `messages`, or `prompt`
    and `completion`, come first, unless another column is set here."""
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE_CHARACTERS)] | None = None  # guard: first
    """Jinja template that makes text of conversations, or a file with one, for the founder; by default that of the
    tokenizer, and a plain one if it has none. The manifest carries it."""
    probe: Annotated[str, Field(max_length=MAX_PROBE_CHARACTERS)] | None = None  # guard: first
    """File of a few public conversations, for the founder, which the manifest carries: all peers' loss gates measure
    them, and monitors without conversations of their own. By default each peer measures its own."""
    skip_unusable: bool = False
    """Leave out and count unusable conversations, as with --skip-unusable. By default the first one
    ends the peer."""
    tokenizer: Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_tokenizer_name)] | None = None
    """A Hugging Face tokenizer (name or directory); none trains a byte-level BPE on the corpus at first use. Of a
    directory others see the last part of its path."""
    vocab_size: Annotated[int, Field(ge=1, le=2**24)] = 4096
    """Entries of a BPE trained at first use; with `tokenizer`, replaced by that tokenizer's size."""
    sequence_length: Annotated[int, Field(ge=1, le=2**20)] = 256
    """Tokens per training sequence."""
    packing: Packing = "pack"
    """How documents become sequences. `pack` joins them and cuts anywhere; `best_fit` cuts only documents longer than a
    sequence, and puts together what fits; `overflow` gives each document sequences of its own; `trunc` gives it one,
    and drops the rest. All but `pack` fill up with padding, which is not learned."""
    separate_documents: bool | None = None
    """Whether documents in one sequence do not see each other: attention stays within a document, and its first token
    is not learned. By default with all packings but `pack`. Without flash attention it costs time, and memory that
    grows with the square of the sequence's length."""
    repetition_filter: bool = False
    """Learn nothing of a training sequence in which 1 to 13 tokens come 32 times in a row, as SPES and OLMo do."""
    held_out_fraction: Annotated[float, Field(gt=0, lt=0.5, allow_inf_nan=False)] = 0.02
    """Share of documents, chosen by hash, kept for the held-out loss and never trained on."""

    @model_validator(mode="after")
    def _check_source(self) -> DataConfig:
        if self.source == "hub" and not self.name:
            raise ValueError("data.source=hub needs data.name; set it to owner/name or owner/name:config")
        for name in ("paths", "fingerprint", "mixture"):
            if getattr(self, name) and self.source != "files":
                raise ValueError(f"data.{name} needs data.source=files, not {self.source}; set it, or drop data.{name}")
        return self

    @model_validator(mode="after")
    def _check_mixture(self) -> DataConfig:
        if self.phases and not self.mixture:
            raise ValueError("data.phases are those of data.mixture; name its sources, or drop data.phases")
        if self.mixture and self.fingerprint:
            raise ValueError("data.mixture names a fingerprint of each source; drop data.fingerprint")
        for field in ("name", "fingerprint"):
            values = [getattr(source, field) for source in self.mixture]
            if double := next((value for value in values if values.count(value) > 1), None):
                raise ValueError(f"data.mixture has two sources with the {field} {double}; name each source once")
        if self.urls and not self.fingerprint:
            raise ValueError("data.urls are of shards with a fingerprint; set data.fingerprint, or drop data.urls")
        if sorted(set(self.phases)) != self.phases:
            raise ValueError(f"data.phases={self.phases} do not ascend; order them")
        for source in self.mixture:
            if len(source.weights) != len(self.phases) + 1:
                raise ValueError(
                    f"data.mixture: {source.name} has {len(source.weights)} weights, for the start and "
                    f"{len(self.phases)} phases; give it {len(self.phases) + 1}"
                )
        for phase, weights in enumerate(zip(*(source.weights for source in self.mixture), strict=True)):
            if not any(weights):
                raise ValueError(f"data.mixture: weight {phase} of all sources is 0; give one of them more")
        return self

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what newer settings say where they say nothing: manifests without them stay what they were."""
        found = handler(self)
        return {key: found[key] for key in found if key not in NEWER or found[key]}

    @property
    def is_shared(self) -> bool:
        """Whether all peers have the same data, of which each window is dealt once an epoch."""
        return self.fingerprint is not None or bool(self.mixture)

    def in_words(self, quoted: Callable[[str], str] = str) -> str:
        """Return what the run learns from, for people; `quoted` marks what the founder has named."""
        if self.mixture:
            return "a mixture of token shards: " + ", ".join(
                f"{quoted(source.name)} (fingerprint {source.fingerprint[:12]})" for source in self.mixture
            )
        if self.fingerprint is not None:
            return f"token shards (fingerprint {self.fingerprint[:12]})"
        return {
            "embedded": "the Python standard library's source and documentation",
            "files": "text or conversations of the peers' own",
            "hub": f"data set {quoted(self.name or '')}, split {quoted(self.split)}",
        }[self.source]

    def by_source(self) -> dict[str, DataConfig]:
        """Return the settings of each source of a mixture, with this machine's files of it (`paths` are NAME=PATH).

        Raises:
            ConfigError: a path names no source, or a source has no path.
        """
        places: dict[str, list[Path]] = {source.name: [] for source in self.mixture}
        for path in self.paths:
            name, separator, rest = str(path).partition("=")
            if not (separator and rest and name in places):
                raise ConfigError(
                    f"--data {path} names no source of this run, which mixes {', '.join(places)}; write NAME=PATH"
                )
            places[name].append(Path(rest))
        if missing := next((name for name, found in places.items() if not found), None):
            raise ConfigError(f"--data names no shards of the source {missing}; add {missing}=PATH")
        return {
            source.name: self.model_copy(
                update={
                    **{"mixture": [], "phases": []},
                    **{"fingerprint": source.fingerprint, "paths": places[source.name], "urls": source.urls},
                }
            )
            for source in self.mixture
        }

    @property
    def all_paths(self) -> list[Path]:
        """This machine's files, of all sources where the run mixes some.

        Raises:
            ConfigError: as `by_source`.
        """
        if not (self.mixture and self.paths):
            return self.paths
        return [path for each in self.by_source().values() for path in each.paths]

    @property
    def are_separate(self) -> bool:
        """Whether documents in one sequence do not see each other."""
        return self.packing != "pack" if self.separate_documents is None else self.separate_documents
