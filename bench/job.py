"""Settings, device and model of a worker's job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench import Json
from core.options import TrainConfig
from core.runtime import dtype_name
from core.settings import from_dict
from model import GPT, GPTConfig


class Job:
    """Settings, device and model of a job, as rounds.Run.job() sends it; seeded."""

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
