"""Training sequences: a corpus's tokens, cached in memory-mapped files, and windows over them in a resumable order.

Shape legend: B sequences of a batch, T tokens of a sequence, N tokens of a corpus.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import LongTensor, Tensor

from spes_p2p.config import DataConfig
from spes_p2p.data.chat_rows import Record, conversation_files, names_text
from spes_p2p.data.confined_tokenizer import ConfinedTokenizer
from spes_p2p.data.conversations import conversation_file, encoded, encoder, probe_file
from spes_p2p.data.hub import hub_rows, load_hub
from spes_p2p.data.mixture import MixedSource, named
from spes_p2p.data.readers import batches
from spes_p2p.data.shards import TokenShards
from spes_p2p.data.shared import MIN_WINDOWS, SharedSource, check_state
from spes_p2p.data.sources import (
    SPLIT_SEED,
    WRITTEN_TOGETHER,
    Document,
    Part,
    check_corpus,
    corpus_identity,
    documents,
    hub_record,
    hub_records,
    in_held_out_part,
    is_in,
    split_number,
)
from spes_p2p.data.text_encoder import ENCODING_VERSION, TextEncoder
from spes_p2p.data.tokenizer import AnyTokenizer, text_encoder, tokenizer_digest
from spes_p2p.data.windows import TokenFile, Windows, mapped, windows_of
from spes_p2p.errors import DataError
from spes_p2p.fs import cache_folder, make_once, write_atomic

log = logging.getLogger(__name__)

BLOCK_DOCUMENTS = 1024
BLOCK_CHARACTERS = 8 * 2**20
# Below this many shards, all peers would read the same text in about the same order; parquet can be cut into more.
_MIN_SHARDS = 64
_BATCH_CHARACTERS = 2**20
_SHARES = [1.5**power for power in range(1, 10)]
"""Held-out shares to try, as multiples of the one asked for; wider steps would hold out more than is needed."""
_LAYOUT_VERSION = 1
_OLD_STATE = {"packing": "pack"}  # which was the only packing once, and not saved


def token_dtype(tokenizer: AnyTokenizer) -> np.dtype:
    """Return the smallest unsigned type that holds every id."""
    return np.dtype("<u2" if len(tokenizer) <= 2**16 else "<u4")


def encode(encoder: ConfinedTokenizer | TextEncoder, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield the ids of documents in arrays of about a million characters each."""
    for batch in batches(texts, len, _BATCH_CHARACTERS):
        yield encoder.encode(batch)


def token_file(
    data: DataConfig, tokenizer: AnyTokenizer, *, paths: Sequence[Path], cache: Path, part: Part
) -> TokenFile:
    """Return one part of an `embedded` or `files` corpus, tokenised at first use by one process while others wait.

    Of a corpus of few documents, a larger share than `data.held_out_fraction` is held out, if it takes that for enough
    windows of each part. All machines with the corpus find the same share.

    Raises:
        ConfigError: `paths` is empty, or `cache` cannot be written.
        DataError: the corpus cannot be read, or another process holds the lock for hours; token shards are bad, of
            another tokenizer, or not those that the run names.
    """
    for share in _shares(data):
        each = data.model_copy(update={"held_out_fraction": share})
        needed: list[Part] = ["held_out"] if share == data.held_out_fraction else ["held_out", "train"]
        files = {one: _part_at_share(each, tokenizer, paths, cache, one) for one in needed}
        if all(len(windows_of(file, data, cache=cache, part=one)) >= _min_windows(file) for one, file in files.items()):
            return files[part] if part in files else _part_at_share(each, tokenizer, paths, cache, part)
    return _part_at_share(data, tokenizer, paths, cache, part)


