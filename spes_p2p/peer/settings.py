"""The settings of a run: what its founder decides before there is a swarm, and what a machine must be able to."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from spes_p2p.config import AdapterConfig, PeerConfig, RoundConfig, RunConfig, check_machine
from spes_p2p.data.conversations import founding, num_tokens
from spes_p2p.data.hub import checkpoint_folder
from spes_p2p.data.packing import train_sources
from spes_p2p.data.remote import with_fetched
from spes_p2p.data.tokenizer import given, load_tokenizer, resolve_tokenizer, tokenizer_bytes, tokenizer_settings
from spes_p2p.data.tokenizer_document import open_document
from spes_p2p.errors import ConfigError
from spes_p2p.model.build import check_attention, check_build, hf_config, outline
from spes_p2p.model.peft_files import adapter_of, named_base
from spes_p2p.model.start import StartWeights, model_of, over_checkpoint
from spes_p2p.planner.memory import Setup
from spes_p2p.planner.size import run_size
from spes_p2p.planner.traffic import of_moments_round, round_traffic, rounds_for_links, transfer_seconds
from spes_p2p.presentation import size_text
from spes_p2p.swarm.exchange.protocol import MAX_DOCUMENT_BYTES
from spes_p2p.swarm.records import MAX_CLAIMED
from spes_p2p.training.build import with_adapter, with_digests
from spes_p2p.training.ranks import Ranks

log = logging.getLogger(__name__)

MANIFEST_ROOM = 2048
"""Bytes of a manifest beside the run's settings, more than it takes."""
RATE_OF_WEIGHTS, RATE_OF_ADAPTERS, WIDTH_OF_RATES = 2e-5, 2e-4, 2048
"""Learning rates of a trained model of that width."""
MIN_ROUND_TOKENS = 1024
STEPS_OF_PASS = 8
"""Least steps of a pass over the founder's conversations."""
LINKED_PEERS = 8
"""Peers that a new run's rounds are made for at least."""


def founder_settings(config: PeerConfig, run: RunConfig) -> tuple[RunConfig, PreTrainedTokenizerBase]:
    """Resolve a new run's tokenizer; shapes must fit and the corpus be readable before anything else happens."""
    run = _on_files(config, run)
    cache = config.cache
    source, hub_name = (None, None) if config.start_from is None else checkpoint_folder(config.start_from, model_of)
    if source is not None:
        run = over_checkpoint(run, source).model_copy(update={"adapter": _adapter(config, run, hub_name)})
        check_choices(config, run)
    elif config.adapter is not None or run.adapter is not None:
        raise ConfigError("adapters need a base: name a checkpoint with --from, or drop --adapter and run.adapter")
    corpus = with_fetched(config.corpus(run.data), cache)
    if source is None or run.data.tokenizer is not None:
        tokenizer = resolve_tokenizer(corpus, config.text, cache)
    else:
        tokenizer = given(run.data, load_tokenizer(source))
    if source is not None:
        run = _as_exported(run, tokenizer)
    open_document(tokenizer_bytes(tokenizer), f"data.tokenizer={run.data.tokenizer!r}")  # as those who join will
    hf_config(run.model, len(tokenizer), run.data.sequence_length)
    corpus = founding(corpus, tokenizer)
    # What is the founder's own is of no use to others.
    chosen = {name: getattr(corpus, name) for name in ("chat_template", "probe", "packing")}
    if run.data.tokenizer is not None and os.path.exists(run.data.tokenizer):  # guard: never
        chosen["tokenizer"] = Path(run.data.tokenizer).absolute().name
    run = run.model_copy(update={"data": run.data.model_copy(update={**chosen, "paths": []})})
    if source is not None:
        # Refuses files that lack a tensor of the model; no weight is read.
        StartWeights(source, outline(run.model, len(tokenizer), run.data.sequence_length))
    if (folder := config.adapter_folder) is not None:
        run = with_adapter(run, len(tokenizer), folder)
    run = for_link(config, run, len(tokenizer))
    num_bytes = len(json.dumps(run.model_dump(mode="json"))) + MANIFEST_ROOM
    if num_bytes > MAX_DOCUMENT_BYTES:  # no peer would fetch it
        raise ConfigError(
            f"the run's manifest would have {num_bytes} bytes, at most {MAX_DOCUMENT_BYTES}; shorten "
            f"data.chat_template or data.probe"
        )
    if run.data.source != "hub":
        train_sources(corpus, tokenizer, paths=config.text, cache=cache)(0)
    if source is not None:  # last, because it reads all weights
        run = _suited(run, num_tokens(corpus, tokenizer, cache))
        run = with_digests(run, len(tokenizer), source, hub_name)
    return run, tokenizer


