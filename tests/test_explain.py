"""explain.py: every number that is shown, held against the thing itself."""

from __future__ import annotations

import io
import json
import math
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_tiled import Recorder
from test_train import enter
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import checkpoint
import explain
import viewer.caches
import viewer.ring
import viewer.tiles
from attention import Policy, Resolution, Spec, manual, tiled, visible
from attention.gpus import datasheet_bandwidth, datasheet_tflops
from attention.probing import allowed_error
from attention.tiled import forward_tiles
from core.settings import UserError
from data.tokenizer import CharTokenizer
from explain import ExplainConfig, forward, prompt_of
from inference.cache import PagedStep, StaticStep
from model import GPT, GPTConfig
from viewer.cost import (
    GPUS,
    costs,
    fast_memory,
    find_gpu,
    manual_steps,
    tile_sizes,
    tiled_bytes,
    visited,
)
from viewer.document import Document, pack, token_of, unpack
from viewer.maps import Call, agreement, maps, seen, watched, weights
from viewer.text import amount, duration, render, scaled

PROMPT = "to be or not to be that is it"
TOKENIZER = CharTokenizer([chr(c) for c in range(ord(" "), ord("~") + 1)])
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"attention_window": 6},
    "segments": {"segments": "|", "prompt": "to be|or not to be|that"},
    "gqa-window-segments": {
        "attention_window": 5, "n_kv_head": 2, "segments": "|", "prompt": "to be|or not to be|it",
    },
    "one token": {"prompt": "a"},
    "full": {"prompt": (PROMPT * 3)[:48]},
    "bfloat16": {"dtype": "bfloat16", "n_kv_head": 1},
}  # fmt: skip


def tiny(**changes: Any) -> GPT:
    """Two layers, four heads of 8; weights so large that heads look somewhere."""
    torch.manual_seed(0)
    config = {"block_size": 48, "vocab_size": 100, "n_layer": 2, "n_head": 4, "n_embd": 32}
    model = GPT(GPTConfig(**{**config, **changes})).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "c_attn.weight" in name:
                p.mul_(15)
    return model


@cache
def made(shape: str) -> tuple[GPT, ExplainConfig]:
    changes = dict(SHAPES[shape])
    names = ("prompt", "segments", "dtype")
    knobs = {name: changes.pop(name) for name in names if name in changes}
    config = ExplainConfig(**{"prompt": PROMPT, "block_m": 8, "block_n": 5, **knobs})
    return tiny(**changes).to(getattr(torch, config.dtype)), config


def explained(model: GPT, config: ExplainConfig) -> Document:
    return explain.explain(model, TOKENIZER, config, "a tiny model")


@cache
def document(shape: str) -> Document:
    return explained(*made(shape))


def calls_of(shape: str) -> list[Call]:
    model, config = made(shape)
    return forward(model, prompt_of(config, TOKENIZER, model.config.block_size))


def sees(call: Call) -> Tensor:
    """(T, T) bool, by visible() for each pair."""
    T, seg = call.q.shape[1], None if call.segments is None else call.segments[0].tolist()
    rows = [
        [
            bool(visible(i, j, 0, call.spec.window, *((seg[i], seg[j]) if seg else ())))
            for j in range(T)
        ]
        for i in range(T)
    ]
    return torch.tensor(rows)


