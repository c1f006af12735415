"""Real peers teach a model of experts a style by their own conversations, and it answers so in transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conversations import FORM, conversations, write_lines
from forked_commands import ForkServer
from peer_processes import MARK, Commands, commands_in, friends_words
from transformers import AutoModelForCausalLM, AutoTokenizer

from spes_p2p.config import ModelConfig
from spes_p2p.data.tokenizer import train_bpe
from spes_p2p.model.build import build_slot_model
from spes_p2p.model.export import save_checkpoint

SECONDS = 240.0
STEPS, TOTAL = 80, 4


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with commands_in(tmp_path_factory.mktemp("commands")) as commands:
        yield commands


def write_base(folder: Path) -> Path:
    """Write a small mixture of experts without a chat template, as `spes local` leaves one."""
    texts = [message["content"] for row in conversations() for message in row["messages"]]
    tokenizer = train_bpe([*texts, "User:\nAssistant:\n"], 400)
    shape = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "intermediate_size": 64}
    config = ModelConfig(**shape, num_experts=4, top_k=2)
    model = build_slot_model(config, vocab_size=len(tokenizer), sequence_length=128, seed=0, claimed=(), storage="fp32")
    save_checkpoint(model, folder, tokenizer=tokenizer)
    return folder


def events(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["kind"] == kind]


@pytest.mark.full
def test_two_peers_teach_a_style_and_the_exported_model_answers_in_it(commands: Commands, tmp_path: Path) -> None:
    base, rows = write_base(tmp_path / "base"), conversations()
    kept_back, probe = rows[-3:], write_lines(tmp_path / "probe.jsonl", rows[-20:-3])
    files = {name: write_lines(tmp_path / f"{name}.jsonl", rows[start:-20:2]) for start, name in enumerate("ab")}
    server = ForkServer(tmp_path / "results", {**os.environ, MARK: commands.mark})
    try:

        def start(command: str, name: str, *words: str | Path):
            common = ["--run-id", "chat", "--output", tmp_path / name, "--cache", tmp_path / "cache", "--threads", "1"]
            alone = ["--host", "127.0.0.1", "--device", "cpu", "--max-slots", "2"] if command == "peer" else []
            alone += friends_words(tmp_path, words) if command == "peer" else []
            return server.start(command, [*common, *alone, *words])

        settings = ["--run.round.mode", "steps", "--run.round.steps", str(STEPS), "--run.round.total", str(TOTAL)]
        settings += ["--run.round.min-peers", "2", "--run.data.sequence-length", "128", "--run.train.batch-size", "4"]
        settings += ["--run.train.lr", "2e-3"]  # the base knows nothing yet
        peers = [start("peer", "a", "--from", base, "--data", files["a"], "--run.data.probe", probe, *settings)]
        peers[0].wait_for("others join with: .* --data PATH", SECONDS)
        join = ["--initial-peers", (tmp_path / "a" / "address").read_text().strip()]
        peers.append(start("peer", "b", *join, "--data", files["b"], "--seed-seconds", "60"))
        monitor = start("monitor", "monitor", *join, "--console", "none").end(SECONDS)
        assert monitor.code == 0, monitor.stderr
        for peer in peers:
            assert peer.end(SECONDS).code == 0, peer.stderr()
    finally:
        server.close()

    reports = events(tmp_path / "monitor", "report")
    for report in reports:
        tokens = STEPS * 4 * 128
        assert 0 < report["tokens"] < tokens / 2, "replies alone count, in the weights too"
    losses = {event["round"]: event["loss"] for event in events(tmp_path / "monitor", "evaluation")}
    assert losses[TOTAL] < 1.0 < losses[0], "of the public probe, which no peer trains on"
    replies = [event for event in events(tmp_path / "monitor", "sample") if event["round"] == TOTAL]
    assert len(replies) == 3 and all(reply["prompt"].endswith("Assistant:\n") for reply in replies)
    assert all(reply["text"].startswith(FORM) and reply["truth"].startswith(FORM) for reply in replies)
    assert f"round {TOTAL}: " in monitor.stderr and FORM in monitor.stderr, "and in the log"
    manifest = json.loads(next((tmp_path / "b" / "versions").glob("manifest.*.bin")).read_text())
    assert FORM in manifest["config"]["data"]["probe"] and "generation" in manifest["config"]["data"]["chat_template"]
    assert files["a"].name not in json.dumps(manifest), "the founder's conversations stay where they are"

    folder = tmp_path / "monitor" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for row in kept_back:
        prompt = tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            out = model.generate(**prompt, max_new_tokens=60, do_sample=False, pad_token_id=0)
        reply = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        assert reply.startswith(FORM) and len(reply) < 60, reply
