"""Streamed data sets, of a server on loopback that speaks the hub's API."""

import itertools
import json
import random
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest
import torch

from spes_p2p.config import DataConfig
from spes_p2p.data import packing as module
from spes_p2p.data.packing import held_out_batches, train_sources
from spes_p2p.data.sources import split_documents
from spes_p2p.errors import DataError

from .conftest import sentences, write_rows

T = 16


@pytest.fixture
def hub_data(hub, seed):
    """Four shards of 30 documents."""
    texts = sentences(random.Random(seed), 120)
    for shard in range(4):
        write_rows(hub.root / "alice" / "texts" / f"part-{shard}.jsonl", texts[shard::4])
    return DataConfig(source="hub", name="alice/texts", sequence_length=T, held_out_fraction=0.2)


@pytest.fixture
def source_of(hub_data, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_DOCUMENTS", 13)

    def make(order_seed: int = 0, data: DataConfig = hub_data):
        return train_sources(data, tokenizer, paths=(), cache=tmp_path / "cache")(order_seed)

    return make


def epoch_tokens(source) -> list[int]:
    """Tokens of one epoch, windows joined at the token they share."""
    flat: list[int] = []
    while source.state_dict()["epoch"] == 0:
        flat += source.next_batch(1)[0, :-1].tolist()
    return flat


def test_one_epoch_holds_every_training_document_once_and_no_other(source_of, hub_data, tokenizer, seed):
    text = tokenizer.decode(epoch_tokens(source_of(seed)))
    training = [document.text for document in split_documents(hub_data, (), held_out=False)]
    held_out = [document.text for document in split_documents(hub_data, (), held_out=True)]
    assert held_out and not [document for document in held_out if document in text]
    # The epoch's last tokens are carried into the next one.
    assert sum(text.count(document) == 1 for document in training) >= len(training) - 1


def test_the_order_is_shuffled_and_keyed_by_the_seed(source_of, seed):
    draws = [source_of(value).next_batch(40) for value in (seed, seed, seed + 1)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_epochs_have_different_orders(source_of):
    source = source_of()
    epochs: dict[int, list] = {0: [], 1: []}
    while (epoch := source.state_dict()["epoch"]) < 2:
        epochs[epoch].append(source.next_batch(1)[0].tolist())
    assert len(epochs[0]) > 50 and abs(len(epochs[0]) - len(epochs[1])) <= 3
    assert epochs[0][:20] != epochs[1][:20]


@pytest.mark.parametrize("drawn", [0, 1, 17, 60, 400])
def test_resume_is_exact(source_of, seed, drawn):
    source = source_of(seed)
    if drawn:
        source.next_batch(drawn)
    state = json.loads(json.dumps(source.state_dict()))
    expected = [source.next_batch(7) for _ in range(40)]
    resumed = source_of(seed)
    resumed.load_state_dict(state)
    assert json.loads(json.dumps(resumed.state_dict())) == state
    again = resumed.state_dict()  # as a peer does that measures its speed when it resumes
    resumed.next_batch(3)
    resumed.load_state_dict(again)
    assert all(torch.equal(resumed.next_batch(7), batch) for batch in expected)


def test_a_source_can_be_rewound_in_place(source_of):
    source = source_of()
    source.next_batch(50)
    state = source.state_dict()
    first = source.next_batch(30)
    source.load_state_dict(state)
    assert torch.equal(source.next_batch(30), first)


@pytest.mark.parametrize(
    "damage",
    [{"carry": "x"}, {"carry": [-1]}, {"epoch": None}, {"dataset": 3}, {"given": 10**6}, {"order_seed": 1}],
    ids=str,
)
def test_a_damaged_state_is_refused(source_of, damage):
    source = source_of()
    with pytest.raises(DataError, match="resume"):
        source.load_state_dict({**source.state_dict(), **damage})
    with pytest.raises(DataError, match="resume"):
        source.load_state_dict({})


def test_a_broken_stream_is_tried_again_from_the_same_place(source_of, monkeypatch):
    source, reference = source_of(), source_of()
    count = source._num_windows
    assert torch.equal(source.next_batch(count), reference.next_batch(count))
    monkeypatch.setattr(source, "_rows", iter_then_fail(3))
    with pytest.raises(DataError, match="cannot stream"):
        source.next_batch(5)
    assert torch.equal(source.next_batch(5), reference.next_batch(5))
    assert source.state_dict() == reference.state_dict()


def iter_then_fail(num_rows: int):
    for index in range(num_rows):
        yield {"text": f"lost row {index}"}
    raise DataError("cannot stream")


def test_held_out_batches_of_a_stream_are_its_first_held_out_windows(hub_data, tokenizer, tmp_path):
    flat: list[int] = []
    for document in split_documents(hub_data, (), held_out=True):
        flat += [*tokenizer(document.text)["input_ids"], tokenizer.eos_token_id]
    batches = held_out_batches(hub_data, tokenizer, paths=(), cache=tmp_path, num_sequences=10, batch_size=4, seed=3)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert torch.cat(batches).tolist() == [flat[i * T : i * T + T + 1] for i in range(10)]


def test_too_small_a_data_set_is_refused(hub, hub_data, source_of):
    with pytest.raises(DataError, match="choose a larger data set"):
        source_of(data=hub_data.model_copy(update={"sequence_length": 10**6}))
    write_rows(hub.root / "alice" / "blank" / "rows.jsonl", [" ", ""])
    with pytest.raises(DataError, match="choose a larger data set"):
        source_of(data=hub_data.model_copy(update={"name": "alice/blank"}))


def test_one_parquet_file_is_read_from_different_places_by_different_peers(hub, tokenizer, source_of, hub_data):
    (hub.root / "alice" / "parquet").mkdir()
    table = pyarrow.table({"text": sentences(random.Random(5), 200)})
    pyarrow.parquet.write_table(table, hub.root / "alice" / "parquet" / "one.parquet", row_group_size=10)
    data = hub_data.model_copy(update={"name": "alice/parquet"})
    first = [tokenizer.decode(source_of(seed, data).next_batch(20).flatten().tolist()) for seed in (1, 2)]
    numbers = [{word for word in text.split() if word.rstrip(".").isdigit()} for text in first]
    assert len(numbers[0] - numbers[1]) >= 3


@pytest.mark.parametrize("packing", ["best_fit", "overflow"])
def test_a_streams_documents_are_packed_whole(source_of, hub_data, tokenizer, packing, seed):
    """Each of an epoch's tokens is learned once from its own document; resuming is exact."""
    data = hub_data.model_copy(update={"packing": packing})
    source = source_of(seed, data)
    rows: list[list[int]] = []
    while source.state_dict()["epoch"] == 0 and len(rows) < 10**4:
        rows += source.next_batch(1).tolist()
    rows = rows[:-1]  # of the next epoch
    state = source.state_dict()
    expected = source.next_batch(9).tolist()
    other = source_of(seed, data)
    other.load_state_dict(state)
    assert other.next_batch(9).tolist() == expected
    learned = Counter((a if a >= 0 else ~a, b) for row in rows for a, b in itertools.pairwise(row) if b >= 0)
    texts = [document.text for document in split_documents(hub_data, (), held_out=False)]
    documents = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    whole = Counter(pair for ids in documents for pair in itertools.pairwise(ids))
    # The block that ends the epoch says epoch 1 as soon as it is read.
    assert learned <= whole and learned.total() > 0.7 * whole.total()


def test_held_out_windows_of_a_stream_are_as_many_as_asked_for(hub_data, tokenizer, tmp_path):
    data = hub_data.model_copy(update={"packing": "trunc"})
    batches = held_out_batches(data, tokenizer, paths=(), cache=tmp_path, num_sequences=12, batch_size=5, seed=0)
    held_out = [tokenizer(d.text)["input_ids"][: T + 1] for d in split_documents(hub_data, (), held_out=True)]
    assert torch.cat(batches).tolist() == held_out[:12]
