"""`spes amend`: change the settings of a run that is under way, or prolong one that has ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from spes_p2p.cli import explain
from spes_p2p.config import RunConfig
from spes_p2p.config.changes import OWN, changes, check_changes, settings_by_name
from spes_p2p.config.commands import AmendConfig
from spes_p2p.errors import ConfigError
from spes_p2p.fs import write_atomic
from spes_p2p.monitor.model_folder import ModelFolder
from spes_p2p.optim.schedule import rate_of_step
from spes_p2p.presentation import say
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.chain import ChainFile
from spes_p2p.swarm.consensus import CERTIFICATES
from spes_p2p.swarm.consensus import FOLDER as CONSENSUS
from spes_p2p.swarm.exchange.protocol import MAX_DOCUMENT_BYTES
from spes_p2p.swarm.manifest import REVISION_FILE, ROOM_ROUNDS, Manifest, check_moment, kept_revisions
from spes_p2p.swarm.p2p.identity import Identity, IdentityKeys


def main(config: AmendConfig) -> int:
    """Sign a revision of the manifest, and leave it where the folder's peer finds it; return the exit code.

    Raises:
        ConfigError: the change is not possible, or the identity is not the founder's.
        DataError: the folder is no peer's.
    """
    source, file = ModelFolder(config.folder), config.folder / REVISION_FILE
    manifest, founder = source.manifest, founder_of(config.folder, config.identity, source.manifest)
    last = ChainFile(config.folder / CONSENSUS / CERTIFICATES, manifest.genesis(), IdentityKeys(founder)).load().last
    kept = {each.digest: each for each in kept_revisions(manifest, source.document, file)}
    newest, named = list(kept.values())[-1], last.revision
    if named.number and named.digest not in kept:
        raise ConfigError(
            f"{config.folder} lacks revision {named.number}, which is in force; name another peer's folder"
        )
    in_force = kept[named.digest].config if named.number else manifest.config
    new = changed(newest.config, config.run or RunConfig())
    check_changes(in_force, new)
    if new.round.total <= last.round:
        raise ConfigError(
            f"round.total={new.round.total}, but round {last.round} is committed; set it to {last.round + 1} or more"
        )
    check_moment(in_force, new, last, ROOM_ROUNDS)
    number = max(named.number, newest.revision) + 1
    fields = {"config": new, "revision": number, "founding": manifest.digest}
    document = manifest.model_copy(update=fields).sign(founder).encode()
    if len(document) > MAX_DOCUMENT_BYTES:
        raise ConfigError(f"the changed manifest has {len(document)} bytes, at most {MAX_DOCUMENT_BYTES}")
    try:
        with write_atomic(file) as stream:
            stream.write(document)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; name another folder of a peer") from error
    _say(number, in_force, new, last)
    return 0


def changed(base: RunConfig, given: RunConfig) -> RunConfig:
    """Return `base` with a command's settings.

    Raises:
        ConfigError: they contradict each other.
    """
    document = base.model_dump(mode="json")
    for name, value in settings_by_name(given, is_set=True).items():
        if name == "revoked_invites":  # those revoked before stay so
            value = list(dict.fromkeys([*base.revoked_invites, *value]))
        section, _, field = name.partition(".")
        if name not in OWN:
            document[section] = {**(document[section] or {}), field: value} if field else value
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"the changed settings are not possible: {explain(error)}") from error


def founder_of(folder: Path, identity: Path | None, manifest: Manifest) -> Identity:
    """Return the identity of a run's founder: a file, or that of the peer whose folder this is.

    Raises:
        ConfigError: there is none, or it is another peer's.
    """
    found = Identity(path := identity or folder / "identity.key")
    if found.peer_id != manifest.founder:
        raise ConfigError(
            f"{path} is {found.peer_id}'s, and only the founder {manifest.founder} of run {manifest.run_id!r} can do "
            f"this; name the founder's --output, or its identity.key with --identity"
        )
    return found


def _say(number: int, old: RunConfig, new: RunConfig, last: Body) -> None:
    say(f"revision {number} of the run's settings, after round {last.round}:")
    for name, (before, after) in changes(old, new).items():
        say(f"  {name}: {_short(before)} -> {_short(after)}")
    for letters in new.revoked_invites[len(old.revoked_invites) :]:
        if not any(invite.startswith(letters) for invite in last.seats.values()):
            say(f"  nobody has voted by an invite {letters}...: compare the letters with those on the page")
    rates = [rate_of_step(run, last.round) for run in (old, new)]
    if rates[0] != rates[1]:
        say(f"  learning rate of the next round: {rates[0]:.3g} -> {rates[1]:.3g}")
    if last.round >= old.round.total:
        say("the run has ended: start this folder's peer again with --resume, then the others")
    else:
        say("this folder's peer passes it on at the end of its round; all peers adopt it in the same later round")


def _short(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return ", ".join(f"{each['name']} {each['weights']}" for each in value)
    return str(value)
