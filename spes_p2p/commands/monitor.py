"""One monitor's life: join in client mode, watch the run, leave checkpoint and report behind.

Not `monitor.py`: `python monitor/run_monitor.py` puts this folder on the path, where such a file hides the package.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import LongTensor
from transformers import PreTrainedTokenizerBase

from spes_p2p.cli import EXIT_INTERRUPTED
from spes_p2p.data.packing import held_out_batches
from spes_p2p.data.tokenizer import tokenizer_from_bytes
from spes_p2p.errors import ConfigError, ExchangeError, JoinError, SpesError
from spes_p2p.monitor.archive import Archive
from spes_p2p.monitor.report import ConsoleSink, write_report
from spes_p2p.monitor.settings import (
    IDENTITY_FILE,
    METRICS_FILE,
    MODEL_DIRECTORY,
    VERSIONS_DIRECTORY,
    MonitorConfig,
    prepare_output,
)
from spes_p2p.monitor.sinks import JsonlSink, Sinks, WandbSink, replay
from spes_p2p.monitor.view import SwarmView
from spes_p2p.monitor.watch import Ending, Watch
from spes_p2p.peer.restart import LEAST_SECONDS, start_again
from spes_p2p.presentation import check_plotting
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.manifest import Manifest, fetch_manifest, guest_list
from spes_p2p.swarm.p2p import peerstore
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.node import Node
from spes_p2p.swarm.p2p.peerstore import KnownPeers

log = logging.getLogger(__name__)

EVALUATION_BATCH = 8
EXIT_CODES = {Ending.FINISHED: 0, Ending.VANISHED: 1, Ending.STOPPED: EXIT_INTERRUPTED}


def main(settings: MonitorConfig) -> int:
    """Watch a run to its end.

    Returns:
        0 after the last round, 1 if all peers went away before it, 130 if interrupted. If its own p2pd or DHT process
        dies, it does not return, but starts itself anew.

    Raises:
        ConfigError, DataError, JoinError: it cannot start, or its results cannot be written.
    """
    check_plotting()
    output = prepare_output(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    kept = {name for name in (IDENTITY_FILE, VERSIONS_DIRECTORY) if (output / name).exists()}
    try:
        return _join_and_watch(settings, output)
    except SpesError:
        # A start that failed must not stand in the way of the corrected one.
        if not (output / METRICS_FILE).exists():
            _delete({IDENTITY_FILE, VERSIONS_DIRECTORY} - kept, output)
        raise


def _delete(names: Iterable[str], output: Path) -> None:
    for path in (output / name for name in names):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _join_and_watch(settings: MonitorConfig, output: Path) -> int:
    node = Node(
        Identity(output / IDENTITY_FILE),
        settings.run_name,
        initial_peers=settings.initial_peers,
        known=KnownPeers(output / peerstore.FILE),
        client_mode=True,
    )
    swarm = HivemindSwarm(node, output / VERSIONS_DIRECTORY, serve=False)
    try:
        manifest, document = fetch_manifest(swarm, settings.founder)
        tokenizer = tokenizer_from_bytes(document, output / VERSIONS_DIRECTORY / "tokenizer")
        archive = Archive(swarm, manifest, _held_out(settings, manifest, tokenizer))
        guests = guest_list(swarm, manifest)
        swarm.enter(manifest.config.round, archive.anchors.vectors(), max_slots=0, guests=guests)
        entered = time.monotonic()

        def save() -> None:
            _save(archive, output / MODEL_DIRECTORY, tokenizer)

        ending = _watch(settings, output, swarm, manifest, archive, save)
        _say_goodbye(ending, archive, save)
        write_report(output, facts={"run": ending.value})
    finally:
        swarm.close()
    if ending is Ending.CUT_OFF:
        _watch_again(output, swarm.watchdog.death, time.monotonic() - entered)
    return EXIT_CODES[ending]


def _watch_again(output: Path, death: str, seconds: float) -> NoReturn:
    """Start anew what has died; what the watch has seen and pulled is on the disk.

    Raises:
        JoinError: it died so soon after the start that it would do so for ever.
    """
    if seconds < LEAST_SECONDS:
        raise JoinError(f"{death}; start this monitor again with --resume --output {output}")
    log.warning("%s; starting again with what this monitor has in %s", death, output)
    start_again()


def _save(archive: Archive, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    try:
        archive.save(directory, tokenizer)
    except OSError as error:
        raise ConfigError(f"cannot write {directory}: {error}; make room and start again with --resume") from error


def _watch(
    settings: MonitorConfig,
    output: Path,
    swarm: HivemindSwarm,
    manifest: Manifest,
    archive: Archive,
    save: Callable[[], None],
) -> Ending:
    rounds, facts = manifest.config.round, _facts(manifest)
    view = SwarmView(manifest.config.model.num_experts, rounds.total, absence_seconds=rounds.heartbeat_seconds)
    view = replace(view, now=swarm.now())
    path = output / METRICS_FILE
    if path.exists() and path.stat().st_size:
        view, _ = replay(path, view)
    sinks = Sinks()
    try:
        sinks.add(JsonlSink(path, facts, view))
        if settings.console != "none":
            sinks.add(ConsoleSink(manifest.run_id, settings.console, after_round=view.published))
        if settings.wandb:
            config = facts["config"]
            sinks.add(WandbSink(output, project=settings.wandb_project, name=manifest.run_id, config=config))
        return Watch(
            *(swarm, rounds, archive, sinks, view),
            save=save,
            watchdog=swarm.watchdog,
            evaluate_every=settings.evaluate_every,
            poll_seconds=settings.poll_seconds,
        ).run()
    except KeyboardInterrupt:
        return Ending.STOPPED
    finally:
        sinks.close()


def _say_goodbye(ending: Ending, archive: Archive, save: Callable[[], None]) -> None:
    """Save what there is of a run that was lost sight of, and say how it ended."""
    if ending not in (Ending.VANISHED, Ending.CUT_OFF):
        log.info("%s", ending.value)
        return
    if archive.round == 0 and archive.has_versions:
        try:
            archive.load()
        except ExchangeError as error:
            log.error("versions of an earlier watch cannot be used: %s", error)
    if archive.round == 0:
        log.error("%s, and none of its rounds was pulled: there is no model to save", ending.value)
        return
    save()
    log.error("%s; the checkpoint is the model of round %d", ending.value, archive.round)


def _held_out(
    settings: MonitorConfig, manifest: Manifest, tokenizer: PreTrainedTokenizerBase
) -> Callable[[], Sequence[LongTensor]] | None:
    run = manifest.config
    if not settings.held_out_sequences:
        return None
    if run.data.source == "files" and not settings.text:
        raise ConfigError(
            f"run {manifest.run_id!r} trains on files; name held-out text with --text, or pass --held-out-sequences 0"
        )
    return lambda: held_out_batches(
        run.data,
        tokenizer,
        paths=settings.text,
        cache=settings.cache.expanduser(),
        num_sequences=settings.held_out_sequences,
        batch_size=EVALUATION_BATCH,
        seed=run.seed,
    )


def _facts(manifest: Manifest) -> Mapping[str, Any]:
    """Fields of the `run` event."""
    run = manifest.config
    return {
        "run_id": manifest.run_id,
        "founder": manifest.founder,
        "software": manifest.software,
        "total_rounds": run.round.total,
        "num_slots": run.model.num_experts,
        "vocab_size": manifest.vocab_size,
        "config": run.model_dump(mode="json"),
    }
