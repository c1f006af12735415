"""`spes monitor`: join a run in client mode, watch it to its end, leave the model and a report behind."""

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

from spes_p2p.cli import EXIT_INTERRUPTED
from spes_p2p.commands.evaluate import task_groups
from spes_p2p.config.commands import MonitorConfig
from spes_p2p.data.confined_tokenizer import ConfinedTokenizer
from spes_p2p.data.packing import held_out_batches
from spes_p2p.errors import ConfigError, ExchangeError, JoinError, SpesError
from spes_p2p.monitor.report import REPORT_FILE, write_report
from spes_p2p.monitor.sinks import METRICS_FILE, ConsoleSink, JsonlSink, Sinks, WandbSink, replay
from spes_p2p.monitor.tasks import TASKS_DIRECTORY, TaskEvaluations
from spes_p2p.monitor.view import SwarmView
from spes_p2p.monitor.watch import Archive, Ending, Watch
from spes_p2p.peer.consent import ask_to_read
from spes_p2p.peer.restart import LEAST_SECONDS, start_again
from spes_p2p.presentation import check_plotting
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.manifest import MANIFEST, Manifest, fetch_manifest, guest_list
from spes_p2p.swarm.p2p import peerstore
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.node import ListenConfig, Node
from spes_p2p.swarm.p2p.peerstore import Peerstore

log = logging.getLogger(__name__)

MODEL_DIRECTORY, VERSIONS_DIRECTORY, IDENTITY_FILE = "model", "versions", "identity.key"
RESULTS = (METRICS_FILE, REPORT_FILE, MODEL_DIRECTORY, VERSIONS_DIRECTORY, TASKS_DIRECTORY)
EVALUATION_BATCH = 8
EXIT_CODES = {Ending.FINISHED: 0, Ending.VANISHED: 1, Ending.STOPPED: EXIT_INTERRUPTED}


