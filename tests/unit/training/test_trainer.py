"""How a batch is split over ranks and microbatches does not change what is learnt."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from virtual import VOCAB, RandomTokens, tiny_run

from spes_p2p.config import ModelConfig, TrainConfig
from spes_p2p.errors import ConfigError
from spes_p2p.model.build import build_slot_model, stock_model
from spes_p2p.swarm.roster import SHARED, slot_name
from spes_p2p.training.process_group import ProcessGroup
from spes_p2p.training.trainer import Trainer

MODEL = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=8, num_experts=5)
BATCH, RANKS, STARVED = 8, 2, 3
# A large epsilon: AdamW divides by the gradient's size, and would blow rounding up to a step where a gradient is tiny.
TRAIN = TrainConfig(batch_size=BATCH, lr=1e-2, eps=1e-3)
PLAIN = TRAIN.model_copy(update={"balance_loss": 0.0})
"""Without the balance loss, which counts the tokens of one forward pass and so depends on the split."""


class RankOrder(RandomTokens):
    """The same batches, each rank's rows in one piece: a microbatch of one process is then the share of a rank."""

    def next_batch(self, num_sequences: int) -> Tensor:
        batch = super().next_batch(num_sequences)
        return torch.cat([batch[rank::RANKS] for rank in range(RANKS)])


def trainer(train: TrainConfig, seed: int, *, data=None, claimed=(), micro: int | None = None) -> Trainer:
    """One in which no token ever reaches expert STARVED."""
    model = build_slot_model(MODEL, vocab_size=VOCAB, sequence_length=16, seed=seed, claimed=claimed, storage="fp32")
    for layer in model.module.model.layers:
        layer.mlp.gate.register_forward_hook(_starve)
    return Trainer(model, train, data or RandomTokens(seed, 16), ProcessGroup("cpu"), micro)


def _starve(module, inputs, output):
    logits_TE, scores_TK, index_TK = output
    return logits_TE, scores_TK, torch.where(index_TK == STARVED, 0, index_TK)


def learn(trainer: Trainer, is_leader: bool = True) -> list[float]:
    """Five steps, and after two of them one slot goes and one comes, its weights known to the leader only."""
    losses = [trainer.step(1e-2, 0.9).loss for _ in range(2)]
    numel = trainer.layouts["slot"].numel
    master = torch.linspace(-0.1, 0.1, numel)
    trainer.set_slots((1, STARVED), {slot_name(1): master} if is_leader else None)
    return losses + [trainer.step(1e-2, 0.9).loss for _ in range(3)]


def state(trainer: Trainer) -> dict[str, Tensor]:
    flats = {name: trainer.flat(name) for name in (SHARED, *map(slot_name, trainer.slots))}
    for slot in set(range(MODEL.num_experts)) - set(trainer.slots):
        flats[f"frozen-{slot}"] = trainer.layouts["slot"].flatten(trainer.model.slot_weights(slot))
    return {**flats, **trainer.optimizer.state_tensors()}


def assert_rounding_apart(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


# ---------------------------------------------------------------------- microbatches


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_microbatches_change_nothing_but_rounding(micro, seed):
    whole, split = trainer(PLAIN, seed, claimed=[0, STARVED]), trainer(PLAIN, seed, claimed=[0, STARVED], micro=micro)
    start = state(whole)
    torch.testing.assert_close(learn(split), learn(whole), rtol=1e-5, atol=1e-6)
    assert_rounding_apart(state(split), state(whole))
    assert not torch.allclose(start[SHARED], state(whole)[SHARED], atol=1e-3), "it did learn"


def test_a_microbatch_that_does_not_divide_the_batch_counts_by_its_rows(seed):
    whole, split = trainer(PLAIN, seed, claimed=[0]), trainer(PLAIN, seed, claimed=[0], micro=3)
    for _ in range(3):
        whole.step(1e-2), split.step(1e-2)
    assert_rounding_apart(state(split), state(whole))


def test_a_step_is_that_of_the_stock_model_under_torchs_adamw(seed):
    """All experts claimed, no router losses, no clipping: nothing is left of us but the plumbing."""
    model = MODEL.model_copy(update={"tie_embeddings": False})
    train = PLAIN.model_copy(update={"router_z_loss": 0.0, "clip_norm": 1e9})
    built = build_slot_model(model, vocab_size=VOCAB, sequence_length=16, seed=seed, claimed=range(5), storage="fp32")
    ours = Trainer(built, train, RandomTokens(seed, 16), ProcessGroup("cpu"), micro_batch_size=4)
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
        ours.layouts[SHARED].unflatten(ours.flat(SHARED)), {name: weights[name] for name in ours.layouts[SHARED].shapes}
    )
    for slot in range(5):
        actual = ours.layouts["slot"].unflatten(ours.flat(slot_name(slot)))
        assert_rounding_apart(actual, {name: weights[name][slot] for name in actual})


