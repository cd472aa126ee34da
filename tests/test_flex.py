"""flex.py on the CPU: how often it compiles, and gradients.

A compilation takes seconds, so one spec has all lengths and windows. Gradients run on CUDA: here
PyTorch computes the traced graph.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import cache, partial
from itertools import product

import oracle
import pytest
import torch
from conftest import few
from torch import Tensor
from torch._dynamo.utils import counters

from attention import BACKENDS, Spec, flex, get
from attention.check import matrix


def packed(B: int, T: int) -> Tensor:
    """Three documents and padding; borders differ by row."""
    b, j = torch.arange(B)[:, None], torch.arange(T)
    number = (j >= T // 3 + b).int() + (j >= T // 2 + 3 * b).int() + (j >= T - 5).int()
    return number * 3 % 5  # in no order, but never twice the same


SQUARE = [(T, T) for T in (1, 2, 3, 97, 127, 128, 129, 130, 200, 301)]
NARROW = [(40, 40), (120, 120), (5, 24), (1, 40), (1, 8), (1, 56)]  # 8 keys left over: flex.SPOILT
# Chunks first: a graph for two lengths serves one for both.
CHUNKS = [(33, 97), (97, 97), (64, 64), (128, 128), (2, 97), (97, 33), (3, 3), (63, 64)]


@pytest.mark.slow
@pytest.mark.parametrize("spec, shapes, B, windows, graphs", [
    (Spec(6, 3, 16, "float32", grad=False), SQUARE, 1, (None,), 3),
    (Spec(4, 2, 8, "float32", grad=False), NARROW, 1, (None,), 4),
    (Spec(3, 3, 80, "bfloat16", grad=False, segments=True), CHUNKS, 2, (None, 1, 97), 3),
    (Spec(4, 2, 32, "float32", grad=False, segments=True, scale=0.5, softcap=3.0), CHUNKS, 2,
     (None, 1, 97), 3),
    (Spec(3, 1, 20, "float16", grad=False), CHUNKS, 2, (None, 1, 97), 3),
], ids=["lengths", "narrow", "bfloat16", "scale", "float16"])
def test_all_lengths_and_windows_take_three_compilations(spec, shapes, B, windows, graphs) -> None:
    before, dtype = counters["stats"]["unique_graphs"], getattr(torch, spec.dtype)
    for (Tq, Tk), window in product(shapes, windows):
        draw = torch.Generator().manual_seed(Tq * 1000 + Tk)
        q, k, v = (torch.randn(B, T, h, spec.head_dim, generator=draw).to(dtype) for T, h in (
            (Tq, spec.n_head), (Tk, spec.n_kv_head), (Tk, spec.n_kv_head)))
        ids = packed(B, Tk) if spec.segments else None
        with torch.no_grad():
            got = BACKENDS["flex"].attend(q, k, v, replace(spec, window=window), segments=ids)
        oracle.right(got, q, k, v, segments=ids, window=window, scale=spec.scale,
                     softcap=spec.softcap)
    assert counters["stats"]["unique_graphs"] - before <= graphs


ASKED = [c for c in matrix.CASES if c.scale or c.softcap or c.sinks or c.alibi]


@pytest.mark.parametrize("case", few(ASKED[::-1]), ids=lambda case: case.name)
def test_scores_with_gradients(case, monkeypatch) -> None:
    """Traced code runs as plain PyTorch."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(flex, "compiled", cache(flex.compiled.__wrapped__))
    module = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)
    rows = tuple(replace(row, devices=("cpu",)) for row in get("flex").caps)
    matrix.check(replace(get("flex"), caps=rows), case, "float32")
