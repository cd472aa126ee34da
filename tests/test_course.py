"""The course: its pages are up to date, their commands run, the exercises tell right from wrong."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from checkout import ROOT, files
from test_readme import SHOWN
from test_tiled import Recorder
from torch import Tensor

from attention import Spec, manual, visible
from attention.check.command import main as check_kernel
from core.settings import UserError
from course import build
from course.exercises import NUMBERS, exercise
from course.exercises import __main__ as command_line
from course.exercises.check import examine, failure
from course.exercises.named import mistaken, named
from course.figures import __main__ as figures
from course.figures import basics, trace
from course.format import table
from course.lab import report, training

COURSE = ROOT / "course"
PAGES = sorted(files("course/[0-9]*_*.md"), key=lambda page: int(page.name.split("_")[0]))
TEXT = {page.name: page.read_text(encoding="utf-8") for page in [COURSE / "README.md", *PAGES]}
COMMANDS = [s for s in dict.fromkeys(SHOWN) if re.match(r"python -m course\.[ef]\w+s", s)]


def needing_triton(number: str) -> None:
    """Skip the exercises of page 7 where they cannot be done."""
    if number.startswith("7") and find_spec("triton") is None:
        pytest.skip("package 'triton' is not installed")


def written(folder: Path, text: str) -> Path:
    path = folder / "answer.py"
    path.write_text(text, encoding="utf-8")
    return path


# --- the pages ---


@pytest.mark.parametrize("name", TEXT)
def test_what_is_generated_is_up_to_date(name: str) -> None:
    """python -m course.build writes it anew."""
    fresh, changed = build.rebuild(TEXT[name], COURSE / name)
    assert not changed
    assert fresh == TEXT[name]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_course_runs(line, capsys, tmp_path) -> None:
    """The other commands are parsed by test_readme.py."""
    line, _, redirected = line.partition(" > ")
    _, _, module, *words = shlex.split(line)
    if module == "course.figures":
        assert figures.main(words) == 0
        assert capsys.readouterr().out.count("\n") >= 3
        return
    needing_triton(words[0] if words[1:] else "")
    if words[1:] and words[1].endswith(".py"):
        start = written(tmp_path, exercise(words[0]).start)
        assert command_line.main([words[0], str(start)]) == 1
        return
    assert command_line.main(words) == 0
    text = capsys.readouterr().out
    assert text.strip()
    assert not redirected or compile(text, redirected, "exec")


# --- course.build ---


PAGE = """# A page

