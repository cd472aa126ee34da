"""Generated tokens, timed: the job "decode".

Decoding is greedy. Time is the host's: `first` from the call to the first token, the rate from all
later ones.

MBU, model bandwidth utilization: every token reads all weights but the position embeddings (with
--weights=int8 linear layers and head take a byte each) and the keys and values of every sequence:

    MBU = (weights + B * context * 2 * L * Hkv * D * bytes) * tokens/s per sequence / bandwidth

with context the mean length of the text.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch import Tensor

import data
from attention.machine.system import synchronize
from bench import Json, candidates, hf, machine
from bench.job import Job
from bench.profiling import kernels_of
from core.cpu import int8
from inference import constrain
from model import GPTConfig


class Decoding:
    """Generation by one model, for any batch size, prompt length and cache."""

    keeps_memory = True  # between rounds, which have no warm-up of their own

    def __init__(self, told: Json) -> None:
        compile = told["train"]["compile"] is True  # of single decode steps, not of the model
        job = self.job = Job(told, dropout=0.0, gradient_checkpointing=False, compile=False)
        self.device, size = job.device, job.setup.dtype.itemsize
        candidate = candidates.build(told["baseline"], job)
        self.who = who = candidate.for_decoding(compile, told["weights"])
        self.parameters, self.int8 = candidates.parameters(who), int8.parameters(who.model)
        model = job.config.model(job.vocab_size)
        sizes = hf.Counted(**told["hf"]["counted"]) if job.hf else model
        self.about = {
            "title": who.title,
            "weight_bytes": weight_bytes(self.parameters, self.int8, size),
            "token_bytes": token_numbers(sizes) * size,
        }

    def round(self, request: Json) -> Json:
        B, P, new = request["B"], request["P"], request["new_tokens"]
        draw = torch.Generator().manual_seed(P)
        prompt = torch.randint(self.job.vocab_size, (B, P), generator=draw).to(self.device)
        how = constrained(request.get("constraint"), self.job.vocab_size)
        if request.get("warm_up"):
            return self.warm_up(prompt, new, request["cache"], **how)
        synchronize(self.device)
        start = time.perf_counter()
        first, last, cache_bytes = self.who.write(prompt, new, request["cache"], **how)
        return {
            "first_ms": (first - start) * 1e3,
            "ms": (last - first) / (new - 1) * 1e3,
            "cache_bytes": cache_bytes,
            "shape": {"B": B, "P": P, "new_tokens": new, "parameters": self.parameters}
            | ({"int8_parameters": self.int8} if self.int8 else {}),
        }

    def warm_up(self, prompt: Tensor, new: int, cache: str, **how: Any) -> Json:
        machine.reset_peak(self.device)
        self.who.write(prompt, new, cache, **how)
        peak = machine.memory(self.device)
        if chosen := self.who.chosen(cache):
            return {**candidates.evidence(chosen), "peak_bytes": peak}
        # The kernels that torch chose, from the profiler, in two tokens.
        with torch.profiler.profile() as looking:
            self.who.write(prompt, 2, cache, **how)
            synchronize(self.device)
        kernels = kernels_of(looking)["kernels"]
        return {"kernels": kernels, "proof": None, "peak_bytes": peak}


@functools.cache
def constrained(how: str | None, V: int) -> Json:
    """Return the options of engine.stream() for --constraint; with "regex" texts never end."""
    if how == "regex":
        characters = data.CharTokenizer([chr(32 + i) for i in range(V)])
        known = data.GPT2Tokenizer() if V >= 50257 else characters
        return {"constraint": constrain.regex("[^ ]+( [^ ]+)*", known, stop=())}
    return {"logits_processor": {"tensor": penalty, "python": by_python}[how]} if how else {}


def penalty(tokens: Tensor, logits: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Repetition penalty 1.2 (Keskar et al. 2019, arXiv 1909.05858)."""
    seen = logits.gather(1, tokens)
    return logits.scatter(1, tokens, torch.where(seen < 0, seen * 1.2, seen / 1.2))


def by_python(tokens: Tensor, logits: Tensor) -> Tensor:
    return penalty(torch.tensor(tokens.tolist(), device=logits.device), logits)


def weight_bytes(parameters: int, int8_parameters: int, itemsize: int) -> int:
    """Return the bytes of weights that a token reads; with int8 the head's, not the embedding's."""
    return (parameters - int8_parameters) * itemsize + int8_parameters


def token_numbers(sizes: GPTConfig | hf.Counted) -> int:
    """Return the numbers in the keys and values of a token, all layers."""
    if isinstance(sizes, hf.Counted):
        return 2 * sum(layer["n_kv_head"] * layer["head_dim"] for layer in sizes.layers)
    return 2 * sizes.n_layer * sizes.kv_heads * sizes.head_dim


def mbu(about: Json, B: int, P: int, new: int, token_ms: float, bandwidth: float) -> float:
    """Return the MBU; `bandwidth` in bytes/s."""
    context = P + new / 2
    size = about["weight_bytes"] + B * context * about["token_bytes"]
    return size / (token_ms / 1e3) / bandwidth
