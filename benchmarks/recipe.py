"""The whole recipe: what tests with real programs hold of data, clusters, checkpoints, settings and evaluation.

    .venv/bin/python benchmarks/recipe.py [--output benchmarks/results/recipe]

SLURM is real (a controller and three nodes on this machine), peers are processes, lm-eval is itself. A test that is
skipped, because SLURM or lm-eval is not installed, does not count, and its figure is not reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cluster import ROOT
from benchmarks.machine import Circumstances, load_average
from benchmarks.passing import passing
from benchmarks.records import say_rows, write_rows
from benchmarks.tables import Row
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig

UNIT, SWARM = "tests/unit", "tests/swarm"
CLUSTER = f"{SWARM}/test_cluster.py"


class Figure(NamedTuple):
    """What tests hold.

    Attributes:
        what: Its name.
        goal: What it has to reach.
        tests: pytest ids.
        least: How many tests must run.
    """

    what: str
    goal: str
    tests: tuple[str, ...]
    least: int = 1


FIGURES = (
    Figure(
        "text as txt, jsonl, json, parquet, each plain, gz and zst: the tokenizer's own ids",
        "all",
        (
            f"{UNIT}/data/test_data_readers.py::test_every_format_gives_the_texts_that_were_written",
            f"{UNIT}/data/test_data_tokenise.py::test_ids_are_the_tokenizers_own_for_every_format",
        ),
        10,
    ),
    Figure(
        "4 real peers with kills: each window counts in one commit an epoch",
        "0 twice; 0 never",
        (f"{SWARM}/test_peer_shared_data.py::test_no_window_counts_twice_or_never_in_a_swarm_of_four_with_kills",),
    ),
    Figure(
        "SLURM: 3 nodes of one job to the first committed round",
        "works",
        (f"{CLUSTER}::test_three_nodes_of_one_job_commit_a_round",),
    ),
    Figure(
        "SLURM: a node preempted and requeued; the founder's node killed",
        "no version lost; run goes on",
        (f"{CLUSTER}::test_an_array_survives_preemption_and_the_loss_of_the_founders_node",),
    ),
    Figure(
        "RANK and WORLD_SIZE misused: one line, exit 2, nothing written",
        "all of 8",
        (
            f"{UNIT}/test_launch.py::test_a_peer_refuses_variables_with_which_it_would_crash_or_hang",
            f"{UNIT}/test_launch.py::test_a_node_refuses_variables_that_do_not_say_which_it_is",
            f"{UNIT}/test_launch.py::test_the_commands_say_so_in_one_line_and_write_nothing",
        ),
        8,
    ),
    Figure(
        "SIGTERM at ten moments of a peer's life: gone within its grace, the run goes on",
        "all",
        (f"{CLUSTER}::test_sigterm_at_any_moment_ends_a_peer_within_its_grace_and_the_run_goes_on",),
        10,
    ),
    Figure(
        "- with a rank that hangs",
        "all",
        (f"{CLUSTER}::test_sigterm_hands_over_the_slots_of_a_peer_with_a_hung_rank_within_its_grace",),
        2,
    ),
    Figure("- a second one", "within 5 s", (f"{CLUSTER}::test_a_second_sigterm_ends_a_hung_peer_at_once",)),
    Figure(
        "a peer's export of round k and the monitor's model of round k, fp32 and nf4 storage",
        "same digest of every tensor",
        (f"{SWARM}/test_peer_export.py::test_a_peers_folder_gives_the_monitors_model_of_the_same_round",),
        2,
    ),
    Figure(
        "settings equal to SPES's, field by field, or named and reasoned",
        "all",
        (f"{UNIT}/test_spes_settings.py",),
    ),
    Figure(
        "`spes evaluate --suite` and plain lm-eval on a toy checkpoint",
        "equal to the last digit",
        (f"{UNIT}/test_evaluate.py::test_the_suites_table_is_plain_lm_evals_to_the_last_digit",),
    ),
    Figure(
        "bad data: a line with file and remedy, nothing half-written",
        "all, 40 or more",
        (
            f"{UNIT}/data/test_data_shards.py::test_bad_shards_are_refused_by_name_with_the_remedy",
            f"{UNIT}/data/test_data_readers.py::test_what_is_no_text_is_refused_by_name_with_the_remedy",
            f"{UNIT}/data/test_data_sources.py::test_a_bad_file_is_named_with_the_remedy",
            f"{UNIT}/data/test_data_tokenise.py::test_shards_that_are_not_their_manifests_are_refused",
            f"{UNIT}/data/test_data_tokenise.py::test_what_cannot_be_tokenised_is_said_in_a_line",
            f"{UNIT}/data/test_data_windows.py::test_a_changed_file_is_refused_by_name",
        ),
        40,
    ),
    Figure(
        "- a disk that fills while tokenising; a peer's and an experiment's bad input, as commands: exit 2",
        "all",
        (
            f"{UNIT}/data/test_data_tokenise.py::test_a_disk_that_is_full_is_said_in_a_line_and_the_work_goes_on_elsewhere",
            f"{SWARM}/test_peer_bad_input.py::test_a_founders_bad_input_is_one_line_and_nothing_is_written",
            f"{SWARM}/test_peer_bad_input.py::test_an_experiments_bad_input_is_one_line_and_nothing_is_written",
        ),
        10,
    ),
)


class RecipeConfig(CommandConfig):
    """Measure the recipe."""

    output: Path = ROOT / "benchmarks" / "results" / "recipe"
    """Where to write, without suffix."""


def main(config: RecipeConfig) -> int:
    """Measure, write and say; return 1 if a figure was not reached."""
    load_before, seen = load_average(), dict[str, Any]()
    found = say_rows(rows(seen))
    circumstances = Circumstances.now(load_before, None)
    write_rows(config.output, circumstances, "The whole recipe", found, tests=seen)
    return 0 if all(row.is_reached for row in found) else 1


def rows(seen: dict[str, Any]) -> Iterator[Row]:
    """Yield a row for each figure, as soon as its tests have run."""
    for figure in FIGURES:
        yield passing(figure.what, figure.goal, figure.tests, seen, figure.least)


if __name__ == "__main__":
    entry_point(RecipeConfig, main)
