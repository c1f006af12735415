"""`spes plan`: its table, and one line with exit code 2 where a plan does not fit."""

import re
from pathlib import Path

import pytest

from spes_p2p.cli import load_settings
from spes_p2p.commands.plan import PlanConfig, main, vocabulary
from spes_p2p.config import DataConfig
from spes_p2p.data.tokenizer import tokenizer_bytes, train_bpe
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.training import speed

ROOT = Path(__file__).resolve().parents[2]
SEVEN = ["--config", str(ROOT / "configs" / "spes_7b.yaml")]
LOCAL = ["--config", str(ROOT / "configs" / "local_experiment.yaml")]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Measure this machine for less than a second."""
    monkeypatch.setattr(speed, "MEASURE_SECONDS", 0.1)


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(load_settings(PlanConfig, flags)) == 0
    return capsys.readouterr().out


def row(text: str, name: str) -> list[float]:
    """The numbers of the line that starts so."""
    line = next(line for line in text.splitlines() if line.strip().startswith(name))
    return [float(word) for word in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", line.split(name, 1)[1])]


def test_says_what_a_peer_needs_by_part(capsys):
    text = planned(capsys, *SEVEN, "--slots", "1", "--storage", "nf4", "--device", "cuda", "--memory-gb", "48")
    assert "7.33 B parameters, 1.7 B active: 891 M shared, 32 slots of 201 M" in text
    assert "a peer with 1 of the slots trains 1.09 B (15%) by adamw, and holds 6.24 B frozen in nf4" in text
    assert row(text, "= static") == [20.99]
    parts = ("weights, shared", "weights, slots", "gradients", "optimizer state, adamw", "frozen experts, nf4")
    assert sum(row(text, part)[-1] for part in parts) == pytest.approx(20.99, abs=0.03)
    assert re.search(r"a GPU with 48 GB free can train \d+ of 32 slots at most", text)


def test_says_whether_it_fits_and_names_the_default_model_only_if_nothing_else_does(capsys):
    text = planned(capsys, *LOCAL, "--slots", "4", "--memory-gb", "24")
    assert f"fits: {row(text, '= training')[0]:.3g} of 24 GB\n" in text and "default model" not in text
    assert planned(capsys, "--slots", "4", "--memory-gb", "24").startswith("the default model")


def test_the_optimizer_and_the_storage_are_the_machines_to_choose(capsys):
    machine = ["--storage", "int8", "--inner-optimizer", "adamw8bit"]
    text = planned(capsys, *SEVEN, "--run.frozen-storage", "fp32", "--slots", "1", *machine)
    assert row(text, "optimizer state, adamw8bit") == [2.22] and row(text, "frozen experts, int8")[-1] == 6.44


def test_several_ranks_share_or_copy(capsys):
    flags = [*SEVEN, "--device", "cuda", "--ranks", "8"]
    ddp, fsdp = planned(capsys, *flags), planned(capsys, *flags, "--shard", "fsdp")
    assert "each of 8 ranks (fsdp)" in fsdp
    assert row(ddp, "gradients")[0] == pytest.approx(8 * row(fsdp, "gradients")[0], rel=0.01)
    assert row(ddp, "gathered for the other ranks")[0] == row(ddp, "gradients")[0]


def test_says_what_a_round_moves_and_how_long_it_takes_at_least(capsys):
    flags = [*SEVEN, "--slots", "8", "--peers", "4"]
    text = planned(capsys, *flags)
    assert "Mbit/s" not in text
    up, down = row(text, "= in all")
    assert up == down == pytest.approx(13.60)
    text = planned(capsys, *flags, "--uplink-mbit", "100", "--downlink-mbit", "1000")
    averaging, fetching = row(text, "averaging the shared parameters")[0], row(text, "fetching others'")[0]
    averaging += row(text, "replicating slots")[0]
    assert row(text, "averaging  ")[0] == pytest.approx(averaging * 80, rel=0.01)
    assert row(text, "fetching  ")[0] == pytest.approx(fetching * 80, rel=0.01)
    text = planned(capsys, *flags, "--uplink-mbit", "100", "--memory-gb", "500")
    assert re.search(r"training +unknown +--tokens-per-second", text)
    assert re.search(
        r"training +\d+ +\d+% of the round", planned(capsys, *flags, "--uplink-mbit", "9", "--tokens-per-second", "9")
    )


@pytest.mark.parametrize(
    "rounds",
    [
        ["--run.round.mode", "steps", "--run.round.steps", "3"],
        ["--run.round.mode", "tokens"],
        ["--run.round.mode", "tokens", "--run.round.samples", "100"],
    ],
)
def test_says_how_long_rounds_must_be_for_the_links(capsys, rounds):
    """With the flags that it names, the share of training is as it says."""
    link = ["--slots", "8", "--peers", "4", "--uplink-mbit", "200", "--tokens-per-second", "700", *rounds]
    text = planned(capsys, *SEVEN, *link)
    found = re.search(r"rounds that train 97% of their time +(--.+)", text)
    assert found is not None and int(re.findall(r"(\d+)% of the round", text)[0]) < 97
    again = planned(capsys, *SEVEN, *link, *found[1].split())
    assert re.findall(r"(\d+)% of the round", again) == ["97"] and "rounds that train" not in again
    slow = planned(capsys, *SEVEN, *link, "--uplink-mbit", "1")
    assert ("longer than the longest round" in slow) == ("steps" not in rounds)


def test_says_how_many_steps_a_peer_makes(capsys):
    link = ["--slots", "8", "--peers", "4", "--uplink-mbit", "400", "--tokens-per-second", "700"]
    link += ["--run.round.mode", "steps", "--run.round.steps", "50", "--run.train.batch-size", "8"]
    text = planned(capsys, *SEVEN, *link, "--run.round.total", "30", "--run.data.sequence-length", "1024")
    assert re.search(r"steps of a round +50   1500 in the run, of 8,192 tokens each", text)


def test_a_machines_own_uplink_is_the_plans(capsys, tmp_path):
    config = tmp_path / "slow.yaml"
    config.write_text("max_slots: 4\nuplink_mbit: 12.5\n")
    assert "time at 12.5 Mbit/s up and 12.5 down" in planned(capsys, "--config", str(config))
    assert "time at 9 Mbit/s up" in planned(capsys, "--config", str(config), "--uplink-mbit", "9")


def test_slots_that_nobody_holds_are_told_of(capsys):
    flags = [*SEVEN, "--slots", "7", "--peers"]
    assert "they hold 28 of 32 slots: no peer trains the others" in planned(capsys, *flags, "4")
    assert "they hold" not in planned(capsys, *flags, "5")


def test_a_phase_that_its_deadline_would_cut_short_is_marked(capsys):
    text = planned(capsys, *SEVEN, "--downlink-mbit", "3")
    assert "longer than round.averaging_seconds=1200" in text and "longer than round.exchange_seconds=3600" in text


def test_without_slots_it_plans_as_many_as_fit(capsys):
    text = planned(capsys, *LOCAL, "--memory-gb", "0.92")
    fitting = int(re.search(r"can train (\d+) of 16 slots at most", text)[1])  # type: ignore[index]
    assert 0 < fitting < 16 and f"a peer with {fitting} of the slots" in text
    planned(capsys, *LOCAL, "--memory-gb", "0.92", "--slots", str(fitting))
    with pytest.raises(ConfigError, match=f"claim at most {fitting}"):
        main(load_settings(PlanConfig, [*LOCAL, "--memory-gb", "0.92", "--slots", str(fitting + 1)]))
    assert "a peer with 16 of the slots" in planned(capsys, *LOCAL)  # in this machine's free memory


def test_a_peer_that_is_alone_needs_less_at_a_rounds_end(capsys):
    needs = []
    for peers in ("1", "2"):
        text = planned(capsys, *LOCAL, "--slots", "4", "--peers", peers)
        assert re.search(r"Python, its libraries, and helper processes +0\.8000", text)
        needs.append(float(re.search(r"= at a round's end, without gradients +([\d.]+)", text)[1]))  # type: ignore[index]
    assert 0.8 < needs[0] < needs[1]


def test_a_plan_that_does_not_fit_is_printed_and_refused_with_what_takes_less(capsys):
    flags = [*SEVEN, "--device", "cuda", "--memory-gb", "24"]
    said = "training 8 slots needs 53.3 GB, 29.3 GB more than the 24 GB there are; save memory with --inner-optimizer"
    with pytest.raises(ConfigError, match=said):
        main(load_settings(PlanConfig, [*flags, "--slots", "8"]))
    assert "= static" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--slots", "99"], "--slots 99 exceeds the run.s 32 slots; lower it, or leave it out"),
        (["--device", "cuda", "--max-slots", "auto"], "set --memory-gb, or --slots"),
        (["--slots", "1", "--device", "cuda", "--host-memory-gb", "40"], "on the host, .* there are; "),
    ],
)
def test_bad_input_is_one_line_with_the_remedy(flags, said):
    with pytest.raises(ConfigError, match=said) as refused:
        main(load_settings(PlanConfig, [*SEVEN, *flags]))
    assert "\n" not in str(refused.value)


def test_a_local_tokenizer_is_counted_and_another_taken_as_configured(tmp_path):
    tokenizer = train_bpe(["peers average slots in rounds"] * 3, 270)
    tokenizer.save_pretrained(tmp_path)
    assert vocabulary(DataConfig(tokenizer=str(tmp_path), vocab_size=9)) == len(tokenizer)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_bytes(tokenizer))  # as it lies beside shards
    assert vocabulary(DataConfig(tokenizer=str(tmp_path), vocab_size=9)) == len(tokenizer)
    assert vocabulary(DataConfig(tokenizer="someone/elses", vocab_size=99)) == 99
    assert vocabulary(DataConfig(vocab_size=300)) == 300
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="name a folder with a tokenizer"):
        vocabulary(DataConfig(tokenizer=str(tmp_path)))


def test_a_vocabulary_that_is_only_configured_is_marked(capsys):
    assert "Qwen/Qwen2.5-0.5B is not on this machine" in planned(capsys, *SEVEN)
    assert "is not on this machine" not in planned(capsys, *LOCAL)


def test_settings_come_from_variables_too(monkeypatch):
    monkeypatch.setenv("SPES_MAX_SLOTS", "3")
    monkeypatch.setenv("SPES_RUN_FROZEN_STORAGE", "int8")
    config = load_settings(PlanConfig, LOCAL)
    assert config.max_slots == 3 and config.run.frozen_storage == "int8"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--host-memory-gb", "5"], "--host-memory-gb goes with --device cuda"),
        (["--inner-optimizer", "lamb"], "does not make the steps of the run's train.optimizer=muon"),
    ],
)
def test_what_no_peer_could_start_with_is_not_planned(flags, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        main(load_settings(PlanConfig, [*LOCAL, *flags]))


def test_the_page_says_what_a_volunteer_can_train(capsys):
    page = (ROOT / "docs" / "planning.md").read_text()
    rows = re.findall(r"^\| (\w+), \d+ \|([\d |]+)\|$", page.split("**What a volunteer can train**")[1], re.MULTILINE)
    assert [name for name, _ in rows] == ["home_1b", "home_7b", "spes_1b", "spes_2b", "spes_7b", "spes_9b"]
    lean = ["--storage", "nf4", "--inner-optimizer", "adamw8bit", "--activation-checkpointing"]
    for name, cells in rows:
        flags = ["--config", str(ROOT / "configs" / f"{name}.yaml"), "--slots", "auto", "--micro-batch-size", "1"]
        flags += lean if name.startswith("spes") else []
        machines = [(device, size) for device in ("cuda", "cpu") for size in ("16", "24", "48")]
        for (device, size), cell in zip(machines, cells.split("|"), strict=True):
            try:
                text = planned(capsys, *flags, "--device", device, "--memory-gb", size)
            except ConfigError as error:
                assert int(cell) == 0 and "training 1 slot needs" in str(error)
            else:
                assert int(cell) == int(re.search(r"can train (\d+) of", text)[1])
