"""How a batch is split over ranks and microbatches does not change what is learnt."""

import itertools
import math
import os
import socket
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lanes import sample
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from virtual import VOCAB, RandomTokens, tiny_run

from spes_p2p.config import MachineConfig, ModelConfig, TrainConfig
from spes_p2p.data.windows import CONTEXT, PADDING
from spes_p2p.errors import ConfigError
from spes_p2p.model.build import build_slot_model, stock_model
from spes_p2p.model.loss import TrainingLoss
from spes_p2p.planner import activations
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.training.ranks import Ranks
from spes_p2p.training.trainer import DDP, Trainer

MODEL = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=8, num_experts=5)
BATCH, RANKS, STARVED = 8, 2, 3
# A large epsilon: AdamW divides by the gradient's size, and would blow rounding up to a step where a gradient is tiny.
TRAIN = TrainConfig(batch_size=BATCH, lr=1e-2, eps=1e-3, balance_loss=0.5, router_z_loss=0.1, clip_norm=0.5)
"""All losses on, and gradients that are clipped."""


def trainer(
    train: TrainConfig, seed: int, *, claimed: Sequence[int] = (), micro: int | None = None, **settings: Any
) -> Trainer:
    """One in which no token ever reaches expert STARVED."""
    model = build_slot_model(MODEL, vocab_size=VOCAB, sequence_length=16, seed=seed, claimed=claimed, storage="fp32")
    for layer in model.module.model.layers:
        layer.mlp.gate.register_forward_hook(_starve)
    return Trainer(
        model, train, RandomTokens(seed, 16), Ranks("cpu"), MachineConfig(micro_batch_size=micro, **settings)
    )


def _starve(module, inputs, output):
    logits_TE, scores_TK, index_TK = output
    return logits_TE, scores_TK, torch.where(index_TK == STARVED, 0, index_TK)


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Those of one batch."""
    trainer._backward(RandomTokens(7, 16).next_batch(BATCH), 0.7)
    found = {name: parameter.grad for name, parameter in trainer.model.module.named_parameters()}
    trainer.optimizer.zero_grad()
    return found


def learn(trainer: Trainer) -> list[float]:
    """Five steps, and after two of them one slot goes and one comes.

    Then parameters, moments and state go out and in again, as they do in a round and at a restart.
    """
    losses = [trainer.step(1e-2, 0.9).loss for _ in range(2)]
    numel = trainer.layouts["slot"].numel
    trainer.set_slots((1, STARVED), {VectorName.of_slot(1): torch.linspace(-0.1, 0.1, numel)})
    vectors = {name: trainer.vector(name) for name in trainer.names}
    moments = trainer.moments(SHARED, trainer.optimizer.kinds(SHARED))
    trainer.load(vectors | {SHARED.moments: moments})
    trainer.load_state_tensors(trainer.state_tensors())
    return losses + [trainer.step(1e-2, 0.9).loss for _ in range(3)]


def state(trainer: Trainer) -> dict[str, Tensor]:
    # Each rank reads for itself: the leader no longer leads.
    vectors = {name: trainer.layouts[name.kind].flatten(trainer._parameters(name)) for name in trainer.names}
    for slot in set(range(MODEL.num_experts)) - set(trainer.slots):
        vectors[f"frozen-{slot}"] = trainer.layouts["slot"].flatten(trainer.model.slot_weights(slot))
    return {**vectors, **trainer.optimizer.state_tensors()}


def assert_rounding_apart(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("micro", [1, 3])
def test_a_batch_with_padding_has_the_same_gradient_in_whatever_microbatches(micro, seed):
    """Microbatches count by their targets: a mean over rows would give a padded row's few too much weight."""
    tokens_BT1 = RandomTokens(7, 16).next_batch(BATCH)
    for row, kept in enumerate(range(2, 2 * BATCH + 2, 2)):
        tokens_BT1[row, kept:] = PADDING
    found = []
    for size in (None, micro):
        one = trainer(TRAIN, seed, claimed=[0, STARVED], micro=size)
        loss = one._backward(tokens_BT1, 0.7)
        found.append({name: p.grad for name, p in one.model.module.named_parameters() if p.grad is not None})
        found[-1]["loss"] = torch.tensor(loss)
    assert_rounding_apart(found[1], found[0])


def test_padding_is_not_counted_as_trained(seed):
    one = trainer(TRAIN, seed)
    tokens_BT1 = RandomTokens(7, 16).next_batch(BATCH)
    tokens_BT1[:, 10:] = PADDING
    one.data.next_batch = lambda num_sequences: tokens_BT1
    assert one.step(1e-3).tokens == 9 * BATCH


