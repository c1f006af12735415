"""What one machine decides, and whether that is compatible with the run's settings."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from spes_p2p.config.checkpoint import Frozen, PositiveFloat, PositiveInt, Storage
from spes_p2p.config.data import DataConfig, local_data_set
from spes_p2p.config.run import OptimizerName, RunConfig, TrainConfig
from spes_p2p.config_file import read_settings
from spes_p2p.errors import ConfigError

log = logging.getLogger(__name__)
KernelName = Literal["auto", "loop", "grouped_mm", "megablocks"]
AttentionName = Literal["sdpa", "flash", "eager"]
LogLevel = Annotated[Literal["debug", "info", "warning"], Field(description="Least severe event to log.")]
MIN_MBIT = 1e-3
"""Least uplink, in 10^6 bits per second; shares of a round computed from far less are not finite."""


def _within_processors(threads: int) -> int:
    if threads > (most := os.cpu_count() or 1):
        raise ValueError(f"threads={threads} exceeds the {most} processors of this machine; set at most {most}")
    return threads


Threads = Annotated[int, Field(ge=1), AfterValidator(_within_processors)]
Mbit = Annotated[float, Field(ge=MIN_MBIT, le=1e7, allow_inf_nan=False)]
"""A link's rate, in 10^6 bits per second."""
RunId = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]  # guard: first


PagePlace = Annotated[str, Field(max_length=200, pattern=r"^(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]*)(:\d{1,5})?$")]
"""`HOST:PORT`, `HOST`, `:PORT` or `off`."""


def shipped(name: str) -> Path:
    """Return the path of a YAML file that comes with the program, by its name without `.yaml`.

    They are the package's data; in a checkout `spes_p2p/configs` is a link to `configs/` at the top.
    """
    return Path(__file__).parents[1] / "configs" / f"{name}.yaml"


def find_config(path: Path) -> Path:
    """Return `path`, or, if no such file exists, the file of that name that comes with the program."""
    path = Path(os.path.expanduser(path))
    packaged = shipped(path.stem)
    is_named = path.parent in (Path(), Path("configs")) and path.suffix in ("", ".yaml")
    return packaged if is_named and not path.exists() and packaged.is_file() else path


ConfigFile = Annotated[Path, AfterValidator(find_config)]
"""A YAML or TOML file, or the name of one that comes with the program."""


def _shorten_warmup(run: dict[str, Any], given: Mapping[str, Any], name: str) -> None:
    ends = [("round", "total"), ("train", "schedule_rounds")]
    own = {f"run.{section}.{end}": (run.get(section) or {}).get(end) for section, end in ends}
    chosen = {end: given.get(end, value) for end, value in own.items()}
    with contextlib.suppress(TypeError, ValueError):  # of what is no number; it is refused with all settings
        before, after = (min(float(end) for end in each.values() if end) for each in (own, chosen))
        warmup = run["train"]["warmup_rounds"]
        run["train"]["warmup_rounds"] = shorter = warmup * max(0.0, min(1.0, after / before))
        if after < before and os.environ.get("RANK", "0") == "0":
            said = "the warm-up of %s is %g rounds, not %g, in a run of %g, not %g (--run.train.warmup-rounds)"
            log.warning(said, name, shorter, warmup, after, before)


