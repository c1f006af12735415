"""The final report of a watched run: the live page with its data inside, for a browser without a server."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from spes_p2p.errors import ConfigError
from spes_p2p.fs import write_atomic
from spes_p2p.monitor.credit import seen
from spes_p2p.monitor.events import METRICS_FILE, read_events, replay
from spes_p2p.monitor.page.server import static
from spes_p2p.monitor.page.snapshot import MAX_EVENTS, PageState, in_words, sections_of

REPORT_FILE = "report.html"
Baselines = Mapping[str, Sequence[tuple[int, float]]]
"""Held-out loss over tokens of other ways to train the same model, by name."""


def write_report(
    directory: Path, facts: Mapping[str, object] | None = None, baselines: Baselines | None = None
) -> Path:
    """Write `report.html` beside a watch's `metrics.jsonl`, and return its path.

    `facts` are lines for the page's foot, such as how the run ended.

    Raises:
        DataError: the events cannot be read.
        ConfigError: the report cannot be written.
    """
    metrics = directory / METRICS_FILE
    view, run = replay(metrics)
    view = replace(view, settled=seen(directory))
    told = tuple((round(event["time"]), words) for event in read_events(metrics) if (words := in_words(event)))
    state = PageState(view, run, facts=facts or {}, baselines=baselines or {})
    path = directory / REPORT_FILE
    try:
        with write_atomic(path, durable=False) as file:
            file.write(standalone(sections_of(state, told[-MAX_EVENTS:])))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose a writable --output") from error
    return path


def standalone(sections: Mapping[str, object]) -> bytes:
    """Return the page as one file that shows `sections`, loads nothing, and runs only the page's own scripts."""
    # "<" could end the element that holds the data.
    data = json.dumps(sections, allow_nan=False).replace("<", "\\u003c")  # guard: \\u003c -> <
    html, hashes = static("index.html").decode(), {"script": "", "style": ""}

    def inline(kind: str, name: str) -> str:
        text = static(name).decode()
        hashes[kind] += f" 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        return f"<{kind}>{text}</{kind}>"

    html = re.sub(r'<link rel="stylesheet" href="([^"]+)">', lambda found: inline("style", found[1]), html)
    scripts = re.findall(r'<script src="([^"]+)" defer></script>\n', html)
    html = re.sub(r'<script src="[^"]+" defer></script>\n', "", html)
    body = f'<script type="application/json" id="data">{data}</script>\n'
    body += "\n".join(inline("script", name) for name in scripts)
    policy = (
        f"default-src 'none'; img-src data:; base-uri 'none'; script-src{hashes['script']}; style-src{hashes['style']}"
    )
    html = html.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
    )
    return html.replace("</body>", f"{body}\n</body>").encode()
