"""The slots that this peer trains and replicates, and what it stores of the model."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from spes_p2p.codecs.vectors import digest as digest_of
from spes_p2p.config import RunConfig
from spes_p2p.errors import AbsentError, ExchangeError
from spes_p2p.swarm.certificate import known_peers, max_strangers, strangers
from spes_p2p.swarm.claims import Claimant
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.names import SHARED, VectorName, by_reason
from spes_p2p.swarm.records import Claim, Progress
from spes_p2p.swarm.roster import Roster
from spes_p2p.training.anchors import Anchors, start_digests
from spes_p2p.training.holdings import certified, choose, makers_of, replicas, wanted

log = logging.getLogger(__name__)


class HeldSlots:
    """The slots that this peer claims, and what it stores of the model.

    A peer stores the fp32 weights (*masters*) of the slots that it trains or replicates. Of the others it stores the
    kept form, which is the master itself in some runs (`Anchors.kept_name`).

    Args:
        run_id: The run's name; seeds the allocation's lots.
        anchors: This peer's anchors: slots that it trains or replicates have one, other slots have none.
        refresh_slots: Slots of others to fetch per round; None fetches all.
        draw: Draws the bundle of a slot at the run's start, if that is its seed.
        clock: Seconds that pass; virtual for a virtual peer.
    """

    def __init__(
        self,
        swarm: HivemindSwarm,
        run: RunConfig,
        *,
        run_id: str,
        anchors: Anchors,
        max_slots: int,
        refresh_slots: int | None = None,
        draw: Callable[[VectorName], Tensor] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots: tuple[int, ...] = ()
        self.replicates: tuple[int, ...] = ()
        """The slots that this peer replicates after the certificate that it fetched last, ascending."""
        self.distrusted: frozenset[str] = frozenset()
        """Peers that a roster left out and this peer has not met since: their claims and offers do not count."""
        self.makers: Mapping[VectorName, Sequence[str]] = {}
        """The other peers that made the last round's version of each slot."""
        self.unoffered = set[VectorName]()
        """Vectors whose certified version no peer offered when this one needed it."""
        self.run_id = run_id
        self.clock = clock
        self.refresh_slots = refresh_slots
        self.stale_rounds = 0
        self._swarm = swarm
        self._run = run
        self._anchors = anchors
        self._max_slots = max_slots
        self._chosen_slots = max_slots
        self._start = start_digests(run)
        self._draw = draw
        self._claimant = Claimant(run_id, swarm.peer_id, run.num_slots, run.round)
        self._state: Literal["joining", "active"] = "joining"
        self._since = swarm.now()
        self._checked_at = 0.0
        self._has_left = False
        self._newcomers = set[str]()
        """Active peers that follow the run, and that no certificate knows."""
        self._missed = 0
        """Rosters since such a peer did not come though it was waited for; 0 if all have come since."""
        self.unloaded = set[VectorName]()
        """Weights that have come, and the model lacks."""

    # ------------------------------------------------------------------ claims

    def announce(self, state: Literal["joining", "active"]) -> None:
        """Publish this peer's claim and keep renewing it; does nothing once the peer has left."""
        if not self._has_left:
            self._state = state
            self._swarm.announce(self._claim())

    def _claim(self) -> Claim:
        return Claim(
            peer_id=self._swarm.peer_id,
            state=self._state,
            slots=self.slots,
            max_slots=max(len(self.slots), self._chosen_slots),
            since=self._since,
        )

    def claims(self) -> dict[str, Claim]:
        """Return all peers' claims, this peer's as it is now."""
        return {**self._swarm.read(Claim), self._swarm.peer_id: self._claim()}  # type: ignore[dict-item]

    def others(self) -> list[str]:
        """Return all other peers whose claims count."""
        return [peer for peer in self.trusted(self.claims()) if peer != self._swarm.peer_id]

    def trusted(self, claims: Mapping[str, Claim]) -> dict[str, Claim]:
        """Return the claims that count: of peers that one of the last certificates knows, and that no roster left out.

        Before the first certificate all claims count.
        """
        me, known = self._swarm.peer_id, self._swarm.consensus.known()
        return {
            peer: claim
            for peer, claim in claims.items()
            if peer == me or (peer not in self.distrusted and (known is None or peer in known))  # guard: operand
        }

    def expected(self, claims: Mapping[str, Claim]) -> set[str]:
        """Return the peers that complete a roster: those whose claims count, and a few newcomers that follow the run.

        After a newcomer that did not come, all are waited for in fewer and fewer rounds, otherwise idle ones, under a
        new name each time, would delay every round.
        """
        last, active = self._swarm.last(), set(active_of(claims))
        counted = active & self.trusted(claims).keys()
        following = {
            peer
            for peer, record in self._swarm.read(Progress).items()
            if record.round >= last.round - 1  # type: ignore[attr-defined]
        }
        self._newcomers = (active - counted) & following
        if not self._newcomers:
            self._missed = 0
        if self._missed & (self._missed - 1):  # guard: never
            return counted
        # guard: [: max_strangers(len(last.voters))] ->
        new = strangers(last, self._newcomers)[: max_strangers(len(last.voters))]
        return counted | set(new) | (self._newcomers & last.seats.keys())

    def has_met(self, roster: Roster, expected: Collection[str]) -> None:
        """Note which peers a roster leaves out, and count the rosters since a newcomer has missed one."""
        met = {member.peer_id for member in roster}
        self.distrusted = roster.distrusted | (self.distrusted - met)  # one that does not come is not trusted again
        awaited = self._newcomers.intersection(expected)
        if awaited and awaited <= met:
            self._missed = 0
        elif awaited or self._missed:
            self._missed += 1

    def leave(self) -> None:
        """Release all slots now, not when the lease ends, and say goodbye; for good."""
        self.slots = ()
        self._chosen_slots = 0
        self.announce("joining")
        self._has_left = True
        self._swarm.leave()

    def limit(self, max_slots: int | None) -> None:
        """Train at most so many slots from the next round on, perhaps none; None for as many as this peer can."""
        self._chosen_slots = self._max_slots if max_slots is None else min(max_slots, self._max_slots)

    def hand_over(self, seconds: float) -> list[VectorName]:
        """Release all slots, and serve until others have all that is newest here; return what they lack in the end."""
        names = [
            name
            for name in map(VectorName.of_slot, range(self._run.num_slots))
            if name.slot in self.slots or (self.certified_digest(name) and self.is_certified(name))
        ]
        self.leave()
        deadline = self.clock() + seconds
        while True:
            mine, offers = self._swarm.versions(), self._swarm.inventory(self.others()).values()
            lacking = [
                name
                for name in names
                if name in mine and not any(name in offer and offer[name].round >= mine[name].round for offer in offers)
            ]
            if not lacking or not offers or self.clock() >= deadline or self._swarm.wait(1.0):
                return lacking

    # ------------------------------------------------------------------ slots

    @property
    def names(self) -> tuple[VectorName, ...]:
        """Names of what this peer trains."""
        return (SHARED, *map(VectorName.of_slot, self.slots))

    def resume(self, slots: Sequence[int]) -> None:
        """Claim again, before anything is allocated, what was held before a restart."""
        self.slots = tuple(sorted(slot for slot in slots if slot < self._run.num_slots))[: self._max_slots]

    def rebalance(self) -> None:
        """Hold, after a round is committed, what the claims allocate to this peer; `fetch` brings what that needs."""
        claims = self.trusted(self.claims())
        target = self._claimant.target(self.clock(), claims)
        if len(target) > self._chosen_slots:  # its owner has lowered the limit: the slots with most holders go first
            holders = Counter(slot for claim in claims.values() for slot in claim.slots)
            target = tuple(sorted(target, key=holders.__getitem__)[: self._chosen_slots])
        self.hold(target)

    def rescue_orphans(self) -> bool:
        """Once per heartbeat, adopt slots that lost their last holder; return whether there were any."""
        if self.clock() - self._checked_at < self._run.round.heartbeat_seconds:
            return False
        self._checked_at = self.clock()
        target = self._claimant.target(self._checked_at, self.trusted(self.claims()), in_round=True)
        if target == self.slots:
            return False
        self.hold(target)
        self.fetch(only={*self.names} - {SHARED})
        self.announce("active")
        return True

    def hold(self, target: Sequence[int]) -> None:
        """Train these slots from now on; the model takes a released slot in its kept form."""
        new, old = sorted(set(target) - set(self.slots)), sorted(set(self.slots) - set(target))
        if self.slots and (new or old):
            log.info("adopting slots %s, releasing slots %s", new, old)
        self.unloaded |= {VectorName.of_slot(slot) for slot in (*new, *old)}
        self.slots = tuple(sorted(target))

    # ------------------------------------------------------------------ fetching

    def fetch(
        self,
        roster: Roster | None = None,
        routed: Mapping[int, int] | None = None,
        *,
        only: Collection[VectorName] | None = None,
    ) -> None:
        """Fetch what the last certificate names and this peer lacks.

        A peer that fetches everything without a roster is late: it also asks peers without a claim.

        Args:
            roster: Of the round that this peer has just committed: its members have what it made. Other versions come
                from peers that list them.
            routed: Tokens routed to each slot: fetch `refresh_slots` of the others' slots at most. None fetches all.
            only: Versions to fetch; by default all.

        Raises:
            AbsentError: a peer has `shared`, but it could not be fetched.
        """
        body, me = self._swarm.last(), self._swarm.peer_id
        peers = replicas(body, self._run.round.copies)
        self.replicates = tuple(slot for slot in sorted(peers) if me in peers[slot] and slot not in self.slots)
        needed = wanted(body, {*self.slots, *self.replicates}, self._anchors.kept_name, self._start)
        lacking = [name for name in self._lacking(needed, routed) if only is None or name in only]
        came, fresh, found = set[VectorName](), dict[VectorName, tuple[int, str]](), dict[VectorName, tuple[int, str]]()
        if roster is not None:
            self.makers, links = makers_of(body, me), roster.uplinks_to(me)
            fresh = {name: (body.round, needed[name]) for name in lacking if name.weights in self.makers}
            members = [member.peer_id for member in body.members if member.peer_id != me]
            came |= self._pull(fresh, sorted(members, key=lambda peer: not links.get(peer)))  # whom it can call first
        if older := {name: needed[name] for name in lacking if name not in fresh}:
            is_late = roster is None and only is None
            here = {*self.others(), *(self._swarm.contacts() if is_late else ())}
            offers = self._swarm.inventory(sorted(here - self.distrusted))  # guard: - self.distrusted ->
            found = self._offered(older, offers)
            came |= self._pull(found, list(offers))
            if is_late:
                log.info("caught up with round %d: fetched %d of %d versions", body.round, len(came), len(lacking))
        self.unloaded |= {name.weights for name in came}
        if SHARED in found and SHARED not in came:
            raise AbsentError("could not fetch the swarm's shared state from any peer; try again")
        self._take_masters(came)
        slots = [name.weights for name, digest in needed.items() if name.slot is not None and digest]
        self.stale_rounds = max(map(self._rounds_behind, slots), default=0)

    def to_load(self) -> list[VectorName]:
        """Return the weights that have come since the last call, and the model lacks."""
        changed, self.unloaded = sorted(self.unloaded), set()
        return [name for name in changed if self.has(name)]

    def _lacking(self, needed: Mapping[VectorName, str], routed: Mapping[int, int] | None) -> list[VectorName]:
        """Return what this peer neither has nor can draw; with `routed`, `refresh_slots` of the others' at most."""
        lacking = [
            name
            for name, digest in needed.items()
            if not (self.is_certified(name) or (not digest and name.slot in self.slots and self._draw is not None))
        ]
        is_paused = self._max_slots > 0 == self._chosen_slots
        budget = 0 if is_paused else self.refresh_slots
        if routed is None or budget is None:
            return lacking
        others = {name.slot: name for name in lacking if name.slot is not None}
        for slot in (*self.slots, *self.replicates):
            others.pop(slot, None)
        behind = {slot: self._rounds_behind(name.weights) for slot, name in others.items()}
        chosen = choose(behind, routed, budget)
        return [name for name in lacking if name.slot not in others or name.slot in chosen]

    def _offered(
        self, lacking: Mapping[VectorName, str], offers: Mapping[str, Mapping[str, Version]]
    ) -> dict[VectorName, tuple[int, str]]:
        """Return which versions to fetch: of a lost one the newest other, of equally new ones the most frequent.

        A version is lost if half of the peers that the last certificate knows have answered, and none has it.
        """
        known = known_peers(self._swarm.last()) - {self._swarm.peer_id}
        has_asked_half = 2 * len(offers.keys() & known) >= len(known)
        mine, found = self._swarm.versions(), dict[VectorName, tuple[int, str]]()
        for name, digest in lacking.items():
            offered = [versions[name] for versions in offers.values() if name in versions]
            states = Counter((version.round, version.digest) for version in offered if _is(version, digest))
            if states:
                self.unoffered.discard(name)
            elif digest and has_asked_half:  # guard: operand
                self.unoffered.add(name)
            if name in self.unoffered:
                least = mine[name].round + 1 if name in mine else 0
                states = Counter((version.round, version.digest) for version in offered if version.round >= least)
            if states:
                found[name] = min(states, key=lambda state: (-state[0], -states[state], state[1]))
        return found

    def _pull(self, versions: Mapping[VectorName, tuple[int, str]], peers: Sequence[str]) -> set[VectorName]:
        """Fetch versions as `HivemindSwarm.pull` does; return those that came, and log the others."""
        failures = self._swarm.pull(versions, peers, timeout=self._run.round.exchange_seconds) if versions else {}
        for reason, names in by_reason(failures).items():
            log.warning("could not fetch %s: %s", names, reason, extra={"heals": True})
        return {name for name in versions if name not in failures}

    # ------------------------------------------------------------------ masters and kept forms

    def form(self, name: VectorName) -> VectorName:
        """Return the name under which this peer's model takes some weights: of slots of others, the kept form."""
        return name if name.slot in self.slots else self._anchors.kept_name(name)

    def has(self, name: VectorName) -> bool:
        """Check whether this peer has a version of some weights, in the form in which its model takes them."""
        return self.form(name) in self._swarm.versions()

    def publish_initial(self, name: VectorName, bundle: Tensor) -> None:
        """Publish a vector of round 0 and its kept form; of others' slots only that, where all can draw them."""
        bundles = {self._anchors.kept_name(name): self._anchors.kept_form(name, bundle)}
        if self.form(name) == name or self._draw is None:
            bundles[name] = bundle
        self._swarm.publish(0, bundles)

    def _take_masters(self, came: Collection[VectorName]) -> None:
        """Make the masters and kept forms that have to be made, and take masters as anchors; forget all others."""
        self._make_kept(came)
        self._make_masters(map(VectorName.of_slot, self.slots))
        mine = self._swarm.versions()
        self.slots = tuple(slot for slot in self.slots if VectorName.of_slot(slot) in mine)
        replicated = [name for name in map(VectorName.of_slot, self.replicates) if self.is_certified(name)]
        masters = [name for name in (*self.names, *replicated) if name in mine]
        for name in set(self._anchors.names) - set(masters):
            self._anchors.forget(name)
        for name in masters:
            if name in self.unloaded or name not in self._anchors.names:
                self._anchors.set(name, self._swarm.mapped(name))
        self._drop_masters()

    def _make_masters(self, names: Iterable[VectorName]) -> None:
        """Make the masters that no peer has: of the run's start, or of the kept form that is newer than any master."""
        for name in names:
            mine, kept = self._swarm.versions(), self._anchors.kept_name(name)
            if self.is_certified(name):
                continue
            if not self.certified_digest(name) and self._draw is not None:
                self._swarm.publish(0, {name: self._draw(name)})
            elif kept in mine and (
                name not in mine or (name in self.unoffered and mine[kept].round > mine[name].round)
            ):
                log.warning(
                    "%s: no peer has its fp32 weights of round %d; going on from its kept form, in %s",
                    *(name, mine[kept].round, self._run.frozen_storage),
                )
                self._publish_from_kept(name)

    def _make_kept(self, names: Iterable[VectorName]) -> None:
        """Make the kept forms of masters that have come; refuse a certified one that does not follow from them."""
        for name in names:
            kept, round = self._anchors.kept_name(name), self.certified_round(name)
            if kept == name or self.is_certified(kept) or not self.is_certified(name):
                continue
            form = self._anchors.kept_form(name, self._swarm.load(name))
            said = self.certified_digest(kept)
            if said in ("", digest_of(form)):
                self._swarm.publish(round, {kept: form})
                continue
            makers = self.makers.get(name, ())
            harm = f"the kept form of {name} does not follow from its fp32 weights"
            log.warning(
                "round %d: refused the kept form of %s, made by %s: it does not follow from its fp32 weights",
                *(round, name, ", ".join(peer[-6:] for peer in makers) or "peers that have left"),
            )
            self._swarm.refuse(kept, dict.fromkeys(makers, harm), said)  # guard: skip

    def _drop_masters(self) -> None:
        """Delete outdated masters of slots that other members hold, unless this peer trains or replicates them."""
        held = {slot for member in self._swarm.last().members for slot in member.slots}
        for name in map(VectorName.of_slot, held.difference(self.slots, self.replicates)):
            # A slot that the round left as it was may have lost its holder, and no new replica has it yet.
            if self.form(name) != name in self._swarm.versions() and not self.is_certified(name):  # guard: operand
                self._swarm.delete(name)

    def refuse(self, name: VectorName, suspects: Mapping[str, str]) -> None:
        """Refuse the newest version of a slot, also as this peer's anchor; the version before it counts again here."""
        mine, form = self._swarm.versions(), self.form(name)
        self._swarm.refuse(form, suspects)
        for other in {name, self._anchors.kept_name(name)} - {form}:
            if other in mine and mine[other].round == mine[form].round:
                self._swarm.refuse(other, suspects)
        if name in self._anchors.names:  # guard: never
            if name not in self._swarm.versions():
                self._publish_from_kept(name)
            self._anchors.set(name, self._swarm.mapped(name))

    def _publish_from_kept(self, name: VectorName) -> None:
        kept = self._anchors.kept_name(name)
        bundle = self._anchors.from_kept(kept, self._swarm.load(kept))
        self._swarm.publish(self._swarm.versions()[kept].round, {name: bundle})

    # ------------------------------------------------------------------ what is certified

    def certified_digest(self, name: VectorName) -> str:
        """Return the digest of the version of a vector that counts; empty for that of the run's start."""
        return certified(self._swarm.last(), name, self._start)

    def certified_round(self, name: VectorName) -> int:
        """Return the round of that version."""
        last = self._swarm.last()
        return last.round if name.slot is None else last.slots[name.slot].round

    def is_certified(self, name: VectorName) -> bool:
        """Check whether this peer's newest version of a vector is the one that counts."""
        mine = self._swarm.versions().get(name)
        return mine is not None and _is(mine, self.certified_digest(name))

    def model_round(self) -> int:
        """Return the round that this peer trains from: the last one, unless it lacks what others have of it.

        A peer that is alone, and has saved only an older round, repeats the rounds since if they end in the same bits:
        where steps end them, not the clock.
        """
        mine, last = self._swarm.versions()[SHARED], self._swarm.last()
        if self.is_certified(SHARED):
            return last.round
        body = self._swarm.consensus.body_at(mine.round)
        is_older = body is not None and body.shared in ("", mine.digest) and mine.round < last.round
        repeats = is_older and not self.others() and self._run.round.mode == "steps"
        return last.round if SHARED in self.unoffered and not repeats else mine.round

    def usable(self) -> list[VectorName]:
        """Return the anchors that deltas may start from: certified, or those whose certified version is unoffered."""
        names = [name for name in self.names if name in self._anchors.names]
        return [name for name in names if self.is_certified(name) or name in self.unoffered]

    def starts(self) -> dict[str, tuple[int, str]]:
        """Return round and digest of those anchors that are not certified."""
        mine = self._swarm.versions()
        return {n: (mine[n].round, mine[n].digest) for n in self.usable() if not self.is_certified(n)}

    @property
    def is_astray(self) -> bool:
        """Whether this peer's model is not the certified one: it is behind, or its branch of a fork was given up."""
        return SHARED in self._anchors.names and SHARED not in self.usable()

    def _rounds_behind(self, name: VectorName) -> int:
        """Return the rounds between the certified version and the one held here; one ahead must be fetched as well."""
        mine, form, round = self._swarm.versions(), self.form(name), self.certified_round(name)
        return abs(round - mine[form].round) if form in mine else round + 1

    def load(self, name: VectorName, *, before: bool = False) -> Tensor:
        """Return the weights of this peer's newest version of a vector, or of the one before it.

        Of a slot that this peer does not hold that is the kept form, uint8, if the run has such.
        """
        form, kept = self.form(name), self._anchors.kept_name(name)
        try:
            bundle = self._swarm.load(form, before=before)
        except ExchangeError:
            if not before or form == kept:
                raise
            bundle = self._anchors.from_kept(kept, self._swarm.load(kept, before=True))  # it was just adopted
        if form.is_kept:
            return bundle
        weights = self._anchors.weights_of(name, bundle)
        return weights if len(weights) == len(bundle) else weights.clone()  # without the momentum's memory


def _is(version: Version, digest: str) -> bool:
    """Check whether a version is the one with a digest; without one, that of the run's start."""
    return version.digest == digest if digest else version.round == 0


def active_of(claims: Mapping[str, Claim]) -> list[str]:
    """Return the peers that take part in rounds."""
    return [peer for peer, claim in claims.items() if claim.state == "active"]
