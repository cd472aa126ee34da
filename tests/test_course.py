"""docs/course: what is generated is up to date, commands run, exercises tell right from wrong."""

from __future__ import annotations

import ast
import math
import re
import shlex
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from test_readme import commands

import bench_mfu
from attention import Spec, visible
from attention.__main__ import ALIASES, Options
from bench.config import load_config
from core import settings
from core.settings import UserError
from docs import build, figures, source
from docs.exercises import COUNT
from docs.exercises import __main__ as command_line
from docs.exercises.check import Wrong, call, close, examine, parts, same, show, small
from docs.format import table
from explain import ExplainConfig

ROOT = Path(__file__).resolve().parent.parent
COURSE = ROOT / "docs" / "course"
PAGES = sorted(COURSE.glob("[0-9]*_*.md"), key=lambda page: int(page.name.split("_")[0]))
TEXT = {page.name: page.read_text(encoding="utf-8") for page in [COURSE / "README.md", *PAGES]}
COMMANDS = list(dict.fromkeys(line for text in TEXT.values() for line in commands(text)))
ANSWERS = ROOT / "docs" / "exercises" / "answers"
WRONG = sorted((ROOT / "tests" / "wrong_answers").glob("ex*.py"))
NUMBERS = range(1, COUNT + 1)


def needing_triton(number: int) -> None:
    """Skip exercise 7 where it cannot be done."""
    if number == 7 and find_spec("triton") is None:
        pytest.skip("package 'triton' is not installed")


def written(folder: Path, text: str) -> Path:
    path = folder / "answer.py"
    path.write_text(text, encoding="utf-8")
    return path


# --- the pages ---


@pytest.mark.parametrize("name", TEXT)
def test_what_is_generated_is_up_to_date(name: str) -> None:
    """python -m docs.build writes it anew."""
    fresh, changed = build.rebuild(TEXT[name], COURSE / name)
    assert not changed
    assert fresh == TEXT[name]


def test_there_are_ten_pages_and_each_has_its_parts() -> None:
    assert [page.name.split("_")[0] for page in PAGES] == [str(n) for n in NUMBERS]
    for n, page in enumerate(PAGES, start=1):
        text = TEXT[page.name]
        assert text.startswith(f"# {n}. "), page.name
        parts_ = re.findall(r"^## (.+)$", text, re.M)
        assert parts_[0] == "What was wrong" and parts_[1].startswith("The idea"), page.name
        assert "Run it" in parts_ and parts_[-1] == f"Exercise {n}", page.name
        assert "<!-- code: " in text and "<!-- figure: " in text, page.name
        assert f"python -m docs.exercises {n}" in commands(text[text.rindex("## Exercise") :])


def test_each_page_leads_to_the_one_before_the_next_and_the_contents() -> None:
    for n, page in enumerate(PAGES):
        links = re.findall(r"\]\(([^)]+)\)", TEXT[page.name].split("\n## ")[0])
        around = [other.name for other in (*PAGES[n - 1 : n], *PAGES[n + 1 : n + 2])]
        assert links[: 1 + len(around)] == ["README.md", *around], page.name
        assert f"]({page.name})" in TEXT["README.md"]


