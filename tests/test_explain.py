"""explain.py: every number that is shown, held against the thing itself."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from pathlib import Path
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
from attention import Policy, Resolution, Spec, manual, visible
from attention.tiled import forward_tiles
from core.settings import UserError
from data.tokenizer import CharTokenizer
from explain import ExplainConfig, forward, prompt_of
from inference.cache import PagedStep, StaticStep
from model import GPT, GPTConfig
from viewer.cost import costs, fast_memory, find_gpu, manual_steps, tile_sizes, tiled_bytes, visited
from viewer.document import Document, pack, token_of, unpack
from viewer.maps import Call, watched, weights
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


# --- the q, k and v of the model, and its maps ---


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


@pytest.mark.parametrize("shape", SHAPES)
def test_maps_are_the_softmax_of_the_models_own_q_and_k(shape):
    m, calls = document(shape)["maps"], calls_of(shape)
    T = calls[0].q.shape[1]
    packed = unpack(m["weights"])
    assert packed.shape == (2, 4, T * (T + 1) // 2) and packed.dtype == np.uint16
    assert m["levels"] == 65535
    rounding = 0.5 / 65535
    rows, cols = np.tril_indices(T)
    for layer, call in enumerate(calls):
        P = torch.zeros(4, T, T, dtype=torch.float64)
        P[:, rows, cols] = torch.from_numpy(packed[layer] / m["levels"])
        torch.testing.assert_close(P, softmax_by_hand(call), rtol=0, atol=rounding + 2e-6)
        assert (P.sum(dim=-1) - 1).abs().max() <= T * rounding + 1e-6
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


@pytest.mark.parametrize("shape", SHAPES)
def test_the_backend_agrees(shape):
    for layer in document(shape)["maps"]["layers"]:
        assert layer["agrees"] and 0 <= layer["error"] <= layer["allowed"]
        assert layer["error"] == max(layer["heads"]) and len(layer["heads"]) == 4
    assert document(shape)["about"]["backend"] == "sdpa"
    for layer, call in zip(document(shape)["maps"]["layers"], calls_of(shape), strict=True):
        v = call.v[0].double().repeat_interleave(4 // call.v.shape[2], dim=1)
        exact = torch.einsum("hij,jhd->ihd", softmax_by_hand(call), v)
        largest = float(exact.abs().max())
        assert layer["allowed"] < (0.1 if shape == "bfloat16" else 2e-5) * largest
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
    assert "NOT" in render(found) and "NOT" not in render(document("plain"))


def test_an_output_that_is_no_number_is_refused(monkeypatch):
    model, config = tiny(), made("plain")[1]
    stand_in(model, monkeypatch, lambda layer, out: out / (layer != 1))
    with pytest.raises(UserError, match="layer 1"):
        explained(model, config)
    model = tiny()
    torch.nn.init.constant_(model.transformer.h[1].mlp.c_proj.bias, torch.inf)
    with pytest.raises(UserError):
        explained(model, config)


# --- bytes, FLOPs, roofline ---


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
    with pytest.raises(ValueError, match="got 5"):
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


def test_a_gpu_is_found_by_a_part_of_its_name():
    assert find_gpu("4090") == "RTX 4090" and find_gpu("l4") == "L4"
    assert find_gpu("NVIDIA A100-SXM4-80GB") == "A100-SXM4-80GB"
    with pytest.raises(ValueError, match="H100 NVL"):
        find_gpu("h100")
    for unknown in ("Voodoo 2", ""):
        with pytest.raises(ValueError, match="RTX 4090"):
            find_gpu(unknown)


# --- tiles ---


def traced(shape: str, layer: int, head: int) -> dict[str, Any]:
    """A head's arrays in float64."""
    (found,) = (
        h for h in document(shape)["tiles"]["heads"] if (h["layer"], h["head"]) == (layer, head)
    )
    arrays = ("scores", "m", "l", "rescale")
    return {name: torch.from_numpy(unpack(found[name])).double() for name in arrays}  # type: ignore[literal-required]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_tiles_together_are_the_maps(shape):
    """The scores of all tiles, softmax over a row: what the maps show."""
    call = calls_of(shape)[0]
    T, steps = call.q.shape[1], document(shape)["tiles"]["steps"]
    for head in range(4):
        scores = traced(shape, 0, head)["scores"]
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
        told, out = viewer.tiles.trace_of(*call.given, B_r=found["block_m"], B_c=found["block_n"])
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
            torch.testing.assert_close(told[at].O[0, head].double(), O, **close)
            if step["last"]:
                done = out[0, slice(*step["rows"]), head].double()
                torch.testing.assert_close(done, O / l[:, None], **close)


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


