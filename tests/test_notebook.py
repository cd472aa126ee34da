"""The notebooks run, and the site is complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import test_train
from checkout import ROOT, files

from course import lesson, site
from course.exercises import exercise


def executed(name: str, folder: Path, **changes: str) -> str:
    """In one namespace, from the notebook's folder, as Jupyter does."""
    book = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    nbformat.validate(book)
    code = [cell.source for cell in book.cells if cell.cell_type == "code"]
    for n, text in enumerate(code):  # files: a Triton kernel reads its own source
        for old, new in changes.items():
            text = text.replace(old, new)
        (folder / f"{n}.py").write_text(text, encoding="utf-8")
    run = ("import sys; del sys.path[0]\n"  # notebooks/
           f"for n in range({len(code)}):\n    file = r'{folder}/%d.py' % n\n"
           "    exec(compile(open(file, encoding='utf-8').read(), file, 'exec'), globals())")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", run], cwd=ROOT / "notebooks", text=True,
                          capture_output=True, env={**environment, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_lesson_runs_unsolved(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    said = executed("attention", tmp_path)
    checked = re.findall(r"^exercise ([\d.]+): (?!right)", said, re.M)
    assert checked == [*"123456", *(f"7.{n}" for n in range(1, 7))]
    differences = [float(x) for x in re.findall(r"largest difference.*? (\d\S+e-\d+)$", said, re.M)]
    assert len(differences) == 5 and max(differences) < 1e-4
    assert "No GPU here" in said


@pytest.mark.slow
def test_qualify_keeps_its_record(tmp_path: Path) -> None:
    records = tmp_path / "records"
    changes = {'records"]': 'records", "--stages=1"]', "out/records": str(records)}
    said = executed("qualify", tmp_path, **changes)
    record = next(records.glob("*/record.json")).parent
    assert (record / "README.md").read_text(encoding="utf-8") in said
    archive = records / f"{record.name}.zip"
    assert str(archive) in said and archive.is_file()


@pytest.mark.parametrize("text, said", [
    (exercise("4").right, "exercise 4: right\n"),
    (exercise("4").start + "    1 / 0\n", "Keep the old sums"),
    ("def update(m, l, O, S, V):\n    1 / 0", "line 2"),
])
def test_a_function_is_checked_like_a_file(text: str, said: str, capsys: Any) -> None:
    made: dict[str, Any] = {}
    exec(compile(text, "cell", "exec"), made)
    lesson.check(4, made["update"])
    assert said in capsys.readouterr().out


@pytest.mark.slow
def test_the_site_is_complete(tmp_path: Path, chromium: Any) -> None:
    """Formulas are HTML, no file is from elsewhere, and it fits a phone."""
    pytest.importorskip("material")
    run, out = tmp_path / "run", tmp_path / "site"
    data = test_train.make_data(tmp_path, test_train.TEXT + site.PROMPT)
    test_train.run(data, run, max_iters=1, block_size=64)
    assert site.main([f"--run={run}", f"--out={out}"]) == 0
    assert "<math" in (out / "course/1_softmax.html").read_text(encoding="utf-8")
    assert "To be" in (out / "explain.html").read_text(encoding="utf-8")
    phone = chromium.new_page(viewport={"width": 420, "height": 800})
    away: list[str] = []  # requests that need a network
    phone.on("request", lambda r: r.url.startswith("file:") or away.append(r.url))
    for page in files("course/[0-9]*.md", "course/answers.md", "docs/*.md"):
        made = (out / page.relative_to(ROOT)).with_suffix(".html")
        text = made.read_text(encoding="utf-8")
        text = re.sub(r"<(code|script|style)\b.*?</\1>|<[^>]*>", "", text, flags=re.S)
        assert not re.findall(r"\$[^$]+\$|\]\(", text), page.name  # formulas and links
        phone.goto(made.as_uri())
        assert phone.evaluate("document.documentElement.scrollWidth") <= 420, page.name
    assert not away
