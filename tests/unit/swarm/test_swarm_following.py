"""Which certificates a peer follows: branches, gaps, what is final, and what comes back from disk."""

import asyncio
import random
import resource
import signal
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from benchmarks.history_liars import Liar, Silent
from benchmarks.history_peers import NUM_SLOTS, Node, World
from spes_p2p.errors import ConfigError
from spes_p2p.swarm.certificate import (
    Certificates,
    Question,
    Result,
    Revision,
    Vote,
    check_skip,
    digests_after,
    genesis,
)
from spes_p2p.swarm.chain import Chain, ChainFile
from spes_p2p.swarm.p2p.identity import Identity, IdentityKeys
from spes_p2p.swarm.promises import Promises
from spes_p2p.swarm.proposal import Proposal
from tests.support.agreement import (
    ENDED,
    PEERS,
    RULES,
    Peer,
    Round,
    changed,
    digest,
    last_body,
    reopened,
    virtually,
)

START = genesis("run", PEERS[0], digest("manifest"), NUM_SLOTS, PEERS[:12])
VOTERS = PEERS[:5]


@asynccontextmanager
async def swarm(seed, num=4, kinds=None, start=START):
    """Yield a world whose peers have started; all of them vote after the first round."""
    world = World(0, random.Random(seed), start)
    for peer in PEERS[:num]:
        world.nodes[peer] = (kinds or {}).get(peer, Node)(world, peer)
        world.nodes[peer].start()
    await asyncio.sleep(30)
    assert all(node.last.round >= 1 for node in world.nodes.values())
    try:
        yield world
    finally:
        for node in world.nodes.values():
            node.stop()


def heads(world):
    return {node.last.round for node in world.nodes.values() if node.is_up}


def is_one_branch(world):
    shared = min(heads(world))
    return len({node.agreement.chain.body_at(shared).digest for node in world.nodes.values() if node.is_up}) == 1


def receive(node, *certificates):
    node.agreement.receive(PEERS[1], Certificates(certificates=certificates))


def never(certificate, body):
    return False


# ---------------------------------------------------------------------- swarms


def test_peers_certify_round_after_round_in_the_first_attempt(seed):
    async def run():
        async with swarm(seed) as world:
            await asyncio.sleep(90)
            assert min(heads(world)) >= 5 and is_one_branch(world)
            assert {each.attempt for each in world.nodes[PEERS[0]].chain} == {0}

    virtually(run())


def test_a_voter_that_leaves_is_out_after_the_next_certificate_and_a_proof_outlives_a_crash(seed):
    async def run():
        async with swarm(seed) as world:
            node, left = world.nodes[PEERS[0]], world.nodes[PEERS[2]]
            left.agreement.leave()
            left.stop()
            round = left.last.round
            node.agreement.receive(PEERS[1], Round(node.agreement.chain.last).proof(PEERS[3]))
            node.crash(5.0)
            await asyncio.sleep(100)
            voters = {certificate.body.round: certificate.body.voters for certificate in node.chain}
            assert PEERS[2] not in voters[round + 2] and PEERS[3] not in node.last.voters

    virtually(run())


@pytest.mark.parametrize("num_back", [1, 2, 4])
def test_those_that_voted_before_go_on_if_the_last_voter_does_not_come_back(num_back, seed):
    """Five laptops are closed one by one, and some are opened again; not the one that was closed last.

    They have heard of its last rounds, otherwise it would not be the only voter for them.
    """

    async def run():
        async with swarm(seed, 5, start=changed(START, seats=dict.fromkeys(VOTERS, ""))) as world:
            await asyncio.sleep(60)
            fifth, *others = world.nodes.values()
            for node in others:
                node.agreement.leave()
                node.stop()
                await asyncio.sleep(40)
            assert fifth.last.voters == (fifth.peer_id,)
            fifth.stop()
            back, round = others[:num_back], fifth.last.round
            for node in back:
                node.chain = list(fifth.chain)
                node.disk = Promises(previous=fifth.last.digest, round=round + 1)
                node.start()
            await asyncio.sleep(RULES.shrink_seconds - 60)
            assert {node.last.round for node in back} == {round}
            assert back[0].agreement.voter.waits_for() == (fifth.peer_id,)
            await asyncio.sleep(120 if num_back == 4 else RULES.shrink_seconds + 180)
            assert all(node.last.round > round + 3 for node in back) and is_one_branch(world)
            voters = set(back[0].last.voters)
            assert fifth.peer_id not in voters and voters >= {node.peer_id for node in back}
            fifth.start()
            await asyncio.sleep(60)
            assert is_one_branch(world) and fifth.last.round > round + 4

    virtually(run())


