"""The run's tokenizer: trained on the corpus or loaded, and sent to joining peers as bounded, checked JSON."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from spes_p2p.config import DataConfig
from spes_p2p.data.shards import shards_tokenizer
from spes_p2p.data.sources import corpus_bytes, corpus_identity, split_documents
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.fs import cache_folder, locked, write_atomic

log = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
MAX_PAYLOAD_BYTES = 64 * 2**20
SAMPLE_CHARACTERS = 3_000_000
_DOCUMENT_CHARACTERS = 65_536
_SMALLEST_VOCABULARY = 257  # all bytes and the end of text
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_FILES = ("special_tokens.json", "tokenizer.json")
# A received tokenizer must encode and decode this text before it is accepted.
_PROBE = "The peer's 2 slots:\n\n\tdef f(x): return x  # 漢字 ünï 🙂 \x00"
_TRAINING_SECONDS = 600.0


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE; the same texts give the same tokenizer, byte for byte.

    Args:
        texts: Documents; their order affects only ties between merges.
        vocab_size: Entries including all 256 bytes and `<|endoftext|>` (bos, eos and pad); little text gives fewer.

    Raises:
        ConfigError: `vocab_size` has no room for the bytes.
        DataError: `texts` is empty.
    """
    if vocab_size < _SMALLEST_VOCABULARY:
        raise ConfigError(f"data.vocab_size={vocab_size} has no room for all bytes; set it to {_SMALLEST_VOCABULARY}+")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    remaining = iter(texts)
    if (first := next(remaining, None)) is None:
        raise DataError("no training text for a tokenizer; give more text, or set data.tokenizer")
    bpe.train_from_iterator(chain([first], remaining), trainer)
    return _wrap(bpe, {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT})


