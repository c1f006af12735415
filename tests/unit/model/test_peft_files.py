"""Adapters go to peft and come from it without loss, and what a run cannot go on from is refused by name."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIGS, EXPERTS, SEQUENCE, VOCAB, Batches, saved, tokens
from lanes import sample
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from spes_p2p.config import AdapterConfig, DataConfig, RunConfig, TrainConfig
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.model.adapted import InitialFactors, build_adapted, outline_adapted
from spes_p2p.model.build import outline
from spes_p2p.model.peft_files import CONFIG, WEIGHTS, AdapterFiles, Factors, adapter_of, named_base, save_adapter
from spes_p2p.model.slot_model import SlotModel
from spes_p2p.model.start import StartWeights, model_of
from spes_p2p.training.build import StartBundles, with_adapter, with_digests
from spes_p2p.training.ranks import Ranks
from spes_p2p.training.trainer import Trainer

RANK, RATE, STEPS = 4, 1e-2, 12
TRAIN = TrainConfig(
    **{"batch_size": 2, "lr": RATE, "schedule": "constant", "warmup_rounds": 0.0, "weight_decay": 0.0},
    **{"balance_loss": 0.0, "router_z_loss": 0.0},
)
ALL = [
    *(("olmoe", "shared"), ("olmoe", "slots"), ("qwen3_moe", "slots"), ("mixtral", "shared")),
    *((family, "shared") for family in ("llama", "qwen3", "gemma")),
]


def run_over(source: Path, **adapter: Any) -> RunConfig:
    chosen = AdapterConfig(**{"rank": RANK, "targets": ["attention", "mlp", "experts"]} | adapter)
    return RunConfig(model=model_of(source), train=TRAIN, data=DataConfig(sequence_length=SEQUENCE), adapter=chosen)


def model_over(source: Path, run: RunConfig, adapter: Path | None = None) -> SlotModel:
    base = StartWeights(source, outline(run.model, VOCAB, SEQUENCE))
    model = build_adapted(run, base, vocab_size=VOCAB, storage="fp32")
    start = InitialFactors(model, run.seed) if adapter is None else AdapterFiles(adapter, model, run)
    model.load_shared(start.read(None))
    for slot in range(model.num_slots):
        model.load_slot(slot, start.read(slot))
    return model


def logits(module: Any) -> torch.Tensor:
    module.eval()
    with torch.no_grad():
        return module(tokens(2, SEQUENCE)).logits


def save(run: RunConfig, model: SlotModel, folder: Path) -> Path:
    save_adapter(Factors(outline_adapted(run, VOCAB), run, model.weights), folder)
    return folder


@pytest.mark.parametrize(("family", "owner"), sample(ALL, [ALL[0], ALL[2], ALL[4]]))
def test_an_adapter_is_trained_as_peft_trains_it_and_goes_there_and_back(tmp_path, family, owner):
    from peft import PeftModel

    source = saved(tmp_path / "base", family)
    run = run_over(source, experts=owner)
    model = model_over(source, run)
    for slot in range(model.num_slots):
        model.adopt(slot)
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(plain, save(run, model, tmp_path / "start"), is_trainable=True)
    parameters = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    batches = [tokens(2, SEQUENCE + 1).roll(step, 1) for step in range(STEPS)]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    expected = []
    for ids_BT in batches:
        loss = torch.nn.functional.cross_entropy(theirs(ids_BT[:, :-1]).logits.flatten(0, 1), ids_BT[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    trainer = Trainer(model, TRAIN, Batches(batches), Ranks("cpu"))
    # Sums in another order: on a processor with AVX-512 the losses differ by 4.4e-6 of themselves after twelve steps.
    assert [trainer.step(RATE).loss for _ in batches] == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0] - 0.5, "it learns"

    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, save(run, model, tmp_path / "ours"))
    torch.testing.assert_close(logits(loaded), logits(model.module), rtol=0, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    chosen = adapter_of(tmp_path / "theirs", AdapterConfig(experts=owner))  # type: ignore[arg-type]
    assert (chosen.rank, chosen.alpha) == (run.adapter.rank, run.adapter.alpha)  # type: ignore[union-attr]
    again = model_over(source, run.model_copy(update={"adapter": chosen}), tmp_path / "theirs")
    torch.testing.assert_close(logits(again.module), logits(theirs), rtol=0, atol=1e-5)


def test_experts_as_wide_inside_as_outside_go_there_and_back(tmp_path):
    """Their two weights' factors are told apart by both sides: A has the same shape in both."""
    config = copy.deepcopy(CONFIGS["olmoe"])
    config.intermediate_size = config.hidden_size
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    run = run_over(tmp_path / "base", experts="slots")
    model = model_over(tmp_path / "base", run)
    for slot in range(model.num_slots):
        model.load_slot(slot, {name: torch.randn_like(value) for name, value in model.slot_weights(slot).items()})
    again = model_over(tmp_path / "base", run, save(run, model, tmp_path / "adapter"))
    for slot in range(model.num_slots):
        ours, theirs = model.slot_weights(slot), again.slot_weights(slot)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_adapter_on_few_matrices_is_gone_on_from_with_new_ones_on_the_rest(tmp_path):
    from peft import LoraConfig, get_peft_model

    source = saved(tmp_path / "base", "llama")
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    theirs = get_peft_model(plain, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    theirs.save_pretrained(tmp_path / "few")
    adapter = adapter_of(tmp_path / "few", None)
    assert (adapter.rank, adapter.alpha, adapter.targets) == (3, 6, ["attention"])
    run = run_over(source).model_copy(update={"adapter": adapter})
    model = model_over(source, run, tmp_path / "few")
    torch.testing.assert_close(logits(model.module), logits(theirs), rtol=0, atol=1e-5)
    assert any("k_proj" in name for name in model.shared_shapes())


def test_an_adapter_names_its_base_on_the_hub_with_the_commit(tmp_path):
    from peft import PeftConfig

    source = saved(tmp_path / "base", "llama")
    run = run_over(source)
    factors = Factors(outline_adapted(run, VOCAB), run, model_over(source, run).weights)
    save_adapter(factors, tmp_path / "adapter", base=f"owner/name@{'c' * 40}")
    found = PeftConfig.from_pretrained(tmp_path / "adapter")
    assert (found.base_model_name_or_path, found.revision) == ("owner/name", "c" * 40)
    assert named_base(tmp_path / "adapter") == "owner/name"
    assert named_base(save(run, model_over(source, run), tmp_path / "local")) is None


def test_experts_lie_in_peft_s_order(tmp_path):
    """Expert e has rows `e r` to `(e + 1) r` of A, and every E-th column of B from e on."""
    source = saved(tmp_path / "base", "olmoe")
    run = run_over(source, experts="slots")
    model = model_over(source, run)
    model.load_slot(2, {name: torch.randn(shape) for name, shape in model.slot_shapes().items()})
    tensors = load_file(save(run, model, tmp_path / "adapter") / WEIGHTS)
    weights, prefix = model.slot_weights(2), "model.layers.1.mlp.experts"
    for kind, wrapper in (("gate_up_proj", f"{prefix}.base_layer"), ("down_proj", prefix)):
        a, b = (tensors[f"base_model.model.{wrapper}.{factor}.weight"] for factor in ("lora_A", "lora_B"))
        assert torch.equal(a[2 * RANK : 3 * RANK], weights[f"{prefix}.{kind}.lora_A"])
        assert torch.equal(b[:, 2::EXPERTS], weights[f"{prefix}.{kind}.lora_B"])
    assert (tmp_path / "adapter" / CONFIG).is_file()


def test_a_run_goes_on_from_an_adapter_that_the_manifest_names(tmp_path):
    source = saved(tmp_path / "base", "olmoe")
    run = with_digests(run_over(source, experts="slots"), VOCAB, source)
    model = model_over(source, run)
    for slot in range(EXPERTS):
        model.load_slot(slot, {name: torch.randn(shape) for name, shape in model.slot_shapes().items()})
    folder = save(run, model, tmp_path / "adapter")
    begun = with_adapter(run, VOCAB, folder)
    bundles = StartBundles(begun, VOCAB, folder)
    bundles.check()
    assert begun.adapter is not None and begun.adapter.start is not None and len(begun.adapter.start.slots) == EXPERTS
    tensors = load_file(folder / WEIGHTS)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    save_file(tensors | {name: tensors[name] + 1}, folder / WEIGHTS)
    with pytest.raises(ConfigError, match="its shared is another"):
        StartBundles(begun, VOCAB, folder).check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "has use_dora=True, which no run has; give --adapter another folder, or lora"),
        ({"use_rslora": True}, "has use_rslora=True"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights='pissa', which has changed its base"),
        ({"alora_invocation_tokens": [1]}, "has alora_invocation_tokens="),
        ({"bias": "all"}, "has bias='all'"),
        ({"rank_pattern": {"q_proj": 2}}, "has rank_pattern="),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save="),
        ({"layers_to_transform": [0]}, "has layers_to_transform="),
        ({"peft_type": "IA3"}, "is a 'IA3' adapter"),
        ({"r": 0}, "has settings that no run can have: .*rank"),
        ({"lora_alpha": None}, "has settings that no run can have: .*alpha"),
    ],
)
def test_settings_of_peft_that_a_run_has_not_are_refused(tmp_path, change, message):
    folder = some_adapter(tmp_path)
    settings = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(settings | change))
    with pytest.raises(ConfigError, match=message):
        adapter_of(folder, None)


