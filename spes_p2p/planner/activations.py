"""The memory of activations: of one forward and backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spes_p2p.config import LOGIT_SETTINGS, ModelConfig

WIDE = 4
"""Bytes per element of tensors that stay fp32 under autocast: residual stream, norms, router scores, logits."""
NARROW = {"fp32": 4, "bf16": 2}
INDEX = 8
"""Bytes of an index."""
LOGITS_BYTES = 2**28
"""Most memory for logits, which become their gradients; microbatches with more have them computed in chunks."""


def head_rows(num_tokens: int, vocab_size: int, precision: Literal["fp32", "bf16"]) -> int:
    """Return the tokens of a microbatch whose logits, and in bf16 a rounded copy, are in memory at once."""
    return max(1, min(num_tokens, LOGITS_BYTES // (_chunk_bytes(precision) * vocab_size)))


def _chunk_bytes(precision: Literal["fp32", "bf16"]) -> int:
    return WIDE if precision == "fp32" else WIDE + NARROW[precision]


@dataclass(frozen=True)
class Activations:
    """Activation memory of one rank's forward and backward pass, with experts in an `ExpertBank`."""

    model: ModelConfig
    vocab_size: int  # width of the logits
    sequences: int  # of one microbatch
    sequence_length: int
    precision: Literal["fp32", "bf16"] = "fp32"
    checkpointing: bool = False  # whether only each layer's input is kept, and the rest computed again
    keeps_scores: bool = False  # whether attention is `eager`; other kernels never have all scores in memory
    keeps_masks: bool = False  # whether attention is `sdpa` over separate documents: each layer keeps a mask as numbers
    has_frozen_base: bool = False  # adapters are trained: a matrix of the base is made dense for one product at a time
    stacks_experts: bool = False  # whether the kernel takes a layer's experts as one tensor, as the one for GPUs does

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence_length

    @property
    def kept_bytes(self) -> int:
        """Bytes that the forward pass keeps: `L layer + norm` per token, with checkpointing `4 L D + norm`.

        Autocast also keeps rounded copies of the matrices of attention and routers.
        """
        layer = WIDE * self.model.hidden_size if self.checkpointing else self._layer()
        per_token = self.model.num_layers * layer + self._norm()
        return self.tokens * per_token + self._rounded_weights()

    @property
    def num_bytes(self) -> int:
        """Bytes at the peak: at a chunk's logits, under autocast with the rounded head and its rounded gradient, or in
        the backward pass of a layer, whose gradients take about what it has kept.

        With checkpointing the layer is also computed again, and a GPU stacks its experts.
        """
        per_token = 2 * self._layer() - self._norm() if self.checkpointing else self._layer()
        in_a_layer = self.tokens * per_token + self._stack()
        at_the_logits = 3 * self.tokens * WIDE * self.vocab_size  # and their softmax and its gradient
        if not self._keeps_logits:
            rows = head_rows(self.tokens, self.vocab_size, self.precision)
            at_the_logits = rows * _chunk_bytes(self.precision) * self.vocab_size
            if self.precision == "bf16" and not self.has_frozen_base:
                at_the_logits += 2 * NARROW["bf16"] * self.vocab_size * self.model.hidden_size
        return self.kept_bytes + max(at_the_logits, in_a_layer)

    @property
    def _keeps_logits(self) -> bool:
        start = self.model.start
        return start is not None and any(start.config.get(name) for name in LOGIT_SETTINGS)

    def _norm(self) -> int:
        """Return the last norm's bytes per token: its input, normalised input, and the gradient of its output."""
        return 3 * WIDE * self.model.hidden_size

    def _layer(self) -> int:
        """Return one layer's bytes per token: in fp32 `4 (10 D + 4 F + 2 K I + 4 E + 10 K)`, F the keys' width.

        Without norms of queries and keys, it is `8 (D + F)` less; with eager attention, `4 S` more per head, and `4 S`
        with masks, which also copy keys and values to every head.
        """
        model, narrow = self.model, NARROW[self.precision]
        width, query_width, key_width = model.hidden_size, model.head_dim * model.num_heads, _key_width(model)
        # Each norm's input, normalised input and output; autocast rounds the output for every module that takes it.
        norms = 2 * 2 * WIDE * width + narrow * width * (2 if self.precision == "fp32" else 5)
        attention = narrow * (2 * query_width + 2 * key_width)  # queries, keys, values and the output
        if model.stock.query_norm != "none":
            attention += (WIDE + narrow) * (query_width + key_width)
        if self.keeps_scores:  # in fp32 from the softmax, and rounded; keys and values are copied to every head
            scores = WIDE if self.precision == "fp32" else WIDE + narrow
            attention += scores * model.num_heads * self.sequence_length + 2 * narrow * (query_width - key_width)
        if self.keeps_masks:  # keys and values are copied here, too
            attention += narrow * self.sequence_length + 2 * narrow * (query_width - key_width)
        router = 4 * WIDE * (model.num_experts + model.top_k)  # scores on their way to the losses
        router += 3 * INDEX * model.top_k  # each row's token, and the order of rows both ways
        experts = 2 * narrow * model.top_k * model.intermediate_size  # gate and up
        if model.is_dense:  # gate, its activation, up and their product, which plain modules keep
            experts = 4 * narrow * model.intermediate_size
        return norms + attention + router + experts

    def _stack(self) -> int:
        """Return the bytes of gate and up of a layer's experts, where they are stacked."""
        model = self.model
        rows = model.num_experts * 2 * model.intermediate_size if self.stacks_experts else 0
        return NARROW[self.precision] * rows * model.hidden_size

    def _rounded_weights(self) -> int:
        model, width = self.model, self.model.hidden_size
        if self.has_frozen_base:
            matrix = max(2 * model.intermediate_size, model.head_dim * model.num_heads) * width
            return NARROW[self.precision] * (matrix + self.vocab_size * width)
        if self.precision == "fp32":
            return 0
        layer = 2 * width * (model.head_dim * model.num_heads + _key_width(model)) + model.num_experts * width
        layer += 3 * width * model.intermediate_size if model.is_dense else 0
        num_layers = 1 if self.checkpointing else model.num_layers
        return NARROW[self.precision] * num_layers * layer


def _key_width(model: ModelConfig) -> int:
    return model.head_dim * model.num_kv_heads
