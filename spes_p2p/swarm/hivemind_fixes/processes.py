"""Child processes that do not outlive their parent, not even when it is killed, and that do not go deaf."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
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
from hivemind.utils.multiaddr import Multiaddr

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.hivemind_fixes.streams import MAX_CALL_BYTES_PER_PEER, MAX_CALLS_PER_PEER, LimitedP2P, PeerQuota

_PR_SET_PDEATHSIG = 1
_ANSWER_SECONDS = 5.0
_ASK_SECONDS = 0.05
_SHARE_TRIES = 60
"""Seconds for which torch's manager of shared memory may say nothing; it is given one at a time."""
_NOBODY_TO_ASK = "failed to find any peer in table"
"""What p2pd says to a search until those whom it has met have told it that they take part in its own DHT."""
# Runs in place of p2pd until it becomes p2pd: the death signal survives exec, but not fork.
# Its process group is its own: a terminal's Ctrl-C reaches a whole group, and a peer says goodbye through p2pd.
# p2pd is told to dial from other ports than it listens on: two peers that dial each other within one round trip
# from the ports that they listen on get one connection, of which both take themselves for the caller, and neither tries
# again for seconds.
# Of the environment it gets what is meant for it: the rest, tokens of other services for example, is nothing for a
# process that talks to strangers.
_EXEC = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.setpgid(0, 0); "
    "env = {k: v for k, v in os.environ.items() if k.startswith(('GOLOG_', 'LIBP2P_'))}; "  # guard: daemon-environment
    "os.execve(sys.argv[1], sys.argv[1:], {**env, 'LIBP2P_TCP_REUSEPORT': 'false'})"
)


def make_locks_interrupt_safe() -> None:
    """Give hivemind's futures locks that no interrupt leaves behind, before anything is forked. Idempotent.

    Python code enters and leaves stock's, and Ctrl-C can end that code after the lock was taken, or before it was given
    back: whoever made a future from then on waited for ever, and the peer with it. These are entered and left in C.
    """
    for owner, name in ((MPFuture, "_initialization_lock"), (MPFuture, "_update_lock"), (SharedBytes, "_lock")):
        lock = getattr(owner, name)
        if isinstance(lock, synchronize.Lock):
            setattr(owner, name, lock._semlock)  # type: ignore[attr-defined]


def reset_inherited_futures() -> None:
    """Begin anew with hivemind's futures, in a fork that is a peer of its own.

    The locks of before are its parent's and all other forks': whoever is killed amid an answer keeps them.
    """
    MPFuture.reset_backend()
    make_locks_interrupt_safe()


@functools.cache
def retry_memory_sharing() -> None:
    """Have torch ask its manager of shared memory again where that is silent for a second. Idempotent.

    hivemind shares some bytes for every 16 futures, for each averaging, and wherever one of them goes to another
    process. The manager is a process too: where a machine stood still, or has too much to do, whoever shares may be
    back before it, and died of the second in which nothing came. An answer that comes late is the next question's.
    """
    storage = torch.UntypedStorage
    storage._share_filename_cpu_ = _asking_again(storage._share_filename_cpu_)  # type: ignore[method-assign]
    opening = _asking_again(storage._new_shared_filename_cpu)
    storage._new_shared_filename_cpu = staticmethod(opening)  # type: ignore[method-assign,assignment]


def _asking_again(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def asking_again(*args: Any, **kwargs: Any) -> Any:
        for _ in range(_SHARE_TRIES - 1):
            try:
                return stock(*args, **kwargs)
            except RuntimeError as error:
                if "timed out" not in str(error):
                    raise
        return stock(*args, **kwargs)

    return asking_again


_held: set[asyncio.Task] = set()


def keep_current_task_alive() -> None:
    """Let no garbage collection end the current task.

    A loop holds only those that something it holds will wake. What hivemind starts for a call from another process may
    wait for futures that nobody holds: such a task was collected amid its work, and its caller waited in vain.
    """
    task = asyncio.current_task()
    assert task is not None
    _held.add(task)
    task.add_done_callback(_held.discard)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere a no-op).

    Args:
        parent_pid: The parent's id as it was before the fork, so that a parent already dead is noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)


def leave_process_group() -> None:
    """Leave the parent's process group, to which torchrun sends SIGTERM: without this process nobody says goodbye."""
    os.setpgid(0, 0)


