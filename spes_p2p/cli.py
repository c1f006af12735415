"""Shared by all commands: settings, help, logging, and one line with exit code 2 for what a user can fix."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import difflib
import errno
import importlib
import itertools
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from spes_p2p.config import NO_FLAG, WORD, CommandConfig
from spes_p2p.errors import ConfigError, SpesError, in_flags, one_line
from spes_p2p.presentation import printable, say, takes_escapes

Settings = TypeVar("Settings", bound=CommandConfig)

PREFIX = "SPES_"
OTHER_VARIABLES = re.compile("SPES_(TEST_.*|VENV|LANE_LOG|REWRITE_GOLDENS)")
"""Those of the repository's scripts and tests."""
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
LOG_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
MAX_TRACEBACK_CHARS = 20_000
MAX_SHOWN_CHARS = 200
"""Of a value in an error."""


class Flag(NamedTuple):
    """A setting as a flag.

    Attributes:
        names: The flag after its short form; of a word without a flag, its name alone.
        value: Placeholder of its value, which ends with MANY for a list; empty for a switch.
        text: What it means.
        default: Its default, if it is worth showing.
        section: The settings it belongs to, such as `run.round`; empty for the command's own.
        setting: Its dotted name, such as `run.round.total`.
    """

    names: tuple[str, ...]
    value: str
    text: str
    default: str
    section: str
    setting: str

    @property
    def is_word(self) -> bool:
        """Whether its place alone gives it."""
        return not self.names[0].startswith("-")

    def variables(self) -> list[str]:
        """Return the environment variables that set it."""
        return [PREFIX + re.sub(r"\W", "_", name.lstrip("-")).upper() for name in self.names]

    def parsed(self, words: Any) -> Any:
        """Return its value; each word of a list is one, or a JSON list, or, except paths, several with commas."""
        if not self.value.endswith(MANY):
            return words
        return [value for word in ([words] if isinstance(words, str) else words) for value in self._values(word)]

    def _values(self, word: str) -> list[Any]:
        is_path = self.value == PLACEHOLDERS[Path] + MANY
        with contextlib.suppress(ValueError, RecursionError):
            values = json.loads(word)
            if isinstance(values, list) and not (is_path and any(not isinstance(each, str) for each in values)):
                return values
        return [word] if is_path else [each.strip() for each in word.split(",")]


def all_flags(cls: type[BaseModel], section: str = "") -> Iterator[Flag]:
    """Yield a command's flags, those of nested settings included."""
    short: Mapping[str, str] = getattr(cls, "short_names", {})
    # Required ones first, then the command's own, then those of each class that it shares with others.
    classes = [vars(each).get("__annotations__", ()) for each in cls.__mro__]
    owner = {name: next(at for at, names in enumerate(classes) if name in names) for name in cls.model_fields}
    for name, field in sorted(cls.model_fields.items(), key=lambda f: (not f[1].is_required(), owner[f[0]])):
        setting = f"{section}.{name}".lstrip(".")
        if NO_FLAG in field.metadata:
            continue
        if (nested := _nested(field.annotation)) is not None:
            yield from all_flags(nested, setting)
            continue
        flags = [f"--{section}.{each}".replace("--.", "--") for each in (short.get(name), name) if each]
        names = [name.upper()] if WORD in field.metadata else [flag.replace("_", "-") for flag in flags]
        text = " ".join((field.description or "").split())
        yield Flag(tuple(names), _placeholder(field.annotation), text, _default(field), section, setting)


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
    words: list[str] = []
    for kind in _kinds(annotation):
        if get_origin(kind) is Literal:
            words += map(str, get_args(kind))
        elif get_origin(kind) in (list, tuple):
            words.append(_placeholder(get_args(kind)[0]) + MANY)
        elif kind is not bool:
            words.append(PLACEHOLDERS.get(kind, "VALUE"))
    return "|".join(words)


def _default(field: FieldInfo) -> str:
    value = "required" if field.is_required() else field.default
    if isinstance(value, Path) and value.is_absolute():  # a file that comes with the program
        value = value.stem
    return "" if value in (None, False, [], (), "") else str(value)


# ---------------------------------------------------------------------- settings


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")


def load_settings(cls: type[Settings], argv: Sequence[str]) -> Settings:
    """Return settings from flags over environment over the file named by `--config` over defaults.

    Raises:
        ConfigError: an unknown flag, variable or key, or a value that does not fit; one line with the remedy.
    """
    flags = {flag.setting: flag for flag in all_flags(cls)}
    given = _in_environment(flags.values()) | _in_words(cls, flags.values(), argv)
    given = {setting: flags[setting].parsed(words) for setting, words in given.items()}
    settings = cls.read_file(given)
    for setting, value in given.items():
        _put(settings, setting, value)
    try:
        return cls.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(explain(error, cls=cls)) from error


def _put(settings: dict[str, Any], setting: str, value: Any) -> None:
    name, _, inner = setting.partition(".")
    if not inner:
        settings[name] = value
    elif isinstance(section := settings.get(name) or {}, dict):  # otherwise the file is wrong, and refused
        settings[name] = dict(section)
        _put(settings[name], inner, value)


