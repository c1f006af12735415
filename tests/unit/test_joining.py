"""What a peer decides before it takes part."""

import socket
from dataclasses import replace

import pytest
import torch

from spes_p2p.cli import load_settings
from spes_p2p.commands import cluster
from spes_p2p.config import CodecConfig, ModelConfig, OuterConfig, PeerConfig, RunConfig
from spes_p2p.config.commands import ClusterConfig
from spes_p2p.errors import ConfigError
from spes_p2p.peer import joining
from spes_p2p.peer.joining import ADDRESS_FILE, listen_port
from spes_p2p.peer.life import _to_resume
from spes_p2p.peer.settings import _link_rounds, _on_files, _suited, check_choices, for_link
from spes_p2p.planner.memory import Setup, peer_bytes, peer_memory
from spes_p2p.planner.size import free_gpu_bytes, model_size
from spes_p2p.swarm.records import MAX_CLAIMED

RUN = RunConfig(model=ModelConfig(num_experts=200))
SIZE = model_size(RUN.model, 4096)


def chosen(slots: int | str) -> PeerConfig:
    return PeerConfig(run_id="r", max_slots=slots)  # type: ignore[call-arg, arg-type]


def setup_of(config: PeerConfig) -> Setup:
    return Setup.of(RUN, config, 4096, num_ranks=1, on_gpu=False)


def test_a_chosen_number_of_slots_that_does_not_fit_is_refused_and_those_that_fit_are_told(monkeypatch):
    setup = setup_of(chosen(4))
    monkeypatch.setattr(joining, "free_memory_bytes", lambda: peer_bytes(SIZE, 60, setup))
    assert joining._max_slots(chosen(60), SIZE, setup) == 60
    assert joining._max_slots(chosen("auto"), SIZE, setup) == 60
    with pytest.raises(ConfigError, match=r"max_slots=61: training 61 slots needs .*; claim at most 60"):
        joining._max_slots(chosen(61), SIZE, setup)


def test_of_a_peer_that_trains_on_a_gpu_both_the_gpus_and_the_hosts_share_must_fit(monkeypatch):
    setup = replace(setup_of(chosen(4)), on_gpu=True)
    of_60, of_30 = peer_memory(SIZE, 60, setup), peer_memory(SIZE, 30, setup)
    monkeypatch.setattr(joining, "free_memory_bytes", lambda: of_60.host_bytes)
    monkeypatch.setattr(joining, "free_gpu_bytes", lambda: None)
    assert joining._max_slots(chosen(60), SIZE, setup) == joining._max_slots(chosen("auto"), SIZE, setup) == 60
    with pytest.raises(ConfigError, match=r"max_slots=100: .* on the host"):
        joining._max_slots(chosen(100), SIZE, setup)
    monkeypatch.setattr(joining, "free_gpu_bytes", lambda: of_30.device_bytes)
    assert joining._max_slots(chosen("auto"), SIZE, setup) == 30
    with pytest.raises(ConfigError, match=r"max_slots=31: .*claim at most 30"):
        joining._max_slots(chosen(31), SIZE, setup)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_has_no_gpu_memory():
    assert free_gpu_bytes() is None


def test_no_peer_has_more_slots_than_a_claim_can_hold(monkeypatch):
    monkeypatch.setattr(joining, "free_memory_bytes", lambda: 2**50)
    assert joining._max_slots(chosen("auto"), SIZE, setup_of(chosen("auto"))) == MAX_CLAIMED
    with pytest.raises(ConfigError, match="max_slots=150 exceeds the 128 slots that a claim can hold"):
        check_choices(chosen(150), RUN)


@pytest.mark.parametrize(
    ("words", "num_tokens", "rate", "batch", "tokens"),
    [
        ([], (40_000, 5000), 4e-5, 8, 5000),
        (["--run.adapter.rank", "4"], (40_000, 5000), 4e-4, 8, 5000),
        (["--run.train.lr", "2e-3", "--run.round.total", "3"], (8192, 5000), 2e-3, 4, 5000),
        (["--run.train.batch-size", "16", "--run.round.tokens", "777"], (8192, 5000), 4e-5, 16, 777),
        (["--run.round.samples", "20"], (8192, 5000), 4e-5, 4, 98_304),
        ([], (100, 10), 4e-5, 1, 1024),
        ([], (10**10, 10**9), 4e-5, 8, 98_304),
        ([], None, 4e-5, 8, 98_304),
    ],
)
def test_what_a_founder_leaves_open_suits_a_trained_model_and_few_conversations(words, num_tokens, rate, batch, tokens):
    chosen = load_settings(PeerConfig, ["--run-id", "r", *words]).run or RunConfig()
    run = chosen.model_copy(update={"model": ModelConfig(hidden_size=1024, num_heads=16)})
    suited = _suited(run, num_tokens)
    assert suited.train.lr == pytest.approx(rate) and suited.train.batch_size == batch
    assert suited.round.tokens == tokens and suited.round.samples == run.round.samples
    assert suited.round.total == run.round.total


@pytest.mark.parametrize("flag", ["--text", "--data"])
@pytest.mark.parametrize(
    ("settings", "source"), [("{vocab_size: 512}", "files"), ("{source: embedded}", "embedded"), ("", "files")]
)
def test_files_of_the_founders_mean_a_run_on_files_unless_it_chooses_otherwise(flag, settings, source, tmp_path):
    (tmp_path / "run.yaml").write_text(f"run: {{data: {settings or '{}'}}}\n")
    words = ["--run-id", "r", "--config", str(tmp_path / "run.yaml"), flag, "mine"]
    peer = load_settings(PeerConfig, words)
    node = cluster.as_peer(load_settings(ClusterConfig, [*words, "--shared", str(tmp_path)]), tmp_path / "node")
    for config in (peer, node):
        assert config.run is not None and _on_files(config, config.run).data.source == source


