"""The tokenizer: training, caching, and untrusted payloads."""

import copy
import json
import multiprocessing
import random
import subprocess
import sys
from pathlib import Path

import pytest

from spes_p2p.config import DataConfig
from spes_p2p.data import tokenizer as module
from spes_p2p.data.confined_tokenizer import ConfinedTokenizer
from spes_p2p.data.tokenizer import (
    END_OF_TEXT,
    load_tokenizer,
    resolve_tokenizer,
    text_encoder,
    tokenizer_bytes,
    tokenizer_digest,
    train_bpe,
)
from spes_p2p.data.tokenizer_document import MAX_PAYLOAD_BYTES, open_document
from spes_p2p.errors import ConfigError, DataError

from .conftest import sentences


def test_the_tokenizer_beside_shards_serves_for_other_text_by_its_file_or_folder(tmp_path):
    tokenizer = train_bpe(sentences(random.Random(3), 40), 320)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_bytes(tokenizer))
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        assert tokenizer_digest(load_tokenizer(place)) == tokenizer_digest(tokenizer)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_bytes(tokenizer)[:-9])
    with pytest.raises(DataError, match="tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.full  # a process that imports; only another version of the tokenizers library can break it
def test_the_same_text_gives_the_same_tokenizer_in_another_process():
    texts = sentences(random.Random(3), 40)
    code = (
        "import json, sys\n"
        "from spes_p2p.data.tokenizer import tokenizer_digest, train_bpe\n"
        "print(tokenizer_digest(train_bpe(json.load(sys.stdin), 320)))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(texts), capture_output=True, text=True, check=True, timeout=120
    )
    assert other.stdout.strip() == tokenizer_digest(train_bpe(texts, 320))


def test_any_text_survives_encoding_and_decoding(tokenizer):
    text = " two  spaces\n\ttab, ünïcode, 漢字, 🙂, \x00 and code: def f(x): return x\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == tokenizer.bos_token == tokenizer.pad_token == END_OF_TEXT
    assert tokenizer.unk_token is None and len(tokenizer) == 300


def test_bad_training_input_is_refused():
    with pytest.raises(ConfigError, match="vocab_size=256"):
        train_bpe(["text"], 256)
    with pytest.raises(DataError, match="no training text"):
        train_bpe([], 300)


def test_payload_round_trip_keeps_tokenizer_and_bytes(tokenizer, tmp_path):
    payload = tokenizer_bytes(tokenizer)
    received = ConfinedTokenizer(payload, tmp_path / "received", len(tokenizer))
    text = "the peer's delta <|endoftext|> 漢字"
    ids = tokenizer(text, split_special_tokens=True)["input_ids"]
    assert received.encode([text]).tolist() == [*ids, tokenizer.eos_token_id]
    assert received.digest == tokenizer_digest(tokenizer)
    assert tokenizer_bytes(load_tokenizer(tmp_path / "received")) == payload
    assert received.eos_token_id == tokenizer.eos_token_id and len(received) == len(tokenizer)
    received.save_pretrained(tmp_path / "exported")
    assert tokenizer_bytes(load_tokenizer(tmp_path / "exported")) == payload


def test_a_padded_call_changes_neither_the_payload_nor_what_text_becomes(tokenizer):
    own, texts = copy.deepcopy(tokenizer), ["the peer holds a slot, and trains it", "a"]
    own(texts, padding=True, truncation=True, max_length=4)
    assert tokenizer_bytes(own) == tokenizer_bytes(tokenizer)
    assert text_encoder(own).documents(texts) == text_encoder(tokenizer).documents(texts)


def altered(tokenizer, **files) -> bytes:
    return json.dumps({**json.loads(tokenizer_bytes(tokenizer)), **files}).encode()


HOSTILE = {
    "too large": (lambda t: b" " * (MAX_PAYLOAD_BYTES + 1), "at most"),
    "not JSON": (lambda t: b"\x80\x04K\x01.", "not JSON"),
    "not UTF-8": (lambda t: b"\xff\xfe", "not JSON"),
    "too deep": (lambda t: b"[" * 1_000_000, "not JSON"),
    "no object": (lambda t: b"[1]", "not a JSON object"),
    "empty": (lambda t: b"{}", "holds"),
    "path escape": (lambda t: altered(t, **{"../../evil.json": "x"}), "holds"),
    "absolute path": (lambda t: altered(t, **{"/tmp/evil.json": "x"}), "holds"),
    "extra file": (lambda t: altered(t, **{"tokenizer_config.json": '{"auto_map": {}}'}), "holds"),
    "no text": (lambda t: altered(t, **{"tokenizer.json": {}}), "holds"),
    "inner not JSON": (lambda t: altered(t, **{"tokenizer.json": "{"}), "not JSON"),
    "inner too deep": (lambda t: altered(t, **{"tokenizer.json": "[" * 1_000_000}), "not JSON"),
    "no tokenizer": (lambda t: altered(t, **{"tokenizer.json": "{}"}), "no vocabulary"),
    "no version": (lambda t: with_backend(t, version=None), "version is not allowed"),
    "small hole": (lambda t: with_vocabulary(t, lambda vocab: {**vocab, "zz": 301}), "without holes"),
    "no special tokens": (lambda t: altered(t, **{"special_tokens.json": "{}"}), "no end-of-text"),
    "unknown special": (
        lambda t: altered(t, **{"special_tokens.json": '{"chat_template": "x"}'}),
        "unexpected special",
    ),
    "special no text": (lambda t: altered(t, **{"special_tokens.json": '{"eos_token": 3}'}), "unexpected special"),
    "special absent": (lambda t: altered(t, **{"special_tokens.json": '{"eos_token": "<eos>"}'}), "lacks its special"),
    "special surrogate": (
        lambda t: altered(t, **{"special_tokens.json": '{"eos_token": "\\ud800"}'}),
        "no working tokenizer",
    ),
    "begins beyond its entries": (
        lambda t: with_backend(
            t,
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "b", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"b": {"id": "b", "ids": [300], "tokens": ["b"]}},
            },
        ),
        "ids up to 300",
    ),
    "holes in the ids": (
        lambda t: with_vocabulary(t, lambda vocab: {**vocab, "zz": 2**31}),
        "ids outside its 302 entries",
    ),
    "merge of strangers": (
        lambda t: with_backend(t, model={"type": "BPE", "vocab": {"<|endoftext|>": 0}, "merges": [["a", "b"]]}),
        "no working tokenizer",
    ),
    "negative id": (lambda t: with_vocabulary(t, lambda vocab: {**vocab, "zz": -1}), "ids outside"),
}


