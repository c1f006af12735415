"""The network benchmark's measurements: each makes the bed that it needs, and yields rows of the table.

Sizes are in MiB throughout, rates of links in 10^6 bits per second.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from statistics import mean, median
from threading import Event
from typing import Any, Literal
from unittest import mock

from benchmarks.peer import loss_rows
from benchmarks.routers import Router
from benchmarks.star import StarCluster
from benchmarks.stock_averaging import StockCluster
from benchmarks.tables import Row
from benchmarks.testbed import Loopback, TestBed
from benchmarks.wan import floors
from benchmarks.wan.actor import Actor, close_all, finish_all
from benchmarks.wan.floors import MIB, Payload
from benchmarks.wan.raw_tcp import all_to_all_seconds
from benchmarks.wan.routed_peer import CALL_SECONDS as ROUTED_CALL_SECONDS
from benchmarks.wan.routed_peer import RoutedPeers, bed_of
from benchmarks.wan.swarm_cluster import ClusterRound, SwarmCluster
from benchmarks.wan.swarm_peer import CALL_SECONDS, start_peer
from spes_p2p.codecs.kept import KeptForm
from spes_p2p.config import CodecConfig, MachineConfig, RunConfig, Storage
from spes_p2p.config_file import read_settings
from spes_p2p.planner.memory import Setup
from spes_p2p.planner.size import element_bytes, model_size
from spes_p2p.planner.traffic import round_traffic
from spes_p2p.swarm.p2p import node
from spes_p2p.swarm.p2p.introductions import Links
from spes_p2p.swarm.p2p.rate_limit import PAYLOAD_SHARE

MODEL = Payload(shared_mib=20, slot_mib=4, slots=16)
QUARTER = Payload(shared_mib=5, slot_mib=1, slots=16)
PEERS, MBIT, RTT_MS = 4, 100.0, 40.0
MANY_PEERS, NARROW_MBIT = 16, 25.0
SLOW_MBIT = 20.0
JOINERS = 8
TRAINING_SECONDS, HEAD_START_SECONDS = 20.0, 5.0
"""Between rounds, in which peers would train, and at the end of that for newcomers."""
MAX_OVER_FLOOR, MAX_OVER_STOCK = 1.25, 0.6
LOW_BITS: dict[Literal["int8", "int4"], tuple[Storage, float]] = {"int8": ("int8", 1.5), "int4": ("nf4", 1.8)}
"""By codec of the deltas, how peers keep the others' slots, and a round's time over its floor."""
MAX_GROWTH, MAX_OVER_SLOW_FLOOR, MAX_DISTURBANCE = 1.6, 1.6, 0.05
LOOPBACK_SLOTS = 64
MIN_LOOPBACK_MB, PACED_MB, MAX_CORES = 150.0, 152.0, 1.0
SEVEN_B = Path("configs/spes_7b.yaml")
SWEEP, SWEEP_RESULTS = Path("configs/low_bits.yaml"), Path("benchmarks/results/low_bits")
PLANNED_SLOTS = 8
MAX_SHARE, MAX_WORSE = 1 / 7, 0.5
KINDS: tuple[Router, ...] = ("full_cone", "restricted", "port_restricted", "symmetric")
UNMET = {("port_restricted", "symmetric"), ("symmetric", "symmetric")}
TRIES, SEEK_SECONDS, MEETING_SECONDS = 20, 8.0, 2.0
CALLED, ROUTED = 1, 5
SWARM = CALLED + ROUTED
MAX_OVER_CALLED, MAX_OF_MEAN, MAX_QUIC_OVER_TCP, MAX_UNMET = 1.3, 1.5, 1.05, 1.05
SLOW_ROUTED_MBIT = 25.0
FAST_MBIT, SENT_BYTES = 20_000.0, 256 * MIB
MIN_MB_PER_SECOND, MAX_CPU_PER_GB = 150.0, 5.0
LIES, QUESTIONS, MAX_MEMORY_MIB = 200, 5000, 16.0


@dataclass
class Bench:
    """What all measurements share.

    Attributes:
        folder: For the peers' files.
        repeats: Rounds counted.
        congestion: TCP's congestion control.
        seen: Every round measured, by what was measured, for the record.
    """

    folder: Path
    repeats: int
    congestion: str
    seen: dict[str, list[Any]] = field(default_factory=dict)

    def bed(self, peers: int, mbit: float = MBIT, uplinks: dict[int, float] | None = None) -> TestBed:
        """Return a bed of equal links, but for `uplinks`."""
        return TestBed(peers, mbit=mbit, rtt_ms=RTT_MS, uplinks=uplinks, congestion=self.congestion)

    def note(self, name: str, value: Any) -> None:
        """Keep a round for the record."""
        is_record = is_dataclass(value) and not isinstance(value, type)
        self.seen.setdefault(name, []).append(asdict(value) if is_record else value)

    def folder_of(self, name: str) -> Path:
        """Return a fresh folder."""
        return self.folder / name

    def repeat(self, name: str, bed: TestBed, peers: int, round: Callable[[], Any]) -> tuple[list[Any], float]:
        """Make a round to warm up and those that count; return these, and the MiB sent per peer and round."""
        round()
        rounds, sent = [], []
        for _ in range(self.repeats):
            before = bed.bytes()
            rounds.append(round())
            traffic = [after - earlier for after, earlier in zip(bed.bytes(), before, strict=True)]
            sent.append(mean(each.sent for each in traffic[:peers]) / MIB)
            self.note(name, rounds[-1])
            self.note(f"{name}, bytes received and sent", traffic)
        return rounds, median(sent)

    def swarm_rounds(
        self,
        name: str,
        bed: TestBed,
        peers: int,
        payload: Payload,
        *,
        mbit: float | None = MBIT,
        uplinks: dict[int, float] | None = None,
        codecs: CodecConfig | None = None,
        kept: KeptForm | None = None,
    ) -> tuple[list[ClusterRound], float]:
        """Run a cluster's rounds; each peer states an uplink of `mbit`, or as in `uplinks`."""
        told = (dict.fromkeys(range(peers), mbit) if mbit else {}) | (uplinks or {})
        with SwarmCluster(bed, self.folder_of(name), peers, payload, codecs=codecs, kept=kept, uplinks=told) as cluster:
            return self.repeat(name, bed, peers, cluster.round)


