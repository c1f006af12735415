"""A restarted peer goes on as if it had never stopped: from the newest checkpoint that is whole, whatever happened."""

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from virtual import VOCAB, RandomTokens, make_peer, tiny_run

from spes_p2p.codecs.vectors import has_digest, to_bytes
from spes_p2p.config import KeptRounds, RoundConfig
from spes_p2p.errors import DataError, JoinError
from spes_p2p.model.build import build_slot_model
from spes_p2p.swarm.exchange.store import VersionStore, file_name
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.training import opening
from spes_p2p.training.checkpoint import MOMENTS, PeerCheckpoint, PeerState, Saved, recover, save_round
from spes_p2p.training.ranks import Ranks
from spes_p2p.training.trainer import Trainer

FILES = ("state.json", "tensors.safetensors")


class Disk:
    """A peer's output folder, in which each round publishes new versions and is saved."""

    def __init__(self, folder: Path, kept: KeptRounds | None = None) -> None:
        self.folder = folder
        self.store = VersionStore(folder / "versions")
        self.checkpoint = PeerCheckpoint(folder, kept)

    def publish(self, round: int) -> None:
        items = {}
        for name in ("shared", "slot-0", "slot-1"):
            data = bytes(to_bytes(torch.full((9,), float(round)) + len(name)))
            items[name] = Version.of(name, round, data), data
        self.store.add(items)

    def save(self, round: int, numel: int = 9) -> None:
        self.publish(round)
        versions = tuple(self.store.newest().values())
        state = PeerState("run", round, (0,), 10 * round, 999, {"position": 40 * round}, versions)
        self.checkpoint.save(state, {"moments/shared/w/exp_avg": torch.full((numel,), float(round))})
        assert self.checkpoint.wait(60)

    def folder_of(self, round: int) -> Path:
        return self.folder / "checkpoint" / f"round-{round}-step-{10 * round}"

    def file(self, round: int, pattern: str) -> Path:
        (found,) = self.folder_of(round).glob(pattern)
        return found

    def versions_of(self, round: int, name: str) -> list[Version]:
        states = self.checkpoint.states("run")
        return [version for version in states[self.folder_of(round)].versions if version.name == name]

    def after_restart(self) -> int:
        """Return the round from which a restarted peer goes on, having checked all of it; 0 for none."""
        checkpoint = PeerCheckpoint(self.folder)
        found = checkpoint.find("run")
        if found is None:
            return 0
        saved = checkpoint.load(found)
        assert saved.state.steps == 10 * saved.state.round and saved.state.data == {"position": 40 * saved.state.round}
        assert set(saved.tensors["moments/shared/w/exp_avg"].tolist()) == {float(saved.state.round)}
        for version in saved.state.versions:
            assert version.round == saved.state.round
            assert has_digest(checkpoint._directory / found.name / file_name(version), version.digest)
        return saved.state.round


@pytest.fixture
def disk(tmp_path):
    return Disk(tmp_path)


def test_nothing_saved_is_nothing_found(disk):
    assert disk.after_restart() == 0


def test_the_newest_save_is_found_and_one_before_it_is_kept(disk):
    for round in range(1, 6):
        disk.save(round)
        assert disk.after_restart() == round
    assert sorted(path.name for path in (disk.folder / "checkpoint").iterdir()) == [
        "round-4-step-40",
        "round-5-step-50",
    ]


def test_versions_are_not_written_twice_and_outlive_those_in_store(disk):
    disk.save(1)
    file = disk.file(1, "shared.*.bin")
    assert file.stat().st_nlink == 2
    for round in range(2, 5):
        disk.publish(round)
    assert file.stat().st_nlink == 1 and disk.after_restart() == 1


def test_versions_on_another_file_system_are_copied(tmp_path):
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("this machine has no second file system to write to")
    elsewhere = memory / f"spes-checkpoint-{os.getpid()}"
    elsewhere.mkdir()
    try:
        (tmp_path / "checkpoint").symlink_to(elsewhere)
        disk = Disk(tmp_path)
        for round in (1, 2, 3):
            disk.save(round)
            assert disk.after_restart() == round
    finally:
        shutil.rmtree(elsewhere)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    file.write_bytes(data)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def lose(file: Path) -> None:
    file.unlink()


