"""The scoreboard of a swarm among strangers: what is refused, what an attacker achieves, which guards would be missed.

    .venv/bin/python benchmarks/strangers.py [--only corpus guards ...] [--write]

Everything is real but the attackers' sweep, which is a simulation whose runs are kept (`benchmarks/attackers.py`).
"""

from __future__ import annotations

import json
import random
import secrets
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml
from pydantic import Field

from benchmarks import attackers as attackers_sweep
from benchmarks.bit_flips import flip_downloads
from benchmarks.cluster import ROOT, support
from benchmarks.fuzz.__main__ import draw, throw
from benchmarks.fuzz.decoders import decoders
from benchmarks.fuzz.guided import guide, untyped
from benchmarks.guards import guard_row, load_guards, not_missed
from benchmarks.passing import PASSED, run_tests
from benchmarks.scoreboard import Scoreboard
from benchmarks.tables import Row
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, PositiveInt
from spes_p2p.errors import ConfigError
from spes_p2p.presentation import say

CORPUS = ROOT / "tests" / "attacks" / "cases"
IN_MEMORY, OVER_LIBP2P = "tests/attacks/test_corpus.py", "tests/attacks/test_wire.py"
CORPUS_SECONDS = 1200.0
MIN_CASES, MIN_FLIPS = 200, 1000
MIN_INPUTS, MIN_PROPERTIES, MIN_EXECUTIONS = 1_000_000, 100_000, 200_000


@dataclass
class Bench:
    """What all measurements share.

    Attributes:
        seed: Seed of all random draws.
        inputs: Mutants of sound messages to throw at the decoders.
        cases: Property cases to draw for them.
        executions: Coverage-guided executions of them.
        flips: Bits to flip in downloads.
        seen: Everything measured, for the record.
    """

    seed: int
    inputs: int
    cases: int
    executions: int
    flips: int
    seen: dict[str, Any] = field(default_factory=dict)


def corpus(bench: Bench) -> Iterator[Row]:
    """Yield how many of the corpus's cases are refused: by the decoders themselves, and by a peer over libp2p."""
    cases = [case for file in sorted(CORPUS.glob("*.yaml")) for case in yaml.safe_load(file.read_text("utf-8"))]
    bad = sum(not case.get("is_taken", False) for case in cases)
    for tests, what, count in (
        (IN_MEMORY, "curated bad inputs refused, with a reason", bad),
        (OVER_LIBP2P, "- attacks over libp2p that one peer has withstood, and served on", None),
    ):
        with tempfile.TemporaryDirectory(prefix="corpus-") as folder:
            outcome = run_tests(ROOT, [tests], CORPUS_SECONDS, Path(folder))
        bench.seen[tests] = asdict(outcome)
        of = outcome.tests if count is None else count
        is_whole = outcome.code == PASSED and outcome.tests >= of
        measured = f"{of - outcome.failures if outcome.tests else 0} of {of}"
        if not is_whole:
            measured += f"; pytest's exit code {outcome.code}"
        goal = f"{MIN_CASES}, all" if count is not None else "all"
        yield Row(what, measured, goal, is_whole and (count is None or count >= MIN_CASES))


