"""`spes monitor`: join a run in client mode, watch it to its end, leave the model and a report behind."""

from __future__ import annotations

import contextlib
import logging
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import LongTensor

from spes_p2p.cli import EXIT_INTERRUPTED, Terminated
from spes_p2p.commands.evaluate import task_groups
from spes_p2p.config.commands import MonitorConfig
from spes_p2p.config.link import MAX_ADDRESSES, JoinLink
from spes_p2p.data.chat_rows import conversation_files
from spes_p2p.data.confined_tokenizer import ConfinedTokenizer
from spes_p2p.data.conversations import Prompt, held_out_prompts
from spes_p2p.data.packing import held_out_by_source, probe_windows
from spes_p2p.data.remote import with_fetched
from spes_p2p.errors import ConfigError, DataError, ExchangeError, JoinError, SpesError
from spes_p2p.fs import private_folder
from spes_p2p.monitor import credit
from spes_p2p.monitor.checkpoints import CHECKPOINTS, Checkpoints
from spes_p2p.monitor.credit import Credit
from spes_p2p.monitor.curves import TensorboardSink, WandbSink, check_packages
from spes_p2p.monitor.events import METRICS_FILE, Event, JsonlSink, Sink, read_events, replay
from spes_p2p.monitor.model_folder import VERSIONS, export
from spes_p2p.monitor.page.server import Page
from spes_p2p.monitor.page.snapshot import PageState
from spes_p2p.monitor.report import REPORT_FILE, write_report
from spes_p2p.monitor.sinks import ConsoleSink, Sinks
from spes_p2p.monitor.tasks import TASKS_DIRECTORY, TaskEvaluations
from spes_p2p.monitor.uploads import open_place
from spes_p2p.monitor.view import SwarmView
from spes_p2p.monitor.watch import Archive, Ending, Watch
from spes_p2p.peer.base import obtain_base, stored_base
from spes_p2p.peer.consent import ask_to_read
from spes_p2p.peer.output_dir import alone_in, delete
from spes_p2p.peer.restart import LEAST_SECONDS, start_again
from spes_p2p.planner.size import run_size
from spes_p2p.presentation import say
from spes_p2p.swarm.consensus import FOLDER as CONSENSUS
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.manifest import Manifest, Revisions, fetch_manifest, guest_list, kept_manifest
from spes_p2p.swarm.p2p import peerstore
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.node import ListenConfig, Node
from spes_p2p.swarm.p2p.peerstore import Peerstore

log = logging.getLogger(__name__)

MODEL_DIRECTORY, IDENTITY_FILE, LOCK_FILE = "model", "identity.key", "monitor.lock"
TENSORBOARD_DIRECTORY = "tensorboard"
RESULTS = (METRICS_FILE, REPORT_FILE, MODEL_DIRECTORY, VERSIONS, CONSENSUS, TASKS_DIRECTORY, CHECKPOINTS)
EVALUATION_BATCH = 8
REPLIES = 3
"""Held-out conversations for which the model writes the first reply at each evaluation."""
EXIT_CODES = {
    Ending.FINISHED: 0,
    Ending.VANISHED: 1,
    Ending.STOPPED: EXIT_INTERRUPTED,
    Ending.TERMINATED: EXIT_INTERRUPTED,
}


@contextlib.contextmanager
def own_output(settings: MonitorConfig) -> Iterator[Path]:
    """Give the block the output directory for itself, ready for a new or a resumed watch.

    Only a monitor's own files are checked and deleted: a launcher keeps files in the same directory.

    Raises:
        ConfigError: it holds an earlier monitor's results and neither resume nor overwrite is set, another monitor
            writes there, or it cannot be written.
    """
    output = settings.output
    results, curves = [output / name for name in RESULTS], output / TENSORBOARD_DIRECTORY
    with contextlib.ExitStack() as stack:
        try:
            if output.is_dir():  # before it is looked at: a monitor that runs has results
                stack.enter_context(alone_in(output, LOCK_FILE))
            found = [path.name for path in results if path.exists()]
            if found and not settings.resume and not settings.overwrite:
                names = ", ".join(found)
                raise ConfigError(f"output {output} holds {names} already; pass --resume, --overwrite or another")
            if not output.is_dir():
                private_folder(output)
                stack.enter_context(alone_in(output, LOCK_FILE))
            delete([*results, curves, output / peerstore.FILE] if settings.overwrite else [])
        except OSError as error:
            raise ConfigError(f"cannot write output {output}: {error.strerror}; choose a writable --output") from error
        yield output


