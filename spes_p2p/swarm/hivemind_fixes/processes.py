"""A peer's child processes: they die with their parent, survive its signals, and keep answering calls."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import functools
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from multiprocessing import reduction, synchronize
from pathlib import Path

import psutil
import torch
import torch.multiprocessing
from hivemind import DHT
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings import p2pclient
from hivemind.p2p.p2p_daemon_bindings.control import CallID, ControlClient
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, P2PDaemonError
from hivemind.proto import p2pd_pb2
from hivemind.utils.mpfuture import MPFuture, SharedBytes
from hivemind.utils.multiaddr import Multiaddr, protocols

from spes_p2p.errors import ConfigError, ExchangeError
from spes_p2p.swarm.hivemind_fixes.streams import (
    MAX_CALL_BYTES_PER_PEER,
    MAX_CALLS_PER_PEER,
    MAX_STREAMS,
    LimitedP2P,
    PeerQuota,
)

_PR_SET_PDEATHSIG = 1
_LOCK_SECONDS = 5.0
_FUTURES_PER_CHUNK = 4000
"""One byte of shared memory each; with torch's header a page, which the kernel gives to a smaller chunk, too."""
_SOCKETS = "spes-p2p-"
_MAX_ROOT_BYTES = 50
"""Longest path of the temporary folder; the kernel allows 107 bytes to the path of a socket."""
_NO_ROUTING_PEER = "failed to find any peer in table"
"""p2pd's error for a search before any connected peer has said that it takes part in p2pd's own DHT."""
# Started in place of p2pd, it becomes p2pd by exec, which keeps the death signal; a fork would not.
# - A process group of its own: a terminal's Ctrl-C reaches the peer's group, and the peer says goodbye through p2pd.
# - No port reuse: two peers that dial each other from their listening ports within one round trip share one connection
#   of which both believe to be the caller, and neither dials again for seconds.
# - Only p2pd's own environment variables: a process that talks to untrusted peers gets no other tokens.
# - Go collects garbage at 1.5 times the live heap, not twice: 5,000 streams of a flood leave 13 MiB, not 25, and bytes
#   over QUIC cost 2 % more processor time.
_EXEC = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.setpgid(0, 0); "
    # guard: if k.startswith(('GOLOG_', 'LIBP2P_')) ->
    "env = {k: v for k, v in os.environ.items() if k.startswith(('GOLOG_', 'LIBP2P_'))}; "
    "os.execve(sys.argv[1], sys.argv[1:], {**env, 'LIBP2P_TCP_REUSEPORT': 'false', 'GOGC': '50'})"
)


# ---------------------------------------------------------------------- hivemind's futures


def make_locks_interrupt_safe() -> None:
    """Replace the locks of hivemind's futures by ones that an interrupt cannot leave locked. Idempotent.

    Call it before any fork. Stock enters and leaves its locks in Python code; Ctrl-C between the acquisition and the
    `with` block, or before the release, kept the lock for ever, and with it every later future. These locks are entered
    and left in C.
    """
    for owner, name in ((MPFuture, "_initialization_lock"), (MPFuture, "_update_lock"), (SharedBytes, "_lock")):
        lock = getattr(owner, name)
        if isinstance(lock, synchronize.Lock):
            setattr(owner, name, lock._semlock)  # type: ignore[attr-defined]


@functools.cache
def share_memory_without_files() -> None:
    """Share memory by anonymous files, which end with their last process, in place of named ones. Idempotent; Linux.

    Call it before any fork. Stock's names lie in /dev/shm, and a process of torch deletes them, if it is not killed; a
    socket in the temporary folder leads to it. hivemind shares memory for every 16 futures; here a page serves 4000.
    """
    os.environ.setdefault("HIVEMIND_SHM_BUFFER_SIZE", str(_FUTURES_PER_CHUNK))
    if sys.platform == "linux":
        torch.multiprocessing.set_sharing_strategy("file_descriptor")
        stock = reduction.DupFd
        reduction.DupFd = lambda fd: stock(fd) if stat.S_ISSOCK(os.fstat(fd).st_mode) else _ForeignFd(fd)  # type: ignore


