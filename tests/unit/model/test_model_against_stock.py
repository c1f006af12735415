"""A swapped model computes, learns and exports what the stock one does."""

import json

import pytest
import torch
import torch.nn.functional as F
from checkpoints import MIXTURES
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from spes_p2p.model import export
from spes_p2p.model.build import outline
from spes_p2p.model.export import save_checkpoint
from tests.unit.model.conftest import SEQUENCE, STOCK, VOCAB
from tests.unit.model.plain import NEEDS_BITSANDBYTES, NF4, stock_state

CLAIMS = [[0, 1, 2, 3, 4, 5], [1, 4], []]


def next_token_loss(module: nn.Module, tokens_BT1: Tensor) -> Tensor:
    logits = module(input_ids=tokens_BT1[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens_BT1[:, 1:].flatten())


def assert_near(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal to fp32 rounding, relative to the largest value."""
    difference = (actual - expected).abs().max().item()
    assert difference <= 5e-6 * max(expected.abs().max().item(), 1e-3), f"{what}: off by {difference:.1e}"


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("claimed", CLAIMS, ids=["all", "some", "none"])
@pytest.mark.parametrize("kernel", ["loop", "grouped_mm"])
def test_logits_and_gradients_equal_stock(pair, tokens, family, claimed, kernel):
    stock, swapped = pair(family, claimed, kernel=kernel)
    inputs = tokens[:, :-1]
    assert_near(swapped.module(inputs).logits, stock(inputs).logits, "logits")
    next_token_loss(stock, tokens).backward()
    next_token_loss(swapped.module, tokens).backward()
    expected = {name: parameter.grad for name, parameter in stock.named_parameters()}
    for name, parameter in swapped.shared_parameters().items():
        assert_near(parameter.grad, expected[name], name)
    for slot in claimed:
        for name, parameter in swapped.slot_parameters(slot).items():
            assert_near(parameter.grad, expected[name][slot], f"{name}[{slot}]")


@pytest.mark.parametrize("family", MIXTURES)
def test_ten_adamw_steps_equal_stock_with_the_rest_frozen(pair, family):
    """Stock has no frozen experts, so its gradients of the unclaimed ones are dropped by hand."""
    claimed = [1, 4]
    stock, swapped = pair(family, claimed)
    before = {slot: swapped.slot_weights(slot) for slot in range(swapped.num_slots)}
    frozen = [slot for slot in range(swapped.num_slots) if slot not in claimed]
    # eps far above rounding noise: AdamW divides a gradient of 1e-9 by itself, and amplifies its last bits
    settings = {"lr": 1e-3, "weight_decay": 0.0, "eps": 1e-5}
    optimizers = [torch.optim.AdamW(module.parameters(), **settings) for module in (stock, swapped.module)]
    for _ in range(10):
        tokens = torch.randint(0, 64, (4, 17))
        for module, optimizer in zip((stock, swapped.module), optimizers, strict=True):
            optimizer.zero_grad()
            next_token_loss(module, tokens).backward()
            if module is stock:
                for name in swapped.slot_shapes():
                    stock.get_parameter(name).grad[frozen] = 0.0
            optimizer.step()
    expected = stock.state_dict()
    for name, tensor in stock_state(swapped).items():
        assert (tensor - expected[name]).abs().max() <= 1e-5, name
    for slot in range(swapped.num_slots):
        same = all(torch.equal(before[slot][name], tensor) for name, tensor in swapped.slot_weights(slot).items())
        assert same == (slot in frozen)


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_export_loads_bit_equal_with_stock_classes(slot_model, tokens, tmp_path, family, tied):
    swapped = slot_model([0, 5], family=family, tie_embeddings=tied)
    save_checkpoint(swapped, tmp_path / "checkpoint")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    exported = stock_state(swapped)
    assert exported.keys() == loaded.state_dict().keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, exported[name]), name
    assert_near(swapped.module(tokens).logits, loaded(tokens).logits, "logits")


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shard_bytes", [1, 2**25], ids=["a-file-for-each-slot", "one-file"])
def test_export_writes_what_stock_save_pretrained_writes(slot_model, tmp_path, monkeypatch, family, tied, shard_bytes):
    monkeypatch.setattr(export, "SHARD_BYTES", shard_bytes)
    swapped = slot_model([0, 5], family=family, tie_embeddings=tied)
    num_params = save_checkpoint(swapped, tmp_path / "ours")
    swapped.module.save_pretrained(tmp_path / "stock", state_dict=stock_state(swapped))
    theirs = load_file(tmp_path / "stock" / "model.safetensors")
    files = sorted((tmp_path / "ours").glob("*.safetensors"))
    ours = [load_file(file) for file in files]
    assert sum(map(len, ours)) == len(theirs) and len(files) == (1 if shard_bytes > 1 else 1 + swapped.num_slots)
    for tensors in ours:
        for name, tensor in tensors.items():
            assert torch.equal(tensor, theirs[name]), name
    assert num_params == sum(tensor.numel() for tensor in theirs.values())
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    expected = json.loads((tmp_path / "stock" / "config.json").read_text())
    assert config["architectures"] == [STOCK[family].__name__]
    assert {**config, "architectures": None} == {**expected, "architectures": None}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stock_state(swapped).items())


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_outline_has_the_models_tensors_by_name_and_shape_and_holds_none(slot_model, tiny, family, tied):
    full = slot_model([], family=family, tie_embeddings=tied)
    bare = outline(tiny(family, tie_embeddings=tied), VOCAB, SEQUENCE)
    assert bare.shared_shapes() == full.shared_shapes() and bare.slot_shapes() == full.slot_shapes()
    assert bare.num_slots == full.num_slots and all(parameter.is_meta for parameter in bare.module.parameters())


@pytest.mark.parametrize("storage", ["bf16", "int8", NF4])
def test_true_weights_are_exported_in_place_of_rounded_ones(pair, tmp_path, storage):
    stock, swapped = pair("olmoe", [0], storage)
    expected = stock.state_dict()
    rounded = stock_state(swapped)
    name = "model.layers.1.mlp.experts.down_proj"
    assert not torch.equal(rounded[name], expected[name])
    masters = {s: {n: expected[n][s] for n in swapped.slot_shapes()} for s in range(1, swapped.num_slots)}
    save_checkpoint(swapped, tmp_path / "exact", lambda slot: masters.get(slot) or swapped.weights(slot))
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path / "exact").state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("storage", "largest"), [("bf16", 2e-2), ("int8", 3e-2), pytest.param("nf4", 0.3, marks=NEEDS_BITSANDBYTES)]
)
def test_frozen_storage_stays_within_rounding(pair, tokens, storage, largest):
    # all experts chosen: rounding that flips a token's routing would be another matter
    stock, swapped = pair("olmoe", [2], storage, top_k=6)
    exact = stock(tokens).logits
    error = (swapped.module(tokens).logits - exact).abs().max() / exact.abs().max()
    assert 0 < error < largest
    for name, tensor in swapped.slot_weights(2).items():
        assert torch.equal(tensor, stock.get_parameter(name)[2])


def test_perturbed_frozen_expert_changes_the_logits(pair, tokens):
    """Falsifies the tests above: they would notice a frozen expert that is wrong."""
    stock, swapped = pair("olmoe", [1, 4])
    swapped.load_slot(0, {name: tensor * 1.5 for name, tensor in swapped.slot_weights(0).items()})
    with pytest.raises(AssertionError):
        assert_near(swapped.module(tokens).logits, stock(tokens).logits, "logits")


def test_generates_what_stock_generates(pair, tokens):
    stock, swapped = pair("olmoe", [1])
    options = {"max_new_tokens": 6, "do_sample": False}
    prompt = tokens[:, :4]
    assert torch.equal(swapped.module.generate(prompt, **options), stock.generate(prompt, **options))
