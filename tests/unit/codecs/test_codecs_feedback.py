"""Error feedback: nothing that rounding leaves over is lost, and it does not pile up."""

import errno
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.codecs import CODECS, paged
from spes_p2p.codecs.format import ErrorFeedback, Format, Segment, codec_named, encode_with_error

LOSSY = [name for name in CODECS if codec_named(name).max_error]


@pytest.mark.parametrize("name", LOSSY)
@given(
    numel=st.integers(1, 300), num_rounds=st.integers(1, 12), magnitude=st.integers(-20, 20), seed=st.integers(0, 99)
)
def test_all_that_was_sent_is_all_that_was_meant_but_for_the_last_error(name, numel, num_rounds, magnitude, seed):
    generator = torch.Generator().manual_seed(seed)
    whole, feedback = Format([Segment(numel, name)]), ErrorFeedback()
    meant_N, sent_N = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    error = None
    for _ in range(num_rounds):
        delta_N = torch.randn(numel, generator=generator) * 2.0**magnitude
        data, error = feedback.encode("shared", whole, delta_N)
        feedback.keep("shared", error)
        meant_N += delta_N.double()
        sent_N += whole.decode(data).double()
    rounding = 1e-6 * num_rounds * 2.0**magnitude * 10
    assert ((meant_N - sent_N - error.whole().double()).abs() <= rounding).all()


@pytest.mark.parametrize(
    "name", [name for name in LOSSY if not name.startswith("sparse")]
)  # whose error is mostly delay
def test_the_error_does_not_pile_up(name, seed):
    generator = torch.Generator().manual_seed(seed)
    numel = 5000
    whole, feedback = Format([Segment(numel, name)]), ErrorFeedback()
    constant_N = torch.randn(numel, generator=generator).pow(3)  # small values that are always rounded away, and large
    shares = []
    for _ in range(120):
        delta_N = constant_N + torch.randn(numel, generator=generator)
        _, error = feedback.encode("shared", whole, delta_N)
        feedback.keep("shared", error)
        shares.append(float(error.whole().norm() / delta_N.norm()))
    assert max(shares) < codec_named(name).max_error and max(shares[60:]) < 1.2 * max(shares[:60])


def test_what_is_too_small_to_be_sent_is_sent_later():
    delta_N = torch.full((256,), 0.01)
    delta_N[::50] = 1.0
    whole, feedback = Format([Segment(256, "int4")]), ErrorFeedback()
    sent_N = torch.zeros(256)
    for _ in range(400):
        data, error_N = feedback.encode("slot-3", whole, delta_N)
        feedback.keep("slot-3", error_N)
        sent_N += whole.decode(data)
    assert torch.allclose(sent_N / 400, delta_N, atol=2e-3)


def test_a_failed_round_is_repeated_from_the_same_error(seed):
    torch.manual_seed(seed)
    whole, feedback = Format([Segment(300, "int4")]), ErrorFeedback()
    _, error = feedback.encode("shared", whole, torch.randn(300))
    feedback.keep("shared", error)
    delta_N, kept_N = torch.randn(300), error.whole().clone()
    first, _ = feedback.encode("shared", whole, delta_N)
    second, _ = feedback.encode("shared", whole, delta_N)
    assert torch.equal(first, second) and torch.equal(first, whole.encode(delta_N + kept_N))
    assert feedback.names == {"shared"}


def test_moments_are_states_and_carry_no_error(seed):
    torch.manual_seed(seed)
    delta, moments = Segment(70_000, "int4"), Segment(500, "int8", non_negative=True)
    whole, feedback = Format([delta, moments]), ErrorFeedback()
    flat_N = torch.rand(whole.numel)
    for _ in range(2):
        data, error_N = feedback.encode("shared", whole, flat_N)
        assert error_N.numel == 70_000
        feedback.keep("shared", error_N)
    assert torch.equal(whole.decode(data)[70_000:], whole.decode(whole.encode(flat_N))[70_000:])
    assert not torch.equal(whole.decode(data)[:70_000], whole.decode(whole.encode(flat_N))[:70_000])


