"""Runs in processes of their own: all are made, one's end is only its own, and none is left behind."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import struct
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from spes_p2p.commands.simulate import Failure, Job, News, Worker, last_words, run_all, run_job
from spes_p2p.errors import ConfigError
from spes_p2p.sim.scenario import Scenario
from spes_p2p.sim.simulator import Evaluation
from spes_p2p.sim.sweep.results import RunResult
from spes_p2p.sim.sweep.settings import load_sweep
from tests.unit.sweep.sweeps import PAIR, SOLO, write_sweep

ENDLESS = {**SOLO, "run": {"round": {"total": 1_000_000}}, "held_out_tokens": 16}


def job(folder: Path, name: str, **settings: Any) -> Job:
    sweep = load_sweep(write_sweep(folder, {name: settings}))
    log = folder / "logs" / f"{name}.log"
    return Job(name, 0, sweep.variants[name].scenarios[0], 1, folder / "cache", log)


class Heard:
    """What was said of each run."""

    def __init__(self) -> None:
        self.news: dict[str, list[News]] = {}

    def __call__(self, job: Job, news: News, seconds: float) -> None:
        assert seconds > 0
        self.news.setdefault(job.variant, []).append(news)


@pytest.mark.full  # three processes that import torch; only a change of `run_all` can break it
def test_a_run_that_fails_is_reported_and_the_others_go_on(tmp_path):
    good = job(tmp_path, "good", **PAIR)
    no_text = job(tmp_path, "no_text", **PAIR, text=[str(tmp_path / "absent.txt")])
    our_fault = dataclasses.replace(job(tmp_path, "our_fault", **SOLO), cache="no path")  # type: ignore[arg-type]
    heard = Heard()
    run_all([our_fault, no_text, good], 2, heard)
    assert not multiprocessing.active_children()
    [bad_text], [fault] = heard.news["no_text"], heard.news["our_fault"]
    assert isinstance(bad_text, Failure) and "absent.txt" in bad_text.reason
    assert "base.text" in bad_text.reason and "--text" not in bad_text.reason
    assert isinstance(fault, Failure) and "AttributeError" in fault.reason and str(our_fault.log) in fault.reason
    assert "Traceback" in our_fault.log.read_text()
    *evaluations, result = heard.news["good"]
    assert isinstance(result, RunResult) and [type(one) for one in evaluations] == [Evaluation] * 2
    alone = run_job(good, lambda news: None)
    assert result.evaluations == alone.evaluations and result.peers == alone.peers, "a process changes no number"
    assert "round 2" in good.log.read_text()


@pytest.mark.full
def test_a_run_that_is_killed_is_reported(tmp_path):
    heard = Heard()

    def on_news(job: Job, news: News, seconds: float) -> None:
        heard(job, news, seconds)
        if isinstance(news, Evaluation):
            [child] = multiprocessing.active_children()
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)

    run_all([job(tmp_path, "endless", **ENDLESS)], 1, on_news)
    last = heard.news["endless"][-1]
    assert isinstance(last, Failure) and "SIGKILL" in last.reason and "--workers" in last.reason


def test_a_runs_last_words_are_its_exception_and_not_the_end_of_a_long_message():
    with pytest.raises(ValidationError) as raised:
        Scenario(peers="many")  # type: ignore[arg-type]
    log = "I round 1\n" + "".join(traceback.format_exception(raised.value)) + "\n"
    assert "errors.pydantic.dev" in log.splitlines()[-2]
    assert last_words(log) == "pydantic_core._pydantic_core.ValidationError: 1 validation error for Scenario"
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise RuntimeError("second\n  with more of it") from error
    except RuntimeError as error:
        assert last_words("".join(traceback.format_exception(error))) == "RuntimeError: second"
    assert last_words("I round 1\nI round 2\n\n") == "I round 2"
    assert last_words("") == ""


def test_last_words_of_an_earlier_attempt_are_not_this_ones(tmp_path):
    quiet = dataclasses.replace(job(tmp_path, "endless", **ENDLESS))
    quiet.log.parent.mkdir()
    quiet.log.write_text("Traceback (most recent call last):\nKeyError: of yesterday\n")
    worker = Worker(quiet)
    assert worker._last_words().startswith("ended with exit code")
    worker.stop(0)


def test_a_run_that_dies_amid_a_message_is_reported(tmp_path):
    worker = Worker(job(tmp_path, "endless", **ENDLESS))
    theirs = worker.pipe
    reader, writer = os.pipe()
    os.write(writer, struct.pack("!i", 100) + b"three")
    os.close(writer)
    worker.pipe = Connection(reader)
    worker.terminate()
    news = worker.news()
    worker.stop(10)
    theirs.close()
    assert isinstance(news, Failure) and "SIGTERM" in news.reason


@pytest.mark.full
@pytest.mark.parametrize("error", [KeyboardInterrupt, ConfigError])
def test_whatever_ends_the_parent_ends_the_runs(tmp_path, error):
    def on_news(job: Job, news: News, seconds: float) -> None:
        raise error

    with pytest.raises(error):
        run_all([job(tmp_path, "endless", **ENDLESS)], 1, on_news)
    assert not multiprocessing.active_children()
