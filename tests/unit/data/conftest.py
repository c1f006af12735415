"""A small corpus of its own text and a tokenizer trained on it."""

from __future__ import annotations

import json
import random
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


@pytest.fixture(scope="session")
def tokenizer():
    return train_bpe(sentences(random.Random(1), 50), 300)


@pytest.fixture
def files_data() -> DataConfig:
    return DataConfig(source="files", sequence_length=16, held_out_fraction=0.2)


@pytest.fixture
def corpus(tmp_path: Path, seed: int) -> Path:
    """120 documents in one jsonl file."""
    return write_rows(tmp_path / "corpus" / "rows.jsonl", sentences(random.Random(seed), 120))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A hub without data sets; a test writes them to `hub.root/OWNER/NAME/`."""
    with hub_of(tmp_path / "hub", monkeypatch) as server:
        yield server
