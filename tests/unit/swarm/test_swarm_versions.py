"""Versions on disk: signed, whole, listed only when they are there, and still there after a restart."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from spes_p2p.codecs import to_bytes
from spes_p2p.errors import ExchangeError, RecordError
from spes_p2p.swarm import versions
from spes_p2p.swarm.identity import Identity
from spes_p2p.swarm.versions import KEEP_PER_NAME, Version, VersionStore


@pytest.fixture(scope="module")
def identities(tmp_path_factory):
    folder = tmp_path_factory.mktemp("identities")
    return Identity(folder / "alice"), Identity(folder / "mallory")


@pytest.fixture
def make(identities):
    """Return a version and its bytes."""

    def make(name, round, data=None):
        data = bytes(to_bytes(torch.randn(9))) if data is None else data
        return Version.sign(identities[0], "run", name, round, data, "fp32"), data

    return make


def assert_whole(store):
    """Every version that the store lists can be read, and nothing else lies in its folder."""
    for name in store.newest():
        store.read(name)
    listed = {store.path(version).name for kept in store._versions.values() for version in kept}
    assert {path.name for path in store._directory.iterdir()} - {"index.json"} == listed


def test_what_was_added_is_read_back_and_the_newest_is_the_last_added(tmp_path, make):
    store = VersionStore(tmp_path, "run")
    for round in (3, 4, 2):
        version, data = make("slot-1", round)
        store.add({"slot-1": (version, data)})
        assert store.newest() == {"slot-1": version}
        assert store.read("slot-1") == data
    assert_whole(store)


def test_only_so_many_versions_of_a_name_are_kept(tmp_path, make):
    store = VersionStore(tmp_path, "run")
    for round in range(6):
        store.add({"slot-1": make("slot-1", round), "shared": make("shared", round)})
    assert len(list(tmp_path.glob("*.bin"))) == 2 * KEEP_PER_NAME
    assert_whole(store)


def test_a_version_of_the_same_round_replaces_the_old_one(tmp_path, make):
    store = VersionStore(tmp_path, "run")
    for _ in range(3):
        store.add({"slot-1": make("slot-1", 5)})
    assert len(list(tmp_path.glob("*.bin"))) == 1
    assert_whole(store)


def test_versions_survive_a_restart(tmp_path, make):
    store = VersionStore(tmp_path, "run")
    items = {name: make(name, 7) for name in ("shared", "slot-0", "slot-1")}
    store.add(items)
    again = VersionStore(tmp_path, "run")
    assert again.newest() == store.newest()
    assert all(again.read(name) == data for name, (_, data) in items.items())


def test_a_version_whose_file_is_gone_is_not_offered_after_a_restart(tmp_path, make):
    store = VersionStore(tmp_path, "run")
    store.add({"slot-0": make("slot-0", 1), "slot-1": make("slot-1", 1)})
    store.path(store.newest()["slot-0"]).unlink()
    assert set(VersionStore(tmp_path, "run").newest()) == {"slot-1"}


@pytest.mark.parametrize("text", ["", "[", '[{"run_id": ', "7", "\x00" * 30], ids=repr)
def test_a_torn_index_is_an_error_that_names_it_and_the_remedy(tmp_path, text):
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(ExchangeError, match=r"index\.json is damaged; delete"):
        VersionStore(tmp_path, "run")


@pytest.mark.parametrize(
    "change", [{"round": 8}, {"name": "../../etc/passwd"}, {"digest": "../x"}, {"signature": ""}, {"extra": 1}], ids=str
)
def test_an_index_that_somebody_edited_is_refused(tmp_path, make, change):
    VersionStore(tmp_path, "run").add({"slot-1": make("slot-1", 7)})
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps([index[0] | change]))
    with pytest.raises(RecordError):
        VersionStore(tmp_path, "run")


def test_the_store_of_another_run_is_refused(tmp_path, make):
    VersionStore(tmp_path, "run").add({"slot-1": make("slot-1", 7)})
    with pytest.raises(RecordError, match="belongs to run"):
        VersionStore(tmp_path, "elsewhere")


def test_a_damaged_file_is_never_read_and_can_be_had_again(tmp_path, make):
    store = VersionStore(tmp_path, "run")
    version, data = make("slot-1", 7)
    store.add({"slot-1": (version, data)})
    store.path(version).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ExchangeError, match="damaged"):
        store.read("slot-1")
    store.add({"slot-1": (version, data)})
    assert store.read("slot-1") == data


def test_what_another_thread_has_written_but_not_yet_listed_is_left_alone(tmp_path, make, monkeypatch):
    """A pull writes its file; before it lists it, another pull finishes and tidies up."""
    store = VersionStore(tmp_path, "run")
    slow, quick = make("slot-1", 2), make("slot-2", 2)
    write = versions._write_whole

    def write_and_be_overtaken(path, data):
        write(path, data)
        if path == store.path(slow[0]):
            monkeypatch.setattr(versions, "_write_whole", write)
            store.add({"slot-2": quick})

    monkeypatch.setattr(versions, "_write_whole", write_and_be_overtaken)
    store.add({"slot-1": slow})
    assert store.read("slot-1") == slow[1] and store.read("slot-2") == quick[1]


def test_what_another_thread_displaces_meanwhile_is_written_again(tmp_path, make):
    """An old version is added once more, and while it is, it falls out of the store."""
    store = VersionStore(tmp_path, "run")
    first, second, third = (make("slot-1", round) for round in range(3))
    store.add({"slot-1": first})
    store.add({"slot-1": second})

    class Overtaken(dict):
        def items(self):  # asked for under the lock, after the files were looked at
            if third[0] not in store.newest().values():
                store.add({"slot-1": third})
            return super().items()

    store.add(Overtaken({"slot-1": first}))
    assert store.read("slot-1") == first[1]


def test_concurrent_adds_lose_nothing(tmp_path, make):
    store = VersionStore(tmp_path, "run")
    rounds = {slot: [make(f"slot-{slot}", round) for round in range(12)] for slot in range(6)}

    def add_all(slot):
        for version, data in rounds[slot]:
            store.add({version.name: (version, data)})
            assert store.read(version.name) == data

    with ThreadPoolExecutor(len(rounds)) as threads:
        list(threads.map(add_all, rounds))
    assert_whole(store)
    assert VersionStore(tmp_path, "run").newest() == {f"slot-{slot}": made[-1][0] for slot, made in rounds.items()}


def test_waiting_for_a_round_ends_when_it_is_added_or_time_is_up(tmp_path, make):
    store = VersionStore(tmp_path, "run")
    store.add({"slot-1": make("slot-1", 1)})
    assert store.wait_for("slot-1", 2, 0.05) is None
    found = []
    waiter = threading.Thread(target=lambda: found.append(store.wait_for("slot-1", 2, 60)))
    waiter.start()
    later = make("slot-1", 3)
    store.add({"slot-1": later})
    waiter.join(30)
    assert found == [later[0]]


def test_a_version_carries_over_to_no_other_author_run_or_content(identities, make):
    mallory = identities[1]
    version, _ = make("slot-1", 7)
    assert Version.verify(version.model_dump_json(), "run") == version
    theirs = {"author": mallory.peer_id, "public_key": mallory.public_key.decode()}
    for change in [theirs, {"author": mallory.peer_id}, {"round": 8}, {"name": "slot-2"}, {"num_bytes": 1}]:
        with pytest.raises(RecordError, match="not signed"):
            Version.verify(version.model_copy(update=change).model_dump_json(), "run")
    with pytest.raises(RecordError, match="belongs to run"):
        Version.verify(version.model_dump_json(), "elsewhere")
