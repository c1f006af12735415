"""An internet of one's own: peers in network namespaces, and between them links with rates, delays and cuts.

    with TestBed(peers=4, mbit=100, rtt_ms=40) as bed:
        process = bed.run_in(0, function, argument)
        bed.cut(3)

Nothing but the namespaces sees this traffic. Needs Linux, root, /dev/net/tun, gcc and iproute2: `available` says what
is missing. The packets go through `wan/wanemu.c`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.routers import Router, connect_home, drop, routers_available, set_rules
from spes_p2p.errors import ConfigError, SpesError
from spes_p2p.swarm.hivemind_fixes.processes import die_with_parent

SOURCE = Path(__file__).resolve().parent / "wan" / "wanemu.c"
NAMESPACES = Path("/var/run/netns")
TUN = Path("/dev/net/tun")
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
CONGESTION = "cubic"
"""TCP's congestion control in the namespaces: what most machines have."""
TOOLS = ("gcc", "ip")
PREFIX = "spes"
DEVICE = "wan0"
COMMAND_SECONDS = 60.0
QUEUE_MS = 60.0
"""Longest wait in an uplink or a downlink before packets are dropped: what a home router buffers, or less."""
PRIORITY = 10
"""Real-time priority of the emulator: else the load of the measured processes shows as delay of the network."""
_CLONE_NEWNET = 0x40000000


class Traffic(NamedTuple):
    """Bytes at a peer's network device since the bed was made, headers included."""

    received: int
    sent: int

    def __sub__(self, earlier: Traffic) -> Traffic:  # type: ignore[override]
        return Traffic(self.received - earlier.received, self.sent - earlier.sent)


