"""Options of bench_mfu.py: its own, and train.py's for the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

import attention
import data
from bench import ROOT, Json
from core.options import IGNORED, TrainConfig
from core.runtime import pick_device
from core.settings import Loaded, UserError, gather, read
from model import GPTConfig

CPU_CONFIG = "config/bench_cpu.py"
RECORDS = "bench/records"
ALIASES = {"attn_implementation": "attention_backend", "backend": "backends"}
OTHERS = {name: why for name, why in IGNORED.items() if name not in ALIASES}
TrainingPath = Literal["float32", "bfloat16", "bfloat16-residual"]
KVCache = Literal["auto", "none", "dynamic", "static", "paged"]
Constraint = Literal["tensor", "python", "regex"]
BatchSize = PositiveInt | Literal["auto"]

MODES = {
    "train": "training steps of every backend: speed, MFU, memory",
    "kernel": "attention alone over a grid, against float64",
    "decode": "generation: tokens a second, first token, memory bandwidth",
    "converge": "the same training with each backend, before you trust a faster kernel",
    "runs": "whole runs of train.py and of nanoGPT's train.py, on a CPU",
    "qualify": "all of these on a new machine, in nine minutes",
    "plan": "a training step on GPUs that you do not have (docs/PLAN.md)",
}


@dataclass(frozen=True)
class Knobs:
    """Measure attention backends: python bench_mfu.py [MODE] [config/FILE.py] [--option=value]."""

    # --- what is measured ---
    batch_size: BatchSize = 12  # sequences of a micro-batch; auto: the most that fit
    backends: tuple[str, ...] = ("all",)  # names from python -m attention or files, with commas
    rival: tuple[str, ...] = ()  # in the same rounds: nanogpt=PATH, hf
    hf: str | None = None  # a transformers model instead of ours: folder or name
    profile: bool = False  # time of a step by its parts, with rooflines
    products_tflops: PositiveFloat | None = None  # rate of large matmuls; none: measured
    lengths: tuple[PositiveInt, ...] = ()  # tokens; none: 128 to 2048, on CUDA to 32768
    batch_sizes: tuple[PositiveInt, ...] = ()  # sequences; none: 1 and 4, on CUDA 1 and 8
    windows: tuple[PositiveInt | None, ...] = ()  # keys, or none; none: the model's
    prompts: tuple[PositiveInt, ...] = ()  # tokens; none: about block_size / 2
    kv_caches: tuple[KVCache, ...] = ("none", "dynamic", "static", "paged")
    constraint: tuple[Constraint | None, ...] = (None,)  # a logits processor, or a regex
    weights: Literal["dtype", "int8"] = "dtype"  # of our linear layers and head
    new_tokens: Annotated[int, Field(ge=2)] | None = None  # none: 16, on CUDA 128
    steps: Annotated[PositiveInt, Field(multiple_of=10)] = 100  # of a training
    seeds: PositiveInt = 1  # if above 1, their scatter is the tolerance
    paths: tuple[TrainingPath, ...] = ()  # precisions, instead of backends
    tolerance: PositiveFloat = 0.01  # of the final loss, relative
    sizes: tuple[Literal["a", "b", "c"], ...] = ("a", "b", "c")  # of runs: docs/SPEED.md
    stages: tuple[Annotated[int, Field(ge=1, le=6)], ...] = (1, 2, 3, 4, 5, 6)  # of qualify
    # --- what is planned ---
    gpu: str | None = None  # "NVIDIA H200", or a part: H100
    gpus: tuple[PositiveInt, ...] = (8,)  # numbers of GPUs
    gpus_per_node: PositiveInt = 8  # joined by NVLink
    context_parallels: tuple[PositiveInt, ...] = ()  # none: context_parallel; 1: also 2, 4, 8
    nvlink_gbs: PositiveFloat | None = None  # GB/s each way of a GPU; none: datasheet
    network_gbs: PositiveFloat | None = None  # the same between nodes; none: its server's
    # --- how it is measured ---
    rounds: PositiveInt = 5  # of each backend, interleaved
    seconds: PositiveFloat = 1.0  # per round, at least one step; kernel: a fifth of it
    warm_up_steps: PositiveInt = 2  # steps before the first round
    memory_gb: PositiveFloat | None = None  # plan: per GPU; CPU: per worker, none: 70 % of free
    bandwidth_gbs: PositiveFloat | None = None  # GB/s, for MBU and rooflines; none: measured
    slowest_step: PositiveFloat = 2.0  # s; longer calls of kernel are skipped
    minutes: PositiveFloat | None = None  # time limit; none: qualify 9, on CUDA 10
    timeout: PositiveFloat = 900.0  # seconds for one answer of a process
    # --- what is kept ---
    json: bool = False  # one JSON object as the last line
    record: str | None = None  # write bench/records/DATE_DEVICE_RECORD
    records_dir: str = RECORDS  # the folder of the records


@dataclass(frozen=True)
class BenchConfig(Knobs, TrainConfig):
    __doc__ = Knobs.__doc__  # of --help

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("kv_caches", "backends"):
            if not getattr(self, name):
                raise ValueError(f"{name} must name at least one")
        if self.init_from != "scratch":
            raise ValueError(
                f"init_from must be 'scratch', got {self.init_from!r}: the values of weights do "
                "not change the time, so give the sizes instead"
            )

    def training(self, **changes: Any) -> TrainConfig:
        """Return train.py's settings with these changes."""
        return TrainConfig(**{f.name: getattr(self, f.name) for f in OF_TRAIN} | changes)

    def flat(self) -> Json:
        """Return all options, as in a record."""
        return {**asdict(self), "records_dir": Path(self.records_dir).name}


