"""Real peers on loopback: one joins late, one is killed, all are stopped, and the run goes on where it was.

One story, told by the fixture, since every peer takes seconds to start: `a` founds a run and trains alone; `b` and `c`
join in the middle of it, knowing an address and a name; one that holds a slot alone is killed; the survivors are
interrupted one after the other, and then both started again.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from forked_commands import Forked, ForkServer, slots_in
from peer_processes import MARK, Commands, commands_in, last_certificate, saved_state, write_corpus, write_settings

from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.node import ListenConfig, Node
from spes_p2p.swarm.records import Claim

SLOTS = {0, 1, 2, 3}
# Rounds end by the clock; there are more than the story can last for. A lease outlives what a peer that leaves needs.
ROUND = {"mode": "tokens", "tokens": 10**9, "min_seconds": 0.5, "max_seconds": 1.0, "total": 500}
LEASE_SECONDS, HEARTBEAT_SECONDS = 10.0, 1.5


class Report(NamedTuple):
    """A line of a peer's log."""

    round: int
    num_peers: int
    digest: str
    slots: frozenset[int]


REPORT = r"round (\d+): (\d+) peers, .* shared (\w+), slots ([\d,-]+|none);"


def reports(peer: Forked) -> list[Report]:
    found = [match.groups() for match in peer.matches(REPORT)]
    return [Report(int(r), int(n), d, frozenset(slots_in(s))) for r, n, d, s in found]


@dataclass
class Story:
    """What happened.

    Attributes:
        peers: All commands by name; those started again have a `2` behind it.
        met: The first round that all three took part in, as each reported it.
        victim: Who was killed.
        orphans: Slots that only it held.
        claims: Of both survivors, after the first of them was interrupted, by name.
        codes: Exit codes by name.
        saved: Each survivor's checkpoint when it had stopped, and once it had trained on.
        addresses: The first survivor's address, before and after its restart.
        left: Processes that outlived the interrupted peers.
    """

    peers: dict[str, Forked] = field(default_factory=dict)
    met: dict[str, Report] = field(default_factory=dict)
    victim: str = ""
    orphans: set[int] = field(default_factory=set)
    claims: dict[str, Claim | None] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    saved: dict[str, list[dict]] = field(default_factory=dict)
    addresses: tuple[str, str] = ("", "")
    left: list[psutil.Process] = field(default_factory=list)

    @property
    def survivors(self) -> list[str]:
        return [name for name in "abc" if name != self.victim]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("life")
    with commands_in(folder) as commands:
        story = Story()
        try:
            Teller(commands, folder, story).tell()
        finally:
            for name, peer in story.peers.items():
                print(f"----- {name}\n{peer.tail()}")
        yield story


