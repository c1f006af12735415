"""A run's manifest: its founder signs it and every peer passes it on, so that no other peer can change the run.

A founder that founds a run of the same name again signs a manifest of a later time. Of one founder's manifests the
newest counts; a peer keeps its own in its output, and takes no older one after a restart.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spes_p2p import __version__
from spes_p2p.codecs.vectors import digest
from spes_p2p.config import FOUNDED, MAX_ADDRESSES, JoinLink, RunConfig, RunId
from spes_p2p.config.changes import changes, check_changes
from spes_p2p.errors import AbsentError, ConfigError, ExchangeError, JoinError, RecordError
from spes_p2p.presentation import problem_of
from spes_p2p.swarm.certificate import Body, Revision, genesis
from spes_p2p.swarm.exchange.versions import MANIFEST, REVISION, TOKENIZER, Version
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.invites import GuestList, show
from spes_p2p.swarm.next_body import shares
from spes_p2p.swarm.p2p.identity import Identity, is_signed_by
from spes_p2p.swarm.records import PROTOCOL, Count, Digest, ManifestRecord, PeerId, Software

log = logging.getLogger(__name__)

SEARCH_SECONDS = 20.0
PULL_SECONDS = 60.0
MAX_ASKED = 64
"""Peers that are asked which manifest they have."""
REVISION_SECONDS, REVISION_PEERS = 5.0, 16
"""Time to fetch a revision, in which this peer does not train, and the peers that it asks."""
REVISION_FILE = "revision"
"""In a peer's output: the founder's newest revision, as `spes amend` writes it; a running peer looks for it."""
DEALT_ROUNDS, ROOM_ROUNDS = 6, 12
"""Rounds' batches beyond the cursor that may be dealt already; and with room until the next certificate."""


class Manifest(BaseModel):
    """All that a newcomer must know of a run, in a few kilobytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")  # guard: "forbid" -> "ignore"

    run_id: RunId
    founder: PeerId
    software: Software
    """The founder's version of spes_p2p."""
    config: RunConfig
    vocab_size: Annotated[int, Field(gt=0, le=2**24)]  # guard: first
    """Size of the tokenizer's vocabulary."""
    tokenizer_digest: Digest
    """Digest of the tokenizer document."""
    tokenizer_bytes: Annotated[int, Field(gt=0, le=2**26)]  # guard: first
    """Its length."""
    revision: Count = 0
    """Number of this revision; 0 in the run's first manifest."""
    founding: Digest | Literal[""] = ""
    """In a revision: the digest of the first manifest."""
    founded_at: Count = 0
    """DHT time of the founding, in milliseconds: of a founder's manifests of one name the newest counts."""
    public_key: Annotated[str, Field(max_length=1024, pattern=r"^(ssh-rsa [A-Za-z0-9+/=]+)?$")] = ""
    """The founder's."""
    signature: Annotated[str, Field(max_length=1024, pattern=r"^[A-Za-z0-9+/=]*$")] = ""
    """By the founder's key, of all other fields."""

    @model_validator(mode="after")
    def _check_base(self) -> Manifest:
        if self.config.adapter is not None and self.config.model.start is None:  # guard: never
            raise ValueError("the run trains adapters and names no base; its founder names one with --from")
        return self

    def encode(self) -> bytes:
        """Return the document that peers pass on: canonical JSON."""
        return _json(self.model_dump(mode="json"))

    def signed_part(self) -> bytes:
        """Return what the founder signs: all but the signature."""
        return _json(self.model_dump(mode="json", exclude={"signature"}))

    @property
    def digest(self) -> str:
        """Digest of what the founder signs."""
        return digest(self.signed_part())

    def sign(self, founder: Identity) -> Manifest:
        """Return the manifest with its founder's signature."""
        unsigned = self.model_copy(update={"public_key": founder.public_key.decode()})
        return unsigned.model_copy(update={"signature": founder.sign(unsigned.signed_part()).decode()})

    def genesis(self) -> Body:
        """Return the body from which the run's certificates begin."""
        return genesis(self.run_id, self.founder, self.digest, self.config.num_slots)