def rounds(bench: Bench) -> Iterator[Row]:
    """Yield the round in fp32, beside plain TCP and both baselines."""
    link = f"{PEERS} peers, {MBIT:g} Mbit/s, {RTT_MS:g} ms"
    floor = floors.round_seconds(MODEL, PEERS, MBIT)
    least = floors.round_bytes(MODEL, PEERS)
    with bench.bed(PEERS + 1) as bed:  # the server's link equals the peers'
        ours, sent = bench.swarm_rounds("fp32", bed, PEERS, MODEL)
        seconds = seconds_of(ours)
        is_reached = seconds <= MAX_OVER_FLOOR * floor
        goal = f"{MAX_OVER_FLOOR} x floor of {floor:.2f} s"
        yield Row(f"round, {link}, fp32: averaging + exchange", _told(ours, floor), goal, is_reached)
        yield Row("- meeting and decision, apart", f"{median(each.matchmaking_seconds for each in ours):.2f} s")
        silent, _ = bench.swarm_rounds("fp32, links not told", bed, PEERS, MODEL, mbit=None)
        yield Row("- the same, of peers without `--uplink-mbit`", _told(silent, floor))
        raw = [all_to_all_seconds(bed, PEERS, least) for _ in range(bench.repeats)]
        bench.note("plain TCP", raw)
        yield Row("- plain TCP, the same bytes all to all", f"{_spread(raw)}; ours / it {seconds / median(raw):.2f}")
        with StockCluster(bed, PEERS, MODEL) as stock_cluster:
            stock, stock_sent = bench.repeat("stock", bed, PEERS, stock_cluster.round)
        stock_floor = floors.full_averaging_seconds(MODEL, PEERS, MBIT)
        yield Row("- hivemind's averaging of everything", _over(stock, stock_floor))
        ratio = seconds / median(stock)
        yield Row("- ours / hivemind's", f"{ratio:.2f}", f"{MAX_OVER_STOCK}", ratio <= MAX_OVER_STOCK)
        with StarCluster(bed, PEERS, MODEL) as star_cluster:
            star, star_sent = bench.repeat("server", bed, PEERS, star_cluster.round)
    yield Row("- a server as SPES has it", _over(star, floors.server_seconds(MODEL, PEERS, MBIT)))
    yield Row("- ours / the server's", f"{seconds / median(star):.2f}")
    yield _sent_row("fp32", sent, least)
    yield _sent_row("hivemind's averaging of everything", stock_sent, floors.full_averaging_bytes(MODEL, PEERS))
    up = MODEL.shared_bytes + MODEL.slots_bytes / PEERS
    of_server = floors.server_bytes(MODEL, PEERS)[1] / MIB
    yield _sent_row(f"a server, which itself sends {of_server:.0f}", star_sent, up)


