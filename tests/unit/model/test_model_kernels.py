"""Kernels: all of them compute the plain sum and its gradients, keep little, and say when they cannot work."""

import json
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from spes_p2p.errors import ConfigError
from spes_p2p.model import kernels
from spes_p2p.model.bank import ExpertBank
from spes_p2p.model.build import build_slot_model
from spes_p2p.model.frozen import Int8, Nf4, Plain
from spes_p2p.model.kernels import KERNELS, choose_kernel
from tests.unit.model.plain import (
    CPU,
    EXPERTS,
    INNER,
    NEEDS_BITSANDBYTES,
    NF4,
    STORAGES,
    TOP_K,
    WIDTH,
    PlainExperts,
    bank_of,
    routed,
)

CUDA = torch.device("cuda")
SHAPES = [(2 * INNER, WIDTH), (WIDTH, INNER)]
ON_CPU = ["loop", "grouped_mm"]


def assert_near(actual: Tensor, expected: Tensor, share: float, what: str, summands: float = 1.0) -> None:
    """Equal but for a share of the largest value, or of `summands`: a sum of numbers of that size may cancel out."""
    error = (actual.double() - expected.double()).abs().max().item() if actual.numel() else 0.0
    largest = expected.abs().max().item() if expected.numel() else 0.0
    assert actual.shape == expected.shape and error <= share * max(largest, summands), f"{what}: off by {error:.1e}"


def assert_equals_plain(
    bank: ExpertBank, stock: PlainExperts, batch, share: float, dtype: torch.dtype | None = None, autocast: bool = False
) -> None:
    """Compares the result and every gradient."""
    x_TD, index_TK, weights_TK = batch
    device = bank.frozen.device
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        actual = bank(x_TD.to(device, dtype or x_TD.dtype), index_TK.to(device), weights_TK.to(device)).cpu()
    assert actual.dtype == (dtype or x_TD.dtype)
    expected = stock(x_TD, index_TK, weights_TK)
    assert_near(actual, expected, share, "sum")
    weight_TD = torch.randn(expected.shape, dtype=torch.float64)
    params = [param for slot in bank.claimed for param in bank.parameters_of(slot).values()]
    got = torch.autograd.grad((actual.double() * weight_TD).sum(), [x_TD, weights_TK, *params])
    wanted = torch.autograd.grad(
        (expected * weight_TD).sum(), [x_TD, weights_TK, *stock.parameters()], materialize_grads=True
    )
    assert_near(got[0], wanted[0], share, "tokens' gradient")
    # A product with a vector as long as the model is wide, of which the result need not show anything.
    length = weight_TD.norm(dim=-1).max().item() if weight_TD.numel() else 1.0
    assert_near(got[1], wanted[1], share, "routing weights' gradient", max(length, 1.0))
    of_slots = (wanted_EOI[slot] for slot in bank.claimed for wanted_EOI in wanted[2:])
    for grad, own in zip(got[2:], of_slots, strict=True):
        assert grad.dtype == torch.float32
        assert_near(grad.cpu(), own, share, f"gradient {list(own.shape)}")


def as_stored(bank: ExpertBank) -> PlainExperts:
    """Plain experts with the weights that a bank has after rounding."""
    stock = PlainExperts()
    with torch.no_grad():
        for slot in range(EXPERTS):
            for name, weight_OI in bank.weights_of(slot).items():
                getattr(stock, name)[slot] = weight_OI
    return stock


@st.composite
def cases(draw):
    """Any routing, any claims: experts that no token chose, one token, no tokens."""
    experts = draw(st.integers(1, 6))
    hit = draw(st.integers(1, experts))
    return SimpleNamespace(
        **{"seed": draw(st.integers(0, 2**31)), "experts": experts, "hit": hit},
        **{"top_k": draw(st.integers(1, hit)), "claimed": draw(st.sets(st.integers(0, experts - 1)))},
        **{"num_tokens": draw(st.integers(0, 24)), "width": draw(st.sampled_from([8, 16, 40]))},
        **{"inner": draw(st.sampled_from([8, 24]))},
    )


CANCELS_OUT = {
    **{"seed": 21, "experts": 1, "hit": 1, "top_k": 1, "claimed": set(), "num_tokens": 1, "width": 40},
    **{"inner": 8},
}


