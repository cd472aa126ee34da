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

from attention import visible
from data.tokenizer import CharTokenizer
from explain import ExplainConfig, explain
from model import GPT, GPTConfig
from viewer.document import Document, unpack
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
        attention_window=window,
    )  # fmt: skip
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
    """A window, two documents, and tiles that do not divide the length."""
    return document(DOCUMENTS, segments="|", window=WINDOW, block_m=5, block_n=4, layer=0, head=0)


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
    for done in (0, 5, len(plain["tiles"]["steps"])):
        page.evaluate(f"goTo({done})")
        page.eval_on_selector_all("details", "all => all.forEach(d => { d.open = true })")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
        # No text of one element over that of another, and nothing cut off outside its own box.
        sticking = page.eval_on_selector_all(
            "main :not(.scroll *, .strip *, canvas, svg, svg *, option)",
            """all => all.filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)
                         .map(e => e.outerHTML.slice(0, 90))""",
        )
        assert sticking == []
    colours = """id => {
      const c = document.getElementById(id), all = new Set();
      const pixels = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
      for (let n = 0; n < pixels.length; n += 4) all.add(pixels.slice(n, n + 4).join());
      return all.size; }"""
    assert page.evaluate(colours, "map") > 60 and page.evaluate(colours, "matrix") > 60
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) < 200) == (scheme == "dark")


