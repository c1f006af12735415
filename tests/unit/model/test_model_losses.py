"""Balance, z and language-model losses against their formulas and stock."""

import math

import pytest
import torch
import torch.nn.functional as F
from checkpoints import MIXTURES
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

from spes_p2p.config import TrainConfig
from spes_p2p.errors import DataError
from spes_p2p.model import loss
from spes_p2p.model.build import build_slot_model
from spes_p2p.model.loss import (
    TrainingLoss,
    balance_loss,
    causal_lm_loss,
    held_out_loss,
    router_z_loss,
)

TOKENS, EXPERTS, TOP_K = 4096, 8, 2


def collapsed(first: int, second: int) -> torch.Tensor:
    logits_TE = torch.full((TOKENS, EXPERTS), -20.0)
    logits_TE[:, [first, second]] = 20.0
    return logits_TE


def test_balanced_router_scores_one(seed):
    layers = [1e-3 * torch.randn(TOKENS, EXPERTS) for _ in range(3)]
    assert balance_loss(layers, TOP_K, num_sequences=4).item() == pytest.approx(1.0, abs=1e-2)


def test_layers_collapsed_onto_different_experts_score_high(seed):
    """Stock pools the layers and calls these balanced."""
    layers = [collapsed(0, 1), collapsed(2, 3), collapsed(4, 5), collapsed(6, 7)]
    assert balance_loss(layers, TOP_K, num_sequences=4).item() == pytest.approx(EXPERTS / TOP_K, rel=1e-3)
    pooled = load_balancing_loss_func(tuple(layers), EXPERTS, TOP_K) / TOP_K
    assert pooled.item() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("num_sequences", [1, 8])
def test_one_layer_equals_the_mean_of_stock_over_sequences(num_sequences, seed):
    logits_TE = torch.randn(64, EXPERTS)
    sequences = logits_TE.chunk(num_sequences)
    stock = sum(load_balancing_loss_func((part,), EXPERTS, TOP_K) for part in sequences) / num_sequences
    actual = balance_loss([logits_TE], TOP_K, num_sequences=num_sequences) * TOP_K
    assert actual.item() == pytest.approx(stock.item(), rel=1e-5)


def test_the_loss_of_a_batch_is_the_mean_over_its_parts(seed):
    """Which is why a batch may be split: counted over a batch at once, these parts would not add up."""
    layers = [3 * torch.randn(64, EXPERTS) for _ in range(2)]
    settings = {"claimed": [1, 6], "claimed_factor": 0.7}
    whole = balance_loss(layers, TOP_K, num_sequences=8, **settings)
    first = balance_loss([layer[:16] for layer in layers], TOP_K, num_sequences=2, **settings)
    rest = balance_loss([layer[16:] for layer in layers], TOP_K, num_sequences=6, **settings)
    torch.testing.assert_close(0.25 * first + 0.75 * rest, whole)
    at_once = balance_loss(layers, TOP_K, num_sequences=1, **settings)
    assert abs(at_once.item() - whole.item()) > 1e-3


def test_factor_scales_the_counts_of_claimed_experts(seed):
    logits_TE = torch.randn(50, EXPERTS)
    claimed, factor = [1, 6], 0.7
    probs_TE = logits_TE.softmax(-1)
    expected = 0.0
    for probs_SE in probs_TE.chunk(5):
        for expert in range(EXPERTS):
            count = sum(expert in row for row in probs_SE.topk(TOP_K).indices.tolist())
            share = count / (10 * TOP_K) * (factor if expert in claimed else 1.0)
            expected += EXPERTS * share * probs_SE[:, expert].mean().item() / 5
    actual = balance_loss([logits_TE], TOP_K, num_sequences=5, claimed=claimed, claimed_factor=factor)
    assert actual.item() == pytest.approx(expected, rel=1e-5)
    assert actual < balance_loss([logits_TE], TOP_K, num_sequences=5)


def test_z_loss_equals_its_formula(seed):
    layers = [torch.randn(30, EXPERTS) for _ in range(2)]
    partitions = [math.log(sum(math.exp(value) for value in row)) for layer in layers for row in layer.tolist()]
    assert router_z_loss(layers).item() == pytest.approx(sum(z**2 for z in partitions) / len(partitions), rel=1e-5)


