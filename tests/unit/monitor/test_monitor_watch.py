"""The watch against a scripted swarm: what it does about silence, stale models and the end."""

import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pytest

from spes_p2p.cli import OncePerMinute
from spes_p2p.config import RoundConfig, RunConfig
from spes_p2p.config.commands import MonitorConfig
from spes_p2p.errors import DataError, ExchangeError
from spes_p2p.monitor.view import Sample, SwarmView
from spes_p2p.monitor.watch import Ending, HeldOut, Watch, plan_pull, pull_round
from spes_p2p.swarm.certificate import Body, SlotState
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.records import Claim, Metrics, Progress
from tests.support.agreement import PEERS, last_body
from tests.unit.monitor.swarms import body, claim, empty_view, peer_id, report

LAST = 3


class ScriptedSwarm:
    """Two peers that finish round n whenever `round` is set to n."""

    def __init__(self) -> None:
        self.peer_id, self.round, self.is_closed = peer_id(99), 0, False
        self.members, self.ghosts = [0, 1], list[int]()
        self.silences = 0
        self.watchdog = ScriptedWatchdog()
        self.consensus = SimpleNamespace(bodies=self.bodies, known=self.known)
        self.on_wait: Callable[[int], None] = lambda polls: None
        self.polls = 0

    def now(self) -> float:
        return time.monotonic()

    def read_now(self, kind: type) -> Mapping[str, object]:
        if self.silences:
            self.silences -= 1
            raise TimeoutError
        records = {
            Claim: [claim(i, [i]) for i in (*self.members, *self.ghosts)],
            Progress: [],
            Metrics: [report(i, self.round) for i in self.members] if self.round else [],
        }[kind]
        return {record.peer_id: record for record in records}

    def names(self) -> dict[str, str]:
        return {}

    def known(self) -> set[str] | None:
        return {peer_id(i) for i in (0, 1)} if self.round else None

    def bodies(self) -> Mapping[int, Body]:
        return {number: body(number, dict.fromkeys(self.members, 1000)) for number in range(1, self.round + 1)}

    def last(self) -> Body:
        return last_body(PEERS[:2], round=self.round)

    def wait(self, seconds: float) -> bool:
        time.sleep(0.002)
        self.polls += 1
        self.on_wait(self.polls)
        return self.is_closed


class ScriptedArchive:
    def __init__(self) -> None:
        self.round, self.pulls, self.evaluated = 0, [], []
        self.failures: list[Exception] = []

    def pull(self, body: Body, peers: list[str], *, is_last: bool) -> None:
        assert is_last == (body.round >= LAST)
        self.pulls.append(body.round)
        if self.failures:
            raise self.failures.pop(0)
        self.round = body.round

    def evaluate(self) -> HeldOut:
        self.evaluated.append(self.round)
        return HeldOut(6.0 - self.round, {})

    def samples(self) -> tuple[Sample, ...]:
        return (Sample("def ", f"text {self.round}", "truth"),)


class ScriptedWatchdog:
    """Has `death` on record once it has noticed; `check` notices at once what has `died`."""

    def __init__(self) -> None:
        self.death = self.died = ""

    def check(self) -> str:
        self.death = self.death or self.died
        return self.death


class Recorder:
    """Keeps the newest view, and each new evaluation in the order in which views showed it."""

    def __init__(self, known: Mapping[int, float]) -> None:
        self.known = set(known)
        self.evaluations: list[tuple[int, float]] = []

    def show(self, view: SwarmView) -> None:
        self.view = view
        self.evaluations += [item for item in view.held_out.items() if item[0] not in self.known]
        self.known |= view.held_out.keys()


class Scene:
    """A watch with everything around it."""

    def __init__(self, view: SwarmView | None = None, lease_seconds: float = 30.0, every: int = 1) -> None:
        view = view or empty_view()
        self.swarm, self.archive, self.recorder, self.saved = (
            ScriptedSwarm(),
            ScriptedArchive(),
            Recorder(view.held_out),
            [],
        )
        self.told: list[tuple[int, float | None]] = []
        rounds = RoundConfig(total=LAST, lease_seconds=lease_seconds, heartbeat_seconds=lease_seconds / 2)
        revisions = SimpleNamespace(run=RunConfig(round=rounds), look=lambda: None)
        self.watch = Watch(
            *(self.swarm, revisions, self.archive, self.recorder.show, view),  # type: ignore[arg-type]
            save=lambda round, loss: self.saved.append(round),
            evaluated=lambda round, loss: self.told.append((round, loss)),
            settings=MonitorConfig(run_id="run", initial_peers=["/"], evaluate_every=every, poll_seconds=1e-9),
        )

    def advance(self, polls: int) -> None:
        """Finish a round once the one before it was evaluated."""
        if self.archive.evaluated and self.archive.evaluated[-1] == self.swarm.round:
            self.swarm.round = min(self.swarm.round + 1, LAST)


