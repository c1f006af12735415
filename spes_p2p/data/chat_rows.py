"""Rows of a volunteer's own files: conversations, pairs of prompt and completion, or text, checked one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from spes_p2p.config import DataConfig
from spes_p2p.data.mds import holds_text, is_mds_index, listed
from spes_p2p.data.readers import JSON_LINES, PARQUET, OnBad, checked_text, read_rows
from spes_p2p.data.shards import is_manifest
from spes_p2p.data.streams import COMPRESSED
from spes_p2p.data.text_encoder import ROLES
from spes_p2p.errors import DataError
from spes_p2p.fs import matches

MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"
MAX_MESSAGES = 1024
"""Most messages of a conversation; without marks in the template, each reply is rendered twice."""
MAX_RECORD_CHARACTERS = 2**22


class Record(NamedTuple):
    """One row: where it stands, and `{"messages"}`, `{"prompt", "completion"}` or `{"text"}`."""

    where: str
    value: Mapping[str, Any]

    @property
    def text(self) -> str:
        """All its text, whose hash says whether it is held out."""
        parts = self.value.get(MESSAGES, [self.value])
        return "\n".join(str(part[key]) for part in parts for key in sorted(part))


class Unusable:
    """Takes the errors of rows that are left out, and counts them."""

    def __init__(self) -> None:
        self.count = 0
        self.first: DataError | None = None

    def __call__(self, problem: DataError) -> None:
        self.first = self.first or problem
        self.count += 1


def conversation_files(paths: Sequence[Path]) -> list[Path] | None:
    """Return the files of rows that --data names, in sorted order; None if it names token shards.

    Args:
        paths: Files, folders and patterns.

    Raises:
        DataError: they hold rows and something else.
    """
    found = [file for path in paths for file in _files_at(path.expanduser())]
    rows = [file for file in found if _holds_rows(file)]
    if not rows or any(is_manifest(file) or is_mds_index(file) for file in found):
        return None
    if other := [file for file in found if file not in rows and file.suffix != ".md"]:
        raise DataError(f"--data names {rows[0].name} with conversations and {other[0]}; name files of one kind")
    return rows


def names_text(data: DataConfig) -> bool:
    """Tell whether --data names MDS shards of text, which are read as --text is."""
    files = (file for path in data.paths for file in _files_at(path.expanduser()))
    return not data.is_shared and any(is_mds_index(file) and holds_text(file) for file in files)


def _files_at(path: Path) -> list[Path]:
    found = [file for match in matches(path) for file in (listed(match) if match.is_dir() else [match])]
    return [file for file in found if file.is_file()]


def _holds_rows(path: Path) -> bool:
    name = Path(path.stem) if path.suffix.lower() in COMPRESSED else path
    return name.suffix.lower() in JSON_LINES | PARQUET


def records(paths: Sequence[Path], data: DataConfig, on_bad: OnBad | None = None) -> Iterator[Record]:
    """Yield every row of files, in order.

    Raises:
        DataError: a file cannot be read, or a row cannot be used and `on_bad` does not take its error.
    """
    columns = list(dict.fromkeys([MESSAGES, PROMPT, COMPLETION, data.text_field]))
    for path in paths:
        yield from read_rows(path, columns, partial(checked_record, text_field=data.text_field), on_bad)


def checked_record(row: Any, text_field: str, where: object) -> Record:
    """Return `_record`, unless it is too long for a tokenizer's memory.

    Raises:
        DataError: it is, or as `_record`.
    """
    record = _record(row, text_field, where)
    if len(record.text) > MAX_RECORD_CHARACTERS:
        raise DataError(f"{where} has more than {MAX_RECORD_CHARACTERS} characters; cut the row")
    return record


def _record(row: Any, text_field: str, where: object) -> Record:
    """Return a row as a record: of its columns `messages`, or `prompt` and `completion`, or else `text_field`.

    A `text_field` other than `text` comes first, and may hold messages, too.
    """
    if not isinstance(row, dict):
        raise DataError(f"{where} is {type(row).__name__}, not an object; write one object per row")
    row = {name: value for name, value in row.items() if value is not None}  # parquet has every column in every row
    is_chosen = text_field != "text" and text_field in row
    if not is_chosen and MESSAGES in row:
        return Record(str(where), {MESSAGES: _messages(row[MESSAGES], where)})
    if not is_chosen and (COMPLETION in row or (PROMPT in row and text_field not in row)):
        return Record(str(where), _pair(row, where))
    if isinstance(row.get(text_field), list):
        return Record(str(where), {MESSAGES: _messages(row[text_field], where)})
    if text_field not in row:
        columns = ", ".join(sorted(map(str, row))[:8])
        raise DataError(
            f"{where} has no messages, no prompt and completion, and no {text_field!r} (it has: {columns}); rename its "
            f"fields, or set data.text_field"
        )
    text = checked_text(row, text_field, where)
    if not text.strip():
        raise DataError(f"{where}: {text_field!r} is blank; take the row out")
    return Record(str(where), {"text": text})


def _pair(row: Mapping[str, Any], where: object) -> dict[str, str]:
    if wrong := next((name for name in (PROMPT, COMPLETION) if not isinstance(row.get(name), str)), None):
        kind = type(row[wrong]).__name__ if wrong in row else "nothing"
        raise DataError(f"{where}: {wrong!r} holds {kind}, not text; write two texts, or a conversation as messages")
    if not row[COMPLETION].strip():
        raise DataError(f"{where}: 'completion' is empty, so nothing of it is learned; take the row out")
    return {name: checked_text(row, name, where) for name in (PROMPT, COMPLETION)}


def _messages(value: Any, where: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        kind = "an empty list" if value == [] else type(value).__name__
        raise DataError(f"{where}: messages are {kind}; write a list of objects with role and content")
    if len(value) > MAX_MESSAGES:
        raise DataError(f"{where} has {len(value)} messages, at most {MAX_MESSAGES}; cut the conversation")
    messages = [_message(message, f"{where}: message {number}") for number, message in enumerate(value, 1)]
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where} has no message of the role assistant, so nothing of it is learned; take the row out")
    return messages


def _message(message: Any, where: str) -> dict[str, Any]:
    given = (
        {str(key): value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
    )
    role, content = given.get("role"), given.get("content", "" if "tool_calls" in given else None)
    if not isinstance(message, dict):
        problem = f" is {type(message).__name__}, not an object; write role and content"
    elif role is None:
        hint = "ShareGPT's from and value are role and content here" if "from" in given else "write role and content"
        problem = f" has no role (it has: {', '.join(sorted(given)[:8])}); {hint}"
    elif role not in ROLES:
        problem = f" has the role {str(role)[:40]!r}; write one of {', '.join(ROLES)}"
    elif not isinstance(content, str):
        kind = "nothing" if content is None else type(content).__name__
        problem = f": content is {kind}, not text; write the message's text"
    elif role == "assistant" and not content.strip() and "tool_calls" not in given:
        problem = " is an empty reply, so nothing of it is learned; take the row out"
    else:
        try:  # JSON can contain half a surrogate pair, which tokenizers refuse
            return json.loads(json.dumps({**given, "content": content}, ensure_ascii=False).encode("utf-8", "replace"))
        except (TypeError, ValueError, RecursionError) as error:  # Parquet has dates and bytes, too
            raise DataError(f"{where} has a field that is no JSON value ({error}); take the field out") from error
    raise DataError(f"{where}{problem}")
