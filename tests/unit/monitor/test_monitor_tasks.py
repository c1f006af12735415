"""Tasks during a run: a process of their own gives `spes evaluate`'s numbers, and costs the watch nothing."""

import json
import logging
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from local_tasks import write_local_tasks

from spes_p2p.commands import evaluate
from spes_p2p.commands.monitor import _task_evaluations, main, own_output
from spes_p2p.config import ModelConfig
from spes_p2p.config.commands import EvaluateConfig, MonitorConfig
from spes_p2p.data.tokenizer import train_bpe
from spes_p2p.errors import ConfigError
from spes_p2p.model.build import stock_model
from spes_p2p.monitor.tasks import TaskEvaluations

needs_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed: extra `full`")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = train_bpe(["peer slot round swarm model token expert router " * 20], 280)
    shape = ModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=16, num_experts=4)
    stock_model(shape, len(tokenizer), 128, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def copied(checkpoint: Path):
    return lambda folder: shutil.copytree(checkpoint, folder, dirs_exist_ok=True)


@pytest.mark.full  # as lm-eval is, which CI installs for the full lane alone
@needs_lm_eval
def test_the_tables_of_a_run_are_those_of_the_command(checkpoint, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = write_local_tasks(tmp_path / "yaml")
    settings = MonitorConfig(run_id="r", initial_peers=["a"], tasks=["sciq", "mmlu"], task_path=folder, threads=1)
    tasks = _task_evaluations(settings, tmp_path, copied(checkpoint))
    assert tasks is not None
    tasks.start(4)
    tasks.start(5)  # the first still runs
    tasks.finish(6)
    tasks.close()
    assert "no tasks on round 5: those on round 4 still run" in caplog.text
    files = sorted(path.name for path in (tmp_path / "tasks").iterdir())
    assert files == ["evaluate.log", *(f"round-00000{n}.{kind}" for n in (4, 6) for kind in ("json", "md"))]
    rows = evaluate.evaluate(EvaluateConfig(checkpoint=checkpoint, tasks=["sciq", "mmlu"], task_path=folder))
    for number in (4, 6):
        table = (tmp_path / "tasks" / f"round-00000{number}.md").read_text()
        assert table == evaluate.table(rows) + "\n"
        values = json.loads((tmp_path / "tasks" / f"round-00000{number}.json").read_text())
        assert f"round {number}: sciq {values['sciq']['acc']:.4f}, mmlu" in caplog.text


@pytest.mark.full
@needs_lm_eval
def test_of_tasks_one_of_which_cannot_run_the_others_are_logged(checkpoint, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder = write_local_tasks(tmp_path / "yaml")
    (folder / "piqa.yaml").write_text((folder / "piqa.yaml").read_text().replace("choices.jsonl", "absent.jsonl"))
    flags = ["--tasks", "piqa", "sciq", "--task-path", str(folder), "--limit", "2"]
    TaskEvaluations(tmp_path / "tasks", flags, copied(checkpoint), threads=1).finish(3)
    assert "the tasks on round 3 failed (2): error: no numbers of piqa: cannot run piqa: " in caplog.text
    assert "round 3: sciq 0." in caplog.text or "round 3: sciq 1." in caplog.text


@pytest.mark.full
def test_tasks_that_fail_are_logged_and_end_no_watch(tmp_path, caplog):
    tasks = TaskEvaluations(tmp_path / "tasks", ["--text", "absent.txt"], lambda folder: folder.mkdir())
    tasks.finish(3)
    assert "the tasks on round 3 failed (2): error: absent.txt does not exist" in caplog.text

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    TaskEvaluations(tmp_path / "other", [], full).finish(4)
    assert "cannot run tasks on round 4: [Errno 28] No space left on device; the watch goes on" in caplog.text


def test_closing_ends_the_process(tmp_path, checkpoint):
    tasks = TaskEvaluations(tmp_path / "tasks", [], copied(checkpoint))
    tasks.start(1)
    process = tasks._process
    assert process is not None
    tasks.close()
    tasks.close()
    assert process.wait(60) != 0 and not (tmp_path / "tasks" / "model").exists()


@pytest.mark.full
@needs_lm_eval
def test_a_task_that_does_not_exist_is_named_before_the_run_is_joined(tmp_path):
    output = tmp_path / "monitor"
    settings = {"run_id": "r", "initial_peers": ["/ip4/127.0.0.1/tcp/1/p2p/Qm"], "output": output}
    tasks = {"tasks": ["no_such_task"], "task_path": write_local_tasks(tmp_path / "yaml")}
    with pytest.raises(ConfigError, match="unknown task 'no_such_task'"):
        main(MonitorConfig(**settings, **tasks))
    assert not output.exists()


def test_earlier_tables_are_kept_unless_they_may_go(tmp_path):
    (tmp_path / "tasks").mkdir()
    settings = MonitorConfig(run_id="r", initial_peers=["a"], output=tmp_path)
    with pytest.raises(ConfigError, match="holds tasks already; pass --resume, --overwrite"), own_output(settings):
        pass
    with own_output(settings.model_copy(update={"overwrite": True})):
        pass
    assert not (tmp_path / "tasks").exists()


def test_without_tasks_nothing_is_started(tmp_path):
    settings = MonitorConfig(run_id="r", initial_peers=["a"])
    assert _task_evaluations(settings, tmp_path, lambda folder: None) is None
