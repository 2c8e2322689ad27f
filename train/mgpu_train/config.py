"""What a node is told: the `train:` section of a run file, and `job.json`, one node's part in one attempt.

Both the operator and the node read these models, so a mistake in them is found before a machine is rented.
"""

from __future__ import annotations

import platform
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, StringConstraints, Tag, model_validator

from mgpu_train.health.gpus import Demand
from mgpu_train.launchers import TORCHRUN, LauncherOrName
from mgpu_train.names import RUN_ID
from mgpu_train.timeouts import Timeouts

RunId = Annotated[str, StringConstraints(pattern=RUN_ID)]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
# one argument or value: anything but NUL, which no operating system can carry
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$", max_length=65536)]
# one that an entry point brings, or "package.module:Class"
Brought = Annotated[
    str,
    StringConstraints(pattern=r"^([a-z][a-z0-9_-]*|[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*)$", max_length=256),
]
# where a machine finds that it is about to be taken: a file of its host's, or "package.module:Class" that asks
NoticeSource = Annotated[
    str, StringConstraints(pattern=r"^(file|none|[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*)$", max_length=256)
]
Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"]
FP8_CAPABILITY = 8.9  # compute capability of the first GPUs whose matrix units take numbers of 8 bits
ActivationCheckpointing = Literal["none", "selective", "full"]
OptimizerName = Literal["adamw", "adamw8bit", "muon"]
ZeroStage = Literal[1, 2, 3]
Writers = Literal["rank0", "all"]
MetricName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}$")]
BestMode = Literal["min", "max"]


def _word_or_number(value: Any) -> str:
    return "<auto>" if isinstance(value, str) else "<number>"


MicroBatch = Annotated[
    Annotated[int, Field(ge=1), Tag("<number>")] | Annotated[Literal["auto"], Tag("<auto>")],
    Discriminator(_word_or_number),  # a mistake is told of one of them alone
]


