"""The flash-attn packages: our calls against stand-ins that compute what the packages document.

Few machines have the packages, so each has a stand-in here: its functions have the documented
signature (an unknown argument is a TypeError), refuse what the real ones refuse, and compute the
documented semantics in float64, differentiably, from nested loops over the documented window. Held
to the oracle, a wrong layout, window, alignment, cu_seqlens or page table fails; dropout_p and
deterministic are recorded. The real packages run in tests/test_attention.py's matrix on a GPU, and
at the end of this file.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_attention import REQUIRED, _need
from torch import Tensor

from attention import (
    BACKENDS,
    BackendUnavailable,
    Machine,
    Policy,
    Spec,
    flash,
    flash_impl,
    get,
    matrix,
    oracle,
    probe,
    promises,
    resolve,
    visible,
)
from attention.matrix import CASES, Case
from attention.views import PagedView, StaticView, kept

HALF = (torch.float16, torch.bfloat16)
STRICT = Policy(fallback=False)

# --- what the packages document ---


def one_sequence(q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int | None,
                 right: int | None, scale: float | None, softcap: float, dropout_p: float = 0.0,
                 sink: Tensor | None = None) -> Tensor:  # fmt: skip
    """q (Tq, H, D), k and v (Tk, Hkv, D) -> (Tq, H, D), in float64, rounded once.

    "Query at position i will only attend to keys between [i + seqlen_k - seqlen_q - window_size[0],
    i + seqlen_k - seqlen_q + window_size[1]] inclusive"; causal: the right side is 0; "If the row
    of the mask is all zero, the output will be zero" (docstrings of all three). None, and in 2 and
    3 a negative number, is no limit. Query heads h of a group share key head h // (H / Hkv).
    "softmax_scale: The scaling of QK^T before applying softmax. Default to 1 / sqrt(headdim)";
    "softcap: Anything > 0 activates softcapping attention"; a sink's exp joins a row's sum.
    """
    (Tq, H, D), (Tk, Hkv) = q.shape, k.shape[:2]
    right = 0 if causal else right
    rows = []
    for i in range(Tq):
        at = i + Tk - Tq
        low = 0 if left is None else at - left
        high = Tk - 1 if right is None else at + right
        rows.append([low <= j <= high for j in range(Tk)])
    seen = torch.tensor(rows).view(Tq, Tk)
    out = []
    for h in range(H):
        keys, values = (t[:, h // (H // Hkv)].double() for t in (k, v))
        scores = q[:, h].double() @ keys.T * (D**-0.5 if scale is None else scale)
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        empty = ~seen.any(dim=1, keepdim=True)
        scores = scores.masked_fill(empty, 0)
        if sink is not None:
            scores = torch.cat((scores, sink[h].double().expand(Tq, 1)), dim=1)
        probs = torch.softmax(scores, dim=1)[:, : len(k)].masked_fill(empty, 0)
        if dropout_p:
            probs = probs * (torch.rand(probs.shape) >= dropout_p) / (1 - dropout_p)
        out.append(probs @ values)
    return torch.stack(out, dim=1).to(q.dtype)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, step: int = 1, widest: int = 256) -> None:
    """What csrc/flash_attn/flash_api.cpp and its successors check of every call."""
    assert q.dtype in HALF and q.dtype == k.dtype == v.dtype, "only fp16 and bf16, all the same"
    for t in (q, k, v):
        assert t.stride(-1) == 1, "Input tensor must have contiguous last dimension"
    assert k.shape == v.shape and q.shape[-1] == k.shape[-1] <= widest
    assert q.shape[-1] % step == 0, f"head_size should be a multiple of {step}"
    assert q.shape[-2] % k.shape[-2] == 0


def check_sink(q: Tensor, sink: Tensor | None) -> None:
    """flash_attn/cute/interface.py since 4.0.0b26; before only bfloat16."""
    assert sink is None or sink.shape == (q.shape[-2],)
    assert sink is None or sink.dtype in (*HALF, torch.float32)


def dense(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """(B, T, H, D): a sequence for each of the batch."""
    assert q.dim() == k.dim() == 4 and q.shape[0] == k.shape[0]
    return torch.stack([one_sequence(*qkv, *rest) for qkv in zip(q, k, v, strict=True)])


def varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
           *rest: Any) -> Tensor:  # fmt: skip
    """(total, H, D), sequence n from cu[n] to cu[n + 1]."""
    assert q.dim() == k.dim() == 3
    for cu, most, total in ((cu_q, max_q, len(q)), (cu_k, max_k, len(k))):
        assert cu.dtype == torch.int32 and cu.is_contiguous() and isinstance(most, int)
        assert cu[0] == 0 and cu[-1] == total and (cu.diff() >= 0).all()
        assert cu.diff().max() <= most, "rows past max_seqlen would not be computed"
    assert len(cu_q) == len(cu_k)
    ends = zip(*(itertools.pairwise(cu.tolist()) for cu in (cu_q, cu_k)), strict=True)
    return torch.cat([one_sequence(q[a:b], k[c:d], v[c:d], *rest) for (a, b), (c, d) in ends])


def cached(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, seqlens: Tensor,
           *rest: Any) -> Tensor:  # fmt: skip
    """Row b's keys are the first seqlens[b] of k[b], or of the pages k[table[b]]."""
    assert not torch.is_grad_enabled(), "Note: Does not support backward pass"
    assert seqlens.dtype == torch.int32 and seqlens.shape == (len(q),) and seqlens.is_contiguous()
    if table is not None:  # k, v (pages, page_size, Hkv, D)
        assert table.dtype == torch.int32 and table.stride(-1) == 1 and len(table) == len(q)
        k, v = (t[table].flatten(1, 2) for t in (k, v))
    assert k.shape[0] == len(q) and seqlens.max() <= k.shape[1], "keys are read out of bounds"
    return torch.stack([one_sequence(q[b], *(t[b, : seqlens[b]] for t in (k, v)), *rest)
                        for b in range(len(q))])  # fmt: skip


