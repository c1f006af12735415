"""The model of a round, out of a peer's folder: that round's, slot by slot, and nothing else touched."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from agreement import last_body
from model_folders import SEQUENCE, SLOTS, PeerFolder, assert_same
from peer_processes import files_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from spes_p2p.commands.export import main
from spes_p2p.config import DataConfig, JoinLink, KeptRounds
from spes_p2p.config.commands import ExportConfig
from spes_p2p.errors import ConfigError, DataError, JoinError
from spes_p2p.model.build import build_slot_model
from spes_p2p.monitor import model_folder
from spes_p2p.monitor.events import METRICS_FILE, JsonlSink
from spes_p2p.monitor.model_folder import ModelFolder, export
from spes_p2p.monitor.sinks import Sinks
from spes_p2p.swarm.certificate import Certificate, MemberEntry
from spes_p2p.swarm.chain import Link
from spes_p2p.swarm.consensus import CERTIFICATES, FOLDER
from spes_p2p.swarm.p2p.identity import Identity
from tests.unit.monitor.swarms import peer_id, small_history


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return Identity(tmp_path_factory.mktemp("identity") / "key")


@pytest.fixture
def peer(tmp_path, identity):
    return PeerFolder(tmp_path / "peer", identity)


def test_every_round_that_a_folder_keeps_is_exported_as_it_was(tmp_path, identity):
    peer = PeerFolder(tmp_path / "peer", identity, kept=KeptRounds(keep_last=1, keep_every=3))
    models = {round: peer.save(round) for round in range(8)}
    before = files_of(peer.folder)
    assert ModelFolder(peer.folder).rounds == [3, 6, 7]
    for round in (3, 6, 7):
        exported = export(peer.folder, tmp_path / f"round-{round}", round)
        assert exported.round == round and not exported.other_rounds
        assert exported.num_params == sum(parameter.numel() for parameter in models[round].parameters())
        assert_same(tmp_path / f"round-{round}", models[round])
    assert export(peer.folder, tmp_path / "newest").round == 7
    assert files_of(peer.folder) == before, "the folder is only read"
    words = AutoTokenizer.from_pretrained(tmp_path / "newest")
    assert words.decode(words("7 plus 7")["input_ids"]) == "7 plus 7"


def test_logits_of_the_exported_model_are_those_of_ours(tmp_path, peer, seed):
    model = peer.save(1)
    export(peer.folder, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ours = build_slot_model(
        peer.run.model, vocab_size=peer.vocab_size, sequence_length=SEQUENCE, seed=0, claimed=(1,), storage="fp32"
    )
    state = model.state_dict()
    ours.load_shared({name: state[name] for name in peer.shared.shapes})
    for slot in range(SLOTS):
        ours.load_slot(slot, {name: state[name][slot] for name in peer.slot.shapes})
    tokens = torch.randint(0, peer.vocab_size, (4, SEQUENCE), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = ours.module.eval()(tokens).logits
        assert (loaded(tokens).logits - expected).abs().max() <= 5e-6 * expected.abs().max()


def test_slots_of_other_rounds_are_taken_as_the_peer_had_them_and_named(tmp_path, peer):
    models = {1: peer.save(1), 2: peer.save(2, [0, 1]), 3: peer.save(3, [0, 1, 2])}
    exported = export(peer.folder, tmp_path / "new")
    assert exported.other_rounds == {3: 1} and "slots 3 (round 1)" in str(exported)
    assert "except slots 3 (round 1)" in (tmp_path / "new" / "README.md").read_text()
    assert_same(tmp_path / "new", models[3], {3: models[1]})
    assert export(peer.folder, tmp_path / "old", 2).other_rounds == {2: 1, 3: 1}
    assert_same(tmp_path / "old", models[2], {2: models[1], 3: models[1]})


def test_slots_that_are_there_in_their_kept_form_alone_are_exported_rounded_and_named(tmp_path, peer):
    exact = peer.publish(1)
    rounded = peer.round_off(2, 1)
    exported = export(peer.folder, tmp_path / "new")
    assert exported.kept == (2,) and not exported.other_rounds
    assert "slots 2 from their kept form, bf16" in str(exported)
    assert "slots 2 rounded to bf16" in (tmp_path / "new" / "README.md").read_text()
    assert_same(tmp_path / "new", exact, {2: rounded})
    (file,) = (peer.folder / "versions").glob("kept-slot-2.*.bin")
    file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(DataError, match=r"is damaged: it does not hold kept-slot-2 of round 1"):
        export(peer.folder, tmp_path / "damaged")


def test_a_slot_that_a_monitor_has_of_a_later_round_is_the_one_of_its_own_model_unless_the_rounds_is_there(
    tmp_path, peer
):
    """A monitor takes slots of the next round, where their holders are faster than it."""
    models = {round: peer.publish(round) for round in (1, 2)}
    models[3] = peer.publish(3, [3], shared=False)
    assert not export(peer.folder, tmp_path / "exact").other_rounds
    assert_same(tmp_path / "exact", models[2])
    models[4] = peer.publish(4, [3], shared=False)
    assert export(peer.folder, tmp_path / "later").other_rounds == {3: 4}
    assert_same(tmp_path / "later", models[2], {3: models[4]})


def test_what_a_folder_lacks_is_named_with_the_remedy(tmp_path, peer, capsys):
    config = ExportConfig(source=str(peer.folder), output=tmp_path / "model")
    with pytest.raises(DataError, match="holds no model yet"):
        main(config)
    peer.save(1, [0, 2])
    with pytest.raises(DataError, match=r"no version of slots 1,3 at all; export another peer's folder, .*--run-id"):
        main(config)
    peer.save(2)
    with pytest.raises(DataError, match=r"does not keep round 7, but 1, 2; set --round"):
        main(config.model_copy(update={"round": 7}))
    with pytest.raises(DataError, match="is no folder of a peer or a monitor"):
        main(config.model_copy(update={"source": str(tmp_path)}))
    with pytest.raises(ConfigError, match="the link to run 'my-run' is damaged"):
        main(config.model_copy(update={"source": "spes:my-run." + "x" * 300}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peer"] and main(config) == 0
    assert f"wrote {tmp_path / 'model'}: round 2 of run 'run'" in capsys.readouterr().out


def test_a_damaged_file_is_never_exported_and_leaves_nothing_half_written(tmp_path, peer):
    model, newer = peer.save(1), peer.save(2)
    newest = peer.store.newest()
    saved = peer.folder / "checkpoint" / "round-2-step-20" / peer.store.path(newest["slot-3"]).name
    copy = saved.read_bytes()
    saved.unlink()
    saved.write_bytes(copy)  # a file of its own, as on a disk without links
    with peer.store.path(newest["slot-3"]).open("r+b") as file:
        file.write(b"torn")
    export(peer.folder, tmp_path / "whole")
    assert_same(tmp_path / "whole", newer)
    saved.write_bytes(copy[:-4])
    with pytest.raises(DataError, match=r"slot-3.* is damaged: .* round 2; set --round to another"):
        export(peer.folder, tmp_path / "torn")
    export(peer.folder, tmp_path / "before", 1)
    assert_same(tmp_path / "before", model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "peer", "whole"]


def test_a_damaged_checkpoint_leaves_the_versions_and_without_these_the_checkpoints_are_left(tmp_path, peer):
    models = {round: peer.save(round) for round in (1, 2)}
    (peer.folder / "checkpoint" / "round-2-step-20" / "state.json").write_text("{}")
    export(peer.folder, tmp_path / "by-versions")
    assert_same(tmp_path / "by-versions", models[2])
    shutil.rmtree(peer.folder / "versions")
    assert export(peer.folder, tmp_path / "by-checkpoint").round == 1
    assert_same(tmp_path / "by-checkpoint", models[1])


def test_a_peer_that_goes_on_meanwhile_disturbs_nothing(tmp_path, peer, monkeypatch):
    """It deletes the round's files, once before they are opened and once after."""
    models = {round: peer.save(round) for round in (1, 2)}
    read, laid_out = model_folder._open_all, model_folder.outline
    rounds = iter(range(3, 20))

    def go_on() -> None:
        for _ in range(3):
            models[number] = peer.save(number := next(rounds))

    def opening(*arguments):
        monkeypatch.setattr(model_folder, "_open_all", read)
        go_on()
        return read(*arguments)

    def opened(*arguments):
        go_on()
        return laid_out(*arguments)

    monkeypatch.setattr(model_folder, "_open_all", opening)
    monkeypatch.setattr(model_folder, "outline", opened)
    exported = export(peer.folder, tmp_path / "model")
    assert exported.round == 5
    assert_same(tmp_path / "model", models[5])


