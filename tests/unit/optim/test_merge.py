import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spes_p2p.config import MergeConfig
from spes_p2p.optim.outer import merge_alpha, merge_experts

seeds = st.integers(0, 2**31 - 1)
shares = st.floats(0, 1)
neighbour_counts = st.integers(1, 6)


def draw_layer(seed: int, num_experts: int, width: int = 5, inner: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num_experts, 2 * inner, width, generator=generator),
        torch.randn(num_experts, width, inner, generator=generator),
    )


def slow_rule(gate_up: Tensor, down: Tensor, alpha: float, top_k: int) -> tuple[list[list[float]], list[list[float]]]:
    """SPES's rule number by number: cosine of the gates, the top k others, `w + alpha * mean(w_j - w)`."""
    num_experts, rows, _ = gate_up.shape
    gates = [gate_up[e, : rows // 2].flatten().tolist() for e in range(num_experts)]

    def cosine(a: list[float], b: list[float]) -> float:
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))

    merged: tuple[list[list[float]], list[list[float]]] = ([], [])
    for e in range(num_experts):
        others = sorted((j for j in range(num_experts) if j != e), key=lambda j: -cosine(gates[e], gates[j]))
        nearest = others[: min(top_k, num_experts - 1)]
        for weight, results in zip((gate_up, down), merged, strict=True):
            values = [weight[j].flatten().tolist() for j in range(num_experts)]
            results.append(
                [
                    w + alpha * sum(values[j][i] - w for j in nearest) / max(len(nearest), 1)
                    for i, w in enumerate(values[e])
                ]
            )
    return merged


@given(seed=seeds, num_experts=st.integers(1, 7), alpha=shares, top_k=neighbour_counts)
def test_equals_the_rule_written_out(seed, num_experts, alpha, top_k):
    gate_up, down = draw_layer(seed, num_experts)
    results = merge_experts(gate_up, down, alpha, top_k)
    for merged, reference, weight in zip(results, slow_rule(gate_up, down, alpha, top_k), (gate_up, down), strict=True):
        torch.testing.assert_close(merged, torch.tensor(reference).view_as(weight), rtol=1e-5, atol=1e-6)


def test_only_the_gate_decides_who_is_similar():
    """Experts 0 and 1 share a gate and nothing else; 0 and 2 share everything else."""
    gate_up, down = draw_layer(7, 3)
    gate_up[1, :3] = gate_up[0, :3]
    gate_up[2, 3:], down[2] = gate_up[0, 3:], down[0]
    gate_up[2, :3] = -gate_up[0, :3]
    merged_gate_up, merged_down = merge_experts(gate_up, down, 1.0, 1)
    torch.testing.assert_close(merged_gate_up[0], gate_up[1])
    torch.testing.assert_close(merged_down[0], down[1])


@given(seed=seeds, top_k=neighbour_counts)
def test_alpha_zero_changes_nothing_and_shares_no_memory(seed, top_k):
    layer = draw_layer(seed, 5)
    for merged, weight in zip(merge_experts(*layer, 0.0, top_k), layer, strict=True):
        assert torch.equal(merged, weight) and merged.data_ptr() != weight.data_ptr()


@given(seed=seeds, alpha=shares, top_k=neighbour_counts, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_identical_experts_stay_as_they_are(seed, alpha, top_k, dtype):
    layer = [weight.to(dtype).expand(5, -1, -1).contiguous() for weight in draw_layer(seed, 1)]
    for merged, weight in zip(merge_experts(layer[0], layer[1], alpha, top_k), layer, strict=True):
        assert torch.equal(merged, weight) and merged.dtype == dtype


@given(seed=seeds, alpha=shares, top_k=neighbour_counts, order=st.permutations(range(6)))
def test_the_experts_order_does_not_matter(seed, alpha, top_k, order):
    gate_up, down = draw_layer(seed, 6)
    straight = merge_experts(gate_up, down, alpha, top_k)
    shuffled = merge_experts(gate_up[order], down[order], alpha, top_k)
    for left, right in zip(straight, shuffled, strict=True):
        torch.testing.assert_close(left[order], right, rtol=1e-5, atol=1e-6)


@given(seed=seeds, alpha=shares)
def test_a_single_expert_stays_as_it_is(seed, alpha):
    layer = draw_layer(seed, 1)
    for merged, weight in zip(merge_experts(*layer, alpha, 4), layer, strict=True):
        assert torch.equal(merged, weight)


def test_equal_cosines_go_to_the_lower_index(seed):
    """Upcycled experts start with equal gates; peers must not choose among them by rounding noise."""
    gate_up, down = draw_layer(seed, 6, width=64, inner=32)
    gate_up[:, :32] = gate_up[0, :32] * torch.tensor([1.0, 0.3, 1.7, 0.9, 2.3, 1.1]).view(6, 1, 1)
    merged_gate_up, merged_down = merge_experts(gate_up, down, 1.0, 2)
    for expert, nearest in ((0, [1, 2]), (1, [0, 2]), (5, [0, 1])):
        torch.testing.assert_close(merged_gate_up[expert], gate_up[nearest].mean(0), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(merged_down[expert], down[nearest].mean(0), rtol=1e-5, atol=1e-5)


def test_the_arguments_stay_as_they_are(seed):
    layer = draw_layer(seed, 4)
    before = [weight.clone() for weight in layer]
    merge_experts(*layer, 0.5, 2)
    assert all(torch.equal(weight, old) for weight, old in zip(layer, before, strict=True))


def test_alpha_decays_linearly_and_only_on_merge_rounds():
    merge = MergeConfig(alpha=0.05, interval_rounds=5, decay_rounds=20)
    expected = {0: 0.05, 1: 0.0, 5: 0.0375, 7: 0.0, 10: 0.025, 15: 0.0125, 20: 0.0, 25: 0.0, 1000: 0.0}
    assert {round: merge_alpha(merge, round) for round in expected} == pytest.approx(expected)


def test_merging_is_off_by_default():
    assert all(merge_alpha(MergeConfig(), round) == 0 for round in range(20))


def test_a_zero_gate_is_no_ones_nan():
    gate_up, down = draw_layer(11, 4)
    gate_up[2] = 0
    assert all(torch.isfinite(merged).all() for merged in merge_experts(gate_up, down, 0.5, 2))
