"""Real peers whose founder changes the run: prolonged on the way, by peers and a monitor alike, and after its end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_commands import Forked, ForkServer
from peer_processes import MARK, Commands, commands_in, friends_words, last_certificate, write_corpus, write_settings

from spes_p2p.cli import load_settings
from spes_p2p.commands import amend
from spes_p2p.config.commands import AmendConfig
from spes_p2p.errors import ConfigError

SECONDS = 120.0


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with commands_in(tmp_path_factory.mktemp("commands")) as commands:
        yield commands


@pytest.fixture
def server(commands: Commands, tmp_path: Path) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path / "results", {**os.environ, MARK: commands.mark})
    yield server
    server.close()


class World:
    """A run of two peers, a and b, and a monitor."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.text = write_corpus(folder / "corpus.jsonl")

    def start(self, command: str, name: str, *words: str | Path) -> Forked:
        common = ["--run-id", "amended", "--output", self.folder / name, "--cache", self.folder / "cache"]
        common += ["--text", self.text, "--threads", "1"]
        common += ["--device", "cpu", "--max-slots", "4"] if command == "peer" else ["--held-out-sequences", "4"]
        common += friends_words(self.folder, words) if command == "peer" else []
        return self.server.start(command, [*common, *words])

    def address(self) -> str:
        return (self.folder / "a" / "address").read_text().strip()

    def amend(self, *words: str) -> None:
        assert amend.main(load_settings(AmendConfig, [str(self.folder / "a"), *words])) == 0


# Full: `tests/unit/swarm/test_swarm_revision.py` and `test_swarm_decision.py` show it with every commit.
@pytest.mark.full
def test_peers_and_a_monitor_adopt_a_revision_in_one_round_and_a_finished_run_goes_on(
    server: ForkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(server, tmp_path)
    rounds = {"mode": "steps", "steps": 8, "total": 40, "min_peers": 2, "heartbeat_seconds": 1.0}
    settings = write_settings(tmp_path / "run.yaml", round=rounds)
    a = world.start("peer", "a", "--config", settings, "--seed-seconds", "60")
    a.wait_for("others join with", SECONDS)
    b = world.start("peer", "b", "--initial-peers", world.address(), "--seed-seconds", "0")
    monitor = world.start("monitor", "m", "--initial-peers", world.address(), "--console", "plain")
    a.wait_for("round 2: 2 peers", SECONDS)

    world.amend("--run.round.total", "16", "--run.train.lr", "5e-3")
    assert "round.total: 40 -> 16" in capsys.readouterr().out
    in_force = "revision 1 of the run's settings is in force: round.total 40 -> 16, train.lr 0.01 -> 0.005"
    for peer in (a, b, monitor):
        peer.wait_for(in_force, SECONDS)
    assert b.end(SECONDS).code == 0, b.stderr()
    assert monitor.end(SECONDS).code == 0, monitor.stderr()
    assert a.end(SECONDS).code == 0, a.stderr()
    for name in "ab":
        body = last_certificate(tmp_path / name)
        assert body is not None and body.round == 16 and body.revision.number == 1
    events = [json.loads(line) for line in (tmp_path / "m" / "metrics.jsonl").read_text().splitlines()]
    assert [event["total_rounds"] for event in events if event["kind"] in ("run", "amendment")] == [40, 16]

    with pytest.raises(ConfigError, match="round 16 is committed; set it to 17 or more"):
        world.amend("--run.round.total", "15")
    wrong = world.start("peer", "a", "--resume", "--run.round.total", "18")
    assert wrong.end(SECONDS).code == 2 and "spes amend" in wrong.stderr()
    world.amend("--run.round.total", "18")
    a = world.start("peer", "a", "--resume", "--config", settings, "--seed-seconds", "0")
    a.wait_for("others join with", SECONDS)
    b = world.start("peer", "b", "--resume", "--initial-peers", world.address(), "--seed-seconds", "0")
    for peer in (a, b):
        assert peer.end(SECONDS).code == 0, peer.stderr()
        assert any("revision 2 of the run's settings is in force: round.total 16 -> 18" in line for line in peer.lines)
    body = last_certificate(tmp_path / "b")
    assert body is not None and body.round == 18 and body.revision.number == 2
