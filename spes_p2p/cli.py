"""Shared by all commands: settings, help, logging, and one line with exit code 2 for what a user can fix."""

from __future__ import annotations

import argparse
import atexit
import difflib
import errno
import importlib
import json
import logging
import math
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from spes_p2p.config_file import read_settings
from spes_p2p.errors import ConfigError, SpesError, in_flags
from spes_p2p.presentation import printable, say, takes_escapes

Settings = TypeVar("Settings", bound=BaseSettings)

OTHER_PREFIXES = (
    *("SPES_MONITOR_", "SPES_EVALUATE_", "SPES_SIMULATE_", "SPES_PLAN_", "SPES_UPCYCLE_", "SPES_TOKENIZE_"),
    *("SPES_INVITER_", "SPES_HEALTH_", "SPES_CTL_", "SPES_SERVICE_", "SPES_EXPORT_", "SPES_AMEND_"),
    *("SPES_TEST_", "SPES_VENV"),
)
"""Variables of other commands, which begin like a peer's."""
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 120
"""The interpreter's own, for output that could not be written."""
AGAIN_SECONDS = 0.1
"""After which an interrupt that Python has ignored is repeated; by then it is elsewhere, or ignores it once more."""
KIND = re.compile(r"constrained-\w+|int|float|str|bool|bytes|none|path|\w[\w-]*\[.*\]|\[key\]")
"""Pydantic's names of kinds of values, in the location of an error of a setting that takes several kinds."""
SHOULD_BE = "Input should be "
REPEAT_SECONDS = 60.0
MAX_REMEMBERED = 1000
"""Warnings remembered before expired ones are dropped."""
HELP_ALL = "--help-all"
HELP_FLAG = re.compile(r"--help(-[a-z-]+)?")
HELP_COLUMN = 26
CLAUSE = re.compile(r"[.;:] ")
"""Ends the part of a setting's text that `--help` shows."""
PLACEHOLDERS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
MANY = " ..."
"""Ends the placeholder of a flag that takes several values."""
LOG_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
MAX_TRACEBACK_CHARS = 20_000
MAX_SHOWN_CHARS = 200
"""Of a value in an error."""


def load_settings(cls: type[Settings], argv: Sequence[str]) -> Settings:
    """Return settings from flags over environment over the file named by `--config` over defaults.

    Raises:
        ConfigError: an unknown flag, variable or key, or a value that does not fit; one line with the remedy.
    """
    _check_environment(cls)
    _check_file(cls, config := _config_of(cls, argv))
    loaded: type[Settings] = type(cls.__name__, (cls,), {"model_config": {"yaml_file": config}, "__doc__": cls.__doc__})
    try:
        source: CliSettingsSource = CliSettingsSource(
            loaded, cli_parse_args=_repeat_flags(cls, argv), cli_exit_on_error=False
        )
        return loaded(_cli_settings_source=source)  # type: ignore[call-arg]
    except ValidationError as error:
        raise ConfigError(explain(error, cls=cls)) from error
    except SettingsError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ConfigError(f"{reason}; {_did_you_mean(cls, argv)}see --help") from error


def _did_you_mean(cls: type[BaseModel], argv: Sequence[str]) -> str:
    """Return a suggestion for the first word that is no flag, if a flag resembles it."""
    known = [name for flag in all_flags(cls) for name in flag.names]
    words = (word.split("=")[0] for word in argv if word.startswith("--"))
    unknown = next((word for word in words if word.replace("--no-", "--") not in known), "")
    if hint := _foreign_hint(cls, unknown.removeprefix("--").replace("-", "_")):
        return f"{hint}; "
    return _like(unknown, known)


