"""Name the mistake in a wrong answer.

Common mistakes are replacements in the text of a right answer. A wrong answer that fails as one of
these does, in the same case with the same numbers, has that mistake.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Mistake = tuple[str, str, str]  # a text of the right answer, the wrong one, the hint


class Wrong(AssertionError):
    """A wrong answer: in which case, and the wrong value if there is one."""

    def __init__(self, message: str, case: str = "", value: Tensor | None = None) -> None:
        super().__init__(f"{message}, {case}" if case else message)
        self.case, self.value = case or message, value


def named(error: BaseException, right: str, mistakes: Sequence[Mistake],
          fails: Callable[[str], BaseException | None]) -> str:
    """Return the hint of the mistake that fails in the same way, or "".

    Args:
        right: the text of the right answer.
        fails: runs the text of an answer, and returns its error.
    """
    for mistake in mistakes:
        if alike(error, fails(mistaken(right, mistake))):
            return mistake[2]
    return ""


def mistaken(right: str, mistake: Mistake) -> str:
    """Return the right answer with that mistake in it."""
    old, new, _ = mistake
    assert old in right, old
    return right.replace(old, new)


def alike(a: BaseException, b: BaseException | None) -> bool:
    """True if both fail in the same way, with the same numbers."""
    if not isinstance(a, Wrong) or not isinstance(b, Wrong):
        known = isinstance(a, Exception) and not isinstance(a, (AssertionError, NameError))
        return known and type(a) is type(b) and cause(a) == cause(b)
    if a.case != b.case or a.value is None or b.value is None:
        return a.case == b.case and a.value is b.value
    same_kind = a.value.shape == b.value.shape and a.value.dtype == b.value.dtype
    return same_kind and bool(close(a.value, b.value).all())


def cause(e: BaseException) -> str:
    """Return the error's first line, without places in a file."""
    return re.sub(r"at \d+:\d+:", "", str(e.__cause__ or e)).strip().partition("\n")[0]


def same(got: object, want: Tensor, what: str, case: str = "") -> None:
    """Raise Wrong unless `got` equals `want` up to rounding."""
    if not isinstance(got, Tensor):
        raise AssertionError(f"{what} must be a tensor, got {type(got).__name__}, {case}")
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
