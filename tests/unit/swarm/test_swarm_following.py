"""Which certificates a peer follows: branches, gaps, what is final, and what comes back from disk."""

import asyncio
import random
import resource
import signal
from contextlib import asynccontextmanager

import pytest

from benchmarks.history_liars import Liar
from benchmarks.history_peers import NUM_SLOTS, Node, World
from spes_p2p.errors import ConfigError
from spes_p2p.swarm.certificate import Certificates, Question, Result, Revision, check_skip, genesis
from spes_p2p.swarm.chain import Chain, ChainFile
from spes_p2p.swarm.p2p.identity import Identity, IdentityKeys
from spes_p2p.swarm.proposal import Proposal
from tests.support.agreement import ENDED, PEERS, RULES, Peer, Round, digest, last_body, virtually

START = genesis("run", PEERS[0], digest("manifest"), NUM_SLOTS, PEERS[:12])
VOTERS = PEERS[:5]


@asynccontextmanager
async def swarm(seed, num=4, kinds=None):
    """Yield a world whose peers have started; all of them vote after the first round."""
    world = World(0, random.Random(seed), START)
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
    async def run(num):
        peer = Peer(Round(), VOTERS[0])
        last, strange = peer.round.last, PEERS[20:25]
        later = Round(last_body(strange, round=40))
        first = later.certify(later.body(), (*last.voters[:signers], *strange))
        after = Round(first.body, strange)
        peer.receive(Certificates(certificates=(first, after.certify(after.body(), strange))[:num]))
        return peer.agreement.chain.last != last

    assert virtually(run(2)) == (signers > 2) and not virtually(run(1))


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
