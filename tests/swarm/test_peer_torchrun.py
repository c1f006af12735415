"""A peer of two ranks is one peer to the others."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from forked_commands import ForkServer
from peer_processes import MARK, Command, Commands, commands_in, saved_state, write_corpus, write_settings

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
REPORT = r"round (\d+): (\d+) peers, .* shared (\w+), slots"
ROUND = {"mode": "tokens", "tokens": 10**9, "min_seconds": 0.5, "max_seconds": 1.5}
TOTAL = 10


def start_ranks(commands: Commands, folder: Path, total: int, output: str, shard: str = "ddp") -> Command:
    settings = write_settings(folder / f"{output}.yaml", round={**ROUND, "total": total})
    flags = ["--run-id", "ranks", "--config", settings, "--text", folder / "corpus.jsonl", "--max-slots", "2"]
    words = commands.peer_words(output, *flags, "--shard", shard, "--seed-seconds", "0")
    return commands.start(*TORCHRUN, *words, GLOO_SOCKET_IFNAME="lo")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus.jsonl")
    return tmp_path


@pytest.mark.full
def test_two_ranks_train_a_run_alone_and_with_a_second_peer(folder: Path) -> None:
    with commands_in(folder) as commands:
        ranks = start_ranks(commands, folder, TOTAL, "ranks")
        server = ForkServer(folder / "results", {**os.environ, MARK: commands.mark})
        ranks.wait_for(r"round 1: 1 peers")
        address = (folder / "ranks" / "address").read_text().strip()
        words = ["--run-id", "ranks", "--initial-peers", address, "--text", folder / "corpus.jsonl"]
        words += ["--max-slots", "2", "--seed-seconds", "0", "--output", folder / "single"]
        single = server.start("peer", [*words, "--cache", folder / "cache", "--threads", "1", "--device", "cpu"])
        assert ranks.end() == 0, ranks.tail()
        ended = single.end(60)
        assert ended.code == 0, ended.stderr
        server.close()
        commands.wait_until_gone()
        resumed = commands.peer_words("ranks", "--run-id", "ranks", "--resume", "--text", folder / "corpus.jsonl")
        again = commands.start(*TORCHRUN, *resumed, GLOO_SOCKET_IFNAME="lo")
        assert again.end() == 0, again.tail()
        assert again.matches("the run is finished") and not again.matches("others join with"), again.tail()

    told = {match[1]: match.groups()[1:] for match in ranks.matches(REPORT)}
    assert sorted(map(int, told)) == list(range(1, TOTAL + 1)), "every round is reported once, by the leader alone"
    others = {r: rest for r, *rest in re.findall(REPORT, ended.stderr)}
    together = [r for r in others if told[r][0] == "2"]
    assert together
    for r in together:
        assert tuple(others[r]) == told[r]
    saved = saved_state(folder / "ranks")
    assert saved["total_tokens"] == 4 * 16 * saved["steps"], "both ranks' halves of a batch are one batch"


@pytest.mark.full
@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_ctrl_c_ends_both_ranks_and_the_peer_can_be_resumed(shard: str, folder: Path) -> None:
    with commands_in(folder) as commands:
        ranks = start_ranks(commands, folder, 500, "ranks", shard)
        ranks.wait_for(r"round 2: 1 peers")
        for process in [psutil.Process(ranks.pid), *psutil.Process(ranks.pid).children()]:
            process.send_signal(signal.SIGINT)  # as a terminal does to all of them
        assert ranks.end(60) != 0
        commands.wait_until_gone()
        saved = saved_state(folder / "ranks")
        assert saved["round"] >= 2
        flags = ["--run-id", "ranks", "--text", folder / "corpus.jsonl", "--max-slots", "2"]
        flags += ["--resume", "--shard", shard]
        resumed = commands.start(*TORCHRUN, *commands.peer_words("ranks", *flags), GLOO_SOCKET_IFNAME="lo")
        assert int(resumed.wait_for(REPORT)[1]) == saved["round"] + 1
