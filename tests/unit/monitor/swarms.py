"""Records of peers that exist only in a test."""

import hashlib
from collections.abc import Iterable, Mapping

from spes_p2p.monitor.view import Snapshot, SwarmView, fold
from spes_p2p.swarm.certificate import Body, MemberEntry
from spes_p2p.swarm.records import Claim, Metrics, Progress

ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
NUM_SLOTS, TOTAL_ROUNDS = 8, 20


def peer_id(index: int) -> str:
    """A valid peer id, different for every index, also at its end."""
    return "Qm" + "".join(ALPHABET[byte % 58] for byte in hashlib.sha512(str(index).encode()).digest()[:44])


def empty_view() -> SwarmView:
    return SwarmView(NUM_SLOTS, TOTAL_ROUNDS, absence_seconds=10.0)


def claim(index: int, slots: Iterable[int] = (), state: str = "active") -> Claim:
    return Claim(peer_id=peer_id(index), state=state, slots=tuple(slots), max_slots=8, since=1.0)  # type: ignore[arg-type]


def progress(index: int, round: int) -> Progress:
    return Progress(peer_id=peer_id(index), round=round, ends_at=0.0)


def report(index: int, round: int, **changes) -> Metrics:
    fields = {
        "step": 10,
        "tokens": 1000,
        "total_tokens": 1000,
        "loss": 4.0,
        "tokens_per_second": 100.0,
        "slots": (0,),
        "num_members": 2,
        "committed": 2,
        "dropped": 0,
        "shared_digest": "a" * 16,
        "train_seconds": 8.0,
        "matchmaking_seconds": 0.5,
        "averaging_seconds": 0.5,
        "exchange_seconds": 0.5,
        "other_seconds": 0.5,
        "bytes_in": 10,
        "bytes_out": 20,
    }
    return Metrics(peer_id=peer_id(index), round=round, **(fields | changes))


def body(round: int, tokens: Mapping[int, int], voters: Iterable[int] = (98,), ends_at: float = 0.0) -> Body:
    """The body of a certificate with these members, of whose tokens so many count."""
    members = [MemberEntry(peer_id=peer_id(index), tokens=count) for index, count in tokens.items()]
    return Body(
        **{"run": "run", "founder": peer_id(98), "round": round, "previous": "0" * 64, "ends_at": ends_at},
        **{"members": tuple(sorted(members, key=lambda member: member.peer_id))},
        **{"voters": tuple(map(peer_id, voters))},
    )


def snapshot(
    now: float,
    claims: Iterable[Claim],
    reports: Iterable[Metrics] = (),
    rounds: Mapping[int, int] | None = None,
    *bodies: Body,
) -> Snapshot:
    """Records, and certificates: by default of the rounds that are reported, with the reports' peers and tokens."""
    records = {record.peer_id: record for record in reports}
    indices = {peer_id(index): index for index in range(200)}
    if not bodies:
        tokens: dict[int, dict[int, int]] = {}
        for each in records.values():
            tokens.setdefault(each.round, {})[indices[each.peer_id]] = each.tokens if each.committed else 0
        bodies = tuple(body(number, counts) for number, counts in tokens.items())
    return Snapshot(
        now,
        {record.peer_id: record for record in claims},
        {peer_id(index): progress(index, number) for index, number in (rounds or {}).items()},
        records,
        {each.round: each for each in bodies},
    )


def small_history(last_round: int = 3) -> list[SwarmView]:
    """Views of two peers that train `last_round` rounds, the first one before any."""
    views = [fold(empty_view(), snapshot(1.0, [claim(0, [0, 1]), claim(1, [1, 2])]))]
    for number in range(1, last_round + 1):
        reports = [report(i, number, loss=5.0 - number / 4 + i / 10, slots=(i, i + 1)) for i in range(2)]
        taken = snapshot(1.0 + 5 * number, [claim(0, [0, 1]), claim(1, [1, 2])], reports, {0: number, 1: number})
        views.append(fold(views[-1], taken))
    return views
