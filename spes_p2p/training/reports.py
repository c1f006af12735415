"""What a peer says of a round once it is committed: what it trained, and where the time went."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spes_p2p.swarm.records import Metrics
from spes_p2p.swarm.roster import SHARED
from spes_p2p.training.round_work import Trained
from spes_p2p.training.synchroniser import Synchroniser

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """A round's training, and where this rank stood when it ended.

    Attributes:
        trained: What is brought to the synchronisation.
        loss: Mean over its tokens, nats per token; None where no step's gradient was finite.
        steps: Local steps so far.
        total_tokens: Trained so far.
        data: State of the token source.
        ended: Second of this peer's clock.
        waited_seconds: For which training stood still until the synchronisation before had landed.
    """

    trained: Trained
    loss: float | None
    steps: int
    total_tokens: int
    data: Mapping[str, Any]
    ended: float
    waited_seconds: float


def report_of(
    sync: Synchroniser, work: Work, slots: tuple[int, ...], wall_seconds: float, waited_seconds: float | None
) -> Metrics:
    """Return the report of the round that was committed last.

    Args:
        sync: The leader's, after the commit.
        work: What was committed.
        slots: Trained from now on.
        wall_seconds: All the time since the last report's.
        waited_seconds: For which training stood still for synchronisations; None if for all of this one.
    """
    trained, last, (bytes_in, bytes_out) = work.trained, sync.last, sync.swarm.traffic()
    spent = trained.seconds + last.matchmaking_seconds + last.averaging_seconds + last.exchange_seconds
    if waited_seconds is not None:
        spent = trained.seconds + waited_seconds
    return Metrics(
        peer_id=sync.swarm.peer_id,
        round=sync.round,
        step=work.steps,
        tokens=trained.tokens,
        total_tokens=work.total_tokens,
        loss=work.loss,
        tokens_per_second=trained.tokens_per_second,
        slots=slots,
        num_members=last.num_members,
        committed=last.num_committed,
        dropped=last.num_dropped,
        shared_digest=sync.anchors.digest(SHARED),
        train_seconds=trained.seconds,
        matchmaking_seconds=last.matchmaking_seconds,
        averaging_seconds=last.averaging_seconds,
        exchange_seconds=last.exchange_seconds,
        other_seconds=max(0.0, wall_seconds - spent),
        waited_seconds=waited_seconds,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        stale_rounds=last.stale_rounds,
    )


def log_report(report: Metrics) -> None:
    """Say a round in one line."""
    loss = "none" if report.loss is None else f"{report.loss:.3f}"
    waited = "" if report.waited_seconds is None else f"; waited {report.waited_seconds:.1f} s"
    stale = f"; slots up to {report.stale_rounds} rounds old" if report.stale_rounds else ""
    log.info(
        "round %d: %d peers, loss %s, %.0f tokens/s, shared %s, slots %s; "
        "%.1f s training, %.1f matchmaking, %.1f averaging, %.1f exchange, %.1f other%s%s",
        *(report.round, report.num_members, loss, report.tokens_per_second, report.shared_digest),
        ",".join(map(str, report.slots)),
        *(report.train_seconds, report.matchmaking_seconds, report.averaging_seconds),
        *(report.exchange_seconds, report.other_seconds, waited, stale),
    )
