"""A run's manifest: its founder signs it and every peer passes it on, so that no other peer can change the run.

A founder that founds a run of the same name again signs its manifest with a later time, as the version's round. Of one
founder's manifests the newest counts; a peer keeps its own in its output, and takes no older one after a restart.

The founder changes settings by a *revision*: the manifest again, with new settings and the digest of the first one,
which names the founding. A certificate names the revision in force, so that all peers change in the same round.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spes_p2p import __version__
from spes_p2p.codecs.vectors import digest
from spes_p2p.config import FOUNDED, RunConfig, RunId
from spes_p2p.config.changes import changes, check_changes
from spes_p2p.errors import AbsentError, ConfigError, ExchangeError, JoinError, RecordError
from spes_p2p.presentation import problem_of
from spes_p2p.swarm.certificate import Body, Revision, genesis, shares
from spes_p2p.swarm.exchange.versions import REVISION, Version
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.invites import GuestList, show
from spes_p2p.swarm.records import PROTOCOL, Count, Digest, ManifestRecord, PeerId, Software

log = logging.getLogger(__name__)

SEARCH_SECONDS = 20.0
TELL_SECONDS = 2.0
PULL_SECONDS = 60.0
MAX_ASKED = 64
"""Peers that are asked which manifest they have."""
REVISION_SECONDS, REVISION_PEERS = 5.0, 16
"""Time to fetch a revision, in which this peer does not train, and the peers that it asks."""
MANIFEST, TOKENIZER = "manifest", "tokenizer"
MAX_BYTES = {MANIFEST: 2**16, TOKENIZER: 2**26, REVISION: 2**16}  # guard: document-bytes
"""Largest documents. A manifest has some kilobytes; to refuse one of 64 MB of unknown keys would take gigabytes."""
REVISION_FILE = "revision"
"""In a peer's output: the founder's newest revision, as `spes amend` writes it; a running peer looks for it."""
DEALT_ROUNDS, ROOM_ROUNDS = 6, 12
"""Rounds' batches beyond the cursor that may be dealt already; and with room until the next certificate."""


class Manifest(BaseModel):
    """All that a newcomer must know of a run, in a few kilobytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")  # guard: manifest-fields

    run_id: RunId
    founder: PeerId
    software: Software
    """The founder's version of spes_p2p."""
    config: RunConfig
    vocab_size: Annotated[int, Field(gt=0, le=2**24)]  # guard: vocabulary-size
    """Size of the tokenizer's vocabulary."""
    tokenizer_digest: Digest
    """Digest of the tokenizer document."""
    revision: Count = 0
    """Number of this revision; 0 in the run's first manifest."""
    founding: Digest | Literal[""] = ""
    """In a revision: the digest of the first manifest."""

    @model_validator(mode="after")
    def _check_base(self) -> Manifest:
        if self.config.adapter is not None and self.config.model.start is None:  # guard: adapter-base
            raise ValueError("the run trains adapters and names no base; its founder names one with --from")
        return self

    def encode(self) -> bytes:
        """Return the canonical JSON that the founder signs."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        """Digest of the canonical JSON."""
        return digest(self.encode())

    def genesis(self) -> Body:
        """Return the body from which the run's certificates begin."""
        return genesis(self.run_id, self.founder, self.digest, self.config.num_slots)


def publish_manifest(swarm: HivemindSwarm, manifest: Manifest, tokenizer: bytes) -> None:
    """Found a run: sign, serve and declare its manifest and tokenizer."""
    founded_at = int(1000 * swarm.now())  # milliseconds
    swarm.publish_document(MANIFEST, manifest.encode(), founded_at)
    swarm.publish_document(TOKENIZER, tokenizer, founded_at)
    declare_manifest(swarm, manifest)