# ---------------------------------------------------------------------- steps, slots, calibration


def test_a_step_whose_gradient_is_not_finite_changes_nothing_and_counts_no_tokens(seed):
    broken = trainer(TRAIN, seed, claimed=[0])
    before = state(broken)
    gate = broken.model.module.model.layers[0].mlp.gate.weight
    handle = gate.register_hook(lambda grad: grad * float("nan"))
    assert broken.step(1e-2).tokens == 0
    after = state(broken)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    handle.remove()
    assert broken.step(1e-2).tokens == BATCH * 16


def test_calibrating_leaves_model_and_data_order_as_they_were(seed):
    measured, plain = trainer(TRAIN, seed, claimed=[0]), trainer(TRAIN, seed, claimed=[0])
    assert measured.calibrate() > 0
    assert measured.step(1e-2) == plain.step(1e-2)
    assert all(torch.equal(state(measured)[name], tensor) for name, tensor in state(plain).items())


def test_a_released_slot_is_not_trained_any_more_and_an_adopted_one_is(seed):
    one = trainer(TRAIN, seed, claimed=[0])
    before = state(one)
    one.set_slots((1,), {"slot-1": before["frozen-1"]})
    for _ in range(2):
        one.step(1e-2)
    after = state(one)
    assert torch.equal(after["frozen-0"], before["slot-0"])
    assert not torch.equal(after["slot-1"], before["frozen-1"])
    assert one.optimizer.slots == [1]


def test_a_batch_that_does_not_split_over_the_ranks_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    run = tiny_run()
    model = build_slot_model(run.model, vocab_size=VOCAB, sequence_length=16, seed=0, claimed=(), storage="fp32")
    with pytest.raises(ConfigError, match=r"train.batch_size=4 does not split over 3 ranks; .*--nproc-per-node"):
        Trainer(model, run.train, RandomTokens(0, 16), ProcessGroup("cpu"))


# ---------------------------------------------------------------------- ranks


def rank_main(rank: int, port: int, seed: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group = ProcessGroup("cpu")
    group.connect()
    try:
        rank_learn(group, seed, folder)
    finally:
        group.close()


def rank_learn(group: ProcessGroup, seed: int, folder: str) -> None:
    """A function of its own, so that the trainer's DDP wrapper is gone before its process group is."""
    model = build_slot_model(
        MODEL, vocab_size=VOCAB, sequence_length=16, seed=seed, claimed=[0, STARVED], storage="fp32"
    )
    for layer in model.module.model.layers:
        layer.mlp.gate.register_forward_hook(_starve)
    one = Trainer(model, TRAIN, RandomTokens(seed, 16), group)
    losses = learn(one, group.is_leader)
    save_file({**state(one), "losses": torch.tensor(losses)}, f"{folder}/rank-{group.rank}.safetensors")


def test_two_ranks_learn_what_one_process_with_accumulation_does(seed, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, args=(port, seed, str(tmp_path)), nprocs=RANKS)
    alone = trainer(TRAIN, seed, data=RankOrder(seed, 16), claimed=[0, STARVED], micro=BATCH // RANKS)
    expected = {"losses": torch.tensor(learn(alone))} | state(alone)
    ranks = [load_file(tmp_path / f"rank-{rank}.safetensors") for rank in range(RANKS)]
    for rank in ranks:
        assert_rounding_apart(rank, expected)
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in expected), "ranks never drift apart"
