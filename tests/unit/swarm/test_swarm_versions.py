"""Versions on disk: signed, whole, listed only when they are there, and still there after a restart."""

import json
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from spes_p2p.codecs.vectors import to_bytes
from spes_p2p.errors import ExchangeError, RecordError
from spes_p2p.swarm.exchange import store as version_store
from spes_p2p.swarm.exchange.store import KEEP_PER_NAME, VersionStore
from spes_p2p.swarm.exchange.versions import MAX_REFUSED, RefusedVersions, Version
from spes_p2p.swarm.p2p.identity import Identity


@pytest.fixture(scope="module")
def identities(tmp_path_factory):
    folder = tmp_path_factory.mktemp("identities")
    return Identity(folder / "alice"), Identity(folder / "mallory")


@pytest.fixture
def make(identities):
    """Return a version and its bytes."""

    def make(name, round, data=None):
        data = bytes(to_bytes(torch.randn(9))) if data is None else data
        return Version.sign(identities[0], "run", name, round, data), data

    return make


def assert_whole(store):
    """Every version that the store lists can be read, and nothing else lies in its folder."""
    for name in store.newest():
        store.read(name)
    listed = {store.path(version).name for kept in store._versions.values() for version in kept}
    assert {path.name for path in store._directory.iterdir()} - {"index.jsonl"} == listed


def test_what_was_added_is_read_back_and_the_newest_is_the_last_added(tmp_path, make):
    store = VersionStore(tmp_path, "run")
    for round in (3, 4, 2):
        version, data = make("slot-1", round)
        store.add({"slot-1": (version, data)})
        assert store.newest() == {"slot-1": version}
        assert store.read("slot-1") == data
    assert_whole(store)


def test_an_index_that_a_full_disk_tore_goes_on_where_it_was(tmp_path, make):
    """The next version was listed behind a torn line, and the peer could not start again."""
    store, (first, data) = VersionStore(tmp_path, "run"), make("slot-1", 1)
    store.add({"slot-1": (first, data)})
    size = (tmp_path / "index.jsonl").stat().st_size
    unlimited, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, unlimited[1]))
    try:
        with pytest.raises(OSError, match=r"100 of \d+ bytes fit: .*index.jsonl"):
            store.add({"slot-1": make("slot-1", 2)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "index.jsonl").stat().st_size == size
    third, data = make("slot-1", 3)
    store.add({"slot-1": (third, data)})
    assert VersionStore(tmp_path, "run").newest() == {"slot-1": third}


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


@pytest.mark.parametrize("text", ["[", '{"run_id": ', "x", "\x00" * 30], ids=repr)
def test_a_damaged_index_is_an_error_that_names_it_and_the_remedy(tmp_path, text):
    (tmp_path / "index.jsonl").write_text(f"{text}\n")
    with pytest.raises(ExchangeError, match=r"index\.jsonl is damaged; delete"):
        VersionStore(tmp_path, "run")


def test_a_line_that_a_killed_peer_could_not_finish_costs_that_version_alone(tmp_path, make):
    store = VersionStore(tmp_path, "run")
    store.add({"slot-0": make("slot-0", 1)})
    store.add({"slot-1": make("slot-1", 1)})
    index = tmp_path / "index.jsonl"
    index.write_bytes(index.read_bytes()[:-9])
    again = VersionStore(tmp_path, "run")
    assert set(again.newest()) == {"slot-0"}
    again.add({"slot-2": make("slot-2", 1)})
    assert set(VersionStore(tmp_path, "run").newest()) == {"slot-0", "slot-2"}


def test_the_index_does_not_grow_with_the_rounds(tmp_path, make, monkeypatch):
    monkeypatch.setattr(version_store, "SPARE_LINES", 10)
    store = VersionStore(tmp_path, "run")
    for round in range(60):
        store.add({"slot-1": make("slot-1", round)})
        assert len((tmp_path / "index.jsonl").read_bytes().splitlines()) <= 10 + 4 * KEEP_PER_NAME
    assert VersionStore(tmp_path, "run").newest() == store.newest()


@pytest.mark.parametrize(
    "change", [{"round": 8}, {"name": "../../etc/passwd"}, {"digest": "../x"}, {"signature": ""}, {"extra": 1}], ids=str
)
def test_an_edited_index_is_refused(tmp_path, make, change):
    VersionStore(tmp_path, "run").add({"manifest": make("manifest", 7)})
    version = json.loads((tmp_path / "index.jsonl").read_text())
    (tmp_path / "index.jsonl").write_text(json.dumps(version | change) + "\n")
    with pytest.raises(RecordError):
        VersionStore(tmp_path, "run")


def test_the_store_of_another_run_is_refused(tmp_path, make):
    VersionStore(tmp_path, "run").add({"slot-1": make("slot-1", 7)})
    with pytest.raises(RecordError, match="belongs to run"):
        VersionStore(tmp_path, "elsewhere")


def test_what_a_store_holds_that_the_run_does_not_have_is_deleted_loudly(tmp_path, make, caplog):
    store = VersionStore(tmp_path, "run")
    for round in (6, 7):
        store.add({name: make(name, round) for name in ("manifest", "shared", "slot-1", "slot-4000")})
    again = VersionStore(tmp_path, "run")
    again.keep_only({"shared", "slot-1"})
    assert set(again.newest()) == {"manifest", "shared", "slot-1"}
    assert "slot-4000" in caplog.text and not list(tmp_path.glob("slot-4000.*"))
    assert_whole(again)
    assert VersionStore(tmp_path, "run").newest() == again.newest()


def test_a_damaged_file_is_never_read_and_can_be_had_again(tmp_path, make):
    store = VersionStore(tmp_path, "run")
    version, data = make("slot-1", 7)
    store.add({"slot-1": (version, data)})
    store.path(version).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ExchangeError, match="damaged"):
        store.read("slot-1")
    store.add({"slot-1": (version, data)})
    assert store.read("slot-1") == data


