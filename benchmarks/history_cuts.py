"""Cuts of 12 and of 30 minutes on small swarms, in virtual time: do they heal, what is lost, and what is the pace?

    python -m benchmarks.history_cuts

Paces are certificates per second, as a share of those of the same swarm without faults.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.history_liars import LIARS
from benchmarks.history_peers import NUM_SLOTS, RULES, Node, World, hashed
from benchmarks.tables import Row
from spes_p2p.sim.loop import VirtualLoop
from spes_p2p.swarm.certificate import genesis
from spes_p2p.swarm.p2p.identity import hashed_peer_id

VOTERS, MINUTES = (2, 3, 4, 5, 7), (12, 30)
KINDS = ("minority", "half", "mute", "deaf", "pair")
HOUR = 3600.0
PACE_SECONDS = 600.0
SEEDS, LID_ROUNDS = 3, 1000


@dataclass(frozen=True)
class Cut:
    """What a cut did.

    Attributes:
        pace: Certificates per second meanwhile, of those without faults.
        healed_seconds: Time from its end until all peers follow one branch, and three certificates more.
        lost: Certificates that the branch does not have, and that follow none which names voters absent.
        shrunk: Certificates that name voters absent.
    """

    pace: float
    healed_seconds: float
    lost: int
    shrunk: int


@dataclass(frozen=True)
class Lids:
    """What lids that close in turn did to those that are open.

    Attributes:
        missed: Share of the rounds of peers that were there all the time, which did not count them.
        lost: Certificates that were given up and follow none that names voters absent, of those of the chain.
        pace: Certificates per second, of those with all lids open.
    """

    missed: float
    lost: float
    pace: float


async def swarm(num: int, seed: int) -> World:
    """Start a swarm; return it once all of its peers are voters."""
    peers = [hashed_peer_id(f"cut {seed}:{index}".encode()) for index in range(num)]
    start = genesis("cuts", peers[0], hashed("manifest"), NUM_SLOTS, peers)
    world = World(seed, random.Random(f"cut {num} {seed}"), start)
    world.nodes |= {peer: Node(world, peer) for peer in peers}
    for node in world.nodes.values():
        node.start()
    for _ in range(1000):
        await asyncio.sleep(1)
        if all(len(node.last.voters) == num for node in world.nodes.values()):
            return world
    raise RuntimeError(f"{num} peers are not all voters after 1000 s")


async def pace(world: World, seconds: float) -> float:
    """Return the certificates per second in the next seconds, of the longest chain."""
    began = max(node.last.round for node in world.nodes.values())
    await asyncio.sleep(seconds)
    return (max(node.last.round for node in world.nodes.values()) - began) / seconds


def cut(world: World, how: str) -> None:
    """Cut links: of a minority, of half of the peers, from one peer, to one peer, or between two."""
    peers = sorted(world.nodes)
    world.rng.shuffle(peers)
    if how in ("minority", "half"):
        num = (len(peers) - 1) // 2 if how == "minority" else len(peers) // 2
        world.split(set(peers[:num]))
    elif how == "mute":
        world.cut |= {(peers[0], other) for other in peers[1:]}
    elif how == "deaf":
        world.cut |= {(other, peers[0]) for other in peers[1:]}
    else:
        world.cut |= {(peers[0], peers[1])}


async def cut_of(num: int, minutes: int, how: str, seed: int) -> Cut:
    """Return what a cut of some minutes does to a swarm of some voters."""
    world = await swarm(num, seed)
    usual = await pace(world, PACE_SECONDS)
    cut(world, how)
    meanwhile = await pace(world, minutes * 60)
    world.cut.clear()
    ended, most = world.now, max(node.last.round for node in world.nodes.values())

    def is_whole() -> bool:
        shared = min(node.last.round for node in world.nodes.values())
        ends = {body.digest for node in world.nodes.values() if (body := node.agreement.chain.body_at(shared))}
        return shared >= most + 3 and len(ends) == 1

    while not is_whole() and world.now < ended + HOUR:
        await asyncio.sleep(1)
    kept = {certificate.body.digest for node in world.nodes.values() for certificate in node.chain}
    for node in world.nodes.values():
        node.stop()
    lost = [body for body in world.certified.values() if body.digest not in kept and not world.is_shrunk(body)]
    shrunk = sum(bool(body.shrunk) for body in world.certified.values())
    return Cut(meanwhile / usual, world.now - ended, len(lost), shrunk)


async def decision_seconds(num: int, seed: int) -> float:
    """Return the median time from a round's end to its certificate, without faults."""
    world = await swarm(num, seed)
    await asyncio.sleep(PACE_SECONDS)
    for node in world.nodes.values():
        node.stop()
    ends = {body.round + 1: body.ends_at for body in world.certified.values()}
    taken = [world.certified_at[body.digest] - ends.get(body.round, 0) for body in world.certified.values()]
    return statistics.median(taken[-20:])


async def lying(num: int, lie: str, seed: int) -> float:
    """Return the pace with one voter that lies, of the pace without."""
    world = await swarm(num, seed)
    usual = await pace(world, PACE_SECONDS)
    world.turn(world.rng.choice(sorted(world.nodes)), LIARS[lie])
    found = await pace(world, PACE_SECONDS)
    for node in world.nodes.values():
        node.stop()
    return found / usual


# ------------------------------------------------------------------ voters that are away


async def next_certificate(world: World, peer: str) -> float:
    """Return the seconds until a peer that stays here follows a certificate that counts its work; an hour at most."""
    node, began = world.nodes[peer], world.now
    round = node.last.round
    while node.last.round == round or not any(each.peer_id == peer and each.tokens for each in node.last.members):
        if world.now >= began + HOUR:
            break
        await asyncio.sleep(0.5)
    return world.now - began


