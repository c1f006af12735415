"""Start a swarm on this machine, as `spes local` does; run_local_experiment.sh installs what it needs first."""

from spes_p2p.__main__ import start

if __name__ == "__main__":
    start("local")
