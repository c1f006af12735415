"""Whose run a newcomer takes part in, where strangers found others of the same name."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from exchange_cluster import open_swarm
from lanes import sample

from spes_p2p.codecs.vectors import digest
from spes_p2p.config import RunConfig
from spes_p2p.errors import JoinError
from spes_p2p.swarm import manifest as module
from spes_p2p.swarm.exchange.versions import MANIFEST, TOKENIZER
from spes_p2p.swarm.manifest import (
    Manifest,
    check_kept,
    declare_manifest,
    fetch_manifest,
    publish_manifest,
)
from spes_p2p.swarm.p2p.identity import hashed_peer_id

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def open_peer(tmp_path):
    """Return a function that starts a peer who knows the first one."""
    swarms = []

    def start():
        addresses = swarms[0].node.addresses() if swarms else ()
        swarms.append(open_swarm(tmp_path / str(len(swarms)), addresses))
        return swarms[-1]

    yield start
    for swarm in swarms:
        swarm.close()


def ask_last(monkeypatch, founder):
    """Have newcomers, who ask in random order, ask everybody else before the founder."""
    draw = SimpleNamespace(sample=lambda peers, _: sorted(peers, key=founder.peer_id.__eq__))
    monkeypatch.setattr(module, "random", draw)


def found(swarm, tokenizer=b"the tokenizer", **settings):
    """Found a run of the name that all peers here know."""
    manifest = Manifest(
        run_id="run",
        founder=swarm.peer_id,
        software="0",
        config=RunConfig(**settings),
        vocab_size=64,
        tokenizer_digest=digest(tokenizer),
        tokenizer_bytes=len(tokenizer),
    )
    return publish_manifest(swarm, manifest, tokenizer)


@pytest.mark.full
@pytest.mark.guard
def test_who_knows_the_founder_passes_over_rivals_and_those_who_pass_the_run_off_as_theirs(open_peer, monkeypatch):
    founder, rival, thief = open_peer(), open_peer(), open_peer()
    manifest = found(founder)
    found(rival, b"another tokenizer", seed=1)
    publish_manifest(thief, manifest, b"a tokenizer that no founder has seen")
    ask_last(monkeypatch, founder)
    assert fetch_manifest(open_peer(), founder.peer_id) == (manifest, b"the tokenizer")


@pytest.mark.full
def test_who_does_not_know_the_founder_is_told_to_name_one_where_there_are_two(open_peer):
    found(open_peer())
    found(open_peer(), seed=1)
    with pytest.raises(JoinError, match="2 manifests of run 'run'; name the founder: --run-id run@PEER_ID"):
        fetch_manifest(open_peer())


def test_the_tokenizer_is_its_founders_whoever_else_offers_one(open_peer, monkeypatch):
    founder, thief = open_peer(), open_peer()
    manifest = found(founder)
    thief.keep_document(MANIFEST, manifest.encode(), manifest.founded_at)
    thief.keep_document(TOKENIZER, b"a tokenizer that no founder has seen")
    declare_manifest(thief, manifest)
    ask_last(monkeypatch, founder)
    assert fetch_manifest(open_peer()) == (manifest, b"the tokenizer")


def test_a_run_of_nobody_that_is_named_is_not_joined(open_peer):
    founder, named = open_peer(), hashed_peer_id(b"somebody else")
    found(founder)
    with pytest.raises(JoinError, match=rf"by {founder.peer_id}, not by {named}; correct --run-id"):
        fetch_manifest(open_peer(), named)


def test_a_manifest_of_a_hundred_kilobytes_is_not_fetched(open_peer):
    founder = open_peer()
    manifest = found(founder)
    founder.keep_document(MANIFEST, manifest.encode() + b" " * 100_000, manifest.founded_at)
    with pytest.raises(JoinError, match=r"cannot fetch the manifest of run 'run': no peer has sent one"):
        fetch_manifest(open_peer(), founder.peer_id)


def test_a_newcomer_asks_the_peers_of_its_link_before_strangers(open_peer, monkeypatch):
    """Identities that declare a manifest and serve none cost nothing, and only some peers are asked."""
    founder, ghost = open_peer(), open_peer()
    manifest = found(founder)
    declare_manifest(ghost, manifest)
    ask_last(monkeypatch, founder)
    monkeypatch.setattr(module, "MAX_ASKED", 1)
    assert fetch_manifest(open_peer()) == (manifest, b"the tokenizer")


# ---------------------------------------------------------------------- an old manifest, played again


def copied(peer, founder, manifest):
    """Have a peer fetch a run's documents and declare them."""
    assert fetch_manifest(peer, founder.peer_id)[0] == manifest
    declare_manifest(peer, manifest)
    return peer


def test_of_a_founders_manifests_the_newest_counts_whoever_offers_an_older_one(open_peer, monkeypatch):
    thief, founder = open_peer(), open_peer()
    old = found(founder, b"the old tokenizer")
    copied(thief, founder, old)
    new = found(founder, b"the new tokenizer", seed=1)
    copied(open_peer(), founder, new)
    draw = SimpleNamespace(sample=lambda peers, _: sorted(peers, key=thief.peer_id.__ne__))
    monkeypatch.setattr(module, "random", draw)
    assert fetch_manifest(open_peer(), founder.peer_id) == (new, b"the new tokenizer")
    founder.close()
    assert fetch_manifest(open_peer(), founder.peer_id) == (new, b"the new tokenizer")
    with pytest.raises(JoinError, match=f"{founder.peer_id} has founded run 'run' anew .* name another --output"):
        check_kept(thief, old, Path("output"))


@pytest.mark.parametrize("names_founder", sample([True, False], [True]))  # full: another line of the same refusal
def test_a_peer_that_has_had_a_newer_manifest_takes_no_older_one_after_a_restart(open_peer, tmp_path, names_founder):
    thief, founder = open_peer(), open_peer()
    old = found(founder, b"the old tokenizer")
    copied(thief, founder, old)
    new = found(founder, b"the new tokenizer", seed=1)
    newcomer = open_swarm(tmp_path / "newcomer", thief.node.addresses())
    assert fetch_manifest(newcomer, founder.peer_id)[0] == new
    newcomer.close()
    founder.close()
    again = open_swarm(tmp_path / "newcomer", thief.node.addresses())
    try:
        with pytest.raises(JoinError, match=r"only older manifests of run 'run'.* --initial-peers|declare 2 manifests"):
            fetch_manifest(again, founder.peer_id if names_founder else None)
    finally:
        again.close()
