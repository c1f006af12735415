"""The studies of `benchmarks/studies`: tables of the runs on record, and the pictures of docs/convergence.

    .venv/bin/spes simulate benchmarks/studies/map.yaml --output runs/map    # makes the runs of a study
    .venv/bin/python -m benchmarks.convergence --summarise runs/map          # keeps them in benchmarks/results/studies
    .venv/bin/python -m benchmarks.convergence [--only map ...] [--pictures]

A run on record has its final figures and its curve: tokens per peer, MB sent per peer, held-out loss.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # no pyplot: no global state, no display
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter

from benchmarks.cluster import ROOT
from benchmarks.records import RESULTS
from benchmarks.tables import markdown_table
from spes_p2p.cli import entry_point
from spes_p2p.commands.simulate import Spread
from spes_p2p.config import CommandConfig
from spes_p2p.presentation import say
from spes_p2p.sim.sweep import Gap, RunResult, Sweep, load_sweep, stored_runs

STUDIES, KEPT, PICTURES = ROOT / "benchmarks" / "studies", RESULTS / "studies", ROOT / "docs" / "convergence"
PICTURED = ("solo", "solo_in_memory", "ours", "centralised")
HOME = ("solo_1024", "batch_int4", "centralised_4096")
"""Rounds and deltas of the size that a home link carries."""
HOLDERS = {"all": "all slots everywhere", "two": "two holders", "one": "one holder"}
INK = "#808080"
# Okabe and Ito's palette, which colour-blind readers can tell apart, without black, which is invisible on dark pages.
COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#d55e00", "#cc79a7", "#b8a800", "#7a6fbe", "#8c564b")
LINES = ("-", "--", ":", "-.")
LOSS = "held-out loss (nats per token)"
Runs = Mapping[tuple[str, int], Mapping[str, Any]]
"""The runs of a study on record, by variant and seed."""


class ConvergenceConfig(CommandConfig):
    """Studies of convergence."""

    only: list[str] = []
    """Studies to show; by default all on record."""
    summarise: Path | None = None
    """Output of `spes simulate`, in a folder with the study's name, to keep."""
    pictures: bool = False
    """Draw the pictures of docs/convergence."""


def main(config: ConvergenceConfig) -> int:
    """Keep runs, print tables, draw pictures; return the exit code."""
    if config.summarise is not None:
        summarise(config.summarise)
    for name in config.only or ([] if config.summarise else sorted(path.stem for path in KEPT.glob("*.json"))):
        sweep, runs = load(name)
        say(f"## {sweep.title}\n\n{table(sweep, runs)}")
    if config.pictures:
        for name, picture in pictures().items():
            (PICTURES / f"{name}.png").write_bytes(picture)
    return 0


def summarise(output: Path) -> None:
    """Keep a study's runs: one JSON file, one run a line."""
    runs = stored_runs(load_sweep(STUDIES / f"{output.resolve().name}.yaml"), output)
    write_runs(output.resolve().name, list(runs.values()))


def write_runs(name: str, runs: Sequence[RunResult]) -> None:
    """Write runs to `benchmarks/results/studies`."""
    lines = ",\n".join(f"  {json.dumps(summary(run))}" for run in runs)
    KEPT.mkdir(exist_ok=True)
    (KEPT / f"{name}.json").write_text(f'{{\n "runs": [\n{lines}\n ]\n}}\n')


def summary(run: RunResult) -> dict[str, Any]:
    """Return what is kept of a run."""
    settings, peers = run.scenario["run"], run.peers
    return {
        "variant": run.variant,
        "seed": run.seed,
        "loss": round(run.loss, 6),
        "step_tokens": settings["train"]["batch_size"] * settings["data"]["sequence_length"],
        "tokens": round(mean(peer.tokens for peer in peers)),
        "mb_sent": round(mean(peer.bytes_out for peer in peers) / 1e6, 3),
        "expert_mb": round(max(peer.expert_bytes for peer in peers) / 1e6, 3),
        "begun_rounds": sum(peer.begun_rounds or 0 for peer in peers),
        "committed_rounds": sum(peer.committed_rounds or 0 for peer in peers),
        "seconds": round(run.wall_seconds),
        "finished_at": run.finished_at,
        "software": run.software,
        "curve": [
            [point.tokens_per_peer, round(point.bytes_out_per_peer / 1e6, 3), round(point.loss, 4)]
            for point in run.evaluations
        ],
    }


def load(name: str) -> tuple[Sweep, Runs]:
    """Return a study and its runs on record."""
    runs = json.loads((KEPT / f"{name}.json").read_text())["runs"]
    return load_sweep(STUDIES / f"{name}.yaml"), {(run["variant"], run["seed"]): run for run in runs}


def table(sweep: Sweep, runs: Runs) -> str:
    """Return every variant's held-out loss, and its share of each gap, as a Markdown table."""
    lines = []
    for name, variant in sweep.variants.items():
        own = {seed: runs[name, seed] for seed in sweep.seeds if (name, seed) in runs}
        if own:
            gaps = [closed(gap, name, runs) for gap in sweep.gaps]
            loss = Spread({seed: run["loss"] for seed, run in own.items()}).text(".3f")
            sent = f"{mean(run['mb_sent'] for run in own.values()):,.1f}"
            lines.append(
                (variant.title, loss, str(len(own)), *("" if gap is None else gap.text(".2f") for gap in gaps), sent)
            )
    names = (f"gap closed: {gap.name}" for gap in sweep.gaps)
    return markdown_table(("scheme", "held-out loss", "seeds", *names, "MB sent per peer"), lines)


