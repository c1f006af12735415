"""What a router is asked for; `tests/swarm/test_port_map.py` asks a real one, if there is miniupnpd."""

from __future__ import annotations

import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from spes_p2p.errors import ConfigError
from spes_p2p.swarm.p2p import port_map

PORT = 4001
LASTING = (PORT, "192.168.1.7", PORT, port_map.LEASE_SECONDS)


class Router:
    """Takes what miniupnpc's `UPnP` is asked, and refuses one thing, if told to."""

    lanaddr = "192.168.1.7"

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.refuses = ""
        self.has_renewed = threading.Event()

    def _take(self, *words: object) -> None:
        self.asked.append(words)
        if words[0] == self.refuses:
            raise Exception("the router refuses")

    def discover(self) -> None:
        self._take("discover")

    def selectigd(self) -> None:
        self._take("selectigd")

    def externalipaddress(self) -> str:
        return "203.0.113.9"

    def addportmapping(self, port: int, protocol: str, host: str, inside: int, name: str, _: str, lease: int) -> None:
        if len(self.asked) > 4:
            self.has_renewed.set()
        self._take("map", protocol, port, host, inside, lease)

    def deleteportmapping(self, port: int, protocol: str) -> None:
        self._take("unmap", protocol, port)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Router:
    made, library = Router(), ModuleType("miniupnpc")
    library.UPnP = lambda: made  # type: ignore[attr-defined]
    library.__spec__ = ModuleSpec("miniupnpc", None)
    monkeypatch.setitem(sys.modules, "miniupnpc", library)
    return made


def test_a_port_is_forwarded_renewed_and_given_back(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_map, "RENEW_SECONDS", 0.01)
    with port_map.mapped_port(PORT) as outside:
        assert outside == "203.0.113.9"
        assert router.asked[2:4] == [("map", protocol, *LASTING) for protocol in ("TCP", "UDP")]
        assert router.has_renewed.wait(30), "the lease ends, and routers start anew"
    assert router.asked[-2:] == [("unmap", protocol, PORT) for protocol in ("UDP", "TCP")]
    assert not [thread for thread in threading.enumerate() if thread.name == "port-map"]


@pytest.mark.parametrize("refuses", ["discover", "selectigd", "map"])
def test_a_router_that_refuses_is_one_line_with_a_remedy(router: Router, refuses: str) -> None:
    router.refuses = refuses
    with (
        pytest.raises(ConfigError, match=r"forwards no port 4001: the router refuses; switch UPnP on"),
        port_map.mapped_port(PORT),
    ):
        pass


def test_what_a_router_does_not_take_back_is_said(router: Router, caplog: pytest.LogCaptureFixture) -> None:
    router.refuses = "unmap"
    with port_map.mapped_port(PORT):
        pass
    assert caplog.text.count("goes on forwarding") == 2 and "for up to 7 days: the router refuses" in caplog.text
