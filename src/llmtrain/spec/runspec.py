"""The run file: what a user can ask for, key by key.

Every key has a default an expert would choose or none at all; what is left open here is chosen later, with a
reason that is printed. Reading, ``--set`` and error messages are in :mod:`llmtrain.spec.runfile`.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

RESERVED_ENV = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "CROSS_RANK",
        "CROSS_SIZE",
        "LOCAL_SIZE",
        "CUDA_VISIBLE_DEVICES",
        "DS_ENV_FILE",
        "LLMTRAIN_RUN_ID",
    }
)
"""Variables the launcher itself sets on every rank; a user's value would break the rank map."""


def _number(value: object) -> object:
    """YAML 1.1 reads ``1e-5`` as text; every other tool in this field reads a number."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value):
        return float(value)
    return value


def _text(value: object) -> object:
    """Numbers are fine as values of environment variables; booleans are ambiguous and refused by the type."""
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Number = Annotated[float, BeforeValidator(_number)]
Text = Annotated[str, BeforeValidator(_text)]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]


class Part(BaseModel):
    """A block of the run file: unknown keys are refused, values are not coerced, the result is frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class ModelPart(Part):
    """``model:`` the model that is tuned."""

    path: str | None = None
    """Hugging Face model directory, at the same absolute path on every host."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of the computation; ``auto`` is bf16 where the accelerators have it."""
    attention: Literal["auto", "flash_attention_2", "sdpa", "eager"] = "auto"
    """Attention kernel; ``auto`` is flash attention if it is installed on every host, else SDPA."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, on every host."""


DataFormat = Literal["auto", "messages", "text", "sharegpt", "alpaca", "prompt-completion"]


class MixPart(Part):
    """``data.mix:`` one of several data files."""

    path: str
    """Data file on the head."""
    format: DataFormat = "auto"
    """Format of its examples."""
    weight: Annotated[Number, Field(gt=0, le=1000)] = 1.0
    """Passes over it in one epoch: 2 sees each example twice, 0.25 a quarter of them."""


class DataPart(Part):
    """``data:`` what it is tuned on."""

    path: str | None = None
    """Data file on the head, or ``DIR/dataset_info.json#NAME``; copied to hosts that lack it."""
    mix: Annotated[tuple[MixPart, ...], BeforeValidator(_tuple)] = ()
    """Several files instead of ``path``: a list of ``{path, format, weight}``, weight being passes in one epoch."""
    format: DataFormat = "auto"
    """Format of the examples; ``auto`` recognises it."""
    max_length: Positive = 2048
    """Tokens of an example beyond which it is cut."""
    packing: bool = False
    """Several examples in one row of ``max_length``; the batch counts rows. Refused where the model mixes them."""
    eval: Annotated[float, Field(gt=0, lt=1)] | str | None = None
    """Share of the examples, or a file, for evaluation."""
    chat_template: str | None = None
    """Name of a built-in template or path of a Jinja file, used instead of the model's own."""


class BatchPart(Part):
    """``batch:`` global = micro x accumulation x ranks; give any two, or less."""

    global_: Positive | None = Field(default=None, alias="global")
    """Examples in one optimizer step, over all ranks."""
    micro: Positive | None = None
    """Examples in one forward pass on one rank."""
    accumulation: Positive | None = None
    """Forward passes in one optimizer step on one rank."""


class TrainingPart(Part):
    """``training:`` how it is tuned."""

    max_steps: Positive | None = None
    """Optimizer steps; wins over ``epochs``."""
    epochs: Annotated[Number, Field(gt=0)] | None = None
    """Passes over the data; 1 if neither is given."""
    learning_rate: Annotated[Number, Field(gt=0, lt=1)] = 1e-5
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate after the warm-up."""
    warmup_steps: NonNegative | None = None
    """Steps of linear warm-up; 3% of all steps if not given."""
    weight_decay: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Decoupled weight decay of AdamW."""
    max_grad_norm: Annotated[Number, Field(ge=0)] = 1.0
    """Gradients are clipped to this norm; 0 does not clip."""
    seed: NonNegative = 42
    """Seed of data order, dropout and initialisation."""
    save_steps: Positive | None = None
    """Steps between checkpoints; none if not given."""
    eval_steps: Positive | None = None
    """Steps between evaluations; once at the end if not given."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass (non-reentrant)."""
    loader_workers: NonNegative = 2
    """Processes that prepare batches, on each rank."""
    resume: str | None = None
    """Checkpoint directory on the hosts to go on from."""