class CommandConfig(Frozen):
    """Base of the commands' settings: flags over `SPES_` variables over the file of `--config` over defaults."""

    model_config = ConfigDict(
        extra="forbid",  # guard: "forbid" -> "ignore"
        validate_default=True,
    )
    short_names: ClassVar[Mapping[str, str]] = {}
    """Short names of flags."""
    is_amending: ClassVar[bool] = False
    """Whether the settings are for a run that is under way."""
    ignored: ClassVar[Collection[str]] = ()
    """Keys that the file of `--config` may have as well."""

    log_level: LogLevel = "info"

    @classmethod
    def read_file(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings in the file of `--config`, if there is one.

        In a shorter run, the warm-up of a file that comes with the program is shorter, too.

        Args:
            given: Settings by flags and variables, by their dotted names.

        Raises:
            ConfigError: it is no file, or cannot be read.
        """
        field = cls.model_fields.get("config")
        if field is None or (path := given.get("config", field.default)) is None:
            return {}
        path = find_config(Path(path))
        if path.exists() and not path.is_file():  # a pipe
            raise ConfigError(f"--config {path} is no file; write the settings into one")
        file = read_settings(path, "--config")
        settings = {key: value for key, value in file.items() if key in cls.model_fields or key not in cls.ignored}
        if path.resolve().parent != shipped("").resolve().parent:
            return settings
        train = settings.get("run", {}).get("train", {})
        if "warmup_rounds" in train and "run.train.warmup_rounds" not in given:
            if cls.is_amending or given.get("resume") in (True, "true", "1"):
                del train["warmup_rounds"]  # an amended or resumed run has its own
            else:
                _shorten_warmup(settings["run"], given, path.name)
        return settings

    @model_validator(mode="before")
    @classmethod
    def _read_local_data_set(cls, values: Any) -> Any:
        """Take a folder that stands in place of a hub data set as this machine's --text or --data."""
        run = values.get("run") if isinstance(values, dict) else None
        data = run.get("data") if isinstance(run, dict) else None
        if not (isinstance(run, dict) and isinstance(data, dict) and data.get("source") == "hub"):
            return values
        if (found := local_data_set(data)) is None:
            return values
        data = {key: data[key] for key in data if key not in ("name", "split")} | {"source": "files"}
        own = {found[0]: found[1]} if found[0] in cls.model_fields else {}  # spes plan reads none
        return {**own, **values, "run": {**run, "data": data}}

    @field_validator("*")
    @classmethod
    def _at_home(cls, value: Any, info: ValidationInfo) -> Any:
        """Return paths with `~` expanded, which shells leave in `--output=~/run`.

        Raises:
            ValueError: there is no such home folder.
        """
        try:
            if isinstance(value, list):
                return [each.expanduser() if isinstance(each, Path) else each for each in value]
            return value.expanduser() if isinstance(value, Path) else value
        except RuntimeError as error:
            flag = f"--{(info.field_name or '').replace('_', '-')}"
            raise ValueError(f"{flag} {value}: there is no such home folder; name another") from error


class MachineConfig(Frozen):
    """How one machine computes; the results that it shares have the same meaning whatever it chooses."""

    storage: Storage | None = None
    """Precision of experts that this peer does not hold; by default the run's."""
    kernel: KernelName = "auto"
    """Expert kernel; `auto`: the fastest that this machine can use."""
    attention: AttentionName = "sdpa"
    """Attention kernel. `sdpa`: PyTorch's; `flash`: FlashAttention 2, for runs in bf16 on a GPU, from the package
    flash-attn; `eager`: plain matrix products, whose scores take memory that grows with the sequence's square."""
    inner_optimizer: OptimizerName | None = None
    """Inner optimizer; by default the run's. It must have the same moments as the run's."""
    micro_batch_size: PositiveInt | None = None
    """Sequences per forward pass; by default this rank's share of the step."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass. It saves memory."""
    compile: Literal["off", "auto"] = "off"
    """Fuse attention and norms by torch.compile. A small model's steps take an eighth less time on a CPU; the first
    start takes half a minute more."""
    gradients: Literal["fp32", "bf16"] = "fp32"
    """Precision of gradients. `bf16` halves their memory; only the 8-bit optimizers take it."""
    shard: Literal["ddp", "fsdp"] = "ddp"
    """How ranks share the work. `ddp` copies what is trained to each, `fsdp` splits it among them."""
    uplink_mbit: Mbit | None = None
    """Upload rate of this link, in 10^6 bits per second. It sends at that rate, which leaves no queues in which
    TCP would lose a quarter of the rate; by default it sends as fast as TCP goes. If the rate is about half of the
    others' or less, they reduce in its place and pass its slots on. A peer that states no rate counts as the fastest
    that does. A founder's rate makes rounds long enough for it (`round.min_seconds`)."""
    refresh_slots: PositiveInt | None = None
    """Slots of others to fetch per round; by default all. The most routed-to come first, the rest in turn."""


class KeptRounds(Frozen):
    """Which checkpoints a peer keeps; each takes up to six fp32 vectors of what it trains, and the other slots."""

    keep_last: PositiveInt = 2
    """Checkpoints to keep of the newest rounds."""
    keep_every: PositiveInt | None = None
    """Keep every n-th round's checkpoint for ever: of the rounds that are multiples of n. By default none."""


OwnerName = Annotated[str, Field(pattern=r"^([0-9A-Za-z][0-9A-Za-z ._-]{0,31})?$")]  # guard: first
"""By which pages and model cards thank a peer's owner; empty if they have set none."""
FoundedRun = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}(@[1-9A-HJ-NP-Za-km-z]{40,64}(@[0-9]{1,9}:[0-9a-f]{64})?)?$"),
]
"""A run's name, then `@` and its founder's peer id where that is known; another founder's run is refused then. After
another `@`, round and digest of a certificate; a newcomer follows no chain without it."""


