"""The order of shared data: every window once an epoch, those of the loss gate never, and no table of it in memory."""

import itertools
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.config import DataConfig
from spes_p2p.data.packing import train_sources
from spes_p2p.data.shards import TokenShards
from spes_p2p.data.shared import KeyedPermutation, SharedSource, probe_sequences
from spes_p2p.data.tokenizer import load_tokenizer, tokenizer_digest
from spes_p2p.data.windows import TokenFile, windows_of
from spes_p2p.errors import DataError
from spes_p2p.training.loss_gate import public_text

from .test_data_windows import FIXTURES

T, BATCH = 256, 4
DATA = DataConfig(source="files", fingerprint="0" * 64, sequence_length=T)


def source_of(num_windows: int, key: str = "key") -> SharedSource:
    file = TokenFile(np.arange(num_windows * T + 1, dtype="<u4"), key)
    return SharedSource(file, windows_of(file, DATA, cache=None, part="train"), DATA)


def windows_in(batch_BT1) -> list[int]:
    return (batch_BT1[:, 0] // T).tolist()


@given(st.integers(1, 3000), st.text(max_size=8))
def test_a_keyed_permutation_has_every_number_once(size, key):
    order = KeyedPermutation(size, key)
    numbers = np.arange(size)
    assert sorted(order(numbers).tolist()) == numbers.tolist()
    assert order(numbers[:5]).tolist() == order(numbers)[:5].tolist(), "a number's place does not depend on others"


def test_a_keyed_permutation_mixes_well():
    """Keys give different orders; neighbours are as far from each other, and low bits as even, as in a random order."""
    size = 10_000
    orders = [KeyedPermutation(size, str(key))(np.arange(size)) for key in range(8)]
    for one, other in itertools.pairwise(orders):
        assert (one == other).sum() < 20 and abs(np.corrcoef(one, other)[0, 1]) < 0.05
    for order in orders:
        assert abs(np.abs(np.diff(order)).mean() / size - 1 / 3) < 0.02
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.05
    squares = []
    for key in range(100):
        counts = np.histogram(KeyedPermutation(size, str(key))(np.arange(1000)), bins=10, range=(0, size))[0]
        squares.append(((counts - 100) ** 2 / 100).sum())
    assert 7.0 < np.mean(squares) < 11.0, "chi square of nine degrees of freedom"


def test_the_order_of_a_thousand_million_windows_needs_no_memory():
    numbers = np.random.default_rng(0).integers(0, 10**9, 8)
    tracemalloc.start()
    order = KeyedPermutation(10**9, "key")
    assert len(set(order(numbers).tolist())) == len(set(numbers.tolist()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{peak} bytes")
    assert peak < 10**6


@pytest.mark.parametrize("num_windows", [17, 40, 61])
def test_each_window_is_drawn_once_an_epoch_and_those_of_the_loss_gate_never(num_windows):
    source = source_of(num_windows)
    per_epoch = num_windows - probe_sequences(T)
    probes = windows_in(public_text(lambda seed: source_of(num_windows), T))
    assert len(set(probes)) == probe_sequences(T) == 4
    drawn = source.places(np.arange(3 * per_epoch * BATCH)).tolist()
    epochs = [drawn[start : start + per_epoch] for start in range(0, len(drawn), per_epoch)]
    assert len(epochs) == 3 * BATCH
    for epoch in epochs:
        assert Counter(epoch) == Counter(set(range(num_windows)) - set(probes))
    assert len(set(map(tuple, epochs))) == len(epochs), "each epoch has an order of its own"


def test_a_source_draws_its_share_and_then_the_same_windows_in_an_order_of_its_own():
    source, per_epoch = source_of(60), 60 - probe_sequences(T)
    source.deal(range(7, 9), "peer:1")
    share = windows_in(source.next_batch(BATCH)) + windows_in(source.next_batch(BATCH))
    assert share == source.places(np.arange(28, 36)).tolist()
    source.deal(range(0), "peer:1")
    own = [window for _ in range(per_epoch) for window in windows_in(source.next_batch(BATCH))]
    common = source.places(np.arange(len(own))).tolist()
    epochs = [(own[at : at + per_epoch], common[at : at + per_epoch]) for at in range(0, len(own), per_epoch)]
    assert all(sorted(one) == sorted(other) and one != other for one, other in epochs), "each once an epoch"
    source.deal(range(0, 1), "peer:1")
    assert windows_in(source.next_batch(BATCH)) == common[:BATCH], "a deal begins anew"
    assert windows_in(source.next_batch(BATCH)) == own[BATCH : 2 * BATCH], "behind its share"
    source.deal(range(0), "peer:2")
    assert windows_in(source.next_batch(BATCH)) != own[:BATCH], "each order has another name"


def test_before_a_deal_it_gives_what_the_loss_gate_measures():
    """So that a peer can measure its speed without training on what it was not dealt."""
    source = source_of(100)
    probes = windows_in(public_text(lambda seed: source_of(100), T))
    for _ in range(3):
        assert set(windows_in(source.next_batch(BATCH))) <= set(probes)


def test_a_resumed_source_must_have_the_same_data():
    state = source_of(100).state_dict()
    source_of(100).load_state_dict(state)
    with pytest.raises(DataError, match="tokens='key', this one 'other'"):
        source_of(100, "other").load_state_dict(state)


def test_a_corpus_with_too_few_windows_is_refused():
    with pytest.raises(DataError, match="give more text"):
        source_of(probe_sequences(T) + 7)


def test_runs_with_a_fingerprint_draw_in_one_order_whatever_the_peers_seed(tmp_path):
    tokenizer = load_tokenizer(FIXTURES / "tokenizer")
    path = tmp_path / "tokens.npy"
    (np.arange(20_000) % len(tokenizer)).astype("<u2").tofile(path)
    shards = TokenShards([path], len(tokenizer), tmp_path, tokenizer_digest(tokenizer))
    common = {"source": "files", "paths": [path], "sequence_length": 64}
    data = DataConfig(**common, fingerprint=shards.fingerprint)
    more = {"paths": [], "cache": tmp_path}
    sources = [train_sources(data, tokenizer, **more)(seed) for seed in (1, 2)]
    for source in sources:
        source.deal(range(3, 5), "")
    assert sources[0].next_batch(5).tolist() == sources[1].next_batch(5).tolist()
    own = [train_sources(DataConfig(**common), tokenizer, **more)(seed) for seed in (1, 2)]
    assert own[0].next_batch(5).tolist() != own[1].next_batch(5).tolist()
