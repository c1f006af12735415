"""The benchmark's results as a table for a terminal, as Markdown, and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.accounts import Account
from benchmarks.baselines import CENTRALISED
from benchmarks.machine import Circumstances
from benchmarks.stock import StockPace
from benchmarks.tasks import Subject
from spes_p2p.errors import ConfigError
from spes_p2p.monitor.view import PHASES

MIN_PACE, MAX_NOT_TRAINING, MIN_FALL = 0.70, 0.25, 2.0
QUIET = 0.93
"""Share of the cores, and of the better of two paces, below which another process must have been at work."""
SAME_LOSS = 1e-3
"""Two evaluations of one model, by different kernels in fp32, agree to this; in nats."""


@dataclass(frozen=True)
class Measured:
    """Everything that was measured.

    Attributes:
        account: The swarm's.
        observed_seconds: Its wall time by the monitor's clock.
        stock: Stock training `before` and `after` the swarm, or only after.
        stock_tokens_per_second: Their median.
        held_out: Held-out loss of the swarm's model by round, as its monitor measured it.
        start_loss: That of the run's random start, measured here.
        checkpoint_loss: That of the checkpoint which the swarm left, measured here.
        baselines: What `train_baseline` returned, by name.
        steps: Local steps of a peer in each round, the mean over peers.
        swarm_tokens: Tokens that the swarm had trained by each round, 0 included.
        peers: Peers of the experiment.
    """

    account: Account
    observed_seconds: float | None
    stock: Mapping[str, StockPace]
    stock_tokens_per_second: float
    held_out: Mapping[int, float]
    start_loss: float
    checkpoint_loss: float
    baselines: Mapping[str, Mapping[str, Any]]
    steps: Sequence[int]
    swarm_tokens: Sequence[int]
    peers: int

    @property
    def pace(self) -> float:
        """The swarm's summed training throughput over that of as many stock processes."""
        return self.account.tokens_per_second / self.stock_tokens_per_second

    @property
    def end_loss(self) -> float:
        """Held-out loss of the swarm's model after the last round."""
        return self.held_out[max(self.held_out)]


class Row(NamedTuple):
    """A figure, what it came to, and, where there is one, the goal and whether it was reached."""

    figure: str
    measured: str
    goal: str = ""
    is_reached: bool | None = None

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The row as text."""
        return self.figure, self.measured, self.goal, {None: "", True: "yes", False: "NO"}[self.is_reached]


HEAD = ("figure", "measured", "to reach", "reached")


def rows(measured: Measured) -> Iterator[Row]:
    """Yield the table's rows."""
    account, peers = measured.account, measured.peers
    parts = ", ".join(f"{when} {pace.total:,.0f} on {pace.cores:.2f} cores" for when, pace in measured.stock.items())
    yield Row(f"swarm of {peers}, tokens/s, rounds {account.rounds[0]}-{account.rounds[1]}", _pace(account))
    yield Row(f"{peers} processes of stock HF training, tokens/s", f"{measured.stock_tokens_per_second:,.0f} ({parts})")
    yield Row("summed training throughput, swarm / stock", f"{measured.pace:.1%}", ">= 70 %", measured.pace >= MIN_PACE)
    is_busy = account.not_training < MAX_NOT_TRAINING
    yield Row("wall time not spent training", f"{account.not_training:.1%}", "< 25 %", is_busy)
    for phase in PHASES[1:]:
        yield Row(f"- {phase}", f"{account.shares[phase]:.1%}")
    fall = measured.start_loss - measured.end_loss
    yield Row("held-out loss, random start", f"{measured.start_loss:.3f}")
    yield Row("held-out loss, the swarm's model", f"{measured.end_loss:.3f}")
    yield Row("- fall from the random start, nats", f"{fall:.3f}", ">= 2", fall >= MIN_FALL)
    is_same = abs(measured.checkpoint_loss - measured.end_loss) < SAME_LOSS
    yield Row("- of its checkpoint, by the stock class", f"{measured.checkpoint_loss:.3f}", "the same", is_same)
    for name, baseline in measured.baselines.items():
        yield Row(f"held-out loss, {name}", f"{baseline['losses'][-1]:.3f}", "reported")


def _pace(account: Account) -> str:
    return f"{account.tokens_per_second:,.0f} ({account.tokens:,} in {account.wall_seconds:.1f} s)"


def disturbances(measured: Measured, num_cores: int) -> list[str]:
    """Return what speaks against trusting the throughput, if anything: others used the cores while it was measured."""
    fair = min(num_cores, measured.peers)
    notes = [
        f"stock training {when} the swarm got {pace.cores:.2f} of {fair} cores"
        for when, pace in measured.stock.items()
        if pace.cores < QUIET * fair
    ]
    totals = [pace.total for pace in measured.stock.values()]
    if min(totals) < QUIET * max(totals):
        notes.append(f"stock training made {min(totals):,.0f} tokens/s at one time and {max(totals):,.0f} at another")
    return [f"The machine was not quiet, so do not trust the throughput: {note}." for note in notes]


