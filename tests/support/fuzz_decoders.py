"""What is fuzzed: every decoder that meets a stranger's bytes, and something sound for each to begin with."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import msgpack
from fuzz import Decoder
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord

from spes_p2p.config import DataConfig, RunConfig
from spes_p2p.config.data import MAX_PROBE_CHARACTERS
from spes_p2p.data.conversations import probe_records
from spes_p2p.errors import SpesError
from spes_p2p.swarm.averaging.averaging import Greeting
from spes_p2p.swarm.exchange.protocol import Inventory, Question
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.hivemind_fixes.serializer import ShallowSerializer
from spes_p2p.swarm.manifest import Manifest, read_manifest
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.introductions import _Told
from spes_p2p.swarm.records import Claim, Contact, ManifestRecord, Metrics, Progress, Record
from spes_p2p.swarm.roster import Member
from spes_p2p.swarm.validation import RecordValidator
from spes_p2p.training.checkpoint import PeerState, decode_state, encode_state

RUN = "run"


def records(peer_id: str) -> list[Record]:
    """Return a sound record of each kind."""
    counts = dict.fromkeys(["step", "tokens", "total_tokens", "num_members", "committed", "dropped"], 3)
    seconds = dict.fromkeys([f"{n}_seconds" for n in ("train", "matchmaking", "averaging", "exchange", "other")], 1.0)
    other: dict[str, Any] = {"loss": 1.0, "tokens_per_second": 1.0, "slots": (1,), "shared_digest": "0" * 16}
    traffic = {"bytes_in": 1, "bytes_out": 1, "round": 3}
    return [
        ManifestRecord(peer_id=peer_id, digest="0" * 64),
        Claim(peer_id=peer_id, state="active", slots=(1, 2), max_slots=4, since=1.0),
        Progress(peer_id=peer_id, round=3, ends_at=1e9),
        Metrics.model_validate({"peer_id": peer_id, **counts, **seconds, **other, **traffic}),
        Contact(peer_id=peer_id, addresses=("/ip4/127.0.0.1/tcp/1",), software="0.1"),
    ]


def decoders(folder: Path) -> list[Decoder]:
    """Return every decoder.

    Args:
        folder: Takes the key with which seeds are signed.
    """
    me = Identity(folder / "key")
    version = Version.of("slot-1", 3, b"0" * 28)
    member = Member(
        peer_id=me.peer_id,
        round=3,
        tokens=100,
        slots=(1,),
        previous="5" * 64,
        starts={"slot-1": (2, "5" * 64)},
        tokens_per_second=1.0,
        ready_at=1.0,
        sync_seconds=1.0,
        uplink_mbit=10.0,
    )
    manifest = Manifest(
        run_id=RUN,
        founder=me.peer_id,
        software="0",
        config=RunConfig(),
        vocab_size=300,
        tokenizer_digest="0" * 64,
        tokenizer_bytes=100,
    )
    state = encode_state(PeerState(RUN, 3, (1,), 10, 1000, {"seed": 1}, (version,)), "0" * 64)
    entry = member.model_dump_json()
    refusals = (SpesError,)
    found = [
        Decoder(f"record {record.kind}", type(record).decode, refusals, [_json(record)])
        for record in records(me.peer_id)
    ]
    return [
        *found,
        Decoder("roster entry", Member.model_validate_json, (ValueError,), [json.loads(entry)]),
        Decoder("inventory", Inventory.parse, refusals, [_json(Inventory(versions=(version,)))]),
        Decoder("question", Question.parse, refusals, [{"document": "manifest"}]),
        Decoder("introduction", _Told.parse, refusals, [{"peer": me.peer_id, "address": "/ip4/1.2.3.4/udp/5/quic-v1"}]),
        Decoder("manifest", lambda data: read_manifest(lambda _: data), refusals, [json.loads(manifest.encode())]),
        Decoder("checkpoint", lambda data: decode_state(data, RUN), (SpesError, ValueError), [json.loads(state)]),
        Decoder("public probe", _read_probe, refusals, [{"messages": [{"role": "assistant", "content": "x"}]}]),
        Decoder("greeting", Greeting.parse, refusals, [{"meeting": "0" * 64, "group": "slot-1", "lane": 3}]),
        Decoder("DHT message", ShallowSerializer.loads, refusals, [[b"subkey", [1.5, {"a": None}]]], is_packed=True),
        Decoder("DHT value", _Storing(me), (), [records(me.peer_id)[1].encode()], is_packed=True),
    ]


def _json(model: Any) -> Any:
    return json.loads(model.model_dump_json())


def _read_probe(data: bytes) -> None:
    """Read a manifest's conversations, each on a line."""
    probe_records(DataConfig(probe=data.decode("utf-8", "replace")[:MAX_PROBE_CHARACTERS]))


class _Storing:
    """Has a node validate a record whose value is signed: what a stranger's own key lets pass to the parser."""

    def __init__(self, me: Identity) -> None:
        self._validator = RecordValidator(RUN, me)
        self._key = DHTID.generate(source=records(me.peer_id)[1].key(RUN)).to_bytes()
        self._subkey = msgpack.packb(self._validator.subkey)
        self._complaints = _Complaints()
        log = logging.getLogger("spes_p2p.swarm.validation")
        log.setLevel(logging.DEBUG)
        log.propagate = False
        log.handlers = [self._complaints]

    def __call__(self, data: bytes) -> None:
        # Its first byte says where a stranger puts the rest: into the value, or in place of the subkey.
        is_value = not data or data[0] % 2 == 0
        raw = DHTRecord(self._key, self._subkey if is_value else data[:900], data[:1000], time.time() + 60)
        self._complaints.untyped = None
        self._validator.validate(
            DHTRecord(raw.key, raw.subkey, self._validator.sign_value(raw), raw.expiration_time) if is_value else raw
        )
        if self._complaints.untyped is not None:
            raise self._complaints.untyped


class _Complaints(logging.Handler):
    """Keeps the error with which the validator did not reckon."""

    untyped: Exception | None = None

    def emit(self, record: logging.LogRecord) -> None:
        error = record.args[1] if isinstance(record.args, tuple) else None
        if isinstance(error, Exception) and not isinstance(error, SpesError):
            self.untyped = error
