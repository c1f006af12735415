"""Small tokenizers of several families, built as the released ones are, and their chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXT = (
    "The peer trains a slot of the model, and the user asks: what is a round? system assistant user tool im start end "
    "header id eot bos eos think turn of begin text role 0 1 2 3 [ ] < > | / { } ; def f(x): return x + 1\n\n  indented"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TURN = (
    "{% for message in messages %}HEAD{% if message.role == 'assistant' %}{% generation %}BODY{% endgeneration %}"
    "{% else %}BODY{% endif %}{% endfor %}{% if add_generation_prompt %}PROMPT{% endif %}"
)


def template(head: str, body: str, prompt: str, begin: str = "") -> str:
    return begin + TURN.replace("HEAD", head).replace("BODY", body).replace("PROMPT", prompt)


CHATML = template(
    "{{ '<|im_start|>' + message.role + '\n' }}",
    "{{ message.content + '<|im_end|>\n' }}",
    "{{ '<|im_start|>assistant\n' }}",
)
LLAMA2 = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ bos_token + '[INST] ' + message.content }}"
    "{{ ' [/INST]' }}{% elif message.role == 'system' %}{{ '<<SYS>>\n' + message.content + '\n<</SYS>>\n\n' }}"
    "{% else %}{% generation %}{{ ' ' + message.content | trim + ' ' + eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
)
GEMMA = template(
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}",
    "{{ message.content | trim + '<end_of_turn>\n' }}",
    "{{ '<start_of_turn>model\n' }}",
    "{{ bos_token }}",
)
LLAMA3_CHAT = template(
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}",
    "{{ message.content | trim + '<|eot_id|>' }}",
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
    "{{ bos_token }}",
)
PHI = template(
    "{{ '<|' + message.role + '|>\n' }}", "{{ message.content + '<|end|>\n' }}", "{{ '<|' + 'assistant' + '|>\n' }}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'assistant' %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<｜Assistant｜>' }}{% generation %}{{ content + eos_token }}{% endgeneration %}"
    "{% else %}{{ '<｜User｜>' + content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)


def _byte_level(size: int = 420, *, ignore_merges: bool = False) -> Tokenizer:
    bpe = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        [TEXT] * 3, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    return bpe


def _sentencepiece(specials: Sequence[str]) -> Tokenizer:
    """A BPE as converted from SentencePiece: special tokens and bytes first, and no spaces but `▁`."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Metaspace()
    bpe.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    trained = json.loads(bpe.to_str())["model"]
    words = [
        *specials,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *sorted(trained["vocab"], key=trained["vocab"].get),
    ]
    made = models.BPE(
        {word: number for number, word in enumerate(words)},
        [tuple(merge) for merge in trained["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    bpe = Tokenizer(made)
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return bpe


def _finish(
    backend: Tokenizer,
    special: Sequence[str | AddedToken],
    roles: Mapping[str, str],
    chat: str | None,
    *,
    plain: Sequence[AddedToken | str] = (),
    single: str | None = None,
) -> PreTrainedTokenizerFast:
    backend.add_special_tokens(list(special))
    backend.add_tokens(list(plain))
    if single:
        named = [word for word in single.split() if word != "$A"]
        ids = [(word, backend.token_to_id(word)) for word in named]
        begin = processors.TemplateProcessing(single=single, special_tokens=ids)
        byte_level = isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel)
        backend.post_processor = processors.Sequence([processors.ByteLevel(), begin]) if byte_level else begin
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, chat_template=chat, **roles
    )


def qwen() -> PreTrainedTokenizerFast:
    """Byte-level BPE with ChatML; a pad token in place of a BOS, thoughts as plain tokens."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    roles = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return _finish(_byte_level(), special, roles, CHATML, plain=["<think>", "</think>"])  # which it never writes


def plain_chatml() -> PreTrainedTokenizerFast:
    """A base with BOS whose fine-tuner has added ChatML as plain tokens."""
    backend = _sentencepiece(["<unk>", "<s>", "</s>"])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    plain = [AddedToken(token, normalized=False) for token in ("<|im_start|>", "<|im_end|>")]
    roles = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    chat = "{{ bos_token }}" + CHATML.replace("<|im_end|>\n", "<|im_end|>")
    return _finish(backend, ["<unk>", "<s>", "</s>"], roles, chat, plain=plain, single="<s> $A")


def llama2() -> PreTrainedTokenizerFast:
    """SentencePiece with a prepended space in front of each piece of text."""
    backend = _sentencepiece(["<unk>", "<s>", "</s>"])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _finish(backend, ["<unk>", "<s>", "</s>"], roles, LLAMA2, single="<s> $A")


def mistral() -> PreTrainedTokenizerFast:
    """SentencePiece with a space in front of the first piece alone; [INST] is one token."""
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    backend = _sentencepiece(special)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _finish(backend, special, roles, LLAMA2, single="<s> $A")


def gemma() -> PreTrainedTokenizerFast:
    """SentencePiece without a prefix; runs of newlines and tags of HTML are plain added tokens."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    backend = _sentencepiece(special)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    plain = [AddedToken(token, normalized=False) for token in ("\n\n", "▁▁", "<table>", "<b>")]
    return _finish(backend, special, roles, GEMMA, plain=plain, single="<bos> $A")


def llama3() -> PreTrainedTokenizerFast:
    """Byte-level BPE that looks for whole words first, with headers."""
    backend = _byte_level(ignore_merges=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    roles = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    return _finish(backend, special, roles, LLAMA3_CHAT, single="<|begin_of_text|> $A")


def phi() -> PreTrainedTokenizerFast:
    """Markers that the template builds around a role's name; they take the spaces behind them."""
    markers = ["<|user|>", "<|assistant|>", "<|system|>"]
    plain = [AddedToken(token, rstrip=True, normalized=False) for token in markers]
    special = ["<|endoftext|>", AddedToken("<|end|>", rstrip=True, normalized=False)]
    return _finish(_byte_level(), special, {"eos_token": "<|end|>", "bos_token": "<|endoftext|>"}, PHI, plain=plain)


def deepseek() -> PreTrainedTokenizerFast:
    """Plain markers, and a template that drops the thoughts in a reply."""
    special = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
    plain = [AddedToken(token, normalized=False) for token in ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")]
    roles = {"bos_token": special[0], "eos_token": special[1]}
    return _finish(_byte_level(), special, roles, DEEPSEEK, plain=plain, single=f"{special[0]} $A")


def gpt2() -> PreTrainedTokenizerFast:
    """A bos_token that its own encoding does not use."""
    roles = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    return _finish(_byte_level(), ["<|endoftext|>"], roles, None)


def opt() -> PreTrainedTokenizerFast:
    """One token in front of each document and behind it."""
    roles = {"bos_token": "</s>", "eos_token": "</s>"}
    return _finish(_byte_level(), ["</s>"], roles, None, single="</s> $A")


def bert() -> PreTrainedTokenizerFast:
    """WordPiece, which makes [SEP] of the text [SEP] if words are split at spaces alone."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *dict.fromkeys(TEXT.lower().split())]
    words += [letter for letter in map(chr, range(33, 127)) if letter not in words]
    words += [f"##{letter}" for letter in map(chr, range(33, 127))]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece()
    roles = {"eos_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    chat = template(
        "{{ '[CLS]' + message.role + ' ' }}", "{{ message.content + eos_token }}", "{{ '[CLS]assistant ' }}"
    )
    return _finish(backend, ["[PAD]", "[UNK]", "[CLS]", "[SEP]"], roles, chat, single="[CLS] $A [SEP]")


FAMILIES = {
    make.__name__: make for make in (qwen, plain_chatml, llama2, mistral, gemma, llama3, phi, deepseek, gpt2, opt, bert)
}
