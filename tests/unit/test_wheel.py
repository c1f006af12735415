"""An installed wheel works outside a checkout: it holds its configs, and its command finds them."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("spes_p2p", "configs", "pyproject.toml", "README.md", "LICENSE", "NOTICE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy of the sources: a build leaves files beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(folder / "built")]
    command = [sys.executable, "-m", "pip", "wheel", *flags, str(source)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    (built,) = (folder / "built").glob("*.whl")
    return built


def test_a_wheel_holds_the_configs_the_page_the_licences_and_both_commands(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for path in (ROOT / "configs").glob("*.yaml"):
            assert archive.read(f"spes_p2p/configs/{path.name}") == path.read_bytes()
        (metadata,) = (name for name in names if name.endswith("dist-info/METADATA"))
        assert b"License-Expression: Apache-2.0" in archive.read(metadata)
        licences = {Path(name).name for name in names if "/licenses/" in name}
        assert licences == {"LICENSE", "NOTICE", "uPlot.LICENSE"}
        page = ROOT / "spes_p2p" / "monitor" / "page" / "static"
        for path in page.iterdir():
            assert archive.read(f"spes_p2p/monitor/page/static/{path.name}") == path.read_bytes()
        assert "spes_p2p/monitor/model_card.md" in names
        (scripts,) = (name for name in names if name.endswith("entry_points.txt"))
        assert {b"spes = spes_p2p.__main__:main", b"spes_p2p = spes_p2p.__main__:main"} <= set(
            archive.read(scripts).splitlines()
        )
    assert not [name for name in names if name.split("/")[0] not in ("spes_p2p", metadata.split("/")[0])]


@pytest.fixture
def installed(wheel, tmp_path):
    """Install the wheel beside this environment's dependencies; return the folder of its programs."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=120)
    base = {"base": str(environment), "platbase": str(environment)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=base))
    # After its own packages; an editable install there would be found only if this one lacked the package.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    flags = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", f"--python={environment / 'bin' / 'python'}", "install", *flags, str(wheel)]
    subprocess.run(command, check=True, timeout=300)
    return environment / "bin"


@pytest.mark.full  # what a change could leave out of the wheel, the test above finds with every commit
def test_an_installed_wheel_works_outside_a_checkout_with_an_empty_home(installed, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    environment = {"HOME": str(home), "PATH": f"{installed}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def run(*words: str | Path) -> str:
        ended = subprocess.run(words, cwd=home, env=environment, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr[-2000:]
        return ended.stdout

    where = run(installed / "python", "-c", "import spes_p2p; print(spes_p2p.__file__)").strip()
    assert Path(where).is_relative_to(installed.parent), "not the checkout's"
    assert "spes local" in run("spes") and "[local_experiment]" in run("spes", "local", "--help")
    assert "memory" in run("spes", "plan", "--config", "local_experiment", "--slots", "4")


@pytest.mark.full  # three minutes: a whole swarm
@pytest.mark.timeout(900)
def test_an_installed_wheel_trains_a_swarm(installed, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    environment = {"HOME": str(home), "PATH": f"{installed}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    flags = ["--peers", "2", "--run.round.total", "2", "--run.round.mode", "steps", "--run.round.steps", "3"]
    command = ["spes", "local", "--output", "out", *flags]
    ended = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=800)
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    assert (home / "out" / "model" / "config.json").exists() and "spes evaluate out/model" in ended.stdout
