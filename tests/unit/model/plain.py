"""The experts in the plainest way: one token and one expert at a time, in float64."""

from collections.abc import Iterable
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from spes_p2p.model.bank import ExpertBank
from spes_p2p.model.kernels import KERNELS
from spes_p2p.model.slot_model import SlotModel

EXPERTS, WIDTH, INNER, TOP_K = 5, 16, 8, 2
CPU = torch.device("cpu")
NEEDS_BITSANDBYTES = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
NF4 = pytest.param("nf4", marks=NEEDS_BITSANDBYTES)
STORAGES = ["fp32", "bf16", "int8", NF4]


class PlainExperts(nn.Module):
    """A stock experts module's surface."""

    def __init__(self, experts: int = EXPERTS, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, width) / 4)
        self.down_proj = nn.Parameter(torch.randn(experts, width, inner) / 4)
        self.act_fn = nn.SiLU()

    def forward(self, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Every token's sum, in float64."""
        rows = [x_TD[:0].double()]
        for x_D, experts, weights in zip(x_TD.double(), index_TK.tolist(), weights_TK.double(), strict=True):
            y_D = torch.zeros(x_TD.shape[1], dtype=torch.float64)
            for expert, weight in zip(experts, weights, strict=True):
                gate, up = (self.gate_up_proj[expert].double() @ x_D).chunk(2)
                y_D = y_D + weight * (self.down_proj[expert].double() @ (self.act_fn(gate) * up))
            rows.append(y_D[None])
        return torch.cat(rows)


def routed(num_tokens: int, experts: int = EXPERTS, width: int = WIDTH, top_k: int = TOP_K):
    """Tokens, their experts and routing weights; only the first `experts` are hit."""
    x_TD = torch.randn(num_tokens, width, requires_grad=True)
    index_TK = torch.rand(num_tokens, experts).argsort(-1)[:, :top_k]
    return x_TD, index_TK, torch.rand(num_tokens, top_k, requires_grad=True)


def bank_of(stock: nn.Module, claimed: Iterable[int], storage: str = "fp32", kernel: str = "loop") -> ExpertBank:
    """A bank with the weights of `stock`."""
    bank = ExpertBank(stock, claimed, storage, KERNELS[kernel]())
    for slot in range(bank.num_experts):
        bank.load(slot, {name: getattr(stock, name).detach()[slot] for name in bank.shapes})
    return bank


def stock_state(model: SlotModel) -> dict[str, Tensor]:
    """A copy of the model under the stock class's names, with experts fused to `[E, O, I]`; tied weights stay tied."""
    copies: dict[int, Tensor] = {}
    state = {
        name: copies.setdefault(tensor.data_ptr(), tensor.detach().clone())
        for name, tensor in model.module.state_dict().items()
        if ".mlp.experts." not in name
    }
    slots = [model.slot_weights(slot) for slot in range(model.num_slots)]
    return state | {name: torch.stack([weights[name] for weights in slots]) for name in model.slot_shapes()}