def main(settings: MonitorConfig) -> int:
    """Watch a run to its end.

    Returns:
        0 after the last round, 1 if all peers went away before it, 130 if interrupted. If its own p2pd or DHT process
        dies, the call does not return: the monitor starts anew.

    Raises:
        ConfigError, DataError, JoinError: it cannot start, or its results cannot be written.
    """
    task_groups(settings.tasks, settings.suite, settings.task_path)  # before anything is joined or written
    if settings.upload is not None:
        open_place(settings.upload)
    check_packages(wandb=settings.wandb, tensorboard=settings.tensorboard)
    with own_output(settings) as output:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        new = [path for name in (IDENTITY_FILE, VERSIONS, CONSENSUS) if not (path := output / name).exists()]
        try:
            return _join_and_watch(settings, output)
        except SpesError:
            # What a failed start leaves would make the next one, with corrected flags, demand --resume or --overwrite.
            if not (output / METRICS_FILE).exists():
                delete(new)
            raise


def _join_and_watch(settings: MonitorConfig, output: Path) -> int:
    node = Node(
        Identity(output / IDENTITY_FILE),
        settings.run_name,
        initial_peers=settings.initial_peers,
        peerstore=Peerstore(output / peerstore.FILE),
        listen=ListenConfig(client_mode=True),
    )
    swarm = HivemindSwarm(node, output / VERSIONS, serve=False)
    page: Page | None = None
    try:
        if settings.page != "off":
            view = SwarmView(num_slots=0, total_rounds=0, absence_seconds=0.0, now=swarm.now())
            page = Page(settings.page, PageState(view, {"run_id": settings.run_name}, stage="joining"), output)
            (log.info if settings.console == "none" else say)(f"page: {page.address}")
        seen = kept_manifest(swarm) if settings.resume else None  # of which it has asked before
        manifest, document = fetch_manifest(swarm, settings.founder)
        asked = seen is not None and seen.digest == manifest.digest
        reads_data = settings.held_out_sequences > 0
        agreed = settings.yes or asked
        ask_to_read(manifest, len(document), yes=agreed, reads_data=reads_data, paths=settings.shards)
        template = manifest.config.data.chat_template or ""
        tokenizer = ConfinedTokenizer(document, output / VERSIONS / "tokenizer", manifest.vocab_size, template)
        prompts = partial(_prompts, settings, manifest, tokenizer)
        if manifest.config.adapter is not None:
            obtain_base(swarm, manifest, None)
        held_out, base = _held_out(settings, manifest, tokenizer), stored_base(output / VERSIONS, manifest)
        in_fp32 = bool(settings.tasks or settings.suite or settings.checkpoint_every)  # a checkpoint is in fp32
        archive = Archive(swarm, manifest, held_out, tokenizer.decode, prompts, base, in_fp32=in_fp32)
        guests = guest_list(swarm, manifest)
        start = manifest.genesis()
        swarm.enter(
            manifest.config.round, archive.anchors.vectors(), start, max_slots=0, guests=guests, recent=settings.recent
        )
        entered, revisions = time.monotonic(), Revisions(swarm, manifest)

        beside = _Beside(
            _task_evaluations(settings, output, lambda folder: export(output, folder, overwrite=True, merges=True)),
            _checkpoints(settings, output, manifest),
        )
        try:
            ending = _watch(settings, output, revisions, manifest, archive, beside, page)
            beside.take(_conclude(ending, output), output)
            write_report(output, facts={"run": ending.value})
        except BaseException:
            beside.close()
            raise
    finally:
        if page is not None:
            page.close()
        swarm.close()
    beside.conclude(ending, archive.round)
    if ending is Ending.CUT_OFF:
        _watch_again(output, swarm.watchdog.death, time.monotonic() - entered)
    return EXIT_CODES[ending]


def _task_evaluations(settings: MonitorConfig, output: Path, save: Callable[[Path], object]) -> TaskEvaluations | None:
    """Return what runs lm-eval tasks on the run's models, if any are asked for."""
    if not settings.tasks and settings.suite is None:
        return None
    flags = ["--tasks", *settings.tasks] if settings.tasks else []
    flags += ["--suite", settings.suite] if settings.suite is not None else []
    flags += ["--task-path", str(settings.task_path)] if settings.task_path is not None else []
    return TaskEvaluations(output / TASKS_DIRECTORY, flags, save, settings.threads)


def _checkpoints(settings: MonitorConfig, output: Path, manifest: Manifest) -> Checkpoints | None:
    """Return what writes and uploads checkpoints during the run, if any are asked for."""
    every, keep_last, upload = settings.checkpoint_every, settings.keep_last, settings.upload
    if upload is None and every is None:
        return None

    def save(folder: Path, round: int, loss: float | None) -> None:
        export(output, folder, round, held_out=loss)

    return Checkpoints(output / CHECKPOINTS, manifest, save, every=every, keep_last=keep_last, upload=upload)