def in_parts(q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int | None, right: int | None,
             scale: float | None, softcap: float, L: Tensor | None = None,
             out: Tensor | None = None, dout: Tensor | None = None) -> Any:  # fmt: skip
    """L (B, H, Tq) as documented; with that of a whole row, its out and dout the gradients: P is
    exp(S - L), and each is that of softmax, rounded once."""
    (Tq, H, D), (Tk, Hkv) = q.shape[1:], k.shape[1:3]
    high = 0 if causal else Tq + Tk if right is None else right
    at, j = torch.arange(Tq)[:, None] + Tk - Tq, torch.arange(Tk)
    seen = (j <= at + high) & (j >= at - (Tq + Tk if left is None else left))
    keys, values = (t.double().repeat_interleave(H // Hkv, dim=2).transpose(1, 2) for t in (k, v))
    tau = D**-0.5 if scale is None else scale
    S = tau * q.double().transpose(1, 2) @ keys.mT
    if softcap > 0:
        S = softcap * torch.tanh(S / softcap)
    slope = 1 - (S / softcap) ** 2 if softcap > 0 else 1
    S = S.masked_fill(~seen, -torch.inf)
    if L is None or out is None or dout is None:
        return S.logsumexp(dim=-1).nan_to_num(neginf=torch.inf).float()
    assert L.dtype == torch.float32 and L.is_contiguous() and L.shape == (len(q), H, Tq)
    assert out.shape == dout.shape == q.shape and out.dtype == dout.dtype == q.dtype
    P, dO = (S - L[..., None]).exp(), dout.double().transpose(1, 2)
    dS = P * (dO @ values.mT - (dout.double() * out.double()).sum(-1).mT[..., None]) * slope
    dk, dv = ((x.mT @ y).unflatten(1, (Hkv, -1)).sum(dim=2)
              for x, y in ((tau * dS, q.double().transpose(1, 2)), (P, dO)))  # fmt: skip
    return tuple(t.transpose(1, 2).to(q.dtype) for t in (tau * dS @ keys, dk, dv))


def limits(window: tuple[Any, Any], unbounded: int | None) -> tuple[int | None, int | None]:
    """A window's sides, None where there is no end."""
    assert isinstance(window, tuple) and len(window) == 2
    for side in window:
        assert side == unbounded or (isinstance(side, int) and side >= 0), window
    left, right = (None if side == unbounded else side for side in window)
    return left, right


# --- the stand-ins ---


def record(module: ModuleType, locals_: dict[str, Any]) -> None:
    module.calls.append({n: x for n, x in locals_.items() if not isinstance(x, Tensor)})


def write(into: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
    for tensor, grad in zip(into, grads, strict=True):
        assert tensor.is_contiguous() and tensor.dtype == grad.dtype
        tensor.copy_(grad)


def flash_attn_2() -> ModuleType:
    """flash_attn/flash_attn_interface.py, 2.6.2 to 2.8.3."""
    module: Any = ModuleType("flash_attn")
    module.__version__, module.calls = "2.8.3", []

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False,
                        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                        return_attn_probs=False):  # fmt: skip
        record(module, locals())
        check_inputs(q, k, v)
        assert not (softcap > 0 and dropout_p), "Softcapping does not support dropout for now"
        how = causal, *limits(window_size, -1), softmax_scale, softcap
        out = dense(q, k, v, *how, dropout_p)
        return (out, in_parts(q, k, v, *how), None) if return_attn_probs else out

    def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale,
                             causal, window_size_left, window_size_right, softcap, alibi_slopes,
                             deterministic, rng_state=None):  # fmt: skip
        record(module, locals())
        check_inputs(q, k, v, step=8)
        assert not dropout_p and alibi_slopes is None
        how = causal, *limits((window_size_left, window_size_right), -1), softmax_scale, softcap
        write((dq, dk, dv), in_parts(q, k, v, *how, softmax_lse, out, dout))

    module.flash_attn_interface = SimpleNamespace(_flash_attn_backward=_flash_attn_backward)

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               dropout_p=0.0, softmax_scale=None, causal=False,
                               window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                               deterministic=False, return_attn_probs=False,
                               block_table=None):  # fmt: skip
        record(module, locals())
        check_inputs(q, k, v)
        assert not (softcap > 0 and dropout_p), "Softcapping does not support dropout for now"
        left, right = limits(window_size, -1)
        if max_seqlen_q == 1 and q.shape[1] > k.shape[1] and left is right is None:
            # seqlenq_ngroups_swapped in flash_api.cpp
            q.reshape(len(cu_seqlens_q) - 1, k.shape[1], -1, q.shape[2])
        return varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal,
                      left, right, softmax_scale, softcap, dropout_p)  # fmt: skip

    def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None,
                                rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
                                cache_leftpad=None, block_table=None, softmax_scale=None,
                                causal=False, window_size=(-1, -1), softcap=0.0,
                                rotary_interleaved=True, alibi_slopes=None, num_splits=0,
                                return_softmax_lse=False):  # fmt: skip
        record(module, locals())
        check_inputs(q, k_cache, v_cache)
        assert k is v is None, "not needed by us"
        size = k_cache.shape[1]
        assert block_table is None or size % 256 == 0, "block size must be divisible by 256"
        how = causal, *limits(window_size, -1), softmax_scale, softcap
        return cached(q, k_cache, v_cache, block_table, cache_seqlens, *how)

    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def flash_attn_3(with_lse: bool = False) -> ModuleType:
    """hopper/flash_attn_interface.py; until ed209409 (July 2025) each gave (out, softmax_lse)."""
    module: Any = ModuleType("flash_attn_interface")
    module.calls = []

    def given(out: Tensor) -> Any:
        return (out, torch.empty(0)) if with_lse else out

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None,
                        k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
                        softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
                        sm_margin=0, return_attn_probs=False):  # fmt: skip
        record(module, locals())
        check_inputs(q, k, v, step=8)
        how = causal, *limits(window_size, -1), softmax_scale, softcap
        if return_attn_probs:
            return dense(q, k, v, *how), in_parts(q, k, v, *how)
        return given(dense(q, k, v, *how))

    def _flash_attn_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None,
                             sequed_q=None, sequed_k=None, max_seqlen_q=None, max_seqlen_k=None,
                             dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
                             window_size_left=-1, window_size_right=-1, softcap=0.0,
                             deterministic=False, sm_margin=0):  # fmt: skip
        record(module, locals())
        check_inputs(q, k, v, step=8)
        how = is_causal, *limits((window_size_left, window_size_right), -1), softmax_scale, softcap
        write((dq, dk, dv), in_parts(q, k, v, *how, softmax_lse, out, dout))

    module._flash_attn_backward = _flash_attn_backward

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               seqused_q=None, seqused_k=None, softmax_scale=None, causal=False,
                               qv=None, q_descale=None, k_descale=None, v_descale=None,
                               window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                               pack_gqa=None, deterministic=False, sm_margin=0):  # fmt: skip
        record(module, locals())
        check_inputs(q, k, v, step=8)
        how = causal, *limits(window_size, -1), softmax_scale, softcap
        ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return given(varlen(q, k, v, *ends, *how))

    def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None,
                                rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
                                cache_leftpad=None, page_table=None, cu_seqlens_q=None,
                                cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
                                q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
                                causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
                                rotary_interleaved=True, scheduler_metadata=None, num_splits=0,
                                pack_gqa=None, sm_margin=0, return_softmax_lse=False):  # fmt: skip
        record(module, locals())
        check_inputs(q, k_cache, v_cache, step=8)
        assert k is v is None, "not needed by us"
        how = causal, *limits(window_size, -1), softmax_scale, softcap
        return cached(q, k_cache, v_cache, page_table, cache_seqlens, *how)

    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def flash_attn_4() -> ModuleType:
    """flash_attn/cute/interface.py of 4.0.0b27, which gives (out, lse), lse None if not asked."""
    module: Any = ModuleType("flash_attn.cute")
    module.__version__, module.calls = "0.0.0", []

    def flash_attn_func(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
                        window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
                        pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None,
                        mask_mod=None, aux_tensors=None, aux_scalars=None,
                        block_sparse_tensors=None, block_sparse_tensors_bwd=None,
                        return_lse=False):  # fmt: skip
        record(module, locals())
        check_inputs(q, k, v, step=8)
        check_sink(q, learnable_sink)
        how = causal, *limits(window_size, None), softmax_scale, softcap, 0.0, learnable_sink
        return dense(q, k, v, *how), in_parts(q, k, v, *how[:5]) if return_lse else None

    def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0,
                        window_size_left=None, window_size_right=None, deterministic=False,
                        dq=None, dk=None, dv=None):  # fmt: skip
        record(module, locals())
        check_inputs(q, k, v, step=8)
        sides = limits((window_size_left, window_size_right), None)
        how = causal, *sides, softmax_scale, softcap
        write((dq, dk, dv), in_parts(q, k, v, *how, lse, out, dout))

    module.interface = SimpleNamespace(_flash_attn_bwd=_flash_attn_bwd)

    def flash_attn_varlen_func(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None,
                               max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
                               seqused_q=None, seqused_k=None, gather_kv_indices=None,
                               page_table=None, softmax_scale=None, causal=False,
                               window_size=(None, None), learnable_sink=None, softcap=0.0,
                               num_splits=1, pack_gqa=None, deterministic=False, score_mod=None,
                               score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None,
                               aux_tensors=None, aux_scalars=None, return_lse=False,
                               scheduler_metadata=None, seqlen_k_per_split=None,
                               disable_scheduler_metadata=False):  # fmt: skip
        record(module, locals())
        check_inputs(q, k, v, step=8)
        check_sink(q, learnable_sink)
        how = causal, *limits(window_size, None), softmax_scale, softcap, 0.0, learnable_sink
        if seqused_k is None:
            ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            return varlen(q, k, v, *ends, *how), None
        assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        return cached(q, k, v, page_table, seqused_k, *how), None

    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module


