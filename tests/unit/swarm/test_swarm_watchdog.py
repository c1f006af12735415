"""What counts as death: of p2pd, of the DHT, and of a p2pd that runs and is silent. `tests/swarm/` kills real ones."""

import asyncio
import threading
from types import SimpleNamespace

from spes_p2p.swarm.p2p.peerstore import Peerstore
from spes_p2p.swarm.p2p.watchdog import MAX_SILENT_CHECKS, Watchdog


def watchdog(*, runs=True, is_alive=True, answers=True):
    p2p = SimpleNamespace(is_running=lambda: runs, ending="killed by signal 9", has_lost_sockets=lambda: False)
    dht = SimpleNamespace(is_alive=lambda: is_alive)
    return Watchdog(SimpleNamespace(p2p=p2p, dht=dht, p2pd_answers=lambda seconds: answers))


def test_where_all_is_well_nothing_has_died():
    assert watchdog().check() == ""


def test_a_p2pd_that_has_ended_is_dead_and_how_it_ended_is_said():
    assert "p2pd" in (said := watchdog(runs=False).check()) and "killed by signal 9" in said


def test_a_dht_that_has_ended_is_dead():
    assert "DHT" in watchdog(is_alive=False).check()


def test_whatever_a_known_peer_answers_the_watch_goes_on():
    dog, asked = watchdog(), []

    def ping(peers):
        asked.append(peers)
        raise AssertionError("an id of 21 bytes")

    dog._node.ping, dog._node.peerstore = ping, Peerstore()
    dog._reconnect()
    dog._reconnect()
    assert len(asked) == 2


def test_a_p2pd_that_ends_while_it_is_asked_is_found_dead_at_the_next_look(monkeypatch):
    """The end of its answer ended the watchdog's thread, and the peer was never restarted."""
    monkeypatch.setattr("spes_p2p.swarm.p2p.watchdog.INTERVAL_SECONDS", 0.01)
    dog, runs, dead = watchdog(), [True], threading.Event()

    def ping(peers):
        runs[0] = False
        raise asyncio.IncompleteReadError(b"", 1)

    dog._node.ping, dog._node.peerstore = ping, Peerstore()
    dog._node.p2p.is_running = lambda: runs[0]
    dog.on_death(dead.set)
    dog.start()
    assert dead.wait(30) and "p2pd" in dog.death


def test_a_machine_that_stood_still_does_not_end_the_checks():
    """Its first check after that raised, and ended the watchdog's thread."""

    def answers(seconds):
        raise TimeoutError

    dog = watchdog()
    dog._node.p2pd_answers = answers
    assert dog.check() == ""


def test_a_p2pd_that_cannot_be_asked_counts_as_silent():
    """What it sent was no answer: that ended the watchdog's thread."""

    def answers(seconds):
        raise ValueError("not a varint")

    dog = watchdog()
    dog._node.p2pd_answers = answers
    looks = [dog.check() for _ in range(MAX_SILENT_CHECKS)]
    assert looks[:-1] == [""] * (MAX_SILENT_CHECKS - 1) and "does not answer" in looks[-1]


def test_a_p2pd_that_does_not_answer_is_dead_after_some_looks_and_not_at_the_first():
    silent = watchdog(answers=False)
    looks = [silent.check() for _ in range(MAX_SILENT_CHECKS)]
    assert looks[:-1] == [""] * (MAX_SILENT_CHECKS - 1) and "does not answer" in looks[-1]


def test_a_late_listener_is_told_of_a_death_at_once():
    dead, heard = watchdog(runs=False), []
    dead.check()
    dead.on_death(lambda: heard.append("dead"))
    assert heard == ["dead"]
