"""Options of bench_mfu.py: a dataclass for each mode, on top of train.py's options."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from bench import ROOT, Json
from core.options import IGNORED, Dtype, ModelOptions, TrainConfig
from core.runtime import pick_device
from core.settings import ALIASES, LINE, Loaded, UserError, gather, read
from model import GPTConfig

KVCache = Literal["auto", "none", "dynamic", "static", "paged"]
Constraint = Literal["tensor", "python", "regex"]
TrainingPath = Literal["float32", "bfloat16", "bfloat16-residual"]
BatchSize = PositiveInt | Literal["auto"]
Slug = Annotated[str, Field(pattern=r"^[\w.-]+$")]
NewTokens = Annotated[int, Field(ge=2)]

KERNEL = {"attention_backend", "attention_hub_kernels", "allow_mps_sdpa", "attention_window",
          "device", "dtype", "tf32", "deterministic", "seed"}  # fmt: skip
SIZES = {f.name for f in fields(ModelOptions)} - {"attention_backend", "dropout"}
MODEL = SIZES | {"attention_window", "dataset", "data_dir", "batch_size", "onednn"}
STEP = {"gradient_accumulation_steps", "gradient_checkpointing", "residual_dtype", "grad_clip"}
TRAINING = KERNEL | MODEL | STEP | {
    "dropout", "optimizer", "weight_decay", "beta1", "beta2", "compile", "compile_mode",
    "peak_tflops",
}  # fmt: skip
RATES = {"learning_rate", "min_lr", "decay_lr", "muon_rates"}
# A config file may be of a run: its options without effect are no error there, but these are.
CHANGING = {"document_mask", "context_parallel", "init_from"}
# Options of --vary: the loss and its FLOPs stay the same.
VARIED = ("residual_dtype", "gradient_checkpointing", "optimizer", "onednn", "compile_mode")
# Options without effect: without another one, and with another one.
NEEDS = {"bandwidth_gbs": "profile", "products_tflops": "profile"}
NEEDS |= {"records_dir": "record", "compile_mode": "compile"}
USELESS = {
    "backends": {"attention_backend"},
    "batch_sizes": {"batch_size"},
    "context_parallels": {"context_parallel"},
    "hf": {"rival", "profile", "vary", "weights"}
    | (MODEL | {"residual_dtype"}) - {"block_size", "batch_size"},
    "paths": {"backends", "residual_dtype"},
    "seeds": {"tolerance"},
    "vocab_size": {"dataset", "data_dir"},
    "windows": {"attention_window"},
}


@dataclass(frozen=True)
class Settings(TrainConfig):
    uses: ClassVar[set[str]] = set()  # train.py's options with an effect
    memory_gb: PositiveFloat | None = None  # CPU: limit of each process; none: 70 % of free
    json: bool = False  # one JSON object as the last line

    def __post_init__(self) -> None:
        super().__post_init__()
        GPTConfig.of(self, self.vocab_size or 1)  # checks the sizes

    def to(self, kind: type[Any], **changes: Any) -> Any:
        shared = {f.name: getattr(self, f.name) for f in fields(kind) if hasattr(self, f.name)}
        return kind(**shared | changes)


@dataclass(frozen=True)
class Measured(Settings):
    backends: tuple[str, ...] = ("all",)  # names from python -m attention or files, with commas
    minutes: PositiveFloat | None = None  # time limit; none: on CUDA 10
    timeout: PositiveFloat = 900.0  # seconds for one answer of a process
    record: Slug | None = None  # write bench/records/DATE_DEVICE_RECORD
    records_dir: str = "bench/records"  # the folder of the records

    def flat(self) -> Json:
        known = {k: v for k, v in asdict(self).items() if k in shown(type(self))}
        return {**known, "records_dir": Path(self.records_dir).name}


@dataclass(frozen=True)
class Rivals:
    batch_size: BatchSize = 12  # of a micro-batch; auto: the most that fit (decode: auto)
    rival: tuple[str, ...] = ()  # in the same rounds: nanogpt=PATH, hf
    hf: str | None = None  # a transformers model instead of ours: folder or name
    bandwidth_gbs: PositiveFloat | None = None  # GB/s, for MBU and rooflines; none: measured
    rounds: PositiveInt = 5  # of each backend, interleaved


@dataclass(frozen=True)
class Train(Rivals, Measured):
    """Training steps of every backend: speed, MFU, memory."""

    uses: ClassVar[set[str]] = TRAINING
    profile: bool = False  # kernels of a step by class, with rooflines
    vary: tuple[str, ...] = ()  # more rows: residual_dtype=autocast+compile_mode=default,...
    products_tflops: PositiveFloat | None = None  # rate of large matmuls; none: measured
    seconds: PositiveFloat = 1.0  # per round, at least one step
    warm_up_steps: PositiveInt = 2  # steps before the first round


@dataclass(frozen=True)
class Kernel(Measured):
    """Attention alone over a grid, against float64."""

    uses: ClassVar[set[str]] = KERNEL | {"n_head", "n_kv_head", "n_embd", "peak_tflops"}
    lengths: tuple[PositiveInt, ...] = ()  # tokens; none: 128 to 2048, on CUDA to 32768
    batch_sizes: tuple[PositiveInt, ...] = ()  # sequences; none: 1 and 4, on CUDA 1 and 8
    windows: tuple[PositiveInt | None, ...] = ()  # keys, or none; none: the model's
    rounds: PositiveInt = 5  # of each backend, interleaved
    seconds: PositiveFloat = 1.0  # five times the length of a round
    slowest_step: PositiveFloat = 2.0  # s; longer calls are skipped, as judged by shorter ones


@dataclass(frozen=True)
class Decode(Rivals, Measured):
    """Generation: tokens a second, first token, memory bandwidth."""

    uses: ClassVar[set[str]] = KERNEL | MODEL | {"compile"}
    batch_sizes: tuple[PositiveInt, ...] = ()  # sequences; none: 1 and 4, on CUDA 1 and 8
    prompts: tuple[PositiveInt, ...] = ()  # tokens; none: about block_size / 2
    new_tokens: NewTokens | None = None  # none: 16, on CUDA 128
    kv_caches: tuple[KVCache, ...] = ("none", "dynamic", "static", "paged")  # each of them
    constraint: tuple[Constraint | None, ...] = (None,)  # a logits processor, or a regex
    weights: Literal["dtype", "int8"] = "dtype"  # of our linear layers and head


@dataclass(frozen=True)
class Converge(Measured):
    """The same training with each backend, before you trust a faster kernel."""

    uses: ClassVar[set[str]] = TRAINING | RATES
    steps: Annotated[PositiveInt, Field(multiple_of=10)] = 100  # of a training
    seeds: PositiveInt = 1  # if above 1, their scatter is the tolerance
    paths: tuple[TrainingPath, ...] = ()  # precisions, instead of backends
    tolerance: PositiveFloat = 0.01  # of the final loss, relative


@dataclass(frozen=True)
class Runs:
    """Whole runs of train.py and of nanoGPT's train.py, on a CPU."""

    uses: ClassVar[set[str]] = {"attention_backend", "dtype", "compile"}
    rival: tuple[str, ...] = ()  # nanogpt=PATH
    sizes: tuple[Literal["a", "b", "c"], ...] = ("a", "b", "c")  # docs/SPEED.md
    rounds: PositiveInt = 5  # pairs of runs
    attention_backend: str = "auto"  # of our runs
    dtype: Dtype = "auto"  # of our runs
    compile: bool | None = None  # both; none: no


