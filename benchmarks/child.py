"""One child process of a benchmark: python benchmarks/child.py TASK.json; its result lies beside the task."""

import sys
from pathlib import Path

import torch

from benchmarks.baselines import train_baseline
from benchmarks.stock import train_stock
from benchmarks.tasks import StockTask, read_task, write_result

if __name__ == "__main__":
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    task = read_task(path)
    write_result(path, train_stock(task) if isinstance(task, StockTask) else train_baseline(task))
