"""What a round publishes leads those who do not hold it to the same bits, whatever it costs in bytes."""

from collections.abc import Mapping

import torch
from virtual import World, make_peer, run_peers, tiny_run

from spes_p2p.codecs.vectors import HASH_BYTES
from spes_p2p.config import RoundConfig, RunConfig
from spes_p2p.training.holdings import staleness_bound


def run_on(run: RunConfig, num_peers: int, max_slots: int, machines: Mapping[int, dict] | None = None):
    """Run peers to the run's end; return them."""
    run = run.model_copy(update={"round": run.round.model_copy(update={"min_peers": num_peers})})
    world = World()
    peers = [make_peer(run, max_slots, world) for _ in range(num_peers)]
    for index, choices in (machines or {}).items():
        sync = peers[index].sync
        sync._machine = sync._machine.model_copy(update=choices)
        sync.held.refresh_slots = sync._machine.refresh_slots
    run_peers(peers)
    return peers


def test_a_peer_that_fetches_few_slots_stays_within_its_bound_and_says_how_old_they_are():
    rounds = RoundConfig(mode="steps", steps=2, total=8, min_peers=2, max_seconds=60, exchange_seconds=20, copies=1)
    peers = run_on(tiny_run(round=rounds), 3, 1, {0: {"refresh_slots": 1}})
    few, others = peers[0], peers[1:]
    bound = staleness_bound(2, 1)  # three slots are held, one of them by itself
    assert {report.stale_rounds for report in few.reports} == {bound - 1}
    assert all(report.stale_rounds == 0 for peer in others for report in peer.reports)
    slot_bytes = 4 * few.trainer.layouts["slot"].numel
    pulled = [peer.reports[-1].bytes_in - peer.reports[1].bytes_in for peer in (few, others[0])]
    assert pulled[1] - pulled[0] == 6 * (slot_bytes + HASH_BYTES)


def test_routed_tokens_are_counted_over_layers_and_once():
    run = tiny_run(model=tiny_run().model.model_copy(update={"num_layers": 2}))
    peer = make_peer(run, 2)
    peer.trainer.load(peer.initial())
    for _ in range(2):
        peer.trainer.step(1e-3)
    routed = peer.trainer.routed_tokens()
    assert sorted(routed) == [0, 1, 2, 3]
    assert sum(routed.values()) == 2 * 4 * 16 * 2 * 2  # steps, sequences, tokens, layers, experts per token
    assert peer.trainer.routed_tokens() == {}


def test_routed_tokens_are_those_of_the_router():
    """Compared with a forward pass of the plain model."""
    peer = make_peer(tiny_run(), 2)
    peer.trainer.load(peer.initial())
    tokens_BT1 = peer.trainer.data.next_batch(4)
    peer.trainer.data.load_state_dict({"position": 0})
    with torch.no_grad():
        logits = peer.trainer.model.module(tokens_BT1[:, :-1], output_router_logits=True).router_logits
    expected = sum(torch.bincount(layer.topk(2, dim=-1).indices.flatten(), minlength=4) for layer in logits)
    peer.trainer.step(1e-3)
    assert peer.trainer.routed_tokens() == dict(enumerate(expected.tolist()))