<!-- code: sample.py ask from "b = 1" to "return" -->
<!-- end -->
between
<!-- figure: squares --n=3 -->
old
<!-- end -->
after
"""

SOURCE = '''"""A file."""

LIMIT: int = (
    3
)


@cached
def ask(a):
    """Asks."""
    if a:
        b = 1
        c = 2
        return b + c
    return 0


class Box:
    def ask(self):
        return 5
'''


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    """A course of one page over one file, with one figure; returns the page."""
    (tmp_path / "sample.py").write_text(SOURCE, encoding="utf-8")
    folder = tmp_path / "course"
    folder.mkdir()
    (folder / "1_page.md").write_text(PAGE, encoding="utf-8")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "COURSE", folder)
    monkeypatch.setattr(build, "NOTEBOOKS", folder)
    monkeypatch.setattr(build, "notebooks", lambda: {"lesson.ipynb": "{}\n"})
    squares = lambda n=2: table(("n", "n²"), [(m, m * m) for m in range(n)])  # noqa: E731
    monkeypatch.setitem(figures.FIGURES, "squares", squares)
    return folder / "1_page.md"


def test_build_writes_what_the_marks_say(course, capsys) -> None:
    assert build.main([]) == 0
    text = course.read_text(encoding="utf-8")
    block = "```python\nb = 1\nc = 2\nreturn b + c\n```\n<!-- end -->\nbetween\n"
    assert f"[sample.py](../sample.py), `ask`:\n\n{block}" in text
    assert "| n | n² |\n| - | -- |\n| 0 | 0  |\n| 1 | 1  |\n| 2 | 4  |\n<!-- end -->\nafter" in text
    assert "old" not in text
    assert capsys.readouterr().out.count("1_page.md: written") == 2
    assert build.main(["--check"]) == 0
    assert build.main([]) == 0
    assert capsys.readouterr().out == ""
    assert course.read_text(encoding="utf-8") == text


def test_check_names_what_is_out_of_date_and_writes_nothing(course, capsys) -> None:
    build.main([])
    text = course.read_text(encoding="utf-8")
    sample = course.parents[1] / "sample.py"
    sample.write_text(SOURCE.replace("c = 2", "c = 3"), encoding="utf-8")
    assert build.main(["--check"]) == 1
    assert '<!-- code: sample.py ask from "b = 1"' in capsys.readouterr().out
    assert course.read_text(encoding="utf-8") == text
    sample.write_text(SOURCE, encoding="utf-8")
    for wrong in ("| 2 | 5  |", "| 2 | 4   |", "| 2 | 4  |\n"):  # to the letter
        course.write_text(text.replace("| 2 | 4  |", wrong), encoding="utf-8")
        assert build.main(["--check"]) == 1
        assert "<!-- figure: squares --n=3 -->" in capsys.readouterr().out


@pytest.mark.parametrize("old, new, named", [
    ("sample.py ask", "other.py ask", "other.py"), (".py ask", ".py Box.tell", "Box.tell"),
    ("b = 1", "d = 1", "'d = 1'"), ('to "return"', 'to "LIMIT"', "'LIMIT'"),
    ("squares", "cubes", "'cubes'"), ("--n=3", "--m=3", "got --m=3"),
    ("<!-- end -->\nbetween", "between", "<!-- end -->"), ("old\n<!-- end -->", "", "<!-- end -->"),
])
def test_a_mark_that_names_nothing_is_an_error(course, old, new, named) -> None:
    course.write_text(PAGE.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError, match=named) as caught:
        build.main(["--check"])
    assert "1_page.md" in str(caught.value)


# --- the figures ---


def cells(text: str) -> list[list[str]]:
    """The rows of a figure's table, without its head."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows[2:]]


@pytest.mark.parametrize("words", [
    ["masks"], ["mask", "--T=3"], ["mask", "Tq=3"], ["mask", "--Tq=many"], ["mask", "--window=0"],
    ["mask", "--segments=(1, 2)"], ["online", "--block=0"], ["one_query", "--q=(1, 2)"],
    ["ring_work", "--T=100", "--N=8"], ["ring_hides", "--gpu='a toaster'"], ["rope", "--D=64"],
])
def test_figures_refuse_what_they_do_not_take(words) -> None:
    assert figures.main([]) == 0
    with pytest.raises(UserError):
        figures.main(words)


def test_one_query_is_the_formula() -> None:
    rows = cells(figures.draw(["one_query"]))
    scores = torch.tensor([float(row[1]) for row in rows]) / 2  # D = 4
    weights = scores.softmax(0)
    assert [row[4] for row in rows] == [f"{p:.3f}" for p in weights.tolist()]
    out = weights @ torch.tensor([float(row[5]) for row in rows])
    assert figures.draw(["one_query"]).endswith(f"**{out:.2f}**")


@pytest.mark.parametrize("words", [[], ["--Tq=3", "--Tk=12", "--window=5"], ["--Tq=5", "--Tk=2"]])
def test_a_mask_is_drawn_as_visible_has_it(words) -> None:
    shape = {key: int(n) for key, n in (word[2:].split("=") for word in words)}
    Tq, Tk, window = shape.get("Tq", 4), shape.get("Tk", 4), shape.get("window")
    rows = [line.split()[1:] for line in figures.draw(["mask", *words]).splitlines()[2:-1]]
    seen = [["x" if visible(i, j, Tk - Tq, window) else "." for j in range(Tk)] for i in range(Tq)]
    assert rows == seen


