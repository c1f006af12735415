"""The base of all settings, and those of runs that start from a checkpoint: its shape, its digests, and adapters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

PositiveInt = Annotated[int, Field(ge=1, le=2**31)]
PositiveFloat = Annotated[float, Field(ge=1e-12, le=1e12, allow_inf_nan=False)]  # guard: first
"""Bounded, so that neither a product of some nor a reciprocal is beyond a float or a timer."""
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Coefficient = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=1e-12, le=100, allow_inf_nan=False)]
"""A learning rate."""
Storage = Literal["fp32", "bf16", "int8", "nf4"]
WORD = "a word without a flag"
NO_FLAG = "set by the program alone"
"""Marks of fields; see `cli`."""


class Frozen(BaseModel):
    """Base of config sections: immutable, no unknown keys. Built when they are first used, so that help is quick."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",  # guard: "forbid" -> "ignore"
        use_attribute_docstrings=True,
        defer_build=True,
    )


MAX_TOKEN_ID = 2**24
TokenId = Annotated[int, Field(ge=-1, lt=MAX_TOKEN_ID)]
"""Some released checkpoints write -1, the last row, for the padding."""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class RopeConfig(Frozen):
    """How a checkpoint stretches its rotary position embedding, in transformers' terms; `model.rope_theta` is apart."""

    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    factor: PositiveFloat | None = None
    original_max_position_embeddings: Annotated[int, Field(ge=1, le=2**24)] | None = None
    attention_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None
    mscale: PositiveFloat | None = None
    mscale_all_dim: PositiveFloat | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None

    @model_validator(mode="after")
    def _check_type(self) -> RopeConfig:
        scaled, trained = ("factor",), "original_max_position_embeddings"
        needed = {
            "default": (),
            "yarn": (*scaled, trained),
            "llama3": (*scaled, trained, "low_freq_factor", "high_freq_factor"),
        }.get(self.rope_type, scaled)
        if missing := [name for name in needed if getattr(self, name) is None]:  # guard: never
            raise ValueError(f"rope_type={self.rope_type} needs {', '.join(missing)}; add it to config.json")
        return self


MAX_START_SLOTS = 128
"""Most slots of a run that starts from a checkpoint: its manifest holds a digest of each, in at most 64 KiB."""


# guard: [0-9a-f]{40}$ -> .*
HUB_CHECKPOINT = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}@[0-9a-f]{40}$"


TokenText = Annotated[str, Field(max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Side = Literal["left", "right"]
TokenRole = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,47}_token$")]  # guard: first
TemplateName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]  # guard: first
"""It becomes a file's name where a model is exported."""


class TokenizerSettings(Frozen):
    """What a checkpoint's tokenizer_config.json says beyond the tokenizer's document, for exports to say it again."""

    model_max_length: Annotated[int, Field(ge=1, le=2**31)] | None = None
    padding_side: Side = "right"
    truncation_side: Side = "right"
    clean_up_tokenization_spaces: bool = False
    special_tokens: Annotated[dict[TokenRole, TokenText], Field(max_length=64)] = {}
    """Tokens by roles that the document has not, such as the mask."""
    extra_special_tokens: Annotated[list[TokenText], Field(max_length=1024)] = []
    chat_templates: Annotated[dict[TemplateName, Annotated[str, Field(max_length=2**14)]], Field(max_length=16)] = {}
    """Chat templates by name, beside the default one."""


Number = bool | int | Annotated[float, Field(allow_inf_nan=False)]
GenerationName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
GenerationValue = Number | TokenText | Annotated[list[Number | TokenText], Field(max_length=1024)]
Generation = Annotated[dict[GenerationName, GenerationValue], Field(max_length=64)]


class TensorCount(Frozen):
    """How many tensors of one kind and shape a model has outside its slots."""

    kind: Literal["table", "attention", "mlp", "vector"]
    """The embedding and the head; matrices of linear layers; all others."""
    shape: Annotated[list[Annotated[int, Field(ge=1, le=2**31)]], Field(min_length=1, max_length=3)]
    count: Annotated[int, Field(ge=1, le=2**16)]


