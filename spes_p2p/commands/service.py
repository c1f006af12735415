"""`spes service`: a peer as a systemd service of its user, which starts at login and again after a failure."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from platformdirs import user_config_path

from spes_p2p.cli import EXIT_INTERRUPTED, EXIT_USER_ERROR, load_settings
from spes_p2p.config import PeerConfig
from spes_p2p.config.commands import JoinConfig, ServiceConfig
from spes_p2p.config.machine import VolunteerConfig
from spes_p2p.errors import ConfigError
from spes_p2p.fs import write_atomic
from spes_p2p.presentation import printable, say

OURS = "# Written by `spes service install`; `spes service remove` deletes it.\n"
RESTART_SECONDS = 30
STOP_MARGIN_SECONDS = 30
COMMAND_SECONDS = 600.0
UNIT = """{ours}[Unit]
Description=spes peer {name}
After=network-online.target
StartLimitIntervalSec=0

[Service]
WorkingDirectory={folder}
ExecStart={command}
Restart=on-failure
RestartSec={restart}
SuccessExitStatus={interrupted}
RestartPreventExitStatus={user_error}
KillMode=mixed
TimeoutStopSec={stop}
Nice=10

[Install]
WantedBy=default.target
"""
"""Exit codes 130 (handed over) and 2 (wrong settings) do not restart the peer; 75 (no answer) does. SIGTERM goes
to the peer alone, which ends its helpers itself."""


def main(config: ServiceConfig) -> int:
    """Install, show or remove the service; return the exit code."""
    unit = user_config_path() / "systemd" / "user" / f"{config.name}.service"
    if config.verb != "install" and config.command:
        raise ConfigError(f"{config.verb} takes no {config.command[:60]!r}; leave it out")
    if shutil.which("systemctl") is None:
        raise ConfigError("systemctl is not installed, and a service needs systemd; start the peer by hand instead")
    _check_systemd()
    if config.verb == "status":
        return _systemctl("status", "--no-pager", config.name)
    if config.verb == "remove":
        return _remove(unit, config.name)
    text = unit_text(config.command or "", config.name, Path.cwd())
    _check_ours(unit)
    unit.parent.mkdir(parents=True, exist_ok=True)
    with write_atomic(unit) as stream:
        os.fchmod(stream.fileno(), 0o600)  # a link may hold an invite
        stream.write(text.encode())
    code = _systemctl("daemon-reload") or _systemctl("enable", config.name) or _systemctl("restart", config.name)
    if not code:
        say(f"installed {unit}; log: journalctl --user -u {config.name}")
        say("it ends when you log out, unless you allow it to stay: loginctl enable-linger")
    return code


def unit_text(command: str, name: str, folder: Path) -> str:
    """Return the unit of a peer's command.

    Args:
        command: As its owner would type it.
        name: The service's name.
        folder: Folder that relative paths start from.

    Raises:
        ConfigError: it is no command of a peer, its flags do not fit, or it would not go on after a restart.
    """
    words, config = _peer(command)
    program = [sys.executable, "-m", "spes_p2p", *words]
    return UNIT.format(
        ours=OURS,
        name=name,
        folder=_literal(str(folder)),
        command=" ".join(map(_quoted, program)),
        restart=RESTART_SECONDS,
        interrupted=EXIT_INTERRUPTED,
        user_error=EXIT_USER_ERROR,
        stop=round(config.grace) + STOP_MARGIN_SECONDS,
    )


def _peer(command: str) -> tuple[list[str], VolunteerConfig]:
    """Return a command's words from `join` or `peer` on, and its settings."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{command[:60]!r} is no command: {error}; quote it as for a shell") from error
    words = words[1:] if words and Path(words[0]).name == "spes" else words
    if not words or words[0] not in ("join", "peer") or not command.isprintable():
        raise ConfigError(f'{command[:60]!r} starts no peer; write it in quotes, as in "spes join LINK --threads 2"')
    config: VolunteerConfig = load_settings(JoinConfig if words[0] == "join" else PeerConfig, words[1:])
    if isinstance(config, PeerConfig) and not config.resume:
        raise ConfigError(
            "a service is started again and again; start `spes peer` once by hand, then add --resume here"
        )
    if config.overwrite:
        raise ConfigError("--overwrite would delete the peer's work at each start; drop it")
    return words, config


def _quoted(word: str) -> str:
    """Return a word as systemd reads it back."""
    escaped = _literal(word).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{escaped}"'


def _literal(text: str) -> str:
    return text.replace("%", "%%")


def _check_ours(unit: Path) -> None:
    if unit.exists() and not unit.read_text(errors="replace").startswith(OURS):
        raise ConfigError(f"{unit} is not ours; choose another --name")


def _remove(unit: Path, name: str) -> int:
    if not unit.exists():
        raise ConfigError(f"there is no service {name!r} in {unit.parent}; name the one that you have installed")
    _check_ours(unit)
    code = _systemctl("disable", "--now", name)
    unit.unlink()
    return _systemctl("daemon-reload") or code


def _check_systemd() -> None:
    """Refuse to go on where no systemd runs for this user, as in a container."""
    command = ["systemctl", "--user", "show-environment"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    if tried.returncode:
        reason = printable(tried.stderr.strip().partition("\n")[0]) or f"exit code {tried.returncode}"
        raise ConfigError(f"no systemd runs for this user ({reason}); log in to the machine, or start the peer by hand")


def _systemctl(*words: str) -> int:
    try:
        return subprocess.run(["systemctl", "--user", *words], timeout=COMMAND_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"systemctl --user {words[0]} has not ended in {COMMAND_SECONDS:.0f} s; see its log"
        ) from error
