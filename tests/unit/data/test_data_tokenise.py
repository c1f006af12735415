"""`spes tokenize`: the same bytes however it is made, what is left out, and what is refused."""

import contextlib
import gzip
import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from spes_p2p.commands.local import _own, _with_data
from spes_p2p.commands.tokenize import main
from spes_p2p.config import DataConfig, PeerConfig, RunConfig
from spes_p2p.config.changes import check_kept_settings
from spes_p2p.config.commands import ExperimentConfig, TokenizeConfig
from spes_p2p.data import tokenise as module
from spes_p2p.data.packing import held_out_batches, token_file, train_sources
from spes_p2p.data.readers import read_file
from spes_p2p.data.shards import TokenShards, read_manifest
from spes_p2p.data.tokenizer import load_tokenizer, resolve_tokenizer, tokenizer_digest
from spes_p2p.data.windows import PackedWindows, TokenFile
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.peer.settings import founder_settings

from .conftest import EDITS, SAME, sentences, write_rows
from .test_data_readers import write

FIXTURES = Path(__file__).parents[2] / "fixtures" / "shards"
TOKENIZER = str(FIXTURES / "tokenizer")
IDS: list[list[int]] = json.loads((FIXTURES / "ids.json").read_text())
TEXTS = [json.loads(line)["text"] for line in (FIXTURES / "texts.jsonl").read_text().splitlines()]


@pytest.fixture
def tokenised(tmp_path):
    """Runs the command in this process."""

    def run(*files: object, output: str = "shards/", **more) -> Path:
        more = {"tokenizer": TOKENIZER, "processes": 1, **more}
        settings = TokenizeConfig(
            file_glob=[str(file) for file in files],
            output_prefix=f"{tmp_path}/{output}",
            cache=tmp_path / "cache",
            **more,
        )
        assert main(settings) == 0
        return Path(f"{tmp_path}/{output}manifest.json")

    return run


