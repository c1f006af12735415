"""The hand on the switch: owns a machine's wish and rules, keeps them in its output folder, and tells the training."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import yaml
from pydantic import ValidationError

from spes_p2p.cli import explain
from spes_p2p.config import PeerConfig
from spes_p2p.config.controls import (
    VERBS,
    Kept,
    Limits,
    Surroundings,
    Traffic,
    Wish,
    duration,
    effective,
)
from spes_p2p.config_file import read_settings
from spes_p2p.errors import ConfigError
from spes_p2p.fs import write_atomic
from spes_p2p.training.controls import Intent

log = logging.getLogger(__name__)

CONTROLS_FILE = "controls.yaml"
"""In a peer's output: its wish, limits, rules and the day's traffic."""
LOOK_SECONDS = 1.0
"""Pause between two looks at clock, battery and traffic."""
PROGRAMS_SECONDS = 5.0
"""Pause between two looks at the machine's processes."""
SAVE_SECONDS = 60.0
"""Pause between two writes of the day's traffic."""
HOLD_SECONDS = 0.5
"""Longest that a held peer waits before it looks again at the round."""
MAX_REST_SECONDS = 3600.0
"""Longest rest after a step; a step of a large model may take minutes."""
SEE = "docs/controls.md"


def local_now() -> datetime.datetime:
    """Return the local time with its offset."""
    return datetime.datetime.now().astimezone()


