"""The knobs of bench_mfu.py: its own, and train.py's for the model that is measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import attention
import data
from core.runtime import pick_device
from core.settings import Loaded, UserError, read
from train import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
CPU_CONFIG = "bench/cpu.py"
RECORDS = "bench/records"
ALIASES = {"attn_implementation": "attention_backend", "backend": "backends", "rival": "baseline",
           "rivals": "baseline", "baselines": "baseline"}  # fmt: skip


TrainingPath = Literal["float32", "bfloat16", "bfloat16-residual"]
KVCache = Literal["none", "dynamic", "static", "paged"]


@dataclass(frozen=True)
class Knobs:
    """Measure attention backends side by side. The model's knobs are train.py's, and its config
    files serve; those of a run (out_dir, eval_interval, wandb_log and the like) change nothing."""

    # --- what is measured ---
    batch_size: int | Literal["auto"] = 12  # sequences; auto: the largest that fits, for each
    backends: tuple[str, ...] = ("all",)  # names from python -m attention, with commas
    baseline: tuple[str, ...] = ()  # train, decode: nanogpt=PATH, hf: other people's models beside
    profile: bool = False  # train: where a step's time goes, part by part, beside its roofline
    roofline: str | None = None  # train: only compute the roofline of this GPU: "NVIDIA H200"
    products_tflops: float | None = None  # a rate for a second ceiling; none: large matmuls' here
    sweep: bool = True  # train: also time attention alone over lengths and batch sizes
    lengths: tuple[int, ...] = ()  # kernel, sweep: tokens; none: 128 to 2048, on CUDA to 32768
    batch_sizes: tuple[int, ...] = ()  # kernel, decode: none: 1 and 4, on CUDA 1 and 8
    heads: tuple[int, ...] = ()  # kernel: query heads; none: n_head
    head_dims: tuple[int, ...] = ()  # kernel; none: n_embd / n_head
    windows: tuple[int | None, ...] = ()  # kernel: of keys, or none; none: the model's
    prompts: tuple[int, ...] = ()  # decode: tokens of the prompt; none: about block_size / 2
    kv_caches: tuple[KVCache, ...] = ("none", "dynamic", "static", "paged")  # decode
    processors: tuple[bool, ...] = (False, True)  # decode: without and with a logits processor
    new_tokens: int = 16  # decode: tokens to generate after the prompt
    steps: int = 100  # converge: steps that each one trains; a multiple of 10
    seeds: int = 1  # converge: runs of each; from 2 on, the seeds' scatter is the tolerance
    paths: tuple[
        TrainingPath, ...
    ] = ()  # converge: of training, beside a plain one; none: backends
    tolerance: float = 0.01  # converge: how far one seed's final loss may be from the baseline's
    # --- how it is measured ---
    rounds: int = 5  # of each backend, in turn
    seconds: float = 1.0  # of measured steps in a round, at least one step; kernel: a fifth of it
    warm_up_steps: int = 2  # steps before the first round, and as many to compile
    fresh_rounds: bool | None = None  # new processes in each round; none: where all do not fit
    noise: float = 0.05  # a row whose quartiles are further apart is noisy
    memory_gb: float | None = None  # CPU: what a process may take; none: 70 % of what is free
    bandwidth_gbs: float | None = None  # the memory's GB/s, for MBU and rooflines; none: measured
    slowest_step: float = 10.0  # seconds; batch_size=auto looks no further than such a step
    timeout: float = 900.0  # seconds that one answer of a process may take
    # --- what is kept ---
    json: bool = False  # one JSON object as the last line
    record: str | None = None  # write bench/records/DATE_DEVICE_RECORD
    records_dir: str = RECORDS  # the folder of the records

    def __post_init__(self) -> None:
        for name in ("rounds", "warm_up_steps", "steps", "seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("seconds", "tolerance", "noise", "memory_gb", "bandwidth_gbs", "slowest_step",
                     "timeout", "products_tflops"):  # fmt: skip
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name} must be more than 0, got {value}")
        for name in ("lengths", "batch_sizes", "heads", "head_dims", "windows", "prompts"):
            if any(v is not None and v < 1 for v in getattr(self, name)):
                raise ValueError(f"{name} must all be at least 1, got {getattr(self, name)}")
        for name in ("kv_caches", "processors", "backends"):
            if not getattr(self, name):
                raise ValueError(f"{name} must name at least one")
        if self.new_tokens < 2:
            raise ValueError(f"new_tokens must be at least 2, got {self.new_tokens}")

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


def load_config(argv: list[str]) -> Loaded[BenchConfig]:
    """The settings, and where each that was given came from.

    `--config=FILE` names a config file as the bare word does. On the CPU, where no file is named,
    it is bench/cpu.py: train.py's default, GPT-2 124M, would take half an hour there; but with
    --roofline nothing runs.

    Raises:
        UserError: a mistake in them.
    """
    files: list[str] = []
    options: list[str] = []
    baselines: list[str] = []
    rest = list(argv)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("-"):
            files.append(name + equals + value)
            continue
        if name.startswith("--") and not equals and rest and not rest[0].startswith("--"):
            equals, value = "=", rest.pop(0)
        if name == "--config" and equals:
            files.append(value)
        elif ALIASES.get(name[2:], name[2:]) == "baseline" and equals:  # may be given repeatedly
            baselines.append(value)
        else:
            options.append(name + equals + value)
    if baselines:
        options.append(f"--baseline={','.join(baselines)}")
    given = [o.removeprefix("--device=") for o in options if o.startswith("--device=")]
    elsewhere = any(o.startswith("--roofline=") for o in options)
    if not files and not elsewhere and pick_device(given[-1] if given else "auto").type == "cpu":
        files = [CPU_CONFIG if Path(CPU_CONFIG).is_file() else str(ROOT / CPU_CONFIG)]
    loaded: Loaded[Any] = read(Flat, [*files, *options], aliases=ALIASES)
    return Loaded(compose(loaded.settings), loaded.origins)


def compose(flat: Any) -> BenchConfig:
    """The two configs that the flat one holds.

    Raises:
        UserError: train.py would refuse its part, or it asks for pretrained weights.
    """
    mine = {f.name: getattr(flat, f.name) for f in fields(Knobs)}
    of_train = {f.name: getattr(flat, f.name) for f in fields(TrainConfig)}
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
    return BenchConfig(**mine, train=train)


def names(config: BenchConfig, device: str) -> tuple[list[str], dict[str, str]]:
    """The backends to measure, and those that "all" leaves out, with the reason.

    Raises:
        UserError: an unknown name.
    """
    asked = config.backends
    if asked == ("all",) and config.train.attention_backend != "auto":  # --attention_backend=sdpa
        asked = (config.train.attention_backend,)
    chosen: list[str] = []
    left_out: dict[str, str] = {}
    for word in asked:
        if word in attention.RULES:
            raise UserError(f"{word!r} is a rule that chooses a backend; name the backends, or all")
        if word != "all":
            try:
                chosen.append(attention.get(word).name)
            except ValueError as e:
                raise UserError(str(e)) from None
            continue
        for name, backend in attention.BACKENDS.items():
            caps = [c for c in backend.caps if device in c.devices]
            if caps and all(c.interpreted for c in caps):
                left_out[name] = "only Triton's interpreter runs it here, whose speed means nothing"
            else:
                chosen.append(name)
    if not chosen:
        raise UserError("--backends names none")
    return list(dict.fromkeys(chosen)), {k: v for k, v in left_out.items() if k not in chosen}


def vocabulary(config: BenchConfig) -> tuple[int, str]:
    """The model's vocabulary, and where it comes from."""
    if config.train.vocab_size:
        return config.train.vocab_size, "--vocab_size"
    folder = Path(config.train.data_dir) / config.train.dataset
    if (folder / "meta.json").is_file():
        V = data.read_meta(folder)["vocab_size"]
        return (V if V <= 1024 else -(-V // 64) * 64), f"the dataset in {folder}"
    return 50304, f"GPT-2's, since {folder} is not prepared (--vocab_size)"
