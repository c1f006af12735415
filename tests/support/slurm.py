"""A real SLURM on this machine: a controller and nodes that are daemons of one host, with Debian's packages.

Two partitions: jobs of `high` preempt those of `low`, which are queued again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from peer_processes import ROOT, free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
DAEMONS = ("munged", "slurmctld", "slurmd", "slurmstepd")
GRACE_SECONDS = 60
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.sock,cred_expire=5
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
MailProg=/bin/true
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""


def lacks() -> str:
    """Return what keeps SLURM from running here; nothing if nothing does."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        return f"no {missing[0]}; apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "slurmd starts tasks as root only"


class Slurm:
    """A running SLURM.

    Args:
        folder: Of its files.
        environment: Of its daemons and jobs, added to the test's own.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin", **environment}
        self._environment["SLURM_CONF"] = str(folder / "slurm.conf")

    def start(self, num_nodes: int) -> None:
        """Start the daemons of nodes `n1`, `n2` and so on; return once jobs can run."""
        folder, host = self._folder, socket.gethostname().split(".")[0]
        names = [f"n{number}" for number in range(1, num_nodes + 1)]
        nodes = (
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1 RealMemory=1000"
            for name in names
        )
        (folder / "slurm.conf").write_text(
            CONFIG.format(
                host=host,
                folder=folder,
                controller_port=free_port(),
                nodes="\n".join(nodes),
                grace=GRACE_SECONDS,
            )
        )
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        files = [f"--{what}={folder}/munge.{end}" for what, end in (("key-file", "key"), ("socket", "sock"))]
        files += [f"--{what}-file={folder}/munge.{what}" for what in ("pid", "log", "seed")]
        self.run("munged", "--force", *files)
        self.run("slurmctld", "-f", folder / "slurm.conf")
        for name in names:
            self.run("slurmd", "-N", name, "-f", folder / "slurm.conf")
        self.wait_until(
            lambda: self.run("sinfo", "-h", "-t", "idle", "-p", "low", "-o", "%D").strip() == str(num_nodes)
        )

    def run(self, *words: str | Path) -> str:
        """Run one of SLURM's commands; return what it prints."""
        words = tuple(map(str, words))
        ended = subprocess.run(
            words, cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == 0, f"{' '.join(words)}: {ended.stderr}"
        return ended.stdout

    def submit(self, *words: str | Path) -> str:
        """Submit a job; return its number."""
        return self.run("sbatch", "--parsable", *words).strip().split(";")[0]

    def nodes_of(self, job: str) -> str:
        """Return the nodes of a running job or array task, nothing if it does not run."""
        return self.run("squeue", "-h", "-t", "running", "-j", job, "-o", "%N").strip()

    def wait_until(self, holds, seconds: float = 60.0) -> None:
        """Wait for what no daemon tells: SLURM is asked once a second, which is how its own tools wait."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"it did not come in {seconds:.0f} s:\n{self.told()}"
            time.sleep(1.0)

    def told(self) -> str:
        """Return the state of jobs and nodes, and the ends of the logs."""
        tails = [
            f"{log.name}:\n{log.read_text(errors='replace')[-1500:]}" for log in self._folder.glob("slurmctld.log")
        ]
        return "\n".join([self.run("squeue"), self.run("sinfo"), *tails])

    def kill_node(self, name: str, processes: Sequence[psutil.Process]) -> None:
        """Let a machine vanish: its daemon and everything that it runs are killed, and SLURM notices."""
        for process in [psutil.Process(int((self._folder / f"{name}.pid").read_text())), *processes]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=killed")

    def stop(self) -> None:
        """End jobs and daemons, and wait until they have gone."""
        with contextlib.suppress(AssertionError):  # it has not come up, or a killed node keeps its job
            self.run("scancel", "--user", "root")
            self.wait_until(lambda: not self.run("squeue", "-h"), 40)
        left = [process for process in psutil.process_iter() if process.name() in DAEMONS and self._owns(process)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        for process in psutil.wait_procs(left, 20)[1]:
            process.kill()

    def _owns(self, process: psutil.Process) -> bool:
        """Tell a daemon of this SLURM: its files are in the command line, or it works in their folder."""
        with contextlib.suppress(psutil.Error):
            return str(self._folder) in " ".join([*process.cmdline(), process.cwd()])
        return False


@contextlib.contextmanager
def slurm_on(num_nodes: int, **environment: str) -> Iterator[Slurm]:
    """Yield a running SLURM; in the end its daemons are gone."""
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        slurm = Slurm(folder, environment)
        try:
            slurm.start(num_nodes)
            yield slurm
        finally:
            slurm.stop()
