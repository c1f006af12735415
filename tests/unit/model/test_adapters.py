"""Adapters compute and learn as a model with their products added to its weights, over a base that stays frozen."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIGS, EXPERTS, MIXTURES, SEQUENCE, VOCAB, Batches, saved, stock, tokens
from pydantic import ValidationError
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GenerationConfig

from spes_p2p.codecs.vectors import digest
from spes_p2p.config import AdapterConfig, DataConfig, RunConfig, TrainConfig
from spes_p2p.data.tokenizer import train_bpe
from spes_p2p.errors import DataError
from spes_p2p.model.adapted import InitialFactors, build_adapted, outline_adapted
from spes_p2p.model.base_files import BaseFiles, BaseLayout, base_digests, base_name, encode_base
from spes_p2p.model.build import outline
from spes_p2p.model.lora import AdapterBank, FrozenLinear
from spes_p2p.model.peft_files import Factors, save_merged
from spes_p2p.model.slot_model import SlotModel
from spes_p2p.model.start import StartWeights, model_of
from spes_p2p.planner.memory import base_bytes
from spes_p2p.planner.size import model_size, run_size
from spes_p2p.swarm.manifest import Manifest
from spes_p2p.training.build import with_digests
from spes_p2p.training.ranks import Ranks
from spes_p2p.training.trainer import Trainer

RANK = 4
TARGETS = ["attention", "mlp", "experts"]
CASES = [(family, experts) for family in sorted(CONFIGS) for experts in ("shared", "slots") if family in MIXTURES]
CASES += [(family, "shared") for family in sorted(CONFIGS) if family not in MIXTURES]
cases = pytest.mark.parametrize(("family", "experts"), CASES)
TRAIN = TrainConfig(
    **{"batch_size": 2, "lr": 1e-2, "schedule": "constant", "warmup_rounds": 0.0, "weight_decay": 0.0},
    **{"balance_loss": 0.0, "router_z_loss": 0.0},
)


class World:
    """A checkpoint, a run with adapters over it, and the run's model."""

    def __init__(self, folder: Path, family: str, *, storage: str = "fp32", **adapter: Any) -> None:
        self.source = saved(folder / "base", family)
        chosen = AdapterConfig(**{"rank": RANK, "targets": TARGETS} | adapter)
        data = DataConfig(sequence_length=SEQUENCE)
        self.run = RunConfig(model=model_of(self.source), train=TRAIN, data=data, adapter=chosen)
        self.whole = outline(self.run.model, VOCAB, SEQUENCE)
        self.base = StartWeights(self.source, self.whole)
        self.model = self.build(storage)

    def build(self, storage: str, base: Any = None) -> SlotModel:
        model = build_adapted(self.run, base or self.base, vocab_size=VOCAB, storage=storage)
        initial = InitialFactors(model, self.run.seed)
        model.load_shared(initial.read(None))
        for slot in range(model.num_slots):
            model.load_slot(slot, initial.read(slot))
        return model

    def factors(self) -> Factors:
        return Factors(outline_adapted(self.run, VOCAB), self.run, self.model.weights)

    def scramble(self) -> None:
        """Give the factors other values: at a run's start their products are 0."""
        generator = torch.Generator().manual_seed(5)

        def drawn(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: 0.05 * torch.randn(each.shape, generator=generator) for name, each in tensors.items()}

        self.model.load_shared(drawn(self.model.weights(None)))
        for slot in range(self.model.num_slots):
            self.model.load_slot(slot, drawn(self.model.weights(slot)))


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def logits(module: Any, ids_BT: Tensor) -> Tensor:
    module.eval()
    with torch.no_grad():
        return module(ids_BT).logits


@cases
def test_a_new_adapter_changes_no_logit(folder, family, experts):
    world = World(folder, family, experts=experts)
    ids_BT = tokens(2, SEQUENCE)
    torch.testing.assert_close(logits(world.model.module, ids_BT), logits(stock(family), ids_BT), rtol=0, atol=1e-5)
    assert world.model.num_slots == (EXPERTS if experts == "slots" else 0)