class OwnData(Frozen):
    """What of its own a command reads, where the run's data source is `files`."""

    text: list[Path] = []
    """Text, jsonl or parquet files, folders or patterns. They serve where the run's data source is `files`."""
    data: list[Path] = []
    """Conversations, or token shards, instead of text. Conversations are JSON or parquet with `messages`, `prompt` and
    `completion`, or `text`; of them, only the replies are learned. Token shards are a folder, files, a pattern, or a
    manifest or `file_list.txt` of `spes tokenize`, in any format of docs/data.md. In a run that mixes sources
    NAME=PATH, for each source. An http address of such a manifest is fetched into the cache."""
    skip_unusable: bool = False
    """Leave out and count unusable conversations. By default the first one ends the command."""

    @property
    def shards(self) -> list[Path]:
        """This machine's token shards, or conversations."""
        return self.data

    def flags_of_others(self, run: RunConfig) -> str:
        """Return what others write behind `spes join LINK` to join a run that this machine takes part in."""
        data = f" --{'data' if self.shards else 'text'} PATH" if run.data.source == "files" else ""
        if run.data.mixture:
            data = " --data " + " ".join(f"{source.name}=PATH" for source in run.data.mixture)
        return data + (" --invite ..." if run.invite_only else "")

    def corpus(self, data: DataConfig) -> DataConfig:
        """Return the run's data settings with this machine's token shards or conversations, in place of the founder's.

        Raises:
            ConfigError: the run trains on no files of its peers, or text and shards are both given.
        """
        if (self.shards or self.text) and data.source != "files":
            flag = "--data" if self.shards else "--text"
            raise ConfigError(f"{flag}: this run trains on its own text (data.source={data.source}); drop {flag}")
        if self.shards and self.text:
            raise ConfigError("--text and --data exclude each other; drop one")
        if data.fingerprint and not (self.shards or data.urls):
            raise ConfigError(
                f"this run trains on token shards with fingerprint {data.fingerprint}; name them with --data PATH"
            )
        if lacking := [source.name for source in data.mixture if not (self.shards or source.urls)]:
            words = " ".join(f"{name}=PATH" for name in lacking)
            raise ConfigError(f"this run mixes {len(data.mixture)} sources; name the shards of each: --data {words}")
        data = data.model_copy(update={"skip_unusable": self.skip_unusable or data.skip_unusable})
        return data.model_copy(update={"paths": self.shards})  # guard: "paths": self.shards ->


class NamedRun(Frozen):
    """Which run a command is about."""

    run_id: FoundedRun
    """Name of the run. `NAME@FOUNDER` joins only the run that the peer FOUNDER founded."""

    @property
    def run_name(self) -> str:
        """The run's name alone."""
        return self.run_id.split("@")[0]

    @property
    def founder(self) -> str | None:
        """The peer id that the run's founder must have; None takes any."""
        return self.run_id.split("@")[1] if "@" in self.run_id else None

    @property
    def recent(self) -> str:
        """Round and digest of a certificate that the run's chain must have; empty takes any chain."""
        return "".join(self.run_id.split("@")[2:])


class Output(Frozen):
    """What becomes of what a command finds in its output."""

    resume: bool = False
    """Continue with what `output` holds."""
    overwrite: bool = False
    """Delete what `output` holds and start anew."""

    @model_validator(mode="after")
    def _check_output(self) -> Output:
        if self.resume and self.overwrite:
            raise ValueError("--resume and --overwrite exclude each other; drop one")
        return self


class Cache(Frozen):
    """Where a command keeps what it would otherwise make again."""

    cache: Path = Path("~/.cache/spes_p2p")
    """Tokenizers and tokenised text."""


class Listens(Frozen):
    """Where a machine takes calls."""

    host: Annotated[str, Field(min_length=1)] | None = None
    """Address to listen on; `*` for all interfaces. By default all of them, IPv4 and IPv6, or 127.0.0.1 if all initial
    peers are on this machine."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on, TCP and UDP; by default a resumed peer's last one, or one that the system chooses."""
    announce: list[str] = []
    """Multiaddrs by which others reach this peer. /ip4/203.0.113.7/tcp/4001 is one; by default from host and port."""


