"""One peer's life: found or join a run, train its rounds, keep serving for a while, leave."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import LongTensor, Tensor

from spes_p2p.cli import EXIT_INTERRUPTED
from spes_p2p.config import PeerConfig, RoundConfig, RunConfig
from spes_p2p.config.launch import check_ranks
from spes_p2p.config.machine import SEED_SECONDS
from spes_p2p.data.confined_tokenizer import ConfinedTokenizer
from spes_p2p.data.packing import TokenSource, probe_windows, train_sources
from spes_p2p.data.remote import with_fetched
from spes_p2p.data.shared import MAX_PROBE_PARTS, probe_sequences
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.monitor import credit
from spes_p2p.peer import restart
from spes_p2p.peer.base import own_copy, stored_base
from spes_p2p.peer.controls import Controls, limited
from spes_p2p.peer.joining import Admission, Joined, joined, kept, write_link
from spes_p2p.peer.output_dir import alone_in, check_output, fresh_output
from spes_p2p.peer.page import PeerPage, shown
from spes_p2p.peer.termination import Termination
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.manifest import TOKENIZER, Manifest
from spes_p2p.swarm.names import SHARED, VectorName, slot_ranges
from spes_p2p.training.anchors import start_digests
from spes_p2p.training.build import StartBundles, build_initial, build_synchroniser, build_trainer
from spes_p2p.training.checkpoint import Found, PeerCheckpoint, Saved
from spes_p2p.training.loss_gate import LossGate, public_text
from spes_p2p.training.ranks import Ranks
from spes_p2p.training.round import TrainingLoop
from spes_p2p.training.synchroniser import Synchroniser
from spes_p2p.training.trainer import Trainer

log = logging.getLogger(__name__)
LEAVING = "others fetch what only this peer has"


def _going_on(folder: Path) -> str:
    """Return how a peer that leaves goes on, and the command that writes the model so far as a checkpoint."""
    words = f"; the model so far: spes export {shlex.quote(str(folder))}" if (folder / "checkpoint").is_dir() else ""
    return f"the same command continues from here (`spes peer` with --resume){words}"


def main(config: PeerConfig) -> int:
    """Run a peer to the end of its run; return the exit code."""
    check_ranks(os.environ, founds=config.founds)
    try:
        return run(config)
    except restart.DaemonDied as died:
        restart.restart(config, died, num_ranks=Ranks(config.device).world_size)


def run(
    config: PeerConfig, on_joined: Callable[[Sequence[str]], None] = lambda _: None, ranks: Sequence[int] = ()
) -> int:
    """Run a peer to the end of its run; return the exit code.

    Args:
        on_joined: Told the multiaddrs by which others join, once this peer is in the swarm.
        ranks: Ids of the processes that are its other ranks, if this process has started them.

    Raises:
        DaemonDied: the peer is to be started again.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    group = Ranks(config.device)
    with Termination(config.grace, is_leader=group.is_leader, ranks=ranks) as end:
        if not group.is_leader:
            return _obey(config, group, end)
        check_output(config.output, resume=config.resume, overwrite=config.overwrite)
        with alone_in(config.output) if config.resume else fresh_output(config.output) as keep:
            controls = Controls(config.output)
            config = limited(config, controls.limits)
            own = kept(config)
            if own.is_finished and not config.initial_peers and config.seed_seconds is None:
                log.info("the run is finished; --seed-seconds 600 would serve its versions for ten minutes")
                group.connect()
                group.say(None)
                group.close()
                return 0
            with (
                joined(config, own) as entered,
                controls.watching(
                    entered.swarm.traffic,
                    max_slots=entered.max_slots,
                    interrupts=group.world_size == 1 or bool(ranks),
                ),
                shown(config, entered, controls) as page,
                restart.when_daemons_die(entered.swarm, end),
            ):
                on_joined(entered.swarm.node.contacts())
                try:
                    _train(config, group, end, entered, own.found, keep or _nothing, page, controls)
                except KeyboardInterrupt:
                    if entered.swarm.watchdog.death and not end.is_asked:
                        raise
                    log.info("leaving; %s", _going_on(config.output))
                    return EXIT_INTERRUPTED
    return 0


