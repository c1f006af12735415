"""Conversations, pairs of prompt and completion, and text of own files, as tokens of which some are learned.

Shape legend: N tokens, D documents.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spes_p2p.config import DataConfig
from spes_p2p.config.data import MAX_PROBE_CHARACTERS, MAX_TEMPLATE_CHARACTERS
from spes_p2p.data.chat import HIDDEN
from spes_p2p.data.chat_rows import (
    COMPLETION,
    MESSAGES,
    Record,
    Unusable,
    checked_record,
    conversation_files,
    names_text,
    records,
)
from spes_p2p.data.confined_tokenizer import ConfinedTokenizer
from spes_p2p.data.readers import OnBad, batches
from spes_p2p.data.sources import (
    WRITTEN_TOGETHER,
    Document,
    Part,
    check_corpus,
    corpus_identity,
    hub_records,
    in_held_out_part,
    is_in,
)
from spes_p2p.data.text_encoder import ENCODING_VERSION
from spes_p2p.data.tokenizer import AnyTokenizer, own_template, tokenizer_bytes, tokenizer_digest
from spes_p2p.data.windows import TokenFile, mapped
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.fs import cache_folder, make_once, write_atomic

log = logging.getLogger(__name__)

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role | capitalize + ':\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)
"""For models without a chat template: roles as words, which any tokenizer can write."""
_BATCH_RECORDS, _BATCH_CHARACTERS = 256, 2**18
_FIRST_ROWS, _FIRST_HELD_OUT = 100, 16
"""Of a stream: rows that say whether it holds conversations, and those among which prompts are looked for."""


class Prompt(NamedTuple):
    """The beginning of a held-out conversation: ids up to the first reply, that reply, and the id that ends one."""

    ids: list[int]
    truth: str
    end_of_text: int


# ---------------------------------------------------------------------- template and probe


def founding(data: DataConfig, tokenizer: Any) -> DataConfig:
    """Return the settings of a new run with the text of its chat template and of its probe, in place of their files.

    Args:
        data: The founder's; `chat_template` and `probe` are texts or files.
        tokenizer: The run's, whose chat template counts where none is set.

    Raises:
        ConfigError: a file cannot be read, or is too large for a manifest.
    """
    files = conversation_files(data.paths) or _streams_chat(data)
    is_tokens = bool(data.paths) and not files and not names_text(data)
    unread = [] if data.source == "hub" else ["name", "split"]
    for name in [*unread, *["text_field"] * (is_tokens or data.source == "embedded")]:
        if (value := getattr(data, name)) != DataConfig.model_fields[name].default:
            log.warning("data.%s=%s has no effect: the run learns from %s", name, value, data.in_words())
    template = _text_or_file(data.chat_template, "data.chat_template", MAX_TEMPLATE_CHARACTERS)
    own = own_template(tokenizer)
    if not template and isinstance(own, str) and own.strip():
        template = own
        if len(own) > MAX_TEMPLATE_CHARACTERS and not files:
            log.warning("the tokenizer's chat template has %d characters; the run goes without", len(own))
            template = None
    if not template and files:
        begins = tokenizer.bos_token_id is not None and tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
        template = "{{ bos_token }}" * begins + PLAIN_TEMPLATE
        log.info("the tokenizer has no chat template; replies are written after 'Assistant:' (docs/data.md)")
    if template and len(template) > MAX_TEMPLATE_CHARACTERS:
        raise ConfigError(
            f"the tokenizer's chat template has {len(template)} characters, at most {MAX_TEMPLATE_CHARACTERS}; set "
            f"data.chat_template to a shorter one"
        )
    probe = _text_or_file(data.probe, "data.probe", MAX_PROBE_CHARACTERS)
    update = {"chat_template": template, "probe": probe}
    if files and data.packing == "pack" and data.separate_documents is None:
        update["packing"] = "best_fit"  # which cuts few conversations
    return data.model_copy(update=update)


def _streams_chat(data: DataConfig) -> bool:
    """Tell whether a hub data set holds conversations, or pairs of prompt and completion, by its first rows."""
    first = itertools.islice(hub_records(data), _FIRST_ROWS) if data.source == "hub" else ()
    return any("text" not in record.value for record in first)


def _text_or_file(value: str | None, setting: str, most: int) -> str | None:
    """Return a setting's text; without a brace it names a file."""
    if value is None or "{" in value:
        return value
    path = Path(value).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{setting}={value}: cannot read the file: {reason}; name another") from error
    if len(text) > most:
        raise ConfigError(f"{setting}={value} has {len(text)} characters, at most {most}; make it shorter")
    return text


