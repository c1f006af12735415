"""The swarm's model as a monitor has it: pulled, evaluated on held-out text, written as a checkpoint."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import LongTensor

from spes_p2p.errors import ExchangeError
from spes_p2p.model.build import hf_config
from spes_p2p.model.export import save_checkpoint
from spes_p2p.model.loss import held_out_loss
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.manifest import Manifest
from spes_p2p.swarm.roster import SHARED, slot_name
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.build import WholeModel

log = logging.getLogger(__name__)

Inventory = Mapping[str, Mapping[str, Version]]


@dataclass(frozen=True)
class Pulled:
    """What a pull brought.

    Attributes:
        round: Round of the shared parameters.
        stale: Round by slot, of slots whose newest version anywhere is older.
    """

    round: int
    stale: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Whom to ask for what.

    Attributes:
        current: Peers by name, for versions of the round wanted.
        older: Peers by name by round, for slots that nobody has of that round yet, or ever will.
    """

    current: dict[str, list[str]]
    older: dict[int, dict[str, list[str]]]


class Archive:
    """The whole model in fp32 on the CPU, at first as the run's seed draws it: the anchor of round 0.

    Args:
        swarm: Where versions come from.
        manifest: The run's.
        batches: Gives the held-out batches `[B, T + 1]`, when first needed; None evaluates nothing.

    Attributes:
        anchors: Of the run's sizes, and empty: what tells bundles' sizes, and advances them by published deltas.
    """

    def __init__(
        self,
        swarm: HivemindSwarm,
        manifest: Manifest,
        batches: Callable[[], Sequence[LongTensor]] | None = None,
    ) -> None:
        run = manifest.config
        self._swarm, self._run, self._vocab_size = swarm, run, manifest.vocab_size
        self._make_batches = batches
        self._batches: Sequence[LongTensor] | None = None if batches is not None else ()
        self._model = WholeModel(run, manifest.vocab_size)
        self.anchors = Anchors(run, self._model.numels)
        self.round = 0

    @property
    def bundle_numel(self) -> dict[str, int]:
        """Elements of a published bundle by kind: weights, then its outer optimizer's momentum if that has any."""
        sizes = self.anchors.bundle_numel()
        return {kind: sizes[kind] for kind in self._model.numels}

    @property
    def has_versions(self) -> bool:
        """Whether the versions directory holds a model to load."""
        return SHARED in self._swarm.versions()

    def pull(self, round: int, holders: Mapping[int, Sequence[str]], peers: Sequence[str]) -> Pulled:
        """Bring the model to `round`, or later where the swarm has moved on.

        A slot that nobody has of that round (an orphan, or one whose holder died) comes as the newest there is.

        Args:
            round: Round wanted.
            holders: Peers that train each slot.
            peers: Everybody to ask.

        Raises:
            ExchangeError: the shared parameters are not to be had; the model stays as it was.
        """
        timeout = self._run.round.exchange_seconds
        inventory = self._swarm.inventory(peers) if peers else {}
        plan = plan_pull(round, inventory, holders, self._run.model.num_experts)
        failures = dict(self._swarm.pull(plan.current, min_round=round, timeout=timeout))
        if SHARED in failures or SHARED not in plan.current:
            raise ExchangeError(f"no shared version of round {round}: {failures.get(SHARED, 'nobody has it')}")
        for older, wanted in sorted(plan.older.items()):
            self._pull_older(older, {n: p for n, p in wanted.items() if n in failures or n not in plan.current})
        for name, reason in failures.items():
            log.warning("no version of %s of round %d: %s", name, round, reason)
        return self.load()

    def _pull_older(self, round: int, wanted: Mapping[str, Sequence[str]]) -> None:
        own = self._swarm.versions()
        missing = {name: peers for name, peers in wanted.items() if name not in own or own[name].round < round}
        if missing:
            failures = self._swarm.pull(missing, min_round=round, timeout=self._run.round.exchange_seconds)
            for name, reason in failures.items():
                log.warning("no version of %s, not even of round %d: %s", name, round, reason)

    def load(self) -> Pulled:
        """Load what the versions directory holds; slots that it lacks stay as they are.

        Raises:
            ExchangeError: it lacks the shared parameters, or a file is damaged.
        """
        rounds = self._model.load(self._swarm)
        self.round = self._swarm.versions()[SHARED].round
        return Pulled(self.round, {slot: number for slot, number in rounds.items() if number < self.round})

    def evaluate(self) -> float | None:
        """Return the model's held-out loss, nats per token; None if there is nothing to evaluate on.

        Raises:
            ConfigError, DataError: the held-out text cannot be read.
        """
        if self._batches is None:
            assert self._make_batches is not None
            self._batches = self._make_batches()
        return held_out_loss(self._model.module, self._batches) if self._batches else None

    def save(self, directory: Path, tokenizer: Any = None) -> None:
        """Write the model as a Hugging Face checkpoint, whole or not at all; see `save_checkpoint`."""
        config = hf_config(self._run.model, self._vocab_size, self._run.data.sequence_length)
        save_checkpoint(config, self._model.stock_state_dict(), directory, tokenizer)


def plan_pull(round: int, inventory: Inventory, holders: Mapping[int, Sequence[str]], num_slots: int) -> Plan:
    """Return whom to ask for the model of `round`.

    Only peers that hold the shared version which most peers hold are asked at all: one that tells another story about
    `shared` would tell it about slots too.
    """
    offers = {
        peer: (versions[SHARED].round, versions[SHARED].digest)
        for peer, versions in inventory.items()
        if SHARED in versions and versions[SHARED].round >= round
    }
    counts = Counter(offers.values())
    # A swarm on its way from one round to the next tells two stories, both true; the older one is whole already.
    agreed = min(counts, key=lambda offer: (-counts[offer], offer)) if counts else None
    trusted = sorted(peer for peer, offer in offers.items() if offer == agreed)
    plan = Plan(current={SHARED: trusted} if trusted else {}, older={})
    for slot in range(num_slots):
        name = slot_name(slot)
        rounds = {peer: inventory[peer][name].round for peer in trusted if name in inventory[peer]}
        if fresh := [peer for peer, number in rounds.items() if number >= round]:
            plan.current[name] = fresh
            continue
        if about_to := [peer for peer in holders.get(slot, ()) if peer in trusted]:
            plan.current[name] = about_to
        if rounds:
            newest = max(rounds.values())
            plan.older.setdefault(newest, {})[name] = [peer for peer, number in rounds.items() if number == newest]
    return plan
