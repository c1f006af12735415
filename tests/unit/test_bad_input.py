"""What users get wrong before anything starts: one line that names the value and the remedy."""

import shlex

import pytest

from spes_p2p.__main__ import COMMANDS
from spes_p2p.cli import load_settings
from spes_p2p.commands.early import refuse
from spes_p2p.config import MachineConfig, RunConfig, check_machine, commands
from spes_p2p.errors import ConfigError

# Words after `spes`, each with fragments of the one line.
FLAGS = [
    ("peer --run-id r --bogus 1", "--bogus", "--help"),
    ("peer --run-id r --run.model.bogus 1", "--run.model.bogus", "--help"),
    ("peer --run-id r --max-slot 3", "did you mean --max-slots? see --help"),
    ("peer --run-id r --initial-peer=/x", "did you mean --initial-peers? see --help"),
    ("peer --run-id r --run.model.num-expert 3", "did you mean --run.model.num-experts? see --help"),
    ("peer --run-id r --resum", "did you mean --resume? see --help"),
    ("peer --run-id a.b", "a.b", "--help"),
    ("peer --run-id r --port 70000", "70000", "--help"),
    ("peer --run-id r --port http", "http", "--help"),
    ("peer --run-id r --device tpu", "tpu", "cuda"),
    ("peer --run-id r --max-slots 0", "max_slots", "greater than or equal to 1"),
    ("peer --run-id r --config absent.yaml", "absent.yaml", "existing"),
    ("peer --config=absent.yaml", "absent.yaml", "existing"),
    ("peer --port 5", "run_id", "--run-id"),
    ("peer --run-id r --resume-round 4", "resume_round=4 goes with --resume; add it"),
    ("peer --run-id r --skip-optimizer", "skip_optimizer goes with --resume; add it"),
    ("peer --run-id r --resume --resume-round -1", "resume_round"),
    ("peer --run-id r --keep-last 0", "keep_last"),
    ("peer --run-id r --keep-every 0", "keep_every"),
    ("plan --peer 3", "did you mean --peers? see --help"),
    ("plan --slots 0", "max_slots=", "greater than"),
    ("plan --memory-gb nan", "memory_gb=", "finite"),
    ("plan --ranks 3 --run.train.batch-size 16", "train.batch_size=16", "3 ranks; start a divisor"),
    ("plan --ranks 2 --shard fsdp --inner-optimizer adamw8bit", "adamw8bit", "--shard fsdp", "--shard ddp"),
    ("plan --gradients bf16", "adamw8bit, not with adamw; set inner_optimizer=adamw8bit"),
    ("plan --gradients bf16 --inner-optimizer adamw8bit --ranks 2", "not with 2; set gradients=fp32"),
    (
        "plan --gradients bf16 --inner-optimizer adamw8bit --micro-batch-size 1 --run.train.batch-size 16",
        *("adds up 16 microbatches", "set micro_batch_size to 2 or more"),
    ),
    ("plan --config local_experiment --inner-optimizer lamb", "the run's train.optimizer=muon"),
    ("plan --refresh-slots 3 --run.merge.alpha 0.1", "refresh_slots=3", "merge.alpha=0.1", "leave it out"),
    ("plan --attention flash", "attention=flash", "train.precision=fp32; set attention=sdpa"),
    ("evaluate model --suite spes --num-fewshot 5", "num_fewshot=5 goes with tasks, and a suite sets its own"),
]
FILES = [
    ("run_id: r\nmax_slot: 3", "did you mean max_slots? remove it"),
    ("initial_peer: [/x]", "did you mean initial_peers? remove it"),
    ("round: {total: 3}", "did you mean run.round? remove it"),
    ("train:\n  lr: 1e-3", "did you mean run.train? remove it"),
    ("run: {rond: {total: 3}}", "did you mean run.round? remove it"),
    ("run: {round: {totl: 3}}", "did you mean run.round.total? remove it"),
    ("run: {model: {num_expert: 8}}", "did you mean run.model.num_experts? remove it"),
    ("run: {model: {experts: 8}}", "run.model.experts", "remove it"),
    ("run: {round: {total: -1}}", "run.round.total=-1", "greater than or equal to 1"),
    ("run: {model: {top_k: 9, num_experts: 8}}", "model.top_k=9", "8 or less"),
    ("run: {model: {num_heads: 3}}", "model.num_heads=3", "divisor"),
    ("run: {model: {num_kv_heads: 3}}", "model.num_kv_heads=3", "divisor"),
    ("run: {round: {min_seconds: 9, max_seconds: 8}}", "round.min_seconds=9", "swap"),
    ("run: {round: {lease_seconds: 3, heartbeat_seconds: 2}}", "heartbeat_seconds=2", "1.5 or less"),
    ("run: {data: {source: hub}}", "data.source=hub", "data.name"),
    ("- a\n- b", "list", "settings"),
    ("run_id: [", "run.yaml", "YAML"),
    ("run: 5", "run=5", "settings, each with its value"),
    ("7: 5", "7=", "strings"),
]


def said(words: str) -> str:
    """Return the line with which a command refuses its words."""
    name, *argv = shlex.split(words)
    with pytest.raises(ConfigError) as refused:
        config = load_settings(getattr(commands, COMMANDS[name][0]), argv)
        refuse(config)
        assert isinstance(config, MachineConfig)
        check_machine(getattr(config, "run", None) or RunConfig(), config, getattr(config, "ranks", 1))
    message = str(refused.value)
    assert message and "\n" not in message
    return message


@pytest.mark.parametrize("case", FLAGS, ids=lambda case: case[0])
def test_a_bad_flag_is_one_line_with_value_and_remedy(case):
    message = said(case[0])
    assert all(fragment in message for fragment in case[1:]), message


@pytest.mark.parametrize("case", FILES, ids=lambda case: case[0])
def test_a_bad_file_is_one_line_with_value_and_remedy(case, tmp_path):
    (file := tmp_path / "run.yaml").write_text(case[0])
    message = said(f"peer --run-id r --config {file}")
    assert all(fragment in message for fragment in case[1:]), message
    assert message == said(f"peer --run-id r --config {file} --port=0")


def test_a_flag_like_no_other_gets_no_suggestion():
    assert "did you mean" not in said("peer --run-id r --qqqq 3")


def test_a_config_that_is_no_text_is_one_line(tmp_path):
    (file := tmp_path / "picture.yaml").write_bytes(b"\x89PNG\xff\x00")
    assert "picture.yaml" in said(f"peer --config {file}")