class Teller:
    """Lets the story happen."""

    def __init__(self, commands: Commands, folder: Path, story: Story) -> None:
        self.commands, self.folder, self.story = commands, folder, story
        self.corpus = write_corpus(folder / "corpus.jsonl")
        times = {"lease_seconds": LEASE_SECONDS, "heartbeat_seconds": HEARTBEAT_SECONDS}
        self.server = ForkServer(folder / "results", {**os.environ, MARK: commands.mark})
        self.settings = write_settings(folder / "run.yaml", round={**ROUND, **times})

    def tell(self) -> None:
        self.gather()
        self.kill()
        self.interrupt()
        self.restart()

    def start(self, name: str, *words: str | Path) -> Forked:
        flags = ["--run-id", "life", "--text", self.corpus, "--max-slots", "2", "--seed-seconds", "0", *words]
        return self.server.start("peer", self.commands.peer_words(name.removesuffix("2"), *flags)[1:])

    def address(self, name: str) -> str:
        return (self.folder / name / "address").read_text().strip()

    def gather(self) -> None:
        peers = self.story.peers
        peers["a"] = self.start("a", "--config", self.settings)
        peers["a"].wait_for(REPORT)
        for name in "bc":
            peers[name] = self.start(name, "--initial-peers", self.address("a"))
        for name in "abc":
            peers[name].wait_for(r"round \d+: 3 peers")
        while not self.story.met:
            told = {name: {report.round: report for report in reports(peers[name])} for name in "abc"}
            common = [r for r in set.intersection(*map(set, told.values())) if told["a"][r].num_peers == 3]
            if common:
                self.story.met = {name: told[name][min(common)] for name in "abc"}
            else:
                peers["a"].wait_for(REPORT, after=len(peers["a"].lines))
        while not all((last := last_certificate(self.folder / name)) and len(last.voters) == 3 for name in "abc"):
            peers["a"].wait_for(REPORT, after=len(peers["a"].lines))

    def kill(self) -> None:
        story = self.story
        holders = Counter(slot for name in "abc" for slot in reports(story.peers[name])[-1].slots)
        alone = {slot for slot, count in holders.items() if count == 1}
        # The founder's death proves more: nobody needs it any more.
        story.victim = next(name for name in "abc" if reports(story.peers[name])[-1].slots & alone)
        story.orphans = set(reports(story.peers[story.victim])[-1].slots & alone)
        lines = {name: len(story.peers[name].lines) for name in story.survivors}
        story.peers[story.victim].signal(signal.SIGKILL)
        story.codes[story.victim] = story.peers[story.victim].end(60).code
        for name in story.survivors:
            story.peers[name].wait_for(r"round \d+: 2 peers", after=lines[name])
        last = reports(story.peers[story.victim])[-1].round
        while not self.covered() or any(reports(story.peers[n])[-1].round <= last + 1 for n in story.survivors):
            first = story.peers[story.survivors[0]]
            first.wait_for(REPORT, 4 * LEASE_SECONDS, after=len(first.lines))

    def covered(self) -> bool:
        return set().union(*(reports(self.story.peers[name])[-1].slots for name in self.story.survivors)) == SLOTS

    def interrupt(self) -> None:
        story = self.story
        first, second = story.survivors
        trees = [p for n in (first, second) for p in psutil.Process(story.peers[n].pid).children(recursive=True)]
        story.peers[first].signal(signal.SIGINT)
        story.codes[first] = story.peers[first].end(60).code
        self.read_claims(self.address(second))
        story.peers[second].signal(signal.SIGINT)
        story.codes[second] = story.peers[second].end(60).code
        story.left = psutil.wait_procs(trees, 10)[1]
        for name in story.survivors:
            story.saved[name] = [saved_state(self.folder / name)]

    def read_claims(self, address: str) -> None:
        node = Node(
            Identity(self.folder / "reader.key"), "life", initial_peers=[address], listen=ListenConfig(client_mode=True)
        )
        try:
            claims = node.read(Claim)
        finally:
            node.close()
        for name in self.story.survivors:
            self.story.claims[name] = claims.get(Identity(self.folder / name / "identity.key").peer_id)

    def restart(self) -> None:
        story = self.story
        # One trains alone: the other one finds it where it has come to, or ahead of itself. The first to stop may have
        # served for so long that the second has gone on, with versions that it alone has.
        first, second = sorted(story.survivors, key=lambda name: -story.saved[name][0]["round"])
        before = self.address(first)
        story.peers[f"{first}2"] = one = self.start(first, "--resume", "--alone")
        one.wait_for("others join with")
        story.addresses = before, self.address(first)
        newest = max(before["round"] for [before] in story.saved.values())
        while not any(report.round > newest for report in reports(one)):
            one.wait_for(REPORT, after=len(one.lines))
        story.peers[f"{second}2"] = two = self.start(second, "--resume", "--initial-peers", self.address(first))
        for peer in (one, two):
            peer.wait_for(r"round \d+: 2 peers")
        for name, peer in ((first, one), (second, two)):
            peer.signal(signal.SIGINT)
            story.codes[f"{name}2"] = peer.end(60).code
            story.saved[name].append(saved_state(self.folder / name))
        self.server.close()
        self.commands.wait_until_gone()


