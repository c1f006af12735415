"""`spes invite`: print invites to a run."""

from __future__ import annotations

import logging
import time

from spes_p2p.commands.amend import founder_of
from spes_p2p.config.commands import InviteConfig
from spes_p2p.config.link import JoinLink
from spes_p2p.monitor.model_folder import ModelFolder
from spes_p2p.peer.joining import LINK_FILE
from spes_p2p.presentation import say
from spes_p2p.swarm.invites import SHOWN_LETTERS, issue
from spes_p2p.swarm.p2p.identity import IdentityKeys

log = logging.getLogger(__name__)


def main(config: InviteConfig) -> int:
    """Print links to the run that have the invites in them; invites alone if the folder has no link.

    Raises:
        ConfigError: the identity is not the founder's.
        DataError: the folder is no peer's.
    """
    manifest, file = ModelFolder(config.folder).manifest, config.folder / LINK_FILE
    keys = IdentityKeys(founder_of(config.folder, config.identity, manifest))
    link = JoinLink.parse(file.read_text()) if file.exists() else None
    expires = int(time.time()) + config.days * 86_400
    for _ in range(config.count):
        invite = issue(keys, manifest.digest, expires, places=config.places, votes=config.votes)
        say(invite if link is None else link.model_copy(update={"invite": invite}).encode())
        kind = "to vote" if config.votes else "to train"
        end = time.strftime("%Y-%m-%d", time.gmtime(expires))
        log.info("invite %s %s, %d places, until %s (UTC)", invite[:SHOWN_LETTERS], kind, config.places, end)
    if not (config.votes or manifest.config.invite_only):
        log.warning("anyone may train in this run: add --votes, or these invites give nothing")
    return 0
