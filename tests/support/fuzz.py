"""Random structures for every decoder of untrusted bytes: mutants of sound messages, and what Hypothesis draws."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st

DEPTHS = (1, 7, 9, 100, 500, 1000)
NUMBERS = (0, -1, 1, 2**31, 2**53, 2**53 + 1, 2**63, 2**64 - 1, -(2**63), 0.5, -0.0, 1e300, 5e-324)
TEXTS = ("", "\0", "a" * 5000, "../../etc/passwd", "<script>", "\ud800", "é" * 200, "Q" * 46, "0" * 64, "nan", "1")
BYTES = (b"", b"\0", b"\xff" * 40, b"a" * 5000)


@dataclass(frozen=True)
class Decoder:
    """One decoder.

    Attributes:
        name: For reports.
        decode: Takes a stranger's bytes.
        may_raise: What refuses them properly.
        seeds: Sound content: JSON's, or MessagePack's if `is_packed`.
        is_packed: Which of the two it reads.
    """

    name: str
    decode: Callable[[bytes], Any]
    may_raise: tuple[type[Exception], ...]
    seeds: Sequence[Any]
    is_packed: bool = False

    def is_refused_properly(self, data: bytes) -> Exception | None:
        """Return the error that it should not have raised, if it did."""
        try:
            self.decode(data)
        except self.may_raise:
            return None
        except Exception as error:  # noqa: BLE001 - finding these is what this is for
            return error
        return None


def throw(targets: list[Decoder], count: int, draw: random.Random) -> Counter[tuple[str, str]]:
    """Decode mutants; return how often which decoder raised what it should not have."""
    found: Counter[tuple[str, str]] = Counter()
    for number in range(count):
        target = targets[number % len(targets)]
        data = mutant(draw.choice(target.seeds), is_packed=target.is_packed, draw=draw)
        error = target.is_refused_properly(data)
        if error is not None:
            found[target.name, repr(error)[:200]] += 1
    return found


def draw(targets: list[Decoder], count: int, seed: int) -> Counter[tuple[str, str]]:
    """Decode what Hypothesis draws; return as `throw` does, with the least input that fails."""
    found: Counter[tuple[str, str]] = Counter()
    for target in targets:
        examples = count // len(targets)
        if examples:
            _draw_one(target, examples, seed, found)
    return found


def _draw_one(target: Decoder, examples: int, seed: int, found: Counter[tuple[str, str]]) -> None:
    @hypothesis_seed(seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(_contents(target))
    def holds(data: bytes) -> None:
        error = target.is_refused_properly(data)
        assert error is None, f"{error!r} of {data[:200]!r}"

    try:
        holds()
    except AssertionError as error:
        found[target.name, str(error)[:400]] += 1


def _contents(target: Decoder) -> st.SearchStrategy[bytes]:
    numbers = st.integers(-(2**63), 2**64 - 1) | st.floats()
    leaves: st.SearchStrategy[Any] = st.none() | st.booleans() | numbers | st.text(max_size=40)
    leaves = leaves | st.binary(max_size=40) if target.is_packed else leaves
    anything: st.SearchStrategy[Any] = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    )
    seed = target.seeds[0]
    if isinstance(seed, dict):
        fields = {key: st.just(value) | anything for key, value in seed.items()}
        anything = anything | st.fixed_dictionaries(fields)
    elif isinstance(seed, list):
        anything = anything | st.tuples(*(st.just(value) | anything for value in seed)).map(list)
    draws = st.integers(0, 2**32).map(random.Random)
    mutants = st.builds(mutant, st.just(seed), is_packed=st.just(target.is_packed), draw=draws)
    plain = anything.map(lambda content: encoded(content, is_packed=target.is_packed))
    return st.binary(max_size=200) | plain | mutants


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
