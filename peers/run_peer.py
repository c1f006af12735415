"""Start a peer: `python peers/run_peer.py --run-id NAME [--initial-peers MULTIADDR] [--output DIR] ...`."""

from spes_p2p.cli import entry_point
from spes_p2p.config import PeerConfig
from spes_p2p.peer.life import main

if __name__ == "__main__":
    entry_point(PeerConfig, main)