@pytest.mark.parametrize("kernel", ON_CPU)
@given(case=cases())
@example(case=SimpleNamespace(**CANCELS_OUT))
def test_sum_and_every_gradient_equal_the_plain_ones(kernel, case):
    torch.manual_seed(case.seed)
    stock = PlainExperts(case.experts, case.width, case.inner)
    bank = bank_of(stock, sorted(case.claimed), kernel=kernel)
    batch = routed(case.num_tokens, case.hit, case.width, case.top_k)
    assert_equals_plain(bank, stock, batch, 2e-6)


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("mode", ["autocast", "activations"])
@pytest.mark.parametrize("claimed", [[], [1, 2], range(EXPERTS)], ids=["none", "some", "all"])
def test_bf16_stays_within_its_rounding(seed, kernel, mode, claimed):
    stock = PlainExperts()
    bank = bank_of(stock, claimed, kernel=kernel)
    dtype = torch.bfloat16 if mode == "activations" else None
    assert_equals_plain(bank, stock, routed(11), 3e-2, dtype, autocast=mode == "autocast")


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("storage", STORAGES)
def test_products_use_the_weights_as_they_are_stored(seed, kernel, storage):
    bank = bank_of(PlainExperts(), [2], storage, kernel)
    assert_equals_plain(bank, as_stored(bank), routed(9), 2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", list(KERNELS))
@pytest.mark.parametrize("mode", ["fp32", "autocast", "activations"])
@pytest.mark.parametrize("storage", ["bf16", "int8", NF4])
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_sum_and_every_gradient_on_cuda_equal_the_plain_ones(seed, kernel, mode, storage, num_tokens):
    found = KERNELS[kernel]()
    if (reason := found.available(CUDA)) is not None or (kernel, mode) == ("megablocks", "fp32"):
        pytest.skip(reason or "bf16 only")
    bank = bank_of(PlainExperts(), [1, 2], storage, kernel).to("cuda")
    dtype = torch.bfloat16 if mode == "activations" else None
    share = 2e-6 if mode == "fp32" else 3e-2
    assert_equals_plain(bank, as_stored(bank), routed(num_tokens, experts=4), share, dtype, autocast=mode == "autocast")


def test_bf16_products_are_in_bf16(seed, monkeypatch):
    seen, mm = set(), torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **options: seen.add(a.dtype) or mm(a, b, **options))
    with torch.autocast("cpu", torch.bfloat16):
        bank_of(PlainExperts(), [1])(*routed(5)).sum().backward()
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("num_tokens", [0, 7])
def test_starved_claimed_expert_gets_zeros_and_not_none(seed, kernel, num_tokens):
    bank = bank_of(PlainExperts(), [0, 4], kernel=kernel)
    bank(*routed(num_tokens, experts=4)).sum().backward()
    for parameter in bank.parameters_of(4).values():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("claimed", [[], [1, 3]], ids=["none", "some"])
def test_of_frozen_experts_only_gate_and_up_are_saved(seed, kernel, storage, claimed):
    """Stock saves a row's input, gate and up, both factors of the product and the product, and all weights."""
    bank = bank_of(PlainExperts(), claimed, storage, kernel)
    batch, saved = routed(6), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y_TD = bank(*batch)
    own = {param.data_ptr() for param in bank.parameters()}
    floats = (tensor for tensor in saved if tensor.is_floating_point())
    shapes = sorted(tuple(tensor.shape) for tensor in floats if tensor.data_ptr() not in own)
    rows = 6 * TOP_K
    assert shapes == sorted([(rows, 2 * INNER), (rows, 1), *([(6, WIDTH)] if claimed else [])])
    assert any(tensor.data_ptr() == batch[0].data_ptr() for tensor in saved) == bool(claimed)
    y_TD.sum().backward()


@pytest.mark.parametrize("kernel", ON_CPU)
def test_recomputed_pass_that_routes_otherwise_has_the_gradients_of_its_own_routing(seed, kernel):
    """On a GPU a token between two experts may go to another one when activations are computed again."""
    stock = PlainExperts()
    bank = bank_of(stock, [1, 3], kernel=kernel)
    x_TD, first_TK, weights_TK = routed(9)
    second_TK = first_TK.flip(0)
    assert not torch.equal(first_TK, second_TK)
    routings = iter([first_TK, second_TK])
    y_TD = checkpoint(lambda x_TD: bank(x_TD, next(routings), weights_TK), x_TD, use_reentrant=False)
    got = torch.autograd.grad(y_TD.sum(), [x_TD, *bank.parameters()])
    wanted = torch.autograd.grad(bank(x_TD, second_TK, weights_TK).sum(), [x_TD, *bank.parameters()])
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize(
    ("storage", "kind"), [("bf16", Plain), ("int8", Int8), pytest.param("nf4", Nf4, marks=NEEDS_BITSANDBYTES)]
)
def test_the_loop_makes_one_weight_at_a_time_dense_and_keeps_none(seed, storage, kind, monkeypatch):
    made, dense = [], kind.dense

    def watched(weight, dtype):
        assert all(earlier.expired() for earlier in made), "an earlier dense weight is still alive"
        tensor = dense(weight, dtype)
        if tensor.data_ptr() not in {getattr(weight, part).data_ptr() for part in weight.PARTS}:
            made.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    bank = bank_of(PlainExperts(), [0], storage, "loop")
    monkeypatch.setattr(kind, "dense", watched)
    y_TD = bank(*routed(40))
    forward = len(made)
    assert forward == 2 * (EXPERTS - 1) and all(earlier.expired() for earlier in made)
    y_TD.sum().backward()
    assert len(made) == 2 * forward and all(earlier.expired() for earlier in made)


