"""The look of what people read: text that is safe to show, PNG pictures, and self-contained HTML pages.

Pictures have a transparent background and are legible on light and dark pages. A page loads nothing, runs no script and
escapes every string.
"""

from __future__ import annotations

import base64
import functools
import html
import io
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#808080"
# Okabe and Ito's palette, which colour-blind readers can tell apart, without black, which is invisible on dark pages.
COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#d55e00", "#cc79a7", "#b8a800", "#7a6fbe", "#8c564b")
WIDTH_INCHES, HEIGHT_INCHES, DPI = 6.4, 3.6, 180

STYLE = """
:root { color-scheme: light dark; --ink: #1d2126; --soft: #666d75; --ground: #fbfbfa; --card: #fff; --line: #e4e4e0 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6e9; --soft: #9aa1a9; --ground: #14171a; --card: #1b1f23; --line: #2d3238 } }
* { box-sizing: border-box }
body { margin: 0; padding: 2.5rem 1.25rem 4rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
main { max-width: 74rem; margin: 0 auto }
h1 { font-size: 1.7rem; font-weight: 650; letter-spacing: -.01em; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1rem; font-weight: 600; margin: 0 0 .15rem }
p { margin: .2rem 0 0; color: var(--soft) }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: .75rem; margin: 1.6rem 0 }
@media (max-width: 46rem) { .tiles { grid-template-columns: repeat(2, 1fr) } }
.tiles div, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px }
.tiles div { padding: .7rem .9rem } .tiles dt { color: var(--soft); font-size: .82rem }
.tiles dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 1rem }
section { padding: 1rem 1.1rem; min-width: 0 } section p { font-size: .86rem; margin-bottom: .5rem }
img { display: block; width: 100%; height: auto }
.wide { grid-column: 1 / -1; overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { text-align: right; padding: .32rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--soft); font-weight: 500 } th:first-child, td:first-child { text-align: left }
td:first-child { font-family: ui-monospace, Menlo, Consolas, monospace }
tr:last-child td { border-bottom: 0 }
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
MAX_LINE_CHARS = 2000
"""Most characters of a log line, an error or a cell of a page; a peer may send a megabyte."""
MAX_QUOTE_CHARS = 200
"""Most characters of a peer's text within such a line."""


def printable(text: object, max_chars: int = MAX_LINE_CHARS) -> str:
    """Return text that any peer may have written as one line that only shows.

    Control characters could steer a terminal or fake a log line, and bidirectional ones reorder what is read; they are
    written as Python writes them: `\\x1b`, `\\n`, `\\u202e`.

    Args:
        text: The text, or an object whose `str` is.
        max_chars: Characters kept; the number of the others is told.
    """
    whole = str(text)
    kept = whole[:max_chars]  # guard: text-cut
    if not kept.isprintable():  # guard: text-escaped
        kept = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in kept)
    return f"{kept}... ({len(whole) - max_chars:,} more characters)" if len(whole) > max_chars else kept


def size_text(num_bytes: float) -> str:
    """Format a number of bytes for people."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def problem_of(error: ValidationError) -> str:
    """Return what is wrong first with a document that another peer has sent: where and why, printable and short."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, problem["loc"]))
    return printable(f"{where}: {problem['msg']}" if where else problem["msg"], MAX_QUOTE_CHARS)


def takes_escapes() -> bool:
    """Check whether this process's terminal, if there is one, is to be sent escape codes."""
    return os.environ.get("TERM") not in ("dumb", "unknown") and not os.environ.get("NO_COLOR")  # https://no-color.org


def say(text: str) -> None:
    """Print a line of a command's result; standard output holds results, not logs.

    Once its reader has left, as `head` does, the output goes nowhere, and the command goes on.
    """
    try:
        sys.stdout.write(text + "\n")
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


def canvas(
    x_label: str,
    y_label: str,
    *,
    large: str = "",
    height_inches: float = HEIGHT_INCHES,
) -> tuple[Figure, Axes]:
    """Return an empty figure and its axes.

    Args:
        x_label: Label of the x axis.
        y_label: Label of the y axis.
        large: Axes ("x", "y" or "xy") with large numbers, shown as 20k for 20,000.
        height_inches: Height of the figure.
    """
    from matplotlib.figure import Figure  # no pyplot: no global state, no display
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(INK)
    axes.tick_params(colors=INK, labelsize=8, length=3)
    axes.grid(True, color=INK, alpha=0.18, lw=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(x_label, color=INK, fontsize=9)
    axes.set_ylabel(y_label, color=INK, fontsize=9)
    for name in large:
        {"x": axes.xaxis, "y": axes.yaxis}[name].set_major_formatter(EngFormatter(sep=""))
    return figure, axes


def legend(figure: Figure, axes: Axes) -> None:
    """Put the legend above the axes, in as many columns as fit; inside, it would cover curves."""
    handles, labels = axes.get_legend_handles_labels()
    style = {"frameon": False, "fontsize": 8, "labelcolor": INK, "handlelength": 1.6, "columnspacing": 1.4}
    widest_inches = 0.42 + 0.058 * max(map(len, labels), default=0)  # a line, gaps, and characters of 8 points
    fitting = max(1, int(figure.get_figwidth() / widest_inches))
    figure.legend(handles, labels, loc="outside upper left", ncols=min(fitting, 5 if len(handles) <= 5 else 7), **style)


def png(figure: Figure) -> bytes:
    """Return the figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", transparent=True)
    return buffer.getvalue()


def drawable(text: str) -> str:
    """Escape text for matplotlib: a dollar sign would begin a formula, and a leading underscore would hide a curve."""
    text = printable(text, MAX_QUOTE_CHARS).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def page(title: str, lines: Iterable[str], tiles: Mapping[str, str], sections: Iterable[str]) -> str:
    """Return a whole page.

    Args:
        title: Heading, as text.
        lines: Lines below the heading, as text.
        tiles: A few figures by name, as text.
        sections: Markup from `section`.
    """
    head = "".join(f"<p>{escape(line)}</p>" for line in lines)
    figures = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in tiles.items())
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<header><h1>{escape(title)}</h1>{head}</header>\n<dl class="tiles">{figures}</dl>\n'
        f'<div class="grid">\n{"".join(sections)}</div>\n</main>\n</body>\n</html>\n'
    )


def section(title: str, content: str, *, caption: str = "", wide: bool = False) -> str:
    """Return a card of the page; `content` is markup from `table` or `image`."""
    text, kind = f"<p>{escape(caption)}</p>" if caption else "", ' class="wide"' if wide else ""
    return f"<section{kind}><h2>{escape(title)}</h2>{text}{content}</section>\n"


def image(alt: str, picture: bytes) -> str:
    """Return markup with an embedded PNG."""
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return markup of a table whose cells are text."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def escape(value: object) -> str:
    """Escape a value so that no browser reads markup in it, and no character of it steers how the rest is shown."""
    return html.escape(printable(value), quote=True)  # guard: escaped-markup
