"""Own data: formats, speed and memory of `spes tokenize`, and what reading windows costs a training step.

    .venv/bin/python benchmarks/data.py [--output benchmarks/results/data] [--megabytes 96] [--repeats 3]

Ratios are of CPU seconds where other work on the machine would distort wall time, and medians of repeats that take
turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tokenizers import Tokenizer

from benchmarks.at_most_once import history, steady
from benchmarks.cluster import ROOT
from benchmarks.machine import Circumstances, load_average
from benchmarks.records import say_rows, write_rows
from benchmarks.tables import Row
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, DataConfig, ModelConfig, PositiveInt, RunConfig, TrainConfig
from spes_p2p.data.packing import train_sources
from spes_p2p.data.shards import TokenShards
from spes_p2p.data.shared import KeyedPermutation
from spes_p2p.data.sources import documents
from spes_p2p.data.tokenizer import load_tokenizer, resolve_tokenizer, tokenizer_bytes
from spes_p2p.data.windows import TokenFile, lay_out
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.build import build_initial, build_trainer
from spes_p2p.training.ranks import Ranks

FIXTURES = ROOT / "tests" / "fixtures" / "shards"
FORMATS = {
    **{"raw npy uint16": "spes_uint16", "raw npy uint32": "spes_uint32", "true npy": "npy/flat.npy"},
    **{"datatrove uint16": "datatrove_uint16", "datatrove uint32": "datatrove_uint32"},
    **{"Megatron, by datatrove": "megatron_datatrove", "Megatron, uint16": "megatron_uint16"},
    **{"Megatron, int32": "megatron_int32", "MDS raw": "mds_raw", "MDS zstd": "mds_zstd", "MDS bytes": "mds_bytes"},
}
"""Fixtures that the formats' own libraries wrote; see tests/fixtures/shards/make.py."""
MIN_SPEEDUP, MIN_SHARE_OF_ALONE, MAX_MEGABYTES, MAX_WINDOW_SHARE = 1.8, 0.9, 400, 0.01
SEQUENCE, BATCH = 2048, 4
MODEL = ModelConfig(hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=4, intermediate_size=256)
POLL_SECONDS = 0.25
MB = 10**6


class DataBenchmarkConfig(CommandConfig):
    """Measure own data."""

    output: Path = ROOT / "benchmarks" / "results" / "data"
    """Where to write, without suffix."""
    megabytes: PositiveInt = 96
    """Text of a measurement of speed, in 10^6 bytes."""
    memory_megabytes: PositiveInt = 1000
    """Text of the measurement of memory."""
    repeats: PositiveInt = 3
    """Measurements of each speed."""
    processes: PositiveInt = 2
    """Processes of the measurements of memory and speed-up."""
    log_level: str = "warning"
    """Least severe event to log."""


def main(config: DataBenchmarkConfig) -> int:
    """Measure, write and say; return 1 if a figure was not reached."""
    load_before = load_average()
    with tempfile.TemporaryDirectory(prefix="data-") as name:
        found = say_rows(rows(config, Path(name)))
    circumstances = Circumstances.now(load_before, None)
    write_rows(config.output, circumstances, "Own data", found, load_after=load_average())
    return 0 if all(row.is_reached is not False for row in found) else 1


def rows(config: DataBenchmarkConfig, folder: Path) -> Iterator[Row]:
    """Yield the figures."""
    yield from formats(folder)
    yield from best_fit_rows()
    yield from shared_data()
    texts = [document.text for document in documents(DataConfig())]
    tokenizer = resolve_tokenizer(DataConfig(), [], Path("~/.cache/spes_p2p"))
    payload, size = tokenizer_bytes(tokenizer), len(tokenizer)
    corpus = write(folder / "corpus.jsonl", texts, config.megabytes * MB)
    yield from speeds(config, folder, corpus, payload, size)
    tokenizer.save_pretrained(folder / "tokenizer")
    yield windows(folder, payload)
    yield memory(config, folder, write(folder / "large.jsonl", texts, config.memory_megabytes * MB))


