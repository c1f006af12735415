"""Packing: what windows hold of documents, in the four ways, and where they say that a document begins."""

import itertools
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from spes_p2p.commands import tokenize
from spes_p2p.config import DataConfig
from spes_p2p.config.commands import TokenizeConfig
from spes_p2p.data import windows as module
from spes_p2p.data.packing import held_out_batches, token_file, train_sources
from spes_p2p.data.shards import TokenShards
from spes_p2p.data.sources import split_documents
from spes_p2p.data.tokenizer import resolve_tokenizer, train_bpe
from spes_p2p.data.windows import PADDING, TokenFile, are_repetitive, best_fit, lay_out, windows_of
from spes_p2p.errors import DataError
from spes_p2p.model.loss import num_targets, token_ids

from .conftest import sentences, write_rows

FIXTURES = Path(__file__).parents[2] / "fixtures" / "shards"
PACKINGS = ["pack", "best_fit", "overflow", "trunc"]
T = 16
END = 0


def numbered(generator: random.Random, num_documents: int, longest: int = 5 * T) -> list[list[int]]:
    """Documents whose tokens all differ, so that each can be found again; each ends with `END`."""
    lengths = [generator.choice([1, 2, T, T + 1, T + 2, 2 * T + 1, generator.randint(1, longest)]) for _ in range(40)]
    lengths += [generator.randint(1, longest) for _ in range(num_documents - len(lengths))]
    ids = iter(range(1, 2**16))
    return [[*itertools.islice(ids, length - 1), END] for length in lengths]


def file_of(documents: list[list[int]]) -> TokenFile:
    return TokenFile(np.array(list(itertools.chain(*documents)), "<u2"), "key", END)


def rows_of(file: TokenFile, packing: str, **more) -> list[list[int]]:
    data = DataConfig(sequence_length=T, packing=packing, **more)
    windows = windows_of(file, data, cache=None, part="train")
    return windows.gather(np.arange(len(windows))).tolist()


def pairs(tokens: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(tokens))


def learned(rows: list[list[int]]) -> Counter:
    """What is learned: a token, and what predicts it."""
    ids = [[(token if token >= 0 else ~token, token) for token in row] for row in rows]
    return Counter((a, b) for row in ids for (a, _), (b, mark) in itertools.pairwise(row) if mark >= 0)


@pytest.mark.parametrize("buffer", [3, 64, 2**18])
@pytest.mark.parametrize("packing", ["best_fit", "overflow"])
def test_every_token_is_learned_once_from_its_own_document(packing, buffer, seed, monkeypatch):
    monkeypatch.setattr(module, "BUFFER_DOCUMENTS", buffer)
    monkeypatch.setattr(module, "SCAN_TOKENS", 50)
    documents = numbered(random.Random(seed), 120)
    rows = rows_of(file_of(documents), packing)
    assert learned(rows) == Counter(itertools.chain(*map(pairs, documents)))
    assert all(len(row) == T + 1 and row[0] >= 0 for row in rows)


def test_trunc_keeps_the_first_sequence_of_each_document(seed):
    documents = numbered(random.Random(seed), 120)
    expected = [document[: T + 1] for document in documents if len(document) > 1]
    rows = rows_of(file_of(documents), "trunc")
    assert rows == [ids + [PADDING] * (T + 1 - len(ids)) for ids in expected]


