"""One peer's view of the swarm: records, rounds and versions, over p2pd and the DHT or a virtual network."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from spes_p2p import __version__
from spes_p2p.codecs.paged import PagedVector
from spes_p2p.codecs.vectors import block_hashes, to_bytes
from spes_p2p.config import RoundConfig
from spes_p2p.swarm.averaging.averaging import Averaged, Averaging, streams_per_peer
from spes_p2p.swarm.averaging.encoding import Contribution, DeltaEncoding, Vectors
from spes_p2p.swarm.averaging.outcome import RoundResult, Staged, averaged_bytes, result_of
from spes_p2p.swarm.bans import Bans
from spes_p2p.swarm.certificate import MAX_REPLICATED, Body, PeerKeys, known_peers, strangers
from spes_p2p.swarm.consensus import FOLDER, Consensus
from spes_p2p.swarm.exchange.exchange import Exchange
from spes_p2p.swarm.exchange.store import VersionStore
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.invites import GuestList
from spes_p2p.swarm.membership import Membership
from spes_p2p.swarm.names import SHARED, VectorName, slot_ranges
from spes_p2p.swarm.network import Network
from spes_p2p.swarm.p2p.identity import IdentityKeys
from spes_p2p.swarm.p2p.introductions import Links
from spes_p2p.swarm.p2p.machine import Machine
from spes_p2p.swarm.p2p.node import Node
from spes_p2p.swarm.p2p.watchdog import Watchdog
from spes_p2p.swarm.part import Outcome, Part, Rules
from spes_p2p.swarm.records import Claim, Contact, Metrics, Progress, Record
from spes_p2p.swarm.roster import Member, Roster, stated_links

log = logging.getLogger(__name__)

MAX_NEW = 64
"""Peers without a certificate that are told of each new one."""
CATCH_UP_SECONDS = 10.0
"""Longest that a peer waits for the certificates that it has missed."""
SETTLE_SECONDS = 60.0
"""Longest time for the event loop to begin to average, or to keep a round's residuals, on a busy machine."""
LINKS_REST_SECONDS = 300.0
"""Time after a failed attempt in which this peer, in client mode, reduces nothing."""
MAX_NAMED = 8
"""Silent peers that a warning names; the others are counted."""