def low_bits(bench: Bench) -> Iterator[Row]:
    """Yield the round with deltas and the others' slots in few bits."""
    for codec, (storage, limit) in LOW_BITS.items():
        kept = KeptForm(storage, MODEL.slot_numel)
        payload = replace(MODEL, bits=8 * element_bytes(codec), slot_bits=8 * kept.num_bytes / kept.numel)
        floor, least = floors.round_seconds(payload, PEERS, MBIT), floors.round_bytes(payload, PEERS)
        with bench.bed(PEERS) as bed:
            codecs = CodecConfig(shared=codec, slots=codec)
            ours, sent = bench.swarm_rounds(codec, bed, PEERS, MODEL, codecs=codecs, kept=kept)
            raw = [all_to_all_seconds(bed, PEERS, least) for _ in range(bench.repeats)]
        bench.note(f"plain TCP, {codec}", raw)
        seconds = seconds_of(ours)
        what, goal = f"- the same, deltas in {codec}, others' slots in {storage}", f"{limit} x floor of {floor:.2f} s"
        yield Row(what, _told(ours, floor), goal, seconds <= limit * floor)
        yield Row("  - meeting and decision, apart", f"{median(each.matchmaking_seconds for each in ours):.2f} s")
        yield Row("  - plain TCP, the same bytes all to all", f"{_spread(raw)}; ours / it {seconds / median(raw):.2f}")
        yield _sent_row(codec, sent, least)


def scaling(bench: Bench) -> Iterator[Row]:
    """Yield the round among many peers against that among few."""
    seconds, least = {}, {}
    for peers in (PEERS, MANY_PEERS):
        with bench.bed(peers, NARROW_MBIT) as bed:
            ours, _ = bench.swarm_rounds(f"{peers} peers", bed, peers, QUARTER, mbit=NARROW_MBIT)
        seconds[peers], least[peers] = seconds_of(ours), floors.round_seconds(QUARTER, peers, NARROW_MBIT)
        yield Row(f"round, {peers} peers, {NARROW_MBIT:g} Mbit/s, a quarter of the model", _told(ours, least[peers]))
        yield Row("- meeting and decision, apart", f"{median(each.matchmaking_seconds for each in ours):.2f} s")
    ratio, least_ratio = (values[MANY_PEERS] / values[PEERS] for values in (seconds, least))
    few, many = (floors.server_seconds(QUARTER, peers, NARROW_MBIT) for peers in (PEERS, MANY_PEERS))
    what, per_byte = f"- {MANY_PEERS} peers / {PEERS} peers", ratio / least_ratio
    yield Row(what, f"{ratio:.2f} (floors {least_ratio:.2f}, a server's {many / few:.1f})")
    yield Row(f"{what}, at equal bytes", f"{per_byte:.2f}", f"{MAX_GROWTH}", per_byte <= MAX_GROWTH)