def test_overflow_gives_each_document_windows_of_its_own(seed):
    documents = numbered(random.Random(seed), 120)
    rows = rows_of(file_of(documents), "overflow")
    owner = {token: number for number, document in enumerate(documents) for token in document[:-1]}
    owners = [{owner[token] for token in row if token > END} for row in rows]
    assert all(len(found) == 1 for found in owners)
    assert Counter(number for (number,) in owners) == Counter(
        {number: -(-(len(ids) - 1) // T) for number, ids in enumerate(documents) if len(ids) > 1}
    )


def test_best_fit_pads_little_and_cuts_no_document_needlessly(seed):
    """Log-normal lengths of mean 1,003: padding below 0.1 %, and pieces are whole windows and one rest."""
    length, sigma = 2048, 1.0
    drawn = np.random.default_rng(seed).lognormal(np.log(1003) - sigma**2 / 2, sigma, 40_000)
    lengths_D = np.maximum(drawn, 2).astype(np.int64)
    tokens_N = np.ones(int(lengths_D.sum()), "<u2")
    tokens_N[np.cumsum(lengths_D) - 1] = END
    (spans_S2, stops_W), *others = lay_out(TokenFile(tokens_N, "key", END), length, "best_fit")
    room = len(stops_W) * (length + 1)
    padding = 1 - spans_S2[:, 1].sum() / room
    document_S = np.searchsorted(np.cumsum(lengths_D), spans_S2[:, 0], side="right")
    pieces_D = np.bincount(document_S, minlength=len(lengths_D))
    needless = int((pieces_D > -(-(lengths_D - 1) // length)).sum())
    print(f"padding {100 * padding:.4f} %, documents cut needlessly {needless} of {len(lengths_D)}")
    assert not others and padding < 0.001 and needless == 0
    assert np.add.reduceat(spans_S2[:, 1], np.r_[0, stops_W[:-1]]).max() <= length + 1


def test_best_fit_takes_the_window_with_the_least_room_that_is_enough():
    assert best_fit(np.array([10, 7, 3, 3, 6, 4, 2]), 12).tolist() == [0, 1, 2, 2, 2, 1, 0]
    assert best_fit(np.array([4, 4, 4]), 4).tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", [None, "megatron_int32", "mds_raw", "datatrove_uint16"])
def test_pack_marks_the_first_token_of_each_document(name, tmp_path, seed):
    """Where documents are separate; the ids, and their order, stay those of `pack`."""
    if name is None:
        documents = numbered(random.Random(seed), 120)
        file = file_of(documents)
    else:
        shards = TokenShards([FIXTURES / name], 400, tmp_path)
        documents = [ids.tolist() for ids in shards.documents()]
        file = TokenFile(shards.part(2**64 - 1, None, is_inside=True, sequence_length=T), "key")
    flat = list(itertools.chain(*documents))
    starts = set(itertools.accumulate(map(len, documents)))
    marked = [~token if position in starts else token for position, token in enumerate(flat)]
    expected = [[flat[i], *marked[i + 1 : i + T + 1]] for i in range(0, len(flat) - T, T)]
    assert rows_of(file, "pack", separate_documents=True) == expected
    assert rows_of(file, "pack") == [flat[i : i + T + 1] for i in range(0, len(flat) - T, T)]


@pytest.mark.parametrize("packing", ["best_fit", "overflow", "trunc"])
def test_documents_that_may_see_each_other_are_not_marked(packing, seed):
    file = file_of(numbered(random.Random(seed), 120))
    seen, apart = (rows_of(file, packing, separate_documents=value) for value in (False, True))
    assert [[token if token >= 0 else ~token for token in row] for row in seen] == [
        [token if token >= 0 else ~token for token in row] for row in apart
    ]
    assert all(token >= 0 or token == PADDING for row in seen for token in row)
    assert (seen != apart) == (packing == "best_fit")


@pytest.mark.parametrize("packing", PACKINGS)
def test_shards_are_packed_as_their_text_is(packing, tokenised_pair, tmp_path, seed):
    text, shards, path, tokenizer = tokenised_pair(packing)
    cache = tmp_path / "cache"
    sources = [train_sources(data, tokenizer, paths=[path], cache=cache)(7) for data in (text, shards)]
    assert sources[0].next_batch(30).tolist() == sources[1].next_batch(30).tolist()


@pytest.fixture
def tokenised_pair(tmp_path, seed):
    """Makes settings of text and of its shards, the text's path, and a tokenizer."""

    def make(packing: str):
        path = write_rows(tmp_path / "corpus" / "a.jsonl", sentences(random.Random(seed), 150))
        prefix = f"{tmp_path / 'shards'}/"
        config = TokenizeConfig(file_glob=[str(path)], output_prefix=prefix, processes=1, cache=tmp_path / "cache")
        assert tokenize.main(config) == 0
        settings = {"source": "files", "sequence_length": T, "held_out_fraction": 0.3, "packing": packing}
        text, shards = DataConfig(**settings), DataConfig(**settings, paths=[tmp_path / "shards"])
        return text, shards, path, resolve_tokenizer(shards, [], tmp_path / "cache")

    return make


@pytest.mark.parametrize("packing", PACKINGS)
def test_held_out_windows_hold_held_out_documents_only(packing, tokenizer, corpus, tmp_path):
    data = DataConfig(
        source="files", sequence_length=T, held_out_fraction=0.2, packing=packing, separate_documents=True
    )
    documents = {
        held_out: [
            [*tokenizer(document.text)["input_ids"], tokenizer.eos_token_id]
            for document in split_documents(data, [corpus], held_out=held_out)
        ]
        for held_out in (False, True)
    }
    common = {"paths": [corpus], "cache": tmp_path / "cache"}
    batches = held_out_batches(data, tokenizer, **common, num_sequences=10**6, batch_size=7, seed=0)
    source = train_sources(data, tokenizer, **common)(0)
    rows = {
        True: [row for batch in batches for row in batch.tolist()],
        False: source.next_batch(source._num_windows).tolist(),
    }
    for held_out, expected in documents.items():
        whole = Counter(itertools.chain(*map(pairs, expected)))
        found = learned(rows[held_out])
        assert found <= whole and found.total() > 8
        if packing in ("best_fit", "overflow"):
            assert found == whole


def test_a_layout_is_made_once_for_each_part_length_and_packing(tokenizer, corpus, tmp_path, monkeypatch):
    data = DataConfig(source="files", sequence_length=T, held_out_fraction=0.2, packing="best_fit")
    common = {"paths": [corpus], "cache": tmp_path / "cache"}
    first = train_sources(data, tokenizer, **common)(3).next_batch(10)
    held_out = held_out_batches(data, tokenizer, **common, num_sequences=9, batch_size=9, seed=0)
    assert not set(map(tuple, first.tolist())) & set(map(tuple, held_out[0].tolist()))
    monkeypatch.setattr(module, "lay_out", lambda *args: pytest.fail("laid out again"))
    assert train_sources(data, tokenizer, **common)(3).next_batch(10).tolist() == first.tolist()
    for change in ({"sequence_length": 8}, {"packing": "trunc"}):
        with pytest.raises(pytest.fail.Exception):
            train_sources(data.model_copy(update=change), tokenizer, **common)(3)
    assert not [path for path in (tmp_path / "cache" / "windows").iterdir() if path.suffix == ".tmp"]


def test_a_failed_layout_leaves_nothing_behind(tokenizer, corpus, tmp_path, monkeypatch):
    data = DataConfig(source="files", sequence_length=T, held_out_fraction=0.2, packing="best_fit")
    whole = lay_out

    def broken(*args):
        yield from whole(*args)
        raise DataError("no more")

    monkeypatch.setattr(module, "lay_out", broken)
    with pytest.raises(DataError, match="no more"):
        train_sources(data, tokenizer, paths=[corpus], cache=tmp_path)(0)
    assert not [path for path in (tmp_path / "windows").iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize("settings", [{"packing": name} for name in PACKINGS[1:]] + [{"separate_documents": True}])
def test_shards_without_documents_are_packed_only(settings, tmp_path):
    tokenizer = bpe_of_400()
    data = DataConfig(source="files", paths=[FIXTURES / "spes_uint16"], sequence_length=T, **settings)
    with pytest.raises(DataError, match=r"does not say where its documents end; set data.packing=pack"):
        train_sources(data, tokenizer, paths=[], cache=tmp_path)(0)
    plain = data.model_copy(update={"packing": "pack", "separate_documents": None})
    assert train_sources(plain, tokenizer, paths=[], cache=tmp_path)(0).next_batch(2).min() >= 0


def bpe_of_400():
    return train_bpe(sentences(random.Random(1), 200), 400)


@pytest.mark.parametrize("packing", PACKINGS)
def test_resume_is_exact_and_another_packing_is_refused(packing, tokenizer, corpus, tmp_path):
    data = DataConfig(source="files", sequence_length=T, held_out_fraction=0.2, packing=packing)

    def source_of(one: DataConfig):
        return train_sources(one, tokenizer, paths=[corpus], cache=tmp_path)(5)

    source = source_of(data)
    source.next_batch(13)
    state = source.state_dict()
    expected = source.next_batch(9).tolist()
    resumed = source_of(data)
    resumed.load_state_dict(state)
    assert resumed.next_batch(9).tolist() == expected
    other = source_of(data.model_copy(update={"packing": PACKINGS[PACKINGS.index(packing) - 1]}))
    with pytest.raises(DataError, match="has packing="):
        other.load_state_dict(state)


def test_a_state_saved_before_packing_was_a_setting_is_one_of_pack(tokenizer, corpus, tmp_path):
    data = DataConfig(source="files", sequence_length=T, held_out_fraction=0.2)
    source = train_sources(data, tokenizer, paths=[corpus], cache=tmp_path)(5)
    state = {name: value for name, value in source.state_dict().items() if name != "packing"}
    source.load_state_dict(state)
    best_fit_data = data.model_copy(update={"packing": "best_fit"})
    with pytest.raises(DataError, match="has packing='pack'"):
        train_sources(best_fit_data, tokenizer, paths=[corpus], cache=tmp_path)(5).load_state_dict(state)


def test_a_changed_file_is_refused_by_name(tmp_path):
    folder = Path(shutil.copytree(FIXTURES / "datatrove_uint16", tmp_path / "copy"))
    data = DataConfig(source="files", paths=[folder], sequence_length=T, packing="best_fit", held_out_fraction=1e-9)
    source = train_sources(data, bpe_of_400(), paths=[], cache=tmp_path)(0)
    source.next_batch(2)
    file = next(folder.glob("*.ds"))
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(DataError, match=f"{file.name} was changed"):
        source.next_batch(2)


def test_text_and_windows_come_from_the_same_file(tokenizer, corpus, tmp_path):
    data = DataConfig(source="files", sequence_length=T, held_out_fraction=0.2)
    file = token_file(data, tokenizer, paths=[corpus], cache=tmp_path, part="train")
    assert file.end_of_text == tokenizer.eos_token_id and file.tokens_N[-1] == file.end_of_text


@pytest.mark.parametrize("period", [1, 2, 7, 13, 14])
@pytest.mark.parametrize("times", [31, 32])
def test_a_sequence_in_which_a_few_tokens_repeat_32_times_in_a_row_is_repetitive(period, times):
    length, start = 600, 100
    window = np.arange(1000, 1000 + length)
    window[start : start + period * times] = np.tile(np.arange(period), times)
    other = np.arange(2000, 2000 + length)
    assert are_repetitive(np.stack([window, other])).tolist() == [times == 32 and period <= 13, False]


def test_padding_is_no_repetition_and_short_sequences_are_none():
    padded = np.concatenate([np.arange(10), np.full(500, PADDING)])
    assert not are_repetitive(padded[None]).any() and not are_repetitive(np.zeros((1, 31), np.int64)).any()
    assert are_repetitive(np.zeros((1, 32), np.int64)).all()


def test_of_a_repetitive_sequence_nothing_is_learned_and_all_others_are_as_before():
    tokens = np.arange(10 * 64 + 1, dtype="<u4")
    tokens[3 * 64 + 5 : 4 * 64 - 5] = 7
    file = TokenFile(tokens, "key", None)
    plain, filtered = (
        windows_of(file, DataConfig(sequence_length=64, repetition_filter=is_on), cache=None, part="train")
        for is_on in (False, True)
    )
    before, after = (windows.gather(np.arange(10)) for windows in (plain, filtered))
    others = [row for row in range(10) if row != 3]
    assert len(filtered) == 10 and torch.equal(before[others], after[others])
    assert num_targets(after[3:4]) == 0 and torch.equal(token_ids(after[3]), before[3])
    held_out = windows_of(file, DataConfig(sequence_length=64, repetition_filter=True), cache=None, part="held_out")
    assert torch.equal(held_out.gather(np.arange(10)), before)
