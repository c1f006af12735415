"""Streaming data sets of the Hugging Face hub, or local folders that `datasets` understands."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spes_p2p.config import DataConfig
from spes_p2p.data.files import checked_text
from spes_p2p.errors import DataError

if TYPE_CHECKING:
    from datasets import IterableDataset


def load(data: DataConfig) -> IterableDataset:
    """Opens `data.name` (`name` or `name:config`, or a local folder) for streaming.

    Raises:
        DataError: the hub cannot be reached, or there is no such data set, configuration or split.
    """
    from datasets import load_dataset

    # It warns that a resumed shuffle buffer is refilled; ours holds one row and loses nothing.
    logging.getLogger("datasets.iterable_dataset").setLevel(logging.ERROR)
    assert data.name is not None
    name, _, config = (data.name, "", "") if Path(data.name).exists() else data.name.partition(":")
    with reading(data):
        return load_dataset(name, config or None, split=data.split, streaming=True)


@contextlib.contextmanager
def reading(data: DataConfig) -> Iterator[None]:
    """Turns whatever `datasets` raises while it opens or streams into one line with the remedy."""
    from datasets.exceptions import DatasetsError
    from pyarrow import ArrowException

    try:
        yield
    # ValueError: unknown split or configuration. OSError: also every failure of the network.
    except (OSError, ValueError, DatasetsError, ArrowException) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"cannot stream data set {data.name!r} (split {data.split!r}): {reason}; check name, split and network, "
            f"or set data.source=files and give --text"
        ) from error


def rows(dataset: IterableDataset, data: DataConfig) -> Iterator[dict[str, Any]]:
    """Yields the rows of an opened data set.

    Raises:
        DataError: the stream breaks.
    """
    with reading(data):
        yield from dataset


def row_text(row: dict[str, Any], data: DataConfig) -> str:
    """Returns one row's text, empty if it is blank.

    Raises:
        DataError: no `data.text_field` in the row, or no text in it.
    """
    text = checked_text(row, data.text_field, f"data set {data.name!r}")
    return text if text.strip() else ""
