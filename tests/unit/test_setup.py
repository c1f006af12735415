"""scripts/setup.sh shows that it goes on, installs what is asked for, and does nothing when nothing has changed.

It runs on a project of its own, whose build needs no network.
"""

import itertools
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_SECONDS = 7
MAX_SILENCE_SECONDS = 10.0
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "tiny"
version = "1"
[project.optional-dependencies]
dev = []
full = []
"""
BACKEND = f"""
import os, threading, zipfile

WHEEL = "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"

def build_editable(folder, config_settings=None, metadata_directory=None):
    if os.path.exists("broken"):
        raise SystemExit("this build is broken")
    if os.path.exists("slow"):
        threading.Event().wait({BUILD_SECONDS})
    info = "tiny-1.dist-info/"
    extras = "Provides-Extra: dev\\nProvides-Extra: full\\n"
    with zipfile.ZipFile(os.path.join(folder, "tiny-1-py3-none-any.whl"), "w") as wheel:
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\n" + extras)
        wheel.writestr(info + "WHEEL", WHEEL)
        wheel.writestr(info + "RECORD", "")
    return "tiny-1-py3-none-any.whl"
"""

COMMANDS = """
import os
if os.path.exists("unimportable"):
    raise ImportError("no such library")
COMMANDS = {"local": ("", "backend", "")}
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "backend.py").write_text(BACKEND)
    (tmp_path / "spes_p2p").mkdir()
    (tmp_path / "spes_p2p" / "__main__.py").write_text(COMMANDS)
    (tmp_path / "constraints.txt").touch()
    return tmp_path


def setup(project: Path, *extras: str) -> tuple[int, list[tuple[float, str]]]:
    """Return the exit code, and the lines with the time at which each came."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("SPES_", "PIP_", "PYTHONPATH"))}
    variables["PIP_NO_INDEX"] = "1"
    process = subprocess.Popen(
        ["./scripts/setup.sh", *extras], cwd=project, env=variables, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    lines = [(time.monotonic(), line.rstrip()) for line in process.stderr]
    return process.wait(60), lines


@pytest.mark.full
def test_an_installation_is_never_silent_for_long_and_is_made_once(project):
    (project / "slow").touch()
    began = time.monotonic()
    code, lines = setup(project)
    assert code == 0, lines
    (project / "slow").unlink()
    times = [began, *(at for at, _ in lines), time.monotonic()]
    assert max(after - before for before, after in itertools.pairwise(times)) < MAX_SILENCE_SECONDS
    assert any(" MB " in line for _, line in lines), "it says how much there is already"
    assert setup(project) == (0, [])

    assert setup(project, "dev")[0] == 0
    assert (project / ".venv" / "spes_p2p.stamp").read_text().splitlines()[1] == "dev"
    assert setup(project, "dev") == setup(project) == (0, []) and setup(project, "full")[0] == 0
    assert set((project / ".venv" / "spes_p2p.stamp").read_text().splitlines()[1].split()) == {"dev", "full"}
    assert setup(project, "dev") == (0, [])


@pytest.mark.full
def test_an_installation_that_fails_says_why_and_is_tried_again(project):
    (project / "broken").touch()
    code, lines = setup(project)
    assert code == 2 and any("this build is broken" in line for _, line in lines)
    assert "pip could not install" in lines[-1][1]
    (project / "broken").unlink()
    assert setup(project)[0] == 0


@pytest.mark.full
def test_the_installation_compiles_what_commands_import_and_says_if_they_cannot(project):
    (project / "unimportable").touch()
    code, lines = setup(project)
    assert code == 2 and any("no such library" in line for _, line in lines)
    assert "cannot be imported; delete .venv" in lines[-1][1]
    (project / "unimportable").unlink()
    assert setup(project)[0] == 0 and list((project / "__pycache__").glob("backend.*.pyc"))
