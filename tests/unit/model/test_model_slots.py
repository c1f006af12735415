"""Slots: building, loading, adopting and releasing."""

import copy
import os

import pytest
import torch
from checkpoints import MIXTURES
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from spes_p2p.config import FAMILIES, TrainConfig
from spes_p2p.data.tokenizer import train_bpe
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.model.build import build_slot_model, check_attention, hf_config, stock_model
from spes_p2p.model.export import save_checkpoint
from spes_p2p.model.loss import TrainingLoss
from spes_p2p.model.slot_model import SlotModel
from tests.unit.model.plain import STORAGES, stock_state

VOCAB, SEQUENCE = 64, 16


def optimizer_of(model: SlotModel) -> torch.optim.AdamW:
    groups = [{"params": list(model.shared_parameters().values()), "name": "shared"}]
    groups += [{"params": list(model.slot_parameters(s).values()), "name": f"slot-{s}"} for s in model.claimed]
    return torch.optim.AdamW(groups, lr=1e-3)


def train(model: SlotModel, optimizer: torch.optim.Optimizer, batches: Tensor) -> None:
    loss = TrainingLoss(model, TrainConfig())
    for batch in batches:
        optimizer.zero_grad()
        loss(batch).total.backward()
        optimizer.step()


def test_release_and_adopt_leave_the_forward_pass_as_it_was(slot_model, tokens):
    model = slot_model([0, 3])
    before = model.module(tokens).logits
    model.release(3)
    assert model.claimed == (0,) and torch.equal(model.module(tokens).logits, before)
    model.adopt(5)
    model.adopt(3)
    assert model.claimed == (0, 3, 5) and torch.equal(model.module(tokens).logits, before)


@pytest.mark.parametrize("storage", STORAGES)
def test_slot_released_and_adopted_with_its_state_continues_bit_for_bit(slot_model, seed, storage):
    batches = torch.randint(0, VOCAB, (8, 2, SEQUENCE + 1))
    model = slot_model([0, 3], storage)
    optimizer = optimizer_of(model)
    train(model, optimizer, batches[:4])
    moved = copy.deepcopy(model)
    handed = optimizer_of(moved)
    handed.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    group = next(group for group in handed.param_groups if group["name"] == "slot-3")
    handed.param_groups.remove(group)
    moments = [handed.state.pop(parameter) for parameter in group["params"]]
    master = moved.slot_weights(3)
    moved.release(3)
    moved.adopt(3, master)
    handed.add_param_group({"params": list(moved.slot_parameters(3).values()), "name": "slot-3"})
    for parameter, state in zip(moved.slot_parameters(3).values(), moments, strict=True):
        handed.state[parameter] = state

    train(model, optimizer, batches[4:])
    train(moved, handed, batches[4:])
    expected = dict(model.module.named_parameters())
    for name, parameter in moved.module.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_loading_keeps_parameters_and_their_optimizer(slot_model, seed):
    model, other = slot_model([1]), slot_model([], model_seed=seed + 1)
    shared, slot = model.shared_parameters(), model.slot_parameters(1)
    model.load_shared({name: parameter.detach() for name, parameter in other.shared_parameters().items()})
    for index in range(model.num_slots):
        model.load_slot(index, other.slot_weights(index))
    assert all(model.shared_parameters()[name] is parameter for name, parameter in shared.items())
    assert all(model.slot_parameters(1)[name] is parameter for name, parameter in slot.items())
    loaded = stock_state(model)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stock_state(other).items())


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "kind", "nan", "infinite"])
@pytest.mark.parametrize("target", ["shared", "claimed", "frozen", "adopt", "export"])
def test_tensors_that_do_not_fit_change_nothing(slot_model, tmp_path, fault, target):
    model = slot_model([1])
    before = stock_state(model)
    weights = {name: tensor.detach().clone() + 1 for name, tensor in model.slot_weights(2).items()}
    if target == "shared":
        weights = {name: tensor.detach().clone() + 1 for name, tensor in model.shared_parameters().items()}
    last = list(weights)[-1]
    if fault == "missing":
        del weights[last]
    elif fault == "unknown":
        weights["model.backdoor"] = torch.zeros(1)
    elif fault == "shape":
        weights[last] = weights[last].flatten()[None]
    elif fault == "kind":
        weights[last] = weights[last].long()
    else:
        weights[last].view(-1)[-1] = float("nan" if fault == "nan" else "inf")
    actions = {
        "shared": lambda: model.load_shared(weights),
        "claimed": lambda: model.load_slot(1, weights),
        "frozen": lambda: model.load_slot(2, weights),
        "adopt": lambda: model.adopt(2, weights),
        "export": lambda: save_checkpoint(model, tmp_path, lambda slot: weights if slot == 2 else model.weights(slot)),
    }
    with pytest.raises(DataError, match=last if fault not in ("unknown",) else "backdoor"):
        actions[target]()
    assert model.claimed == (1,)
    assert all(torch.equal(before[name], tensor) for name, tensor in stock_state(model).items())