@pytest.mark.parametrize("micro", [1, 2, 3, 4, 8])
def test_a_batchs_gradient_is_the_same_in_whatever_microbatches(micro, seed):
    whole, split = (gradients(trainer(TRAIN, seed, claimed=[0, STARVED], micro=size)) for size in (None, micro))
    for name, gradient in whole.items():
        error = (split[name] - gradient).abs().max()
        assert error <= 2e-6 * gradient.abs().max(), f"{name}: {error:.1e} of {gradient.abs().max():.1e}"


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_microbatches_change_nothing_but_rounding(micro, seed):
    for each in range(seed, seed + 3):
        whole, split = (trainer(TRAIN, each, claimed=[0, STARVED], micro=size) for size in (None, micro))
        start = state(whole)
        losses = learn(split), learn(whole)
        # Rounding may break a router's tie another way, and then one token trains another expert: about one seed in
        # hundreds. The comparison takes the next seed.
        if split.routed_tokens() == whole.routed_tokens():
            break
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    assert_rounding_apart(state(split), state(whole))
    assert not torch.allclose(start[SHARED], state(whole)[SHARED], atol=1e-3), "it did learn"


@pytest.mark.full  # the compiler takes half a minute
def test_compiled_parts_change_nothing_but_rounding(seed):
    for each in range(seed, seed + 3):
        plain, compiled = (trainer(TRAIN, each, claimed=[0, STARVED], compile=way) for way in ("off", "auto"))
        losses = learn(compiled), learn(plain)
        if compiled.routed_tokens() == plain.routed_tokens():
            break
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    assert_rounding_apart(state(compiled), state(plain))
    assert counters["inductor"], "nothing was compiled"


def test_without_a_compiler_training_goes_on_as_it_is(seed, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "no-such-compiler"))
    assert trainer(TRAIN, seed, compile="auto").step(1e-2) == trainer(TRAIN, seed).step(1e-2)
    assert "torch.compile does not work here" in caplog.text


def test_a_microbatch_that_does_not_divide_the_batch_counts_by_its_rows(seed):
    whole, split = trainer(TRAIN, seed, claimed=[0]), trainer(TRAIN, seed, claimed=[0], micro=3)
    for _ in range(3):
        whole.step(1e-2), split.step(1e-2)
    assert_rounding_apart(state(split), state(whole))


