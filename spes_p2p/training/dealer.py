"""Which data a peer trains in a round, and what a roster has trained of them; for runs whose peers share data."""

from __future__ import annotations

import logging
import math
from typing import cast

from spes_p2p.config import RunConfig
from spes_p2p.data.packing import TokenSource
from spes_p2p.data.shared import DealtDraws
from spes_p2p.swarm.certificate import Body, max_strangers, strangers
from spes_p2p.swarm.interface import Swarm
from spes_p2p.swarm.ledger import MAX_SPARES, Deal, DealRules, Drawn, Ledger
from spes_p2p.swarm.roster import Roster
from spes_p2p.training.process_group import ProcessGroup
from spes_p2p.training.round_work import Dealt
from spes_p2p.training.slots import HeldSlots

log = logging.getLogger(__name__)

MIN_USUAL = 16
"""Fewest batches of a range while no pace is known, in mode `tokens`."""


def deal_rules(run: RunConfig, round: int) -> DealRules:
    """Return the numbers of a run that a round's deal depends on."""
    by_steps = run.round.mode == "steps"
    batch_tokens = run.train.batch_size * run.data.sequence_length
    share = run.round.share
    whole_round = max(MIN_USUAL, math.ceil(run.round_tokens * share(round) / batch_tokens))
    return DealRules(
        usual=run.round.steps_of(round) if by_steps else whole_round,
        is_exact=by_steps,
        growth=share(round) / share(max(1, round - 1)),
    )


class Dealer:
    """One peer's view of the ledger.

    Args:
        swarm: The peer's swarm.
        run: The run's settings; its data are shared.
        held: Knows the peers' claims.
    """

    def __init__(self, swarm: Swarm, run: RunConfig, held: HeldSlots) -> None:
        self._swarm = swarm
        self._held = held
        self._run = run

    def _source(self, round: int) -> Body | None:
        """Return the body that a round is dealt from; None if this peer does not know it."""
        return self._swarm.certified(max(0, round - 1))

    def _deal(self, source: Body, round: int) -> Deal:
        members = [member.peer_id for member in source.members]
        return Deal(self._ledger_of(source), members, round, deal_rules(self._run, round))

    def _ledger_of(self, body: Body) -> Ledger:
        return body.ledger or Ledger.empty()

    def deal(self, round: int) -> Dealt:
        """Return the range that this peer trains in a round; an empty one if this peer cannot know it."""
        source, me = self._source(round), self._swarm.peer_id
        if source is None:
            return Dealt(round, "", (), None)
        deal = self._deal(source, round)
        spare = None if deal.has(me) else self._spare(source)
        return Dealt(round, source.digest, deal.range_of(me, spare), spare)

    def _spare(self, source: Body) -> int:
        """Return the place of this peer among those without a range, those first that have been here longest.

        All peers see about the same claims, so two rarely take one place. Where they do, one of them does not count.
        """
        last, me, known = self._swarm.last(), self._swarm.peer_id, self._swarm.known()
        members = {member.peer_id for member in source.members}
        claims = {peer: claim for peer, claim in self._held.claims().items() if peer not in members}
        new = [peer for peer in claims if known is not None and peer not in known]
        excess = set(strangers(last, new)[max_strangers(len(last.voters)) :])  # no roster takes them
        order = sorted(claims, key=lambda peer: (peer in excess, claims[peer].since, peer))
        return min(order.index(me), MAX_SPARES - 1)

    def said(self, round: int, tokens: int, dealt: Dealt | None, drawn: int) -> dict[str, int | None]:
        """Return this peer's tokens and draws of a round for its roster entry.

        Nothing counts that was dealt from a branch of the chain that this peer has left.
        """
        if dealt is not None:
            log.info("round %d: trained the batches %s", dealt.round, dealt.words(drawn))
        source = self._source(round)
        is_here = dealt is not None and source is not None and dealt.source == source.digest  # guard: dealt-here
        if dealt is None or dealt.round != round or not is_here:
            return {"tokens": 0}
        return {"tokens": tokens, "drawn": drawn, "spare": dealt.spare}

    def ledger(self, roster: Roster) -> Ledger | None:
        """Return the ledger after the round of a roster; None for an empty one, or if this peer cannot know it."""
        last = roster.last
        source = self._source(last.round + 1) if last is not None else None
        if last is None or source is None:
            return None
        members = {member.peer_id: member for member in roster}
        drawn = {
            entry.peer_id: Drawn(members[entry.peer_id].drawn if entry.tokens else 0, members[entry.peer_id].spare)
            for entry in roster.entries
        }
        deal = self._deal(source, last.round + 1)
        return deal.settled(self._ledger_of(last), drawn)


class Draws:
    """What this rank may draw of shared data, range by range.

    Args:
        run: The run's settings; nothing is dealt if its peers do not share data.
        data: This rank's source.
        group: The peer's ranks.
        dealer: The leader's; None on other ranks.
    """

    def __init__(self, run: RunConfig, data: TokenSource, group: ProcessGroup, dealer: Dealer | None) -> None:
        self._is_shared = run.data.is_shared
        self._data = cast(DealtDraws, data)
        self._group = group
        self._dealer = dealer
        self.dealt: Dealt | None = None
        """The range that is drawn."""

    def deal(self, round: int) -> Dealt | None:
        """Draw from the beginning of a round's range from now on, on all ranks."""
        if not self._is_shared:
            return None

        def of_leader() -> Dealt:
            assert self._dealer is not None
            return self._dealer.deal(round)

        self.dealt = self._group.from_leader(of_leader)
        self._data.deal(self.dealt.ranges)
        return self.dealt

    @property
    def num_drawn(self) -> int:
        """Batches drawn since the last deal."""
        return self._data.num_drawn if self.dealt is not None else 0

    @property
    def are_exhausted(self) -> bool:
        """Whether no batch of the range is left."""
        return self.dealt is not None and self._data.is_exhausted