def test_a_hostile_prompt_is_shown_as_text(show, said):
    shown = document(HOSTILE)
    about, caches, image = shown["about"], shown["caches"], "<img src=x onerror='taken=4'>"
    about["source"] = about["device"] = about["backend"] = image
    about["notes"].append(image)
    about["refused"].append({"name": image, "why": [image]})
    for token in (*about["tokens"], *caches["prompt"], caches["token"]):  # as GPT-2's may be
        token["text"] = token["label"] = image
    page = show(shown)
    page.click("#player-to-end")
    page.locator("#map-tokens button").last.click()
    assert page.inner_text("#prompt") == HOSTILE
    for part in ("#notes", "#agreement", "#query-title", "#map-tokens", "#tile-rows",
                 "#cache-step"):  # fmt: skip
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
    page = show(shown)
    assert page.inner_text("#map-title") == f"Layer {layer}, head {head}"
    segments = about["segments"] or [0] * T
    for i in (0, 1, T // 2, T - 1):
        page.locator("#map-tokens button").nth(i).click()
        seen = [j for j in range(T) if visible(i, j, 0, about["window"], segments[i], segments[j])]
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
    sees = np.broadcast_to(visible(i, j, 0, about["window"], seg[:, None], seg), (T, T))
    P = np.zeros((2, 4, T, T))
    rows, cols = np.tril_indices(T)
    P[:, :, rows, cols] = unpack(shown["maps"]["weights"]) / 65535
    for n, (name, width, pixels) in enumerate(found):
        assert (name, width) == (f"Layer {n // 4}, head {n % 4}", T)
        got = np.array(pixels).reshape(T, T, 4)
        assert np.array_equal(got[..., 3], 255 * sees)
        levels = (255 * P[n // 4, n % 4][sees] ** 0.5 + 0.5).astype(int)
        assert np.array_equal(got[sees][:, :3], np.array(ramp)[levels])


def test_a_head_is_chosen_and_played(show, plain):
    page = show(plain)
    page.locator("#thumbs button").nth(0 * 4 + 3).click()
    assert page.inner_text("#map-title") == "Layer 0, head 3"
    assert page.locator("#thumbs [aria-pressed=true]").count() == 1
    T = len(plain["about"]["tokens"])
    weights = [100 * weight(plain, 0, 3, T - 1, j) for j in range(T)]
    assert numbers(page, "#map-tokens") == weights
    assert page.is_disabled("#to-player")  # the tiles are of layer 1
    page.locator("#thumbs button").nth(1 * 4 + 3).click()
    assert page.input_value("#tile-head") == "2"
    page.click("#to-player")
    assert page.input_value("#tile-head") == "3"
    assert page.evaluate("document.activeElement.id") == "player"


def test_the_verdict_is_the_documents(show, plain):
    a = plain["maps"]["layers"][1]
    assert numbers(show(plain), "#agreement") == [a["error"], a["allowed"]]
    wrong = deepcopy(plain)
    wrong["maps"]["layers"][1]["agrees"] = wrong["caches"]["agree"] = False
    for compared in wrong["tiles"]["heads"]:
        compared["error"] = 2 * compared["allowed"]
    for shown, kind in ((plain, "good"), (wrong, "bad")):
        page = show(shown)
        page.click("#player-to-end")
        assert page.locator(f"#checks .{kind}").count() == 3
        for verdict in ("#agreement", "#difference", "#cache-verdict"):
            assert page.get_attribute(verdict, "class") == f"verdict {kind}"


# --- tiles ---


def traced(shown: Document, layer: int, head: int) -> dict[str, Any]:
    (found,) = [t for t in shown["tiles"]["heads"] if (t["layer"], t["head"]) == (layer, head)]
    return {k: unpack(v) if isinstance(v, dict) else v for k, v in found.items()}  # type: ignore[arg-type]


LOOK = """() => {
  const numbers = where => [...document.querySelectorAll(where + " data")].map(e => e.value);
  return {
    tiled: numbers("#counters .meter.tiled"), manual: numbers("#counters .meter.manual"),
    rows: numbers("#tile-rows tbody"),
    shown: [...document.querySelectorAll("#tile-rows tbody data")].map(e => e.innerText),
    scores: [...document.querySelectorAll("#tile-rows td.s")].map(e => e.innerText),
  }; }"""


def read(texts: list[str]) -> list[float]:
    return [float(t.replace("−", "-").replace("∞", "inf").replace(",", "")) for t in texts]


def check_step(page: Any, shown: Document, head: dict[str, Any], done: int) -> None:
    """Everything that the player shows after so many tiles."""
    tiles = shown["tiles"]
    N, step = len(tiles["steps"]), tiles["steps"][done - 1]
    look = page.evaluate(LOOK)
    moved = step["read_so_far"], step["written_so_far"]
    assert tuple(read(look["tiled"])) == moved
    # Manual at the same progress: each pass takes a third of the way.
    passes, part = divmod(3 * done, N)
    for n, key in enumerate(("read", "written")):
        each = [p[key] for p in tiles["manual"]]  # type: ignore[literal-required]
        want = sum(each[:passes]) + (part / N * each[passes] if part else 0)
        assert read(look["manual"])[n] == pytest.approx(want, abs=0.51)
    # The rows of the block: rescale, m and l.
    count = step["rows"][1] - step["rows"][0]
    visited = [s for s in tiles["steps"][:done] if s["i"] == step["i"] and not s["skipped"]]
    at = visited[-1]["at"] if visited else None
    rows = []
    for r in range(count):
        m, l = (head["m"][at, r], head["l"][at, r]) if visited else (-np.inf, 0)
        rows += [*([] if step["skipped"] else [head["rescale"][at, r]]), m, l]
    assert read(look["rows"]) == [float(x) for x in rows]
    assert read(look["shown"]) == pytest.approx(rows, abs=5.1e-5)
    cols = step["cols"][1] - step["cols"][0]
    scores = [] if step["skipped"] else head["scores"][at, :count, :cols].flatten()
    assert read(look["scores"]) == pytest.approx(scores, abs=0.0051)


def test_every_step_shows_the_numbers_of_the_trace(show, windowed):
    shown = windowed
    head = traced(shown, shown["about"]["layer"], shown["about"]["head"])
    page = show(shown)
    assert numbers(page, "#counters") == [0, 0, 0, 0]
    assert page.is_disabled("#player-back") and page.is_enabled("#player-step")
    N = len(shown["tiles"]["steps"])
    assert {s["skipped"] for s in shown["tiles"]["steps"]} == {True, False}
    for done in range(1, N + 1):
        page.evaluate("$('player-step').click()")
        check_step(page, shown, head, done)
    assert page.is_disabled("#player-step") and page.is_disabled("#player-to-end")
    assert numbers(page, "#difference") == [head["difference"], head["error"], head["allowed"]]


def test_it_plays_pauses_and_plays_again(show, plain):
    page, state = show(plain), "[player.done, player.playing]"
    page.select_option("#player-speed", "32")
    page.click("#player-play")
    page.locator("#difference").wait_for()
    assert page.evaluate(state) == [len(plain["tiles"]["steps"]), False]
    page.evaluate("$('player-speed').selectedOptions[0].value = 1e-6")  # a step in 11 days
    for button, want in (("play", [0, True]), ("play", [0, False]), ("play", [0, True]),
                         ("step", [1, False])):  # fmt: skip
        page.click(f"#player-{button}")
        assert page.evaluate(state) == want
    assert page.get_attribute("#player-play", "aria-label") == "Play"


# --- caches ---


@pytest.mark.parametrize("which", ["plain", "windowed"])
def test_the_caches_show_what_is_read_and_written(show, which, request):
    shown = request.getfixturevalue(which)
    page = show(shown)
    tokens = [*shown["caches"]["prompt"], shown["caches"]["token"]]
    for n, step in enumerate(shown["caches"]["steps"]):
        article = f"#caches article:nth-child({n + 1})"
        cells = page.eval_on_selector_all(
            f"{article} .cell", "all => all.map(e => [e.className.split(' '), e.textContent])"
        )
        assert len(cells) == step["cells"]
        for kind in ("read", "seen", "written"):
            assert [c for c, (kinds, _) in enumerate(cells) if kind in kinds] == sorted(step[kind])  # type: ignore[literal-required]
        held = [tokens[p]["label"] if p >= 0 else "" for p in step["holds"]]
        assert [text for _, text in cells] == held
        for position in (0, len(tokens) - 1):
            page.locator("#cache-tokens button").nth(position).focus()
            lit = page.eval_on_selector_all(
                f"{article} .cell", "all => all.flatMap((e, n) => e.matches('.spot') ? [n] : [])"
            )
            assert lit == [c for c, p in enumerate(step["holds"]) if p == position]
        if step["page_size"] is not None:
            size = step["page_size"]
            table = page.locator(f"{article} .table li").all_inner_texts()
            pairs = [tuple(map(int, re.findall(r"\d+", entry))) for entry in table]
            assert pairs == [
                (k * size, (k + 1) * size - 1, number)
                for k, number in enumerate(step["page_table"])
            ]
            spot = page.locator(f"{article} .table li.spot").all_inner_texts()
            assert spot == [table[(len(tokens) - 1) // size]]
            free = [
                t for t in page.locator(f"{article} .page > span").all_inner_texts() if "free" in t
            ]
            unheld = [p for p in range(1, step["cells"] // size) if p not in step["page_table"]]
            assert free == [f"page {p}, free" for p in unheld]
    assert numbers(page, "#cache-facts tr:last-child") == [
        s["error"] for s in shown["caches"]["steps"]
    ]
    assert numbers(page, "#cache-verdict") == [
        max(s["error"] for s in shown["caches"]["steps"]), shown["caches"]["allowed"]
    ]  # fmt: skip


# --- the keyboard ---


def test_all_of_it_works_with_the_keyboard(show, plain):
    page = show(plain)
    T, N = len(plain["about"]["tokens"]), len(plain["tiles"]["steps"])
    keys = page.keyboard
    page.evaluate("$('player-speed').selectedOptions[0].value = 1e-6")  # a step in 11 days
    reached = []
    while not reached or reached[-1] != "cache":
        keys.press("Tab")
        reached.append(
            page.evaluate("""() => { const e = document.activeElement;
          return e.id || e.parentElement.id || e.parentElement.parentElement?.id; }""")
        )
    for name in ("thumbs", "map", "map-tokens", "player", "tile-head", "player-play",
                 "player-scrub", "cache-tokens"):  # fmt: skip
        assert name in reached, name

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

    page.focus("#player")
    state = "[player.done, player.playing]"
    n_cols = plain["tiles"]["n_cols"]
    for key, want_ in [
        ("ArrowRight", [1, False]), 
        ("PageDown", [n_cols + 1, False]), ("ArrowRight", [n_cols + 2, False]),
        ("ArrowLeft", [n_cols + 1, False]), ("PageUp", [1, False]),
        (" ", [1, True]), (" ", [1, False]), ("End", [N, False]), ("Home", [0, False]),
    ]:  # fmt: skip
        keys.press(key)
        assert page.evaluate(state) == want_, key
    keys.press("Control+ArrowRight")  # the browser's own
    assert page.evaluate(state) == [0, False]
    page.focus("#player-step")
    keys.press(" ")  # a button's own key: it does not play
    assert page.evaluate(state) == [1, False]
