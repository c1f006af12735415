"""Tiny models, and stock Hugging Face models with the same weights to hold them against."""

import pytest
import torch
from checkpoints import MIXTURES
from transformers import PreTrainedModel

from spes_p2p.config import ModelConfig
from spes_p2p.model.build import build_slot_model, hf_config, model_class
from spes_p2p.model.slot_model import SlotModel

VOCAB, SEQUENCE, EXPERTS = 64, 16, 6
STOCK = {family: model_class(family) for family in MIXTURES}


@pytest.fixture(autouse=True)
def single_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def seed(seed):
    """The test's seed, by which torch draws as well."""
    torch.manual_seed(seed)
    return seed


@pytest.fixture
def tiny():
    def config(family: str = "olmoe", **changes: object) -> ModelConfig:
        shape: dict[str, object] = {
            **{"family": family, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
            **{"intermediate_size": 16, "num_experts": EXPERTS},
        }
        return ModelConfig.model_validate(shape | changes)

    return config


@pytest.fixture
def slot_model(tiny, seed):
    """Builds a tiny slot model, weights drawn from the test's seed."""

    def build(
        claimed: list[int],
        storage: str = "fp32",
        family: str = "olmoe",
        model_seed: int = seed,
        kernel: str = "loop",
        **shape: object,
    ) -> SlotModel:
        return build_slot_model(
            tiny(family, **shape),
            vocab_size=VOCAB,
            sequence_length=SEQUENCE,
            seed=model_seed,
            claimed=claimed,
            storage=storage,
            kernel=kernel,
        )

    return build


@pytest.fixture
def pair(tiny, slot_model):
    """A stock model as transformers builds it, and a slot model loaded with its weights."""

    def build(
        family: str, claimed: list[int], storage: str = "fp32", kernel: str = "loop", **shape: object
    ) -> tuple[PreTrainedModel, SlotModel]:
        config = hf_config(tiny(family, **shape), VOCAB, SEQUENCE)
        config._experts_implementation = "eager"
        stock = STOCK[family](config)
        with torch.no_grad():
            for parameter in stock.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4)  # stock initial weights give logits too small to tell a fault from rounding
        swapped = slot_model(claimed, storage, family, kernel=kernel, **shape)
        load_from_stock(swapped, stock)
        return stock, swapped

    return build


def load_from_stock(slot_model: SlotModel, stock: PreTrainedModel) -> None:
    named = dict(stock.named_parameters())
    slot_model.load_shared({name: named[name].detach() for name in slot_model.shared_shapes()})
    for slot in range(slot_model.num_slots):
        slot_model.load_slot(slot, {name: named[name].detach()[slot] for name in slot_model.slot_shapes()})


@pytest.fixture
def tokens(seed):
    return torch.randint(0, VOCAB, (4, SEQUENCE + 1))
