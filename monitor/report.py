"""`report.html`: one file that tells how a run went, pictures included; it loads nothing and runs no script."""

from __future__ import annotations

import base64
import html
import importlib.util
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

from monitor import figures
from monitor.console import number_or_dash
from monitor.figures import Baselines
from monitor.journal import replay
from monitor.settings import METRICS_FILE, REPORT_FILE
from monitor.view import SwarmView, short_id, sync_share
from spes_p2p.errors import ConfigError

STYLE = """
:root { color-scheme: light dark; --ink: #1d2126; --soft: #666d75; --ground: #fbfbfa; --card: #fff; --line: #e4e4e0 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6e9; --soft: #9aa1a9; --ground: #14171a; --card: #1b1f23; --line: #2d3238 } }
* { box-sizing: border-box }
body { margin: 0; padding: 2.5rem 1.25rem 4rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
main { max-width: 74rem; margin: 0 auto }
h1 { font-size: 1.7rem; font-weight: 650; letter-spacing: -.01em; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1rem; font-weight: 600; margin: 0 0 .15rem }
p { margin: .2rem 0 0; color: var(--soft) }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: .75rem; margin: 1.6rem 0 }
@media (max-width: 46rem) { .tiles { grid-template-columns: repeat(2, 1fr) } }
.tiles div, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px }
.tiles div { padding: .7rem .9rem } .tiles dt { color: var(--soft); font-size: .82rem }
.tiles dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 1rem }
section { padding: 1rem 1.1rem; min-width: 0 } section p { font-size: .86rem; margin-bottom: .5rem }
img { display: block; width: 100%; height: auto }
.wide { grid-column: 1 / -1; overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { text-align: right; padding: .32rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--soft); font-weight: 500 } th:first-child, td:first-child { text-align: left }
td:first-child { font-family: ui-monospace, Menlo, Consolas, monospace }
tr:last-child td { border-bottom: 0 }
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def check_plotting() -> None:
    """Find out before a run, not after it, that its report could not be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the report needs matplotlib; run: pip install matplotlib")


