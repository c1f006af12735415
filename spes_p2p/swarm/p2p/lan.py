"""Peers of one network tell each other of their runs by multicast DNS, where their owners ask for it.

What a machine of the network says is a hint: a peer's id and the run's founder are checked when it is called.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from spes_p2p.errors import ConfigError

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

log = logging.getLogger(__name__)

SERVICE = "_spes._tcp.local."
FIND_SECONDS = 4.0
MORE_SECONDS = 0.5
"""How long to listen for other peers once one has answered."""
MAX_FOUND = 32
_TCP = re.compile(r"/ip[46]/([0-9a-fA-F:.]+)/tcp/(\d+)(?:/p2p/.*)?")
_PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{40,64}")


def check_lan() -> None:
    """Check before anything is started that zeroconf is installed.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("zeroconf") is None:
        raise ConfigError(
            "--lan needs zeroconf; run: pip install 'spes-p2p[lan]', or ./scripts/setup.sh lan in a checkout"
        )


def _zeroconf(host: str | None) -> Zeroconf:
    """Return a socket for the network of an address; None is all networks of this machine."""
    check_lan()
    from zeroconf import InterfaceChoice, Zeroconf

    is_one = host not in (None, "*", "0.0.0.0", "::")
    try:
        return Zeroconf(interfaces=[host] if is_one else InterfaceChoice.All)  # type: ignore[list-item]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--lan: multicast does not work on {host or 'this machine'}: {error}; drop --lan") from error


@contextlib.contextmanager
def told_on_lan(run_id: str, founder: str, peer_id: str, addresses: Sequence[str], host: str | None) -> Iterator[None]:
    """Tell this network of a run while the block runs.

    Args:
        run_id: The run's name.
        founder: Its founder's peer id.
        peer_id: This peer's.
        addresses: Its multiaddrs; those of this machine alone are told on no other network.
        host: Address of the network to tell; None tells all.

    Raises:
        ConfigError: zeroconf is not installed, or multicast does not work.
    """
    found = [match for match in map(_TCP.fullmatch, addresses) if match]
    away = [match for match in found if not match[1].startswith(("127.", "::1"))] or found
    if not away:
        log.info("others cannot call this peer, so it tells this network nothing of the run")
        yield
        return
    zeroconf = _zeroconf(host)
    from zeroconf import ServiceInfo

    info = ServiceInfo(
        SERVICE,
        f"{peer_id}.{SERVICE}",
        port=int(away[0][2]),
        parsed_addresses=[match[1] for match in away],
        properties={"run": run_id, "founder": founder, "peer": peer_id},
        server=f"{peer_id}.local.",
    )
    try:
        zeroconf.register_service(info, allow_name_change=True)
        log.info("others on this network join with: spes join %s --lan", run_id)
        yield
    finally:
        zeroconf.close()


def find_on_lan(run_id: str, host: str | None = None, seconds: float = FIND_SECONDS) -> dict[str, list[str]]:
    """Return the addresses of peers of this network that are in a run of this name, by the run's founder.

    Args:
        run_id: The run's name.
        host: Address of the network to ask; None asks all.
        seconds: Longest wait for the first answer.

    Raises:
        ConfigError: zeroconf is not installed, or multicast does not work.
    """
    zeroconf = _zeroconf(host)
    found: dict[str, dict[str, None]] = {}
    heard = threading.Event()

    class Listener:
        def add_service(self, zeroconf: Zeroconf, kind: str, name: str) -> None:
            info = zeroconf.get_service_info(kind, name, timeout=int(1000 * seconds))
            if info is not None:
                _note(info, run_id, found)
            if found:
                heard.set()

        update_service = add_service

        def remove_service(self, zeroconf: Zeroconf, kind: str, name: str) -> None:
            """Keep what has gone: a call finds out."""

    try:
        from zeroconf import ServiceBrowser

        browser = ServiceBrowser(zeroconf, SERVICE, listener=Listener())  # type: ignore[arg-type]
        if heard.wait(seconds):
            threading.Event().wait(MORE_SECONDS)
        browser.cancel()
    finally:
        zeroconf.close()
    return {founder: list(addresses) for founder, addresses in found.items()}


def _note(info: ServiceInfo, run_id: str, found: dict[str, dict[str, None]]) -> None:
    """Note the addresses of a peer that is in the run."""
    told: dict[Any, Any] = info.properties
    run, founder, peer = (str(told.get(key) or b"", "utf-8", "replace") for key in (b"run", b"founder", b"peer"))
    if run != run_id or not (_PEER_ID.fullmatch(founder) and _PEER_ID.fullmatch(peer)):  # guard: lan-ids
        return
    for address in info.parsed_addresses():
        if sum(map(len, found.values())) >= MAX_FOUND:  # guard: lan-found
            return
        family = "ip6" if ":" in address else "ip4"
        with contextlib.suppress(OSError):
            socket.inet_pton(socket.AF_INET6 if family == "ip6" else socket.AF_INET, address)
            found.setdefault(founder, {})[f"/{family}/{address}/tcp/{info.port}/p2p/{peer}"] = None
