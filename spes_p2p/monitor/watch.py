"""The watch: poll the swarm's records, feed the sinks, evaluate each new round, and save the last round's model."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from enum import Enum
from statistics import fmean
from typing import NamedTuple

import torch
from torch import LongTensor, Tensor

from spes_p2p.config import RoundConfig, RunConfig
from spes_p2p.config.commands import MonitorConfig
from spes_p2p.data.conversations import Prompt
from spes_p2p.errors import DataError, ExchangeError
from spes_p2p.model.adapted import Base
from spes_p2p.model.loss import held_out_loss, token_ids
from spes_p2p.model.sampling import sampled_continuation
from spes_p2p.monitor.view import Sample, SwarmView, fold, look
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.manifest import Manifest, Revisions
from spes_p2p.swarm.names import SHARED, VectorName, by_reason
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.build import WholeModel

log = logging.getLogger(__name__)

VANISHED_LEASES = 2
"""Lease times without a single claim after which the swarm counts as gone."""
RETRY_SECONDS = 5.0
HEALS = {"heals": True}
"""Marks warnings of which one a minute is enough, whatever their values."""
PROMPT_TOKENS, SAMPLE_TOKENS, REPLY_TOKENS = 24, 40, 64
LOGGED_CHARACTERS = 200
SAMPLE_SECONDS = 10.0
"""Longest time for one sample; the slower the model, the shorter its text."""


class HeldOut(NamedTuple):
    """Held-out loss in nats per token."""

    loss: float
    """The mean over the sources."""
    sources: Mapping[str, float]
    """Of each source, if the run mixes some."""


_Taken = tuple[int, HeldOut | None, tuple[Sample, ...]]
"""Round of the archive, its held-out loss and its samples."""


class Ending(Enum):
    """How a watch ended."""

    FINISHED = "finished: the last round is archived"
    VANISHED = "ended early: all peers are gone"
    CUT_OFF = "cut off: this monitor's own p2pd or DHT process has died"
    STOPPED = "stopped by its user before the last round"
    TERMINATED = "ended by SIGTERM before the last round"


States = dict[VectorName, tuple[int, str]]
"""Round and digest of a version, by name."""


def plan_pull(
    body: Body, inventory: Mapping[str, Mapping[str, Version]], *, kept: bool = False
) -> tuple[States, States]:
    """Return the model that a certificate names, and older versions of slots whose certified one no peer lists.

    Slots are in fp32 or in their kept forms. Those that were never committed are left out, unless a peer lists them:
    the run's seed makes them.
    """
    named: States = {SHARED: (body.round, body.shared)}
    for slot, state in enumerate(body.slots):
        name = VectorName.of_slot(slot)
        named |= {name.kept: (state.round, state.kept or "")} if kept else {name: (state.round, state.digest)}
    current, older = States(), States()
    for name, (round, digest) in named.items():
        listed = Counter((each[name].round, each[name].digest) for each in inventory.values() if name in each)
        if digest:
            current[name] = round, digest
        elif initial := [state for state in listed if state[0] == round]:
            current[name] = max(initial, key=lambda state: listed[state])
        before = [state for state in listed if state[0] < body.round]
        if name != SHARED and before and all(state[1] != digest for state in listed):
            older[name] = max(before, key=lambda state: (state[0], listed[state]))
    return current, older


def peers_of(view: SwarmView) -> list[str]:
    """Return the peers that have not left."""
    return [peer.peer_id for peer in view.peers.values() if peer.state != "left"]


def pull_round(swarm: HivemindSwarm, run: RunConfig, body: Body, peers: Sequence[str], *, in_fp32: bool = True) -> None:
    """Fetch the versions that a certificate names, slots in fp32 or in the run's kept form if it has one.

    A slot whose certified version no peer has any more comes in its kept form, or else in its newest other version.

    Raises:
        ExchangeError: no peer sent the shared parameters.
    """
    inventory = swarm.inventory(peers) if peers else {}
    has_kept, timeout = run.kept_form is not None, run.round.exchange_seconds
    current, older = plan_pull(body, inventory, kept=has_kept and not in_fp32)
    failures = dict(swarm.pull(current, peers, timeout=timeout))
    if SHARED in failures or SHARED not in current:
        raise ExchangeError(f"no shared version of round {body.round}: {failures.get(SHARED, 'no peer has it')}")
    if has_kept and in_fp32:
        came = {name.kept for name in current if name not in failures and name != SHARED}
        current, older = plan_pull(body, inventory, kept=True)
        current, older = ({n: s for n, s in each.items() if n not in (SHARED, *came)} for each in (current, older))
        without = {name: why for name, why in failures.items() if name.kept not in current}
        failures = without | dict(swarm.pull(current, peers, timeout=timeout))
    own = swarm.versions()
    again = {name: state for name, state in older.items() if name in failures or name not in current}
    missing = {name: state for name, state in again.items() if name not in own or own[name].round < state[0]}
    for reason, names in by_reason(swarm.pull(missing, peers, timeout=timeout)).items():
        log.warning("no other version of %s either: %s", names, reason, extra=HEALS)
    for reason, names in by_reason(failures).items():
        log.warning("no certified version of %s, in round %d: %s", names, body.round, reason, extra=HEALS)


class Archive:
    """The swarm's whole model in fp32 on the CPU: pulled, and evaluated on held-out text.

    At first it is the anchor of round 0, as the run's seed draws it.

    Args:
        held_out: Makes the held-out batches `[B, T + 1]` of each source when the first evaluation needs them, under an
            empty name if the run mixes none; without sources, nothing is evaluated.
        prompts: Makes the beginnings of conversations to reply to; without any, samples continue held-out text.
        base: The frozen weights under the run's adapters, if it has any.
        in_fp32: Whether slots are fetched in fp32 in every round, and not after the last one only.
    """

    def __init__(
        self,
        swarm: HivemindSwarm,
        manifest: Manifest,
        held_out: Callable[[], Mapping[str, Sequence[LongTensor]]],
        decode: Callable[[list[int]], str],
        prompts: Callable[[], Sequence[Prompt]],
        base: Base | None,
        *,
        in_fp32: bool,
    ) -> None:
        self._swarm = swarm
        self._in_fp32 = in_fp32
        self._make_prompts = prompts
        self._prompts: Sequence[Prompt] | None = None
        self._run = manifest.config
        self._held_out = held_out
        self._decode: Callable[[list[int]], str] | None = decode
        self._batches: Mapping[str, Sequence[LongTensor]] | None = None
        self._model = WholeModel(self._run, manifest.vocab_size, base=base)
        self.anchors = Anchors(self._run, self._model.numels)
        """Sizes of the run's versions, and how a delta advances one; holds no values."""
        self.round = 0
        """Of the shared parameters."""

    def pull(self, body: Body, peers: Sequence[str], *, is_last: bool) -> None:
        """Bring the model to what a certificate names, as `pull_round` does; in fp32 what ends the run.

        Raises:
            ExchangeError: no peer sent the shared parameters, or a file is damaged; the model stays as it was.
        """
        pull_round(self._swarm, self._run, body, peers, in_fp32=self._in_fp32 or is_last)
        rounds = self._model.load(self._swarm.versions(), self._swarm.load)  # slots without a version keep their values
        self.round = self._swarm.versions()[SHARED].round
        if stale := {slot: number for slot, number in rounds.items() if number < self.round}:
            log.warning("round %d: slots of older rounds: %s", self.round, stale, extra=HEALS)

    def evaluate(self) -> HeldOut | None:
        """Return the model's held-out loss; None without held-out text.

        Raises:
            ConfigError, DataError: the held-out text cannot be read.
        """
        if self._batches is None:
            self._batches = self._held_out()
        found = {name: held_out_loss(self._model.module, each) for name, each in self._batches.items() if each}
        return HeldOut(fmean(found.values()), {name: loss for name, loss in found.items() if name}) if found else None

    def samples(self) -> tuple[Sample, ...]:
        """Reply to the beginnings of conversations, or continue the first held-out sequence."""
        if not self._batches or self._decode is None:
            return ()
        try:
            if self._prompts is None:
                self._prompts = self._make_prompts()
            first = next(iter(self._batches.values()))
            return tuple(map(self._reply, self._prompts)) or (self._continuation(first[0][0]),)
        except DataError as error:
            log.warning("no samples of this run's text: %s", error)
            self._decode = None
            return ()

    def _continuation(self, marked_T: Tensor) -> Sample:
        assert self._decode is not None
        tokens_T = token_ids(marked_T)
        split = min(PROMPT_TOKENS, len(tokens_T) // 2)
        prompt_T, truth_T = tokens_T[:split], tokens_T[split : split + SAMPLE_TOKENS]
        text = self._sampled(prompt_T, len(truth_T))
        return Sample(*(self._decode(tokens) for tokens in (prompt_T.tolist(), text, truth_T.tolist())))

    def _sampled(self, prompt_T: Tensor, most: int, ends: Collection[int] = ()) -> list[int]:
        """Draw as `spes chat` does, in each round from the same seed, so that only the model differs."""
        torch.manual_seed(0)
        limits = {"max_new_tokens": most, "max_time": SAMPLE_SECONDS}
        return sampled_continuation(self._model.module, prompt_T, ends=ends, **limits)

    def _reply(self, prompt: Prompt) -> Sample:
        assert self._decode is not None
        own_ends = start.end_tokens if (start := self._run.model.start) else ()
        most = min(REPLY_TOKENS, self._run.data.sequence_length - len(prompt.ids))
        ids = self._sampled(torch.tensor(prompt.ids), most, {prompt.end_of_text, *own_ends})
        reply = Sample(self._decode(prompt.ids), self._decode(ids), prompt.truth)
        log.info("round %d: %s -> %s", self.round, reply.prompt[-LOGGED_CHARACTERS:], reply.text[:LOGGED_CHARACTERS])
        return reply


class Watch:
    """Follows a run to its end.

    A model is pulled and evaluated in another thread while polling goes on: each report replaces the peer's previous
    one in the DHT, so a report that is not read in time is lost.

    Args:
        swarm: The monitor's own, in client mode. Its watchdog tells silence of the swarm from a failure of this
            machine: without its DHT process a monitor reads no records, and without p2pd it finds none.
        archive: The swarm's model; used by one thread at a time.
        view: Where to start: empty, or replayed.
        save: Writes the model of a round as a checkpoint, and its held-out loss with it.
        evaluated: Is told each round whose model has been evaluated, except the first and the last, and its held-out
            loss, in the thread that uses the archive.
    """

    def __init__(
        self,
        swarm: HivemindSwarm,
        revisions: Revisions,
        archive: Archive,
        show: Callable[[SwarmView], None],
        view: SwarmView,
        *,
        save: Callable[[int, float | None], None],
        evaluated: Callable[[int, float | None], None] | None = None,
        settings: MonitorConfig,
    ) -> None:
        self._swarm = swarm
        self._revisions = revisions
        self._archive = archive
        self._show = show
        self._save = save
        self._evaluated = evaluated
        self._evaluate_every = settings.evaluate_every
        self._poll_seconds = settings.poll_seconds
        self.view = view
        self._archived = 0 if 0 in view.held_out else -1
        self._job: Future[_Taken] | None = None
        self._retry_at = 0.0
        self._seen_at = time.monotonic()

    def run(self) -> Ending:
        """Follow the run until its last round is archived, the swarm is gone or out of reach, or the user stops.

        Raises:
            ConfigError, DataError: the held-out text cannot be read, or the checkpoint cannot be written.
        """
        while True:
            self._revisions.look()
            self.view = replace(self.view, total_rounds=self._rounds.total)
            self._poll()
            if self._collect() >= self._rounds.total:
                return Ending.FINISHED
            if self._job is None and (ending := self._lost()):
                return ending
            self._start_job()
            if self._swarm.wait(self._poll_seconds):
                return Ending.STOPPED

    @property
    def _rounds(self) -> RoundConfig:
        return self._revisions.run.round

    def _lost(self) -> Ending | None:
        """Tell whether the swarm is gone or out of reach; called without a job, since a job ends by itself."""
        is_silent = time.monotonic() - self._seen_at > VANISHED_LEASES * self._rounds.lease_seconds
        watchdog = self._swarm.watchdog
        if watchdog.check() if is_silent else watchdog.death:
            return Ending.CUT_OFF
        return Ending.VANISHED if is_silent else None

    def _poll(self) -> None:
        try:
            snapshot = look(self._swarm)
        except OSError:
            self._seen_at = time.monotonic()  # this says nothing of the swarm; the watchdog knows of a dead DHT
            log.warning("the DHT did not answer; reading its records again in %.1f s", self._poll_seconds)
            return
        if snapshot.claims:
            self._seen_at = time.monotonic()
        self.view = fold(self.view, snapshot)
        self._show(self.view)

    def _start_job(self) -> None:
        if self._job is not None or time.monotonic() < self._retry_at or not self._is_due():
            return
        number = self.view.published if self._archived >= 0 else 0
        peers = peers_of(self.view)
        job: Future[_Taken] = Future()
        self._job = job
        # A daemon, so that an interrupted monitor does not stay for a download's deadline.
        work = (job, lambda: self._take(number, peers))
        threading.Thread(target=_run, args=work, name="archive", daemon=True).start()

    def _is_due(self) -> bool:
        last, published, every = self._archived, self.view.published, self._evaluate_every
        if last < 0:
            return True
        return published > last and (published >= self._rounds.total or published // every > last // every)

    def _take(self, number: int, peers: Sequence[str]) -> _Taken:
        """Bring the archive to a round, evaluate it, and save it after the last round; in the job's thread."""
        if number > 0:
            last = self._swarm.last()  # the founder may have changed the number of rounds
            self._archive.pull(last, peers, is_last=last.round >= self._rounds.total)
        held_out = self._archive.evaluate()
        if self._archive.round >= self._rounds.total:
            self._save(self._archive.round, None if held_out is None else held_out.loss)
        elif self._archive.round > 0 and self._evaluated is not None:
            self._evaluated(self._archive.round, None if held_out is None else held_out.loss)
        return self._archive.round, held_out, self._archive.samples()

    def _collect(self) -> int:
        """Take the job's result if there is one; return the newest archived round."""
        if self._job is None or not self._job.done():
            return self._archived
        job, self._job = self._job, None
        try:
            number, held_out, samples = job.result()
        except (ExchangeError, OSError) as error:  # a TimeoutError is an OSError
            self._retry_at = time.monotonic() + RETRY_SECONDS
            said = str(error) or "peers took too long"
            log.warning("%s; trying again in %.0f s", said, RETRY_SECONDS, extra=HEALS)
            return self._archived
        self._archived = number
        if held_out is not None and number not in self.view.held_out:
            self.view = self.view.evaluated(number, held_out.loss, samples, held_out.sources)
            self._show(self.view)
        return self._archived


def _run(job: Future[_Taken], work: Callable[[], _Taken]) -> None:
    try:
        job.set_result(work())
    except BaseException as error:  # noqa: BLE001 - `result` raises it
        job.set_exception(error)