def formats(folder: Path) -> Iterator[Row]:
    """Compare the ids of every fixture with those that were given to the library."""
    ids = [token for document in json.loads((FIXTURES / "ids.json").read_text()) for token in document]
    vocab_size = len(load_tokenizer(FIXTURES / "tokenizer"))
    for name, path in FORMATS.items():
        shards = TokenShards([FIXTURES / path], vocab_size, folder)
        is_equal = np.concatenate(list(shards.documents())).tolist() == ids
        yield Row(f"ids equal to the library's: {name}", "all" if is_equal else "NOT", "all", is_equal)


def shared_data() -> Iterator[Row]:
    """Measure what a common order takes, and how much of it simulated peers train."""
    found = steady(0)
    figure = "windows of an epoch that a steady run of four trains; twice"
    is_reached = found.trained >= 0.8 and (found.twice, found.own) == (0, 0)
    yield Row(figure, f"{found.trained:.2f}; {found.twice} ({found.epochs} epochs)", "0.8; 0", is_reached)
    found = history(0)
    figure = "windows dealt and trained twice: 8 simulated peers, 30 % replaced in 10 min, 3 restarts of all"
    yield Row(figure, f"{found.twice} ({found.rounds} rounds, {found.epochs} epochs)", "0", found.twice == 0)
    tracemalloc.start()
    KeyedPermutation(10**9, "key")(np.arange(8))
    order_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    yield Row("memory of the permutation of 1e9 windows", f"{order_bytes / 1e3:.0f} KB", "1 MB", order_bytes < MB)