def test_a_step_is_that_of_the_stock_model_under_torchs_adamw(seed):
    """All experts claimed, no router losses, no clipping: nothing is left of us but the plumbing."""
    model = MODEL.model_copy(update={"tie_embeddings": False})
    train = TRAIN.model_copy(update={"balance_loss": 0.0, "router_z_loss": 0.0, "clip_norm": 1e9})
    built = build_slot_model(model, vocab_size=VOCAB, sequence_length=16, seed=seed, claimed=range(5), storage="fp32")
    ours = Trainer(built, train, RandomTokens(seed, 16), Ranks("cpu"), MachineConfig(micro_batch_size=4))
    stock, data = stock_model(model, VOCAB, 16, seed), RandomTokens(seed, 16)
    adamw = torch.optim.AdamW(
        stock.parameters(), lr=1e-2, betas=(train.beta1, train.beta2), eps=train.eps, weight_decay=train.weight_decay
    )
    for _ in range(3):
        tokens = data.next_batch(BATCH)
        loss = cross_entropy(stock(input_ids=tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        torch.testing.assert_close(ours.step(1e-2).loss, loss.item(), rtol=1e-5, atol=1e-6)
    weights = stock.state_dict()
    assert_rounding_apart(
        ours.layouts[SHARED].unflatten(ours.vector(SHARED)),
        {name: weights[name] for name in ours.layouts[SHARED].shapes},
    )
    for slot in range(5):
        actual = ours.layouts["slot"].unflatten(ours.vector(VectorName.of_slot(slot)))
        assert_rounding_apart(actual, {name: weights[name][slot] for name in actual})


@pytest.mark.parametrize("micro", [None, 2])
def test_a_step_whose_gradient_is_not_finite_changes_nothing_and_counts_no_tokens(micro, seed):
    """Nor does it if only one microbatch's is not."""
    broken = trainer(TRAIN, seed, claimed=[0], micro=micro)
    before = state(broken)
    gate, faults = broken.model.module.model.layers[0].mlp.gate.weight, iter([float("nan")])
    handle = gate.register_hook(lambda grad: grad * next(faults, 1.0))
    assert broken.step(1e-2).tokens == 0
    after = state(broken)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    handle.remove()
    assert broken.step(1e-2).tokens == BATCH * 16


class Conversations(RandomTokens):
    """Of each sequence some tokens are read and not learned, and some sequences end in padding; one learns nothing."""

    def next_batch(self, num_sequences):
        ids_BT1 = super().next_batch(num_sequences)
        generator = torch.Generator().manual_seed(self._position)
        for row, number in enumerate(torch.randint(0, 16, (num_sequences,), generator=generator).tolist()):
            ids_BT1[row, : number + 1] += CONTEXT
            ids_BT1[row, max(number + 2, 12 + row % 4) :] = PADDING
        ids_BT1[0, 1:] = ids_BT1[0, 1:].where(ids_BT1[0, 1:] < 0, ids_BT1[0, 1:] + CONTEXT)
        return ids_BT1


def test_microbatches_of_1_4_and_8_learn_the_same_of_conversations(seed):
    """At equal tokens; a mean over microbatches, each of which is a mean, would weigh a short reply more."""
    learnt, losses, tokens = {}, {}, {}
    for micro in (1, 4, 8):
        one = trainer(TRAIN, seed, claimed=[0, 2], micro=micro)
        one.data = Conversations(seed, 16)
        steps = [one.step(1e-2) for _ in range(6)]
        learnt[micro], losses[micro] = state(one), [step.loss for step in steps]
        tokens[micro] = sum(step.tokens for step in steps)
    assert 0 < tokens[1] == tokens[4] == tokens[8] < 6 * BATCH * 16 / 2
    for micro in (1, 4):
        assert losses[micro] == pytest.approx(losses[8], rel=1e-4)
        for name, tensor in learnt[8].items():
            torch.testing.assert_close(learnt[micro][name], tensor, rtol=1e-3, atol=1e-4, msg=str(name))


def test_calibrating_leaves_model_and_data_order_as_they_were(seed):
    measured, plain = trainer(TRAIN, seed, claimed=[0]), trainer(TRAIN, seed, claimed=[0])
    tokens_per_second, all_per_second = measured.calibrate()
    assert 0 < tokens_per_second == all_per_second and measured.calibrate(measures=False) == (0, 0)
    assert measured.step(1e-2) == plain.step(1e-2)
    assert all(torch.equal(state(measured)[name], tensor) for name, tensor in state(plain).items())
    measured.calibrate()
    assert measured.routed_tokens() == plain.routed_tokens(), "of what was trained"


def test_the_speed_in_sequences_counts_what_is_not_learned(seed):
    ticks = iter(range(100))
    measured = trainer(TRAIN, seed, claimed=[0])
    measured.data, measured.clock = Conversations(seed, 16), lambda: float(next(ticks))
    tokens_per_second, all_per_second = measured.calibrate()
    assert all_per_second == BATCH * 16 and 0 < tokens_per_second < all_per_second / 2


@pytest.mark.parametrize(("seconds", "passes"), [(0.5, 3), (20.0, 1)])
def test_a_slow_machine_measures_its_speed_by_one_pass_over_a_microbatch(seed, seconds, passes):
    ticks = itertools.count()
    measured = trainer(TRAIN, seed, claimed=[0], micro=2)
    drawn, draw = [], measured.data.next_batch
    measured.data.next_batch = lambda num: drawn.append(num) or draw(num)
    measured.clock = lambda: seconds * next(ticks)
    assert measured.calibrate()[1] == 2 * measured.data.next_batch(1)[:, 1:].numel() / seconds
    assert drawn[:-1] == [2] * passes


def test_a_released_slot_is_not_trained_any_more_and_an_adopted_one_is(seed):
    one = trainer(TRAIN, seed, claimed=[0])
    before = state(one)
    one.set_slots((1,), {VectorName.of_slot(1): before["frozen-1"]})
    for _ in range(2):
        one.step(1e-2)
    after = state(one)
    assert torch.equal(after["frozen-0"], before["slot-0"])
    assert not torch.equal(after["slot-1"], before["frozen-1"]) and one.optimizer.slots == [1]


def test_a_batch_that_does_not_split_over_the_ranks_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    run = tiny_run()
    model = build_slot_model(run.model, vocab_size=VOCAB, sequence_length=16, seed=0, claimed=(), storage="fp32")
    with pytest.raises(ConfigError, match=r"train.batch_size=4 does not split over 3 ranks; .*--nproc-per-node"):
        Trainer(model, run.train, RandomTokens(0, 16), Ranks("cpu"))


# Full: other names.
@pytest.mark.parametrize("name", sample(["adamw8bit", "lamb", "muon"], ["adamw8bit"]))
def test_a_machines_optimizer_is_the_one_that_it_names(name, seed):
    one, other = trainer(TRAIN, seed, claimed=[0], inner_optimizer=name), trainer(TRAIN, seed, claimed=[0])
    by_run = trainer(TRAIN.model_copy(update={"optimizer": name}), seed, claimed=[0])
    for each in (one, other, by_run):
        each.step(1e-2), each.step(1e-2)
    assert all(torch.equal(state(one)[key], tensor) for key, tensor in state(by_run).items())
    assert not torch.equal(state(one)[SHARED], state(other)[SHARED])


# Full: whole batches, and fp32, of which the same recomputation has less to get wrong.
@pytest.mark.parametrize(("micro", "precision"), sample([(None, "fp32"), (2, "fp32"), (2, "bf16")], [(2, "bf16")]))
def test_activation_checkpointing_changes_no_bit(micro, precision, seed):
    """Nor does it count a router's logits twice, which would change the losses."""
    train = TRAIN.model_copy(update={"precision": precision})
    plain, frugal = (
        trainer(train, seed, claimed=[0, STARVED], micro=micro, activation_checkpointing=on) for on in (False, True)
    )
    assert learn(plain) == learn(frugal)
    assert all(torch.equal(state(frugal)[name], tensor) for name, tensor in state(plain).items())
    logits = frugal.model.module(torch.zeros(1, 4, dtype=torch.long), output_router_logits=True).router_logits
    assert len(logits) == MODEL.num_layers


def test_activation_checkpointing_keeps_little_for_the_backward_pass(seed):
    def saved_bytes(on: bool) -> int:
        one, total = trainer(TRAIN, seed, claimed=[0], activation_checkpointing=on), 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            one.step(1e-2)
        return total

    assert saved_bytes(True) < 0.5 * saved_bytes(False)


def rank_main(rank: int, port: int, seed: int, folder: str, micro: int | None, shard: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = Ranks("cpu")
    ranks.connect()
    try:
        rank_learn(ranks, seed, folder, micro, shard)
    finally:
        ranks.close()


def rank_learn(ranks: Ranks, seed: int, folder: str, micro: int | None, shard: str) -> None:
    """A function of its own, so that the trainer's DDP wrapper is gone before its process group is."""
    if micro is not None:
        activations.LOGITS_BYTES = 2**10  # so that the head computes in chunks
    model = build_slot_model(
        MODEL, vocab_size=VOCAB, sequence_length=16, seed=seed, claimed=[0, STARVED], storage="fp32"
    )
    for layer in model.module.model.layers:
        layer.mlp.gate.register_forward_hook(_starve)
    data = RandomTokens(seed, 16)
    machine = MachineConfig(micro_batch_size=micro, activation_checkpointing=micro is not None, shard=shard)
    one = Trainer(model, TRAIN, data, ranks, machine)
    if ranks.is_leader:
        with ranks.leading():
            losses = torch.tensor(learn(one))
            assert math.isfinite(one.loss_on(data.next_batch(2))), "and parameters are in parts again"
        save_file({"losses": losses}, f"{folder}/losses.safetensors")
    else:
        ranks.obey(one)
    kept = sum(kept_here(param).numel() for param in model.module.parameters())
    whole = sum(param.numel() for param in model.module.parameters())
    assert kept == whole if shard == "ddp" else kept < 0.6 * whole
    if shard == "fsdp":
        with torch.no_grad():
            model.module(data.next_batch(2)[:, :-1])
        claimed = [param for module in model.claimed_modules() for param in module.parameters()]
        assert claimed and all(isinstance(param, DTensor) for param in claimed), "after a pass, too"
    save_file(state(one), f"{folder}/rank-{ranks.rank}.safetensors")


def test_a_rank_starts_without_a_warning_whatever_its_torch(recwarn):
    """Each rank of each peer began with torch's FutureWarning of a renamed argument, in four lines."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        loss = TrainingLoss(trainer(TRAIN, 0, claimed=[0]).model, TRAIN)
        wrapped = DDP().wrap(loss)
        assert not wrapped.broadcast_buffers and not [each for each in recwarn if each.category is FutureWarning]
        del wrapped
    finally:
        dist.destroy_process_group()


def kept_here(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


@pytest.mark.parametrize(
    ("micro", "shard"),
    [
        pytest.param(None, "ddp", id="whole-ddp", marks=pytest.mark.full),
        # The golden run `fsdp` compares two ranks bit by bit with every commit; these compare with one process.
        pytest.param(1, "fsdp", id="microbatches-checkpointed-fsdp", marks=pytest.mark.full),
        pytest.param(None, "fsdp", id="whole-fsdp", marks=pytest.mark.full),
        pytest.param(1, "ddp", id="microbatches-checkpointed-ddp", marks=pytest.mark.full),
    ],
)
def test_two_ranks_learn_what_one_process_does(micro, shard, seed, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_ranks(rank_main, (port, seed, str(tmp_path), micro, shard), RANKS)
    alone = trainer(TRAIN, seed, claimed=[0, STARVED])
    losses = {"losses": torch.tensor(learn(alone))}
    assert_rounding_apart(load_file(tmp_path / "losses.safetensors"), losses)
    expected = state(alone)
    ranks = [load_file(tmp_path / f"rank-{rank}.safetensors") for rank in range(RANKS)]
    for rank in ranks:
        assert_rounding_apart(rank, expected)
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in expected), "ranks never drift apart"
