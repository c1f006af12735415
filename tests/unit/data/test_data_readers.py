"""Readers of single files: compression, JSON arrays, ranges, and what is refused as text."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from spes_p2p.data.readers import PIECE_CHARACTERS, ranges, read_file
from spes_p2p.errors import DataError

from .conftest import sentences


def write(path: Path, texts: list[str]) -> Path:
    """Write texts in the format that the name says; the reference for all readers is the list itself."""
    suffixes = path.suffixes
    if ".parquet" in suffixes:
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.table({"text": texts, "id": range(len(texts))}), sink, row_group_size=7)
        data = sink.getvalue().to_pybytes()
    elif ".json" in suffixes:
        data = json.dumps([{"id": index, "text": text} for index, text in enumerate(texts)], indent=1).encode()
    elif ".jsonl" in suffixes:
        data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    else:
        data = "".join(texts).encode()
    if suffixes[-1] == ".gz":
        data = gzip.compress(data)
    elif suffixes[-1] == ".zst":  # two frames, as `cat a.zst b.zst` makes them
        half = len(data) // 2
        data = zstandard.compress(data[:half]) + zstandard.compress(data[half:])
    path.write_bytes(data)
    return path


def read(path: Path, part=None, **more) -> list[str]:
    return [text for _, text in read_file(path, "text", part, **more)]


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_every_format_gives_the_texts_that_were_written(tmp_path, seed, suffix, compression):
    texts = [f'{text} ünï 漢字 🙂\n\t"quoted" ]}},' for text in sentences(random.Random(seed), 40)]
    assert read(write(tmp_path / f"a{suffix}{compression}", texts)) == texts


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_compressed_text_is_cut_as_plain_text_is(tmp_path, seed, compression):
    lines = [f"{text}\n" for text in sentences(random.Random(seed), 300)]
    plain = read(write(tmp_path / "a.txt", lines))
    assert "".join(plain) == "".join(lines) and len(plain) > 3
    assert read(write(tmp_path / f"a.txt{compression}", lines)) == plain


def test_an_array_longer_than_a_chunk_is_read_element_by_element(tmp_path, seed, monkeypatch):
    monkeypatch.setattr("spes_p2p.data.readers._CHUNK_BYTES", 50)
    texts = sentences(random.Random(seed), 30)
    assert read(write(tmp_path / "a.json", texts)) == texts


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".txt"])
def test_ranges_of_a_file_join_to_the_whole(tmp_path, seed, suffix):
    generator = random.Random(seed)
    texts = sentences(generator, 200)
    if suffix == ".txt":
        texts = [f"{text} ä漢🙂\n" for text in texts] + ["x" * (3 * PIECE_CHARACTERS)]
    path = write(tmp_path / f"a{suffix}", texts)
    parts = ranges(path, generator.randint(1000, 20_000))
    assert len(parts) > 1
    assert [text for part in parts for text in read(path, part)] == read(path)


def test_a_line_that_begins_at_a_range_belongs_to_that_range_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text":"abcd"}\n' * 6)  # 16 bytes each
    assert [len(read(path, part)) for part in ranges(path, 32)] == [2, 2, 2]
    assert [len(read(path, part)) for part in ranges(path, 31)] == [2, 2, 2, 0]


def test_text_with_line_ends_of_windows_is_not_cut_into_ranges(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"word word\r\n" * 5000)
    assert ranges(path, 1000) == [None]


def test_small_compressed_and_array_files_are_not_cut(tmp_path):
    for name in ("a.jsonl.gz", "a.json", "a.txt.zst"):
        assert ranges(write(tmp_path / name, ["some text"] * 2000), 1000) == [None]
    assert ranges(write(tmp_path / "a.jsonl", ["some text"]), 1000) == [None]


def truncated(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


ROWS = b'{"text": "some text of a document"}\n' * 50
REFUSED = {
    "picture": ("a.txt", b"\x89PNG\r\n\x1a\n" + bytes(99), "a PNG image, not UTF-8 text; leave it out"),
    "picture named jsonl": ("a.jsonl", b"\xff\xd8\xff\xe0" + bytes(99), "a JPEG image"),
    "program": ("a", b"\x7fELF" + bytes(99), "a program"),
    "pdf": ("a.pdf", b"%PDF-1.7\nstream", "a PDF"),
    "other binary": ("a.dat", b"head\x00\x01", "binary data"),
    "gzip without its suffix": ("a.jsonl", gzip.compress(ROWS), "gzip data without the suffix .gz"),
    "zstd without its suffix": ("a.txt", zstandard.compress(ROWS), "zstd data without the suffix .zst"),
    "utf-16": ("a.txt", "words".encode("utf-16"), "UTF-16, not UTF-8"),
    "npy": ("a.npy", b"\1\0\2\0", "holds tokens by its suffix, not text; give token shards with --data"),
    "datatrove": ("a.ds", b"\1\0\2\0", "--data"),
    "megatron": ("a.bin", b"\1\0\2\0", "--data"),
    "list of shards": ("files.txt", b"/data/a_0.npy\n/data/a_1.npy\n", "a list of token shards, not text"),
    "truncated gzip": ("a.jsonl.gz", truncated(gzip.compress(ROWS)), "ends in the middle of its compressed data"),
    "truncated zstd": ("a.jsonl.zst", truncated(zstandard.compress(ROWS)), "ends in the middle"),
    "damaged gzip": ("a.jsonl.gz", b"\x1f\x8b\x08" + bytes(40), "cannot read"),
    "damaged zstd": ("a.jsonl.zst", b"\x28\xb5\x2f\xfd" + b"\xff" * 40, "cannot read"),
    "no gzip": ("a.jsonl.gz", ROWS, "cannot read"),
    "no zstd": ("a.jsonl.zst", ROWS, "cannot read"),
    "array that ends early": ("a.json", b'[{"text": "x"}, {"text"', "not JSON from element 1 on"),
    "array of numbers": ("a.json", b"[1, 2]", "no field 'text' (it has: int)"),
    "truncated parquet": ("a.parquet", b"PAR1" + bytes(50), "cannot read"),
    "empty gzip": ("a.txt.gz", gzip.compress(b""), "holds no text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_text_is_refused_by_name_with_the_remedy(tmp_path, case):
    name, content, message = REFUSED[case]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(path)
    said = str(caught.value)
    assert str(path) in said and message in said and ";" in said and "\n" not in said


def test_a_list_of_files_is_not_trained_on_as_text(tmp_path):
    (tmp_path / "one.txt").write_text("some text")
    for name in ("one.txt", str(tmp_path / "one.txt")):
        (tmp_path / "files.txt").write_text(f"{name}\n")
        with pytest.raises(DataError, match=r"files.txt is a list of files, not text; name the files themselves"):
            read(tmp_path / "files.txt")
    (tmp_path / "files.txt").write_text("one.txt\nand a sentence\n")
    assert read(tmp_path / "files.txt") == ["one.txt\nand a sentence\n"]


def test_bad_rows_are_left_out_and_told_only_when_asked(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\nno json\n{"text": 3}\n{"body": "x"}\n{"text": "two"}\n')
    told: list[DataError] = []
    assert read(path, on_bad=told.append) == ["one", "two"]
    assert [str(error).split(";")[0] for error in told] == [
        f"{path} line 2 is not JSON",
        f"{path} line 3: field 'text' holds int, not text",
        f"{path} line 4 has no field 'text' (it has: body)",
    ]
    with pytest.raises(DataError, match="line 2"):
        read(path)


def test_a_bad_line_of_a_range_has_its_number_in_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text":"abcd"}\n' * 90 + b"no json at all\n")
    with pytest.raises(DataError, match="line 91 is not JSON"):
        for part in ranges(path, 100):
            read(path, part)
