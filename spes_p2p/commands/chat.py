"""`spes chat`: talk to a model in the terminal, by its chat template if it has one, else by continuing text."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from spes_p2p.cli import Terminated
from spes_p2p.commands.early import is_kept, is_link, is_store
from spes_p2p.commands.evaluate import check_ids, load_checkpoint
from spes_p2p.config.commands import ChatConfig, ExportConfig
from spes_p2p.data.tokenizer import own_template
from spes_p2p.errors import DataError, one_line
from spes_p2p.model.sampling import sampled_continuation
from spes_p2p.presentation import printable_text, say


class _Terminal(TextStreamer):
    """Prints text as it is drawn, without what would steer a terminal, and keeps it."""

    text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        say(printable_text(text), end="\n" if stream_end else "")


def main(config: ChatConfig) -> int:
    """Answer one prompt, or each line of the terminal until its end; return the exit code.

    Raises:
        ConfigError, DataError, ExchangeError, JoinError: the model cannot be had, or its template fails.
    """
    torch.seed()  # PyTorch begins with the same state in each process
    model, tokenizer = _load(config.source, yes=config.yes)
    is_chat = own_template(tokenizer) is not None
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    most = positions - min(config.max_tokens, positions // 2)  # the rest is for the answer
    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [] if ends is None else [ends])}
    messages: list[dict[str, str]] = []
    for prompt in _lines(is_chat) if config.prompt is None else [config.prompt]:
        messages.append({"role": "user", "content": prompt})
        while len(ids := _ids(tokenizer, messages, is_chat)) > most and is_chat and len(messages) > 1:
            del messages[:2]
        ids = ids[-most:]
        check_ids(model, max(ids))
        streamer = _Terminal(tokenizer, skip_prompt=is_chat, skip_special_tokens=True)
        try:
            sampled_continuation(
                model,
                torch.tensor(ids),
                ends=ends,
                temperature=config.temperature,
                repetition_penalty=config.repetition_penalty,
                max_new_tokens=min(config.max_tokens, positions - len(ids)),
                streamer=streamer,
            )
        except Terminated:
            raise
        except KeyboardInterrupt:  # ends the answer alone; at the prompt it ends the command
            streamer.end()
        messages.append({"role": "assistant", "content": streamer.text})
    return 0


def _load(source: str, *, yes: bool) -> tuple[Any, Any]:
    """Return model and tokenizer of a checkpoint; of any other place, of a checkpoint made of it."""
    is_elsewhere = is_link(source) or is_store(source)
    if not is_elsewhere and not is_kept(folder := Path(source).expanduser()):
        return load_checkpoint(folder)
    from spes_p2p.commands.export import write  # with it comes the whole swarm

    with tempfile.TemporaryDirectory(prefix="spes-chat-") as scratch:
        output = Path(scratch) / "model"
        write(ExportConfig(source=source, output=output, merged=not is_elsewhere, yes=yes))
        return load_checkpoint(output)


def _lines(is_chat: bool) -> Iterator[str]:
    """Yield what is typed, or piped in, without empty lines."""
    if is_terminal := sys.stdin.isatty():
        import readline  # noqa: F401 - gives `input` a history, and keys that edit

        kind = "answers" if is_chat else "has no chat template, and continues your text"
        say(f"the model {kind}; Ctrl-C ends an answer, Ctrl-D the talk")
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            return
        if line.strip():
            yield line


def _ids(tokenizer: Any, messages: list[dict[str, str]], is_chat: bool) -> list[int]:
    """Return the ids of a conversation, or without a chat template of its last text."""
    if not is_chat:
        return list(tokenizer(messages[-1]["content"])["input_ids"])
    try:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
    except Exception as error:  # a template raises anything
        raise DataError(f"the model's chat template fails: {one_line(error)}; talk to another model") from error