OF_TRAIN = fields(TrainConfig)
# Options of train.py for a run, which have no effect here.
OF_A_RUN = (
    "out_dir", "init_from", "eval_interval", "eval_iters", "eval_on_start", "eval_only",
    "log_interval", "profile_step", "keep_checkpoints", "sample_tokens", "wandb_log",
    "wandb_project", "wandb_run_name", "max_iters", "warmup_iters", "lr_decay_iters", "parallel",
    "shard_size", "async_checkpoint", "hang_timeout", "attention_fallback",
)  # fmt: skip
TRAINING = ("train", "converge", "qualify")
MEASURED = (*TRAINING, "kernel", "decode")
# A config file may be a run's: its other options without effect are no error there, these are.
CHANGING = ("document_mask", "context_parallel")
# Options of some modes only; all others belong to every mode.
OF_MODES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*OF_A_RUN, "document_mask"), ()),
    **dict.fromkeys(("profile",), ("train",)),
    **dict.fromkeys(("hf",), ("train", "decode")),
    **dict.fromkeys(("rival",), ("train", "decode", "runs", "qualify")),
    **dict.fromkeys(("lengths", "windows"), ("kernel",)),
    **dict.fromkeys(("slowest_step",), ("kernel", "qualify")),
    **dict.fromkeys(("rounds",), ("train", "kernel", "decode", "runs", "qualify")),
    **dict.fromkeys(("seconds",), ("train", "kernel")),
    **dict.fromkeys(("warm_up_steps",), ("train", "qualify")),
    **dict.fromkeys(("minutes", "timeout", "record", "records_dir"), MEASURED),
    **dict.fromkeys(("bandwidth_gbs",), ("train", "decode", "qualify", "plan")),
    **dict.fromkeys(("batch_sizes",), ("kernel", "decode")),
    **dict.fromkeys(("prompts", "kv_caches", "new_tokens"), ("decode", "qualify")),
    **dict.fromkeys(("weights", "constraint"), ("decode",)),
    **dict.fromkeys(("steps", "seeds", "paths", "tolerance"), ("converge",)),
    **dict.fromkeys(("learning_rate", "min_lr", "decay_lr"), ("converge", "qualify")),
    **dict.fromkeys(("muon_rates",), ("converge", "qualify")),
    **dict.fromkeys(("optimizer", "weight_decay", "beta1", "beta2", "dropout"), TRAINING),
    **dict.fromkeys(("compile_mode",), TRAINING),
    **dict.fromkeys(("compile",), (*TRAINING, "decode", "runs")),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_clip"), (*TRAINING, "plan")),
    **dict.fromkeys(("gradient_checkpointing", "residual_dtype"), (*TRAINING, "plan")),
    **dict.fromkeys(("stages",), ("qualify",)),
    **dict.fromkeys(("sizes",), ("runs",)),
    **dict.fromkeys(("gpu", "gpus", "gpus_per_node", "context_parallels"), ("plan",)),
    **dict.fromkeys(("nvlink_gbs", "network_gbs"), ("plan",)),
    **dict.fromkeys(("context_parallel",), ("plan",)),
    **dict.fromkeys(("products_tflops",), ("train", "qualify", "plan")),
}
# Options that the help shows without a mode.
USUAL = (
    "batch_size", "backends", "rival", "hf", "profile", "lengths", "kv_caches", "rounds",
    "seconds", "minutes", "json", "record", "block_size", "n_layer", "n_head", "n_embd",
    "attention_window", "device", "dtype", "compile",
)  # fmt: skip
# Of all others the mode runs has only these.
OF_RUNS = ("rival", "sizes", "rounds", "compile", "dtype", "attention_backend", "device")


