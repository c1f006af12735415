"""How a peer gets into a run: checks, manifest, swarm, first download."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
from hivemind.utils.timed_storage import get_dht_time
from transformers import PreTrainedTokenizerBase

import spes_p2p
from spes_p2p.codecs.vectors import digest
from spes_p2p.config import JoinLink, KeptRounds, PeerConfig, RunConfig
from spes_p2p.config.changes import check_kept_settings
from spes_p2p.data.sources import corpus_bytes
from spes_p2p.data.tokenizer import tokenizer_bytes
from spes_p2p.errors import ConfigError, JoinError
from spes_p2p.fs import write_atomic
from spes_p2p.model.base_files import note_base
from spes_p2p.peer.base import obtain_base, own_copy
from spes_p2p.peer.consent import ask_to_read
from spes_p2p.peer.settings import check_choices, founder_settings
from spes_p2p.planner.memory import Setup, disk_bytes, fits, peer_bytes, shortage, slots_that_fit, with_programs
from spes_p2p.planner.size import ModelSize, free_gpu_bytes, free_memory_bytes, run_size
from spes_p2p.planner.tables import params_text
from spes_p2p.planner.traffic import newcomer_bytes, round_traffic
from spes_p2p.presentation import say, say_qr, size_text
from spes_p2p.swarm.certificate import Keys
from spes_p2p.swarm.consensus import FOLDER as CONSENSUS
from spes_p2p.swarm.consensus import PROMISES, has_reopened
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.invites import SHOWN_LETTERS, is_invite, issue
from spes_p2p.swarm.manifest import (
    REVISION_FILE,
    Manifest,
    Revisions,
    check_founder,
    check_kept,
    fetch_manifest,
    guest_list,
    kept_revisions,
    link_addresses,
    link_of,
    publish_manifest,
    read_manifest,
)
from spes_p2p.swarm.names import SHARED
from spes_p2p.swarm.p2p import peerstore
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.introductions import called_back
from spes_p2p.swarm.p2p.node import COPIED, ListenConfig, Node, is_loopback
from spes_p2p.swarm.p2p.peerstore import Peerstore
from spes_p2p.swarm.p2p.port_map import EVERY_INTERFACE, LOOPBACK, check_port, mapped_port
from spes_p2p.swarm.promises import PromiseFile
from spes_p2p.swarm.records import MAX_CLAIMED, Claim, ManifestRecord, Progress
from spes_p2p.training.anchors import Anchors, start_digests
from spes_p2p.training.checkpoint import Found, recover
from spes_p2p.training.ranks import Ranks

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
SAY_SECONDS = 5.0
HEARTBEATS_WAITED = 1.5
"""Heartbeats after which a claim that was not renewed is of a peer that has ended."""
ANY_MEMORY = 2**60
"""In place of a GPU's memory, where it does not tell."""
ADDRESS_FILE = "address"
"""In a peer's output: a multiaddr that others join by, there once the peer is in the swarm."""
LINK_FILE = "link"
"""In a peer's output: the run's link, there at the same time."""
FRIENDS_FILE = "friends_link"
"""The founder's link for those who may vote."""
FRIENDS_SECONDS = 30 * 86_400
"""Time for which that link gives a vote."""


class Admission(NamedTuple):
    """What every rank must know once the leader has joined: the run, its settings in force, the seed of its data."""

    manifest: Manifest
    run: RunConfig
    data_seed: int


class Kept(NamedTuple):
    """What a peer has kept of its run since an earlier start; at its first start nothing."""

    manifest: Manifest | None = None
    found: Found | None = None
    """Its checkpoint."""
    runs: Sequence[RunConfig] = ()
    """The run's settings in the manifest, and as each revision that lies here changes them."""

    @property
    def is_finished(self) -> bool:
        """Whether the run's last round is saved."""
        return self.found is not None and self.found.state.round >= self.runs[-1].round.total


class Joined(NamedTuple):
    """A peer that has entered its run."""

    swarm: HivemindSwarm
    admission: Admission
    revisions: Revisions
    max_slots: int


