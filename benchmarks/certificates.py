"""Who counts: what forged documents, ghosts, deaths and double signatures do to a run, and what its certificates cost.

    .venv/bin/python benchmarks/certificates.py [--only ghosts claims ...] [--write]

`histories`, `kills`, `faults` and `bytes` read what `benchmarks/histories.py`, `elastic.py`, `faults.py` and
`certificate_bytes.py` have left, because they take hours; the others are measured here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import subprocess
import tempfile
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgpack
import psutil
import torch
from hivemind.dht import DHT, DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils.timed_storage import get_dht_time

from benchmarks.cluster import ROOT
from benchmarks.faults import SURVIVORS
from benchmarks.passing import passing
from benchmarks.round_end import RoundEndConfig, measure_round_ends
from benchmarks.scoreboard import Scoreboard
from benchmarks.tables import Row
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, LogLevel
from spes_p2p.errors import ExchangeError
from spes_p2p.presentation import size_text
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.node import Node
from spes_p2p.swarm.records import MAX_LIFETIME_SECONDS, Claim
from spes_p2p.swarm.validation import RecordValidator
from spes_p2p.swarm.wire import MAX_STRANGE_BYTES, Envelope

RESULTS = ROOT / "benchmarks" / "results"
STORE_SECONDS = 3600.0
NUM_GHOSTS, NUM_SLOTS = 1000, 128
FIRST_SECONDS, LATER_SECONDS = 0.3, 0.02
MEAN_KB, MOST_KB = 80, 400
NUM_FLOOD, FLOOD_BYTES = 24, 15_000
BEFORE = "f5f8ccb"
"""Last commit without certificates that the goals were set on."""
FIRST = "8071df1"
"""First commit with certificates."""
DECIDING = ("spes_p2p/swarm", "spes_p2p/training")
Seen = dict[str, Any]


def documents(seen: Seen) -> Iterator[Row]:
    """Yield what a founder's documents can do to a volunteer's machine."""
    tests = ["test_strangers.py", "test_peer_confined.py"]
    files = [*(f"tests/swarm/{name}" for name in tests), "tests/attacks/test_shown_text.py"]
    yield passing("a founder's documents: files read, processes ended, escapes printed", "0", files, seen)


def ghosts(seen: Seen) -> Iterator[Row]:
    """Yield what identities do that claim slots, or come to meetings, and do nothing."""
    what = "one ghost, and as many as honest peers, before and after the first commit, real processes"
    yield passing(what, "no round lost, no slot starved", ["tests/attacks/test_ghosts.py"], seen)
    figures = (
        "tests/unit/monitor/test_monitor_view.py::test_records_of_peers_that_no_certificate_knows_change_no_figure"
    )
    yield passing("- their metrics", "figures unchanged", [figures], seen)
    forged = "certificates and proposals that ghosts or a minority of voters sign"
    yield passing(forged, "none counts", ["tests/attacks/test_who_counts.py"], seen)


def claims(seen: Seen) -> Iterator[Row]:
    """Yield the processor time of a peer, its DHT node included, for the claims of many ghosts."""
    with tempfile.TemporaryDirectory(prefix="claims-") as folder:
        node = Node(Identity(Path(folder) / "key"), "haunted")
        try:
            before = _child_seconds()
            _haunt(node, Path(folder))
            stored, seconds = _child_seconds() - before, list[float]()
            for _ in range(6):
                before = _processor_seconds()
                assert len(node.read(Claim)) == NUM_GHOSTS
                seconds.append(_processor_seconds() - before)
        finally:
            node.close()
    seen["reads"] = seconds
    seconds[0] += stored
    later = statistics.median(seconds[1:])
    what = f"processor time of a peer for {NUM_GHOSTS:,} ghost claims of {NUM_SLOTS} slots: once"
    yield Row(what, f"{seconds[0]:.2f} s", f"{FIRST_SECONDS} s", seconds[0] <= FIRST_SECONDS)
    yield Row("- each later time", f"{later:.2f} s", f"{LATER_SECONDS} s", later <= LATER_SECONDS)


def _haunt(node: Node, folder: Path) -> None:
    """Store the claims of identities that nothing else is known of, as other nodes would."""
    records = []
    ends_at = get_dht_time() + MAX_LIFETIME_SECONDS
    for index in range(NUM_GHOSTS):
        ghost = Identity(folder / f"ghost{index}")
        claim = Claim(
            peer_id=ghost.peer_id, state="active", slots=tuple(range(NUM_SLOTS)), max_slots=NUM_SLOTS, since=1.0
        )
        signer, key = RecordValidator("haunted", ghost), DHTID.generate(source=claim.key("haunted")).to_bytes()
        record = DHTRecord(key, msgpack.packb(signer.subkey), msgpack.packb(claim.encode()), ends_at)
        records.append((key, signer.subkey, signer.sign_value(record), ends_at))
    file = folder / "records"
    file.write_bytes(msgpack.packb(records))
    stored = node.dht.run_coroutine(functools.partial(_take, file), return_future=True).result(STORE_SECONDS)
    assert stored == NUM_GHOSTS


async def _take(file: Path, dht: DHT, node: DHTNode) -> int:
    """Store records in a DHT's node that it did not sign; return how many are valid."""
    count = 0
    for key, subkey, value, ends_at in msgpack.unpackb(file.read_bytes()):
        record = DHTRecord(key, msgpack.packb(subkey), value, ends_at)
        is_valid = node.protocol.record_validator.validate(record)
        count += is_valid and node.protocol.storage.store(DHTID.from_bytes(key), value, ends_at, subkey=subkey)
    return count