def declare_manifest(swarm: HivemindSwarm, manifest: Manifest, revision: int = 0) -> None:
    """Declare in the DHT, until this peer leaves, that it serves the run's manifest and this revision of it."""
    size = len(manifest.encode())
    swarm.announce(ManifestRecord(peer_id=swarm.peer_id, digest=manifest.digest, num_bytes=size, revision=revision))


def fetch_manifest(swarm: HivemindSwarm, founder: str | None = None) -> tuple[Manifest, bytes]:
    """Fetch the run's manifest and tokenizer from peers that serve them.

    Args:
        swarm: This peer's swarm.
        founder: Peer id that must have signed the manifest. None accepts the only manifest that peers declare, and logs
            its founder.

    Raises:
        JoinError: no peer knows the run, peers declare different manifests, or what came is not what they declare.
        AbsentError: no peer sent it.
    """
    run_id, records = swarm.node.run_id, _find(swarm)
    digests = Counter(record.digest for record in records.values())
    if founder is None and len(digests) > 1:
        raise JoinError(
            f"peers declare {len(digests)} manifests of run {run_id!r}; name the founder: --run-id {run_id}@PEER_ID, "
            f"as its peers' logs print it"
        )
    peers = random.sample(sorted(records), len(records))  # spreads newcomers over the peers, which are asked in order
    if founder is None and (kept := swarm.versions().get(MANIFEST)) is not None:
        founder = kept.author
    founded_at, holders = _newest(swarm, peers, founder)
    if failure := pull_document(swarm, MANIFEST, holders, founder or "", founded_at):
        told = f"cannot fetch the manifest of run {run_id!r}: {failure}"
        offers = swarm.exchange.offers(MANIFEST, peers[:MAX_ASKED]).values() if founder is not None else ()
        if offers and all(offer.author != founder for offer in offers):
            raise JoinError(f"{told}; correct --run-id, or join through other --initial-peers")
        raise AbsentError(f"{told}; try again, or join through other --initial-peers")
    version = swarm.versions()[MANIFEST]
    manifest = read_manifest(swarm.load_document)
    if version.digest not in digests or version.author != manifest.founder or manifest.run_id != run_id:
        raise JoinError(f"manifest of run {run_id!r} is not what its peers declare; do not join through these peers")
    if founder is None:
        pinned = f"{run_id}@{manifest.founder}"
        log.info("trusting %s to be the founder; --run-id %s takes no other", manifest.founder, pinned)
    if manifest.software != __version__:
        log.warning("the run was founded with spes_p2p %s, this is %s", manifest.software, __version__)
    if failure := pull_document(swarm, TOKENIZER, peers, manifest.founder, version.round):
        raise AbsentError(f"cannot fetch the tokenizer of run {run_id!r}: {failure}; try again")
    tokenizer = swarm.load_document(TOKENIZER)
    if digest(tokenizer) != manifest.tokenizer_digest:
        raise JoinError(f"tokenizer of run {run_id!r} does not match its manifest; join through other peers")
    return manifest, tokenizer


def _newest(swarm: HivemindSwarm, peers: Sequence[str], founder: str | None) -> tuple[int, Sequence[str]]:
    """Return the time of the founder's newest manifest, offered or kept here, and the peers to ask for it.

    Raises:
        JoinError: the peers offer only older ones than this peer has had.
    """
    kept = swarm.versions().get(MANIFEST)
    asked = sorted(peers, key=lambda peer: peer != founder)[:MAX_ASKED]
    offers = swarm.exchange.offers(MANIFEST, asked)
    rounds = {peer: offer.round for peer, offer in offers.items() if offer.author == founder}
    known = [kept.round] if kept is not None and kept.author == founder else []  # guard: remembered-manifest
    newest = max([0, *rounds.values(), *known])  # guard: newest-manifest
    holders = [peer for peer in peers if rounds.get(peer, -1) >= newest]
    if known and rounds and not holders:
        raise JoinError(
            f"peers offer only older manifests of run {swarm.node.run_id!r} than the one that this peer has had of "
            f"{founder}; join through other --initial-peers"
        )
    return newest, holders or peers


