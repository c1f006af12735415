"""Random histories: no fork, nothing lost, no run that stands; and faults where a rule is missing."""

import pytest
from lanes import sample

from benchmarks.histories import BROKEN, history_of
from benchmarks.history_liars import LIARS
from benchmarks.history_peers import Crash, Node
from spes_p2p.swarm import agreement, proposal
from spes_p2p.swarm.voter import Voter

MOST = 30
"""Histories within which a broken rule must show."""
CASES = [("honest", lie, number) for number, lie in enumerate(sorted(LIARS))] + [("twice", "", 1), ("set_back", "", 2)]


@pytest.mark.parametrize(("kind", "lie", "seed"), sample(CASES, [CASES[3], CASES[10], CASES[-2]]))
def test_a_history_ends_on_one_branch_with_all_that_was_certified(kind, lie, seed):
    found = history_of((seed, kind, lie))
    assert not {name: found[name] for name in BROKEN[kind] if found[name]}
    assert found["rounds"] > 3


def without_newest_vote(monkeypatch):
    """Later attempts are free to make another body than the one that was voted for."""
    for module in (agreement, proposal):
        monkeypatch.setattr(module, "newest_vote", lambda entries: proposal.NO_VOTE)


def without_promise(monkeypatch):
    """Voters vote in attempts before the one that they have entered."""
    refusal = Voter.refusal

    def forgetful(self, *args):
        promises = self.promises
        self.promises = promises.model_copy(update={"attempt": None})
        try:
            return refusal(self, *args)
        finally:
            self.promises = promises

    monkeypatch.setattr(Voter, "refusal", forgetful)


def without_disk(monkeypatch):
    """Promises are not written, so a crash forgets them unnoticed."""
    start = Node.start

    def save(self, promises):
        if self.world.rng.random() < self.crash_share:
            raise Crash

    def begin(self):
        self.is_new, self.disk = True, None
        start(self)

    monkeypatch.setattr(Node, "_save", save)
    monkeypatch.setattr(Node, "start", begin)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("remove", [without_newest_vote, without_promise, without_disk])
def test_histories_notice_that_a_rule_is_missing(monkeypatch, remove):
    remove(monkeypatch)
    found = (history_of((seed, "honest", ("hides", "partial")[seed % 2])) for seed in range(MOST))
    assert any(each["forks"] or each["wrongly_convicted"] for each in found)
