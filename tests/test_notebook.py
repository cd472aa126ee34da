"""The notebooks run, and the site is complete."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import browser as browsers
import nbformat
import pytest
import test_train
from checkout import ROOT, files

from course import lesson, site
from course.exercises import exercise

NAMES = ("attention.ipynb", "qualify.ipynb")


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_valid(name: str) -> None:
    """That it is up to date is a matter of test_course.py."""
    text = (ROOT / "notebooks" / name).read_text(encoding="utf-8")
    nbformat.validate(nbformat.reads(text, as_version=4))
    # The badge has the address of pyproject.toml.
    address = re.findall(r'\nRepository = "(.+)"', (ROOT / "pyproject.toml").read_text("utf-8"))[0]
    assert json.loads(text)["cells"][0]["source"][2].count(address.rpartition("//github.com")[2])


def executed(name: str, folder: Path, **changes: str) -> str:
    """Run the code cells in one namespace, from the notebook's folder, as Jupyter does."""
    cells = json.loads((ROOT / "notebooks" / name).read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for old, new in changes.items():
        code = [text.replace(old, new) for text in code]
    for n, text in enumerate(code):  # files: a Triton kernel reads its own source
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
    said = executed(NAMES[0], tmp_path)
    checked = re.findall(r"^exercise ([\d.]+): (?!right)", said, re.M)
    assert checked == [*"123456", *(f"7.{n}" for n in range(1, 7))]
    differences = [float(x) for x in re.findall(r"largest difference.*? (\d\S+e-\d+)$", said, re.M)]
    assert len(differences) == 5 and max(differences) < 1e-4
    assert "No GPU here" in said


@pytest.mark.slow
def test_qualify_keeps_its_record(tmp_path: Path) -> None:
    """With the first stage alone."""
    records = tmp_path / "records"
    said = executed(NAMES[1], tmp_path, **{'records"]': 'records", "--stages=1"]',
                                           "out/records": str(records)})
    record = next(records.glob("*/record.json")).parent
    assert (record / "README.md").read_text(encoding="utf-8") in said
    archive = records / f"{record.name}.zip"
    assert str(archive) in said and archive.is_file()


def test_a_function_is_checked_like_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    made: dict[str, Any] = {}
    exec(exercise("4").right, made)
    lesson.check(4, made["update"])
    assert capsys.readouterr().out == "exercise 4: right\n"
    exec(compile(exercise("4").start + "    1 / 0\n", "cell", "exec"), made)
    lesson.check(4, made["update"])
    assert "Keep the old sums" in capsys.readouterr().out
    exec(compile("def update(m, l, O, S, V):\n    1 / 0", "cell", "exec"), made)
    lesson.check(4, made["update"])
    assert "line 2" in capsys.readouterr().out


@pytest.mark.slow
def test_the_site_is_complete(tmp_path: Path) -> None:
    """Each page is there, its formulas are HTML, it loads files of the site alone, and it fits a
    phone."""
    pytest.importorskip("material")
    run, out = tmp_path / "run", tmp_path / "site"
    text = test_train.TEXT + site.PROMPT
    test_train.run(test_train.make_data(tmp_path, text), run, max_iters=1, block_size=64)
    assert site.main([f"--run={run}", f"--out={out}"]) == 0  # a dead link is an error
    pages = files("course/[0-9]*.md", "docs/*.md")
    unset: dict[str, list[str]] = {}  # formulas and links
    for page in pages:
        made = (out / page.relative_to(ROOT)).with_suffix(".html").read_text(encoding="utf-8")
        text = re.sub(r"<(code|script|style)\b.*?</\1>|<[^>]*>", "", made, flags=re.S)
        unset[page.name] = re.findall(r"\$[^$]+\$|\]\(", text)
    assert not any(unset.values()), unset
    assert "<math" in (out / "course/1_softmax.html").read_text(encoding="utf-8")
    assert "To be" in (out / "explain.html").read_text(encoding="utf-8")
    with browsers.running() as browser:
        phone = browser.new_page(viewport={"width": 420, "height": 800})
        away: list[str] = []  # requests that need a network
        phone.on("request", lambda r: r.url.startswith("file:") or away.append(r.url))
        for page in pages:
            phone.goto((out / page.relative_to(ROOT)).with_suffix(".html").as_uri())
            assert phone.evaluate("document.documentElement.scrollWidth") <= 420, page.name
        assert not away
