"""Peers of one network find each other by the run's name; what the network says is taken with care."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest
from zeroconf import ServiceInfo

from spes_p2p.cli import load_settings
from spes_p2p.commands.join import as_peer, link_on_lan
from spes_p2p.config.commands import JoinConfig
from spes_p2p.errors import ConfigError, JoinError
from spes_p2p.swarm.p2p.lan import MAX_FOUND, SERVICE, _note, check_lan, find_on_lan, told_on_lan

FOUNDER = "QmQ2rWrZ2XfZ9Dzsr3HwFvfTyjBpAXnZ8LV1GNGi1aSUuM"
OTHER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
HERE = "127.0.0.1"


def told(run: str, founder: str = FOUNDER, peer: str = FOUNDER, port: int = 4001):
    return told_on_lan(run, founder, peer, [f"/ip4/{HERE}/tcp/{port}/p2p/{peer}"], HERE)


def test_a_run_is_found_by_its_name_and_joined_with_its_founder() -> None:
    with told("home"), told("home", peer=OTHER, port=4002), told("another", founder=OTHER, peer=OTHER[::-1]):
        config = as_peer(load_settings(JoinConfig, ["home", "--lan", "--host", HERE]))
        assert config.run_id == f"home@{FOUNDER}" and config.lan and config.output.name == "home"
        assert set(config.initial_peers) <= {
            f"/ip4/{HERE}/tcp/4001/p2p/{FOUNDER}",
            f"/ip4/{HERE}/tcp/4002/p2p/{OTHER}",
        }


@pytest.mark.full  # with every commit one run is found, above
def test_of_two_runs_of_one_name_one_is_to_be_chosen() -> None:
    with told("home"), told("home", founder=OTHER, peer=OTHER, port=4002):
        assert set(find_on_lan("home", HERE)) == {FOUNDER, OTHER}
        with pytest.raises(JoinError, match="2 runs of that name; name one of home@Qm"):
            link_on_lan("home", HERE)
        assert link_on_lan(f"home@{OTHER}", HERE).addresses == (f"/ip4/{HERE}/tcp/4002/p2p/{OTHER}",)
    assert find_on_lan("home", HERE, 0.5) == {}, "nothing is told any more"


def test_no_peer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_p2p.commands.join.find_on_lan", lambda run, host: find_on_lan(run, host, 0.2))
    with pytest.raises(JoinError, match="no peer on this network is in run 'nowhere'; start one with --lan"):
        link_on_lan("nowhere", HERE)


def info(addresses: list[str], **changes: str) -> ServiceInfo:
    fields: Mapping[str, str] = {"run": "home", "founder": FOUNDER, "peer": OTHER} | changes
    return ServiceInfo(SERVICE, f"x.{SERVICE}", port=1, parsed_addresses=addresses, properties=dict(fields))


@pytest.mark.parametrize(
    "changes",
    [{"run": "other"}, {"founder": "x"}, {"founder": f"{FOUNDER}\x1b[2J"}, {"peer": ""}, {"peer": f"/{OTHER}"}],
)
def test_what_is_no_peer_of_the_run_is_ignored(changes: dict[str, str]) -> None:
    found: dict[str, dict[str, None]] = {}
    _note(info([HERE], **changes), "home", found)
    assert found == {}
    _note(info([HERE, "::1"]), "home", found)
    assert list(found[FOUNDER]) == [f"/ip4/{HERE}/tcp/1/p2p/{OTHER}", f"/ip6/::1/tcp/1/p2p/{OTHER}"]


def test_a_network_cannot_name_addresses_without_end() -> None:
    found: dict[str, dict[str, None]] = {}
    for high in range(3):
        _note(info([f"10.0.{high}.{low}" for low in range(1, 41)]), "home", found)
    assert sum(map(len, found.values())) == MAX_FOUND


def test_a_peer_that_cannot_be_called_tells_nothing() -> None:
    with told_on_lan("home", FOUNDER, OTHER, [], HERE):
        assert find_on_lan("home", HERE, 0.5) == {}


def test_a_name_without_lan_and_a_damaged_link_with_it_are_refused() -> None:
    for words in (["home"], ["spes:home.eNq", "--lan"]):
        with pytest.raises(ConfigError, match="copy the whole word"):
            load_settings(JoinConfig, words)


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install 'spes-p2p\\[lan\\]'"):
        check_lan()
