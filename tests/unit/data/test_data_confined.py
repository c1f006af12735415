"""Tokenizers that strangers have built to harm: refused by the part's name, or ended in their own process."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from spes_p2p.data import tokenizer_child as child
from spes_p2p.data.confined_tokenizer import ConfinedTokenizer
from spes_p2p.data.packing import encode
from spes_p2p.data.tokenizer import text_encoder, tokenizer_bytes
from spes_p2p.data.tokenizer_document import _PATTERNS, MAX_DEPTH, MAX_PAYLOAD_BYTES, check_parts, open_document
from spes_p2p.errors import DataError

END = "<|endoftext|>"


@pytest.fixture(scope="module")
def sound(tokenizer):
    return json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}


def payload_of(backend) -> bytes:
    files = {"special_tokens.json": json.dumps({"eos_token": END}), "tokenizer.json": json.dumps(backend)}
    return json.dumps(files).encode()


def replace_(old, new):
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def in_sequence(*parts, name="normalizers"):
    return {"type": "Sequence", name: list(parts)}


def nested(depth, name="normalizers", inner=None):
    part = inner or {"type": "NFC"}
    for _ in range(depth):
        part = in_sequence(part, name=name)
    return part


def added(content, **changes):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": 0, "content": content, **flags, **changes}


def spaces(*characters):
    """Parts that each put a space of their own before every piece."""
    settings = {"type": "Metaspace", "prepend_scheme": "always", "split": True}
    return in_sequence(*[settings | {"replacement": character} for character in characters], name="pretokenizers")


def split_at(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
PIECE = {"Sequence": {"id": "A", "type_id": 0}}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
WORDS = {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "vocab": {END: 0, "a": 1}}
# What is put into a sound tokenizer.json, and what the refusal names.
HOSTILE = {
    "one letter becomes 10^12": ({"normalizer": in_sequence(*[replace_("a", "a" * 10)] * 12)}, "1e.12 characters"),
    "one letter becomes many in two steps": (
        {"normalizer": in_sequence(replace_("a", "bbb"), replace_("b", "cc"))},
        "make up to 6",
    ),
    "a letter is replaced by a book": ({"normalizer": replace_("a", "a" * 100_000)}, "normalizer.*at most 64"),
    "nothing is replaced": ({"normalizer": replace_("", "a")}, "normalizer"),
    "a long prefix": ({"normalizer": {"type": "Prepend", "prepend": "x" * 1000}}, "normalizer.Prepend.prepend"),
    "many prefixes": ({"normalizer": in_sequence(*[{"type": "Prepend", "prepend": "▁"}] * 8)}, "make up to 256"),
    "bytes of bytes of bytes": ({"normalizer": in_sequence(*[{"type": "ByteLevel"}] * 8)}, "repeats a part"),
    "forms of forms": ({"normalizer": in_sequence(*[{"type": "NFKD"}, replace_("a", "ﷺ")] * 3)}, "repeats a part"),
    "a map of characters": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "Precompiled"),
    "a catastrophic split": ({"pre_tokenizer": split_at(r"(a+)+$")}, r"regular expression.*\(a\+\)\+\$"),
    "a catastrophic replacement": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "(.*)*x"}, "content": ""}},
        "regular expression",
    ),
    "a long expression": ({"pre_tokenizer": split_at("a?" * 10_000 + "a" * 10_000)}, "regular expression"),
    "an unknown split": ({"pre_tokenizer": {"type": "FixedLength", "length": 1}}, "FixedLength"),
    "many splits": (
        {"pre_tokenizer": in_sequence(*[{"type": "Whitespace"}] * 10_000, name="pretokenizers")},
        "more than 32 parts",
    ),
    "spaces before spaces": ({"pre_tokenizer": spaces(*"abcd")}, "make up to 16"),
    "deep normalizers": ({"normalizer": nested(5)}, "normalizer is nested more than 4"),
    "very deep normalizers": ({"normalizer": nested(200)}, "normalizer is nested|not JSON"),
    "deep decoders": ({"decoder": nested(5, "decoders", {"type": "Fuse"})}, "decoder is nested"),
    "a decoder that grows": (
        {"decoder": in_sequence(*[replace_("a", "aaaa")] * 5, name="decoders")},
        "make up to 1.02e.03",
    ),
    "a text many times": ({"post_processor": {**TEMPLATE, "single": [PIECE] * 8}}, "repeats a text"),
    "a long template": ({"post_processor": {**TEMPLATE, "single": [PIECE] * 9}}, "post_processor"),
    "a huge added token": ({"added_tokens": [added("x" * 10**6)]}, "added_tokens.0.content"),
    "an empty added token": ({"added_tokens": [added("")]}, "added_tokens.0.content"),
    "many long added tokens": ({"added_tokens": [added(f"{i:0256}") for i in range(1100)]}, "added tokens have more"),
    "an unknown setting": ({"normalizer": {"type": "Lowercase", "script": "x"}}, "normalizer.Lowercase.script"),
    "an unknown field": ({"plugin": "x"}, "plugin"),
    "random merges": ({"model": {"type": "BPE", "dropout": 0.5, "vocab": {END: 0}, "merges": []}}, "model.BPE.dropout"),
    "another model": ({"model": {"type": "Unigram", "vocab": [[END, 0.0]], "unk_id": 0}}, "Unigram"),
    "words without end": ({"model": WORDS | {"max_input_chars_per_word": 10**9}}, "max_input_chars_per_word"),
    "long words": ({"model": {"type": "BPE", "vocab": {END: 0, "x" * 5000: 1}, "merges": []}}, "model.BPE.vocab"),
    "a list of padding": ({"padding": {"strategy": {"Fixed": 10**9}, "direction": "Right"}}, "padding"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_part_that_no_known_tokenizer_needs_is_refused_by_its_name(sound, case):
    """In this process: nothing of it reaches the library, so it can harm none."""
    parts, says = HOSTILE[case]
    began = time.process_time()
    with pytest.raises(DataError, match=says) as caught:
        open_document(payload_of(sound | parts), "the tokenizer")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600 and time.process_time() - began < 20


def test_a_larger_vocabulary_than_the_models_is_refused(tokenizer, tmp_path):
    payload = tokenizer_bytes(tokenizer)
    with pytest.raises(DataError, match=f"has {len(tokenizer)} entries, the run's model {len(tokenizer) - 1}"):
        ConfinedTokenizer(payload, tmp_path / "received", len(tokenizer) - 1)
    assert not (tmp_path / "received").exists()


@pytest.mark.full  # the same limit as above, by a text that takes seconds to write
def test_sixty_megabytes_of_brackets_end_no_process_but_the_tokenizers(tokenizer, tmp_path):
    text = '{"model": [' + "[]," * (MAX_PAYLOAD_BYTES // 3 - 100) + "[]]}"
    payload = json.dumps({"special_tokens.json": "{}", "tokenizer.json": text}).encode()
    assert 60e6 < len(payload) <= MAX_PAYLOAD_BYTES
    with pytest.raises(DataError):
        ConfinedTokenizer(payload, tmp_path / "received", 300)


def confined(backend, tmp_path):
    return ConfinedTokenizer(payload_of(backend), tmp_path / "received", 2**24)


def test_the_childs_memory_time_and_files_are_limited(sound, tmp_path):
    tokenizer = confined(sound, tmp_path)
    process = psutil.Process(tokenizer._child.pid)
    (soft, _), (seconds, _) = process.rlimit(psutil.RLIMIT_DATA), process.rlimit(psutil.RLIMIT_CPU)
    assert 0 < soft < 4 * 2**30 and 0 < seconds < 3600
    assert process.rlimit(psutil.RLIMIT_CORE) == process.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)


@pytest.mark.parametrize(
    "limit, says", [("memory", "SIGABRT, too much memory|exit code"), ("time", "SIGXCPU, too much time")]
)
def test_what_exceeds_a_limit_is_an_error_with_a_name_and_the_next_text_is_read(sound, tmp_path, limit, says):
    grow, burn = "text = bytearray(2**33)", "while True: pass"
    code = f"""