def best_fit_rows(num_documents: int = 40_000, length: int = 2048) -> Iterator[Row]:
    """Lay documents of log-normal lengths out by best-fit."""
    drawn = np.random.default_rng(0).lognormal(np.log(1003) - 0.5, 1.0, num_documents)
    lengths_D = np.maximum(drawn, 2).astype(np.int64)
    tokens_N = np.ones(int(lengths_D.sum()), "<u2")
    tokens_N[np.cumsum(lengths_D) - 1] = 0
    ((spans_S2, stops_W),) = lay_out(TokenFile(tokens_N, "key", 0), length, "best_fit")
    padding = 1 - spans_S2[:, 1].sum() / (len(stops_W) * (length + 1))
    document_S = np.searchsorted(np.cumsum(lengths_D), spans_S2[:, 0], side="right")
    pieces_D = np.bincount(document_S, minlength=num_documents)
    cut = int((pieces_D > -(-(lengths_D - 1) // length)).sum())
    figure = "best_fit, log-normal lengths: padding; documents cut needlessly"
    yield Row(figure, f"{100 * padding:.3f} %; {cut}", "0.1 %; 0", bool(padding < 0.001 and cut == 0))


def write(path: Path, texts: list[str], num_bytes: int) -> Path:
    """Write documents, again and again under new titles, until the file is large enough."""
    with path.open("w", encoding="utf-8") as stream:
        number = 0
        while stream.tell() < num_bytes:
            for text in texts:
                stream.write(json.dumps({"text": f"{number}. {text}"}) + "\n")
                number += 1
                if number % 64 == 0 and stream.tell() >= num_bytes:
                    break
    return path


def speeds(config: DataBenchmarkConfig, folder: Path, corpus: Path, payload: bytes, size: int) -> Iterator[Row]:
    """Measure the tokenizer alone, one process and several, in turn."""
    alone, one, many = [], [], []
    for repeat in range(config.repeats):
        alone.append(alone_cpu_seconds(corpus, payload))
        one.append(timed(folder / f"one-{repeat}", corpus, payload, size, 1))
        many.append(timed(folder / f"many-{repeat}", corpus, payload, size, config.processes)[0])
    megabytes = corpus.stat().st_size / MB
    cpu_alone, cpu_one = statistics.median(alone), statistics.median(cpu for _, cpu in one)
    share = cpu_alone / cpu_one
    yield Row("one process, MB of text per CPU second", f"{megabytes / cpu_one:.2f}")
    yield Row(
        *("- that, against the tokenizer alone (texts in memory, ids as lists)", f"{share:.2f}"),
        *(f"{MIN_SHARE_OF_ALONE}", share >= MIN_SHARE_OF_ALONE),
    )
    speedup = statistics.median(wall for wall, _ in one) / statistics.median(many)
    yield Row(
        *(f"{config.processes} processes against one, wall time, {megabytes:.0f} MB", f"{speedup:.2f}"),
        *(f"{MIN_SPEEDUP}", speedup >= MIN_SPEEDUP),
    )


def alone_cpu_seconds(corpus: Path, payload: bytes) -> float:
    """Return the CPU seconds of the tokenizer on texts in memory, without anything around it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_str(json.loads(payload)["tokenizer.json"])
    texts = [json.loads(line)["text"] for line in corpus.open(encoding="utf-8")]
    began = time.process_time()
    for start in range(0, len(texts), 50):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + 50], add_special_tokens=False):
            assert encoding.ids is not None
    return time.process_time() - began


TIMED = """
import json, os, sys, time
from pathlib import Path
from spes_p2p.data.tokenise import Settings, tokenise
folder, corpus, payload, size, processes = sys.argv[1:]
settings = Settings(Path(folder), "", Path(payload).read_bytes(), int(size), "uint16", "text", 2**32, False, 500,
                    int(processes))
began, before = time.monotonic(), sum(os.times()[:4])
tokenise([Path(corpus)], settings, lambda progress: None)
print(json.dumps([time.monotonic() - began, sum(os.times()[:4]) - before]))
"""
"""In a process of its own: one that is spawned imports its parent's main module, here with torch."""


def timed(folder: Path, corpus: Path, payload: bytes, size: int, processes: int) -> tuple[float, float]:
    """Return wall and CPU seconds of tokenising a file; the start of processes counts, their CPU seconds do not."""
    file = folder.with_suffix(".payload")
    file.write_bytes(payload)
    words = [sys.executable, "-c", TIMED, str(folder), str(corpus), str(file), str(size), str(processes)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    wall, cpu = json.loads(done.stdout)
    return wall, cpu


def windows(folder: Path, payload: bytes) -> Row:
    """Compare reading a batch of windows with the training step on it, both warm."""
    shards = folder / "one-0"
    run = RunConfig(
        model=MODEL,
        data=DataConfig(source="files", paths=[shards], sequence_length=SEQUENCE),
        train=TrainConfig(batch_size=BATCH),
    )
    tokenizer = resolve_tokenizer(run.data, [], folder)
    source = train_sources(run.data, tokenizer, paths=[], cache=folder)(0)
    trainer = build_trainer(run, len(tokenizer), source, Ranks("cpu"))
    anchors = Anchors(run, {kind: layout.numel for kind, layout in trainer.layouts.items()})
    trainer.load(build_initial(run, len(tokenizer), anchors, trainer.layouts))
    reads, steps = [], []
    for _ in range(6):
        began = time.process_time()
        source.next_batch(BATCH)
        reads.append(time.process_time() - began)
        began = time.process_time()
        trainer.step(1e-4)
        steps.append(time.process_time() - began)
    trainer.close()
    share = statistics.median(reads[1:]) / statistics.median(steps[1:])
    figure = f"reading {BATCH} windows of {SEQUENCE}, share of a training step (CPU time, {MODEL.hidden_size} wide)"
    return Row(figure, f"{share:.3%}", f"< {MAX_WINDOW_SHARE:.0%}", share < MAX_WINDOW_SHARE)


def memory(config: DataBenchmarkConfig, folder: Path, corpus: Path) -> Row:
    """Tokenise a large file with the command, and watch the memory of all its processes."""
    words = [sys.executable, "-m", "spes_p2p", "tokenize", "--file-glob", str(corpus), "--tokenizer"]
    words += [str(folder / "tokenizer"), "--output-prefix", f"{folder}/large/", "--processes", str(config.processes)]
    process = psutil.Popen([*words, "--cache", str(folder)], cwd=ROOT, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(_pss, [process, *_children(process)])))
        try:
            process.wait(POLL_SECONDS)
        except psutil.TimeoutExpired:
            continue
    assert process.returncode == 0
    figure = f"memory (PSS of all processes) of {config.processes} processes for {corpus.stat().st_size / MB:,.0f} MB"
    return Row(figure, f"{peak / MB:.0f} MB", f"{MAX_MEGABYTES} MB", peak <= MAX_MEGABYTES * MB)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _pss(process: psutil.Process) -> int:
    """Return a process's share of memory; 0 once it has ended."""
    try:
        full: Any = process.memory_full_info()
        return full.pss
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return 0


if __name__ == "__main__":
    entry_point(DataBenchmarkConfig, main)
