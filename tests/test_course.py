"""The course: up-to-date pages, true numbers, exercises that tell right from wrong."""

from __future__ import annotations

import json
import math
import re
import shlex
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from checkout import ROOT
from test_readme import SHOWN, rounds_to, rows_of

from attention import visible
from attention.check.command import main as check_kernel
from core.settings import UserError
from course import build
from course.exercises import NUMBERS, exercise
from course.exercises import __main__ as command
from course.exercises.check import examine
from course.figures import __main__ as figures
from course.lab import __main__ as lab

COURSE = ROOT / "course"
COMMANDS = [s for s in dict.fromkeys(SHOWN) if re.match(r"python -m course\.[ef]\w+s", s)]


def page(name: str) -> str:
    return (COURSE / name).read_text(encoding="utf-8")


def needing_triton(number: str) -> None:
    if number.startswith("7"):
        pytest.importorskip("triton")


# --- the pages ---


def test_what_is_generated_is_up_to_date(capsys) -> None:
    assert build.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_course_runs(line, capsys, tmp_path) -> None:
    line, _, redirected = line.partition(" > ")
    _, _, module, *words = shlex.split(line)
    if words[1:] and words[1].endswith(".py"):
        words[1] = str(tmp_path / "answer.py")
        Path(words[1]).write_text(exercise(words[0]).start, encoding="utf-8")
    needing_triton(words[0] if words[1:] else "")
    code = (figures if module == "course.figures" else command).main(words)
    text = capsys.readouterr().out
    assert text.strip() and code == (str(tmp_path) in " ".join(words))  # a start is wrong
    assert not redirected or compile(text, redirected, "exec")


MARKS = [  # a file, name, line, figure, option that is not there; values without a figure; no end
    "code: none.py f -->\n<!-- end", "code: model.py f -->\n<!-- end", "code: model.py GPT",
    'code: model.py GPT from "no such" to "line" -->\n<!-- end', "figure: musk -->\n<!-- end",
    *(f"figure: {words} -->\n<!-- end" for words in (
        "mask --Tz=1", "mask Tq=3", "mask --Tq=many", "mask --window=0", "mask --segments=(1,2)",
        "mask --Tk=3 --segments=(0,0,1)", "rope --pairs=(-1,)", "memory --T=()", "scale --T=0",
        "online --block=0", "one_query --q=(1,2)", "ring_work --T=100 --N=8", "rope --D=64")),
]


def test_a_stale_or_wrong_mark_is_found() -> None:
    text = page("5_tiles.md")
    for old, new in (("```python\n", "```python\n\n"), ("```text\n", "```text\n ")):
        fresh, changed = build.rebuild(text.replace(old, new, 1), COURSE / "page.md")
        assert fresh == text and len(changed) == 1
    for mark in MARKS:
        with pytest.raises(UserError, match=r"page\.md"):
            build.rebuild(f"<!-- {mark} -->\n", COURSE / "page.md")


# --- the numbers of the figures: the rows of a table, then the numbers below it ---


def seen(Tq: int, Tk: int, window: int | None = None) -> torch.Tensor:
    return torch.tensor([[bool(visible(i, j, Tk - Tq, window)) for j in range(Tk)]
                         for i in range(Tq)])


def memory() -> Any:
    """manual keeps q, k, v, P and a byte mask; tiled q, k, v, O and L."""
    rows = []
    for n in (256, 512):
        x, p = 4 * n * 64 * 4, 4 * n * n
        rows.append((n, x / 1e6, p / 1e6, (0.75 * x + 1.25 * p) / 1e6, (x + 4 * n) / 1e6))
    return rows, []


def online(scores: tuple[int, ...], block: int) -> Any:
    s, v = torch.tensor(scores).double(), torch.arange(1, len(scores) + 1).double()
    rows, before = [], -math.inf
    for n in range(0, len(s), block):
        past = s[: n + block]
        p, m = torch.exp(past - past.max()), float(past.max())
        rows.append([*past[n:], m, math.exp(before - m), p[n:].sum(), p.sum(), p @ v[: len(past)]])
        before = m
    out = s.softmax(0) @ v
    return rows, [out, len(s), out, s.logsumexp(0)]


