"""Tell whether a peer gets on: python scripts/health.py --output DIR [--minutes M]; exit code 1 if it does not."""

from spes_p2p.cli import entry_point
from spes_p2p.commands.health import HealthConfig, main

if __name__ == "__main__":
    entry_point(HealthConfig, main)