def test_nobody_stands_in_while_a_voter_answers_nor_others_than_the_holders_of_seats():
    before = Round(last_body())
    seats = dict.fromkeys(PEERS[:8], "")
    body = changed(before.body(), voters=VOTERS[:2], seats=seats)
    other = body.stand_in()
    assert other.voters == tuple(sorted(set(PEERS[:8]) - set(VOTERS[:2])))
    round = Round(other, other.voters)
    real, next_one = before.certify(body, VOTERS), round.certify(round.body(), other.voters)
    stands = before.certify(body, VOTERS).model_copy(update={"body": other})

    async def run(*certificates, gone=VOTERS[:2], known=False):
        peer = Peer(before, PEERS[5], gone=gone)
        if known:
            peer.receive(Certificates(certificates=(real,)))
        peer.receive(Certificates(certificates=certificates))
        return peer.agreement.chain.last.round

    assert virtually(run(stands, next_one)) == virtually(run(stands, next_one, known=True)) == 22
    assert virtually(run(stands, next_one, gone=VOTERS[:1])) == 20
    assert virtually(run(stands)) == 20, "none of them has gone on"
    strange = Round(changed(other, voters=PEERS[20:22]), PEERS[20:22])
    forged = stands.model_copy(update={"body": strange.last})
    assert virtually(run(forged, strange.certify(strange.body(), PEERS[20:22]))) == 20


def test_what_its_own_voters_certify_replaces_what_others_did_in_their_place():
    before = Round(last_body())
    body = changed(before.body(), voters=VOTERS[:2], seats=dict.fromkeys(PEERS[:8], ""))
    own, other = Round(body, VOTERS[:2]), Round(body.stand_in(), body.stand_in().voters)
    real, stands = before.certify(body, VOTERS), before.certify(body, VOTERS).model_copy(update={"body": other.last})

    async def run(*certificates):
        peer = Peer(before, PEERS[5], gone=VOTERS[:2])
        peer.receive(Certificates(certificates=(stands, other.certify(other.body(), other.last.voters))))
        assert peer.agreement.chain.last.round == 22
        peer.receive(Certificates(certificates=certificates))
        return peer.agreement.chain.last.voters

    assert virtually(run(real)) == other.last.voters
    assert virtually(run(real, own.certify(own.body(), VOTERS[:2]))) == own.last.voters


class Unvoting(Liar):
    """Comes to each meeting, and votes for nothing, nor proposes anything."""

    hides = (Vote, Proposal, Certificates)


@pytest.mark.parametrize("liar", [Silent, Unvoting])
def test_of_two_voters_one_goes_on_without_one_that_is_here_and_does_not_vote(liar, seed):
    """The first of two would be a quorum alone."""

    async def run():
        async with swarm(seed) as world:
            for each in (world.nodes[peer] for peer in PEERS[2:4]):
                each.agreement.leave()
                each.stop()
            await asyncio.sleep(60)
            first, other = (world.nodes[peer] for peer in world.nodes[PEERS[0]].last.voters)
            world.turn(first.peer_id, liar)
            round = other.last.round
            await asyncio.sleep(RULES.shrink_seconds - 60)
            assert other.last.round <= round + 1 and other.agreement.voter.waits_for() == (first.peer_id,)
            await asyncio.sleep(200)
            assert other.last.round > round + 3 and first.peer_id not in other.last.voters
            assert not other.agreement.voter.waits_for()

    virtually(run())


def test_who_would_go_on_alone_names_nobody_absent_that_is_here(monkeypatch, seed):
    """With `--alone` it does not wait for peers that are gone; the others still train when its own training ends."""
    monkeypatch.setattr("benchmarks.history_peers.RULES", replace(RULES, shrink_seconds=0.0))

    async def run():
        async with swarm(seed) as world:
            await asyncio.sleep(120)
            assert min(heads(world)) > 8 and not any(c.body.shrunk for c in world.nodes[PEERS[0]].chain)

    virtually(run())


