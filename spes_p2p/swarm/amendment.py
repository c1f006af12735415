"""Changes to a running run's settings: signed by its founder, named by a certificate, in force from the next round on.

An amendment is a document: the run's settings as they are to be. A peer that has one states its signed version in its
confirmation, the proposer's body names it, and each later body repeats it. So all peers change in the same round, and a
newcomer or a monitor that knows the last certificate knows the settings, and fetches the document by its digest.

Only settings that each peer reads anew in each round can change. Everything else is in weights, moments, versions on
disk or data that peers have already; a new run from this one's model is the way to change it.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import logging
import random
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from spes_p2p.codecs.vectors import digest
from spes_p2p.config import FOUNDED, RunConfig, RunId
from spes_p2p.errors import ConfigError, ExchangeError, JoinError, RecordError
from spes_p2p.fs import write_atomic
from spes_p2p.presentation import problem_of
from spes_p2p.swarm.certificate import Body, shares
from spes_p2p.swarm.exchange.versions import AMENDMENT, Version
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.manifest import Manifest, pull_document
from spes_p2p.swarm.records import Digest, ManifestRecord, Progress, Record

log = logging.getLogger(__name__)

FILE = "amendment.json"
"""In a peer's output: the founder's newest amendment, as `spes amend` writes it; a running peer looks for it."""
MAX_FILE_BYTES = 2**18
FETCH_SECONDS = 5.0
"""Time to fetch a change's document, in which this peer does not train."""
MAX_ASKED = 16
DEALT_ROUNDS, ROOM_ROUNDS = 6, 12
"""Rounds' batches beyond the cursor that may be dealt already; and with room until the next certificate."""

CHANGEABLE = frozenset(
    {
        *("round.total", "train.lr", "train.schedule", "train.decay_fraction", "train.schedule_rounds"),
        *("train.final_lr_ratio", "data.phases", "data.mixture"),
    }
)
"""Settings that an amendment may change."""
REASONS: Mapping[str, str] = {
    "model": "the weights have this shape",
    "adapter": "the weights have this shape",
    "seed": "the first weights were drawn with it",
    "frozen_storage": "each peer has loaded the model so, and slots travel so",
    "data": "peers have read, split and ordered their data with it",
    "train": "the optimizer of every peer was built with it",
    "round": "the peers' clocks, leases and ranges of data derive from it",
    "outer": "anchors, momentum and moments on every disk have that form",
    "codecs": "versions and residuals on every disk have that form",
    "merge": "the merge's schedule is part of every version so far",
    "invite_only": "who takes part was decided with it",
}
"""Why other settings cannot change, by section."""
OWN = frozenset({"data.paths", "data.skip_unusable", "data.chat_template", "data.probe"})
"""Settings of which the manifest has what the founder's machine made of them."""


class Amendment(BaseModel):
    """The document: what the settings are to be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: RunId
    manifest: Digest
    """Digest of the run's manifest."""
    config: RunConfig

    def encode(self) -> bytes:
        """Return the canonical JSON that the founder signs."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Signed:
    """An amendment, and the founder's signed description of it, whose round is the amendment's number."""

    version: Version
    document: bytes

    def write(self, path: Path) -> None:
        """Write the file that a peer looks for."""
        content = {"version": self.version.model_dump(), "document": base64.b64encode(self.document).decode()}
        with write_atomic(path) as stream:
            stream.write(json.dumps(content).encode())

    @classmethod
    def read(cls, path: Path, manifest: Manifest) -> Signed | None:
        """Return the amendment in a file; None if there is no file.

        Raises:
            RecordError: it is damaged, of another run, or not signed by its founder.
        """
        try:
            content = json.loads(path.read_bytes()) if path.stat().st_size <= MAX_FILE_BYTES else {}
            document = base64.b64decode(content["document"], validate=True)
            version = Version.verify(json.dumps(content["version"]), manifest.run_id)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{path} is no amendment ({error!r}); write it again with spes amend") from error
        is_founders = (version.name, version.author) == (AMENDMENT, manifest.founder)
        if not (is_founders and digest(document) == version.digest):  # guard: amendment-file
            raise RecordError(f"{path} is not signed by the run's founder {manifest.founder}")
        return cls(version, document)


def parse(document: bytes, manifest: Manifest) -> RunConfig:
    """Return the settings in an amendment's document.

    Raises:
        JoinError: this software cannot read it, or it is of another run.
    """
    try:
        found = Amendment.model_validate_json(document, context=FOUNDED)
    except ValidationError as error:
        raise JoinError(f"it cannot be read: {problem_of(error)}; update spes_p2p") from error
    if (found.run_id, found.manifest) != (manifest.run_id, manifest.digest):  # guard: amended-run
        raise JoinError("it is of another run of this name")
    return found.config


def changes(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by section and name, each with its old and new value."""
    before, after = (dict(_flat(each.model_dump(mode="json"))) for each in (old, new))
    return {
        name: (before.get(name), after.get(name))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    }


