"""explain.py: every number of its document, text and page is the formula with the model's own q, k
and v."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import few
from test_train import enter
from torch import Tensor

import checkpoint
import explain
from attention import visible
from core.settings import UserError
from data.tokenizer import CharTokenizer
from explain import ExplainConfig
from model import GPT, GPTConfig
from viewer import page as viewer_page
from viewer.document import Document, maps, token_of, unpack, watched
from viewer.page import as_text as render

PROMPT = "to be, or not\nto be that is"
TOKENIZER = CharTokenizer([*map(chr, range(32, 127)), "\n", "\u2028"])
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"layer": 1, "head": 2},
    "gqa-window-segments": {"attention_window": (5, None), "n_kv_head": 2, "segments": "|",
                            "prompt": "to be|or not to be|it", "layer": 0, "head": 3},
    "one token": {"prompt": "a"},
    "full": {"prompt": (PROMPT * 3)[:48], "attention_window": 6},
    "bfloat16": {"dtype": "bfloat16", "n_kv_head": 1},
    "alibi": {"position": "alibi"},
}
SHOWN = ["plain", "gqa-window-segments"]  # on the page


def tiny(**changes: Any) -> GPT:
    torch.manual_seed(0)
    config = {"block_size": 48, "vocab_size": 100, "n_layer": 2, "n_head": 4, "n_embd": 32}
    model = GPT(GPTConfig(**{**config, **changes})).eval()  # type: ignore[arg-type]
    for block in model.transformer.h:
        block.attn.c_attn.weight.data *= 15
    return model


def explained(model: GPT, **settings: Any) -> Document:
    config = ExplainConfig(**{"prompt": PROMPT} | settings)
    return explain.explain(model, TOKENIZER, config, "a tiny model")


Layer = tuple[Tensor, Tensor, Tensor, Tensor]  # S and P (H, T, T), v (Hkv, T, D), the kernel's out


@cache
def document(shape: str = "plain") -> tuple[Document, list[Layer]]:
    """The document, and the formula in float64."""
    settings = dict(SHAPES[shape])
    names = settings.keys() & {"attention_window", "n_kv_head", "position"}
    sizes = {name: settings.pop(name) for name in names}
    model = tiny(**sizes).to(getattr(torch, settings.get("dtype", "float32")))
    caught: list[Tensor] = []
    for block in model.transformer.h:
        block.attn.c_attn.register_forward_hook(lambda _, x, out: caught.append(out[0].double()))
        block.attn.c_proj.register_forward_pre_hook(lambda _, x: caught.append(x[0][0].double()))
    found, kv, layers = explained(model, **settings), model.config.kv_heads, []
    seg = found["about"]["segments"] or [0] * len(caught[0])
    for qkv, out, window in zip(caught[::2], caught[1::2], model.config.windows, strict=True):
        q, k, v = qkv.unflatten(1, (-1, 8)).transpose(0, 1).split([4, kv, kv])
        sees = torch.tensor([[bool(visible(i, j, 0, window, a, b)) for j, b in enumerate(seg)]
                             for i, a in enumerate(seg)])
        S = q @ k.repeat_interleave(4 // kv, dim=0).mT / math.sqrt(8)
        if "position" in sizes:  # the slopes of 4 heads
            at = torch.arange(len(seg))
            S -= (0.25 ** torch.arange(1, 5))[:, None, None] * (at[:, None] - at)
        S = S.masked_fill(~sees, -torch.inf)
        layers.append((S, S.softmax(-1), v, out.unflatten(1, (4, 8)).transpose(0, 1)))
    return found, layers


def first_head(shape: str) -> tuple[Any, ...]:
    """The document; S, P, v and output of the head that it begins with."""
    found, layers = document(shape)
    head = found["about"]["head"]
    S, P, v, out = (t.numpy() for t in layers[found["about"]["layer"]])
    return found, S[head], P[head], v[head * len(v) // 4, :, :4], out[head, :, :4]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_numbers_are_the_formula_of_the_models_own_q_k_and_v(shape) -> None:
    found, layers = document(shape)
    maps, tiles, T = found["maps"], found["tiles"], layers[0][0].shape[1]
    rows, cols = np.tril_indices(T)
    P = torch.stack([layer[1] for layer in layers])
    assert T < 9 or P.amax(-1).median() > 0.3  # a wrong mask would be seen
    shown = unpack(maps["weights"]) / maps["levels"]
    assert shown == pytest.approx(P[:, :, rows, cols].numpy(), abs=0.5 / 65535 + 2e-6)
    entropy = torch.special.entr(P[:, :, min(8, T // 2) :]).sum(-1).mean(-1)
    assert np.array(maps["entropy"]) == pytest.approx(entropy.numpy(), rel=1e-4, abs=1e-5)
    for n, (S, p, v, out) in enumerate(layers):
        sees = S[0] > -torch.inf
        assert not shown[n][:, ~sees[rows, cols].numpy()].any()
        runs = [[j for j in range(T) if row[j]] for row in sees]
        assert [[*range(a, b)] for a, b in maps["seen"][n]] == runs
        layer = maps["layers"][n]
        assert layer["agrees"] and layer["error"] == max(layer["heads"]) <= layer["allowed"]
        assert layer["allowed"] < (0.4 if shape == "bfloat16" else 1e-4)
        errors = (p @ v.repeat_interleave(4 // len(v), dim=0) - out).abs().amax((1, 2))
        assert layer["heads"] == pytest.approx(errors.tolist(), rel=1e-6, abs=1e-14)
        wanted = {"scores": S[:, rows, cols], "v": v[..., :4], "out": out[..., :4]}
        for name, want in wanted.items():
            got = unpack(tiles[name])[n]  # type: ignore[literal-required]
            assert got == pytest.approx(want.numpy(), rel=1e-5, abs=1e-5)
    about = found["about"]
    assert "".join(t["text"] for t in about["tokens"]) == about["prompt"].replace("|", "")
    assert about["segments"] in (None, [0] * 5 + [1] * 12 + [2] * 2)
    assert max(map(len, render(found).splitlines())) <= 80


@pytest.mark.parametrize("layer, head", [(None, None), (1, None), (None, 3), (0, 2)])
def test_it_begins_with_the_head_of_lowest_entropy(layer, head) -> None:
    about = explained(tiny(), layer=layer, head=head)["about"]
    entropy = document()[0]["maps"]["entropy"]
    least = min((entropy[n][m], n, m) for n in range(2) for m in range(4)
                if layer in (None, n) and head in (None, m))
    assert (about["layer"], about["head"]) == least[1:]


def test_an_output_that_is_off_does_not_agree() -> None:
    """One number off by a thousandth; or no number."""
    with watched(model := tiny()) as calls, torch.no_grad():
        model.hidden(torch.arange(9)[None])
    wrong = calls[1].out.clone()
    wrong[0, 7, 2, 3] += 1e-3
    found = maps([calls[0], replace(calls[1], out=wrong)])
    good, bad = found["layers"]
    assert good["agrees"] and not bad["agrees"]
    assert [e > 1e-4 for e in bad["heads"]] == [False, False, True, False]
    assert bad["error"] == pytest.approx(1e-3, rel=0.01)
    wrong_layers: Any = deepcopy(document()[0])
    wrong_layers["maps"]["layers"] = found["layers"]
    assert "NOT" not in render(document()[0]) and "NOT" in render(wrong_layers)
    for place, named in (("mlp.c_proj", "last layer"), ("attn.c_attn", "layer 1")):
        torch.nn.init.constant_(model.transformer.h[1].get_submodule(place).bias, torch.inf)
        with pytest.raises(UserError, match=named):
            explained(model)


def test_tokens_as_they_are_written() -> None:
    for piece, text, label in [(b" the", " the", "␣the"), ("é".encode(), "é", "é"),
                               (b"\xe2\x80", "<E2 80>", "<E2␣80>"), (b"\r\n\t", "\r\n\t", "␍⏎⇥"),
                               (b"", "<special>", "<special>"), (b"<b>", "<b>", "<b>")]:
        assert token_of(0, [piece]) == {"id": 0, "text": text, "label": label}
    (begins := deepcopy(TOKENIZER)).begin = [7]  # as <bos>
    about = explain.explain(tiny(), begins, ExplainConfig(prompt="a|b", segments="|"), "")["about"]
    assert [t["id"] for t in about["tokens"]][::2] == [7, 7] and about["segments"] == [0, 0, 1, 1]


def test_what_is_refused_or_left_out_is_shown() -> None:
    found = explained(tiny(attention_backend="flash_attn_3"))
    text, refused = " ".join(render(found).split()), found["about"]["refused"]
    assert found["about"]["backend"] == "sdpa" and refused[0]["name"] == "flash_attn_3"
    for one in refused:
        assert one["name"] in text and all(why in text for why in one["why"])
    for size, shown in ((300, 256), (200, 200)):
        about = explained(tiny(block_size=size), prompt="x" * 280)["about"]
        assert len(about["tokens"]) == shown and "280" in about["notes"][0]


@pytest.mark.parametrize("shape", SHOWN)
def test_the_map_in_characters(shape) -> None:
    found, S, P, *_ = first_head(shape)
    text = render(found).partition("MAP of layer {layer}, head {head}".format(**found["about"]))[2]
    lows = {c: float(low) for c, low in re.findall(r"(\S)\s+from\s+(0(?:\.\d+)?)[,.]", text)}
    assert len(lows) == 7
    rows = re.findall(r"^ *\d+ \S .*", text, re.M)
    for line, scores, row in zip(rows, S.tolist(), P.tolist(), strict=True):
        cells, rest = line[5 : 5 + len(row)], line[5 + len(row) :].split()
        assert [c != " " for c in cells] == [s > -math.inf for s in scores]
        for c, p in zip(cells, row):
            if c != " ":
                above = min([low for low in lows.values() if low > lows[c]], default=2)
                assert lows[c] - 1e-4 <= p < above + 1e-4
        assert int(rest[0]) == row.index(max(row))
        assert float(rest[-1]) == pytest.approx(max(row), abs=0.0051)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out, model = tmp_path_factory.mktemp("run"), tiny()
    checkpoint.save(
        out, weights=model.state_dict(), optimizer={}, keep=1,
        settings={"train": {}, "model": asdict(model.config), "tokenizer": TOKENIZER.to_meta()},
        state={"step": 7, "val_loss": 1.0},
    )
    return out


def command(*words: str) -> tuple[int, str, str]:
    return enter(explain.main, ["--device=cpu", *words])


def test_text_and_json_from_a_checkpoint(run, tmp_path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    path = tmp_path / "numbers.json"
    code, out, err = command(f"--out_dir={run}", f"--prompt=FILE:{tmp_path}/prompt.txt",
                             "--window=6", "--text", f"--json={path}", "--layer=1", "--head=3",
                             "--attn_implementation=eager")
    assert code == 0, err
    found = json.loads(path.read_text())
    assert out == render(found) + "\n"
    want = explained(tiny(attention_window=6, attention_backend="manual"), layer=1, head=3)
    want["about"]["source"] = str(run / "step-00000007")
    assert found == json.loads(json.dumps(want))
    assert not (run / "explain.html").exists()


def test_the_page_is_written_where_asked_and_through_no_link(run, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, path in (([f"--out_dir={run}"], run / "explain.html"),
                        ([f"--init_from={run}"], tmp_path / "explain.html"),
                        ([f"--out_dir={run}", "--html=x.html"], tmp_path / "x.html")):
        code, out, err = command(*words, "--prompt=to be")
        assert code == 0 and path.name in out and path.read_text().startswith("<!doctype"), err
    path.unlink()
    path.symlink_to(tmp_path / "explain.html")  # a folder from somebody else may have links
    code, _, err = command(*words, "--prompt=or not")
    assert code == 2 and path.name in err and "or not" not in path.read_text()


# --- the page in a browser ---

HOSTILE = ("</script><script>window.taken = 1</script><img src=x onerror='taken=2'> {{js}} <!-- "
           "&lt;\u2028\"")


@pytest.fixture
def show(chromium: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens pages that may say nothing; show.said has what they say."""
    file = tmp_path / "explain.html"
    said: list[str] = []
    context = chromium.new_context()
    context.set_default_timeout(5000)
    context.on("console", lambda message: said.append(f"console: {message.text}"))
    context.on("weberror", lambda e: said.append(f"error: {e.error}"))
    context.on("request", lambda r: r.url == file.as_uri() or said.append(f"request: {r.url}"))

    def show(shown: Document, width: int = 1400) -> Any:
        file.write_text(viewer_page.render(shown), encoding="utf-8")
        page = context.new_page()
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(file.as_uri())
        return page

    show.said = said
    yield show
    context.close()
    assert said == []


