"""What documents and messages refer to exists: files, their sections, and the messages that trouble.md explains."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
SOURCES = {path: ast.parse(path.read_text()) for path in (ROOT / "spes_p2p").rglob("*.py")}
TROUBLE = ROOT / "docs" / "trouble.md"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def is_there(path: Path, anchor: str) -> bool:
    return path.exists() and (not anchor or anchor in anchors(path))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text())
    assert not [link for link in links if not is_there(page.parent / link[0] if link[0] else page, link[1])]


def messages(tree: ast.AST) -> Iterator[str]:
    """Yield a module's strings, with `…` for each value that comes into one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[.\d]*[a-z]", "…", node.value)


def test_the_sections_that_the_program_names_exist() -> None:
    texts = [path.read_text() for path in SOURCES]
    named = {found for text in texts for found in re.findall(r"docs/(\w+\.md)(?:#([\w-]+))?", text)}
    assert len({anchor for name, anchor in named if name == TROUBLE.name}) > 10
    assert not [(name, anchor) for name, anchor in named if not is_there(ROOT / "docs" / name, anchor)]


def explained() -> list[str]:
    """Return the messages that stand under the headings of trouble.md."""
    paragraphs = re.findall(r"^### .*\n\n((?:.+\n)+)", TROUBLE.read_text(), re.M)
    return [span for text in paragraphs for span in re.findall(r"`([^`]* [^`]*)`", text.replace("\n", " "))]


@pytest.mark.parametrize("message", explained())
def test_the_program_has_each_message_that_trouble_explains(message: str) -> None:
    pattern = re.compile(".*".join(map(re.escape, message.split("…"))), re.S)
    assert any(pattern.search(each) for tree in SOURCES.values() for each in messages(tree))
