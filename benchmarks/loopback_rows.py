"""The exchange between two peers on one machine: what it computes to move versions."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from benchmarks.network_rows import MODEL, Bench
from benchmarks.tables import Row
from benchmarks.testbed import Loopback
from benchmarks.wan.actor import Actor, close_all
from benchmarks.wan.floors import MIB
from benchmarks.wan.swarm_peer import CALL_SECONDS, start_peer
from spes_p2p.swarm.p2p.rate_limit import PAYLOAD_SHARE

LOOPBACK_SLOTS = 64
MIN_LOOPBACK_MB, PACED_MB, MAX_CORES = 150.0, 152.0, 1.0


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
