"""The peerstore holds addresses that lead to their peer, stays small, and never prevents a start."""

import json
import time

import pytest

from spes_p2p.swarm.membership import live_peers_of
from spes_p2p.swarm.p2p.identity import hashed_peer_id
from spes_p2p.swarm.p2p.peerstore import MAX_PAUSE_SECONDS, MAX_PEERS, DialBackoff, Peerstore, Scope, dialled, scope_of
from spes_p2p.swarm.records import Claim

PEERS = [hashed_peer_id(bytes([number])) for number in range(MAX_PEERS + 5)]
ME = PEERS[0]


def address(peer, port=4000):
    return f"/ip4/203.0.113.7/tcp/{port}/p2p/{peer}"


def test_what_was_noted_is_there_on_the_next_start(tmp_path):
    relayed = f"/ip4/203.0.113.9/tcp/4001/p2p/{PEERS[2]}/p2p-circuit/p2p/{PEERS[1]}"
    Peerstore(tmp_path / "known").update({PEERS[0]: [address(PEERS[0])], PEERS[1]: [relayed, address(PEERS[1])]})
    known = Peerstore(tmp_path / "known").addresses()
    assert known == {PEERS[0]: (address(PEERS[0]),), PEERS[1]: (relayed, address(PEERS[1]))}


def test_those_seen_longest_ago_make_room(tmp_path, monkeypatch):
    known, now = Peerstore(tmp_path / "known"), time.time()
    for number, peer in enumerate(PEERS):
        monkeypatch.setattr(time, "time", lambda number=number: now + number)
        known.update({peer: [address(peer)]})
    assert list(Peerstore(tmp_path / "known").addresses()) == PEERS[:4:-1]


def test_peers_that_a_certificate_names_make_room_for_none(tmp_path):
    """64 invented peers displaced the addresses of all real ones."""
    known, (voter, *ghosts) = Peerstore(tmp_path / "known"), PEERS
    for peers in ([voter], ghosts):
        known.update({peer: [address(peer)] for peer in peers}, first={voter})
    assert len(known.addresses()) == MAX_PEERS and next(iter(known.addresses())) in ghosts
    assert voter in Peerstore(tmp_path / "known").addresses()


def test_an_address_of_another_peer_is_not_kept(tmp_path):
    known = Peerstore(tmp_path / "known")
    known.update({PEERS[0]: [address(PEERS[1]), "/ip4/999.0.0.1/tcp/1/p2p/" + PEERS[0], "x", ""]})
    assert known.addresses() == {} and not (tmp_path / "known").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[1]",
        b'[{"peer_id": "../../etc", "addresses": [], "seen": 1}]',
        b"\xff\xfe",
        b"[" * 100_000,
        b" " * 2**18,
    ],
)
def test_a_damaged_file_counts_as_empty(tmp_path, content):
    (tmp_path / "known").write_bytes(content)
    known = Peerstore(tmp_path / "known")
    assert not known.addresses()
    known.update({PEERS[0]: [address(PEERS[0])]})
    assert list(Peerstore(tmp_path / "known").addresses()) == PEERS[:1]


def test_an_address_of_the_file_that_leads_elsewhere_is_not_used(tmp_path):
    entry = {"peer_id": PEERS[0], "addresses": [address(PEERS[1])], "seen": 1.0}
    (tmp_path / "known").write_text(json.dumps([entry]))
    assert not Peerstore(tmp_path / "known").addresses()


def test_a_full_disk_is_no_reason_to_end(tmp_path, monkeypatch, caplog):
    known = Peerstore(tmp_path / "absent" / "known")
    known.update({PEERS[0]: [address(PEERS[0])]})
    assert list(known.addresses()) == PEERS[:1] and "cannot keep" in caplog.text


# ---------------------------------------------------------------------- live peers


def claim(peer, state="active", max_slots=2):
    return Claim(peer_id=peer, state=state, max_slots=max_slots, since=1.0)


def claims(*records):
    return {record.peer_id: record for record in records}


def test_who_is_not_heard_of_any_more_is_missed_and_who_said_goodbye_is_not():
    _, killed, left = PEERS[:3]
    live = live_peers_of((), claims(claim(ME), claim(killed), claim(left)), ME)
    assert live == {killed, left}
    live = live_peers_of(live, claims(claim(ME), claim(left, "joining", 0)), ME)
    assert live == {killed}
    assert live_peers_of(live, claims(claim(ME)), ME) == {killed}


