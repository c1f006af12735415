"""What a peer does by its owner's wish and rules: a table of twenty states in virtual time, and the owner of both."""

import datetime
import errno
import math
import signal
import threading
from zoneinfo import ZoneInfo

import pytest

from spes_p2p.config import PeerConfig
from spes_p2p.config.controls import Intent, Limits, Rules, Surroundings, Wish, duration, effective, spans, words
from spes_p2p.errors import ConfigError
from spes_p2p.peer import controls as owner
from spes_p2p.peer.controls import Controls, changed, limited, load

BERLIN = ZoneInfo("Europe/Berlin")
NIGHTS = Rules(hours="mon-fri 22:00-07:00, sat-sun 00:00-24:00")
MAINS = Rules(on_battery=False)
ALONE = Rules(programs=("blender",))
THRIFTY = Rules(gb_a_day=2)
ALL = Rules(hours="08:00-20:00", on_battery=False, programs=("blender",), gb_a_day=2)


def at(text: str, **around: object) -> Surroundings:
    """Return the surroundings at a local time of November 2026, such as `wed 25 12:00`, or at a whole date."""
    if text[0].isalpha():
        text = f"2026-11-{text.split(' ', 1)[1]}"
    time = datetime.datetime.strptime(text, "%Y-%m-%d %H:%M")
    return Surroundings(time.replace(tzinfo=BERLIN), **around)  # type: ignore[arg-type]


NOON = at("wed 25 12:00").now.timestamp()
# Wish, rules, surroundings; state, whether it trains, and a part of the reason.
TABLE = [
    (Wish(), Rules(), at("wed 25 12:00"), "training", True, ""),
    (Wish("pause"), Rules(), at("wed 25 12:00"), "paused", False, "until it is resumed"),
    (Wish("pause", NOON + 3600), Rules(), at("wed 25 12:59"), "paused", False, "until 13:00"),
    (Wish("pause", NOON + 86400), Rules(), at("wed 25 12:59"), "paused", False, "until Thu 26 Nov 12:00"),
    (Wish("pause", NOON + 3600), Rules(), at("wed 25 13:00"), "training", True, ""),
    (Wish("finish"), Rules(), at("wed 25 12:00"), "finishing", True, "after this round"),
    (Wish("finish"), NIGHTS, at("wed 25 12:00"), "finishing", False, "no more steps: outside its hours"),
    (Wish("leave"), Rules(), at("wed 25 12:00"), "leaving", False, "hands its slots over"),
    (Wish("leave"), NIGHTS, at("wed 25 12:00"), "leaving", False, "hands its slots over"),
    (Wish(), NIGHTS, at("wed 25 21:59"), "paused", False, "it trains again at 22:00"),
    (Wish(), NIGHTS, at("wed 25 22:00"), "training", True, ""),
    (Wish(), NIGHTS, at("thu 26 06:59"), "training", True, ""),
    (Wish(), NIGHTS, at("thu 26 07:00"), "paused", False, "it trains again at 22:00"),
    (Wish(), NIGHTS, at("sat 28 12:00"), "training", True, ""),
    (Wish(), NIGHTS, at("mon 30 03:00"), "paused", False, "it trains again at 22:00"),
    (Wish(), Rules(hours="fri 10:00-11:00"), at("fri 27 11:00"), "paused", False, "it trains again fri 10:00"),
    (Wish(), MAINS, at("wed 25 12:00", is_on_battery=True), "paused", False, "on battery"),
    (Wish(), ALONE, at("wed 25 12:00", running=frozenset({"blender", "bash"})), "paused", False, "blender runs"),
    (Wish(), THRIFTY, at("wed 25 12:00", bytes_today=1_999_999_999), "training", True, ""),
    (Wish(), THRIFTY, at("wed 25 12:00", bytes_today=2_000_000_000), "paused", False, "the day's 2 GB are used"),
    (Wish(), ALL, at("wed 25 12:00", bytes_today=5, running=frozenset({"bash"})), "training", True, ""),
    # The night on which the clock goes from 3:00 back to 2:00, and the one on which it leaves 2:00 to 3:00 out.
    (Wish(), Rules(hours="02:00-03:00"), at("2026-10-25 02:30"), "training", True, ""),
    (Wish(), Rules(hours="02:00-04:00"), at("2026-03-29 03:00"), "training", True, ""),
    (Wish("pause"), ALL, at("wed 25 23:00"), "paused", False, "until it is resumed"),
]


