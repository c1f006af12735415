"""Averages a roster in one process, without messages: what the members of a real one must end in, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.averaging.audit import Auditor, Evidence
from spes_p2p.swarm.averaging.encoding import DeltaEncoding
from spes_p2p.swarm.averaging.partition import GroupPlan, Message, bytes_of, decode_message, reduce_message
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.roster import Member, Roster


@dataclass(frozen=True)
class Entry:
    """A peer's input to a round's averaging.

    Attributes:
        member: The peer's roster entry.
        encoded: The peer's vectors in their encoding.
        encoding: The encoding of all vectors.
        errors: Rounding errors of the means that the peer has reduced so far, by group.
    """

    member: Member
    encoded: Mapping[VectorName, Tensor]
    encoding: DeltaEncoding
    errors: dict[VectorName, Tensor]


@dataclass(frozen=True)
class Attempt:
    """What averaging brings one member.

    Attributes:
        status: Reason of failure by group that this peer was in; "" for success.
        averaged: Encoded mean by group, for the successes.
        residuals: Rounding error of the means in this reducer's slices, by group: first element of the delta, and fp32
            values.
        evidence: This peer's evidence against members.
    """

    status: Mapping[VectorName, str]
    averaged: Mapping[VectorName, Tensor]
    residuals: Mapping[VectorName, tuple[int, Tensor]]
    evidence: Mapping[str, Evidence]


def average_entries(met: Mapping[str, Entry], last: Body, attempt: int = 0) -> dict[str, Attempt]:
    """Return each peer's outcome of averaging these entries in an attempt; they stay unchanged."""
    roster = Roster((met[peer].member for peer in sorted(met)), last)
    status: dict[str, dict[VectorName, str]] = {peer: {} for peer in met}
    averaged: dict[str, dict[VectorName, Tensor]] = {peer: {} for peer in met}
    residuals: dict[str, dict[VectorName, tuple[int, Tensor]]] = {peer: {} for peer in met}
    evidence: dict[str, dict[str, Evidence]] = {peer: {} for peer in met}
    for name, members in roster.groups.items():
        format = met[members[0]].encoding.format(name, roster.round + 1)
        plan = GroupPlan.in_roster(roster, members, format, roster.replicas.get(name, ()), attempt)
        work = GroupMean(plan, name, met)
        reason = work.reduce() if any(plan.weights) else "no member trained"
        for peer in plan.peers:
            status[peer][name] = reason
            evidence[peer] |= work.auditors[peer].evidence()
            if not reason:
                averaged[peer][name] = work.mean
                if peer in work.residuals:
                    residuals[peer][name] = work.residuals[peer]
    return {peer: Attempt(status[peer], averaged[peer], residuals[peer], evidence[peer]) for peer in met}


class GroupMean:
    """One group's all-reduce, with all of its members in one process.

    Attributes:
        mean: The encoded mean, once it is reduced.
        residuals: Rounding error of the mean, by reducer: first element, and fp32 values.
        auditors: Each member's auditor.
    """

    def __init__(self, plan: GroupPlan, name: VectorName, met: Mapping[str, Entry]) -> None:
        self._plan = plan
        self._name = name
        self._met = met
        self.mean = torch.empty(plan.format.num_bytes, dtype=torch.uint8)
        self.residuals: dict[str, tuple[int, Tensor]] = {}
        self.auditors = {peer: Auditor(plan, peer) for peer in plan.peers}

    def reduce(self) -> str:
        """Reduce every slice; return the reason of a failure, or ""."""
        plan = self._plan
        if plan.is_sole:
            (holder,) = set(plan.peers) - plan.replicas
            self.mean = self._met[holder].encoded[self._name]
            return ""
        try:
            for reducer, messages in zip(plan.peers, plan.slices, strict=True):
                self._reduce_slice(reducer, messages)
        except (ValueError, ExchangeError) as error:
            return f"the mean cannot be sent: {error}"
        liars = {peer: seen for auditor in self.auditors.values() for peer, seen in auditor.liars().items()}
        return "; ".join(f"lost {peer}: {seen.reason}" for peer, seen in liars.items())

    def _reduce_slice(self, reducer: str, messages: Sequence[Message]) -> None:
        plan, entry = self._plan, self._met[reducer]
        start, stop = plan.span(reducer)
        errors = entry.errors.setdefault(self._name, torch.zeros(plan.delta_numel))
        new_errors = errors[start:stop].clone()
        auditor, peers = self.auditors[reducer], plan.peers
        for message in messages:
            span, place = plan.residual_span(message), bytes_of(message)
            sent = {sender: self._met[peers[sender]].encoded[self._name][place] for sender in plan.senders}
            decoded = [auditor.decode(sender, message, data) for sender, data in sent.items()]
            encoded, residual = reduce_message(plan, message, decoded, errors[span], auditor.weigh)
            self.mean[place] = encoded
            new_errors[span.start - start : span.stop - start] = residual
            mean_N = decode_message(plan.format, message, self.mean[place])
            for peer, other in self.auditors.items():
                if peer != reducer and self._name in self._met[peer].encoded:
                    other.observe_mean(peers.index(reducer), message, mean_N, self._met[peer].encoded[self._name])
        if not plan.format.is_exact:
            self.residuals[reducer] = start, new_errors
