"""Measure a checkpoint: python scripts/evaluate.py CHECKPOINT [--text FILE ...] [--tasks TASK ...]"""

from spes_p2p.cli import entry_point
from spes_p2p.commands.evaluate import EvaluateConfig, evaluate, table


def main(config: EvaluateConfig) -> int:
    print(table(evaluate(config)))
    return 0


if __name__ == "__main__":
    entry_point(EvaluateConfig, main)
