"""Versions on disk: whole, listed only when they are there, and still there after a restart."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from spes_p2p.codecs.vectors import block_hashes, to_bytes
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.exchange import store as version_store
from spes_p2p.swarm.exchange.blocks import ALL, LIST, encode_have
from spes_p2p.swarm.exchange.store import KEEP_PER_NAME, VersionStore
from spes_p2p.swarm.exchange.versions import MAX_REFUSED, RefusedVersions, Version


@pytest.fixture
def make():
    """Return a version and its bytes."""

    def make(name, round, data=None):
        data = bytes(to_bytes(torch.randn(9))) if data is None else data
        return Version.of(name, round, data), data

    return make


def assert_whole(store):
    """Every version that the store lists can be read, and nothing else lies in its folder."""
    for name in store.newest():
        store.read(name)
    listed = {store.path(version).name for kept in store._versions.values() for version in kept}
    assert {path.name for path in store._directory.iterdir()} == listed


def test_what_was_added_is_read_back_and_the_newest_is_the_last_added(tmp_path, make):
    """A peer that goes back to an older round gives up the later ones, over a restart, too."""
    store = VersionStore(tmp_path)
    for round in (3, 4, 2):
        version, data = make("slot-1", round)
        store.add({"slot-1": (version, data)})
        assert store.newest() == {"slot-1": version} == VersionStore(tmp_path).newest()
        assert store.read("slot-1") == data
    assert_whole(store)


def test_only_so_many_versions_of_a_name_are_kept(tmp_path, make):
    store = VersionStore(tmp_path)
    for round in range(6):
        store.add({"slot-1": make("slot-1", round), "shared": make("shared", round)})
    assert len(list(tmp_path.glob("*.bin"))) == 2 * KEEP_PER_NAME
    assert_whole(store)


def test_a_version_of_the_same_round_replaces_the_old_one(tmp_path, make):
    store = VersionStore(tmp_path)
    for _ in range(3):
        store.add({"slot-1": make("slot-1", 5)})
    assert len(list(tmp_path.glob("*.bin"))) == 1
    assert_whole(store)


def test_list_of_a_version_that_was_hashed_for_its_digest_is_served_without_reading_it_again(tmp_path, make):
    store = VersionStore(tmp_path)
    version, data = make("slot-1", 1)
    store.add({"slot-1": (version, data)}, {"slot-1": block_hashes(data)})
    store.path(version).unlink()
    assert store.read_part(version.digest, LIST) == block_hashes(data)


def test_versions_survive_a_restart(tmp_path, make):
    store = VersionStore(tmp_path)
    items = {name: make(name, 7) for name in ("shared", "slot-0", "slot-1")}
    store.add(items)
    again = VersionStore(tmp_path)
    assert again.newest() == store.newest()
    assert all(again.read(name) == data for name, (_, data) in items.items())


def test_a_version_whose_file_is_gone_is_not_offered_after_a_restart(tmp_path, make):
    store = VersionStore(tmp_path)
    store.add({"slot-0": make("slot-0", 1), "slot-1": make("slot-1", 1)})
    store.path(store.newest()["slot-0"]).unlink()
    assert set(VersionStore(tmp_path).newest()) == {"slot-1"}


def test_files_that_a_store_would_not_write_are_no_versions(tmp_path, make):
    VersionStore(tmp_path).add({"slot-1": make("slot-1", 7)})
    (own,) = tmp_path.iterdir()
    digest = own.name.split(".")[2]
    for name in (
        "slot-01.7.{}",
        "slot-1.07.{}",
        "slot-1.-7.{}",
        "other.7.{}",
        "slot-1.{}",
        "slot-1.7.7.{}",
        "slot-1.8.x",
    ):
        (tmp_path / f"{name.format(digest)}.bin").write_bytes(own.read_bytes())
    (tmp_path / f"slot-1.9.{'0' * 64}.bin").touch()  # as a power cut may leave it
    assert [each.round for each in VersionStore(tmp_path).newest().values()] == [7]


def test_of_two_versions_of_a_round_that_a_killed_peer_leaves_the_later_counts_and_both_are_there(tmp_path, make):
    pair = [make("slot-1", 7) for _ in range(2)]
    for version, data in pair:
        version_store.write_whole(tmp_path / version_store.file_name(version), data)
    newest = pair[1][0]
    os.utime(tmp_path / version_store.file_name(newest), (2e9, 2e9))
    store = VersionStore(tmp_path)
    assert store.newest() == {"slot-1": newest} and store.find("slot-1", pair[0][0].digest) == pair[0][0]


def test_what_a_store_holds_that_the_run_does_not_have_is_deleted_loudly(tmp_path, make, caplog):
    store = VersionStore(tmp_path)
    for round in (6, 7):
        store.add({name: make(name, round) for name in ("manifest", "shared", "slot-1", "slot-4000")})
    again = VersionStore(tmp_path)
    again.keep_only({"shared", "slot-1"})
    assert set(again.newest()) == {"manifest", "shared", "slot-1"}
    assert "slot-4000" in caplog.text and not list(tmp_path.glob("slot-4000.*"))
    assert_whole(again)
    assert VersionStore(tmp_path).newest() == again.newest()


def test_a_damaged_file_is_never_read_and_can_be_had_again(tmp_path, make):
    store = VersionStore(tmp_path)
    version, data = make("slot-1", 7)
    store.add({"slot-1": (version, data)})
    store.path(version).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ExchangeError, match="damaged"):
        store.read("slot-1")
    store.add({"slot-1": (version, data)})
    assert store.read("slot-1") == data


def test_a_version_is_mapped_where_it_lies_and_compared_unless_this_process_has_stored_it(tmp_path, make):
    store = VersionStore(tmp_path)
    version, data = make("slot-1", 7)
    store.add({"slot-1": (version, data)})
    for vector in (store.map("slot-1"), store.map("slot-1", is_trusted=True)):
        assert vector.whole().numpy().tobytes() == data
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    for reads in (partial(store.map, "slot-1"), lambda: VersionStore(tmp_path).map("slot-1", is_trusted=True)):
        store.add({"slot-1": (version, data)})
        store.path(version).write_bytes(damaged)
        with pytest.raises(ExchangeError, match="damaged"):
            reads()
    with pytest.raises(ExchangeError, match="no version of slot-1 before its newest"):
        store.map("slot-1", before=True)
    for round in range(8, 20):
        store.add({"slot-1": make("slot-1", round)})
        assert len(store._hashes) <= KEEP_PER_NAME, "what is gone is forgotten"


def test_what_another_thread_has_written_but_not_yet_listed_is_left_alone(tmp_path, make, monkeypatch):
    """A pull writes its file; before it lists it, another pull finishes and tidies up."""
    store = VersionStore(tmp_path)
    slow, quick = make("slot-1", 2), make("slot-2", 2)
    write = version_store.write_whole

    def write_and_be_overtaken(path, data):
        write(path, data)
        if path == store.path(slow[0]):
            monkeypatch.setattr(version_store, "write_whole", write)
            store.add({"slot-2": quick})

    monkeypatch.setattr(version_store, "write_whole", write_and_be_overtaken)
    store.add({"slot-1": slow})
    assert store.read("slot-1") == slow[1] and store.read("slot-2") == quick[1]


def test_what_another_thread_displaces_meanwhile_is_written_again(tmp_path, make):
    """An old version is added once more, and while it is, it falls out of the store."""
    store = VersionStore(tmp_path)
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
    store = VersionStore(tmp_path)
    rounds = {slot: [make(f"slot-{slot}", round) for round in range(12)] for slot in range(6)}

    def add_all(slot):
        for version, data in rounds[slot]:
            store.add({version.name: (version, data)})
            assert store.read(version.name) == data

    with ThreadPoolExecutor(len(rounds)) as threads:
        list(threads.map(add_all, rounds))
    assert_whole(store)
    assert VersionStore(tmp_path).newest() == {f"slot-{slot}": made[-1][0] for slot, made in rounds.items()}


def test_slots_that_begin_alike_are_served_though_one_of_them_has_gone_on(tmp_path, make):
    """Every expert of an upcycled model begins as the dense model's."""
    store, data = VersionStore(tmp_path), bytes(to_bytes(torch.randn(9)))
    store.add({name: make(name, 0, data) for name in ("slot-0", "slot-1")})
    digest = store.find("slot-0").digest
    for round in range(1, KEEP_PER_NAME + 1):
        store.add({"slot-1": make("slot-1", round)})
    assert store.find("slot-1", digest) is None and store.have(digest) == encode_have(ALL)
    assert store.read_part(digest, 0) == data
    store.delete(store.find("slot-0"))
    assert store.read_part(digest, 0) is None


