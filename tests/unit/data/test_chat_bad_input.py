"""What users get wrong in conversations and templates: one line, exit code 2, and nothing begun."""

import datetime
import decimal
import gzip
import json
import re

import pytest
from conversations import conversations, write_lines
from lanes import sample

from spes_p2p.cli import entry_point
from spes_p2p.commands.local import main
from spes_p2p.config.commands import ExperimentConfig
from spes_p2p.data.chat_rows import _messages
from spes_p2p.data.tokenizer import train_bpe
from spes_p2p.errors import DataError

GOOD = conversations(30)
USER, REPLY = {"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}


def chat(*messages, **more):
    return {"messages": list(messages), **more}


# A row behind 30 good ones, and what the error says besides the file and `line 31`.
ROWS = {
    "no messages": (chat(), "an empty list; write"),
    "messages of text": ({"messages": "hello"}, "messages are str; write"),
    "messages of texts": (chat("hello"), "message 1 is str, not an object"),
    "an object of messages": ({"messages": {"role": "user"}}, "messages are dict"),
    "no role": (chat({"content": "x"}, REPLY), "message 1 has no role"),
    "ShareGPT's fields": (chat({"from": "human", "value": "x"}), "from and value are role and content here"),
    "an unknown role": (chat(USER, {"role": "bot", "content": "x"}), "message 2 has the role 'bot'; write one of"),
    "a role that is a number": (chat({"role": 1, "content": "x"}), "has the role '1'"),
    "content of a number": (chat(USER, {"role": "assistant", "content": 5}), "content is int, not text"),
    "content of parts": (chat({"role": "user", "content": [{"type": "text", "text": "x"}]}), "content is list"),
    "no content": (chat(USER, {"role": "assistant"}), "message 2: content is nothing"),
    "an empty reply": (chat(USER, {"role": "assistant", "content": " \n"}), "message 2 is an empty reply"),
    "no reply": (chat(USER), "no message of the role assistant"),
    "too many messages": (chat(*[USER, REPLY] * 600), "has 1200 messages, at most 1024"),
    "an empty completion": ({"prompt": "x", "completion": ""}, "'completion' is empty"),
    "no completion": ({"prompt": "x"}, "'completion' holds nothing"),
    "a completion without a prompt": ({"completion": "x"}, "'prompt' holds nothing"),
    "a completion of a list": ({"prompt": "x", "completion": ["y"]}, "'completion' holds list"),
    "blank text": ({"text": "  "}, "'text' is blank"),
    "other fields": ({"question": "x", "answer": "y"}, r"no 'text' \(it has: answer, question\); rename"),
    "text of a number": ({"text": 3}, "holds int"),
    "a list": ([1, 2], "is list, not an object"),
    "no JSON": ("{broken", "is not JSON; write one object per line"),
}
# Bytes of a whole file by its name, and what the error says besides the file.
FILES = {
    "a truncated gz": ("chats.jsonl.gz", gzip.compress(json.dumps(GOOD).encode() * 9)[:-300], "ends in the middle"),
    "binary": ("chats.jsonl", b"\x89PNG\r\n\0\0", "holds a PNG image"),
    "no gzip": ("chats.jsonl.gz", b"plain text", "check the file"),
    "no UTF-8": ("chats.jsonl", b'{"text": "\xff\xfe\xfa"}\n', "is not UTF-8"),
    "nothing": ("chats.jsonl", b"", "no conversation that can be used"),
    "a broken array": ("chats.json", b'[{"text": "a"}, {"text": ', "is not JSON from element 1 on"),
    "no parquet": ("chats.parquet", b"PAR1 and more", "chats.parquet"),
}
TEMPLATE = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
# Flags besides --data of good conversations, and what the error says.
FLAGS = {
    "a malformed template": (["--run.data.chat-template", "{% for m in messages %}"], "malformed, line 1: .*correct"),
    "a template without marks or prompt": (["--run.data.chat-template", "{{ 'x' }}"], "line 1: nothing of it is"),
    "a template whose prompt is no prefix": (
        ["--run.data.chat-template", TEMPLATE + "{% if add_generation_prompt %}reply:{% endif %}"],
        "line 1: .*not behind its generation prompt",
    ),
    "a template that marks nothing": (
        ["--run.data.chat-template", TEMPLATE + "{% generation %}{% endgeneration %}"],
        "line 1: nothing of it is learned",
    ),
    "a template that grows": (["--run.data.chat-template", "{{ 'x' * 99999 }}"], "line 1: .*makes 99999 characters"),
    "a template that refuses": (
        ["--run.data.chat-template", "{{ raise_exception('no system') }}"],
        "line 1: .*no system",
    ),
    "no such template": (["--run.data.chat-template", "/nowhere.jinja"], "cannot read the file: No such file"),
    "too long a template": (["--run.data.chat-template", "{" + "x" * 2**15], "chat_template"),
    "no such probe": (["--run.data.probe", "/nowhere.jsonl"], "data.probe=/nowhere.jsonl: cannot read"),
    "a larger vocabulary than the tokenizer's": (["--run.data.tokenizer", "/nowhere"], "cannot load tokenizer"),
    "text as well": (["--text", "/tmp"], "--text and --data exclude each other"),
    "a data set as well": (["--dataset", "owner/name"], "exclude each other"),
    "a fingerprint of shards": (
        ["--run.data.source", "files", "--run.data.fingerprint", "0" * 64],
        "trains on token shards with the fingerprint 0.*chats.jsonl holds rows",
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe([message["content"] for row in GOOD for message in row["messages"]], 300).save_pretrained(folder)
    return folder


@pytest.fixture
def refusal(tmp_path, tokenizer, monkeypatch, capsys):
    """What `spes local` says of a file of conversations, once it has ended."""
    monkeypatch.chdir(tmp_path)

    def of(path, *flags):
        own = [] if "--run.data.tokenizer" in flags else ["--run.data.tokenizer", str(tokenizer)]
        words = [
            "--data",
            str(path),
            "--cache",
            str(tmp_path / "cache"),
            "--output",
            str(tmp_path / "out"),
            *own,
            *flags,
        ]
        with pytest.raises(SystemExit) as ended:
            entry_point(ExperimentConfig, main, [*words, *own, *flags])
        assert ended.value.code == 2 and not (tmp_path / "out").exists()
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: ") and len(error) < 800, error
        return error

    return of


# Full: the other mistakes of each kind; each is a command of some seconds.
@pytest.mark.parametrize("case", sample([*ROWS], ["no messages", "an empty reply", "an empty completion", "no JSON"]))
def test_a_bad_row_is_named_with_its_line(refusal, tmp_path, case):
    row, says = ROWS[case]
    path = write_lines(tmp_path / "chats.jsonl", GOOD)
    with path.open("a") as stream:
        stream.write((row if isinstance(row, str) else json.dumps(row)) + "\n")
    error = refusal(path)
    assert "chats.jsonl line 31" in error and says.replace("\\", "") in error, error


@pytest.mark.parametrize("case", sample([*FILES], ["a truncated gz", "binary"]))
def test_a_bad_file_is_named(refusal, tmp_path, case):
    name, content, says = FILES[case]
    (tmp_path / name).write_bytes(content)
    error = refusal(tmp_path / name)
    assert name in error and says in error, error


@pytest.mark.parametrize("case", sample([*FLAGS], ["a malformed template", "a template that grows"]))
def test_a_bad_choice_is_named(refusal, tmp_path, case):
    flags, says = FLAGS[case]
    error = refusal(write_lines(tmp_path / "chats.jsonl", GOOD), "--run.data.held-out-fraction", "0.3", *flags)
    assert re.search(says, error), error


def test_rows_that_cannot_be_used_are_left_out_where_asked(refusal, tmp_path):
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": []}, {"prompt": "x"}])
    error = refusal(path, "--skip-unusable")
    assert "chats.jsonl has no conversation that can be used: " in error and "line 1" in error


@pytest.mark.parametrize("value", [datetime.datetime(2026, 1, 1), b"bytes", decimal.Decimal(1)], ids=repr)
def test_a_field_that_is_no_json_value_is_named(value):
    """Parquet files have such in their messages; the command ended in a traceback."""
    messages = [USER, {"role": "assistant", "content": "yes", "at": value}]
    with pytest.raises(DataError, match="row 7: message 2 has a field that is no JSON value"):
        _messages(messages, "row 7")