def closed(gap: Gap, name: str, runs: Runs) -> Spread | None:
    """Return the share of a gap that a variant closed, by seed; None without one."""
    shares = {}
    for variant, seed in runs:
        if variant == name and name in gap.of and {(gap.solo, seed), (gap.centralised, seed)} <= runs.keys():
            solo, centralised = runs[gap.solo, seed]["loss"], runs[gap.centralised, seed]["loss"]
            shares[seed] = (solo - runs[name, seed]["loss"]) / (solo - centralised)
    return Spread(shares) if shares else None


# ---------------------------------------------------------------------- pictures


def pictures() -> dict[str, bytes]:
    """Return the pictures as PNGs with a transparent background, legible on light and dark pages."""
    sweep, runs = load("convergence")
    every = [name for name in sweep.variants if any(variant == name for variant, _ in runs)]
    return {
        "map": map_picture(*load("map")),
        "home": loss_by_steps(*load("long_rounds"), HOME),
        "joining": loss_by_steps(sweep, runs, PICTURED),
        "loss_by_steps": loss_by_steps(sweep, runs, every),
        "loss_by_bytes": loss_by_bytes(sweep, runs, every),
    }


def canvas(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """Return an empty figure and its axes."""
    figure = Figure(figsize=(6.4, 3.6), dpi=180, layout="constrained")
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
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


def loss_by_steps(sweep: Sweep, runs: Runs, names: Sequence[str]) -> bytes:
    """Draw variants' held-out loss over a peer's optimizer steps: the mean over seeds, and a band of all seeds.

    The axis shows steps, not tokens: centralised training reads more tokens in each step.
    """
    figure, axes = canvas("steps of each peer", LOSS)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for index, name in enumerate(names):
        own = of_variant(sweep, runs, name)
        steps = [[tokens / run["step_tokens"] for tokens, _, _ in run["curve"]] for run in own]
        _line(axes, index, sweep.variants[name].title, steps, own)
    return png(figure, axes)


def loss_by_bytes(sweep: Sweep, runs: Runs, names: Sequence[str]) -> bytes:
    """Draw variants' held-out loss over bytes sent per peer; one that sends nothing is its final loss, dotted."""
    figure, axes = canvas("MB sent per peer", LOSS)
    axes.set_xscale("log", nonpositive="mask")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    for index, name in enumerate(names):
        own, title = of_variant(sweep, runs, name), sweep.variants[name].title
        megabytes = [[sent for _, sent, _ in run["curve"]] for run in own]
        if any(map(any, megabytes)):
            _line(axes, index, title, megabytes, own)
        else:
            final = mean(run["loss"] for run in own)
            axes.axhline(final, color=COLOURS[index % len(COLOURS)], lw=1.2, ls=":", label=f"{title} (sends none)")
    return png(figure, axes)


def of_variant(sweep: Sweep, runs: Runs, name: str) -> list[Mapping[str, Any]]:
    """Return a variant's runs, by seed."""
    return [runs[name, seed] for seed in sweep.seeds if (name, seed) in runs]


def _line(axes: Axes, index: int, title: str, x: Sequence[Sequence[float]], runs: Sequence[Mapping[str, Any]]) -> None:
    """Draw mean and band of one variant, in the colour of its place; rounds count as far as all seeds have them."""
    columns = list(zip(*([loss for _, _, loss in run["curve"]] for run in runs), strict=False))
    across = list(map(mean, zip(*x, strict=False)))
    colour, style = COLOURS[index % len(COLOURS)], LINES[index // len(COLOURS) % len(LINES)]
    axes.plot(across, list(map(mean, columns)), color=colour, lw=1.8, ls=style, label=title)
    axes.fill_between(across, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.18, lw=0)


def map_picture(sweep: Sweep, runs: Runs) -> bytes:
    """Draw the gap closed against the steps of a round: a colour for each batch, a line style for each holding.

    The map's cells are the variants h<steps a round>_<tokens a step>_<holders>.
    """
    figure, axes = canvas("steps a round", "gap closed")
    axes.set_xscale("log")
    ticks = set[int]()
    for colour, gap in zip(COLOURS, sweep.gaps, strict=False):
        for style, holders in zip(LINES, HOLDERS, strict=False):
            names = [name for name in gap.of if name.startswith("h") and name.endswith(f"_{holders}")]
            points = {int(name[1:].split("_")[0]): share.mean for name in names if (share := closed(gap, name, runs))}
            ticks |= points.keys()
            axes.plot(list(points), list(points.values()), color=colour, ls=style, marker="o", ms=4)
            if points:  # in the legend a marker would cover the gap of a dashed line
                axes.plot([], color=colour, ls=style, label=f"{gap.name}, {HOLDERS[holders]}")
    axes.set_xticks(sorted(ticks), list(map(str, sorted(ticks))))
    axes.set_xticks([], minor=True)
    axes.set_ylim(0, 1)
    return png(figure, axes)


if __name__ == "__main__":
    entry_point(ConvergenceConfig, main)