def check_kept(swarm: HivemindSwarm, kept: Manifest, output: Path) -> None:
    """Check that the swarm's run is the one that a peer resumes in `output`, and was not founded anew since.

    Raises:
        JoinError: it is another one, no peer knows it, or peers offer a newer manifest of the same founder.
    """
    records = _find(swarm)
    if _newest(swarm, list(records), kept.founder)[0] > swarm.versions()[MANIFEST].round:  # guard: resumed-manifest
        raise JoinError(
            f"{kept.founder} has founded run {kept.run_id!r} anew since this peer joined it; name another --output"
        )
    if kept.digest not in (digests := {record.digest for record in records.values()}):
        raise JoinError(
            f"--output {output} belongs to another run {kept.run_id!r} (manifest {kept.digest[:12]}, the swarm's is "
            f"{min(digests)[:12]}); name another --output"
        )


def pull_document(
    swarm: HivemindSwarm,
    name: str,
    peers: Sequence[str],
    author: str,
    min_round: int = 0,
    digest: str = "",
    seconds: float = PULL_SECONDS,
) -> str:
    """Fetch a document, only by `author` and with `digest` unless these are empty; return the reason for a failure."""
    return swarm.exchange.pull_document(
        name,
        peers,
        author=author,
        min_round=min_round,
        digest=digest,
        max_bytes=MAX_BYTES[name],
        timeout=seconds,
    )


def check_founder(manifest: Manifest, founder: str | None) -> None:
    """Check that a run has the founder that this peer's user named.

    Raises:
        JoinError: the manifest names another founder.
    """
    if founder not in (None, manifest.founder):  # guard: named-founder
        raise JoinError(
            f"run {manifest.run_id!r} was founded by {manifest.founder}, not by {founder}; correct --run-id, or join "
            f"through other --initial-peers"
        )


def read_manifest(load: Callable[[str], bytes]) -> Manifest:
    """Read the manifest that this peer has stored.

    Args:
        load: Returns a stored document by name.

    Raises:
        JoinError: there is no manifest, or this software cannot read it.
    """
    try:
        return Manifest.model_validate_json(load(MANIFEST), context=FOUNDED)
    except ExchangeError as error:
        raise JoinError(f"nothing to resume: {error}") from error
    except ValidationError as error:
        raise JoinError(f"manifest setting {problem_of(error)}; update spes_p2p, or join another run") from error


def guest_list(swarm: HivemindSwarm, manifest: Manifest, invite: str = "") -> GuestList | None:
    """Return the invite list of a closed run, or None for an open run.

    Args:
        swarm: The swarm of a peer that has the manifest.
        manifest: The run's manifest.
        invite: This peer's invite; empty for the founder and for a monitor.

    Raises:
        JoinError: the invite is not valid for this run.
    """
    if not manifest.config.invite_only:
        return None
    founder_key = swarm.versions()[MANIFEST].public_key
    try:
        shown = show(invite, manifest.run_id, swarm.peer_id) if invite else ""
        guests = GuestList(manifest.run_id, manifest.founder, founder_key, shown)
        if invite:
            guests.check(swarm.peer_id, shown, swarm.now())
    except RecordError as error:
        raise JoinError(f"this peer {error}; ask the founder for another --invite") from error
    return guests


def _find(swarm: HivemindSwarm) -> dict[str, ManifestRecord]:
    """Return what other peers declare of the run's manifest, by peer id; wait a while for the first."""
    began, is_told = time.monotonic(), False
    while True:
        records = {peer: record for peer, record in swarm.read(ManifestRecord).items() if peer != swarm.peer_id}
        if records:
            return records  # type: ignore[return-value]
        waited = time.monotonic() - began
        if waited >= TELL_SECONDS and not is_told:
            is_told = True
            log.info(
                "no peer reached has declared a run %r yet; waiting up to %.0f s for one, check --run-id meanwhile",
                *(swarm.node.run_id, SEARCH_SECONDS),
            )
        if waited > SEARCH_SECONDS:
            raise JoinError(
                f"the peers reached know no run {swarm.node.run_id!r}; check --run-id, and that they run the same "
                f"spes_p2p as this one ({__version__}, protocol {PROTOCOL})"
            )
        swarm.wait(1.0)