def test_an_output_that_holds_something_is_replaced_only_if_asked_and_only_if_it_is_a_checkpoint(tmp_path, peer):
    models = {round: peer.save(round) for round in (1, 2)}
    output = tmp_path / "model"
    export(peer.folder, output, 1)
    with pytest.raises(ConfigError, match="--overwrite"):
        export(peer.folder, output)
    with pytest.raises(DataError, match="does not keep round 9"):
        export(peer.folder, output, 9)
    assert_same(output, models[1])
    export(peer.folder, output, overwrite=True)
    assert_same(output, models[2])
    for other in (peer.folder, tmp_path):
        before = files_of(other)
        with pytest.raises(ConfigError, match="is no checkpoint"):
            export(peer.folder, other, overwrite=True)
        assert files_of(other) == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"file"):
        export(peer.folder, tmp_path / "file" / "below", overwrite=True)


def test_a_version_whose_file_is_gone_is_no_version_and_the_next_best_is_taken(tmp_path, peer):
    """As in a folder that was copied while its peer ran."""
    peer.save(1)
    models = {2: peer.save(2)}
    export(peer.folder, tmp_path / "whole", 2)
    assert_same(tmp_path / "whole", models[2])
    (slot,) = {each.file for each in [ModelFolder(peer.folder).choose(2)[1]["slot-1"]]}
    for copy in peer.folder.rglob(slot.name):
        copy.unlink()
    exported = export(peer.folder, tmp_path / "partly", 2)
    assert set(exported.other_rounds) == {1}, "the slot's version of the round before"


