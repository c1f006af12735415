"""The corpus: what strangers have tried, or might, against each decoder and validator that meets their bytes.

The cases are data, in `cases/`. Each must be refused with an error of ours, or with a reason in the log that names who
sent it, and within a second or two.
"""

from __future__ import annotations

import hashlib
import json
import logging
from types import SimpleNamespace

import pytest
import torch
from agreement import last_body
from forgeries import KINDS, altered, cases, mallorys_record
from pydantic import ValidationError

from spes_p2p.codecs import CODECS
from spes_p2p.codecs.format import Format, Segment
from spes_p2p.config import RunConfig
from spes_p2p.data.tokenizer import tokenizer_bytes, train_bpe
from spes_p2p.data.tokenizer_document import open_document
from spes_p2p.errors import DataError, ExchangeError, JoinError, RecordError, SpesError
from spes_p2p.swarm.averaging.partition import decode_message, slices
from spes_p2p.swarm.exchange.blocks import parse_have
from spes_p2p.swarm.exchange.protocol import GET_BYTES, HASH_BYTES, Inventory, Question, parse_get, parse_want
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.manifest import Manifest, read_manifest
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.proposal import Entered, Entry, digest_of
from spes_p2p.swarm.roster import Member
from spes_p2p.swarm.validation import RecordValidator
from spes_p2p.training.checkpoint import PeerState, decode_state, encode_state

pytestmark = pytest.mark.timeout(60)

LAST = last_body()


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    folder = tmp_path_factory.mktemp("people")
    return SimpleNamespace(**{name: Identity(folder / name) for name in ("alice", "bob", "carol", "mallory")})


# ---------------------------------------------------------------------- records


@pytest.mark.parametrize("kind", KINDS)
def test_an_honest_record_is_taken(people, kind):
    """Or the cases below would prove nothing."""
    assert RecordValidator("run", people.alice).validate(mallorys_record({"kind": kind}, people))


@cases("records")
def test_a_bad_record_is_refused_and_its_sender_named(people, caplog, case):
    record = mallorys_record(case, people)
    with caplog.at_level(logging.DEBUG, "spes_p2p.swarm.validation"):
        assert not RecordValidator("run", people.alice).validate(record)
    [line] = caplog.messages
    assert_says(line, case["says"])
    assert line.isprintable()
    strange = case.get("lies", {}).get("subkey")
    named = {None: people.mallory, "wide": people.mallory, "ALICE": people.alice}.get(strange)
    assert (named.peer_id if named else "an unknown owner") in line


def assert_says(text, says):
    assert any(words in text for words in says.split("|")), text


# ---------------------------------------------------------------------- rosters


def honest_entry(peer_id):
    member = Member(
        peer_id=peer_id,
        round=3,
        tokens=100,
        slots=(1,),
        previous=LAST.digest,
        tokens_per_second=1.0,
        ready_at=1.0,
        sync_seconds=1.0,
    )
    return json.loads(member.model_dump_json())


@cases("entries")
def test_a_bad_roster_entry_keeps_its_sender_off_the_roster(people, case):
    mallory = people.mallory.peer_id

    def is_whole(text: str) -> bool:
        try:
            member = Member.model_validate_json(text)
        except ValidationError:
            return False
        fields = {"run": "run", "round": 4, "previous": LAST.digest, "attempt": 0, "peer_id": mallory}
        return Entered(entry=Entry(**fields, member=digest_of(member)), member=member).is_whole

    honest = honest_entry(mallory)
    slots = {"change": {"slots": list(range(1000))}} if case.get("change") == {"slots": "MANY"} else {}
    assert is_whole(json.dumps(honest))
    assert not is_whole(altered(honest, case | slots, people))


# ---------------------------------------------------------------------- versions and the exchange


HONEST = Version.of("slot-1", 3, b"0" * 28)


