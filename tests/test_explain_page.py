"""The page of explain.py in a real browser: it shows what the document has."""

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
from conftest import few
from test_explain import explained, tiny

from attention import visible
from explain import ExplainConfig
from viewer.document import Document, unpack
from viewer.page import render

HOSTILE = ("</script><script>window.taken = 1</script><img src=x onerror='taken=2'> {{js}} <!-- "
           "&lt;\u2028\"")
Show = Callable[..., Any]


def document(prompt: str, window: int | None = None, layer: int = 1, head: int = 2,
             **settings: Any) -> Document:
    """From random weights whose attention is not flat."""
    windows = None if window is None else (window, 2)
    model = tiny(n_kv_head=2, block_size=128, attention_window=windows)
    return explained(model, ExplainConfig(prompt=prompt, layer=layer, head=head, **settings))


@pytest.fixture(scope="module")
def documents() -> dict[str, Document]:
    return {"plain": document("To be, or not\nto be: that"),
            "windowed": document("To be, or|not to be", 6, segments="|", layer=0, head=3)}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browsers.running() as chromium:
        yield chromium


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def show(chromium: Any, tmp_path: Path, said: list[str]) -> Iterator[Show]:
    opened = []

    def open_(shown: Document, width: int = 1400, scheme: str = "light") -> Any:
        file = tmp_path / "explain.html"
        file.write_text(render(shown), encoding="utf-8")
        size = {"width": width, "height": 900}
        page = chromium.new_page(viewport=size, color_scheme=scheme)
        opened.append(page)
        page.set_default_timeout(5000)
        page.on("console", lambda message: said.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("request", lambda r: r.url == file.as_uri() or said.append(f"request: {r.url}"))
        page.goto(file.as_uri())
        return page

    yield open_
    for page in opened:
        page.close()
    assert said == []


def numbers(page: Any, where: str) -> list[float]:
    """Exact numbers of <data> elements, each shown rounded."""
    found = page.eval_on_selector_all(
        where + " data", "all => all.map(e => [e.value, e.innerText])"
    )
    for value, text in found:
        shown = text.replace("−", "-").replace(",", "")
        if re.fullmatch(r"-?[\d.]+", shown):
            decimals = len(shown.partition(".")[2])
            assert float(shown) == pytest.approx(float(value), abs=0.51 * 10**-decimals)
    return [float(value) for value, _ in found]


def square(shown: Document) -> tuple[np.ndarray, np.ndarray]:
    """The weights (2, 4, T, T), and what each layer sees (2, T, T)."""
    about, T = shown["about"], len(shown["about"]["tokens"])
    P = np.zeros((2, 4, T, T))
    rows, cols = np.tril_indices(T)
    P[:, :, rows, cols] = unpack(shown["maps"]["weights"]) / shown["maps"]["levels"]
    i, seg = np.arange(T), np.array(about["segments"] or [0] * T)
    sees = [np.broadcast_to(visible(i[:, None], i, 0, window, seg[:, None], seg), (T, T))
            for window in about["windows"]]
    return P, np.stack(sees)


def test_a_hostile_prompt_is_shown_as_text(show, said) -> None:
    shown, image = document(HOSTILE), "<img src=x onerror='taken=4'>"
    about = shown["about"]
    about["source"] = about["device"] = about["backend"] = image
    about["notes"].append(image)
    about["refused"].append({"name": image, "why": [image]})
    for token in about["tokens"]:  # as GPT-2's may be
        token["text"] = token["label"] = image
    block = re.search(r'id="document">(.*?)</script>', render(shown), re.S)
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
    assert "Content Security Policy" in said.pop()


@pytest.mark.parametrize("width, scheme", [(360, "dark"), (1400, "light")])
def test_it_fits_and_follows_the_scheme(show, documents, width, scheme) -> None:
    page = show(documents["plain"], width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
    sticking = """all => all.filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)
                            .map(e => e.outerHTML.slice(0, 90))"""
    assert page.eval_on_selector_all("main :not(.strip *, canvas)", sticking) == []
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) < 200) == (scheme == "dark")


