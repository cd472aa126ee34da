"""The truth and tolerance of attention/proof.py, without a Spec; random cases."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from torch import Tensor, device, dtype

from attention import Spec, proof
from attention.check.matrix import Case, agree
from attention.proof import Inputs, Result

Sides = st.none() | st.integers(0, 40)


def _call(of: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, options: Any) -> Result:
    more = [options.pop(name, None) for name in ("segments", "sinks", "alibi_slopes")]
    has = dict(zip(("segments", "sinks", "alibi"), (t is not None for t in more), strict=True))
    shape = q.shape[2], k.shape[2], q.shape[3], str(q.dtype).removeprefix("torch.")
    return of(Inputs(q, k, v, dout, *more), Spec(*shape, **has, **options))


def attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> Result:
    """In float64, on the CPU."""
    with device("cpu"):
        return _call(proof.truth, q.cpu(), k.cpu(), v.cpu(), dout.cpu(), options)


def plain(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> Result:
    return _call(proof.plain, q, k, v, dout, options)


def check(got: Result, rough: Result, exact: Result, dtype: dtype) -> None:
    agree(got, rough, exact, str(dtype).removeprefix("torch."))


@st.composite
def cases(draw: Any, longest: int = 70, layouts: tuple[str, ...] = ("contiguous",)) -> Case:
    """Any lengths, masks, heads and options of the contract."""
    Hkv, group = draw(st.sampled_from([(2, 1), (1, 3), (2, 2)]))
    window, right = draw(Sides), draw(st.just(0) | Sides)
    Tq, Tk = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    alibi = draw(st.sampled_from([False, False, True, "rows"]))
    if alibi and right != 0:  # refused with more queries than keys
        Tq = min(Tq, Tk)
    return Case(
        "random", Tq, Tk, Hkv * group, Hkv, draw(st.sampled_from([4, 16])),
        draw(st.integers(1, 3)), None if window is None else window + 1, right,
        draw(st.sampled_from([None, None, "packed", "many", "left"])),
        draw(st.sampled_from(layouts)), scale=draw(st.sampled_from([None, 0.5])),
        softcap=draw(st.sampled_from([None, None, 3.0])), sinks=draw(st.booleans()), alibi=alibi)
