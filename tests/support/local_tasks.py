"""lm-eval tasks on files of this repository, under names of tasks that need a hub."""

from __future__ import annotations

from pathlib import Path

from spes_p2p.commands.evaluate import SUITES

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "tasks"
GROUPS = {"ceval-valid": ("ceval-valid_law", "ceval-valid_logic"), "mmlu": ("mmlu_anatomy", "mmlu_virology")}
"""Groups of the suites, with two tasks each."""


def write_local_tasks(folder: Path) -> Path:
    """Write a stand-in for each task of the suites, and for `c4`; return the folder for --task-path."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {task for suite in SUITES.values() for group in suite for task in group.tasks}
    singles = names - GROUPS.keys() | {part for parts in GROUPS.values() for part in parts}
    for template, tasks in (("choices.yaml", sorted(singles)), ("text.yaml", ["c4"])):
        text = (FIXTURES / template).read_text(encoding="utf-8").replace("FOLDER", str(FIXTURES))
        for task in tasks:
            (folder / f"{task}.yaml").write_text(text.replace("task: TASK", f"task: {task}"), encoding="utf-8")
    for group, parts in GROUPS.items():
        means = "".join(
            f"  - {{metric: {name}, aggregation: mean, weight_by_size: true}}\n" for name in ("acc", "acc_norm")
        )
        text = f"group: {group}\ntask: [{', '.join(parts)}]\naggregate_metric_list:\n{means}"
        (folder / f"{group}.yaml").write_text(text, encoding="utf-8")
    return folder