# ---------------------------------------------------------------------- revisions


class Revisions:
    """The settings of a run in force, for one peer or monitor.

    Args:
        swarm: Its swarm, in the run.
        manifest: The run's first manifest.
        file: Where the founder's newest revision may lie; None in a monitor, which passes none on.

    Attributes:
        swarm: The swarm.
        run: The settings in force.
    """

    def __init__(self, swarm: HivemindSwarm, manifest: Manifest, file: Path | None = None) -> None:
        self.swarm = swarm
        self.run = manifest.config
        self._manifest = manifest
        self._file = file
        self._number = 0
        self._declared = -1
        self._warned = set[object]()

    def look(self) -> RunConfig | None:
        """Adopt the revision that the last certificate names, and read a newer one; return settings that changed."""
        before, last = self.run, self.swarm.last()
        if last.revision.number > self._number:
            self._adopt(last.revision)
        self._read_newer(last)
        newest = self._newest()
        if newest.number > max(self._number, last.revision.number) and self._settings(newest, last) is not None:
            self.swarm.consensus.state(newest)
            if last.round >= self.run.round.total:  # no round is left that could end with a certificate
                self._adopt(newest)
        if self._file is not None and newest.number != self._declared:
            declare_manifest(self.swarm, self._manifest, newest.number)
            self._declared = newest.number
        return None if self.run is before else self.run

    def _adopt(self, revision: Revision) -> None:
        if (new := self._settings(revision)) is not None:
            words = ", ".join(f"{name} {old!r} -> {now!r}" for name, (old, now) in changes(self.run, new).items())
            log.info("revision %d of the run's settings is in force: %s", revision.number, words)
            self._number, self.run = revision.number, new

    def _newest(self) -> Revision:
        version = self.swarm.versions().get(REVISION)
        return Revision() if version is None else Revision(number=version.round, digest=version.digest)

    def _read_newer(self, last: Body) -> None:
        """Take a newer revision from this peer's file, or from peers that declare one."""
        written = read_revision(self._file, self._manifest) if self._file is not None else None
        if written is not None and written[0].round > self._newest().number:
            log.info("passing on revision %d of the run's settings", written[0].round)
            self.swarm.keep_document(*written)
        number, known = self._newest().number, last.known | {self._manifest.founder}
        declared = {peer: getattr(record, "revision", 0) for peer, record in self.swarm.read(ManifestRecord).items()}
        if newer := [
            peer for peer in declared if declared[peer] > number and peer in known
        ]:  # guard: declared-revision
            self._pull(newer, min_round=number + 1)

    def _pull(self, peers: Sequence[str], min_round: int = 0, digest: str = "") -> str:
        asked = random.sample(peers, min(len(peers), REVISION_PEERS))
        author = self._manifest.founder  # guard: founders-revision
        return pull_document(self.swarm, REVISION, asked, author, min_round, digest, REVISION_SECONDS)

    def _settings(self, revision: Revision, last: Body | None = None) -> RunConfig | None:
        """Return a revision's settings, fetched if need be; warn and return None if they cannot follow those in force,
        or are too late after a last body."""
        try:
            new = revised(self._document(revision.digest), self._manifest).config
            check_changes(self.run, new)
            if last is not None:
                check_moment(self.run, new, last)
        except (ConfigError, JoinError, ExchangeError) as error:
            if (revision, type(error)) not in self._warned:
                self._warned.add((revision, type(error)))
                log.warning("revision %d of the run's settings changes nothing here: %s", revision.number, error)
            return None
        return new

    def _document(self, digest: str) -> bytes:
        with contextlib.suppress(ExchangeError):
            return self.swarm.load_document(REVISION, digest)
        others = [peer for peer in self.swarm.read(ManifestRecord) if peer != self.swarm.peer_id]
        if failure := self._pull(others, digest=digest):
            raise ExchangeError(f"cannot fetch it ({failure}); asking again each round")
        return self.swarm.load_document(REVISION, digest)