def test_a_version_is_mapped_where_it_lies_and_compared_unless_this_process_has_stored_it(tmp_path, make):
    store = VersionStore(tmp_path, "run")
    version, data = make("slot-1", 7)
    store.add({"slot-1": (version, data)})
    for vector in (store.map("slot-1"), store.map("slot-1", is_trusted=True)):
        assert vector.whole().numpy().tobytes() == data
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    for reads in (partial(store.map, "slot-1"), lambda: VersionStore(tmp_path, "run").map("slot-1", is_trusted=True)):
        store.add({"slot-1": (version, data)})
        store.path(version).write_bytes(damaged)
        with pytest.raises(ExchangeError, match="damaged"):
            reads()
    with pytest.raises(ExchangeError, match="no version of slot-1 before its newest"):
        store.map("slot-1", before=True)
    for round in range(8, 20):
        store.add({"slot-1": make("slot-1", round)})
        assert len(store._stored) <= KEEP_PER_NAME, "what is gone is forgotten"


def test_what_another_thread_has_written_but_not_yet_listed_is_left_alone(tmp_path, make, monkeypatch):
    """A pull writes its file; before it lists it, another pull finishes and tidies up."""
    store = VersionStore(tmp_path, "run")
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


def test_a_version_is_found_by_its_digest(tmp_path, make):
    store, (first, second) = VersionStore(tmp_path, "run"), (make("slot-1", round) for round in (1, 2))
    for each in (first, second):
        store.add({"slot-1": each})
        assert store.find("slot-1", first[0].digest) == first[0] and store.find("slot-1") == each[0]
        assert store.have(each[0].digest).is_whole and store.read_part(each[0].digest, 0) == each[1]
    assert store.find("slot-1", "0" * 64) is None and store.find("slot-2") is None
    assert 0 not in store.have("0" * 64) and store.read_part("0" * 64, 0) is None
    store.delete(first[0])
    assert not store.have(first[0].digest).is_whole


def test_a_version_with_known_bytes_needs_none_and_gone_ones_cannot_be_listed(tmp_path, make):
    store = VersionStore(tmp_path, "run")
    version, data = make("slot-1", 1)
    store.add({"slot-1": (version, data)})
    later = version.model_copy(update={"round": 2})
    assert store.takes_known(later) and store.takes_known(later)
    assert store.newest() == {"slot-1": later} and store.read("slot-1") == data
    assert not store.takes_known(make("slot-1", 3)[0]) and store.newest() == {"slot-1": later}
    assert_whole(store)


def test_a_refused_version_is_forgotten_and_remembered_and_a_damaged_one_is_only_forgotten(tmp_path, make):
    store, (old, bad, good) = VersionStore(tmp_path, "run"), [make("slot-1", round) for round in range(3)]
    for version, data in (old, bad):
        store.add({"slot-1": (version, data)})
    store.refuse(bad[0])
    assert store.newest() == {"slot-1": old[0]} == VersionStore(tmp_path, "run").newest()
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


def test_a_version_carries_over_to_no_other_author_run_or_content(identities, make):
    mallory = identities[1]
    version, _ = make("manifest", 7)
    assert Version.verify(version.model_dump_json(), "run") == version
    theirs = {"author": mallory.peer_id, "public_key": mallory.public_key.decode()}
    for change in [
        theirs,
        {"author": mallory.peer_id},
        {"round": 8},
        {"name": "tokenizer"},
        {"num_bytes": 1},
    ]:
        with pytest.raises(RecordError, match="not signed"):
            Version.verify(version.model_copy(update=change).model_dump_json(), "run")
    with pytest.raises(RecordError, match="belongs to run"):
        Version.verify(version.model_dump_json(), "elsewhere")
