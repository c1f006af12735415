"""What all commands share: reading settings, logging, and one line with exit code 2 for what a user can mend."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_origin

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from spes_p2p.errors import ConfigError, SpesError

Settings = TypeVar("Settings", bound=BaseSettings)

OTHER_PREFIXES = ("SPES_MONITOR_", "SPES_EVALUATE_", "SPES_SIMULATE_", "SPES_TEST_", "SPES_VENV")
"""Variables of other commands, which begin like a peer's."""
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
LOG_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def load_settings(cls: type[Settings], argv: Sequence[str]) -> Settings:
    """Return settings from flags over environment over the YAML named by `--config` over defaults.

    Raises:
        ConfigError: an unknown flag, variable or key, or a value that does not fit; one line with the remedy.
    """
    _check_environment(cls)
    _check_yaml(cls, config := _config_of(cls, argv))
    loaded: type[Settings] = type(cls.__name__, (cls,), {"model_config": {"yaml_file": config}, "__doc__": cls.__doc__})
    try:
        source: CliSettingsSource = CliSettingsSource(
            loaded, cli_parse_args=_repeat_flags(cls, argv), cli_exit_on_error=False
        )
        return loaded(_cli_settings_source=source)  # type: ignore[call-arg]
    except ValidationError as error:
        raise ConfigError(explain(error)) from error
    except SettingsError as error:
        raise ConfigError(f"{str(error).strip().splitlines()[-1]}; see --help") from error


def _repeat_flags(cls: type[BaseSettings], argv: Sequence[str]) -> list[str]:
    """Return `--text a b` as `--text a --text b`, which is how pydantic-settings takes lists."""
    fields = cls.model_fields.items()
    lists = {f"--{name.replace('_', '-')}" for name, field in fields if get_origin(field.annotation) is list}
    words: list[str] = []
    flag, is_first = "", True
    for word in argv:
        if word.startswith("--"):
            flag, is_first = word, True
        elif flag in lists:
            words += [] if is_first else [flag]
            is_first = False
        words.append(word)
    return words


def _config_of(cls: type[BaseSettings], argv: Sequence[str]) -> Path | None:
    for position, word in enumerate(argv):
        if word.startswith("--config="):
            return Path(word.removeprefix("--config="))
        if word == "--config" and position + 1 < len(argv):
            return Path(argv[position + 1])
    if "SPES_CONFIG" in os.environ:
        return Path(os.environ["SPES_CONFIG"])
    field = cls.model_fields.get("config")
    return field.default if field is not None else None


def _check_yaml(cls: type[BaseSettings], path: Path | None) -> None:
    if path is None:
        return
    for key in read_yaml(path, "--config"):
        if key not in cls.model_fields:
            raise ConfigError(f"unknown key {key!r} in {path}; known keys: {', '.join(cls.model_fields)}")


def read_yaml(path: Path, name: str) -> dict[Any, Any]:
    """Return the settings in a YAML file.

    Args:
        path: The file.
        name: What the user calls it, for messages.

    Raises:
        ConfigError: it cannot be read, is no YAML, or holds something else than settings.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"cannot read {name} {path}: {error.strerror}; name an existing YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name} {path} holds {type(content).__name__}, not settings; see configs/ for examples")
    return content


def _check_environment(cls: type[BaseSettings]) -> None:
    """pydantic-settings ignores a mistyped top-level variable in silence; we do not."""
    prefix = cls.model_config.get("env_prefix", "")
    known = {f"{prefix}{name}".upper() for name in cls.model_fields}
    for name in os.environ:
        if name.startswith(OTHER_PREFIXES) and not prefix.startswith(OTHER_PREFIXES):
            continue
        if prefix and name.startswith(prefix) and name.split("__")[0].upper() not in known:
            raise ConfigError(f"unknown environment variable {name}; unset it or see --help")


def explain(error: ValidationError, see: str = "--help") -> str:
    """Return the first thing that is wrong with settings, in one line with the remedy.

    Args:
        error: What pydantic found.
        see: Where the settings are explained; anything but `--help` means that they are no flags.
    """
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {where}={problem['input']!r}; remove it or see {see}"
    if problem["type"] == "missing":
        remedy = f"set --{where.replace('_', '-')}" if see == "--help" else f"add it as in {see}"
        return f"{where} is missing; {remedy}"
    if problem["type"] == "value_error":
        return message
    return f"{where}={problem['input']!r}: {message[0].lower()}{message[1:]}; see {see}"


def set_up_logging(level: str) -> None:
    """Log to standard error, libraries only when they warn."""
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT, force=True)
    for ours in ("spes_p2p", "monitor"):
        logging.getLogger(ours).setLevel(level.upper())
    # Hivemind logs every lost peer with a traceback; ours says the same in a line, and what it did about it.
    hivemind = logging.getLogger("hivemind")
    hivemind.handlers, hivemind.propagate = [], True
    hivemind.setLevel(logging.DEBUG if level == "debug" else logging.CRITICAL)


def entry_point(
    settings: type[Settings], main: Callable[[Settings], int], argv: Sequence[str] | None = None
) -> NoReturn:
    """Run a command and exit: 0 done, 2 with one line for a user's error, 130 when interrupted.

    Args:
        settings: The command's settings; a field `log_level` sets up the log.
        main: The command; returns its exit code.
        argv: The command line; by default `sys.argv` without the program's name.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        config = load_settings(settings, sys.argv[1:] if argv is None else argv)
        set_up_logging(getattr(config, "log_level", "info"))
        sys.exit(main(config))
    except SpesError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