def slow_uplink(bench: Bench) -> Iterator[Row]:
    """Yield the round in which one peer sends a fifth of what the others do, and says so."""
    slow = {PEERS - 1: SLOW_MBIT}
    floor = floors.unequal_seconds(MODEL, [slow.get(peer, MBIT) for peer in range(PEERS)], MBIT)
    with bench.bed(PEERS, uplinks=slow) as bed:
        ours, _ = bench.swarm_rounds("slow uplink", bed, PEERS, MODEL, uplinks=slow)
    yield Row(
        f"round, one of {PEERS} peers with {SLOW_MBIT:g} Mbit/s up, fp32",
        _told(ours, floor),
        f"{MAX_OVER_SLOW_FLOOR} x floor of {floor:.2f} s",
        seconds_of(ours) <= MAX_OVER_SLOW_FLOOR * floor,
    )


def joiners(bench: Bench) -> Iterator[Row]:
    """Yield the effect of newcomers that fetch everything at once on the round of the training peers."""
    with ExitStack() as closing:
        bed = closing.enter_context(bench.bed(PEERS + JOINERS))
        links = dict.fromkeys(range(PEERS), MBIT)
        cluster = closing.enter_context(SwarmCluster(bed, bench.folder_of("joiners"), PEERS, MODEL, uplinks=links))
        newcomers: list[Actor] = []
        closing.callback(close_all, newcomers)
        newcomers += [cluster.start_joiner(PEERS + number) for number in range(JOINERS)]
        for newcomer in newcomers:
            newcomer.ready()
        cluster.round()
        pairs = []
        for _ in range(bench.repeats):
            pairs.append((_round_after_training(cluster), *_disturbed_round(cluster, newcomers)))
            bench.note("quiet, disturbed, seconds of each joiner", [*map(asdict, pairs[-1][:2]), pairs[-1][2]])
    quiet, disturbed = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    slower = median(after.seconds / before.seconds - 1 for before, after in zip(quiet, disturbed, strict=True))
    busier = median(after.cpu_seconds / before.cpu_seconds - 1 for before, after in zip(quiet, disturbed, strict=True))
    told = f"{slower:+.0%} (medians: undisturbed {seconds_of(quiet):.2f} s, disturbed {seconds_of(disturbed):.2f} s)"
    goal = f"+{MAX_DISTURBANCE:.0%} or less"
    what = f"round while {JOINERS} joiners fetch everything, / undisturbed, median of pairs"
    yield Row(what, told, goal, slower <= MAX_DISTURBANCE)
    yield Row("- CPU seconds of the training peers", f"{busier:+.0%}", goal, busier <= MAX_DISTURBANCE)
    yield Row("- the last joiner has everything after", f"{median(max(pair[2]) for pair in pairs):.1f} s")


def _round_after_training(cluster: SwarmCluster) -> ClusterRound:
    Event().wait(TRAINING_SECONDS)
    return cluster.round()


def _disturbed_round(cluster: SwarmCluster, newcomers: Sequence[Actor]) -> tuple[ClusterRound, list[float]]:
    """Start newcomers so early that all are downloading when the round begins."""
    Event().wait(TRAINING_SECONDS - HEAD_START_SECONDS)
    for newcomer in newcomers:
        newcomer.begin("catch_up", cluster.names, cluster.ids, cluster.number)
    Event().wait(HEAD_START_SECONDS)
    cluster.begin_round()
    return cluster.finish_round(), finish_all(newcomers, CALL_SECONDS)


def loopback(bench: Bench) -> Iterator[Row]:
    """Yield how fast the exchange moves versions where no link holds it back, and what that computes."""
    rate, cores = _loopback_rate(bench, "loopback", None)
    what = f"exchange on loopback, one peer pulls {LOOPBACK_SLOTS * MODEL.slot_mib} MiB from another"
    yield Row(what, f"{rate:.0f} MB/s, {cores:.2f} cores", f"{MIN_LOOPBACK_MB:g} MB/s", rate >= MIN_LOOPBACK_MB)
    share, goal = cores * MIN_LOOPBACK_MB / rate, f"under {MAX_CORES:g}"
    what = f"- core seconds of both peers, all processes, for {MIN_LOOPBACK_MB:g} MB"
    yield Row(what, f"{share:.2f}", goal, share < MAX_CORES)
    rate, cores = _loopback_rate(bench, "loopback, paced", PACED_MB * 8 / PAYLOAD_SHARE)
    what = f"- cores, where the serving peer states an uplink just above {MIN_LOOPBACK_MB:g} MB/s"
    yield Row(what, f"{cores:.2f} at {rate:.0f} MB/s")