@pytest.mark.parametrize("is_proposed", [False, True])
def test_no_round_names_a_revision_that_no_quorum_has_read_and_none_waits_for_it(is_proposed, seed):
    """One voter states it, or proposes it, and withholds it; later a quorum has read it, and one voter has not."""
    read = Revision(number=1, digest=digest("revision"))

    class Withholding(Liar):
        def post(self, peer, message):
            if is_proposed and isinstance(message, Proposal):
                body = message.body.model_copy(update={"revision": read})
                turn = message.turns[-1].model_copy(update={"vote": self.voted(body, message.attempt)})
                message = message.model_copy(update={"body": body, "turns": (turn,)})
            if isinstance(message, Result):
                message = message.model_copy(update={"revision": read}).signed(self.keys)
            super().post(peer, message)

    async def run():
        async with swarm(seed, kinds={PEERS[2]: Withholding}) as world:
            await asyncio.sleep(150)
            nodes = [node for peer, node in world.nodes.items() if peer != PEERS[2]]
            assert min(node.last.round for node in nodes) > 8
            assert not any(node.last.revision.number for node in nodes)
            for node in nodes[1:]:
                node.agreement.revision = read
            await asyncio.sleep(60)
            assert {node.last.revision for node in nodes} == {read}

    virtually(run())


def test_halves_that_were_apart_for_long_come_together(monkeypatch, seed):
    """Where they have parted lies further from the newest point that both know than one message reaches."""
    for module in ("chain", "following"):
        monkeypatch.setattr(f"spes_p2p.swarm.{module}.MAX_SENT", 4)

    async def run():
        async with swarm(seed) as world:
            await asyncio.sleep(100)
            world.split(set(PEERS[:2]))
            parted = max(heads(world))
            while min(heads(world)) - parted < 17:
                await asyncio.sleep(5)
            assert not is_one_branch(world)
            world.cut = set()
            await asyncio.sleep(40)
            assert is_one_branch(world)

    virtually(run())


def test_questions_of_two_branches_end():
    async def run():
        peer = Peer(Round(), VOTERS[0])
        other = Chain(peer.round.last, [peer.round.certify(peer.round.body(ends_at=9.0), VOTERS)])
        peer.receive(Certificates(certificates=(peer.round.certify(peer.round.body(), VOTERS[1:]),)))
        peer.posted.clear()
        peer.receive(Question(points=other.points()), sender=VOTERS[1])
        ((_, answer),) = peer.posted
        assert answer.certificates[0].body.round == 21

    virtually(run())


# ---------------------------------------------------------------------- branches, and what is final


def forged(chain, round):
    """Return another certificate of a round, signed by all that could sign it, which the rule of forks prefers."""
    before, ours = chain.body_at(round - 1), chain.body_at(round)
    at = Round(before)
    bodies = (at.body(ends_at=ours.ends_at + seconds / 8) for seconds in range(1, 1000))
    return at.certify(next(body for body in bodies if body.digest < ours.digest), before.voters)


def is_replaced(node, round):
    """Return whether a forged certificate of a round is followed in place of the node's own."""
    certificate = forged(node.agreement.chain, round)
    receive(node, certificate)
    return node.agreement.chain.has(round, certificate.body.digest)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_no_branch_replaces_a_certificate_that_eight_have_followed_in_time(is_restarted, seed):
    """The founder's key alone certifies another round 1, and former voters all that followed."""

    async def run():
        async with swarm(seed) as world:
            await asyncio.sleep(170)
            node = world.nodes[PEERS[0]]
            if is_restarted:
                node.crash(0.0)
                await asyncio.sleep(0.1)
            last = node.last.round
            assert last > 16
            assert not [round for round in range(1, last - 8) if is_replaced(node, round)]
            assert is_replaced(node, last - 6), "the last ones may still have to heal"

    virtually(run())