def test_unknown_kernel_says_what_is_known():
    with pytest.raises(ConfigError, match=r"'fast'.*auto or one of loop, grouped_mm, megablocks"):
        choose_kernel("fast", CPU, SHAPES)


def test_kernel_that_cannot_run_says_why_and_what_to_set():
    with pytest.raises(ConfigError, match=r"kernel=megablocks .*CUDA devices, not on cpu; set --kernel auto"):
        choose_kernel("megablocks", CPU, SHAPES)
    with pytest.raises(ConfigError, match=r"kernel=grouped_mm .*sizes \[12\] are no multiples of 8; set --kernel auto"):
        choose_kernel("grouped_mm", CPU, [(24, 32), (32, 12)])
    assert choose_kernel("loop", CPU, [(24, 32), (32, 12)]).name == "loop"


def test_pytorch_without_grouped_mm_says_which_has_it(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    with pytest.raises(ConfigError, match=r"has no grouped_mm, which came with 2\.10"):
        choose_kernel("grouped_mm", CPU, SHAPES)


@pytest.mark.parametrize(
    ("device", "capability", "shapes", "chosen", "why"),
    [
        (CPU, None, SHAPES, "loop", "loop, the fastest on cpu"),
        (CUDA, (9, 0), SHAPES, "grouped_mm", "grouped_mm, the fastest on cuda"),
        (CUDA, (7, 5), SHAPES, "loop", "not grouped_mm: T4 is older than Ampere"),
        (CUDA, (8, 9), SHAPES, "loop", "not grouped_mm: PyTorch has no fast one for T4"),
        (CUDA, (9, 0), [(24, 32), (32, 12)], "loop", "not grouped_mm: an expert's sizes [12]"),
        (torch.device("mps"), None, SHAPES, "loop", "loop, the fastest on mps"),
    ],
)
def test_auto_takes_the_best_that_can_be_used_and_logs_why(
    monkeypatch, caplog, device, capability, shapes, chosen, why
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    monkeypatch.setattr(kernels, "_grouped_gemm", lambda: pytest.fail("megablocks is loaded only by its name"))
    with caplog.at_level(logging.INFO, logger=kernels.__name__):
        assert choose_kernel("auto", device, shapes).name == chosen
    assert len(caplog.records) == 1 and why in caplog.text


def test_misaligned_model_is_refused_when_it_is_built(tiny):
    with pytest.raises(ConfigError, match=r"grouped_mm .*sizes \[12\]"):
        build_slot_model(
            tiny(intermediate_size=12),
            vocab_size=64,
            sequence_length=16,
            seed=0,
            claimed=[0],
            storage="fp32",
            kernel="grouped_mm",
        )


class PlainGroupedGemm:
    """`grouped_gemm.backend` as its source has it: bf16 only, contiguous rows, counts int64 on the host."""

    @staticmethod
    def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
        assert a.dtype == b.dtype == torch.bfloat16 and a.is_contiguous() and b.is_contiguous()
        assert batch_sizes.dtype == torch.int64 and batch_sizes.sum() == len(a) and not (trans_a and trans_b)
        parts = a.split(batch_sizes.tolist())
        if trans_a:
            return torch.stack([x.t() @ y for x, y in zip(parts, b.split(batch_sizes.tolist()), strict=True)])
        return torch.cat([x @ (w.t() if trans_b else w) for x, w in zip(parts, b, strict=True)])


@pytest.mark.parametrize("claimed", [[], [1, 2], range(EXPERTS)], ids=["none", "some", "all"])
@pytest.mark.parametrize("num_tokens", [0, 1, 11])
def test_megablocks_calls_its_package_as_it_wants_to_be_called(seed, monkeypatch, claimed, num_tokens):
    monkeypatch.setattr(kernels, "_grouped_gemm", lambda: PlainGroupedGemm)
    assert KERNELS["megablocks"]().available(CUDA) is None
    stock = PlainExperts()
    bank = bank_of(stock, claimed, kernel="megablocks")
    assert_equals_plain(bank, stock, routed(num_tokens, experts=4), 3e-2, autocast=True)


def test_megablocks_in_fp32_says_what_to_set(seed, monkeypatch):
    monkeypatch.setattr(kernels, "_grouped_gemm", lambda: PlainGroupedGemm)
    bank = bank_of(PlainExperts(), [1], kernel="megablocks")
    with pytest.raises(ConfigError, match=r"bf16 only, not in torch.float32; set train.precision=bf16"):
        bank(*routed(3))


GMM = """import torch
def gmm(a, b, batch_sizes, trans_a=False, trans_b=False, c=None):
    parts = a.split(batch_sizes.tolist())
    if trans_a:
        return torch.stack([x.t() @ y for x, y in zip(parts, b.split(batch_sizes.tolist()))])
    return torch.cat([x @ (w.t() if trans_b else w) for x, w in zip(parts, b)])
"""
HUB = (
    """from types import SimpleNamespace
import torch
def get_kernel(repo_id, *, revision=None, version=None):
    assert (repo_id, revision, version) == ("kernels-community/megablocks", None, 1)
    FAULT
"""
    + "    import grouped_products\n    return SimpleNamespace(gg_backend=grouped_products)\n"
)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Return a function that installs packages, by name and source, where neither of megablocks' is installed."""
    for name in ("kernels", "grouped_gemm", "grouped_gemm.backend", "grouped_products"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.syspath_prepend(tmp_path)
    kernels._grouped_gemm.cache_clear()

    def install(files: dict[str, str]) -> None:
        for name, source in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
            monkeypatch.delitem(sys.modules, name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))

    yield install
    kernels._grouped_gemm.cache_clear()


COMPILED = {"grouped_gemm/__init__.py": "", "grouped_gemm/backend.py": GMM}
PREBUILT = {"kernels/__init__.py": HUB.replace("FAULT", ""), "grouped_products.py": GMM}
NO_KERNELS = "; not kernels-community/megablocks: import of kernels halted; None in sys.modules"


@pytest.mark.parametrize(
    ("files", "taken"),
    [
        (PREBUILT, "kernels-community/megablocks"),
        (PREBUILT | COMPILED, "kernels-community/megablocks"),
        (COMPILED, f"grouped_gemm{NO_KERNELS}"),
        (
            {"kernels/__init__.py": HUB.replace("FAULT", "raise FileNotFoundError('no build\\nfor torch')")} | COMPILED,
            "grouped_gemm; not kernels-community/megablocks: no build for torch",
        ),
        (
            {"kernels/__init__.py": HUB.replace("FAULT", "raise ValueError('could not verify publisher')")} | COMPILED,
            "grouped_gemm; not kernels-community/megablocks: could not verify publisher",
        ),
    ],
    ids=["prebuilt", "both", "compiled", "no build", "no hub"],
)
def test_megablocks_takes_prebuilt_products_or_compiled_ones_and_logs_which(seed, packages, caplog, files, taken):
    packages(files)
    with caplog.at_level(logging.INFO, logger=kernels.__name__):
        assert KERNELS["megablocks"]().available(CUDA) is None
        stock = PlainExperts()
        assert_equals_plain(bank_of(stock, [1, 2], kernel="megablocks"), stock, routed(11), 3e-2, autocast=True)
    assert caplog.messages == [f"kernel megablocks: products of {taken}"]


def test_megablocks_without_products_says_how_to_install_them(packages):
    reason = KERNELS["megablocks"]().available(CUDA)
    assert reason == (
        f"{NO_KERNELS[2:]}; not grouped_gemm: import of grouped_gemm.backend halted; None in sys.modules; "
        "pip install 'spes-p2p[megablocks]' or see docs/planning.md"
    )


def test_megablocks_takes_what_the_package_kernels_loads(seed, tmp_path, monkeypatch):
    """A kernel in a folder in place of the hub, loaded by the real package."""
    pytest.importorskip("kernels", reason="kernels is not installed: extra `megablocks`")
    build = tmp_path / "build" / "torch-cpu"
    build.mkdir(parents=True)
    (build / "grouped.py").write_text(GMM)
    (build / "__init__.py").write_text("from . import grouped as gg_backend\n")
    metadata = {"id": "spes_test", "name": "megablocks", "version": 1, "license": "Apache-2.0", "python-depends": []}
    (build / "metadata.json").write_text(json.dumps(metadata | {"backend": {"type": "cpu"}}))
    monkeypatch.setenv("LOCAL_KERNELS", f"kernels-community/megablocks={tmp_path}")
    kernels._grouped_gemm.cache_clear()
    stock = PlainExperts()
    assert_equals_plain(bank_of(stock, [1, 2], kernel="megablocks"), stock, routed(11), 3e-2, autocast=True)
    assert kernels._grouped_gemm().__file__ == str(build / "grouped.py")
    kernels._grouped_gemm.cache_clear()
