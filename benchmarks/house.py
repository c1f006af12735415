"""Count the lines of every room, and what the redesign of the core takes out, beside what to reach.

.venv/bin/python -m benchmarks.house
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.cluster import ROOT
from benchmarks.tables import HEAD, Row, markdown_table
from spes_p2p.presentation import say

PACKAGE = "spes_p2p"
CORE = ("swarm", "training", "peer", "sim")
DECIDING = (
    *("swarm/agreement.py", "swarm/attempts.py", "swarm/certificate.py", "swarm/chain.py", "swarm/consensus.py"),
    *("swarm/following.py", "swarm/next_body.py", "swarm/part.py", "swarm/promises.py", "swarm/proposal.py"),
    *("swarm/statements.py", "swarm/voter.py"),
)
"""What decides a round: meeting, agreement, certificates."""
OTHERS = ("config", "cli.py", "config_file.py", "fs.py", "presentation.py", "errors.py")
ROOMS = (
    *((name, (name,), budget) for name, budget in zip(CORE, (8_000, 2_700, 1_750, 1_550), strict=True)),
    ("swarm, training, peer, sim", CORE, 17_500),
    ("data", ("data",), 3_900),
    ("model", ("model",), 3_300),
    ("monitor", ("monitor",), 2_700),
    ("commands", ("commands",), 2_150),
    ("config, cli, fs, presentation, errors", OTHERS, 2_500),
    ("planner", ("planner",), 950),
    ("codecs, optim", ("codecs", "optim"), 1_900),
    ("package", (".",), 31_000),
)
"""Name, files and folders, and most lines."""


def texts(root: Path, names: Sequence[str] = (".",)) -> Iterator[str]:
    """Yield the text of each Python file in some files and folders below `root`."""
    for path in (root / name for name in names):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield file.read_text(encoding="utf-8")


def num_lines(root: Path, names: Sequence[str] = (".",)) -> int:
    """Count lines of Python."""
    return sum(len(text.splitlines()) for text in texts(root, names))


def num_matches(pattern: str) -> int:
    """Count the places of a pattern in the core."""
    return sum(len(re.findall(pattern, text)) for text in texts(ROOT / PACKAGE, CORE))


def rows() -> Iterator[Row]:
    """Yield each figure beside what to reach."""
    counts = [(f"lines: {name}", num_lines(ROOT / PACKAGE, names), most) for name, names, most in ROOMS]
    counts += [
        (f"lines: {name}", num_lines(ROOT / name), most) for name, most in (("benchmarks", 5_000), ("tests", 36_000))
    ]
    fixes = (ROOT / PACKAGE / "swarm" / "hivemind_fixes" / "README.md").read_text()
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
    counts += [
        ("words: docs, README and CHANGELOG", sum(len(page.read_text().split()) for page in pages), 30_000),
        ("calls of `from_leader`", num_matches(r"\.from_leader\("), 0),
        ("tests of `sync` for None", num_matches(r"sync is (?:not )?None"), 0),
        ("functions that pull versions", num_matches(r"_swarm\.pull\("), 1),
        ("lines: decision, meeting and agreement", num_lines(ROOT / PACKAGE, DECIDING), 1_000),
        ("rows of hivemind_fixes/README.md", len(re.findall(r"(?m)^\| (?!hivemind's)", fixes)), 22),
        ("constants `*_SECONDS` and `MAX_*` in the core", num_matches(r"(?m)^(?:\w*_SECONDS|_?MAX_\w+)\b.*="), 95),
        ("lines: docs/certificate.md", len((ROOT / "docs" / "certificate.md").read_text().splitlines()), 90),
    ]
    for figure, count, most in counts:
        yield Row(figure, f"{count:,}", f"{most:,}", count <= most)


if __name__ == "__main__":
    say(markdown_table(HEAD, [row.cells for row in rows()]))
