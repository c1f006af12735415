"""A real peer whose machine stands still for longer than its lease."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest
from peer_processes import Command, commands_in, write_corpus, write_settings

pytestmark = pytest.mark.full

REPORT = r"round (\d+): (\d+) peers, .* shared (\w+), slots ([\d,-]+|none)"
LEASE_SECONDS = 6.0
"""Of the tiny run."""


def signal_all(peer: Command, number: signal.Signals) -> None:
    """Send a signal to a peer and everything it has started."""
    for process in [psutil.Process(peer.pid), *psutil.Process(peer.pid).children(recursive=True)]:
        process.send_signal(number)


def test_a_peer_that_stood_still_for_longer_than_its_lease_catches_up_and_counts_again(tmp_path: Path) -> None:
    """Meanwhile the other goes on with all slots."""
    write_corpus(tmp_path / "corpus.jsonl")
    rounds = {"mode": "tokens", "tokens": 6000, "min_seconds": 1.0, "max_seconds": 3.0, "total": 500, "min_peers": 2}
    # A peer that was named absent follows after this time; `--alone` has named it at once.
    rounds["shrink_seconds"] = LEASE_SECONDS
    settings = write_settings(tmp_path / "run.yaml", round=rounds)
    with commands_in(tmp_path) as commands:
        words = ["--run-id", "stopped", "--text", tmp_path / "corpus.jsonl", "--max-slots", "4"]
        founder = commands.peer("founder", *words, "--config", settings, "--alone")
        address = founder.wait_for(r"--initial-peers (\S+)")[1]
        joiner = commands.peer("joiner", *words, "--initial-peers", address)
        for peer in (founder, joiner):
            peer.wait_for(r"round 2: 2 peers")
        signal_all(joiner, signal.SIGSTOP)
        stopped_at = time.monotonic()
        alone = founder.wait_for(r"round (\d+): 1 peers, .* slots 0-3;", after=len(founder.lines))
        time.sleep(max(0.0, 1.5 * LEASE_SECONDS - (time.monotonic() - stopped_at)))
        before = len(joiner.lines)
        signal_all(joiner, signal.SIGCONT)
        joiner.wait_for(r"the others have decided it without this peer; catching up", after=before)
        again = int(joiner.wait_for(r"round (\d+): 2 peers", after=before)[1])
        founder.wait_for(rf"round {again}: 2 peers")
        for peer in (joiner, founder):
            peer.signal(signal.SIGINT)
        assert [peer.end(60) for peer in (joiner, founder)] == [130, 130]
        commands.wait_until_gone()
    told = [{m[1]: m[3] for m in peer.matches(REPORT)} for peer in (founder, joiner)]
    assert again > int(alone[1]) and told[0][str(again)] == told[1][str(again)]
    assert not joiner.faults() + founder.faults()
