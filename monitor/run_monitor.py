"""Start a monitor: `python monitor/run_monitor.py --run-id NAME --initial-peers MULTIADDR [--output DIR] ...`."""

from spes_p2p.cli import entry_point
from spes_p2p.commands.monitor import main
from spes_p2p.monitor.settings import MonitorConfig

if __name__ == "__main__":
    entry_point(MonitorConfig, main)
