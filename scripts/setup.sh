#!/usr/bin/env bash
# Makes or refreshes the virtual environment in .venv (or $SPES_VENV, relative to the repository); silent and immediate
# when nothing it depends on has changed. Safe to interrupt: the stamp that says "done" is written last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${SPES_VENV:-.venv}
python=$venv/bin/python
stamp_file=$venv/spes_p2p.stamp

fail() { printf 'setup.sh: %s\n' "$1" >&2; exit 2; }

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }

# The checkout's path counts too: an editable install points to it.
stamp() {
    "$python" -c '
import hashlib, pathlib, sys
parts = [pathlib.Path(name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
print(hashlib.sha256(b"\0".join([*parts, sys.version.encode(), str(pathlib.Path.cwd()).encode()])).hexdigest())'
}

create() {
    local base="" candidate found
    for candidate in python3.11 python3; do
        if supported "$candidate"; then base=$candidate; break; fi
    done
    found=$(python3 --version 2>/dev/null || true)
    [ -n "$base" ] || fail "needs Python 3.11, 3.12 or 3.13, found ${found:-none}; install python3.11"
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$base cannot make virtual environments; install its venv package (Debian, Ubuntu: apt install python3-venv)"
    if [ -e "$venv/pyvenv.cfg" ]; then
        # Only what is a virtual environment, and a broken one, is ever cleared.
        "$base" -m venv --clear "$venv"
    elif [ -d "$venv" ] && [ -n "$(ls -A "$venv")" ]; then
        fail "$venv exists and is no virtual environment; set SPES_VENV to another path"
    else
        "$base" -m venv "$venv"
    fi
}

if [ -x "$python" ]; then
    if [ -f "$stamp_file" ] && [ "$(cat "$stamp_file")" = "$(stamp)" ]; then exit 0; fi
    supported "$python" || fail "$venv holds $("$python" --version 2>&1 || true), not Python 3.11 to 3.13; delete it and run again"
    rm -f "$stamp_file"
fi
"$python" -m pip --version >/dev/null 2>&1 || create

echo "setup.sh: installing into $venv; the first time takes some minutes" >&2
"$python" -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[all,dev]' ||
    fail "pip could not install the requirements; its message stands above"
stamp > "$stamp_file.new"
mv "$stamp_file.new" "$stamp_file"
