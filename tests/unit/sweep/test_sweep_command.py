"""`spes_p2p simulate`: what is finished stays, what changed is made again, and the exit code tells."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from spes_p2p.__main__ import main as program_main
from spes_p2p.cli import load_settings
from spes_p2p.commands import simulate
from spes_p2p.commands.simulate import Failure, Job, News, SimulateConfig, default_workers, main, num_cores, run_job
from spes_p2p.errors import ConfigError
from spes_p2p.sim.sweep.results import result_file, save_result
from tests.unit.sweep.sweeps import PAIR, SOLO, made_up, made_up_sweep, write_sweep

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes runs in this process; returns which, `variant-seed`."""
    names: list[str] = []

    def run_here(jobs: Sequence[Job], num_workers: int, on_news: Callable[[Job, News, float], None]) -> None:
        for job in jobs:
            names.append(f"{job.variant}-{job.seed}")
            on_news(job, run_job(job, functools.partial(on_news, job, seconds=0.1)), 0.2)

    monkeypatch.setattr(simulate, "run_all", run_here)
    return names


def settings(folder: Path, **changes: Any) -> SimulateConfig:
    fields = {"study": folder / "sweep.yaml", "output": folder / "out", "cache": folder / "cache", "workers": 2}
    return SimulateConfig(**(fields | changes))


def test_finished_runs_are_not_made_again_and_changed_ones_are(tmp_path, made, capsys):
    write_sweep(tmp_path, {"solo": SOLO, "ours": PAIR}, seeds=[0, 1])
    assert main(settings(tmp_path)) == 0
    assert made == ["solo-0", "ours-0", "solo-1", "ours-1"]
    first = capsys.readouterr().out
    before = {path: path.read_bytes() for path in (tmp_path / "out" / "results").iterdir()}
    made.clear()

    assert main(settings(tmp_path)) == 0
    assert made == [] and before == {path: path.read_bytes() for path in (tmp_path / "out" / "results").iterdir()}
    assert capsys.readouterr().out.strip() in first

    write_sweep(tmp_path, {"solo": SOLO, "ours": PAIR | {"run": {"train": {"lr": 0.1}}}}, seeds=[0, 1])
    assert main(settings(tmp_path)) == 0
    assert made == ["ours-0", "ours-1"]
    assert "made again: outdated: ours seeds 0, 1: run.train.lr was 0.002, is 0.1\n" in capsys.readouterr().out


def test_a_torn_result_is_made_again(tmp_path, made):
    write_sweep(tmp_path, {"solo": SOLO})
    main(settings(tmp_path))
    file = result_file(tmp_path / "out", "solo", 0)
    whole = json.loads(file.read_text())
    file.write_text(file.read_text()[:500])
    main(settings(tmp_path))
    assert made == ["solo-0"] * 2
    again = json.loads(file.read_text())
    assert again["evaluations"] == whole["evaluations"] and again["scenario"] == whole["scenario"]


def test_a_run_can_be_chosen_and_the_report_still_shows_all(tmp_path, made, capsys):
    write_sweep(tmp_path, {"solo": SOLO, "ours": PAIR}, seeds=[0, 1])
    main(settings(tmp_path, only=["ours"], seeds=[1]))
    assert made == ["ours-1"]
    main(settings(tmp_path, only=["solo"], seeds=[0]))
    assert made == ["ours-1", "solo-0"]
    last = capsys.readouterr().out.split("| variant")[-1]
    assert "ours" in last and "solo" in last


