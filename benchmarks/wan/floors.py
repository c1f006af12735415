"""What no protocol can go below: bytes that must move, and the time in which a link can move them.

Letters: `N` peers, `S` bytes of the shared parameters' delta, `X` bytes of all slots together, in the form in which
peers keep those of others, each slot with one holder; `r`, `u` and `d` bytes per second of a link, of an uplink, of a
downlink. Source of the bounds: an all-reduce of S among N peers needs 2 S (N - 1) bytes in all, for every part must
leave all but one peer for its sum, and the sum must come to all but one; slots that all peers get from their holders
need X (N - 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True)
class Payload:
    """What a round moves.

    Attributes:
        shared_mib: Size of the shared parameters in fp32, in MiB.
        slot_mib: Size of one slot.
        slots: Slots in all, dealt out evenly.
        bits: Bits per element of the shared parameters' delta.
        slot_bits: Bits per element of a slot in the form in which other peers keep it.
    """

    shared_mib: int = 20
    slot_mib: int = 4
    slots: int = 16
    bits: float = 32.0
    slot_bits: float = 32.0

    @property
    def shared_numel(self) -> int:
        """Elements of the shared vector."""
        return self.shared_mib * MIB // 4

    @property
    def slot_numel(self) -> int:
        """Elements of one slot's vector."""
        return self.slot_mib * MIB // 4

    @property
    def shared_bytes(self) -> float:
        """S."""
        return self.shared_numel * self.bits / 8

    @property
    def slots_bytes(self) -> float:
        """X."""
        return self.slots * self.slot_numel * self.slot_bits / 8


def bytes_per_second(mbit: float) -> float:
    """Return the bytes per second of a link of `mbit` 10^6 bits per second."""
    return mbit * 1e6 / 8


def round_bytes(payload: Payload, peers: int) -> float:
    """Return what a peer sends, and receives, in a round: (2 S (N - 1) + X (N - 1)) / N."""
    return (2 * payload.shared_bytes + payload.slots_bytes) * (peers - 1) / peers


def round_seconds(payload: Payload, peers: int, mbit: float) -> float:
    """Return the least time of averaging and exchange among equal links."""
    return round_bytes(payload, peers) / bytes_per_second(mbit)


def full_averaging_bytes(payload: Payload, peers: int) -> float:
    """Return the bytes that a peer sends, and receives, if all peers average all vectors: 2 (S + X) (N - 1) / N."""
    return 2 * (payload.shared_bytes + payload.slots_bytes) * (peers - 1) / peers


def full_averaging_seconds(payload: Payload, peers: int, mbit: float) -> float:
    """Return the least time of that."""
    return full_averaging_bytes(payload, peers) / bytes_per_second(mbit)


def server_bytes(payload: Payload, peers: int) -> tuple[float, float]:
    """Return what a server receives, N S + X, and sends, N (S + X)."""
    shared, slots = payload.shared_bytes, payload.slots_bytes
    return peers * shared + slots, peers * (shared + slots)


def server_seconds(payload: Payload, peers: int, mbit: float) -> float:
    """Return the least time of a round through a server on the same link: it must have all before it sends."""
    return sum(server_bytes(payload, peers)) / bytes_per_second(mbit)


def unequal_seconds(payload: Payload, up_mbit: Sequence[float], down_mbit: float) -> float:
    """Return the least time of a round where uplinks differ: the largest of three bounds.

    Every peer i must send its own delta of `shared` and its own slots at least once, to any reducer and any relay:
    (S + X / N) / u_i. All uplinks together must send everything that an all-reduce and an exchange take:
    (2 S + X) (N - 1) / sum(u). And every peer must receive the mean of `shared` and the slots of others once:
    (S + X (N - 1) / N) / d.
    """
    peers, shared, slots = len(up_mbit), payload.shared_bytes, payload.slots_bytes
    own = (shared + slots / peers) / bytes_per_second(min(up_mbit))
    together = (2 * shared + slots) * (peers - 1) / bytes_per_second(sum(up_mbit))
    incoming = (shared + slots * (peers - 1) / peers) / bytes_per_second(down_mbit)
    return max(own, together, incoming)