def fuzz(bench: Bench) -> Iterator[Row]:
    """Yield how many random inputs the decoders have refused as they should, or taken."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        targets = decoders(Path(folder))
        for what, count, least, found in (
            ("mutants", bench.inputs, MIN_INPUTS, throw(targets, bench.inputs, random.Random(bench.seed))),
            ("property cases", bench.cases, MIN_PROPERTIES, draw(targets, bench.cases, bench.seed)),
        ):
            bench.seen[what] = {"count": count, "untyped": [[name, error, n] for (name, error), n in found.items()]}
            row = f"fuzz, {what} for {len(targets)} decoders: untyped errors"
            yield Row(row, f"{found.total()} of {count:,}", f"0 of {least:,}", not found and count >= least)
    yield _guided(bench, f"fuzz, coverage-guided (atheris) executions for {len(targets)} decoders: untyped errors")


def _guided(bench: Bench, row: str) -> Row:
    goal = f"0 of {MIN_EXECUTIONS:,}"
    try:
        guided = guide(bench.executions, bench.seed)
    except ConfigError as error:
        return Row(row, f"not run: {error}", goal, False)
    bench.seen["guided"] = [asdict(one) for one in guided]
    count, found = sum(one.executions for one in guided), untyped(guided)
    return Row(row, f"{found.total()} of {count:,}", goal, not found and count >= MIN_EXECUTIONS)


def attackers(bench: Bench) -> Iterator[Row]:
    """Yield what the sweep of attackers has left; `benchmarks/attackers.py` makes it anew."""
    yield from attackers_sweep.summary_rows(json.loads((ROOT / attackers_sweep.RESULTS).read_text()))


def streams(bench: Bench) -> Iterator[Row]:
    """Yield how much a peer takes of streams without end."""
    floods, peers, attacks = support("floods"), support("real_peers"), support("attacker")
    with tempfile.TemporaryDirectory(prefix="streams-") as folder:
        victim = peers.PeerProcess(Path(folder)).wait_until_ready()
        try:
            attacker = attacks.Attacker(victim)
            try:
                single = {kind: floods.flood(victim, attacker, kind) for kind in floods.STREAMS}
                many = floods.crowd(victim, attacker)
                attacker.is_served()
            finally:
                attacker.close()
        finally:
            peers.close_all([victim])
    bench.seen["streams"] = {name: asdict(flood) for name, flood in {**single, "crowd": many}.items()}
    worst, grown, taken = max(flood.grown_mib for flood in single.values()), floods.MAX_GROWN_MIB, floods.MAX_TAKEN_MIB
    for what, mib in (
        (f"memory growth of a peer under the worst of {len(single)} hostile streams", worst),
        (f"- under {len(many.taken)} at once that it must keep open", many.grown_mib),
    ):
        yield Row(what, f"{mib:.0f} MiB", f"{grown} MiB", mib <= grown)
    most = max(flood.taken_mib for flood in (*single.values(), many))
    what = "bytes taken of one stream without end, buffers on the way included"
    yield Row(what, f"{most:.1f} MiB", f"{taken} MiB", most <= taken)


def downloads(bench: Bench) -> Iterator[Row]:
    """Yield how many downloads were loaded of which a bit was flipped on the way."""
    with tempfile.TemporaryDirectory(prefix="flips-") as folder:
        flips = flip_downloads(Path(folder), bench.flips, bench.seed)
    bench.seen["flips"] = dict(vars(flips))
    loaded, unnamed = flips.loaded.total(), flips.unnamed.total()
    yield Row(
        "bit-flipped downloads loaded",
        f"{loaded} of {flips.total:,}",
        f"0 of {MIN_FLIPS:,}",
        not loaded and flips.total >= MIN_FLIPS,
    )
    kinds = ", ".join(f"{count} in {kind}" for kind, count in sorted(flips.refused.items()))
    measured = f"{unnamed} of {flips.refused.total() + unnamed:,} ({kinds})"
    yield Row("- refused without naming their sender", measured, "0", not unnamed)


def guards(bench: Bench) -> Iterator[Row]:
    """Yield how many guards a test would miss."""
    known = load_guards()
    missing = not_missed(known)
    bench.seen["not missed"] = [guard.name for guard in missing]
    yield guard_row(known, missing)


Part = Literal["corpus", "fuzz", "attackers", "streams", "downloads", "guards"]
PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "corpus": corpus,
    "fuzz": fuzz,
    "attackers": attackers,
    "streams": streams,
    "downloads": downloads,
    "guards": guards,
}
BOARD = Scoreboard(
    Path("benchmarks/results/strangers.json"), Path("benchmarks/results/strangers.md"), "STRANGERS", PARTS
)


class StrangersConfig(CommandConfig):
    """A swarm among strangers."""

    only: list[Part] = []
    """Parts of the table to measure; by default all."""
    inputs: Annotated[int, Field(ge=0)] = MIN_INPUTS
    """Mutants of sound messages that the fuzzer throws."""
    cases: Annotated[int, Field(ge=0)] = MIN_PROPERTIES
    """Property cases that the fuzzer draws."""
    executions: Annotated[int, Field(ge=0)] = MIN_EXECUTIONS
    """Executions that atheris guides by coverage; 0 does without it."""
    flips: PositiveInt = MIN_FLIPS
    """Bits to flip in downloads."""
    seed: Annotated[int, Field(ge=0)] | None = None
    """Of all that is drawn; drawn itself by default."""
    write: bool = False
    """Leave what was measured in benchmarks/results/strangers.json, and in strangers.md beside it."""
    log_level: Literal["debug", "info", "warning", "error"] = "error"
    """Least severe event to log; peers that are attacked have much to warn of."""


def main(config: StrangersConfig) -> int:
    """Measure and print; return 1 if a goal was missed."""
    torch.set_num_threads(1)
    seed = secrets.randbits(31) if config.seed is None else config.seed
    say(f"seed {seed}")
    is_reached = BOARD.run(
        config.only,
        lambda name: Bench(seed, config.inputs, config.cases, config.executions, config.flips),
        (lambda bench: {"seed": seed, "seen": bench.seen}) if config.write else None,
    )
    return 0 if is_reached else 1


if __name__ == "__main__":
    entry_point(StrangersConfig, main)
