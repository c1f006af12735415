"""What no protocol can go below: bytes that must move, and the time in which a link can move them.

Letters: `N` peers, `S` bytes of the shared parameters' delta, `X` bytes of all slots together, in the form in which
peers keep those of others, each slot with one holder; `r`, `u` and `d` bytes per second of a link, of an uplink, of a
downlink. Source of the bounds: an all-reduce of S among N peers needs 2 S (N - 1) bytes in all, for every part must
leave all but one peer for its sum, and the sum must come to all but one; slots that all peers get from their holders
need X (N - 1).
"""

from __future__ import annotations

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


def server_seconds(payload: Payload, peers: int, mbit: float) -> float:
    """Return the least time of a round through a server on the same link, which receives all before it sends all."""
    received = peers * payload.shared_bytes + payload.slots_bytes
    return (received + peers * (payload.shared_bytes + payload.slots_bytes)) / bytes_per_second(mbit)
