"""Rounds are decided over a virtual network, with files, also with peers that were away, are new, or leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from deciders import RULES, Decider
from peer_server import RUN_ID, start_of

from spes_p2p.errors import AbsentError, ConfigError
from spes_p2p.sim.network import VirtualNetwork
from spes_p2p.swarm.certificate import Body, Certificate, Certificates, vote_for
from spes_p2p.swarm.chain import Chain
from spes_p2p.swarm.consensus import OTHERS_SECONDS
from spes_p2p.swarm.p2p.identity import Identity, IdentityKeys
from spes_p2p.swarm.wire import packed

pytestmark = pytest.mark.timeout(120)

NAMES = "abcde"
CATCH_UP_SECONDS = 10.0


class Run:
    """A run in which the first three of four identities vote.

    Attributes:
        gone: Peers whose leases have run out.
        peers: Peers by name; a killed one is started again by `start`.
    """

    def __init__(self, folder: Path, identities: dict[str, Identity], voters: str = "abc") -> None:
        self.network = VirtualNetwork()
        self.gone: set[str] = set()
        self.peers: dict[str, Decider] = {}
        self.ids = {name: identity.peer_id for name, identity in identities.items()}
        self.keys = {name: IdentityKeys(identity) for name, identity in identities.items()}
        start = start_of([self.ids[name] for name in voters], num_slots=1)
        self.start_body = start.model_copy(update={"seats": dict.fromkeys(self.ids.values(), "")})
        self._folder, self._identities = folder, identities

    def start(self, name: str, *, client_mode: bool = False, **settings: Any) -> Decider:
        node = self.network.node(self.ids[name], RUN_ID, client_mode=client_mode)
        folder, is_gone = self._folder / name, self.gone.__contains__
        self.peers[name] = Decider(node, self._identities[name], folder, self.start_body, is_gone, **settings)
        return self.peers[name]

    def kill(self, name: str) -> None:
        self.peers[name].network.close()

    def decide(self, names: str, expected: str = "") -> Body:
        """Let peers decide a round; return its body, which is the same on all."""
        bodies: list[Body | None] = []
        there = [self.ids[name] for name in expected or names]
        self.live([lambda peer=self.peers[name]: bodies.append(peer.decide(there)) for name in names])
        assert bodies[0] is not None and {body and body.digest for body in bodies} == {bodies[0].digest}
        return bodies[0]

    def live(self, lives: Sequence[Callable[[], object]]) -> None:
        self.network.loop.live(lives)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    folder = tmp_path_factory.mktemp("keys")
    return {name: Identity(folder / name) for name in NAMES}


@pytest.fixture
def run(tmp_path: Path, identities: dict[str, Identity]) -> Iterator[Run]:
    run = Run(tmp_path, identities)
    yield run
    run.network.close()


@pytest.fixture
def three(run: Run) -> Run:
    for name in "abc":
        run.start(name)
    return run


def test_rounds_are_certified_by_those_that_agree_and_kept_on_disk(three: Run) -> None:
    bodies = [three.decide("abc") for _ in range(3)]
    assert [body.previous for body in bodies[1:]] == [body.digest for body in bodies[:-1]]
    for peer in three.peers.values():
        assert peer.rounds() == [1, 2, 3], "one line each, in order"


def test_a_peer_that_waits_for_the_others_can_give_up(three: Run) -> None:
    """They may have died before their votes came: it waits for minutes then."""
    asked, given_up = [], []
    alone = three.peers["a"]

    def gives_up() -> bool:
        asked.append(alone.network.now())
        return len(asked) == 3

    three.live([lambda: given_up.append(alone.decide(three.ids.values(), gives_up))])
    assert given_up == [None] and len(asked) == 3
    assert three.decide("abc").round == 1


def test_a_peer_that_starts_again_has_its_chain_and_asks_for_what_it_has_missed(three: Run) -> None:
    known = three.decide("abc")
    three.kill("c")
    missed = [three.decide("ab", "abc") for _ in range(2)]
    away = three.start("c", is_new=False)
    assert away.last == known
    three.live([lambda: away.consensus.catch_up(CATCH_UP_SECONDS)])
    assert away.last == missed[-1] and away.rounds() == [1, 2, 3]
    assert three.decide("abc").previous == missed[-1].digest
    assert three.ids["c"] in three.decide("abc").voters, "its vote counts again"


@pytest.mark.parametrize("told", [0, 1], ids=["nothing", "a part"])
def test_the_first_answer_does_not_end_the_catching_up(three: Run, told: int) -> None:
    """A peer that is behind itself answers first; the other one, which knows all, a second later."""
    three.decide("abc")
    three.kill("c")
    missed = [three.decide("ab", "abc") for _ in range(2)]
    away = three.start("c", is_new=False)
    first = away.consensus._agreement.chain
    ask = away.consensus._agreement.following.ask
    certificates = three.peers["a"].consensus._agreement.chain.after(first.last.round)[:told]
    loop = three.network.loop

    def answer(peer: str) -> None:
        if peer == three.ids["b"]:
            loop.call_soon(away.consensus._receive, peer, Certificates(certificates=certificates))
        elif peer == three.ids["a"]:
            loop.call_later(0.75 * OTHERS_SECONDS, ask, peer)

    away.consensus._agreement.following.ask = answer  # type: ignore[method-assign]
    three.live([lambda: away.consensus.catch_up(CATCH_UP_SECONDS)])
    assert away.last == missed[-1]


def test_a_voter_that_cannot_be_called_takes_part_and_leads(run: Run) -> None:
    """Of two of them one hears the other through the third."""
    run.start("a", client_mode=True)
    run.start("b")
    run.start("c", client_mode=True)
    run.decide("abc")  # whose members tell who can be called
    for _ in range(4):
        assert len(run.decide("abc").members) == 3


def test_a_newcomer_with_a_seat_follows_and_becomes_a_voter(three: Run) -> None:
    three.decide("abc")
    newcomer = three.start("d")
    for peer in three.peers.values():
        peer.others = set(three.ids.values())
    three.live([lambda: newcomer.consensus.catch_up(CATCH_UP_SECONDS)])
    assert newcomer.last == three.peers["a"].last
    bodies = [three.decide("abcd") for _ in range(5)]
    assert newcomer.peer_id in bodies[-1].voters
    assert newcomer.rounds() == list(range(1, 7))


def test_a_newcomer_with_a_link_follows_no_chain_but_the_links(three: Run) -> None:
    """Former voters' keys sign another chain, which the newcomer meets first."""
    for _ in range(3):
        last = three.decide("abc")
    assert three.peers["a"].consensus.recent() == f"0:{three.start_body.digest}", "nothing is final yet"
    recent = f"{last.round}:{last.digest}"
    newcomer = three.start("d", finds=True)
    forged = Chain(three.start_body)
    for _ in range(last.round + 2):
        body = last.model_copy(update={"round": forged.last.round + 1, "previous": forged.last.digest, "ends_at": 1.0})
        votes = [vote_for(body, 0, three.ids[name]).signed(three.keys[name]) for name in "abc"]
        forged.add(
            Certificate(body=body, attempt=0, signatures={each.peer_id: each.signature for each in votes}),
            lambda *_: False,
        )
    consensus, liar = newcomer.consensus, "liar"
    for name in "abc":
        newcomer.keys.learn(three._identities[name].public_key)
    ask = consensus._agreement.following.ask

    def answer(peer: str) -> None:
        if peer != liar:
            return ask(peer)
        for part in (forged.after(0), ()):
            three.network.loop.call_soon(consensus._receive, liar, Certificates(certificates=part))

    consensus._agreement.following.ask = answer  # type: ignore[method-assign]
    newcomer.others = ()
    three.network.cuts |= {(newcomer.peer_id, three.ids[name]) for name in "abc"}
    with pytest.raises(AbsentError, match="try again, or a newer link"):
        three.live([lambda: consensus.find(recent, [liar])])
    assert not newcomer.path.exists()
    three.network.cuts.clear()
    three.live([lambda: consensus.find(recent, [liar])])
    assert newcomer.last == last and newcomer.rounds()[-1] == last.round
    consensus._receive(liar, Certificates(certificates=forged.after(0)[:1]))
    assert newcomer.last == last