class StartConfig(Frozen):
    """What a checkpoint's config.json says beyond `model`, and which weights it holds; `--from` fills it in."""

    source: Annotated[str, Field(max_length=240, pattern=HUB_CHECKPOINT)] | None = None
    """The checkpoint on the Hugging Face hub, `owner/name@commit`; none where the founder read a folder."""
    vocab_size: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)]
    """Rows of the embedding: the tokenizer's entries, or more."""
    max_position_embeddings: Annotated[int, Field(ge=1, le=2**24)]
    head_dim: Annotated[int, Field(ge=2, le=2**12)] | None = None
    """Width of a head; by default `hidden_size / num_heads`."""
    dense_intermediate_size: Annotated[int, Field(ge=1, le=2**18)] | None = None
    """Of Qwen3-MoE's config: the width of layers without experts, which no such run has."""
    attention_bias: bool = False
    clip_qkv: PositiveFloat | None = None
    initializer_range: Annotated[PositiveFloat, Field(le=1.0)] = 0.02
    rope: RopeConfig = RopeConfig()
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | Annotated[list[TokenId], Field(max_length=64)] | None = None
    """The token that ends a text, or several."""
    pad_token_id: TokenId | None = None
    router_aux_loss_coef: PositiveFloat | None = None
    """Weight of the stock balance loss, for who trains an export elsewhere: a run has its own."""
    shared: Digest
    """SHA-256 of the shared parameters' version of round 0."""
    slots: Annotated[list[Digest], Field(max_length=MAX_START_SLOTS)]
    """SHA-256 of each slot's version of round 0; none of a dense model."""
    kept: Annotated[list[Digest], Field(max_length=MAX_START_SLOTS)] = []
    """SHA-256 of each slot's kept form of round 0, if the run has such."""
    generation: Generation = {}
    """What generation_config.json says."""
    tokenizer: TokenizerSettings = TokenizerSettings()
    config: Annotated[dict[GenerationName, JsonValue], Field(max_length=256)] = {}
    """All of config.json, of the families that the manifest carries so."""
    tensors: Annotated[list[TensorCount], Field(max_length=64)] = []
    """The tensors of such a model."""

    @property
    def end_tokens(self) -> list[int]:
        """Ids that end a generated text."""
        found: Any = self.generation.get("eos_token_id", self.eos_token_id)
        return found if isinstance(found, list) else [] if found is None else [found]

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what newer settings say if they say nothing: manifests without them stay what they were."""
        empty = {"generation": not self.generation, "tokenizer": self.tokenizer == TokenizerSettings()}
        empty |= {name: not getattr(self, name) for name in ("router_aux_loss_coef", "config", "tensors")}
        return {key: value for key, value in handler(self).items() if not empty.get(key)}

    @model_validator(mode="after")
    def _check_tokens(self) -> StartConfig:
        if (self.pad_token_id or 0) >= self.vocab_size:  # guard: never
            raise ValueError(f"pad_token_id={self.pad_token_id} has no row in an embedding of {self.vocab_size}")
        return self


AdapterTarget = Literal["attention", "mlp", "experts"]


class AdapterStart(Frozen):
    """The adapter that a run goes on from, where that is not a new one; `--adapter FOLDER` fills it in."""

    shared: Digest
    """SHA-256 of the shared factors' version of round 0."""
    slots: Annotated[list[Digest], Field(max_length=MAX_START_SLOTS)]
    """SHA-256 of each slot's version of round 0; none where the experts' factors are in `shared`."""


class AdapterConfig(Frozen):
    """Low-rank adapters (LoRA) over a frozen base: a matrix W of it counts as `W + alpha / rank * B A`.

    Source: LoRA (https://arxiv.org/abs/2106.09685).
    """

    rank: Annotated[int, Field(ge=1, le=1024)] = 8
    """Rows of A, and columns of B."""
    alpha: PositiveFloat = 16.0
    """Scale of the adapters, times the rank."""
    targets: Annotated[list[AdapterTarget], Field(min_length=1, max_length=3)] = ["attention", "mlp", "experts"]
    """Matrices with adapters: of attention, of dense layers (`mlp`), of experts. Kinds that the model lacks are
    ignored."""
    experts: Literal["shared", "slots"] = "shared"
    """Where the experts' adapters belong: `shared`, so that each peer trains all of them, or to the experts' `slots`,
    which peers claim. The second is for adapters that no machine could train together."""
    base: Storage = "bf16"
    """Precision of the base's matrices as peers send them to those that have no copy. Released checkpoints in bf16 lose
    nothing in bf16. A machine holds the base as it chooses with --storage."""
    start: Annotated[AdapterStart | None, NO_FLAG] = None

    @property
    def scale(self) -> float:
        """Factor of the product B A."""
        return self.alpha / self.rank

    @model_validator(mode="after")
    def _check_targets(self) -> AdapterConfig:
        if len(set(self.targets)) != len(self.targets):
            raise ValueError(f"adapter.targets={self.targets} names one twice; name each once")
        if self.experts == "slots" and not {"experts", "attention"} <= set(self.targets):  # guard: never
            raise ValueError(
                f"adapter.experts=slots needs experts and attention among adapter.targets={self.targets}; add them, or "
                f"set adapter.experts=shared"
            )
        return self
