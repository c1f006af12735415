"""What a monitor decides for itself; everything else it learns from the run's signed manifest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from spes_p2p.config import CommandConfig, NamedRun, PositiveFloat, PositiveInt
from spes_p2p.errors import ConfigError
from spes_p2p.swarm.p2p import peerstore

METRICS_FILE, REPORT_FILE, MODEL_DIRECTORY = "metrics.jsonl", "report.html", "model"
VERSIONS_DIRECTORY, IDENTITY_FILE = "versions", "identity.key"


class MonitorConfig(CommandConfig, NamedRun):
    """One monitor's choices, as flags: `--run-id r --initial-peers ADDR --output runs/monitor`."""

    model_config = SettingsConfigDict(env_prefix="SPES_MONITOR_", cli_prog_name="run_monitor.py")

    initial_peers: Annotated[list[str], Field(min_length=1)]
    """Multiaddrs of peers in the swarm."""
    output: Path = Path("runs/monitor")
    """Directory of `metrics.jsonl`, `report.html`, `model/` and this peer's identity and versions."""
    resume: bool = False
    """Continue the `metrics.jsonl` that `output` holds."""
    overwrite: bool = False
    """Delete what an earlier monitor left in `output` and start anew."""
    held_out_sequences: Annotated[int, Field(ge=0)] = 32
    """Sequences of held-out text to evaluate the swarm's model on; 0 evaluates nothing."""
    evaluate_every: PositiveInt = 1
    """Rounds between evaluations; the start and the last round are always evaluated."""
    poll_seconds: PositiveFloat = 1.0
    """Interval of reading the swarm's records; a peer's report of a round is missed if it lives shorter."""
    console: Literal["auto", "live", "plain", "none"] = "auto"
    """`live`: a table that refreshes; `plain`: one line per round; `auto`: live on a terminal."""
    wandb: bool = False
    """Log to Weights & Biases; offline and without an account unless WANDB_MODE says otherwise."""
    wandb_project: Annotated[str, Field(min_length=1)] = "spes_p2p"
    """Project of the W&B run."""
    text: list[Path] = []
    """Local files or folders to evaluate on, for runs whose data source is `files`."""
    cache: Path = Path("~/.cache/spes_p2p")
    """Where tokenised text is kept."""
    threads: PositiveInt | None = None
    """CPU threads for evaluating; by default PyTorch's choice."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Least severe event to log."""

    @model_validator(mode="after")
    def _check_start(self) -> MonitorConfig:
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite exclude each other; choose one")
        return self


def prepare_output(settings: MonitorConfig) -> Path:
    """Return the output directory, ready for a new or a resumed watch.

    Only what monitors write is looked at and deleted: a launcher keeps files of its own there.

    Raises:
        ConfigError: it holds an earlier monitor's results and neither resume nor overwrite is set, or it cannot
            be written.
    """
    output = settings.output.expanduser()
    results = [output / name for name in (METRICS_FILE, REPORT_FILE, MODEL_DIRECTORY, VERSIONS_DIRECTORY)]
    found = [path.name for path in results if path.exists()]
    if found and not settings.resume and not settings.overwrite:
        raise ConfigError(f"output {output} holds {', '.join(found)} already; pass --resume, --overwrite or another")
    try:
        output.mkdir(parents=True, exist_ok=True)
        for path in [*results, output / peerstore.FILE] if settings.overwrite else []:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write output {output}: {error.strerror}; choose a writable --output") from error
    return output
