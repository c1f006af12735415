"""Start a swarm on this machine, as `spes local` does; run_local_experiment.sh installs what it needs first."""

import sys

if __name__ == "__main__":
    try:
        from spes_p2p.__main__ import start
    except ImportError as error:
        sys.stderr.write(f"error: {error}; run ./scripts/setup.sh, and start this with .venv/bin/python\n")
        sys.exit(2)
    start("local")