@pytest.mark.parametrize("row", TABLE, ids=map(str, range(len(TABLE))))
def test_a_peer_does_what_the_table_says(row):
    wish, rules, around, state, trains, reason = row
    found = effective(wish, rules, around)
    assert (found.state, found.trains) == (state, trains) and reason in found.reason
    assert bool(found.reason) == (state != "training")


def test_a_day_by_the_clock_holds_exactly_the_minutes_of_its_spans():
    trains = []
    for minute in range(24 * 60):
        clock = f"{minute // 60:02}:{minute % 60:02}"
        trains.append(effective(Wish(), Rules(hours="22:00-07:00, 12:00-12:30"), at(f"wed 25 {clock}")).trains)
    assert [m for m in range(1, 1440) if trains[m] != trains[m - 1]] == [420, 720, 750, 1320]


def test_times_and_words_are_read_as_they_are_written():
    assert [duration(text) for text in ("90s", "15m", "2h", "1h30m", " 1D ")] == [90, 900, 7200, 5400, 86400]
    assert words(["threads=2", "on-battery=no", "hours="]) == {"threads": "2", "on_battery": "no", "hours": None}
    cut = ["hours=mon-fri 22:00-07:00", " sat-sun 00:00-24:00", "programs=blender", "steam", "gb_a_day=20"]
    hours = "mon-fri 22:00-07:00, sat-sun 00:00-24:00"
    assert words(cut) == {"hours": hours, "programs": "blender,steam", "gb_a_day": "20"}
    assert spans("Sat-Mon 9:00-10:00") == [(day * 24 * 60 + 540, 60) for day in (5, 6, 0)]


