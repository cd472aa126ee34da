"""Options of bench_mfu.py: its own, and train.py's for the model."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

import attention
import data
from bench import Json
from core.runtime import pick_device
from core.settings import Loaded, UserError, gather, read
from train import IGNORED, TrainConfig

ROOT = Path(__file__).resolve().parent.parent
CPU_CONFIG = "bench/cpu.py"
RECORDS = "bench/records"
ALIASES = {"attn_implementation": "attention_backend", "backend": "backends", "rival": "baseline"}
OTHERS = {name: why for name, why in IGNORED.items() if name not in ALIASES}
STAGES = (1, 2, 3, 4, 5, 6)
TrainingPath = Literal["float32", "bfloat16", "bfloat16-residual"]
KVCache = Literal["none", "dynamic", "static", "paged"]
Constraint = Literal["tensor", "python", "regex"]


@dataclass(frozen=True)
class Knobs:
    """Measure attention backends: python bench_mfu.py [MODE] with MODE one of train (the default),
    kernel, decode, converge, qualify and plan. Options and config files of the model are
    train.py's; its options of a run (out_dir, eval_interval, wandb_log) have no effect."""

    # --- what is measured ---
    batch_size: PositiveInt = 12  # sequences of a micro-batch
    backends: tuple[str, ...] = ("all",)  # names from python -m attention or files, with commas
    baseline: tuple[str, ...] = ()  # train, decode: compare with nanogpt=PATH, hf
    hf: str | None = None  # train, decode: a transformers model, folder or name
    profile: bool = False  # train: time of a step by its parts, with rooflines
    products_tflops: PositiveFloat | None = None  # rate of large matmuls; none: measured
    lengths: tuple[PositiveInt, ...] = ()  # kernel: none: 128 to 2048, on CUDA to 32768
    batch_sizes: tuple[PositiveInt, ...] = ()  # kernel, decode: none: 1 and 4, on CUDA 1 and 8
    windows: tuple[PositiveInt | None, ...] = ()  # kernel: keys, or none; none: the model's
    prompts: tuple[PositiveInt, ...] = ()  # decode: tokens; none: about block_size / 2
    kv_caches: tuple[KVCache, ...] = ("none", "dynamic", "static", "paged")  # decode
    constraint: tuple[Constraint | None, ...] = (None,)  # decode: a logits processor, or a regex
    weights: Literal["dtype", "int8"] = "dtype"  # decode: of our linear layers and head
    new_tokens: Annotated[int, Field(ge=2)] | None = None  # decode: none: 16, on CUDA 128
    steps: PositiveInt = 100  # converge: a multiple of 10
    seeds: PositiveInt = 1  # converge: if above 1, their scatter is the tolerance
    paths: tuple[TrainingPath, ...] = ()  # converge: instead of backends
    stages: tuple[Annotated[int, Field(ge=1, le=6)], ...] = STAGES  # qualify
    tolerance: PositiveFloat = 0.01  # converge: of the final loss, relative
    # --- what is planned ---
    gpu: str | None = None  # plan: "NVIDIA H200"
    gpus: tuple[PositiveInt, ...] = (8,)  # plan: numbers of GPUs
    gpus_per_node: PositiveInt = 8  # plan: joined by NVLink
    context_parallels: tuple[PositiveInt, ...] = ()  # plan: none: context_parallel; 1: also 2, 4, 8
    nvlink_gbs: PositiveFloat | None = None  # plan: GB/s each way of a GPU; none: datasheet
    network_gbs: PositiveFloat | None = None  # plan: the same between nodes; none: its server's
    # --- how it is measured ---
    rounds: PositiveInt = 5  # of each backend, interleaved
    seconds: PositiveFloat = 1.0  # per round, at least one step; kernel: a fifth of it
    warm_up_steps: PositiveInt = 2  # steps before the first round
    memory_gb: PositiveFloat | None = None  # plan: per GPU; CPU: per worker, none: 70 % of free
    bandwidth_gbs: PositiveFloat | None = None  # GB/s, for MBU and rooflines; none: measured
    slowest_step: PositiveFloat = 2.0  # s; longer calls of kernel are skipped
    minutes: PositiveFloat | None = None  # time limit; none: qualify: 9
    timeout: PositiveFloat = 900.0  # seconds for one answer of a process
    # --- what is kept ---
    json: bool = False  # one JSON object as the last line
    record: str | None = None  # write bench/records/DATE_DEVICE_RECORD
    records_dir: str = RECORDS  # the folder of the records

    def __post_init__(self) -> None:
        for name in ("kv_caches", "backends"):
            if not getattr(self, name):
                raise ValueError(f"{name} must name at least one")


