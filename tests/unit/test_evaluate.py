"""The evaluation command, on a tiny random stock OLMoE."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

from spes_p2p.commands import evaluate
from spes_p2p.data.tokenizer import train_bpe
from spes_p2p.errors import ConfigError, DataError

REPOSITORY = Path(__file__).resolve().parents[2]
needs_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed: extra `full`")

TASK = """
task: copy_word
dataset_path: json
dataset_kwargs:
  data_files: {rows}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    words = ["peer", "slot", "round", "swarm"]
    tokenizer = train_bpe([" ".join(random.Random(i).choices(words, k=40)) for i in range(20)], 280)
    torch.manual_seed(0)
    shape = OlmoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=0,
        bos_token_id=0,
    )
    OlmoeForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def task_path(tmp_path) -> Path:
    rows = tmp_path / "rows.jsonl"
    questions = [{"question": f"peer {i}:", "choices": [" slot", " round"], "answer": i % 2} for i in range(6)]
    rows.write_text("".join(json.dumps(question) + "\n" for question in questions))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "copy_word.yaml").write_text(TASK.format(rows=rows))
    return folder


def run(*arguments: object, home: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, str(REPOSITORY / "scripts" / "evaluate.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=REPOSITORY)


@needs_lm_eval
def test_command_reports_loss_and_tasks(checkpoint, task_path, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("peer slot round swarm " * 200)
    done = run(
        *(checkpoint, "--text", text, "--sequence-length", 16, "--batch-size", 4),
        *("--tasks", "copy_word", "--task-path", task_path, "--json", tmp_path / "out.json"),
        home=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["text"]["perplexity"] == pytest.approx(math.exp(report["text"]["loss"]))
    assert report["copy_word"]["acc"] * 6 == pytest.approx(round(report["copy_word"]["acc"] * 6))
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["text", "loss", f"{report['text']['loss']:.4f}"] in rows
    assert ["copy_word", "acc"] in [row[:2] for row in rows]


def test_loss_is_that_of_the_stock_model_with_labels(checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("peer slot round swarm " * 60)
    model, tokenizer = evaluate.load_checkpoint(checkpoint)
    batches = evaluate.text_batches(tokenizer, [text], 16, 3, limit=7)
    measured = evaluate.text_metrics(model, batches, "text")[0].value
    whole = torch.cat(batches)
    assert whole.shape == (7, 17)
    with torch.no_grad():
        expected = model(input_ids=whole, labels=whole).loss.item()
    assert measured == pytest.approx(expected, abs=1e-5)


def test_without_text_the_embedded_held_out_part_is_evaluated(checkpoint):
    config = evaluate.EvaluateConfig(checkpoint=checkpoint, sequence_length=32, limit=5)
    rows = evaluate.evaluate(config)
    assert [(row.subject, row.name) for row in rows] == [
        ("embedded held-out", name) for name in ("loss", "perplexity", "tokens")
    ]
    assert rows[2].value == 5 * 32
    assert "embedded held-out  loss" in evaluate.table(rows)


@needs_lm_eval
def test_the_limit_bounds_the_documents_of_a_task(checkpoint, task_path):
    model, tokenizer = evaluate.load_checkpoint(checkpoint)
    [accuracy] = [
        row.value
        for row in evaluate.task_metrics(model, tokenizer, ["copy_word"], task_path, batch_size=2, limit=1)
        if row.name == "acc"
    ]
    assert accuracy in (0, 1)


@needs_lm_eval
@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "absent is no checkpoint"),
        (["CHECKPOINT", "--text", "absent.txt"], "absent.txt does not exist"),
        (["CHECKPOINT", "--batch-size", "0"], "batch_size='0'"),
        (["CHECKPOINT", "--tasks", "no_such_task", "--task-path", "TASKS"], "unknown task 'no_such_task'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_mistake_is_one_line_and_exit_code_2(checkpoint, task_path, tmp_path, arguments, message):
    places = {"CHECKPOINT": checkpoint, "TASKS": task_path}
    done = run(*(places.get(word, word) for word in arguments), home=tmp_path)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last and ";" in last
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_unreadable_inputs_are_named(checkpoint, tmp_path):
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    _, tokenizer = evaluate.load_checkpoint(checkpoint)
    with pytest.raises(DataError, match="not UTF-8"):
        evaluate.text_batches(tokenizer, [binary], 16, 4, None)
    with pytest.raises(DataError, match="--sequence-length=16"):
        short = tmp_path / "short.txt"
        short.write_text("peer")
        evaluate.text_batches(tokenizer, [short], 16, 4, None)
    with pytest.raises(ConfigError, match="--json"):
        evaluate.write_json([evaluate.Metric("a", "b", 1.0)], tmp_path / "absent" / "x.json")


@needs_lm_eval
def test_unknown_tasks_are_named(task_path, tmp_path):
    with pytest.raises(ConfigError, match="unknown task 'no_such_task'"):
        evaluate._task_manager(["no_such_task"], task_path)
    with pytest.raises(ConfigError, match="--task-path"):
        evaluate._task_manager(["copy_word"], tmp_path / "absent")


def test_a_damaged_checkpoint_is_named(checkpoint, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    (damaged / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(DataError, match="cannot load checkpoint"):
        evaluate.load_checkpoint(damaged)
    shutil.copy(checkpoint / "model.safetensors", damaged)
    (damaged / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer"):
        evaluate.load_checkpoint(damaged)


def test_a_foreign_tokenizer_is_refused_before_the_device_fails(checkpoint, tmp_path):
    model, _ = evaluate.load_checkpoint(checkpoint)
    batch = torch.full((1, 17), 10_000)
    with pytest.raises(DataError, match="id 10000, the model embeds 276"):
        evaluate.text_metrics(model, [batch], "text")


@needs_lm_eval
def test_a_task_without_its_data_is_named(checkpoint, task_path, tmp_path):
    (tmp_path / "rows.jsonl").unlink()
    model, tokenizer = evaluate.load_checkpoint(checkpoint)
    with pytest.raises(DataError, match="cannot run copy_word"):
        evaluate.task_metrics(model, tokenizer, ["copy_word"], task_path, 2, None)


def test_an_infinite_perplexity_is_null_in_json(tmp_path):
    rows = [evaluate.Metric("text", "perplexity", math.inf)]
    evaluate.write_json(rows, tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == {"text": {"perplexity": None}}
    assert "inf" in evaluate.table(rows)
