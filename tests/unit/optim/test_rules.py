"""Each inner optimizer makes its paper's or library's steps, and its moments are what the averaging takes them for."""

import sys
from typing import get_args

import bitsandbytes
import pytest
import torch
from checkpoints import MIXTURES
from torch import Tensor, nn
from torch.nn import Parameter

from spes_p2p.config import ModelConfig, OptimizerName, OuterConfig, RunConfig, TrainConfig
from spes_p2p.errors import ConfigError
from spes_p2p.model.build import stock_model
from spes_p2p.optim.blockwise import MIN_8BIT_SIZE
from spes_p2p.optim.inner import InnerOptimizer, orthogonalised

NAMES = get_args(OptimizerName)
TRAIN = TrainConfig(clip_norm=1e9)
SHAPES = {"large": (70, 60), "small": (9, 4), "norm": (60,)}
BETAS = {"exp_avg": TRAIN.beta1, "exp_avg_sq": TRAIN.beta2}


def draw(seed: int) -> dict[str, Parameter]:
    torch.manual_seed(seed)
    return {name: Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}


def inner(params: dict[str, Parameter], name: OptimizerName) -> InnerOptimizer:
    return InnerOptimizer(params, {}, TRAIN, name)


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def step(optimizer: InnerOptimizer, params: dict[str, Parameter], number: int) -> None:
    for name, gradient in gradients(number).items():
        params[name].grad = gradient
    optimizer.step(1e-2)


def assert_same(actual: dict[str, Parameter], expected: dict[str, Tensor], **tolerance: float) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name].detach(), tensor.detach().to(torch.float32), **tolerance, msg=name)


def test_lamb_makes_its_papers_steps(seed):
    """LAMB, Algorithm 2, in double precision."""
    params = draw(seed)
    params["norm"].data.zero_()
    optimizer = inner(params, "lamb")
    x = {name: param.detach().double() for name, param in params.items()}
    m = {name: torch.zeros_like(tensor) for name, tensor in x.items()}
    v = {name: torch.zeros_like(tensor) for name, tensor in x.items()}
    for t in range(1, 5):
        step(optimizer, params, t)
        for name, gradient in gradients(t).items():
            m[name] = TRAIN.beta1 * m[name] + (1 - TRAIN.beta1) * gradient
            v[name] = TRAIN.beta2 * v[name] + (1 - TRAIN.beta2) * gradient**2
            m_hat, v_hat = m[name] / (1 - TRAIN.beta1**t), v[name] / (1 - TRAIN.beta2**t)
            update = m_hat / (v_hat.sqrt() + TRAIN.eps) + TRAIN.weight_decay * x[name]
            ratio = x[name].norm() / update.norm() if x[name].any() else 1.0
            x[name] = x[name] - 1e-2 * ratio * update
    assert_same(params, x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("piece", [2**20, 1024])
def test_8_bit_steps_are_those_of_bitsandbytes_whole_or_piece_by_piece(seed, piece, monkeypatch):
    monkeypatch.setattr("spes_p2p.optim.blockwise.PIECE_NUMEL", piece)
    params, reference = draw(seed), draw(seed)
    optimizer = inner(params, "adamw8bit")
    theirs = bitsandbytes.optim.AdamW8bit(
        reference.values(), lr=1e-2, betas=(TRAIN.beta1, TRAIN.beta2), weight_decay=TRAIN.weight_decay
    )
    for number in range(4):
        step(optimizer, params, number)
        for key, gradient in gradients(number).items():
            reference[key].grad = gradient
        theirs.step()
    assert_same(params, reference, rtol=0, atol=0)
    (own,) = (rule.optimizer.state for rule in optimizer._rules)
    assert set(own) == set(params.values()), "no piece stays"
    for key, param in params.items():
        for kind, value in theirs.state[reference[key]].items():
            torch.testing.assert_close(own[param][kind], value, rtol=0, atol=0)


def test_adamw_in_8_bits_steps_as_torchs_adamw_does_but_for_rounding(seed):
    params, exact = draw(seed), draw(seed)
    start = {name: param.detach().clone() for name, param in params.items()}
    eight, full = inner(params, "adamw8bit"), inner(exact, "adamw")
    for number in range(20):
        step(eight, params, number)
        step(full, exact, number)
    for name in SHAPES:
        moved, wanted = params[name] - start[name], exact[name] - start[name]
        error = (moved - wanted).norm() / wanted.norm()
        assert error < (0.05 if name == "large" else 1e-4), f"{name}: {error:.2e}"


def test_muon_makes_torchs_steps_on_matrices_and_adamws_on_the_rest(seed):
    """Torch's iterations are in bf16, ours in fp32 on a CPU."""
    params, reference, start = draw(seed), draw(seed), draw(seed)
    optimizer = inner(params, "muon")
    muon = torch.optim.Muon(
        [reference["large"], reference["small"]],
        lr=1e-2,
        momentum=TRAIN.beta1,
        weight_decay=TRAIN.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        [reference["norm"]], lr=1e-2, betas=(TRAIN.beta1, TRAIN.beta2), eps=TRAIN.eps, weight_decay=TRAIN.weight_decay
    )
    for number in range(4):
        step(optimizer, params, number)
        for key, gradient in gradients(number).items():
            reference[key].grad = gradient
        muon.step()
        adamw.step()
    for name in SHAPES:
        moved, wanted = params[name] - start[name], reference[name] - start[name]
        error = (moved - wanted).norm() / wanted.norm()
        assert error < (1e-5 if name == "norm" else 0.02), f"{name}: {error:.2e}"


@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (16, 64)])
def test_an_orthogonalised_matrix_keeps_its_singular_vectors_and_has_singular_values_near_one(seed, shape):
    settings = torch.optim.Muon([torch.zeros(2, 2)]).defaults
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    found = orthogonalised(matrix, settings)
    assert torch.linalg.svdvals(found)[:-4].sub(1).abs().max() < 0.35  # the smallest take more iterations
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    turned = left.T @ found @ right.T
    assert torch.allclose(turned, torch.diag(turned.diag()), atol=1e-4)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", MIXTURES)
