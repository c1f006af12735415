"""Windows over a tokenised corpus: split, order, resume, cache."""

import itertools
import json
import logging
import multiprocessing
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from spes_p2p import fs
from spes_p2p.config import DataConfig
from spes_p2p.data import packing as packing_module
from spes_p2p.data.packing import held_out_batches, token_file, train_sources
from spes_p2p.data.sources import documents, split_documents
from spes_p2p.data.windows import PackedWindows, TokenFile
from spes_p2p.errors import ConfigError, DataError

from .conftest import EDITS, SAME, sentences, write_rows

T = 16


@pytest.fixture
def source_of(files_data, tokenizer, corpus, tmp_path):
    def make(order_seed: int = 0, data: DataConfig = files_data):
        return train_sources(data, tokenizer, paths=[corpus], cache=tmp_path / "cache")(order_seed)

    return make


def plain_windows(data, tokenizer, corpus, *, held_out: bool) -> list[list[int]]:
    """The reference: concatenate, then slice."""
    flat: list[int] = []
    for document in split_documents(data, [corpus], held_out=held_out):
        flat += [*tokenizer(document.text)["input_ids"], tokenizer.eos_token_id]
    return [flat[i : i + T + 1] for i in range(0, len(flat) - T, T)]


def test_one_epoch_gives_every_training_window_once(source_of, files_data, tokenizer, corpus, seed):
    expected = plain_windows(files_data, tokenizer, corpus, held_out=False)
    drawn = source_of(seed).next_batch(len(expected))
    assert drawn.dtype == torch.int64 and drawn.shape == (len(expected), T + 1)
    assert sorted(drawn.tolist()) == sorted(expected) and drawn.tolist() != expected


def test_every_epoch_is_whole_and_has_another_order(source_of, files_data, tokenizer, corpus, seed):
    expected = plain_windows(files_data, tokenizer, corpus, held_out=False)
    source = source_of(seed)
    epochs = [source.next_batch(len(expected)).tolist() for _ in range(3)]
    assert all(sorted(epoch) == sorted(expected) for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]


def test_no_held_out_text_is_ever_trained_on(source_of, tokenizer, corpus, files_data):
    held_out = {document.text.split(".")[0] for document in split_documents(files_data, [corpus], held_out=True)}
    everything = {document.text.split(".")[0] for document in documents(files_data, [corpus])}
    source = source_of()
    trained = source.next_batch(source._num_windows).tolist()
    flat = " ".join(tokenizer.decode(window) for window in trained)
    # A title may lie across two windows, so absence is proved on the tokens before the windows are cut.
    tokens = tokenizer.decode(source._windows._file.tokens_N.astype(int).tolist())
    assert held_out and not [title for title in held_out if f"{title}." in tokens or f"{title}." in flat]
    assert all(f"{title}." in tokens for title in everything - held_out)


def test_settings_are_tuned_on_held_out_documents_that_are_not_reported_on(files_data, tokenizer, tmp_path, seed):
    """Compared by whole documents: every held-out one is in exactly one half, and none is trained on."""
    end = tokenizer.eos_token_id
    corpus = write_rows(tmp_path / "corpus.jsonl", sentences(random.Random(seed), 600))

    def documents_of(part):
        tokens = token_file(files_data, tokenizer, paths=[corpus], cache=tmp_path, part=part).tokens_N.tolist()
        cuts = [-1, *(i for i, token in enumerate(tokens) if token == end)]
        return sorted(tuple(tokens[a + 1 : b]) for a, b in itertools.pairwise(cuts))

    tuning, reported, held_out = (documents_of(part) for part in ("tuning", "reported", "held_out"))
    assert sorted(tuning + reported) == held_out and len(tuning) > 5 and len(reported) > 5
    assert not set(tuning) & set(reported) and not set(held_out) & set(documents_of("train"))


def test_a_text_is_resumed_by_its_content_whatever_its_times(source_of, corpus):
    state = source_of().state_dict()
    for change in SAME.values():
        change(corpus)
        source_of().load_state_dict(state)
    for edit in EDITS.values():
        edit(corpus, corpus.read_bytes().replace(b"Document", b"Dokument", 1))
        with pytest.raises(DataError, match="restore text and settings"):
            source_of().load_state_dict(state)