@dataclass(frozen=True)
class _Beside:
    """What goes on beside the watch with each evaluated model."""

    tasks: TaskEvaluations | None
    checkpoints: Checkpoints | None

    def evaluated(self, round: int, loss: float | None) -> None:
        if self.checkpoints is not None:
            self.checkpoints.evaluated(round, loss)
        if self.tasks is not None:
            self.tasks.start(round)

    def save(self, output: Path, round: int, loss: float | None) -> None:
        """Write the run's last model."""
        _save(output, round, loss)
        if self.checkpoints is not None:
            self.checkpoints.take(round, loss, made=output / MODEL_DIRECTORY)

    def take(self, round: int | None, output: Path) -> None:
        """Keep a model that was saved because the run did not reach its last round, as a checkpoint."""
        if self.checkpoints is not None and round is not None:
            self.checkpoints.take(round, None, made=output / MODEL_DIRECTORY)

    def conclude(self, ending: Ending, last_round: int) -> None:
        """Once the swarm is left, wait for the last model's upload, and run the tasks on it: both may take hours."""
        try:
            if ending in (Ending.FINISHED, Ending.VANISHED):
                if self.checkpoints is not None:
                    self.checkpoints.finish()
                if self.tasks is not None and last_round > 0:
                    self.tasks.finish(last_round)
        finally:
            self.close()

    def close(self) -> None:
        """End what still goes on."""
        if self.checkpoints is not None:
            self.checkpoints.close()
        if self.tasks is not None:
            self.tasks.close()


def _watch_again(output: Path, death: str, seconds: float) -> NoReturn:
    """Restart this process after its p2pd or DHT has died; the watch continues from the files in `output`.

    Raises:
        JoinError: it died so soon after the start that every restart would end the same way.
    """
    if seconds < LEAST_SECONDS:
        raise JoinError(f"{death}; start this monitor again with --resume --output {shlex.quote(str(output))}")
    log.warning("%s; starting again with what this monitor has in %s", death, output)
    start_again()


def _watch(
    settings: MonitorConfig,
    output: Path,
    revisions: Revisions,
    manifest: Manifest,
    archive: Archive,
    beside: _Beside,
    page: Page | None,
) -> Ending:
    swarm, rounds, facts = revisions.swarm, manifest.config.round, _facts(manifest)
    view = SwarmView(manifest.config.num_slots, rounds.total, absence_seconds=rounds.heartbeat_seconds)
    view = replace(view, now=swarm.now())
    path = output / METRICS_FILE
    known: Mapping[str, Any] = {}
    if path.exists() and path.stat().st_size:
        view, known = replay(path, view)
    view = replace(view, settled=credit.kept(output))
    facts = {**facts, "watch": known.get("watch") or secrets.token_hex(4)}
    sinks = Sinks(view)
    try:
        sinks.add(METRICS_FILE, lambda: JsonlSink(path, facts, swarm.now()))
        sinks.add(credit.FILE, lambda: CreditSink(output))
        if (mode := settings.console) != "none":
            sinks.add("the console", lambda: ConsoleSink(manifest.run_id, mode))
        if settings.tensorboard:
            curves = output / TENSORBOARD_DIRECTORY
            delete([curves])  # an earlier start may have been without --tensorboard
            sinks.add("TensorBoard", lambda: TensorboardSink(curves), read_events(path))
        if settings.wandb:
            fields = {"name": settings.run_name, "watch": str(facts["watch"]), "config": facts["config"]}
            before = [] if (output / "wandb").exists() else read_events(path)
            sinks.add("W&B", lambda: WandbSink(output, project=settings.wandb_project, **fields), before)
        if page is not None:
            shown = page
            if path.exists():
                for event in read_events(path):
                    shown.take(event)
            addresses = tuple(settings.initial_peers[:MAX_ADDRESSES])
            known = {"run_id": manifest.run_id, "founder": manifest.founder, "addresses": addresses}

            def link() -> str:
                made = JoinLink.model_validate(known | {"recent": swarm.consensus.recent()})
                return made.encode() + settings.flags_of_others(manifest.config)

            sinks.add("the page", lambda: PageSink(shown, facts, link))
        return Watch(
            *(swarm, revisions, archive, sinks.update, view),
            save=partial(beside.save, output),
            evaluated=beside.evaluated,
            settings=settings,
        ).run()
    except Terminated:
        return Ending.TERMINATED
    except KeyboardInterrupt:
        return Ending.STOPPED
    finally:
        sinks.close()


