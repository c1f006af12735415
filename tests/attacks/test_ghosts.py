"""Identities that claim every slot, report tokens and come to no round neither stop a run nor take it over."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from forked_commands import Forked, ForkServer, slots_in
from peer_processes import MARK, commands_in, last_certificate, write_corpus, write_settings

from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.node import ListenConfig, Node
from spes_p2p.swarm.records import Claim, Progress

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]  # minutes of real peers; the rules have tests of their own

SLOTS = {0, 1, 2, 3}
ROUND = {"mode": "tokens", "tokens": 10**9, "min_seconds": 0.5, "max_seconds": 1.0, "total": 500, "min_peers": 2}
TIMES = {"lease_seconds": 10.0, "heartbeat_seconds": 1.0}
REPORT = r"round (\d+): (\d+) peers, .* slots ([\d,-]+|none);"


@contextmanager
def ghost(folder: Path, address: str) -> Iterator[str]:
    """Keep an identity in the DHT that claims to train all slots, far ahead; give the block its id."""
    node = Node(Identity(folder / "key"), "haunted", initial_peers=[address], listen=ListenConfig(client_mode=True))
    stopped = threading.Event()

    def haunt() -> None:
        while not stopped.wait(0.5):
            claim = Claim(peer_id=node.peer_id, state="active", slots=tuple(SLOTS), max_slots=4, since=1.0)
            ahead = Progress(peer_id=node.peer_id, round=10**6, ends_at=time.time() + 3600, certificate="e" * 64)
            for record in (claim, ahead):
                node.store(record, TIMES["lease_seconds"])

    node.store(Claim(peer_id=node.peer_id, state="active", slots=tuple(SLOTS), max_slots=4, since=1.0), 10.0)
    thread = threading.Thread(target=haunt)
    thread.start()
    try:
        yield node.peer_id
    finally:
        stopped.set()
        thread.join()
        node.close()


def slots_of(peer: Forked) -> set[int]:
    return set(slots_in(peer.matches(REPORT)[-1][3]))


@pytest.mark.parametrize("when", ["before the first commit", "after it"])
@pytest.mark.parametrize("count", [1, 2], ids=["one", "as many as honest peers"])
def test_ghosts_cost_no_round_and_take_no_slot(tmp_path: Path, when: str, count: int) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    settings = write_settings(tmp_path / "run.yaml", round={**ROUND, **TIMES})
    with commands_in(tmp_path) as commands, ExitStack() as stack:
        server = ForkServer(tmp_path / "results", {**os.environ, MARK: commands.mark})
        flags = ["--run-id", "haunted", "--text", corpus, "--max-slots", "2", "--seed-seconds", "0"]

        def start(name: str, *words: str | Path) -> Forked:
            return server.start("peer", commands.peer_words(name, *flags, *words)[1:])

        def haunt() -> None:
            ghosts.extend(stack.enter_context(ghost(tmp_path / f"ghost{index}", address)) for index in range(count))

        ghosts: list[str] = []
        founder = start("founder", "--config", settings)
        founder.wait_for("others join with")
        address = (tmp_path / "founder" / "address").read_text().strip()
        if when == "before the first commit":
            haunt()
        joiner = start("joiner", "--initial-peers", address)
        for peer in (founder, joiner):
            peer.wait_for(r"round \d+: 2 peers")
        if when == "after it":
            haunt()
        seen = len(founder.lines)
        for peer in (founder, joiner):
            last = int(peer.matches(REPORT)[-1][1])
            peer.wait_for(rf"round {last + 8}: 2 peers", after=seen if peer is founder else 0)
        body = last_certificate(tmp_path / "founder")
        assert slots_of(founder) | slots_of(joiner) == SLOTS, "a ghost's claim covers no slot"
        assert isinstance(body, Body) and not set(ghosts) & {*body.voters, *body.seats}
        dropped = [line for line in founder.lines[seen:] if re.search("dropped .*shared", line)]
        assert not dropped, "no round was lost"
        for peer in (founder, joiner):
            peer.signal(signal.SIGINT)
            assert peer.end(60).code == 130
        stack.close()  # first: forks of the ghosts' nodes hold the server's input open
        server.close()
        commands.wait_until_gone()
