"""A sweep's report: a table, all results in one JSON file, three pictures, and a page with everything."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from spes_p2p import __version__, presentation
from spes_p2p.presentation import COLOURS, INK, canvas, drawable, legend, png
from spes_p2p.sim.sweep.results import Missing, RunResult, plain, write_file
from spes_p2p.sim.sweep.settings import Gap, Sweep, Variant, flat

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Results = Mapping[tuple[str, int], RunResult]
"""By variant and seed."""
TOKENS_TOLERANCE = 0.01
"""Relative tolerance: a round by tokens ends with a whole batch, not with the exact number."""


@dataclass(frozen=True)
class Spread:
    """A number measured with several seeds: its values by seed."""

    values: Mapping[int, float]

    @property
    def mean(self) -> float:
        return mean(self.values.values())

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation over seeds; None for a single seed, or if a value is not finite."""
        values = list(self.values.values())
        return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None


@dataclass(frozen=True)
class Curve:
    """Held-out loss of one variant after every round that all of its finished seeds measured.

    Attributes:
        tokens: Tokens per peer, mean over seeds.
        steps: The same as optimizer steps, at the batch size of the variant's peers.
        megabytes: Megabytes sent per peer, mean over seeds.
        mean: Mean loss over seeds.
        low: Lowest loss over seeds.
        high: Highest loss over seeds.
    """

    tokens: Sequence[float]
    steps: Sequence[float]
    megabytes: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class Row:
    """One variant's figures.

    Attributes:
        name: Name of the variant.
        title: Its name in tables and plots.
        loss: Held-out loss at the end, nats per token.
        gaps: Share of each gap that the variant closed, by the gap's name, where it can be computed.
        unequal: Those gaps that compare runs on different numbers of tokens; see `has_equal_tokens`.
        tokens: Tokens trained per peer, mean over peers and seeds.
        tokens_range: Fewest and most tokens that a peer trained.
        megabytes: Megabytes sent per peer, mean over peers and seeds.
        expert_megabytes: Memory of all experts on the peer that needs most.
        memory_megabytes: All planned memory of that peer.
        wall_seconds: Duration of a run, mean over seeds.
        curve: Loss over the run.
        remarks: Caveats of the losses, each with the seeds that it concerns.
    """

    name: str
    title: str
    loss: Spread
    gaps: Mapping[str, Spread]
    unequal: frozenset[str]
    tokens: float
    tokens_range: tuple[int, int]
    megabytes: float
    expert_megabytes: float
    memory_megabytes: float
    wall_seconds: float
    curve: Curve
    remarks: Mapping[str, Sequence[int]]


def summarise(sweep: Sweep, results: Results) -> list[Row]:
    """Return a row for each variant with a finished run, in the sweep's order."""
    rows = []
    for variant in sweep.variants.values():
        own = {seed: results[variant.name, seed] for seed in sweep.seeds if (variant.name, seed) in results}
        if own:
            rows.append(_row(sweep, variant, own, results))
    return rows


def _row(sweep: Sweep, variant: Variant, own: Mapping[int, RunResult], results: Results) -> Row:
    gaps, unequal = dict[str, Spread](), set[str]()
    for gap in sweep.gaps:
        spread = gap_spread(gap, variant.name, results) if variant.name in gap.of else None
        if spread is not None:
            gaps[gap.name] = spread
            ends = [(results[gap.solo, seed], results[gap.centralised, seed], own[seed]) for seed in spread.values]
            unequal |= set() if all(has_equal_tokens(*runs) for runs in ends) else {gap.name}
    peers = [peer for result in own.values() for peer in result.peers]
    tokens = [peer.tokens for peer in peers]
    remarks: dict[str, list[int]] = {}
    for seed, result in own.items():
        for remark in result.remarks:
            remarks.setdefault(remark, []).append(seed)
    return Row(
        name=variant.name,
        title=variant.title,
        loss=Spread({seed: result.loss for seed, result in own.items()}),
        gaps=gaps,
        unequal=frozenset(unequal),
        tokens=mean(tokens),
        tokens_range=(min(tokens), max(tokens)),
        megabytes=mean(peer.bytes_out for peer in peers) / 1e6,
        expert_megabytes=max(peer.expert_bytes for peer in peers) / 1e6,
        memory_megabytes=max(peer.memory_bytes for peer in peers) / 1e6,
        wall_seconds=mean(result.wall_seconds for result in own.values()),
        curve=_curve(list(own.values())),
        remarks=remarks,
    )