@pytest.mark.parametrize("storage", STORAGES)
def test_slot_with_values_that_are_not_finite_is_not_released(slot_model, storage):
    """Not half of its layers either, whatever their storage can hold."""
    model = slot_model([1], storage)
    broken = list(model.slot_parameters(1).values())[-1]
    with torch.no_grad():
        broken[0, 0] = float("nan")
    with pytest.raises(DataError, match=r"slot-1: .*not finite"):
        model.release(1)
    assert model.claimed == (1,) and len(model.slot_parameters(1)) == 4


def test_slots_that_cannot_be_are_refused(slot_model):
    model = slot_model([1])
    with pytest.raises(AssertionError, match="slot 1 is claimed"):
        model.adopt(1)
    with pytest.raises(AssertionError, match="slot 2 is not claimed"):
        model.release(2)
    with pytest.raises(AssertionError, match="slot 2 is not claimed"):
        model.slot_parameters(2)
    for wrong in (-1, 6):
        with pytest.raises(AssertionError, match=f"slot {wrong} is not in"):
            model.slot_weights(wrong)
        with pytest.raises(ConfigError, match=f"slot {wrong} "):
            slot_model([wrong])
    with pytest.raises(ConfigError, match="twice"):
        slot_model([1, 1])


def test_unusable_settings_are_config_errors(slot_model, tiny):
    with pytest.raises(ConfigError, match="storage='int1'"):
        slot_model([0], "int1")
    with pytest.raises(ConfigError, match="odd width 3"):
        hf_config(tiny(hidden_size=12), VOCAB, SEQUENCE)


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("normalise", [True, False])
def test_stock_model_has_the_shape_that_the_run_asks_for(tiny, tokens, seed, family, normalise):
    shape = tiny(family, num_layers=3, top_k=3, norm_topk_prob=normalise, tie_embeddings=False, rope_theta=500.0)
    stock = stock_model(shape, VOCAB, SEQUENCE, seed)
    sizes = {name: tuple(parameter.shape) for name, parameter in stock.named_parameters()}
    assert len(stock.model.layers) == 3 and sizes["lm_head.weight"] == (VOCAB, 32)
    assert sizes["model.layers.2.self_attn.k_proj.weight"] == (16, 32)
    assert sizes["model.layers.2.mlp.experts.gate_up_proj"] == (6, 32, 32)
    assert sizes["model.layers.2.mlp.experts.down_proj"] == (6, 32, 16)
    assert stock.config.rope_parameters["rope_theta"] == 500.0
    assert stock.config.pad_token_id is None and stock.config.eos_token_id is None and stock.config.bos_token_id is None
    _, weights_TK, _ = stock.model.layers[0].mlp.gate(torch.randn(5, 32))
    is_normalised = torch.allclose(weights_TK.sum(-1), torch.ones(5))
    can_choose = "norm_topk_prob" in FAMILIES[family].settings
    assert weights_TK.shape == (5, 3) and is_normalised == (normalise or not can_choose)
    assert stock(tokens, labels=tokens, output_router_logits=True).loss == stock(tokens, labels=tokens).loss


@pytest.mark.parametrize(("family", "own"), [("olmoe", 1e-5), ("qwen3_moe", 1e-6), ("mixtral", 1e-5)])
def test_the_norms_take_the_runs_epsilon_or_their_familys(tiny, seed, family, own):
    for chosen, expected in ((None, own), (1e-3, 1e-3)):
        stock = stock_model(tiny(family, norm_eps=chosen), VOCAB, SEQUENCE, seed)
        used = {module.variance_epsilon for module in stock.modules() if hasattr(module, "variance_epsilon")}
        assert used == {expected} and stock.config.rms_norm_eps == expected


