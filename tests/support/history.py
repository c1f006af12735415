"""What a swarm's peers wrote down, held against what must be so whatever befell them.

Four promises: a mean is the guarded mean of what exactly the roster's members brought; a version is its parent
moved by such a mean; a peer's versions never go back, but to give up what nobody else had, or what it has refused; and
what two peers ever had, or what came of it, is there in the end, if nobody has refused it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain_average import Entry, GroupMean
from torch import Tensor

from spes_p2p.codecs.format import Segment
from spes_p2p.codecs.vectors import digest
from spes_p2p.swarm.averaging.encoding import DeltaEncoding
from spes_p2p.swarm.averaging.partition import GroupPlan
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.roster import Member, Roster


@dataclass
class Verdict:
    """What was checked, and what is wrong.

    Attributes:
        means: Means replayed.
        versions: Versions whose parent and mean were followed.
        accepted: Versions that two peers had at least.
        lost: Those of them that neither are there in the end, nor anything that came of them.
        story: What befell the slots that have lost any.
        refused: Versions that a peer did not take because they made its model worse.
        wrong: Everything else that must not be.
    """

    means: int = 0
    versions: int = 0
    accepted: int = 0
    lost: list[str] = field(default_factory=list)
    story: str = ""
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


KEPT = torch.bfloat16
"""Type of the kept form of the laboratory's runs."""


