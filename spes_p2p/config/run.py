"""What the swarm agrees on. A RunConfig travels inside the run's signed manifest, so joining needs no file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, ValidationInfo, model_serializer, model_validator

from spes_p2p.codecs import CODECS
from spes_p2p.config.checkpoint import (
    NO_FLAG,
    AdapterConfig,
    Coefficient,
    Decay,
    Fraction,
    Frozen,
    PositiveFloat,
    Rate,
    StartConfig,
    Storage,
)
from spes_p2p.config.data import DataConfig
from spes_p2p.config.families import FAMILIES, Family

MAX_ROUNDS = 10**6
Rounds = Annotated[int, Field(ge=1, le=MAX_ROUNDS)]
RevokedInvite = Annotated[str, Field(min_length=6, max_length=16, pattern=r"^[A-Za-z0-9+/]*$")]
FIRST_SHARE = 0.01
"""Length of the first of rounds that grow, as a share of a full round's."""
LEAST_SECONDS = 5.0
"""Least training time of a growing round of mode `tokens`, in seconds, unless `min_seconds` is less."""
MAX_ROUND_SECONDS, MAX_PHASE_SECONDS = 86_400.0, 3600.0
TrainingSeconds = Annotated[float, Field(ge=0.001, le=MAX_ROUND_SECONDS, allow_inf_nan=False)]
# guard: le=MAX_PHASE_SECONDS -> le=1e300
PhaseSeconds = Annotated[float, Field(ge=0.001, le=MAX_PHASE_SECONDS, allow_inf_nan=False)]
"""Longest wait for other peers in one phase of a round; also the longest that the exchange's messages can ask for."""
MAX_LEASE_SECONDS = 600.0
"""Longest lifetime of a record. Every node refuses a longer one, so a longer lease would silence the run."""
KEPT_BLOCK = 128
"""Elements that share a scale in a kept form, at most; the number of an expert's must be a multiple of it."""
MAX_PEER_TOKENS = 2**34
"""More tokens than one peer can train between two rounds."""
FOUNDED = "founded"
"""Context in which the settings of a founded run are read, in which the warm-up cannot change."""
OUTER: dict[str, tuple[str, bool]] = {"mean": ("outer:Mean", False), "nesterov": ("outer:Nesterov", True)}
"""Outer optimizers: the class, and whether anchors move with a momentum, which they then have and travel with."""
OptimizerName = Literal["adamw", "adamw8bit", "lamb", "muon"]
if TYPE_CHECKING:
    CodecName: TypeAlias = str
    MomentCodecName: TypeAlias = str
    OuterName: TypeAlias = str
    FamilyName: TypeAlias = str
else:
    CodecName = Literal[tuple(CODECS)]
    MomentCodecName = Literal[tuple(name for name, (_, for_moments) in CODECS.items() if for_moments)]
    OuterName = Literal[tuple(OUTER)]
    FamilyName = Literal[tuple(FAMILIES)]


