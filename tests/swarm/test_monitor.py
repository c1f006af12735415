"""A monitor among real peers on loopback: what it takes home is what they published."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from peer_processes import commands_in
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from spes_p2p.codecs.vectors import Layout, digest
from spes_p2p.commands.monitor import MonitorConfig, main
from spes_p2p.config import DataConfig, ModelConfig, OuterConfig, RoundConfig, RunConfig
from spes_p2p.data.packing import held_out_batches
from spes_p2p.data.tokenizer import tokenizer_bytes, train_bpe
from spes_p2p.errors import ConfigError, JoinError
from spes_p2p.model.build import build_slot_model, stock_model
from spes_p2p.monitor.uploads import INFO_FILE, SUMS_FILE, Store
from spes_p2p.peer.restart import LEAST_SECONDS
from spes_p2p.swarm.averaging.encoding import Vectors
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.exchange.versions import MANIFEST, TOKENIZER
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.manifest import Manifest, declare_manifest
from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.node import Node
from spes_p2p.swarm.part import Outcome, Part
from spes_p2p.swarm.records import Claim, Metrics, Progress
from spes_p2p.swarm.roster import Member, Roster
from tests.unit.monitor.swarms import report

NUM_SLOTS, SEQUENCE = 3, 16


def run_config(total: int) -> RunConfig:
    shape = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 8}
    return RunConfig(
        model=ModelConfig(**shape, num_experts=NUM_SLOTS, top_k=2),
        data=DataConfig(source="files", sequence_length=SEQUENCE, vocab_size=300, held_out_fraction=0.4),
        outer=OuterConfig(optimizer="nesterov"),
        round=RoundConfig(total=total, lease_seconds=3.0, heartbeat_seconds=1.0, exchange_seconds=20.0),
        frozen_storage="fp32",  # these peers publish no kept forms; `test_peer_export` has some that do
    )


class Peer:
    """Publishes a given model as this round's versions, momentum after the weights, and says so in records."""

    def __init__(self, directory: Path, manifest: Manifest, initial_peers: list[str]) -> None:
        run = manifest.config
        self.node = Node(Identity(directory / "identity"), "watched", initial_peers=initial_peers)
        self.swarm = HivemindSwarm(self.node, directory / "versions")
        slot_model = build_slot_model(
            run.model, vocab_size=manifest.vocab_size, sequence_length=SEQUENCE, seed=0, claimed=(), storage="fp32"
        )
        self.shared, self.slot = Layout(slot_model.shared_shapes()), Layout(slot_model.slot_shapes())
        numels = {"shared": 2 * self.shared.numel, "slot": 2 * self.slot.numel}
        self.swarm.enter(run.round, Vectors(numels), manifest.genesis(), max_slots=0, is_new=True)

    def publish(self, round: int, model: PreTrainedModel, slots: list[int]) -> None:
        state = model.state_dict()
        flats = {"shared": self.shared.flatten({name: state[name] for name in self.shared.shapes})}
        for slot in slots:
            flats[f"slot-{slot}"] = self.slot.flatten({name: state[name][slot] for name in self.slot.shapes})
        self.swarm.publish(round, {name: torch.cat([flat, torch.ones_like(flat)]) for name, flat in flats.items()})

    def certify(self, round: int, others: Sequence[Peer] = ()) -> None:
        """As the only voter, certify what this peer and others publish of a round."""
        found = {
            peer: _digests_of(peer, round) for peer in sorted((*others, self), key=lambda peer: peer.swarm.peer_id)
        }
        ids, last, ends_at = [peer.swarm.peer_id for peer in found], self.swarm.last(), self.swarm.now() + 1.0

        def confirm(peer: Peer) -> Body | None:
            async def average(roster: Roster, attempt: int) -> Outcome:
                return Outcome(found[peer], ends_at)

            member = Member(
                peer_id=peer.swarm.peer_id,
                round=last.round,
                previous=last.digest,
                tokens=1,
                slots=tuple(sorted(name.slot for name in found[peer] if name.slot is not None)),
                tokens_per_second=1.0,
                ready_at=self.swarm.now(),
                sync_seconds=0.0,
            )
            return peer.swarm.consensus.settle(Part(member, average, lambda: ids, 0.0), on_wait=lambda: False)

        for peer in others:  # they wait for the certificate until they are closed
            threading.Thread(target=confirm, args=(peer,), daemon=True).start()
        body = confirm(self)
        assert body is not None and body.round == round

    def declare(self, round: int, slots: list[int]) -> None:
        me, last = self.swarm.peer_id, self.swarm.last()
        certificate = last.digest if last.round == round > 0 else ""
        self.swarm.announce(Claim(peer_id=me, state="active", slots=tuple(slots), max_slots=3, since=1.0))
        self.swarm.announce(Progress(peer_id=me, round=round, ends_at=0.0, certificate=certificate))
        if round:
            fields = report(0, round, slots=tuple(slots)).model_dump() | {"peer_id": me, "slots": tuple(slots)}
            self.swarm.report(Metrics(**fields))


