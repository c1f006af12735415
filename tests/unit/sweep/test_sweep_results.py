"""What is kept of a run is what the simulation did; a kept run counts if its settings are the sweep's; the table."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.commands.simulate import Spread, gap_spread, table
from spes_p2p.config import MachineConfig, RunConfig
from spes_p2p.errors import ConfigError, SimulationError
from spes_p2p.planner.memory import Setup, peer_memory
from spes_p2p.planner.size import ModelSize, model_size
from spes_p2p.sim.simulator import SimulationResult, simulate
from spes_p2p.sim.sweep import Gap, RunResult, Sweep, load_sweep, result_file, run_result, save_result, stored_runs
from tests.unit.sweep.sweeps import PAIR, SOLO, made_up, made_up_sweep, write_sweep


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def scenario(folder):
    sweep = load_sweep(write_sweep(folder, {"ours": {**PAIR, "max_slots": [1, 3]}}))
    return sweep.variants["ours"].scenarios[0]


@pytest.fixture(scope="module")
def simulated(scenario, folder):
    return simulate(scenario.model_copy(update={"threads": 1}), cache=folder / "cache")


@pytest.fixture(scope="module")
def result(scenario, simulated):
    return run_result("ours", 0, scenario, simulated)


def result_of(folder: Path, **settings: Any) -> RunResult:
    sweep = load_sweep(write_sweep(folder, {"ours": {**PAIR, **settings}}))
    scenario = sweep.variants["ours"].scenarios[0]
    return run_result("ours", 0, scenario, simulate(scenario, cache=folder / "cache"))


def test_tokens_and_bytes_are_counted_per_peer(result, simulated):
    assert [peer.bytes_out for peer in result.peers] == list(simulated.bytes_out)
    assert [peer.bytes_in for peer in result.peers] == list(simulated.bytes_in)
    assert [peer.tokens for peer in result.peers] == [2 * 1 * 2 * 16] * 2  # rounds, steps, sequences, tokens
    assert [point.tokens_per_peer for point in result.evaluations] == [32, 64]
    first, last = (point.bytes_out_per_peer for point in result.evaluations)
    assert 0 < first < last <= sum(peer.bytes_out for peer in result.peers) / 2


def test_memory_is_what_a_peer_trains_and_what_it_keeps_frozen(result, scenario):
    run = scenario.run
    size, setup = model_size(run.model, run.data.vocab_size), Setup.of(run, MachineConfig(), None)
    slot = 3 * 16 * 8  # one layer's gate, up and down projections
    one, three = result.peers
    for peer, slots in ((one, 1), (three, 3)):
        memory = peer_memory(size, slots, setup)
        assert peer.memory_bytes == memory.host_bytes and memory.frozen == 2 * (4 - slots) * slot
        assert peer.memory_bytes - peer.expert_bytes == one.memory_bytes - one.expert_bytes > 0
    assert three.memory_bytes > one.memory_bytes


def test_a_simulation_that_measured_nothing_is_no_result(scenario):
    nothing = SimulationResult(
        RunConfig(), ModelSize(1, 1, 4), [], [[], []], {}, {}, {}, [0, 0], [(), ()], [0, 0], [0, 0], 0.0, 0.0
    )
    with pytest.raises(SimulationError, match="no peer finished a round"):
        run_result("ours", 0, scenario, nothing)


def test_a_dense_model_has_no_slots(folder):
    dense = result_of(folder, run={"model": {"family": "llama", "num_experts": 0, "top_k": 0}, "round": {"total": 2}})
    assert [peer.expert_bytes for peer in dense.peers] == [0, 0]


def test_a_run_that_everybody_left_is_measured_at_its_last_round_and_says_so(folder, result):
    leave = [{"peer": 0, "kind": "leave", "round": 3}, {"peer": 1, "kind": "kill", "round": 3}]
    left = result_of(folder, events=leave, evaluate_rounds=2, run={"round": {"total": 6}})
    assert [point.round for point in left.evaluations] == [2, 3]
    assert left.remarks == ["stopped at round 3/6: no peer was left"] and not result.remarks


def test_a_peer_that_came_too_late_is_named(folder):
    events = [{"peer": 1, "kind": "leave", "round": 1}, {"peer": 0, "kind": "join", "round": 3}]
    alone = result_of(folder, events=events, run={"round": {"total": 4}})
    assert [peer.tokens for peer in alone.peers] == [0, 32]
    assert alone.remarks == ["stopped at round 1/4: no peer was left", "peer 0 came too late to train"]


@pytest.mark.parametrize("loss", [5.0, math.inf, math.nan])
def test_a_result_survives_its_file(tmp_path, loss):
    sweep = made_up_sweep(tmp_path)
    result = made_up(sweep, "ours", 0, [loss])
    save_result(tmp_path, result)
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["ours-0.json"]
    assert repr(stored_runs(sweep, tmp_path)) == repr({("ours", 0): result})


@pytest.mark.parametrize("damage", ["torn", "empty", "not json", "a field too few", "no evaluation", "no settings"])
def test_a_damaged_result_counts_as_none(tmp_path, damage):
    sweep = made_up_sweep(tmp_path)
    assert not stored_runs(sweep, tmp_path)
    save_result(tmp_path, made_up(sweep, "ours", 0, [5.0]))
    file = result_file(tmp_path, "ours", 0)
    whole, content = file.read_text(), json.loads(file.read_text())
    content.pop("peers")
    contents = {
        "torn": whole[: len(whole) // 2],
        "empty": "",
        "not json": "\x00",
        "a field too few": json.dumps(content),
        "no evaluation": json.dumps(json.loads(whole) | {"evaluations": []}),
        "no settings": json.dumps(json.loads(whole) | {"scenario": 3}),
    }
    file.write_text(contents[damage])
    assert not stored_runs(sweep, tmp_path)


def test_a_result_counts_for_its_own_variant_seed_and_settings_only(tmp_path):
    variants = {"ours": PAIR, "twin": PAIR, "solo": SOLO}
    sweep = made_up_sweep(tmp_path, variants, seeds=[0, 1])
    save_result(tmp_path, made_up(sweep, "ours", 0, [5.0]))
    result_file(tmp_path, "twin", 0).write_bytes(result_file(tmp_path, "ours", 0).read_bytes())
    assert list(stored_runs(sweep, tmp_path)) == [("ours", 0)]
    changed = made_up_sweep(tmp_path, variants | {"ours": PAIR | {"run": {"train": {"lr": 0.5}}}}, seeds=[0, 1])
    assert not stored_runs(changed, tmp_path)


@pytest.mark.parametrize("key", ["threads", "run.train.weight_decay", "run.merge", "run.train.router_z_loss"])
def test_a_setting_that_is_newer_than_a_result_has_its_default_there(tmp_path, key):
    sweep = made_up_sweep(tmp_path)
    save_result(tmp_path, made_up(sweep, "ours", 0, [5.0]))
    content = json.loads(result_file(tmp_path, "ours", 0).read_text())
    section = content["scenario"]
    *sections, name = key.split(".")
    for part in sections:
        section = section[part]
    del section[name]
    result_file(tmp_path, "ours", 0).write_text(json.dumps(content))
    assert stored_runs(sweep, tmp_path)


def test_an_output_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="choose a writable --output"):
        save_result(tmp_path / "file", made_up(made_up_sweep(tmp_path), "ours", 0, [5.0]))


GAP = Gap(name="all", solo="solo", centralised="central", of=["ours"])


def three_variants(folder: Path, **ours: Any) -> Sweep:
    variants = {"solo": SOLO, "central": SOLO, "ours": PAIR | ours}
    return made_up_sweep(folder, variants, seeds=[0, 1], gaps=[GAP.model_dump()])


LOSSES = {"solo": [5.0, 6.0], "central": [4.0, 4.0], "ours": [4.5, 4.5]}


def finished(sweep: Sweep, losses: Mapping[str, list[float]] = LOSSES) -> dict[tuple[str, int], RunResult]:
    """Results with these final losses, by seed; NaN for a run that has not finished."""
    return {
        (name, seed): made_up(sweep, name, seed, [9.0, loss], round_tokens=200 if name == "central" else 100)
        for name, by_seed in losses.items()
        for seed, loss in enumerate(by_seed)
        if not math.isnan(loss)
    }


@pytest.mark.parametrize(
    ("solo", "centralised", "loss", "share"),
    [
        (5.0, 4.0, 4.25, 0.75),
        (5.0, 4.0, 5.5, -0.5),
        (5.0, 4.0, 3.5, 1.5),
        (5.0, 5.0, 4.0, None),
        (4.0, 5.0, 4.5, None),
        (math.inf, 4.0, 4.5, None),
        (5.0, 4.0, math.nan, None),
    ],
)
def test_the_gap_closed_is_the_share_of_the_way_to_centralised(tmp_path, solo, centralised, loss, share):
    losses = {"solo": [solo], "central": [centralised], "ours": [loss]}
    results = {
        (name, 0): made_up(three_variants(tmp_path), name, 0, [9.0, *of_seed]) for name, of_seed in losses.items()
    }
    found = gap_spread(GAP, "ours", results)
    assert (found.values if found else None) == (None if share is None else {0: share})


def test_gaps_are_closed_seed_by_seed_where_all_three_have_finished(tmp_path):
    sweep = three_variants(tmp_path)
    shares = gap_spread(GAP, "ours", finished(sweep))
    assert shares is not None and shares.values == {0: 0.5, 1: 0.75} and shares.mean == 0.625
    assert shares.deviation == pytest.approx(0.125 * math.sqrt(2))
    shares = gap_spread(GAP, "ours", finished(sweep, LOSSES | {"central": [math.nan, 4.0]}))
    assert shares is not None and shares.values == {1: 0.75} and shares.deviation is None
    assert gap_spread(GAP, "ours", finished(sweep, LOSSES | {"central": [math.nan, math.nan]})) is None
    shares = gap_spread(GAP, "ours", finished(sweep, LOSSES | {"ours": [4.5, math.inf]}))
    assert shares is not None and shares.values == {0: 0.5}
    assert Spread({0: 4.5, 1: math.inf}).deviation is None


def cells(sweep: Sweep, results: Mapping[tuple[str, int], RunResult]) -> dict[str, list[str]]:
    """The table's cells by the name of the row."""
    lines = [line for line in table(sweep, results).splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1, "columns align"
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0]: row[1:] for row in rows}