def write_report(
    directory: Path,
    metrics: Path | None = None,
    facts: Mapping[str, object] | None = None,
    baselines: Baselines | None = None,
) -> Path:
    """Write `report.html` and return its path.

    Args:
        directory: Where to; an older report there is replaced.
        metrics: The watch's events; by default `metrics.jsonl` in `directory`.
        facts: More rows for the page's head, such as the run's end.
        baselines: Held-out loss over tokens of other ways to train the same model, by name, in nats per token.

    Raises:
        DataError: `metrics` cannot be read.
        ConfigError: the report cannot be written.
    """
    view, run = replay(metrics or directory / METRICS_FILE)
    title = str(run.get("run_id", "run"))
    about = {"model": _model_line(run), **(facts or {})}
    page = _page(title, about, view, baselines or {})
    path = directory / REPORT_FILE
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(page, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose a writable --output") from error
    return path


def summary(view: SwarmView) -> dict[str, str]:
    """Return the run in a few figures, each with its name."""
    held_out = [loss for loss in view.held_out.values() if math.isfinite(loss)]
    whole = [report for (number, _), report in view.reports.items() if number <= view.published]
    agreed = sum(1 for round in view.rounds.values() if round.agreement == 1.0)
    trained = {slot for report in whole for slot in report.slots if slot < view.num_slots}
    seconds = sum(round.seconds for round in view.rounds.values())
    tokens = view.tokens
    return {
        "rounds": f"{view.published} of {view.total_rounds}",
        "peers": f"{len(view.peers.keys() | {report.peer_id for report in whole})}",
        "tokens": f"{tokens:,}",
        "tokens per second": f"{tokens / seconds:,.0f}" if seconds else "-",
        "held-out loss": f"{held_out[0]:.3f} → {held_out[-1]:.3f}" if held_out else "-",
        "slots trained": f"{len(trained)} of {view.num_slots}",
        "time not training": f"{median(map(sync_share, whole)):.0%}" if whole else "-",
        "digests agreed": f"{agreed} of {len(view.rounds)}",
    }


def _page(title: str, about: Mapping[str, object], view: SwarmView, baselines: Baselines) -> str:
    tiles = "".join(f"<div><dt>{_e(name)}</dt><dd>{_e(value)}</dd></div>" for name, value in summary(view).items())
    lines = "".join(f"<p>{_e(name)}: {_e(value)}</p>" for name, value in about.items() if value)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_e(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<header><h1>{_e(title)}</h1>{lines}</header>\n<dl class="tiles">{tiles}</dl>\n'
        f'<div class="grid">\n{"".join(_sections(view, baselines))}{_peers(view)}</div>\n</main>\n</body>\n</html>\n'
    )


def _sections(view: SwarmView, baselines: Baselines) -> Iterator[str]:
    pictures = (
        (
            "Held-out loss",
            "The swarm's model, pulled by the monitor and evaluated on text that nobody trains on.",
            figures.held_out_loss(view, baselines),
        ),
        (
            "Training loss by peer",
            "As each peer reports it; the swarm's curve weighs them by tokens.",
            figures.training_loss(view),
        ),
        ("Throughput", "Tokens of a round over its wall time.", figures.throughput(view)),
        (
            "Time per round",
            "Averaging and exchange are the network's share, matchmaking is waiting for each other.",
            figures.phases(view),
        ),
        (
            "Who holds what",
            "Rounds that a peer trained a slot: the stronger, the more. A dot marks claims that stood at the end.",
            figures.holdings(view),
        ),
    )
    for title, caption, picture in pictures:
        if picture is not None:
            data = base64.b64encode(picture).decode()
            image = f'<img alt="{_e(title)}" src="data:image/png;base64,{data}">'
            kind = ' class="wide"' if title == "Who holds what" else ""
            yield f"<section{kind}><h2>{_e(title)}</h2><p>{_e(caption)}</p>{image}</section>\n"


def _peers(view: SwarmView) -> str:
    """One row per peer that ever reported or claimed."""
    reports: dict[str, list] = {peer: [] for peer in view.peers}
    for (number, peer), report in sorted(view.reports.items()):
        if number <= view.published:
            reports.setdefault(peer, []).append(report)
    titles = (
        "peer",
        "state",
        "rounds",
        "tokens",
        "last loss",
        "tokens/s",
        "not training",
        "dropped",
        "MB in",
        "MB out",
    )
    rows = []
    for peer, own in sorted(reports.items()):
        state = view.peers[peer].state if peer in view.peers else "left"
        numbers = ["0", "0", *["-"] * 6]
        if own:
            numbers = [
                *(str(len(own)), f"{sum(report.tokens for report in own):,}", number_or_dash(own[-1].loss)),
                f"{median(report.tokens_per_second for report in own):,.0f}",
                f"{median(map(sync_share, own)):.0%}",
                f"{sum(report.dropped for report in own)}",
                *(f"{count / 1e6:,.1f}" for count in (own[-1].bytes_in, own[-1].bytes_out)),
            ]
        rows.append("".join(f"<td>{_e(cell)}</td>" for cell in (short_id(peer), state, *numbers)))
    head = "".join(f"<th>{_e(title)}</th>" for title in titles)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<section class="wide"><h2>Peers</h2><table><tr>{head}</tr>{body}</table></section>\n' if rows else ""


def _model_line(run: Mapping[str, object]) -> str:
    config = run.get("config")
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        return ""
    parts = ("family", "num_layers", "hidden_size", "num_experts", "top_k")
    family, *rest = (model.get(part, "?") for part in parts)
    return "{}, {} layers of width {}, {} experts per layer, {} per token".format(family, *rest)


def _e(value: object) -> str:
    return html.escape(str(value), quote=True)
