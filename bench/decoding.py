"""Generated tokens, timed: the job "decode".

The model is cast to the dtype, as one does for inference, and draws the likeliest token. Time is
the host's: a token is there when its reader has it. `first` is from the call to the first token;
the rate is that of all tokens after it.

The processor, where there is one, forbids the token that was just written: it reads the text and
changes the logits, as a repetition penalty or a grammar does.

MBU, model bandwidth utilization, is the share of the memory bandwidth that decoding needs at the
very least: for every token all weights are read once (for all sequences together), and the keys
and values of every sequence, whether or not they are kept in a cache here:

    MBU = (weights + B * context * 2 * L * Hkv * D * bytes) * tokens a second a sequence / bandwidth

context is the mean length of the text while it grows; the position embeddings, of which one row is
read, do not count. The bandwidth is measured: the best of several large copies.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import attention
from bench import machine
from bench.training import build
from generate import Stats
from runtime import allow_tf32, pick_dtype, synchronize, why_not_onednn
from settings import from_dict
from train import TrainConfig


def forbid_last(ids: Tensor, logits: Tensor) -> Tensor:
    """A logits processor: no token twice in a row. (B, T) int64, (B, V) -> (B, V)."""
    return logits.scatter(-1, ids[:, -1:], -torch.inf)


class Decoding:
    """Texts of one backend's model, for any batch size, prompt length and cache."""

    def __init__(self, job: dict[str, Any]) -> None:
        config = from_dict(TrainConfig, job["train"])
        self.job, self.compile = job, config.compile is True
        device = self.device = torch.device(job["device"])
        allow_tf32(config.tf32)
        dtype = pick_dtype(config.dtype, device)
        torch.manual_seed(config.seed)
        model = build(replace(config, dropout=0.0), job["vocab_size"])
        self.model = model.to(device, dtype).eval()
        self.model.use_onednn(why_not_onednn(config.onednn, device, dtype) is None)
        c = self.model.config
        positions = self.model.transformer.wpe.weight.numel()
        self.about = {
            "title": attention.get(job["contender"]).title,
            "weight_bytes": (self.model.num_params() - positions) * dtype.itemsize,
            "token_bytes": 2 * c.n_layer * c.kv_heads * c.head_dim * dtype.itemsize,
        }

    def round(self, request: dict[str, Any]) -> dict[str, Any]:
        B, P, new = request["B"], request["P"], request["new_tokens"]
        draw = torch.Generator().manual_seed(P)
        prompt = torch.randint(self.job["vocab_size"], (B, P), generator=draw).to(self.device)
        options: dict[str, Any] = {"temperature": 0.0, "kv_cache": request["cache"]}
        options["compile"] = self.compile and request["cache"] == "static"
        if request["processor"]:
            options["logits_processor"] = forbid_last
        if request.get("warm_up"):
            return self.warm_up(prompt, new, options)
        stats = Stats()
        synchronize(self.device)
        start = time.perf_counter()
        times = [
            time.perf_counter()
            for _ in self.model.stream(prompt, new, stats=stats, **options)
        ]  # fmt: skip
        assert len(times) == new, (len(times), new)
        return {
            "first_ms": (times[0] - start) * 1e3,
            "ms": (times[-1] - times[0]) / (new - 1) * 1e3,
            "cache_bytes": stats.cache_bytes,
        }

    def warm_up(self, prompt: Tensor, new: int, options: dict[str, Any]) -> dict[str, Any]:
        machine.reset_peak(self.device)
        for _ in self.model.stream(prompt, new, **options):
            pass
        with torch.no_grad():
            page = 16 if options["kv_cache"] == "paged" else None
            chosen, _ = self.model.attention(cache=options["kv_cache"], page_size=page)
        return {
            "kernels": list(chosen.kernels),
            "peak_bytes": machine.memory(self.device),
        }


def mbu(about: dict[str, Any], B: int, P: int, new: int, token_ms: float,
        bandwidth: float) -> float:  # fmt: skip
    """The share of `bandwidth` (bytes a second) at `token_ms` a token; see above."""
    context = P + new / 2
    size = about["weight_bytes"] + B * context * about["token_bytes"]
    return size / (token_ms / 1e3) / bandwidth