DAMAGES = (truncate, flip_a_bit, empty, lose)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("pattern", FILES)
def test_where_state_or_tensors_are_damaged_the_one_before_is_used_and_this_is_said(disk, pattern, damage, caplog):
    disk.save(1)
    disk.save(2)
    damage(disk.file(2, pattern))
    with caplog.at_level(logging.WARNING):
        assert disk.after_restart() == 1
    assert "round-2-step-20" in caplog.text and "trying the one before" in caplog.text


def test_a_state_cut_off_anywhere_is_never_taken_for_one(disk):
    disk.save(1)
    disk.save(2)
    file = disk.file(2, "state.json")
    whole = file.read_bytes()
    for length in range(0, len(whole), 37):
        file.write_bytes(whole[:length])
        assert disk.after_restart() == 1


def test_a_state_that_somebody_edited_is_not_used(disk):
    disk.save(1)
    disk.save(2)
    file = disk.file(2, "state.json")
    file.write_text(file.read_text().replace('"steps": 20', '"steps": 21'))
    assert disk.after_restart() == 1


def test_where_none_is_whole_one_line_says_the_remedy(disk):
    for round in (1, 2):
        disk.save(round)
        flip_a_bit(disk.file(round, "tensors.safetensors"))
    with pytest.raises(DataError) as raised:
        disk.after_restart()
    message = str(raised.value)
    assert "\n" not in message and f"delete {disk.folder / 'checkpoint'}" in message


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_version_that_is_damaged_in_store_and_checkpoint_comes_from_the_checkpoint_before(disk, damage):
    disk.save(1)
    disk.save(2)
    for name in ("shared", "slot-0"):
        damage(disk.store.path(disk.store.newest()[name]))  # the checkpoint's file too, unless it is lost
        if damage is lose:
            lose(disk.file(2, f"{name}.*.bin"))
        (older,) = disk.versions_of(1, name)
        disk.store.path(older).unlink()
    store, found = recover(disk.folder, "run")
    assert found.state.round == 2
    assert {name: version.round for name, version in store.newest().items()} == {"shared": 1, "slot-0": 1, "slot-1": 2}
    for name in store.newest():
        store.read(name)


def test_versions_that_are_damaged_everywhere_are_left_to_other_peers(disk):
    for round in (1, 2):
        disk.save(round)
        flip_a_bit(disk.file(round, "slot-0.*.bin"))
    store, found = recover(disk.folder, "run")
    assert found is not None and found.state.round == 2 and set(store.newest()) == {"shared", "slot-1"}


def test_what_no_other_peer_has_either_ends_the_peer_rather_than_beginning_anew():
    run = tiny_run(round=RoundConfig(mode="steps", steps=3, total=3, min_peers=1, max_seconds=60))
    peer = make_peer(run, 2)
    peer.swarm.publish(7, {name: bundle for name, bundle in peer.initial().items() if name != "slot-3"})
    with pytest.raises(JoinError, match=r"slot-3: neither this peer.* --initial-peers"):
        opening.enter(peer.sync, None)


def test_the_checkpoint_of_another_run_is_refused(disk):
    disk.save(1)
    with pytest.raises(JoinError, match="run run"):
        PeerCheckpoint(disk.folder).find("another")


def test_what_is_newer_than_the_checkpoint_resumed_from_is_deleted_once_there_is_a_new_one(disk):
    """Else damaged ones would count as the newest for ever."""
    for round in (1, 2, 3):
        disk.save(round)
    truncate(disk.file(3, "state.json"))
    again = Disk(disk.folder)
    found = again.checkpoint.find("run")
    again.checkpoint.load(found)
    again.save(3)
    assert again.after_restart() == 3
    assert sorted(path.name for path in (disk.folder / "checkpoint").iterdir()) == [
        "round-2-step-20",
        "round-3-step-30",
    ]


def test_a_version_damaged_in_store_comes_back_from_the_checkpoint(disk, caplog):
    """Of the same round, where the checkpoint has bytes of its own; else of the checkpoint before."""
    disk.save(1)
    disk.save(2)
    disk.publish(3)
    for version in disk.store.newest().values():
        flip_a_bit(disk.store.path(version))
    with caplog.at_level(logging.WARNING):
        store, found = recover(disk.folder, "run")
    assert found.state.round == 2 and "is damaged" in caplog.text
    assert {version.round for version in store.newest().values()} == {2}
    for name in store.newest():
        store.read(name)


