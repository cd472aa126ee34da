"""What a worker was told, made ready: train.py's settings, the set-up of a run, the model.

Every job of bench/worker.py begins with it, so that nothing differs between two of them but what
they measure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core.runtime import dtype_name
from core.settings import from_dict
from model import GPT
from train import TrainConfig


class Job:
    """The settings and the set-up (core/runtime.py), with the seed of the weights set."""

    def __init__(self, told: dict[str, Any], **changes: Any) -> None:
        """From what Bench.job() of bench/bench.py sent; `changes` are of train.py's settings."""
        self.config = replace(from_dict(TrainConfig, told["train"]), **changes)
        self.vocab_size = told["vocab_size"]
        self.hf = told["hf"].get("config") if told.get("hf") else None  # a model of transformers
        self.device = torch.device(told["device"])
        self.setup = self.config.setup(self.device)
        self.dtype = dtype_name(self.setup.dtype)
        torch.manual_seed(self.config.seed)

    def model(self, cast: bool = False) -> GPT:
        """A new model on the device, as train.py makes it; in float32, unless it is cast."""
        config = self.config
        model = self.setup.place(GPT(config.model(self.vocab_size), config.policy), cast)
        model.gradient_checkpointing = config.gradient_checkpointing
        model.residual_autocast = config.residual_dtype == "autocast"
        return model

    def random_tokens(self, n: int) -> tuple[Tensor, Tensor]:
        """The same n sequences for every backend, and their targets: (n, T) int64 each."""
        draw = torch.Generator().manual_seed(self.config.seed)
        tokens = torch.randint(self.vocab_size, (n, self.config.block_size + 1), generator=draw)
        x, y = tokens[:, :-1], tokens[:, 1:]
        return x.contiguous().to(self.device), y.contiguous().to(self.device)