def _obey(config: PeerConfig, ranks: Ranks, end: Termination) -> int:
    """Train on a rank other than the leader, as the leader says; return the exit code."""
    with contextlib.ExitStack() as stack:
        stack.callback(ranks.close)
        try:
            ranks.connect()
            admission: Admission | None = ranks.hear()
            if admission is not None:  # else the leader has found the run finished
                trainer, _ = _trainer(config, ranks, admission)
                stack.callback(trainer.close)
                ranks.obey(trainer)
        except RuntimeError:
            if not end.is_asked:  # else the leader has left, and its connections with it
                raise
            return EXIT_INTERRUPTED
    return 0


# ---------------------------------------------------------------------- training


def _nothing(*_: str) -> None:
    """Keep the output of a resumed peer, which is kept anyway; or tell a page that is off."""


def _train(
    config: PeerConfig,
    ranks: Ranks,
    end: Termination,
    joined: Joined,
    found: Found | None,
    keep_output: Callable[[], None],
    page: PeerPage | None,
    controls: Controls,
) -> None:
    """Train to the run's end. Until its data are read, a start may still fail."""
    swarm, admission, _, max_slots = joined
    tell = page.say if page is not None else _nothing
    with contextlib.ExitStack() as stack:
        stack.callback(ranks.close)
        ranks.connect()
        stack.enter_context(ranks.leading())
        ranks.say(admission)
        trainer, probe_BT1 = _trainer(config, ranks, admission)
        stack.callback(trainer.close)
        keep_output()
        checkpoint = PeerCheckpoint(config.output, config)
        saved = checkpoint.load(found, skips_optimizer=config.skip_optimizer) if found is not None else None
        run = _to_resume(config, admission.run, saved)
        run_id = admission.manifest.run_id
        sync = build_synchroniser(swarm, run, trainer, run_id=run_id, max_slots=max_slots, machine=config)
        if found is not None:
            sync.held.resume(found.state.slots)
        stack.callback(sync.held.leave)
        end.prepare(partial(_hand_over, sync, run.round))
        has_version = SHARED in swarm.versions() or saved is not None
        initial = None if has_version else _initial(config, run, admission.manifest.vocab_size, sync, trainer)
        if config.slots_by_data and not has_version:
            sync.held.resume(_slots_by_data(trainer, initial, max_slots))
        gate = LossGate(trainer, sync, probe_BT1)
        loop = TrainingLoop(run, trainer, sync, gate=gate, checkpoint=checkpoint, intent=controls.intent)
        loop.amended = partial(_each_round, config, joined)
        try:
            loop.open(initial, saved)
            del saved, initial  # as large as the model, or open files of a checkpoint; neither is needed again
            tell("")
            loop.run(page.reported if page is not None else None)
            ranks.say(None)  # the other ranks end
            if loop.is_ended:
                tell("leaving", LEAVING)
                end.hand_over()
                log.info("finished as asked; %s", _going_on(config.output))
                return
        except KeyboardInterrupt:
            if not swarm.watchdog.death:
                tell("leaving", LEAVING)
                end.hand_over()
            raise
        _serve_for_a_while(config, swarm, tell)  # which an interrupt ends at once


def _trainer(config: PeerConfig, ranks: Ranks, admission: Admission) -> tuple[Trainer, LongTensor]:
    """Return this rank's trainer, and the sequences that the loss gate measures."""
    run, manifest = admission.run, admission.manifest
    source, probe_BT1 = _source(config, run, manifest)
    base = stored_base(config.output / "versions", manifest)
    data = source(admission.data_seed)
    return build_trainer(run, manifest.vocab_size, data, ranks, machine=config, base=base), probe_BT1


def _each_round(config: PeerConfig, joined: Joined) -> RunConfig | None:
    """Write the run's link with a recent certificate; return the settings if they have changed."""
    with contextlib.suppress(OSError, ValueError):  # a full disk, or no address now: the last link holds
        write_link(config, joined.swarm, joined.admission.manifest)
    with contextlib.suppress(OSError):  # a full disk: the next round adds this one's, too
        credit.keep(config.output, joined.swarm.consensus.bodies(), joined.swarm.names())
    return joined.revisions.look()