class CheckpointPart(Part):
    """``checkpoint:`` how often a run saves, where to, and who else has it."""

    dir: str | None = None
    """Folder on the hosts under which each run has one for its checkpoints; the run folder if not given."""
    keep: Positive = 2
    """Checkpoints kept on each host, and copies of another host's."""
    save_minutes: Annotated[Number, Field(ge=0)] = 30.0
    """A checkpoint when the last is so old, beside `training.save_steps`; 0 for none."""
    copies: Literal["auto", "never"] = "auto"
    """`auto`: each host's files also go to the next host, in the background, where hosts share no disk."""
    copy_rate: str | None = None
    """At most this leaves each host for copies, as `100M` or `800mbit` a second; a tenth of the link if not given."""

    @field_validator("copy_rate")
    @classmethod
    def _rate(cls, value: str | None) -> str | None:
        if value is not None:
            parse_rate(value)
        return value

    @field_validator("dir")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"/[A-Za-z0-9_./=+-]{1,200}", value):
            raise ValueError("must be an absolute path on the hosts, of plain letters, digits and _ . / = + -")
        return value


LORA_LEARNING_RATE = 2e-4
"""What adapters want where a whole model wants 1e-5."""


class LoraPart(Part):
    """``lora:`` low-rank adapters that are trained instead of the weights."""

    rank: Positive | None = None
    """Columns of the adapters' factors; without it the whole model is trained. Peak learning rate 2e-4 if not given."""
    alpha: Annotated[Number, Field(gt=0)] | None = None
    """Adapters are added times alpha / rank; twice the rank if not given."""
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Share of the adapters' input that is dropped in training."""
    targets: Annotated[tuple[str, ...], BeforeValidator(_tuple)] = ()
    """Layers that get one, such as `[q_proj, v_proj]`; all linear ones but the output if not given."""


Bring = Literal["missing", "same", "never"]
"""``missing``: where a host has nothing at that path; ``same``: also where it has something else; ``never``."""


class SyncPart(Part):
    """``sync:`` what ``launch`` brings to hosts. It asks before it replaces anything, and for an environment."""

    model: Bring = "missing"
    """To hosts that have nothing there; `same` also replaces what differs; `never` leaves it to you."""
    data: Bring = "missing"
    """The same for data and evaluation files."""
    environment: Bring = "missing"
    """The same for the prefix that `environment` names, with the interpreter it was made from."""
    paths: Annotated[tuple[str, ...], BeforeValidator(_tuple)] = ()
    """Further files and folders (code, tokenizers) that hosts get as they are here, at the same path."""
    rate: str | None = None
    """At most this leaves here, as `100M` (bytes) or `800mbit` a second."""

    @field_validator("rate")
    @classmethod
    def _rate(cls, value: str | None) -> str | None:
        if value is not None:
            parse_rate(value)
        return value


class StallPart(Part):
    """``stall:`` when a run counts as standing still; it is ended, and the rank that is behind is named."""

    factor: Annotated[Number, Field(ge=2)] = 20.0
    """So many times the median step without a step."""
    floor: Annotated[Number, Field(gt=0)] = 120.0
    """Seconds, at least, whatever the factor says."""
    setup: Annotated[Number, Field(gt=0)] = 1800.0
    """Seconds without a sign while it loads, prepares data, evaluates or saves, and in its first steps."""


class RestartPart(Part):
    """``restart:`` what happens after a failure that starting again can cure."""

    max: NonNegative = 0
    """So often, from the last checkpoint that all hosts have; `--max-restarts`."""
    pause: Annotated[Number, Field(ge=0, le=3600)] = 10.0
    """Seconds before the first; twice as long before each next, at most five minutes."""
    spares: Annotated[tuple[str, ...], BeforeValidator(_tuple)] = ()
    """Hosts that take the place of lost ones, with the same slots."""


class HostPart(Part):
    """``per_host: NAME:`` what differs on one host."""

    python: str | None = None
    """Interpreter on this host."""
    network: str | None = None
    """Interface or subnet on this host."""
    node_dir: str | None = None
    """Working folder on this host."""


def _check_network(value: str) -> str:
    if "/" in value:
        ipaddress.IPv4Network(value, strict=False)
    elif not re.fullmatch(r"[A-Za-z0-9_.:@-]{1,15}", value):
        raise ValueError("neither a subnet like 10.0.0.0/24 nor the name of an interface")
    return value


