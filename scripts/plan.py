"""What a run needs of a machine: python scripts/plan.py --config FILE [--slots N] [--memory-gb G] [--uplink-mbit U]"""

from spes_p2p.cli import entry_point
from spes_p2p.commands.plan import PlanConfig, main

if __name__ == "__main__":
    entry_point(PlanConfig, main)
