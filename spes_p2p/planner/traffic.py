"""The bytes that a round moves, and the least time that they take.

Legend: N peers, S shared parameters, P parameters of a slot, E experts, C claimed slots of each peer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from spes_p2p.config import RoundConfig, RunConfig
from spes_p2p.config.run import MAX_PHASE_SECONDS, MAX_ROUND_SECONDS, MAX_ROUNDS
from spes_p2p.planner.memory import FROZEN_BYTES, Setup
from spes_p2p.planner.size import FP32, ModelSize, element_bytes

TRAINING_SHARE = 0.97
"""Share of a round that should be training; what is left goes to the links."""
PATIENCE = 3.0
"""A phase's deadline over the least time that links allow."""
MAX_GROWING, GROWING_SHARE = 15, 1 / 20
"""Rounds that grow at the start of a run with long rounds: so many, and no more than this share of the run."""


@dataclass(frozen=True)
class RoundTraffic:
    """Bytes that each of several equal peers sends, and receives, in one round."""

    shared: int  # averaging the shared parameters
    slots: int  # averaging the claimed slots with their other holders
    fetched: int  # fetching other peers' slots, and serving its own
    replicated: int = 0  # sending replicas the means of slots with too few holders, and receiving such means

    @property
    def averaged(self) -> int:
        return self.shared + self.slots

    @property
    def total(self) -> int:
        return self.averaged + self.fetched + self.replicated


def round_traffic(size: ModelSize, claimed: int, num_peers: int, setup: Setup) -> RoundTraffic:
    """Return what each of `num_peers` equal peers sends, and receives, in a round with the run's codecs.

    Each of n peers that average x bytes sends, and receives, `2 (n - 1) / n x` (reduce-scatter and all-gather). N C
    claims cover the E slots evenly, so the holders' groups cost a peer `2 (N C - E) P / N`. Averaged moments travel
    with the deltas every `moments_interval` rounds, and count with their mean.

    Source: the bound of the WAN study, `[2 S (N - 1) + X (N - 1) + X (h - 1)] / N` with X = E P and h = N C / E.
    """
    codecs = setup.codecs
    moment = element_bytes(codecs.moments) / codecs.moments_interval
    shared = 2 * (num_peers - 1) / num_peers * size.shared_params
    covered = min(size.num_slots, num_peers * claimed)
    slots = 2 * (num_peers * claimed - covered) / num_peers * size.slot_params
    mean = element_bytes(codecs.slots) + setup.slot_moments * moment
    others = covered - claimed
    replicas = num_replicas(covered, num_peers * claimed, num_peers, setup.copies) / num_peers
    # Within its budget, and none of the slots that it replicates.
    fetched = min(others, setup.refresh_slots or others) * (1 - replicas / others) if others else 0.0
    return RoundTraffic(
        shared=round(shared * (element_bytes(codecs.shared) + setup.averaged_moments * moment)),
        slots=round(slots * mean),
        fetched=round(fetched * _form_bytes(setup) * size.slot_params) if num_peers > 1 else 0,
        replicated=round(replicas * mean * size.slot_params),
    )


def newcomer_bytes(size: ModelSize, claimed: int, setup: Setup) -> int:
    """Return what a peer fetches before it trains: the whole model, and the fp32 versions of its slots.

    The base of adapters is not in it: a peer may have a copy.
    """
    version = FP32 * (1 + setup.outer_momentum)
    own = 0 if setup.kept is None else claimed * version
    return round(version * size.shared_params + (size.num_slots * _form_bytes(setup) + own) * size.slot_params)


def _form_bytes(setup: Setup) -> float:
    """Return the bytes per parameter of a slot as it travels to peers that neither train nor replicate it."""
    return FP32 * (1 + setup.outer_momentum) if setup.kept is None else FROZEN_BYTES[setup.kept]


def num_replicas(covered: int, claims: int, num_peers: int, copies: int) -> int:
    """Return the number of replicas that peers keep of others' slots, if `claims` cover the `covered` slots evenly."""
    if not covered:
        return 0
    least, more = divmod(claims, covered)
    wanted = min(copies, num_peers)
    return (covered - more) * max(0, wanted - least) + more * max(0, wanted - least - 1)


