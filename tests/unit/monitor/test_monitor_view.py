"""The view is a fold: what it says depends on the records alone, and on no single peer's word."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.monitor.events import EventLog
from spes_p2p.monitor.view import (
    KEPT_ROUNDS,
    MAX_PEERS,
    WEIGHT_CAP,
    SwarmView,
    fold,
    summarise,
)
from tests.unit.monitor.swarms import (
    NUM_SLOTS,
    TOTAL_ROUNDS,
    claim,
    empty_view,
    peer_id,
    report,
    small_history,
    snapshot,
)


def test_a_report_read_twice_counts_once_and_the_first_stands() -> None:
    view = fold(empty_view(), snapshot(1.0, [claim(0)], [report(0, 1, loss=4.0)]))
    again = fold(view, snapshot(2.0, [claim(0)], [report(0, 1, loss=1.0, tokens=10**6)]))
    assert again.reports == view.reports and again.tokens == view.tokens == 1000
    assert again.rounds[1].loss == 4.0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), max_size=30))
def test_the_history_holds_each_peer_and_round_once_whatever_the_order(seen: list[tuple[int, int]]) -> None:
    view = empty_view()
    for time, (index, number) in enumerate(seen):
        view = fold(view, snapshot(float(time), [claim(index)], [report(index, number)]))
    assert set(view.reports) == {(number, peer_id(index)) for index, number in seen}


def test_a_view_that_is_open_for_weeks_keeps_the_reports_of_the_last_rounds_alone() -> None:
    """And counts those of older rounds once, though the DHT may still hold some."""
    view, events = empty_view(), []
    log = EventLog(view)
    early = report(2, 1)  # of a peer that trains no more: its newest report stays what it is
    for number in range(1, TOTAL_ROUNDS + 1):
        taken = [report(0, number), report(1, number), early]
        view = fold(view, snapshot(float(number), [claim(0), claim(1), claim(2)], taken, {0: number, 1: number}))
        assert len(view.reports) <= 2 * KEPT_ROUNDS + 1
        events += log.of(view)
    assert {number for number, _ in view.reports} == set(range(TOTAL_ROUNDS - KEPT_ROUNDS + 1, TOTAL_ROUNDS + 1))
    assert list(view.rounds) == list(range(1, TOTAL_ROUNDS + 1)) and view.tokens == 1000 * (2 * TOTAL_ROUNDS + 1)
    told = [(event["round"], event["peer_id"]) for event in events if event["kind"] == "report"]
    assert len(told) == len(set(told)) == 2 * TOTAL_ROUNDS + 1
    assert view.peers[peer_id(2)].report == early


def test_reports_of_rounds_far_ahead_do_not_pile_up() -> None:
    """A member can sign a report of another future round every few seconds, for days."""
    view, claims = replace(empty_view(), total_rounds=1000), [claim(index) for index in range(4)]
    honest = [report(index, 3) for index in range(1, 4)]
    for number in range(4, 200):
        view = fold(view, snapshot(float(number), claims, [report(0, number), *honest], dict.fromkeys(range(1, 4), 3)))
    assert len(view.reports) <= len(honest) + KEPT_ROUNDS


@given(st.lists(st.integers(0, TOTAL_ROUNDS), min_size=1, max_size=9), st.data())
def test_liars_in_the_minority_move_no_round(honest: list[int], data: st.DataObject) -> None:
    """However few or many they are, as long as they are fewer."""
    num_liars = data.draw(st.integers(0, len(honest) - 1))
    rounds = dict(enumerate(honest)) | {len(honest) + i: 2**53 for i in range(num_liars)}
    reports = [report(i, number) for i, number in rounds.items()]
    view = fold(empty_view(), snapshot(1.0, map(claim, rounds), reports, rounds))
    assert view.published <= max(honest) and view.round <= max(honest)
    later = [report(i, TOTAL_ROUNDS) for i in rounds if i >= len(honest)]
    view = fold(view, snapshot(2.0, map(claim, rounds), later, rounds))
    assert view.published <= max(honest)
    assert all(number <= max(honest) for number in view.rounds)


def test_a_round_is_complete_once_more_than_half_have_reported_it() -> None:
    claims = [claim(i) for i in range(4)]
    view = fold(empty_view(), snapshot(1.0, claims, [report(0, 1), report(1, 1)]))
    assert view.published == 0 and not view.rounds
    view = fold(view, snapshot(2.0, claims, [report(2, 1)]))
    assert view.published == 1 and view.rounds[1].num_peers == 3


def test_a_complete_round_stays_complete_when_everybody_leaves() -> None:
    view = small_history(2)[-1]
    gone = fold(view, snapshot(view.now + 100.0, []))
    assert not gone.active and gone.published == 2 and gone.tokens == view.tokens == 4000


@pytest.mark.parametrize(
    "absurd",
    [
        {"loss": -0.1},
        {"loss": 1e12},
        {"loss": None},  # of a thousand tokens
        {"tokens_per_second": -1.0},
        {"tokens_per_second": 1e12},
        {"tokens": 2**53},
        {"train_seconds": 1e10},
        {"round": 0},
        {"round": TOTAL_ROUNDS + 1},
    ],
)
def test_a_number_that_no_machine_could_mean_drops_its_report(absurd: dict) -> None:
    lie = report(0, **({"round": 1} | absurd))
    view = fold(empty_view(), snapshot(1.0, [claim(0), claim(1)], [lie, report(1, 1)]))
    assert set(view.reports) == {(1, peer_id(1))}


def test_a_report_that_is_not_finite_is_dropped_even_if_it_got_past_its_record() -> None:
    lie = report(0, 1).model_copy(update={"loss": math.nan})
    assert not fold(empty_view(), snapshot(1.0, [claim(0)], [lie])).reports


@given(st.lists(st.integers(1, 5000), min_size=3, max_size=12), st.integers(1, 10**12))
def test_one_peers_tokens_outweigh_nobody_by_more_than_the_cap(honest: list[int], lie: int) -> None:
    reports = [report(i, 1, tokens=tokens, loss=4.0) for i, tokens in enumerate(honest)]
    summary = summarise([*reports, report(99, 1, tokens=lie, loss=0.0)])
    assert summary.tokens <= sum(honest) + WEIGHT_CAP * max(honest)
    assert 0.0 < summary.loss <= 4.0


def test_the_round_loss_is_the_voters_median() -> None:
    """Of all that have trained if no voter has."""
    honest = [report(i, 1, loss=loss) for i, loss in enumerate((2.0, 3.0, 7.0))]
    lies = [report(i, 1, loss=0.0) for i in range(10, 16)]
    view = fold(
        empty_view(), replace(snapshot(1.0, [claim(0)], [*honest, *lies]), voters=frozenset(map(peer_id, range(3))))
    )
    assert summarise([*honest, *lies], view.voters).loss == 3.0
    assert summarise([*honest, *lies]).loss == 0.0 and summarise(honest[:2]).loss == 2.5


def test_the_rounds_figures_are_plain_ones() -> None:
    summary = summarise([report(0, 1, tokens=1000, loss=2.0), report(1, 1, tokens=3000, loss=4.0)])
    assert summary.tokens_per_second == pytest.approx(4000 / 10.0)
    assert summary.sync_share == pytest.approx(0.2)


def test_tokens_of_a_peer_that_committed_nothing_are_lost() -> None:
    lost = report(1, 1, committed=0, loss=1.0)
    assert summarise([report(0, 1), lost]).tokens == 1000
    assert summarise([report(0, 1), lost]).loss == 4.0
    assert math.isnan(summarise([lost]).loss)


def test_who_has_trained_nothing_has_no_loss_and_counts_for_none() -> None:
    nothing = report(1, 1, tokens=0, loss=None)
    assert (1, peer_id(1)) in fold(empty_view(), snapshot(1.0, [claim(0), claim(1)], [nothing])).reports
    assert summarise([report(0, 1), nothing]).loss == 4.0
    assert math.isnan(summarise([nothing]).loss)


def test_agreement_is_the_share_of_the_commonest_digest() -> None:
    reports = [report(i, 1, shared_digest=letter * 16) for i, letter in enumerate("aaab")]
    assert summarise(reports).agreement == 0.75


def test_coverage_counts_active_holders_and_names_orphans() -> None:
    claims = [claim(0, [0, 1]), claim(1, [1, 2]), claim(2, [3], state="joining"), claim(3, [1, 4000])]
    view = fold(empty_view(), snapshot(1.0, claims))
    assert view.coverage == (1, 3, 1, 0, 0, 0, 0, 0)
    assert view.orphans == tuple(range(3, NUM_SLOTS))


def test_a_death_orphans_its_slots_and_one_failed_read_does_not() -> None:
    view = fold(empty_view(), snapshot(1.0, [claim(0, [0]), claim(1, [1])]))
    blink = fold(view, snapshot(2.0, [claim(0, [0])]))
    assert blink.coverage[1] == 1 and blink.peers[peer_id(1)].state == "active"
    dead = fold(blink, snapshot(11.5, [claim(0, [0])]))
    assert dead.coverage[1] == 0 and dead.peers[peer_id(1)].state == "left"
    assert dead.peers[peer_id(1)].last_seen == 1.0
    back = fold(dead, snapshot(12.0, [claim(0, [0]), claim(1, [1])]))
    assert back.peers[peer_id(1)].state == "active" and 1 not in back.orphans


def test_a_newcomer_brings_no_round_of_its_own() -> None:
    view = small_history(3)[-1]
    joined = fold(view, snapshot(50.0, [claim(i) for i in range(5)], (), {0: 3, 1: 3, 2: 0, 3: 0, 4: 0}))
    assert joined.published == 3 and len(joined.active) == 5


def test_a_flood_of_identities_is_bounded() -> None:
    view = fold(empty_view(), snapshot(1.0, [claim(i) for i in range(MAX_PEERS + 50)]))
    assert len(view.peers) == MAX_PEERS


def test_peers_that_left_make_room_for_new_ones() -> None:
    """A monitor that had seen two thousand peers saw no new one, and no end of the run."""
    view = fold(empty_view(), snapshot(1.0, [claim(i) for i in range(MAX_PEERS)]))
    new = [claim(i) for i in range(MAX_PEERS, MAX_PEERS + 5)]
    view = fold(view, snapshot(2.0, new))
    assert len(view.peers) == MAX_PEERS and {each.peer_id for each in new} <= view.peers.keys()


def test_folding_changes_no_earlier_view() -> None:
    view = small_history(2)[-1]
    copy = replace(view, peers=dict(view.peers), reports=dict(view.reports), held_out=dict(view.held_out))
    fold(view, snapshot(99.0, [claim(7)], [report(7, 3)]))
    view.evaluated(3, 1.0)
    assert view == copy


def test_held_out_losses_are_kept_by_round() -> None:
    view: SwarmView = empty_view().evaluated(2, 4.0).evaluated(0, 6.0)
    assert list(view.held_out.items()) == [(0, 6.0), (2, 4.0)]


def test_the_oldest_slot_of_anybodys_model_is_told_of() -> None:
    fresh, old, liar = report(0, 9), report(1, 9, stale_rounds=3), report(2, 9, stale_rounds=2**50)
    assert summarise([fresh]).stale_rounds == 0
    assert summarise([fresh, old]).stale_rounds == 3
    assert summarise([fresh, old, liar]).stale_rounds == 9, "nothing is older than the run"


def test_records_of_peers_that_no_certificate_knows_change_no_figure() -> None:
    honest, ghosts = range(2), range(2, 6)
    reports = [report(i, 1) for i in honest] + [report(i, 1, tokens=10**6) for i in ghosts]
    seen = snapshot(1.0, map(claim, [*honest, *ghosts]), reports)
    alone = fold(empty_view(), snapshot(1.0, map(claim, honest), reports[:2]))
    assert fold(empty_view(), seen.of({peer_id(i) for i in honest})).rounds == alone.rounds
    assert fold(empty_view(), seen.of(None)).tokens > alone.tokens, "before the first certificate all peers count"
