#!/usr/bin/env bash
# Makes or refreshes the virtual environment in .venv (or $SPES_VENV, relative to the repository); silent and immediate
# when nothing it depends on has changed. Its arguments are extras of pyproject.toml, such as `dev`; those of earlier
# calls stay. Safe to interrupt: the stamp that says "done" is written last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${SPES_VENV:-.venv}
python=$venv/bin/python
stamp_file=$venv/spes_p2p.stamp
extras="$*"

fail() { printf 'setup.sh: %s\n' "$1" >&2; exit 2; }

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }

# The checkout's path counts too: an editable install points to it.
stamp() {
    "$python" -c '
import hashlib, pathlib, sys
parts = [pathlib.Path(name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
print(hashlib.sha256(b"\0".join([*parts, sys.version.encode(), str(pathlib.Path.cwd()).encode()])).hexdigest())'
}

# The second line of the stamp: the extras that are installed.
installed() { sed -n 2p "$stamp_file" 2>/dev/null || true; }

is_complete() {
    [ -f "$stamp_file" ] && [ "$(head -n 1 "$stamp_file")" = "$(stamp)" ] || return 1
    local extra
    for extra in $extras; do
        case " $(installed) " in *" $extra "*) ;; *) return 1 ;; esac
    done
}

# Runs a command that is silent for long, as pip is while it unpacks, and says every few seconds how far it is.
show_progress() {
    local log job code=0 said=$SECONDS last
    log=$(mktemp)
    "$@" >"$log" 2>&1 &
    job=$!
    trap 'kill "$job" 2>/dev/null; rm -f "$log"; exit 130' INT TERM
    while kill -0 "$job" 2>/dev/null; do
        sleep 0.5
        if [ $((SECONDS - said)) -ge 5 ]; then
            said=$SECONDS
            last=$(sed -nE 's/^ *((Collecting|Downloading|Installing|Building|Preparing|Using) .{1,50}).*/\1/p' "$log" | tail -n 1)
            printf 'setup.sh: %4d s, %5s MB  %s\n' "$SECONDS" "$(du -sm "$venv" 2>/dev/null | cut -f 1 || true)" "$last" >&2
        fi
    done
    wait "$job" || code=$?
    [ "$code" = 0 ] || tail -n 20 "$log" >&2
    rm -f "$log"
    trap - INT TERM
    return "$code"
}

create() {
    local base="" candidate found
    for candidate in python3.11 python3.12 python3.13 python3; do
        supported "$candidate" || continue
        base=${base:-$candidate}
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then base=$candidate; break; fi
    done
    found=$(python3 --version 2>/dev/null || true)
    [ -n "$base" ] || fail "needs Python 3.11, 3.12 or 3.13, found ${found:-none}; install python3.11"
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$base cannot make virtual environments; install its venv package (Debian, Ubuntu: apt install python3-venv)"
    if [ -e "$venv/pyvenv.cfg" ]; then
        # Only what is a virtual environment, and a broken one, is ever cleared.
        show_progress "$base" -m venv --clear "$venv"
    elif [ -d "$venv" ] && [ -n "$(ls -A "$venv")" ]; then
        fail "$venv exists and is no virtual environment; set SPES_VENV to another path"
    else
        show_progress "$base" -m venv "$venv"
    fi
}

if [ -x "$python" ]; then
    if is_complete; then echo "setup.sh: $venv is complete" >&2; exit 0; fi
    supported "$python" || fail "$venv holds $("$python" --version 2>&1 || true), not Python 3.11 to 3.13; delete it and run again"
    for extra in $(installed); do
        case " $extras " in *" $extra "*) ;; *) extras="$extras $extra" ;; esac
    done
    rm -f "$stamp_file"
fi
echo "setup.sh: installing into $venv; the first time takes some minutes" >&2
"$python" -m pip --version >/dev/null 2>&1 || create

list=$(echo $extras | tr ' ' ,)
show_progress "$python" -m pip install --disable-pip-version-check --progress-bar off --no-compile -c constraints.txt \
    -e ".${list:+[$list]}" || fail "pip could not install the requirements; its last lines stand above"
# pip would compile each file of each package, for a minute on one core. This compiles what the commands import.
show_progress env -u PYTHONDONTWRITEBYTECODE "$python" -c '
import importlib, spes_p2p.__main__ as program
for _, module, _ in program.COMMANDS.values():
    importlib.import_module(module)' || fail "what is installed cannot be imported; delete $venv and run again"
{ stamp; echo $extras; } > "$stamp_file.new"
mv "$stamp_file.new" "$stamp_file"
echo "setup.sh: done; next: source $venv/bin/activate, and spes" >&2
