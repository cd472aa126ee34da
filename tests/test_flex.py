"""flex.py on the CPU, where the matrix of test_attention.py sees only that training is refused.

Each compilation takes seconds of a C++ compiler, so the cases share them: three lengths, three
tiles and all windows are one. Where only the number of compilations counts, nothing is compiled.
"""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from attention import (
    BackendUnavailable,
    Machine,
    Policy,
    Spec,
    flex,
    get,
    matrix,
    oracle,
    resolve,
    visible,
)
from attention.flex import TILE, block_mask, kept_block_mask
from model import GPT, GPTConfig

CPU = torch.device("cpu")
STRICT = Policy(fallback=False)
SIZES = (1, 2, 127, 128, 129, 300, 384)


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
           size: float = 1.0) -> list[Tensor]:  # fmt: skip
    """q, k, v: contiguous, cut from one tensor as a model does ("split"), or heads first."""
    draw = torch.Generator().manual_seed(Tq * 1000 + Tk)
    heads = [spec.n_head, spec.n_kv_head, spec.n_kv_head]
    x = torch.randn(B, max(Tq, Tk), sum(heads), spec.head_dim, generator=draw) * size
    q, k, v = x.to(getattr(torch, spec.dtype)).split(heads, dim=2)
    q, k, v = q[:, q.shape[1] - Tq :], k[:, :Tk], v[:, :Tk]
    if layout == "heads first":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    return [q, k, v] if layout == "split" else [t.contiguous() if layout == "plain" else t
                                                for t in (q, k, v)]  # fmt: skip


@torch.no_grad()
def check(qkv: list[Tensor], spec: Spec, segments: Tensor | None = None) -> None:
    got = flex.attend(*qkv, spec, segments=segments)
    with torch.enable_grad():
        plain, truth = (
            f(*qkv, torch.ones_like(qkv[0]), window=spec.window, segments=segments,
              scale=spec.scale, softcap=spec.softcap)
            for f in (oracle.plain, oracle.attention)
        )  # fmt: skip
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
def test_decoding_takes_four_compilations(graphs) -> None:
    """1, up to 128, more than 128; and of two keys the last query lies a stride behind the first,
    which torch.compile takes for a rule until it sees three."""
    spec = Spec(6, 3, 16, "float32", window=40, grad=False)
    for T in (1, 2, 3, 40, 41, 127, 128, 129, 200, 257, 300, 400, 500):
        check(inputs(1, T, spec, B=1), spec)
    assert graphs() <= 4


@pytest.mark.slow
def test_narrow_heads_and_8_keys_left_over(graphs) -> None:
    """Where the kernel for AVX2 writes over its rows' maxima: see flex.SPOILT."""
    spec = Spec(4, 2, 8, "float32", grad=False)
    for Tq, Tk in ((40, 40), (120, 120), (5, 24), (1, 40), (1, 8), (1, 56)):
        check(inputs(Tq, Tk, spec, B=1), spec)
    assert graphs() <= 4


def test_on_any_cpu_no_heads_of_8_or_16_reach_the_kernel(monkeypatch) -> None:
    seen = []

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: Any, *rest: Any) -> Tensor:
        seen.append((q.shape[3], k.shape[3], v.shape[3], scale))
        return v

    monkeypatch.setattr(flex, "compiled", lambda *key: call)
    for head_dim, scale in ((8, None), (16, None), (16, 0.5), (24, None), (20, 0.5)):
        spec = Spec(2, 2, head_dim, "float32", grad=False, scale=scale)
        assert flex.attend(*inputs(5, 5, spec), spec).shape == (2, 5, 2, head_dim)
    assert seen == [(12, 12, 12, str(8**-0.5)), (20, 20, 20, "0.25"), (20, 20, 20, "0.5"),
                    (24, 24, 24, None), (20, 20, 20, "0.5")]  # fmt: skip


