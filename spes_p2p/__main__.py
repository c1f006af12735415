"""The one command: `spes COMMAND ...`, or `python -m spes_p2p COMMAND ...`. Flags are read before torch is imported."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

USAGE = """usage: spes COMMAND [flags]; `spes COMMAND --help` explains its flags

start here:
  spes local                        four peers train a small model on this machine, in 10 to 15 minutes
  spes join LINK                    join a run; every peer of it prints the link
  spes found                        found a run: five questions, and a plan with its days
  spes plan home_1b                 what a run would need of this machine, and how many days it takes

more commands:
"""
EXIT_USER_ERROR, EXIT_INTERRUPTED = 2, 130
SPINS = "1000"
"""Turns for which a thread of PyTorch's waits for the others before it sleeps; OpenMP's default is 300,000. Where other
programs use a core, too, a step then takes half of the time or less; on quiet cores it takes as long as before."""
COMMANDS: dict[str, tuple[str, str, str]] = {
    "peer": ("PeerConfig", "spes_p2p.peer.life", "found or join a run, and train it"),
    "found": ("FoundConfig", "spes_p2p.commands.found", "found a run by five questions"),
    "join": ("JoinConfig", "spes_p2p.commands.join", "join the run that a link names, and train it"),
    "ctl": ("CtlConfig", "spes_p2p.commands.ctl", "pause, resume, limit or end a running peer"),
    "cluster": ("ClusterConfig", "spes_p2p.commands.cluster", "one peer per node of a cluster's job"),
    "monitor": ("MonitorConfig", "spes_p2p.commands.monitor", "follow a run; leave model and report behind"),
    "rendezvous": ("RendezvousConfig", "spes_p2p.commands.rendezvous", "keep a run together behind home routers"),
    "local": ("ExperimentConfig", "spes_p2p.commands.local", "a whole swarm on this machine"),
    "plan": ("PlanConfig", "spes_p2p.commands.plan", "what a run needs of a machine, and its days"),
    "tokenize": ("TokenizeConfig", "spes_p2p.commands.tokenize", "turn text into shards of token ids"),
    "invite": ("InviteConfig", "spes_p2p.commands.invite", "invite friends to vote, or volunteers to a closed run"),
    "chat": ("ChatConfig", "spes_p2p.commands.chat", "talk to a model: of a folder, of a peer, or of a running swarm"),
    "evaluate": ("EvaluateConfig", "spes_p2p.commands.evaluate", "measure a checkpoint"),
    "amend": ("AmendConfig", "spes_p2p.commands.amend", "prolong or anneal a run that is under way"),
    "export": ("ExportConfig", "spes_p2p.commands.export", "write a round's model as a Hugging Face checkpoint"),
    "credit": ("CreditConfig", "spes_p2p.commands.credit", "list peers by the tokens of theirs that counted"),
    "upcycle": ("UpcycleConfig", "spes_p2p.commands.upcycle", "make a mixture of experts from a dense model"),
    "simulate": ("SimulateConfig", "spes_p2p.commands.simulate", "compare ways to train in a simulation"),
    "health": ("HealthConfig", "spes_p2p.commands.health", "tell whether a peer makes progress"),
}
"""Each command's class of settings in `config.commands`, the module of its `main`, and its line in the usage."""


def start(name: str, argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit.

    Args:
        name: A key of COMMANDS.
        argv: Its flags; by default `sys.argv` without the program's name.
    """
    # An interrupt before the command has begun ends quietly: nothing has to be tidied up.
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch is imported
    try:
        from spes_p2p.cli import entry_point, leave
        from spes_p2p.commands.early import refuse
        from spes_p2p.config import commands
    except ImportError as error:
        _leave_outside(error)

    settings, module, _ = COMMANDS[name]
    try:
        entry_point(getattr(commands, settings), module, argv, refuse, f"spes {name}")
    except SystemExit as ended:
        assert isinstance(ended.code, int), f"a command's exit code is a number, not {ended.code!r}"
        leave(ended.code)


def _leave_outside(error: ImportError) -> NoReturn:
    """Exit with the remedy for a Python without the libraries, or an older one."""
    sys.stderr.write(f"error: {error}; run ./scripts/setup.sh, and start .venv/bin/spes\n")
    sys.exit(EXIT_USER_ERROR)


def main() -> NoReturn:
    """Run the command that `sys.argv` names, and exit."""
    name, *argv = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        start(name, argv)
    try:
        from spes_p2p.presentation import say
    except ImportError as error:
        _leave_outside(error)

    if name in ("--help", "-h"):
        others = {name: purpose for name, (_, _, purpose) in COMMANDS.items() if f"spes {name} " not in USAGE}
        say(USAGE + "\n".join(f"  {name:<10} {purpose}" for name, purpose in others.items()))
        sys.exit(0)
    if name == "--version":
        from spes_p2p import __version__

        say(f"spes_p2p {__version__}")
        sys.exit(0)
    from difflib import get_close_matches

    close = get_close_matches(name, COMMANDS, 1)
    hint = f"did you mean {close[0]}? " if close else ""
    sys.stderr.write(f"error: unknown command {name!r}; {hint}see spes --help\n")
    sys.exit(EXIT_USER_ERROR)


if __name__ == "__main__":
    main()