def with_backend(tokenizer, **parts) -> bytes:
    backend = json.loads(json.loads(tokenizer_bytes(tokenizer))["tokenizer.json"])
    return altered(tokenizer, **{"tokenizer.json": json.dumps({**backend, **parts})})


def with_vocabulary(tokenizer, change) -> bytes:
    model = json.loads(json.loads(tokenizer_bytes(tokenizer))["tokenizer.json"])["model"]
    return with_backend(tokenizer, model={**model, "vocab": change(model["vocab"])})


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_payload_is_refused_and_writes_nothing(tokenizer, tmp_path, case):
    make, message = HOSTILE[case]
    with pytest.raises(DataError, match=message) as caught:
        ConfinedTokenizer(make(tokenizer), tmp_path / "received", 2**24)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500 and list(tmp_path.iterdir()) == []


def test_a_payload_with_one_flipped_byte_is_refused_or_works(tokenizer, tmp_path, seed):
    payload, generator = tokenizer_bytes(tokenizer), random.Random(seed)
    for _ in range(60):
        damaged = bytearray(payload)
        damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        try:
            received = open_document(bytes(damaged), "the tokenizer received").backend
        except DataError:
            continue
        assert max(received.encode("the peer and its slot").ids) < received.get_vocab_size()


def test_an_unwritable_directory_is_a_configuration_error(tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        ConfinedTokenizer(tokenizer_bytes(tokenizer), tmp_path / "file" / "below", len(tokenizer))


def test_a_named_tokenizer_is_loaded_and_an_absent_one_is_named(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "mine")
    data = DataConfig(tokenizer=str(tmp_path / "mine"))
    assert tokenizer_digest(resolve_tokenizer(data, (), tmp_path)) == tokenizer_digest(tokenizer)
    for absent in (str(tmp_path / "absent"), "nobody/nothing"):
        with pytest.raises(DataError, match=r"cannot load tokenizer .*; name a folder"):
            load_tokenizer(absent)


def test_a_tokenizer_without_end_of_text_is_refused(tokenizer, tmp_path):
    payload = json.loads(json.loads(tokenizer_bytes(tokenizer))["tokenizer.json"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(payload))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(DataError, match="no end-of-text token"):
        load_tokenizer(tmp_path)


def test_a_trained_tokenizer_is_kept_and_follows_the_settings(corpus, tmp_path, monkeypatch):
    data = DataConfig(source="files", vocab_size=300)
    first = resolve_tokenizer(data, [corpus], tmp_path / "cache")
    monkeypatch.setattr(module, "train_bpe", lambda *args: pytest.fail("trained again"))
    again = resolve_tokenizer(data, [corpus], tmp_path / "cache")
    assert tokenizer_bytes(first) == tokenizer_bytes(again)
    with pytest.raises(pytest.fail.Exception):
        resolve_tokenizer(data.model_copy(update={"vocab_size": 301}), [corpus], tmp_path / "cache")


def test_the_tokenizer_never_sees_held_out_text(tmp_path, corpus, monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr(module, "train_bpe", lambda texts, size: seen.extend(texts) or train_bpe(seen, size))
    data = DataConfig(source="files", vocab_size=300, held_out_fraction=0.3)
    resolve_tokenizer(data, [corpus], tmp_path / "cache")
    assert seen and not [text for text in seen if module.split_documents and is_held_out_text(text, data)]


def is_held_out_text(text: str, data: DataConfig) -> bool:
    from spes_p2p.data.sources import is_held_out

    return is_held_out("", text, data.held_out_fraction)


def test_the_sample_is_spread_over_a_large_corpus(corpus, monkeypatch):
    monkeypatch.setattr(module, "SAMPLE_CHARACTERS", corpus.stat().st_size // 4)
    numbers = [int(text.split(".")[0].split()[1]) for text in module._sample(DataConfig(source="files"), [corpus])]
    assert 20 <= len(numbers) <= 40 and numbers[0] < 10 and numbers[-1] > 100


def _resolve(corpus: Path, cache: Path, queue) -> None:
    data = DataConfig(source="files", vocab_size=300)
    queue.put(tokenizer_digest(resolve_tokenizer(data, [corpus], cache)))


def test_two_processes_at_once_train_one_tokenizer(corpus, tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_resolve, args=(corpus, tmp_path / "cache", queue)) for _ in range(2)]
    for process in processes:
        process.start()
    digests = {queue.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(60)
    assert len(digests) == 1 and len(list((tmp_path / "cache" / "tokenizers").glob("*.json"))) == 1
    assert not list((tmp_path / "cache" / "tokenizers").glob(".*json.*"))
