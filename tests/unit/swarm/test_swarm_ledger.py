"""The ledger of a run's shared data: ranges that do not overlap, and draws that count once or stay free."""

from __future__ import annotations

import base64
import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from spes_p2p.swarm import ledger as module
from spes_p2p.swarm.ledger import MAX_SPARES, Deal, DealRules, Drawn, Ledger, Stream, without

PEERS = [f"peer-{index:02}" for index in range(40)]
BY_TIME = DealRules(usual=10, is_exact=False)
BY_STEPS = DealRules(usual=5, is_exact=True)


def numbers(ranges: tuple[range, ...]) -> list[int]:
    return [draw for each in ranges for draw in each]


def free(stream: Stream, until: int) -> set[int]:
    return {draw for start, stop in [*stream.intervals(), (stream.next, until)] for draw in range(start, stop)}


@given(st.sets(st.integers(0, 300)), st.sets(st.integers(0, 300)))
def test_a_stream_holds_exactly_the_draws_that_were_not_trained(first, second):
    stream = Stream()
    for trained in (first, second - first):
        stream = without(stream, [(draw, draw + 1) for draw in trained])
    assert free(stream, 400) == set(range(400)) - first - second
    assert Stream.model_validate_json(stream.model_dump_json()) == stream


@given(st.data(), st.sampled_from([BY_TIME, BY_STEPS]), st.integers(1, 12))
def test_each_draw_counts_in_one_round_whatever_members_do(data, rules, num_rounds):
    """Peers come, go, draw less or more than their ranges, take one spare range, and rounds are repeated."""
    history = [(Ledger.empty(), list[str]())]
    counted: set[int] = set()
    for round in range(1, num_rounds + 1):
        source = history[-1]
        deal = Deal(*source, round, rules)
        members = sorted(data.draw(st.sets(st.sampled_from(PEERS), min_size=1, max_size=8)))
        spares = {peer: data.draw(st.integers(0, 3)) for peer in members if not deal.has(peer)}
        drawn = {peer: Drawn(data.draw(st.integers(0, 60)), spares.get(peer)) for peer in members}
        ranges = {peer: numbers(deal.range_of(peer, spares.get(peer))) for peer in members}
        last, _ = history[-1]
        after = deal.settled(last, drawn)
        end = 1 + max(draw for each in ranges.values() for draw in each)
        before_free, after_free = (free(each.stream, end) for each in (last, after))
        first = {spares[peer]: peer for peer in reversed(members) if peer in spares and drawn[peer].count}
        winners = [peer for peer in members if deal.has(peer) or first.get(spares[peer]) == peer]
        expected = {draw for peer in winners for draw in ranges[peer][: drawn[peer].count]}
        assert before_free - after_free == expected and after_free <= before_free
        assert len(expected) == sum(min(drawn[peer].count, len(ranges[peer])) for peer in winners), "no draw is of two"
        assert not counted & expected
        counted |= expected
        history.append((after, members))


@given(st.lists(st.integers(0, 500), min_size=1, max_size=30), st.integers(0, 50), st.sets(st.integers(0, 400)))
def test_ranges_of_a_deal_are_apart_and_cover_the_gaps_first(counts, round, trained):
    ledger = Ledger(stream=without(Stream(), [(draw, draw + 1) for draw in trained]))
    first = Deal(ledger, PEERS[: len(counts)], round, BY_TIME)
    paced = first.settled(ledger, {peer: Drawn(count) for peer, count in zip(PEERS, counts, strict=False)})
    deal = Deal(paced, PEERS[: len(counts)], round + 1, BY_TIME)
    dealt = [numbers(deal.range_of(peer)) for peer in PEERS[: len(counts)]]
    spare = [numbers(deal.range_of("newcomer", number)) for number in range(5)]
    all_draws = list(itertools.chain(*dealt, *spare))
    assert len(all_draws) == len(set(all_draws))
    ordered = sorted(free(paced.stream, 10**5))
    assert sorted(itertools.chain(*dealt)) == ordered[: sum(map(len, dealt))]
    assert sorted(itertools.chain(*spare)) == ordered[sum(map(len, dealt)) :][: sum(map(len, spare))]
    assert not deal.range_of("newcomer") and not deal.range_of("newcomer", MAX_SPARES)


def test_a_pace_counts_up_to_four_times_the_median():
    members = PEERS[:5]
    ledger = Ledger.empty()
    for round in range(1, 12):
        deal = Deal(ledger, members, round, BY_TIME)
        said = {peer: Drawn(10) for peer in members[:4]} | {members[4]: Drawn(10**9, 0)}
        if round == 1:
            said = {peer: Drawn(each.count, at) for at, (peer, each) in enumerate(said.items())}
        ledger = deal.settled(ledger, said)
    lengths = [sum(map(len, Deal(ledger, members, 12, BY_TIME).range_of(peer))) for peer in members]
    assert lengths == [30, 30, 30, 30, 120]


