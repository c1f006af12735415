"""From a dense checkpoint to experts: python scripts/upcycle.py --from DIR --output DIR --num-experts E --top-k K"""

from spes_p2p.cli import entry_point
from spes_p2p.commands.upcycle import UpcycleConfig, main

if __name__ == "__main__":
    entry_point(UpcycleConfig, main)