def _in_words(cls: type[CommandConfig], flags: Collection[Flag], argv: Sequence[str]) -> dict[str, Any]:
    """Return what the command line has, by settings."""
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for flag in flags:
        is_list = flag.value.endswith(MANY)
        if flag.is_word:
            parser.add_argument(flag.setting, nargs="*" if is_list else "?")
        elif not flag.value:
            parser.add_argument(*flag.names, dest=flag.setting, action=argparse.BooleanOptionalAction)
        elif is_list:
            parser.add_argument(*flag.names, dest=flag.setting, action="extend", nargs="+")
        else:
            parser.add_argument(*flag.names, dest=flag.setting)
    found, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        word = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
        hint = _of_spes(word.lstrip("-")) or _like(word, [name for flag in flags for name in flag.names])
        if word.startswith("--run.") and "run" not in cls.model_fields:
            hint = "the run's founder has chosen its settings; "
        raise ConfigError(f"unknown {'flag' if word.startswith('-') else 'word'} {word}; {hint}see --help")
    return vars(found)


def _in_environment(flags: Collection[Flag]) -> dict[str, str]:
    """Return what the environment has, by settings; a variable may be another command's, but not a mistyped one."""
    known = {variable: flag.setting for flag in flags for variable in flag.variables()}
    others = {name for name in os.environ if name.startswith(PREFIX) and not OTHER_VARIABLES.fullmatch(name)} - {*known}
    if others:
        from spes_p2p.config import commands

        for cls in vars(commands).values():
            if isinstance(cls, type) and issubclass(cls, CommandConfig):
                known = {variable: "" for flag in all_flags(cls) for variable in flag.variables()} | known
        if unknown := others - {*known}:
            name = min(unknown)
            raise ConfigError(f"unknown environment variable {name}; {_like(name, known)}unset it or see --help")
    return {known[name]: value for name, value in os.environ.items() if known.get(name)}


def _of_spes(key: str) -> str:
    """Return where to look if a name that is no setting here is one of SPES's."""
    known = Path(__file__).with_name("config") / "spes_settings.yaml"
    is_of_spes = f"{{key: {key.removeprefix('run.')}," in known.read_text(encoding="utf-8")
    return "SPES's settings are beside ours in benchmarks/results/spes_settings.md; " if is_of_spes else ""


def _like(word: str, known: Iterable[str]) -> str:
    close = [name for name in known if name.endswith(f".{word}")] or difflib.get_close_matches(word, known, 1)
    return f"did you mean {close[0]}? " if close else ""


def explain(error: ValidationError, see: str = "--help", cls: type[BaseModel] | None = None) -> str:
    """Return one thing that is wrong with settings, in one line with the remedy.

    Of a setting of several kinds, pydantic says for each kind why the value does not fit. If some of that is about a
    part of the value, that part is wrong; otherwise all reasons are one.

    Args:
        error: What pydantic found.
        see: Where the settings are explained; anything but `--help` means that they are no flags.
        cls: The command's settings, if they are a command's.
    """
    problems = [(_setting(problem["loc"]), problem) for problem in error.errors()]
    where, problem = max(problems, key=lambda each: each[0].count("."))
    flags = list(all_flags(cls)) if cls else []
    if problem["type"] == "extra_forbidden":
        known = dict.fromkeys(name for flag in flags for name in (flag.section, flag.setting) if name)
        inner = problem["input"] if isinstance(problem["input"], dict) else {}
        hints = (_of_spes(name) for name in (where, *(f"{where}.{key}" for key in inner)))
        return f"unknown setting {where}; {next(filter(None, hints), _like(where, known))}remove it or see {see}"
    if problem["type"] == "missing":
        shown = next((each.names[0] for each in flags if each.setting == where), f"--{where.replace('_', '-')}")
        return f"{where} is missing; {f'set {shown}' if see == '--help' else f'add it as in {see}'}"
    first, *others = dict.fromkeys(_plain(each) for place, each in problems if place == where)
    message = ", or ".join([first, *(other.removeprefix(SHOULD_BE) for other in others)])
    if problem["type"] == "value_error":
        return message
    shown = repr(problem["input"])
    shown = shown if len(shown) <= MAX_SHOWN_CHARS else f"{shown[:MAX_SHOWN_CHARS]}..."
    if where == "run_id" and problem["type"] == "string_pattern_mismatch":
        message = "A run's name has letters, digits, _ and - alone, and @ before its founder's id"
    return f"{where}={shown}: {message[0].lower()}{message[1:]}; see {see}"


def _plain(problem: ErrorDetails) -> str:
    """Return pydantic's message without the names of its types or ours."""
    if problem["type"] in ("model_type", "model_attributes_type", "dataclass_type"):
        return f"{SHOULD_BE}settings, each with its value"
    return problem["msg"].removeprefix("Value error, ")


