"""The first training step by plain attention in float32, which all losses are compared with."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bench import Json, candidates, hf
from bench.job import Job


def gradient_norm(params: Iterable[Tensor]) -> float:
    grads = [p.grad for p in params if p.grad is not None]
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)).float()))


class Reference:
    """Loss, gradient norm and counted FLOPs of the first batch by manual (--hf: eager) in float32,
    one sequence at a time to save memory."""

    def __init__(self, sent: Json) -> None:
        exact = {"dtype": "float32", "tf32": False, "onednn": False, "compile": False}
        job = Job(sent, attention_backend="manual", gradient_checkpointing=False, **exact)
        self.device = job.device
        what = hf.rows_of(["manual"])["manual"] if job.hf else ""
        who = candidates.build(what, job).for_training(job.setup.scaler())
        x, y = job.random_tokens(job.config.batch_size)
        specs = hf.specs(who.model, x[:1]) if job.hf else []
        who.loss(x[:1], y[:1])  # probes the backend, which must not be counted

        def addmm(out: object, a: torch.Size, b: torch.Size, out_shape: object, **_: object) -> int:
            return 2 * a[0] * a[1] * b[1]  # of shapes

        # torch does not count addmm_, with which the loss adds up the head's gradient
        counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm})
        total = 0.0
        for i in range(len(x)):
            with counter if i == 0 else nullcontext():
                loss = who.loss(x[i : i + 1], y[i : i + 1]) / len(x)
                loss.backward()
            total += float(loss.detach())
        params = list(who.model.parameters())
        per_token = counter.get_total_flops() / job.config.block_size
        self.about = {
            "loss": total,
            "gradient_norm": gradient_norm(params),
            "flops_per_token": per_token,
            # counted by the formula (6 N), but not by torch, which counts matmuls only
            "elementwise_parameters": sum(p.numel() for p in params if p.dim() == 1),
        }
        if job.hf:
            T, C = job.config.block_size, who.model.config.hidden_size
            layers = [{name: getattr(spec, name) for name in hf.FIELDS} for spec in specs]
            others = per_token - sum(12 * spec.n_head * spec.head_dim * T for spec in specs)
            sizes = (who.parameters, others, C, job.vocab_size, T, job.config.dropout)
            self.about["counted"] = asdict(hf.Counted(layers, *sizes))
