"""Options of bench_mfu.py: a dataclass for each mode, on top of train.py's options."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, PositiveFloat, PositiveInt

import data
from bench import ROOT, Json
from core.options import IGNORED, TrainConfig
from core.runtime import pick_device
from core.settings import Loaded, UserError, gather, read
from model import GPTConfig

C = TypeVar("C", bound="TrainConfig")
TrainingPath = Literal["float32", "bfloat16", "bfloat16-residual"]
KVCache = Literal["auto", "none", "dynamic", "static", "paged"]
Constraint = Literal["tensor", "python", "regex"]
BatchSize = PositiveInt | Literal["auto"]
NewTokens = Annotated[int, Field(ge=2)]
CPU_CONFIG = "config/bench_cpu.py"
RECORDS = "bench/records"
ALIASES = {"attn_implementation": "attention_backend", "backend": "backends"}
OTHERS = {name: why for name, why in IGNORED.items() if name not in ALIASES}

# Options of train.py, by what they have an effect on.
RUN = (
    "out_dir", "init_from", "eval_interval", "eval_iters", "eval_on_start", "eval_only",
    "log_interval", "profile_step", "keep_checkpoints", "sample_tokens", "wandb_log",
    "wandb_project", "wandb_run_name", "max_iters", "warmup_iters", "lr_decay_iters", "parallel",
    "shard_size", "async_checkpoint", "hang_timeout", "attention_fallback", "document_mask",
)  # fmt: skip
RATES = ("learning_rate", "min_lr", "decay_lr", "muon_rates")
OPTIMIZER = ("optimizer", "weight_decay", "beta1", "beta2", "dropout", "compile_mode")
STEP = ("gradient_accumulation_steps", "grad_clip", "gradient_checkpointing", "residual_dtype")
# A config file may be a run's: its options without effect are no error there, but these are.
CHANGING = {"document_mask", "context_parallel"}


@dataclass(frozen=True)
class Settings(TrainConfig):
    """Options of every mode that measures this machine."""

    without: ClassVar[tuple[str, ...]] = (*RUN, "context_parallel")  # train.py's, without effect
    backends: tuple[str, ...] = ("all",)  # names from python -m attention or files, with commas
    memory_gb: PositiveFloat | None = None  # CPU: limit of each process; none: 70 % of free
    minutes: PositiveFloat | None = None  # time limit; none: qualify 9, on CUDA 10
    timeout: PositiveFloat = 900.0  # seconds for one answer of a process
    json: bool = False  # one JSON object as the last line
    record: str | None = None  # write bench/records/DATE_DEVICE_RECORD
    records_dir: str = RECORDS  # the folder of the records

    def __post_init__(self) -> None:
        if self.init_from != "scratch":
            raise ValueError(
                f"init_from must be 'scratch', got {self.init_from!r}: the values of weights do "
                "not change the time, so give the sizes instead"
            )
        super().__post_init__()
        GPTConfig.of(self, self.vocab_size or 1)  # checks the sizes
        if not self.backends or not getattr(self, "kv_caches", True):
            raise ValueError("--backends, --kv_caches: expected at least one name, got none")
        if getattr(self, "hf", None) and (self.rival or getattr(self, "profile", False)):  # type: ignore[attr-defined]
            raise ValueError("--hf does not support --rival and --profile")

    def to(self, kind: type[C], **changes: Any) -> C:
        """Return another mode's or train.py's settings with these values and changes."""
        shared = {f.name: getattr(self, f.name) for f in fields(kind) if hasattr(self, f.name)}
        return kind(**shared | changes)

    def flat(self) -> Json:
        """Return the mode's options, as in a record."""
        known = {k: v for k, v in asdict(self).items() if k in shown(type(self))}
        return {**known, "records_dir": Path(self.records_dir).name}


@dataclass(frozen=True)
class Rivals:
    """Options of the modes that measure other models too."""

    batch_size: BatchSize = 12  # of a micro-batch in training; auto: the most that fit
    rival: tuple[str, ...] = ()  # in the same rounds: nanogpt=PATH, hf
    hf: str | None = None  # a transformers model instead of ours: folder or name
    bandwidth_gbs: PositiveFloat | None = None  # GB/s, for MBU and rooflines; none: measured
    rounds: PositiveInt = 5  # of each backend, interleaved


