"""What the benchmark says of a run is what the run's `metrics.jsonl` says, worked out by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks.accounts import account, local_steps, observed_seconds
from benchmarks.baselines import Together
from benchmarks.machine import Circumstances
from benchmarks.records import program_digest, write_rows
from benchmarks.stock import default_stock_model, pace_in_window, stock_step
from benchmarks.tables import Row
from spes_p2p.config import ModelConfig, RunConfig, TrainConfig
from spes_p2p.errors import DataError
from spes_p2p.model.loss import balance_loss, causal_lm_loss
from spes_p2p.monitor.events import JsonlSink, replay
from spes_p2p.monitor.sinks import Sinks
from spes_p2p.monitor.view import fold
from tests.unit.monitor.swarms import NUM_SLOTS, TOTAL_ROUNDS, claim, empty_view, report, snapshot

PHASES = {"train_seconds": 8.0, "matchmaking_seconds": 1.0, "averaging_seconds": 0.5, "exchange_seconds": 0.25}


def journal(directory: Path, rounds: list[list], poll_seconds: float = 10.0) -> Path:
    """Leave the `metrics.jsonl` of a watch that saw these reports, one list per round, at even times."""
    path = directory / "metrics.jsonl"
    view = empty_view()
    facts = {"run_id": "run", "num_slots": NUM_SLOTS, "total_rounds": TOTAL_ROUNDS}
    sinks = Sinks(view)
    sinks.add("metrics", lambda: JsonlSink(path, facts, 0.0))
    for number, reports in enumerate(rounds, start=1):
        taken = snapshot(100.0 + poll_seconds * number, [claim(0, [0]), claim(1, [1])], reports)
        sinks.update(view := fold(view, taken))
    sinks.close()
    return path


def two_peers(num_rounds: int) -> list[list]:
    """Round 1 with half a minute of start-up; later rounds of 10 s and of 10.25 s."""
    rounds = []
    for number in range(1, num_rounds + 1):
        other = 30.0 if number == 1 else 0.25
        first = report(0, number, tokens=4096, other_seconds=other, **PHASES)
        second = report(1, number, tokens=2048, other_seconds=other + 0.25, **PHASES)
        rounds.append([first, second])
    return rounds


def test_throughput_is_all_tokens_over_the_slowest_peers_wall_time_without_round_one(tmp_path: Path) -> None:
    view, _ = replay(journal(tmp_path, two_peers(4)))
    sums = account(view)
    assert (sums.rounds, sums.peers) == ((2, 4), 2)
    assert sums.tokens == 3 * (4096 + 2048)
    assert sums.wall_seconds == pytest.approx(3 * 10.25)
    assert sums.tokens_per_second == pytest.approx(3 * 6144 / 30.75)


def test_the_share_of_each_phase_is_its_seconds_over_all_seconds(tmp_path: Path) -> None:
    view, _ = replay(journal(tmp_path, two_peers(3)))
    sums = account(view)
    seconds = 10.0 + 10.25
    assert sums.not_training == pytest.approx(1 - 16 / seconds)
    assert sums.shares["matchmaking"] == pytest.approx(2 / seconds)
    assert sums.shares["averaging"] == pytest.approx(1 / seconds)
    assert sums.shares["exchange"] == pytest.approx(0.5 / seconds)
    assert sums.shares["other"] == pytest.approx(0.75 / seconds)
    assert sum(sums.shares.values()) == pytest.approx(1)


def test_tokens_that_were_not_committed_do_not_count(tmp_path: Path) -> None:
    rounds = two_peers(3)
    rounds[2][1] = rounds[2][1].model_copy(update={"committed": 0, "dropped": 2})
    view, _ = replay(journal(tmp_path, rounds))
    sums = account(view)
    assert (sums.tokens, sums.lost_tokens) == (2 * 4096 + 2048, 2048)


def test_a_peer_that_joined_later_adds_tokens_but_not_its_start_up(tmp_path: Path) -> None:
    rounds = two_peers(3)
    rounds[2].append(report(2, 3, tokens=512, **(PHASES | {"other_seconds": 500.0})))
    view, _ = replay(journal(tmp_path, rounds))
    sums = account(view)
    assert sums.peers == 2
    assert sums.tokens == 2 * 6144 + 512
    assert sums.wall_seconds == pytest.approx(2 * 10.25)


def test_a_run_of_one_round_has_no_account(tmp_path: Path) -> None:
    view, _ = replay(journal(tmp_path, two_peers(1)))
    with pytest.raises(DataError, match="1 complete rounds"):
        account(view)


def test_a_run_that_nobody_reported_whole_has_no_account(tmp_path: Path) -> None:
    rounds = two_peers(4)
    view, _ = replay(journal(tmp_path, [rounds[0], rounds[1][:1], rounds[2][1:], rounds[3]]))
    with pytest.raises(DataError, match="no peer reported all"):
        account(view)


def test_the_monitors_clock_measures_from_the_first_rounds_report_to_the_lasts(tmp_path: Path) -> None:
    path = journal(tmp_path, two_peers(4), poll_seconds=11.0)
    assert observed_seconds(path, (2, 4)) == pytest.approx(33.0)
    assert observed_seconds(path, (2, 9)) is None


def test_local_steps_are_the_peers_mean_in_each_round(tmp_path: Path) -> None:
    view, _ = replay(journal(tmp_path, two_peers(2)))
    assert local_steps(view, tokens_per_step=512) == [6, 6]


def test_the_stock_window_counts_steps_that_its_edges_cut_in_proportion() -> None:
    steady = {"ends": [0.0, 1.0, 2.0, 3.0, 4.0], "cpu": [0.0, 0.5, 1.0, 1.5, 2.0], "tokens_per_step": 100}
    slow = {"ends": [0.0, 4.0], "cpu": [0.0, 4.0], "tokens_per_step": 100}
    pace = pace_in_window([steady, slow], 0.5, 3.0)
    assert pace.tokens_per_second == pytest.approx((100.0, 25.0))
    assert pace.total == pytest.approx(125.0)
    assert pace.cores == pytest.approx(0.5 + 1.0)


def test_a_stock_process_that_ended_within_the_window_is_not_counted() -> None:
    with pytest.raises(AssertionError, match="throughout"):
        pace_in_window([{"ends": [0.0, 2.0], "cpu": [0.0, 2.0], "tokens_per_step": 1}], 1.0, 3.0)


class Counter:
    """Sequences that tell their source and place."""

    def __init__(self, source: int) -> None:
        self.source, self.place = source, 0

    def next_batch(self, num_sequences: int) -> torch.Tensor:
        rows = [[self.source, self.place + row] for row in range(num_sequences)]
        self.place += num_sequences
        return torch.tensor(rows)

    def state_dict(self) -> dict:
        return {"place": self.place}

    def load_state_dict(self, state: dict) -> None:
        self.place = state["place"]


def test_the_whole_swarms_batch_holds_each_peers_own_batch_step_by_step() -> None:
    together = Together([Counter(0), Counter(1)])  # type: ignore[list-item]
    state = together.state_dict()
    assert together.next_batch(4).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert together.next_batch(2).tolist() == [[0, 2], [1, 2]]
    together.load_state_dict(state)
    assert together.next_batch(2).tolist() == [[0, 0], [1, 0]]


def test_a_stock_step_trains_the_same_targets_with_transformers_own_loss_and_kernel(seed: int) -> None:
    model = ModelConfig(hidden_size=32, num_layers=2, intermediate_size=16, num_experts=4)
    run = RunConfig(model=model, train=TrainConfig(balance_loss=0.1, router_z_loss=0.0), seed=seed)
    module = default_stock_model(run, vocab_size=64)
    assert json.loads(module.config.to_json_string())["router_aux_loss_coef"] == 0.1
    assert (
        module.config._experts_implementation == type(module)(module.config).config._experts_implementation != "eager"
    )
    tokens_BT1 = torch.randint(0, 64, (3, 17), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        entropy = causal_lm_loss(module, tokens_BT1, train=run.train, top_k=2).cross_entropy  # type: ignore[arg-type]
        logits = module(input_ids=tokens_BT1[:, :-1], output_router_logits=True).router_logits
    pooled = 2 * balance_loss([torch.cat(logits)], 2, num_sequences=1)  # stock pools the layers, sums over the top k
    before = [parameter.clone() for parameter in module.parameters()]
    loss = stock_step(module, torch.optim.SGD(module.parameters(), lr=0.1), tokens_BT1, run)  # type: ignore[arg-type]
    assert loss == pytest.approx(float(entropy + 0.1 * pooled), abs=1e-4)
    assert any(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


def test_what_a_benchmark_leaves_says_where_and_when(tmp_path):
    circumstances = Circumstances.now(0.25, None)
    write_rows(tmp_path / "new" / "figures", circumstances, "Figures", [Row("a figure", "1 s", "2 s", True)], seed=7)
    document = json.loads((tmp_path / "new" / "figures.json").read_text())
    assert document["circumstances"] == asdict(circumstances) and document["seed"] == 7
    assert [Row(**figure) for figure in document["figures"]] == [Row("a figure", "1 s", "2 s", True)]
    page = (tmp_path / "new" / "figures.md").read_text()
    assert page.startswith("# Figures\n\n") and "| a figure | 1 s | 2 s | yes |" in page
    for part in (circumstances.date, circumstances.cpu, circumstances.commit, "load average 0.25"):
        assert part in page


def test_a_program_is_known_by_what_it_does(tmp_path: Path) -> None:
    texts = ['"""Adds."""\n\nA = 1  # one\n', "A = 1\n", "A = 2\n", 'A = "1"\n']
    files = [tmp_path / f"{number}.py" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    digests = [program_digest([file]) for file in files]
    assert digests[0] == digests[1] and len(set(digests)) == 3
