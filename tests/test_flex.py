"""flex.py on the CPU: how often it compiles, with the numbers of test_attention.py's cases; and its
lists of tiles against visible().

Each compilation takes seconds of a C++ compiler, so one spec has all lengths and windows. Gradients
run on CUDA alone: here the traced graph is computed by PyTorch's own unfused operator.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from attention import BACKENDS, Spec, flex, get, visible
from attention.check import matrix
from attention.flex import TILE, block_mask

CPU = torch.device("cpu")
SIZES = (1, 127, 128, 129, 300)


@pytest.fixture
def only_traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile traces and guards as ever, but what it has traced runs as plain PyTorch."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    flex.compiled.cache_clear()
    yield
    flex.compiled.cache_clear()


def packed(B: int, T: int) -> Tensor:
    """Three documents and, in the last 5 positions, padding; the borders differ by row."""
    b, j = torch.arange(B)[:, None], torch.arange(T)
    number = (j >= T // 3 + b).int() + (j >= T // 2 + 3 * b).int() + (j >= T - 5).int()
    return number * 3 % 5  # in no order, but never twice the same


@pytest.mark.slow
@pytest.mark.parametrize("spec, graphs", [
    (Spec(6, 3, 16, "float32", grad=False), 3),
    (Spec(4, 2, 8, "float32", grad=False), 4),  # see flex.SPOILT: 8 keys left over
    (Spec(3, 3, 80, "bfloat16", grad=False, segments=True), 3),
    (Spec(4, 2, 32, "float32", grad=False, segments=True, scale=0.5, softcap=3.0), 3),
    (Spec(3, 1, 20, "float16", grad=False), 3),
], ids=str)
def test_all_lengths_and_windows_take_three_compilations(spec: Spec, graphs: int) -> None:
    """1, up to 128, more than 128. Chunks first: a graph for two lengths serves one for both."""
    before, dtype = counters["stats"]["unique_graphs"], getattr(torch, spec.dtype)
    lengths = [(33, 97), (97, 97), (2, 97), (97, 33), (3, 3), (1, 56), (1, 1), (40, 40), (5, 24),
               *((T, T) for T in (127, 128, 129, 200, 301))]
    for (Tq, Tk), window in product(lengths, (None, 1, 97)):
        draw = torch.Generator().manual_seed(Tq * 1000 + Tk)
        q, k, v = (torch.randn(2, T, h, spec.head_dim, generator=draw).to(dtype) for T, h in (
            (Tq, spec.n_head), (Tk, spec.n_kv_head), (Tk, spec.n_kv_head)))
        ids = packed(2, Tk) if spec.segments else None
        with torch.no_grad():
            got = BACKENDS["flex"].attend(q, k, v, replace(spec, window=window), segments=ids)
        asked: dict[str, Any] = {"window": window, "scale": spec.scale, "softcap": spec.softcap}
        rough, exact = (f(q, k, v, torch.ones_like(q), segments=ids, **asked)
                        for f in (oracle.plain, oracle.attention))
        oracle.check(oracle.Result(got), rough, exact, dtype)
    assert counters["stats"]["unique_graphs"] - before <= graphs


ASKED = [c for c in matrix.CASES if c.scale or c.softcap or c.sinks or c.alibi]


@pytest.mark.parametrize("case", [
    pytest.param(c, id=c.name, marks=[pytest.mark.slow] * (c.name != ASKED[-1].name))
    for c in ASKED
])
def test_scores_with_gradients(case, only_traced, monkeypatch) -> None:
    module = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)
    rows = tuple(replace(row, devices=("cpu",)) for row in get("flex").caps)
    matrix.check(replace(get("flex"), caps=rows), case, "float32")


# --- the lists of tiles ---


def tiles(count: Tensor, index: Tensor) -> Tensor:
    """The lists as a bool table, (1 or B, tiles, tiles)."""
    count, index = count[:, 0], index[:, 0]
    listed = torch.arange(index.shape[-1]) < count[..., None]
    return torch.zeros(index.shape, dtype=torch.int32).scatter(
        -1, index.long(), listed.int()).bool()


def cut(seen: Tensor, height: int) -> tuple[Tensor, Tensor]:
    """Of (B, Tq, Tk): whether any, and whether every entry of each tile is visible."""
    rows = [r.split(TILE, dim=2) for r in seen.split(height, dim=1)]
    some = [torch.stack([t.flatten(1).any(1) for t in r], dim=1) for r in rows]
    every = [torch.stack([t.flatten(1).all(1) for t in r], dim=1) for r in rows]
    return torch.stack(some, dim=1), torch.stack(every, dim=1)


@pytest.mark.parametrize(
    ("window", "rows"), [*((w, None) for w in (None, 1, 100, 128, 129, 200, 1000)), (129, 256)]
)
def test_the_lists_are_those_of_visible(window, rows) -> None:
    for Tq, Tk in product(SIZES, SIZES):
        if Tq > Tk:
            continue
        i, j = torch.arange(Tq)[:, None], torch.arange(Tk)
        for segments in (None, packed(2, Tk), packed(2, Tk) * 0, torch.stack((j, j)) // 64):
            mask = block_mask(segments, CPU, Tq, Tk, window, rows=rows)
            seen = visible(i, j, Tk - Tq, window)[None]
            if segments is not None:
                seg_i = segments[:, -Tq:, None]
                seen = visible(i, j, Tk - Tq, window, seg_i, segments[:, None])
            some, every = cut(seen, rows or TILE)
            partial_ = tiles(mask.kv_num_blocks, mask.kv_indices)
            full = tiles(mask.full_kv_num_blocks, mask.full_kv_indices)
            assert torch.equal(full, every)
            assert not (partial_ & full).any() and not (some & ~full & ~partial_).any()
            if segments is None:
                assert torch.equal(partial_, some & ~every)
            # The backward pass for dK and dV goes by columns.
            assert torch.equal(tiles(mask.q_num_blocks, mask.q_indices), partial_.mT)
            assert torch.equal(tiles(mask.full_q_num_blocks, mask.full_q_indices), full.mT)
            assert mask.shape[-2:] == (Tq, Tk)
