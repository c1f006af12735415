"""The run's tokenizer: trained on the corpus or loaded, and encoded as the document that joining peers get."""

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

from spes_p2p.config import DataConfig, TokenizerSettings
from spes_p2p.data.chat_rows import conversation_files, names_text
from spes_p2p.data.confined_tokenizer import ConfinedTokenizer
from spes_p2p.data.shards import shards_tokenizer
from spes_p2p.data.sources import corpus_bytes, corpus_identity, split_documents
from spes_p2p.data.text_encoder import TextEncoder
from spes_p2p.data.tokenizer_document import MAX_PAYLOAD_BYTES, SPECIAL_TOKENS, open_document
from spes_p2p.errors import ConfigError, DataError, one_line
from spes_p2p.fs import cache_folder, locked, write_atomic

AnyTokenizer = PreTrainedTokenizerBase | ConfinedTokenizer
log = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
SAMPLE_CHARACTERS = 3_000_000
DOCUMENT_START = b'{"special_tokens.json":'
"""How `tokenizer_bytes` begins."""
_DOCUMENT_CHARACTERS = 65_536
MAX_NAMED_CHARACTERS = 2**14
_SMALLEST_VOCABULARY = 257  # all bytes and the end of text
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
    """Load a Hugging Face tokenizer, or one beside shards of `spes tokenize`; no code that comes with it runs.

    Raises:
        DataError: it does not exist, the hub cannot be reached, or it lacks an end-of-text token or has holes in its
            ids.
    """
    try:
        if (payload := _document_at(Path(directory_or_name))) is not None:
            return _decode(payload, str(directory_or_name))
        tokenizer = AutoTokenizer.from_pretrained(str(directory_or_name), trust_remote_code=False)
    except DataError:
        raise
    except Exception as error:  # tokenizers raises bare ones
        raise DataError(
            f"cannot load tokenizer {str(directory_or_name)!r}: {one_line(error)}; "
            f"name a folder with a tokenizer.json, or a tokenizer on the hub (data.tokenizer)"
        ) from error
    _check(tokenizer, str(directory_or_name))
    return tokenizer


def _document_at(path: Path) -> bytes | None:
    """Return a tokenizer as `tokenizer_bytes` encodes it, from a file or its folder; None if it is none."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        is_ours = stream.read(len(DOCUMENT_START)) == DOCUMENT_START
    return file.read_bytes() if is_ours and file.stat().st_size <= MAX_PAYLOAD_BYTES else None


def resolve_tokenizer(data: DataConfig, paths: Sequence[Path], cache: Path) -> PreTrainedTokenizerBase:
    """Return the run's tokenizer: `data.tokenizer`, or a BPE trained on a sample at first use and then cached.

    Of several processes that start at once, one trains and the others wait.

    Raises:
        ConfigError: `paths` is empty with the source `files`, or `cache` cannot be written.
        DataError: the tokenizer cannot be loaded, or the corpus cannot be read.
    """
    if data.tokenizer is not None:
        return given(data, load_tokenizer(data.tokenizer))
    if (shards := data.all_paths) and conversation_files(shards) is None and not names_text(data):
        if (kept := shards_tokenizer(shards)) is None:
            raise ConfigError("token shards do not say which tokenizer made them; set data.tokenizer to that one")
        return given(data, _decode(kept, "the tokenizer beside the shards"))
    identity = f"bpe:{data.vocab_size}:{SAMPLE_CHARACTERS}:{corpus_identity(data, paths, cache)}"
    folder = cache_folder(cache, "tokenizers")
    file = folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
    with locked(file, _TRAINING_SECONDS):
        if not file.exists():
            tokenizer = train_bpe(_sample(data, paths), data.vocab_size)
            log.info("trained a tokenizer of %d entries", len(tokenizer))
            with write_atomic(file) as stream:
                stream.write(tokenizer_bytes(tokenizer))
    return _decode(file.read_bytes(), str(file))


def given(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer that is not trained here, and say so if another size was asked for."""
    if data.vocab_size not in (DataConfig.model_fields["vocab_size"].default, len(tokenizer)):
        log.warning(
            "data.vocab_size=%d has no effect: the tokenizer of the shards, of --from or data.tokenizer has %d entries",
            *(data.vocab_size, len(tokenizer)),
        )
    return tokenizer


