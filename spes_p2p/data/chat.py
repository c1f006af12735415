"""Conversations as token ids: rendered by the run's chat template, which a stranger may have written, in the sandbox.

For the process that tokenises (`tokenizer_child.py`), whose memory and time are limited. What a reply's template text
is comes from the template's own marks (`{% generation %}`), or else from prefixes: what is rendered of the messages up
to the reply, less what is rendered of those before it and of the generation prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from spes_p2p.errors import DataError

HIDDEN = 2**31
"""Bit of an id that is read but not learned; no vocabulary has so many entries."""
MAX_ADDED, MAX_GROWTH = 2**15, 8
"""Most characters of a rendered conversation: so many, and so many times its own."""
MAX_REASON = 200
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
Message = Mapping[str, Any]
Span = tuple[int, int]


class Chat:
    """Encodes conversations, pairs of prompt and completion, and text.

    Args:
        template: The run's chat template; empty if it has none.
        special: Special tokens by role, which the template may name.
        backend: The tokenizer. Its post-processor is dropped, which moves offsets and adds nothing else here.
        end_of_text: Id behind each document.

    Raises:
        DataError: the template is malformed.
    """

    def __init__(self, template: str, special: Mapping[str, str], backend: Tokenizer, end_of_text: int) -> None:
        self._template = template
        self._special: dict[str, Any] = dict(special)
        self._backend = backend
        self._end = end_of_text
        self._has_marks = _MARKS.search(template) is not None
        if template:
            self._backend.post_processor = None
            self._compile()

    def encode(self, record: Mapping[str, Any]) -> np.ndarray:
        """Return the ids of a record, uint32, with the bit `HIDDEN` on each that is not learned.

        Args:
            record: `{"text"}`, `{"prompt", "completion"}` or `{"messages"}`, as `conversations.checked_record` has
                checked it; with `only_prompt`, what the model is given before the first reply.

        Raises:
            DataError: the template fails, grows the text, or marks nothing to learn.
        """
        if "messages" not in record:
            prompt, completion = record.get("prompt", ""), record.get("completion", record.get("text", ""))
            if record.get("only_prompt"):
                return self._ids(prompt, [])
            ids = self._ids(prompt + completion, [(len(prompt), len(prompt) + len(completion))])
            return np.append(ids, np.uint32(self._end))
        messages = record["messages"]
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

    def _ids(self, text: str, spans: Sequence[Span]) -> np.ndarray:
        """Return a text's ids; those that no span touches are hidden."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.uint32)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
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
        if len(text) > most:  # guard: template-growth
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
