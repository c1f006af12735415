"""What the page shows, as sections of small values.

Keys and values come from records that peers sign but may fill with lies. They are numbers, ids and the words below; the
page's script shows each as text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spes_p2p.monitor.events import Event
from spes_p2p.monitor.sinks import number_or_dash
from spes_p2p.monitor.view import PHASES, PeerView, RoundSummary, SwarmView, short_id, sync_share
from spes_p2p.presentation import MAX_QUOTE_CHARS, printable, printable_text, qr_rows
from spes_p2p.swarm.invites import SHOWN_LETTERS
from spes_p2p.swarm.names import slot_ranges

MAX_ROUNDS = 300
"""Points of a curve; of a longer run every second round is shown, or every fourth, and so on, and the newest."""
MAX_PEERS = 128
MAX_EVENTS = 60
Sections = dict[str, Any]
Told = tuple[tuple[int, str], ...]
"""Events in words with their times, the oldest first."""
COLUMNS = ["tokens", "loss", "speed", "training_speed", *PHASES, "peers"]
OWN_COLUMNS = ["my_tokens", "my_loss", "my_sent", "my_received"]
"""Values of a round. `tokens` counts from the run's start, `my_sent` and `my_received` are bytes of the round."""


class OwnRound(NamedTuple):
    """What this machine has done in one round."""

    tokens: int
    """That it trained and that the round committed."""
    loss: float | None
    """Its training loss, nats per token; None without tokens."""
    sent: int
    """Bytes since its report before, as `received`."""
    received: int


@dataclass(frozen=True)
class Own:
    """What a peer's page knows about its own machine."""

    peer_id: str
    stage: str = ""
    """Where it is in its life; "" if the swarm's state is its own."""
    why: str = ""
    """What holds it there."""
    committed: int = 0
    """Newest round with a certificate that it knows."""
    uptime_seconds: float = 0.0
    """Since the page was started."""
    memory_bytes: int = 0
    """Of this process and its children; pages that they share count once."""
    sent_bytes: int = 0
    """Since the peer's start, as `received_bytes`."""
    received_bytes: int = 0
    reachability: str = ""
    ways: Mapping[str, str] = field(default_factory=dict)
    """How it reaches other peers now, in words, by their ids."""
    votes: Mapping[str, str] = field(default_factory=dict)
    """The invite by which each voter votes, by peer id; empty for the founder."""
    rounds: Mapping[int, OwnRound] = field(default_factory=dict)
    """Its rounds since the page was started."""


@dataclass(frozen=True)
class PageState:
    """Everything that the page may show at one moment; immutable, so another thread can read it."""

    view: SwarmView
    run: Mapping[str, Any]
    """Fields of the `run` event."""
    own: Own | None = None
    """This machine; None on a monitor."""
    stage: str = ""
    """State that is not in the view: a monitor joins; "" otherwise."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """More lines about the run, by name."""
    baselines: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    """Held-out loss over tokens of other ways to train the same model, by name."""
    control: Mapping[str, Any] = field(default_factory=dict)
    """What this machine's owner has asked, and what it amounts to; empty if nothing can be asked."""
    link: str = ""
    """By which others join, and the flags that they need; "" if the page does not show it."""


def sections_of(state: PageState, told: Told = ()) -> Sections:
    """Return the page's sections."""
    view, own = state.view, state.own
    shown = _shown_peers(view, own)
    rounds = thinned(view.whole, MAX_ROUNDS)
    return {
        "run": _run(state),
        "now": _now(state),
        "figures": _figures(view, own, state.run.get("active_params")),
        # Median seconds, by which the page guesses the time left.
        "phases": {phase: _digits(view.newest.phases[phase], 3) for phase in PHASES} if view.newest else {},
        "rounds": {
            str(number): _row(view.rounds[number], view.totals[number], own.rounds.get(number) if own else None)
            for number in rounds
        },
        "held_out": {
            str(number): [view.tokens_until(number), _digits(view.held_out[number], 5)]
            for number in thinned(list(view.held_out), MAX_ROUNDS)
        },
        "coverage": view.coverage,
        "peers": {_key(peer.peer_id): _peer(peer, view, own) for peer in shown},
        "matrix": {_key(peer.peer_id): _cells(peer) for peer in shown if peer.state == "active" and peer.slots},
        "credit": {
            "told": view.credit.told() if view.credit.rounds else "",
            "peers": [
                [_key(peer), tokens, view.credit.names.get(peer, "")]
                for peer, tokens in list(view.credit.tokens.items())[:MAX_PEERS]
            ],
        },
        "events": told,
        "samples": _samples(view),
        "baselines": {
            printable(name, MAX_QUOTE_CHARS): [[tokens, _digits(loss, 5)] for tokens, loss in curve]
            for name, curve in state.baselines.items()
        },
        "control": dict(state.control),
    }


