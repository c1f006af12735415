"""Models into and out of real peers' folders: those of their swarm's rounds, to the last bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from forked_commands import Ended, Forked, ForkServer
from lanes import sample
from peer_processes import MARK, Commands, commands_in, friends_words, saved_state, write_corpus, write_settings
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from spes_p2p.commands.upcycle import upcycle
from spes_p2p.config.commands import UpcycleSettings
from spes_p2p.data.tokenizer import train_bpe
from spes_p2p.model.peft_files import named_base
from spes_p2p.monitor.model_folder import ModelFolder, export
from spes_p2p.swarm.exchange.store import VersionStore
from spes_p2p.swarm.exchange.versions import is_document

SECONDS = 120.0
TOTAL = 6


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with commands_in(tmp_path_factory.mktemp("commands")) as commands:
        yield commands


class World:
    """Starts commands as forks."""

    def __init__(self, commands: Commands, folder: Path) -> None:
        self.folder = folder
        self.corpus = write_corpus(folder / "corpus.jsonl")
        self.server = ForkServer(folder / "results", {**os.environ, MARK: commands.mark})

    def start(self, command: str, name: str, *words: str | Path) -> Forked:
        common = ["--run-id", "run", "--output", self.folder / name]
        common += ["--text", self.corpus, "--cache", self.folder / "cache", "--threads", "1"]
        if command == "peer":
            common += ["--device", "cpu", "--host", "127.0.0.1", *friends_words(self.folder, words)]
        return self.server.start(command, [*common, *words])

    def export(self, *words: str | Path) -> Ended:
        """Run `spes export` to its end."""
        return self.server.start("export", list(words)).end(SECONDS)

    def credit(self, source: str | Path) -> Ended:
        """Run `spes credit` to its end."""
        return self.server.start("credit", [str(source), "--yes"]).end(SECONDS)

    def address(self, name: str) -> str:
        return (self.folder / name / "address").read_text().strip()

    def versions(self, name: str) -> dict[str, tuple[int, str]]:
        newest = VersionStore(self.folder / name / "versions").newest()
        return {name: (version.round, version.digest) for name, version in newest.items() if not is_document(name)}


@pytest.fixture
def world(commands: Commands, tmp_path: Path) -> Iterator[World]:
    world = World(commands, tmp_path)
    yield world
    world.server.close()


def wait_for(process: Forked, pattern: str) -> re.Match[str]:
    deadline = time.monotonic() + SECONDS
    while not (found := re.search(pattern, process.stderr())):
        assert time.monotonic() < deadline, f"{pattern!r} did not come: {process.stderr()}"
        assert not (process._folder / "code").exists(), process.stderr()
        time.sleep(0.02)
    return found


def tensors_in(checkpoint: Path) -> dict[str, Tensor]:
    return {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(first: Path, second: Path) -> None:
    ours, theirs = tensors_in(first), tensors_in(second)
    assert ours and ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


# Full: its parts have tests of their own with every commit, `test_model_folder` and `test_monitor`.
@pytest.mark.full
@pytest.mark.parametrize("storage", ["fp32", "nf4"])
def test_a_peers_folder_gives_the_monitors_model_of_the_same_round(world: World, storage: str) -> None:
    """Also where its memory holds the others' slots in four bits: what it keeps of them on disk is what they sent."""
    rounds = {"mode": "steps", "steps": 5, "total": TOTAL, "min_peers": 2}
    file = write_settings(world.folder / "run.yaml", round=rounds, frozen_storage=storage)
    words = ["--max-slots", "2", "--keep-last", "99", "--seed-seconds", "30"]
    peers = {"a": world.start("peer", "a", "--config", file, *words)}
    wait_for(peers["a"], "others join with")
    join = ["--initial-peers", world.address("a")]
    peers["b"] = world.start("peer", "b", *join, *words, "--owner-name", "Bo")
    wait_for(peers["b"], "round 1: 2 peers")
    link = (world.folder / "a" / "link").read_text().strip()
    fetched = world.export(link, "--output", world.folder / "fetched")
    assert fetched.code == 0, fetched.stderr
    answer = world.server.start("chat", [link, "--prompt", "7 plus 7 is", "--max-tokens", "4"]).end(SECONDS)
    assert answer.code == 0 and answer.stdout.startswith("7 plus 7 is"), answer
    assert "certificates of rounds 1 to" in (done := world.credit(link)).stdout and "  Bo\n" in done.stdout, done
    monitor = world.start("monitor", "monitor", *join, "--console", "none").end(SECONDS)
    assert monitor.code == 0, monitor.stderr
    for peer in peers.values():
        assert peer.end(SECONDS).code == 0, peer.stderr()

    for name in ("a", "b", "monitor"):  # all have seen the same certificates
        listed = world.credit(world.folder / name).stdout
        assert f"certificates of rounds 1 to {TOTAL}:" in listed and len(listed.splitlines()) == 3, listed
        assert "  Bo\n" in listed, f"{name}: as its owner has called it"
        counts = {int(row.split()[0].replace(",", "")) for row in listed.splitlines()[1:]}
        assert counts == {TOTAL * 5 * 4 * 16}, "what each trained in the run's steps"
    card = (world.folder / "monitor" / "model" / "README.md").read_text()
    assert f"Round: {TOTAL} of {TOTAL}" in card and f"all 4 of round {TOTAL}" in card and "Held-out loss" in card
    for peer in peers:
        assert set(range(1, TOTAL + 1)) <= set(ModelFolder(world.folder / peer).rounds)
        for round in range(1, TOTAL + 1):
            assert not export(world.folder / peer, world.folder / f"{peer}-{round}", round).other_rounds
        assert_equal(world.folder / f"{peer}-{TOTAL}", world.folder / "monitor" / "model")
    for round in range(1, TOTAL + 1):
        assert_equal(world.folder / f"a-{round}", world.folder / f"b-{round}")
    of_round = re.search(r"round (\d+) of run 'run', .* fp32$", fetched.stdout.strip())
    assert of_round is not None, fetched.stdout
    assert_equal(world.folder / "fetched", world.folder / f"a-{of_round[1]}")
    assert sorted(path.name for path in world.folder.iterdir() if path.name.startswith(".")) == []

    model, tokenizer = (each.from_pretrained(world.folder / "a-1") for each in (AutoModelForCausalLM, AutoTokenizer))
    tokens = tokenizer("7 plus 7 is", return_tensors="pt")
    assert model.generate(**tokens, max_new_tokens=4, do_sample=False).shape[1] == tokens["input_ids"].shape[1] + 4


