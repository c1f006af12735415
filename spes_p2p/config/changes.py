"""Which of a run's settings can change once it is under way: those that each peer reads in each round.

Weights, moments, versions on disk and data of the peers depend on all others.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from spes_p2p.config.run import RunConfig
from spes_p2p.errors import ConfigError

CHANGEABLE = (
    *("data.mixture", "data.phases", "revoked_invites", "round.total", "train.decay_fraction", "train.final_lr_ratio"),
    *("train.lr", "train.schedule", "train.schedule_rounds"),
)
OWN = frozenset({"data.paths", "data.skip_unusable", "data.chat_template", "data.probe", "data.tokenizer"})
"""Settings of which a manifest has what the founder's machine made of them."""


def settings_by_name(run: RunConfig, *, is_set: bool = False) -> dict[str, Any]:
    """Return a run's settings as JSON has them, by section and name; with `is_set`, those that a command has set."""
    found: dict[str, Any] = {}
    for section, value in run.model_dump(mode="json", exclude_unset=is_set).items():
        is_section = isinstance(value, Mapping)
        found |= {f"{section}.{name}": each for name, each in value.items()} if is_section else {section: value}
    return found


def changes(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by section and name, each with its old and new value."""
    before, after = settings_by_name(old), settings_by_name(new)
    pairs = {name: (before.get(name), after.get(name)) for name in sorted(before.keys() | after.keys())}
    return {name: (one, other) for name, (one, other) in pairs.items() if one != other}


def check_changes(old: RunConfig, new: RunConfig) -> None:
    """Check that a revision changes only what can change in a run that is under way.

    Raises:
        ConfigError: it changes something else, or nothing.
    """
    found = changes(old, new)
    if not found:
        raise ConfigError("these are the run's settings already; name what is to change, such as --run.round.total")
    remedy = "found a new run from this one's model (spes export, then --from)"
    for name, (before, after) in found.items():
        if name not in CHANGEABLE:  # guard: never
            raise ConfigError(
                f"{name} cannot change from {before!r} to {after!r} while the run is under way, only the number of "
                f"rounds, the learning rate, its schedule, weights of data and revoked invites can "
                f"({', '.join(CHANGEABLE)}); {remedy}"
            )
    one, other = ([(each.name, each.fingerprint, each.urls) for each in run.data.mixture] for run in (old, new))
    if one != other:
        raise ConfigError(f"data.mixture: weights can change, and sources cannot: peers have no other shards; {remedy}")


def check_kept_settings(
    given: RunConfig, kept: Sequence[RunConfig], output: Path, spared: Collection[str] = ()
) -> None:
    """Check that a command sets nothing else than the run that a resumed peer goes on with.

    Args:
        given: Settings of the command, of which those that were set count.
        kept: The run's settings, in the manifest and as revised; any of them will do.
        output: The peer's folder.
        spared: Settings that need not be equal.

    Raises:
        ConfigError: a setting differs.
    """
    values, known = settings_by_name(given), [settings_by_name(run) for run in kept]
    for name in sorted(settings_by_name(given, is_set=True).keys() - {*OWN, *spared}):
        value, had = values[name], [each.get(name) for each in known]
        if value not in had:  # guard: never
            flag = f"--run.{name.replace('_', '-')}"
            command = shlex.join(["spes", "amend", str(output), flag, str(value)])
            remedy = f", or change the run's settings with: {command}" if name in CHANGEABLE else ""
            raise ConfigError(
                f"{name} is {value!r} by the flags or --config, and the run that --resume goes on with has "
                f"{had[-1]!r}; set {flag} {had[-1]}{remedy}"
            )