@pytest.mark.parametrize("name", TEXT)
def test_every_link_leads_somewhere(name: str) -> None:
    for target in re.findall(r"\]\((?!http)([^)]+)\)", TEXT[name]):
        file, _, anchor = target.partition("#")
        path = (COURSE / file).resolve() if file else COURSE / name
        assert path.exists(), f"{name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
            anchors = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
            assert anchor in anchors, f"{name} links to {target}"


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_pages_runs(line, capsys, monkeypatch, tmp_path) -> None:
    """The quick ones run; of the others every option is checked."""
    monkeypatch.chdir(ROOT)
    line, _, redirected = line.partition(" > ")
    words = shlex.split(line)
    if words[0] == "make":
        text = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert words[1] in re.findall(r"^([a-z]+):", text, re.M)
    elif line == "source .venv/bin/activate":
        assert "BIN := .venv/bin" in (ROOT / "Makefile").read_text(encoding="utf-8")
    elif words[:3] == ["python", "-m", "docs.figures"]:
        assert figures.main(words[3:]) == 0
        assert capsys.readouterr().out.count("\n") >= 3
    elif words[:3] == ["python", "-m", "docs.exercises"]:
        needing_triton(int(words[3]) if words[4:] else 0)
        own = not (words[-1].endswith(".py") and "/" not in words[-1])  # else the learner's file
        if own:
            assert command_line.main(words[3:]) == 0
            text = capsys.readouterr().out
            assert text.strip()
            assert not redirected or compile(text, redirected, "exec")
        else:
            start = written(tmp_path, command_line.exercise(int(words[3])).START)
            assert command_line.main([words[3], str(start)]) == 1
    elif words[:3] == ["python", "-m", "attention"]:
        settings.read(Options, words[3:], aliases=ALIASES, positional="backend")
    elif words[:2] == ["python", "explain.py"]:
        settings.read(ExplainConfig, words[2:])
    elif words[:2] == ["python", "bench_mfu.py"] and words[2:3] == ["compare"]:
        assert all((ROOT / record).is_dir() for record in words[3:])
    elif words[:2] == ["python", "bench_mfu.py"]:
        load_config(words[3:] if words[2:] and words[2] in bench_mfu.MODES else words[2:])
    elif words[:3] == ["python", "-m", "pytest"]:
        file, _, test = words[3].partition("::")
        assert f"def {test}" in (ROOT / file).read_text(encoding="utf-8")
    else:
        raise AssertionError(f"unknown command: {line}")


# --- what makes them ---

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
    folder = tmp_path / "docs" / "course"
    folder.mkdir(parents=True)
    (folder / "1_page.md").write_text(PAGE, encoding="utf-8")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "COURSE", folder)
    squares = lambda n=2: table(("n", "n²"), [(m, m * m) for m in range(n)])  # noqa: E731
    monkeypatch.setitem(figures.FIGURES, "squares", squares)
    return folder / "1_page.md"


def test_build_writes_what_the_marks_say(course, capsys) -> None:
    assert build.main([]) == 0
    text = course.read_text(encoding="utf-8")
    block = "```python\nb = 1\nc = 2\nreturn b + c\n```\n<!-- end -->\nbetween\n"
    assert f"[sample.py](../../sample.py), `ask`:\n\n{block}" in text
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
    source = course.parents[2] / "sample.py"
    source.write_text(SOURCE.replace("c = 2", "c = 3"), encoding="utf-8")
    capsys.readouterr()
    assert build.main(["--check"]) == 1
    out = capsys.readouterr().out
    assert '1_page.md: is out of date: <!-- code: sample.py ask from "b = 1"' in out
    assert out.endswith("python -m docs.build writes them anew\n")
    assert "figure" not in out
    assert course.read_text(encoding="utf-8") == text
    source.write_text(SOURCE, encoding="utf-8")
    assert build.main(["--check"]) == 0
    course.write_text(text.replace("| 2 | 4  |", "| 2 | 5  |"), encoding="utf-8")
    assert build.main(["--check"]) == 1
    assert "is out of date: <!-- figure: squares --n=3 -->" in capsys.readouterr().out
    course.write_text(text.replace("| 2 | 4  |", "| 2 | 4   |"), encoding="utf-8")
    assert build.main(["--check"]) == 1  # to the letter
    course.write_text(text.replace("| 2 | 4  |\n", "| 2 | 4  |\n\n"), encoding="utf-8")
    assert build.main(["--check"]) == 1  # and to the line break


