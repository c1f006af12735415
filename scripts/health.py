"""Tell whether a peer makes progress: `python scripts/health.py` takes the flags of `spes health`."""

from spes_p2p.__main__ import start

if __name__ == "__main__":
    start("health")
