"""Measure the local experiment against stock training: python benchmarks/local_experiment.py [--short] [--help]"""

from benchmarks.comparison import BenchmarkConfig, main
from spes_p2p.cli import entry_point

if __name__ == "__main__":
    entry_point(BenchmarkConfig, main)
