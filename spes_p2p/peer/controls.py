"""The hand on the switch: owns a machine's wish and rules, keeps them in its output folder, and tells the training."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import yaml
from pydantic import ValidationError

from spes_p2p.cli import explain
from spes_p2p.config import PeerConfig
from spes_p2p.config.controls import VERBS, Intent, Kept, Limits, Surroundings, Traffic, Wish, duration, effective
from spes_p2p.config_file import read_settings
from spes_p2p.errors import ConfigError
from spes_p2p.fs import write_atomic

log = logging.getLogger(__name__)

CONTROLS_FILE = "controls.yaml"
LOOK_SECONDS = 1.0
"""Pause between two looks at clock, battery and traffic."""
PROGRAMS_SECONDS = 5.0
"""Pause between two looks at the machine's processes."""
SAVE_SECONDS = 60.0
"""Pause between two writes of the day's traffic."""
MAX_REST_SECONDS = 3600.0
"""Longest rest after a step; a step of a large model may take minutes."""
SEE = "docs/operating.md"


class Controls:
    """The wish, limits and rules of one peer, and what they amount to now.

    Verbs come from any thread, the training asks from its own, and a third thread looks at the surroundings.

    Raises:
        ConfigError: the folder's `controls.yaml` cannot be read or holds what does not fit.
    """

    def __init__(
        self, output: Path, now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now().astimezone()
    ) -> None:
        self._file = output / CONTROLS_FILE
        self._kept = load(self._file)
        self._now = now
        self._ending: Literal["", "finish", "leave"] = ""
        self._life = ""
        self._read_traffic: Callable[[], tuple[int, int]] | None = None
        self._interrupt: Callable[[], None] | None = None
        self._threads: int | None = None
        self._max_slots: int | None = None
        self._seen_bytes = 0
        self._programs: frozenset[str] = frozenset()
        self._programs_at = self._saved_at = -max(PROGRAMS_SECONDS, SAVE_SECONDS)
        self._changed = threading.Condition(threading.RLock())
        self._stopped = threading.Event()
        self._effective = effective(self._wish, self._kept.rules, self._surroundings())

    @property
    def limits(self) -> Limits:
        """How much of this machine the peer takes."""
        return self._kept.limits

    @property
    def _wish(self) -> Wish:
        return Wish(self._ending or self._kept.wish, self._kept.until)

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
            if self._ending == "leave":
                raise ConfigError(f"{verb} comes too late: the peer leaves; start it again with --resume")
            kept, ending = self._asked(verb, values)
            try:
                self._save(kept)
            except OSError as error:
                raise ConfigError(f"cannot write {self._file}: {error.strerror}; make room, and repeat it") from error
            self._kept = kept
            self._ending = ending
            before = self._effective.state
            self._update()
            if verb in ("set", "rules") or self._effective.state == before:  # otherwise the new state is logged
                log.info("%s%s: %s", verb, "".join(f" {k}={v}" for k, v in values.items()), self._reason())
            if verb == "leave" and self._interrupt is not None:
                self._interrupt()
            return self.view()

    def _asked(self, verb: str, values: Mapping[str, Any]) -> tuple[Kept, Literal["", "finish", "leave"]]:
        """Return what a verb asks for: what a restart keeps, and how the peer ends."""
        kept = self._kept
        match verb:
            case "set":
                limits, most = changed(kept.limits, values), self._max_slots
                if most is not None and (limits.slots or 0) > most:
                    raise ConfigError(
                        f"slots={limits.slots} exceeds the {most} that the peer was started with; set at most that"
                    )
                return kept.model_copy(update={"limits": limits}), self._ending
            case "rules":
                return kept.model_copy(update={"rules": changed(kept.rules, values)}), self._ending
            case "pause":
                if unknown := set(values) - {"for"}:
                    raise ConfigError(f"pause takes no {min(unknown)[:40]!r}, but `for`: how long, as in 15m or 2h")
                span = values.get("for")
                until = None if span is None else self._now().timestamp() + duration(str(span))
                return kept.model_copy(update={"wish": "pause", "until": until}), ""
            case "resume" | "finish" | "leave":
                if values:
                    raise ConfigError(f"{verb} takes no {next(iter(values))}; leave it out")
                return kept.model_copy(update={"wish": "run", "until": None}), "" if verb == "resume" else verb
        raise ConfigError(f"there is no verb {verb[:40]!r}; it is one of {', '.join(VERBS)}")

    def view(self) -> dict[str, Any]:
        """Return state, reason, wish, limits and rules as JSON's types."""
        with self._changed:
            return {
                "state": self._effective.state,
                "reason": self._reason(),
                "wish": self._wish.verb,
                "limits": self._kept.limits.model_dump(mode="json"),
                "rules": self._kept.rules.model_dump(mode="json"),
            }

    def _reason(self) -> str:
        shown = self._effective
        handed_over = "; other peers may take its slots" if shown.state == "paused" else ""
        return shown.reason + handed_over or self._life or "it trains"

    # ------------------------------------------------------------------ the training

    def intent(self, step_seconds: float, rest_seconds: float) -> Intent:
        """Return what the training does next, after the rest that the duty cycle asks for; a verb ends the rest."""
        with self._changed:
            before = self._effective
            rest = min(step_seconds * (1 / (self.limits.duty or 1.0) - 1), rest_seconds, MAX_REST_SECONDS)
            if before.trains and rest > 0:
                self._changed.wait_for(lambda: self._effective is not before, rest)
            shown = self._effective
            return Intent(
                trains=shown.trains,
                ends=shown.state == "finishing",
                leaves=shown.state == "leaving" and self._interrupt is None,
                threads=self.limits.threads or self._threads,
                slots=self.limits.slots,
            )

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
            if self._kept.rules.gb_a_day is not None:
                try:
                    self._save(self._kept)
                except OSError as error:
                    log.warning("cannot keep the day's traffic in %s: %s", self._file, error.strerror)

    def _watch(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            try:
                with self._changed:
                    self._update()
                    if self._kept.rules.gb_a_day is not None and time.monotonic() - self._saved_at > SAVE_SECONDS:
                        self._save(self._kept)
            except (OSError, RuntimeError, psutil.Error) as error:
                log.warning("cannot see whether the rules allow to train: %r; going on as before", error)

    def _update(self) -> None:
        """Find out what the peer does now, and wake the training if that has changed."""
        shown = effective(self._wish, self._kept.rules, self._surroundings())
        if shown == self._effective:
            return
        before, self._effective = self._effective, shown
        if shown.state != before.state:
            log.info("%s: %s", shown.state, self._reason())
        self._changed.notify_all()

    def _surroundings(self) -> Surroundings:
        now, rules = self._now(), self._kept.rules
        self._count_traffic(now.date().isoformat())
        battery = psutil.sensors_battery() if not rules.on_battery else None
        return Surroundings(
            now,
            is_on_battery=battery is not None and battery.power_plugged is False,
            running=self._running(rules.programs),
            bytes_today=self._kept.traffic.num_bytes,
        )

    def _running(self, programs: Sequence[str]) -> frozenset[str]:
        """Return the names of those programs that run."""
        if programs and time.monotonic() - self._programs_at >= PROGRAMS_SECONDS:
            self._programs = frozenset(process.info["name"] or "" for process in psutil.process_iter(["name"]))
            self._programs_at = time.monotonic()
        return self._programs & set(programs)

    def _count_traffic(self, day: str) -> None:
        traffic = self._kept.traffic if day == self._kept.traffic.day else Traffic(day=day)
        if self._read_traffic is not None:
            total = sum(self._read_traffic())
            traffic = Traffic(day=day, num_bytes=traffic.num_bytes + max(0, total - self._seen_bytes))
            self._seen_bytes = total
        self._kept = self._kept.model_copy(update={"traffic": traffic})

    # ------------------------------------------------------------------ the file

    def _save(self, kept: Kept) -> None:
        """Write the file; a restart keeps a pause, limits and rules, but neither `finish` nor `leave`."""
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
