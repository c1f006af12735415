"""`spes cluster`: one peer per node of a job; the nodes find each other in a folder that all of them see.

The folder `SHARED/RUN` holds `founder`, a link to the name of the node that founds the run; `addresses/NAME`, by which
others join the peer of that node; `node-NAME`, that peer's output unless --output names another; and `finished` after
the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from spes_p2p.config import JoinLink, PeerConfig
from spes_p2p.config.commands import ClusterConfig
from spes_p2p.config.launch import RANK_VARIABLES, Place, place_of
from spes_p2p.errors import ConfigError, JoinError, SpesError
from spes_p2p.fs import write_atomic
from spes_p2p.monitor.model_folder import ModelFolder
from spes_p2p.peer import life, restart
from spes_p2p.peer.joining import FRIENDS_FILE, kept, write_friends_link
from spes_p2p.peer.output_dir import can_resume
from spes_p2p.swarm.certificate import MAX_SEATS
from spes_p2p.swarm.hivemind_fixes.processes import die_with_parent
from spes_p2p.swarm.p2p.identity import Identity, IdentityKeys

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Between two looks at the folder. Network file systems do not notify a node of what another has written."""
SAY_SECONDS = 30.0
WAIT_SECONDS = 3600.0
"""Longest wait for the founder, which may have to tokenise its text first."""
DIAL_SECONDS = 2.0
MAX_INITIAL_PEERS = 8
ADDRESS = re.compile(r"/(?:ip4|ip6|dns4|dns6|dns)/([^/]+)/tcp/(\d+)/p2p/\w+")


def main(config: ClusterConfig) -> int:
    """Run this node's peer to the end of its run; return the exit code."""
    environment = dict(os.environ)
    place = place_of(environment, on_gpu=config.device != "cpu")
    folder = Rendezvous(config.shared, config.run_name, place.name)
    output = config.output or folder.path / f"node-{place.name}"
    peer = as_peer(config, output)
    forget_launcher()
    pids = start_ranks(place)
    if pids is None:
        return life.run(peer)
    others = folder.wait(is_kept=peer.resume)
    if others is None:
        log.info("the run is finished, as %s says", folder.path / FINISHED)
        return 0
    if others:
        invite = folder.path / FRIENDS_FILE
        given = {"invite": str(invite)} if invite.exists() and not peer.invite else {}
        peer = peer.model_copy(update={"initial_peers": others, "run": None} | given)
    elif not peer.resume:  # invites are of one founding
        (folder.path / FRIENDS_FILE).unlink(missing_ok=True)
    try:
        code = life.run(peer, partial(folder.publish, peer), pids)
    except restart.DaemonDied as died:
        os.environ.update(environment)
        restart.restart(peer, died, num_ranks=place.num_ranks)
    except SpesError:
        if not (others or can_resume(output)):
            folder.cede()
        raise
    finally:
        folder.withdraw()
    if code == 0 and kept(peer.model_copy(update={"resume": True})).is_finished:  # else this node alone was to finish
        folder.finish()
    return code


def as_peer(config: ClusterConfig, output: Path) -> PeerConfig:
    """Return the settings of `spes peer` for this node; a peer in its folder `output` is resumed."""
    given = config.model_fields_set & PeerConfig.model_fields.keys() - {"run"}
    chosen = {name: getattr(config, name) for name in given}
    overwrite = config.overwrite and not int(os.environ.get("SLURM_RESTART_COUNT") or 0)  # a requeued job goes on
    resume = not overwrite and can_resume(output)
    is_cut_off = not resume and output.is_dir() and any(output.iterdir())  # its start was killed before it was kept
    kept = {"output": output, "resume": resume, "overwrite": overwrite or is_cut_off}
    peer = PeerConfig(**chosen | kept | {"yes": True})  # the run is this user's own
    return peer.model_copy(update={"run": config.run})  # as it was given: a new one would not tell what was left out


# ---------------------------------------------------------------------- ranks


def forget_launcher() -> None:
    """Remove the launcher's variables, which number nodes; the peer's ranks have numbers of their own."""
    for name in (*RANK_VARIABLES, "SLURM_PROCID"):
        os.environ.pop(name, None)


def start_ranks(place: Place) -> list[int] | None:
    """Become the leader of a peer's ranks; return the others' process ids, or None in one of those.

    Forks before anything heavy starts; each rank goes on from here. It dies with the leader.
    """
    if place.num_ranks == 1:
        return []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    size = str(place.num_ranks)
    os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // place.num_ranks)))
    leader, pids = os.getpid(), []
    for rank in range(1, place.num_ranks):
        pid = os.fork()
        if pid == 0:
            die_with_parent(leader)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return None
        pids.append(pid)
    for rank, pid in enumerate(pids, start=1):
        threading.Thread(target=_leave_with, args=(rank, pid), name=f"rank-{rank}", daemon=True).start()
    return pids


