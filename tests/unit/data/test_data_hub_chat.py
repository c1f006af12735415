"""Conversations on the hub, which are read as those in local files are."""

import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from spes_p2p.config import DataConfig
from spes_p2p.data.conversations import PLAIN_TEMPLATE, encoder, founding, held_out_prompts
from spes_p2p.data.hub import load_hub
from spes_p2p.data.packing import held_out_batches, train_sources
from spes_p2p.data.sources import documents
from spes_p2p.errors import DataError

from .conftest import sentences, write_rows
from .test_data_hub import image_rows

T = 32


def messages(text: str, number: int) -> dict:
    turns = [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text[20:]}]
    return {"messages": [{"role": "system", "content": "Be brief."}, *turns] if number % 3 else turns}


ROWS = {
    "messages": messages,
    "pairs": lambda text, number: {"prompt": text[:20], "completion": text[20:], "id": number},
    "another column": lambda text, number: {"chat": messages(text, number)["messages"], "text": "not this"},
    "of several kinds": lambda text, number: messages(text, number) if number % 2 else {"text": text},
}
FIELD = {"another column": "chat"}


COMMIT = [("of several kinds", ".parquet"), ("pairs", ".jsonl")]
ALL = [(kind, suffix) for kind in ROWS for suffix in (".jsonl", ".parquet")]


# The others are slow; the two of the commit lane have all of it between them.
@pytest.fixture(params=[pytest.param(e, id=" ".join(e), marks=[pytest.mark.full] * (e not in COMMIT)) for e in ALL])
def chats(request, hub, tmp_path, seed):
    """The same rows as settings of a hub data set and of a local file."""
    kind, suffix = request.param
    rows = [ROWS[kind](text, number) for number, text in enumerate(sentences(random.Random(seed), 60, 30))]
    file = hub.root / "alice" / "chats" / f"rows{suffix}"
    file.parent.mkdir(parents=True)
    if suffix == ".parquet":
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table = {name: [row.get(name) for row in rows] for name in columns}
        pyarrow.parquet.write_table(pyarrow.table(table), file, row_group_size=20)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    local = tmp_path / file.name
    local.write_bytes(file.read_bytes())
    more = {"sequence_length": T, "held_out_fraction": 0.2, "text_field": FIELD.get(kind, "text")}
    return DataConfig(source="hub", name="alice/chats", **more), DataConfig(source="files", paths=[local], **more)


def test_a_hub_data_set_of_conversations_is_read_as_a_local_file_is(chats, tokenizer, tmp_path):
    founded = [founding(data, tokenizer) for data in chats]
    assert founded[0].chat_template == founded[1].chat_template == PLAIN_TEMPLATE
    assert founded[0].packing == founded[1].packing == "best_fit"
    # Each document in sequences of its own, so that its order does not matter.
    hub_data, local = (data.model_copy(update={"packing": "overflow"}) for data in founded)
    with encoder(hub_data, tokenizer) as chat:  # as a peer has it
        sources = [train_sources(data, chat, paths=(), cache=tmp_path / "cache")(1) for data in (hub_data, local)]
        windows = [sorted(source.next_batch(sources[1]._num_windows).tolist()) for source in sources]
        assert windows[0] == windows[1] and len(windows[0]) > 20
        assert any(number < -1 for row in windows[0] for number in row), "prompts are not learned"
        state = json.loads(json.dumps(sources[0].state_dict()))
        expected = sources[0].next_batch(9)
        resumed = train_sources(hub_data, chat, paths=(), cache=tmp_path / "cache")(1)
        resumed.load_state_dict(state)
        assert torch.equal(resumed.next_batch(9), expected)
        more = {"paths": (), "cache": tmp_path / "cache", "num_sequences": 10**4, "batch_size": 10**4, "seed": 0}
        held_out = [sorted(held_out_batches(data, chat, **more)[0].tolist()) for data in (hub_data, local)]
        assert held_out[0] == held_out[1] and held_out[0]
        prompts = [held_out_prompts(data, chat, data.paths or None, 2) for data in (hub_data, local)]
    assert prompts[0] == prompts[1]
    assert [d.text for d in documents(hub_data)] == [d.text for d in documents(local)]


def test_a_hub_data_set_of_text_stays_text(hub, tokenizer):
    """Also one with a column of prompts and no completions, as synthetic text has them."""
    file = hub.root / "alice" / "texts" / "rows.parquet"
    file.parent.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["Write!"] * 9, "text": ["public"] * 8 + [None]}), file)
    data = DataConfig(source="hub", name="alice/texts")
    assert founding(data, tokenizer) == data
    assert [document.text for document in documents(data)] == ["public"] * 8


@pytest.mark.parametrize("skip", [False, True])
def test_a_row_that_cannot_be_used_ends_the_peer_or_is_left_out(hub, tokenizer, tmp_path, skip):
    rows = [messages(text, 0) for text in sentences(random.Random(3), 40, 30)]
    rows[20]["messages"][1]["role"] = "bot"
    file = hub.root / "alice" / "chats" / "rows.jsonl"
    write_rows(file, [])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(source="hub", name="alice/chats", sequence_length=T, skip_unusable=skip)
    data = founding(data, tokenizer)
    if skip:
        assert len([*documents(data)]) == 39
        assert len(train_sources(data, tokenizer, paths=(), cache=tmp_path)(0).next_batch(4)) == 4
    else:
        with pytest.raises(DataError, match="data set 'alice/chats': message 2 has the role 'bot'"):
            train_sources(data, tokenizer, paths=(), cache=tmp_path)(0)


def test_messages_with_images_are_not_decoded(hub, tmp_path):
    """Their paths may name any file."""
    image_rows(hub.root / "alice" / "chats" / "a.parquet", {"bytes": None, "path": str(Path("/etc/hostname"))})
    data = DataConfig(source="hub", name="alice/chats", text_field="image")
    with pytest.raises(DataError, match="is no text"):
        load_hub(data)