def test_voters_that_a_branch_has_removed_certify_no_other(seed):
    """Two of four have left; with one of those that stayed they were a majority before."""

    async def run():
        async with swarm(seed) as world:
            await asyncio.sleep(70)
            node, stays, *left = (world.nodes[peer] for peer in PEERS[:4])
            before = node.agreement.chain.last.round
            for each in left:
                each.agreement.leave()
                each.stop()
            while len(node.last.voters) > 2:
                await asyncio.sleep(1)
            chain = node.agreement.chain
            round = next(body.round for body in map(chain.body_at, range(before + 1, chain.last.round + 1)))
            certificate = forged(chain, round)
            signatures = {each.peer_id: certificate.signatures[each.peer_id] for each in (stays, *left)}
            receive(node, certificate.model_copy(update={"signatures": signatures}))
            assert not node.agreement.chain.has(round, certificate.body.digest)
            receive(node, certificate)
            assert node.agreement.chain.has(round, certificate.body.digest), "those that stayed can heal"

    virtually(run())


def test_certificates_that_come_long_after_their_rounds_make_nothing_final(seed):
    async def run():
        async with swarm(seed) as world:
            await asyncio.sleep(70)
            away, known = world.nodes[PEERS[2]], world.nodes[PEERS[2]].last.round
            away.crash(1e6)
            await asyncio.sleep(200)
            missed = world.nodes[PEERS[0]].chain[known:]
            assert len(missed) > 20
            world.cut = {(peer, PEERS[2]) for peer in PEERS[:4]}
            away.start()
            for certificate in missed[:20]:
                await asyncio.sleep(1)
                receive(away, certificate)
            assert away.last.round >= known + 20
            assert not is_replaced(away, known - 8)
            assert is_replaced(away, known + 1)

    virtually(run())


def test_eight_certificates_made_in_advance_make_nothing_final(seed):
    """Nor do they if each is sent by itself, and claims to end just now."""

    async def run():
        async with swarm(seed) as world:
            await asyncio.sleep(70)
            node = world.nodes[PEERS[0]]
            first, made = node.last.round + 1, Chain(node.last)
            for _ in range(9):
                at = Round(made.last)
                made.add(at.certify(at.body(ends_at=world.now), made.last.voters), never)
            for certificate in made.certificates:
                receive(node, certificate)
            assert node.last.round == first + 8
            assert is_replaced(node, first)

    virtually(run())


def test_from_a_shrunk_certificate_on_nothing_is_final_and_before_it_all_stays_so(seed):
    async def run():
        async with swarm(seed) as world:
            await asyncio.sleep(170)
            node, final = world.nodes[PEERS[0]], world.nodes[PEERS[0]].last.round - 8
            for peer in PEERS[1:4]:
                world.nodes[peer].stop()
            while not node.last.shrunk:
                await asyncio.sleep(1)
            shrunk = node.last.round
            await asyncio.sleep(100)
            assert node.last.round > shrunk + 8
            assert not is_replaced(node, final)
            assert is_replaced(node, shrunk + 1)

    virtually(run())


@pytest.mark.parametrize("seconds", [30_000.0, 100_000.0])
def test_a_day_after_a_shrunk_certificate_rounds_become_final_again(monkeypatch, seconds):
    monkeypatch.setattr("spes_p2p.swarm.chain.MAX_RECENT", 8)
    chain = Chain(START)
    for count in range(1, 40):
        round = Round(chain.last, PEERS[:3])
        body = round.body(ends_at=1.0 + seconds * (count > 20), shrunk=PEERS[1:2] if count == 9 else ())
        chain.add(round.certify(body, PEERS[:1]), lambda *_: True, is_in_time=True)
    assert chain.final == (31 if seconds > 86_400 else 0)


def test_a_shrunk_certificate_is_followed_at_once_only_with_goodbyes_of_those_that_left():
    round = Round()
    absent = VOTERS[2:]
    body = Round(round.last, VOTERS[:2]).propose(shrunk=absent).body
    certificate = round.certify(body, VOTERS[:2])
    left = certificate.model_copy(update={"goodbyes": tuple(map(round.goodbye, absent))})
    forged = left.model_copy(
        update={"goodbyes": tuple(each.model_copy(update={"signature": ""}) for each in left.goodbyes)}
    )

    async def run(certificate, *, gone=()):
        peer = Peer(round, VOTERS[2], gone=gone)
        peer.receive(Certificates(certificates=(certificate,)))
        return bool(peer.followed)

    assert virtually(run(left)) and not virtually(run(certificate)) and not virtually(run(forged))
    late = ENDED + RULES.shrink_seconds + 1
    assert virtually(run(certificate), late) and not virtually(run(certificate, gone=absent), ENDED - 1)
    assert virtually(run(certificate, gone=absent), ENDED + 1), "it was away itself"


