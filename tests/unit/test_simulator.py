"""Simulations: what befalls virtual peers, the same way each time."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import saved
from lanes import sample
from peer_processes import TINY, write_corpus
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from spes_p2p.config import RunConfig
from spes_p2p.data.packing import held_out_batches
from spes_p2p.data.tokenizer import load_tokenizer, resolve_tokenizer, train_bpe
from spes_p2p.errors import ConfigError, DataError, SimulationError
from spes_p2p.model.loss import held_out_loss
from spes_p2p.planner.size import model_size
from spes_p2p.sim.attacks import Attack
from spes_p2p.sim.peer import VirtualSwarm
from spes_p2p.sim.scenario import Event, Scenario
from spes_p2p.sim.simulator import Evaluation, SimulationResult, simulate
from spes_p2p.swarm.p2p.identity import hashed_peer_id

STEP_TOKENS = 4 * 16
IDS = [hashed_peer_id(name) for name in (b"a", b"b", b"c")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulator")
    write_corpus(folder / "corpus.jsonl")
    return folder


def scenario(folder: Path, *, round: dict[str, Any] | None = None, moments: str = "both", **changes: Any) -> Scenario:
    """Three peers of a tiny run; one step takes each a second unless changed."""
    settings = {**TINY, "round": {**TINY["round"], **(round or {})}, "outer": {"moments": moments}}
    run = RunConfig(**settings)  # type: ignore[arg-type]
    fields = {"peers": 3, "max_slots": 2, "speeds": float(STEP_TOKENS), "threads": 1, "evaluate_rounds": 100}
    return Scenario(run=run, text=[folder / "corpus.jsonl"], **(fields | changes))


def run(folder: Path, **changes: Any) -> SimulationResult:
    return simulate(scenario(folder, **changes), cache=folder / "cache")


def rounds_of(result: SimulationResult, peer: int) -> list[int]:
    return [report.round for report in result.reports[peer]]


def assert_members_agree(result: SimulationResult) -> None:
    """Every peer that reports a round has the digest of the first peer that finished it."""
    for reports in result.reports:
        for report in reports:
            assert report.shared_digest == result.digests[report.round]["shared"][:16]


@pytest.fixture(scope="module")
def plain(folder):
    """A run in which nothing happens, and its evaluations as they were reported."""
    seen: list[Evaluation] = []
    return simulate(scenario(folder, evaluate_rounds=1), cache=folder / "cache", on_evaluation=seen.append), seen


@pytest.mark.full  # golden runs show with every commit that runs repeat themselves
@pytest.mark.parametrize("mode", ["steps", "tokens"])
def test_equal_scenarios_give_equal_digests_and_others_do_not(folder, mode):
    round = {"mode": mode, "tokens": 1500, "min_seconds": 1.0}
    settings = {"round": round, "speeds": [64.0, 100.0, 150.0]}
    first, again, other = (run(folder, seed=seed, **settings) for seed in (3, 3, 4))
    assert first.digests == again.digests and first.reports == again.reports
    assert first.evaluations == again.evaluations and first.virtual_seconds == again.virtual_seconds
    assert all(first.digests[n]["shared"] != other.digests[n]["shared"] for n in (1, 2, 3))
    assert_members_agree(first)


@pytest.mark.parametrize("mode", ["steps", "tokens"])
def test_rounds_grow_from_a_hundredth_to_their_full_length(folder, mode):
    round = {"mode": mode, "growing": 4, "total": 6, "steps": 20, "tokens": 60 * STEP_TOKENS, "min_seconds": 0.5}
    result = run(folder, round=round)
    steps = [[report.tokens // STEP_TOKENS for report in own] for own in result.reports]
    if mode == "steps":
        assert steps == [[1, 1, 2, 6, 20, 20]] * 3, "a hundredth, and then each 3.16 times the last"
    else:  # by the speeds that the peers state
        assert all(own[0] == own[1] == 1 and own[2] <= 3 and 4 <= own[3] <= 8 for own in steps), steps
        assert all(18 <= count <= 22 for own in steps for count in own[4:]), steps
    assert_members_agree(result)


def test_rounds_that_links_make_long_grow_as_well(folder):
    round = {"mode": "tokens", "growing": 4, "total": 6, "tokens": 1, "min_seconds": 40.0}
    result = run(folder, round=round, speeds=[float(STEP_TOKENS)] * 3)
    seconds = [[report.train_seconds for report in own] for own in result.reports]
    for own in seconds:
        assert own == pytest.approx([5, 5, 5, 12.6, 40, 40], abs=1.5), "a hundredth would be 0.4 s"
    assert_members_agree(result)


def test_all_versions_of_all_rounds_are_accounted_for(plain):
    result, _ = plain
    assert sorted(result.digests) == [1, 2, 3]
    for digests in result.digests.values():
        assert {"shared", *(f"slot-{slot}" for slot in range(4))} <= set(digests)
    for name in ("shared", "slot-0", "slot-3"):
        assert len({digests[name] for digests in result.digests.values()}) == 3, "each round changes everything"


@pytest.mark.full
def test_unequal_speeds_bring_unequal_tokens(folder):
    settings = {"round": {"mode": "tokens", "tokens": 6400, "min_seconds": 1.0}}
    result = run(folder, speeds=[64.0, 128.0, 256.0], **settings)
    for number in (1, 2):
        slow, middle, fast = (result.reports[peer][number] for peer in range(3))
        assert middle.tokens == pytest.approx(2 * slow.tokens, abs=2 * STEP_TOKENS)
        assert fast.tokens == pytest.approx(4 * slow.tokens, abs=4 * STEP_TOKENS)
        assert fast.tokens_per_second == pytest.approx(256.0)
        assert slow.tokens + middle.tokens + fast.tokens == pytest.approx(6400, rel=0.25)
    assert_members_agree(result)


def test_with_fixed_steps_the_fast_wait_for_the_slow(folder):
    result = run(folder, speeds=[16.0, 64.0, 64.0])
    assert {report.tokens for reports in result.reports for report in reports} == {5 * STEP_TOKENS}
    assert result.reports[0][1].train_seconds == pytest.approx(20.0)
    assert result.reports[1][1].train_seconds == pytest.approx(5.0)
    assert result.reports[1][1].other_seconds == pytest.approx(15.0, abs=1.0)


def test_a_killed_peers_slots_are_adopted_by_the_others(folder):
    """Its records expire, and the swarm goes on with what was last published of its slots."""
    result = run(folder, round={"total": 10}, max_slots=[2, 2, 4], events=[Event(peer=2, kind="kill", round=2)])
    assert rounds_of(result, 2) == [1, 2]
    assert rounds_of(result, 0) == rounds_of(result, 1) == list(range(1, 11))
    assert set(result.reports[2][-1].slots) == {0, 1, 2, 3}
    assert {*result.reports[0][-1].slots, *result.reports[1][-1].slots} == {0, 1, 2, 3}
    assert result.reports[0][2].num_members == 2
    assert len({digests["slot-0"] for digests in result.digests.values()}) > 5, "its slots are trained on"
    assert_members_agree(result)


@pytest.mark.parametrize("moments", sample(["local", "second", "both"], ["both"]))
def test_a_full_peer_gives_up_a_slot_that_others_hold_for_an_orphan(folder, moments):
    kill = Event(peer=0, kind="kill", round=2)
    result = run(folder, round={"total": 12}, moments=moments, events=[kill])
    before, after = ({*result.reports[1][i].slots, *result.reports[2][i].slots} for i in (1, -1))
    assert before != {0, 1, 2, 3} == after, "of two slots each, and another draw of ids will not do"
    assert_members_agree(result)


def test_a_leaver_hands_its_slots_back_at_once(folder):
    result = run(folder, round={"total": 5}, max_slots=[2, 2, 4], events=[Event(peer=2, kind="leave", round=2)])
    assert rounds_of(result, 2) == [1, 2] and rounds_of(result, 0) == [1, 2, 3, 4, 5]
    assert {*result.reports[0][3].slots, *result.reports[1][3].slots} == {0, 1, 2, 3}
    assert result.virtual_seconds < 5 * 6.0 + 8.0, "no peer waits for its lease to end"
    assert_members_agree(result)


def test_what_a_leaver_trained_last_stays_in_the_swarm(folder):
    """The others have fetched it before the leaver is gone, as they do of a real peer that leaves."""
    leave = Event(peer=1, kind="leave", round=2)
    result = run(folder, peers=2, max_slots=2, round={"total": 4, "min_peers": 1}, events=[leave])
    assert rounds_of(result, 0) == [1, 2, 3, 4] and rounds_of(result, 1) == [1, 2]
    for slot in result.reports[1][-1].slots:
        of_rounds = [result.digests[number][f"slot-{slot}"] for number in (1, 2, 3, 4)]
        assert of_rounds[0] != of_rounds[1] == of_rounds[2] == of_rounds[3], "nobody else has room for it"


def test_a_joiner_catches_up_and_ends_with_the_digests_of_all(folder):
    result = run(folder, round={"total": 8}, events=[Event(peer=1, kind="join", round=3)])
    assert rounds_of(result, 0) == rounds_of(result, 2) == list(range(1, 9))
    joined = rounds_of(result, 1)
    assert joined[0] > 3 and joined == list(range(joined[0], 9)) and result.reports[1][-1].num_members == 3
    assert result.reports[1][-1].slots, "it holds slots"
    assert_members_agree(result)


@pytest.mark.parametrize("kind", sample(["kill", "leave"], ["kill"]))  # the next test has peers that leave
def test_when_everybody_is_gone_the_last_committed_round_is_measured(folder, kind):
    """Between two evaluations, too, by the work of rounds 1 and 2 alone."""
    events = [Event(peer=peer, kind=kind, round=2) for peer in range(3)]
    result = run(folder, round={"total": 9}, evaluate_rounds=5, events=events)
    assert [evaluation.round for evaluation in result.evaluations] == [2] and sorted(result.digests) == [1, 2]
    assert result.evaluations[0].tokens_per_peer == 2 * 5 * STEP_TOKENS, "no work of round 3"


def test_the_model_that_all_have_left_is_the_one_that_is_measured(folder):
    events = [Event(peer=peer, kind="leave", round=2) for peer in range(3)]
    seldom, often = (run(folder, evaluate_rounds=every, events=events) for every in (5, 1))
    assert seldom.evaluations[-1] == often.evaluations[-1] and len(often.evaluations) == 2


def test_nobody_joins_a_swarm_that_everybody_has_left(folder):
    leaves = [Event(peer=peer, kind="leave", round=2) for peer in (0, 1)]
    result = run(folder, round={"total": 8}, events=[*leaves, Event(peer=2, kind="join", round=4)])
    assert sorted(result.digests) == [1, 2] and result.evaluations[-1].round == 2
    assert (rounds_of(result, 2), result.slots[2], result.bytes_in[2]) == ([], (), 0)


def test_a_peer_that_can_get_the_model_from_no_other_fails_the_run_and_does_not_begin_anew(folder, monkeypatch):
    monkeypatch.setattr(VirtualSwarm, "inventory", lambda swarm, peers: {})  # no peer answers
    kills = [Event(peer=peer, kind="kill", round=2) for peer in (0, 1)]
    with pytest.raises(SimulationError, match="virtual peers 2 wait for what no peer is left to do"):
        run(folder, round={"total": 6}, events=[*kills, Event(peer=2, kind="join", round=2)])


def test_whoever_starts_later_is_waited_for(folder):
    result = run(folder, starts=[0.0, 40.0, 0.0])
    assert result.virtual_seconds > 40.0 and [rounds_of(result, peer) for peer in range(3)] == [[1, 2, 3]] * 3


def test_a_group_with_nan_in_it_is_dropped_and_the_others_are_not(folder):
    result = run(folder, attacks=[Attack(peer=1, kind="nan", groups="slots", from_round=1)])
    spoiled = {f"slot-{slot}" for slot in result.slots[1]}
    for name, digest in result.digests[1].items():
        assert (result.digests[3][name] == digest) == (name in spoiled)
    assert result.reports[1][1].dropped == 2 and result.reports[1][0].dropped == 0
    assert_members_agree(result)


@pytest.mark.full
def test_a_swarm_that_can_commit_nothing_any_more_says_why(folder):
    with pytest.raises(SimulationError, match=r"round 2 was dropped 20 times in a row: .*NaN"):
        run(folder, peers=2, attacks=[Attack(peer=1, kind="nan", from_round=1)])


# Several peers drop a round by the same rule; of them each commit tests a group with NaN in it, above.
@pytest.mark.parametrize("peers", sample([1, 3], [1]))
def test_a_run_that_diverges_ends_and_says_so(folder, peers):
    settings = scenario(folder, peers=peers)
    train = settings.run.train.model_copy(update={"lr": 1e30, "warmup_rounds": 0.0})
    diverging = settings.model_copy(update={"run": settings.run.model_copy(update={"train": train})})
    with pytest.raises(DataError, match=r"finite gradient, for the 5th time in a row; .*lower train\.lr"):
        simulate(diverging, cache=folder / "cache")


@pytest.mark.parametrize("kind", sample(["sign_flip", "scale", "stale"], ["scale"]))
def test_attacks_begin_when_they_should_and_change_what_they_should(folder, plain, kind):
    honest, _ = plain
    attacked = run(folder, attacks=[Attack(peer=1, kind=kind, from_round=1, groups="shared")])
    assert attacked.digests[1] == honest.digests[1]
    assert attacked.digests[2]["shared"] != honest.digests[2]["shared"]
    assert {n: d for n, d in attacked.digests[2].items() if n != "shared"} == {
        n: d for n, d in honest.digests[2].items() if n != "shared"
    }
    assert_members_agree(attacked)


def test_one_peer_is_solo_training_and_costs_no_traffic(folder):
    result = run(folder, peers=1, max_slots=4, evaluate_rounds=2)
    assert [(e.round, e.tokens_per_peer) for e in result.evaluations] == [(2, 10 * STEP_TOKENS), (3, 15 * STEP_TOKENS)]
    assert result.evaluations[1].loss < result.evaluations[0].loss
    assert result.bytes_in == result.bytes_out == [0]


def test_what_is_received_was_sent(plain):
    result, _ = plain
    assert sum(result.bytes_in) == sum(result.bytes_out) > 0


def test_an_all_reduce_costs_each_member_its_share_of_the_vector_both_ways(folder):
    """All hold all slots, so nothing is pulled."""
    result = run(folder, max_slots=4, moments="local")
    data = scenario(folder).run.data
    vocab_size = len(resolve_tokenizer(data, [folder / "corpus.jsonl"], folder / "cache"))
    num_bytes = 4 * model_size(scenario(folder).run.model, vocab_size).total_params
    for count in (*result.bytes_in, *result.bytes_out):
        assert count == pytest.approx(3 * 2 * (2 / 3) * num_bytes, abs=3 * 5)


def test_evaluations_are_reported_as_they_are_made(plain):
    result, seen = plain
    assert seen == list(result.evaluations) and [e.round for e in seen] == [1, 2, 3]


def test_settings_are_chosen_on_other_text_than_is_reported(folder, plain):
    reported, _ = plain
    tuning = run(folder, split="tuning")
    assert reported.digests == tuning.digests and reported.evaluations[-1].loss != tuning.evaluations[-1].loss


def test_each_peer_can_have_its_own_text(folder, tmp_path, plain):
    """One peer's own text is half of that of all: its deltas differ, and what is measured does not."""
    reported, _ = plain
    lines = (folder / "corpus.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "corpus.jsonl").write_text("".join(lines[: len(lines) // 2]))
    everywhere, half = [folder / "corpus.jsonl"], [tmp_path / "corpus.jsonl"]
    assert run(folder, peer_text=[everywhere] * 3).digests == reported.digests
    apart = run(folder, peer_text=[everywhere, everywhere, half])
    assert apart.digests[1] != reported.digests[1]
    assert apart.evaluations[-1].tokens_per_peer == reported.evaluations[-1].tokens_per_peer
    assert abs(apart.evaluations[-1].loss - reported.evaluations[-1].loss) < 0.2


def test_an_exception_in_a_callback_ends_the_simulation_and_all_threads(folder):
    def fail(_: Any) -> None:
        raise ConfigError("mine")

    before, threads = threading.active_count(), torch.get_num_threads()
    with pytest.raises(ConfigError, match="mine"):
        simulate(scenario(folder), cache=folder / "cache", on_evaluation=fail)
    assert threading.active_count() == before and torch.get_num_threads() == threads


def test_a_scenario_survives_json(folder):
    whole = scenario(
        folder,
        events=[Event(peer=1, kind="join", round=1)],
        attacks=[Attack(peer=0, kind="scale", factor=3.0)],
        max_slots=[1, 2, 3],
    )
    assert Scenario.model_validate_json(whole.model_dump_json()) == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_slots": [1, 2]}, "max_slots lists 2 peers, peers=3"),
        ({"max_slots": 5}, "max_slots=5 exceeds run.model.num_experts=4"),
        ({"events": [Event(peer=3, kind="kill", round=1)]}, "peer 3 is not one of peers=3"),
        ({"attacks": [Attack(peer=7, kind="nan")]}, "peer 7 is not one of peers=3"),
        ({"events": [Event(peer=0, kind="kill", round=0)]}, "choose from 1 to 2"),
        ({"events": [Event(peer=0, kind="join", round=3)]}, "choose from 0 to 2"),
        ({"events": [Event(peer=i, kind="join", round=1) for i in range(3)]}, "no peer to join"),
        ({"events": [Event(peer=1, kind=kind, round=2) for kind in ("kill", "leave")]}, "then go once"),
        ({"events": [Event(peer=1, kind="leave", round=1), Event(peer=1, kind="join", round=2)]}, "join once"),
        ({"attacks": [Attack(peer=1, kind="nan", from_round=3)]}, "begins in round 3 of 3"),
        ({"slots": [[0, 0], [1], [2]]}, "list each once"),
        ({"slots": [[9], [1], [2]]}, "up to 3"),
        ({"speed": 3}, "speed"),
        ({"peer_text": [["a"], ["b"]]}, "peer_text lists 2 peers, peers=3"),
        ({"peer_ids": [IDS[0]]}, "peer_ids lists 1 peers, peers=3"),
        ({"peer_ids": [IDS[0], IDS[1], IDS[0]]}, "holds an id twice; give every peer its own"),
        ({"peer_ids": [*IDS[:2], "peer-3"]}, "peer_ids.2"),
        ({"starts": [0.0, 0.0, float("inf")]}, "finite"),
    ],
    ids=str,
)
def test_a_scenario_that_cannot_be_is_refused(folder, changes, message):
    with pytest.raises(ValidationError, match=message):
        scenario(folder, **changes)


