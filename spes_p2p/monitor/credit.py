"""Credit: the tokens that counted, by peer, added up from certificates and never from what peers report."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median_low
from typing import TypeVar

from pydantic import ValidationError

from spes_p2p.config.machine import OwnerName
from spes_p2p.config.run import MAX_ROUNDS
from spes_p2p.fs import write_atomic
from spes_p2p.presentation import problem_of
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.chain import Link
from spes_p2p.swarm.records import Count, PeerId, Strict

log = logging.getLogger(__name__)

FILE = "credit.json"
"""In the output of a peer or a monitor."""
SETTLED_AFTER = 8
"""Rounds after which a certificate's tokens are added for good; a newer one may be replaced by another branch's."""
MAX_PEERS = 4096
"""Peers with credit that are remembered, those with the most: anybody can make identities."""
WEIGHT_CAP = 4
"""A member's tokens count for at most this many times the median of the voters'."""
T = TypeVar("T")


class Credit(Strict):
    """Tokens that counted in the rounds whose certificates were seen."""

    first: Count = 0
    """First of the rounds; 0 without any."""
    last: Count = 0
    rounds: Count = 0
    """Their number: a peer that was away has missed some."""
    tokens: dict[PeerId, Count] = {}
    names: dict[PeerId, OwnerName] = {}
    """Of peers whose owners have set one."""

    def plus(self, bodies: Iterable[Body], until: int | None = None, names: Mapping[str, str] | None = None) -> Credit:
        """Return the credit with that of later rounds, at most `until`, and with the names that peers have now."""
        newest = until if until is not None else MAX_ROUNDS
        later = {body.round: body for body in bodies if self.last < body.round <= newest}
        tokens = dict(self.tokens)
        for body in later.values():
            for peer, count in counted(body).items():
                tokens[peer] = tokens.get(peer, 0) + count
        named = {peer: name for peer, name in (names or {}).items() if self.names.get(peer) != name}
        if not later and not named:
            return self
        kept = sorted(tokens, key=lambda peer: -tokens[peer])[:MAX_PEERS]  # guard: [:MAX_PEERS] ->
        return Credit(
            first=self.first or min(later, default=0),
            last=max(later, default=self.last),
            rounds=self.rounds + len(later),
            tokens={peer: tokens[peer] for peer in kept},
            # guard: [:MAX_PEERS] ->
            names=dict(sorted({**self.names, **named}.items(), key=lambda each: each[0] not in tokens)[:MAX_PEERS]),
        )

    def told(self) -> str:
        """Return in words of which rounds this is."""
        whole = self.rounds == self.last - self.first + 1
        return f"{'' if whole else f'{self.rounds} of the '}rounds {self.first} to {self.last}"


def counted(body: Body) -> dict[str, int]:
    """Return the tokens of a round's members that counted, without those that trained none."""
    cap = cap_of(body)
    # guard: min(member.tokens, cap) -> member.tokens
    return {member.peer_id: min(member.tokens, cap) for member in body.members if member.tokens}


def cap_of(body: Body) -> int:
    """Return the most tokens of one member of a round that count."""
    trained = {member.peer_id: member.tokens for member in body.members if member.tokens}
    return WEIGHT_CAP * median_low(of_voters(body, trained)) if trained else 0


def of_voters(body: Body, stated: Mapping[str, T]) -> list[T]:
    """Return what voters state; what all state if no voter does."""
    # guard: return list(stated.values())
    return [each for peer, each in stated.items() if peer in body.voters] or list(stated.values())


def kept(folder: Path) -> Credit:
    """Return the credit that a peer or a monitor has kept in its output; none from a missing or damaged file."""
    try:
        return Credit.model_validate_json((folder / FILE).read_bytes())
    except FileNotFoundError:
        return Credit()
    except ValidationError as error:
        log.warning("%s is damaged: %s; credit is added up anew", folder / FILE, problem_of(error))
        return Credit()


def seen(folder: Path) -> Credit:
    """Return the credit that a peer or a monitor has kept, with that of the certificates in its output."""
    from spes_p2p.swarm.consensus import CERTIFICATES, FOLDER  # loads hivemind, and a page's checks must not

    path = folder / FOLDER / CERTIFICATES
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    try:
        bodies = [Link.model_validate_json(line).certificate.body for line in lines if line.endswith(b"\n")]
    except ValidationError as error:
        log.warning("%s is damaged: %s; credit goes without its rounds", path, problem_of(error))
        return kept(folder)
    return kept(folder).plus(bodies)


def keep(folder: Path, bodies: Mapping[int, Body], names: Mapping[str, str]) -> None:
    """Add settled rounds to the credit in a peer's or monitor's output.

    Raises:
        OSError: it cannot be written.
    """
    before = kept(folder)
    credit = before.plus(bodies.values(), max(bodies, default=0) - SETTLED_AFTER, names)
    if credit is not before:
        save(folder, credit)


def save(folder: Path, credit: Credit) -> None:
    """Write the credit into a peer's or monitor's output.

    Raises:
        OSError: it cannot be written.
    """
    with write_atomic(folder / FILE, durable=False) as file:
        file.write(credit.model_dump_json().encode())
