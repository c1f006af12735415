"""Conversations as tokens: which are learned, by transformers' own rendering; hostile templates end in the child."""

import itertools
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conversations import conversations, write_lines
from lanes import sample
from pydantic import ValidationError
from tokenizers import Tokenizer

from spes_p2p.config import DataConfig
from spes_p2p.data import tokenizer_child as child
from spes_p2p.data.chat import HIDDEN, Chat
from spes_p2p.data.chat_rows import conversation_files, records
from spes_p2p.data.confined_tokenizer import ConfinedTokenizer
from spes_p2p.data.conversations import PLAIN_TEMPLATE, founding, held_out_prompts, probe_file
from spes_p2p.data.packing import held_out_batches, probe_windows, token_file, train_sources
from spes_p2p.data.sources import documents, is_held_out
from spes_p2p.data.text_encoder import TextEncoder
from spes_p2p.data.tokenizer import resolve_tokenizer, tokenizer_bytes, train_bpe
from spes_p2p.data.windows import CONTEXT, windows_of
from spes_p2p.errors import DataError
from spes_p2p.model.loss import model_inputs

HEAD = "{{ '<|im_start|>' + message.role + '\n' }}"
END = "{{ message.content + eos_token + '\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
MARKED = (
    "{% for message in messages %}"
    + HEAD
    + "{% if message.role == 'assistant' %}{% generation %}"
    + END
    + "{% endgeneration %}"
    "{% else %}" + END + "{% endif %}{% endfor %}" + PROMPT
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CHAT = [
    {"role": "system", "content": "Be the peer."},
    {"role": "user", "content": "hello \n ünï 🙂 "},
    {"role": "assistant", "content": "🙂  a reply\n\n"},
    {"role": "user", "content": "what?"},
    {"role": "assistant", "content": "漢字 is"},
]


@pytest.fixture(scope="module")
def bpe():
    texts = [" ".join(message["content"] for message in row["messages"]) for row in conversations(60)]
    return train_bpe([*texts, "<|im_start|>user <|im_start|>assistant User:\nAssistant:\n"] * 3, 400)


@pytest.fixture
def confined(bpe, tmp_path):
    made = []

    def make(template=MARKED):
        made.append(ConfinedTokenizer(tokenizer_bytes(bpe), tmp_path / f"received-{len(made)}", len(bpe), template))
        return made[-1]

    yield make
    for tokenizer in made:
        tokenizer.close()


def backend_of(tokenizer):
    return Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())


def of(tokenizer, record):
    """Ids of one record, and which are learned."""
    (ids,) = tokenizer.encode_records([record])
    assert not isinstance(ids, str), ids
    return (ids & (HIDDEN - 1)).tolist(), (ids < HIDDEN).astype(int).tolist()


@pytest.mark.parametrize("template", [MARKED, UNMARKED, PLAIN_TEMPLATE], ids=["marked", "prefixes", "plain"])
def test_ids_and_mask_are_transformers_own(bpe, confined, template):
    bpe.chat_template = MARKED if template == UNMARKED else template
    stock = bpe.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    ids, learned = of(confined(template), {"messages": CHAT})
    assert ids == stock["input_ids"] and learned == stock["assistant_masks"] and 0 < sum(learned) < len(ids)
    prompt = bpe.apply_chat_template(CHAT[:2], add_generation_prompt=True)["input_ids"]
    assert of(confined(template), {"messages": CHAT, "only_prompt": True}) == (prompt, [0] * len(prompt))


def test_of_a_pair_the_completion_is_learned_and_of_text_all(bpe, confined):
    ids, learned = of(confined(""), {"prompt": "the question\n", "completion": "the answer"})
    prompt, whole = (bpe(text)["input_ids"] for text in ("the question\n", "the question\nthe answer"))
    assert ids == [*whole, bpe.eos_token_id] and whole[: len(prompt)] == prompt
    assert learned == [0] * len(prompt) + [1] * (len(ids) - len(prompt))
    ids, learned = of(confined(""), {"text": "the answer"})
    assert ids == [*bpe("the answer")["input_ids"], bpe.eos_token_id] and all(learned)