def _loopback_rate(bench: Bench, name: str, uplink_mbit: float | None) -> tuple[float, float]:
    """Return 10^6 bytes per second, and the cores that both peers take."""
    peers: list[Actor] = []
    names, megabytes = range(LOOPBACK_SLOTS), LOOPBACK_SLOTS * MODEL.slot_mib * MIB / 1e6
    found = []
    try:
        seed = start_peer(Loopback(), 0, bench.folder_of(name), MODEL, uplink_mbit=uplink_mbit)
        peers.append(seed.ready())
        peer_id, addresses = seed.call("introduce", seconds=CALL_SECONDS)
        peers.append(start_peer(Loopback(), 1, bench.folder_of(name), MODEL, initial_peers=addresses).ready())
        for number in range(1, bench.repeats + 2):
            seed.call("publish_fresh", number, names, seconds=CALL_SECONDS)
            before = sum(peer.cpu_seconds() for peer in peers)
            wanted = [f"slot-{slot}" for slot in names]
            seconds = peers[1].call("catch_up", wanted, [peer_id], number, seconds=CALL_SECONDS)
            found.append((megabytes / seconds, (sum(peer.cpu_seconds() for peer in peers) - before) / seconds))
            bench.note(f"{name}, MB/s and cores", found[-1])
    finally:
        close_all(peers)
    rate, cores = (median(values) for values in zip(*found[1:], strict=True))
    return rate, cores


def planned(bench: Bench) -> Iterator[Row]:
    """Yield the bytes of a round of the SPES paper's 7 B model, and what few bits cost a swarm's model."""
    run = RunConfig.model_validate(read_settings(SEVEN_B, "config")["run"])
    codecs = run.codecs.model_copy(update={"shared": "int4", "slots": "int4"})
    low_bits = run.model_copy(update={"codecs": codecs})
    size = model_size(run.model, run.data.vocab_size)
    ours = round_traffic(size, PLANNED_SLOTS, PEERS, Setup.of(low_bits, MachineConfig(), None)).total
    sent, received = 4 * size.trained_params(PLANNED_SLOTS), 4 * size.total_params
    what = f"SPES 7B, {PEERS} peers, int4, bytes of a peer's round / of a peer's with SPES's server in fp32"
    for way, share in (
        ("received", ours / received),
        ("sent and received", 2 * ours / (sent + received)),
    ):
        yield Row(f"{what}: {way}", f"1/{1 / share:.1f}", "1/7", share <= MAX_SHARE)
    name = "held-out loss after 300 steps, int4 deltas, int8 moments and frozen experts, instead of fp32 everywhere"
    yield from loss_rows(name, SWEEP, SWEEP_RESULTS, "low_bits", MAX_WORSE)


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
    _, told = _routed_over_called(bench, ", slow links", SLOW_ROUTED_MBIT)
    yield Row(f"- at {SLOW_ROUTED_MBIT:g} Mbit/s, where the cores have {MBIT / SLOW_ROUTED_MBIT:g} times as long", told)
    traffic = bench.seen["routed, bytes received and sent"]
    shares = [sum(each[0]) / mean(map(sum, each)) for each in traffic]
    name = "- traffic of the peer that can be called / the mean"
    yield Row(name, f"{median(shares):.2f}", f"{MAX_OF_MEAN}", median(shares) <= MAX_OF_MEAN)


def _routed_over_called(bench: Bench, name: str, mbit: float) -> tuple[float, str]:
    """Return the ratio of rounds of peers behind routers and of peers that can be called, and both times in words."""
    links = dict.fromkeys(range(SWARM), mbit)
    with _routed_bed(SWARM, {}, mbit) as bed:
        called, _ = bench.swarm_rounds(f"all called{name}", bed, SWARM, MODEL, uplinks=links)
    with _routed_bed(SWARM, dict.fromkeys(range(CALLED, SWARM), "port_restricted"), mbit) as bed:
        routed, _ = bench.swarm_rounds(f"routed{name}", bed, SWARM, MODEL, uplinks=links)
    ratio = seconds_of(routed) / seconds_of(called)
    return ratio, f"{ratio:.2f} ({seconds_of(routed):.2f} s, {seconds_of(called):.2f} s)"


