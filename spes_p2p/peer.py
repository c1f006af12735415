"""One peer's life: found or join a run, train its rounds, keep serving for a while, leave."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

import spes_p2p
from spes_p2p.codecs import digest
from spes_p2p.config import PeerConfig, RunConfig, check_machine
from spes_p2p.data.packing import train_source
from spes_p2p.data.tokenizer import resolve_tokenizer, tokenizer_bytes, tokenizer_from_bytes
from spes_p2p.errors import ConfigError, DataError, JoinError, RecordError
from spes_p2p.model.build import check_build, hf_config
from spes_p2p.planner import Setup, free_memory_bytes, model_size, slots_that_fit
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.identity import Identity
from spes_p2p.swarm.manifest import (
    Manifest,
    declare_manifest,
    fetch_manifest,
    find_manifests,
    publish_manifest,
    read_manifest,
)
from spes_p2p.swarm.node import Node
from spes_p2p.swarm.records import Archived
from spes_p2p.swarm.roster import SHARED
from spes_p2p.swarm.version_store import VersionStore
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.assembly import build_initial, build_synchroniser, build_trainer
from spes_p2p.training.checkpoint import PeerCheckpoint, PeerState
from spes_p2p.training.output import check_output, fresh_output
from spes_p2p.training.process_group import ProcessGroup
from spes_p2p.training.rounds import Rounds
from spes_p2p.training.synchroniser import Synchroniser
from spes_p2p.training.trainer import Trainer

log = logging.getLogger(__name__)

ADDRESS_FILE = "address"
"""In a peer's output: the multiaddr that others join by, there once the peer is in the swarm."""


@dataclass(frozen=True)
class Admission:
    """What every rank must know once the leader has joined.

    Attributes:
        manifest: The run's.
        max_slots: Slots this peer can train.
        data_seed: Seed of its data order.
    """

    manifest: Manifest
    max_slots: int
    data_seed: int


def main(config: PeerConfig) -> int:
    """Run a peer to the end of its run; return the exit code."""
    if config.threads:
        torch.set_num_threads(config.threads)
    group = ProcessGroup(config.device)
    if not group.is_leader:
        _train(config, group, None)
        return 0
    check_output(config.output, resume=config.resume, overwrite=config.overwrite)
    output = contextlib.nullcontext(_nothing) if config.resume else fresh_output(config.output)
    with output as keep, _joined(config) as (swarm, admission):
        try:
            _train(config, group, (swarm, admission), keep)
        except KeyboardInterrupt:
            log.info("leaving; continue later with --resume --output %s", config.output)
            return 130
    return 0


# ---------------------------------------------------------------------- joining


@contextlib.contextmanager
def _joined(config: PeerConfig) -> Iterator[tuple[HivemindSwarm, Admission]]:
    """Be in the swarm, with manifest and averager; leave it in the end, whatever happens."""
    if config.initial_peers and config.run is not None:
        raise ConfigError("settings of the run come from its manifest; drop --run.* and --config, or --initial-peers")
    run = config.run or RunConfig()
    if not config.initial_peers:
        _check_choices(config, run)
    kept = _kept(config)
    founded = None if config.initial_peers or config.resume else _found(config, run)
    node = Node(
        Identity(config.output / "identity.key"),
        config.run_id,
        initial_peers=config.initial_peers,
        host=config.host,
        port=config.port,
        announce=config.announce,
    )
    swarm = HivemindSwarm(node, config.output / "versions", uplink_mbit=config.uplink_mbit)
    try:
        manifest = _manifest(config, swarm, founded, kept)
        yield swarm, _enter(config, swarm, manifest)
    finally:
        swarm.close()


def _found(config: PeerConfig, run: RunConfig) -> tuple[RunConfig, PreTrainedTokenizerBase]:
    """Resolve a new run's tokenizer; shapes must fit and the corpus be readable before anything else happens."""
    cache = config.cache.expanduser()
    tokenizer = resolve_tokenizer(run.data, config.text, cache)
    hf_config(run.model, len(tokenizer), run.data.sequence_length)
    if run.data.source != "hub":
        train_source(run.data, tokenizer, paths=config.text, cache=cache, order_seed=0)
    return run, tokenizer


def _kept(config: PeerConfig) -> Manifest | None:
    """Return the manifest of the run that a resumed peer was in; read before anything is started."""
    if not config.resume:
        return None
    try:
        return read_manifest(VersionStore(config.output / "versions", config.run_id).read)
    except (JoinError, RecordError) as error:
        raise JoinError(
            f"--output {config.output} cannot go on with run {config.run_id!r}: {error}; "
            f"set --run-id to its run, or name another --output"
        ) from error


def _manifest(
    config: PeerConfig,
    swarm: HivemindSwarm,
    founded: tuple[RunConfig, PreTrainedTokenizerBase] | None,
    kept: Manifest | None,
) -> Manifest:
    """Return the run's manifest: the founder's own, the swarm's, or the one kept from before a restart."""
    if founded is not None:
        run, tokenizer = founded
        document = tokenizer_bytes(tokenizer)
        manifest = Manifest(
            run_id=config.run_id,
            founder=swarm.peer_id,
            software=spes_p2p.__version__,
            config=run,
            vocab_size=len(tokenizer),
            tokenizer_digest=digest(document),
        )
        publish_manifest(swarm, manifest, document)
        return manifest
    if not config.initial_peers:
        assert kept is not None
        return kept
    if kept is not None and kept.digest not in (found := find_manifests(swarm)):
        raise JoinError(
            f"--output {config.output} belongs to another run {config.run_id!r} (manifest {kept.digest[:12]}, "
            f"the swarm's is {found[0][:12]}); name another --output"
        )
    return kept or fetch_manifest(swarm)[0]


