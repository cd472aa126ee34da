"""The notebooks, made of the course's pages and exercises; `python -m course.build` writes them.

A page becomes text cells. Its pictures, its commands that draw figures and its exercise become
code cells. Only the pictures have outputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from course.exercises.__main__ import exercise
from course.exercises.check import names
from course.lesson import bundle
from course.source import ROOT

# The address of the repository stands in pyproject.toml alone.
REPOSITORY = re.findall(r'\nRepository = "(.+)"', (ROOT / "pyproject.toml").read_text("utf-8"))[0]
CODE = f"{REPOSITORY}/blob/main"
Cell = dict[str, Any]  # of a notebook, as JSON
COURSE = ROOT / "course"
# The pages of the lesson by their names, without the numbers.
LESSON = ("softmax", "masks", "manual", "online_softmax", "tiles", "backward", "triton")
LEFT_OUT = ("Train on your own kernel",)  # sections that need files next to train.py

SETUP = f"""\
# In a checkout this cell only finds the code; elsewhere, as on Colab, it gets and installs it.
import os, subprocess, sys
from pathlib import Path


def checkout():
    here = Path.cwd()
    folders = (here, *here.parents, here / "nanoattn")
    return next((f for f in folders if (f / "attention" / "spec.py").exists()), None)


if checkout() is None:
    address = "{REPOSITORY}"
    subprocess.run(["git", "clone", "--depth=1", address, "nanoattn"], check=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "-e", "./nanoattn[train]"]
    subprocess.run(pip, check=True)
os.chdir(checkout())
sys.path.insert(0, os.getcwd())
"""

IMPORTS = """
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton kernels run on the CPU, slowly
from attention import BACKENDS, Spec
from course.lesson import answer, check, compare_kernels, figure, picture
"""

# A cell after the page's text, before its exercise or another section.
BEFORE = {"triton": "Backward"}
CELLS = {
    "manual": '''\
# The kernel of this page on random numbers: 2 sequences, 256 tokens, 4 heads over 2.
spec = Spec(n_head=4, n_kv_head=2, head_dim=64, dtype="float32")
torch.manual_seed(0)
q, k, v = (torch.randn(2, 256, heads, 64, requires_grad=True) for heads in (4, 2, 2))
out = BACKENDS["manual"].attend(q, k, v, spec)  # (B, T, H, D)
print(tuple(out.shape), out.dtype)''',
    "tiles": '''\
# The tiles compute what the formula computes.
tiled = BACKENDS["tiled"].attend(q, k, v, spec)
print(f"largest difference: {(tiled - out).abs().max():.1e}")''',
    "backward": '''\
# And their backward pass gives autograd's gradients of the formula.
dout = torch.randn_like(out)
ours = torch.autograd.grad(tiled, (q, k, v), dout, retain_graph=True)
theirs = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
for name, a, b in zip("qkv", ours, theirs):
    print(f"d{name}: largest difference {(a - b).abs().max():.1e}")''',
    "triton": '''\
# The Triton kernel, on the GPU or in the interpreter.
from importlib.util import find_spec

if find_spec("triton") is None:
    print("triton is not installed: pip install triton")
else:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_device = [x[:, :64].detach().to(device) for x in (q, k, v)]
    fused = BACKENDS["triton"].attend(*on_device, spec)
    print(f"largest difference on {device}: {(fused.cpu() - out[:, :64]).abs().max():.1e}")''',
}

INTRODUCTION = """\
# Attention, from the dot product to FlashAttention in Triton

{badge}

The first pages of [the course]({code}/course/README.md) with cells to run. No page needs a GPU.
Each exercise has a cell to complete and a checker that names common mistakes. No later cell needs
your answers.
"""

TIMES = """\
## Which kernel is faster, and how exact is it?

On a GPU the next cell times `manual` (page 3), PyTorch's `sdpa` and our `triton` kernel, forward
and backward, and compares each with float64 (`err out`, `err grad`). It runs
`python bench_mfu.py kernel`.
"""

QUALIFY = """\
# Measure your GPU

{badge}

Nine minutes: correctness of every kernel on this machine, then the speed of attention, training
and generation, in one record to compare with [the others]({code}/docs/BOARD.md). Choose a GPU
before you begin (Colab: Runtime > Change runtime type).
"""

MEASURE = """\
# The same as: python bench_mfu.py qualify --record=qualify --records_dir=out/records
import bench_mfu

bench_mfu.main(["qualify", "--record=qualify", "--records_dir=out/records"])"""

SHOW = """\
from course.lesson import display

record = max(Path("out/records").glob("*/record.json"), key=os.path.getmtime).parent
text = (record / "README.md").read_text(encoding="utf-8")
display({"text/plain": text, "text/markdown": text})"""

DOWNLOAD = """\
import shutil

