"""The command that turns a dense checkpoint into a mixture of experts: `scripts/upcycle.py`."""

from __future__ import annotations

from pydantic_settings import SettingsConfigDict

from spes_p2p.config import CommandConfig
from spes_p2p.model.upcycling import UpcycleSettings, upcycle
from spes_p2p.planner.tables import params_text
from spes_p2p.presentation import say


class UpcycleConfig(CommandConfig, UpcycleSettings):
    """A mixture of experts from a dense checkpoint: Qwen3-MoE from Qwen3, Mixtral from Llama."""

    model_config = SettingsConfigDict(
        env_prefix="SPES_UPCYCLE_", cli_prog_name="upcycle.py", cli_shortcuts={"source": "from"}
    )


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
