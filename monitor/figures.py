"""The report's pictures, as PNG with a transparent ground: legible on light and on dark pages.

All text that comes from others is short ids of a checked alphabet, and matplotlib draws it; none becomes markup.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from monitor.view import PHASES, SwarmView, short_id
from spes_p2p.presentation import ACCENT, COLOURS, INK, WIDTH_INCHES, canvas, legend, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Baselines = Mapping[str, Sequence[tuple[int, float]]]

PHASE_COLOURS = dict(zip(PHASES, (ACCENT, "#e69f00", "#d55e00", "#009e73", "#999999"), strict=True))
MAX_LEGEND = 12
MAX_MATRIX_PEERS = 60


def training_loss(view: SwarmView) -> bytes | None:
    """Training loss of each peer, and the swarm's mean, over the swarm's tokens; None before the first round."""
    if not view.rounds:
        return None
    figure, axes = canvas("swarm tokens", "training loss (nats per token)", large="x")
    tokens = _tokens_by_round(view)
    peers = sorted({peer for number, peer in view.reports if number in tokens})
    for index, peer in enumerate(peers):
        own = [(n, report.loss) for (n, p), report in sorted(view.reports.items()) if p == peer and n in tokens]
        points = [(tokens[n], math.nan if loss is None else loss) for n, loss in own]  # a gap in the curve
        label = short_id(peer) if index < MAX_LEGEND else None
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(*zip(*points, strict=True), color=colour, lw=1.1, marker="o", ms=2.5, alpha=0.85, label=label)
    means = [(tokens[n], summary.loss) for n, summary in view.rounds.items()]
    axes.plot(*zip(*means, strict=True), color=ACCENT, lw=2.4, label="swarm", zorder=5)
    legend(figure, axes)
    return png(figure)


def held_out_loss(view: SwarmView, baselines: Baselines) -> bytes | None:
    """Held-out loss of the swarm's model over its tokens, beside baselines; None before the first evaluation."""
    points = [(view.tokens_until(n), loss) for n, loss in view.held_out.items() if math.isfinite(loss)]
    if not points:
        return None
    figure, axes = canvas("swarm tokens", "held-out loss (nats per token)", large="x")
    for index, (name, curve) in enumerate(baselines.items()):
        finite = [(tokens, loss) for tokens, loss in curve if math.isfinite(loss)]
        if finite:
            axes.plot(*zip(*finite, strict=True), color=COLOURS[index % len(COLOURS)], lw=1.4, ls="--", label=name)
    axes.plot(*zip(*points, strict=True), color=ACCENT, lw=2.2, marker="o", ms=4, label="the swarm's model", zorder=5)
    first, last = points[0], points[-1]
    for tokens, loss in {first, last}:
        axes.annotate(
            f"{loss:.3f}", (tokens, loss), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8, color=INK
        )
    axes.margins(x=0.06, y=0.12)
    legend(figure, axes)
    return png(figure)


def throughput(view: SwarmView) -> bytes | None:
    """Tokens per second of the swarm by round, with and without the time spent synchronising."""
    if not view.rounds:
        return None
    figure, axes = canvas("round", "tokens per second", large="y")
    numbers = list(view.rounds)
    whole = [view.rounds[n].tokens_per_second for n in numbers]
    training = [
        view.rounds[n].tokens / view.rounds[n].phases["train"] if view.rounds[n].phases["train"] else math.nan
        for n in numbers
    ]
    axes.plot(numbers, training, color=COLOURS[0], lw=1.4, ls="--", marker="o", ms=2.5, label="while training")
    axes.plot(numbers, whole, color=ACCENT, lw=2.2, marker="o", ms=3.5, label="synchronisation included")
    axes.set_ylim(bottom=0)
    _whole_rounds(axes)
    legend(figure, axes)
    return png(figure)


def phases(view: SwarmView) -> bytes | None:
    """Where the rounds' time went: the median peer's seconds by phase."""
    if not view.rounds:
        return None
    figure, axes = canvas("round", "seconds (median peer)")
    numbers = list(view.rounds)
    bottom = [0.0] * len(numbers)
    for phase, colour in PHASE_COLOURS.items():
        heights = [view.rounds[n].phases[phase] for n in numbers]
        axes.bar(numbers, heights, 0.72, bottom=bottom, color=colour, label=phase)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    axes.margins(x=0.02, y=0.08)
    _whole_rounds(axes)
    legend(figure, axes)
    return png(figure)


def holdings(view: SwarmView) -> bytes | None:
    """Who trained which slot: rounds by peer and slot, with a dot where the claim still stands."""
    trained: dict[str, dict[int, int]] = {peer: {} for peer in view.peers}
    for (_, peer), report in view.reports.items():
        for slot in report.slots:
            if slot < view.num_slots:
                trained.setdefault(peer, {})[slot] = trained.get(peer, {}).get(slot, 0) + 1
    peers = sorted(trained, key=lambda peer: (-sum(trained[peer].values()), peer))[:MAX_MATRIX_PEERS]
    if not peers:
        return None
    figure, axes = canvas("slot", "", width_inches=2 * WIDTH_INCHES, height_inches=min(14.0, 0.8 + 0.3 * len(peers)))
    most = max((count for counts in trained.values() for count in counts.values()), default=1)
    for row, peer in enumerate(peers):
        counts = sorted(trained[peer].items())
        cells = [(slot - 0.46, 0.92) for slot, _ in counts]
        axes.broken_barh(cells, (row - 0.42, 0.84), facecolors=[_rgba(count / most) for _, count in counts])
    active = {peer.peer_id: peer.slots for peer in view.active}
    held = [(slot, row) for row, peer in enumerate(peers) for slot in active.get(peer, ())]
    if held:
        slots, places = zip(*held, strict=True)
        axes.scatter(slots, places, s=11, color="white", edgecolors=INK, linewidths=0.6, zorder=5)
    axes.set_xlim(-0.6, view.num_slots - 0.4)
    axes.set_ylim(len(peers) - 0.4, -0.6)
    axes.set_yticks(range(len(peers)), [short_id(peer) for peer in peers], family="monospace")
    step = -(-view.num_slots // 32)
    axes.set_xticks(range(0, view.num_slots, step))
    axes.grid(False)
    return png(figure)


def _rgba(share: float) -> tuple[float, float, float, float]:
    """ACCENT's colour, the stronger the larger the share."""
    red, green, blue = (int(ACCENT[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue, 0.25 + 0.75 * share


def _tokens_by_round(view: SwarmView) -> dict[int, int]:
    total, tokens = 0, {}
    for number, summary in view.rounds.items():
        total += summary.tokens
        tokens[number] = total
    return tokens


def _whole_rounds(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
