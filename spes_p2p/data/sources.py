"""Documents: where text comes from, and which of it is kept for the held-out loss."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from spes_p2p.config import DataConfig
from spes_p2p.data.files import corpus_files, read_file
from spes_p2p.data.hub import load, row_text, rows
from spes_p2p.errors import ConfigError, DataError

# The same for every run: runs compare on the same held-out text, and a checkpoint alone tells what it has not seen.
SPLIT_SEED = 0
_TUNING_SEED = 1

# Tests are no prose, idlelib and lib2to3 no library, and encodings are tables of code points.
_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "__pycache__"}
_FOREIGN_FOLDERS = {"site-packages", "dist-packages"}
# Written when Python was built: they differ from machine to machine and hold its paths.
_BUILD_PREFIXES = ("_sysconfigdata", "config-")
_CORPUS_VERSION = 1


Part = Literal["train", "held_out", "tuning", "reported"]
"""A share of the documents: `train` and `held_out` are all of them, `tuning` and `reported` all that are held out."""


class Document(NamedTuple):
    """One text with the name by which errors and the split know it.

    Attributes:
        name: Relative path or index, the same on all machines where the source allows it.
        text: Never empty.
    """

    name: str
    text: str


def documents(data: DataConfig, paths: Sequence[Path] = ()) -> Iterator[Document]:
    """Yields every document of the configured source, always in the same order.

    Args:
        data: Source and its settings.
        paths: Files and folders; for the source `files` only.

    Raises:
        ConfigError: the source is `files` and `paths` is empty, or a path does not exist.
        DataError: a file or data set cannot be read, is empty, or lacks `data.text_field`.
    """
    if data.source == "embedded":
        yield from _embedded()
    elif data.source == "files":
        for path, name in corpus_files(_required(paths)):
            for index, text in read_file(path, data.text_field):
                yield Document(name if index is None else f"{name}#{index}", text)
    else:
        for index, row in enumerate(rows(load(data), data)):
            if text := row_text(row, data):
                yield Document(str(index), text)


def is_held_out(document_name: str, text: str | None, fraction: float, seed: int = SPLIT_SEED) -> bool:
    """Whether a document belongs to the held-out text: by hash, so that all machines agree without talking.

    A larger fraction holds out everything that a smaller one does, and more.

    Args:
        document_name: Hashed when `text` is None.
        text: Hashed if given: the same text is then held out on every machine whatever its files are called.
        fraction: Share of documents to hold out, in [0, 1].
        seed: Another seed gives an independent choice.
    """
    identity = document_name if text is None else text
    hashed = hashlib.sha256(f"{seed}:{text is None}:".encode() + identity.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(hashed[:8], "big") < fraction * 2**64


def in_held_out_part(document: Document, data: DataConfig) -> bool:
    """The run's own split: the embedded corpus by name, since Python's versions differ in text; others by text."""
    return is_held_out(document.name, None if data.source == "embedded" else document.text, data.held_out_fraction)


def is_in(part: Part, document: Document, data: DataConfig) -> bool:
    """Whether a document belongs to a part; the held-out ones are halved by a second hash."""
    held_out = in_held_out_part(document, data)
    if part in ("train", "held_out") or not held_out:
        return held_out == (part != "train")
    text = None if data.source == "embedded" else document.text
    return is_held_out(document.name, text, 0.5, _TUNING_SEED) == (part == "tuning")


def split_documents(data: DataConfig, paths: Sequence[Path], *, held_out: bool) -> Iterator[Document]:
    """Yields one side of the split."""
    return (document for document in documents(data, paths) if in_held_out_part(document, data) == held_out)


def corpus_identity(data: DataConfig, paths: Sequence[Path]) -> str:
    """Hex digest that changes when the corpus or the reading of it does, found without reading the text.

    Files count by path, size and modification time; a hub data set by its name alone.

    Raises:
        ConfigError: as `documents`.
    """
    if data.source == "hub":
        parts = [f"{data.name}:{data.split}"]
    else:
        files = _embedded_files() if data.source == "embedded" else corpus_files(_required(paths))
        if data.source == "embedded":
            files = [*files, (_topics_path(), "topics")]
        stats = ((path.resolve(), name, path.stat()) for path, name in files)
        parts = [f"{path}:{name}:{stat.st_size}:{stat.st_mtime_ns}" for path, name, stat in stats]
    head = [str(_CORPUS_VERSION), data.source, data.text_field, str(SPLIT_SEED), repr(data.held_out_fraction)]
    return hashlib.sha256("\n".join(head + parts).encode("utf-8", "surrogatepass")).hexdigest()


def corpus_bytes(data: DataConfig, paths: Sequence[Path]) -> int | None:
    """Size of the corpus on disk; None for a stream, which does not tell."""
    if data.source == "hub":
        return None
    files = _embedded_files() if data.source == "embedded" else corpus_files(_required(paths))
    return sum(path.stat().st_size for path, _ in files)


def _required(paths: Sequence[Path]) -> Sequence[Path]:
    if not paths:
        raise ConfigError("this run trains on files (data.source=files); name yours with --text PATH ...")
    return paths


def _embedded() -> Iterator[Document]:
    """Standard library sources by path, then the language reference that `pydoc` carries."""
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
    found = []
    root = _stdlib()
    for folder, folders, files in os.walk(root):
        # Not gone into, rather than left out afterwards: what is installed there is a hundred times as much.
        folders[:] = {name for name in folders if _is_of_python(name)} - _SKIPPED_FOLDERS - _FOREIGN_FOLDERS
        paths = (Path(folder, name) for name in files if name.endswith(".py") and _is_of_python(name))
        found += [(path, path.relative_to(root).as_posix()) for path in paths]
    return sorted(found, key=lambda item: item[1])


def _is_of_python(name: str) -> bool:
    return not name.startswith(_BUILD_PREFIXES)
