"""A run that starts from a checkpoint computes and trains as stock does, loses no setting, or is refused by name."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import CONFIGS, EXPERTS, MIXTURES, ROWS, SEQUENCE, VOCAB, Batches, saved, stock, tokens
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from virtual import World

from spes_p2p.codecs.vectors import digest
from spes_p2p.config import DataConfig, ModelConfig, OuterConfig, RunConfig, TrainConfig
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.model.build import build_slot_model, outline
from spes_p2p.model.export import save_checkpoint
from spes_p2p.model.loss import held_out_loss
from spes_p2p.model.start import StartWeights, model_of
from spes_p2p.peer.life import _slots_by_data
from spes_p2p.planner.size import model_size
from spes_p2p.swarm.exchange.versions import RefusedVersions, Version
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.build import StartBundles, WholeModel, with_digests
from spes_p2p.training.ranks import Ranks
from spes_p2p.training.slots import HeldSlots
from spes_p2p.training.trainer import ROUTING_BATCHES, Trainer

families = pytest.mark.parametrize("family", sorted(CONFIGS))


def started(source: Path, **settings: Any) -> RunConfig:
    run = RunConfig(data=DataConfig(sequence_length=SEQUENCE), **settings)
    return with_digests(run.model_copy(update={"model": model_of(source)}), VOCAB, source)


def edit(source: Path, **fields: Any) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | fields))


@families
def test_logits_and_every_field_of_the_configuration_are_the_checkpoints(tmp_path, family):
    source = saved(tmp_path / "stock", family)
    run = started(source)
    size = model_size(run.model, VOCAB)
    model = outline(run.model, VOCAB, SEQUENCE)
    weights = StartWeights(source, model)
    assert sum(tensor.numel() for tensor in weights.read(None).values()) == size.shared_params
    for slot in range(model.num_slots):
        assert sum(tensor.numel() for tensor in weights.read(slot).values()) == size.slot_params
    assert model.num_slots == (EXPERTS if family in MIXTURES else 0)
    assert save_checkpoint(model, tmp_path / "again", weights.read) == size.total_params
    before, after = (AutoModelForCausalLM.from_pretrained(each).eval() for each in (source, tmp_path / "again"))
    ids_BT = tokens(2, SEQUENCE)
    with torch.no_grad():
        torch.testing.assert_close(after(ids_BT).logits, before(ids_BT).logits, rtol=0, atol=1e-5)
    told = {"_name_or_path", "transformers_version", "dtype", "output_router_logits"}
    lost = {
        name: (value, after.config.to_dict().get(name))
        for name, value in before.config.to_dict().items()
        if name not in told and after.config.to_dict().get(name) != value
    }
    assert not lost


@families
def test_a_checkpoint_in_several_files_of_bf16_gives_the_same_start_as_one_file(tmp_path, family):
    model = stock(family).bfloat16()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "several", max_shard_size="15KB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 3
    assert started(tmp_path / "one") == started(tmp_path / "several")


def test_a_head_that_only_the_configuration_ties_is_refused_and_an_equal_one_is_not(tmp_path):
    source = saved(tmp_path / "a", "olmoe")
    edit(source, tie_word_embeddings=True)
    with pytest.raises(DataError, match="they differ; set tie_word_embeddings to false there"):
        started(source)
    state = load_file(source / "model.safetensors")
    equal = state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
    save_file(equal, source / "model.safetensors", metadata={"format": "pt"})
    assert started(source)


def test_experts_may_be_stored_fused(tmp_path):
    one_by_one = saved(tmp_path / "a", "olmoe")
    fused = saved(tmp_path / "b", "olmoe")
    state = {name: tensor.contiguous() for name, tensor in stock("olmoe").state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    save_file(state, fused / "model.safetensors", metadata={"format": "pt"})
    assert started(one_by_one) == started(fused)


@families
def test_twenty_steps_from_a_checkpoint_have_the_losses_of_a_plain_loop(tmp_path, family):
    source = saved(tmp_path / "stock", family)
    train = TrainConfig(
        **{"batch_size": 2, "lr": 5e-4, "schedule": "constant", "warmup_rounds": 0.0, "weight_decay": 0.1},
        **{"balance_loss": 0.0, "router_z_loss": 0.0, "clip_norm": 1.0},
    )
    run = started(source, train=train)
    batches = [tokens(2, SEQUENCE + 1).roll(step, 1) for step in range(20)]
    for ids_BT in batches:  # documents that begin, and end, as those of Llama and Gemma do
        ids_BT[:, 0], ids_BT[:, 9:11] = 3, torch.tensor([5, 3])
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=5e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    expected = []
    for ids_BT in batches:
        loss = torch.nn.functional.cross_entropy(plain(ids_BT[:, :-1]).logits.flatten(0, 1), ids_BT[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss))

    slots = range(run.model.num_experts)
    model = build_slot_model(
        run.model, vocab_size=VOCAB, sequence_length=SEQUENCE, seed=None, claimed=slots, storage="fp32"
    )
    weights = StartWeights(source, model)
    model.load_shared(weights.read(None))
    for slot in slots:
        model.load_slot(slot, weights.read(slot))
    trainer = Trainer(model, train, Batches(batches), Ranks("cpu"))
    losses = [trainer.step(5e-4).loss for _ in batches]
    print(f"{family}: largest difference {max(abs(a - b) for a, b in zip(losses, expected, strict=True)):.1e}")
    assert losses == pytest.approx(expected, rel=0, abs=1e-5)
    assert expected[-1] < expected[0] - 0.25, "it learns"


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "granite", "mistral"])
def test_the_loss_in_chunks_is_that_of_the_logits_as_the_family_makes_them(tmp_path, monkeypatch, family):
    monkeypatch.setattr("spes_p2p.planner.activations.LOGITS_BYTES", 5 * 4 * ROWS)
    source, ids_BT = saved(tmp_path / "stock", family), tokens(2, SEQUENCE + 1)
    run = started(source)
    model = build_slot_model(
        run.model, vocab_size=VOCAB, sequence_length=SEQUENCE, seed=None, claimed=(), storage="fp32"
    )
    model.load_shared(StartWeights(source, model).read(None))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(source)(ids_BT[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten())
    assert held_out_loss(model.module, [ids_BT]) == pytest.approx(float(expected), abs=1e-5)


def test_bundles_are_read_when_asked_for_and_are_the_manifests(tmp_path):
    source = saved(tmp_path / "stock", "qwen3_moe")
    run = started(source, outer=OuterConfig(optimizer="nesterov"))
    bundles = StartBundles(run, VOCAB, source)
    assert list(bundles) == [SHARED, *map(VectorName.of_slot, range(EXPERTS))]
    assert run.model.start is not None and digest(bundles[SHARED]) == run.model.start.shared
    shared_N, size = bundles[SHARED], model_size(run.model, VOCAB)
    assert len(shared_N) == 2 * size.shared_params and not shared_N[size.shared_params :].any(), "momentum begins at 0"
    other = saved(tmp_path / "other", "qwen3_moe")
    tensors = load_file(other / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    tensors[name][0, 0] += 1e-3
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    changed = StartBundles(run, VOCAB, other)
    assert torch.equal(changed[VectorName.of_slot(1)], bundles[VectorName.of_slot(1)])
    with pytest.raises(ConfigError, match="not the checkpoint that the run starts from: its slot-2 is another"):
        changed.check()


def test_a_peer_without_the_checkpoint_takes_the_kept_forms_that_the_manifest_names(tmp_path):
    source = saved(tmp_path / "stock", "olmoe")
    assert started(source, frozen_storage="fp32").model.start.kept == []
    run = started(source, frozen_storage="int8")
    bundles, start = StartBundles(run, VOCAB, source), run.model.start
    slots = [VectorName.of_slot(slot) for slot in range(EXPERTS)]
    assert start.kept == [digest(bundles.anchors.form.encode(bundles[name])) for name in slots]
    world = World(EXPERTS)
    numels = {kind: len(bundles[name]) for kind, name in ((SHARED, SHARED), ("slot", slots[0]))}
    swarms = [world.swarm(index) for index in range(2)]
    founder, newcomer = (
        HeldSlots(swarm, run, run_id="run", anchors=Anchors(run, numels), max_slots=1) for swarm in swarms
    )
    for swarm in swarms:
        world.enter(swarm, run, bundles.anchors.vectors())
    for name in bundles:
        founder.publish_initial(name, bundles[name])
    founder.announce("active")
    newcomer.resume([2])
    newcomer.fetch()
    assert newcomer.unloaded == {SHARED, *slots}
    found = {name: version.digest for name, version in swarms[1].versions().items()}
    expected = {SHARED: start.shared, slots[2]: start.slots[2]}
    assert found == expected | {name.kept: each for name, each in zip(slots, start.kept, strict=True)}
    with pytest.raises(ValidationError, match="names 0 kept forms, and the run has 4 slots in bf16"):
        RunConfig(model=run.model.model_copy(update={"start": start.model_copy(update={"kept": []})}))


def test_a_version_of_round_0_that_the_manifest_does_not_name_is_refused(tmp_path):
    refused = RefusedVersions()
    refused.initial = {"slot-1": digest(torch.ones(4))}
    true, false = (Version.of("slot-1", 0, torch.full((4,), x).numpy().tobytes()) for x in (1.0, 2.0))
    later = Version.of("slot-1", 1, torch.zeros(4).numpy().tobytes())
    assert [refused.refuses(version) for version in (true, false, later)] == [False, True, False]


def test_a_model_without_all_slots_is_not_evaluated(tmp_path):
    run = started(saved(tmp_path / "stock", "mixtral"))
    few: dict[str, Any] = dict.fromkeys((SHARED, VectorName.of_slot(0)), SimpleNamespace(round=0))
    with pytest.raises(Exception, match="3 slots have no version yet, not even of round 0"):
        WholeModel(run, VOCAB).load(few, lambda name: torch.zeros(0))


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("olmoe", {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "holds GPT2LMHeadModel; give --from"),
        ("olmoe", {"architectures": ["OlmoeModel"]}, "holds OlmoeModel"),
        ("olmoe", {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ("olmoe", {"num_experts": 256}, "256 experts per layer, and a run has 128 slots at most"),
        ("olmoe", {"hidden_act": "gelu"}, "sets hidden_act='gelu', where a run has 'silu'"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"sets mlp_only_layers=\[1\]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "sets decoder_sparse_step=2"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, "sets sliding_window=8"),
        ("mixtral", {"sliding_window": 16}, "sets sliding_window=16, where a run has None"),
        ("mixtral", {"num_key_value_heads": 3}, "does not divide"),
        ("mixtral", {"vocab_size": 10**9}, "vocab_size"),
        ("olmoe", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}}, "config.json"),
        ("llama", {"mlp_bias": True}, "sets mlp_bias=True"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": 1}, "=8"),
        ("gemma", {"use_bidirectional_attention": True}, "sets use_bidirectional_attention=True"),
        ("gemma", {"model_type": "cohere", "architectures": ["CohereForCausalLM"]}, "holds CohereForCausalLM"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "sets use_bidirectional_attention=True, which no run"),
        ("phi3", {"resid_pdrop": 0.1}, "sets resid_pdrop=0.1, which no run has"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantised"),
        ("olmoe", {"rms_norm_eps": -1.0}, "norm_eps"),
        ("olmoe", {"attention_dropout": 0.1}, "sets attention_dropout=0.1"),
        ("mixtral", {"router_jitter_noise": 0.1}, "sets router_jitter_noise=0.1"),
    ],
)
def test_what_a_run_cannot_express_is_refused_by_name(tmp_path, family, fields, message):
    source = saved(tmp_path / "stock", family)
    edit(source, **fields)
    with pytest.raises((ConfigError, DataError), match=message):
        model_of(source)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("olmoe", {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}),
        ("olmoe", {"architectures": None, "output_hidden_states": True, "router_aux_loss_coef": 0.5}),
        ("llama", {"pretraining_tp": 2, "sliding_window": 8, "clip_qkv": 8.0}),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 10_000}),
        ("mixtral", {"sliding_window": 64, "attention_bias": True, "norm_topk_prob": False}),
        ("qwen3", {"sliding_window": 8, "max_window_layers": 1, "layer_types": None}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "layer_types": None}),
        ("gemma", {"use_bidirectional_attention": False, "hidden_activation": "gelu", "attention_dropout": 0}),
    ],
)
def test_what_no_code_of_the_model_reads_does_not_count(tmp_path, family, fields):
    source = saved(tmp_path / "stock", family)
    edit(source, **fields)
    run = started(source)
    before, after = AutoModelForCausalLM.from_pretrained(source), outline(run.model, VOCAB, SEQUENCE)
    save_checkpoint(after, tmp_path / "again", StartWeights(source, after).read)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(again(tokens(2, SEQUENCE)).logits, before(tokens(2, SEQUENCE)).logits, rtol=0, atol=1e-5)


def test_damaged_and_foreign_checkpoints_are_refused_before_anything_is_written(tmp_path):
    source = saved(tmp_path / "stock", "olmoe")
    with pytest.raises(DataError, match=r"no checkpoint \(no config.json\); give --from"):
        model_of(tmp_path / "nothing")
    run = RunConfig(data=DataConfig(sequence_length=SEQUENCE))
    with pytest.raises(ConfigError, match="tokenizer has 321 entries"):
        with_digests(run.model_copy(update={"model": model_of(source)}), ROWS + 1, source)
    long = RunConfig(model=model_of(source), data=DataConfig(sequence_length=65))
    with pytest.raises(ConfigError, match="sequence_length=65 exceeds the 64 positions"):
        with_digests(long, VOCAB, source)
    with pytest.raises(ConfigError, match="starts from no checkpoint"):
        StartBundles(run, VOCAB, source)
    weights = source / "model.safetensors"
    whole = load_file(weights)
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    for tensors, message in (
        ({key: value for key, value in whole.items() if key != name}, f"tensor {name} is missing"),
        (whole | {name: whole[name][:5].clone()}, rf"tensor {name} has shape \[5, 32\], not \[48, 32\]"),
        (whole | {name: torch.full_like(whole[name], torch.nan)}, f"tensor {name} is not of finite"),
    ):
        save_file(tensors, weights, metadata={"format": "pt"})
        with pytest.raises(DataError, match=message):
            started(source)
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(DataError, match="cannot read"):
        started(source)
    weights.unlink()
    with pytest.raises(DataError, match=r"lacks model\.safetensors"):
        started(source)


@pytest.mark.parametrize(
    ("family", "start", "message"),
    [
        ("olmoe", {"slots": ["1" * 64] * 3}, "names 3 slots, but model.num_experts=4"),
        ("olmoe", {"pad_token_id": 8}, "pad_token_id=8 has no row in an embedding of 8"),
        ("olmoe", {"rope": {"rope_type": "llama3", "factor": 2.0}}, "rope_type=llama3 needs original_max"),
        ("olmoe", {"head_dim": 64}, "head_dim=64 is no setting of olmoe"),
        ("mixtral", {"attention_bias": True}, "attention_bias=True is no setting of mixtral"),
        ("llama", {}, "names 4 slots, but model.num_experts=0"),
        ("gemma", {"slots": [], "clip_qkv": 1.0}, "clip_qkv=1.0 is no setting of gemma"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(family, start, message):
    """Without these checks transformers would end a joiner with an error of its own."""
    experts = {"num_experts": EXPERTS if family in MIXTURES else 0, "top_k": 2 if family in MIXTURES else 0}
    whole = {"vocab_size": 8, "max_position_embeddings": 8, "shared": "0" * 64, "slots": ["1" * 64] * EXPERTS}
    with pytest.raises(ValidationError, match=re.escape(message)):
        ModelConfig.model_validate({"family": family, **experts, "start": whole | start})


def test_a_carried_configuration_has_settings_of_its_family_alone_and_the_tensors_that_it_names(tmp_path):
    """Transformers would fetch a kernel that a manifest names from the hub, and run it."""
    model = model_of(saved(tmp_path / "stock", "qwen2"))
    start = model.start
    assert start is not None
    for changes, message in (
        (
            {"config": start.config | {"attn_implementation": "someone/kernel"}},
            "Qwen2Config lacks: attn_implementation",
        ),
        ({"config": start.config | {"auto_map": {}}}, "lacks: auto_map; leave this run"),
        ({"config": start.config | {"hidden_act": "none"}}, "settings make no"),
        ({"config": start.config | {"rope_parameters": 3}}, "settings make no"),
        ({"tensors": start.tensors[1:]}, "has other tensors than its manifest says; leave this run"),
    ):
        changed = model.model_copy(update={"start": start.model_copy(update=changes)})
        with pytest.raises(ConfigError, match=message):
            outline(changed, VOCAB, SEQUENCE)
    larger = start.config | {"num_hidden_layers": 10**6, "vocab_size": 10**9}
    bounded = model.model_copy(update={"start": start.model_copy(update={"config": larger})})
    assert outline(bounded, VOCAB, SEQUENCE).shapes() == outline(model, VOCAB, SEQUENCE).shapes()
    shape = model.model_dump() | {"start": start.model_copy(update={"tensors": []}).model_dump()}
    for changed in (shape, shape | {"start": None}):
        with pytest.raises(ValidationError, match=r"model\.family=qwen2 needs a checkpoint to start from; name one"):
            ModelConfig.model_validate(changed)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"family": "llama"}, "model.num_experts=16 does not go with model.family=llama; set it to 0"),
        ({"family": "gemma", "num_experts": 0}, "model.top_k=2 does not go with model.family=gemma; set it to 0"),
        ({"family": "olmoe", "num_experts": 0, "top_k": 0}, "model.num_experts=0 does not go with model.family=olmoe"),
        ({"family": "mixtral", "top_k": 0}, "model.top_k=0 does not go with model.family=mixtral; set it to 1 or"),
    ],
)
def test_a_dense_family_has_no_experts_and_a_mixture_has_some(shape, message):
    with pytest.raises(ValidationError, match=re.escape(message)):
        ModelConfig.model_validate(shape)


def test_slots_are_chosen_by_the_routing_of_own_data(tmp_path, seed):
    """What stock routers choose of the next batches; afterwards the data go on where they were."""
    source = saved(tmp_path / "stock", "qwen3_moe")
    run = started(source, train=TrainConfig(batch_size=4))
    model = build_slot_model(
        run.model, vocab_size=VOCAB, sequence_length=SEQUENCE, seed=None, claimed=(), storage="fp32"
    )
    ids_NT = torch.randint(VOCAB, (4 * ROUTING_BATCHES + 4, SEQUENCE + 1))
    trainer = Trainer(model, run.train, Repeatable(ids_NT), Ranks("cpu"))
    bundles = StartBundles(run, VOCAB, source)
    chosen = _slots_by_data(trainer, lambda: bundles, 2)
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        logits = plain(ids_NT[:-4, :-1], output_router_logits=True).router_logits
    experts = torch.cat([layer_TE.topk(2, dim=-1).indices.flatten() for layer_TE in logits])
    counts = experts.bincount(minlength=EXPERTS)
    assert chosen == counts.argsort(descending=True, stable=True)[:2].tolist(), counts
    assert torch.equal(trainer.data.next_batch(4), ids_NT[:4])
    with pytest.raises(ConfigError, match=r"--slots-by-data: it needs this machine's copy of the model \(--from\)"):
        _slots_by_data(trainer, None, 2)


class Repeatable:
    """Sequences in their order, from a place that can be restored."""

    def __init__(self, ids_NT: torch.Tensor) -> None:
        self._ids_NT = ids_NT
        self._place = 0

    def next_batch(self, batch_size: int) -> torch.Tensor:
        self._place += batch_size
        return self._ids_NT[self._place - batch_size : self._place]

    def state_dict(self) -> dict[str, int]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._place = state["place"]