class _UnansweredCalls(dict):
    """Calls by id, of which those given up count as gone."""

    def __contains__(self, call_id: object) -> bool:
        return super().__contains__(call_id) and not self[call_id].done()


class LimitedControlClient(ControlClient):
    """hivemind's connection to p2pd, which outlives an answer that comes the moment its caller gives up.

    Stock sets the result of the cancelled call; that kills, silently, the task that reads the connection, and with it
    every unary call to and from this process for good. Stock also works on any number of one peer's calls at once, and
    remembers for ever those that are taken back.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._pending_calls = _UnansweredCalls()
        self.calls = PeerQuota(MAX_CALLS_PER_PEER, MAX_CALL_BYTES_PER_PEER)

    async def _handle_persistent_request(self, call_id: CallID, request: p2pd_pb2.CallUnaryRequest) -> None:
        try:
            with self.calls.take(PeerID(request.peer), "calls", len(request.data)):  # guard: calls-per-peer
                await super()._handle_persistent_request(call_id, request)
        except ExchangeError as error:
            answer = p2pd_pb2.CallUnaryResponse(error=str(error).encode())
            await self._pending_messages.put(
                p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, unaryResponse=answer)
            )
        finally:
            self._handler_tasks.pop(call_id, None)


class DaemonP2P(LimitedP2P):
    """hivemind's P2P with a p2pd that dies with us; this process and its forks talk to p2pd patiently."""

    @classmethod
    async def create(cls, *args, **kwargs) -> P2P:
        p2pclient.ControlClient = LimitedControlClient
        # For the probe that stock starts to see whether an identity is free, too: no router's ports are mapped for it.
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
        """Return the ids of those with whom there is a connection."""
        return {peer.peer_id.to_base58() for peer in await self.list_peers()}

    async def dial(self, addresses: Mapping[str, Iterable[str]], seconds: float) -> None:
        """Try to connect to peers, by id, at these addresses; whoever does not answer in time is let be."""

        async def dial_one(peer: str, at: Iterable[str]) -> None:
            maddrs = [Multiaddr(address).decapsulate(Multiaddr(f"/p2p/{peer}")) for address in at]
            with contextlib.suppress(OSError, ControlFailure, P2PDaemonError, TimeoutError):
                await asyncio.wait_for(self._client.connect(PeerID.from_base58(peer), maddrs), seconds)

        await asyncio.gather(*(dial_one(peer, at) for peer, at in addresses.items()))

    async def finds(self, peer: str, seconds: float) -> bool:
        """Tell whether a peer is there, by its id alone, as soon as p2pd has somebody to ask."""

        async def search() -> None:
            while True:
                try:
                    return await self._client.connect(PeerID.from_base58(peer), [])
                except ControlFailure as error:
                    if _NOBODY_TO_ASK not in str(error):  # guard: somebody-to-ask
                        raise
                await asyncio.sleep(_ASK_SECONDS)

        try:
            await asyncio.wait_for(search(), seconds)
        except (OSError, ControlFailure, P2PDaemonError, TimeoutError):
            return False
        return True

    @staticmethod
    def _make_process_args(*args, **kwargs) -> list[str]:
        command = P2P._make_process_args(*args, **kwargs)
        return [sys.executable, "-I", "-S", "-c", _EXEC, *command] if sys.platform == "linux" else command


class ChildDHT(DHT):
    """hivemind's DHT process, dying with us."""

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

        All processes answer under one lock, which one that ends amid an answer would keep for ever. Its answer is read
        before the lock is released, so a parent that acts on the last word of a DHT is early enough to do that.
        """
        held = MPFuture._update_lock.acquire(timeout=_ANSWER_SECONDS)
        try:
            super().terminate()
            self.join(_ANSWER_SECONDS)
        finally:
            if held:
                MPFuture._update_lock.release()


class BlockingConnection:
    """One end of a pipe that an event loop watches.

    To watch it, uvloop makes it non-blocking. Messages over 16 KiB are written in two pieces, and hivemind's averager
    reads one as soon as its first piece is there: `recv` raised EAGAIN, and the process took the rest for a message.

    Args:
        connection: That end.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def poll(self) -> bool:
        return self._connection.poll()

    def send(self, message: object) -> None:
        self._connection.send(message)

    def recv(self) -> object:
        """Return the next message, waiting for the rest of one that has begun."""
        os.set_blocking(self._connection.fileno(), True)
        return self._connection.recv()
