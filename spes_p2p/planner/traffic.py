"""What a round moves, and how long that takes at least.

Legend: N peers, S shared parameters, P parameters of a slot, E experts, C claimed slots of each peer.
"""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.config import RunConfig
from spes_p2p.planner.memory import FP32
from spes_p2p.planner.setup import Setup
from spes_p2p.planner.size import ModelSize


@dataclass(frozen=True)
class RoundTraffic:
    """Bytes of one peer in one round; where all peers are alike it sends as many as it receives.

    Attributes:
        shared: Of averaging what everybody trains.
        slots: Of averaging the held slots with their other holders.
        pulled: Of fetching the slots that others hold, and of sending its own to those who do not.
    """

    shared: int
    slots: int
    pulled: int

    @property
    def averaged(self) -> int:
        return self.shared + self.slots

    @property
    def total(self) -> int:
        return self.averaged + self.pulled


def round_traffic(size: ModelSize, claimed: int, num_peers: int, setup: Setup) -> RoundTraffic:
    """Returns what each of `num_peers` equal peers sends and receives in a round, in fp32 as it travels today.

    A group of n peers that averages x bytes sends, and receives, `2 (n - 1) / n x` of each member (reduce-scatter and
    all-gather). N C claims cover the E slots evenly, so the holders' groups cost a peer `2 (N C - E) P / N`. Averaged
    moments travel with the deltas; pulled slots come with their outer momentum.

    Source: the bound of the WAN study, `[2 S (N - 1) + X (N - 1) + X (h - 1)] / N` with X = E P and h = N C / E.

    Args:
        size: From `model_size`.
        claimed: C.
        num_peers: N.
        setup: What of the moments is averaged, and whether there is an outer momentum.
    """
    averaged_bytes = FP32 * (1 + setup.averaged_moments)
    bundle_bytes = FP32 * (2 if setup.outer_momentum else 1)
    covered = min(size.num_slots, num_peers * claimed)
    return RoundTraffic(
        shared=2 * (num_peers - 1) * averaged_bytes * size.shared_params // num_peers,
        slots=2 * (num_peers * claimed - covered) * averaged_bytes * size.slot_params // num_peers,
        pulled=bundle_bytes * (covered - claimed) * size.slot_params if num_peers > 1 else 0,
    )


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
    return RoundSeconds(8 * traffic.averaged / bits_per_second, 8 * traffic.pulled / bits_per_second)


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
