"""Real peers that share token shards, and are killed, together too: each batch that was dealt counts once."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from forked_commands import Forked, ForkServer
from peer_processes import MARK, Commands, commands_in, friends_words, last_certificate, write_settings

from spes_p2p.config import DataConfig
from spes_p2p.data.shards import TokenShards
from spes_p2p.data.tokenizer import load_tokenizer, tokenizer_digest
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.chain import Link

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "tests" / "fixtures" / "shards" / "tokenizer"
SECONDS = 180.0
NAMES = ("a", "b", "c", "d")
T = 64
TRAINED = re.compile(r"round (\d+): trained \d+ batches, (\d+) of them from its share, which begins at batch (\d+)$")


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with commands_in(tmp_path_factory.mktemp("commands")) as commands:
        yield commands


def shards(folder: Path) -> tuple[Path, DataConfig]:
    """Write shards of some hundred windows; return them and the run's settings for them."""
    tokenizer, path = load_tokenizer(TOKENIZER), folder / "tokens.npy"
    np.random.default_rng(0).integers(0, len(tokenizer), 20_000).astype("<u2").tofile(path)
    found = TokenShards([path], len(tokenizer), folder / "cache", tokenizer_digest(tokenizer))
    common = {"source": "files", "sequence_length": T, "fingerprint": found.fingerprint, "tokenizer": str(TOKENIZER)}
    return path, DataConfig(**common, held_out_fraction=0.3)


def bodies_of(output: Path) -> list[Body]:
    lines = (output / "consensus" / "certificates.jsonl").read_bytes().splitlines()
    return [Link.model_validate_json(line).certificate.body for line in lines]


class Peers:
    """The four peers, by name, and all that they have logged."""

    def __init__(self, commands: Commands, folder: Path, data: Path) -> None:
        self._folder = folder
        self._server = ForkServer(folder / "results", {**os.environ, MARK: commands.mark})
        self._data = data
        self.running: dict[str, Forked] = {}
        self._all: dict[str, list[Forked]] = {name: [] for name in NAMES}

    def start(self, name: str, *words: str | Path) -> Forked:
        common = ["--output", self._folder / name, "--cache", self._folder / "cache", "--device", "cpu"]
        common += ["--threads", "1", "--run-id", "shared", "--yes", "--data", self._data, "--max-slots", "2"]
        peer = self._server.start("peer", [*common, *friends_words(self._folder, words), *words])
        self.running[name] = peer
        self._all[name].append(peer)
        return peer

    def kill(self, *names: str) -> None:
        for name in names:
            self.running[name].signal(signal.SIGKILL)
        for name in names:
            assert self.running.pop(name).end(SECONDS).code == -signal.SIGKILL

    def address(self, name: str) -> str:
        return (self._folder / name / "address").read_text().strip()

    def resume_all(self) -> None:
        self.start("a", "--resume").wait_for("others join with")
        for name in NAMES[1:]:
            self.start(name, "--resume", "--initial-peers", self.address("a"))

    def trained(self, name: str) -> dict[int, range]:
        """Return what a peer has trained of its share in each round: of one that it trained several times, the last."""
        found = (TRAINED.search(line) for peer in self._all[name] for line in peer.lines)
        numbers = (tuple(map(int, each.groups())) for each in found if each is not None)
        return {round: range(first, first + num_batches) for round, num_batches, first in numbers}

    def close(self) -> None:
        self._server.close()


@pytest.mark.full
def test_no_batch_is_trained_twice_in_a_swarm_of_four_with_kills(commands: Commands, tmp_path: Path, seed: int) -> None:
    path, data = shards(tmp_path)
    rounds = {"mode": "tokens", "tokens": 6000, "min_seconds": 2.0, "max_seconds": 6.0, "total": 10_000}
    rounds |= {"min_peers": 3, "shrink_seconds": 20.0, "heartbeat_seconds": 1.0}
    settings = write_settings(tmp_path / "run.yaml", round=rounds, data=data.model_dump(mode="json", exclude={"paths"}))
    draw, peers = random.Random(seed), Peers(commands, tmp_path, path)
    try:
        peers.start("a", "--config", settings).wait_for("others join with")
        for name in NAMES[1:]:
            peers.start(name, "--initial-peers", peers.address("a"))
        peers.running["b"].wait_for(r"round [3-9]: [34] peers", SECONDS)
        for name in ("c", "b"):  # one after the other, each for some rounds
            time.sleep(draw.uniform(0, 3))
            peers.kill(name)
            before = last_certificate(tmp_path / "a")
            assert before is not None
            peers.running["a"].wait_for(rf"round ({before.round + 3}|{before.round + 4}): \d peers", SECONDS)
            peers.start(name, "--resume", "--initial-peers", peers.address("a"))
            peers.running[name].wait_for(r"round \d+: [34] peers", SECONDS)
        for _ in range(2):
            time.sleep(draw.uniform(0, 3))
            peers.kill(*NAMES)
            peers.resume_all()
            peers.running["b"].wait_for(r"round \d+: [34] peers", SECONDS)
        peers.kill(*NAMES)
    finally:
        peers.close()

    bodies = max((bodies_of(tmp_path / name) for name in NAMES), key=len)
    ids = {name: re.search(r"this peer is (\w+)", "\n".join(peers._all[name][0].lines))[1] for name in NAMES}
    names = {peer_id: name for name, peer_id in ids.items()}
    said = {name: peers.trained(name) for name in NAMES}
    brought = [said[names[each.peer_id]][body.round] for body in bodies for each in body.members if each.tokens]
    count = Counter(batch for batches in brought for batch in batches)
    print(f"{len(bodies)} rounds, {count.total()} batches of {bodies[-1].cursor} that were dealt")
    assert max(count.values()) == 1 and max(count) < bodies[-1].cursor
    assert len(bodies) > 10 and 4 * count.total() > bodies[-1].cursor
