"""What the checkers share: loading an answer, running it with a time limit, complaints that teach.

A complaint is one or two sentences: what came out, what must, on which small input, and, where what
came out is what a typical mistake gives, the name of that mistake.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

SECONDS = 60.0


class Wrong(Exception):
    """An answer is refused; the text is the complaint."""


def examine(exercise: Any, path: Path, seconds: float = SECONDS) -> str | None:
    """Check an answer.

    Args:
        exercise: a module exN.
        path: the answer's file.
        seconds: how long its import and the check may take together.

    Returns:
        None for a right answer, else the complaint.
    """
    found: list[str | None] = []

    def work() -> None:
        try:
            getattr(exercise, "prepare", lambda: None)()
            exercise.check(load(path, exercise.NAMES))
            found.append(None)
        except Wrong as e:
            found.append(str(e))
        except (Exception, SystemExit) as e:
            if not any(Path(f.filename) == path for f in traceback.extract_tb(e.__traceback__)):
                raise  # not the learner's mistake but the checker's: the whole trace is wanted
            found.append(told(e, path))

    # A thread can be left behind, on every system; a signal could not stop a call of torch's.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return f"no answer after {seconds:g} s: is there a loop that does not end?"
    assert found, "the checker itself failed; its trace is above"
    return found[0]


def load(path: Path, names: tuple[str, ...]) -> ModuleType:
    """The answer as a module that defines the named functions.

    Raises:
        Wrong: there is no such file, it does not run, or a function is missing.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise Wrong(f"{path} cannot be read: {getattr(e, 'strerror', None) or e}") from None
    module = ModuleType("answer")
    module.__file__ = str(path)
    try:
        exec(compile(text, str(path), "exec"), module.__dict__)
    except SyntaxError as e:
        raise Wrong(f"line {e.lineno} of {path.name} is not Python: {e.msg}") from None
    except (Exception, SystemExit) as e:
        raise Wrong(told(e, path)) from None
    missing = [name for name in names if not callable(getattr(module, name, None))]
    if missing:
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == "answer"]
        has = f"it has {', '.join(own)}" if own else "it defines no function"
        raise Wrong(f"{path.name} must define {' and '.join(missing)}(); {has}")
    return module


def told(e: BaseException, path: Path) -> str:
    """What was raised, and the last line of the answer that led to it."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if Path(f.filename) == path]
    at = f" at line {frames[-1].lineno} of {path.name}" if frames else ""
    with contextlib.suppress(OSError, IndexError, TypeError):  # traceback's own cache may be stale
        at += f" ({path.read_text(encoding='utf-8').splitlines()[frames[-1].lineno - 1].strip()})"  # type: ignore[operator]
    return f"{type(e).__name__}{at}: {e}"


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the answer gives for copies of the inputs, so that it may change them in place.

    Raises:
        Wrong: it does not take so many arguments.
    """

    def copy(x: Any) -> Any:
        return x.clone() if isinstance(x, Tensor) else x

    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as e:
        raise Wrong(f"{function.__name__}() does not take what the task says: {e}") from None
    except ValueError:
        pass  # a function that is not Python's has no signature
    return function(*map(copy, args), **{name: copy(x) for name, x in kwargs.items()})


def parts(got: Any, names: tuple[str, ...], what: str) -> list[Any]:
    """The several values that `what` returned.

    Raises:
        Wrong: it returned something else, or another number of them.
    """
    if not isinstance(got, (tuple, list)):
        is_ = "None" if got is None else f"one {type(got).__name__}"
        raise Wrong(f"{what} returned {is_}, must return {', '.join(names)}")
    if len(got) != len(names):
        raise Wrong(f"{what} returned {len(got)} values, must return {', '.join(names)}")
    return list(got)


def same(got: Any, want: Tensor, what: str, given: str = "",
         mistakes: Mapping[str, Tensor] | None = None) -> None:  # fmt: skip
    """Refuse what is not the tensor that must come out, up to rounding.

    Args:
        what: what `got` is called, "out" or "m after block 2".
        given: the input, as small() writes it.
        mistakes: what typical mistakes give, each under a sentence that names it.

    Raises:
        Wrong: no tensor, another shape or kind of number, NaN, or other numbers.
    """
    given = given and f", {given}"
    if got is None:
        raise Wrong(f"{what} is None{given}: does the function return it?")
    if not isinstance(got, Tensor):
        raise Wrong(f"{what} is of type {type(got).__name__}, must be a tensor{given}")
    if got.shape != want.shape:
        raise Wrong(
            f"{what} has shape {tuple(got.shape)}, must be of shape {tuple(want.shape)}{given}"
        )
    if got.dtype != want.dtype:
        raise Wrong(f"{what} is of dtype {got.dtype}, must be {want.dtype}{given}")
    got = got.detach()
    off = ~close(got, want)
    if not off.any():
        return
    # The first place that differs; the first NaN if there is one, since that tells more.
    off = got.isnan() if got.is_floating_point() and got.isnan().any() else off
    at = tuple(torch.nonzero(off)[0].tolist())
    where = f"[{', '.join(map(str, at))}]" if at else ""
    why = next((name for name, v in (mistakes or {}).items() if alike(got, v)), None)
    why = why and f". {why}"
    must = want[at] if not close(torch.zeros_like(want), want)[at] else torch.zeros_like(want[at])
    raise Wrong(f"{what}{where} is {show(got[at])}, must be {show(must)}{given}{why or ''}")


def close(got: Tensor, want: Tensor) -> Tensor:
    """Where two tensors of one shape are equal up to rounding; NaN equals NaN."""
    if not want.is_floating_point():
        return got == want
    finite = want[want.isfinite()]
    eps = torch.finfo(want.dtype).eps
    room = 100 * eps * (1.0 if not len(finite) else max(1.0, float(finite.abs().max())))
    return torch.isclose(got, want, rtol=0, atol=room, equal_nan=True)


def alike(got: Tensor, mistake: Tensor) -> bool:
    return got.shape == mistake.shape and bool(close(got, mistake.to(got.dtype)).all())


def small(**inputs: Any) -> str:
    """The inputs as text: "with q = [1, 0] and k = a tensor of shape (8, 4)"."""
    each = [f"{name} = {show(x)}" for name, x in inputs.items()]
    return "with " + " and ".join(filter(None, [", ".join(each[:-1]), each[-1]]))


def show(x: Any) -> str:
    """A value in few digits; a tensor of more than 12 numbers by its shape."""
    if isinstance(x, Tensor):
        if x.numel() > 12:
            return f"a tensor of shape {tuple(x.shape)}"
        return show(x.tolist())
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(show, x))}]"
    if isinstance(x, float):
        return f"{x:.4g}" if math.isfinite(x) else str(x).replace("nan", "NaN")
    return str(x)