def _child_seconds() -> float:
    """Return the processor time of the DHT's process and p2pd."""
    return sum(sum(each.cpu_times()[:2]) for each in psutil.Process().children(recursive=True))


def _processor_seconds() -> float:
    return _child_seconds() + time.process_time()


def histories(seen: Seen) -> Iterator[Row]:
    """Yield what random histories have shown; `benchmarks/histories.py --write` makes more of them."""
    found = json.loads((RESULTS / "histories.json").read_text())
    honest, twice = found["honest"], found["twice"]
    count = honest["histories"]
    for what, key in (
        ("two unshrunk certificates of one round", "forks"),
        ("certificates lost", "lost"),
        ("runs that stand still though more than half answer", "stands"),
    ):
        bad, num_judged, of = honest.get(key, 0), count, f"{count:,}"
        if key == "lost":  # where fewer than a quorum went on, or the run forked, none is judged
            num_judged = honest.get("judged", count - honest["shrunk"] - honest["forks"])
            least = "" if "judged" in honest else "at least "
            of = f"{least}{num_judged:,} that had neither a shrunk certificate nor a fork"
        yield Row(f"histories: {what}", f"{bad} of {of}", "0 of 10,000", not bad and num_judged >= 10_000)
        if key == "lost":
            gone = honest.get("on_no_disk", 0)
            yield Row("- that no disk had any more, after restores of older backups", f"{gone} of {of}")
    unproven, forks, rounds = twice.get("unproven", 0), twice.get("forks", 0), twice["rounds_until_out"]
    found_forks = f"{unproven} of {forks} forks in {twice['histories']:,} histories"
    yield Row("- with a voter that signs twice: forks unproven", found_forks, "0", not unproven)
    yield Row("- rounds until it is out, at most", f"{rounds}", "2", rounds <= 2)


def kills(seen: Seen) -> Iterator[Row]:
    """Yield what is lost when real peers die; `benchmarks/elastic.py --only kills --write` measures it."""
    found = json.loads((RESULTS / "elastic.json").read_text())["kills"]
    row = Row(**found["figures"][0])
    yield _dated(row, found["circumstances"]["commit"])


def faults(seen: Seen) -> Iterator[Row]:
    """Yield what faults within a round do; `benchmarks/faults.py` measures it."""
    found = json.loads((RESULTS / "faults.json").read_text())
    cases, commit = found["cases"], found["circumstances"]["commit"]
    wrong, whole = sum(bool(case["wrong"]) for case in cases), sum(case["committed"] == SURVIVORS for case in cases)
    count = len(cases)
    yield _dated(
        Row("faults: wrong or partial means", f"{wrong} of {count}", "0 of 300", count >= 300 and not wrong), commit
    )
    what = "- rounds that the survivors committed"
    yield _dated(Row(what, f"{whole} of {count}", "all of 300", whole == count >= 300), commit)


def _dated(row: Row, commit: str | None) -> Row:
    """Return a row with the commit that it was measured on; one without certificates reaches no goal."""
    words = ["git", "merge-base", "--is-ancestor", FIRST, commit or ""]
    if subprocess.run(words, cwd=ROOT, capture_output=True).returncode == 0:
        return row._replace(measured=f"{row.measured} ({commit})")
    return row._replace(measured=f"{row.measured}, before certificates", is_reached=False)


