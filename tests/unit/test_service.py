"""The unit that `spes service` writes, and the commands it refuses; systemd itself is a recorder of its calls."""

from __future__ import annotations

import configparser
import shlex
import stat
import sys
from pathlib import Path

import pytest

from spes_p2p.commands import service
from spes_p2p.config import JoinLink
from spes_p2p.config.commands import ServiceConfig
from spes_p2p.errors import ConfigError

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
LINK = JoinLink(run_id="run", founder=PEER, addresses=(f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER}",)).encode()


def parsed(text: str) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    return unit


def test_the_unit_starts_the_peer_again_but_not_after_a_lasting_mistake(tmp_path: Path) -> None:
    unit = parsed(service.unit_text(f"spes join {LINK} --threads 2 --grace 100", "spes", tmp_path))
    run = unit["Service"]
    assert shlex.split(run["ExecStart"]) == [
        *(sys.executable, "-m", "spes_p2p", "join", LINK, "--threads", "2", "--grace", "100"),
    ]
    assert (run["Restart"], run["RestartPreventExitStatus"], run["SuccessExitStatus"]) == ("on-failure", "2", "130")
    assert run["TimeoutStopSec"] == "130", "the time to hand over, and more"
    assert run["WorkingDirectory"] == str(tmp_path) and unit["Install"]["WantedBy"] == "default.target"


def test_words_that_systemd_would_expand_are_kept(tmp_path: Path) -> None:
    folder = 'a %h "$HOME" \\ b'
    text = service.unit_text(f"spes join {LINK} --output {shlex.quote(folder)}", "spes", tmp_path / "50%")
    assert '"a %%h \\"$$HOME\\" \\\\ b"' in text and f"WorkingDirectory={tmp_path}/50%%" in text


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "starts no peer"),
        ("spes local", "starts no peer"),
        ("rm -r /", "starts no peer"),
        (f"spes join {LINK}\nExecStartPre=rm", "starts no peer"),
        ("spes join 'x", "is no command: No closing quotation"),
        ("spes join nothing", "is no link to a run"),
        (f"spes join {LINK} --treads 2", "did you mean --threads"),
        (f"spes join {LINK} --overwrite", "drop it"),
        ("spes peer --run-id run", "add --resume here"),
    ],
)
def test_a_command_that_a_service_could_not_repeat_is_refused(tmp_path: Path, command: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        service.unit_text(command, "spes", tmp_path)
    assert "\n" not in str(refused.value)


def test_install_status_and_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "calls"
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/bin:/usr/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    unit = tmp_path / "config" / "systemd" / "user" / "volunteer.service"

    def run(verb: str, command: str | None = None) -> int:
        return service.main(ServiceConfig(verb=verb, command=command, name="volunteer"))  # type: ignore[arg-type]

    assert run("install", f"spes join {LINK}") == 0
    assert stat.S_IMODE(unit.stat().st_mode) == 0o600 and LINK in unit.read_text()
    assert run("status") == 0 and run("remove") == 0 and not unit.exists()
    assert [line for line in log.read_text().splitlines() if "show-environment" not in line] == [
        "--user daemon-reload",
        "--user enable volunteer",
        "--user restart volunteer",
        "--user status --no-pager volunteer",
        "--user disable --now volunteer",
        "--user daemon-reload",
    ]
    unit.write_text("[Unit]\n")
    for verb, command in (("install", f"spes join {LINK}"), ("remove", None)):
        with pytest.raises(ConfigError, match="is not ours; choose another --name"):
            run(verb, command)
    unit.unlink()
    with pytest.raises(ConfigError, match="there is no service 'volunteer'"):
        run("remove")
    with pytest.raises(ConfigError, match="takes no 'now'"):
        run("status", "now")
    program.write_text("#!/bin/sh\necho Failed to connect to bus >&2\nexit 1\n")
    with pytest.raises(ConfigError, match=r"no systemd runs for this user \(Failed to connect to bus\)"):
        run("install", f"spes join {LINK}")
    assert not unit.exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="systemctl is not installed"):
        run("status")