def test_a_certificate_with_forged_signatures_is_not_followed(three: Run) -> None:
    last, stranger = three.decide("abc"), three.start("d")
    forged = last.model_copy(
        update={"round": last.round + 1, "previous": last.digest, "voters": (stranger.peer_id,), "ends_at": 1.0}
    )
    signature = vote_for(forged, 0, stranger.peer_id).signed(stranger.keys).signature
    certificate = Certificate(body=forged, attempt=0, signatures=dict.fromkeys(last.voters, signature))

    async def send() -> None:
        for name in "abc":
            channel = await stranger.network.open(three.ids[name], stranger.consensus._wire._service, 10.0)
            key = three._identities["d"].public_key.decode()
            await channel.send_last(packed(Certificates(certificates=(certificate,)), (key,)))

    stranger.network.run(send(), 10.0)
    assert three.peers["a"].last == last
    assert three.decide("abc").previous == last.digest


# ---------------------------------------------------------------------- leaving, going on alone, going back


def test_who_says_goodbye_votes_no_more_and_is_waited_for_no_longer(three: Run) -> None:
    three.decide("abc")
    three.live([three.peers["c"].consensus.leave])
    three.kill("c")
    began = three.network.loop.time()
    body = three.decide("ab")
    assert body.voters == tuple(voter for voter in three.start_body.voters if voter != three.ids["c"])
    assert three.network.loop.time() - began < RULES.meeting_seconds + RULES.averaging_seconds


