"""Give random structures to every decoder of untrusted bytes, and print each unexpected error.

    python -m benchmarks.fuzz [--inputs 1000000] [--cases 100000] [--executions 200000] [--seed 0]

`inputs` are mutants of sound messages, `cases` are drawn by Hypothesis, which shrinks what it finds, `executions` are
guided by atheris to what they have not reached yet.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from pydantic import Field

from benchmarks.fuzz.decoder import Decoder
from benchmarks.fuzz.decoders import decoders
from benchmarks.fuzz.guided import guide, untyped
from benchmarks.fuzz.inputs import encoded, mutant
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, LogLevel
from spes_p2p.errors import ConfigError
from spes_p2p.presentation import say


class FuzzConfig(CommandConfig):
    """Fuzzers of everything that decodes a stranger's bytes."""

    inputs: Annotated[int, Field(ge=0)] = 1_000_000
    """Mutants, over all decoders."""
    cases: Annotated[int, Field(ge=0)] = 100_000
    """Property cases, over all decoders."""
    executions: Annotated[int, Field(ge=0)] = 200_000
    """Coverage-guided executions, over all decoders; 0 does without atheris."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the draws: the same seed gives the same inputs."""
    log_level: LogLevel = "warning"


def main(config: FuzzConfig) -> int:
    """Fuzz, and say what came of it; return 1 if an error was of no type that a decoder may raise."""
    with tempfile.TemporaryDirectory() as folder:
        targets = decoders(Path(folder))
        began = time.monotonic()
        found = throw(targets, config.inputs, random.Random(config.seed))
        threw = time.monotonic()
        say(f"{config.inputs} mutants in {threw - began:.0f} s, {found.total()} untyped errors")
        found += draw(targets, config.cases, config.seed)
        say(f"{config.cases} property cases in {time.monotonic() - threw:.0f} s")
    try:
        guided = guide(config.executions, config.seed)
    except ConfigError as missing:
        say(f"nothing guided: {missing}")
    else:
        found += untyped(guided)
        for one in guided:
            say(f"{one.name}: {one.executions} guided executions in {one.seconds:.0f} s")
    for (name, error), count in found.most_common():
        say(f"{name}: {error}, {count} times")
    say(f"{found.total()} untyped errors of {len(targets)} decoders")
    return int(bool(found))


def throw(targets: list[Decoder], count: int, draw: random.Random) -> Counter[tuple[str, str]]:
    """Decode mutants; return how often which decoder raised what it should not have."""
    found: Counter[tuple[str, str]] = Counter()
    for number in range(count):
        target = targets[number % len(targets)]
        data = mutant(draw.choice(target.seeds), is_packed=target.is_packed, draw=draw)
        error = target.is_refused_properly(data)
        if error is not None:
            found[target.name, repr(error)[:200]] += 1
    return found


def draw(targets: list[Decoder], count: int, seed: int) -> Counter[tuple[str, str]]:
    """Decode what Hypothesis draws; return as `throw` does, with the least input that fails."""
    found: Counter[tuple[str, str]] = Counter()
    for target in targets:
        examples = count // len(targets)
        if examples:
            _draw_one(target, examples, seed, found)
    return found


def _draw_one(target: Decoder, examples: int, seed: int, found: Counter[tuple[str, str]]) -> None:
    @hypothesis_seed(seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(_contents(target))
    def holds(data: bytes) -> None:
        error = target.is_refused_properly(data)
        assert error is None, f"{error!r} of {data[:200]!r}"

    try:
        holds()
    except AssertionError as error:
        found[target.name, str(error)[:400]] += 1


def _contents(target: Decoder) -> st.SearchStrategy[bytes]:
    numbers = st.integers(-(2**63), 2**64 - 1) | st.floats()
    leaves: st.SearchStrategy[Any] = st.none() | st.booleans() | numbers | st.text(max_size=40)
    leaves = leaves | st.binary(max_size=40) if target.is_packed else leaves
    anything: st.SearchStrategy[Any] = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    )
    seed = target.seeds[0]
    if isinstance(seed, dict):
        fields = {key: st.just(value) | anything for key, value in seed.items()}
        anything = anything | st.fixed_dictionaries(fields)
    elif isinstance(seed, list):
        anything = anything | st.tuples(*(st.just(value) | anything for value in seed)).map(list)
    draws = st.integers(0, 2**32).map(random.Random)
    mutants = st.builds(mutant, st.just(seed), is_packed=st.just(target.is_packed), draw=draws)
    plain = anything.map(lambda content: encoded(content, is_packed=target.is_packed))
    return st.binary(max_size=200) | plain | mutants


if __name__ == "__main__":
    entry_point(FuzzConfig, main)