def test_who_comes_later_takes_the_place_of_those_long_gone():
    _, killed, newcomer = PEERS[:3]
    live = live_peers_of({killed}, claims(claim(ME), claim(newcomer)), ME)
    assert live == {newcomer}
    assert live_peers_of(live, claims(claim(newcomer, "joining", 0)), ME) == frozenset()


def test_a_third_machine_is_called_ever_less_however_many_name_it():
    """Sixty strangers name one place, and a watchdog looks every four seconds for ten minutes."""
    backoff = DialBackoff()
    named = {peer: [f"/ip4/192.0.2.1/tcp/4000/p2p/{peer}"] for peer in PEERS}
    calls = [sum(map(len, backoff.due(named, 4.0 * look).values())) for look in range(150)]
    assert max(calls) == 1 and sum(calls[:4]) >= 2
    assert sum(calls) <= 600 / MAX_PAUSE_SECONDS + 8


def test_a_place_that_is_silent_for_weeks_is_still_called_once_a_minute():
    backoff, peer = DialBackoff(), {PEERS[0]: [address(PEERS[0])]}
    calls = [bool(backoff.due(peer, look * MAX_PAUSE_SECONDS)) for look in range(5000)]
    assert all(calls)


def test_a_peer_that_has_answered_is_dialled_at_once_when_it_is_lost():
    backoff, peer = DialBackoff(), {PEERS[0]: [address(PEERS[0])]}
    assert [bool(backoff.due(peer, now)) for now in (0.0, 1.0, 4.0, 5.0)] == [True, False, True, False]
    backoff.reset(peer[PEERS[0]])
    assert backoff.due(peer, 6.0) == peer


# ---------------------------------------------------------------------- from where an address can be reached


@pytest.mark.parametrize(
    ("address", "scope"),
    [
        ("/ip4/127.0.0.1/tcp/1", Scope.MACHINE),
        ("/ip4/127.255.0.1/tcp/1", Scope.MACHINE),
        ("/ip4/0.0.0.0/tcp/1", Scope.MACHINE),
        ("/ip6/::1/tcp/1", Scope.MACHINE),
        ("/ip6/::/tcp/1", Scope.MACHINE),
        ("/ip6/::ffff:127.0.0.1/tcp/1", Scope.MACHINE),
        ("/ip6/64:ff9b::7f00:1/tcp/1", Scope.MACHINE),
        ("/ip4/10.1.2.3/tcp/1", Scope.NETWORK),
        ("/ip4/172.31.0.1/tcp/1", Scope.NETWORK),
        ("/ip4/192.168.0.1/tcp/1", Scope.NETWORK),
        ("/ip4/169.254.169.254/tcp/80", Scope.NETWORK),
        ("/ip4/100.127.0.1/tcp/1", Scope.NETWORK),
        ("/ip4/224.0.0.1/tcp/1", Scope.NETWORK),
        ("/ip6/fd00::1/tcp/1", Scope.NETWORK),
        ("/ip6/fe80::1/tcp/1", Scope.NETWORK),
        ("/ip6/2002:c0a8:1::1/tcp/1", Scope.NETWORK),
        ("/ip6/::ffff:10.0.0.1/tcp/1", Scope.NETWORK),
        ("/dns4/router.example/tcp/80", Scope.NETWORK),
        ("/ip4/8.8.8.8/tcp/1/p2p/Qm/p2p-circuit/ip4/192.168.0.1/tcp/1", Scope.NETWORK),
        ("/ip4/8.8.8.8/tcp/1", Scope.INTERNET),
        ("/ip4/172.32.0.1/tcp/1", Scope.INTERNET),
        ("/ip4/100.128.0.1/tcp/1", Scope.INTERNET),
        ("/ip6/2001:4860:4860::8888/tcp/1", Scope.INTERNET),
        ("/nonsense", Scope.NETWORK),
    ],
)
def test_an_address_is_known_by_its_narrowest_part(address, scope):
    assert scope_of(address) == scope
    assert dialled([address], Scope.INTERNET) == ((address,) if scope is Scope.INTERNET else ())
    assert dialled([address], Scope.MACHINE) == (address,)
