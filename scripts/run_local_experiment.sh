#!/usr/bin/env bash
# A swarm of peers and a monitor on this machine: ./scripts/run_local_experiment.sh [--help]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
exec "${SPES_VENV:-.venv}/bin/python" -m spes_p2p local "$@"
