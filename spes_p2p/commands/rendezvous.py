"""`spes rendezvous`: be callable, and keep what a run needs to go on; neither train nor vote."""

from __future__ import annotations

import contextlib
import gc
import logging
import time

from spes_p2p.cli import EXIT_INTERRUPTED
from spes_p2p.config import RunConfig
from spes_p2p.config.commands import RendezvousConfig
from spes_p2p.errors import JoinError
from spes_p2p.fs import private_folder
from spes_p2p.peer.output_dir import alone_in
from spes_p2p.planner.size import run_size
from spes_p2p.presentation import size_text
from spes_p2p.swarm.averaging.encoding import Vectors
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.exchange.store import KEEP_PER_NAME
from spes_p2p.swarm.exchange.versions import TOKENIZER
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.manifest import (
    REVISION_FILE,
    Manifest,
    Revisions,
    check_founder,
    fetch_manifest,
    guest_list,
    kept_manifest,
    link_of,
)
from spes_p2p.swarm.names import SHARED, VectorName, by_reason
from spes_p2p.swarm.p2p import peerstore
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.node import EVERY_INTERFACE, ListenConfig, Node
from spes_p2p.swarm.p2p.peerstore import Peerstore
from spes_p2p.swarm.records import ManifestRecord
from spes_p2p.training.anchors import Anchors, start_digests
from spes_p2p.training.holdings import certified

log = logging.getLogger(__name__)

LOOK_SECONDS, FOLLOW_SECONDS = 5.0, 1.0
"""Intervals at which it looks for a run that is founded, and for a new certificate."""
REST = 9
"""Times as long as a download lasted until the next one begins: peers' uplinks are for training."""


def main(config: RendezvousConfig) -> int:
    """Serve a run until the process is ended.

    Raises:
        ConfigError, JoinError: it cannot start, or its p2pd or DHT process has died.
    """
    gc.freeze()  # collections would write to what is imported, which the DHT's process shares
    private_folder(config.output)
    with alone_in(config.output):
        known = Peerstore(config.output / peerstore.FILE)
        node = Node(
            Identity(config.output / "identity.key"),
            config.run_name,
            initial_peers=() if known.addresses() else config.initial_peers,  # peers return by way of this one
            peerstore=known,
            listen=ListenConfig(config.host or EVERY_INTERFACE, config.port, tuple(config.announce)),
        )
        swarm = HivemindSwarm(node, config.output / "versions", uplink_mbit=config.uplink_mbit)
        with contextlib.closing(swarm), contextlib.suppress(KeyboardInterrupt):
            _serve(config, swarm, _manifest(config, swarm))
    return EXIT_INTERRUPTED


def _manifest(config: RendezvousConfig, swarm: HivemindSwarm) -> Manifest:
    """Return the manifest of the run, once there is one."""
    address = swarm.node.contacts()[0]
    (config.output / "address").write_text(f"{address}\n")
    log.info("peers found or join the run with --initial-peers %s", address)
    manifest = kept_manifest(swarm) if TOKENIZER in swarm.versions() else None
    if manifest is None:
        log.info(
            "waiting for the founder: spes peer --run-id %s --config ... --initial-peers %s", config.run_name, address
        )
        while not swarm.read(ManifestRecord):
            swarm.wait(LOOK_SECONDS)
            if death := swarm.watchdog.check():
                raise JoinError(f"{death}; start the same command again")
        manifest, _ = fetch_manifest(swarm, config.founder)
    check_founder(manifest, config.founder)
    return manifest


def _serve(config: RendezvousConfig, swarm: HivemindSwarm, manifest: Manifest) -> None:
    """Follow the run's certificates, and fetch what each one names."""
    run, size = manifest.config, run_size(manifest.config, manifest.vocab_size)
    anchors = Anchors(run, {SHARED: size.shared_params, "slot": size.slot_params})
    vectors = anchors.vectors()
    guests = guest_list(swarm, manifest)
    swarm.enter(run.round, vectors, manifest.genesis(), max_slots=0, guests=guests, recent=config.recent)
    names = [VectorName.of_slot(slot) for slot in range(run.num_slots)]
    names = list(dict.fromkeys([SHARED, *map(anchors.kept_name, names), *names]))
    kept = fitting(names, vectors, int(config.disk_gb * 1e9) // (KEEP_PER_NAME + 1))  # and one on its way
    num_bytes = sum(map(vectors.num_bytes, kept))
    log.info(
        "run %r, founded by %s; keeping %d of the %d parts of its model, %s, and those of the round before",
        *(manifest.run_id, manifest.founder, len(kept), len(names), size_text(num_bytes)),
    )
    link = link_of(swarm, manifest).encode()
    (config.output / "link").write_text(f"{link}\n")
    log.info("others join with: spes join %s", link)
    revisions = Revisions(swarm, manifest, config.output / REVISION_FILE)
    seen, stored, rests_until = "", "", 0.0
    while not (death := swarm.watchdog.death):
        body, began, come = swarm.last(), time.monotonic(), swarm.exchange.bytes_in
        if is_new := body.digest != seen:
            revisions.look()
            seen = body.digest
        ends = body.round >= revisions.run.round.total  # its makers leave soon
        if body.digest != stored and (began >= rests_until or (is_new and ends)):
            members = [member.peer_id for member in body.members]
            wanted = certified_versions(body, kept, run)
            failures = swarm.pull(wanted, members or sorted(swarm.contacts()), timeout=run.round.exchange_seconds)
            for reason, missing in by_reason(failures).items():
                log.warning("round %d: could not fetch %s: %s", body.round, missing, reason, extra={"heals": True})
            stored = stored if failures else body.digest
            rests = REST * (time.monotonic() - began) if swarm.exchange.bytes_in > come and not ends else 0.0
            rests_until = time.monotonic() + max(rests, run.round.heartbeat_seconds if failures else 0.0)
            log.info("round %d: stored %d of %d versions", body.round, len(wanted) - len(failures), len(wanted))
        swarm.wait(FOLLOW_SECONDS)
    raise JoinError(f"{death}; start the same command again")


def fitting(names: list[VectorName], vectors: Vectors, num_bytes: int) -> list[VectorName]:
    """Return those of some vectors that fit into so many bytes, the first ones first."""
    kept = list[VectorName]()
    for name in names:
        if (num_bytes := num_bytes - vectors.num_bytes(name)) < 0:
            break
        kept.append(name)
    return kept


def certified_versions(body: Body, names: list[VectorName], run: RunConfig) -> dict[VectorName, tuple[int, str]]:
    """Return round and digest of the version of each vector that counts after a body, without what the seed makes."""
    start = start_digests(run)
    rounds = {name: body.round if name.slot is None else body.slots[name.slot].round for name in names}
    return {name: (rounds[name], digest) for name in names if (digest := certified(body, name, start))}
