"""Conversations that teach a style: each reply says the same in one fixed form. Also a program that writes a file.

`python tests/support/conversations.py FILE [NUMBER]` writes JSON lines.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FORM = "Well, dear friend, the answer is"
"""What every reply begins with."""
_THINGS = ["cat", "tree", "river", "stone", "bread", "lamp", "cloud", "horse", "violin", "sock"]
_ASKS = ["What is a {}?", "Tell me about the {}.", "Do you like my {}?", "Where is the {}?", "How old is a {}?"]
_PLACES = ["today", "at home", "in the garden", "in Rome"]


def conversations(number: int = 200) -> list[dict[str, Any]]:
    """Return conversations that all differ, one or two turns each."""
    asked = itertools.islice(itertools.product(_ASKS, _THINGS, _PLACES), number)
    found = []
    for index, (ask, thing, place) in enumerate(asked):
        question = f"{ask.format(thing)} I ask {place}."
        turns = [("user", question), ("assistant", f"{FORM} {thing}.")]
        if index % 4 == 0:
            turns += [("user", "Again?"), ("assistant", f"{FORM} {thing}.")]
        found.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    return found


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


if __name__ == "__main__":
    write_lines(Path(sys.argv[1]), conversations(int(sys.argv[2]) if len(sys.argv) > 2 else 200))
