"""What the leader knows or fails at, every rank learns; one process alone needs no group at all."""

from __future__ import annotations

import datetime
import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from spes_p2p.errors import ConfigError, ExchangeError, JoinError
from spes_p2p.swarm.names import VectorName
from spes_p2p.training import process_group
from spes_p2p.training.process_group import ProcessGroup
from spes_p2p.training.round_work import StoredVectors

RANKS = 2


def test_a_process_alone_is_its_own_leader_and_needs_no_network():
    group = ProcessGroup("cpu")
    group.connect()
    assert group.is_leader and not dist.is_initialized()
    assert group.from_leader(lambda: "word") == "word"
    assert group.mean(2.5) == 2.5
    assert dict(group.share(None)) == {}
    flat = torch.randn(3)
    assert torch.equal(dict(group.share({"shared": flat}))["shared"], flat)
    group.close()
    group.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_where_there_is_none_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"device=cuda.*--device cpu"):
        ProcessGroup("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize(
    ("built_for", "remedy"), [(None, "a build without CUDA; install one"), ("13.0", "CUDA 13.0, .* update the driver")]
)
def test_a_gpu_that_pytorch_cannot_use_is_told_and_not_passed_over_in_silence(
    tmp_path, monkeypatch, caplog, built_for, remedy
):
    process_group._warn_of_unused_gpu.cache_clear()
    (driver := tmp_path / "version").touch()
    monkeypatch.setattr(process_group, "NVIDIA_DRIVER", str(driver))
    monkeypatch.setattr(torch.version, "cuda", built_for)
    assert ProcessGroup("cpu").device.type == "cpu" and not caplog.records, "a CPU that was asked for"
    assert ProcessGroup("auto").device.type == "cpu"
    (record,) = caplog.records
    assert re.search(f"NVIDIA GPU, but training is on the CPU: PyTorch .*{remedy}", record.getMessage())
    ProcessGroup("auto")
    assert len(caplog.records) == 1, "once is enough"
    process_group._warn_of_unused_gpu.cache_clear()
    driver.unlink()
    ProcessGroup("auto")
    assert len(caplog.records) == 1


def rank_main(rank: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group = ProcessGroup("cpu")
    group.connect()
    vectors = {"slot-1": torch.arange(4.0), "shared": torch.ones(2)} if group.is_leader else None
    seen = {
        "leader": group.is_leader,
        "word": group.from_leader(lambda: f"of {rank}"),
        "vectors": {name: flat.tolist() for name, flat in group.share(vectors)},
        "nothing": dict(group.share({} if group.is_leader else None)),
        "unreadable": unreadable(group),
        "mean": group.mean(float(rank + 1)),
        "error": error_of(group),
        "after": group.from_leader(lambda: rank),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    group.close()
    group.close()


def unreadable(group: ProcessGroup) -> tuple[list[str], str]:
    """What came, and what was said, where the leader cannot read the second of three vectors."""

    def read(name: VectorName) -> torch.Tensor:
        if name == "slot-2":
            raise ExchangeError(f"{name} is damaged; fetch it again")
        return torch.ones(1)

    names, came = [VectorName.of_slot(slot) for slot in (1, 2, 3)], []
    try:
        for name, _ in group.share(StoredVectors(names, read) if group.is_leader else None):
            came.append(str(name))
    except ExchangeError as error:
        return came, str(error)
    return came, "none"


def error_of(group: ProcessGroup) -> str:
    def fail() -> None:
        raise JoinError("no answer; check it")

    try:
        group.from_leader(fail)
    except JoinError as error:
        return str(error)
    return "none"


WAIT_SECONDS = 1.0
"""Longer than the ranks wait for each other here."""


def waiting_main(rank: int, port: int, folder: str) -> None:
    """Have the leader wait for long before its first word, and die before its second."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group = ProcessGroup("cpu")
    group.connect()
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=WAIT_SECONDS / 10), dist.group.WORLD)
    heard = group.from_leader(lambda: threading.Event().wait(WAIT_SECONDS))
    try:
        group.from_leader(lambda: os._exit(0))
    except RuntimeError as error:
        Path(folder, f"{rank}.json").write_text(json.dumps([heard, str(error)]))
    group.close()  # as peers do; else Gloo's threads may abort a process that ends beside them


def test_ranks_wait_for_the_leaders_word_without_a_limit_but_notice_its_death(tmp_path):
    """It may have lost all others for a night; who then started a peer anew would not have helped."""
    run_ranks(waiting_main, (free_port(), str(tmp_path)), RANKS)
    heard, error = json.loads((tmp_path / "1.json").read_text())
    assert heard is False and "connection" in error.lower()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_every_rank_learns_the_leaders_word_its_tensors_and_its_errors(tmp_path):
    run_ranks(rank_main, (free_port(), str(tmp_path)), RANKS)
    for rank in range(RANKS):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {
            "leader": rank == 0,
            "word": "of 0",
            "vectors": {"slot-1": [0.0, 1.0, 2.0, 3.0], "shared": [1.0, 1.0]},
            "nothing": {},
            "unreadable": [["slot-1"], "slot-2 is damaged; fetch it again"],
            "mean": 1.5,
            "error": "no answer; check it",
            "after": 0,
        }


STEPS = """
import resource
import numpy as np
from spes_p2p.training.process_group import give_back_freed, keep_freed

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.full(2**18, 1.0) for _ in range(64)]  # 2 MiB each: numpy asks for huge pages from 4 MiB on
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1])

faults_of_a_step()
print(faults_of_a_step())
keep_freed()
faults_of_a_step()
print(faults_of_a_step())
kept = resident()
give_back_freed()
print(kept - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_steps_memory_is_kept_for_the_next_step_and_given_back_when_told() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, check=True, text=True)
    stock, kept, given_back = map(int, done.stdout.split())
    pages = 64 * 2**21 // 4096
    assert stock > pages / 4, "or there is nothing to keep"
    assert kept < pages / 16, "a later step takes no new pages"
    assert given_back > pages / 2


LOADING = """
from contextlib import nullcontext
import numpy as np
from spes_p2p.training.process_group import freed_at_once, give_back_freed, keep_freed

def resident():
    return 4096 * int(open("/proc/self/statm").read().split()[1])

def load():
    kept = []
    for number in range(192):
        read = np.ones((1 + number % 3) * 2**20, dtype=np.uint8)
        wide = np.ones(2 * read.nbytes, dtype=np.uint8)
        kept.append(np.ones(2**19, dtype=np.uint8))
    return kept

keep_freed()
for block in (nullcontext(), freed_at_once()):
    give_back_freed()
    before = resident()
    with block:
        kept = load()
    print((resident() - before) / (192 * 2**19))
    del kept
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_what_is_read_and_not_kept_leaves_no_holes_between_what_is() -> None:
    done = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, check=True, text=True)
    plain, at_once = map(float, done.stdout.split())
    assert at_once < 1.1 < 1.3 < plain, "of what is kept"
