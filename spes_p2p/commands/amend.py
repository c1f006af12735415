"""`spes amend`: change the settings of a run that is under way, or prolong one that has ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from spes_p2p.cli import explain
from spes_p2p.config import RunConfig
from spes_p2p.config.commands import AmendConfig
from spes_p2p.errors import ConfigError, RecordError
from spes_p2p.monitor.model_folder import ModelFolder
from spes_p2p.optim.schedule import rate_of_step
from spes_p2p.presentation import say
from spes_p2p.swarm.amendment import (
    FILE,
    OWN,
    ROOM_ROUNDS,
    Amendment,
    Signed,
    changes,
    check_changes,
    check_moment,
    parse,
)
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.chain import ChainFile
from spes_p2p.swarm.consensus import CERTIFICATES
from spes_p2p.swarm.consensus import FOLDER as CONSENSUS
from spes_p2p.swarm.exchange.versions import AMENDMENT, Version
from spes_p2p.swarm.manifest import MAX_BYTES, Manifest
from spes_p2p.swarm.p2p.identity import Identity, IdentityKeys


def main(config: AmendConfig) -> int:
    """Sign an amendment, and leave it where the folder's peer finds it; return the exit code.

    Raises:
        ConfigError: the change is not possible, or the identity is not the founder's.
        DataError: the folder is no peer's.
    """
    folder = config.folder
    source = ModelFolder(folder)
    manifest, founder = source.manifest, _founder(config, folder, source.manifest)
    last = ChainFile(folder / CONSENSUS / CERTIFICATES, manifest.genesis(), IdentityKeys(founder)).load().last
    kept = _newest(source, folder, manifest)
    in_force = manifest.config
    if last.amendment is not None:
        in_force = parse(source.document(AMENDMENT, last.amendment.digest), manifest)
    base = in_force if kept is None else parse(kept.document, manifest)
    new = changed(base, config.run) if config.run is not None else base
    check_changes(in_force, new)
    check_moment(in_force, new, last, ROOM_ROUNDS)
    document = Amendment(run_id=manifest.run_id, manifest=manifest.digest, config=new).encode()
    if len(document) > MAX_BYTES[AMENDMENT]:
        raise ConfigError(f"the amended settings have {len(document)} bytes, at most {MAX_BYTES[AMENDMENT]}")
    numbers = [each.round for each in (last.amendment, kept.version if kept else None) if each is not None]
    number = max(numbers, default=0) + 1
    version = Version.sign(founder, manifest.run_id, AMENDMENT, number, document, "raw")
    try:
        Signed(version, document).write(folder / FILE)
    except OSError as error:
        raise ConfigError(f"cannot write {folder / FILE}: {error.strerror}; name another folder of a peer") from error
    _say(manifest, number, in_force, new, last)
    return 0


def changed(base: RunConfig, given: RunConfig) -> RunConfig:
    """Return `base` with a command's settings.

    Raises:
        ConfigError: they contradict each other.
    """
    document = base.model_dump(mode="json")
    for section, value in given.model_dump(mode="json", exclude_unset=True).items():
        if isinstance(value, Mapping) and isinstance(document.get(section), Mapping):
            own = {name for name in value if f"{section}.{name}" in OWN}
            document[section] = document[section] | {name: value[name] for name in value if name not in own}
        else:
            document[section] = value
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"the amended settings are not possible: {explain(error)}") from error


def _founder(config: AmendConfig, folder: Path, manifest: Manifest) -> Identity:
    path = config.identity or folder / "identity.key"
    if not path.is_file():
        raise ConfigError(f"there is no identity {path}; name the founder's with --identity")
    identity = Identity(path)
    if identity.peer_id != manifest.founder:
        raise ConfigError(
            f"{path} is {identity.peer_id}'s, and only the founder {manifest.founder} can amend run "
            f"{manifest.run_id!r}; name the founder's --output, or its identity.key with --identity"
        )
    return identity


def _newest(source: ModelFolder, folder: Path, manifest: Manifest) -> Signed | None:
    """Return the newest amendment that the folder has, in force or not."""
    found = [Signed(version, source.document(AMENDMENT, version.digest)) for version in source.of_name(AMENDMENT)]
    try:
        if (waiting := Signed.read(folder / FILE, manifest)) is not None:
            found.append(waiting)
    except RecordError as error:
        raise ConfigError(str(error)) from error
    own = [each for each in found if each.version.author == manifest.founder]
    return max(own, key=lambda each: each.version.round, default=None)


def _say(manifest: Manifest, number: int, old: RunConfig, new: RunConfig, last: Body) -> None:
    say(f"amendment {number} of run {manifest.run_id!r}, after round {last.round}:")
    for name, (before, after) in changes(old, new).items():
        say(f"  {name}: {_short(before)} -> {_short(after)}")
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