@dataclass(frozen=True)
class Train(Rivals, Settings):
    """Training steps of every backend: speed, MFU, memory."""

    without: ClassVar[tuple[str, ...]] = (*Settings.without, *RATES)
    profile: bool = False  # kernels of a step by class, with rooflines
    products_tflops: PositiveFloat | None = None  # rate of large matmuls; none: measured
    seconds: PositiveFloat = 1.0  # per round, at least one step
    warm_up_steps: PositiveInt = 2  # steps before the first round


@dataclass(frozen=True)
class Kernel(Settings):
    """Attention alone over a grid, against float64."""

    without: ClassVar[tuple[str, ...]] = (*Settings.without, *RATES, *OPTIMIZER, *STEP, "compile")
    lengths: tuple[PositiveInt, ...] = ()  # tokens; none: 128 to 2048, on CUDA to 32768
    batch_sizes: tuple[PositiveInt, ...] = ()  # sequences; none: 1 and 4, on CUDA 1 and 8
    windows: tuple[PositiveInt | None, ...] = ()  # keys, or none; none: the model's
    rounds: PositiveInt = 5  # of each backend, interleaved
    seconds: PositiveFloat = 1.0  # five times the length of a round
    slowest_step: PositiveFloat = 2.0  # s; longer calls are skipped


@dataclass(frozen=True)
class Decode(Rivals, Settings):
    """Generation: tokens a second, first token, memory bandwidth."""

    without: ClassVar[tuple[str, ...]] = (*Settings.without, *RATES, *OPTIMIZER, *STEP)
    batch_sizes: tuple[PositiveInt, ...] = ()  # sequences; none: 1 and 4, on CUDA 1 and 8
    prompts: tuple[PositiveInt, ...] = ()  # tokens; none: about block_size / 2
    new_tokens: NewTokens | None = None  # none: 16, on CUDA 128
    kv_caches: tuple[KVCache, ...] = ("none", "dynamic", "static", "paged")  # each of them
    constraint: tuple[Constraint | None, ...] = (None,)  # a logits processor, or a regex
    weights: Literal["dtype", "int8"] = "dtype"  # of our linear layers and head


@dataclass(frozen=True)
class Converge(Settings):
    """The same training with each backend, before you trust a faster kernel."""

    steps: Annotated[PositiveInt, Field(multiple_of=10)] = 100  # of a training
    seeds: PositiveInt = 1  # if above 1, their scatter is the tolerance
    paths: tuple[TrainingPath, ...] = ()  # precisions, instead of backends
    tolerance: PositiveFloat = 0.01  # of the final loss, relative

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.paths and self.backends != ("all",):
            raise ValueError("give either --paths or --backends")


@dataclass(frozen=True)
class Runs:
    """Whole runs of train.py and of nanoGPT's train.py, on a CPU."""

    without: ClassVar[tuple[str, ...]] = ()
    rival: tuple[str, ...] = ()  # nanogpt=PATH
    sizes: tuple[Literal["a", "b", "c"], ...] = ("a", "b", "c")  # docs/SPEED.md
    rounds: PositiveInt = 5  # pairs of runs
    attention_backend: str = "auto"  # of our runs
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of our runs
    compile: bool | None = None  # both; none: no
    device: Literal["auto", "cpu"] = "auto"  # cpu


@dataclass(frozen=True)
class Qualify(Settings):
    """All of these on a new machine, in nine minutes."""

    rival: tuple[str, ...] = ()  # in the same rounds: nanogpt=PATH, hf
    stages: tuple[Annotated[int, Field(ge=1, le=6)], ...] = (1, 2, 3, 4, 5, 6)  # docs/MEASURE.md
    prompts: tuple[PositiveInt, ...] = ()  # tokens; none: about block_size / 2
    new_tokens: NewTokens | None = None  # none: 16, on CUDA 128
    kv_caches: tuple[KVCache, ...] = ("dynamic", "static", "paged")
    products_tflops: PositiveFloat | None = None  # rate of large matmuls; none: measured
    bandwidth_gbs: PositiveFloat | None = None  # GB/s, for MBU and rooflines; none: measured
    rounds: PositiveInt = 3  # of each backend, interleaved
    warm_up_steps: PositiveInt = 2  # training steps before the first round
    slowest_step: PositiveFloat = 2.0  # s; longer calls of attention alone are skipped