@dataclass(frozen=True)
class Qualify(Measured):
    """All of these on a new machine, in nine minutes."""

    uses: ClassVar[set[str]] = TRAINING | RATES
    minutes: PositiveFloat = 9.0  # time limit
    record: Slug = "qualify"  # write bench/records/DATE_DEVICE_RECORD
    rival: tuple[str, ...] = ()  # in the same rounds: nanogpt=PATH, hf
    stages: tuple[Annotated[int, Field(ge=1, le=6)], ...] = (1, 2, 3, 4, 5, 6)  # docs/MEASURE.md
    prompts: tuple[PositiveInt, ...] = ()  # tokens; none: about block_size / 2
    new_tokens: NewTokens | None = None  # none: 16, on CUDA 128
    kv_caches: tuple[KVCache, ...] = ("dynamic", "static", "paged")
    products_tflops: PositiveFloat | None = None  # rate of large matmuls; none: measured
    bandwidth_gbs: PositiveFloat | None = None  # GB/s, for MBU and rooflines; none: measured
    rounds: PositiveInt = 3  # of each backend, interleaved
    warm_up_steps: PositiveInt = 2  # training steps before the first round
    slowest_step: PositiveFloat = 2.0  # s; attention alone: longer calls are skipped


@dataclass(frozen=True)
class Plan(Settings):
    """A training step on GPUs that you do not have (docs/PLAN.md)."""

    uses: ClassVar[set[str]] = (MODEL - {"gelu", "onednn"}) | STEP | {
        "dtype", "tf32", "peak_tflops", "context_parallel",
    }  # fmt: skip
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
    kind.__name__.lower(): kind for kind in (Train, Kernel, Decode, Converge, Runs, Qualify, Plan)
}