def bytes_sent(seen: Seen) -> Iterator[Row]:
    """Yield what a round's decision sends; `python -m benchmarks.certificate_bytes` counts it."""
    for row in json.loads((RESULTS / "certificate_bytes.json").read_text())["rows"]:
        mean = max(row["mean_kb_sent"], row["mean_kb_received"])
        what = f"bytes of a round's decision, {row['peers']} peers: each way, mean of all peers"
        yield Row(what, f"{mean:.1f} KB", f"{MEAN_KB} KB", mean <= MEAN_KB)
        most = max(row["most_kb_sent"], row["most_kb_received"])
        yield Row("- the most, by peers that lead", f"{most:,.0f} KB", f"{MOST_KB} KB", most <= MOST_KB)


def flood(seen: Seen) -> Iterator[Row]:
    """Yield what a stranger's messages take that unpack to 4 MB, and those that are as long as a stranger's may be."""
    item = b'{"peer_id":"","tokens":0},'
    for num_bytes in (2**22, MAX_STRANGE_BYTES - 1):
        text = b'{"certificates":{"certificates":[' + item * (num_bytes // len(item))
        data = zlib.compress(text[:num_bytes]).ljust(FLOOD_BYTES, b"0")
        tracemalloc.start()
        _refused(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        began = time.thread_time()
        for _ in range(NUM_FLOOD):
            _refused(data)
        seconds = (time.thread_time() - began) / NUM_FLOOD
        seen[f"flood {num_bytes}"] = {"bytes": peak, "seconds": seconds}
        what = f"{NUM_FLOOD} messages of a stranger, 15 KB that unpack to {size_text(num_bytes)}: memory of one"
        yield Row(what, f"{peak / 1024:.0f} KiB", "64 KiB", peak <= 2**16)
        yield Row("- processor time of one", f"{1000 * seconds:.1f} ms", "10 ms", seconds <= 0.01)


def _refused(data: bytes) -> None:
    with contextlib.suppress(ExchangeError):
        Envelope.unpack(data, MAX_STRANGE_BYTES)
        raise AssertionError("a message that is none was taken")


def round_time(seen: Seen) -> Iterator[Row]:
    """Yield how much longer a round takes than without certificates."""
    found = measure_round_ends(RoundEndConfig())
    seen["round ends"] = found
    change = found["change_seconds"]
    what = "a round besides training, 4 peers, 40 ms, against the last version without certificates, median of pairs"
    yield Row(what, f"{change:+.2f} s", "+0.3 s at most", change <= 0.3)


def lines(seen: Seen) -> Iterator[Row]:
    """Yield the lines of what decides who counts, before and now."""
    for folder in DECIDING:
        names = _git("ls-tree", "-r", "--name-only", BEFORE, folder).split()
        before = sum(len(_git("show", f"{BEFORE}:{name}").splitlines()) for name in names if name.endswith(".py"))
        now = sum(len(file.read_text().splitlines()) for file in (ROOT / folder).rglob("*.py"))
        yield Row(f"lines of {folder}/", f"{now:,}", f"{before:,}", now <= before)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True, text=True).stdout


Part = Literal["documents", "ghosts", "claims", "histories", "kills", "faults", "bytes", "flood", "time", "lines"]
PARTS: dict[str, Callable[[Seen], Iterator[Row]]] = {
    "documents": documents,
    "ghosts": ghosts,
    "claims": claims,
    "histories": histories,
    "kills": kills,
    "faults": faults,
    "bytes": bytes_sent,
    "flood": flood,
    "time": round_time,
    "lines": lines,
}
BOARD = Scoreboard(RESULTS / "certificates.json", Path("benchmarks/results/certificates.md"), "CERTIFICATES", PARTS)


class CertificatesConfig(CommandConfig):
    """Who counts, and what it costs."""

    only: list[Part] = []
    """Parts of the table to measure; by default all."""
    write: bool = False
    """Leave what was measured in benchmarks/results/certificates.json and, between its markers, in
    certificates.md beside it."""
    log_level: LogLevel = "warning"


def main(config: CertificatesConfig) -> int:
    """Measure and print; return 1 if a goal was missed."""
    torch.set_num_threads(1)
    details = (lambda seen: {"seen": seen}) if config.write else None
    return 0 if BOARD.run(config.only, lambda name: {}, details) else 1


if __name__ == "__main__":
    entry_point(CertificatesConfig, main)
