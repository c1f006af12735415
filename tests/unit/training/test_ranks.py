"""Every rank does what the leader does, and ends as it ends; one process alone needs no group at all."""

import datetime
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from spes_p2p.cli import Terminated
from spes_p2p.codecs.vectors import LazyVectors
from spes_p2p.errors import ConfigError, ExchangeError, JoinError, SpesError
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.training import ranks as ranks_module
from spes_p2p.training.ranks import Ranks, on_all_ranks

RANKS = 2


def test_a_process_alone_is_its_own_leader_and_needs_no_network():
    ranks = Ranks("cpu")
    ranks.connect()
    assert ranks.is_leader and not dist.is_initialized()
    flat = torch.randn(3)
    with ranks.leading():
        assert Echo(ranks).take("word", vectors={"shared": flat}) == ["word", {"shared": flat.tolist()}]
        assert ranks.mean(2.5) == 2.5
    with pytest.raises(JoinError), ranks.leading():
        raise JoinError("no answer; check it")
    ranks.close()
    ranks.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_where_there_is_none_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"device=cuda.*--device cpu"):
        Ranks("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize(
    ("built_for", "remedy"), [(None, "a build without CUDA; install one"), ("13.0", "CUDA 13.0, .* update the driver")]
)
def test_a_gpu_that_pytorch_cannot_use_is_told_and_not_passed_over_in_silence(
    tmp_path, monkeypatch, caplog, built_for, remedy
):
    ranks_module._warn_of_unused_gpu.cache_clear()
    (driver := tmp_path / "version").touch()
    monkeypatch.setattr(ranks_module, "NVIDIA_DRIVER", str(driver))
    monkeypatch.setattr(torch.version, "cuda", built_for)
    assert Ranks("cpu").device.type == "cpu" and not caplog.records, "a CPU that was asked for"
    assert Ranks("auto").device.type == "cpu"
    (record,) = caplog.records
    assert re.search(f"NVIDIA GPU, but training is on the CPU .*: PyTorch .*{remedy}", record.getMessage())
    Ranks("auto")
    assert len(caplog.records) == 1, "once is enough"
    ranks_module._warn_of_unused_gpu.cache_clear()
    driver.unlink()
    Ranks("auto")
    assert len(caplog.records) == 1


class Echo:
    """Remembers in place of a trainer what it was told."""

    is_sharded = False

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.told: list[object] = []

    @on_all_ranks("vectors")
    def take(self, word: str, vectors: Mapping[VectorName, torch.Tensor] | None = None) -> list[object]:
        self.told.append([word, {}])
        for name, tensor in self.ranks.share(vectors):
            self.told[-1][1][name] = tensor.tolist()
        return self.told[-1]

    @on_all_ranks()
    def mean_of_ranks(self, offset: float) -> None:
        self.told.append(self.ranks.mean(self.ranks.rank + offset))

    @on_all_ranks(if_sharded=True)
    def gather(self) -> None:
        self.told.append("gathered")

    @on_all_ranks()
    def fail_on_followers(self) -> None:
        if not self.ranks.is_leader:
            raise ArithmeticError("this rank's GPU has failed")
        self.ranks.mean(1.0)