def _leave_with(rank: int, pid: int) -> None:
    """Have the peer leave if one of its ranks fails."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code not in (0, life.EXIT_INTERRUPTED):
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        log.error("rank %d %s; the peer leaves", rank, how)
        os.kill(os.getpid(), signal.SIGTERM)


# ---------------------------------------------------------------------- the shared folder

FINISHED = "finished"
FOUNDER = "founder"


class Rendezvous:
    """A run's folder, in which the peers of a job find each other by their nodes' names.

    Raises:
        ConfigError: the folder cannot be written.
    """

    def __init__(self, shared: Path, run_name: str, name: str) -> None:
        self.path = shared / run_name
        self._name = name
        self._addresses = self.path / "addresses"
        try:
            self._addresses.mkdir(parents=True, exist_ok=True)
            self.withdraw()  # an address of an earlier start
        except OSError as error:
            raise ConfigError(
                f"cannot write --shared {shared}: {error.strerror}; name a folder that all nodes can write"
            ) from error

    def wait(self, *, is_kept: bool) -> list[str] | None:
        """Return addresses of peers that listen, once there are any; none for the founder; None if the run is finished.

        Args:
            is_kept: Whether this node has a peer that goes on.

        Raises:
            JoinError: the founder has not come in time.
        """
        deadline, said, pause = time.monotonic() + WAIT_SECONDS, -SAY_SECONDS, threading.Event()
        while True:
            if others := self._listening():
                return others
            if (self.path / FINISHED).exists():
                return None
            founder = self._founder()
            if founder == self._name:
                log.info("this node %s the run", "goes on with" if is_kept else "founds")
                return []
            now = time.monotonic()
            if now >= deadline:
                raise JoinError(
                    f"node {founder} founds the run, and no peer has come to {self._addresses} in "
                    f"{WAIT_SECONDS:.0f} s; start that node, or delete {self.path / FOUNDER} to let another found it"
                )
            if now - said >= SAY_SECONDS:
                log.info("waiting for node %s, which founds the run, or another peer's address", founder)
                said = now
            pause.wait(POLL_SECONDS)

    def publish(self, peer: PeerConfig, addresses: Sequence[str]) -> None:
        """Tell the other nodes by which addresses they join this one, and, if it is the founder's, how they vote."""
        if (friends := peer.output / FRIENDS_FILE).exists():  # all nodes are the user's own
            founder = IdentityKeys(Identity(peer.identity or peer.output / "identity.key"))
            link, manifest = JoinLink.parse(friends.read_text()), ModelFolder(peer.output).manifest
            write_friends_link(self.path / FRIENDS_FILE, link, founder, manifest.digest, MAX_SEATS - 1)
        if addresses:
            with write_atomic(self._addresses / self._name) as file:
                file.write("".join(f"{address}\n" for address in addresses).encode())

    def withdraw(self) -> None:
        """Take this node's addresses back."""
        (self._addresses / self._name).unlink(missing_ok=True)

    def cede(self) -> None:
        """Let another node found the run, or find the same fault, instead of waiting for this one."""
        (self.path / FOUNDER).unlink(missing_ok=True)

    def finish(self) -> None:
        """Tell nodes that are started later that nothing is left to do."""
        (self.path / FINISHED).touch()

    def _founder(self) -> str:
        """Return the name of the node that founds the run: this one, if none has been before it."""
        lock = self.path / FOUNDER
        while True:
            with contextlib.suppress(FileExistsError):
                lock.symlink_to(self._name)  # a link appears at once and with its text, on network file systems too
            with contextlib.suppress(FileNotFoundError):  # ceded meanwhile
                return str(lock.readlink())

    def _listening(self) -> list[str]:
        """Return addresses of other nodes' peers that accept connections; files of killed peers stay behind."""
        files = [
            path for path in self._addresses.iterdir() if path.name != self._name and not path.name.startswith(".")
        ]
        random.shuffle(files)  # so that not all call the same
        found: list[str] = []
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # withdrawn meanwhile
                found += [address for address in file.read_text().splitlines() if _accepts(address)]
            if len(found) >= MAX_INITIAL_PEERS:
                break
        return found[:MAX_INITIAL_PEERS]


def _accepts(address: str) -> bool:
    """Tell whether something listens at a multiaddr."""
    if (match := ADDRESS.fullmatch(address)) is None:
        return False
    try:
        socket.create_connection((match[1], int(match[2])), timeout=DIAL_SECONDS).close()
    except OSError:
        return False
    return True
