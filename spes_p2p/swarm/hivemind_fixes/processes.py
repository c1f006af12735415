"""A peer's child processes: they die with their parent, survive its signals, and keep answering calls."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from multiprocessing import synchronize
from multiprocessing.connection import Connection
from typing import Any

import torch
from hivemind import DHT
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings import p2pclient
from hivemind.p2p.p2p_daemon_bindings.control import CallID, ControlClient
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, P2PDaemonError
from hivemind.proto import p2pd_pb2
from hivemind.utils.mpfuture import MPFuture, SharedBytes
from hivemind.utils.multiaddr import Multiaddr, protocols

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.hivemind_fixes.streams import (
    MAX_CALL_BYTES_PER_PEER,
    MAX_CALLS_PER_PEER,
    MAX_STREAMS,
    LimitedP2P,
    PeerQuota,
)

_PR_SET_PDEATHSIG = 1
_LOCK_SECONDS = 5.0
_SEARCH_PAUSE_SECONDS = 0.05
_SHARE_TRIES = 60
"""Attempts to share memory; torch's manager has one second for each."""
_SHARE_PAUSE_SECONDS = 0.1
_FUTURES_PER_CHUNK = 4000
"""One byte of shared memory each; with torch's header a page, which the kernel gives to a smaller chunk, too."""
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
    "env = {k: v for k, v in os.environ.items() if k.startswith(('GOLOG_', 'LIBP2P_'))}; "  # guard: daemon-environment
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


def reset_inherited_futures() -> None:
    """Give a fork that becomes a peer of its own new locks; its parent's may be held by processes that were killed."""
    MPFuture.reset_backend()
    make_locks_interrupt_safe()


@functools.cache
def retry_memory_sharing() -> None:
    """Send torch's shared-memory manager few requests, again where it is silent for a second. Idempotent.

    Stock hivemind shares memory for every 16 futures; here a page of it serves 4000. It also shares memory for each
    averaging, and for futures sent to other processes. The manager is a process, too: after a machine's standstill, or
    under load, the caller may run before it, and the request fails by a timeout. The next request takes the late
    answer. Other threads run in the pause between the two: torch waits with the interpreter's lock.
    """
    os.environ.setdefault("HIVEMIND_SHM_BUFFER_SIZE", str(_FUTURES_PER_CHUNK))
    storage = torch.UntypedStorage
    storage._share_filename_cpu_ = _retried(storage._share_filename_cpu_)  # type: ignore[method-assign]
    opening = _retried(storage._new_shared_filename_cpu)
    storage._new_shared_filename_cpu = staticmethod(opening)  # type: ignore[method-assign,assignment]


def _retried(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def retried(*args: Any, **kwargs: Any) -> Any:
        for _ in range(_SHARE_TRIES - 1):
            try:
                return stock(*args, **kwargs)
            except RuntimeError as error:
                if "timed out" not in str(error):
                    raise
            threading.Event().wait(_SHARE_PAUSE_SECONDS)
        return stock(*args, **kwargs)

    return retried


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


def leave_process_group() -> None:
    """Leave the parent's process group, to which torchrun sends SIGTERM; the peer says goodbye through this process."""
    os.setpgid(0, 0)


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
            with self.call_quota.hold(PeerID(request.peer), "calls", len(request.data)):  # guard: calls-per-peer
                await super()._handle_persistent_request(call_id, request)
        except ExchangeError as error:
            answer = p2pd_pb2.CallUnaryResponse(error=str(error).encode())
            await self._pending_messages.put(
                p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, unaryResponse=answer)
            )
        finally:
            self._handler_tasks.pop(call_id, None)


class DaemonP2P(LimitedP2P):
    """hivemind's P2P in the process that starts p2pd; p2pd dies with this process."""

    @classmethod
    async def create(cls, *args, **kwargs) -> P2P:
        p2pclient.ControlClient = LimitedControlClient
        # Stock also starts its probe for a free identity here; it must map no ports on routers either.
        quiet = {"nat_port_map": False, "auto_nat": False}  # guard: router-ports
        return await super().create(*args, **{**quiet, **kwargs})

    def is_running(self) -> bool:
        """Tell whether the p2pd that this process has started still runs."""
        return self._child is not None and self._child.returncode is None

    @property
    def ending(self) -> str:
        """How p2pd has ended."""
        code = self._child.returncode if self._child is not None else None
        return f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    async def answers(self, seconds: float) -> bool:
        """Tell whether p2pd answers in time."""
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
        """Tell whether a peer can be connected to by its id alone, through the peers that p2pd is connected to."""

        async def search() -> None:
            while True:
                try:
                    return await self._client.connect(PeerID.from_base58(peer), [])
                except ControlFailure as error:
                    if _NO_ROUTING_PEER not in str(error):  # guard: somebody-to-ask
                        raise
                await asyncio.sleep(_SEARCH_PAUSE_SECONDS)

        try:
            await asyncio.wait_for(search(), seconds)
        except (OSError, ControlFailure, P2PDaemonError, TimeoutError):
            return False
        return True

    @staticmethod
    def _make_process_args(*args, **kwargs) -> list[str]:
        command = P2P._make_process_args(*args, **kwargs)
        return [sys.executable, "-I", "-S", "-c", _EXEC, *command] if sys.platform == "linux" else command


# ---------------------------------------------------------------------- the DHT's process, and pipes


class ChildDHT(DHT):
    """hivemind's DHT process; it dies with its parent."""

    def run(self) -> None:
        die_with_parent(self._parent_pid)
        leave_process_group()
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


class BlockingConnection:
    """One end of a pipe that an event loop watches; `recv` waits for the rest of a message.

    uvloop makes a watched pipe non-blocking. Messages over 16 KiB are written in two pieces, and hivemind's averager
    reads as soon as the first is there: `recv` raised EAGAIN, and the rest was later taken for a message.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.fileno = connection.fileno
        self.poll = connection.poll
        self.send = connection.send

    def recv(self) -> object:
        """Return the next message."""
        os.set_blocking(self.fileno(), True)
        return self._connection.recv()
