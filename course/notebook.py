"""Notebooks of notebooks/*.md and the course's pages.

A ```{code-cell} fence is a code cell; `<!-- include: course/1_softmax.md -->` stands for a page,
with pictures, figures and exercises as code cells.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from course import ROOT
from course.exercises import exercise
from course.lesson import bundle

REPOSITORY = re.findall(r'\nRepository = "(.+)"', (ROOT / "pyproject.toml").read_text("utf-8"))[0]
CODE = f"{REPOSITORY}/blob/main"
COLAB = CODE.replace("//github.com", "//colab.research.google.com/github")
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
NOTEBOOKS = ("attention", "qualify")
LEFT_OUT = "## Train on your own kernel"  # it needs files next to train.py
CELL = "```{code-cell}\n%s\n```"
FENCE = r"^```%s\n((?:.*\n)*?)```$"
Cell = dict[str, Any]


def notebook(name: str) -> str:
    text = (ROOT / "notebooks" / f"{name}.md").read_text(encoding="utf-8")
    text = re.sub(r"^<!-- include: (\S+) -->$", lambda m: included(ROOT / m[1]), text, flags=re.M)
    badge = f"{BADGE}({COLAB}/notebooks/{name}.ipynb)"
    for mark, words in (("repository", REPOSITORY), ("code", CODE), ("badge", badge)):
        text = text.replace(f"{{{{{mark}}}}}", words)
    cells: list[Cell] = []
    for n, part in enumerate(re.split(FENCE % r"\{code-cell\}", text, flags=re.M)):
        if n % 2:
            cells.append(code(part.strip()))
            continue
        sections = filter(None, map(str.strip, re.split(r"^(?=##+ )", part, flags=re.M)))
        cells += [{"cell_type": "markdown", "metadata": {}, "source": section.splitlines(True)}
                  for section in sections]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"accelerator": "GPU", "colab": {"gpuType": "T4"}, "kernelspec": kernel}
    content = {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def code(lines: str) -> Cell:
    """A code cell; the output of a picture."""
    drawn = re.fullmatch(r'picture\("(\w+)"\)', lines)
    data = {k: v.splitlines(True) for k, v in bundle(drawn[1]).items()} if drawn else {}
    output = {"output_type": "display_data", "metadata": {}, "data": data}
    # Without Triton "run all" goes on.
    metadata = {"tags": ["raises-exception"]} if lines.startswith("import triton") else {}
    return {"cell_type": "code", "execution_count": None, "metadata": metadata,
            "outputs": [output] if drawn else [], "source": lines.splitlines(True)}


def included(path: Path) -> str:
    """A page with code cells, headings a level lower, and absolute links."""

    def absolute(link: re.Match[str]) -> str:
        target = (path.parent / link[1]).resolve()
        return f"]({CODE}/{target.relative_to(ROOT).as_posix()})"

    page = without_marks(path.read_text(encoding="utf-8"))
    page = re.sub(FENCE % "math", lambda m: f"$$\n{m[1]}$$", page, flags=re.M)
    page = re.sub(r"\]\((?!http|#|pictures/)([^)]+)\)", absolute, page)
    page = re.sub(r"^!\[.+\]\(pictures/(\w+)\.svg\)$", CELL % r'picture("\1")', page, flags=re.M)
    page = re.sub(FENCE % "sh", figures, page, flags=re.M)
    sections = re.split(r"^(?=## )", page, flags=re.M)
    kept = [exercise_cells(part) for part in sections if not part.startswith(LEFT_OUT)]
    return "".join(re.sub(r"\A#", "##", part) for part in kept)


def without_marks(page: str) -> str:
    """Drop the links to neighbors and the comments of course.build."""
    return re.sub(r"^\[Contents\].*\n\n|^<!-- .* -->\n", "", page, flags=re.M)


def figures(commands: re.Match[str]) -> str:
    """A cell for the figures of these commands, if any."""
    drawn = re.findall(r"^python -m course\.figures (.+)$", commands[1], re.M)
    return CELL % "\n".join(f"figure({words!r})" for words in drawn) if drawn else commands[0]


def exercise_cells(section: str) -> str:
    """An exercise gets cells for its start and its check."""
    number = re.match(r"## Exercise ([\d.]+):", section)
    if not number:
        return section
    made = exercise(number[1])
    start = f"```python\n{made.start}```"
    assert start in section, section
    check = CELL % f"check({made.number}, {', '.join(made.names)})"
    section = section.replace(start, f"{CELL % made.start.strip()}\n\n{check}")
    return re.sub(r"^```sh\n(?:.*\n)*?```\n", "", section, flags=re.M)