def test_training_loss_is_the_sum_of_its_parts(slot_model, tokens):
    model = slot_model([1, 2])
    parts = TrainingLoss(model, TrainConfig(balance_loss=0.5, router_z_loss=0.25))(tokens, claimed_factor=0.7)
    output = model.module(tokens[:, :-1], output_router_logits=True)
    assert len(output.router_logits) == 2
    entropy = F.cross_entropy(output.logits.flatten(0, 1), tokens[:, 1:].flatten())
    balance = balance_loss(output.router_logits, 2, num_sequences=4, claimed=[1, 2], claimed_factor=0.7)
    z = router_z_loss(output.router_logits)
    torch.testing.assert_close(torch.stack(parts), torch.stack([entropy + 0.5 * balance + 0.25 * z, entropy]))
    assert parts.total.requires_grad and not parts.cross_entropy.requires_grad


def test_router_losses_reach_the_router_of_every_layer(slot_model, tokens):
    model = slot_model([])
    gates = [parameter for name, parameter in model.shared_parameters().items() if "mlp.gate" in name]
    loss = TrainingLoss(model, TrainConfig(balance_loss=1.0, router_z_loss=0.0))(tokens)
    grads = torch.autograd.grad(loss.total - loss.cross_entropy, gates)
    assert len(gates) == 2 and all(grad.abs().max() > 0 for grad in grads)


def test_bf16_forward_keeps_losses_and_gradients_in_fp32(slot_model, tokens):
    model = slot_model([1], "bf16")
    exact = TrainingLoss(model, TrainConfig())(tokens)
    parts = TrainingLoss(model, TrainConfig(precision="bf16"))(tokens)
    assert all(part.dtype == torch.float32 for part in parts) and parts.total.item() != exact.total.item()
    assert parts.total.item() == pytest.approx(exact.total.item(), rel=1e-2)
    parts.total.backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.module.parameters())


def test_held_out_loss_weighs_batches_by_their_tokens(slot_model, tokens):
    model = slot_model([1])
    whole = held_out_loss(model.module, [tokens])
    parts = held_out_loss(model.module, [tokens[:3], tokens[3:]])
    expected = TrainingLoss(model, TrainConfig())(tokens).cross_entropy.item()
    assert whole == pytest.approx(expected, rel=1e-5) and parts == pytest.approx(expected, rel=1e-5)
    assert model.module.training and all(parameter.grad is None for parameter in model.module.parameters())


def test_held_out_loss_restores_the_mode_after_a_failure(slot_model, tokens):
    model = slot_model([1])
    with pytest.raises(DataError, match="held_out_fraction"):
        held_out_loss(model.module, [])
    with pytest.raises(IndexError):
        held_out_loss(model.module, [tokens + 10_000])
    assert model.module.training


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_outputs_z_loss_is_the_mean_square_of_their_log_partition(slot_model, precision, seed):
    """With its gradient, against PaLM's formula on the model's own logits."""
    tokens = torch.randint(0, 32, (3, 9))
    gradients = []
    for coefficient in (0.0, 0.05):
        model = slot_model([0, 1], tie_embeddings=False)
        with torch.no_grad():
            model.module.lm_head.weight.mul_(40)  # far from a log-partition that is the vocabulary's
        loss = TrainingLoss(model, TrainConfig(precision=precision, output_z_loss=coefficient))
        total = loss(tokens).total
        if not coefficient:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                logits = model.module(input_ids=tokens[:, :-1], use_cache=False).logits
            total = total + 0.05 * logits.float().logsumexp(dim=-1).square().mean()
        total.backward()
        gradients.append({name: p.grad for name, p in model.module.named_parameters() if p.grad is not None})
        gradients[-1]["total"] = total.detach()
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        error = torch.linalg.vector_norm(gradients[1][name] - expected) / torch.linalg.vector_norm(expected)
        assert error < (2e-2 if precision == "bf16" else 1e-4), name