def test_what_a_killed_peer_could_not_finish_is_deleted(disk):
    disk.save(1)
    (disk.folder / "versions" / ".x.bin.1.tmp").write_bytes(b"half written")
    store, _ = recover(disk.folder, "run")
    assert set(store.newest()) == {"shared", "slot-0", "slot-1"}
    assert not list((disk.folder / "versions").glob("*.tmp"))


def test_a_peer_killed_at_any_moment_of_a_save_leaves_whole_ones_and_nothing_else(disk, caplog):
    """Children save without end, and are killed after random times."""
    reached = 0
    for _ in range(20):
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            mine = Disk(disk.folder)
            found = mine.checkpoint.find("run")
            round = found.state.round if found is not None else 0
            if found is not None:
                mine.checkpoint.load(found)
            while True:
                round += 1
                mine.save(round, numel=20_000)
                os.write(tell, b"%d\n" % round)
        os.close(tell)
        assert os.read(told, 16)  # it is at work
        time.sleep(random.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(told) as pipe:
            rest = pipe.read().split()
        now = disk.after_restart()
        assert now > reached and all(int(round) <= now for round in rest)
        assert not caplog.records, "half of a checkpoint looked like a damaged one"
        reached = now
    assert reached >= 20


FULL = """
import logging, os, shutil, sys
sys.path[:0] = {path!r}
from pathlib import Path
from test_checkpoint import Disk
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
folder = Path({folder!r})
disk = Disk(folder)
disk.save(1)
filling = folder / "filling"
free = shutil.disk_usage(folder).free
filling.write_bytes(bytes(free - 200_000))
for round in (2, 3):
    disk.save(round, numel=100_000)
    print("after", round, disk.after_restart(), sorted(os.listdir(folder / "checkpoint")))
filling.unlink()
disk.save(4, numel=100_000)
print("after", 4, disk.after_restart())
"""


@pytest.mark.full
def test_a_full_disk_leaves_the_one_before_says_so_once_and_is_tried_again(tmp_path):
    """On a small disk of its own."""
    code = FULL.format(path=[*sys.path, str(Path(__file__).parent)], folder=str(tmp_path))
    mount = f'mount -t tmpfs -o size=4m tmpfs {tmp_path} && exec {sys.executable} -c "$CODE"'
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount],
        capture_output=True,
        text=True,
        env={**os.environ, "CODE": code},
        timeout=120,
        check=False,
    )
    if "unshare" in ended.stderr or "mount:" in ended.stderr:
        pytest.skip(f"this machine lets nobody mount a small disk: {ended.stderr.strip()}")
    assert ended.returncode == 0, ended.stderr
    assert "after 2 1 ['round-1-step-10']" in ended.stdout and "after 3 1 ['round-1-step-10']" in ended.stdout
    assert "after 4 4" in ended.stdout and ended.stdout.count("cannot write checkpoint") == 1
    assert "No space left on device" in ended.stdout and "are missing" in ended.stdout
    assert "checkpoints are written again" in ended.stdout


def make_trainer(claimed: tuple[int, ...] = ()) -> Trainer:
    run = tiny_run()
    model = build_slot_model(
        run.model, vocab_size=VOCAB, sequence_length=16, seed=0, claimed=claimed, storage=run.frozen_storage
    )
    return Trainer(model, run.train, RandomTokens(7, 16), Ranks("cpu"))


def test_training_on_while_a_save_is_under_way_does_not_tear_it():
    trainer = make_trainer()
    trainer.step(1e-2)
    saved = trainer.state_tensors()
    before = {name: tensor.clone() for name, tensor in saved.items()}
    trainer.step(1e-2)
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())


def test_a_restarted_trainer_arrives_where_an_uninterrupted_one_does(disk):
    steady = make_trainer()
    layout = steady.layouts["slot"]
    masters = {VectorName.of_slot(slot): layout.flatten(steady.model.slot_weights(slot)) for slot in (0, 3)}
    steady.set_slots((0, 3), masters)
    for _ in range(3):
        steady.step(1e-2)
    names = (SHARED, *map(VectorName.of_slot, steady.slots))
    state = PeerState("run", 3, steady.slots, steady.steps, 999, steady.data.state_dict())
    disk.checkpoint.save(state, steady.optimizer.state_tensors())
    assert disk.checkpoint.wait(60)
    weights = {name: steady.vector(name) for name in names}

    saved, kept, *_ = disk.checkpoint.load(disk.checkpoint.find("run"))
    restarted = make_trainer()
    restarted.set_slots(saved.slots, {name: weights[name] for name in names if name != SHARED})
    restarted.load({SHARED: weights[SHARED]})
    restarted.data.load_state_dict(dict(saved.data))
    restarted.optimizer.load_state_tensors(kept)
    for _ in range(3):
        assert steady.step(1e-2) == restarted.step(1e-2)
    for name in names:
        assert torch.equal(steady.vector(name), restarted.vector(name)), name


