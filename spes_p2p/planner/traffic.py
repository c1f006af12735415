"""What a round moves, and how long that takes at least.

Legend: N peers, S shared parameters, P parameters of a slot, E experts, C claimed slots of each peer.
"""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.config import RunConfig
from spes_p2p.planner.memory import Setup
from spes_p2p.planner.size import FP32, ModelSize, element_bytes, is_exact


@dataclass(frozen=True)
class RoundTraffic:
    """Bytes of one peer in one round; where all peers are alike it sends as many as it receives.

    Attributes:
        shared: Of averaging what everybody trains.
        slots: Of averaging the held slots with their other holders.
        pulled: Of fetching the slots that others hold, and of sending its own to those who do not.
        kept: Of fetching the moments that it keeps for slots with too few holders, and of sending its own to who does.
    """

    shared: int
    slots: int
    pulled: int
    kept: int = 0

    @property
    def averaged(self) -> int:
        return self.shared + self.slots

    @property
    def total(self) -> int:
        return self.averaged + self.pulled + self.kept


def round_traffic(size: ModelSize, claimed: int, num_peers: int, setup: Setup) -> RoundTraffic:
    """Returns what each of `num_peers` equal peers sends and receives in a round, as the run's codecs have it.

    A group of n peers that averages x bytes sends, and receives, `2 (n - 1) / n x` of each member (reduce-scatter and
    all-gather). N C claims cover the E slots evenly, so the holders' groups cost a peer `2 (N C - E) P / N`. Averaged
    moments travel with the deltas, in one of so many rounds; here is their mean. See `pulled_bytes` for the rest.

    Source: the bound of the WAN study, `[2 S (N - 1) + X (N - 1) + X (h - 1)] / N` with X = E P and h = N C / E.

    Args:
        size: From `model_size`.
        claimed: C.
        num_peers: N.
        setup: How deltas travel, what of the moments is averaged, and whether there is an outer momentum.
    """
    codecs = setup.codecs
    moments = setup.averaged_moments * element_bytes(codecs.moments) / codecs.moments_interval
    shared = 2 * (num_peers - 1) / num_peers * size.shared_params
    covered = min(size.num_slots, num_peers * claimed)
    slots = 2 * (num_peers * claimed - covered) / num_peers * size.slot_params
    own = setup.kept_moments * element_bytes(codecs.moments) / codecs.moments_interval
    kept = kept_slots(covered, num_peers * claimed, num_peers, setup.copies) / num_peers * own
    return RoundTraffic(
        shared=round(shared * (element_bytes(codecs.shared) + moments)),
        slots=round(slots * (element_bytes(codecs.slots) + moments)),
        pulled=round(pulled_bytes(covered - claimed, setup) * size.slot_params) if num_peers > 1 else 0,
        kept=round(kept * size.slot_params),
    )


def kept_slots(covered: int, claims: int, num_peers: int, copies: int) -> int:
    """Returns how many copies of slots others must keep, where so many claims cover the slots evenly.

    Args:
        covered: Slots that have a holder.
        claims: Of all peers.
        num_peers: N.
        copies: Peers on which a slot should live at least.
    """
    least, more = divmod(claims, covered)
    wanted = min(copies, num_peers)
    return (covered - more) * max(0, wanted - least) + more * max(0, wanted - least - 1)


def pulled_bytes(num_others: int, setup: Setup) -> float:
    """Returns the bytes of fetching others' slots in a round, to each parameter of one slot.

    Where deltas travel exactly, a slot comes as a full copy, with its outer momentum: 4 bytes, or 8. Else its last
    version is brought forward by the holders' mean delta, or by one for each round that it lies behind, unless those
    are too many or a full copy is less: so fetching fewer slots per round spares nothing before that.

    Args:
        num_others: Slots that others train.
        setup: How deltas travel, and how many slots are fetched.
    """
    if not num_others:
        return 0.0
    fetched = min(num_others, setup.refresh_slots or num_others)
    copy = FP32 * (2.0 if setup.slot_momentum else 1.0)
    rounds_behind = num_others / fetched
    if is_exact(setup.codecs.slots) or rounds_behind > setup.codecs.keyframe_rounds:
        return fetched * copy
    return fetched * min(copy, rounds_behind * element_bytes(setup.codecs.slots))


@dataclass(frozen=True)
class StarTraffic:
    """Bytes of one round of SPES, where a server sits between its peers and everything travels in fp32.

    Attributes:
        sent: By each peer: what it trains, `4 (S + C P)`.
        received: By each peer: the whole model, `4 (S + E P)`.
    """

    sent: int
    received: int


def star_traffic(size: ModelSize, claimed: int) -> StarTraffic:
    """Returns what each of SPES's peers sends and receives in a round; its server does so with every one of them.

    Source: SPES (https://arxiv.org/abs/2602.11543), and its code.

    Args:
        size: From `model_size`.
        claimed: C.
    """
    return StarTraffic(FP32 * size.trained_params(claimed), FP32 * size.total_params)


@dataclass(frozen=True)
class RoundSeconds:
    """The phases of a round, one after the other, at full use of both directions of the link.

    Attributes:
        averaging: From the roster to the averages.
        pulling: Of the slots that others hold.
    """

    averaging: float
    pulling: float

    @property
    def total(self) -> float:
        return self.averaging + self.pulling


def transfer_seconds(traffic: RoundTraffic, uplink_mbit: float, downlink_mbit: float) -> RoundSeconds:
    """Returns the least seconds of each phase, without latency and matchmaking.

    Measured rounds took 1.5 to 2 times as long (docs/planning.md).

    Args:
        traffic: Of one peer.
        uplink_mbit: Its uplink, in 10^6 bits per second; everybody's is taken to be the same.
        downlink_mbit: Its downlink.
    """
    bits_per_second = 1e6 * min(uplink_mbit, downlink_mbit)
    fetched = traffic.pulled + traffic.kept
    return RoundSeconds(8 * traffic.averaged / bits_per_second, 8 * fetched / bits_per_second)


def training_seconds(run: RunConfig, num_peers: int, tokens_per_second: float) -> float:
    """Returns the seconds that a round trains for.

    Args:
        run: The run's settings.
        num_peers: Peers that share the round's tokens in mode `tokens`.
        tokens_per_second: Of each of them.
    """
    if run.round.mode == "steps":
        return run.round.steps * run.train.batch_size * run.data.sequence_length / tokens_per_second
    seconds = run.round.tokens / (num_peers * tokens_per_second)
    return min(max(seconds, run.round.min_seconds), run.round.max_seconds)