@contextlib.contextmanager
def joined(config: PeerConfig, kept: Kept) -> Iterator[Joined]:
    """Be in the swarm, with its manifest; leave it in the end, whatever happens."""
    if (config.run is not None or config.adapter is not None) and not (config.founds or config.resume):
        raise ConfigError(
            "settings of the run come from its manifest; drop --run.* and --adapter, or found a run with --config"
        )
    if config.client_mode and not (config.initial_peers or config.resume):
        raise ConfigError("client_mode=True calls others only, so nobody could join its run; drop --client-mode")
    if config.map_port and (not config.port or config.announce or config.client_mode):
        raise ConfigError("--map-port forwards the port of --port; set --port, and drop --announce, --client-mode")
    run = config.run or (kept.runs[-1] if kept.runs else RunConfig())
    if (config.run is not None or not config.initial_peers) and not config.start_from:
        check_choices(config, run)
    founded = founder_settings(config, run) if config.founds else None
    with _with_port(config) as config, contextlib.closing(_swarm(config)) as swarm:
        if swarm.node.meets_others:
            swarm.links.learn_kind()
            log.info("this peer takes no calls; %s", swarm.links.told())
        manifest = _manifest(config, swarm, founded, kept.manifest)
        yield _enter(config, swarm, manifest, founds=founded is not None)


@contextlib.contextmanager
def _with_port(config: PeerConfig) -> Iterator[PeerConfig]:
    """Map the port on the router if that is asked for; yield the settings, with the address to announce."""
    if not config.map_port:
        yield config
        return
    with mapped_port(config.port) as outside:  # p2pd appends this peer's id
        yield config.model_copy(update={"announce": [f"/ip4/{outside}/tcp/{config.port}"]})


def _swarm(config: PeerConfig) -> HivemindSwarm:
    """Start this peer's node, and the swarm on top of it."""
    known = Peerstore(config.output / peerstore.FILE)
    identity = Identity(config.identity or config.output / "identity.key")
    host = listen_host(config, known)
    port = listen_port(config, host, identity.peer_id)
    listen = ListenConfig(host, port, tuple(config.announce), client_mode=config.client_mode)
    is_told = bool(config.announce) and not config.map_port  # what a router says of its address may be wrong
    node = Node(
        identity,
        config.run_name,
        initial_peers=config.initial_peers,
        peerstore=known,
        listen=listen,
        seen=None if config.client_mode or is_told else partial(as_seen, listen),
    )
    return HivemindSwarm(
        *(node, config.output / "versions"),
        uplink_mbit=config.uplink_mbit,
        trains_alone=config.alone,
        name=config.owner_name,
    )


def as_seen(listen: ListenConfig, node: Node) -> ListenConfig:
    """Return how a peer listens once others have tried to call it: in client mode if none could.

    Where a router forwards the port, it announces the router's address, too.
    """
    can_be_called, hosts = called_back(node)
    if not can_be_called:
        log.warning(
            "other peers cannot open a connection to this one: %s. It calls them instead, trains and averages, and "
            "they fetch what it publishes over its connections (docs/trouble.md#client-mode)",
            why_unreachable(listen.host, node.port),
        )
        return replace(listen, announce=(), client_mode=True)
    own = {each.address for card in psutil.net_if_addrs().values() for each in card}
    outside, port = [host for host in hosts if host not in own], node.port
    if listen.announce or not outside:
        return listen
    log.info("a router forwards TCP port %d of %s to this machine; announcing that address, too", port, outside[0])
    announced = (f"/ip4/{outside[0]}/tcp/{port}/p2p/{node.peer_id}", *node.addresses())
    return replace(listen, announce=announced, port=port)


def listen_host(config: PeerConfig, known: Peerstore) -> str:
    """Return the address to listen on: the chosen one, or every interface unless the swarm is on this machine alone."""
    if config.host is not None:
        return config.host
    others = config.initial_peers or [address for at in known.addresses().values() for address in at]
    return LOOPBACK if others and all(map(is_loopback, others)) else EVERY_INTERFACE


def listen_port(config: PeerConfig, host: str, peer_id: str) -> int:
    """Return the port to listen on: the chosen one, or that of the last start, where it is free; 0 means any."""
    file = config.output / ADDRESS_FILE
    if config.port or config.announce or not (config.resume and file.is_file()):
        return config.port
    # A peer that takes no calls has another peer's address there.
    own = re.search(rf"/tcp/(\d{{1,5}})/p2p/{peer_id}$", file.read_text(errors="replace").strip())
    if own is None or (port := int(own[1])) >= 2**16:
        return 0
    try:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            check_port("0.0.0.0" if host == EVERY_INTERFACE else host, port, kind)
    except ConfigError:
        log.warning("port %d, where this peer listened before, is occupied; links that name it are invalid now", port)
        return 0
    return port