class TestBed:
    """Network namespaces, one to a peer, joined by emulated links; leaving the context removes all of it.

    Several beds may exist at once, each with the same addresses and a traffic of its own. A peer with a router lives in
    a namespace of its own behind it (`routers.py`); all of these have the same private address.

    Args:
        peers: Number of namespaces.
        mbit: What each peer can send, and what it can receive, in 10^6 bits per second.
        rtt_ms: Round-trip time between any two, on empty links.
        routers: Kinds of the routers of peers that have one.

    Raises:
        ConfigError: this machine cannot have a bed.
    """

    __test__ = False  # nothing that pytest should collect

    def __init__(
        self,
        peers: int,
        *,
        mbit: float = 100.0,
        rtt_ms: float = 40.0,
        routers: Mapping[int, Router] | None = None,
    ) -> None:
        self._routers = dict(routers or {})
        if reason := available() or (routers_available() if self._routers else None):
            raise ConfigError(f"no test bed on this machine: {reason}")
        self.peers = peers
        self._links = [f"{mbit:g}:{mbit:g}:{rtt_ms:g}:0"] * peers  # up, down, round trip, losses
        self._prefix = ""
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> TestBed:
        with contextlib.ExitStack() as closing:
            self._prefix = closing.enter_context(_fresh_prefix())
            for peer in range(self.peers):
                closing.enter_context(_namespace(self._name(peer)))
            folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="testbed-")))
            _run("gcc", "-O2", "-o", str(folder / "wanemu"), str(SOURCE))
            self._emulator = closing.enter_context(self._emulate(folder / "wanemu"))
            with _allowed():
                for peer in range(self.peers):
                    self._set_up(peer)
                for peer, kind in self._routers.items():
                    closing.enter_context(_namespace(self.namespace(peer)))
                    self._set_up_home(peer, kind)
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.close()

    def address(self, peer: int) -> str:
        """Return a peer's IPv4 address; its router's, if it has one."""
        return f"10.77.0.{peer + 1}"

    def host(self, peer: int) -> str | None:
        """Return the address for a peer to listen on; None for one behind a router, which takes no calls."""
        return None if peer in self._routers else self.address(peer)

    def namespace(self, peer: int) -> str:
        """Return the name of a peer's network namespace, for `enter_namespace`."""
        return f"{self._prefix}home{peer}" if peer in self._routers else self._name(peer)

    def run_in(self, peer: int, function: Callable[..., Any], *args: Any) -> ForkProcess:
        """Run a function in a fork of this process, in a peer's namespace; the fork dies with the calling thread."""
        return start_process(functools.partial(self._inside, peer, function), *args)

    def cut(self, peer: int) -> None:
        """Drop every packet from and to a peer without any notice, like a pulled cable."""
        self._tell(f"cut {peer}")

    def heal(self, peer: int) -> None:
        """End a cut."""
        self._tell(f"heal {peer}")

    def hide(self, peer: int) -> None:
        """Block incoming connections to a peer, like a home router; connections that it opens work."""
        self._tell(f"hide {peer}")

    def part(self, one: int, other: int) -> None:
        """Drop every packet between two peers behind routers without any notice."""
        for here, there in ((one, other), (other, one)):
            drop(self._name(here), self.address(there))

    def bytes(self) -> list[Traffic]:
        """Return what went through each peer's device since the bed was made."""
        return [self._traffic(peer) for peer in range(self.peers)]

    def _traffic(self, peer: int) -> Traffic:
        (device,) = json.loads(_run("ip", "-n", self._name(peer), "-j", "-s", "link", "show", DEVICE))
        return Traffic(device["stats64"]["rx"]["bytes"], device["stats64"]["tx"]["bytes"])

    def _inside(self, peer: int, function: Callable[..., Any], *args: Any) -> None:
        enter_namespace(self.namespace(peer))
        function(*args)

    def _name(self, peer: int) -> str:
        return f"{self._prefix}{peer}"

    def _tell(self, line: str) -> None:
        self._emulator.stdin.write(f"{line}\n".encode())  # type: ignore[union-attr]
        self._emulator.stdin.flush()  # type: ignore[union-attr]

    @contextlib.contextmanager
    def _emulate(self, program: Path) -> Iterator[subprocess.Popen]:
        command = [str(program), self._prefix, f"{QUEUE_MS:g}", "1", "0", *self._links]
        dies = functools.partial(die_with_parent, os.getpid())
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=dies) as process:
            try:
                assert process.stdout and process.stderr
                answered, _, _ = select.select([process.stdout], [], [], COMMAND_SECONDS)
                if not answered or process.stdout.readline() != b"ready\n":
                    process.kill()
                    raise SpesError(f"the emulated internet did not start: {process.stderr.read().decode().strip()}")
                with contextlib.suppress(PermissionError):  # then under load it is less even
                    os.sched_setscheduler(process.pid, os.SCHED_FIFO, os.sched_param(PRIORITY))
                yield process
            finally:
                process.kill()

    def _set_up(self, peer: int) -> None:
        name = self._name(peer)
        _run("ip", "-n", name, "addr", "add", f"{self.address(peer)}/24", "dev", DEVICE)
        _run("ip", "-n", name, "link", "set", DEVICE, "txqueuelen", "2000", "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        self._configure(name)

    def _set_up_home(self, peer: int, kind: Router) -> None:
        connect_home(self._name(peer), self.namespace(peer))
        self._configure(self.namespace(peer))
        set_rules(self._name(peer), kind, DEVICE)

    def _configure(self, name: str) -> None:
        configuring = start_process(_configure, name)
        configuring.join(COMMAND_SECONDS)
        if configuring.exitcode != 0:
            raise SpesError(f"namespace {name} cannot be configured")


def available() -> str | None:
    """None where this machine can make test beds, else the reason why not."""
    if os.name != "posix" or not NAMESPACES.parent.is_dir() or not hasattr(os, "sched_setscheduler"):
        return "it is no Linux machine"
    if os.geteuid() != 0:
        return "namespaces take root"
    if not TUN.exists():
        return f"it has no {TUN}"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"it lacks {' and '.join(missing)}; install gcc and iproute2" if missing else None


def start_process(function: Callable[..., Any], *args: Any) -> ForkProcess:
    """Run a function in a fork of this process, which dies with the calling thread."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_as_child, args=(os.getpid(), function, *args))
    process.start()
    return process


def _as_child(parent_pid: int, function: Callable[..., Any], *args: Any) -> None:
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends its children in order
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    function(*args)


def enter_namespace(name: str) -> None:
    """Move the calling thread, and all that it starts, into a network namespace; Python has `os.setns` from 3.12."""
    library = ctypes.CDLL(None, use_errno=True)
    with (NAMESPACES / name).open("rb") as file:
        if library.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {name}")


def _configure(name: str) -> None:
    enter_namespace(name)
    for setting, value in (
        ("ipv4/tcp_congestion_control", CONGESTION),
        ("ipv4/tcp_no_metrics_save", "1"),  # one round must not teach TCP how the next one starts
        ("ipv4/ip_forward", "1"),  # where it is a router
        ("ipv6/conf/all/disable_ipv6", "1"),
    ):
        (Path("/proc/sys/net") / setting).write_text(value)


@contextlib.contextmanager
def _fresh_prefix() -> Iterator[str]:
    """Yield what no other bed's namespaces begin with; remove those that dead processes have left."""
    for path in NAMESPACES.glob(f"{PREFIX}*-*"):
        pid = path.name.removeprefix(PREFIX).split("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            _run("ip", "netns", "del", path.name)
    taken = {path.name for path in NAMESPACES.glob(f"{PREFIX}{os.getpid()}-*")}
    prefixes = (f"{PREFIX}{os.getpid()}-{number}-" for number in range(len(taken) + 1))
    yield next(prefix for prefix in prefixes if not any(name.startswith(prefix) for name in taken))


@contextlib.contextmanager
def _namespace(name: str) -> Iterator[None]:
    _run("ip", "netns", "add", name)
    try:
        yield
    finally:
        _run("ip", "netns", "del", name)


@contextlib.contextmanager
def _allowed() -> Iterator[None]:
    """Let namespaces choose the congestion control; only choosing takes permission, so it is withdrawn at once."""
    with ALLOWED.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = file.read().strip()
        try:
            if CONGESTION not in before.split():
                ALLOWED.write_text(f"{before} {CONGESTION}")
            yield
        finally:
            ALLOWED.write_text(before)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    if done.returncode:
        raise SpesError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