SPECS = {  # dtypes, head dims, groups and layouts, so that each is seen in some compilation
    "float32": (Spec(4, 2, 32, "float32", grad=False), "plain"),
    "bfloat16-80-split": (Spec(3, 3, 80, "bfloat16", grad=False, segments=True), "split"),
    "float16-20-mqa-heads-first": (Spec(3, 1, 20, "float16", grad=False), "heads first"),
    "float32-segments-scale-softcap": (
        Spec(4, 2, 32, "float32", grad=False, segments=True, scale=0.5, softcap=3.0), "plain"),
}  # fmt: skip


@pytest.mark.parametrize("name", [
    pytest.param(n, marks=() if "softcap" in n else pytest.mark.slow) for n in SPECS
])  # fmt: skip
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
              packed(2, 97) if spec.segments else None)  # fmt: skip
    assert graphs() <= 3


@pytest.mark.slow
@pytest.mark.parametrize("segments", [False, True])
def test_numbers_over_many_tiles(segments, graphs) -> None:
    spec = Spec(2, 2, 16, "float32", grad=False, segments=segments)
    for (Tq, Tk), window in product(((140, 400), (300, 300)), (None, 100, 150)):
        asked = replace(spec, window=window)
        check(inputs(Tq, Tk, asked, B=3), asked, packed(3, Tk) if segments else None)
    assert graphs() <= 3


ASKED = [c for c in matrix.CASES if c.scale or c.softcap or c.sinks]


@pytest.mark.parametrize("case", [
    pytest.param(c, id=c.name, marks=() if c.scale and c.softcap and c.sinks else pytest.mark.slow)
    for c in ASKED
])  # fmt: skip
def test_scale_softcap_and_sinks_with_gradients(case, only_traced, monkeypatch) -> None:
    """Sinks and gradients run on CUDA alone. What is traced is the same: here it is computed by
    PyTorch's own unfused operator, which the CPU has, backward too."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)
    matrix.check(get("flex"), case, "float32")


UNSEGMENTED = [c for c in ASKED if c.segments is None]


@pytest.mark.parametrize("case", UNSEGMENTED[::2], ids=lambda c: c.name)
def test_they_go_into_the_graph_of_a_compiled_model(case) -> None:
    spec = case.spec("float32", grad=False, compiled=True)
    more = {"sinks": matrix.sinks(case, "float32")} if case.sinks else {}

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return get("flex").attend(q, k, v, spec, **more)

    torch._dynamo.reset()
    with torch.no_grad():
        qkv = matrix.draw(case, "float32")[:3]
        out = torch.compile(layer, backend="eager", fullgraph=True)(*qkv)
    plain, truth = matrix.plain(case, "float32"), matrix.truth(case, "float32")
    oracle.check(oracle.Result(out), plain, truth, torch.float32)


@pytest.mark.slow
def test_many_specs_and_shapes_do_not_use_up_the_versions_of_one_function(only_traced) -> None:
    """torch.compile gives up after 8 versions; here after 3."""
    limit = 3
    with torch._dynamo.config.patch(recompile_limit=limit), torch.no_grad():
        for D in range(8, 9 + limit):
            spec = Spec(2, 2, D, "float32", grad=False)
            flex.attend(*inputs(5, 5, spec), spec)
        spec = Spec(3, 1, 8, "float32", grad=False, segments=True)
        for B, (Tq, Tk) in product((1, 2), ((1, 1), (1, 130), (2, 3), (2, 300), (200, 300))):
            check(inputs(Tq, Tk, spec, B), spec, packed(B, Tk))


def test_another_window_is_another_mask_and_no_other_kernel(only_traced) -> None:
    for window in (3, 5, None):
        spec = Spec(2, 2, 8, "float32", grad=False, window=window)
        flex.attend(*inputs(64, 64, spec), spec)
    assert flex.compiled.cache_info().misses == 1


def test_in_training_each_length_is_compiled_in(monkeypatch) -> None:
    """A symbol would cost the kernel for whole tiles, and a bench has many lengths in a process."""
    sizes: list[list[Any]] = []

    def traced(graph: Any, given: list[Any]) -> Any:
        sizes.append([size for t in given if isinstance(t, Tensor) for size in t.shape])
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=traced))
    flex.compiled.cache_clear()
    spec = Spec(2, 2, 8, "float32")
    lengths = [(1, 128), (2, 128), (2, 256), (2, 384), (2, 512), (2, 640)]
    for B, T in (*lengths, *lengths):  # a second time nothing is left to compile
        qkv = inputs(T, T, spec, B)
        with torch._dynamo.config.patch(recompile_limit=3):
            flex.attend(*qkv, spec)
    flex.compiled.cache_clear()
    assert len(sizes) == len(lengths)
    assert all(type(size) is int for graph in sizes for size in graph)


@pytest.mark.parametrize("by", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_model_compiles_into_one_graph(by, graphs) -> None:
    config = GPTConfig(block_size=256, vocab_size=64, n_layer=1, n_head=2, n_embd=32,
                       attention_window=100)  # fmt: skip
    models = []
    for name in ("flex", "manual"):
        torch.manual_seed(0)
        asked = replace(config, attention_backend=name)
        models.append(GPT(asked, Policy(fallback=False)).eval())
    idx, segments = torch.randint(0, 64, (2, 200)), packed(2, 200)
    with torch.no_grad():
        models[0].compiled = True
        assert models[0].attention(segments=True)[0].backend.name == "flex"
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
        -1, index.long(), listed.int()).bool()  # fmt: skip


def cut(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Of (B, Tq, Tk): whether any, and whether every entry of each tile is visible."""
    rows = [r.split(TILE, dim=2) for r in seen.split(TILE, dim=1)]
    some = [torch.stack([t.flatten(1).any(1) for t in r], dim=1) for r in rows]
    every = [torch.stack([t.flatten(1).all(1) for t in r], dim=1) for r in rows]
    return torch.stack(some, dim=1), torch.stack(every, dim=1)


