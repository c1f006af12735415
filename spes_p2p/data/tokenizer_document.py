"""The document that a tokenizer travels in: canonical JSON, checked before the library for tokenizers sees it.

It has only parts that byte-level, SentencePiece-like and WordPiece tokenizers need. A tokenizer is a small program that
its founder writes for every volunteer's machine: a few chained replacements turn a letter into 10^12, and one regular
expression runs for years. So each part, each of its settings and each regular expression is on a list, and their
common growth is bounded.

This module imports neither torch nor transformers, because the process that reads strangers' documents is to be small.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
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
MAX_ADDED, MAX_ADDED_CHARACTERS = 16_384, 2**18
"""Added tokens, and their characters together: the automaton that finds them takes memory for each."""
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
    if len(payload) > MAX_PAYLOAD_BYTES:  # guard: tokenizer-size
        raise DataError(f"{where} has {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES}; join through other peers")
    files = _parse(payload, where)
    if (
        sorted(files) != list(FILES)  # guard: tokenizer-files
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
    if largest >= num_entries:  # guard: tokenizer-added-ids
        raise DataError(f"{where} has ids up to {largest} but {num_entries} entries; choose one without holes")
    if max_entries is not None and num_entries > max_entries:  # guard: tokenizer-vocabulary
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
    if not all(isinstance(token_id, int) and 0 <= token_id < num_entries for token_id in ids):  # guard: tokenizer-ids
        raise DataError(f"{where} has ids outside its {num_entries} entries; join through other peers")


def _parse(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON; join through other peers") from error
    if not isinstance(parsed, dict):
        raise DataError(f"{where} is {type(parsed).__name__}, not a JSON object; join through other peers")
    return parsed


def _known(pattern: str) -> str:
    if pattern not in _PATTERNS:  # guard: tokenizer-regex
        raise ValueError(f"its regular expression {pattern[:80]!r} is not one of the known ones")
    return pattern


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)  # guard: tokenizer-settings


class _Pattern(_Part):
    """One of the two."""

    String: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    Regex: Annotated[str, AfterValidator(_known)] | None = None

    @property
    def min_characters(self) -> int:
        """Fewest characters that match."""
        return len(self.String) if self.String else 1


_Affix = Annotated[str, Field(max_length=16)]
_Character = Annotated[str, Field(min_length=1, max_length=1)]


class _Plain(_Part):
    """A part without settings."""

    type: Literal[
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Nmt",
        "Lowercase",
        "StripAccents",
        "BertPreTokenizer",
        "Whitespace",
        "WhitespaceSplit",
        "UnicodeScripts",
        "ByteFallback",
        "Fuse",
    ]


class _ByteLevel(_Part):
    """As a pre-tokenizer, a decoder and a post-processor with settings, as a normalizer without."""

    type: Literal["ByteLevel"]
    add_prefix_space: bool = False
    trim_offsets: bool = True
    use_regex: bool = True


class _Replace(_Part):
    type: Literal["Replace"]
    pattern: _Pattern
    content: Annotated[str, Field(max_length=64)]


class _Prepend(_Part):
    type: Literal["Prepend"]
    prepend: _Affix


class _Strip(_Part):
    """As a normalizer with sides, as a decoder with counts of a character."""

    type: Literal["Strip"]
    strip_left: bool = True
    strip_right: bool = True
    content: _Character = " "
    start: Annotated[int, Field(ge=0, le=64)] = 0
    stop: Annotated[int, Field(ge=0, le=64)] = 0


class _BertNormalizer(_Part):
    type: Literal["BertNormalizer"]
    clean_text: bool
    handle_chinese_chars: bool
    strip_accents: bool | None
    lowercase: bool


class _Metaspace(_Part):
    type: Literal["Metaspace"]
    replacement: _Character
    prepend_scheme: Literal["first", "never", "always"]
    split: bool


class _Split(_Part):
    type: Literal["Split"]
    pattern: _Pattern
    behavior: Literal["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"]
    invert: bool


class _Punctuation(_Part):
    type: Literal["Punctuation"]
    behavior: Literal["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"]


class _Digits(_Part):
    type: Literal["Digits"]
    individual_digits: bool


class _CharDelimiterSplit(_Part):
    type: Literal["CharDelimiterSplit"]
    delimiter: _Character


class _WordPieceDecoder(_Part):
    type: Literal["WordPiece"]
    prefix: _Affix
    cleanup: bool


class _BpeDecoder(_Part):
    type: Literal["BPEDecoder"]
    suffix: _Affix


class _Processing(_Part):
    type: Literal["BertProcessing", "RobertaProcessing"]
    sep: Annotated[list[Any], Field(max_length=2)]
    cls: Annotated[list[Any], Field(max_length=2)]
    trim_offsets: bool = True
    add_prefix_space: bool = True


def _each_once(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    texts = [str(piece["Sequence"]) for piece in pieces if "Sequence" in piece]
    if len(texts) > len(set(texts)) or len(texts) > 2:  # guard: tokenizer-template
        raise ValueError("its template repeats a text")
    return pieces


_Pieces = Annotated[
    list[dict[Literal["SpecialToken", "Sequence"], Any]], Field(max_length=8), AfterValidator(_each_once)
]


class _Template(_Part):
    type: Literal["TemplateProcessing"]
    single: _Pieces
    pair: _Pieces
    special_tokens: Annotated[dict[str, Any], Field(max_length=8)]


class _Normalizers(_Part):
    type: Literal["Sequence"]
    normalizers: list[_Normalizer]


class _PreTokenizers(_Part):
    type: Literal["Sequence"]
    pretokenizers: list[_PreTokenizer]


class _Decoders(_Part):
    type: Literal["Sequence"]
    decoders: list[_Decoder]


class _Processors(_Part):
    type: Literal["Sequence"]
    processors: list[_PostProcessor]


_by_type = Field(discriminator="type")
_Normalizer = Annotated[_Plain | _ByteLevel | _Replace | _Prepend | _Strip | _BertNormalizer | _Normalizers, _by_type]
_PreTokenizer = Annotated[
    _Plain | _ByteLevel | _Metaspace | _Split | _Punctuation | _Digits | _CharDelimiterSplit | _PreTokenizers, _by_type
]
_Decoder = Annotated[
    _Plain | _ByteLevel | _Replace | _Strip | _Metaspace | _WordPieceDecoder | _BpeDecoder | _Decoders, _by_type
]
_PostProcessor = Annotated[_ByteLevel | _Processing | _Template | _Processors, _by_type]
_Vocabulary = dict[Annotated[str, Field(max_length=1024)], Annotated[int, Field(ge=0)]]


class _Bpe(_Part):
    type: Literal["BPE"]
    dropout: None = None
    unk_token: _Affix | None = None
    continuing_subword_prefix: _Affix | None = None
    end_of_word_suffix: _Affix | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False
    vocab: _Vocabulary
    merges: list[Any]


class _WordPiece(_Part):
    type: Literal["WordPiece"]
    unk_token: _Affix
    continuing_subword_prefix: _Affix
    max_input_chars_per_word: Annotated[int, Field(ge=1, le=1000)]
    vocab: _Vocabulary


class _AddedToken(_Part):
    id: Annotated[int, Field(ge=0)]
    content: Annotated[str, Field(min_length=1, max_length=256)]  # guard: added-token
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class _Parts(_Part):
    """A tokenizer.json."""

    version: Literal["1.0"]
    truncation: None
    padding: None
    added_tokens: Annotated[list[_AddedToken], Field(max_length=MAX_ADDED)]
    normalizer: _Normalizer | None
    pre_tokenizer: _PreTokenizer | None
    post_processor: _PostProcessor | None
    decoder: _Decoder | None
    model: Annotated[_Bpe | _WordPiece, _by_type]


def check_parts(backend: dict[str, Any]) -> None:
    """Check the content of a tokenizer.json against the list.

    Raises:
        ValueError: one line that names the part.
    """
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        _check_depth(backend.get(name), name)
    try:
        parts = _Parts.model_validate(backend)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(step) for step in problem["loc"])[:100]
        found = problem["input"].get("type") if isinstance(problem["input"], dict) else problem["input"]
        raise ValueError(f"its {where} is not allowed here ({found!r:.60}): {problem['msg'][:200]}") from error
    if sum(len(token.content) for token in parts.added_tokens) > MAX_ADDED_CHARACTERS:  # guard: added-tokens
        raise ValueError(f"its added tokens have more than {MAX_ADDED_CHARACTERS} characters")
    _check_growth([*_flat(parts.normalizer), *_flat(parts.pre_tokenizer)])
    _check_growth(list(_flat(parts.decoder)))


def _check_depth(part: Any, name: str) -> None:
    """Count parts before they are validated, which is recursive."""
    layer, num_parts = [part], 0
    for _ in range(MAX_DEPTH):
        num_parts += len(layer)
        lists = [each for one in layer if isinstance(one, dict) for each in one.values() if isinstance(each, list)]
        layer = [each for one in lists for each in one if isinstance(each, dict) and "type" in each]
        if num_parts + len(layer) > MAX_PARTS:
            raise ValueError(f"its {name} has more than {MAX_PARTS} parts")
    if layer:  # guard: tokenizer-depth
        raise ValueError(f"its {name} is nested more than {MAX_DEPTH} deep")


def _flat(part: Any) -> Iterator[_Part]:
    if isinstance(part, _Normalizers | _PreTokenizers | _Decoders):
        name = {_Normalizers: "normalizers", _PreTokenizers: "pretokenizers", _Decoders: "decoders"}[type(part)]
        for each in getattr(part, name):
            yield from _flat(each)
    elif part is not None:
        yield part


def _check_growth(parts: list[_Part]) -> None:
    growth = 1.0
    for part in parts:
        growth *= _growth(part)
    if growth > MAX_GROWTH:  # guard: tokenizer-growth
        raise ValueError(f"its parts make up to {growth:.3g} characters of one, at most {MAX_GROWTH:g}")
    forms = sum(isinstance(part, _Plain) and part.type.startswith("NF") for part in parts)
    if sum(isinstance(part, _ByteLevel) for part in parts) > 1 or forms > _MAX_UNICODE_FORMS:  # guard: repeated-parts
        raise ValueError("it repeats a part that makes several characters of one")


def _growth(part: _Part) -> float:
    """Return the most characters that a part's own strings make of one; a piece of text has one character at least."""
    if isinstance(part, _Replace):
        return max(1.0, len(part.content) / part.pattern.min_characters)
    if isinstance(part, _Prepend):
        return 1.0 + len(part.prepend)
    adds_space = isinstance(part, _Metaspace) and part.prepend_scheme != "never"
    return 2.0 if adds_space or (isinstance(part, _ByteLevel) and part.add_prefix_space) else 1.0
