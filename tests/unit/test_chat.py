"""`spes chat`: what it prints is what transformers itself draws of the same model."""

import io
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_folders import PeerFolder
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, OlmoeConfig, OlmoeForCausalLM

from spes_p2p.commands import chat
from spes_p2p.commands.early import refuse
from spes_p2p.config.commands import ChatConfig
from spes_p2p.data.tokenizer import train_bpe
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.model.sampling import SMALL, sampled_continuation
from spes_p2p.monitor.model_folder import export
from spes_p2p.swarm.p2p.identity import Identity

TEMPLATE = (
    "{% if messages[-1].content == 'bad' %}{{ raise_exception('no bad\nwords') }}{% endif %}"
    "{% for message in messages %}{{ message.role }} {{ message.content }}\n{% endfor %}assistant "
)
POSITIONS = 64


@pytest.fixture(scope="module", params=["completion", "chat"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    words = ["peer", "slot", "round", "swarm", "user", "assistant"]
    tokenizer = train_bpe([" ".join(random.Random(i).choices(words, k=40)) for i in range(20)], 280)
    if request.param == "chat":
        tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    shape = OlmoeConfig(
        **{"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2},
        **{"max_position_embeddings": POSITIONS, "initializer_range": 0.5, "eos_token_id": 0, "bos_token_id": 0},
    )
    OlmoeForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def stock_answer(folder: Path, *messages: str, most: int = 12) -> tuple[str, str]:
    """Return prompt and answer as transformers draws them from a user's and a model's messages in turn, greedily."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = messages[-1]
    if tokenizer.chat_template:
        turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt")
    options = {"repetition_penalty": SMALL["repetition_penalty"], "pad_token_id": 0, "do_sample": False}
    drawn = model.generate(**ids, **options, max_new_tokens=most)[0, ids["input_ids"].shape[1] :]
    return ("" if tokenizer.chat_template else prompt), tokenizer.decode(drawn, skip_special_tokens=True)


def shown(text: str) -> str:
    text = text.replace("\t", "    ")
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


@pytest.mark.parametrize("checkpoint", ["completion"], indirect=True)
def test_one_prompt_is_answered_as_transformers_does(checkpoint):
    words = ["--prompt", "peer slot", "--temperature", "0", "--max-tokens", "12"]
    command = [sys.executable, "-m", "spes_p2p", "chat", str(checkpoint), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    expected = "".join(stock_answer(checkpoint, "peer slot"))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, shown(expected) + "\n", "")


def test_of_a_talk_the_model_reads_all_with_a_template_and_the_last_text_without(checkpoint, monkeypatch, capsys):
    first = stock_answer(checkpoint, "peer slot")
    second = stock_answer(checkpoint, "peer slot", first[1], "round")
    monkeypatch.setattr(sys, "stdin", io.StringIO("peer slot\n\nround\n"))
    assert chat.main(ChatConfig(source=str(checkpoint), temperature=0, max_tokens=12)) == 0
    assert capsys.readouterr().out == shown("".join([*first, "\n", *second, "\n"]))


def test_a_talk_longer_than_the_model_reads_goes_on(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("peer slot\n" * 6 + "swarm " * POSITIONS + "\n"))
    assert chat.main(ChatConfig(source=str(checkpoint), temperature=0)) == 0
    assert len(capsys.readouterr().out) > POSITIONS


def test_an_interrupt_ends_the_answer_alone(checkpoint, monkeypatch):
    say, said = chat.say, []

    def interrupted(text: str, end: str) -> None:
        said.append(end)
        say(text, end)
        if len(said) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat, "say", interrupted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("peer\nround\n"))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # another test's may end the process
    try:
        assert chat.main(ChatConfig(source=str(checkpoint), temperature=0, max_tokens=40)) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    first, second = (number for number, end in enumerate(said) if end)
    assert first == 2 and second > 35, "pieces of text, up to the end of an answer"


@pytest.mark.parametrize("checkpoint", ["chat"], indirect=True)
def test_a_failing_template_is_named_in_one_line(checkpoint):
    with pytest.raises(DataError, match="the model's chat template fails: no bad words; "):
        chat.main(ChatConfig(source=str(checkpoint), prompt="bad"))


def test_a_peers_folder_is_exported_first(tmp_path, capsys):
    peer = PeerFolder(tmp_path / "peer", Identity(tmp_path / "identity.key"))
    peer.save(1)
    export(peer.folder, tmp_path / "model")
    assert chat.main(ChatConfig(source=str(peer.folder), prompt="7 plus", temperature=0, max_tokens=3)) == 0
    assert capsys.readouterr().out == shown("".join(stock_answer(tmp_path / "model", "7 plus", most=3))) + "\n"


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("absent", DataError, r"absent is no checkpoint \(no config.json\); name the folder of a model or of a peer"),
        ("spes:run.abc", ConfigError, "link"),
    ],
)
def test_a_place_without_a_model_is_refused_at_once(source, error, message):
    with pytest.raises(error, match=message):
        refuse(ChatConfig(source=source))


def small_model() -> OlmoeForCausalLM:
    shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}
    return OlmoeForCausalLM(OlmoeConfig(**shape, eos_token_id=None, initializer_range=0.3))


@pytest.mark.parametrize("own", [{}, {"temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.05}])
@pytest.mark.parametrize("chosen", [{}, {"temperature": 2.0}, {"repetition_penalty": 1.5}, {"temperature": 0}])
def test_a_models_own_settings_count_where_none_is_chosen(seed, own, chosen):
    torch.manual_seed(seed)
    model, prompt_T = small_model(), torch.randint(1, 50, (7,))
    model.generation_config = GenerationConfig(**own)
    options = (own or SMALL) | chosen
    options |= {"do_sample": True} if options["temperature"] else {"do_sample": False, "temperature": None}
    texts = []
    for _ in range(2):
        torch.manual_seed(seed)
        texts.append(sampled_continuation(model.train(), prompt_T, max_new_tokens=9, **chosen))
    assert texts[0] == texts[1] and not model.training
    torch.manual_seed(seed)
    model.generation_config = GenerationConfig()
    stock = model.generate(prompt_T[None], pad_token_id=0, max_new_tokens=9, **options)[0, 7:].tolist()
    assert texts[0] == stock


def test_a_text_ends_with_its_last_token_or_in_time(seed):
    torch.manual_seed(seed)
    model, prompt_T = small_model(), torch.randint(1, 50, (7,))
    drawn = sampled_continuation(model, prompt_T, temperature=0, max_new_tokens=9)
    ended = sampled_continuation(model, prompt_T, temperature=0, max_new_tokens=9, ends={drawn[4]})
    assert ended == drawn[: drawn.index(drawn[4]) + 1]
    assert len(sampled_continuation(model, prompt_T, max_new_tokens=9, max_time=0.0)) == 1
