"""Windows: sequences of one length, cut from a corpus's documents and put together in one of four ways (`packing`).

A window holds T inputs and, shifted by one, T targets: T + 1 numbers, int64. A number below 0 is marked, and no target.
Above `CONTEXT / 2` its token id is `~number`, and it begins a document, so nothing in front of it predicts it. Below,
its id is `number - CONTEXT`: it is read but not learned, as a question of which only the answer is. Padding is
documents of one token 0.

Shape legend: B windows of a batch, T tokens of a sequence, N tokens of a corpus, D documents, S spans of tokens that
lie together and belong to one document, W windows.
"""

from __future__ import annotations

import hashlib
import logging
import time
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import LongTensor

from spes_p2p.config import DataConfig, Packing
from spes_p2p.data.chat import HIDDEN
from spes_p2p.data.shards import TokenPart
from spes_p2p.data.sources import Part
from spes_p2p.errors import DataError
from spes_p2p.fs import cache_folder, make_once, write_atomic

log = logging.getLogger(__name__)

PADDING = ~0
CONTEXT = -(2**32)
BUFFER_DOCUMENTS = 2**18
"""Documents that `best_fit` sorts at a time; more need more memory, and hardly save padding."""
SCAN_TOKENS = 2**22
MAX_PERIOD, MAX_TIMES = 13, 32
"""Of OLMo's filter: tokens that repeat, and how often in a row is too often."""
_LAYOUT_VERSION = 1


class TokenFile(NamedTuple):
    """One part of a tokenised corpus.

    Attributes:
        tokens_N: uint16 or uint32, read-only; documents in order, each followed by the end-of-text token. Of token
            shards, their part.
        key: Digest of tokenizer, corpus and settings; equal keys mean equal tokens.
        end_of_text: The id after each document of text. Token shards know their documents without it.
        ends_D: Where each document ends, of files that say so: those of conversations, whose tokens may have the bit
            `HIDDEN`.
    """

    tokens_N: np.ndarray | TokenPart
    key: str
    end_of_text: int | None = None
    ends_D: np.ndarray | None = None


class Windows(Protocol):
    """The windows of a corpus, by their index."""

    def __len__(self) -> int:
        """The number of windows."""

    def gather(self, indices_B: np.ndarray) -> LongTensor:
        """Copy windows to `[B, T + 1]` int64.

        Raises:
            DataError: a file was changed, or has ids beyond the vocabulary.
        """


class PackedWindows:
    """Packing `pack`: documents joined and cut every T tokens.

    Window i covers tokens i*T to i*T + T, and shares its last token with the next window; a tail is dropped.

    Args:
        file: The tokens.
        sequence_length: T, the tokens of a window.
        is_separate: Whether the first token of a document is marked.

    Raises:
        DataError: documents are to be separate, and token shards do not say where they end.
    """

    def __init__(self, file: TokenFile, sequence_length: int, *, is_separate: bool = False) -> None:
        self._file = file
        self._sequence_length = sequence_length
        self._is_separate = is_separate
        self._ends_D = file.ends_D
        if is_separate and isinstance(file.tokens_N, TokenPart):
            lengths = [np.empty(0, np.int64), *_document_lengths(file)]
            self._ends_D = np.cumsum(np.concatenate(lengths))

    def __len__(self) -> int:
        return max(len(self._file.tokens_N) - 1, 0) // self._sequence_length

    def gather(self, indices_B: np.ndarray) -> LongTensor:
        first_B = np.asarray(indices_B) * self._sequence_length
        rows = _read(self._file.tokens_N, first_B, np.full(len(first_B), self._sequence_length + 1))
        windows_BT1 = np.stack([_numbers(row) for row in rows])
        if self._is_separate:
            begins_BT = self._begins(first_B, windows_BT1)
            windows_BT1[:, 1:][begins_BT] = ~_ids(windows_BT1[:, 1:][begins_BT])
        return cast(LongTensor, torch.from_numpy(windows_BT1))

    def _begins(self, first_B: np.ndarray, windows_BT1: np.ndarray) -> np.ndarray:
        """Tell which tokens behind the first of each window begin a document."""
        if self._ends_D is None:
            return windows_BT1[:, :-1] == self._file.end_of_text
        begins_BT = np.zeros((len(first_B), self._sequence_length), bool)
        for row, first in enumerate(first_B.tolist()):
            low, high = np.searchsorted(self._ends_D, [first + 1, first + self._sequence_length + 1])
            begins_BT[row, self._ends_D[low:high] - first - 1] = True
        return begins_BT


