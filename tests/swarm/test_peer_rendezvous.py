"""A run whose peers meet at a node that does not train: a plain `hivemind-dht`, or `spes rendezvous`."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from peer_processes import MARK, Command, commands_in, last_certificate, write_corpus, write_settings

from benchmarks.routers import routers_available
from benchmarks.testbed import TestBed, available
from spes_p2p.config import JoinLink

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]
SECONDS = 120.0
SETTLE_SECONDS, IDLE_SECONDS = 10.0, 30.0
MAX_MBYTES, MAX_MBYTES_ALONE, MAX_SHARE = 350, 400, 0.01
PLAIN = "from hivemind.hivemind_cli.run_dht import main; main()"
"""What the command `hivemind-dht` runs."""


def test_a_founder_and_a_joiner_train_through_a_plain_node_of_hiveminds(tmp_path: Path) -> None:
    text = ["--text", write_corpus(tmp_path / "corpus.jsonl")]
    settings = write_settings(tmp_path / "settings.yaml", round={"total": 3, "min_peers": 2})
    with commands_in(tmp_path) as commands:
        plain = commands.start("-c", PLAIN, "--host_maddrs", "/ip4/127.0.0.1/tcp/0")
        address = plain.wait_for(r"--initial_peers (/ip4/127\.0\.0\.1/tcp/\S+/p2p/\w+)", SECONDS)[1]
        meet = ["--run-id", "plain", "--initial-peers", address, *text, "--seed-seconds", "0"]
        founder = commands.peer("founder", *meet, "--config", settings)
        founder.wait_for(r"others join with: ", SECONDS)
        second = commands.peer("second", *meet, "--config", settings)
        assert second.end(SECONDS) == 2 and "is there already" in second.tail(), second.tail()
        joiner = commands.peer("joiner", *meet)
        assert [each.end(SECONDS) for each in (founder, joiner)] == [0, 0], founder.tail() + joiner.tail()
    bodies = [last_certificate(tmp_path / name) for name in ("founder", "joiner")]
    assert all(body is not None and body.round == 3 and len(body.members) == 2 for body in bodies)


@pytest.mark.skipif(bool(available() or routers_available()), reason="no namespaces or routers here")
@pytest.mark.parametrize("kind", ["restricted", "port_restricted"])
def test_two_peers_behind_routers_train_ten_rounds_by_a_rendezvous_that_takes_little(kind: str, tmp_path: Path) -> None:
    text = ["--text", write_corpus(tmp_path / "corpus.jsonl")]
    usual = {"lease_seconds": 30.0, "heartbeat_seconds": 10.0}
    settings = write_settings(tmp_path / "settings.yaml", round={"total": 10, "min_peers": 2, **usual})
    with TestBed(3, rtt_ms=40, routers={1: kind, 2: kind}) as bed, commands_in(tmp_path) as commands:

        def start(place: int, *words: str | Path) -> Command:
            within = ["ip", "netns", "exec", bed.namespace(place), sys.executable, *words]
            return Command(within, {MARK: commands.mark})

        home = tmp_path / "rendezvous"
        serves = ["-m", "spes_p2p", "rendezvous", "--run-id", "home", "--output", home, "--host", bed.address(0)]
        rendezvous = start(0, *serves)
        address = rendezvous.wait_for(r"--initial-peers (/ip4/\S+)", SECONDS)[1]
        check_small(rendezvous)
        meet = ["--run-id", "home", "--initial-peers", address, *text, "--host", "*", "--seed-seconds", "15"]
        founder = start(1, *commands.peer_words("founder", *meet, "--config", settings))
        founder.wait_for(r"others join with: ", SECONDS)
        link = JoinLink.parse((tmp_path / "founder" / "link").read_text())
        assert link.addresses[-1] == address, "the link names the rendezvous"
        joiner = start(2, *commands.peer_words("joiner", *meet))
        assert [each.end(3 * SECONDS) for each in (founder, joiner)] == [0, 0], founder.tail() + joiner.tail()
        calls_only = ["takes no calls" in "".join(each.lines) for each in (founder, joiner)]
        assert calls_only == [kind == "port_restricted"] * 2
        rendezvous.wait_for(r"round 10: stored 9 of 9 versions", SECONDS)
        check_small(rendezvous)
        assert JoinLink.parse((home / "link").read_text()).addresses == (address,)
        exported = start(1, "-m", "spes_p2p", "export", link.encode(), "--output", tmp_path / "model", "--yes")
        assert exported.end(SECONDS) == 0 and (tmp_path / "model" / "config.json").is_file(), exported.tail()
    bodies = [last_certificate(tmp_path / name) for name in ("founder", "joiner", "rendezvous")]
    assert all(body is not None and body.round == 10 and len(body.members) == 2 for body in bodies)


def check_small(rendezvous: Command) -> None:
    """Check the memory of all its processes, and their processor time while nobody needs them."""
    processes = [main := psutil.Process(rendezvous.pid), *main.children(recursive=True)]
    threading.Event().wait(SETTLE_SECONDS)
    began, before = time.monotonic(), cpu_seconds(processes)
    threading.Event().wait(IDLE_SECONDS)
    share = (cpu_seconds(processes) - before) / (time.monotonic() - began)
    pss, alone = sum(each.memory_full_info().pss for each in processes) / 1e6, mbytes_alone(processes)
    print(f"rendezvous: PSS {pss:.0f} MB, {alone:.0f} MB if nothing else uses its libraries; {share:.2%} of a core")
    shown = [(each.name(), round(each.memory_full_info().uss / 1e6), each.cpu_times()) for each in processes]
    assert pss <= MAX_MBYTES and alone <= MAX_MBYTES_ALONE and share <= MAX_SHARE, shown


def mbytes_alone(processes: list[psutil.Process]) -> float:
    """Return the PSS of a family of processes as on a machine where no other one has their libraries in memory."""
    own, files = 0, dict[str, int]()
    for process in processes:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        own += 1024 * int(re.search(r"Pss_Anon: +(\d+)", rollup)[1])  # type: ignore[index]
        mine = Counter[str]()
        for part in process.memory_maps(grouped=False):
            mine[part.path] += part.rss - part.anonymous if part.path.startswith("/") else 0
        files |= {path: max(files.get(path, 0), size) for path, size in mine.items()}
    return (own + sum(files.values())) / 1e6


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in processes)
