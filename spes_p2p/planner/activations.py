"""What one forward pass keeps for its backward pass: an estimate from shapes.

Legend: D width, F width of keys, I width of one expert, K chosen experts per token, E experts, L layers, V vocabulary,
n bytes of a number under autocast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spes_p2p.config import ModelConfig

WIDE = 4
"""Bytes of what stays fp32 under autocast: the residual stream, norms, router scores, logits."""
NARROW = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Activations:
    """One forward pass of a rank.

    Attention is taken to be fused (its scores are never whole in memory), experts to be an `ExpertBank`'s.

    Attributes:
        model: Shapes.
        vocab_size: Width of the logits.
        sequences: Of one microbatch.
        sequence_length: Tokens of each.
        precision: The run's.
        checkpointing: Keep each layer's input only, and compute the rest again.
    """

    model: ModelConfig
    vocab_size: int
    sequences: int
    sequence_length: int
    precision: Literal["fp32", "bf16"] = "fp32"
    checkpointing: bool = False

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence_length

    @property
    def kept_bytes(self) -> int:
        """What the forward pass leaves behind: `L layer + norm + 4 V` per token, with checkpointing `4 L D + ...`.

        Under autocast the matrices of attention, routers and the head are kept once more, as they were rounded.
        """
        layer = WIDE * self.model.hidden_size if self.checkpointing else self._layer()
        per_token = self.model.num_layers * layer + self._norm() + WIDE * self.vocab_size
        return self.tokens * per_token + self._rounded_weights()

    @property
    def num_bytes(self) -> int:
        """At the peak of the backward pass.

        That is at the logits, where there are two gradients of their size, or, where the vocabulary is small, in a
        layer: its gradients take about what it has kept. With checkpointing it has to be computed again as well.
        """
        logits = WIDE * self.vocab_size
        in_a_layer = 2 * self._layer() - self._norm() if self.checkpointing else self._layer()
        return self.kept_bytes + self.tokens * max(2 * logits, in_a_layer - logits)

    def _norm(self) -> int:
        """Bytes that the last norm keeps per token: its input, what it normalised, and its output."""
        return (2 * WIDE + NARROW[self.precision]) * self.model.hidden_size

    def _layer(self) -> int:
        """Bytes that one layer keeps per token.

        In fp32 `4 (10 D + 4 F + 2 K I + 4 E + 4 K)`; where queries and keys have no norms, `8 (D + F)` less.
        """
        model, narrow = self.model, NARROW[self.precision]
        width, key_width = model.hidden_size, _key_width(model)
        # Each norm's input, what it normalised, and its output: autocast rounds that for every module it goes to.
        norms = 2 * 2 * WIDE * width + narrow * width * (2 if self.precision == "fp32" else 5)
        attention = narrow * (2 * width + 2 * key_width)  # queries, keys, values and the output
        if model.family != "mixtral":  # queries and keys are normalised
            attention += (WIDE + narrow) * (width + key_width)
        router = 4 * WIDE * (model.num_experts + model.top_k)  # scores on their way to the losses, and the sorting
        experts = 2 * narrow * model.top_k * model.intermediate_size  # gate and up
        return norms + attention + router + experts

    def _rounded_weights(self) -> int:
        if self.precision == "fp32":
            return 0
        model, width = self.model, self.model.hidden_size
        layer = 2 * width * (width + _key_width(model)) + model.num_experts * width
        num_layers = 1 if self.checkpointing else model.num_layers
        return NARROW[self.precision] * (num_layers * layer + self.vocab_size * width)


def _key_width(model: ModelConfig) -> int:
    return model.hidden_size // model.num_heads * model.num_kv_heads