def _json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def publish_manifest(swarm: HivemindSwarm, manifest: Manifest, tokenizer: bytes) -> Manifest:
    """Found a run: sign, serve and declare its manifest and tokenizer; return the signed manifest."""
    signed = manifest.model_copy(update={"founded_at": int(1000 * swarm.now())}).sign(swarm.node.identity)
    swarm.keep_document(MANIFEST, signed.encode(), signed.founded_at)
    swarm.keep_document(TOKENIZER, tokenizer)
    declare_manifest(swarm, signed)
    return signed


def declare_manifest(swarm: HivemindSwarm, manifest: Manifest, revision: int = 0) -> None:
    """Declare in the DHT, until this peer leaves, that it serves the run's manifest and this revision of it."""
    swarm.announce(ManifestRecord(peer_id=swarm.peer_id, digest=manifest.digest, revision=revision))


def fetch_manifest(swarm: HivemindSwarm, founder: str | None = None) -> tuple[Manifest, bytes]:
    """Fetch the run's manifest and tokenizer from peers that serve them.

    Args:
        swarm: This peer's swarm.
        founder: Peer id that must have signed the manifest. None accepts the only manifest that peers declare, and logs
            its founder.

    Raises:
        JoinError: no peer knows the run, peers declare different manifests, or offer none of the founder.
        AbsentError: no peer sent it.
    """
    run_id, records = swarm.node.run_id, _find(swarm)
    digests = Counter(record.digest for record in records.values())
    if founder is None and len(digests) > 1:
        raise JoinError(
            f"peers declare {len(digests)} manifests of run {run_id!r}; name the founder: --run-id {run_id}@PEER_ID, "
            f"as its peers' logs print it"
        )
    kept = kept_manifest(swarm)
    founder = founder or (kept.founder if kept is not None else None)
    offers = _offers(swarm, records, founder)
    if not offers:
        raise AbsentError(
            f"cannot fetch the manifest of run {run_id!r}: no peer has sent one that its founder has signed; try "
            f"again, or join through other --initial-peers"
        )
    if founder is None:
        rightful = [each for each in offers if each.digest in digests]
    else:
        rightful = [each for each in offers if each.founder == founder]  # guard: always
    if not rightful:
        raise JoinError(
            f"peers offer run {run_id!r} by {', '.join(sorted({each.founder for each in offers}))}, not by {founder}; "
            f"correct --run-id, or join through other --initial-peers"
        )
    manifest = max(rightful, key=lambda each: each.founded_at)  # guard: max( -> min(
    if kept is not None and kept.founder == founder and manifest.founded_at < kept.founded_at:  # guard: never
        raise JoinError(
            f"peers offer only older manifests of run {run_id!r} than the one that this peer has had of {founder}; "
            f"join through other --initial-peers"
        )
    if manifest.digest not in digests:
        raise JoinError(f"manifest of run {run_id!r} is not what its peers declare; do not join through these peers")
    if founder is None:
        pinned = f"{run_id}@{manifest.founder}"
        log.info("trusting %s to be the founder; --run-id %s takes no other", manifest.founder, pinned)
    if manifest.software != __version__:
        log.warning("the run was founded with spes_p2p %s, this is %s", manifest.software, __version__)
    swarm.keep_document(MANIFEST, manifest.encode(), manifest.founded_at)
    tokenizer = Version(name=TOKENIZER, round=0, digest=manifest.tokenizer_digest, num_bytes=manifest.tokenizer_bytes)
    if failure := swarm.exchange.pull([tokenizer], _known_first(swarm, records, founder), timeout=PULL_SECONDS):
        raise AbsentError(f"cannot fetch the tokenizer of run {run_id!r}: {failure[TOKENIZER]}; try again")
    return manifest, swarm.load_document(TOKENIZER)


def _offers(swarm: HivemindSwarm, peers: Collection[str], founder: str | None) -> list[Manifest]:
    """Return the manifests of the run that peers serve; of many peers some are asked, those known here in any case."""
    found = []
    for peer, document in swarm.exchange.documents(MANIFEST, _known_first(swarm, peers, founder)[:MAX_ASKED]).items():
        try:
            found.append(signed_manifest(document, swarm.node.run_id))
        except JoinError as error:
            log.warning("%s serves no manifest of the run: %s", peer, error)
    return found


def _known_first(swarm: HivemindSwarm, peers: Collection[str], founder: str | None) -> list[str]:
    """Return those of some peers that this one knows, the founder first, then the others in random order."""
    known = [founder or "", *swarm.node.known_peers()]  # guard: *swarm.node.known_peers() ->
    first = dict.fromkeys(peer for peer in known if peer in peers)
    others = sorted(set(peers) - first.keys())
    return [*first, *random.sample(others, len(others))]


