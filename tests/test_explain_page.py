"""The page of explain.py in a real browser: what it shows is what the document says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import browser as browsers
import numpy as np
import pytest
import torch
from conftest import few

from attention import tiled, visible
from data.tokenizer import CharTokenizer
from explain import ExplainConfig, explain
from model import GPT, GPTConfig
from viewer.document import Document, unpack
from viewer.maps import Call, tiles
from viewer.page import render

HOSTILE = (
    "</script><script>window.taken = 1</script><img src=x onerror='taken=2'> {{js}} <!-- &lt;"
    '\u2028"'
)

PROMPT = "To be, or not\nto be: that"  # 25 tokens

DOCUMENTS = "To be, or|not to be"

WINDOW = 6


def document(prompt: str = PROMPT, window: int | None = None, **settings: Any) -> Document:
    """What explain.py computes, from a model with random weights whose attention is not flat."""
    torch.manual_seed(0)
    letters = "".join(sorted(set(PROMPT + DOCUMENTS + HOSTILE) | {chr(n) for n in range(32, 127)}))
    config = GPTConfig(
        n_layer=2, n_head=4, n_kv_head=2, n_embd=64, block_size=128, vocab_size=len(letters),
        attention_window=None if window is None else (window, 2),
    )
    model = GPT(config).eval()
    for block in model.transformer.h:
        block.attn.c_attn.weight.data *= 12
    config_ = ExplainConfig(**{"prompt": prompt, "layer": 1, "head": 2, **settings})
    return explain(model, CharTokenizer(letters), config_, "random weights")


@pytest.fixture(scope="module")
def plain() -> Document:
    return document()


@pytest.fixture(scope="module")
def windowed() -> Document:
    """A window and two documents."""
    return document(DOCUMENTS, segments="|", window=WINDOW, layer=0, head=0)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browsers.running() as chromium:
        yield chromium


Show = Callable[..., Any]


@pytest.fixture
def said() -> list[str]:
    """What a page logs, and what it asks for: nothing, or the test fails."""
    return []


@pytest.fixture
def show(chromium: Any, tmp_path: Path, said: list[str]) -> Iterator[Show]:
    """Opens a document in the browser."""
    context = []

    def open_(shown: Document, width: int = 1400, scheme: str = "light", **options: Any) -> Any:
        file = tmp_path / "explain.html"
        file.write_text(render(shown), encoding="utf-8")
        context.append(
            chromium.new_context(
                viewport={"width": width, "height": 900}, color_scheme=scheme, **options
            )
        )
        page = context[-1].new_page()
        page.set_default_timeout(5000)
        page.on("console", lambda message: said.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("request", lambda r: r.url == file.as_uri() or said.append(f"request: {r.url}"))
        page.goto(file.as_uri())
        return page

    yield open_
    for opened in context:
        opened.close()
    assert said == []


def numbers(page: Any, where: str) -> list[float]:
    """The exact numbers of the <data> elements there; each must be shown as it is."""
    found = page.eval_on_selector_all(
        where + " data", "all => all.map(e => [e.value, e.innerText])"
    )
    for value, text in found:
        shown = text.replace("−", "-").replace("∞", "inf").replace(",", "")
        if re.fullmatch(r"-?[\d.]+", shown):
            decimals = len(shown.partition(".")[2])
            assert float(shown) == pytest.approx(float(value), abs=0.51 * 10**-decimals)
    return [float(value) for value, _ in found]


def weight(shown: Document, layer: int, head: int, i: int, j: int) -> float:
    packed = unpack(shown["maps"]["weights"])
    return float(packed[layer, head, i * (i + 1) // 2 + j]) / shown["maps"]["levels"]


def test_the_page_holds_the_document_and_escapes_it(plain):
    hostile = deepcopy(plain)
    hostile["about"]["prompt"] = HOSTILE
    hostile["about"]["notes"] = [HOSTILE]
    page = render(hostile)
    block = re.search(r'<script type="application/json" id="document">(.*?)</script>', page, re.S)
    assert block and json.loads(block[1]) == hostile
    assert "<" not in block[1] and block[1].isascii()
    assert page.count("<script") == page.count("</script>") == 2
    assert "window.taken = 1</script>" not in page
    assert render(hostile) == page


@pytest.mark.parametrize("width, scheme", [(360, "dark"), (1400, "light")])
def test_it_fits_is_painted_and_follows_the_scheme(show, plain, width, scheme):
    page = show(plain, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
    # Nothing is cut off outside its own box.
    sticking = page.eval_on_selector_all(
        "main :not(.strip *, canvas)",
        """all => all.filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)
                     .map(e => e.outerHTML.slice(0, 90))""",
    )
    assert sticking == []
    colours = """id => {
      const c = document.getElementById(id), all = new Set();
      const pixels = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
      for (let n = 0; n < pixels.length; n += 4) all.add(pixels.slice(n, n + 4).join());
      return all.size; }"""
    assert page.evaluate(colours, "map") > 60
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) < 200) == (scheme == "dark")


def test_a_hostile_prompt_is_shown_as_text(show, said):
    shown = document(HOSTILE)
    about, image = shown["about"], "<img src=x onerror='taken=4'>"
    about["source"] = about["device"] = about["backend"] = image
    about["notes"].append(image)
    about["refused"].append({"name": image, "why": [image]})
    for token in about["tokens"]:  # as GPT-2's may be
        token["text"] = token["label"] = image
    page = show(shown)
    page.locator("#map-tokens button").last.click()
    assert page.inner_text("#prompt") == HOSTILE
    for part in ("#lede", "#check", "#notes", "#agreement", "#query-title", "#map-tokens"):
        assert image in page.inner_text(part), part
    assert page.evaluate("typeof taken") == "undefined"
    assert page.locator("script").count() == 2 and page.locator("img").count() == 0
    labels = page.locator("#map-tokens button b").all_inner_texts()
    assert labels == [t["label"] for t in about["tokens"]]
    # If there were a hole, the policy would stop any other script.
    page.evaluate("""document.body.append(Object.assign(document.createElement("script"),
      { textContent: "window.taken = 3" }))""")
    assert page.evaluate("typeof taken") == "undefined"
    assert "Content Security Policy" in said.pop()


# --- maps ---


@pytest.mark.parametrize("which", ["plain", "windowed"])
def test_a_token_shows_where_it_looks(show, which, request):
    shown = request.getfixturevalue(which)
    about, T = shown["about"], len(shown["about"]["tokens"])
    layer, head = about["layer"], about["head"]
    page, window = show(shown), about["windows"][layer]
    assert page.inner_text("#map-title") == f"Layer {layer}, head {head}"
    segments = about["segments"] or [0] * T
    for i in (0, 1, T // 2, T - 1):
        page.locator("#map-tokens button").nth(i).click()
        seen = [j for j in range(T) if visible(i, j, 0, window, segments[i], segments[j])]
        weights = {j: weight(shown, layer, head, i, j) for j in seen}
        chips = page.eval_on_selector_all(
            "#map-tokens button", "all => all.map(e => [e.className, e.lastChild.textContent])"
        )
        assert [j for j, (kind, _) in enumerate(chips) if "later" in kind] == list(range(i + 1, T))
        hidden = [j for j in range(i) if j not in seen]
        assert [j for j, (kind, _) in enumerate(chips) if "hidden" in kind] == hidden
        for j, (_, percent) in enumerate(chips):
            w = weights.get(j)
            want = "" if w is None else f"{100 * w:.0f}" if w >= 0.005 else "·"
            assert percent == want or abs(float(percent) - 100 * weights[j]) <= 0.501
        assert numbers(page, "#map-tokens") == [100 * w for w in weights.values()]
        assert sum(weights.values()) == pytest.approx(1, abs=T / shown["maps"]["levels"])


def test_each_head_is_painted_pixel_by_pixel(show, windowed):
    """Its colour is the root of its weight; what is not seen is left empty."""
    shown = windowed
    about, T = shown["about"], len(shown["about"]["tokens"])
    found, labels, ramp = show(shown).evaluate("""[
      [...document.querySelectorAll("#thumbs button")].map(b => [b.getAttribute("aria-label"),
        b.firstChild.width, [...b.firstChild.getContext("2d").getImageData(0, 0, T, T).data]]),
      [...document.querySelectorAll("#thumbs > span")].map(e => e.textContent), ramp.light]""")
    assert labels == ["", *(f"head {n}" for n in range(4)), "layer 0", "layer 1"]
    segments = about["segments"] or [0] * T
    i, j, seg = np.arange(T)[:, None], np.arange(T), np.array(segments)
    seen = [np.broadcast_to(visible(i, j, 0, window, seg[:, None], seg), (T, T))
            for window in about["windows"]]
    P = np.zeros((2, 4, T, T))
    rows, cols = np.tril_indices(T)
    P[:, :, rows, cols] = unpack(shown["maps"]["weights"]) / 65535
    for n, (name, width, pixels) in enumerate(found):
        assert (name, width) == (f"Layer {n // 4}, head {n % 4}", T)
        got, sees = np.array(pixels).reshape(T, T, 4), seen[n // 4]
        assert np.array_equal(got[..., 3], 255 * sees)
        levels = (255 * P[n // 4, n % 4][sees] ** 0.5 + 0.5).astype(int)
        assert np.array_equal(got[sees][:, :3], np.array(ramp)[levels])


def test_a_head_is_chosen(show, plain):
    page = show(plain)
    page.locator("#thumbs button").nth(0 * 4 + 3).click()
    assert page.inner_text("#map-title") == "Layer 0, head 3"
    assert page.locator("#thumbs [aria-pressed=true]").count() == 1
    T = len(plain["about"]["tokens"])
    weights = [100 * weight(plain, 0, 3, T - 1, j) for j in range(T)]
    assert numbers(page, "#map-tokens") == weights


def test_the_verdict_is_the_documents(show, plain):
    a = plain["maps"]["layers"][1]
    assert numbers(show(plain), "#agreement") == [a["error"], a["allowed"]]
    wrong = deepcopy(plain)
    wrong["maps"]["layers"][1]["agrees"] = False
    for shown, kind in ((plain, "good"), (wrong, "bad")):
        page = show(shown)
        assert page.get_attribute("#check", "class") == kind
        assert page.get_attribute("#agreement", "class") == f"verdict {kind}"


# --- tiles ---


@pytest.mark.parametrize("changes, size", few([(
    {"prompt": DOCUMENTS, "segments": "|", "window": WINDOW, "layer": 0, "head": 3}, 2),
    ({}, 4), ({}, 8)]))
def test_a_row_plays_the_recurrence_of_tiled(show, changes, size):
    """Each frame is tiled's hook for one query; the last is the output of the kernel that ran."""
    shown, calls = document(**changes), watched_calls(**changes)
    layer, head = shown["about"]["layer"], shown["about"]["head"]
    call = calls[layer]
    q, k, v, out, spec, segments = call.q, call.k, call.v, call.out, call.spec, call.segments
    T = q.shape[1]
    page = show(shown)
    page.click("#tiles-tab")
    page.select_option("#tiles-size", str(size))
    for query in (0, T // 2, T - 1):
        found: list[Any] = []

        def on_tile(_: int, j: int, *state: Any, found: list[Any] = found) -> None:
            if state[0].flatten(1, 2)[0, head].isfinite().any():  # else the page skips it
                found.append((j, *(t.flatten(1, 2)[0, head, 0].tolist() for t in state)))

        i = slice(query, query + 1)
        pair = None if segments is None else (segments[:, i], segments)
        tiled.forward_tiles(
            q[:, i], k, v, spec, query, pair, B_r=1, B_c=size, on_tile=on_tile
        )
        page.locator("#map-tokens button").nth(query).click()
        for n, (j, S, (rescale,), (m,), (l,), O) in enumerate(found):
            page.fill("#tiles-at", str(n))
            seen = [s for s in S if s > -np.inf]
            p = [float(np.exp(s - m)) for s in seen]
            title = f"Tile {n + 1} of {len(found)}, key{'s' if len(S) > 1 else ''} {j * size}"
            assert title in page.inner_text("#tiles-title")
            assert numbers(page, "#tiles-keys") == pytest.approx([*seen, *p], abs=1e-5)
            state = numbers(page, "#tiles-state")
            names = page.locator("#tiles-state th").all_inner_texts()
            assert names[5:] == ["m", "l", *(f"O[{c}]" for c in range(4))]
            want = [m, *([found[n - 1][4][0]] if n else [0.0]), rescale, sum(p), l]
            assert state[n > 0 :][:5] == pytest.approx(want, abs=1e-4)
            assert state[n > 0 :][8::4] == pytest.approx(O[:4], abs=1e-4)
        page.click("#tiles-next")
        rows = numbers(page, "#tiles-state")
        assert rows[2::4] == pytest.approx(out[0, query, head, :4].tolist(), abs=1e-4)
        assert rows[2::4] == pytest.approx(rows[3::4], abs=1e-4)


def watched_calls(**changes: Any) -> list[Call]:
    calls: list[Call] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("explain.tiles", lambda seen: calls.extend(seen) or tiles(seen))
        document(**changes)
    return calls


def test_it_plays_and_stops_by_keyboard_too(show, plain):
    page = show(plain)
    page.focus("#map-tab")
    page.keyboard.press("ArrowRight")
    assert page.locator("#map-panel").is_hidden() and page.locator("#tiles").is_visible()
    last = int(page.get_attribute("#tiles-at", "max") or 0)
    page.focus("#tiles-at")
    page.keyboard.press("ArrowRight")
    assert "Tile 2 of" in page.inner_text("#tiles-title")
    page.keyboard.press("End")
    title = page.locator("#tiles-title")
    assert "divided" in title.inner_text() and page.input_value("#tiles-at") == str(last)
    page.focus("#tiles-play")
    page.keyboard.press("Space")
    assert page.inner_text("#tiles-play") == "Pause" and "Tile 1 of" in title.inner_text()
    page.locator("#tiles-title", has_text="Tile 2 of").wait_for()
    page.keyboard.press("Space")
    assert page.inner_text("#tiles-play") == "Play"


# --- the keyboard ---


def test_all_of_it_works_with_the_keyboard(show, plain):
    page = show(plain)
    T, keys = len(plain["about"]["tokens"]), page.keyboard
    reached = []
    for _ in range(4):
        keys.press("Tab")
        reached.append(
            page.evaluate("""() => { const e = document.activeElement;
          return e.id || e.parentElement.id || e.parentElement.parentElement?.id; }""")
        )
    assert reached == ["thumbs", "map-tab", "map", "map-tokens"]

    page.locator("#thumbs [tabindex='0']").focus()
    keys.press("ArrowUp")
    keys.press("ArrowLeft")
    assert page.inner_text("#map-title") == "Layer 0, head 1"
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Layer 0, head 1"

    page.focus("#map")
    keys.press("ArrowUp")
    keys.press("ArrowLeft")
    assert page.evaluate("[map.query, map.key]") == [T - 2, T - 3]
    assert f"{weight(plain, 0, 1, T - 2, T - 3):.4f}" in page.inner_text("#map-cell")

    page.locator("#map-tokens [tabindex='0']").focus()
    keys.press("Home")
    keys.press("ArrowRight")
    assert page.inner_text("#query-title").startswith("Where token 1,")
    keys.press("End")
    assert page.inner_text("#query-title").startswith(f"Where token {T - 1},")
