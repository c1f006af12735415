"""Anchors step as the outer optimizer says, and what is published of them is all that a newcomer needs."""

import pytest
import torch
from torch import nn
from transformers import MixtralForCausalLM, OlmoeForCausalLM, Qwen3MoeForCausalLM, set_seed

from spes_p2p.codecs import paged
from spes_p2p.codecs.format import Format, Segment
from spes_p2p.codecs.paged import PagedVector
from spes_p2p.codecs.vectors import Layout
from spes_p2p.config import CodecConfig, MergeConfig, ModelConfig, OuterConfig, RunConfig
from spes_p2p.model.build import build_slot_model, stock_model
from spes_p2p.optim.outer import merge_alpha, merge_experts
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.training.anchors import Anchors, merge_shifts
from spes_p2p.training.build import build_initial

NUMELS = {SHARED: 11, "slot": 7}
SLOT_0, SLOT_2, SLOT_3 = map(VectorName.of_slot, (0, 2, 3))
MEAN = RunConfig(outer=OuterConfig(moments="local"))
NESTEROV = RunConfig(outer=OuterConfig(optimizer="nesterov", lr=0.7, momentum=0.9, moments="local"))
STOCK = {"olmoe": OlmoeForCausalLM, "qwen3_moe": Qwen3MoeForCausalLM, "mixtral": MixtralForCausalLM}


def start(anchors: Anchors, name: VectorName, bundle: torch.Tensor) -> None:
    anchors.set(name, PagedVector.of(bundle))


