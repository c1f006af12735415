"""Settings of a simulation: a run, its virtual peers, and the events of their lives."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Annotated, Literal

from pydantic import Field, model_validator

from spes_p2p.config import Frozen, PositiveFloat, PositiveInt, RunConfig, RunId
from spes_p2p.sim.attacks import Attack
from spes_p2p.swarm.records import PeerId


class Event(Frozen):
    """A virtual peer joins, leaves, dies, or pauses for a while."""

    peer: Annotated[int, Field(ge=0)]
    """The peer's index, from 0."""
    kind: Literal["join", "leave", "kill", "pause"]
    """`leave` gives the slots back. A killed peer announces nothing; its records expire. A paused peer, like a stopped
    process, neither trains nor answers, and its records expire if the pause is longer than a lease."""
    round: Annotated[int, Field(ge=0)]
    """The event comes after this round is committed; `kill` and `pause` come during the next round's training."""
    after_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """For `kill` and `pause`: they come with the first batch that ends this many virtual seconds after the round."""
    seconds: PositiveFloat | None = None
    """For `pause`: its length in virtual seconds."""

    @model_validator(mode="after")
    def _check_seconds(self) -> Event:
        if (self.kind == "pause") != (self.seconds is not None):
            raise ValueError(
                f"event {self.kind} of peer {self.peer} has seconds={self.seconds}; give them to pauses and to no other"
            )
        return self


class Churn(Frozen):
    """Constant churn: newcomers replace peers one by one, at times and in an order drawn from the scenario's seed."""

    present: Annotated[int, Field(ge=2)]
    """Peers at a time. They are there from the start; the rest of `peers` are newcomers."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of `present` that is replaced in every `rounds` rounds; half of the replaced peers die, half leave."""
    rounds: PositiveInt = 10
    """See `share`."""
    within_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Most virtual seconds between a round's commit and the death of a killed peer."""

    def num_newcomers(self, total: int) -> int:
        """Return the number of peers that are replaced in a run of `total` rounds."""
        return math.ceil(self.share * self.present * total / self.rounds)

    def events(self, seed: int, total: int) -> list[Event]:
        """Draw the events of a run of `total` rounds; each newcomer joins when the peer that it replaces has gone.

        Raises:
            ValueError: more peers are replaced than are there.
        """
        draw, number = Random(f"churn-{seed}"), self.num_newcomers(total)
        kinds: list[Literal["kill", "leave"]] = [("kill", "leave")[index % 2] for index in range(number)]
        draw.shuffle(kinds)
        joined, events = dict.fromkeys(range(self.present), 0), list[Event]()
        for index, kind in enumerate(kinds):
            interval = self.rounds / (self.share * self.present)
            round = min(1 + int((index + draw.random()) * interval), total - 2)
            if not (settled := [peer for peer, since in joined.items() if since < round]):
                raise ValueError(f"churn replaces all peers before round {round}; lower share, or raise rounds")
            peer = draw.choice(settled)
            seconds = draw.uniform(0.0, self.within_seconds) if kind == "kill" else 0.0
            newcomer, join = self.present + index, round + (kind == "kill")
            events.append(Event(peer=peer, kind=kind, round=round, after_seconds=seconds))
            events.append(Event(peer=newcomer, kind="join", round=join))
            joined = {**{other: since for other, since in joined.items() if other != peer}, newcomer: join}
        return events