STAND_INS: dict[str, tuple[str, Any]] = {
    "flash_attn_2": ("flash_attn_2", flash_attn_2),
    "flash_attn_3": ("flash_attn_3", flash_attn_3),
    "flash_attn_3 of early 2025": ("flash_attn_3", lambda: flash_attn_3(with_lse=True)),
    "flash_attn_4": ("flash_attn_4", flash_attn_4),
}
GENERATIONS = ("flash_attn_2", "flash_attn_3", "flash_attn_4")


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_loaded", {})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins of all three generations, where import finds them."""
    made = {name: STAND_INS[name][1]() for name in GENERATIONS}
    for module in made.values():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


# --- the numbers ---

CALLED = [c for c in CASES if c.name != "1025"]  # seconds in the oracle


@pytest.mark.parametrize("case", CALLED, ids=lambda c: c.name)
def test_every_case_of_the_matrix_against_the_oracle(case, monkeypatch) -> None:
    dtype = "float16"
    for name, make in STAND_INS.values():
        spec = case.spec(dtype)
        if (case.D % 8 and name != "flash_attn_2") or (case.sinks and name != "flash_attn_4"):
            assert why(name, spec, H100)
            continue
        inputs, seg = matrix.draw(case, dtype), matrix.segments(case)
        plain, truth = matrix.plain(case, dtype), matrix.truth(case, dtype)
        module = make()
        monkeypatch.setattr(flash, "_loaded", {})
        monkeypatch.setitem(sys.modules, module.__name__, module)
        leaves = [t.detach().requires_grad_() for t in inputs[:3]]
        more: dict[str, Any] = {"segments": seg}
        if case.sinks:
            more["sinks"] = matrix.sinks(case, dtype).requires_grad_()
            leaves.append(more["sinks"])
        out = BACKENDS[name].attend(*leaves[:3], spec, **more)
        grads = torch.autograd.grad(out, leaves, inputs[3])
        oracle.check(oracle.Result(out.detach(), *grads), plain, truth, getattr(torch, dtype))
        blind = max(case.Tq - case.Tk, 0)
        assert not out[:, :blind].any() and not grads[0][:, :blind].any()
        [call] = module.calls
        assert ("cu_seqlens_q" in call or "max_seqlen_q" in call) == (seg is not None)


@pytest.mark.parametrize("name", GENERATIONS)
def test_what_is_not_contiguous_in_the_last_dimension_is_made_so(name, installed) -> None:
    case = next(c for c in CASES if c.name == "113x203")
    inputs, truth = matrix.draw(case, "float16"), matrix.truth(case, "float16")
    q, k, v = (t.transpose(2, 3).contiguous().transpose(2, 3) for t in inputs[:3])
    assert q.stride(-1) != 1
    out = BACKENDS[name].attend(q, k, v, case.spec("float16", grad=False))
    part, _ = BACKENDS[name].partial.forward(q, k, v, case.spec("float16", lse=True), 203 - 113)
    for got in (out, part.half()):
        oracle.check(oracle.Result(got), matrix.plain(case, "float16"), truth, torch.float16)


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("window, segments", [(None, False), (9, False), (None, True), (9, True)])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("scores", [{}, {"scale": 0.3, "softcap": 4.0}])
def test_the_probe_accepts_what_is_right(name, window, segments, grad, scores, installed) -> None:
    sinks = bool(scores) and name == "flash_attn_4"
    spec = Spec(4, 2, 32, "bfloat16", window=window, segments=segments, grad=grad, sinks=sinks,
                **scores)  # fmt: skip
    assert why(name, spec, H100) == [] and probe(BACKENDS[name], spec, "cpu").why == ()
    assert installed[name].calls


def test_a_window_as_wide_as_the_keys_is_none(installed) -> None:
    """The kernels without a window are the faster ones."""
    q = torch.randn(1, 9, 2, 32).half()
    for name, window in itertools.product(GENERATIONS, (9, 100)):
        BACKENDS[name].attend(q, q, q, Spec(2, 2, 32, "float16", window=window))
        side = None if name == "flash_attn_4" else -1
        assert installed[name].calls[-1]["window_size"] == (side, side)


# --- options ---


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """PyTorch's switch, for what is inside."""
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("segments", [False, True])
def test_deterministic_reaches_the_package(name, segments, installed) -> None:
    q = torch.randn(2, 9, 2, 32).half()
    seg = torch.arange(9).div(4).int().expand(2, 9) if segments else None
    for asked in (True, False):
        spec = Spec(2, 2, 32, "float16", segments=segments)
        with deterministic(asked):
            BACKENDS[name].attend(q, q, q, spec, segments=seg)
        assert installed[name].calls[-1]["deterministic"] is asked


@pytest.mark.parametrize("segments", [False, True])
def test_dropout_reaches_the_package_that_has_it(segments, installed) -> None:
    q = torch.randn(2, 9, 2, 32).half()
    seg = torch.arange(9).div(4).int().expand(2, 9) if segments else None
    spec = Spec(2, 2, 32, "float16", dropout=0.25, segments=segments)
    exact = get("flash_attn_2").attend(q, q, q, replace(spec, dropout=0.0), segments=seg)
    out = get("flash_attn_2").attend(q, q, q, spec, segments=seg)
    assert [c["dropout_p"] for c in installed["flash_attn_2"].calls] == [0.0, 0.25]
    assert not torch.equal(out, exact)
    assert probe(BACKENDS["flash_attn_2"], replace(spec, segments=False), "cpu").why == ()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_sinks_may_have_any_dtype_and_get_its_gradient(dtype, installed) -> None:
    q, sinks = torch.randn(2, 9, 2, 32).half(), torch.ones(2, dtype=dtype, requires_grad=True)
    out = get("flash_attn_4").attend(q, q, q, Spec(2, 2, 32, "float16", sinks=True), sinks=sinks)
    (grad,) = torch.autograd.grad(out.sum(), sinks)
    assert grad.dtype == dtype and grad.abs().min() > 0


# --- segments ---


def segments_of(*rows: str) -> Tensor:
    return torch.tensor([[ord(c) for c in row] for row in rows], dtype=torch.int32)


def test_runs_by_hand() -> None:
    found = flash.runs(segments_of("aabbbc", "aaaaaa"), 6)
    assert found.cu_q.tolist() == found.cu_k.tolist() == [0, 2, 5, 6, 12]
    assert (found.max_q, found.max_k, found.keys) == (6, 6, None)
    assert found.cu_q.dtype == found.cu_k.dtype == torch.int32

    found = flash.runs(segments_of("aabbbc", "aaabcc"), 2)  # the queries: b c, c c
    assert found.cu_q.tolist() == [0, 1, 2, 4]
    assert found.cu_k.tolist() == [0, 3, 4, 6]  # bbb, c, cc; what lies before is not looked at
    assert found.keys.tolist() == [2, 3, 4, 5, 10, 11]
    assert (found.max_q, found.max_k) == (2, 3)

    # Two rows that end and begin alike are two runs; a number that comes back is a new one.
    assert flash.runs(segments_of("aa", "aa"), 2).cu_k.tolist() == [0, 2, 4]
    assert flash.runs(segments_of("abab"), 4).cu_k.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("Tq", [1, 3, 7, 12])
