"""Anchors step as the outer optimizer says, and what is published of them is all that a newcomer needs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import MixtralForCausalLM, OlmoeForCausalLM, Qwen3MoeForCausalLM, set_seed

from spes_p2p.codecs import Layout
from spes_p2p.config import MergeConfig, ModelConfig, OuterConfig, RunConfig
from spes_p2p.model.build import build_slot_model, stock_model
from spes_p2p.optim.merge import merge_alpha, merge_experts
from spes_p2p.swarm.roster import SHARED, slot_name
from spes_p2p.training.anchors import Anchors, initial_bundles, merge_shifts

NUMELS = {SHARED: 11, "slot": 7}
MEAN = RunConfig(outer=OuterConfig(moments="local"))
NESTEROV = RunConfig(outer=OuterConfig(optimizer="nesterov", lr=0.7, momentum=0.9, moments="local"))
STOCK = {"olmoe": OlmoeForCausalLM, "qwen3_moe": Qwen3MoeForCausalLM, "mixtral": MixtralForCausalLM}


def shape(family: str = "olmoe", **changes) -> ModelConfig:
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 8}
    return ModelConfig.model_validate({"family": family, "num_experts": 4, "top_k": 2, **sizes, **changes})


@pytest.mark.parametrize("run", [MEAN, NESTEROV], ids=["mean", "nesterov"])
def test_whoever_takes_over_a_bundle_steps_on_exactly_as_its_author_does(run, seed):
    torch.manual_seed(seed)
    author, newcomer = Anchors(run, NUMELS), Anchors(run, NUMELS)
    sizes = author.bundle_numel()
    author.set("slot-3", torch.zeros(sizes["slot"]))
    author.commit("slot-3", torch.randn(7))
    bundle = author.bundle("slot-3")
    assert bundle.numel() == sizes["slot"] == (14 if run is NESTEROV else 7)
    newcomer.set("slot-3", bundle)
    assert newcomer.digest("slot-3") == author.digest("slot-3")
    delta = torch.randn(7)
    for anchors in (author, newcomer):
        anchors.commit("slot-3", delta)
    assert torch.equal(author.bundle("slot-3"), newcomer.bundle("slot-3"))


@pytest.mark.parametrize("run", [MEAN, NESTEROV], ids=["mean", "nesterov"])
def test_an_anchor_steps_as_torchs_sgd_does(run, seed):
    torch.manual_seed(seed)
    anchors, parameter = Anchors(run, NUMELS), nn.Parameter(torch.randn(11))
    settings = {"lr": 0.7, "momentum": 0.9, "nesterov": True} if run is NESTEROV else {"lr": 1.0}
    sgd = torch.optim.SGD([parameter], **settings)
    start = parameter.detach()
    anchors.set(SHARED, torch.cat([start, torch.zeros(anchors.bundle_numel()[SHARED] - 11)]))
    for _ in range(4):
        parameter.grad = torch.randn(11)
        anchors.commit(SHARED, parameter.grad.clone())
        sgd.step()
    torch.testing.assert_close(anchors.weights(SHARED), parameter.detach(), rtol=1e-6, atol=1e-6)


def test_an_anchor_shares_no_memory_with_what_it_was_made_from():
    anchors, bundle = Anchors(NESTEROV, NUMELS), torch.ones(22)
    anchors.set(SHARED, bundle)
    bundle.zero_()
    anchors.bundle(SHARED).zero_()
    assert torch.equal(anchors.bundle(SHARED), torch.ones(22))


def test_a_delta_is_anchor_minus_local_and_committing_it_arrives_at_local(seed):
    torch.manual_seed(seed)
    anchors, local = Anchors(MEAN, NUMELS), torch.randn(11)
    anchors.set(SHARED, torch.zeros(11))
    anchors.commit(SHARED, anchors.contribution(SHARED, local, None))
    assert torch.equal(anchors.weights(SHARED), local)


def test_averaged_moments_ride_behind_the_delta_and_come_out_of_the_commit(seed):
    torch.manual_seed(seed)
    anchors = Anchors(RunConfig(), NUMELS)
    start, local, moments = torch.randn(7), torch.randn(7), torch.rand(14)
    anchors.set("slot-2", start)
    contribution = anchors.contribution("slot-2", local, moments)
    assert contribution.numel() == anchors.averaged_numel()["slot"] == 21
    assert torch.equal(contribution[7:], moments)
    assert torch.equal(anchors.commit("slot-2", contribution), moments)
    torch.testing.assert_close(anchors.weights("slot-2"), local)
    assert anchors.bundle_numel()["moments-slot"] == 14


def test_who_has_trained_nothing_brings_no_moments():
    anchors = Anchors(RunConfig(), NUMELS)
    anchors.set(SHARED, torch.ones(11))
    assert not anchors.contribution(SHARED, torch.ones(11), None).any()


def test_a_forgotten_slot_leaves_neither_weights_nor_momentum():
    anchors = Anchors(NESTEROV, NUMELS)
    anchors.set("slot-0", torch.ones(14))
    anchors.forget("slot-0")
    assert anchors.names == ()
    anchors.set("slot-0", torch.cat([torch.ones(7), torch.zeros(7)]))
    assert torch.equal(anchors.bundle("slot-0")[7:], torch.zeros(7))


# ---------------------------------------------------------------------- SPES's merge


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
            moved = layout.unflatten(slots[slot] + shifts[slot_name(slot)])
            for name, wanted in zip(("gate_up_proj", "down_proj"), expected, strict=True):
                torch.testing.assert_close(moved[prefix + name], wanted[slot], rtol=1e-6, atol=1e-6)
                assert not torch.equal(moved[prefix + name], layout.unflatten(slots[slot])[prefix + name])


@pytest.mark.parametrize(
    ("merge", "round"),
    [
        (MergeConfig(), 2),
        (MergeConfig(alpha=0.2, interval_rounds=3), 2),
        (MergeConfig(alpha=0.2, decay_rounds=5), 5),
    ],
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


# ---------------------------------------------------------------------- the run's start


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
    bundles = initial_bundles(anchors, layouts, stock.state_dict(), 4)
    assert set(bundles) == {SHARED, *map(slot_name, range(4))}
    named = dict(stock.named_parameters())
    seen = set()
    for name, bundle in bundles.items():
        weights, momentum = anchors.split(name, bundle)
        assert momentum is None if run is MEAN else not momentum.any()
        for parameter, tensor in layouts[SHARED if name == SHARED else "slot"].unflatten(weights).items():
            wanted = named[parameter] if name == SHARED else named[parameter][int(name.removeprefix("slot-"))]
            assert torch.equal(tensor, wanted), parameter
            seen.add(parameter)
    assert seen == set(named), "no parameter of the stock model is left out"
