"""The requirements and the constraints go together on each Python that this project names."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ["3.11", "3.12", "3.13"]
REQUIREMENT = re.compile(r"([\w.-]+)==(\S+)")


def pinned(text: str) -> dict[str, str]:
    """Return each pinned package's version, by its name in normal form."""
    found = filter(None, map(REQUIREMENT.match, text.splitlines()))
    return {re.sub(r"[-_.]+", "-", match[1]).lower(): match[2] for match in found}


def test_each_python_that_the_project_names_is_resolved_here():
    assert 'requires-python = ">=3.11,<3.14"' in (ROOT / "pyproject.toml").read_text(), "PYTHONS must name all of them"


@pytest.mark.full  # it asks the package index, and only a change of the requirements can break it
@pytest.mark.parametrize("python", PYTHONS)
def test_all_requirements_resolve_with_the_constraints(python):
    flags = ["--quiet", "--no-annotate", "--no-header", "--all-extras", "--python-version", python]
    command = [sys.executable, "-m", "uv", "pip", "compile", *flags, "-c", "constraints.txt", "pyproject.toml"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    resolved, constraints = pinned(ended.stdout), pinned((ROOT / "constraints.txt").read_text())
    assert {"torch", "hivemind", "transformers", "lm-eval", "wandb", "ruff"} <= resolved.keys()
    differ = {name for name in resolved.keys() & constraints.keys() if resolved[name] != constraints[name]}
    assert not differ, "a marker or another build has replaced what the tests ran with"
