"""What voters have signed about the last rounds, and what follows from it: proofs against them, and who has left."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from spes_p2p.swarm.certificate import Body, Goodbye, Keys, Vote
from spes_p2p.swarm.proposal import Entry, Proof, contradiction

log = logging.getLogger(__name__)

WATCHED_ROUNDS = 8
"""Rounds back of which contradictory statements are looked for."""
MAX_KEPT = 64
"""Statements of one voter about one round that are kept."""


class Statements:
    """Votes and entries of the last rounds, the proofs in them, and goodbyes.

    Args:
        keys: The public keys of those that sign.
        proofs: Those that an earlier process has kept.
    """

    def __init__(self, keys: Keys, proofs: Iterable[Proof]) -> None:
        self.proofs = {proof.vote.peer_id: proof for proof in proofs}
        """Proofs against voters, by peer."""
        self._keys = keys
        self._kept: dict[int, dict[str, list[Vote | Entry]]] = {}
        """Statements by round and peer."""
        self._goodbyes: dict[str, Goodbye] = {}
        self._entered: dict[str, tuple[int, int]] = {}
        """Round and attempt of each voter's newest entry."""

    def counts(self, proof: Proof, last: Body) -> bool:
        """Return whether a proof is of the last rounds."""
        newest = last.round + 1
        return newest - WATCHED_ROUNDS < proof.vote.round <= newest  # guard: return True

    def open_round(self, last: Body) -> None:
        """Forget what is of a round long ago."""
        self.proofs = {peer: proof for peer, proof in self.proofs.items() if self.counts(proof, last)}
        self._kept = {round: of for round, of in self._kept.items() if round > last.round + 1 - WATCHED_ROUNDS}

    def add(self, statement: Vote | Entry, last: Body) -> Proof | None:
        """Keep a voter's statement; return the proof that it completes."""
        peer, newest = statement.peer_id, last.round + 1
        if isinstance(statement, Entry) and peer in last.voters:
            self._entered[peer] = max(self._entered.get(peer, (0, 0)), (statement.round, statement.attempt))
        is_recent = newest - WATCHED_ROUNDS < statement.round <= newest
        if peer in self.proofs or peer not in last.voters or not is_recent:  # guard: never
            return None
        kept = self._kept.setdefault(statement.round, {}).setdefault(peer, [])
        if any(each.signed_part == statement.signed_part for each in kept) or not statement.is_signed(self._keys):
            return None
        for earlier in kept:
            vote, other = (earlier, statement) if isinstance(earlier, Vote) else (statement, earlier)
            if isinstance(vote, Vote) and contradiction(vote, other):
                return self.convict(Proof(vote=vote, other=other), last)
        kept.append(statement)
        del kept[:-MAX_KEPT]
        return None

    def convict(self, proof: Proof, last: Body) -> Proof | None:
        """Keep a proof against a voter; return None if it proves nothing new."""
        guilty = proof.vote.peer_id
        # Strangers can contradict themselves as often as they like.
        if guilty in self.proofs or guilty not in last.voters:  # guard: or guilty not in last.voters ->
            return None
        if not self.counts(proof, last) or not proof.convicts(self._keys):
            return None
        log.warning("%s has signed two statements that contradict each other", guilty)
        self.proofs[guilty] = proof
        return proof

    # ------------------------------------------------------------------ goodbyes

    def take_goodbye(self, goodbye: Goodbye, last: Body) -> None:
        """Keep a voter's goodbye."""
        is_new = goodbye.peer_id in last.voters and goodbye.counts(last.run, last.round + 1)
        if is_new and goodbye.is_signed(self._keys):  # guard: and goodbye.is_signed(self._keys) ->
            self._goodbyes[goodbye.peer_id] = goodbye

    def goodbyes(self, last: Body) -> dict[str, Goodbye]:
        """Return the goodbyes that count in the open round, by voter."""
        counted = [each for each in self._goodbyes.values() if each.counts(last.run, last.round + 1)]
        self._goodbyes = {each.peer_id: each for each in counted if not self.is_over(each)}
        return self._goodbyes

    def is_over(self, goodbye: Goodbye) -> bool:
        """Return whether a peer has entered a meeting after its goodbye."""
        return self._entered.get(goodbye.peer_id, (0, 0)) > (goodbye.round, goodbye.attempt)
