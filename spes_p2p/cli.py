"""What all commands share: reading settings, logging, and one line with exit code 2 for what a user can mend."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_origin

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from spes_p2p.errors import ConfigError, SpesError

Settings = TypeVar("Settings", bound=BaseSettings)

OTHER_PREFIXES = (
    *("SPES_MONITOR_", "SPES_EVALUATE_", "SPES_SIMULATE_", "SPES_PLAN_", "SPES_UPCYCLE_"),
    *("SPES_INVITER_", "SPES_HEALTH_", "SPES_TEST_", "SPES_VENV"),
)
"""Variables of other commands, which begin like a peer's."""
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
AGAIN_SECONDS = 0.1
"""After which an interrupt that Python has ignored is repeated; by then it is elsewhere, or ignores it once more."""
KIND = re.compile(r"constrained-\w+|int|float|str|bool|bytes|none|path|\w[\w-]*\[.*\]|\[key\]")
"""Pydantic's names of kinds of values, in the location of an error of a setting that takes several kinds."""
SHOULD_BE = "Input should be "
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


class _KeyTwice(yaml.YAMLError):
    """A mapping sets one key twice; YAML itself would let the last one win in silence."""


class _UniqueKeys(yaml.SafeLoader):
    """Reads as `yaml.safe_load` does, but refuses a key that is set twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line, known = key.start_mark.line + 1, lines.get((key.tag, key.value))
            if known is not None:
                where = f"on line {known} and again on line {line}" if known != line else f"twice on line {line}"
                raise _KeyTwice(f"sets {key.value!r} {where}; keep one")
            lines[key.tag, key.value] = line
        return node


def read_yaml(path: Path, name: str) -> dict[Any, Any]:
    """Return the settings in a YAML file.

    Args:
        path: The file.
        name: What the user calls it, for messages.

    Raises:
        ConfigError: it cannot be read, is no YAML, sets a key twice, or holds something else than settings.
    """
    try:
        content = _UniqueKeys(path.read_text(encoding="utf-8")).get_single_data() or {}
    except _KeyTwice as error:
        raise ConfigError(f"{name} {path} {error}") from error
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
    problem, message = _first_problem(error)
    where = ".".join(_setting(problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {where}={problem['input']!r}; remove it or see {see}"
    if problem["type"] == "missing":
        remedy = f"set --{where.replace('_', '-')}" if see == "--help" else f"add it as in {see}"
        return f"{where} is missing; {remedy}"
    if problem["type"] == "value_error":
        return message
    return f"{where}={problem['input']!r}: {message[0].lower()}{message[1:]}; see {see}"


def _first_problem(error: ValidationError) -> tuple[ErrorDetails, str]:
    """Return what is wrong first, and how to say it; of a setting of several kinds, what fits none of them.

    Pydantic tells for every kind apart why the value is not of it. If some of that is about a part of the value, it is
    of the kind that has such parts, and that part is wrong; otherwise all reasons are one.
    """
    first, *others = error.errors()
    kind_at = next((i for i, part in enumerate(first["loc"]) if _is_kind(part)), None)
    if kind_at is None:
        return first, _plain(first)
    branches = [first, *(other for other in others if other["loc"][:kind_at] == first["loc"][:kind_at])]
    depth = max(len(_setting(branch["loc"])) for branch in branches)
    deepest = [branch for branch in branches if len(_setting(branch["loc"])) == depth]
    said = dict.fromkeys(map(_plain, deepest))
    return deepest[0], ", or ".join(text if not i else text.removeprefix(SHOULD_BE) for i, text in enumerate(said))


def _plain(problem: ErrorDetails) -> str:
    """Return pydantic's message without the names of its types or ours."""
    if problem["type"] in ("model_type", "model_attributes_type", "dataclass_type"):
        return f"{SHOULD_BE}settings, each with its value"
    return problem["msg"].removeprefix("Value error, ")


def _setting(loc: tuple[int | str, ...]) -> list[str]:
    """Return where a setting is as its user writes it."""
    return [str(part) for part in loc if not _is_kind(part)]


def _is_kind(part: int | str) -> bool:
    """Tell whether a part of a location is not the user's but pydantic's: the kind of value it tried, or a mark."""
    return isinstance(part, str) and KIND.fullmatch(part) is not None


def set_up_logging(level: str) -> None:
    """Log to standard error, libraries only when they warn."""
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT, force=True)
    for ours in ("spes_p2p",):
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
    # A shell starts what runs in its background with Ctrl-C ignored; a peer whose p2pd has died interrupts itself so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)
    sys.unraisablehook = _interrupt_again
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


def _interrupt_again(ignored: sys.UnraisableHookArgs) -> None:
    """Repeat an interrupt that came where Python ignores what is raised: during a fork, or in a finalizer."""
    main = threading.main_thread().ident
    if issubclass(ignored.exc_type, KeyboardInterrupt) and main is not None and not sys.is_finalizing():
        threading.Timer(AGAIN_SECONDS, signal.pthread_kill, (main, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(ignored)
