"""`spes cluster`: one peer per node, by hand and in a real SLURM; SIGTERM ends a peer within its grace."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from peer_processes import MARK, Command, Commands, commands_in, write_corpus, write_settings
from slurm import Slurm, lacks, slurm_on

from spes_p2p.commands.cluster import FINISHED
from spes_p2p.config import JoinLink
from spes_p2p.peer.joining import FRIENDS_FILE, write_friends_link
from spes_p2p.peer.termination import SAME_SECONDS
from spes_p2p.swarm.p2p.identity import Identity, IdentityKeys

pytestmark = pytest.mark.full

ROUND = {"mode": "steps", "steps": 5, "total": 5000, "min_peers": 1}
GRACE_SECONDS = 20.0
LAST_SECONDS = 5.0
"""The promise after a second SIGTERM."""
needs_slurm = pytest.mark.skipif(bool(lacks()), reason=lacks())


def flags(folder: Path, **changes: object) -> list[str | Path]:
    """Write corpus and settings; return the flags that are the same on all nodes."""
    write_corpus(folder / "corpus.jsonl")
    settings = write_settings(folder / "run.yaml", round={**ROUND, **changes})
    words: list[str | Path] = ["--run-id", "job", "--config", settings, "--text", folder / "corpus.jsonl"]
    words += ["--max-slots", "4", "--device", "cpu", "--threads", "1", "--cache", folder / "cache"]
    return [*words, "--host", "127.0.0.1", "--alone"]


def start_node(commands: Commands, folder: Path, *words: str | Path, **environment: str) -> Command:
    grace = ("--grace", f"{GRACE_SECONDS:g}")
    return commands.start("-m", "spes_p2p", "cluster", "--shared", folder / "shared", *grace, *words, **environment)


def ranks_of(leader: Command) -> list[psutil.Process]:
    """Return the processes of a peer's other ranks."""
    children = psutil.Process(leader.pid).children()
    return [process for process in children if process.environ() and is_rank(process)]


def is_rank(process: psutil.Process) -> bool:
    """Tell a rank, which holds a gloo connection and is started first, from forks of the leader."""
    return process.pid == min(child.pid for child in psutil.Process(process.ppid()).children())


def wait_until_it_stands_still(pid: int) -> None:
    """Wait until a process's main thread has slept through twenty looks."""
    looks: list[tuple[str, float]] = []
    while len(looks) < 20 or looks[-1][0] != psutil.STATUS_SLEEPING or set(looks[-20:]) != {looks[-1]}:
        process = psutil.Process(pid)
        main = next(thread for thread in process.threads() if thread.id == pid)
        looks.append((process.status(), main.user_time + main.system_time))
        time.sleep(0.1)


def ended_within(node: Command, seconds: float) -> bool:
    began = time.monotonic()
    node.process.wait(seconds + 30)
    return time.monotonic() - began <= seconds


def test_nodes_end_with_the_founders_fault_and_do_not_wait_for_it(tmp_path: Path) -> None:
    words = [*flags(tmp_path, min_peers=2), "--text", tmp_path / "nowhere.txt"]
    with commands_in(tmp_path) as commands:
        nodes = [start_node(commands, tmp_path, *words, RANK=rank, WORLD_SIZE="2") for rank in "01"]
        for node in nodes:
            assert node.end(120) == 2, node.tail()
            assert "nowhere.txt" in node.tail()
        commands.wait_until_gone()


def test_nodes_meet_in_the_folder_and_go_on_where_they_were(tmp_path: Path) -> None:
    words, stranger = flags(tmp_path, min_peers=2), IdentityKeys(Identity(tmp_path / "stranger.key"))
    (tmp_path / "shared" / "job").mkdir(parents=True)
    link = JoinLink(run_id="job", founder=stranger.peer_id, addresses=("/ip4/127.0.0.1/tcp/1",))
    write_friends_link(
        tmp_path / "shared" / "job" / FRIENDS_FILE, link, stranger, "0" * 64, 1
    )  # of an earlier founding
    with commands_in(tmp_path) as commands:
        first = start_node(commands, tmp_path, *words, RANK="0", WORLD_SIZE="2", MASTER_ADDR="node0")
        second = start_node(commands, tmp_path, *words, RANK="1", WORLD_SIZE="2", MASTER_ADDR="node0")
        for node in (first, second):
            node.wait_for(r"round 2: 2 peers")
        founders = [node for node in (first, second) if node.matches("this node founds the run")]
        assert len(founders) == 1
        founders[0].signal(signal.SIGKILL)
        founders[0].end()
        rank = str((first, second).index(founders[0]))
        again = start_node(commands, tmp_path, *words, RANK=rank, WORLD_SIZE="2", MASTER_ADDR="node0")
        round_number = int(again.wait_for(r"round (\d+): 2 peers")[1])
        assert round_number > 2 and not again.matches("founds the run")
        for node in {first, second, again} - set(founders):
            node.signal(signal.SIGTERM)
            assert node.end(60) == 130, node.tail()
        commands.wait_until_gone()
    assert not list((tmp_path / "shared" / "job" / "addresses").iterdir())


