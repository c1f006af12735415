"""`spes upcycle`: make a mixture of experts from a dense checkpoint."""

from __future__ import annotations

from spes_p2p.config.commands import UpcycleConfig
from spes_p2p.model.upcycling import upcycle
from spes_p2p.planner.tables import params_text
from spes_p2p.presentation import say


def main(config: UpcycleConfig) -> int:
    """Upcycle a checkpoint; return the exit code.

    Raises:
        ConfigError, DataError: as `upcycle`.
    """
    architecture, num_params = upcycle(config)
    say(
        f"wrote {config.output}: {architecture} with {config.num_experts} experts, {params_text(num_params)} parameters"
    )
    return 0