def test_a_reply_that_does_not_say_where_it_ends_gets_the_end_of_text(bpe, confined):
    endless = UNMARKED.replace(" + eos_token", "")
    ids, learned = of(confined(endless), {"messages": CHAT})
    assert ids[-1] == bpe.eos_token_id and learned[-1] == 1 and ids.count(bpe.eos_token_id) == 1
    ids, learned = of(confined(endless), {"messages": CHAT[:-1]})
    assert bpe.eos_token_id not in ids and learned[-1] == 0, "but not a question"


def test_a_template_whose_earlier_turns_change_is_refused_where_it_matters(confined):
    """As Qwen3's, which writes an empty thought into the last reply alone."""
    thinking = UNMARKED.replace(END, "{% if loop.last %}{{ '<think></think>' }}{% endif %}" + END, 1)
    tokenizer = confined(thinking)
    (problem,) = tokenizer.encode_records([{"messages": CHAT}])
    assert "message 3 differently when others follow" in problem and "{% generation %}" in problem
    assert sum(of(tokenizer, {"messages": CHAT[:3]})[1]), "a conversation of one reply can be learned"


HOSTILE = {
    "a missing end": ("{% for m in messages %}", "malformed, line 1"),
    "an unknown tag": ("{% include 'x' %}", "fails: |malformed"),
    "a marked nothing": (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{% endgeneration %}",
        "marks no reply",
    ),
    "no mark at all": ("{{ 'x' * 10 }}", "cannot be found|marks no reply|marks no reply"),
    "an exception": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "a growing text": ("{{ 'x' * 10000000 }}", "makes 10000000 characters"),
    "Python's insides": ("{{ messages.__class__.__mro__ }}", "fails: .*unsafe|marks no reply"),
    "a call of Python": ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
    "a change of its input": ("{% set _ = messages.append(1) %}", "unsafe|not safely callable"),
    "an undefined name": ("{{ nothing.at.all }}", "undefined"),
    "a division by zero": ("{{ 1 / 0 }}", "division"),
    "an endless recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_template_is_one_line_of_error(bpe, case):
    template, says = HOSTILE[case]
    with pytest.raises(DataError, match=says) as caught:
        chat = Chat(
            template, special := {"eos_token": "<|endoftext|>"}, TextEncoder(backend_of(bpe), special, template)
        )
        chat.encode({"messages": CHAT})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


@pytest.mark.parametrize("case", ["an undefined name", "an endless recursion"])
def test_the_process_that_opens_no_file_says_the_same_of_a_template(confined, case):
    template, says = HOSTILE[case]
    (problem,) = confined(template).encode_records([{"messages": CHAT}])
    assert re.search(says, problem)


def test_what_exceeds_a_limit_ends_the_conversation_or_its_process_and_the_next_one_is_read(confined, tmp_path):
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    hoard = "{{ [0] * 10 ** 10 }}"
    first = "{% if messages[0].content == 'NAME' %}CODE{% endif %}"
    parts = (first.replace("NAME", name).replace("CODE", code) for name, code in (("loop", loop), ("hoard", hoard)))
    tokenizer = confined("".join(parts) + MARKED)
    tokenizer.close()
    script = tmp_path / "impatient_child.py"
    script.write_text(f"from {child.__package__} import tokenizer_child as it\nit.RENDER_SECONDS = 1.0\nit.main()\n")
    tokenizer._command = [sys.executable, str(script)]
    (problem,) = tokenizer.encode_records([{"messages": [{"role": "user", "content": "hoard"}, *CHAT]}])
    assert "the chat template fails: MemoryError" in problem
    with pytest.raises(DataError, match="SIGXCPU, too much time"):
        tokenizer.encode_records([{"messages": [{"role": "user", "content": "loop"}, *CHAT]}])
    assert of(tokenizer, {"messages": CHAT})


def test_more_ids_than_conversations_can_have_are_not_read(confined, monkeypatch):
    tokenizer = confined()
    monkeypatch.setattr(tokenizer, "_most_ids", lambda lengths: 1)
    with pytest.raises(DataError, match="chat template makes"):
        tokenizer.encode_records([{"messages": CHAT}])


def test_counts_that_do_not_add_up_are_refused(confined, monkeypatch):
    tokenizer = confined()
    receive = tokenizer._receive

    def fewer(process, num_bytes):
        data = receive(process, num_bytes)
        return b"[1]" if data.startswith(b"[") and data.endswith(b"]") else data

    monkeypatch.setattr(tokenizer, "_receive", fewer)
    with pytest.raises(DataError, match="broke its process"):
        tokenizer.encode_records([{"messages": CHAT}])


@pytest.fixture
def chats(tmp_path):
    rows = [*conversations(), {"prompt": "the question\n", "completion": "the answer"}, {"text": "plain words"}]
    return write_lines(tmp_path / "chats.jsonl", rows)


def data_of(path, **more):
    more = {"held_out_fraction": 0.2, "packing": "best_fit", "chat_template": MARKED, **more}
    return DataConfig(source="files", paths=[path], sequence_length=more.pop("sequence_length", 64), **more)


def learned_pairs(rows):
    """What is learned: an id, and the id in front of it."""
    ids = [
        [number - CONTEXT if number < CONTEXT // 2 else ~number if number < 0 else number for number in row]
        for row in rows
    ]
    return sorted(
        (a, b)
        for row, numbers in zip(ids, rows, strict=True)
        for (a, b), mark in zip(itertools.pairwise(row), numbers[1:], strict=True)
        if mark >= 0
    )


@pytest.mark.parametrize("packing", ["best_fit", "overflow", "pack"])
def test_every_learned_token_is_a_target_once_behind_its_own_conversation(bpe, chats, tmp_path, packing):
    data = data_of(chats, packing=packing)
    file = token_file(data, bpe, paths=(), cache=tmp_path / "cache", part="train")
    windows = windows_of(file, data, cache=tmp_path / "cache", part="train")
    rows = windows.gather(np.arange(len(windows))).tolist()
    expected, ends = [], file.ends_D.tolist()
    for start, stop in zip([0, *ends], ends, strict=False):
        ids = file.tokens_N[start:stop]
        pairs = itertools.pairwise((ids & (HIDDEN - 1)).tolist())
        expected += [pair for pair, own in zip(pairs, ids[1:] < HIDDEN, strict=True) if own]
    found = learned_pairs(rows)
    if packing == "pack":  # which cuts anywhere, and drops a tail
        assert set(found) <= set(expected) and 0 < len(expected) - len(found) < 3 * 64
    else:
        assert found == sorted(expected)
    assert all(any(number >= 0 for number in row[1:]) for row in rows) or packing == "pack"


@pytest.mark.parametrize("packing", ["best_fit", "pack"])
def test_conversations_in_one_sequence_do_not_see_each_other(bpe, chats, tmp_path, packing):
    """Each begins a document, from which positions start anew; also in a run whose text is joined."""
    data = data_of(chats, packing=packing, sequence_length=256)
    file = token_file(data, bpe, paths=(), cache=tmp_path / "cache", part="train")
    windows = windows_of(file, data, cache=None, part="train")
    rows_BT1 = windows.gather(np.arange(len(windows)))
    inputs, learned_BS = model_inputs(SimpleNamespace(config=None), rows_BT1)
    assert torch.equal(learned_BS, rows_BT1[:, 1:] >= 0)
    starts = {tuple((file.tokens_N[end : end + 4] & (HIDDEN - 1)).tolist()) for end in [0, *file.ends_D[:-1].tolist()]}
    num_begun = 0
    for ids, positions, row in zip(*(inputs[key] for key in ("input_ids", "position_ids")), rows_BT1, strict=True):
        for at in torch.nonzero((row[1:-4] < 0) & (row[1:-4] > CONTEXT // 2)).flatten().tolist():
            if row[at + 2] > CONTEXT // 2 and row[at + 2] < 0:
                continue  # padding
            assert (
                positions[at + 1 : at + 5].tolist() == [0, 1, 2, 3] and tuple(ids[at + 1 : at + 5].tolist()) in starts
            )
            num_begun += 1
    assert num_begun > 100
    blind = data.model_copy(update={"separate_documents": False, "packing": "pack"})
    rows_BT1 = windows_of(file, blind, cache=None, part="train").gather(np.arange(4))
    assert not ((rows_BT1 < 0) & (rows_BT1 > CONTEXT // 2)).any(), "unless the founder says so"


def test_conversations_are_held_out_whole_by_their_text(bpe, chats, tmp_path):
    data, cache = data_of(chats), tmp_path / "cache"
    parts = {part: token_file(data, bpe, paths=(), cache=cache, part=part) for part in ("train", "held_out")}
    texts = [record.text for record in records([chats], data)]
    out = sum(is_held_out("", text, 0.2) for text in texts)
    assert len(parts["held_out"].ends_D) == out > 10 and len(parts["train"].ends_D) == len(texts) - out
    assert [document.text for document in documents(data)] == texts, "and a tokenizer's text is split by the same"
    batches = held_out_batches(data, bpe, paths=(), cache=cache, num_sequences=4, batch_size=3, seed=0)
    assert [len(batch) for batch in batches] == [3, 1]


@pytest.mark.parametrize("kind", sample(["jsonl.gz", "json", "parquet", "jsonl.zst"], commit=["jsonl.zst", "parquet"]))
def test_every_format_gives_the_same_tokens(bpe, chats, tmp_path, kind):
    import gzip

    import pyarrow
    import zstandard
    from pyarrow import parquet

    rows = [json.loads(line) for line in chats.read_text().splitlines()]
    other = tmp_path / "other" / f"chats.{kind}"
    other.parent.mkdir()
    if kind == "jsonl.gz":
        other.write_bytes(gzip.compress(chats.read_bytes()))
    elif kind == "jsonl.zst":
        other.write_bytes(zstandard.compress(chats.read_bytes()))
    elif kind == "json":
        other.write_text(json.dumps(rows))
    else:
        parquet.write_table(
            pyarrow.Table.from_pylist(
                [{"text": None, **row} for row in rows],
                pyarrow.schema(
                    [
                        (
                            "messages",
                            pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])),
                        ),
                        ("prompt", pyarrow.string()),
                        ("completion", pyarrow.string()),
                        ("text", pyarrow.string()),
                    ]
                ),
            ),
            other,
        )
    ours, theirs = (
        token_file(data_of(path), bpe, paths=(), cache=tmp_path / "cache", part="train") for path in (chats, other)
    )
    assert ours.key != theirs.key and np.array_equal(ours.tokens_N, theirs.tokens_N)
    assert np.array_equal(ours.ends_D, theirs.ends_D)


def test_few_conversations_are_enough_and_long_ones_are_told(bpe, tmp_path, caplog):
    path = write_lines(tmp_path / "few.jsonl", conversations(4))
    data = data_of(path, held_out_fraction=1e-9, sequence_length=16)
    batch = train_sources(data, bpe, paths=(), cache=tmp_path / "cache")(0).next_batch(8)
    assert batch.shape == (8, 17) and int((batch[:, 1:] >= 0).sum())
    assert "4 of 4 conversations of the train part are longer than data.sequence_length=16" in caplog.text


def test_one_of_few_conversations_is_held_out(bpe, tmp_path):
    data = data_of(write_lines(tmp_path / "few.jsonl", conversations(4)), held_out_fraction=0.02, sequence_length=16)
    common = {"paths": (), "cache": tmp_path / "cache"}
    num_documents = [len(token_file(data, bpe, **common, part=part).ends_D) for part in ("train", "held_out")]
    assert num_documents == [3, 1]
    assert held_out_batches(data, bpe, **common, num_sequences=1, batch_size=1, seed=0)


def test_unusable_rows_are_counted_and_left_out_where_asked(bpe, tmp_path, caplog):
    rows = [*conversations(20), {"messages": []}, {"prompt": "x", "completion": " "}, {"messages": CHAT[:1]}]
    path = write_lines(tmp_path / "chats.jsonl", rows)
    with pytest.raises(DataError, match=r"chats.jsonl line 21: messages are an empty list"):
        token_file(data_of(path), bpe, paths=(), cache=tmp_path / "cache", part="train")
    token_file(data_of(path, skip_unusable=True), bpe, paths=(), cache=tmp_path / "cache", part="train")
    assert "left out 3 of 23 rows" in caplog.text and "line 21" in caplog.text


def test_a_run_takes_the_template_of_its_tokenizer_or_a_plain_one_and_packs_whole_conversations(bpe, chats, tmp_path):
    bpe.chat_template = None
    data = DataConfig(source="files", paths=[chats])
    assert (founding(data, bpe).chat_template, founding(data, bpe).packing) == (PLAIN_TEMPLATE, "best_fit")
    assert founding(DataConfig(), bpe) == DataConfig(), "text alone needs none, and is packed as before"
    bpe.chat_template = MARKED
    assert founding(data, bpe).chat_template == MARKED
    own = tmp_path / "own.jinja"
    own.write_text(UNMARKED)
    chosen = founding(data.model_copy(update={"chat_template": str(own), "separate_documents": False}), bpe)
    assert (chosen.chat_template, chosen.packing) == (UNMARKED, "pack")
    bpe.chat_template = None


def test_the_public_probe_is_in_the_manifest_and_all_peers_measure_the_same(bpe, confined, tmp_path):
    path = write_lines(tmp_path / "probe.jsonl", conversations(40)[-12:])
    bpe.chat_template = MARKED
    data = founding(DataConfig(source="files", probe=str(path), sequence_length=64, packing="best_fit"), bpe)
    assert data.probe == path.read_text()
    ours, theirs = probe_windows(data, bpe, 3), probe_windows(data, confined(), 3)
    assert torch.equal(ours, theirs) and ours.shape == (3, 65) and len(probe_file(data, bpe).ends_D) == 12
    assert probe_windows(DataConfig(), bpe, 3) is None
    bpe.chat_template = None


@pytest.mark.parametrize("setting", ["chat_template", "probe"])
def test_a_manifests_template_and_probe_are_short(setting):
    with pytest.raises(ValidationError, match="at most"):
        DataConfig.model_validate({setting: "{" + "x" * 2**15})


def test_prompts_are_held_out_first_turns(bpe, chats, confined):
    data = data_of(chats)
    prompts = held_out_prompts(data, confined(), [chats], 3)
    assert len(prompts) == 3
    for prompt in prompts:
        text = bpe.decode(prompt.ids)
        assert text.startswith("<|im_start|>user") and text.endswith("<|im_start|>assistant\n")
        assert prompt.truth.startswith("Well, dear friend") and prompt.end_of_text == bpe.eos_token_id


def test_rows_and_shards_are_told_apart(chats, tmp_path):
    assert conversation_files([chats]) == conversation_files([chats.parent]) == [chats]
    assert conversation_files([tmp_path / "*.jsonl"]) == [chats]
    for hidden in (".cache/huggingface/download/chats.jsonl.metadata", ".ipynb_checkpoints/chats-checkpoint.jsonl"):
        (chats.parent / hidden).parent.mkdir(parents=True)
        (chats.parent / hidden).write_text("{}")
    assert conversation_files([chats.parent]) == [chats], "what the hub's client and notebooks leave there is not read"
    assert conversation_files([tmp_path / "shards.npy"]) is None and conversation_files([]) is None
    (tmp_path / "000000.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"chats.jsonl with conversations and .*000000.npy"):
        conversation_files([tmp_path])


def test_a_tokenizer_can_be_trained_on_conversations(chats, tmp_path):
    data = DataConfig(source="files", paths=[chats], vocab_size=300)
    tokenizer = resolve_tokenizer(data, (), tmp_path / "cache")
    assert len(tokenizer) == 300 and "friend" in tokenizer.decode(tokenizer("dear friend")["input_ids"])
