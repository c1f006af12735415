"""The emulated internet is what it says; floors are the arithmetic; baselines do what they stand for."""

from __future__ import annotations

import asyncio
import functools
import json
import multiprocessing
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from benchmarks import elastic, network, testbed
from benchmarks.machine import Circumstances
from benchmarks.network import NetworkConfig
from benchmarks.scoreboard import Scoreboard
from benchmarks.star import StarCluster
from benchmarks.stock_averaging import StockCluster
from benchmarks.tables import Row, fill
from benchmarks.testbed import ALLOWED, NAMESPACES, Loopback, TestBed, available
from benchmarks.wan import floors
from benchmarks.wan.actor import Actor, close_all, finish_all
from benchmarks.wan.floors import MIB, Payload
from benchmarks.wan.raw_tcp import all_to_all_seconds
from benchmarks.wan.swarm_cluster import SwarmCluster
from spes_p2p.cli import entry_point
from spes_p2p.config import CodecConfig
from spes_p2p.errors import ConfigError, SpesError
from spes_p2p.swarm.hivemind_fixes.processes import DaemonP2P

pytestmark = pytest.mark.full
needs_bed = pytest.mark.skipif(available() is not None, reason=f"no test bed: {available()}")
PORT = 4000
TINY = Payload(shared_mib=1, slot_mib=1, slots=4)
MODEL, QUARTER = Payload(shared_mib=20, slot_mib=4, slots=16), Payload(shared_mib=5, slot_mib=1, slots=16)


# ---------------------------------------------------------------------- floors


def test_floors_are_those_worked_out_by_hand() -> None:
    """Of a model of 20 + 16 x 4 MiB and of its quarter; a link of 100 Mbit/s moves 12.5e6 bytes per second."""
    assert floors.round_bytes(MODEL, 4) == 78 * MIB
    assert floors.round_seconds(MODEL, 4, 100) == pytest.approx(78 * MIB / 12.5e6)
    assert floors.full_averaging_bytes(MODEL, 4) == 126 * MIB
    assert floors.server_bytes(MODEL, 4) == (144 * MIB, 336 * MIB)
    assert floors.server_seconds(QUARTER, 4, 25) == pytest.approx((36 + 84) * MIB / 3.125e6)
    assert floors.server_seconds(QUARTER, 16, 25) == pytest.approx((96 + 336) * MIB / 3.125e6)
    assert floors.round_seconds(QUARTER, 16, 25) == pytest.approx(24.375 * MIB / 3.125e6)


def test_a_round_in_fewer_bits_is_as_much_shorter() -> None:
    assert floors.round_bytes(Payload(bits=8, slot_bits=8), 4) == floors.round_bytes(Payload(), 4) / 4
    assert floors.round_bytes(Payload(bits=8), 4) == (2 * 5 + 64) * 3 / 4 * MIB


def test_the_floor_of_unequal_links_is_the_other_one_where_links_are_equal() -> None:
    assert floors.unequal_seconds(MODEL, [100.0] * 4, 100) == pytest.approx(floors.round_seconds(MODEL, 4, 100))


def test_a_slow_uplink_must_carry_its_delta_and_its_slots_once() -> None:
    assert floors.unequal_seconds(MODEL, [100, 100, 100, 20], 100) == pytest.approx(36 * MIB / 2.5e6)
    assert floors.unequal_seconds(MODEL, [100, 100, 100, 90], 5) == pytest.approx(68 * MIB / (5e6 / 8))


# ---------------------------------------------------------------------- the bed


