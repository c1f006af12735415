"""A machine that could not train a run, or would not make its steps, is told so before anything starts."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from spes_p2p.cli import load_settings
from spes_p2p.config import (
    MachineConfig,
    MergeConfig,
    OptimizerName,
    PeerConfig,
    RunConfig,
    TrainConfig,
    check_machine,
)
from spes_p2p.errors import ConfigError

NAMES = get_args(OptimizerName)


@pytest.mark.parametrize("of_run", NAMES)
@pytest.mark.parametrize("of_machine", NAMES)
def test_a_machine_may_only_choose_the_same_steps_in_other_bits(
    of_run: OptimizerName, of_machine: OptimizerName
) -> None:
    run, machine = RunConfig(train=TrainConfig(optimizer=of_run)), MachineConfig(inner_optimizer=of_machine)
    if of_run == of_machine or {of_run, of_machine} == {"adamw", "adamw8bit"}:
        check_machine(run, machine)
        return
    with pytest.raises(ConfigError, match=rf"inner_optimizer={of_machine} .*train.optimizer={of_run}; leave it out"):
        check_machine(run, machine)


def test_a_run_that_merges_needs_every_slots_newest_version() -> None:
    machine = MachineConfig(refresh_slots=3)
    check_machine(RunConfig(), machine)
    with pytest.raises(ConfigError, match=r"refresh_slots=3 .*merge.alpha=0.1.*leave it out"):
        check_machine(RunConfig(merge=MergeConfig(alpha=0.1)), machine)


def test_flash_attention_needs_a_run_in_bf16() -> None:
    machine = MachineConfig(attention="flash")
    check_machine(RunConfig(train=TrainConfig(precision="bf16")), machine)
    with pytest.raises(ConfigError, match=r"attention=flash .*train.precision=fp32; set attention=sdpa"):
        check_machine(RunConfig(), machine)


NARROW = {"gradients": "bf16", "inner_optimizer": "adamw8bit"}


@pytest.mark.parametrize(
    ("choices", "ranks", "said"),
    [
        ({}, 3, r"train.batch_size=16 does not split over 3 ranks; start a divisor"),
        ({"shard": "fsdp", "inner_optimizer": "adamw8bit"}, 2, r"adamw8bit cannot work with --shard fsdp.*--shard ddp"),
        ({"gradients": "bf16"}, 1, r"adamw8bit, not with adamw; set inner_optimizer=adamw8bit"),
        (NARROW, 2, r"works with one rank, not with 2; set gradients=fp32"),
        ({**NARROW, "micro_batch_size": 1}, 1, r"adds up 16 microbatches.*set micro_batch_size to 2 or more"),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_remedy(choices: dict[str, Any], ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_machine(RunConfig(train=TrainConfig(batch_size=16)), MachineConfig(**choices), ranks)


@pytest.mark.parametrize(
    ("choices", "ranks"),
    [
        ({"shard": "fsdp"}, 2),
        ({"shard": "fsdp", "inner_optimizer": "adamw8bit"}, 1),
        (NARROW, 1),
        ({**NARROW, "micro_batch_size": 2}, 1),
    ],
)
def test_what_the_remedies_name_is_taken(choices: dict[str, Any], ranks: int) -> None:
    check_machine(RunConfig(train=TrainConfig(batch_size=16)), MachineConfig(**choices), ranks)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume-round", "4"], "resume_round=4 goes with --resume; add it"),
        (["--skip-optimizer"], "skip_optimizer goes with --resume; add it"),
        (["--resume", "--resume-round", "-1"], "resume_round"),
        (["--keep-last", "0"], "keep_last"),
        (["--keep-every", "0"], "keep_every"),
    ],
)
def test_what_to_keep_and_to_go_back_to_is_checked_with_the_flags(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_settings(PeerConfig, ["--run-id", "run", *words])
