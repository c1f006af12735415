"""A laboratory for faults: real peers that live, die and come back as a seeded schedule has it, and their history."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path

import psutil
from history import History, Verdict
from lab_peer import PHASES, Life, live
from peer_processes import TINY, friends_words, write_corpus, write_settings

from spes_p2p.peer.joining import ADDRESS_FILE

RUN_ID = "lab"
NUM_SLOTS = 8
ROUND = {
    **{"mode": "tokens", "tokens": 10**6, "min_seconds": 2.0, "max_seconds": 2.0, "total": 10**6},
    **{"matchmaking_seconds": 2.0, "averaging_seconds": 20.0, "exchange_seconds": 20.0},
    **{"lease_seconds": 10.0, "heartbeat_seconds": 3.0},
}
"""Rounds short enough for hundreds of faults, deadlines long enough for eight peers on two cores."""
LEARNING_RATE = 3e-3
"""The local experiment's. At 0.01 honest peers' rounds made the model worse by as much as a liar's slot may not."""
START_SECONDS, EVENT_SECONDS = 300.0, 180.0
STOP_SECONDS = 60.0

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["lab_peer"])


class LabPeer:
    """A peer through its lives.

    Args:
        index: Its number; makes its folder's name.
        folder: The laboratory's.
        max_slots: Slots it can train.
    """

    def __init__(self, index: int, folder: Path, max_slots: int) -> None:
        self.index, self.max_slots, self._folder = index, max_slots, folder
        self._live = live
        self._generation = 0
        self.process: multiprocessing.process.BaseProcess | None = None
        self.pipe: connection.Connection | None = None
        self.rounds = 0
        """Rounds that it has committed in this life."""

    @property
    def output(self) -> Path:
        """Where it keeps what it has."""
        return self._folder / f"peer-{self.index}-{self._generation}"

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive()

    def start(self, addresses: list[str], phase: str = "", *, anew: bool = False) -> None:
        """Begin a life: go on from what the last one left, or from nothing under another name."""
        if anew:
            self._generation += 1
        known = (self.output / "identity.key").exists()
        (self.output / ADDRESS_FILE).unlink(missing_ok=True)  # it will have another port
        words = ["--run-id", RUN_ID, "--output", self.output, "--cache", self._folder / "cache", "--device", "cpu"]
        words += ["--threads", "1", "--max-slots", self.max_slots, "--text", self._folder / "corpus.jsonl"]
        words += ["--seed-seconds", "0"]
        if addresses:
            words += ["--initial-peers", *addresses]
        else:
            words += ["--config", self._folder / "run.yaml"]
        words += friends_words(self._folder, words)
        if known:
            words.append("--resume" if (self.output / "checkpoint").exists() else "--overwrite")
        self.pipe, theirs = _processes.Pipe()
        life = Life(list(map(str, words)), self._folder / "history", self._folder / f"peer-{self.index}.log", phase)
        self.process, self.rounds = _processes.Process(target=self._live, args=(life, theirs)), 0
        self.process.start()
        theirs.close()

    def order(self, phase: str) -> None:
        """Tell it to die as soon as it gets there."""
        assert self.pipe is not None
        self.pipe.send(phase)

    def hear(self) -> None:
        """Take in what it tells, up to its end."""
        assert self.pipe is not None
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                event, _ = self.pipe.recv()
                self.rounds += event == "commits"

    def address(self) -> str:
        """Return its multiaddr, once it is in the swarm."""
        path = self.output / ADDRESS_FILE
        return path.read_text().strip() if path.exists() else ""

    def last_words(self) -> str:
        """Return the end of its log."""
        return "\n".join((self._folder / f"peer-{self.index}.log").read_text().splitlines()[-40:])

    def everything(self) -> list[psutil.Process]:
        """Return its processes."""
        assert self.process is not None and self.process.pid is not None
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def end(self, seconds: float) -> None:
        """Let it leave, or kill it."""
        if self.pipe is not None:
            self.pipe.close()
        if self.process is not None:
            self.process.join(seconds)
            if self.process.is_alive():
                self.process.kill()
                self.process.join(seconds)


@dataclass
class Strike:
    """One fault, and how the others took it."""

    kind: str
    peer: int
    struck_after: float
    committed_after: float = 0.0
    """Seconds from the fault's end until the others had committed two rounds more."""


@dataclass
class Report:
    """What came of a schedule."""

    strikes: list[Strike] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)
    rounds: int = 0


