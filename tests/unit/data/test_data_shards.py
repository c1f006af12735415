"""Token shards as other libraries wrote them (tests/fixtures/shards/make.py), and what is refused of them."""

import contextlib
import itertools
import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard

from spes_p2p.config import DataConfig, OwnData, PeerConfig, RunConfig
from spes_p2p.data import mds, shard_formats
from spes_p2p.data import shards as module
from spes_p2p.data.packing import held_out_batches, token_file, train_sources
from spes_p2p.data.shard import whole_file
from spes_p2p.data.shard_formats import ShardFormat
from spes_p2p.data.shards import TokenShards, locate
from spes_p2p.data.tokenizer import load_tokenizer, resolve_tokenizer
from spes_p2p.data.windows import PackedWindows, TokenFile
from spes_p2p.errors import ConfigError, DataError

from .conftest import SAME

FIXTURES = Path(__file__).parents[2] / "fixtures" / "shards"
IDS: list[list[int]] = json.loads((FIXTURES / "ids.json").read_text())
FLAT = list(itertools.chain(*IDS))
VOCABULARY = 400
T = 16

DOCUMENTS = ["datatrove_uint16", "datatrove_uint32", "megatron_datatrove", "megatron_uint16", "megatron_int32"]
DOCUMENTS += ["mds_raw", "mds_zstd", "mds_any", "mds_bytes"]
RUNS = ["spes_uint16", "spes_uint32", "npy/flat.npy"]  # their formats do not say where documents end


def windows_in(part: module.TokenPart, indices: np.ndarray) -> np.ndarray:
    return PackedWindows(TokenFile(part, "key"), T).gather(indices).numpy()


def opened(*paths, vocab_size: int = VOCABULARY, cache: Path) -> TokenShards:
    return TokenShards([Path(path) for path in paths], vocab_size, cache)


