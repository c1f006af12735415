"""Real peers of which one is struck in a chosen phase of a round, and an account of what became of the others."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import torch
from fault_cases import (
    DEADLINE_SECONDS,
    MEETING_SECONDS,
    MOST_ROUNDS_TO_HEAL,
    ROUND_SECONDS,
    SLOTS,
    SPARE_SECONDS,
    TRIES,
    Case,
    Fault,
)
from peer_server import Outcome, Setting
from real_peers import PeerProcess, begin_average, close_all, contribution, finish_in_turn, identities
from referee import Referee

from benchmarks.testbed import TestBed
from spes_p2p.codecs.vectors import digest
from spes_p2p.swarm.averaging.encoding import Contribution
from spes_p2p.swarm.names import SHARED


def proposes_soon(peer: PeerProcess) -> bool:
    """Tell whether a peer proposes in one of the first two attempts at the next round."""
    last = peer.call("last")
    return peer.peer_id in (last.leader(0), last.leader(1))


def _is_whole(result: Outcome) -> bool:
    return not result.dropped and len(result.roster) == len(SLOTS)


class FaultCluster:
    """Four peers, the last of them the victim.

    Args:
        directory: Holds what the peers keep.
        seed: Of the deltas.
        codec: How deltas travel.
        bed: Where each has a namespace of its own; without one they are on loopback, and no link can be cut.
    """

    def __init__(self, directory: Path, seed: int, codec: str = "fp32", bed: TestBed | None = None) -> None:
        self.codec, self._bed, self._directory = codec, bed, directory
        self._generator = torch.Generator().manual_seed(seed)
        self._started = 0
        self.referee = Referee(Setting(directory, codec=codec).segments)
        self.peers: list[PeerProcess] = []
        self._items: dict[str, Contribution] = {}

    def start(self) -> FaultCluster:
        """Start everybody."""
        self._voters = identities(self._directory, (f"peer{place}" for place in range(len(SLOTS))))
        for place in range(len(SLOTS)):
            self._join(place).wait_until_ready()
        return self

    def close(self) -> None:
        close_all(self.peers)

    def _join(self, place: int) -> PeerProcess:
        """Start the peer of a place."""
        network = {"namespace": self._bed.namespace(place), "host": self._bed.address(place)} if self._bed else {}
        initial_peers = self.peers[0].addresses if self.peers else ()
        name = self._directory / f"peer{self._started}"
        self._started += 1
        is_rogue = place == len(SLOTS) - 1
        peer = PeerProcess(name, initial_peers, is_rogue=is_rogue, codec=self.codec, voters=self._voters, **network)
        self.peers[place:] = [peer]
        return peer

    # ------------------------------------------------------------------ a round

    def _enter(self, peers: Sequence[PeerProcess]) -> None:
        for peer in peers:
            place = self.peers.index(peer)
            item = contribution(peer.peer_id, self._generator, slots=SLOTS[place], tokens=100 + 31 * place)
            self.referee.enters(item)
            self._items[peer.peer_id] = item
        items = [self._items[peer.peer_id] for peer in peers]
        begin_average(peers, items, expected=len(SLOTS), meeting_seconds=MEETING_SECONDS)

    def _leave(self, peer: PeerProcess, result: Outcome, case: Case) -> None:
        case.wrong += self.referee.judge(self._items[peer.peer_id], result)

    def run(self, fault: Fault, phase: str, moment: str, *, stays_seconds: float = 0.0) -> Case:
        """Strike the victim at a moment of a round; return once everybody averages together again.

        A cut stays for as long as it takes the others to end the round, and `stays_seconds` more.
        On a machine that stalls, a round may fail before the victim comes to that moment; then another one is tried.
        """
        for _ in range(TRIES):
            case = self._run(fault, phase, moment, stays_seconds)
            if case.is_reached or case.wrong:
                break
        return case

    def _run(self, fault: Fault, phase: str, moment: str, stays_seconds: float) -> Case:
        *survivors, victim = self.peers
        case = Case(fault, phase, moment, self.codec)
        victim.call("misbehave", moment)
        begun = time.monotonic()
        self._enter(self.peers)
        case.is_reached = victim.gate.poll(ROUND_SECONDS) and victim.gate.recv() == moment
        if not case.is_reached:
            victim.gate.send(None)
        with self._struck(victim, fault, stays_seconds) if case.is_reached else contextlib.nullcontext():
            struck = time.monotonic()
            results = self._settle(survivors, case, begun)
            case.seconds = time.monotonic() - struck
        self._account(survivors, results, case)
        began = time.monotonic()
        self._heal(victim, fault, results, case)
        if not case.is_reached:
            victim.call("misbehave", "")
            while victim.gate.poll():
                victim.gate.recv()
        case.healing_seconds = time.monotonic() - began
        return case

    def lie(self, how: str, *, proposes: bool = False) -> Case:
        """Let the victim lie throughout a round; return once everybody averages together again.

        Args:
            how: What it does.
            proposes: Whether it is the first proposer of that round; otherwise an honest peer is, also in attempt 1.
        """
        *survivors, victim = self.peers
        case = Case("lie", how, how, self.codec)
        while victim.call("last").leader(0) != victim.peer_id if proposes else proposes_soon(victim):
            self._enter(self.peers)
            self._settle(self.peers, case, time.monotonic())
        victim.call("misbehave", how)
        begun = time.monotonic()
        self._enter(self.peers)
        results = self._settle(survivors, case, begun)
        case.seconds = time.monotonic() - begun
        self._account(survivors, results, case)
        means = {digest(result.committed[SHARED]) for result in results if result.committed}
        case.victim = self._return(victim, means, case)
        victim.call("misbehave", "")
        began = time.monotonic()
        self._heal(victim, "lie", results, case)
        case.healing_seconds = time.monotonic() - began
        return case

    def _settle(self, survivors: Sequence[PeerProcess], case: Case, begun: float) -> list[Outcome]:
        results = {}
        for peer, result in finish_in_turn(survivors, DEADLINE_SECONDS + SPARE_SECONDS):
            results[peer.peer_id] = result
            if (late := time.monotonic() - begun - DEADLINE_SECONDS) > 0:
                case.wrong.append(f"{peer.peer_id[-6:]}: {late:.1f} s beyond the deadline of {DEADLINE_SECONDS:.0f} s")
        for peer in survivors:
            self._leave(peer, results[peer.peer_id], case)
        return [results[peer.peer_id] for peer in survivors]

    def _account(self, survivors: Sequence[PeerProcess], results: Sequence[Outcome], case: Case) -> None:
        committed = [result for result in results if SHARED in result.committed]
        case.committed = len(committed)
        rosters = {tuple(sorted(member.peer_id[-6:] for member in result.roster)) for result in committed}
        if len(rosters) > 1 or len({digest(result.committed[SHARED]) for result in committed}) > 1:
            case.wrong.append(f"survivors committed the round of different rosters: {sorted(rosters)}")
        notes = [peer.call("notes") for peer in survivors]
        case.attempts = max(map(len, notes))
        liar = self.peers[-1].peer_id
        case.named = sum(any(note.lost == liar for note in made) for made in notes)
        case.reasons = sorted({reason for result in results for reason in result.dropped.values()})
        case.notes = [
            f"{peer.peer_id[-6:]}: {len(note.roster)} in {note.averaging_seconds:.2f} s, lost {note.lost[-6:]}, "
            f"{note.failures}"
            for peer, made in zip(survivors, notes, strict=True)
            for note in made
        ]

    # ------------------------------------------------------------------ the fault, and after

    @contextlib.contextmanager
    def _struck(self, victim: PeerProcess, fault: Fault, stays_seconds: float) -> Iterator[None]:
        if fault == "kill":
            victim.kill()
            yield
        elif fault == "freeze":
            stopped = [psutil.Process(victim.process.pid), *victim.descendants()]
            for process in stopped:
                process.suspend()
            yield
            for process in stopped:
                process.resume()
            victim.gate.send(None)
        else:
            assert self._bed is not None, "links can be cut only in a test bed"
            self._bed.cut(self.peers.index(victim))
            victim.gate.send(None)
            yield
            threading.Event().wait(stays_seconds)
            self._bed.heal(self.peers.index(victim))

    def _heal(self, victim: PeerProcess, fault: Fault, results: Sequence[Outcome], case: Case) -> None:
        """Average until everybody does so together, the victim as soon as its own round is over."""
        if fault == "kill" and case.is_reached:
            self.referee.leaves(victim.peer_id)
            case.victim = "killed, and replaced"
            victim = self._join(len(SLOTS) - 1).wait_until_ready()
        is_away = not case.victim
        means = {digest(result.committed[SHARED]) for result in results if result.committed}
        for case.healing_rounds in range(1, MOST_ROUNDS_TO_HEAL + 1):
            # Others do not wait for whoever is lost; but one round without the victim is enough.
            if is_away and (victim.is_done() or case.healing_rounds > 1):
                is_away = False
                case.victim = self._return(victim, means, case)
            together = self.peers[:-1] if is_away else self.peers
            self._enter(together)
            results = self._settle(together, case, time.monotonic())
            if results[-1].is_behind and not is_away:
                case.victim += ", told that it is behind"
            if not is_away and all(_is_whole(result) for result in results):
                return
        case.wrong.append(f"not whole again after {MOST_ROUNDS_TO_HEAL} rounds: {[dict(r.dropped) for r in results]}")

    def _return(self, victim: PeerProcess, means: set[str], case: Case) -> str:
        """Take the victim's own result of the round in which it was struck."""
        result = victim.finish(DEADLINE_SECONDS)
        self._leave(victim, result, case)
        if result.is_behind:
            return "met the others in the next round, told that it is behind"
        if SHARED not in result.committed:
            return "dropped the round"
        is_same = digest(result.committed[SHARED]) in means
        return "committed what the others did" if is_same else "committed what the others did not"
