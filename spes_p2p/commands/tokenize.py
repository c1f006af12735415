"""`spes tokenize`: turn text into shards of token ids."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from spes_p2p.cli import all_flags, explain
from spes_p2p.config import DataConfig
from spes_p2p.config.commands import TokenizeConfig
from spes_p2p.data.shards import ShardManifest
from spes_p2p.data.tokenise import Progress, Settings, find_files, split_prefix, tokenise
from spes_p2p.errors import ConfigError, in_flags
from spes_p2p.presentation import say, takes_escapes


def main(config: TokenizeConfig) -> int:
    """Tokenise; return the exit code.

    Raises:
        ConfigError, DataError: as `tokenise`.
    """
    files = find_files(config.file_glob)
    folder, stem = split_prefix(config.output_prefix)
    payload, vocab_size, template = _tokenizer(config, files)
    narrow = vocab_size <= 2**16
    if config.dtype == "uint16" and not narrow:
        raise ConfigError(f"dtype=uint16 does not hold the {vocab_size} ids of the tokenizer; set --dtype uint32")
    settings = Settings(
        folder=folder,
        stem=stem,
        tokenizer=payload,
        vocab_size=vocab_size,
        dtype=config.dtype or ("uint16" if narrow else "uint32"),
        text_field=config.text_field,
        max_shard_bytes=config.max_shard_bytes,
        skip_unusable=config.skip_unusable,
        batch_size=config.batch_size,
        processes=config.processes or len(os.sched_getaffinity(0)),
        cache=config.cache,
        template=template,
    )
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, disable=not (console.is_terminal and takes_escapes())) as bar:
        task = bar.add_task("tokenising", total=None)

        def show(progress: Progress) -> None:
            said = f"tokenising: {progress.num_tokens / 1e6:,.1f} M tokens"
            bar.update(task, total=progress.total_bytes, completed=progress.done_bytes, description=said)

        manifest = tokenise(files, settings, show)
    say(_summary(manifest, folder / f"{stem}manifest.json"))
    return 0


def _tokenizer(config: TokenizeConfig, files: list[Path]) -> tuple[bytes, int, str]:
    """Return the tokenizer's bytes, its entries and its chat template."""
    from spes_p2p.data.tokenizer import own_template, resolve_tokenizer, tokenizer_bytes  # slow to import

    try:
        given = config.model_dump(include={"text_field", "tokenizer", "skip_unusable"})
        data = DataConfig(source="files", **given)
    except ValidationError as error:
        raise ConfigError(explain(error)) from error
    tokenizer = resolve_tokenizer(data, files, config.cache)
    return tokenizer_bytes(tokenizer), len(tokenizer), own_template(tokenizer) or ""


def _summary(manifest: ShardManifest, path: Path) -> str:
    num = len(manifest.shards)
    lines = [
        f"{manifest.tokens:,} tokens of {manifest.documents:,} documents in {num} shard{'s' * (num > 1)}: {path}",
        f"fingerprint {manifest.fingerprint}",
    ]
    if manifest.skipped:
        reason = in_flags(manifest.skipped[0].reason, all_flags(TokenizeConfig))
        lines.append(f"left out {len(manifest.skipped)} files: {reason}")
    if skipped_rows := sum(source.skipped_rows for source in manifest.sources):
        lines.append(f"left out {skipped_rows:,} rows")
    lines.append(f"train on them: spes local --data {shlex.quote(str(path))}")
    return "\n".join(lines)
