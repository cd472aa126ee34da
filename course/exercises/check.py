"""Check an answer within a time limit; name its mistake (named.py)."""

from __future__ import annotations

import math
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

from course.exercises import Exercise
from course.exercises.named import Wrong as Wrong
from course.exercises.named import named
from course.exercises.named import same as same

CHECKERS = ("course.exercises", "attention.check")  # modules that an answer must leave as they are


def examine(
    exercise: Exercise, answer: Path | ModuleType, seconds: float = 60.0
) -> str | None:
    """Check an answer, a Python file or module. Returns None, or the first error."""
    for package in getattr(exercise.checker, "NEEDS", ()):
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


def failure(exercise: Exercise, answer: Path | ModuleType) -> BaseException | None:
    places = [math, torch, *(m for name, m in sys.modules.items() if name.startswith(CHECKERS))]
    before = [(place, dict(vars(place))) for place in places]
    error: BaseException | None = None
    try:
        if isinstance(answer, Path):
            answer = load(answer, exercise.names)
        exercise.checker.check(answer)
    except (Exception, SystemExit) as e:
        error = e
    for place, old in before:
        for name in (n for n in old if callable(new := vars(place).get(n)) and new is not old[n]):
            if str(vars(place)[name].__module__).partition(".")[0] != "torch":  # as Dynamo does
                setattr(place, name, old[name])
                error = error or AssertionError(f"the answer changes {place.__name__}.{name}")
    return error


def hint(exercise: Exercise, error: BaseException) -> str:
    """Return the hint of the mistake that fails in the same way, or ""."""
    with tempfile.TemporaryDirectory() as folder:

        def fails(text: str) -> BaseException | None:
            path = Path(folder) / f"mistake{len(list(Path(folder).iterdir()))}.py"
            path.write_text(text, encoding="utf-8")
            return failure(exercise, path)

        if fails(exercise.right):  # the machine is at fault, not the answer
            return ""
        why = named(error, exercise.right, exercise.checker.MISTAKES, fails)
        return f". {why}" if why else ""


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
    them, in any file of its folder."""
    called, folder = [], Path(str(answer.__file__)).resolve().parent

    def watch(frame: FrameType, event: str, function: object) -> None:
        name = frame.f_code.co_name if event == "call" else getattr(function, "__name__", "")
        if event in ("call", "c_call") and name in names:
            own = event == "call" and Path(frame.f_code.co_filename).resolve().parent == folder
            called.extend([] if own else [name])

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)
    if called:
        raise Wrong(f"{called[0]}() was called: {instead}")


def draws(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Normally distributed numbers."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=draw) for shape in shapes]


def causal(Tq: int, Tk: int, offset: int) -> Tensor:
    """(Tq, Tk) bool: query i sees key j where j <= i + offset."""
    return torch.arange(Tk) <= torch.arange(Tq)[:, None] + offset


def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax(q k^T / sqrt(D)) v over the visible keys, and L, the logarithm of the sum of
    exp(s). A query that sees no key gets zeros, and -inf.

    q: (..., Tq, D), k and v: (..., Tk, D), seen: (Tq, Tk) bool.
    """
    S = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    none = ~seen.any(dim=1, keepdim=True)
    P = S.masked_fill(none, 0).softmax(dim=-1).masked_fill(none, 0)
    return P @ v, S.logsumexp(dim=-1)


class Live(TorchDispatchMode):
    """The most numbers that the tensors made in this context hold at one time, and the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, weakref.ref[Tensor]] = {}
        self.most = self.largest = 0

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func: Callable[..., object], types, args=(), kwargs=None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, Tensor):
                self.alive[t.untyped_storage()._cdata] = weakref.ref(t)
                self.largest = max(self.largest, t.numel())
        living = {key: t for key, ref in self.alive.items() if (t := ref()) is not None}
        self.alive = {key: self.alive[key] for key in living}
        self.most = max(self.most, sum(t.untyped_storage().nbytes() // 4 for t in living.values()))
        return made


def several(got: object, n: int, function: str) -> tuple[Tensor, ...]:
    assert isinstance(got, (tuple, list)) and len(got) == n, f"{function} must return {n} values"
    return tuple(got)
