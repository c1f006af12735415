"""What a person reads of a run: lines on the console, pictures, and the final page."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from spes_p2p.errors import ConfigError
from spes_p2p.monitor.settings import METRICS_FILE, REPORT_FILE
from spes_p2p.monitor.sinks import replay
from spes_p2p.monitor.view import PHASES, PeerView, RoundSummary, SwarmView, short_id, sync_share
from spes_p2p.presentation import ACCENT, COLOURS, INK, WIDTH_INCHES, canvas, image, legend, page, png, section, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_ROWS = 40


class ConsoleSink:
    """Shows the newest view.

    Args:
        run_id: Shown in the title.
        mode: `live` redraws a table, `plain` prints a line per complete round and per evaluation.
        console: Where to; by default standard output.
        after_round: Rounds up to this one were shown before a resume.
    """

    def __init__(
        self,
        run_id: str,
        mode: Literal["auto", "live", "plain"],
        console: Console | None = None,
        *,
        after_round: int = 0,
    ) -> None:
        self._run_id = run_id
        self._console = console or Console(highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._rounds = after_round
        self._view: SwarmView | None = None
        if mode == "live" or (mode == "auto" and self._console.is_terminal):
            self._live = Live(console=self._console, refresh_per_second=2)
            self._live.start()

    def update(self, view: SwarmView) -> None:
        if self._live is not None:
            self._live.update(render(self._run_id, view))
            return
        self._view = view
        self._print_rounds(view.published if view.is_reported(view.published) else view.published - 1)

    def evaluated(self, view: SwarmView, number: int, loss: float) -> None:
        if self._live is not None:
            self._live.update(render(self._run_id, view))
        else:
            self._print(f"round {number}/{view.total_rounds}: held-out loss {loss:.4f}")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._view is not None:
            self._print_rounds(self._view.published)

    def _print_rounds(self, last: int) -> None:
        """Print the complete rounds up to `last`; the newest waits for the slower of its members' reports."""
        assert self._view is not None
        for number in sorted(self._view.rounds):
            if self._rounds < number <= last:
                self._rounds = number
                self._print(round_line(self._view, number))

    def _print(self, line: str) -> None:
        # One line is one line, however narrow the terminal or log is.
        self._console.print(Text(line), soft_wrap=True)


def round_line(view: SwarmView, number: int) -> str:
    """Return a complete round in one line."""
    summary = view.rounds[number]
    parts = [
        f"round {number}/{view.total_rounds}",
        f"{summary.num_peers} peers",
        f"{summary.tokens_per_second:,.0f} tokens/s",
        f"loss {number_or_dash(summary.loss)}",
        f"held-out {_held_out(view)}",
        f"coverage {_coverage(view)}",
        *_stale(summary),
        *(f"{peer.short_id}: {slot_ranges(peer.slots)}" for peer in view.active[:MAX_ROWS]),
    ]
    return "  ".join(map(printable, parts))


def render(run_id: str, view: SwarmView) -> Group:
    """Return the live display: the swarm's line over the table of peers."""
    newest = view.newest
    head = [
        f"{run_id}  round {view.round}/{view.total_rounds}",
        f"{len(view.active)} active",
        f"{view.tokens:,} tokens",
        f"{newest.tokens_per_second:,.0f} tokens/s" if newest else "",
        f"loss {number_or_dash(newest.loss)}" if newest else "",
        f"held-out {_held_out(view)}",
        f"coverage {_coverage(view)}",
        *(_stale(newest) if newest else ()),
    ]
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("peer", "state", "round", "loss", "tokens/s", "syncing", "seen", "slots"):
        table.add_column(title, justify="left" if title in ("peer", "state", "slots") else "right", no_wrap=True)
    here = [peer for peer in view.peers.values() if peer.state != "left"]
    for peer in here[:MAX_ROWS]:
        table.add_row(*(Text(printable(cell)) for cell in _cells(view, peer)))
    hidden = len(here) - MAX_ROWS
    rest = [Text(f"and {hidden} more peers")] if hidden > 0 else []
    return Group(Text(printable("  ".join(part for part in head if part))), table, *rest)


def slot_ranges(slots: Sequence[int]) -> str:
    """Return ascending slots in short: `0-3,7`."""
    spans: list[list[int]] = []
    for slot in slots:
        if spans and slot == spans[-1][1] + 1:
            spans[-1][1] = slot
        else:
            spans.append([slot, slot])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans) or "none"


def number_or_dash(value: float | None, digits: int = 4) -> str:
    """Return a number for people; a dash where there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def printable(text: str) -> str:
    """Return text without characters that could steer a terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)


def _cells(view: SwarmView, peer: PeerView) -> list[str]:
    report = peer.report
    numbers = ["-"] * 3
    if report is not None:
        numbers = [number_or_dash(report.loss), f"{report.tokens_per_second:,.0f}", f"{sync_share(report):.0%}"]
    seen = f"{max(0.0, view.now - peer.last_seen):.0f} s"
    return [peer.short_id, peer.state, str(peer.round), *numbers, seen, slot_ranges(peer.slots)]


def _held_out(view: SwarmView) -> str:
    if not view.held_out:
        return "-"
    number, loss = max(view.held_out.items())
    return f"{loss:.4f} (round {number})"


def _stale(summary: RoundSummary) -> list[str]:
    """Return how old others' slots are where a peer does not fetch all of them in every round."""
    return [f"slots up to {summary.stale_rounds} rounds old"] if summary.stale_rounds else []


def _coverage(view: SwarmView) -> str:
    covered = view.num_slots - len(view.orphans)
    orphans = f", orphans {slot_ranges(view.orphans[:16])}" if view.orphans and view.active else ""
    return f"{covered}/{view.num_slots}{orphans}"


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
            "Who holds what",
            "Rounds that a peer trained a slot: the stronger, the more. A dot marks claims that stood at the end.",
            holdings(view),
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
