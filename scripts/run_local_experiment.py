"""Start a swarm on this machine; use run_local_experiment.sh, which installs what it needs first."""

from spes_p2p.cli import entry_point
from spes_p2p.commands.local import ExperimentConfig, main

if __name__ == "__main__":
    entry_point(ExperimentConfig, main)
