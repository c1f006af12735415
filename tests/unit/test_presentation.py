"""Any text is shown as text."""

from spes_p2p import presentation


def test_no_escape_codes_go_where_they_are_not_wanted(monkeypatch):
    for variables, takes in (({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"NO_COLOR": "1"}, False)):
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "vt100")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert presentation.takes_escapes() is takes


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