def test_tokens_of_text_that_changes_meanwhile_are_not_kept(source_of, corpus, tmp_path, monkeypatch):
    tokenise, before = packing_module._tokenise, corpus.read_bytes()

    def disturbed(*given):
        tokenise(*given)
        corpus.write_bytes(before.replace(b"Document", b"Dokument", 1))

    with monkeypatch.context() as patched:
        patched.setattr(packing_module, "_tokenise", disturbed)
        with pytest.raises(DataError, match=r"was changed while it was tokenised; start again"):
            source_of()
    assert not list((tmp_path / "cache" / "tokens").glob("*.train.bin"))


def test_held_out_batches_are_the_held_out_windows(files_data, tokenizer, corpus, tmp_path):
    expected = plain_windows(files_data, tokenizer, corpus, held_out=True)

    def draw(number: int, seed: int = 0):
        return held_out_batches(
            files_data, tokenizer, paths=[corpus], cache=tmp_path, num_sequences=number, batch_size=5, seed=seed
        )

    everything = draw(10**6)
    assert torch.cat(everything).tolist() == expected and {len(batch) for batch in everything[:-1]} == {5}
    some = torch.cat(draw(12)).tolist()
    assert len(some) == 12 and all(window in expected for window in some)
    assert torch.cat(draw(12)).tolist() == some and torch.cat(draw(12, seed=1)).tolist() != some


def test_equal_seeds_agree_and_different_ones_do_not(source_of, seed):
    assert torch.equal(source_of(seed).next_batch(20), source_of(seed).next_batch(20))
    assert not torch.equal(source_of(seed).next_batch(20), source_of(seed + 1).next_batch(20))
    assert not torch.equal(source_of(-1).next_batch(20), source_of(1).next_batch(20))


def test_batch_size_does_not_change_the_order(source_of):
    whole = source_of().next_batch(30)
    source = source_of()
    assert torch.equal(torch.cat([source.next_batch(size) for size in (1, 2, 7, 20)]), whole)