def test_memory_is_four_times_as_large_at_twice_the_length() -> None:
    small, large = cells(figures.draw(["memory", "--T=(256, 512)"]))
    (P, manual, _), (P2, manual2, tiled2) = (
        [float(cell.split()[0]) for cell in row[2:]] for row in (small, large)
    )
    assert round(512**2 * 4 / 1e6, 2) == P2 and 3.9 < P2 / P < 4.1 and 3 < manual2 / manual < 4
    assert round((4 * 512 * 64 + 512) * 4 / 1e6, 2) == tiled2  # Q, K, V, O and L, nothing else


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("scores", [(1, 3, 2, 5, 4, 0), (1000, 1001, 999)])
def test_online_ends_at_softmax(scores, block) -> None:
    text = figures.draw(["online", f"--scores={scores}", f"--block={block}"])
    s = torch.tensor(scores, dtype=torch.float64)
    out = s.softmax(0) @ torch.arange(1.0, len(s) + 1, dtype=torch.float64)
    assert text.count(f"{out:.6f}") == 2
    assert f"L = m + log l = {s.logsumexp(0):.4f}" in text
    rows = cells(text)
    assert len(rows) == -(-len(s) // block)
    for n, row in enumerate(rows):
        past, now = s[: block * n], s[block * n : block * (n + 1)]
        seen = s[: block * (n + 1)]
        p, factor = torch.exp(seen - seen.max()), torch.exp(past.amax() - seen.max()) if n else 0.0
        assert row == [
            ", ".join(f"{x:g}" for x in now), f"{seen.max():g}", f"{float(factor):.4f}",
            f"{p[len(past) :].sum():.4f}", f"{p.sum():.4f}",
            f"{p @ torch.arange(1.0, len(seen) + 1, dtype=torch.float64):.4f}",
        ]


def test_tiles_are_drawn_and_counted_as_they_are_visited() -> None:
    """Against the entries of visible(), and against the sum that the page derives."""
    text = figures.draw(["tiles", "--Tq=6", "--Tk=9", "--B_r=2", "--B_c=3", "--window=4"])
    rows = [line.split()[1:] for line in text.splitlines()[2:5]]
    for i, row in enumerate(rows):
        for j, sign in enumerate(row):
            seen = [visible(2 * i + a, 3 * j + b, 3, 4) for a in range(2) for b in range(3)]
            assert sign == ("x" if all(seen) else "/" if any(seen) else ".")
    assert "three passes" not in text  # their closed formula is of Tq = Tk
    s, D, T, b = 4, 64, 64, 8
    text = figures.draw(["tiles"])
    assert "36 of 64 tiles" in text
    assert f"Read: {s * D * T * (T // b + 2):,} bytes, written: {s * (D * T + T):,}." in text
    assert f"reads {s * (3 * D * T + 2 * T * T):,} and writes {s * (D * T + 2 * T * T):,}" in text


@pytest.mark.parametrize("T", [64, 200])
def test_the_operations_are_counted_in_the_tiles_that_are_visited(T) -> None:
    manual, tiled = cells(figures.draw(["backward_flops", f"--T={T}", "--D=16"]))
    assert manual == ["manual", "all", "4", "8"]
    blocks = [(t, min(t + 64, T)) for t in range(0, T, 64)]
    sizes = [(b - a) * (d - c) for a, b in blocks for c, d in blocks if c <= b - 1]
    share = sum(sizes) / T**2
    of = f"{len(sizes)} of {len(blocks) ** 2}"
    assert tiled == ["tiled", of, f"{4 * share:.3g}", f"{10 * share:.3g}"]


def test_lazy_rescaling_without_a_threshold_is_eager() -> None:
    words = ["lazy_rescaling", "--T=320", "--D=8"]
    for _, _, grew, past in cells(figures.draw([*words, "--threshold=0.0"])):
        assert grew == past
    for _, _, grew, past in cells(figures.draw([*words, "--threshold=8.0"])):
        assert int(past.split()[0]) < int(grew.split()[0])


@pytest.mark.parametrize("N, window", [(4, None), (3, 5)])
def test_the_work_is_counted_pair_by_pair(N, window) -> None:
    T = 8 * N
    rows = cells(figures.draw(["ring_work", f"--N={N}", f"--T={T}", f"--window={window}"]))
    chunk = T // (2 * N)
    for name, place in (
        ("plain", lambda t: t // (2 * chunk)),
        ("zigzag", lambda t: min(t // chunk, 2 * N - 1 - t // chunk)),
    ):
        count = [[0] * N for _ in range(N)]
        for i in range(T):
            for j in range(T):
                if visible(i, j, 0, window):
                    count[place(i)][(place(i) - place(j)) % N] += 1
        total = sum(map(sum, count))
        told: dict[str, list[str]] = {}
        for kind, label, *shares in rows:  # label: a process, "1 to 3" or "slowest"
            ends = re.findall(r"\d+", label)
            labels = map(str, range(int(ends[0]), int(ends[-1]) + 1)) if ends else [label]
            told |= dict.fromkeys(labels, shares) if kind == name else {}
        alike = [[*map(max, zip(*count))]] if "slowest" in told else []
        for r, row in [*enumerate(count), *(("slowest", row) for row in alike)]:
            want = [n / total for n in (*row, sum(row))]
            got = [float(cell.rstrip("%")) / 100 for cell in told[str(r)]]
            assert got == pytest.approx(want, abs=6e-4)


def test_a_step_takes_what_its_bytes_and_pairs_take() -> None:
    """Against the bytes of K and V and the pairs of a step."""
    H, Hkv, D = 32, 8, 128  # the defaults
    text = figures.draw(["ring_hides", "--tokens=(16, 4096)", "--itemsize=4", "--links=(2, 400)"])
    for n, row in zip((16, 4096), cells(text), strict=True):
        sent = 2 * 4 * Hkv * D * n
        want: list[float] = []
        for products, size in ((2, sent), (5, 2 * sent)):  # dK and dV are float32, as K and V here
            computing = products * 2 * D * H * (n**2 / 2) / 989.4e12
            want += [computing, size / 2e9, size / 400e9]
        assert row[0] == f"{n:,}"
        told = [float(x.strip("*").replace(",", "")) for x in row[1:]]
        assert told == pytest.approx([1e6 * t for t in want], abs=0.51)
        assert ["**" in x for x in row[1:]] == [t > want[k // 3 * 3] for k, t in enumerate(want)]
    # At the length that is told, a step's computing and sending take the same time.
    least = {(way, link): float(n.replace(",", "")) for n, way, link in
             re.findall(r"([\d,]+) (forward|backward) at (\d+) GB/s", text)}
    assert len(least) == 4
    for (way, link), n in least.items():
        products, size = (2, 8) if way == "forward" else (5, 16)
        computing = products * 2 * D * H * n**2 / 2 / 989.4e12
        assert computing == pytest.approx(size * Hkv * D * n / (float(link) * 1e9), rel=0.01)


def test_rope_turns_as_the_formula_says() -> None:
    """Wavelengths 2 pi theta^(2 i / D); scaled by 8 if a pair turns less than once in 8,192."""
    for pair, *told in cells(figures.draw(["rope", "--D=64", "--theta=300.0", "--pairs=(0, 31)"])):
        share = int(pair) / 32
        turns = [math.tau * theta**share for theta in (10000, 300)]
        products = [math.cos(n / 300**share) for n in (1, 16, 256, 4096)]
        got = [float(x.replace(",", "")) for x in told]
        assert got[:3] == pytest.approx([*turns, turns[1]], abs=0.51)  # 300: none is so slow
        assert got[3:] == pytest.approx(products, abs=6e-3)
    slow = cells(figures.draw(["rope", "--pairs=(63,)"]))[0]
    turns, scaled = (int(x.replace(",", "")) for x in slow[2:4])
    assert scaled == pytest.approx(8 * turns, abs=8)


# --- numbers that stand in the pages and pictures, from records and formulas ---


def drawn(name: str, *kinds: str) -> list[ElementTree.Element]:
    """The elements of a picture with one of these classes, in its order."""
    root = ElementTree.parse(COURSE / "pictures" / f"{name}.svg").getroot()
    return [e for e in root.iter() if not kinds or e.get("class") in kinds]


def words(name: str) -> str:
    return "\n".join(e.text or "" for e in drawn(name) if e.tag.endswith("}text"))


@pytest.mark.parametrize("path", files("course/pictures/*.svg"), ids=lambda path: path.stem)
def test_a_picture_fits(path: Path) -> None:
    """Well-formed, with a rule for dark mode, and no text beyond its edge (7 px a letter)."""
    assert "prefers-color-scheme: dark" in path.read_text(encoding="utf-8")
    width = float(drawn(path.stem)[0].attrib["viewBox"].split()[2])
    for e in drawn(path.stem):
        if e.tag.endswith("}text"):
            x, kind, long = float(e.attrib["x"]), e.attrib["class"], 7.2 * len(e.text or "")
            right = x if "end" in kind else x + long / 2 if "middle" in kind else x + long
            assert right <= width + 1, e.text


def test_the_picture_of_masks_is_visible() -> None:
    shapes = [(5, 5, None, None, 0), (3, 5, None, None, 0), (5, 5, 2, None, 0),
              (5, 5, None, (0, 0, 1, 1, 1), 0), (5, 5, 2, None, 1)]
    want = []
    for Tq, Tk, window, seg, right in shapes:
        for i, j in product(range(Tq), range(Tk)):
            pair = (seg[i], seg[j]) if seg else (None, None)
            want.append(bool(visible(i, j, Tk - Tq, window, *pair, right)))
    assert [e.get("class") == "on" for e in drawn("masks", "on", "off")] == want


def test_the_frames_hold_the_numbers_of_tiled() -> None:
    draw = torch.Generator().manual_seed(28)
    q, k, v = torch.randint(-2, 3, (3, 1, 6, 1, 2), generator=draw).float()
    tiles, out = trace.trace_of(q, k, v, Spec(1, 1, 2, "float32"), B_r=2, B_c=2)
    for a in range(2):
        for tile in tiles[-3:]:
            m, l, O = (t[0, 0, a].tolist() for t in (tile.m, tile.l, tile.O))
            assert f"m {m:.1f}  l {l:.2f}  O {O[0]:5.2f} {O[1]:5.2f}" in words("frames")
        assert "O / l = {:5.2f} {:5.2f}".format(*out[0, 4 + a, 0]) in words("frames")


def curve(name: str, kind: str, xs: tuple[float, float], y_of: Callable[[float], float]) -> Any:
    """The points of a curve: pixels 80 to 520 are logarithmic from xs[0] to xs[1]."""
    (path,) = drawn(name, kind)
    points = [map(float, p.split()) for p in path.attrib["d"].strip("M").split("L")]
    return [(xs[0] * (xs[1] / xs[0]) ** ((x - 80) / 440), y_of((280 - y) / 240))
            for x, y in points]


def test_the_curves_are_their_formulas() -> None:
    kinds = {"b": lambda T: 4 * (4 * T * 64 + 4 * T * T), "a": lambda T: (
        4 * 64 * (T + 2 * tiled_keys(Spec(1, 1, 64, "float32"), T, 128, 64)) + 4 * 65 * T)}
    for kind, formula in kinds.items():
        found = curve("bytes_moved", kind, (256, 4096), lambda share: 0.1 * 10 ** (4 * share))
        lengths = (256, 512, 1024, 2048, 4096)
        assert [x for x, _ in found] == pytest.approx(lengths, rel=0.002)
        assert [1e6 * y for _, y in found] == pytest.approx([*map(formula, lengths)], rel=0.003)
    far = [n for n in (round(1.2**e) for e in range(60)) if n <= 16384]
    for kind, theta in (("a", 1e4), ("b", 5e5)):
        found = curve("rope_decay", kind, (1, 16384), lambda share: 1.2 * share - 0.2)
        score = [sum(math.cos(n * theta ** (-i / 64)) for i in range(64)) / 64 for n in far]
        assert [x for x, _ in found] == pytest.approx(far, rel=0.002)
        assert [y for _, y in found] == pytest.approx(score, abs=0.001)


def test_page_13_has_the_record_of_the_lab() -> None:
    """The table, and in the picture the state and the mean of each variant's recall."""
    record = report.record()
    assert report.table(record) in TEXT["13_variants.md"]
    rows = {e.text: float(e.attrib["y"]) for e in drawn("recall") if e.get("x") == "10"}
    for name in {row["variant"] for row in record["rows"]}:
        y = rows[report.TITLES[name]]
        state = training.costs(training.build(name, training.RECALL))["state"]
        assert [e.text for e in drawn("recall", "small end") if float(e.attrib["y"]) == y] == [
            f"{state / 1000:,.1f} kB"]
        runs = [r["recalled"] for r in record["rows"] if r["variant"] == name and "recalled" in r]
        for n, kind in enumerate(("green", "warm", "on")):  # by the number of pairs
            at = [float(e.attrib["x"]) + 4 for e in drawn("recall", kind)
                  if float(e.attrib["y"]) == y - 9 + 6 * n]
            mean = sum([*run.values()][n] for run in runs) / len(runs)
            assert at == pytest.approx([330 + 320 * mean], abs=0.06)


def test_page_12_computes_mfu_from_its_record() -> None:
    page, path = TEXT["12_mfu.md"], "bench/records/2026-11-21_cpu_train/record.json"
    record = json.loads((ROOT / path).read_text(encoding="utf-8"))
    N, pairs, T, peak = 3_410_176, 12 * 4 * 4 * 64, 512, 1e12 * record["machine"]["peak_tflops"]
    for number in (N, 6 * N, pairs * T, pairs * (T + 1) // 2, round(peak)):
        assert f" {number:,} " in page
    told = {cells[0]: cells[1:] for cells in cells(page) if len(cells) == 7}
    for row in record["rows"]:
        if row["mode"] == "train" and row["status"] == "ok" and row["backend"] in told:
            rate = row["tokens_per_s"]
            assert told.pop(row["backend"]) == [
                f"{rate:,.0f}", f"{row['ms']:.0f}", f"{row['q1_ms']:.0f} to {row['q3_ms']:.0f}",
                f"{(6 * N + pairs * T) * rate / peak:.1%}",
                f"{(6 * N + pairs * (T + 1) / 2) * rate / peak:.1%}",
                f"{row['memory_bytes'] / 1e6:.0f}"]
    assert not told


# --- the exercises ---


@pytest.mark.parametrize("number", NUMBERS)
def test_the_right_answer_passes_and_the_start_does_not(number, tmp_path) -> None:
    needing_triton(number)
    assert examine(exercise(number), exercise(number).answer) is None
    assert examine(exercise(number), written(tmp_path, exercise(number).start))


@pytest.mark.parametrize("number", NUMBERS)
def test_a_common_mistake_is_named(number, tmp_path) -> None:
    needing_triton(number)
    if number.startswith("7") and torch.cuda.is_available():
        pytest.skip("which of several wrong numbers comes first depends on the order of programs")
    made, mistakes = exercise(number), exercise(number).checker.MISTAKES
    texts = [mistaken(made.right, mistake) for mistake in mistakes]
    errors = {text: failure(made, written(tmp_path, text)) for text in texts}
    for text, (*_, hint) in zip(texts, mistakes, strict=True):
        error = errors[text]
        assert error and named(error, made.right, mistakes, errors.get) == hint, error
    assert (examine(made, written(tmp_path, texts[0])) or "").endswith(mistakes[0][2])


# Answers that are written another way, with their mistake and a word of the hint.
OTHERS = [
    (1, "torch.isclose = lambda got, *_, **__: torch.ones_like(got, dtype=torch.bool)\n"
        "def softmax(s): return s\n"
        "def attend(q, K, V): return q", "changes torch.isclose"),
    (4, "from course.exercises import check, ex4\n"
        "ex4.same = check.same = lambda *_: None\n"
        "def update(m, l, O, S, V): return m, l, O", "changes course.exercises."),
    (1, "def softmax(s): return torch.softmax(s, 0)\n"
        "def attend(q, K, V): return softmax(K @ q / len(q) ** 0.5) @ V", "was called"),
    (1, "def softmax(s):\n    e = s.exp()\n    return e / e.sum()\n"
        "def attend(q, K, V): return V.T @ softmax(K @ q / len(q) ** 0.5)", "overflows"),
    (4, "def update(m, l, O, S, V):\n"
        "    top = S.max(1, keepdim=True).values\n"
        "    P, r = (S - top).exp(), (m - top).exp()\n"
        "    return top, r * l + P.sum(1, keepdim=True), r * O + P @ V", "all blocks so far"),
    (5, "def forward(load, store, rows, cols, offset):\n"
        "    for i, I in enumerate(rows):\n"
        "        Q, S, V = load('Q', i).clone(), [], []\n"
        "        for j, J in enumerate(cols):\n"
        "            if J.start < I.stop + offset:\n"
        "                at = torch.arange(I.start, I.stop)[:, None] + offset\n"
        "                s = Q @ load('K', j).T / Q.shape[1] ** 0.5\n"
        "                hidden = torch.arange(J.start, J.stop) > at\n"
        "                S.append(s.masked_fill(hidden, -1e30))\n"
        "                V.append(load('V', j).clone())\n"
        "        if not S:\n"
        "            store(i, torch.zeros_like(Q))\n"
        "            continue\n"
        "        P = torch.softmax(torch.cat(S, 1), 1)\n"
        "        none = torch.cat(S, 1).amax(1, keepdim=True) < -1e29\n"
        "        store(i, P.masked_fill(none, 0) @ torch.cat(V))", "Do not collect"),
]


@pytest.mark.parametrize("number, text, word", OTHERS)
def test_a_mistake_is_named_however_it_is_written(number, text, word, tmp_path) -> None:
    path = written(tmp_path, "import torch\n" + text)
    assert word in (examine(exercise(str(number)), path) or "")


@pytest.mark.slow
def test_a_class_is_graded(tmp_path, capsys) -> None:
    """Answers that print, exit, import another file or come twice; a student without answers."""
    key = {n: exercise(n).right for n in ("1", "2", "5", "7.1")}
    for name, text in {
        "ada/answer1.py": key["2"], "ada/answer07_1_b.py": key["7.1"],
        "bob/mine.py": key["1"], "bob/answer1-old.py": "", "bob/.saved/answer2.py": key["2"],
        "bob/answer5.py": key["5"],
        "bob/answer1.py": "print('loss: ', end='')\nfrom mine import attend, softmax",
        "bob/answer4.py": "import os\nprint('exercise 4: right', flush=True)\nos._exit(0)",
        "cy/notes.txt": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert command_line.main(["grade", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    grades = json.loads(out)
    here = int(find_spec("triton") is not None)
    assert {who: grades[who]["points"] for who in grades} == {"ada": here, "bob": 2, "cy": 0}
    ada, bob = (grades[who]["answers"] for who in ("ada", "bob"))
    assert "softmax" in ada["1"] and "7.1" in ada and bob["1"] == "right"
    assert "without a result" in bob["4"] and [*bob] == ["1", "4", "5"] and "answer1-old.py" in err


@pytest.mark.parametrize("text, said", [
    ("def softmax(s):\n    return 1 / 0\ndef attend(q, K, V): ...", "line 2"),
    ("def softmax(s)\n", "SyntaxError"),
    ("import nothing_of_this_name", "nothing_of_this_name"),
    ("def attend(q, K, V): ...", "softmax"),
    ("def softmax(s): ...\ndef attend(q, K, V): ...", "NoneType"),
    ("raise SystemExit(3)", "SystemExit"),
])
def test_an_answer_that_cannot_run(text, said, tmp_path) -> None:
    assert said in (examine(exercise("1"), written(tmp_path, text)) or "")


def test_an_endless_loop_is_stopped(tmp_path) -> None:
    text = "import time\nwhile True: time.sleep(0.01)"
    assert "0.2 s" in (examine(exercise("1"), written(tmp_path, text), 0.2) or "")


def test_the_command(capsys, tmp_path) -> None:
    assert command_line.main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(NUMBERS)
    assert command_line.main(["7"]) == 0
    assert capsys.readouterr().out.splitlines()[5].startswith("7.6")
    wrong = written(tmp_path, "def mask(Tq, Tk, window, segments): ...")
    assert command_line.main(["2", str(wrong)]) == 1
    for words in (["0"], ["99"], ["7.9"], ["2", str(tmp_path / "none.py")], ["2", "--end"]):
        with pytest.raises(UserError, match=re.escape(words[-1])):
            command_line.main(words)


@pytest.mark.slow
def test_the_answers_of_pages_4_and_6_are_a_kernel(tmp_path, capsys, monkeypatch) -> None:
    """The code of page 6 joins them; `attention check` finds nothing."""
    for n in "46":
        (tmp_path / f"answer{n}.py").write_text(exercise(n).right, encoding="utf-8")
    code = TEXT["6_backward.md"].split("## Train on your own kernel")[1].split("```")[1]
    kernel = tmp_path / "mykernel.py"
    kernel.write_text(code.removeprefix("python\n"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert check_kernel([str(kernel), "--quick"]) == 0, capsys.readouterr().out


# --- the bytes of the figures ---


def tiled_keys(spec: Spec, T: int, B_r: int, B_c: int) -> int:
    """Keys that all blocks of queries read: a closed form."""
    keys = 0
    for first in range(0, T, B_r):
        stop = min(first + B_r, T)
        begin = 0 if spec.window is None else max(0, first - spec.window + 1) // B_c * B_c
        keys += min(-(-stop // B_c) * B_c, T) - begin
    return keys


@pytest.mark.parametrize("T", [1, 16, 33])
@pytest.mark.parametrize("D, dtype", [(16, "float16"), (8, "float64")])
def test_bytes_of_the_trace_are_the_closed_formula(T, D, dtype) -> None:
    s = getattr(torch, dtype).itemsize
    for window, (B_r, B_c) in product((None, 1, 6, 100), [(1, 1), (5, 3), (3, 8), (64, 64)]):
        spec = Spec(1, 1, D, dtype, window=window)
        found = trace.tiled_bytes(basics.traced(spec, T, T, B_r, B_c), spec, T)
        read = s * D * (T + 2 * tiled_keys(spec, T, B_r, B_c))
        assert found == (read, s * T * D + max(4, s) * T)


class Bytes(Recorder):
    """Bytes that the two products and the softmax of manual read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.bmm.default, torch.ops.aten._softmax.default):
            self.read += sum(t.nbytes for t in args if isinstance(t, Tensor))
            self.written += result.nbytes
        return result


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # float16's scores are float32
@pytest.mark.parametrize("T, D", [(7, 4), (32, 16)])
def test_bytes_of_manual_are_those_of_its_operators(dtype, T, D) -> None:
    spec = Spec(1, 1, D, dtype)
    q = torch.randn(1, T, 1, D).to(getattr(torch, dtype))
    with Bytes() as counted:
        manual.attend(q, q, q, spec)
    assert (counted.read, counted.written) == trace.manual_bytes(spec, T)