def unmet_rounds(bench: Bench) -> Iterator[Row]:
    """Yield rounds of peers whose routers do not let them meet, who look for each other, against some who do not."""
    links = dict.fromkeys(range(SWARM), MBIT)
    routers: dict[int, Router] = dict.fromkeys(range(CALLED, SWARM), "symmetric")
    with _routed_bed(SWARM, routers) as bed, mock.patch.object(Links, "seek", lambda *_: None):
        content, _ = bench.swarm_rounds("not looking", bed, SWARM, QUARTER, uplinks=links)
    with _routed_bed(SWARM, routers) as bed:
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
        _routed_bed(peers, routers) as bed,
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
        rate, cost = _sent_over_quic(bench, "loopback", peers.members, peers.ids[0])
    yield Row("bytes over QUIC on loopback", f"{rate:.0f} MB/s", goal, rate >= MIN_MB_PER_SECOND)
    name = "- processor seconds per GB, of the side that takes more"
    yield Row(name, f"{cost:.1f}", f"{MAX_CPU_PER_GB:g}", cost <= MAX_CPU_PER_GB)
    with (
        bed_of(1, ["port_restricted"] * 2, rtt_ms=0.1, mbit=FAST_MBIT) as bed,
        RoutedPeers(bed, bench.folder_of("speed"), 1, 2) as peers,
    ):
        peers.seek(SEEK_SECONDS)
        rate, cost = _sent_over_quic(bench, "punched", peers.routed, peers.routed_ids[0])
    yield Row("- through two routers and the emulator, on the same cores", f"{rate:.0f} MB/s; {cost:.1f} s per GB")


def _sent_over_quic(bench: Bench, name: str, both: Sequence[Actor], receiver: str) -> tuple[float, float]:
    """Send the first peer bytes from the last; return MB/s, and processor seconds per GB of the costlier side."""
    rates, costs = [], []
    for _ in range(bench.repeats):
        before = [peer.cpu_seconds() for peer in both]
        took = both[-1].call("send", receiver, SENT_BYTES, seconds=ROUTED_CALL_SECONDS)
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
        seconds = {"seconds": 4 * ROUTED_CALL_SECONDS}
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
    with (
        _routed_bed(third + 1, routers) as bed,
        RoutedPeers(bed, bench.folder_of(f"liar-{num_honest}"), called, 2) as peers,
    ):
        peers.seek(1.0)
        before = bed.bytes()[third]
        target, about = peers.routed_ids
        peers.members[0].call("lie", target, about, bed.address(third), LIES, seconds=4 * ROUTED_CALL_SECONDS)
        time.sleep(SEEK_SECONDS)
        return (bed.bytes()[third] - before).received


def _routed_bed(peers: int, routers: dict[int, Router], mbit: float = MBIT) -> TestBed:
    return TestBed(peers, mbit=mbit, rtt_ms=RTT_MS, routers=routers)


# ---------------------------------------------------------------------- telling


def seconds_of(rounds: Sequence[ClusterRound]) -> float:
    return median(each.seconds for each in rounds)


def _told(rounds: Sequence[ClusterRound], floor: float) -> str:
    averaging = median(each.averaging_seconds for each in rounds)
    return f"{_over([each.seconds for each in rounds], floor)}; {averaging:.2f} s of it averaging"


def _over(seconds: Sequence[float], floor: float) -> str:
    return f"{_spread(seconds)}, {median(seconds) / floor:.2f} x {floor:.2f} s"


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} s ({min(seconds):.2f}-{max(seconds):.2f})"


def _sent_row(what: str, sent_mib: float, arithmetic: float) -> Row:
    told = f"{sent_mib:.1f}; calculated {arithmetic / MIB:.1f} ({sent_mib * MIB / arithmetic - 1:+.1%})"
    return Row(f"MiB sent per peer and round, {what}", told)