@cases
def test_gradients_are_those_of_the_sum_of_base_and_product(folder, family, experts):
    """Also of slots that are claimed one by one; those of others get none, and count all the same."""
    world = World(folder, family, experts=experts)
    world.scramble()
    claimed = (1, 2) if experts == "slots" else ()
    for slot in claimed:
        world.model.adopt(slot)
    ids_BT = tokens(2, SEQUENCE)
    loss = world.model.module(ids_BT).logits.square().mean()
    loss.backward()

    reference, merged, leaves = stock(family), {}, {}
    for weight in world.factors().weights:
        a, b = (factor.clone().requires_grad_() for factor in world.factors().of(weight))
        leaves[weight] = a, b
        name = weight if ".experts." in weight else f"{weight}.weight"
        merged[name] = reference.get_parameter(name).detach() + world.run.adapter.scale * b @ a  # type: ignore[union-attr]
    expected = torch.func.functional_call(reference, merged, ids_BT).logits.square().mean()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    checked = 0
    for name, parameter in world.model.shared_parameters().items():
        weight, _, factor = name.rpartition(".")
        wanted = leaves[weight][factor == "lora_B"].grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-3, atol=1e-6)
        checked += 1
    for slot in claimed:
        for name, parameter in world.model.slot_parameters(slot).items():
            weight, _, factor = name.rpartition(".")
            wanted = leaves[weight][factor == "lora_B"].grad
            assert wanted is not None
            torch.testing.assert_close(parameter.grad, wanted[slot], rtol=1e-3, atol=1e-6)
            checked += 1
    assert checked >= 7


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("storage", ["bf16", "int8", "nf4"])
def test_a_base_in_few_bits_learns_and_stays_as_it_is(folder, storage, precision, checkpointing):
    world = World(folder, "qwen3_moe", storage=storage, experts="slots")
    for slot in range(EXPERTS):
        world.model.adopt(slot)
    if checkpointing:
        world.model.module.activation_checkpointing_enable({"use_reentrant": False})
    before = frozen_bytes(world.model)
    train = TRAIN.model_copy(update={"precision": precision})
    trainer = Trainer(world.model, train, Batches([tokens(2, SEQUENCE + 1)] * 12), Ranks("cpu"))
    losses = [trainer.step(1e-2).loss for _ in range(12)]
    assert losses[-1] < losses[0] - 0.5 and frozen_bytes(world.model) == before and before


def test_adapters_of_a_pass_that_is_computed_again_get_the_gradients_of_its_own_routing(folder):
    """On a GPU a token between two experts may go to another one when activations are computed again."""
    world = World(folder, "qwen3_moe", experts="slots")
    for slot in range(EXPERTS):
        world.model.load_slot(slot, {name: torch.randn(shape) for name, shape in world.model.slot_shapes().items()})
        world.model.adopt(slot)
    bank = next(module for module in world.model.module.modules() if isinstance(module, AdapterBank))
    width = bank.frozen.stored(0, "down_proj").dense(torch.float32).shape[0]
    x_TD = torch.randn(9, width, requires_grad=True)
    first_TK = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(9)])
    second_TK, weights_TK = first_TK.flip(0), torch.rand(9, 2)
    assert not torch.equal(first_TK, second_TK)
    routings = iter([first_TK, second_TK])
    y_TD = checkpoint(lambda x_TD: bank(x_TD, next(routings), weights_TK), x_TD, use_reentrant=False)
    trained = [x_TD, *(each for each in bank.parameters() if each.requires_grad)]
    got = torch.autograd.grad(y_TD.sum(), trained)
    wanted = torch.autograd.grad(bank(x_TD, second_TK, weights_TK).sum(), trained)
    assert len(trained) > 1 and all(map(torch.equal, got, wanted))


