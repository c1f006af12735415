"""`spes_p2p simulate`: what is finished stays, what changed is made again, and the exit code tells."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from spes_p2p.__main__ import main as program_main
from spes_p2p.cli import load_settings
from spes_p2p.commands import simulate
from spes_p2p.commands.simulate import SimulateConfig, default_workers, main, num_cores
from spes_p2p.errors import ConfigError, SpesError
from spes_p2p.sim.simulator import simulate as run_scenario
from spes_p2p.sim.sweep import RunResult, Sweep, load_sweep, result_file, run_result, save_result
from tests.unit.sweep.sweeps import PAIR, SOLO, made_up, made_up_sweep, write_sweep

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def made(monkeypatch):
    """Makes runs in this process, a run after the other; returns which, `variant-seed`."""
    names: list[str] = []

    class Here:
        def __init__(self, workers: int, *rest: Any) -> None:
            pass

        def submit(self, work: Callable[..., RunResult], variant: str, seed: int, *rest: Any) -> Future[RunResult]:
            names.append(f"{variant}-{seed}")
            future: Future[RunResult] = Future()
            try:
                future.set_result(work(variant, seed, *rest))
            except SpesError as error:
                future.set_exception(error)
            return future

        def shutdown(self, **how: bool) -> None:
            pass

    monkeypatch.setattr(simulate, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(os, "dup2", lambda one, other: None)
    return names


def settings(folder: Path, **changes: Any) -> SimulateConfig:
    fields = {"study": folder / "sweep.yaml", "output": folder / "out", "cache": folder / "cache", "workers": 2}
    return SimulateConfig(**(fields | changes))


def test_finished_runs_are_not_made_again_and_changed_or_torn_ones_are(tmp_path, made, capsys):
    write_sweep(tmp_path, {"solo": SOLO, "ours": PAIR}, seeds=[0, 1])
    assert main(settings(tmp_path)) == 0 and made == ["solo-0", "ours-0", "solo-1", "ours-1"]
    first = capsys.readouterr().out
    assert "Convergence: 4 of 4 runs to make, 2 at a time; progress in " in first
    assert "solo seed 0  loss " in first and "[4 of 4, " in first
    before = {path: path.read_bytes() for path in (tmp_path / "out" / "results").iterdir()}
    made.clear()

    assert main(settings(tmp_path)) == 0
    assert made == [] and before == {path: path.read_bytes() for path in (tmp_path / "out" / "results").iterdir()}
    assert capsys.readouterr().out.strip() in first

    file = result_file(tmp_path / "out", "solo", 0)
    file.write_text(file.read_text()[:500])
    write_sweep(tmp_path, {"solo": SOLO, "ours": PAIR | {"run": {"train": {"lr": 0.1}}}}, seeds=[0, 1])
    assert main(settings(tmp_path)) == 0 and made == ["solo-0", "ours-0", "ours-1"]


def test_a_run_can_be_chosen_and_the_table_still_shows_all(tmp_path, made, capsys):
    write_sweep(tmp_path, {"solo": SOLO, "ours": PAIR}, seeds=[0, 1])
    main(settings(tmp_path, only=["ours"], seeds=[1]))
    assert made == ["ours-1"]
    main(settings(tmp_path, only=["solo"], seeds=[0]))
    assert made == ["ours-1", "solo-0"]
    last = capsys.readouterr().out.split("| variant")[-1]
    assert "ours" in last and "solo" in last


def test_report_only_makes_the_table_and_no_run(tmp_path, made):
    sweep = made_up_sweep(tmp_path, {"solo": SOLO, "ours": PAIR})
    with pytest.raises(ConfigError, match=r"holds no finished run .* drop --report-only"):
        main(settings(tmp_path, report_only=True))
    save_result(tmp_path / "out", made_up(sweep, "solo", 0, [5.0, 4.0]))
    assert main(settings(tmp_path, report_only=True)) == 0
    assert made == [] and (tmp_path / "out" / "table.md").read_text().startswith("| variant")


def test_a_run_that_fails_is_named_in_the_sweeps_words_and_the_others_go_on(tmp_path, made, capsys):
    write_sweep(tmp_path, {"no_text": {**PAIR, "text": [str(tmp_path / "absent.txt")]}, "solo": SOLO})
    assert main(settings(tmp_path)) == 1
    [failed] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("no_text")]
    assert "failed: " in failed and "absent.txt" in failed and "base.text" in failed and "--text" not in failed
    log = tmp_path / "out" / "logs" / "no_text-0.log"
    assert f"see {log}" in failed and log.exists() and result_file(tmp_path / "out", "solo", 0).exists()


def test_cores_are_shared_among_the_runs_that_are_left(tmp_path, monkeypatch):
    sweep = made_up_sweep(tmp_path, {"a": SOLO, "b": SOLO, "c": SOLO})
    taken: list[int] = []

    def run_none(config: SimulateConfig, sweep: Sweep, missing: Sequence[tuple[str, int]], workers: int) -> int:
        taken.append(workers)
        return 1

    monkeypatch.setattr(simulate, "num_cores", lambda: 8)
    monkeypatch.setattr(simulate, "run_all", run_none)
    for workers in (None, 1, 2, 8):
        main(settings(tmp_path, workers=workers))
    for name in ("a", "b"):
        save_result(tmp_path / "out", made_up(sweep, name, 0, [5.0, 4.0]))
    main(settings(tmp_path, workers=None))
    assert taken == [3, 1, 2, 3, 1]


def test_a_gpu_takes_one_run_at_a_time(tmp_path, monkeypatch):
    sweep = made_up_sweep(tmp_path, {"a": SOLO | {"device": "cpu"}, "b": SOLO})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert default_workers(sweep) == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert default_workers(sweep) == num_cores()


def test_a_gpu_that_is_not_there_is_noticed_before_anything_runs(tmp_path, made, monkeypatch):
    write_sweep(tmp_path, {"a": SOLO, "b": SOLO | {"device": "cuda"}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for workers in (None, 2):
        with pytest.raises(ConfigError, match=r"device=cuda.*set base\.device: cpu"):
            main(settings(tmp_path, workers=workers))
    assert made == [] and not (tmp_path / "out").exists()


def test_an_output_may_begin_at_home_and_may_not_be_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_settings(SimulateConfig, ["s.yaml", "--output=~/out"]).output == tmp_path / "out"
    assert load_settings(SimulateConfig, ["s.yaml", "--output", "."]).output == Path(".")
    for value, remedy in (("", "name a folder"), ("~nobody-of-that-name/x", "name another")):
        with pytest.raises(ConfigError, match=rf"^--output.*{remedy}$"):
            load_settings(SimulateConfig, ["s.yaml", f"--output={value}"])


def test_an_output_that_is_no_folder_is_named(tmp_path, made):
    write_sweep(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--output .*file: .* name a writable folder"):
        main(settings(tmp_path, output=tmp_path / "file"))


def program(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "spes_p2p", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["simulat"], 2, "error: unknown command 'simulat'; did you mean simulate? see spes --help\n"),
        (["--help"], 0, "simulate   compare ways to train"),
        ([], 0, "simulate   compare ways to train"),
        (["--version"], 0, "spes_p2p "),
        (["simulate", "--help"], 0, "usage: spes simulate STUDY"),
        (["simulate", "absent.yaml"], 2, "error: cannot read sweep absent.yaml"),
        (["simulate"], 2, "study is missing; set STUDY"),
        (["simulate", "configs/scenarios.yaml", "--only", "sol"], 2, "error: --only sol: no such variant"),
        (["simulate", "configs/scenarios.yaml", "--worker", "1"], 2, "--worker"),
        (["simulate", "configs/scenarios.yaml", "--workers", "0"], 2, "workers='0': input should be greater than"),
    ],
)
def test_the_program_answers_in_a_line(words, code, said, monkeypatch, capsys):
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["spes_p2p", *words])
    monkeypatch.setattr("spes_p2p.cli.leave", sys.exit)  # it ends the process
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(SystemExit) as ended:
        program_main()
    signal.signal(signal.SIGTERM, handler)
    out, err = capsys.readouterr()
    assert ended.value.code == code and said in out + err and (code == 0 or err.count("\n") == 1)


@pytest.mark.full
def test_a_sweep_runs_from_its_file_to_its_table(tmp_path):
    write_sweep(tmp_path, {"solo": SOLO, "ours": PAIR})
    words = ("simulate", tmp_path / "sweep.yaml", "--output", tmp_path / "out", "--cache", tmp_path / "cache")
    with program(*words, "--workers", 2) as process:
        out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    assert "ours seed 0  loss " in out and "| solo" in out and err == ""
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results", "logs", "table.md"}
    assert {path.name for path in (tmp_path / "out" / "results").iterdir()} == {"solo-0.json", "ours-0.json"}
    assert "round 2  loss " in (tmp_path / "out" / "logs" / "ours-0.log").read_text()
    scenario = load_sweep(tmp_path / "sweep.yaml").variants["ours"].scenarios[0]
    alone = run_result("ours", 0, scenario, run_scenario(scenario, cache=tmp_path / "cache"))
    kept = RunResult.model_validate_json(result_file(tmp_path / "out", "ours", 0).read_bytes())
    assert kept.evaluations == alone.evaluations and kept.peers == alone.peers, "a process changes no number"


@pytest.mark.full
@pytest.mark.parametrize("stop", ["Ctrl-C", "parent killed", "worker killed"])
def test_a_sweep_that_is_stopped_leaves_no_process(tmp_path, stop):
    endless = {**SOLO, "run": {"round": {"total": 1_000_000}}, "held_out_tokens": 16}
    write_sweep(tmp_path, {"endless": endless}, seeds=[0, 1])
    words = ("simulate", tmp_path / "sweep.yaml", "--output", tmp_path / "out", "--cache", tmp_path / "cache")
    logs = [tmp_path / "out" / "logs" / f"endless-{seed}.log" for seed in (0, 1)]
    with program(*words, "--workers", 2) as process:
        while not all(log.exists() and "round" in log.read_text() for log in logs):
            assert process.poll() is None, "ended before its first evaluation"
            time.sleep(0.2)
        children = psutil.Process(process.pid).children(recursive=True)
        workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        assert len(workers) == 2
        match stop:
            case "Ctrl-C":
                os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the whole group
            case "parent killed":
                process.kill()
            case "worker killed":
                workers[0].kill()
        out, err = process.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    if stop == "Ctrl-C":
        assert process.returncode == 130 and "the same command does the rest" in out
        assert "Traceback" not in err
    if stop == "worker killed":
        assert process.returncode == 1 and out.count("where memory is short, use fewer --workers") == 2