def contents(folder: Path) -> dict[str, str]:
    """Digest of every file; those of the list of files name the folder, which differs."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "file_list.txt"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def documents(manifest: Path, tmp_path: Path) -> list[list[int]]:
    return [ids.tolist() for ids in TokenShards([manifest], 1000, tmp_path / "digests").documents()]


def mixed(folder: Path, seed: int, num_documents: int = 400) -> Path:
    """A corpus in many formats."""
    folder.mkdir()
    generator = random.Random(seed)
    for name in ("a.jsonl", "b.json.gz", "c.parquet", "d.txt", "e.jsonl.zst", "f.parquet.zst", "g.txt.gz"):
        write(folder / name, [f"{name} {text} ünï\n" for text in sentences(generator, num_documents)])
    return folder


FORMATS = [f"a{suffix}{packed}" for suffix in (".jsonl", ".json", ".parquet") for packed in ("", ".gz", ".zst")]


def test_ids_are_the_tokenizers_own_for_every_format(tokenised, tmp_path):
    for number, name in enumerate(FORMATS):
        write(tmp_path / name, TEXTS)
        manifest = tokenised(tmp_path / name, output=f"{number}/")
        assert documents(manifest, tmp_path) == IDS, name


def test_text_files_are_documents_like_a_run_makes_them(tokenised, tmp_path, seed):
    path = write(tmp_path / "a.txt", [f"{text}\n" for text in sentences(random.Random(seed), 200)])
    for number, packed in enumerate(("", ".gz", ".zst")):
        manifest = tokenised(write(tmp_path / f"a.txt{packed}", [path.read_text()]), output=f"{number}/")
        tokenizer = load_tokenizer(TOKENIZER)
        read = [text for _, text in module_reader(path)]
        assert documents(manifest, tmp_path) == [
            [*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in read
        ]


def module_reader(path: Path):

    return read_file(path, "text")


def test_a_run_trains_on_shards_as_on_their_text(tokenised, tmp_path, seed):
    """The same training windows and held-out windows as with --text."""
    path = write_rows(tmp_path / "corpus" / "a.jsonl", sentences(random.Random(seed), 150))
    manifest = tokenised(path, tokenizer=None)
    cache, settings = tmp_path / "cache", {"source": "files", "sequence_length": 16, "held_out_fraction": 0.3}
    text, shards = DataConfig(**settings), DataConfig(**settings, paths=[manifest.parent])
    tokenizer = resolve_tokenizer(shards, [], cache)
    for part in ("train", "held_out", "tuning", "reported"):
        expected = token_file(text, tokenizer, paths=[path], cache=cache, part=part).tokens_N
        found = token_file(shards, tokenizer, paths=[], cache=cache, part=part).tokens_N
        count = (len(expected) - 1) // 16
        assert len(found) == len(expected) and count > 8
        rows = [expected[i * 16 : i * 16 + 17].tolist() for i in range(count)]
        assert PackedWindows(TokenFile(found, "key"), 16).gather(np.arange(count)).tolist() == rows
    sources = [train_sources(data, tokenizer, paths=[path], cache=cache)(7) for data in (text, shards)]
    assert sources[0].next_batch(20).tolist() == sources[1].next_batch(20).tolist()


def test_the_bytes_do_not_depend_on_processes_or_batches(tokenised, tmp_path, seed, monkeypatch):
    corpus = mixed(tmp_path / "corpus", seed)
    monkeypatch.setattr(module, "PIECE_BYTES", (random.Random(seed).randint(5_000, 30_000),) * 2)
    settings = {"max_shard_bytes": 50_000}
    one = contents(tokenised(corpus, output="one/", **settings).parent)
    assert len(one) > 5
    assert contents(tokenised(corpus, output="two/", processes=2, batch_size=7, **settings).parent) == one
    monkeypatch.undo()
    assert contents(tokenised(corpus, output="whole/", **settings).parent) == one, "pieces leave no trace"


def test_shards_end_with_documents_and_stay_below_their_size(tokenised, tmp_path):
    manifest = read_manifest(tokenised(FIXTURES / "texts.jsonl", max_shard_bytes=200))
    assert len(manifest.shards) > 4 and manifest.tokens == sum(map(len, IDS))
    longest = 2 * max(map(len, IDS))
    assert all(shard.bytes <= max(200, longest) for shard in manifest.shards)
    assert documents(tmp_path / "shards" / "manifest.json", tmp_path) == IDS
    for shard in manifest.shards:
        data = (tmp_path / "shards" / shard.file).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (shard.bytes, shard.sha256)


def test_a_document_longer_than_a_shard_has_one_of_its_own(tokenised, tmp_path):
    manifest = read_manifest(tokenised(FIXTURES / "texts.jsonl", max_shard_bytes=1))
    assert [shard.documents for shard in manifest.shards] == [1] * len(IDS)


def test_the_list_of_files_and_a_prefix_lead_to_the_same_shards(tokenised, tmp_path):
    manifest = tokenised(FIXTURES / "texts.jsonl", output="books_", max_shard_bytes=500, dtype="uint32")
    assert manifest.name == "books_manifest.json" and (tmp_path / "books_000001.npy").exists()
    shards = [
        TokenShards([path], 1000, tmp_path / "digests")
        for path in (manifest, tmp_path / "books_file_list.txt", tmp_path / "books_*.npy")
    ]
    assert {one.fingerprint for one in shards} == {read_manifest(manifest).fingerprint}
    assert all([ids.tolist() for ids in one.documents()] == IDS for one in shards)


def test_what_is_unusable_is_left_out_and_counted_only_when_asked(tokenised, tmp_path):
    corpus = tmp_path / "corpus"
    write_rows(corpus / "a.jsonl", TEXTS)
    (corpus / "b.jsonl").write_text('{"text": "one"}\nno json\n{"body": 1}\n{"text": "two"}\n')
    with pytest.raises(DataError, match=r"b.jsonl line 2 is not JSON"):
        tokenised(corpus)
    assert [path.name for path in (tmp_path / "shards").iterdir()] == [".partial"], "nothing half-written is in place"
    (corpus / "c.png").write_bytes(b"\x89PNG" + bytes(99))
    (corpus / "d.txt").write_text(" \n")
    manifest = read_manifest(tokenised(corpus, skip_unusable=True))
    assert {Path(entry.name).name: entry.reason.split(";")[0] for entry in manifest.skipped} == {
        "c.png": f"{corpus}/c.png holds a PNG image, not UTF-8 text",
        "d.txt": f"{corpus}/d.txt holds no text",
    }
    assert {Path(s.name).name: (s.documents, s.skipped_rows) for s in manifest.sources} == {
        "a.jsonl": (len(TEXTS), 0),
        "b.jsonl": (2, 2),
    }
    assert read_manifest(tokenised(corpus, skip_unusable=True)) == manifest
    with pytest.raises(DataError, match="shards of other text or settings"):
        tokenised(corpus)  # which takes no text with gaps


def test_a_prefix_that_begins_another_touches_none_of_its_shards(tokenised, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", TEXTS)
    other = tokenised(path, output="shards/web2")
    before = documents(other, tmp_path)
    tokenised(path, output="shards/web")
    assert documents(other, tmp_path) == before


@pytest.mark.parametrize("file", ["index.json", "000000.ds", "other.npy", "with-header.npy"])
def test_a_manifest_names_nothing_that_the_command_does_not_write(tokenised, tmp_path, file):
    """Other formats unpack more than they take, or say more than they hold."""
    manifest = tokenised(write_rows(tmp_path / "a.jsonl", TEXTS))
    folder, said = manifest.parent, json.loads(manifest.read_text())
    entry = said["shards"][0]
    shutil.copy(folder / entry["file"], folder / file)
    if file == "with-header.npy":
        np.save(folder / file, np.arange(10, dtype=np.uint16))
        shutil.copy(folder / entry["documents_file"], folder / "with-header.docs")
        entry["documents_file"] = "with-header.docs"
    entry |= {"file": file, "sha256": hashlib.sha256((folder / file).read_bytes()).hexdigest()}
    said["fingerprint"] = module.fingerprint_of([(said["dtype"], each["sha256"]) for each in said["shards"]])
    manifest.write_text(json.dumps(said))
    with pytest.raises(DataError, match="which spes tokenize does not write"):
        documents(manifest, tmp_path)


def test_the_same_command_again_does_nothing_and_another_is_refused(tokenised, tmp_path, monkeypatch):
    path = write_rows(tmp_path / "a.jsonl", TEXTS)
    before = contents(tokenised(path).parent)
    with monkeypatch.context() as patched:
        patched.setattr(module, "make_parts", lambda *_: pytest.fail("tokenised again"))
        assert contents(tokenised(path).parent) == before
    for more in ({"dtype": "uint32"}, {"max_shard_bytes": 100}, {"text_field": "body"}):
        with pytest.raises(DataError, match=r"has shards of other text or settings; delete them"):
            tokenised(path, **more)
    write_rows(path, TEXTS[::-1])
    with pytest.raises(DataError, match="of other text or settings"):
        tokenised(path)
    assert contents(tmp_path / "shards") == before


@pytest.mark.parametrize("change", SAME)
def test_a_file_with_the_same_content_is_the_same_text_whatever_its_times(tokenised, tmp_path, monkeypatch, change):
    path = write_rows(tmp_path / "corpus" / "a.jsonl", TEXTS)
    before = contents(tokenised(path).parent)
    SAME[change](path)
    with monkeypatch.context() as patched:
        patched.setattr(module, "make_parts", lambda *_: pytest.fail("tokenised again"))
        assert contents(tokenised(path).parent) == before
        patched.chdir(tmp_path)
        assert contents(tokenised("corpus").parent) == before, "named otherwise"


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_the_same_size_is_other_text_whatever_its_times(tokenised, tmp_path, edit):
    path = write_rows(tmp_path / "a.jsonl", TEXTS)
    tokenised(path)
    EDITS[edit](path, path.read_bytes().replace(b"Document", b"Dokument", 1))
    with pytest.raises(DataError, match="of other text or settings"):
        tokenised(path)


def test_a_file_that_was_left_out_and_then_mended_is_other_text(tokenised, tmp_path):
    write_rows(tmp_path / "corpus" / "a.jsonl", TEXTS)
    bad = tmp_path / "corpus" / "b.jsonl"
    bad.write_bytes(b'{"text"; "words"}\n')
    tokenised(tmp_path / "corpus", skip_unusable=True)
    SAME["touch"](bad)
    assert tokenised(tmp_path / "corpus", skip_unusable=True)
    EDITS["an older file"](bad, b'{"text": "words"}\n')
    with pytest.raises(DataError, match="of other text or settings"):
        tokenised(tmp_path / "corpus", skip_unusable=True)


def test_what_is_left_out_is_left_out_of_the_tokenizers_training_too(tokenised, tmp_path, seed):
    corpus = tmp_path / "corpus"
    path = write_rows(corpus / "a.jsonl", sentences(random.Random(seed), 30))
    path.write_bytes(path.read_bytes() + b'{"text": "caf\xe9"}\n{"text": "the last"}\n')
    (corpus / "b.txt").write_bytes(b"one\ncaf\xe9\ntwo\n")
    (corpus / "c.png").write_bytes(b"\x89PNG" + bytes(99))
    with pytest.raises(DataError, match=r"a.jsonl line 31 is not UTF-8"):
        tokenised(corpus, tokenizer=None)
    manifest = read_manifest(tokenised(corpus, tokenizer=None, skip_unusable=True))
    assert [(source.documents, source.skipped_rows) for source in manifest.sources] == [(31, 1), (1, 1)]
    assert [Path(entry.name).name for entry in manifest.skipped] == ["c.png"]


FEW = {
    "60 rows of jsonl": ("a.jsonl", 60, 3_000),
    "4 rows of parquet": ("a.parquet", 4, 20_000),
    "one row of jsonl": ("a.jsonl.zst", 1, 40_000),
    "one row of parquet": ("a.parquet", 1, 60_000),
    "one text file": ("a.txt", 1, 40_000),
}


@pytest.mark.parametrize("case", FEW)
def test_a_corpus_of_few_long_documents_has_a_held_out_part(tokenised, tokenizer, tmp_path, seed, case):
    """With the default settings; of shards and of their text the same."""
    name, number, length = FEW[case]
    texts = ["\n".join(sentences(random.Random(seed + i), length // 250)) for i in range(number)]
    path = write(tmp_path / name, texts)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    manifest = tokenised(path, tokenizer=str(tmp_path / "tokenizer"))
    text, shards = DataConfig(source="files"), DataConfig(source="files", paths=[manifest])
    common = {"paths": [path], "cache": tmp_path / "cache"}
    for data in (text, shards):
        train_sources(data, tokenizer, **common)(0)
        assert held_out_batches(data, tokenizer, **common, num_sequences=8, batch_size=8, seed=0)[0].shape == (8, 257)
    split = [
        [len(token_file(data, tokenizer, **common, part=part).tokens_N) for part in ("train", "held_out")]
        for data in (text, shards)
    ]
    assert split[0] == split[1] and sum(split[0]) == read_manifest(manifest).tokens and split[0][1] < split[0][0]


def test_parts_of_an_interrupted_work_are_of_the_content_alone(tokenised, tmp_path, monkeypatch):
    corpus = tmp_path / "corpus"
    a, b = (write_rows(corpus / f"{name}.jsonl", TEXTS) for name in "ab")
    with monkeypatch.context() as patched, pytest.raises(DataError, match="stopped"):
        patched.setattr(module, "_publish", lambda *_: (_ for _ in ()).throw(DataError("stopped")))
        tokenised(corpus)
    SAME["touch"](a)
    EDITS["an older file"](b, b.read_bytes().replace(b"Document", b"Dokument", 1))
    made, make_parts = [], module.make_parts
    monkeypatch.setattr(module, "make_parts", lambda pieces, *rest: (made.extend(pieces), make_parts(pieces, *rest)))
    tokenised(corpus)
    assert [piece.path for piece in made] == [b]


def test_an_interrupted_work_goes_on_with_changed_text(tokenised, tmp_path):
    """Only parts of files that are as they were are used again."""
    corpus = tmp_path / "corpus"
    write_rows(corpus / "a.jsonl", TEXTS)
    (corpus / "b.jsonl").write_text("no json\n")
    with pytest.raises(DataError, match="not JSON"):
        tokenised(corpus)
    write_rows(corpus / "a.jsonl", TEXTS[:5])
    write_rows(corpus / "b.jsonl", TEXTS[5:])
    assert documents(tokenised(corpus), tmp_path) == IDS and not list((tmp_path / "shards").glob(".*"))


def test_other_shards_are_not_overwritten(tokenised, tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "000000.npy").write_bytes(b"\1\0")
    with pytest.raises(DataError, match="delete them, or choose another --output-prefix"):
        tokenised(FIXTURES / "texts.jsonl")
    assert (tmp_path / "shards" / "000000.npy").read_bytes() == b"\1\0"


def test_a_second_command_with_the_same_prefix_waits_for_none(tokenised, tmp_path):
    (tmp_path / "shards" / ".partial").mkdir(parents=True)
    with (
        FileLock(tmp_path / "shards" / ".partial" / "lock"),
        pytest.raises(DataError, match=r"another process tokenises to .*; wait for it"),
    ):
        tokenised(FIXTURES / "texts.jsonl")


BAD_MANIFESTS = {
    "another shard": (lambda folder: (folder / "000000.npy").write_bytes(bytes(1422)), "000000.npy", "SHA-256 differs"),
    "truncated shard": (lambda folder: os.truncate(folder / "000000.npy", 700), "000000.npy", "SHA-256 differs"),
    "other documents": (lambda folder: (folder / "000000.docs").write_bytes(bytes(720)), "000000.docs", "SHA-256"),
    "no shard": (lambda folder: (folder / "000000.npy").unlink(), "000000.npy", "does not exist"),
    "no documents": (lambda folder: (folder / "000000.docs").unlink(), "000000.docs", "does not exist"),
    "another tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json", "fetch it"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json", "set data.tokenizer"),
    "another fingerprint": (lambda folder: change(folder, fingerprint="0" * 64), "manifest.json", "tokenise again"),
    "a path out of the folder": (lambda folder: lead_out(folder), "manifest.json", "shards.0.file='../000000.npy'"),
    "another type": (lambda folder: change(folder, dtype="uint64"), "manifest.json", "uint16"),
    "cut": (lambda folder: os.truncate(folder / "manifest.json", 300), "manifest.json", "no manifest of shards"),
}


def lead_out(folder: Path) -> None:
    (entry,) = json.loads((folder / "manifest.json").read_text())["shards"]
    for name in ("file", "documents_file"):
        (folder / entry[name]).rename(folder.parent / entry[name])
        entry[name] = f"../{entry[name]}"
    change(folder, shards=[entry])


def change(folder: Path, **fields) -> None:
    file = folder / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize("case", BAD_MANIFESTS)
def test_shards_that_are_not_their_manifests_are_refused(tokenised, tmp_path, case):
    damage, file, message = BAD_MANIFESTS[case]
    damage(folder := tokenised(FIXTURES / "texts.jsonl").parent)
    data = DataConfig(source="files", paths=[folder], sequence_length=16, held_out_fraction=0.3)
    with pytest.raises(DataError) as caught:
        tokenizer = resolve_tokenizer(data, [], tmp_path / "cache")
        token_file(data, tokenizer, paths=[], cache=tmp_path / "cache", part="train")
    said = str(caught.value)
    assert file in said and message in said and "\n" not in said


def test_a_run_with_another_tokenizer_refuses_the_shards(tokenised, tmp_path, tokenizer):
    folder = tokenised(FIXTURES / "texts.jsonl").parent
    data = DataConfig(source="files", paths=[folder], sequence_length=16)
    with pytest.raises(DataError, match=r"manifest.json .*was made with the tokenizer"):
        token_file(data, tokenizer, paths=[], cache=tmp_path, part="train")


REFUSED = {
    "no such file": (["absent*.jsonl"], {}, "matches no file"),
    "hidden prefix": (["a.jsonl"], {"output": ".x"}, "choose a name without a dot"),
    "small type": (["a.jsonl"], {"dtype": "uint16"}, "set --dtype uint32"),
    "no tokenizer": (["a.jsonl"], {"tokenizer": "/absent"}, "cannot load tokenizer"),
    "no field": (["a.jsonl"], {"text_field": "body"}, "no field 'body' (it has: text)"),
    "empty": (["empty.jsonl"], {}, "empty.jsonl holds no text"),
    "a shard": (["a.npy"], {}, "--data"),
    "output in a file": (["a.jsonl"], {"output": "a.jsonl/x"}, "choose another --output-prefix"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_tokenised_is_said_in_a_line(tokenised, tmp_path, case, monkeypatch):
    files, more, message = REFUSED[case]
    write_rows(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "a.npy").write_bytes(b"\1\0")
    if case == "small type":
        monkeypatch.setattr("spes_p2p.commands.tokenize._tokenizer", lambda *_: (b"", 2**16 + 1, ""))
    with pytest.raises((ConfigError, DataError)) as caught:
        tokenised(*(tmp_path / file for file in files), **more)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("manifest.json"))


def command(tmp_path: Path, *more: object) -> list[str]:
    words = [sys.executable, "-m", "spes_p2p", "tokenize", "--tokenizer-name-or-path", TOKENIZER]
    return [*words, "--cache", str(tmp_path / "cache"), *map(str, more)]


@pytest.mark.full  # `test_cli` has a full disk with every commit, of which each command speaks alike
def test_a_disk_that_is_full_is_said_in_a_line_and_the_work_goes_on_elsewhere(tmp_path, seed):
    """In a namespace of its own, on a file system of two megabytes."""
    can_mount = subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0
    if shutil.which("unshare") is None or not can_mount:
        pytest.skip("this machine has no user namespaces")
    path = write_rows(tmp_path / "a.jsonl", sentences(random.Random(seed), 12_000))
    (tmp_path / "small").mkdir()
    words = shlex.join(command(tmp_path, "--file-glob", path, "--output-prefix", f"{tmp_path}/small/"))
    listing = f"{words}; code=$?; ls -A {tmp_path}/small; exit $code"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"mount -t tmpfs -o size=1m tmpfs {tmp_path}/small && {{ {listing}; }}"],
        **{"capture_output": True, "text": True, "timeout": 300, "cwd": Path(__file__).parents[3]},
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"error: no space left on the disk at {tmp_path}/small; make room there")
    assert done.stdout.split() == [".partial"]


@pytest.mark.full
def test_a_killed_command_goes_on_to_the_same_bytes(tokenised, tmp_path, seed, monkeypatch):
    """Killed whenever some more parts are there; its processes end with it."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(8):
        texts = sentences(random.Random(seed + number), 1500)
        (corpus / f"{number:02d}.jsonl.gz").write_bytes(
            gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
        )
    expected = contents(tokenised(corpus, output="expected/").parent)
    folder, kills = tmp_path / "killed", 0
    words = command(tmp_path, "--file-glob", corpus, "--output-prefix", f"{folder}/", "--processes", "2")
    while True:
        before = len(list(folder.glob(".partial/*.docs")))
        process = subprocess.Popen(words, cwd=Path(__file__).parents[3], start_new_session=True)
        while process.poll() is None and len(list(folder.glob(".partial/*.docs"))) < before + 3:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)  # alone: its processes must end by themselves
        process.wait()
        kills += 1
    assert process.returncode == 0 and kills >= 1 and contents(folder) == expected