class Consent(Frozen):
    """Whether a command asks before it reads what another's run names."""

    yes: bool = False
    """Read another's public data set and tokenizer unasked; for scripts. By default it shows them and asks."""


SEED_SECONDS = 30.0
"""Default of `seed_seconds` for a peer that has trained the last round."""


class VolunteerConfig(CommandConfig, MachineConfig, OwnData, KeptRounds, Output, Cache, Consent, Listens):
    """What a peer's machine brings into a run, and how it takes part."""

    short_names: ClassVar[Mapping[str, str]] = {"start_from": "from"}

    start_from: Path | None = None
    """Checkpoint that the run starts from: a folder, as transformers saves it, or `owner/name@COMMIT` on the hub (by
    default the newest commit). It gives the founder the model's shape, weights and tokenizer; others need none, or
    read their own copy."""
    output: Path = Path("runs/peer")
    """Directory of all that this peer keeps. It has its identity, versions and checkpoints."""
    resume_round: Annotated[int, Field(ge=1)] | None = None
    """Resume from the checkpoint of this round. All peers that are started so go back together, others do not; once a
    peer has gone back, the flag does nothing."""
    skip_optimizer: bool = False
    """Resume with a new inner optimizer. Weights, data position and step counts are the checkpoint's."""
    alone: bool = False
    """Train on when all others have vanished. It begins once their leases have run out, by default after
    `round.shrink_seconds`."""
    max_slots: PositiveInt | Literal["auto"] = "auto"
    """Largest number of expert slots to claim. `auto`: as many as this machine's free memory allows."""
    slots_by_data: bool = False
    """Begin with the slots that own data uses most. The routers of the checkpoint (`--from`) tell. By default a peer
    begins with the slots that have the fewest holders; while a slot has none, it goes before all others."""
    page: PagePlace = "127.0.0.1"
    """HOST:PORT of the live page, or `off`. Prometheus's /metrics is there too. Without a port, a free one; by default
    on this machine alone."""
    data_seed: int | None = None
    """Seed of this peer's data order; by default from its identity."""
    map_port: bool = False
    """Have the router forward the port. By UPnP, while the peer runs; the router's address is announced."""
    client_mode: bool = False
    """Call others, but take no calls. A peer that finds that others cannot call it does so by itself."""
    invite: Annotated[str, Field(max_length=4096)] | None = None
    """Invite, a link with one, or a file with either. A file, or SPES_INVITE, keeps it out of the process list."""
    owner_name: OwnerName = ""
    """Your name on pages and model cards. All can see it; by default they have the peer's id alone."""
    identity: Path | None = None
    """File of this peer's key, created if missing; by default in `output`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    threads: Threads | None = None
    """CPU threads per rank; by default PyTorch's choice."""
    seed_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Time to serve versions after the last round: by default 30, but a founder that resumes a finished run ends at
    once."""
    grace: PositiveFloat = 300.0
    """Longest time from SIGTERM to the end. A peer hands its slots over within so many seconds, also where a rank or a
    device hangs; a second SIGTERM ends it within 5."""

    @model_validator(mode="after")
    def _check_resume(self) -> VolunteerConfig:
        if self.resume_round is not None and not self.resume:
            raise ValueError(f"resume_round={self.resume_round} goes with --resume; add it, or drop --resume-round")
        if self.skip_optimizer and not self.resume:
            raise ValueError("skip_optimizer goes with --resume; add it, or drop --skip-optimizer")
        return self


class NewRun(Frozen):
    """What the founder of a run sets."""

    config: ConfigFile | None = None
    """YAML or TOML of a run's settings and this machine's. The run's are under `run`. The name of a file that comes
    with the program will do: `local_experiment`, or `configs/local_experiment.yaml`."""
    run: RunConfig | None = None
    """The run's settings, for its founder. The others take them from the signed manifest."""


class PeerConfig(NewRun, VolunteerConfig, NamedRun):
    """Join a run with --initial-peers, or found one, and train it."""

    initial_peers: list[str] = []
    """Multiaddrs of peers in the swarm; nodes of `hivemind-dht` will do, too. One that answers is enough. Without any,
    or with a --config that sets a run, a new run is founded."""
    adapter: Path | None = None
    """For a founder with --from: train adapters over the checkpoint, which stays frozen. `lora` begins a new one, with
    the settings in `run.adapter`; the folder of an adapter that peft or `spes export` has saved goes on from it."""

    @property
    def founds(self) -> bool:
        """Whether this start founds a run."""
        return not self.resume and (not self.initial_peers or (self.config is not None and self.run is not None))

    @property
    def shards(self) -> list[Path]:
        """This machine's token shards or conversations; the founder's may be in the run's settings."""
        return self.data or (self.run.data.paths if self.run is not None else [])

    @property
    def adapter_folder(self) -> Path | None:
        """The folder of the adapter that the run goes on from, if it does."""
        return None if self.adapter == Path("lora") else self.adapter


