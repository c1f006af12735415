"""The export of a run over a checkpoint has what the checkpoint had, also where the checkpoint itself is not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import saved
from model_folders import PeerFolder
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from spes_p2p.codecs.vectors import Layout, to_bytes
from spes_p2p.config import AdapterConfig, DataConfig, OuterConfig, PeerConfig, RunConfig, StartConfig
from spes_p2p.data.tokenizer import train_bpe
from spes_p2p.model.adapted import InitialFactors
from spes_p2p.model.base_files import note_base
from spes_p2p.monitor.model_folder import export
from spes_p2p.peer.settings import founder_settings
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.training.build import outline_of

TEXTS = [f"{number} plus {number} is known" for number in range(50)]
NO_SAMPLING = {"eos_token_id": [7, 8], "temperature": 0.9, "top_p": 0.6}
SAMPLING = {"bos_token_id": 1, "do_sample": True, "eos_token_id": [5, 0, 9], "pad_token_id": 4, "temperature": 0.6}


def base(folder: Path, family: str, settings: dict[str, Any], generation: dict[str, Any], special: Any = None) -> Path:
    """Write a checkpoint, its tokenizer with further settings, and how it generates text."""
    saved(folder, family)
    tokenizer = train_bpe(TEXTS, 290)
    tokenizer.add_special_tokens(special or {})
    tokenizer.save_pretrained(folder)
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | settings))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def founded(tmp_path: Path, source: Path, **settings: Any) -> PeerFolder:
    """Return the folder of a peer of a run that starts from a checkpoint, before its first round."""
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS * 20))
    run = RunConfig(data=DataConfig(source="files", sequence_length=16), **settings)
    config = PeerConfig(
        **{"run_id": "run", "run": run, "start_from": source, "text": [tmp_path / "text.txt"]},
        **{"cache": tmp_path / "cache", "output": tmp_path / "peer"},
    )
    run, tokenizer = founder_settings(config, run)
    return PeerFolder(tmp_path / "peer", Identity(tmp_path / "key"), run=run, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("family", "settings", "generation", "special"),
    [
        (
            "olmoe",
            {"model_max_length": 4096, "padding_side": "left", "truncation_side": "left"},
            SAMPLING | {"top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05},
            {"mask_token": "<mask>", "extra_special_tokens": ["<|im_start|>", "<|im_end|>"]},
        ),
        (
            "mixtral",
            {"clean_up_tokenization_spaces": True, "chat_template": "{{ messages }}"},
            {"_from_model_config": True, "eos_token_id": 3, "transformers_version": "4.36.0", "bad_words_ids": [[1]]},
            {"sep_token": "<sep>", "cls_token": "<cls>"},
        ),
        (
            "llama",
            {"chat_template": [{"name": n, "template": f"{{{{ {n} }}}}"} for n in ("default", "tool_use", "rag")]},
            NO_SAMPLING,
            {"extra_special_tokens": ["<|python_tag|>"]},
        ),
    ],
)
def test_an_export_has_what_the_base_had_where_the_base_is_not(tmp_path, family, settings, generation, special):
    source = base(tmp_path / "base", family, settings, generation, special)
    before, begun = AutoTokenizer.from_pretrained(source), GenerationConfig.from_pretrained(source)
    peer = founded(tmp_path, source, outer=OuterConfig(optimizer="nesterov"))
    peer.publish(1, range(peer.run.num_slots))
    shutil.rmtree(source)
    export(peer.folder, tmp_path / "out")

    after, ends = AutoTokenizer.from_pretrained(tmp_path / "out"), GenerationConfig.from_pretrained(tmp_path / "out")
    for name in ("model_max_length", "padding_side", "truncation_side", "clean_up_tokenization_spaces"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.special_tokens_map == before.special_tokens_map
    assert after.extra_special_tokens == before.extra_special_tokens
    assert after.chat_template == before.chat_template
    assert len(after) == len(before) and after("1 plus <|im_end|>").input_ids == before("1 plus <|im_end|>").input_ids
    for name in generation.keys() - {"_from_model_config", "transformers_version", "bad_words_ids"}:
        assert getattr(ends, name) == getattr(begun, name), name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == generation["eos_token_id"]


def test_an_adapter_over_a_local_base_is_loaded_with_its_base(tmp_path):
    from peft import AutoPeftModelForCausalLM

    source = base(tmp_path / "base", "llama", {}, SAMPLING)
    peer = founded(tmp_path, source, adapter=AdapterConfig(rank=2))
    model = outline_of(peer.run, peer.vocab_size)
    factors = InitialFactors(model, peer.run.seed).read(None)
    peer.add(1, {"shared": bytes(to_bytes(Layout(model.shared_shapes()).flatten(factors)))})
    note_base(peer.folder, source)
    export(peer.folder, tmp_path / "out")
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    ids_BT = torch.tensor([[1, 2, 3]])
    expected = AutoModelForCausalLM.from_pretrained(source)(ids_BT).logits
    torch.testing.assert_close(again(ids_BT).logits, expected, rtol=0, atol=1e-5)
    shutil.rmtree(source)
    export(peer.folder, tmp_path / "later")
    assert json.loads((tmp_path / "later" / "adapter_config.json").read_text())["base_model_name_or_path"] is None


@pytest.mark.parametrize(
    "told",
    [
        {"generation": {"../x": 1}},
        {"generation": {"_attn": 1}},
        {"generation": {"custom": {"a": 1}}},
        {"tokenizer": {"special_tokens": {"tokenizer_class": "Evil"}}},
        {"tokenizer": {"chat_templates": {"../../x": ""}}},
        {"tokenizer": {"auto_map": "x"}},
    ],
)
def test_a_manifest_says_nothing_else_of_a_checkpoint(told):
    whole = {"vocab_size": 8, "max_position_embeddings": 8, "shared": "0" * 64, "slots": []}
    with pytest.raises(ValidationError):
        StartConfig.model_validate(whole | told)