def tiles(Tq: int, Tk: int, B_r: int, B_c: int, window: int | None) -> Any:
    """Each visited block of queries reads its Q once and the K and V of its tiles."""
    blocks = [b.split(B_c, 1) for b in seen(Tq, Tk, window).split(B_r)]
    visited = [t for row in blocks for t in row if t.any()]
    read = 4 * 64 * (Tq + 2 * sum(t.shape[1] for t in visited))
    three = [4 * (3 * 64 * Tq + 2 * Tq * Tk), 4 * (64 * Tq + 2 * Tq * Tk)] if Tq == Tk else []
    return [], [len(visited), sum(map(len, blocks)), read, 4 * (64 * Tq + Tq), *three]


def ring_work(N: int, T: int, window: int | None) -> Any:
    """Percent of visible pairs, by process and step; the slowest in a row below."""
    rows: list[list[float]] = []
    for place in (lambda t: t * N // T, lambda t: min(c := t * 2 * N // T, 2 * N - 1 - c)):
        count = torch.zeros(N, N)
        for i, j in seen(T, T, window).nonzero().tolist():
            count[place(i), (place(i) - place(j)) % N] += 1
        table = [row.tolist() for row in 100 * count / count.sum()]
        slowest = [[*map(max, zip(*table))]]
        rows += [[r, *row, sum(row)] for r, row in enumerate(table)]
        rows += [[*row, sum(row)] for row in slowest if row not in table]
    return rows, []


def rope() -> Any:
    """Wavelengths 2 pi theta^(i / 64), 8 times as long above 8,192 tokens."""
    rows = []
    for pair in (0, 63):
        turns = [math.tau * theta ** (pair / 64) for theta in (10000, 500000)]
        angles = [n / 500000 ** (pair / 64) for n in (1, 16, 256, 4096)]
        rows.append([pair, *turns, turns[1] * (8 if pair else 1), *map(math.cos, angles)])
    return rows, []


FIGURES: dict[str, Any] = {
    "memory --T=(256,512)": memory(),
    "online --scores=(1,3,2,5,4,0) --block=1": online((1, 3, 2, 5, 4, 0), 1),
    "online --scores=(1000,1001,999,2) --block=3": online((1000, 1001, 999, 2), 3),
    "tiles": tiles(64, 64, 8, 8, None),
    "tiles --Tq=33 --Tk=50 --B_r=5 --B_c=3 --window=6": tiles(33, 50, 5, 3, 6),
    "ring_work --N=3 --T=24 --window=10": ring_work(3, 24, 10),
    "rope --pairs=(0,63)": rope(),
}


def numbers(text: str) -> list[str]:
    return re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?", text.replace("10^6", ""))


@pytest.mark.parametrize("line", FIGURES)
def test_the_numbers_of_a_figure_are_its_formula(line) -> None:
    text, (rows, below) = figures.draw(line.split()), FIGURES[line]
    found = [[n for cell in row for n in numbers(cell)] for row in rows_of(text)]
    last = numbers(text.rpartition("\n\n")[2])[-len(below) :] if below else []
    for shown, wanted in zip([*found, last], [*rows, below], strict=True):
        for word, number in zip(shown, wanted, strict=True):
            assert rounds_to(float(number), word), shown


@pytest.mark.parametrize("Tq, Tk, window", [(4, 4, None), (3, 12, 5), (5, 2, None)])
def test_masks_and_tiles_are_drawn_as_visible_has_them(Tq, Tk, window) -> None:
    sees = seen(Tq, Tk, window)
    size = [f"--Tq={Tq}", f"--Tk={Tk}", f"--window={window}"]
    rows = [line.split()[1:] for line in figures.draw(["mask", *size]).splitlines()[2:-1]]
    assert rows == [["x" if x else "." for x in row] for row in sees.tolist()]
    drawn = figures.draw(["tiles", "--B_r=2", "--B_c=3", *size]).splitlines()[2:]
    for i, block in enumerate(sees.split(2)):
        tiles = block.split(3, 1)
        assert drawn[i].split()[1:] == ["x" if t.all() else "/" if t.any() else "." for t in tiles]


@pytest.mark.parametrize("threshold", [0.0, 8.0])
def test_lazy_rescaling_without_a_threshold_is_eager(threshold) -> None:
    words = ["lazy_rescaling", "--T=320", "--D=8", f"--threshold={threshold}"]
    for _, _, grew, past in rows_of(figures.draw(words)):
        assert (grew == past) == (threshold == 0) and int(past.split()[0]) <= int(grew.split()[0])


def test_the_picture_of_masks_is_visible() -> None:
    want = []
    for Tq, window, seg, right in [(5, None, None, 0), (3, None, None, 0), (5, 2, None, 0),
                                   (5, None, (0, 0, 1, 1, 1), 0), (5, 2, None, 1)]:
        for i, j in product(range(Tq), range(5)):
            pair = (seg[i], seg[j]) if seg else (None, None)
            want.append(bool(visible(i, j, 5 - Tq, window, *pair, right)))
    cells = (e.get("class") for e in ElementTree.parse(COURSE / "pictures" / "masks.svg").iter())
    assert [kind == "on" for kind in cells if kind in ("on", "off")] == want


def test_page_13_has_the_record_of_the_lab() -> None:
    record = json.loads((COURSE / "lab" / "record.json").read_text(encoding="utf-8"))
    assert lab.table(record) in page("13_variants.md")


def test_page_12_computes_mfu_from_its_record() -> None:
    text, path = page("12_mfu.md"), "bench/records/2026-11-21_cpu_train/record.json"
    record = json.loads((ROOT / path).read_text(encoding="utf-8"))
    N, pairs, T, peak = 3_410_176, 12 * 4 * 4 * 64, 512, 1e12 * record["machine"]["peak_tflops"]
    for number in (N, 6 * N, pairs * T, pairs * (T + 1) // 2, round(peak)):
        assert f" {number:,} " in text
    told = {name: cells for name, *cells in rows_of(text) if len(cells) == 6}
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


def verdict(number: str, text: str, folder: Path, seconds: float = 60) -> str:
    needing_triton(number)
    path = folder / "answer.py"
    path.write_text(text, encoding="utf-8")
    return examine(exercise(number), path, seconds) or "right"


@pytest.mark.parametrize("number, all_mistakes", [
    *((n, False) for n in NUMBERS if n not in ("7.5", "7.6")),
    *(pytest.param(n, True, marks=pytest.mark.slow) for n in NUMBERS)])
def test_an_exercise_tells_right_from_wrong(number, all_mistakes, tmp_path) -> None:
    task = exercise(number)
    assert verdict(number, task.right, tmp_path) == "right"
    assert verdict(number, task.start, tmp_path) != "right"
    if number.startswith("7") and torch.cuda.is_available():
        return  # which of several wrong numbers comes first depends on the order of programs
    for old, new, hint in task.mistakes[: None if all_mistakes else 1]:
        assert verdict(number, task.right.replace(old, new), tmp_path).endswith(hint)


LOOKUP = "def softmax(s): {}\ndef attend(q, K, V): return softmax(K @ q / len(q) ** 0.5) @ V"
ANSWERS = [  # exercise, answer, a part of the verdict
    (1, LOOKUP.format("return s.exp() / s.exp().sum()"), "overflows"),
    *((1, LOOKUP.format(f"return {ready}"), "was called") for ready in (
        "s.softmax(0)", "torch.nn.functional.softmax(s, 0)", "torch.special.softmax(s, 0)")),
    (1, LOOKUP.format("\n    return 1 / 0"), "line 3"),
    (1, LOOKUP.format("..."), "NoneType"),
    (1, "torch.isclose = lambda got, *_, **__: torch.ones_like(got, dtype=torch.bool)\n"
        + LOOKUP.format("return s"), "changes torch.isclose"),
    (1, "def attend(q, K, V): ...", "softmax"),
    (1, "def softmax(s)\n", "SyntaxError"),
    (1, "import nothing_of_this_name", "nothing_of_this_name"),
    *((1, f"raise {stop}", stop) for stop in ("SystemExit", "KeyboardInterrupt")),
    (1, "import time\nwhile True: time.sleep(0.01)", "0.2 s"),
    (3, "def attention(q, k, v, seen):\n"
        "    return torch.nn.functional.scaled_dot_product_attention(q, k, v)", "was called"),
    (4, "from course.exercises import check, pages_1_to_6\n"
        "pages_1_to_6.same = check.same = lambda *_: None\n"
        "def update(m, l, O, S, V): return m, l, O", "changes course.exercises."),
    (4, "def update(m, l, O, S, V):\n"
        "    top = S.max(1, keepdim=True).values\n"
        "    P, r = (S - top).exp(), (m - top).exp()\n"
        "    return top, r * l + P.sum(1, keepdim=True), r * O + P @ V", "all blocks so far"),
    (3, exercise("3").right.replace("~seen", "~torch.ones_like(seen).tril(len(k) - len(q))"),
     "a window"),
    (7.1, exercise("7.1").right.replace(", mask=d < D", ""), "a store outside Y"),
    (10, exercise("10").right.replace("torch.exp(x - both)", "torch.sigmoid(2 * x - L - L_new)"),
     "right"),
    (5, exercise("5").right + """
right, kept = forward, []
def load_and_keep(load):
    return lambda *which: kept.append(load(*which).clone()) or kept[-1]
def forward(load, *rest):
    kept.clear()
    right(load_and_keep(load), *rest)""", "Do not collect"),
]


@pytest.mark.parametrize("number, text, said", ANSWERS)
def test_an_answer_is_judged_however_it_is_written(number, text, said, tmp_path) -> None:
    endless = "while True" in text
    assert said in verdict(str(number), "import torch\n" + text, tmp_path, 0.2 if endless else 60)


@pytest.mark.slow
@pytest.mark.ci
def test_a_class_is_graded(tmp_path, capsys) -> None:
    """Answers that print, exit, import or come twice; a student without any."""
    for name, text in {
        "ada/answer1.py": exercise("2").right, "ada/answer07_1_b.py": exercise("7.1").right,
        "bob/mine.py": exercise("1").right, "bob/answer1-old.py": "", "bob/.saved/answer2.py": "",
        "bob/answer1.py": "print('loss: ', end='')\nfrom mine import attend, softmax",
        "bob/answer4.py": "import os\nprint('exercise 4: right', flush=True)\nos._exit(0)",
        "cy/notes.txt": "", ".git/config": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert command.main(["grade", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    grades = json.loads(out)
    here = int(find_spec("triton") is not None)
    assert {who: grades[who]["points"] for who in grades} == {"ada": here, "bob": 1, "cy": 0}
    ada, bob = (grades[who]["answers"] for who in ("ada", "bob"))
    assert "softmax" in ada["1"] and "7.1" in ada and "answer1-old.py" in err
    assert [*bob] == ["1", "4"] and bob["1"] == "right" != bob["4"]


def test_the_command_lists_and_refuses(capsys, tmp_path) -> None:
    for words, count in ([], len(NUMBERS)), (["7"], 6):
        assert command.main(words) == 0
        assert len(capsys.readouterr().out.splitlines()) == count
    for words in (["0"], ["99"], ["7.9"], ["2", str(tmp_path / "none.py")], ["2", "--end"]):
        with pytest.raises(UserError, match=re.escape(words[-1])):
            command.main(words)


@pytest.mark.slow
def test_the_answers_of_pages_4_and_6_are_a_kernel(tmp_path, capsys, monkeypatch) -> None:
    for n in "46":
        (tmp_path / f"answer{n}.py").write_text(exercise(n).right, encoding="utf-8")
    code = page("6_backward.md").split("## Train on your own kernel")[1].split("```")[1]
    kernel = tmp_path / "mykernel.py"
    kernel.write_text(code.removeprefix("python\n"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert check_kernel([str(kernel), "--quick"]) == 0, capsys.readouterr().out
