"""Several sources with weights: which window a position is, so that each counts once an epoch of its source."""

import shutil
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from spes_p2p.config import DataConfig, PeerConfig, RunConfig
from spes_p2p.data.mixture import MIN_BLOCK, MixedSource, MixtureSchedule
from spes_p2p.data.packing import held_out_by_source, train_sources
from spes_p2p.data.shards import TokenShards
from spes_p2p.data.shared import SharedSource, probe_sequences
from spes_p2p.data.tokenizer import load_tokenizer, resolve_tokenizer, tokenizer_digest
from spes_p2p.data.windows import TokenFile, windows_of
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.training.loss_gate import public_text

from .test_data_windows import FIXTURES

T, BATCH = 256, 4


def mixture(*weights: list[int], phases: list[int] | None = None, **more) -> DataConfig:
    """Return settings of sources a, b, ... with these weights."""
    sources = [{"name": "abcdef"[at], "fingerprint": f"{at}" * 64, "weights": each} for at, each in enumerate(weights)]
    return DataConfig(source="files", sequence_length=T, mixture=sources, phases=phases or [], **more)


def source_of(name: str, num_windows: int) -> SharedSource:
    data = DataConfig(source="files", fingerprint="0" * 64, sequence_length=T)
    file = TokenFile(np.arange(num_windows * T + 1, dtype="<u4"), name)
    return SharedSource(file, windows_of(file, data, cache=None, part="train"), data)


WEIGHTS = st.integers(1, 4).flatmap(
    lambda sources: st.integers(1, 4).flatmap(
        lambda phases: st.tuples(
            st.lists(
                st.lists(st.integers(0, 40), min_size=phases, max_size=phases), min_size=sources, max_size=sources
            ).filter(lambda rows: all(any(column) for column in zip(*rows, strict=True))),
            st.lists(st.integers(1, 3000 * T), min_size=phases - 1, max_size=phases - 1, unique=True).map(sorted),
        )
    )
)


@given(WEIGHTS)
@settings(max_examples=60, deadline=None)
def test_each_number_of_each_source_belongs_to_one_position(drawn):
    """So a window that counts once by its position counts once an epoch of its source, whatever the weights do."""
    rows, phases = drawn
    schedule = MixtureSchedule(mixture(*rows, phases=phases))
    last = schedule.phases[-1]
    total = last.first + 2 * last.block
    sources, numbers = schedule(np.arange(total))
    for at in range(len(rows)):
        found = sorted(numbers[sources == at].tolist())
        assert found == list(range(len(found))), f"source {at}: twice or never"
    some = np.random.default_rng(0).integers(0, total, 50)
    again = schedule(some)
    assert again[0].tolist() == sources[some].tolist() and again[1].tolist() == numbers[some].tolist()


def test_sources_have_their_shares_in_each_phase_and_phases_begin_where_they_say():
    schedule = MixtureSchedule(mixture([9, 1, 1], [1, 1, 0], phases=[10_000 * T, 20_000 * T]))
    assert [phase.block for phase in schedule.phases] == [70, 64, 64], "least blocks of their weights' sums"
    firsts = [phase.first for phase in schedule.phases]
    assert all(asked <= first < asked + 128 for first, asked in zip(firsts[1:], (10_000, 20_000), strict=True))
    for phase, end, share in zip(schedule.phases, [*firsts[1:], 25_000], (0.9, 0.5, 1.0), strict=True):
        sources, _ = schedule(np.arange(phase.first, end))
        assert np.mean(sources == 0) == pytest.approx(share, abs=0.005)


