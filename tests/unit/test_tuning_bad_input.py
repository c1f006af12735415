"""What users get wrong where a run starts from a checkpoint: one line with value and remedy, exit code 2, nothing left.

Each case is the real command in this process; it ends before a node starts. Conversations have more cases in
`data/test_chat_bad_input.py`, settings of a config.json in `model/test_start.py`.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SEQUENCE, saved
from conversations import conversations, write_lines
from lanes import sample
from model_folders import PeerFolder
from safetensors.torch import load_file, save_file

from spes_p2p.cli import entry_point
from spes_p2p.codecs.vectors import Layout, to_bytes
from spes_p2p.commands import export
from spes_p2p.config import AdapterConfig, DataConfig, PeerConfig, RunConfig
from spes_p2p.config.commands import ExportConfig
from spes_p2p.data.tokenizer import train_bpe
from spes_p2p.model.adapted import InitialFactors, outline_adapted
from spes_p2p.model.export import INDEX
from spes_p2p.model.peft_files import CONFIG, WEIGHTS, Factors, save_adapter
from spes_p2p.model.start import model_of
from spes_p2p.peer import life
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.training.build import with_digests


class World:
    """Good files, of which each case spoils a copy."""

    def __init__(self, folder: Path) -> None:
        self.good, self.here = folder, Path()
        self.tokenizer = train_bpe([part["content"] for row in conversations() for part in row["messages"]], 300)
        for family in ("olmoe", "llama"):
            self.tokenizer.save_pretrained(saved(folder / family, family))
        self.tokenizer.save_pretrained(saved(folder / "sharded", "olmoe", max_shard_size="60KB"))
        write_lines(folder / "chats.jsonl", conversations(30))
        for family, targets in (("olmoe", ["attention", "experts"]), ("llama", ["attention", "mlp"])):
            run = self.adapted(family, targets=targets)
            model = outline_adapted(run, len(self.tokenizer))
            save_adapter(Factors(model, run, InitialFactors(model, 0).read), folder / f"{family}-adapter")

    def adapted(self, family: str, **adapter: Any) -> RunConfig:
        data = DataConfig(source="files", sequence_length=SEQUENCE)
        return RunConfig(model=model_of(self.good / family), data=data, adapter=AdapterConfig(**adapter))

    def copy(self, name: str) -> Path:
        return Path(shutil.copytree(self.good / name, self.here / name))

    def config(self, **fields: Any) -> Path:
        """Return a checkpoint whose config.json has other fields; None leaves one out."""
        return edited(self.copy("olmoe"), "config.json", **fields)

    def weights(self, change: Callable[[dict[str, torch.Tensor]], Any], name: str = "olmoe") -> Path:
        """Return a checkpoint of other tensors."""
        folder = self.copy(name)
        file = folder / (WEIGHTS if name.endswith("adapter") else "model.safetensors")
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        return folder

    def written(self, name: str, file: str, content: bytes | None) -> Path:
        """Return a copy with another content of a file; None deletes it."""
        folder = self.copy(name)
        (folder / file).unlink(missing_ok=True)
        if content is not None:
            (folder / file).write_bytes(content)
        return folder

    def rows(self, *rows: Any) -> list[str | Path]:
        return ["--from", self.good / "olmoe", "--data", write_lines(self.here / "rows.jsonl", rows)]


def edited(folder: Path, file: str, **fields: Any) -> Path:
    found = json.loads((folder / file).read_text()) | fields
    (folder / file).write_text(json.dumps({name: value for name, value in found.items() if value is not None}))
    return folder


def cut(folder: Path, file: str, num_bytes: int) -> Path:
    (folder / file).write_bytes((folder / file).read_bytes()[:num_bytes])
    return folder


def linked(folder: Path, name: str) -> Path:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/nowhere/at/all")
    return folder / name


def without_tokenizer(world: World) -> Path:
    folder = world.copy("olmoe")
    for file in folder.glob("*token*"):
        file.unlink()
    return folder


def pickles_alone(world: World) -> Path:
    folder = world.written("olmoe", "pytorch_model.bin", b"a pickle")
    (folder / "model.safetensors").unlink()
    return folder


def second_shard(world: World, link: bool = False) -> Path:
    folder = world.copy("sharded")
    if link:
        return linked(folder, "model-00002-of-00006.safetensors").parent
    (folder / "model-00002-of-00006.safetensors").unlink()
    return folder


NORM = "model.norm.weight"
QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
# What --from names, and what the error says.
SOURCES: dict[str, tuple[Callable[[World], Path], str]] = {
    "a folder that is not there": (lambda w: w.here / "nothing", r"nothing is no checkpoint.*give --from a folder"),
    "a link to nowhere": (lambda w: linked(w.here, "link"), r"link is no checkpoint \(no config.json\); give --from"),
    "a file": (lambda w: w.good / "chats.jsonl", r"chats.jsonl is no checkpoint"),
    "an adapter": (lambda w: w.good / "olmoe-adapter", r"is an adapter; name it with --adapter, and give --from the"),
    "a branch of the hub": (lambda w: Path("owner/name@main"), r"name@main names no commit; give --from .*40 digits"),
    "the hub, offline": (lambda w: Path("owner/name"), r"cannot download owner/name .*or give --from a folder"),
    "no model_type": (lambda w: w.config(model_type=None), r"config.json names no model_type; give --from"),
    "a broken config": (lambda w: cut(w.copy("olmoe"), "config.json", 40), r"cannot read .*config.json.*again"),
    "a config of a list": (lambda w: w.written("olmoe", "config.json", b"[1]"), r"names no model_type"),
    "an unknown architecture": (
        lambda w: w.config(model_type="gpt2", architectures=["GPT2LMHeadModel"]),
        r"holds GPT2LMHeadModel; give --from one of OlmoeForCausalLM",
    ),
    "code that comes with it": (
        lambda w: w.config(model_type="mine", auto_map={"AutoConfig": "evil.Config"}),
        r"type 'mine', .* code that comes with a checkpoint is never run; give --from another",
    ),
    "code for a known type": (
        lambda w: w.config(auto_map={"AutoModelForCausalLM": "evil.Model"}),
        r"sets auto_map=.* give --from a checkpoint that agrees",
    ),
    "256 experts": (lambda w: w.config(num_experts=256), r"256 experts per layer, .*128 slots at most; give --from"),
    "an unknown dtype": (lambda w: w.config(dtype="float7"), r"cannot read .*float7'; give --from another"),
    "quantised weights": (lambda w: w.config(quantization_config={"quant_method": "fp8"}), r"quantised weights; give"),
    "other widths": (lambda w: w.config(intermediate_size=96), r"has shape \[32, 48\], not \[32, 96\].*give --from"),
    "a small embedding": (lambda w: w.config(vocab_size=200), r"has 300 entries, .* 200 rows; set data.tokenizer"),
    "no weights": (lambda w: w.written("olmoe", "model.safetensors", None), r"lacks model.safetensors; give --from"),
    "pickles alone": (
        pickles_alone,
        r"lacks model.safetensors \(it has pickles, which are never read\); give --from .* as safetensors",
    ),
    "a missing shard": (second_shard, r"lacks model-00002-of-00006.safetensors; give --from a whole checkpoint"),
    "a shard that is a link to nowhere": (lambda w: second_shard(w, link=True), r"lacks model-00002-of-00006"),
    "an index of a number": (
        lambda w: w.written("sharded", INDEX, b'{"weight_map": 5}'),
        r"cannot read .*index.json.*download the checkpoint again",
    ),
    "an index of numbers": (
        lambda w: w.written("sharded", INDEX, b'{"weight_map": {"a": 5}}'),
        r"lacks 5; give --from a whole checkpoint",
    ),
    "an index that leads away": (
        lambda w: w.written("sharded", INDEX, b'{"weight_map": {"a": "../x.safetensors"}}'),
        r"lacks ../x.safetensors",
    ),
    "truncated weights": (
        lambda w: cut(w.copy("olmoe"), "model.safetensors", -1000),
        r"cannot read .*model.safetensors: .*download the checkpoint again",
    ),
    "a pointer of git-lfs": (
        lambda w: w.written("olmoe", "model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
        r"cannot read .*model.safetensors: .*download the checkpoint again",
    ),
    "a missing tensor": (lambda w: w.weights(lambda t: t.pop(NORM)), r"model.norm.weight is missing; give --from"),
    "integers": (
        lambda w: w.weights(lambda t: t.update({NORM: t[NORM].int()})),
        r"model.norm.weight is not of finite floating-point numbers; give --from another",
    ),
    "NaN": (lambda w: w.weights(lambda t: t[NORM].fill_(torch.nan)), r"model.norm.weight is not of finite"),
    "no tokenizer": (
        without_tokenizer,
        r"olmoe has no tokenizer; set --run.data.tokenizer to a folder with a tokenizer.json",
    ),
    "a broken tokenizer": (
        lambda w: w.written("olmoe", "tokenizer.json", b"{"),
        r"cannot load tokenizer .*olmoe.*name a folder .*data.tokenizer",
    ),
    "too large a template": (
        lambda w: w.written("olmoe", "chat_template.jinja", b"{# " + 2**15 * b"x" + b" #}"),
        r"chat template has 32774 characters, at most 32768; set data.chat_template to a shorter one",
    ),
}
# What --adapter names, or other flags with it, over a good checkpoint.
ADAPTERS: dict[str, tuple[Callable[[World], list[Any]], str]] = {
    "no folder": (lambda w: [w.here / "nothing"], r"nothing is no adapter .*; give --adapter lora, or a folder"),
    "a checkpoint": (lambda w: [w.good / "llama"], r"llama is no adapter"),
    "a misspelt lora": (lambda w: ["Lora"], r"Lora is no adapter"),
    "an adapter of another base": (lambda w: [w.good / "llama-adapter"], r"which this run's base .* has not; give"),
    "another rank than its weights": (
        lambda w: [edited(w.copy("olmoe-adapter"), CONFIG, r=4)],
        r"is not of 4 experts with rank 4; give another|does not fit the run's base; give --adapter",
    ),
    "no weights": (lambda w: [w.written("olmoe-adapter", WEIGHTS, None)], r"lacks adapter_model.safetensors"),
    "truncated weights": (lambda w: [cut(w.copy("olmoe-adapter"), WEIGHTS, -9)], r"cannot read .*; copy the adapter"),
    "NaN": (
        lambda w: [w.weights(lambda t: t[QUERY].fill_(torch.nan), "olmoe-adapter")],
        r"q_proj.lora_B.weight is not of finite floating-point numbers; give another adapter",
    ),
    "DoRA": (
        lambda w: [edited(w.copy("olmoe-adapter"), CONFIG, use_dora=True)],
        r"has use_dora=True, .*give --adapter",
    ),
    "targets that fit nothing": (
        lambda w: ["lora", "--run.adapter.targets", "mlp"],
        r"adapter.targets=\['mlp'\] fits no matrix of this model; add attention",
    ),
    "rank 0": (lambda w: ["lora", "--run.adapter.rank", "0"], r"run.adapter.rank='0'.*greater than or equal to 1"),
    "slots of a run without": (lambda w: ["lora", "--max-slots", "2"], r"max_slots=2 exceeds the run's 0 slots; lower"),
    "an unknown storage": (lambda w: ["lora", "--storage", "int3"], r"storage='int3': .*'nf4'; see --help"),
    "shards of what is trained": (lambda w: ["lora", "--shard", "fsdp"], r"--shard fsdp .*; leave it out"),
    "long sequences": (
        lambda w: ["lora", "--run.data.sequence-length", "65"],
        r"data.sequence_length=65 exceeds the 64 positions of the checkpoint; set it to that or less",
    ),
    "a shape besides": (lambda w: ["lora", "--run.model.hidden-size", "32"], "drop run.model, or --from"),
}
# All flags of the founder.
DATA: dict[str, tuple[Callable[[World], list[Any]], str]] = {
    "adapters without a base": (lambda w: ["--adapter", "lora"], r"adapters need a base: name .* --from, or drop"),
    "no file": (
        lambda w: ["--data", w.here / "no.jsonl", "--from", w.good / "olmoe"],
        r"no.jsonl does not exist; give",
    ),
    "a link to nowhere": (
        lambda w: ["--data", linked(w.here, "chats.jsonl"), "--from", w.good / "olmoe"],
        r"chats.jsonl does not exist; give --data",
    ),
    "broken JSON": (
        lambda w: [*w.rows({"text": "a"})[:3], cut(w.here, "rows.jsonl", 5) / "rows.jsonl"],
        r"rows.jsonl line 1 is not JSON; write one object per line",
    ),
    "no messages": (lambda w: w.rows({"messages": []}), r"line 1: messages are an empty list; write"),
    "an unknown role": (
        lambda w: w.rows({"messages": [{"role": "bot", "content": "x"}]}),
        r"line 1: message 1 has the role 'bot'; write one of system",
    ),
    "an empty completion": (
        lambda w: w.rows({"prompt": "x", "completion": ""}),
        r"line 1: 'completion' is empty, .*; take the row out",
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return World(tmp_path_factory.mktemp("good"))


@pytest.fixture
def world(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files.here = tmp_path
    handlers = logging.root.handlers[:]
    yield files
    logging.root.handlers[:] = handlers  # the command's writes to a captured stream, which is closed


@pytest.fixture
def refusal(world, capsys):
    """What `spes peer` says before it founds a run, once it has ended."""

    def of(*words: Any) -> str:
        common = ["--run-id", "tune", "--output", world.here / "out", "--cache", world.good / "cache"]
        common += ["--device", "cpu", "--host", "127.0.0.1"]
        if "--run.data.sequence-length" not in words:
            common += ["--run.data.sequence-length", SEQUENCE]
        return ended(PeerConfig, life.main, [*common, *words], world.here / "out", capsys)

    return of


def ended(settings: Any, main: Any, words: list[Any], output: Path, capsys: pytest.CaptureFixture[str]) -> str:
    existed = output.exists()
    with pytest.raises(SystemExit) as end:
        entry_point(settings, main, list(map(str, words)))
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == "" and output.exists() == existed
    error = said.err.strip().splitlines()[-1]
    assert error.startswith("error: ") and len(error) < 700, error
    return error


# Full: the other mistakes of each kind.
@pytest.mark.parametrize(
    "case",
    sample(
        [*SOURCES],
        [
            *("a branch of the hub", "no model_type", "code that comes with it", "256 experts", "pickles alone"),
            *("a missing shard", "an index of numbers", "truncated weights", "no tokenizer"),
        ],
    ),
)
def test_a_bad_checkpoint_is_named_with_the_remedy(refusal, world, case):
    make, says = SOURCES[case]
    error = refusal("--from", make(world), "--data", world.good / "chats.jsonl")
    assert re.search(says, error), error


@pytest.mark.parametrize(
    "case", sample([*ADAPTERS], ["an adapter of another base", "another rank than its weights", "a misspelt lora"])
)
def test_a_bad_adapter_is_named_with_the_remedy(refusal, world, case):
    make, says = ADAPTERS[case]
    error = refusal("--from", world.good / "olmoe", "--data", world.good / "chats.jsonl", "--adapter", *make(world))
    assert re.search(says, error), error


@pytest.mark.parametrize("case", sample([*DATA], ["adapters without a base", "a link to nowhere"]))
def test_bad_data_are_named_with_the_remedy(refusal, world, case):
    make, says = DATA[case]
    error = refusal(*make(world))
    assert re.search(says, error), error


# Flags behind the folder of a peer of a run with adapters, and what the error says.
EXPORTS: dict[str, tuple[Callable[[World], list[Any]], str]] = {
    "a checkpoint": (lambda w: [w.good / "olmoe"], r"olmoe is no folder of a peer or a monitor; name what their"),
    "nothing": (lambda w: [w.here / "nothing"], r"nothing is no folder of a peer or a monitor; name what"),
    "a round that is not kept": (lambda w: [w.good / "bf16", "--round", "7"], r"does not keep round 7, but 1; set"),
    "a base without merging": (
        lambda w: [w.good / "bf16", "--from", w.good / "olmoe"],
        r"--from .*olmoe is the base to merge adapters into; add --merged, or drop --from",
    ),
    "another base": (
        lambda w: [w.good / "bf16", "--merged", "--from", w.weights(lambda t: t[NORM].add_(1))],
        r"olmoe is not the base of the run's adapters; name another with --from",
    ),
    "a base of another kind": (
        lambda w: [w.good / "bf16", "--merged", "--from", w.good / "llama"],
        r"llama: tensor .* is missing; give --from a whole checkpoint|not the base",
    ),
    "no base": (lambda w: [w.good / "bf16", "--merged", "--from", w.here / "no"], r"no lacks model.safetensors; give"),
    "a base that was not kept": (lambda w: [w.good / "bf16", "--merged"], r"cannot read .*base-shared.*--overwrite"),
    "a base in eight bits": (
        lambda w: [w.good / "int8", "--merged"],
        r"peers have sent the base in int8; name the unquantised checkpoint with --from",
    ),
    "an output that is something else": (
        lambda w: [w.good / "bf16", "--output", w.good / "llama"],
        r"--output .*llama exists; add --overwrite to replace the checkpoint there, or name another",
    ),
    "a store and a base": (
        lambda w: ["s3://bucket/place", "--merged", "--output", w.here / "x"],
        r"--merged needs the base that a peer's folder has; export a folder, or drop --merged",
    ),
}


@pytest.fixture(scope="module")
def tuned(files):
    """Folders `bf16` and `int8` of peers that have trained adapters over a base in that precision."""
    for base in ("bf16", "int8"):
        run = with_digests(files.adapted("olmoe", base=base), len(files.tokenizer), files.good / "olmoe")
        peer = PeerFolder(files.good / base, Identity(files.good / "key"), run=run)
        model = outline_adapted(run, len(files.tokenizer))
        factors = Layout(model.shared_shapes()).flatten(InitialFactors(model, 0).read(None))
        peer.add(1, {"shared": bytes(to_bytes(factors))})


@pytest.mark.parametrize("case", sample([*EXPORTS], ["a base without merging", "another base"]))
@pytest.mark.usefixtures("tuned")
def test_a_bad_export_is_named_with_the_remedy(world, capsys, case):
    make, says = EXPORTS[case]
    error = ended(ExportConfig, export.main, make(world), world.good / "bf16" / "model", capsys)
    assert re.search(says, error), error


@pytest.mark.usefixtures("tuned")
def test_the_same_commands_with_what_is_good_write_an_adapter_and_its_sum_with_the_base(world):
    source, base, merged = str(world.good / "int8"), world.good / "olmoe", world.here / "merged"
    assert export.main(ExportConfig(source=source, output=world.here / "adapter")) == 0
    assert export.main(ExportConfig(source=source, output=merged, merged=True, start_from=base)) == 0
    assert (world.here / "adapter" / WEIGHTS).is_file()
    before, after = load_file(base / "model.safetensors"), load_file(merged / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