@contextlib.contextmanager
def encoder(data: DataConfig, tokenizer: AnyTokenizer) -> Iterator[ConfinedTokenizer]:
    """Give the block the run's tokenizer with its chat template, in a process of its own."""
    template = data.chat_template or ""
    if isinstance(tokenizer, ConfinedTokenizer):
        assert tokenizer.template == template, "a run has one chat template"
        yield tokenizer
        return
    with tempfile.TemporaryDirectory() as folder:
        confined = ConfinedTokenizer(tokenizer_bytes(tokenizer), Path(folder), len(tokenizer), template)
        try:
            yield confined
        finally:
            confined.close()


# ---------------------------------------------------------------------- tokens


def encoded(
    source: Iterable[Record], data: DataConfig, chat: ConfinedTokenizer, on_bad: OnBad | None = None
) -> Iterator[tuple[Record, np.ndarray]]:
    """Yield records with their ids, uint32, of which those with the bit `HIDDEN` are not learned.

    Raises:
        DataError: a record cannot be rendered, or nothing of it is learned, and `on_bad` does not take the error.
    """
    for batch in batches(source, lambda record: len(record.text), _BATCH_CHARACTERS, _BATCH_RECORDS):
        if not data.chat_template and (chats := [record for record in batch if MESSAGES in record.value]):
            raise DataError(
                f"{chats[0].where} is a conversation, but this run has no chat template; its founder sets "
                f"data.chat_template"
            )
        for record, ids_N in zip(batch, chat.encode_records([record.value for record in batch]), strict=True):
            if not isinstance(ids_N, str):
                yield record, ids_N
                continue
            problem = DataError(f"{record.where}: {ids_N}")
            if on_bad is None:
                raise problem
            on_bad(problem)


def _document(record: Record) -> Document:
    return Document(record.where, record.text)


def conversation_file(
    data: DataConfig, tokenizer: AnyTokenizer, files: Sequence[Path], *, cache: Path, part: Part
) -> TokenFile:
    """Return one part of a volunteer's conversations, tokenised at first use by one process while others wait.

    Raises:
        ConfigError: `cache` cannot be written.
        DataError: a row cannot be used, or none can.
    """
    if data.fingerprint is not None:
        raise DataError(
            f"this run trains on token shards with the fingerprint {data.fingerprint}, and {files[0]} holds rows; give "
            f"--data its shards"
        )
    corpus = corpus_identity(data, files, cache)
    identity = [f"{ENCODING_VERSION}:conversations", tokenizer_digest(tokenizer), data.chat_template or "", corpus]
    key = hashlib.sha256("\n".join(identity).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    folder = cache_folder(cache, "tokens")
    together = next(parts for parts in WRITTEN_TOGETHER if part in parts)
    targets = {name: (folder / f"{key}.{name}.ids", folder / f"{key}.{name}.ends") for name in together}
    done = targets[together[-1]][-1]
    check = partial(check_corpus, data, files, cache, corpus)
    make_once(done, folder / key, lambda: _tokenise(data, tokenizer, files, targets), check)
    ids, ends = targets[part]
    ends_D = np.fromfile(ends, "<i8")
    lengths_D = np.diff(ends_D, prepend=0)
    if num_long := int((lengths_D > data.sequence_length + 1).sum()):
        log.warning(
            "%d of %d conversations of the %s part are longer than data.sequence_length=%d tokens; the rest of each "
            "begins a sequence without what came before%s",
            *(num_long, len(ends_D), part, data.sequence_length, ", or is dropped" if data.packing == "trunc" else ""),
        )
    return TokenFile(mapped(ids, "<u4"), key, tokenizer.eos_token_id, ends_D)


def num_tokens(data: DataConfig, tokenizer: AnyTokenizer, cache: Path) -> tuple[int, int] | None:
    """Return the tokens of one pass over a volunteer's conversations, and the learned ones; None without conversations.

    Raises:
        ConfigError, DataError: as `conversation_file`.
    """
    if (files := conversation_files(data.paths)) is None:
        return None
    ids_N = np.asarray(conversation_file(data, tokenizer, files, cache=cache, part="train").tokens_N)
    return len(ids_N), int((ids_N < HIDDEN).sum())


def _tokenise(
    data: DataConfig, tokenizer: AnyTokenizer, files: Sequence[Path], targets: Mapping[Part, tuple[Path, Path]]
) -> None:
    """Write ids and ends of each part, and rename them into place in their order."""
    unusable = Unusable() if data.skip_unusable else None
    rows = records(files, data, unusable)
    first = [*itertools.islice(rows, _BATCH_RECORDS)]  # whose mistakes are told before a process starts
    num_records = num_tokens = num_learned = 0
    ends = dict.fromkeys(targets, 0)
    with contextlib.ExitStack() as stack:
        paths = [path for pair in targets.values() for path in pair]
        streams = {path: stack.enter_context(write_atomic(path)) for path in reversed(paths)}
        chat = stack.enter_context(encoder(data, tokenizer))
        for record, ids_N in encoded(itertools.chain(first, rows), data, chat, unusable):
            num_records += 1
            num_tokens += len(ids_N)
            num_learned += int((ids_N < HIDDEN).sum())
            for part, (ids, end) in targets.items():
                if is_in(part, _document(record), data):
                    ends[part] += len(ids_N)
                    streams[ids].write(ids_N.tobytes())
                    streams[end].write(np.int64(ends[part]).astype("<i8").tobytes())
        if not num_records:
            why = f": {unusable.first}" if unusable and unusable.first else "; name files with rows"
            raise DataError(f"{files[0]} has no conversation that can be used{why}")
    if unusable and unusable.count:
        log.warning("left out %d of %d rows: %s", unusable.count, unusable.count + num_records, unusable.first)
    log.info("tokenised %d conversations: %d tokens, %d of them learned", num_records, num_tokens, num_learned)


# ---------------------------------------------------------------------- probe and prompts


def probe_records(data: DataConfig) -> list[Record]:
    """Return the conversations of the run's probe, which its manifest brings.

    Raises:
        DataError: a line of it cannot be used.
    """
    found = []
    for number, line in enumerate((data.probe or "").splitlines(), 1):
        if line.strip():
            where = f"the run's data.probe, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is not JSON; write one object per line") from error
            found.append(checked_record(row, data.text_field, where))
    return found


