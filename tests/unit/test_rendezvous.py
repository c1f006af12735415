"""Which versions a rendezvous keeps: what fits its disk, of what a certificate names."""

from __future__ import annotations

import pytest

from spes_p2p.commands.rendezvous import certified_versions, fitting
from spes_p2p.config import RunConfig
from spes_p2p.swarm.averaging.encoding import Vectors
from spes_p2p.swarm.certificate import SlotState, genesis
from spes_p2p.swarm.names import SHARED, VectorName

SLOTS = [VectorName.of_slot(slot) for slot in range(3)]
NAMES = [VectorName(SHARED), *SLOTS]


@pytest.mark.parametrize(("num_bytes", "num_kept"), [(0, 0), (399, 0), (400, 1), (479, 1), (480, 2), (10**6, 4)])
def test_it_keeps_the_first_vectors_that_fit(num_bytes: int, num_kept: int) -> None:
    vectors = Vectors({SHARED: 100, "slot": 20}, num_slots=3)
    assert fitting(NAMES, vectors, num_bytes) == NAMES[:num_kept]


def test_it_fetches_what_the_certificate_names_and_nothing_that_the_seed_makes() -> None:
    start = genesis("run", "Q" * 46, "0" * 64, 3)
    assert certified_versions(start, NAMES, RunConfig()) == {}
    slots = (SlotState(round=4, digest="a" * 64), start.slots[1], SlotState(round=7, digest="b" * 64))
    body = start.model_copy(update={"round": 7, "shared": "c" * 64, "slots": slots})
    assert certified_versions(body, NAMES, RunConfig()) == {
        SHARED: (7, "c" * 64),
        SLOTS[0]: (4, "a" * 64),
        SLOTS[2]: (7, "b" * 64),
    }
