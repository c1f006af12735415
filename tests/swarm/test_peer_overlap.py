"""Real peers that train on while they synchronise."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from peer_processes import Command, Commands, commands_in, write_corpus, write_settings

REPORT = r"round (\d+): (\d+) peers, .* shared (\w+), slots .*; waited ([\d.]+) s"
TOTAL = 6


def start(commands: Commands, folder: Path, name: str, *flags: str | Path) -> Command:
    words = ["--run-id", "overlap", "--text", folder / "corpus.jsonl", "--max-slots", "3", "--seed-seconds", "1"]
    return commands.peer(name, *words, *flags)


def start_two(commands: Commands, folder: Path, total: int) -> tuple[Command, Command]:
    write_corpus(folder / "corpus.jsonl")
    rounds = {"mode": "tokens", "tokens": 6000, "min_seconds": 1.0, "max_seconds": 20, "overlap": 2}
    settings = write_settings(folder / "run.yaml", round={**rounds, "total": total, "min_peers": 2})
    founder = start(commands, folder, "founder", "--config", settings)
    address = founder.wait_for(r"--initial-peers (\S+)")[1]
    return founder, start(commands, folder, "joiner", "--initial-peers", address)


@pytest.mark.full
def test_peers_that_overlap_agree_on_every_round(tmp_path: Path) -> None:
    with commands_in(tmp_path) as commands:
        peers = start_two(commands, tmp_path, TOTAL)
        assert [peer.end() for peer in peers] == [0, 0], peers[0].tail()
        commands.wait_until_gone()
    told = [{m[1]: m.groups()[1:3] for m in peer.matches(REPORT)} for peer in peers]
    assert told[0] == told[1] and sorted(map(int, told[0])) == list(range(1, TOTAL + 1))
    assert {members for members, _ in told[0].values()} == {"2"}


@pytest.mark.full
def test_ctrl_c_in_the_middle_of_a_synchronisation_ends_a_peer_and_not_the_other(tmp_path: Path) -> None:
    """It waits for a founder that stands still; which then goes on alone."""
    with commands_in(tmp_path) as commands:
        founder, joiner = start_two(commands, tmp_path, 500)
        for peer in (founder, joiner):
            peer.wait_for(r"round 2: 2 peers")
        founder.signal(signal.SIGSTOP)  # so that the joiner waits for it
        time.sleep(3.0)
        joiner.signal(signal.SIGINT)
        time.sleep(0.5)
        founder.signal(signal.SIGCONT)
        assert joiner.end(60) == 130, joiner.tail()
        assert not joiner.faults("Traceback|terminate called")
        founder.wait_for(r"round \d+: 1 peers", 120.0)
        founder.signal(signal.SIGINT)
        assert founder.end(60) == 130, founder.tail()
        commands.wait_until_gone()