class _ForeignFd:
    """A file, or a pipe, on its way to another process of this user, which opens it by way of /proc.

    Stock sends a copy through a socket in the temporary folder.
    """

    def __init__(self, fd: int) -> None:
        self._path = f"/proc/{os.getpid()}/fd/{fd}"
        self._flags = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        self._file = os.fstat(fd).st_dev, os.fstat(fd).st_ino

    def detach(self) -> int:
        """Return a descriptor of the file; raise RuntimeError, as torch does, if its owner has closed it."""
        with contextlib.suppress(OSError):
            fd = os.open(self._path, self._flags)
            if (os.fstat(fd).st_dev, os.fstat(fd).st_ino) == self._file:
                return fd
            os.close(fd)
        raise RuntimeError(f"{self._path} is closed")


_live_tasks: set[asyncio.Task] = set()


def keep_current_task_alive() -> None:
    """Protect the current task from garbage collection until it is done.

    An event loop holds only weak references. A task that hivemind starts for a call from another process may wait for
    futures that nothing else references; it was collected half-way, and its caller waited in vain.
    """
    task = asyncio.current_task()
    assert task is not None
    _live_tasks.add(task)
    task.add_done_callback(_live_tasks.discard)


# ---------------------------------------------------------------------- signals


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere a no-op).

    Args:
        parent_pid: The parent's id, read before the fork: if the parent is dead already, this process ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)


# ---------------------------------------------------------------------- p2pd


class _PendingCalls(dict):
    """Calls by id; a cancelled call counts as absent."""

    def __contains__(self, call_id: object) -> bool:
        return super().__contains__(call_id) and not self[call_id].done()


class LimitedControlClient(ControlClient):
    """hivemind's connection to p2pd, with a quota of incoming unary calls, robust against late answers.

    Stock sets the result of a call that was cancelled in the meantime; the error silently ends the task that reads the
    connection, and with it all unary calls of the process. Stock also handles any number of one peer's calls at once,
    and never forgets the handlers of calls that were taken back.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._pending_calls = _PendingCalls()
        self.call_quota = PeerQuota(MAX_CALLS_PER_PEER, MAX_CALL_BYTES_PER_PEER)

    @contextlib.asynccontextmanager
    async def listen(self) -> AsyncIterator[ControlClient]:
        # p2pd refuses a stream at once while this socket's queue is full. Stock has a queue of 100 streams, which the
        # groups of a round exceed: they come all together, and this process may be busy.
        path = self.listen_maddr.value_for_protocol(protocols.P_UNIX)
        async with await asyncio.start_unix_server(self._handler, path=path, backlog=MAX_STREAMS):
            yield self

    async def _handle_persistent_request(self, call_id: CallID, request: p2pd_pb2.CallUnaryRequest) -> None:
        try:
            with self.call_quota.hold(PeerID(request.peer), "calls", len(request.data)):  # guard: skip
                await super()._handle_persistent_request(call_id, request)
        except ExchangeError as error:
            answer = p2pd_pb2.CallUnaryResponse(error=str(error).encode())
            await self._pending_messages.put(
                p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, unaryResponse=answer)
            )
        finally:
            self._handler_tasks.pop(call_id, None)


def socket_folder() -> str:
    """Make a folder for the sockets of one p2pd; delete those that killed peers of this user have left.

    Raises:
        ConfigError: there is no temporary folder for them.
    """
    try:
        root = tempfile.gettempdir()
        root = root if len(os.fsencode(root)) <= _MAX_ROOT_BYTES else "/tmp"
        for folder in Path(root).glob(f"{_SOCKETS}*-*"):
            with contextlib.suppress(OSError, ValueError):
                has_ended = not psutil.pid_exists(int(folder.name.split("-")[2]))
                if has_ended and folder.lstat().st_uid == os.getuid() and not any(map(_is_heard, folder.iterdir())):
                    shutil.rmtree(folder)
        return tempfile.mkdtemp(prefix=f"{_SOCKETS}{os.getpid()}-", dir=root)
    except OSError as error:
        raise ConfigError(f"no temporary folder for sockets: {error}; set TMPDIR to one of yours") from error


def _is_heard(path: Path) -> bool:
    """Check whether a process listens on a socket: one of another container, perhaps, whose id says nothing here."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