@pytest.mark.parametrize("window", [None, 1, 2, 100, 128, 129, 200, 384, 1000])
def test_the_lists_are_those_of_visible(window) -> None:
    for Tq, Tk in product(SIZES, SIZES):
        if Tq > Tk:
            continue
        i, j = torch.arange(Tq)[:, None], torch.arange(Tk)
        for segments in (None, packed(2, Tk), packed(2, Tk) * 0, torch.stack((j, j)) // 64):
            mask = block_mask(Tq, Tk, window, segments, CPU)
            seen = visible(i, j, Tk - Tq, window)[None]
            if segments is not None:
                seg_i = segments[:, -Tq:, None]
                seen = visible(i, j, Tk - Tq, window, seg_i, segments[:, None])
            some, every = cut(seen)
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


def test_segments_are_padded_to_the_least_power_of_two_of_tiles() -> None:
    for Tk in range(1, 1026):
        B, size = flex.room(torch.zeros(3, Tk))
        assert (B, size) == (3, min(s for s in (128, 256, 512, 1024, 2048) if s >= Tk))


def test_documents_skip_the_tiles_between_them() -> None:
    segments = (torch.arange(1024) // 256).expand(1, 1024)
    mask = block_mask(1024, 1024, None, segments, CPU)
    listed = mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()
    assert listed == 4 * 3  # of 36: two on the diagonal and one below, in each document


def test_lists_are_made_once_for_a_shape() -> None:
    first = kept_block_mask(200, 300, 9, None, CPU)
    assert kept_block_mask(200, 300, 9, None, CPU) is first
    for other in ((199, 300, 9), (200, 301, 9), (200, 300, 8), (200, 300, None)):
        assert kept_block_mask(*other, None, CPU) is not first


def test_lists_are_made_once_for_the_layers_that_see_the_same_segments() -> None:
    segments = packed(2, 200)
    first = kept_block_mask(200, 200, None, segments, CPU)
    assert kept_block_mask(200, 200, None, segments, CPU) is first
    assert kept_block_mask(200, 200, 9, segments, CPU) is not first
    assert kept_block_mask(200, 200, None, segments.clone(), CPU) is not first
    first = kept_block_mask(200, 200, None, segments, CPU)
    segments[:] = 1  # the same tensor, and other segments
    second = kept_block_mask(200, 200, None, segments, CPU)
    assert second is not first and second.full_kv_num_blocks.sum() == 2
    alive = weakref.ref(second)
    del segments, second
    gc.collect()
    assert alive() is None


def test_lists_made_in_inference_mode_can_be_used_in_training() -> None:
    with torch.inference_mode():
        segments = packed(2, 150)
        masks = [kept_block_mask(150, 150, 3, s, CPU) for s in (None, segments)]
        segments[:] = 1
        assert kept_block_mask(150, 150, 3, segments, CPU).kv_num_blocks.sum() == 6
    assert not any(m.kv_indices.is_inference() for m in masks)


# --- what is refused ---


def why_not(spec: Spec, device: str = "cuda", capability: tuple[int, int] | None = (9, 0),
            torch_: str = "2.13.0") -> list[str]:  # fmt: skip
    here = capability if device == "cuda" else None
    return get("flex").why_not(spec, Machine(device, "this one", here, torch_))


def test_caps() -> None:
    spec, eval_ = Spec(4, 2, 64, "bfloat16"), Spec(4, 2, 64, "bfloat16", grad=False)
    assert get("flex_attention") is get("flex") and get("flex").fallback == "sdpa"
    assert why_not(replace(spec, window=9, segments=True)) == []
    for device in ("cpu", "mps"):
        assert why_not(eval_, device) == []
        assert why_not(spec, device) == ["it has no backward pass"]
    assert why_not(spec, torch_="2.5.0") == [] and why_not(eval_, "cpu", torch_="2.6.0") == []
    for torch_ in ("2.5.0", "2.13.0"):
        assert why_not(replace(spec, dtype="float16"), "cuda", (7, 0), torch_) == []
    assert len(why_not(spec, capability=(7, 5))) == 1  # bfloat16
    assert len(why_not(spec, capability=(6, 1))) == 1
    assert why_not(replace(spec, scale=0.3, softcap=20.0, sinks=True)) == []
    assert why_not(replace(spec, dtype="float32", sinks=True), capability=(7, 5)) == []
    assert why_not(replace(spec, softcap=20.0, scale=0.3), torch_="2.5.0") == []
    (why_,) = why_not(replace(spec, sinks=True), torch_="2.8.0")
    assert why_ == "it has no attention sinks"
    for device in ("cpu", "mps"):  # their kernels give no logsumexp
        assert why_not(replace(eval_, scale=0.3, softcap=20.0), device) == []
        assert why_not(replace(eval_, sinks=True), device) == ["it has no attention sinks"]
    for other, words in (({"dtype": "float64"}, "not float64"), ({"dropout": 0.1}, "no dropout"),
                         ({"cache": "static"}, "no 'static' cache")):  # fmt: skip
        for device in ("cuda", "cpu", "mps"):
            (why_,) = why_not(replace(eval_, **other), device)
            assert words in why_


def test_training_on_the_cpu_falls_back_to_sdpa() -> None:
    here = Machine.here("cpu")
    assert resolve("flex", Spec(2, 2, 32, "float32"), here).backend.name == "sdpa"
    with pytest.raises(BackendUnavailable, match="flex: it has no backward pass"):
        resolve("flex", Spec(2, 2, 32, "float32"), here, STRICT)


def test_a_torch_without_flex_attention_can_import_it() -> None:
    script = "import sys, torch; sys.modules['torch.nn.attention.flex_attention'] = None\n"
    script += "from attention import get, Spec, Machine\n"
    script += "old = Machine('cpu', '', torch='2.4')\n"
    script += "print(get('flex').why_not(Spec(2, 2, 32, 'float32'), old))"
    root = Path(__file__).parents[1]
    ran = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert "it needs torch >= 2.6, this is 2.4" in ran.stdout, ran.stderr
