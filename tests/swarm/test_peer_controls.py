"""Three real peers, of which one pauses by `spes ctl`: the others lose no round and no version, and it counts again.

One story, told by the fixture: `c` pauses until the others train its slots, and resumes; it finishes; `b` leaves.
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from forked_commands import Ended, Forked, ForkServer, slots_in
from peer_processes import MARK, commands_in, write_corpus, write_settings

pytestmark = pytest.mark.full  # about a minute
SLOTS = {0, 1, 2, 3}
LEASE_SECONDS, HEARTBEAT_SECONDS = 12.0, 1.5
ROUND = {"mode": "tokens", "tokens": 10**9, "min_seconds": 0.5, "max_seconds": 1.0, "total": 500}
REPORT = r"round (\d+): (\d+) peers, loss (\S+), .* slots ([\d,-]+|none);"


class Report(NamedTuple):
    """A line of a peer's log."""

    round: int
    num_peers: int
    has_trained: bool
    slots: frozenset[int]


def reports(peer: Forked) -> list[Report]:
    found = [match.groups() for match in peer.matches(REPORT)]
    return [Report(int(r), int(n), x != "none", frozenset(slots_in(s))) for r, n, x, s in found]


@dataclass
class Story:
    """What happened.

    Attributes:
        peers: The commands by name.
        paused: The first and the last round that the others committed in the pause.
        counted: The first round after the pause that counted steps of `c`.
        idle: What `c` reported during its pause, from the second round on.
        told: What `spes ctl` printed, by what was asked.
        taken: Slots of the others when `c` had given its own up.
        complaints: What the others lacked of the newest versions until the first peer ended.
        codes: Exit codes by name.
        events: The events on the page of `c` after its last resume.
    """

    peers: dict[str, Forked] = field(default_factory=dict)
    paused: tuple[int, int] = 0, 0
    counted: int = 0
    idle: list[Report] = field(default_factory=list)
    told: dict[str, Ended] = field(default_factory=dict)
    taken: frozenset[int] = frozenset()
    complaints: list[re.Match[str]] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)


class Teller:
    """Lets the story happen."""

    def __init__(self, folder: Path, mark: str, peer_words: Callable[..., list]) -> None:
        self.folder, self.peer_words, self.story = folder, peer_words, Story()
        self.server = ForkServer(folder / "results", {**os.environ, MARK: mark})
        self.corpus = write_corpus(folder / "corpus.jsonl")
        times = {"lease_seconds": LEASE_SECONDS, "heartbeat_seconds": HEARTBEAT_SECONDS}
        self.settings = write_settings(folder / "run.yaml", round={**ROUND, **times})

    def start(self, name: str, *words: str | Path) -> Forked:
        flags = ["--run-id", "paused", "--text", self.corpus, "--max-slots", "2", "--seed-seconds", "0", *words]
        peer = self.server.start("peer", self.peer_words(name, *flags)[1:])
        self.story.peers[name] = peer
        return peer

    def ask(self, name: str, *words: str) -> Ended:
        ended = self.server.start("ctl", [*words, "--output", self.folder / name]).end(60)
        self.story.told[" ".join(words)] = ended
        return ended

    def newest(self, name: str) -> int:
        return reports(self.story.peers[name])[-1].round

    def wait_until(self, name: str, condition: Callable[[], object], seconds: float = 90.0) -> None:
        """Wait, report by report of a peer, for a condition."""
        peer = self.story.peers[name]
        for _ in range(200):
            if condition():
                return
            peer.wait_for(REPORT, seconds, after=len(peer.lines))
        raise AssertionError(peer.tail())

    def tell(self) -> None:
        self.start("a", "--config", self.settings).wait_for(REPORT)
        address = (self.folder / "a" / "address").read_text().strip()
        for name in "bc":
            self.start(name, "--initial-peers", address)
        for name in "abc":
            self.story.peers[name].wait_for(r"round \d+: 3 peers")
        self.pause()
        self.story.complaints = [m for name in "ab" for m in self.story.peers[name].matches("could not fetch")]
        self.end()

    def pause(self) -> None:
        story, c = self.story, self.story.peers["c"]
        assert self.ask("c", "pause").code == 0
        first = self.newest("a")
        self.wait_until("a", lambda: self.newest("a") >= first + 4 and self.is_handed_over())
        story.paused = first, self.newest("a")
        self.ask("c", "status")
        story.idle = [report for report in reports(c) if report.round > first + 1]
        seen = len(reports(c))
        assert self.ask("c", "resume").code == 0
        self.wait_until("c", lambda: any(report.has_trained for report in reports(c)[seen:]))
        address = (self.folder / "c" / "page").read_text().strip()
        with urllib.request.urlopen(f"{address}state.json", timeout=30) as answer:
            story.events = [words for _, words in json.load(answer)["events"]]
        story.counted = next(report.round for report in reports(c)[seen:] if report.has_trained)

    def is_handed_over(self) -> bool:
        """Check whether the others train all slots."""
        self.story.taken = reports(self.story.peers["a"])[-1].slots | reports(self.story.peers["b"])[-1].slots
        return self.story.taken == SLOTS

    def end(self) -> None:
        self.ask("c", "finish")
        self.story.codes["c"] = self.story.peers["c"].end(90).code
        self.ask("b", "leave")
        self.story.codes["b"] = self.story.peers["b"].end(90).code


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("controls")
    with commands_in(folder) as commands:
        teller = Teller(folder, commands.mark, commands.peer_words)
        try:
            teller.tell()
        finally:
            for name, peer in teller.story.peers.items():
                print(f"----- {name}\n{peer.tail(120)}")
            print(teller.story.paused, teller.story.counted)
        yield teller.story


def test_the_others_lose_no_round_while_a_peer_is_paused(story: Story) -> None:
    first, last = story.paused
    for name in "ab":
        told = [report.round for report in reports(story.peers[name])]
        assert [r for r in told if first < r <= last] == list(range(first + 1, last + 1)), name
        assert not story.peers[name].matches(r"dropped (?!.*no member trained)"), name


def test_a_paused_peer_meets_the_others_without_slots_and_steps(story: Story) -> None:
    assert len(story.idle) >= 2
    for report in story.idle:
        assert not report.has_trained and report.num_peers == 3 and not report.slots


def test_others_train_its_slots_from_their_newest_versions(story: Story) -> None:
    assert story.taken == SLOTS
    assert "paused: until it is resumed; other peers may take its slots" in story.told["status"].stdout
    assert not story.complaints


def test_logs_and_the_page_tell_of_who_comes_and_of_pauses(story: Story) -> None:
    assert len(story.peers["a"].matches(r"peer …\w{6} joined; its slots: ")) >= 2
    told = [words for words in story.events if words.startswith("this peer: ")]
    assert [words.split(";")[0] for words in told][-2:] == ["this peer: paused", "this peer: training"]


def test_a_resumed_peer_counts_again_within_two_rounds(story: Story) -> None:
    assert story.counted - story.paused[1] <= 3, (story.paused, story.counted)  # the round under way, and two more


def test_finish_and_leave_end_a_peer_with_its_slots_handed_over(story: Story) -> None:
    assert story.codes == {"b": 130, "c": 0}
    assert story.peers["c"].matches("finished as asked")
    for name in "bc":
        assert not story.peers[name].matches("nobody has taken the newest slot"), name
        assert not re.search("Traceback|this is a bug", story.peers[name].stderr()), name
