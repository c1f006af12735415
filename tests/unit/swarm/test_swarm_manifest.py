"""What a newcomer makes of a manifest that it cannot follow."""

import contextlib
import json
import random

import pytest

from spes_p2p.codecs.vectors import digest
from spes_p2p.config import RunConfig
from spes_p2p.errors import ExchangeError, JoinError
from spes_p2p.swarm.manifest import Manifest, check_founder, read_manifest, signed_manifest
from spes_p2p.swarm.p2p.identity import Identity, hashed_peer_id


def document(**codecs):
    """A manifest as it travels; `codecs` need not be any that this software knows."""
    manifest = Manifest(
        run_id="run",
        founder=hashed_peer_id(b"founder"),
        software="0",
        config=RunConfig(),
        vocab_size=64,
        tokenizer_digest=digest(b"tokenizer"),
        tokenizer_bytes=100,
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


def test_a_manifest_counts_only_as_its_founder_has_signed_it_for_the_run(tmp_path):
    founder, mallory = Identity(tmp_path / "founder"), Identity(tmp_path / "mallory")
    manifest = Manifest.model_validate_json(document()).model_copy(update={"founder": founder.peer_id})
    signed = manifest.sign(founder)
    assert signed_manifest(signed.encode(), "run") == signed and signed.digest == digest(signed.signed_part())
    theirs = signed.model_copy(update={"public_key": mallory.public_key.decode()})
    changed = [
        signed.model_copy(update=change) for change in ({"founded_at": 8}, {"vocab_size": 65}, {"signature": ""})
    ]
    for false in (manifest, theirs, manifest.sign(mallory), *changed):
        with pytest.raises(JoinError, match=f"not signed by its founder {founder.peer_id}"):
            signed_manifest(false.encode(), "run")
    with pytest.raises(JoinError, match="belongs to run 'run'"):
        signed_manifest(signed.encode(), "elsewhere")


def test_a_bit_flipped_on_the_way_makes_a_manifest_another_one_or_none(tmp_path, seed):
    founder = Identity(tmp_path / "founder")
    manifest = Manifest.model_validate_json(document()).model_copy(update={"founder": founder.peer_id})
    sound, draw = manifest.sign(founder), random.Random(seed)
    for _ in range(100):
        data, place = bytearray(sound.encode()), draw.randrange(8 * len(sound.encode()))
        data[place // 8] ^= 1 << place % 8
        with contextlib.suppress(JoinError):  # the last bits of base64 mean nothing
            assert signed_manifest(bytes(data), "run").digest == sound.digest