def probe_file(data: DataConfig, tokenizer: AnyTokenizer) -> TokenFile | None:
    """Return the tokens of the run's public probe; None if it has none.

    Raises:
        DataError: the probe cannot be used.
    """
    if data.probe is None:
        return None
    with encoder(data, tokenizer) as chat:
        parts = [ids_N for _, ids_N in encoded(probe_records(data), data, chat)]
    if not parts:
        raise DataError("the run's data.probe has no rows; its founder gives a file with some")
    return TokenFile(np.concatenate(parts), "", tokenizer.eos_token_id, np.cumsum([len(part) for part in parts]))


def held_out_prompts(
    data: DataConfig, tokenizer: AnyTokenizer, files: Sequence[Path] | None, number: int
) -> list[Prompt]:
    """Return the beginnings of the first held-out conversations, or without files of the probe's.

    Args:
        data: The run's.
        tokenizer: The run's.
        files: A volunteer's own.
        number: Conversations at most.

    Raises:
        DataError: a row cannot be used.
    """
    unusable = Unusable() if data.skip_unusable else None
    if data.source == "hub":
        held_out = (record for record in hub_records(data) if in_held_out_part(_document(record), data))
        source: Iterable[Record] = itertools.islice(held_out, _FIRST_HELD_OUT)
    elif files is None:
        source = probe_records(data)
    else:
        source = (record for record in records(files, data, unusable) if in_held_out_part(_document(record), data))
    chosen = list(itertools.islice((record for record in source if "text" not in record.value), number))
    with encoder(data, tokenizer) as chat:
        found = chat.encode_records([{**record.value, "only_prompt": True} for record in chosen]) if chosen else []
    prompts = []
    for record, ids_N in zip(chosen, found, strict=True):
        if not isinstance(ids_N, str) and 0 < len(ids_N) < data.sequence_length:
            messages = record.value.get(MESSAGES, [])
            replies = [message["content"] for message in messages if message["role"] == "assistant"]
            truth = [*replies, record.value.get(COMPLETION, "")][0]
            prompts.append(Prompt((ids_N & np.uint32(HIDDEN - 1)).tolist(), truth, chat.eos_token_id))
    return prompts