def test_no_kernel_is_given_an_empty_sequence(name, Tq, installed, monkeypatch) -> None:
    """Grouped heads, one query a row: 2 takes a path that counts sequences by queries."""
    seg = segments_of("aaabbbbbcccc", "abcdefffffff", "aaaaaaaaaaaa")
    q = torch.randn(3, 12, 4, 32).half()
    seen: list[Tensor] = []
    inner = varlen
    monkeypatch.setattr(sys.modules[__name__], "varlen",
                        lambda *a: [seen.extend(a[3:5]), inner(*a)][1])  # fmt: skip
    spec = Spec(4, 2, 32, "float16", segments=True, grad=False)
    out = BACKENDS[name].attend(q[:, 12 - Tq :], q[:, :, :2], q[:, :, 2:], spec, segments=seg)
    truth = oracle.attention(q[:, 12 - Tq :], q[:, :, :2], q[:, :, 2:], out, segments=seg)
    torch.testing.assert_close(out.double(), truth.out, rtol=2e-3, atol=2e-3)
    assert len(seen) == 2 and all((cu.diff() > 0).all() for cu in seen)


def test_runs_are_found_once_for_a_tensor(monkeypatch) -> None:
    """All layers are given the same tensor of segments; a new one, or a change, is seen."""
    calls = []
    find = flash.runs.__wrapped__
    monkeypatch.setattr(flash, "runs", kept(lambda *a: [calls.append(a[1]), find(*a)][1]))
    seg = segments_of("aabb")
    for _ in range(12):
        flash.runs(seg, 4)
    assert calls == [4]
    flash.runs(seg, 2)
    flash.runs(seg, 4)
    assert calls == [4, 2, 4]
    seg[0, 2] = seg[0, 0]
    assert flash.runs(seg, 4).cu_k.tolist() == [0, 3, 4] and len(calls) == 4
    seg.view(-1)[3] = seg[0, 0]  # through a view
    assert flash.runs(seg, 4).cu_k.tolist() == [0, 4] and len(calls) == 5
    assert flash.runs(seg.clone(), 4).cu_k.tolist() == [0, 4] and len(calls) == 6
    with torch.inference_mode():  # no version counter, so nothing is remembered
        fresh = segments_of("aabb")
        flash.runs(fresh, 4)
        fresh[0, 2] = fresh[0, 0]
        assert flash.runs(fresh, 4).cu_k.tolist() == [0, 3, 4] and len(calls) == 8
    gc.collect()
    alive = weakref.ref(flash.runs(seg, 4))
    assert alive() is not None
    del seg
    gc.collect()
    assert alive() is None


# --- caches ---