@pytest.mark.parametrize(
    "name, lines",
    [
        ("ask", SOURCE[SOURCE.index("@cached") : SOURCE.index("\n\nclass")]),
        ("Box.ask", "def ask(self):\n    return 5\n"),
        ("LIMIT", "LIMIT: int = (\n    3\n)\n"),
    ],
)
def test_functions_methods_and_constants_are_found(name, lines) -> None:
    assert source.source(SOURCE, name) == lines


def test_lines_are_cut_from_one_to_the_next_that_holds_a_text() -> None:
    text = "def f():\n    a = 1\n    b = a\n    return b\n    # a\n"
    assert build.cut(text, "b =", "a") == "b = a\n"  # which may be the same
    assert build.cut(text, "b =", "return") == "b = a\nreturn b\n"


@pytest.mark.parametrize(
    "old, new, complaint",
    [
        ("sample.py ask", "other.py ask", "there is no file other.py"),
        ("sample.py ask", "docs ask", "there is no file docs"),
        ("sample.py ask", "sample.py Box.tell", "there is no Box.tell"),
        ("b = 1", "d = 1", "no line there holds 'd = 1'"),
        ('to "return"', 'to "LIMIT"', "no line from there on holds 'LIMIT'"),
        (' to "return"', "", "expected: FILE NAME"),
        ("squares", "cubes", "no figure 'cubes'"),
        ("--n=3", "--m=3", "squares takes --n=2; got --m=3"),
        ("<!-- end -->\nbetween", "between", "no <!-- end -->"),
        ("old\n<!-- end -->\n", "", "no <!-- end -->"),
    ],
)
def test_a_mark_that_names_nothing_is_an_error(course, old, new, complaint) -> None:
    assert old in PAGE
    course.write_text(PAGE.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(complaint)) as caught:
        build.main(["--check"])
    assert "1_page.md" in str(caught.value)


def test_build_refuses_other_words() -> None:
    with pytest.raises(UserError, match="usage"):
        build.main(["--chek"])


def test_a_figure_without_options_takes_none(monkeypatch) -> None:
    monkeypatch.setitem(figures.FIGURES, "dot", lambda: ".")
    assert figures.draw(["dot"]) == "."
    with pytest.raises(UserError, match="dot takes no options; got --n=3"):
        figures.draw(["dot", "--n=3"])


# --- the figures of pages 1 to 5 ---