@dataclass(frozen=True)
class RoundSeconds:
    """Seconds of a round's averaging and then of its fetching, with both directions of the link full."""

    averaging: float
    fetching: float

    @property
    def total(self) -> float:
        return self.averaging + self.fetching


def transfer_seconds(traffic: RoundTraffic, uplink_mbit: float, downlink_mbit: float) -> RoundSeconds:
    """Return the least seconds of each phase at the links' 10^6 bits per second, without latency and matchmaking."""
    bits_per_second = 1e6 * min(uplink_mbit, downlink_mbit)
    averaged = traffic.averaged + traffic.replicated
    return RoundSeconds(8 * averaged / bits_per_second, 8 * traffic.fetched / bits_per_second)


def of_moments_round(setup: Setup) -> Setup:
    """Return a setup of which each round carries the moments, as every `codecs.moments_interval`th does."""
    return replace(setup, codecs=setup.codecs.model_copy(update={"moments_interval": 1}))


def training_seconds(run: RunConfig, num_peers: int, tokens_per_second: float, round: int = MAX_ROUNDS) -> float:
    """Return the seconds that a round, by default a full one, trains; in mode `tokens` the peers share its tokens."""
    if run.round.mode == "steps":
        return run.round.steps_of(round) * run.train.batch_size * run.data.sequence_length / tokens_per_second
    seconds = run.round.share(round) * run.round_tokens / (num_peers * tokens_per_second)
    return min(max(seconds, run.round.least_seconds(round)), run.round.max_seconds)


@dataclass(frozen=True)
class Course:
    """What a whole run of equal peers takes and gives."""

    tokens: float
    seconds: float

    @classmethod
    def of(cls, run: RunConfig, num_peers: int, tokens_per_second: float, sync_seconds: float = 0.0) -> Course:
        """Return a run's course if each of its rounds also takes `sync_seconds` in which no peer trains."""
        total, growing = run.round.total, min(run.round.growing, run.round.total)
        seconds = [training_seconds(run, num_peers, tokens_per_second, round) for round in range(1, growing + 1)]
        trained = sum(seconds) + (total - growing) * training_seconds(run, num_peers, tokens_per_second)
        return cls(num_peers * tokens_per_second * trained, trained + total * sync_seconds)

    @property
    def days(self) -> float:
        return self.seconds / 86_400

    @property
    def tokens_a_day(self) -> float:
        return self.tokens / self.days


def least_training_seconds(least: RoundSeconds) -> float:
    """Return the training time from which on TRAINING_SHARE of a round trains."""
    return least.total * TRAINING_SHARE / (1 - TRAINING_SHARE)


def rounds_for_links(
    run: RunConfig, least: RoundSeconds, fullest: RoundSeconds | None = None, *, is_trained: bool = False
) -> RoundConfig:
    """Return a run's rounds as its links ask for, where the founder has left that open.

    Rounds of mode `tokens` train for at least `least_training_seconds`, or for the longest that is allowed. Frequent
    rounds learn more than rare ones (docs/convergence.md), so they are no longer than that, and the first ones of a new
    model are shorter. A phase may take PATIENCE times what links allow at best.

    Args:
        run: The run's settings.
        least: The least seconds of a round, the mean of many.
        fullest: Those of a round that carries the moments; by default the same.
        is_trained: Whether the run goes on from a trained model.
    """
    fullest = fullest or least
    rounds, chosen = run.round, run.round.model_fields_set
    changes: dict[str, int | float] = {}
    if rounds.mode == "tokens" and "min_seconds" not in chosen:
        longest = rounds.max_seconds if "max_seconds" in chosen else MAX_ROUND_SECONDS
        seconds = min(math.ceil(least_training_seconds(least)), longest)
        if seconds > rounds.min_seconds:
            changes |= {"min_seconds": float(seconds), "max_seconds": float(max(seconds, rounds.max_seconds))}
            if "growing" not in chosen and not is_trained:
                changes["growing"] = min(MAX_GROWING, int(GROWING_SHARE * rounds.total))
    for name, phase in (("averaging_seconds", fullest.averaging), ("exchange_seconds", fullest.fetching)):
        if name not in chosen:
            changes[name] = min(max(getattr(rounds, name), float(math.ceil(PATIENCE * phase))), MAX_PHASE_SECONDS)
    return rounds.model_copy(update=changes)
