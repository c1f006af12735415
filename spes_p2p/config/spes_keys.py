"""SPES's settings beside ours: hints for what was written for SPES, and the table of docs/spes_settings.md."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml

from spes_p2p.config.checkpoint import Frozen

MAX_HINTS = 5


class SpesSetting(Frozen):
    """One setting of SPES and its counterpart here."""

    key: str
    """SPES's name, dotted."""
    theirs: Any = None
    """SPES's value, or its values by our config's name."""
    ours: str | None = None
    """Our setting: of the run (`run.round.steps`), a machine's (`micro_batch_size`), or, after `hf.`, a field of the
    model's Hugging Face configuration. None: there is no setting."""
    here: Any = None
    """Our value, or values by config, where they are not SPES's."""
    note: str = ""
    """Why they differ, or what the setting means."""

    def their_value(self, config: str) -> Any:
        """Return SPES's value in the file that `config` follows; None if it has none."""
        return self._of(self.theirs, config)

    def our_value(self, config: str) -> Any:
        """Return the value that `config` must have."""
        return self._of(self.here if "here" in self.model_fields_set else self.theirs, config)

    def concerns(self, config: str) -> bool:
        """Tell whether the file that `config` follows has the setting."""
        return not isinstance(self.theirs, dict) or config in self.theirs

    @staticmethod
    def _of(value: Any, config: str) -> Any:
        return value.get(config) if isinstance(value, dict) else value

    @property
    def hint(self) -> str:
        """What to write here instead, in one clause."""
        if self.ours is None or self.ours.startswith("hf."):
            return f"SPES's {self.key} is no setting here ({self.note or 'the model is always so'})"
        return f"SPES's {self.key} is {self.ours} here" + (f" ({self.note})" if self.note else "")


class SpesSettings(Frozen):
    """All settings that SPES's files have."""

    source: str
    """Where they come from."""
    files: dict[str, str]
    """The file of SPES that each of our configs follows."""
    settings: list[SpesSetting]
    """In the order of SPES's files."""


@functools.cache
def spes_settings() -> SpesSettings:
    """Return the settings in `spes_settings.yaml`, which comes with the package."""
    return SpesSettings.model_validate(
        yaml.safe_load(Path(__file__).with_name("spes_settings.yaml").read_text(encoding="utf-8"))
    )


def hints(key: str, value: Any = None) -> str:
    """Return what SPES's settings in `key` are called here, one clause each, and where to read on; empty if none is.

    Args:
        key: A dotted name that is no setting here, as in a file of SPES or below `run`.
        value: What it is set to; settings within it count, too.
    """
    known = {setting.key: setting.hint for setting in spes_settings().settings}
    found = [known[name] for name in _names(key.removeprefix("run."), value) if name in known]
    more = f"; and {len(found) - MAX_HINTS} more" if len(found) > MAX_HINTS else ""
    return "; ".join(found[:MAX_HINTS]) + f"{more}; see docs/spes_settings.md" if found else ""


def _names(key: str, value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        return [name for inner, each in value.items() for name in _names(f"{key}.{inner}", each)]
    if isinstance(value, list):  # betas
        return [f"{key}[{index}]" for index in range(len(value))]
    return [key]
