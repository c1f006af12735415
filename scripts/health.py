"""Tell whether a peer makes progress: `python scripts/health.py` takes the flags of `spes health`."""

import sys

if __name__ == "__main__":
    try:
        from spes_p2p.__main__ import start
    except ImportError as error:
        sys.stderr.write(f"error: {error}; run ./scripts/setup.sh, and start this with .venv/bin/python\n")
        sys.exit(2)
    start("health")
