"""The table of SPES's settings in benchmarks/results/spes_settings.md, from `spes_p2p/config/spes_settings.yaml`.

`python -m benchmarks.spes_settings --write` renews it.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import yaml

from benchmarks.tables import fill
from spes_p2p.config import Frozen
from spes_p2p.presentation import say

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks" / "results" / "spes_settings.md"
FILE = ROOT / "spes_p2p" / "config" / "spes_settings.yaml"
MARKER = "SETTINGS"


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
    return SpesSettings.model_validate(yaml.safe_load(FILE.read_text(encoding="utf-8")))


def table() -> str:
    """Return the settings as a Markdown table."""
    configs = list(spes_settings().files)
    head = ["SPES", "here", *(name.removeprefix("spes_").upper() for name in configs), "note"]
    rows = [head, ["---"] * len(head)]
    for setting in spes_settings().settings:
        here = f"`{setting.ours}`" if setting.ours else ""
        rows.append([f"`{setting.key}`", here, *(_cell(setting, config) for config in configs), setting.note])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(setting: SpesSetting, config: str) -> str:
    if not setting.concerns(config):
        return ""
    theirs, ours = _shown(setting.their_value(config)), _shown(setting.our_value(config))
    return f"{theirs} → {ours}" if setting.ours and theirs != ours else theirs


def _shown(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into its page")
    if parser.parse_args().write:
        fill(PAGE, MARKER, table())
    else:
        say(table())
