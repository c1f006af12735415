"""Documents of a user's files, a hub data set or Python itself, and their split into training and held-out text."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from spes_p2p.config import DataConfig
from spes_p2p.data.chat_rows import (
    COMPLETION,
    MESSAGES,
    Record,
    Unusable,
    checked_record,
    conversation_files,
    names_text,
    records,
)
from spes_p2p.data.hub import hub_rows, load_hub
from spes_p2p.data.mds import listed, with_mds_shards
from spes_p2p.data.readers import checked_text, read_file
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.fs import content_digests, matches, unmatched

log = logging.getLogger(__name__)

# One seed for all runs: they compare on the same held-out text, and a checkpoint alone tells what it has not seen.
SPLIT_SEED = 0
TUNING_SEED = 1
# Left out of the embedded corpus: tests and tables of code points.
_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "__pycache__"}
_FOREIGN_FOLDERS = {"site-packages", "dist-packages"}
# Generated when Python was built: they contain the machine's paths.
_BUILD_PREFIXES = ("_sysconfigdata", "config-")
_CORPUS_VERSION = 2

Part = Literal["train", "held_out", "tuning", "reported"]
"""A share of the documents: `train` and `held_out` split all documents, `tuning` and `reported` the held-out ones."""


WRITTEN_TOGETHER: tuple[tuple[Part, ...], ...] = (("held_out", "train"), ("tuning", "reported"))
"""Parts written in one pass over the corpus; if the last file of a group exists, all of them do."""


class Document(NamedTuple):
    """One text, not blank, and its name: a relative path or an index, equal on all machines if the source allows."""

    name: str
    text: str


def documents(data: DataConfig, paths: Sequence[Path] = ()) -> Iterator[Document]:
    """Yield every document of the configured source, always in the same order.

    Args:
        data: Source and its settings.
        paths: Files and folders, for the source `files` only.

    Raises:
        ConfigError: the source is `files` and `paths` is empty, or a path does not exist.
        DataError: a file or data set cannot be read, is empty, or lacks `data.text_field`.
    """
    if data.source == "embedded":
        yield from _embedded()
    elif data.source == "files" and (rows := conversation_files(data.paths)):
        for record in records(rows, data, Unusable() if data.skip_unusable else None):
            yield Document(record.where, record.text)
    elif data.source == "files":
        unusable = Unusable() if data.skip_unusable else None
        for path, name in _files_of(data, paths):
            try:
                for index, text in read_file(path, data.text_field, on_bad=unusable):
                    yield Document(name if index is None else f"{name}#{index}", text)
            except DataError as error:
                if unusable is None:
                    raise
                unusable(error)
        if unusable and unusable.count:
            log.warning("left out %d rows or files: %s", unusable.count, unusable.first)
    else:
        for index, row in enumerate(hub_rows(load_hub(data), data)):
            if found := hub_record(row, data):
                yield Document(str(index), found.text)


def is_held_out(document_name: str, text: str | None, fraction: float, seed: int = SPLIT_SEED) -> bool:
    """Tell whether a document is held out: by its hash, so that all machines agree without communication.

    A larger fraction holds out a superset.

    Args:
        document_name: Hashed if `text` is None.
        text: Hashed if given, so that the same text is held out under any file name.
        fraction: Share of documents to hold out, in [0, 1].
        seed: Different seeds give independent choices.
    """
    return split_number(document_name, text, seed) < fraction * 2**64


def split_number(document_name: str, text: str | None, seed: int) -> int:
    """Return the number below 2^64 that decides the split of a document: it is held out below the fraction's share."""
    identity = document_name if text is None else text
    hashed = hashlib.sha256(f"{seed}:{text is None}:".encode() + identity.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(hashed[:8], "big")


def in_held_out_part(document: Document, data: DataConfig) -> bool:
    """Apply the run's split: by name in the embedded corpus, whose text depends on Python's version, else by text."""
    return is_held_out(document.name, None if data.source == "embedded" else document.text, data.held_out_fraction)


def is_in(part: Part, document: Document, data: DataConfig) -> bool:
    """Tell whether a document belongs to a part; a second hash halves the held-out ones."""
    held_out = in_held_out_part(document, data)
    if part in ("train", "held_out") or not held_out:
        return held_out == (part != "train")
    text = None if data.source == "embedded" else document.text
    return is_held_out(document.name, text, 0.5, TUNING_SEED) == (part == "tuning")


def split_documents(data: DataConfig, paths: Sequence[Path], *, held_out: bool) -> Iterator[Document]:
    """Yield the held-out documents, or the others."""
    return (document for document in documents(data, paths) if in_held_out_part(document, data) == held_out)


def corpus_identity(data: DataConfig, paths: Sequence[Path], cache: Path | None = None) -> str:
    """Return a hex digest that changes with the corpus and with how it is read.

    It covers the names and content of files, but only the name of a hub data set; `cache` is as in `content_digests`.

    Raises:
        ConfigError: as `documents`.
        DataError: a file cannot be read.
    """
    if data.source == "hub":
        parts = [f"{data.name}:{data.split}"]
    else:
        files = _files_of(data, paths)
        if data.source == "embedded":
            files = [*files, (_topics_path(), "topics")]
        digests = content_digests([path for path, _ in files], cache)
        parts = [f"{name}:{digest}" for (_, name), digest in zip(files, digests, strict=True)]
    head = [str(_CORPUS_VERSION), data.source, data.text_field, str(SPLIT_SEED), repr(data.held_out_fraction)]
    head += ["lenient"] * data.skip_unusable
    return hashlib.sha256("\n".join(head + parts).encode("utf-8", "surrogatepass")).hexdigest()


def check_corpus(data: DataConfig, paths: Sequence[Path], cache: Path, identity: str) -> None:
    """Check that a corpus is still the one of an earlier `corpus_identity`, whose name its tokens get.

    Raises:
        DataError: it is another.
    """
    if corpus_identity(data, paths, cache) != identity:
        raise DataError(f"{paths[0] if paths else 'the text'} was changed while it was tokenised; start again")


def corpus_bytes(data: DataConfig, paths: Sequence[Path]) -> int | None:
    """Return the size of the corpus on disk; None for a stream."""
    if data.source == "hub":
        return None
    return sum(path.stat().st_size for path, _ in _files_of(data, paths))


def _files_of(data: DataConfig, paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """List the files of a corpus with their names."""
    if data.source == "embedded":
        return _embedded_files()
    if (rows := conversation_files(data.paths)) is not None:
        return [(path, path.name) for path in rows]
    if not paths and names_text(data):
        return corpus_files(data.paths)
    if not paths:
        raise ConfigError(
            "this run trains on files (data.source=files); name yours with --text PATH ..., or conversations or token "
            "shards with --data"
        )
    return corpus_files(paths)


def _embedded() -> Iterator[Document]:
    """Yield the standard library's sources by path, then `pydoc`'s language reference."""
    files = _embedded_files()
    if not files:
        raise DataError(f"no Python sources under {_stdlib()}; install the full standard library, or give --text FILE")
    for path, name in files:
        with tokenize.open(path) as stream:
            text = stream.read()
        if text.strip():
            yield Document(name, text)
    from pydoc_data.topics import topics

    for topic, text in sorted(topics.items()):
        yield Document(f"topics/{topic}", text)


def _stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _topics_path() -> Path:
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None or spec.origin is None:
        raise DataError("this Python lacks pydoc_data; install the full standard library, or give --text FILE")
    return Path(spec.origin)


def _embedded_files() -> list[tuple[Path, str]]:
    """List the standard library's sources with their names, sorted by name."""
    found = []
    root = _stdlib()
    skipped = _SKIPPED_FOLDERS | _FOREIGN_FOLDERS
    for folder, folders, files in os.walk(root):
        # Prune these folders before the walk enters them: installed packages are a hundred times larger.
        folders[:] = {name for name in folders if not name.startswith(_BUILD_PREFIXES)} - skipped
        sources = (name for name in files if name.endswith(".py") and not name.startswith(_BUILD_PREFIXES))
        paths = (Path(folder, name) for name in sources)
        found += [(path, path.relative_to(root).as_posix()) for path in paths]
    return sorted(found, key=lambda item: item[1])


def corpus_files(paths: Sequence[Path], flag: str = "--text") -> list[tuple[Path, str]]:
    """List the files that paths and patterns name, with their names: relative to a folder, or the bare file name.

    Folders are walked in sorted order, without hidden files and folders.

    Raises:
        ConfigError: a path does not exist, or a pattern matches no file.
        DataError: a folder holds no file.
    """
    found: list[tuple[Path, str]] = []
    for given in paths:
        if not (named := matches(given.expanduser())):
            raise unmatched(given, flag)
        for path in named:
            if path.is_dir():
                if not (files := with_mds_shards(listed(path))):
                    raise DataError(
                        f"{path} holds no files; name a folder with text, jsonl or parquet files, or MDS shards"
                    )
                found.extend((file, file.relative_to(path).as_posix()) for file in files)
            else:
                found.extend((file, file.name) for file in with_mds_shards([path]))
    return found


def hub_records(data: DataConfig) -> Iterator[Record]:
    """Yield the rows of the configured hub data set, in order.

    Raises:
        DataError: it cannot be read, or as `hub_record`.
    """
    return filter(None, (hub_record(row, data) for row in hub_rows(load_hub(data), data)))


def hub_record(row: dict[str, Any], data: DataConfig) -> Record | None:
    """Return a row of a hub data set as `checked_record` does; None if its text is blank, or it is left out.

    Raises:
        DataError: the row has neither messages, a completion nor `data.text_field`, or cannot be used.
    """
    where = f"data set {data.name!r}"
    try:
        if any(row.get(name) for name in (MESSAGES, COMPLETION)) or isinstance(row.get(data.text_field), list):
            return checked_record(row, data.text_field, where)
        text = checked_text(row, data.text_field, where)
    except DataError as error:
        if not data.skip_unusable:
            raise
        log.warning("left out a row: %s", error)
        return None
    return Record(where, {"text": text}) if text.strip() else None
