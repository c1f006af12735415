"""A closed run among real peers: whom its founder has invited takes part, and whoever comes without does not count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from peer_processes import Command, Commands, commands_in, write_corpus, write_settings

from spes_p2p.config import JoinLink

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

SECONDS = 90.0
BARGE_IN = """
import runpy
import spes_p2p.peer.joining

guest_list = spes_p2p.peer.joining.guest_list


def blind(*arguments):
    guests = guest_list(*arguments)
    guests.is_closed = False
    return guests


spes_p2p.peer.joining.guest_list = blind
runpy.run_path("peers/run_peer.py", run_name="__main__")
"""


class Closed:
    """A closed run that waits for its second peer."""

    def __init__(self, commands: Commands, folder: Path) -> None:
        self.commands, self.folder = commands, folder
        settings = write_settings(folder / "settings.yaml", round={"total": 40, "min_peers": 2})
        words = ["--run-id", "closed", "--config", settings, "--run.invite-only", *self.text]
        self.founder = commands.peer("founder", *words)
        self.address = self.founder.wait_for(r"--initial-peers (/ip4/\S+)", SECONDS)[1]

    @property
    def text(self) -> list[str | Path]:
        return ["--text", self.folder / "corpus.jsonl"]

    def words(self, name: str) -> list[str | Path]:
        joins = ["--run-id", "closed", "--initial-peers", self.address, *self.text]
        return [*self.commands.peer_words(name), *joins]  # without the link for friends

    def invite(self) -> str:
        command = self.commands.start("-m", "spes_p2p", "invite", self.folder / "founder")
        assert command.end(SECONDS) == 0, command.tail()
        return JoinLink.parse(command.lines[0]).invite


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Closed]:
    folder = tmp_path_factory.mktemp("closed")
    write_corpus(folder / "corpus.jsonl")
    with commands_in(folder) as commands:
        yield Closed(commands, folder)


def refusal(peer: Command) -> str:
    assert peer.end(SECONDS) == 2, peer.tail()
    return next(line for line in peer.lines if line.startswith("error: "))


def test_whoever_has_no_invite_is_told_whom_to_ask(closed: Closed) -> None:
    words = closed.words("uninvited")
    assert "takes only invited peers; ask Qm" in refusal(closed.commands.start(*words))
    fields = closed.invite().split(".")
    wrong = ".".join([*fields[:3], "1", *fields[4:]])  # it says that it is one to vote
    assert "did not sign for this founding" in refusal(closed.commands.start(*words, SPES_INVITE=wrong))


def test_the_invited_take_part_and_whoever_barges_in_does_not(closed: Closed) -> None:
    script = closed.folder / "barge_in.py"
    script.write_text(BARGE_IN)
    _, *words = closed.words("rogue")
    rogue = closed.commands.start(script, *words, PYTHONPATH=".")
    rogue.wait_for("others join with", SECONDS)
    closed.founder.wait_for("this run is closed: Qm.* has no invite, and is not counted", SECONDS)
    guest = closed.commands.start(*closed.words("guest"), SPES_INVITE=closed.invite())
    guest.wait_for(r"round \d+: 2 peers", SECONDS)
    closed.founder.wait_for(r"round \d+: refused \w+: Qm\w+ has no invite", SECONDS)
    assert not closed.founder.matches(r"round \d+: 3 peers")
