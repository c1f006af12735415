"""Print what a run needs of a machine: `python scripts/plan.py` takes the flags of `spes plan`."""

from spes_p2p.__main__ import start

if __name__ == "__main__":
    start("plan")
