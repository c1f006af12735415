"""What joining is worth: the sweeps' results as the tables of benchmarks/results/convergence.md.

    .venv/bin/python benchmarks/joining.py [--write]

The runs are made by `spes simulate configs/convergence.yaml --output benchmarks/results/convergence`, and likewise with
`map`; this reads them and takes no time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, stdev

from benchmarks.curves import COLOURS, LINES, canvas, loss_by_bytes, loss_by_steps, png
from benchmarks.tables import HEAD, Row, fill, markdown_table
from spes_p2p.cli import entry_point
from spes_p2p.commands.simulate import Spread, gap_spread
from spes_p2p.config import CommandConfig
from spes_p2p.presentation import say
from spes_p2p.sim.sweep import Gap, Results, Sweep, load_sweep, stored_runs

SPEED = Path("benchmarks/results/simulator_speed.json")
"""What benchmarks/simulator_speed.py --output wrote."""
PICTURES, PICTURED = Path("docs/convergence"), ("solo", "solo_in_memory", "ours", "centralised")
MAP, MAP_RESULTS = Path("configs/map.yaml"), Path("benchmarks/results/map")
HOLDERS = {"all": "all slots everywhere", "two": "two holders", "one": "one holder"}
PAGE = Path("benchmarks/results/convergence.md")


class JoiningConfig(CommandConfig):
    """The sweep's figures beside what they had to reach."""

    study: Path = Path("configs/convergence.yaml")
    """The sweep."""
    results: Path = Path("benchmarks/results/convergence")
    """Its output."""
    write: bool = False
    """Put the tables into benchmarks/results/convergence.md, between their markers."""


def figures(results: Results) -> Iterator[Row]:
    """Yield the rows that the sweep had to reach."""
    yield _gap_row(
        "gap closed, 4 peers, rounds of 5 steps, against one peer that trains everything", results, "ours", 0.6
    )
    yield _gap_row("- SPES as published beside it: one owner, plain mean, fp32, rounds of 25", results, "spes")
    yield _gap_row("- one holder per slot (4 of 16 slots per peer)", results, "ours_quarter")
    yield _gap_row("- all slots everywhere", results, "everywhere")
    yield _gap_row("gap closed, 4 peers, rounds of 25 steps", results, "ours_long_rounds", 0.4)
    text = "gap closed, against one peer of the same memory (8 of 16 slots)"
    yield _gap_row(text, results, "ours", 0.7, solo="solo_in_memory")
    yield _gap_row("gap closed, 16 peers", results, "ours_16_peers", 0.4, centralised="centralised_16")
    below = {name: _by_seed(results, name, lambda loss, solo: solo - loss) for name in ("ours_16_peers", "ours")}
    texts = [Spread(below[name]).text(".2f") for name in below]
    is_more = min(below["ours_16_peers"].values()) > max(below["ours"].values())
    yield Row("- nats below the lone peer: 16 peers / 4 peers", " / ".join(texts), "more with 16", is_more)
    for name, goal, text in (
        (
            "ours_quarter",
            1,
            "loss of ours (4 slots each, rounds of 5) against DiLoCo (all slots everywhere, 0.7 / 0.9, rounds of 25), "
            "which has three times the expert memory and sends a fifth of the bytes",
        ),
        ("ours_long_rounds", None, "- of ours (8 slots each, rounds of 25), which has half of DiLoCo's expert memory"),
    ):
        worse = _by_seed(results, name, lambda loss, other: 100 * (loss / other - 1), other="diloco")
        found = f"{mean(worse.values()):+.1f} % ± {stdev(worse.values()):.1f} % ({len(worse)} seeds)"
        is_met = None if goal is None else mean(worse.values()) <= goal
        yield Row(text, found, f"+{goal} % or less" if goal is not None else "", is_met)
    speed = json.loads(SPEED.read_text())
    texts = [f"{speed['ratio']:.2f} ({len(speed['pairs'])} pairs)", f"{speed['cpu_ratio']:.2f} by CPU seconds"]
    is_reached = speed["ratio"] >= 0.8
    yield Row("simulator's speed against plain training of the same tokens", "; ".join(texts), "0.8", is_reached)


def _gap_row(
    text: str,
    results: Results,
    name: str,
    goal: float | None = None,
    *,
    solo: str = "solo",
    centralised: str = "centralised",
) -> Row:
    shares = gap_spread(Gap(name="gap", solo=solo, centralised=centralised, of=[name]), name, results)
    assert shares is not None, f"no run of {name} is finished"
    is_reached = None if goal is None else shares.mean >= goal
    return Row(text, f"{shares.text('.2f')} ({len(shares.values)} seeds)", f"{goal or ''}", is_reached)


