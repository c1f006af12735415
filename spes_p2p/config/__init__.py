"""Settings: `run` is what the swarm agrees on, `machine` what one machine decides, `commands` the other commands'."""

from spes_p2p.config.checkpoint import (
    MAX_START_SLOTS,
    NO_FLAG,
    WORD,
    AdapterConfig,
    AdapterStart,
    AdapterTarget,
    Frozen,
    PositiveFloat,
    PositiveInt,
    RopeConfig,
    StartConfig,
    Storage,
    TensorCount,
    TokenizerSettings,
)
from spes_p2p.config.data import DataConfig, Packing, SourceConfig
from spes_p2p.config.families import FAMILIES, LOGIT_SETTINGS, TARGETS, Family
from spes_p2p.config.link import MAX_ADDRESSES, Address, JoinLink, PeerId
from spes_p2p.config.machine import (
    MIN_MBIT,
    CommandConfig,
    KeptRounds,
    LogLevel,
    MachineConfig,
    OwnData,
    PeerConfig,
    RunId,
    VolunteerConfig,
    check_machine,
    check_training,
    sequences_at_once,
)
from spes_p2p.config.run import (
    FOUNDED,
    MAX_LEASE_SECONDS,
    MAX_PEER_TOKENS,
    CodecConfig,
    CodecName,
    MergeConfig,
    ModelConfig,
    OptimizerName,
    OuterConfig,
    RoundConfig,
    RunConfig,
    TrainConfig,
)
