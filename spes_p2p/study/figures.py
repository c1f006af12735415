"""The study's pictures: loss against what it cost, and where everybody ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spes_p2p.presentation import COLOURS, INK, canvas, drawable, legend, png
from spes_p2p.study.summary import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSS = "held-out loss (nats per token)"
LINES = ("-", "--", ":", "-.")


def loss_by_steps(rows: Sequence[Row]) -> bytes:
    """Held-out loss over a peer's optimizer steps: the seeds' mean, and a band from the least to the most.

    Steps, not tokens: one process with everybody's batch reads more in each.
    """
    figure, axes = canvas("steps of each peer", LOSS, large="x")
    for index, row in enumerate(rows):
        _line(axes, index, row, row.curve.steps)
    legend(figure, axes)
    return png(figure)


def loss_by_bytes(rows: Sequence[Row]) -> bytes | None:
    """Held-out loss over bytes sent per peer; None if nobody sent any. Who sends none is a line across at its end."""
    if not any(row.megabytes for row in rows):
        return None
    figure, axes = canvas("MB sent per peer", LOSS)
    _plain_log(axes)
    for index, row in enumerate(rows):
        if any(row.curve.megabytes):
            _line(axes, index, row, row.curve.megabytes)
        elif math.isfinite(row.loss.mean):
            label = f"{drawable(row.title)} (sends none)"
            axes.axhline(row.loss.mean, color=_colour(index), lw=1.2, ls=":", label=label)
    legend(figure, axes)
    return png(figure)


def final_loss(rows: Sequence[Row]) -> bytes:
    """Held-out loss at the end: a bar for the seeds' mean, a dot for each. The axis does not begin at 0."""
    figure, axes = canvas(LOSS, "", height_inches=max(1.6, 0.9 + 0.34 * len(rows)))
    losses = [loss for row in rows for loss in row.loss.values.values() if math.isfinite(loss)]
    low, high = min(losses, default=0.0), max(losses, default=1.0)
    room = 0.15 * (high - low) or 0.01 * abs(high) or 1.0
    for index, row in enumerate(rows):
        finite = [loss for loss in row.loss.values.values() if math.isfinite(loss)]
        if math.isfinite(row.loss.mean):
            left = low - room
            axes.barh(index, row.loss.mean - left, 0.62, left=left, color=_colour(index), alpha=0.75)
            axes.annotate(
                f"{row.loss.mean:.3f}",
                (max(finite), index),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=INK,
            )
        axes.scatter(finite, [index] * len(finite), s=14, color="white", edgecolors=INK, linewidths=0.8, zorder=5)
    axes.set_xlim(low - room, high + 1.5 * room)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [drawable(row.title) for row in rows])
    axes.grid(False, axis="y")
    return png(figure)


def _line(axes: Axes, index: int, row: Row, x: Sequence[float]) -> None:
    """The mean, the band and the end of one variant; its colour is its place among the rows."""
    curve, colour = row.curve, _colour(index)
    style = LINES[index // len(COLOURS) % len(LINES)]
    marker = "o" if len(x) == 1 else None
    axes.plot(x, curve.mean, color=colour, lw=1.8, ls=style, marker=marker, ms=4, label=drawable(row.title))
    axes.fill_between(x, curve.low, curve.high, color=colour, alpha=0.18, lw=0)


def _plain_log(axes: Axes) -> None:
    """Make the x axis logarithmic, labelled 1, 2, 5, 10, ..."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log", nonpositive="mask")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", colors=INK)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