class RunSpec(Part):
    """A whole run file. All paths are absolute once it has been read."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = "run"
    """Name of the run; part of its folder's name."""
    hosts: str | None = None
    """Hostfile."""
    config: str | None = None
    """Name of a preset, or a DeepSpeed YAML or JSON file."""
    output: str | None = None
    """Where the tuned model goes: ``DIR`` on the head, or ``HOST:DIR``."""
    node_dir: str | None = None
    """Working folder on the hosts; ``.llmtrain`` in the user's home there if not given."""
    python: str | None = None
    """Interpreter on the hosts; the one llmtrain runs under if not given."""
    environment: str | None = None
    """Prefix of a conda or virtual environment on the hosts; its ``bin/python`` is used."""
    setup: tuple[str, ...] = ()
    """Shell lines run on every host before the ranks, such as ``module load cuda``."""
    launcher: Literal["auto", "pdsh", "ssh"] = "auto"
    """``pdsh`` is DeepSpeed's own way; ``ssh`` starts its launcher on each host; ``auto`` is ``ssh`` without pdsh."""
    network: str | None = None
    """Subnet (CIDR) or interface for the traffic of the ranks."""
    ports: str | None = None
    """Range ``FIRST-LAST`` the master port is taken from, and in which hosts listen while something is synced."""
    lease: Annotated[Number, Field(ge=5)] = 120.0
    """Seconds a host goes on without hearing from this machine before it ends its ranks."""
    save_deadline: Annotated[Number, Field(ge=1)] = 300.0
    """Seconds that the save may take when a run is asked to stop (Ctrl-C once, `stop`, SIGTERM)."""
    notify: str | None = None
    """Shell command on this machine that gets every event of the run as JSON on its standard input."""
    stall: StallPart = StallPart()
    restart: RestartPart = RestartPart()
    model: ModelPart = ModelPart()
    data: DataPart = DataPart()
    batch: BatchPart = BatchPart()
    training: TrainingPart = TrainingPart()
    checkpoint: CheckpointPart = CheckpointPart()
    lora: LoraPart = LoraPart()
    sync: SyncPart = SyncPart()
    deepspeed: dict[str, Any] = {}
    """DeepSpeed keys laid over the preset."""
    env: dict[str, Text] = {}
    """Environment variables of the ranks."""
    env_file: str | None = None
    """File of ``NAME=VALUE`` lines; for secrets, since it can be kept private."""
    per_host: dict[str, HostPart] = {}
    """What differs on single hosts."""

    @model_validator(mode="before")
    @classmethod
    def _adapters_learn_faster(cls, values: Any) -> Any:
        lora = values.get("lora") if isinstance(values, dict) else None
        training = (values.get("training") or {}) if isinstance(values, dict) else None
        if isinstance(lora, dict) and lora.get("rank") and isinstance(training, dict):
            return {**values, "training": {"learning_rate": LORA_LEARNING_RATE, **training}}
        return values

    @field_validator("setup", mode="before")
    @classmethod
    def _lines(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(value.splitlines())
        return tuple(value) if isinstance(value, list) else value

    @field_validator("network")
    @classmethod
    def _network(cls, value: str | None) -> str | None:
        return None if value is None else _check_network(value)

    @field_validator("ports")
    @classmethod
    def _ports(cls, value: str | None) -> str | None:
        if value is not None:
            parse_ports(value)
        return value

    @field_validator("env")
    @classmethod
    def _env(cls, value: dict[str, str]) -> dict[str, str]:
        for key, text in value.items():
            check_env(key, text)
        return value

    @field_validator("node_dir")
    @classmethod
    def _node_dir(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"/[A-Za-z0-9_./=+-]{1,200}", value):
            raise ValueError(
                "must be an absolute path of plain letters, digits and _ . / = + - "
                "(it is the one argument that passes through a remote shell)"
            )
        return value

    @model_validator(mode="after")
    def _one_interpreter(self) -> RunSpec:
        if self.python and self.environment:
            raise ValueError("python and environment are both given; keep one")
        return self


def parse_ports(text: str) -> tuple[int, int]:
    """``FIRST-LAST`` as two port numbers.

    Raises:
        ValueError: not a range of unprivileged ports.
    """
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if match is None or not 1024 <= int(match[1]) <= int(match[2]) <= 65535:
        raise ValueError("must be FIRST-LAST with 1024 <= FIRST <= LAST <= 65535")
    return int(match[1]), int(match[2])


def parse_rate(text: str) -> float:
    """``100M`` or ``1.5G`` (bytes a second), ``200mbit`` (bits a second) as bytes per second.

    Raises:
        ValueError: not a rate.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)(bit|b|ib)?(/s|ps)?", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is not a rate: write for example 100M or 800mbit")
    factor = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]]
    return float(match[1]) * factor / (8 if match[3] == "bit" else 1)


def check_env(key: str, value: str) -> None:
    """Refuse names a shell or the launcher cannot take.

    Raises:
        ValueError: the name is malformed or reserved, or the value holds a NUL byte.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
        raise ValueError(f"{key!r} is not the name of an environment variable")
    if key in RESERVED_ENV:
        raise ValueError(f"{key} is set by the launcher itself")
    if "\0" in value:
        raise ValueError(f"the value of {key} holds a NUL byte")
