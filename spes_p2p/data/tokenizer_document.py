"""The document that a tokenizer travels in: canonical JSON, checked before the library for tokenizers sees it.

It has only parts that byte-level, SentencePiece-like and WordPiece tokenizers need. A tokenizer is a small program that
its founder writes for every volunteer's machine: a few chained replacements turn a letter into 10^12, and one regular
expression runs for years. So each part, each of its settings and each regular expression is on a list, and their
common growth is bounded.

This module imports neither torch nor transformers, because the process that reads strangers' documents is to be small.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from spes_p2p.errors import DataError, one_line

MAX_PAYLOAD_BYTES = 64 * 2**20
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
FILES = ("special_tokens.json", "tokenizer.json")
# A tokenizer must encode and decode this text before it is accepted.
_PROBE = "The peer's 2 slots:\n\n\tdef f(x): return x  # 漢字 ünï 🙂 \x00"
MAX_GROWTH = 4.0
"""Most characters that strings of the tokenizer make of one character of text."""
MAX_PARTS, MAX_DEPTH = 32, 4
MAX_ADDED, MAX_TOKEN_CHARACTERS, MAX_ADDED_CHARACTERS = 16_384, 256, 2**18
"""Added tokens, the characters of one, and of all: the automaton that finds them takes memory for each."""
_MAX_UNICODE_FORMS = 2
_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PREFIX = r"[^\r\n\p{L}\p{N}]?"
# None of them takes more than linear time: no two neighbours that repeat match the same character, except at the end of
# a run, where one step back is enough.
_PATTERNS = (
    # GPT-2, OLMo, GPT-NeoX
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # GPT-4, Llama 3, OLMo 2
    rf"{_ENGLISH}|{_PREFIX}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    # Qwen 2 and 3
    rf"{_ENGLISH}|{_PREFIX}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    # Qwen 3.5
    rf"{_ENGLISH}|{_PREFIX}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    # GPT-4o
    rf"{_PREFIX}{_UPPER}*{_LOWER}+{_ENGLISH}?|{_PREFIX}{_UPPER}+{_LOWER}*{_ENGLISH}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    # Mistral's Tekken
    rf"{_PREFIX}{_UPPER}*{_LOWER}+|{_PREFIX}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    # DeepSeek 3, beside digits and Chinese characters
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES,
    # Digits, spaces and lines, alone
    *(r"\p{N}{1,3}", r"\p{N}", r"\d", r"\s+", r"\n", r"[\n\r\t]", " {2,}", r"\s{2,}|[\n\r\t]"),
    "[一-龥\u3040-ゟ゠-ヿ]+",
)


class OpenDocument(NamedTuple):
    """A tokenizer that works.

    Attributes:
        backend: It, without padding and truncation.
        text: Its tokenizer.json.
        special: Special tokens by their roles, `eos_token` among them.
        eos_token_id: Id of the end-of-text token.
    """

    backend: Tokenizer
    text: str
    special: dict[str, str]
    eos_token_id: int


def open_document(payload: bytes, where: str, max_entries: int | None = None) -> OpenDocument:
    """Decode a document without trusting it; no name in it becomes a path, and no class is taken from it.

    Args:
        payload: What `tokenizer_bytes` returned elsewhere, or anything.
        where: Names it in errors.
        max_entries: Words of the run's model; a larger vocabulary is refused.

    Raises:
        DataError: it is too large, malformed, has parts that are not allowed, or does not work.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:  # guard: never
        raise DataError(f"{where} has {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES}; join through other peers")
    files = _parse(payload, where)
    if (
        sorted(files) != list(FILES)  # guard: operand
        or not all(isinstance(text, str) for text in files.values())
    ):
        raise DataError(f"{where} holds {str(sorted(files))[:200]}, not {', '.join(FILES)}; join through other peers")
    special = _parse(files["special_tokens.json"], where)
    if not set(special) <= set(SPECIAL_TOKENS) or not all(isinstance(token, str) for token in special.values()):
        raise DataError(f"{where} has unexpected special tokens {str(sorted(special))[:200]}; join through other peers")
    parts = _parse(files["tokenizer.json"], where)
    _check_ids(parts, where)
    try:
        check_parts(parts)
    except ValueError as error:
        raise DataError(f"{where} is refused: {error}; join another run") from error
    del parts
    return _opened(files["tokenizer.json"], special, where, max_entries)


