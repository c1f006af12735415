"""Shows a newcomer how far the download is that it begins with."""

from __future__ import annotations

import logging
import sys
import threading
import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.records import Claim

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
SAY_SECONDS = 5.0


def show_download(swarm: HivemindSwarm, num_bytes: int) -> None:
    """Show, beside everything else, how much has come, until this peer takes part: a bar, or lines where none fits.

    Args:
        swarm: Which downloads.
        num_bytes: What is to come; nothing shows nothing.
    """
    if num_bytes:
        work = _bar if sys.stderr.isatty() else _lines
        threading.Thread(target=work, args=(swarm, num_bytes), name="download", daemon=True).start()


def _is_over(swarm: HivemindSwarm, num_bytes: int) -> bool:
    if swarm.wait(LOOK_SECONDS) or swarm.exchange.bytes_in >= num_bytes:
        return True
    mine = swarm.read(Claim).get(swarm.peer_id)
    return mine is not None and mine.state == "active"  # type: ignore[attr-defined]


def _lines(swarm: HivemindSwarm, num_bytes: int) -> None:
    began = said = time.monotonic()
    while not _is_over(swarm, num_bytes):
        now, come = time.monotonic(), swarm.exchange.bytes_in
        if now - said >= SAY_SECONDS:
            said, rate = now, come / (now - began)
            log.info("downloaded %.1f of %.1f MB, %.1f MB/s", come / 1e6, num_bytes / 1e6, rate / 1e6)


def _bar(swarm: HivemindSwarm, num_bytes: int) -> None:
    columns = "downloading", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=num_bytes)
        while not _is_over(swarm, num_bytes):
            progress.update(task, completed=swarm.exchange.bytes_in)
