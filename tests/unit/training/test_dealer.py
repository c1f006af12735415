"""How much shared data a peer asks for, and what it trains beside its share."""

from virtual import World, tiny_run

from spes_p2p.config import DataConfig
from spes_p2p.swarm.averaging.encoding import Vectors
from spes_p2p.training.dealer import batches_to_ask, deal

SHARED_DATA = DataConfig(source="files", fingerprint="0" * 64, sequence_length=16, vocab_size=64)


def run_of(**rounds):
    run = tiny_run()
    return run.model_copy(update={"data": SHARED_DATA, "round": run.round.model_copy(update=rounds)})


def test_a_peer_asks_for_the_rounds_steps_or_for_a_quarter_more_than_it_has_trained():
    by_steps, by_time = run_of(mode="steps", steps=5), run_of(mode="tokens")
    assert [batches_to_ask(by_steps, 1, trained) for trained in (0, 3, 5)] == [0, 5, 5]
    assert [batches_to_ask(by_time, 1, trained) for trained in (0, 1, 40, 41)] == [0, 1, 50, 51]
    assert batches_to_ask(tiny_run(), 1, 40) == 0, "its data are its own"
    growing = run_of(mode="tokens", growing=2)
    assert [batches_to_ask(growing, round, 4) for round in (1, 2, 3)] == [50, 50, 5], "rounds grow tenfold"


def test_a_peer_without_a_share_reads_from_the_cursor_on_in_an_order_of_its_own_and_the_rounds():
    world = World()
    one, other = (world.swarm(index) for index in range(2))
    for swarm in (one, other):
        world.enter(swarm, tiny_run(), Vectors())
    world.certify(1, cursor=7)
    assert deal(one, 1)[0] == range(7, 7)
    assert len({deal(swarm, round)[1] for swarm in (one, other) for round in (0, 1)}) == 4
    assert deal(one, 1) == deal(one, 1), "a round that failed begins again"
