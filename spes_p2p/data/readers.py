"""Documents of one file: text, JSON, parquet and MosaicML's MDS, each also in gzip or zstd, whole or by ranges."""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO, TypeVar

from spes_p2p.data.mds import MDS, samples
from spes_p2p.data.shard_formats import TOKENS
from spes_p2p.data.streams import CHUNK_BYTES, COMPRESSED, MAX_ROW_BYTES, Range, explained, opened, unreadable
from spes_p2p.errors import DataError

JSON_LINES = {".jsonl", ".ndjson", ".json"}
PARQUET = {".parquet"}
# A longer text file is cut into documents of this size, because a single large file must be splittable.
PIECE_CHARACTERS = 8192
DOCUMENT_CHARACTERS = 2**15
"""Longest text of a row that stays one document: a tokenizer takes 150 bytes of memory a byte."""
_ROWS_PER_BATCH, _BATCH_BYTES = 256, 2**28
_HEAD_BYTES = 4096
_BINARY = {
    **{b"\x89PNG": "a PNG image", b"\xff\xd8\xff": "a JPEG image", b"GIF8": "a GIF image", b"%PDF-": "a PDF"},
    **{b"PK\x03\x04": "a zip archive", b"\x7fELF": "a program", b"BZh": "bzip2 data", b"\xfd7zXZ": "xz data"},
    **{b"\x1f\x8b": "gzip data without the suffix .gz", b"\x28\xb5\x2f\xfd": "zstd data without the suffix .zst"},
    **{b"\x93NUMPY": "a NumPy array", b"PAR1": "parquet without its suffix"},
}


Item = TypeVar("Item")


OnBad = Callable[[DataError], None]
"""Takes the error of a row that is then left out."""
Take = Callable[..., Any]
"""Makes something of a row and, as `where`, its place, or raises DataError."""


def read_file(
    path: Path, text_field: str, part: Range | None = None, on_bad: OnBad | None = None
) -> Iterator[tuple[int | None, str]]:
    """Yield (index, text) of every document of one file that is not blank; the index of a small text file is None.

    The text of a long row is cut into pieces, as fine as a text file if the row is the only one of its file.

    Args:
        path: JSON, parquet or MDS by suffix, else UTF-8 text; `.gz` or `.zst` behind it. A `.json` file is an array, or
            has one object per line.
        text_field: Column of the text in JSON and parquet.
        part: The part to read, as `ranges` returns it; None reads all, which must hold text.
        on_bad: Called with the error of a row that cannot be used; by default such a row ends the reading.

    Raises:
        DataError: the file is unreadable, malformed, not UTF-8, has no document, or lacks `text_field`.
    """
    rows = _Rows(path, [text_field], partial(checked_text, text_field=text_field), on_bad)
    num_documents = 0
    with explained(path):
        refuse_tokens(path)
        items = rows.read(part)
        first = list(itertools.islice(items, 2))
        is_alone = part is None and len(first) == 1
        for index, whole in itertools.chain(first, items):
            for text in cut(whole, PIECE_CHARACTERS if is_alone else DOCUMENT_CHARACTERS):
                if text.strip():
                    num_documents += 1
                    yield index, text
    if not num_documents and part is None and not rows.num_bad:
        raise DataError(f"{path} holds no text; leave it out")


def read_rows(path: Path, columns: Sequence[str], take: Take, on_bad: OnBad | None = None) -> Iterator[Any]:
    """Yield what `take` makes of each row of one file of JSON or parquet.

    Args:
        path: JSON lines, a JSON array or parquet by suffix; `.gz` or `.zst` behind it.
        columns: Columns to read of parquet, of those that it has.
        take: Makes something of a row and its place, such as `FILE line 3`.
        on_bad: Called with the error of a row that cannot be used; by default such a row ends the reading.

    Raises:
        DataError: the file is unreadable, malformed, not UTF-8, or `take` raises it.
    """
    with explained(path):
        for _, item in _Rows(path, columns, take, on_bad).read(None):
            yield item


def cut(text: str, num_characters: int = DOCUMENT_CHARACTERS) -> Iterator[str]:
    """Yield a text, or pieces of it that end with a line if it is longer than `num_characters`."""
    if len(text) <= num_characters:
        return iter([text])
    return (piece for _, piece in _pieces(io.StringIO(text), num_characters=num_characters))