def test_muon_leaves_embeddings_head_and_norms_to_adamw(family, tie):
    shape = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 8}
    config = ModelConfig.model_validate({"family": family, "num_experts": 4, "tie_embeddings": tie, **shape})
    model = stock_model(config, 32, 8, seed=0)
    experts = {name: param for name, param in model.named_parameters() if param.dim() == 3}
    params = dict(model.named_parameters()) | {name: Parameter(param[0].detach()) for name, param in experts.items()}
    for param in params.values():
        param.grad = torch.ones_like(param)
    optimizer = inner(params, "muon")
    optimizer.step(1e-3)
    with_adamw = {name.split("/")[1] for name in optimizer.state_tensors() if name.endswith("/exp_avg_sq")}
    modules = [
        module for module in model.modules() if isinstance(module, nn.Embedding) or "Norm" in type(module).__name__
    ]
    wanted = {id(param) for module in [*modules, model.get_output_embeddings()] for param in module.parameters()}
    assert with_adamw == {name for name, param in params.items() if id(param) in wanted}
    assert any("gate.weight" in name for name in params.keys() - with_adamw), "routers are matrices like others"


@pytest.mark.parametrize("name", NAMES)
def test_a_run_averages_the_moments_that_its_optimizer_keeps(seed, name):
    run = RunConfig(train=TrainConfig(optimizer=name))
    optimizer = inner(draw(seed), name)
    optimizer.add_slot(1, {key: param for key, param in draw(seed).items() if param.dim() == 2})
    assert optimizer.kinds("shared") == run.averaged_moments("shared")
    assert optimizer.kinds("slot-1") == run.averaged_moments("slot")