class Lab:
    """Eight peers, and what befalls them; one fault at a time, each while the others go on.

    Args:
        folder: For everything; made.
        seed: Of the schedule.
        num_peers: How many.
    """

    def __init__(self, folder: Path, seed: int, num_peers: int = 8) -> None:
        self.folder, self.random = folder, random.Random(seed)
        (folder / "history" / "vectors").mkdir(parents=True)
        write_corpus(folder / "corpus.jsonl")
        model = {**TINY["model"], "num_experts": NUM_SLOTS}
        # Kept forms have no lineage to judge: all slots travel in fp32.
        run = {"model": model, "round": ROUND, "train": {"lr": LEARNING_RATE}, "frozen_storage": "fp32"}
        write_settings(folder / "run.yaml", **run)
        # Most slots have one holder: those are the ones that a death can take along.
        self.peers = [LabPeer(index, folder, 1 + index % 2) for index in range(num_peers)]
        self.report = Report()
        self._victim: LabPeer | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[Lab]:
        """Have all peers committed a first round; in the end let all leave."""
        try:
            self.peers[0].start([])
            self._until(lambda: self.peers[0].address(), START_SECONDS, "the first peer's address")
            for peer in self.peers[1:]:
                peer.start(self.addresses())
            self._until(lambda: all(peer.rounds for peer in self.peers), START_SECONDS, "everybody's first round")
            yield self
        finally:
            for peer in self.peers:
                if peer.pipe is not None:
                    peer.pipe.close()
            for peer in self.peers:
                peer.end(STOP_SECONDS)

    def addresses(self) -> list[str]:
        """Return where living peers are found."""
        return [address for peer in self.peers if peer.is_alive and (address := peer.address())]

    # ------------------------------------------------------------------ faults

    def kill(self, phase: str, *, anew: bool) -> Strike:
        """Kill a peer in a phase, start it again, and wait for everybody else to go on."""
        # Others than those who are still on their way back: of two copies at least one is always there.
        self._victim = victim = self.random.choice([peer for peer in self.peers if peer.rounds])
        began = time.monotonic()
        if phase in ("join", "download"):
            victim.process.kill()
            self._until(lambda: not victim.is_alive, EVENT_SECONDS, "a death")
            victim.start(self.addresses(), phase, anew=anew or phase == "download")
        else:
            victim.order(phase)
        self._until(lambda: not victim.is_alive, EVENT_SECONDS, f"peer {victim.index} to die in {phase}")
        strike = Strike(phase, victim.index, time.monotonic() - began)
        victim.start(self.addresses(), anew=anew)
        self._victim = None
        return self._settle(strike, victim)

    def freeze(self, seconds: float) -> Strike:
        """Stop all of a peer's processes for so long."""
        victim = self.random.choice([peer for peer in self.peers if peer.rounds])
        processes = victim.everything()
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        strike = Strike("freeze", victim.index, 0.0)
        try:
            self._settle(strike, victim, least=seconds, is_over=False)
        finally:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)
        return self._settle(strike, victim)

    def cut(self, seconds: float) -> Strike:
        """Cut a peer off from all others for so long, while it trains on; less than its watchdog's patience."""
        victim = self.random.choice([peer for peer in self.peers if peer.rounds])
        [p2pd] = [process for process in victim.everything() if process.name().startswith("p2pd")]
        p2pd.send_signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            self._until(lambda: time.monotonic() - began >= seconds, EVENT_SECONDS, "the end of a cut")
        finally:
            p2pd.send_signal(signal.SIGCONT)
        return self._settle(Strike("cut", victim.index, 0.0), victim)

    def recover(self) -> None:
        """Wait until everybody takes part again."""
        self._until(lambda: all(peer.rounds for peer in self.peers), EVENT_SECONDS, "all to be back")

    def _settle(self, strike: Strike, victim: LabPeer, *, least: float = 0.0, is_over: bool = True) -> Strike:
        """Wait until all others have committed two rounds since, but for one at most that is on its way back too.

        After the first of them every slot has its copies again.
        """
        began = time.monotonic()
        for peer in self.peers:
            peer.hear()
        before = {peer.index: peer.rounds for peer in self.peers}

        def settled() -> bool:
            late = [peer for peer in self.peers if peer is not victim and peer.rounds < before[peer.index] + 2]
            others = not late or (len(late) == 1 and not before[late[0].index])
            return others and time.monotonic() - began >= least

        self._until(settled, EVENT_SECONDS + least, f"all to go on after {strike}")
        strike.committed_after = time.monotonic() - began
        if is_over:
            self.report.strikes.append(strike)
        return strike

    def _until(self, is_so, seconds: float, what: str) -> None:
        """Wait for something that peers' events bring about."""
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, f"{what} did not come in {seconds:.0f} s:\n{self._where_all_are()}"
            for peer in self.peers:
                ended = peer.process is not None and not peer.is_alive and peer is not self._victim
                assert not ended, f"peer {peer.index} ended by itself:\n{peer.last_words()}"
            pipes = [p.pipe for p in self.peers if p.pipe is not None and p.is_alive]
            ends = [p.process.sentinel for p in self.peers if p.process is not None and p.is_alive]
            connection.wait([*pipes, *ends], 0.5)
            for peer in self.peers:
                if peer.pipe is not None:
                    peer.hear()

    def _where_all_are(self) -> str:
        """Return how many rounds each peer has committed, and the last words of the one that all wait for."""
        begun = [peer for peer in self.peers if peer.process is not None]
        last = self._victim or min(begun, key=lambda peer: peer.rounds)
        rounds = ", ".join(f"{peer.index}: {peer.rounds}" for peer in begun)
        return f"rounds committed by peer {rounds}; last words of peer {last.index}:\n{last.last_words()}"

    # ------------------------------------------------------------------ the end

    def judge(self) -> Report:
        """Hold the history against what must be so; once all peers have ended."""
        history = History(self.folder / "history", {peer.index: peer.output / "versions" for peer in self.peers})
        self.report.verdict = history.verdict()
        self.report.rounds = history.num_rounds
        return self.report


def schedule(repeats: int, seed: int) -> list[tuple[str, bool]]:
    """Return phases to kill in, each so often, and whether the victim comes back as somebody else."""
    drawn = random.Random(seed)
    kills = [(phase, bool(number % 2)) for phase, number in itertools.product(PHASES, range(repeats))]
    drawn.shuffle(kills)
    return kills