def test_an_exact_delta_leaves_nothing_over_and_takes_what_was():
    delta_N, feedback, whole = torch.rand(10), ErrorFeedback(), Format([Segment(5, "fp32"), Segment(5, "bf16")])
    data, error_N = feedback.encode("shared", whole, delta_N)
    assert error_N is None and torch.equal(data, whole.encode(delta_N))
    feedback.restore({"shared": torch.ones(5)})
    data, error_N = feedback.encode("shared", whole, delta_N)
    assert error_N is None and torch.equal(whole.decode(data)[:5], delta_N[:5] + 1)
    feedback.keep("shared", error_N)
    assert not feedback.names


def test_errors_are_kept_by_name_until_they_are_forgotten():
    feedback, whole = ErrorFeedback(), Format([Segment(5, "int4")])
    for name in ("shared", "slot-1"):
        feedback.keep(name, feedback.encode(name, whole, torch.rand(5))[1])
    assert feedback.names == {"shared", "slot-1"}
    feedback.drop("slot-1")
    feedback.drop("slot-2")
    assert feedback.names == {"shared"}


def test_an_error_of_another_length_is_refused():
    feedback = ErrorFeedback()
    feedback.restore({"shared": torch.zeros(5)})
    with pytest.raises(ValueError, match="the error kept for shared has 5 elements, not 6; forget it first"):
        feedback.encode("shared", Format([Segment(6, "int4")]), torch.zeros(6))
    with pytest.raises(ValueError, match="vector of 4 elements, expected 5"):
        feedback.encode("shared", Format([Segment(5, "int4")]), torch.zeros(4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_delta_that_is_not_finite_leaves_the_kept_error_as_it_was(bad):
    feedback, whole, kept_N = ErrorFeedback(), Format([Segment(2, "int4")]), torch.ones(2)
    feedback.restore({"shared": kept_N})
    with pytest.raises(ValueError, match="cannot be encoded"):
        feedback.encode("shared", whole, torch.tensor([bad, 1.0]))
    data, _ = feedback.encode("shared", whole, torch.zeros(2))
    assert torch.equal(whole.decode(data), torch.ones(2)) and torch.equal(kept_N, torch.ones(2))


def test_one_part_with_its_error_is_what_the_whole_does(seed):
    torch.manual_seed(seed)
    whole, feedback = Format([Segment(70_000, "int4")]), ErrorFeedback()
    kept_N, delta_N = torch.randn(70_000), torch.randn(70_000)
    feedback.restore({"shared": kept_N})
    data, error = feedback.encode("shared", whole, delta_N)
    for part in whole.parts:
        here = slice(part.start, part.stop)
        data_part, error_part_N = encode_with_error(part, delta_N[here], kept_N[here])
        assert torch.equal(data_part, data[part.byte_start : part.byte_stop])
        assert torch.equal(error_part_N, error.whole()[here])
    first_N = delta_N[: whole.parts[0].stop]
    without, _ = encode_with_error(whole.parts[0], first_N, None)
    assert torch.equal(without, whole.encode_part(whole.parts[0], first_N))


@pytest.mark.skipif(sys.platform != "linux", reason="residuals lie in memory elsewhere")
def test_residuals_on_the_disk_are_those_in_memory_and_leave_no_file(tmp_path, seed, monkeypatch):
    monkeypatch.setattr(paged, "PIECE_NUMEL", 1024)
    monkeypatch.setattr("spes_p2p.codecs.format.PIECE_NUMEL", 1024)  # pages are given back on the way
    torch.manual_seed(seed)
    whole, on_disk, in_memory = Format([Segment(200_000, "int4")]), ErrorFeedback(tmp_path), ErrorFeedback()
    for _ in range(3):
        delta_N = torch.randn(200_000)
        found, expected = (each.encode("shared", whole, delta_N) for each in (on_disk, in_memory))
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1].whole(), expected[1].whole())
        on_disk.keep("shared", found[1])
        in_memory.keep("shared", expected[1])
        assert found[1].open().memory is not None and not list(tmp_path.iterdir())
    resumed = ErrorFeedback(tmp_path)
    resumed.restore({"shared": on_disk.residuals()["shared"].whole()})
    assert torch.equal(resumed.encode("shared", whole, delta_N)[0], in_memory.encode("shared", whole, delta_N)[0])


@pytest.mark.skipif(sys.platform != "linux", reason="residuals lie in memory elsewhere")
def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(paged, "PIECE_NUMEL", 1024)

    def is_full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", is_full)
    with pytest.raises(OSError, match="No space left"):
        ErrorFeedback(tmp_path).encode("shared", Format([Segment(5000, "int4")]), torch.ones(5000))
