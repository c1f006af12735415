"""Frozen storage: what comes back, how much it takes, and what is refused."""

import sys

import pytest
import torch

from spes_p2p.errors import ConfigError
from spes_p2p.model import frozen
from spes_p2p.model.frozen import FrozenStore
from tests.unit.model.plain import NEEDS_BITSANDBYTES, NF4, STORAGES

LARGEST_ERROR = {"fp32": 0.0, "bf16": 2**-8, "int8": 0.6 / 127, "nf4": 0.16}
"""Of an element, relative to the largest of its block."""
SHAPES = [(1, 1), (3, 5), (16, 8), (33, 65), (128, 96)]


def bytes_of(store: FrozenStore, expert: int) -> list[bytes]:
    weights = [store.stored(expert, name) for name in ("a", "b")]
    return [getattr(w, part).contiguous().view(torch.uint8).numpy().tobytes() for w in weights for part in w.PARTS]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_come_back_within_the_precision(seed, storage, shape):
    store, given = FrozenStore(storage), torch.randn(shape) * 10.0 ** torch.randint(-6, 6, (1,))
    store.put(0, {"a": given})
    (actual,) = store.get(0, torch.float32).values()
    assert actual.dtype == torch.float32 and actual.shape == given.shape
    assert (actual - given).abs().max() <= LARGEST_ERROR[storage] * given.abs().max()
    half = store.get(0, torch.bfloat16)["a"]
    assert half.dtype == torch.bfloat16 and torch.equal(half, actual.bfloat16())
    assert torch.equal(store.stored(0, "a").dense(torch.float32), actual) and store.stored(0, "a").shape == shape


@pytest.mark.parametrize("storage", STORAGES)
def test_storing_what_was_read_gives_the_same_bytes(seed, storage):
    store = FrozenStore(storage)
    for expert in range(30):
        magnitude = 10.0 ** torch.empty(65, 33).uniform_(-8, 8)
        given = {"a": torch.randn(65, 33) * magnitude, "b": torch.randn(64, 64).bfloat16() * (expert > 0)}
        store.put(expert, given)
        before = bytes_of(store, expert)
        store.put(expert, store.get(expert, torch.float32))
        assert bytes_of(store, expert) == before


@pytest.mark.parametrize("storage", STORAGES)
def test_store_counts_every_byte_and_forgets(storage):
    store = FrozenStore(storage)
    store.put(7, {"a": torch.ones(33, 65), "b": torch.ones(2, 64)})
    sizes = {
        "fp32": [4 * 2145, 4 * 128],
        "bf16": [2 * 2145, 2 * 128],
        "int8": [2145 + 4 * 17, 128 + 4 * 1],
        "nf4": [34 * (32 + 4), 2 * (32 + 4)],
    }
    assert store.nbytes() == sum(sizes[storage]) and len(store) == 1
    store.put(7, {"b": torch.zeros(4, 64)})
    assert store.nbytes() == sizes[storage][0] + 2 * sizes[storage][1]
    store.remove(7)
    assert store.nbytes() == 0 and 7 not in store


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (16, 8), (33, 64), (128, 96)], ids=str)
def test_packed_weights_are_read_at_once_and_are_the_same(seed, storage, dtype, shape, monkeypatch):
    store, given = FrozenStore(storage), {expert: torch.randn(shape) for expert in (4, 0, 2, 7)}
    for expert, weight in given.items():
        store.put(expert, {"a": weight, "b": weight.T})
    before = {expert: bytes_of(store, expert) for expert in given}
    written, of = [], frozen._joined
    monkeypatch.setattr(frozen, "_joined", lambda run: written.append(len(run)) or of(run))

    def stacked(experts):
        written.clear()
        out_EOI = torch.full((len(experts), *shape), torch.nan, dtype=dtype)
        frozen.write_all([store.stored(expert, "a") for expert in experts], out_EOI)
        wanted = [store.stored(expert, "a").dense(dtype) for expert in experts]
        assert torch.equal(out_EOI, torch.stack(wanted))
        return written

    is_whole = frozen.is_whole(store.stored(0, "a"))
    store.pack()
    assert {expert: bytes_of(store, expert) for expert in given} == before
    assert stacked([0, 2, 4, 7]) == ([4] if is_whole else [])
    assert stacked([2, 7, 0]) == ([1, 1, 1] if is_whole else [])
    kept = store.stored(2, "a")
    store.put(2, {"a": -given[2]})
    assert kept.dense(dtype).ne(store.stored(2, "a").dense(dtype)).any(), "a pass under way has lost its weights"
    assert stacked([0, 2, 4, 7]) == ([1, 1, 2] if is_whole else [])
    store.pack()
    assert stacked([0, 2, 4, 7]) == ([4] if is_whole else [])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_shares_no_memory_with_its_callers(storage, dtype):
    store = FrozenStore(storage)
    given = torch.ones(3, 4, dtype=dtype)
    store.put(0, {"a": given})
    given.zero_()
    store.get(0, dtype)["a"].zero_()
    torch.testing.assert_close(store.get(0, torch.float32)["a"], torch.ones(3, 4), rtol=1e-5, atol=0)


@pytest.mark.parametrize("storage", ["int8", NF4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_cannot_be_held_change_nothing(storage, bad):
    store = FrozenStore(storage)
    store.put(0, {"a": torch.ones(3, 64), "b": torch.ones(2, 64)})
    before = bytes_of(store, 0)
    broken = torch.ones(2, 64)
    broken[1, 5] = bad
    with pytest.raises(ValueError, match=f"NaN or infinity cannot be held in {storage}"):
        store.put(0, {"a": torch.zeros(3, 64), "b": broken})
    assert bytes_of(store, 0) == before


def test_unknown_precision_says_what_is_known():
    with pytest.raises(ConfigError, match=r"'int3'.*fp32, bf16, int8, nf4"):
        FrozenStore("int3")


def test_nf4_without_bitsandbytes_says_what_to_install_or_set(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    frozen._bitsandbytes.cache_clear()
    with pytest.raises(ConfigError, match=r"storage=nf4 .*bitsandbytes is missing.*install .*--storage int8"):
        FrozenStore("nf4")
    FrozenStore("int8")
    frozen._bitsandbytes.cache_clear()


@NEEDS_BITSANDBYTES
@pytest.mark.parametrize("fault", [RuntimeError("no kernel image"), OSError("libcuda"), AttributeError("quantize")])
def test_nf4_that_does_not_run_here_says_so(monkeypatch, fault):
    def fails(*args, **options):
        raise fault

    monkeypatch.setattr(frozen._bitsandbytes(), "dequantize_4bit", fails)
    with pytest.raises(ConfigError, match=rf"does not run \({fault}\).*--storage int8"):
        FrozenStore("nf4")


@NEEDS_BITSANDBYTES
def test_nf4_that_computes_wrongly_here_is_refused(monkeypatch):
    monkeypatch.setattr(frozen._bitsandbytes(), "dequantize_4bit", lambda *args: torch.zeros(1, 64))
    with pytest.raises(ConfigError, match="computes wrongly"):
        FrozenStore("nf4")
