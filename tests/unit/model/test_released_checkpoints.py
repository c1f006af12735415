"""A run starts from the `config.json` of released checkpoints as published, and its export computes the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tokens
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from spes_p2p.commands.upcycle import upcycle
from spes_p2p.config import FAMILIES, ModelConfig, StartConfig
from spes_p2p.config.commands import UpcycleSettings
from spes_p2p.model.build import outline
from spes_p2p.model.export import save_checkpoint
from spes_p2p.model.start import StartWeights, model_of

FIXTURES = Path(__file__).parents[2] / "fixtures"
RELEASED: dict[str, dict[str, Any]] = json.loads((FIXTURES / "released_checkpoints.json").read_text())
VOCAB, SEQUENCE = 320, 16


def reduced(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a published configuration with another size, and every other key as it is."""
    sizes = {"hidden_size": 4 * fields["num_attention_heads"], "num_hidden_layers": 2, "vocab_size": VOCAB}
    sizes |= {"intermediate_size": 32, "moe_intermediate_size": 16, "num_experts": 10, "num_local_experts": 4}
    return fields | {name: size for name, size in sizes.items() if name in fields}


def written(folder: Path, fields: dict[str, Any]) -> PreTrainedModel:
    """Write a checkpoint with random weights and this very config.json; return the stock model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    config = AutoConfig.from_pretrained(folder)
    config.initializer_range = 0.2  # so that logits are of the size of a trained model's
    config.dtype = torch.float32
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(fields))
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens(2, SEQUENCE)).logits


def exported(source: Path, output: Path) -> ModelConfig:
    """Start a run from a checkpoint, and export its first round."""
    model = model_of(source)
    built = outline(model, VOCAB, SEQUENCE)
    save_checkpoint(built, output, StartWeights(source, built).read)
    return model


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_checkpoint_starts_a_run_whose_export_has_its_logits_and_end_tokens(tmp_path, name):
    fields = reduced(RELEASED[name])
    expected = logits(written(tmp_path / "base", fields))
    started = exported(tmp_path / "base", tmp_path / "again").start
    assert started is not None
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    torch.testing.assert_close(logits(after), expected, rtol=0, atol=1e-5)
    assert StartConfig.model_validate_json(started.model_dump_json()) == started, "the manifest carries it"
    for each in (started, after.config, after.generation_config):
        assert each.eos_token_id == fields["eos_token_id"], "all end tokens"


DENSE = [name for name, fields in RELEASED.items() if FAMILIES[fields["model_type"]].mixture]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in DENSE
        if name.split("/")[1]
        in (
            *("Qwen3-0.6B", "Llama-3.2-3B-Instruct", "LLaMA-2-7B-32K", "llama-7b-hf", "SmolLM2-135M"),
            *("Yarn-Llama-2-7b-64k",),
        )
    ],
)
def test_a_run_starts_from_what_upcycling_makes_of_a_released_dense_checkpoint(tmp_path, name):
    fields = reduced(RELEASED[name])
    expected = logits(written(tmp_path / "base", fields))
    settings = {"source": tmp_path / "base", "output": tmp_path / "mixture", "num_experts": 3, "top_k": 2}
    upcycle(UpcycleSettings.model_validate(settings))
    exported(tmp_path / "mixture", tmp_path / "again")
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    torch.testing.assert_close(logits(after), expected, rtol=0, atol=2e-5)
    assert after.config.eos_token_id == after.generation_config.eos_token_id == fields["eos_token_id"]
