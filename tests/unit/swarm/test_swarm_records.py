"""Records: what the validator of every node lets through, and what it does not."""

import dataclasses
import math
import time

import msgpack
import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord

from spes_p2p.errors import ConfigError, RecordError
from spes_p2p.swarm.p2p.identity import Identity, is_signed_by, peer_id_of
from spes_p2p.swarm.records import MAX_LIFETIME_SECONDS, MAX_RECORD_BYTES, PROTOCOL, Claim, Metrics, Progress
from spes_p2p.swarm.validation import RecordValidator


@pytest.fixture(scope="module")
def identities(tmp_path_factory):
    folder = tmp_path_factory.mktemp("identities")
    return Identity(folder / "alice"), Identity(folder / "mallory")


def signed(identity, record, *, run_id="run", lifetime=60.0, value=None):
    """Return a record as a node would store it."""
    validator = RecordValidator(run_id, identity)
    raw = DHTRecord(
        key=DHTID.generate(source=record.key(run_id)).to_bytes(),
        subkey=msgpack.packb(validator.subkey),
        value=msgpack.packb(record.encode() if value is None else value),
        expiration_time=time.time() + lifetime,
    )
    return dataclasses.replace(raw, value=validator.sign_value(raw))


def claim_of(identity, **changes):
    return Claim(
        **{"peer_id": identity.peer_id, "state": "active", "slots": (1, 2), "max_slots": 4, "since": 1.0} | changes
    )


def accepts(identity, record, run_id="run"):
    return RecordValidator(run_id, identity).validate(record)


def test_a_peers_own_record_is_accepted_by_others(identities):
    alice, mallory = identities
    assert accepts(mallory, signed(alice, claim_of(alice)))


def test_a_record_that_was_valid_is_not_checked_again_unless_anything_has_changed(identities, monkeypatch):
    """A thousand claims are read every few seconds, and each check verifies a signature."""
    alice, _ = identities
    validator, checked = RecordValidator("run", alice), []
    check = RecordValidator._check
    monkeypatch.setattr(RecordValidator, "_check", lambda self, record: (checked.append(record), check(self, record)))
    record = signed(alice, claim_of(alice))
    assert validator.validate(record) and validator.validate(dataclasses.replace(record)) and checked == [record]
    for name in ("key", "subkey", "value"):
        wrong = dataclasses.replace(record, **{name: getattr(record, name)[:-1] + b"?"})
        assert not validator.validate(wrong) and not validator.validate(wrong) and checked[-2:] == [wrong, wrong]
    assert not validator.validate(dataclasses.replace(record, expiration_time=record.expiration_time + 1))


def test_the_valid_records_that_are_remembered_are_bounded(identities, monkeypatch):
    alice, _ = identities
    monkeypatch.setattr("spes_p2p.swarm.validation.MAX_VALID", 3)
    validator = RecordValidator("run", alice)
    records = [signed(alice, claim_of(alice, since=float(since))) for since in range(5)]
    assert all(map(validator.validate, records))
    assert list(validator._valid) == records[-3:]


def test_a_record_about_another_peer_is_refused(identities):
    alice, mallory = identities
    assert not accepts(alice, signed(mallory, claim_of(alice)))


def test_a_changed_value_is_refused(identities):
    alice, _ = identities
    record = signed(alice, claim_of(alice))
    changed = record.value.replace(b'"max_slots":4', b'"max_slots":5')
    assert changed != record.value, "to what would pass if she had signed it"
    assert not accepts(alice, dataclasses.replace(record, value=changed))


def test_an_unsigned_record_is_refused(identities):
    alice, _ = identities
    validator = RecordValidator("run", alice)
    record = signed(alice, claim_of(alice))
    assert not accepts(alice, dataclasses.replace(record, value=validator.strip_value(record)))
    assert not accepts(alice, dataclasses.replace(record, subkey=msgpack.packb(b"")))
    assert not accepts(alice, dataclasses.replace(record, subkey=msgpack.packb("plain")))


def test_a_signature_does_not_carry_over_to_another_lifetime_or_key(identities):
    alice, _ = identities
    record = signed(alice, claim_of(alice))
    assert not accepts(alice, dataclasses.replace(record, expiration_time=record.expiration_time + 1))
    other = DHTID.generate(source=Progress.keys("run")[0]).to_bytes()
    assert not accepts(alice, dataclasses.replace(record, key=other))


