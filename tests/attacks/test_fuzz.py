"""The fuzzers: some seconds in the commit lane, some minutes in the full one."""

import random

import pytest
from fuzz import Decoder, draw, encoded, throw
from fuzz_decoders import decoders

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    return decoders(tmp_path_factory.mktemp("fuzz"))


def test_what_the_fuzzers_begin_with_is_sound(targets):
    """Or they would only ever see the first check of each decoder."""
    for target in targets:
        for seed in target.seeds:
            target.decode(encoded(seed, is_packed=target.is_packed))


def test_no_decoder_raises_what_nobody_reckons_with(targets, seed):
    assert not throw(targets, 600, random.Random(seed))
    assert not draw(targets, 48, seed)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_none_does_so_in_a_million_mutants(targets, seed):
    assert not throw(targets, 1_000_000, random.Random(seed))
    assert not draw(targets, 100_000, seed)


def test_a_decoder_that_does_is_found_and_named():
    def careless(data):
        return len(data) < 40 or data.decode()

    decoder = Decoder("careless", careless, (), [{"name": "value", "round": 3}])
    assert {name for name, _ in throw([decoder], 1000, random.Random(1))} == {"careless"}
    [(name, error)] = draw([decoder], 1000, 1)
    assert name == "careless" and "UnicodeDecodeError" in error