class DocumentWindows:
    """Windows of whole spans of documents, with padding behind the last one.

    Args:
        tokens_N: The tokens.
        spans_S2: First token and number of tokens of each span, window after window.
        stops_W: For each window, the spans up to its end.
        sequence_length: T, the tokens of a window.
        is_separate: Whether the first token of each span behind another is marked.
    """

    def __init__(
        self,
        tokens_N: np.ndarray | TokenPart,
        spans_S2: np.ndarray,
        stops_W: np.ndarray,
        sequence_length: int,
        *,
        is_separate: bool,
    ) -> None:
        self._tokens_N = tokens_N
        self._spans_S2 = spans_S2
        self._stops_W = stops_W
        self._sequence_length = sequence_length
        self._is_separate = is_separate

    def __len__(self) -> int:
        return len(self._stops_W)

    def gather(self, indices_B: np.ndarray) -> LongTensor:
        stops = [(int(self._stops_W[i - 1]) if i else 0, int(self._stops_W[i])) for i in np.asarray(indices_B).tolist()]
        spans_S2 = np.concatenate([self._spans_S2[first:stop] for first, stop in stops])
        pieces = iter(_read(self._tokens_N, spans_S2[:, 0], spans_S2[:, 1]))
        windows_BT1 = np.full((len(stops), self._sequence_length + 1), PADDING, np.int64)
        for row_T1, (first, stop) in zip(windows_BT1, stops, strict=True):
            position = 0
            for _ in range(first, stop):
                ids = next(pieces)
                row_T1[position : position + len(ids)] = _numbers(ids)
                if position and self._is_separate:
                    row_T1[position] = ~_ids(row_T1[position])
                position += len(ids)
        return cast(LongTensor, torch.from_numpy(windows_BT1))


class FilteredWindows:
    """Windows of which nothing is learned where a few tokens come again and again: they keep their place.

    Source: OLMo's `instance_filter` (allenai/OLMo, `find_periodic_sequences`), with its numbers, as SPES sets it.
    """

    def __init__(self, windows: Windows) -> None:
        self._windows = windows

    def __len__(self) -> int:
        return len(self._windows)

    def gather(self, indices_B: np.ndarray) -> LongTensor:
        windows_BT1 = self._windows.gather(indices_B)
        is_repetitive_B = torch.from_numpy(are_repetitive(windows_BT1.numpy()))
        hidden_BT1 = torch.where(windows_BT1 >= 0, windows_BT1 + CONTEXT, windows_BT1)
        return cast(LongTensor, torch.where(is_repetitive_B[:, None], hidden_BT1, windows_BT1))


def are_repetitive(windows_BT1: np.ndarray) -> np.ndarray:
    """Tell which windows repeat 1 to `MAX_PERIOD` tokens `MAX_TIMES` times in a row; padding repeats nothing."""
    found_B = np.zeros(len(windows_BT1), bool)
    for period in range(1, MAX_PERIOD + 1):
        later_BN = windows_BT1[:, period:]
        is_equal_BN = (later_BN == windows_BT1[:, :-period]) & (later_BN != PADDING)
        needed = (MAX_TIMES - 1) * period
        if needed > is_equal_BN.shape[1]:
            break
        sums_BN1 = np.pad(np.cumsum(is_equal_BN, axis=1), ((0, 0), (1, 0)))
        found_B |= (sums_BN1[:, needed:] - sums_BN1[:, :-needed] == needed).any(axis=1)
    return found_B


def windows_of(file: TokenFile, data: DataConfig, *, cache: Path | None, part: Part) -> Windows:
    """Return the windows of one part of a corpus, laid out at first use by one process while others wait.

    Args:
        file: The part.
        data: Packing and sequence length.
        cache: Folder that keeps the layout, 16 bytes a span; None makes it in memory.
        part: The part's name.

    Raises:
        ConfigError: `cache` cannot be written.
        DataError: token shards do not say where documents end, and `data` asks for them.
    """
    windows = _packed(file, data, cache=cache, part=part)
    return FilteredWindows(windows) if data.repetition_filter and part == "train" else windows


