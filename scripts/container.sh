#!/bin/sh
# A container's peer, each time the container starts: it goes on with what the volume at $HOME holds, if it got that far.
set -eu
peer=$HOME/peer
if [ -d "$peer/checkpoint" ]; then
    set -- --resume "$@"
elif ls -d "$peer"/.overwritten-* >/dev/null 2>&1; then # it was killed before it had kept anything
    set -- --overwrite "$@"
elif [ -n "$(ls -A "$peer" 2>/dev/null)" ]; then
    set -- --resume "$@"
fi
exec python -m spes_p2p peer --output "$peer" --cache "$HOME/cache" "$@"
