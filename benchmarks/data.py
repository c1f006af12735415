"""Speed and memory of `spes tokenize`.

    .venv/bin/python benchmarks/data.py [--megabytes 96] [--write]

Medians of repeats that take turns: the tokenizer alone, one process, and several.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import psutil
from tokenizers import Tokenizer

from benchmarks.cluster import ROOT
from benchmarks.large_peers import family, processor_seconds, proportional_bytes
from benchmarks.records import measure_parts
from benchmarks.tables import Row
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, DataConfig, PositiveInt
from spes_p2p.data.sources import documents
from spes_p2p.data.tokenizer import resolve_tokenizer

MIN_SPEEDUP, MIN_SHARE_OF_ALONE, MAX_MEGABYTES = 1.8, 0.9, 400
REPEATS, PROCESSES = 3, 2
POLL_SECONDS, MB = 0.25, 10**6


class DataBenchmarkConfig(CommandConfig):
    """Measure `spes tokenize`."""

    megabytes: PositiveInt = 96
    """Text of a measurement of speed, in 10^6 bytes."""
    memory_megabytes: PositiveInt = 1000
    """Text of the measurement of memory."""
    write: bool = False
    """Keep the rows in benchmarks/results/data.json and .md."""


def main(config: DataBenchmarkConfig) -> int:
    """Measure and print; return 1 if a goal was missed."""
    with tempfile.TemporaryDirectory(prefix="data-") as name:
        folder = Path(name)
        resolve_tokenizer(DataConfig(), [], Path("~/.cache/spes_p2p")).save_pretrained(folder / "tokenizer")
        parts = {
            "speed": partial(speeds, folder, config.megabytes * MB),
            "memory": partial(memory, folder, config.memory_megabytes * MB),
        }
        return measure_parts("data", parts, [], config.write)


def write(path: Path, num_bytes: int) -> Path:
    """Write the embedded documents, again and again under new titles, until the file is large enough."""
    texts, number = [document.text for document in documents(DataConfig())], 0
    with path.open("w", encoding="utf-8") as stream:
        while stream.tell() < num_bytes:
            for text in texts[:64]:
                stream.write(json.dumps({"text": f"{number}. {text}"}) + "\n")
                number += 1
            texts = texts[64:] + texts[:64]
    return path


def tokenise(folder: Path, corpus: Path, name: str, processes: int) -> tuple[float, float, int]:
    """Run the command; return its wall and processor seconds, and the most memory of all its processes."""
    words = [sys.executable, "-m", "spes_p2p", "tokenize", "--file-glob", str(corpus), "--tokenizer"]
    words += [str(folder / "tokenizer"), "--output-prefix", f"{folder}/{name}/", "--processes", str(processes)]
    began, peak, seconds = time.monotonic(), 0, 0.0
    process = psutil.Popen([*words, "--cache", str(folder)], cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, sum(map(proportional_bytes, family(process.pid))))
        seconds = max(seconds, processor_seconds(process.pid))
        try:
            process.wait(POLL_SECONDS)
        except psutil.TimeoutExpired:
            continue
    assert process.returncode == 0
    return time.monotonic() - began, seconds, peak


def speeds(folder: Path, num_bytes: int) -> Iterator[Row]:
    """Yield the speed of one process, over that of the tokenizer alone, and of several processes."""
    corpus = write(folder / "corpus.jsonl", num_bytes)
    alone, one, many = [], [], []
    for repeat in range(REPEATS):
        alone.append(alone_seconds(corpus, folder / "tokenizer" / "tokenizer.json"))
        one.append(tokenise(folder, corpus, f"one-{repeat}", 1))
        many.append(tokenise(folder, corpus, f"many-{repeat}", PROCESSES)[0])
    megabytes, seconds = corpus.stat().st_size / MB, median(cpu for _, cpu, _ in one)
    yield Row("one process, MB of text per CPU second, start included", f"{megabytes / seconds:.2f}")
    share = median(alone) / seconds
    what = "- that, over the tokenizer alone (texts in memory, ids as lists)"
    yield Row(what, f"{share:.2f}", f"{MIN_SHARE_OF_ALONE}", share >= MIN_SHARE_OF_ALONE)
    speedup = median(wall for wall, *_ in one) / median(many)
    what = f"{PROCESSES} processes over one, wall time, {megabytes:.0f} MB"
    yield Row(what, f"{speedup:.2f}", f"{MIN_SPEEDUP}", speedup >= MIN_SPEEDUP)


def alone_seconds(corpus: Path, file: Path) -> float:
    """Return the CPU seconds of the tokenizer on texts in memory, without anything around it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(str(file))
    texts = [json.loads(line)["text"] for line in corpus.open(encoding="utf-8")]
    began = time.process_time()
    for start in range(0, len(texts), 50):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + 50], add_special_tokens=False):
            assert encoding.ids is not None
    return time.process_time() - began


def memory(folder: Path, num_bytes: int) -> Iterator[Row]:
    """Yield the most memory of all processes while a large file is tokenised."""
    corpus = write(folder / "large.jsonl", num_bytes)
    peak = tokenise(folder, corpus, "large", PROCESSES)[2]
    what = f"memory (PSS of all processes) of {PROCESSES} processes for {corpus.stat().st_size / MB:,.0f} MB"
    yield Row(what, f"{peak / MB:.0f} MB", f"{MAX_MEGABYTES} MB", peak <= MAX_MEGABYTES * MB)


if __name__ == "__main__":
    entry_point(DataBenchmarkConfig, main)