def test_every_round_is_evaluated_and_the_last_one_archived():
    scene = Scene()
    scene.swarm.on_wait = scene.advance
    assert scene.watch.run() is Ending.FINISHED
    assert scene.recorder.evaluations == [(0, 6.0), (1, 5.0), (2, 4.0), (3, 3.0)]
    assert scene.told == [(1, 5.0), (2, 4.0)], (
        "tasks run on what training has made, and on the last model when the swarm is left"
    )
    assert scene.saved == [LAST]


def test_rounds_between_evaluations_are_left_out_but_the_last_is_not():
    scene = Scene(every=2)

    def advance(polls: int) -> None:
        if polls > 20 * (scene.swarm.round + 1):
            scene.swarm.round = min(scene.swarm.round + 1, LAST)

    scene.swarm.on_wait = advance
    scene.watch.run()
    assert [number for number, _ in scene.recorder.evaluations] == [0, 2, 3]


def test_a_version_that_is_not_to_be_had_is_tried_again(monkeypatch):
    monkeypatch.setattr("spes_p2p.monitor.watch.RETRY_SECONDS", 0.01)
    scene = Scene()
    scene.swarm.on_wait = scene.advance
    scene.archive.failures = [ExchangeError("no peer has it"), TimeoutError(), OSError(28, "No space left on device")]
    assert scene.watch.run() is Ending.FINISHED
    assert scene.archive.pulls[:4] == [1, 1, 1, 1] and scene.recorder.evaluations[-1] == (3, 3.0)


def test_held_out_text_that_cannot_be_read_ends_the_watch():
    scene = Scene()

    def fail() -> float:
        raise DataError("the held-out set is empty; add text")

    scene.archive.evaluate = fail  # type: ignore[method-assign]
    with pytest.raises(DataError, match="add text"):
        scene.watch.run()


def test_silence_of_the_dht_is_waited_over():
    """However long: the swarm may be well. It ended as if all peers were gone."""
    scene = Scene(lease_seconds=0.1)
    scene.swarm.silences = 200  # of 2 ms each, and two leases are 200 ms
    scene.swarm.on_wait = scene.advance
    assert scene.watch.run() is Ending.FINISHED


@pytest.mark.parametrize("ghosts", [[], [7, 8]], ids=["nobody", "strangers"])
def test_a_swarm_without_claims_of_known_peers_for_two_leases_is_gone(ghosts):
    scene = Scene(lease_seconds=0.1)

    def leave(polls: int) -> None:
        assert polls < 2000, "strangers keep it here for ever"
        if scene.archive.evaluated[-1:] == [1]:
            scene.swarm.members, scene.swarm.ghosts = [], ghosts
        else:
            scene.advance(polls)

    scene.swarm.on_wait = leave
    began = time.monotonic()
    assert scene.watch.run() is Ending.VANISHED and time.monotonic() - began >= 0.2
    assert scene.recorder.evaluations[-1][0] == 1 and not scene.saved


def test_a_dht_process_that_has_died_ends_the_watch():
    """Without its DHT process a monitor reads nothing; it must not wait for ever."""
    scene = Scene()

    def die(polls: int) -> None:
        scene.advance(polls)
        if scene.archive.evaluated[-1:] == [1]:
            scene.swarm.watchdog.death = "this peer's DHT process has died"
        assert polls < 2000, "it would go on for ever"

    scene.swarm.on_wait = die
    assert scene.watch.run() is Ending.CUT_OFF
    assert scene.recorder.evaluations[-1] == (1, 5.0) and not scene.saved


def test_a_monitor_without_p2pd_does_not_take_the_swarm_for_gone():
    scene = Scene(lease_seconds=0.1)

    def die(polls: int) -> None:
        scene.swarm.members, scene.swarm.watchdog.died = [], "p2pd has died"

    scene.swarm.on_wait = die
    assert scene.watch.run() is Ending.CUT_OFF