def kept_manifest(swarm: HivemindSwarm) -> Manifest | None:
    """Return the manifest that this peer has had."""
    return read_manifest(swarm.load_document) if MANIFEST in swarm.versions() else None


def check_kept(swarm: HivemindSwarm, kept: Manifest, output: Path) -> None:
    """Check that the swarm's run is the one that a peer resumes in `output`, and was not founded anew since.

    Raises:
        JoinError: it is another one, no peer knows it, or peers offer a newer manifest of the same founder.
    """
    records = _find(swarm)
    newer = [each for each in _offers(swarm, records, kept.founder) if each.founded_at > kept.founded_at]
    if any(each.founder == kept.founder for each in newer):  # guard: never
        raise JoinError(
            f"{kept.founder} has founded run {kept.run_id!r} anew since this peer joined it; name another --output"
        )
    if kept.digest not in (digests := {record.digest for record in records.values()}):
        raise JoinError(
            f"--output {output} belongs to another run {kept.run_id!r} (manifest {kept.digest[:12]}, the swarm's is "
            f"{min(digests)[:12]}); name another --output"
        )


def check_founder(manifest: Manifest, founder: str | None) -> None:
    """Check that a run has the founder that this peer's user named.

    Raises:
        JoinError: the manifest names another founder.
    """
    if founder not in (None, manifest.founder):  # guard: never
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


def signed_manifest(document: bytes, run_id: str) -> Manifest:
    """Read a manifest, or a revision of one, that its founder has signed for a run.

    Raises:
        JoinError: this software cannot read it, or it is not signed, or for another run.
    """
    manifest = read_manifest(lambda name: document)
    signature, key = manifest.signature.encode(), manifest.public_key.encode()
    if not is_signed_by(manifest.founder, key, manifest.signed_part(), signature):  # guard: never
        raise JoinError(f"it is not signed by its founder {manifest.founder}")
    if manifest.run_id != run_id:  # guard: never
        raise JoinError(f"it belongs to run {manifest.run_id!r}")
    return manifest


def guest_list(swarm: HivemindSwarm, manifest: Manifest, invite: str = "") -> GuestList:
    """Return what checks the invites to a run.

    Args:
        swarm: The swarm of a peer that has the manifest.
        manifest: The run's manifest.
        invite: This peer's invite; empty without one.

    Raises:
        JoinError: the invite is not valid for this run.
    """
    swarm.keys.learn(manifest.public_key.encode())
    try:
        shown = show(invite, manifest.digest, swarm.peer_id) if invite else ""
        guests = GuestList(
            *(manifest.digest, manifest.founder, swarm.keys, shown), is_closed=manifest.config.invite_only
        )
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
        if waited >= 2.0 and not is_told:
            is_told = True
            log.info(
                "no peer reached has declared a run %r yet; waiting up to %.0f s for one, check --run-id meanwhile",
                *(swarm.node.run_id, SEARCH_SECONDS),
            )
        if waited > SEARCH_SECONDS:
            raise JoinError(
                f"the peers reached know no run {swarm.node.run_id!r}; check --run-id, and that they run the same "
                f"spes_p2p as this one ({__version__}, protocol {PROTOCOL}; docs/trouble.md#unknown-run)"
            )
        swarm.wait(1.0)


def link_addresses(swarm: HivemindSwarm) -> list[str]:
    """Return the addresses by which others join."""
    return [*swarm.node.contacts()[:1], *swarm.node.known_addresses()][:MAX_ADDRESSES]


