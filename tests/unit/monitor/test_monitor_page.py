"""What the page shows of a view, and what of it is sent again."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.monitor.events import EventLog
from spes_p2p.monitor.page import snapshot as page
from spes_p2p.monitor.page.snapshot import Own, OwnRound, PageState, Sections, in_words, sections_of, thinned
from spes_p2p.monitor.view import Snapshot, SwarmView, fold
from tests.unit.monitor.swarms import body, claim, empty_view, peer_id, report, small_history, snapshot

STATIC = Path(page.__file__).parent / "static"
AXE = Path(__file__).parents[2] / "support" / "axe"
VENDORED = {
    STATIC / "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    STATIC / "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    STATIC / "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    AXE / "axe.min.js": "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c",
    AXE / "LICENSE": "af175b9d96ee93c21a036152e1b905b0b95304d4ae8c2c921c7609100ba8df7e",
    AXE / "LICENSE-3RD-PARTY.txt": "4f8563870d0fca38bbc3e00b6f670cb7fa9f380ba9f26a7f7d1184a6b18b1653",
}
"""uPlot 1.6.32 and axe-core 4.14.1, as npm has them."""


def sections(view: SwarmView, own: Own | None = None, **more) -> Sections:
    return sections_of(PageState(view, {"run_id": "run"}, own, **more))


def key(index: int) -> str:
    return peer_id(index)[-10:]


@pytest.mark.parametrize("path", VENDORED, ids=lambda path: path.name)
def test_vendored_files_are_those_that_their_authors_published(path):
    assert hashlib.sha256(path.read_bytes()).hexdigest() == VENDORED[path]


def test_a_long_run_keeps_at_most_300_points_and_the_newest():
    for count in (1, 299, 300, 301, 12345):
        kept = thinned(list(range(1, count + 1)), 300)
        assert len(kept) <= 301 and kept[-1] == count and kept == sorted(set(kept))


def test_rounds_are_summarised_once_though_views_are_folded_for_days(monkeypatch):
    view = small_history(3)[-1]
    chain = [body(number, dict.fromkeys(range(3), 1000)) for number in (1, 2, 3)]
    view = fold(view, snapshot(98.0, [claim(0), claim(1)], [], None, *chain))
    before = view.rounds
    again = fold(view, snapshot(99.0, [claim(0), claim(1)], [], None, *chain))
    assert again.rounds is before, "nothing new"
    late = fold(again, snapshot(100.0, [claim(0), claim(1), claim(2)], [report(2, 2, dropped=5)], None, *chain))
    assert late.rounds[1] is before[1] and late.rounds[2].dropped == 5


def test_the_state_says_what_holds_the_swarm():
    def told(*snapshots: Snapshot, total: int = 20) -> tuple[str, str]:
        view = replace(empty_view(), total_rounds=total)
        for taken in snapshots:
            view = fold(view, taken)
        now = sections(view)["now"]
        return now["state"], now["why"]

    assert told(snapshot(1.0, [])) == ("waiting", "no peer has announced itself")
    assert told(snapshot(1.0, [claim(0, state="joining")]))[1].startswith("1 peers are joining")
    state, why = told(snapshot(1.0, [claim(0)]), snapshot(60.0, []))
    assert state == "waiting" and "all have left, or this machine has lost the swarm" in why
    for now, state in ((40.0, "training"), (51.0, "synchronising")):
        assert told(snapshot(now, [claim(0)], [], None, body(1, {0: 9}, ends_at=50.0)))[0] == state
    silent = fold(fold(empty_view(), snapshot(1.0, [claim(0)])), snapshot(7.0, []))  # half of its 10 s, and more
    assert sections(silent)["now"]["state"] == "silent" and sections(silent)["peers"][key(0)][0] == "silent"
    assert told(snapshot(1.0, [claim(0)], [report(0, 1)]), total=1)[0] == "finished"
    assert sections(silent, Own(peer_id(0), stage="alone", why="far"))["now"]["why"] == "far"


def test_a_peers_page_has_its_contribution_and_starts_with_itself():
    view = small_history(3)[-1]
    rounds = {number: OwnRound(1000, 4.0, 0, 5) for number in (1, 2, 3)}
    own = Own(peer_id(1), uptime_seconds=61.0, memory_bytes=123456, sent_bytes=7, received_bytes=8, rounds=rounds)
    shown = sections(view, own)
    figures = shown["figures"]
    assert (figures["my_tokens"], figures["share"], figures["my_sent"]) == (1000, 0.5, 7), "by its newest report"
    fast = replace(own, rounds={**rounds, 3: OwnRound(10**6, 4.0, 0, 5)})
    assert sections(view, fast)["figures"]["share"] == 1.0, "at most what of one machine counts"
    assert next(iter(shown["peers"])) == shown["run"]["me"] == key(1)
    columns = shown["run"]["columns"]
    row = dict(zip(columns, shown["rounds"]["2"], strict=True))
    assert row["my_tokens"] == 1000 and row["my_sent"] == 0 and row["tokens"] == 4000
    assert "my_tokens" not in sections(view)["figures"]


def test_a_page_that_came_late_says_from_which_round_it_counts_and_a_large_one_that_it_shows_a_part():
    view = fold(empty_view(), snapshot(1.0, [claim(0), claim(1)], [report(0, 9), report(1, 9)], {0: 9, 1: 9}))
    assert sections(view)["figures"]["since"] == 9 and sections(small_history()[-1])["figures"]["since"] == 1
    crowd = fold(empty_view(), snapshot(1.0, [claim(index, [0]) for index in range(page.MAX_PEERS + 2)]))
    shown = sections(crowd)
    assert shown["figures"]["known"] == shown["coverage"][0] == len(shown["peers"]) + 2 == page.MAX_PEERS + 2


def test_cells_tell_trained_slots_from_new_claims():
    view = fold(empty_view(), snapshot(1.0, [claim(0, [0, 1, 2, 5])], [report(0, 1, slots=(0, 1))]))
    assert sections(view)["matrix"] == {key(0): "0-1|2,5"}


def test_the_time_left_and_the_tokens_per_parameter_are_as_if_all_rounds_were_like_the_newest():
    view = small_history()[-1]
    newest, left = view.newest, view.total_rounds - view.published
    figures = sections_of(PageState(view, {"active_params": 100}))["figures"]
    assert figures["left"] == round(left * newest.seconds) and figures["a_day"] == 86400 * newest.tokens_per_second
    assert figures["per_param"] == (view.tokens + left * newest.tokens) / 100
    assert sections(view)["figures"]["per_param"] is None, "an old record of a run does not say its size"


@pytest.mark.parametrize("number", [1, 2, 5])
def test_the_newest_point_and_figures_are_of_a_round_that_all_members_have_reported(number):
    claims, before = [claim(index, [index]) for index in range(3)], small_history(number - 1)[-1]
    few = [report(index, number, loss=1.0 + index, tokens_per_second=7.0) for index in range(2)]
    of_round = body(number, dict.fromkeys(range(3), 1000))
    view = fold(before, snapshot(99.0, claims, few, None, of_round))
    assert view.published == number
    assert list(sections(view)["rounds"]) == list(sections(before)["rounds"]) == [str(n) for n in range(1, number)]
    of_view, of_before = (sections(each)["figures"] for each in (view, before))
    assert all(of_view[name] == of_before[name] for name in ("loss", "speed", "not_training"))
    assert sections(view)["phases"] == sections(before)["phases"] and view.newest == before.newest, "the console, too"
    whole = fold(view, snapshot(99.5, claims, [report(2, number, loss=3.0)], None, of_round))
    assert sections(whole)["rounds"][str(number)][1] == sections(whole)["figures"]["loss"] == 2.0
    next_one = [report(index, number + 1) for index in range(2)]
    without = sections(fold(view, snapshot(100.0, claims[:2], next_one)))
    assert str(number) in without["rounds"], "a member that has died reports no more"


@pytest.mark.parametrize("committed", [0, 2, 49, 50])
def test_a_waiting_peer_shows_the_committed_round_and_no_slot_as_its_own_that_none_holds(committed):
    view = replace(empty_view(), total_rounds=50)
    view = fold(view, snapshot(1.0, [claim(0, [0, 1, 5], state="joining")]))
    shown = sections(view, Own(peer_id(0), stage="joining", committed=committed))
    assert shown["now"]["round"] == max(1, committed), "no round is trained"
    assert set(shown["coverage"]) == {0} and shown["matrix"] == {}
    begun = fold(view, snapshot(2.0, [claim(0, [0, 1, 5])], rounds={0: committed + 1}))
    shown = sections(begun, Own(peer_id(0), committed=committed))
    assert shown["now"]["round"] == min(committed + 1, 50)
    assert {slot for slot, holders in enumerate(shown["coverage"]) if holders} == {0, 1, 5}
    assert shown["matrix"] == {key(0): "|0-1,5"}


def test_events_are_told_in_words():
    log, view, words = EventLog(empty_view()), empty_view(), []
    for taken in (
        snapshot(1.0, [claim(0, [0]), claim(1, [1])]),
        snapshot(2.0, [claim(0, [0, 3]), claim(1, [1])], [report(i, 1, dropped=i) for i in range(2)]),
        snapshot(60.0, []),
    ):
        view = fold(view, taken)
        words += filter(None, map(in_words, log.of(view)))
    words += filter(None, map(in_words, log.of(view.evaluated(1, math.nan))))
    first = peer_id(0)[-6:]
    assert f"peer …{first} joined; its slots: 0" in words and f"peer …{first} has the slots 0,3 now" in words
    assert f"peer …{first} left" in words and "round 1: 2 peers, loss 4.0000; 1 groups were dropped" in words
    assert words[-1] == "held-out loss after round 1: -"


def test_a_loss_that_is_no_number_is_a_gap_and_no_broken_page():
    view = small_history(2)[-1].evaluated(1, math.nan)
    chain = [body(number, {0: 0, 1: 0}) for number in (1, 2)]
    shown = sections(fold(view, snapshot(99.0, [claim(0), claim(1)], [], None, *chain)))
    assert shown["rounds"]["1"][1] is None and shown["held_out"]["1"][1] is None
    json.dumps(shown, allow_nan=False)