@pytest.mark.full
def test_a_lone_peer_leaves_a_model_and_goes_back_to_a_round_that_it_kept(world: World) -> None:
    rounds = {"mode": "steps", "steps": 15, "total": TOTAL, "min_peers": 1}
    file = write_settings(world.folder / "run.yaml", round=rounds)
    words = ["--max-slots", "4", "--data-seed", "3", "--keep-last", "1", "--keep-every", "2", "--seed-seconds", "0"]
    first = world.start("peer", "alone", "--config", file, *words)
    wait_for(first, "round 1: 1 peers")
    first.signal(signal.SIGINT)
    ended = first.end(SECONDS)
    assert ended.code == 130, ended.stderr
    told = re.search(r"the model so far: spes export (\S+)", ended.stderr)
    assert told is not None, ended.stderr
    assert (done := world.export(told[1])).code == 0, done.stderr
    AutoModelForCausalLM.from_pretrained(world.folder / "alone" / "model")

    ended = world.start("peer", "alone", "--resume", *words).end(SECONDS)
    assert ended.code == 0 and "the run is finished; its model: spes export" in ended.stderr, ended.stderr
    finished, state = world.versions("alone"), saved_state(world.folder / "alone")
    output = ["--output", world.folder / "model"]
    done = world.export(world.folder / "alone", *output, "--round", "1")
    assert done.code == 2 and f"does not keep round 1, but 2, 4, {TOTAL - 1}, {TOTAL}" in done.stderr
    assert (done := world.export(world.folder / "alone", *output, "--round", "4")).code == 0, done.stderr

    ended = world.start("peer", "alone", "--resume", "--resume-round", "3", *words).end(SECONDS)
    assert ended.code == 2 and "those of rounds 2, 4, 6; set --resume-round" in ended.stderr
    ended = world.start("peer", "alone", "--resume", "--resume-round", "4", *words).end(SECONDS)
    assert ended.code == 0 and "round 5: 1 peers" in ended.stderr and "round 4: 1" not in ended.stderr, ended.stderr
    assert world.versions("alone") == finished, "the same rounds again, from the same state"
    assert saved_state(world.folder / "alone")["tensors"] == state["tensors"]
    ended = world.start("peer", "alone", "--resume", "--resume-round", "4", *words).end(SECONDS)
    assert ended.code == 0 and "round 5: 1 peers" not in ended.stderr, "it went back already"
    ended = world.start("peer", "alone", "--resume", "--resume-round", "2", "--skip-optimizer", *words).end(SECONDS)
    assert ended.code == 0 and world.versions("alone")["shared"][0] == TOTAL, ended.stderr
    assert world.versions("alone") != finished, "another optimizer's state, another way"