def why_unreachable(host: str, port: int) -> str:
    """Return why other peers cannot call this one, which listens on `host`, and the remedy."""
    if host.startswith("127.") or host == "::1":
        return f"it listens on {host}, which only this machine reaches; drop --host"
    if host not in (EVERY_INTERFACE, "0.0.0.0", "::"):
        return f"it listens on {host} alone, whose TCP port {port} they do not reach; drop --host, or set --announce"
    return (
        f"a router or firewall blocks TCP port {port} of this machine; forward a port to it and set --port, or set "
        f"--announce if the port outside is another"
    )


def kept(config: PeerConfig) -> Kept:
    """Return what a resumed peer has kept of its run, before anything is started.

    Raises:
        ConfigError: the command has other settings of the run.
        JoinError: it is of another run, or damaged.
    """
    if not config.resume:
        return Kept()
    if not any((config.output / name).exists() for name in ("versions", "checkpoint")):
        raise JoinError(
            f"--output {config.output} holds nothing of run {config.run_id!r} to resume; name another, and to keep the "
            f"key that lies there, --identity {shlex.quote(str(config.output / 'identity.key'))}"
        )
    try:
        is_reopened = has_reopened(config.output, config.resume_round)  # by an earlier start: it goes on from there
        store, found = recover(config.output, config.run_name, None if is_reopened else config.resume_round)
        manifest = read_manifest(store.read)
        if manifest.run_id != config.run_name:
            raise JoinError(f"it belongs to run {manifest.run_id!r}")
        runs = [each.config for each in kept_revisions(manifest, store.read, config.output / REVISION_FILE)]
    except JoinError as error:
        raise JoinError(
            f"--output {config.output} cannot go on with run {config.run_id!r}: {error}; "
            f"set --run-id to its run, or name another --output"
        ) from error
    check_founder(manifest, config.founder)
    if config.run is not None:
        check_kept_settings(config.run, runs, config.output)
    return Kept(manifest, found, runs)


def _manifest(
    config: PeerConfig,
    swarm: HivemindSwarm,
    founded: tuple[RunConfig, PreTrainedTokenizerBase] | None,
    kept: Manifest | None,
) -> Manifest:
    """Return the run's manifest: the founder's own, the swarm's, or the one kept from before a restart."""
    if founded is not None:
        if config.initial_peers and swarm.read(ManifestRecord):  # guard: never
            raise ConfigError(
                f"run {config.run_name!r} is there already; drop --config, --run.* and --adapter to join it, or choose "
                f"another --run-id"
            )
        run, tokenizer = founded
        document = tokenizer_bytes(tokenizer)
        manifest = Manifest(
            run_id=config.run_name,
            founder=swarm.peer_id,
            software=spes_p2p.__version__,
            config=run,
            vocab_size=len(tokenizer),
            tokenizer_digest=digest(document),
            tokenizer_bytes=len(document),
        )
        check_founder(manifest, config.founder)
        return publish_manifest(swarm, manifest, document)
    if kept is not None:
        comes_first = kept.founder == swarm.peer_id and swarm.read(ManifestRecord).keys() <= {swarm.peer_id}
        if config.initial_peers and not comes_first:
            check_kept(swarm, kept, config.output)
        return kept
    manifest, document = fetch_manifest(swarm, config.founder)
    ask_to_read(manifest, len(document), yes=config.yes, paths=config.shards)
    return manifest


def check_alone(swarm: HivemindSwarm, output: Path, heartbeat_seconds: float) -> None:
    """Refuse an identity that another peer uses, even one that takes no calls: it renews its claim meanwhile.

    A peer that goes on in its own folder, as its promises tell, does not wait: the claim is its own.

    Raises:
        ConfigError: another peer uses it.
    """
    node = swarm.node
    ends_at = node.own_record_ends_at(Claim)
    if not ends_at or node.identity.is_new or PromiseFile(output / CONSENSUS / PROMISES).load() is not None:
        return
    seconds = HEARTBEATS_WAITED * heartbeat_seconds
    log.info("a peer with this identity has a claim; looking for %.0f s whether it is still there", seconds)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and get_dht_time() < ends_at and not swarm.wait(LOOK_SECONDS):
        if node.own_record_ends_at(Claim) > ends_at:  # guard: never
            raise ConfigError(f"identity {node.identity.path} is in use by another peer; give each its own ({COPIED})")


