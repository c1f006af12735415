"""A plan as lines of text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from spes_p2p.config import RunConfig
from spes_p2p.config.run import MAX_ROUND_SECONDS
from spes_p2p.planner.memory import PeerMemory, Setup
from spes_p2p.planner.size import ModelSize
from spes_p2p.planner.traffic import (
    TRAINING_SHARE,
    Course,
    RoundTraffic,
    least_training_seconds,
    training_seconds,
    transfer_seconds,
)

CHINCHILLA_TOKENS = 20
"""Tokens per parameter that make the best model for its computation."""


def model_lines(run: RunConfig, size: ModelSize, setup: Setup, claimed: int, vocab_size: int) -> Iterator[str]:
    """Yield the model's shape and size, and the part of it that the peer trains."""
    model, tokenizer = run.model, run.data.tokenizer
    inner = f"{model.num_experts} experts of width {model.intermediate_size} with {model.top_k} active"
    inner = f"dense, of inner width {model.intermediate_size}" if model.is_dense else inner
    yield (
        f"{model.stock.title}: {model.num_layers} layers of width {model.hidden_size}, {inner}, "
        f"vocabulary {vocab_size}{', tied' if model.tie_embeddings else ''}"
    )
    if tokenizer is not None and not (Path(tokenizer) / "tokenizer.json").is_file():
        yield f"  (the vocabulary is data.vocab_size; {tokenizer} is not on this machine, and a run takes its size)"
    if size.is_adapted:
        yield from _adapter_lines(run, size, setup, claimed)
        return
    if not size.num_slots:
        yield f"  {params_text(size.total_params)} parameters, of which every peer trains all by {setup.optimizer}"
        return
    yield (
        f"  {params_text(size.total_params)} parameters, {params_text(size.active_params(model.top_k))} active: "
        f"{params_text(size.shared_params)} shared, {size.num_slots} slots of {params_text(size.slot_params)}"
    )
    trained = size.trained_params(claimed)
    yield (
        f"  a peer with {claimed} of the slots trains {params_text(trained)} ({trained / size.total_params:.0%}) "
        f"by {setup.optimizer}, and holds {params_text(size.frozen_params(claimed))} frozen in {setup.storage}"
    )


def _adapter_lines(run: RunConfig, size: ModelSize, setup: Setup, claimed: int) -> Iterator[str]:
    """Yield the size of a run's adapters and of their base."""
    adapter = run.adapter
    assert adapter is not None
    frozen = size.base_params + size.table_params + size.kept_params
    yield f"  {params_text(frozen)} parameters frozen, of which {params_text(size.base_params)} in {setup.storage}"
    own = f", and those of {claimed} of {size.num_slots} slots" if size.num_slots else ""
    yield (
        f"  adapters of rank {adapter.rank} on {', '.join(adapter.targets)}: a peer trains "
        f"{params_text(size.trained_params(claimed))} by {setup.optimizer}, those that are shared{own}"
    )


def memory_lines(memory: PeerMemory) -> Iterator[str]:
    """Yield the peer's memory by part."""
    setup, activations, on_gpu = memory.setup, memory.setup.activations, memory.setup.on_gpu
    each = f" of each of {setup.num_ranks} ranks ({setup.shard})" if setup.num_ranks > 1 else ""
    base = "base" if activations and activations.has_frozen_base else "experts"
    kept = f"{'checkpointed, ' if activations.checkpointing else ''}{activations.tokens} tokens" if activations else ""
    rows = {
        "weights, shared": memory.shared_weights,
        "weights, slots": memory.slot_weights,
        "gradients": memory.gradients,
        f"optimizer state, {setup.optimizer}": memory.optimizer,
        f"frozen {base}, {setup.storage}": memory.frozen,
        "= static": memory.static_bytes,
        f"activations, {kept} (estimate)": memory.activations if activations else None,
        "gathered for the other ranks, or from them": memory.gathered or None,
        "= on a GPU": memory.device_bytes if on_gpu else None,
        "= all ranks": setup.num_ranks * memory.rank_bytes if setup.num_ranks > 1 and not on_gpu else None,
        "vectors held between rounds": None if on_gpu else memory.vectors,
        "Python, its libraries, and helper processes": setup.programs,
        "= training": None if on_gpu else memory.training_bytes,
        "= on the host, at a round's end" if on_gpu else "= at a round's end, without gradients": memory.round_bytes,
        "= on the host, at the start" if on_gpu else "= at the start": memory.startup_bytes,
    }
    yield ""
    yield f"{f'memory{each}':<50}{'GB':>10}"
    yield from (_row(name, num_bytes) for name, num_bytes in rows.items() if num_bytes is not None)


def traffic_lines(traffic: RoundTraffic, num_peers: int, size: ModelSize, claimed: int) -> Iterator[str]:
    """Yield the peer's traffic in a round."""
    yield ""
    yield f"{f'a round of {num_peers} peers like it (--peers)':<50}{'GB up':>10}{'GB down':>10}"
    yield _row("averaging the shared parameters", traffic.shared, traffic.shared)
    yield _row("averaging slots with their other holders", traffic.slots, traffic.slots)
    yield _row("fetching others' slots, and serving its own", traffic.fetched, traffic.fetched)
    if traffic.replicated:
        yield _row("replicating slots with too few holders", traffic.replicated, traffic.replicated)
    yield _row("= in all", traffic.total, traffic.total)
    if num_peers * claimed < size.num_slots:
        yield f"  they hold {num_peers * claimed} of {size.num_slots} slots: no peer trains the others"


def start_lines(download: int, disk: int, num_checkpoints: int) -> Iterator[str]:
    """Yield what a newcomer downloads before it trains, and what a peer keeps on disk; all in bytes."""
    yield ""
    yield f"{'also':<50}{'GB':>10}"
    yield _row("first download of a newcomer", download)
    yield _row(f"on disk, with {num_checkpoints} checkpoints, at most", disk)