def _digests_of(peer: Peer, round: int) -> dict[VectorName, str]:
    """Return the digests of a peer's versions of a round."""
    mine = peer.swarm.versions().items()
    return {VectorName(name): version.digest for name, version in mine if version.round == round}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    lines = (f'{{"text": "{number} plus {number} is {2 * number}, as everybody knows"}}' for number in range(200))
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(lines))
    return path


@contextlib.contextmanager
def swarm_of(tmp_path: Path, num_peers: int, total: int) -> Iterator[tuple[list[Peer], Manifest, object]]:
    tokenizer = train_bpe([f"{number} plus {number} is known" for number in range(50)], 300)
    document = tokenizer_bytes(tokenizer)
    founder = Identity(tmp_path / "peer-0" / "identity")
    manifest = Manifest(
        run_id="watched",
        founder=founder.peer_id,
        software="test",
        config=run_config(total),
        vocab_size=len(tokenizer),
        tokenizer_digest=digest(document),
        tokenizer_bytes=len(document),
    ).sign(founder)
    peers: list[Peer] = []
    try:
        for index in range(num_peers):
            first = peers[0].node.addresses() if peers else []
            peers.append(Peer(tmp_path / f"peer-{index}", manifest, first))
        peers[0].swarm.keep_document(MANIFEST, manifest.encode(), manifest.founded_at)
        peers[0].swarm.keep_document(TOKENIZER, document)
        declare_manifest(peers[0].swarm, manifest)
        yield peers, manifest, tokenizer
    finally:
        for peer in peers:
            peer.swarm.close()


def settings(tmp_path: Path, peers: list[Peer], **changes) -> MonitorConfig:
    fields = {
        "held_out_sequences": 8,
        "poll_seconds": 0.2,
        "console": "plain",
        "cache": tmp_path / "cache",
        "threads": 1,
    }
    fields |= {"output": tmp_path / "out", **changes}
    return MonitorConfig(run_id="watched", initial_peers=peers[0].node.addresses()[:1], **fields)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def events(output: Path, kind: str) -> list[dict]:
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [event for line in lines if line.endswith("\n") and (event := json.loads(line))["kind"] == kind]


def reference_loss(model: PreTrainedModel, config: MonitorConfig, run: RunConfig, tokenizer) -> float:
    """Held-out loss by transformers' own labels."""
    batches = held_out_batches(
        run.data, tokenizer, paths=config.text, cache=config.cache, num_sequences=8, batch_size=8, seed=run.seed
    )
    (batch,) = batches
    with torch.no_grad():
        # Labels are shifted inside; the last input has no target, so the mean is over the same tokens.
        return model.eval()(input_ids=batch, labels=batch, use_cache=False).loss.item()


def test_the_checkpoint_is_the_published_model_and_stock_transformers_loads_it(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with swarm_of(tmp_path, num_peers=2, total=1) as (peers, manifest, tokenizer):
        run = manifest.config
        start, trained = (stock_model(run.model, manifest.vocab_size, SEQUENCE, seed) for seed in (run.seed, 78))
        peers[0].publish(1, trained, [0, 1])
        peers[1].publish(1, trained, [1])
        peers[1].publish(0, trained, [2])  # an orphan: nobody holds it, somebody still has its last version
        peers[1].publish(1, trained, [])
        peers[0].certify(1, peers[1:])
        peers[0].declare(1, [0, 1])
        peers[1].declare(1, [1])
        config = settings(tmp_path, peers, text=[text], upload=str(tmp_path / "store"))
        assert main(config) == 0
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
        for name, weight in trained.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], weight), name
        words = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
        assert words.decode(words("7 plus 7")["input_ids"]) == "7 plus 7"
        measured = {event["round"]: event["loss"] for event in events(config.output, "evaluation")}
        assert measured[0] == pytest.approx(reference_loss(start, config, run, tokenizer), abs=1e-4)
        assert measured[1] == pytest.approx(reference_loss(trained, config, run, tokenizer), abs=1e-4)
    Store(str(tmp_path / "store")).download(None, tmp_path / "back")
    names = {path.name for path in (tmp_path / "out" / "model").iterdir()}
    assert {path.name for path in (tmp_path / "back").iterdir()} == {*names, INFO_FILE, SUMS_FILE}
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "out" / "model" / name).read_bytes()
    samples = {event["round"]: event for event in events(config.output, "sample")}
    assert samples.keys() == {0, 1} and samples[0]["prompt"] == samples[1]["prompt"]
    assert samples[1]["text"] not in ("", samples[0]["text"]), "two models"
    assert {event["peer_id"] for event in events(config.output, "report")} == {p.swarm.peer_id for p in peers}
    (of_round,) = events(config.output, "round")
    assert (of_round["tokens"], of_round["num_peers"], of_round["loss"]) == (2, 2, 4.0), "each reports 1000 tokens"
    assert "finished" in (config.output / "report.html").read_text()
    printed = capsys.readouterr().out
    assert "round 1/1  2 peers" in printed
    assert printed.count(f"{measured[1]:.4f}") == 1, "an evaluation is printed once"