def _as_exported(run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> RunConfig:
    """Return a run over a checkpoint with what its exports say of the tokenizer, and of the tokens that end a text."""
    start = run.model.start
    assert start is not None
    update: dict[str, Any] = {"tokenizer": tokenizer_settings(tokenizer)}
    if run.data.tokenizer is not None and start.generation and tokenizer.eos_token_id not in start.end_tokens:
        update["generation"] = start.generation | {"eos_token_id": [*start.end_tokens, tokenizer.eos_token_id]}
    model = run.model.model_copy(update={"start": start.model_copy(update=update)})
    return run.model_copy(update={"model": model})


def for_link(config: PeerConfig, run: RunConfig, vocab_size: int) -> RunConfig:
    """Return a run that suits peers with the founder's uplink: its rounds are long enough, and a new model's peers send
    little where that makes rounds shorter. What the founder has set stays.
    """
    rounds, moved = _link_rounds(config, run, vocab_size)
    if config.uplink_mbit is None:
        if config.host is None and run.round.mode == "tokens" and "min_seconds" not in run.round.model_fields_set:
            log.info("%s; --uplink-mbit makes rounds long enough for peers with so slow a link", moved)
        return run
    if rounds.min_seconds > run.round.min_seconds and config.start_from is None:
        run = _lean(run)
        rounds, moved = _link_rounds(config, run, vocab_size)
    if rounds.min_seconds > run.round.min_seconds:
        least = "%s; full rounds train for %.0f s at least (--run.round.min-seconds chooses otherwise)"
        log.info(least, moved, rounds.min_seconds)
        if rounds.growing:
            log.info("the first %d rounds are shorter, and grow (--run.round.growing)", rounds.growing)
    return run.model_copy(update={"round": rounds})


def _link_rounds(config: PeerConfig, run: RunConfig, vocab_size: int) -> tuple[RoundConfig, str]:
    """Return the rounds that the founder's uplink asks for, and in words what one moves.

    The peers to come are not known: rounds suit LINKED_PEERS of them, or more where the run waits for more, that hold
    as many slots as the founder, or share them if its memory decides.
    """
    size, num_peers = run_size(run, vocab_size), max(LINKED_PEERS, run.round.min_peers)
    shared_out = min(size.num_slots, math.ceil(run.round.copies * size.num_slots / num_peers))
    claimed = shared_out if config.max_slots == "auto" else config.max_slots
    setup = Setup.of(run, config, vocab_size)
    traffic = round_traffic(size, claimed, num_peers, setup)
    moved = f"if {num_peers} peers take part, a round moves {size_text(traffic.total)} each way"
    if (uplink := config.uplink_mbit) is None:
        return run.round, moved
    least = transfer_seconds(traffic, uplink, uplink)
    longest = transfer_seconds(round_traffic(size, claimed, num_peers, of_moments_round(setup)), uplink, uplink)
    rounds = rounds_for_links(run, least, longest, is_trained=config.start_from is not None)
    return rounds, f"{moved}, in {least.total:.0f} s at {uplink:g} Mbit/s"


def _lean(run: RunConfig) -> RunConfig:
    """Return a run whose peers send a fraction of what they do by default, in what its founder has left open.

    More frequent rounds learn more, and what few bits and unshared moments cost is about the noise of a run
    (docs/convergence.md), but for Muon's momentum.
    """
    few_bits = {"shared": "int4", "slots": "int4", "moments": "int8"}
    codecs = {name: codec for name, codec in few_bits.items() if name not in run.codecs.model_fields_set}
    is_chosen = "moments" in run.outer.model_fields_set or run.train.optimizer == "muon"  # which gains by its momentum
    moments = {} if is_chosen else {"moments": "local"}
    if codecs or moments:
        chosen = [f"codecs.{name}={value}" for name, value in codecs.items()]
        chosen += [f"outer.{name}={value}" for name, value in moments.items()]
        log.info("for short rounds at this uplink: %s (--run.* chooses otherwise)", ", ".join(chosen))
    return run.model_copy(
        update={"codecs": run.codecs.model_copy(update=codecs), "outer": run.outer.model_copy(update=moments)}
    )


def _suited(run: RunConfig, num_tokens: tuple[int, int] | None) -> RunConfig:
    """Return a run over a trained checkpoint with what its founder has not set.

    Adam's best rate falls as the width grows, and is about ten times as high for adapters. A round is one pass over the
    founder's conversations at most, of `num_tokens` in all and learned ones, and a pass has a few steps at least.

    Source: LoRA Without Regret (https://thinkingmachines.ai/blog/lora/).
    """
    train, rounds = run.train, run.round
    if "lr" not in train.model_fields_set:
        rate = RATE_OF_ADAPTERS if run.adapter is not None else RATE_OF_WEIGHTS
        train = train.model_copy(update={"lr": rate * WIDTH_OF_RATES / run.model.hidden_size})
    if num_tokens is not None and "batch_size" not in train.model_fields_set:
        num_sequences = num_tokens[0] // run.data.sequence_length
        train = train.model_copy(update={"batch_size": min(max(1, num_sequences // STEPS_OF_PASS), train.batch_size)})
    if num_tokens is not None and not {"tokens", "samples", "mode"} & rounds.model_fields_set:
        rounds = rounds.model_copy(update={"tokens": min(max(num_tokens[1], MIN_ROUND_TOKENS), rounds.tokens)})
    log.info(
        "over a trained model: learning rate %.3g, %d sequences a step, %d tokens a round, and %g s at least "
        "(--run.train.lr, --run.train.batch-size, --run.round.tokens, --run.round.min-seconds)",
        train.lr,
        train.batch_size,
        rounds.tokens,
        rounds.min_seconds,
    )
    return run.model_copy(update={"train": train, "round": rounds})


def _on_files(config: PeerConfig, run: RunConfig) -> RunConfig:
    """Return the settings of a run on files, if the founder names some and no other source."""
    if not (config.shards or config.text) or "source" in run.data.model_fields_set:
        return run
    return run.model_copy(update={"data": run.data.model_copy(update={"source": "files"})})


def _adapter(config: PeerConfig, run: RunConfig, hub_name: str | None) -> AdapterConfig | None:
    """Return the adapter settings of a new run; None if it trains all of the model."""
    if (folder := config.adapter_folder) is not None:
        base, here = named_base(folder), (hub_name or "").partition("@")[0]
        if base and here and base != here:  # a name of the same model elsewhere, or of another of the same shapes
            log.warning("%s was trained over %s, and this run starts from %s", folder, base, here)
        return adapter_of(folder, run.adapter)
    return run.adapter or (None if config.adapter is None else AdapterConfig())


def check_choices(config: PeerConfig, run: RunConfig) -> None:
    """Refuse what was chosen for this machine as soon as the run is known."""
    group = Ranks(config.device)
    check_machine(run, config, group.world_size)
    check_attention(config.attention, group.device)
    if group.device.type == "cpu":  # a GPU must not be looked at before the DHT has forked
        check_build(run.model, config.storage or run.frozen_storage, config.kernel)
    if config.max_slots == "auto":
        return
    if (slots := config.max_slots) > run.num_slots:
        raise ConfigError(f"max_slots={slots} exceeds the run's {run.num_slots} slots; lower it, or leave it out")
    if slots > MAX_CLAIMED:
        raise ConfigError(
            f"max_slots={slots} exceeds the {MAX_CLAIMED} slots that a claim can hold; set it to {MAX_CLAIMED} or less"
        )