def tokenizer_bytes(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """Encode a tokenizer as canonical JSON: equal tokenizers give equal bytes on every machine.

    Raises:
        DataError: the tokenizer is not a fast one, or is larger than 64 MiB.
    """
    _check(tokenizer, tokenizer.name_or_path or type(tokenizer).__name__)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # An earlier call with padding or truncation sets these.
    backend["padding"] = backend["truncation"] = None
    special = _special_tokens(tokenizer)
    payload = _canonical({"special_tokens.json": _canonical(special), "tokenizer.json": _canonical(backend)}).encode()
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise DataError(f"tokenizer takes {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES}; choose a smaller one")
    return payload


def tokenizer_settings(tokenizer: PreTrainedTokenizerBase) -> TokenizerSettings:
    """Return what a tokenizer says beyond its document, without templates of more than 16,384 characters."""
    templates = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    named = {name: text for name, text in templates.items() if name != "default"}
    if sum(map(len, named.values())) > MAX_NAMED_CHARACTERS:
        log.warning("the chat templates %s are too long for a manifest; exports go without", ", ".join(named))
        named = {}
    roles = tokenizer.special_tokens_map.items()
    return TokenizerSettings(
        model_max_length=tokenizer.model_max_length if tokenizer.model_max_length <= 2**31 else None,
        padding_side="left" if tokenizer.padding_side == "left" else "right",
        truncation_side="left" if tokenizer.truncation_side == "left" else "right",
        clean_up_tokenization_spaces=bool(tokenizer.clean_up_tokenization_spaces),
        special_tokens={role: str(token) for role, token in roles if role not in SPECIAL_TOKENS},
        extra_special_tokens=list(map(str, tokenizer.extra_special_tokens)),
        chat_templates=named,
    )


def write_tokenizer_settings(folder: Path, settings: TokenizerSettings) -> None:
    """Add to a saved tokenizer what `tokenizer_settings` has returned, as transformers reads it."""
    file = folder / "tokenizer_config.json"
    fields = settings.model_dump(exclude={"special_tokens", "chat_templates"}, exclude_none=True)
    named = {"model_specific_special_tokens": settings.special_tokens} if settings.special_tokens else {}
    config = json.loads(file.read_bytes()) | fields | settings.special_tokens | named
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")
    for name, template in settings.chat_templates.items():
        path = folder / "additional_chat_templates" / f"{name}.jinja"
        path.parent.mkdir(exist_ok=True)
        path.write_text(template, encoding="utf-8")


def text_encoder(tokenizer: AnyTokenizer, template: str | None = None) -> ConfinedTokenizer | TextEncoder:
    """Return what encodes text: a confined tokenizer itself, or a copy of this machine's own.

    Args:
        tokenizer: It.
        template: The chat template, which a confined tokenizer already has.
    """
    if isinstance(tokenizer, ConfinedTokenizer):
        return tokenizer
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    return TextEncoder(backend, _special_tokens(tokenizer), template or "")


def own_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the chat template that comes with a tokenizer, or None."""
    own = getattr(tokenizer, "chat_template", None)
    return own.get("default") if isinstance(own, dict) else own


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    return {name: str(value) for name in SPECIAL_TOKENS if (value := getattr(tokenizer, name)) is not None}


def _decode(payload: bytes, where: str) -> PreTrainedTokenizerFast:
    """Decode a document of this machine's own."""
    document = open_document(payload, where)
    return _wrap(document.backend, document.special)


def _wrap(backend: Tokenizer, special: dict[str, str]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def _check(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Check that ids index an embedding of `len(tokenizer)` rows, and that documents get an end-of-text token."""
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(f"{where} is no fast tokenizer; choose one with a tokenizer.json")
    if tokenizer.eos_token_id is None:
        raise DataError(f"{where} has no end-of-text token; choose a tokenizer with an eos_token")
    ids = tokenizer.get_vocab().values()
    if len(ids) <= len(set(tokenizer.all_special_tokens)):  # transformers makes one where a folder has no file of any
        raise DataError(f"{where} has no tokenizer; set data.tokenizer to a folder with a tokenizer.json")
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


def tokenizer_digest(tokenizer: AnyTokenizer) -> str:
    """Return the SHA-256 of `tokenizer_bytes`, in hex."""
    if isinstance(tokenizer, ConfinedTokenizer):
        return tokenizer.digest
    return hashlib.sha256(tokenizer_bytes(tokenizer)).hexdigest()