def test_a_closed_swarm_stops_the_watch():
    scene = Scene()
    scene.swarm.is_closed = True
    assert scene.watch.run() is Ending.STOPPED


def test_a_resumed_watch_evaluates_nothing_twice_and_still_ends():
    view = empty_view().evaluated(0, 6.0).evaluated(LAST, 3.0)
    scene = Scene(view)
    scene.swarm.round = LAST
    assert scene.watch.run() is Ending.FINISHED
    assert scene.recorder.evaluations == [] and scene.archive.pulls == [LAST] and scene.saved == [LAST]


def version(name: str, round: int, digest: str = "a") -> Version:
    return Version.model_construct(name=name, round=round, digest=64 * digest)


def inventory(**rounds: Mapping[str, tuple[int, str]]) -> dict[str, dict[str, Version]]:
    """Versions by peer and name (`slot_0` for `slot-0`), given as (round, digest)."""
    return {
        peer: {name.replace("_", "-"): version(name.replace("_", "-"), *what) for name, what in versions.items()}
        for peer, versions in rounds.items()
    }


def certified(round: int, shared: str, *slots: tuple[int, str]) -> Body:
    """Return the body of a certificate that names these versions, slots given as (round, digest)."""
    states = tuple(SlotState(round=made, digest=64 * digest) for made, digest in slots)
    return last_body(PEERS[:2], round=round, shared=64 * shared, slots=states)


def test_only_the_certified_versions_are_asked_for():
    honest = {"shared": (4, "a"), "slot_0": (4, "b")}
    found = inventory(a=honest, b=honest, liar={"shared": (9999, "c"), "slot_0": (9999, "c")})
    current, older = plan_pull(certified(4, "a", (4, "b")), found)
    assert current == {"shared": (4, 64 * "a"), "slot-0": (4, 64 * "b")} and not older


def test_an_orphan_comes_as_it_was_and_what_was_never_committed_only_if_a_peer_has_it():
    found = inventory(
        a={"shared": (4, "a"), "slot_0": (4, "b"), "slot_1": (3, "c"), "slot_2": (2, "d")},
        b={"shared": (4, "a"), "slot_0": (3, "b"), "slot_1": (3, "c"), "slot_2": (1, "e"), "slot_3": (0, "e")},
    )
    never = SlotState(round=0, digest="")
    body = certified(4, "a", (4, "b"), (4, "f"), (3, "f"))
    current, older = plan_pull(body.model_copy(update={"slots": (*body.slots, never, never)}), found)
    assert current == {
        "shared": (4, 64 * "a"),
        **{"slot-0": (4, 64 * "b"), "slot-1": (4, 64 * "f"), "slot-2": (3, 64 * "f"), "slot-3": (0, 64 * "e")},
    }
    assert {name: state for name, state in older.items() if name != "slot-3"} == {
        **{"slot-1": (3, 64 * "c"), "slot-2": (2, 64 * "d")}
    }


def test_shared_that_no_peer_has_published_yet_is_waited_for():
    found = inventory(a={"shared": (5, "b")}, b={"shared": (4, "c")})
    assert plan_pull(certified(6, "a"), found) == ({"shared": (6, 64 * "a")}, {})


def test_versions_that_are_not_to_be_had_take_a_line_a_minute_of_a_monitors_log(caplog):
    """Ninety of 142 lines told of them, each with another round, slot, peer or reason."""
    caplog.set_level("INFO", "spes_p2p")
    caplog.handler.addFilter(OncePerMinute())
    try:
        for number in range(2, 12):
            offers = {
                "a": {
                    "shared": version("shared", number, "a"),
                    **{f"slot-{slot}": version(f"slot-{slot}", number - 1) for slot in range(4)},
                }
            }
            swarm = SimpleNamespace(
                inventory=lambda peers, offers=offers: offers,
                versions=dict,
                pull=lambda wanted, peers, number=number, **_: {
                    name: f"peer{number}: ControlFailure({name})" for name in wanted if name != "shared"
                },
            )
            body = certified(number, "a", *[(number, "b")] * 4)
            pull_round(swarm, RunConfig(), body, ["a"], in_fp32=True)  # type: ignore[arg-type]
    finally:
        caplog.handler.removeFilter(caplog.handler.filters[-1])
    assert len(caplog.messages) == 1 and "no certified version of slot-0" in caplog.text, caplog.messages