@pytest.mark.parametrize("name", ["adamw8bit", "lamb"])
def test_moments_of_adamws_kin_are_adamws_own(seed, name):
    """Bias-corrected, by kind and parameter; in 8 bits up to a hundredth of the block's largest."""
    params, reference = draw(seed), draw(seed)
    ours, adamw = inner(params, name), inner(reference, "adamw")
    for number in range(3):
        step(ours, params, number)
        step(adamw, reference, number)
    for actual, expected in zip(ours.moments("shared", list(BETAS)), adamw.moments("shared", list(BETAS)), strict=True):
        for key, tensor in expected.items():
            exact = name == "lamb" or key != "large"
            atol = 1e-6 if exact else 0.02 * tensor.abs().max().item()
            torch.testing.assert_close(actual[key], tensor, rtol=1e-5, atol=atol, msg=key)


def test_muons_momentum_counts_as_the_first_moment_and_as_it_is(seed):
    params = draw(seed)
    optimizer = InnerOptimizer(params, {}, TRAIN.model_copy(update={"weight_decay": 0.0}), "muon")
    for number in range(2):
        step(optimizer, params, number)
    first, second = optimizer.moments("shared", ["exp_avg", "exp_avg_sq"])
    expected = (1 - TRAIN.beta1) * (TRAIN.beta1 * gradients(0)["small"] + gradients(1)["small"])
    torch.testing.assert_close(first["small"], expected)
    assert not second["small"].any(), "there is none"


@pytest.mark.parametrize("name", NAMES)
def test_a_peer_goes_on_from_the_moments_it_is_given(seed, name):
    params = draw(seed)
    optimizer = inner(params, name)
    step(optimizer, params, 0)
    own = dict(zip(BETAS, optimizer.moments("shared", list(BETAS)), strict=True))
    given = {kind: {key: torch.rand(shape) for key, shape in SHAPES.items()} for kind in optimizer.kinds("shared")}
    optimizer.set_moments("shared", given)
    for kind in optimizer.kinds("shared"):
        (actual,) = optimizer.moments("shared", [kind])
        for key, tensor in actual.items():
            expected = given[kind][key] if kind == "exp_avg" or own[kind][key].any() else torch.zeros_like(tensor)
            atol = 0.02 if "8bit" in name and key == "large" else 1e-6
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=atol, msg=f"{kind} of {key}")


def test_after_an_average_an_8_bit_step_is_adamws_from_the_same_moments(seed):
    params, exact = draw(seed), draw(seed)
    eight, full = inner(params, "adamw8bit"), inner(exact, "adamw")
    average = {kind: {key: 0.1 + torch.rand(shape) for key, shape in SHAPES.items()} for kind in BETAS}
    for optimizer, of in ((eight, params), (full, exact)):
        step(optimizer, of, 0)
        for key, param in of.items():
            param.data.copy_(draw(seed)[key])
        optimizer.set_moments("shared", average)
        step(optimizer, of, 1)
    for key, start in draw(seed).items():
        moved, wanted = params[key] - start, exact[key] - start
        assert (moved - wanted).norm() < (0.02 if key == "large" else 1e-5) * wanted.norm(), key


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("large/exp_avg", torch.zeros(70, 60), r"large/exp_avg is torch.float32 .*; expected torch.uint8"),
        ("large/exp_avg", torch.zeros(60, 70, dtype=torch.uint8), r"\[60, 70\]; expected torch.uint8 \[70, 60\]"),
        ("large/exp_avg_absmax", torch.zeros(16), r"\[16\]; expected torch.float32 \[17\]"),
        ("large/exp_avg_absmax", torch.full((17,), torch.nan), "not finite"),
        ("large/exp_avg_sq_absmax", torch.full((17,), -1.0), "negative"),
        ("large/exp_avg_sq_absmax", None, "large lacks exp_avg_sq_absmax"),
        ("small/exp_avg_absmax", torch.zeros(1), "small/exp_avg_absmax, which this model does not have"),
        ("small/exp_avg", torch.zeros(9, 4, dtype=torch.uint8), "expected torch.float32"),
    ],
)
def test_a_bad_8_bit_payload_is_refused_and_adds_nothing(seed, key, value, message):
    params, reference = draw(seed), draw(seed)
    optimizers = [
        InnerOptimizer({"x": Parameter(torch.ones(2))}, {3: p}, TRAIN, "adamw8bit") for p in (params, reference)
    ]
    for optimizer, of in zip(optimizers, (params, reference), strict=True):
        step(optimizer, of, 0)
    payload = optimizers[0].remove_slot(3)
    bad = {k: v for k, v in payload.items() if k != key} if value is None else payload | {key: value}
    with pytest.raises(ValueError, match=message):
        optimizers[0].add_slot(3, params, bad)
    assert optimizers[0].slots == []
    optimizers[0].add_slot(3, params, payload)
    for optimizer, of in zip(optimizers, (params, reference), strict=True):
        step(optimizer, of, 1)
    assert_same(params, reference, rtol=0, atol=0)


