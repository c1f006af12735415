"""Other ways to train the same model, each in one process, measured on the swarm's own held-out text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import LongTensor
from transformers.utils.logging import disable_progress_bar

from benchmarks.cluster import LocalCluster
from benchmarks.tasks import BaselineTask, Subject
from spes_p2p.commands.evaluate import load_checkpoint
from spes_p2p.data.packing import TokenSource
from spes_p2p.model.build import build_slot_model, stock_model
from spes_p2p.model.loss import held_out_loss
from spes_p2p.optim.schedule import learning_rate
from spes_p2p.presentation import say
from spes_p2p.training.ranks import Ranks
from spes_p2p.training.trainer import Trainer

AT_ONCE = 2
DEADLINE_SECONDS = 3 * 3600.0
CENTRALISED, SOLO = "one process, whole batch", "solo peer, all slots"


class Together:
    """Batches of several sources put together, step by step; a `TokenSource`.

    Args:
        sources: As many as divide the batches asked for.
    """

    def __init__(self, sources: Sequence[TokenSource]) -> None:
        self._sources = sources

    def next_batch(self, num_sequences: int) -> LongTensor:
        """Return `[B, T + 1]`, the same number of sequences of each source."""
        share, rest = divmod(num_sequences, len(self._sources))
        assert not rest, f"{num_sequences} sequences do not split over {len(self._sources)} sources"
        return cast(LongTensor, torch.cat([source.next_batch(share) for source in self._sources]))

    def state_dict(self) -> dict[str, Any]:
        """Return each source's place."""
        return {str(index): source.state_dict() for index, source in enumerate(self._sources)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a place that `state_dict` returned."""
        for index, source in enumerate(self._sources):
            source.load_state_dict(state[str(index)])


# ---------------------------------------------------------------------- parent


def same_memory(slots: Sequence[int]) -> str:
    """Return the name of the solo peer that trains only these slots."""
    return f"solo peer, {len(slots)} slots"


def measure_baselines(
    subject: Subject, folder: Path, steps: Sequence[int], peer_slots: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Train all baselines, at most AT_ONCE at a time; return what `train_baseline` returned, by name.

    Args:
        subject: The experiment.
        folder: For logs.
        steps: Local steps of a peer in each round.
        peer_slots: Slots that peer 0 held.

    Raises:
        SpesError: a process failed; the others are stopped.
    """
    every = range(subject.run.model.num_experts)
    kinds = {CENTRALISED: (every, subject.peers), SOLO: (every, 1), same_memory(peer_slots): (peer_slots, 1)}
    with LocalCluster(folder) as cluster:
        for number, (name, (slots, num_sources)) in enumerate(kinds.items(), start=1):
            cluster.wait_until(lambda: cluster.num_running() < AT_ONCE, DEADLINE_SECONDS, "a baseline to end")
            say(f"  {number} of {len(kinds)}: {name}, {sum(steps)} steps")
            task = BaselineTask(subject=subject, slots=tuple(slots), num_sources=num_sources, steps=tuple(steps))
            cluster.start(name.replace(", ", "-").replace(" ", "-"), task)
        results = cluster.results(DEADLINE_SECONDS)
    return dict(zip(kinds, results, strict=True))


def start_loss(subject: Subject) -> float:
    """Return the held-out loss of the run's random start."""
    run = subject.run
    module = stock_model(run.model, len(subject.tokenizer()), run.data.sequence_length, run.seed)
    return held_out_loss(module, subject.held_out())


def checkpoint_loss(subject: Subject, directory: Path) -> float:
    """Return the held-out loss of a Hugging Face checkpoint, as the stock class computes it."""
    disable_progress_bar()
    return held_out_loss(load_checkpoint(directory)[0], subject.held_out())


# ---------------------------------------------------------------------- child


def train_baseline(task: BaselineTask) -> dict[str, Any]:
    """Train; return the held-out loss at the start and after each round's steps, the tokens by then, the seconds."""
    subject, run = task.subject, task.subject.run
    train = run.train.model_copy(update={"batch_size": run.train.batch_size * task.num_sources})
    model = build_slot_model(
        run.model,
        vocab_size=len(subject.tokenizer()),
        sequence_length=run.data.sequence_length,
        seed=run.seed,
        claimed=task.slots,
        storage=run.frozen_storage,
    )
    data = Together([subject.source(peer) for peer in range(task.num_sources)])
    trainer = Trainer(model, train, data, Ranks("cpu"))
    held_out = subject.held_out()
    losses, tokens, seconds = [held_out_loss(model.module, held_out)], [0], 0.0
    for number, num_steps in enumerate(task.steps):
        began, done = time.monotonic(), 0
        for step in range(num_steps):
            done += trainer.step(learning_rate(train, number + step / num_steps, run.round.total)).tokens
        seconds += time.monotonic() - began
        tokens.append(tokens[-1] + done)
        losses.append(held_out_loss(model.module, held_out))
    return {"losses": losses, "tokens": tokens, "train_seconds": seconds}