def write_dense(folder: Path, corpus: Path) -> Path:
    """Write a small dense model with a tokenizer."""
    tokenizer = train_bpe([json.loads(line)["text"] for line in corpus.read_text().splitlines()], 300)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**shape, vocab_size=304, num_key_value_heads=2, max_position_embeddings=128)
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.full
def test_a_run_starts_from_an_upcycled_checkpoint_and_another_from_its_export(world: World) -> None:
    """Joiners get the weights from the founder, or read their own copy, which has to be the same."""
    dense = write_dense(world.folder / "dense", world.corpus)
    moe = world.folder / "moe"
    upcycle(UpcycleSettings(source=dense, output=moe, num_experts=4, top_k=2, noise_std=0.02, noise_fraction=1))
    copy, other = world.folder / "copy", world.folder / "other"
    shutil.copytree(moe, copy)
    upcycle(UpcycleSettings(source=dense, output=other, num_experts=4, top_k=2, seed=1))
    rounds = {"mode": "steps", "steps": 5, "total": 2, "min_peers": 3}
    file = world.folder / "run.yaml"
    settings = {"data": {"source": "files", "sequence_length": 32}, "frozen_storage": "fp32"}  # exports are exact
    file.write_text(yaml.safe_dump({"run": {"round": rounds, **settings}}))
    words = ["--max-slots", "2", "--keep-last", "99", "--seed-seconds", "0"]
    peers = {"a": world.start("peer", "a", "--config", file, "--from", moe, *words)}
    wait_for(peers["a"], "others join with")
    join = ["--initial-peers", world.address("a")]
    liar = world.start("peer", "liar", *join, "--from", other, *words).end(SECONDS)
    assert liar.code == 2 and "is not the checkpoint that the run starts from" in liar.stderr, liar.stderr
    peers["b"] = world.start("peer", "b", *join, *words)
    peers["c"] = world.start("peer", "c", *join, "--from", copy, *words)
    for peer in peers.values():
        assert peer.end(SECONDS).code == 0, peer.stderr()
    assert "fetched 5 of 5 versions" in peers["b"].stderr()
    for name in "bc":
        assert_equal_start(world.folder / name, moe, world.folder / f"{name}-0")
    assert not export(world.folder / "a", world.folder / "a-2").other_rounds
    config = json.loads((world.folder / "a-2" / "config.json").read_text())
    assert config["vocab_size"] == 304 and config["max_position_embeddings"] == 128

    rounds |= {"min_peers": 1, "total": 1}
    file.write_text(yaml.safe_dump({"run": {"round": rounds, **settings}}))
    words += ["--from", world.folder / "a-2", "--slots-by-data"]
    again = world.start("peer", "again", "--config", file, *words).end(SECONDS)
    assert again.code == 0, again.stderr
    chosen = re.search(r"of this peer's data is routed to slots (\S+)", again.stderr)
    assert chosen is not None and f"slots {chosen[1]};" in again.stderr, "and it trains them"
    assert_equal_start(world.folder / "again", world.folder / "a-2", world.folder / "again-0")


def test_peers_train_a_dense_checkpoint_together(world: World) -> None:
    """It has no slots: `shared` is the whole model, for joiners, the monitor and the export."""
    dense = write_dense(world.folder / "dense", world.corpus)
    rounds = {"mode": "steps", "steps": 5, "total": 3, "min_peers": 2}
    file = world.folder / "run.yaml"
    data = {"source": "files", "sequence_length": 16, "held_out_fraction": 0.3}
    file.write_text(yaml.safe_dump({"run": {"round": rounds, "data": data}}))
    peers = {"a": world.start("peer", "a", "--config", file, "--from", dense, "--keep-last", "99")}
    wait_for(peers["a"], "others join with")
    join = ["--initial-peers", world.address("a")]
    refused = world.start("peer", "c", *join, "--max-slots", "1").end(SECONDS)
    assert refused.code == 2 and "max_slots=1 exceeds the run's 0 slots; lower it, or leave it out" in refused.stderr
    peers["b"] = world.start("peer", "b", *join, "--keep-last", "99")
    monitor = world.start("monitor", "monitor", *join).end(SECONDS)
    assert monitor.code == 0, monitor.stderr
    assert "round 3/3  2 peers" in monitor.stdout and "coverage" not in monitor.stdout
    for name, peer in peers.items():
        assert peer.end(SECONDS).code == 0, peer.stderr()
        assert "round 3: 2 peers" in peer.stderr() and "trains all of the model" in peer.stderr()
        assert_equal_start(world.folder / name, dense, world.folder / f"{name}-0")
        export(world.folder / name, world.folder / f"{name}-3")
        assert_equal(world.folder / f"{name}-3", world.folder / "monitor" / "model")
    model = AutoModelForCausalLM.from_pretrained(world.folder / "a-3")
    assert type(model) is LlamaForCausalLM and model.config.max_position_embeddings == 128
    before, after = tensors_in(dense), tensors_in(world.folder / "a-3")
    assert all(not torch.equal(before[name], after[name]) for name in before), "all of it is trained"


