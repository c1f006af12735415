"""Settings of the commands, one class each; a peer's are in `machine`.

Flags are read before anything heavy is imported, so this module imports neither torch nor transformers nor hivemind.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from spes_p2p.config.checkpoint import WORD, Fraction, Frozen, PositiveFloat, PositiveInt
from spes_p2p.config.link import JoinLink
from spes_p2p.config.machine import (
    Cache,
    CommandConfig,
    ConfigFile,
    Consent,
    FoundedRun,
    KeptRounds,
    Listens,
    MachineConfig,
    Mbit,
    NamedRun,
    NewRun,
    Output,
    OwnData,
    PagePlace,
    PeerConfig,
    RunId,
    VolunteerConfig,
    shipped,
)
from spes_p2p.config.run import RunConfig

SuiteName = Literal["spes"]


def _destination(text: str) -> str:
    """Return where to upload to, if it has a form that is known.

    Raises:
        ValueError: it has not.
    """
    if re.match(r"[A-Za-z][\w+.-]*:", text) and not _DESTINATION.fullmatch(text):  # guard: never
        scheme = text.partition(":")[0][:20]
        raise ValueError(
            f"no place that begins with {scheme}: is known in that form; name s3://BUCKET/PREFIX, hf://OWNER/NAME or a "
            f"folder, and no credentials"
        )
    return text


_DESTINATION = re.compile(
    r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[\w./-]*)?|hf://[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII
)
UploadPlace = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_destination)]
"""`s3://BUCKET/PREFIX`, `hf://OWNER/NAME` or a folder."""
CtlVerb = Literal["status", "link", "pause", "resume", "finish", "leave", "set", "rules"]


class LmTasks(Frozen):
    """lm-eval's tasks, which a monitor runs on the model after each evaluation, in a process of their own.

    Their tables go to `tasks` in its output. If the last ones still run, an evaluation goes without, except the last.
    """

    tasks: list[str] = []
    """lm-eval tasks to run on the model."""
    suite: SuiteName | None = None
    """A published list of tasks, each with its number of examples in the prompt. `spes`: the paper's."""
    task_path: Path | None = None
    """Folder with task YAML files of your own, which come first."""


class JoinConfig(VolunteerConfig):
    """Join the run that a link names, and train it. Repeat the command to go on after an interruption."""

    link: Annotated[str, WORD] = ""
    """The run's link, one word that begins with `spes:`; every peer prints it. SPES_LINK keeps it out of the process
    list."""
    output: Path | None = None  # type: ignore[assignment]
    """Directory of this peer's identity, versions and checkpoint; by default runs/ and the run's name."""

    @model_validator(mode="after")
    def _check_link(self) -> JoinConfig:
        if not self.link:
            raise ValueError("link is missing; name the run by its link, or set SPES_LINK to it")
        JoinLink.parse(self.link)
        return self


class FoundConfig(NewRun, CommandConfig, MachineConfig, OwnData, Cache, Consent, Listens):
    """Found a run by five questions: what for (--run-id), which model (--config), whose text (--text), who may join
    (--run.invite-only), and this link's upload rate (--uplink-mbit).

    A flag answers its question; without a terminal, and with --yes, defaults answer the others. The plan is shown, the
    settings are written beside the output, and `spes peer` starts with them; it has more flags.
    """

    run_id: RunId | None = None
    """Name of the run."""
    output: Path | None = None
    """Directory of the founder's peer. By default runs/ and the run's name."""
    max_slots: PositiveInt | Literal["auto"] = "auto"
    """Largest number of expert slots to claim."""
    device: Literal["cpu", "cuda"] | None = None
    """Where to train; by default on a GPU if there is one."""
    tokens_per_second: PositiveFloat | None = None
    """Training speed for the plan; by default it is measured."""


class ClusterConfig(NewRun, VolunteerConfig, NamedRun):
    """Train a run with one peer per node. Start it on each node; the first founds."""

    shared: Path
    """Folder that all nodes see. The job's peers find each other there."""
    output: Path | None = None  # type: ignore[assignment]
    """Directory of this node's peer; by default in `shared`. If it has a peer, that goes on."""