def test_a_founder_keeps_its_paths_and_takes_the_tokenizer_beside_its_shards(tokenised, tmp_path, seed):
    path = write_rows(tmp_path / "a.jsonl", sentences(random.Random(seed), 150))
    folder = tokenised(path).parent
    run = RunConfig(data=DataConfig(source="files", paths=[folder], sequence_length=16, held_out_fraction=0.2))
    for config in (
        PeerConfig(run_id="r", run=run, cache=tmp_path / "cache"),
        PeerConfig(run_id="r", run=RunConfig(data=without_paths(run.data)), data=[folder], cache=tmp_path / "cache"),
    ):
        assert config.run is not None
        founded, tokenizer = founder_settings(config, config.run)
        assert founded.data.paths == [] and founded.data.source == "files"
        assert tokenizer_digest(tokenizer) == read_manifest(folder / "manifest.json").tokenizer_sha256
    with pytest.raises(ConfigError, match=r"trains on files .*--data"):
        founder_settings(PeerConfig(run_id="r", run=founded, cache=tmp_path / "cache"), founded)


def test_a_founder_publishes_the_name_of_its_tokenizer_and_not_the_way_to_it(tmp_path, monkeypatch, seed):
    path = write_rows(tmp_path / "a.jsonl", sentences(random.Random(seed), 50))
    shutil.copytree(TOKENIZER, tmp_path / "alice" / "words")
    monkeypatch.chdir(tmp_path / "alice")
    for named in (str(tmp_path / "alice" / "words"), "./words/"):
        run = RunConfig(data=DataConfig(source="files", tokenizer=named, sequence_length=16, held_out_fraction=0.2))
        founded, _ = founder_settings(PeerConfig(run_id="r", run=run, text=[path], cache=tmp_path / "cache"), run)
        assert founded.data.tokenizer == Path(named).name and "alice" not in founded.model_dump_json()
        check_kept_settings(run, [founded], tmp_path)  # the same command again, with --resume


def without_paths(data: DataConfig) -> DataConfig:
    return data.model_copy(update={"paths": []})


def test_an_experiment_gives_its_shards_to_its_peers_as_flags(tmp_path):
    given = _with_data(ExperimentConfig(data=[tmp_path / "shards"]))
    assert given.run.data.source == "files" and given.run.data.paths == []
    assert _own(given) == {"text": [], "data": [f"{tmp_path}/shards"]}
    named = RunConfig(data=DataConfig(source="files", paths=[tmp_path / "shards"]))
    assert _own(_with_data(ExperimentConfig(run=named))) == _own(given)
    assert _own(_with_data(ExperimentConfig(run=named, text=[tmp_path / "a.txt"])))["data"] == []
    with pytest.raises(ConfigError, match="--text and --data exclude each other"):
        _with_data(ExperimentConfig(text=[tmp_path], data=[tmp_path]))
