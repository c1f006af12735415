"""The one mean of the swarm, and the reducer that computes a part of it from whatever order parts arrive in."""

import asyncio

import pytest
import torch
from hivemind.averaging.partition import AllreduceException
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.swarm.reduce import OrderedReducer, weighted_mean

weights = st.lists(st.integers(0, 10**6), min_size=1, max_size=6).filter(any)
NUM_ELEMENTS = 33


def draw_parts(count, seed):
    return list(torch.randn(count, NUM_ELEMENTS, generator=torch.Generator().manual_seed(seed)))


@given(weights, st.integers(0, 2**31))
def test_weighted_mean_is_the_plain_one_in_float64(tokens, seed):
    parts = draw_parts(len(tokens), seed)
    plain = sum(count * part.double() for count, part in zip(tokens, parts, strict=True)) / sum(tokens)
    torch.testing.assert_close(weighted_mean(parts, list(map(float, tokens))).double(), plain, atol=2e-6, rtol=1e-6)


@given(weights, st.integers(0, 2**31))
def test_weighted_mean_stays_between_the_parts_and_leaves_them_alone(tokens, seed):
    parts = draw_parts(len(tokens), seed)
    before = [part.clone() for part in parts]
    mean = weighted_mean(parts, list(map(float, tokens)))
    counted = torch.stack([part for part, count in zip(parts, tokens, strict=True) if count])
    assert (mean >= counted.amin(0) - 1e-5).all() and (mean <= counted.amax(0) + 1e-5).all()
    assert all(torch.equal(part, old) for part, old in zip(parts, before, strict=True))


@given(weights, st.integers(0, 2**31), st.integers(0, 6))
def test_who_trained_nothing_changes_no_bit_not_even_with_nan(tokens, seed, position):
    parts = draw_parts(len(tokens), seed)
    with_idle = [*parts[:position], torch.full((NUM_ELEMENTS,), float("nan")), *parts[position:]]
    with_zero = [*tokens[:position], 0, *tokens[position:]]
    assert torch.equal(weighted_mean(with_idle, with_zero), weighted_mean(parts, tokens))


@given(st.integers(1, 5), st.integers(1, 4), st.randoms(), st.integers(0, 2**31))
def test_reduced_parts_do_not_depend_on_the_order_of_arrival(num_senders, num_parts, random, seed):
    tokens = [random.randrange(1, 1000) for _ in range(num_senders)]
    parts = [draw_parts(num_parts, seed + sender) for sender in range(num_senders)]

    async def send(reducer, sender):
        means = []
        for index, part in enumerate(parts[sender]):
            for _ in range(random.randrange(4)):
                await asyncio.sleep(0)
            means.append(await reducer.accumulate_part(sender, index, part))
        return means

    async def reduce_all():
        reducer = OrderedReducer([part.shape for part in parts[0]], tokens)
        order = random.sample(range(num_senders), num_senders)
        return await asyncio.wait_for(asyncio.gather(*(send(reducer, sender) for sender in order)), 10)

    for means in asyncio.run(reduce_all()):
        for index, mean in enumerate(means):
            assert torch.equal(mean, weighted_mean([sent[index] for sent in parts], tokens))


def refused(index, part, match):
    async def send():
        reducer = OrderedReducer([torch.Size([4]), torch.Size([2])], [1.0, 1.0])
        try:
            await asyncio.wait_for(reducer.accumulate_part(0, index, part), 10)
        finally:
            reducer.finalize()

    with pytest.raises(AllreduceException, match=match):
        asyncio.run(send())


@pytest.mark.parametrize("shape", [(1,), (5,), (2, 2), (0,)], ids=str)
def test_a_part_of_another_shape_is_refused_even_if_it_would_broadcast(shape):
    refused(0, torch.ones(shape), "shape")


def test_a_part_beyond_the_last_is_refused():
    refused(2, torch.ones(2), "shape")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_part_that_is_not_finite_is_refused(value):
    refused(0, torch.tensor([1.0, value, 1.0, 1.0]), "NaN or infinity")


def test_a_part_that_comes_twice_is_refused():
    async def send_twice():
        reducer = OrderedReducer([torch.Size([4])], [1.0, 1.0])
        first = asyncio.ensure_future(reducer.accumulate_part(0, 0, torch.ones(4)))
        await asyncio.sleep(0)
        with pytest.raises(AllreduceException, match="twice"):
            await reducer.accumulate_part(0, 0, torch.ones(4))
        reducer.finalize()
        await asyncio.wait({first}, timeout=10)
        assert first.cancelled()

    asyncio.run(send_twice())


def test_who_waits_for_a_part_of_a_failed_group_is_told():
    """A sender that is one part ahead of a dead one must not wait for ever."""

    async def fail_meanwhile():
        reducer = OrderedReducer([torch.Size([4]), torch.Size([4])], [1.0, 1.0])
        ahead = asyncio.ensure_future(reducer.accumulate_part(0, 1, torch.ones(4)))
        await asyncio.sleep(0)
        reducer.finalize()
        with pytest.raises(AllreduceException, match="already failed"):
            await asyncio.wait_for(ahead, 10)

    asyncio.run(fail_meanwhile())
