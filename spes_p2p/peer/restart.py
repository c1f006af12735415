"""A peer whose p2pd has died starts itself anew, under its old id and address, from its last checkpoint.

The DHT holds that p2pd's socket, and a fork of a process that uses a GPU cannot use it: so nothing less
than the whole peer is started again, in the same process and with the same command line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

from spes_p2p.config import PeerConfig
from spes_p2p.config.machine import SEED_SECONDS
from spes_p2p.errors import JoinError
from spes_p2p.peer.output_dir import can_resume
from spes_p2p.peer.termination import Termination
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm

log = logging.getLogger(__name__)

LEAST_SECONDS = 10.0
"""A peer whose p2pd dies sooner than that after it has joined does not start again: it would do so for ever."""

WITH_VALUE = ("--port", "--resume-round")
SWITCHES = tuple(f"--{no}{name}" for name in ("resume", "overwrite", "skip-optimizer") for no in ("", "no-"))
"""Flags of the start that has ended, which do not hold for the next: it goes on from what this one has saved."""


class DaemonDied(Exception):
    """Ends a peer whose p2pd, at this port, or DHT process has died, so many seconds after it joined."""

    def __init__(self, what: str, port: int, seconds: float) -> None:
        super().__init__(what)
        self.port = port
        self.seconds = seconds


@contextlib.contextmanager
def when_daemons_die(swarm: HivemindSwarm, end: Termination) -> Iterator[None]:
    """Interrupt the block when p2pd or the DHT dies, and raise that whatever else the block raised because of it.

    A peer that was asked to end does not start again: the same signal may have ended its daemons.

    Raises:
        DaemonDied: it has.
    """
    began, main, port = time.monotonic(), threading.main_thread().ident, swarm.node.port
    assert main is not None
    swarm.watchdog.on_death(lambda: signal.pthread_kill(main, signal.SIGINT))
    try:
        yield
    except BaseException as error:
        # Training may have met the dead p2pd before the watchdog did.
        is_interrupted = isinstance(error, KeyboardInterrupt) and not swarm.watchdog.death
        if end.is_asked or is_interrupted or not swarm.watchdog.check():
            raise
        raise DaemonDied(swarm.watchdog.death, port, time.monotonic() - began) from error
    finally:
        swarm.watchdog.stop()


def restart(config: PeerConfig, died: DaemonDied, *, num_ranks: int) -> NoReturn:
    """Become a new process of the same command that resumes.

    Raises:
        JoinError: it would not help, or this rank is not the whole peer.
    """
    if num_ranks > 1 or died.seconds < LEAST_SECONDS or not can_resume(config.output):
        raise JoinError(f"{died}; start this peer again with --resume --output {config.output}") from died
    log.warning("%s; starting again with what this peer has kept in %s", died, config.output)
    start_again(died.port)


def start_again(port: int | None = None) -> NoReturn:
    """Become a new process of the same command that resumes; `port` is None for a command that has none."""
    words = resuming_words(sys.orig_argv[1:], port)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0)  # it would outlive this program
    os.execv(sys.executable, [sys.executable, *words])


def resuming_words(words: Sequence[str], port: int | None) -> list[str]:
    """Return a command line that goes on with what this one has begun, at the port that others know."""
    dropped = {*WITH_VALUE, *SWITCHES}
    after = zip(words, ["", *words], strict=False)
    kept = [word for word, before in after if word.split("=")[0] not in dropped and before not in WITH_VALUE]
    if port is not None:
        kept += ["--port", str(port)]
        if not any(word.split("=")[0] == "--seed-seconds" for word in words):
            kept += ["--seed-seconds", f"{SEED_SECONDS:g}"]  # a finished founder that died as it served goes on serving
    return [*kept, "--resume", "--no-overwrite"]
