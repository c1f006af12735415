"""The table of SPES's settings in docs/spes_settings.md, from `spes_p2p/config/spes_settings.yaml`.

`python -m benchmarks.spes_settings --write` renews it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.tables import fill
from spes_p2p.config.spes_keys import SpesSetting, spes_settings
from spes_p2p.presentation import say

PAGE = Path(__file__).resolve().parents[1] / "docs" / "spes_settings.md"
MARKER = "SETTINGS"


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