def batches(
    items: Iterable[Item], num_characters_of: Callable[[Item], int], most_characters: int, most_items: int | None = None
) -> Iterator[list[Item]]:
    """Yield items in batches that end with the item which brings them to `most_characters` or `most_items`."""
    batch: list[Item] = []
    num_characters = 0
    for item in items:
        batch.append(item)
        num_characters += num_characters_of(item)
        if num_characters >= most_characters or len(batch) == most_items:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def ranges(path: Path, max_bytes: int) -> list[Range | None]:
    """Cut a file into parts of about `max_bytes` that `read_file` reads alone; compressed files and arrays stay whole.

    The parts depend on the file alone, and their documents in order are the file's.

    Raises:
        DataError: the file cannot be read.
    """
    suffix = path.suffix.lower()
    with explained(path):
        size = path.stat().st_size
        if suffix in COMPRESSED | {MDS} or size <= max_bytes:
            return [None]
        if suffix in PARQUET:
            return [*_row_groups(path, max_bytes)]
        if suffix not in JSON_LINES:
            return [*_text_cuts(path, size, max_bytes)]
        with path.open("rb") as stream:
            if suffix == ".json" and _is_array(stream.read(_HEAD_BYTES)):
                return [None]
        return [Range(start, min(start + max_bytes, size)) for start in range(0, size, max_bytes)]


def refuse_tokens(path: Path) -> None:
    """Refuse a file of tokens where text is expected.

    Raises:
        DataError: its suffix is that of token shards.
    """
    if path.suffix.lower() in TOKENS - {MDS}:
        raise DataError(f"{path} holds tokens by its suffix, not text; give token shards with --data instead of --text")


def checked_text(row: Any, text_field: str, where: object) -> str:
    """Return one row's text; a null counts as blank.

    Raises:
        DataError: the row lacks the field, or the field does not hold text.
    """
    if not isinstance(row, dict) or text_field not in row:
        columns = ", ".join(sorted(map(str, row))[:8]) if isinstance(row, dict) else type(row).__name__
        raise DataError(f"{where} has no field {text_field!r} (it has: {columns}); rename one, or set data.text_field")
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


