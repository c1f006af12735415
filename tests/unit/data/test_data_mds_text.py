"""MDS shards of text, as MosaicML's own writer has written them (tests/fixtures/shards/make.py)."""

import json
import random
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import zstandard

from spes_p2p.cli import load_settings
from spes_p2p.commands.tokenize import main as tokenize
from spes_p2p.config import DataConfig
from spes_p2p.config.commands import TokenizeConfig
from spes_p2p.data.packing import held_out_batches, token_file
from spes_p2p.data.readers import read_file
from spes_p2p.data.shards import TokenShards
from spes_p2p.data.sources import documents
from spes_p2p.data.tokenizer import load_tokenizer, resolve_tokenizer
from spes_p2p.errors import DataError

FIXTURES = Path(__file__).parents[2] / "fixtures" / "shards"
TEXTS = [json.loads(line)["text"] for line in (FIXTURES / "texts.jsonl").read_text().splitlines()]
IDS: list[list[int]] = json.loads((FIXTURES / "ids.json").read_text())
TOKENIZER = str(FIXTURES / "tokenizer")
KINDS = ["mds_text", "mds_text_zstd"]


def data_of(*paths: Path, **more) -> DataConfig:
    return DataConfig(source="files", paths=[*paths], sequence_length=16, held_out_fraction=0.2, **more)


def texts_of(*paths: Path, data: DataConfig | None = None) -> list[str]:
    data = data or data_of(*paths)
    return [document.text for document in documents(data, [])]


def write_mds(folder: Path, rows: list[dict], columns: dict[str, str], *, kind: str | None = None) -> Path:
    """Write one shard and its index as MDSWriter lays them out."""
    folder.mkdir(parents=True)
    samples = []
    for row in rows:
        cells = [json.dumps(v).encode() if columns[name] == "json" else str(v).encode() for name, v in row.items()]
        samples.append(struct.pack(f"<{len(cells)}I", *map(len, cells)) + b"".join(cells))
    about = {
        **{"column_names": [*columns], "column_encodings": [*columns.values()], "column_sizes": [None] * len(columns)},
        **{"compression": kind, "format": "mds", "hashes": [], "size_limit": None, "version": 2},
    }
    head = json.dumps(about).encode()
    starts = np.cumsum([8 + 4 * len(rows) + len(head), *map(len, samples)])
    raw = struct.pack(f"<I{len(starts)}I", len(rows), *starts) + head + b"".join(samples)
    packed = {"zstd": zstandard.compress, "gz": lambda data: zlib.compress(data, wbits=31)}.get(kind or "", lambda d: d)
    name = "shard.00000.mds" + (f".{kind}" if kind else "")
    (folder / name).write_bytes(packed(raw))
    entry = {**about, "samples": len(rows), "raw_data": {"basename": "shard.00000.mds", "bytes": len(raw)}}
    entry["zip_data"] = {"basename": name} if kind else None
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [entry]}))
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("named", [".", "index.json"])
def test_the_samples_are_the_texts_that_were_written(kind, named):
    assert texts_of(FIXTURES / kind / named) == TEXTS
    paths = [FIXTURES / kind / named]
    assert [d.text for d in documents(DataConfig(source="files"), paths)] == TEXTS, "as --text"


@pytest.mark.parametrize("kind", KINDS)
def test_data_of_mds_text_gives_the_tokens_of_the_same_text_in_json(tmp_path, kind):
    """By --data, with the run's tokenizer, named or trained on the text."""
    rows = FIXTURES / "texts.jsonl"
    trained = [
        resolve_tokenizer(data, paths, tmp_path).get_vocab()
        for data, paths in ((data_of(FIXTURES / kind), []), (DataConfig(source="files", held_out_fraction=0.2), [rows]))
    ]
    assert trained[0] == trained[1]
    tokenizer = resolve_tokenizer(data_of(FIXTURES / kind, tokenizer=TOKENIZER), [], tmp_path)
    for part in ("train", "held_out"):
        mds = token_file(data_of(FIXTURES / kind), tokenizer, paths=[], cache=tmp_path, part=part)
        json_lines = token_file(data_of(), tokenizer, paths=[rows], cache=tmp_path, part=part)
        assert mds.tokens_N.tolist() == json_lines.tokens_N.tolist() and len(mds.tokens_N) > 16
        assert mds.ends_D is None and mds.tokens_N.dtype == np.uint16, "it is text, not conversations"


@pytest.mark.parametrize("kind", [*KINDS, "mds_raw"])
def test_spes_tokenize_writes_the_tokens_of_each_sample(tmp_path, kind):
    argv = ["--file-glob", str(FIXTURES / kind), "--output-prefix", f"{tmp_path}/s/", "--tokenizer", TOKENIZER]
    assert tokenize(load_settings(TokenizeConfig, [*argv, "--processes", "1", "--cache", str(tmp_path)])) == 0
    shards = TokenShards([tmp_path / "s"], 400, tmp_path)
    tokenizer = load_tokenizer(TOKENIZER)
    texts = [f"text {number}" for number in range(len(TEXTS))] if kind == "mds_raw" else TEXTS
    expected = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    assert [ids.tolist() for ids in shards.documents()] == expected and (kind == "mds_raw" or expected == IDS)


