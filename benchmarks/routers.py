"""Home routers of the four usual kinds, for namespaces of a test bed: address translation by nftables.

The kinds differ in whom they let in to a port that the home has opened by sending from it, and in whether that port is
the same for all whom the home sends to. Source: RFC 4787, in the older words of RFC 3489.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import Literal

from spes_p2p.errors import SpesError

Router = Literal["full_cone", "restricted", "port_restricted", "symmetric"]
"""`full_cone` lets everyone in; `restricted` addresses that the home has sent to; `port_restricted`, the usual one,
addresses with ports that it has sent to. `symmetric` is that, and has another port for each of them."""
HOME = "192.168.1.2"
"""Address of the one machine behind each router."""
GATEWAY = "192.168.1.1"
INSIDE = "inside"
"""The router's device towards the home."""
_LET_IN = {
    "full_cone": 'iifname "{wan}" meta l4proto {{ tcp, udp }} dnat to {home};',
    "restricted": 'iifname "{wan}" ip saddr @sent_to meta l4proto {{ tcp, udp }} dnat to {home};',
    "port_restricted": "",
    "symmetric": "",
}
# Input must drop what nothing expects: a packet that the router itself took would leave an entry in the table of
# connections, and the home's own connection there would get another port.
_RULES = """
table ip home {{
  set sent_to {{ type ipv4_addr; flags dynamic,timeout; timeout 2m; }}
  chain leaving {{ type nat hook postrouting priority 100; oifname "{wan}" masquerade {fully_random}; }}
  chain coming {{ type nat hook prerouting priority -100; {let_in} }}
  chain passing {{
    type filter hook forward priority 0; policy drop;
    iifname "inside" update @sent_to {{ ip daddr }}
    iifname "inside" accept
    ct state established,related accept
    ct status dnat accept
  }}
  chain own {{
    type filter hook input priority 0; policy drop;
    iifname {{ "inside", "lo" }} accept
    ct state established,related accept
  }}
}}
"""


def routers_available() -> str | None:
    """None where this machine can have routers in its test beds, else the reason why not."""
    if shutil.which("nft") is None:
        return "it lacks nft; install nftables"
    tried = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True)
    return f"nft does not work here: {tried.stderr.strip()}" if tried.returncode else None


def connect_home(router: str, home: str) -> None:
    """Join the namespace of a home to that of its router, as its way out."""
    run = _ip
    run("-n", router, "link", "add", INSIDE, "type", "veth", "peer", "name", "eth0", "netns", home)
    run("-n", router, "addr", "add", f"{GATEWAY}/24", "dev", INSIDE)
    run("-n", router, "link", "set", INSIDE, "up")
    run("-n", home, "addr", "add", f"{HOME}/24", "dev", "eth0")
    run("-n", home, "link", "set", "eth0", "up")
    run("-n", home, "link", "set", "lo", "up")
    run("-n", home, "route", "add", "default", "via", GATEWAY)


def set_rules(router: str, kind: Router, wan: str) -> None:
    """Give a namespace the rules of a router; `wan` is its device towards the others."""
    let_in = _LET_IN[kind].format(wan=wan, home=HOME)
    rules = _RULES.format(wan=wan, let_in=let_in, fully_random="fully-random" if kind == "symmetric" else "")
    _run(["ip", "netns", "exec", router, "nft", "-f", "-"], rules)


def drop(router: str, address: str) -> None:
    """Have a router drop all that comes from an address or goes to it."""
    for side in ("saddr", "daddr"):
        rule = ["nft", "insert", "rule", "ip", "home", "passing", "ip", side, address, "drop"]
        _run(["ip", "netns", "exec", router, *rule], "")


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments], "")


def _run(command: list[str], text: str) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise SpesError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
