"""Start a peer: `python peers/run_peer.py` takes the flags of `spes peer`."""

import sys

if __name__ == "__main__":
    try:
        from spes_p2p.__main__ import start
    except ImportError as error:
        sys.stderr.write(f"error: {error}; run ./scripts/setup.sh, and start this with .venv/bin/python\n")
        sys.exit(2)
    start("peer")
