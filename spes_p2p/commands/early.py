"""What a command refuses before torch is imported: an error in a flag costs half a second then, and not five."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from spes_p2p.cli import explain
from spes_p2p.config import CommandConfig, DataConfig, OwnData, PeerConfig, VolunteerConfig
from spes_p2p.config import commands as of
from spes_p2p.config.launch import check_ranks
from spes_p2p.config.link import JoinLink
from spes_p2p.config_file import read_settings
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.fs import matches, unmatched
from spes_p2p.peer.output_dir import check_output
from spes_p2p.swarm.p2p.port_map import EVERY_INTERFACE, LOOPBACK, check_port

RUN_FILE = "run.yaml"
"""Settings of an experiment, in its output."""
_ADDRESS = re.compile(r"(/[^/\s]+)+/p2p/\w{40,64}", re.ASCII)


def refuse(config: CommandConfig) -> None:
    """Check flags, and the files that they name, as far as that takes no library; the command checks the rest.

    Raises:
        ConfigError, DataError: as the command's `main`.
    """
    is_first = os.environ.get("RANK", "0") == "0"  # another rank may find what the first has begun
    for address in getattr(config, "initial_peers", ()):
        if not _ADDRESS.fullmatch(address):
            raise ConfigError(f"{address!r} is not a peer's multiaddr; it looks like /ip4/1.2.3.4/tcp/4000/p2p/Qm...")
    match config:
        case PeerConfig():
            check_ranks(os.environ, founds=config.founds)
            if is_first:
                check_output(config.output, resume=config.resume, overwrite=config.overwrite)
        case of.ExperimentConfig():
            if config.resume:
                check_experiment(config.output)
            else:
                check_output(config.output, resume=False, overwrite=config.overwrite)
            if config.dataset is not None and not Path(config.dataset).exists():
                check_dataset(config.dataset)
        case of.ExportConfig():
            check_export(config)
        case of.ChatConfig(source=source):
            check_source(source)
        case of.EvaluateConfig():
            check_text(config.text)
            check_checkpoint(config.checkpoint)
        case of.PlanConfig(start_from=Path() as folder) | of.UpcycleConfig(source=folder):
            check_checkpoint(folder, "give --from a folder written by save_pretrained")
        case of.CreditConfig(source=source) if not is_link(source):
            _check_kept(Path(source).expanduser())
        case of.AmendConfig() | of.InviteConfig():
            _check_kept(config.folder)
            if not (key := config.identity or config.folder / "identity.key").is_file():
                raise ConfigError(f"there is no identity {key}; name the founder's with --identity")
            if isinstance(config, of.AmendConfig) and config.run is None:
                raise ConfigError("name what is to change, such as --run.round.total 200")
        case of.SimulateConfig():
            read_settings(config.study, "sweep")
        case of.TokenizeConfig():
            check_text(config.file_glob, "--file-glob")
    if isinstance(config, OwnData):
        check_text(config.text)
        # An address, a source's name before its path, and the prefix of Megatron's files are for the command to read.
        plain = (path for path in config.data if not set(":=") & set(str(path)))
        check_text([path for path in plain if not Path(f"{path.expanduser()}.idx").is_file()], "--data")
    if ":" in (page := getattr(config, "page", "")) and is_first:
        from spes_p2p.monitor.page.server import check_place  # half a second

        check_place(page)
    if isinstance(config, VolunteerConfig) and is_first:
        if config.port and not config.client_mode:
            check_port(LOOPBACK if config.host in (None, EVERY_INTERFACE) else config.host, config.port)
        _say_start(config)


def _say_start(config: VolunteerConfig) -> None:
    """Say what begins; the libraries take up to half a minute to load."""
    match config:
        case of.JoinConfig():
            what = f"joining run {JoinLink.parse(config.link).run_id}"
        case PeerConfig(founds=True):
            what = f"founding run {config.run_name} (to join a run: spes join LINK)"
        case _:
            what = "starting the peer"
    sys.stderr.write(f"{what}; it takes up to half a minute to load\n")


def check_text(paths: Sequence[Path], flag: str = "--text") -> None:
    """Raise ConfigError for a path or pattern that names nothing."""
    for path in paths:
        if not matches(path.expanduser()):
            raise unmatched(path, flag)


def check_checkpoint(folder: Path, remedy: str = "name a folder written by save_pretrained") -> None:
    """Raise DataError for a folder without a checkpoint's configuration."""
    if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
        return
    if (folder / "versions").is_dir():
        remedy = f"spes export {shlex.quote(str(folder))} makes one of a peer's folder"
    raise DataError(f"{folder} is no checkpoint (no config.json); {remedy}")


def check_experiment(output: Path) -> None:
    """Raise ConfigError for a folder without an experiment to resume."""
    if not (output / RUN_FILE).is_file():
        raise ConfigError(f"--output {output} holds no experiment to resume; drop --resume")


def check_dataset(name: str) -> None:
    """Raise ConfigError for a name that no data set of the hub has."""
    try:
        DataConfig(source="hub", name=name)
    except ValidationError as error:
        raise ConfigError(f"--dataset: {explain(error)}") from error


def check_export(config: of.ExportConfig) -> None:
    """Raise ConfigError for flags that contradict each other, and DataError for a folder with nothing to export."""
    source, run_id = config.source, config.run_id
    if (source is None) == (run_id is None) or bool(config.initial_peers) != (run_id is not None):
        raise ConfigError(
            "name what to export: the folder of a peer or a monitor, where a monitor uploads to, or a running swarm by "
            "its link, or by --run-id and --initial-peers"
        )
    if config.start_from is not None and not config.merged:
        raise ConfigError(
            f"--from {config.start_from} is the base to merge adapters into; add --merged, or drop --from"
        )
    if source is not None and is_link(source):
        JoinLink.parse(source)
    elif source is not None and not is_store(source):
        _check_kept(Path(source).expanduser())


def check_source(source: str) -> None:
    """Raise ConfigError or DataError for a place that has no model."""
    if is_link(source):
        JoinLink.parse(source)
    elif not is_store(source) and not is_kept(folder := Path(source).expanduser()):
        check_checkpoint(folder, "name the folder of a model or of a peer, or a run's link")


def is_link(source: str) -> bool:
    """Check whether a source is a link, which is longer than a file's name may be."""
    return "spes:" in source.lower()


def is_store(source: str) -> bool:
    """Check whether a monitor uploads to a place: it is a bucket, or a folder with checkpoints that are whole."""
    return source.startswith("s3://") or any(Path(source).expanduser().glob("round-*/SHA256SUMS"))


def is_kept(folder: Path) -> bool:
    """Check whether a folder is the output of a peer or a monitor."""
    return (folder / "versions").is_dir() or (folder / "checkpoint").is_dir()


def _check_kept(folder: Path) -> None:
    if not is_kept(folder):
        raise DataError(f"{folder} is no folder of a peer or a monitor; name what their --output names")