def _flat(sections: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, value in sections.items():
        if isinstance(value, Mapping):
            yield from ((f"{section}.{name}", each) for name, each in value.items())
        else:
            yield section, value


def check_changes(old: RunConfig, new: RunConfig) -> None:
    """Check that an amendment changes only what can change in a run that is under way.

    Raises:
        ConfigError: it changes something else, or nothing.
    """
    found = changes(old, new)
    if not found:
        raise ConfigError("these are the run's settings already; name what is to change, such as --run.round.total")
    for name, (before, after) in found.items():
        if name not in CHANGEABLE:  # guard: changeable-settings
            raise ConfigError(
                f"{name} cannot change from {before!r} to {after!r} while the run is under way: "
                f"{REASONS[name.split('.')[0]]}; found a new run from this one's model (spes export, then --from)"
            )
    named = [[(each.name, each.fingerprint, each.urls) for each in run.data.mixture] for run in (old, new)]
    if named[0] != named[1]:
        raise ConfigError(
            "data.mixture cannot change its sources, only their weights: the peers have no other shards; found a new "
            "run from this one's model (spes export, then --from)"
        )


def check_moment(old: RunConfig, new: RunConfig, last: Body, rounds: int = DEALT_ROUNDS) -> None:
    """Check that it is not too late for an amendment.

    Args:
        old: The settings in force.
        new: Those that are to be.
        last: The last certificate's body.
        rounds: Rounds' batches that may be dealt beyond it.

    Raises:
        ConfigError: the run is beyond its new end, or has dealt sequences whose source would change.
    """
    if new.round.total <= last.round:  # guard: amended-end
        raise ConfigError(
            f"round.total={new.round.total}, but round {last.round} is committed; set it to {last.round + 1} or more"
        )
    first = first_changed_tokens(old, new)
    if first is not None and first < (dealt := dealt_tokens(new, last, rounds)):  # guard: amended-phases
        raise ConfigError(
            f"data.mixture: the weights from {first:,} tokens on would change, and sequences below {dealt:,} tokens "
            f"are trained or dealt already; keep what was, and begin a phase (data.phases) at {dealt:,} or later"
        )


def first_changed_tokens(old: RunConfig, new: RunConfig) -> int | None:
    """Return the position, in tokens, from which sequences come from other sources; None if none do."""
    if (old.data.mixture, old.data.phases) == (new.data.mixture, new.data.phases):
        return None
    one, other = (
        zip((0, *run.data.phases), zip(*(source.weights for source in run.data.mixture), strict=True), strict=True)
        for run in (old, new)
    )
    differing = next((pair for pair in itertools.zip_longest(one, other) if pair[0] != pair[1]), ())
    return min((phase[0] for phase in differing if phase is not None), default=None)


def dealt_tokens(run: RunConfig, last: Body, rounds: int) -> int:
    """Return the position, in tokens, so many rounds beyond the last body's cursor."""
    dealt = sum(map(len, shares(last).values()))
    usual = -(-run.round_tokens // (run.train.batch_size * run.data.sequence_length))
    usual = run.round.steps * max(len(last.members), run.round.min_peers) if run.round.mode == "steps" else usual
    return (last.cursor + rounds * max(dealt, usual)) * run.train.batch_size * run.data.sequence_length


def kept_settings(manifest: Manifest, load: Callable[[str], bytes], file: Path) -> list[RunConfig]:
    """Return the settings of a manifest, and, where an amendment lies in the peer's output, the amended ones.

    Args:
        manifest: The run's manifest.
        load: Returns a stored document by name.
        file: Where the founder's amendment may lie.

    Raises:
        RecordError: the file is damaged, or not signed by the founder.
    """
    found = [manifest.config]
    documents = []
    with contextlib.suppress(ExchangeError):  # there is none
        documents.append(load(AMENDMENT))
    if (signed := Signed.read(file, manifest)) is not None:
        documents.append(signed.document)
    for document in documents:
        with contextlib.suppress(JoinError):  # of another run, or unreadable, which is said when it would count
            found.append(parse(document, manifest))
    return found


def check_kept_settings(
    given: RunConfig, kept: Sequence[RunConfig], output: Path, spared: Collection[str] = ()
) -> None:
    """Check that the settings that a resumed peer is started with say nothing else than those that it goes on with.

    Args:
        given: Settings of the command, of which those that were set count.
        kept: The run's settings, in the manifest and as amended; any of them will do.
        output: The peer's folder.
        spared: Settings that need not be equal.

    Raises:
        ConfigError: a setting differs.
    """
    for name, value in _set_fields(given):
        known = [dict(_flat(run.model_dump(mode="json"))).get(name) for run in kept]
        if name not in {*OWN, *spared} and value not in known:  # guard: resumed-settings
            flag = f"--run.{name.replace('_', '-')}"
            remedy = f"set {flag} {known[-1]}"
            if name in CHANGEABLE:
                command = shlex.join(["spes", "amend", str(output), flag, str(value)])
                remedy += f", or change the run's settings with: {command}"
            raise ConfigError(
                f"{name} is {value!r} by the flags or --config, and the run that --resume goes on with has "
                f"{known[-1]!r}; {remedy}"
            )


def _set_fields(run: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield the settings that a command has set, by section and name, as JSON has them."""
    dumped = dict(_flat(run.model_dump(mode="json")))
    for section in sorted(run.model_fields_set):
        value, names = getattr(run, section), [section]
        if isinstance(value, BaseModel):
            names = [f"{section}.{name}" for name in sorted(value.model_fields_set)]
        yield from ((name, dumped[name]) for name in names if name in dumped)


class Amendments:
    """The settings of a run as its amendments have left them, for one peer or monitor.

    Args:
        swarm: Its swarm, in the run.
        manifest: The run's manifest.
        file: Where the founder's amendment may lie; None looks for none.

    Attributes:
        swarm: The swarm.
        run: The settings in force.
    """

    def __init__(self, swarm: HivemindSwarm, manifest: Manifest, file: Path | None = None) -> None:
        self.swarm = swarm
        self._manifest = manifest
        self._file = file
        self._file_seen = 0
        self._number = 0
        self._refused: set[str] = set()
        self._missed: set[str] = set()
        self.run = manifest.config

    def look(self) -> RunConfig | None:
        """Take over what is in force after the last certificate; return the settings if they have changed."""
        before, last = self.run, self.swarm.last()
        named = last.amendment
        if named is not None and named.round > self._number and (document := self._fetch(named)) is not None:
            self._take(named, document)
        self._read_file()
        is_over = last.round >= self.run.round.total
        if is_over:
            self._ask()
        else:
            self._read_on(self.swarm.read(Progress))
        known = self.swarm.versions().get(AMENDMENT)
        if known is not None and known.round > self._number and self._is_possible(known, last):
            self.swarm.consensus.offer(known)
            if is_over:  # no round is left that could end with a certificate
                self._take(known, self.swarm.load_document(AMENDMENT, known.digest))
        return None if self.run is before else self.run

    def _is_possible(self, known: Version, last: Body) -> bool:
        """Tell whether the next certificate may name an amendment."""
        if known.author != self._manifest.founder:  # guard: founders-document
            return False
        try:
            new = parse(self.swarm.load_document(AMENDMENT, known.digest), self._manifest)
            check_changes(self.run, new)
            check_moment(self.run, new, last)
        except (ConfigError, JoinError, ExchangeError) as error:
            self._say_refused(known, error)
            return False
        return True

    def _take(self, version: Version, document: bytes) -> None:
        """Take over an amendment; every peer that cannot takes none, and says so."""
        self._number = version.round
        try:
            new = parse(document, self._manifest)
            check_changes(self.run, new)
        except (ConfigError, JoinError) as error:
            self._say_refused(version, error)
            return
        words = ", ".join(f"{name} {old!r} -> {now!r}" for name, (old, now) in changes(self.run, new).items())
        log.info("amendment %d of the run's founder is in force: %s", version.round, words)
        self.run = new

    def _say_refused(self, version: Version, error: Exception) -> None:
        if version.digest not in self._refused:
            self._refused.add(version.digest)
            log.warning("amendment %d is not possible, and nothing changes: %s", version.round, error)

    # ------------------------------------------------------------------ finding it

    def _read_file(self) -> None:
        """Pass on the amendment in this peer's output, if there is a new one."""
        try:
            written = self._file.stat().st_mtime_ns if self._file is not None else 0
            if written in (0, self._file_seen):
                return
            assert self._file is not None
            self._file_seen = written
            found = Signed.read(self._file, self._manifest)
        except FileNotFoundError:
            return
        except (OSError, RecordError) as error:
            log.warning("%s", error)
            return
        if found is not None and found.version.round > self._number:
            log.info("amendment %d is in %s; the next certificate names it", found.version.round, self._file)
            self.swarm.keep_document(found.version, found.document)

    def _read_on(self, records: Mapping[str, Record]) -> None:
        """Fetch an amendment that others say they have: no voter votes for one that it has not read."""
        known = self.swarm.versions().get(AMENDMENT)
        mine = max(self._number, known.round if known is not None else 0)
        having = [peer for peer, record in records.items() if getattr(record, "amendment", 0) > mine]
        if having:
            asked = random.sample(having, min(len(having), MAX_ASKED))
            pull_document(self.swarm, AMENDMENT, asked, self._manifest.founder, mine + 1, seconds=FETCH_SECONDS)

    def _ask(self) -> None:
        """Fetch an amendment that other peers have and no certificate names."""
        peers = self._peers()
        offers = self.swarm.exchange.offers(AMENDMENT, peers) if peers else {}
        holders = {peer: each.round for peer, each in offers.items() if each.author == self._manifest.founder}
        newest = max(holders.values(), default=0)
        known = self.swarm.versions().get(AMENDMENT)
        if newest > max(self._number, known.round if known is not None else 0):
            having = [peer for peer, number in holders.items() if number == newest]
            pull_document(self.swarm, AMENDMENT, having, self._manifest.founder, newest)

    def _peers(self) -> list[str]:
        peers = [peer for peer in self.swarm.read(ManifestRecord) if peer != self.swarm.peer_id]
        return random.sample(peers, min(len(peers), MAX_ASKED))

    def _fetch(self, named: Version) -> bytes | None:
        """Return the document that a certificate names; None if no peer sends it now."""
        with contextlib.suppress(ExchangeError):
            return self.swarm.load_document(AMENDMENT, named.digest)
        failure, peers = "no peer is in reach", self._peers()
        if peers:
            failure = pull_document(
                self.swarm, AMENDMENT, peers, self._manifest.founder, digest=named.digest, seconds=FETCH_SECONDS
            )
        if not failure:
            return self.swarm.load_document(AMENDMENT, named.digest)
        if named.digest not in self._missed:
            self._missed.add(named.digest)
            log.warning(
                "cannot fetch amendment %d of the run's settings: %s; going on with the old settings, and asking again "
                "each round",
                *(named.round, failure),
            )
        return None