archive = shutil.make_archive(str(record), "zip", record.parent, record.name)
print(archive)
if "google.colab" in sys.modules:
    from google.colab import files

    files.download(archive)"""

SEND = """\
## Send it

Unpack the archive in `bench/records/` of a checkout of [the repository]({address}), run
`python -m bench.board`, then `python -m bench.board --check`, and open a pull request with the new
folder and `docs/BOARD.md`. Or attach the archive to an [issue]({address}/issues/new).
[MEASURE]({code}/docs/MEASURE.md#records) explains what the check verifies.
"""


def notebooks() -> dict[str, str]:
    """Return the notebooks as JSON, by file name."""
    lesson = [text(INTRODUCTION, "attention"), code(SETUP + IMPORTS)]
    for name in LESSON:
        page = next(COURSE.glob(f"[0-9]*_{name}.md"))
        lesson += page_cells(page.read_text(encoding="utf-8"), name)
    lesson += [text(TIMES), code("compare_kernels()")]
    qualify = [text(QUALIFY, "qualify"), *map(code, (SETUP, MEASURE, SHOW, DOWNLOAD)),
               text(SEND.format(address=REPOSITORY, code=CODE))]
    return {"attention.ipynb": notebook(lesson), "qualify.ipynb": notebook(qualify)}


def page_cells(page: str, name: str) -> Iterator[Cell]:
    """Yield the cells of a page."""
    page = re.sub(r"\]\((?!http|#|pictures/)([^)]+)\)", absolute, without_marks(page))
    for section in re.split(r"^(?=## )", page, flags=re.M):
        title = section.partition("\n")[0].removeprefix("## ")
        if title in LEFT_OUT:
            continue
        number = re.fullmatch(r"Exercise ([\d.]+)(: .+)?", title)
        if name in CELLS and title.startswith(BEFORE.get(name, "Exercise")):
            yield code(CELLS[name])
        # Pictures and figures by commands become cells of their own, in their places.
        apart = r"(^!\[.+\]\(.+\)$|^```(?:sh|python)\n(?:.*\n)+?```$)"
        for part in re.split(apart, section, flags=re.M):
            if drawn := re.fullmatch(r"!\[.+\]\(pictures/(\w+)\.svg\)", part):
                yield code(f'picture("{drawn[1]}")', bundle(drawn[1]))
            elif figures := re.findall(r"^python -m course\.figures (.+)$", part, re.M):
                yield code("\n".join(f"figure({words!r})" for words in figures))
            elif number and re.match("```sh|```python\nimport triton", part):
                yield from exercise_cells(number[1])
            elif part.strip():
                yield text(re.sub(r"\A#", "##", part.strip()))


def without_marks(page: str) -> str:
    """The page without the line of links to its neighbors and the comments for course.build."""
    return re.sub(r"^\[Contents\].*\n\n|^<!-- .* -->\n", "", page, flags=re.M)


def exercise_cells(number: str) -> Iterator[Cell]:
    made = exercise(number)
    yield text(f"```text\n{made.TASK.strip()}\n```")
    start = code(made.START)
    if hasattr(made, "NEEDS"):  # without the package "run all" goes on
        start["metadata"]["tags"] = ["raises-exception"]
    yield start
    yield code(f"check({number}, {', '.join(names(made))})")


def absolute(link: re.Match[str]) -> str:
    """The address of a file that a page links to: a notebook may be opened without the others."""
    file, hash_, anchor = link[1].partition("#")
    return f"]({CODE}/{(COURSE / file).resolve().relative_to(ROOT).as_posix()}{hash_}{anchor})"


def text(words: str, name: str = "") -> Cell:
    """A text cell; in the first one `name` is the notebook's, for its badge."""
    if name:
        image = "https://colab.research.google.com/assets/colab-badge.svg"
        opens = CODE.replace("//github.com", "//colab.research.google.com/github")
        badge = f"[![Open in Colab]({image})]({opens}/notebooks/{name}.ipynb)"
        words = words.format(badge=badge, code=CODE)
    return {"cell_type": "markdown", "metadata": {}, "source": words.strip().splitlines(True)}


def code(lines: str, shown: dict[str, str] | None = None) -> Cell:
    """A code cell, with its output where it shows a picture."""
    data = {kind: value.splitlines(True) for kind, value in (shown or {}).items()}
    output = {"output_type": "display_data", "metadata": {}, "data": data}
    return {"cell_type": "code", "execution_count": None, "metadata": {},
            "outputs": [output] if data else [], "source": lines.strip().splitlines(True)}


def notebook(cells: list[Cell]) -> str:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"accelerator": "GPU", "colab": {"gpuType": "T4"}, "kernelspec": kernel}
    content = {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
