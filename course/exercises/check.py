"""Check an answer within a time limit; name its mistake.

An exercise lists common mistakes as replacements in its own right answer. A wrong answer that fails
as one of these does, at the same place with the same numbers, gets that mistake's hint.
"""

from __future__ import annotations

import re
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, ModuleType

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ANSWERS = Path(__file__).resolve().parent / "answers"
Mistake = tuple[str, str, str]  # a text of the right answer, the wrong one, the hint


class Wrong(AssertionError):
    """A wrong answer: in which case, and the wrong value if there is one."""

    def __init__(self, message: str, case: str = "", value: Tensor | None = None) -> None:
        super().__init__(f"{message}, {case}" if case else message)
        self.case, self.value = case or message, value


def examine(
    exercise: ModuleType, answer: Path | ModuleType, seconds: float = 60.0
) -> str | None:
    """Check an answer, a Python file or module. Returns None, or the first error."""
    for package in getattr(exercise, "NEEDS", ()):
        if find_spec(package) is None:
            return f"this exercise needs the package {package}: pip install {package}"
    found: list[str | None] = []

    def work() -> None:
        error = failure(exercise, answer)
        found.append(None if error is None else describe(error, answer) + hint(exercise, error))

    # A thread: a signal cannot interrupt a long call into torch.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else f"not finished after {seconds:g} s: is there an endless loop?"


def failure(exercise: ModuleType, answer: Path | ModuleType) -> BaseException | None:
    try:
        if isinstance(answer, Path):
            answer = load(answer, names(exercise))
        exercise.check(answer)
    except (Exception, SystemExit) as e:
        return e
    return None


def names(exercise: ModuleType) -> list[str]:
    """Return the names of the functions that an answer defines."""
    return re.findall(r"^def (\w+)", exercise.START, re.M)


def hint(exercise: ModuleType, error: BaseException) -> str:
    """Return the hint of the mistake that fails in the same way, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        for n, (_, _, why) in enumerate(exercise.MISTAKES):
            path = Path(folder) / f"mistake{n}.py"
            path.write_text(mistaken(exercise, n), encoding="utf-8")
            if alike(error, failure(exercise, path)):
                return f". {why}"
    return ""


def mistaken(exercise: ModuleType, n: int) -> str:
    """Return the right answer with mistake `n` in it."""
    right = (ANSWERS / f"{exercise.__name__.rpartition('.')[2]}.py").read_text(encoding="utf-8")
    old, new, _ = exercise.MISTAKES[n]
    assert old in right, old
    return right.replace(old, new)


def alike(a: BaseException, b: BaseException | None) -> bool:
    if not isinstance(a, Wrong) or not isinstance(b, Wrong):
        known = isinstance(a, Exception) and not isinstance(a, (AssertionError, NameError))
        return known and type(a) is type(b) and cause(a) == cause(b)
    if a.case != b.case or a.value is None or b.value is None:
        return a.case == b.case and a.value is b.value
    alike = a.value.shape == b.value.shape and a.value.dtype == b.value.dtype
    return alike and bool(close(a.value, b.value).all())


def cause(e: BaseException) -> str:
    """Return the error's first line, without places in a file."""
    return re.sub(r"at \d+:\d+:", "", str(e.__cause__ or e)).strip().partition("\n")[0]


def load(path: Path, names: list[str]) -> ModuleType:
    module = ModuleType("answer")
    module.__file__ = str(path)
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    for name in names:
        assert callable(getattr(module, name, None)), f"{path.name} must define {name}()"
    return module


def made_of(*functions: Callable[..., object]) -> ModuleType:
    """Return an answer made of the functions of a notebook's cell."""
    answer = ModuleType("answer")
    for function in functions:
        plain = getattr(function, "fn", function)  # of a Triton kernel
        setattr(answer, plain.__name__, function)
        answer.__file__ = plain.__code__.co_filename
    return answer


def describe(e: BaseException, answer: Path | ModuleType) -> str:
    file, name = str(answer), "the cell"
    if isinstance(answer, Path):
        name = answer.name
    else:
        file = str(answer.__file__)
    lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == file]
    if isinstance(e, AssertionError) and not lines:
        return str(e)
    at = f" at line {lines[-1]} of {name}" if lines else ""
    return f"{type(e).__name__}{at}: {e.__cause__ or e}"


@contextmanager
def forbidding(answer: ModuleType, names: Collection[str], instead: str) -> Iterator[None]:
    """Within this context the answer must not call a function of these names, but its own may have
    them."""
    called = []

    def watch(frame: FrameType, event: str, function: object) -> None:
        name = frame.f_code.co_name if event == "call" else getattr(function, "__name__", "")
        own = event == "call" and frame.f_code.co_filename == answer.__file__
        if event in ("call", "c_call") and name in names and not own:
            called.append(name)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)
    if called:
        raise Wrong(f"{called[0]}() was called: {instead}")


class Live(TorchDispatchMode):
    """The most numbers that the tensors made in this context hold at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, weakref.ref[Tensor]] = {}
        self.most = 0

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func: Callable[..., object], types, args=(), kwargs=None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, Tensor):
                self.alive[t.untyped_storage()._cdata] = weakref.ref(t)
        living = {key: t for key, ref in self.alive.items() if (t := ref()) is not None}
        self.alive = {key: self.alive[key] for key in living}
        self.most = max(self.most, sum(t.untyped_storage().nbytes() // 4 for t in living.values()))
        return made


def several(got: object, n: int, function: str) -> tuple[Tensor, ...]:
    assert isinstance(got, (tuple, list)) and len(got) == n, f"{function} must return {n} values"
    return tuple(got)


def same(got: object, want: Tensor, what: str, case: str = "") -> None:
    """Raise Wrong unless `got` equals `want` up to rounding."""
    assert isinstance(got, Tensor), f"{what} must be a tensor, got {type(got).__name__}, {case}"
    got = got.detach()
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        raise Wrong(f"{what} must have shape {tuple(want.shape)} and dtype {want.dtype}, got "
                    f"{tuple(got.shape)} and {got.dtype}", case, got)
    if wrong := torch.nonzero(~close(got, want)).tolist():
        at = tuple(wrong[0])
        says = f"{what}{list(at)} is {got[at].item():.4g}, expected {want[at].item():.4g}"
        raise Wrong(says, case, got)


def close(got: Tensor, want: Tensor) -> Tensor:
    """True within 100 rounding errors of the largest finite number."""
    if not want.is_floating_point():
        return got == want
    finite = want.detach().abs().nan_to_num(posinf=0)
    room = 100 * torch.finfo(want.dtype).eps * max(1.0, float(finite.max()))
    return torch.isclose(got, want, rtol=0, atol=room, equal_nan=True)