class Model(BaseModel):
    """The base of all data here: frozen, and every unknown key is a mistake. What validates a model is built when it is
    first used: a process needs few of them, and a start has to be quick."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")


# shapes by name; a key beside `preset` overrides its own. What they share with the models of these names is the size:
# positions are rotary and there are no biases in any of them
_LLAMA: dict[str, Any] = {"vocabulary": 128256, "kv_heads": 8, "mlp": "swiglu", "rotary_base": 500_000.0}
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-124m": {"layers": 12, "dim": 768, "heads": 12, "vocabulary": 50257, "tied": True},
    "llama-1b": {**_LLAMA, "layers": 16, "dim": 2048, "heads": 32, "mlp_dim": 8192, "tied": True},
    "llama-8b": {**_LLAMA, "layers": 32, "dim": 4096, "heads": 32, "mlp_dim": 14336},
    "llama-70b": {**_LLAMA, "layers": 80, "dim": 8192, "heads": 64, "mlp_dim": 28672},
}


class ModelConfig(Model):
    """The GPT's shape."""

    preset: Literal["gpt2-124m", "llama-1b", "llama-8b", "llama-70b"] | None = Field(
        None, description="all keys below as in a model of this size; those that are given override it (default: none)"
    )
    layers: int = Field(2, ge=1, le=200, description="transformer blocks")
    dim: int = Field(128, ge=8, le=65536, description="width of the residual stream")
    heads: int = Field(4, ge=1, le=1024, description="attention heads; divides dim")
    kv_heads: int | None = Field(
        None, ge=1, le=1024, description="heads of keys and values, which others share; divides heads (default: heads)"
    )
    mlp: Literal["relu2", "swiglu"] = Field(
        "relu2", description="relu2: squared ReLU, 4 x dim wide; swiglu: gated, 8/3 x dim, as many weights"
    )
    mlp_dim: int | None = Field(
        None, ge=8, le=1 << 20, description="width of the perceptron (default: as `mlp` says; swiglu's in steps of 32)"
    )
    vocabulary: int | None = Field(
        None,
        ge=2,
        le=1 << 24,
        description="tokens that are told apart; embedding and head are padded to a multiple of 64 "
        "(default: 256, the bytes; needed with `tokens`)",
    )
    rotary_base: float = Field(10_000.0, gt=1, description="base of the positions' angles")
    qk_norm: bool = Field(False, description="norms of queries and keys, head by head")
    tied: bool = Field(False, description="the head has the embedding's weights")

    @model_validator(mode="before")
    @classmethod
    def _as_preset(cls, given: Any) -> Any:
        name = given.get("preset") if isinstance(given, dict) else None
        return {**PRESETS.get(name, {}), **given} if isinstance(name, str) else given

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.dim % self.heads:
            raise ValueError(f"heads ({self.heads}) does not divide dim ({self.dim})")
        if self.dim // self.heads % 2:
            raise ValueError(f"dim / heads ({self.dim // self.heads}) is odd: rotary positions turn pairs")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads ({self.kv_heads}) does not divide heads ({self.heads})")
        return self

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.heads

    @property
    def hidden(self) -> int:
        """Width of the perceptron; that of SwiGLU is a multiple of 32."""
        return self.mlp_dim or (4 * self.dim if self.mlp == "relu2" else -(-8 * self.dim // 96) * 32)

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding and of the head: those after the vocabulary's are never a target, nor looked up."""
        return -(-(self.vocabulary or 256) // 64) * 64

    @property
    def parameters(self) -> int:
        """How many numbers are learned: blocks, embedding, head, norms."""
        norms = (2 * self.layers + 1) * self.dim + (2 * self.head_dim * self.layers if self.qk_norm else 0)
        return self.matrices + (0 if self.tied else self.padded_vocabulary * self.dim) + norms

    @property
    def matrices(self) -> int:
        """Of these, those of matrices that each token is multiplied by; an embedding alone is looked up."""
        attention = 2 * self.dim**2 + 2 * self.dim * (self.kv_heads or self.heads) * self.head_dim
        mlp = (2 if self.mlp == "relu2" else 3) * self.dim * self.hidden
        return self.layers * (attention + mlp) + self.padded_vocabulary * self.dim

    def flops(self, seq_len: int) -> float:
        """Of one token, forward and backward, in the manner of PaLM (Chowdhery et al. 2022, appendix B): 6 of each
        number of `matrices`, and 12 of each layer, width and position of attention, as if it looked ahead, too."""
        return 6.0 * self.matrices + 12.0 * self.layers * self.dim * seq_len


class LmOptions(Model):
    """What task `lm` may be told."""

    seq_len: int = Field(128, ge=8, le=1 << 20, description="task lm: bytes per sequence; with `tokens`, tokens")
    text: Text | None = Field(
        None,
        description="task lm: folder of text files on the node (default: the sources of Python's standard library)",
    )
    tokens: Text | None = Field(
        None,
        description="task lm: folder of token files on the node, in place of `text`: what `python -m "
        "mgpu_train.data.tokenize` made, or train.bin and val.bin as nanoGPT has them (default: bytes of `text`)",
    )
    model: ModelConfig = Field(default_factory=lambda: ModelConfig())  # type: ignore[call-arg]

    @model_validator(mode="after")
    def _one_source(self) -> LmOptions:
        if self.tokens is not None and self.text is not None:
            raise ValueError("`text` and `tokens` both name what is learned from: leave one of them out")
        if self.tokens is not None and self.model.vocabulary is None:
            raise ValueError(
                "`model.vocabulary` is needed with `tokens`, since the model's size follows from it: index.json beside "
                "the token files says it, or a preset does"
            )
        if self.tokens is None and self.model.padded_vocabulary < 256:
            raise ValueError(f"`model.vocabulary` ({self.model.vocabulary}) is less than the 256 bytes that text has")
        return self


class EarlyStopping(Model):
    """When a run ends before its last step."""

    metric: MetricName = Field("loss", description="which value of the validations is watched, by the task's name")
    patience: int = Field(5, ge=1, description="validations in a row without a better value, after which training ends")
    min_delta: float = Field(0.0, ge=0, description="what is less than this better is not better")
    mode: BestMode = Field(
        "min", description="min: smaller is better; max: larger; needed with what is called accuracy"
    )


class Training(Model):
    """What the trainer is told, whatever the task is."""

    task: Brought = Field(
        "lm",
        description="what is trained; lm: language model on bytes or tokens; hf: models of transformers; vision: "
        "classes of images; diffusion: images out of noise; recommender: ratings; package.module:Class: yours",
    )
    strategy: Brought = Field(
        "ddp",
        description="single: one copy of the model; ddp: replicas; fsdp: sharded (FSDP2); hsdp: replicas of shards; "
        "deepspeed: DeepSpeed's ZeRO",
    )
    zero_stage: ZeroStage = Field(
        2,
        description="strategy deepspeed: what ranks share out; 1: the optimizer's state; 2: gradients, too; 3: "
        "parameters, too",
    )
    tensor_parallel: int = Field(1, ge=1, description="ranks that share each layer; neighbours of one node")
    pipeline_parallel: int = Field(1, ge=1, description="stages that the model's blocks are cut into (1F1B)")
    context_parallel: int = Field(
        1,
        ge=1,
        description="ranks that share each sequence: they have the model, or shards of it, and a part of the tokens",
    )
    replicas: int | None = Field(
        None, ge=2, description="strategy hsdp: groups of ranks that have a copy of the model each (default: nodes)"
    )
    activation_checkpointing: ActivationCheckpointing = Field(
        "none",
        description="what each block keeps for its backward pass; none: all; selective: its input and what matrix "
        "products gave; full: its input",
    )
    compile: bool = Field(False, description="compiles the model, block by block (torch.compile)")
    steps: int = Field(300, ge=1, description="optimizer steps in all")
    global_batch: int = Field(32, ge=1, description="samples (lm: sequences) per optimizer step, over all ranks")
    micro_batch: MicroBatch | None = Field(
        None,
        description="samples per forward pass of one rank; the rest is accumulated. auto: as many as fit into its "
        "memory, by doubling (default: no accumulation)",
    )
    precision: Precision = Field(
        "auto",
        description="what is computed in: fp32, tf32, bf16, fp16 with a scaled loss, or fp8: bf16 whose blocks have "
        "linear layers of 8 bits, on GPUs from L4 and H100 on; auto: bf16 on GPUs that have it, fp16 on older ones, "
        "fp32 on a CPU. Parameters are fp32",
    )
    seed: int = Field(1, ge=0, description="of weights and of the data order")
    optimizer: OptimizerName = Field(
        "adamw",
        description="adamw; adamw8bit: with moments of 8 bits (torchao); muon: for the matrices of the model's blocks, "
        "and adamw for the rest",
    )
    lr: float = Field(6e-3, gt=0, description="peak learning rate")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="the cosine schedule ends at this share of lr")
    lr_from: float | None = Field(
        None,
        gt=0,
        description="the rate grows exponentially from this to `lr`, over all steps: what `--lr-range` makes of a run "
        "file (default: warm-up, and a cosine)",
    )
    warmup_steps: int = Field(10, ge=0, description="optimizer steps of linear warm-up")
    weight_decay: float = Field(
        0.1, ge=0, description="on what has two dimensions or more (matrices, kernels, tables): on no bias and no gain"
    )
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="decay of a moving average of the parameters, validated beside them (default: none)",
    )
    clip_norm: float = Field(1.0, gt=0, description="largest gradient norm")
    validate_every: int = Field(100, ge=1, description="optimizer steps between validations")
    validate_batches: int = Field(
        8,
        ge=1,
        description="global batches per validation, always the same ones; where there are fewer samples, each of them "
        "once (with `compile` or `pipeline_parallel`: until the last global batch is whole)",
    )
    early_stopping: EarlyStopping | None = Field(
        None, description="training ends when validation has stopped getting better (default: at the last step)"
    )
    log_every: int = Field(1, ge=1, description="optimizer steps between two lines of metrics")
    threads: int | None = Field(None, ge=1, description="CPU threads per process (default: the cores shared out)")
    loader_threads: int | None = Field(
        None,
        ge=1,
        description="threads per process that make batches (default: 1; with GPUs half of the process's cores, at most "
        "8)",
    )
    max_skipped: int = Field(
        5,
        ge=0,
        description="steps in a row whose loss or gradient is no finite number, and that change nothing: one more ends "
        "the run",
    )
    options: dict[str, JsonValue] = Field({}, description="options of the task, by its own names (default: none)")

    @model_validator(mode="after")
    def _rates_grow(self) -> Training:
        if self.lr_from is not None and self.lr_from >= self.lr:
            raise ValueError(
                f"`lr_from` ({self.lr_from:g}) has to be below `lr` ({self.lr:g}), up to which the rate grows"
            )
        return self

    @model_validator(mode="after")
    def _layers_are_whole(self) -> Training:
        said = {"optimizer": self.optimizer, "precision": self.precision}
        whole = {key: value for key, value in said.items() if value in ("adamw8bit", "fp8")}
        if whole and self.tensor_parallel > 1:
            raise ValueError(
                f"{' and '.join(f'`{key}: {value}`' for key, value in whole.items())}: not with `tensor_parallel`, "
                "which shares a layer's numbers among ranks. Take `strategy: fsdp` in its place, which gathers layers"
            )
        lora = self.options.get("lora")
        if self.precision == "fp8" and isinstance(lora, dict) and lora.get("quantize_base"):
            raise ValueError(
                "`precision: fp8` computes the layers that `options.lora.quantize_base` keeps in 4 bits: take bf16, or "
                "leave `quantize_base` out"
            )
        return self

    @model_validator(mode="after")
    def _deepspeed_can(self) -> Training:
        lora, whole = self.options.get("lora"), self.zero_stage < 3
        cannot = {
            f"`precision: {self.precision}` (take bf16, or fp32)": self.precision in ("fp16", "fp8"),
            f"`optimizer: {self.optimizer}` (take adamw)": self.optimizer != "adamw",
            "`micro_batch: auto` (say how many samples)": self.micro_batch == "auto",
            "`compile`": self.compile,
            "`ema` with `zero_stage: 3` (take 2)": self.ema is not None and not whole,
            "`activation_checkpointing: selective` with `zero_stage: 3` (take full)": (
                self.activation_checkpointing == "selective" and not whole
            ),
            "`options.lora.quantize_base`": isinstance(lora, dict) and bool(lora.get("quantize_base")),
        }
        if self.strategy == "deepspeed" and any(cannot.values()):
            said = ", ".join(key for key, refused in cannot.items() if refused)
            raise ValueError(f"`strategy: deepspeed` does not go with {said}. Strategy fsdp goes with all of it")
        return self

    @model_validator(mode="after")
    def _pipelines_are_told(self) -> Training:
        if self.micro_batch == "auto" and self.pipeline_parallel > 1:
            raise ValueError(
                "`micro_batch: auto` does not go with `pipeline_parallel`: larger micro-batches are fewer, and leave "
                "stages idle. Say how many samples: at least as many micro-batches as stages"
            )
        return self


class TrainConfig(LmOptions, Training):
    """The `train:` section: the bundled trainer. The options of task lm stand in it as they always did."""

    @property
    def task_options(self) -> dict[str, Any]:
        """What the task is told."""
        if self.task != "lm":
            return self.options
        return {**self.model_dump(include=set(LmOptions.model_fields)), **self.options}


class Retention(Model):
    """Which committed checkpoints the store keeps: the newest, some at intervals, and those with the best metric."""

    keep_last: int = Field(default=3, ge=1, description="newest committed checkpoints kept in the store")
    keep_every_hours: float | None = Field(
        default=None, gt=0, description="kept beside them: one every so many hours (default: none)"
    )
    keep_best: int | None = Field(
        default=None, ge=1, description="kept beside them: so many with the best `best_metric` (default: none)"
    )
    best_metric: MetricName = Field(
        default="validation_loss", description="which value is compared: one of the checkpoint's meta.json"
    )
    best_mode: BestMode = Field(
        default="min",
        description="min: the smallest value is the best; max: the largest; needed with what is called accuracy",
    )


class CheckpointTarget(Retention):
    """Where checkpoints go and how often they are made; the run file's `checkpoint:` with its defaults filled in."""

    to: Text = Field(description="s3://bucket/prefix or file:///folder; a run's part is <to>/<run id>/")
    every_steps: int | None = Field(None, ge=1, description="optimizer steps between checkpoints")
    every_minutes: float | None = Field(None, gt=0, description="minutes between checkpoints")
    max_upload_mib_per_s: float | None = Field(
        default=None, ge=1, description="MiB per second of one node; None: no cap"
    )
    writers: Writers = Field(description="which nodes have a part in a checkpoint")

    @property
    def max_bytes_per_s(self) -> int | None:
        """The cap in bytes."""
        cap = self.max_upload_mib_per_s
        return None if cap is None else int(cap * (1 << 20))


class Resume(Model):
    """The one checkpoint that every node of an attempt starts from."""

    checkpoint_id: Text
    seq: int = Field(ge=0, description="number of its entry in the commit log")


class DataItem(Model):
    """Files that a node fetches before the launcher starts."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    source: Text = Field(alias="from", description="s3://bucket/prefix or file:///folder")
    to: Text = Field(
        description="folder on the node; relative to the work folder, or absolute on machines of one's own"
    )


class Trial(Model):
    """A short training in fresh processes: so many steps of `train` as it is changed here."""

    name: Text = Field(description="what a row of the table is called")
    nodes: int | None = Field(default=None, ge=1, description="the first so many nodes (default: all)")
    processes_per_node: int | None = Field(default=None, ge=1, description="of each of these nodes (default: all)")
    train: dict[str, JsonValue] = Field(
        default={}, description="keys of `train` that are otherwise here (default: none)"
    )
    refused: Text = Field(default="", description="why it cannot be trained so, known beforehand (default: it can)")
    may_lack_memory: bool = Field(
        default=False, description="fewer processes share the model than the run has: without room for it nothing broke"
    )


Purpose = Literal["smoke", "tune", "lr-range"]
MOST_TRIES = 256  # of one run


class Trials(Model):
    """What is tried, one after the other, on the machines of one attempt."""

    purpose: Purpose = Field(
        description="smoke: the first that fails ends it, and the run fails; tune: the fastest is looked for; "
        "lr-range: the loss is looked at while the rate grows"
    )
    steps: int = Field(default=8, ge=1, le=1000, description="optimizer steps that are measured of each")
    tries: tuple[Trial, ...] = Field(min_length=1, max_length=MOST_TRIES, description="in their order")


Outcome = Literal["ok", "refused", "out of memory", "failed", "too slow"]


class Rate(Model):
    """One step of a learning-rate range test."""

    lr: float
    loss: float = Field(description="of this step")
    smooth: float = Field(description="the mean loss of the steps around it")


class Tried(Model):
    """What became of a trial. None: it did not come so far, or nobody knows."""

    name: Text
    train: dict[str, JsonValue] = Field(default={}, description="keys of `train` that were otherwise")
    world_size: int = Field(description="processes")
    outcome: Outcome
    said: Text = Field(default="", description="the trainer's own last words; empty: all went well")
    seconds: float = Field(default=0.0, ge=0, description="of wall time, from the start of its processes to their end")
    unit: Text = Field(default="", description="what is counted: tokens, images")
    units_per_s: float | None = Field(default=None, description="of all processes, in the median step")
    memory_gib: float | None = Field(
        default=None, description="of the rank that took most: of its GPU, or of its process"
    )
    mfu: float | None = Field(default=None, description="share of the GPUs' peak that the model's own arithmetic took")
    rates: tuple[Rate, ...] = Field(default=(), description="lr-range: of each step that has changed something")
    lr: float | None = Field(default=None, description="lr-range: the rate at which the loss falls fastest")


class TrialResults(Model):
    """`trials.json`: what became of each trial so far."""

    version: Literal[1] = 1
    purpose: Purpose
    rows: tuple[Tried, ...] = ()


class Share(Model):
    """The part of each node that a run has beside others."""

    slots: tuple[int, ...] = Field(min_length=1, description="numbers of GPUs; of places, where there are none")
    of: int = Field(ge=1, description="so many the node has")
    gpus: bool = Field(description="whether they are GPUs")


class Job(Model):
    """`job.json`: one node's part in one attempt. Holds nothing secret."""

    version: Literal[1] = 1
    run_id: RunId
    attempt: int = Field(ge=1)
    writer: Text = Field(description="token of this attempt in the commit log; the same for all nodes")
    node_rank: int = Field(ge=0)
    nodes: int = Field(ge=1)
    processes_per_node: int = Field(ge=1)
    gpus: int = Field(default=0, ge=0, description="that the node has to have: with fewer nothing is started")
    share: Share | None = Field(default=None, description="what it has of the node; None: all")
    master_addr: Text = Field(description="node 0, as the other nodes reach it")
    master_port: int = Field(ge=1, le=65535)
    addresses: tuple[Text, ...] = Field(
        (), description="of all nodes, by rank, as they reach each other (default: all are at `master_addr`)"
    )
    peer_port: int | None = Field(
        default=None, ge=1, le=65535, description="where node 0's agent hears the others'; None: they do not speak"
    )
    preflight: bool = Field(default=True, description="machines are examined before the program is started")
    preflight_port: int | None = Field(
        default=None, ge=1, le=65535, description="where the ranks meet for that; None: nothing is measured"
    )
    launcher: LauncherOrName = Field(default=TORCHRUN, description="what starts the program; one of ours is its name")
    train: TrainConfig | None = None
    command: tuple[Text, ...] | None = Field(None, description="the user's program: what the launcher is given")
    trials: Trials | None = Field(None, description="what is tried of `train`; None: it is trained")
    env: dict[EnvName, Text] = Field(default_factory=dict, description="for the launcher; nothing secret")
    secrets: tuple[EnvName, ...] = Field((), description="names; the values come by standard input, once")
    workdir: Text | None = Field(
        None, description="folder under the run's folder on the node that holds the user's code"
    )
    requirements: Text | None = Field(None, description="a requirements file in the work folder")
    data: tuple[DataItem, ...] = ()
    setup: tuple[Text, ...] = Field((), description="lines of a shell, run before the program")
    outputs: tuple[Text, ...] = Field((), description="files of the work folder that are kept: globs, or folders")
    checkpoint: CheckpointTarget | None = Field(None, description="None: `checkpoint: none`")
    resume: Resume | None = None
    lease_file: Text | None = Field(None, description="what the agent renews unless the attempt hangs; None: no lease")
    notices: NoticeSource = Field(
        default="file",
        description="where it stands that the machine is about to be taken: `file`, `none`, or package.module:Class, a "
        "`mgpu_train.agent.machine.notices.Source` of the node's own Python",
    )
    notice_file: Text | None = Field(None, description="with `notices: file`: that file; None: there is none")
    timeouts: Timeouts = Field(default_factory=lambda: Timeouts())  # type: ignore[call-arg]

    @model_validator(mode="after")
    def _one_program(self) -> Job:
        if (self.train is None) == (self.command is None):
            raise ValueError("exactly one of `train` and `command` is given")
        if self.node_rank >= self.nodes:
            raise ValueError(f"node_rank {self.node_rank} of {self.nodes} nodes")
        if self.addresses and len(self.addresses) != self.nodes:
            raise ValueError(f"{len(self.addresses)} addresses of {self.nodes} nodes")
        return self

    @property
    def world_size(self) -> int:
        """Processes of all nodes."""
        return self.nodes * self.processes_per_node

    @property
    def node(self) -> str:
        """Which node this is, in words."""
        return f"node {self.node_rank} ({platform.node()})"

    @property
    def demand(self) -> Demand | None:
        """The GPUs that this node has to have, if any."""
        return Demand(self.gpus, self.node, self.timeouts.gpus_s) if self.gpus else None


class Secrets(Model):
    """What `agent start` reads from standard input and hands on by a pipe: on no disk, in no argument, in no job."""

    env: dict[EnvName, Text] = Field(default_factory=dict, description="the run's secrets, for the launcher")
    store: dict[EnvName, Text] = Field(default_factory=dict, description="AWS_* variables, for the agent alone")


class OutputFile(Model):
    """One output; its path is relative to the work folder."""

    path: Text
    size: int = Field(ge=0, description="bytes")


class OutputList(Model):
    """`outputs.json`: what an attempt has left in the folder beside it."""

    version: Literal[1] = 1
    attempt: int
    files: tuple[OutputFile, ...]
    problems: tuple[str, ...] = Field((), description="what could not be kept, and why")
    unmatched: tuple[str, ...] = Field((), description="patterns that name no file of this node")
