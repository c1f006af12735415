"""`hivemind_fixes/README.md` lists everything that the library overrides in hivemind, and tests that exist."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import spes_p2p.swarm

TESTS = Path(__file__).parents[2]
PAGE = (TESTS.parent / "spes_p2p" / "swarm" / "hivemind_fixes" / "README.md").read_text(encoding="utf-8")


def overrides() -> Iterator[str]:
    """Yield `Class.name` of hivemind for each name that a class of `spes_p2p.swarm` defines again."""
    for module in pkgutil.walk_packages(spes_p2p.swarm.__path__, "spes_p2p.swarm."):
        for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            stock = [base for base in kind.__mro__ if base.__module__.startswith("hivemind")]
            if kind.__module__ == module.name and stock:
                for name in vars(kind):
                    owner = next((base.__name__ for base in stock if name in vars(base)), None)
                    if owner and name != "_abc_impl" and not name.startswith("__"):
                        yield f"{owner}.{name}"


def test_every_override_of_hivemind_is_listed():
    found = set(overrides())
    assert len(found) > 20
    assert sorted(symbol for symbol in found if f"`{symbol}`" not in PAGE) == []


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(test_\w+)`", PAGE))))
def test_a_listed_test_exists(name):
    assert any(f"def {name}(" in path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
