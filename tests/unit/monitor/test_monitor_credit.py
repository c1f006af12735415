"""Credit: tokens that counted, by certificates alone, over restarts, absences and floods of identities."""

from dataclasses import replace

import pytest

from spes_p2p.commands.credit import main
from spes_p2p.config.commands import CreditConfig
from spes_p2p.errors import DataError
from spes_p2p.monitor import credit
from spes_p2p.monitor.credit import Credit, keep, kept
from spes_p2p.monitor.page.snapshot import Own, PageState, sections_of
from spes_p2p.monitor.view import fold
from tests.unit.monitor.swarms import body, claim, empty_view, peer_id, report, snapshot

ROUNDS = {number: body(number, {0: 1000, 1: 3000, 98: 2000}) for number in range(1, 21)}


def test_credit_is_what_certificates_say_whatever_peers_report():
    lies = [report(0, 3, tokens=10**9)]
    view = fold(empty_view(), snapshot(1.0, [claim(0, [0])], lies, {0: 3}, *(ROUNDS[number] for number in (1, 2, 3))))
    assert view.credit.tokens == {peer_id(1): 9000, peer_id(98): 6000, peer_id(0): 3000}
    assert view.credit.told() == "rounds 1 to 3"


def test_of_one_members_tokens_no_more_count_than_in_the_mean():
    assert Credit().plus([body(1, {0: 10**9, 98: 100})]).tokens[peer_id(0)] == credit.WEIGHT_CAP * 100


def test_only_settled_rounds_are_kept_and_none_is_added_twice(tmp_path):
    for newest in (10, 10, 15, 20):
        keep(tmp_path, {number: each for number, each in ROUNDS.items() if number <= newest}, {})
    settled = kept(tmp_path)
    assert (settled.first, settled.last, settled.rounds) == (1, 12, 12) and settled.tokens[peer_id(1)] == 36_000
    assert settled.plus(ROUNDS.values()).tokens[peer_id(1)] == 60_000
    assert settled.plus([ROUNDS[20]]).told() == "13 of the rounds 1 to 20", "a peer that was away says so"


def test_names_are_those_that_owners_set_last(tmp_path):
    keep(tmp_path, ROUNDS, {peer_id(0): "Ann", peer_id(5): "Eve"})
    keep(tmp_path, {21: body(21, {0: 1, 98: 1})}, {})
    assert kept(tmp_path).names[peer_id(0)] == "Ann", "she is thanked after she has left"
    keep(tmp_path, ROUNDS, {peer_id(0): "Ann B."})
    assert kept(tmp_path).names == {peer_id(0): "Ann B.", peer_id(5): "Eve"}


def test_a_flood_of_identities_pushes_no_giver_out(monkeypatch):
    monkeypatch.setattr(credit, "MAX_PEERS", 3)
    givers = Credit().plus([body(1, {0: 1000, 98: 1000})], names={peer_id(98): "Bo"})
    flood = givers.plus([body(2, dict.fromkeys(range(1, 60), 1))], names={peer_id(each): "Eve" for each in range(60)})
    assert len(flood.tokens) == 3 and {peer_id(0), peer_id(98)} < flood.tokens.keys()
    assert len(flood.names) == 3 and flood.names[peer_id(98)] == "Bo"


def test_a_damaged_file_is_said_and_credit_begins_anew(tmp_path, caplog):
    (tmp_path / credit.FILE).write_text("{")
    assert kept(tmp_path) == Credit() and "is damaged" in caplog.text


def test_the_page_thanks_by_name_and_says_what_this_machine_has_given():
    told = snapshot(1.0, [claim(0, [0])], (), {0: 3}, *(ROUNDS[number] for number in (1, 2)))
    view = fold(empty_view(), replace(told, names={peer_id(1): "Bo"}))
    shown = sections_of(PageState(view, {}, Own(peer_id(0))))
    assert shown["credit"]["told"] == "rounds 1 to 2" and shown["figures"]["given"] == 2000
    assert [row[1:] for row in shown["credit"]["peers"]] == [[6000, "Bo"], [4000, ""], [2000, ""]]


def test_the_command_lists_peers_of_a_folder_and_refuses_what_is_none(tmp_path, capsys):
    (tmp_path / "versions").mkdir()
    with pytest.raises(DataError, match="no certificate of a round yet"):
        main(CreditConfig(source=str(tmp_path)))
    keep(tmp_path, ROUNDS, {peer_id(0): "Ann"})
    assert main(CreditConfig(source=str(tmp_path))) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert first == "tokens that counted, by the certificates of rounds 1 to 12:"
    assert [row.split() for row in rows] == [
        ["36,000", "50.0%", peer_id(1)],
        ["24,000", "33.3%", peer_id(98)],
        ["12,000", "16.7%", peer_id(0), "Ann"],
    ]
