"""The memory that a peer's vectors are sent from."""

from __future__ import annotations

import pytest
import torch

from spes_p2p.codecs.format import Segment
from spes_p2p.swarm.averaging.buffers import BufferPool
from spes_p2p.swarm.averaging.encoding import DeltaEncoding
from spes_p2p.swarm.names import SHARED, VectorName

NUMEL = 8
NAMES = (SHARED, *map(VectorName.of_slot, (2, 5, 7)))


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(DeltaEncoding({kind: [Segment(NUMEL, "fp32")] for kind in ("shared", "slot")}), max_slots=3)


def written(pool: BufferPool, slots: tuple[int, ...]) -> dict[VectorName, torch.Tensor]:
    """Write each name's own number where it would be sent from."""
    encoded = {name: buffers.source for name, buffers in pool.of(slots).items()}
    for name, data in encoded.items():
        data.view(torch.float32).fill_(NAMES.index(name))
    return encoded


def test_what_is_written_where_it_is_sent_from_is_not_copied(pool: BufferPool):
    encoded = written(pool, (2, 5, 7))
    before = {name: data.data_ptr() for name, data in encoded.items()}
    pool.take((2, 5, 7), encoded)
    assert {name: data.data_ptr() for name, data in encoded.items()} == before


@pytest.mark.parametrize("slots", [(5, 7), (7,), (7, 5, 2), (5, 2, 7)])
def test_slots_that_have_changed_places_keep_their_vectors_in_every_attempt(pool: BufferPool, slots):
    encoded = written(pool, (2, 5, 7))
    for _ in range(2):  # the second is a redone attempt
        pool.take(slots, encoded)
        for name, buffers in pool.of(slots).items():
            assert buffers.source.view(torch.float32).tolist() == [NAMES.index(name)] * NUMEL
            assert encoded[name].data_ptr() == buffers.source.data_ptr()
