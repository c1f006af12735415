"""Real peers that lose p2pd or each other: one story, told by the fixture, since every peer takes seconds to start.

`a` founds a run and `b` joins it. The p2pd of `a` is killed: `a` starts itself anew, and finds `b` by what it has kept.
Then `b` is killed: `a` waits for it. `b` comes back, knowing only a dead address and what it has kept. At last `a`
leaves with a goodbye, and `b` trains on alone.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from peer_processes import Command, Commands, commands_in, free_port, write_corpus, write_settings

from spes_p2p.peer.restart import LEAST_SECONDS, resuming_words
from spes_p2p.swarm.p2p.identity import Identity

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

ROUND = {"mode": "tokens", "tokens": 10**9, "min_seconds": 0.5, "max_seconds": 1.0, "total": 5000}
TIMES = {"lease_seconds": 8.0, "heartbeat_seconds": 1.5}
TOGETHER, ALONE = r"round (\d+): 2 peers", r"round (\d+): 1 peers"
ADDRESS = r"or, in full: .* --initial-peers (/\S+)"


@dataclass
class Story:
    """What happened: lines of the log, addresses, rounds and seconds, by what they are of."""

    peers: dict[str, Command] = field(default_factory=dict)
    addresses: list[str] = field(default_factory=list)
    seen_seconds: float = 0.0
    back_seconds: float = 0.0
    kept_round: int = 0
    waiting: str = ""
    rounds_while_waiting: list[int] = field(default_factory=list)
    round_together_again: int = 0
    code: int = -1


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder, story = tmp_path_factory.mktemp("reconnects"), Story()
    with commands_in(folder) as commands:
        try:
            tell(commands, folder, story)
        finally:
            for name, peer in story.peers.items():
                print(f"----- {name}\n{peer.tail()}")
        yield story


def tell(commands: Commands, folder: Path, story: Story) -> None:
    settings = write_settings(folder / "run.yaml", round={**ROUND, **TIMES})
    flags = ["--run-id", "r", "--text", write_corpus(folder / "corpus.jsonl"), "--max-slots", "2"]
    a = story.peers["a"] = commands.peer("a", *flags, "--config", settings)
    story.addresses.append(a.wait_for(ADDRESS)[1])
    joined = time.monotonic()
    b = story.peers["b"] = commands.peer("b", *flags, "--initial-peers", story.addresses[0])
    a.wait_for(TOGETHER)
    wait_for_file(folder / "a" / "known_peers.json")
    threading.Event().wait(max(0.0, joined + LEAST_SECONDS - time.monotonic()))
    kill_p2pd(a, story)
    kill_the_other(a, b, story)
    dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{Identity(folder / 'nobody').peer_id}"
    lines = len(a.lines)
    b = story.peers["b again"] = commands.peer("b", *flags, "--resume", "--initial-peers", dead)
    story.round_together_again = int(a.wait_for(TOGETHER, after=lines)[1])
    b.wait_for(TOGETHER)
    a.signal(signal.SIGINT)
    story.code = a.end(60)
    b.wait_for(ALONE)


def kill_p2pd(a: Command, story: Story) -> None:
    (p2pd,) = (child for child in psutil.Process(a.pid).children(recursive=True) if child.name() == "p2pd")
    lines, began = len(a.lines), time.monotonic()
    p2pd.kill()
    a.wait_for("p2pd.* has died", after=lines)
    story.seen_seconds = time.monotonic() - began
    story.addresses.append(a.wait_for(ADDRESS, after=lines)[1])
    a.wait_for(TOGETHER, after=lines)
    story.back_seconds = time.monotonic() - began


def kill_the_other(a: Command, b: Command, story: Story) -> None:
    b.signal(signal.SIGKILL)
    b.end()
    lines = len(a.lines)
    said = a.wait_for(r"waits for .* keeping round (\d+), trying .*--alone", after=lines)
    story.waiting, story.kept_round = said[0], int(said[1])
    lines = len(a.lines)
    threading.Event().wait(5.0)
    reports = [line for line in a.lines[lines:] if "peers, loss" in line]
    story.rounds_while_waiting = [len(reports)] if reports else []


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        threading.Event().wait(0.2)


def test_a_dead_p2pd_is_noticed_and_the_peer_comes_back_under_its_id_and_address(story: Story) -> None:
    print(
        f"p2pd's death was noticed after {story.seen_seconds:.1f} s, and the peer back after {story.back_seconds:.1f} s"
    )
    assert story.seen_seconds < 2 * 15
    assert story.addresses[0] == story.addresses[1]


def test_a_peer_that_has_lost_all_others_keeps_its_round_and_says_so(story: Story) -> None:
    assert "known addresses" in story.waiting
    assert not story.rounds_while_waiting


def test_who_finds_no_initial_peer_finds_those_it_knew_and_the_run_goes_on_where_it_was(story: Story) -> None:
    assert story.round_together_again == story.kept_round + 1


def test_who_is_left_by_a_goodbye_trains_on_alone(story: Story) -> None:
    assert story.code == 130
    assert story.peers["b again"].matches(ALONE)


def test_nothing_of_the_daemons_is_left_on_the_screen(story: Story) -> None:
    assert not [fault for peer in story.peers.values() for fault in peer.faults()]


def test_a_restart_goes_on_with_the_same_words_and_the_port_that_others_know() -> None:
    words = ["peers/run_peer.py", "--overwrite", "--port", "0", "--run-id", "r", "--port=1", "--no-resume"]
    words += ["--resume-round", "4", "--skip-optimizer", "--resume-round=5"]
    assert resuming_words(words, 4000) == [
        *("peers/run_peer.py", "--run-id", "r", "--port", "4000", "--seed-seconds", "30"),
        *("--resume", "--no-overwrite"),
    ]
    assert resuming_words(["spes", "--seed-seconds=5"], 4000)[1:4] == ["--seed-seconds=5", "--port", "4000"]
    monitor = ["monitor/run_monitor.py", "--run-id", "r", "--overwrite"]
    assert resuming_words(monitor, None) == [*monitor[:-1], "--resume", "--no-overwrite"]


def test_peers_whose_sockets_a_cleaner_deletes_start_again_together_in_few_lines(tmp_path: Path) -> None:
    """The log had forty lines of traceback and `this is a bug`, and the peer that was up first ended."""
    settings = write_settings(tmp_path / "run.yaml", round={**ROUND, **TIMES})
    flags = ["--run-id", "r", "--text", write_corpus(tmp_path / "corpus.jsonl"), "--max-slots", "2"]
    with commands_in(tmp_path) as commands:
        a = commands.peer("a", *flags, "--config", settings)
        b = commands.peer("b", *flags, "--initial-peers", a.wait_for(ADDRESS)[1])
        b.wait_for(TOGETHER)
        wait_for_file(tmp_path / "b" / "known_peers.json")
        threading.Event().wait(LEAST_SECONDS)
        lines = [len(peer.lines) for peer in (a, b)]
        for peer in (a, b):
            for folder in Path(tempfile.gettempdir()).glob(f"spes-p2p-{peer.pid}-*"):
                shutil.rmtree(folder)
        for peer, after in zip((a, b), lines, strict=True):
            peer.wait_for("sockets in .* were deleted.*; starting again", after=after)
            peer.wait_for(TOGETHER, after=after)
            assert not peer.faults() and not peer.faults("bug")