def test_moments_of_another_optimizer_are_one_line_with_the_remedy():
    wrote = make_trainer()
    wrote.step(1e-2)
    moments = {
        name: tensor for name, tensor in wrote.optimizer.state_tensors().items() if not name.endswith("exp_avg_sq")
    }
    with pytest.raises(DataError, match="--inner-optimizer"):
        make_trainer().load_state_tensors(moments)


def rounds_of(disk: Disk) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in (disk.folder / "checkpoint").iterdir())


@pytest.mark.parametrize(
    ("last", "every", "expected"), [(1, None, [7]), (3, None, [5, 6, 7]), (1, 3, [3, 6, 7]), (2, 2, [2, 4, 6, 7])]
)
def test_the_newest_rounds_and_every_nth_are_kept(tmp_path, last, every, expected):
    disk = Disk(tmp_path, KeptRounds(keep_last=last, keep_every=every))
    for round in range(8):
        disk.save(round)
    assert rounds_of(disk) == expected
    for round in expected:
        assert PeerCheckpoint(tmp_path).find("run", round).state.round == round


def test_a_round_that_is_not_kept_is_refused_with_those_that_are(disk):
    with pytest.raises(DataError, match=r"no checkpoint of round 3, but none"):
        disk.checkpoint.find("run", 3)
    for round in (1, 2):
        disk.save(round)
    with pytest.raises(DataError, match=r"no checkpoint of round 3, but those of rounds 1, 2; set --resume-round"):
        recover(disk.folder, "run", 3)


def test_going_back_to_a_round_makes_its_versions_the_newest_and_gives_up_the_later_ones(tmp_path):
    kept = KeptRounds(keep_last=2, keep_every=2)
    disk = Disk(tmp_path, kept)
    for round in range(1, 7):
        disk.save(round)
    store, found = recover(tmp_path, "run", 4)
    assert found is not None and found.state.round == 4
    assert {version.round for version in store.newest().values()} == {4}
    again = Disk(tmp_path, kept)
    again.checkpoint.load(found)
    assert rounds_of(again) == [2, 4, 5, 6], "nothing is lost before there is something new"
    again.save(5)
    assert rounds_of(again) == [2, 4, 5] and again.after_restart() == 5


def test_a_save_of_a_round_that_is_kept_waits_for_the_one_before():
    """Otherwise a slow disk would leave out the very round that is to be kept."""
    waited = []
    checkpoint = SimpleNamespace(is_kept=lambda round: round == 4, wait=lambda seconds: waited.append(seconds))
    for round in (3, 4):
        save_round(checkpoint, make_trainer(), SimpleNamespace(round=round), 1, is_last=False)  # type: ignore[arg-type]
    assert waited[0] == 0 and waited[1] > 0


@pytest.mark.parametrize("skips", [False, True])
def test_an_optimizer_that_is_skipped_starts_anew_with_everything_else_in_place(skips):
    run = tiny_run(round=RoundConfig(mode="steps", steps=3, total=9, min_peers=1, max_seconds=60))
    before = make_trainer((0, 1, 2))
    before.step(1e-2)
    peer = make_peer(run, 3)
    peer.swarm.publish(7, peer.initial())
    tensors = {f"{MOMENTS}{name}": tensor for name, tensor in before.state_tensors().items()}
    state = PeerState("run", 7, before.slots, 21, 999, {"position": 40})
    peer.loop.open(None, Saved(state, tensors, skips_optimizer=skips))
    assert peer.trainer.steps == 21 and peer.trainer.data.state_dict() == {"position": 40}
    held = [peer.trainer.moments(name, ("exp_avg", "exp_avg_sq")) for name in peer.trainer.names]
    assert all(bool(moment.any()) != skips for moment in held)