@pytest.mark.full
def test_when_all_peers_vanish_the_last_pulled_round_is_saved(tmp_path: Path, text: Path) -> None:
    with swarm_of(tmp_path, num_peers=1, total=5) as (peers, manifest, _), ThreadPoolExecutor(1) as pool:
        trained = stock_model(manifest.config.model, manifest.vocab_size, SEQUENCE, 78)
        peers[0].publish(1, trained, [0, 1, 2])
        peers[0].certify(1)
        peers[0].declare(1, [0, 1, 2])
        config = settings(tmp_path, peers, text=[text])
        watching = pool.submit(main, config)
        wait_until(lambda: watching.done() or any(e["round"] == 1 for e in events(config.output, "evaluation")))
        peers[0].swarm.close()
        assert watching.result(90) == 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert torch.equal(loaded.state_dict()["lm_head.weight"], trained.state_dict()["lm_head.weight"])
    assert "all peers are gone" in (config.output / "report.html").read_text()
    assert any(event["change"] == "left" for event in events(config.output, "membership"))


@pytest.mark.full
def test_a_monitor_whose_p2pd_dies_starts_itself_anew_and_sees_the_run_to_its_end(tmp_path: Path, text: Path) -> None:
    """Its peers are in good health all the while, and the round that it missed is one of theirs."""
    output = tmp_path / "out"
    with swarm_of(tmp_path, num_peers=1, total=2) as ((peer,), manifest, _), commands_in(tmp_path) as commands:
        models = [stock_model(manifest.config.model, manifest.vocab_size, SEQUENCE, seed) for seed in (78, 79)]
        peer.publish(1, models[0], [0, 1, 2])
        peer.certify(1)
        peer.declare(1, [0, 1, 2])
        words = ["--run-id", "watched", "--initial-peers", peer.node.addresses()[0], "--output", output, "--text", text]
        words += ["--held-out-sequences", "8", "--console", "none", "--cache", tmp_path / "cache", "--threads", "1"]
        monitor = commands.start("monitor/run_monitor.py", *words)
        wait_until(lambda: monitor.process.poll() is not None or bool(events(output, "run")), 120.0)
        threading.Event().wait(LEAST_SECONDS)
        wait_until(lambda: any(event["round"] == 1 for event in events(output, "evaluation")))
        (p2pd,) = (p for p in psutil.Process(monitor.pid).children(recursive=True) if p.name() == "p2pd")
        p2pd.kill()
        monitor.wait_for("p2pd.* has died.*starting again")
        peer.publish(2, models[1], [0, 1, 2])
        peer.certify(2)
        peer.declare(2, [0, 1, 2])
        assert monitor.end() == 0, monitor.tail()
        commands.wait_until_gone()
    loaded = AutoModelForCausalLM.from_pretrained(output / "model")
    assert torch.equal(loaded.state_dict()["lm_head.weight"], models[1].state_dict()["lm_head.weight"])
    assert {1, 2} <= {event["round"] for event in events(output, "evaluation")}
    assert not monitor.faults("Traceback|all peers are gone")


def test_a_monitor_that_cannot_watch_says_why(tmp_path: Path) -> None:
    with swarm_of(tmp_path, num_peers=1, total=1) as (peers, _, _), pytest.raises(ConfigError, match="--text"):
        main(settings(tmp_path, peers))
    with pytest.raises(JoinError, match="no answer"):
        address = "/ip4/127.0.0.1/tcp/9/p2p/QmQ2rWrZ2XfZ9Dzsr3HwFvfTyjBpAXnZ8LV1GNGi1aSUuM"
        main(MonitorConfig(run_id="watched", initial_peers=[address], output=tmp_path / "nowhere"))
