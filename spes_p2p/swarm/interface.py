"""What training needs of a swarm. `HivemindSwarm` implements it over the internet, `MemorySwarm` in one process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from spes_p2p.codecs.paged import PagedVector
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.records import Archived, Metrics, Record
from spes_p2p.swarm.roster import Member, Roster


@dataclass(frozen=True)
class Contribution:
    """What a peer brings to a round.

    Attributes:
        member: Its roster entry.
        deltas: Flat fp32 vectors of `shared` and of each of the member's slots: the delta, followed by the optimizer
            moments if the run averages them.
    """

    member: Member
    deltas: Mapping[VectorName, Tensor]


@dataclass(frozen=True)
class RoundResult:
    """What one attempt to average has brought a member; the round's certificate decides what of it counts.

    Attributes:
        roster: Entries of all members, the same on each of them; only this peer's own if it was alone, none if no
            others were met.
        means: Averaged flat vectors; bit-identical on all members of a group. Their memory is valid until the
            next `average`, or `settle`.
        dropped: Reasons for this peer's groups that return to their anchor.
        num_clipped: Parts of others' vectors that this peer has clipped.
        matchmaking_seconds: Time until the roster was complete.
        averaging_seconds: Time from there to the last confirmed digest.
    """

    roster: Roster = field(default_factory=Roster)
    means: Mapping[VectorName, Tensor] = field(default_factory=dict)
    dropped: Mapping[VectorName, str] = field(default_factory=dict)
    num_clipped: int = 0
    matchmaking_seconds: float = 0.0
    averaging_seconds: float = 0.0


Staged = tuple[Mapping[VectorName, str], float]
"""Digests of the versions that would follow from a result, and of their kept forms, empty if it brought none of
`shared`; and the DHT time at which the next round's training should end."""


class Swarm(Protocol):
    """One peer's view of the swarm.

    Calls return within the run's deadlines, except `agree`, which waits until the round is decided.
    """

    peer_id: str

    def now(self) -> float:
        """Return the DHT time, in seconds since the epoch."""

    def announce(self, *records: Record) -> None:
        """Store this peer's records and renew the latest of each kind until `close`."""

    def report(self, record: Metrics | Archived) -> None:
        """Store a record once."""

    def read(self, kind: type[Record]) -> Mapping[str, Record]:
        """Return the unexpired records of a kind, by peer id."""

    def wait(self, seconds: float) -> bool:
        """Wait so long, or less where other peers' records change; return True, at once, when the swarm is closed."""

    def last(self) -> Body:
        """Return the body of the last certificate that this peer knows: of the run's genesis at first."""

    def certified(self, round: int) -> Body | None:
        """Return the body of a round's certificate; None if this peer does not know it."""

    def known(self) -> Collection[str] | None:
        """Return the peers that one of the last certificates knows; None before the first one, when all peers count."""

    def catch_up(self) -> None:
        """Ask other peers for the certificates that this one has missed, and wait a short time for them."""

    def agree(
        self,
        contribution: Contribution,
        stage: Callable[[RoundResult], Staged | None],
        *,
        expected: Collection[str],
        closes_from: float,
    ) -> Body | None:
        """Meet the other peers, average and agree, attempt by attempt, until the round is decided.

        Args:
            contribution: This peer's deltas and roster entry; the deltas are not changed. Each is asked for once and
                encoded.
            stage: Returns what would follow from an attempt's result; None if there is nothing to decide, because no
                member has trained.
            expected: Peers that complete the roster at once.
            closes_from: DHT time from which the roster may be closed without the rest.

        Returns:
            The body of the round's certificate; None if there was nothing to decide, or this peer's chain has left the
            certificate that its deltas start from.
        """

    def settle(self, result: RoundResult, committed: Collection[VectorName]) -> None:
        """Keep the residuals of a result's committed groups, and drop the others'; all if this peer fell behind.

        The memory of the means, and of what was written to `room`, is given back.
        """

    def leave(self) -> None:
        """Tell the other voters that this peer takes part in no further round."""

    def residuals(self) -> Mapping[str, PagedVector]:
        """Return the rounding errors of this peer's own deltas, by group; they are added to a later delta."""

    def restore_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Restore what `residuals` returned before a restart. Valid only for the same anchors."""

    def publish(self, round: int, bundles: Mapping[VectorName, Tensor]) -> Mapping[VectorName, Version]:
        """Serve flat vectors as this round's versions, in place of older versions of the same names.

        Args:
            round: The versions' round.
            bundles: The vectors; kept forms as uint8.
        """

    def versions(self) -> Mapping[str, Version]:
        """Return this peer's newest version of each vector and document, its own or pulled."""

    def load(self, name: VectorName, *, before: bool = False) -> Tensor:
        """Return this peer's newest version of a flat vector, or the one before it, as a new tensor.

        A kept form stays encoded, as uint8.

        Raises:
            ExchangeError: there is none.
        """

    def mapped(self, name: VectorName) -> PagedVector:
        """Return this peer's newest version of an fp32 vector where it lies; nothing changes it.

        Raises:
            ExchangeError: there is none.
        """

    def refuse(self, name: VectorName, suspects: Mapping[str, str], digest: str = "") -> None:
        """Replace this peer's newest version of a vector by the one before it, if any, and never take it again.

        Until the process ends, `inventory` omits the refused version and `pull` does not take it.

        Args:
            name: The vector.
            suspects: Suspected peers, with reasons; they count as evidence of the version's round.
            digest: Digest of a version of the last round that this peer does not have, to refuse in its place.
        """

    def delete(self, name: VectorName) -> None:
        """Delete this peer's versions of a vector."""

    def pull(
        self, wanted: Mapping[VectorName, tuple[int, str]], peers: Sequence[str], *, timeout: float
    ) -> Mapping[VectorName, str]:
        """Fetch versions, each from all peers that have it, or get it meanwhile.

        Args:
            wanted: Round and digest of the version of each vector.
            peers: Peers to ask.
            timeout: Seconds for all versions together.

        Returns:
            Reasons for the versions that could not be fetched. This peer keeps its old ones.
        """

    def contacts(self) -> Collection[str]:
        """Return the other peers that are here, those without a claim too."""

    def inventory(self, peers: Sequence[str]) -> Mapping[str, Mapping[str, Version]]:
        """Ask peers for their versions, by peer and name; silent peers and refused versions are omitted."""

    def traffic(self) -> tuple[int, int]:
        """Return the payload bytes received and sent since the start."""

    def close(self) -> None:
        """Leave the swarm: stop renewing records and serving versions. Idempotent."""
