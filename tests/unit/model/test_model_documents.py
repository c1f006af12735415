"""Documents in one sequence do not see each other, and padding counts for nothing: against each document alone."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spes_p2p.config import TrainConfig
from spes_p2p.data.windows import PADDING
from spes_p2p.model.build import build_slot_model
from spes_p2p.model.loss import TrainingLoss, balance_loss, held_out_loss, model_inputs, num_targets, router_z_loss

from .conftest import SEQUENCE, VOCAB

LENGTHS = [[5, 7, 5], [17], [1, 3, 1, 1, 9], [2, 2, 6]]
"""Tokens of the documents in each row; what is left is padding."""
FAMILIES = ["olmoe", "qwen3_moe", "mixtral"]


@pytest.fixture
def documents(seed):
    return [[torch.randint(0, VOCAB, (length,)) for length in row] for row in LENGTHS]


@pytest.fixture
def windows(documents):
    rows = []
    for row in documents:
        marked = [torch.cat([~ids[:1] if index else ids[:1], ids[1:]]) for index, ids in enumerate(row)]
        flat = torch.cat(marked)
        rows.append(F.pad(flat, (0, SEQUENCE + 1 - len(flat)), value=PADDING))
    return torch.stack(rows)


@pytest.fixture
def model(tiny, seed):
    """Weights large enough that what one token sees shows in the next one's logits."""

    def build(family: str = "olmoe", attention: str = "sdpa"):
        built = build_slot_model(
            tiny(family),
            vocab_size=VOCAB,
            sequence_length=SEQUENCE,
            seed=seed,
            claimed=[0, 3],
            storage="fp32",
            attention=attention,
        )
        with torch.no_grad():
            for parameter in built.module.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4)
        return built

    return build


def nats_alone(module: torch.nn.Module, ids: Tensor) -> Tensor:
    """The cross entropy of each token but the first of one document, without anything around it."""
    logits_TV = module(input_ids=ids[None, :-1], use_cache=False).logits[0]
    return F.cross_entropy(logits_TV, ids[1:], reduction="none")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_documents_logits_are_the_same_alone_and_in_a_sequence(model, documents, windows, family, attention):
    module = model(family, attention).module
    inputs, learned_BS = model_inputs(module, windows)
    with torch.no_grad():
        logits_BSV = module(**inputs, use_cache=False).logits
        blind_BSV = module(input_ids=inputs["input_ids"], use_cache=False).logits
        for row, ids_of_row in enumerate(documents):
            at = 0
            for ids in ids_of_row:
                here = slice(at, min(at + len(ids), SEQUENCE))
                alone_TV = module(input_ids=ids[None, : here.stop - here.start], use_cache=False).logits[0]
                torch.testing.assert_close(logits_BSV[row, here], alone_TV, rtol=1e-4, atol=1e-5)
                if at and len(ids) > 1:
                    assert (blind_BSV[row, here] - alone_TV).abs().max() > 1e-3, (
                        "documents do see each other by default"
                    )
                at += len(ids)
    assert learned_BS is not None and int(learned_BS.sum()) == num_targets(windows)


def test_the_loss_is_the_mean_over_what_each_document_learns(model, documents, windows):
    loss = TrainingLoss(model(), TrainConfig(output_z_loss=0.0))
    with torch.no_grad():
        expected = torch.cat([nats_alone(loss.module, ids) for ids in itertools.chain(*documents) if len(ids) > 1])
        parts = loss(windows)
        with_z = TrainingLoss(loss.slot_model, TrainConfig(output_z_loss=1e-5))(windows)
    assert len(expected) == num_targets(windows)
    torch.testing.assert_close(parts.cross_entropy, expected.mean())
    torch.testing.assert_close(with_z.cross_entropy, expected.mean())
    assert held_out_loss(loss.module, [windows[:1], windows[1:]]) == pytest.approx(expected.mean().item(), rel=1e-5)


def test_the_outputs_z_loss_leaves_out_what_has_no_target(model, windows):
    slot_model = model()
    factor = 0.5
    with torch.no_grad():
        plain, with_z = (
            TrainingLoss(slot_model, TrainConfig(output_z_loss=value))(windows).total for value in (0.0, factor)
        )
        inputs, learned_BS = model_inputs(slot_model.module, windows)
        logits_BSV = slot_model.module(**inputs, use_cache=False).logits
    expected = logits_BSV[learned_BS].logsumexp(-1).square().mean()
    torch.testing.assert_close(with_z - plain, factor * expected)


def test_the_routers_losses_leave_out_what_has_no_target(seed):
    experts, top_k = 6, 2
    layers = [torch.randn(4 * SEQUENCE, experts) for _ in range(2)]
    learned_BS = torch.rand(4, SEQUENCE) < 0.6
    learned_BS[0] = True
    settings = {"claimed": [1, 4], "claimed_factor": 0.7}
    routed_E = torch.zeros(experts, dtype=torch.int64)
    actual = balance_loss(layers, top_k, num_sequences=4, routed_E=routed_E, learned_BS=learned_BS, **settings)
    by_row = []
    for row in range(4):
        kept = [layer.unflatten(0, (4, -1))[row][learned_BS[row]] for layer in layers]
        by_row.append(balance_loss(kept, top_k, num_sequences=1, **settings) * learned_BS[row].sum())
    torch.testing.assert_close(actual, torch.stack(by_row).sum() / learned_BS.sum())
    assert int(routed_E.sum()) == 2 * top_k * int(learned_BS.sum())
    kept = [layer[learned_BS.flatten()] for layer in layers]
    torch.testing.assert_close(router_z_loss(layers, learned_BS), router_z_loss(kept))
    assert not torch.isclose(router_z_loss(layers, learned_BS), router_z_loss(layers))


def test_padding_alone_needs_no_attention_mask(model, windows):
    """A mask costs time and memory; behind padding nothing is learned, and causal attention does not look ahead."""
    module = model().module
    inputs, learned_BS = model_inputs(module, windows[:0].new_tensor([[3, 5, 7] + [PADDING] * (SEQUENCE - 2)]))
    assert set(inputs) == {"input_ids"} and int(learned_BS.sum()) == 2
    inputs, learned_BS = model_inputs(module, windows[1:2])
    assert set(inputs) == {"input_ids"} and learned_BS is None
    assert inputs["input_ids"].data_ptr() == windows[1:2].data_ptr(), "and without marks nothing is copied"


def test_flash_attention_gets_all_sequences_in_one_row(model, windows):
    """It separates the documents of single rows only; the positions are those of several rows, one after another."""
    module = model().module
    rows, _ = model_inputs(module, windows)
    flat, learned_BS = model_inputs(
        SimpleNamespace(config=SimpleNamespace(_attn_implementation="flash_attention_2")), windows
    )
    assert flat["position_ids"].shape == (1, len(windows) * SEQUENCE) and learned_BS.shape == (len(windows), SEQUENCE)
    with torch.no_grad():
        expected = module(**rows, use_cache=False, output_router_logits=True)
        actual = module(**flat, use_cache=False, output_router_logits=True)
    torch.testing.assert_close(actual.logits.unflatten(1, (len(windows), -1))[0], expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual.router_logits, expected.router_logits, rtol=1e-4, atol=1e-5)


def test_sequences_without_any_target_give_no_loss_and_a_finite_gradient(model):
    loss = TrainingLoss(model(), TrainConfig(output_z_loss=1e-5))
    parts = loss(torch.full((2, SEQUENCE + 1), PADDING))
    parts.total.backward()
    assert parts.total.item() == 0.0
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in loss.module.parameters())