def test_a_certificate_of_a_past_round_replaces_what_came_after_it():
    chain = Chain(START)
    for _ in range(3):
        round = Round(chain.last, PEERS[:1])
        chain.add(round.certify(round.body(), PEERS[:1]), never)
    round = Round(chain.body_at(1), PEERS[:1])
    other = round.certify(round.body(ends_at=9.0), PEERS[:1])
    chain.add(other, never)
    assert chain.last == other.body and len(chain.certificates) == 2


# ---------------------------------------------------------------------- long chains


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("length", [0, 1, 2, 9])
def test_a_chain_names_its_newest_point_some_before_it_and_its_start(start, length):
    first = START.model_copy(update={"round": start})
    chain = Chain(first)
    for _ in range(length):
        round = Round(chain.last, PEERS[:1])
        chain.add(round.certify(round.body(), PEERS[:1]), never)
    points = chain.points()
    assert [point.round for point in points] == [
        *(start + length - back for back in (0, 1, 3, 7) if back < length),
        start,
    ]
    assert all(chain.has(point.round, point.digest) for point in points)
    assert len(chain.after(start)) == length and chain.after(start + length) == ()
    assert not chain.has(start - 1, first.digest) and not chain.has(start + length + 1, first.digest)


def proven(chain, keys):
    """Return whether each certificate of a chain extends the last one, or more than half of its voters signed it."""
    bodies = [chain.start, *(each.body for each in chain.certificates)]
    return all(
        certificate.body.previous == body.digest or not check_skip(certificate, body, keys)
        for body, certificate in zip(bodies[:-1], chain.certificates, strict=True)
    )


@pytest.mark.parametrize("is_new", [True, False])
def test_a_late_peer_skips_the_certificates_that_a_long_run_does_not_keep(monkeypatch, seed, is_new):
    """A newcomer follows the run from its genesis though the founder is dead; a voter that was away votes again."""
    monkeypatch.setattr("spes_p2p.swarm.chain.MAX_RECENT", 8)
    monkeypatch.setattr("spes_p2p.swarm.chain.MAX_SENT", 4 if is_new else 64)

    async def run():
        async with swarm(seed, 5) as world:
            await asyncio.sleep(70)
            late = PEERS[10] if is_new else PEERS[2]
            world.nodes[PEERS[0] if is_new else late].stop()
            await asyncio.sleep(150)
            if is_new:
                world.nodes[late] = Node(world, late)
            world.nodes[late].start()
            await asyncio.sleep(100)
            assert min(heads(world)) > 30 and max(heads(world)) - min(heads(world)) <= 1
            for node in world.nodes.values():
                chain = node.agreement.chain
                assert proven(chain, node.keys)
                assert not node.is_up or len(chain) < 20 < chain.last.round
            node = world.nodes[late]
            assert late in node.last.voters and not node.agreement.voter.is_lost

    virtually(run())


@pytest.mark.parametrize("signers", [1, 2, 3])
def test_what_too_few_known_voters_have_signed_is_not_skipped_to_nor_a_single_certificate(signers):
    async def run(num, *, is_led_to=True):
        peer = Peer(Round(), VOTERS[0])
        last, strange = peer.round.last, PEERS[20:25]
        contents = list(map(digest, range(21, 40)))
        later = Round(last_body(strange, round=40, previous=digests_after(last.digest, contents)[-1]))
        skipped = "".join([*contents, later.last.content]) if is_led_to else ""
        first = later.certify(later.body(), (*last.voters[:signers], *strange)).model_copy(update={"skipped": skipped})
        after = Round(first.body, strange)
        peer.receive(Certificates(certificates=(first, after.certify(after.body(), strange))[:num]))
        return peer.agreement.chain.last != last

    assert virtually(run(2)) == (signers > 2) and not virtually(run(1)) and not virtually(run(2, is_led_to=False))


# ---------------------------------------------------------------------- generations