@pytest.mark.parametrize("place", ["start", "middle", "end", "over the edge"])
def test_resume_is_exact(source_of, seed, place):
    source = source_of(seed)
    epoch = source._num_windows
    if drawn := {"start": 0, "middle": epoch // 2, "end": epoch, "over the edge": epoch + 3}[place]:
        source.next_batch(drawn)
    state = json.loads(json.dumps(source.state_dict()))
    expected = [source.next_batch(7) for _ in range(epoch // 7 + 2)]
    resumed = source_of(seed)
    resumed.load_state_dict(state)
    assert all(torch.equal(resumed.next_batch(7), batch) for batch in expected)


def test_a_source_can_be_rewound_in_place(source_of):
    source = source_of()
    state = source.state_dict()
    first = source.next_batch(9)
    source.load_state_dict(state)
    assert torch.equal(source.next_batch(9), first)


@pytest.mark.parametrize(
    "damage",
    [
        {"epoch": -1},
        {"epoch": "1"},
        {"epoch": None},
        {"position": -1},
        {"position": 10**9},
        {"position": 1.5},
        {"order_seed": 5},
        {"tokens": "other"},
        {"sequence_length": 8},
    ],
    ids=str,
)
def test_a_state_of_another_order_is_refused(source_of, damage):
    source = source_of(order_seed=4)
    state = source.state_dict()
    with pytest.raises(DataError, match="resume"):
        source.load_state_dict({**state, **damage})
    with pytest.raises(DataError, match="resume"):
        source.load_state_dict({})
    assert source.state_dict() == state


def test_the_second_call_does_not_tokenise(source_of, files_data, tokenizer, corpus, tmp_path, monkeypatch):
    first = source_of().next_batch(10)
    monkeypatch.setattr(packing_module, "text_encoder", lambda *args: pytest.fail("tokenised again"))
    assert torch.equal(source_of().next_batch(10), first)
    source_of(data=files_data.model_copy(update={"sequence_length": 8}))
    with corpus.open("a") as stream:
        stream.write('{"text": "more"}\n')
    with pytest.raises(pytest.fail.Exception):
        source_of()


def test_a_failed_tokenising_leaves_nothing_behind(source_of, tmp_path, corpus):
    with corpus.open("a") as stream:
        stream.write("no json\n")
    with pytest.raises(DataError, match="line 121"):
        source_of()
    assert not [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.suffix != ".lock"]


def _open(data, tokenizer, corpus, cache, queue) -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    packing_module.log.addHandler(handler)
    packing_module.log.setLevel(logging.INFO)
    file = token_file(data, tokenizer, paths=[corpus], cache=cache, part="train")
    queue.put((file.tokens_N.astype(int).tolist(), len(messages)))


def test_two_processes_at_once_tokenise_once(files_data, tokenizer, corpus, tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    arguments = (files_data, tokenizer, corpus, tmp_path / "cache", queue)
    processes = [context.Process(target=_open, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert results[0][0] == results[1][0]
    assert sorted(result[1] for result in results) == [0, 1], "one tokenised, the other waited"


def test_waiting_for_another_process_has_a_deadline(source_of, files_data, tokenizer, corpus, tmp_path, monkeypatch):
    from filelock import FileLock

    key = source_of()._windows._file.key
    folder = tmp_path / "cache" / "tokens"
    (folder / f"{key}.train.bin").unlink()
    monkeypatch.setattr(fs, "MAKING_SECONDS", 0.1)
    with FileLock(folder / f"{key}.lock"), pytest.raises(DataError, match="another process"):
        source_of()


def test_too_little_text_is_refused_with_the_remedy(tmp_path, tokenizer, files_data):
    path = write_rows(tmp_path / "rows.jsonl", sentences(random.Random(0), 2))
    data = files_data.model_copy(update={"sequence_length": 4096})
    common = {"paths": [path], "cache": tmp_path / "cache"}
    with pytest.raises(DataError, match=r"training text has \d+ tokens.*give more text"):
        train_sources(data, tokenizer, **common)(0)
    with pytest.raises(DataError, match=r"held-out text has \d+ tokens.*data.held_out_fraction"):
        held_out_batches(data, tokenizer, **common, num_sequences=4, batch_size=2, seed=0)


def test_no_held_out_document_at_all_is_refused(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", sentences(random.Random(0), 30))
    data = DataConfig(source="files", sequence_length=T, held_out_fraction=1e-12)
    with pytest.raises(DataError, match="held-out text has 0 tokens"):
        held_out_batches(data, tokenizer, paths=[path], cache=tmp_path / "cache", num_sequences=4, batch_size=2, seed=0)


def test_missing_paths_and_an_unusable_cache_are_configuration_errors(files_data, tokenizer, corpus, tmp_path):
    with pytest.raises(ConfigError, match="--text"):
        train_sources(files_data, tokenizer, paths=[], cache=tmp_path)(0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--cache"):
        train_sources(files_data, tokenizer, paths=[corpus], cache=tmp_path / "file")(0)


def test_a_home_relative_cache_lands_in_the_home(source_of, files_data, tokenizer, corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    train_sources(files_data, tokenizer, paths=[corpus], cache=Path("~/.cache/spes"))(0)
    assert list((tmp_path / "home" / ".cache" / "spes" / "tokens").glob("*.train.bin"))


def test_large_vocabularies_take_four_bytes(tokenizer, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "__len__", lambda self: 2**16)
    assert packing_module.token_dtype(tokenizer).itemsize == 2
    monkeypatch.setattr(type(tokenizer), "__len__", lambda self: 2**16 + 1)
    assert packing_module.token_dtype(tokenizer).itemsize == 4


def test_windows_overlap_by_the_token_that_is_target_and_then_input():
    windows = PackedWindows(TokenFile(np.arange(4 * 10 + 1, dtype="<u2"), "key"), sequence_length=4)
    assert windows.gather(np.arange(len(windows))).tolist() == [[4 * i + j for j in range(5)] for i in range(10)]
