"""Make a mixture of experts: `python scripts/upcycle.py` takes the flags of `spes upcycle`."""

from spes_p2p.__main__ import start

if __name__ == "__main__":
    start("upcycle")
