#!/usr/bin/env bash
# Linters, types and tests, all but those marked `long`, then the list of what failed.
# Arguments go to pytest and skip everything else: scripts/run_tests.sh tests/unit/optim -k merge
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh

export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python=${SPES_VENV:-.venv}/bin/python
failed=()
trap 'exit 130' INT

stage() {
    local name=$1
    shift
    printf '== %s\n' "$name"
    "$@" || failed+=("$name")
}

if [ $# -gt 0 ]; then exec "$python" -m pytest "$@"; fi

stage "ruff check" "$python" -m ruff check .
stage "ruff format" "$python" -m ruff format --check .
stage "mypy" "$python" -m mypy spes_p2p monitor benchmarks
stage "unit tests" "$python" -m pytest tests/unit -n 2 --dist loadfile
# Peers that die or lie need the processors to themselves; others mostly wait, so two files of those run at once.
stage "chaos tests" "$python" -m pytest tests/chaos --durations=10
stage "swarm tests" \
    "$python" -m pytest tests --ignore=tests/unit --ignore=tests/chaos -n 2 --dist loadfile --durations=10

if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "$(IFS=,; echo "${failed[*]}")" >&2
    exit 1
fi
echo "all stages passed"