def test_progress_names_variant_seed_round_loss_and_what_is_left(tmp_path, made, capsys):
    write_sweep(tmp_path, {"solo": SOLO}, seeds=[4])
    main(settings(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert "1 run to make" in lines[0] and str(tmp_path / "out" / "logs") in lines[0]
    assert lines[1].startswith("solo seed 4  round 1/2  loss ") and lines[1].endswith("1 run left]")
    assert lines[3].startswith("solo seed 4  finished, loss ") and lines[3].endswith("0 runs left]")


def test_report_only_makes_the_report_and_no_run(tmp_path, made):
    sweep = made_up_sweep(tmp_path, {"solo": SOLO, "ours": PAIR})
    with pytest.raises(ConfigError, match=r"holds no finished run .* drop --report-only"):
        main(settings(tmp_path, report_only=True))
    save_result(tmp_path / "out", made_up(sweep, "solo", 0, [5.0]))
    assert main(settings(tmp_path, report_only=True)) == 0
    assert made == [] and (tmp_path / "out" / "report.html").exists()


def test_a_report_lists_what_is_outdated_with_the_settings_that_differ(tmp_path, made, capsys):
    sweep = made_up_sweep(tmp_path, {"solo": SOLO, "ours": PAIR})
    for name in ("solo", "ours"):
        save_result(tmp_path / "out", made_up(sweep, name, 0, [5.0]))
    write_sweep(tmp_path, {"solo": SOLO, "ours": PAIR | {"max_slots": 3}})
    assert main(settings(tmp_path, report_only=True)) == 0
    assert "\noutdated: ours seed 0: max_slots was 2, is 3\n" in capsys.readouterr().out
    write_sweep(tmp_path, {"ours": PAIR | {"max_slots": 3}})
    with pytest.raises(ConfigError, match=r"holds no finished run of this sweep \(outdated: ours .*\); drop"):
        main(settings(tmp_path, report_only=True))


def test_a_run_that_everybody_left_did_not_finish(tmp_path, made, capsys):
    leave = [{"peer": peer, "kind": "leave", "round": 1} for peer in (0, 1)]
    write_sweep(tmp_path, {"solo": SOLO, "ours": PAIR | {"events": leave}})
    assert main(settings(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    [end] = [line for line in lines if line.startswith("ours seed 0  ended early, loss ")]
    assert "; stopped at round 1/2: no peer was left  [" in end and not any(
        "ours seed 0  finished" in line for line in lines
    )
    [row] = [line for line in lines if line.startswith("| ours")]
    assert "| stopped at round 1/2: no peer was left |" in row


def test_failed_runs_are_named_at_the_end_with_exit_code_1(tmp_path, monkeypatch, capsys):
    sweep = made_up_sweep(tmp_path, {"solo": SOLO, "ours": PAIR})

    def half_fails(jobs: Sequence[Job], num_workers: int, on_news: Callable[[Job, News, float], None]) -> None:
        on_news(jobs[1], Failure("out of luck"), 0.1)
        on_news(jobs[0], made_up(sweep, "solo", 0, [5.0]), 0.1)

    monkeypatch.setattr(simulate, "run_all", half_fails)
    assert main(settings(tmp_path)) == 1
    assert "\nfailed: ours seed 0: out of luck\n" in capsys.readouterr().out
    assert "solo" in (tmp_path / "out" / "table.md").read_text()
    assert not result_file(tmp_path / "out", "ours", 0).exists()
    assert main(settings(tmp_path, report_only=True)) == 0
    assert "\nfailed: ours seed 0: out of luck\n" in capsys.readouterr().out, "and it is not forgotten"

    monkeypatch.setattr(simulate, "run_all", lambda jobs, num_workers, on_news: on_news(jobs[0], Failure("no"), 0.1))
    assert main(settings(tmp_path, output=tmp_path / "other")) == 1
    assert not (tmp_path / "other" / "report.html").exists()
    assert "\nfailed: solo seed 0: no\n" in capsys.readouterr().out


def test_workers_share_the_cores(tmp_path, monkeypatch):
    write_sweep(tmp_path, {"a": SOLO, "b": SOLO, "c": SOLO})
    taken: list[tuple[int, int]] = []

    def run_none(jobs: Sequence[Job], num_workers: int, on_news: Callable[[Job, News, float], None]) -> None:
        taken.append((num_workers, jobs[0].threads))
        on_news(jobs[0], Failure("not made"), 0.1)

    monkeypatch.setattr(simulate, "num_cores", lambda: 8)
    monkeypatch.setattr(simulate, "run_all", run_none)
    for workers in (None, 1, 2, 8):
        main(settings(tmp_path, workers=workers))
    assert taken == [(3, 2), (1, 8), (2, 4), (3, 2)]


def test_cores_are_shared_among_the_runs_that_are_left(tmp_path, monkeypatch):
    sweep = made_up_sweep(tmp_path, {"a": SOLO, "b": SOLO, "c": SOLO})
    for name in ("a", "b"):
        save_result(tmp_path / "out", made_up(sweep, name, 0, [5.0]))
    taken: list[tuple[int, int]] = []

    def run_none(jobs: Sequence[Job], num_workers: int, on_news: Callable[[Job, News, float], None]) -> None:
        taken.append((num_workers, jobs[0].threads))

    monkeypatch.setattr(simulate, "num_cores", lambda: 8)
    monkeypatch.setattr(simulate, "run_all", run_none)
    main(settings(tmp_path, workers=None))
    assert taken == [(1, 8)]


@pytest.mark.parametrize(
    ("threads", "said"),
    [((None, None), "2 at a time, 4 threads each;"), ((1, 1), "1 thread each;"), ((1, None), "1 to 4 threads each;")],
)
def test_the_opening_tells_the_threads_that_runs_will_have(tmp_path, monkeypatch, capsys, threads, said):
    write_sweep(tmp_path, {name: SOLO | {"threads": number} for name, number in zip("ab", threads, strict=True)})
    monkeypatch.setattr(simulate, "num_cores", lambda: 8)
    monkeypatch.setattr(simulate, "run_all", lambda jobs, num_workers, on_news: on_news(jobs[0], Failure("no"), 0.1))
    main(settings(tmp_path))
    assert said in capsys.readouterr().out.splitlines()[0]


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
        with pytest.raises(ConfigError, match=r"device=cuda.*set base\.device: cpu$"):
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


# ---------------------------------------------------------------------- the program


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
        (["--help"], 0, "simulate  compare ways to train"),
        ([], 0, "simulate  compare ways to train"),
        (["--version"], 0, "spes_p2p "),
        (["simulate", "--help"], 0, "usage: spes simulate STUDY"),
        (["simulate", "absent.yaml"], 2, "error: cannot read sweep absent.yaml"),
        (["simulate"], 2, "required: STUDY; see --help"),
        (["simulate", "configs/convergence.yaml", "--only", "sol"], 2, "error: --only sol: no such variant"),
        (["simulate", "configs/convergence.yaml", "--worker", "1"], 2, "--worker"),
        (["simulate", "configs/convergence.yaml", "--workers", "0"], 2, "workers='0': input should be greater than"),
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
    assert ended.value.code == code and said in out + err
    assert code == 0 or err.count("\n") == 1


@pytest.mark.full
def test_a_sweep_runs_from_its_file_to_its_report(tmp_path):
    write_sweep(tmp_path, {"solo": SOLO, "ours": PAIR})
    words = ("simulate", tmp_path / "sweep.yaml", "--output", tmp_path / "out", "--cache", tmp_path / "cache")
    with program(*words, "--workers", 2) as process:
        out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    assert "ours seed 0  round 2/2  loss " in out and "| solo" in out and err == ""
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"results", "logs", "table.md", "results.json", "report.html", "loss_by_steps.png"}
    assert {path.name for path in (tmp_path / "out" / "results").iterdir()} == {"solo-0.json", "ours-0.json"}


@pytest.mark.full
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_is_stopped_leaves_no_process(tmp_path, sent):
    endless = {**SOLO, "run": {"round": {"total": 1_000_000}}, "held_out_tokens": 16}
    write_sweep(tmp_path, {"endless": endless}, seeds=[0, 1])
    words = ("simulate", tmp_path / "sweep.yaml", "--output", tmp_path / "out", "--cache", tmp_path / "cache")
    with program(*words, "--workers", 2) as process:
        assert process.stdout is not None
        while "round" not in (line := process.stdout.readline()):
            assert line, "ended before its first evaluation"
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        # Ctrl-C reaches the whole group, as a terminal sends it.
        os.killpg(process.pid, sent) if sent == signal.SIGINT else process.send_signal(sent)
        out, err = process.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    if sent != signal.SIGKILL:
        assert process.returncode == 130 and "the same command does the rest" in out
        assert "Traceback" not in err
