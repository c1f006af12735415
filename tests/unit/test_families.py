"""Peers start from a tiny checkpoint of each family, train two rounds, and stock code loads the export.

The simulated peers are real ones in virtual time; what they have agreed on is saved as `spes export` does.
"""

import json

import pytest
import torch
from checkpoints import CONFIGS, SEQUENCE, saved, tokens
from lanes import sample
from transformers import AutoModelForCausalLM

from spes_p2p.config import RunConfig
from spes_p2p.data.tokenizer import train_bpe
from spes_p2p.model.adapted import outline_adapted
from spes_p2p.model.build import outline
from spes_p2p.model.export import save_checkpoint
from spes_p2p.model.peft_files import Factors, save_adapter
from spes_p2p.sim.scenario import Scenario
from spes_p2p.sim.simulator import _Simulation

VOCAB = 300
TRAINED = ("all", "adapters")
COMMIT = [("gemma3_text", "all"), ("gpt_oss", "adapters"), ("phi3", "adapters"), ("qwen2", "all")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    texts = [f"{number} plus {number + 1} is {2 * number + 1}, and that is known. " * 4 for number in range(150)]
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    (folder / "corpus.jsonl").write_text(lines)
    train_bpe(texts, VOCAB).save_pretrained(folder / "tokenizer")
    return folder


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens(2, SEQUENCE) % 250).logits


@pytest.mark.parametrize(
    ("family", "trained"), sample([(family, trained) for family in sorted(CONFIGS) for trained in TRAINED], COMMIT)
)
def test_two_rounds_over_a_checkpoint_are_exported_as_stock_code_computes_them(folder, tmp_path, family, trained):
    from peft import PeftModel

    source = saved(tmp_path / "source", family)
    run = {
        "data": {"source": "files", "sequence_length": SEQUENCE, "tokenizer": str(folder / "tokenizer")},
        "round": {"mode": "steps", "steps": 4, "total": 2},
        "train": {"batch_size": 4, "lr": 1e-2, "warmup_rounds": 0},
        "adapter": {"rank": 4, "base": "fp32"} if trained == "adapters" else None,
    }
    scenario = Scenario(run=run, start_from=source, text=[folder / "corpus.jsonl"], peers=2, threads=1, device="cpu")
    simulation = _Simulation(scenario, folder / "cache", tmp_path, None)
    result = simulation.run()
    assert result.evaluations[-1].round == 2
    ours, config = simulation._model, RunConfig.model_validate_json(result.run.model_dump_json())
    assert config == result.run, "a manifest carries it"
    output = tmp_path / "export"
    stock = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    before = logits(stock)
    if config.adapter is None:
        outlined = outline(config.model, VOCAB, SEQUENCE)
        save_checkpoint(outlined, output, ours._model.weights)
        loaded = AutoModelForCausalLM.from_pretrained(output)
    else:
        save_adapter(Factors(outline_adapted(config, simulation._vocab_size), config, ours._model.weights), output)
        loaded = PeftModel.from_pretrained(stock, output)
    expected = logits(ours.module)
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=2e-5)
    assert (before - expected).abs().max() > 1e-2, "it was trained"
