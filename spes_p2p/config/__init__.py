"""Settings: `run` is what the swarm agrees on, `machine` what one machine decides, `checks` whether the two fit."""

from spes_p2p.config.checks import EIGHT_BIT, check_machine, check_training, sequences_at_once
from spes_p2p.config.machine import CommandConfig, MachineConfig, PeerConfig, RunId
from spes_p2p.config.run import (
    CodecConfig,
    CodecName,
    DataConfig,
    Fraction,
    Frozen,
    MergeConfig,
    ModelConfig,
    OptimizerName,
    OuterConfig,
    OuterStep,
    PositiveFloat,
    PositiveInt,
    RoundConfig,
    RunConfig,
    Storage,
    TrainConfig,
)

__all__ = [
    "EIGHT_BIT",
    "CodecConfig",
    "CodecName",
    "CommandConfig",
    "DataConfig",
    "Fraction",
    "Frozen",
    "MachineConfig",
    "MergeConfig",
    "ModelConfig",
    "OptimizerName",
    "OuterConfig",
    "OuterStep",
    "PeerConfig",
    "PositiveFloat",
    "PositiveInt",
    "RoundConfig",
    "RunConfig",
    "RunId",
    "Storage",
    "TrainConfig",
    "check_machine",
    "check_training",
    "sequences_at_once",
]
