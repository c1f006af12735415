"""What a restarted peer finds on its disk, brought into order before it meets anybody."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from spes_p2p.errors import ExchangeError, RecordError
from spes_p2p.swarm.base import Swarm
from spes_p2p.swarm.exchange.version_store import INDEX, VersionStore
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.roster import SHARED
from spes_p2p.training.checkpoint import Found, PeerCheckpoint

log = logging.getLogger(__name__)

MOST_ROUNDS_BACK = 8
"""Rounds that a peer alone makes again, so as to go on exactly; more of them are worth more than that."""


def checkpoint_of(output: Path) -> PeerCheckpoint:
    """Return the checkpoint of a peer with this output."""
    return PeerCheckpoint(output / "checkpoint", output / "versions")


def recover(output: Path, run_id: str) -> tuple[VersionStore, Found | None]:
    """Find the newest checkpoint that can be used, and make the versions in store whole again with its help.

    Args:
        output: The peer's.
        run_id: The run's name.

    Returns:
        The store, in which nothing is damaged, and the checkpoint.

    Raises:
        DataError: there are checkpoints, and none can be used.
        ExchangeError, RecordError: the store's index is damaged, and there is no checkpoint.
    """
    found = checkpoint_of(output).find(run_id)
    store = _store(output / "versions", run_id, found)
    files = found.files if found is not None else {}
    store.mend()
    there = store.newest()
    lacking = {file: version for file, version in files.items() if version.name not in there}
    if lacking:
        log.warning("taking %s from the checkpoint", ", ".join(sorted(version.name for version in lacking.values())))
        store.take_back(lacking)
    return store, found


def _store(directory: Path, run_id: str, found: Found | None) -> VersionStore:
    try:
        return VersionStore(directory, run_id)
    except (ExchangeError, RecordError) as error:
        if found is None:
            raise
        log.warning("%s; starting it anew from checkpoint %s", error, found.name)
        (directory / INDEX).replace(directory / f"{INDEX}.damaged")
        return VersionStore(directory, run_id)


def go_back(swarm: Swarm, others: Sequence[str], files: Mapping[Path, Version]) -> None:
    """Start from a checkpoint's versions if nobody else has any: all else in the checkpoint is of their round.

    A peer that was killed may have published a round that it had not saved yet; alone, it makes the same one again.

    Args:
        swarm: The peer's.
        others: To ask.
        files: The checkpoint's versions by file.
    """
    offers = swarm.inventory(others).values() if others else ()
    if any(versions[SHARED].round for versions in offers if SHARED in versions):
        return
    saved = next((version.round for version in files.values() if version.name == SHARED), None)
    if saved is None:
        return
    newest = swarm.versions()[SHARED].round if SHARED in swarm.versions() else saved
    if newest - saved > MOST_ROUNDS_BACK:
        log.warning("the checkpoint is of round %d only; round %d goes on with its moments and data", saved, newest)
        return
    if newest != saved:
        log.warning("round %d was published, but not saved; going on from the checkpoint of round %d", newest, saved)
    swarm.go_back(files)
