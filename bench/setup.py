"""The set-up of a measured run: device, dtype, autocast, scaler, and the model by train.py.

Every job of bench/worker.py begins with it, so that nothing differs between two of them but what
they measure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import train
from core.runtime import allow_tf32, dtype_name, pick_dtype, why_not_compile, why_not_onednn
from core.settings import Loaded, from_dict
from model import GPT
from train import TrainConfig


class Setup:
    """What a job was told, made ready."""

    def __init__(self, job: dict[str, Any], **changes: Any) -> None:
        """
        Args:
            changes: of train.py's settings.
        """
        config = replace(from_dict(TrainConfig, job["train"]), **changes)
        self.config, self.vocab_size = config, job["vocab_size"]
        device = self.device = torch.device(job["device"])
        allow_tf32(config.tf32)
        self.dtype = pick_dtype(config.dtype, device)
        self.dtype_name = dtype_name(self.dtype)
        half = self.dtype != torch.float32
        self.autocast = torch.autocast(device.type, dtype=self.dtype, enabled=half)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)
        self.compiled = why_not_compile(config.compile, device) is None
        torch.manual_seed(config.seed)  # of the weights

    def model(self) -> GPT:
        """A new model by train.py, on the device, in float32."""
        config = replace(self.config, vocab_size=self.vocab_size, init_from="scratch")
        meta = {"vocab_size": self.vocab_size, "tokenizer": None}
        return train.build_model(Loaded(config, {}), meta).to(self.device)

    def onednn(self, compiled: bool = False) -> bool:
        """Whether oneDNN takes the float32 matmuls."""
        return why_not_onednn(self.config.onednn, self.device, self.dtype, compiled) is None

    def random_tokens(self, n: int) -> tuple[Tensor, Tensor]:
        """The same n sequences for every backend, and their targets: (n, T) int64 each."""
        draw = torch.Generator().manual_seed(self.config.seed)
        tokens = torch.randint(self.vocab_size, (n, self.config.block_size + 1), generator=draw)
        x, y = tokens[:, :-1], tokens[:, 1:]
        return x.contiguous().to(self.device), y.contiguous().to(self.device)