class ModelConfig(Frozen):
    """Shape of the model, in the stock Hugging Face classes' terms."""

    family: FamilyName = "olmoe"
    """Which stock `transformers` architecture to build: the first three are mixtures of experts, the others dense.
    Those after `gemma` start from a checkpoint (--from)."""
    hidden_size: Annotated[int, Field(ge=1, le=2**16)] = 128
    """Width D of the residual stream."""
    num_layers: Annotated[int, Field(ge=1, le=1024)] = 4
    """Decoder layers."""
    num_heads: Annotated[int, Field(ge=1, le=1024)] = 4
    """Attention heads; must divide `hidden_size`."""
    num_kv_heads: Annotated[int, Field(ge=1, le=1024)] = 4
    """Key/value heads; must divide `num_heads`."""
    intermediate_size: Annotated[int, Field(ge=1, le=2**18)] = 128
    """Width of one expert's SwiGLU, or of a dense layer's."""
    num_experts: Annotated[int, Field(ge=0, le=4096)] = 16
    """Experts E per layer; slot e is expert e of every layer. 0 in dense families, and only there."""
    top_k: Annotated[int, Field(ge=0, le=4096)] = 2
    """Experts each token is routed to; 0 in dense families, and only there."""
    norm_topk_prob: bool = True
    """Renormalise the top-k router probabilities (Mixtral always does)."""
    tie_embeddings: bool = True
    """Share the input embedding with the output head: a third less to average in small models."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary position embedding."""
    norm_eps: PositiveFloat | None = None
    """Epsilon of the RMS norms; by default the family's: 1e-5 of `olmoe` and `mixtral`, 1e-6 of the others. SPES uses
    1e-6."""
    # guard: ge=1, le=100 -> ge=1e-300, le=100
    init_cutoff: Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)] | None = None
    """Largest initial weight, in standard deviations of 0.02; larger ones are drawn again. By default none are. SPES
    uses 3."""
    start: Annotated[StartConfig | None, NO_FLAG] = None
    """The checkpoint that the run starts from; by default none: weights are drawn. `spes peer --from` sets it."""

    @property
    def stock(self) -> Family:
        """What this program knows of the architecture."""
        return FAMILIES[self.family]

    @property
    def is_dense(self) -> bool:
        """Whether the model has no experts, and the run no slots."""
        return self.stock.is_dense

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.start.head_dim if self.start and self.start.head_dim else self.hidden_size // self.num_heads

    def embedding_rows(self, vocab_size: int) -> int:
        """Return the rows of the embedding of a run whose tokenizer has `vocab_size` entries."""
        return self.start.vocab_size if self.start else vocab_size

    @model_validator(mode="after")
    def _check_shapes(self) -> ModelConfig:
        if self.start is not None:
            self._check_start(self.start)
        if self.stock.is_carried != bool(self.start and self.start.config and self.start.tensors):  # guard: never
            raise ValueError(f"model.family={self.family} needs a checkpoint to start from; name one with --from")
        for name in ("num_experts", "top_k"):
            if (getattr(self, name) == 0) != self.is_dense:  # guard: never
                raise ValueError(
                    f"model.{name}={getattr(self, name)} does not go with model.family={self.family}; set it to "
                    f"{'0: a dense model has no experts' if self.is_dense else '1 or more'}"
                )
        if self.top_k > self.num_experts:
            raise ValueError(
                f"model.top_k={self.top_k} exceeds model.num_experts={self.num_experts}; "
                f"set it to {self.num_experts} or less"
            )
        is_free = self.start is not None and self.start.head_dim is not None and not self.stock.heads_divide_width
        widths = [] if is_free else [("num_heads", "hidden_size")]
        for small, large in (*widths, ("num_kv_heads", "num_heads")):
            if getattr(self, large) % getattr(self, small):
                raise ValueError(
                    f"model.{small}={getattr(self, small)} does not divide model.{large}={getattr(self, large)}; "
                    f"choose a divisor"
                )
        return self

    def _check_start(self, start: StartConfig) -> None:
        """Refuse what the family's configuration cannot say, and what contradicts the shape."""
        if len(start.slots) != self.num_experts:  # guard: never
            raise ValueError(
                f"model.start names {len(start.slots)} slots, but model.num_experts={self.num_experts}; found the run "
                f"with --from, which sets both"
            )
        implied = {"head_dim": (None, self.hidden_size // self.num_heads), "attention_bias": (False,)}
        for name in ("head_dim", "attention_bias", "clip_qkv", "dense_intermediate_size"):
            if name not in self.stock.settings and getattr(start, name) not in implied.get(name, (None,)):
                raise ValueError(
                    f"{name}={getattr(start, name)} is no setting of {self.family}; start from another model"
                )


class TrainConfig(Frozen):
    """Inner (local) training: optimizer, schedule, losses."""

    batch_size: Annotated[int, Field(ge=1, le=2**20)] = 8
    """Sequences per optimizer step of one peer, over all its ranks and microbatches."""
    optimizer: OptimizerName = "adamw"
    """Inner optimizer; a machine may put `adamw8bit` for `adamw`, or the reverse, with --inner-optimizer. `muon` takes
    AdamW's learning rates; `lamb`'s are shares of a tensor's norm."""
    lr: Rate = 2e-3
    """Peak learning rate."""
    beta1: Decay = 0.9
    """Decay of the first moment; the momentum of Muon."""
    beta2: Decay = 0.95
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Epsilon of AdamW and LAMB."""
    weight_decay: Coefficient = 0.1
    """Decoupled weight decay, on every parameter as in SPES."""
    clip_norm: PositiveFloat = 1.0
    """Gradient norm above which gradients are scaled down; over shared and claimed parameters together."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Learning rate after the warm-up, over the run's rounds; `wsd` stays at the peak until it decays at the end."""
    decay_fraction: Annotated[float, Field(ge=1e-6, le=1, allow_inf_nan=False)] = 0.2
    """Share of the run, at its end, over which `wsd` decays."""
    schedule_rounds: Rounds | None = None
    """Rounds after which `cosine` and `wsd` have decayed, and stay at their last rate; by default the whole run."""
    warmup_rounds: Annotated[float, Field(ge=0, le=MAX_ROUNDS, allow_inf_nan=False)] = 0.5
    """Rounds (may be a fraction) of linear warm-up, no more than the schedule has; in mode `tokens` no step has less
    than a quarter of the rate at its round's end."""
    warmup_start_ratio: Fraction = 0.0
    """Learning rate at the start of the warm-up, as a share of the peak. SPES uses 0.1."""
    final_lr_ratio: Fraction = 0.1
    """Learning rate at the end of `cosine` and `wsd`, as a share of the peak."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`bf16` runs the forward pass under autocast; parameters stay fp32."""
    balance_loss: Coefficient = 1e-2
    """Coefficient of the per-layer load-balance loss."""
    router_z_loss: Coefficient = 1e-3
    """Coefficient of the router z-loss."""
    output_z_loss: Coefficient = 0.0
    """Coefficient of the z-loss on the model's output: the mean square of its log-partition. SPES sets 1e-5."""
    claimed_balance_factor: Fraction = 1.0
    """Start of SPES's factor on a peer's own experts' counts in the balance loss; rises to 1 over the
    first fifth of the run. SPES uses 0.7; 1.0 switches it off."""


SLOWER = 1.5
"""How many times as long as the first attempt at a round the second one may take."""


class RoundConfig(Frozen):
    """When a round ends, and how long each of its phases may take."""

    mode: Literal["tokens", "steps"] = "tokens"
    """`tokens`: a round ends at one common time, when the swarm is expected to reach `tokens`;
    `steps`: each peer makes `steps` local steps."""
    tokens: Annotated[int, Field(ge=1, le=2**44)] = 98_304
    """Tokens the swarm trains in one round."""
    samples: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """Sequences the swarm trains in one round of mode `tokens`, in place of `tokens`, whatever is learned of each."""
    steps: Annotated[int, Field(ge=1, le=2**20)] = 25
    """Local steps per round in mode `steps`."""
    min_seconds: TrainingSeconds = LEAST_SECONDS
    """A full round's least training time in mode `tokens`; a growing round's is its share of that, but at least 5 s
    (or this, if it is less)."""
    max_seconds: TrainingSeconds = 600.0
    """A round's most training time in mode `tokens`; in mode `steps` the longest wait for the others' steps."""
    total: Rounds = 10
    """Rounds in the run; also the learning rate schedule's horizon."""
    growing: Annotated[int, Field(ge=0, le=MAX_ROUNDS)] = 0
    """Rounds at the run's start that grow, by equal factors, from a hundredth of a full round to a full one: peers
    drift apart fastest while they have learnt least. The schedule counts the full rounds that they amount to."""
    min_peers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Active peers to wait for before the first round."""
    matchmaking_seconds: PhaseSeconds = 3.0
    """Time that a meeting's leader waits for expected members that are late."""
    averaging_seconds: PhaseSeconds = 30.0
    """Longest that averaging may take in one attempt; a failed attempt is redone. Once a peer has seen some, its own
    deadline follows what they took."""
    exchange_seconds: PhaseSeconds = 60.0
    """Deadline of pulling the slots that this peer does not hold."""
    lease_seconds: Annotated[float, Field(ge=0.1, le=MAX_LEASE_SECONDS, allow_inf_nan=False)] = (
        30.0  # guard: le=MAX_LEASE_SECONDS -> le=1e6
    )
    """Lifetime of a claim that is not renewed."""
    heartbeat_seconds: Annotated[float, Field(ge=0.05, le=MAX_LEASE_SECONDS / 2, allow_inf_nan=False)] = 10.0
    """Interval of renewals."""
    shrink_seconds: Annotated[float, Field(ge=1, le=86_400, allow_inf_nan=False)] = 600.0
    """Time after a round's end for which the others wait where half of the voters or more have vanished; after that,
    those that are left go on without them."""
    copies: Annotated[int, Field(ge=1, le=8)] = 2
    """Peers on which every slot's weights live at least, where there are so many: what too few hold, others keep, so
    that a slot outlives its last holder. 1 leaves it to the holders."""

    @property
    def results_seconds(self) -> float:
        """Time that a leader waits for the members' results once it has its own."""
        return max(5.0, self.averaging_seconds / 3)

    @property
    def commit_seconds(self) -> float:
        """Longest time between two certificates if a quorum is connected and one attempt fails, which takes longest."""
        attempt = 2 * self.matchmaking_seconds + self.averaging_seconds + 2 * self.results_seconds
        return self.max_seconds + self.exchange_seconds + (1 + SLOWER) * attempt

    def share(self, round: int) -> float:
        """Return the length of the round with this number, from 1, as a share of a full round's."""
        return FIRST_SHARE ** (1 - (round - 1) / self.growing) if round <= self.growing else 1.0

    def least_seconds(self, round: int) -> float:
        """Return the least training time, in seconds, of the round with this number in mode `tokens`."""
        return max(self.share(round) * self.min_seconds, min(self.min_seconds, LEAST_SECONDS))

    def full_rounds(self, elapsed: float) -> float:
        """Return the full rounds that the run's first `elapsed` rounds amount to; their fractions count, too."""
        if not self.growing:
            return elapsed
        whole = min(math.floor(elapsed), self.growing)
        factor = FIRST_SHARE ** (-1 / self.growing)
        grown = FIRST_SHARE * (factor**whole - 1) / (factor - 1)
        return grown + (elapsed - whole) * self.share(whole + 1)

    def steps_of(self, round: int) -> int:
        """Return the local steps of a round in mode `steps`."""
        return max(1, math.floor(self.steps * self.share(round) + 0.5))

    @model_validator(mode="after")
    def _check_times(self) -> RoundConfig:
        if self.samples is not None and self.mode == "steps":
            raise ValueError(
                f"round.samples={self.samples} ends rounds of mode tokens, not of mode steps; drop it, or set "
                f"round.mode=tokens"
            )
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

    optimizer: OuterName = "mean"
    """`mean` takes the average as it is; `nesterov` adds momentum over rounds."""
    lr: Rate = 0.7
    """Outer learning rate of `nesterov`."""
    momentum: Decay = 0.9
    """Momentum of `nesterov`."""

    moments: Literal["both", "second", "local"] = "both"
    """The inner optimizer's moments that are averaged with the deltas: all that it keeps, the second only, which spares
    a third of the averaged bytes, or none. Why they are averaged: docs/convergence.md."""

    @property
    def has_momentum(self) -> bool:
        """Whether anchors move with a momentum."""
        return OUTER[self.optimizer][1]


class CodecConfig(Frozen):
    """How averaged vectors travel: fewer bits are fewer bytes; what rounding leaves over goes with a later round."""

    shared: CodecName = "fp32"
    """Deltas of the shared parameters."""
    slots: CodecName = "fp32"
    """Deltas of slots, averaged with other holders."""
    moments: MomentCodecName = "fp32"
    """Optimizer moments, where the run averages them (`outer.moments`)."""
    moments_interval: Rounds = 1
    """Average the moments every so many rounds."""
    dense_rounds: Annotated[int, Field(ge=0, le=MAX_ROUNDS)] = 0
    """Rounds at the run's start in which deltas of a `sparse` codec travel in int4: sparse ones trail early."""

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the newer setting where it says nothing: manifests without it stay what they were."""
        found = handler(self)
        return {key: found[key] for key in found if key != "dense_rounds" or found[key]}

    def dense_rounds_of(self, codec: str) -> int:
        """Return the rounds in which deltas of a codec travel in int4."""
        return self.dense_rounds if codec.startswith("sparse") else 0


class MergeConfig(Frozen):
    """SPES's merge warm-up: similar experts are pulled together early on; off when `alpha` is 0."""

    alpha: Fraction = 0.0
    """Share of the way towards the similar experts' mean at the start; decays linearly to 0. SPES uses 0.05."""
    interval_rounds: Rounds = 1
    """Merge every so many rounds."""
    decay_rounds: Rounds = 10
    """Rounds over which `alpha` decays to 0."""
    top_k: Annotated[int, Field(ge=1, le=4096)] = 4
    """Most similar experts to move towards; capped at E - 1."""


class RunConfig(Frozen):
    """Everything the swarm agrees on; its digest is the identity of the run's manifest."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    round: RoundConfig = RoundConfig()
    outer: OuterConfig = OuterConfig()
    codecs: CodecConfig = CodecConfig()
    merge: MergeConfig = MergeConfig()
    adapter: AdapterConfig | None = None
    """Train adapters over a frozen base, the checkpoint that the run starts from; by default the model itself."""
    invite_only: bool = False
    """Only peers that the founder has invited (`spes invite`) take part."""
    revoked_invites: tuple[RevokedInvite, ...] = Field(default=(), max_length=256)
    """Revoked invites, by the first letters that the page shows; voters with one of them leave."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights, the same on every peer."""
    frozen_storage: Storage = "bf16"
    """Precision of the experts that a peer does not hold, and in which they travel. With `fp32` they travel exactly,
    and a machine may hold them in another one with --storage."""

    @property
    def num_slots(self) -> int:
        """Number of the run's slots: experts per layer, or none where `shared` is all that is trained."""
        return self.model.num_experts if self.adapter is None or self.adapter.experts == "slots" else 0

    @property
    def kept_form(self) -> Storage | None:
        """The precision in which slots travel to peers that do not train them; None if that is their fp32 version.

        Adapters are small. Small experts do not divide into blocks.
        """
        is_divided = self.model.hidden_size * self.model.intermediate_size % KEPT_BLOCK == 0
        has_forms = self.num_slots > 0 and self.adapter is None and is_divided
        return self.frozen_storage if has_forms and self.frozen_storage != "fp32" else None

    @property
    def averages_moments(self) -> bool:
        """Whether moments of the inner optimizer are averaged with the deltas."""
        return bool(self.averaged_moments("shared"))

    def averaged_moments(self, kind: str) -> tuple[str, ...]:
        """Return the averaged moments of a kind of vector, `shared` or `slot`, by torch's names, in the order in which
        they lie behind a delta."""
        kinds = {"both": ("exp_avg", "exp_avg_sq"), "second": ("exp_avg_sq",), "local": ()}[self.outer.moments]
        # A slot is all matrices, of which Muon keeps one moment.
        return kinds[:1] if self.train.optimizer == "muon" and kind == "slot" else kinds

    @property
    def round_tokens(self) -> int:
        """Tokens that the swarm trains in one round of mode `tokens`: with `round.samples`, all of their sequences."""
        return self.round.samples * self.data.sequence_length if self.round.samples else self.round.tokens

    @model_validator(mode="after")
    def _check_together(self) -> RunConfig:
        train = self.train
        if self.outer.moments == "second" and train.optimizer == "muon":
            raise ValueError(
                "outer.moments=second, but train.optimizer=muon keeps no second moment of an expert; "
                "set outer.moments to both or local"
            )
        steps = self.round.steps if self.round.mode == "steps" else 1
        if steps * train.batch_size * self.data.sequence_length > MAX_PEER_TOKENS:  # guard: never
            raise ValueError(
                f"{steps} steps of train.batch_size={train.batch_size} sequences of data.sequence_length="
                f"{self.data.sequence_length} are more than the {MAX_PEER_TOKENS:,} tokens that one peer can train in "
                f"a round; lower one of them"
            )
        start = self.model.start
        if self.kept_form is not None and start is not None and len(start.kept) != self.num_slots:  # guard: never
            raise ValueError(
                f"model.start names {len(start.kept)} kept forms, and the run has {self.num_slots} slots in "
                f"{self.kept_form}; found the run with --from, which sets both"
            )
        begun = self.adapter.start if self.adapter is not None else None
        if begun is not None and len(begun.slots) != self.num_slots:  # guard: never
            raise ValueError(
                f"adapter.start names {len(begun.slots)} slots, and the run has {self.num_slots}; found it with "
                f"--adapter FOLDER, which sets both"
            )
        if self.adapter is not None:
            absent = "mlp" if self.model.num_experts else "experts"
            if not set(self.adapter.targets) - {absent}:
                raise ValueError(f"adapter.targets={self.adapter.targets} fits no matrix of this model; add attention")
        if self.adapter is not None and self.merge.alpha:
            raise ValueError(f"merge.alpha={self.merge.alpha:g} merges experts, not adapters; set it to 0")
        return self

    @model_validator(mode="after")
    def _check_warmup(self, info: ValidationInfo) -> RunConfig:
        """Refuse a warm-up that would end after the run or its schedule."""
        train, full = self.train, self.round.full_rounds(self.round.total)
        grown = f" ({full:.4g} full rounds, with round.growing={self.round.growing})" if self.round.growing else ""
        ends = [(full, f"is longer than round.total={self.round.total}{grown}")]
        if train.schedule_rounds is not None:
            ends.append((train.schedule_rounds, f"is longer than train.schedule_rounds={train.schedule_rounds}"))
        if train.schedule == "wsd":
            begin = (horizon := train.schedule_rounds or full) * (1 - train.decay_fraction)
            decay = f"train.decay_fraction={train.decay_fraction:g} begins at round {begin:.4g} of {horizon:.4g}"
            ends.append((begin, f"reaches into the decay that {decay}"))
        end, why = min(ends)
        longest = math.floor(1e4 * end + 1e-3) / 1e4  # as it is written
        if train.warmup_rounds > longest and info.context != FOUNDED:
            raise ValueError(f"train.warmup_rounds={train.warmup_rounds:g} {why}; set it to {longest:.10g} or less")
        return self