def test_a_job_that_its_cluster_starts_again_overwrites_nothing(tmp_path, monkeypatch):
    """It is started with the same words: each time it deleted what it had trained."""
    words = ["--run-id", "r", "--overwrite", "--shared", str(tmp_path)]
    (tmp_path / "node" / "checkpoint").mkdir(parents=True)
    config = load_settings(ClusterConfig, words)
    first = cluster.as_peer(config, tmp_path / "node")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    again = cluster.as_peer(config, tmp_path / "node")
    assert (first.resume, first.overwrite, again.resume, again.overwrite) == (False, True, True, False)


def test_a_resumed_peer_listens_on_the_port_of_its_last_start_if_it_is_free(tmp_path, caplog):
    def port(*words: str, host: str = "127.0.0.1") -> int:
        settings = ["--run-id", "r", "--output", str(tmp_path), *words]
        return listen_port(load_settings(PeerConfig, settings), host, "QmPeer")

    assert port("--resume") == 0, "it has none"
    with socket.create_server(("127.0.0.1", 0)) as other:
        earlier = other.getsockname()[1]
        (tmp_path / ADDRESS_FILE).write_text(f"/ip4/203.0.113.7/tcp/{earlier}/p2p/QmPeer\n")
        assert port("--resume") == 0, "another program has it"
    assert f"port {earlier}" in caplog.text and port("--resume") == port("--resume", host="*") == earlier
    assert (port(), port("--resume", "--port", "4001")) == (0, 4001)
    assert port("--resume", "--announce", "/ip4/203.0.113.7/tcp/4001") == 0, "the router's port may be another one"
    other_peers = f"/ip4/203.0.113.7/tcp/{earlier}/p2p/QmOther"
    for unusable in ("", other_peers, "/ip4/203.0.113.7/tcp/99999/p2p/QmPeer"):
        (tmp_path / ADDRESS_FILE).write_text(unusable)
        assert port("--resume") == 0


@pytest.mark.parametrize(
    ("words", "least", "said"),
    [
        (["--uplink-mbit", "100"], 1900, "the first 15 rounds are shorter"),
        ([], 5, "--uplink-mbit makes rounds long enough"),
        (["--host", "127.0.0.1"], 5, ""),
        (["--uplink-mbit", "100"], 1900, "full rounds train for 19"),
        (["--uplink-mbit", "20", "--run.round.min-seconds", "9"], 9, ""),
        (["--uplink-mbit", "100000"], 5, ""),
    ],
)
def test_a_founders_uplink_decides_how_long_rounds_are(words, least, said, caplog):
    caplog.set_level("INFO")
    config = load_settings(PeerConfig, ["--run-id", "r", "--config", "configs/home_1b.yaml", *words])
    assert config.run is not None
    rounds = for_link(config, config.run, config.run.data.vocab_size).round
    assert least <= rounds.min_seconds < 1.25 * least and (said in caplog.text if said else not caplog.text)


@pytest.mark.parametrize(
    ("words", "codecs", "moments"),
    [
        (["--uplink-mbit", "5"], ("int4", "int4"), "local"),
        (["--uplink-mbit", "5", "--run.codecs.shared", "int8"], ("int8", "int4"), "local"),
        (["--uplink-mbit", "5", "--run.outer.moments", "second"], ("int4", "int4"), "second"),
        (["--uplink-mbit", "5", "--run.train.optimizer", "muon"], ("int4", "int4"), "both"),
        (["--uplink-mbit", "5", "--run.round.min-seconds", "9"], ("fp32", "fp32"), "both"),
        (["--uplink-mbit", "100000"], ("fp32", "fp32"), "both"),
        (["--uplink-mbit", "5", "--from", "model"], ("fp32", "fp32"), "both"),
        ([], ("fp32", "fp32"), "both"),
    ],
    ids=["slow", "bits chosen", "moments chosen", "muon", "rounds chosen", "fast", "trained", "not told"],
)
def test_peers_with_a_slow_uplink_send_little_unless_their_founder_chooses_otherwise(words, codecs, moments, caplog):
    caplog.set_level("INFO")
    config = load_settings(PeerConfig, ["--run-id", "r", *words])
    before = config.run or RunConfig()
    run = for_link(config, before, 4096)
    assert (run.codecs.shared, run.codecs.slots, run.outer.moments) == (*codecs, moments)
    is_lean = "int4" in codecs
    assert ("for short rounds at this uplink" in caplog.text) == is_lean
    if is_lean:
        link_alone = run.model_copy(update={"codecs": CodecConfig(), "outer": OuterConfig(), "round": before.round})
        longer, _ = _link_rounds(config, link_alone, 4096)
        assert 5 < run.round.min_seconds < longer.min_seconds / 2


@pytest.mark.parametrize(
    ("words", "waits_for"),
    [
        (["--resume", "--alone"], 1),
        (["--resume", "--alone", "--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/QmX"], 1),
        (["--resume"], 3),
        (["--alone"], 3),
        (["--resume", "--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/QmX"], 3),
    ],
)
def test_a_peer_that_resumes_alone_waits_for_no_other(words, waits_for):
    """It waited for `round.min_peers` for ever. A run's start, and a peer that others are to join again, wait."""
    run = RUN.model_copy(update={"round": RUN.round.model_copy(update={"min_peers": 3})})
    config = load_settings(PeerConfig, ["--run-id", "r", *words])
    assert _to_resume(config, run, None) == run.model_copy(
        update={"round": run.round.model_copy(update={"min_peers": waits_for})}
    )
