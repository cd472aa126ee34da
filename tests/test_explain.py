"""explain.py: every number that is shown, held against the thing itself."""

from __future__ import annotations

import json
import math
import re
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

import checkpoint
import explain
import viewer.tiles
from attention import Policy, Spec, manual, visible
from core.settings import UserError
from data.tokenizer import CharTokenizer
from explain import ExplainConfig, forward, prompt_of
from inference.cache import PagedStep, StaticStep
from model import GPT, GPTConfig
from viewer.document import Document, pack, token_of, unpack
from viewer.maps import Call, maps, watched, weights
from viewer.text import amount, render
from viewer.tiles import fast_memory, manual_steps

PROMPT = "to be or not to be that is it"

TOKENIZER = CharTokenizer([chr(c) for c in range(ord(" "), ord("~") + 1)])

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gqa-window-segments": {
        "attention_window": 5, "n_kv_head": 2, "segments": "|", "prompt": "to be|or not to be|it",
    },
    "one token": {"prompt": "a"},
    "full": {"prompt": (PROMPT * 3)[:48], "attention_window": 6},
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


def by_hand(call: Call) -> Tensor:
    """The output (T, H, D) float64, straight from the formula."""
    v = call.v[0].double().repeat_interleave(call.q.shape[2] // call.v.shape[2], dim=1)
    return torch.einsum("hij,jhd->ihd", softmax_by_hand(call), v)


# --- the q, k and v of the model, and its maps ---


@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_caught_is_what_the_model_computed(shape):
    (model, config), calls = made(shape), calls_of(shape)
    prompt = prompt_of(config, TOKENIZER, 48)
    idx, block = torch.tensor([prompt.ids]), model.transformer.h[0]
    assert len(calls) == 2 and all(
        call.spec.window == model.config.attention_window for call in calls
    )
    with torch.no_grad():
        x = model.transformer.wte(idx) + model.transformer.wpe(torch.arange(idx.shape[1]))
        qkv = block.attn.c_attn(block.ln_1(x))
        caught = [t.flatten(2) for t in (calls[0].q, calls[0].k, calls[0].v)]
        assert torch.equal(torch.cat(caught, dim=2), qkv)
        before = model.hidden(idx)
        with watched(model) as again:
            assert torch.equal(model.hidden(idx), before)
        model.hidden(idx)  # no longer watched
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
    if T > 8:  # the heads look somewhere: a wrong mask would be seen
        assert weights(calls[0]).amax(dim=-1).median() > 0.3
        i = torch.arange(T)
        assert [[*range(a, b)] for a, b in m["seen"]] == [i[row].tolist() for row in sees(calls[0])]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_backend_agrees(shape):
    assert document(shape)["about"]["backend"] == "sdpa"
    for layer, call in zip(document(shape)["maps"]["layers"], calls_of(shape), strict=True):
        exact = by_hand(call)
        assert layer["agrees"] and layer["error"] == max(layer["heads"]) <= layer["allowed"]
        assert layer["allowed"] < (0.1 if shape == "bfloat16" else 2e-5) * float(exact.abs().max())
        heads = (call.out[0] - exact).abs().amax(dim=(0, 2))
        assert layer["heads"] == pytest.approx(heads.tolist(), rel=1e-6, abs=1e-14)


def test_an_output_that_is_off_does_not_agree():
    """One number, of one head of the second layer, off by a thousandth."""
    first, second = calls_of("plain")
    wrong = second.out.clone()
    wrong[0, 7, 2, 3] += 1e-3
    good, bad = maps([first, replace(second, out=wrong)])["layers"]
    assert good["agrees"] and not bad["agrees"]
    assert bad["error"] == pytest.approx(1e-3, rel=0.01)
    assert [e > 1e-4 for e in bad["heads"]] == [False, False, True, False]
    found = json.loads(json.dumps(document("plain")))
    assert "NOT" not in render(found)
    found["maps"]["layers"][1]["agrees"] = False
    assert "NOT agree in layer 1" in render(found)


def test_an_output_that_is_no_number_is_refused():
    for place, named in (("attn.c_attn", "layer 1"), ("mlp.c_proj", "last layer")):
        model = tiny()
        torch.nn.init.constant_(model.transformer.h[1].get_submodule(place).bias, torch.inf)
        with pytest.raises(UserError, match=named):
            explained(model, made("plain")[1])


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


def visited(spec: Spec, T: int, B_r: int, B_c: int) -> tuple[int, int]:
    """Keys read and pairs computed by all blocks of queries, of one head: a closed form."""
    keys = pairs = 0
    for first in range(0, T, B_r):
        stop = min(first + B_r, T)
        begin = 0 if spec.window is None else max(0, first - spec.window + 1) // B_c * B_c
        read = min(-(-stop // B_c) * B_c, T) - begin
        keys, pairs = keys + read, pairs + (stop - first) * read
    return keys, pairs


def tiled_bytes(spec: Spec, T: int, B_r: int, B_c: int) -> tuple[int, int]:
    """Bytes that tiled reads and writes."""
    s, D, H, Hkv = getattr(torch, spec.dtype).itemsize, spec.head_dim, spec.n_head, spec.n_kv_head
    keys, _ = visited(spec, T, B_r, B_c)
    return s * D * (H * T + 2 * Hkv * keys), s * H * T * D + max(4, s) * H * T


TILES = [(1, 1), (5, 3), (3, 8), (64, 64)]


@pytest.mark.parametrize("T", [1, 16, 33])
@pytest.mark.parametrize("heads, D, dtype", [((4, 2), 16, "float16"), ((3, 1), 8, "float64")])
def test_bytes_of_the_trace_are_the_closed_formula(T, heads, D, dtype):
    for window, (B_r, B_c) in product((None, 1, 6, 100), TILES):
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
    """m and l after each tile, and the scores of all tiles, against the formula."""
    call, found = calls_of(shape)[0], document(shape)["tiles"]
    T, close = call.q.shape[1], {"rtol": 1e-2, "atol": 1e-2} if shape == "bfloat16" else {}
    exact, plain = by_hand(call), call.by_manual()[0].double()
    for head in range(4):
        h = traced(shape, 0, head)
        S = torch.full((T, T), -torch.inf, dtype=torch.float64)
        for step in (s for s in found["steps"] if s["at"] is not None):
            I, J, at = slice(*step["rows"]), slice(*step["cols"]), step["at"]
            rows, cols = I.stop - I.start, J.stop - J.start
            past = S[I].amax(dim=1)
            S[I, J] = h["scores"][at, :rows, :cols]
            assert h["scores"][at, rows:].isnan().all() and h["m"][at, rows:].isnan().all()
            m = S[I].amax(dim=1)
            assert torch.equal(h["m"][at, :rows], m)
            l = torch.exp(S[I] - m[:, None]).sum(dim=1).nan_to_num()
            torch.testing.assert_close(
                h["l"][at, :rows], l, **close or {"rtol": 1e-4, "atol": 1e-5}
            )
            if not step["first"]:
                rescale = torch.exp(past - m).nan_to_num(1)
                torch.testing.assert_close(h["rescale"][at, :rows], rescale, rtol=1e-4, atol=1e-5)
        assert torch.equal(S.isfinite(), sees(call))
        want = softmax_by_hand(call)[head]
        torch.testing.assert_close(torch.softmax(S, -1), want, rtol=1e-4, atol=2e-6)
        of = found["heads"][head]
        assert (of["layer"], of["head"]) == (0, head) and of["error"] <= of["allowed"]
        assert of["difference"] <= 1.01 * float((plain - exact)[:, head].abs().max() + of["error"])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_steps_and_their_bytes(shape):
    call, found = calls_of(shape)[0], document(shape)["tiles"]
    T, spec, steps = call.q.shape[1], call.spec, found["steps"]
    assert [(s["i"], s["j"]) for s in steps] == [*product(range(-(-T // 8)), range(-(-T // 5)))]
    for s in steps:
        tile = sees(call)[slice(*s["rows"]), slice(*s["cols"])]
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
    assert steps[-1]["written_so_far"] == tiled_bytes(spec, T, 8, 5)[1]
    keys = sum(s["cols"][1] - s["cols"][0] for s in visited_)
    numbers = spec.n_head * T + 2 * spec.n_kv_head * keys
    assert steps[-1]["read_so_far"] == found["size"] * spec.head_dim * numbers
    if call.segments is None:
        assert steps[-1]["read_so_far"] == tiled_bytes(spec, T, 8, 5)[0]
    assert found["manual"] == manual_steps(spec, T)
    assert found["fast_memory"] == fast_memory(spec, 8, 5)


def test_too_many_tiles_are_refused():
    with pytest.raises(ValueError, match="2304"):
        explained(tiny(), ExplainConfig(prompt="a" * 48, block_m=1, block_n=1))


# --- caches ---


@pytest.mark.parametrize("shape", SHAPES)
def test_the_caches(shape):
    """A step writes its own token's cell and attends to what visible() shows."""
    found, config = document(shape)["caches"], made(shape)[0].config
    n, window = found["position"], config.attention_window
    seen = [j for j in range(n + 1) if visible(n, j, 0, window)]
    per_token = 2 * 2 * config.kv_heads * 8 * (2 if shape == "bfloat16" else 4)
    assert found["agree"] and found["bytes_per_token"] == per_token
    assert [s["kind"] for s in found["steps"]] == ["dynamic", "static", "paged"]
    for step in found["steps"]:
        holds = step["holds"]
        stored = sorted(p for p in holds if p >= 0)
        assert len(holds) == step["cells"]
        assert stored == [*range(seen[0] if step["kind"] == "dynamic" else 0, n + 1)]
        assert [holds[c] for c in step["written"]] == [n]
        assert sorted(holds[c] for c in step["seen"]) == seen
        assert {*step["seen"]} <= {*step["read"]} and step["error"] <= found["allowed"]
        assert step["bytes_allocated"] == step["cells"] * per_token
        assert step["bytes_used"] == len(stored) * per_token
    _, static, paged = found["steps"]
    pages = paged["page_table"]
    assert paged["page_size"] == 8 and len(pages) == len({*pages}) == -(-(n + 1) // 8)
    assert len(pages) == 1 or pages != sorted(pages)  # an order in which the table matters
    for k, page in enumerate(pages):
        held = [p for p in paged["holds"][page * 8 : page * 8 + 8] if p >= 0]
        assert held == [*range(8 * k, min(8 * k + 8, n + 1))]
    assert static["read"] == [*range(48)] and static["backend"] == "sdpa"
    assert paged["read"] == [8 * p + s for p in pages for s in range(8)]
    assert paged["backend"] == "paged"


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
    assert (
        document("gqa-window-segments")["about"]["notes"] and not document("full")["about"]["notes"]
    )


def test_a_token_beyond_the_tokenizers_is_never_decoded():
    """The model's vocabulary is padded from 95 to 100."""
    model = tiny()
    with torch.no_grad():
        model.transformer.wte.weight[95:] *= 100
    assert explained(model, made("plain")[1])["caches"]["token"]["id"] < 95


@pytest.mark.parametrize(
    "shape, step, wrong", [("plain", StaticStep, 1), ("bfloat16", PagedStep, 2)]
)
def test_a_cache_that_stores_the_wrong_thing_does_not_agree(step, wrong, shape, monkeypatch):
    explained(*made(shape))  # the probe, which would refuse such a cache, has been by then
    real = step.append
    monkeypatch.setattr(step, "append", lambda self, n, k, v: real(self, n, k, v.roll(1, dims=3)))
    found = explained(*made(shape))
    errors = [s["error"] > found["caches"]["allowed"] for s in found["caches"]["steps"]]
    assert errors == [n == wrong for n in range(3)] and not found["caches"]["agree"]


# --- the document and the prompt ---


@pytest.mark.parametrize("shape", SHAPES)
def test_the_document_is_json(shape):
    found, (model, config) = document(shape), made(shape)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    about, c = found["about"], model.config
    assert "".join(t["text"] for t in about["tokens"]) == about["prompt"].replace("|", "")
    names = ("n_layer", "n_head", "n_kv_head", "window", "dtype")
    sizes = (c.n_layer, c.n_head, c.kv_heads, c.attention_window, config.dtype)
    assert tuple(about[name] for name in names) == sizes  # type: ignore[literal-required]
    assert (about["segments"] is None) == ("segments" not in shape) and about["refused"] == []
    assert about["n_params"] == sum(p.numel() for p in model.parameters())


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
    with pytest.raises(ValueError, match="static"):
        explained(strict, made("plain")[1])


def test_a_mark_cuts_the_prompt_into_documents():
    prompt = prompt_of(ExplainConfig(prompt="ab|c||de", segments="|"), TOKENIZER, 48)
    assert TOKENIZER.decode(prompt.ids) == "abcde" and prompt.segments == [0, 0, 1, 2, 2]
    assert prompt_of(ExplainConfig(prompt="ab"), TOKENIZER, 48).segments is None


def test_a_long_prompt_is_shown_in_part():
    config = ExplainConfig(prompt=(PROMPT * 10)[:280], block_m=32, block_n=32)
    found = explained(tiny(block_size=300), config)
    assert len(found["about"]["tokens"]) == 256 and "280" in found["about"]["notes"][0]


# --- the terminal ---


@pytest.mark.parametrize("shape", SHAPES)
def test_80_columns_are_enough(shape):
    lines = render(document(shape)).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize("shape", ["plain", "gqa-window-segments"])
def test_the_map_in_characters(shape):
    model, config = made(shape)
    text = render(explained(model, replace(config, layer=1, head=2)))
    call = calls_of(shape)[1]
    P, T = softmax_by_hand(call)[2], call.q.shape[1]
    rows = re.findall(r"^ *\d+ \S .*", text[text.index("MAP of layer 1, head 2") :], re.M)[:T]
    lows = {"@": 0.7, "#": 0.4, "*": 0.2, "+": 0.1, "=": 0.05, "-": 0.02, ".": 0.0}
    for i, line in enumerate(rows):
        cells, rest = line[5 : 5 + T], line[5 + T :].split()
        assert [c != " " for c in cells] == sees(call)[i].tolist()
        for c, p in zip(cells, P[i]):
            if c != " ":
                above = min([low for low in lows.values() if low > lows[c]], default=2)
                assert lows[c] - 1e-4 <= p < above + 1e-4
        j = int(P[i].argmax())
        assert int(rest[0]) == j and float(rest[-1]) == pytest.approx(float(P[i, j]), abs=0.0051)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_walk_in_a_table(shape):
    tiles, text, call = document(shape)["tiles"], render(document(shape)), calls_of(shape)[0]
    walk = text[text.index("TILES of") : text.index("CACHES:")]
    shown = set(re.findall(r"^ *(\d+),(\d+) +\d+\.\.\d+ ", walk, re.MULTILINE))
    assert shown == {(str(s["i"]), str(s["j"])) for s in tiles["steps"] if not s["skipped"]}
    grid = "".join(re.findall(r"^ +Q_\d+((?: +[x/.])+)$", walk, re.MULTILINE)).split()
    for c, s in zip(grid, tiles["steps"], strict=True):
        tile = sees(call)[slice(*s["rows"]), slice(*s["cols"])]
        assert c == ("." if s["skipped"] else "x" if tile.all() else "/")
    for name, last in (("tiled", tiles["steps"][-1]), ("manual", tiles["manual"][-1])):
        read, written = amount(last["read_so_far"]), amount(last["written_so_far"])
        assert re.search(rf"^{name} +{read} +{written}$", walk, re.M)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_caches_in_characters(shape):
    found, text = document(shape)["caches"], render(document(shape))
    drawn = text[text.index("CACHES:") : len(text)]
    parts = re.split(r"^(?=dynamic,|static,|paged,)", drawn, flags=re.M)[1:]
    for part, step in zip(parts, found["steps"], strict=True):
        cells = "".join(re.findall(r"^  (?: *\d+|page \d+) +([Wrms.]+)(?:  .*)?$", part, re.M))
        want = ["s" if p >= 0 else "." for p in step["holds"]]
        for sign, places in (("m", step["read"]), ("r", step["seen"]), ("W", step["written"])):
            for c in places:
                want[c] = sign
        assert cells == "".join(want)


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
    (tmp_path / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    path = tmp_path / "numbers.json"
    words = (
        f"--out_dir={run}",
        f"--prompt=FILE:{tmp_path}/prompt.txt",
        "--block_n=5",
        "--window=6",
    )
    code, out, err = command(*words, "--text", f"--json={path}", "--layer=1", "--head=3",
                             "--attn_implementation=eager")  # fmt: skip
    assert code == 0, err
    found = json.loads(path.read_text())
    assert out == render(found) + "\n"
    about = found["about"]
    assert (about["source"], about["prompt"]) == (str(run / "step-00000007"), PROMPT)
    assert (about["layer"], about["head"], about["window"]) == (1, 3, 6)
    assert about["backend"] == "manual"
    config = replace(made("plain")[1], layer=1, head=3)
    want = json.loads(
        json.dumps(explained(tiny(attention_window=6, attention_backend="manual"), config))
    )
    assert all(found[part] == want[part] for part in ("maps", "tiles", "caches"))
    assert not (run / "explain.html").exists()


def test_the_page_is_written(run, tmp_path, monkeypatch):
    """In the run's folder; here with --init_from; where --html says."""
    monkeypatch.chdir(tmp_path)
    for words, path in (([f"--out_dir={run}"], run / "explain.html"),
                        ([f"--init_from={run}"], tmp_path / "explain.html"),
                        ([f"--out_dir={run}", "--html=x.html"], tmp_path / "x.html")):  # fmt: skip
        code, out, err = command(*words, "--prompt=to be")
        assert code == 0, err
        assert path.read_text(encoding="utf-8").lstrip().startswith("<!doctype")
        assert path.name in out
        path.unlink()


@pytest.mark.parametrize("words, named", [
    (["--layer=2"], "got 2"), (["--head=-1"], "got -1"), (["--prompt=né"], "'é'"),
    ([f"--prompt={'a' * 49}"], "49"), (["--prompt="], "prompt"),
    (["--prompt=||", "--segments=|"], "prompt"),
   
    (["--block_m=0"], "block_m"), (["--window=0"], "window"), (["--segments="], "segments"),
    (["--prompt=FILE:no/such.txt"], "no/such.txt"), (["--html=no/x.html"], "no/x.html"),
    (["--promt=a"], "--prompt"), (["--out_dir=no/run"], "no/run"),
    (["--attention_backend=flash_attn_3", "--attention_fallback=False"], "flash_attn_3"),
])  # fmt: skip
def test_a_wrong_setting_is_named(run, words, named):
    code, out, err = command(f"--out_dir={run}", *words)
    assert code == 2 and not out and "Traceback" not in err and named in err