def has_equal_tokens(solo: RunResult, centralised: RunResult, ours: RunResult) -> bool:
    """Tell whether each peer trained as many tokens as the solo peer, and all together as many as the centralised one.

    Otherwise a gap compares amounts of training, not ways to train.
    """
    of_solo, of_all, own = (sum(peer.tokens for peer in run.peers) for run in (solo, centralised, ours))
    each = [(peer.tokens, of_solo / len(solo.peers)) for peer in ours.peers]
    return all(math.isclose(*pair, rel_tol=TOKENS_TOLERANCE) for pair in [*each, (own, of_all)])


def gap_spread(gap: Gap, variant: str, results: Results) -> Spread | None:
    """Return the share of a gap that a variant closed, by seed; None if no seed has a value."""
    shares = {}
    for seed in [seed for name, seed in results if name == variant]:
        ends = [results.get((name, seed)) for name in (gap.solo, gap.centralised)]
        if ends[0] is not None and ends[1] is not None:
            shares[seed] = gap_closed(ends[0].loss, ends[1].loss, results[variant, seed].loss)
    known = {seed: share for seed, share in shares.items() if share is not None}
    return Spread(known) if known else None


def gap_closed(solo: float, centralised: float, loss: float) -> float | None:
    """Return (solo - loss) / (solo - centralised): below 0 is worse than solo, above 1 better than centralised.

    Returns None if centralised is not better than solo, or a loss is not finite.
    """
    if not all(map(math.isfinite, (solo, centralised, loss))) or solo <= centralised:
        return None
    return (solo - loss) / (solo - centralised)


def _curve(own: Sequence[RunResult]) -> Curve:
    by_round = [{point.round: point for point in result.evaluations} for result in own]
    common = sorted(set.intersection(*(set(points) for points in by_round)))
    columns = [[points[number] for points in by_round] for number in common]
    run = own[0].scenario["run"]
    step_tokens = run["train"]["batch_size"] * run["data"]["sequence_length"]
    tokens = [mean(point.tokens_per_peer for point in column) for column in columns]
    return Curve(
        tokens=tokens,
        steps=[number / step_tokens for number in tokens],
        megabytes=[mean(point.bytes_out_per_peer for point in column) / 1e6 for column in columns],
        mean=[mean(point.loss for point in column) for column in columns],
        low=[min(point.loss for point in column) for column in columns],
        high=[max(point.loss for point in column) for column in columns],
    )


MissingRuns = Mapping[tuple[str, int], Missing]
UNEQUAL_MARK = "†"
UNEQUAL_NOTE = (
    f"{UNEQUAL_MARK} Not at equal tokens, so this gap also tells how much was trained: some peer trained more or less "
    f"than the lone one, or all together than the centralised one, by more than {TOKENS_TOLERANCE:.0%}."
)


def notes(results: Results, missing: MissingRuns, rows: Sequence[Row]) -> list[str]:
    """Return the notes below the table, a line each: unequal tokens, missing runs, results of other versions."""
    lines = [UNEQUAL_NOTE] if any(row.unequal for row in rows) else []
    lines += missing_lines(missing)
    others: dict[str, list[tuple[str, int]]] = {}
    for key, result in results.items():
        if result.software != __version__:
            others.setdefault(result.software, []).append(key)
    lines += [f"made by spes_p2p {name} (this is {__version__}): {_runs(keys)}" for name, keys in others.items()]
    return lines


