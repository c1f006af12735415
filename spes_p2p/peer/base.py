"""How a machine gets the frozen base of a run with adapters: from its own copy of the checkpoint, or from peers."""

from __future__ import annotations

import logging
from pathlib import Path

from spes_p2p.codecs.vectors import digest
from spes_p2p.data.hub import checkpoint_folder
from spes_p2p.errors import AbsentError
from spes_p2p.model.base_files import BaseFiles, BaseLayout, base_digests, base_name, encode_base
from spes_p2p.model.build import outline
from spes_p2p.model.start import StartWeights, another_checkpoint
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.manifest import Manifest
from spes_p2p.swarm.records import ManifestRecord

log = logging.getLogger(__name__)

WAIT_SECONDS = 60.0
LEAST_BYTES_PER_SECOND = 250_000
"""Rate below which the base is given up."""


def obtain_base(swarm: HivemindSwarm, manifest: Manifest, source: Path | None) -> None:
    """Keep the documents of a run's base in the version store, each verified by the manifest's digest.

    Documents that are there already stay. Other peers fetch them from this one.

    Args:
        source: Folder of this machine's copy of the checkpoint; None fetches from other peers.

    Raises:
        ConfigError: the copy is of another checkpoint.
        DataError: the copy is damaged.
        AbsentError: no peer sent a document.
    """
    run = manifest.config
    layout, stored = BaseLayout(run, manifest.vocab_size), swarm.versions()
    lacking = {
        slot: each
        for slot, each in base_digests(run).items()
        if base_name(slot) not in stored or stored[base_name(slot)].digest != each
    }
    if not lacking:
        return
    if source is None:
        sizes = {slot: layout.num_bytes(slot) for slot in lacking}
        versions = [
            Version(name=base_name(slot), round=0, digest=lacking[slot], num_bytes=num_bytes)
            for slot, num_bytes in sizes.items()
        ]
        log.info("fetching the base of the adapters: %.1f MB", sum(sizes.values()) / 1e6)
        peers = [peer for peer in swarm.read(ManifestRecord) if peer != swarm.peer_id]
        timeout = WAIT_SECONDS + sum(sizes.values()) / LEAST_BYTES_PER_SECOND
        for name, reason in swarm.exchange.pull(versions, peers, timeout=timeout).items():
            raise AbsentError(
                f"cannot fetch {name} of the run's base: {reason}; try again, or name your copy with --from"
            )
        return
    base = StartWeights(source, outline(run.model, manifest.vocab_size, run.data.sequence_length))
    for slot, expected in lacking.items():
        document = encode_base(base, layout, slot)
        if digest(document) != expected:  # guard: never
            raise another_checkpoint(source, base_name(slot))
        swarm.keep_document(base_name(slot), document)


def own_copy(start_from: Path | None) -> Path | None:
    """Return the folder of this machine's copy of a checkpoint, downloaded if it is on the hub."""
    return None if start_from is None else checkpoint_folder(start_from)[0]


def stored_base(folder: Path, manifest: Manifest) -> BaseFiles | None:
    """Return the base that `obtain_base` has stored in a folder of versions; None of a run without adapters."""
    if manifest.config.adapter is None:
        return None
    return BaseFiles(folder, BaseLayout(manifest.config, manifest.vocab_size), base_digests(manifest.config))
