"""Agreement in random histories: crashes, lost messages, cuts, restored disks, and peers that lie.

    python -m benchmarks.histories --count 10000 --write
    python -m benchmarks.histories --kind twice --count 1000 --write

With `--write`, histories that are on record with the same code count too, and the record grows as they end.
Each history is a swarm in virtual time. Chaos lasts for some rounds; then the network heals, and more than half of the
voters stay up. Reported: forks, certificates that a disk kept and the run has lost, those that no disk has because all
that had them were restored from older backups, and runs that stand though more than half of the voters answer.
Nodes (`history_peers`, `history_liars`) run `spes_p2p.swarm.agreement` as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from benchmarks.history_liars import LIARS, PROVEN
from benchmarks.history_peers import LEASE_SECONDS, NUM_SLOTS, RULES, Node, World, hashed
from benchmarks.machine import Circumstances, load_average
from benchmarks.records import program_digest
from spes_p2p.fs import write_atomic
from spes_p2p.sim.loop import VirtualLoop
from spes_p2p.swarm.certificate import genesis
from spes_p2p.swarm.p2p.identity import hashed_peer_id

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "histories.json"
QUIET_SECONDS = 3600.0
"""Virtual time after the chaos, and after a return to an earlier round, in which a round must be certified."""
BROKEN = {
    "honest": ("forks", "lost", "stands", "apart", "wrongly_convicted", "moved", "unvouched", "revoked_votes"),
    "twice": ("unproven", "stands", "wrongly_convicted"),
    "set_back": ("unproven", "stands", "wrongly_convicted"),
}
"""What must not happen, by kind: a minority lies at most; a voter signs twice; a disk is set back without notice."""
WRITTEN_EVERY = 100
RARE = 0.02
"""Share of disturbances that revoke an invite, take all back to an earlier round, or cut for 12 or 30 minutes."""
KINDS = LIARS | PROVEN


async def history(seed: int, kind: str = "honest", only: str = "") -> dict[str, Any]:
    """Run one history; return what went wrong, and what happened."""
    rng = random.Random(f"histories {seed} {kind}")
    world, peers, lies = _begin(seed, kind, only, rng)
    await _run(60)
    for peer, lie in zip(peers, lies, strict=True):
        if lie and not isinstance(world.nodes[peer], KINDS[lie]):
            world.turn(peer, KINDS[lie])
    await _chaos(world, rng, kind)
    end = rng.choice(["peace"] * 6 + ["halves", "massacre"]) if kind == "honest" else "peace"
    dead = await _calm(world, rng, end)
    honest = [node for node in world.nodes.values() if node.is_honest and node.is_up]
    head = max(honest, key=lambda node: node.last.round).last
    good = [each.peer_id for each in honest if each.peer_id in head.voters and not each.agreement.voter.is_lost]
    # Without a majority, the rest goes on only if it is whole: no liar, no lost promises.
    rest = [peer for peer in head.voters if peer not in dead]
    answers = head.is_quorum(good) if end != "massacre" else good == rest and bool(rest)
    began = world.now
    await _run(QUIET_SECONDS, lambda: all(node.last.round > head.round + 2 for node in honest))
    healed = world.now - began
    if world.reopened:  # who was cut off then went on in the old generation; its user sees that, and goes back too
        for node in honest:
            node.guarded(node.reopen)
        await _run(QUIET_SECONDS, lambda: all(node.last.round > head.round for node in honest))
    stands = answers and any(node.last.round <= head.round for node in honest)
    for node in world.nodes.values():
        node.stop()
    liars = [peer for peer, lie in zip(peers, lies, strict=True) if lie]
    return _judge(world, honest) | {
        "stands": stands,
        "rounds": max(node.last.round for node in honest),
        "healed": round(healed) if answers else 0,
        "attempts": max(node.most_attempts for node in honest),
        "turns": max(node.most_turns for node in honest),
        "idle_liars": sum(not world.lies[peer] for peer in liars),
        "lies": "+".join(lie for lie in lies if lie),
        "end": end,
        "seed": seed,
    }


def _begin(seed: int, kind: str, only: str, rng: random.Random) -> tuple[World, list[str], list[str]]:
    """Start a swarm; return it with its peers and the lie of each."""
    num = rng.randint(3, 9)
    peers = [hashed_peer_id(f"{seed}:{index}".encode()) for index in range(num)]
    start = genesis("histories", peers[0], hashed("manifest"), NUM_SLOTS)
    seats = {peer: f"invite{index}" * (index > 0) for index, peer in enumerate(peers)}
    world = World(seed, rng, start.model_copy(update={"seats": seats}))
    faulty = set(rng.sample(peers[1:], (num - 1) // 4)) if kind == "honest" else set()
    faulty = {rng.choice(peers[1:])} if kind == "twice" else faulty
    names = sorted(PROVEN if kind == "twice" else LIARS)
    lies = [(only or rng.choice(names)) if peer in faulty else "" for peer in peers]
    for peer, lie in zip(peers, lies, strict=True):
        lies_at_once = lie and rng.random() < 0.3  # else once it is a voter
        world.nodes[peer] = (KINDS[lie] if lies_at_once else Node)(world, peer)
        world.nodes[peer].start()
    return world, peers, lies


async def _run(seconds: float, done: Callable[[], bool] = lambda: False) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while loop.time() < until and not done():
        await asyncio.sleep(min(5.0, until - loop.time()))


async def _chaos(world: World, rng: random.Random, kind: str) -> None:
    world.loss = rng.choice([0.0, 0.02, 0.1, 0.3])
    share = rng.choice([0.0, 0.0, 0.01, 0.05])
    for node in world.nodes.values():
        node.crash_share = share
    ends = world.now + rng.uniform(240, 840)
    while world.now < ends:
        _disturb(world, rng, kind)
        await asyncio.sleep(rng.expovariate(1 / 20))


def _disturb(world: World, rng: random.Random, kind: str) -> None:
    nodes = list(world.nodes.values())
    node = rng.choice(nodes)
    event = rng.choice(["crash", "crash", "cut", "heal", "split", "late", "restore", "backup"])
    if kind == "honest" and rng.random() < RARE:
        event = rng.choice(["revoke", "reopen", "long split"])
    if event == "crash" and node.is_up:
        node.crash(rng.uniform(1, 200))
    elif event == "cut":
        world.cut.add((node.peer_id, rng.choice(nodes).peer_id))
    elif event == "heal":
        world.cut.clear()
    elif event in ("split", "long split"):
        world.split(set(rng.sample([each.peer_id for each in nodes], len(nodes) // 2)))
        seconds = rng.uniform(10, 100) if event == "split" else rng.choice([720.0, 1800.0])
        asyncio.get_running_loop().call_later(seconds, world.cut.clear)
    elif event == "late" and len(nodes) < 12:
        peer = hashed_peer_id(f"{world.seed}:late{len(nodes)}".encode())
        drops = kind == "honest" and rng.random() < 0.1
        world.nodes[peer] = (KINDS["drops"] if drops else Node)(world, peer)
        world.nodes[peer].start()
    elif event == "revoke" and not world.revoked:
        world.revoked = (rng.choice([seat for seat in world.start.seats.values() if seat]),)
        for each in nodes:
            if each.is_up:
                each.read()
    elif event == "reopen" and not world.reopened:
        last = max(each.last.round for each in nodes if each.is_honest)
        if last > 8:
            world.reopen(last - rng.randint(0, 6))
    elif event == "backup":
        node.back_up()
    elif event == "restore" and node.backup is not None:
        node.restore(is_noticed=kind != "set_back" or rng.random() < 0.5)


async def _calm(world: World, rng: random.Random, end: str) -> set[str]:
    """End the chaos: in peace, with half of the voters dead, or cut in halves for long; return the dead."""
    world.loss = 0.0
    world.cut.clear()
    voters = max((node.last for node in world.nodes.values()), key=lambda body: body.round).voters
    half = set(rng.sample(sorted(voters), (len(voters) + 1) // 2))
    dead = half if end == "massacre" else set()
    if end == "halves":
        world.split(half)
    for peer, node in world.nodes.items():
        node.crash_share = 0.0
        if peer in dead:
            node.stop()
        elif not node.is_up:
            node.start()
    if end == "halves":
        await asyncio.sleep(3 * RULES.shrink_seconds)
        world.cut.clear()
        await asyncio.sleep(2 * LEASE_SECONDS)
    return dead


def _judge(world: World, honest: list[Node]) -> dict[str, Any]:
    unshrunk: dict[str, set[str]] = defaultdict(set)
    for body in world.certified.values():
        if not body.shrunk and not body.is_varied:
            unshrunk[body.previous].add(body.digest)
    forks = sum(len(digests) > 1 for digests in unshrunk.values())
    final = max(honest, key=lambda node: node.last.round)
    kept = {certificate.body.digest for certificate in final.chain}
    missing = [disks for digest, disks in world.adopted.items() if digest not in kept]
    shrunk = sum(bool(body.shrunk or body.stood_in_for) for body in world.certified.values())
    revoked = {peer for peer, seat in world.start.seats.items() if seat in world.revoked}
    is_judged = not (shrunk or forks)
    guilty = set(world.proven_at)
    bodies = [certificate.body for certificate in final.chain]
    out = [sum(peer in b.voters for b in bodies if b.round > round) for peer, round in world.proven_at.items()]
    shared = min(node.last.round for node in honest)
    ends = {each.digest for node in honest if (each := node.agreement.chain.body_at(shared)) is not None}
    return {
        "forks": forks,
        "unproven": forks if not guilty else 0,
        "lost": sum(map(bool, missing)) if is_judged else 0,
        "on_no_disk": sum(not disks for disks in missing) if is_judged else 0,
        "shrunk": shrunk,
        "judged": is_judged,
        "proven": len(guilty),
        "wrongly_convicted": sum(world.nodes[p].is_honest and p not in world.set_back for p in guilty),
        "rounds_until_out": max(out, default=0),
        "apart": max(len(ends) - 1, 0),
        "moved": world.num_moved,
        "unvouched": len({peer for body in bodies for peer in body.voters} - world.start.seats.keys()),
        "revoked_votes": len(revoked & set(final.last.voters)),
        "revoked": len(revoked),
        "reopened": int(world.reopened > 0),
    }


def history_of(which: tuple[int, str, str]) -> dict[str, Any]:
    """Run the history of a seed, a kind and perhaps one lie."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(history(*which))
    finally:
        loop.close()


