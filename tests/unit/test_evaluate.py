"""The evaluation command, on a tiny random stock OLMoE."""

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from local_tasks import write_local_tasks
from safetensors.torch import load_file, save_file
from tokenizer_families import FAMILIES
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    OlmoeConfig,
    OlmoeForCausalLM,
)

from spes_p2p.commands import evaluate
from spes_p2p.data.tokenizer import text_encoder, train_bpe
from spes_p2p.errors import ConfigError, DataError

REPOSITORY = Path(__file__).resolve().parents[2]
needs_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed: extra `full`")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    words = ["peer", "slot", "round", "swarm"]
    tokenizer = train_bpe([" ".join(random.Random(i).choices(words, k=40)) for i in range(20)], 280)
    torch.manual_seed(0)
    shape = OlmoeConfig(
        **{"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2},
        **{"max_position_embeddings": 1024, "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0},
    )
    OlmoeForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def task_path(tmp_path_factory):
    return write_local_tasks(tmp_path_factory.mktemp("tasks"))


ZERO_SHOT = evaluate.TaskGroup(("sciq",), None)


def run(*arguments: object, home: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, "-m", "spes_p2p", "evaluate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=REPOSITORY)


@needs_lm_eval
def test_text_of_tasks_begins_once_and_holds_no_control_token():
    tokenizer = FAMILIES["llama3"]()
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=8, n_layer=1, n_head=1))
    adapter = evaluate._adapter(model, tokenizer, 1, None)
    context, answer = adapter._encode_pair("The user asks<|eot_id|> what", " a round<|eot_id|>")
    (whole,) = text_encoder(tokenizer).documents(["The user asks<|eot_id|> what a round<|eot_id|>"])
    assert context + answer == whole[:-1] and context[0] == tokenizer.bos_token_id


@needs_lm_eval
def test_command_reports_loss_and_tasks(checkpoint, task_path, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("peer slot round swarm " * 200)
    done = run(
        *(checkpoint, "--text", text, "--sequence-length", 16, "--batch-size", 4),
        *("--tasks", "sciq", "--task-path", task_path, "--json", tmp_path / "out.json"),
        home=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["text"]["perplexity"] == pytest.approx(math.exp(report["text"]["loss"]))
    assert report["sciq"]["acc"] * 32 == pytest.approx(round(report["sciq"]["acc"] * 32))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    assert ["text", "", "loss", f"{report['text']['loss']:.4f}", ""] in rows
    assert ["sciq", "0", "acc"] in [row[:3] for row in rows]


def test_loss_is_that_of_the_stock_model_with_labels(checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("peer slot round swarm " * 60)
    model, tokenizer = evaluate.load_checkpoint(checkpoint)
    batches = evaluate.text_batches(tokenizer, [text], 16, 3, limit=7)
    measured = evaluate.text_metrics(model, batches, "text")[0].value
    whole = torch.cat(batches)
    assert whole.shape == (7, 17)
    with torch.no_grad():
        expected = model(input_ids=whole, labels=whole).loss.item()
    assert measured == pytest.approx(expected, abs=1e-5)


def test_without_text_the_embedded_held_out_part_is_evaluated(checkpoint):
    config = evaluate.EvaluateConfig(checkpoint=checkpoint, sequence_length=32, limit=5)
    rows = evaluate.evaluate(config)
    assert [(row.subject, row.name) for row in rows] == [
        ("embedded held-out", name) for name in ("loss", "perplexity", "tokens")
    ]
    assert rows[2].value == 5 * 32 and re.search(r"\| embedded held-out \| +\| loss ", evaluate.table(rows))


def test_a_sequence_has_no_more_tokens_than_the_checkpoint_allows(checkpoint, tmp_path):
    short = tmp_path / "short"
    shutil.copytree(checkpoint, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    assert evaluate.evaluate(evaluate.EvaluateConfig(checkpoint=short, limit=5))[2].value == 5 * 16
    with pytest.raises(ConfigError, match="--sequence-length=17: the checkpoint allows 16 tokens; lower it"):
        evaluate.evaluate(evaluate.EvaluateConfig(checkpoint=short, sequence_length=17))


@needs_lm_eval
def test_the_limit_bounds_the_documents_of_a_task(checkpoint, task_path):
    model, tokenizer = evaluate.load_checkpoint(checkpoint)
    [accuracy] = [
        row.value
        for row in evaluate.task_metrics(model, tokenizer, ZERO_SHOT, task_path, batch_size=2, limit=1)
        if row.name == "acc"
    ]
    assert accuracy in (0, 1)


@needs_lm_eval
@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "absent is no checkpoint"),
        (["CHECKPOINT", "--text", "absent.txt"], "absent.txt does not exist"),
        (["CHECKPOINT", "--batch-size", "0"], "batch_size='0'"),
        (["CHECKPOINT", "--tasks", "no_such_task", "--task-path", "TASKS"], "unknown task 'no_such_task'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_mistake_is_one_line_and_exit_code_2(checkpoint, task_path, tmp_path, arguments, message):
    places = {"CHECKPOINT": checkpoint, "TASKS": task_path}
    done = run(*(places.get(word, word) for word in arguments), home=tmp_path)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last and ";" in last
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_of_a_peers_folder_it_is_told_how_to_make_a_checkpoint(tmp_path):
    (tmp_path / "versions").mkdir()
    with pytest.raises(DataError, match=r"spes export .* makes one of a peer's folder"):
        evaluate.load_checkpoint(tmp_path)


def test_a_checkpoint_that_lacks_a_tensor_is_refused_and_not_measured_with_a_random_one(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "torn")
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.0.self_attn.o_proj.weight"]
    save_file(tensors, tmp_path / "torn" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"lacks 1 tensors, model.layers.0.self_attn.o_proj.weight among them"):
        evaluate.load_checkpoint(tmp_path / "torn")


def test_models_of_other_families_are_measured_too_and_too_long_a_sequence_is_named(checkpoint, tmp_path):
    """A composite model has no `vocab_size` of its own, and GPT-2 learns its positions."""
    tokenizer = evaluate.load_checkpoint(checkpoint)[1]
    gemma = Gemma3TextConfig(
        **{"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    )
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    whole = Gemma3Config(text_config=gemma, vision_config=vision, mm_tokens_per_image=4)
    batches = evaluate.text_batches(tokenizer, [], 32, 2, limit=4)
    assert not hasattr(whole, "vocab_size")
    metrics = evaluate.text_metrics(Gemma3ForConditionalGeneration(whole).eval(), batches, "text")
    assert 0 < metrics[0].value < 10
    short = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=16))
    with pytest.raises(ConfigError, match=r"cannot take 32 tokens at a time: .*; lower --sequence-length"):
        evaluate.text_metrics(short.eval(), batches, "text")


def test_an_output_that_cannot_be_written_is_named_before_a_model_is_loaded(tmp_path):
    for flag in ("json_file", "markdown"):
        config = evaluate.EvaluateConfig(checkpoint=tmp_path / "none", **{flag: tmp_path / "absent" / "out"})
        with pytest.raises(ConfigError, match=r"cannot write --(json|markdown) .*out; name a file in a folder"):
            evaluate.evaluate(config)


def test_a_device_or_a_link_is_written_to_and_never_replaced(tmp_path, checkpoint):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    files = {"json_file": tmp_path / "link", "markdown": Path("/dev/null")}
    evaluate.evaluate(evaluate.EvaluateConfig(checkpoint=checkpoint, sequence_length=32, limit=5, **files))
    assert (tmp_path / "link").is_symlink() and '"loss"' in (tmp_path / "file").read_text()
    assert Path("/dev/null").is_char_device()


def test_a_task_that_the_suite_has_too_is_refused():
    with pytest.raises(ConfigError, match="hellaswag would be measured twice, and reported once"):
        evaluate.task_groups(["hellaswag"], "spes", None, 0)


def test_unreadable_inputs_are_named(checkpoint, tmp_path):
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    _, tokenizer = evaluate.load_checkpoint(checkpoint)
    with pytest.raises(DataError, match="not UTF-8"):
        evaluate.text_batches(tokenizer, [binary], 16, 4, None)
    with pytest.raises(DataError, match="--sequence-length=16"):
        short = tmp_path / "short.txt"
        short.write_text("peer")
        evaluate.text_batches(tokenizer, [short], 16, 4, None)


@pytest.mark.full
@needs_lm_eval
def test_unknown_tasks_are_named(task_path, tmp_path):
    with pytest.raises(ConfigError, match="unknown task 'no_such_task'"):
        evaluate._task_manager(["no_such_task"], task_path)
    with pytest.raises(ConfigError, match="--task-path"):
        evaluate._task_manager(["sciq"], tmp_path / "absent")


def test_a_damaged_checkpoint_is_named(checkpoint, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    (damaged / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(DataError, match="cannot load checkpoint"):
        evaluate.load_checkpoint(damaged)
    shutil.copy(checkpoint / "model.safetensors", damaged)
    (damaged / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer"):
        evaluate.load_checkpoint(damaged)


def test_a_foreign_tokenizer_is_refused_before_the_device_fails(checkpoint, tmp_path):
    model, _ = evaluate.load_checkpoint(checkpoint)
    batch = torch.full((1, 17), 10_000)
    with pytest.raises(DataError, match="id 10000, the model embeds 276"):
        evaluate.text_metrics(model, [batch], "text")


@needs_lm_eval
def test_a_task_without_its_data_is_named(checkpoint, task_path, tmp_path):
    task = (task_path / "sciq.yaml").read_text().replace("choices.jsonl", "absent.jsonl")
    (tmp_path / "sciq.yaml").write_text(task)
    model, tokenizer = evaluate.load_checkpoint(checkpoint)
    with pytest.raises(DataError, match=r"cannot run sciq: .*check the task's data and the network"):
        evaluate.task_metrics(model, tokenizer, ZERO_SHOT, tmp_path)


def plain(checkpoint: Path, task_path: Path, tasks: list[str], num_fewshot: int | None) -> dict[str, dict]:
    """What lm-eval itself reports of a checkpoint, loaded and run by it."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(task_path), include_defaults=False)
    arguments = {"model_args": f"pretrained={checkpoint}", "batch_size": 3, "device": "cpu"}
    return lm_eval.simple_evaluate(
        "hf", tasks=tasks, num_fewshot=num_fewshot, task_manager=manager, log_samples=False, **arguments
    )["results"]


@pytest.mark.full  # as lm-eval is, which CI installs for the full lane alone
@needs_lm_eval
def test_the_suites_table_is_plain_lm_evals_to_the_last_digit(checkpoint, task_path, tmp_path):
    """The published tasks and numbers of examples, on local rows; plain lm-eval gets them from SPES's script."""
    files = {"json_file": tmp_path / "suite.json", "markdown": tmp_path / "suite.md"}
    config = evaluate.EvaluateConfig(checkpoint=checkpoint, suite="spes", task_path=task_path, batch_size=3, **files)
    rows = evaluate.evaluate(config)
    report = json.loads(files["json_file"].read_text())
    script = [
        ("sciq,piqa,winogrande,arc_easy,social_iqa,openbookqa,boolq", None),
        ("arc_challenge", 25),
        ("hellaswag", 10),
        ("ceval-valid,cmmlu,mmlu", None),
    ]
    expected = {}
    for names, num_fewshot in script:
        expected |= plain(checkpoint, task_path, names.split(","), num_fewshot)
    assert report.keys() == expected.keys() and len(report) == 16
    for task, values in expected.items():
        for name in ("acc", "acc_norm"):
            assert report[task][name] == values[f"{name},none"], task
            assert report[task][f"{name}_stderr"] == values[f"{name}_stderr,none"], task
    shown = [" ".join(line.split()) for line in files["markdown"].read_text().splitlines()[2:]]
    listed = [task for names, _ in script for task in names.split(",")]
    tasks = sorted(line.split(" | ")[0].removeprefix("| ") for line in shown)
    assert tasks == sorted(2 * listed), "a row for each accuracy of what is listed, and none for a group's tasks"
    accuracies = {row.subject: f"{row.value:.4f}" for row in rows if row.name == "acc"}
    assert f"| sciq | 0 | acc | {accuracies['sciq']} | ± {report['sciq']['acc_stderr']:.4f} |" in shown
    assert any(line.startswith("| arc_challenge | 25 | acc | ") for line in shown)


@pytest.mark.full
@needs_lm_eval
def test_the_perplexity_of_c4_is_a_task_by_its_name(checkpoint, task_path):
    """lm-eval has the real one; here local text stands in for it."""
    from lm_eval.tasks import TaskManager

    assert {"c4", *(task for group in evaluate.SUITES["spes"] for task in group.tasks)} <= set(TaskManager().all_tasks)
    config = evaluate.EvaluateConfig(checkpoint=checkpoint, tasks=["c4"], task_path=task_path, batch_size="auto")
    measured = {row.name: row.value for row in evaluate.evaluate(config)}
    expected = plain(checkpoint, task_path, ["c4"], None)["c4"]
    assert measured == {
        name: expected[f"{name},none"] for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")
    }


@needs_lm_eval
def test_examples_in_the_prompt_and_the_precision_are_the_users(checkpoint, task_path):
    config = {"checkpoint": checkpoint, "tasks": ["sciq"], "task_path": task_path}
    rows = evaluate.evaluate(evaluate.EvaluateConfig(**config, num_fewshot=2))
    assert {row.num_fewshot for row in rows} == {2}
    assert rows[0].value == plain(checkpoint, task_path, ["sciq"], 2)["sciq"]["acc,none"]
    model, _ = evaluate.load_checkpoint(checkpoint, "bf16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@needs_lm_eval
@pytest.mark.parametrize(
    "missing",
    [
        {"sciq": "data", "boolq": "script"},
        {"mmlu_virology": "package", "boolq": "unknown"},
        {"sciq": "data", "piqa": "unknown", "mmlu": "data", "boolq": "script"},
    ],
    ids=lambda missing: "-".join(missing.values()),
)
def test_tasks_that_cannot_run_are_named_and_the_others_measured(
    checkpoint, task_path, tmp_path, monkeypatch, capsys, caplog, missing
):
    """Rows that are missing, a data set that is a script, a package that is not installed, a name of no task."""
    from lm_eval.tasks import manager

    monkeypatch.setattr(manager, "__file__", str(tmp_path / "none" / "manager.py"))  # lm-eval's own take 16 s to index
    folder = shutil.copytree(task_path, tmp_path / "tasks")
    (folder / "functions.py").write_text("import no_such_package\n")
    faults = {
        "data": ("choices.jsonl", "absent.jsonl"),
        "script": ("dataset_path: json", f"dataset_path: {folder / 'functions.py'}"),
        "package": ('doc_to_text: "Question: {{question}}\\nAnswer:"', "doc_to_text: !function functions.text"),
    }
    for task, fault in missing.items():
        if fault == "unknown":
            (folder / f"{task}.yaml").unlink()
            continue
        file = folder / ("mmlu_virology.yaml" if task == "mmlu" else f"{task}.yaml")
        changed = file.read_text().replace(*faults[fault])
        assert changed != file.read_text()
        file.write_text(changed)
    tasks = ["sciq", "piqa", "mmlu", "boolq"]
    lost = [task for task in tasks if task in missing or (task == "mmlu" and "mmlu_virology" in missing)]
    kept = [task for task in tasks if task not in lost]
    output = tmp_path / "out.json"
    config = evaluate.EvaluateConfig(checkpoint=checkpoint, tasks=tasks, task_path=folder, json_file=output, limit=1)
    with pytest.raises(DataError, match=f"^no numbers of {', '.join(lost)}: .*; .*$"):
        evaluate.main(config)
    shown = {line.split()[1] for line in capsys.readouterr().out.splitlines()[2:]}
    assert shown == set(kept)
    assert set(json.loads(output.read_text())) >= set(kept) if kept else not output.exists()
    warned = [record.getMessage() for record in caplog.records if record.name == evaluate.__name__]
    assert len(warned) == len(lost) and all(
        sum(f" {task}:" in line or repr(task) in line for line in warned) == 1 for task in lost
    )
    assert not any("\n" in line for line in warned)


@pytest.mark.full
@needs_lm_eval
def test_a_suite_goes_on_after_a_task_without_data(checkpoint, task_path, tmp_path):
    folder = shutil.copytree(task_path, tmp_path / "tasks")
    for name in ("hellaswag", "piqa"):
        task = folder / f"{name}.yaml"
        task.write_text(task.read_text().replace("choices.jsonl", "absent.jsonl"))
    file = tmp_path / "suite.json"
    config = evaluate.EvaluateConfig(checkpoint=checkpoint, suite="spes", task_path=folder, json_file=file, limit=2)
    with pytest.raises(DataError, match="no numbers of piqa, hellaswag: cannot run piqa"):
        evaluate.evaluate(config)
    assert {"sciq", "boolq", "arc_challenge", "mmlu", "cmmlu"} <= json.loads(file.read_text()).keys()


@needs_lm_eval
def test_more_examples_than_there_are_is_said_so(checkpoint, task_path):
    config = evaluate.EvaluateConfig(checkpoint=checkpoint, tasks=["sciq"], num_fewshot=99, task_path=task_path)
    with pytest.raises(DataError, match=r"cannot run sciq: .*fewshot samples requested exceeds the 31"):
        evaluate.evaluate(config)


def test_without_lm_eval_its_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    config = evaluate.EvaluateConfig(checkpoint=Path("absent"), suite="spes")
    with pytest.raises(ConfigError, match=r"tasks and suites need lm-eval .*; pip install 'spes-p2p\[all\]'"):
        evaluate.evaluate(config)


@needs_lm_eval
@pytest.mark.full
def test_a_suite_without_a_hub_is_one_line_and_exit_code_2(checkpoint, tmp_path):
    done = run(checkpoint, "--suite", "spes", "--json", tmp_path / "suite.json", home=tmp_path)
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: no numbers of sciq, piqa, ") and "mmlu: cannot run sciq: " in last
    assert "or set HF_HOME to" in last and done.stderr.count("going on without it") == 12
    assert not (tmp_path / "suite.json").exists()


@needs_lm_eval
@pytest.mark.full
def test_two_processes_share_the_requests_and_report_once(checkpoint, task_path, tmp_path):
    """On CPUs, as several GPUs would: the numbers are a single process's, and a task without data stops neither."""
    folder = shutil.copytree(task_path, tmp_path / "tasks")
    (folder / "piqa.yaml").write_text((folder / "piqa.yaml").read_text().replace("choices.jsonl", "absent.jsonl"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "spes_p2p"]
    words = ["evaluate", str(checkpoint), "--tasks", "sciq", "piqa", "mmlu", "c4", "--task-path", str(folder)]
    file = tmp_path / "shared.json"
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *words, "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=500,
        env=environment,
        cwd=REPOSITORY,
    )
    assert done.returncode != 0
    assert done.stderr.count("error: no numbers of piqa: cannot run piqa: ") == 1, done.stderr
    assert done.stdout.count("word_perplexity") == 1
    alone = tmp_path / "alone.json"
    config = {"tasks": ["sciq", "mmlu", "c4"], "task_path": task_path, "json_file": alone}
    evaluate.evaluate(evaluate.EvaluateConfig(checkpoint=checkpoint, **config))
    shared, expected = (json.loads(each.read_text()) for each in (file, alone))
    assert shared.keys() == expected.keys()
    for task, values in expected.items():
        for name, value in values.items():
            if not name.endswith("perplexity_stderr") and not name.endswith("per_byte_stderr"):
                assert shared[task][name] == pytest.approx(value, rel=1e-6), (task, name)


def test_of_a_group_without_a_mean_the_parts_are_shown():
    result = {
        "results": {
            "leaderboard": {"alias": "leaderboard", "sample_len": 4},
            "one": {"acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len": 4},
            "mean": {"acc,none": 0.75},
            "two": {"acc,none": 0.75, "acc_stderr,none": "N/A"},
        },
        "group_subtasks": {"leaderboard": ["one"], "mean": ["two"]},
    }
    rows = evaluate._flatten(result)
    assert [(row.subject, row.is_part) for row in rows] == [("one", False), ("mean", False), ("two", True)]
    assert " ".join(evaluate.table(rows).splitlines()[2].split()) == "| one | | acc | 0.5000 | ± 0.1000 |"


def test_an_infinite_perplexity_is_null_in_json():
    rows = [evaluate.Metric("text", "perplexity", math.inf)]
    assert json.loads(evaluate.as_json(rows)) == {"text": {"perplexity": None}}
    assert "inf" in evaluate.table(rows)