class Controls:
    """The wish, limits and rules of one peer, and what they amount to now.

    Verbs come from any thread, the training asks from its own, and a third thread looks at the surroundings.

    Raises:
        ConfigError: the folder's `controls.yaml` cannot be read or holds what does not fit.
    """

    def __init__(self, output: Path, now: Callable[[], datetime.datetime] = local_now) -> None:
        self._file = output / CONTROLS_FILE
        kept = load(self._file)
        self._now = now
        self._wish = Wish(kept.wish, kept.until)
        self._rules = kept.rules
        self.limits = kept.limits
        """How much of this machine the peer takes."""
        self._traffic = kept.traffic
        self._place = ""
        self._life = ""
        self._read_traffic: Callable[[], tuple[int, int]] | None = None
        self._interrupt: Callable[[], None] | None = None
        self._threads: int | None = None
        self._max_slots: int | None = None
        self._seen_bytes = 0
        self._programs: frozenset[str] = frozenset()
        self._programs_at = self._saved_at = -max(PROGRAMS_SECONDS, SAVE_SECONDS)
        self._held_since: float | None = None
        self._changed = threading.Condition(threading.RLock())
        self._stopped = threading.Event()
        self._effective = effective(self._wish, self._rules, self._surroundings())

    # ------------------------------------------------------------------ the owner

    def act(self, verb: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a verb says; return `view`. A verb that fails changes nothing.

        Args:
            verb: One of VERBS.
            values: `for` of a pause; the limits or rules to change, None for the default; else none.

        Raises:
            ConfigError: there is no such verb, a value does not fit, or the disk is full.
        """
        with self._changed:
            if verb == "status":
                return self.view()
            if self._wish.verb == "leave":
                raise ConfigError(f"{verb} comes too late: the peer leaves; start it again with --resume")
            wish, limits, rules = self._wish, self.limits, self._rules
            match verb:
                case "set":
                    self.limits = self._possible(changed(self.limits, values))
                case "rules":
                    self._rules = changed(self._rules, values)
                case "pause":
                    self._wish = Wish("pause", self._end_of(values))
                case "resume" | "finish" | "leave":
                    if values:
                        raise ConfigError(f"{verb} takes no {next(iter(values))}; leave it out")
                    self._wish = Wish("run" if verb == "resume" else verb)
                case _:
                    raise ConfigError(f"there is no verb {verb[:40]!r}; it is one of {', '.join(VERBS)}")
            try:
                self._save()
            except OSError as error:
                self._wish = wish
                self.limits = limits
                self._rules = rules
                raise ConfigError(f"cannot write {self._file}: {error.strerror}; make room, and repeat it") from error
            before = self._effective.state
            self._update()
            if verb in ("set", "rules") or self._effective.state == before:  # otherwise the new state is logged
                log.info("%s%s: %s", verb, "".join(f" {k}={v}" for k, v in values.items()), self._said())
            if verb == "leave" and self._interrupt is not None:
                self._interrupt()
            return self.view()

    def _possible(self, limits: Limits) -> Limits:
        if self._max_slots is not None and (limits.slots or 0) > self._max_slots:
            raise ConfigError(
                f"slots={limits.slots} exceeds the {self._max_slots} that the peer was started with; set at most that"
            )
        return limits

    def _end_of(self, values: Mapping[str, Any]) -> float | None:
        unknown = set(values) - {"for"}
        if unknown:
            raise ConfigError(f"pause takes no {min(unknown)[:40]!r}, but `for`: how long, as in 15m or 2h")
        span = values.get("for")
        return None if span is None else self._now().timestamp() + duration(str(span))

    def view(self) -> dict[str, Any]:
        """Return state, reason, wish, limits and rules as JSON's types."""
        with self._changed:
            return {
                "state": self._effective.state,
                "reason": self._said(),
                "wish": self._wish.verb,
                "limits": self.limits.model_dump(mode="json"),
                "rules": self._rules.model_dump(mode="json"),
            }

    @property
    def stage(self) -> tuple[str, str]:
        """What holds this peer, and why; "" twice while it trains."""
        shown = self._effective
        return (shown.state, self._said()) if shown.state in ("paused", "finishing") else ("", "")

    def _said(self) -> str:
        shown = self._effective
        parts = [shown.reason, self._place if shown.state == "paused" else ""]
        return "; ".join(part for part in parts if part) or self._life or "it trains"

    # ------------------------------------------------------------------ the training

    def intent(self, step_seconds: float, wait_seconds: float) -> Intent:
        """Return what the training does next, after a rest by the duty cycle, or a short wait while it is held."""
        with self._changed:
            before = self._effective
            duty = self.limits.duty or 1.0
            rest = min(step_seconds * (1 / duty - 1), MAX_REST_SECONDS) if before.trains else HOLD_SECONDS
            if (rest := min(rest, wait_seconds)) > 0:
                self._changed.wait_for(lambda: self._effective is not before, rest)
            shown, held = self._effective, self._held_since
            return Intent(
                trains=shown.trains,
                ends=shown.state == "finishing",
                leaves=shown.state == "leaving" and self._interrupt is None,
                held_seconds=0.0 if held is None else time.monotonic() - held,
                threads=self.limits.threads or self._threads,
                slots=self.limits.slots,
            )

    def tell(self, place: str) -> None:
        """Take what a held peer does with its slots, in words; "" once it trains."""
        self._place = place

    def live(self, why: str) -> None:
        """Take why a peer that may train does not yet, or no more, in words; "" while it trains."""
        self._life = why

    # ------------------------------------------------------------------ the surroundings

    @contextlib.contextmanager
    def watching(self, traffic: Callable[[], tuple[int, int]], *, max_slots: int, interrupts: bool) -> Iterator[None]:
        """Look at the surroundings while the block runs.

        Args:
            traffic: Returns the bytes received and sent since the start.
            max_slots: Slots that the peer was started with.
            interrupts: Whether `leave` ends this process as SIGTERM does; otherwise the training loop leaves.
        """
        self._threads = torch.get_num_threads()  # what a limit is taken back to
        self._max_slots = max_slots
        self._read_traffic = traffic
        self._interrupt = (lambda: os.kill(os.getpid(), signal.SIGTERM)) if interrupts else None
        thread = threading.Thread(target=self._watch, name="controls", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join(LOOK_SECONDS * 5)
            if self._rules.gb_a_day is not None:
                try:
                    self._save()
                except OSError as error:
                    log.warning("cannot keep the day's traffic in %s: %s", self._file, error.strerror)

    def _watch(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            try:
                with self._changed:
                    self._update()
                    if self._rules.gb_a_day is not None and time.monotonic() - self._saved_at > SAVE_SECONDS:
                        self._save()
            except (OSError, RuntimeError, psutil.Error) as error:
                log.warning("cannot see whether the rules allow to train: %r; going on as before", error)

    def _update(self) -> None:
        """Find out what the peer does now, and wake the training if that has changed."""
        shown = effective(self._wish, self._rules, self._surroundings())
        if shown == self._effective:
            return
        before, self._effective = self._effective, shown
        if shown.trains:
            self._held_since = None
            self._place = ""
        elif self._held_since is None:
            self._held_since = time.monotonic()
        if shown.state != before.state:
            log.info("%s: %s", shown.state, self._said())
        self._changed.notify_all()

    def _surroundings(self) -> Surroundings:
        now = self._now()
        self._count_traffic(now)
        battery = psutil.sensors_battery() if not self._rules.on_battery else None
        return Surroundings(
            now,
            is_on_battery=battery is not None and battery.power_plugged is False,
            running=self._running(),
            bytes_today=self._traffic.num_bytes,
        )

    def _running(self) -> frozenset[str]:
        """Return the names of the rules' programs that run."""
        if not self._rules.programs:
            return frozenset()
        if time.monotonic() - self._programs_at >= PROGRAMS_SECONDS:
            names = {process.info["name"] for process in psutil.process_iter(["name"])}
            self._programs = frozenset(name for name in names if name)
            self._programs_at = time.monotonic()
        return self._programs & set(self._rules.programs)

    def _count_traffic(self, now: datetime.datetime) -> None:
        day = now.date().isoformat()
        if day != self._traffic.day:
            self._traffic = Traffic(day=day)
        if self._read_traffic is not None:
            total = sum(self._read_traffic())
            self._traffic = Traffic(day=day, num_bytes=self._traffic.num_bytes + max(0, total - self._seen_bytes))
            self._seen_bytes = total

    # ------------------------------------------------------------------ the file

    def _save(self) -> None:
        """Write the file; a restart keeps a pause, limits and rules, but neither `finish` nor `leave`."""
        wish: Literal["run", "pause"] = "pause" if self._wish.verb == "pause" else "run"
        kept = Kept(
            wish=wish,
            until=self._wish.until if wish == "pause" else None,
            limits=self.limits,
            rules=self._rules,
            traffic=self._traffic,
        )
        text = f"# Written by the peer; `spes ctl` changes it. See {SEE}.\n" + yaml.safe_dump(
            kept.model_dump(mode="json", exclude_defaults=True), sort_keys=False
        )
        self._saved_at = time.monotonic()
        with write_atomic(self._file) as stream:
            stream.write(text.encode())


def load(file: Path) -> Kept:
    """Return what a peer's `controls.yaml` keeps; the defaults if there is none.

    Raises:
        ConfigError: it cannot be read, or a value does not fit.
    """
    if not file.exists():
        return Kept()
    try:
        return Kept.model_validate(read_settings(file, "the controls in"))
    except ValidationError as error:
        raise ConfigError(f"{file}: {explain(error, see=SEE)}; or delete the file") from error


def changed(settings: Any, values: Mapping[str, Any]) -> Any:
    """Return limits or rules with some values changed; None takes one back to its default.

    Raises:
        ConfigError: a value or a name does not fit, or none is given.
    """
    kind = type(settings)
    names = ", ".join(kind.model_fields)
    if not values:
        raise ConfigError(f"nothing to set; name one of {names}")
    if unknown := set(values) - set(kind.model_fields):
        raise ConfigError(f"{min(unknown)[:40]} cannot be set; it is one of {names}")
    merged = settings.model_dump() | dict(values)
    try:
        return kind.model_validate({name: value for name, value in merged.items() if value is not None})
    except ValidationError as error:
        raise ConfigError(explain(error, see=SEE)) from error


def limited(config: PeerConfig, limits: Limits) -> PeerConfig:
    """Return a peer's settings with what its owner has set since its first start."""
    chosen = {"threads": limits.threads, "uplink_mbit": limits.uplink_mbit}
    return config.model_copy(update={name: value for name, value in chosen.items() if value is not None})