def prepare_output(settings: MonitorConfig) -> Path:
    """Return the output directory, ready for a new or a resumed watch.

    Only a monitor's own files are checked and deleted: a launcher keeps files in the same directory.

    Raises:
        ConfigError: it holds an earlier monitor's results and neither resume nor overwrite is set, or it cannot
            be written.
    """
    output = settings.output.expanduser()
    results = [output / name for name in RESULTS]
    found = [path.name for path in results if path.exists()]
    if found and not settings.resume and not settings.overwrite:
        raise ConfigError(f"output {output} holds {', '.join(found)} already; pass --resume, --overwrite or another")
    try:
        output.mkdir(parents=True, exist_ok=True)
        _delete([*results, output / peerstore.FILE] if settings.overwrite else [])
    except OSError as error:
        raise ConfigError(f"cannot write output {output}: {error.strerror}; choose a writable --output") from error
    return output


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def main(settings: MonitorConfig) -> int:
    """Watch a run to its end.

    Returns:
        0 after the last round, 1 if all peers went away before it, 130 if interrupted. If its own p2pd or DHT process
        dies, the call does not return: the monitor starts anew.

    Raises:
        ConfigError, DataError, JoinError: it cannot start, or its results cannot be written.
    """
    check_plotting()
    task_groups(settings.tasks, settings.suite, settings.task_path)  # before anything is joined or written
    output = prepare_output(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    new = [path for name in (IDENTITY_FILE, VERSIONS_DIRECTORY) if not (path := output / name).exists()]
    try:
        return _join_and_watch(settings, output)
    except SpesError:
        # What a failed start leaves would make the next one, with corrected flags, demand --resume or --overwrite.
        if not (output / METRICS_FILE).exists():
            _delete(new)
        raise


def _join_and_watch(settings: MonitorConfig, output: Path) -> int:
    node = Node(
        Identity(output / IDENTITY_FILE),
        settings.run_name,
        initial_peers=settings.initial_peers,
        peerstore=Peerstore(output / peerstore.FILE),
        listen=ListenConfig(client_mode=True),
    )
    swarm = HivemindSwarm(node, output / VERSIONS_DIRECTORY, serve=False)
    try:
        seen = swarm.versions().get(MANIFEST) if settings.resume else None  # of which it has asked before
        manifest, document = fetch_manifest(swarm, settings.founder)
        asked = seen is not None and seen.digest == manifest.digest
        reads_data = settings.held_out_sequences > 0
        ask_to_read(manifest, len(document), yes=settings.yes or asked, reads_data=reads_data)
        tokenizer = ConfinedTokenizer(document, output / VERSIONS_DIRECTORY / "tokenizer", manifest.vocab_size)
        archive = Archive(swarm, manifest, _held_out(settings, manifest, tokenizer))
        guests = guest_list(swarm, manifest)
        swarm.enter(manifest.config.round, archive.anchors.vectors(), max_slots=0, guests=guests)
        entered = time.monotonic()

        def save() -> None:
            try:
                archive.save(output / MODEL_DIRECTORY, tokenizer)
            except OSError as error:
                where = output / MODEL_DIRECTORY
                raise ConfigError(f"cannot write {where}: {error}; make room and start again with --resume") from error

        tasks = _task_evaluations(settings, output, lambda folder: archive.save(folder, tokenizer))
        ending = _watch(settings, output, swarm, manifest, archive, save, tasks)
        _conclude(ending, archive, save)
        write_report(output, facts={"run": ending.value})
    finally:
        swarm.close()
    if tasks is not None:
        _conclude_tasks(tasks, ending, archive.round)
    if ending is Ending.CUT_OFF:
        _watch_again(output, swarm.watchdog.death, time.monotonic() - entered)
    return EXIT_CODES[ending]


def _task_evaluations(settings: MonitorConfig, output: Path, save: Callable[[Path], None]) -> TaskEvaluations | None:
    """Return what runs lm-eval tasks on the run's models, if any are asked for."""
    if not settings.tasks and settings.suite is None:
        return None
    flags = ["--tasks", *settings.tasks] if settings.tasks else []
    flags += ["--suite", settings.suite] if settings.suite is not None else []
    flags += ["--task-path", str(settings.task_path)] if settings.task_path is not None else []
    return TaskEvaluations(output / TASKS_DIRECTORY, flags, save, settings.threads)


def _conclude_tasks(tasks: TaskEvaluations, ending: Ending, last_round: int) -> None:
    """Run the tasks on the last model once the swarm is left, as they may take hours."""
    try:
        if ending in (Ending.FINISHED, Ending.VANISHED) and last_round > 0:
            tasks.finish(last_round)
    finally:
        tasks.close()


def _watch_again(output: Path, death: str, seconds: float) -> NoReturn:
    """Restart this process after its p2pd or DHT has died; the watch continues from the files in `output`.

    Raises:
        JoinError: it died so soon after the start that every restart would end the same way.
    """
    if seconds < LEAST_SECONDS:
        raise JoinError(f"{death}; start this monitor again with --resume --output {output}")
    log.warning("%s; starting again with what this monitor has in %s", death, output)
    start_again()


def _watch(
    settings: MonitorConfig,
    output: Path,
    swarm: HivemindSwarm,
    manifest: Manifest,
    archive: Archive,
    save: Callable[[], None],
    tasks: TaskEvaluations | None,
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
            evaluated=tasks.start if tasks is not None else None,
            evaluate_every=settings.evaluate_every,
            poll_seconds=settings.poll_seconds,
        ).run()
    except KeyboardInterrupt:
        return Ending.STOPPED
    finally:
        sinks.close()


def _conclude(ending: Ending, archive: Archive, save: Callable[[], None]) -> None:
    """Log how the watch ended; save the newest model of a run that did not reach its last round."""
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
    settings: MonitorConfig, manifest: Manifest, tokenizer: ConfinedTokenizer
) -> Callable[[], Sequence[LongTensor]]:
    run = manifest.config
    if not settings.held_out_sequences:
        return list
    if run.data.source == "files" and not settings.text and not settings.shards:
        raise ConfigError(
            f"run {manifest.run_id!r} trains on files; name text with --text, or token shards with --data, whose "
            f"held-out part it evaluates on, or pass --held-out-sequences 0"
        )
    corpus = settings.corpus(run.data)
    return lambda: held_out_batches(
        corpus,
        tokenizer,
        paths=settings.text,
        cache=settings.cache.expanduser(),
        num_sequences=settings.held_out_sequences,
        batch_size=EVALUATION_BATCH,
        seed=run.seed,
    )


def _facts(manifest: Manifest) -> Mapping[str, Any]:
    """Return the fields of the `run` event."""
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