def shown(kind: type[Any]) -> set[str]:
    return {f.name for f in fields(kind)} - {f.name for f in fields(TrainConfig)} | kind.uses


def varied(word: str) -> Json:
    """The options of a word of --vary."""
    if {o.partition("=")[0].replace("-", "_") for o in word.split("+")} - {*VARIED}:
        raise UserError(f"--vary={word}: expected {', '.join(VARIED)}, perhaps joined by +")
    return gather(TrainConfig, [f"--{option}" for option in word.split("+")]).settings


def load_config(argv: list[str], mode: str | None = None) -> Loaded[Any]:
    """The settings of a mode (None: train). Without a config file a CPU has config/bench_cpu.py."""
    kind = MODES[mode := mode or "train"]
    its = shown(kind)
    for name in (w.lstrip("-").partition("=")[0].replace("-", "_") for w in argv if w[:1] == "-"):
        name = ALIASES.get(name, name)
        of = [other for other, its_kind in MODES.items() if name in shown(its_kind)]
        of = of or ["train.py"] * hasattr(TrainConfig, name)
        if of and name not in its:
            raise UserError(f"--{name}: an option of {', '.join(of)}, not of mode {mode}")
    given = gather(kind, [w for w in argv if w not in ("-h", "--help")], ignored=IGNORED)
    device = given.settings.get("device", "auto")
    here = pick_device(device).type if issubclass(kind, Measured) else ""
    if here == "cpu" and {*given.origins.values()} <= {LINE}:
        argv = [os.path.relpath(ROOT / "config/bench_cpu.py"), *argv]
    loaded = read(kind, argv, shown=its, ignored=IGNORED)
    settings, origins = loaded.settings, loaded.origins
    on_line = {name for name, origin in origins.items() if origin == LINE}
    changed = {f.name for f in fields(kind) if getattr(settings, f.name) != f.default}
    for name in CHANGING - its & origins.keys() & changed:
        why = "; weights do not change the time, so give the sizes" * (name == "init_from")
        raise UserError(f"--{name}: not for mode {mode} ({origins[name]}){why}")
    values = vars(settings) | ({"compile": here == "cuda"} if settings.compile is None else {})
    several = {name for word in getattr(settings, "vary", ()) for name in varied(word)}
    for name in (on_line | several) & NEEDS.keys():
        if not values.get(NEEDS[name], True):
            raise UserError(f"--{name} needs --{NEEDS[name]}")
    if kind is Qualify and settings.rival and not {4, 5} & {*settings.stages}:
        raise UserError(f"--rival needs stage 4 or 5, got --stages={settings.stages}")
    # From a config file too:
    both = on_line | changed & {"rival", "profile", "vary", "weights"}
    both |= {"batch_size"} if getattr(settings, "batch_size", 1) == "auto" else set()
    for other in changed & USELESS.keys() - ({"vocab_size"} if "learning_rate" in its else set()):
        if lost := ", ".join(f"--{name}" for name in sorted(both & USELESS[other])):
            raise UserError(f"no effect with --{other}: {lost}")
    compiled = kind is Decode and "compile" in on_line and settings.compile
    if compiled and not {"auto", "static"} & {*settings.kv_caches}:
        raise UserError(f"--compile needs static in --kv_caches, got {settings.kv_caches}")
    if kind is Decode and "batch_size" in on_line and settings.batch_size != "auto":
        got = f"--batch_size={settings.batch_size}"
        raise UserError(f"{got}: mode decode has --batch_sizes, or --batch_size=auto")
    return loaded
