"""One small family of errors: what went wrong, and what to do about it, in one line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any


class SpesError(Exception):
    """Base of every error that a user or a remote peer can cause.

    The message is one line that names the value and the remedy; entry scripts print it and exit with `exit_code`.
    """

    exit_code = 2


TRY_AGAIN = 75
"""Exit code after which the same command may succeed later, so that a supervisor should repeat it: EX_TEMPFAIL of
sysexits.h."""


class ConfigError(SpesError):
    """A flag, environment variable, file or path is wrong; nothing was started or written."""


class DataError(SpesError):
    """A corpus, tokenizer or checkpoint cannot be read or is too small."""


class OutageError(DataError):
    """A hub or a server of data does not answer."""

    exit_code = TRY_AGAIN


class JoinError(SpesError):
    """The swarm cannot be reached, does not know the run, or runs something else."""


class AbsentError(JoinError):
    """What this peer needs no peer has sent."""

    exit_code = TRY_AGAIN


class RecordError(SpesError):
    """A record or message of another peer is malformed, unsigned, too large or expired."""


class ExchangeError(SpesError):
    """A version could not be fetched whole, or its bytes do not match its digest."""


class SimulationError(SpesError):
    """A simulation cannot go on: its peers wait for what will never happen."""


def one_line(error: BaseException) -> str:
    """Return an error of a library as part of a message: in one line, 300 characters at most."""
    return " ".join(str(error).split())[:300]


_REMEDY = re.compile(r"((?<=set )|(?<![\w./-])(?!data\.\w+=))data\.[a-z_]+(?![\w/]|\.\w)")


def in_flags(message: str, flags: Iterable[tuple[Any, ...]]) -> str:
    """Return an error with a command's flags, as `cli.all_flags` yields them, for the settings that it advises to set.

    Messages name a run's settings, such as `data.text_field`; a flag is `--run.data.text-field`, or `--text-field`.
    """
    known = {name for names, *_ in flags for name in names}

    def flag_of(found: re.Match[str]) -> str:
        setting = found[0].replace("_", "-")
        return next((flag for flag in (f"--run.{setting}", f"--{setting[5:]}") if flag in known), found[0])

    return _REMEDY.sub(flag_of, message)