def frozen_bytes(model: SlotModel) -> dict[str, bytes]:
    """Return all that is frozen in a model."""
    found = {
        name: p.detach().float().numpy().tobytes() for name, p in model.module.named_parameters() if not p.requires_grad
    }
    for name, child in model.module.named_modules():
        if isinstance(child, FrozenLinear):
            weight: Any = child._weight
            found[name] = b"".join(getattr(weight, part).view(torch.uint8).numpy().tobytes() for part in weight.PARTS)
        if isinstance(child, AdapterBank):
            for slot in range(child.num_experts):
                for key in ("gate_up_proj", "down_proj"):
                    stored: Any = child.frozen.stored(slot, key)
                    parts = (getattr(stored, part).view(torch.uint8).numpy().tobytes() for part in stored.PARTS)
                    found[f"{name}.{slot}.{key}"] = b"".join(parts)
    return found


def test_no_sum_of_a_weight_and_its_adapter_is_made(folder, monkeypatch):
    """What is kept for the backward pass has no weight of an expert but the factors."""
    kept: list[tuple[int, ...]] = []
    world = World(folder, "qwen3_moe", experts="shared")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        loss = world.model.module(tokens(2, SEQUENCE)).logits.mean()
    loss.backward()
    assert (RANK, 32) in kept and not {shape[-2:] for shape in kept} & {(80, 32), (32, 40)}


def test_slots_go_from_hand_to_hand(folder):
    world = World(folder, "mixtral", experts="slots")
    world.scramble()
    ids_BT = tokens(2, SEQUENCE)
    before, weights = logits(world.model.module, ids_BT), world.model.slot_weights(2)
    for slot in (3, 2):
        world.model.adopt(slot)
    assert world.model.claimed == (2, 3) and torch.equal(logits(world.model.module, ids_BT), before)
    world.model.release(2)
    assert world.model.claimed == (3,) and torch.equal(logits(world.model.module, ids_BT), before)
    assert all(torch.equal(world.model.slot_weights(2)[name], tensor) for name, tensor in weights.items())
    with pytest.raises(AssertionError, match="slot 2 is not claimed"):
        world.model.slot_parameters(2)


def test_peers_draw_the_same_factors_whoever_owns_the_experts(folder):
    """So a run is the same model at its start, whatever is shared and sent."""
    shared, slots = (World(folder / experts, "olmoe", experts=experts) for experts in ("shared", "slots"))
    for weight in shared.factors().weights:
        assert all(map(torch.equal, shared.factors().of(weight), slots.factors().of(weight)))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "nf4"])
def test_a_base_from_documents_is_the_base_from_the_checkpoint(folder, precision):
    """In the precision of the documents, and to the last bit."""
    world = World(folder, "qwen3_moe", base=precision)
    run = with_digests(world.run, VOCAB, world.source)
    layout, digests = BaseLayout(run, VOCAB), base_digests(run)
    for slot, expected in digests.items():
        document = encode_base(world.base, layout, slot)
        assert digest(document) == expected and len(document) == layout.num_bytes(slot)
        (folder / f"{base_name(slot)}.0.{expected}.bin").write_bytes(document)
    files = BaseFiles(folder, layout, digests)
    ours, theirs = world.build(precision), world.build(precision, files)
    assert frozen_bytes(ours) == frozen_bytes(theirs)
    assert sum(map(layout.num_bytes, digests)) == base_bytes(run_size(run, VOCAB), precision)  # type: ignore[arg-type]
    for change in ("damaged", "short", "gone"):
        path = folder / f"{base_name(2)}.0.{digests[2]}.bin"
        whole = path.read_bytes()
        path.write_bytes({"damaged": whole[:-1] + bytes([whole[-1] ^ 1]), "short": whole[:-1], "gone": b""}[change])
        if change == "gone":
            path.unlink()
        with pytest.raises(DataError, match=r"damaged|too short|cannot read .*; join again with --overwrite"):
            list(files.tensors(2))
        path.write_bytes(whole)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_the_planner_counts_what_is_trained_and_what_is_frozen(folder, family):
    for experts in ("shared", "slots"):
        world = World(folder / experts, family, experts=experts)
        size, whole = run_size(world.run, VOCAB), model_size(world.run.model, VOCAB)
        assert size.shared_params == sum(p.numel() for p in world.model.shared_parameters().values())
        assert size.num_slots == world.model.num_slots
        slot = sum(torch.Size(shape).numel() for shape in world.model.slot_shapes().values())
        assert size.slot_params == slot
        assert size.base_params + size.table_params + size.kept_params == whole.total_params
        factors = [each for weight in world.factors().weights for each in world.factors().of(weight)]
        assert size.total_params == sum(each.numel() for each in factors)


