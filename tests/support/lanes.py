"""Parameters by lane: some cases of a test run with every commit, the others only in the full lane."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sample(values: Iterable[Any], commit: Collection[Any]) -> list[Any]:
    """Return all values, tuples being several arguments, marked `full` unless they are among those for every commit."""
    return [value if value in commit else _full(value) for value in values]


def _full(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.full)