def _enter(config: PeerConfig, swarm: HivemindSwarm, manifest: Manifest, *, founds: bool) -> Joined:
    """Check what this machine can do for the run, and begin with it."""
    run = manifest.config
    check_choices(config, run)
    size, ranks = run_size(run, manifest.vocab_size), Ranks(config.device)
    on_gpu = ranks.device.type == "cuda"
    setup = Setup.of(run, config, manifest.vocab_size, num_ranks=ranks.world_size, on_gpu=on_gpu)
    max_slots = _max_slots(config, size, setup)
    anchors = Anchors(run, {SHARED: size.shared_params, "slot": size.slot_params})
    guests = guest_list(swarm, manifest, own_invite(config.invite or ""))
    if guests.is_closed and not guests.shown and swarm.peer_id != manifest.founder:
        raise JoinError(f"run {manifest.run_id!r} takes only invited peers; ask {manifest.founder} for an --invite")
    if not link_addresses(swarm):
        raise JoinError("no other peer's address is known here; give --initial-peers, or take calls (no --client-mode)")
    if not founds:
        data = config.corpus(run.data)
        if data.source == "files" and not (data.paths or data.fingerprint or data.mixture):
            corpus_bytes(data, config.text)  # refuses missing text before others see a claim that no peer will train
        check_alone(swarm, config.output, run.round.heartbeat_seconds)
    if run.adapter is not None:
        source = own_copy(config.start_from)
        obtain_base(swarm, manifest, source)
        if source is not None:
            note_base(config.output, source)
    swarm.enter(
        run.round,
        anchors.vectors(),
        manifest.genesis(),
        max_slots=max_slots,
        guests=guests,
        is_new=founds,
        recent=config.recent,
    )
    if config.resume_round is not None:
        swarm.consensus.reopen(config.resume_round)
    revisions = Revisions(swarm, manifest, config.output / REVISION_FILE)
    revisions.look()
    _say_what(swarm, manifest, size, max_slots, config)
    _say_cost(swarm, run, size, min(max_slots, run.num_slots), setup, config)
    link = write_link(config, swarm, manifest)
    _say_link(config, link, config.flags_of_others(run), founds=founds)
    if (data_seed := config.data_seed) is None:
        data_seed = int.from_bytes(hashlib.sha256(swarm.peer_id.encode()).digest()[:4], "big")
    return Joined(swarm, Admission(manifest, revisions.run, data_seed), revisions, max_slots)


def _say_what(swarm: HivemindSwarm, manifest: Manifest, size: ModelSize, max_slots: int, config: PeerConfig) -> None:
    """Say which run this is, and what of it this peer trains."""
    run = manifest.config
    log.info("run %r, manifest %s, founded by %s", manifest.run_id, manifest.digest[:12], manifest.founder)
    what = f"all of the {'adapters' if run.adapter else 'model'}"
    if run.num_slots:
        what = f"up to {min(max_slots, run.num_slots)} of {run.num_slots} slots"
    log.info("this peer is %s and trains %s", swarm.peer_id, what)
    if config.initial_peers and not (swarm.node.client_mode or config.announce):
        log.info("other peers can open a connection to it")
    log.info("the model has %s parameters and learns from %s", params_text(size.total_params), run.data.in_words())


def _say_link(config: PeerConfig, link: JoinLink, needs: str, *, founds: bool) -> None:
    """Say how others join, with these flags."""
    (config.output / ADDRESS_FILE).write_text(f"{link.addresses[0]}\n")  # last: its readers wait for it
    log.info("others join with: spes join %s%s", link.encode(), needs)
    if founds:
        say_qr(link.encode())
    if (friends := config.output / FRIENDS_FILE).exists():
        word = friends.read_text().strip()
        by = JoinLink.parse(word).invite[:SHOWN_LETTERS]
        log.info("friends who join with the link in %s may vote, by invite %s; give it to friends only", friends, by)
        if sys.stdout.isatty():  # a log is no place for it
            say(f"friends: spes join {word}")
    addresses = " ".join(link.addresses)
    log.info("or, in full: spes peer --run-id %s --initial-peers %s%s", link.founded, addresses, needs)


def own_invite(text: str) -> str:
    """Return the invite that a text is, or that the file has which it names: alone, or in a link.

    Raises:
        ConfigError: the file has none.
    """
    if not text or is_invite(text):
        return text
    try:
        word = text if text.startswith("spes:") else Path(text).read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError("--invite is neither an invite nor a file with one; ask the founder for another") from error
    invite = word if is_invite(word) else JoinLink.parse(word).invite
    if not invite:
        raise ConfigError("--invite: the link has none; ask the founder for another")
    return invite


