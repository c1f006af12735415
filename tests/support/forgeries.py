"""Cases of the attack corpus, and the records that Mallory makes of them."""

from __future__ import annotations

import base64
import dataclasses
import json
import time
from pathlib import Path

import msgpack
import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord

from spes_p2p.swarm.records import MAX_RECORD_BYTES, RECORD_TYPES, Record
from spes_p2p.swarm.validation import RecordValidator

KINDS = {kind.kind: kind for kind in RECORD_TYPES}


def cases(name):
    """Return the cases of a file, as parameters."""
    path = Path(__file__).parents[1] / "attacks" / "cases" / f"{name}.yaml"
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    return pytest.mark.parametrize("case", found, ids=[case["name"] for case in found])


def spelled_out(value, people):
    """Return a case's value with its capital words put into full."""
    words = {
        "ALICE": people.alice.peer_id,
        "LONG": "Q" * 1000,
        "LONG4": "Q" * 4096,
        "/LONG": "/" + "Q" * 1000,
        "BLANKS": " " * 5000,
        "DIGITS": "9" * 1000,
        "BRACKETS": "[" * 1000,
        "BRACES": '{"a":' * 500,
        "COMMENTED": people.mallory.public_key.decode() + " comment",
    }
    if isinstance(value, dict):
        return {key: spelled_out(item, people) for key, item in value.items()}
    if isinstance(value, list):
        return [spelled_out(item, people) for item in value]
    return words.get(value, value) if isinstance(value, str) else value


def altered(honest, case, people):
    """Return the text of an honest document as a case has it."""
    if "text" in case:
        return str(spelled_out(case["text"], people))
    document = honest | spelled_out(case.get("change", {}), people)
    document.pop(case.get("drop"), None)
    text = json.dumps(document)
    return text[: -case["cut"]] if "cut" in case else text


def honest_record(kind, peer_id) -> Record:
    fields = {
        "manifest": {"digest": "0" * 64},
        "claims": {"state": "active", "slots": (1, 2), "max_slots": 4, "since": 1.0},
        "progress": {"round": 3, "ends_at": 1e9},
        "metrics": {
            **dict.fromkeys(["round", "step", "tokens", "total_tokens", "num_members", "committed", "dropped"], 3),
            **dict.fromkeys(["train", "matchmaking", "averaging", "exchange", "other"], 0),
        },
        "contacts": {"addresses": ("/ip4/127.0.0.1/tcp/1",), "software": "0.1"},
    }[kind]
    if kind == "metrics":
        times = {f"{name}_seconds": 1.0 for name in ("train", "matchmaking", "averaging", "exchange", "other")}
        names = ("train", "matchmaking", "averaging", "exchange", "other")
        fields = {name: value for name, value in fields.items() if name not in names} | times
        fields |= {"loss": 1.0, "tokens_per_second": 1.0, "slots": (), "shared_digest": "0" * 16}
        fields |= {"bytes_in": 1, "bytes_out": 1}
    return KINDS[kind](peer_id=peer_id, **fields)


def another_key(how):
    """Return a public key that is not as everybody's."""
    private = {
        "elliptic": lambda: ec.generate_private_key(ec.SECP256R1()),
        "short": lambda: rsa.generate_private_key(65537, 1024),
        "cubic": lambda: rsa.generate_private_key(3, 2048),
    }[how]()
    return private.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def subkey_of(how, people, own):
    """Return a record's subkey, packed."""
    around = b"[owner:", b"]"
    made = {
        "": lambda: msgpack.packb(own),
        "ALICE": lambda: msgpack.packb(RecordValidator("run", people.alice).subkey),
        "none": lambda: msgpack.packb(None),
        "empty": lambda: b"",
        "text": lambda: msgpack.packb(own.decode()),
        "nested": lambda: b"\x91" * 600 + b"\xc0",
        "long": lambda: msgpack.packb(own + b" " * 2048),
        "hollow": lambda: msgpack.packb(around[0] + b"ssh-rsa AAAA" + around[1]),
        **{
            kind: lambda kind=kind: msgpack.packb(around[0] + another_key(kind) + around[1])
            for kind in ("elliptic", "short", "cubic")
        },
        "commented": lambda: msgpack.packb(own[:-1] + b" comment" + around[1]),
        "wide": lambda: b"\xc6" + len(own).to_bytes(4) + own,
    }
    return made[how]()


def mallorys_record(case, people):
    """Return a record as Mallory would have a node keep it."""
    validator, lies = RecordValidator("run", people.mallory), case.get("lies", {})
    record = honest_record(case["kind"], people.mallory.peer_id)
    text = altered(json.loads(record.encode()), case, people)
    text = record.encode().decode() + " " * MAX_RECORD_BYTES if text == "TOO_LONG" else text
    value, key = text.encode("utf-8", "surrogatepass"), record.key("run")
    bucket = key[-1]
    if "key" in lies:
        key = lies["key"].replace("BUCKET", bucket).replace("OTHER", "0" if bucket != "0" else "1")
    raw = DHTRecord(
        key=DHTID.generate(source=key).to_bytes(),
        subkey=subkey_of(lies.get("subkey", ""), people, validator.subkey),
        value=msgpack.packb(value),
        expiration_time=time.time() + lies.get("lifetime", 60.0),
    )
    signature = validator._signer._private_key.sign(validator._signer._serialize_record(raw))
    tail = b"[signature:" + signature + b"]"
    tails = {
        "none": b"",
        "twice": 2 * tail,
        "zeros": b"[signature:" + base64.b64encode(bytes(256)) + b"]",
        "of another lifetime": tail,
    }
    signed = dataclasses.replace(raw, value=raw.value + tails.get(lies.get("signature"), tail))
    if lies.get("signature") == "of another lifetime":
        signed = dataclasses.replace(signed, expiration_time=signed.expiration_time + 1)
    return signed
