"""The final page of a watched run: its figures, pictures and peers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from spes_p2p.errors import ConfigError
from spes_p2p.fs import write_atomic
from spes_p2p.monitor.sinks import METRICS_FILE, number_or_dash, replay
from spes_p2p.monitor.view import PHASES, SwarmView, short_id, sync_share
from spes_p2p.presentation import ACCENT, COLOURS, INK, WIDTH_INCHES, canvas, image, legend, page, png, section, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPORT_FILE = "report.html"
Baselines = Mapping[str, Sequence[tuple[int, float]]]
"""Held-out loss over tokens of other ways to train the same model, by name."""
PHASE_COLOURS = dict(zip(PHASES, (ACCENT, "#e69f00", "#d55e00", "#009e73", "#999999"), strict=True))
MAX_LEGEND = 12
MAX_MATRIX_PEERS = 60
HOLDINGS_TITLE = "Slots by peer"


def training_loss(view: SwarmView) -> bytes | None:
    """Draw the training loss of each peer and the swarm's mean over the swarm's tokens; None before the first round."""
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
    """Draw the swarm's held-out loss over its tokens, beside baselines; None before the first evaluation."""
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
    """Draw the swarm's tokens per second by round, with and without the time spent synchronising."""
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
    """Draw the median peer's seconds by phase for each round."""
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
    """Draw how many rounds each peer trained each slot, with a dot where the claim still stands."""
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
    """Return the accent colour, more opaque for a larger share."""
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


def write_report(
    directory: Path,
    metrics: Path | None = None,
    facts: Mapping[str, object] | None = None,
    baselines: Baselines | None = None,
) -> Path:
    """Write `report.html` and return its path.

    Args:
        directory: Receives the report, in place of an older one.
        metrics: The watch's events; by default `metrics.jsonl` in `directory`.
        facts: More rows for the page's head, such as how the run ended.
        baselines: Curves to compare with, in nats per token.

    Raises:
        DataError: `metrics` cannot be read.
        ConfigError: the report cannot be written.
    """
    view, run = replay(metrics or directory / METRICS_FILE)
    about = {"model": _model_line(run), **(facts or {})}
    lines = [f"{name}: {value}" for name, value in about.items() if value]
    sections = [*_sections(view, baselines or {}), _peers(view)]
    content = page(str(run.get("run_id", "run")), lines, summary(view), sections)
    path = directory / REPORT_FILE
    try:
        with write_atomic(path, durable=False) as file:
            file.write(content.encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose a writable --output") from error
    return path


def summary(view: SwarmView) -> dict[str, str]:
    """Return the run's key figures by name."""
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


def _sections(view: SwarmView, baselines: Baselines) -> Iterator[str]:
    pictures = (
        (
            "Held-out loss",
            "The swarm's model, pulled by the monitor and evaluated on text that no peer trains on.",
            held_out_loss(view, baselines),
        ),
        (
            "Training loss by peer",
            "As each peer reports it; the swarm's curve weighs them by tokens.",
            training_loss(view),
        ),
        ("Throughput", "Tokens of a round over its wall time.", throughput(view)),
        (
            "Time per round",
            "Averaging and exchange are the network's share, matchmaking is waiting for each other.",
            phases(view),
        ),
        (
            HOLDINGS_TITLE,
            "Rounds in which a peer trained a slot: a stronger colour means more. A dot marks a claim at the end.",
            holdings(view),
        ),
    )
    for title, caption, picture in pictures:
        if picture is not None:
            yield section(title, image(title, picture), caption=caption, wide=title == HOLDINGS_TITLE)


def _peers(view: SwarmView) -> str:
    """Return a table with a row for each peer that ever reported or claimed."""
    reports: dict[str, list] = {peer: [] for peer in view.peers}
    for (number, peer), report in sorted(view.reports.items()):
        if number <= view.published:
            reports.setdefault(peer, []).append(report)
    titles = [
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
    ]
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