def few_logits(monkeypatch, num_bytes: int) -> None:
    monkeypatch.setattr("spes_p2p.planner.activations.LOGITS_BYTES", num_bytes)


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device", ["as on a CPU", "as on a GPU"])
def test_the_head_in_chunks_gives_the_loss_and_gradients_of_all_logits_at_once(
    slot_model, monkeypatch, family, is_tied, precision, device
):
    if device == "as on a GPU":
        monkeypatch.setattr(loss, "ALIGNED_DEVICES", {"cpu"})
        monkeypatch.setattr(loss, "ALIGNED_ROWS", 48)  # to 96 rows
    tokens = torch.randint(64, (3, 9))
    tokens[0, 5] = ~tokens[0, 5]  # begins a document, so it is not learned
    found = []
    for num_bytes in (2**28, 5 * 6 * 64):  # 24 tokens in chunks of five, or of seven in fp32
        few_logits(monkeypatch, num_bytes)
        model = slot_model([0, 1], family=family, tie_embeddings=is_tied)
        with torch.no_grad():
            model.module.lm_head.weight.mul_(20)
        train = TrainConfig(precision=precision, output_z_loss=0.05)
        parts = TrainingLoss(model, train)(tokens)
        parts.total.backward()
        gradients = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
        held_out = held_out_loss(model.module, [tokens])
        found.append({**gradients, "total": parts.total.detach(), "held-out": torch.tensor(held_out)})
    assert found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        error = torch.linalg.vector_norm(found[1][name] - expected) / torch.linalg.vector_norm(expected)
        assert error < (2e-2 if precision == "bf16" else 2e-6), name
    assert not all(torch.equal(found[1][name], expected) for name, expected in found[0].items()), "nothing was chunked"
    assert model.module(tokens.clamp(min=0)).logits.shape == (3, 9, 64), "the head is itself again"


@pytest.mark.parametrize("logit", [-320.0, 0.0, 320.0])
def test_rows_that_a_gpu_adds_to_the_head_change_nothing_however_small_all_logits_are(seed, monkeypatch, logit):
    hidden_TD, targets_T = torch.ones(6, 32, requires_grad=True), torch.arange(6)
    weight_VD = (logit / 32 + 0.1 * torch.randn(10, 32)).requires_grad_()
    found = []
    for devices in (set(), {"cpu"}):
        monkeypatch.setattr(loss, "ALIGNED_DEVICES", devices)
        losses = loss.HeadLoss.apply(hidden_TD, weight_VD, targets_T, None, 0.1, 4, torch.float32, True)
        found.append((losses, *torch.autograd.grad(losses[0], (hidden_TD, weight_VD))))
    for padded, plain in zip(*found, strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-3, atol=1e-3)


def test_logits_take_no_more_memory_than_a_chunk(tiny, seed, monkeypatch):
    """At once they take 4 bytes a token and entry of the vocabulary: logits become their own gradients."""
    vocabulary, chunk_bytes = 4096, 2**20
    shape = {"vocab_size": vocabulary, "sequence_length": 512, "seed": seed, "claimed": [0], "storage": "fp32"}
    module = build_slot_model(tiny(), **shape).module
    tokens_BT1, peaks = torch.randint(vocabulary, (2, 513)), []
    for num_bytes in (chunk_bytes, 2**30):
        few_logits(monkeypatch, num_bytes)
        module.zero_grad()
        with MemTracker() as tracker:
            causal_lm_loss(module, tokens_BT1, train=TrainConfig(output_z_loss=1e-5), top_k=2).total.backward()
        peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    at_once = 4 * vocabulary * 1024
    rest = peaks[1] - at_once
    assert peaks[0] - rest < 2 * chunk_bytes < at_once / 4


def test_a_head_of_another_program_is_left_alone(monkeypatch):
    few_logits(monkeypatch, 2**10)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    module = LlamaForCausalLM(config)
    tokens = torch.randint(50, (2, 30))
    expected = F.cross_entropy(module(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert held_out_loss(module, [tokens]) == pytest.approx(expected.item(), rel=1e-5)