class _Rows:
    """Reads the documents of one file, blank ones included.

    Args:
        path: The file.
        columns: Columns to read of parquet, of those that it has.
        take: What to make of a row.
        on_bad: As in `read_file`.
    """

    def __init__(self, path: Path, columns: Sequence[str], take: Take, on_bad: OnBad | None) -> None:
        self._path = path
        self._columns = columns
        self._take = take
        self._on_bad = on_bad
        self.num_bad = 0

    def read(self, part: Range | None) -> Iterator[tuple[int | None, Any]]:
        """Yield index, and text or what is made of a row."""
        name = Path(self._path.stem) if self._path.suffix.lower() in COMPRESSED else self._path
        suffix = name.suffix.lower()
        if suffix in PARQUET:
            yield from self._parquet(part)
            return
        with opened(self._path, part if suffix not in JSON_LINES else None) as stream:
            if suffix == MDS:
                yield from self._mds(stream)
                return
            head = stream.peek(_HEAD_BYTES)[:_HEAD_BYTES]
            _refuse_binary(self._path, head)
            if suffix == ".json" and _is_array(head):
                yield from self._array(_decoded(stream))
            elif suffix in JSON_LINES:
                yield from self._lines(stream, part)
            else:
                _refuse_list(self._path, head)
                yield from self._text(_decoded(stream, part), part)

    def _text(self, stream: TextIO, part: Range | None) -> Iterator[tuple[int | None, str]]:
        """Yield pieces of text without the lines that are not UTF-8."""
        number, first = 0, part.start if part is not None else 0
        for index, piece in _pieces(stream, part):
            lines = piece.split("\n")
            bad = [] if _is_utf8(piece) else [offset for offset, line in enumerate(lines) if not _is_utf8(line)]
            for offset in bad:
                self._bad(_not_utf8(_Line(self._path, first, 0, number + offset)), None)
            piece = "\n".join(line for offset, line in enumerate(lines) if offset not in bad)
            number += len(lines) - 1
            yield index, piece

    def _lines(self, stream: BinaryIO, part: Range | None) -> Iterator[tuple[int, Any]]:
        """Yield the rows of the lines that begin within the part."""
        position = number = 0
        if part is not None and part.start:
            position = stream.seek(part.start - 1)
            position += _skip_line(stream)
        first = position
        while (part is None or position < part.stop) and (line := stream.readline(MAX_ROW_BYTES)):
            where = _Line(self._path, first, position, number)
            position += len(line)
            number += 1
            try:
                if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
                    position += _skip_line(stream)
                    self._bad(_too_long(where), None)
                elif text := line.removeprefix(codecs.BOM_UTF8).decode().strip():
                    del line
                    yield from self._row(number - 1, json.loads(text), where)
            except UnicodeDecodeError as error:
                self._bad(_not_utf8(where), error)
            except (ValueError, RecursionError) as error:
                self._bad(DataError(f"{where} is not JSON; write one object per line"), error)

    def _array(self, stream: TextIO) -> Iterator[tuple[int, Any]]:
        """Yield the rows of one JSON array, which is never in memory as a whole."""
        decoder = json.JSONDecoder()
        buffer, at, index = stream.read(CHUNK_BYTES).lstrip()[1:], 0, 0
        while True:
            while at < len(buffer) and (buffer[at].isspace() or (buffer[at] == "," and index)):
                at += 1
            if at < len(buffer) and buffer[at] == "]":
                return
            start = at
            try:
                row, at = decoder.raw_decode(buffer, at)
            except (ValueError, RecursionError) as error:
                if len(buffer) - at > MAX_ROW_BYTES:
                    raise _too_long(f"{self._path} element {index}") from error
                more = stream.read(max(CHUNK_BYTES, len(buffer) - at))
                if not more:
                    raise DataError(
                        f"{self._path} is not JSON from element {index} on; write an array of objects, or one object "
                        f"per line"
                    ) from error
                buffer, at = buffer[at:] + more, 0
                continue
            if _is_utf8(buffer[start:at]):
                yield from self._row(index, row, f"{self._path} element {index}")
            else:
                self._bad(_not_utf8(f"{self._path} element {index}"), None)
            index += 1

    def _mds(self, stream: BinaryIO) -> Iterator[tuple[int, Any]]:
        """Yield the samples of a shard of MDS; of their columns only text and JSON are decoded."""
        decoders: dict[str, Callable[[bytes], Any]] = {"str": bytes.decode, "json": json.loads}
        for index, cells in enumerate(samples(self._path, stream)):
            where = f"{self._path} sample {index}"
            try:
                row = {name: decoders.get(kind * (name in self._columns), bytes)(cell) for name, kind, cell in cells}
            except (ValueError, RecursionError) as error:
                self._bad(DataError(f"{where} holds neither UTF-8 text nor JSON; write it again"), error)
            else:
                yield from self._row(index, row, where)

    def _parquet(self, part: Range | None) -> Iterator[tuple[int, Any]]:
        from pyarrow import ArrowException  # slow to import

        try:
            with _parquet_file(self._path) as file:
                names = file.schema_arrow.names
                columns = [column for column in self._columns if column in names]
                if not columns:
                    self._take(dict.fromkeys(names), where=str(self._path))
                groups = range(file.num_row_groups)[slice(*part) if part else slice(None)]
                index = sum(file.metadata.row_group(group).num_rows for group in range(groups.start))
                for group in groups:
                    # A cell can have all of its column's bytes, and with a dictionary each row can be that cell.
                    found = file.metadata.row_group(group)
                    chunks = [found.column(number) for number in range(found.num_columns)]
                    sizes = [c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns]
                    if sum(sizes) > MAX_ROW_BYTES * found.num_rows:
                        self._bad(_too_long(f"{self._path} row {index}"), None)
                        index += found.num_rows
                        continue
                    rows = min(_ROWS_PER_BATCH, max(1, _BATCH_BYTES // max(sum(sizes), 1)))
                    for batch in file.iter_batches(batch_size=rows, row_groups=[group], columns=columns):
                        for row in batch.to_struct_array():
                            where = f"{self._path} row {index}"
                            try:
                                yield from self._row(index, row.as_py(), where)
                            except UnicodeDecodeError as error:
                                self._bad(_not_utf8(where), error)
                            index += 1
        except ArrowException as error:
            raise unreadable(self._path, error) from error

    def _row(self, index: int, row: Any, where: object) -> Iterator[tuple[int, Any]]:
        """Yield what is made of a row, or nothing if the row cannot be used and `on_bad` takes its error."""
        try:
            text = self._take(row, where=where)
        except DataError as error:
            self._bad(error, None)
        else:
            yield index, text

    def _bad(self, problem: DataError, cause: BaseException | None) -> None:
        if self._on_bad is None:
            raise problem from cause
        self.num_bad += 1
        self._on_bad(problem)


class _Line(NamedTuple):
    """A line for messages; its number is counted only when it is shown, because a range does not know it."""

    path: Path
    first: int
    position: int
    number: int

    def __str__(self) -> str:
        before = 0
        if self.first:
            with self.path.open("rb") as stream:
                chunks = iter(lambda: stream.read(min(CHUNK_BYTES, self.first - stream.tell())), b"")
                before = sum(chunk.count(b"\n") for chunk in chunks)
        return f"{self.path} line {before + self.number + 1}"


def _too_long(where: object) -> DataError:
    return DataError(f"{where} is longer than {MAX_ROW_BYTES >> 20} MiB; cut it into rows, or give its text as a .txt")


def _not_utf8(where: object) -> DataError:
    return DataError(f"{where} is not UTF-8 text; convert the file with iconv -t UTF-8, or leave it out")


def _is_utf8(text: str) -> bool:
    """Tell whether text of `_decoded` was UTF-8."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _decoded(stream: BinaryIO, part: Range | None = None) -> TextIO:
    """Return text without its byte order mark, in which a byte that is not UTF-8 is half a surrogate pair."""
    encoding = "utf-8" if part is not None and part.start else "utf-8-sig"
    return io.TextIOWrapper(stream, encoding=encoding, errors="surrogateescape")


def _skip_line(stream: BinaryIO) -> int:
    """Read to the end of a line; return its bytes."""
    num_bytes, chunk = 0, b""
    while not chunk.endswith(b"\n") and (chunk := stream.readline(CHUNK_BYTES)):
        num_bytes += len(chunk)
    return num_bytes


def _is_array(head: bytes) -> bool:
    return head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _refuse_binary(path: Path, head: bytes) -> None:
    """Refuse a file that begins as no text does."""
    kind = next((kind for magic, kind in _BINARY.items() if head.startswith(magic)), None)
    even, odd = head[::2].strip(b"\0"), head[1::2].strip(b"\0")
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or (len(head) > 1 and bool(even) != bool(odd)):
        raise DataError(f"{path} holds UTF-16, not UTF-8 text; convert it with iconv -f UTF-16 -t UTF-8")
    if kind or b"\0" in head:
        kind = kind or "binary data"
        raise DataError(f"{path} holds {kind}, not UTF-8 text; leave it out by a pattern, as '{path.parent}/*.md'")


def _refuse_list(path: Path, head: bytes) -> None:
    """Refuse a list of files, such as SPES's `file_list.txt`, which would be trained on as text."""
    lines = head.decode("utf-8-sig", "ignore").splitlines()
    names = [line.strip() for line in (lines[:-1] if len(head) == _HEAD_BYTES else lines) if line.strip()]
    if not names:
        return
    if all(Path(name).suffix.lower() in TOKENS and " " not in name for name in names):
        raise DataError(f"{path} is a list of token shards, not text; give it with --data instead of --text")
    if all(any(os.path.isfile(Path(folder, name)) for folder in ("", path.parent)) for name in names):
        raise DataError(f"{path} is a list of files, not text; name the files themselves with --text")


@contextlib.contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    """Open parquet, which must be seekable: a compressed file is first decompressed into a temporary one."""
    from pyarrow import parquet  # slow to import

    with contextlib.ExitStack() as stack:
        source: Any = path
        if path.suffix.lower() in COMPRESSED:
            source = stack.enter_context(tempfile.TemporaryFile())
            stream, left = stack.enter_context(opened(path, None)), shutil.disk_usage(tempfile.gettempdir()).free // 2
            while chunk := stream.read(CHUNK_BYTES):
                if (left := left - len(chunk)) < 0:
                    raise DataError(f"{path} unpacks to more than half of the temporary folder's disk; unpack it first")
                source.write(chunk)
        yield stack.enter_context(parquet.ParquetFile(source))


def _row_groups(path: Path, max_bytes: int) -> Iterator[Range]:
    """Yield ranges of row groups of about `max_bytes` each."""
    from pyarrow import ArrowException

    try:
        with _parquet_file(path) as file:
            start, num_bytes = 0, 0
            for group in range(file.num_row_groups):
                num_bytes += file.metadata.row_group(group).total_byte_size
                if num_bytes >= max_bytes or group == file.num_row_groups - 1:
                    yield Range(start, group + 1)
                    start, num_bytes = group + 1, 0
    except ArrowException as error:
        raise unreadable(path, error) from error


def _pieces(
    stream: TextIO, part: Range | None = None, num_characters: int = PIECE_CHARACTERS
) -> Iterator[tuple[int | None, str]]:
    """Yield pieces that end with a line, unless a line is longer than half a piece."""
    piece = stream.read(num_characters)
    rest = stream.read(1) if part is None or not part.start else ""
    if not rest and part is None:
        yield None, piece
        return
    index = 0
    while piece:
        piece += rest
        if not piece.endswith("\n"):
            piece += stream.readline(num_characters // 2)
        yield index, piece
        index += 1
        piece, rest = stream.read(num_characters), ""


def _text_cuts(path: Path, size: int, max_bytes: int) -> Iterator[Range | None]:
    """Yield ranges that begin and end where pieces of the whole file do; one range if it has line ends of Windows."""
    head = _head(path)
    _refuse_binary(path, head)
    cuts, position = [0], len(codecs.BOM_UTF8) * head.startswith(codecs.BOM_UTF8)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        for _, piece in _pieces(stream):
            if "\r" in piece:  # reading makes a line end of one character of it, so that bytes cannot be counted
                yield None
                return
            position += len(piece.encode("utf-8", "surrogateescape"))
            if position - cuts[-1] >= max_bytes:
                cuts.append(position)
    if cuts[-1] < size:
        cuts.append(size)
    yield from (Range(start, stop) for start, stop in itertools.pairwise(cuts))


def _head(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(_HEAD_BYTES)