def _by_seed(
    results: Results, name: str, compare: Callable[[float, float], float], *, other: str = "solo"
) -> dict[int, float]:
    return {
        seed: compare(result.loss, results[other, seed].loss)
        for (variant, seed), result in results.items()
        if variant == name
    }


def losses(sweep: Sweep, results: Results) -> str:
    """Return every scheme's held-out loss as a Markdown table."""
    lines = []
    for name, variant in sweep.variants.items():
        own = {seed: results[name, seed] for seed in sweep.seeds if (name, seed) in results}
        if own:
            gaps = [gap_spread(gap, name, results) for gap in sweep.gaps if name in gap.of]
            gap = f"{gaps[0].mean:.2f}" if gaps and gaps[0] is not None else ""
            loss = Spread({seed: result.loss for seed, result in own.items()}).text(".3f")
            megabytes = mean(peer.bytes_out for result in own.values() for peer in result.peers) / 1e6
            lines.append((variant.title, loss, str(len(own)), gap, f"{megabytes:,.0f}"))
    return markdown_table(("scheme", "held-out loss", "seeds", "gap closed", "MB sent per peer"), lines)


Map = dict[str, dict[int, dict[str, Spread]]]
"""Gap closed, by the name of the map's gap (tokens a step), steps a round, and holders of a slot."""


def map_cells(sweep: Sweep, results: Results) -> Map:
    """Return the map of long rounds; its cells are the variants named h<steps a round>_<tokens a step>_<holders>."""
    cells: Map = {}
    for gap in sweep.gaps:
        for name in gap.of:
            shares = gap_spread(gap, name, results)
            if name.startswith("h") and shares is not None:
                steps, _, holders = name[1:].split("_")
                cells.setdefault(gap.name, {}).setdefault(int(steps), {})[holders] = shares
    return cells


def map_table(sweep: Sweep, results: Results, cells: Map) -> str:
    """Return the map of long rounds as a Markdown table: both ends' losses, and the gap closed in each cell."""
    lines = []
    for gap in sweep.gaps:
        if gap.name not in cells:
            continue
        ends = [f"{results[name, sweep.seeds[0]].loss:.3f}" for name in (gap.solo, gap.centralised)]
        for steps, row in cells[gap.name].items():
            lines.append((gap.name, *ends, str(steps), *(_cell(row.get(holders)) for holders in HOLDERS)))
    gaps = (f"gap closed: {title}" for title in HOLDERS.values())
    return markdown_table(("batch of a peer", "loss: alone", "loss: one process", "steps a round", *gaps), lines)


def _cell(shares: Spread | None) -> str:
    return shares.text(".2f") if shares is not None else ""


def map_picture(cells: Map) -> bytes:
    """Draw the gap closed against the steps of a round: a colour for each batch, a line style for each holding."""
    figure, axes = canvas("steps a round", "gap closed")
    axes.set_xscale("log")
    for colour, (name, by_steps) in zip(COLOURS, cells.items(), strict=False):
        for style, holders in zip(LINES, HOLDERS, strict=False):
            points = {steps: row[holders].mean for steps, row in by_steps.items() if holders in row}
            axes.plot(list(points), list(points.values()), color=colour, ls=style, marker="o", ms=4)
            if points:  # in the legend a marker would cover the gap of a dashed line
                axes.plot([], color=colour, ls=style, label=f"{name}, {HOLDERS[holders]}")
    steps = sorted({steps for by_steps in cells.values() for steps in by_steps})
    axes.set_xticks(steps, list(map(str, steps)))
    axes.set_xticks([], minor=True)
    axes.set_ylim(0, 1)
    return png(figure, axes)


def main(config: JoiningConfig) -> int:
    """Print the tables; return the exit code."""
    long_rounds = load_sweep(MAP)
    runs = stored_runs(long_rounds, MAP_RESULTS)
    cells = map_cells(long_rounds, runs)
    the_map = map_table(long_rounds, runs, cells)
    sweep = load_sweep(config.study)
    results = stored_runs(sweep, config.results)
    goals = markdown_table(HEAD, [row.cells for row in figures(results)])
    schemes = losses(sweep, results)
    say(f"{schemes}\n{goals}\n{the_map}")
    if config.write:
        fill(PAGE, "MAP", the_map)
        fill(PAGE, "TABLE", f"{schemes}\n{goals}")
        every = [name for name in sweep.variants if any(variant == name for variant, _ in results)]
        for name, picture in {
            "map": map_picture(cells),
            "joining": loss_by_steps(sweep, results, PICTURED),
            "loss_by_steps": loss_by_steps(sweep, results, every),
            "loss_by_bytes": loss_by_bytes(sweep, results, every),
        }.items():
            (PICTURES / f"{name}.png").write_bytes(picture)
    return 0


if __name__ == "__main__":
    entry_point(JoiningConfig, main)
