"""Every field that another peer can fill has bounds: texts a pattern, lists a length, numbers a range."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from spes_p2p.swarm.averaging.averaging import Greeting
from spes_p2p.swarm.exchange.protocol import Inventory, Question
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.manifest import Manifest
from spes_p2p.swarm.p2p import introductions
from spes_p2p.swarm.p2p.peerstore import PeerstoreEntry
from spes_p2p.swarm.records import RECORD_TYPES
from spes_p2p.swarm.roster import Member

FILLED_BY_PEERS: list[type[BaseModel]] = [
    *(*RECORD_TYPES, Member, Greeting, Version, Question, Inventory, Manifest),
    *(PeerstoreEntry, introductions._CallMe, introductions._Called),
    *(introductions._Question, introductions._Answer, introductions._Told, introductions._Consent),
]
DATA = "Manifest.config.data."
"""What names data and tokenizers has patterns of its own."""


def leaves(schema: dict[str, Any], at: str, root: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schema of every value in a document, by its place."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    for name in ("anyOf", "allOf"):
        for part in schema.get(name, ()):
            yield from leaves(part, at, root)
    for name, part in schema.get("properties", {}).items():
        yield from leaves(part, f"{at}.{name}", root)
    for part in [*schema.get("prefixItems", ()), *filter(None, [schema.get("items")])]:
        yield from leaves(part, f"{at}[]", root)
    for part in filter(None, [schema.get("propertyNames"), schema.get("additionalProperties") or None]):
        yield from leaves(part, f"{at}{{}}", root)
    if "type" in schema:
        yield at, schema


def fields_of_type(*types: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for kind in FILLED_BY_PEERS:
        schema = kind.model_json_schema()
        found += [(at, leaf) for at, leaf in leaves(schema, kind.__name__, schema) if leaf["type"] in types]
    assert found
    return found


def test_a_text_has_a_pattern_that_admits_no_control_character_or_is_one_of_a_few() -> None:
    texts = [(at, leaf) for at, leaf in fields_of_type("string") if not {"enum", "const"} & leaf.keys()]
    free = [
        at for at, leaf in texts if not re.fullmatch(r"\^.*\$", leaf.get("pattern", "")) and not at.startswith(DATA)
    ]
    assert not free


def test_a_list_has_a_length_and_no_document_takes_unknown_keys() -> None:
    endless = [at for at, leaf in fields_of_type("array") if "maxItems" not in leaf]
    open_ended = [at for at, leaf in fields_of_type("object") if leaf.get("additionalProperties") is not False]
    assert not endless
    assert all(kind.model_config["extra"] == "forbid" for kind in FILLED_BY_PEERS)
    start = "Manifest.config.model.start."
    mappings = {f"{start}{name}" for name in ("config", "generation")}
    mappings |= {f"{start}tokenizer.special_tokens", f"{start}tokenizer.chat_templates"}
    assert set(open_ended) == {"Member.starts", *mappings}, "their keys have a pattern, and their number is bounded"


def test_a_number_has_a_least_and_a_greatest_value() -> None:
    low, high = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
    numbers = [(at, leaf) for at, leaf in fields_of_type("integer", "number") if "const" not in leaf]
    assert not [at for at, leaf in numbers if not (low & leaf.keys() and high & leaf.keys())]