def free_descriptors() -> list[int]:
    return sorted(set(range(1000)) - set(map(int, os.listdir("/proc/self/fd"))))


@pytest.mark.parametrize(
    ("limit", "value", "error", "said"),
    [
        (resource.RLIMIT_FSIZE, lambda: 20_000, ConfigError, "cannot write --output .*; make room there"),
        (resource.RLIMIT_NOFILE, lambda: free_descriptors()[3], DataError, "ulimit -n"),
    ],
    ids=["full-disk", "too-many-files"],
)
def test_what_the_system_refuses_is_one_line_and_leaves_nothing(tmp_path, peer, limit, value, error, said):
    peer.save(1)
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (value(), before[1]))
    try:
        with pytest.raises(error, match=said):
            export(peer.folder, tmp_path / "model")
    finally:
        resource.setrlimit(limit, before)
    assert [path.name for path in tmp_path.iterdir()] == ["peer"]
    export(peer.folder, tmp_path / "model")


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": "run"},
        {"initial_peers": ["/ip4/127.0.0.1/tcp/1/p2p/QmX"]},
        {"source": "x", "run_id": "run", "initial_peers": ["a"]},
        {"source": "x", "initial_peers": ["a"]},
        {"run_id": "run", "initial_peers": ["a"]},
        {"source": "spes:run.damaged", "output": Path("x")},
        {"source": JoinLink(run_id="run", founder=peer_id(0), addresses=["/ip4/127.0.0.1/tcp/1"]).encode()},
        {"run_id": "run", "initial_peers": ["a"], "output": Path("x"), "round": 3},
        {},
    ],
)
def test_flags_that_contradict_each_other_are_refused_before_anything_happens(changes):
    with pytest.raises(ConfigError, match=r"name what to export|--output|--round 3|copy the whole word"):
        main(ExportConfig(**changes))


def write_certificates(peer: PeerFolder, tokens: tuple[int, ...]) -> None:
    """Leave a certificate of round 1, and the first half of another's line, in a folder."""
    members = tuple(MemberEntry(peer_id=peer_id(number), tokens=each) for number, each in enumerate(tokens, 1))
    body = last_body([peer_id(1)], round=1).model_copy(update={"members": members})
    line = Link(certificate=Certificate(body=body, attempt=0, signatures={})).model_dump_json().encode() + b"\n"
    (peer.folder / FOLDER).mkdir()
    (peer.folder / FOLDER / CERTIFICATES).write_bytes(line + line[:100])


