"""Settings, device and model of a job of bench/worker.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench import Json
from core.runtime import dtype_name
from core.settings import from_dict
from model import GPT
from train import TrainConfig


class Job:
    """train.py's settings and set-up, seeded; `told` is from Bench.job()."""

    def __init__(self, told: Json, **changes: Any) -> None:
        self.config = replace(from_dict(TrainConfig, told["train"]), **changes)
        self.vocab_size = told["vocab_size"]
        self.hf = told["hf"].get("config") if told.get("hf") else None  # a model of transformers
        self.device = torch.device(told["device"])
        self.setup = self.config.setup(self.device)
        self.dtype = dtype_name(self.setup.dtype)
        torch.manual_seed(self.config.seed)

    def model(self, cast: bool = False) -> GPT:
        """Return a new model on the device, in float32 unless `cast`."""
        config = self.config
        model = self.setup.place(GPT(config.model(self.vocab_size), config.policy), cast)
        model.gradient_checkpointing = config.gradient_checkpointing
        model.residual_autocast = config.residual_dtype == "autocast"
        return model

    def random_tokens(self, n: int) -> tuple[Tensor, Tensor]:
        """Return n sequences, the same for every backend, and their targets: (n, T) int64 each."""
        draw = torch.Generator().manual_seed(self.config.seed)
        tokens = torch.randint(self.vocab_size, (n, self.config.block_size + 1), generator=draw)
        x, y = tokens[:, :-1], tokens[:, 1:]
        return x.contiguous().to(self.device), y.contiguous().to(self.device)
