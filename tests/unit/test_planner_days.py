"""How long a run takes: the plan against a simulated run of the same settings, and what it says of it."""

import re
from pathlib import Path

import pytest
from peer_processes import TINY, write_corpus

from spes_p2p.cli import load_settings
from spes_p2p.commands.plan import PlanConfig, main
from spes_p2p.config import MachineConfig, RunConfig
from spes_p2p.planner.memory import Setup
from spes_p2p.planner.tables import days_text
from spes_p2p.planner.traffic import Course, round_traffic, transfer_seconds
from spes_p2p.sim.scenario import Scenario
from spes_p2p.sim.simulator import simulate
from spes_p2p.training import speed
from spes_p2p.training.speed import piece, token_operations

STEP_TOKENS = 4 * 16
SPEED = 1.0 * STEP_TOKENS


@pytest.mark.parametrize(
    ("peers", "mbit", "round"),
    [
        pytest.param(3, None, {"mode": "steps", "steps": 40}, id="no link", marks=pytest.mark.full),
        pytest.param(4, 1.0, {"mode": "steps", "steps": 40}, id="steps"),
        pytest.param(4, 1.0, {"mode": "tokens", "tokens": 4 * 40 * STEP_TOKENS}, id="tokens", marks=pytest.mark.full),
        pytest.param(
            *(3, 1.0, {"mode": "tokens", "tokens": 1, "min_seconds": 60.0, "growing": 3}),
            id="growing",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_simulated_run_takes_the_time_and_gives_the_tokens_of_its_plan(tmp_path: Path, peers, mbit, round):
    write_corpus(tmp_path / "corpus.jsonl")
    run = RunConfig.model_validate(
        {**TINY, "round": {**TINY["round"], "total": 5, "averaging_seconds": 60, "max_seconds": 600, **round}}
    )
    settings = {"peers": peers, "max_slots": 2, "speeds": SPEED, "threads": 1, "evaluate_rounds": 100}
    scenario = Scenario(run=run, text=[tmp_path / "corpus.jsonl"], uplink_mbit=mbit, **settings)
    result = simulate(scenario, cache=tmp_path / "cache")
    setup = Setup.of(result.run, MachineConfig(), None)
    traffic = round_traffic(result.size, 2, peers, setup)
    plan = Course.of(run, peers, SPEED, transfer_seconds(traffic, mbit, mbit).total if mbit else 0.0)
    tokens = sum(report.tokens for own in result.reports for report in own)
    print(f"plan {plan.seconds:.0f} s, {plan.tokens:.0f} tokens; run {result.virtual_seconds:.0f} s, {tokens} tokens")
    assert plan.seconds == pytest.approx(result.virtual_seconds, rel=0.1)
    assert plan.tokens == pytest.approx(tokens, rel=0.1)


def test_a_piece_stands_for_a_model_that_no_test_machine_holds():
    model = RunConfig().model.model_copy(update={"hidden_size": 2048, "intermediate_size": 2048, "num_experts": 32})
    small = piece(model, 150_000)
    assert (small.num_layers, small.num_experts) == (1, 4) and piece(small, 300) == small
    whole, part = (token_operations(each, 300, 1.0, 64) for each in (model, small))
    assert whole == pytest.approx(model.num_layers * part, rel=0.02), "the layers take nearly all operations"
    assert token_operations(model, 300, 0.0, 64) < whole < token_operations(model, 300, 1.0, 128)


def test_a_day_of_one_peer_more_and_the_electricity_are_what_they_add_up_to(capsys):
    flags = ["home_7b", "--memory-gb", "64", "--slots", "1", "--tokens-per-second", "3000", "--watts", "300"]
    assert main(load_settings(PlanConfig, [*flags, "--peers", "8"])) == 0
    text = capsys.readouterr().out
    assert "8 such peers: 40 days" in text
    seconds = 5000 * 16_777_216 / (8 * 3000)
    assert re.search(rf"\n  83.9 B tokens +{seconds / 86400:.3g}   36 with one peer more\n", text)
    assert re.search(r"tokens a day +2.07 B +one peer more adds 259 M\n", text)
    assert re.search(r"tokens per active parameter +49.5 +20 \(Chinchilla\) take 16.4 days\n", text)
    assert re.search(r"W a peer, kWh a day +57.6 +2,330 kWh in the run\n", text)


def test_a_small_model_is_measured_on_this_machine_unless_its_speed_is_given(capsys, monkeypatch):
    monkeypatch.setattr(speed, "MEASURE_SECONDS", 0.5)
    assert main(load_settings(PlanConfig, ["local_experiment"])) == 0
    assert re.search(r"such peers: \d+(\.\d)? (hours|minutes)\n", capsys.readouterr().out)
    assert main(load_settings(PlanConfig, ["local_experiment", "--memory-gb", "16"])) == 0
    assert "such peers: " not in capsys.readouterr().out, "another machine cannot be measured here"


def test_lengths_of_runs_in_words():
    assert [days_text(each) for each in (41.4, 2.34, 0.5, 0.01)] == ["41 days", "2.3 days", "12 hours", "14 minutes"]