def test_a_reopened_body_is_followed_only_if_a_quorum_has_gone_on_from_it():
    """Anyone can make one; a peer that has not come so far would leave the run."""
    before = Round(last_body())
    round = Round(before.body(), VOTERS)
    other = Round(reopened(round.last), VOTERS)
    real, open_again = before.certify(round.last, VOTERS), before.certify(round.last, VOTERS)
    open_again = open_again.model_copy(update={"body": other.last})
    few, enough = (other.certify(other.body(), VOTERS[:count]) for count in (2, 3))

    async def run(*certificates):
        peer = Peer(before, VOTERS[0])
        for each in certificates:
            peer.receive(Certificates(certificates=tuple(each)))
        return peer.agreement.chain.last.generation

    assert not virtually(run([open_again])) and not virtually(run([open_again, few]))
    assert virtually(run([open_again, enough])) == other.last.generation
    assert not virtually(run([real], [open_again, enough])), "it has come further"


def test_those_whose_users_went_back_to_a_round_agree_on_the_smallest_letters_until_one_is_used():
    before = Round(last_body())
    body = before.body()
    generations = {letter: Round(reopened(body, letter), VOTERS) for letter in "abc"}
    opened = {
        letter: before.certify(body, VOTERS).model_copy(update={"body": of.last}) for letter, of in generations.items()
    }

    async def run(*messages):
        peer = Peer(before, VOTERS[0])
        peer.agreement.following.follow(opened["b"])
        for each in messages:
            peer.receive(Certificates(certificates=tuple(each)))
        return peer.agreement.chain.last.generation[-1], peer.agreement.chain.last.round

    used = generations["c"].certify(generations["c"].body(), VOTERS)
    assert virtually(run([opened["a"]], [opened["c"]])) == ("a", 21)
    assert virtually(run([opened["c"], used], [opened["a"]])) == ("c", 22)


def test_no_certificate_of_an_earlier_generation_is_skipped_to():
    round = Round(reopened(last_body()), VOTERS)
    later = Round(last_body(round=40))
    old, new = (later.body(), changed(later.body(), generation=round.last.generation))
    assert [bool(check_skip(later.certify(body, VOTERS), round.last, round.key(""))) for body in (old, new)] == [
        True,
        False,
    ]
    assert not check_skip(later.certify(new, VOTERS), last_body(), round.key("")), "from before it"


@pytest.mark.parametrize("times", [1, 2])
def test_a_chain_that_a_full_disk_refused_is_written_again(tmp_path, times):
    """The next certificate was added behind a torn line, and the peer could not start again."""
    chain, keys, path = Chain(START), IdentityKeys(Identity(tmp_path / "key")), tmp_path / "chain"
    file = ChainFile(path, START, keys)

    def grow():
        round = Round(chain.last, PEERS[:1])
        chain.add(round.certify(round.body(), PEERS[:1]), never)

    grow()
    file.save(chain)
    unlimited, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, unlimited[1]))
    try:
        for _ in range(times):
            grow()
            with pytest.raises(OSError, match="File too large"):
                file.save(chain)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        signal.signal(signal.SIGXFSZ, handler)
    file.save(chain)
    assert ChainFile(path, START, keys).load().certificates == chain.certificates


def test_a_thinned_chain_comes_back_from_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("spes_p2p.swarm.chain.MAX_RECENT", 8)
    chain, keys = Chain(START), IdentityKeys(Identity(tmp_path / "key"))
    file = ChainFile(tmp_path / "chain", START, keys)
    for _ in range(30):
        round = Round(chain.last, PEERS[:1])
        chain.add(round.certify(round.body(), PEERS[:1]), lambda certificate, body: True)
        file.save(chain)
    again = ChainFile(tmp_path / "chain", START, IdentityKeys(Identity(tmp_path / "key"))).load()
    assert again.certificates == chain.certificates and again.last == chain.last and len(again) < 20
    assert [again.body_at(round) for round in range(50)] == [chain.body_at(round) for round in range(50)]
    other = START.model_copy(update={"previous": digest("another")})
    with pytest.raises(ConfigError, match="of another run"):
        ChainFile(tmp_path / "chain", other, IdentityKeys(Identity(tmp_path / "key"))).load()
