"""What a study leaves behind: a table, all results in one JSON, three pictures, and a page that holds everything."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spes_p2p import presentation
from spes_p2p.study import figures
from spes_p2p.study.notes import UNEQUAL_MARK, MissingRuns, missing_cells, notes, of_seeds
from spes_p2p.study.settings import Study, Variant, flat
from spes_p2p.study.store import write_file
from spes_p2p.study.summary import Results, Row, Spread, summarise

TABLE_FILE, RESULTS_FILE, REPORT_FILE = "table.md", "results.json", "report.html"
NONE = "-"
NOTHING: MissingRuns = MappingProxyType({})
NOTES = (
    "Losses are means over seeds ± their sample standard deviation. Gap closed: (solo - x) / (solo - centralised), "
    "seed by seed. Memory, of the experts and of all that is trained or kept, is the planner's, without activations, "
    "of the peer that needs most."
)


def write_report(study: Study, results: Results, output: Path, missing: MissingRuns = NOTHING) -> str:
    """Write everything anew and return the table, with what must be said below it.

    Args:
        study: What was compared.
        results: What has finished; at least one run.
        output: Folder to write to; older reports there are replaced.
        missing: The study's other runs.

    Raises:
        ConfigError: it cannot be written.
    """
    rows = summarise(study, results)
    table = markdown(*table_cells(study, rows))
    below = notes(results, missing, rows)
    pictures = dict(_pictures(rows))
    write_file(output / TABLE_FILE, "\n\n".join([table, NOTES, *below]).encode() + b"\n")
    write_file(output / RESULTS_FILE, _json(study, results, rows, missing))
    (output / "loss_by_bytes.png").unlink(missing_ok=True)  # an older report may have had it
    for name, (_, _, picture) in pictures.items():
        write_file(output / f"{name}.png", picture)
    page = _page(study, results, rows, pictures, missing)
    write_file(output / REPORT_FILE, page.encode())
    return "\n\n".join([table, "\n".join(below)]) if below else table


def table_cells(study: Study, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the table's titles and rows, as text."""
    asked = [gap.name for gap in study.gaps]
    gaps = ["gap closed"] if len(asked) == 1 else [f"gap closed: {name}" for name in asked]
    costs = ["tokens/peer", "MB sent/peer", "expert MB/peer", "all MB/peer", "wall s/run"]
    any_remarks = any(row.remarks for row in rows)
    titles = ["variant", "seeds", "held-out loss", *gaps, *costs, *(["remarks"] if any_remarks else [])]
    cells = []
    for row in rows:
        numbers = [_tokens(row), *map(_quantity, _costs(row))]
        seeds = f"{len(row.loss.values)} of {len(study.seeds)}"
        remarks = [_remarks(row)] if any_remarks else []
        closed = [_gap(row, name) for name in asked]
        cells.append([row.title, seeds, _spread(row.loss, "{:.4f}"), *closed, *numbers, *remarks])
    return titles, cells


def _gap(row: Row, name: str) -> str:
    mark = f" {UNEQUAL_MARK}" if name in row.unequal else ""
    return _spread(row.gaps[name], "{:.1%}") + mark if name in row.gaps else NONE


def _tokens(row: Row) -> str:
    """The mean, and from whom to whom where it is not everybody's."""
    least, most = row.tokens_range
    return f"{row.tokens:,.0f}" if least == most else f"{row.tokens:,.0f} ({least:,}–{most:,})"


def _remarks(row: Row) -> str:
    """What must be known of its runs; of which ones, if not of all."""
    all_seeds = list(row.loss.values)
    texts = [text if seeds == all_seeds else f"{text} ({of_seeds(seeds)})" for text, seeds in row.remarks.items()]
    return "; ".join(texts) or NONE


def _costs(row: Row) -> tuple[float, ...]:
    return row.megabytes, row.expert_megabytes, row.memory_megabytes, row.wall_seconds


