"""A round on real links: its time over the least time that the links allow.

    .venv/bin/python benchmarks/network.py [--only rounds low_bits ...] [--repeats 3] [--write]

Real peers, each in a network namespace of its own, with an emulated internet between them (`testbed.py`). The time from
the standing roster to the last pulled slot, verified and stored, counts; meeting and decision are shown apart. Medians
of some rounds after one to warm up. The floors are those of `wan/floors.py`. Sizes are in MiB, rates of links in 10^6
bits per second.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from threading import Event
from typing import Literal

import torch

from benchmarks.records import measure_parts
from benchmarks.tables import Row
from benchmarks.testbed import TestBed, available
from benchmarks.wan import floors
from benchmarks.wan.actor import Actor, close_all, finish_all
from benchmarks.wan.floors import Payload
from benchmarks.wan.swarm_peers import CALL_SECONDS, ClusterRound, SwarmCluster
from spes_p2p.cli import entry_point
from spes_p2p.codecs.kept import KeptForm
from spes_p2p.config import CodecConfig, CommandConfig, LogLevel, PositiveInt, Storage
from spes_p2p.errors import ConfigError
from spes_p2p.planner.size import element_bytes

MODEL = Payload(shared_mib=20, slot_mib=4, slots=16)
QUARTER = Payload(shared_mib=5, slot_mib=1, slots=16)
PEERS, MBIT, RTT_MS = 4, 100.0, 40.0
MANY_PEERS, NARROW_MBIT, JOINERS = 16, 25.0, 8
TRAINING_SECONDS, HEAD_START_SECONDS = 20.0, 5.0
"""Between rounds, in which peers would train, and at the end of that for newcomers."""
LOW_BITS: Mapping[Literal["int8", "int4"], tuple[Storage, float]] = {"int8": ("int8", 1.5), "int4": ("nf4", 1.8)}
"""By codec of the deltas, how peers keep the others' slots, and the goal."""
MAX_OVER_FLOOR, MAX_GROWTH, MAX_DISTURBANCE = 1.25, 1.6, 0.05
Part = Literal["rounds", "low_bits", "scaling", "joiners"]


class NetworkConfig(CommandConfig):
    """Rounds on an emulated internet."""

    only: list[Part] = []
    """Parts of the table to measure; by default all."""
    repeats: PositiveInt = 3
    """Rounds counted of each."""
    write: bool = False
    """Keep the rows in benchmarks/results/network.json and .md."""
    log_level: LogLevel = "warning"


@dataclass
class Bench:
    """A folder for the peers' files, and the rounds to count."""

    folder: Path
    repeats: int

    def rounds(
        self,
        bed: TestBed,
        peers: int,
        payload: Payload = MODEL,
        *,
        uplinks: Mapping[int, float] | None,
        codecs: CodecConfig | None = None,
        kept: KeptForm | None = None,
    ) -> list[ClusterRound]:
        """Make a round to warm up and those that count, of peers that state their uplinks."""
        folder, told = Path(tempfile.mkdtemp(dir=self.folder)), dict(uplinks or {})
        with SwarmCluster(bed, folder, peers, payload, codecs=codecs, kept=kept, uplinks=told) as cluster:
            return [cluster.round() for _ in range(self.repeats + 1)][1:]


def links(peers: int, mbit: float = MBIT) -> dict[int, float]:
    """Return equal uplinks."""
    return dict.fromkeys(range(peers), mbit)


def rounds(bench: Bench) -> Iterator[Row]:
    """Yield the round in fp32."""
    floor = floors.round_seconds(MODEL, PEERS, MBIT)
    with TestBed(PEERS, mbit=MBIT, rtt_ms=RTT_MS) as bed:
        ours = bench.rounds(bed, PEERS, uplinks=links(PEERS))
        silent = bench.rounds(bed, PEERS, uplinks=None)
    what = f"round, {PEERS} peers, {MBIT:g} Mbit/s, {RTT_MS:g} ms, fp32: averaging + exchange"
    yield _row(what, ours, floor, MAX_OVER_FLOOR)
    yield _meeting(ours)
    yield _row("- the same, of peers without `--uplink-mbit`", silent, floor)
    yield Row("- the least time with a server on such a link", f"{floors.server_seconds(MODEL, PEERS, MBIT):.2f} s")


def low_bits(bench: Bench) -> Iterator[Row]:
    """Yield the round with deltas and the others' slots in few bits."""
    for codec, (storage, limit) in LOW_BITS.items():
        kept = KeptForm(storage, MODEL.slot_numel)
        payload = replace(MODEL, bits=8 * element_bytes(codec), slot_bits=8 * kept.num_bytes / kept.numel)
        codecs = CodecConfig(shared=codec, slots=codec)
        with TestBed(PEERS, mbit=MBIT, rtt_ms=RTT_MS) as bed:
            ours = bench.rounds(bed, PEERS, uplinks=links(PEERS), codecs=codecs, kept=kept)
        what = f"- the same, deltas in {codec}, others' slots in {storage}"
        yield _row(what, ours, floors.round_seconds(payload, PEERS, MBIT), limit)
        yield _meeting(ours)


