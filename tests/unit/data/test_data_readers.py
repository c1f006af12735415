"""Readers of single files: compression, JSON arrays, ranges, and what is refused as text."""

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from spes_p2p.data.readers import DOCUMENT_CHARACTERS, PIECE_CHARACTERS, ranges, read_file
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
    monkeypatch.setattr("spes_p2p.data.readers.CHUNK_BYTES", 50)
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
    assert len(parts) > 1 and [text for part in parts for text in read(path, part)] == read(path)


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
    "utf-16 of other ends": ("a.jsonl", b"\xfe\xff" + '{"text": "漢字"}'.encode("utf-16-be"), "convert it with iconv"),
    "utf-16 without a mark": ("a.csv", "some,words\n".encode("utf-16-le"), "UTF-16, not UTF-8"),
    "utf-16 in gzip": ("a.txt.gz", gzip.compress("words".encode("utf-16")), "UTF-16, not UTF-8"),
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


LONG = "".join(f"{number} words of a long text\n" for number in range(8000)) + "x" * 100_000


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".jsonl.zst", ".parquet.gz"])
def test_a_long_row_is_cut_at_line_ends_and_loses_nothing(tmp_path, suffix):
    found = read(write(tmp_path / f"a{suffix}", ["one", LONG, "two"]))
    assert (found[0], "".join(found[1:-1]), found[-1]) == ("one", LONG, "two")
    assert max(map(len, found)) <= 1.5 * DOCUMENT_CHARACTERS
    assert all(piece.endswith(("\n", "x")) for piece in found[1:-1])


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".jsonl.gz"])
def test_the_only_row_of_a_file_is_cut_as_a_text_file_is(tmp_path, suffix):
    assert read(write(tmp_path / f"a{suffix}", [LONG])) == read(write(tmp_path / "a.txt", [LONG]))


BOMBS = """
import json, sys
from pathlib import Path
import pyarrow.parquet
from spes_p2p.data import readers
readers.MAX_ROW_BYTES, readers._BATCH_BYTES, readers.CHUNK_BYTES = 2**20, 2**22, 2**16
def most_memory():
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index("VmHWM:") + 1]) * 1024
for path in map(Path, sys.argv[1:]):
    bad, before = [], most_memory()
    texts = [text[:4] for _, text in readers.read_file(path, "text", on_bad=lambda error: bad.append(str(error)))]
    print(json.dumps([path.name, len(texts), bad, most_memory() - before]))
"""


def test_no_row_takes_more_memory_than_the_longest_that_is_read(tmp_path):
    """32 MiB, of which a reader may take a MiB a row: refused by file and line, or read piece by piece."""
    good, row = b'{"text": "good"}\n', b'{"text": "' + b"x" * 2**25 + b'"}\n'
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(good + row + good, 1))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(row + good, 1))
    one = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 64), ["y" * 2**20])
    pyarrow.parquet.write_table(pyarrow.table({"text": one}), tmp_path / "c.parquet")
    texts = ["z" * 2**25, "good", "good"]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "d.parquet", row_group_size=1)
    files = sorted(map(str, tmp_path.iterdir()))
    done = subprocess.run([sys.executable, "-c", BOMBS, *files], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *told, took = zip(*map(json.loads, done.stdout.splitlines()), strict=True)
    remedy = "is longer than 1 MiB; cut it into rows, or give its text as a .txt"
    assert [*zip(*told, strict=True)] == [
        ("a.jsonl.zst", 2, [f"{tmp_path}/a.jsonl.zst line 2 {remedy}"]),
        ("b.jsonl.gz", 1, [f"{tmp_path}/b.jsonl.gz line 1 {remedy}"]),
        ("c.parquet", 64 * 22, []),
        ("d.parquet", 2, [f"{tmp_path}/d.parquet row 0 {remedy}"]),
    ]
    assert max(took) < 2**25


def bad_byte(path: Path) -> Path:
    """Write three rows or lines, of which the second is not UTF-8."""
    if path.suffix == ".parquet":
        cells = pyarrow.array([b"one\n", b"tw\xff\n", b"three\n"]).view(pyarrow.string())
        pyarrow.parquet.write_table(pyarrow.table({"text": cells}), path)
    else:
        json_rows = '{"text": "one\\n"}\n', '{"text": "tw?\\n"}\n', '{"text": "three\\n"}\n'
        lines = "".join(json_rows if ".json" in path.name else ("one\n", "tw?\n", "three\n"))
        whole = f"[{','.join(json_rows)}]" if path.name.endswith(".json") else lines
        data = whole.encode().replace(b"?", b"\xff")
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


PLACES = {"a.jsonl": "line 2", "a.txt": "line 2", "a.csv": "line 2", "a.json": "element 1", "a.parquet": "row 1"}
PLACES |= {"a.jsonl.gz": "line 2", "a.txt.gz": "line 2"}


@pytest.mark.parametrize("name", PLACES)
def test_a_bad_byte_costs_its_line_and_is_told_with_it(tmp_path, name):
    path, told = bad_byte(tmp_path / name), []
    assert "".join(read(path, on_bad=told.append)) == "one\nthree\n"
    message = f"{path} {PLACES[name]} is not UTF-8 text; convert the file with iconv -t UTF-8, or leave it out"
    assert [str(error) for error in told] == [message]
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value) == message


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_bad_byte_in_a_range_is_told_with_its_line_in_the_file(tmp_path, suffix):
    path, told = tmp_path / f"a{suffix}", []
    lines = [f"{'word ' * 50}{number} ä漢\n" for number in range(300)]
    lines = [json.dumps({"text": line}) + "\n" for line in lines] if suffix == ".jsonl" else lines
    data = "".join(lines).encode().split(b"\n")
    data[250] += b"\xe9"
    path.write_bytes(b"\n".join(data))
    parts = ranges(path, 10_000)
    found = [text for part in parts for text in read(path, part, on_bad=told.append)]
    assert len(parts) > 3 and found == read(path, on_bad=told.append)
    assert [str(error).split(" is not")[0] for error in told] == [f"{path} line 251"] * 2


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".tsv", ".txt.gz", ".jsonl", ".jsonl.zst", ".json"])
def test_a_byte_order_mark_is_no_text(tmp_path, suffix):
    texts = [f"{text}\n" for text in sentences(random.Random(0), 100)]
    expected = read(write(tmp_path / f"a{suffix}", texts))
    plain = write(tmp_path / f"plain{Path(suffix).stem if suffix.count('.') > 1 else suffix}", texts).read_bytes()
    pack = {"gz": gzip.compress, "zst": zstandard.compress}.get(suffix.rpartition(".")[2], bytes)
    path = tmp_path / f"b{suffix}"
    path.write_bytes(pack(b"\xef\xbb\xbf" + plain))
    assert read(path) == expected
    assert [text for part in ranges(path, 1000) for text in read(path, part)] == expected


def test_files_with_byte_order_marks_that_were_joined_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(b"\xef\xbb\xbf" + json.dumps({"text": text}).encode() + b"\n" for text in "ab"))
    assert read(path) == ["a", "b"]