def _packed(file: TokenFile, data: DataConfig, *, cache: Path | None, part: Part) -> Windows:
    length, is_separate = data.sequence_length, data.are_separate
    if file.ends_D is not None and data.separate_documents is None:
        is_separate = True  # conversations
    if data.packing == "pack":
        return PackedWindows(file, length, is_separate=is_separate)
    if cache is None:
        parts = [(np.empty((0, 2), np.int64), np.empty(0, np.int64)), *lay_out(file, length, data.packing)]
        spans_S2, stops_W = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    else:
        spans_S2, stops_W = _kept_layout(file, length, data.packing, cache, part)
    return DocumentWindows(file.tokens_N, spans_S2, stops_W, length, is_separate=is_separate)


def _kept_layout(
    file: TokenFile, sequence_length: int, packing: Packing, cache: Path, part: Part
) -> tuple[np.ndarray, np.ndarray]:
    identity = f"{_LAYOUT_VERSION}:{file.key}:{part}:{sequence_length}:{packing}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:32]
    folder = cache_folder(cache, "windows")
    spans, stops = folder / f"{key}.spans", folder / f"{key}.stops"
    make_once(stops, folder / key, lambda: _write_layout(file, sequence_length, packing, spans, stops))
    return mapped(spans, np.int64).reshape(-1, 2), mapped(stops, np.int64)


def _write_layout(file: TokenFile, sequence_length: int, packing: Packing, spans: Path, stops: Path) -> None:
    """Write both files, the second one last."""
    started, num_windows, num_tokens = time.monotonic(), 0, 0
    with write_atomic(stops) as stops_stream, write_atomic(spans) as spans_stream:
        for spans_S2, stops_W in lay_out(file, sequence_length, packing):
            spans_stream.write(spans_S2.tobytes())
            stops_stream.write(stops_W.tobytes())
            num_windows += len(stops_W)
            num_tokens += int(spans_S2[:, 1].sum())
    log.info(
        "laid out %d tokens in %d windows by %s in %.1f s, %.3f %% padding",
        *(num_tokens, num_windows, packing, time.monotonic() - started),
        100 * (1 - num_tokens / max(num_windows * (sequence_length + 1), 1)),
    )


def mapped(file: Path, dtype: DTypeLike) -> np.ndarray:
    """Map a file's numbers into memory, if there are any: an empty file cannot be mapped."""
    return np.memmap(file, dtype, mode="r") if file.stat().st_size else np.empty(0, dtype)


def _numbers(ids_N: np.ndarray) -> np.ndarray:
    """Return a file's tokens as a window's numbers, int64."""
    numbers_N = ids_N.astype(np.int64)
    if ids_N.dtype.itemsize == 4:
        numbers_N[numbers_N >= HIDDEN] += CONTEXT - HIDDEN
    return numbers_N


def _ids(numbers: np.ndarray) -> np.ndarray:
    """Return the ids of numbers that begin no document."""
    return np.where(numbers < 0, numbers - CONTEXT, numbers)


def _read(tokens_N: np.ndarray | TokenPart, first_S: np.ndarray, count_S: np.ndarray) -> Iterable[np.ndarray]:
    """Return the ids of each span."""
    if isinstance(tokens_N, TokenPart):
        return tokens_N.spans(first_S, count_S)
    return (tokens_N[first : first + count] for first, count in zip(first_S.tolist(), count_S.tolist(), strict=True))


# ---------------------------------------------------------------------- layout


