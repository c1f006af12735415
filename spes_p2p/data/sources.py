"""Documents of a user's files, a hub data set or Python itself, and their split into training and held-out text."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from spes_p2p.config import DataConfig
from spes_p2p.data.hub import hub_rows, load_hub
from spes_p2p.errors import ConfigError, DataError

# One seed for all runs: they compare on the same held-out text, and a checkpoint alone tells what it has not seen.
SPLIT_SEED = 0
_TUNING_SEED = 1
JSON_LINES = {".jsonl", ".ndjson", ".json"}
PARQUET = {".parquet"}
# A longer text file is cut into documents of this size, because a single large file must be splittable.
PIECE_CHARACTERS = 8192
_ROWS_PER_BATCH = 256
# Left out of the embedded corpus: tests and tables of code points.
_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "__pycache__"}
_FOREIGN_FOLDERS = {"site-packages", "dist-packages"}
# Generated when Python was built: they contain the machine's paths.
_BUILD_PREFIXES = ("_sysconfigdata", "config-")
_CORPUS_VERSION = 1

Part = Literal["train", "held_out", "tuning", "reported"]
"""A share of the documents: `train` and `held_out` split all documents, `tuning` and `reported` the held-out ones."""


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
    elif data.source == "files":
        for path, name in _files_of(data, paths):
            for index, text in _read_file(path, data.text_field):
                yield Document(name if index is None else f"{name}#{index}", text)
    else:
        for index, row in enumerate(hub_rows(load_hub(data), data)):
            if text := row_text(row, data):
                yield Document(str(index), text)


def is_held_out(document_name: str, text: str | None, fraction: float, seed: int = SPLIT_SEED) -> bool:
    """Tell whether a document is held out: by its hash, so that all machines agree without communication.

    A larger fraction holds out a superset.

    Args:
        document_name: Hashed if `text` is None.
        text: Hashed if given, so that the same text is held out under any file name.
        fraction: Share of documents to hold out, in [0, 1].
        seed: Different seeds give independent choices.
    """
    identity = document_name if text is None else text
    hashed = hashlib.sha256(f"{seed}:{text is None}:".encode() + identity.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(hashed[:8], "big") < fraction * 2**64


def in_held_out_part(document: Document, data: DataConfig) -> bool:
    """Apply the run's split: by name in the embedded corpus, whose text depends on Python's version, else by text."""
    return is_held_out(document.name, None if data.source == "embedded" else document.text, data.held_out_fraction)


def is_in(part: Part, document: Document, data: DataConfig) -> bool:
    """Tell whether a document belongs to a part; a second hash halves the held-out ones."""
    held_out = in_held_out_part(document, data)
    if part in ("train", "held_out") or not held_out:
        return held_out == (part != "train")
    text = None if data.source == "embedded" else document.text
    return is_held_out(document.name, text, 0.5, _TUNING_SEED) == (part == "tuning")


def split_documents(data: DataConfig, paths: Sequence[Path], *, held_out: bool) -> Iterator[Document]:
    """Yield the held-out documents, or the others."""
    return (document for document in documents(data, paths) if in_held_out_part(document, data) == held_out)


def corpus_identity(data: DataConfig, paths: Sequence[Path]) -> str:
    """Return a hex digest that changes with the corpus and with how it is read, without reading the text.

    It covers the path, size and modification time of files, but only the name of a hub data set.

    Raises:
        ConfigError: as `documents`.
    """
    if data.source == "hub":
        parts = [f"{data.name}:{data.split}"]
    else:
        files = _files_of(data, paths)
        if data.source == "embedded":
            files = [*files, (_topics_path(), "topics")]
        stats = ((path.resolve(), name, path.stat()) for path, name in files)
        parts = [f"{path}:{name}:{stat.st_size}:{stat.st_mtime_ns}" for path, name, stat in stats]
    head = [str(_CORPUS_VERSION), data.source, data.text_field, str(SPLIT_SEED), repr(data.held_out_fraction)]
    return hashlib.sha256("\n".join(head + parts).encode("utf-8", "surrogatepass")).hexdigest()


def corpus_bytes(data: DataConfig, paths: Sequence[Path]) -> int | None:
    """Return the size of the corpus on disk; None for a stream."""
    if data.source == "hub":
        return None
    return sum(path.stat().st_size for path, _ in _files_of(data, paths))


def _files_of(data: DataConfig, paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """List the files of a corpus with their names.

    Raises:
        ConfigError: the source is `files` and `paths` is empty.
    """
    if data.source == "embedded":
        return _embedded_files()
    if not paths:
        raise ConfigError("this run trains on files (data.source=files); name yours with --text PATH ...")
    return _corpus_files(paths)


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


def _corpus_files(paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """List the files under `paths` with their names: relative to the given folder, or the bare file name.

    Folders are walked in sorted order, without hidden files and folders.

    Raises:
        ConfigError: a path does not exist.
        DataError: a folder holds no file.
    """
    found: list[tuple[Path, str]] = []
    for given in paths:
        path = given.expanduser()
        if path.is_file():
            found.append((path, path.name))
        elif path.is_dir():
            found_here = ((file, file.relative_to(path)) for file in path.rglob("*") if file.is_file())
            files = sorted(pair for pair in found_here if not any(part.startswith(".") for part in pair[1].parts))
            if not files:
                raise DataError(f"{path} holds no files; name a folder with text, jsonl or parquet files")
            found.extend((file, relative.as_posix()) for file, relative in files)
        else:
            raise ConfigError(f"{path} does not exist; give --text an existing file or folder")
    return found


def _read_file(path: Path, text_field: str) -> Iterator[tuple[int | None, str]]:
    """Yield (index, text) of every document of one file that is not blank; the index of a small text file is None.

    Args:
        path: JSON lines or parquet by suffix, else UTF-8 text.
        text_field: Column of the text in JSON lines and parquet.

    Raises:
        DataError: the file is unreadable, malformed, not UTF-8, has no document, or lacks `text_field`.
    """
    suffix = path.suffix.lower()
    try:
        if suffix in JSON_LINES:
            texts: Iterator[tuple[int | None, str]] = _read_json_lines(path, text_field)
        elif suffix in PARQUET:
            texts = _read_parquet(path, text_field)
        else:
            texts = _read_text(path)
        num_documents = 0
        for index, text in texts:
            if text.strip():
                num_documents += 1
                yield index, text
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text; convert it with iconv -t UTF-8, or leave it out") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    if not num_documents:
        raise DataError(f"{path} holds no text; leave it out")


def _checked_text(row: Any, text_field: str, where: str) -> str:
    """Return one row's text; a null counts as blank.

    Raises:
        DataError: the row lacks the field, or the field does not hold text.
    """
    if not isinstance(row, dict) or text_field not in row:
        columns = ", ".join(sorted(map(str, row))[:8]) if isinstance(row, dict) else type(row).__name__
        raise DataError(f"{where} has no field {text_field!r} (it has: {columns}); set data.text_field")
    text = row[text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f"{where}: field {text_field!r} holds {type(text).__name__}, not text; set data.text_field")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can contain half a surrogate pair, which tokenizers refuse
        text = text.encode("utf-8", "replace").decode()
    return text


def _read_text(path: Path) -> Iterator[tuple[int | None, str]]:
    """Yield pieces that end with a line, unless a line is longer than half a piece."""
    with path.open(encoding="utf-8") as stream:
        piece = stream.read(PIECE_CHARACTERS)
        rest = stream.read(1)
        if not rest:
            yield None, piece
            return
        index = 0
        while piece:
            piece += rest
            if not piece.endswith("\n"):
                piece += stream.readline(PIECE_CHARACTERS // 2)
            yield index, piece
            index += 1
            piece, rest = stream.read(PIECE_CHARACTERS), ""


def _read_json_lines(path: Path, text_field: str) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path} line {number + 1} is not JSON; write one object per line") from error
            yield number, _checked_text(row, text_field, f"{path} line {number + 1}")


def _read_parquet(path: Path, text_field: str) -> Iterator[tuple[int, str]]:
    from pyarrow import ArrowException, parquet  # slow to import

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_field not in names:
                _checked_text(dict.fromkeys(names), text_field, str(path))
            index = 0
            for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=[text_field]):
                for row in batch.to_pylist():
                    yield index, _checked_text(row, text_field, f"{path} row {index}")
                    index += 1
    except ArrowException as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"cannot read {path}: {' '.join(str(error).split())[:300]}; check the file, or leave it out")


def row_text(row: dict[str, Any], data: DataConfig) -> str:
    """Return one row's text, empty if it is blank.

    Raises:
        DataError: the row lacks `data.text_field`, or the field does not hold text.
    """
    text = _checked_text(row, data.text_field, f"data set {data.name!r}")
    return text if text.strip() else ""