def _opened(text: str, special: dict[str, str], where: str, max_entries: int | None) -> OpenDocument:
    try:
        backend = Tokenizer.from_str(text)
        missing = [token for token in special.values() if backend.token_to_id(token) is None]
        if not missing:
            added = {token.content for token in backend.get_added_tokens_decoder().values()}
            backend.add_special_tokens([token for token in special.values() if token not in added])
        probe = backend.encode(_PROBE).ids
        backend.decode(probe)
        num_entries, largest = backend.get_vocab_size(), max([*backend.get_vocab().values(), *probe])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises bare Exception, and panics as BaseException
        raise DataError(f"{where} is no working tokenizer: {one_line(error)}; join through other peers") from error
    if missing:
        raise DataError(f"{where} lacks its special token {missing[0][:40]!r}; join through other peers")
    if "eos_token" not in special:
        raise DataError(f"{where} has no end-of-text token; choose a tokenizer with an eos_token")
    if largest >= num_entries:  # guard: never
        raise DataError(f"{where} has ids up to {largest} but {num_entries} entries; choose one without holes")
    if max_entries is not None and num_entries > max_entries:  # guard: never
        raise DataError(f"{where} has {num_entries} entries, the run's model {max_entries}; join another run")
    end = backend.token_to_id(special["eos_token"])
    assert end is not None
    return OpenDocument(backend, text, special, end)


def _check_ids(backend: dict[str, Any], where: str) -> None:
    """Refuse ids beyond the number of entries before tokenizers sees them: it allocates up to the largest id."""
    model, added = backend.get("model"), backend.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list) or not isinstance(added, list):
        raise DataError(f"{where} has no vocabulary; join through other peers")
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += [token.get("id") if isinstance(token, dict) else None for token in added]
    num_entries = len(vocabulary) + len(added)
    if not all(isinstance(token_id, int) and 0 <= token_id < num_entries for token_id in ids):  # guard: never
        raise DataError(f"{where} has ids outside its {num_entries} entries; join through other peers")


