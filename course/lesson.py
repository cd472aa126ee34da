"""Functions that the cells of notebooks/attention.ipynb call."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec

import torch

from course import ROOT
from course.exercises import exercise
from course.exercises.check import examine, made_of
from course.figures.__main__ import draw


def figure(words: str) -> None:
    """Show a figure of the course: 'mask --Tq=3 --Tk=5'."""
    text = draw(shlex.split(words))
    display({"text/plain": text, "text/markdown": text})


def picture(name: str) -> None:
    """Show a picture of the course."""
    display(bundle(name))


def bundle(name: str) -> dict[str, str]:
    """Return a picture by MIME type."""
    file = f"course/pictures/{name}.svg"
    return {"image/svg+xml": (ROOT / file).read_text(encoding="utf-8"), "text/plain": file}


def check(number: int | float, *functions: Callable[..., object]) -> None:
    """Print whether an exercise is solved by these functions, else the first error and a hint."""
    why = examine(exercise(str(number)), made_of(*functions))
    end = f"{why}\nTo see a right answer: answer({number})" if why else "right"
    print(f"exercise {number}: {end}")


def answer(number: int | float) -> None:
    """Print a right answer."""
    print(exercise(str(number)).right.strip())


def compare_kernels() -> None:
    """Time manual, sdpa and triton on the GPU, with their errors against float64."""
    if not torch.cuda.is_available():
        print("No GPU here. Colab has one: Runtime > Change runtime type > T4 GPU.")
        return
    import bench_mfu

    missing = [] if find_spec("triton") else [" (triton is not installed)"]
    print("A few minutes: each kernel runs in its own process.", *missing)
    bench_mfu.main(["kernel", "--backends=manual,sdpa,triton", "--lengths=512,2048",
                    "--batch_sizes=8", "--minutes=4"])


def display(data: dict[str, str]) -> None:
    """Show the best of these forms in a notebook, elsewhere the plain text."""
    if "ipykernel" in sys.modules:
        from IPython.display import display as show

        show(data, raw=True)
    else:
        print(data["text/plain"])