def rank_main(rank: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = Ranks("cpu")
    ranks.connect()
    told, ends = [], []
    for part in (speak, read_in_vain, be_refused, be_interrupted, lose_a_rank):
        echo = Echo(ranks)
        try:
            if ranks.is_leader:
                with ranks.leading():
                    part(echo)
            else:
                ranks.obey(echo)
            ends.append("none")
        except (SpesError, KeyboardInterrupt, ArithmeticError, RuntimeError) as error:
            ends.append(f"{type(error).__name__}: {error}" if not isinstance(error, RuntimeError) else "lost a rank")
        told.append(echo.told)
    Path(folder, f"{rank}.json").write_text(json.dumps([told, ends]))
    ranks.close()
    ranks.close()


def speak(echo: Echo) -> None:
    grid = torch.arange(4, dtype=torch.uint8).view(2, 2)
    echo.take("of 0", {VectorName("slot-1"): grid, SHARED: torch.tensor(1.5)})
    echo.take(word="nothing", vectors={})
    echo.gather()
    echo.mean_of_ranks(1.0)
    echo.is_sharded = True
    echo.gather()


def read_in_vain(echo: Echo) -> None:
    def read(name: VectorName) -> torch.Tensor:
        if name == "slot-2":
            raise ExchangeError(f"{name} is damaged; fetch it again")
        return torch.ones(1)

    echo.take("vectors", LazyVectors([VectorName.of_slot(slot) for slot in (1, 2, 3)], read))


def be_refused(echo: Echo) -> None:
    raise JoinError("no answer; check it")


def be_interrupted(echo: Echo) -> None:
    raise Terminated


def lose_a_rank(echo: Echo) -> None:
    echo.fail_on_followers()


WAIT_SECONDS = 1.0
"""Longer than the ranks wait for each other here."""


def waiting_main(rank: int, port: int, folder: str) -> None:
    """Have the leader wait for long before its first command, and die before its second."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = Ranks("cpu")
    ranks.connect()
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=WAIT_SECONDS / 10), dist.group.WORLD)
    echo = Echo(ranks)
    if ranks.is_leader:
        threading.Event().wait(WAIT_SECONDS)
        echo.take("word", {})
        os._exit(0)
    try:
        ranks.obey(echo)
    except RuntimeError as error:
        Path(folder, f"{rank}.json").write_text(json.dumps([echo.told, str(error)]))
    ranks.close()  # as peers do; else Gloo's threads may abort a process that ends beside them


def test_ranks_wait_for_the_leaders_word_without_a_limit_but_notice_its_death(tmp_path):
    """It may have lost all others for a night; who then started a peer anew would not have helped."""
    run_ranks(waiting_main, (free_port(), str(tmp_path)), RANKS)
    heard, error = json.loads((tmp_path / "1.json").read_text())
    assert heard == [["word", {}]] and "connection" in error.lower()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_every_rank_does_what_the_leader_does_and_ends_as_it_ends(tmp_path):
    run_ranks(rank_main, (free_port(), str(tmp_path)), RANKS)
    for rank in range(RANKS):
        told, ends = json.loads((tmp_path / f"{rank}.json").read_text())
        spoken, in_vain, *nothing = told
        vectors = {"slot-1": [[0, 1], [2, 3]], "shared": 1.5}
        gathered = ["gathered"] * (2 if rank == 0 else 1)
        assert spoken[:2] == [["of 0", vectors], ["nothing", {}]]
        assert [each for each in spoken[2:] if each != "gathered"] == [1.5] and len(spoken[2:]) == 1 + len(gathered)
        assert in_vain == [["vectors", {"slot-1": [1.0]}]] and nothing == [[], [], []]
        assert ends == [
            "none",
            "ExchangeError: slot-2 is damaged; fetch it again",
            "JoinError: no answer; check it",
            "Terminated: " if rank == 0 else "KeyboardInterrupt: ",
            "lost a rank" if rank == 0 else "ArithmeticError: this rank's GPU has failed",
        ]


STEPS = """
import resource
import numpy as np
from spes_p2p.training.ranks import give_back_freed, keep_freed

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
def test_a_steps_memory_is_kept_for_the_next_step_and_given_back_when_told():
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, check=True, text=True)
    stock, kept, given_back = map(int, done.stdout.split())
    pages = 64 * 2**21 // 4096
    assert stock > pages / 4, "or there is nothing to keep"
    assert kept < pages / 16, "a later step takes no new pages"
    assert given_back > pages / 2


LOADING = """
from contextlib import nullcontext
import numpy as np
from spes_p2p.training.ranks import freed_at_once, give_back_freed, keep_freed

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
def test_what_is_read_and_not_kept_leaves_no_holes_between_what_is():
    done = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, check=True, text=True)
    plain, at_once = map(float, done.stdout.split())
    assert at_once < 1.1 < 1.3 < plain, "of what is kept"
