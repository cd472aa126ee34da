"""Bench and Plan say what is measured, before anything runs; Job is a job in its process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

import attention
from bench import Json, hf
from bench.settings import Settings
from core import flops
from core.options import TrainConfig
from core.runtime import dtype_name
from core.settings import UserError, from_dict
from model import GPT, GPTConfig

HF = ("eager", "sdpa", "flash_attention_2")  # attention of transformers
# Longest sequences of a backend that is not named: the scores fill the memory (manual, math), or a
# loop over tiles launches 10,000 kernels (tiled).
LONGEST = {"manual": 2048, "sdpa_math": 2048, "tiled": 2048}
S = TypeVar("S", bound=Settings)
Skip = Callable[[str, Json, Sequence[Json]], str]  # name, point, rows so far -> why not, or ""


@dataclass(frozen=True)
class Bench(Generic[S]):
    """What a mode knows before it measures."""

    mode: str
    config: S
    device: str
    backends: tuple[str, ...]
    machine: Json  # of machine.Description
    vocab_size: int
    left_out: Mapping[str, str] = field(default_factory=dict)  # backends not to measure: reasons
    hf: Json = field(default_factory=dict)  # of --hf: name, config and, once counted, sizes
    reference: Json = field(default_factory=dict)  # loss and gradients of the first batch

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    def named(self, name: str) -> bool:
        """True if the user named this backend, not only "all"."""
        words = [word for word in self.config.backends if word != "all"]
        return name in words or name in (attention.get(word).name for word in words)

    def candidates(self, implementations: tuple[str, ...] = HF) -> dict[str, str]:
        """Return {row: argument of candidates.build()}, the most valuable first: the first backend,
        the rivals, the other backends, the slow ones last."""
        slow = [n for n in self.backends if n in LONGEST and not self.named(n)]
        ours = dict.fromkeys([*(n for n in self.backends if n not in slow), *slow], "")
        others = rivals(getattr(self.config, "rival", ()), implementations)
        if self.hf:
            ours, others = hf.rows_of(ours), hf.RIVALS
        first = dict([*ours.items()][:1])
        return first | others | ours

    @property
    def part(self) -> Json:
        """The entries of a record that are known before the rounds."""
        known: Json = {"mode": self.mode, "settings": self.config.flat(), "machine": self.machine}
        known |= {"vocab_size": self.vocab_size, "reference": self.reference}
        return known | ({"hf": self.hf} if self.hf else {})

    @property
    def model(self) -> flops.Sizes:
        """GPTConfig, or the sizes of the model of --hf."""
        return hf.model_of(self.part)

    @property
    def layer(self) -> Json:
        """The fields of the first attention layer's Spec."""
        model = self.model
        own = {"n_head": model.n_head, "n_kv_head": model.kv_heads, "head_dim": model.head_dim}
        return own | (model.layers[0] if self.hf else {"window": model.windows[0]})

    def job(self, name: str = "", batch_size: int = 1, rival: str = "", **changes: object) -> Json:
        """Return a worker's job.

        `name` is the row, without a rival also the attention backend; `rival` an argument of
        candidates.build(); `changes` are of train.py's settings.
        """
        ours = {"attention_backend": name} if name and not rival else {}
        changes = {**ours, "attention_fallback": False, "batch_size": batch_size, **changes}
        return {
            "name": name,
            "rival": rival,
            "train": asdict(self.config.to(TrainConfig, **changes)),
            "device": self.device,
            "vocab_size": self.vocab_size,
            "hf": self.hf.get("config"),
            "memory_limit": None if self.cuda else self.machine.get("memory_limit"),
        }


@dataclass(frozen=True)
class Plan:
    """What rounds.py runs."""

    work: str  # the worker's class, as in "bench.train:Training"
    jobs: Mapping[str, Json]  # row -> job, the most valuable first
    rounds: int
    specs: Sequence[Json]  # fields of Specs; a backend that supports none is not started
    points: Sequence[Json] = ({},)  # what differs between the rows of a candidate
    request: Mapping[str, Any] = field(default_factory=dict)  # of every round, besides the point
    skip: Skip = lambda name, point, rows: ""
    fresh: bool | None = None  # a new process each round; None: if not all fit into memory
    compiled: bool = False  # a new process would compile again
    profile: int = 0  # steps to profile after the warm-up
    reference: Json | None = None  # the job of train.Reference


def rivals(words: tuple[str, ...], implementations: tuple[str, ...] = HF) -> dict[str, str]:
    """Return {row: argument of candidates.build()} for the values of --rival."""
    found: dict[str, str] = {}
    for word in words:
        name, _, path = word.partition("=")
        if name == "nanogpt" and path:
            model = Path(path).expanduser().resolve() / "model.py"
            if not model.is_file():
                raise UserError(f"{path} is not a nanoGPT checkout (model.py not found)")
            found["nanogpt"] = f"nanogpt={model}"
        elif word == "hf":
            found |= {f"hf_{a}": f"hf={a}" for a in implementations}
        else:
            raise UserError(f"--rival must be nanogpt=PATH or hf, got {word!r}")
    return found


class Job:
    """Settings, device and model of a job in its process; seeded."""

    def __init__(self, job: Json, **changes: Any) -> None:
        self.config = replace(from_dict(TrainConfig, job["train"]), **changes)
        self.vocab_size = job["vocab_size"]
        self.hf = job["hf"]  # config of a model of transformers, or None
        self.device = torch.device(job["device"])
        self.setup = self.config.setup(self.device)
        self.dtype = dtype_name(self.setup.dtype)
        torch.manual_seed(self.config.seed)

    def model(self, cast: bool = False) -> GPT:
        """Return a new model on the device, in float32 unless `cast`."""
        config = self.config
        model = self.setup.place(GPT(GPTConfig.of(config, self.vocab_size), config.policy), cast)
        model.gradient_checkpointing = config.gradient_checkpointing
        model.residual_autocast = self.setup.residual == "autocast"
        return model

    def random_tokens(self, n: int) -> tuple[Tensor, Tensor]:
        """Return n sequences, the same for every backend, and their targets: (n, T) int64 each."""
        draw = torch.Generator().manual_seed(self.config.seed)
        tokens = torch.randint(self.vocab_size, (n, self.config.block_size + 1), generator=draw)
        x, y = tokens[:, :-1], tokens[:, 1:]
        return x.contiguous().to(self.device), y.contiguous().to(self.device)