@pytest.mark.parametrize("family", MIXTURES)
def test_every_attention_kernel_gives_the_same_loss(tiny, tokens, seed, family):
    losses = []
    for attention in ("sdpa", "eager"):
        shape = {"vocab_size": VOCAB, "sequence_length": SEQUENCE, "seed": seed, "claimed": [0], "storage": "fp32"}
        model = build_slot_model(tiny(family), **shape, attention=attention)
        assert {layer.self_attn.config._attn_implementation for layer in model.module.model.layers} == {attention}
        losses.append(model.module(tokens, labels=tokens).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_flash_attention_is_refused_where_it_cannot_be_used(monkeypatch):
    with pytest.raises(ConfigError, match=r"attention=flash needs a CUDA GPU, .* on cpu; set attention=sdpa"):
        check_attention("flash", torch.device("cpu"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"flash-attn, which is not installed; run pip install flash-attn"):
        check_attention("flash", torch.device("cuda"))
    with pytest.raises(ConfigError, match="unknown attention=slow; choose from sdpa, flash, eager"):
        check_attention("slow", torch.device("cpu"))
    check_attention("sdpa", torch.device("cpu"))


def test_equal_seeds_give_equal_weights_whatever_is_claimed(slot_model, tiny, seed):
    outside = torch.get_rng_state()
    stock = stock_model(tiny(), VOCAB, SEQUENCE, seed).state_dict()
    models = [slot_model([]), slot_model([2, 0]), slot_model(list(range(6)))]
    assert torch.equal(torch.get_rng_state(), outside), "the caller's random state was disturbed"
    for model in models:
        state = stock_state(model)
        assert state.keys() == stock.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in stock.items())
    other = stock_model(tiny(), VOCAB, SEQUENCE, seed + 1).state_dict()
    assert not torch.equal(other["lm_head.weight"], stock["lm_head.weight"])


@pytest.mark.parametrize("family", MIXTURES)
def test_initial_weights_are_distributed_as_stock(tiny, seed, family):
    """Drawn submodule by submodule, they differ from the stock constructor's in value only."""
    shape = tiny(family, hidden_size=64, tie_embeddings=False)
    ours = stock_model(shape, VOCAB, SEQUENCE, seed)
    stock = AutoModelForCausalLM.from_config(hf_config(shape, VOCAB, SEQUENCE))
    buffers = dict(stock.named_buffers())
    assert buffers.keys() == dict(ours.named_buffers()).keys()
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in ours.named_buffers())
    for name, expected in stock.named_parameters():
        actual = ours.get_parameter(name)
        spread = 9 / max(actual.numel() - 1, 1) ** 0.5
        assert actual.dtype == expected.dtype and actual.requires_grad and ours.training
        assert abs(actual.std() - expected.std()) <= spread * expected.std(), name
        assert abs(actual.mean() - expected.mean()) <= spread * 0.02, name


def test_names_and_shapes_are_stock(slot_model, tiny, seed):
    model = slot_model([2])
    stock = dict(stock_model(tiny(), VOCAB, SEQUENCE, seed).named_parameters())
    assert {**model.shared_shapes(), **model.slot_shapes()}.keys() == stock.keys()
    assert list(model.shared_shapes()) == sorted(model.shared_shapes())
    assert all(stock[name].shape[1:] == shape for name, shape in model.slot_shapes().items())
    assert {n: tuple(p.shape) for n, p in model.slot_parameters(2).items()} == model.slot_shapes()
    trained = {id(p) for p in (*model.shared_parameters().values(), *model.slot_parameters(2).values())}
    assert trained == {id(p) for p in model.module.parameters()}


def test_snapshot_does_not_follow_training(slot_model, tokens):
    model = slot_model([1])
    snapshot = stock_state(model)
    before = {name: tensor.clone() for name, tensor in snapshot.items()}
    train(model, optimizer_of(model), tokens[None])
    assert all(torch.equal(snapshot[name], tensor) for name, tensor in before.items())
    assert not torch.equal(stock_state(model)["lm_head.weight"], before["lm_head.weight"])


def test_naive_save_raises_and_names_the_remedy(slot_model, tmp_path):
    model = slot_model([1])
    for module in (model.module, copy.deepcopy(model).module):
        with pytest.raises(ValueError, match="save_checkpoint"):
            module.save_pretrained(tmp_path / "naive")
    assert not (tmp_path / "naive").exists()
    model.module.save_pretrained(tmp_path / "told", state_dict=stock_state(model))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "told").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stock_state(model).items())


def test_checkpoint_is_replaced_whole_or_not_at_all(slot_model, tmp_path, seed):
    target = tmp_path / "checkpoint"
    first, second = slot_model([]), slot_model([], model_seed=seed + 1)
    save_checkpoint(first, target)

    class FailingTokenizer:
        def save_pretrained(self, directory: str) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(second, target, tokenizer=FailingTokenizer())
    loaded = AutoModelForCausalLM.from_pretrained(target).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stock_state(first).items())
    save_checkpoint(second, target)
    loaded = AutoModelForCausalLM.from_pretrained(target).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stock_state(second).items())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_checkpoints_text_ends_where_its_tokenizer_says(slot_model, tmp_path):
    tokenizer = train_bpe(["a few words to learn"], 300)
    save_checkpoint(slot_model([]), tmp_path / "checkpoint", tokenizer=tokenizer)
    assert GenerationConfig.from_pretrained(tmp_path / "checkpoint").eos_token_id == tokenizer.eos_token_id is not None


def test_checkpoint_does_not_replace_a_folder_of_other_things(slot_model, tmp_path):
    model = slot_model([])
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="is no checkpoint"):
        save_checkpoint(model, tmp_path)

    def without_one(slot: int | None) -> dict[str, torch.Tensor]:
        weights = dict(model.weights(slot))
        if slot == 3:
            weights.popitem()
        return weights

    with pytest.raises(DataError, match=r"slot-3: .* is missing"):
        save_checkpoint(model, tmp_path / "new", without_one)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_the_files_of_a_checkpoint_have_the_modes_that_the_umask_grants(slot_model, tmp_path, umask, mode):
    model = slot_model([])
    before = os.umask(umask)
    try:
        save_checkpoint(model, tmp_path / "checkpoint")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "checkpoint").iterdir()}
    assert "model.safetensors" in modes and set(modes.values()) == {mode}
