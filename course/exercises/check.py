"""Check an answer within a time limit."""

from __future__ import annotations

import re
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor


def examine(exercise: ModuleType, path: Path, seconds: float = 60.0) -> str | None:
    """Check an answer, a Python file. Returns None, or the first error."""
    found: list[str | None] = []

    def work() -> None:
        try:
            exercise.check(load(path, re.findall(r"^def (\w+)", exercise.START, re.M)))
            found.append(None)
        except (Exception, SystemExit) as e:
            found.append(describe(e, path))

    # A thread: a signal cannot interrupt a long call into torch.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else f"not finished after {seconds:g} s: is there an endless loop?"


def load(path: Path, names: list[str]) -> ModuleType:
    module = ModuleType("answer")
    module.__file__ = str(path)
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    for name in names:
        assert callable(getattr(module, name, None)), f"{path.name} must define {name}()"
    return module


def describe(e: BaseException, path: Path) -> str:
    lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if Path(f.filename) == path]
    if isinstance(e, AssertionError) and not lines:
        return str(e)
    at = f" at line {lines[-1]} of {path.name}" if lines else ""
    return f"{type(e).__name__}{at}: {e.__cause__ or e}"


def several(got: object, n: int, function: str) -> tuple[Tensor, ...]:
    assert isinstance(got, (tuple, list)) and len(got) == n, f"{function} must return {n} values"
    return tuple(got)


def same(
    got: object, want: Tensor, what: str, case: str = "", mistakes: Mapping[str, Tensor] = {}
) -> None:
    """Assert that `got` equals `want` up to rounding; `mistakes`: hints for wrong values."""
    assert isinstance(got, Tensor), f"{what} must be a tensor, got {type(got).__name__}, {case}"
    assert (got.shape, got.dtype) == (want.shape, want.dtype), (
        f"{what} must have shape {tuple(want.shape)} and dtype {want.dtype}, got "
        f"{tuple(got.shape)} and {got.dtype}, {case}"
    )
    wrong = torch.nonzero(~close(got.detach(), want)).tolist()
    if wrong:
        at = tuple(wrong[0])
        hints = [f". {why}" for why, x in mistakes.items() if close(got.detach(), x).all()]
        raise AssertionError(
            f"{what}{list(at)} is {got[at].item():.4g}, expected {want[at].item():.4g}, {case}"
            + "".join(hints[:1])
        )


def close(got: Tensor, want: Tensor) -> Tensor:
    """True within 100 rounding errors of the largest finite number."""
    finite = want.detach().abs().nan_to_num(posinf=0)
    room = 100 * torch.finfo(want.dtype).eps * max(1.0, float(finite.max()))
    return torch.isclose(got, want, rtol=0, atol=room, equal_nan=True)
