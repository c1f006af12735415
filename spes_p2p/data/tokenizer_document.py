"""The document that a tokenizer travels in: canonical JSON, checked before the library for tokenizers sees it.

It imports neither torch nor transformers, because the process that reads strangers' documents is to be small.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from spes_p2p.data.tokenizer_parts import check_parts
from spes_p2p.errors import DataError, one_line

MAX_PAYLOAD_BYTES = 64 * 2**20
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
FILES = ("special_tokens.json", "tokenizer.json")
# A tokenizer must encode and decode this text before it is accepted.
_PROBE = "The peer's 2 slots:\n\n\tdef f(x): return x  # 漢字 ünï 🙂 \x00"


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
            backend.add_special_tokens(list(special.values()))  # as transformers does
        probe = backend.encode(_PROBE).ids
        backend.decode(probe)
        num_entries, largest = backend.get_vocab_size(), max(backend.get_vocab().values(), default=0)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises bare Exception, and panics as BaseException
        raise DataError(f"{where} is no working tokenizer: {one_line(error)}; join through other peers") from error
    if missing:
        raise DataError(f"{where} lacks its special token {missing[0][:40]!r}; join through other peers")
    if "eos_token" not in special:
        raise DataError(f"{where} has no end-of-text token; choose a tokenizer with an eos_token")
    if largest >= num_entries:
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