def link_of(swarm: HivemindSwarm, manifest: Manifest) -> JoinLink:
    """Return the run's link, which names a recent certificate."""
    return JoinLink(
        run_id=manifest.run_id,
        founder=manifest.founder,
        addresses=tuple(link_addresses(swarm)),
        recent=swarm.consensus.recent(),
    )


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
        self._known = {each.digest: each for each in _stored(swarm.load_document, manifest)}
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
            self.swarm.revoke(new.revoked_invites)

    def _newest(self) -> Revision:
        known = [Revision(number=each.revision, digest=digest) for digest, each in self._known.items()]
        return max(known, key=lambda each: each.number, default=Revision())

    def _read_newer(self, last: Body) -> None:
        """Take a newer revision from this peer's file, or from peers that declare one."""
        written = read_revision(self._file, self._manifest) if self._file is not None else None
        if written is not None and written.revision > self._newest().number:
            log.info("passing on revision %d of the run's settings", written.revision)
            self._keep(written)
        number, known = self._newest().number, last.known | {self._manifest.founder}
        declared = {peer: getattr(record, "revision", 0) for peer, record in self.swarm.read(ManifestRecord).items()}
        if newer := [
            peer for peer in declared if declared[peer] > number and peer in known
        ]:  # guard: and peer in known ->
            self._ask(newer)

    def _keep(self, revision: Manifest) -> None:
        is_newest = revision.revision > self._newest().number
        self._known[revision.digest] = revision
        if is_newest:  # what a store is given last is its newest, and deletes later ones
            self.swarm.keep_document(REVISION, revision.encode(), revision.revision)

    def _ask(self, peers: Sequence[str], number: int | None = None) -> None:
        """Keep the revisions of this founding that some of these peers serve: their newest, or that of a number."""
        asked = random.sample(peers, min(len(peers), REVISION_PEERS))
        for document in self.swarm.exchange.documents(REVISION, asked, REVISION_SECONDS, number=number).values():
            with contextlib.suppress(JoinError):
                found = revised(document, self._manifest)
                if found.digest not in self._known:
                    self._keep(found)

    def _settings(self, revision: Revision, last: Body | None = None) -> RunConfig | None:
        """Return a revision's settings, fetched if need be; warn and return None if they cannot follow those in force,
        or are too late after a last body."""
        try:
            new = self._revision(revision).config
            check_changes(self.run, new)
            if last is not None:
                check_moment(self.run, new, last)
        except (ConfigError, JoinError, ExchangeError) as error:
            if (revision, type(error)) not in self._warned:
                self._warned.add((revision, type(error)))
                log.warning("revision %d of the run's settings changes nothing here: %s", revision.number, error)
            return None
        return new

    def _revision(self, revision: Revision) -> Manifest:
        if revision.digest not in self._known:
            others = [peer for peer in self.swarm.read(ManifestRecord) if peer != self.swarm.peer_id]
            self._ask(others, revision.number)
        if revision.digest not in self._known:
            raise ExchangeError("no peer asked has sent it; asking again each round")
        return self._known[revision.digest]


def read_revision(file: Path, manifest: Manifest) -> Manifest | None:
    """Return the founder's revision in a file; None, with a warning, if it has none."""
    try:
        return revised(file.read_bytes(), manifest)
    except FileNotFoundError:
        return None
    except (OSError, JoinError) as error:  # guard: never
        log.warning("%s is no revision of the run's settings (%s); run spes amend again", file, error)
        return None


def revised(document: bytes, manifest: Manifest) -> Manifest:
    """Read a revision of a manifest.

    Raises:
        JoinError: this software cannot read it, the founder has not signed it, or it is of another founding.
    """
    found = signed_manifest(document, manifest.run_id)
    if found.founding != manifest.digest or found.founder != manifest.founder:  # guard: never
        raise JoinError("it is of another founding of the run")
    return found


def _stored(load: Callable[..., bytes], manifest: Manifest) -> list[Manifest]:
    """Return the revisions that a store keeps; `load` returns a document by name, or the one before it."""
    found = []
    for before in (False, True):
        with contextlib.suppress(ExchangeError, JoinError):  # there is none
            found.append(revised(load(REVISION, before=before), manifest))
    return found


def kept_revisions(manifest: Manifest, load: Callable[..., bytes], file: Path) -> list[Manifest]:
    """Return a manifest and the revisions that its peer has kept, newest last; `load` reads its documents by name."""
    written = read_revision(file, manifest)
    found = [manifest, *_stored(load, manifest), *([written] if written is not None else [])]
    return sorted(found, key=lambda each: each.revision)


def check_moment(old: RunConfig, new: RunConfig, last: Body, rounds: int = DEALT_ROUNDS) -> None:
    """Check that no sequence whose source changes is dealt after the last certificate's body and some rounds more.

    Raises:
        ConfigError: it is too late.
    """
    first = first_changed_tokens(old, new)
    if first is not None and first < (dealt := dealt_tokens(new, last, rounds)):  # guard: never
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
