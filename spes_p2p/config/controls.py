"""A machine's wish and rules, and whether it trains by them: pure functions of settings, clock and surroundings.

`spes ctl`, the page and the file `controls.yaml` all take their values through these models, so that a value that does
not fit is refused in the same words everywhere.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from spes_p2p.config.checkpoint import Frozen
from spes_p2p.config.machine import Mbit, Threads
from spes_p2p.errors import ConfigError

VERBS = ("status", "pause", "resume", "finish", "leave", "set", "rules")
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MINUTES, WEEK_MINUTES = 24 * 60, 7 * 24 * 60
MAX_PAUSE_SECONDS = 366 * 86400.0
GIGABYTE = 10**9
_SPAN = re.compile(r"(?:([a-z]{3})(?:-([a-z]{3}))? +)?(\d{1,2}):([0-5]\d) ?- ?(\d{1,2}):([0-5]\d)")
_EXAMPLE = "as in 'mon-fri 22:00-07:00, sat-sun 00:00-24:00'"


def duration(text: str) -> float:
    """Return the seconds of `90s`, `15m`, `2h`, `1d` or `1h30m`.

    Raises:
        ConfigError: it is no duration, or none between a second and a year.
    """
    parts = re.fullmatch(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", text.strip().lower())
    numbers = [int(part or 0) for part in parts.groups()] if parts and text.strip() else [0]
    seconds = float(sum(n * unit for n, unit in zip(numbers, (86400, 3600, 60, 1), strict=False)))
    if not 1 <= seconds <= MAX_PAUSE_SECONDS:
        raise ConfigError(f"{text[:60]!r} is no time to pause for; say 90s, 15m, 2h or 3d, a year at most")
    return seconds


def spans(text: str) -> list[tuple[int, int]]:
    """Return `mon-fri 22:00-07:00, sat-sun 00:00-24:00` as begins in minutes of the week, and lengths.

    A span without days is of every day. One that ends before it begins ends on the next day.

    Raises:
        ValueError: a part is no span.
    """
    found = []
    for part in text.lower().split(","):
        match = _SPAN.fullmatch(" ".join(part.split()))
        first, last, *clock = match.groups() if match else (None, None, "24", "0", "0", "0")
        begin, end = (60 * int(hour) + int(minute) for hour, minute in (clock[:2], clock[2:]))
        if not {first, last} - {None} <= set(DAYS) or begin >= DAY_MINUTES or end > DAY_MINUTES or begin == end:
            raise ValueError(f"hours={text[:60]!r}: {part.strip()[:40]!r} is no span of hours; write it {_EXAMPLE}")
        at = DAYS.index(first) if first else 0
        count = (DAYS.index(last) - at) % 7 + 1 if last else 1 if first else 7
        length = end - begin if end > begin else end - begin + DAY_MINUTES
        found += [((at + i) % 7 * DAY_MINUTES + begin, length) for i in range(count)]
    return found


def _hours(value: object) -> object:
    if isinstance(value, str):
        spans(value)
        return " ".join(value.lower().split())
    return value


def _names(value: object) -> object:
    """Split `blender, steam` into names."""
    parts = value.split(",") if isinstance(value, str) else value
    return [str(part).strip() for part in parts] if isinstance(parts, Sequence) else parts


def _share(value: object) -> object:
    """Read `50%` as 0.5."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?) ?%", value.strip())):
        return float(match[1]) / 100
    return value


ProgramName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.+ -]+$")]


class Rules(Frozen):
    """When this machine may train. All rules that are set must allow it."""

    hours: Annotated[str, BeforeValidator(_hours), Field(max_length=400)] | None = None
    """Hours of the local clock in which it trains; by default all."""
    on_battery: bool = True
    """Whether it trains on battery, too."""
    programs: Annotated[tuple[ProgramName, ...], BeforeValidator(_names), Field(max_length=20)] = ()
    """Programs beside which it does not train, by the names of their processes."""
    gb_a_day: Annotated[float, Field(ge=1e-3, le=1e6, allow_inf_nan=False)] | None = None
    """Traffic from which it does not train until the local midnight, sent and received, in 10^9 bytes."""