def test_a_voter_whose_others_have_left_goes_on_alone(three: Run) -> None:
    three.decide("abc")
    for name in "bc":
        three.live([three.peers[name].consensus.leave])
        three.kill(name)
    began = three.network.loop.time()
    assert three.decide("a").voters == (three.ids["a"],)
    assert three.network.loop.time() - began < RULES.shrink_seconds / 2
    assert three.decide("a").round == 3


def test_a_voter_whose_others_have_died_waits_for_them_says_so_and_then_goes_on(
    three: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    last = three.decide("abc")
    assert caplog.text.count("this peer votes, ") == 3
    for name in "bc":
        three.kill(name)
        three.gone.add(three.ids[name])
    began = three.network.loop.time()
    body = three.decide("a")
    assert three.network.loop.time() - began > RULES.shrink_seconds
    words = f"round 2 waits for {', '.join(peer[-6:] for peer in last.voters if peer != three.ids['a'])} since"
    assert caplog.text.count(words) == 1 and not three.peers["a"].consensus.waiting()
    assert set(body.shrunk) == set(last.voters) - {three.ids["a"]}
    assert f"decided without {', '.join(peer[-6:] for peer in body.shrunk)}; not final" in caplog.text
    assert three.decide("a").round == 3, "at once"


def test_all_that_go_back_decide_the_round_again_and_who_does_not_stays_where_it_is(run: Run) -> None:
    for name in "abcd":
        run.start(name).others = set(run.ids.values())
    bodies = [run.decide("abc") for _ in range(3)]
    run.live([lambda: run.peers["d"].consensus.catch_up(CATCH_UP_SECONDS)])
    for name in "abc":
        peer = run.peers[name]
        with pytest.raises(ConfigError, match="no certificate of round 9"):
            run.live([lambda peer=peer: peer.consensus.reopen(9)])
        run.live([lambda peer=peer: peer.consensus.reopen(1)])
        assert peer.rounds() == [1] and peer.last.is_reopened
    run.live([lambda peer=peer: peer.consensus.catch_up(CATCH_UP_SECONDS) for peer in run.peers.values()])
    again = run.decide("abc")
    assert again.round == 2 and again.previous != bodies[0].digest and len(again.members) == 3
    assert not run.peers["a"].consensus._agreement.voter.statements.proofs, "two votes in one round prove nothing"
    run.live([lambda: run.peers["d"].consensus.catch_up(CATCH_UP_SECONDS)])
    assert run.peers["d"].last == bodies[-1], "its user has not gone back"
    run.live([lambda: run.peers["a"].consensus.reopen(1)])
    assert run.peers["a"].last == again, "only once"


def test_a_newcomer_checks_a_link_of_any_age(three: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_p2p.swarm.chain.MAX_RECENT", 4)
    digests = [three.decide("abc").digest for _ in range(20)]
    assert three.peers["a"].consensus.body_at(5) is None
    misled = three.start("e", finds=True)
    with pytest.raises(AbsentError, match="try again, or a newer link"):
        three.live([lambda: misled.consensus.find(f"5:{digests[5]}", ())])
    newcomer = three.start("d", finds=True)
    three.live([lambda: newcomer.consensus.find(f"5:{digests[4]}", ())])
    assert newcomer.last.digest == digests[-1]
    three.kill("d")
    assert three.start("d", finds=True).consensus._agreement.chain.has(5, digests[4])
