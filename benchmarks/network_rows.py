"""The network benchmark's measurements: each makes its own bed, and yields rows of the table.

Sizes are in MiB throughout, rates of links in 10^6 bits per second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from statistics import mean, median
from threading import Event
from typing import Any, Literal

from benchmarks.star import StarCluster
from benchmarks.stock_averaging import StockCluster
from benchmarks.tables import Row
from benchmarks.testbed import TestBed
from benchmarks.wan import floors
from benchmarks.wan.actor import Actor, close_all, finish_all
from benchmarks.wan.default_run import account_of_default_run
from benchmarks.wan.floors import MIB, Payload
from benchmarks.wan.raw_tcp import all_to_all_seconds
from benchmarks.wan.swarm_cluster import ClusterRound, SwarmCluster
from benchmarks.wan.swarm_peer import CALL_SECONDS
from spes_p2p.config import CodecConfig
from spes_p2p.planner.size import element_bytes

MODEL = Payload(shared_mib=20, slot_mib=4, slots=16)
QUARTER = Payload(shared_mib=5, slot_mib=1, slots=16)
PEERS, MBIT, RTT_MS = 4, 100.0, 40.0
MANY_PEERS, NARROW_MBIT = 16, 25.0
SLOW_MBIT = 20.0
JOINERS = 8
TRAINING_SECONDS, HEAD_START_SECONDS = 20.0, 5.0
"""Between rounds, in which peers would train, and at the end of that for newcomers."""
MAX_OVER_FLOOR, MAX_OVER_STOCK = 1.45, 0.6
MAX_SECONDS: dict[Literal["int8", "int4"], float] = {"int8": 2.5, "int4": 1.8}
MAX_GROWTH, MAX_OVER_SLOW_FLOOR, MAX_DISTURBANCE = 1.35, 1.6, 0.05
OVERLAPPED_SLOTS, MAX_NOT_TRAINING = 8, 0.05


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
    ) -> tuple[list[ClusterRound], float]:
        """Run a cluster's rounds; each peer states an uplink of `mbit`, or as in `uplinks`."""
        told = (dict.fromkeys(range(peers), mbit) if mbit else {}) | (uplinks or {})
        with SwarmCluster(bed, self.folder_of(name), peers, payload, codecs=codecs, uplinks=told) as cluster:
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
        yield Row("- matchmaking, apart", f"{median(each.matchmaking_seconds for each in ours):.2f} s")
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
    """Yield the round with deltas in few bits."""
    for codec, limit in MAX_SECONDS.items():
        payload = replace(MODEL, bits=8 * element_bytes(codec))
        with bench.bed(PEERS) as bed:
            ours, sent = bench.swarm_rounds(codec, bed, PEERS, MODEL, codecs=CodecConfig(shared=codec, slots=codec))
        floor = floors.round_seconds(payload, PEERS, MBIT)
        yield Row(f"- the same, deltas in {codec}", _told(ours, floor), f"{limit} s", seconds_of(ours) <= limit)
        yield Row("  - matchmaking, apart", f"{median(each.matchmaking_seconds for each in ours):.2f} s")
        yield _sent_row(codec, sent, floors.round_bytes(payload, PEERS))


def scaling(bench: Bench) -> Iterator[Row]:
    """Yield the round among many peers against that among few."""
    seconds, least = {}, {}
    for peers in (PEERS, MANY_PEERS):
        with bench.bed(peers, NARROW_MBIT) as bed:
            ours, _ = bench.swarm_rounds(f"{peers} peers", bed, peers, QUARTER, mbit=NARROW_MBIT)
        seconds[peers], least[peers] = seconds_of(ours), floors.round_seconds(QUARTER, peers, NARROW_MBIT)
        yield Row(f"round, {peers} peers, {NARROW_MBIT:g} Mbit/s, a quarter of the model", _told(ours, least[peers]))
        yield Row("- matchmaking, apart", f"{median(each.matchmaking_seconds for each in ours):.2f} s")
    ratio, least_ratio = (values[MANY_PEERS] / values[PEERS] for values in (seconds, least))
    few, many = (floors.server_seconds(QUARTER, peers, NARROW_MBIT) for peers in (PEERS, MANY_PEERS))
    told = f"{ratio:.2f} (floors {least_ratio:.2f}, a server's {many / few:.1f})"
    yield Row(f"- {MANY_PEERS} peers / {PEERS} peers", told, f"{MAX_GROWTH}", ratio <= MAX_GROWTH)


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


def overlapped(bench: Bench) -> Iterator[Row]:
    """Yield the share of wall time in which the default run does not train, with its rounds overlapped."""
    with bench.bed(PEERS + 1) as bed:  # the monitor's link equals the peers'
        told = account_of_default_run(
            bed,
            bench.folder_of("overlapped"),
            peers=PEERS,
            slots=OVERLAPPED_SLOTS,
            settings=["--run.round.overlap=1"],
        )
    bench.note("overlapped", told)
    background = sum(told.shares[phase] for phase in ("matchmaking", "averaging", "exchange"))
    yield Row(
        f"default run, {MBIT:g} Mbit/s, {RTT_MS:g} ms, overlap of 1 step: wall time not training",
        f"{told.not_training:.1%}; {background:.1%} of wall time waiting for synchronisation",
        f"{MAX_NOT_TRAINING:.0%}",
        told.not_training <= MAX_NOT_TRAINING,
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
