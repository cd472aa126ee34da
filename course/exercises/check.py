"""Check an answer within a time limit, and name its mistake: the replacement in the right answer
that fails in the same case with the same numbers."""

from __future__ import annotations

import math
import re
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Collection
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.exercises import Exercise


class Wrong(AssertionError):
    """A wrong answer: the case, and the value if there is one."""

    def __init__(self, message: str, case: str = "", value: Tensor | None = None) -> None:
        super().__init__(f"{message}, {case}" if case else message)
        self.case, self.value = case or message, value


def examine(exercise: Exercise, answer: Path | ModuleType, seconds: float = 60.0) -> str | None:
    """None, or the first error of a Python file or module."""
    if exercise.number.startswith("7.") and find_spec("triton") is None:
        return "this exercise needs the package triton: pip install triton"
    found: list[str | None] = []

    def work() -> None:
        error = failure(exercise, answer)
        found.append(None if error is None else describe(error, answer) + hint(exercise, error))

    # A signal cannot interrupt a long call into torch.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else f"not finished after {seconds:g} s: is there an endless loop?"


def failure(exercise: Exercise, answer: Path | ModuleType) -> BaseException | None:
    """The error, if any; an answer must leave torch and the checker as they are."""
    checker = [m for name, m in sys.modules.items() if name.startswith("course.exercises")]
    before = [(place, dict(vars(place))) for place in (math, torch, *checker)]
    error: BaseException | None = None
    try:
        exercise.check(load(answer, exercise.names) if isinstance(answer, Path) else answer)
    except BaseException as e:  # of its thread
        error = e
    for place, old in before:
        for name in (n for n in old if callable(new := vars(place).get(n)) and new is not old[n]):
            if str(vars(place)[name].__module__).partition(".")[0] != "torch":  # as Dynamo does
                setattr(place, name, old[name])
                error = error or AssertionError(f"the answer changes {place.__name__}.{name}")
    return error


def hint(exercise: Exercise, error: BaseException) -> str:
    """The hint of the mistake that fails alike, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        for n, (old, new, why) in enumerate([("", "", ""), *exercise.mistakes]):
            path = Path(folder, f"mistake{n}.py")
            path.write_text(exercise.right.replace(old, new), encoding="utf-8")
            fails = failure(exercise, path)
            if n == 0 and fails is not None:  # the machine's fault
                return ""
            if alike(error, fails):
                return f". {why}"
    return ""


def alike(a: BaseException, b: BaseException | None) -> bool:
    """The same case and numbers."""
    if not isinstance(a, Wrong) or not isinstance(b, Wrong):
        known = isinstance(a, Exception) and not isinstance(a, (AssertionError, NameError))
        return known and type(a) is type(b) and cause(a) == cause(b)
    if a.case != b.case or a.value is None or b.value is None:
        return a.case == b.case and a.value is b.value
    same_kind = a.value.shape == b.value.shape and a.value.dtype == b.value.dtype
    return same_kind and bool(close(a.value, b.value).all())


def cause(e: BaseException) -> str:
    """The first line, without places in a file."""
    return re.sub(r"at \d+:\d+:", "", str(e.__cause__ or e)).strip().partition("\n")[0]


def load(path: Path, names: list[str]) -> ModuleType:
    module = ModuleType("answer")
    module.__file__ = str(path)
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    for name in names:
        assert callable(getattr(module, name, None)), f"{path.name} must define {name}()"
    return module


def made_of(*functions: Callable[..., object]) -> ModuleType:
    answer = ModuleType("answer")
    for function in functions:
        plain = getattr(function, "fn", function)
        setattr(answer, plain.__name__, function)
        answer.__file__ = plain.__code__.co_filename
    return answer


def describe(e: BaseException, answer: Path | ModuleType) -> str:
    name = answer.name if isinstance(answer, Path) else "the cell"
    file = str(answer if isinstance(answer, Path) else answer.__file__)
    lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == file]
    if isinstance(e, AssertionError) and not lines:
        return str(e)
    at = f" at line {lines[-1]} of {name}" if lines else ""
    return f"{type(e).__name__}{at}: {e.__cause__ or e}"


def compare(function: Callable[..., object], inputs: Collection[object],
            wanted: dict[str, Tensor], case: str) -> None:
    """Raise Wrong unless the function, with copies of the inputs, returns `wanted`."""
    got = function(*(x.clone() if isinstance(x, Tensor) else x for x in inputs))
    n, several = len(wanted), got if isinstance(got, (tuple, list)) else ()
    values = several if n > 1 else (got,)
    assert len(values) == n, f"{function.__name__}() must return {n} values"
    for value, (name, want) in zip(values, wanted.items()):
        same(value, want, name, case)


def same(got: object, want: Tensor, what: str, case: str = "") -> None:
    """Raise Wrong unless equal up to rounding."""
    if not isinstance(got, Tensor):
        raise AssertionError(f"{what} must be a tensor, got {type(got).__name__}, {case}")
    got = got.detach()
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        raise Wrong(f"{what} must have shape {tuple(want.shape)} and dtype {want.dtype}, got "
                    f"{tuple(got.shape)} and {got.dtype}", case, got)
    if wrong := torch.nonzero(~close(got, want)).tolist():
        at = tuple(wrong[0])
        place = f"{what}{list(at)}" if at else what
        says = f"{place} is {got[at].item():.6g}, expected {want[at].item():.6g}"
        raise Wrong(says, case, got)


def close(got: Tensor, want: Tensor) -> Tensor:
    """Within 100 rounding errors of the largest finite number."""
    if not want.is_floating_point():
        return got == want
    finite = want.detach().abs().nan_to_num(posinf=0)
    room = 100 * torch.finfo(want.dtype).eps * max(1.0, float(finite.max()))
    return torch.isclose(got, want, rtol=0, atol=room, equal_nan=True)


class Forbidding(TorchFunctionMode):
    """Raise Wrong where a PyTorch function of these names is called."""

    def __init__(self, *names: str, instead: str) -> None:
        super().__init__()
        self.names, self.instead = names, instead

    def __torch_function__(  # type: ignore[no-untyped-def]
        self, func: Callable[..., object], types, args=(), kwargs=None
    ) -> object:
        if func.__name__.removeprefix("special_") in self.names:
            raise Wrong(f"{func.__name__}() was called: {self.instead}")
        return func(*args, **(kwargs or {}))


def draws(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=draw) for shape in shapes]


def causal(Tq: int, Tk: int, offset: int) -> Tensor:
    """(Tq, Tk) bool: query i sees key j where j <= i + offset."""
    return torch.arange(Tk) <= torch.arange(Tq)[:, None] + offset


def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Out (..., Tq, D) over the keys seen (Tq, Tk), and L (..., Tq)."""
    S = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    none = ~seen.any(dim=1, keepdim=True)
    P = S.masked_fill(none, 0).softmax(dim=-1).masked_fill(none, 0)
    return P @ v, S.logsumexp(dim=-1)


class Live(TorchDispatchMode):
    """Peak and largest size of new tensors, in numbers."""

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
