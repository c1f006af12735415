"""A founder may choose any setting within its bounds: it is refused by name, or everything that uses it works."""

import asyncio
import datetime
import math
import threading
from math import prod
from typing import Any, get_args

import msgpack
import pytest
import uvloop
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils.timed_storage import get_dht_time
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from spes_p2p.config import (
    FAMILIES,
    AdapterConfig,
    AdapterTarget,
    Frozen,
    MachineConfig,
    ModelConfig,
    RopeConfig,
    RunConfig,
    StartConfig,
    check_machine,
)
from spes_p2p.errors import ConfigError
from spes_p2p.model.adapted import outline_adapted
from spes_p2p.model.build import outline
from spes_p2p.optim.outer import merge_alpha
from spes_p2p.optim.schedule import rate_of_step
from spes_p2p.planner.memory import Setup, disk_bytes, peer_memory, shortage, slots_that_fit
from spes_p2p.planner.size import model_size, run_size
from spes_p2p.planner.traffic import round_traffic, training_seconds, transfer_seconds
from spes_p2p.swarm.clock import AdaptiveTimeout, clamp_tokens, round_end
from spes_p2p.swarm.exchange.protocol import MAX_DOCUMENT_BYTES
from spes_p2p.swarm.manifest import Manifest, read_manifest
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.records import Claim, Metrics, Progress
from spes_p2p.swarm.roster import Member
from spes_p2p.swarm.validation import RecordValidator

FAR_OUT = (-1, 2**63, 2**200, 1e300, -1e300, 1e-300, math.inf, math.nan)


