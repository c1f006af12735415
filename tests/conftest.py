"""What all tests share: no network, one thread per process, random draws, markers, lanes."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import sys
import zlib
from collections.abc import Iterator

# Before anything imports torch or transformers, which read these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what runs in its background with Ctrl-C ignored, and all that starts from there inherits it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import settings

# Machines that share their cores make any deadline per example a coin toss; pytest-timeout bounds the test.
settings.register_profile("full", deadline=None, max_examples=50, print_blob=True)
# What every change must pass draws the same each time: a rare seed that fails is the full lane's to find.
settings.register_profile("commit", settings.get_profile("full"), max_examples=15, derandomize=True)


BROWSERS = "chromium", "chromium-browser", "google-chrome"


def is_commit_lane(config: pytest.Config) -> bool:
    return config.getoption("markexpr") == "not full"


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("commit" if is_commit_lane(config) else "full")


@pytest.fixture(autouse=True)
def levels_of_loggers() -> Iterator[None]:
    """Return to each logger the level that it had: a command that a test runs in this process sets its own."""
    loggers = [logging.getLogger(name) for name in ("", "spes_p2p", "hivemind")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def virtual_worlds() -> Iterator[None]:
    """End the worlds of a test's virtual peers; those of wider fixtures live on."""
    virtual = sys.modules.get("virtual")
    before = len(virtual.World.opened) if virtual is not None else 0
    yield
    for world in virtual.World.opened[before:] if virtual is not None else ():
        world.close()
        virtual.World.opened.remove(world)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this test's random draws, printed with a failure; SPES_TEST_SEED sets one.

    In the commit lane it is a hash of the test's name, otherwise a fresh one.
    """
    if chosen := os.environ.get("SPES_TEST_SEED"):
        value = int(chosen)
    elif is_commit_lane(request.config):
        value = zlib.crc32(request.node.nodeid.encode()) >> 1
    else:
        value = secrets.randbits(31)
    print(f"SPES_TEST_SEED={value}")
    return value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("browser") and not any(map(shutil.which, BROWSERS)):
            item.add_marker(pytest.mark.skip(reason="no Chromium; apt-get install chromium"))
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
