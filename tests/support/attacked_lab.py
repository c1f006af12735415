"""A laboratory of honest peers and one that begins to lie, and what their history says of it."""

from __future__ import annotations

import functools
import json
import multiprocessing
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from history import History, Verdict
from lab import ROUND, Lab, LabPeer
from lab_liar import live_dishonestly
from peer_processes import TINY, write_settings

from spes_p2p.swarm.averaging.partition import weighted_mean
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.roster import MIN_VOTERS, SHARED, Member, Roster

NUM_PEERS = 6
HONEST_ROUNDS, ROUNDS_AFTER = 2, 7
"""Rounds that everybody commits before the lies begin, and the honest ones afterwards: two with the liar, and some to
see that it stays away."""
ROUNDS_UNTIL_SEEN = 20
"""In which one that is found out has come again and was not wanted: caught in the act it misses the round, comes late
to some more where rounds are as short as here, and must be caught twice."""
FOUND_OUT = ("sign_flip", "scale", "nan", "lying_reducer")
"""Those that bring what no honest peer would; the others do no more harm than one that is absent (docs/security.md)."""
ROUND_SECONDS = 120.0
"""More than one takes on a machine that has much else to do."""
LONGER = {"min_seconds": 4.0, "max_seconds": 4.0}
"""Rounds that who has missed one can catch up with, while all others train on and never wait."""
MODEL = {"hidden_size": 64, "num_layers": 4, "num_experts": 8}
"""Its `shared` is cut into as many pieces as there are peers: all of them see what the others bring."""


class DishonestPeer(LabPeer):
    """A peer that lies once it is told to.

    Args:
        index: Its number.
        folder: The laboratory's.
        max_slots: Slots it can train.
        kind: How it lies, of `lab_liar.KINDS`.
    """

    def __init__(self, index: int, folder: Path, max_slots: int, kind: str) -> None:
        super().__init__(index, folder, max_slots)
        self.lies = multiprocessing.get_context("forkserver").Event()
        self.kind = kind
        self._live = functools.partial(live_dishonestly, kind, self.lies)


class AttackedLab(Lab):
    """A laboratory, the last of whose peers is dishonest.

    Args:
        folder: For everything; made.
        kind: How it lies.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__(folder, seed=1, num_peers=NUM_PEERS)
        write_settings(
            folder / "run.yaml", model={**TINY["model"], **MODEL}, round={**ROUND, **LONGER, "min_peers": NUM_PEERS}
        )
        *self.honest, last = self.peers
        self.liar = self.peers[-1] = DishonestPeer(last.index, folder, last.max_slots, kind)

    def attack(self) -> None:
        """Let it lie once all have committed rounds, and the honest ones commit more."""
        self._go_on(self.peers, HONEST_ROUNDS)
        self.liar.lies.set()
        self._go_on(self.honest, ROUNDS_AFTER)
        for _ in range(ROUNDS_UNTIL_SEEN if self.liar.kind in FOUND_OUT else 0):
            if self._history().left_out():
                return
            self._go_on(self.honest, 1)

    def _history(self) -> AttackedHistory:
        return AttackedHistory(self.folder / "history", {p.index: p.output / "versions" for p in self.honest})

    def _go_on(self, peers: list[LabPeer], rounds: int) -> None:
        goals = {peer: peer.rounds + rounds for peer in peers}
        what = f"{rounds} rounds more of peers {', '.join(str(peer.index) for peer in peers)}"
        self._until(lambda: all(peer.rounds >= goal for peer, goal in goals.items()), ROUND_SECONDS * rounds, what)

    def outcome(self) -> Outcome:
        """Return what the history says, and what the honest ones have left; once all peers have ended."""
        outcome = self._history().outcome()
        shutil.rmtree(self.folder / "history" / "vectors")  # hundreds of MiB
        return outcome


@dataclass(frozen=True)
class Outcome:
    """What came of a dishonest peer.

    Attributes:
        verdict: Of the whole history, with the versions that honest peers have left.
        began: The first round that it lied in.
        rounds: Rounds that honest peers have committed since.
        took_part: Those of them in one of whose groups it was, though so many had met that they could vote.
        left_out: Those in which it was on the roster, and a majority did not want it.
        accused: Honest peers of whom any honest one, in any round, has said that it distrusts them.
        moved: How far the means of `shared` were, since, from what the honest members alone would have got, as a
            multiple of that one's length; the largest.
    """

    verdict: Verdict
    began: int
    rounds: tuple[int, ...]
    took_part: tuple[int, ...]
    left_out: tuple[int, ...]
    accused: tuple[str, ...]
    moved: float


class AttackedHistory(History):
    """The history of a laboratory in which somebody has lied."""

    def outcome(self) -> Outcome:
        """Check everything, and say what became of the liar."""
        liar, began = self._lie()
        took_part, accused = set(), set()
        for event, roster in self._honest_commits(liar):
            accused |= {peer for member in roster if member.peer_id != liar for peer in member.distrusts} - {liar}
            is_in = any(liar in members for members in roster.groups.values())
            if is_in and len(roster) >= MIN_VOTERS and event["round"] >= began:
                took_part.add(event["round"])
        since = [(event, roster) for event, roster in self._honest_commits(liar) if event["round"] >= began]
        return Outcome(
            verdict=self.verdict(),
            began=began,
            rounds=tuple(sorted({event["round"] for event, _ in since})),
            took_part=tuple(sorted(took_part)),
            left_out=tuple(self.left_out()),
            accused=tuple(sorted(accused)),
            moved=max(self._moved(event, roster, liar) for event, roster in since),
        )

    def left_out(self) -> list[int]:
        """Return the rounds in which the liar was on the roster, and a majority did not want it."""
        liar, _ = self._lie()
        return sorted({event["round"] for event, roster in self._honest_commits(liar) if liar in roster.distrusted})

    def _lie(self) -> tuple[str, int]:
        """Return who lied, and the first round in which it did."""
        [lie] = [event for event in self._events if event["event"] == "lies"]
        return lie["peer"], lie["round"]

    def _honest_commits(self, liar: str) -> Iterator[tuple[dict[str, Any], Roster]]:
        for event in self._commits:
            if event["peer"] != liar:
                members = (Member.model_validate_json(json.dumps(member)) for member in event["roster"])
                yield event, Roster(members, Body.model_validate_json(json.dumps(event["last"])))

    def _moved(self, event: dict[str, Any], roster: Roster, liar: str) -> float:
        """Return how far a mean delta of `shared` is from the plain mean of the honest members' deltas."""
        honest = [m for m in roster if m.peer_id in roster.groups[SHARED] and m.peer_id != liar]
        brought = [self._brought[member.peer_id, member.ready_at]["deltas"][SHARED] for member in honest]
        deltas = [self._delta(name) for name in brought]
        plain = weighted_mean(deltas, [float(member.tokens) for member in honest])
        return float((self._delta(event["means"][SHARED]) - plain).norm() / plain.norm())

    def _delta(self, name: str) -> torch.Tensor:
        """Return the first third of a vector; two moments follow."""
        flat_N = self._vector(name)
        return flat_N[: flat_N.numel() // 3]