from spes_p2p.data import tokenizer_child as child
child.BASE_SECONDS = 2.0
class Hostile:
    def __init__(self, backend): self.backend = backend
    def __getattr__(self, name): return getattr(self.backend, name)
    def encode_batch_fast(self, texts, add_special_tokens):
        if "bomb" in texts[0]:
            {grow if limit == "memory" else burn}
        return self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
opened = child.open_document
def open_document(*args):
    document = opened(*args)
    return document._replace(backend=Hostile(document.backend))
child.open_document = open_document
child.main()
"""
    script = tmp_path / "hostile_child.py"
    script.write_text(code)
    tokenizer = confined(sound, tmp_path)
    tokenizer.close()
    tokenizer._command = [sys.executable, str(script)]
    assert len(tokenizer.encode(["a text"])) > 1
    with pytest.raises(DataError, match=f"the run's tokenizer ended its process .*({says})"):
        tokenizer.encode(["a bomb"])
    assert len(tokenizer.encode(["a text"])) > 1


def test_more_ids_than_the_text_can_have_are_not_read(sound, tmp_path, monkeypatch):
    tokenizer = confined(sound, tmp_path)
    monkeypatch.setattr(tokenizer, "_most_ids", lambda lengths: 1)
    with pytest.raises(DataError, match="makes 2 ids of 1 bytes"):
        tokenizer.encode(["a"])


def test_a_decoded_text_is_the_tokenizers_own_and_no_longer_than_64_kib(tokenizer, sound, tmp_path, monkeypatch):
    received = confined(sound, tmp_path)
    ids = tokenizer("def names(module):\n    return 漢字")["input_ids"]
    assert received.decode(ids) == tokenizer.decode(ids)
    received.close()
    assert len(received.decode(ids * 20_000).encode()) <= child.MAX_DECODED_BYTES + 2
    assert received.encode(["a text"]).tolist()[:-1] == tokenizer("a text")["input_ids"], "and texts as before"
    monkeypatch.setattr(child, "MAX_DECODED_BYTES", 3)
    with pytest.raises(DataError, match="bytes of text"):
        received.decode(ids)


def test_a_child_that_is_killed_is_an_error_with_a_name(sound, tmp_path):
    tokenizer = confined(sound, tmp_path)
    os.kill(tokenizer._child.pid, signal.SIGKILL)
    with pytest.raises(DataError, match=r"ended its process .*SIGKILL"):
        tokenizer.encode(["a text"])


def test_the_child_has_no_secrets_and_no_torch(sound, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("SPES_INVITE", "secret")
    tokenizer = confined(sound, tmp_path)
    process = psutil.Process(tokenizer._child.pid)
    assert not {"HF_TOKEN", "SPES_INVITE", "HOME"} & set(process.environ())
    assert not [region.path for region in process.memory_maps() if "torch" in region.path]
    tokenizer.close()
    assert not psutil.pid_exists(process.pid)


def test_the_child_ends_with_its_tokenizer(sound, tmp_path):
    tokenizer = confined(sound, tmp_path)
    pid = tokenizer._child.pid
    del tokenizer
    assert not psutil.pid_exists(pid)


def test_both_processes_give_the_same_ids(tokenizer, tmp_path, seed):
    received = ConfinedTokenizer(tokenizer_bytes(tokenizer), tmp_path / "received", len(tokenizer))
    texts = ["", "the peer's slot", f"a {END} b", "漢字 🙂 \x00", "x" * 70_000, "  \n\n " * 500]
    ours = [ids.tolist() for ids in encode(text_encoder(tokenizer), texts)]
    assert [ids.tolist() for ids in encode(received, texts)] == ours
    assert ours[0].count(tokenizer.eos_token_id) == len(texts)


def model_of(**settings) -> Tokenizer:
    vocabulary = {END: 0, "a": 1, "b": 2, "▁": 3, "[UNK]": 4}
    return Tokenizer(settings.pop("model", models.BPE(vocabulary, [], unk_token="[UNK]", byte_fallback=True)))


def known(name) -> Tokenizer:
    """A small tokenizer of the parts that a known one has."""
    tokenizer = model_of()
    isolated = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS]
    if name == "Llama 2":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        pieces = [("<s>", 1)]
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", pieces)
    elif name == "Mistral":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Metaspace("▁", prepend_scheme="first", split=False)
    elif name == "Gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif name == "BERT":
        tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, END: 2}, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.post_processor = processors.BertProcessing(("[UNK]", 0), ("a", 1))
        tokenizer.decoder = decoders.WordPiece()
    elif name == "RoBERTa":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.post_processor = processors.RobertaProcessing(("a", 1), ("b", 2))
    else:
        split = isolated[int(name.removeprefix("pattern "))]
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), split, pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize(
    "name", ["Llama 2", "Mistral", "Gemma", "BERT", "RoBERTa", *(f"pattern {i}" for i in range(len(_PATTERNS)))]
)
def test_the_parts_of_known_tokenizers_are_taken(name):
    check_parts(json.loads(known(name).to_str()))


@pytest.mark.parametrize("pattern", _PATTERNS)
def test_a_known_pattern_takes_linear_time(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    for character in "aA1 \n\t!'é漢\u0301":
        for text in (character * 20_000, (character * 50 + "x1\n") * 400):
            began = time.process_time()
            split.pre_tokenize_str(text)
            assert time.process_time() - began < 5  # quadratic time takes minutes


def test_depth_and_number_of_parts_are_counted_from_the_outside():
    for depth in range(1, MAX_DEPTH + 3):
        parts = {"normalizer": nested(depth)}
        with pytest.raises(ValueError, match="nested more" if depth >= MAX_DEPTH else "version"):
            check_parts(parts)
    assert child.BASE_BYTES >= 2**30


def test_limits_stay_below_those_that_the_machine_has_set_for_good():
    program = """
import resource
from spes_p2p.data import tokenizer_child
resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))
for seconds in (60.0, 5000.0):
    tokenizer_child._limit(0, 0, seconds)
    print(*resource.getrlimit(resource.RLIMIT_CPU))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    lines = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [hard for _, hard in lines] == [1000, 1000], done.stderr  # which only root could raise
    assert 60 <= lines[0][0] < 100 and lines[1][0] == 1000