def load_tokenizer(directory_or_name: str | Path) -> PreTrainedTokenizerBase:
    """Load a Hugging Face tokenizer without running code that comes with it.

    Raises:
        DataError: it does not exist, the hub cannot be reached, or it lacks an end-of-text token or has holes in its
            ids.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory_or_name), trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"cannot load tokenizer {str(directory_or_name)!r}: {reason}; "
            f"name a folder with a tokenizer.json, or a tokenizer on the hub"
        ) from error
    _check(tokenizer, str(directory_or_name))
    return tokenizer


def resolve_tokenizer(data: DataConfig, paths: Sequence[Path], cache: Path) -> PreTrainedTokenizerBase:
    """Return the run's tokenizer: `data.tokenizer`, or a BPE trained on a sample at first use and then cached.

    Of several processes that start at once, one trains and the others wait.

    Raises:
        ConfigError: `paths` is empty with the source `files`, or `cache` cannot be written.
        DataError: the tokenizer cannot be loaded, or the corpus cannot be read.
    """
    if data.tokenizer is not None:
        return load_tokenizer(data.tokenizer)
    if data.paths:
        if (kept := shards_tokenizer(data.paths)) is None:
            raise ConfigError("token shards do not say which tokenizer made them; set data.tokenizer to that one")
        return _decode(kept[0], "the tokenizer beside the shards")
    identity = f"bpe:{data.vocab_size}:{SAMPLE_CHARACTERS}:{corpus_identity(data, paths)}"
    folder = cache_folder(cache, "tokenizers")
    file = folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
    with locked(file, _TRAINING_SECONDS):
        if not file.exists():
            tokenizer = train_bpe(_sample(data, paths), data.vocab_size)
            log.info("trained a tokenizer of %d entries", len(tokenizer))
            with write_atomic(file) as stream:
                stream.write(tokenizer_bytes(tokenizer))
    return _decode(file.read_bytes(), str(file))


def tokenizer_bytes(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """Encode a tokenizer as canonical JSON: equal tokenizers give equal bytes on every machine.

    Raises:
        DataError: the tokenizer is not a fast one, or is larger than 64 MiB.
    """
    _check(tokenizer, tokenizer.name_or_path or type(tokenizer).__name__)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # An earlier call with padding or truncation sets these.
    backend["padding"] = backend["truncation"] = None
    special = {name: str(value) for name in _SPECIAL_TOKENS if (value := getattr(tokenizer, name)) is not None}
    payload = _canonical({"special_tokens.json": _canonical(special), "tokenizer.json": _canonical(backend)}).encode()
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise DataError(f"tokenizer takes {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES}; choose a smaller one")
    return payload


def tokenizer_from_bytes(data: bytes, directory: Path) -> PreTrainedTokenizerBase:
    """Decode a peer's `tokenizer_bytes` without trusting them, and save an ordinary tokenizer folder.

    No name in the payload becomes a path, and no class or template is taken from it.

    Args:
        data: Untrusted payload.
        directory: Folder for the tokenizer's files; made if absent.

    Raises:
        DataError: the payload is too large, is not the expected JSON, has unexpected files, or is not a working
            tokenizer.
        ConfigError: `directory` cannot be written.
    """
    tokenizer = _decode(data, "the tokenizer received")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(directory)
    except OSError as error:
        raise ConfigError(f"cannot write {directory}: {error.strerror}; choose another directory") from error
    return tokenizer


def _decode(payload: bytes, where: str) -> PreTrainedTokenizerFast:
    if len(payload) > MAX_PAYLOAD_BYTES:  # guard: tokenizer-size
        raise DataError(f"{where} has {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES}; join through other peers")
    files = _parse(payload, where)
    if (
        sorted(files) != list(_FILES)  # guard: tokenizer-files
        or not all(isinstance(text, str) for text in files.values())
    ):
        raise DataError(f"{where} holds {str(sorted(files))[:200]}, not {', '.join(_FILES)}; join through other peers")
    special = _parse(files["special_tokens.json"], where)
    if not set(special) <= set(_SPECIAL_TOKENS) or not all(isinstance(token, str) for token in special.values()):
        raise DataError(f"{where} has unexpected special tokens {str(sorted(special))[:200]}; join through other peers")
    _check_ids(_parse(files["tokenizer.json"], where), where)
    try:
        backend = Tokenizer.from_str(files["tokenizer.json"])
        missing = [token for token in special.values() if backend.token_to_id(token) is None]
        backend.no_padding()
        backend.no_truncation()
        tokenizer = _wrap(backend, special)
        probe = tokenizer(_PROBE)["input_ids"]
        tokenizer.decode(probe)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises bare Exception, and panics as BaseException
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{where} is no working tokenizer: {reason}; join through other peers") from error
    if missing:
        raise DataError(f"{where} lacks its special token {missing[0][:40]!r}; join through other peers")
    _check(tokenizer, where)
    return tokenizer


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


def _wrap(backend: Tokenizer, special: dict[str, str]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def _check(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Check that ids index an embedding of `len(tokenizer)` rows, and that documents get an end-of-text token."""
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(f"{where} is no fast tokenizer; choose one with a tokenizer.json")
    if tokenizer.eos_token_id is None:
        raise DataError(f"{where} has no end-of-text token; choose a tokenizer with an eos_token")
    ids = tokenizer.get_vocab().values()
    if max(ids, default=0) >= len(tokenizer):
        raise DataError(f"{where} has ids up to {max(ids)} but {len(tokenizer)} entries; choose one without holes")


def _sample(data: DataConfig, paths: Sequence[Path]) -> Iterator[str]:
    """Yield training documents spread evenly over the corpus, about `SAMPLE_CHARACTERS` in all."""
    total = corpus_bytes(data, paths)
    share = 1.0 if total is None else min(1.0, SAMPLE_CHARACTERS / max(total, 1))
    num_seen = num_taken = 0
    for document in split_documents(data, paths, held_out=False):
        if num_taken <= share * num_seen:
            text = document.text[:_DOCUMENT_CHARACTERS]
            num_taken += len(text)
            yield text
        num_seen += len(document.text)
        if num_taken >= SAMPLE_CHARACTERS:
            return


def _canonical(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of `tokenizer_bytes`, in hex."""
    return hashlib.sha256(tokenizer_bytes(tokenizer)).hexdigest()