def time_lines(
    run: RunConfig,
    traffic: tuple[RoundTraffic, RoundTraffic],
    num_peers: int,
    links_mbit: tuple[float | None, float | None],
    tokens_per_second: float | None,
) -> Iterator[str]:
    """Yield the longest time between two saved rounds, and a round's least time, as far as links and speed are known.

    Of `traffic` the first is a round's mean, the second that of a round that carries the moments.
    """
    uplink, downlink = links_mbit
    yield ""
    hours, minutes = divmod(round(run.round.commit_seconds / 60), 60)
    yield f"longest time between two saved rounds: {f'{hours} h ' * bool(hours)}{minutes} min"
    if not uplink or not downlink:
        return
    least, longest = (transfer_seconds(each, uplink, downlink) for each in traffic)
    yield ""
    yield f"{f'time at {uplink:g} Mbit/s up and {downlink:g} down, at least':<50}{'seconds':>10}"
    for name, phase, most, deadline in (
        ("averaging", least.averaging, longest.averaging, "averaging_seconds"),
        ("fetching", least.fetching, longest.fetching, "exchange_seconds"),
    ):
        allowed = getattr(run.round, deadline)
        told = f"   {most:.0f} in a round with moments" if round(most) > round(phase) else ""
        too_long = f"   longer than round.{deadline}={allowed:g}" if most > allowed else ""
        yield f"  {name:<48}{phase:>10.0f}{told}{too_long}"
    if tokens_per_second is None:
        yield f"  {'training':<48}{'unknown':>10}   --tokens-per-second"
        return
    training = training_seconds(run, num_peers, tokens_per_second)
    lasting = training + least.total
    yield f"  {'training':<48}{training:>10.0f}   {training / lasting:.0%} of the round"
    if training < TRAINING_SHARE * lasting:
        longer = _longer_rounds(run, tokens_per_second, least_training_seconds(least))
        yield f"  {f'- rounds that train {TRAINING_SHARE:.0%} of their time':<48}{'':>10}   {longer}"
    step_tokens = run.train.batch_size * run.data.sequence_length
    steps = training * tokens_per_second / step_tokens
    in_run = f"{steps * run.round.full_rounds(run.round.total):.0f} in the run, of {step_tokens:,} tokens each"
    yield f"  {'steps of a round':<48}{steps:>10.0f}   {in_run}"


def days_lines(
    run: RunConfig, size: ModelSize, courses: tuple[Course, Course], num_peers: int, watts: float | None
) -> Iterator[str]:
    """Yield what the run takes and gives: first of `num_peers` such peers, and then with one peer more.

    Source of the tokens per parameter: Chinchilla (https://arxiv.org/abs/2203.15556), for models without experts.
    """
    course, more = courses
    yield ""
    yield f"{f'the run of {num_peers} such peers':<50}{'days':>10}"
    with_more = f"{_figure(more.days)} with one peer more"
    yield f"  {f'{params_text(course.tokens)} tokens':<48}{_figure(course.days):>10}   {with_more}"
    gained = f"one peer more adds {params_text(more.tokens_a_day - course.tokens_a_day)}"
    yield f"  {'tokens a day':<48}{params_text(course.tokens_a_day):>10}   {gained}"
    if not size.is_adapted and run.model.start is None:
        active = size.active_params(run.model.top_k)
        days = CHINCHILLA_TOKENS * active / course.tokens_a_day
        enough = f"{CHINCHILLA_TOKENS} (Chinchilla) take {_figure(days)} days"
        yield f"  {'tokens per active parameter':<48}{_figure(course.tokens / active):>10}   {enough}"
    if watts is not None:
        a_day = num_peers * watts * 24 / 1000
        in_run = f"{_figure(a_day * course.days)} kWh in the run"
        yield f"  {f'electricity at {watts:g} W a peer, kWh a day':<48}{_figure(a_day):>10}   {in_run}"
    yield f"{num_peers} such peers: {days_text(course.days)}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def days_text(days: float) -> str:
    """Format a length of time for people."""
    units = ("days", 1), ("hours", 24), ("minutes", 1440)
    unit, in_day = next((each for each in units if days * each[1] >= 1), units[-1])
    return f"{days * in_day:.{0 if days * in_day >= 10 else 1}f} {unit}"


def _longer_rounds(run: RunConfig, tokens_per_second: float, seconds: float) -> str:
    """Return the flags of a run whose rounds train for so long; without them a founder's uplink does."""
    if run.round.mode == "steps":
        step_tokens = run.train.batch_size * run.data.sequence_length
        return f"--run.round.steps {math.ceil(seconds * tokens_per_second / step_tokens)}"
    if seconds > MAX_ROUND_SECONDS:
        return f"longer than the longest round, {MAX_ROUND_SECONDS:.0f} s; send less (--run.codecs.*)"
    flags = f"--run.round.min-seconds {math.ceil(seconds)}"
    return flags + f" --run.round.max-seconds {math.ceil(seconds)}" * (seconds > run.round.max_seconds)


def _row(name: str, *num_bytes: int) -> str:
    return f"  {name:<48}" + "".join(f"{_gigabytes(count):>10}" for count in num_bytes)


def _gigabytes(num_bytes: int) -> str:
    gigabytes = num_bytes / 1e9
    return f"{gigabytes:.0f}" if gigabytes >= 100 or not gigabytes else f"{gigabytes:.{2 if gigabytes >= 1 else 4}f}"


def params_text(count: float) -> str:
    """Format a number of parameters, or of tokens, for people."""
    if count < 10_000:
        return f"{count:,.0f}"
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"
