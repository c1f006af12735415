"""What counts as death: of p2pd, of the DHT, and of a p2pd that runs and is silent. `tests/swarm/` kills real ones."""

from types import SimpleNamespace

from spes_p2p.swarm.p2p.watchdog import MAX_SILENT_CHECKS, Watchdog


def watchdog(*, runs=True, is_alive=True, answers=True):
    p2p = SimpleNamespace(is_running=lambda: runs, ending="killed by signal 9")
    dht = SimpleNamespace(is_alive=lambda: is_alive)
    return Watchdog(SimpleNamespace(p2p=p2p, dht=dht, p2pd_answers=lambda seconds: answers))


def test_where_all_is_well_nothing_has_died():
    assert watchdog().check() == ""


def test_a_p2pd_that_has_ended_is_dead_and_how_it_ended_is_said():
    assert "p2pd" in (said := watchdog(runs=False).check()) and "killed by signal 9" in said


def test_a_dht_that_has_ended_is_dead():
    assert "DHT" in watchdog(is_alive=False).check()


def test_a_p2pd_that_does_not_answer_is_dead_after_some_looks_and_not_at_the_first():
    silent = watchdog(answers=False)
    looks = [silent.check() for _ in range(MAX_SILENT_CHECKS)]
    assert looks[:-1] == [""] * (MAX_SILENT_CHECKS - 1) and "does not answer" in looks[-1]


def test_a_late_listener_is_told_of_a_death_at_once():
    dead, heard = watchdog(runs=False), []
    dead.check()
    dead.on_death(lambda: heard.append("dead"))
    assert heard == ["dead"]