def _parse(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON; join through other peers") from error
    if not isinstance(parsed, dict):
        raise DataError(f"{where} is {type(parsed).__name__}, not a JSON object; join through other peers")
    return parsed


# ---------------------------------------------------------------------- parts


def _is_text(value: Any, least: int = 0, most: int = 16) -> bool:
    return isinstance(value, str) and least <= len(value) <= most


def _is_pattern(value: Any) -> bool:
    (kind, pattern), *more = value.items() if isinstance(value, dict) and value else [("", "")]
    if kind == "Regex" and pattern not in _PATTERNS:  # guard: never
        raise ValueError(f"its regular expression {str(pattern)[:80]!r} is not one of the known ones")
    return not more and (kind == "Regex" or (kind == "String" and _is_text(pattern, 1, 64)))


def _is_template(value: Any) -> bool:
    if not (isinstance(value, list) and len(value) <= 8 and all(isinstance(piece, dict) for piece in value)):
        return False
    texts = [str(piece["Sequence"]) for piece in value if "Sequence" in piece]
    if len(texts) > len(set(texts)) or len(texts) > 2:  # guard: never
        raise ValueError("its template repeats a text")
    return all(piece.keys() <= {"SpecialToken", "Sequence"} for piece in value)


_FLAGS = (
    "add_prefix_space trim_offsets use_regex strip_left strip_right clean_text handle_chinese_chars lowercase split "
    "invert individual_digits cleanup fuse_unk byte_fallback ignore_merges single_word lstrip rstrip normalized special"
)
_BEHAVIORS = ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
_Test = Callable[[Any], bool]
_TESTS: tuple[tuple[str, _Test, str], ...] = (
    (_FLAGS, lambda value: isinstance(value, bool), "true or false"),
    ("strip_accents", lambda value: value is None or isinstance(value, bool), "true, false or null"),
    ("pattern", _is_pattern, "one String of at most 64 characters, or one Regex"),
    ("content", lambda value: _is_text(value, 0, 64), "at most 64 characters"),
    ("prepend prefix suffix", _is_text, "at most 16 characters"),
    ("continuing_subword_prefix end_of_word_suffix", lambda value: value is None or _is_text(value), "16 characters"),
    ("unk_token", lambda value: value is None or _is_text(value), "at most 16 characters"),
    ("replacement delimiter", lambda value: _is_text(value, 1, 1), "one character"),
    ("prepend_scheme", lambda value: value in ("first", "never", "always"), "first, never or always"),
    ("behavior", lambda value: value in _BEHAVIORS, f"one of {_BEHAVIORS}"),
    ("start stop", lambda value: type(value) is int and 0 <= value <= 64, "a number from 0 to 64"),
    ("sep cls", lambda value: isinstance(value, list) and len(value) <= 2, "a token and its id"),
    ("single pair", _is_template, "at most 8 pieces"),
    ("special_tokens", lambda value: isinstance(value, dict) and len(value) <= 8, "at most 8 of them"),
    ("dropout", lambda value: value is None, "null"),
    ("max_input_chars_per_word", lambda value: type(value) is int and 1 <= value <= 1000, "a number from 1 to 1000"),
    (
        "vocab",
        lambda value: isinstance(value, dict) and max(map(len, value), default=0) <= 1024,
        "words of 1024 letters",
    ),
    ("merges normalizers pretokenizers processors decoders", lambda value: isinstance(value, list), "a list"),
)
"""Settings of parts, the test of their values, and what these must be in words."""
_PARTS = {
    "normalizer": {
        "NFC NFD NFKC NFKD Nmt Lowercase StripAccents ByteLevel": "",
        "Replace": "pattern content",
        "Prepend": "prepend",
        "Strip": "strip_left strip_right",
        "BertNormalizer": "clean_text handle_chinese_chars strip_accents lowercase",
        "Sequence": "normalizers",
    },
    "pre_tokenizer": {
        "BertPreTokenizer Whitespace WhitespaceSplit UnicodeScripts": "",
        "ByteLevel": "add_prefix_space trim_offsets use_regex",
        "Metaspace": "replacement prepend_scheme split",
        "Split": "pattern behavior invert",
        "Punctuation": "behavior",
        "Digits": "individual_digits",
        "CharDelimiterSplit": "delimiter",
        "Sequence": "pretokenizers",
    },
    "post_processor": {
        "ByteLevel": "add_prefix_space trim_offsets use_regex",
        "BertProcessing RobertaProcessing": "sep cls trim_offsets add_prefix_space",
        "TemplateProcessing": "single pair special_tokens",
        "Sequence": "processors",
    },
    "decoder": {
        "ByteFallback Fuse": "",
        "ByteLevel": "add_prefix_space trim_offsets use_regex",
        "Replace": "pattern content",
        "Strip": "content start stop",
        "Metaspace": "replacement prepend_scheme split",
        "WordPiece": "prefix cleanup",
        "BPEDecoder": "suffix",
        "Sequence": "decoders",
    },
    "model": {
        "BPE": "dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk byte_fallback ignore_merges "
        "vocab merges",
        "WordPiece": "unk_token continuing_subword_prefix max_input_chars_per_word vocab",
    },
}
"""The types of parts by their role, and the settings of each."""
_ADDED = {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"}


def check_parts(backend: dict[str, Any]) -> None:
    """Check the content of a tokenizer.json against the lists above.

    Raises:
        ValueError: one line that names the part.
    """
    parts = {role: [*itertools.islice(_flat(backend.get(role), role), MAX_PARTS + 1)] for role in _PARTS}
    if long := next((name for name, found in parts.items() if len(found) > MAX_PARTS), None):
        raise ValueError(f"its {long} has more than {MAX_PARTS} parts")
    alone = {"version": "1.0", "truncation": None, "padding": None}
    for name in alone | backend:
        if name not in _PARTS and name != "added_tokens" and (name not in alone or backend.get(name) != alone[name]):
            raise ValueError(f"its {name[:100]} is not allowed here ({backend.get(name)!r:.60})")
    for role, part in ((role, part) for role, found in parts.items() for part in found):
        kind = str(part.get("type")) if isinstance(part, dict) else type(part).__name__
        known = next((known for kinds, known in _PARTS[role].items() if kind in kinds.split()), None)
        if known is None:
            raise ValueError(f"its {role} is not allowed here ({kind:.60})")
        _check_settings(part, {"type", *known.split()}, f"{role}.{kind}")
    added = backend.get("added_tokens") or []
    for number, token in enumerate(added):
        if not _is_text(token.get("content"), 1, MAX_TOKEN_CHARACTERS):  # guard: never
            raise ValueError(f"its added_tokens.{number}.content is not 1 to {MAX_TOKEN_CHARACTERS} characters")
        _check_settings({**token, "content": ""}, _ADDED, f"added_tokens.{number}")
    num_characters = sum(len(token["content"]) for token in added)
    if len(added) > MAX_ADDED or num_characters > MAX_ADDED_CHARACTERS:  # guard: never
        raise ValueError(f"its added tokens have more than {MAX_ADDED_CHARACTERS} characters, or are too many")
    _check_growth([*parts["normalizer"], *parts["pre_tokenizer"]])
    _check_growth(parts["decoder"])


def _flat(part: Any, role: str, depth: int = 1) -> Iterator[Any]:
    """Yield a part, if there is one, and the parts in it."""
    if depth > MAX_DEPTH:  # guard: never
        raise ValueError(f"its {role} is nested more than {MAX_DEPTH} deep")
    if part is not None or depth > 1:
        yield part
    if isinstance(part, dict) and part.get("type") == "Sequence":
        inner = part.get(_PARTS[role].get("Sequence", ""))
        for each in inner if isinstance(inner, list) else ():
            yield from _flat(each, role, depth + 1)


@functools.cache
def _tests() -> dict[str, tuple[_Test, str]]:
    return {name: (test, words) for names, test, words in _TESTS for name in names.split()}


def _check_settings(part: dict[str, Any], known: set[str], where: str) -> None:
    for name, value in part.items():
        if name not in known:  # guard: never
            raise ValueError(f"its {where}.{name[:60]} is not allowed here")
        if name in _tests() and not _tests()[name][0](value):
            raise ValueError(f"its {where}.{name} is not allowed here ({value!r:.60}): write {_tests()[name][1]}")


def _check_growth(parts: list[dict[str, Any]]) -> None:
    growth = math.prod(map(_growth, parts))
    if growth > MAX_GROWTH:  # guard: never
        raise ValueError(f"its parts make up to {growth:.3g} characters of one, at most {MAX_GROWTH:g}")
    kinds = [part["type"] for part in parts]
    num_forms = sum(kind[:2] == "NF" for kind in kinds)
    if kinds.count("ByteLevel") > 1 or num_forms > _MAX_UNICODE_FORMS:  # guard: never
        raise ValueError("it repeats a part that makes several characters of one")


def _growth(part: dict[str, Any]) -> float:
    """Return the most characters that a part's own strings make of one; a piece of text has one character at least."""
    if part["type"] == "Replace":
        return max(1.0, len(part.get("content", "")) / len(part.get("pattern", {}).get("String", "x")))
    if part["type"] == "Prepend":
        return 1.0 + len(part.get("prepend", ""))
    adds_space = part.get("prepend_scheme") != "never" if part["type"] == "Metaspace" else part.get("add_prefix_space")
    return 2.0 if adds_space else 1.0
