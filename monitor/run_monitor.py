"""Start a monitor: `python monitor/run_monitor.py --run-id NAME --initial-peers MULTIADDR [--output DIR] ...`."""

from monitor.peer import main
from monitor.settings import MonitorConfig
from spes_p2p.cli import entry_point

if __name__ == "__main__":
    entry_point(MonitorConfig, main)
