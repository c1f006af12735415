"""Real peers that are killed and started again: bit for bit alone, and from the newest consistent round together."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from forked_commands import Forked, ForkServer
from peer_processes import (
    MARK,
    Commands,
    commands_in,
    friends_words,
    last_certificate,
    saved_state,
    write_corpus,
    write_settings,
)

from spes_p2p.cli import load_settings
from spes_p2p.commands import amend
from spes_p2p.config.commands import AmendConfig
from spes_p2p.swarm.exchange.store import VersionStore
from spes_p2p.swarm.exchange.versions import is_document

REPORT = r"round (\d+): (\d+) peers, .* shared (\w+), slots"
SECONDS = 90.0
TOTAL = 9


class World:
    """Starts peers as forks, and kills them."""

    def __init__(self, commands: Commands, folder: Path) -> None:
        self.folder = folder
        self.corpus = write_corpus(folder / "corpus.jsonl")
        self.server = ForkServer(folder / "results", {**os.environ, MARK: commands.mark})

    def start(self, name: str, *words: str | Path) -> Forked:
        common = ["--output", self.folder / name, "--cache", self.folder / "cache", "--device", "cpu", "--threads", "1"]
        common += ["--run-id", "resume", "--text", self.corpus, "--seed-seconds", "0"]
        return self.server.start("peer", [*common, *friends_words(self.folder, words), *words])

    def address(self, name: str) -> str:
        return (self.folder / name / "address").read_text().strip()

    def versions(self, name: str) -> dict[str, tuple[int, str]]:
        newest = VersionStore(self.folder / name / "versions").newest()
        return {name: (version.round, version.digest) for name, version in newest.items() if not is_document(name)}


def kill(*peers: Forked) -> None:
    for peer in peers:
        peer.signal(signal.SIGKILL)
    for peer in peers:
        assert peer.end(SECONDS).code == -signal.SIGKILL


def damage(files: Iterable[Path]) -> None:
    for file in files:
        with file.open("r+b") as opened:
            opened.seek(40)
            opened.write(b"torn")


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with commands_in(tmp_path_factory.mktemp("commands")) as commands:
        yield commands


@pytest.fixture(scope="module")
def world(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(commands, tmp_path_factory.mktemp("resume"))
    yield world
    world.server.close()


FP32 = {"shared": "fp32", "slots": "fp32"}
LOW_BITS = {
    "codecs": {"shared": "sparse-8", "slots": "int4", "moments": "int8", "moments_interval": 2},
    "frozen_storage": "nf4",
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("exact", {"codecs": FP32, "frozen_storage": "fp32", "outer": {"moments": "local"}}),
        ("few-bits", {**LOW_BITS, "train": {"optimizer": "adamw8bit"}, "outer": {"optimizer": "nesterov"}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_lone_peer_killed_with_its_last_round_saved_arrives_bit_for_bit_where_an_undisturbed_one_does(
    world: World, name: str, settings: dict, seed: int
) -> None:
    rounds = {"mode": "steps", "steps": 15, "total": TOTAL, "min_peers": 1}
    file = write_settings(world.folder / f"{name}.yaml", round=rounds, **settings)
    words = ["--max-slots", "4" if name == "exact" else "2", "--data-seed", "3"]
    if name == "exact":  # a choice that fits this run alone, not the default one
        words += ["--storage", "int8"]
    steady = world.start(f"{name}-steady", "--config", file, *words)
    killed = world.start(f"{name}-killed", "--config", file, *words)
    killed.wait_for("round 2: 1 peers")
    output = world.folder / f"{name}-killed"
    while not list((output / "checkpoint").glob("round-2-step-??")):
        time.sleep(0.01)
    time.sleep(random.Random(seed).uniform(0, 0.1))
    kill(killed)
    last = last_certificate(output)
    assert last is not None and last.round == saved_state(output)["round"], "it was killed too late"
    killed = world.start(f"{name}-killed", "--resume", *words)
    for peer in (steady, killed):
        assert peer.end(SECONDS).code == 0, peer.stderr()
    assert world.versions(f"{name}-killed") == world.versions(f"{name}-steady")
    states = [saved_state(world.folder / f"{name}-{which}") for which in ("steady", "killed")]
    for key in ("round", "steps", "total_tokens", "slots", "tensors"):
        assert states[0][key] == states[1][key], key
    assert states[0]["round"] == TOTAL and states[0]["data"] == states[1]["data"]


@pytest.mark.full
@pytest.mark.parametrize("is_published", [True, False])
def test_a_lone_peer_whose_rounds_end_by_the_clock_goes_on_after_a_kill(world: World, is_published: bool) -> None:
    """Its certificate named a round that it had not saved; it made the round again, to other bits, for ever."""
    rounds = {"mode": "tokens", "tokens": 10**9, "min_seconds": 0.5, "max_seconds": 0.8, "total": 500, "min_peers": 1}
    name = f"clock-{is_published}"
    file = write_settings(world.folder / f"{name}.yaml", round=rounds)
    killed = world.start(name, "--config", file, "--max-slots", "2")
    killed.wait_for("round 4: 1 peers")
    kill(killed)
    saved = (world.folder / name / "checkpoint").glob("round-*")
    _, *newer = sorted(saved, key=lambda folder: int(folder.name.split("-")[1]))
    for folder in newer:
        shutil.rmtree(folder)
    if not is_published:
        _, digest = world.versions(name)["shared"]
        damage((world.folder / name).rglob(f"shared.*.{digest}.bin"))
    last = last_certificate(world.folder / name)
    assert last is not None
    again = world.start(name, "--resume", "--max-slots", "2")
    again.wait_for(f"round {last.round + 2}: 1 peers")
    kill(again)


# Full: the story of `test_peer_life` has a kill, and peers that all stopped and went on together, with every commit.
@pytest.mark.full
def test_peers_that_are_all_killed_at_once_go_on_from_the_newest_consistent_round(world: World, seed: int) -> None:
    """One of them has lost its `shared` besides, wherever it was kept: the others have it.

    Two of the three may make the next round before the third has come; soon all three make one. The third may also come
    during a round, train for it, and be too late: then it reports what the others have decided, with 0 peers.
    """
    rounds = {"mode": "tokens", "tokens": 10**9, "min_seconds": 0.5, "max_seconds": 0.8, "total": 500}
    rounds |= {"lease_seconds": 6.0, "heartbeat_seconds": 1.0, "min_peers": 3}
    file = write_settings(world.folder / "all.yaml", round=rounds)
    peers = {"all-a": world.start("all-a", "--config", file, "--max-slots", "2")}
    peers["all-a"].wait_for("others join with")
    join = ["--initial-peers", world.address("all-a"), "--max-slots", "2"]
    peers |= {name: world.start(name, *join) for name in ("all-b", "all-c")}
    for peer in peers.values():
        peer.wait_for(r"round ([3-9]|\d\d+): 3 peers")
    time.sleep(random.Random(seed).uniform(0, 1.5))
    kill(*peers.values())
    chains = [last_certificate(world.folder / name) for name in peers]
    newest = max(body.round for body in chains if body is not None)
    damage({file.stat().st_ino: file for file in (world.folder / "all-c").rglob("shared.*.bin")}.values())

    again = {"all-a": world.start("all-a", "--resume", "--max-slots", "2")}
    again["all-a"].wait_for("others join with")
    join = ["--resume", "--initial-peers", world.address("all-a"), "--max-slots", "2"]
    again |= {name: world.start(name, *join) for name in ("all-b", "all-c")}
    for peer in again.values():
        peer.wait_for(r"round \d+: 3 peers")
    kill(*again.values())
    reports = defaultdict(set)
    for peer in again.values():
        for number, members, digest in (found.groups() for found in peer.matches(REPORT)):
            reports[int(number)].add((members, digest))
    assert min(reports) == newest + 1, (chains, reports)
    assert all(len({digest for _, digest in told}) == 1 for told in reports.values()), reports
    assert all(len({members for members, _ in told} - {"0"}) == 1 for told in reports.values()), reports


# Full: `tests/unit/test_joining.py` shows with every commit whom a peer waits for that resumes alone.
@pytest.mark.full
@pytest.mark.parametrize("who", ["founder", "other", "amended"])
def test_one_of_two_peers_that_were_killed_goes_on_alone_if_told_so(world: World, who: str) -> None:
    """It waited for the run's `min_peers` for ever; likewise after its founder had prolonged a finished run."""
    rounds = {"mode": "steps", "steps": 5, "total": 3 if who == "amended" else 400, "min_peers": 2}
    file = write_settings(world.folder / f"alone-{who}.yaml", round=rounds)
    names = [f"{who}-a", f"{who}-b"]
    a = world.start(names[0], "--config", file, "--max-slots", "4")
    a.wait_for("others join with")
    b = world.start(names[1], "--initial-peers", world.address(names[0]), "--max-slots", "4")
    if who == "amended":
        assert (a.end(SECONDS).code, b.end(SECONDS).code) == (0, 0)
        words = [str(world.folder / names[0]), "--run.round.total", "6"]
        assert amend.main(load_settings(AmendConfig, words)) == 0
    else:
        b.wait_for("round 2: 2 peers")
        kill(a, b)
    name = names[who == "other"]
    last = last_certificate(world.folder / name)
    assert last is not None
    alone = world.start(name, "--resume", "--alone", "--max-slots", "4")
    alone.wait_for(f"round {last.round + 2}: 1 peers")
    kill(alone)
