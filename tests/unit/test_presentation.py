"""Pages and pictures take any text as text."""

from __future__ import annotations

import io

from PIL import Image

from spes_p2p import presentation

HOSTILE = "<b>&\"'"
ESCAPED = "&lt;b&gt;&amp;&quot;&#x27;"


def test_no_escape_codes_go_where_they_are_not_wanted(monkeypatch):
    for variables, takes in (({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"NO_COLOR": "1"}, False)):
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "vt100")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert presentation.takes_escapes() is takes


def test_every_string_of_a_page_is_escaped():
    table = presentation.table([HOSTILE], [[HOSTILE]])
    section = presentation.section(HOSTILE, table, caption=HOSTILE)
    picture = presentation.section("p", presentation.image(HOSTILE, b"png"))
    page = presentation.page(HOSTILE, [HOSTILE], {HOSTILE: HOSTILE}, [section, picture])
    assert HOSTILE not in page
    assert page.count(ESCAPED) == 2 + 1 + 2 + 4 + 1


FAKED = "0.1\x1b[2J\r\n2026-11-25 10:00:00,000 I spes_p2p.peer: all is well \u202e\u2066\u200f\x9b\ud800\x7f"


def test_whatever_a_peer_writes_is_one_line_that_only_shows():
    assert presentation.printable("naïve 日本語 – fine") == "naïve 日本語 – fine"
    shown = presentation.printable(FAKED)
    assert shown.isprintable() and shown.encode("utf-8")
    assert r"\x1b[2J\r\n2026" in shown and r"\u202e\u2066\u200f\x9b\ud800\x7f" in shown


def test_a_megabyte_of_a_peers_text_is_cut_and_its_length_told():
    shown = presentation.printable("\n" * 2**20, 100)
    assert shown == r"\n" * 100 + "... (1,048,476 more characters)"
    assert presentation.printable("a" * 100, 100) == "a" * 100


def test_pages_and_labels_show_no_character_that_steers():
    page = presentation.page(
        "t", [FAKED], {FAKED: FAKED}, [presentation.section("s", presentation.table([FAKED], [[FAKED]]))]
    )
    assert all(line.isprintable() for line in page.split("\n"))
    assert presentation.drawable(FAKED).isprintable()


def test_text_with_dollars_underscores_and_length_is_drawn():
    figure, axes = presentation.canvas("x", "y", large="xy")
    for label in ("$x_{", "_hidden", "a \\$ b", "long " * 40):
        axes.plot([0, 50_000], [0, 50_000], label=presentation.drawable(label))
    assert len(axes.get_legend_handles_labels()[1]) == 4
    presentation.legend(figure, axes)
    with Image.open(io.BytesIO(presentation.png(figure))) as picture:
        assert picture.format == "PNG"
    assert axes.xaxis.get_major_formatter().format_data(20_000) == "20k"
