"""The knobs of bench_mfu.py: its own, and train.py's for the model that is measured."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

import attention
import data
from core.runtime import pick_device
from core.settings import Loaded, UserError, gather, read
from train import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
CPU_CONFIG = "bench/cpu.py"
RECORDS = "bench/records"
ALIASES = {"attn_implementation": "attention_backend", "backend": "backends", "rival": "baseline",
           "rivals": "baseline", "baselines": "baseline"}  # fmt: skip


STAGES = (1, 2, 3, 4, 5, 6)
TrainingPath = Literal["float32", "bfloat16", "bfloat16-residual"]
KVCache = Literal["none", "dynamic", "static", "paged"]


@dataclass(frozen=True)
class Knobs:
    """Measure attention backends: python bench_mfu.py [MODE] with MODE one of train (the default),
    kernel, decode, converge, qualify, compare and plan. The model's knobs are train.py's, and its
    config files serve; those of a run (out_dir, eval_interval, wandb_log and the like) change
    nothing."""

    # --- what is measured ---
    batch_size: PositiveInt | Literal["auto"] = 12  # sequences; auto: the largest that fits
    backends: tuple[str, ...] = ("all",)  # names from python -m attention or files, with commas
    baseline: tuple[str, ...] = ()  # train, decode: nanogpt=PATH, hf: other people's models beside
    hf: str | None = None  # train, decode: a transformers model, its folder or name, for ours
    profile: bool = False  # train: where a step's time goes, part by part, beside its roofline
    roofline: str | None = None  # train: only compute the roofline of this GPU: "NVIDIA H200"
    products_tflops: PositiveFloat | None = None  # for a second ceiling; none: large matmuls' here
    sweep: bool = True  # train: also time attention alone over lengths and batch sizes
    lengths: tuple[PositiveInt, ...] = ()  # kernel, sweep: none: 128 to 2048, on CUDA to 32768
    batch_sizes: tuple[PositiveInt, ...] = ()  # kernel, decode: none: 1 and 4, on CUDA 1 and 8
    windows: tuple[PositiveInt | None, ...] = ()  # kernel: of keys, or none; none: the model's
    prompts: tuple[PositiveInt, ...] = ()  # decode: tokens; none: about block_size / 2
    kv_caches: tuple[KVCache, ...] = ("none", "dynamic", "static", "paged")  # decode
    weights: Literal["dtype", "int8"] = "dtype"  # decode: int8: of our linear layers and head
    new_tokens: Annotated[int, Field(ge=2)] | None = None  # decode: none: 16, on CUDA 128
    steps: PositiveInt = 100  # converge: steps that each one trains; a multiple of 10
    seeds: PositiveInt = 1  # converge: runs of each; from 2 on, their scatter is the tolerance
    paths: tuple[TrainingPath, ...] = ()  # converge: beside a plain float32 one; none: backends
    stages: tuple[Annotated[int, Field(ge=1, le=6)], ...] = STAGES  # qualify: which of its stages
    resume: bool = False  # qualify: go on with the newest record, with what is missing in it
    tolerance: PositiveFloat = 0.01  # converge: of one seed's final loss, relative
    # --- what is planned ---
    gpu: str | None = None  # plan: on which GPU: "NVIDIA H200"
    gpus: tuple[PositiveInt, ...] = (8,)  # plan: how many, each number with tables of its own
    gpus_per_node: PositiveInt = 8  # plan: that NVLink joins
    context_parallels: tuple[PositiveInt, ...] = ()  # plan: none: context_parallel; 1: also 2, 4, 8
    nvlink_gbs: PositiveFloat | None = None  # plan: GB/s each way of a GPU; none: datasheet
    network_gbs: PositiveFloat | None = None  # plan: the same between nodes; none: its server's
    roofline_times: PositiveFloat = 1.0  # plan: computing, in rooflines: 1: at best; see --profile
    # --- how it is measured ---
    rounds: PositiveInt = 5  # of each backend, in turn
    seconds: PositiveFloat = 1.0  # of steps in a round, at least one step; kernel: a fifth of it
    warm_up_steps: PositiveInt = 2  # steps before the first round, and as many to compile
    memory_gb: PositiveFloat | None = None  # plan: a GPU's; CPU: a worker's, none: 70 % of free
    bandwidth_gbs: PositiveFloat | None = None  # GB/s, for MBU and rooflines; none: measured
    slowest_step: PositiveFloat = 2.0  # s; batch_size=auto and long kernels go no further than that
    minutes: PositiveFloat | None = None  # end after that, with what is there; none: qualify: 9
    timeout: PositiveFloat = 900.0  # seconds that one answer of a process may take
    # --- what is kept ---
    json: bool = False  # one JSON object as the last line
    record: str | None = None  # write bench/records/DATE_DEVICE_RECORD
    records_dir: str = RECORDS  # the folder of the records

    def __post_init__(self) -> None:
        for name in ("kv_caches", "backends"):
            if not getattr(self, name):
                raise ValueError(f"{name} must name at least one")

    @property
    def fixed_batch(self) -> int | None:
        """The batch size, None where it is "auto"."""
        return None if self.batch_size == "auto" else self.batch_size


@dataclass(frozen=True)
class BenchConfig(Knobs):
    """What a run of the bench is told: its own knobs, and the training step that it measures."""

    train: TrainConfig = field(default_factory=TrainConfig)  # see training() for batch_size

    def training(self, batch_size: int, **changes: Any) -> TrainConfig:
        """train.py's settings at this batch size."""
        return replace(self.train, batch_size=batch_size, **changes)

    def flat(self) -> dict[str, Any]:
        """All of them in one dict, as JSON takes them and a record keeps them."""
        mine = asdict(self)
        return {**mine.pop("train"), **mine, "records_dir": Path(self.records_dir).name}


