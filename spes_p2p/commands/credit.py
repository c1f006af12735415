"""`spes credit`: list the peers of a run by the tokens of theirs that counted."""

from __future__ import annotations

import tempfile
from pathlib import Path

from spes_p2p.commands.early import is_link
from spes_p2p.commands.export import visiting
from spes_p2p.config.commands import CreditConfig
from spes_p2p.config.link import JoinLink
from spes_p2p.errors import DataError
from spes_p2p.monitor.credit import Credit, seen
from spes_p2p.presentation import say
from spes_p2p.swarm.records import Contact


def main(config: CreditConfig) -> int:
    """Print the list; return the exit code.

    Raises:
        DataError, JoinError: the folder or the swarm cannot be read.
    """
    if is_link(config.source):
        link = JoinLink.parse(config.source)
        with (
            tempfile.TemporaryDirectory() as folder,
            visiting(link.founded, link.addresses, Path(folder), yes=config.yes) as (swarm, *_),
        ):
            swarm.catch_up()
            swarm.read(Contact)
            credit = Credit().plus(swarm.consensus.bodies().values(), names=swarm.names())
    else:
        credit = seen(Path(config.source).expanduser())
    if not credit.rounds:
        raise DataError(f"{config.source} has no certificate of a round yet; try again after the first one")
    say("\n".join([f"tokens that counted, by the certificates of {credit.told()}:", *lines(credit)]))
    return 0


def lines(credit: Credit) -> list[str]:
    """Return a line for each peer: tokens, their share, its id, and its owner's name if they have set one."""
    whole = sum(credit.tokens.values())
    return [
        f"{count:>20,} {count / whole:>6.1%}  {peer}  {credit.names.get(peer, '')}".rstrip()
        for peer, count in credit.tokens.items()
    ]