def main() -> int:
    """Run the histories that are not on record, and print the counts; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="how many, with those on record")
    parser.add_argument("--first", type=int, default=0, help="seed of the first, where none is on record")
    parser.add_argument("--kind", choices=list(BROKEN), default="honest")
    parser.add_argument("--liar", choices=[*LIARS, *PROVEN], default="", help="the only lie")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"keep the counts in {RESULTS}")
    parser.add_argument("-v", action="store_true", help="show what the peers log")
    args = parser.parse_args()
    if args.write and args.liar:
        parser.error("--write keeps histories with all lies only")
    load, broken = load_average(), BROKEN[args.kind]
    counts: dict[str, Any] = {"code": code(), "first": args.first, "histories": 0}
    known = _on_record().get(args.kind, {}) if args.write else {}
    if known.get("code") == counts["code"]:
        counts = {key: value for key, value in known.items() if key != "circumstances"}
    seeds = range(counts["first"] + counts["histories"], counts["first"] + args.count)
    which = [(seed, args.kind, args.liar) for seed in seeds]
    if args.v:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        found_all: Iterator[dict[str, Any]] = map(history_of, which)
    else:
        found_all = Pool(args.processes, logging.disable, (logging.WARNING,)).imap(history_of, which, chunksize=4)
    for found in found_all:
        if any(found[key] for key in broken):
            print(json.dumps(found), file=sys.stderr, flush=True)
        _add(counts, found)
        if args.write and counts["histories"] % WRITTEN_EVERY == 0:
            _write(args.kind, counts, load)
    print(json.dumps(counts))
    if args.write:
        _write(args.kind, counts, load)
    return 1 if any(counts.get(key) for key in broken) else 0


def _add(counts: dict[str, Any], found: dict[str, Any]) -> None:
    counts["histories"] += 1
    for key, value in found.items():
        if key in ("rounds_until_out", "attempts", "turns", "healed"):
            counts[key] = max(counts.get(key, 0), value)
        elif key not in ("seed", "end", "lies"):
            counts[key] = counts.get(key, 0) + int(value)


def _on_record() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def _write(kind: str, counts: dict[str, Any], load: float) -> None:
    document = _on_record() | {kind: counts | {"circumstances": asdict(Circumstances.now(load, None))}}
    with write_atomic(RESULTS) as stream:
        stream.write((json.dumps(document, indent=1) + "\n").encode())


def code() -> str:
    """Return a digest of what decides in a history, and of what draws and judges it."""
    names = (
        "certificate",
        "next_body",
        "invites",
        "chain",
        "part",
        "following",
        "statements",
        "promises",
        "proposal",
        "attempts",
        "voter",
        "agreement",
    )
    files = [*(ROOT / "spes_p2p" / "swarm" / f"{name}.py" for name in names)]
    files += [ROOT / "benchmarks" / f"{name}.py" for name in ("histories", "history_peers", "history_liars")]
    return program_digest(files)


if __name__ == "__main__":
    sys.exit(main())