class History:
    """The events of all lives.

    Args:
        folder: Where peers wrote.
        left: By peer, the versions that it left on disk; of those that are there in the end.
    """

    def __init__(self, folder: Path, left: Mapping[int, Path]) -> None:
        self._folder = folder
        self._left = left
        lives = [events_of(path) for path in sorted(folder.glob("*.jsonl"))]
        self._lives = lives
        self._events = sorted((event for life in lives for event in life), key=lambda event: event["at"])
        self._brought = {
            (event["peer"], event["member"]["ready_at"]): event for event in self._events if event["event"] == "brings"
        }
        self._commits = [event for event in self._events if event["event"] == "commits"]
        self._refused = {(event["name"], event["version"]) for event in self._events if event["event"] == "refuses"}

    @property
    def num_rounds(self) -> int:
        """Rounds that anybody committed."""
        return len({event["round"] for event in self._commits})

    def verdict(self) -> Verdict:
        """Check everything."""
        verdict = Verdict(refused=sorted(f"{name} {version[:8]}" for name, version in self._refused))
        self._check_means(verdict)
        holders = self._holders()
        parents = self._follow(verdict, holders)
        self._check_order(verdict, holders)
        self._check_lost(verdict, parents, holders)
        verdict.story = self.story({version.split()[0] for version in verdict.lost})
        return verdict

    def story(self, names: set[str]) -> str:
        """Return what befell these groups, a line for each commit and each version taken, for whoever asks why."""
        lines, last = [], dict[tuple[str, str], str]()
        for event in self._events:
            when = f"{event['at'] - self._events[0]['at']:6.1f} s {_who(event)}"
            if event["event"] == "commits":
                for name in sorted(names & event["means"].keys()):
                    lines.append(f"{when} commits round {event['round']} of {name} from {event['before'][name][:8]}")
            elif event["event"] == "has":
                for name in sorted(names & event["versions"].keys()):
                    round, version = event["versions"][name]
                    if last.get((event["peer"], name)) != version:
                        lines.append(f"{when} has {name} {version[:8]} of round {round}")
                    last[event["peer"], name] = version
        return "\n".join(lines)

    # ------------------------------------------------------------------ means

    def _check_means(self, verdict: Verdict) -> None:
        """Replay every committed mean from what its roster's members say that they brought; deltas with two moments."""

        @cache
        def replayed(name: str, roster: str, last: str) -> str:
            entries = (Member.model_validate_json(entry) for entry in json.loads(roster))
            members = Roster(entries, Body.model_validate_json(last))
            ids = members.members_of(name)
            of = {member.peer_id: member for member in members}
            brought = [self._brought.get((peer, of[peer].ready_at)) for peer in ids]
            if not ids or None in brought:
                return "somebody on the roster never brought it"
            vectors = {event["peer"]: self._vector(event["deltas"][name]) for event in brought}  # type: ignore[index]
            numel = vectors[ids[0]].numel() // 3
            encoding = DeltaEncoding(
                {VectorName(name).kind: [Segment(numel, "fp32"), Segment(numel, "fp32"), Segment(numel, "fp32", True)]}
            )
            format = encoding.format(name, 1)
            plan = GroupPlan.in_roster(members, ids, format)
            sent = {peer: flat_N.view(torch.uint8) for peer, flat_N in vectors.items()}  # fp32, a liar's NaN too
            met = {peer: Entry(of[peer], {name: data}, encoding, {}) for peer, data in sent.items()}
            work = GroupMean(plan, name, met)
            failure = work.reduce()
            # A member that takes a reducer for a liar leaves the group; the others' mean is the same.
            is_made = not failure or failure.startswith("lost ")
            return digest(format.decode(work.mean)) if is_made else failure

        for event in self._commits:
            roster, last = json.dumps([json.dumps(member) for member in event["roster"]]), json.dumps(event["last"])
            for name, mean in event["means"].items():
                verdict.means += 1
                if (expected := replayed(name, roster, last)) != mean:
                    verdict.wrong.append(
                        f"{_who(event)} round {event['round']} {name}: mean {mean[:8]}, not {expected}"
                    )

    def _vector(self, name: str) -> Tensor:
        return torch.from_numpy(np.fromfile(self._folder / "vectors" / name, dtype="<f4"))

    # ------------------------------------------------------------------ lineage

    def _follow(self, verdict: Verdict, holders: Mapping[tuple[str, str], set[str]]) -> dict[tuple[str, str], set[str]]:
        """Return each version's parents, by name and digest, after following every commit from parent to child.

        A version that is made of a kept form comes from the masters of that round.
        """
        parents: dict[tuple[str, str], set[str]] = defaultdict(set)
        masters: dict[tuple[str, int], set[str]] = defaultdict(set)
        known: dict[str, set[str]] = defaultdict(set)
        pending: dict[str, dict[str, Any]] = {}
        for event in self._events:
            if event["event"] == "commits":
                pending[event["peer"]] = event
            elif event["event"] == "publishes":
                commit = pending.pop(event["peer"], None)
                for name, child in event["versions"].items():
                    if commit is not None and commit["round"] == event["round"] and name in commit["means"]:
                        self._check_child(verdict, commit, name, child, known[name], parents)
                    elif made_of := {each for each in masters[name, event["round"]] if self._is_rounded(child, each)}:
                        parents[name, child] |= made_of
                    elif event["round"] and child not in known[name]:
                        verdict.wrong.append(f"{_who(event)} round {event['round']} {name}: {child[:8]} from nowhere")
                    known[name].add(child)
                    masters[name, event["round"]].add(child)
        for (name, version), peers in holders.items():
            if VectorName(name).is_weights and version not in known[name]:
                who = ", ".join(sorted(peer[-6:] for peer in peers))
                verdict.wrong.append(f"{who} {name}: has {version[:8]}, which nobody published")
        return parents

    def _is_rounded(self, child: str, master: str) -> bool:
        """Tell whether a version is another one after rounding to the run's kept form."""
        ours, theirs = self._vector(child), self._vector(master)
        return child != master and ours.shape == theirs.shape and torch.equal(ours, theirs.to(KEPT).float())

    def _check_child(
        self,
        verdict: Verdict,
        commit: Mapping[str, Any],
        name: str,
        child: str,
        known: Iterable[str],
        parents: dict[tuple[str, str], set[str]],
    ) -> None:
        before = commit["before"][name]
        parent = next((digest for digest in known if digest.startswith(before)), None)
        what = f"{_who(commit)} round {commit['round']} {name}"
        if parent is None:
            verdict.wrong.append(f"{what}: its parent {before[:8]} is nobody's version")
            return
        start, mean, end = (self._vector(item) for item in (parent, commit["means"][name], child))
        verdict.versions += 1
        if mean.numel() < start.numel() or not torch.equal(start - mean[: start.numel()], end):
            verdict.wrong.append(f"{what}: {child[:8]} is not its parent {parent[:8]} moved by the mean")
        if parent != child:
            parents[name, child].add(parent)

    # ------------------------------------------------------------------ what is kept

    def _holders(self) -> dict[tuple[str, str], set[str]]:
        """Return who ever had a version, by name and digest."""
        holders: dict[tuple[str, str], set[str]] = defaultdict(set)
        for event in self._events:
            for name, (_, version) in event["versions"].items() if event["event"] == "has" else ():
                holders[name, version].add(event["peer"])
        return holders

    def _check_order(self, verdict: Verdict, holders: Mapping[tuple[str, str], set[str]]) -> None:
        """In one life, a peer goes back a round only from a version that it alone had."""
        for life in self._lives:
            last: dict[str, tuple[int, str]] = {}
            for event in life:
                for name, (round, version) in event["versions"].items() if event["event"] == "has" else ():
                    before = last.get(name)
                    is_given_up = before and (len(holders[name, before[1]]) < 2 or (name, before[1]) in self._refused)
                    if before and round < before[0] and not is_given_up:
                        verdict.wrong.append(f"{_who(event)} {name}: went back from round {before[0]} to {round}")
                    last[name] = round, version

    def _check_lost(
        self, verdict: Verdict, parents: Mapping[tuple[str, str], set[str]], holders: Mapping[tuple[str, str], set[str]]
    ) -> None:
        """Whatever two peers had must be there in the end, or be an ancestor of what is."""
        kept: dict[str, set[str]] = defaultdict(set)
        for versions in self._left.values():
            for path in versions.glob("*.bin"):
                name, _, version, _ = path.name.split(".")
                kept[name].add(version)
        for name in {name for name, _ in holders if VectorName(name).is_weights}:
            reached, frontier = set(kept[name]), list(kept[name])
            while frontier:
                for parent in parents.get((name, frontier.pop()), ()):
                    if parent not in reached:
                        reached.add(parent)
                        frontier.append(parent)
            held = {version for other, version in holders if other == name and len(holders[other, version]) > 1}
            accepted = {version for version in held if (name, version) not in self._refused}
            verdict.accepted += len(accepted)
            verdict.lost += [f"{name} {version[:8]}" for version in sorted(accepted - reached)]


def events_of(life: Path) -> list[dict[str, Any]]:
    """Return a life's events; its last line may have been cut short by its end."""
    lines = life.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _who(event: Mapping[str, Any]) -> str:
    return str(event["peer"])[-6:]