async def without_founder(num: int, seed: int) -> float:
    """Return the seconds for which voters wait once the founder, one of them, has died for good."""
    world = await swarm(num, seed)
    founder, *friends = world.nodes
    world.nodes[founder].stop()
    return await next_certificate(world, friends[0])


async def killed_and_paused(seed: int) -> float:
    """Return the seconds for which the third of three voters waits once the second one's pause has ended."""
    world = await swarm(3, seed)
    killed, paused, third = world.nodes
    world.nodes[killed].stop()
    world.split({paused})
    await asyncio.sleep(300)
    world.cut.clear()
    return await next_certificate(world, third)


async def laptops(seed: int) -> float:
    """Return the seconds for which four voters wait that come back next day without the last one that had gone."""
    world = await swarm(5, seed)
    for node in world.nodes.values():
        await asyncio.sleep(120)
        node.stop()
    await asyncio.sleep(12 * HOUR)
    *opened, _ = world.nodes
    for peer in opened:
        world.nodes[peer].start()
    return await next_certificate(world, opened[0])


async def lids(seed: int) -> Lids:
    """Close the lid of one of four voters after the other, for some minutes each, until so many rounds are certified.

    Half of the closed ones are restarted, the others go on, after they have heard nobody.
    """
    world = await swarm(4, seed)
    away: list[tuple[str, float, float]] = []
    usual = await pace(world, PACE_SECONDS)
    began, first = world.now, max(node.last.round for node in world.nodes.values())
    for peer in itertools.cycle(world.nodes):
        closed_at, is_restarted = world.now, world.rng.random() < 0.5
        if is_restarted:
            world.nodes[peer].stop()
        else:
            world.split({peer})
        await asyncio.sleep(world.rng.uniform(60, 1800))
        if is_restarted:
            world.nodes[peer].start()
        world.cut.clear()
        away.append((peer, closed_at, world.now))
        await asyncio.sleep(world.rng.uniform(60, 600))
        head = max((node.last for node in world.nodes.values()), key=lambda last: last.round)
        if head.round >= first + LID_ROUNDS:
            break
    chain = [head]
    while chain[-1].round > first:
        chain.append(world.certified[chain[-1].previous])
    counted = missed = 0
    for body, before in itertools.pairwise(chain):
        start, end = world.certified_at[before.digest], world.certified_at[body.digest]
        there = {peer for peer in world.nodes if not any(p == peer and a < end and start < b for p, a, b in away)}
        counted += len(there)
        missed += len(there - {member.peer_id for member in body.members})
    kept = {body.digest for body in chain}
    others = [body for digest, body in world.certified.items() if body.round > first and digest not in kept]
    lost = sum(not world.is_shrunk(body) for body in others)
    return Lids(missed / counted, lost / len(chain), (head.round - first) / (world.now - began) / usual)


def absence_rows() -> Iterator[Row]:
    """Yield what a run does whose voters are away, in virtual time: the worst of a few seeds."""
    for what, most, work in (
        ("a founder dies for good: its two friends wait, s", 30.0, partial(without_founder, 3)),
        ("- its only friend", RULES.shrink_seconds + 60, partial(without_founder, 2)),
        ("of three friends one is killed and one paused: the third waits after the pause, s", 30.0, killed_and_paused),
        ("five laptops close, four open next day: they wait, s", RULES.shrink_seconds + 60, laptops),
    ):
        seconds = max(virtually(work(seed)) for seed in range(SEEDS))
        yield Row(what, f"{seconds:.0f}", f"<= {most:.0f}", seconds <= most)
    found = [virtually(lids(seed)) for seed in range(SEEDS)]
    share = max(each.missed for each in found)
    what = f"four friends close their lids in turn, {LID_ROUNDS:,} rounds: rounds without a peer that is there, %"
    yield Row(what, f"{100 * share:.2f}", "< 1", share < 0.01)
    yield Row("- certificates given up, %", f"{100 * max(each.lost for each in found):.2f}")
    yield Row("- pace, of that with all lids open", f"{min(each.pace for each in found):.2f}")


def virtually(work):
    """Return what a coroutine returns, in virtual time."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--voters", type=int, nargs="*", default=VOTERS)
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--minutes", type=int, nargs="*", default=MINUTES)
    parser.add_argument("--liars", action="store_true", help="the pace with each liar among five voters instead")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    if args.liars:
        for lie in LIARS:
            paces = [virtually(lying(5, lie, seed)) for seed in range(args.seeds)]
            print(f"| {lie} | {min(paces):.2f} |", flush=True)
        return 0
    for num in args.voters:
        seconds = [virtually(decision_seconds(num, seed)) for seed in range(args.seeds)]
        print(f"{num} voters: {statistics.median(seconds):.1f} s from a round's end to its certificate", flush=True)
    print("| voters | cut | minutes | pace | healed after, s | lost | shrunk |\n|---|---|---|---|---|---|---|")
    is_bad = False
    for num in args.voters:
        for how in args.kinds:
            for minutes in args.minutes:
                cuts = [virtually(cut_of(num, minutes, how, seed)) for seed in range(args.seeds)]
                healed = max(each.healed_seconds for each in cuts)
                lost, shrunk = sum(each.lost for each in cuts), sum(each.shrunk for each in cuts)
                least = statistics.median(each.pace for each in cuts)
                print(f"| {num} | {how} | {minutes} | {least:.2f} | {healed:.0f} | {lost} | {shrunk} |", flush=True)
                is_bad |= healed >= HOUR or lost > 0
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