def test_a_latecomer_takes_part_in_a_round_knowing_only_an_address_and_the_runs_name(story: Story) -> None:
    assert {report.num_peers for report in story.met.values()} == {3}
    assert len({report.round for report in story.met.values()}) == 1
    assert story.met["a"].round > 1, "the others came in the middle of the run"


def test_all_members_of_a_round_report_the_same_shared_digest(story: Story) -> None:
    assert len({report.digest for report in story.met.values()}) == 1
    told = {name: {r.round: r for r in reports(story.peers[name])} for name in "abc"}
    for round in set(told["a"]) & set(told["b"]):
        if told["a"][round].num_peers == 3 == told["b"][round].num_peers:
            assert told["a"][round].digest == told["b"][round].digest


def test_every_slot_is_held_once_all_are_there(story: Story) -> None:
    assert set().union(*(report.slots for report in story.met.values())) == SLOTS


def test_the_others_go_on_when_a_peer_is_killed(story: Story) -> None:
    assert story.codes[story.victim] == -signal.SIGKILL
    last = reports(story.peers[story.victim])[-1].round
    for name in story.survivors:
        rounds = [report.round for report in reports(story.peers[name])]
        assert rounds[-1] > last + 1
        assert all(later > earlier for earlier, later in itertools.pairwise(rounds))


def test_a_dead_peers_orphans_are_adopted_by_the_survivors(story: Story) -> None:
    assert story.orphans
    held = set().union(*(reports(story.peers[name])[-1].slots for name in story.survivors))
    assert story.orphans <= held
    adopted = " ".join(match[0] for name in story.survivors for match in story.peers[name].matches("adopting slots .*"))
    assert adopted, "who adopts says so"


def test_ctrl_c_ends_a_peer_with_130_and_leaves_no_process(story: Story) -> None:
    names = [*story.survivors, *(f"{name}2" for name in story.survivors)]
    assert {name: story.codes[name] for name in names} == dict.fromkeys(names, 130)
    assert not story.left


def test_ctrl_c_gives_the_slots_back_before_the_lease_ends(story: Story) -> None:
    first, second = story.survivors
    assert story.claims[second] is not None and story.claims[second].slots
    assert story.claims[first] is None or story.claims[first].slots == ()


def test_a_resumed_peer_goes_on_with_its_round_its_slots_its_steps_and_its_data(story: Story) -> None:
    for name in story.survivors:
        before, after = story.saved[name]
        first = reports(story.peers[f"{name}2"])[0]
        assert first.round > before["round"]
        assert after["round"] > before["round"] and after["steps"] > before["steps"]
        # Every step takes four sequences of sixteen tokens, so none was skipped and none came twice.
        for saved in (before, after):
            assert saved["total_tokens"] == 4 * 16 * saved["steps"]
            if saved["data"]["epoch"] == 0:
                assert saved["data"]["position"] == 4 * saved["steps"]
    assert all(before["data"]["order_seed"] == after["data"]["order_seed"] for before, after in story.saved.values())


def test_a_resumed_peer_listens_where_it_did(story: Story) -> None:
    before, after = story.addresses
    assert before == after


def test_peers_that_all_stopped_go_on_together_from_the_newest_round(story: Story) -> None:
    first, second = (reports(story.peers[f"{name}2"]) for name in story.survivors)
    together = {r.round: r.digest for r in first if r.num_peers == 2}
    assert together
    newest = max(before["round"] for before, _ in story.saved.values())
    assert min(together) > newest
    for report in second:
        assert together.get(report.round, report.digest) == report.digest


def test_resumed_peers_hold_the_slots_they_had(story: Story) -> None:
    saved = {name: set(story.saved[name][0]["slots"]) for name in story.survivors}
    orphans = SLOTS.difference(*saved.values())  # two that adopt at once may leave one, which is adopted at once again
    for name in story.survivors:
        held = reports(story.peers[f"{name}2"])[0].slots
        assert held == saved[name] or (held - saved[name] and held - saved[name] <= orphans), (held, saved)