def some_adapter(tmp_path: Path) -> Path:
    source = saved(tmp_path / "base", "llama")
    run = run_over(source)
    return save(run, model_over(source, run), tmp_path / "adapter")


def test_damaged_and_foreign_adapters_are_refused(tmp_path):
    folder = some_adapter(tmp_path)
    with pytest.raises(DataError, match=r"is no adapter \(no adapter_config.json\); give --adapter lora, or a folder"):
        adapter_of(tmp_path / "base", None)
    tensors, name = load_file(folder / WEIGHTS), "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    wide = saved(tmp_path / "wide", "qwen3")
    with pytest.raises(ConfigError, match="does not fit the run's base; give --adapter one of this base"):
        model_over(wide, run_over(wide), folder)
    prefix, none = "base_model.model.", "no kind that a run has"
    strange = {
        f"{prefix}model.layers.7.mlp.up_proj.lora_A.weight": (ConfigError, "has not"),
        f"{prefix}lm_head.lora_A.weight": (ConfigError, none),
        f"{prefix}model.layers.0.mlp.evil": (ConfigError, none),
        name: (DataError, "not of finite floating-point numbers"),
    }
    flat = next(key for key in tensors if key.endswith("up_proj.lora_A.weight"))
    strange[flat] = (ConfigError, "does not fit the run's base")
    for key, (error, message) in strange.items():
        changed = tensors | {key: torch.full_like(tensors[name], torch.nan if key == name else 1.0)}
        changed[key] = changed[key].flatten() if key == flat else changed[key]
        save_file(changed, folder / WEIGHTS)
        with pytest.raises(error, match=message):
            model_over(tmp_path / "base", run_over(tmp_path / "base", targets=adapter_of(folder, None).targets), folder)
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:100])
    with pytest.raises(DataError, match=r"cannot read .*; copy the adapter again"):
        adapter_of(folder, None)
    (folder / CONFIG).write_text("[]")
    with pytest.raises(DataError, match="is no JSON object"):
        adapter_of(folder, None)
    (folder / CONFIG).write_text("{")
    with pytest.raises(DataError, match="cannot read"):
        adapter_of(folder, None)
    (folder / WEIGHTS).unlink()
    (folder / CONFIG).write_text('{"peft_type": "LORA"}')
    with pytest.raises(DataError, match=r"lacks adapter_model\.safetensors"):
        adapter_of(folder, None)