def numbers(page: Any, where: str) -> list[float]:
    """Exact numbers of <data> elements, each shown rounded."""
    found = page.eval_on_selector_all(f"{where} data", "a => a.map(e => [e.value, e.innerText])")
    for value, text in found:
        shown = text.replace("−", "-").replace(",", "")
        if re.fullmatch(r"-?[\d.]+", shown):
            decimals = len(shown.partition(".")[2])
            assert float(shown) == pytest.approx(float(value), abs=0.51 * 10**-decimals)
    return [float(value) for value, _ in found]


def test_a_hostile_prompt_is_shown_as_text(show) -> None:
    shown = explained(tiny(block_size=128), prompt=HOSTILE)
    about, image = shown["about"], "<img src=x onerror='taken=4'>"
    about["source"] = about["device"] = about["backend"] = image
    about["notes"].append(image)
    about["refused"].append({"name": image, "why": [image]})
    for token in about["tokens"]:  # as GPT-2's may be
        token["text"] = token["label"] = image
    block = re.search(r'id="document">(.*?)</script>', viewer_page.render(shown), re.S)
    assert block and json.loads(block[1]) == shown
    page = show(shown)
    page.locator("#map-tokens button").last.click()
    assert page.inner_text("#prompt") == HOSTILE
    for part in ("#lede", "#check", "#notes", "#agreement", "#query-title", "#map-tokens"):
        assert image in page.inner_text(part), part
    assert page.locator("script").count() == 2 and page.locator("img").count() == 0
    # If there were a hole, the policy would stop any other script.
    page.evaluate("""document.body.append(Object.assign(document.createElement("script"),
      { textContent: "window.taken = 3" }))""")
    assert page.evaluate("typeof taken") == "undefined"
    assert "Content Security Policy" in show.said.pop()


