"""What one peer needs to go on after a restart, beyond the versions it keeps anyway: moments, data position, claims."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from spes_p2p.errors import DataError


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
    """

    run_id: str
    round: int
    slots: tuple[int, ...]
    steps: int
    total_tokens: int
    data: Mapping[str, Any]


class PeerCheckpoint:
    """One checkpoint directory; the newest save wins, and a torn save leaves the one before.

    Args:
        directory: Holds `peer.json` and the moments file that it names.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(self, state: PeerState, moments: Mapping[str, Tensor]) -> None:
        """Write moments first, then the state that names them: the rename of `peer.json` is the commit."""
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"moments-{state.round}-{state.steps}.safetensors"
        save_file(dict(moments), self._directory / name)
        temporary = self._directory / "peer.json.tmp"
        temporary.write_text(json.dumps({**asdict(state), "moments": name}))
        temporary.replace(self._directory / "peer.json")
        for old in self._directory.glob("moments-*.safetensors"):
            if old.name != name:
                old.unlink()

    def load(self) -> tuple[PeerState, dict[str, Tensor]] | None:
        """Return the newest save, or None if there is none.

        Raises:
            DataError: it is damaged.
        """
        path = self._directory / "peer.json"
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text())
            moments = load_file(self._directory / Path(content.pop("moments")).name)
            content["slots"] = tuple(content["slots"])
            return PeerState(**content), moments
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise DataError(
                f"checkpoint {path} is damaged ({error}); delete {self._directory} to go on without"
            ) from error