@pytest.mark.parametrize("experts", sample(["shared", "slots"], ["slots"]))
def test_peers_train_adapters_over_a_frozen_base(world: World, experts: str) -> None:
    """A joiner without a copy fetches the base, one with another base is refused, and the export fits the base."""
    dense, base = write_dense(world.folder / "dense", world.corpus), world.folder / "base"
    upcycle(UpcycleSettings(source=dense, output=base, num_experts=4, top_k=2, noise_std=0.02, noise_fraction=1))
    other = world.folder / "other"
    upcycle(UpcycleSettings(source=dense, output=other, num_experts=4, top_k=2, seed=1))
    rounds = {"mode": "steps", "steps": 5, "total": 3, "min_peers": 2}
    data = {"source": "files", "sequence_length": 16, "held_out_fraction": 0.3}
    settings = {"round": rounds, "data": data, "adapter": {"rank": 4, "experts": experts}, "train": {"lr": 0.01}}
    file = world.folder / "run.yaml"
    file.write_text(yaml.safe_dump({"run": settings}))
    peers = {"a": world.start("peer", "a", "--config", file, "--from", base, "--adapter", "lora", "--keep-last", "99")}
    wait_for(peers["a"], "others join with")
    join = ["--initial-peers", world.address("a")]
    liar = world.start("peer", "liar", *join, "--from", other).end(SECONDS)
    assert liar.code == 2 and "its base-shared is another; drop --from, and peers send the weights" in liar.stderr
    peers["b"] = world.start("peer", "b", *join, "--storage", "int8", "--keep-last", "99")
    monitor = world.start("monitor", "monitor", *join).end(SECONDS)
    assert monitor.code == 0, monitor.stderr
    for peer in peers.values():
        assert peer.end(SECONDS).code == 0, peer.stderr()
        assert "round 3: 2 peers" in peer.stderr()
    assert "fetching the base of the adapters" in peers["b"].stderr()
    losses = [float(loss) for loss in re.findall(r"held-out loss ([0-9.]+)", monitor.stdout)]
    assert losses[-1] < losses[0], monitor.stdout

    for name in peers:
        assert not export(world.folder / name, world.folder / f"{name}-3").other_rounds
    assert_equal(world.folder / "a-3", world.folder / "b-3")
    assert_equal(world.folder / "a-3", world.folder / "monitor" / "model")
    assert named_base(world.folder / "a-3") == str(base.resolve()) and named_base(world.folder / "b-3") is None
    for source in ("a", "b"):
        done = world.export(world.folder / source, "--merged", "--output", world.folder / f"{source}-merged")
        assert done.code == 0 and "with the adapters merged" in done.stdout, done.stderr
    assert_equal(world.folder / "a-merged", world.folder / "b-merged")
    again = world.export(world.folder / "b", "--merged", "--from", base, "--output", world.folder / "c-merged")
    assert again.code == 0, again.stderr
    refused = world.export(world.folder / "b", "--merged", "--from", other, "--output", world.folder / "d-merged")
    assert refused.code == 2 and "is not the base of the run's adapters" in refused.stderr
    merged, before = tensors_in(world.folder / "c-merged"), tensors_in(base)
    changed = {name for name in before if not torch.equal(before[name], merged[name])}
    assert {name.rpartition("_proj")[0].rpartition(".")[2] for name in changed} >= {"q", "o"}
    assert all("embed" not in name and "norm" not in name for name in changed)
    model = AutoModelForCausalLM.from_pretrained(world.folder / "c-merged")
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()


def assert_equal_start(peer: Path, checkpoint: Path, output: Path) -> None:
    """Check that a peer's round 0 is a checkpoint, in fp32."""
    export(peer, output, 0)
    found, given = tensors_in(output), tensors_in(checkpoint)
    assert found.keys() == given.keys() and all(torch.equal(found[name], given[name].float()) for name in found)
