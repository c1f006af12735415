"""Data sets of the Hugging Face hub, found, checked and streamed, and checkpoints, downloaded.

A manifest's name opens nothing else.

The name and the data set's card are a stranger's. So no local folder is looked for, the card's patterns stay within the
data set, nothing but tables of text is read, and of these the columns of text and messages alone: the formats of
images, archives and models can name other files, or run code.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from spes_p2p.config import DataConfig
from spes_p2p.data.chat_rows import COMPLETION, MESSAGES, PROMPT
from spes_p2p.errors import DataError, OutageError, SpesError, one_line

if TYPE_CHECKING:
    from datasets import IterableDataset
    from datasets.utils.metadata import MetadataConfigs

log = logging.getLogger(__name__)

HUB_SECONDS = 30.0
"""Longest wait for the hub's description of a data set."""
_FORMATS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
}
_COMPRESSIONS = {".gz", ".bz2", ".xz", ".zst", ".lz4"}


@dataclass(frozen=True)
class HubFiles:
    """What a run's data set is made of, at one commit.

    Attributes:
        url: `hf://datasets/OWNER/NAME@COMMIT`; every file lies below it.
        licence: The card's licence field; empty where it has none.
        format: Suffix of the files without compression, such as `.parquet`.
        files: Their URLs.
        num_bytes: Size of them all.
    """

    url: str
    licence: str
    format: str
    files: tuple[str, ...]
    num_bytes: int


def find_hub_files(data: DataConfig) -> HubFiles:
    """Ask the hub for the files of `data.name` and `data.split`, without reading any.

    Raises:
        DataError: the hub cannot be reached, the data set is private or has no such configuration or split, or its card
            names files outside it or of another kind than tables of text.
    """
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import HfApi

    assert data.name is not None
    repository, _, config = data.name.partition(":")
    with _reading_hub(data):
        info = HfApi().dataset_info(repository, files_metadata=True, timeout=HUB_SECONDS)
        if info.private:  # guard: never
            raise DataError(f"data set {repository!r} is private; a run trains on public data, or on files with --text")
        url = f"hf://datasets/{repository}@{info.sha}"
        card = info.card_data
        configs = MetadataConfigs.from_dataset_card_data(card) if card is not None else MetadataConfigs()
        matches = _files_of_split(data, url, configs, config)
        files, suffix = _tables(matches, data, url)
        sizes = {f"{url}/{file.rfilename}": file.size or 0 for file in info.siblings or ()}
        licence = str(card.get("license") or "") if card is not None else ""
        return HubFiles(url, licence, suffix, tuple(files), sum(sizes.get(file, 0) for file in files))


def _files_of_split(data: DataConfig, url: str, configs: MetadataConfigs, config: str) -> Sequence[str]:
    """Match the patterns of a configuration's split with the data set's files, as `datasets` does."""
    from datasets.data_files import DataFilesList, get_data_patterns, sanitize_patterns

    chosen = config or configs.get_default_config_name() or ("default" if not configs else "")
    if chosen not in configs and (configs or chosen != "default"):
        known = ", ".join(configs)[:200] or "default"
        raise DataError(f"data set {data.name!r} has the configurations {known}; append one to data.name as :NAME")
    settings = configs.get(chosen, {})
    folder = str(settings.get("data_dir") or "")
    base = f"{url}/{_inside(folder, data)}" if folder else url
    given = settings.get("data_files")
    patterns = sanitize_patterns(given) if given is not None else get_data_patterns(base)
    if data.split not in patterns:
        raise DataError(f"data set {data.name!r} has the splits {', '.join(map(str, patterns))[:200]}; set data.split")
    return DataFilesList.from_patterns([_inside(each, data) for each in patterns[data.split]], base_path=base)


def _inside(pattern: str, data: DataConfig) -> str:
    """Return a pattern of a card if it can match files of the data set alone; it is looked for on disk otherwise."""
    parts = PurePosixPath(pattern).parts
    if pattern.startswith(("/", "~")) or ".." in parts or ":" in pattern or "\\" in pattern:  # guard: never
        raise DataError(f"the card of data set {data.name!r} names files elsewhere: {pattern[:80]!r}; choose another")
    return pattern


def _tables(matches: Sequence[str], data: DataConfig, url: str) -> tuple[list[str], str]:
    """Return the files of the format that most of them have, and its suffix."""
    for file in matches:
        if not file.startswith(f"{url}/") or "::" in file or ".." in file.split("/"):  # guard: never
            raise DataError(f"a file of data set {data.name!r} lies elsewhere: {file[:80]!r}; choose another")
    suffixes = {file: _suffix(file) for file in matches}
    counts = Counter(suffix for suffix in suffixes.values() if suffix in _FORMATS)  # guard: always
    if not counts:
        raise DataError(
            f"data set {data.name!r} has no {', '.join(_FORMATS)} files in split {data.split!r}; choose another"
        )
    [(suffix, _)] = counts.most_common(1)
    return [file for file in matches if suffixes[file] == suffix], suffix


def _suffix(file: str) -> str:
    path = PurePosixPath(file.lower())
    return PurePosixPath(path.stem).suffix if path.suffix in _COMPRESSIONS else path.suffix