def lay_out(file: TokenFile, sequence_length: int, packing: Packing) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield spans `[S, 2]` (first token, number of tokens), and for each window the spans up to its end, `[W]`.

    A document of L tokens is cut every T tokens, where the one at the cut is the last target before it and the first
    input behind it, so that every token but the first is a target once. `trunc` keeps the first piece only. `overflow`
    gives each piece a window. `best_fit` puts pieces together. Documents of one token have no target and are left
    out, and so are the pieces of conversations of which nothing is learned.

    Raises:
        DataError: token shards do not say where documents end.
    """
    position = num_spans = 0
    learned_N1 = _num_learned(file)
    for lengths_D in _buffers(_document_lengths(file)):
        starts_D = position + np.cumsum(lengths_D) - lengths_D
        position += int(lengths_D.sum())
        spans_S2 = _pieces(starts_D, lengths_D, sequence_length, only_first=packing == "trunc")
        if learned_N1 is not None:
            first_S, count_S = spans_S2.T
            spans_S2 = spans_S2[learned_N1[first_S + count_S] > learned_N1[first_S + 1]]
        if not len(spans_S2):
            continue
        if packing == "best_fit":
            window_S = best_fit(spans_S2[:, 1], sequence_length + 1)
            spans_S2 = spans_S2[np.argsort(window_S, kind="stable")]
            stops_W = num_spans + np.cumsum(np.bincount(window_S))
        else:
            stops_W = num_spans + np.arange(1, len(spans_S2) + 1)
        num_spans += len(spans_S2)
        yield spans_S2, stops_W


def _num_learned(file: TokenFile) -> np.ndarray | None:
    """Return the learned tokens in front of each token of a file of conversations, `[N + 1]`; None of text."""
    if file.ends_D is None or isinstance(file.tokens_N, TokenPart):
        return None
    return np.concatenate([[0], np.cumsum(file.tokens_N < HIDDEN)])


def best_fit(count_S: np.ndarray, capacity: int) -> np.ndarray:
    """Return a window for each span, so that few windows hold them all: best-fit decreasing.

    From the longest span down, each goes to the window with the least room that holds it, or to a new one.

    Source: Fewer Truncations Improve Language Modeling, section 3 (https://arxiv.org/abs/2404.10830).

    Args:
        count_S: Tokens of each span, at least 2 and at most `capacity`.
        capacity: Tokens of a window.
    """
    window_S = np.empty(len(count_S), np.int64)
    rooms: list[int] = []  # of the windows that are not full, each once, ascending
    windows_by_room: dict[int, list[int]] = {}
    num_windows = 0
    order = np.argsort(-count_S, kind="stable")
    for index, count in zip(order.tolist(), count_S[order].tolist(), strict=True):
        at = bisect_left(rooms, count)
        if at == len(rooms):
            room, window = capacity, num_windows
            num_windows += 1
        else:
            room = rooms[at]
            window = windows_by_room[room].pop()
            if not windows_by_room[room]:
                del windows_by_room[room], rooms[at]
        window_S[index] = window
        if (left := room - count) > 1:  # no span has one token
            if left not in windows_by_room:
                insort(rooms, left)
            windows_by_room.setdefault(left, []).append(window)
    return window_S


def _pieces(starts_D: np.ndarray, lengths_D: np.ndarray, sequence_length: int, *, only_first: bool) -> np.ndarray:
    """Return the spans of documents, `[S, 2]`."""
    number_D = -(-(lengths_D - 1) // sequence_length)
    if only_first:
        number_D = np.minimum(number_D, 1)
    document_S = np.repeat(np.arange(len(lengths_D)), number_D)
    offset_S = sequence_length * (np.arange(len(document_S)) - (np.cumsum(number_D) - number_D)[document_S])
    count_S = np.minimum(lengths_D[document_S] - offset_S, sequence_length + 1)
    return np.stack([starts_D[document_S] + offset_S, count_S], axis=1)


def _buffers(lengths: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the documents' lengths in buffers of `BUFFER_DOCUMENTS`; the last one may be smaller."""
    waiting = np.empty(0, np.int64)
    for some in lengths:
        waiting = np.concatenate([waiting, some])
        while len(waiting) >= BUFFER_DOCUMENTS:
            yield waiting[:BUFFER_DOCUMENTS]
            waiting = waiting[BUFFER_DOCUMENTS:]
    yield waiting


def _document_lengths(file: TokenFile) -> Iterator[np.ndarray]:
    """Yield the lengths of documents in order; in text, one ends at each end-of-text token."""
    if isinstance(file.tokens_N, TokenPart):
        yield from file.tokens_N.document_lengths()
        return
    if file.ends_D is not None:
        yield np.diff(file.ends_D, prepend=0)
        return
    if file.end_of_text is None:
        raise DataError("the text's tokenizer has no end-of-text token; set data.packing=pack")
    begin = 0
    for start in range(0, len(file.tokens_N), SCAN_TOKENS):
        some_N = file.tokens_N[start : start + SCAN_TOKENS]
        ends_D = start + 1 + np.flatnonzero(some_N == file.end_of_text)
        yield np.diff(ends_D, prepend=begin)
        begin = int(ends_D[-1]) if len(ends_D) else begin
    if begin < len(file.tokens_N):
        yield np.array([len(file.tokens_N) - begin])
