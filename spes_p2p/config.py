"""What the swarm agrees on (RunConfig) and what one machine decides (PeerConfig).

A RunConfig travels inside the run's signed manifest, so joining needs no file. A PeerConfig is read by
pydantic-settings: flags over environment (`SPES_...`) over YAML over defaults; unknown keys are errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Storage = Literal["fp32", "bf16"]
RunId = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class Frozen(BaseModel):
    """Base of config sections: immutable, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(Frozen):
    """Shape of the mixture-of-experts model, in the stock Hugging Face classes' terms."""

    family: Literal["olmoe", "qwen3_moe", "mixtral"] = "olmoe"
    """Which stock `transformers` architecture to build."""
    hidden_size: PositiveInt = 128
    """Width D of the residual stream."""
    num_layers: PositiveInt = 4
    """Decoder layers, each with one expert module."""
    num_heads: PositiveInt = 4
    """Attention heads; must divide `hidden_size`."""
    num_kv_heads: PositiveInt = 4
    """Key/value heads; must divide `num_heads`."""
    intermediate_size: PositiveInt = 128
    """Width of one expert's SwiGLU."""
    num_experts: PositiveInt = 16
    """Experts E per layer; slot e is expert e of every layer."""
    top_k: PositiveInt = 2
    """Experts each token is routed to."""
    norm_topk_prob: bool = True
    """Renormalise the top-k router probabilities (Mixtral always does)."""
    tie_embeddings: bool = True
    """Share the input embedding with the output head: a third less to average in small models."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary position embedding."""

    @model_validator(mode="after")
    def _check_shapes(self) -> ModelConfig:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"model.top_k={self.top_k} exceeds model.num_experts={self.num_experts}; "
                f"set it to {self.num_experts} or less"
            )
        for small, large in (("num_heads", "hidden_size"), ("num_kv_heads", "num_heads")):
            if getattr(self, large) % getattr(self, small):
                raise ValueError(
                    f"model.{small}={getattr(self, small)} does not divide model.{large}={getattr(self, large)}; "
                    f"choose a divisor"
                )
        return self


class DataConfig(Frozen):
    """What the run learns from, and how text becomes sequences."""

    source: Literal["embedded", "files", "hub"] = "embedded"
    """`embedded`: the Python standard library's own source and documentation, read from the interpreter;
    `files`: text, jsonl or parquet that each peer names with --text; `hub`: a `datasets` name, streamed."""
    name: str | None = None
    """For `hub`: the dataset's name, optionally `name:config`."""
    split: str = "train"
    """For `hub`: the split to stream."""
    text_field: str = "text"
    """Column that holds the text in jsonl, parquet and hub datasets."""
    tokenizer: str | None = None
    """A Hugging Face tokenizer (name or directory); none trains a byte-level BPE on the corpus at first use."""
    vocab_size: PositiveInt = 4096
    """Entries of a BPE trained at first use; with `tokenizer`, replaced by that tokenizer's size."""
    sequence_length: PositiveInt = 256
    """Tokens per training sequence."""
    held_out_fraction: Annotated[float, Field(gt=0, lt=0.5)] = 0.02
    """Share of documents, chosen by hash, kept for the held-out loss and never trained on."""

    @model_validator(mode="after")
    def _check_source(self) -> DataConfig:
        if self.source == "hub" and not self.name:
            raise ValueError("data.source=hub needs data.name; set it to a `datasets` name")
        return self


class TrainConfig(Frozen):
    """Inner (local) training: optimizer, schedule, losses."""

    batch_size: PositiveInt = 8
    """Sequences per optimizer step of one peer, over all its ranks and microbatches."""
    lr: PositiveFloat = 2e-3
    """Peak learning rate of AdamW."""
    beta1: Fraction = 0.9
    """AdamW's decay of the first moment."""
    beta2: Fraction = 0.95
    """AdamW's decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """Decoupled weight decay, on every parameter as in SPES."""
    clip_norm: PositiveFloat = 1.0
    """Gradient norm above which gradients are scaled down; over shared and claimed parameters together."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after the warm-up, over the run's rounds."""
    warmup_rounds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    """Rounds (may be a fraction) of linear warm-up."""
    final_lr_ratio: Fraction = 0.1
    """Learning rate at the end of the cosine, as a share of the peak."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`bf16` runs the forward pass under autocast; parameters stay fp32."""
    balance_loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-2
    """Coefficient of the per-layer load-balance loss."""
    router_z_loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-3
    """Coefficient of the router z-loss."""
    claimed_balance_factor: Fraction = 1.0
    """Start of SPES's factor on a peer's own experts' counts in the balance loss; rises to 1 over the
    first fifth of the run. SPES uses 0.7; 1.0 switches it off."""