def sections(cls: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return the sections of a run's settings by name, and the run itself as ""."""
    inner = {name: field.annotation for name, field in cls.model_fields.items()}
    return {"": cls} | {n: a for n, a in inner.items() if isinstance(a, type) and issubclass(a, Frozen)}


def value_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a setting's value where it has one."""
    return next(leaf for leaf in schema.get("anyOf", [schema]) if leaf.get("type") != "null")


def ranges(parts: dict[str, type[BaseModel]]) -> dict[tuple[str, str], st.SearchStrategy[Any]]:
    """Return what draws each setting's value from its whole range, its ends more often than others."""
    found: dict[tuple[str, str], st.SearchStrategy[Any]] = {}
    for section, cls in parts.items():
        schema = cls.model_json_schema()["properties"]
        for name in cls.model_fields:
            leaf = value_schema(schema[name])
            if "enum" in leaf:
                found[section, name] = st.sampled_from(leaf["enum"])
            elif leaf.get("type") == "boolean":
                found[section, name] = st.booleans()
            elif leaf.get("type") == "integer":
                low, high = leaf["minimum"], leaf.get("maximum", leaf.get("exclusiveMaximum", 0) - 1)
                found[section, name] = st.sampled_from([low, high]) | st.integers(low, high)
            elif leaf.get("type") == "number":
                low, high = (leaf.get(key, leaf.get(f"exclusive{key.title()}")) for key in ("minimum", "maximum"))
                opens = {"exclude_min": "minimum" not in leaf, "exclude_max": "maximum" not in leaf}
                ends = [leaf[key] for key in ("minimum", "maximum") if key in leaf] or [(low + high) / 2]
                found[section, name] = st.sampled_from(ends) | st.floats(low, high, **opens)
    return found


RANGES = ranges(sections(RunConfig))
START = ranges({"start": StartConfig, "rope": RopeConfig})
ADAPTER = ranges({"adapter": AdapterConfig})
REQUIRED = ("vocab_size", "max_position_embeddings")
ROPE = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
OF_START = ("rope", "shared", "slots", "kept", "source", "generation", "tokenizer", "config", "tensors")
ENDS = {
    (section, name): [value_schema(schema)[key] for key in ("minimum", "maximum") if key in value_schema(schema)]
    for section, cls in sections(RunConfig).items()
    for name, schema in cls.model_json_schema()["properties"].items()
    if value_schema(schema).get("type") in ("integer", "number")
}


@st.composite
def starts(draw: st.DrawFn, num_experts: int) -> dict[str, Any]:
    """Draw what a founder says of a checkpoint: what it must say, and any of the rest, anywhere in its range."""
    found: dict[str, dict[str, Any]] = {"start": {}, "rope": {}}
    others = draw(st.lists(st.sampled_from(sorted(START)), max_size=8, unique=True))
    for section, name in {*others, *(("start", name) for name in REQUIRED), *(("rope", name) for name in ROPE)}:
        found[section][name] = draw(START[section, name])
    digests = {"shared": "0" * 64, "slots": ["1" * 64] * min(num_experts, 128)}
    return found["start"] | digests | {"rope": found["rope"]}


@st.composite
def adapters(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the settings of adapters, any of them anywhere in its range."""
    names = draw(st.lists(st.sampled_from(sorted(ADAPTER)), max_size=5, unique=True))
    targets = st.lists(st.sampled_from(get_args(AdapterTarget)), min_size=1, max_size=4, unique=True)
    return {name: draw(ADAPTER["adapter", name]) for _, name in names} | {"targets": draw(targets)}


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Draw settings: few or many of them at any place of their range, the others as by default."""
    document: dict[str, Any] = {}
    for section, name in draw(st.lists(st.sampled_from(sorted(RANGES)), max_size=12, unique=True)):
        value = draw(RANGES[section, name])
        if section:
            document.setdefault(section, {})[name] = value
        else:
            document[name] = value
    model = document.setdefault("model", {})
    if "hidden_size" in model or "num_heads" in model or "num_kv_heads" in model:  # or hardly any model would be one
        heads = 2 ** draw(st.integers(0, 10))
        model |= {"num_heads": heads, "num_kv_heads": heads, "hidden_size": heads * draw(st.integers(1, 64))}
    if draw(st.booleans()):
        model["start"] = draw(starts(model.get("num_experts", 16)))
        if draw(st.booleans()):
            document["adapter"] = draw(adapters())
    if draw(st.booleans()):
        rounds = document.setdefault("round", {})
        rounds["lease_seconds"] = max(rounds.get("lease_seconds", 30.0), 2 * rounds.get("heartbeat_seconds", 10.0))
    return document


def test_every_setting_is_drawn_but_texts():
    known = {(section, name) for section, cls in sections(RunConfig).items() for name in cls.model_fields}
    texts = {("data", name) for name in ("name", "split", "text_field", "tokenizer", "paths", "fingerprint")}
    texts |= {("data", "chat_template"), ("data", "probe"), ("data", "mixture"), ("data", "phases"), ("data", "urls")}
    nested = {
        ("model", "start"),
        ("", "adapter"),
        ("", "revoked_invites"),
        *(("", name) for name in sections(RunConfig) if name),
    }
    assert known - set(RANGES) == texts | nested
    of_start = {("start", name) for name in StartConfig.model_fields} | {("rope", n) for n in RopeConfig.model_fields}
    assert of_start - set(START) == {("start", name) for name in OF_START}
    assert {name for _, name in ADAPTER} == AdapterConfig.model_fields.keys() - {"targets", "start"}


@pytest.mark.parametrize("value", FAR_OUT, ids=str)
@pytest.mark.parametrize(("section", "name"), sorted(START))
def test_a_checkpoints_setting_far_out_of_its_range_is_refused_by_name(section, name, value):
    start: dict[str, Any] = {"vocab_size": 8, "max_position_embeddings": 8, "shared": "0" * 64, "slots": ["1" * 64]}
    start |= {name: value} if section == "start" else {"rope": {name: value}}
    with pytest.raises(ValidationError, match=name):
        RunConfig.model_validate({"model": {"start": start}})


@given(document=st.data())
@settings(max_examples=settings().max_examples, deadline=None)
def test_a_checkpoints_settings_anywhere_in_their_range_are_refused_or_make_a_model(document):
    family = document.draw(st.sampled_from(list(FAMILIES)))
    experts = 0 if FAMILIES[family].is_dense else 2
    shape = {"family": family, "hidden_size": 16, "num_layers": 1, "num_experts": experts, "top_k": experts}
    try:
        model = ModelConfig.model_validate(shape | {"start": document.draw(starts(experts))})
        built = outline(model, 8, 8)
    except (ValidationError, ConfigError) as error:
        assert str(error)
        return
    size = model_size(model, 8)
    assert sum(map(prod, built.shared_shapes().values())) == size.shared_params
    try:
        run = RunConfig.model_validate(
            {"model": model, "data": {"sequence_length": 8}, "adapter": document.draw(adapters())}
        )
        adapted = outline_adapted(run, 8)
    except (ValidationError, ConfigError) as error:
        assert str(error)
        return
    size = run_size(run, 8)
    assert sum(map(prod, adapted.shared_shapes().values())) == size.shared_params
    assert sum(map(prod, adapted.slot_shapes().values())) == size.slot_params


@pytest.mark.parametrize("value", FAR_OUT, ids=str)
@pytest.mark.parametrize(("section", "name"), sorted(RANGES), ids=lambda part: part or "run")
def test_a_setting_far_out_of_its_range_is_refused_by_name(section, name, value):
    document = {section: {name: value}} if section else {name: value}
    try:
        run = RunConfig.model_validate(document)
    except ValidationError as error:
        assert name in str(error)
        return
    used = getattr(getattr(run, section) if section else run, name)
    assert 0 <= used <= 2**44, "only a coefficient may be as small as 1e-300"


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return Identity(tmp_path_factory.mktemp("identity") / "key")


@pytest.fixture(scope="module")
def loop():
    found = uvloop.new_event_loop()
    yield found
    found.close()


@given(document=documents(), speed=st.sampled_from([0.0, 1e-300, 1.0, 1e12]))
@settings(max_examples=2 * settings().max_examples, deadline=None)
def test_settings_anywhere_in_their_range_are_refused_by_name_or_can_be_used(identity, loop, document, speed):
    use(document, identity, loop, speed)


@pytest.mark.parametrize(("section", "name"), sorted(ENDS), ids=lambda part: part or "run")
def test_a_setting_at_either_end_of_its_range_can_be_used(identity, loop, section, name):
    for value in ENDS[section, name]:
        use({section: {name: value}} if section else {name: value}, identity, loop, 1.0)


def use(document: dict[str, Any], identity: Identity, loop: asyncio.AbstractEventLoop, speed: float) -> None:
    """Do with settings what founder, joiners and monitors do before and around training."""
    try:
        run = RunConfig.model_validate(document)
    except ValidationError as error:
        assert all(problem["type"] == "value_error" for problem in error.errors()), "a value of its range is refused"
        return
    travels(run, identity)
    plans(run)
    waits(run, loop)
    rounds(run, identity, speed)


def travels(run: RunConfig, identity: Identity) -> None:
    manifest = Manifest(
        **{"run_id": "run", "founder": identity.peer_id, "software": "0", "config": run},
        **{"vocab_size": run.data.vocab_size, "tokenizer_digest": "0" * 64, "tokenizer_bytes": 100},
    )
    assert read_manifest(lambda name: manifest.encode()) == manifest and len(manifest.encode()) < MAX_DOCUMENT_BYTES


def plans(run: RunConfig) -> None:
    """A machine plans its part: what does not fit is a ConfigError with a remedy."""
    machine = MachineConfig()
    try:
        check_machine(run, machine)
    except ConfigError as error:
        assert str(error)
        return
    size = run_size(run, run.data.vocab_size)
    setup = Setup.of(run, machine, run.data.vocab_size, num_ranks=1, on_gpu=False)
    for claimed in {0, min(1, size.num_slots), size.num_slots}:
        assert peer_memory(size, claimed, setup).host_bytes > 0
    for memory_bytes in (0, 2**33, 2**80):
        try:
            slots = slots_that_fit(size, setup, memory_bytes)
        except ConfigError as error:
            assert str(error)
            continue
        traffic = round_traffic(size, slots, 2, setup)
        assert math.isfinite(transfer_seconds(traffic, 1e-3, 1e-3).total) and disk_bytes(size, slots, 2, setup) > 0
    assert shortage(size, min(1, size.num_slots), setup, 0) and math.isfinite(training_seconds(run, 2, 1e-3))


def waits(run: RunConfig, loop: asyncio.AbstractEventLoop) -> None:
    """Threads and event loops wait for each time, and for the sum of all."""
    times = run.round
    phases = times.matchmaking_seconds + times.averaging_seconds + times.exchange_seconds
    every = [value for name, value in times if name.endswith("_seconds")] + [phases + times.max_seconds]
    lock = threading.Lock()
    for seconds in every:
        assert lock.acquire(timeout=seconds)
        lock.release()
        loop.call_later(seconds, lock.release).cancel()
        datetime.timedelta(seconds=seconds)
    timeout = AdaptiveTimeout(1.0, times.averaging_seconds)
    for _ in range(2000):
        timeout.was_exceeded()
        timeout.observe(times.averaging_seconds)
    assert 0 < timeout.seconds <= times.averaging_seconds


def rounds(run: RunConfig, identity: Identity, speed: float) -> None:
    """A peer states its round in records and in the roster, and every node takes them."""
    now, peer, last = get_dht_time(), identity.peer_id, run.round.total
    steps = run.round.steps if run.round.mode == "steps" else 1
    tokens = steps * run.train.batch_size * run.data.sequence_length
    member = Member(
        **{"peer_id": peer, "round": last, "tokens": clamp_tokens(tokens, 1e12, run.round.max_seconds)},
        **{"slots": (run.model.num_experts - 1,), "previous": "0" * 64, "tokens_per_second": speed},
        **{"ready_at": now, "sync_seconds": min(run.round.averaging_seconds, 3600.0)},
    )
    assert Member.model_validate_json(member.model_dump_json()) == member and member.tokens == tokens
    ends_at = round_end(run.round, 1, run.round_tokens, [member])
    assert now <= ends_at <= now + 3600 + run.round.max_seconds + 1
    assert datetime.datetime.fromtimestamp(ends_at, datetime.UTC)
    for place in (0.0, 0.5, last - 0.5, float(last)):
        assert 0 <= rate_of_step(run, place) <= run.train.lr * (1 + 1e-9)
        assert 0 <= merge_alpha(run.merge, int(place)) <= 1
    seconds = {f"{name}_seconds": run.round.max_seconds for name in ("train", "matchmaking", "averaging", "exchange")}
    counts = dict.fromkeys(["num_members", "committed", "dropped", "bytes_in", "bytes_out"], run.model.num_experts)
    report = Metrics(
        **{"peer_id": peer, "round": last, "step": last, "tokens": tokens, "total_tokens": tokens, "loss": None},
        **{"tokens_per_second": speed, "slots": member.slots, "shared_digest": "0" * 16, "other_seconds": 0.0},
        **seconds,
        **counts,
    )
    claim = Claim(peer_id=peer, state="active", slots=member.slots, max_slots=1, since=now)
    validator = RecordValidator("run", identity)
    for record in (report, claim, Progress(peer_id=peer, round=last, ends_at=ends_at)):
        key = DHTID.generate(source=record.key("run")).to_bytes()
        lifetime = now + run.round.lease_seconds
        raw = DHTRecord(key, msgpack.packb(validator.subkey), msgpack.packb(record.encode()), lifetime)
        assert validator.validate(DHTRecord(key, raw.subkey, validator.sign_value(raw), lifetime))