@dataclass(frozen=True)
class Plan(Settings):
    """A training step on GPUs that you do not have (docs/PLAN.md)."""

    without: ClassVar[tuple[str, ...]] = (
        *RUN, *RATES, *OPTIMIZER, "compile", "backends", "minutes", "timeout", "record",
        "records_dir",
    )  # fmt: skip
    gpu: str | None = None  # "NVIDIA H200", or a part: H100
    gpus: tuple[PositiveInt, ...] = (8,)  # numbers of GPUs
    gpus_per_node: PositiveInt = 8  # joined by NVLink
    context_parallels: tuple[PositiveInt, ...] = ()  # rings of GPUs; none: context_parallel
    nvlink_gbs: PositiveFloat | None = None  # GB/s each way of a GPU; none: datasheet
    network_gbs: PositiveFloat | None = None  # the same between nodes; none: its server's
    products_tflops: PositiveFloat | None = None  # rate of large matmuls; none: the peak
    bandwidth_gbs: PositiveFloat | None = None  # GB/s of a GPU's memory; none: datasheet
    memory_gb: PositiveFloat | None = None  # of a GPU; none: datasheet


MODES: dict[str, type[Any]] = {
    "train": Train,
    "kernel": Kernel,
    "decode": Decode,
    "converge": Converge,
    "runs": Runs,
    "qualify": Qualify,
    "plan": Plan,
}


def shown(kind: type[Any]) -> set[str]:
    """Return the options that have an effect in a mode."""
    return {f.name for f in fields(kind)} - {*kind.without}


def load_config(argv: list[str], mode: str | None = None) -> Loaded[Any]:
    """Return the settings of a mode (None: train) and the origin of each given one.

    Without a config file a CPU uses config/bench_cpu.py: GPT-2 124M takes half an hour there.
    """
    kind = MODES[mode := mode or "train"]
    for name in (w.lstrip("-").partition("=")[0].replace("-", "_") for w in argv if w[:1] == "-"):
        modes = [other for other, its in MODES.items() if name in shown(its)]
        if mode not in modes and (modes or name in RUN):
            raise UserError(f"--{name}: for {', '.join(modes) or 'train.py'} only, got mode {mode}")
    how: Json = {"aliases": ALIASES if kind is not Runs else {}, "ignored": OTHERS}
    given, origins, _ = gather(kind, [w for w in argv if w not in ("-h", "--help")], **how)
    named = any(origin != "command line" for origin in origins.values())
    here = not named and mode not in ("plan", "runs")
    if here and pick_device(given.get("device", "auto")).type == "cpu":
        argv = [os.path.relpath(ROOT / CPU_CONFIG), *argv]
    loaded = read(kind, argv, shown=shown(kind), **how)
    settings = loaded.settings
    for name in CHANGING - shown(kind) & loaded.origins.keys():
        if getattr(settings, name) != getattr(TrainConfig, name):
            raise UserError(f"--{name}: not for mode {mode} ({loaded.origins[name]})")
    if getattr(settings, "records_dir", "") == RECORDS:  # also from another folder
        settings = replace(settings, records_dir=str(ROOT / RECORDS))
    return Loaded(settings, loaded.origins, loaded.notes)


def vocabulary(config: Settings) -> tuple[int, str]:
    """Return the vocabulary size and its source."""
    if config.vocab_size:
        return config.vocab_size, "--vocab_size"
    folder = data.find(config.dataset, config.data_dir)
    with suppress(UserError):
        V = data.read_meta(folder)["vocab_size"]
        return data.padded(V), f"the dataset in {folder}"
    return 50304, f"GPT-2's, since {folder} is not prepared (--vocab_size)"