def _setting(loc: tuple[int | str, ...]) -> str:
    """Return where a setting is as its user writes it, without the kinds of value that pydantic tried."""
    return ".".join(str(part) for part in loc if not KIND.fullmatch(str(part)))


# ---------------------------------------------------------------------- help


def help_text(cls: type[CommandConfig], word: str = "--help", width: int | None = None, program: str = "") -> str:
    """Return a command's help.

    Args:
        cls: The command's settings.
        word: `--help`: each flag's first clause, and one line for nested settings such as the run's; `--help-all`: the
            flags in full; `--help-run`: the settings of the run, as of any nested settings of that name.
        width: Columns; by default the terminal's.
        program: The command as it is typed; by default the script's name.
    """
    width = width or min(shutil.get_terminal_size((100, 24)).columns, 120)
    flags, topic, in_full = list(all_flags(cls)), word.removeprefix("--help-"), word == HELP_ALL
    groups = dict.fromkeys(flag.section.split(".")[0] for flag in flags if flag.section)
    if topic in groups:
        chosen = itertools.groupby((flag for flag in flags if flag.section.split(".")[0] == topic), lambda f: f.section)
        sections = [[line for flag in each for line in _lines(flag, width, in_full=True)] for _, each in chosen]
        return "\n\n".join("\n".join(lines) for lines in sections)
    own = [flag for flag in flags if not flag.section]
    script = Path(sys.argv[0])
    program = program or (script.parent if script.stem == "__main__" else script).name
    words = "".join(f" {flag.names[0]}" for flag in own if flag.is_word)
    lines = [f"usage: {program}{words} [flags]", *textwrap.wrap(" ".join((cls.__doc__ or "").split()), width), ""]
    lines += [line for flag in own for line in _lines(flag, width, in_full=in_full)]
    for name in groups:
        clause = CLAUSE.split(cls.model_fields[name].description or "")[0].rstrip(".")
        lines += _row(f"--{name}.*", f"{clause}; see --help-{name}", width)
    return "\n".join([*lines, *_row("--help, --help-all", "Show this, or the same with the flags in full", width)])


def _lines(flag: Flag, width: int, *, in_full: bool) -> list[str]:
    name = ", ".join(flag.names)
    start = f"{name} {'' if flag.is_word else flag.value}".rstrip()
    default = f"[{flag.default}]" if flag.default else ""
    if in_full:
        return _row(start, f"{flag.text} {default}".rstrip(), width)
    text = CLAUSE.split(flag.text)[0].rstrip(".")
    return _row(start if len(start) <= HELP_COLUMN - 4 else name, f"{text} {default}".rstrip(), width)


def _row(start: str, text: str, width: int) -> list[str]:
    """Return what to write, then what it means, on the same line if there is room."""
    indent = " " * HELP_COLUMN
    body = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if len(start) > HELP_COLUMN - 4:
        return [f"  {start}", *body]
    return [f"  {start:<{HELP_COLUMN - 2}}{''.join(body[:1]).strip()}", *body[1:]]


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
        return printable(super().getMessage())  # guard: first


class TracebackFormatter(logging.Formatter):
    """Indents each line of a traceback, so that none of an error's lines passes for a log line."""

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei)[:MAX_TRACEBACK_CHARS].split("\n")
        return "\n".join(f"  | {printable(line)}" for line in lines)  # guard: printable(line) -> line


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
    program: str = "",
) -> NoReturn:
    """Run a command and exit: 0 done, 2 (or 75: try again) with one line for a user's error, 130 when interrupted.

    Args:
        settings: The command's settings; a field `log_level` sets up the log.
        main: The command, which returns its exit code; or the name of the module whose `main` it is, which is imported
            once the flags have been read.
        argv: The command line; by default `sys.argv` without the program's name.
        refuse: Raises what can be refused before `main` is imported.
        program: The command as it is typed; by default the script's name.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if asked := next((word for word in words if word == "-h" or HELP_FLAG.fullmatch(word)), None):
            say(help_text(settings, asked, program=program))
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
        # guard: printable(in_flags(str(error), all_flags(settings))) -> in_flags(str(error), all_flags(settings))
        print(f"error: {printable(in_flags(str(error), all_flags(settings)))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if (reason := full_disk(error) or _denied(error) or _out_of_memory(error)) is None:
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
            remedy = "make room there, and start again with --resume (docs/trouble.md#disk)"
            return f"no space left on the disk{where}; {remedy}"
        error = error.__cause__ or error.__context__
    return None


def _denied(error: Exception) -> str | None:
    """Return what to do about a path that this user may not use, in one line; None if that is not the error."""
    if isinstance(error, PermissionError) and error.filename:
        return f"no permission for {printable(error.filename)}; name another path, or change its owner or mode"
    return None


def _out_of_memory(error: Exception) -> str | None:
    """Return what to do about an allocation that failed, in one line; None if that is not the error."""
    if isinstance(error, MemoryError) or re.search("CUDA out of memory|DefaultCPUAllocator: can't", str(error)):
        return f"out of memory: {one_line(error)}; take less, as docs/trouble.md#memory says"
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
