"""Start a peer: `python peers/run_peer.py` takes the flags of `spes peer`."""

from spes_p2p.__main__ import start

if __name__ == "__main__":
    start("peer")