@cases("versions")
def test_a_bad_version_is_refused(people, case):
    honest = Inventory(versions=(HONEST,)).model_dump_json().encode()
    assert Inventory.parse(honest).versions == (HONEST,)
    text = altered(HONEST.model_dump(), case, people)
    with pytest.raises(ExchangeError):
        Inventory.parse(f'{{"versions": [{text}]}}'.encode())


@cases("exchange")
def test_a_bad_message_of_the_exchange_is_refused(people, case):
    parsers = {
        "question": (Question.parse, b'{"document": "manifest"}'),
        "want": (parse_want, bytes(2 * HASH_BYTES)),
        "get": (parse_get, bytes(GET_BYTES)),
        "have": (lambda data: parse_have(data, [1, 9]), bytes.fromhex("0102ff01")),
    }
    parse, honest = parsers[case["of"]]
    parse(honest)
    text = bytes.fromhex(case["bytes"]) if "bytes" in case else None
    with pytest.raises(ExchangeError):
        parse(altered(json.loads(honest), case, people).encode() if text is None else text)


# ---------------------------------------------------------------------- tensors


@cases("parts")
def test_bytes_that_no_codec_would_write_are_refused(case):
    change = case["bytes"]
    for codec in [case["codec"]] if "codec" in case else CODECS:
        format = Format([Segment(300, codec)])
        sound = bytearray(format.encode(torch.randn(300)).numpy().tobytes())
        format.decode(bytes(sound))
        data = bytearray(bytes.fromhex(change["fill"]) * len(sound)) if "fill" in change else sound
        if "put" in change:
            put = bytes.fromhex(change["put"])
            data[change["at"] : change["at"] + len(put)] = put
        if "length" in change:
            data = (data * (change["length"] // len(data) + 1))[: change["length"]]
        [[message]] = slices(format, [1.0])
        with pytest.raises(ExchangeError):
            format.decode(bytes(data))
        with pytest.raises(ExchangeError):
            decode_message(format, message, torch.tensor(list(data), dtype=torch.uint8))


# ---------------------------------------------------------------------- documents


@pytest.fixture(scope="module")
def sound(people):
    """A sound document of each kind, and what reads it."""
    tokenizer = tokenizer_bytes(train_bpe(["some text to learn from, twice over, twice over"] * 4, 300))
    manifest = Manifest(
        run_id="run",
        founder=people.alice.peer_id,
        software="0.1",
        config=RunConfig(),
        vocab_size=300,
        tokenizer_digest="0" * 64,
        tokenizer_bytes=100,
    )
    state = PeerState("run", 3, (1,), 10, 1000, {"seed": 1}, (HONEST,))
    return {"manifest": manifest.encode(), "tokenizer": tokenizer, "checkpoint": encode_state(state, "0" * 64)}


@cases("documents")
def test_a_bad_document_is_refused(people, sound, tmp_path, case):
    read = {
        "manifest": lambda data: read_manifest(lambda name: data),
        "tokenizer": lambda data: open_document(data, "the tokenizer"),
        "checkpoint": lambda data: decode_state(data, "run"),
    }[case["what"]]
    honest = json.loads(sound[case["what"]])
    read(sound[case["what"]])
    if "redigested" in case or "undigested" in case:
        content = {key: value for key, value in (honest | case.get("redigested", {})).items() if key != "digest"}
        content.pop(case.get("undigested"), None)
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        text = json.dumps({"digest": digest, **content})
    else:
        text = altered(honest, case, people)
    with pytest.raises((SpesError, ValueError)) as raised:
        read(text.encode())
    if case["what"] == "manifest":
        assert str(raised.value).isprintable() and len(str(raised.value)) < 400
        assert_says(str(raised.value), case.get("says", ""))
    # What reads a checkpoint's folder takes these three for damage; strangers' documents raise what says what to do.
    assert isinstance(
        raised.value, (ValueError, RecordError, JoinError) if case["what"] == "checkpoint" else (DataError, JoinError)
    )