def test_sources_are_mixed_within_a_block_and_differently_in_each():
    sources, _ = MixtureSchedule(mixture([1], [1]))(np.arange(100 * MIN_BLOCK))
    blocks = sources.reshape(-1, MIN_BLOCK)
    assert (blocks.sum(axis=1) == MIN_BLOCK // 2).all()
    assert len({tuple(block) for block in blocks.tolist()}) == 100


def test_later_weights_change_nothing_before_their_phase():
    """So a run can be annealed by an amendment, and what is trained stays counted."""
    one = MixtureSchedule(mixture([3, 1], [1, 1], phases=[5000 * T]))
    other = MixtureSchedule(mixture([3, 0, 7], [1, 9, 2], phases=[5000 * T, 9000 * T]))
    begins = other.phases[1].first
    positions = np.arange(begins)
    assert [each.tolist() for each in one(positions)] == [each.tolist() for each in other(positions)]


def test_a_schedule_needs_no_memory_for_a_run_of_any_length():
    schedule = MixtureSchedule(mixture([900, 1], [99, 1], phases=[10**15]))
    positions = np.array([0, 10**12, 10**15, 2**52])
    tracemalloc.start()
    schedule(positions)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**5


def test_a_mixed_source_trains_each_window_once_an_epoch_of_its_source_and_the_gates_never():
    sizes = {"a": 61, "b": 40}
    data = mixture([3], [1])
    made = {name: source_of(name, size) for name, size in sizes.items()}
    mixed = MixedSource(made, data)
    mixed.deal(range(0, 300), "peer:1")
    seen = {name: Counter[tuple[int, int]]() for name in sizes}
    schedule = MixtureSchedule(data)
    for draw in range(300):
        batch = mixed.next_batch(BATCH)
        which, numbers = schedule(np.arange(draw * BATCH, (draw + 1) * BATCH))
        for row, source, number in zip(batch[:, 0].tolist(), which.tolist(), numbers.tolist(), strict=True):
            name = "ab"[source]
            assert made[name].places(np.array([number])).tolist() == [row // T], (
                "the row is the window it is said to be"
            )
            seen[name][number // made[name].epoch_windows, row // T] += 1
    probes = probe_sequences(T)
    for name, size in sizes.items():
        assert max(seen[name].values()) == 1
        by_epoch = Counter(epoch for epoch, _ in seen[name])
        done = [epoch for epoch, count in by_epoch.items() if count == size - probes]
        assert len(done) >= len(by_epoch) - 2, "all windows of an epoch, of those that are not under way"
    which, numbers = schedule(np.arange(300 * BATCH, 301 * BATCH))
    own = [made["ab"[at]].places(np.array([each]), "peer:1")[0] for at, each in zip(which, numbers, strict=True)]
    assert (mixed.next_batch(BATCH)[:, 0] // T).tolist() == own, "behind its share, by the same weights"
    assert len({window for _, window in seen["a"]}) == sizes["a"] - probes


def test_before_a_deal_it_gives_what_the_loss_gate_measures_of_every_source():
    def made(seed: int) -> MixedSource:
        return MixedSource({"a": source_of("a", 50), "b": source_of("b", 50)}, mixture([9], [1]))

    measured = public_text(made, T)
    assert len(measured) == probe_sequences(T)
    firsts = (measured[:, 0] // T).tolist()
    of = {name: [*map(int, source_of(name, 50).next_probes(4)[:, 0] // T)] for name in "ab"}
    assert firsts == [of["a"][0], of["b"][0], of["a"][1], of["b"][1]]


def test_a_resumed_source_must_have_the_same_data():
    def made(name: str) -> MixedSource:
        return MixedSource({"a": source_of("a", 50), "b": source_of(name, 50)}, mixture([9], [1]))

    made("b").load_state_dict(made("b").state_dict())
    with pytest.raises(DataError, match="source b: the saved data order has tokens='b', this one 'other'"):
        made("other").load_state_dict(made("b").state_dict())
    with pytest.raises(DataError, match="of other sources"):
        made("b").load_state_dict({"sources": {}})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source": "embedded"}, "data.mixture needs data.source=files"),
        ({"fingerprint": "9" * 64}, "drop data.fingerprint"),
        ({"phases": [5, 5]}, "do not ascend"),
        ({"phases": [5]}, "a has 1 weights, for the start and 1 phases; give it 2"),
        ({"mixture": [], "phases": [5]}, "those of data.mixture"),
    ],
)
def test_a_mixture_that_says_two_things_is_refused(changes, words):
    with pytest.raises(ValidationError, match=words):
        DataConfig.model_validate({**mixture([1], [1]).model_dump(), **changes})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "a"}, "two sources with the name a"),
        ({"fingerprint": "0" * 64}, "two sources with the fingerprint 0000"),
        ({"name": "../b"}, "name"),
        ({"weights": [0]}, None),
        ({"weights": [1001]}, "weights"),
        ({"weights": [0.5]}, "weights"),
    ],
)
def test_a_source_is_named_once_with_whole_weights(change, words):
    document = mixture([1], [1]).model_dump()
    document["mixture"][1] |= change
    if words is None:
        assert DataConfig.model_validate(document)
        document["mixture"][0]["weights"] = [0]
        words = "weight 0 of all sources is 0"
    with pytest.raises(ValidationError, match=words):
        DataConfig.model_validate(document)


def test_settings_without_a_mixture_do_not_mention_one():
    """The manifests of such runs stay what they were, to the byte."""
    assert not {"mixture", "phases"} & RunConfig().model_dump(mode="json")["data"].keys()
    mixed = RunConfig(data=mixture([9, 5], [1, 5], phases=[10**9]))
    assert RunConfig.model_validate_json(mixed.model_dump_json()) == mixed


@pytest.fixture
def shards(tmp_path):
    """Two sources of some hundred windows."""
    tokenizer, found = load_tokenizer(FIXTURES / "tokenizer"), {}
    for at, name in enumerate(("web", "math")):
        found[name] = tmp_path / f"{name}.npy"
        np.random.default_rng(at).integers(0, len(tokenizer), 40_000).astype("<u2").tofile(found[name])
    return found


def settings_for(shards: dict[str, Path], cache: Path) -> DataConfig:
    tokenizer = load_tokenizer(FIXTURES / "tokenizer")
    sources = []
    for name, path in shards.items():
        found = TokenShards([path], len(tokenizer), cache, tokenizer_digest(tokenizer))
        sources.append({"name": name, "fingerprint": found.fingerprint, "weights": [1]})
    paths = [Path(f"{name}={path}") for name, path in shards.items()]
    common = {"source": "files", "sequence_length": 64, "tokenizer": str(FIXTURES / "tokenizer")}
    return DataConfig(**common, mixture=sources, paths=paths)


def test_peers_draw_the_same_from_the_files_of_all_sources_whatever_their_seed(tmp_path, shards):
    data = settings_for(shards, tmp_path)
    tokenizer = resolve_tokenizer(data, [], tmp_path)
    sources = [train_sources(data, tokenizer, paths=[], cache=tmp_path)(seed) for seed in (1, 2)]
    for source in sources:
        source.deal(range(3, 9), "")
    batches = [[source.next_batch(8).tolist() for _ in range(6)] for source in sources]
    assert batches[0] == batches[1]
    rows = {tuple(row) for batch in batches[0] for row in batch}
    found = {name: np.fromfile(path, "<u2").tolist() for name, path in shards.items()}
    of = Counter(name for row in rows for name, ids in found.items() if _holds(ids, list(row)))
    assert sum(of.values()) == 48 and set(of) == {"web", "math"}, "each row is of one source, and both are there"


def _holds(ids: list[int], row: list[int]) -> bool:
    first = [at for at, token in enumerate(ids) if token == row[0]]
    return any(ids[at : at + 32] == row[:32] for at in first)


def test_held_out_text_is_of_each_source(tmp_path, shards):
    data = settings_for(shards, tmp_path).model_copy(update={"held_out_fraction": 0.2})
    tokenizer = resolve_tokenizer(data, [], tmp_path)
    more = {"paths": [], "cache": tmp_path, "num_sequences": 32, "batch_size": 8, "seed": 0}
    found = held_out_by_source(data, tokenizer, **more)
    assert {name: sum(map(len, batches)) for name, batches in found.items()} == {"web": 16, "math": 16}
    with_one = held_out_by_source(data.by_source()["web"], tokenizer, **more)
    assert with_one.keys() == {""} and sum(map(len, with_one[""])) == 32


def test_a_swapped_file_is_refused_by_the_sources_name(tmp_path, shards):
    data = settings_for(shards, tmp_path)
    tokenizer = load_tokenizer(FIXTURES / "tokenizer")
    kept = tmp_path / "kept.npy"
    shutil.move(shards["math"], kept)
    shutil.copy(shards["web"], shards["math"])
    with pytest.raises(DataError, match=r"source math: --data has the fingerprint .*fetch its shards"):
        train_sources(data, tokenizer, paths=[], cache=tmp_path)(0)
    shutil.move(kept, shards["math"])
    train_sources(data, tokenizer, paths=[], cache=tmp_path)(0)
    with shards["math"].open("ab") as stream:
        stream.write(b"\0\0" * 512)
    with pytest.raises(DataError, match="source math: --data has the fingerprint"):
        train_sources(data, tokenizer, paths=[], cache=tmp_path)(0)


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([], "mixes 2 sources; name the shards of each: --data a=PATH b=PATH"),
        (["shards/"], "--data shards names no source of this run, which mixes a, b; write NAME=PATH"),
        (["a=x", "c=y"], "--data c=y names no source"),
        (["a=x"], "no shards of the source b; add b=PATH"),
        (["a=x", "b="], "names no source"),
    ],
)
def test_each_source_needs_its_own_files(tmp_path, paths, words):
    config = PeerConfig(run_id="run", data=paths)
    with pytest.raises(ConfigError, match=words):
        config.corpus(mixture([1], [1])).by_source()