def test_a_member_that_claims_more_than_its_range_gains_nothing():
    ledgers = []
    for claimed in (30, 10**6):
        first = Deal(Ledger.empty(), [], 1, BY_TIME).settled(Ledger.empty(), {"a": Drawn(10, 0), "b": Drawn(10, 1)})
        deal = Deal(first, ["a", "b"], 2, BY_TIME)
        assert sum(map(len, deal.range_of("a"))) == 30
        ledgers.append(deal.settled(first, {"a": Drawn(claimed), "b": Drawn(10)}))
    assert ledgers[0] == ledgers[1]


def test_a_short_round_does_not_starve_the_next_one():
    members = PEERS[:3]
    ledger = Ledger.empty()
    for round, count in enumerate([8, 40, 40, 1], start=1):
        deal = Deal(ledger, members, round, BY_TIME)
        ledger = deal.settled(ledger, {peer: Drawn(count, at) for at, peer in enumerate(members)})
    assert {sum(map(len, Deal(ledger, members, 5, BY_TIME).range_of(peer))) for peer in members} == {3 * 30}


def test_gaps_are_trained_soon_though_members_die_in_each_round(seed):
    """The oldest free draw waits some rounds, not for ever: the order of members begins with another in each."""
    generator = random.Random(seed)
    ledger, members, ids = Ledger.empty(), PEERS[:8], itertools.count()
    lags = []
    for round in range(1, 400):
        deal = Deal(ledger, members, round, BY_TIME)
        alive = [peer for peer in members if generator.random() > 0.1]
        alive += [f"new-{next(ids):04}" for _ in range(8 - len(alive))]
        new = iter(range(8))
        drawn = {p: Drawn(generator.randint(5, 15), None if deal.has(p) else next(new)) for p in sorted(alive)}
        ledger, members = deal.settled(ledger, drawn), sorted(alive)
        stream = ledger.stream
        lags.append(stream.next - min([stream.next, *(start for start, _ in stream.intervals())]))
    assert max(lags) < 8 * 10 * 40


@pytest.mark.parametrize("num_members", [4, 70])
def test_a_range_grows_with_the_round(num_members):
    """A peer whose range is used up waits for the round's end."""
    members = [f"peer-{index:02}" for index in range(num_members)]
    ledger = Deal(Ledger.empty(), members, 1, BY_TIME).settled(Ledger.empty(), {peer: Drawn(10) for peer in members})
    growing = replace(BY_TIME, growth=4.64)
    lengths = [len(numbers(Deal(ledger, members, 2, rules).range_of("peer-03"))) for rules in (BY_TIME, growing)]
    assert lengths == ([30, 140] if num_members == 4 else [15, 70])


def test_a_thousand_peers_need_four_kilobytes(seed):
    generator = random.Random(seed)
    speeds = {f"Qm{index:044}": generator.uniform(20, 60) for index in range(1000)}
    rules = DealRules(usual=60, is_exact=False)
    members, ledger, sizes = sorted(speeds), Ledger.empty(), []
    for round in range(1, 30):
        deal = Deal(ledger, members, round, rules)
        drawn = {p: Drawn(round_of(generator, speeds[p]), at) for at, p in enumerate(members)}
        ledger = deal.settled(ledger, drawn)
        sizes.append(len(ledger.model_dump_json()))
    print("bytes", sizes)
    assert max(sizes) < 4096


def round_of(generator: random.Random, speed: float) -> int:
    return max(0, round(speed * generator.gauss(1, 0.15)))


def test_too_many_gaps_give_the_shortest_up(monkeypatch):
    monkeypatch.setattr(module, "MAX_GAPS", 3)
    stream = without(Stream(), [(3, 4), (5, 6), (10, 11), (12, 13), (30, 31)])
    assert stream.intervals() == [(0, 3), (6, 10), (13, 30)] and stream.next == 31


def packed(*data: int) -> str:
    return base64.b85encode(bytes(data)).decode()


@pytest.mark.parametrize(
    "gaps",
    [
        *(packed(1), packed(1, 0), packed(1, 1, 0, 1), packed(1, 200), packed(129, 0, 1), packed(*[255] * 20)),
        *(packed(1, 99), packed(1, 100), "~~~~~", '"'),
    ],
)
def test_gaps_in_another_form_are_refused(gaps):
    assert Stream(next=100, gaps=packed(1, 98)).intervals() == [(1, 99)]
    with pytest.raises(ValidationError):
        Stream(next=100, gaps=gaps)


def test_a_pace_in_another_form_is_refused():
    for pace in ("0", "~~~~~"):
        with pytest.raises(ValidationError):
            Ledger(stream=Stream(), pace=pace)
    assert Ledger(stream=Stream(), pace=packed(8, 16)).paces(2) == [8, 16]
    assert Ledger(stream=Stream(), pace=packed(8, 16)).paces(3) == [0, 0, 0], "of another roster"
