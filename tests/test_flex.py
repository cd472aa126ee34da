"""flex.py on the CPU, where the matrix of test_attention.py sees only that training is refused.

Each compilation takes seconds of a C++ compiler, so the cases share them: three lengths, three
tiles and all windows are one. Where only the number of compilations counts, nothing is compiled.
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

from attention import Policy, Spec, flex, get, visible
from attention.check import matrix
from attention.flex import TILE, block_mask
from model import GPT, GPTConfig

CPU = torch.device("cpu")
SIZES = (1, 127, 128, 129, 300)


@pytest.fixture
def graphs() -> Iterator[Any]:
    """How many graphs were compiled since the test began."""
    before = counters["stats"]["unique_graphs"]
    yield lambda: counters["stats"]["unique_graphs"] - before


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


def inputs(Tq: int, Tk: int, spec: Spec, B: int = 2, layout: str = "plain",
           size: float = 1.0) -> list[Tensor]:
    """q, k, v: contiguous, cut from one tensor as a model does ("split"), or heads first."""
    draw = torch.Generator().manual_seed(Tq * 1000 + Tk)
    heads = [spec.n_head, spec.n_kv_head, spec.n_kv_head]
    x = torch.randn(B, max(Tq, Tk), sum(heads), spec.head_dim, generator=draw) * size
    q, k, v = x.to(getattr(torch, spec.dtype)).split(heads, dim=2)
    q, k, v = q[:, q.shape[1] - Tq :], k[:, :Tk], v[:, :Tk]
    if layout == "heads first":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    return [q, k, v] if layout == "split" else [t.contiguous() if layout == "plain" else t
                                                for t in (q, k, v)]


@torch.no_grad()
def check(qkv: list[Tensor], spec: Spec, segments: Tensor | None = None) -> None:
    got = flex.attend(*qkv, spec, segments=segments)
    with torch.enable_grad():
        plain, truth = (
            f(*qkv, torch.ones_like(qkv[0]), window=spec.window, segments=segments,
              scale=spec.scale, softcap=spec.softcap)
            for f in (oracle.plain, oracle.attention)
        )
    oracle.check(oracle.Result(got), plain, truth, qkv[0].dtype)
    assert not got[:, : max(qkv[0].shape[1] - qkv[1].shape[1], 0)].any()


# --- numbers, and how often they are compiled ---


@pytest.mark.slow
def test_64_lengths_take_three_compilations(graphs) -> None:
    """Evaluation and sampling without a cache: 1, up to 128, more than 128."""
    spec = Spec(6, 3, 16, "float32", grad=False)
    lengths = [1, 2, 3, 97, 127, 128, 129, 130, *range(131, 411, 5)]
    assert len(lengths) == 64
    for n, T in enumerate(lengths):
        with torch.no_grad():
            flex.attend(*inputs(T, T, spec, B=1), spec)
        if n % 8 == 0 or T in (2, 128, 129):
            check(inputs(T, T, spec, B=1), spec)
    assert graphs() == 3


@pytest.mark.slow
def test_narrow_heads_and_8_keys_left_over(graphs) -> None:
    """Where the kernel for AVX2 writes over its rows' maxima: see flex.SPOILT."""
    spec = Spec(4, 2, 8, "float32", grad=False)
    for Tq, Tk in ((40, 40), (120, 120), (5, 24), (1, 40), (1, 8), (1, 56)):
        check(inputs(Tq, Tk, spec, B=1), spec)
    assert graphs() <= 4


SPECS = {  # dtypes, head dims, groups and layouts, so that each is seen in some compilation
    "float32": (Spec(4, 2, 32, "float32", grad=False), "plain"),
    "bfloat16-80-split": (Spec(3, 3, 80, "bfloat16", grad=False, segments=True), "split"),
    "float16-20-mqa-heads-first": (Spec(3, 1, 20, "float16", grad=False), "heads first"),
    "float32-segments-scale-softcap": (
        Spec(4, 2, 32, "float32", grad=False, segments=True, scale=0.5, softcap=3.0), "plain"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_numbers(name, graphs) -> None:
    """Chunks first: a graph for two lengths serves one for both as well."""
    spec, layout = SPECS[name]
    shapes = ((33, 97), (97, 97), (64, 64), (128, 128), (2, 97), (97, 33), (3, 3), (63, 64))
    for (Tq, Tk), window in product(shapes, (None, 1, 16, 97, 500)):
        segments = packed(2, Tk) if spec.segments else None
        asked = replace(spec, window=window)
        check(inputs(Tq, Tk, asked, layout=layout), asked, segments)
    for size in (4, 30):
        check(inputs(97, 97, spec, layout=layout, size=size), spec,
              packed(2, 97) if spec.segments else None)
    assert graphs() <= 3


ASKED = [c for c in matrix.CASES if c.scale or c.softcap or c.sinks or c.alibi]


@pytest.mark.parametrize("case", [
    pytest.param(c, id=c.name, marks=[pytest.mark.slow] * (c.name != ASKED[-1].name))
    for c in ASKED
])
def test_scale_softcap_and_sinks_with_gradients(case, only_traced, monkeypatch) -> None:
    """Sinks and gradients run on CUDA alone. What is traced is the same: here it is computed by
    PyTorch's own unfused operator, which the CPU has, backward too."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)
    rows = tuple(replace(row, devices=("cpu",)) for row in get("flex").caps)
    matrix.check(replace(get("flex"), caps=rows), case, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("by", ["eager", "inductor"])
def test_the_model_compiles_into_one_graph(by, graphs) -> None:
    config = GPTConfig(block_size=256, vocab_size=64, n_layer=1, n_head=2, n_embd=32,
                       attention_window=100)
    models = []
    for name in ("flex", "manual"):
        torch.manual_seed(0)
        asked = replace(config, attention_backend=name)
        models.append(GPT(asked, Policy(fallback=False)).eval())
    idx, segments = torch.randint(0, 64, (2, 200)), packed(2, 200)
    with torch.no_grad():
        plan = models[0].plan(segments=True, compiled=True)
        assert plan[0].chosen.backend.name == "flex"
        before = graphs()
        got = torch.compile(models[0], fullgraph=True, backend=by)(idx, None, segments)[0]
        assert graphs() == before + 1
        torch.testing.assert_close(got, models[1](idx, None, segments)[0])


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