def test_a_finished_run_is_not_founded_again(tmp_path: Path) -> None:
    words = [*flags(tmp_path, total=2), "--seed-seconds", "0"]
    with commands_in(tmp_path) as commands:
        for seen in ("the run is finished; its model", "the run is finished, as"):
            node = start_node(commands, tmp_path, *words, RANK="0")
            assert node.end() == 0, node.tail()
            assert node.matches(seen), node.tail()
            commands.wait_until_gone()


def test_a_node_that_was_asked_to_finish_does_not_end_the_run_of_all(tmp_path: Path) -> None:
    """The other nodes found the run finished when the job was started again."""
    words = [*flags(tmp_path, total=500), "--seed-seconds", "0"]
    with commands_in(tmp_path) as commands:
        node = start_node(commands, tmp_path, *words, RANK="0")
        node.wait_for("round 2: 1 peers")
        asked = commands.start("-m", "spes_p2p", "ctl", "finish", "--output", tmp_path / "shared" / "job" / "node-0")
        assert asked.end() == 0, asked.tail()
        assert node.end() == 0 and node.matches("finished as asked"), node.tail()
        assert (tmp_path / "shared" / "job").is_dir() and not (tmp_path / "shared" / "job" / FINISHED).exists()


@pytest.mark.parametrize("is_hung", [False, True], ids=["running", "hung"])
def test_sigterm_hands_over_the_slots_of_a_peer_with_a_hung_rank_within_its_grace(
    is_hung: bool, tmp_path: Path
) -> None:
    words = flags(tmp_path, min_peers=2, max_seconds=30)
    with commands_in(tmp_path) as commands:
        other = start_node(commands, tmp_path, *words, RANK="0")
        node = start_node(commands, tmp_path, *words, RANK="1", NPROC_PER_NODE="2")
        node.wait_for(r"round 2: 2 peers")
        if is_hung:
            ranks_of(node)[0].send_signal(signal.SIGSTOP)
            time.sleep(3)
            wait_until_it_stands_still(node.pid)  # the leader, in a collective
        node.signal(signal.SIGTERM)
        assert ended_within(node, GRACE_SECONDS) and node.end() == 130, node.tail()
        assert node.matches("leaving: serving slots until others have them") and not node.faults(), node.tail()
        assert bool(node.matches("the main thread has not answered")) == is_hung
        other.wait_for(r"round \d+: 1 peers, .* slots 0-3;", after=len(other.lines))
        commands.kill_all()


def test_a_second_sigterm_ends_a_hung_peer_at_once(tmp_path: Path) -> None:
    """Whatever hangs: here every process of the peer but its leader."""
    words = flags(tmp_path)
    with commands_in(tmp_path) as commands:
        node = start_node(commands, tmp_path, *words, RANK="0", NPROC_PER_NODE="2")
        node.wait_for(r"round 2: 1 peers")
        processes = psutil.Process(node.pid).children(recursive=True)
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        node.signal(signal.SIGTERM)
        time.sleep(SAME_SECONDS + 0.5)
        node.signal(signal.SIGTERM)
        assert ended_within(node, LAST_SECONDS)
        assert node.end() in (130, -signal.SIGALRM), node.tail()  # the alarm, where the interpreter itself hangs
        commands.wait_until_gone()


MOMENTS = {
    "it starts": "",
    "it has imported": "file limit",
    "its node listens": "Launched p2pd",
    "it knows the run": "founded by",
    "it shows a page": r"page: http",
    "it measures": "kernel auto",
    "it fetches versions": "caught up with round",
    "it has entered": "entered the run",
    "it has met the other": r"2 peers meet",
    "it has committed": r"round \d+: 2 peers",
}
"""Moments of a peer's life, by what it has printed last."""


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Commands, Path, list[str | Path], Command]]:
    """A peer whose run others enter and leave: processes, folder, flags, and the peer."""
    folder = tmp_path_factory.mktemp("moments")
    words = flags(folder, max_seconds=30, steps=40)  # rounds that last long enough to enter
    with commands_in(folder) as commands:
        founder = start_node(commands, folder, *words, RANK="0")
        founder.wait_for(r"round 1: 1 peers")
        yield commands, folder, words, founder
        commands.kill_all()


