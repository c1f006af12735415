#!/bin/sh
# A container's peer, each time the container starts: it goes on with what the volume at $HOME holds, if it got that far.
# A mistake in its settings ends the container with 0, so that it is not started again for ever.
set -eu
peer=$HOME/peer
if [ -n "$(ls -A "$peer" 2>/dev/null)" ] && ! [ -e "$peer/.starting" ]; then # the first start has succeeded
    set -- --resume "$@"
fi
trap 'kill -TERM $! 2>/dev/null' TERM INT
python -m spes_p2p peer --output "$peer" --cache "$HOME/cache" "$@" &
child=$!
code=0
while :; do # a signal ends a wait, not the peer
    wait "$child" && code=0 || code=$?
    kill -0 "$child" 2>/dev/null || break
done
if [ "$code" = 2 ]; then
    echo "the line above says what to change; then start this container again" >&2
    exit 0
fi
[ "$code" = 130 ] && exit 0 # it has handed over, as its owner asked: `on-failure` would start it again
exit "$code"