@pytest.mark.parametrize("kind", [None, "zstd", "gz"])
def test_other_columns_and_compressions_are_read(tmp_path, kind, seed):
    texts = [f"{number} " + "ä漢 " * random.Random(seed).randint(0, 9) for number in range(50)]
    rows = [{"meta": {"n": [1, None]}, "content": text, "id": text[:1]} for text in texts]
    folder = write_mds(tmp_path / "mds", rows, {"meta": "json", "content": "str", "id": "str"}, kind=kind)
    assert texts_of(folder, data=data_of(folder, text_field="content")) == texts
    with pytest.raises(DataError, match=r"no field 'text' \(it has: content, id, meta\)"):
        texts_of(folder)
    with pytest.raises(DataError, match="field 'meta' holds dict, not text"):
        texts_of(folder, data=data_of(folder, text_field="meta"))


def test_a_set_in_subfolders_is_read_once(tmp_path):
    """With indexes of the parts alone, and with one merged of them; compressed shards stay beside unpacked ones."""
    both = [*TEXTS, *TEXTS]
    for name, kind in (("00", "mds_text"), ("01", "mds_text_zstd")):
        shutil.copytree(FIXTURES / kind, tmp_path / "set" / name)
    assert texts_of(tmp_path / "set") == both
    shards = []
    for part in ("00", "01"):
        for entry in json.loads((tmp_path / "set" / part / "index.json").read_text())["shards"]:
            for key in ("raw_data", "zip_data"):
                if entry[key]:
                    entry[key]["basename"] = f"{part}/{entry[key]['basename']}"
            shards.append(entry)
    (tmp_path / "set" / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    assert texts_of(tmp_path / "set") == texts_of(tmp_path / "set" / "index.json") == both
    for file in (FIXTURES / "mds_text_zstd").glob("*.zstd"):
        packed = tmp_path / "set" / "01" / file.stem
        packed.write_bytes(zstandard.decompress(file.read_bytes(), 2**20))
    assert texts_of(tmp_path / "set") == both, "as streaming's cache keeps both"


def test_of_folders_of_splits_the_training_split_is_read(tmp_path):
    columns = {"text": "str"}
    for split in ("train", "val"):
        write_mds(tmp_path / "set" / split, [{"text": f"{split} {n}"} for n in range(9)], columns)
    assert texts_of(tmp_path / "set") == [f"train {n}" for n in range(9)]
    assert texts_of(tmp_path / "set" / "val") == [f"val {n}" for n in range(9)]
    for name in ("train", "val"):
        shutil.copytree(FIXTURES / "mds_raw", tmp_path / "tokens" / name)
    assert len(TokenShards([tmp_path / "tokens"], 400, tmp_path)) == sum(map(len, IDS)), "of tokens, too"


def damaged(folder: Path, name: str, change) -> None:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize("at", [2, 30, 200, 700, -3])
def test_a_shard_that_is_cut_is_refused_by_name(tmp_path, at):
    folder = Path(shutil.copytree(FIXTURES / "mds_text", tmp_path / "set"))
    damaged(folder, "shard.00001.mds", lambda data: data[:at])
    with pytest.raises(DataError, match=r"shard\.00001\.mds .*fetch it again"):
        texts_of(folder)
    (folder / "shard.00001.mds").unlink()
    with pytest.raises(DataError, match=r"shard\.00001\.mds does not exist, but .*index\.json names it"):
        texts_of(folder)


def test_a_sample_that_is_no_text_is_named_and_can_be_left_out(tmp_path):
    folder = Path(shutil.copytree(FIXTURES / "mds_text", tmp_path / "set"))
    shard = folder / "shard.00000.mds"
    damaged(folder, shard.name, lambda data: data.replace(TEXTS[1].encode(), b"\xff" * len(TEXTS[1].encode())))
    with pytest.raises(DataError, match="sample 1 holds neither UTF-8"):
        [*read_file(shard, "text")]
    bad: list[DataError] = []
    kept = [text for _, text in read_file(shard, "text", on_bad=bad.append)]
    assert len(bad) == 1 and kept == [text for text in TEXTS[: len(kept) + 1] if text != TEXTS[1]]


def test_a_run_that_shares_token_shards_takes_no_text_for_them(tmp_path):
    data = data_of(FIXTURES / "mds_text", fingerprint="0" * 64)
    with pytest.raises(DataError, match="tokenise its text with spes tokenize"):
        held_out_batches(
            data, load_tokenizer(TOKENIZER), paths=[], cache=tmp_path, num_sequences=1, batch_size=1, seed=0
        )