def load_hub(data: DataConfig) -> IterableDataset:
    """Open `data.name` for streaming.

    Raises:
        DataError: as `find_hub_files`, or the files cannot be read, or `data.text_field` is no column of text.
    """
    from datasets import IterableDataset
    from datasets.data_files import DataFilesDict, DataFilesList
    from datasets.packaged_modules.csv.csv import Csv
    from datasets.packaged_modules.json.json import Json
    from datasets.packaged_modules.parquet.parquet import Parquet
    from datasets.packaged_modules.text.text import Text

    # It warns that a resumed shuffle buffer is refilled; this buffer holds one row and loses nothing.
    logging.getLogger("datasets.iterable_dataset").setLevel(logging.ERROR)
    assert data.name is not None
    found = find_hub_files(data)
    repository = data.name.partition(":")[0]
    builder = {"csv": Csv, "json": Json, "parquet": Parquet, "text": Text}[_FORMATS[found.format]]
    files = DataFilesList(list(found.files), [(repository, found.url)])
    options = {"sep": "\t"} if found.format == ".tsv" else {}
    with _reading_hub(data):
        dataset = builder(
            data_files=DataFilesDict({data.split: files}),
            dataset_name=repository.partition("/")[2],
            base_path=found.url,
            repo_id=repository,
            **options,
        ).as_streaming_dataset(data.split)
        assert isinstance(dataset, IterableDataset)
        if dataset.features is None:  # rows of JSON, CSV or text, which are not decoded
            return dataset
        # A column of images or sound may name files anywhere, which decoding it would open.
        columns = {MESSAGES, PROMPT, COMPLETION, data.text_field} & set(dataset.features)
        readable = [name for name in columns if _is_plain(dataset.features[name])]  # guard: never
        if data.text_field in columns and data.text_field not in readable:
            raise DataError(f"column {data.text_field!r} of data set {data.name!r} is no text; set data.text_field")
        if not readable:
            known = ", ".join(sorted(dataset.features)[:8])
            raise DataError(
                f"data set {data.name!r} has no messages, no completion and no field {data.text_field!r} (it has: "
                f"{known}); set data.text_field"
            )
        return dataset.select_columns(readable)  # guard: .select_columns(readable) ->


def _is_plain(feature: Any) -> bool:
    """Tell whether values of a column are text and numbers, or lists and objects of these: nothing is decoded."""
    from datasets import LargeList, List, Value

    if isinstance(feature, dict):
        return all(map(_is_plain, feature.values()))
    return isinstance(feature, Value) or (isinstance(feature, List | LargeList) and _is_plain(feature.feature))


@contextlib.contextmanager
def _reading_hub(data: DataConfig) -> Iterator[None]:
    """Raise the errors in the block as one line with the remedy."""
    try:
        yield
    except SpesError:
        raise
    # A stranger's card or file can raise anything in `datasets` and what it stands on; network failures are OSError.
    except Exception as error:
        raise (OutageError if _is_outage(error) else DataError)(
            f"cannot stream data set {data.name!r} (split {data.split!r}): {one_line(error)}; check name, split and "
            f"network, or set data.source=files and give --text"
        ) from error


def _is_outage(error: BaseException | None) -> bool:
    """Tell whether a library has failed because the hub does not answer now, by the errors that led to its own."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if error is None or isinstance(error, OfflineModeIsEnabled):
        return False
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status == 429 or status >= 500
    # The hub's library has changed its HTTP client twice; all of these name the base of such errors alike.
    is_transport = any(base.__name__ == "TransportError" for base in type(error).__mro__)
    return (
        is_transport
        or isinstance(error, ConnectionError | TimeoutError)
        or _is_outage(error.__cause__ or error.__context__)
    )


_CHECKPOINT_FILES = ["*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model"]
"""Files of a checkpoint that are downloaded: no pickles, and no code."""
_CHECKPOINT = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([0-9a-f]{40}))?", re.ASCII)


def checkpoint_folder(source: Path, check: Callable[[Path], object] = bool) -> tuple[Path, str | None]:
    """Return the folder of a checkpoint, downloaded if it is on the hub, and there its name with the commit's hash.

    What was downloaded before is taken from the hub's cache. The weights are verified later, by the manifest.

    Args:
        source: A folder, or `owner/name` or `owner/name@commit`.
        check: Refuses a folder with config.json, before anything else is downloaded.

    Raises:
        SpesError: what `check` raises.
        DataError: the hub cannot be reached, or has no such checkpoint for everyone.
    """
    found = _CHECKPOINT.fullmatch(str(source))
    if source.exists() or found is None:
        if "@" in source.name and not source.exists():
            raise DataError(
                f"{source} names no commit; give --from owner/name@COMMIT with all 40 digits of its hash, or owner/name"
            )
        return source, None
    from huggingface_hub import HfApi, snapshot_download

    name, commit = found[1], found[2]
    try:
        if commit is None:
            commit = str(HfApi().model_info(name, timeout=HUB_SECONDS).sha)
        log.info("reading %s@%s from the hub", name, commit)
        check(Path(snapshot_download(name, revision=commit, allow_patterns=["config.json"])))
        # guard: _CHECKPOINT_FILES -> None
        folder = snapshot_download(name, revision=commit, allow_patterns=_CHECKPOINT_FILES)
    except SpesError:
        raise
    except Exception as error:  # huggingface_hub and what it stands on raise errors of many types
        raise (OutageError if _is_outage(error) else DataError)(
            f"cannot download {source} from the hub: {one_line(error)}; check name, commit and network, or give --from "
            f"a folder"
        ) from error
    return Path(folder), f"{name}@{commit}"


def hub_rows(dataset: IterableDataset, data: DataConfig) -> Iterator[dict[str, Any]]:
    """Yield the rows of an open data set.

    Raises:
        DataError: the stream breaks.
    """
    with _reading_hub(data):
        yield from dataset
