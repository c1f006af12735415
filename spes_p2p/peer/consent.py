"""The question before a volunteer's machine reads what a stranger's manifest names, with source, licence and size."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from spes_p2p.data.hub import find_hub_files
from spes_p2p.data.remote import strangers
from spes_p2p.errors import ConfigError
from spes_p2p.presentation import printable, size_text
from spes_p2p.swarm.manifest import Manifest

log = logging.getLogger(__name__)
MAX_FIELD_CHARS = 100


def ask_to_read(
    manifest: Manifest, num_tokenizer_bytes: int, *, yes: bool, reads_data: bool = True, paths: Sequence[Path] = ()
) -> None:
    """Show the public data set and the tokenizer that another founder's run names, and ask before they are read.

    A run on the embedded corpus or on the volunteer's own files, with a tokenizer of the run's own, asks nothing.

    Args:
        yes: Agree without a question.
        reads_data: Whether this command reads the data set.
        paths: The user's own data, in place of shards that the run names addresses of.

    Raises:
        ConfigError: the answer is no, or there is no terminal to ask at.
        DataError: the hub does not describe the data set, or no address has the run's shards.
    """
    sources = _sources(manifest, num_tokenizer_bytes, paths, reads_data=reads_data)
    if not sources:
        return
    for source in sources:
        log.info("run %r reads %s", manifest.run_id, source)
    if yes:
        return
    if not sys.stdin.isatty():  # guard: never
        raise ConfigError(f"run {manifest.run_id!r} reads {' and '.join(sources)}; agree to that with --yes")
    sys.stderr.write("Read this on your machine? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):  # guard: never
        raise ConfigError(f"run {manifest.run_id!r} was not joined, and nothing was read; join another, or answer y")


def _sources(manifest: Manifest, num_tokenizer_bytes: int, paths: Sequence[Path], *, reads_data: bool) -> list[str]:
    data, found = manifest.config.data, []
    if data.source == "hub" and reads_data:
        files = find_hub_files(data)
        licence = printable(files.licence, MAX_FIELD_CHARS) or "not stated"
        found.append(
            f"the data set {data.name}, split {data.split}, of the Hugging Face hub (licence {licence}, "
            f"{len(files.files)} files, {size_text(files.num_bytes)})"
        )
    for fingerprint, urls, num_bytes in strangers(data, paths) if reads_data else ():
        where = " or ".join(printable(url, MAX_FIELD_CHARS) for url in urls)
        found.append(f"the token shards {fingerprint[:12]} from {where} (licence not stated, {size_text(num_bytes)})")
    if data.tokenizer is not None:
        found.append(
            f"the tokenizer {printable(data.tokenizer, MAX_FIELD_CHARS)}, which the founder has sent (licence that of "
            f"its source, {manifest.vocab_size} entries, {size_text(num_tokenizer_bytes)})"
        )
    return found