def shown(mode: str | None) -> set[str]:
    """Return the options in the help of a mode; None: the usual ones."""
    if mode is None:
        return set(USUAL)
    return {f.name for f in fields(BenchConfig) if mode in modes_of(f.name)}


def modes_of(name: str) -> tuple[str, ...]:
    """Return the modes in which an option has an effect."""
    every = [mode for mode in MODES if mode != "runs" or name in OF_RUNS]
    return OF_MODES.get(name, tuple(every))


def check(mode: str, config: BenchConfig, origins: Mapping[str, str]) -> None:
    """Raises UserError for given options that this mode does not have."""
    got, default = config.flat(), BenchConfig().flat()
    of_train = {f.name for f in OF_TRAIN} - {*CHANGING}
    for name, origin in origins.items():
        modes, where = modes_of(name), "" if origin == "command line" else f" ({origin})"
        allowed = mode in modes or (where and name in of_train)
        # A file may state the default; on the command line the user expects an effect.
        if not allowed and (not where or got[name] != default[name]):
            only = ", ".join(modes) or "train.py"
            raise UserError(f"--{name}: for {only} only, got mode {mode}{where}")
    if config.paths and config.backends != ("all",):
        raise UserError("give either --paths or --backends")
    if config.hf and (config.rival or config.profile):
        raise UserError("--hf does not support --rival and --profile")
    if config.batch_size == "auto" and mode not in ("train", "decode"):
        raise UserError(f"--batch_size=auto: for train and decode only, got mode {mode}")


def check_sizes(config: BenchConfig) -> None:
    """Raise ValueError if the model's sizes are inconsistent."""
    GPTConfig.of(config, config.vocab_size or 1)


def load_config(argv: list[str], mode: str | None = None) -> Loaded[BenchConfig]:
    """Return the settings and the origin of each given one.

    Without a config file a CPU uses config/bench_cpu.py: GPT-2 124M takes half an hour there.
    """
    known: Json = {"aliases": ALIASES, "ignored": OTHERS}
    given, origins = gather(BenchConfig, [w for w in argv if w not in ("-h", "--help")], **known)
    named = any(origin != "command line" for origin in origins.values())
    if not named and mode != "plan" and pick_device(given.get("device", "auto")).type == "cpu":
        argv = [os.path.relpath(ROOT / CPU_CONFIG), *argv]
    loaded = read(BenchConfig, argv, shown=shown(mode), further=check_sizes, **known)
    config = loaded.settings
    if config.records_dir == RECORDS:  # also where the command is run from elsewhere
        config = replace(config, records_dir=str(ROOT / RECORDS))
    check(mode or "train", config, loaded.origins)
    return Loaded(config, loaded.origins)


def names(config: BenchConfig, device: str) -> tuple[list[str], dict[str, str]]:
    """Return the backends, and {name: reason} of those of "all" that are not to be measured."""
    wanted = config.backends
    if wanted == ("all",) and config.attention_backend != "auto":  # --attention_backend=sdpa
        wanted = (config.attention_backend,)
    named: dict[str, None] = {}
    left_out: dict[str, str] = {}
    for word in wanted:
        if word in attention.RULES:
            raise UserError(f"{word!r} is a rule, not a backend; name backends, or all")
        if word != "all":
            try:
                backend = attention.get(word)  # of others' code the worker needs the name
                if backend.mods is not None:
                    raise UserError(f"{word} has another mask than the kernels it is compared with")
                named[word if attention.is_code(word) else backend.name] = None
            except ValueError as e:
                raise UserError(str(e)) from None
            continue
        for name, backend in attention.BACKENDS.items():
            caps = [c for c in backend.caps if device in c.devices]
            if caps and all(c.interpreted for c in caps):
                left_out[name] = "only Triton's interpreter runs it here; its speed is meaningless"
    every = attention.BACKENDS if "all" in wanted else {}
    return list(named | dict.fromkeys(every)), {k: v for k, v in left_out.items() if k not in named}


def vocabulary(config: BenchConfig) -> tuple[int, str]:
    """Return the vocabulary size and its source."""
    if config.vocab_size:
        return config.vocab_size, "--vocab_size"
    folder = data.find(config.dataset, config.data_dir)
    with suppress(UserError):
        V = data.read_meta(folder)["vocab_size"]
        return data.padded(V), f"the dataset in {folder}"
    return 50304, f"GPT-2's, since {folder} is not prepared (--vocab_size)"
