"""Random histories with certificates: no fork, nothing lost, no run that stands; and faults where a rule is missing."""

import pytest
from lanes import sample

from benchmarks import histories
from benchmarks.histories import BROKEN, LIES, history
from benchmarks.history_nodes import Crash, Node
from spes_p2p.swarm import certificate_checks, decision
from spes_p2p.swarm.votes import Voter

MOST = 30
"""Histories within which a broken rule must show."""


@pytest.mark.parametrize("seed", sample(range(24), range(8)))  # each lie once; more of them are statistics
def test_a_history_ends_on_one_branch_with_all_that_was_certified(monkeypatch, seed):
    lies = [lie for lie in LIES if lie]
    monkeypatch.setattr(histories, "LIES", (lies[seed % len(lies)],))
    found = history(seed)
    assert not {name: found[name] for name in BROKEN if found[name]}
    assert found["rounds"] > 3


def without_newest_vote(monkeypatch):
    """Later attempts are free to make another body than the one that was voted for."""
    for module in (certificate_checks, decision):
        monkeypatch.setattr(module, "newest_voted", lambda give_ups: "")


def without_promise(monkeypatch):
    """Voters vote in attempts that they have given up."""
    check = Voter._check

    def forgetful(self, proposal, own):
        ballot = self.ballot
        self.ballot = ballot.model_copy(update={"gave_up": None})
        try:
            check(self, proposal, own)
        finally:
            self.ballot = ballot

    monkeypatch.setattr(Voter, "_check", forgetful)


def without_disk(monkeypatch):
    """Ballots are not written, so a crash forgets them."""

    def save(self, ballot):
        if self.world.rng.random() < self.crash_share:
            raise Crash

    monkeypatch.setattr(Node, "_save", save)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("remove", [without_newest_vote, without_promise, without_disk])
def test_histories_notice_that_a_rule_is_missing(monkeypatch, remove):
    monkeypatch.setattr(histories, "LIES", ("hides", "partial"))
    remove(monkeypatch)
    found = (history(seed) for seed in range(MOST))
    assert any(each["forks"] or each["wrongly_convicted"] for each in found)
