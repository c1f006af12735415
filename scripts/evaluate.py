"""Measure a checkpoint: `python scripts/evaluate.py` takes the flags of `spes evaluate`."""

from spes_p2p.__main__ import start

if __name__ == "__main__":
    start("evaluate")
