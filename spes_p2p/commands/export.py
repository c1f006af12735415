"""`spes export`: write a round's model as a Hugging Face checkpoint, from a folder, a store, or a running swarm."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from spes_p2p.commands.early import check_export, is_link, is_store
from spes_p2p.config import RunConfig
from spes_p2p.config.commands import ExportConfig
from spes_p2p.config.link import JoinLink
from spes_p2p.errors import AbsentError, ConfigError, ExchangeError
from spes_p2p.fs import scratch_path
from spes_p2p.monitor.model_folder import VERSIONS, Exported, check_free, export
from spes_p2p.monitor.uploads import Store
from spes_p2p.monitor.view import SwarmView, fold, look
from spes_p2p.monitor.watch import peers_of, pull_round
from spes_p2p.peer.base import own_copy
from spes_p2p.peer.consent import ask_to_read
from spes_p2p.peer.joining import show_download
from spes_p2p.planner.size import run_size
from spes_p2p.presentation import say
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.manifest import fetch_manifest, guest_list
from spes_p2p.swarm.names import SHARED
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.node import ListenConfig, Node
from spes_p2p.training.anchors import Anchors

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Tries to fetch a round, which the swarm may leave behind meanwhile."""


def main(config: ExportConfig) -> int:
    """Export a round, and say what was written; return the exit code."""
    say(f"wrote {write(config)}")
    return 0


def write(config: ExportConfig) -> str:
    """Export a round; return what was written, in words.

    Raises:
        ConfigError: flags contradict each other, or the output cannot be written.
        DataError, ExchangeError, JoinError: the round cannot be had.
    """
    source, run_id, initial_peers = config.source, config.run_id, config.initial_peers
    check_export(config)
    if source is not None and is_link(source):
        link = JoinLink.parse(source)
        run_id, initial_peers = link.founded, list(link.addresses)
    elif source is not None and is_store(source):
        return _download(config, source)
    if run_id is None:
        folder = Path(source or "").expanduser()
        output = config.output or folder / "model"
        exported = export(
            folder,
            output,
            config.round,
            overwrite=config.overwrite,
            merges=config.merged,
            base=own_copy(config.start_from),
        )
    else:
        if config.output is None:
            raise ConfigError("a running swarm has no folder here; name one with --output")
        if config.round is not None:
            raise ConfigError(f"peers pass on their newest round only; drop --round {config.round}, or export a folder")
        if config.merged:
            raise ConfigError("--merged needs the base that a peer's folder has; export a folder, or drop --merged")
        output = config.output
        exported = _export_swarm(run_id, initial_peers, output, overwrite=config.overwrite, yes=config.yes)
    return f"{output}: {exported}"


def _download(config: ExportConfig, place: str) -> str:
    """Write a checkpoint that a monitor has uploaded."""
    if config.output is None:
        raise ConfigError(f"{place} has no folder here; name one with --output")
    if config.merged:
        raise ConfigError("--merged needs the base that a peer's folder has; export a folder, or drop --merged")
    output = config.output.resolve()
    check_free(output, overwrite=config.overwrite)
    found = Store(place).download(config.round, output, overwrite=config.overwrite)
    num_bytes = sum(path.stat().st_size for path in output.iterdir())
    return f"{output}: round {found.round} of run {found.run_id!r}, {num_bytes / 1e6:.1f} MB"


def _export_swarm(run_id: str, initial_peers: Sequence[str], output: Path, *, overwrite: bool, yes: bool) -> Exported:
    """Fetch the swarm's newest round into a folder that is deleted again, and export it from there."""
    check_free(output, overwrite=overwrite)  # before anything is fetched
    try:
        with scratch_path(output.absolute()) as folder:
            folder.mkdir(parents=True)
            _fetch(run_id, initial_peers, folder, yes=yes)
            return export(folder, output, overwrite=overwrite)
    except OSError as error:
        raise ConfigError(f"cannot write --output {output}: {error}; make room there, or name another") from error


def _fetch(run_id: str, initial_peers: Sequence[str], folder: Path, *, yes: bool) -> None:
    with visiting(run_id, initial_peers, folder, yes=yes) as (swarm, run, anchors):
        sizes = anchors.bundle_numel()
        show_download(swarm, 4 * (sizes[SHARED] + run.num_slots * sizes["slot"]))
        view = SwarmView(run.num_slots, run.round.total, absence_seconds=run.round.heartbeat_seconds)
        for attempt in range(1, ATTEMPTS + 1):
            swarm.catch_up()
            try:
                view = fold(view, look(swarm))
                pull_round(swarm, run, swarm.last(), sorted({*peers_of(view), *swarm.contacts()}))
                return
            except (ExchangeError, OSError) as error:  # a TimeoutError is an OSError
                if attempt == ATTEMPTS:
                    remedy = "try again, or other --initial-peers"
                    raise AbsentError(f"no peer sent the model: {error}; {remedy}") from error
                log.warning("%s; trying again", error)
                swarm.wait(run.round.heartbeat_seconds)


@contextlib.contextmanager
def visiting(
    run_id: str, initial_peers: Sequence[str], folder: Path, *, yes: bool
) -> Iterator[tuple[HivemindSwarm, RunConfig, Anchors]]:
    """Be in a run's swarm during the block, without a part in it; `folder` gets what is fetched."""
    name, founder, recent = (*run_id.split("@"), "", "")[:3]
    node = Node(
        Identity(folder / "identity.key"),
        name,
        initial_peers=initial_peers,
        listen=ListenConfig(client_mode=True),
    )
    swarm = HivemindSwarm(node, folder / VERSIONS, serve=False)
    try:
        manifest, document = fetch_manifest(swarm, founder or None)
        ask_to_read(manifest, len(document), yes=yes, reads_data=False)
        run = manifest.config
        size = run_size(run, manifest.vocab_size)
        anchors = Anchors(run, {SHARED: size.shared_params, "slot": size.slot_params})
        guests = guest_list(swarm, manifest)
        swarm.enter(run.round, anchors.vectors(), manifest.genesis(), max_slots=0, guests=guests, recent=recent)
        yield swarm, run, anchors
    finally:
        swarm.close()
