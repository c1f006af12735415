"""The repository's root, and modules of its tests."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = ROOT / "tests" / "support"


def support(module: str) -> Any:
    """Return a module of the tests: real peers that misbehave, or die, are theirs."""
    if str(SUPPORT) not in sys.path:
        sys.path.insert(0, str(SUPPORT))  # for good: processes that they start import by it, too
    return importlib.import_module(module)