class Scenario(Frozen):
    """One simulation; equal scenarios give bit-identical results on CPUs of the same kind."""

    run: RunConfig = RunConfig()
    """The run's settings; the number of peers that are there from the start replaces `round.min_peers`."""
    start_from: Path | None = None
    """Checkpoint that the run starts from, with its tokenizer; by default weights are drawn."""
    peers: PositiveInt = 4
    """Virtual peers, including those that join later."""
    voters: PositiveInt | None = None
    """So many of the first peers are invited to vote, and the others are strangers; by default all are."""
    max_slots: PositiveInt | list[PositiveInt] = 8
    """Slots that a peer can train: one number for all peers, or one for each; of no effect in a run without slots."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the peers' data orders and ids; `run.seed` is the seed of the initial weights."""
    speeds: PositiveFloat | list[PositiveFloat] = 1000.0
    """Training speed in tokens per virtual second: one number for all peers, or one for each."""
    uplink_mbit: PositiveFloat | None = None
    """Rate at which each peer sends, in 10^6 bits per virtual second; by default bytes take no time."""
    starts: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]] = []
    """Virtual seconds after which each peer starts; by default all start at once."""
    peer_ids: list[PeerId] = []
    """Ids of the peers in the form of real peers' ids; drawn from `seed` by default."""
    data_seeds: list[int] = []
    """Seeds of the peers' data orders; drawn from `seed` by default."""
    slots: list[list[Annotated[int, Field(ge=0)]]] = []
    """Slots that each peer claims when it starts, like a peer that resumes; by default all are allocated."""
    run_id: RunId = "simulation"
    """Seed of the lots that settle ties in the allocation of slots."""
    events: list[Event] = []
    """Joins, ends and pauses; a peer without a `join` is there from the start."""
    churn: Churn | None = None
    """Draws `events` instead of listing them."""
    attacks: list[Attack] = []
    """Attacks by dishonest peers."""
    evaluate_rounds: PositiveInt = 1
    """Rounds between measurements of the held-out loss; the last round is always measured."""
    held_out_tokens: PositiveInt = 32_768
    """Most tokens to measure it on; the same tokens in all scenarios with one tokenizer and corpus."""
    split: Literal["held_out", "tuning"] = "held_out"
    """Half of the run's held-out documents: one half to report, the other to choose settings by."""
    text: list[Path] = []
    """Files and folders of the data source `files`."""
    peer_text: list[list[Path]] = []
    """Files and folders that each peer trains on, of the same kind; by default all train on `text`. A document keeps
    its part in the split if its name does, which is its path in the folder that is given."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device on which all peers train."""
    threads: PositiveInt | None = None
    """CPU threads; by default PyTorch's choice."""

    @model_validator(mode="after")
    def _check_peers(self) -> Scenario:
        if self.run.adapter is not None and self.start_from is None:
            raise ValueError("run.adapter needs a base; name a checkpoint with start_from")
        for name in ("max_slots", "speeds", "starts", "peer_ids", "data_seeds", "slots", "peer_text"):
            value = getattr(self, name)
            if isinstance(value, list) and value and len(value) != self.peers:
                raise ValueError(f"{name} lists {len(value)} peers, peers={self.peers}; list one value for each")
        if len(set(self.peer_ids)) < len(self.peer_ids):
            raise ValueError(f"peer_ids={self.peer_ids} holds an id twice; give every peer its own")
        num_slots = self.run.num_slots if self.start_from is None else 0  # a checkpoint has its own number of slots
        for slots in self.max_slots if isinstance(self.max_slots, list) else [self.max_slots]:
            if num_slots and slots > num_slots:
                raise ValueError(
                    f"max_slots={slots} exceeds run.model.num_experts={num_slots}; set it to {num_slots} or less"
                )
        if self.churn is None:
            return self
        if self.events or self.run.round.total < 3:
            raise ValueError(
                f"churn draws the events of a run of 3 rounds or more, and there are {len(self.events)} events beside "
                f"it and {self.run.round.total} rounds; leave out one of the two"
            )
        needed = self.churn.present + self.churn.num_newcomers(self.run.round.total)
        if self.peers != needed:
            raise ValueError(
                f"churn of {self.churn.present} peers over {self.run.round.total} rounds takes {needed} peers, "
                f"newcomers included, and peers={self.peers}; set it to {needed}"
            )
        return self

    @model_validator(mode="after")
    def _check_events(self) -> Scenario:
        for peer in [*(event.peer for event in self.events), *(attack.peer for attack in self.attacks)]:
            if peer >= self.peers:
                raise ValueError(f"peer {peer} is not one of peers={self.peers}; number them from 0")
        for event in self.schedule:
            first = 0 if event.kind == "join" else 1
            if not first <= event.round < self.run.round.total:
                raise ValueError(
                    f"peer {event.peer} cannot {event.kind} at round {event.round} of {self.run.round.total}; "
                    f"choose from {first} to {self.run.round.total - 1}"
                )
        for peer in range(self.peers):
            own = [event for event in self.schedule if event.peer == peer]
            joins = [event.round for event in own if event.kind == "join"]
            ends = [event.round for event in own if event.kind in ("leave", "kill")]
            if len(joins) > 1 or len(ends) > 1 or (joins and ends and ends[0] <= joins[0]):
                raise ValueError(
                    f"peer {peer} joins at rounds {joins} and goes at {ends}; let it join once, then go once, "
                    f"and come back as another peer"
                )
        for attack in self.attacks:
            if attack.from_round >= self.run.round.total:
                raise ValueError(
                    f"the attack of peer {attack.peer} begins in round {attack.from_round} of {self.run.round.total}; "
                    f"let it begin before"
                )
        for held in self.slots:
            if sorted(set(held)) != held or (self.start_from is None and held and held[-1] >= self.run.num_slots):
                last = "" if self.start_from is not None else f", up to {self.run.num_slots - 1}"
                raise ValueError(f"slots={held} of a peer; list each once, ascending{last}")
        if not self.founders:
            raise ValueError("every peer joins later, so there is no peer to join; let one start without an event")
        return self

    @property
    def schedule(self) -> list[Event]:
        """The events, listed or drawn."""
        return self.events if self.churn is None else self.churn.events(self.seed, self.run.round.total)

    @property
    def founders(self) -> list[int]:
        """Peers that are there from the start."""
        return [peer for peer in range(self.peers) if self.event_round(peer, "join") is None]

    def event_round(self, peer: int, kind: str) -> int | None:
        """Return the round of a peer's first event of a kind; None without one."""
        return min((event.round for event in self.schedule if event.peer == peer and event.kind == kind), default=None)
