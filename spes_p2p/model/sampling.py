"""The one way in which this program draws text from a model: transformers' `generate`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

SMALL: dict[str, Any] = {"temperature": 0.5, "repetition_penalty": 1.2, "min_p": 0.05}
"""For models whose generation settings name no temperature. A small model repeats itself without the penalty."""
GREEDY: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None}


def sampled_continuation(
    module: nn.Module,
    prompt_T: Tensor,
    *,
    ends: Collection[int] = (),
    temperature: float | None = None,
    repetition_penalty: float | None = None,
    **options: Any,
) -> list[int]:
    """Return tokens drawn after a prompt of one token or more; the model is in evaluation mode afterwards.

    Args:
        ends: Tokens that end the text; none by default.
        temperature: By default the model's own; 0 takes the most likely token each time.
        repetition_penalty: By default the model's own.
        options: Other settings of `generate`: `max_new_tokens`, `max_time`, `streamer`.
    """
    model: Any = module.eval()
    own = SMALL if model.generation_config.temperature is None else {}
    chosen = {"do_sample": True, "temperature": temperature, "repetition_penalty": repetition_penalty}
    chosen = own | {name: value for name, value in chosen.items() if value is not None}
    tokens_1T = prompt_T.to(model.device)[None]
    drawn_1T = model.generate(
        input_ids=tokens_1T,
        attention_mask=torch.ones_like(tokens_1T),
        eos_token_id=list(ends) or None,
        pad_token_id=0,
        **chosen | (GREEDY if temperature == 0 else {}) | options,
    )
    return drawn_1T[0, len(prompt_T) :].tolist()