@cases
def test_a_merged_checkpoint_computes_what_base_and_adapter_do(folder, family, experts):
    world = World(folder, family, experts=experts)
    world.scramble()
    num_params = save_merged(world.whole, world.factors(), world.base, folder / "merged")
    assert num_params == model_size(world.run.model, VOCAB).total_params
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    ids_BT = tokens(2, SEQUENCE)
    torch.testing.assert_close(logits(merged, ids_BT), logits(world.model.module, ids_BT), rtol=1e-5, atol=1e-5)


def test_text_of_a_merged_checkpoint_ends_where_its_tokenizer_says(folder):
    world = World(folder, "llama")
    world.whole.module.generation_config.eos_token_id = None  # as of a base that does not say it
    tokenizer = train_bpe(["some text " * 100], VOCAB)
    save_merged(world.whole, world.factors(), world.base, folder / "merged", tokenizer=tokenizer)
    assert GenerationConfig.from_pretrained(folder / "merged").eos_token_id == tokenizer.eos_token_id


def test_a_merged_checkpoint_keeps_the_bases_precision_and_may_be_several_files(folder, monkeypatch):
    monkeypatch.setattr("spes_p2p.model.peft_files.MERGED_BYTES", 20_000)
    stock("olmoe").bfloat16().save_pretrained(folder / "bf16")
    world = World(folder, "olmoe")
    base = StartWeights(folder / "bf16", world.whole)
    save_merged(world.whole, world.factors(), base, folder / "merged")
    assert len(list((folder / "merged").glob("*.safetensors"))) > 3
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    assert merged.dtype == torch.bfloat16
    whole = AutoModelForCausalLM.from_pretrained(folder / "bf16")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(merged.parameters(), whole.parameters(), strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": []}, "targets"),
        ({"targets": ["head"]}, "targets"),
        ({"targets": ["attention", "attention"]}, "names one twice"),
        ({"targets": ["experts"], "experts": "slots"}, "adapter.experts=slots needs experts and attention"),
        ({"targets": ["attention"], "experts": "slots"}, "adapter.experts=slots needs experts and attention"),
        ({"rank": 0}, "rank"),
        ({"alpha": 0.0}, "alpha"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        AdapterConfig.model_validate(settings)


def test_a_run_is_refused_whose_parts_contradict_each_other(folder):
    start = {"shared": "0" * 64, "slots": ["0" * 64]}
    with pytest.raises(ValidationError, match=r"adapter\.start names 1 slots, and the run has 0"):
        RunConfig.model_validate({"adapter": {"start": start}})
    with pytest.raises(ValidationError, match=r"merge\.alpha=0\.05 merges experts, not adapters"):
        RunConfig.model_validate({"adapter": {}, "merge": {"alpha": 0.05}})
    with pytest.raises(ValidationError, match=r"fits no matrix of this model; add attention"):
        World(folder, "llama", targets=["experts"])


def test_a_manifest_without_the_base_of_its_adapters_is_refused():
    fields = {"run_id": "run", "founder": "Qm" + "1" * 44, "software": "0.1", "vocab_size": 300}
    manifest = fields | {"tokenizer_digest": "0" * 64, "tokenizer_bytes": 9, "config": {"adapter": {}}}
    with pytest.raises(ValidationError, match="the run trains adapters and names no base"):
        Manifest.model_validate(manifest)
    Manifest.model_validate(manifest | {"config": {}})