def scaling(bench: Bench) -> Iterator[Row]:
    """Yield the round among many peers over that among few."""
    seconds, least = {}, {}
    for peers in (PEERS, MANY_PEERS):
        with TestBed(peers, mbit=NARROW_MBIT, rtt_ms=RTT_MS) as bed:
            ours = bench.rounds(bed, peers, QUARTER, uplinks=links(peers, NARROW_MBIT))
        seconds[peers], least[peers] = seconds_of(ours), floors.round_seconds(QUARTER, peers, NARROW_MBIT)
        yield _row(f"round, {peers} peers, {NARROW_MBIT:g} Mbit/s, a quarter of the model", ours, least[peers])
        yield _meeting(ours)
    ratio, least_ratio = (values[MANY_PEERS] / values[PEERS] for values in (seconds, least))
    what = f"- {MANY_PEERS} peers / {PEERS} peers"
    yield Row(what, f"{ratio:.2f} (floors {least_ratio:.2f})")
    ratio /= least_ratio
    yield Row(f"{what}, at equal bytes", f"{ratio:.2f}", f"{MAX_GROWTH}", ratio <= MAX_GROWTH)


def joiners(bench: Bench) -> Iterator[Row]:
    """Yield the effect of newcomers that fetch everything at once on the round of the training peers."""
    with ExitStack() as closing:
        bed = closing.enter_context(TestBed(PEERS + JOINERS, mbit=MBIT, rtt_ms=RTT_MS))
        cluster = closing.enter_context(SwarmCluster(bed, bench.folder, PEERS, MODEL, uplinks=links(PEERS)))
        newcomers: list[Actor] = []
        closing.callback(close_all, newcomers)
        newcomers += [cluster.start_joiner(PEERS + number) for number in range(JOINERS)]
        for newcomer in newcomers:
            newcomer.ready()
        cluster.round()
        quiet, disturbed, last = [], [], []
        for _ in range(bench.repeats):
            Event().wait(TRAINING_SECONDS)
            quiet.append(cluster.round())
            Event().wait(TRAINING_SECONDS - HEAD_START_SECONDS)
            for newcomer in newcomers:  # so early that all are downloading when the round begins
                newcomer.begin("catch_up", cluster.names, cluster.ids, cluster.number)
            Event().wait(HEAD_START_SECONDS)
            cluster.begin_round()
            disturbed.append(cluster.finish_round())
            last.append(max(finish_all(newcomers, CALL_SECONDS)))
    pairs = list(zip(quiet, disturbed, strict=True))
    slower = median(after.seconds / before.seconds - 1 for before, after in pairs)
    busier = median(after.cpu_seconds / before.cpu_seconds - 1 for before, after in pairs)
    told = f"{slower:+.0%} (medians: undisturbed {seconds_of(quiet):.2f} s, disturbed {seconds_of(disturbed):.2f} s)"
    goal = f"+{MAX_DISTURBANCE:.0%} or less"
    what = f"round while {JOINERS} joiners fetch everything, / undisturbed, median of pairs"
    yield Row(what, told, goal, slower <= MAX_DISTURBANCE)
    yield Row("- CPU seconds of the training peers", f"{busier:+.0%}", goal, busier <= MAX_DISTURBANCE)
    yield Row("- the last joiner has everything after", f"{median(last):.1f} s")


def seconds_of(rounds: Sequence[ClusterRound]) -> float:
    """Return the median time of rounds."""
    return median(each.seconds for each in rounds)


def _row(what: str, rounds: Sequence[ClusterRound], floor: float, limit: float | None = None) -> Row:
    seconds, averaging = [each.seconds for each in rounds], median(each.averaging_seconds for each in rounds)
    spread = f"{median(seconds):.2f} s ({min(seconds):.2f}-{max(seconds):.2f})"
    told = f"{spread}, {median(seconds) / floor:.2f} x {floor:.2f} s; {averaging:.2f} s of it averaging"
    if limit is None:
        return Row(what, told)
    return Row(what, told, f"{limit} x floor of {floor:.2f} s", median(seconds) <= limit * floor)


def _meeting(rounds: Sequence[ClusterRound]) -> Row:
    return Row("- meeting and decision, apart", f"{median(each.matchmaking_seconds for each in rounds):.2f} s")


PARTS: Mapping[str, Callable[[Bench], Iterator[Row]]] = {
    each.__name__: each for each in (rounds, low_bits, scaling, joiners)
}


def main(config: NetworkConfig) -> int:
    """Measure and print; return 1 if a goal was missed."""
    if reason := available():
        raise ConfigError(f"no test bed on this machine: {reason}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="network-") as folder:
        bench = Bench(Path(folder), config.repeats)
        parts = {name: partial(part, bench) for name, part in PARTS.items()}
        return measure_parts("network", parts, config.only, config.write)


if __name__ == "__main__":
    entry_point(NetworkConfig, main)
