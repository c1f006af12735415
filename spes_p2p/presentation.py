"""Text that is safe to show to people."""

from __future__ import annotations

import functools
import io
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

MAX_LINE_CHARS = 2000
"""Most characters of a log line, an error or a cell of a page; a peer may send a megabyte."""
MAX_QUOTE_CHARS = 200
"""Most characters of a peer's text within such a line."""
MAX_PROBLEMS = 16
"""Problems of one document of which the first is named; a peer may send thousands."""


def printable(text: object, max_chars: int = MAX_LINE_CHARS) -> str:
    """Return text that any peer may have written as one line that only shows.

    Control characters could steer a terminal or fake a log line, and bidirectional ones reorder what is read; they are
    written as Python writes them: `\\x1b`, `\\n`, `\\u202e`.

    Args:
        text: The text, or an object whose `str` is.
        max_chars: Characters kept; the number of the others is told.
    """
    whole = str(text)
    kept = whole[:max_chars]  # guard: [:max_chars] ->
    if not kept.isprintable():  # guard: never
        kept = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in kept)
    return f"{kept}... ({len(whole) - max_chars:,} more characters)" if len(whole) > max_chars else kept


def size_text(num_bytes: float) -> str:
    """Format a number of bytes for people."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def markdown_table(rows: Sequence[Sequence[str]], align: str) -> str:
    """Return rows of cells, the head first, as a Markdown table that is aligned on a terminal, too.

    Args:
        rows: As many cells in each.
        align: `<` or `>` for each column.
    """
    cells = [[cell.replace("\\", "\\\\").replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    rule = [f":{'-' * (width - 1)}"[:: 1 if side == "<" else -1] for side, width in zip(align, widths, strict=True)]
    lines = ([f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)] for row in cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in (next(lines), rule, *lines))


def problem_of(error: ValidationError) -> str:
    """Return what is wrong first with a document that another peer has sent: where and why, printable and short."""
    if (count := error.error_count()) > MAX_PROBLEMS:  # each would become a dictionary
        return f"{count} problems"
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, problem["loc"]))
    return printable(f"{where}: {problem['msg']}" if where else problem["msg"], MAX_QUOTE_CHARS)


def takes_escapes() -> bool:
    """Check whether this process's terminal, if there is one, is to be sent escape codes."""
    return os.environ.get("TERM") not in ("dumb", "unknown") and not os.environ.get("NO_COLOR")  # https://no-color.org


def printable_text(text: str) -> str:
    """Return text of several lines, each of which only shows."""
    return "\n".join(printable(line.replace("\t", "    ")) for line in text.split("\n"))


def say(text: str, end: str = "\n") -> None:
    """Print a line of a command's result, or what `end` ends; standard output holds results, not logs.

    Once its reader has left, as `head` does, the output goes nowhere, and the command goes on.
    """
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except BrokenPipeError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


@functools.lru_cache(8)
def qr_rows(text: str) -> tuple[str, ...]:
    """Return a text's QR code row by row, four modules to a hexadecimal digit, the first one its highest bit.

    A row is filled up with light modules to a multiple of four; the code is as high as it is wide.
    """
    rows = _qr(text).matrix
    return tuple(
        f"{int(''.join(map(str, row)).ljust(-(-len(row) // 4) * 4, '0'), 2):0{-(-len(row) // 4)}x}" for row in rows
    )


def say_qr(text: str) -> None:
    """Print a text's QR code on a terminal that is wide enough for it, black on white, two modules to a character."""
    code = _qr(text)
    if sys.stdout.isatty() and takes_escapes() and shutil.get_terminal_size().columns >= code.symbol_size(border=2)[0]:
        code.terminal(out := io.StringIO(), border=2, compact=True)
        say("\n".join(f"\x1b[97;40m{line}\x1b[0m" for line in out.getvalue().splitlines()))


def _qr(text: str) -> Any:
    import segno

    return segno.make(text, error="l", micro=False, boost_error=False)