@pytest.mark.parametrize("shape", SHAPES)
def test_at_the_end_tiled_stands_beside_manual(shape):
    calls = calls_of(shape)
    heads = document(shape)["tiles"]["heads"]
    assert [(h["layer"], h["head"]) for h in heads] == [(0, n) for n in range(4)]
    call, tiles = calls[0], document(shape)["tiles"]
    plain = manual.attend(call.q, call.k, call.v, call.spec, segments=call.segments)[0].float()
    _, out = viewer.tiles.trace_of(*call.given, B_r=tiles["block_m"], B_c=tiles["block_n"])
    for h in heads:
        n = h["head"]
        exact = softmax_by_hand(call)[n] @ call.v[0, :, n // (4 // call.v.shape[2])].double()
        got = out[0, :, n].float()
        assert h["difference"] == float((got - plain[:, n]).abs().max())
        assert h["error"] <= h["allowed"]
        error = float((got - exact).abs().max())
        assert h["error"] == pytest.approx(error, rel=1e-3, abs=1e-12)


def test_too_many_tiles_are_refused():
    with pytest.raises(UserError, match="2304"):
        explained(tiny(), ExplainConfig(prompt="a" * 48, block_m=1, block_n=1))


# --- caches ---


@pytest.mark.parametrize("shape", SHAPES)
def test_the_cells_of_the_caches(shape):
    """The step writes its own token's cell, and attends to what visible() shows it."""
    found, window = document(shape)["caches"], made(shape)[0].config.attention_window
    n = found["position"]
    seen = [j for j in range(n + 1) if visible(n, j, 0, window)]
    for step in found["steps"]:
        holds = step["holds"]
        stored = sorted(p for p in holds if p >= 0)
        kept = seen[0] if step["kind"] == "dynamic" else 0
        assert len(holds) == step["cells"] and stored == [*range(kept, n + 1)]
        assert [holds[c] for c in step["written"]] == [n]
        assert sorted(holds[c] for c in step["seen"]) == seen
        assert set(step["seen"]) <= set(step["read"]) and step["error"] <= found["allowed"]
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
    assert paged["page_size"] == 8 and len(pages) == -(-(found["position"] + 1) // 8)
    assert len({*pages}) == len(pages) and {*pages} < {*range(1, paged["cells"] // 8)}
    for n, page in enumerate(pages):
        held = [p for p in paged["holds"][page * 8 : page * 8 + 8] if p >= 0]
        assert held == [*range(8 * n, min(8 * n + 8, found["position"] + 1))]
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
    assert document("segments")["about"]["notes"] and not document("full")["about"]["notes"]


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
    plain = manual.attend(call.q, call.k, call.v, call.spec, segments=call.segments)[0, :, 2]
    assert float((whole - plain).abs().max()) <= found["difference"] + off / 5
    assert found["difference"] <= 2 * found["allowed"] and found["error"] <= found["allowed"]


# --- the document and the prompt ---


@pytest.mark.parametrize("shape", SHAPES)
def test_the_document_is_json(shape):
    found = document(shape)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    about = found["about"]
    assert "".join(t["text"] for t in about["tokens"]) == about["prompt"].replace("|", "")
    assert about["window"] == made(shape)[0].config.attention_window
    assert (about["segments"] is None) == ("segments" not in shape)
    assert about["dtype"] == made(shape)[1].dtype and about["n_kv_head"] <= about["n_head"] == 4
    assert about["backend"] == "sdpa" and about["refused"] == []
    c = made(shape)[0].config
    sizes = (c.n_layer, c.n_head, c.kv_heads, 8)
    names = ("n_layer", "n_head", "n_kv_head", "head_dim")
    assert tuple(about[name] for name in names) == sizes  # type: ignore[literal-required]
    assert about["n_params"] == sum(p.numel() for p in made(shape)[0].parameters())


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
    assert about["refused"][0]["name"] == "flash_attn_3"
    for refused in about["refused"]:
        assert refused["name"] in text and all(why in text for why in refused["why"])
    strict = tiny(attention_backend="tiled")
    strict.choices.policy = Policy(fallback=False)
    with pytest.raises(UserError, match="static"):
        explained(strict, made("plain")[1])


def test_a_mark_cuts_the_prompt_into_documents():
    prompt = prompt_of(ExplainConfig(prompt="ab|c||de", segments="|"), TOKENIZER, 48)
    assert TOKENIZER.decode(prompt.ids) == "abcde" and prompt.segments == [0, 0, 1, 2, 2]
    assert prompt_of(ExplainConfig(prompt="ab"), TOKENIZER, 48).segments is None


def test_a_long_prompt_is_shown_in_part_and_that_is_said():
    model = tiny(block_size=300)
    config = ExplainConfig(prompt=(PROMPT * 10)[:280], block_m=32, block_n=32)
    found = explained(model, config)
    assert len(found["about"]["tokens"]) == 256
    assert "280" in found["about"]["notes"][0]
    whole = explained(model, replace(config, prompt=config.prompt[:256]))
    assert whole["about"]["notes"] == [] and whole["maps"] == found["maps"]


# --- the terminal ---


@pytest.mark.parametrize("shape", SHAPES)
def test_80_columns_are_enough(shape):
    lines = render(document(shape)).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize("shape", ["plain", "gqa-window-segments"])
def test_the_map_in_characters(shape):
    model, config = made(shape)
    found = explained(model, replace(config, layer=1, head=2))
    text = render(found)
    call = calls_of(shape)[1]
    P, T = softmax_by_hand(call)[2], call.q.shape[1]
    begin = text.index("MAP of layer 1, head 2")
    rows = [line for line in text[begin:].splitlines() if re.match(r" *\d+ \S ", line)][:T]
    assert len(rows) == T
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


@pytest.mark.parametrize("shape", SHAPES)
def test_the_walk_in_a_table(shape):
    found, text = document(shape), render(document(shape))
    tiles = found["tiles"]
    walk = text[text.index("TILES of") : text.index("CACHES:")]
    told = set(re.findall(r"^ *(\d+),(\d+) +\d+\.\.\d+ ", walk, re.MULTILINE))
    assert told == {(str(s["i"]), str(s["j"])) for s in tiles["steps"] if not s["skipped"]}
    grid = re.findall(r"^ +Q_\d+((?: +[x/.])+)$", walk, re.MULTILINE)
    cells = [c for row in grid for c in row.split()]
    call = calls_of(shape)[0]
    for c, s in zip(cells, tiles["steps"], strict=True):
        tile = sees(call)[slice(*s["rows"]), slice(*s["cols"])]
        assert c == ("." if s["skipped"] else "x" if tile.all() else "/")
    last = tiles["steps"][-1]
    assert re.search(
        rf"^tiled +{amount(last['read_so_far'])} +{amount(last['written_so_far'])}$", walk, re.M
    )
    by_manual = tiles["manual"][-1]
    assert re.search(
        rf"^manual +{amount(by_manual['read_so_far'])} +{amount(by_manual['written_so_far'])}$",
        walk, re.M,
    )  # fmt: skip


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


def test_the_cost_table():
    found, text = document("plain")["costs"], render(document("plain"))
    lines = text[text.index("COST on") :].splitlines()
    start = next(n for n, line in enumerate(lines) if re.match(r" *64 .* [mc]$", line))
    rows = [line.split() for line in lines[start : start + 11]]
    for words, row in zip(rows, found["rows"], strict=True):
        want = [f"{row['T']:,}"]
        for c in (row["manual"], row["tiled"]):
            want += [*scaled(c["flops"]).split(), *scaled(c["bytes"]).split()]
            want += [f"{c['intensity']:.0f}", *duration(c["seconds"]).split(), c["bound"][0]]
        assert words == want


@pytest.mark.parametrize("shape", ["plain", "gqa-window-segments", "one token"])
def test_the_terminal_shows_the_ring(shape):
    found, text = document(shape)["ring"], render(document(shape))
    text = text[text.index("RING of layer 0, head 0: 4 processes") :]
    T = len(document(shape)["about"]["tokens"])
    rows = re.findall(r"^ +(\d) +(\d) +(\d)  ((?:\d+,\d+/? ?)*) +(\S+ k?B)$", text, re.M)
    assert len(rows) == 16
    for step, rank, home, pairs, sent in rows:
        s, r = int(step), int(rank)
        assert int(home) == found["homes"][s][r]
        mine = [t for t in found["tiles"] if (t["step"], t["rank"]) == (s, r)]
        want = [f"{t['queries']},{t['keys']}{'/' if t['masked'] else ''}" for t in mine]
        assert pairs.split() == want
        assert sent == amount(sum(found["sent"][n][r] for n in range(s + 1)))
    growth = re.findall(r"^ +(\d) +\d+\.\.\d+ +(\S+) +(\S+) +(\S+)$", text, re.M)
    at, row = divmod(T - 1, found["chunk"])
    visits = [n for n, t in enumerate(found["tiles"]) if t["queries"] == at]
    part, L, O = (unpack(found[name]) for name in ("part", "L", "O"))  # type: ignore[literal-required]
    assert [[float(x) for x in line] for line in growth] == [
        [found["tiles"][n]["step"], *(float(f"{x:.4f}") for x in (
            part[n, row], L[n, row], np.linalg.norm(O[n, row])))] for n in visits
    ]  # fmt: skip


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


def test_text_and_json_from_a_checkpoint(run, tmp_path):
    (run / "explain.html").unlink(missing_ok=True)  # of another test
    path = tmp_path / "numbers.json"
    words = (f"--out_dir={run}", f"--prompt={PROMPT}", "--block_n=5", "--text", f"--json={path}")
    code, out, err = command(*words, "--layer=1", "--head=3")
    assert code == 0, err
    found = json.loads(path.read_text())
    assert out == render(found) + "\n"
    assert found["about"]["source"] == str(run / "step-00000007")
    assert (found["about"]["layer"], found["about"]["head"]) == (1, 3)
    want = document("plain")
    assert found["maps"] == want["maps"] and found["tiles"]["steps"] == want["tiles"]["steps"]
    assert {h["layer"] for h in found["tiles"]["heads"]} == {1}
    assert found["costs"] == want["costs"] and found["caches"] == want["caches"]
    ring = viewer.ring.play(calls_of("plain")[1], 4, 1, 3)
    assert found["ring"] == json.loads(json.dumps(ring))
    assert not (run / "explain.html").exists()


def test_the_page_is_written(run, tmp_path):
    code, out, err = command(f"--out_dir={run}", "--prompt=to be")
    assert code == 0, err
    page = (run / "explain.html").read_text(encoding="utf-8")
    assert str(run / "explain.html") in out
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


@pytest.mark.parametrize("words, named", [
    (["--layer=2"], "got 2"), (["--head=-1"], "got -1"), (["--prompt=né"], "'é'"),
    ([f"--prompt={'a' * 49}"], "49"), (["--prompt="], "prompt"),
    (["--prompt=||", "--segments=|"], "prompt"), (["--gpu=Voodoo", "--text"], "Voodoo"),
    (["--fast_memory=5"], "got 5"), (["--ring=17"], "got 17"), (["--ring=0"], "ring"),
    (["--block_m=0"], "block_m"), (["--window=0"], "window"), (["--segments="], "segments"),
    (["--prompt=FILE:no/such.txt"], "no/such.txt"), (["--html=no/x.html"], "no/x.html"),
    (["--promt=a"], "--prompt"), (["--out_dir=no/run"], "no/run"),
    (["--attention_backend=flash_attn_3", "--attention_fallback=False"], "flash_attn_3"),
])  # fmt: skip
def test_a_wrong_setting_is_named(run, words, named):
    code, out, err = command(f"--out_dir={run}", *words)
    assert code == 2 and not out and "Traceback" not in err
    assert named in err.splitlines()[-1] or named in err


def test_a_prompt_from_a_file(run, tmp_path):
    (tmp_path / "prompt.txt").write_text("or not", encoding="utf-8")
    numbers = tmp_path / "numbers.json"
    words = (f"--out_dir={run}", f"--prompt=FILE:{tmp_path}/prompt.txt", f"--json={numbers}")
    code, _, err = command(*words, "--text", "--attn_implementation=eager")
    assert code == 0, err
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
