"""A run's tokenizer and chat template, which a stranger may have written, in a process with limited memory and time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import spes_p2p
from spes_p2p.data import tokenizer_child as child
from spes_p2p.data.chat import MAX_ADDED, MAX_GROWTH
from spes_p2p.data.tokenizer_document import MAX_PAYLOAD_BYTES
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.fs import write_atomic

WALL_FACTOR = 10.0
"""Most seconds of waiting for one second of processor time that a batch may take."""
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS", "OMP_NUM_THREADS")
_FOREVER = 1000000000000000019884624838656
"""`model_max_length` of a tokenizer without one, as transformers writes it."""


class ConfinedTokenizer:
    """Encodes with a document of a stranger's; what goes wrong there ends a child process, and is an error here.

    The child starts with the first use and again after `close`.

    Args:
        payload: The document, as `tokenizer_bytes` makes it.
        directory: Folder for an ordinary tokenizer; made if absent, once the document is found sound.
        max_entries: Words of the run's model.
        template: The run's chat template; empty if it has none.

    Raises:
        DataError: the document or the template is refused, or ended the child.
        ConfigError: `directory` cannot be written.
    """

    def __init__(self, payload: bytes, directory: Path, max_entries: int, template: str = "") -> None:
        self.digest = hashlib.sha256(payload).hexdigest()
        """SHA-256 of the document, in hex."""
        self.template = template
        self._payload = payload
        self._max_entries = max_entries
        self._directory = directory
        self._child: subprocess.Popen[bytes] | None = None
        self._command = [sys.executable, "-P", "-m", child.__name__]
        about, text = self._start()
        self._num_entries = int(about["entries"])
        self.eos_token_id = int(about["eos_token_id"])
        self._write(about["special"], text)

    def __len__(self) -> int:
        return self._num_entries

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return the ids of all texts, uint32, with the end-of-text token after each.

        Raises:
            DataError: the tokenizer has ended its process.
        """
        encoded = [text.encode() for text in texts]
        lengths = np.array([len(text) for text in encoded], "<u4")
        message = b"".join([child.COUNT.pack(len(encoded)), lengths.tobytes(), *encoded])
        with self._answering(len(message)) as process:
            self._send(process, message)
            num_ids, _ = child.HEADER.unpack(self._receive(process, child.HEADER.size))
            if num_ids > self._most_ids(lengths):  # guard: never
                raise DataError(f"the run's tokenizer makes {num_ids} ids of {lengths.sum()} bytes; leave this run")
            return np.frombuffer(self._receive(process, 4 * num_ids), "<u4")

    def encode_records(self, records: Sequence[Mapping[str, Any]]) -> list[np.ndarray | str]:
        """Return the ids of each record, uint32 as `Chat.encode` makes them, or why it has none.

        Args:
            records: A batch of conversations, pairs of prompt and completion, or texts.

        Raises:
            DataError: the tokenizer or the template has ended its process, or makes far more of it than there is.
        """
        encoded = [json.dumps(record, ensure_ascii=False).encode() for record in records]
        lengths = np.array([len(record) for record in encoded], "<u4")
        message = b"".join(
            [child.COUNT.pack(child.RENDER), child.COUNT.pack(len(encoded)), lengths.tobytes(), *encoded]
        )
        with self._answering(len(message)) as process:
            self._send(process, message)
            num_ids, num_bytes = child.HEADER.unpack(self._receive(process, child.HEADER.size))
            most = self._most_ids(MAX_GROWTH * lengths + MAX_ADDED)
            if num_ids > most or num_bytes > 8 * child.MAX_SAID_CHARACTERS * (1 + len(records)):  # guard: never
                raise DataError(f"the run's chat template makes {num_ids} ids of {lengths.sum()} bytes; leave this run")
            ids = np.frombuffer(self._receive(process, 4 * num_ids), "<u4")
            said = json.loads(self._receive(process, num_bytes))
        said = said if isinstance(said, list) else []
        lengths_R = [each for each in said if isinstance(each, int) and each >= 0]
        if len(said) != len(records) or sum(lengths_R) != len(ids):  # guard: never
            raise DataError("the run's chat template broke its process; leave this run")
        parts = iter(np.split(ids, np.cumsum(lengths_R)[:-1]))
        return [next(parts) if isinstance(each, int) and each >= 0 else str(each) for each in said]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a few ids, 64 KiB at most.

        Raises:
            DataError: the tokenizer has ended its process.
        """
        given = np.asarray(ids, "<u4").tobytes()
        with self._answering(len(given)) as process:
            self._send(process, child.COUNT.pack(child.DECODE) + child.HEADER.pack(len(ids), 0) + given)
            num_bytes, _ = child.HEADER.unpack(self._receive(process, child.HEADER.size))
            if num_bytes > child.MAX_DECODED_BYTES:  # guard: never
                raise DataError(f"the run's tokenizer answers with {num_bytes} bytes of text; leave this run")
            return self._receive(process, num_bytes).decode("utf-8", "replace")

    def save_pretrained(self, directory: Path) -> None:
        """Write an ordinary tokenizer folder."""
        directory.mkdir(parents=True, exist_ok=True)
        for file in self._directory.iterdir():
            if file.suffix in (".json", ".jinja"):
                shutil.copyfile(file, directory / file.name)

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            _end(self._child)
            self._child = None

    @staticmethod
    def _most_ids(lengths: np.ndarray) -> int:
        """Return more ids than any tokenizer that is allowed can make: some for each byte, and the ends of texts."""
        return 16 * int(lengths.sum()) + 16 * len(lengths)

    def _start(self) -> tuple[dict[str, Any], bytes]:
        """Start the child and have it read the document; return what it says of it, and the tokenizer.json."""
        root = str(Path(spes_p2p.__file__).parents[1])
        paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}  # no tokens, no keys
        self._child = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**kept, "PYTHONPATH": paths, "RUST_BACKTRACE": "0"},
            start_new_session=True,  # a terminal's Ctrl-C is for the peer, which still has to say goodbye
        )
        weakref.finalize(self, _end, self._child)
        with self._answering(0) as process:
            template = self.template.encode()
            document = child.HEADER.pack(len(self._payload), self._max_entries) + self._payload
            self._send(process, document + child.HEADER.pack(len(template), 0) + template)
            assert process.stdout is not None
            line = process.stdout.readline(2**16)
            about = json.loads(line) if line.endswith(b"\n") else self._died(process)
            if "error" in about:
                raise DataError(str(about["error"]))
            return about, self._receive(process, min(int(about["bytes"]), MAX_PAYLOAD_BYTES))

    @contextlib.contextmanager
    def _answering(self, num_text_bytes: int) -> Iterator[subprocess.Popen[bytes]]:
        """Give the block the child, which is killed if the block takes too long, and ended if it fails."""
        if self._child is None:
            self._start()
        assert self._child is not None
        seconds = WALL_FACTOR * (child.BASE_SECONDS + num_text_bytes / child.TEXT_BYTES_PER_SECOND)
        timer = threading.Timer(seconds, self._child.kill)
        timer.daemon = True
        timer.start()
        try:
            yield self._child
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()

    def _send(self, process: subprocess.Popen[bytes], message: bytes) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(message)
            process.stdin.flush()
        except BrokenPipeError:
            self._died(process)

    def _receive(self, process: subprocess.Popen[bytes], num_bytes: int) -> bytes:
        assert process.stdout is not None
        data = process.stdout.read(num_bytes)
        return data if len(data) == num_bytes else self._died(process)

    def _died(self, process: subprocess.Popen[bytes]) -> Any:
        """Raise what ended the child."""
        code = process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        why = {"SIGXCPU": "too much time", "SIGABRT": "too much memory", "SIGKILL": "too much time or memory"}.get(how)
        reason = f"{how}, {why}" if why else how
        raise DataError(f"the run's tokenizer ended its process ({reason}); leave this run, or tell its founder")

    def _write(self, special: dict[str, str], text: bytes) -> None:
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
        config |= {"model_max_length": _FOREVER}
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            files = {"tokenizer.json": text, "tokenizer_config.json": json.dumps(config, indent=2).encode()}
            files |= {"chat_template.jinja": self.template.encode()} if self.template else {}
            for name, content in files.items():
                with write_atomic(self._directory / name) as stream:
                    stream.write(content)
        except OSError as error:
            raise ConfigError(f"cannot write {self._directory}: {error.strerror}; choose another directory") from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the child, which has nothing to lose."""
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    process.wait()
