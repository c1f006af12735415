"""Certificates in random histories: crashes, lost messages, partitions, restarts, and proposers that cheat.

    python -m benchmarks.histories --count 10000 --write

With `--write`, histories that are on record with the same code count too, and the record grows as they end: 10,000 take
two hours of two cores.
Each history is a swarm in virtual time. Chaos lasts for some rounds; then the network heals, and more than half of the
voters stay up. Reported: forks, certificates that a disk kept and the run has lost, those that no disk has because all
that had them were restored from older backups, and runs that stand though more than half of the voters answer.
Nodes (`history_nodes`) run `spes_p2p.swarm.decision` as it is; keys are HMACs, because 10,000 histories need millions
of signatures.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from collections import defaultdict
from dataclasses import asdict
from multiprocessing import Pool
from typing import Any

from benchmarks.cluster import ROOT
from benchmarks.history_nodes import LEASE_SECONDS, LIARS, NUM_SLOTS, RULES, Alone, Node, Twice, World, hashed
from benchmarks.machine import Circumstances, load_average
from benchmarks.records import program_digest
from spes_p2p.fs import write_atomic
from spes_p2p.swarm.certificate import genesis
from spes_p2p.swarm.p2p.identity import hashed_peer_id
from spes_p2p.swarm.votes import Ballot, barred

RESULTS = ROOT / "benchmarks" / "results" / "histories.json"
QUIET_SECONDS = 3600.0
"""Virtual time after the chaos in which a round must be certified."""

BROKEN = ("forks", "lost", "stands", "apart", "wrongly_convicted")
"""What must not happen."""
BROKEN_TWICE = ("unproven", "stands", "wrongly_convicted")
"""What must not happen where a voter signs twice: it can fork the chain, and is proven guilty by that."""
WRITTEN_EVERY = 100

LIES = ("", "", "silent", "omits", "partial", "hides", "refuses", "mean", "alone", "forges")


def history(seed: int, twice: bool = False) -> dict[str, Any]:
    """Run one history; return what went wrong, and what happened."""
    rng = random.Random(f"histories {seed} {twice}")
    world = World(seed, rng)
    num = rng.randint(3, 9)
    peers = [hashed_peer_id(f"{seed}:{index}".encode()) for index in range(num)]
    start = genesis("histories", peers[0], hashed("manifest"), NUM_SLOTS)
    faulty = set(rng.sample(peers[1:], (num - 1) // 4)) if not twice else {rng.choice(peers[1:])}
    for peer in peers:
        lie = "" if peer not in faulty else ("twice" if twice else rng.choice(LIES))
        world.nodes[peer] = LIARS.get(lie, Node)(world, peer, start)
    for peer in peers:
        world.nodes[peer].start()
    world.run(60)
    end = rng.choice(["peace"] * 6 + ["halves", "massacre"]) if not twice else "peace"
    world.loss = rng.choice([0.0, 0.02, 0.1, 0.3])
    share = rng.choice([0.0, 0.0, 0.01, 0.05])
    for node in world.nodes.values():
        node.crash_share = share
    chaos_ends = rng.uniform(300, 900)
    while world.now < chaos_ends:
        _disturb(world, rng)
        world.run(world.now + rng.expovariate(1 / 20))
    world.loss, world.cut = 0.0, set()
    dead: set[str] = set()
    if end != "peace":
        voters = max((node.last for node in world.nodes.values()), key=lambda body: body.round).voters
        half = set(rng.sample(sorted(voters), (len(voters) + 1) // 2))
        if end == "massacre":
            dead = half
        else:
            world.cut = {(a, b) for a in world.nodes for b in world.nodes if (a in half) != (b in half)}
    for peer, node in world.nodes.items():
        node.crash_share = 0.0
        if peer in dead:
            node.is_dead = True
            node.crash(0.0)
        elif not node.is_up:
            node.start()
    if end == "halves":
        world.run(world.now + 3 * RULES.shrink_seconds)
        world.cut = set()
        world.run(world.now + 2 * LEASE_SECONDS)
    honest = [node for node in world.nodes.values() if node.is_honest and node.is_up]
    head = max(honest, key=lambda node: node.last.round).last
    good = [node.peer_id for node in honest if node.peer_id in head.voters and node.decider.voter.may_vote]
    # Without a majority, the rest goes on only if it is whole: no liar, no lost ballot.
    rest = [peer for peer in head.voters if peer not in dead]
    answers = 2 * len(good) > len(head.voters) if end != "massacre" else good == rest and bool(rest)
    world.run(world.now + QUIET_SECONDS, lambda: all(node.last.round > head.round + 2 for node in honest))
    stands = answers and any(node.last.round <= head.round for node in honest)
    judged = _judge(world, honest)
    return judged | {"seed": seed, "end": end, "stands": stands, "rounds": max(n.last.round for n in honest)}


def _disturb(world: World, rng: random.Random) -> None:
    nodes = list(world.nodes.values())
    node = rng.choice(nodes)
    kind = rng.choice(["crash", "crash", "cut", "heal", "split", "late", "restore", "backup"])
    if kind == "crash" and node.is_up:
        node.crash(rng.uniform(1, 200))
    elif kind == "cut":
        world.cut.add((node.peer_id, rng.choice(nodes).peer_id))
    elif kind == "heal":
        world.cut.clear()
    elif kind == "split":
        half = set(rng.sample([n.peer_id for n in nodes], len(nodes) // 2))
        world.cut |= {(a, b) for a in world.nodes for b in world.nodes if (a in half) != (b in half)}
        world.after(rng.uniform(10, 100), world.cut.clear)
    elif kind == "late" and len(nodes) < 12:
        peer = hashed_peer_id(f"{world.seed}:late{len(nodes)}".encode())
        world.nodes[peer] = Node(world, peer, nodes[0].genesis)
        world.nodes[peer].start()
    elif kind == "backup":
        node.backup = node.disk, list(node.chain)
    elif kind == "restore" and node.backup is not None:
        # `BallotFile` notices by the inode's time.
        ballot, node.chain = node.backup[0], list(node.backup[1])
        node.disk = barred(ballot, world.now) if ballot is not None else Ballot(barred_at=world.now)
        has = {certificate.body.digest for certificate in node.chain}
        for digest in world.adopted.keys() - has:
            world.adopted[digest].discard(node.peer_id)
        node.crash(1.0)


def _judge(world: World, honest: list[Node]) -> dict[str, Any]:
    unshrunk: dict[tuple[int, str], set[str]] = defaultdict(set)
    for body in world.certified.values():
        if not body.shrunk:
            unshrunk[body.round, body.previous].add(body.digest)
    forked = [round for round, digests in unshrunk.items() if len(digests) > 1]
    final = max(honest, key=lambda node: node.last.round)
    kept = {certificate.body.digest for certificate in final.chain}
    missing = [disks for digest, disks in world.adopted.items() if digest not in kept]
    shrunk = sum(bool(body.shrunk) for body in world.certified.values())
    guilty = set(world.proven_at)
    out = [0]
    for peer, round in world.proven_at.items():
        there = sum(peer in c.body.voters for c in final.chain if c.body.round > round)
        out.append(there)
    return {
        "forks": len(forked),
        "unproven": len(forked) if forked and not guilty else 0,
        "lost": 0 if shrunk or forked else sum(map(bool, missing)),
        "on_no_disk": 0 if shrunk or forked else sum(not disks for disks in missing),
        "shrunk": shrunk,
        "judged": not (shrunk or forked),
        "proven": len(guilty),
        "wrongly_convicted": sum(not isinstance(world.nodes[peer], Twice | Alone) for peer in guilty),
        "rounds_until_out": max(out),
        "apart": len({node.chain[min(n.last.round for n in honest) - 1].body.digest for node in honest}) - 1,
    }


def main() -> int:
    """Run the histories that are not on record, and print the counts; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="how many, with those on record")
    parser.add_argument("--first", type=int, default=0, help="seed of the first, where none is on record")
    parser.add_argument("--twice", action="store_true", help="one voter signs twice")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"keep the counts in {RESULTS}")
    args = parser.parse_args()
    load = load_average()
    kind, broken = ("twice", BROKEN_TWICE) if args.twice else ("honest", BROKEN)
    counts = {"code": _code(), "first": args.first, "histories": 0, "rounds_until_out": 0}
    known = _on_record().get(kind, {}) if args.write else {}
    if known.get("code") == counts["code"]:
        counts = {key: value for key, value in known.items() if key != "circumstances"}
    seeds = range(counts["first"] + counts["histories"], counts["first"] + args.count)
    with Pool(args.processes, logging.disable, (logging.WARNING,)) as pool:
        for found in pool.imap(history_of, [(seed, args.twice) for seed in seeds], chunksize=4):
            if any(found[key] for key in broken):
                print(json.dumps(found), file=sys.stderr)
            _add(counts, found)
            if args.write and counts["histories"] % WRITTEN_EVERY == 0:
                _write(kind, counts, load)
    print(json.dumps(counts))
    if args.write:
        _write(kind, counts, load)
    return 1 if any(counts.get(key) for key in broken) else 0