def step(anchors: Anchors, name: VectorName, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Commit a mean; return the bundle and its moments."""
    bundle, moments = anchors.stepped(name, mean)
    start(anchors, name, bundle)
    return bundle, moments


def shape(family: str = "olmoe", **changes) -> ModelConfig:
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 8}
    return ModelConfig.model_validate({"family": family, "num_experts": 4, "top_k": 2, **sizes, **changes})


@pytest.mark.parametrize("run", [MEAN, NESTEROV], ids=["mean", "nesterov"])
def test_whoever_takes_over_a_bundle_steps_on_exactly_as_its_author_does(run, seed):
    torch.manual_seed(seed)
    author, newcomer = Anchors(run, NUMELS), Anchors(run, NUMELS)
    sizes = author.bundle_numel()
    start(author, SLOT_3, torch.zeros(sizes["slot"]))
    bundle, _ = step(author, SLOT_3, torch.randn(7))
    assert bundle.numel() == sizes["slot"] == (14 if run is NESTEROV else 7)
    start(newcomer, SLOT_3, bundle)
    delta = torch.randn(7)
    assert torch.equal(step(author, SLOT_3, delta)[0], step(newcomer, SLOT_3, delta)[0])


@pytest.mark.parametrize("run", [MEAN, NESTEROV], ids=["mean", "nesterov"])
def test_an_anchor_steps_as_torchs_sgd_does(run, seed):
    torch.manual_seed(seed)
    anchors, parameter = Anchors(run, NUMELS), nn.Parameter(torch.randn(11))
    settings = {"lr": 0.7, "momentum": 0.9, "nesterov": True} if run is NESTEROV else {"lr": 1.0}
    sgd = torch.optim.SGD([parameter], **settings)
    start(anchors, SHARED, torch.cat([parameter.detach(), torch.zeros(anchors.bundle_numel()[SHARED] - 11)]))
    for _ in range(4):
        parameter.grad = torch.randn(11)
        step(anchors, SHARED, parameter.grad.clone())
        sgd.step()
    torch.testing.assert_close(anchors.weights(SHARED), parameter.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("run", [MEAN, NESTEROV], ids=["mean", "nesterov"])
def test_an_anchor_on_the_disk_steps_as_one_in_memory_and_its_file_does_not_change(run, tmp_path, seed, monkeypatch):
    monkeypatch.setattr(paged, "PIECE_NUMEL", 4)
    torch.manual_seed(seed)
    bundle, path = torch.randn(Anchors(run, NUMELS).bundle_numel()[SHARED]), tmp_path / "bundle"
    path.write_bytes(bundle.numpy().tobytes())
    on_disk, in_memory, local = Anchors(run, NUMELS), Anchors(run, NUMELS), torch.randn(11)
    on_disk.set(SHARED, PagedVector.of_file(path))
    start(in_memory, SHARED, bundle)
    assert torch.equal(on_disk.weights(SHARED), in_memory.weights(SHARED))
    other = in_memory.contribution(SHARED, local.clone(), None, 1)
    delta = on_disk.contribution(SHARED, local, None, 1)
    assert torch.equal(delta, other) and delta.data_ptr() == local.data_ptr()
    stepped, expected = on_disk.stepped(SHARED, delta)[0], in_memory.stepped(SHARED, delta)[0]
    assert torch.equal(stepped, expected) and stepped.data_ptr() != delta.data_ptr()
    rounded = Anchors(run.model_copy(update={"codecs": CodecConfig(shared="int8")}), NUMELS)
    rounded.set(SHARED, PagedVector.of_file(path))
    in_place = rounded.stepped(SHARED, mean := delta.clone())[0]
    assert torch.equal(in_place, expected) and (in_place.data_ptr() == mean.data_ptr()) == (run is MEAN)
    on_disk.weights(SHARED).zero_()
    assert path.read_bytes() == bundle.numpy().tobytes()
    path.unlink()
    assert torch.equal(on_disk.weights(SHARED), bundle[:11]), "a deleted version is read as long as it is an anchor"


def test_a_delta_is_anchor_minus_local_and_committing_it_arrives_at_local(seed):
    torch.manual_seed(seed)
    anchors, local = Anchors(MEAN, NUMELS), torch.randn(11)
    start(anchors, SHARED, torch.zeros(11))
    step(anchors, SHARED, anchors.contribution(SHARED, local.clone(), None, 1))
    assert torch.equal(anchors.weights(SHARED), local)


def test_averaged_moments_ride_behind_the_delta_and_come_out_of_the_commit(seed):
    torch.manual_seed(seed)
    anchors = Anchors(RunConfig(), NUMELS)
    local, moments = torch.randn(7), torch.rand(14)
    start(anchors, SLOT_2, torch.randn(7))
    contribution = anchors.contribution(SLOT_2, local.clone(), moments, 1)
    assert contribution.numel() == Format(anchors.segments()["slot"]).numel == 21
    assert torch.equal(contribution[7:], moments)
    assert torch.equal(step(anchors, SLOT_2, contribution)[1], moments)
    torch.testing.assert_close(anchors.weights(SLOT_2), local)


def test_a_contribution_travels_as_the_run_says():
    codecs = CodecConfig(shared="int4", slots="int8", moments="int8", moments_interval=3)
    segments = Anchors(RunConfig(codecs=codecs), NUMELS).segments()
    assert segments == {
        kind: (
            Segment(numel, codec),
            Segment(numel, "int8", interval=3),
            Segment(numel, "int8", non_negative=True, interval=3),
        )
        for kind, numel, codec in ((SHARED, 11, "int4"), ("slot", 7, "int8"))
    }
    assert Anchors(MEAN, NUMELS).segments() == {SHARED: (Segment(11, "fp32"),), "slot": (Segment(7, "fp32"),)}


@pytest.mark.parametrize("round", range(1, 8))
def test_moments_stay_at_home_in_rounds_between(round):
    anchors = Anchors(RunConfig(codecs=CodecConfig(moments_interval=3)), NUMELS)
    start(anchors, SHARED, torch.ones(11))
    contribution = anchors.contribution(SHARED, torch.zeros(11), torch.full((22,), 5.0), round)
    assert contribution.numel() == (33 if round in (3, 6) else 11)
    _, moments = step(anchors, SHARED, contribution)
    assert moments is None if round not in (3, 6) else torch.equal(moments, torch.full((22,), 5.0))
    assert torch.equal(anchors.weights(SHARED), torch.zeros(11))


def test_who_has_trained_nothing_brings_no_moments():
    anchors = Anchors(RunConfig(), NUMELS)
    start(anchors, SHARED, torch.ones(11))
    assert not anchors.contribution(SHARED, torch.ones(11), None, 1).any()


def test_a_forgotten_slot_leaves_neither_weights_nor_momentum():
    anchors = Anchors(NESTEROV, NUMELS)
    start(anchors, SLOT_0, torch.ones(14))
    anchors.forget(SLOT_0)
    assert anchors.names == ()
    start(anchors, SLOT_0, torch.cat([torch.ones(7), torch.zeros(7)]))
    assert torch.equal(step(anchors, SLOT_0, torch.zeros(7))[0][7:], torch.zeros(7))


def test_a_merge_moves_held_slots_as_merge_experts_moves_the_anchors(seed):
    torch.manual_seed(seed)
    merge, model = MergeConfig(alpha=0.2, decay_rounds=10, top_k=2), shape()
    layout = Layout(
        build_slot_model(model, vocab_size=32, sequence_length=8, seed=0, claimed=[], storage="fp32").slot_shapes()
    )
    slots = {slot: torch.randn(layout.numel) for slot in range(4)}
    shifts = merge_shifts(merge, 3, layout, slots, held=(1, 3))
    assert set(shifts) == {"slot-1", "slot-3"}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        fused = [
            torch.stack([layout.unflatten(slots[slot])[prefix + name] for slot in range(4)])
            for name in ("gate_up_proj", "down_proj")
        ]
        expected = merge_experts(*fused, merge_alpha(merge, 3), 2)
        for slot in (1, 3):
            moved = layout.unflatten(slots[slot] + shifts[VectorName.of_slot(slot)])
            for name, wanted in zip(("gate_up_proj", "down_proj"), expected, strict=True):
                torch.testing.assert_close(moved[prefix + name], wanted[slot], rtol=1e-6, atol=1e-6)
                assert not torch.equal(moved[prefix + name], layout.unflatten(slots[slot])[prefix + name])


@pytest.mark.parametrize(
    ("merge", "round"),
    [(MergeConfig(), 2), (MergeConfig(alpha=0.2, interval_rounds=3), 2), (MergeConfig(alpha=0.2, decay_rounds=5), 5)],
    ids=["off", "between-intervals", "decayed"],
)
def test_nothing_is_merged_in_rounds_without_a_merge(merge, round):
    layout = Layout({"experts.gate_up_proj": (4, 3), "experts.down_proj": (3, 2)})
    slots = {slot: torch.randn(layout.numel) for slot in range(4)}
    assert merge_shifts(merge, round, layout, slots, held=(0,)) == {}


def test_two_holders_move_a_slot_by_the_same_bits(seed):
    torch.manual_seed(seed)
    layout = Layout({"experts.gate_up_proj": (4, 3), "experts.down_proj": (3, 2)})
    slots = {slot: torch.randn(layout.numel) for slot in range(5)}
    merge = MergeConfig(alpha=0.1)
    one = merge_shifts(merge, 1, layout, slots, held=(0, 2))
    other = merge_shifts(merge, 1, layout, dict(reversed(slots.items())), held=(2, 4))
    assert torch.equal(one["slot-2"], other["slot-2"])


@pytest.mark.parametrize("run", [MEAN, NESTEROV], ids=["mean", "nesterov"])
@pytest.mark.parametrize("family", list(STOCK))
def test_the_first_bundles_are_the_stock_models_weights(family, run, seed):
    set_seed(seed)
    model = shape(family)
    stock = stock_model(model, 32, 8, seed)
    assert type(stock) is STOCK[family]
    built = build_slot_model(model, vocab_size=32, sequence_length=8, seed=seed, claimed=[0], storage="fp32")
    layouts = {SHARED: Layout(built.shared_shapes()), "slot": Layout(built.slot_shapes())}
    anchors = Anchors(run, {kind: layout.numel for kind, layout in layouts.items()})
    settings = run.model_copy(update={"model": model, "seed": seed})
    bundles = build_initial(settings, 32, anchors, layouts)
    assert set(bundles) == {SHARED, *map(VectorName.of_slot, range(4))}
    named = dict(stock.named_parameters())
    seen = set()
    for name, bundle in bundles.items():
        weights = anchors.weights_of(name, bundle)
        assert len(bundle) == len(weights) * (1 if run is MEAN else 2) and not bundle[len(weights) :].any()
        for parameter, tensor in layouts[SHARED if name == SHARED else "slot"].unflatten(weights).items():
            wanted = named[parameter] if name == SHARED else named[parameter][int(name.removeprefix("slot-"))]
            assert torch.equal(tensor, wanted), parameter
            seen.add(parameter)
    assert seen == set(named), "no parameter of the stock model is left out"
