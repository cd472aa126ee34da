"""The knobs of bench_mfu.py: train.py's, and its own."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import attention
import data
from core.runtime import pick_device
from core.settings import UserError, read
from train import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
CPU_CONFIG = ROOT / "bench" / "cpu.py"
ALIASES = {"attn_implementation": "attention_backend", "backend": "backends", "rivals": "rival"}


@dataclass(frozen=True)
class BenchConfig(TrainConfig):
    """Measure attention backends. The model's knobs are train.py's, and its config files serve;
    those of a run (out_dir, eval_interval, wandb_log and the like) change nothing here."""

    # --- data ---
    batch_size: int | Literal["auto"] = 12  # type: ignore[assignment]  # auto: the largest that fits
    # --- what is measured ---
    backends: tuple[str, ...] = ("all",)  # names from python -m attention, with commas
    rival: tuple[str, ...] = ()  # train, decode: nanogpt=PATH, hf: their own models
    profile: bool = False  # train: where a step's time goes, part by part, beside its roofline
    roofline: str | None = None  # train: only reckon the roofline of this GPU: "NVIDIA H200"
    products_tflops: float | None = None  # a rate for a second ceiling; none: large products' here
    sweep: bool = True  # train: also time attention alone over lengths and batch sizes
    lengths: tuple[int, ...] = ()  # kernel, sweep: tokens; none: 128 to 2048, on CUDA to 32768
    batch_sizes: tuple[int, ...] = ()  # kernel, decode: none: 1 and 4, on CUDA 1 and 8
    heads: tuple[int, ...] = ()  # kernel: query heads; none: n_head
    head_dims: tuple[int, ...] = ()  # kernel; none: n_embd / n_head
    windows: tuple[int | None, ...] = ()  # kernel: of keys, or none; none: the model's
    prompts: tuple[int, ...] = ()  # decode: tokens of the prompt; none: about block_size / 2
    kv_caches: tuple[Literal["none", "dynamic", "static", "paged"], ...] = (  # decode
        "none",
        "dynamic",
        "static",
        "paged",
    )
    processors: tuple[bool, ...] = (False, True)  # decode: without and with a logits processor
    new_tokens: int = 16  # decode: tokens to generate after it
    steps: int = 100  # converge: steps that each backend trains; a multiple of 10
    tolerance: float = 0.01  # converge: how far a final loss may be from manual's
    # --- how ---
    rounds: int = 5  # of each backend, in turn
    seconds: float = 1.0  # of measured steps in a round, at least one step; kernel: a tenth of it
    warm_up_steps: int = 2  # steps before the first round, and as many to compile
    fresh_rounds: bool | None = None  # new processes in each round; none: where all do not fit
    noise: float = 0.05  # a row whose quartiles are further apart is noisy
    memory_gb: float | None = None  # CPU: what a process may take; none: 70 % of what is free
    slowest_step: float = 10.0  # seconds; batch_size=auto looks no further than such a step
    timeout: float = 900.0  # seconds that one answer of a process may take
    # --- what is left ---
    json: bool = False  # one JSON object as the last line
    record: str | None = None  # write bench/records/DATE_DEVICE_RECORD
    records_dir: str = str(ROOT / "bench" / "records")  # the folder of the records
    html: str | None = None  # also write a self-contained page to this file

    def __post_init__(self) -> None:
        self.train(1 if self.fixed_batch is None else self.fixed_batch)  # checks train.py's
        for name in ("rounds", "warm_up_steps", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("seconds", "tolerance", "noise", "memory_gb", "slowest_step", "timeout",
                     "products_tflops"):  # fmt: skip
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
        if self.init_from != "scratch":
            raise ValueError(
                f"init_from must be 'scratch', got {self.init_from!r}: what weights hold changes "
                "no time, so give the sizes instead"
            )

    @property
    def fixed_batch(self) -> int | None:
        """The batch size, None where it is "auto"."""
        return None if self.batch_size == "auto" else self.batch_size

    def train(self, batch_size: int, **changes: Any) -> TrainConfig:
        """train.py's part of it."""
        mine = {f.name: getattr(self, f.name) for f in fields(TrainConfig)}
        return TrainConfig(**{**mine, "batch_size": batch_size, **changes})


def settle(argv: list[str]) -> tuple[BenchConfig, dict[str, str]]:
    """The settings, and where each that was given came from.

    `--config=FILE` names a config file as the bare word does. On the CPU, where no file is named,
    it is bench/cpu.py: train.py's default, GPT-2 124M, would take half an hour there; but with
    --roofline nothing runs.

    Raises:
        UserError: a mistake in them.
    """
    files: list[str] = []
    options: list[str] = []
    rivals: list[str] = []
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
        elif name in ("--rival", "--rivals") and equals:  # it may be given more than once
            rivals.append(value)
        else:
            options.append(name + equals + value)
    if rivals:
        options.append(f"--rival={','.join(rivals)}")
    given = [o.removeprefix("--device=") for o in options if o.startswith("--device=")]
    elsewhere = any(o.startswith("--roofline=") for o in options)
    if not files and not elsewhere and pick_device(given[-1] if given else "auto").type == "cpu":
        files = [str(CPU_CONFIG)]
    loaded = read(BenchConfig, [*files, *options], aliases=ALIASES)
    return loaded.settings, loaded.origins


def names(config: BenchConfig, device: str) -> tuple[list[str], dict[str, str]]:
    """The backends to measure, and those that "all" leaves out, with the reason.

    Raises:
        UserError: an unknown name.
    """
    asked: tuple[str, ...] = config.backends
    if asked == ("all",) and config.attention_backend != "auto":
        asked = (config.attention_backend,)
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
                left_out[name] = "it runs here in Triton's interpreter only, which nobody times"
            else:
                chosen.append(name)
    if not chosen:
        raise UserError("--backends names none")
    return list(dict.fromkeys(chosen)), {k: v for k, v in left_out.items() if k not in chosen}


def vocabulary(config: BenchConfig) -> tuple[int, str]:
    """The model's vocabulary, and where it comes from."""
    if config.vocab_size:
        return config.vocab_size, "--vocab_size"
    folder = Path(config.data_dir) / config.dataset
    if (folder / "meta.json").is_file():
        V = data.read_meta(folder)["vocab_size"]
        return (V if V <= 1024 else -(-V // 64) * 64), f"the dataset in {folder}"
    return 50304, f"GPT-2's, since {folder} is not prepared (--vocab_size)"


def settings_of(config: BenchConfig) -> dict[str, Any]:
    """All of them, as JSON takes them."""
    return asdict(replace(config, records_dir=Path(config.records_dir).name))
