"""Says whether what peers commit is the whole weighted mean of exactly the members of their roster, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from peer_server import Outcome
from plain_average import Attempt, Entry, average_entries
from torch import Tensor

from spes_p2p.codecs.format import Segment
from spes_p2p.codecs.vectors import digest
from spes_p2p.swarm.averaging.encoding import Contribution, DeltaEncoding
from spes_p2p.swarm.averaging.partition import weighted_mean
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.roster import Member

CODEC_ERROR = 0.05
"""Of a mean's norm: what int8 may cost, at its senders and at its reducer, with what the last round left over."""


@dataclass
class _State:
    """What one peer carries from round to round."""

    encoding: DeltaEncoding
    errors: dict[str, Tensor] = field(default_factory=dict)


class Referee:
    """Follows the peers' error feedback in memory, so that it knows every mean before it is told.

    Args:
        segments: How the peers' vectors travel.
    """

    def __init__(self, segments: Mapping[str, Sequence[Segment]]) -> None:
        self._segments = segments
        self._states: dict[str, _State] = {}
        self._entries: dict[tuple[str, float], tuple[Entry, Contribution]] = {}
        self._means: dict[tuple[str, ...], Mapping[str, Attempt]] = {}

    def enters(self, item: Contribution) -> None:
        """Take note of what a peer brings to a round, before the round."""
        peer = item.member.peer_id
        state = self._states.setdefault(peer, _State(DeltaEncoding(self._segments)))
        member, encoded = state.encoding.encode(item)
        errors = {name: error.clone() for name, error in state.errors.items()}
        self._entries[peer, member.ready_at] = Entry(member, encoded, state.encoding, errors), item
        for key in [key for key in self._entries if key[1] < member.ready_at - 120.0]:
            del self._entries[key]
        self._means = dict(list(self._means.items())[-8:])

    def leaves(self, peer: str) -> None:
        """Forget a peer."""
        self._states.pop(peer, None)

    def judge(self, item: Contribution, result: Outcome) -> list[str]:
        """Return what is wrong with a peer's result of the round that it entered with `item`."""
        me = item.member.peer_id
        wrong = [f"{name}: dropped without a reason" for name, reason in result.dropped.items() if not reason]
        if sorted([*result.committed, *result.dropped]) != sorted(item.deltas):
            wrong.append(f"committed {sorted(result.committed)} and dropped {sorted(result.dropped)}")
        if result.committed:
            wrong += self._check_means(item, result)
        state = self._states[me]
        if SHARED not in result.committed:
            state.encoding.forget()
            state.errors.clear()
        else:
            self._settle(state, item, result)
        return [f"{me[-6:]}: {reason}" for reason in wrong]

    def _check_means(self, item: Contribution, result: Outcome) -> list[str]:
        me = item.member.peer_id
        if me in result.roster.behind:
            return ["committed although it is behind"]
        wrong = []
        for member in result.roster:
            entry = self._entries.get((member.peer_id, member.ready_at))
            if member.peer_id in result.roster.groups[SHARED] and (
                entry is None or _stated(entry[0].member) != _stated(member)
            ):
                return [f"its roster has an entry of {member.peer_id[-6:]} that this peer never made"]
        exact = self._attempts(result)
        for name, mean in result.committed.items():
            if me not in result.roster.members_of(name):
                wrong.append(f"{name}: committed without being a member")
            elif exact[me].status[name] or digest(mean) != self._digest(exact[me], name, result.roster.round):
                wrong.append(f"{name}: a wrong mean")
            else:
                wrong += self._check_value(name, mean, result)
        return wrong

    def _attempts(self, result: Outcome) -> Mapping[str, Attempt]:
        key = (str(result.attempt), *sorted(member.model_dump_json() for member in result.roster))
        if key not in self._means:
            met = {
                member.peer_id: replace(self._entries[member.peer_id, member.ready_at][0], member=member)
                for member in result.roster
            }
            self._means[key] = average_entries(met, result.roster.last, result.attempt)
        return self._means[key]

    def _digest(self, attempt: Attempt, name: str, round: int) -> str:
        return digest(DeltaEncoding(self._segments).decode(name, round + 1, attempt.averaged[name]))

    def _check_value(self, name: str, mean: Tensor, result: Outcome) -> list[str]:
        """Hold a mean to the plain weighted mean, which knows nothing of parts, of formats, or of who reduces what."""
        members = result.roster.members_of(name)
        at = {member.peer_id: member.ready_at for member in result.roster}
        entries = [self._entries[peer, at[peer]] for peer in members]
        weights = [entry.member.tokens * result.roster.weights[entry.member.peer_id] for entry, _ in entries]
        plain = weighted_mean([item.deltas[name] for _, item in entries], weights)
        if len(members) == 1:
            plain = entries[0][1].deltas[name]
        if all(segment.codec == "fp32" for segments in self._segments.values() for segment in segments):
            return [] if torch.equal(mean, plain) else [f"{name}: not the plain weighted mean"]
        error = ((mean - plain).norm() / plain.norm()).item()
        return [] if error < CODEC_ERROR else [f"{name}: {error:.1%} from the plain weighted mean"]

    def _settle(self, state: _State, item: Contribution, result: Outcome) -> None:
        """Keep the residuals of the committed means, as the peer does."""
        state.encoding.commit(result.committed)
        attempt = self._attempts(result).get(item.member.peer_id)
        for name in result.committed if attempt else ():
            start, error = attempt.residuals.get(name, (0, torch.zeros(0)))
            kept = state.errors[name] = torch.zeros(self._segments[VectorName(name).kind][0].numel)
            kept[start : start + error.numel()] = error


def _stated(member: Member) -> Member:
    """Return a roster entry without what its peer fills in by itself."""
    return member.model_copy(update={"round": 0, "previous": "", "distrusts": (), "calls_only": False})
