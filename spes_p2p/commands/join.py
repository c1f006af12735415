"""`spes join LINK`: take part in a run with one link; the same command resumes after an interruption."""

from __future__ import annotations

from pathlib import Path

from spes_p2p.config import JoinLink, PeerConfig
from spes_p2p.config.commands import JoinConfig
from spes_p2p.peer import life
from spes_p2p.peer.output_dir import can_resume


def main(config: JoinConfig) -> int:
    """Run a peer to the end of its run; return the exit code."""
    return life.main(as_peer(config))


def as_peer(config: JoinConfig) -> PeerConfig:
    """Return the settings of `spes peer` that a link and a machine's choices amount to."""
    link = JoinLink.parse(config.link)
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
        }
    )