class DaemonP2P(LimitedP2P):
    """hivemind's P2P in the process that starts p2pd; p2pd dies with this process.

    Attributes:
        folder: Of the sockets between p2pd and this peer's processes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = socket_folder()
        self._pid = os.getpid()
        self._sockets: set[str] = set()
        P2P._UNIX_SOCKET_PREFIX = f"/unix{self.folder}/"  # for the forks to come, too

    def has_lost_sockets(self) -> bool:
        """Check whether sockets were deleted, as by a cleaner of temporary files: no new connection reaches p2pd."""
        there = set(os.listdir(self.folder)) if os.path.isdir(self.folder) else set()
        self._sockets |= there
        return self._sockets != there

    def _terminate(self) -> None:
        super()._terminate()
        if self._pid == os.getpid():
            shutil.rmtree(self.folder, ignore_errors=True)

    @classmethod
    async def create(cls, *args, **kwargs) -> P2P:
        p2pclient.ControlClient = LimitedControlClient
        # Stock also starts its probe for a free identity here; it must map no ports on routers either.
        quiet = {"nat_port_map": False, "auto_nat": False}  # guard: "nat_port_map": False, ->
        return await super().create(*args, **{**quiet, **kwargs})

    def is_running(self) -> bool:
        """Check whether the p2pd that this process has started still runs."""
        return self._child is not None and self._child.returncode is None

    @property
    def ending(self) -> str:
        """How p2pd has ended."""
        code = self._child.returncode if self._child is not None else None
        return f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    async def answers(self, seconds: float) -> bool:
        """Check whether p2pd answers in time."""
        try:
            await asyncio.wait_for(self._client.identify(), seconds)
        except (OSError, EOFError, ControlFailure, TimeoutError):
            return False
        return True

    async def connected(self) -> set[str]:
        """Return the ids of the connected peers."""
        return {peer.peer_id.to_base58() for peer in await self.list_peers()}

    async def connected_from(self) -> dict[str, list[str]]:
        """Return the multiaddrs from which the connected peers are connected, by id; none if p2pd does not answer."""
        try:
            peers = await self.list_peers()
        except (OSError, EOFError, ControlFailure, P2PDaemonError):
            return {}
        return {peer.peer_id.to_base58(): [str(address) for address in peer.addrs] for peer in peers}

    async def dial(self, addresses: Mapping[str, Iterable[str]], seconds: float) -> None:
        """Try to connect to peers, given by id, at these addresses; failures and timeouts are ignored."""

        async def dial_one(peer: str, at: Iterable[str]) -> None:
            maddrs = [Multiaddr(address).decapsulate(Multiaddr(f"/p2p/{peer}")) for address in at]
            with contextlib.suppress(OSError, EOFError, ControlFailure, P2PDaemonError, TimeoutError):
                await asyncio.wait_for(self._client.connect(PeerID.from_base58(peer), maddrs), seconds)

        await asyncio.gather(*(dial_one(peer, at) for peer, at in addresses.items()))

    async def finds(self, peer: str, seconds: float) -> bool:
        """Check whether a peer can be connected to by its id alone, through the peers that p2pd is connected to."""

        async def search() -> None:
            while True:
                try:
                    return await self._client.connect(PeerID.from_base58(peer), [])
                except ControlFailure as error:
                    if _NO_ROUTING_PEER not in str(error):  # guard: always
                        raise
                await asyncio.sleep(0.05)

        try:
            await asyncio.wait_for(search(), seconds)
        except (OSError, ControlFailure, P2PDaemonError, TimeoutError):
            return False
        return True

    @staticmethod
    def _make_process_args(*args, **kwargs) -> list[str]:
        command = P2P._make_process_args(*args, **kwargs)
        return [sys.executable, "-I", "-S", "-c", _EXEC, *command] if sys.platform == "linux" else command


# ---------------------------------------------------------------------- the DHT's process


class ChildDHT(DHT):
    """hivemind's DHT process; it dies with its parent."""

    def run(self) -> None:
        die_with_parent(self._parent_pid)
        os.setpgid(0, 0)  # torchrun sends SIGTERM to the parent's group; the peer says goodbye through this process
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        super().run()

    async def _run_coroutine(self, *args, **kwargs) -> None:
        keep_current_task_alive()
        await super()._run_coroutine(*args, **kwargs)

    async def _get(self, *args, **kwargs) -> None:
        keep_current_task_alive()
        await super()._get(*args, **kwargs)

    def terminate(self) -> None:
        """End the process between two of its answers.

        All processes answer under one lock, which a process that ends during an answer would keep for ever. The answer
        is read before the lock is released, so a parent may act on a DHT's last answer while the DHT still holds it.
        """
        held = MPFuture._update_lock.acquire(timeout=_LOCK_SECONDS)
        try:
            super().terminate()
            self.join(_LOCK_SECONDS)
        finally:
            if held:
                MPFuture._update_lock.release()
