"""A peer's port: whether it is free, and that the router forwards it by UPnP while the peer runs."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

from spes_p2p.errors import ConfigError

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
EVERY_INTERFACE = "*"
"""In place of an address to listen on: all interfaces, IPv4 and IPv6."""
SEARCH_MS = 2000
LEASE_SECONDS = 7 * 86_400
"""Longest time that a mapping outlives a peer that was killed; some routers keep none longer."""
RENEW_SECONDS = 3600.0
"""Interval at which the mapping is asked for again: it ends with its lease, and when the router starts anew."""
STOP_SECONDS = 10.0
PROTOCOLS = ("TCP", "UDP")


def check_port(host: str, port: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    """Return a port that is free at an address: `port`, or any if that is 0. p2pd's own message says less.

    Raises:
        ConfigError: it is occupied, or `host` is no address of this machine.
    """
    is_ip6 = ":" in host
    where = f"[{host}]:{port}" if is_ip6 else f"{host}:{port}"
    try:
        with socket.socket(socket.AF_INET6 if is_ip6 else socket.AF_INET, kind) as probe:
            if kind == socket.SOCK_STREAM:  # with UDP two sockets would share the port
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_ip6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as p2pd does
            probe.bind((host, port))
            return probe.getsockname()[1]
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {where}: {error.strerror}; choose another --host or --port (docs/trouble.md#port)"
        ) from error


@contextlib.contextmanager
def mapped_port(port: int) -> Iterator[str]:
    """Have the router forward a port, TCP and UDP, while the block runs.

    Args:
        port: The port, outside and on this machine.

    Yields:
        The router's address outside, as the router tells it: others must confirm that it leads here.

    Raises:
        ConfigError: miniupnpc is not installed, or no router forwards the port.
    """
    if importlib.util.find_spec("miniupnpc") is None:
        raise ConfigError("--map-port needs miniupnpc; run: pip install 'spes-p2p[upnp]', or ./scripts/setup.sh upnp")
    import miniupnpc

    router: Any = miniupnpc.UPnP()
    router.discoverdelay = SEARCH_MS
    with contextlib.ExitStack() as closing:
        try:
            router.discover()
            router.selectigd()
            outside = router.externalipaddress()
            for protocol in PROTOCOLS:
                _map(router, port, protocol)
                closing.callback(_unmap, router, port, protocol)
        except Exception as error:  # miniupnpc raises nothing else
            raise ConfigError(
                f"--map-port: the router forwards no port {port}: {error}; switch UPnP on there, choose another "
                f"--port, or forward the port by hand and drop --map-port"
            ) from error
        log.info("the router forwards port %d of %s to this machine", port, outside)
        ended = threading.Event()
        renewing = threading.Thread(target=_renew, args=(router, port, ended), name="port-map", daemon=True)
        renewing.start()
        closing.callback(renewing.join, STOP_SECONDS)
        closing.callback(ended.set)
        yield outside


def _map(router: Any, port: int, protocol: str) -> None:
    router.addportmapping(port, protocol, router.lanaddr, port, "spes", "", LEASE_SECONDS)


def _renew(router: Any, port: int, ended: threading.Event) -> None:
    while not ended.wait(RENEW_SECONDS):
        for protocol in PROTOCOLS:
            try:
                _map(router, port, protocol)
            except Exception as error:  # noqa: BLE001 - miniupnpc raises nothing else; the next time may succeed
                log.warning("the router does not renew that it forwards %s port %d: %s", protocol, port, error)


def _unmap(router: Any, port: int, protocol: str) -> None:
    try:
        router.deleteportmapping(port, protocol)
    except Exception as error:  # noqa: BLE001 - miniupnpc raises nothing else; the lease ends by itself
        log.warning("the router goes on forwarding %s port %d for up to 7 days: %s", protocol, port, error)