MAX_NARROW_SUMS = 8
"""Microbatches whose gradients may be summed in bf16; more would round too much."""


def check_machine(run: RunConfig, machine: MachineConfig, num_ranks: int = 1) -> None:
    """Refuse choices with which a machine could not train the run, or would not make the run's steps.

    AdamW in 8 bits makes AdamW's steps; all other optimizers interpret `train.lr` differently. LAMB's moments are
    AdamW's, but its steps are not.

    Raises:
        ConfigError: the machine's choices contradict the run.
    """
    name = machine.inner_optimizer
    if name not in (None, run.train.optimizer) and {name, run.train.optimizer} != {"adamw", "adamw8bit"}:
        raise ConfigError(
            f"inner_optimizer={name} does not make the steps of the run's train.optimizer={run.train.optimizer}; "
            f"leave it out (only adamw and adamw8bit stand in for each other)"
        )
    if run.kept_form is not None and machine.storage not in (None, run.kept_form):  # guard: never
        raise ConfigError(
            f"storage={machine.storage} is not the form in which this run's slots travel, frozen_storage="
            f"{run.kept_form}; leave it out, or found the run with --run.frozen-storage {machine.storage}"
        )
    if machine.refresh_slots is not None and run.merge.alpha:
        raise ConfigError(
            f"refresh_slots={machine.refresh_slots} goes with no run that merges experts "
            f"(merge.alpha={run.merge.alpha:g}), which takes every slot's newest version; leave it out"
        )
    if run.adapter is not None and machine.shard == "fsdp":
        raise ConfigError("--shard fsdp shards what is trained, and adapters are small; leave it out")
    if run.adapter is not None and machine.kernel not in ("auto", "loop"):
        raise ConfigError(f"kernel={machine.kernel} has no adapters; set --kernel auto")
    if machine.attention == "flash" and run.train.precision != "bf16":
        raise ConfigError(
            f"attention=flash computes in bf16, and the run's train.precision={run.train.precision}; "
            f"set attention=sdpa, or found a run with train.precision=bf16"
        )
    check_training(run.train, machine, num_ranks)


def check_training(train: TrainConfig, machine: MachineConfig, num_ranks: int) -> None:
    """Refuse choices that cannot be combined in any run.

    Raises:
        ConfigError: the batch does not split over the ranks, or an optimizer cannot take the gradients or parameters.
    """
    optimizer = machine.inner_optimizer or train.optimizer
    if train.batch_size % num_ranks:
        raise ConfigError(
            f"train.batch_size={train.batch_size} does not split over {num_ranks} ranks; "
            f"start a divisor of it with --nproc-per-node"
        )
    if machine.shard == "fsdp" and num_ranks > 1 and optimizer != "adamw":
        raise ConfigError(
            f"inner optimizer {optimizer} cannot work with --shard fsdp, where a rank has parts of parameters; "
            f"use adamw, or --shard ddp"
        )
    if machine.gradients == "fp32":
        return
    if optimizer != "adamw8bit":
        raise ConfigError(
            f"gradients=bf16 goes with the optimizer adamw8bit, not with {optimizer}; set inner_optimizer=adamw8bit, "
            f"or gradients=fp32"
        )
    if num_ranks > 1:
        raise ConfigError(f"gradients=bf16 works with one rank, not with {num_ranks}; set gradients=fp32")
    sums = -(-train.batch_size // sequences_at_once(train, machine))
    if sums > MAX_NARROW_SUMS:
        raise ConfigError(
            f"gradients=bf16 adds up {sums} microbatches, and rounds too much from {MAX_NARROW_SUMS + 1} on; "
            f"set micro_batch_size to {-(-train.batch_size // MAX_NARROW_SUMS)} or more, or gradients=fp32"
        )


def sequences_at_once(train: TrainConfig, machine: MachineConfig, num_ranks: int = 1) -> int:
    """Return the number of sequences in a rank's forward pass."""
    share = max(1, train.batch_size // num_ranks)
    return min(machine.micro_batch_size or share, share)
