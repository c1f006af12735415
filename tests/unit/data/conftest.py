"""A small corpus of its own text and a tokenizer trained on it."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from hub_server import hub_of

from spes_p2p.config import DataConfig
from spes_p2p.data.tokenizer import train_bpe

TEXT = "the peer round slot expert swarm token anchor delta claim holder version seed digest model router"


def sentences(generator: random.Random, num_documents: int, num_words: int = 60) -> list[str]:
    """Documents that all differ."""
    words = TEXT.split()
    return [
        f"Document {index}. " + " ".join(generator.choices(words, k=generator.randint(num_words // 2, num_words)))
        for index in range(num_documents)
    ]


def write_rows(path: Path, texts: list[str], field: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def older(path: Path, data: bytes) -> None:
    """Put a file of an older date in place, as `mv`, `cp -p`, `rsync -t` and an unpacked archive do."""
    when = path.stat().st_mtime_ns - 10**12
    other = path.with_name("other.part")
    other.write_bytes(data)
    os.utime(other, ns=(when, when))
    other.replace(path)


def in_place(path: Path, data: bytes) -> None:
    """Write a file anew, and give it its times back."""
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def copied(path: Path) -> None:
    shutil.copy2(path, path.with_name("other.part"))
    path.with_name("other.part").replace(path)


SAME = {
    "touch": lambda path: os.utime(path),
    "cp -p": copied,
    "git checkout": lambda path: path.write_bytes(path.read_bytes()),
    "mv of an older copy": lambda path: older(path, path.read_bytes()),
}
"""What happens to a file and leaves its content as it is."""
EDITS = {"an older file": older, "the old times": in_place, "new times": lambda path, data: path.write_bytes(data)}
"""How a file comes to have other content of the same size."""


@pytest.fixture(scope="session")
def tokenizer():
    return train_bpe(sentences(random.Random(1), 50), 300)


@pytest.fixture
def files_data():
    return DataConfig(source="files", sequence_length=16, held_out_fraction=0.2)


@pytest.fixture
def corpus(tmp_path, seed):
    """120 documents in one jsonl file."""
    return write_rows(tmp_path / "corpus" / "rows.jsonl", sentences(random.Random(seed), 120))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub without data sets; a test writes them to `hub.root/OWNER/NAME/`."""
    with hub_of(tmp_path / "hub", monkeypatch) as server:
        yield server