@pytest.mark.parametrize(("numel", "size"), [(4095, 4 * 4095), (4096, 4096 + 4 * 16), (4097, 4097 + 4 * 17)])
def test_8_bit_state_is_a_byte_a_parameter_and_a_scale_per_block_from_4096_on(numel, size):
    param = Parameter(torch.ones(numel))
    optimizer = InnerOptimizer({"x": param}, {}, TRAIN, "adamw8bit")
    param.grad = torch.ones(numel)
    optimizer.step(1e-3)
    of_bitsandbytes = next(iter(optimizer._rules[0].optimizer.state.values()))
    assert of_bitsandbytes["state1"].dtype == (torch.float32 if numel < 4096 else torch.uint8)
    tensors = optimizer.state_tensors()
    assert sum(tensor.nbytes for name, tensor in tensors.items() if not name.endswith("/step")) == 2 * size


def test_a_missing_bitsandbytes_is_named_with_the_remedy(seed, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"^optimizer adamw8bit needs bitsandbytes.*pip install .*or set adamw$"):
        inner(draw(seed), "adamw8bit")


def test_a_device_that_bitsandbytes_cannot_use_is_named_with_the_remedy(seed, monkeypatch):
    def fail(self: object) -> None:
        raise NotImplementedError("no kernel for this backend\nand much more")

    monkeypatch.setattr(bitsandbytes.optim.AdamW8bit, "step", fail)
    with pytest.raises(ConfigError, match=r"adamw8bit does not work on cpu here \(no kernel for this backend\); pip"):
        inner(draw(seed), "adamw8bit")


def test_averaging_second_moments_that_do_not_exist_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"outer.moments=second, but train.optimizer=muon .*set outer.moments to both"):
        RunConfig(train=TrainConfig(optimizer="muon"), outer=OuterConfig(moments="second"))


def pairs_of_steps(name: str, gradients: str) -> dict[str, Tensor]:
    """Parameters after five steps down the same path."""
    params = {"a": Parameter(torch.linspace(-1, 1, 2 * MIN_8BIT_SIZE).view(64, -1)), "b": Parameter(torch.ones(8))}
    optimizer = InnerOptimizer(params, {}, TrainConfig(optimizer=name, lr=1e-2), gradients=gradients)
    for step in range(5):
        sum(((p - 0.3 * step) ** 2).sum() for p in params.values()).backward()
        assert gradients == "fp32" or all(p.grad.dtype == torch.bfloat16 for p in params.values())
        optimizer.step(1e-2)
        optimizer.zero_grad()
    return {name: p.detach() for name, p in params.items()}


def test_gradients_of_two_bytes_lead_where_whole_ones_do():
    narrow, wide = pairs_of_steps("adamw8bit", "bf16"), pairs_of_steps("adamw8bit", "fp32")
    for key, tensor in wide.items():
        assert ((narrow[key] - tensor).abs() <= 4e-3).float().mean() > 0.99