def _quantity(value: float) -> str:
    """About three digits: 1,234, 12.3, 0.012."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 or not value else 3
    return f"{value:,.{digits}f}"


def _spread(spread: Spread, form: str) -> str:
    if spread.deviation is None:
        return form.format(spread.mean)
    return f"{form.format(spread.mean)} ± {form.format(spread.deviation)}"


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose columns align on a terminal too: text to the left, numbers to the right."""
    lines = [[cell.replace("\\", "\\\\").replace("|", "\\|") for cell in row] for row in (titles, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = [f":{'-' * (widths[0] - 1)}", *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    padded = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in (padded[0], rule, *padded[1:]))


def _pictures(rows: Sequence[Row]) -> Iterator[tuple[str, tuple[str, str, bytes]]]:
    """By name of the file: title, caption and PNG."""
    band = "Lines are means over seeds, bands reach from the least to the most."
    yield (
        "loss_by_steps",
        ("Loss by steps", f"What a peer's own training buys. {band}", figures.loss_by_steps(rows)),
    )
    if (picture := figures.loss_by_bytes(rows)) is not None:
        caption = f"What a peer's uplink buys; who sends nothing is a dotted line at its final loss. {band}"
        yield "loss_by_bytes", ("Loss by bytes sent", caption, picture)
    caption = "Bars are means over seeds, dots single seeds; the axis does not begin at 0."
    yield "final_loss", ("Final loss", caption, figures.final_loss(rows))


def _json(study: Study, results: Results, rows: Sequence[Row], missing: MissingRuns) -> bytes:
    """All results in one document, without the scenarios, which repeat the study from run to run."""
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
    variants = {name: variant.settings for name, variant in study.variants.items()}
    document = {
        "study": {"title": study.title, "seeds": study.seeds, "base": study.base, "variants": variants},
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
    study: Study,
    results: Results,
    rows: Sequence[Row],
    pictures: Mapping[str, tuple[str, str, bytes]],
    missing: MissingRuns,
) -> str:
    def sections() -> Iterator[str]:
        caption = " ".join([NOTES, *notes(results, {}, rows)])
        yield presentation.section("Results", presentation.table(*table_cells(study, rows)), caption=caption, wide=True)
        if missing:
            absent = presentation.table(("what became of them", "runs", "why"), missing_cells(missing))
            yield presentation.section("Not in the table", absent, wide=True)
        for title, caption, picture in pictures.values():
            yield presentation.section(title, presentation.image(title, picture), caption=caption)
        for variant in study.variants.values():
            if changes := differences(study, variant):
                heading = variant.name if variant.title == variant.name else f"{variant.name}: {variant.title}"
                yield presentation.section(heading, presentation.table(("setting", "base", "here"), changes))
        base = [(name, _plain(value)) for name, value in flat(study.base).items()]
        yield presentation.section(
            "Base", presentation.table(("setting", "value"), base), caption="What every variant starts from."
        )

    return presentation.page(study.title, _origins(results), _tiles(study, results), sections())


def differences(study: Study, variant: Variant) -> list[tuple[str, str, str]]:
    """Return the settings in which a variant differs from the base: name, value there (or a dash), value here."""
    base = flat(study.base)
    own = flat(variant.settings)
    return [
        (name, _plain(base[name]) if name in base else NONE, _plain(value))
        for name, value in own.items()
        if name not in base or base[name] != value
    ]


def _tiles(study: Study, results: Results) -> dict[str, str]:
    planned = len(study.variants) * len(study.seeds)
    hours = sum(result.wall_seconds for result in results.values()) / 3600
    tokens = sum(peer.tokens for result in results.values() for peer in result.peers)
    return {
        "variants": f"{len({name for name, _ in results})} of {len(study.variants)}",
        "runs": f"{len(results)} of {planned}",
        "tokens trained": f"{tokens:,}",
        "hours of computing": f"{hours:,.2f}",
    }


def _origins(results: Results) -> Iterator[str]:
    """What the runs were made with, and when: one line for each combination, few in a clean study."""
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


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
