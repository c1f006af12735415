"""`spes join LINK`: take part in a run with one link; the same command resumes after an interruption."""

from __future__ import annotations

from pathlib import Path

from spes_p2p.config import MAX_ADDRESSES, JoinLink, PeerConfig
from spes_p2p.config.commands import JoinConfig
from spes_p2p.errors import AbsentError, JoinError
from spes_p2p.peer import life
from spes_p2p.peer.output_dir import can_resume, was_cut_off
from spes_p2p.presentation import say
from spes_p2p.swarm.p2p.lan import find_on_lan


def main(config: JoinConfig) -> int:
    """Run a peer to the end of its run; return the exit code."""
    return life.main(as_peer(config))


def as_peer(config: JoinConfig) -> PeerConfig:
    """Return the settings of `spes peer` that a link and a machine's choices amount to."""
    name = config.name_on_lan
    link = JoinLink.parse(config.link) if name is None else link_on_lan(name, config.host)
    chosen = {name: getattr(config, name) for name in config.model_fields_set - {"link"}}
    output = config.output or Path("runs") / link.run_id
    resume = config.resume or (can_resume(output) and not config.overwrite)
    return PeerConfig(
        **chosen
        | {
            "run_id": link.founded,
            "initial_peers": list(link.addresses),
            "invite": config.invite or link.invite or None,
            "output": output,
            "resume": resume,
            "overwrite": config.overwrite or (not resume and was_cut_off(output)),
        }
    )


def link_on_lan(name: str, host: str | None) -> JoinLink:
    """Return the link to a run that peers on this network are in.

    Args:
        name: The run's name, or `NAME@FOUNDER`.
        host: Address of the network to ask; None asks all.

    Raises:
        JoinError: no peer answers, or those of several runs of this name do.
    """
    run_id, _, founder = name.partition("@")
    found = find_on_lan(run_id, host)
    if founder:
        found = {founder: found[founder]} if founder in found else {}
    if not found:
        raise AbsentError(
            f"no peer on this network is in run {name!r}; start one with --lan, check the name, or join by the link"
        )
    if len(found) > 1:
        names = ", ".join(f"{run_id}@{each}" for each in found)
        raise JoinError(f"this network has {len(found)} runs of that name; name one of {names}")
    (by, addresses), *_ = found.items()
    say(f"run {run_id!r} on this network was founded by {by}")
    return JoinLink(run_id=run_id, founder=by, addresses=tuple(addresses[:MAX_ADDRESSES]))
