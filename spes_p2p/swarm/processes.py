"""Child processes that do not outlive their parent, not even when it is killed, and that do not go deaf."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from hivemind import DHT
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings import p2pclient
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.utils.mpfuture import MPFuture

_PR_SET_PDEATHSIG = 1
_ANSWER_SECONDS = 5.0
# Runs in place of p2pd until it becomes p2pd: the death signal survives exec, but not fork.
# p2pd is told to dial from other ports than it listens on: two peers that dial each other within one round trip
# from the ports that they listen on get one connection, of which both take themselves for the caller, and neither tries
# again for seconds.
_EXEC = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.environ['LIBP2P_TCP_REUSEPORT'] = 'false'; "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere a no-op).

    Args:
        parent_pid: The parent's id as it was before the fork, so that a parent already dead is noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)


class _UnansweredCalls(dict):
    """Calls by id, of which those given up count as gone."""

    def __contains__(self, call_id: object) -> bool:
        return super().__contains__(call_id) and not self[call_id].done()


class PatientControlClient(ControlClient):
    """hivemind's connection to p2pd, which outlives an answer that comes the moment its caller gives up.

    Stock sets the result of the cancelled call; that kills, silently, the task that reads the connection, and with it
    every unary call to and from this process for good.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._pending_calls = _UnansweredCalls()


class BoundP2P(P2P):
    """hivemind's P2P with a p2pd that dies with us; this process and its forks talk to p2pd patiently."""

    @classmethod
    async def create(cls, *args, **kwargs) -> P2P:
        p2pclient.ControlClient = PatientControlClient
        return await super().create(*args, **kwargs)

    @staticmethod
    def _make_process_args(*args, **kwargs) -> list[str]:
        command = P2P._make_process_args(*args, **kwargs)
        return [sys.executable, "-I", "-S", "-c", _EXEC, *command] if sys.platform == "linux" else command


class BoundDHT(DHT):
    """hivemind's DHT process, dying with us."""

    def run(self) -> None:
        die_with_parent(self._parent_pid)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        super().run()

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