def softmax_by_hand(call: Call) -> Tensor:
    """(H, T, T) float64, straight from the formula."""
    q, k = (t[0].double() for t in (call.q, call.k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[2])
    return torch.softmax(scores.masked_fill(~sees(call), -torch.inf), dim=-1)


def stand_in(model: GPT, monkeypatch: pytest.MonkeyPatch,
             spoil: Callable[[int, Tensor], Tensor]) -> None:  # fmt: skip
    """The model runs on manual, but for what `spoil` makes of layer n's output."""
    calls = []

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return spoil((len(calls) - 1) % model.config.n_layer, manual.attend(*args, **kwargs))

    broken = Resolution("broken", replace(manual.BACKEND, name="broken", attend=attend))
    real = model.attention

    def chosen(segments: bool = False, shape: Any = None, cache: str = "none",
               *rest: Any) -> tuple[Resolution, Spec]:  # fmt: skip
        resolution, spec = real(segments, shape, cache, *rest)
        return (broken if cache == "none" else resolution), spec

    monkeypatch.setattr(model, "attention", chosen)


# --- the q, k and v of the model ---


@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_caught_is_what_the_model_computed(shape):
    model, config = made(shape)
    prompt = prompt_of(config, TOKENIZER, 48)
    calls = calls_of(shape)
    assert len(calls) == model.config.n_layer
    idx = torch.tensor([prompt.ids])
    seg = None if prompt.segments is None else torch.tensor([prompt.segments]).int()
    for call in calls:
        assert call.spec.window == model.config.attention_window
        assert (call.segments is None) == (seg is None) == ("segments" not in shape)
        assert seg is None or torch.equal(call.segments, seg)
    block = model.transformer.h[0]
    with torch.no_grad():
        x = model.transformer.wte(idx) + model.transformer.wpe(torch.arange(idx.shape[1]))
        q, k, v = block.attn.c_attn(block.ln_1(x)).split(
            [block.attn.q_size, *[block.attn.kv_size] * 2], dim=2
        )
        for caught, own in zip((calls[0].q, calls[0].k, calls[0].v), (q, k, v), strict=True):
            assert torch.equal(caught.flatten(2), own)
        before = model.hidden(idx, seg)
        with watched(model) as again:
            assert torch.equal(model.hidden(idx, seg), before)
        assert len(again) == 2
        model.hidden(idx, seg)  # nobody listens any more
    assert len(again) == 2


# --- maps ---


@pytest.mark.parametrize("shape", SHAPES)
def test_maps_are_the_softmax_of_the_models_own_q_and_k(shape):
    m, calls = document(shape)["maps"], calls_of(shape)
    T = calls[0].q.shape[1]
    packed = unpack(m["weights"])
    assert packed.shape == (2, 4, T * (T + 1) // 2) and packed.dtype == np.uint16
    assert m["levels"] == 65535 and m["rounding"] == 0.5 / 65535 and m["sum_error"] < 1e-6
    off = [float((weights(call).sum(dim=-1) - 1).abs().max()) for call in calls]
    assert m["sum_error"] == maps(calls[::-1])["sum_error"] == max(off)
    rows, cols = np.tril_indices(T)
    for layer, call in enumerate(calls):
        P = torch.zeros(4, T, T, dtype=torch.float64)
        P[:, rows, cols] = torch.from_numpy(packed[layer] / m["levels"])
        torch.testing.assert_close(P, softmax_by_hand(call), rtol=0, atol=m["rounding"] + 2e-6)
        assert (P.sum(dim=-1) - 1).abs().max() <= T * m["rounding"] + 1e-6
        assert not P[:, ~sees(call)].any()
        # Where the kernel's output comes from: P V is what the model went on with.
        v = call.v[0].double().repeat_interleave(4 // call.v.shape[2], dim=1)
        out = torch.einsum("hij,jhd->ihd", P, v)
        tolerance = 0.03 if call.q.dtype == torch.bfloat16 else 2e-3
        torch.testing.assert_close(out, call.out[0].double(), rtol=0, atol=tolerance)
    if T > 8:  # the heads look somewhere: a wrong mask would be seen
        assert weights(calls[0]).amax(dim=-1).median() > 0.3
        i = torch.arange(T)
        assert [[*range(a, b)] for a, b in m["seen"]] == [i[row].tolist() for row in sees(calls[0])]


def test_many_weights_take_8_bits_each(monkeypatch):
    call = calls_of("plain")[0]
    n = unpack(maps([call])["weights"]).size
    monkeypatch.setattr("viewer.maps.FINE", n)
    assert maps([call])["levels"] == 65535
    monkeypatch.setattr("viewer.maps.FINE", n - 1)
    m = maps([call])
    packed = unpack(m["weights"])
    assert packed.dtype == np.uint8 and m["levels"] == 255 and m["rounding"] == 0.5 / 255
    rows, cols = np.tril_indices(call.q.shape[1])
    want = softmax_by_hand(call)[:, rows, cols].numpy()
    assert np.abs(packed[0] / 255 - want).max() <= m["rounding"] + 2e-6


def test_seen_knows_window_and_documents():
    seg = torch.tensor([[0, 0, 0, 1, 1]])
    assert seen(5, None, None) == [[0, 1], [0, 2], [0, 3], [0, 4], [0, 5]]
    assert seen(5, 2, None) == [[0, 1], [0, 2], [1, 3], [2, 4], [3, 5]]
    assert seen(5, None, seg) == [[0, 1], [0, 2], [0, 3], [3, 4], [3, 5]]
    assert seen(5, 2, seg) == [[0, 1], [0, 2], [1, 3], [3, 4], [3, 5]]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_backend_agrees(shape):
    for layer in document(shape)["maps"]["layers"]:
        assert layer["agrees"] and 0 <= layer["error"] <= layer["allowed"]
        assert layer["allowed"] < (0.1 if shape == "bfloat16" else 2e-5) * layer["largest"]
        assert layer["error"] == max(layer["heads"]) and len(layer["heads"]) == 4
    assert document(shape)["about"]["backend"] == "sdpa"
    for layer, call in zip(document(shape)["maps"]["layers"], calls_of(shape), strict=True):
        v = call.v[0].double().repeat_interleave(4 // call.v.shape[2], dim=1)
        exact = torch.einsum("hij,jhd->ihd", softmax_by_hand(call), v)
        plain = manual.attend(call.q, call.k, call.v, call.spec, segments=call.segments)[0]
        for name, want in (
            ("largest", exact), ("error", call.out[0] - exact), ("manual_error", plain - exact)
        ):  # fmt: skip
            assert layer[name] == pytest.approx(float(want.abs().max()), rel=1e-6, abs=1e-14)  # type: ignore[literal-required]
        heads = (call.out[0] - exact).abs().amax(dim=(0, 2))
        assert layer["heads"] == pytest.approx(heads.tolist(), rel=1e-6, abs=1e-14)


def test_an_output_that_is_off_does_not_agree(monkeypatch):
    """One number, of one head of the second layer, off by a thousandth."""
    model, config = tiny(), made("plain")[1]

    def spoil(layer: int, out: Tensor) -> Tensor:
        if layer == 1:
            out = out.clone()
            out[0, 7, 2, 3] += 1e-3
        return out

    stand_in(model, monkeypatch, spoil)
    found = explained(model, config)
    first, second = found["maps"]["layers"]
    assert first["agrees"] and not second["agrees"]
    assert second["error"] == pytest.approx(1e-3, rel=0.01)
    assert [e > 1e-4 for e in second["heads"]] == [False, False, True, False]
    assert found["about"]["backend"] == "broken"
    assert "layer 1 does NOT agree" in " ".join(render(found).split())
    assert "in 1 of 2 layers" in " ".join(render(found).split())


def test_an_output_that_is_no_number_is_refused(monkeypatch):
    model, config = tiny(), made("plain")[1]
    stand_in(model, monkeypatch, lambda layer, out: out / (layer != 1))
    with pytest.raises(UserError, match="the attention of layer 1 gives NaN or infinity"):
        explained(model, config)
    model = tiny()
    torch.nn.init.constant_(model.transformer.h[1].mlp.c_proj.bias, torch.inf)
    with pytest.raises(UserError, match="the last layer gives NaN or infinity"):
        explained(model, config)


@pytest.mark.parametrize("wrong", ["top-left", "window", "scale"])
def test_a_wrong_kernel_does_not_agree(wrong):
    call = calls_of("window")[0]
    q, k, v, spec = call.q, call.k, call.v, call.spec
    if wrong == "top-left":  # every query a key less
        out = torch.cat([q[:, :1] * 0, manual.attend(q, k, v, spec)[:, :-1]], dim=1)
    elif wrong == "window":
        out = manual.attend(q, k, v, replace(spec, window=None))
    else:
        out = manual.attend(q * 1.001, k, v, spec)
    assert agreement(call)["agrees"] and not agreement(replace(call, out=out))["agrees"]


@pytest.mark.parametrize("dtype, eps", [("float32", 2**-23), ("bfloat16", 2**-7)])
def test_what_is_allowed_by_hand(dtype, eps):
    """Twice the error of manual, a rounding of this size, 32 of float32 of the largest value."""
    got = allowed_error(0.25, 4.0, 10.0, getattr(torch, dtype))
    assert got == pytest.approx(2 * 0.25 + 4 * eps + 32 * 2**-23 * 10, rel=1e-12)
    assert allowed_error(0.25, 4.0, 10.0, getattr(torch, dtype), 3) == pytest.approx(got + 0.25)


# --- bytes ---


def trace_of(spec: Spec, T: int, B_r: int, B_c: int) -> list[viewer.tiles.Tile]:
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(1, T, h, spec.head_dim, generator=generator).to(getattr(torch, spec.dtype))
        for h in (spec.n_head, spec.n_kv_head)
    )
    return viewer.tiles.trace_of(q, k, k, spec, B_r=B_r, B_c=B_c)[0]


def moved(
    trace: list[viewer.tiles.Tile], spec: Spec, T: int, B_r: int, B_c: int
) -> tuple[int, int]:
    """Bytes read and written, added up step by step."""
    found = viewer.tiles.steps(trace, spec, T, T, B_r, B_c)
    return sum(step["read"] for step in found), sum(step["written"] for step in found)


TILES = [(1, 1), (4, 4), (5, 3), (3, 8), (16, 7), (64, 64)]


@pytest.mark.parametrize("T", [1, 7, 16, 33])
@pytest.mark.parametrize("heads, D, dtype", [
    ((2, 2), 4, "float32"), ((4, 2), 16, "float16"), ((3, 1), 8, "float64")])  # fmt: skip
def test_bytes_of_the_trace_are_the_closed_formula(T, heads, D, dtype):
    for window, (B_r, B_c) in product((None, 1, 6, 11, 100), TILES):
        spec = Spec(*heads, D, dtype, window=window)
        trace = trace_of(spec, T, B_r, B_c)
        assert moved(trace, spec, T, B_r, B_c) == tiled_bytes(spec, T, B_r, B_c)
        areas = sum(min(B_r, T - t.i * B_r) * min(B_c, T - t.j * B_c) for t in trace)
        assert areas == visited(spec, T, B_r, B_c)[1]


@pytest.mark.parametrize("n, b", [(1, 8), (5, 8), (64, 16)])
def test_causal_bytes_in_closed_form(n, b):
    keys, pairs = visited(Spec(2, 2, 8, "float32"), n * b, b, b)
    assert (keys, pairs) == (n * b * (n + 1) // 2, b * n * b * (n + 1) // 2)


@pytest.mark.parametrize("Tq, Tk, window", [(9, 4, None), (13, 13, 3), (4, 11, 2)])
def test_every_row_of_the_output_is_written_once(Tq, Tk, window):
    """Rows that see no key too: zeros. Each block after its last tile, and with it its L."""
    spec = Spec(4, 2, 8, "float16", window=window)
    q, k = (torch.zeros(1, T, h, 8, dtype=torch.float16) for T, h in ((Tq, 4), (Tk, 2)))
    trace, _ = viewer.tiles.trace_of(q, k, k, spec, B_r=2, B_c=3)
    found = viewer.tiles.steps(trace, spec, Tq, Tk, 2, 3)
    for i in range(0, Tq, 2):
        row = [s for s in found if s["rows"][0] == i]
        seen_ = [n for n, s in enumerate(row) if not s["skipped"]]
        n_rows = min(2, Tq - i)
        want = [0] * len(row)
        want[seen_[-1] if seen_ else -1] = n_rows * 4 * (8 * 2 + 4)
        assert [s["written"] for s in row] == want
        read = [2 * 2 * 2 * 8 * (s["cols"][1] - s["cols"][0]) if n in seen_ else 0
                for n, s in enumerate(row)]  # fmt: skip
        if seen_:
            read[seen_[0]] += n_rows * 4 * 8 * 2
        assert [s["read"] for s in row] == read
    for way in ("read", "written"):
        sums = np.cumsum([s[way] for s in found])  # type: ignore[literal-required]
        assert [s[f"{way}_so_far"] for s in found] == sums.tolist()  # type: ignore[literal-required]


class Bytes(Recorder):
    """Bytes that the two products and the softmax of manual read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.bmm.default, torch.ops.aten._softmax.default):
            read = sum(t.nbytes for t in args if isinstance(t, Tensor))
            self.moved.append((read, result.nbytes))
        return result


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("T, D", [(7, 4), (32, 16)])
def test_bytes_of_manual_are_those_of_its_operators(dtype, T, D):
    spec = Spec(3, 3, D, dtype)
    q = torch.randn(1, T, 3, D).to(getattr(torch, dtype))
    with Bytes() as counted:
        manual.attend(q, q, q, spec)
    assert counted.moved == [(s["read"], s["written"]) for s in manual_steps(spec, T)]
    total = manual_steps(spec, T)[-1]
    assert (total["read_so_far"], total["written_so_far"]) == tuple(
        sum(column) for column in zip(*counted.moved, strict=True)
    )


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_fast_memory_is_that_of_the_tensors_of_a_tile(heads, dtype):
    spec, (B_r, B_c) = Spec(*heads, 16, dtype), (8, 5)
    tile = trace_of(spec, 40, B_r, B_c)[8]
    s = torch.finfo(getattr(torch, dtype)).bits // 8
    on_chip = sum(t.nbytes for t in (tile.S, tile.O, tile.m, tile.l))
    on_chip += s * 16 * (heads[0] * B_r + 2 * heads[1] * B_c)
    assert on_chip == heads[1] * fast_memory(spec, B_r, B_c)  # of all key/value heads together


def test_traffic_falls_as_1_over_fast_memory():
    """Theorem 2 of the FlashAttention paper: O(T^2 D^2 / M). Counted by the trace."""
    T, D = 256, 8
    spec = Spec(1, 1, D, "float16")
    found = []
    for B_r, B_c in tile_sizes(spec, T):
        if 4 <= B_r <= T // 8:
            trace = trace_of(spec, T, B_r, B_c)
            found.append((fast_memory(spec, B_r, B_c), moved(trace, spec, T, B_r, B_c)[0]))
    memory, read = zip(*found, strict=True)
    assert len(found) == 4 and list(memory) == sorted(memory) and list(read) == sorted(read)[::-1]
    constants = [M * r / (T * T * D * D) for M, r in found]
    assert max(constants) < 2 * min(constants)
    assert memory[-1] > 7 * memory[0] and read[0] > 6 * read[-1]


def test_traffic_grows_as_the_square_of_t_and_of_d():
    def read(T: int, D: int, M: int = 400_000) -> int:
        spec = Spec(1, 1, D, "float16")
        B_r = max(b for b in range(1, T) if fast_memory(spec, b, min(b, D)) <= M)
        return tiled_bytes(spec, T, B_r, min(B_r, D))[0]

    assert 3.5 < read(2**14, 64) / read(2**13, 64) < 4.1
    assert 3.5 < read(2**14, 64) / read(2**14, 32) < 5
    assert 1.8 < read(2**14, 64) / read(2**14, 64, 800_000) < 2.4


# --- FLOPs and the roofline ---


@pytest.mark.parametrize("window", [None, 6])
def test_flops_are_those_that_torch_counts(window):
    spec, T = Spec(2, 2, 16, "float32", window=window), 45
    q = torch.randn(1, T, 2, 16)
    with FlopCounterMode(display=False) as by_manual:
        manual.attend(q, q, q, spec)
    assert by_manual.get_total_flops() == 4 * 16 * 2 * T * T
    for B_r, B_c in TILES[1:]:
        with FlopCounterMode(display=False) as by_tiled:
            forward_tiles(q, q, q, spec, B_r=B_r, B_c=B_c)
        assert by_tiled.get_total_flops() == 4 * 16 * 2 * visited(spec, T, B_r, B_c)[1]


def test_the_roofline():
    spec = Spec(12, 12, 64, "float32")
    found = costs(spec, "A100-SXM4-80GB", 192 * 1024)
    half = replace(spec, dtype="bfloat16")
    assert (found["peak"], found["bandwidth"], found["dtype"]) == (312e12, 2039e9, "bfloat16")
    assert found["ridge"] == 312e12 / 2039e9
    with pytest.raises(ValueError, match=f"{fast_memory(half, 1, 1)} bytes at least, got 5"):
        costs(spec, "A100-SXM4-80GB", 5)
    B_r, B_c = found["block_m"], found["block_n"]
    assert fast_memory(half, B_r, B_c) <= 192 * 1024 < fast_memory(half, 2 * B_r, B_c)
    for fits, rows in (
        (fast_memory(half, B_r, B_c), B_r),
        (fast_memory(half, B_r, B_c) - 1, B_r // 2),
    ):
        assert costs(spec, "A100-SXM4-80GB", fits)["block_m"] == rows  # to the byte
    assert [row["T"] for row in found["rows"]] == [2**n for n in range(6, 17)]
    for row in found["rows"]:
        T = row["T"]
        total = manual_steps(half, T)[-1]
        assert row["manual"]["bytes"] == total["read_so_far"] + total["written_so_far"]
        assert row["manual"]["flops"] == 4 * 64 * 12 * T * T
        assert row["tiled"]["bytes"] == sum(tiled_bytes(half, T, B_r, B_c))
        for c in (row["manual"], row["tiled"]):
            times = c["flops"] / 312e12, c["bytes"] / 2039e9
            assert c["seconds"] == max(times)
            assert c["intensity"] == c["flops"] / c["bytes"]
            assert c["bound"] == ("memory" if c["intensity"] < found["ridge"] else "compute")
    first, last = found["rows"][0], found["rows"][-1]
    assert last["manual"]["bound"] == first["tiled"]["bound"] == "memory"
    assert last["tiled"]["bound"] == "compute"
    assert last["manual"]["bytes"] > 10 * last["tiled"]["bytes"]


def test_every_gpu_has_both_rates():
    for name in GPUS:
        assert datasheet_bandwidth(name) and datasheet_tflops(name, "float16")
        assert costs(Spec(1, 1, 64, "float32"), name, 100_000)["gpu"] == name
    assert costs(Spec(1, 1, 64, "float32"), "T4", 100_000)["dtype"] == "float16"


def test_a_gpu_is_found_by_a_part_of_its_name():
    assert find_gpu("4090") == "RTX 4090" and find_gpu("l4") == "L4"
    assert find_gpu("NVIDIA A100-SXM4-80GB") == "A100-SXM4-80GB"
    with pytest.raises(ValueError, match="could be H100 80GB HBM3, H100 PCIe, H100 NVL"):
        find_gpu("h100")
    for unknown in ("Voodoo 2", ""):
        with pytest.raises(ValueError, match=r"is not known; known: .*RTX 4090"):
            find_gpu(unknown)


# --- tiles ---


def traced(shape: str, layer: int, head: int) -> dict[str, Any]:
    """A head's arrays in float64."""
    (found,) = (
        h for h in document(shape)["tiles"]["heads"] if (h["layer"], h["head"]) == (layer, head)
    )
    arrays = ("scores", "m", "l", "rescale", "o_norm", "out", "manual")
    return {name: torch.from_numpy(unpack(found[name])).double() for name in arrays}  # type: ignore[literal-required]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_tiles_together_are_the_maps(shape):
    """The scores of all tiles, softmax over a row: what the maps show."""
    call = calls_of(shape)[1]
    T, steps = call.q.shape[1], document(shape)["tiles"]["steps"]
    for head in range(4):
        scores = traced(shape, 1, head)["scores"]
        S = torch.full((T, T), -torch.inf, dtype=torch.float64)
        for step in steps:
            if step["at"] is not None:
                I, J = (slice(*step[name]) for name in ("rows", "cols"))  # type: ignore[literal-required]
                rows, cols = I.stop - I.start, J.stop - J.start
                S[I, J] = scores[step["at"], :rows, :cols]
                assert scores[step["at"], rows:].isnan().all()
                assert scores[step["at"], :, cols:].isnan().all()
        assert torch.equal(S.isfinite(), sees(call))
        want = softmax_by_hand(call)[head]
        torch.testing.assert_close(torch.softmax(S, -1), want, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_step_is_the_recurrence_of_the_paper(shape):
    """m, l and O from those of the tile before, the scores, and V."""
    call, found = calls_of(shape)[0], document(shape)["tiles"]
    half = call.q.dtype == torch.bfloat16
    for head in (0, 3):
        h = traced(shape, 0, head)
        V = call.v[0, :, head // (4 // call.v.shape[2])].double()
        told, _ = viewer.tiles.trace_of(*call.given, B_r=found["block_m"], B_c=found["block_n"])
        for step in found["steps"]:
            if step["at"] is None:
                continue
            at, n = step["at"], step["rows"][1] - step["rows"][0]
            if step["first"]:
                m = torch.full((n,), -torch.inf, dtype=torch.float64)
                l, O = torch.zeros(n).double(), torch.zeros(n, V.shape[1]).double()
            S = h["scores"][at, :n, : step["cols"][1] - step["cols"][0]]
            m_new = torch.maximum(m, S.amax(dim=1))
            nothing = m_new.isneginf()
            P = torch.exp(S - m_new[:, None]).masked_fill(nothing[:, None], 0)
            x = torch.exp(m - m_new).masked_fill(nothing, 1)
            l, O = x * l + P.sum(dim=1), x[:, None] * O + P @ V[slice(*step["cols"])]
            m = m_new
            close = {"rtol": 1e-2, "atol": 1e-2} if half else {"rtol": 1e-4, "atol": 1e-5}
            for name, want in (("m", m), ("l", l), ("rescale", x)):
                torch.testing.assert_close(h[name][at, :n], want, **close)
                assert h[name][at, n:].isnan().all()
            o = told[at].O[0, head].double()  # the document has the norm of each row
            torch.testing.assert_close(o, O, **close)
            norm = torch.linalg.vector_norm(o, dim=1)
            assert h["o_norm"][at, n:].isnan().all()
            torch.testing.assert_close(h["o_norm"][at, :n], norm, rtol=1e-5, atol=1e-6)
            if step["last"]:
                torch.testing.assert_close(h["out"][slice(*step["rows"])], O / l[:, None], **close)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_steps_and_their_bytes(shape):
    call, found = calls_of(shape)[0], document(shape)["tiles"]
    T, spec, steps = call.q.shape[1], call.spec, found["steps"]
    assert (found["n_rows"], found["n_cols"]) == (-(-T // 8), -(-T // 5))
    assert [(s["i"], s["j"]) for s in steps] == [
        *product(range(found["n_rows"]), range(found["n_cols"]))
    ]
    plain = replace(call, segments=None)
    for s in steps:
        tile = sees(plain)[slice(*s["rows"]), slice(*s["cols"])]
        assert s["skipped"] == (not tile.any()) == (s["at"] is None)
        assert not (s["skipped"] and s["read"])
    visited_ = [s for s in steps if not s["skipped"]]
    assert [s["at"] for s in visited_] == [*range(len(visited_))]
    for i in range(found["n_rows"]):
        row = [s for s in visited_ if s["i"] == i]
        assert [s["first"] for s in row] == [True] + [False] * (len(row) - 1)
        assert [s["last"] for s in row] == [False] * (len(row) - 1) + [True]
        assert [s["written"] > 0 for s in row] == [s["last"] for s in row]
    assert steps[-1]["read_so_far"] == sum(s["read"] for s in steps)
    totals = steps[-1]["read_so_far"], steps[-1]["written_so_far"]
    assert totals == tiled_bytes(spec, T, 8, 5)
    assert found["manual"] == manual_steps(spec, T)
    assert found["fast_memory"] == fast_memory(spec, 8, 5)
    assert [n for n in found["notes"] if "document" in n] == (
        [] if call.segments is None else ["The border of a document masks scores, and skips no "
                                          "tile."])  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_at_the_end_tiled_stands_beside_manual(shape):
    calls = calls_of(shape)
    assert len(document(shape)["tiles"]["heads"]) == 8
    for h in document(shape)["tiles"]["heads"]:
        call = calls[h["layer"]]
        plain = manual.attend(call.q, call.k, call.v, call.spec, segments=call.segments)
        assert np.array_equal(unpack(h["manual"]), plain[0, :, h["head"]].float().numpy())
        assert h["difference"] == np.abs(unpack(h["out"]) - unpack(h["manual"])).max()
        assert h["error"] <= h["allowed"]
        exact = softmax_by_hand(call)[h["head"]] @ (
            call.v[0, :, h["head"] // (4 // call.v.shape[2])].double()
        )
        error = float((torch.from_numpy(unpack(h["out"])) - exact).abs().max())
        assert h["error"] == pytest.approx(error, rel=1e-3, abs=1e-12)


def test_a_tiled_that_forgets_to_rescale_is_seen(monkeypatch):
    whole = document("plain")

    def broken(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        out, L = forward_tiles(*args, **kwargs)
        return out + 1e-3, L

    monkeypatch.setattr(tiled, "forward_tiles", broken)
    found = viewer.tiles.tiles(calls_of("plain"), 8, 8, 0, 0)
    assert all(h["error"] > h["allowed"] for h in found["heads"])
    shown = {**whole, "tiles": found}
    assert "The output of tiled does NOT agree" in " ".join(render(shown).split())  # type: ignore[arg-type]


@pytest.mark.parametrize("budget, heads, n_notes", [
    (4_416, 8, 0), (4_415, 4, 1), (2_208, 4, 1), (2_207, 1, 1), (10, 1, 1)])  # fmt: skip
def test_what_is_too_much_is_left_out_and_said(budget, heads, n_notes, monkeypatch):
    whole, model = document("plain"), tiny()
    monkeypatch.setattr("viewer.tiles.BUDGET", budget)
    config = replace(made("plain")[1], prompt="to be or not", layer=1, head=2)
    found = explained(model, config)["tiles"]
    chosen = [(h["layer"], h["head"]) for h in found["heads"]]
    assert len(chosen) == heads and (1, 2) in chosen and len(found["notes"]) == n_notes
    if heads < 8:
        assert {layer for layer, _ in chosen} == {1}
        assert "layer 1 only" in found["notes"][0]
    numbers = sum(
        math.prod(h[name]["shape"]) for h in found["heads"]  # type: ignore[literal-required]
        for name in ("scores", "m", "l", "rescale", "o_norm", "out", "manual")
    )  # fmt: skip
    assert numbers <= budget or budget == 10
    render({**whole, **explained(model, config)})


def test_the_note_of_what_is_left_out_names_the_size_of_the_file():
    """1.5 million numbers of four bytes are 6 MB."""
    layers, heads, (note,) = viewer.tiles._chosen(2, 4, 1, 2, 375_000)
    assert (layers, heads) == ([1], [0, 1, 2, 3])
    assert note.startswith(
        "Tiles are traced for the heads of layer 1 only, to keep the file below "
    )
    assert "below 6 MB of numbers" in note
    layers, heads, (note,) = viewer.tiles._chosen(2, 4, 1, 2, 375_001)
    assert (layers, heads) == ([1], [2]) and "for head 2 of layer 1 only" in note


def test_too_many_tiles_are_refused():
    with pytest.raises(UserError, match=r"tiles of 1 x 1 are 2304 for 48 tokens, at most 1024"):
        explained(tiny(), ExplainConfig(prompt="a" * 48, block_m=1, block_n=1))


# --- caches ---


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cell_holds_the_token_that_is_said(shape, monkeypatch):
    """The buffers themselves, against the k and v of a run without a cache."""
    buffers = []
    real = viewer.caches._buffer

    def spy(*args: Any) -> Any:
        buffers.append(real(*args))
        return buffers[-1]

    monkeypatch.setattr(viewer.caches, "_buffer", spy)
    model, config = made(shape)
    found = explained(model, config)["caches"]
    ids = [t["id"] for t in (*found["prompt"], found["token"])]
    T, window = len(ids), model.config.attention_window
    assert found["position"] == T - 1
    with torch.no_grad(), watched(model) as calls:
        model.hidden(torch.tensor([ids]))
    half = config.dtype == "bfloat16"
    seen_positions = [j for j in range(T) if visible(T - 1, j, 0, window)]
    for step, buffer in zip(found["steps"], buffers, strict=True):
        holds = step["holds"]
        assert len(holds) == step["cells"] == len(buffer.k)
        stored = [(c, p) for c, p in enumerate(holds) if p >= 0]
        positions = [p for _, p in stored]
        assert len(set(positions)) == len(positions) and set(seen_positions) <= set(positions)
        if step["kind"] != "dynamic" or window is None:
            assert sorted(positions) == [*range(T)]
        else:  # no more than a later token sees
            assert sorted(positions) == [*range(max(0, T - window), T)]
        for c, p in stored:
            for cached, plain in ((buffer.k, calls[0].k), (buffer.v, calls[0].v)):
                close = {"rtol": 0.02, "atol": 0.02} if half else {"rtol": 1e-4, "atol": 1e-5}
                torch.testing.assert_close(cached[c], plain[0, p], **close)
        assert [holds[c] for c in step["written"]] == [T - 1]
        assert sorted(holds[c] for c in step["seen"]) == seen_positions
        assert set(step["seen"]) <= set(step["read"]) and step["error"] <= found["allowed"]
        assert (step["length_before"], step["length_after"]) == (T - 1, T)
    assert found["agree"]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_books_of_the_caches(shape):
    model, found = made(shape)[0], document(shape)["caches"]
    size = 2 if shape == "bfloat16" else 4
    per_token = 2 * 2 * model.config.kv_heads * 8 * size
    assert found["bytes_per_token"] == per_token
    assert [s["kind"] for s in found["steps"]] == ["dynamic", "static", "paged"]
    for s in found["steps"]:
        assert s["bytes_allocated"] == s["cells"] * per_token
        assert s["bytes_used"] == sum(p >= 0 for p in s["holds"]) * per_token
    dynamic, static, paged = found["steps"]
    assert dynamic["page_table"] == static["page_table"] == paged["refused"] == []
    pages = paged["page_table"]
    assert paged["page_size"] == 8 and len(pages) == -(-paged["length_after"] // 8)
    assert len({*pages}) == len(pages) and {*pages} < {*range(1, paged["cells"] // 8)}
    for n, page in enumerate(pages):
        held = [p for p in paged["holds"][page * 8 : page * 8 + 8] if p >= 0]
        assert held == [*range(8 * n, min(8 * n + 8, paged["length_after"]))]
    if len(pages) > 1:
        assert pages != sorted(pages)  # an order that says nothing would teach nothing
    assert static["read"] == [*range(48)]
    assert paged["read"] == [8 * p + s for p in pages for s in range(8)]
    assert paged["backend"] == "paged" and static["backend"] == "sdpa"


def test_the_token_that_is_decoded():
    model, _ = made("plain")
    found = document("plain")["caches"]
    assert found["predicted"] and len(found["prompt"]) == len(PROMPT)
    with torch.no_grad():
        logits, _ = model(torch.tensor([TOKENIZER.encode(PROMPT)]))
    assert found["token"]["id"] == int(logits[0, -1, :95].argmax())
    full = document("full")["caches"]
    assert not full["predicted"] and full["position"] == 47 and len(full["prompt"]) == 47
    assert full["token"]["text"] == made("full")[1].prompt[-1]
    assert "block_size" in full["notes"][0]
    assert "read as one" in document("segments")["caches"]["notes"][0]


@pytest.mark.parametrize("shape, eps", [("plain", 36 * 2**-23), ("bfloat16", 2**-5 + 2**-18)])
def test_what_a_cache_may_be_off_by_hand(shape, eps):
    """Four roundings of the largest logit in its dtype, and 32 of float32."""
    model, found = made(shape)[0], document(shape)["caches"]
    ids = [t["id"] for t in (*found["prompt"], found["token"])]
    with torch.no_grad():
        logits, _ = model(torch.tensor([ids]))
    assert found["allowed"] == pytest.approx(eps * float(logits[0, -1].abs().max()), rel=1e-6)


def test_a_token_beyond_the_tokenizers_is_never_decoded():
    """The model's vocabulary is padded from 95 to 100."""
    model = tiny()
    with torch.no_grad():
        model.transformer.wte.weight[95:] *= 100
        logits, _ = model(torch.tensor([TOKENIZER.encode(PROMPT)]))
    assert int(logits[0, -1].argmax()) >= 95
    assert explained(model, made("plain")[1])["caches"]["token"]["id"] < 95


@pytest.mark.parametrize("shape", ["plain", "bfloat16"])
@pytest.mark.parametrize("step, wrong", [(StaticStep, 1), (PagedStep, 2)])
def test_a_cache_that_stores_the_wrong_thing_does_not_agree(step, wrong, shape, monkeypatch):
    explained(*made(shape))  # the probe, which would refuse such a cache, has been by then
    real = step.append
    monkeypatch.setattr(step, "append", lambda self, n, k, v: real(self, n, k, v.roll(1, dims=3)))
    found = explained(*made(shape))
    errors = [s["error"] > found["caches"]["allowed"] for s in found["caches"]["steps"]]
    assert errors == [n == wrong for n in range(3)] and not found["caches"]["agree"]
    assert "The logits of the three do NOT agree" in " ".join(render(found).split())


def test_a_cache_whose_step_gives_one_other_logit_is_off_by_that_much(monkeypatch):
    """Of 100 logits one, by a half: the largest difference counts."""
    model = tiny()
    real = model.head

    def head(x: Tensor) -> Tensor:
        logits = real(x)
        return logits + 0.5 * torch.eye(100)[7] if x.dim() == 3 else logits  # (1, 1, D): a step

    monkeypatch.setattr(model, "head", head)
    found = explained(model, made("plain")[1])["caches"]
    assert [s["error"] for s in found["steps"]] == pytest.approx([0.5] * 3, abs=1e-4)
    assert not found["agree"]


def test_a_cache_that_writes_to_another_cell_is_seen(monkeypatch):
    real = StaticStep.append

    def append(self: StaticStep, layer: int, k: Tensor, v: Tensor) -> Any:
        self.cache.k[layer][0, 44] = 1.0
        return real(self, layer, k, v)

    monkeypatch.setattr(StaticStep, "append", append)
    (step,) = (s for s in explained(*made("one token"))["caches"]["steps"] if s["kind"] == "static")
    assert step["written"] == [1]  # it was there before this step
    monkeypatch.setattr(StaticStep, "append", lambda self, layer, k, v: real(
        replace(self, start=self.start + 3), layer, k, v))  # fmt: skip
    (step,) = (s for s in explained(*made("one token"))["caches"]["steps"] if s["kind"] == "static")
    assert step["written"] == [4] and step["holds"][4] == -1


# --- the ring ---


def ring_of(shape: str, n: int) -> dict[str, Any]:
    call = calls_of(shape)[1]
    return viewer.ring.play(call, n, 1, 2)  # type: ignore[return-value]


@pytest.mark.parametrize("n", [1, 2, 4, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_who_has_what_and_who_computes_what_in_the_ring(shape, n):
    """Each pair of chunks that is not hidden by position, once, where its keys are at that step."""
    found, call = ring_of(shape, n), calls_of(shape)[1]
    T, c = call.q.shape[1], found["chunk"]
    assert c == math.ceil(T / (2 * n)) and (found["layer"], found["head"]) == (1, 2)
    assert found["chunks"] == [[r, 2 * n - 1 - r] for r in range(n)]
    assert found["homes"] == [[(r - step) % n for r in range(n)] for step in range(n)]
    seg = [-1] * (2 * n * c) if call.segments is None else call.segments[0].tolist()
    seg += [-1] * (2 * n * c - len(seg))
    want = {}
    for a, b in product(range(2 * n), repeat=2):
        pairs = [(i, j) for i in range(a * c, (a + 1) * c) for j in range(b * c, (b + 1) * c)]
        if any(visible(i, j, 0, call.spec.window) for i, j in pairs):
            whole = all(visible(i, j, 0, call.spec.window, seg[i], seg[j]) for i, j in pairs)
            want[a, b] = not whole
    assert {(t["queries"], t["keys"]): t["masked"] for t in found["tiles"]} == want
    assert len(found["tiles"]) == len(want)
    for t in found["tiles"]:
        assert t["queries"] in found["chunks"][t["rank"]]
        assert t["keys"] in found["chunks"][found["homes"][t["step"]][t["rank"]]]
    # K and V of all heads, and the documents' numbers, but not in the last step.
    numbers = 2 * call.k[0, 0].numel() * call.k.element_size()
    a_step = 2 * c * (numbers + (0 if call.segments is None else 4))
    assert found["sent"] == [[a_step] * n] * (n - 1) + [[0] * n]


@pytest.mark.parametrize("n", [1, 2, 4, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_O_and_L_of_the_ring_are_those_of_the_keys_so_far(shape, n):
    found, call = ring_of(shape, n), calls_of(shape)[1]
    T, c, D = call.q.shape[1], found["chunk"], call.q.shape[3]
    g = 2 // (4 // call.k.shape[2])  # the key/value head of head 2
    q, k, v = (t[0, :, h].double() for t, h in ((call.q, 2), (call.k, g), (call.v, g)))
    S = (q @ k.T / math.sqrt(D)).masked_fill(~sees(call), -torch.inf)
    part, L, O = (torch.from_numpy(unpack(found[name])).double() for name in ("part", "L", "O"))
    assert part.shape == L.shape == O.shape[:2] == (len(found["tiles"]), c)
    off = 0.05 if call.q.dtype == torch.bfloat16 else 2e-5
    met: dict[int, list[int]] = {i: [] for i in range(T)}
    for n_, t in enumerate(found["tiles"]):
        keys = [j for j in range(t["keys"] * c, (t["keys"] + 1) * c) if j < T]
        for row, i in enumerate(range(t["queries"] * c, min((t["queries"] + 1) * c, T))):
            met[i] += keys
            want = torch.logsumexp(S[i, keys], 0), torch.logsumexp(S[i, met[i]], 0)
            assert part[n_, row] == pytest.approx(float(want[0]), abs=off)
            assert L[n_, row] == pytest.approx(float(want[1]), abs=off)
            out = torch.softmax(S[i, met[i]], 0).nan_to_num() @ v[met[i]]
            torch.testing.assert_close(O[n_, row], out, atol=off, rtol=off)
    last = {t["queries"]: n_ for n_, t in enumerate(found["tiles"])}
    whole = torch.stack([O[last[i // c], i % c] for i in range(T)])
    plain = torch.from_numpy(unpack(found["manual"])).double()
    assert float((whole - plain).abs().max()) <= found["difference"] + off / 5
    assert found["difference"] <= 2 * found["allowed"] and found["error"] <= found["allowed"]


def test_a_ring_that_keeps_its_own_keys_is_found_out(monkeypatch):
    """What was sent on is not what is used: every process sees its own keys again and again."""
    honest = viewer.ring.Process.pass_on

    def stale(self: Any, tensors: list[Tensor]) -> Any:
        wait = honest(self, tensors)
        return lambda: wait() and tensors

    monkeypatch.setattr(viewer.ring.Process, "pass_on", stale)
    found = explained(tiny(), made("plain")[1])
    assert found["ring"]["error"] > 100 * found["ring"]["allowed"]
    assert "The ring's output does NOT agree" in " ".join(render(found).split())


@pytest.mark.parametrize("shape", ["plain", "gqa-window-segments", "one token"])
def test_the_terminal_shows_the_ring(shape):
    found, text = document(shape)["ring"], render(document(shape))
    text = text[text.index("RING of layer 0, head 0: 4 processes") :]
    T = len(document(shape)["about"]["tokens"])
    rows = re.findall(r"^ +(\d) +(\d) +(\d)  ((?:\d+,\d+/? ?)*) +(\S+ k?B)$", text, re.M)
    assert len(rows) == 16
    assert re.search(r"^step +process +K, V of +pairs +sent so far$", text, re.M)
    for step, rank, home, pairs, sent in rows:
        s, r = int(step), int(rank)
        assert int(home) == found["homes"][s][r]
        mine = [t for t in found["tiles"] if (t["step"], t["rank"]) == (s, r)]
        want = [f"{t['queries']},{t['keys']}{'/' if t['masked'] else ''}" for t in mine]
        assert pairs.split() == want
        assert sent == amount(sum(found["sent"][n][r] for n in range(s + 1)))
    last = rf"^The last query, {T - 1}, tile by tile:\n\nstep +keys +L of these +L so far +\|O\|$"
    assert re.search(last, text, re.M)
    growth = re.findall(r"^ +(\d) +\d+\.\.\d+ +(\S+) +(\S+) +(\S+)$", text, re.M)
    at, row = divmod(T - 1, found["chunk"])
    visits = [n for n, t in enumerate(found["tiles"]) if t["queries"] == at]
    part, L, O = (unpack(found[name]) for name in ("part", "L", "O"))  # type: ignore[literal-required]
    assert [[float(x) for x in line] for line in growth] == [
        [found["tiles"][n]["step"], *(float(f"{x:.4f}") for x in (
            part[n, row], L[n, row], np.linalg.norm(O[n, row])))] for n in visits
    ]  # fmt: skip


# --- the document ---


@pytest.mark.parametrize("shape", SHAPES)
def test_the_document_is_json(shape):
    found = document(shape)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    about = found["about"]
    assert "".join(t["text"] for t in about["tokens"]) == about["prompt"].replace("|", "")
    assert about["window"] == made(shape)[0].config.attention_window
    assert (about["segments"] is None) == ("segments" not in shape)
    assert about["dtype"] == made(shape)[1].dtype and about["n_kv_head"] <= about["n_head"] == 4
    assert about["announced"].startswith("Attention backend: sdpa (") and about["refused"] == []
    c = made(shape)[0].config
    sizes = (c.n_layer, c.n_head, c.kv_heads, 8, c.n_embd, c.block_size, c.vocab_size)
    names = ("n_layer", "n_head", "n_kv_head", "head_dim", "n_embd", "block_size", "vocab_size")
    assert tuple(about[name] for name in names) == sizes  # type: ignore[literal-required]
    assert about["n_params"] == sum(p.numel() for p in made(shape)[0].parameters())
    assert re.fullmatch(rf"(?!cpu,|auto).+, {torch.get_num_threads()} threads", about["device"])
    assert (about["torch"], about["tokenizer"]) == (torch.__version__, "char")


def test_pack_and_unpack():
    for a in (
        np.arange(6, dtype=np.uint8).reshape(2, 3),
        np.array([0, 1, 258, 65535], np.uint16),
        np.array([[1.5], [-np.inf], [np.nan]], np.float32),
    ):
        back = unpack(pack(a))
        assert np.array_equal(back, a, equal_nan=a.dtype.kind == "f") and back.dtype == a.dtype
    assert unpack(pack(torch.tensor([0.5, 2]).double())).dtype == np.float32
    assert pack(np.array([258], np.uint16))["data"] == "AgE="  # the low byte first


def test_tokens_as_they_are_shown():
    pieces = [b" the", "é".encode(), b"\xe2\x80", b"\r\n\t", b"", b"<b>"]
    shown = [token_of(id_, pieces) for id_ in range(6)]
    assert [t["id"] for t in shown] == [*range(6)]
    assert [t["text"] for t in shown] == [" the", "é", "<E2 80>", "\r\n\t", "<end of text>", "<b>"]
    assert [t["label"] for t in shown] == [
        "␣the", "é", "<E2␣80>", "␍⏎⇥", "<end␣of␣text>", "<b>"]  # fmt: skip


def test_a_refused_backend_is_told():
    model = tiny(attention_backend="flash_attn_3")
    found = explained(model, made("plain")[1])
    about, text = found["about"], " ".join(render(found).split())
    assert about["backend"] == "sdpa"
    assert [r["name"] for r in about["refused"]] == ["flash_attn_3", "flash_attn_2"]
    for refused in about["refused"]:
        assert f"Refused: {refused['name']}, since {'; '.join(refused['why'])}." in text
    strict = tiny(attention_backend="tiled")
    strict.policy = Policy(fallback=False)
    with pytest.raises(UserError, match="it has no 'static' cache"):
        explained(strict, made("plain")[1])


def test_every_kernel_that_ran_is_named(monkeypatch):
    model = tiny()
    real = model.attention

    def chosen(*args: Any, **kwargs: Any) -> tuple[Resolution, Spec]:
        resolution, spec = real(*args, **kwargs)
        return replace(resolution, kernels=("one", "two")), spec

    monkeypatch.setattr(model, "attention", chosen)
    found = explained(model, made("plain")[1])
    assert [found["about"]["kernels"], *(s["kernels"] for s in found["caches"]["steps"])] == [
        ["one", "two"]
    ] * 4


# --- the prompt ---


def test_a_mark_cuts_the_prompt_into_documents():
    prompt = prompt_of(ExplainConfig(prompt="ab|c||de", segments="|"), TOKENIZER, 48)
    assert TOKENIZER.decode(prompt.ids) == "abcde" and prompt.segments == [0, 0, 1, 2, 2]
    assert prompt_of(ExplainConfig(prompt="ab"), TOKENIZER, 48).segments is None


def test_a_long_prompt_is_shown_in_part_and_that_is_said():
    model = tiny(block_size=300)
    config = ExplainConfig(prompt=(PROMPT * 10)[:280], block_m=32, block_n=32)
    found = explained(model, config)
    assert len(found["about"]["tokens"]) == 256
    assert "has 280 tokens; the first 256 are shown" in found["about"]["notes"][0]
    whole = explained(model, replace(config, prompt=config.prompt[:256]))
    assert whole["about"]["notes"] == [] and whole["maps"] == found["maps"]
    assert "280 tokens" in render(found) and "280 tokens" not in render(whole)


def test_a_long_prompt_keeps_the_documents_of_what_is_shown(monkeypatch):
    """And with them each note: what was left out of the tiles, the cache that reads them as one."""
    monkeypatch.setattr("explain.MOST_TOKENS", 40)
    monkeypatch.setattr("viewer.tiles.BUDGET", 10)
    text = "a" * 30 + "|" + "b" * 18
    found = explained(tiny(), replace(made("full")[1], prompt=text, segments="|"))
    assert found["about"]["segments"] == [0] * 30 + [1] * 10
    assert [n.split()[0] for n in found["tiles"]["notes"]] == ["Tiles", "The"]
    assert len(found["caches"]["notes"]) == 1
    monkeypatch.setattr("explain.MOST_TOKENS", 48)
    found = explained(tiny(), replace(made("full")[1], prompt=text, segments="|"))
    for note in found["caches"]["notes"]:
        assert note in " ".join(render(found).split())
    assert [n.split()[:2] for n in found["caches"]["notes"]] == [["A", "cache"], ["The", "prompt"]]


# --- the terminal ---


@pytest.mark.parametrize("shape", SHAPES)
def test_80_columns_are_enough(shape):
    lines = render(document(shape)).splitlines()
    assert max(map(len, lines)) <= 80
    cut = viewer.text.WIDTH
    assert cut == 80 and not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize("shape", ["plain", "gqa-window-segments"])
def test_the_map_in_characters(shape):
    model, config = made(shape)
    found = explained(model, replace(config, layer=1, head=2))
    text = render(found)
    call = calls_of(shape)[1]
    P, T = softmax_by_hand(call)[2], call.q.shape[1]
    h = next(h for h in found["tiles"]["heads"] if (h["layer"], h["head"]) == (1, 2))
    walked = " ".join(text[text.index("TILES of layer 1, head 2") :].split())
    off = f"off by {h['error']:.2g}, allowed is {h['allowed']:.2g}; from manual's in the same dtype"
    assert f"{off} by {h['difference']:.2g}" in walked
    begin = text.index("MAP of layer 1, head 2")
    rows = [line for line in text[begin:].splitlines() if re.match(r" *\d+ \S ", line)][:T]
    assert len(rows) == T and "a column is the sum" not in text
    shades = {c: low for low, c in viewer.text.SHADES}
    for i, line in enumerate(rows):
        cells, rest = line[5 : 5 + T], line[5 + T :].split()
        assert [c != " " for c in cells] == sees(call)[i].tolist()
        for j in range(i + 1):
            if cells[j] != " ":
                above = [low for low in shades.values() if low > shades[cells[j]]]
                assert shades[cells[j]] - 1e-4 <= P[i, j] < min(above, default=2) + 1e-4
        j = int(P[i].argmax())
        assert int(rest[0]) == j and float(rest[-1]) == pytest.approx(float(P[i, j]), abs=0.0051)


def test_a_long_map_is_drawn_in_groups():
    model = tiny(block_size=256)
    found = explained(model, ExplainConfig(prompt=(PROMPT * 9)[:250], block_m=32, block_n=32))
    text = render(found)
    assert "Of 250 tokens every 4th row; a column is the sum over 4 tokens." in text
    assert max(map(len, text.splitlines())) <= 80
    prompt = prompt_of(ExplainConfig(prompt=(PROMPT * 9)[:250]), TOKENIZER, 256)
    P = weights(forward(model, prompt)[0])[0]
    (line,) = (line for line in text.splitlines() if re.match(r" *199 \S ", line))
    sums = [float(P[199, j : j + 4].sum()) for j in range(0, 200, 4)]
    assert line[6:56] == "".join(map(viewer.text.shade, sums))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_walk_in_a_table(shape):
    found, text = document(shape), render(document(shape))
    tiles = found["tiles"]
    walk = text[text.index("TILES of") : text.index("CACHES:")]
    told = set(re.findall(r"^ *(\d+),(\d+) +\d+\.\.\d+ ", walk, re.MULTILINE))
    assert told == {(str(s["i"]), str(s["j"])) for s in tiles["steps"] if not s["skipped"]}
    runs = sum(  # of skipped tiles, side by side in a row: a line each
        s["skipped"] and not (n % tiles["n_cols"] and tiles["steps"][n - 1]["skipped"])
        for n, s in enumerate(tiles["steps"])
    )
    assert len(re.findall(r"^ *\d+,\d+ skipped", walk, re.M)) == runs
    grid = re.findall(r"^ +Q_\d+((?: +[x/.])+)$", walk, re.MULTILINE)
    cells = [c for row in grid for c in row.split()]
    call = calls_of(shape)[0]
    for c, s in zip(cells, tiles["steps"], strict=True):
        tile = sees(call)[slice(*s["rows"]), slice(*s["cols"])]
        assert c == ("." if s["skipped"] else "x" if tile.all() else "/")
    # One sign has one meaning: x is a tile without a mask, and the old output's factor has a name.
    assert re.search(r"^ +tile +queries +keys +m +l +rescale +read$", walk, re.M)
    assert "x:" not in walk
    computed, n = len(told), len(tiles["steps"])
    words = f"Of {n} tile{'s' * (n > 1)} {computed} are computed and {n - computed} skipped."
    assert words in " ".join(walk.split())
    last = tiles["steps"][-1]
    assert re.search(
        rf"^tiled +{amount(last['read_so_far'])} +{amount(last['written_so_far'])}$", walk, re.M
    )
    by_manual = tiles["manual"][-1]
    assert re.search(
        rf"^manual +{amount(by_manual['read_so_far'])} +{amount(by_manual['written_so_far'])}$",
        walk, re.M,
    )  # fmt: skip
    assert "The output of tiled agrees" in walk


@pytest.mark.parametrize("shape", SHAPES)
def test_the_caches_in_characters(shape):
    found, text = document(shape)["caches"], render(document(shape))
    drawn = text[text.index("CACHES:") : text.index("COST on")]
    dynamic, static, paged = re.split(r"^(?=dynamic,|static,|paged,)", drawn, flags=re.M)[1:]
    for part, step in zip((dynamic, static, paged), found["steps"], strict=True):
        cells = "".join(re.findall(r"^  (?: *\d+|page \d+) +([Wrms.]+)(?:  .*)?$", part, re.M))
        assert len(cells) == step["cells"]
        for c, sign in enumerate(cells):
            if c in step["written"]:
                assert sign == "W"
            elif c in step["read"]:
                assert sign == ("r" if c in step["seen"] else "m")
            else:
                assert sign == ("s" if step["holds"][c] >= 0 else ".")
    last = found["steps"][2]
    pages = re.findall(r"^  page (\d+) ", paged, re.M)
    assert [*map(int, pages)] == list(range(last["cells"] // last["page_size"]))
    assert f"page table [{' '.join(map(str, last['page_table']))}]" in paged
    for page, what in re.findall(r"^  page (\d+) +[Wrms.]+  (.*)$", paged, re.M):
        held = [p for p in last["holds"][int(page) * 8 : int(page) * 8 + 8] if p >= 0]
        null = "the null page: padding is written here" if page == "0" else "free"
        assert what == (f"tokens {held[0]} to {held[-1]}" if held else null)
    assert "The logits of the three agree" in drawn


def test_the_cost_table():
    found, text = document("plain")["costs"], render(document("plain"))
    lines = text[text.index("COST on") :].splitlines()
    start = next(n for n, line in enumerate(lines) if re.match(r" *64 .* [mc]$", line))
    rows = [line.split() for line in lines[start : start + 11]]
    names = [(word[0], word.end()) for word in re.finditer(r"\S+", lines[start - 1])]
    assert [name for name, _ in names] == ["T", *["FLOPs", "bytes", "F/B", "time"] * 2]
    assert [word.strip() for word in re.findall(r" +\S+", lines[start - 2])] == ["manual", "tiled"]
    middle = [word.start() + len(word[0]) / 2 for word in re.finditer(r"\S+", lines[start - 2])]
    ends = [end for _, end in names]  # each algorithm's name is above its four columns
    assert ends[1] - 5 < middle[0] < ends[4] and ends[5] - 5 < middle[1] < ends[8]
    last = lines[start + 10]  # right below each name is a number or its unit
    assert all(last[end - 1] != " " and last[end : end + 1] in ("", " ") for end in ends)
    for words, row in zip(rows, found["rows"], strict=True):
        want = [f"{row['T']:,}"]
        for c in (row["manual"], row["tiled"]):
            want += [*scaled(c["flops"]).split(), *scaled(c["bytes"]).split()]
            want += [f"{c['intensity']:.0f}", *duration(c["seconds"]).split(), c["bound"][0]]
        assert words == want


def test_numbers_as_people_read_them():
    assert [scaled(n).strip() for n in (7, 999, 1000, 12345, 999_600, 5e14)] == [
        "7", "999", "1 k", "12.3 k", "1 M", "500 T"]  # fmt: skip
    assert (amount(12), amount(4096), amount(10**9)) == ("12 B", "4.1 kB", "1 GB")
    assert [duration(s) for s in (2.0, 0.0123, 4.5e-6, 9.9999e-7, 3e-10)] == [
        "2 s", "12.3 ms", "4.5 us", "1 us", "0.3 ns"]  # fmt: skip


def plural(n: int, one: str, more: str = "") -> str:
    return f"{n} {one if n == 1 else more or one + 's'}"


@pytest.mark.parametrize("shape", SHAPES)
def test_the_sentences_of_the_terminal(shape):
    """Word by word; what can be counted is counted anew, from the model, the call and the mask."""
    (model, config), found, call = made(shape), document(shape), calls_of(shape)[0]
    said = " ".join(render(found).split())
    T, kv, half = call.q.shape[1], model.config.kv_heads, config.dtype == "bfloat16"
    about, tiles, caches, costs = (found[x] for x in ("about", "tiles", "caches", "costs"))  # type: ignore[literal-required]
    shared = "" if kv == 4 else f" ({kv} for keys and values)"
    n_params = sum(p.numel() for p in model.parameters())
    layers = found["maps"]["layers"]
    ratios = [x["error"] / x["allowed"] for x in layers]
    worst = ratios.index(max(ratios))
    window = model.config.attention_window
    hidden = f", by the window of {window}" * (window is not None)
    hidden += ", by the border of a document" * ("segments" in shape)
    size, group = (2 if half else 4), 4 // kv
    on_chip = size * (group * 8 * 8 + 2 * 5 * 8) + 4 * group * (8 * 8 + 8 * 5 + 2 * 8)
    rows, cols = (range(0, T, n) for n in (8, 5))
    visits = sum(any(visible(i, j, 0, window) for i in range(a, min(a + 8, T))
                     for j in range(b, min(b + 5, T))) for a in rows for b in cols)  # fmt: skip
    n_tiles, stored = len(rows) * len(cols), len(caches["prompt"])
    which = "the prompt's last token" if shape == "full" else "the model's likeliest next token"
    ring, h = found["ring"], next(h for h in tiles["heads"] if (h["layer"], h["head"]) == (0, 0))
    off = max(s["error"] for s in caches["steps"])
    for sentence in (
        f"a tiny model: 2 layers, 4 heads{shared} of 8 numbers, {n_params:,} parameters, "
        f"{config.dtype} on {about['device']}. {about['announced']}. Its output agrees with "
        f"manual's formula in 2 of 2 layers. The worst is off by {layers[worst]['error']:.2g}, "
        f"allowed is {layers[worst]['allowed']:.2g} (layer {worst}, the truth in float64). MAP of",
        "Shades: . from 0, - from 0.02, = from 0.05, + from 0.1, * from 0.2, # from 0.4, @ from "
        f"0.7; blank: hidden{hidden}, or later.",
        f"{plural(T, 'query', 'queries')} in blocks of 8, {plural(T, 'key')} in blocks of 5. A "
        f"tile needs {amount(on_chip)} of fast memory. m: running maximum of a row's scores, l: "
        "running sum of exp(s - m), rescale: what the old output is multiplied by; of each the "
        "least and the largest of the tile's rows. Bytes: all heads, so far. Of "
        f"{plural(n_tiles, 'tile')} {visits} are computed and {n_tiles - visits} skipped.",
        "x wholly visible / masked in part . skipped",
        f"The output of tiled agrees with the formula: off by {h['error']:.2g}, allowed is "
        f"{h['allowed']:.2g}; from manual's in the same dtype by {h['difference']:.2g}. "
        + " ".join([*tiles["notes"], "CACHES: one decode step"]),
        f"{plural(stored, 'token')} stored; token {stored} ({caches['token']['label']!r}, {which}) "
        f"is decoded. A token takes {amount(2 * 2 * kv * 8 * size)} of keys and values in all "
        "layers. W written now, r read and attended to, m read and masked, s stored and not "
        "read, . empty.",
        *(f"{s['kind']}, by {s['backend']}: {amount(s['bytes_allocated'])} allocated, "
          f"{amount(s['bytes_used'])} of it used." for s in caches["steps"]),
        f"The logits of the three agree with those without a cache: off by {off:.2g} at most, "
        f"allowed is {caches['allowed']:.2g}. " + " ".join([*caches["notes"], "COST on one"]),
        "COST on one A100-SXM4-80GB, bfloat16 ",
        f" One layer forward, batch 1, 4 heads, tiles of {costs['block_m']} x {costs['block_n']}, "
        "the largest that fit into 197 kB. Peak 312 TFLOP/s (datasheet: NVIDIA A100 datasheet), "
        "2,039 GB/s (datasheet: NVIDIA A100 datasheet). Below 153 FLOPs a byte (F/B) memory is the "
        "limit, above it arithmetic. Computing and moving so much takes at least that time.",
        "m: memory is the limit, c: arithmetic is",
        f"{plural(T, 'token')} in 8 chunks of {-(-T // 8)}; what is behind the last one is "
        "filling. Queries stay, keys and values go round.",
        "A pair is a chunk of queries and one of keys, with / where entries are masked; pairs that "
        "are not named are skipped.",
        f"The last query, {T - 1}, tile by tile:",
        f"The ring's output agrees with the formula: off by {ring['error']:.2g}, allowed is "
        f"{ring['allowed']:.2g}; from manual's in the same dtype by {ring['difference']:.2g}.",
    ):  # fmt: skip
        assert sentence in said, sentence


def test_a_layer_with_no_error_allowed_is_not_divided_by():
    found = json.loads(json.dumps(document("plain")))
    found["maps"]["layers"][0] |= {"error": 0.0, "allowed": 0.0}
    assert "The worst is off by" in render(found)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_line_of_the_walk_is_its_tile(shape):
    """Queries, keys, what m, l and rescale are of its rows, and the bytes up to there."""
    found, h = document(shape)["tiles"], traced(shape, 0, 0)
    walk = render(document(shape)).split("TILES of")[1].split("CACHES:")[0]
    steps = {(s["i"], s["j"]): s for s in found["steps"]}
    span_ = r"(-?\S+?)\.\.(-?\S+)"
    line = rf"^ *(\d+),(\d+) +(\d+)\.\.(\d+) +(\d+)\.\.(\d+) +{span_} +{span_} +{span_} +(\S+ k?B)$"
    read_so_far = 0
    for i, j, *ends, m0, m1, l0, l1, x0, x1, read in re.findall(line, walk, re.M):
        step = steps.pop((int(i), int(j)))
        at, n = step["at"], step["rows"][1] - step["rows"][0]
        first, last, key, until = map(int, ends)
        assert [[first, last + 1], [key, until + 1]] == [step["rows"], step["cols"]]
        for name, low, high, unit in (("m", m0, m1, 0.1), ("l", l0, l1, 0.1),
                                      ("rescale", x0, x1, 0.01)):  # fmt: skip
            rows = h[name][at, :n]
            assert [float(low), float(high)] == pytest.approx(
                [float(rows.min()), float(rows.max())], abs=0.51 * unit
            )
            assert all(len(x.partition(".")[2]) == len(str(unit)) - 2 or "inf" in x
                       for x in (low, high))  # fmt: skip
        read_so_far += step["read"]
        assert read == amount(read_so_far)
    for i, j, last in re.findall(r"^ *(\d+),(\d+) skipped(?: to \d+,(\d+))?: ", walk, re.M):
        for column in range(int(j), int(last or j) + 1):
            assert steps.pop((int(i), column))["skipped"]
        assert not steps.get((int(i), int(last or j) + 1), {"skipped": False})["skipped"]
    assert not steps  # each has its line


def test_a_long_walk_is_cut_and_that_is_said():
    """48 tokens in tiles of 2 x 2: of 576 tiles those above the diagonal share a line a row."""
    config = replace(made("full")[1], block_m=2, block_n=2)
    walk = render(explained(made("full")[0], config)).split("TILES of")[1].split("CACHES:")[0]
    lines = re.findall(r"^ *(\d+),(\d+) +(?:\d+\.\.\d+|skipped)", walk, re.M)
    every = [(i, j) for i in range(24) for j in range(min(i + 2, 24))]
    assert len(every) == 24 * 25 // 2 + 23
    assert [(int(i), int(j)) for i, j in lines] == every[:80]
    assert f"... and {len(every) - 80} lines more; the page has all of them." in walk
    assert "K_0" not in walk  # 24 columns: no grid


@pytest.mark.parametrize("T, drawn", [(39, True), (40, False)])
def test_a_grid_of_tiles_is_whole_or_not_drawn(T, drawn):
    """13 columns of keys fit into a line."""
    model, config = made("full")
    text = render(explained(model, replace(config, prompt="a" * T, block_m=12, block_n=3)))
    titles = re.findall(r"^ +K_0.*$", text, re.M)
    assert [line.split() for line in titles] == [[f"K_{j}" for j in range(13)]] * drawn
    assert len(re.findall(r"^ +Q_\d(?: +[x/.]){13}$", text, re.M)) == 4 * drawn


# --- the command ---


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of the tiny model."""
    out = tmp_path_factory.mktemp("run")
    model = tiny()
    checkpoint.save(
        out, weights=model.state_dict(), optimizer={}, keep=1,
        settings={"train": {}, "model": asdict(model.config), "tokenizer": TOKENIZER.to_meta()},
        state={"step": 7, "val_loss": 1.0},
    )  # fmt: skip
    return out


def command(*words: str) -> tuple[int, str, str]:
    return enter(explain.main, ["--device=cpu", *words])


def refused(*words: str) -> str:
    """The one sentence of a mistake of the user's."""
    code, out, err = command(*words)
    assert code == 2 and not out, (out, err)
    assert err.count("error: ") == 1 and "Traceback" not in err
    return err.strip().splitlines()[-1].removeprefix("error: ")


def test_text_and_json_from_a_checkpoint(run, tmp_path, monkeypatch):
    (run / "explain.html").unlink(missing_ok=True)  # of another test
    path = tmp_path / "numbers.json"
    words = (f"--out_dir={run}", f"--prompt={PROMPT}", "--block_n=5", "--text", f"--json={path}")
    clock = iter((7.0, 7.5, 9.25))  # at the start, with the model, and at the end
    monkeypatch.setattr(explain, "time", SimpleNamespace(perf_counter=clock.__next__))
    code, out, err = command(*words, "--layer=1", "--head=3")
    assert code == 0, err
    assert f"{len(PROMPT)} tokens explained in 1.8 s, after 0.5 s for the model" in err
    found = json.loads(path.read_text())
    assert out == render(found) + "\n"
    assert found["about"]["source"] == str(run / "step-00000007")
    assert (found["about"]["layer"], found["about"]["head"]) == (1, 3)
    want = document("plain")
    assert found["maps"] == want["maps"] and found["tiles"] == want["tiles"]
    assert found["costs"] == want["costs"] and found["caches"] == want["caches"]
    ring = viewer.ring.play(calls_of("plain")[1], 4, 1, 3)
    assert found["ring"] == json.loads(json.dumps(ring))
    assert not (run / "explain.html").exists()


def test_the_page_is_written(run, tmp_path):
    code, out, err = command(f"--out_dir={run}", "--prompt=to be")
    assert code == 0, err
    page = (run / "explain.html").read_text(encoding="utf-8")
    size = (run / "explain.html").stat().st_size / 1e6
    assert out == f"{run / 'explain.html'} ({size:.1f} MB): open it in a browser\n"
    assert page.lstrip().startswith("<!doctype")
    other = tmp_path / "x.html"
    assert command(f"--out_dir={run}", f"--html={other}")[0] == 0 and other.exists()


def test_the_page_of_weights_from_elsewhere_is_written_here(run, tmp_path, monkeypatch):
    """Nothing is written beside what --init_from names, nor into a run that was not asked for."""
    monkeypatch.chdir(tmp_path)
    code, out, err = command(f"--init_from={run}", "--prompt=to be")
    assert code == 0, err
    assert out.startswith("explain.html (") and [p.name for p in tmp_path.iterdir()] == [
        "explain.html"
    ]


def test_a_window_that_the_model_was_not_trained_with(run, tmp_path):
    path = tmp_path / "numbers.json"
    words = (f"--out_dir={run}", f"--prompt={PROMPT}", "--block_n=5", "--text", f"--json={path}")
    assert command(*words, "--window=6")[0] == 0
    found = json.loads(path.read_text())
    assert found["about"]["window"] == 6
    assert found["maps"] == document("window")["maps"]
    assert found["caches"] == document("window")["caches"]


def test_mistakes_are_told_in_a_sentence(run, tmp_path):
    at = f"--out_dir={run}"
    assert "no checkpoint" in refused(f"--out_dir={tmp_path}/nothing")
    assert "layer must be 0 to 1, which this model has, got 2" in refused(at, "--layer=2")
    assert "head must be 0 to 3, which this model has, got -1" in refused(at, "--head=-1")
    assert "the character 'é' is not in the model's vocabulary" in refused(at, "--prompt=né")
    long = refused(at, f"--prompt={'a' * 49}")
    assert "the prompt has 49 tokens, the model takes 48 (block_size)" in long
    assert "the prompt is empty" in refused(at, "--prompt=")
    assert "the prompt is empty" in refused(at, "--prompt=||", "--segments=|")
    assert "the GPU 'Voodoo' is not known" in refused(at, "--gpu=Voodoo", "--text")
    assert "fast_memory must hold a tile" in refused(at, "--fast_memory=5")
    assert "at most 16 processes can be shown, got 17" in refused(at, "--ring=17")
    assert enter(explain.main, ["--device=cpu", at, "--ring=16", "--text"])[0] == 0
    assert "ring must be at least 1" in refused(at, "--ring=0")
    assert "block_m must be at least 1" in refused(at, "--block_m=0")
    assert "window must be at least 1" in refused(at, "--window=0")
    assert "segments must have at least one character" in refused(at, "--segments=")
    assert "cannot be read" in refused(at, f"--prompt=FILE:{tmp_path}/nothing.txt")
    no_folder = refused(at, "--prompt=a", f"--html={tmp_path}/no/x.html")
    assert f"{tmp_path}/no/x.html cannot be written ([Errno 2] No such file" in no_folder
    assert "did you mean '--prompt'?" in refused(at, "--promt=a")
    cuda = refused(at, "--attention_backend=flash_attn_3", "--attention_fallback=False")
    assert "flash_attn_3" in cuda and "it runs on cuda, not on cpu" in cuda
    with pytest.raises(UserError, match=r"one token only \(block_size 1\)"):
        prompt_of(ExplainConfig(prompt="a"), TOKENIZER, 1)
    assert prompt_of(ExplainConfig(prompt="ab"), TOKENIZER, 2).text == "ab"


def test_a_prompt_from_a_file(run, tmp_path):
    (tmp_path / "prompt.txt").write_text("or not", encoding="utf-8")
    numbers = tmp_path / "numbers.json"
    words = (f"--out_dir={run}", f"--prompt=FILE:{tmp_path}/prompt.txt", f"--json={numbers}")
    code, _, err = command(*words, "--text", "--attn_implementation=eager")
    assert code == 0 and "6 tokens explained" in err
    about = json.loads(numbers.read_text())["about"]
    assert (about["prompt"], about["backend"]) == ("or not", "manual")


def test_the_best_checkpoint_is_explained(run, tmp_path):
    """By validation loss, here not the latest; its folder is named."""
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    later = Path(shutil.copytree(run / "step-00000007", folder / "step-00000009"))
    state = (later / "train_state.json").read_text().replace('"val_loss": 1.0', '"val_loss": 2.0')
    (later / "train_state.json").write_text(state.replace('"step": 7', '"step": 9'))
    for asked in ({"out_dir": str(folder)}, {"init_from": str(folder)}):
        for which, step in (("best", 7), ("latest", 9)):
            config = ExplainConfig(**asked, checkpoint=which)  # type: ignore[arg-type]
            assert explain.source_of(config) == str(folder / f"step-0000000{step}")
    assert explain.source_of(ExplainConfig(init_from="gpt2", checkpoint="best")) == "gpt2"


def test_the_file_is_a_command_and_an_old_terminal_gets_question_marks(run, monkeypatch):
    """A terminal without the signs for spaces and line breaks shows the rest."""
    monkeypatch.setattr(sys, "argv", ["explain.py", f"--out_dir={run}", "--device=cpu", "--text",
                                      "--prompt=to be"])  # fmt: skip
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(Path(explain.__file__)), run_name="__main__")
    shown.flush()
    text = shown.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert left.value.code == 0 and "to?be most" in text