@dataclass(frozen=True)
class BenchConfig(Knobs):
    """Options of a run of the bench."""

    train: TrainConfig = field(default_factory=TrainConfig)  # see training() for batch_size

    def training(self, batch_size: int, **changes: Any) -> TrainConfig:
        """Return train.py's settings at this batch size."""
        return replace(self.train, batch_size=batch_size, **changes)

    def flat(self) -> Json:
        """Return all options in one dict, as in a record."""
        mine = asdict(self)
        return {**mine.pop("train"), **mine, "records_dir": Path(self.records_dir).name}


@dataclass(frozen=True)
class Flat(Knobs, TrainConfig):
    __doc__ = Knobs.__doc__  # of --help


def load_config(argv: list[str], mode: str = "train") -> Loaded[BenchConfig]:
    """Return the settings and the origin of each given one.

    Without a config file a CPU uses bench/cpu.py: GPT-2 124M takes half an hour there.
    """
    known: Json = {"aliases": ALIASES, "ignored": OTHERS}
    given, origins = gather(Flat, [w for w in argv if w not in ("-h", "--help")], **known)
    named = any(origin != "command line" for origin in origins.values())
    if not named and mode != "plan" and pick_device(given.get("device", "auto")).type == "cpu":
        argv = [os.path.relpath(ROOT / CPU_CONFIG), *argv]
    loaded: Loaded[Any] = read(Flat, argv, **known)
    mine, of_train = (
        {f.name: getattr(loaded.settings, f.name) for f in fields(kind)}
        for kind in (Knobs, TrainConfig)
    )
    if mine["records_dir"] == RECORDS:  # also where the command is run from elsewhere
        mine["records_dir"] = str(ROOT / RECORDS)
    try:
        train = TrainConfig(**of_train)
    except ValueError as e:
        raise UserError(str(e)) from e
    if train.init_from != "scratch":
        raise UserError(
            f"init_from must be 'scratch', got {train.init_from!r}: the values of weights do not "
            "change the time, so give the sizes instead"
        )
    return Loaded(BenchConfig(**mine, train=train), loaded.origins)


def names(config: BenchConfig, device: str) -> tuple[list[str], dict[str, str]]:
    """Return the backends to measure, and {name: reason} of those left out of "all"."""
    asked = config.backends
    if asked == ("all",) and config.train.attention_backend != "auto":  # --attention_backend=sdpa
        asked = (config.train.attention_backend,)
    chosen: dict[str, None] = {}
    left_out: dict[str, str] = {}
    for word in asked:
        if word in attention.RULES:
            raise UserError(f"{word!r} is a rule, not a backend; name backends, or all")
        if word != "all":
            try:
                backend = attention.get(word)  # of a file the worker needs the path
                chosen[word if attention.is_file(word) else backend.name] = None
            except ValueError as e:
                raise UserError(str(e)) from None
            continue
        for name, backend in attention.BACKENDS.items():
            caps = [c for c in backend.caps if device in c.devices]
            if caps and all(c.interpreted for c in caps):
                left_out[name] = "only Triton's interpreter runs it here; its speed is meaningless"
            else:
                chosen[name] = None
    return list(chosen), {k: v for k, v in left_out.items() if k not in chosen}


def vocabulary(config: BenchConfig) -> tuple[int, str]:
    """Return the vocabulary size and its source."""
    if config.train.vocab_size:
        return config.train.vocab_size, "--vocab_size"
    folder = Path(config.train.data_dir) / config.train.dataset
    if (folder / "meta.json").is_file():
        V = data.read_meta(folder)["vocab_size"]
        return data.padded(V), f"the dataset in {folder}"
    return 50304, f"GPT-2's, since {folder} is not prepared (--vocab_size)"
