"""attention/proof.py's truth and tolerance, for tests that have tensors and no Spec."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention import Spec, proof
from attention.check.matrix import agree
from attention.proof import Inputs, Result

NAMES = ("window", "right", "scale", "softcap")


def _call(of: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, options: Any) -> Result:
    more = [options.pop(name, None) for name in ("segments", "sinks", "alibi_slopes")]
    has = dict(zip(("segments", "sinks", "alibi"), (t is not None for t in more), strict=True))
    shape = q.shape[2], k.shape[2], q.shape[3], str(q.dtype).removeprefix("torch.")
    return of(Inputs(q, k, v, dout, *more), Spec(*shape, **has, **options))


def attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> Result:
    """The truth in float64, on the CPU."""
    with torch.device("cpu"):
        return _call(proof.truth, q.cpu(), k.cpu(), v.cpu(), dout.cpu(), options)


def plain(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> Result:
    """Plain PyTorch in the inputs' dtype."""
    return _call(proof.plain, q, k, v, dout, options)


def check(got: Result, rough: Result, exact: Result, dtype: torch.dtype) -> None:
    agree(got, rough, exact, str(dtype).removeprefix("torch."))
