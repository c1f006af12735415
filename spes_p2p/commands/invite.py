"""The command by which a founder invites peers to a closed run: `scripts/invite.py`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from spes_p2p.config import CommandConfig, NamedRun, PositiveInt
from spes_p2p.errors import ConfigError
from spes_p2p.presentation import say
from spes_p2p.swarm.invites import issue
from spes_p2p.swarm.p2p.identity import Identity

DAY_SECONDS = 86_400


class InviteConfig(CommandConfig, NamedRun):
    """Invites to a run that was founded with --run.invite-only, one a line."""

    model_config = SettingsConfigDict(env_prefix="SPES_INVITER_", cli_prog_name="invite.py")

    identity: Path
    """The founder's identity file."""
    count: PositiveInt = 1
    """How many; each serves two identities of one volunteer."""
    days: Annotated[int, Field(ge=1, le=3650)] = 30
    """For how long they hold."""
    log_level: str = "warning"
    """Least severe event to log."""


def main(config: InviteConfig) -> int:
    """Print the invites."""
    if not config.identity.is_file():
        raise ConfigError(f"there is no identity {config.identity}; name the founder's, identity.key in its --output")
    founder = Identity(config.identity)
    if config.founder not in (None, founder.peer_id):
        raise ConfigError(f"{config.identity} is {founder.peer_id}'s, not the founder's, {config.founder}")
    expires = int(time.time()) + config.days * DAY_SECONDS
    for _ in range(config.count):
        say(issue(founder, config.run_name, expires))
    return 0