@pytest.mark.parametrize("lifetime", [math.inf, math.nan, 1e300, MAX_LIFETIME_SECONDS + 60])
def test_an_overlong_lifetime_is_refused(identities, lifetime):
    alice, _ = identities
    assert not accepts(alice, signed(alice, claim_of(alice), lifetime=lifetime))


def test_another_runs_record_is_refused(identities):
    alice, _ = identities
    assert not accepts(alice, signed(alice, claim_of(alice), run_id="elsewhere"))


@pytest.mark.parametrize(
    "value",
    [b"", b"{}", b"null", b"[" * 900, b'{"kind":1}', b"\xff" * 64, b"x" * 2000, 7, {"a": 1}, [b"x"] * 10],
    ids=repr,
)
def test_garbage_is_refused_without_an_exception(identities, value):
    alice, _ = identities
    assert not accepts(alice, signed(alice, claim_of(alice), value=value))


@pytest.mark.parametrize("error", [TypeError, AttributeError, RecursionError, KeyError])
def test_a_record_that_breaks_the_validator_is_refused_like_any_other(identities, monkeypatch, error):
    """None is known to; a parser's next version may not know all that strangers do."""
    alice, _ = identities

    def broken(data):
        raise error("a bug")

    monkeypatch.setattr(Claim, "decode", broken)
    assert not accepts(alice, signed(alice, claim_of(alice)))


@pytest.mark.parametrize("key", [Claim, Progress, Metrics])
def test_keys_spread_over_buckets_and_carry_their_version(identities, key):
    assert len(set(key.keys("run"))) == len(key.keys("run")) > 1
    assert all(f".{PROTOCOL}." in name for name in key.keys("run"))


@pytest.mark.parametrize("subkey", [None, b"peer", b""], ids=repr)
def test_a_record_without_an_owner_is_refused(identities, subkey):
    """A plain value that lives longer would take the place of everybody's."""
    alice, _ = identities
    fine = signed(alice, claim_of(alice))
    unsigned = RecordValidator("run", alice).strip_value(fine)
    assert not accepts(alice, dataclasses.replace(fine, subkey=msgpack.packb(subkey), value=unsigned))


def test_slots_must_ascend_and_fit(identities):
    alice, _ = identities
    for slots in [(2, 1), (1, 1), (0, 1, 2, 3, 4)]:
        with pytest.raises(ValueError, match="slots"):
            claim_of(alice, slots=slots)


def test_a_claim_of_many_slots_still_fits_a_record(identities):
    alice, _ = identities
    assert len(claim_of(alice, slots=tuple(range(128)), max_slots=128).encode()) <= MAX_RECORD_BYTES


def test_an_oversized_record_is_not_sent():
    metrics = Metrics.model_construct(peer_id="Q" * 46, loss=1.0, slots=tuple(range(1000, 1400)))
    with pytest.raises(RecordError, match="exceeds"):
        metrics.encode()


def test_an_identity_is_private_stable_and_names_its_peer(tmp_path):
    first = Identity(tmp_path / "deep" / "key")
    again = Identity(tmp_path / "deep" / "key")
    assert (first.is_new, again.is_new) == (True, False)
    assert first.peer_id == again.peer_id == peer_id_of(first.public_key)
    assert (tmp_path / "deep" / "key").stat().st_mode & 0o777 == 0o600


def test_an_identity_that_others_can_read_is_refused(tmp_path):
    Identity(tmp_path / "key")
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Identity(tmp_path / "key")


def test_an_identity_is_not_written_to_where_a_link_leads(tmp_path):
    (tmp_path / "key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot write identity"):
        Identity(tmp_path / "key")
    assert not (tmp_path / "elsewhere").exists()


def test_a_damaged_identity_is_refused(tmp_path):
    (tmp_path / "key").write_bytes(b"not a key")
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(ConfigError, match="not a readable identity"):
        Identity(tmp_path / "key")


def test_a_signature_is_bound_to_peer_and_data(identities):
    alice, mallory = identities
    signature = alice.sign(b"data")
    assert is_signed_by(alice.peer_id, alice.public_key, b"data", signature)
    assert not is_signed_by(alice.peer_id, alice.public_key, b"other", signature)
    assert not is_signed_by(alice.peer_id, mallory.public_key, b"data", signature)
    assert not is_signed_by(alice.peer_id, mallory.public_key, b"data", mallory.sign(b"data")), "by another's key"
    assert not is_signed_by(alice.peer_id, b"junk", b"data", b"junk")