def as_text(measured: Measured, circumstances: Circumstances) -> str:
    """Return the table for a terminal."""
    lines = [HEAD, *(row.cells for row in rows(measured))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([*table, *disturbances(measured, circumstances.cores)])


def as_json(measured: Measured, circumstances: Circumstances, subject: Subject) -> str:
    """Return everything as JSON."""
    document = {
        "figures": [dict(zip(HEAD, row.cells, strict=True)) for row in rows(measured)],
        "circumstances": asdict(circumstances),
        "measured": asdict(measured),
        "run": subject.run.model_dump(mode="json"),
    }
    return json.dumps(document, indent=1) + "\n"


def as_markdown(measured: Measured, circumstances: Circumstances, subject: Subject) -> str:
    """Return the table, the curves, what was counted and where, as a page."""
    parts = [
        "# The local experiment, measured\n",
        markdown_table(HEAD, [row.cells for row in rows(measured)]),
        *disturbances(measured, circumstances.cores),
        "\n## Held-out loss by round\n",
        _curves(measured),
        "\n## What is counted\n",
        _counted(measured, subject),
        "\n## Circumstances\n",
        _circumstances(circumstances, measured, subject),
    ]
    return "\n".join(parts)


def _curves(measured: Measured) -> str:
    """Return each way to train at the same points: a peer's local steps of a number of rounds."""
    names = list(measured.baselines)
    lines = []
    for number, tokens in enumerate(measured.baselines[names[-1]]["tokens"]):
        swarm = f"{measured.held_out[number]:.3f}" if number in measured.held_out else "-"
        losses = [f"{measured.baselines[name]['losses'][number]:.3f}" for name in names]
        lines.append((str(number), f"{tokens:,}", swarm, *losses))
    return markdown_table(("round", "tokens per peer", "the swarm's model", *names), lines)


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, its first column flush left."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines)) + "\n"


def fill(page: Path, marker: str, table: str) -> None:
    """Put a table into a page, between `<!-- MARKER -->` and `<!-- /MARKER -->`.

    Raises:
        ConfigError: the page has no such markers.
    """
    pattern = rf"(<!-- {marker} -->\n).*?(<!-- /{marker} -->)"
    text, count = re.subn(pattern, lambda found: found[1] + table + found[2], page.read_text(), flags=re.DOTALL)
    if not count:
        raise ConfigError(f"{page} has no place for the table; put <!-- {marker} --> and <!-- /{marker} --> into it")
    page.write_text(text)


def _counted(measured: Measured, subject: Subject) -> str:
    account, run, peers = measured.account, subject.run, measured.peers
    first, last = account.rounds
    clock = f"{measured.observed_seconds:.1f} s" if measured.observed_seconds is not None else "unknown"
    seconds = next(iter(measured.stock.values())).seconds
    lines = [
        f"Rounds {first} to {last}; round 1 is left out, because a peer's account of it contains its start-up. A "
        f"peer's round is training + matchmaking + averaging + exchange + other (outer step, publishing, claims, "
        f"checkpoint).",
        f"Throughput of the swarm: tokens trained and committed by all peers ({account.lost_tokens:,} more were "
        f"trained and not committed) over {account.wall_seconds:.1f} s, the longest sum of rounds of the "
        f"{account.peers} peers that reported them all; by the monitor's clock {clock} (read once a second). "
        f"The monitor runs, pulls and evaluates on the same cores meanwhile.",
        "Time not spent training: seconds of all phases but training over all seconds, summed over these peers.",
        f"Stock: {peers} processes of one thread, the stock class with its default experts kernel, its own balance "
        f"loss (coefficient {run.train.balance_loss:g}) and fused AdamW, clipping and data order as the peers'; all "
        f"train throughout a window of {seconds:.0f} s; of two windows, the median counts. A stock "
        f"process computes the gradients of all experts, a peer only those of its slots.",
        "Held-out loss: mean cross entropy in nats per token, on the batches that the monitor evaluates on.",
        f"Solo peers: this project's trainer in one process, peer 0's data order, {sum(measured.steps)} steps, the "
        f"mean of the peers' own, round by round on the same schedule. One has all slots, the other those that "
        f"peer 0 held, its other experts staying as initialised.",
        f"{CENTRALISED.capitalize()}: the same with {peers} peers' batches put together at each step, "
        f"and the same learning rate; neither was tuned for it.",
    ]
    return "\n".join(f"- {line}" for line in lines) + "\n"


def _circumstances(circumstances: Circumstances, measured: Measured, subject: Subject) -> str:
    run = subject.run
    model, train = run.model, run.train
    packages = ", ".join(f"{name} {number}" for name, number in circumstances.packages.items())
    lines = [
        f"{circumstances.date}, commit {circumstances.commit}",
        f"{circumstances.cpu}, {circumstances.cores} cores, {circumstances.memory_gib:g} GiB; load average before the "
        f"start {circumstances.load_before:.2f}",
        f"Python {circumstances.python}, {packages}",
        f"experiment: `{' '.join(circumstances.command)}`" if circumstances.command else "a finished experiment",
        f"{model.family}, width {model.hidden_size}, {model.num_layers} layers, {model.num_experts} experts of width "
        f"{model.intermediate_size}, top {model.top_k}; {run.data.source} corpus, sequences of "
        f"{run.data.sequence_length}",
        f"{measured.peers} peers, batch {train.batch_size} each, {run.round.total} rounds, "
        f"{train.optimizer} at {train.lr:g} ({train.schedule}), {train.precision}, outer {run.outer.optimizer}; "
        "everything else in the .json beside",
    ]
    return "\n".join(f"- {line}" for line in lines) + "\n"