class HivemindSwarm:
    """A peer's swarm over a `Network`. Calls return within the run's deadlines, except `agree`.

    Args:
        network: This peer's network; a `Node` is closed with the swarm.
        directory: Directory of this peer's versions.
        keys: The key of a virtual peer; a `Node` has its own.
        store: The versions; by default those in `directory`.
        serve: Whether to serve versions to other peers.
        uplink_mbit: Upload limit in 10^6 bits per second; None for no limit.
        trains_alone: Whether to commit rounds alone after all live peers have vanished without leaving.
        name: Of this peer's owner, for all to see; empty for none.
    """

    def __init__(
        self,
        network: Network,
        directory: Path,
        *,
        keys: PeerKeys | None = None,
        store: VersionStore | None = None,
        serve: bool = True,
        uplink_mbit: float | None = None,
        trains_alone: bool = False,
        name: str = "",
    ) -> None:
        self.peer_id = network.peer_id
        self._network = network
        self._keys = IdentityKeys(network.identity) if isinstance(network, Node) else keys
        self.bans = Bans()
        self._store = store or VersionStore(directory)
        self.exchange = Exchange(network, self._store, serve=serve, uplink_mbit=uplink_mbit)
        self._averaging: Averaging | None = None
        self._uplink_mbit = uplink_mbit
        self._trains_alone = trains_alone
        self._name = name
        self._rounds = RoundConfig()
        self._vectors = Vectors()
        self._encoding = DeltaEncoding({})
        self._averaged_bytes = 0, 0
        self._directory = directory
        self._consensus: Consensus | None = None
        self._encoded_deltas: Mapping[VectorName, Tensor] | None = None
        self._encoded: dict[VectorName, Tensor] = {}
        self._tokens = 0
        self._results: list[tuple[RoundResult, Averaged]] = []
        """Of the attempts at the open round."""
        self._reserved_at = self.now()
        self._links_rest_until = 0.0
        self._membership = Membership(network)
        self._machine = Machine(network) if isinstance(network, Node) else None
        if self._machine is not None:
            self._membership.live_peers = self._machine.met_before()

    @property
    def keys(self) -> PeerKeys:
        """This peer's key, and the public keys of the others."""
        assert self._keys is not None, "a peer signs what it states in a run"
        return self._keys

    @property
    def machine(self) -> Machine:
        """What keeps a real peer in touch with others."""
        assert self._machine is not None, "a virtual peer has no machine"
        return self._machine

    @property
    def node(self) -> Node:
        """A real peer's host and DHT node."""
        return self.machine.node

    @property
    def watchdog(self) -> Watchdog:
        """Notices when p2pd or the DHT has died."""
        return self.machine.watchdog

    @property
    def links(self) -> Links:
        """A real peer's direct connections to peers that take no calls."""
        return self.machine.links

    def enter(
        self,
        rounds: RoundConfig,
        vectors: Vectors,
        start: Body,
        *,
        max_slots: int,
        guests: GuestList | None = None,
        is_new: bool = False,
        recent: str = "",
    ) -> None:
        """Prepare for the run's rounds once its manifest is known, and start renewing records.

        Args:
            rounds: The run's round settings.
            vectors: The vectors that the run averages and publishes.
            start: The run's genesis.
            max_slots: Largest number of slots that this peer may hold; 0 for a monitor, which does not average.
            guests: Checks invites; None where none is asked for.
            is_new: Whether this peer founds the run now, and so has promised nothing in it yet.
            recent: Round and digest of a certificate; a peer that has no chain yet follows none without it.

        Raises:
            AbsentError: no peer has sent that chain.
        """
        self._rounds = rounds
        self._vectors = vectors
        self._encoding = DeltaEncoding(vectors.segments, self._directory)
        self._membership.guests = guests
        self._store.keep_only(vectors.names)  # guard: skip
        self._store.refused.initial = vectors.initial
        self.exchange.formats = vectors.formats
        self._averaging = Averaging(self._network, self._encoding, rounds, self._uplink_mbit)
        self._network.run(self._averaging.serve(), SETTLE_SECONDS)
        initial = self._initial_peers()
        self._consensus = Consensus(
            self._network,
            self.keys,
            self._directory.with_name(FOLDER),
            start,
            rules_of(rounds, trains_alone=self._trains_alone),
            peers=self._followers,
            is_gone=self._is_gone,
            guests=guests,
            is_new=is_new or (isinstance(self._network, Node) and self._network.identity.is_new),
            finds=bool(recent),
            through=initial,
        )
        if self._machine is not None:
            streams = streams_per_peer(max_slots, min(vectors.num_slots, MAX_REPLICATED))
            self._machine.node.admit(streams, lambda peer: not self.last().is_stranger(peer))
            self._machine.watchdog.start()
        self._membership.start(rounds, self._beat)
        addresses = () if self._machine is None else self._machine.node.contacts()
        self._membership.announce(
            Contact(peer_id=self.peer_id, addresses=addresses, software=__version__, name=self._name)
        )
        if recent:
            self._follow()
            known = self._membership.last_read(Contact)  # a plain node of hivemind's has no chain
            self.consensus.find(recent, [peer for peer in initial if peer in known] or initial)

    def revoke(self, invites: Collection[str]) -> None:
        """Let the invites whose ids begin with these letters hold no more."""
        if self._membership.guests is not None:
            self._membership.guests.revoked = invites

    # ------------------------------------------------------------------ records

    def now(self) -> float:
        """Return the DHT time, in seconds since the epoch."""
        return self._network.now()

    @property
    def consensus(self) -> Consensus:
        """The decisions of the run's rounds, once the run is entered."""
        assert self._consensus is not None, "the run's rounds begin when the run is entered"
        return self._consensus

    def _followers(self) -> list[str]:
        """Return the peers that follow the run: those that the last certificate knows, and some that it does not."""
        if self._consensus is None:  # a message has come before it is there
            return []
        last, claims = self.consensus.last(), self._membership.last_read(Claim)
        known = known_peers(last) | last.seats.keys()
        new = [peer for peer in claims if peer not in known]
        met = self._membership.last_read(Contact).keys() & self._initial_peers()  # perhaps a rendezvous
        return [*sorted((known & claims.keys()) | met), *strangers(last, new)[:MAX_NEW]]

    def _initial_peers(self) -> list[str]:
        return [] if self._machine is None else self._machine.node.initial_peers()

    def _is_gone(self, peer: str) -> bool:
        """Check whether a peer's lease has run out, or its claim says that it leaves."""
        claims: Mapping[str, Claim] = self._membership.last_read(Claim)  # type: ignore[assignment]
        return peer != self.peer_id and bool(claims) and (peer not in claims or claims[peer].leaves)

    def _beat(self) -> None:
        """Keep, once per heartbeat, the others' addresses, and follow them."""
        if self._machine is not None:
            contacts: Mapping[str, Contact] = self._membership.last_read(Contact)  # type: ignore[assignment]
            self._machine.remember(contacts, first=self.consensus.known() or ())
        self._follow()

    def _follow(self) -> None:
        """Learn where the others' chains of certificates end, and meet those behind routers."""
        if self._machine is not None:
            contacts: Mapping[str, Contact] = self._membership.last_read(Contact)  # type: ignore[assignment]
            self._machine.meet(contacts, self._membership.last_read(Claim).keys())
        self.read(Claim)
        self.read(Progress)

    def names(self) -> dict[str, str]:
        """Return the names that owners of peers have set, by peer id."""
        contacts: Mapping[str, Contact] = self._membership.last_read(Contact)  # type: ignore[assignment]
        named = {peer: contact.name for peer, contact in contacts.items() if contact.name}
        return named | ({self.peer_id: self._name} if self._name else {})

    def catch_up(self) -> None:
        """Ask other peers for the certificates that this one has missed, and wait a short time for them."""
        self._follow()
        self.consensus.catch_up(CATCH_UP_SECONDS)

    def announce(self, *records: Record) -> None:
        """Store this peer's records and renew the latest of each kind until `close`."""
        self._membership.announce(*records)

    def report(self, record: Metrics) -> None:
        """Store a record once."""
        self._membership.report(record)

    def read(self, kind: type[Record]) -> Mapping[str, Record]:
        """Return the unexpired records of a kind, by peer id."""
        return self._heard(kind, self._membership.read(kind))

    def read_now(self, kind: type[Record]) -> Mapping[str, Record]:
        """Return the unexpired records of a kind, by peer id, never older ones.

        Raises:
            OSError: the DHT is too slow, or its process has ended.
        """
        return self._heard(kind, self._membership.read_now(kind))

    def _heard(self, kind: type[Record], found: Mapping[str, Record]) -> Mapping[str, Record]:
        if kind is Progress and self._consensus is not None:
            self._consensus.hear_of({peer: (record.round, record.certificate) for peer, record in found.items()})  # type: ignore[attr-defined]
        return found

    def wait(self, seconds: float) -> bool:
        """Wait so long; return True, at once, when the swarm is closed."""
        return self._membership.wait(seconds)

    # ------------------------------------------------------------------ rounds

    def last(self) -> Body:
        """Return the body of the last certificate that this peer knows: of the run's genesis at first."""
        return self.consensus.last()

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
        last, began, lost = self.consensus.last(), self.now(), set[str]()
        if contribution.deltas is not self._encoded_deltas:
            self._encoded_deltas = contribution.deltas
            self._reserve_uplink()
            entry, self._encoded = self._encode(contribution)
            self._tokens = entry.tokens
        invite = self._membership.guests.shown if self._membership.guests is not None else ""
        changes = {
            "tokens": self._tokens,
            "calls_only": self._network.client_mode,
            "links": self._stated_links(last),
            "invite": invite,
            "distrusts": self.bans.distrusted(last.round),
        }
        member = contribution.member.model_copy(update=changes)
        if expected and self.peer_id not in expected:
            expected = {*expected, self.peer_id}

        assert self._averaging is not None, "the run's rounds begin when the run is entered"
        averaging = self._averaging

        async def average(roster: Roster, attempt: int) -> Outcome:
            met_at = self.now()
            log.debug("round %d: %d peers meet in attempt %d", roster.round + 1, len(roster), attempt)
            averaged = await averaging.average(roster, attempt, self._encoded)
            lost.update({averaged.lost} - {""})
            outcome = await asyncio.to_thread(self._take, roster, averaged, contribution, met_at - began, stage)
            if outcome is None:
                return Outcome(None)
            is_refused = SHARED in averaged.means and not outcome[0]
            return Outcome(*outcome, roster.suspect if is_refused else averaged.lost)  # guard: never

        part = Part(member, average, lambda: {*expected} - lost, closes_from)
        return self.consensus.settle(part, on_wait=lambda: self._membership.is_stopped)

    def _encode(self, contribution: Contribution) -> tuple[Member, dict[VectorName, Tensor]]:
        return self._encoding.encode(contribution)

    def _take(
        self,
        roster: Roster,
        averaged: Averaged,
        contribution: Contribution,
        matchmaking_seconds: float,
        stage: Callable[[RoundResult], Staged | None],
    ) -> Staged | None:
        """Return what would follow from an attempt's averaging; None if there is nothing to decide."""
        round = roster.round
        for peer, count in sorted(averaged.clipped.items()):
            log.info("round %d: far from the others' vectors, pulled in: %d parts of %s", round + 1, count, peer[-6:])
        self.bans.record(round, averaged.evidence)
        result = result_of(roster, averaged, contribution, self._encoding, matchmaking_seconds)
        if SHARED not in result.means:
            self._links_rest_until = self.now() + LINKS_REST_SECONDS
        received, sent = averaged_bytes(result, self.peer_id, self._encoding)
        self._averaged_bytes = self._averaged_bytes[0] + received, self._averaged_bytes[1] + sent
        self._results = [*self._results[-1:], (result, averaged)]
        return stage(result)

    def _stated_links(self, last: Body) -> tuple[str, ...]:
        """Return peers to which this one, in client mode, is connected; none for a while after a failed attempt.

        One of the connections may have ended without notice, and the attempt is redone without them.
        """
        if self._machine is None or self.now() < self._links_rest_until:
            return ()
        linked = self._machine.links.connected_to(self._membership.last_read(Claim).keys())
        return stated_links(self.peer_id, linked, last)

    def keep_residuals(
        self, result: RoundResult, committed: Collection[VectorName], unchanged: Collection[VectorName] = ()
    ) -> None:
        """Keep the residuals of a result's committed groups, and drop the others'; all if this peer fell behind.

        Args:
            unchanged: Groups whose vectors the round's certificate leaves as they were.
        """
        tried, self._results = self._results, []  # whose means take memory
        averaged = next((each for made, each in tried if made.means is result.means), Averaged())
        self._encoded_deltas = None
        self._encoded = {}
        if SHARED in committed:
            self._encoding.commit(committed, unchanged)
        else:
            self._encoding.forget()
            self.exchange.server.release()
        if self._averaging is not None:
            self._network.run(self._averaging.keep_residuals(averaged, committed), SETTLE_SECONDS)

    def leave(self) -> None:
        """Tell the other voters that this peer takes part in no further round."""
        if self._consensus is not None:
            self._consensus.leave()

    def _reserve_uplink(self) -> None:
        """Serve only members until the round is synchronised, but half of the time at most, so that others get some."""
        members = [peer for peer, claim in self._membership.last_read(Claim).items() if claim.state == "active"]  # type: ignore[attr-defined]
        began, self._reserved_at = self._reserved_at, self.now()
        longest = self._rounds.averaging_seconds + self._rounds.exchange_seconds
        self.exchange.server.reserve_for(members, min(longest, (self._reserved_at - began) / 2))

    def residuals(self) -> Mapping[str, PagedVector]:
        """Return the rounding errors of this peer's own deltas, by group; they are added to a later delta."""
        return self._encoding.feedback.residuals()

    def kept_residuals(self, names: Collection[VectorName]) -> Mapping[str, PagedVector]:
        """Return the residuals that the weights of these vectors have from their anchors; drop those of all others."""
        self._encoding.hold(names)
        return self._encoding.kept()

    def restore_residuals(self, residuals: Mapping[str, Tensor], *, has_same_anchors: bool) -> None:
        """Restore what `residuals` returned before a restart; of other anchors, only what the weights keep."""
        self._encoding.restore(residuals, has_same_anchors=has_same_anchors)

    # ------------------------------------------------------------------ versions

    def publish(self, round: int, bundles: Mapping[VectorName, Tensor]) -> Mapping[VectorName, Version]:
        """Serve flat vectors, and kept forms as uint8, as this round's versions, in place of older ones."""
        data = {name: to_bytes(flat_N) for name, flat_N in bundles.items()}
        hashes = {name: block_hashes(each) for name, each in data.items()}
        versions = {name: Version.of(name, round, each, hashes[name]) for name, each in data.items()}
        self._store.add({name: (versions[name], each) for name, each in data.items()}, hashes)
        return versions

    def keep_document(self, name: str, data: bytes | memoryview, round: int = 0) -> None:
        """Serve a document: manifest, revision of it, tokenizer, or part of a base; of one name the latest round."""
        self._store.add({name: (Version.of(name, round, data), data)})

    def contacts(self) -> Collection[str]:
        """Return the other peers that are here, those without a claim too."""
        return (self.read(Contact).keys() | self.read(Claim).keys()) - {self.peer_id}

    def versions(self) -> Mapping[str, Version]:
        """Return this peer's newest version of each vector and document, its own or pulled."""
        return self._store.newest()

    def load(self, name: VectorName, *, before: bool = False) -> Tensor:
        """Return this peer's newest version of a flat vector, or the one before it, as a new tensor.

        A kept form stays encoded, as uint8.

        Raises:
            ExchangeError: there is none.
        """
        if not VectorName(name).is_kept:
            return self._store.map(name, before=before).whole()
        return self._vectors.decode(name, self._store.read(name, before=before))

    def mapped(self, name: VectorName) -> PagedVector:
        """Return this peer's newest version of an fp32 vector where it lies; nothing changes it.

        Raises:
            ExchangeError: there is none.
        """
        return self._store.map(name, is_trusted=True)

    def refuse(self, name: VectorName, suspects: Mapping[str, str], digest: str = "") -> None:
        """Replace this peer's newest version of a vector by the one before it, if any, and never take it again.

        Until the process ends, `inventory` omits the refused version and `pull` does not take it.

        Args:
            name: The vector.
            suspects: Suspected peers, with reasons; they count as evidence of the version's round.
            digest: Digest of a version of the last round that this peer does not have, to refuse in its place.
        """
        round = self.last().round
        if digest:
            self._store.refused.add(digest)
        else:
            version = self._store.newest()[name]
            round = version.round
            self._store.refuse(version)
        self.bans.suspect(round - 1, suspects)

    def delete(self, name: VectorName) -> None:
        """Delete this peer's versions of a vector."""
        self._store.delete_all(name)

    def load_document(self, name: str, *, before: bool = False) -> bytes:
        """Return the newest document of a name that this peer keeps, or the one before it.

        Raises:
            ExchangeError: it is not here, or damaged.
        """
        return self._store.read(name, before=before)

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
        failures = self._vectors.unknown(wanted)  # guard: self._vectors.unknown(wanted) -> dict[str, str]()
        versions = [
            Version(name=name, round=round, digest=digest, num_bytes=self._vectors.num_bytes(name))
            for name, (round, digest) in wanted.items()
            if name not in failures
        ]
        try:
            reasons = self.exchange.pull(versions, peers, timeout=timeout)
        finally:
            self.exchange.server.release()
        return failures | {VectorName(name): reason for name, reason in reasons.items()}

    def inventory(self, peers: Sequence[str]) -> Mapping[str, Mapping[str, Version]]:
        """Ask peers for their versions, by peer and name; silent peers and refused versions are omitted."""
        found = self.exchange.inventory(peers)
        if silent := sorted(set(peers) - found.keys()):
            claims: Mapping[str, Claim] = self._membership.last_read(Claim)  # type: ignore[assignment]
            slots = sorted({slot for peer in silent if peer in claims for slot in claims[peer].slots})
            shown = ", ".join(peer[-6:] for peer in silent[:MAX_NAMED]) + ("..." if len(silent) > MAX_NAMED else "")
            log.log(
                logging.WARNING if slots else logging.DEBUG,  # a peer that leaves claims none
                "%d of %d peers claim slots %s but do not list their versions: %s",
                *(len(silent), len(peers), slot_ranges(slots), shown),
                extra={"heals": True},
            )
        return found

    def traffic(self) -> tuple[int, int]:
        """Return the payload bytes received and sent since the start."""
        received, sent = self._averaged_bytes
        return self.exchange.bytes_in + received, self.exchange.server.bytes_out + sent

    def close(self) -> None:
        """Leave the swarm: stop renewing records and serving versions. Idempotent."""
        if self._consensus is not None:
            self._consensus.close()
        self._membership.stop()
        if self._averaging is not None:
            self._averaging.close()
        if self._machine is not None:
            self._machine.close()


def rules_of(rounds: RoundConfig, *, trains_alone: bool = False) -> Rules:
    """Return the numbers on which the run's decisions depend.

    Args:
        rounds: The run's round settings.
        trains_alone: Go on without the others as soon as their leases have run out.
    """
    return Rules(
        min_peers=rounds.min_peers,
        round_seconds=rounds.max_seconds + rounds.exchange_seconds,
        meeting_seconds=rounds.matchmaking_seconds,
        averaging_seconds=rounds.averaging_seconds,
        results_seconds=rounds.results_seconds,
        shrink_seconds=0.0 if trains_alone else rounds.shrink_seconds,
    )
