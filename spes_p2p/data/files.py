"""Reading a user's own text: plain files, JSON lines and parquet, one document at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spes_p2p.errors import ConfigError, DataError

JSON_LINES = {".jsonl", ".ndjson", ".json"}
PARQUET = {".parquet"}
# A text file is one document up to here, and pieces of this size beyond: a single large file must be splittable.
PIECE_CHARACTERS = 8192
_ROWS_PER_BATCH = 256


def corpus_files(paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """Lists the files under `paths` with their names: relative to the folder given, or the bare file name.

    Folders are walked in sorted order; hidden files and folders are left out.

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
            files = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file, path))
            if not files:
                raise DataError(f"{path} holds no files; name a folder with text, jsonl or parquet files")
            found.extend((file, file.relative_to(path).as_posix()) for file in files)
        else:
            raise ConfigError(f"{path} does not exist; give --text an existing file or folder")
    return found


def read_file(path: Path, text_field: str) -> Iterator[tuple[int | None, str]]:
    """Yields (index, text) of every document of one file that is not blank; the index of a small text file is None.

    Args:
        path: JSON lines and parquet by suffix, anything else is UTF-8 text.
        text_field: Column of the text in JSON lines and parquet.

    Raises:
        DataError: unreadable, no document, not UTF-8, malformed, or without `text_field`.
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


def checked_text(row: Any, text_field: str, where: str) -> str:
    """Returns one row's text; an absent value counts as blank.

    Raises:
        DataError: the row has no such field, or something else than text in it.
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
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair, which no tokenizer takes
        text = text.encode("utf-8", "replace").decode()
    return text


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _read_text(path: Path) -> Iterator[tuple[int | None, str]]:
    """Cuts at line ends where lines are shorter than half a piece."""
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
            yield number, checked_text(row, text_field, f"{path} line {number + 1}")


def _read_parquet(path: Path, text_field: str) -> Iterator[tuple[int, str]]:
    from pyarrow import ArrowException, parquet  # slow to load, which would delay every other start

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_field not in names:
                checked_text(dict.fromkeys(names), text_field, str(path))
            index = 0
            for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=[text_field]):
                for row in batch.to_pylist():
                    yield index, checked_text(row, text_field, f"{path} row {index}")
                    index += 1
    except ArrowException as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"cannot read {path}: {' '.join(str(error).split())[:300]}; check the file, or leave it out")
