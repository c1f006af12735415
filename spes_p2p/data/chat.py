"""Conversations as token ids: rendered by the run's chat template, which a stranger may have written, in the sandbox.

For the process that tokenises (`tokenizer_child.py`), whose memory and time are limited. What a reply's template text
is comes from the template's own marks (`{% generation %}`), or else from prefixes: what is rendered of the messages up
to the reply, less what is rendered of those before it and of the generation prompt.

The template's control tokens are control tokens, and those in messages are text. So before messages are rendered, a
private character, the *shield*, takes the place of the first one of each control token in them. In the rendered text an
*alias* takes the place of each control token: as many private characters, which the tokenizer knows as a token with the
same rules. Then the shields go, and one pass of the tokenizer gives its own ids, however it joins text and spaces.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken

from spes_p2p.data.text_encoder import TextEncoder
from spes_p2p.errors import DataError

HIDDEN = 2**31
"""Bit of an id that is read but not learned; no vocabulary has so many entries."""
MAX_ADDED, MAX_GROWTH = 2**15, 8
"""Most characters of a rendered conversation: so many, and so many times its own."""
MAX_REASON = 200
_LAST_PRIVATE = 0x10_FFFD
"""Aliases and shields go down from here; text that has one of them gets U+FFFD instead."""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
Message = Mapping[str, Any]
Span = tuple[int, int]


class Chat:
    """Encodes conversations, pairs of prompt and completion, and text.

    Args:
        template: The run's chat template; empty if it has none.
        special: Special tokens by role, which the template may name.
        encoder: The tokenizer, which gets a token more for each control token.

    Raises:
        DataError: the template is malformed.
    """

    def __init__(self, template: str, special: Mapping[str, str], encoder: TextEncoder) -> None:
        self._template = template
        self._special: dict[str, Any] = dict(special)
        self._encoder = encoder
        self._end = encoder.end[-1]
        self._has_marks = _MARKS.search(template) is not None
        self._private: dict[int, str] = {}
        if template:
            self._compile()
            self._add_aliases()

    def encode(self, record: Mapping[str, Any]) -> np.ndarray:
        """Return the ids of a record, uint32, with the bit `HIDDEN` on each that is not learned.

        Args:
            record: `{"text"}`, `{"prompt", "completion"}` or `{"messages"}`, as `conversations.checked_record` has
                checked it; with `only_prompt`, what the model is given before the first reply.

        Raises:
            DataError: the template fails, grows the text, or marks nothing to learn.
        """
        if "messages" not in record:
            return self._joined(record)
        messages = self._shielded(record["messages"])
        if record.get("only_prompt"):
            first = next(number for number, message in enumerate(messages) if message["role"] == "assistant")
            return self._ids(self._render(messages[:first], prompts=True)[0], [])
        text, spans = self._render(messages)
        if not self._has_marks:
            spans = self._spans_by_prefix(messages, text)
        ids = self._ids(text, spans)
        learned = np.flatnonzero(ids < HIDDEN)
        if not len(learned):
            raise DataError(
                "nothing of it is learned, because the chat template marks no reply; correct the template "
                "(data.chat_template)"
            )
        # A reply must say where it ends, or generation does not stop.
        hidden = np.flatnonzero(ids[: learned[-1]] >= HIDDEN)
        last = ids[hidden[-1] + 1 if len(hidden) else 0 :] & np.uint32(HIDDEN - 1)
        if messages[-1]["role"] == "assistant" and self._end not in last:
            ids = np.append(ids, np.uint32(self._end))
        return ids

    def clean(self, text: str) -> str:
        """Return a text without the private characters that stand for control tokens here."""
        return text.translate(self._private)

    def _joined(self, record: Mapping[str, Any]) -> np.ndarray:
        """Return the ids of a document, of which a prompt is hidden, or of the prompt alone."""
        prompt, rest = record.get("prompt", ""), record.get("completion", record.get("text", ""))
        rest, end = ("", []) if record.get("only_prompt") else (rest, self._encoder.end)
        text = self.clean(prompt + rest)
        ids = self._with_hidden(*self._encoder.pieces(text), [(len(prompt), len(text))])
        begin = np.array(self._encoder.begin, np.uint32) | np.uint32(0 if "text" in record else HIDDEN)
        return np.concatenate([begin, ids, np.array(end, np.uint32)])

    def _ids(self, text: str, spans: Sequence[Span]) -> np.ndarray:
        """Return the ids of a rendered text; those that no span touches are hidden."""
        written = {found.start(): found[0] for found in self._written.finditer(text)}
        while True:
            aliased = [*self._unshielded(text)]
            for start, name in written.items():
                aliased[start : start + len(name)] = self._aliases[name]
            ids, offsets = self._encoder.pieces("".join(aliased))
            taken = {
                at for token, place in zip(ids, offsets, strict=True) if token in self._id_of for at in range(*place)
            }
            if taken.issuperset(written):
                return self._with_hidden([self._id_of.get(token, token) for token in ids], offsets, spans)
            # The tokenizer's rules for this token do not hold here, as those for whole words: then it is text.
            written = {start: name for start, name in written.items() if start in taken}

    def _add_aliases(self) -> None:
        """Give the tokenizer a token more for each control token, with the same rules."""
        backend, controls = self._encoder.backend, self._encoder.controls
        names, private = sorted(controls, key=len, reverse=True), map(chr, itertools.count(_LAST_PRIVATE, -1))
        self._aliases = {name: next(private) * len(name) for name in names}
        self._shields = {first: next(private) for first in {name[0] for name in names}}
        self._private = dict.fromkeys(map(ord, "".join([*self._aliases.values(), *self._shields.values()])), "\ufffd")
        self._written = re.compile("|".join(map(re.escape, names)))
        self._anywhere = re.compile(f"(?=({self._written.pattern}))")
        added = []
        for name, token in controls.items():
            alias, normalizer = self._aliases[name], backend.normalizer
            is_normalized = token.normalized and (normalizer is None or normalizer.normalize_str(alias) != "")  # BERT's
            rules = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
            added.append(AddedToken(alias, normalized=is_normalized, **rules))
        backend.add_tokens(added)
        ids = backend.get_vocab()
        self._id_of = {ids[alias]: ids[name] for name, alias in self._aliases.items()}

    def _shielded(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Shield the control tokens in messages, but no plain one that the template reads: it writes those again."""
        texts = [(message["role"], self.clean(json.dumps(message, ensure_ascii=False))) for message in messages]
        for role, name in sorted({(role, name) for role, text in texts for name in self._anywhere.findall(text)}):
            shield = self._shields[name[0]] + name[1:]
            tried = [(each, text.replace(name, shield) if each == role else text) for each, text in texts]
            if name not in self._encoder.plain or self._rendered_alike(tried, texts):
                texts = tried
        return [{**json.loads(text), "role": role} for role, text in texts]

    def _rendered_alike(self, *both: Sequence[tuple[str, str]]) -> bool:
        ours, theirs = (self._unshielded(self._render([json.loads(text) for _, text in texts])[0]) for texts in both)
        return ours == theirs

    def _unshielded(self, text: str) -> str:
        return text.translate({ord(shield): first for first, shield in self._shields.items()})

    @staticmethod
    def _with_hidden(tokens: Sequence[int], places: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
        """Return ids; those that no span touches are hidden."""
        ids = np.array(tokens, np.uint32)
        offsets = np.array(places, np.int64).reshape(-1, 2)
        is_learned = np.zeros(len(ids), bool)
        for start, stop in spans:
            is_learned |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
        ids[~is_learned] |= np.uint32(HIDDEN)
        return ids

    def _spans_by_prefix(self, messages: Sequence[Message], text: str) -> list[Span]:
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._render(messages[:number], prompts=True)
            upto, _ = self._render(messages[: number + 1])
            if not (upto.startswith(before) and text.startswith(upto)):
                raise DataError(
                    f"the chat template writes message {number + 1} differently when others follow, or not behind its "
                    f"generation prompt, so that its reply cannot be found; mark replies with {{% generation %}} in a "
                    f"template of your own (data.chat_template), or end the conversation with its first reply"
                )
            spans.append((len(before), len(upto)))
        return spans

    def _render(self, messages: Sequence[Message], *, prompts: bool = False) -> tuple[str, list[Span]]:
        """Return the text of messages, with the generation prompt behind them if `prompts`, and the marked spans."""
        from transformers.utils.chat_template_utils import render_jinja_template

        with_marks = self._has_marks and not prompts
        try:
            rendered: Any = render_jinja_template(
                conversations=[messages],  # type: ignore[list-item]
                chat_template=self._template,
                return_assistant_tokens_mask=with_marks,
                add_generation_prompt=prompts,
                **self._special,
            )
            text = str(rendered[0][0])
        # A stranger's template can raise anything: errors of Jinja, of Python's operators, or MemoryError.
        except Exception as error:
            raise DataError(f"the chat template fails: {_reason(error)}") from error
        most = MAX_ADDED + MAX_GROWTH * sum(len(str(value)) for message in messages for value in message.values())
        if len(text) > most:  # guard: never
            raise DataError(
                f"the chat template makes {len(text)} characters of it, at most {most}; correct the template"
            )
        return text, rendered[1][0] if with_marks else []

    def _compile(self) -> None:
        import jinja2.debug  # noqa: F401 - Jinja imports it at an error, when no file can be opened any more
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            _compile_jinja_template(self._template)
        except Exception as error:  # a malformed template raises errors of Jinja, and of the parser of Python
            line = getattr(error, "lineno", None)
            where = f", line {line}" if isinstance(line, int) else ""
            raise DataError(
                f"the run's chat template is malformed{where}: {_reason(error)}; correct data.chat_template"
            ) from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
