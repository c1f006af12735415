"""Structures that come close to what a decoder expects, and are not: mutants of something sound."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import msgpack

DEPTHS = (1, 7, 9, 100, 500, 1000)
NUMBERS = (0, -1, 1, 2**31, 2**53, 2**53 + 1, 2**63, 2**64 - 1, -(2**63), 0.5, -0.0, 1e300, 5e-324)
TEXTS = ("", "\0", "a" * 5000, "../../etc/passwd", "<script>", "\ud800", "é" * 200, "Q" * 46, "0" * 64, "nan", "1")
BYTES = (b"", b"\0", b"\xff" * 40, b"a" * 5000)


def mutant(seed: Any, *, is_packed: bool, draw: random.Random) -> bytes:
    """Return bytes of a structure like `seed`, changed in one to four places, and sometimes in its bytes, too."""
    content = copy.deepcopy(seed)
    for _ in range(draw.choice((0, 1, 1, 1, 2, 4))):
        content = _changed(content, is_packed, draw)
    data = encoded(content, is_packed=is_packed)
    return data if draw.random() < 0.7 else _scrambled(data, draw)


def encoded(content: Any, *, is_packed: bool) -> bytes:
    """Return the content as MessagePack or as JSON; of what neither can hold, something that is too deep."""
    return _packed(content) if is_packed else _text(content)


def decoded(data: bytes, *, is_packed: bool) -> Any:
    """Return the content of what `encoded` has made.

    Raises:
        ValueError, TypeError, RecursionError: it is no longer that.
    """
    return msgpack.unpackb(data, strict_map_key=False) if is_packed else json.loads(data)


def beginnings(seed: Any, *, is_packed: bool) -> list[bytes]:
    """Return the seed as it is, with something nested in place of each of its parts, and what is nested alone."""
    draw = random.Random(0)
    deep = [_nested(depth, draw) for depth in DEPTHS] + [_extension(draw) for _ in DEPTHS if is_packed]
    contents = [seed, *deep]
    if isinstance(seed, dict):
        contents += [{**seed, key: inner} for key in seed for inner in deep]
    elif isinstance(seed, list):
        contents += [[*seed[:place], inner, *seed[place + 1 :]] for place in range(len(seed)) for inner in deep]
    return list(dict.fromkeys(encoded(content, is_packed=is_packed) for content in contents))


def _changed(content: Any, is_packed: bool, draw: random.Random) -> Any:
    """Return the content with something else at a place of it."""
    if isinstance(content, dict) and content and draw.random() < 0.85:
        key = draw.choice(list(content))
        what = draw.random()
        if what < 0.1:
            del content[key]
        elif what < 0.2:
            content[str(draw.choice(TEXTS))] = _nasty(is_packed, draw)
        else:
            content[key] = _changed(content[key], is_packed, draw)
        return content
    if isinstance(content, list) and content and draw.random() < 0.8:
        place = draw.randrange(len(content))
        if draw.random() < 0.2:
            content.insert(place, draw.choice(content))
        else:
            content[place] = _changed(content[place], is_packed, draw)
        return content
    if is_packed and isinstance(content, bytes) and draw.random() < 0.5:
        return _scrambled(content, draw)
    return _nasty(is_packed, draw)


def _nasty(is_packed: bool, draw: random.Random) -> Any:
    kinds = [
        lambda: draw.choice((None, True, False)),
        lambda: draw.choice(NUMBERS),
        lambda: draw.choice((float("nan"), float("inf"), float("-inf"))),
        lambda: draw.choice(TEXTS),
        lambda: _nested(draw.choice(DEPTHS), draw),
        lambda: [_nasty(is_packed, draw) for _ in range(draw.randrange(4))],
        lambda: {str(draw.choice(TEXTS)): _nasty(is_packed, draw) for _ in range(draw.randrange(3))},
    ]
    if is_packed:
        kinds += [lambda: draw.choice(BYTES), lambda: _extension(draw)]
    return draw.choice(kinds)()


def _nested(depth: int, draw: random.Random) -> Any:
    deep: Any = draw.choice(NUMBERS)
    for _ in range(depth):
        deep = [deep] if draw.random() < 0.8 else {"a": deep}
    return deep


def _extension(draw: random.Random) -> msgpack.ExtType:
    """Return extension types within one another: tuples, dictionaries, tensors' descriptions, unknown ones."""
    data = b"\x90"
    for _ in range(draw.choice((1, 2, 9, 250, 700))):
        data = msgpack.packb([msgpack.ExtType(draw.choice((0x40, 0x40, 0x50, 0x51, 7)), data)])
    return msgpack.ExtType(draw.choice((0x40, 0x50, 0x51, 7)), data)


def _text(content: Any) -> bytes:
    try:
        return json.dumps(content).encode("utf-8", "surrogatepass")
    except RecursionError:
        return b"[" * 5000


def _packed(content: Any) -> bytes:
    try:
        return msgpack.packb(content)
    except (ValueError, OverflowError, UnicodeEncodeError):
        return b"\x91" * 900 + b"\xc0"


def _scrambled(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        place = draw.randrange(len(changed) + 1)
        kind = draw.randrange(5)
        if kind == 0 and place < len(changed):
            changed[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[place : place + draw.choice((1, 4, 1000))]
        elif kind == 2:
            changed[place:place] = draw.randbytes(draw.choice((1, 4, 30)))
        elif kind == 3:
            changed[place:place] = changed[: draw.choice((1, 16, 400))]
        elif place < len(changed):
            changed[place] = draw.choice((0x00, 0xC1, 0xC7, 0xDD, 0xDF, 0xFF, 0x22, 0x5B, 0x7B))
    return bytes(changed)