class PageSink(Sink):
    """Shows a watch and the link by which others join on its page; `close` leaves the page up, with the last state."""

    def __init__(self, page: Page, run: Mapping[str, Any], link: Callable[[], str] = str) -> None:
        self._page = page
        self._run = run
        self._link = link

    def take(self, event: Event, view: SwarmView) -> None:
        self._page.take(event)

    def update(self, view: SwarmView) -> None:
        self._page.show(PageState(view, self._run, link=self._link()))


class CreditSink(Sink):
    """Keeps the tokens that counted, by peer, in the monitor's output."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._written = Credit()

    def take(self, event: Event, view: SwarmView) -> None:
        return

    def update(self, view: SwarmView) -> None:
        if view.settled != self._written:
            credit.save(self._output, view.settled)
            self._written = view.settled


def _save(output: Path, round: int, loss: float | None) -> None:
    """Write the model of a round while the swarm is there; a missing version raises, so that the caller fetches again.

    Raises:
        ExchangeError: a version is missing or damaged.
        ConfigError: the checkpoint cannot be written.
    """
    try:
        export(output, output / MODEL_DIRECTORY, round, overwrite=True, held_out=loss)
    except DataError as error:
        raise ExchangeError(str(error)) from error


def _conclude(ending: Ending, output: Path) -> int | None:
    """Log how the watch ended; write the newest model of a run that did not reach its last round, and return which."""
    if ending in (Ending.FINISHED, Ending.TERMINATED):
        log.info("%s", ending.value)
        return None
    say = log.info if ending is Ending.STOPPED else log.error
    try:
        exported = export(output, output / MODEL_DIRECTORY, overwrite=True)
    except (DataError, ExchangeError, JoinError) as error:
        say("%s, and there is no model to save: %s", ending.value, error)
        return None
    say(
        "%s; %s is the model of round %d, the last one evaluated",
        ending.value,
        output / MODEL_DIRECTORY,
        exported.round,
    )
    return exported.round


def _held_out(
    settings: MonitorConfig, manifest: Manifest, tokenizer: ConfinedTokenizer
) -> Callable[[], Mapping[str, Sequence[LongTensor]]]:
    """Return what makes the held-out batches of each source; ConfigError if this machine has no text for them."""
    run = manifest.config
    if not settings.held_out_sequences:
        return dict
    has_urls = run.data.urls or (run.data.mixture and all(source.urls for source in run.data.mixture))
    if run.data.source == "files" and not (settings.text or settings.shards or has_urls):
        if run.data.probe is None:
            raise ConfigError(
                f"run {manifest.run_id!r} trains on files; name text with --text, or conversations or token shards "
                f"with --data, whose held-out part it evaluates on, or pass --held-out-sequences 0"
            )
        return lambda: {"": _probe(settings, manifest, tokenizer)}
    corpus, cache = settings.corpus(run.data), settings.cache
    return lambda: held_out_by_source(
        with_fetched(corpus, cache),
        tokenizer,
        paths=settings.text,
        cache=cache,
        num_sequences=settings.held_out_sequences,
        batch_size=EVALUATION_BATCH,
        seed=run.seed,
    )


def _probe(settings: MonitorConfig, manifest: Manifest, tokenizer: ConfinedTokenizer) -> Sequence[LongTensor]:
    """Return the run's public probe in batches."""
    windows_BT1 = probe_windows(manifest.config.data, tokenizer, settings.held_out_sequences)
    return [] if windows_BT1 is None else cast(Sequence[LongTensor], windows_BT1.split(EVALUATION_BATCH))


def _prompts(settings: MonitorConfig, manifest: Manifest, tokenizer: ConfinedTokenizer) -> Sequence[Prompt]:
    """Return the beginnings of held-out conversations, or of the probe's, for replies of the model; none of text."""
    data = manifest.config.data
    if not data.chat_template or data.source == "embedded" or settings.text or not settings.held_out_sequences:
        return []
    rows = conversation_files(settings.shards)
    return [] if settings.shards and rows is None else held_out_prompts(settings.corpus(data), tokenizer, rows, REPLIES)


def _facts(manifest: Manifest) -> Mapping[str, Any]:
    """Return the fields of the `run` event."""
    run = manifest.config
    return {
        "run_id": manifest.run_id,
        "founder": manifest.founder,
        "software": manifest.software,
        "total_rounds": run.round.total,
        "num_slots": run.num_slots,
        "vocab_size": manifest.vocab_size,
        "active_params": run_size(run, manifest.vocab_size).active_params(run.model.top_k),
        "config": run.model_dump(mode="json"),
    }
