"""An installed wheel works outside a checkout: it holds its configs, and its command finds them."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import nbformat
import pytest
from peer_processes import commands_in, last_certificate, write_corpus, write_settings

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("spes_p2p", "configs", "pyproject.toml", "README.md", "LICENSE", "NOTICE")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Copy the sources: a build leaves files beside them."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", *flags, str(source)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    (built,) = folder.glob("*.whl")
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
        for path in (ROOT / "spes_p2p").rglob("*.*"):
            if path.suffix not in (".py", ".pyc") and path.name != "README.md":
                assert archive.read(str(path.relative_to(ROOT))) == path.read_bytes()
        (scripts,) = (name for name in names if name.endswith("entry_points.txt"))
        assert {b"spes = spes_p2p.__main__:main", b"spes_p2p = spes_p2p.__main__:main"} <= set(
            archive.read(scripts).splitlines()
        )
    assert not [name for name in names if name.split("/")[0] not in ("spes_p2p", metadata.split("/")[0])]


@pytest.fixture
def beside(tmp_path):
    """Make an environment that has this one's packages; return the folder of its programs."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=120)
    base = {"base": str(environment), "platbase": str(environment)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=base))
    # After its own packages; an editable install there would be found only if this one lacked the package.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"


@pytest.fixture
def installed(wheel, beside):
    """Install the wheel there."""
    flags = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", f"--python={beside / 'python'}", "install", *flags, str(wheel)]
    subprocess.run(command, check=True, timeout=300)
    return beside


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


NOTEBOOK = ROOT / "notebooks" / "join.ipynb"
LINK = "spes:my-run.eNqVzMEOgiAY..."
SHELL = "import subprocess; subprocess.run({!r}, shell=True, check=True)"


def test_the_notebook_is_valid_and_holds_no_output():
    notebook = nbformat.read(NOTEBOOK, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert not [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.full  # a minute: it installs, and trains; the flags of its commands are checked with every commit
def test_the_notebooks_cells_install_join_a_real_swarm_and_export_its_model(source, beside, tmp_path):
    git = ["git", "-C", str(source), "-c", "user.name=test", "-c", "user.email=test"]
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "all"]):
        subprocess.run([*git, *words], check=True, timeout=60)
    cells = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if "outputs" in cell]
    lines = [SHELL.format(line[1:]) if line[:1] == "!" else line for cell in cells for line in cell.splitlines()]
    assert all(sum(word in line for line in lines) == 1 for word in (LINK, "REPOSITORY_URL"))
    corpus, settings = (
        write_corpus(tmp_path / "corpus.jsonl"),
        write_settings(tmp_path / "run.yaml", round={"min_peers": 2}),
    )
    with commands_in(tmp_path) as commands:
        founder = commands.peer("founder", "--run-id", "r", "--config", settings, "--text", corpus)
        link = founder.wait_for(r"others join with: spes join (spes:\S+)")[1]
        environment = {
            **{"HOME": str(tmp_path), "PATH": f"{beside}:{os.environ['PATH']}", "SPES_TEXT": str(corpus)},
            **{"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "OMP_NUM_THREADS": "1"},
            "SPES_DEVICE": "cpu",
        }
        program = "\n".join(lines).replace(LINK, link).replace("REPOSITORY_URL", f"file://{source}")
        here = tmp_path / "here"
        here.mkdir()
        ran = subprocess.run(
            ["python", "-c", program], cwd=here, env=environment, capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0, f"{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
        assert founder.end() == 0
    assert (here / "peer" / "model" / "config.json").exists()
    body = last_certificate(here / "peer")
    assert body is not None and body.round == 3 and len(body.members) == 2
