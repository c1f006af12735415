"""`spes invite`: print invites to a closed run."""

from __future__ import annotations

import time

from spes_p2p.commands.early import check_identity
from spes_p2p.config.commands import InviteConfig
from spes_p2p.config.link import JoinLink
from spes_p2p.errors import ConfigError
from spes_p2p.presentation import say
from spes_p2p.swarm.invites import issue
from spes_p2p.swarm.p2p.identity import Identity

DAY_SECONDS = 86_400


def main(config: InviteConfig) -> int:
    """Print the invites."""
    check_identity(config.identity)
    founder = Identity(config.identity)
    if config.founder not in (None, founder.peer_id):
        raise ConfigError(f"{config.identity} is {founder.peer_id}'s, not the founder's, {config.founder}")
    link = JoinLink.parse(config.link) if config.link is not None else None
    if link is not None and (link.run_id, link.founder) != (config.run_name, founder.peer_id):
        raise ConfigError(f"--link is of {link.run_id}@{link.founder}, not of {config.run_name}@{founder.peer_id}")
    expires = int(time.time()) + config.days * DAY_SECONDS
    for _ in range(config.count):
        invite = issue(founder, config.run_name, expires)
        say(invite if link is None else link.model_copy(update={"invite": invite}).encode())
    return 0