def cells(text: str) -> list[list[str]]:
    """The rows of a figure's table, without its head."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows[2:]]


def test_figures_are_listed_and_mistakes_are_told(capsys) -> None:
    assert figures.main([]) == 0
    out = capsys.readouterr().out
    made = [node for part in sorted((ROOT / "docs").glob("figures_*.py"))
            for node in ast.parse(part.read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef)]  # fmt: skip
    said = {node.name: (ast.get_docstring(node) or "").split("\n")[0] for node in made}
    listed = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert listed == {name: said[name] for name in listed} and [*listed] == [*figures.FIGURES]
    used = re.findall(r"<!-- figure: (\w+)", "".join(TEXT.values()))
    assert {*used} | {"plan", "saved"} == {*listed}  # those of docs/PLAN.md too
    for words, complaint in (
        (["masks"], "no figure 'masks'"),
        (["mask", "--T=3"], "--Tq=4"),
        (["mask", "Tq=3"], "got Tq=3"),
        (["mask", "--Tq=many"], "--Tq must be a number"),
        (["mask", "--window=0"], "at least 1"),
        (["mask", "--segments=(1, 2)"], "Tk = 4 numbers, got 2"),
        (["online", "--block=0"], "at least 1"),
        (["tiles", "--B_r=0"], "at least 1"),
        (["one_query", "--q=(1, 2)"], "as long as q"),
    ):
        with pytest.raises(UserError, match=re.escape(complaint)):
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


def test_a_mask_with_segments() -> None:
    drawn = figures.draw(["mask", "--Tq=2", "--Tk=4", "--segments=(8, 8, 8, 17)"]).splitlines()
    assert drawn[1:-1] == [
        "segment 8  8  8 17",
        "       k0 k1 k2 k3",
        "q0      x  x  x  .",
        "q1      .  .  .  x",
    ]
    assert "segment 2  1  1\n" in figures.draw(["mask", "--Tk=3", "--segments=(2, 1, 1)"])


def test_memory_is_four_times_as_large_at_twice_the_length() -> None:
    rows = cells(figures.draw(["memory", "--T=(256, 512)"]))
    (_, _, P, manual, tiled), (_, _, P2, manual2, tiled2) = (
        [float(cell.split()[0]) for cell in row] for row in rows
    )
    assert round(512**2 * 4 / 1e6, 2) == P2 and 3.9 < P2 / P < 4.1
    assert manual > P and 3 < manual2 / manual < 4
    assert 1.9 < tiled2 / tiled < 2.1
    assert round((4 * 512 * 64 + 512) * 4 / 1e6, 2) == tiled2  # Q, K, V, O and L, nothing else


@pytest.mark.parametrize("block", [1, 2, 3])
@pytest.mark.parametrize("scores", [(1, 3, 2, 5, 4, 0), (3, 2, 1), (1000, 1001, 999), (7,)])
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
        ]  # fmt: skip


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


def test_traffic_halves_with_twice_the_tile() -> None:
    rows = cells(figures.draw(["traffic", "--T=256", "--sizes=(8, 16, 32)"]))
    read = [float(row[3].split()[0]) for row in rows]
    s, D, T = 4, 64, 256
    assert read[0] == round(s * (3 * D * T + 2 * T * T) / 1e6, 2)
    assert read[1:] == [round(s * D * T * (T // b + 2) / 1e6, 2) for b in (8, 16, 32)]
    assert float(rows[2][1].split()[0]) == round(4 * (4 * 16 * 64 + 16 * 16 + 2 * 16) / 1024, 1)
    assert [row[2] for row in rows[1:]] == ["528", "136", "36"]


def test_scores_grow_with_the_root_of_d() -> None:
    for D, spread, without, with_ in cells(figures.draw(["scale"])):
        assert abs(float(spread) - math.sqrt(int(D))) <= 0.1 * math.sqrt(int(D))
        assert float(with_) < 0.15 < float(without)


# --- the exercises ---


@pytest.mark.parametrize("number", NUMBERS)
def test_a_reference_answer_passes(number) -> None:
    needing_triton(number)
    assert examine(command_line.exercise(number), ANSWERS / f"ex{number}.py") is None


@pytest.mark.parametrize("number", NUMBERS)
def test_a_start_runs_and_is_refused(number, tmp_path) -> None:
    needing_triton(number)
    exercise = command_line.exercise(number)
    complaint = examine(exercise, written(tmp_path, exercise.START))
    assert complaint is not None and len(complaint) > 40
    assert not re.match(r"\w*Error", complaint), "it must run"
    assert exercise.TASK.strip() and all(name in exercise.TASK for name in exercise.NAMES)


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_a_wrong_answer_is_refused_by_name(path) -> None:
    """Its first line says which words must stand in the complaint."""
    words = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# refused: ")
    number = int(path.stem.split("_")[0].removeprefix("ex"))
    needing_triton(number)
    complaint = examine(command_line.exercise(number), path)
    assert complaint is not None, "it passes"
    assert words in complaint
    assert len(words) > 8


def test_each_exercise_has_its_wrong_answers() -> None:
    for number in NUMBERS:
        assert sum(path.stem.startswith(f"ex{number}_") for path in WRONG) >= 3


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("def update(m:\n", "line 1 of answer.py is not Python"),
        ("x = 1", "answer.py must define update(); it defines no function"),
        ("def upate(): pass", "answer.py must define update(); it has upate"),
        ("update = 3", "answer.py must define update()"),
        ("import nothing_of_that_name", "ModuleNotFoundError at line 1 of answer.py"),
        ("raise SystemExit(0)", "SystemExit at line 1 of answer.py (raise SystemExit(0))"),
        (
            "def update(m, l, O, S, V):\n    return 1 / 0",
            "ZeroDivisionError at line 2 of answer.py (return 1 / 0): division by zero",
        ),
        (
            "import torch\ndef update(m, l, O, S, V):\n    return m @ O",
            "RuntimeError at line 3 of answer.py (return m @ O)",
        ),
        (
            "def update(m, l, O, S, V): return m",
            "update() returned one Tensor, must return m, l, O",
        ),
        ("def update(m, l, O, S, V): return m, l", "returned 2 values, must return m, l, O"),
        ("def update(m, l, O, S, V): return 1, 2, 3", "m is of type int, must be a tensor"),
        (
            "def update(m, l, O, S, V): return S, l, O",
            "m has shape (2, 2), must be of shape (2, 1)",
        ),
        ("def update(m): return m", "update() does not take what the task says: too many pos"),
    ],
)
def test_an_answer_that_does_not_run_is_told_why(text, complaint, tmp_path) -> None:
    got = examine(command_line.exercise(4), written(tmp_path, text))
    assert got is not None and complaint in got


def test_an_answer_may_change_its_inputs_in_place(tmp_path) -> None:
    text = (ANSWERS / "ex4.py").read_text(encoding="utf-8").replace(
        "    m_new =", "    S += 0; V *= 1.0; l.mul_(1); O.add_(0)\n    m_new ="
    )  # fmt: skip
    assert examine(command_line.exercise(4), written(tmp_path, text)) is None


def test_an_answer_that_does_not_end_is_left(tmp_path) -> None:
    began = time.monotonic()
    slow = written(tmp_path, "import time\ndef update(*args): time.sleep(60)")
    complaint = examine(command_line.exercise(4), slow, seconds=0.2)
    assert complaint == "no answer after 0.2 s: is there a loop that does not end?"
    assert time.monotonic() - began < 30  # it did not wait for the answer's minute


def test_a_file_that_is_not_there(tmp_path, capsys) -> None:
    with pytest.raises(UserError, match="there is no file"):  # exit code 2
        command_line.main(["4", str(tmp_path / "none.py")])


def test_the_command_line(capsys) -> None:
    assert command_line.main(["4", str(ANSWERS / "ex4.py")]) == 0
    assert capsys.readouterr().out == "exercise 4: right\n"
    wrong = next(path for path in WRONG if path.stem == "ex4_no_rescale_of_l")
    assert command_line.main(["4", str(wrong)]) == 1
    assert capsys.readouterr().out.startswith("exercise 4: l[0, 0] is ")
    assert command_line.main([]) == 0
    listed = capsys.readouterr().out.splitlines()[:COUNT]
    assert [line.split()[0] for line in listed] == [str(n) for n in NUMBERS]
    for words in (["0"], [str(COUNT + 1)], ["four"], ["4", "a.py", "b.py"]):
        with pytest.raises(UserError, match="usage"):
            command_line.main(words)


def test_complaints() -> None:
    want = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    same(want + 1e-6, want, "out")
    for got, mistakes, complaint in (
        (want + 1e-3, {}, "out[0, 0] is 1.001, must be 1, with x = 5"),
        (want * torch.tensor([1.0, 2.0]), {}, "out[0, 1] is 4, must be 2, with x = 5"),
        (want * 2, {"Halve it": want, "Not so twice": want * 2}, "x = 5. Not so twice"),
        (want * torch.nan, {"NaN": want * torch.nan}, "out[0, 0] is NaN, must be 1, with x = 5. N"),
        (want.double(), {}, "out is of dtype torch.float64, must be torch.float32"),
        (want[0], {}, "out has shape (2,), must be of shape (2, 2)"),
        (None, {}, "out is None, with x = 5: does the function return it?"),
        ([1.0], {}, "out is of type list, must be a tensor"),
    ):
        with pytest.raises(Wrong, match=re.escape(complaint)):
            same(got, want, "out", small(x=5), mistakes)
    with pytest.raises(Wrong, match=re.escape("s is 3, must be 2")):
        same(torch.tensor(3), torch.tensor(2), "s")
    with pytest.raises(Wrong, match=re.escape("s is NaN, must be 2")):
        same(torch.tensor(torch.nan), torch.tensor(2.0), "s")
    with pytest.raises(Wrong, match="returned None, must return a, b"):
        parts(None, ("a", "b"), "f()")
    assert close(torch.tensor([1e6, 0.0]), torch.tensor([1e6 + 1, 0.0])).all()  # of the largest
    assert not close(torch.tensor([-torch.inf]), torch.tensor([0.0])).any()
    assert small(a=torch.tensor([[1.0, 2.5]]), b=2) == "with a = [[1, 2.5]] and b = 2"
    assert show(torch.zeros(20)) == "a tensor of shape (20,)"
    assert call(lambda x: x.add_(1), want).tolist() == [[2, 3], [4, 5]] and want[0, 0] == 1


def test_exercise_5_counts_as_the_trace_does() -> None:
    """The loads of the reference answer are the bytes that viewer/tiles.py counts."""
    from docs.exercises.ex5 import CASES, Memory
    from viewer.tiles import steps, trace_of

    answer = import_module("docs.exercises.answers.ex5")
    for Tq, Tk, B_r, B_c in CASES:
        memory = Memory(Tq, Tk, B_r, B_c)
        answer.forward(memory.load, memory.store, memory.rows, memory.cols, memory.offset)
        q, k, v = (memory.main[name][None, :, None] for name in "QKV")
        spec = Spec(1, 1, 4, "float32")
        trace, out = trace_of(q, k, v, spec, B_r=B_r, B_c=B_c)
        moved = steps(trace, spec, Tq, Tk, B_r, B_c)
        torch.testing.assert_close(torch.cat([*memory.out.values()]), out[0, :, 0])
        loaded = sum(
            memory.main[name][(memory.rows if name == "Q" else memory.cols)[n]].nbytes * times
            for (i, name, n), times in memory.loads.items()
            if name != "Q" or any(s["read"] for s in moved if s["i"] == i)  # none: all masked
        )
        assert loaded == sum(s["read"] for s in moved)


def test_an_answer_that_loads_something_else_is_told(tmp_path) -> None:
    for call_, complaint in (
        ('load("W", 0)', 'load("Q", i), load("K", j) or load("V", j), got'),
        ('load("Q", 1)', "Q has blocks 0 to 0"),
        ('load("K", 0)', "came before any block of Q"),
        ("store(1, load('Q', 0))", "the output has blocks 0 to 0"),
        ("[store(0, load('Q', 0)) for _ in '12']", "stored twice"),
        ("None", "block 0 of the output was never stored"),
    ):
        text = f"def forward(load, store, rows, cols, offset):\n    {call_}\n"
        complaint_ = examine(command_line.exercise(5), written(tmp_path, text))
        assert complaint_ is not None and complaint in complaint_


def test_the_reference_mask_is_visible() -> None:
    """On more shapes than the exercise has."""
    answer = import_module("docs.exercises.answers.ex2")
    for Tq, Tk in ((1, 1), (4, 4), (3, 7), (7, 3)):
        i, j = torch.arange(Tq)[:, None], torch.arange(Tk)
        for window in (None, 1, 3, 20):
            want = visible(i, j, Tk - Tq, window)
            assert torch.equal(answer.mask(Tq, Tk, window, None), want)


def test_nothing_is_left_in_the_exercises_folder() -> None:
    known = {f"ex{n}.py" for n in NUMBERS} | {"__init__.py"}
    assert {path.name for path in ANSWERS.glob("*.py")} == known