def missing_lines(missing: MissingRuns) -> list[str]:
    """Return "outdated: ours seeds 0, 1: run.train.lr was 0.1, is 0.2", a line for each kind and reason."""
    return [": ".join(filter(None, cells)) for cells in missing_cells(missing)]


def missing_cells(missing: MissingRuns) -> list[tuple[str, str, str]]:
    """Return kind, runs and reason of the runs that are not in the table."""
    alike: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for key, run in missing.items():
        alike.setdefault((run.kind, " ".join(run.reason.split())), []).append(key)
    return [(kind, _runs(keys), reason) for (kind, reason), keys in alike.items()]


def _runs(keys: Iterable[tuple[str, int]]) -> str:
    seeds: dict[str, list[int]] = {}
    for variant, seed in keys:
        seeds.setdefault(variant, []).append(seed)
    return "; ".join(f"{variant} {of_seeds(found)}" for variant, found in seeds.items())


def of_seeds(seeds: Sequence[int]) -> str:
    """Return "seed 1", or "seeds 0, 1"."""
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"


LOSS = "held-out loss (nats per token)"
LINES = ("-", "--", ":", "-.")


def loss_by_steps(rows: Sequence[Row]) -> bytes:
    """Draw the held-out loss over a peer's optimizer steps: the mean over seeds, and a band from lowest to highest.

    The axis shows steps, not tokens: centralised training reads more tokens in each step.
    """
    figure, axes = canvas("steps of each peer", LOSS, large="x")
    for index, row in enumerate(rows):
        _line(axes, index, row, row.curve.steps)
    legend(figure, axes)
    return png(figure)


def loss_by_bytes(rows: Sequence[Row]) -> bytes | None:
    """Draw the held-out loss over bytes sent per peer; None if no variant sent any.

    A variant that sends nothing is a horizontal line at its final loss.
    """
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
    """Draw the held-out loss at the end: a bar for the mean over seeds, a dot for each seed."""
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
    """Draw mean and band of one variant, in the colour of its place among the rows."""
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


TABLE_FILE, RESULTS_FILE, REPORT_FILE = "table.md", "results.json", "report.html"
NONE = "-"
NOTHING: MissingRuns = MappingProxyType({})
NOTES = (
    "Losses are means over seeds ± their sample standard deviation. Gap closed: (solo - x) / (solo - centralised), "
    "seed by seed. Memory, of the experts and of all that is trained or kept, is the planner's, without activations, "
    "of the peer that needs most."
)


def write_report(sweep: Sweep, results: Results, output: Path, missing: MissingRuns = NOTHING) -> str:
    """Write table, JSON file, pictures and page; return the table with the notes below it.

    Args:
        sweep: The sweep.
        results: Its finished runs, at least one.
        output: Folder to write to; older reports there are replaced.
        missing: The sweep's other runs.

    Raises:
        ConfigError: it cannot be written.
    """
    rows = summarise(sweep, results)
    table = markdown(*table_cells(sweep, rows))
    below = notes(results, missing, rows)
    pictures = dict(_pictures(rows))
    write_file(output / TABLE_FILE, "\n\n".join([table, NOTES, *below]).encode() + b"\n")
    write_file(output / RESULTS_FILE, _json(sweep, results, rows, missing))
    (output / "loss_by_bytes.png").unlink(missing_ok=True)  # an older report may have had it
    for name, (_, _, picture) in pictures.items():
        write_file(output / f"{name}.png", picture)
    page = _page(sweep, results, rows, pictures, missing)
    write_file(output / REPORT_FILE, page.encode())
    return "\n\n".join([table, "\n".join(below)]) if below else table