class Limits(Frozen):
    """How much of this machine the peer takes; None leaves it as the peer was started."""

    threads: Threads | None = None
    """CPU threads per rank."""
    slots: Annotated[int, Field(ge=1, le=128)] | None = None
    """Most slots to train, up to what the peer was started with; from the next round on."""
    duty: Annotated[float, BeforeValidator(_share), Field(ge=0.01, le=1, allow_inf_nan=False)] | None = None
    """Share of the time that it trains; it rests between steps."""
    uplink_mbit: Mbit | None = None
    """Upload rate in 10^6 bits per second; from the next start on."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool):
            raise ValueError(f"{info.field_name}={value}: set a number, as in threads=2")
        return value


class Traffic(Frozen):
    """Bytes of one day of the local clock."""

    day: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")] = "1970-01-01"
    num_bytes: Annotated[int, Field(ge=0, le=2**62)] = 0


class Kept(Frozen):
    """What `controls.yaml` keeps from one start of a peer to the next. `finish` and `leave` end with the peer."""

    wish: Literal["run", "pause"] = "run"
    until: Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)] | None = None
    """End of a pause in seconds since the epoch; None pauses until `resume`."""
    limits: Limits = Limits()
    rules: Rules = Rules()
    traffic: Traffic = Traffic()


@dataclass(frozen=True)
class Wish:
    """What the owner wants."""

    verb: Literal["run", "pause", "finish", "leave"] = "run"
    until: float | None = None  # end of a pause in seconds since the epoch; None lasts until `resume`


@dataclass(frozen=True)
class Surroundings:
    """What the rules ask about."""

    now: datetime.datetime  # local, with its offset
    is_on_battery: bool = False  # also on a machine without one
    running: frozenset[str] = frozenset()  # those programs of the rules that run
    bytes_today: int = 0  # sent and received since the local midnight


@dataclass(frozen=True)
class Effective:
    """What a peer does."""

    state: Literal["training", "paused", "finishing", "leaving"]
    trains: bool
    reason: str = ""  # for its owner; empty while it simply trains


@dataclass(frozen=True)
class Intent:
    """What the training is to do next."""

    trains: bool = True  # whether the peer may hold slots and make steps
    ends: bool = False  # after this round
    leaves: bool = False  # now
    threads: int | None = None  # CPU threads of each rank; None leaves them
    slots: int | None = None  # most slots to train; None for as many as it was started with


def effective(wish: Wish, rules: Rules, around: Surroundings) -> Effective:
    """Return what a peer does: its owner's wish, as far as the rules allow it."""
    forbidden = _forbidden(rules, around)
    if wish.verb == "leave":
        return Effective("leaving", False, "asked to leave: it hands its slots over")
    if wish.verb == "finish":
        rest = f"; it makes no more steps: {forbidden}" if forbidden else ""
        return Effective("finishing", not forbidden, f"asked to finish: it hands over after this round{rest}")
    if wish.verb == "pause" and (wish.until is None or around.now.timestamp() < wish.until):
        end = "it is resumed" if wish.until is None else _clock(wish.until, around.now)
        return Effective("paused", False, f"until {end}")
    return Effective("paused", False, forbidden) if forbidden else Effective("training", True)


def _clock(seconds: float, now: datetime.datetime) -> str:
    at = datetime.datetime.fromtimestamp(math.ceil(seconds), now.tzinfo)
    time = f"{at:%H:%M:%S}" if seconds - now.timestamp() < 600 else f"{at:%H:%M}"
    return time if at.date() == now.date() else f"{at:%a %d %b} {time}"


def _forbidden(rules: Rules, around: Surroundings) -> str:
    """Return which rule forbids to train, and until when; "" if none does."""
    now = around.now
    if rules.hours and not _within(rules.hours, now):
        return f"outside its hours, {rules.hours}; it trains again {_next(rules.hours, now)}"
    if not rules.on_battery and around.is_on_battery:
        return "on battery; it trains again on mains"
    if running := sorted(set(rules.programs) & around.running):
        return f"{running[0]} runs; it trains again when that has ended"
    if rules.gb_a_day is not None and around.bytes_today >= rules.gb_a_day * GIGABYTE:
        return f"the day's {rules.gb_a_day:g} GB are used; it trains again at 00:00"
    return ""


def _minute(at: datetime.datetime) -> int:
    return DAY_MINUTES * at.weekday() + 60 * at.hour + at.minute


def _within(hours: str, at: datetime.datetime) -> bool:
    return any((_minute(at) - begin) % WEEK_MINUTES < length for begin, length in spans(hours))


def _next(hours: str, now: datetime.datetime) -> str:
    """Return the day and time of the next span's begin, by the clock on the wall."""
    begin = min((begin for begin, _ in spans(hours)), key=lambda begin: (begin - _minute(now)) % WEEK_MINUTES)
    day, minute = divmod(begin, DAY_MINUTES)
    time = f"{minute // 60:02}:{minute % 60:02}"
    return f"at {time}" if day == now.weekday() and begin > _minute(now) else f"{DAYS[day]} {time}"


def words(values: Sequence[str]) -> dict[str, Any]:
    """Return `threads=2 duty=50% hours=` as values by name; an empty value takes a setting back.

    Args:
        values: The words, cut at commas as a list's are: what has no `=` goes on with the word before it.

    Raises:
        ConfigError: the first word has no `=`, or a name comes twice.
    """
    whole: list[str] = []
    for value in values:
        if "=" in value or not whole:
            whole.append(value)
        else:
            whole[-1] += f",{value}"
    found: dict[str, Any] = {}
    for word in whole:
        name, sign, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if not sign or not name:
            raise ConfigError(f"{word[:60]!r} sets nothing; write NAME=VALUE, as in threads=2")
        if name in found:
            raise ConfigError(f"{name} is set twice; keep one")
        found[name] = value.strip() or None
    return found
