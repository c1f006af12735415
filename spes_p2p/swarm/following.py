"""The certificates that a peer follows: as they come, by asking for missing ones, and of a fork the better branch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import zip_longest

from spes_p2p.swarm.certificate import (
    MAX_SENT,
    Body,
    Certificate,
    Certificates,
    Keys,
    Point,
    Question,
    check_certificate,
    check_skip,
    preferred,
)
from spes_p2p.swarm.chain import Chain
from spes_p2p.swarm.part import Rules, Wire

log = logging.getLogger(__name__)

MET_SECONDS = 0.5
"""Time between two questions because of statements about rounds that are not known here."""
MIN_SECONDS_APART = 0.5
"""Certificates that come closer together were made in advance, and all but the first are not in time."""


class Following:
    """The certificates that one peer follows.

    Args:
        keys: This peer's key.
        wire: Messages, leases and DHT time.
        rules: The run's numbers.
        chain: The certificates so far; extended here.
        on_certificate: Told of each certificate that this peer follows, with the body that was the last one before.
    """

    def __init__(
        self,
        keys: Keys,
        wire: Wire,
        rules: Rules,
        chain: Chain,
        on_certificate: Callable[[Certificate, Body], None],
    ) -> None:
        self.chain = chain
        self.guide = ""
        """The only peer whose certificates are followed; empty for all."""
        self.opened_at = wire.now()
        """DHT time at which this peer followed the last certificate, or was started."""
        self._keys = keys
        self._wire = wire
        self._rules = rules
        self._on_certificate = on_certificate
        self._started_at = wire.now()
        self._num_asked = 0
        self._met_at = 0.0

    # ------------------------------------------------------------------ certificates

    def take(self, sender: str, message: Certificates) -> None:
        """Follow the certificates in a message that extend this chain, or open a better branch of it."""
        known = self.chain.last.digest
        if self.guide not in ("", sender):
            return
        for certificate, after in zip_longest(message.certificates, message.certificates[1:]):
            body, last = certificate.body, self.chain.last
            if body.is_varied and not self._may_vary(body, after):
                log.info("round %d: some peers went back to it, or go on without its voters; not this one", body.round)
            elif body.previous == last.digest:
                if not self.refusal(certificate, last):
                    self.follow(certificate)
            elif body.round > last.round + 1:
                # A single one is the newest, and this peer asks for what it has missed.
                is_led_to = self.chain.is_led_to(certificate)  # guard: self.chain.is_led_to(certificate) -> True
                if len(message.certificates) > 1 and is_led_to and self._skips(certificate, last):
                    self.follow(certificate)
            elif self._is_preferred(certificate, after):
                log.warning("round %d: following the preferred branch of a fork", body.round)
                self.follow(certificate)
        if len(message.certificates) > 1 and self.chain.last.digest != known:
            self.ask(sender)  # there may be more than one message holds
        elif len(message.certificates) == MAX_SENT:
            self._ask_on(sender, message.certificates[-1].body)

    def follow(self, certificate: Certificate) -> None:
        """Add a certificate to the chain, in place of those of its round and later."""
        last, body = self.chain.last, certificate.body
        if absent := body.shrunk or body.stood_in_for:
            names = ", ".join(peer[-6:] for peer in absent)
            log.warning("round %d: decided without %s; not final for a day: they may have gone on", body.round, names)
        self.chain.add(certificate, self._skips, is_in_time=self._is_in_time(certificate))
        self.opened_at = self._wire.now()
        self._on_certificate(certificate, last)

    def refusal(self, certificate: Certificate, last: Body) -> str:
        """Return why this peer does not follow a certificate after `last`, which may be of a past round."""
        if reason := check_certificate(certificate, last, self._keys):
            return reason
        left = {
            each.peer_id
            for each in certificate.goodbyes
            if each.counts(last.run, last.round + 1) and each.is_signed(self._keys)  # guard: operand
        }
        here = {peer for peer in set(certificate.body.shrunk) - left if not self._is_away(peer)}
        if here and self._wire.now() - last.ends_at <= self._rules.shrink_seconds:  # guard: never
            return "a majority of the voters was here a short time ago"
        return ""

    def _is_away(self, peer: str) -> bool:
        """Return whether a peer was not here when the open round ended, as far as this peer knows.

        A peer that has just restarted was away itself, and cannot blame those that went on without it; nor does one
        without a vote.
        """
        was_down, me = self._started_at > self.chain.last.ends_at, self._keys.peer_id
        if peer == me:
            return was_down
        return (was_down or me not in self.chain.last.voters) and self._wire.is_gone(peer)

    def _skips(self, certificate: Certificate, trusted: Body) -> bool:
        """Return whether more than half of a body's voters have signed a later certificate."""
        return not check_skip(certificate, trusted, self._keys)  # guard: return True

    def _may_vary(self, body: Body, after: Certificate | None) -> bool:
        """Return whether to follow a body that peers have changed.

        If a quorum has gone on from there, all follow that have not come so far. Otherwise those whose users went back
        to the same round agree on the smallest letters. While one of its own voters answers, no other stands in.
        """
        last = self.chain.last
        if body.stood_in_for and any(not self._is_away(peer) for peer in body.stood_in_for):  # guard: never
            return False
        if last.is_reopened and last.round == body.round and body.generation < last.generation:
            return True
        is_new = last.round < body.round or (last.round == body.round and (last.is_reopened or body.stood_in_for))
        return bool(is_new) and self._goes_on(body, after)  # guard: and self._goes_on(body, after) ->

    def _goes_on(self, body: Body, after: Certificate | None) -> bool:
        """Return whether a quorum of a body's voters has certified what comes after it in a message."""
        return after is not None and not check_certificate(after, body, self._keys)

    def _is_preferred(self, certificate: Certificate, after: Certificate | None) -> bool:
        """Return whether a certificate opens a branch to be followed in place of this one.

        Voters that this branch has removed since have no say in it: their keys may be another's by now.
        """
        body, chain = certificate.body, self.chain
        before, ours = chain.body_at(body.round - 1), chain.certificate_at(body.round)
        if before is None or ours is None or ours.body.digest == body.digest:
            return False
        if body.generation != ours.body.generation:
            is_better = chain.last.is_reopened and body.is_reopened
        elif body.stood_in_for:
            is_better = chain.last is ours.body
        elif ours.body.stood_in_for:  # its own voters go on
            is_better = self._goes_on(body, after)
        else:
            is_better = preferred([ours, certificate]) is certificate
        if not is_better:
            return False
        gone = set() if body.is_varied else chain.removed_since(body.round)  # guard: gone = set()
        counted = {peer: each for peer, each in certificate.signatures.items() if peer not in gone}
        if self.refusal(certificate.model_copy(update={"signatures": counted}), before):
            return False
        if body.round <= chain.final:  # guard: never
            log.info("round %d is final here, but voters have signed another end of it: a fork", body.round)
            return False
        return True

    def _is_in_time(self, certificate: Certificate) -> bool:
        """Return whether a certificate has come soon after its round's end, and not in a burst, by this clock."""
        last, now = self.chain.last, self._wire.now()
        is_apart = now - self.opened_at >= MIN_SECONDS_APART  # guard: now - self.opened_at >= MIN_SECONDS_APART -> True
        is_soon = now - last.ends_at <= 2 * self._rules.round_seconds  # guard: is_soon = True
        return certificate.body.previous == last.digest and is_apart and is_soon

    # ------------------------------------------------------------------ asking and answering

    def ask(self, peer: str) -> None:
        """Ask a peer for the certificates that this one has missed."""
        self._wire.post(peer, Question(points=self.chain.points()))

    def ask_next(self) -> None:
        """Ask one peer for what this one has missed, each in its turn."""
        me = self._keys.peer_id
        others = sorted(set(self._wire.peers()) - {me}, key=lambda peer: (peer <= me, peer))
        if others:
            self.ask(others[self._num_asked % len(others)])
        self._num_asked += 1

    def _ask_on(self, peer: str, body: Body) -> None:
        """Ask for what follows a body of this chain; another branch may leave it after what one message holds."""
        if self.chain.has(body.round, body.digest):
            self._wire.post(peer, Question(points=(Point(round=body.round, digest=body.digest),)))

    def answer(self, sender: str, question: Question) -> None:
        """Send what comes after the newest shared point. Ask nothing back, otherwise two branches would never stop."""
        shared = [point.round for point in question.points if self.chain.has(point.round, point.digest)]
        self._wire.post(sender, Certificates(certificates=self.chain.after(shared[0]) if shared else ()))

    def meet(self, peer: str, round: int, digest: str, *, enters: bool = False) -> None:
        """Handle a statement about the round after a body that is not this chain's last.

        Most come late, because a certificate needs only a quorum of votes; who enters a past round needs an answer.
        """
        if self.chain.has(round, digest):
            if enters:
                self.answer(peer, Question(points=(Point(round=round, digest=digest),)))
        elif self._wire.now() - self._met_at >= MET_SECONDS:  # each voter's vote says the same
            self._met_at = self._wire.now()
            self.ask(peer)