@pytest.mark.parametrize("width, kind", [(360, "good"), (1400, "bad")])
def test_it_fits_and_shows_the_verdict(show, width, kind) -> None:
    shown = deepcopy(document()[0])
    layer = shown["maps"]["layers"][1]
    layer["agrees"] = kind == "good"
    page = show(shown, width)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
    sticking = """all => all.filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)
                            .map(e => e.outerHTML.slice(0, 90))"""
    assert page.eval_on_selector_all("main :not(.strip *, canvas)", sticking) == []
    assert numbers(page, "#agreement") == [layer["error"], layer["allowed"]]
    assert page.get_attribute("#check", "class") == kind
    assert page.get_attribute("#agreement", "class") == f"verdict {kind}"


@pytest.mark.parametrize("which", SHOWN)
def test_a_token_shows_where_it_looks(show, which) -> None:
    shown, S, P, *_ = first_head(which)
    T = len(S)
    page = show(shown)
    assert page.inner_text("#map-title") == "Layer {layer}, head {head}".format(**shown["about"])
    for i in (0, 1, T // 2, T - 1):
        page.locator("#map-tokens button").nth(i).click()
        chips = page.eval_on_selector_all(
            "#map-tokens button", "all => all.map(e => [e.className, e.lastChild.textContent])")
        keys = np.flatnonzero(S[i] > -np.inf)
        assert [j for j, (kind, _) in enumerate(chips) if "later" in kind] == list(range(i + 1, T))
        hidden = [j for j in range(i) if j not in keys]
        assert [j for j, (kind, _) in enumerate(chips) if "hidden" in kind] == hidden
        assert numbers(page, "#map-tokens") == pytest.approx([*(100 * P[i, keys])], abs=1e-3)
        assert all(chips[j][1] == "·" for j, w in zip(keys, P[i, keys]) if w < 0.004)


def test_each_head_is_painted_pixel_by_pixel(show) -> None:
    """Darker for a larger weight; invisible keys are empty."""
    shown, layers = document("gqa-window-segments")
    T = len(shown["about"]["tokens"])
    found = show(shown).eval_on_selector_all("#thumbs canvas", """all => all.map(c => [
      c.parentElement.ariaLabel,
      ...c.getContext("2d").getImageData(0, 0, c.width, c.height).data])""")
    dots = []
    for n, (name, *pixels) in enumerate(found):
        assert name == f"Layer {n // 4}, head {n % 4}"
        P, got = layers[n // 4][1][n % 4].numpy(), np.array(pixels).reshape(T, T, 4)
        assert np.array_equal(got[..., 3], 255 * (P > 0))
        dots += [*zip(P[P > 0], got[P > 0][:, :3] @ (0.2126, 0.7152, 0.0722))]
    lights = [light for _, light in sorted(dots, reverse=True)]
    assert len({*lights}) > 20 and max(lights) > 220 > 90 > min(lights)
    assert all(np.diff(lights) > -1)


@pytest.mark.parametrize("which, size", few([("gqa-window-segments", 2), ("plain", 4)]))
def test_a_row_plays_the_online_softmax(show, which, size) -> None:
    """m, l and O after each tile; the last is the kernel's output."""
    shown, S, _, v, out = first_head(which)
    T = len(S)
    page = show(shown)
    page.click("#tiles-tab")
    page.select_option("#tiles-size", str(size))
    for query in (0, T // 2, T - 1):
        page.locator("#map-tokens button").nth(query).click()
        starts = [j for j in range(0, T, size) if (S[query, j : j + size] > -np.inf).any()]
        l, m, O = 0.0, -np.inf, np.zeros(4)
        for n, j in enumerate(starts):
            page.fill("#tiles-at", str(n))
            assert f"Tile {n + 1} of {len(starts)}, key" in page.inner_text("#tiles-title")
            keys = [key for key in range(j, min(j + size, T)) if S[query, key] > -np.inf]
            top = max(m, *S[query, keys])
            p, rescale, before = np.exp(S[query, keys] - top), np.exp(m - top), l
            m, l, O = top, rescale * l + p.sum(), rescale * O + p @ v[keys]
            assert numbers(page, "#tiles-keys") == pytest.approx([*S[query, keys], *p], abs=1e-5)
            state = numbers(page, "#tiles-state")[n > 0 :]  # m before, from the second on
            assert state[:5] == pytest.approx([m, before, rescale, p.sum(), l], abs=1e-4)
            assert state[8::4] == pytest.approx([*O], abs=1e-4)
        page.click("#tiles-next")
        rows = numbers(page, "#tiles-state")
        assert rows[2::4] == pytest.approx([*out[query]], abs=1e-4)
        assert rows[2::4] == pytest.approx(rows[3::4], abs=1e-4)


def test_all_of_it_works_with_the_keyboard(show) -> None:
    shown, layers = document()
    P, T = layers[0][1][1], len(shown["about"]["tokens"])
    page = show(shown)
    for where, keys, what, want in (
        ("#thumbs [tabindex='0']", ["ArrowUp", "ArrowLeft"], "#map-title", "Layer 0, head 1"),
        ("#map", ["ArrowUp", "ArrowLeft"], "#map-cell", f"{float(P[T - 2, T - 3]):.4f}"[:5]),
        ("#map-tokens [tabindex='0']", ["Home", "ArrowRight"], "#query-title", "Where token 1,"),
        ("#map-tokens [tabindex='0']", ["End"], "#query-title", f"Where token {T - 1},"),
        ("#map-tab", ["ArrowRight"], "#tiles-title", "Tile 1 of"),
        ("#tiles-at", ["ArrowRight"], "#tiles-title", "Tile 2 of"),
        ("#tiles-at", ["End"], "#tiles-title", "divided"),
        ("#tiles-play", ["Space"], "#tiles-play", "Pause"),
    ):
        page.locator(where).focus()
        for key in keys:
            page.keyboard.press(key)
        assert want in page.inner_text(what), keys
    assert page.locator("#map-panel").is_hidden() and page.locator("#tiles").is_visible()
    page.locator("#tiles-title", has_text="Tile 2 of").wait_for()  # it plays