# What is asked and what the refusal names.
BAD = {
    "pause of no time": (("pause", {"for": "soon"}), "'soon' is no time.*say 90s"),
    "pause of 0": (("pause", {"for": "0s"}), "'0s' is no time"),
    "pause of two years": (("pause", {"for": "731d"}), "a year at most"),
    "pause of nothing": (("pause", {"for": ""}), "is no time"),
    "pause of something else": (("pause", {"until": "noon"}), "pause takes no 'until', but `for`"),
    "pause without a unit": (("pause", {"for": "5"}), "'5' is no time.*say 90s"),
    "resume with a value": (("resume", {"for": "2h"}), "resume takes no for"),
    "unknown verb": (("stop", {}), "no verb 'stop'; it is one of status, pause, resume"),
    "nothing to set": (("set", {}), "name one of threads, slots, duty"),
    "unknown limit": (("set", {"memory": 3}), "memory cannot be set; it is one of"),
    "no thread": (("set", {"threads": 0}), "threads=0: input should be greater than or equal to 1; see docs"),
    "threads in words": (("set", {"threads": "two"}), "threads='two': input should be a valid integer"),
    "more threads than processors": (("set", {"threads": 100_000}), "threads=100000 exceeds the .* set at most"),
    "threads that are true": (("set", {"threads": True}), "threads=True: set a number"),
    "duty that is true": (("set", {"duty": True}), "duty=True: set a number"),
    "duty of nothing": (("set", {"duty": "0%"}), "duty=.*greater than or equal to 0.01"),
    "duty above all": (("set", {"duty": "150%"}), "duty=.*less than or equal to 1"),
    "uplink below zero": (("set", {"uplink_mbit": -1}), "uplink_mbit=-1"),
    "slots in a list": (("set", {"slots": [1]}), "slots=.*valid integer"),
    "hours without end": (("rules", {"hours": "mon-fri 22:00"}), "no span of hours; write it as in"),
    "hours of a day 8": (("rules", {"hours": "day 9:00-10:00"}), "no span of hours"),
    "hour 25": (("rules", {"hours": "25:00-26:00"}), "no span of hours"),
    "hours of no length": (("rules", {"hours": "9:00-9:00"}), "no span of hours"),
    "battery in doubt": (("rules", {"on_battery": "perhaps"}), "on_battery='perhaps'.*valid boolean"),
    "program with a slash": (("rules", {"programs": "/bin/sh"}), "programs.*pattern"),
    "GB below zero": (("rules", {"gb_a_day": -2}), "gb_a_day=-2: .*greater than or equal to 0.001"),
    "GB that are none": (("rules", {"gb_a_day": float("nan")}), "gb_a_day"),
    "unknown rule": (("rules", {"weather": "fine"}), "weather cannot be set"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_one_line_with_the_remedy_and_changes_nothing(tmp_path, case):
    controls, (asked, message) = Controls(tmp_path), BAD[case]
    before = controls.view()
    with pytest.raises(ConfigError, match=message) as refused:
        controls.act(*asked)
    assert "\n" not in str(refused.value)
    assert controls.view() == before and not (tmp_path / "controls.yaml").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wish: stop", "wish='stop': input should be 'run' or 'pause'; see docs/operating.md; or delete the file"),
        ("limits: {threads: many}", "limits.threads='many'"),
        ("rules: {hours: always}", "hours='always'.*no span of hours"),
        ("rules: {moon: full}", "unknown setting rules.moon"),
        ("until: .inf", "until=inf"),
        ("traffic: {day: today}", "traffic.day='today'"),
        ("wish: run\nwish: pause", "sets 'wish' on line 1 and again on line 2"),
        ("- pause", "holds list, not settings"),
        ("{", "is not valid YAML"),
        ("until: 2026-02-30", "is not valid YAML"),
        ("wish: !!python/object:os.system x", "is not valid YAML"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line_with_the_remedy(tmp_path, text, message):
    file = tmp_path / "controls.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        load(file)
    assert "\n" not in str(refused.value) and str(file) in str(refused.value)


class Clock:
    """A local time that a test moves."""

    def __init__(self) -> None:
        self.time = at("wed 25 12:00").now

    def __call__(self) -> datetime.datetime:
        return self.time


def test_a_restart_keeps_a_pause_limits_and_rules_but_neither_finish_nor_leave(tmp_path):
    clock = Clock()
    controls = Controls(tmp_path, clock)
    controls.act("set", {"threads": "2", "duty": "50%", "uplink_mbit": 3})
    controls.act("rules", {"hours": "mon-fri 22:00-07:00", "programs": "blender, steam", "on_battery": "no"})
    controls.act("rules", {"hours": None})
    controls.act("pause", {"for": "2h"})
    again = Controls(tmp_path, clock)
    assert again.view() == controls.view() and again.view()["state"] == "paused"
    assert again.view()["rules"] == {
        **{"hours": None, "on_battery": False, "programs": ["blender", "steam"], "gb_a_day": None}
    }
    started = limited(PeerConfig(run_id="run", threads=1), again.limits)
    assert (started.threads, started.uplink_mbit) == (2, 3.0)
    clock.time += datetime.timedelta(hours=2)
    assert Controls(tmp_path, clock).view()["state"] == "training"
    for verb in ("finish", "leave"):
        controls.act(verb, {})
        assert Controls(tmp_path, clock).view()["wish"] == "run"
    with pytest.raises(ConfigError, match="pause comes too late: the peer leaves"):
        controls.act("pause", {})


def test_a_verb_wakes_a_training_that_rests(tmp_path):
    controls = Controls(tmp_path)
    controls.act("set", {"duty": "1%"})
    found: list[Intent] = []
    training = threading.Thread(target=lambda: found.append(controls.intent(10.0, math.inf)))
    training.start()
    controls.act("pause", {})
    training.join(60)
    assert [intent.trains for intent in found] == [False]


def test_a_duty_cycle_rests_after_a_step_for_its_share(tmp_path, monkeypatch):
    rests: list[float] = []
    controls = Controls(tmp_path)
    monkeypatch.setattr(controls._changed, "wait_for", lambda _, seconds: rests.append(seconds))
    controls.intent(2.0, math.inf)
    controls.act("set", {"duty": "25%"})
    controls.intent(2.0, math.inf)
    controls.intent(1e6, math.inf)
    controls.intent(2.0, 1.5)
    controls.intent(2.0, 0.0)
    assert rests == [pytest.approx(6.0), owner.MAX_REST_SECONDS, 1.5], "never beyond the round's end"


def test_the_days_traffic_outlives_a_restart_and_ends_at_midnight(tmp_path):
    clock, total = Clock(), [0, 0]
    controls = Controls(tmp_path, clock)
    controls.act("rules", {"gb_a_day": 1})
    with controls.watching(lambda: (total[0], total[1]), max_slots=4, interrupts=False):
        total[:] = 300_000_000, 400_000_000
        controls.act("resume", {})
    again, total = Controls(tmp_path, clock), [100_000_000, 200_000_000]
    with again.watching(lambda: (total[0], total[1]), max_slots=4, interrupts=False):
        assert again.act("resume", {})["state"] == "paused"
        clock.time += datetime.timedelta(hours=12)
        assert again.act("resume", {})["state"] == "training"


def test_status_says_what_keeps_a_peer_that_may_train_from_it(tmp_path):
    controls = Controls(tmp_path)
    controls.live("it waits for the others")
    assert controls.act("status", {})["reason"] == "it waits for the others"
    assert controls.act("pause", {})["reason"] == "until it is resumed; other peers may take its slots"
    controls.live("")
    assert controls.act("resume", {})["reason"] == "it trains"


def test_more_slots_than_the_peer_was_started_with_are_refused(tmp_path):
    controls = Controls(tmp_path)
    with controls.watching(lambda: (0, 0), max_slots=4, interrupts=False):
        assert controls.act("set", {"slots": 4})["limits"]["slots"] == 4
        with pytest.raises(ConfigError, match="slots=5 exceeds the 4 that the peer was started with"):
            controls.act("set", {"slots": 5})


def test_a_rule_about_a_program_sees_this_machines_processes(tmp_path):
    import psutil

    controls = Controls(tmp_path)
    assert controls.act("rules", {"programs": [psutil.Process().name()]})["state"] == "paused"
    assert controls.act("rules", {"programs": None})["state"] == "training"


@pytest.mark.parametrize(("verb", "values"), [("leave", {}), ("pause", {}), ("set", {"duty": 0.5})])
def test_a_verb_that_cannot_be_kept_changes_nothing(tmp_path, verb, values, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    controls = Controls(tmp_path)
    before = controls.view()
    with monkeypatch.context() as patched:
        patched.setattr(owner, "write_atomic", full)
        with pytest.raises(ConfigError, match="No space left on device; make room, and repeat it"):
            controls.act(verb, values)
    assert controls.view() == before and controls.act("leave", {})["state"] == "leaving"


def test_leave_ends_this_process_as_sigterm_does(tmp_path):
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        controls = Controls(tmp_path)
        with controls.watching(lambda: (0, 0), max_slots=4, interrupts=True):
            assert controls.act("leave", {})["state"] == "leaving"
            assert not controls.intent(0.0, 0.0).leaves, "the signal does it, once"
        assert came == [signal.SIGTERM]
        with Controls(tmp_path).watching(lambda: (0, 0), max_slots=4, interrupts=False):
            pass
    finally:
        signal.signal(signal.SIGTERM, before)
    ranks = Controls(tmp_path)
    ranks.act("leave", {})
    assert ranks.intent(0.0, 0.0).leaves


def test_a_value_of_none_takes_a_setting_back():
    assert changed(Limits(threads=2, slots=3), {"threads": None}) == Limits(slots=3)
    assert changed(Rules(on_battery=False), {"on_battery": None}) == Rules()