def thinned(numbers: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of ascending numbers, or one more: the multiples of a power of two, and the newest."""
    step = 1
    while len(numbers) > most * step:
        step *= 2
    return [number for number in numbers if number % step == 0 or number == numbers[-1]]


def in_words(event: Event) -> str:
    """Return a sentence about an event; "" for one that the page shows otherwise."""
    match event["kind"]:
        case "membership":
            slots = slot_ranges(event["slots"])
            does = {"joined": f"joined; its slots: {slots}", "changed": f"has the slots {slots} now", "left": "left"}
            return f"peer …{short_id(event['peer_id'])} {does[event['change']]}"
        case "round":
            dropped = f"; {event['dropped']} groups were dropped" if event["dropped"] else ""
            agreed = event["agreement"]
            differ = f"; {1 - agreed:.0%} of the digests differ" if agreed is not None and agreed < 1 else ""
            loss = number_or_dash(event["loss"])
            return f"round {event['round']}: {event['num_peers']} peers, loss {loss}{dropped}{differ}"
        case "control":
            return f"this peer: {event['state']}; {event['reason']}"
        case "evaluation":
            return f"held-out loss after round {event['round']}: {number_or_dash(event['loss'])}"
    return ""


def _run(state: PageState) -> dict[str, Any]:
    view = state.view
    return {
        "id": printable(state.run.get("run_id", "run"), MAX_QUOTE_CHARS),
        "model": model_line(state.run),
        "total": view.total_rounds,
        "slots": view.num_slots,
        "me": _key(state.own.peer_id) if state.own else None,
        "facts": {printable(name, MAX_QUOTE_CHARS): printable(fact) for name, fact in state.facts.items() if fact},
        "columns": [*COLUMNS, *OWN_COLUMNS],
        **({"link": state.link, "code": list(qr_rows(state.link.split()[0]))} if state.link else {}),
    }


def model_line(run: Mapping[str, Any]) -> str:
    """Return the model of a `run` event in words; "" where it has none."""
    config = run.get("config")
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        return ""
    parts = ("family", "num_layers", "hidden_size", "num_experts", "top_k")
    family, *rest = (printable(model.get(part, "?"), MAX_QUOTE_CHARS) for part in parts)
    if model.get("num_experts") == 0:
        return "{}, {} layers of width {}, dense".format(family, *rest[:2])
    return "{}, {} layers of width {}, {} experts per layer, {} per token".format(family, *rest)


def _now(state: PageState) -> dict[str, Any]:
    """Return the state, what holds it, the round and when its training ends, in DHT time."""
    view, own = state.view, state.own
    name, why = (own.stage, own.why) if own and own.stage else (state.stage, "")
    if not name:
        name, why = swarm_state(view)
    committed = max(view.published, own.committed if own else 0)
    number = min(max(committed + bool(view.active), 1), view.total_rounds)
    return {"at": round(view.now, 1), "state": name, "why": why, "round": number, "ends_at": round(view.ends_at, 1)}


def swarm_state(view: SwarmView) -> tuple[str, str]:
    """Return the swarm's state, and what holds it in words."""
    here = [peer for peer in view.peers.values() if peer.state != "left"]
    if view.published >= view.total_rounds:
        return "finished", "the last round is committed"
    if not here:
        gone = "no peer's claim is seen any more: all have left, or this machine has lost the swarm"
        return "waiting", gone if view.peers else "no peer has announced itself"
    if all(_is_silent(peer, view) for peer in here):
        silent = view.now - max(peer.last_seen for peer in here)
        return "silent", f"no peer's claim has been seen for {silent:.0f} s"
    if not view.active:
        return "waiting", f"{len(here)} peers are joining; a round begins when enough are here"
    if view.ends_at and view.now >= view.ends_at:
        return "synchronising", "the peers average what they have trained, and exchange slots"
    return "training", ""


def _is_silent(peer: PeerView, view: SwarmView) -> bool:
    """Tell whether a claim has been missing for half of the time after which its peer counts as gone."""
    is_past = view.published >= view.total_rounds or not view.absence_seconds
    return not is_past and peer.state != "left" and view.now - peer.last_seen >= view.absence_seconds / 2


def _figures(view: SwarmView, own: Own | None, active_params: int | None) -> dict[str, Any]:
    newest = [peer.report for peer in view.peers.values() if peer.report is not None]
    held_out = [loss for loss in view.held_out.values() if math.isfinite(loss)]
    summary = view.newest
    figures: dict[str, Any] = {
        "tokens": view.tokens,
        "since": next(iter(view.rounds), 1),
        "speed": _digits(summary.tokens_per_second) if summary else None,
        "loss": _digits(summary.loss, 5) if summary else None,
        "held_out": _digits(held_out[-1], 5) if held_out else None,
        "held_out_first": _digits(held_out[0], 5) if held_out else None,
        "held_out_sources": _by_source(view),
        "active": len(view.active),
        "joining": sum(peer.state == "joining" for peer in view.peers.values()),
        "known": len(view.peers),
        "covered": view.num_covered,
        "single": sum(holders == 1 for holders in view.coverage),
        "sent": sum(report.bytes_out for report in newest),
        "not_training": _digits(summary.sync_share, 3) if summary else None,
        "agreed": sum(round.agreement == 1.0 for round in view.rounds.values()),
        "rounds": sum(round.agreement > 0 for round in view.rounds.values()),
    }
    if summary and summary.seconds:
        left = view.total_rounds - view.published
        at_end = view.tokens + left * summary.tokens
        figures |= {
            "left": round(left * summary.seconds),
            "a_day": _digits(86_400 * summary.tokens_per_second),
            "per_param": _digits(at_end / active_params, 3)
            if isinstance(active_params, int) and active_params
            else None,
        }
    if own is not None:
        figures |= _own_figures(view, own)
    return figures


def _by_source(view: SwarmView) -> str:
    """Return the newest held-out loss of each source in words; empty where the run mixes none."""
    newest = view.held_out_sources[max(view.held_out_sources)] if view.held_out_sources else {}
    return ", ".join(f"{printable(name, MAX_QUOTE_CHARS)} {loss:.4g}" for name, loss in newest.items())


def _own_figures(view: SwarmView, own: Own) -> dict[str, Any]:
    peer = view.peers.get(own.peer_id)
    invites = sorted(Counter(invite[:SHOWN_LETTERS] for invite in own.votes.values() if invite).items())
    votes = ", ".join(f"{count} by {invite}" for invite, count in invites)
    numbers = own.rounds.keys() & view.rounds
    counted = sum(min(own.rounds[number].tokens, view.rounds[number].cap) for number in numbers)
    tokens = sum(view.rounds[number].tokens for number in numbers)
    return {
        "my_tokens": peer.report.total_tokens if peer is not None and peer.report is not None else 0,
        "given": view.credit.tokens.get(own.peer_id),
        "share": _digits(counted / tokens, 3) if tokens else None,
        "my_sent": own.sent_bytes,
        "my_received": own.received_bytes,
        "uptime": round(own.uptime_seconds, -1),
        "memory": _digits(own.memory_bytes, 3),
        "reach": own.reachability,
        "votes": f"voters by invite: {votes}" if votes else "",
    }


def _row(summary: RoundSummary, total: int, mine: OwnRound | None) -> list[Any]:
    training = summary.phases["train"]
    row = [total, _digits(summary.loss, 5), _digits(summary.tokens_per_second)]
    row += [_digits(summary.tokens / training) if training else None]
    row += [_digits(summary.phases[phase], 3) for phase in PHASES] + [summary.num_peers]
    if mine is not None:
        row += [mine.tokens, _digits(mine.loss, 5), mine.sent, mine.received]
    return row


def _peer(peer: PeerView, view: SwarmView, own: Own | None) -> list[Any]:
    """Return state, round, tokens, loss, tokens/s, share not training, dropped groups, bytes out and in, slots, the
    invite by which it votes, and how this peer reaches it."""
    way = own.ways.get(peer.peer_id, "") if own else ""
    invite = own.votes.get(peer.peer_id) if own else None
    vote = f"invite {invite[:SHOWN_LETTERS]}" if invite else "" if invite is None else "founder"
    state = "silent" if _is_silent(peer, view) else peer.state
    slots, report = slot_ranges(peer.slots), peer.report
    if report is None:
        return [state, peer.round, *[None] * 7, slots, vote, way]
    numbers = [
        report.total_tokens,
        _digits(report.loss, 5),
        _digits(report.tokens_per_second),
        _digits(sync_share(report), 2),
    ]
    return [state, peer.round, *numbers, report.dropped, report.bytes_out, report.bytes_in, slots, vote, way]


def _cells(peer: PeerView) -> str:
    """Return the slots that a peer trains, "|", and those that it has claimed since its newest report."""
    trained = set(peer.report.slots) if peer.report is not None else set()
    parts = ([slot for slot in peer.slots if (slot in trained) == wanted] for wanted in (True, False))
    return "|".join(slot_ranges(part) if part else "" for part in parts)


def _shown_peers(view: SwarmView, own: Own | None) -> list[PeerView]:
    """Return this peer, then those that are here, then those that left, each in the order of their ids."""
    me = own.peer_id if own else None
    peers = sorted(view.peers.values(), key=lambda peer: (peer.peer_id != me, peer.state == "left", _key(peer.peer_id)))
    return peers[:MAX_PEERS]


def _samples(view: SwarmView) -> dict[str, Any]:
    if not view.samples:
        return {}
    texts: dict[str, str] = {}
    for index, newest in enumerate(view.samples[max(view.samples)]):
        more = f".{index}" if index else ""  # of several conversations
        texts |= {f"prompt{more}": newest.prompt, f"truth{more}": newest.truth}
        for number in thinned(sorted(view.samples), 24):
            texts |= {f"{number}{more}": sample.text for sample in view.samples[number][index : index + 1]}
    return {name: printable_text(text) for name, text in texts.items()}


def _key(peer_id: str) -> str:
    """Return what names a peer on the page: its id's end, a little longer than elsewhere, since it has to be unique."""
    return peer_id[-10:]


def _digits(value: float | None, digits: int = 4) -> float | None:
    """Return a number with so many digits; None for one that is not finite. Most of a page's bytes are digits."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")