def _shares(data: DataConfig) -> Iterator[float]:
    """Yield the held-out share asked for, and larger ones to try; of conversations one that holds out a single one."""
    yield data.held_out_fraction
    if conversation_files(data.paths) is None:
        yield from (data.held_out_fraction * growth for growth in _SHARES)
    else:
        lowest = min((split_number("", each.text, SPLIT_SEED) for each in documents(data)), default=0)
        share = (lowest + 2**12) / 2**64  # more than the number, for any rounding
        yield from [share] * (share <= data.held_out_fraction * _SHARES[-1])


def _part_at_share(
    data: DataConfig, tokenizer: AnyTokenizer, paths: Sequence[Path], cache: Path, part: Part
) -> TokenFile:
    if data.paths and not names_text(data):
        if (rows := conversation_files(data.paths)) is not None:
            return conversation_file(data, tokenizer, rows, cache=cache, part=part)
        return _shards_part(data, tokenizer, cache, part)
    dtype = token_dtype(tokenizer)
    corpus = corpus_identity(data, paths, cache)
    identity = [str(ENCODING_VERSION), dtype.str, tokenizer_digest(tokenizer), data.chat_template or "", corpus]
    key = hashlib.sha256("\n".join(identity).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    folder = cache_folder(cache, "tokens")
    together = next(parts for parts in WRITTEN_TOGETHER if part in parts)
    files = {name: folder / f"{key}.{name}.bin" for name in together}
    check = partial(check_corpus, data, paths, cache, corpus)
    make_once(files[together[-1]], folder / key, lambda: _tokenise(data, tokenizer, paths, files), check)
    return TokenFile(mapped(files[part], dtype), key, tokenizer.eos_token_id)


def _shards_part(data: DataConfig, tokenizer: AnyTokenizer, cache: Path, part: Part) -> TokenFile:
    """Return one part of token shards, split as text is: documents by hash, or windows where there are none."""
    shards = TokenShards(data.paths, len(tokenizer), cache, tokenizer_digest(tokenizer))
    if data.fingerprint not in (None, shards.fingerprint):  # guard: never
        raise DataError(
            f"--data has the fingerprint {shards.fingerprint}, this run trains on {data.fingerprint}; fetch its shards"
        )
    half = {"tuning": 0, "reported": 1}.get(part)
    below, length = math.ceil(data.held_out_fraction * 2**64), data.sequence_length
    pieces = "documents" if shards.has_documents else length
    identity = f"{_LAYOUT_VERSION}:{shards.fingerprint}:{pieces}:{below}"
    tokens = shards.part(below, half, is_inside=part != "train", sequence_length=length)
    return TokenFile(tokens, hashlib.sha256(identity.encode()).hexdigest()[:32])


def _tokenise(data: DataConfig, tokenizer: AnyTokenizer, paths: Sequence[Path], files: Mapping[Part, Path]) -> None:
    """Write the parts' files, and rename them into place in their order."""
    started = time.monotonic()
    dtype, plain = token_dtype(tokenizer), text_encoder(tokenizer, data.chat_template)
    num_tokens = 0
    with contextlib.ExitStack() as stack:
        streams = {part: stack.enter_context(write_atomic(files[part])) for part in reversed(list(files))}
        for batch in batches(documents(data, paths), lambda document: len(document.text), _BATCH_CHARACTERS):
            for part, stream in streams.items():
                for ids_N in encode(plain, (document.text for document in batch if is_in(part, document, data))):
                    stream.write(ids_N.astype(dtype).tobytes())
                    num_tokens += len(ids_N)
    log.info("tokenised %d tokens of %s in %.1f s", num_tokens, " and ".join(files), time.monotonic() - started)


def _too_small(part: str, num_tokens: int, sequence_length: int, remedy: str, fewest: int = MIN_WINDOWS) -> DataError:
    """Return the error for a corpus that is too small."""
    return DataError(
        f"the {part} text has {num_tokens} tokens, less than {fewest} sequences of {sequence_length}; "
        f"{remedy}, or lower data.sequence_length"
    )


def _min_windows(file: TokenFile) -> int:
    """Return the fewest windows of a corpus: a volunteer's conversations may be few."""
    return MIN_WINDOWS if file.ends_D is None else 1


def _rng(seed: int, *more: int) -> np.random.Generator:
    return np.random.default_rng([seed % 2**64, *more])  # NumPy refuses negative seeds


class TokenSource(Protocol):
    """An endless source of training sequences, in an order that a small state restores."""

    def next_batch(self, num_sequences: int) -> LongTensor:
        """Return the next sequences, `[B, T + 1]`: inputs and, shifted by one, targets, marked as in `windows.py`.

        Raises:
            DataError: a stream broke, or a row's field does not hold text.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the order, as values that JSON can hold."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that `state_dict` returned.

        Raises:
            DataError: the state is malformed or belongs to other tokens or another order, or a stream cannot be read.
        """


class StreamSource:
    """Windows of a streamed data set: shards in a seeded order, documents shuffled block by block.

    A block is a run of documents, and its permutation depends on seed, epoch and block number alone. So the state is
    small and exact: the data set's position at the block's start, the tokens carried over from the block before, and
    the number of windows already returned. A rolling shuffle buffer would lose its content on resume.

    Args:
        data: Data set, split, text field, sequence length T.
        tokenizer: The run's tokenizer.
        order_seed: Seed of the order of shards and documents.

    Raises:
        DataError: the data set cannot be streamed or has too little text.
    """

    def __init__(self, data: DataConfig, tokenizer: AnyTokenizer, order_seed: int):
        self._data = data
        self._tokenizer = tokenizer
        self._order_seed = order_seed
        dataset = load_hub(data)
        self._base = dataset.reshard() if dataset.num_shards < _MIN_SHARDS else dataset
        self._carry = np.empty(0, dtype=np.uint32)
        self._begin_epoch(0)
        self._next_block()
        self._check_size()

    def next_batch(self, num_sequences: int) -> LongTensor:
        parts: list[Tensor] = []
        missing = num_sequences
        while missing > 0:
            while self._given == self._num_windows:
                self._next_block()
            indices = np.arange(self._given, min(self._given + missing, self._num_windows))
            parts.append(self._windows.gather(indices))
            self._given += len(indices)
            missing -= len(indices)
        return cast(LongTensor, torch.cat(parts))

    def state_dict(self) -> dict[str, Any]:
        return {**self._identity(), **copy.deepcopy(self._block_start), "given": self._given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state({**_OLD_STATE, **state}, self._identity(), "text")
        try:
            carry = np.array(state["carry"], dtype=np.uint32)
            self._begin_epoch(int(state["epoch"]), int(state["block"]), {**state["dataset"]})
            self._carry = carry
            self._next_block()
            given = int(state["given"])
        except (KeyError, TypeError, ValueError, OverflowError, IndexError) as error:
            raise DataError(f"the saved data order is damaged ({error!r}); resume from another save") from error
        if not 0 <= given <= self._num_windows:
            raise DataError(f"the saved data order has given={given} of {self._num_windows}; resume from another save")
        self._given = given

    def _check_size(self) -> None:
        """Refuse a data set with too few windows."""
        start = self.state_dict()
        found = self._num_windows
        while found < self._fewest and self._epoch == 0:
            self._next_block()
            found += self._num_windows
        if found < self._fewest:
            raise _too_small("training", len(self._tokens), self._data.sequence_length, "choose a larger data set")
        if self._block_start["block"] > 0:
            self.load_state_dict(start)

    def _identity(self) -> dict[str, Any]:
        return {
            "name": self._data.name,
            "split": self._data.split,
            "sequence_length": self._data.sequence_length,
            "packing": self._data.packing,
            "order_seed": self._order_seed,
        }

    def _begin_epoch(self, epoch: int, block: int = 0, place: Mapping[str, Any] | None = None) -> None:
        """Open an epoch's order at its start, or at a block's: `place` is the data set's position there."""
        self._epoch = epoch
        self._block = block
        # A buffer of one row shuffles shards only, and loses nothing on resume.
        self._dataset = self._base.shuffle(generator=self._generator(), buffer_size=1, max_buffer_input_shards=1)
        self._place = dict(self._dataset.state_dict() if place is None else place)
        self._open_at_place()

    def _open_at_place(self) -> None:
        # Until a row is read, the data set's own state is that of its start, whatever was loaded.
        self._dataset.load_state_dict(copy.deepcopy(self._place))
        self._rows: Iterator[dict[str, Any]] = hub_rows(self._dataset, self._data)

    def _generator(self, *more: int) -> np.random.Generator:
        return _rng(self._order_seed, self._epoch, *more)

    def _next_block(self) -> None:
        start: dict[str, Any] = {
            "epoch": self._epoch,
            "block": self._block,
            "carry": self._carry.tolist(),
            "dataset": copy.deepcopy(self._place),
        }
        try:
            records, at_end = self._read_block()
        except DataError:
            # A generator that raised then looks exhausted: reopen it, so that the next call reads this block again.
            self._open_at_place()
            raise
        if at_end and not records and self._block == 0:
            raise _too_small("training", len(self._carry), self._data.sequence_length, "choose a larger data set")
        order = self._generator(self._block).permutation(len(records))
        file = _of_records(self._data, self._tokenizer, [records[i] for i in order], self._carry)
        self._tokens, self._fewest = np.asarray(file.tokens_N), _min_windows(file)
        self._windows = windows_of(file, self._data, cache=None, part="train")
        self._num_windows = len(self._windows)
        self._given = 0
        if self._data.packing == "pack" and file.ends_D is None:  # the others cut no document here
            self._carry = self._tokens[self._num_windows * self._data.sequence_length :]
        self._block_start = start
        if at_end:
            self._begin_epoch(self._epoch + 1)
        else:
            self._block += 1
            self._place = copy.deepcopy(self._dataset.state_dict())

    def _read_block(self) -> tuple[list[Record], bool]:
        """Return training documents, and whether the data set ended."""
        found: list[Record] = []
        num_characters = 0
        while len(found) < BLOCK_DOCUMENTS and num_characters < BLOCK_CHARACTERS:
            row = next(self._rows, None)
            if row is None:
                return found, True
            record = hub_record(row, self._data)
            if record and not in_held_out_part(Document("", record.text), self._data):
                found.append(record)
                num_characters += len(record.text)
        return found, False


class WindowSource:
    """Windows of a tokenised corpus, each once per epoch, in a new order every epoch.

    Args:
        file: Training tokens.
        windows: Their windows.
        data: Packing and sequence length.
        order_seed: Seed of the order, different on each peer.

    Raises:
        DataError: the corpus has too little text.
    """

    def __init__(self, file: TokenFile, windows: Windows, data: DataConfig, order_seed: int):
        self._windows = windows
        self._num_windows = len(windows)
        if self._num_windows < _min_windows(file):
            remedy = "give more text" if file.ends_D is None else "give more conversations"
            raise _too_small("training", len(file.tokens_N), data.sequence_length, remedy, _min_windows(file))
        self._identity = {
            "tokens": file.key,
            "sequence_length": data.sequence_length,
            "packing": data.packing,
            "order_seed": order_seed,
        }
        self._order_seed = order_seed
        self._epoch = self._position = 0
        self._order = self._permutation()

    def next_batch(self, num_sequences: int) -> LongTensor:
        parts: list[np.ndarray] = []
        missing = num_sequences
        while missing > 0:
            if self._position == self._num_windows:
                self._epoch += 1
                self._position = 0
                self._order = self._permutation()
            part = self._order[self._position : self._position + missing]
            parts.append(part)
            self._position += len(part)
            missing -= len(part)
        return self._windows.gather(np.concatenate(parts))

    def state_dict(self) -> dict[str, Any]:
        return {**self._identity, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state({**_OLD_STATE, **state}, self._identity, "text")
        epoch, position = state.get("epoch"), state.get("position")
        if not (isinstance(epoch, int) and isinstance(position, int) and epoch >= 0):
            raise DataError(f"data order state has epoch={epoch!r}, position={position!r}; resume from another save")
        if not 0 <= position <= self._num_windows:
            raise DataError(
                f"data order state has position={position} of {self._num_windows}; resume from another save"
            )
        self._epoch = epoch
        self._position = position
        self._order = self._permutation()

    def _permutation(self) -> np.ndarray:
        return _rng(self._order_seed, self._epoch).permutation(self._num_windows)


def train_sources(
    data: DataConfig, tokenizer: AnyTokenizer, *, paths: Sequence[Path], cache: Path
) -> Callable[[int], TokenSource]:
    """Return what makes endless sources of the corpus's training sequences, without held-out documents.

    It takes the seed of the order, different on each peer; shared data have one order for all. Pass the same seed on
    all ranks of a peer: each draws the whole batch and takes its rows. A corpus on disk is read only once.

    Args:
        data: Source and sequence length.
        tokenizer: The run's tokenizer.
        paths: Files and folders of the source `files`.
        cache: Folder for token files.

    Raises:
        ConfigError: `paths` is empty with the source `files`, or `cache` cannot be written.
        DataError: here or where a source is made: the corpus cannot be read, or is too small: text and shards need 8
            windows, conversations one.
    """
    if data.source == "hub":
        return partial(StreamSource, data, tokenizer)
    if data.mixture:
        opened = _opened(data, tokenizer, cache)
        return lambda order_seed: _mixed(opened, data)
    file = token_file(data, tokenizer, paths=paths, cache=cache, part="train")
    windows = windows_of(file, data, cache=cache, part="train")
    if data.is_shared:
        return lambda order_seed: SharedSource(file, windows, data)  # one order for all peers
    return partial(WindowSource, file, windows, data)


def _opened(data: DataConfig, tokenizer: AnyTokenizer, cache: Path) -> dict[str, tuple[TokenFile, Windows, DataConfig]]:
    """Return tokens, windows and settings of a mixture's sources, by their name."""
    found = {}
    for name, each in data.by_source().items():
        with named(name):
            file = token_file(each, tokenizer, paths=[], cache=cache, part="train")
            windows = windows_of(file, each, cache=cache, part="train")
            found[name] = file, windows, each
    return found


def _mixed(opened: Mapping[str, tuple[TokenFile, Windows, DataConfig]], data: DataConfig) -> MixedSource:
    """Return the sources of a mixture as one."""
    sources = {}
    for name, each in opened.items():
        with named(name):
            sources[name] = SharedSource(*each)
    return MixedSource(sources, data)


def held_out_by_source(
    data: DataConfig,
    tokenizer: AnyTokenizer,
    *,
    paths: Sequence[Path],
    cache: Path,
    num_sequences: int,
    batch_size: int,
    seed: int,
) -> dict[str, list[LongTensor]]:
    """Return `held_out_batches` of each source of a mixture, by its name; of other data under an empty one.

    Each source has the same share of `num_sequences`, whatever its weight: so losses compare over the run's phases.
    """
    sources = data.by_source() if data.mixture else {"": data}
    found = {}
    for name, each in sources.items():
        with named(name) if name else contextlib.nullcontext():
            found[name] = held_out_batches(
                each,
                tokenizer,
                paths=paths,
                cache=cache,
                num_sequences=-(-num_sequences // len(sources)),
                batch_size=batch_size,
                seed=seed,
            )
    return found


def held_out_batches(
    data: DataConfig,
    tokenizer: AnyTokenizer,
    *,
    paths: Sequence[Path],
    cache: Path,
    num_sequences: int,
    batch_size: int,
    seed: int,
    part: Part = "held_out",
) -> list[LongTensor]:
    """Return fixed batches `[B, T + 1]` of held-out text; the last one may be smaller.

    Args:
        data: Source, sequence length and held-out share.
        tokenizer: The run's tokenizer.
        paths: Files and folders of the source `files`.
        cache: Folder for token files.
        num_sequences: Largest number of sequences; a corpus with fewer gives all, if it is not too small.
        batch_size: Sequences per batch, B.
        seed: Seed of the choice of windows; a stream gives its first windows.
        part: All held-out documents, or one half of them.

    Raises:
        ConfigError: as `train_sources`.
        DataError: the corpus cannot be read, or its held-out part is too small.
    """
    if data.source == "hub":
        rows = (record for record in hub_records(data) if is_in(part, Document("", record.text), data))
        file, windows = _first_windows(data, tokenizer, rows, num_sequences)
    else:
        file = token_file(data, tokenizer, paths=paths, cache=cache, part=part)
        windows = windows_of(file, data, cache=cache, part=part)
    found = len(windows)
    if found < min(_min_windows(file), num_sequences):
        remedy = "give more documents, raise data.held_out_fraction (--run.data.held-out-fraction)"
        raise _too_small("held-out", len(file.tokens_N), data.sequence_length, remedy, _min_windows(file))
    chosen = np.arange(min(found, num_sequences))
    if found > num_sequences and data.source != "hub":
        chosen = np.sort(np.random.default_rng(seed % 2**64).choice(found, num_sequences, replace=False))
    return window_batches(windows, chosen, batch_size)


def probe_windows(data: DataConfig, tokenizer: AnyTokenizer, num_sequences: int) -> LongTensor | None:
    """Return the first sequences of the run's public probe, `[B, T + 1]`; None if the run has none.

    Raises:
        DataError: the probe cannot be used.
    """
    if (file := probe_file(data, tokenizer)) is None:
        return None
    windows = windows_of(file, data, cache=None, part="held_out")
    if not len(windows):
        raise _too_small("run's data.probe", len(file.tokens_N), data.sequence_length, "its founder gives more rows", 1)
    return windows.gather(np.arange(min(len(windows), num_sequences)))


def window_batches(windows: Windows, indices: np.ndarray, batch_size: int) -> list[LongTensor]:
    """Return the windows of the given indices as batches `[B, T + 1]`; the last one may be smaller."""
    starts = range(0, len(indices), batch_size)
    return [windows.gather(indices[start : start + batch_size]) for start in starts]


def _of_records(
    data: DataConfig, tokenizer: AnyTokenizer, records: Sequence[Record], carry_N: np.ndarray | None = None
) -> TokenFile:
    """Return the tokens of some rows of a stream: of text behind those carried over, or of conversations."""
    before = [np.empty(0, np.uint32) if carry_N is None else carry_N]
    if all("text" in record.value for record in records):
        texts = (record.text for record in records)
        return TokenFile(
            np.concatenate([*before, *encode(text_encoder(tokenizer, data.chat_template), texts)]),
            "",
            tokenizer.eos_token_id,
        )
    on_bad = partial(log.warning, "left out a row: %s") if data.skip_unusable else None
    with encoder(data, tokenizer) as chat:
        found = [ids_N for _, ids_N in encoded(records, data, chat, on_bad)]
    ends_D = np.cumsum([len(part) for part in found], dtype=np.int64)
    return TokenFile(np.concatenate([before[0][:0], *found]), "", tokenizer.eos_token_id, ends_D)


def _first_windows(
    data: DataConfig, tokenizer: AnyTokenizer, records: Iterator[Record], num_windows: int
) -> tuple[TokenFile, Windows]:
    """Return the first windows of a stream of rows, which is read no further than twice what is needed."""
    taken: list[Record] = []
    while True:
        some = list(islice(records, max(16, len(taken))))
        taken += some
        file = _of_records(data, tokenizer, taken)
        windows = windows_of(file, data, cache=None, part="held_out")
        if not some or len(windows) >= num_windows:
            return file, windows
