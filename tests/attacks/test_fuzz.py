"""The fuzzers, for some seconds: `python -m benchmarks.fuzz` goes on for longer."""

import random

import pytest

from benchmarks.fuzz.__main__ import draw, throw
from benchmarks.fuzz.decoders import Decoder, decoders
from benchmarks.fuzz.inputs import mutant

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    return decoders(tmp_path_factory.mktemp("fuzz"))


def test_what_the_fuzzers_begin_with_is_sound(targets):
    """Or they would only ever see the first check of each decoder."""

    class Still(random.Random):
        def choice(self, seq):
            return 0

        def random(self):
            return 0.0

    for target in targets:
        for seed in target.seeds:
            target.decode(mutant(seed, is_packed=target.is_packed, draw=Still()))


def test_no_decoder_raises_what_nobody_reckons_with(targets, seed):
    assert not throw(targets, 2000, random.Random(seed))
    assert not draw(targets, 160, seed)


def test_a_decoder_that_does_is_found_and_named():
    def careless(data):
        return len(data) < 40 or data.decode()

    decoder = Decoder("careless", careless, (), [{"name": "value", "round": 3}])
    assert {name for name, _ in throw([decoder], 1000, random.Random(1))} == {"careless"}
    [(name, error)] = draw([decoder], 1000, 1)
    assert name == "careless" and "UnicodeDecodeError" in error