def test_a_document_is_read_by_its_number(tmp_path, make):
    store = VersionStore(tmp_path)
    documents = [make("revision", number) for number in (1, 2)]
    for document in documents:
        store.add({"revision": document})
    assert [store.read("revision", round=number) for number in (1, 2, None)] == [
        *(d[1] for d in documents),
        documents[1][1],
    ]
    with pytest.raises(ExchangeError, match="of round 3"):
        store.read("revision", round=3)


def test_a_version_is_found_by_its_digest(tmp_path, make):
    store, (first, second) = VersionStore(tmp_path), (make("slot-1", round) for round in (1, 2))
    for each in (first, second):
        store.add({"slot-1": each})
        assert store.find("slot-1", first[0].digest) == first[0] and store.find("slot-1") == each[0]
        assert store.have(each[0].digest) == encode_have(ALL) and store.read_part(each[0].digest, 0) == each[1]
    assert store.find("slot-1", "0" * 64) is None and store.find("slot-2") is None
    assert store.have("0" * 64) == encode_have(0) and store.read_part("0" * 64, 0) is None
    store.delete(first[0])
    assert store.have(first[0].digest) == encode_have(0)


def test_a_version_with_known_bytes_needs_none_and_gone_ones_cannot_be_listed(tmp_path, make):
    store = VersionStore(tmp_path)
    version, data = make("slot-1", 1)
    store.add({"slot-1": (version, data)})
    later = version.model_copy(update={"round": 2})
    assert store.takes_known(later) and store.takes_known(later)
    assert store.newest() == {"slot-1": later} and store.read("slot-1") == data
    assert not store.takes_known(make("slot-1", 3)[0]) and store.newest() == {"slot-1": later}
    assert_whole(store)


def test_a_refused_version_is_forgotten_and_remembered_and_a_damaged_one_is_only_forgotten(tmp_path, make):
    store, (old, bad, good) = VersionStore(tmp_path), [make("slot-1", round) for round in range(3)]
    for version, data in (old, bad):
        store.add({"slot-1": (version, data)})
    store.refuse(bad[0])
    assert store.newest() == {"slot-1": old[0]} == VersionStore(tmp_path).newest()
    assert bad[0].digest in store.refused
    store.delete(old[0])
    assert old[0].digest not in store.refused and good[0].digest not in store.refused


def test_only_the_last_refusals_are_remembered():
    refused = RefusedVersions()
    for number in range(MAX_REFUSED + 3):
        refused.add(name_of(number))
        refused.add(name_of(number))
    assert [name_of(number) in refused for number in (0, 2, 3, MAX_REFUSED + 2)] == [False, False, True, True]


def name_of(number):
    return f"{number:064x}"