class LinkedRun(NamedRun):
    """A run by its link, or by name and addresses."""

    link: Annotated[str | None, WORD] = None
    """The run's link, in place of --run-id and --initial-peers."""
    initial_peers: list[str] = []
    """Multiaddrs of peers in the swarm; nodes of `hivemind-dht` will do, too."""

    @model_validator(mode="before")
    @classmethod
    def _read_link(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not values.get("link"):
            required = [name for name in ("run_id", "initial_peers") if cls.model_fields[name].is_required()]
            if isinstance(values, dict) and not values.keys() >= {*required}:
                flags = " and ".join(f"--{name.replace('_', '-')}" for name in required)
                raise ValueError(f"name the run by its link, or by {flags}")
            return values
        if named := sorted({"run_id", "initial_peers"} & values.keys()):
            flag = f"--{named[0].replace('_', '-')}"
            raise ValueError(f"the link names the run and its peers; drop {flag}, or the link (SPES_LINK)")
        link = JoinLink.parse(values["link"])
        return {**values, "link": None, "run_id": link.founded, "initial_peers": list(link.addresses)}


class RendezvousConfig(CommandConfig, LinkedRun, Listens):
    """Keep a run together whose peers all sit behind routers, on a small server that is always on: peers meet there,
    and it introduces them, passes on what they sign, and stores the newest versions. It neither trains nor votes."""

    output: Path = Path("runs/rendezvous")
    """Directory of its identity and of what it stores. The same command goes on with it."""
    port: Annotated[int, Field(ge=0, le=65535)] = 4001
    """Port to listen on, TCP and UDP."""
    disk_gb: PositiveFloat = 10.0
    """Most disk for versions, in 10^9 bytes; it keeps as many of the model's parts as fit."""
    uplink_mbit: Mbit | None = None
    """Upload limit in 10^6 bits per second."""


class MonitorConfig(CommandConfig, LinkedRun, OwnData, LmTasks, Output, Cache, Consent):
    """Follow a run to its end, evaluate its model, and leave the model and a report behind."""

    initial_peers: Annotated[list[str], Field(min_length=1)]
    """Multiaddrs of peers in the swarm."""
    output: Path = Path("runs/monitor")
    """Directory of metrics, report, model, and this peer's identity and versions."""
    held_out_sequences: Annotated[int, Field(ge=0)] = 32
    """Sequences of held-out text to evaluate the swarm's model on; 0 evaluates nothing."""
    evaluate_every: PositiveInt = 1
    """Rounds between evaluations; the start and the last round are always evaluated."""
    checkpoint_every: PositiveInt | None = None
    """Rounds between checkpoints, which are written to `checkpoints` in `output` when their round is evaluated. By
    default only the last model is written."""
    keep_last: PositiveInt = 2
    """Newest checkpoints to keep, besides the one with the least held-out loss."""
    upload: UploadPlace | None = None
    """Where checkpoints and the last model are uploaded: `s3://BUCKET/PREFIX`, `hf://OWNER/NAME`, a model repository of
    the hub, or a folder. Credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or `~/.aws` with the extra `s3`;
    huggingface_hub's own."""
    poll_seconds: Annotated[float, Field(gt=0, le=30)] = 1.0
    """Interval of reading the swarm's records. A report of a round that lives shorter is missed."""
    console: Literal["auto", "live", "plain", "none"] = "auto"
    """How progress is shown. `live`: a table that refreshes; `plain`: one line per round and per evaluation;
    `auto`: live on a terminal."""
    wandb: bool = False
    """Log to Weights & Biases. Offline and without an account unless WANDB_MODE says otherwise."""
    wandb_project: Annotated[str, Field(min_length=1)] = "spes_p2p"
    """Project of the W&B run."""
    tensorboard: bool = False
    """Write curves for TensorBoard to the folder `tensorboard` in `output`."""
    page: PagePlace = "127.0.0.1"
    """HOST:PORT of the live page, or `off`. Prometheus's /metrics is there too. Without a port, a free one; by default
    on this machine alone. `0.0.0.0:8080` shows the page to all that can reach this machine."""
    threads: PositiveInt | None = None
    """CPU threads for evaluating; by default PyTorch's choice."""


class ExperimentConfig(CommandConfig, MachineConfig, OwnData, KeptRounds, Output, Cache):
    """Train a small model with several peers and a monitor on this machine."""

    config: ConfigFile = shipped("local_experiment")
    """YAML or TOML with the run's settings under `run`, and defaults for these flags. The name of a file that
    comes with the program will do: `spes_1b`, or `configs/spes_1b.yaml`."""
    run: RunConfig = RunConfig()
    """Settings of the run, such as `--run.round.total 12`."""
    run_id: RunId = "local"
    """Name of the run."""
    peers: Annotated[int, Field(ge=1, le=64)] = 4
    """Peers to start."""
    max_slots: PositiveInt | None = None
    """Slots per peer; by default every slot has two holders."""
    output: Path = Path("runs/local")
    """Directory of the experiment: model, report, metrics, logs, peers."""
    dataset: str | None = None
    """A local file, or `owner/name` of a public data set, which is streamed from the Hugging Face hub."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the peers train."""
    wandb: bool = False
    """Log to Weights & Biases. Offline unless WANDB_MODE says otherwise."""


class PlanConfig(CommandConfig, MachineConfig):
    """Print the memory, traffic and time that a run needs of one peer, and the days that it takes; start nothing.

    Exits with 2 if the plan does not fit `--memory-gb`.
    """

    short_names: ClassVar[Mapping[str, str]] = {"max_slots": "slots", "start_from": "from"}
    ignored: ClassVar[Collection[str]] = PeerConfig.model_fields
    """Keys that its YAML file may have: it may be a peer's."""

    name: Annotated[ConfigFile | None, WORD] = None
    """The same as --config."""
    config: ConfigFile | None = None
    """YAML or TOML with the run's settings under `run`, and a machine's choices. The name of a file that comes
    with the program will do: `spes_1b`, or `configs/spes_1b.yaml`."""
    start_from: Path | None = None
    """Checkpoint that the run starts from, a folder of which only config.json is read; it gives the model's shape."""
    adapter: Literal["lora"] | None = None
    """Plan a run that trains adapters over the checkpoint, with the settings in `run.adapter`."""
    run: RunConfig = RunConfig()
    """Settings of the run, such as `--run.model.num-experts 32`."""
    max_slots: PositiveInt | Literal["auto"] = "auto"
    """Slots to train. `auto`: as many as fit `memory_gb`, or else this machine's free memory."""
    memory_gb: PositiveFloat | None = None
    """Memory of the machine, or with `--device cuda` of each GPU, in 10^9 bytes."""
    host_memory_gb: PositiveFloat | None = None
    """With `--device cuda`: memory of the machine, in 10^9 bytes. It then holds the swarm's share; by default it is not
    checked."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to train. `cpu`: one memory holds everything; `cuda`: GPUs hold what is trained, and the machine the
    swarm's share."""
    ranks: PositiveInt = 1
    """Processes of the peer, as torchrun starts them; one per GPU."""
    peers: PositiveInt | None = None
    """Peers of the swarm, all like this one. By default the run's `round.min_peers`, and two at least."""
    downlink_mbit: PositiveFloat | None = None
    """Every peer's downlink; of it and `uplink_mbit` each is by default the other."""
    tokens_per_second: PositiveFloat | None = None
    """Training speed of this machine. By default it is measured for ten seconds, unless the plan names the memory of
    another."""
    watts: PositiveFloat | None = None
    """Power of one peer's machine while it trains; the plan then says what electricity the run takes."""

    @classmethod
    def read_file(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings in the file that a word or `--config` names."""
        return super().read_file({"config": given["name"], **given} if given.get("name") else given)


class TokenizeConfig(CommandConfig, Cache):
    """Tokenise text once, into shards of token ids that runs then train on with --data.

    The same text gives the same bytes, however many processes work and however often they are killed: start an
    interrupted command again, and it continues.
    """

    short_names: ClassVar[Mapping[str, str]] = {"tokenizer": "tokenizer-name-or-path"}

    file_glob: Annotated[list[Path], Field(min_length=1)]
    """Files, folders or patterns such as `corpus/*.jsonl.zst`. Text, JSON lines, JSON arrays, parquet and MDS shards,
    each also as `.gz` or `.zst`."""
    output_prefix: Annotated[str, Field(min_length=1)]
    """What the names of all files begin with: `shards/` for a folder, or `shards/books_`."""
    tokenizer: str | None = None
    """A Hugging Face tokenizer (name or directory). By default a byte-level BPE of 4,096 entries, trained on the text
    as a run would do it."""
    text_field: str = "text"
    """Column that holds the text in JSON and parquet."""
    processes: PositiveInt | None = None
    """Processes that tokenise; by default one per CPU core."""
    batch_size: PositiveInt = 500
    """Most documents that a process tokenises at a time."""
    max_shard_bytes: Annotated[int, Field(gt=0, le=2**50)] = 4 * 2**30
    """Largest size of a shard; a longer document has one of its own."""
    dtype: Literal["uint16", "uint32"] | None = None
    """Type of the ids; by default the smallest that holds the vocabulary."""
    skip_unusable: bool = False
    """Leave out files and rows that hold no usable text, and count them in the manifest. By default the first one ends
    the command."""


class FoundersFolder(Frozen):
    """Where a command of a run's founder finds the run and the founder's identity."""

    folder: Annotated[Path, WORD]
    """The --output of the founder's peer, which may be running; of another peer with --identity."""
    identity: Path | None = None
    """The founder's identity file, if it is not in that folder."""


class InviteConfig(CommandConfig, FoundersFolder):
    """Print invites to a run, one link a line: to vote, or only to train in a run founded with --run.invite-only."""

    votes: bool = False
    """Let those who are invited vote: a majority of the voters decides what counts."""
    count: PositiveInt = 1
    """Number of invites."""
    places: Annotated[int, Field(ge=1, le=255)] = 1
    """Machines that may use each invite."""
    days: Annotated[int, Field(ge=1, le=3650)] = 30
    """Days for which they are valid."""


class EvaluateConfig(CommandConfig, LmTasks):
    """Measure held-out loss, perplexity and lm-eval tasks of a Hugging Face checkpoint.

    Several GPUs share the tasks: `torchrun --nproc-per-node 8 -m spes_p2p evaluate ...`, or `accelerate launch -m`.
    """

    short_names: ClassVar[Mapping[str, str]] = {"json_file": "json"}

    checkpoint: Annotated[Path, WORD]
    """Folder written by `save_pretrained`, tokenizer included."""
    text: list[Path] = []
    """Files or folders to measure the loss on. By default, if there are no tasks, the held-out part of the embedded
    corpus."""
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    """Examples in the prompt of `tasks`; by default what each task says. A suite sets its own."""
    batch_size: PositiveInt | Literal["auto"] = 8
    """Sequences, or requests of a task, per forward pass. `auto`: as many requests as fit, up to 64."""
    precision: Literal["fp32", "bf16"] | None = None
    """Precision of the model; by default as the checkpoint is stored."""
    sequence_length: PositiveInt | None = None
    """Tokens per sequence of text; by default 256, or as many as the checkpoint allows if these are fewer."""
    limit: PositiveInt | None = None
    """Largest number of sequences of text, and of documents per task."""
    json_file: Path | None = None
    """File to write the numbers to as well, those of a group's single tasks included."""
    markdown: Path | None = None
    """File to write the table to as well, as Markdown."""

    @model_validator(mode="after")
    def _check_tasks(self) -> EvaluateConfig:
        if self.num_fewshot is not None and not self.tasks:
            raise ValueError(
                f"num_fewshot={self.num_fewshot} goes with tasks, and a suite sets its own; leave it out or set tasks"
            )
        return self


class ChatConfig(CommandConfig, Consent):
    """Talk to a model in the terminal: by its chat template if it has one; otherwise it continues your text."""

    source: Annotated[str, WORD]
    """Folder of a checkpoint, the --output of a peer or monitor, where a monitor uploads to, or a run's link."""
    prompt: Annotated[str, Field(min_length=1)] | None = None
    """Answer this alone, and exit."""
    max_tokens: PositiveInt = 256
    """Longest answer."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """0 takes the most likely token each time. By default the checkpoint's own, or else 0.5."""
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    """Above 1 it makes repetition rarer. By default the checkpoint's own; if it names no temperature, 1.2."""


class ExportConfig(CommandConfig, Consent):
    """Write the model of a round as a Hugging Face checkpoint: from the folder of a peer or monitor, offline; from
    where a monitor uploads to; or from a running swarm by its link, or by --run-id and --initial-peers."""

    short_names: ClassVar[Mapping[str, str]] = {"start_from": "from"}

    source: Annotated[str | None, WORD] = None
    """The --output of a peer, monitor or local experiment, or a run's link. A folder is only read; it may be in use.
    Or the place of a monitor's --upload: `s3://BUCKET/PREFIX` or a folder."""
    output: Path | None = None
    """Folder to write; by default `model` in that folder. It appears whole or not at all."""
    round: Annotated[int, Field(ge=0)] | None = None
    """Round to export, of those that the folder keeps; by default the newest."""
    overwrite: bool = False
    """Replace the checkpoint that `output` holds."""
    merged: bool = False
    """Of a run with adapters: write a whole checkpoint, the base with the adapters added. By default the adapters are
    written alone, as peft loads them."""
    start_from: Path | None = None
    """With --merged: the checkpoint under the adapters, a folder or `owner/name@COMMIT` on the hub; by default as peers
    have sent it to each other."""
    run_id: FoundedRun | None = None
    """Name of the run to fetch its newest round from, instead of SOURCE. `NAME@FOUNDER` takes only that founder's."""
    initial_peers: list[str] = []
    """Multiaddrs of peers in that run's swarm."""


class CreditConfig(CommandConfig, Consent):
    """List a run's peers by the tokens that counted, as certificates say: of the rounds that a peer or a monitor has
    seen, or by a link of those that the swarm still keeps in a row."""

    source: Annotated[str, WORD]
    """The --output of a peer or monitor, which may be running; or a run's link."""


class AmendConfig(CommandConfig, FoundersFolder):
    """Prolong or anneal a run that is under way, or has ended: change settings that its founder has signed.

    Only rounds, learning rate, its schedule, the weights of a mixture of data, and revoked invites can change.
    """

    is_amending: ClassVar[bool] = True
    ignored: ClassVar[Collection[str]] = PeerConfig.model_fields
    """Keys that its YAML file may have: it is the one that the founder started from, of which `run` alone counts."""

    config: ConfigFile | None = None
    """YAML or TOML file with the settings to change under `run`; those that are as they were may stay in it."""
    run: RunConfig | None = None
    """Settings to change, such as `--run.round.total 200`."""


class UpcycleSettings(Frozen):
    """What to make of which checkpoint."""

    source: Path
    """Folder of the dense checkpoint, its weights as safetensors."""
    output: Path
    """Folder to write; must be empty or not exist."""
    num_experts: PositiveInt
    """Experts of every layer."""
    top_k: PositiveInt
    """Experts each token is routed to; their weights are normalised."""
    router_std: PositiveFloat = 0.02
    """Standard deviation of the routers' weights. Small but not 0: ties would send every token to the same experts."""
    noise_std: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Standard deviation of noise on the experts' weights. Noise makes experts differ from the start."""
    noise_fraction: Fraction = 0.0
    """Share of each expert's weights that get noise."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of routers and noise; equal seeds give equal files."""


class UpcycleConfig(CommandConfig, UpcycleSettings):
    """Make a mixture of experts from a dense checkpoint: Qwen3-MoE from Qwen3, Mixtral from Llama."""

    short_names: ClassVar[Mapping[str, str]] = {"source": "from"}


def _folder(value: object) -> Path:
    """Return a folder's path.

    Raises:
        ValueError: it is empty.
    """
    if not str(value):
        raise ValueError("--output is empty; name a folder")
    return Path(str(value))


class SimulateConfig(CommandConfig, Cache):
    """Compare ways to train in a simulation: `spes simulate convergence --output runs/convergence`."""

    study: Annotated[ConfigFile, WORD]
    """YAML file with the study's base, seeds and variants."""
    output: Annotated[Path, BeforeValidator(_folder)] = Path("runs/study")
    """Folder of results, logs and table. Runs that are finished there are not repeated."""
    only: list[str] = []
    """Variants to run, such as `solo,ours`; all by default."""
    seeds: list[int] = []
    """Seeds of the study to run; all by default."""
    workers: PositiveInt | None = None
    """Runs at a time; by default one per CPU core, or one on a GPU."""
    report_only: bool = False
    """Run nothing; write the table again."""


class HealthConfig(CommandConfig):
    """Tell when a peer last joined or saved its work; exit with 1 if that is too long ago.

    A peer saves after every round that it commits.
    """

    output: Path
    """The peer's --output."""
    minutes: PositiveFloat | None = None
    """Longest time without a sign of life; by default three of the run's longest rounds. A paused peer is healthy."""


class CtlConfig(CommandConfig):
    """Pause, resume, limit or end a running peer, by its output folder.

    VERB is one of: status; link (to the page with buttons); pause [TIME, as in 2h]; resume; finish (hand over after
    this round, and end); leave (hand over now); set and rules with NAME=VALUE ..., an empty VALUE for the default.
    set: threads, slots, duty (as 50%), uplink_mbit. rules: hours, on_battery, programs, gb_a_day.
    """

    verb: Annotated[CtlVerb, WORD]
    """What to do."""
    values: Annotated[list[str], WORD] = []
    """TIME of a pause; NAME=VALUE words of set and rules."""
    output: Path | None = None
    """The peer's --output; by default the one folder in runs/ of a peer with a page."""
