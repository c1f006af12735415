"""The fuzzers, for some seconds: `python -m benchmarks.fuzz` goes on for longer."""

import importlib
import importlib.util
import os
import platform
import random
import sys

import pytest

from benchmarks.fuzz import __main__ as command
from benchmarks.fuzz.__main__ import FuzzConfig, draw, throw
from benchmarks.fuzz.decoder import Decoder
from benchmarks.fuzz.decoders import decoders
from benchmarks.fuzz.guided import guide
from benchmarks.fuzz.inputs import encoded

pytestmark = pytest.mark.timeout(300)
# Where there is a wheel of it, the tests' environment has it, and its absence is a failure.
guided = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="atheris comes for Linux on x86-64 alone"
)
PLANTED = """
import os, signal
from benchmarks.fuzz.decoder import Decoder

def careless(data):
    if data[:4] == b"spes":
        raise KeyError("a word that no mutant of the seed holds")

def deadly(data):
    if b"[[[[[" in data:
        os.kill(os.getpid(), signal.SIGSEGV)

def decoders(folder):
    return [Decoder(f.__name__, f, (), [{"round": 3}]) for f in (careless, deadly)]
"""


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    return decoders(tmp_path_factory.mktemp("fuzz"))


def test_what_the_fuzzers_begin_with_is_sound(targets):
    """Or they would only ever see the first check of each decoder."""
    for target in targets:
        for seed in target.seeds:
            target.decode(encoded(seed, is_packed=target.is_packed))


def test_no_decoder_raises_what_nobody_reckons_with(targets, seed):
    assert not throw(targets, 600, random.Random(seed))  # `python -m benchmarks.fuzz` goes on in the full lane
    assert not draw(targets, 48, seed)


def test_a_decoder_that_does_is_found_and_named():
    def careless(data):
        return len(data) < 40 or data.decode()

    decoder = Decoder("careless", careless, (), [{"name": "value", "round": 3}])
    assert {name for name, _ in throw([decoder], 1000, random.Random(1))} == {"careless"}
    [(name, error)] = draw([decoder], 1000, 1)
    assert name == "careless" and "UnicodeDecodeError" in error


@guided
@pytest.mark.full
def test_guided_executions_find_no_untyped_error_either(targets, seed):
    outcomes = guide(100 * len(targets), seed)
    assert [outcome.name for outcome in outcomes] == [target.name for target in targets]
    assert not any(outcome.untyped for outcome in outcomes), outcomes
    assert all(outcome.executions >= 100 for outcome in outcomes)


@guided
@pytest.mark.full
def test_coverage_leads_to_what_no_mutant_hits_and_a_death_is_an_error_too(tmp_path, monkeypatch, seed):
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    careless = importlib.import_module("planted").decoders(tmp_path)[0]
    assert not throw([careless], 4000, random.Random(seed))
    word, death = guide(8000, seed, "planted")
    assert list(word.untyped) == ["KeyError('a word that no mutant of the seed holds')"] and word.executions == 4000
    [error] = death.untyped
    assert "ended its process" in error and "[[[[[" in error and death.executions < 4000


def test_without_atheris_the_command_says_so_and_does_the_rest(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command.main(FuzzConfig(inputs=32, cases=16, executions=16)) == 0
    said = capsys.readouterr().out
    assert "pip install atheris" in said and "32 mutants" in said and "16 property cases" in said
