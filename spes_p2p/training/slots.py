"""What this peer holds of the model's slots, by its claims and everybody else's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from torch import Tensor

from spes_p2p.config import RunConfig
from spes_p2p.errors import JoinError
from spes_p2p.swarm.claims import Claimant
from spes_p2p.swarm.exchange.versions import vector_names
from spes_p2p.swarm.interface import Swarm
from spes_p2p.swarm.quorum import Having, active_of, heard, latest, majoritys, state_of, voters_of
from spes_p2p.swarm.records import Claim
from spes_p2p.swarm.roster import SHARED, Member, derive_groups, is_bundle, kind_of, moments_name, slot_name, uplinks
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.fetch_plan import affordable, custodians, having_moments, preferred, relays

log = logging.getLogger(__name__)


class Holdings:
    """One peer's claims, and the anchors that go with them.

    Args:
        swarm: The peer's swarm.
        run: The run's settings.
        run_id: The run's name; seeds the allocation's lots.
        anchors: This peer's anchors; held slots have one, others do not.
        max_slots: Slots this peer can train.
        refresh_slots: Slots of others to fetch per round; None fetches all.
        clock: Tells the seconds that pass; a virtual peer's are virtual.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots: tuple[int, ...] = ()
        self.distrusted: frozenset[str] = frozenset()
        """Peers that the last roster left out: what they claim and offer does not count."""
        self.makers: Mapping[str, Sequence[str]] = {}
        """The other peers that have made the last round's version of each group."""
        self.has_committed = False
        """This peer has committed a round in this life, and so has a vote."""
        self.clock, self.refresh_slots, self.stale_rounds = clock, refresh_slots, 0
        self._swarm, self._run = swarm, run
        self._anchors, self._max_slots, self._num_slots = anchors, max_slots, run.model.num_experts
        self._averages_moments, self._keeps_moments = bool(run.averaged_moments), bool(run.kept_moments)
        self._names = vector_names(self._num_slots)
        self._claimant = Claimant(run_id, swarm.peer_id, self._num_slots, run.round)
        self._state: Literal["joining", "active"] = "joining"
        self._since, self._looked_at, self._has_left = swarm.now(), 0.0, False

    # ------------------------------------------------------------------ claims

    def announce(self, state: Literal["joining", "active"]) -> None:
        """Tell everybody what this peer holds, and keep renewing it; nothing new any more once it has left."""
        if not self._has_left:
            self._state = state
            self._swarm.announce(self._claim())

    def _claim(self) -> Claim:
        return Claim(
            peer_id=self._swarm.peer_id,
            state=self._state,
            slots=self.slots,
            max_slots=self._max_slots,
            since=self._since,
            votes=self.has_committed,
        )

    def claims(self) -> dict[str, Claim]:
        """Return everybody's claims, this peer's as it is now."""
        return {**self._swarm.read(Claim), self._swarm.peer_id: self._claim()}  # type: ignore[dict-item]

    def active(self) -> list[str]:
        """Return the peers that take part in rounds, this one included once it does."""
        return active_of(self.claims())

    def voters(self) -> list[str]:
        """Return the active peers that have a vote: all, while none has committed a round."""
        return voters_of(self.trusted(self.claims()))

    def others(self) -> list[str]:
        """Return all other peers with a claim that counts."""
        return [peer for peer in self.trusted(self.claims()) if peer != self._swarm.peer_id]

    def trusted(self, claims: Mapping[str, Claim]) -> dict[str, Claim]:
        """Return those claims that are not of peers whom the last roster left out."""
        out = self.distrusted - {self._swarm.peer_id}
        return {peer: claim for peer, claim in claims.items() if peer not in out}

    def leave(self) -> None:
        """Give the slots back at once, rather than when the lease ends; for good."""
        self.slots, self._max_slots = (), 0
        self.announce("joining")
        self._has_left = True

    def hand_over(self, seconds: float) -> list[str]:
        """Give the slots back, and serve them until others have the newest version of each; return those they lack.

        Args:
            seconds: For so long at most.
        """
        mine = self._swarm.versions()
        names = [name for slot in map(slot_name, self.slots) for name in (slot, moments_name(slot)) if name in mine]
        self.leave()
        began = self.clock()
        while True:
            mine, offers = self._swarm.versions(), self._offers(self.others()).values()
            lacking = [n for n in names if not any(n in offer and offer[n].round >= mine[n].round for offer in offers)]
            if not lacking or not offers or self.clock() >= began + seconds or self._swarm.wait(1.0):
                return lacking

    # ------------------------------------------------------------------ slots

    def resume(self, slots: Sequence[int]) -> None:
        """Claim again, before anything is allocated, what was held before a restart."""
        self.slots = tuple(sorted(slot for slot in slots if slot < self._num_slots))[: self._max_slots]

    def rebalance(self, round: int) -> dict[str, Tensor]:
        """Hold, from `round` on, what the claims allocate to this peer; return the weights of slots that are new."""
        return self._hold(self._claimant.after_round(self.clock(), self.trusted(self.claims()), round))

    def rescue_orphans(self) -> dict[str, Tensor]:
        """Once per heartbeat, adopt slots that have lost their last holder; return the weights of what is new."""
        if self.clock() - self._looked_at < self._run.round.heartbeat_seconds:
            return {}
        self._looked_at = self.clock()
        target = self._claimant.at_heartbeat(self._looked_at, self.trusted(self.claims()))
        return self._hold(target) if target != self.slots else {}

    def _hold(self, target: Sequence[int]) -> dict[str, Tensor]:
        """Make `target` the held slots; masters come from the newest version that goes with this peer's model."""
        new, old = set(target) - set(self.slots), set(self.slots) - set(target)
        missing = [slot_name(slot) for slot in sorted(set(target)) if slot_name(slot) not in self._anchors.names]
        moments: dict[str, Tensor] = {}
        if (new or old) and self.slots:
            log.info("adopting slots %s, releasing slots %s", sorted(new), sorted(old))
            self.fetch_newest([slot_name(slot) for slot in new])
        if self._keeps_moments and new:
            wanted = [moments_name(slot_name(slot)) for slot in sorted(new)]
            self.fetch_newest(wanted)
            moments = {name: self._swarm.load(name) for name in wanted if name in self._swarm.versions()}
        for slot in old:
            self._anchors.forget(slot_name(slot))
        for name in missing:
            self._anchors.set(name, self._swarm.load(name))
        self.slots = tuple(sorted(target))
        return {name: self._anchors.weights(name) for name in missing} | moments

    def fetch_newest(self, names: Collection[str]) -> dict[str, Tensor]:
        """Pull what others have newer, as far as it goes with this peer's model; return the weights that came."""
        mine, inventories = self._swarm.versions(), self._offers(self.others() if names else ())
        wanted: dict[str, Sequence[str]] = {}
        for name in sorted(names):
            having = {peer: state_of(offers[name]) for peer, offers in inventories.items() if name in offers}
            own = [state_of(mine[name])] if name in mine else []
            if having and (best := latest([*having.values(), *own], mine[SHARED].round)) not in own:
                wanted[name] = preferred(self._swarm.peer_id, name, [p for p in having if having[p] == best])
        return self.pull(wanted, 0) if wanted else {}

    # ------------------------------------------------------------------ versions

    def held_moments(self) -> set[str]:
        """Return the names of the moments that this peer trains with, where its run publishes any."""
        if self._averages_moments:
            return {moments_name(group) for group in (SHARED, *self._anchors.names)}
        return {moments_name(slot_name(slot)) for slot in self.slots} if self._keeps_moments else set()

    def fetch(
        self, roster: Sequence[Member], round: int, published: Collection[str], routed: Mapping[int, int]
    ) -> dict[str, Tensor]:
        """Pull the slots that the others have brought to `round`, or as many as this peer takes; return their weights.

        What this peer keeps for a slot's only holder comes with them, and stays on disk.

        Args:
            roster: Of the averaging that has made them.
            round: The one just committed.
            published: Versions of it that this peer has made itself.
            routed: Tokens that this peer routed to each slot since the last round.
        """
        me, groups, links = self._swarm.peer_id, derive_groups(roster), uplinks(roster)
        made = {
            n: peers
            for n, peers in groups.members.items()
            if n in self._names  # guard: strange-slot
            and n not in published
        }
        makers = {name: [peer for peer in peers if peer != me] for name, peers in made.items()}
        self.makers = makers = {name: peers for name, peers in makers.items() if peers}
        keepers = custodians(groups, self._run.round.copies, links)
        kept = {name for name in makers if me in keepers.get(name, ())}
        behind = {name: self._rounds_behind(name, round) for name in makers}
        chosen = affordable(behind, routed, self.refresh_slots, self._anchors.names) | kept
        chains = {name: peers for name, peers in relays(groups, roster, links, keepers).items() if name in chosen}
        wanted = {name: preferred(me, name, makers[name], links) for name in sorted(chosen)}
        for name in [name for name, peers in chains.items() if me not in peers]:
            # Whoever cannot be counted on to pass a slot on still need not burden its holder.
            wanted[name] = preferred(me, name, chains.pop(name), links) + wanted[name]
        if self._anchors.publishes_moments(round):
            trained = {member.peer_id for member in roster if member.tokens}
            asked = {n: having_moments(me, makers[n], keepers[n], links) for n in kept if trained & set(makers[n])}
            wanted |= {moments_name(name): preferred(me, name, asked[name], links) for name in sorted(asked)}
        # Else a liar could have its version signed by another key of its own, and nobody would be struck for it.
        authors = {name: makers[name.removeprefix("moments-")] for name in wanted}
        flats = self.pull(wanted, round, chains, links, authors)  # guard: makers-signature
        self.stale_rounds = max((self._rounds_behind(name, round) for name in makers), default=0)
        return flats

    def _rounds_behind(self, name: str, round: int) -> int:
        """Return how many rounds lie between a round and the version held here; one ahead must be fetched as well."""
        mine = self._swarm.versions()
        return abs(round - mine[name].round) if name in mine else round + 1

    def _offers(self, peers: Sequence[str]) -> Having:
        """Ask peers what they have of this run; whatever else they name is left out."""
        offers = self._swarm.inventory(peers) if peers else {}
        return {peer: {n: of[n] for n in of if n in self._names} for peer, of in offers.items()}  # guard: strange-offer

    def pull(
        self,
        wanted: Mapping[str, Sequence[str]],
        min_round: int,
        relays: Mapping[str, Sequence[str]] | None = None,
        uplinks: Mapping[str, float] | None = None,
        authors: Mapping[str, Sequence[str]] | None = None,
    ) -> dict[str, Tensor]:
        """Fetch versions as `Swarm.pull` does; return the weights of those that came, and say which did not."""
        timeout = self._run.round.exchange_seconds
        failures = self._swarm.pull(
            wanted, min_round=min_round, timeout=timeout, relays=relays, uplinks=uplinks, authors=authors
        )
        for name, reason in failures.items():
            log.warning("keeping the old version of %s: %s", name, reason)
        of_use = [name for name in wanted if is_bundle(name) or name in self.held_moments()]
        return {name: self.load(name) for name in of_use if name not in failures}

    def load(self, name: str, *, before: bool = False) -> Tensor:
        """Return the flat weights, or the moments, of the newest version that this peer has, or the one before it."""
        bundle = self._swarm.load(name, before=before)
        return self._anchors.split(name, bundle)[0].clone() if is_bundle(name) else bundle

    def catch_up(
        self, peers: Sequence[str], min_round: int = 0, routed: Mapping[int, int] | None = None
    ) -> dict[str, Tensor]:
        """Take over the state that most have who take part in rounds; return the weights that changed.

        Args:
            peers: To ask, beside those who serve versions without a claim.
            min_round: Older states of `shared` have no vote, where there is a newer one.
            routed: Tokens routed to each slot: takes no more of the others' slots than in any round; None takes all.

        Raises:
            JoinError: others have it, but `shared` could not be pulled.
        """
        seeds = {
            peer
            for name, serving in self._swarm.seeds().items()
            if name in self._names  # guard: strange-seed
            for peer in serving
        }
        asked = sorted({*peers, *seeds} - {self._swarm.peer_id, *self.distrusted})  # guard: distrusted-seeds
        inventories = self._offers(asked)
        mine = self._swarm.versions()
        held = {**inventories, self._swarm.peer_id: mine}
        leading = heard(held, self.voters(), min_round)
        shared = [state_of(offers[SHARED]) for offers in leading.values() if SHARED in offers]
        model_round = majoritys(shared)[0] if shared else 0
        wanted: dict[str, list[str]] = {}
        behind: dict[str, int] = {}
        averaged = self.held_moments() if self._averages_moments else set()
        for name in sorted({n for have in inventories.values() for n in have if is_bundle(n) or n in averaged}):
            is_slot = kind_of(name).endswith("slot")
            states = [state_of(have[name]) for have in (held if is_slot else leading).values() if name in have]
            if not states:
                continue
            best = latest(states, model_round) if is_slot else majoritys(states)
            if name not in mine or state_of(mine[name]) != best:
                having = [p for p, offers in inventories.items() if name in offers and state_of(offers[name]) == best]
                wanted[name] = preferred(self._swarm.peer_id, name, having)
                behind[name] = self._rounds_behind(name, best[0])
        budget = None if routed is None else self.refresh_slots
        chosen = affordable(behind, routed or {}, budget, self._anchors.names)
        wanted = {name: asked for name, asked in wanted.items() if name in chosen}
        flats = self.pull(wanted, 0)
        if SHARED in wanted and SHARED not in flats:
            raise JoinError("could not fetch the swarm's shared state from any peer; try again")
        for name in self._anchors.names:
            self._anchors.set(name, self._swarm.load(name))
        if wanted:
            round = self._swarm.versions()[SHARED].round
            log.info("caught up with round %d: fetched %d of %d versions", round, len(flats), len(wanted))
        return flats
