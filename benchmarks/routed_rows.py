"""The network benchmark's measurements of peers behind home routers: who meets, how fast, and what a liar can do."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from statistics import mean, median
from unittest import mock

from benchmarks.network_rows import MBIT, MODEL, QUARTER, RTT_MS, Bench, seconds_of
from benchmarks.routers import Router
from benchmarks.tables import Row
from benchmarks.testbed import Loopback, TestBed
from benchmarks.wan.actor import Actor
from benchmarks.wan.floors import MIB
from benchmarks.wan.routed_peer import CALL_SECONDS, RoutedPeers, bed_of
from benchmarks.wan.swarm_cluster import SwarmCluster
from spes_p2p.swarm.p2p import node
from spes_p2p.swarm.p2p.introductions import Links

KINDS: tuple[Router, ...] = ("full_cone", "restricted", "port_restricted", "symmetric")
UNMET = {("port_restricted", "symmetric"), ("symmetric", "symmetric")}
TRIES, SEEK_SECONDS, MEETING_SECONDS = 20, 8.0, 2.0
CALLED, ROUTED = 1, 5
SWARM = CALLED + ROUTED
MAX_OVER_CALLED, MAX_OF_MEAN, MAX_QUIC_OVER_TCP, MAX_UNMET = 1.3, 1.5, 1.05, 1.05
SLOW_MBIT = 25.0
FAST_MBIT, SENT_BYTES = 20_000.0, 256 * MIB
MIN_MB_PER_SECOND, MAX_CPU_PER_GB = 150.0, 5.0
LIES, QUESTIONS, MAX_MEMORY_MIB = 200, 5000, 16.0


def meetings(bench: Bench) -> Iterator[Row]:
    """Yield, for each pair of kinds of routers, the tries in which two peers met: two at a time, of eight peers."""
    kinds = [kind for kind in KINDS for _ in range(2)]
    pairs = list(itertools.combinations(range(len(kinds)), 2))
    seconds: dict[tuple[Router, Router], list[list[float]]] = {}
    with bed_of(2, kinds, rtt_ms=RTT_MS) as bed:
        for number in range(TRIES):
            with RoutedPeers(bed, bench.folder_of(f"try-{number}"), 2, len(kinds)) as peers:
                meeting = [pair for pair in pairs if (kinds[pair[0]], kinds[pair[1]]) not in UNMET]
                took = {pair: peers.seek(SEEK_SECONDS, pair) for pair in meeting}
                found, ids = peers.seek(SEEK_SECONDS), peers.routed_ids  # the others, all at once: they do not meet
            for one, other in pairs:
                first, second = took.get((one, other)) or (found[one], found[other])
                both = seconds.setdefault((kinds[one], kinds[other]), [[] for _ in range(TRIES)])
                if ids[other] in first and ids[one] in second:
                    both[number].append(max(first[ids[other]], second[ids[one]]))
    for pair, tries in seconds.items():
        met = [max(found) for found in tries if found]
        num_pairs = sum((kinds[one], kinds[other]) == pair for one, other in pairs)
        complete = sum(len(found) == num_pairs for found in tries)
        bench.note(" x ".join(pair), tries)
        told = f"{complete} of {TRIES}" + (f", {median(met):.2f} s ({max(met):.2f} at most)" if met else "")
        name = f"direct link, {pair[0]} x {pair[1]}, {RTT_MS:g} ms"
        if pair in UNMET:
            yield Row(name, told)
        else:
            is_reached = complete == TRIES and max(met) <= MEETING_SECONDS
            yield Row(name, told, f"{TRIES} of {TRIES}, {MEETING_SECONDS:g} s", is_reached)


def beside_tcp(bench: Bench) -> Iterator[Row]:
    """Yield the rounds of peers that can be called and listen on QUIC beside TCP, against those of TCP alone."""
    links = dict.fromkeys(range(SWARM), MBIT)
    with bench.bed(SWARM) as bed, mock.patch.object(node, "TRANSPORTS", {"tcp": node.TRANSPORTS["tcp"]}):
        by_tcp, _ = bench.swarm_rounds("TCP alone", bed, SWARM, MODEL, uplinks=links)
    with bench.bed(SWARM) as bed:
        both, _ = bench.swarm_rounds("QUIC beside TCP", bed, SWARM, MODEL, uplinks=links)
    ratio = seconds_of(both) / seconds_of(by_tcp)
    told = f"{ratio:.2f} ({seconds_of(both):.2f} s, {seconds_of(by_tcp):.2f} s)"
    name = f"round, {SWARM} peers that can be called, with QUIC beside TCP / TCP alone"
    yield Row(name, told, f"{MAX_QUIC_OVER_TCP}", ratio <= MAX_QUIC_OVER_TCP)


def routed_rounds(bench: Bench) -> Iterator[Row]:
    """Yield rounds of a swarm whose members are behind routers, all but one, against one without routers."""
    name = f"round, {ROUTED} of {SWARM} behind routers, {MBIT:g} Mbit/s, {RTT_MS:g} ms, fp32, / all can be called"
    ratio, told = _routed_over_called(bench, "", MBIT)
    yield Row(name, told, f"{MAX_OVER_CALLED}", ratio <= MAX_OVER_CALLED)
    _, told = _routed_over_called(bench, ", slow links", SLOW_MBIT)
    yield Row(f"- at {SLOW_MBIT:g} Mbit/s, where the cores have {MBIT / SLOW_MBIT:g} times as long", told)
    traffic = bench.seen["routed, bytes received and sent"]
    shares = [sum(each[0]) / mean(map(sum, each)) for each in traffic]
    name = "- traffic of the peer that can be called / the mean"
    yield Row(name, f"{median(shares):.2f}", f"{MAX_OF_MEAN}", median(shares) <= MAX_OF_MEAN)


def _routed_over_called(bench: Bench, name: str, mbit: float) -> tuple[float, str]:
    """Return the ratio of rounds of peers behind routers and of peers that can be called, and both times in words."""
    links = dict.fromkeys(range(SWARM), mbit)
    with _bed(SWARM, {}, mbit) as bed:
        called, _ = bench.swarm_rounds(f"all called{name}", bed, SWARM, MODEL, uplinks=links)
    with _bed(SWARM, dict.fromkeys(range(CALLED, SWARM), "port_restricted"), mbit) as bed:
        routed, _ = bench.swarm_rounds(f"routed{name}", bed, SWARM, MODEL, uplinks=links)
    ratio = seconds_of(routed) / seconds_of(called)
    return ratio, f"{ratio:.2f} ({seconds_of(routed):.2f} s, {seconds_of(called):.2f} s)"


def unmet_rounds(bench: Bench) -> Iterator[Row]:
    """Yield rounds of peers whose routers do not let them meet, who look for each other, against some who do not."""
    links = dict.fromkeys(range(SWARM), MBIT)
    routers: dict[int, Router] = dict.fromkeys(range(CALLED, SWARM), "symmetric")
    with _bed(SWARM, routers) as bed, mock.patch.object(Links, "seek", lambda *_: None):
        content, _ = bench.swarm_rounds("not looking", bed, SWARM, QUARTER, uplinks=links)
    with _bed(SWARM, routers) as bed:
        looking, _ = bench.swarm_rounds("looking in vain", bed, SWARM, QUARTER, uplinks=links)
    ratio = seconds_of(looking) / seconds_of(content)
    routed = f"{ROUTED} of {SWARM} behind symmetric routers"
    name = f"round with a quarter of the model, {routed}: peers that seek a direct link in vain / peers that seek none"
    told = f"{ratio:.2f} ({seconds_of(looking):.2f} s, {seconds_of(content):.2f} s)"
    yield Row(name, told, f"{MAX_UNMET}", ratio <= MAX_UNMET)


def introducer_killed(bench: Bench) -> Iterator[Row]:
    """Yield the round after the death of the peer over which the others have joined and met."""
    peers, links = SWARM, dict.fromkeys(range(SWARM), MBIT)
    routers: dict[int, Router] = dict.fromkeys(range(2, peers), "port_restricted")
    with (
        _bed(peers, routers) as bed,
        SwarmCluster(bed, bench.folder_of("killed"), peers, MODEL, uplinks=links) as cluster,
    ):
        before = cluster.round()
        cluster.kill(0)
        after = cluster.round()
    told = f"goes on: {before.seconds:.2f} s, then {after.seconds:.2f} s"
    yield Row("round after the founder, one of two that can be called, is killed", told, "goes on", True)


def punched_speed(bench: Bench) -> Iterator[Row]:
    """Yield the speed of bytes over QUIC on loopback, and over a link through two routers, and their cost."""
    goal = f"{MIN_MB_PER_SECOND:g} MB/s"
    with RoutedPeers(Loopback(), bench.folder_of("loopback"), 1, 1, host="0.0.0.0") as peers:
        rate, cost = _sent(bench, "loopback", peers.members, peers.ids[0])
    yield Row("bytes over QUIC on loopback", f"{rate:.0f} MB/s", goal, rate >= MIN_MB_PER_SECOND)
    name = "- processor seconds per GB, of the side that takes more"
    yield Row(name, f"{cost:.1f}", f"{MAX_CPU_PER_GB:g}", cost <= MAX_CPU_PER_GB)
    with (
        bed_of(1, ["port_restricted"] * 2, rtt_ms=0.1, mbit=FAST_MBIT) as bed,
        RoutedPeers(bed, bench.folder_of("speed"), 1, 2) as peers,
    ):
        peers.seek(SEEK_SECONDS)
        rate, cost = _sent(bench, "punched", peers.routed, peers.routed_ids[0])
    yield Row("- through two routers and the emulator, on the same cores", f"{rate:.0f} MB/s; {cost:.1f} s per GB")


def _sent(bench: Bench, name: str, both: Sequence[Actor], receiver: str) -> tuple[float, float]:
    """Send the first peer bytes from the last; return MB/s, and processor seconds per GB of the costlier side."""
    rates, costs = [], []
    for _ in range(bench.repeats):
        before = [peer.cpu_seconds() for peer in both]
        took = both[-1].call("send", receiver, SENT_BYTES, seconds=CALL_SECONDS)
        used = [peer.cpu_seconds() - then for peer, then in zip(both, before, strict=True)]
        rates.append(SENT_BYTES / 1e6 / took)
        costs.append(max(used) / (SENT_BYTES / 1e9))
        bench.note(f"{name}: MB/s, CPU seconds of both", [rates[-1], used])
    return median(rates), median(costs)


def hostile_introducers(bench: Bench) -> Iterator[Row]:
    """Yield what a third machine receives because of an introducer that lies, and what a flood of questions costs."""
    for num_honest in (1, 0):
        received = _bytes_by_lies(bench, num_honest)
        bench.note(f"bytes at a third machine, {num_honest} honest introducers beside the liar", received)
        name = f"third machine, after {LIES} lies of an introducer" if num_honest else "- the liar is the only one"
        told = f"{received / 1000:.0f} kB"
        yield Row(f"{name}, an honest one beside it" if num_honest else name, told, "none", received == 0)
    with (
        bed_of(1, ["symmetric"] * 2, rtt_ms=1.0) as bed,
        RoutedPeers(bed, bench.folder_of("flood"), 1, 2) as peers,
    ):
        seconds = {"seconds": 4 * CALL_SECONDS}
        memory = [peers.members[0].call("memory", **seconds)]
        answered = 0
        for _ in range(2):
            answered += peers.routed[0].call("flood", peers.ids[0], peers.routed_ids[1], QUESTIONS, **seconds)
            memory.append(peers.members[0].call("memory", **seconds))
    first, again = ((after - before) / MIB for before, after in itertools.pairwise(memory))
    name = f"introducer's memory after {QUESTIONS} questions of one peer"
    told = f"+{first:.1f} MiB, most of it p2pd's heap; {again:+.1f} after as many again; {answered} answered"
    yield Row(name, told, f"{MAX_MEMORY_MIB:g} MiB", first <= MAX_MEMORY_MIB)


def _bytes_by_lies(bench: Bench, num_honest: int) -> int:
    """Return what a machine receives that an introducer says another peer was at."""
    called = num_honest + 1
    third = called + 2
    routers: dict[int, Router] = dict.fromkeys((called, called + 1), "symmetric")  # these two never meet
    with _bed(third + 1, routers) as bed, RoutedPeers(bed, bench.folder_of(f"liar-{num_honest}"), called, 2) as peers:
        peers.seek(1.0)
        before = bed.bytes()[third]
        target, about = peers.routed_ids
        peers.members[0].call("lie", target, about, bed.address(third), LIES, seconds=4 * CALL_SECONDS)
        time.sleep(SEEK_SECONDS)
        return (bed.bytes()[third] - before).received


def _bed(peers: int, routers: dict[int, Router], mbit: float = MBIT) -> TestBed:
    return TestBed(peers, mbit=mbit, rtt_ms=RTT_MS, routers=routers)
