"""The seam of the house: what training needs of a swarm. Two implementations: hivemind's and an in-memory one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.records import Archived, Metrics, Record
from spes_p2p.swarm.roster import Member, Roster


@dataclass(frozen=True)
class Contribution:
    """What a peer brings to a round.

    Attributes:
        member: Its roster entry.
        deltas: Flat fp32 vector by group, for `shared` and each of the member's slots: its delta, followed by its
            optimizer moments where the run averages them.
    """

    member: Member
    deltas: Mapping[str, Tensor]


@dataclass(frozen=True)
class RoundResult:
    """What came of a round, as seen by one member.

    Attributes:
        roster: Everybody's entries, the same on all members; only this peer's own if it was alone.
        committed: Averaged flat vector by group; bit-identical on all members of the group.
        encoded: The delta's part of it by group as it travelled, for those who have the last version; empty where the
            codec is exact.
        dropped: Reason by group, for groups that this peer was in and that go back to their anchor.
        is_behind: This peer's shared anchor is not the majority's: it must catch up.
        matchmaking_seconds: Time until the roster stood.
        averaging_seconds: Time from there to the last confirmed digest.
    """

    roster: Roster
    committed: Mapping[str, Tensor] = field(default_factory=dict)
    encoded: Mapping[str, bytes] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    is_behind: bool = False
    matchmaking_seconds: float = 0.0
    averaging_seconds: float = 0.0


class Swarm(Protocol):
    """One peer's view of the swarm. Every call returns within the run's deadlines."""

    peer_id: str

    def now(self) -> float:
        """Return the DHT time, in seconds since the epoch."""

    def announce(self, *records: Record) -> None:
        """Store the peer's records and keep renewing the latest of each kind until `close`."""

    def report(self, record: Metrics | Archived) -> None:
        """Store a record once."""

    def read(self, kind: type[Record]) -> Mapping[str, Record]:
        """Return everybody's unexpired records of a kind, by peer id."""

    def wait(self, seconds: float) -> bool:
        """Wait, for records of others to change; return at once, and True, when the swarm is closed."""

    def average(self, contribution: Contribution, *, expected: int, starts_at: float) -> RoundResult:
        """Meet the others and average.

        Args:
            contribution: This peer's deltas and roster entry; deltas are left as they are.
            expected: Peers to wait for; as soon as so many have met, the roster stands.
            starts_at: DHT time at which the roster may stand without the rest.
        """

    def residuals(self) -> Mapping[str, Tensor]:
        """Return what rounding has left over of this peer's own deltas, by group, to go with a later round."""

    def restore_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Go on with what `residuals` returned before a restart, if the anchors are those of then."""

    def publish(
        self, round: int, bundles: Mapping[str, Tensor], deltas: Mapping[str, bytes] | None = None
    ) -> Mapping[str, Version]:
        """Sign and serve flat bundles as this round's versions, replacing older ones of the same name.

        Args:
            round: The versions' round.
            bundles: By name.
            deltas: By name, the encoded mean delta that leads here from this peer's newest version until now.
        """

    def versions(self) -> Mapping[str, Version]:
        """Return the newest version of each name that this peer has, its own and pulled ones."""

    def rollback(self, files: Mapping[Path, Version]) -> None:
        """Have versions as this peer's newest again, from files of its own that were verified."""

    def load(self, name: str, *, before: bool = False) -> Tensor:
        """Return the flat bundle of the newest version of `name` that this peer has, as a new tensor.

        Args:
            name: Of a version.
            before: Return that of the version before the newest.

        Raises:
            ExchangeError: there is none.
        """

    def refuse(self, name: str, suspects: Mapping[str, str]) -> None:
        """Have the version before the newest of `name` as this peer's newest again, and the newest never more.

        From then on, as long as this process lives, `inventory` leaves it out and `pull` does not take it.

        Args:
            name: Of a version that has one before it.
            suspects: Why to think ill of them, by peer; counts as evidence of the version's round.
        """

    def pull(
        self,
        wanted: Mapping[str, Sequence[str]],
        *,
        min_round: int,
        timeout: float,
        relays: Mapping[str, Sequence[str]] | None = None,
        uplinks: Mapping[str, float] | None = None,
        authors: Mapping[str, Collection[str]] | None = None,
    ) -> Mapping[str, str]:
        """Fetch versions of at least `min_round` from peers that have them.

        Args:
            wanted: Peers to ask, by version name; those named first are preferred.
            min_round: Older versions are waited over: a peer that is about to publish is given time to.
            timeout: Seconds for all of it.
            relays: By name, all peers that fetch this version now, this one included, in an order that they share:
                each takes a share of it from the holder and passes that on to the others.
            uplinks: What relays may send, in 10^6 bits per second; who sends more takes the larger share.
            authors: By name, peers of whom one must have signed it; anybody may have what is not named.

        Returns:
            Reason by name, for versions that could not be had; their old ones stay.
        """

    def seeds(self) -> Mapping[str, Sequence[str]]:
        """Return the other peers that say they serve a version, by its name, those with the newest first."""

    def inventory(self, peers: Sequence[str]) -> Mapping[str, Mapping[str, Version]]:
        """Ask peers which versions they have; silent peers, and versions that were refused here, are left out."""

    def traffic(self) -> tuple[int, int]:
        """Return payload bytes received and sent since the start."""

    def close(self) -> None:
        """Leave: stop renewing and serving. Idempotent."""