def ask(bed: TestBed, peer: int, function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function says in a peer's namespace."""
    ours, theirs = multiprocessing.Pipe()
    process = bed.run_in(peer, answer, theirs, function, args)
    assert ours.poll(30)
    result = ours.recv()
    process.join(10)
    return result


def answer(pipe: Connection, function: Callable[..., Any], args: tuple) -> None:
    pipe.send(function(*args))


def serve(address: str, is_up: Any) -> None:
    """Take connections until killed."""
    server = socket.create_server((address, PORT))
    is_up.set()
    while True:
        server.accept()[0].close()


def seconds_to_connect(address: str, deadline: float = 10.0) -> float | None:
    began = time.monotonic()
    try:
        socket.create_connection((address, PORT), deadline).close()
    except OSError:
        return None
    return time.monotonic() - began


@pytest.fixture
def serving() -> Iterator[Callable[[TestBed, int], None]]:
    """Let a peer take connections."""
    processes = []

    def start(bed: TestBed, peer: int) -> None:
        is_up = multiprocessing.Event()
        processes.append(bed.run_in(peer, serve, bed.address(peer), is_up))
        assert is_up.wait(60)

    yield start
    for process in processes:
        process.kill()


@needs_bed
def test_a_round_trip_takes_as_long_as_asked(serving) -> None:
    with TestBed(peers=2, rtt_ms=80) as bed:
        serving(bed, 1)
        seconds = min(ask(bed, 0, seconds_to_connect, bed.address(1)) for _ in range(3))
    assert 0.08 <= seconds < 1


@needs_bed
def test_a_link_carries_its_rate_and_no_more_and_bytes_are_counted() -> None:
    num_bytes = 2 * MIB
    with TestBed(peers=3, mbit=40, rtt_ms=10) as bed:
        seconds = [all_to_all_seconds(bed, 3, num_bytes)]
        traffic = bed.bytes()
        floor = num_bytes / floors.bytes_per_second(40)
        while seconds[-1] >= 4 * floor and len(seconds) < 10:  # other programs may keep this one from its processor
            seconds.append(all_to_all_seconds(bed, 3, num_bytes))
    assert floor <= min(seconds) < 4 * floor
    for peer in traffic:
        assert num_bytes < peer.sent < 1.2 * num_bytes
        assert num_bytes < peer.received < 1.2 * num_bytes


@needs_bed
def test_a_slow_uplink_holds_its_peer_back() -> None:
    num_bytes = MIB
    with TestBed(peers=2, mbit=80, rtt_ms=10, uplinks={1: 8}) as bed:
        seconds = all_to_all_seconds(bed, 2, num_bytes)
    assert seconds >= num_bytes / floors.bytes_per_second(8)


@needs_bed
def test_a_cut_loses_everything_until_it_is_healed(serving) -> None:
    with TestBed(peers=3, rtt_ms=10) as bed:
        for peer in range(3):
            serving(bed, peer)
        bed.cut(1)
        assert ask(bed, 0, seconds_to_connect, bed.address(1), 1.5) is None
        assert ask(bed, 1, seconds_to_connect, bed.address(0), 1.5) is None
        assert ask(bed, 0, seconds_to_connect, bed.address(2)) is not None
        bed.heal(1)
        assert ask(bed, 0, seconds_to_connect, bed.address(1)) is not None


def count_packets(address: str, is_up: Any) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind((address, PORT))
        receiver.settimeout(5)
        is_up.set()
        count = 0
        while receiver.recv(100) != b"last":
            count += 1
    return count


def send_packets(address: str, count: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(count):
            sender.sendto(b"some", (address, PORT))
        for _ in range(20):  # one of them comes through
            sender.sendto(b"last", (address, PORT))


@needs_bed
def test_losses_are_as_frequent_as_asked(seed: int) -> None:
    with TestBed(peers=2, rtt_ms=2, loss_percent=20, seed=seed) as bed:
        ours, theirs = multiprocessing.Pipe()
        is_up = multiprocessing.Event()
        bed.run_in(1, answer, theirs, count_packets, (bed.address(1), is_up))
        assert is_up.wait(60)
        bed.run_in(0, send_packets, bed.address(1), 200)
        assert ours.poll(20)
        lost = 200 - ours.recv()
    assert 40 - 6 * 5.7 < lost < 40 + 6 * 5.7  # six standard deviations


@needs_bed
def test_two_beds_have_the_same_addresses_and_nothing_else_in_common(serving) -> None:
    with TestBed(peers=2) as one, TestBed(peers=2, congestion="reno") as other:
        serving(one, 1)
        assert ask(one, 0, seconds_to_connect, one.address(1)) is not None
        assert ask(other, 0, seconds_to_connect, other.address(1), 1.5) is None
        assert ask(one, 0, congestion_control) == "cubic"
        assert ask(other, 0, congestion_control) == "reno"


def congestion_control() -> str:
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


@needs_bed
def test_a_bed_leaves_nothing_behind_even_when_the_work_in_it_fails() -> None:
    namespaces, allowed, children = own_namespaces(), ALLOWED.read_text(), set(psutil.Process().children())
    with pytest.raises(ValueError, match="in the bed"), TestBed(peers=2):
        assert len(own_namespaces()) == len(namespaces) + 2
        raise ValueError("in the bed")
    assert (own_namespaces(), ALLOWED.read_text()) == (namespaces, allowed)
    assert set(psutil.Process().children()) <= children


def own_namespaces() -> list[str]:
    return sorted(path.name for path in NAMESPACES.glob(f"{testbed.PREFIX}{os.getpid()}-*"))


@needs_bed
def test_what_a_killed_process_left_is_removed() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    name = f"{testbed.PREFIX}{gone.pid}-0-0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    with TestBed(peers=1):
        assert not (NAMESPACES / name).exists()


@needs_bed
def test_an_unknown_congestion_control_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"congestion=vegan .* cubic"):
        TestBed(peers=1, congestion="vegan")


def test_without_a_tun_device_the_benchmark_says_so_in_one_line_and_exits_2(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(testbed, "TUN", tmp_path / "tun")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(SystemExit) as stopped:
        entry_point(NetworkConfig, network.main, [])
    said = capsys.readouterr().err.strip().splitlines()
    assert (stopped.value.code, len(said)) == (2, 1) and "no test bed on this machine: it has no " in said[0]


# ---------------------------------------------------------------------- actors


class Subject:
    def __init__(self, is_fine: bool = True) -> None:
        if not is_fine:
            raise ValueError("not fine")
        self._child = None

    def double(self, number: int) -> int:
        return 2 * number

    def fail(self) -> None:
        raise ValueError("as told")

    def die(self) -> None:
        os._exit(1)

    def hang(self) -> None:
        time.sleep(60)

    def have_a_child(self) -> int:
        self._child = subprocess.Popen(["sleep", "60"])
        return self._child.pid


@pytest.fixture
def actor() -> Iterator[Actor]:
    made = Actor("somebody", Subject).ready(30)
    yield made
    close_all([made])


def test_an_actor_returns_results_and_tells_of_failures(actor: Actor) -> None:
    assert actor.call("double", 4, seconds=30) == 8
    with pytest.raises(SpesError, match="somebody failed: ValueError: as told"):
        actor.call("fail", seconds=30)
    assert actor.call("double", 5, seconds=30) == 10


def test_an_actor_that_dies_is_no_reason_to_wait(actor: Actor) -> None:
    with pytest.raises(SpesError, match="somebody died"):
        actor.call("die", seconds=30)


def test_an_actor_that_hangs_is_waited_for_no_longer_than_said_and_its_children_end_with_it(actor: Actor) -> None:
    child = psutil.Process(actor.call("have_a_child", seconds=30))
    with pytest.raises(SpesError, match="did not answer within 0 s"):
        actor.call("hang", seconds=0.2)
    actor.close(seconds=0.2)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_an_object_that_cannot_be_made_says_why() -> None:
    made = Actor("somebody", Subject, False)
    with pytest.raises(SpesError, match="not fine"):
        made.ready(30)
    made.close()


# ---------------------------------------------------------------------- libp2p with a round-trip time


class Dialer:
    """A p2pd that connects when told to."""

    def __init__(self, host: str) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        reach = {"host_maddrs": [f"/ip4/{host}/tcp/0"], "dht_mode": "client", "use_relay": False}
        self._p2p = self._loop.run_until_complete(DaemonP2P.create(auto_nat=False, nat_port_map=False, **reach))

    def introduce(self) -> tuple[str, list[str]]:
        addresses = self._loop.run_until_complete(self._p2p.get_visible_maddrs())
        return self._p2p.peer_id.to_base58(), [str(address).split("/p2p/")[0] for address in addresses]

    def dial(self, peer_id: str, addresses: list[str], at: float) -> None:
        async def connect() -> None:
            await asyncio.sleep(at - time.monotonic())
            await self._p2p._client.connect(PeerID.from_base58(peer_id), [Multiaddr(each) for each in addresses])

        self._loop.run_until_complete(connect())

    def close(self) -> None:
        self._loop.run_until_complete(self._p2p.shutdown())


@needs_bed
def test_two_peers_that_dial_each_other_within_a_round_trip_are_connected() -> None:
    """With libp2p's default they are not, and everybody dials everybody when a swarm's first roster stands."""
    with TestBed(peers=2, rtt_ms=200) as bed:
        actors = [Actor(f"{i}", Dialer, bed.address(i), start=functools.partial(bed.run_in, i)) for i in range(2)]
        try:
            one, other = (actor.ready().call("introduce", seconds=30) for actor in actors)
            at = time.monotonic() + 0.5
            actors[0].begin("dial", *other, at)
            actors[1].begin("dial", *one, at)
            finish_all(actors, 30)
        finally:
            close_all(actors)


# ---------------------------------------------------------------------- what is compared


def test_the_server_gives_everybody_the_mean_of_shared_and_each_owners_slots() -> None:
    with StarCluster(Loopback(), 2, TINY) as cluster:
        assert cluster.round() > 0
        cluster.round()
        peers = cluster.peers
        own = [peer.call("own", seconds=30) for peer in peers]
        models = [peer.call("model", seconds=30) for peer in peers]
    shared = sum(vector[: TINY.shared_numel].astype(np.float64) for vector in own) / 2
    for model in models:
        np.testing.assert_allclose(model[: TINY.shared_numel], shared, atol=1e-6)
        slots = np.concatenate([vector[TINY.shared_numel :] for vector in own])
        assert np.array_equal(model[TINY.shared_numel :], slots)


def test_hivemind_averages_everything_among_everybody() -> None:
    with StockCluster(Loopback(), 2, TINY) as cluster:
        before = cluster.checksums()
        assert cluster.round() > 0
        after = cluster.checksums()
    assert after == pytest.approx([sum(before) / 2] * 2, abs=1e-7)


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
def test_rounds_of_real_peers_are_whole_and_newcomers_get_everything(tmp_path: Path, codec: Any) -> None:
    codecs = CodecConfig(shared=codec, slots=codec)
    with SwarmCluster(Loopback(), tmp_path, 2, TINY, codecs=codecs) as cluster:
        for number in range(1, 3):
            made = cluster.round()
            assert cluster.number == number
            assert 0 < made.averaging_seconds < made.seconds and made.cpu_seconds > 0
        joiner = cluster.start_joiner(2).ready()
        try:
            assert joiner.call("catch_up", cluster.names, cluster.ids, cluster.number, seconds=60) > 0
        finally:
            joiner.close()


# ---------------------------------------------------------------------- the table


def board(folder: Path) -> Scoreboard:
    return Scoreboard(
        folder / "figures.json", folder / "page.md", "FIGURES", dict.fromkeys(("rounds", "low_bits", "loopback"), iter)
    )


def test_a_part_that_fails_says_so_and_leaves_the_others(tmp_path: Path) -> None:
    def broken() -> Iterator[Row]:
        yield Row("first", "1 s")
        raise SpesError("peer 3 died")

    rows, _ = board(tmp_path).measure("rounds", broken)
    assert [row.figure for row in rows] == ["first", "rounds: could not be measured"]
    assert "peer 3 died" in rows[1].measured and rows[1].is_reached is False


def test_every_part_can_be_asked_for() -> None:
    for benchmark in (network, elastic):
        assert list(benchmark.PARTS) == list(benchmark.Part.__args__)
        assert all(part.__name__ == name for name, part in benchmark.PARTS.items())


def test_a_part_is_written_beside_the_others_and_in_place_of_what_it_was(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- FIGURES -->\n<!-- /FIGURES -->\n")
    circumstances = Circumstances.now(0.0, None)
    for part, figure in (("loopback", "old"), ("loopback", "exchange"), ("rounds", "round")):
        board(tmp_path).write(part, [Row(figure, "1 s")], circumstances, seed=3)
    text = page.read_text()
    assert 0 < text.index("| round |") < text.index("| exchange |") and "old" not in text
    assert list(json.loads((tmp_path / "figures.json").read_text())) == ["rounds", "loopback"]


def test_a_table_goes_between_its_markers_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- ONE -->\nold\n<!-- /ONE -->\nafter\n")
    fill(page, "ONE", "new \\1\n")
    assert page.read_text() == "before\n<!-- ONE -->\nnew \\1\n<!-- /ONE -->\nafter\n"
    with pytest.raises(ConfigError, match="TWO"):
        fill(page, "TWO", "table")
