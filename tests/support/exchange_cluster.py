"""Peers of one process that exchange versions over real streams, and rogues among them."""

import torch
from peer_server import start_of

from spes_p2p.codecs.kept import KeptForm
from spes_p2p.codecs.vectors import to_bytes
from spes_p2p.config import RoundConfig
from spes_p2p.swarm.averaging.encoding import Vectors
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.p2p.channel import Channel
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.node import Node

NUMELS = {"slot": 200_000, "shared": 3_000_000}
"""A slot is one block, `shared` twelve."""
KEPT = KeptForm("bf16", NUMELS["slot"])
ROUNDS = RoundConfig(heartbeat_seconds=1.0, lease_seconds=30.0)
NUM_SLOTS = 512
VECTORS = Vectors(NUMELS, num_slots=NUM_SLOTS, kept=KEPT)
PULL_SECONDS = 60.0


def open_swarm(folder, addresses=(), *, serve=True, uplink_mbit=None):
    """Start a peer without a claim."""
    node = Node(Identity(folder / "key"), "run", initial_peers=list(addresses))
    swarm = HivemindSwarm(node, folder / "versions", serve=serve, uplink_mbit=uplink_mbit)
    swarm.enter(ROUNDS, VECTORS, start_of((node.peer_id,)), max_slots=0)
    return swarm


def open_cluster(make_folder, names, **settings):
    """Start several peers that know each other; settings by name."""
    swarms, addresses = [], []
    for name in names:
        swarms.append(open_swarm(make_folder(name), addresses, **settings.get(name, {})))
        addresses = addresses or swarms[0].node.addresses()
    return swarms


def make_rogue(swarm):
    """Have a peer that does not serve answer as its `exchange.script` says, an async function of the channel."""
    exchange = swarm.exchange
    exchange.script = None

    async def answer(channel: Channel, peer: str) -> None:
        await exchange.script(channel)

    for name in ("fetch", "ask"):
        swarm.node.run(swarm.node.serve(exchange.service(name), 60.0, answer), 10.0)


def flat(seed, kind="slot"):
    return torch.randn(NUMELS[kind], generator=torch.Generator().manual_seed(seed))


def data_of(flat_N):
    return bytes(to_bytes(flat_N))


def publish(swarm, round, bundles):
    """Publish bundles; return round and digest by name."""
    return {VectorName(name): (round, each.digest) for name, each in swarm.publish(round, bundles).items()}


def pull(puller, wanted, *holders, timeout=PULL_SECONDS):
    """Pull versions of these peers; return the failures."""
    return puller.pull(wanted, [holder.peer_id for holder in holders], timeout=timeout)