def history_of(which: tuple[int, bool]) -> dict[str, Any]:
    """Run the history of a seed, in which a voter signs twice or not."""
    return history(*which)


def _add(counts: dict[str, Any], found: dict[str, Any]) -> None:
    counts["histories"] += 1
    counts["rounds_until_out"] = max(counts["rounds_until_out"], found["rounds_until_out"])
    for key, value in found.items():
        if key not in ("seed", "end", "rounds_until_out"):
            counts[key] = counts.get(key, 0) + int(value)


def _on_record() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def _write(kind: str, counts: dict[str, Any], load: float) -> None:
    document = _on_record() | {kind: counts | {"circumstances": asdict(Circumstances.now(load, None))}}
    with write_atomic(RESULTS) as stream:
        stream.write((json.dumps(document, indent=1) + "\n").encode())


def _code() -> str:
    """Return a digest of what decides in a history, and of what draws and judges it."""
    names = ("certificate", "certificate_checks", "chain", "decision", "votes")
    files = [*(ROOT / "spes_p2p" / "swarm" / f"{name}.py" for name in names)]
    files += [ROOT / "benchmarks" / "histories.py", ROOT / "benchmarks" / "history_nodes.py"]
    return program_digest(files)


if __name__ == "__main__":
    sys.exit(main())
