"""What a newcomer makes of a manifest that it cannot follow."""

import json

import pytest

from spes_p2p.codecs.vectors import digest
from spes_p2p.config import RunConfig
from spes_p2p.errors import ExchangeError, JoinError
from spes_p2p.swarm.manifest import Manifest, check_founder, read_manifest
from spes_p2p.swarm.p2p.identity import hashed_peer_id


def document(**codecs):
    """A manifest as it travels; `codecs` need not be any that this software knows."""
    manifest = Manifest(
        run_id="run",
        founder=hashed_peer_id(b"founder"),
        software="0",
        config=RunConfig(),
        vocab_size=64,
        tokenizer_digest=digest(b"tokenizer"),
    )
    fields = json.loads(manifest.encode())
    fields["config"]["codecs"] |= codecs
    return json.dumps(fields).encode()


def test_a_manifest_is_read_as_its_founder_wrote_it():
    config = read_manifest(lambda name: document(shared="int4", slots="bf16", moments="int8")).config
    assert (config.codecs.shared, config.codecs.slots, config.codecs.moments) == ("int4", "bf16", "int8")


@pytest.mark.parametrize("group", ["shared", "slots", "moments"])
def test_a_codec_that_this_software_does_not_know_is_an_error_at_joining(group):
    with pytest.raises(JoinError, match=rf"config\.codecs\.{group}.*update spes_p2p"):
        read_manifest(lambda name: document(**{group: "int3"}))


def test_without_a_manifest_there_is_nothing_to_resume():
    def load(name):
        raise ExchangeError(f"this peer has no version of {name}")

    with pytest.raises(JoinError, match="nothing to resume"):
        read_manifest(load)


def test_a_run_of_another_founder_than_the_one_named_is_refused():
    manifest = read_manifest(lambda name: document())
    check_founder(manifest, None)
    check_founder(manifest, manifest.founder)
    with pytest.raises(JoinError, match=rf"founded by {manifest.founder}, not by .*--run-id"):
        check_founder(manifest, hashed_peer_id(b"somebody else"))