def _enter(config: PeerConfig, swarm: HivemindSwarm, manifest: Manifest) -> Admission:
    run = manifest.config
    _check_choices(config, run)
    size = model_size(run.model, manifest.vocab_size)
    max_slots = config.max_slots
    if max_slots == "auto":
        ranks = ProcessGroup(config.device).world_size
        setup = Setup.of(run, config, manifest.vocab_size, num_ranks=ranks)
        max_slots = slots_that_fit(size, setup, free_memory_bytes())
    numels = {SHARED: size.shared_params, "slot": size.slot_params}
    anchors = Anchors(run, numels)
    swarm.enter(run.round, anchors.vectors(), max_slots=max_slots)
    declare_manifest(swarm, manifest)
    address = swarm.node.addresses()[0]
    (config.output / ADDRESS_FILE).write_text(f"{address}\n")
    run_id = manifest.run_id
    log.info("run %r, manifest %s, founded by %s", run_id, manifest.digest[:12], manifest.founder)
    log.info("this peer is %s and trains up to %d of %d slots", swarm.peer_id, max_slots, run.model.num_experts)
    text = " --text PATH" if run.data.source == "files" else ""
    log.info("others join with: python peers/run_peer.py --run-id %s --initial-peers %s%s", run_id, address, text)
    seed = hashlib.sha256(swarm.peer_id.encode()).digest()
    data_seed = config.data_seed if config.data_seed is not None else int.from_bytes(seed[:4], "big")
    return Admission(manifest, max_slots, data_seed)


def _check_choices(config: PeerConfig, run: RunConfig) -> None:
    """Refuse what was chosen for this machine as soon as the run is known."""
    group = ProcessGroup(config.device)
    check_machine(run, config, group.world_size)
    if group.device.type == "cpu":  # a GPU must not be looked at before the averager has forked
        check_build(run.model, config.storage or run.frozen_storage, config.kernel)
    if config.max_slots != "auto" and config.max_slots > run.model.num_experts:
        raise ConfigError(
            f"max_slots={config.max_slots} exceeds model.num_experts={run.model.num_experts}; "
            f"set it to {run.model.num_experts} or less"
        )


# ---------------------------------------------------------------------- training


def _nothing() -> None:
    """Keep the output of a resumed peer, which is kept anyway."""


def _train(
    config: PeerConfig,
    group: ProcessGroup,
    joined: tuple[HivemindSwarm, Admission] | None,
    keep_output: Callable[[], None] = _nothing,
) -> None:
    """Train on this rank; `joined` on the leader only. Until its data are read, a start may still fail."""
    group.connect()
    sync: Synchroniser | None = None
    trainer: Trainer | None = None
    try:
        admission = group.from_leader(lambda: joined[1] if joined else _unreachable())
        run = admission.manifest.config
        trainer = _trainer(config, group, admission)
        keep_output()
        swarm = joined[0] if joined else None
        checkpoint = PeerCheckpoint(config.output / "checkpoint")
        resumed, moments = (checkpoint.load() or (None, {})) if config.resume else (None, {})
        initial = None
        if swarm is not None:
            sync = _synchroniser(config, swarm, admission, trainer, resumed)
            if SHARED not in swarm.versions():
                initial = build_initial(run, admission.manifest.vocab_size, sync, trainer)
        rounds = Rounds(run, trainer, group, sync, checkpoint=checkpoint, run_id=admission.manifest.run_id)
        rounds.open(initial, resumed, moments)
        del initial, moments  # as large as the model, and not needed again
        rounds.run()
        if swarm is not None:
            _serve_for_a_while(swarm, run.round.total, config.seed_seconds)
            log.info("the run is finished")
    finally:
        if sync is not None:
            sync.holdings.leave()
        if trainer is not None:
            trainer.close()
        group.close()


def _unreachable() -> Admission:
    raise AssertionError("the leader has joined before it connects")


def _trainer(config: PeerConfig, group: ProcessGroup, admission: Admission) -> Trainer:
    manifest, run = admission.manifest, admission.manifest.config
    tokenizer = _tokenizer(config)
    data = train_source(
        run.data, tokenizer, paths=config.text, cache=config.cache.expanduser(), order_seed=admission.data_seed
    )
    return build_trainer(
        run,
        manifest.vocab_size,
        data,
        group,
        machine=config,
    )


def _tokenizer(config: PeerConfig) -> PreTrainedTokenizerBase:
    """Rebuild the run's tokenizer from the version that this machine has verified."""
    found = sorted((config.output / "versions").glob("tokenizer.*.bin"))
    if not found:
        raise DataError(f"no tokenizer in {config.output / 'versions'}; join again with --overwrite")
    return tokenizer_from_bytes(found[0].read_bytes(), config.output / "tokenizer")


def _synchroniser(
    config: PeerConfig, swarm: HivemindSwarm, admission: Admission, trainer: Trainer, resumed: PeerState | None
) -> Synchroniser:
    run, run_id = admission.manifest.config, admission.manifest.run_id
    sync = build_synchroniser(swarm, run, trainer, run_id=run_id, max_slots=admission.max_slots, machine=config)
    if resumed is not None:
        sync.holdings.resume(resumed.slots)
    return sync


def _serve_for_a_while(swarm: HivemindSwarm, last_round: int, seconds: float) -> None:
    """Keep the final versions within reach until a monitor has archived them, or `seconds` have passed."""
    log.info("trained the last round; serving its versions until a monitor has them, at most %.0f s", seconds)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if any(record.round >= last_round for record in swarm.read(Archived).values()):  # type: ignore[attr-defined]
            return
        if swarm.wait(1.0):
            return
