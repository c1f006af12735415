"""Start a monitor: `python monitor/run_monitor.py` takes the flags of `spes monitor`."""

from spes_p2p.__main__ import start

if __name__ == "__main__":
    start("monitor")
