"""A restarted peer goes on as if it had never stopped, or says in one line why it cannot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from virtual import VOCAB, RandomTokens, tiny_run

from spes_p2p.errors import DataError
from spes_p2p.model.build import build_slot_model
from spes_p2p.swarm.roster import SHARED, slot_name
from spes_p2p.training.checkpoint import PeerCheckpoint, PeerState
from spes_p2p.training.process_group import ProcessGroup
from spes_p2p.training.rounds import Rounds
from spes_p2p.training.trainer import Trainer

STATE = PeerState(run_id="r", round=3, slots=(1, 2), steps=30, total_tokens=999, data={"epoch": 1, "position": 5})


@pytest.fixture
def checkpoint(tmp_path: Path) -> PeerCheckpoint:
    return PeerCheckpoint(tmp_path / "checkpoint")


def moments(value: float) -> dict[str, torch.Tensor]:
    return {"shared/w/exp_avg": torch.full((3,), value), "shared/w/step": torch.tensor(value)}


def test_what_is_saved_is_what_is_loaded(checkpoint):
    checkpoint.save(STATE, moments(1.0))
    state, loaded = checkpoint.load()
    assert state == STATE
    assert loaded.keys() == moments(1.0).keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in moments(1.0).items())


def test_nothing_saved_is_nothing_loaded(checkpoint):
    assert checkpoint.load() is None


def test_the_newest_save_wins_and_leaves_no_litter(checkpoint, tmp_path):
    checkpoint.save(STATE, moments(1.0))
    checkpoint.save(replace(STATE, round=4, steps=40), moments(2.0))
    state, loaded = checkpoint.load()
    assert state.round == 4 and loaded["shared/w/step"] == 2.0
    assert len(list((tmp_path / "checkpoint").iterdir())) == 2


@pytest.mark.parametrize("torn_at", ["moments", "state", "rename"])
def test_a_save_torn_at_any_point_leaves_the_one_before(checkpoint, tmp_path, monkeypatch, torn_at):
    checkpoint.save(STATE, moments(1.0))

    def torn(*args, **kwargs):
        raise KeyboardInterrupt

    if torn_at == "moments":
        monkeypatch.setattr("spes_p2p.training.checkpoint.save_file", torn)
    else:
        monkeypatch.setattr(Path, "write_text" if torn_at == "state" else "replace", torn)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(replace(STATE, round=4, steps=40), moments(2.0))
    monkeypatch.undo()
    state, loaded = PeerCheckpoint(tmp_path / "checkpoint").load()
    assert state == STATE and loaded["shared/w/step"] == 1.0


def damage_moments(folder: Path) -> None:
    file = next(folder.glob("moments-*"))
    file.write_bytes(file.read_bytes()[:40])


def empty_moments(folder: Path) -> None:
    next(folder.glob("moments-*")).write_bytes(b"")


def lose_moments(folder: Path) -> None:
    next(folder.glob("moments-*")).unlink()


def damage_state(folder: Path) -> None:
    (folder / "peer.json").write_text('{"round": 3')


def lack_a_field(folder: Path) -> None:
    content = json.loads((folder / "peer.json").read_text())
    del content["data"]
    (folder / "peer.json").write_text(json.dumps(content))


def name_no_moments(folder: Path) -> None:
    content = json.loads((folder / "peer.json").read_text())
    del content["moments"]
    (folder / "peer.json").write_text(json.dumps(content))


def hold_a_list(folder: Path) -> None:
    (folder / "peer.json").write_text("[1, 2]")


@pytest.mark.parametrize(
    "damage",
    [damage_moments, empty_moments, lose_moments, damage_state, lack_a_field, name_no_moments, hold_a_list],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_checkpoint_is_one_line_with_the_remedy(checkpoint, tmp_path, damage):
    checkpoint.save(STATE, moments(1.0))
    damage(tmp_path / "checkpoint")
    with pytest.raises(DataError) as raised:
        checkpoint.load()
    message = str(raised.value)
    assert "\n" not in message and str(tmp_path / "checkpoint") in message and "delete" in message


def test_a_checkpoint_reads_nothing_outside_its_directory(checkpoint, tmp_path):
    checkpoint.save(STATE, moments(1.0))
    folder = tmp_path / "checkpoint"
    moved = next(folder.glob("moments-*")).replace(tmp_path / "elsewhere.safetensors")
    content = json.loads((folder / "peer.json").read_text())
    (folder / "peer.json").write_text(json.dumps({**content, "moments": f"../{moved.name}"}))
    with pytest.raises(DataError):
        checkpoint.load()


def make_trainer() -> Trainer:
    run = tiny_run()
    model = build_slot_model(
        run.model, vocab_size=VOCAB, sequence_length=16, seed=0, claimed=(), storage=run.frozen_storage
    )
    return Trainer(model, run.train, RandomTokens(7, 16), ProcessGroup("cpu"))


def test_a_restarted_trainer_arrives_where_an_uninterrupted_one_does(checkpoint):
    steady = make_trainer()
    layout = steady.layouts["slot"]
    masters = {slot_name(slot): layout.flatten(steady.model.slot_weights(slot)) for slot in (0, 3)}
    steady.set_slots((0, 3), masters)
    for _ in range(3):
        steady.step(1e-2)
    names = (SHARED, *map(slot_name, steady.slots))
    state = replace(STATE, slots=steady.slots, steps=steady.steps, data=steady.data.state_dict())
    checkpoint.save(state, steady.optimizer.state_tensors())
    weights = {name: steady.flat(name) for name in names}

    saved, kept = checkpoint.load()
    restarted = make_trainer()
    restarted.set_slots(saved.slots, {name: weights[name] for name in names if name != SHARED})
    restarted.load({SHARED: weights[SHARED]})
    restarted.data.load_state_dict(dict(saved.data))
    restarted.optimizer.load_state_tensors(kept)
    for _ in range(3):
        assert steady.step(1e-2) == restarted.step(1e-2)
    for name in names:
        assert torch.equal(steady.flat(name), restarted.flat(name)), name


def test_moments_of_another_optimizer_are_one_line_with_the_remedy():
    wrote = make_trainer()
    wrote.step(1e-2)
    moments = {
        name: tensor for name, tensor in wrote.optimizer.state_tensors().items() if not name.endswith("exp_avg_sq")
    }
    rounds = Rounds(tiny_run(), make_trainer(), ProcessGroup("cpu"), None)
    with pytest.raises(DataError, match="--inner-optimizer"):
        rounds._load_moments(moments)