def write_link(config: PeerConfig, swarm: HivemindSwarm, manifest: Manifest) -> JoinLink:
    """Write the run's link, which names a recent certificate, and the founder's for friends; return the first."""
    link = link_of(swarm, manifest)
    with write_atomic(config.output / LINK_FILE) as stream:
        stream.write(f"{link.encode()}\n".encode())
    if swarm.peer_id == manifest.founder:
        places = max(1, manifest.config.round.min_peers - 1)
        write_friends_link(config.output / FRIENDS_FILE, link, swarm.keys, manifest.digest, places)
    return link


def write_friends_link(file: Path, link: JoinLink, founder: Keys, founding: str, places: int) -> None:
    """Write a link for friends, so many of whom may vote; its invite stays the same as long as the file is there."""
    expires = int(time.time()) + FRIENDS_SECONDS
    kept = JoinLink.parse(file.read_text()).invite if file.exists() else ""
    invite = kept or issue(founder, founding, expires, places=places, votes=True)
    with write_atomic(file, is_private=True) as stream:
        stream.write(f"{link.model_copy(update={'invite': invite}).encode()}\n".encode())


def show_download(swarm: HivemindSwarm, num_bytes: int) -> None:
    """Log in a thread how many of `num_bytes` have come, until all have or this peer takes part."""

    def follow() -> None:
        began = said = time.monotonic()
        while (come := swarm.exchange.bytes_in) < num_bytes and not swarm.wait(LOOK_SECONDS):
            mine = swarm.read(Claim).get(swarm.peer_id)
            if mine is not None and mine.state == "active":  # type: ignore[attr-defined]
                return
            if (now := time.monotonic()) - said >= SAY_SECONDS:
                said, rate = now, come / (now - began)
                log.info("downloaded %.1f of %.1f MB, %.1f MB/s", come / 1e6, num_bytes / 1e6, rate / 1e6)

    threading.Thread(target=follow, name="download", daemon=True).start()


def _max_slots(config: PeerConfig, size: ModelSize, setup: Setup) -> int:
    """Return the number of slots that this peer may claim; refuse a chosen number that does not fit the memory."""
    free = free_memory_bytes()
    limits = (free_gpu_bytes() or ANY_MEMORY, free) if setup.on_gpu else (free, None)
    if config.max_slots == "auto":
        fitting = slots_that_fit(size, setup, *limits)
        return min(max(fitting, 1), MAX_CLAIMED)  # where there are no slots, 0 would say that this peer leaves
    if not fits(size, config.max_slots, setup, *limits):  # guard: never
        raise ConfigError(f"max_slots={config.max_slots}: {shortage(size, config.max_slots, setup, *limits)}")
    return config.max_slots


def _say_cost(
    swarm: HivemindSwarm, run: RunConfig, size: ModelSize, max_slots: int, setup: Setup, kept: KeptRounds
) -> None:
    """Say what taking part costs this machine, before it does."""
    claims: Mapping[str, Claim] = swarm.read(Claim)  # type: ignore[assignment]
    num_peers = max(2, len(claims) + 1)
    traffic = round_traffic(size, max_slots, num_peers, setup)
    at_first = ""
    is_begun = any(each.round for each in swarm.read(Progress).values())  # type: ignore[attr-defined]
    fetches = SHARED not in swarm.versions() and (is_begun or bool(start_digests(run)))  # else it makes the start
    if fetches and any(claim.state == "active" for claim in claims.values()):
        download = newcomer_bytes(size, max_slots, setup)
        at_first = f", and downloads {size_text(download)} at first"
        show_download(swarm, download)
    log.info(
        "it needs %s of memory and up to %s of disk%s; in a round of %d peers like it, it sends about %s and "
        "receives as much, %s in all",
        size_text(peer_bytes(size, max_slots, with_programs(setup))),
        size_text(disk_bytes(size, max_slots, kept.keep_last, setup)),
        at_first,
        num_peers,
        size_text(traffic.total),
        size_text(2 * traffic.total),
    )
    if kept.keep_every is not None:
        each = size_text(disk_bytes(size, max_slots, 2, setup) - disk_bytes(size, max_slots, 1, setup))
        log.info("every %d rounds it keeps a checkpoint for ever, which takes %s more of disk", kept.keep_every, each)
