"""The shipped SPES models cost what the peer study derived for them (facts: field 2.1), and what the issue asks for."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from spes_p2p.cli import load_settings
from spes_p2p.commands.plan import PlanConfig
from spes_p2p.config import MachineConfig, RunConfig
from spes_p2p.planner.activations import Activations
from spes_p2p.planner.memory import FROZEN_BYTES, Setup, peer_memory
from spes_p2p.planner.size import ModelSize, model_size
from spes_p2p.planner.traffic import round_traffic

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MANY = 10**6
"""So many peers that a butterfly average costs two times the vector, as in the study."""


@dataclass(frozen=True)
class Row:
    """One line of the study's table: parameters in 10^9, bytes in 10^9."""

    config: str
    slots: int
    shared: float
    slot: float
    total: float
    active: float
    trainable: float
    full_adamw: float
    frozen_fp32: float
    bf16: float
    int8: float
    nf4: float
    nf4_adamw8bit: float
    diloco: float
    spes_star: float
    p2p_int8: float
    p2p_nf4: float


ROWS = [
    Row("spes_1b", 4, 0.26, 0.0566, 1.17, 0.37, 0.42, 18.7, 10.5, 9.2, 8.5, 8.2, 4.3, 9.3, 6.6, 1.70, 0.93),
    Row("spes_7b", 8, 0.89, 0.201, 7.33, 1.70, 0.34, 117, 59.3, 49.7, 45.0, 42.7, 22.7, 58.7, 39.3, 10.1, 5.5),
    Row("spes_7b", 1, 0.89, 0.201, 7.33, 1.70, 0.15, 117, 42.4, 30.0, 23.9, 21.0, 12.2, 58.7, 33.7, 8.7, 4.7),
    Row("spes_9b", 2, 0.98, 1.057, 9.43, 3.09, 0.33, 151, 74.8, 62.1, 56.0, 53.0, 28.3, 75.4, 50.1, 12.9, 7.0),
]


def of_config(name: str) -> tuple[RunConfig, ModelSize]:
    run = load_settings(PlanConfig, ["--config", str(CONFIGS / f"{name}.yaml")]).run
    return run, model_size(run.model, run.data.vocab_size)


def static_gb(size: ModelSize, slots: int, setup: Setup) -> float:
    return peer_memory(size, slots, setup).static_bytes / 1e9


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.config}-{row.slots}")
def test_the_peer_studys_table_is_reproduced(row):
    run, size = of_config(row.config)
    close = {"rel": 0.015}
    assert size.shared_params / 1e9 == pytest.approx(row.shared, **close)
    assert size.slot_params / 1e9 == pytest.approx(row.slot, **close)
    assert size.total_params / 1e9 == pytest.approx(row.total, **close)
    active = size.shared_params + run.model.top_k * size.slot_params
    assert active / 1e9 == pytest.approx(row.active, **close)
    assert size.trained_params(row.slots) / size.total_params == pytest.approx(row.trainable, abs=0.005)
    assert static_gb(size, size.num_slots, Setup("fp32")) == pytest.approx(row.full_adamw, **close)
    for storage, expected in (("fp32", row.frozen_fp32), ("bf16", row.bf16), ("int8", row.int8), ("nf4", row.nf4)):
        assert static_gb(size, row.slots, Setup(storage)) == pytest.approx(expected, **close)  # type: ignore[arg-type]
    # The study takes 8 bytes to a parameter trained by 8-bit AdamW: that is with gradients of two bytes.
    small = Setup("nf4", "adamw8bit", gradient_bytes=2)
    assert static_gb(size, row.slots, small) == pytest.approx(row.nf4_adamw8bit, **close)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.config}-{row.slots}")
def test_the_studys_bytes_per_round_are_ours_in_its_codecs(row):
    _, size = of_config(row.config)
    local = Setup(averaged_moments=0)
    ours = round_traffic(size, row.slots, MANY, local).total
    for storage, expected in (("int8", row.p2p_int8), ("nf4", row.p2p_nf4)):
        assert ours / 4 * FROZEN_BYTES[storage] / 1e9 == pytest.approx(expected, rel=0.015)  # type: ignore[index]
    # What SPES's server and a peer exchange in both directions is what a peer of ours moves in each.
    assert ours / 1e9 == pytest.approx(row.spes_star, rel=0.015)
    everything = round_traffic(size, size.num_slots, MANY, local).total
    assert everything / 1e9 == pytest.approx(row.diloco, rel=0.015)


def test_in_four_bits_a_peer_of_the_7b_model_receives_an_eighth_of_what_spess_server_sends_it():
    """It sends a third of what a peer of SPES sends: only peers send what peers receive."""
    run, size = of_config("spes_7b")
    int4 = run.model_copy(update={"codecs": run.codecs.model_copy(update={"shared": "int4", "slots": "int4"})})
    ours = round_traffic(size, 8, 4, Setup.of(int4, MachineConfig(), None)).total
    sent, received = 4 * size.trained_params(8), 4 * size.total_params
    assert (received / ours, sent / ours) == (pytest.approx(8.68, abs=0.05), pytest.approx(2.96, abs=0.05))


def test_seven_billion_parameters_fit_a_card_of_24_gigabytes():
    _, size = of_config("spes_7b")
    assert static_gb(size, 1, Setup("nf4")) <= 21.0


def test_eight_bit_adamw_takes_gradients_of_two_bytes_to_get_below_twelve_and_a_half():
    """With fp32 gradients it is 14.5 GB; the issue's 12.5 counts two bytes to a gradient, as --gradients bf16 does."""
    _, size = of_config("spes_7b")
    setup = Setup("nf4", "adamw8bit")
    assert static_gb(size, 1, setup) == pytest.approx(14.5, abs=0.05)
    assert static_gb(size, 1, replace(setup, gradient_bytes=2)) <= 12.5


def test_the_model_of_two_billion_needs_what_the_paper_measured(monkeypatch):
    """About 55 GB for DiLoCo and 35 for SPES on one GPU (facts: field 2.1); here with the settings that ship.

    They keep all logits of a microbatch, their softmax and its gradient; in chunks, half is needed.
    """
    monkeypatch.setattr("spes_p2p.planner.activations.LOGITS_BYTES", 2**40)
    run, size = of_config("spes_2b")
    assert size.total_params / 1e9 == pytest.approx(2.0, rel=0.01)
    config = load_settings(PlanConfig, ["--config", str(CONFIGS / "spes_2b.yaml")])
    setup = Setup.of(run, config, run.data.vocab_size, on_gpu=True)
    assert isinstance(setup.activations, Activations)
    rest = 2 * 4 * run.data.vocab_size * setup.activations.tokens
    assert (peer_memory(size, 1, setup).device_bytes + rest) / 1e9 == pytest.approx(35, rel=0.1)
    assert (peer_memory(size, size.num_slots, setup).device_bytes + rest) / 1e9 == pytest.approx(55, rel=0.1)
    monkeypatch.undo()
    assert peer_memory(size, 1, setup).device_bytes / 1e9 == pytest.approx(18, rel=0.02)