# What the command line and the config files may name: the knobs of both, side by side.
Flat = make_dataclass(
    "Flat", (), bases=(Knobs, TrainConfig), namespace={"__doc__": Knobs.__doc__}, frozen=True
)


def load_config(argv: list[str], mode: str = "train") -> Loaded[BenchConfig]:
    """The settings, and where each that was given came from.

    On the CPU, where no file is named, the config is bench/cpu.py: train.py's default, GPT-2 124M,
    would take half an hour there; but with --roofline, and in the mode plan, nothing runs.
    """
    given, origins = gather(Flat, [w for w in argv if w not in ("-h", "--help")], aliases=ALIASES)
    named = any(origin != "command line" for origin in origins.values())
    elsewhere = mode == "plan" or given.get("roofline") is not None
    if not named and not elsewhere and pick_device(given.get("device", "auto")).type == "cpu":
        argv = [os.path.relpath(ROOT / CPU_CONFIG), *argv]
    loaded: Loaded[Any] = read(Flat, argv, aliases=ALIASES)
    mine, of_train = (
        {f.name: getattr(loaded.settings, f.name) for f in fields(kind)}
        for kind in (Knobs, TrainConfig)
    )
    if mine["batch_size"] == "auto":
        of_train["batch_size"] = 1
    if mine["records_dir"] == RECORDS:  # also where the command is run from elsewhere
        mine["records_dir"] = str(ROOT / RECORDS)
    try:
        train = TrainConfig(**of_train)
    except ValueError as e:
        raise UserError(str(e)) from e
    if train.init_from != "scratch":
        raise UserError(
            f"init_from must be 'scratch', got {train.init_from!r}: what weights hold changes no "
            "time, so give the sizes instead"
        )
    return Loaded(BenchConfig(**mine, train=train), loaded.origins)


def names(config: BenchConfig, device: str) -> tuple[list[str], dict[str, str]]:
    """The backends to measure, and those that "all" leaves out, with the reason."""
    asked = config.backends
    if asked == ("all",) and config.train.attention_backend != "auto":  # --attention_backend=sdpa
        asked = (config.train.attention_backend,)
    chosen: dict[str, None] = {}
    left_out: dict[str, str] = {}
    for word in asked:
        if word in attention.RULES:
            raise UserError(f"{word!r} is a rule that chooses a backend; name the backends, or all")
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
                left_out[name] = "only Triton's interpreter runs it here, whose speed means nothing"
            else:
                chosen[name] = None
    return list(chosen), {k: v for k, v in left_out.items() if k not in chosen}


def vocabulary(config: BenchConfig) -> tuple[int, str]:
    """The model's vocabulary, and where it comes from."""
    if config.train.vocab_size:
        return config.train.vocab_size, "--vocab_size"
    folder = Path(config.train.data_dir) / config.train.dataset
    if (folder / "meta.json").is_file():
        V = data.read_meta(folder)["vocab_size"]
        return (V if V <= 1024 else -(-V // 64) * 64), f"the dataset in {folder}"
    return 50304, f"GPT-2's, since {folder} is not prepared (--vocab_size)"
