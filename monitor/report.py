"""`report.html`: one file that tells how a run went, pictures included; it loads nothing and runs no script."""

from __future__ import annotations

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
from spes_p2p.presentation import image, page, section, table


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
    content = _page(title, about, view, baselines or {})
    path = directory / REPORT_FILE
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(content, encoding="utf-8")
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
    lines = [f"{name}: {value}" for name, value in about.items() if value]
    return page(title, lines, summary(view), [*_sections(view, baselines), _peers(view)])


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
            yield section(title, image(title, picture), caption=caption, wide=title == "Who holds what")


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
        rows.append((short_id(peer), state, *numbers))
    return section("Peers", table(titles, rows), wide=True) if rows else ""


def _model_line(run: Mapping[str, object]) -> str:
    config = run.get("config")
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        return ""
    parts = ("family", "num_layers", "hidden_size", "num_experts", "top_k")
    family, *rest = (model.get(part, "?") for part in parts)
    return "{}, {} layers of width {}, {} experts per layer, {} per token".format(family, *rest)