def test_the_table_says_what_was_found(tmp_path):
    sweep = three_variants(tmp_path, title="our way")
    rows = cells(sweep, finished(sweep))
    assert rows["variant"][:3] == ["seeds", "held-out loss", "gap closed: all"]
    assert rows["solo"][:3] == ["2 of 2", "5.5000 ± 0.7071", "-"]
    assert rows["our way"] == [
        *("2 of 2", "4.5000 ± 0.0000", "62.5% ± 17.7%"),
        *("200", "4.00", "3.00", "4.00", "7.00", "-"),
    ]


@pytest.mark.parametrize(
    ("solo", "centralised", "ours", "is_equal"),
    [
        (100, 200, (100, 100), True),
        (1000, 2000, (1005, 995), True),
        (100, 200, (150, 50), False),
        (100, 200, (100, 0), False),
        (150, 200, (100, 100), False),
        (100, 100, (100, 100), False),
    ],
)
def test_a_gap_at_unequal_tokens_of_a_peer_or_of_all_together_is_marked(tmp_path, solo, centralised, ours, is_equal):
    sweep = three_variants(tmp_path)
    results = finished(sweep, {"solo": [6.0], "central": [4.0], "ours": [5.0]})
    for name, tokens in (("solo", (solo,)), ("central", (centralised,)), ("ours", ours)):
        accounts = [results[name, 0].peers[0].model_copy(update={"tokens": number}) for number in tokens]
        results[name, 0] = results[name, 0].model_copy(update={"peers": accounts})
    row = cells(sweep, results)["ours"]
    assert row[2] == ("50.0%" if is_equal else "50.0% †")
    assert ("–" in row[3]) == (len(set(ours)) > 1), "a range where peers differ"


def test_runs_that_ended_early_or_are_missing_are_named(tmp_path):
    sweep = three_variants(tmp_path)
    results = finished(sweep, LOSSES | {"central": [math.nan, math.nan]})
    results["ours", 1] = made_up(sweep, "ours", 1, [9.0])
    text = table(sweep, results)
    assert "stopped at round 1/2: no peer was left (seeds 1)" in text
    assert text.splitlines()[-1] == "without a result: central seed 0, central seed 1" and "| central" not in text


def test_a_title_adds_no_column(tmp_path):
    sweep = three_variants(tmp_path, title="x|y")
    assert r"| x\|y" in table(sweep, finished(sweep))
