"""The view is a fold: what it says depends on certificates and records alone, and on no single peer's word."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.monitor.credit import WEIGHT_CAP
from spes_p2p.monitor.events import EventLog
from spes_p2p.monitor.view import KEPT_ROUNDS, MAX_PEERS, Snapshot, SwarmView, fold, look, summarise
from spes_p2p.swarm.records import Claim, Metrics, Progress
from tests.unit.monitor.swarms import (
    NUM_SLOTS,
    TOTAL_ROUNDS,
    body,
    claim,
    empty_view,
    peer_id,
    report,
    small_history,
    snapshot,
)


def test_a_report_read_twice_counts_once_and_the_first_stands():
    of_round = body(1, {0: 1000})
    view = fold(empty_view(), snapshot(1.0, [claim(0)], [report(0, 1, loss=4.0)], None, of_round))
    again = fold(view, snapshot(2.0, [claim(0)], [report(0, 1, loss=1.0, tokens=10**6)], None, of_round))
    assert again.reports == view.reports and again.tokens == view.tokens == 1000
    assert again.rounds[1].loss == 4.0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), max_size=30))
def test_the_history_holds_each_peer_and_round_once_whatever_the_order(seen):
    view, chain = empty_view(), [body(number, {}) for number in range(1, 7)]
    for time, (index, number) in enumerate(seen):
        view = fold(view, snapshot(float(time), [claim(index)], [report(index, number)], None, *chain))
    assert set(view.reports) == {(number, peer_id(index)) for index, number in seen}


def test_a_view_that_is_open_for_weeks_keeps_the_reports_of_the_last_rounds_alone():
    """And counts those of older rounds once, though the DHT may still hold some."""
    view, events = empty_view(), []
    log = EventLog(view)
    early = report(2, 1)  # of a peer that trains no more: its newest report stays what it is
    for number in range(1, TOTAL_ROUNDS + 1):
        taken, of_round = [report(0, number), report(1, number), early], body(number, dict.fromkeys(range(3), 1000))
        view = fold(view, snapshot(float(number), [claim(0), claim(1), claim(2)], taken, None, of_round))
        assert len(view.reports) <= 2 * KEPT_ROUNDS + 1
        events += log.of(view)
    assert {number for number, _ in view.reports} == set(range(TOTAL_ROUNDS - KEPT_ROUNDS + 1, TOTAL_ROUNDS + 1))
    assert list(view.rounds) == list(range(1, TOTAL_ROUNDS + 1)) and view.tokens == 3000 * TOTAL_ROUNDS
    told = [(event["round"], event["peer_id"]) for event in events if event["kind"] == "report"]
    assert len(told) == len(set(told)) == 2 * TOTAL_ROUNDS + 1 and view.peers[peer_id(2)].report == early


def test_reports_of_rounds_far_ahead_do_not_pile_up():
    """A member can sign a report of another future round every few seconds, for days."""
    view, claims = replace(empty_view(), total_rounds=1000), [claim(index) for index in range(4)]
    honest, of_round = [report(index, 3) for index in range(1, 4)], body(3, dict.fromkeys(range(1, 4), 1000))
    for number in range(4, 200):
        view = fold(view, snapshot(float(number), claims, [report(0, number), *honest], None, of_round))
    assert len(view.reports) <= len(honest) + KEPT_ROUNDS


def test_progress_and_reports_move_no_round_that_no_certificate_names():
    ghosts, reports = range(2, 9), [report(index, TOTAL_ROUNDS) for index in range(2, 9)]
    of_round = body(1, {0: 1000, 1: 1000})
    taken = snapshot(1.0, map(claim, range(9)), reports, dict.fromkeys(ghosts, 2**53), of_round)
    view = fold(empty_view(), taken)
    assert view.published == 1 and list(view.rounds) == [1] and (view.tokens, view.rounds[1].num_peers) == (2000, 2)


def test_a_page_that_comes_late_has_the_tokens_of_all_rounds_whose_certificates_are_kept():
    chain = [body(number, {0: 1000, 1: 500}) for number in range(1, 6)]
    view = fold(empty_view(), snapshot(1.0, [claim(0), claim(1)], [report(0, 5), report(1, 5)], None, *chain))
    assert view.published == 5 and view.tokens == 7500 and view.rounds[1].num_peers == 2
    assert math.isnan(view.rounds[1].loss) and math.isnan(view.rounds[1].tokens_per_second), "no report has come"
    assert view.rounds[5].loss == 4.0 and view.newest == view.rounds[5]
    thinned = fold(view, snapshot(2.0, [claim(0)], [], None, *chain[2:]))
    assert thinned.rounds == view.rounds, "a chain drops old certificates, a page what it made of them does not"


def test_a_run_that_went_back_has_no_figure_of_the_rounds_that_it_left():
    view = small_history(3)[-1]
    other = body(2, {0: 10})
    back = fold(view, snapshot(99.0, [claim(0)], [], None, view.bodies[3].model_copy(update={"round": 1}), other))
    assert back.published == 2 and list(back.rounds) == [1, 2] and back.rounds[2].tokens == 10


def test_a_complete_round_stays_complete_when_everybody_leaves():
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
def test_a_number_that_no_machine_could_mean_drops_its_report(absurd):
    lie = report(0, **({"round": 1} | absurd))
    taken = snapshot(1.0, [claim(0), claim(1)], [lie, report(1, 1)], None, body(1, {0: 1000, 1: 1000}))
    view = fold(empty_view(), taken)
    assert set(view.reports) == {(1, peer_id(1))}


def test_a_report_that_is_not_finite_is_dropped_even_if_it_got_past_its_record():
    lie = report(0, 1).model_copy(update={"loss": math.nan})
    assert not fold(empty_view(), snapshot(1.0, [claim(0)], [lie])).reports


@given(st.lists(st.integers(1, 5000), min_size=3, max_size=12), st.integers(1, 10**12))
def test_one_members_tokens_outweigh_nobody_by_more_than_the_cap(honest, lie):
    summary = summarise(body(1, {**dict(enumerate(honest)), 99: lie}, voters=range(len(honest))), [])
    assert summary.tokens <= sum(honest) + WEIGHT_CAP * max(honest)


def test_tokens_and_members_are_those_of_the_certificate_whatever_peers_report():
    """A member that reports other tokens, and a peer that is no member, change nothing."""
    of_round = body(1, {0: 1000, 1: 500})
    lies = [report(0, 1, tokens=10**6), report(5, 1, tokens=10**6, train_seconds=900.0, dropped=7, loss=0.0)]
    assert summarise(of_round, lies) == summarise(of_round, [report(0, 1)])
    assert (summarise(of_round, lies).tokens, summarise(of_round, []).num_peers) == (1500, 2)


def test_a_rounds_loss_and_times_are_its_voters_medians():
    """Of all that have trained if no voter has."""
    honest = [report(i, 1, loss=loss, train_seconds=8.0 + i) for i, loss in enumerate((2.0, 3.0, 7.0))]
    lies = [report(i, 1, loss=0.0, train_seconds=0.0) for i in range(10, 16)]
    tokens = dict.fromkeys((*range(3), *range(10, 16)), 1000)
    summary = summarise(body(1, tokens, voters=range(3)), [*honest, *lies])
    assert summary.loss == 3.0 and summary.seconds == 11.0 and summary.phases["train"] == 9.0
    assert summarise(body(1, tokens), [*honest, *lies]).loss == 0.0
    assert summarise(body(1, tokens), honest[:2]).loss == 2.5
    idle = summarise(body(1, {**tokens, 0: 0}, voters=[0]), [report(0, 1, tokens=0, loss=None), *honest[1:]])
    assert idle.loss == 5.0, "the only voter has trained nothing"


def test_the_rounds_figures_are_plain_ones():
    reports = [report(0, 1, tokens=1000, loss=2.0), report(1, 1, tokens=3000, loss=4.0)]
    summary = summarise(body(1, {0: 1000, 1: 3000}), reports)
    assert summary.tokens_per_second == pytest.approx(4000 / 10.0)
    assert summary.sync_share == pytest.approx(0.2)


def test_a_member_of_whose_tokens_none_count_has_no_loss():
    nothing, of_round = report(1, 1, tokens=0, loss=None), body(1, {0: 1000, 1: 0})
    assert (1, peer_id(1)) in fold(empty_view(), snapshot(1.0, [claim(0), claim(1)], [nothing])).reports
    assert summarise(of_round, [report(0, 1), nothing]).loss == 4.0
    assert summarise(of_round, [report(0, 1), report(1, 1, committed=0, loss=1.0)]).loss == 4.0
    assert math.isnan(summarise(of_round, [nothing]).loss)


def test_agreement_is_the_share_of_the_commonest_digest():
    reports = [report(i, 1, shared_digest=letter * 16) for i, letter in enumerate("aaab")]
    assert summarise(body(1, dict.fromkeys(range(4), 1000)), reports).agreement == 0.75


def test_coverage_counts_active_holders_and_names_orphans():
    claims = [claim(0, [0, 1]), claim(1, [1, 2]), claim(2, [3], state="joining"), claim(3, [1, 4000])]
    view = fold(empty_view(), snapshot(1.0, claims))
    assert view.coverage == (1, 3, 1, 0, 0, 0, 0, 0) and view.orphans == tuple(range(3, NUM_SLOTS))


def test_a_death_orphans_its_slots_and_one_failed_read_does_not():
    view = fold(empty_view(), snapshot(1.0, [claim(0, [0]), claim(1, [1])]))
    blink = fold(view, snapshot(2.0, [claim(0, [0])]))
    assert blink.coverage[1] == 1 and blink.peers[peer_id(1)].state == "active"
    dead = fold(blink, snapshot(11.5, [claim(0, [0])]))
    assert dead.coverage[1] == 0 and dead.peers[peer_id(1)].state == "left"
    assert dead.peers[peer_id(1)].last_seen == 1.0
    back = fold(dead, snapshot(12.0, [claim(0, [0]), claim(1, [1])]))
    assert back.peers[peer_id(1)].state == "active" and 1 not in back.orphans


def test_a_newcomer_brings_no_round_of_its_own():
    view = small_history(3)[-1]
    joined = fold(view, snapshot(50.0, [claim(i) for i in range(5)], (), {0: 3, 1: 3, 2: 0, 3: 0, 4: 0}))
    assert joined.published == 3 and len(joined.active) == 5


def test_a_flood_of_identities_is_bounded():
    view = fold(empty_view(), snapshot(1.0, [claim(i) for i in range(MAX_PEERS + 50)]))
    assert len(view.peers) == MAX_PEERS


def test_peers_that_left_make_room_for_new_ones():
    """A monitor that had seen two thousand peers saw no new one, and no end of the run."""
    view = fold(empty_view(), snapshot(1.0, [claim(i) for i in range(MAX_PEERS)]))
    new = [claim(i) for i in range(MAX_PEERS, MAX_PEERS + 5)]
    view = fold(view, snapshot(2.0, new))
    assert len(view.peers) == MAX_PEERS and {each.peer_id for each in new} <= view.peers.keys()


def test_folding_changes_no_earlier_view():
    view = small_history(2)[-1]
    copy = replace(view, peers=dict(view.peers), reports=dict(view.reports), held_out=dict(view.held_out))
    fold(view, snapshot(99.0, [claim(7)], [report(7, 3)]))
    view.evaluated(3, 1.0)
    assert view == copy


def test_held_out_losses_are_kept_by_round():
    view: SwarmView = empty_view().evaluated(2, 4.0).evaluated(0, 6.0)
    assert list(view.held_out.items()) == [(0, 6.0), (2, 4.0)]


def test_the_oldest_slot_of_anybodys_model_is_told_of():
    fresh, old, liar = report(0, 9), report(1, 9, stale_rounds=3), report(2, 9, stale_rounds=2**50)
    of_round = body(9, dict.fromkeys(range(3), 1000))
    assert summarise(of_round, [fresh]).stale_rounds == 0
    assert summarise(of_round, [fresh, old]).stale_rounds == 3
    assert summarise(of_round, [fresh, old, liar]).stale_rounds == 9, "nothing is older than the run"


class Known:
    """A swarm whose last certificates know these peers, or no certificate is there yet."""

    def __init__(self, known: set[str] | None, seen: Snapshot) -> None:
        self.peer_id = peer_id(0)
        self._records = {Claim: seen.claims, Progress: seen.progress, Metrics: seen.metrics}
        self.now, self.read_now = lambda: seen.now, self._records.__getitem__
        self.consensus = SimpleNamespace(bodies=lambda: seen.bodies, known=lambda: known)
        self.names = dict[str, str]


def test_records_of_peers_that_no_certificate_knows_change_no_figure():
    honest, ghosts = range(2), range(2, 6)
    reports = [report(i, 1) for i in honest] + [report(i, 1, tokens=10**6) for i in ghosts]
    of_round = body(1, {0: 1000, 1: 1000})
    seen = snapshot(1.0, map(claim, [*honest, *ghosts]), reports, dict.fromkeys(ghosts, 2**53), of_round)
    alone = fold(empty_view(), snapshot(1.0, map(claim, honest), reports[:2], None, of_round))
    assert fold(empty_view(), look(Known({peer_id(1)}, seen))) == alone, "this peer, and whom a certificate knows"  # type: ignore[arg-type]
    before = replace(seen, bodies={})
    assert len(fold(empty_view(), look(Known(None, before))).peers) == 6, "before the first certificate all peers count"  # type: ignore[arg-type]
