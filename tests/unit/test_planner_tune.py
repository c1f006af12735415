"""The settings in `configs/tune_*.yaml` fit the cards that they are for, and adapters cost what they should."""

import re
from pathlib import Path

import pytest
from checkpoints import saved
from transformers import GemmaConfig, OlmoeConfig, PretrainedConfig, Qwen3MoeConfig

from spes_p2p.cli import load_settings
from spes_p2p.commands.plan import main
from spes_p2p.config import AdapterConfig, MachineConfig, RunConfig
from spes_p2p.config.commands import PlanConfig
from spes_p2p.errors import ConfigError
from spes_p2p.model.start import model_of, over_checkpoint
from spes_p2p.planner.memory import Setup, base_bytes, disk_bytes, peer_memory
from spes_p2p.planner.size import model_size, run_size
from spes_p2p.planner.traffic import newcomer_bytes, round_traffic

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
OLMOE_1B_7B = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16}


def checkpoint(folder: Path, config: PretrainedConfig, architecture: str) -> Path:
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder


def of(name: str, folder: Path) -> Path:
    """Write the config.json of the checkpoint that a file of settings is for."""
    if name == "tune_2b":
        shape = {"hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 18, "num_attention_heads": 8}
        return checkpoint(folder, GemmaConfig(**shape, num_key_value_heads=1, head_dim=256), "GemmaForCausalLM")
    if name == "tune_1b":
        config = OlmoeConfig(**OLMOE_1B_7B, intermediate_size=1024, num_experts=64, num_experts_per_tok=8)
        return checkpoint(folder, config, "OlmoeForCausalLM")
    shape = {"hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40_960, "head_dim": 128}
    many = {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128}
    few = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "num_experts": 8}
    own = many | {"moe_intermediate_size": 768, "num_experts_per_tok": 8} if name == "tune_30b" else few
    own = own if name == "tune_30b" else own | {"moe_intermediate_size": 6144, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**shape, **own, vocab_size=151_936, decoder_sparse_step=1, mlp_only_layers=[])
    return checkpoint(folder, config, "Qwen3MoeForCausalLM")


@pytest.mark.parametrize(
    ("name", "flags", "trains"),
    [
        ("tune_30b", ["--memory-gb", "24", "--host-memory-gb", "32"], "a peer trains 161 M by adamw8bit"),
        ("tune_2b", ["--memory-gb", "8", "--host-memory-gb", "16"], "a peer trains 4.9 M by adamw"),
        ("tune_1b", ["--memory-gb", "24", "--host-memory-gb", "64"], "a peer with 4 of the slots trains"),
        ("tune_9b", ["--memory-gb", "80", "--host-memory-gb", "128", "--slots", "1"], "a peer with 1 of the slots"),
    ],
)
def test_tuning_settings_fit_their_cards(name, flags, trains, tmp_path, capsys):
    words = ["--config", str(CONFIGS / f"{name}.yaml"), "--from", str(of(name, tmp_path / "model"))]
    words += ["--device", "cuda", *flags, *(["--storage", "nf4"] if name == "tune_9b" else [])]
    assert main(load_settings(PlanConfig, words)) == 0 and trains in capsys.readouterr().out
    small = [*words, "--memory-gb", "2"]
    with pytest.raises(ConfigError, match=r"needs .* more than the 2 GB there are"):
        main(load_settings(PlanConfig, small))


def test_a_plan_of_adapters_needs_their_base(tmp_path):
    words = ["--config", str(CONFIGS / "tune_2b.yaml"), "--memory-gb", "8"]
    with pytest.raises(ConfigError, match="adapters need a base: name a checkpoint with --from, or drop --adapter"):
        main(load_settings(PlanConfig, words))
    source = str(of("tune_2b", tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"the checkpoint gives the model's shape; drop run.model, or --from"):
        main(load_settings(PlanConfig, [*words, "--from", source, "--run.model.num-layers", "3"]))


def test_a_plan_has_sequences_no_longer_than_its_checkpoint_allows(tmp_path, capsys):
    words = ["--from", str(saved(tmp_path / "short", "llama")), "--micro-batch-size", "1"]
    longest = model_of(tmp_path / "short").start.max_position_embeddings
    assert longest < RunConfig().data.sequence_length
    for chosen, tokens in ([], longest), (["--run.data.sequence-length", "16"], 16):
        main(load_settings(PlanConfig, [*words, *chosen]))
        assert f"activations, {tokens} tokens" in capsys.readouterr().out


def test_sequences_over_a_checkpoint_have_room_for_conversations(tmp_path):
    run = over_checkpoint(RunConfig(), of("tune_1b", tmp_path / "model"))
    assert run.model.start.max_position_embeddings > run.data.sequence_length == 1024


def test_a_round_of_adapters_is_a_hundredth_of_a_round_of_the_model(tmp_path):
    """Of OLMoE-1B-7B, attention and all experts at rank 8, against all parameters; both trained everywhere."""
    model, vocab = model_of(of("tune_1b", tmp_path / "model")), 50_304
    whole, tuned = RunConfig(model=model), RunConfig(model=model, adapter=AdapterConfig())
    full = round_traffic(model_size(model, vocab), 64, 4, Setup.of(whole, MachineConfig(), None))
    few = round_traffic(run_size(tuned, vocab), 0, 4, Setup.of(tuned, MachineConfig(), None))
    assert few.total < full.total / 100
    by_slot = RunConfig(model=model, adapter=AdapterConfig(experts="slots"))
    size = run_size(by_slot, vocab)
    assert size.slot_params == 16 * (8 * 2048 + 2048 * 8 + 8 * 1024 + 2048 * 8), "A and B of both weights"
    assert size.shared_params == 16 * 4 * 8 * (2048 + 2048)


def test_memory_falls_with_the_bits_of_the_base_and_with_the_slots_that_are_trained(tmp_path):
    model = model_of(of("tune_1b", tmp_path / "model"))
    run = RunConfig(model=model, adapter=AdapterConfig(experts="slots"))
    size = run_size(run, 50_304)
    frozen = [
        peer_memory(size, 4, Setup.of(run, MachineConfig(storage=storage), 50_304)).frozen  # type: ignore[arg-type]
        for storage in ("fp32", "bf16", "int8", "nf4")
    ]
    assert frozen == sorted(frozen, reverse=True) and frozen[0] > 6 * frozen[3]
    setup = Setup.of(run, MachineConfig(), 50_304)
    trained = [peer_memory(size, slots, setup).static_bytes for slots in (1, 8, 64)]
    assert trained == sorted(trained)


def test_a_plan_counts_the_base_once_on_disk_and_in_the_first_download(tmp_path, capsys):
    model = of("tune_1b", tmp_path / "model")
    size = run_size(RunConfig(model=model_of(model), adapter=AdapterConfig()), 50_304)
    base = base_bytes(size, "bf16")
    setup = Setup.of(RunConfig(model=model_of(model), adapter=AdapterConfig()), MachineConfig(), 50_304)
    one, two = (disk_bytes(size, 1, checkpoints, setup) for checkpoints in (1, 2))
    assert one - (two - one) == base > 10 * newcomer_bytes(size, 1, setup)
    words = ["--config", str(CONFIGS / "tune_1b.yaml"), "--from", str(model), "--slots", "1"]
    assert main(load_settings(PlanConfig, words)) == 0
    told = re.search(r"first download of a newcomer +([\d.]+)", capsys.readouterr().out)
    assert told is not None


def test_the_files_name_what_founds_them():
    for path in CONFIGS.glob("tune_*.yaml"):
        head = "\n".join(line for line in path.read_text().splitlines() if line.startswith("#"))
        assert f"spes plan --config configs/{path.name} --from" in head, path
        assert re.search(rf"spes peer --run-id NAME --config configs/{path.name} --from \S+", head), path
