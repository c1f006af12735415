"""Text as token ids: text becomes no control token, and a document begins as in the tokenizer's own encoding.

Control tokens are the special ones, and added tokens that the chat template writes. This module imports neither torch
nor transformers, because the processes that tokenise import it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from tokenizers import AddedToken, Tokenizer

ENCODING_VERSION = 2
"""Part of the key of all kept tokens; raise it if text gets other ids."""
ROLES = ("system", "developer", "user", "assistant", "tool")
_MARKER = re.compile(r"(?=.*\w).*[^\w\s]", re.DOTALL)


class TextEncoder:
    """Encodes text with a tokenizer that matches no control token in it.

    Args:
        backend: The tokenizer; it is changed.
        special: Special tokens by role, `eos_token` among them.
        template: The chat template; empty if there is none.
    """

    def __init__(self, backend: Tokenizer, special: Mapping[str, str], template: str = "") -> None:
        self.backend = backend
        backend.no_padding()
        backend.no_truncation()  # an earlier call may have set it, or the tokenizer's file
        probe = backend.encode("The peer's 2 slots")
        own = [at for at, is_added in enumerate(probe.special_tokens_mask) if not is_added] or [len(probe.ids)]
        self.begin: list[int] = probe.ids[: own[0]]
        """Ids in front of a document."""
        self.end: list[int] = probe.ids[own[-1] + 1 :]
        """Ids behind a document, the last of which is the end of text."""
        end_of_text = backend.token_to_id(special["eos_token"])
        assert end_of_text is not None
        if self.end[-1:] != [end_of_text]:
            self.end.append(end_of_text)
        backend.post_processor = None  # it moves offsets
        added = {name: AddedToken(name, special=True, normalized=False) for name in special.values()}
        added |= {token.content: token for token in backend.get_added_tokens_decoder().values()}
        self.plain = {name for name, token in added.items() if not token.special and name not in special.values()}
        """Added tokens that are not marked as special."""
        self.controls = {
            name: each for name, each in added.items() if name not in self.plain or is_written(name, template)
        }
        """Control tokens by their text."""
        backend.add_special_tokens(list(self.controls))
        backend.encode_special_tokens = True
        unknown = {special.get("unk_token"), getattr(backend.model, "unk_token", None)}
        self._forbidden = {backend.token_to_id(name) for name in self.controls if name not in unknown}

    def documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, with those in front of a document and behind it."""
        found = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        each = (
            one.ids if self._forbidden.isdisjoint(one.ids) else self.pieces(text)[0]
            for one, text in zip(found, texts, strict=True)
        )
        return [[*self.begin, *ids, *self.end] for ids in each]

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return the ids of all documents, uint32."""
        parts = self.documents(texts)
        return np.fromiter((token for part in parts for token in part), "<u4", sum(map(len, parts)))

    def pieces(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids and offsets of a text; a control token that the model itself makes of it is spelled."""
        found = self.backend.encode(text, add_special_tokens=False)
        if self._forbidden.isdisjoint(found.ids):
            return found.ids, found.offsets
        ids, offsets = list[int](), list[tuple[int, int]]()
        for token, (start, stop) in zip(found.ids, found.offsets, strict=True):
            spelled = [token]
            if token in self._forbidden:
                letters = self.backend.encode_batch(list(text[start:stop]), add_special_tokens=False)
                spelled = [each for letter in letters for each in letter.ids if each not in self._forbidden]
            ids += spelled
            offsets += [(start, stop)] * len(spelled)
        return ids, offsets


def is_written(token: str, template: str) -> bool:
    """Check whether a template writes an added token, as it stands or around the name of a role."""
    if not _MARKER.match(token):  # a word or spaces, which templates have as text
        return False
    return token in template or all(
        part and part in template for part in re.split("|".join(ROLES), token, flags=re.IGNORECASE)
    )
