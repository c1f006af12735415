"""Upcycled mixtures compute what the dense model computed, are the same bytes for the same seed, or are refused."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from spes_p2p.cli import load_settings
from spes_p2p.commands.upcycle import UpcycleConfig, main
from spes_p2p.config import ModelConfig
from spes_p2p.data.tokenizer import train_bpe
from spes_p2p.errors import ConfigError, DataError, SpesError
from spes_p2p.model.build import hf_config

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 300
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # so that logits are of the size of a trained model's
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    **{"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}


def dense_model(kind: str, **changes: Any) -> PreTrainedModel:
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "head_dim": 16, **changes})).eval()
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes})).eval()


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def upcycle(source: Path, output: Path, **changes: Any) -> Path:
    settings = {"num_experts": 4, "top_k": 2} | changes
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    assert main(load_settings(UpcycleConfig, ["--from", str(source), "--output", str(output), *flags])) == 0
    return output


def load(folder: Path) -> PreTrainedModel:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), info
    return model.eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    tokens = torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model(tokens).logits


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def expert_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The first layer's gate projections by name."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {n: t for n, t in tensors.items() if ".layers.0." in n and n.endswith(("gate_proj.weight", "w1.weight"))}


@pytest.fixture
def source(tmp_path, seed):
    """A dense Llama checkpoint."""
    return save(dense_model("llama"), tmp_path / "dense")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
        ("qwen3", {"rope_parameters": YARN_ROPE}),
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3, "hidden_act": "gelu"}),
        ("llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 16}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 9_000.0}}),
    ],
)
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 2), (3, 1)])
def test_logits_are_the_dense_models(tmp_path, seed, kind, changes, num_experts, top_k):
    dense = dense_model(kind, **changes)
    output = upcycle(save(dense, tmp_path / "dense"), tmp_path / "out", num_experts=num_experts, top_k=top_k)
    mixture = load(output)
    assert type(mixture).__name__ == {"qwen3": "Qwen3MoeForCausalLM", "llama": "MixtralForCausalLM"}[kind]
    expected = logits(dense)
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits(mixture), expected, atol=2e-5, rtol=1e-5)


def test_a_head_that_only_the_configuration_ties_is_refused(tmp_path, seed):
    """transformers keeps such a head: the mixture would be of another model."""
    source = save(dense_model("llama"), tmp_path / "dense")
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": True}))
    with pytest.raises(DataError, match=r"ties lm_head.weight to model.embed_tokens.weight, but they differ; set tie"):
        upcycle(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_in_bf16_and_in_pieces_stays_so(tmp_path, seed):
    dense = dense_model("qwen3").to(torch.bfloat16)
    source = save(dense, tmp_path / "dense", max_shard_size="20KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    output = upcycle(source, tmp_path / "out")
    tensors = [tensor for file in output.glob("*.safetensors") for tensor in load_file(file).values()]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"
    (tmp_path / "new").touch()
    assert {path.stat().st_mode for path in output.iterdir()} == {(tmp_path / "new").stat().st_mode}
    torch.testing.assert_close(logits(load(output)), logits(load(source)), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("noise", [{}, {"noise_std": 0.01, "noise_fraction": 0.5}])
def test_equal_seeds_give_equal_files_and_others_do_not(source, tmp_path, noise):
    first, again, other = (
        digests(upcycle(source, tmp_path / name, seed=number, **noise))
        for name, number in (("a", 7), ("b", 7), ("c", 8))
    )
    assert first == again
    differing = {name for name in first if first[name] != other[name]}
    assert differing == {name for name in first if name.startswith("model-") and "-00001-of" not in name}


def test_experts_are_equal_without_noise_and_differ_with_it(source, tmp_path):
    dense = load_file(source / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    plain = expert_weights(upcycle(source, tmp_path / "plain"))
    assert len(plain) == 4 and all(torch.equal(weight, dense) for weight in plain.values())
    noisy = list(expert_weights(upcycle(source, tmp_path / "noisy", noise_std=0.1, noise_fraction=0.25)).values())
    assert len({tuple(weight.flatten().tolist()) for weight in noisy}) == 4
    moved = torch.stack(noisy) - dense
    assert (moved != 0).float().mean() == pytest.approx(0.25, abs=0.05)
    assert moved[moved != 0].std() == pytest.approx(0.1, rel=0.1)


def test_routers_are_small_and_tie_nothing(source, tmp_path):
    mixture = load(upcycle(source, tmp_path / "out", num_experts=8, router_std=0.02))
    routers = [weight for name, weight in mixture.state_dict().items() if name.endswith("gate.weight")]
    assert len(routers) == mixture.config.num_hidden_layers
    for weight in routers:
        assert weight.std() == pytest.approx(0.02, rel=0.2) and len(set(weight[:, 0].tolist())) == 8


def test_tokenizer_and_generation_settings_come_along(source, tmp_path):
    tokenizer = train_bpe(["every expert is the dense model's"] * 3, VOCAB)
    tokenizer.save_pretrained(source)
    (source / "README.md").write_text("not this")
    templates = source / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("{{ tools }}")
    output = upcycle(source, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(output)("every expert") == tokenizer("every expert")
    assert (output / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert (output / "generation_config.json").is_file() and not (output / "README.md").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_runs_settings_can_describe_what_was_written(tmp_path, seed):
    output = upcycle(save(dense_model("qwen3", head_dim=8), tmp_path / "dense"), tmp_path / "out")
    model = ModelConfig(
        **{"family": "qwen3_moe", "hidden_size": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2},
        **{"intermediate_size": 48, "num_experts": 4, "tie_embeddings": False},
    )
    with torch.device("meta"):
        ours = AutoModelForCausalLM.from_config(hf_config(model, VOCAB, 128)).state_dict()
    theirs = load(output).state_dict()
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: t.shape for n, t in theirs.items()}


def refused(source: Path, output: Path, error: type[SpesError], said: str, **changes: Any) -> None:
    existed = output.exists()
    with pytest.raises(error, match=said) as raised:
        upcycle(source, output, **changes)
    assert "\n" not in str(raised.value) and output.exists() == existed
    assert not list(output.parent.glob(f".{output.name}*"))


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("llama", {"attention_bias": True}, "attention_bias=True, which MixtralForCausalLM cannot express"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True, which MixtralForCausalLM cannot express"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding_window=8, which"),
    ],
)
def test_what_the_mixture_cannot_express_is_refused(tmp_path, seed, kind, changes, said):
    refused(save(dense_model(kind, **changes), tmp_path / "dense"), tmp_path / "out", ConfigError, said)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"architectures": ["Olmo2ForCausalLM"]}, ConfigError, "holds Olmo2ForCausalLM; give --from one of Llama"),
        ({"model_type": "qwen3"}, ConfigError, "give --from one of"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ConfigError, "quantised weights"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, ConfigError, "'rope_type': 'spiral'"),
        ({"model_type": "unheard-of"}, DataError, "type 'unheard-of', which transformers does not know"),
        ({"num_hidden_layers": 4}, DataError, "tensor model.layers.3.* is missing; give --from a whole checkpoint"),
        ({"intermediate_size": 40}, DataError, "has shape .48, 32., not .40, 32. as config.json says"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(source, tmp_path, changes, error, said):
    settings = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(json.dumps(settings))
    refused(source, tmp_path / "out", error, said)


def test_another_head_is_refused(tmp_path):
    model = LlamaForSequenceClassification(LlamaConfig(**SHAPE))
    refused(save(model, tmp_path / "dense"), tmp_path / "out", ConfigError, "holds LlamaForSequenceClassification")


def test_missing_and_damaged_files_are_refused(source, tmp_path):
    out, weights = tmp_path / "out", source / "model.safetensors"
    refused(tmp_path / "nothing", out, DataError, "no checkpoint .no config.json.; give --from a folder")
    content = weights.read_bytes()
    weights.write_bytes(content[:1000])
    refused(source, out, DataError, "cannot read .*model.safetensors: .*; download the checkpoint again")
    weights.unlink()
    refused(source, out, DataError, "lacks model.safetensors; give --from a whole checkpoint, its weights as safe")
    (source / "config.json").write_text("{")
    refused(source, out, DataError, "cannot read .*config.json")


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": "none"}}'])
def test_a_damaged_index_is_refused(source, tmp_path, index):
    (source / "model.safetensors.index.json").write_text(index)
    refused(source, tmp_path / "out", DataError, "; (download|give --from)")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.2.mlp.up_proj.weight"])
def test_numbers_that_are_none_are_refused(source, tmp_path, name):
    tensors = load_file(source / "model.safetensors")
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    refused(source, tmp_path / "out", DataError, f"tensor {name} is not of finite floating-point numbers")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top_k": 5}, "--top-k 5 exceeds --num-experts 4; lower it"),
        ({"noise_std": 0.1}, "make no noise; set both, or neither"),
        ({"noise_fraction": 0.1}, "make no noise; set both, or neither"),
        ({"router_std": 0}, "router_std=.*greater than"),
        ({"num_experts": 0}, "num_experts=.*greater than"),
        ({"noise_std": "nan", "noise_fraction": 1}, "noise_std=.*"),
    ],
)
def test_settings_that_make_no_sense_are_refused(source, tmp_path, changes, said):
    refused(source, tmp_path / "out", ConfigError, said, **changes)


def test_nothing_that_exists_is_overwritten(source, tmp_path):
    (tmp_path / "empty").mkdir()
    upcycle(source, tmp_path / "empty")
    before = digests(tmp_path / "empty")
    refused(source, tmp_path / "empty", ConfigError, "exists and is not empty; choose another folder")
    assert digests(tmp_path / "empty") == before
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="exists and is not empty"):
        upcycle(source, tmp_path / "file")
    with pytest.raises(ConfigError, match=r"cannot write .*; choose another --output"):
        upcycle(source, tmp_path / "file" / "below")


@pytest.mark.full  # two processes that import torch; the functions above do the same work, test_cli the exit codes
def test_the_script_exits_with_2_and_one_line(source, tmp_path):
    script = [sys.executable, str(ROOT / "scripts" / "upcycle.py"), "--from", str(source), "--output"]
    flags = ["--num-experts", "4", "--top-k", "2"]
    done = subprocess.run([*script, str(tmp_path / "out"), *flags], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "MixtralForCausalLM with 4 experts" in done.stdout, done.stderr
    shutil.rmtree(source)
    done = subprocess.run([*script, str(tmp_path / "2"), *flags], capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