def check_cache(name: str, start: list[int], count: list[int], Tq: int, places: int,
                page_size: int | None, window: int | None, device: str = "cpu",
                D: int = 32, **scores: Any) -> None:  # fmt: skip
    """Tq new tokens a row, of which count[b] are real, after a history of start[b].

    Places that nothing was stored in hold loud numbers. Without page_size the cache is static.
    """
    B, H, Hkv = len(start), 4, 2
    draw = torch.Generator().manual_seed(1)

    def tensor(heads: int) -> Tensor:
        x = torch.randn(B, max(start) + Tq, heads, D, generator=draw)
        return x.to(device, torch.float16)

    q, k, v = tensor(H), tensor(Hkv), tensor(Hkv)
    int32 = {"dtype": torch.int32, "device": device}
    counters = torch.tensor(start, **int32), torch.tensor(count, **int32)
    shape = (B, places + 1)  # the last place of a static row takes the padding
    table = torch.zeros(B, 0, dtype=torch.int32)
    if page_size is not None:  # pages in disorder, and only those that the tokens need
        columns = -(-places // page_size)
        shape = (1 + B * columns, page_size)
        order = torch.randperm(B * columns, generator=draw) + 1
        table = torch.zeros(B, columns, dtype=torch.int32)
        for b in range(B):
            held = -(-(start[b] + count[b]) // page_size)
            table[b, :held] = order[b * columns : b * columns + held]
    stored = [torch.full((*shape, Hkv, D), loud, dtype=torch.float16, device=device)
              for loud in (9.0, 99.0)]  # fmt: skip
    for b, n in enumerate(start):
        for t, new in zip(stored, (k, v), strict=True):
            at = torch.arange(min(n + count[b], places))  # this call's tokens are stored, too
            row = table[b, at // page_size].long() if page_size else torch.tensor(b)
            t[row, at % page_size if page_size else at] = new[b, : len(at)]
    view: PagedView | StaticView = StaticView(*counters, places)
    k_stored, v_stored = stored
    if page_size is not None:
        view = PagedView(table.to(device), *counters)
    else:
        k_stored, v_stored = (t[:, :places] for t in stored)
    fresh = torch.stack([q[b, n : n + Tq] for b, n in enumerate(start)])
    spec = Spec(H, Hkv, D, "float16", window=window, grad=False, page_size=page_size,
                cache="static" if page_size is None else "paged", sinks="sinks" in scores,
                **{n: x for n, x in scores.items() if n != "sinks"})  # fmt: skip
    more = {n: x for n, x in scores.items() if n == "sinks"}
    with torch.no_grad():
        out = BACKENDS[name].attend(fresh, k_stored, v_stored, spec, cache=view, **more)
    assert out.shape == fresh.shape and out.isfinite().all()
    for b, (n, m) in enumerate(zip(start, count, strict=True)):
        if m == 0 or n + m > places:
            continue  # nothing real, or a row that has ended
        args = [fresh[b : b + 1, :m], k[b : b + 1, : n + m], v[b : b + 1, : n + m]]
        args.append(torch.ones_like(args[0]))
        plain, truth = (f(*args, window=window, **scores) for f in (oracle.plain, oracle.attention))
        oracle.check(oracle.Result(out[b : b + 1, :m]), plain, truth, torch.float16)


CACHED = {
    # start, count, Tq, places
    "prefill": ([0, 0, 0], [20, 7, 13], 20, 32),
    "decode": ([33, 5, 16], [1, 1, 1], 1, 48),
    "chunk": ([30, 3, 17], [9, 5, 0], 9, 48),
    "full": ([28, 31, 32], [4, 1, 0], 4, 32),  # padding stands past the end
    "one row": ([15], [2], 2, 32),
}


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("asked", CACHED)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("paged", [True, False])
def test_caches_are_read(name, asked, window, paged, installed) -> None:
    start, count, Tq, places = CACHED[asked]
    page_size = 16 if paged else None
    if paged and name == "flash_attn_2":  # pages of 256: as far from the ends of the pages
        start, places, page_size = [n + 240 * (n // 16) for n in start], 16 * places, 256
    check_cache(name, start, count, Tq, places, page_size, window)
    assert len(installed[name].calls) == 1


@pytest.mark.parametrize("name", GENERATIONS)
def test_a_window_that_is_wider_than_a_page_is_one(name, installed) -> None:
    check_cache(name, [400], [1], 1, 512, 256, 300)


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("page_size", [None, 256])
def test_scale_softcap_and_sinks_with_a_cache(name, page_size, installed) -> None:
    scores: dict[str, Any] = {"scale": 0.4, "softcap": 3.0}
    if name == "flash_attn_4":
        scores["sinks"] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    check_cache(name, [30, 3, 17], [9, 5, 0], 9, 48, page_size, 6, **scores)


@pytest.mark.parametrize("name", GENERATIONS)
def test_a_row_that_has_ended_runs_past_a_static_cache(name, installed) -> None:
    check_cache(name, [20, 40], [1, 1], 1, 32, None, None)


@pytest.mark.parametrize("name", GENERATIONS)
def test_the_probe_accepts_caches(name, installed) -> None:
    spec = Spec(4, 2, 32, "float16", grad=False)
    for window in (None, 9):
        for more in ({"cache": "static"}, {"cache": "paged", "page_size": 256}):
            asked = replace(spec, window=window, **more)
            assert probe(BACKENDS[name], asked, "cpu").why == ()


# --- torch.compile ---


@pytest.fixture
def traceable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packages whose functions PyTorch can trace, as those of 2 and 3 are."""

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor,
                               **_: Any) -> Tensor:  # fmt: skip
        parts = ((t[a:b] for t in (q, k, v)) for a, b in itertools.pairwise(cu_seqlens_q.tolist()))
        return torch.cat([flash_attn_func(*(t[None] for t in part))[0] for part in parts])

    for name in ("flash_attn", "flash_attn_interface", "flash_attn.cute"):
        module: Any = ModuleType(name)
        module.flash_attn_func = flash_attn_func
        module.flash_attn_varlen_func = flash_attn_varlen_func
        monkeypatch.setitem(sys.modules, name, module)
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", GENERATIONS)
def test_compile_keeps_one_graph_where_the_package_allows_it(name, traceable) -> None:
    from torch._dynamo.testing import CompileCounter

    backend, spec = BACKENDS[name], Spec(2, 2, 16, "float32")
    seg = torch.arange(12).div(5).int().expand(2, 12).contiguous()
    leaves = [torch.randn(2, 12, 2, 16, requires_grad=True) for _ in range(3)]

    for segments, graphs in ((None, 1 if backend.fullgraph else 2), (seg, 2)):

        def layer(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = segments) -> Tensor:
            return 3 * backend.attend(2 * q, k, v, spec, segments=segments)

        want = layer(*leaves)
        torch._dynamo.reset()
        counted = CompileCounter()
        got = torch.compile(layer, backend=counted)(*leaves)
        torch.testing.assert_close(got, want)
        grads = [torch.autograd.grad(x.square().sum(), leaves) for x in (got, want)]
        torch.testing.assert_close(*grads)
        assert counted.frame_count == graphs


# --- prebuilt kernels from the hub ---


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """`kernels`, whose get_kernel gives stand-ins; what it was asked."""
    asked: list[Any] = []
    module: Any = ModuleType("kernels")
    module.__spec__ = ModuleSpec("kernels", None)

    def get_kernel(repo_id: str, *, revision: str | None = None, version: int | None = None,
                   trust_remote_code: bool = False) -> ModuleType:  # fmt: skip
        asked.append((repo_id, revision))
        return flash_attn_2() if repo_id.endswith("flash-attn2") else flash_attn_3()

    module.get_kernel = get_kernel
    monkeypatch.setitem(sys.modules, "kernels", module)
    return asked


@pytest.mark.parametrize("name", ["flash_attn_2", "flash_attn_3"])
def test_the_hub_is_asked_only_if_it_may_be_and_for_a_fixed_commit(name, hub, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # an import of it raises
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    spec = Spec(2, 2, 32, "float16")
    assert "ModuleNotFoundError" in probe(BACKENDS[name], spec, "cpu").why[0] and hub == []
    for _ in range(2):
        assert probe(BACKENDS[name], replace(spec, hub_kernels=True), "cpu").why == ()
    [(repository, commit)] = hub  # once a process
    assert repository == f"kernels-community/flash-attn{name[-1]}"
    assert len(commit) == 40 and set(commit) <= set("0123456789abcdef")
    assert commit.startswith({"2": "db6b5174", "3": "7cb368cf"}[name[-1]])  # each has its own


def test_the_hub_comes_before_what_is_installed(hub, installed) -> None:
    spec = Spec(2, 2, 32, "float16", hub_kernels=True)
    assert probe(BACKENDS["flash_attn_2"], spec, "cpu").why == ()
    assert len(hub) == 1 and installed["flash_attn_2"].calls == []
    assert probe(BACKENDS["flash_attn_4"], spec, "cpu").why == ()  # it has nothing there
    assert len(hub) == 1 and installed["flash_attn_4"].calls


def test_without_the_package_kernels_what_is_installed_runs(installed, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", None)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "kernels" else find(n))
    spec = Spec(2, 2, 32, "float16", hub_kernels=True)
    assert probe(BACKENDS["flash_attn_2"], spec, "cpu").why == ()
    assert installed["flash_attn_2"].calls


def test_offline_is_one_more_reason(hub, monkeypatch) -> None:
    def get_kernel(*_: Any, **__: Any) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'\nsecond line")

    monkeypatch.setattr(sys.modules["kernels"], "get_kernel", get_kernel)
    spec = Spec(2, 2, 32, "float16", hub_kernels=True)
    for _ in range(2):  # a failure is not remembered as a module
        assert probe(BACKENDS["flash_attn_2"], spec, "cpu").why == (
            "it failed when it was tried (OSError: We couldn't connect to "
            "'https://huggingface.co')",)  # fmt: skip


# --- decisions on machines that exist only here ---

EVERYTHING = {"flash_attn": "2.8.3", "flash_attn_interface": "3.0.0", "flash_attn.cute": "4.0.0b27"}


def machine(name: str, *capability: int, packages: dict[str, str] = EVERYTHING) -> Machine:
    return Machine("cuda", name, tuple(capability), "2.13.0", "13.0", packages)  # type: ignore[arg-type]


TITAN = machine("NVIDIA TITAN RTX", 7, 5)
A100 = machine("NVIDIA A100-SXM4-80GB", 8, 0)
RTX3050 = machine("NVIDIA GeForce RTX 3050", 8, 6)
RTX4090 = machine("NVIDIA GeForce RTX 4090", 8, 9)
H100 = machine("NVIDIA H100 80GB HBM3", 9, 0)
B200 = machine("NVIDIA B200", 10, 0)
B300 = machine("NVIDIA B300", 10, 3)
RTX5090 = machine("NVIDIA GeForce RTX 5090", 12, 0)
BF16 = Spec(12, 12, 64, "bfloat16")
TRAIN = {"A": BF16, "grouped": replace(BF16, n_kv_head=4), "fp16": replace(BF16, dtype="float16"),
         "window": replace(BF16, window=9), "segments": replace(BF16, segments=True),
         "everything": replace(BF16, window=9, segments=True, n_kv_head=3)}  # fmt: skip


def why(name: str, spec: Spec, there: Machine) -> list[str]:
    return get(name).why_not(spec, there)


@pytest.mark.parametrize("there, run", [
    (TITAN, ""), (A100, "2"), (RTX3050, "2"), (RTX4090, "2"), (H100, "234"), (B200, "24"),
    (B300, "24"), (RTX5090, "2")], ids=lambda x: getattr(x, "name", x))  # fmt: skip
def test_which_generation_runs_where(there, run) -> None:
    for spec in TRAIN.values():
        for name in GENERATIONS:
            assert (why(name, spec, there) == []) == (name[-1] in run), (name, spec)
        best = f"flash_attn_{run[-1]}" if run else "sdpa"
        assert resolve("auto", spec, there, STRICT).backend.name == best
        chosen = resolve("flash_attention_4", spec, there)
        assert chosen.backend.name == best
        assert list(chosen.rejected) == [
            g for g in reversed(GENERATIONS) if best == "sdpa" or g > best
        ]


def test_the_reason_names_what_would_do() -> None:
    assert why("flash_attn_2", BF16, TITAN) == [
        "it needs compute capability >= 8.0, NVIDIA TITAN RTX has 7.5"]  # fmt: skip
    assert why("flash_attn_3", BF16, RTX4090) == [
        "it needs compute capability 9.0, NVIDIA GeForce RTX 4090 has 8.9"]  # fmt: skip
    assert why("flash_attn_3", BF16, B200) == [
        "it needs compute capability 9.0, NVIDIA B200 has 10.0"]  # fmt: skip
    assert why("flash_attn_4", BF16, A100) == [
        "it needs compute capability 9.0 to 10.3, NVIDIA A100-SXM4-80GB has 8.0"]  # fmt: skip


def test_the_chain_goes_down_the_generations() -> None:
    assert list(resolve("flash_attn_4", BF16, TITAN).rejected) == [
        "flash_attn_4", "flash_attn_3", "flash_attn_2"]  # fmt: skip
    assert resolve("flash_attn_4", BF16, A100).backend.name == "flash_attn_2"
    assert resolve("flash_attn_3", BF16, B200).backend.name == "flash_attn_2"
    for name in GENERATIONS:
        assert get(f"flash_attention_{name[-1]}") is get(name)


@pytest.mark.parametrize("packages, best", [
    ({"flash_attn": "2.8.3"}, "flash_attn_2"),
    ({"flash_attn": "2.8.3", "flash_attn_interface": "unknown version"}, "flash_attn_3"),
    ({"flash_attn.cute": "4.0.0b13"}, "flash_attn_4"),
    ({"flash_attn.cute": "0.1.0", "flash_attn": "2.8.3"}, "flash_attn_2"),  # comes with 2.8.3
    ({"flash_attn": "2.5.9"}, "sdpa"), ({}, "sdpa")])  # fmt: skip
def test_auto_takes_the_latest_that_is_installed(packages, best) -> None:
    chosen = resolve("auto", BF16, replace(H100, packages=packages))
    assert chosen.backend.name == best and chosen.rejected == {}


@pytest.mark.parametrize("name", GENERATIONS)
def test_dtype(name) -> None:
    for dtype in ("float32", "float64"):
        assert why(name, replace(BF16, dtype=dtype), H100) == [
            f"it takes float16 and bfloat16, not {dtype} (--dtype=bfloat16)"]  # fmt: skip


def test_dropout_is_for_the_second_generation_only() -> None:
    asked = replace(BF16, dropout=0.1)
    assert why("flash_attn_2", asked, H100) == []
    for name in ("flash_attn_3", "flash_attn_4"):
        assert why(name, asked, H100) == ["it has no dropout, and 0.1 is asked (--dropout=0)"]
    assert resolve("auto", asked, H100).backend.name == "flash_attn_2"


def test_softcap_and_sinks() -> None:
    capped, sunk = replace(BF16, softcap=50.0), replace(BF16, sinks=True)
    for name in GENERATIONS:
        assert why(name, replace(BF16, scale=0.3), H100) == why(name, capped, H100) == []
    for name in GENERATIONS[:2]:
        assert why(name, sunk, H100) == ["it has no attention sinks"]
    assert why("flash_attn_2", replace(capped, dropout=0.1), H100) == [
        "it has no dropout, and 0.1 is asked (--dropout=0)"]  # fmt: skip
    for there in (H100, B200):
        assert why("flash_attn_4", sunk, there) == []
        assert why("flash_attn_4", replace(capped, sinks=True, grad=False), there) == []
    # Its backward has hung on a GB200: flash-attention issue 2466.
    assert why("flash_attn_4", capped, B200) == ["it does not cap scores"]
    assert resolve("auto", capped, B200).backend.name == "flash_attn_2"
    assert resolve("auto", capped, H100).backend.name == "flash_attn_4"
    assert resolve("auto", capped, RTX4090).backend.name == "flash_attn_2"
    wide = replace(capped, head_dim=256, grad=False)  # Blackwell's own kernels for it
    assert why("flash_attn_4", wide, H100) == [] and why("flash_attn_4", wide, B200) != []
    # What came with a beta is refused before it.
    old = replace(H100, packages={"flash_attn.cute": "4.0.0b25"})
    assert why("flash_attn_4", BF16, old) == [] and why("flash_attn_4", sunk, old) != []
    assert why("flash_attn_4", sunk, replace(old, packages={"flash_attn.cute": "4.0.0"})) == []
    assert why("flash_attn_2", capped, replace(A100, packages={"flash_attn": "2.6.1"})) != []


def test_head_dims() -> None:
    def wide(D: int, **changes: Any) -> Spec:
        return replace(BF16, head_dim=D, **changes)

    assert why("flash_attn_2", wide(320), H100) == ["it takes a head_dim up to 256, not 320"]
    assert why("flash_attn_3", wide(320), H100) == ["it takes a head_dim up to 256, not 320"]
    for there in (H100, B200):
        assert why("flash_attn_4", wide(320), there) == ["it takes a head_dim up to 128, not 320"]
    for D in (20, 36):
        assert why("flash_attn_2", wide(D), H100) == []
        for name in ("flash_attn_3", "flash_attn_4"):
            reason = [f"head_dim must be a multiple of 8, not {D}"]
            assert why(name, wide(D, grad=False), H100) == reason
    for D in (8, 64, 80, 96, 128):
        assert all(why(name, wide(D, grad=False), H100) == [] for name in GENERATIONS)
        assert all(why(name, wide(D), H100) == [] for name in GENERATIONS[:2])
    for D in (136, 192, 256):
        assert why("flash_attn_3", wide(D), H100) == why("flash_attn_2", wide(D), RTX4090) == []
        assert why("flash_attn_4", wide(D), H100) != []  # no backward there
        assert why("flash_attn_4", wide(D, grad=False), H100) == []
    assert why("flash_attn_4", wide(256, grad=False), B200) == []
    assert why("flash_attn_4", wide(192, grad=False), B200) != []
    assert why("flash_attn_4", wide(256, window=9, grad=False), B200) != []


@pytest.mark.parametrize("there", [H100, B200], ids=lambda m: m.name)
def test_flash_attn_4_takes_no_gradient_that_is_known_to_be_wrong(there) -> None:
    """flash-attention pull requests 2896 and 2698, TransformerEngine issue 3216."""
    for D in (72, 80, 104, 112):
        reason = [f"head_dim must be a multiple of 32, not {D}"]
        assert why("flash_attn_4", replace(BF16, head_dim=D), there) == reason
    reason = ["it takes a head_dim up to 128, not 256"]
    assert why("flash_attn_4", replace(BF16, head_dim=256), there) == reason
    for D in (32, 64, 96, 128):
        assert why("flash_attn_4", replace(BF16, head_dim=D), there) == []
    # auto goes on to the next that is installed.
    assert resolve("auto", replace(BF16, head_dim=80), H100).backend.name == "flash_attn_3"
    assert resolve("auto", replace(BF16, head_dim=64), H100).backend.name == "flash_attn_4"


@pytest.mark.parametrize("there, fine", [
    (A100, True), (H100, True), (B200, True), (RTX3050, False), (RTX4090, False),
    (RTX5090, False)], ids=lambda x: getattr(x, "name", ""))  # fmt: skip
def test_dropout_with_wide_heads_needs_the_shared_memory_of_a_data_center_card(there, fine) -> None:
    """Else 2's backward does nothing and says nothing: run_mha_bwd_hdim256."""
    asked = replace(BF16, dropout=0.1, head_dim=256)
    assert (why("flash_attn_2", asked, there) == []) == fine
    assert why("flash_attn_2", replace(asked, head_dim=192), there) == []
    assert why("flash_attn_2", replace(asked, dropout=0.0), there) == []


def test_deterministic() -> None:
    h100, b200 = (replace(there, deterministic=True) for there in (H100, B200))
    assert all(why(name, BF16, h100) == [] for name in GENERATIONS)
    wide = replace(BF16, head_dim=256)
    assert why("flash_attn_2", wide, h100) == []
    assert why("flash_attn_3", wide, h100) != [] and why("flash_attn_4", BF16, b200) == []
    assert why("flash_attn_3", replace(wide, head_dim=192), h100) == []


def test_caches() -> None:
    asked = replace(BF16, grad=False, cache="paged", page_size=16)
    assert why("flash_attn_2", asked, H100) == ["page_size must be a multiple of 256, not 16"]
    for size in (256, 512):
        assert why("flash_attn_2", replace(asked, page_size=size), H100) == []
    assert why("flash_attn_3", asked, H100) == why("flash_attn_4", asked, B200) == []
    for cache, name in itertools.product(("none", "dynamic", "static"), GENERATIONS):
        assert why(name, replace(asked, cache=cache, page_size=None), H100) == []


def test_a_package_with_an_undefined_symbol_is_refused_with_that_text() -> None:
    text = "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEa"
    there = replace(A100, packages={"flash_attn": text, "flash_attn.cute": text})
    [reason] = why("flash_attn_2", BF16, there)
    assert reason.startswith(f"package 'flash_attn' is installed but does not import ({text}) (pip")
    with pytest.raises(BackendUnavailable, match="undefined symbol: _ZN3c104cuda9SetDeviceEa"):
        resolve("flash_attn_2", BF16, there, STRICT)
    assert resolve("auto", BF16, replace(there, capability=(9, 0))).backend.name == "sdpa"


def test_how_to_get_each() -> None:
    bare = replace(H100, packages={})
    hints = {
        "flash_attn_2": "pip install flash-attn --no-build-isolation",
        "flash_attn_3": "cd hopper",
        "flash_attn_4": "pip install --pre flash-attn-4",
    }
    for name, hint in hints.items():
        [reason] = why(name, BF16, bare)
        assert reason.startswith("package 'flash_attn") and hint in reason
        assert ("--attention_hub_kernels=True" in reason) == (name != "flash_attn_4")


def test_the_hub_is_opt_in() -> None:
    there = replace(H100, packages={"kernels": "0.17.2"})
    allowed = replace(BF16, hub_kernels=True)
    for name in ("flash_attn_2", "flash_attn_3"):
        [reason] = why(name, BF16, there)
        assert "not installed" in reason and "--attention_hub_kernels=True" in reason
        assert why(name, allowed, there) == []
        assert why(name, allowed, replace(there, packages={})) != []
        [old] = why(name, allowed, replace(there, packages={"kernels": "0.9.0"}))
        assert "'flash_attn" in old or "'kernels' must be >= 0.14" in old
    assert resolve("auto", BF16, there).backend.name == "sdpa"
    assert resolve("auto", allowed, there).backend.name == "flash_attn_3"
    assert why("flash_attn_2", allowed, replace(there, capability=(7, 5))) != []
    assert why("flash_attn_4", allowed, there) != []
    # Whether downloading is allowed changes nothing for what is installed.
    assert why("flash_attn_2", allowed, replace(H100, packages={"flash_attn": "2.8.3"})) == []


# --- what is installed ---


def test_flash_attn_4_alone_is_no_flash_attn_2(tmp_path, monkeypatch) -> None:
    """Its wheel holds flash_attn/cute and no flash_attn/__init__.py: an importable namespace."""
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text('__version__ = "0.0.0"\n')  # as b13 says of itself
    info = tmp_path / "flash_attn_4-4.0.0b13.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: flash-attn-4\nVersion: 4.0.0b13\n")
    (info / "RECORD").write_text("flash_attn/cute/__init__.py,,\n")
    (info / "top_level.txt").write_text("flash_attn\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = Machine.here("cpu", ["flash_attn", "flash_attn.cute"]).packages
    assert found == {"flash_attn.cute": "4.0.0b13"}
    there = replace(H100, packages=found)
    assert why("flash_attn_4", BF16, there) == []
    assert "package 'flash_attn' is not installed" in why("flash_attn_2", BF16, there)[0]
    for name in ("flash_attn", "flash_attn.cute"):
        sys.modules.pop(name, None)


def test_versions_that_a_package_does_not_say(tmp_path, monkeypatch) -> None:
    """flash_attn_interface has none; its distribution has. A source tree has neither."""
    (tmp_path / "said_elsewhere.py").write_text("")
    (tmp_path / "said_nowhere.py").write_text('__version__ = "0.0.0"\n')
    (tmp_path / "said_itself.py").write_text('__version__ = "1.2"\n')
    info = tmp_path / "other_name-3.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-name\nVersion: 3.0.0\n")
    (info / "RECORD").write_text("said_elsewhere.py,,\nsaid_itself.py,,\n")
    (info / "top_level.txt").write_text("said_elsewhere\nsaid_itself\n")
    for other in ("another", "zebra"):  # beside it, as flash-attn and flash-attn-4 are
        beside = tmp_path / f"{other}-9.0.dist-info"
        beside.mkdir()
        (beside / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {other}\nVersion: 9.0\n")
        (beside / "RECORD").write_text("said_elsewhere/cute.py,,\n")
        (beside / "top_level.txt").write_text("said_elsewhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["said_elsewhere", "said_nowhere", "said_itself"]
    assert Machine.here("cpu", names).packages == {
        "said_elsewhere": "3.0.0",
        "said_nowhere": "unknown version",
        "said_itself": "1.2",
    }


# --- PyTorch's own switch ---


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    yield
    if flash_impl.flash_impl() != "FA2":
        torch.nn.attention.restore_flash_attention_impl()


class Handle:
    """What PyTorch's registry keeps of an active implementation."""

    removed = 0

    def remove(self) -> None:
        Handle.removed += 1


def test_the_switch(hopper, monkeypatch) -> None:
    if not hasattr(torch.nn.attention, "_registry"):
        pytest.skip("torch < 2.11 has no switch")
    known = torch.nn.attention._registry._FLASH_ATTENTION_IMPLS
    for impl in ("FA3", "FA4"):
        monkeypatch.setitem(known, impl, Handle)
    monkeypatch.setattr(Handle, "removed", 0)
    assert flash_impl.flash_impl() == "FA2"
    for n, impl in enumerate(("FA3", "FA3", "FA4", "FA2", "FA2", "FA4", "FA3", "FA2")):
        flash_impl.use_flash_impl(impl)
        assert flash_impl.flash_impl() == impl
        assert Handle.removed == (0, 0, 1, 2, 2, 2, 3, 4)[n]


def test_the_report_names_the_generation(hopper, monkeypatch) -> None:
    probing = sys.modules["attention.probing"]
    monkeypatch.setattr(probing, "flash_impl", lambda: "FA3")
    kernel = probing._kernel
    assert kernel("aten::_scaled_dot_product_flash_attention") == "flash (FA3)"
    assert kernel("aten::_scaled_dot_product_flash_attention_for_cpu") == "flash (CPU)"
    assert kernel("aten::_scaled_dot_product_efficient_attention") == "efficient"
    monkeypatch.setattr(probing, "flash_impl", lambda: "FA2")
    assert kernel("aten::_scaled_dot_product_flash_attention") == "flash"


def refused(impl: str) -> str:
    with pytest.raises(ValueError) as e:
        flash_impl.use_flash_impl(impl)
    assert flash_impl.flash_impl() == "FA2" and "\n" not in str(e.value)
    return str(e.value)


def test_the_switch_says_why_not(hopper, monkeypatch) -> None:
    assert refused("FA5") == "the flash kernel must be one of FA2, FA3, FA4, got 'FA5'"
    flash_impl.use_flash_impl("FA2")  # is always there
    here = "PyTorch's flash kernel cannot be {} here: "
    if hasattr(torch.nn.attention, "_registry"):
        monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
        said = refused("FA3")
        assert said.startswith(here.format("FA3") + "its package does not load (ModuleNotFoundErr")
        assert "flash_attn_interface" in said
        bare: Any = ModuleType("flash_attn_interface")  # imports, and brings no kernels
        monkeypatch.setitem(sys.modules, "flash_attn_interface", bare)
        assert "does not expose FA3" in refused("FA3")
        for capability, impl, need in (((8, 0), "FA3", "9.x"), ((10, 0), "FA3", "9.x"),
                                       ((8, 9), "FA4", "9.x and 10.x")):  # fmt: skip
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
            assert refused(impl) == here.format(impl) + (
                f"it is made for compute capability {need}, NVIDIA H100 has "
                "{}.{}".format(*capability))  # fmt: skip
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert refused("FA4") == here.format("FA4") + "there is no CUDA device"
    for name in ("activate", "current"):
        monkeypatch.delattr(torch.nn.attention, f"{name}_flash_attention_impl", raising=False)
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    assert refused("FA3") == here.format("FA3") + "that needs torch >= 2.11, this is 2.10.0"


@pytest.mark.parametrize("torch_, found, works", [
    ("2.11.0", "4.0.0b17", True), ("2.13.0+cu130", "4.0.0.beta18", True),
    ("2.11.0+cu130", "4.0.0b36", False), ("2.13.0", "4.0.0b19", False), ("2.13.0", "4.0.0", False),
    ("2.14.0", "4.0.0b36", True)])  # fmt: skip
def test_torch_calls_only_a_flash_attn_4_of_its_day(
    torch_, found, works, hopper, monkeypatch
) -> None:
    """torch 2.11 to 2.13 unpack two values of a function that returns four since 4.0.0b19."""
    if not hasattr(torch.nn.attention, "_registry"):
        pytest.skip("torch < 2.11 has no switch")
    monkeypatch.setitem(torch.nn.attention._registry._FLASH_ATTENTION_IMPLS, "FA4", Handle)
    monkeypatch.setattr(torch, "__version__", torch_)
    monkeypatch.setattr(flash_impl, "import_version", lambda package: found)
    monkeypatch.setitem(torch.nn.attention._registry._FLASH_ATTENTION_IMPLS, "FA3", Handle)
    for impl in ("FA3", "FA2"):  # whatever flash-attn-4 is there
        flash_impl.use_flash_impl(impl)
        assert flash_impl.flash_impl() == impl
    if works:
        flash_impl.use_flash_impl("FA4")
        assert flash_impl.flash_impl() == "FA4"
    else:
        said = refused("FA4")
        assert f"torch {torch_} calls flash-attn-4 as it was up to 4.0.0b18" in said
        assert f"this is {found} (pip install flash-attn-4==4.0.0b17" in said


# --- the real packages ---


def need(name: str, spec: Spec) -> None:
    """Skip, naming what is missing, or fail if REQUIRE_BACKENDS names the backend."""
    if reasons := why(name, spec, _need("cuda", name)):
        (pytest.fail if name in REQUIRED else pytest.skip)("; ".join(reasons))


@pytest.mark.gpu
@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("asked", CACHED)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("paged", [True, False])
def test_real_caches(name, asked, window, paged) -> None:
    start, count, Tq, places = CACHED[asked]
    page_size = 16 if paged else None
    if paged and name == "flash_attn_2":
        start, places, page_size = [n + 240 * (n // 16) for n in start], 16 * places, 256
    need(name, Spec(4, 2, 64, "float16", window=window, grad=False, page_size=page_size,
                    cache="paged" if paged else "static"))  # fmt: skip
    check_cache(name, start, count, Tq, places, page_size, window, "cuda", D=64)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("segments", [False, True])
def test_real_deterministic_gradients_are_the_same_bits(name, segments) -> None:
    spec = Spec(8, 4, 64, "bfloat16", segments=segments)
    need(name, spec)
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(4, 1024, h, 64, generator=draw).to("cuda", torch.bfloat16)
                     for h in (8, 4, 4, 8))  # fmt: skip
    seg = torch.arange(1024, device="cuda").div(300).int().expand(4, 1024).contiguous()
    results = []
    for _ in range(5):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with deterministic(True):
            out = BACKENDS[name].attend(*leaves, spec, segments=seg if segments else None)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_the_matrix_covers_what_the_calls_differ_in() -> None:
    """Without these a wrong window or alignment could pass."""
    has: list[Case] = CALLED
    assert any(c.Tq < c.Tk and c.segments for c in has) and any(c.Tq > c.Tk for c in has)
    assert any(c.window and c.segments for c in has) and any(c.Tq == 1 < c.H // c.Hkv for c in has)


# --- in parts ---


def test_a_band_is_all_that_is_visible_and_every_row_of_it_sees_a_key() -> None:
    for Tq, Tk, offset, window in itertools.product(
        range(1, 6), range(1, 6), range(-7, 9), (None, 1, 2, 3, 6)
    ):
        want = visible(torch.arange(Tq)[:, None], torch.arange(Tk), offset, window)
        got = torch.zeros(Tq, Tk, dtype=torch.bool)
        if (found := flash.band(Tq, Tk, offset, window)) is not None:
            I, J, left, right = found
            assert left >= 0 and right >= 0
            rows, cols = I.stop - I.start, J.stop - J.start
            at, j = torch.arange(rows)[:, None] + cols - rows, torch.arange(cols)
            got[I, J] = (j <= at + right) & (j >= at - left)
            for package in (flash.FA2, flash.FA3, flash.FA4):  # as arguments, the same
                asked = flash._in_band(package, rows, cols, left, right)
                low, high = (x if x != package.unbounded else 99 for x in asked["window"])
                high = 0 if asked["causal"] else high
                assert torch.equal(got[I, J], (j <= at + high) & (j >= at - low))
            assert got[I].any(dim=1).all()
        assert torch.equal(got, want), (Tq, Tk, offset, window)


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("window", [None, 9])
def test_parts_make_the_whole(name, window, installed, monkeypatch) -> None:
    load, loaded = flash._load, set()
    monkeypatch.setattr(flash, "_load", lambda p, hub: [loaded.add(p.module), load(p, hub)][1])
    D = 20 if name == "flash_attn_2" else 32
    for Hkv, more in ((4, {}), (2, {"scale": 0.4, "softcap": 3.0})):
        spec = Spec(4, Hkv, D, "float16", window=window, lse=True, **more)
        promises.in_parts(BACKENDS[name], spec, "cpu")
    assert not probe(BACKENDS[name], Spec(4, 2, 32, "float16", window=window, lse=True), "cpu").why
    modules = {"2": "flash_attn", "3": "flash_attn_interface", "4": "flash_attn.cute"}
    assert loaded == {modules[name[-1]]}  # forward and backward: the others may not be there


def test_parts_take_no_segments_and_the_newest_generation_comes_first() -> None:
    spec = Spec(4, 4, 64, "bfloat16", lse=True)
    for name in GENERATIONS:
        there = machine("NVIDIA H100", 9, 0)
        assert not BACKENDS[name].why_not(spec, there)
        (why_,) = BACKENDS[name].why_not(replace(spec, segments=True), there)
        assert why_.kind == "lse" and "no segments" in why_
    assert resolve("auto", spec, there).backend.name == "flash_attn_4"
    assert resolve("auto", replace(spec, segments=True), there).backend.name in ("triton", "tiled")
