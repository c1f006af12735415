"""Variables of schedulers and launchers: what they mean to a peer, and one line where they do not fit together."""

import os
import subprocess
import sys

import pytest

from spes_p2p.config.launch import Place, check_ranks, place_of
from spes_p2p.errors import ConfigError

TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2"}
SRUN |= {"SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3"}

# Each with what its message shows.
PEER = {
    "a word for a rank": ({"RANK": "first"}, "RANK='first'"),
    "a negative world": ({"WORLD_SIZE": "-1"}, "WORLD_SIZE='-1'"),
    "an empty world": ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
    "a node's number": ({"RANK": "2"}, "RANK=2: torchrun sets .*spes cluster"),
    "a rank beyond the world": ({**TORCHRUN, "RANK": "2"}, "RANK=2, LOCAL_RANK=1, WORLD_SIZE=2"),
    "a world of nodes": ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}, "WORLD_SIZE=4"),
    "a world without numbers": ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4"),
    "no meeting point": ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR=, "),
    "no port": (
        {name: TORCHRUN[name] for name in TORCHRUN if name != "MASTER_PORT"},
        "MASTER_ADDR=127.0.0.1: torchrun",
    ),
    "a port's name": ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    "a local rank beyond the machine's": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1, .*LOCAL_WORLD_SIZE=1"),
    "each task of srun a founder": (SRUN, "SLURM_PROCID=2.*found a run of its own.*spes cluster"),
}
CLUSTER = {
    "a word for a rank": ({"RANK": "first"}, "RANK='first'"),
    "a world without numbers": ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4: which node is this"),
    "an address without a number": ({"MASTER_ADDR": "10.0.0.1"}, "MASTER_ADDR=10.0.0.1: which node is this"),
    "a node counted from 1": ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4, WORLD_SIZE=4: which node is this"),
    "torchrun with two processes": (TORCHRUN, "LOCAL_WORLD_SIZE=2.*--nproc-per-node 1.*NPROC_PER_NODE"),
    "a second process": ({"RANK": "1", "LOCAL_RANK": "1"}, "LOCAL_RANK=1.*one process per node"),
    "no ranks": ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE=0"),
    "a word for ranks": ({"NPROC_PER_NODE": "gpu"}, "NPROC_PER_NODE='gpu'"),
    "more ranks than GPUs": ({**SRUN, "NPROC_PER_NODE": "8", "SLURM_GPUS_ON_NODE": "4"}, "NPROC_PER_NODE=8 .* 4"),
    "two tasks on a node": ({**SRUN, "SLURM_STEP_NUM_TASKS": "6"}, "SLURM_STEP_NUM_TASKS=6.*--ntasks-per-node 1"),
    "a rank exported at the login": ({**SRUN, "RANK": "0"}, "RANK=0, SLURM_PROCID=2.*unset RANK"),
    "a batch script without srun": (
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_PROCID": "0"},
        "SLURM_JOB_NUM_NODES=3.*write srun before",
    ),
}


@pytest.mark.parametrize(("variables", "message"), PEER.values(), ids=PEER)
def test_a_peer_refuses_variables_with_which_it_would_crash_or_hang(variables, message):
    with pytest.raises(ConfigError, match=message) as refused:
        check_ranks(variables, founds=True)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("variables", "message"), CLUSTER.values(), ids=CLUSTER)
def test_a_node_refuses_variables_that_do_not_say_which_it_is(variables, message):
    with pytest.raises(ConfigError, match=message) as refused:
        place_of(variables, on_gpu=True)
    assert "\n" not in str(refused.value)


def test_a_peer_takes_what_torchrun_sets_and_what_does_not_concern_it():
    check_ranks({}, founds=True)
    check_ranks(TORCHRUN, founds=True)
    check_ranks({"RANK": "0", "MASTER_ADDR": "10.0.0.1"}, founds=True)
    check_ranks({"RANK": "0", "WORLD_SIZE": "1"}, founds=True)
    check_ranks(SRUN, founds=False)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"RANK": "3"}, Place("3", 1)),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "NPROC_PER_NODE": "8"}, Place("0", 8)),
        (SRUN, Place("2", 1)),
        ({**SRUN, "SLURM_GPUS_ON_NODE": "4"}, Place("2", 4)),
        ({**SRUN, "SLURM_GPUS_ON_NODE": "4", "NPROC_PER_NODE": "2"}, Place("2", 2)),
        ({**SRUN, "SLURM_ARRAY_TASK_ID": "5"}, Place("5-2", 1)),
        ({**TORCHRUN, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, Place("1", 1)),
    ],
)
def test_a_nodes_number_comes_from_slurm_or_rank(variables, place):
    assert place_of(variables, on_gpu=True) == place


def test_nodes_without_numbers_have_their_host_names():
    first, second = place_of({}, on_gpu=True), place_of({}, on_gpu=True)
    assert first == second and first.name
    assert place_of({"SLURM_GPUS_ON_NODE": "4"}, on_gpu=False).num_ranks == 1


@pytest.mark.full  # what they refuse is tested above with every commit, and how a command ends in `test_cli`
@pytest.mark.parametrize(
    ("command", "variables"),
    [
        (["peer", "--run-id", "r"], {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}),
        (["cluster", "--run-id", "r", "--shared", "shared"], {"WORLD_SIZE": "4"}),
    ],
)
def test_the_commands_say_so_in_one_line_and_write_nothing(command, variables, tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "spes_p2p", *command, "--output", str(tmp_path / "out")],
        **{"capture_output": True, "text": True, "cwd": tmp_path, "timeout": 120, "check": False},
        env={name: value for name, value in os.environ.items() if name not in (*TORCHRUN, *SRUN)} | variables,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
