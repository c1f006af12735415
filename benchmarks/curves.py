"""Pictures of losses: PNGs with a transparent background, legible on light and dark pages."""

from __future__ import annotations

import io
from collections.abc import Sequence
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # no pyplot: no global state, no display
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter

from spes_p2p.sim.sweep import Results, RunResult, Sweep

INK = "#808080"
# Okabe and Ito's palette, which colour-blind readers can tell apart, without black, which is invisible on dark pages.
COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#d55e00", "#cc79a7", "#b8a800", "#7a6fbe", "#8c564b")
LINES = ("-", "--", ":", "-.")
WIDTH_INCHES, HEIGHT_INCHES, DPI = 6.4, 3.6, 180
LOSS = "held-out loss (nats per token)"


def canvas(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """Return an empty figure and its axes."""
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(INK)
    axes.tick_params(which="both", colors=INK, labelsize=8, length=3)
    axes.grid(True, color=INK, alpha=0.18, lw=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(x_label, color=INK, fontsize=9)
    axes.set_ylabel(y_label, color=INK, fontsize=9)
    return figure, axes


def png(figure: Figure, axes: Axes) -> bytes:
    """Return the figure as a PNG file, with the legend above the axes; inside, it would cover curves."""
    handles, labels = axes.get_legend_handles_labels()
    style = {"frameon": False, "fontsize": 8, "labelcolor": INK, "handlelength": 1.6, "columnspacing": 1.4}
    widest_inches = 0.42 + 0.058 * max(map(len, labels), default=0)  # a line, gaps, and characters of 8 points
    fitting = max(1, int(figure.get_figwidth() / widest_inches))
    figure.legend(handles, labels, loc="outside upper left", ncols=min(fitting, 5 if len(handles) <= 5 else 7), **style)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", transparent=True)
    return buffer.getvalue()


def loss_by_steps(sweep: Sweep, results: Results, names: Sequence[str]) -> bytes:
    """Draw variants' held-out loss over a peer's optimizer steps: the mean over seeds, and a band of all seeds.

    The axis shows steps, not tokens: centralised training reads more tokens in each step.
    """
    figure, axes = canvas("steps of each peer", LOSS)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for index, name in enumerate(names):
        runs = _runs(sweep, results, name)
        run = runs[0].scenario["run"]
        step_tokens = run["train"]["batch_size"] * run["data"]["sequence_length"]
        steps = [[point.tokens_per_peer / step_tokens for point in result.evaluations] for result in runs]
        _line(axes, index, sweep.variants[name].title, steps, runs)
    return png(figure, axes)


def loss_by_bytes(sweep: Sweep, results: Results, names: Sequence[str]) -> bytes:
    """Draw variants' held-out loss over bytes sent per peer; one that sends nothing is its final loss, dotted."""
    figure, axes = canvas("MB sent per peer", LOSS)
    axes.set_xscale("log", nonpositive="mask")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    for index, name in enumerate(names):
        runs, title = _runs(sweep, results, name), sweep.variants[name].title
        megabytes = [[point.bytes_out_per_peer / 1e6 for point in result.evaluations] for result in runs]
        if any(map(any, megabytes)):
            _line(axes, index, title, megabytes, runs)
        else:
            final = mean(result.loss for result in runs)
            axes.axhline(final, color=COLOURS[index % len(COLOURS)], lw=1.2, ls=":", label=f"{title} (sends none)")
    return png(figure, axes)


def _runs(sweep: Sweep, results: Results, name: str) -> list[RunResult]:
    return [results[name, seed] for seed in sweep.seeds if (name, seed) in results]


def _line(axes: Axes, index: int, title: str, x: Sequence[Sequence[float]], runs: Sequence[RunResult]) -> None:
    """Draw mean and band of one variant, in the colour of its place; rounds count as far as all seeds have them."""
    losses = [[point.loss for point in result.evaluations] for result in runs]
    columns = list(zip(*losses, strict=False))
    across = list(map(mean, zip(*x, strict=False)))
    colour, style = COLOURS[index % len(COLOURS)], LINES[index // len(COLOURS) % len(LINES)]
    axes.plot(across, list(map(mean, columns)), color=colour, lw=1.8, ls=style, label=title)
    axes.fill_between(across, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.18, lw=0)
