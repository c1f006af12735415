"""Parameters, bytes and slots, against what PyTorch and the peer's own code really hold."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lanes import sample
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from spes_p2p.config import CodecConfig, MachineConfig, ModelConfig, OptimizerName, RunConfig, Storage, TrainConfig
from spes_p2p.config.machine import AttentionName
from spes_p2p.errors import ConfigError
from spes_p2p.model.build import build_slot_model
from spes_p2p.model.frozen import unavailable
from spes_p2p.model.loss import TrainingLoss
from spes_p2p.model.slot_model import SlotModel
from spes_p2p.optim.inner import InnerOptimizer
from spes_p2p.planner.activations import LOGITS_BYTES, Activations
from spes_p2p.planner.memory import (
    PEER_PROGRAM_BYTES,
    RANK_PROGRAM_BYTES,
    Setup,
    disk_bytes,
    fits,
    peer_bytes,
    peer_memory,
    slots_that_fit,
    with_programs,
)
from spes_p2p.planner.size import ModelSize, model_size

SIZE = ModelSize(shared_params=1000, slot_params=300, num_slots=8)
VOCAB = 97
GIB = 2**30


def small_model(**changes: Any) -> ModelConfig:
    shapes = {"hidden_size": 48, "intermediate_size": 32, "num_layers": 3, "num_experts": 5, "top_k": 2}
    return ModelConfig.model_validate(shapes | changes)


def stock_model(model: ModelConfig) -> torch.nn.Module:
    """The plain Hugging Face class of the same shapes, without memory behind it."""
    common: dict[str, Any] = {
        **{"vocab_size": VOCAB, "hidden_size": model.hidden_size, "num_hidden_layers": model.num_layers},
        **{"num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads},
        **{"head_dim": model.hidden_size // model.num_heads, "intermediate_size": model.intermediate_size},
        **{"num_experts_per_tok": model.top_k, "tie_word_embeddings": model.tie_embeddings},
        **{"pad_token_id": None},
    }
    with torch.device("meta"):
        if model.family == "olmoe":
            return OlmoeForCausalLM(OlmoeConfig(**common, num_experts=model.num_experts))
        if model.family == "mixtral":
            return MixtralForCausalLM(MixtralConfig(**common, num_local_experts=model.num_experts))
        common["moe_intermediate_size"] = common.pop("intermediate_size")
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, num_experts=model.num_experts))


def slot_model(
    model: ModelConfig, claimed: int, storage: Storage = "bf16", attention: AttentionName = "sdpa"
) -> SlotModel:
    shape: dict[str, Any] = {"vocab_size": VOCAB, "sequence_length": 64, "seed": 0, "claimed": range(claimed)}
    return build_slot_model(model, **shape, storage=storage, attention=attention)


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "mixtral"])
def test_counts_what_stock_hugging_face_builds(family, tied, num_kv_heads):
    model = small_model(family=family, tie_embeddings=tied, num_kv_heads=num_kv_heads, intermediate_size=20)
    params = dict(stock_model(model).named_parameters())
    expert_params = sum(p.numel() for name, p in params.items() if ".experts." in name)
    size = model_size(model, VOCAB)
    assert size.num_slots * size.slot_params == expert_params
    assert size.shared_params == sum(p.numel() for p in params.values()) - expert_params
    assert size.total_params == sum(p.numel() for p in params.values())


@pytest.mark.parametrize("claimed", [0, 2, 5])
@pytest.mark.parametrize("storage", get_args(Storage))
def test_weights_and_frozen_experts_take_what_the_model_takes(storage, claimed):
    if reason := unavailable(storage):
        pytest.skip(reason)
    model = small_model(hidden_size=64, intermediate_size=64)
    built = slot_model(model, claimed, storage)
    plan = peer_memory(model_size(model, VOCAB), claimed, Setup(storage))
    assert plan.shared_weights == sum(p.nbytes for p in built.shared_parameters().values())
    assert plan.slot_weights == sum(p.nbytes for slot in range(claimed) for p in built.slot_parameters(slot).values())
    assert plan.frozen == sum(bank.frozen.nbytes() for bank in built._banks.values())


@pytest.mark.parametrize("name", get_args(OptimizerName))
@pytest.mark.parametrize("width", [48, 64, 96])
def test_gradients_and_optimizer_state_take_what_the_optimizer_takes(name, width):
    pytest.importorskip("bitsandbytes")
    model = small_model(hidden_size=width, intermediate_size=width)
    built = slot_model(model, claimed=2)
    slots: Mapping[int, Any] = {slot: built.slot_parameters(slot) for slot in range(2)}
    optimizer = InnerOptimizer(built.shared_parameters(), slots, TrainConfig(optimizer=name))
    params = [p for p in built.module.parameters() if p.requires_grad]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step(1e-3)
    state = {kind: tensor for kind, tensor in optimizer.state_tensors().items() if not kind.endswith("/step")}
    size = model_size(model, VOCAB)
    plan = peer_memory(size, 2, Setup(optimizer=name))
    assert plan.gradients == sum(p.grad.nbytes for p in params if p.grad is not None)
    # The last block of a tensor may be a part of one, and has a whole scale.
    assert plan.optimizer == pytest.approx(sum(tensor.nbytes for tensor in state.values()), abs=4 * len(state))


@pytest.mark.parametrize(
    ("claimed", "attention"), [(0, "sdpa"), (2, "sdpa"), (5, "sdpa"), (2, "eager"), (2, "masked"), (5, "chunks")]
)
@pytest.mark.parametrize("precision", sample(["fp32", "bf16"], ["bf16"]))  # full: the same with other factors
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "mixtral"])
def test_activations_are_about_what_autograd_keeps(family, precision, claimed, attention, monkeypatch):
    """The z-loss on the outputs, on in half of the cases, keeps nothing more."""
    if attention == "chunks":
        monkeypatch.setattr("spes_p2p.planner.activations.LOGITS_BYTES", 2**14)
    model = small_model(family=family, hidden_size=64, num_kv_heads=2, intermediate_size=96)
    built = slot_model(model, claimed, attention=attention if attention == "eager" else "sdpa")
    loss = TrainingLoss(built, TrainConfig(precision=precision, output_z_loss=1e-5 if claimed == 2 else 0.0))
    weights = {p.untyped_storage().data_ptr() for p in built.module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tokens_BS1 = torch.randint(VOCAB, (4, 65))
        if attention == "masked":
            tokens_BS1[:, 30] = ~tokens_BS1[:, 30]  # begins a document
        loss(tokens_BS1)
    keeps = {"keeps_scores": attention == "eager", "keeps_masks": attention == "masked"}
    activations = Activations(model, VOCAB, sequences=4, sequence_length=64, precision=precision, **keeps)
    assert activations.kept_bytes == pytest.approx(sum(storage.nbytes() for storage in kept.values()), rel=0.03)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("vocabulary", [1000, 150_000])
@pytest.mark.parametrize("sequences", [1, 64])
def test_logits_are_bounded_whatever_the_microbatch_and_the_vocabulary(precision, vocabulary, sequences):
    model = small_model(num_layers=1)
    shape = {"sequences": sequences, "sequence_length": 2048, "precision": precision}
    some, none = (Activations(model, entries, **shape).num_bytes for entries in (vocabulary, 1))
    rounded = 2 * vocabulary * model.hidden_size if precision == "bf16" else 0  # the head, and its gradient
    assert some - none <= LOGITS_BYTES + 2 * rounded


def test_a_gpu_stacks_the_experts_of_a_layer():
    run = RunConfig.model_validate({"train": {"precision": "bf16"}})
    of = {on_gpu: Setup.of(run, MachineConfig(), 10, on_gpu=on_gpu).activations for on_gpu in (False, True)}
    model = run.model
    stack = 2 * model.num_experts * 2 * model.intermediate_size * model.hidden_size
    assert of[True].num_bytes - of[False].num_bytes == stack


def test_checkpointing_keeps_less_and_a_larger_batch_more():
    once = Activations(small_model(num_layers=12), 1000, sequences=4, sequence_length=128)
    assert replace(once, checkpointing=True).num_bytes < once.num_bytes / 3
    assert replace(once, sequences=8).num_bytes == 2 * once.num_bytes
    run = RunConfig.model_validate({"train": {"batch_size": 8}, "data": {"sequence_length": 32}})
    whole, micro, ranks = (
        Setup.of(run, machine, VOCAB, num_ranks=num_ranks).activations
        for machine, num_ranks in (
            (MachineConfig(), 1),
            (MachineConfig(micro_batch_size=2), 1),
            (MachineConfig(micro_batch_size=8), 4),
        )
    )
    assert whole and micro and ranks
    assert (whole.tokens, micro.tokens, ranks.tokens) == (8 * 32, 2 * 32, 2 * 32)


def test_a_setup_is_what_the_run_says_unless_the_machine_chooses():
    run = RunConfig.model_validate(
        {
            "train": {"optimizer": "muon"},
            "outer": {"moments": "both", "optimizer": "nesterov"},
            "merge": {"alpha": 0.1},
            "frozen_storage": "int8",
        }
    )
    theirs = Setup.of(run, MachineConfig(), None)
    kept = {"averaged_moments": 2, "copies": 2, "kept": "int8"}
    assert theirs == Setup("int8", "muon", outer_momentum=True, merges=True, **kept)
    setup = Setup.of(RunConfig(), MachineConfig(refresh_slots=5), None)
    assert (setup.outer_momentum, setup.refresh_slots) == (False, 5)
    assert Setup.of(run, MachineConfig(micro_batch_size=2), None).accumulates
    exact = RunConfig(frozen_storage="fp32")
    own = Setup.of(exact, MachineConfig(storage="nf4", inner_optimizer="adamw8bit"), None)
    assert own == Setup("nf4", "adamw8bit", averaged_moments=2, copies=2)


def test_vectors_are_those_that_a_round_holds():
    trained, frozen = 1000 + 2 * 300, 6 * 300
    local = Setup("fp32", averaged_moments=0)
    plan = peer_memory(SIZE, 2, local)
    assert plan.vectors == 0  # anchors lie on the disk
    # The averager's inputs, where the contribution is made, its outputs, and what is published.
    assert plan.round_vectors == 4 * (2 + 1) * trained and plan.training_bytes == 16 * trained + 4 * frozen
    assert plan.round_bytes == 12 * trained + 4 * frozen + plan.round_vectors
    wide = replace(SIZE, shared_params=10, slot_params=900)
    assert peer_memory(wide, 1, local).round_vectors == 4 * (2 * 910 + 3 * 900)  # a slot that is fetched
    assert peer_memory(SIZE, 8, local).round_vectors == 4 * (2 + 1) * 3400
    both = peer_memory(SIZE, 2, replace(local, averaged_moments=2))
    # Beside inputs and outputs: one contribution as it is put together with its moments.
    assert both.vectors == 0 and both.round_vectors == 4 * (6 * trained + 6 * 1000)
    nesterov = peer_memory(SIZE, 2, replace(local, outer_momentum=True))
    assert nesterov.vectors == 0 and nesterov.round_vectors == 4 * (2 + 2) * trained
    merging = peer_memory(SIZE, 2, replace(local, merges=True))
    assert merging.round_vectors == 4 * (2 * trained + 4 * 8 * 300 + 2 * 300)
    start = 4 * 1000 + 4 * 8 * 300 + 4 * 1000  # one vector beside the model
    assert plan.startup_bytes == start and plan.device_bytes == max(plan.training_bytes, plan.round_bytes, start)
    assert nesterov.startup_bytes == start + 4 * 1000


def test_what_rounding_leaves_over_is_held_and_what_travels_is_smaller():
    exact = Setup("fp32", averaged_moments=0)
    lossy = replace(exact, codecs=CodecConfig(shared="int4", slots="fp32"))
    before, after = peer_memory(SIZE, 2, exact), peer_memory(SIZE, 2, lossy)
    int4 = 0.5 + 2 / 64
    assert after.vectors == 2 * 1000  # residuals of results: half of a vector, of which the other of two has the rest
    sent = 2 * int4 * 1000 + 2 * 4 * 600 + 2 * 1000
    results = 4 * 1000 + 4 * 3 * 300  # decoded; the bundle of `shared` takes their memory, and a slot is fetched
    assert after.round_vectors == pytest.approx(after.vectors + sent + results, abs=1)
    assert after.startup_bytes == before.startup_bytes
    everything = replace(exact, averaged_moments=2, codecs=CodecConfig(shared="int4", slots="int4", moments="int8"))
    per_element = int4 + 2 * (1 + 2 / 128)
    plan = peer_memory(SIZE, 2, everything)
    held, sent = 2 * 1600, 2 * per_element * 1600 + 2 * 1600
    brought = 4 * 6 * 1000  # `shared` as it is put together with its moments
    assert plan.round_vectors == pytest.approx(held + sent + brought, abs=2)


def test_a_peer_that_is_alone_reduces_and_fetches_nothing():
    exact = Setup("fp32", averaged_moments=0, is_alone=True)
    assert peer_memory(SIZE, 2, exact).round_vectors == 4 * 2 * 1600  # its contribution, and what it publishes
    lossy = replace(exact, codecs=CodecConfig(shared="int4", slots="int4"))
    plan = peer_memory(SIZE, 2, lossy)
    assert plan.vectors == 0 and plan.round_vectors == (0.5 + 2 / 64) * 1600 + 4 * 1600  # encoded, and decoded


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_peer_that_is_not_started_needs_memory_for_its_programs(on_gpu):
    running = Setup(num_ranks=2, on_gpu=on_gpu)
    before, after = (peer_memory(SIZE, 2, setup) for setup in (running, with_programs(running)))
    programs = PEER_PROGRAM_BYTES + RANK_PROGRAM_BYTES
    assert after.host_bytes == before.host_bytes + programs
    assert after.device_bytes == before.device_bytes + (0 if on_gpu else programs)


def test_fsdp_divides_what_is_trained_and_ddp_copies_it():
    size = ModelSize(shared_params=1000, slot_params=300, num_slots=8, matrix_params=600, num_layers=3)
    one, two = Setup(num_ranks=1), Setup(num_ranks=2)
    alone, ddp, fsdp = (peer_memory(size, 2, setup) for setup in (one, two, replace(two, shard="fsdp")))
    trained = 1000 + 2 * 300
    assert alone.static_bytes == 16 * trained + 2 * 6 * 300 and alone.gathered == 0
    assert ddp.static_bytes == alone.static_bytes and ddp.gathered == 4 * trained
    assert fsdp.static_bytes == 8 * trained + 2 * 6 * 300
    assert fsdp.gathered == 4 * (2 * 400 + 3 * (600 + 2 * 300) // 3)
    several = replace(two, shard="fsdp", accumulates=True)
    assert peer_memory(size, 2, several).gathered == fsdp.gathered + 4 * trained
    assert ddp.training_bytes == 2 * (alone.static_bytes + ddp.gathered)
    eight = replace(two, shard="fsdp", num_ranks=8)
    # All ranks put a vector and its moments together, the leader once more to send them.
    assert peer_memory(size, 2, eight).round_vectors == 4 * (2 * 3 * trained + (6 + 7 * 4) * 1000)


def test_disk_holds_the_outer_momentum_and_what_codecs_round_off():
    plain = Setup("fp32", averaged_moments=0)
    assert disk_bytes(SIZE, 2, 1, plain) == 4 * (3400 + 3 * 1600)
    assert disk_bytes(SIZE, 2, 2, replace(plain, outer_momentum=True)) == 2 * 4 * (6800 + 3 * 1600)
    assert disk_bytes(SIZE, 2, 1, replace(plain, codecs=CodecConfig(shared="int4"))) == 4 * (3400 + 3 * 1600 + 1000)
    assert disk_bytes(SIZE, 2, 1, replace(plain, kept="bf16")) == 4 * (1000 + 4 * 300 + 3 * 1600) + 2 * 8 * 300


def test_a_gpu_holds_what_is_trained_and_the_host_the_rounds_vectors():
    gpu = peer_memory(SIZE, 2, Setup(num_ranks=2, shard="fsdp", on_gpu=True))
    assert gpu.device_bytes == gpu.rank_bytes == gpu.static_bytes + gpu.gathered
    assert gpu.host_bytes == max(gpu.round_vectors, gpu.startup_bytes) > gpu.device_bytes


@given(
    **{"shared": st.integers(0, 10**12), "slot": st.integers(1, 10**11), "num_slots": st.integers(1, 64)},
    **{"storage": st.sampled_from(get_args(Storage)), "optimizer": st.sampled_from(get_args(OptimizerName))},
    **{"moments": st.integers(0, 2), "merges": st.booleans(), "on_gpu": st.booleans()},
    **{"memory": st.integers(0, 2**46)},
)
def test_claims_as_many_slots_as_fit_and_not_one_more(
    shared, slot, num_slots, storage, optimizer, moments, merges, on_gpu, memory
):
    size = ModelSize(shared, slot, num_slots)
    setup = Setup(storage, optimizer, averaged_moments=moments, merges=merges, on_gpu=on_gpu)
    needs = [peer_bytes(size, claimed, setup) for claimed in range(1, num_slots + 1)]
    assert needs == sorted(needs)
    if needs[0] > memory:
        with pytest.raises(ConfigError, match="training 1 slot needs"):
            slots_that_fit(size, setup, memory)
        return
    claimed = slots_that_fit(size, setup, memory)
    assert needs[claimed - 1] <= memory and (claimed == num_slots or needs[claimed] > memory)


def test_on_a_gpu_both_memories_count():
    setup = Setup(on_gpu=True)
    plan = peer_memory(SIZE, 4, setup)
    assert slots_that_fit(SIZE, setup, plan.device_bytes) == 4
    assert slots_that_fit(SIZE, setup, 10**9, plan.host_bytes) == 4
    with pytest.raises(ConfigError, match=r"on the host, .* more than the 1e-05 MB there are"):
        slots_that_fit(SIZE, setup, 10**9, 10)


def test_too_little_memory_says_how_much_is_missing_and_which_flags_take_less():
    size = ModelSize(shared_params=10**9, slot_params=10**9, num_slots=8)
    setup = Setup("fp32", "adamw", averaged_moments=0, on_gpu=True)
    activations = Activations(small_model(hidden_size=1024), 10**5, sequences=8, sequence_length=1024)
    storage, narrow = "--storage nf4", "--inner-optimizer adamw8bit"
    cases = [
        (setup, [storage, narrow]),
        (replace(setup, activations=activations), [storage, narrow, "--micro-batch-size 1", "--activation-checkpoint"]),
        (replace(setup, optimizer="muon"), [storage]),  # which makes other steps
        (replace(setup, kept="bf16", shard="fsdp", num_ranks=2), []),  # slots travel so; a rank has parts
        (replace(setup, storage="nf4", optimizer="adamw8bit"), ["--gradients bf16"]),
    ]
    for each, offered in cases:
        needed = peer_bytes(size, 1, each)
        with pytest.raises(ConfigError, match=r"training 1 slot needs .* GB, 1 GB more than the .*; ") as refused:
            slots_that_fit(size, each, needed - 10**9)
        said = str(refused.value)
        assert all(flag in said for flag in offered) and said.count("--") == len(offered)
        assert "join a run with a smaller model" in said


def test_fits_agrees_with_what_is_needed():
    needed = peer_bytes(SIZE, 3, Setup())
    assert fits(SIZE, 3, Setup(), needed) and not fits(SIZE, 3, Setup(), needed - 1)