def _to_resume(config: PeerConfig, run: RunConfig, saved: Saved | None) -> RunConfig:
    """Return the run to go on with, which waits for no other peer if this one goes on alone, or only serves the end."""
    is_over = saved is not None and saved.state.round >= run.round.total and not config.initial_peers
    if not (is_over or (config.resume and config.alone)):
        return run
    return run.model_copy(update={"round": run.round.model_copy(update={"min_peers": 1})})


def _initial(
    config: PeerConfig, run: RunConfig, vocab_size: int, sync: Synchroniser, trainer: Trainer
) -> Callable[[], Mapping[VectorName, Tensor]] | None:
    """Return what makes the vectors of the run's start; None if this peer must fetch them."""
    source = own_copy(config.start_from) if run.adapter is None else config.adapter_folder
    if source is not None:
        bundles = StartBundles(run, vocab_size, source)
        if not config.founds:
            bundles.check()  # now, before it waits for others; the founder has just read them
        return lambda: bundles
    if start_digests(run):
        return None
    return partial(build_initial, run, vocab_size, sync.anchors, trainer.layouts)


def _slots_by_data(trainer: Trainer, initial: Callable[[], Mapping[VectorName, Tensor]] | None, most: int) -> list[int]:
    """Return the slots that the run's start routes most of this peer's data to.

    Raises:
        ConfigError: this peer has no copy of the start, or the run has no slots.
    """
    if initial is None or not trainer.model.num_slots:
        reason = "this run has no slots to choose" if initial else "it needs this machine's copy of the model (--from)"
        raise ConfigError(f"--slots-by-data: {reason}; drop it")
    vectors = initial()
    for name in vectors:
        trainer.load({name: vectors[name][: trainer.layouts[name.kind].numel]})
    routed = trainer.routing_of_data()
    chosen = sorted(routed, key=lambda slot: -routed[slot])[:most]
    share = sum(map(routed.__getitem__, chosen)) / max(1, sum(routed.values()))
    log.info("%.0f %% of this peer's data is routed to slots %s", 100 * share, slot_ranges(sorted(chosen)))
    return chosen


def _source(config: PeerConfig, run: RunConfig, manifest: Manifest) -> tuple[Callable[[int], TokenSource], LongTensor]:
    """Return what makes the training data of a seed, and the sequences that the loss gate measures."""
    file = config.output / "versions" / f"{TOKENIZER}.0.{manifest.tokenizer_digest}.bin"
    if not file.is_file():
        raise DataError(f"there is no {file}; join again with --overwrite")
    place, template = config.output / "tokenizer", run.data.chat_template or ""
    tokenizer = ConfinedTokenizer(file.read_bytes(), place, manifest.vocab_size, template)
    corpus = with_fetched(config.corpus(run.data), config.cache)
    source = train_sources(corpus, tokenizer, paths=config.text, cache=config.cache)
    probe_BT1 = probe_windows(run.data, tokenizer, MAX_PROBE_PARTS * probe_sequences(run.data.sequence_length))
    if run.data.source != "hub":
        tokenizer.close()  # all text is tokenised now
    return source, probe_BT1 if probe_BT1 is not None else public_text(source, run.data.sequence_length)


def _hand_over(sync: Synchroniser, rounds: RoundConfig, seconds: float) -> None:
    """Give the slots back, and leave once others have what only this peer has, or time is up."""
    left = min(rounds.exchange_seconds, seconds)
    log.info("leaving: serving slots until others have them, at most %.0f s; Ctrl-C again ends at once", left)
    has_others = bool(sync.held.others())
    if (lacking := sync.held.hand_over(left)) and has_others:
        log.warning("nobody has taken the newest %s; the others go on from older ones", ", ".join(lacking))


def _serve_for_a_while(config: PeerConfig, swarm: HivemindSwarm, tell: Callable[[str, str], None]) -> None:
    """Keep the final versions within reach for a while."""
    tell("serving", "the last round is trained; a monitor may fetch its model")
    seconds = SEED_SECONDS if config.seed_seconds is None else config.seed_seconds
    log.info("trained the last round; serving its versions for %.0f s", seconds)
    swarm.wait(seconds)
    log.info("the run is finished; its model: spes export %s", shlex.quote(str(config.output)))