class RoundConfig(Frozen):
    """When a round ends, and how long each of its phases may take."""

    mode: Literal["tokens", "steps"] = "tokens"
    """`tokens`: a round ends at one common time, when the swarm is expected to reach `tokens`;
    `steps`: each peer makes `steps` local steps."""
    tokens: PositiveInt = 98_304
    """Tokens the swarm trains in one round."""
    steps: PositiveInt = 25
    """Local steps per round in mode `steps`."""
    min_seconds: PositiveFloat = 5.0
    """A round's least training time in mode `tokens`."""
    max_seconds: PositiveFloat = 600.0
    """A round's most training time in mode `tokens`."""
    total: PositiveInt = 10
    """Rounds in the run; also the learning rate schedule's horizon."""
    min_peers: PositiveInt = 1
    """Active peers to wait for before the first round."""
    matchmaking_seconds: PositiveFloat = 3.0
    """Time a leader collects members when not everybody expected shows up."""
    averaging_seconds: PositiveFloat = 30.0
    """Deadline of one averaging attempt, from roster to confirmed digests; a failed attempt is redone once."""
    exchange_seconds: PositiveFloat = 60.0
    """Deadline of pulling the slots that this peer does not hold."""
    lease_seconds: PositiveFloat = 30.0
    """Lifetime of a claim that is not renewed."""
    heartbeat_seconds: PositiveFloat = 10.0
    """Interval of renewals."""

    @model_validator(mode="after")
    def _check_times(self) -> RoundConfig:
        if self.min_seconds > self.max_seconds:
            raise ValueError(
                f"round.min_seconds={self.min_seconds} exceeds round.max_seconds={self.max_seconds}; swap them"
            )
        if self.heartbeat_seconds * 2 > self.lease_seconds:
            raise ValueError(
                f"round.heartbeat_seconds={self.heartbeat_seconds} leaves no room for one lost heartbeat in "
                f"round.lease_seconds={self.lease_seconds}; set it to {self.lease_seconds / 2} or less"
            )
        return self


class OuterConfig(Frozen):
    """How averaged deltas move the anchor (DiLoCo's outer optimizer)."""

    optimizer: Literal["mean", "nesterov"] = "mean"
    """`mean` takes the average as it is; `nesterov` adds momentum over rounds."""
    lr: PositiveFloat = 0.7
    """Outer learning rate of `nesterov`."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of `nesterov`."""
    moments: Literal["both", "second", "local"] = "both"
    """AdamW's moments that are averaged with the deltas; `local` leaves them to each peer, `second` spares a third of
    the averaged bytes. Why they are averaged: docs/convergence.md."""

    @property
    def averaged_moments(self) -> tuple[str, ...]:
        """The averaged moments by torch's names, in the order in which they lie behind a delta."""
        return {"both": ("exp_avg", "exp_avg_sq"), "second": ("exp_avg_sq",), "local": ()}[self.moments]


class MergeConfig(Frozen):
    """SPES's merge warm-up: similar experts are pulled together early on; off when `alpha` is 0."""

    alpha: Fraction = 0.0
    """Share of the way towards the similar experts' mean at the start; decays linearly to 0. SPES uses 0.05."""
    interval_rounds: PositiveInt = 1
    """Merge every so many rounds."""
    decay_rounds: PositiveInt = 10
    """Rounds over which `alpha` decays to 0."""
    top_k: PositiveInt = 4
    """Most similar experts to move towards; capped at E - 1."""


class RunConfig(Frozen):
    """Everything the swarm agrees on; its digest is the identity of the run's manifest."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    round: RoundConfig = RoundConfig()
    outer: OuterConfig = OuterConfig()
    merge: MergeConfig = MergeConfig()
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the initial weights, the same on every peer."""
    frozen_storage: Storage = "bf16"
    """Default precision of the experts a peer does not hold; a machine may choose otherwise with --storage."""


class CommandConfig(BaseSettings):
    """Base of the commands' settings: flags over `SPES_` variables over the YAML of `--config` over defaults."""

    model_config = SettingsConfigDict(
        env_prefix="SPES_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        nested_model_default_partial_update=True,
        use_attribute_docstrings=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, YamlConfigSettingsSource(settings_cls))


class PeerConfig(CommandConfig):
    """One machine's choices, as flags: `--run-id r --initial-peers ADDR ...`."""

    model_config = SettingsConfigDict(cli_prog_name="run_peer.py")

    config: Path | None = None
    """YAML file to start a new run from, and to read this machine's choices from."""
    run_id: RunId
    """Name of the run to found or to join."""
    initial_peers: list[str] = []
    """Multiaddrs of peers already in the swarm; none founds a new run."""
    run: RunConfig | None = None
    """The run's settings, for its founder only; everybody else takes them from the signed manifest."""
    output: Path = Path("runs/peer")
    """Directory of this peer's identity, versions, checkpoint and log."""
    resume: bool = False
    """Continue from what `output` holds."""
    overwrite: bool = False
    """Delete what `output` holds and start anew."""
    max_slots: PositiveInt | None = None
    """Expert slots to claim at most; by default as many as this machine's free memory allows."""
    storage: Storage | None = None
    """Precision of the experts this peer does not hold; by default the run's."""
    kernel: Literal["loop"] = "loop"
    """Expert kernel."""
    micro_batch_size: PositiveInt | None = None
    """Sequences per forward pass; by default the whole step's share of this rank."""
    text: list[Path] = []
    """Local files or folders (text, jsonl, parquet) to train on, for runs whose data source is `files`."""
    data_seed: int | None = None
    """Seed of this peer's data order; by default derived from its identity."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port to listen on; 0 lets the system choose."""
    announce: list[str] = []
    """Multiaddrs under which others reach this peer, where they differ from host and port."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    threads: PositiveInt | None = None
    """CPU threads per rank; by default PyTorch's choice."""
    seed_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """After the run's last round, keep serving its versions for so long, or until a monitor has archived them."""
    cache: Path = Path("~/.cache/spes_p2p")
    """Where trained tokenizers and tokenised text are kept."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Least severe event to log."""
