"""Two ranks under DDP learn what one process does with both their batches."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from spes_p2p.config import ModelConfig, TrainConfig
from spes_p2p.model.build import build_slot_model
from spes_p2p.model.loss import TrainingLoss
from spes_p2p.model.slot_model import SlotModel

SHAPE = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=8, num_experts=5)
STARVED = 3


def build(seed: int) -> SlotModel:
    """A model in which no token ever reaches expert STARVED."""
    model = build_slot_model(SHAPE, vocab_size=32, sequence_length=8, seed=seed, claimed=[1, STARVED], storage="fp32")
    handles = [layer.mlp.gate.register_forward_hook(_starve) for layer in model.module.model.layers]
    assert handles
    return model


def _starve(module, inputs, output):
    logits_TE, scores_TK, index_TK = output
    return logits_TE, scores_TK, torch.where(index_TK == STARVED, 0, index_TK)


def gradients(model: SlotModel) -> dict[str, Tensor]:
    """Every parameter's gradient; one that is None fails when it is saved."""
    return {name: parameter.grad for name, parameter in model.module.named_parameters()}


def rank_main(rank: int, seed: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        train_rank(rank, seed, folder)
    finally:
        dist.destroy_process_group()


def train_rank(rank: int, seed: int, folder: str) -> None:
    """Saves the gradients of one batch, before and after an adoption.

    A function of its own, so that no DDP wrapper outlives its process group: about one in seven of those hung, since
    the wrapper then ends gloo's threads while holding the interpreter lock that they need.
    """
    model = build(seed)
    batches = load_file(f"{folder}/batches.safetensors")["tokens"]
    for phase, adopted in enumerate((None, 0)):
        if adopted is not None:
            model.adopt(adopted)
        model.module.zero_grad()
        wrapped = DistributedDataParallel(TrainingLoss(model, TrainConfig()))
        wrapped(batches[rank]).total.backward()
        save_file(gradients(model), f"{folder}/gradients-{rank}-{phase}.safetensors")


@pytest.mark.full
def test_two_ranks_equal_one_process_before_and_after_an_adoption(seed, tmp_path):
    batches = torch.randint(0, 32, (2, 3, 9))
    save_file({"tokens": batches}, tmp_path / "batches.safetensors")
    run_ranks(rank_main, (seed, str(tmp_path)), 2)

    model = build(seed)
    loss = TrainingLoss(model, TrainConfig())
    for phase, adopted in enumerate((None, 0)):
        if adopted is not None:
            model.adopt(adopted)
        model.module.zero_grad()
        for batch in batches:
            (loss(batch).total / 2).backward()
        expected = gradients(model)
        ranks = [load_file(tmp_path / f"gradients-{rank}-{phase}.safetensors") for rank in range(2)]
        for rank_gradients in ranks:
            assert rank_gradients.keys() == expected.keys()
            for name, grad in rank_gradients.items():
                torch.testing.assert_close(
                    grad, expected[name], rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
                )
        starved = [grad for name, grad in ranks[0].items() if f".{STARVED}." in name]
        assert len(starved) == 4 and all(torch.count_nonzero(grad) == 0 for grad in starved)
        assert any(grad.abs().max() > 0 for name, grad in ranks[0].items() if ".trained.slots.1." in name)