def test_the_card_says_what_the_folder_knows_and_quotes_what_strangers_chose(tmp_path, identity):
    data = DataConfig(source="hub", name="owner/name", tokenizer="x` <img> [won](http://x) `", sequence_length=SEQUENCE)
    peer = PeerFolder(tmp_path / "peer", identity, data)
    for round in range(1, 4):
        peer.save(round)
    write_certificates(peer, tokens=(100, 0))
    export(peer.folder, tmp_path / "peers")
    card = (tmp_path / "peers" / "README.md").read_text()
    for fact in (
        "Run: `run`",
        f"Founder: `{identity.peer_id}`",
        f"Round: 3 of {peer.run.round.total}",
        "3,702 by the one peer",
        "not known",
    ):
        assert fact in card, fact
    contributors = card.split("## Contributors")[1]
    assert f"- `{peer_id(1)}`: 100\n" in contributors and "certificates of rounds 1 to 1" in contributors
    assert peer_id(2) not in contributors, "who trained nothing is none"
    assert "that no public test shows" in card.split("## Limits of trust")[1].split("## Contributors")[0]
    assert "`owner/name`" in card and "`x  <img> [won](http://x)  `" in card, "shown as code from its start to its end"
    views = small_history()
    sinks = Sinks(views[0])
    facts = {"num_slots": 8, "total_rounds": 20}
    sinks.add(METRICS_FILE, lambda: JsonlSink(peer.folder / METRICS_FILE, facts, views[0].now))
    for view in [*views, views[-1].evaluated(2, 3.25)]:
        sinks.update(view)
    sinks.close()
    export(peer.folder, tmp_path / "monitors", held_out=2.5)
    card = (tmp_path / "monitors" / "README.md").read_text()
    assert (
        "Tokens: 6,000," in card and "Held-out loss: 2.5000" in card and "Training loss in this round: 4.3000" in card
    )
    assert f"- `{peer_id(1)}`: 100\n" in card and f"- `{peer_id(0)}`" not in card, "what a peer reports is no credit"
    export(peer.folder, tmp_path / "before", 2)
    card = (tmp_path / "before" / "README.md").read_text()
    assert "Held-out loss: 3.2500" in card and "Tokens: 4,000," in card
    (peer.folder / "metrics.jsonl").write_text("nonsense\n")
    export(peer.folder, tmp_path / "without")
    assert "3,702 by the one peer" in (tmp_path / "without" / "README.md").read_text()


PEAK = """
import sys
from pathlib import Path
from spes_p2p.monitor.model_folder import export

def kilobytes(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])

small, large, output = map(Path, sys.argv[1:])
export(small, output / "small")  # what a first use allocates
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = kilobytes("VmRSS")
export(large, output / "large")
print(1024 * (kilobytes("VmHWM") - before))
"""


@pytest.mark.full  # fifteen seconds for a large folder; a test above compares what is written slot by slot
def test_memory_holds_a_few_slots_and_never_the_model(tmp_path, identity, record_property):
    """Measured in a process of its own, as the peak beyond what it had before."""
    slots = 64
    large = PeerFolder(
        tmp_path / "peer", identity, shape={"hidden_size": 256, "intermediate_size": 512, "num_experts": slots}
    )
    large.publish(1, range(slots))
    small = PeerFolder(tmp_path / "other", identity)
    small.publish(1)
    words = [sys.executable, "-c", PEAK, small.folder, large.folder, tmp_path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    taken = int(done.stdout.splitlines()[-1])
    written = json.loads((tmp_path / "large" / "model.safetensors.index.json").read_text())
    whole = written["metadata"]["total_size"]
    assert whole == 4 * (large.shared.numel + slots * large.slot.numel) and len(set(written["weight_map"].values())) > 4
    record_property("ratio", taken / whole)
    print(f"{taken / 1e6:.0f} MB of {whole / 1e6:.0f} MB: {taken / whole:.2f}")
    assert 0 < taken < 0.3 * whole


def test_a_manifest_of_a_newer_version_is_one_line(tmp_path, peer):
    peer.save(1)
    data = json.dumps({"run_id": "run", "something": "new"}).encode()
    peer.add(1, {"manifest": data})
    with pytest.raises(JoinError, match="update spes_p2p"):
        export(peer.folder, tmp_path / "model")