def table_cells(sweep: Sweep, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the table's titles and rows, as text."""
    asked = [gap.name for gap in sweep.gaps]
    gaps = ["gap closed"] if len(asked) == 1 else [f"gap closed: {name}" for name in asked]
    costs = ["tokens/peer", "MB sent/peer", "expert MB/peer", "all MB/peer", "wall s/run"]
    any_remarks = any(row.remarks for row in rows)
    titles = ["variant", "seeds", "held-out loss", *gaps, *costs, *(["remarks"] if any_remarks else [])]
    cells = []
    for row in rows:
        amounts = (row.megabytes, row.expert_megabytes, row.memory_megabytes, row.wall_seconds)
        numbers = [_tokens(row), *map(_quantity, amounts)]
        seeds = f"{len(row.loss.values)} of {len(sweep.seeds)}"
        remarks = [_remarks(row)] if any_remarks else []
        closed = [_gap(row, name) for name in asked]
        cells.append([row.title, seeds, _spread(row.loss, "{:.4f}"), *closed, *numbers, *remarks])
    return titles, cells


def _gap(row: Row, name: str) -> str:
    mark = f" {UNEQUAL_MARK}" if name in row.unequal else ""
    return _spread(row.gaps[name], "{:.1%}") + mark if name in row.gaps else NONE


def _tokens(row: Row) -> str:
    """Return the mean, and the range if peers trained different numbers of tokens."""
    least, most = row.tokens_range
    return f"{row.tokens:,.0f}" if least == most else f"{row.tokens:,.0f} ({least:,}–{most:,})"


def _remarks(row: Row) -> str:
    """Return the row's remarks, with the seeds of those that do not concern all runs."""
    all_seeds = list(row.loss.values)
    texts = [text if seeds == all_seeds else f"{text} ({of_seeds(seeds)})" for text, seeds in row.remarks.items()]
    return "; ".join(texts) or NONE


def _quantity(value: float) -> str:
    """Return a number with about three digits: 1,234, 12.3, 0.012."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 or not value else 3
    return f"{value:,.{digits}f}"


def _spread(spread: Spread, form: str) -> str:
    if spread.deviation is None:
        return form.format(spread.mean)
    return f"{form.format(spread.mean)} ± {form.format(spread.deviation)}"


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose columns also align on a terminal: text to the left, numbers to the right."""
    lines = [[cell.replace("\\", "\\\\").replace("|", "\\|") for cell in row] for row in (titles, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = [f":{'-' * (widths[0] - 1)}", *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    padded = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in (padded[0], rule, *padded[1:]))


def _pictures(rows: Sequence[Row]) -> Iterator[tuple[str, tuple[str, str, bytes]]]:
    """Yield each picture's file name, title, caption and PNG."""
    band = "Lines are means over seeds, bands reach from the lowest to the highest."
    caption = f"Loss for a peer's own training. {band}"
    yield "loss_by_steps", ("Loss by steps", caption, loss_by_steps(rows))
    if (picture := loss_by_bytes(rows)) is not None:
        caption = f"Loss for a peer's uplink; a dotted line is the final loss of a variant that sends nothing. {band}"
        yield "loss_by_bytes", ("Loss by bytes sent", caption, picture)
    caption = "Bars are means over seeds, dots single seeds; the axis does not begin at 0."
    yield "final_loss", ("Final loss", caption, final_loss(rows))


def _json(sweep: Sweep, results: Results, rows: Sequence[Row], missing: MissingRuns) -> bytes:
    """Return all results in one document, without the scenarios, which repeat the sweep's settings."""
    summary = {
        row.name: {
            "title": row.title,
            "loss": _numbers(row.loss),
            "gap_closed": {
                name: _numbers(spread) | {"equal_tokens": name not in row.unequal} for name, spread in row.gaps.items()
            },
            "tokens_per_peer": row.tokens,
            "tokens_per_peer_range": row.tokens_range,
            "remarks": row.remarks,
            "bytes_out_per_peer": row.megabytes * 1e6,
            "expert_bytes_per_peer": row.expert_megabytes * 1e6,
            "memory_bytes_per_peer": row.memory_megabytes * 1e6,
            "wall_seconds_per_run": row.wall_seconds,
        }
        for row in rows
    }
    variants = {name: variant.settings for name, variant in sweep.variants.items()}
    document = {
        "study": {"title": sweep.title, "seeds": sweep.seeds, "base": sweep.base, "variants": variants},
        "summary": summary,
        "runs": [json.loads(result.model_dump_json(exclude={"scenario"})) for result in results.values()],
        "missing": [
            {"variant": variant, "seed": seed, "kind": run.kind, "reason": run.reason}
            for (variant, seed), run in missing.items()
        ],
    }
    return json.dumps(document, indent=1, default=str, ensure_ascii=False).encode() + b"\n"


def _numbers(spread: Spread) -> dict[str, Any]:
    return {"mean": spread.mean, "deviation": spread.deviation, "by_seed": dict(spread.values)}


def _page(
    sweep: Sweep,
    results: Results,
    rows: Sequence[Row],
    pictures: Mapping[str, tuple[str, str, bytes]],
    missing: MissingRuns,
) -> str:
    def sections() -> Iterator[str]:
        caption = " ".join([NOTES, *notes(results, {}, rows)])
        yield presentation.section("Results", presentation.table(*table_cells(sweep, rows)), caption=caption, wide=True)
        if missing:
            absent = presentation.table(("what became of them", "runs", "why"), missing_cells(missing))
            yield presentation.section("Not in the table", absent, wide=True)
        for title, caption, picture in pictures.values():
            yield presentation.section(title, presentation.image(title, picture), caption=caption)
        for variant in sweep.variants.values():
            if changes := differences(sweep, variant):
                heading = variant.name if variant.title == variant.name else f"{variant.name}: {variant.title}"
                yield presentation.section(heading, presentation.table(("setting", "base", "here"), changes))
        base = [(name, plain(value)) for name, value in flat(sweep.base).items()]
        yield presentation.section(
            "Base", presentation.table(("setting", "value"), base), caption="What every variant starts from."
        )

    return presentation.page(sweep.title, _origins(results), _tiles(sweep, results), sections())


def differences(sweep: Sweep, variant: Variant) -> list[tuple[str, str, str]]:
    """Return the settings in which a variant differs from the base: name, base value (or a dash), variant's value."""
    base = flat(sweep.base)
    own = flat(variant.settings)
    return [
        (name, plain(base[name]) if name in base else NONE, plain(value))
        for name, value in own.items()
        if name not in base or base[name] != value
    ]


def _tiles(sweep: Sweep, results: Results) -> dict[str, str]:
    planned = len(sweep.variants) * len(sweep.seeds)
    hours = sum(result.wall_seconds for result in results.values()) / 3600
    tokens = sum(peer.tokens for result in results.values() for peer in result.peers)
    return {
        "variants": f"{len({name for name, _ in results})} of {len(sweep.variants)}",
        "runs": f"{len(results)} of {planned}",
        "tokens trained": f"{tokens:,}",
        "hours of computing": f"{hours:,.2f}",
    }


def _origins(results: Results) -> Iterator[str]:
    """Yield software, machine and dates of the runs: a line for each combination."""
    dates: dict[str, list[str]] = {}
    for result in results.values():
        machine = result.machine
        origin = (
            f"spes_p2p {result.software}, torch {machine.torch}, Python {machine.python}, "
            f"{machine.device} on {machine.cpu}, threads per run: {machine.threads}"
        )
        dates.setdefault(origin, []).append(result.finished_at[:10])
    for origin, days in dates.items():
        span = min(days) if min(days) == max(days) else f"{min(days)} to {max(days)}"
        yield f"{len(days)} {'run' if len(days) == 1 else 'runs'}, {span}: {origin}"
