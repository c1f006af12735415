"""The console script: `spes_p2p COMMAND ...`, or `python -m spes_p2p COMMAND ...`."""

from __future__ import annotations

import sys
from typing import NoReturn

from spes_p2p import __version__
from spes_p2p.cli import EXIT_USER_ERROR, entry_point
from spes_p2p.presentation import say

USAGE = """usage: spes_p2p COMMAND [--help] ...

commands:
  simulate STUDY   compare ways to train in a simulation, and report it

Other programs: peers/run_peer.py, monitor/run_monitor.py, scripts/."""


def main() -> NoReturn:
    """Run the command that `sys.argv` names, and exit."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command == "simulate":
        from spes_p2p.commands import simulate as simulate

        entry_point(simulate.SimulateConfig, simulate.main, sys.argv[2:])
    if command in ("--help", "-h"):
        say(USAGE)
        sys.exit(0)
    if command == "--version":
        say(f"spes_p2p {__version__}")
        sys.exit(0)
    sys.stderr.write(f"error: unknown command {command!r}; choose simulate, or see --help\n")
    sys.exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    main()
