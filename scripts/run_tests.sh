#!/usr/bin/env bash
# Linters, types and tests. Without arguments: the commit lane, what every change must pass, at most twelve minutes on two
# cores, a cold installation included. `--all`: the full lane, some hours, adds the tests marked `full`, 200 kills, five
# newcomers and the removal of every guard. Each lane lists what failed, and appends its result to the JSON list in the
# file $SPES_LANE_LOG, if that is set.
# Other arguments go to pytest, and nothing else runs: scripts/run_tests.sh tests/unit/optim -k merge
# After `--all`, pytest selects the tests marked `full` as well: scripts/run_tests.sh --all tests/chaos
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh dev $([ "${1:-}" != --all ] || echo full)

export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
unset PYTHONDONTWRITEBYTECODE  # each of hundreds of processes would compile what it imports
python=${SPES_VENV:-.venv}/bin/python
lane=commit
marks="not full"
if [ "${1:-}" = --all ]; then lane=full marks=""; shift; fi
if [ $# -gt 0 ]; then exec "$python" -m pytest -m "$marks" "$@"; fi

lane_log=${SPES_LANE_LOG:-}
failed=()
mypy_pid=""
mypy_output=$(mktemp)
trap 'exit 130' INT
trap 'if [ -n "$mypy_pid" ]; then kill "$mypy_pid" 2>/dev/null || true; fi; rm -f "$mypy_output"' EXIT

stage() {
    local name=$1 began=$SECONDS
    shift
    printf '== %s\n' "$name"
    "$@" || failed+=("$name")
    printf '== %s: %d s\n' "$name" $((SECONDS - began))
}

tests() { "$python" -m pytest -m "$marks" --durations=20 "$@"; }

finish_mypy() {
    local code=0
    wait "$mypy_pid" || code=$?
    mypy_pid=""
    cat "$mypy_output"
    return "$code"
}

record() {
    local commit
    commit=$(git rev-parse -q --verify HEAD 2>/dev/null) || commit=""
    "$python" - "$lane_log" "$lane" "$SECONDS" "${#failed[@]}" "$commit" <<'PYTHON'
import datetime, json, os, pathlib, sys
path, lane, seconds, num_failed, commit = sys.argv[1:]
file = pathlib.Path(path)
runs = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
run = {"commit": commit, "date": now, "seconds": int(seconds), "passed": num_failed == "0", "lane": lane}
new = file.with_name(f"{file.name}.new")
new.write_text(json.dumps([*runs, run], indent=1) + "\n", encoding="utf-8")
os.replace(new, file)
PYTHON
}

# mypy takes the time that the tests leave: real peers mostly wait.
nice -n 19 "$python" -m mypy spes_p2p benchmarks monitor peers >"$mypy_output" 2>&1 &
mypy_pid=$!
stage "ruff check" "$python" -m ruff check .
stage "ruff format" "$python" -m ruff format --check .
# No unit test shares much with its file's others, so a worker that has none left takes some of the other's.
stage "unit tests" tests tests/unit -n 2 --dist worksteal
if [ "$lane" = full ]; then
    # Peers that die or lie need the processors to themselves.
    stage "mypy" finish_mypy
    stage "chaos tests" tests tests/chaos
fi
# Peers mostly wait, so two files of these run at once; a file's tests share their peers. Files run in order of their
# names: in xdist's own order the long files, which hold few tests, come last, when one worker has nothing left to do.
stage "real-peer tests" tests tests --ignore=tests/unit --ignore=tests/chaos -n 2 --dist loadfile --no-loadscope-reorder
if [ "$lane" = commit ]; then stage "mypy" finish_mypy; fi
if [ "$lane" = full ]; then
    stage "kills and newcomers" "$python" benchmarks/elastic.py --only kills newcomer
    stage "guard removal" "$python" tests/support/guards.py
fi

if [ -n "$lane_log" ]; then record; fi
printf '%s lane: %d s\n' "$lane" "$SECONDS"
if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "$(IFS=,; echo "${failed[*]}")" >&2
    exit 1
fi
echo "all stages passed"