def _like(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"did you mean {close[0]}? " if close else ""


def _repeat_flags(cls: type[BaseSettings], argv: Sequence[str]) -> list[str]:
    """Return `--text a b` as `--text a --text b`, which is how pydantic-settings takes lists.

    It splits a value at commas, which must not split a path.
    """
    kinds = {name: flag.value for flag in all_flags(cls) for name in flag.names if flag.value.endswith(MANY)}
    paths = {flag for flag, kind in kinds.items() if kind == PLACEHOLDERS[Path] + MANY}
    words: list[str] = []
    flag, is_first = "", True
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flag, is_first = name, not equals
            word = f"{name}={_unsplit(value)}" if equals and name in paths else word
        elif flag in kinds:
            words += [] if is_first else [flag]
            is_first = False
            word = _unsplit(word) if flag in paths else word
        words.append(word)
    return words


def _unsplit(path: str) -> str:
    """Return a path that would be split, or read as JSON, in quotes; a JSON list of paths as it is."""
    try:
        is_list = all(isinstance(each, str) for each in json.loads(path))
    except (ValueError, TypeError, RecursionError):
        is_list = not set(path) & set(',[{"')  # it needs no quotes
    return path if is_list else json.dumps(path, ensure_ascii=False)


def _config_of(cls: type[BaseSettings], argv: Sequence[str]) -> Path | None:
    """Return the file to read, as the setting `config` would find it."""
    if (field := cls.model_fields.get("config")) is None:
        return None
    path = os.environ.get(f"{cls.model_config.get('env_prefix') or ''}CONFIG", field.default)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?", type=Path, default=path and Path(path))
    path = parser.parse_known_args(argv)[0].config
    find = getattr(cls, "find_config", None)
    return find(path) if find is not None and path is not None else path


def _check_file(cls: type[BaseSettings], path: Path | None) -> None:
    if path is None:
        return
    if path.exists() and not path.is_file():  # a pipe can be read once, and is read twice
        raise ConfigError(f"--config {path} is no file; write the settings into one")
    known = getattr(cls, "file_keys", None) or cls.model_fields
    for key, value in read_settings(path, "--config").items():
        if key not in known:
            if hint := _foreign_hint(cls, str(key), value):
                raise ConfigError(f"unknown key {key!r} in {path}: {hint}")
            nested = {name: _nested(field.annotation) for name, field in cls.model_fields.items()}
            if within := [name for name, model in nested.items() if model and str(key) in model.model_fields]:
                raise ConfigError(f"unknown key {key!r} in {path}; write it below `{within[0]}:`, as {within[0]}.{key}")
            raise ConfigError(f"unknown key {key!r} in {path}; {_like(str(key), known)}known keys: {', '.join(known)}")


def _check_environment(cls: type[BaseSettings]) -> None:
    """pydantic-settings ignores a mistyped top-level variable in silence; we do not."""
    prefix = cls.model_config.get("env_prefix", "")
    known = {f"{prefix}{name}".upper() for name in cls.model_fields}
    for name in os.environ:
        if name.startswith(OTHER_PREFIXES) and not prefix.startswith(OTHER_PREFIXES):
            continue
        if prefix and name.startswith(prefix) and name.split("__")[0].upper() not in known:
            raise ConfigError(f"unknown environment variable {name}; unset it or see --help")


def _foreign_hint(cls: type[BaseModel] | None, key: str, value: object = None) -> str:
    """Return what a key of another program's settings is called here, if the command knows; see `CommandConfig`."""
    foreign_hint: Callable[[str, object], str] = getattr(cls, "foreign_hint", lambda *_: "")
    return foreign_hint(key, value)


def explain(error: ValidationError, see: str = "--help", cls: type[BaseModel] | None = None) -> str:
    """Return the first thing that is wrong with settings, in one line with the remedy.

    Args:
        error: What pydantic found.
        see: Where the settings are explained; anything but `--help` means that they are no flags.
        cls: The command's settings, if they are a command's.
    """
    problem, message = _first_problem(error)
    where = ".".join(_setting(problem["loc"]))
    if problem["type"] == "extra_forbidden":
        if hint := _foreign_hint(cls, where, problem["input"]):
            return f"unknown setting {where}: {hint}"
        flags = list(all_flags(cls)) if cls else []
        names = [f"{flag.section}.{flag.names[-1].rpartition('.')[2].lstrip('-')}".replace("-", "_") for flag in flags]
        hint = _like(where, {*names, *(flag.section for flag in flags)})
        return f"unknown setting {where}={problem['input']!r}; {hint}remove it or see {see}"
    if problem["type"] == "missing":
        flag = f"--{where.replace('_', '-')}"
        shown = next((each.names[0] for each in all_flags(cls) if flag in each.names), flag) if cls else flag
        return f"{where} is missing; {f'set {shown}' if see == '--help' else f'add it as in {see}'}"
    if problem["type"] == "value_error":
        return message
    shown = repr(problem["input"])
    shown = shown if len(shown) <= MAX_SHOWN_CHARS else f"{shown[:MAX_SHOWN_CHARS]}..."
    if where == "run_id" and problem["type"] == "string_pattern_mismatch":
        message = "A run's name has letters, digits, _ and - alone, and @ before its founder's id"
    return f"{where}={shown}: {message[0].lower()}{message[1:]}; see {see}"


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
    if problem["type"] == "greater_than_equal" and 0 < problem["ctx"]["ge"] < 1e-9:  # so that it has a reciprocal
        return f"{SHOULD_BE}greater than 0"
    return problem["msg"].removeprefix("Value error, ")


def _setting(loc: tuple[int | str, ...]) -> list[str]:
    """Return where a setting is as its user writes it."""
    return [str(part) for part in loc if not _is_kind(part)]


def _is_kind(part: int | str) -> bool:
    """Tell whether a part of a location is not the user's but pydantic's: the kind of value it tried, or a mark."""
    return isinstance(part, str) and KIND.fullmatch(part) is not None


# ---------------------------------------------------------------------- help


class Flag(NamedTuple):
    """A setting as a flag.

    Attributes:
        names: The flag and its short forms; of a positional argument, its name alone.
        value: Placeholder of its value; empty for a switch.
        text: What it means.
        default: Its default, if it is worth showing.
        section: The settings it belongs to, such as `run.round`; empty for the command's own.
    """

    names: tuple[str, ...]
    value: str
    text: str
    default: str
    section: str


def all_flags(cls: type[BaseModel], section: str = "") -> Iterator[Flag]:
    """Yield a command's flags, those of nested settings included."""
    shortcuts: Any = dict(cls.model_config).get("cli_shortcuts") or {}
    # Required ones first, then the command's own, then those that it shares with others.
    fields = sorted(cls.model_fields.items(), key=lambda f: (not f[1].is_required(), f[0] not in cls.__annotations__))
    for name, field in fields:
        word = (field.alias or name).replace("_", "-")
        if argparse.SUPPRESS in field.metadata:  # pydantic-settings' CliSuppress: set by the program alone
            continue
        if (nested := _nested(field.annotation)) is not None:
            yield from all_flags(nested, f"{section}.{name}".strip("."))
            continue
        is_positional = any(getattr(mark, "__name__", "") == "_CliPositionalArg" for mark in field.metadata)
        shown = shortcuts.get(name, shortcuts.get(word, ()))
        others = (shown,) if isinstance(shown, str) else tuple(shown)
        prefix = f"--{section}." if section else "--"
        names = (word.upper(),) if is_positional else tuple(f"{prefix}{each}" for each in (*others, word))
        value = "" if is_positional else _placeholder(field.annotation)
        yield Flag(names, value, " ".join((field.description or "").split()), _default(field), section)


def _nested(annotation: Any) -> type[BaseModel] | None:
    return next((kind for kind in _kinds(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _kinds(annotation: Any) -> list[Any]:
    """Return the alternatives of an annotation, without None and without constraints."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _kinds(part) if kind is not NoneType]
    return [annotation]


def _placeholder(annotation: Any) -> str:
    """Return what stands for a flag's value in the help."""
    words: list[str] = []
    for kind in _kinds(annotation):
        if get_origin(kind) is Literal:
            words += map(str, get_args(kind))
        elif get_origin(kind) is list:
            words.append(_placeholder(get_args(kind)[0]) + MANY)
        elif kind is not bool:
            words.append(PLACEHOLDERS.get(kind, "VALUE"))
    return "|".join(words)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, Path) and value.is_absolute():  # a file that comes with the program
        value = value.stem
    return "" if value in (None, False, [], "") else str(value)


def help_text(cls: type[BaseSettings], word: str = "--help", width: int | None = None) -> str:
    """Return a command's help.

    Args:
        cls: The command's settings.
        word: `--help`: each flag's first clause, and one line for nested settings such as the run's; `--help-all`: the
            flags in full; `--help-run`: the settings of the run, as of any nested settings of that name.
        width: Columns; by default the terminal's.
    """
    width = width or min(shutil.get_terminal_size((100, 24)).columns, 120)
    flags, topic = list(all_flags(cls)), word.removeprefix("--help-")
    groups = list(dict.fromkeys(flag.section.split(".")[0] for flag in flags if flag.section))
    lines: list[str] = []
    if topic in groups:
        section = ""
        for flag in flags:
            if flag.section.split(".")[0] == topic:
                lines += [""] if lines and flag.section != section else []
                lines += _flag_lines(flag, width, in_full=True)
                section = flag.section
        return "\n".join(lines)
    own = [flag for flag in flags if not flag.section]
    positional = [f" {flag.names[0]}" for flag in own if not flag.names[0].startswith("-")]
    lines += [f"usage: {cls.model_config.get('cli_prog_name') or Path(sys.argv[0]).name}{''.join(positional)} [flags]"]
    lines += textwrap.wrap(" ".join((cls.__doc__ or "").split()), width)
    lines += ["", *(line for flag in own for line in _flag_lines(flag, width, in_full=word == HELP_ALL))]
    for name in groups:
        clause = CLAUSE.split(cls.model_fields[name].description or "")[0].rstrip(".")
        nested = Flag((f"--{name}.*",), "", f"{clause}; listed by --help-{name}", "", "")
        lines += _flag_lines(nested, width, in_full=True)
    about_help = Flag(("--help", "--help-all"), "", "Show this, or the same with the flags in full", "", "")
    lines += _flag_lines(about_help, width)
    return "\n".join(lines)


def _flag_lines(flag: Flag, width: int, *, in_full: bool = False) -> list[str]:
    """Return a flag's lines: what to write, then what it means, on the same line if there is room."""
    start = "  " + " ".join(filter(None, (", ".join(flag.names), flag.value)))
    text = flag.text if in_full else CLAUSE.split(flag.text)[0].rstrip(".")
    if flag.default and (in_full or flag.default != "required"):
        text += f" [{flag.default}]"
    elif flag.default:
        text += " (required)"
    if not in_full and len(start) > HELP_COLUMN - 2:
        start = "  " + ", ".join(flag.names)
    indent = " " * HELP_COLUMN
    body = textwrap.wrap(text, width - HELP_COLUMN, break_on_hyphens=False) or [""]
    if len(start) > HELP_COLUMN - 2:
        return [start, *(indent + line for line in body)]
    return [f"{start:<{HELP_COLUMN}}{body[0]}", *(indent + line for line in body[1:])]


# ---------------------------------------------------------------------- log and exit codes


class OncePerMinute(logging.Filter):
    """Passes a warning on, and the same words again only after a minute, with the number of times in between.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._said: dict[tuple[str, str], tuple[float, int]] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        with self._lock:
            return self._passes(record)

    def _passes(self, record: logging.LogRecord) -> bool:
        now, words = self._clock(), record.getMessage()  # with `extra={"heals": True}` values may differ
        key = record.name, record.msg if hasattr(record, "heals") else words
        said, num_held_back = self._said.get(key, (-math.inf, 0))
        if now - said < REPEAT_SECONDS:
            self._said[key] = (said, num_held_back + 1)
            return False
        if num_held_back:
            record.msg = f"{words} ({num_held_back} more times in the {now - said:.0f} s before)"
            record.args = ()
        if len(self._said) >= MAX_REMEMBERED:
            self._said = {each: state for each, state in self._said.items() if now - state[0] < REPEAT_SECONDS}
        self._said[key] = (now, 0)
        return True


class PrintableRecord(logging.LogRecord):
    """A log record whose message is one printable line, whatever a peer has put into it, in every handler."""

    def getMessage(self) -> str:
        return printable(super().getMessage())  # guard: log-line


class TracebackFormatter(logging.Formatter):
    """Indents each line of a traceback, so that none of an error's lines passes for a log line."""

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei)[:MAX_TRACEBACK_CHARS].split("\n")
        return "\n".join(f"  | {printable(line)}" for line in lines)  # guard: traceback-line


def set_up_logging(level: str) -> None:
    """Log to standard error, of libraries only warnings; repeated warnings once a minute, uncaught errors too."""
    logging.setLogRecordFactory(PrintableRecord)
    logging.basicConfig(level=logging.WARNING, force=True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(TracebackFormatter(LOG_FORMAT))
        handler.addFilter(OncePerMinute())
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda ended: _log_uncaught(ended.exc_type, ended.exc_value, ended.exc_traceback)
    logging.getLogger("spes_p2p").setLevel(level.upper())
    # Hivemind logs every lost peer with a traceback; this program says the same in a line, and what it did about it.
    hivemind = logging.getLogger("hivemind")
    hivemind.handlers = []
    hivemind.propagate = True
    hivemind.setLevel(logging.DEBUG if level == "debug" else logging.CRITICAL)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: Any) -> None:
    """Log an error that nothing has caught; Python itself would print its text as it is."""
    if not issubclass(kind, SystemExit):  # ends a thread in silence
        logging.getLogger(__name__).critical("this is a bug of spes_p2p; please report it", exc_info=error)


def entry_point(
    settings: type[Settings],
    main: Callable[[Settings], int] | str,
    argv: Sequence[str] | None = None,
    refuse: Callable[[Settings], None] = lambda _: None,
) -> NoReturn:
    """Run a command and exit: 0 done, 2 (or 75: try again) with one line for a user's error, 130 when interrupted.

    Args:
        settings: The command's settings; a field `log_level` sets up the log.
        main: The command, which returns its exit code; or the name of the module whose `main` it is, which is imported
            once the flags have been read.
        argv: The command line; by default `sys.argv` without the program's name.
        refuse: Raises what can be refused before `main` is imported.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if asked := next((word for word in words if word == "-h" or HELP_FLAG.fullmatch(word)), None):
            say(help_text(settings, asked))
            sys.exit(0)
        config = load_settings(settings, words)
        refuse(config)
        run = _imported(main) if isinstance(main, str) else main
        # A shell starts background jobs with Ctrl-C ignored; a peer whose p2pd has died interrupts itself with it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, _interrupt)
        sys.unraisablehook = _interrupt_again
        set_up_logging(getattr(config, "log_level", "info"))  # after the imports: hivemind's sets up its own
        sys.exit(run(config))
    except SpesError as error:
        print(f"error: {printable(in_flags(str(error), all_flags(settings)))}", file=sys.stderr)  # guard: error-line
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if (reason := full_disk(error) or _denied(error)) is None:
            raise
        print(f"error: {reason}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


def leave(code: int) -> NoReturn:
    """End this process as `sys.exit` does, but leave its daemon threads to the kernel.

    The interpreter ends a daemon thread when it returns from C++ to Python, by unwinding its stack; torch's frames let
    nothing through, and the process aborts after all its work. Hivemind's thread for futures computes with torch, and
    waits on a pipe without end, so that it cannot be joined.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # joins the other threads, those of executors too
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # whatever read the output has left
        code = code or EXIT_BROKEN_PIPE
    finally:
        os._exit(code)


def full_disk(error: BaseException | None) -> str | None:
    """Return what to do about an error that a full disk has caused, in one line; None if none has."""
    while error is not None:
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full or "No space left on device" in str(error):  # safetensors has errors of its own
            where = f" at {error.filename}" if isinstance(error, OSError) and error.filename else ""
            return f"no space left on the disk{where}; make room there, and start again with --resume"
        error = error.__cause__ or error.__context__
    return None


def _denied(error: Exception) -> str | None:
    """Return what to do about a path that this user may not use, in one line; None if that is not the error."""
    if isinstance(error, PermissionError) and error.filename:
        return f"no permission for {printable(error.filename)}; name another path, or change its owner or mode"
    return None


ERASE_LINE = "\r\033[K"


def _imported(module: str) -> Callable[[Any], int]:
    """Return a module's `main`; an interrupt while it is imported ends the process, which has begun nothing."""
    before = {number: signal.signal(number, end_at_once) for number in (signal.SIGINT, signal.SIGTERM)}
    is_watched = sys.stderr.isatty() and takes_escapes()
    if is_watched:
        sys.stderr.write("loading PyTorch and the rest of the program ...\r")
        sys.stderr.flush()
    try:
        return importlib.import_module(module).main
    finally:
        if is_watched:
            sys.stderr.write(ERASE_LINE)
        for number, handler in before.items():
            signal.signal(number, handler)


def end_at_once(signum: int, frame: object) -> NoReturn:
    """End this process without a word."""
    os._exit(EXIT_INTERRUPTED)


class Terminated(KeyboardInterrupt):
    """SIGTERM: it ends a command as Ctrl-C does, but leaves no time for what only helps a user who is there."""


def _interrupt(signum: int, frame: object) -> None:
    raise Terminated


def _interrupt_again(ignored: sys.UnraisableHookArgs) -> None:
    """Repeat an interrupt that came where Python ignores what is raised: during a fork, or in a finalizer."""
    main = threading.main_thread().ident
    if issubclass(ignored.exc_type, KeyboardInterrupt) and main is not None and not sys.is_finalizing():
        threading.Timer(AGAIN_SECONDS, signal.pthread_kill, (main, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(ignored)