@pytest.fixture
def folder(tmp_path):
    """Copies one fixture, to be damaged."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(FIXTURES / name, tmp_path / "copy" / name))

    return copy


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_are_those_that_the_library_wrote(tmp_path, name):
    shards = opened(FIXTURES / name, cache=tmp_path)
    assert [document.tolist() for document in shards.documents()] == IDS
    assert len(shards) == len(FLAT) and shards.has_documents


@pytest.mark.parametrize("name", RUNS)
def test_files_without_documents_hold_the_tokens_that_were_written(tmp_path, name):
    shards = opened(FIXTURES / name, cache=tmp_path)
    assert [document.tolist() for document in shards.documents()] == [FLAT]
    assert len(shards) == len(FLAT) and not shards.has_documents


def test_a_new_format_is_a_function_and_a_row(tmp_path, monkeypatch):
    row = ShardFormat(".tok", lambda path, vocab_size, cache: [whole_file(path, np.dtype("<u4"), start=4)])
    formats = (*shard_formats.FORMATS, row)
    for each in (shard_formats, module):
        monkeypatch.setattr(each, "FORMATS", formats)
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "a.tok").write_bytes(b"HEAD" + np.array(FLAT, "<u4").tobytes())
    for given in ("shards", "shards/*.tok", "shards/a"):
        assert [each.tolist() for each in opened(tmp_path / given, cache=tmp_path).documents()] == [FLAT]


def test_rows_of_fixed_length_are_documents(tmp_path):
    rows = [document.tolist() for document in opened(FIXTURES / "npy" / "rows.npy", cache=tmp_path).documents()]
    assert list(itertools.chain(*rows)) == FLAT[: len(rows) * 16] and {len(row) for row in rows} == {16}
    fixed = [document.tolist() for document in opened(FIXTURES / "mds_fixed", cache=tmp_path).documents()]
    assert fixed == [ids[:8] for ids in IDS if len(ids) >= 8]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_windows_are_slices_of_the_joined_documents_of_a_side_of_the_split(tmp_path, name, seed):
    shards = opened(FIXTURES / name, cache=tmp_path)
    below = random.Random(seed).randint(2**62, 2**63)
    sides = [shards.part(below, None, is_inside=is_inside, sequence_length=T) for is_inside in (False, True)]
    inside = [module.hashlib.sha256(np.array(ids, "<u4").tobytes()).digest()[:8] for ids in IDS]
    for side, is_inside in zip(sides, (False, True), strict=True):
        chosen = [i for i, h in zip(IDS, inside, strict=True) if (int.from_bytes(h, "little") < below) == is_inside]
        flat = list(itertools.chain(*chosen))
        assert len(side) == len(flat)
        expected = [flat[i : i + T + 1] for i in range(0, len(flat) - T, T)]
        assert windows_in(side, np.arange(len(expected))).tolist() == expected


def test_all_formats_hold_the_same_documents_out(tmp_path):
    parts = [
        opened(FIXTURES / name, cache=tmp_path).part(2**62, None, is_inside=True, sequence_length=T)
        for name in DOCUMENTS
    ]
    assert len({len(part) for part in parts}) == 1 and len(parts[0]) > T
    assert len({windows_in(part, np.arange(2)).tobytes() for part in parts}) == 1


def test_a_file_without_documents_is_split_by_windows_and_its_tail_dropped(tmp_path):
    shards = opened(FIXTURES / "spes_uint16", cache=tmp_path)
    sides = [shards.part(2**62, None, is_inside=is_inside, sequence_length=T) for is_inside in (False, True)]
    pieces = [windows_in(side, np.array([i]))[0, :T].tolist() for side in sides for i in range((len(side) - 1) // T)]
    whole = [FLAT[i : i + T] for i in range(0, len(FLAT) - T + 1, T)]
    assert sum(map(len, sides)) == len(whole) * T
    assert all(piece in whole for piece in pieces) and len(sides[1])


def test_the_fingerprint_follows_the_content_and_the_order_alone(tmp_path, folder):
    here = opened(FIXTURES / "spes_uint16", cache=tmp_path).fingerprint
    copied = folder("spes_uint16")
    assert opened(copied, cache=tmp_path).fingerprint == here
    os.utime(file := next(copied.iterdir()))
    assert opened(copied, cache=tmp_path).fingerprint == here
    data = bytearray(file.read_bytes())
    data[4] ^= 1
    file.write_bytes(data)
    assert opened(copied, cache=tmp_path).fingerprint != here
    divided, undivided = folder("datatrove_uint16"), tmp_path / "undivided"
    shutil.copytree(divided, undivided)
    next(undivided.glob("*.index")).unlink()
    found = [opened(each, cache=tmp_path).fingerprint for each in (divided, undivided)]
    assert found[0] != found[1], "without its index, the same tokens are other windows"
    one, two = FIXTURES / "datatrove_uint16", FIXTURES / "datatrove_uint32"
    assert opened(one, two, cache=tmp_path).fingerprint != opened(two, one, cache=tmp_path).fingerprint
    raw, packed = (opened(FIXTURES / name, cache=tmp_path).fingerprint for name in ("mds_raw", "mds_zstd"))
    assert raw != packed, "other types of ids are other files"


def test_shards_are_found_by_folder_pattern_list_and_prefix(tmp_path, folder):
    copied = folder("spes_uint16")
    file = next(copied.iterdir())
    (copied / "file_list.txt").write_text(f"/elsewhere/{file.name}\n")
    (copied / "README.md").write_text("what this is")
    for path in (copied, copied / "*.npy", file, copied / "file_list.txt"):
        assert locate([path]) == [file], path
    megatron = FIXTURES / "megatron_uint16" / "text_document"
    for path in (megatron, f"{megatron}.idx", f"{megatron}.bin", f"{megatron}*"):
        assert locate([Path(path)]) == [Path(f"{megatron}.idx")], path
    assert locate([FIXTURES / "mds_raw" / "index.json"]) == locate([FIXTURES / "mds_raw"])


def test_ids_at_odd_bytes_are_read(tmp_path):
    starts = opened(FIXTURES / "mds_raw", cache=tmp_path).shards[0].starts_D
    assert (starts % 2).any(), "the fixture has none"


def cut(suffix: str, num_bytes: int):
    def damage(path: Path) -> None:
        file = next(path.rglob(f"*{suffix}"))
        file.write_bytes(file.read_bytes()[:-num_bytes])

    return damage


def rewrite(suffix: str, data: bytes):
    def damage(path: Path) -> None:
        next(path.rglob(f"*{suffix}")).write_bytes(data)

    return damage


def patch(suffix: str, at: int, data: bytes):
    def damage(path: Path) -> None:
        file = next(path.rglob(f"*{suffix}"))
        content = bytearray(file.read_bytes())
        content[at : at + len(data)] = data
        file.write_bytes(content)

    return damage


def remove(suffix: str):
    def damage(path: Path) -> None:
        next(path.rglob(f"*{suffix}")).unlink()

    return damage


def index(change):
    def damage(path: Path) -> None:
        content = json.loads((path / "index.json").read_text())
        change(content)
        (path / "index.json").write_text(json.dumps(content))

    return damage


def add(name: str, data: bytes):
    return lambda path: (path / name).write_bytes(data)


def npy_header(text: str) -> bytes:
    """Return a true NumPy file of a header alone."""
    line = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line


ENDLESS = f"{{'descr': '<u4', 'fortran_order': False, 'shape': ({10**30},)}}"
BAD = {
    "raw cut in an id": ("spes_uint32", cut(".npy", 3), ".npy", "truncated"),
    "raw empty": ("spes_uint16", rewrite(".npy", b""), ".npy", "holds no tokens"),
    "ids over the vocabulary": ("spes_uint16", patch(".npy", 10, b"\xff\x7f"), ".npy", "set data.tokenizer"),
    "text called npy": ("spes_uint16", rewrite(".npy", b"some text, not ids"), ".npy", "set data.tokenizer"),
    "true npy cut": ("npy", cut("rows.npy", 9), "rows.npy", "write the ids again"),
    "true npy of objects": ("npy", lambda path: np.save(path / "flat.npy", np.array([{}])), "flat.npy", "integers"),
    "true npy of floats": ("npy", lambda path: np.save(path / "flat.npy", np.ones(99)), "flat.npy", "integer ids"),
    "true npy of another endianness": (
        *("npy", lambda path: np.save(path / "flat.npy", np.ones(99, ">u4")), "flat.npy", "astype"),
    ),
    "true npy of an endless shape": ("npy", rewrite("flat.npy", npy_header(ENDLESS)), "flat.npy", "integers"),
    "true npy header cut": ("npy", rewrite("flat.npy", npy_header("{'descr':")), "flat.npy", "integers"),
    "datatrove cut": ("datatrove_uint16", cut(".ds", 20), ".ds", "fetch both again"),
    "datatrove of another type": ("datatrove_uint16", rewrite(".ds", b"\0" * 711), ".ds", "fetch both again"),
    "datatrove index cut": ("datatrove_uint16", cut(".index", 3), ".index", "fetch it again"),
    "datatrove index of others": ("datatrove_uint16", cut(".index", 8), ".ds", "fetch both again"),
    "datatrove index falls": ("datatrove_uint16", patch(".index", 8, bytes(8)), ".index", "write it again"),
    "megatron tokens cut": ("megatron_int32", cut(".bin", 4), ".bin", "truncated"),
    "megatron index cut": ("megatron_int32", cut(".idx", 5), ".idx", "truncated"),
    "megatron index of a few bytes": ("megatron_int32", cut(".idx", 990), ".idx", "truncated"),
    "megatron index of something": ("megatron_int32", patch(".idx", 0, b"NOTHING"), ".idx", "no Megatron index"),
    "megatron floats": ("megatron_int32", patch(".idx", 17, b"\7"), ".idx", "type 7"),
    "megatron without tokens": ("megatron_int32", remove(".bin"), ".bin", "fetch it as well"),
    "megatron negative offset": ("megatron_datatrove", patch(".idx", 34 + 120, b"\xff" * 8), ".bin", "negative"),
    "megatron negative ids": ("megatron_int32", patch(".bin", 0, b"\xff" * 4), ".bin", "the id -1"),
    "mds pickled": ("mds_pkl", lambda path: None, "index.json", "ndarray:uint32"),
    "mds shard cut": ("mds_raw", cut(".mds", 5), ".mds", "fetch it again"),
    "mds shard gone": ("mds_raw", remove("00000.mds"), "00000.mds", "check the file"),
    "mds zstd damaged": ("mds_zstd", patch(".zstd", 9, b"\xff" * 20), ".zstd", "check the file"),
    "mds zstd of another length": (
        *("mds_zstd", index(lambda c: c["shards"][0]["raw_data"].update(bytes=77)), ".zstd", "fetch it again"),
    ),
    "mds of version 1": ("mds_raw", index(lambda c: c.update(version=1)), "index.json", "MDSWriter"),
    "mds with a path": (
        *("mds_raw", index(lambda c: c["shards"][0]["raw_data"].update(basename="../a")), "index.json", "plain name"),
    ),
    "mds of another count": ("mds_raw", index(lambda c: c["shards"][0].update(samples=3)), ".mds", "fetch it again"),
    "mds offsets": ("mds_raw", patch("00000.mds", 8, b"\1\0\0\0"), "00000.mds", "fetch it again"),
    "mds compressed otherwise": (
        *("mds_zstd", index(lambda c: c["shards"][0].update(compression="snappy")), "zstd", "without"),
    ),
    "mds of text": (
        *("mds_raw", index(lambda c: c["shards"][0].update(column_encodings=["int", "bytes", "str", "str"]))),
        *("index.json", "call it tokens"),
    ),
    "mds entry without a field": ("mds_raw", index(lambda c: c["shards"][0].pop("samples")), "index.json", "again"),
    "mds index no json": ("mds_raw", rewrite("index.json", b'{"version": 2, '), "index.json", "not JSON"),
    "a picture among shards": ("spes_uint16", add("logo.png", b"\x89PNG"), "logo.png", "by a pattern"),
    "text among shards": ("spes_uint16", add("a.jsonl", b"{}"), "a.jsonl", "--text"),
}


@pytest.mark.parametrize("ending", [each.ending for each in shard_formats.FORMATS])
def test_every_format_has_a_fixture_damaged_copies_and_a_row_in_the_docs(ending):
    files = {name: [FIXTURES / name, *(FIXTURES / name).glob("*")] for name in (*DOCUMENTS, *RUNS)}
    names = {name for name, found in files.items() if any(file.name.endswith(ending) for file in found)}
    assert names and names & {name for name, *_ in BAD.values()}
    table = [line for line in (FIXTURES.parents[2] / "docs" / "data.md").read_text().splitlines() if line[0:1] == "|"]
    assert any(f"{ending}`" in line for line in table)


@pytest.mark.parametrize("case", BAD)
def test_bad_shards_are_refused_by_name_with_the_remedy(tmp_path, folder, case):
    name, damage, file, remedy = BAD[case]
    damage(path := folder(name))
    with pytest.raises(DataError) as caught:
        opened(path, cache=tmp_path / "cache").part(2**62, None, is_inside=True, sequence_length=T)
    said = str(caught.value)
    assert file in said and remedy in said and ";" in said and "\n" not in said


def test_absent_shards_are_configuration_errors(tmp_path):
    (tmp_path / "list.txt").write_text("absent.npy\n")
    for path, said in (("absent", "does not exist"), ("*.npy", "matches no file"), ("list.txt", "names absent.npy")):
        with pytest.raises(ConfigError, match=said.replace("*", r"\*")):
            locate([tmp_path / path])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no token shards"):
        locate([tmp_path / "empty"])


def test_text_given_as_shards_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("plain words\n")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    for name in ("a.txt", "a.jsonl"):
        with pytest.raises(DataError, match=f"{name}.*--text"):
            locate([tmp_path / name])


def test_a_shard_named_twice_is_refused(tmp_path):
    with pytest.raises(DataError, match="named twice"):
        locate([FIXTURES / "spes_uint16", FIXTURES / "spes_uint16" / "tokens_000_000001.npy"])


@pytest.mark.parametrize("how", ["truncated", "replaced", "deleted", "grown"])
def test_a_shard_that_changes_while_it_is_read_is_refused(tmp_path, folder, how):
    file = next(folder("spes_uint16").iterdir())
    part = opened(file, cache=tmp_path).part(2**62, None, is_inside=False, sequence_length=T)
    windows_in(part, np.arange(3))
    data = file.read_bytes()
    if how == "truncated":
        os.truncate(file, 0)
    elif how == "replaced":
        file.with_suffix(".new").write_bytes(data[:-2] + data[:2])
        file.with_suffix(".new").replace(file)
    elif how == "deleted":
        file.unlink()
    else:
        file.write_bytes(data * 2)
    with pytest.raises(DataError, match=r"tokens_000_000001.npy was changed while it was read; .*--resume"):
        windows_in(part, np.arange(3))


def test_a_shard_with_the_same_content_is_read_on_whatever_its_times(tmp_path, folder):
    file = next(folder("spes_uint16").iterdir())
    part = opened(file, cache=tmp_path).part(2**62, None, is_inside=False, sequence_length=T)
    before = windows_in(part, np.arange(3)).tolist()
    for change in SAME.values():
        change(file)
        assert windows_in(part, np.arange(3)).tolist() == before


def test_a_compressed_shard_is_unpacked_only_where_there_is_room(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
        with pytest.raises(ConfigError, match=r"mds has 100 bytes free, .*unpacks to .*; set --cache"):
            opened(FIXTURES / "mds_zstd", cache=tmp_path)
    assert not list(tmp_path.rglob("*.raw")) and len(opened(FIXTURES / "mds_zstd", cache=tmp_path))


def test_ids_beyond_the_vocabulary_that_no_sample_met_end_the_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAMPLES", 0)
    shards = opened(FIXTURES / "npy" / "flat.npy", vocab_size=max(FLAT), cache=tmp_path)
    monkeypatch.undo()
    part = TokenShards.part
    with pytest.raises(DataError, match=f"the id {max(FLAT)} "):
        part(shards, 2**62, None, is_inside=False, sequence_length=T)


def test_more_files_than_are_mapped_at_a_time_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_MAPPED", 2)
    flat = np.array(FLAT, "<u2")
    for number, piece in enumerate(np.array_split(flat, 7)):
        piece.tofile(tmp_path / f"{number}.npy")
    shards = opened(*sorted(tmp_path.glob("*.npy")), cache=tmp_path / "cache")
    assert np.concatenate(list(shards.documents())).tolist() == FLAT
    assert shards._buffer.cache_info().currsize == 2


def test_digests_are_computed_once(tmp_path, monkeypatch):
    first = opened(FIXTURES / "mds_zstd", cache=tmp_path)
    fingerprint = first.fingerprint
    monkeypatch.delattr(module.hashlib, "file_digest")  # reading would now raise
    assert opened(FIXTURES / "mds_zstd", cache=tmp_path).fingerprint == fingerprint


@pytest.fixture(scope="module")
def fixture_tokenizer():
    return load_tokenizer(FIXTURES / "tokenizer")


def data_of(name: str, **more) -> DataConfig:
    settings = {"source": "files", "paths": [FIXTURES / name], "sequence_length": T, "held_out_fraction": 0.3}
    return DataConfig(**{**settings, **more})


def test_a_run_draws_every_training_window_of_the_shards_once_an_epoch(tmp_path, fixture_tokenizer, seed):
    more = {"paths": [], "cache": tmp_path}
    data = data_of("datatrove_uint16")
    source = train_sources(data, fixture_tokenizer, **more)(seed)
    flat = token_file(data, fixture_tokenizer, part="train", **more).tokens_N
    expected = windows_in(flat, np.arange((len(flat) - 1) // T)).tolist()
    drawn = source.next_batch(len(expected))
    assert sorted(drawn.tolist()) == sorted(expected) and drawn.tolist() != expected
    held_out = held_out_batches(data, fixture_tokenizer, num_sequences=99, batch_size=4, seed=0, **more)
    held = [window for batch in held_out for window in batch.tolist()]
    assert len(held) >= 8 and not {tuple(window) for window in held} & {tuple(window) for window in expected}


def test_a_position_is_resumed_on_another_copy_of_the_shards_and_refused_on_others(tmp_path, fixture_tokenizer, folder):
    more = {"paths": [], "cache": tmp_path}
    first = train_sources(data_of("datatrove_uint16"), fixture_tokenizer, **more)(1)
    first.next_batch(5)
    state, expected = first.state_dict(), first.next_batch(7).tolist()
    copied = data_of("", paths=[folder("datatrove_uint16")])
    again = train_sources(copied, fixture_tokenizer, **more)(1)
    again.load_state_dict(json.loads(json.dumps(state)))
    assert again.next_batch(7).tolist() == expected
    other = train_sources(data_of("mds_zstd"), fixture_tokenizer, **more)(1)
    with pytest.raises(DataError, match="the saved data order has tokens="):
        other.load_state_dict(state)


def test_the_halves_of_the_held_out_part_join_to_the_whole(tmp_path, fixture_tokenizer):
    parts = {
        part: token_file(data_of("mds_raw"), fixture_tokenizer, paths=[], cache=tmp_path, part=part).tokens_N
        for part in ("train", "held_out", "tuning", "reported")
    }
    assert len(parts["tuning"]) + len(parts["reported"]) == len(parts["held_out"])
    assert len(parts["train"]) + len(parts["held_out"]) == len(FLAT)
    assert len(parts["tuning"]) and len(parts["reported"])


def test_only_the_shards_that_the_run_names_are_trained_on(tmp_path, fixture_tokenizer):
    fingerprint = opened(FIXTURES / "mds_raw", cache=tmp_path).fingerprint
    more = {"paths": [], "cache": tmp_path, "part": "train"}
    assert token_file(data_of("mds_raw", fingerprint=fingerprint), fixture_tokenizer, **more)
    with pytest.raises(DataError, match=f"this run trains on {fingerprint}; fetch its shards"):
        token_file(data_of("mds_zstd", fingerprint=fingerprint), fixture_tokenizer, **more)


def test_shards_without_a_manifest_need_a_tokenizer(tmp_path, fixture_tokenizer):
    with pytest.raises(ConfigError, match=r"set data.tokenizer"):
        resolve_tokenizer(data_of("mds_raw"), [], tmp_path)
    named = data_of("mds_raw", tokenizer=str(FIXTURES / "tokenizer"))
    assert len(resolve_tokenizer(named, [], tmp_path)) == len(fixture_tokenizer)


def test_a_founders_paths_are_never_read_on_another_machine():
    theirs = DataConfig(source="files", paths=[Path("/etc")])
    joining = PeerConfig(run_id="r", initial_peers=["/ip4/127.0.0.1/tcp/1/p2p/Qm"], data=[Path("mine")])
    assert joining.corpus(theirs).paths == [Path("mine")]
    assert PeerConfig(run_id="r", text=[Path("mine.txt")]).corpus(theirs).paths == []
    founder = PeerConfig(run_id="r", run=RunConfig(data=theirs))
    assert founder.corpus(theirs).paths == [Path("/etc")]


@pytest.mark.parametrize(
    ("own", "data", "said"),
    [
        ({"data": ["a"], "text": ["b"]}, {"source": "files"}, "--text and --data exclude each other"),
        ({"data": ["a"]}, {"source": "embedded"}, "trains on its own text .data.source=embedded.; drop --data"),
        ({"text": ["a"]}, {"source": "embedded"}, "trains on its own text .data.source=embedded.; drop --text"),
        ({"text": ["a"]}, {"source": "files", "fingerprint": "0" * 64}, "name them with --data"),
    ],
)
def test_data_that_do_not_fit_the_run_are_refused(own, data, said):
    with pytest.raises(ConfigError, match=said):
        OwnData(**own).corpus(DataConfig(**data))


@pytest.mark.parametrize("setting", [{"paths": ["a"]}, {"fingerprint": "0" * 64}])
def test_shards_need_the_source_files(setting):
    with pytest.raises(ValueError, match=r"needs data.source=files"):
        DataConfig(**setting)


def test_a_compressed_shard_is_unpacked_no_further_than_its_index_says(tmp_path, folder, monkeypatch):
    path, written = folder("mds_zstd"), []
    content = json.loads((path / "index.json").read_text())
    bomb = zstandard.compress(bytes(2**26))
    entry = content["shards"][0]
    (path / entry["zip_data"]["basename"]).write_bytes(bomb)
    entry["zip_data"]["bytes"] = len(bomb)
    (path / "index.json").write_text(json.dumps(content))
    real = mds.write_atomic

    @contextlib.contextmanager
    def counting(file: Path):
        with real(file) as stream:
            try:
                yield stream
            finally:
                written.append(stream.tell())

    monkeypatch.setattr(mds, "write_atomic", counting)
    with pytest.raises(DataError, match="does not decompress to"):
        opened(path, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.raw")) and max(written) <= 2**20