@pytest.mark.parametrize("which", ["plain", "windowed"])
def test_a_token_shows_where_it_looks(show, documents, which) -> None:
    shown = documents[which]
    about, (P, sees) = shown["about"], square(shown)
    layer, head, T = about["layer"], about["head"], len(about["tokens"])
    page = show(shown)
    assert page.inner_text("#map-title") == f"Layer {layer}, head {head}"
    for i in (0, 1, T // 2, T - 1):
        page.locator("#map-tokens button").nth(i).click()
        chips = page.eval_on_selector_all(
            "#map-tokens button", "all => all.map(e => [e.className, e.lastChild.textContent])"
        )
        keys = np.flatnonzero(sees[layer, i])
        assert [j for j, (kind, _) in enumerate(chips) if "later" in kind] == list(range(i + 1, T))
        hidden = [j for j in range(i) if j not in keys]
        assert [j for j, (kind, _) in enumerate(chips) if "hidden" in kind] == hidden
        row = P[layer, head, i, keys]
        assert numbers(page, "#map-tokens") == pytest.approx([*(100 * row)], abs=1e-12)
        assert all(chips[j][1] == "·" for j, w in zip(keys, row) if w < 0.004)


def test_each_head_is_painted_pixel_by_pixel(show, documents) -> None:
    """Darker for the root of a larger weight; invisible keys are empty."""
    shown = documents["windowed"]
    (P, sees), T = square(shown), len(shown["about"]["tokens"])
    found = show(shown).eval_on_selector_all("#thumbs canvas", """all => all.map(c => [
      c.parentElement.ariaLabel,
      ...c.getContext("2d").getImageData(0, 0, c.width, c.height).data])""")
    lights: dict[int, float] = {}
    for n, (name, *pixels) in enumerate(found):
        assert name == f"Layer {n // 4}, head {n % 4}"
        got, seen = np.array(pixels).reshape(T, T, 4), sees[n // 4]
        assert np.array_equal(got[..., 3], 255 * seen)
        levels = (255 * P[n // 4, n % 4][seen] ** 0.5 + 0.5).astype(int).tolist()
        for level, light in zip(levels, got[seen][:, :3] @ (0.2126, 0.7152, 0.0722)):
            assert lights.setdefault(level, light) == light
    ordered = [lights[level] for level in sorted(lights)]
    assert len(ordered) > 20 and ordered[0] > 220 > 90 > ordered[-1]
    assert all(np.diff(ordered) < 0.5)


@pytest.mark.parametrize("agrees, kind", [(True, "good"), (False, "bad")])
def test_the_verdict_is_the_documents(show, documents, agrees, kind) -> None:
    layer = (shown := deepcopy(documents["plain"]))["maps"]["layers"][1]
    layer["agrees"] = agrees
    page = show(shown)
    assert numbers(page, "#agreement") == [layer["error"], layer["allowed"]]
    assert page.get_attribute("#check", "class") == kind
    assert page.get_attribute("#agreement", "class") == f"verdict {kind}"


@pytest.mark.parametrize("which, size", few([("windowed", 2), ("plain", 4), ("plain", 8)]))
def test_a_row_plays_the_online_softmax(show, documents, which, size) -> None:
    """m, l and O after each tile; the last is the kernel's output."""
    shown = documents[which]
    about, tiles = shown["about"], shown["tiles"]
    layer, head, T = about["layer"], about["head"], len(about["tokens"])
    S = np.full((T, T), -np.inf)
    S[np.tril_indices(T)] = unpack(tiles["scores"])[layer, head]
    v, out = unpack(tiles["v"])[layer, head // 2], unpack(tiles["out"])[layer, head]
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


def test_all_of_it_works_with_the_keyboard(show, documents) -> None:
    shown = documents["plain"]
    P, T = square(shown)[0], len(shown["about"]["tokens"])
    page = show(shown)
    def press(where: str, *keys: str) -> None:
        page.locator(where).focus()
        for key in keys:
            page.keyboard.press(key)

    press("#thumbs [tabindex='0']", "ArrowUp", "ArrowLeft")
    assert page.inner_text("#map-title") == "Layer 0, head 1"
    assert numbers(page, "#map-tokens") == pytest.approx([*(100 * P[0, 1, -1])], abs=1e-12)
    press("#map", "ArrowUp", "ArrowLeft")
    assert f"{P[0, 1, T - 2, T - 3]:.4f}" in page.inner_text("#map-cell")
    press("#map-tokens [tabindex='0']", "Home", "ArrowRight")
    assert page.inner_text("#query-title").startswith("Where token 1,")
    press("#map-tokens [tabindex='0']", "End")
    press("#map-tab", "ArrowRight")
    assert page.locator("#map-panel").is_hidden() and page.locator("#tiles").is_visible()
    for key, title in (("ArrowRight", "Tile 2 of"), ("End", "divided")):
        press("#tiles-at", key)
        assert title in page.inner_text("#tiles-title")
    press("#tiles-play", "Space")
    assert page.inner_text("#tiles-play") == "Pause"
    page.locator("#tiles-title", has_text="Tile 2 of").wait_for()
    press("#tiles-play", "Space")
    assert page.inner_text("#tiles-play") == "Play"