def read_revision(file: Path, manifest: Manifest) -> tuple[Version, bytes] | None:
    """Return the founder's revision in a file, after its signed description; None, with a warning, if it has none."""
    try:
        signed, _, document = file.read_bytes().partition(b"\n")
        version = Version.verify(signed, manifest.run_id)
    except FileNotFoundError:
        return None
    except (OSError, RecordError) as error:
        log.warning("%s is no revision of the run's settings (%s); run spes amend again", file, error)
        return None
    is_founders = (version.name, version.author) == (REVISION, manifest.founder)
    if not is_founders or version.digest != digest(document):  # guard: revision-file
        log.warning("%s is not signed by the run's founder %s; run spes amend again", file, manifest.founder)
        return None
    return version, document


def revised(document: bytes, manifest: Manifest) -> Manifest:
    """Read a revision of a manifest.

    Raises:
        JoinError: this software cannot read it, or it is of another founding.
    """
    found = read_manifest(lambda name: document)
    if found.founding != manifest.digest:  # guard: revised-founding
        raise JoinError("it is of another founding of the run")
    return found


def kept_revisions(manifest: Manifest, load: Callable[[str], bytes], file: Path) -> list[Manifest]:
    """Return a manifest and the revisions that its peer has kept, newest last; `load` reads its documents by name."""
    found, documents = [manifest], list[bytes]()
    with contextlib.suppress(ExchangeError):  # there is none
        documents.append(load(REVISION))
    if (written := read_revision(file, manifest)) is not None:
        documents.append(written[1])
    for document in documents:
        with contextlib.suppress(JoinError):  # `Revisions` warns of it if it would count
            found.append(revised(document, manifest))
    return sorted(found, key=lambda each: each.revision)


def check_moment(old: RunConfig, new: RunConfig, last: Body, rounds: int = DEALT_ROUNDS) -> None:
    """Check that no sequence whose source changes is dealt after the last certificate's body and some rounds more.

    Raises:
        ConfigError: it is too late.
    """
    first = first_changed_tokens(old, new)
    if first is not None and first < (dealt := dealt_tokens(new, last, rounds)):  # guard: revised-phases
        raise ConfigError(
            f"data.mixture: the weights from {first:,} tokens on would change, and sequences below {dealt:,} tokens "
            f"are trained or dealt already; keep what was, and begin a phase (data.phases) at {dealt:,} or later"
        )


def first_changed_tokens(old: RunConfig, new: RunConfig) -> int | None:
    """Return the position, in tokens, from which sequences come from other sources; None if none do."""
    one, other = (
        list(zip((0, *run.data.phases), zip(*(each.weights for each in run.data.mixture), strict=True), strict=False))
        for run in (old, new)
    )
    differing = (pair for pair in itertools.zip_longest(one, other) if pair[0] != pair[1])
    return min((phase[0] for phase in next(differing, ()) if phase is not None), default=None)


def dealt_tokens(run: RunConfig, last: Body, rounds: int) -> int:
    """Return the position, in tokens, so many rounds beyond the last body's cursor."""
    dealt = sum(map(len, shares(last).values()))
    usual = -(-run.round_tokens // (run.train.batch_size * run.data.sequence_length))
    usual = run.round.steps * max(len(last.members), run.round.min_peers) if run.round.mode == "steps" else usual
    return (last.cursor + rounds * max(dealt, usual)) * run.train.batch_size * run.data.sequence_length
