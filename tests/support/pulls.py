"""Pulls of what a peer has, in tests that need no certificate to name it, and sources that answer as a test says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from spes_p2p.codecs.vectors import BLOCK_BYTES, HASH_BYTES, block_hashes
from spes_p2p.swarm.exchange.blocks import ALL, LIST, encode_have
from spes_p2p.swarm.exchange.protocol import DATA, GET, GET_BYTES, HAVE, WANT, parse_get
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.p2p.channel import FRAME_BYTES, Channel


def offered(puller: HivemindSwarm, names: Sequence[str], peers: Sequence[str]) -> dict[VectorName, tuple[int, str]]:
    """Return round and digest of the newest version of each name that one of these peers lists."""
    states: dict[VectorName, tuple[int, str]] = {}
    for versions in puller.inventory(peers).values():
        for name in names:
            if (version := versions.get(name)) and version.round >= states.get(VectorName(name), (0, ""))[0]:
                states[VectorName(name)] = version.round, version.digest
    return states


def pull_offered(
    puller: HivemindSwarm, names: Sequence[str], peers: Sequence[str], timeout: float = 60.0
) -> Mapping[VectorName, str]:
    """Have a peer pull the newest versions that these peers list; return the reasons for failures."""
    return puller.pull(offered(puller, names, peers), peers, timeout=timeout)


def scripted(
    part: Callable[[Channel, int], Awaitable[None]], num_versions: int = 1
) -> Callable[[Channel], Awaitable[None]]:
    """Return a script that says it has all, and answers a request for a part as `part(channel, number)` does."""

    async def script(channel: Channel) -> None:
        while True:
            kind, content = await channel.receive({WANT: HASH_BYTES * num_versions, GET: GET_BYTES})
            if kind == WANT:
                await channel.send(HAVE, num_versions * encode_have(ALL))
            else:
                await part(channel, parse_get(content)[1])

    return script


async def send_part(channel: Channel, data: bytes, number: int) -> None:
    """Send a block of a version, or its list."""
    content = block_hashes(data) if number == LIST else data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
    for start in range(0, len(content), FRAME_BYTES):
        await channel.send(DATA, content[start : start + FRAME_BYTES])
