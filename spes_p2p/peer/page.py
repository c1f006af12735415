"""A peer's page: what this machine does, and the swarm as its records tell it, read beside the training."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import psutil

from spes_p2p.config import PeerConfig
from spes_p2p.monitor import credit
from spes_p2p.monitor.events import EventLog
from spes_p2p.monitor.page.server import Page
from spes_p2p.monitor.page.snapshot import Own, OwnRound, PageState, in_words
from spes_p2p.monitor.page.verbs import Verbs
from spes_p2p.monitor.view import SwarmView, fold, look
from spes_p2p.peer.controls import Controls
from spes_p2p.peer.joining import LINK_FILE, Joined
from spes_p2p.planner.size import run_size
from spes_p2p.presentation import say
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.manifest import Revisions
from spes_p2p.swarm.records import Metrics

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.5
"""Pause between two looks at the records; a commit shows within two seconds."""
SLOW_SECONDS = 15.0
"""Pause between two counts of this process's memory, which look through all processes of the machine, and two looks at
its connections."""
STOP_SECONDS = 5.0


class PeerPage:
    """Follows the swarm's records in a thread, and shows them with this machine's own figures.

    The training only says where it is, and hands over its reports; it never waits for the page.
    """

    def __init__(
        self,
        page: Page,
        swarm: HivemindSwarm,
        state: PageState,
        revisions: Revisions,
        controls: Controls,
        link: Callable[[], str],
    ) -> None:
        self._revisions = revisions
        self._controls = controls
        self._page = page
        self._swarm = swarm
        self._state = state
        self._log = EventLog(state.view)
        self._reports: deque[Metrics] = deque()
        self._rounds: Mapping[int, OwnRound] = {}
        self._sent = self._received = 0  # until the newest report
        self._began = time.monotonic()
        self._memory = 0
        self._ways: Mapping[str, str] = {}
        self._link = link
        self.say("joining", "it fetches the run's model, or waits for the others")
        self._slow_at = -SLOW_SECONDS
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="page-records", daemon=True)
        self._thread.start()

    def say(self, stage: str, why: str = "") -> None:
        """Show where this peer is in its life; "" while it trains, when the swarm's state is its own."""
        self._stage = stage
        self._why = why
        self._controls.live(why)

    def reported(self, report: Metrics) -> None:
        """Take this peer's own report, which the DHT might replace before it is read."""
        self._reports.append(report)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stopped.set()
        self._thread.join(STOP_SECONDS)

    def _follow(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            try:
                self._look()
            except (OSError, RuntimeError, psutil.Error) as error:
                # The peer's own death shows elsewhere; a page that has lost its swarm shows what it had.
                log.debug("the page cannot read the swarm's records: %r", error)
            except Exception:  # a bug here must not stop the page for good
                log.exception("the page could not be brought up to date")

    def _look(self) -> None:
        own_id, now = self._swarm.peer_id, self._swarm.now()
        view = replace(self._state.view, total_rounds=self._revisions.run.round.total)
        try:
            snapshot = look(self._swarm)
        except OSError as error:
            log.debug("the page cannot read the swarm's records: %r", error)
            view = replace(view, now=now)  # the others' claims grow old on it
        else:
            while self._reports:
                report = self._reports.popleft()
                sent, received = report.bytes_out - self._sent, report.bytes_in - self._received
                trained = OwnRound(report.tokens if report.committed else 0, report.loss, sent, received)
                self._rounds = {**self._rounds, report.round: trained}
                self._sent, self._received = report.bytes_out, report.bytes_in
                view = fold(view, replace(snapshot, now=view.now, metrics={report.peer_id: report}))
            view = fold(view, snapshot)
        for event in self._log.of(view):
            self._page.take(event)
            if event["kind"] == "membership" and event["change"] != "changed" and event["peer_id"] != own_id:
                log.info("%s", in_words(event))
        control = self._controls.view()
        own, shown = self._own(control), control if self._page.is_loopback else {}
        if shown and control["state"] != self._state.control.get("state", "training"):
            self._page.take({"kind": "control", "time": now, "state": control["state"], "reason": control["reason"]})
        self._state = replace(self._state, view=view, own=own, control=shown, link=self._link())
        self._page.show(self._state)

    def _own(self, control: Mapping[str, Any]) -> Own:
        now, watchdog = time.monotonic(), self._swarm.watchdog
        if now - self._slow_at >= SLOW_SECONDS:
            self._memory = _memory_bytes()
            self._ways = self._swarm.links.ways()
            self._slow_at = now
        received, sent = self._swarm.traffic()
        stage, why = self._stage, self._why
        if stage != "leaving" and control["state"] in ("paused", "finishing"):
            stage, why = control["state"], control["reason"]
        if not stage and (words := self._swarm.consensus.waiting()):
            stage, why = "waiting", words
        if not stage and watchdog.seconds_alone > 10.0:
            stage, why = "alone", f"no other peer has been within reach for {watchdog.seconds_alone:.0f} s"
        last = self._swarm.last()
        vote = "and votes" if self._swarm.peer_id in last.voters else "without a vote"
        trains = f"it trains, {vote}" if last.round else ""
        self._controls.live({"waiting": f"waiting {why}", "alone": why}.get(stage, self._why or trains))
        calls = f"calls others only; {self._swarm.links.told()}" if self._swarm.node.client_mode else "yes"
        return Own(
            peer_id=self._swarm.peer_id,
            stage=stage,
            why=why,
            committed=last.round,
            uptime_seconds=now - self._began,
            memory_bytes=self._memory,
            sent_bytes=sent,
            received_bytes=received,
            reachability=f"{calls}; {watchdog.neighbours} near",
            ways=self._ways,
            votes={peer: last.seats.get(peer, "") for peer in last.voters},
            rounds=self._rounds,
        )


def _memory_bytes() -> int:
    """Return the memory of this process and its children, which may end meanwhile; shared pages count once."""
    own, total = psutil.Process(), 0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            try:
                used = process.memory_full_info()
                total += getattr(used, "pss", used.uss)  # only Linux tells the proportional share
            except psutil.AccessDenied:  # a hardened machine tells the resident pages alone
                total += process.memory_info().rss
    return total


@contextlib.contextmanager
def shown(config: PeerConfig, joined: Joined, controls: Controls) -> Iterator[PeerPage | None]:
    """Show this peer's page while the block runs; None with `--page off`.

    On a terminal it prints the link that carries the token of the verbs; a log is no place for a token.

    Raises:
        ConfigError: the page cannot listen where it should.
    """
    if config.page == "off":
        yield None
        return
    swarm, revisions = joined.swarm, joined.revisions
    run = revisions.run
    view = SwarmView(run.num_slots, run.round.total, absence_seconds=run.round.heartbeat_seconds)
    active = run_size(run, joined.admission.manifest.vocab_size).active_params(run.model.top_k)
    facts = {"run_id": config.run_name, "config": run.model_dump(mode="json"), "active_params": active}
    file = config.output / LINK_FILE

    def link() -> str:
        return file.read_text().strip() + config.flags_of_others(run) if file.exists() else ""

    view = replace(view, now=swarm.now(), settled=credit.kept(config.output))
    state = PageState(view, facts, Own(swarm.peer_id, stage="joining"), link=link())
    verbs = Verbs(controls.act, config.output)
    page = Page(config.page, state, config.output, verbs)
    log.info("page: %s", page.address)
    if page.is_loopback and sys.stderr.isatty():
        say(f"with buttons: {page.address}#token={verbs.token}")
    follower = PeerPage(page, swarm, state, revisions, controls, link)
    try:
        yield follower
    finally:
        follower.close()
        page.close()
