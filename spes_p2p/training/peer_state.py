"""A peer's position in its run, and its text on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spes_p2p.errors import JoinError
from spes_p2p.swarm.exchange.versions import Version

FORMAT = 1


@dataclass(frozen=True)
class PeerState:
    """A peer's position in its run.

    Attributes:
        run_id: The run it belongs to.
        round: Round of its anchors.
        slots: Slots it held.
        steps: Local optimizer steps so far.
        total_tokens: Tokens trained so far.
        data: State of its token source.
        versions: Of all bundles, moments and documents that it had.
    """

    run_id: str
    round: int
    slots: tuple[int, ...]
    steps: int
    total_tokens: int
    data: Mapping[str, Any]
    versions: tuple[Version, ...] = ()


def encode_state(state: PeerState, tensors_digest: str) -> bytes:
    """Return a state as JSON that vouches for itself and for the file of tensors beside it."""
    content = {
        "format": FORMAT,
        "run_id": state.run_id,
        "round": state.round,
        "slots": list(state.slots),
        "steps": state.steps,
        "total_tokens": state.total_tokens,
        "data": dict(state.data),
        "versions": [version.model_dump() for version in state.versions],
        "tensors": tensors_digest,
    }
    return json.dumps({"digest": _digest(content), **content}, indent=1).encode()


def decode_state(data: bytes, run_id: str) -> tuple[PeerState, str]:
    """Return a state and the digest of its tensors.

    Raises:
        ValueError: damaged, or of a format that this software does not know.
        RecordError: it names a version that its author has not signed.
        JoinError: it is another run's.
    """
    try:
        content = json.loads(data)
        if not isinstance(content, dict) or content.pop("digest", None) != _digest(content):  # guard: state-digest
            raise ValueError("the state does not match its digest")
        if content.pop("format") != FORMAT:
            raise ValueError("another version of spes_p2p has written it")
        if content["run_id"] != run_id:
            raise JoinError(f"the checkpoint belongs to run {content['run_id']}")
        tensors_digest = content.pop("tensors")
        content["versions"] = tuple(Version.verify(json.dumps(version), run_id) for version in content["versions"])
        content["slots"] = tuple(content["slots"])
        return PeerState(**content), tensors_digest
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"the state is none of a peer: {error!r}") from error


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
