#!/usr/bin/env bash
# One peer of a cluster's job, started on each node: `RANK=<this node> NPROC_PER_NODE=<GPUs> scripts/run_cluster.sh
# --shared DIR --run-id NAME --config FILE ...`, with the flags of `spes cluster`. Under srun, SLURM's numbers serve.
# WORLD_SIZE (number of nodes) and MASTER_ADDR may be set and are not needed: nodes meet in the folder --shared.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${SPES_VENV:-.venv}/bin/python" -m spes_p2p cluster "$@"
