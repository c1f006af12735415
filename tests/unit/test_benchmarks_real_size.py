"""The benchmark of peers of real size: what it measures is there, and what it starts is a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.large_peers import Peer, _proportional_bytes
from benchmarks.real_size import REAL_VOCABULARY, _half_settings, _settings
from spes_p2p.cli import load_settings
from spes_p2p.config import PeerConfig
from spes_p2p.data.tokenizer import resolve_tokenizer
from spes_p2p.planner.size import model_size

HOLD = "import time; held = bytearray(b'x' * 2**26); print('held', flush=True); time.sleep(60)"


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of a process's memory")
def test_a_peer_takes_what_all_its_processes_take(tmp_path: Path) -> None:
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}])"
    process = subprocess.Popen([sys.executable, "-c", nested], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    peer = Peer(tmp_path / "peer", tmp_path / "peer.log", process)  # type: ignore[arg-type]
    peer.log.write_text("round 1: 2 peers, loss 9.0\nround 2: 2 peers, loss 8.9\n")
    child = psutil.Process(process.pid).children()[0]
    try:
        peer.look()
        assert _proportional_bytes(child) >= 2**26 and peer.peak_bytes > 2**26 and peer.rounds == 2
    finally:
        peer.end()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_its_peers_train_the_shape_that_it_names(tmp_path: Path) -> None:
    path = _settings(tmp_path, min_peers=2, rounds=5)
    config = load_settings(
        PeerConfig, ["--config", str(path), "--run-id", "real-size", "--output", str(tmp_path / "peer")]
    )
    assert config.run is not None and config.run.model.num_experts == 16 and config.run.round.total == 5
    assert (config.max_slots, config.storage, config.inner_optimizer) == (4, "int8", "adamw8bit")


def test_half_of_7b_has_a_tokenizer_as_large_as_its_model(tmp_path: Path) -> None:
    path = _half_settings(tmp_path)
    config = load_settings(PeerConfig, ["--config", str(path), "--run-id", "half", "--output", str(tmp_path / "peer")])
    assert config.run is not None
    tokenizer = resolve_tokenizer(config.run.data, [], tmp_path)
    size = model_size(config.run.model, len(tokenizer))
    assert len(tokenizer) == REAL_VOCABULARY and 3.9e9 < size.total_params < 4.1e9
