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
from viewer.document import Document, pack, unpack
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


# The pixels of the two outputs, tiled's and manual's.
OUTPUTS = """[...document.querySelectorAll(".outputs .pair canvas")].map(
  c => [...c.getContext("2d").getImageData(0, 0, c.width, c.height).data])"""


def sci(x: float) -> str:
    """Two figures, 1.2e-07 as 1.2 × 10⁻⁷."""
    digits, _, power = f"{x:.1e}".partition("e")
    if not x or abs(int(power)) <= 3:
        return f"{float(f'{x:.2g}'):g}"
    raised = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{digits} × 10{raised}"


def plural(n: int, one: str, more: str = "") -> str:
    return f"{n:,} {one if n == 1 else more or one + 's'}"


def words(page: Any, where: str) -> str:
    return " ".join(page.text_content(where).split())


def weight(shown: Document, layer: int, head: int, i: int, j: int) -> float:
    packed = unpack(shown["maps"]["weights"])
    return float(packed[layer, head, i * (i + 1) // 2 + j]) / shown["maps"]["levels"]


# ----------------------------------------------------------------------------- without a browser


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
    about = {**plain["about"], "prompt": " a\n" + "b" * 99}
    assert f"<title>Attention at work: a {'b' * 78}</title>" in render({**plain, "about": about})
    with pytest.raises(ValueError):
        render({**plain, "caches": {**plain["caches"], "allowed": float("nan")}})


# ----------------------------------------------------------------------------- looks


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
def test_it_fits_is_painted_and_follows_the_scheme(show, plain, width, scheme):
    page = show(plain, width, scheme)
    for done in (0, 5, len(plain["tiles"]["steps"])):
        page.evaluate(f"goTo({done}); circle.goTo({done})")
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


@pytest.mark.parametrize("width, columns", [(360, 1), (1400, 2)])
def test_prose_fills_a_wide_page_in_lines_that_can_be_read(show, plain, width, columns):
    page = show(plain, width)
    reach = """all => all.map(e => {
      const text = document.createRange();
      text.selectNodeContents(e);
      const room = e.parentElement.getBoundingClientRect();
      const lines = [...text.getClientRects()];
      return [lines.map(b => (b.right - room.left) / room.width), lines.map(b => b.width)]; })"""
    for right, wide in page.eval_on_selector_all("main section > .prose", reach):
        assert 0.9 < max(right) <= 1.001  # the share of the width that the text reaches
        assert max(wide) < 42 * 16  # pixels of a line
    counts = "all => all.map(e => getComputedStyle(e).columnCount)"
    found = page.eval_on_selector_all("main section > .prose", counts)
    assert found == ["2" if columns == 2 else "auto"] * 5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_colours_are_ordered_by_lightness_alone(show, plain, scheme):
    page = show(plain, scheme=scheme)
    colours = page.evaluate("Array.from({ length: 256 }, (_, n) => shade(n / 255))")
    lightness = [luminance(rgb) for rgb in colours]
    steps = np.diff(lightness) * (-1 if scheme == "light" else 1)
    assert (steps > -1e-3).all() and sum(steps) > 0.6
    # All weight is violet, in the dark yellow; outputs go from blue over grey to orange.
    low, middle, high = page.evaluate("[0, 0.5, 1].map(t => shade(t, signed))")
    blueness = [b - r for r, _, b in (colours[255], low, high)]
    assert (blueness[0] > 30) if scheme == "light" else (blueness[0] < -30)
    assert blueness[1] > 30 and blueness[2] < -30 and np.ptp(middle) < 12
    inks = page.evaluate("Array.from({ length: 256 }, (_, n) => inkOn(shade(n / 255)))")
    for ink, rgb in zip(inks, colours):
        assert contrast(ink, "#" + bytes(rgb).hex()) >= 4.5
    texts = page.evaluate("""["ink", "muted", "accent", "tiled", "manual", "good", "bad"].flatMap(
      a => ["paper", "sunk", "raised"].map(b => [colour(a), colour(b)]))""")
    for ink, paper in texts:
        assert contrast(ink, paper) >= 4.5, (ink, paper)  # WCAG 2.2, 1.4.3


def contrast(a: str, b: str) -> float:
    """Of two colours in CSS's hexadecimal digits."""

    def rgb(colour: str) -> list[int]:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
        return [int(digits[n : n + 2], 16) for n in (0, 2, 4)]

    dark, light = sorted((luminance(rgb(a)), luminance(rgb(b))))
    return (light + 0.05) / (dark + 0.05)


def luminance(rgb: list[int]) -> float:
    """Relative luminance, 0 to 1, of sRGB, 0 to 255 (WCAG 2.2)."""
    v = np.array(rgb) / 255
    linear = np.where(v <= 0.04045, v / 12.92, ((v + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_it_follows_a_change_of_width_and_of_scheme(show, plain):
    page = show(plain)
    # The first token sees itself alone. A canvas is read once: Chromium logs a second time.
    corner = """n => [...document.querySelectorAll("#thumbs canvas")[n].getContext("2d")
      .getImageData(0, 0, 1, 1).data].slice(0, 3)"""
    size = "$('map').getBoundingClientRect().width + $('matrix').getBoundingClientRect().width"
    light, wide = page.evaluate(corner, 0), page.evaluate(size)
    assert light == page.evaluate("ramp.light[255]")
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 360, "height": 800})
    page.evaluate("new Promise(drawn => requestAnimationFrame(() => setTimeout(drawn)))")
    assert page.evaluate(corner, 1) == page.evaluate("ramp.dark[255]") != light
    assert page.evaluate(size) < 0.8 * wide
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0


def test_motion_is_reduced_where_it_is_asked_for(show, plain):
    duration = "getComputedStyle(document.querySelector('.meter i')).transitionDuration"
    scrolls = "getComputedStyle(document.documentElement).scrollBehavior"
    page = show(plain, reduced_motion="reduce")
    assert [page.evaluate(duration), page.evaluate(scrolls)] == ["0s", "auto"]
    page = show(plain, reduced_motion="no-preference")
    assert [page.evaluate(duration), page.evaluate(scrolls)] == ["0.12s", "smooth"]


def test_a_hostile_prompt_is_shown_as_text(show, said):
    shown = document(HOSTILE)
    about, caches, image = shown["about"], shown["caches"], "<img src=x onerror='taken=4'>"
    about["source"] = about["device"] = about["backend"] = shown["costs"]["gpu"] = image
    for notes in (about["notes"], shown["tiles"]["notes"], caches["notes"]):
        notes.append(image)
    about["refused"].append({"name": image, "why": [image]})
    for token in (*about["tokens"], *caches["prompt"], caches["token"]):  # as GPT-2's may be
        token["text"] = token["label"] = image
    static = caches["steps"][1]
    static["cells"], static["holds"] = 321, static["holds"] + [-1] * (321 - static["cells"])
    page = show(shown)
    page.click("#player-to-end")
    page.locator("#map-tokens button").last.click()
    assert page.inner_text("#prompt") == HOSTILE
    # A long token is shown by its position; and where there are many places they are small.
    boxes, places = page.evaluate("""[["s", "className"], ["", "textContent"]].map(
      ([s, what]) => [...document.querySelectorAll("#caches .cell" + s)].map(e => e[what]))""")
    assert boxes == ["cells  numbered", "cells  many", "cells paged numbered"]
    assert places == [str(p) if p >= 0 else "" for s in caches["steps"] for p in s["holds"]]
    for part in ("#notes", "#agreement", "#query-title", "#map-tokens", "#tile-notes", "#tile-rows",
                 "#worked", "#cache-notes", "#cache-step", "#cost-about",
                 "#query-name"):  # fmt: skip
        assert image in page.inner_text(part), part
    assert page.evaluate("typeof taken") == "undefined"
    assert page.locator("script").count() == 2 and page.locator("img").count() == 0
    labels = page.locator("#map-tokens button b").all_inner_texts()
    assert labels == [t["label"] for t in about["tokens"]]
    # And were there a hole: the policy lets no other script run.
    page.evaluate("""document.body.append(Object.assign(document.createElement("script"),
      { textContent: "window.taken = 3" }))""")
    assert page.evaluate("typeof taken") == "undefined"
    (refused,) = said
    assert "Content Security Policy" in refused and "blocked" in refused
    said.clear()


def test_numbers_as_people_read_them(show, plain):
    said = {
        "int": {"1234567.4": "1,234,567"},
        "many": {'1, "process", "processes"': "1 process", '2, "process", "processes"':
                 "2 processes", '1000, "tile"': "1,000 tiles", '0, "tile"': "0 tiles"},
        "scaled": {'0, "B"': "0 B", '9.87, "B"': "9.9 B", '99.4, "B"': "99 B", '999.4, "B"':
                   "999 B", '999.5, "B"': "1 kB", '12345, "B"': "12.3 kB", '3.5e15, "FLOP"':
                   "3.5 PFLOP", '2e18, "B"': "2000 PB", '196608, "B", 1024': "192 KiB",
                   '1000, "B", 1024': "1000 B", '1024 ** 3, "B", 1024': "1 GiB"},
        "seconds": {"75": "75 s", "1": "1 s", "0.5": "500 ms", "0.001": "1 ms", "1.2345e-6":
                    "1.23 µs", "9e-7": "900 ns", "4e-10": "0.4 ns"},
        "real": {"NaN": "", "-Infinity": "−∞", "1/0": "∞", "-0.5": "−0.5000", "99999":
                 "99999.0000", "-123456": "−1.2346e+5", "2.25, 1": "2.3"},
        "clamp": {"-1, 0, 9": "0", "10, 0, 9": "9", "4, 0, 9": "4"},
        "sci": {x: sci(float(x)) for x in ("0", "9.96e-8", "9.6e-4", "0.00123", "0.5", "7",
                                           "1234", "98765", "2.5e-12")},
    }  # fmt: skip
    calls = {f"{name}({x})": text for name, each in said.items() for x, text in each.items()}
    shown = show(plain).evaluate(f"[{', '.join(f'String({call})' for call in calls)}]")
    assert [text.replace("\u00a0", " ") for text in shown] == list(calls.values())


# ----------------------------------------------------------------------------- maps


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
        assert numbers(page, "#map-sum") == [pytest.approx(sum(weights.values()), abs=1e-9)]
        assert sum(weights.values()) == pytest.approx(1, abs=T / shown["maps"]["levels"])
        assert "add up to 1\u00a0±\u00a0" in page.inner_text("#map-sum").replace(
            " ± ", "\u00a0±\u00a0"
        )
    P = np.array([[weight(shown, layer, head, i, j) if j <= i else 0 for j in range(T)]
                  for i in range(T)])  # fmt: skip
    shares = np.diag(P).mean(), np.diag(P, -1).mean(), P[1:, 0].mean()
    told = [int(n) for n in re.findall(r"(\d+)%", page.inner_text("#map-trait"))]
    assert told == pytest.approx([100 * x for x in shares], abs=0.51)
    assert len(set(told)) == 3 and abs(P[:, 0].mean() - P[1:, 0].mean()) > 0.01
    text = page.inner_text("#map-sum")
    assert ("in another document" in text) == (which == "windowed")
    assert ("outside the window" in page.inner_text("#map-legend")) == (which == "windowed")


def test_pointing_at_the_map_and_leaving_it(show, plain):
    page = show(plain)
    T = len(plain["about"]["tokens"])
    cell, left, top = page.evaluate("[mapView.cell, mapView.left, mapView.top]")
    i, j = 20, 9
    page.hover("#map", position={"x": left + (j + 0.5) * cell, "y": top + (i + 0.5) * cell})
    w = weight(plain, 1, 2, i, j)
    assert page.inner_text("#map-cell").endswith(f"({i}) looks at “␣” ({j}): {w:.4f}")
    label = plain["about"]["tokens"][i]["label"]
    assert page.inner_text("#query-title") == f"Where token {i}, “{label}”, looks"
    page.mouse.move(5, 5)
    assert f"token {T - 1}," in page.inner_text("#query-title")  # the one that was chosen
    page.locator("#map-tokens button").nth(3).hover()
    assert "token 3," in page.inner_text("#query-title")
    page.mouse.move(5, 5)
    assert f"token {T - 1}," in page.inner_text("#query-title")


@pytest.mark.parametrize("which", ["plain", "windowed"])
def test_each_head_is_painted_pixel_by_pixel(show, which, request):
    """Its colour is the root of its weight; what is not seen is left empty."""
    shown = request.getfixturevalue(which)
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


@pytest.mark.parametrize("which", ["plain", "windowed"])
def test_the_large_map_is_drawn_cell_by_cell(show, which, request):
    """A cell that is seen has its colour, a hidden one lines, a later one nothing; around them the
    tokens, and what is looked at in a frame."""
    shown = deepcopy(request.getfixturevalue(which))
    about, T = shown["about"], len(shown["about"]["tokens"])
    segments = about["segments"] or [0] * T
    about["tokens"][2]["label"] = "abcdefghij"  # of ten, one more than is written
    about["tokens"][3]["label"] = "ab"
    page = show(shown, device_scale_factor=2)
    page.evaluate(RECORD)
    query, key = T - 3, 4
    drawn = json.loads(page.evaluate(f"logged(() => lookAt({query}, {key}))"))
    cell, left, top, width, height = page.evaluate("""[mapView.cell, mapView.left, mapView.top,
      parseFloat($("map").style.width), parseFloat($("map").style.height)]""")
    size = cell * T
    assert size / T > 12 and 1 < width - left - size < 4 and 1 < height - top - size < 4
    want: list[tuple[Any, ...]] = [("scale", 2, 2), ("drawImage", left, top, size, size, 1)]
    begins = [i for i in range(1, T) if segments[i] != segments[i - 1]]
    for i in begins:
        want.append(("strokeRect", left, top + i * cell, size, 0, "strong", 1, 1))
        want.append(("strokeRect", left + i * cell, top, 0, size, "strong", 1, 1))
    y = top + query * cell
    want += [("strokeRect", left - 0.5, top - 0.5, size + 1, size + 1, "strong", 1, 1),
             ("strokeRect", left, y, size, cell, "accent", 1, 2.5),
             ("strokeRect", left + key * cell, y, cell, cell, "ink", 1, 2)]  # fmt: skip
    hidden, points = [], []
    for i in range(T):
        seen = [visible(i, j, 0, about["window"], segments[i], segments[j]) for j in range(T)]
        first = seen.index(True)
        if first > 0:
            want.append(("rect", left, top + i * cell, first * cell, cell, 1))
            hidden += [[left + j * cell, top + i * cell, cell, cell] for j in range(first)]
        for j in range(T):
            w = weight(shown, about["layer"], about["head"], i, j) if seen[j] else None
            points.append([left + (j + 0.7) * cell, top + (i + 0.3) * cell,
                           None if w is None else int(255 * w**0.5 + 0.5), j > i])  # fmt: skip
        label = "abcdefgh…" if i == 2 else about["tokens"][i]["label"]
        row, column = "accent" if i == query else "muted", "ink" if i == key else "muted"
        turned = len(label) > 1
        want += [("fillText", label, left - 6, top + (i + 0.5) * cell, row, "right",
                  *["bold"] * (i == query)),
                 ("translate", left + (i + 0.5) * cell, top - 6),
                 ("rotate", -np.pi / 2) if turned else ("translate", 0, -5),
                 ("fillText", label, 0, 0, column, "left" if turned else "center",
                  *["bold"] * (i == key))]  # fmt: skip
    same_drawing(drawn, want)
    assert page.evaluate(HATCHED, ["map", hidden, "fcfbf8"]) == [] and bool(hidden) == bool(begins)
    wrong = page.evaluate(
        """points => {
      const c = new OffscreenCanvas($("map").width, $("map").height).getContext("2d",
        { willReadFrequently: true });
      c.drawImage($("map"), 0, 0);
      const { data, width } = c.getImageData(0, 0, c.canvas.width, c.canvas.height);
      return points.filter(([x, y, level, later]) => {
        const at = 4 * (Math.floor(2 * y) * width + Math.floor(2 * x));
        const [r, g, b, a] = data.slice(at, at + 4);
        if (level === null) return later === (a > 0);
        return a < 255 || [r, g, b].join() !== ramp.light[level].join(); }); }""",
        points,
    )
    assert wrong == []


@pytest.mark.parametrize("width, every", [(340, 5), (360, 1)])
def test_where_there_is_no_room_for_the_tokens_every_few_have_a_number(show, plain, width, every):
    page = show(plain, width)
    page.evaluate(RECORD)
    drawn = json.loads(page.evaluate("logged(drawMap)"))
    labels = [t["label"] if every == 1 else str(i) for i, t in enumerate(plain["about"]["tokens"])]
    assert [c[1] for c in drawn if c[0] == "fillText"] == [
        text for label in labels[::every] for text in (label, label)
    ]
    # All of it is inside of the canvas, and would be with 256 tokens.
    left, top, cell, wide, most = page.evaluate("""texts => {
      const c = fresh(document.createElement("canvas"), 9, 9);
      c.font = "bold 12px ui-monospace, monospace";
      return [mapView.left, mapView.top, mapView.cell, parseFloat($("map").style.width),
        Math.max(...texts.map(text => c.measureText(text).width))]; }""",
      labels if every == 1 else ["255"])  # fmt: skip
    assert left - 6 >= most and top - 11 >= 6 and wide >= left + 24.5 * cell + most / 2


@pytest.mark.parametrize("which", ["plain", "windowed"])
def test_what_the_maps_say_of_each_token_and_pair(show, which, request):
    shown = request.getfixturevalue(which)
    a, m = shown["about"], shown["maps"]
    T, layer, head = len(a["tokens"]), a["layer"], a["head"]
    page = show(shown)
    told, pairs = page.evaluate("""[strip.chips.map(chip => { chip.click();
        return [$("query-title").textContent, $("map-sum").textContent,
          $("map").getAttribute("aria-label"), chip.getAttribute("aria-label"),
          strip.chips.findIndex(c => c.tabIndex === 0)]; }),
      [0, 7, T - 1].map(i => strip.chips.map((_, j) => {
        lookAt(i, j); return $("map-cell").textContent; }))]""")
    pairs = dict(zip((0, 7, T - 1), pairs, strict=True))
    segments = a["segments"] or [0] * T
    names = [f"“{t['label']}”" for t in a["tokens"]]
    for i, (title, total, name, chip, reached) in enumerate(told):
        assert title == f"Where token {i}, {names[i]}, looks"
        assert name == f"Attention map of layer {layer}, head {head}. Token {names[i]} ({i}) looks."
        assert (chip, reached) == (f"Token {i}, {a['tokens'][i]['label']}", i)
        seen = [visible(i, j, 0, a["window"], segments[i], segments[j]) for j in range(T)]
        others = sum(segments[j] != segments[i] for j in range(i))
        hidden = [(T - 1 - i, "later"), (others, "in another document"),
                  (i + 1 - others - sum(seen), "outside the window")]  # fmt: skip
        said = ", ".join(f"{n} {what}" for n, what in hidden if n)
        weights = [weight(shown, layer, head, i, j) if seen[j] else 0.0 for j in range(T)]
        assert " ".join(total.split()) == (f"Hidden: {said}. " if said else "") + (
            f"The weights of a row add up to 1 ± {sci(m['sum_error'])}. For this page each was "
            "rounded to one of 65,536 levels; as rounded these add up to "
            f"{sum(weights):.6f}."
        )
        for j, pair in enumerate(pairs.get(i, [])):
            given = (f"{weights[j]:.4f}" if seen[j] else "a later token, masked" if j > i
                     else "masked")  # fmt: skip
            assert pair == f"{names[i]} ({i}) looks at {names[j]} ({j}): {given}"
    x = m["layers"][layer]
    assert words(page, "#agreement") == (
        f"sdpa agrees in layer {layer}. The weights above are recomputed outside the kernel that "
        "ran, from the same q and k. Its output differs from the formula in float64 by at most "
        f"{sci(x['error'])}; allowed are {sci(x['allowed'])}, and manual in float32 differs by "
        f"{sci(x['manual_error'])}. In head {head} it is {sci(x['heads'][head])}. The largest "
        f"output is {sci(x['largest'])}."
    )
    hidden_by = "hidden: outside the window or in another document" * (which == "windowed")
    legend = words(page, "#map-legend")
    assert legend == f"weight 01, by its square root{hidden_by}later: never seen"
    # Where a document begins, its number stands before the token; after a line break, a break.
    row = page.eval_on_selector_all("#map-tokens > *", "all => all.map(e => e.tagName + "
                                    "(e.matches('.cut') ? e.textContent : ''))")  # fmt: skip
    want = []
    for i, token in enumerate(a["tokens"]):
        if a["segments"] and (i == 0 or segments[i] != segments[i - 1]):
            want.append(f"SPANdocument {segments[i]}")
        want += ["BUTTON", *["HR"] * token["text"].endswith("\n")]
    assert row == want


@pytest.mark.parametrize("changes, why", [
    (([0] * 9 + [1] * 16, None, 9), "hidden: in another document"), ((None, 25, 0), ""),
    ((None, 24, 1), "hidden: outside the window")])  # fmt: skip
def test_the_legend_names_what_hides_here(show, plain, changes, why):
    segments, window, first = changes
    shown = deepcopy(plain)
    shown["about"] |= {"segments": segments, "window": window}
    shown["maps"]["seen"][-1] = [first, 25]
    page = show(shown)
    assert words(page, "#map-legend") == f"weight 01, by its square root{why}later: never seen"


def test_a_coarse_map_shows_the_decimals_that_it_has(show, plain):
    coarse = deepcopy(plain)
    coarse["maps"] |= {"levels": 255, "rounding": 0.5 / 255}
    eight = np.rint(unpack(plain["maps"]["weights"]) / 65535 * 255).astype(np.uint8)
    coarse["maps"]["weights"] = pack(eight)
    page = show(coarse)
    page.evaluate("lookAt(20, 9)")
    assert page.inner_text("#map-cell").endswith(f": {weight(coarse, 1, 2, 20, 9):.2f}")
    assert "one of 256 levels" in page.inner_text("#map-sum")


def test_a_click_on_the_map_chooses_the_token(show, plain):
    page = show(plain)
    cell, left, top = page.evaluate("[mapView.cell, mapView.left, mapView.top]")
    at = {"x": left + 7.5 * cell, "y": top + 11.5 * cell}
    page.click("#map", position=at)
    assert page.evaluate("[map.query, map.key]") == [11, 7]
    page.hover("#map", position={"x": at["x"], "y": at["y"] + 4 * cell})
    assert page.evaluate("[map.query, map.key]") == [15, 7]
    page.hover("#map", position={"x": left / 2, "y": at["y"]})  # beside it: a token, no key
    assert page.evaluate("[map.query, map.key]") == [11, None]
    page.mouse.move(5, 5)
    assert page.evaluate("[map.query, map.key]") == [11, None]
    page.focus("#map")
    for key, want in (("ArrowDown", [12, None]), ("ArrowRight", [12, 0]), ("Home", [0, 0]),
                      ("ArrowRight", [0, 1]), ("End", [24, 1]), ("ArrowUp", [23, 1])):  # fmt: skip
        page.keyboard.press(key)
        assert page.evaluate("[map.query, map.key, strip.pinned]") == [*want, want[0]], key


def test_the_verdict_is_the_documents(show, plain):
    page = show(plain)
    a = plain["maps"]["layers"][1]
    assert numbers(page, "#agreement") == [a["error"], a["allowed"]]
    assert page.get_attribute("#agreement", "class") == "verdict good"
    assert page.locator("#checks .good").all_inner_texts() == [
        "sdpa agrees with the formula in 2 of 2 layers",
        "tiled gives the right output in 8 of 8 heads played",
        "4 processes of a ring give the same output",
        "3 caches give the logits that no cache gives",
    ]
    wrong = deepcopy(plain)
    wrong["maps"]["layers"][1]["agrees"] = False
    for head in wrong["tiles"]["heads"]:
        head["error"] = 2 * head["allowed"]
        head["out"] = pack(-unpack(head["out"]))
    wrong["ring"]["error"] = 2 * wrong["ring"]["allowed"]
    wrong["caches"]["agree"] = False
    page = show(wrong)
    assert page.get_attribute("#agreement", "class") == "verdict bad"
    assert "does not agree" in page.inner_text("#agreement")
    bad = page.locator("#checks .bad").all_inner_texts()
    assert len(bad) == 4 and "in 1 of 2 layers" in bad[0] and "in 0 of 8 heads" in bad[1]
    page.click("#player-to-end")
    assert page.get_attribute("#difference", "class") == "verdict bad"
    tiled, manual = page.evaluate(OUTPUTS)
    assert np.abs(np.array(tiled) - np.array(manual)).max() > 100
    page.click("#ring-player-to-end")
    assert page.get_attribute("#ring-verdict", "class") == "verdict bad"
    assert page.get_attribute("#cache-verdict", "class") == "verdict bad"


@pytest.mark.parametrize("which", ["plain", "windowed"])
def test_the_model_is_told_as_it_is(show, which, request):
    shown = deepcopy(request.getfixturevalue(which))
    a = shown["about"]
    a["kernels"] = ["one", "two"] * (which == "plain")
    a["segments"] = [0] * len(a["tokens"]) if which == "plain" else None
    page = show(shown)
    page.click("#about summary")
    names = page.locator("#about dt").all_inner_texts()
    facts = dict(zip(names, page.locator("#about dd").all_inner_texts(), strict=True))
    assert facts == {
        "weights": "random weights",
        "tokens": f"char, vocabulary {a['vocab_size']}",
        "model": f"2 layers, 4 heads of 16, 64 channels, 128 tokens at most, {a['n_params']:,} "
        "parameters",
        "keys and values": "2 heads",
        "a query sees": "all tokens up to itself" if which == "plain"
        else "the last 6 tokens, itself included",
        "device": f"{a['device']}, float32, PyTorch {torch.__version__}",
        "attention": a["announced"],
        "kernels": "one, two" if which == "plain" else "none by name",
    }  # fmt: skip
    lede = page.inner_text("#lede")
    assert "A GPT of 2 layers and 4 heads a layer, which share 2 key/value heads, with" in lede
    assert f"with {a['n_params'] / 1000:.3g}k parameters, " in lede
    assert f"has read these {len(a['tokens'])} tokens." in lede
    title = DOCUMENTS if which == "windowed" else " ".join(PROMPT.split())
    assert page.title() == f"Attention at work: {title}"
    wide = sorted(["maps", "tiles", "caches", "costs", "ring"])
    assert sorted(set(shown) - {"about"}) == wide and "loads nothing" in words(page, "#colophon")


def test_a_head_is_chosen_and_played(show, plain):
    page = show(plain)
    page.locator("#thumbs button").nth(0 * 4 + 3).click()
    assert page.inner_text("#map-title") == "Layer 0, head 3"
    assert page.locator("#thumbs [aria-pressed=true]").count() == 1
    T = len(plain["about"]["tokens"])
    weights = [100 * weight(plain, 0, 3, T - 1, j) for j in range(T)]
    assert numbers(page, "#map-tokens") == weights
    assert page.input_value("#tile-layer") + page.input_value("#tile-head") == "12"
    page.click("#to-player")
    assert page.input_value("#tile-layer") + page.input_value("#tile-head") == "03"
    assert page.evaluate("document.activeElement.id") == "player"
    sampled = deepcopy(plain)
    sampled["tiles"]["heads"] = [t for t in plain["tiles"]["heads"] if t["layer"] == 1]
    sampled["tiles"]["notes"] = ["Tiles are traced for the heads of layer 1 only."]
    page = show(sampled)
    assert page.inner_text("#tile-notes") == sampled["tiles"]["notes"][0]
    assert page.is_enabled("#to-player")
    page.locator("#thumbs button").nth(0).click()
    assert page.is_disabled("#to-player") and "left out" in page.inner_text("#to-player")


# ----------------------------------------------------------------------------- tiles


def traced(shown: Document, layer: int, head: int) -> dict[str, Any]:
    (found,) = [t for t in shown["tiles"]["heads"] if (t["layer"], t["head"]) == (layer, head)]
    return {k: unpack(v) if isinstance(v, dict) else v for k, v in found.items()}  # type: ignore[arg-type]


# All that a step shows, read at once: a test of every step asks often.
LOOK = """() => {
  const numbers = where => [...document.querySelectorAll(where + " data")].map(e => e.value);
  const c = document.querySelector(".outputs canvas");
  const pixels = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
  const texts = where => [...document.querySelectorAll(where)].map(e => e.textContent);
  return {
    heads: texts("#tile-rows th[scope=col]"), queries: texts("#tile-rows button"),
    ramp: ramp.light,
    grew: [...$("tile-rows").tBodies[0].rows].map(e => !!e.querySelector(".grew")),
    paints: [...document.querySelectorAll("#tile-rows td.s")].map(e => e.style.background),
    bars: [...document.querySelectorAll("#counters .bar i")].map(e => parseFloat(e.style.width)),
    captions: texts("#outputs figcaption"), worked: texts("#worked .hint").join(),
    board: $("matrix").getAttribute("aria-label"), legend: $("matrix-legend").textContent,
    slider: [$("player-scrub").value, $("player-scrub").getAttribute("aria-valuetext")],
    title: $("tile-title").innerText, text: $("tile-text").innerText,
    counters: $("counters").innerText,
    tiled: numbers("#counters .meter.tiled"), manual: numbers("#counters .meter.manual"),
    rows: numbers("#tile-rows tbody"),
    shown: [...document.querySelectorAll("#tile-rows tbody data")].map(e => e.innerText),
    scores: [...document.querySelectorAll("#tile-rows td.s")].map(e => e.innerText),
    manuals: (c => [...c.getContext("2d").getImageData(0, 0, c.width, c.height).data])(
      document.querySelectorAll(".outputs canvas")[1]).every((x, n) => n % 4 < 3 || x === 255),
    written: Array.from({ length: c.height }, (_, r) => pixels[4 * r * c.width + 3] > 0) }; }"""


def read(texts: list[str]) -> list[float]:
    return [float(t.replace("−", "-").replace("∞", "inf").replace(",", "")) for t in texts]


def check_step(page: Any, shown: Document, head: dict[str, Any], done: int) -> None:
    """Everything that the player shows after so many tiles."""
    tiles = shown["tiles"]
    N, step = len(tiles["steps"]), tiles["steps"][done - 1]
    look = page.evaluate(LOOK)
    visits = sum(not s["skipped"] for s in tiles["steps"])  # skipped tiles are not counted
    which = "A skipped tile" if step["skipped"] else f"Tile {step['at'] + 1} of {visits}"
    assert look["title"].startswith(f"{which}: Q block {step['i']},")
    assert look["text"].startswith("Skipped") == step["skipped"]
    if step["skipped"]:
        later = step["cols"][0] >= step["rows"][1]
        assert ("later than" if later else "outside the window of") in look["text"]
    moved = step["read_so_far"], step["written_so_far"]
    assert tuple(read(look["tiled"])) == moved
    assert f"{moved[0]:,} bytes read, {moved[1]:,} written" in look["counters"]
    assert f"by this tile {step['read']:,} read, {step['written']:,} written" in look["counters"]
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
    check_words(look, shown, head, done)
    # Of the output there are the rows of the blocks that were written, and no others.
    finished = {s["i"] for s in tiles["steps"][:done] if s["last"]}
    assert look["manuals"]
    assert look["written"] == [r // tiles["block_m"] in finished for r in range(len(head["out"]))]


def spanned(ends: list[int], one: str, more: str) -> str:
    return f"{one} {ends[0]}" if ends[1] == ends[0] + 1 else f"{more} {ends[0]} to {ends[1] - 1}"


def check_words(look: Any, shown: Document, head: dict[str, Any], done: int) -> None:
    """What the player says after so many tiles, word by word, and its colours."""
    tiles, tokens = shown["tiles"], shown["about"]["tokens"]
    N, step, T = len(tiles["steps"]), tiles["steps"][done - 1], len(tokens)
    (first, stop), (key, until), at = step["rows"], step["cols"], step["at"]
    queries = spanned([first, stop], "query", "queries")
    keys = spanned([key, until], "key", "keys")
    scores = None if at is None else head["scores"][at, : stop - first, : until - key]
    if scores is None:
        hidden = "later than" if key >= stop else "outside the window of"
        said = f"Skipped: {keys}, {hidden} {queries}. Nothing is read, nothing is computed; m, l "
        said += "and O stay."
    else:
        said = f"Q is read for {queries}. " if step["first"] else ""
        said += f"K and V are read for {keys}. "
        said += ("Some entries are masked, one by one." if np.isneginf(scores).any()
                 else "Every query sees every key.")  # fmt: skip
        said += " This was the row's last tile: O is divided by l and written." * step["last"]
    assert look["text"] == said
    assert look["title"].endswith(f": Q block {step['i']}, K and V block {step['j']}")
    visits = sum(not s["skipped"] for s in tiles["steps"])
    size = f"{tiles['n_rows']} by {tiles['n_cols']} tiles"
    assert look["board"] == f"{size}, {visits} of them computed. {said}"
    assert look["slider"] == [str(done), f"{visits} tiles to compute, step {done} of {N}"]
    labels = [] if at is None else [t["label"] for t in tokens[key:until]]
    assert look["heads"] == ["query", *labels, "rescale", "m", "l"]
    assert look["queries"] == [f"{i} {tokens[i]['label']}" for i in range(first, stop)]
    # A row's maximum grew where it is larger than after the tile before, of the same row of tiles.
    row = [s for s in tiles["steps"][: done - 1] if s["i"] == step["i"]]
    past = [s["at"] for s in row if not s["skipped"]]
    before = head["m"][past[-1]] if past else np.full(tiles["block_m"], -np.inf)
    after = before if at is None else head["m"][at]
    assert look["grew"] == (after > before)[: stop - first].tolist()
    finite = head["scores"][np.isfinite(head["scores"])]
    low, high = float(finite.min()), float(finite.max())
    ends = [f"{x:.1f}".replace("-", "−") for x in (low, high)]
    assert look["legend"] == (f"score {ends[0]}{ends[1]}on the chip nowdone, its scores thrown away"
                              "skippedO written")  # fmt: skip
    paints = []
    for s in [] if scores is None else scores.flatten().tolist():
        rgb = look["ramp"][int(255 * (s - low) / (high - low) + 0.5)] if np.isfinite(s) else None
        paints.append(f"rgb({', '.join(map(str, rgb))})" if rgb else "")
    assert look["paints"] == paints
    # The bars are shares of what the one that moves more has moved in the end.
    both = [tiles["steps"][-1], tiles["manual"][-1]]
    total = max(x["read_so_far"] + x["written_so_far"] for x in both)  # type: ignore[index]
    moved = read([*look["tiled"], *look["manual"]])
    assert look["bars"] == pytest.approx([100 * x / total for x in moved], abs=0.01)
    counters = " ".join(look["counters"].split())
    k = min(3 * done // N, 2)
    name = tiles["manual"][k]["name"].replace("^T", "ᵀ")
    reads, writes = tiles["manual"][k]["reads"], tiles["manual"][k]["writes"]
    assert f"pass {k + 1} of 3: {name}, reads {reads}, writes {writes}" in counters
    assert f"All 4 heads of one layer, numbers of {tiles['size']} bytes;" in counters
    assert f"need {tiles['fast_memory']:,} bytes of fast memory on the chip." in counters
    tiled, manual = (x["read_so_far"] + x["written_so_far"] for x in both)  # type: ignore[index]
    ended = (f"At the end manual has moved {manual / tiled:.1f} times as much." if tiled < manual
             else f"On {T} tokens with tiles this small tiled moves {tiled / manual:.1f} times as "
             "much: K and V are read for each block of queries, and T × T is still a small "
             "square.")  # fmt: skip
    costs = shown["costs"]
    (long,) = (r for r in costs["rows"] if r["T"] == 4096)
    ratio = long["manual"]["bytes"] / long["tiled"]["bytes"]
    assert counters.endswith(
        f"Manual makes 3 passes over main memory, here spread evenly over the same progress. "
        f"{ended} At 4,096 tokens, in bfloat16 with tiles of {costs['block_m']} × "
        f"{costs['block_n']}, manual moves {ratio:.{0 if ratio >= 10 else 1}f} times as much as "
        "tiled."
    )
    written = sum(s["last"] for s in tiles["steps"][:done])
    size = f"{T} tokens × {head['out'].shape[1]} numbers"
    blocks = plural(tiles["n_rows"], "block")
    so_far = size if done == N else f"{written} of {blocks} written"
    assert look["captions"] == [f"tiled: {so_far}", f"manual: {size}"]
    if at is None:
        m, l = (head["m"][past[-1], 0], head["l"][past[-1], 0]) if past else (-np.inf, 0.0)
        said = "−∞" if np.isinf(m) else f"{m:.4f}".replace("-", "−")
        assert look["worked"] == f"Still m = {said}, l = {l:.4f}."


@pytest.mark.parametrize("which", ["plain", "windowed"])
def test_every_step_shows_the_numbers_of_the_trace(show, which, request):
    shown = request.getfixturevalue(which)
    head = traced(shown, shown["about"]["layer"], shown["about"]["head"])
    page = show(shown)
    assert page.inner_text("#tile-title") == "Before the first tile"
    visits = sum(not s["skipped"] for s in shown["tiles"]["steps"])
    skipped = len(shown["tiles"]["steps"]) - visits
    words = f"Of {visits + skipped} tiles {visits} will be computed and {skipped} skipped."
    assert words in page.inner_text("#tile-text")
    assert numbers(page, "#counters") == [0, 0, 0, 0]
    assert page.is_disabled("#player-back") and page.is_enabled("#player-step")
    N = len(shown["tiles"]["steps"])
    assert {s["skipped"] for s in shown["tiles"]["steps"]} == {True, False}
    for done in range(1, N + 1):
        page.evaluate("$('player-step').click()")
        check_step(page, shown, head, done)
    assert page.is_disabled("#player-step") and page.is_disabled("#player-to-end")


@pytest.mark.slow
def test_back_and_jumps_show_what_forward_showed(show, plain):
    page = show(plain)
    N = len(plain["tiles"]["steps"])
    state = """["tile-title", "tile-text", "tile-rows", "worked", "counters", "outputs"].map(
      id => $(id).innerHTML).join() + $("matrix").toDataURL()"""
    seen = [page.evaluate(state)]
    for _ in range(N):
        page.click("#player-step")
        seen.append(page.evaluate(state))
    assert len(set(seen)) == N + 1  # each step changes something
    for done in range(N - 1, -1, -1):
        page.click("#player-back")
        assert page.evaluate(state) == seen[done]
    for done in (N // 2, 3):
        page.fill("#player-scrub", str(done))
        assert page.evaluate(state) == seen[done]
    page.click("#player-to-end")
    assert page.evaluate(state) == seen[N]
    page.click("#player-to-start")
    assert page.evaluate(state) == seen[0]
    left, top, cell = page.evaluate("[board.left, board.top, board.cell]")  # a tile is pointed at
    i, j, M, B = 2, 1, plain["tiles"]["block_m"], plain["tiles"]["block_n"]
    at = {"x": left + (j + 0.5) * B * cell, "y": top + (i + 0.5) * M * cell}
    page.click("#matrix", position=at)
    assert page.evaluate(state) == seen[i * plain["tiles"]["n_cols"] + j + 1]


@pytest.mark.parametrize("which", ["plain", "windowed"])
def test_the_board_is_drawn_stroke_by_stroke(show, which, request):
    """The tiles, those that are done with their scores; around them the blocks of Q, of K and V,
    and of O: what is on the chip, and what is written."""
    shown = request.getfixturevalue(which)
    tiles, T = shown["tiles"], len(shown["about"]["tokens"])
    M, B, rows, cols = (tiles[name] for name in ("block_m", "block_n", "n_rows", "n_cols"))  # type: ignore[literal-required]
    head = traced(shown, shown["about"]["layer"], shown["about"]["head"])
    page = show(shown, device_scale_factor=2)
    page.evaluate(RECORD)
    (left, top, cell, room), pixels, ramp = page.evaluate("""[
      [board.left, board.top, board.cell, $("matrix").parentElement.clientWidth],
      [...player.image.canvas.getContext("2d").getImageData(0, 0, T, T).data], ramp.light]""")
    scores = np.full((T, T), np.nan)  # NaN: of no tile
    for s in tiles["steps"]:
        if not s["skipped"]:
            (i, stop), (j, until) = s["rows"], s["cols"]
            scores[i:stop, j:until] = head["scores"][s["at"], : stop - i, : until - j]
    seen, got = np.isfinite(scores), np.array(pixels).reshape(T, T, 4)
    share = (scores[seen] - scores[seen].min()) / np.ptp(scores[seen])
    assert np.array_equal(got[..., 3], 255 * seen)
    assert np.array_equal(got[seen][:, :3], np.array(ramp)[np.floor(255 * share + 0.5).astype(int)])
    size = cell * T
    assert left + size + 34 == pytest.approx(min(room, 560))  # pixels

    def box(s: Any) -> list[float]:
        (i, stop), (j, until) = s["rows"], s["cols"]
        return [left + j * cell, top + i * cell, (until - j) * cell, (stop - i) * cell]

    for done in range(len(tiles["steps"]) + 1):
        drawn = json.loads(page.evaluate(f"player.row = 3; logged(() => goTo({done}))"))
        now = tiles["steps"][done - 1] if done else None
        past = [s for s in tiles["steps"][:done] if not s["skipped"]]
        want: list[tuple[Any, ...]] = [("scale", 2, 2)]
        for n, s in enumerate(tiles["steps"]):
            x, y, w, h = box(s)
            want.append(("strokeRect", round_(x) + 0.5, round_(y) + 0.5, round_(w), round_(h),
                         "line", 1, 1))  # fmt: skip
            if s["skipped"]:
                want.append(("rect", x, y, w, h, 1 if n < done else 0.45))
                continue
            want.append(("fillRect", x, y, w, h, "paper" if n < done else "sunk", 1))
            if n < done:
                (i, stop), (j, until) = s["rows"], s["cols"]
                want.append(("drawImage", j, i, until - j, stop - i, x, y, w, h,
                             1 if n == done - 1 else 0.38))  # fmt: skip
        read = now is not None and any(s["i"] == now["i"] for s in past)
        ended = {s["i"] for s in past if s["last"]}
        blocks = []
        for i in range(rows):
            y, h = top + i * M * cell, min(M, T - i * M) * cell
            blocks.append((left - 22, y, 18, h, "accent" if read and i == now["i"] else "sunk", i))  # type: ignore[index]
            blocks.append((left + size + 5, y, 18, h, "tiled" if i in ended else "sunk", i))
        busy = now["j"] if now is not None and not now["skipped"] else None
        for j in range(cols):
            x, w = left + j * B * cell, min(B, T - j * B) * cell
            blocks.append((x, top - 22, w, 18, "accent" if j == busy else "sunk", j))
        for x, y, w, h, kind, name in blocks:
            want.append(("fillRect", x, y, w, h, kind, 1))
            want.append(("strokeRect", round_(x) + 0.5, round_(y) + 0.5, round_(w) - 1,
                         round_(h) - 1, "strong", 1, 1))  # fmt: skip
            ink = "muted" if kind == "sunk" else "paper"
            want.append(("fillText", str(name), x + w / 2, y + h / 2 + 0.5, ink, "center"))
        for name, x, y in (("Q", left - 13, top - 12), ("K, V", left + size / 2, top - 34),
                           ("O", left + size + 14, top - 12),
                           ("S = Q Kᵀ / √D, a tile at a time", left + size / 2,
                            top + size + 12)):  # fmt: skip
            want.append(("fillText", name, x, y, "ink", "center"))
        if now is not None:
            x, y, w, h = box(now)
            want += [("strokeRect", x, y, w, h, kind, 1, wide)
                     for kind, wide in (("paper", 6), ("accent", 3))]  # fmt: skip
            if busy is not None:
                r = min(3, now["rows"][1] - now["rows"][0] - 1)
                want.append(("strokeRect", x, y + r * cell, w, cell, "ink", 1, 1.5))
        same_drawing(drawn, want)
    # A skipped tile is hatched to its last corner.
    hatched = [box(s) for s in tiles["steps"] if s["skipped"]]
    assert page.evaluate(HATCHED, ["matrix", hatched, "fcfbf8"]) == []


# What is drawn from here on: the calls with the colours by name, as they are when they are made.
RECORD = """() => {
  const proto = CanvasRenderingContext2D.prototype, scratch = new OffscreenCanvas(1, 1);
  const pen = scratch.getContext("2d"), names = {};
  for (const name of ["ink", "muted", "accent", "tiled", "paper", "sunk", "strong", "line",
    "hatch"]) {
    pen.fillStyle = colour(name);
    names[pen.fillStyle] = name;
  }
  let log = [];
  window.logged = draws => { log = []; draws(); return JSON.stringify(log); };
  const more = {
    fillRect: c => [names[c.fillStyle], c.globalAlpha], drawImage: c => [c.globalAlpha],
    strokeRect: c => [names[c.strokeStyle], c.globalAlpha, c.lineWidth],
    rect: c => [c.globalAlpha], fillText: c => [names[c.fillStyle], c.textAlign],
    scale: () => [], translate: () => [], rotate: () => [] };
  for (const name of Object.keys(more)) {
    const plain = proto[name];
    proto[name] = function (...given) {
      const at = given.filter(x => !(x instanceof HTMLCanvasElement));
      const bold = name === "fillText" && this.font.startsWith("bold") ? ["bold"] : [];
      if (this.canvas.id) log.push([name, ...at, ...more[name](this), ...bold]);
      return plain.apply(this, given); };
  } }"""

# Of some boxes of a canvas those that have a corner of 8 x 8 pixels with nothing but paper in it.
HATCHED = """([id, boxes, paper]) => {
  const canvas = $(id), sharp = devicePixelRatio;
  const c = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d",
    { willReadFrequently: true });
  c.fillStyle = "#" + paper;
  c.fillRect(0, 0, canvas.width, canvas.height);
  c.drawImage(canvas, 0, 0);
  const plain = (x, y) => new Set(new Uint32Array(c.getImageData(
    x * sharp, y * sharp, 8 * sharp, 8 * sharp).data.buffer)).size === 1;
  return boxes.filter(([x, y, w, h]) => [x + 4, x + w - 12].some(
    a => [y + 4, y + h - 12].some(b => plain(a, b)))); }"""


def round_(x: float) -> int:
    """Of a half the larger one, as Math.round()."""
    return int(np.floor(x + 0.5))


def same_drawing(drawn: list[Any], want: list[tuple[Any, ...]]) -> None:
    """The same calls, in any order."""

    def rounded(call: Any) -> tuple[Any, ...]:
        return tuple(x if isinstance(x, str) else round(float(x), 3) + 0.0 for x in call)

    got, expected = (sorted(map(rounded, calls), key=repr) for calls in (drawn, want))
    assert got == expected


@pytest.mark.parametrize("which", ["plain", "windowed"])
def test_the_worked_row_adds_up(show, which, request):
    """The numbers of the row are those of the trace, and its sum that of the scores."""
    shown = request.getfixturevalue(which)
    tiles, tokens = shown["tiles"], shown["about"]["tokens"]
    head = traced(shown, shown["about"]["layer"], shown["about"]["head"])
    page = show(shown)

    def real(x: float) -> str:
        return f"{x:.4f}".replace("inf", "∞").replace("-", "−")

    for done, step in enumerate(tiles["steps"], 1):
        if step["skipped"]:
            continue
        heading, r, *lines = page.evaluate(f"""(() => {{
          goTo({done});
          chooseRow({done} % 2 ? 99 : 0);
          return [document.querySelector("#worked h3").textContent, player.row,
            ...[...document.querySelectorAll(".worked dd")].map(e => e.textContent)]; }})()""")
        i, at = step["rows"][0] + r, step["at"]
        assert r == (step["rows"][1] - step["rows"][0] - 1 if done % 2 else 0)
        assert heading == f"Row of query {i}, “{tokens[i]['label']}”, worked"
        m, l, o, rescale = (float(head[name][at, r]) for name in ("m", "l", "o_norm", "rescale"))
        past = [s["at"] for s in tiles["steps"][: done - 1] if s["i"] == step["i"]]
        past = [p for p in past if p is not None]
        m_old, l_old, o_old = -np.inf, 0.0, 0.0
        if past:
            m_old, l_old, o_old = (float(head[name][past[-1], r]) for name in ("m", "l", "o_norm"))
        scores = head["scores"][at, r, : step["cols"][1] - step["cols"][0]].astype(float)
        scores = scores[np.isfinite(scores)]
        assert m == max([m_old, *scores]) and l == pytest.approx(
            rescale * l_old + np.exp(scores - m).sum(), rel=1e-5
        )
        why = ("the first tile of the row" if step["first"]
               else "a larger score came" if m > m_old else "as before")  # fmt: skip
        top, added = max(scores, default=-np.inf), real(np.exp(scores - m).sum())
        length = f" divided by l it is the output, of length {real(o / (l or 1))}" * step["last"]
        assert lines == [
            f"max({real(m_old)}, {real(top)}) = {real(m)} {why}",
            "nothing was seen yet" if np.isinf(m) else f"e{real(m_old)} − "
            + (f"({real(m)})" if m < 0 else real(m)) + f" = {real(rescale)}",
            f"{real(rescale)} × {real(l_old)} + {added} = {real(l)} {added} is the sum of es − m "
            f"over {plural(len(scores), 'visible score')}",
            f"{real(rescale)} × old O + P̃ V; its length goes from {real(o_old)} to {real(o)}"
            + length,
        ]  # fmt: skip
        if step["last"]:
            assert o / l == pytest.approx(np.linalg.norm(head["out"][i]), abs=1e-5)


@pytest.mark.parametrize("which", ["plain", "windowed"])
def test_at_the_end_the_output_is_manuals(show, which, request):
    shown = request.getfixturevalue(which)
    head = traced(shown, shown["about"]["layer"], shown["about"]["head"])
    page = show(shown)
    assert page.locator("#difference").count() == 0
    page.click("#player-to-end")
    difference, error, allowed = numbers(page, "#difference")
    assert difference == pytest.approx(np.abs(head["out"] - head["manual"]).max(), rel=1e-6)
    assert (error, allowed) == (head["error"], head["allowed"]) and error <= allowed
    assert page.get_attribute("#difference", "class") == "verdict good"
    tiled, manual = page.evaluate(OUTPUTS)
    table, most = np.array(page.evaluate("signed.light")), np.abs(head["manual"]).max()
    for pixels, values in ((tiled, head["out"]), (manual, head["manual"])):
        levels = np.floor(255 * (0.5 + 0.5 * values.astype(float) / most) + 0.5).astype(int)
        want = table[levels.clip(0, 255)].reshape(-1, 3)
        assert np.abs(np.array(pixels).reshape(-1, 4)[:, :3] - want).max() <= 1
    ends = [f"{x:.2f}".replace("-", "−") for x in (-most, most)]
    assert words(page, "#outputs .legend") == "".join(ends)
    assert len(tiled) == 4 * head["out"].size
    assert np.abs(np.array(tiled) - np.array(manual)).max() <= 4  # a step of the colours at most


@pytest.mark.slow
def test_another_layer_and_head_show_their_own_trace(show, plain):
    page = show(plain)
    page.fill("#player-scrub", "8")
    check_step(page, plain, traced(plain, 1, 2), 8)
    page.select_option("#tile-head", "0")
    check_step(page, plain, traced(plain, 1, 0), 8)  # the place in the trace stays
    page.select_option("#tile-layer", "0")
    check_step(page, plain, traced(plain, 0, 0), 8)
    page.click("#player-to-end")
    assert "layer 0, head 0" in page.inner_text("#outputs h3")
    assert numbers(page, "#difference")[0] == traced(plain, 0, 0)["difference"]


def test_it_plays_pauses_and_plays_again(show, plain):
    page = show(plain)
    N = len(plain["tiles"]["steps"])
    page.select_option("#player-speed", "32")
    page.click("#player-play")
    assert page.get_attribute("#player-play", "aria-label") == "Pause"
    page.locator("#difference").wait_for()
    assert page.get_attribute("#player-play", "aria-label") == "Play"
    assert page.evaluate("player.done") == N
    page.evaluate("$('player-speed').selectedOptions[0].value = 1e-6")  # a step in 11 days
    page.click("#player-play")  # from the start again
    assert page.evaluate("[player.done, player.playing]") == [0, True]
    page.click("#player-play")
    assert page.get_attribute("#player-play", "aria-label") == "Play"
    assert page.evaluate("[player.done, player.playing]") == [0, False]
    page.click("#player-play")
    page.click("#player-step")  # by hand: it stops
    assert page.evaluate("[player.done, player.playing]") == [1, False]


# ----------------------------------------------------------------------------- caches


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
        # Each place in words, and all of them.
        seen, over = len(step["seen"]), len(step["read"]) - len(step["seen"])
        said = page.get_attribute(f"{article} .cells", "aria-label")
        assert said == (f"{step['cells']} places: {seen} read and seen, {over} read and masked, "
                        f"{len(step['written'])} written")  # fmt: skip
        for c, title in enumerate(
            page.eval_on_selector_all(f"{article} .cell", "all => all.map(e => e.title)")
        ):
            p = step["holds"][c]
            marks = [kind for kind in ("read", "seen", "written") if c in step[kind]]  # type: ignore[literal-required]
            what = [f"token {p} {tokens[p]['label']}", "kept"] if p >= 0 else ["empty"]
            assert title == f"place {c}: {', '.join([*what, *marks])}"
        assert page.inner_text(f"{article} h3") == step["kind"]
        about_it = page.locator(f"{article} > p").all_inner_texts()
        window = about_it[0].endswith("only the tokens that a later one can see are kept.")
        assert window == (which == "windowed" and step["kind"] == "dynamic")
        assert about_it[1:] == [
            f"{r['name']} was refused: {'; '.join(r['why'])}." for r in step["refused"]
        ]
    pages = page.locator("#caches .page > span").all_inner_texts()
    table = shown["caches"]["steps"][2]["page_table"]
    assert pages[0] == "page 0, nobody's"
    assert [t for t in pages if t.endswith(tuple("0123456789"))] == [
        f"page {n}" for n in sorted(table)
    ]
    c = shown["caches"]
    size = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads of them, head_dim, bytes
    assert words(page, "#cache-step").startswith(
        f"{len(c['prompt'])} tokens were read. Then “{c['token']['label']}” is decoded at position "
        f"{len(c['prompt'])}, the token that the model found likeliest. A token's keys and values "
        f"take {size} bytes in all layers."
    )
    assert words(page, "#cache-facts thead") == "dynamicstaticpaged"
    facts = [row.split("\t") for row in page.locator("#cache-facts tbody").inner_text().split("\n")]
    assert [row[0].strip() for row in facts] == [
        "tokens stored, before → after", "places read", "of these seen", "places written",
        "bytes allocated, all layers", "bytes that hold tokens", "share that is used", "run by",
        "off the logits without a cache",
    ]  # fmt: skip
    for n, s in enumerate(shown["caches"]["steps"], 1):
        assert [row[n].strip() for row in facts[:8]] == [
            f"{s['length_before']} → {s['length_after']}",
            *(f"{len(s[kind]):,}" for kind in ("read", "seen", "written")),  # type: ignore[literal-required]
            f"{s['bytes_allocated']:,}", f"{s['bytes_used']:,}",
            f"{100 * s['bytes_used'] / s['bytes_allocated']:.0f}%",
            ", ".join([s["backend"], *s["kernels"]]),
        ]  # fmt: skip
    assert numbers(page, "#cache-facts tr:last-child") == [
        s["error"] for s in shown["caches"]["steps"]
    ]
    assert numbers(page, "#cache-verdict") == [
        max(s["error"] for s in shown["caches"]["steps"]), shown["caches"]["allowed"]
    ]  # fmt: skip


# ----------------------------------------------------------------------------- cost

PREFIXES = {"n": 1e-9, "µ": 1e-6, "m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def measured(text: str) -> float:
    """ "12.3 kB" is 12300."""
    number, prefix = re.fullmatch(r"([\d.]+) ?(n|µ|m|k|M|G|T|)(?:FLOP|B|s|)", text).groups()  # type: ignore[union-attr]
    return float(number) * PREFIXES[prefix]


def test_the_cost_is_the_rooflines(show, plain):
    page = show(plain)
    costs = plain["costs"]
    assert page.locator("#cost-rows tbody tr").count() == len(costs["rows"])
    for n, row in enumerate(costs["rows"]):
        page.fill("#length", str(n))
        want = []
        for cost in (row["manual"], row["tiled"]):
            least = max(cost["flops"] / costs["peak"], cost["bytes"] / costs["bandwidth"])
            assert cost["seconds"] == pytest.approx(least)
            want += [cost["flops"], cost["bytes"], cost["intensity"], cost["seconds"]]
        assert numbers(page, "#cost-said") == want
        said = page.inner_text("#cost-said")
        texts = page.locator("#cost-said data").all_inner_texts()
        assert [measured(t) for t in texts] == pytest.approx(want, rel=0.006)
        times = row["manual"]["seconds"] / row["tiled"]["seconds"]
        assert said.endswith(f"At best tiled is {times:.1f} times as fast.")
        cells = page.locator("#cost-rows tbody tr").nth(n).locator("td").all_inner_texts()
        for cost, line in ((row["manual"], cells[:5]), (row["tiled"], cells[5:])):
            flops, moved, intensity, bound, least = line
            wanted = [cost["flops"], cost["bytes"], cost["intensity"], cost["seconds"]]
            told = [measured(t) for t in (flops, moved, intensity, least)]
            assert told == pytest.approx(wanted, rel=0.01) and bound == cost["bound"]
            assert flops.endswith("FLOP") and moved.endswith("B") and least.endswith("s")
        now = page.inner_text("#cost-rows tr.now")
        assert now.startswith(f"{row['T']:,}\t") and row["tiled"]["bound"] in now
    check_roofline(page, costs)
    about = page.inner_text("#cost-about")
    assert about.startswith("One layer of this model's attention, forward, batch 1, 4 heads of 16, "
                            "in bfloat16, on A100-SXM4-80GB: ")  # fmt: skip
    assert f"Tiles of {costs['block_m']} × {costs['block_n']}, the largest" in about
    assert "312 TFLOP/s (" in about and "2.04 TB/s (" in about and "fit into 192 KiB" in about
    # The large marks stand on the roof, and at their intensities, in the picture as in the numbers.
    ends = page.evaluate("""["circle.manual", "rect.tiled"].map(kind => {
      const box = [...document.querySelectorAll(`#roofline ${kind}`)].pop().getBBox();
      return [box.x + box.width / 2, box.y + box.height / 2]; })""")
    last = costs["rows"][-1]
    wide = np.log(last["tiled"]["intensity"] / last["manual"]["intensity"])
    first = page.evaluate("""[...document.querySelectorAll("#roofline circle.manual.small")].map(
      e => e.cx.baseVal.value)""")
    ratio = np.log(last["manual"]["intensity"] / costs["rows"][0]["manual"]["intensity"])
    assert (ends[1][0] - ends[0][0]) / (first[-1] - first[0]) == pytest.approx(
        wide / ratio, rel=0.02
    )
    assert ends[1][1] < ends[0][1]  # tiled may go faster
    assert ends[0][0] == pytest.approx(first[-1], abs=0.01)  # the slider is at the last length


def check_roofline(page: Any, costs: Any) -> None:
    """Every mark, number and line of the picture, on one pair of logarithmic axes."""
    drawn = page.evaluate("""(() => {
      const root = document.querySelector("#roofline svg");
      const all = where => [...root.querySelectorAll(where)];
      const middle = e => {
        const { x, y, width, height } = e.getBBox();
        return [x + width / 2, y + height / 2]; };
      return {
        manual: all("circle.small").map(middle), tiled: all("rect.small").map(middle),
        large: all(".dot:not(.small)").map(middle),
        text: all("text").map(e => [e.textContent, +e.getAttribute("x"), +e.getAttribute("y")]),
        roof: all("path").map(e => e.getAttribute("d")), said: root.getAttribute("aria-label"),
        grid: all("line.grid").map(e => ["x1", "y1", "x2", "y2"].map(n => +e.getAttribute(n))),
        slider: $("length").getAttribute("aria-valuetext") }; })()""")
    points = [(p, r[name]) for name in ("manual", "tiled")
              for p, r in zip(drawn[name], costs["rows"], strict=True)]  # fmt: skip
    ax, bx = np.polyfit([np.log10(c["intensity"]) for _, c in points], [p[0] for p, _ in points], 1)
    rates = [c["flops"] / c["seconds"] for _, c in points]
    ay, by = np.polyfit(np.log10(rates), [p[1] for p, _ in points], 1)
    assert ax > 0 > ay

    def place(intensity: float, rate: float) -> Any:
        return pytest.approx([ax * np.log10(intensity) + bx, ay * np.log10(rate) + by], abs=0.11)

    for p, c in points:
        assert p == place(c["intensity"], c["flops"] / c["seconds"])
    last = costs["rows"][-1]
    assert drawn["large"] == [place(last[n]["intensity"], last[n]["flops"] / last[n]["seconds"])
                              for n in ("manual", "tiled")]  # fmt: skip
    assert [t for t, *_ in drawn["text"]][-2:] == ["manual", "tiled"]
    roof, dash = ([[float(x) for x in p.split()] for p in d[1:].split("L")] for d in drawn["roof"])
    begin = 10 ** ((roof[0][0] - bx) / ax)
    assert roof[:2] == [place(begin, begin * costs["bandwidth"]),
                        place(costs["ridge"], costs["peak"])]  # fmt: skip
    assert roof[2][1] == roof[1][1] and dash[1] == roof[1] and dash[0][0] == dash[1][0]
    assert f"ridge {costs['ridge']:.0f}" in [t for t, *_ in drawn["text"]]
    assert min(p[0] for p, _ in points) > roof[0][0] and max(p[0] for p, _ in points) < roof[2][0]
    # Powers of ten, each beside its line.
    ticks = [(measured(t), x, y) for t, x, y in drawn["text"] if re.match(r"\d", t)]
    low = max(y for _, _, y in ticks)
    across = [(v, x) for v, x, y in ticks if y == low]
    up = [(v, y - 4) for v, x, y in ticks if y != low]
    assert len(across) >= 2 and len(up) >= 2 and len(drawn["grid"]) == len(ticks)
    for v, x in across:
        assert x == pytest.approx(ax * np.log10(v) + bx, abs=0.11)
        assert any(g[0] == g[2] == x for g in drawn["grid"])
    for v, y in up:
        assert y == pytest.approx(ay * np.log10(v) + by, abs=0.11)
        assert any(g[1] == g[3] == pytest.approx(y) for g in drawn["grid"])
    assert drawn["slider"] == f"{last['T']} tokens"
    assert drawn["said"] == (
        f"Roofline of {costs['gpu']}: at {last['T']} tokens manual has "
        f"{last['manual']['intensity']:.1f} FLOP a byte and tiled "
        f"{last['tiled']['intensity']:.1f}; the ridge is at {costs['ridge']:.1f}"
    )


# ----------------------------------------------------------------------------- the ring

RING = """() => {
  const numbers = where => [...document.querySelectorAll(where + " data")].map(e => e.value);
  const rows = [...document.querySelectorAll("#growing tbody tr")];
  return {
    title: $("step-title").innerText, text: $("step-text").innerText,
    said: [$("ring-player-scrub").value, $("ring-player-scrub").getAttribute("aria-valuetext")],
    names: [...document.querySelectorAll("#pairs b")].map(e => e.textContent),
    titles: [...document.querySelectorAll("#pairs i")].map(e => e.title),
    heads: [...document.querySelectorAll("#growing th[scope=col]")].map(e => e.textContent),
    keys: rows.map(e => e.children[1].textContent), together: $("ring-sent").innerText,
    processes: [...$("processes").children].map(e => e.innerText),
    bytes: numbers("#processes"), all: numbers("#ring-sent .hint"),
    hues: ["#processes .home", "#pairs .home"].flatMap(
      where => [...document.querySelectorAll(where)].map(e => +e.style.getPropertyValue("--hue"))),
    cells: [...document.querySelectorAll("#pairs i")].map(e => [e.className, e.innerText]),
    query: $("query-name").innerText, grown: numbers("#growing"),
    steps: rows.map(e => e.firstChild.innerText),
    strips: [...document.querySelectorAll("#growing canvas")].map(
      c => [...c.getContext("2d").getImageData(0, 0, c.width, 1).data]) }; }"""


def span_of(ring: Any, T: int, a: int) -> str:
    """The tokens of a chunk, as the page names them."""
    first, stop = a * ring["chunk"], min((a + 1) * ring["chunk"], T)
    if first >= T:
        return "filling"
    return f"token {first}" if stop == first + 1 else f"tokens {first} to {stop - 1}"


@pytest.mark.parametrize("which", ["plain", "windowed"])
def test_every_step_of_the_ring_shows_its_numbers(show, which, request):
    shown = request.getfixturevalue(which)
    ring, T = shown["ring"], len(shown["about"]["tokens"])
    n, c = ring["n"], ring["chunk"]
    part, L = unpack(ring["part"]), unpack(ring["L"])
    page = show(shown)
    assert page.inner_text("#step-title") == "Before the first step"
    assert page.is_disabled("#ring-player-back") and numbers(page, "#ring-sent") == [0]
    assert all("nothing computed yet" in text for text in page.evaluate(RING)["processes"])
    query = T - 1
    for step in range(n):
        page.click("#ring-player-step")
        if step == 1:
            page.focus("#ring-player")
            page.keyboard.press("ArrowUp")
            query -= 1
        look = page.evaluate(RING)
        assert look["title"] == f"Step {step}"
        began = (f"has the keys and values that began {plural(step, 'place')} before it" if step
                 else "computes with its own keys and values")  # fmt: skip
        assert look["text"] == f"Each process {began}" + (
            ", and sends them on meanwhile." if step < n - 1
            else ". It has met all; nothing more is sent."
        )  # fmt: skip
        assert look["said"] == [str(step + 1), f"step {step + 1} of {n}"]
        assert look["names"][1:] == [
            *(f"K{b}" for b in range(2 * n)), *(f"Q{a}" for a in range(2 * n))
        ]  # fmt: skip
        more = ", and documents" * (which == "windowed")
        layer = shown["about"]["layer"]
        assert f"keys and values of all heads of layer {layer}{more}." in look["together"]
        sent = [sum(ring["sent"][s][r] for s in range(step + 1)) for r in range(n)]
        assert read(look["bytes"]) == sent and read(look["all"]) == [sum(sent)]
        # Each process in its colour, and what is with it in that of the process it came from.
        owner = {a: r for r, pair in enumerate(ring["chunks"]) for a in pair}
        whose = [x for r in range(n) for x in (r, ring["homes"][step][r])]
        whose += [owner[a] for a in [*range(2 * n), *range(2 * n)]]
        assert look["hues"] == [(25 + 360 * r / n) % 360 for r in whose]
        for r, text in enumerate(look["processes"]):
            home = ring["homes"][step][r]
            held = "; ".join(span_of(ring, T, a) for a in ring["chunks"][home])
            own = "; ".join(span_of(ring, T, a) for a in ring["chunks"][r])
            assert f"Process {r}\n" in text and f"Q, O, L: {own}\n" in text
            assert f"K, V of process {home}: {held}" in text
            mine = [t for t in ring["tiles"] if (t["step"], t["rank"]) == (step, r)]
            masked = sum(t["masked"] for t in mine)
            said = f"{len(mine)} pair{'s' * (len(mine) != 1)} of chunks computed"
            said += f", {masked} masked" * bool(masked) + f"; {4 - len(mine)} skipped"
            assert said in text
        where = {(t["queries"], t["keys"]): t for t in ring["tiles"]}
        for at, (kinds, text) in enumerate(look["cells"]):
            tile = where.get(divmod(at, 2 * n))
            what = f"process {tile['rank']}, step {tile['step']}" if tile else "skipped"
            assert look["titles"][at] == f"Q{at // (2 * n)}, K and V {at % (2 * n)}: {what}"
            if tile is None:
                assert (kinds, text) == ("hatch", "")
                continue
            assert text == str(tile["step"]) and ("part" in kinds) == tile["masked"]
            assert ("now" in kinds) == (tile["step"] == step)
            assert ("done" in kinds) == (tile["step"] < step)
        visits = [k for k, t in enumerate(ring["tiles"])
                  if t["queries"] == query // c and t["step"] <= step]  # fmt: skip
        name = shown["about"]["tokens"][query]["label"]
        rank = owner[query // c]
        assert look["query"] == f"Query {query}, “{name}”, of process {rank}: (O, L) as it grows"
        assert look["heads"] == ["step", "keys", "L of these alone", "L so far",
                                 "share of the old O", "O, 16 numbers"]  # fmt: skip
        assert look["keys"] == [
            *(span_of(ring, T, ring["tiles"][k]["keys"]) for k in visits), ""
        ]  # fmt: skip
        assert look["steps"] == [*(str(ring["tiles"][k]["step"]) for k in visits), "manual"]
        want, before = [], -np.inf
        for k in visits:
            now = float(L[k, query % c])
            old = np.exp(before - now) if np.isfinite(now) else 1.0
            want += [float(part[k, query % c]), now, old]
            before = now
        assert read(look["grown"]) == pytest.approx(want, abs=1e-6)
        assert len(look["strips"]) == len(visits) + 1
        numbers(page, "#growing")  # shown as they are
    # After the last step the strip of O is that of manual, up to a step of the colours.
    *_, last, manual = look["strips"]
    assert np.abs(np.array(last) - np.array(manual)).max() <= 4
    assert np.abs(np.array(look["strips"][0]) - np.array(manual)).max() > 4 or which == "windowed"
    assert numbers(page, "#ring-verdict") == [ring["difference"], ring["error"], ring["allowed"]]
    assert page.get_attribute("#ring-verdict", "class") == "verdict good"
    assert page.is_disabled("#ring-player-step")
    chosen = (shown["about"]["layer"], shown["about"]["head"])
    assert (ring["layer"], ring["head"]) == chosen
    assert words(page, "#ring-verdict") == (
        f"Head {ring['head']}: the largest difference between the ring's output and manual's is "
        f"{sci(ring['difference'])}. From the formula in float64 the ring differs by "
        f"{sci(ring['error'])}; allowed are {sci(ring['allowed'])}."
    )


@pytest.mark.slow
def test_the_ring_is_moved_by_the_same_controls_and_on_its_own(show, plain):
    page = show(plain)
    page.focus("#ring-player")
    state = "[circle.done, circle.playing, player.done]"
    for key, want in (
        ("ArrowRight", [1, False, 0]), ("End", [4, False, 0]), ("Home", [0, False, 0]),
        (" ", [0, True, 0]), (" ", [0, False, 0]),
    ):  # fmt: skip
        page.keyboard.press(key)
        assert page.evaluate(state) == want, key
    page.fill("#ring-player-scrub", "3")
    assert page.evaluate(state) == [3, False, 0]
    page.click("#player-step")
    assert page.evaluate(state) == [3, False, 1]
    page.select_option("#ring-player-speed", "32")
    page.click("#ring-player-play")
    page.locator("#ring-verdict").wait_for()
    assert page.evaluate(state) == [4, False, 1]


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 16])
@pytest.mark.parametrize("width", [360, 1400])
def test_a_ring_of_few_or_many_processes_fits(show, width, n):
    page = show(document(ring=n), width)
    for done in (0, 1, n):
        page.evaluate(f"circle.goTo({done})")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
        assert page.locator("#processes article").count() == n
    assert page.get_attribute("#ring-verdict", "class") == "verdict good"


# ----------------------------------------------------------------------------- the keyboard


def test_all_of_it_works_with_the_keyboard(show, plain):
    page = show(plain)
    T, N = len(plain["about"]["tokens"]), len(plain["tiles"]["steps"])
    keys = page.keyboard
    page.evaluate("$('player-speed').selectedOptions[0].value = 1e-6")  # a step in 11 days
    reached = []
    while not reached or reached[-1] != "ring-player-scrub":
        keys.press("Tab")
        name, outlined = page.evaluate("""() => { const e = document.activeElement;
          return [e.id || e.name || e.parentElement.id || e.parentElement.parentElement?.id || "",
                  getComputedStyle(e).outlineStyle !== "none" && e.matches(":focus-visible")]; }""")
        reached.append(name)
        assert outlined or name == "", name
    want = ["thumbs", "map", "to-player", "map-tokens", "player", "tile-layer", "tile-head",
            "player-play", "player-step", "player-to-end", "player-speed", "player-scrub",
            "cache-tokens", "length", "ring-player", "ring-player-play",
            "ring-player-scrub"]  # fmt: skip
    places = [reached.index(name) for name in want]
    assert places == sorted(places)

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

    page.click("#map-tokens button >> nth=3")
    page.hover("#map-tokens button >> nth=2")  # looked at, while the focus stays on 3
    for token in (3, 4):
        keys.press("ArrowRight")
        assert page.inner_text("#query-title").startswith(f"Where token {token},")

    page.focus("#player")
    state = "[player.done, player.row, player.playing]"
    n_cols = plain["tiles"]["n_cols"]
    for key, want_ in [
        ("ArrowRight", [1, 0, False]), ("ArrowDown", [1, 1, False]), ("ArrowUp", [1, 0, False]),
        ("PageDown", [n_cols + 1, 0, False]), ("ArrowRight", [n_cols + 2, 0, False]),
        ("ArrowLeft", [n_cols + 1, 0, False]), ("PageUp", [1, 0, False]),
        (" ", [1, 0, True]), (" ", [1, 0, False]), ("End", [N, 0, False]), ("Home", [0, 0, False]),
    ]:  # fmt: skip
        keys.press(key)
        assert page.evaluate(state) == want_, key
    for key in ("Control+ArrowRight", "Meta+End", "Alt+ArrowRight"):  # the browser's own
        keys.press(key)
        assert page.evaluate(state) == [0, 0, False], key
    page.focus("#player-step")
    keys.press(" ")  # a button's own key: it does not play
    assert page.evaluate(state) == [1, 0, False]
    page.focus("#player-scrub")
    keys.press("ArrowRight")
    assert page.evaluate(state) == [2, 0, False]
    page.focus("#tile-head")
    keys.press("Home")
    assert page.evaluate("player.done") == 2 and page.input_value("#tile-head") == "0"
