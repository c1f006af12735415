"""What this peer holds of the model's slots, by its claims and the others'."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from spes_p2p.codecs.vectors import digest
from spes_p2p.config import RunConfig
from spes_p2p.errors import AbsentError, ExchangeError
from spes_p2p.swarm.certificate import known_peers, max_strangers, strangers
from spes_p2p.swarm.claims import Claimant
from spes_p2p.swarm.exchange.versions import Version, vector_names
from spes_p2p.swarm.interface import Swarm
from spes_p2p.swarm.names import SHARED, VectorName, by_reason
from spes_p2p.swarm.records import Claim, Progress
from spes_p2p.swarm.roster import Roster
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.fetch_plan import FetchPlan, affordable, plan_fetch, preferred, replicas
from spes_p2p.training.round_work import StoredVectors

log = logging.getLogger(__name__)

Having = Mapping[str, Mapping[VectorName, Version]]
"""The versions of each peer."""


class HeldSlots:
    """The slots that this peer claims, and their anchors.

    Of these slots, and of those that it keeps for others, a peer has the fp32 versions (*masters*). Of all others it
    has the kept forms, if the run has such.

    Args:
        swarm: The peer's swarm.
        run: The run's settings.
        run_id: The run's name; seeds the allocation's lots.
        anchors: This peer's anchors: held slots have one, other slots have none.
        max_slots: Slots that this peer can train.
        refresh_slots: Slots of others to fetch per round; None fetches all.
        draw: Draws the bundle of a slot at the run's start, if the run has kept forms.
        clock: Seconds that pass; virtual for a virtual peer.
    """

    def __init__(
        self,
        swarm: Swarm,
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
        self.distrusted: frozenset[str] = frozenset()
        """Peers that a roster left out and this peer has not met since: their claims and offers do not count."""
        self.makers: Mapping[VectorName, Sequence[str]] = {}
        """The other peers that made the last round's version of each slot."""
        self.lost: frozenset[VectorName] = frozenset()
        """Vectors whose certified version no peer offered when this one needed it."""
        self.clock = clock
        self.refresh_slots = refresh_slots
        self.stale_rounds = 0
        self._swarm = swarm
        self._run = run
        self._anchors = anchors
        self._max_slots = max_slots
        self._chosen_slots = max_slots
        self._num_slots = run.num_slots
        self._has_kept = anchors.form is not None
        self._names = vector_names(self._num_slots, has_kept=self._has_kept)
        self._draw = draw
        self.run_id = run_id
        self._claimant = Claimant(run_id, swarm.peer_id, self._num_slots, run.round)
        self._state: Literal["joining", "active"] = "joining"
        self._since = swarm.now()
        self._checked_at = 0.0
        self._has_left = False
        self._missed: Counter[str] = Counter()
        self._unloaded: set[VectorName] = set()  # weights that a failed `catch_up` has fetched, and the model lacks

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
        me, known = self._swarm.peer_id, self._swarm.known()
        return {
            peer: claim
            for peer, claim in claims.items()
            if peer == me
            or (peer not in self.distrusted and (known is None or peer in known))  # guard: certified-claims
        }

    def expected(self, claims: Mapping[str, Claim]) -> set[str]:
        """Return the peers that complete a roster: those whose claims count, and a few newcomers that follow the run.

        A newcomer that did not come is waited for in fewer and fewer rounds, otherwise idle ones would delay them all.
        """
        last, active = self._swarm.last(), set(active_of(claims))
        counted = active & self.trusted(claims).keys()
        following = {
            peer
            for peer, record in self._swarm.read(Progress).items()
            if record.round >= last.round - 1  # type: ignore[attr-defined]
        }
        due = [peer for peer in (active - counted) & following if not self._missed[peer] & (self._missed[peer] - 1)]
        new = strangers(last, due)[: max_strangers(len(last.voters))]  # guard: waits-for-ghosts
        return counted | set(new)

    def has_met(self, roster: Roster, expected: Collection[str]) -> None:
        """Note which peers a roster leaves out, and count the rosters in a row that each newcomer has missed."""
        met = {member.peer_id for member in roster}
        self.distrusted = roster.distrusted | (self.distrusted - met)  # one that does not come is not trusted again
        for peer in [peer for peer in self._missed if peer in met]:
            del self._missed[peer]
        self._missed.update(peer for peer in {*self._missed, *expected} - met)

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

    @property
    def refreshed_slots(self) -> int | None:
        """Slots of others to fetch per round; None fetches all. A paused peer fetches none until it is resumed."""
        is_paused = self._max_slots > 0 == self._chosen_slots
        return 0 if is_paused else self.refresh_slots

    def hand_over(self, seconds: float) -> list[VectorName]:
        """Release all slots, and serve until others have the newest versions that this peer has, at most so long.

        Returns:
            The versions that no other peer has.
        """
        slots = set(self.slots) | {slot for slot in range(self._num_slots) if self._has_certified(slot)}
        self.leave()
        began, masters = self.clock(), list(map(VectorName.of_slot, sorted(slots)))
        while True:
            mine = self._swarm.versions()
            held = [name for name in masters if name in mine]
            offers = self._offers(self.others()).values()
            lacking = [n for n in held if not any(n in offer and offer[n].round >= mine[n].round for offer in offers)]
            if not lacking or not offers or self.clock() >= began + seconds or self._swarm.wait(1.0):
                return lacking

    def _has_certified(self, slot: int) -> bool:
        """Check whether this peer has the trained master of a slot that counts, perhaps as the only one."""
        name = VectorName.of_slot(slot)
        return bool(self.certified_digest(name)) and self.is_certified(name)

    # ------------------------------------------------------------------ slots

    def resume(self, slots: Sequence[int]) -> None:
        """Claim again, before anything is allocated, what was held before a restart."""
        self.slots = tuple(sorted(slot for slot in slots if slot < self._num_slots))[: self._max_slots]

    def rebalance(self, round: int) -> StoredVectors:
        """Hold, after `round` is committed, what the claims allocate to this peer; return what the model needs."""
        claims = self.trusted(self.claims())
        target = self._claimant.after_round(self.clock(), claims)
        if len(target) > self._chosen_slots:  # its owner has lowered the limit: others hold what it keeps least
            holders = Counter(slot for claim in claims.values() for slot in claim.slots)
            target = tuple(sorted(sorted(target, key=holders.__getitem__)[: self._chosen_slots]))
        return self._hold(target)

    def rescue_orphans(self) -> StoredVectors:
        """Once per heartbeat, adopt slots that lost their last holder; return what the model needs."""
        if self.clock() - self._checked_at < self._run.round.heartbeat_seconds:
            return StoredVectors()
        self._checked_at = self.clock()
        target = self._claimant.at_heartbeat(self._checked_at, self.trusted(self.claims()))
        return self._hold(target) if target != self.slots else StoredVectors()

    def _hold(self, target: Sequence[int]) -> StoredVectors:
        """Hold `target`; weights, of released slots too, are the certified version, or the newest if none has that."""
        new = [VectorName.of_slot(slot) for slot in sorted(set(target) - set(self.slots))]
        old = [VectorName.of_slot(slot) for slot in sorted(set(self.slots) - set(target))]
        missing = [name for name in map(VectorName.of_slot, sorted(set(target))) if name not in self._anchors.names]
        if (new or old) and self.slots:
            log.info("adopting slots %s, releasing slots %s", [n.slot for n in new], [n.slot for n in old])
            self.fetch_newest({*new, *missing})  # a peer that resumes has the slots, and perhaps old versions of them
        elif self._has_kept:
            self.fetch_newest(missing)  # where slots travel as fp32 versions, the others' came when this peer joined
        self._make_masters(missing)
        for name in old:
            self._anchors.forget(name)
        released = StoredVectors([name for name in old if self.form(name) in self._swarm.versions()], self.load)
        for name in missing:
            self._anchors.set(name, self._swarm.mapped(name))
        self.slots = tuple(sorted(target))
        return released | {name: self._anchors.weights(name) for name in missing}

    def fetch_newest(self, names: Collection[VectorName]) -> StoredVectors:
        """Fetch the versions that go with this peer's model, where it lacks them; return the vectors that came."""
        lacking = [name for name in sorted(names) if not self._is_there(name)]
        plan = self._plan(lacking, self._offers(self.others() if lacking else ()))
        return self._pull(plan, 0) if plan.wanted else StoredVectors()

    # ------------------------------------------------------------------ kept forms

    def form(self, name: VectorName) -> VectorName:
        """Return the version that this peer's model has of some weights: of slots of others, the kept form."""
        return name.kept if self._has_kept and name.slot is not None and name not in self._anchors.names else name

    def _is_there(self, name: VectorName) -> bool:
        """Tell whether the weights that count are here, or this peer can draw them."""
        return self.is_certified(name) or (self._has_kept and name.slot is not None and not self.certified_digest(name))

    def publish_initial(self, name: VectorName, bundle: Tensor) -> None:
        """Publish a vector of the run's start; of a slot only the kept form, if the run has such."""
        if self.form(name) != name:
            name, bundle = name.kept, self._anchors.kept_form(name, bundle)
        self._swarm.publish(0, {name: bundle})

    def common_weights(self, name: VectorName) -> Tensor:
        """Return a slot's weights as all peers have them."""
        if self._anchors.form is None:
            return self.load(name)
        return self._anchors.form.values(self._swarm.load(name.kept))

    def _make_masters(self, names: Iterable[VectorName]) -> None:
        """Make the masters that no peer has: of the run's start, or of the kept form that is newer than any master."""
        for name in names if self._has_kept else ():
            mine = self._swarm.versions()
            if self._is_there(name):
                if not self.is_certified(name):
                    assert self._draw is not None
                    self._swarm.publish(0, {name: self._draw(name)})
            elif name.kept in mine and (name not in mine or name in self.lost):
                round = mine[name.kept].round
                if name in mine and mine[name].round >= round:
                    continue
                log.warning(
                    "%s: no peer has its fp32 weights of round %d; going on from its kept form, in %s",
                    *(name, round, self._run.frozen_storage),
                )
                self._publish_from_kept(name)

    def _make_kept(self, names: Iterable[VectorName]) -> None:
        """Make the kept forms of masters that have come; refuse a certified one that does not follow from them."""
        for name in names if self._has_kept else ():
            if name.slot is None or name.is_kept or self.is_certified(name.kept) or not self.is_certified(name):
                continue
            form = self._anchors.kept_form(name, self._swarm.load(name))
            said = self.certified_digest(name.kept)
            if said in ("", digest(form)):
                self._swarm.publish(self.certified_round(name), {name.kept: form})
                continue
            makers = self.makers.get(name, ())
            harm = f"the kept form of {name} does not follow from its fp32 weights"
            log.warning(
                "round %d: refused the kept form of %s, made by %s: it does not follow from its fp32 weights",
                *(self.certified_round(name), name, ", ".join(peer[-6:] for peer in makers) or "peers that have left"),
            )
            self._swarm.refuse(name.kept, dict.fromkeys(makers, harm), said)  # guard: kept-follows

    def _drop_masters(self, kept: Collection[VectorName], roster: Roster) -> None:
        """Delete the masters of slots that other members hold, unless this peer is to keep them."""
        for name in map(VectorName.of_slot, range(self._num_slots)):
            is_elsewhere = name in roster.groups and name not in (*kept, *self._anchors.names)
            # A slot that the round left as it was may have lost its holder, and no new keeper has it yet.
            if is_elsewhere and name in self._swarm.versions() and not self.is_certified(name):  # guard: last-master
                self._swarm.delete(name)

    def refuse(self, name: VectorName, suspects: Mapping[str, str]) -> None:
        """Refuse the newest version of a slot, also as this peer's anchor; the version before it counts again here."""
        mine, form = self._swarm.versions(), self.form(name)
        self._swarm.refuse(form, suspects)
        for other in {name, name.kept} - {form} if self._has_kept else ():
            if other in mine and mine[other].round == mine[form].round:
                self._swarm.refuse(other, suspects)
        if name in self._anchors.names:  # guard: refused-anchor
            if name not in self._swarm.versions():
                self._publish_from_kept(name)
            self._anchors.set(name, self._swarm.mapped(name))

    def _publish_from_kept(self, name: VectorName) -> None:
        version = self._swarm.versions()[name.kept]
        bundle = self._anchors.from_kept(name, self._swarm.load(name.kept))
        self._swarm.publish(version.round, {name: bundle})

    # ------------------------------------------------------------------ what is certified

    def certified_digest(self, name: VectorName) -> str:
        """Return the digest of the version of a vector's weights that counts; empty for that of the run's start."""
        last = self._swarm.last()
        if name.slot is None:
            return last.shared
        state = last.slots[name.slot]
        return (state.kept or "") if name.is_kept else state.digest

    def certified_round(self, name: VectorName) -> int:
        """Return the round of that version."""
        last = self._swarm.last()
        return last.round if name.slot is None else last.slots[name.slot].round

    def is_certified(self, name: VectorName) -> bool:
        """Tell whether this peer's newest version of a vector's weights is the one that counts."""
        mine = self._swarm.versions().get(name)
        if mine is None:
            return False
        said = self.certified_digest(name)
        return mine.digest == said if said else mine.round == 0

    def model_round(self) -> int:
        """Return the round that this peer trains from: the last one, unless it lacks what others have of it.

        A peer that is alone, and has saved only an older round, repeats the rounds since if they end in the same bits:
        where steps end them, not the clock.
        """
        mine, last = self._swarm.versions()[SHARED], self._swarm.last()
        if self.is_certified(SHARED):
            return last.round
        body = self._swarm.certified(mine.round)
        is_older = body is not None and body.shared in ("", mine.digest) and mine.round < last.round
        repeats = is_older and not self.others() and self._run.round.mode == "steps"
        return last.round if SHARED in self.lost and not repeats else mine.round

    def starts(self) -> dict[str, tuple[int, str]]:
        """Return round and digest of the anchors that are not certified, where no peer has the certified version."""
        mine = self._swarm.versions()
        return {
            name: (mine[name].round, mine[name].digest)
            for name in self._anchors.names
            if name in self.lost and name in mine and not self.is_certified(name)
        }

    def usable(self) -> list[VectorName]:
        """Return the anchors that deltas may start from: certified, or of a vector whose certified version is lost."""
        return [name for name in self._anchors.names if self.is_certified(name) or name in self.lost]

    @property
    def is_astray(self) -> bool:
        """Whether this peer's model is not the certified one: it is behind, or its branch of a fork was given up."""
        return SHARED in self._anchors.names and SHARED not in self.usable()

    def _plan(self, names: Sequence[VectorName], offers: Having) -> FetchPlan:
        """Return what to fetch of these vectors; remember which ones no peer has any more."""
        me, last = self._swarm.peer_id, self._swarm.last()
        known = known_peers(last) - {me}
        num_answers = len(offers.keys() & known)
        wanted: dict[VectorName, list[str]] = {}
        digests: dict[VectorName, str] = {}
        lost = set(self.lost)
        for name in names:
            certified = [peer for peer, offered in offers.items() if self._is_wanted(name, offered.get(name))]
            if certified:
                lost.discard(name)
            elif 2 * num_answers >= len(known):  # guard: lost-version
                lost.add(name)  # the newest other version goes on
            having = certified or [peer for peer, offered in offers.items() if name in lost and name in offered]
            states = Counter((offers[peer][name].round, offers[peer][name].digest) for peer in having)
            if not states:
                continue
            # Of a lost version, the newest; of equally new ones the most frequent.
            best = min(states, key=lambda state: (-state[0], -states[state], state[1]))
            mine = self._swarm.versions().get(name)
            if mine is None or (certified and mine.digest != best[1]) or mine.round < best[0]:
                wanted[name] = preferred(me, name, [peer for peer in having if offers[peer][name].digest == best[1]])
                digests[name] = best[1]
        self.lost = frozenset(lost)
        return FetchPlan(wanted, digests=digests)

    def _is_wanted(self, name: VectorName, version: Version | None) -> bool:
        if version is None:
            return False
        said = self.certified_digest(name)
        return version.digest == said if said else version.round == 0

    # ------------------------------------------------------------------ versions

    def fetch(
        self, roster: Roster, round: int, published: Collection[VectorName], routed: Mapping[int, int]
    ) -> StoredVectors:
        """Fetch the others' slots of which this peer lacks what counts, within `refresh_slots`; return their vectors.

        Versions that this peer keeps as a replica come with them, and stay on disk.

        Args:
            roster: Of the averaging that made them.
            round: The round just committed.
            published: Versions of it that this peer made itself.
            routed: Tokens that this peer routed to each slot since the last round.
        """
        me = self._swarm.peer_id
        makers = {
            name: [peer for peer in peers if peer != me]
            for name, peers in roster.groups.items()
            if name in self._names  # guard: strange-slot
            and name not in published
            and self.certified_round(name) == round
        }
        self.makers = {name: peers for name, peers in makers.items() if peers}
        keepers = replicas(roster.groups, self._run.round.copies, roster.uplinks)
        kept = {name for name in self.makers if me in keepers.get(name, ())}
        missed = self._missed_versions() - self.makers.keys()
        behind = {name: self._rounds_behind(name, self.certified_round(name)) for name in (*self.makers, *missed)}
        chosen = affordable(behind, routed, self.refreshed_slots, self._anchors.names) | kept
        masters = {name for name in chosen if name in kept or self.form(name) == name} if self._has_kept else None
        plan = plan_fetch(me, roster, self.makers, chosen - missed, keepers, masters=masters)
        digests = {name: self.certified_digest(name) for name in plan.wanted}
        vectors = self._pull(replace(plan, digests=digests), round)
        vectors |= self.fetch_newest({self.form(name) for name in missed & chosen})
        if self._has_kept:
            self._drop_masters({name for name, peers in keepers.items() if me in peers}, roster)
        self._keep_orphans(roster)
        self.stale_rounds = max((self._rounds_behind(name, self.certified_round(name)) for name in behind), default=0)
        return vectors

    def _missed_versions(self) -> set[VectorName]:
        """Return the slots of others whose version here is not the one that counts."""
        slots = set(map(VectorName.of_slot, range(self._num_slots))) - set(self._anchors.names)
        return {name for name in slots if self.certified_digest(name) and not self.is_certified(self.form(name))}

    def _keep_orphans(self, roster: Roster) -> None:
        """Fetch the masters of slots that no member holds, if this peer is one of those that are to keep them.

        Their last holder has left, and serves them until another peer has them; the members may have no room for them.
        """
        slots = map(VectorName.of_slot, range(self._num_slots))
        taken = roster.groups.keys() | set(self._anchors.names)
        orphans = [name for name in slots if name not in taken and self.certified_digest(name)]
        groups = {SHARED: roster.groups.get(SHARED, ()), **dict.fromkeys(orphans, ())}
        keepers = replicas(groups, self._run.round.copies, roster.uplinks)
        mine = [name for name in orphans if self._swarm.peer_id in keepers.get(name, ())]
        offers = self._offers(self.others()) if mine else {}
        lacking = [
            name
            for name in mine
            if not self.is_certified(name)
            and any(self._is_wanted(name, offered.get(name)) for offered in offers.values())
        ]
        plan = self._plan(lacking, offers)
        if plan.wanted:
            self._pull(plan, 0)

    def _rounds_behind(self, name: VectorName, round: int) -> int:
        """Return the rounds between `round` and the version held here; a version ahead must be fetched as well."""
        mine, name = self._swarm.versions(), name if name.is_kept else self.form(name)
        return abs(round - mine[name].round) if name in mine else round + 1

    def _offers(self, peers: Sequence[str]) -> Having:
        """Ask peers which versions of this run's vectors they have; other names are left out."""
        offers = self._swarm.inventory(peers) if peers else {}
        return {
            peer: {
                VectorName(name): version
                for name, version in offered.items()
                if name in self._names  # guard: strange-offer
            }
            for peer, offered in offers.items()
        }

    def _pull(self, plan: FetchPlan, min_round: int) -> StoredVectors:
        """Fetch versions as `Swarm.pull` does; return the vectors that came, and log the others."""
        failures = self._swarm.pull(
            plan.wanted,
            min_round=min_round,
            timeout=self._run.round.exchange_seconds,
            authors=plan.authors or None,  # guard: makers-signature
            digests=plan.digests or None,
        )
        for reason, names in by_reason(failures).items():
            log.warning("could not fetch %s: %s", names, reason, extra={"heals": True})
        came = [name for name in plan.wanted if name not in failures]
        self._make_kept(came)
        return StoredVectors([name.weights for name in came], self.load)

    def load(self, name: VectorName, *, before: bool = False) -> Tensor:
        """Return the weights of this peer's newest version of a vector, or of the one before it.

        Of a slot that this peer does not hold that is the kept form, uint8, if the run has such.
        """
        form = self.form(name)
        try:
            bundle = self._swarm.load(form, before=before)
        except ExchangeError:
            if not (before and self._has_kept and form == name and name.slot is not None):
                raise
            bundle = self._anchors.from_kept(name, self._swarm.load(name.kept, before=True))  # it was just adopted
        if not form.is_weights:
            return bundle
        weights, momentum = self._anchors.split(name, bundle)
        return weights if momentum is None else weights.clone()

    def catch_up(self, peers: Sequence[str], routed: Mapping[int, int] | None = None) -> StoredVectors:
        """Take over the versions that the last certificate names; return the vectors that changed.

        Args:
            peers: To ask, beside peers that are here without a claim.
            routed: Tokens routed to each slot: fetch no more of the others' slots than in any round; None fetches all.

        Raises:
            AbsentError: a peer has `shared`, but it could not be fetched.
        """
        asked = sorted({*peers, *self._swarm.contacts()} - self.distrusted)  # guard: distrusted-seeds
        weights = [SHARED, *map(self.form, map(VectorName.of_slot, range(self._num_slots)))]
        plan = self._plan([name for name in weights if not self.is_certified(name)], self._offers(asked))
        behind = {name: self._rounds_behind(name, self.certified_round(name)) for name in plan.wanted}
        budget = None if routed is None else self.refreshed_slots
        chosen = affordable(behind, routed or {}, budget, self._anchors.names)
        wanted = {name: peers for name, peers in plan.wanted.items() if name in chosen}
        vectors = self._pull(replace(plan, wanted=wanted), 0) if wanted else StoredVectors()
        self._unloaded |= set(vectors)
        if SHARED in wanted and SHARED not in vectors:
            raise AbsentError("could not fetch the swarm's shared state from any peer; try again")
        self._make_masters(name for name in self._anchors.names if name != SHARED)
        for name in self._anchors.names:
            self._anchors.set(name, self._swarm.mapped(name))
        if wanted:
            round = self._swarm.versions()[SHARED].round
            log.info("caught up with round %d: fetched %d of %d versions", round, len(vectors), len(wanted))
        vectors |= StoredVectors(self._unloaded, self.load)
        self._unloaded = set()
        return vectors


def active_of(claims: Mapping[str, Claim]) -> list[str]:
    """Return the peers that take part in rounds."""
    return [peer for peer, claim in claims.items() if claim.state == "active"]