@pytest.mark.parametrize("family", sample(["llama", "qwen3", "gemma"], ["llama"]))
def test_peers_train_a_dense_model_as_shared_alone(folder, family):
    """One that joins late has it, too, and the model learns."""
    dense = TINY["model"] | {"family": family, "num_experts": 0, "top_k": 0}
    settings = {**TINY, "model": dense, "round": {**TINY["round"], "total": 4}}
    result = simulate(
        Scenario(
            **{"run": settings, "text": [folder / "corpus.jsonl"], "peers": 3, "threads": 1, "evaluate_rounds": 1},
            **{"max_slots": 8, "events": [Event(peer=2, kind="join", round=2)]},
        ),
        cache=folder / "cache",
    )
    assert_members_agree(result)
    assert rounds_of(result, 0) == rounds_of(result, 1) == [1, 2, 3, 4] and rounds_of(result, 2)[-1] == 4
    assert all(list(digests) == ["shared"] for digests in result.digests.values()) and not any(result.slots)
    assert result.evaluations[-1].loss < result.evaluations[0].loss


@pytest.mark.parametrize(
    ("family", "experts"),
    sample([("olmoe", "shared"), ("olmoe", "slots"), ("llama", "shared")], [("olmoe", "slots"), ("llama", "shared")]),
)
def test_peers_train_adapters_over_a_checkpoint(folder, family, experts):
    """They agree on them round by round, a late peer included, and the loss of base and adapters falls."""
    source = folder / f"{family}-{experts}"
    saved(source, family)
    texts = (folder / "corpus.jsonl").read_text().splitlines()
    train_bpe([json.loads(line)["text"] for line in texts], 300).save_pretrained(source)
    adapter = {"rank": 4, "experts": experts}
    settings = {**TINY, "model": {}, "adapter": adapter, "round": {**TINY["round"], "total": 4}}
    result = simulate(
        Scenario(
            **{"run": settings, "text": [folder / "corpus.jsonl"], "peers": 3, "threads": 1, "evaluate_rounds": 1},
            **{"max_slots": 2, "events": [Event(peer=2, kind="join", round=2)], "start_from": source},
        ),
        cache=folder / "cache",
    )
    assert_members_agree(result)
    names = {"shared", *(f"slot-{slot}" for slot in range(4 if experts == "slots" else 0))}
    assert all(set(digests) == names for digests in result.digests.values())
    assert any(result.slots) == (experts == "slots") and rounds_of(result, 2)[-1] == 4
    assert result.evaluations[-1].loss < result.evaluations[0].loss
    with pytest.raises(ValidationError, match=r"run\.adapter needs a base; name a checkpoint with start_from"):
        Scenario(run=settings, text=[folder / "corpus.jsonl"])  # type: ignore[arg-type]


def test_peers_continue_a_checkpoint_itself(folder):
    """Their first round starts from its weights, not from a seed's."""
    source = folder / "continued"
    saved(source, "qwen3")
    texts = (folder / "corpus.jsonl").read_text().splitlines()
    train_bpe([json.loads(line)["text"] for line in texts], 300).save_pretrained(source)
    settings = {**TINY, "model": {}, "train": {**TINY["train"], "lr": 1e-9}}
    scenario = Scenario(
        **{"run": settings, "text": [folder / "corpus.jsonl"], "peers": 2, "threads": 1, "start_from": source},
        max_slots=32,  # more than a run without a checkpoint has: the checkpoint says how many there are
    )
    result = simulate(scenario, cache=folder / "cache")
    model = AutoModelForCausalLM.from_pretrained(source)
    tokenizer = load_tokenizer(source)
    batches = held_out_batches(
        scenario.run.data,
        tokenizer,
        **{"paths": scenario.text, "cache": folder / "cache", "batch_size": 16, "seed": 0, "part": "reported"},
        num_sequences=max(1, scenario.held_out_tokens // scenario.run.data.sequence_length),
    )
    assert result.evaluations[-1].loss == pytest.approx(held_out_loss(model, batches), abs=1e-4)