@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_at_any_moment_ends_a_peer_within_its_grace_and_the_run_goes_on(
    moment: str, founded: tuple[Commands, Path, list[str | Path], Command]
) -> None:
    commands, folder, words, founder = founded
    node = start_node(commands, folder, *words, "--log-level", "debug", RANK="1")
    if printed := MOMENTS[moment]:
        node.wait_for(printed)
    processes = psutil.Process(node.pid).children(recursive=True)
    node.signal(signal.SIGTERM)
    assert ended_within(node, GRACE_SECONDS)
    assert node.end() in (130, -signal.SIGTERM), node.tail()  # SIGTERM's own code before Python listens to it
    assert not node.faults(), node.tail()
    assert not psutil.wait_procs(processes, LAST_SECONDS)[1]
    founder.wait_for(r"round \d+: 1 peers, .* slots 0-3;", after=len(founder.lines))


# ---------------------------------------------------------------------- SLURM


class Job:
    """Tasks of `scripts/slurm.sbatch`, and what they have printed.

    Args:
        slurm: Where it runs.
        folder: Of the test; it holds the job's output and the shared folder.
        options: For sbatch.
        words: Flags of `spes cluster`.
    """

    def __init__(self, slurm: Slurm, folder: Path, options: list[str], words: list[str | Path]) -> None:
        self.slurm = slurm
        self._folder = folder
        self.id = slurm.submit(*options, f"--output={folder}/%A_%a.out", "scripts/slurm.sbatch", *words)

    def output(self, task: str) -> str:
        """Return the output of an array's task, or of a job of several nodes (`4294967294`)."""
        file = self._folder / f"{self.id}_{task}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def wait_for(self, pattern: str, task: str, seconds: float = 180.0, *, after: int = 0) -> re.Match[str]:
        """Return the match of `pattern` in a task's output from `after` on, once it is there."""
        found: list[re.Match[str]] = []

        def is_there() -> bool:
            found.extend(re.finditer(pattern, self.output(task)[after:]))
            return bool(found)

        try:
            self.slurm.wait_until(is_there, seconds)
        except AssertionError as error:
            raise AssertionError(f"no {pattern!r} in task {task}:\n{self.output(task)[-6000:]}") from error
        return found[0]


def in_slurm(commands: Commands, folder: Path) -> dict[str, str]:
    """Return the environment of jobs: this interpreter, and a mark by which nothing of them is left behind."""
    return {"SPES_VENV": str(Path(sys.executable).parents[1]), "SHARED": str(folder / "shared"), MARK: commands.mark}


@needs_slurm
def test_three_nodes_of_one_job_commit_a_round(tmp_path: Path) -> None:
    words = flags(tmp_path, min_peers=3)
    with commands_in(tmp_path) as commands, slurm_on(3, **in_slurm(commands, tmp_path)) as slurm:
        job = Job(slurm, tmp_path, ["--nodes=3"], words)
        job.wait_for(r"round 1: 3 peers, .* shared \w+", "4294967294")
        nodes = sorted(path.name for path in (tmp_path / "shared" / "job").glob("node-*"))
        assert nodes == ["node-0", "node-1", "node-2"]
        commands.kill_all()


@needs_slurm
def test_an_array_survives_preemption_and_the_loss_of_the_founders_node(tmp_path: Path) -> None:
    words = flags(tmp_path, min_peers=2)
    with commands_in(tmp_path) as commands, slurm_on(3, **in_slurm(commands, tmp_path)) as slurm:
        job = Job(slurm, tmp_path, ["--nodes=1", "--array=0-2"], words)
        tasks = ["0", "1", "2"]
        for task in tasks:
            job.wait_for(r"round \d+: 3 peers", task)
        founder = next(task for task in tasks if "this node founds the run" in job.output(task))

        # A job of a higher partition takes a node; its task hands over, is queued again, and comes back.
        before = {task: len(job.output(task)) for task in tasks}
        urgent = slurm.submit("--partition=high", "--nodes=1", "--wrap", "sleep 1000")
        slurm.wait_until(lambda: bool(slurm.nodes_of(urgent)), 120)
        [preempted] = [task for task in tasks if not slurm.nodes_of(f"{job.id}_{task}")]
        left = job.output(preempted)[before[preempted] :]
        assert "leaving: serving slots until others have them" in left, left
        assert "nobody has taken" not in left, left
        stayed = [task for task in tasks if task != preempted]
        for task in stayed:
            job.wait_for(r"round \d+: 2 peers", task, after=before[task])
        before = {task: len(job.output(task)) for task in tasks}
        slurm.run("scancel", urgent)
        job.wait_for(r"round \d+: 3 peers", preempted, after=before[preempted])

        # The founder's machine vanishes; the others go on, and its task comes back elsewhere.
        before = {task: len(job.output(task)) for task in tasks}
        node = slurm.nodes_of(f"{job.id}_{founder}")
        processes = [process for process in commands.alive() if process.environ().get("SLURMD_NODENAME") == node]
        assert len(processes) > 3
        slurm.kill_node(node, processes)
        for task in tasks:
            if task != founder:
                job.wait_for(r"round \d+: 2 peers", task, after=before[task])
        commands.kill_all()
