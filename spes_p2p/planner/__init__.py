"""What a peer will need before anything starts: parameters, memory, bytes and time."""

from spes_p2p.planner.memory import (
    Activations,
    PeerMemory,
    Setup,
    fits,
    peer_bytes,
    peer_memory,
    shortage,
    slots_that_fit,
)
from spes_p2p.planner.size import ModelSize, free_memory_bytes, model_size
from spes_p2p.planner.traffic import (
    RoundSeconds,
    RoundTraffic,
    StarTraffic,
    round_traffic,
    star_traffic,
    training_seconds,
    transfer_seconds,
)

__all__ = [
    "Activations",
    "ModelSize",
    "PeerMemory",
    "RoundSeconds",
    "RoundTraffic",
    "Setup",
    "StarTraffic",
    "fits",
    "free_memory_bytes",
    "model_size",
    "peer_bytes",
    "peer_memory",
    "round_traffic",
    "shortage",
    "slots_that_fit",
    "star_traffic",
    "training_seconds",
    "transfer_seconds",
]
