"""Sparse deltas, which are mostly of earlier rounds: unequal honest peers are no liars, and liars do little."""

import pytest
import torch
from plain_average import Entry, GroupMean

from spes_p2p.codecs.format import Segment
from spes_p2p.swarm.averaging.encoding import Contribution, DeltaEncoding
from spes_p2p.swarm.averaging.partition import GroupPlan
from spes_p2p.swarm.names import SHARED
from spes_p2p.swarm.roster import Member, Roster
from tests.support.agreement import last_body

NUMEL = 40_000
PEERS = [f"Qm{'P' * 42}{letter}{letter}" for letter in "ABCDEFGH"]
LIAR = 2
UNEQUAL, EQUAL = [100, 200, 400, 800, 200, 400], [400] * 6


class Laboratory:
    """Peers that average in one process and keep what they have not sent, round after round.

    A delta is a drift that all peers and rounds share, what all peers share in one round, and noise; it grows with
    tokens as steps of a noisy gradient do. Its elements have magnitudes of their own.
    """

    def __init__(self, codec, tokens, seed, shared=0.3, voters=PEERS):
        self.shared, self.tokens, self.last = shared, tokens, last_body(voters)
        self.segments = {"shared": (Segment(NUMEL, codec),)}
        self.encodings, self.errors = [DeltaEncoding(self.segments) for _ in tokens], [{} for _ in tokens]
        self._generator = torch.Generator().manual_seed(seed)
        self._size, self._drift = self.draw().exp(), self.draw()
        self.position, self.true, self.accused, self.clipped = torch.zeros(NUMEL), torch.zeros(NUMEL), {}, 0

    def draw(self):
        return torch.randn(NUMEL, generator=self._generator)

    def member(self, peer, tokens):
        start = {"round": self.last.round, "previous": self.last.digest, "slots": (), "tokens_per_second": 1.0}
        return Member(peer_id=peer, tokens=tokens, **start, ready_at=1.0, sync_seconds=0.0)

    def round(self, attack=None, **tokens_of):
        """Average once; `attack` changes what the liar brings, and `peer_1=10` the tokens of a peer."""
        common, met, honest = self._drift + self.draw(), {}, []
        for place, (peer, encoding) in enumerate(zip(PEERS, self.encodings, strict=False)):
            tokens = tokens_of.get(f"peer_{place}", self.tokens[place])
            delta = self._size * (self.shared * tokens * common + tokens**0.5 * self.draw())
            left = encoding.kept().get(SHARED)
            vector = delta if left is None else delta + left.whole()
            honest.append((delta, tokens) if attack is None or place != LIAR else (delta, 0))
            if attack is not None and place == LIAR:
                vector = attack(vector)
            member, encoded = encoding.encode(Contribution(self.member(peer, tokens), {SHARED: vector}))
            met[peer] = Entry(member, encoded, encoding, self.errors[place])
        roster = Roster((entry.member for entry in met.values()), self.last)
        plan = GroupPlan.in_roster(roster, roster.groups[SHARED], self.encodings[0].format(SHARED, self.last.round + 1))
        work = GroupMean(plan, SHARED, met)
        assert not work.reduce()
        for place, peer in enumerate(met):
            self.encodings[place].commit([SHARED])
            start, error = work.residuals[peer]
            self.errors[place] = {SHARED: torch.zeros(NUMEL)}
            self.errors[place][SHARED][start : start + len(error)] = error
            auditor = work.auditors[peer]
            self.clipped += sum(auditor.clipped.values())
            for other, seen in auditor.evidence().items():
                if attack is None or place != LIAR:
                    self.accused.setdefault(PEERS.index(other), seen.reason)
        self.position += plan.format.decode(work.mean)
        self.true += sum(delta * tokens for delta, tokens in honest) / sum(tokens for _, tokens in honest)

    def behind(self):
        """How far the common position is from the sum of what the honest trained, as a share of that."""
        return ((self.position - self.true).norm() / self.true.norm()).item()


def run(lab, attack=None, rounds=20, paused=(12, 16)):
    for round in range(rounds):
        lab.round(attack if round >= 8 else None, **({"peer_1": 10} if round in paused else {}))
    return lab


# Of deltas with less in common than 0.03, no direction can be seen at all.
@pytest.mark.parametrize(
    ("codec", "shared", "tokens"),
    [
        *(("sparse-8", 0.03, UNEQUAL), ("sparse-8", 0.03, EQUAL), ("sparse-8", 0.3, EQUAL)),
        *(("sparse-32", 0.3, UNEQUAL), ("sparse-32", 0.3, UNEQUAL[:4]), ("sparse-128", 0.03, UNEQUAL)),
    ],
    ids=str,
)
def test_unequal_honest_peers_of_which_one_pauses_are_no_liars(codec, shared, tokens, seed):
    lab = run(Laboratory(codec, tokens, seed, shared))
    assert not lab.accused and not lab.clipped
    assert lab.behind() < {"sparse-8": 0.35, "sparse-32": 0.5, "sparse-128": 0.75}[codec]


ATTACKS = {
    "sign_flip": lambda vector: -vector,
    "scale": lambda vector: 50.0 * vector,
    "both": lambda vector: -10.0 * vector,
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("codec", ["sparse-8", "sparse-32"])
def test_one_liar_of_six_is_seen_and_moves_little_until_it_is_left_out(codec, attack, seed):
    honest, attacked = run(Laboratory(codec, UNEQUAL, seed)), run(Laboratory(codec, UNEQUAL, seed), attack)
    assert attacked.accused.keys() == {LIAR}
    assert attacked.behind() < honest.behind() + 0.25, "for twelve rounds; two are enough to leave it out"


def test_of_three_a_liar_is_cut_to_four_times_the_length_of_ones_own(seed):
    honest, attacked = (Laboratory("sparse-32", EQUAL[:3], seed) for _ in range(2))
    against = -20.0 * 0.3 * EQUAL[0] * attacked._size * attacked._drift
    run(honest, rounds=12, paused=())
    run(attacked, lambda vector: against, rounds=12, paused=())
    assert attacked.clipped and not honest.clipped
    assert (attacked.position - honest.position).norm() < 2 * honest.position.norm(), "uncut it would be 20 / 3"


def test_a_newcomer_that_reduces_cuts_nobodys_vector(seed):
    """Its own is shorter, as it has nothing of earlier rounds."""
    lab = run(Laboratory("sparse-32", EQUAL[:4], seed), rounds=12, paused=())
    lab.encodings[1] = DeltaEncoding(lab.segments)
    lab.errors[1] = {}
    run(lab, rounds=6, paused=())
    assert not lab.clipped and not lab.accused


def test_a_guest_counts_beside_a_voter_that_pauses(seed):
    """A voter's old residual is long, and its tokens are few: the guest is not short beside it."""
    lab = Laboratory("sparse-32", EQUAL[:2], seed, voters=PEERS[1:2])
    assert not run(lab).clipped
