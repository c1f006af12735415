"""The rows about attackers say what the runs have shown, bad news too."""

import inspect
from collections.abc import Callable
from typing import Any, Never

import pytest

from benchmarks import attackers
from benchmarks.attackers import (
    ATTACKER,
    FIRST,
    SEEDS,
    SOLE,
    SOLE_UNDISTURBED,
    SOLE_UNGATED,
    UNDISTURBED,
    UNGUARDED,
    attacker_rows,
    kinds,
    scenario,
    summary_rows,
)
from spes_p2p.errors import SimulationError
from spes_p2p.sim.scenario import Scenario
from spes_p2p.swarm.averaging.audit import Auditor
from spes_p2p.training.loss_gate import LossGate


def run(loss: float, left_out_from: int | None = None, rejected: int = 0) -> dict[str, Any]:
    return {"loss": loss, "left_out_from": left_out_from, "rejected": rejected, "contributions": 100}


def document(**changes: dict[str, Any]) -> dict[str, Any]:
    runs = {f"{UNDISTURBED} {seed}": run(5.0) for seed in SEEDS} | {f"{UNGUARDED} {seed}": run(5.0) for seed in SEEDS}
    runs |= {f"scale {seed}": run(5.05, FIRST + 3) for seed in SEEDS}
    return {"runs": runs | {" ".join(name.rsplit("_", 1)): of for name, of in changes.items()}, "guard_seconds": 0.05}


def test_the_rows_compare_each_seed_with_the_same_seed_undisturbed() -> None:
    loss, rounds, rejected, clean, seconds = attacker_rows(document())
    assert (loss.cells[1], loss.is_reached) == ("+1.00 % ± 0.00", True)
    assert (rounds.cells[1], rounds.is_reached) == ("2, 2, 2", True)
    assert rejected.is_reached and clean.is_reached and seconds.is_reached


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"scale_1": run(6.0, FIRST + 3)}, 0),
        ({"scale_1": run(5.0, FIRST + 4)}, 1),
        ({"scale_1": run(5.0, None)}, 1),
        ({"undisturbed_0": run(5.0, None, rejected=50)}, 2),
        ({"unguarded_2": run(4.8)}, 3),
    ],
)
def test_what_is_not_reached_is_said_so(changes: dict[str, Any], place: int) -> None:
    assert not list(attacker_rows(document(**changes)))[place].is_reached


def test_all_attacks_together_are_as_bad_as_the_worst_of_them() -> None:
    worst, rounds, *rest = summary_rows(document())
    assert worst.cells[1] == "+1.00 % ± 0.00 (scale)" and not worst.is_reached, "the others have not been run"
    assert (rounds.cells[1], rounds.is_reached) == ("2", True)
    assert rest[1:] == list(attacker_rows(document()))[2:]
    never = {f"{kind}_{seed}": run(5.0, FIRST + 2) for kind in kinds() for seed in SEEDS} | {"nan_1": run(5.6, None)}
    worst, rounds, unfound, *_ = summary_rows(document(**never))
    assert worst.cells[1].endswith("(nan)") and not worst.is_reached
    assert (rounds.cells[1], rounds.is_reached) == ("inf", False)
    assert unfound.cells[1] == "stale, copy, inflate, silent"


def test_all_attacks_are_by_one_peer_from_one_round_on() -> None:
    [attack] = scenario("moments", 0).attacks
    assert (attack.peer, attack.from_round, attack.kind) == (ATTACKER, FIRST, "moments")
    assert scenario(UNDISTURBED, 1).attacks == []


def test_the_only_holder_of_a_slot_is_held_against_runs_with_only_holders() -> None:
    sole = {f"{SOLE_UNDISTURBED}_{seed}": run(4.0) for seed in SEEDS}
    sole |= {f"{SOLE}_{seed}": run(4.04, FIRST + 3) for seed in SEEDS} | {f"{SOLE_UNGATED}_0": run(8.0)}
    loss, rounds, ungated = list(attacker_rows(document(**sole)))[2:5]
    assert (loss.cells[1], loss.is_reached) == ("+1.00 % ± 0.00", True)
    assert (rounds.cells[1], rounds.is_reached) == ("2", True)
    assert ungated.cells[1] == "+100.00 %" and ungated.is_reached is None
    late = list(attacker_rows(document(**sole | {f"{SOLE}_1": run(5.0, None)})))[2:4]
    assert [row.is_reached for row in late] == [False, False]


def test_only_holders_have_slots_of_their_own() -> None:
    assert scenario(SOLE, 0).max_slots == 1 and scenario(SOLE, 0).attacks[0].groups == "slots"
    assert not scenario(SOLE_UNDISTURBED, 0).attacks and scenario("scale", 0).max_slots == 2


def test_a_run_that_did_not_live_is_said_to_have_ended() -> None:
    ended = run(5.0) | {"loss": None, "ended": "nobody trained"}
    worse, *_ = attacker_rows(document(scale_1=ended))
    assert (worse.cells[1], worse.is_reached) == ("1 of 3 runs ended early", False)
    sole = {f"{kind}_{seed}": run(4.0, FIRST + 3) for kind in (SOLE_UNDISTURBED, SOLE) for seed in SEEDS}
    sole |= {f"{SOLE_UNGATED}_{seed}": ended for seed in SEEDS}
    *_, ungated = list(attacker_rows(document(**sole)))[2:5]
    assert ungated.cells[1] == "3 of 3 runs ended early" and ungated.is_reached is None


def test_a_run_that_does_not_live_is_kept_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_trains(_: Scenario) -> Never:
        raise SimulationError("nobody trained")

    monkeypatch.setattr(attackers, "simulate", nobody_trains)
    assert attackers.measure(SOLE_UNGATED, 0).items() >= {"loss": None, "ended": "nobody trained"}.items()


@pytest.mark.parametrize(
    ("guarded", "unguarded"), [(LossGate.load, attackers._ungated), (Auditor.weigh, attackers._plain_weights)]
)
def test_what_stands_for_a_guard_can_be_called_as_the_guard_is(
    guarded: Callable[..., object], unguarded: Callable[..., object]
) -> None:
    theirs, ours = (list(inspect.signature(function).parameters.values())[1:] for function in (guarded, unguarded))
    assert [(each.name, each.default) for each in ours] == [(each.name, each.default) for each in theirs]
