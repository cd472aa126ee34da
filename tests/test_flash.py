"""The flash-attn packages: our calls against stand-ins that compute what the packages document.

Few machines have the packages, so each has a stand-in here: its functions have the documented
signature (an unknown argument is a TypeError), refuse what the real ones refuse, and compute the
documented semantics in float64, differentiably, from nested loops over the documented window. Held
to the oracle, a wrong layout, window, alignment, cu_seqlens or page table fails; dropout_p and
deterministic are recorded. The real packages run in tests/test_attention.py's matrix on a GPU, and
at the end of this file.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import oracle
import pytest
import torch
from conftest import every, few
from test_attention import REQUIRED, _need
from torch import Tensor

from attention import BACKENDS, Machine, Policy, Spec, flash, get, probe
from attention.check import matrix
from attention.check.matrix import CASES
from attention.machine.system import import_version
from attention.masks import filled_cache
from attention.select import admit

HALF = (torch.float16, torch.bfloat16)

# --- what the packages document ---


def one_sequence(q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int | None,
                 right: int | None, scale: float | None, softcap: float, dropout_p: float = 0.0,
                 sink: Tensor | None = None, slopes: Tensor | None = None) -> Tensor:
    """q (Tq, H, D), k and v (Tk, Hkv, D) -> (Tq, H, D), in float64, rounded once.

    "Query at position i will only attend to keys between [i + seqlen_k - seqlen_q - window_size[0],
    i + seqlen_k - seqlen_q + window_size[1]] inclusive"; causal: the right side is 0; "If the row
    of the mask is all zero, the output will be zero" (docstrings of all three). None, and in 2 and
    3 a negative number, is no limit. Query heads h of a group share key head h // (H / Hkv).
    "softmax_scale: The scaling of QK^T before applying softmax. Default to 1 / sqrt(headdim)";
    "softcap: Anything > 0 activates softcapping attention"; a sink's exp joins a row's sum;
    "alibi_slopes: ... A bias of (-alibi_slope * |i + seqlen_k - seqlen_q - j|) is added to the
    attention score of query i and key j."
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
        if slopes is not None:
            distances = [[abs(i + Tk - Tq - j) for j in range(Tk)] for i in range(Tq)]
            scores = scores - slopes[h].double() * torch.tensor(distances)
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


def of_sequences(slopes: Tensor | None, n: int, H: int) -> list[Tensor | None]:
    """The slopes of each of n sequences; "(nheads,) or (batch_size, nheads), fp32"."""
    if slopes is None:
        return [None] * n
    assert slopes.dtype == torch.float32 and slopes.shape in ((H,), (n, H))
    assert slopes.stride(-1) == 1, "ALiBi slopes tensor must have contiguous last dimension"
    return [*slopes.expand(n, H)]


def dense(q: Tensor, k: Tensor, v: Tensor, *rest: Any, slopes: Tensor | None = None) -> Tensor:
    """(B, T, H, D): a sequence for each of the batch."""
    assert q.dim() == k.dim() == 4 and q.shape[0] == k.shape[0]
    own = of_sequences(slopes, len(q), q.shape[2])
    return torch.stack([one_sequence(*qkv, *rest, slopes=m)
                        for *qkv, m in zip(q, k, v, own, strict=True)])


def varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
           *rest: Any, slopes: Tensor | None = None) -> Tensor:
    """(total, H, D), sequence n from cu[n] to cu[n + 1]."""
    assert q.dim() == k.dim() == 3
    for cu, most, total in ((cu_q, max_q, len(q)), (cu_k, max_k, len(k))):
        assert cu.dtype == torch.int32 and cu.is_contiguous() and isinstance(most, int)
        assert cu[0] == 0 and cu[-1] == total and (cu.diff() > 0).all()
        assert cu.diff().max() <= most, "rows past max_seqlen would not be computed"
    assert len(cu_q) == len(cu_k)
    ends = zip(*(itertools.pairwise(cu.tolist()) for cu in (cu_q, cu_k)), strict=True)
    own = of_sequences(slopes, len(cu_q) - 1, q.shape[1])
    return torch.cat([one_sequence(q[a:b], k[c:d], v[c:d], *rest, slopes=m)
                      for ((a, b), (c, d)), m in zip(ends, own, strict=True)])


def cached(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, seqlens: Tensor,
           *rest: Any, slopes: Tensor | None = None) -> Tensor:
    """Row b's keys are the first seqlens[b] of k[b], or of the pages k[table[b]]."""
    assert not torch.is_grad_enabled(), "Note: Does not support backward pass"
    assert seqlens.dtype == torch.int32 and seqlens.shape == (len(q),) and seqlens.is_contiguous()
    if table is not None:  # k, v (pages, page_size, Hkv, D)
        assert table.dtype == torch.int32 and table.stride(-1) == 1 and len(table) == len(q)
        k, v = (t[table].flatten(1, 2) for t in (k, v))
    assert k.shape[0] == len(q) and seqlens.max() <= k.shape[1], "keys are read out of bounds"
    own = of_sequences(slopes, len(q), q.shape[2])
    return torch.stack([one_sequence(q[b], *(t[b, : seqlens[b]] for t in (k, v)), *rest, slopes=m)
                        for b, m in enumerate(own)])


def limits(window: tuple[Any, Any], unbounded: int | None) -> tuple[int | None, int | None]:
    """A window's sides, None where there is no end."""
    assert isinstance(window, tuple) and len(window) == 2
    for side in window:
        assert side == unbounded or (isinstance(side, int) and side >= 0), window
    left, right = (None if side == unbounded else side for side in window)
    return left, right


# --- the stand-ins ---


FLASH_2 = {  # flash_attn/flash_attn_interface.py, 2.6.2 to 2.8.3
    "flash_attn_func": "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, "
    "rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, "
    "block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
}
FLASH_3 = {  # hopper/flash_attn_interface.py
    "flash_attn_func": "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, "
    "k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
    "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    "seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, "
    "k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
    "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, "
    "rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, "
    "page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, "
    "rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
    "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
}
FLASH_4 = {  # flash_attn/cute/interface.py of 4.0.0b27
    "flash_attn_func": "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, "
    "causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
    "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, "
    "aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
    "block_sparse_tensors_bwd=None, return_lse=False",
    "flash_attn_varlen_func": "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, "
    "max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, "
    "gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False, "
    "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, "
    "deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, "
    "block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
    "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False",
}


def package(name: str, signatures: dict[str, str], version: str, unbounded: int | None = -1,
            step: int = 8, returns: Any = lambda out: out) -> ModuleType:
    """A module of functions with these signatures, and `calls`, their arguments but tensors."""
    module: Any = ModuleType(name)
    module.__version__, module.calls = version, []

    def function(signature: inspect.Signature) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)  # TypeError: an unknown argument
            bound.apply_defaults()
            x = bound.arguments
            module.calls.append({n: t for n, t in x.items() if not isinstance(t, Tensor)})
            q, k, v = x["q"], x.get("k_cache", x["k"]), x.get("v_cache", x["v"])
            check_inputs(q, k, v, step)
            p, sink, slopes = (x.get(n) for n in ("dropout_p", "learnable_sink", "alibi_slopes"))
            check_sink(q, sink)
            assert not (x["softcap"] > 0 and p), "Softcapping does not support dropout for now"
            left, right = limits(x["window_size"], unbounded)
            how = x["causal"], left, right, x["softmax_scale"], x["softcap"], p or 0.0, sink
            table = x.get("page_table", x.get("block_table"))
            lengths = x.get("cache_seqlens", x.get("seqused_k"))
            if lengths is not None:
                assert x.get("cu_seqlens_k") is None, "page_table is not supported with it"
                assert step > 1 or table is None or k.shape[1] % 256 == 0, "block size: 256"
                return returns(cached(q, k, v, table, lengths, *how, slopes=slopes))
            if "cu_seqlens_q" not in x:
                return returns(dense(q, k, v, *how, slopes=slopes))
            ends = [x[f"{n}_{of}"] for n in ("cu_seqlens", "max_seqlen") for of in "qk"]
            if step == 1 and ends[2] == 1 and q.shape[1] > k.shape[1] and left is right is None:
                # seqlenq_ngroups_swapped in flash_api.cpp of 2
                q.reshape(len(ends[0]) - 1, k.shape[1], -1, q.shape[2])
            return returns(varlen(q, k, v, *ends, *how, slopes=slopes))

        return call

    for title, text in signatures.items():
        setattr(module, title, function(inspect.signature(eval(f"lambda {text}: None"))))
    return module


def flash_attn_2() -> ModuleType:
    return package("flash_attn", FLASH_2, "2.8.3", step=1)


def flash_attn_3(with_lse: bool = False) -> ModuleType:
    """Until ed209409 (July 2025) each gave (out, softmax_lse)."""
    returns = (lambda out: (out, torch.empty(0))) if with_lse else lambda out: out
    return package("flash_attn_interface", FLASH_3, "", returns=returns)


def flash_attn_4() -> ModuleType:
    """Gives (out, lse), lse None if not asked."""
    return package("flash_attn.cute", FLASH_4, "0.0.0", None, returns=lambda out: (out, None))


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

EVERYTHING = {"flash_attn": "2.8.3", "flash_attn_interface": "3.0.0", "flash_attn.cute": "4.0.0b27"}
H100 = Machine("cuda", "NVIDIA H100 80GB HBM3", (9, 0), "2.13.0", packages=EVERYTHING)
BF16 = Spec(12, 12, 64, "bfloat16")
LONG = [c for c in CASES if c.name == "1025" or c.name.startswith("long")]
SHORT = [c for c in CASES if c not in LONG]


@pytest.mark.parametrize("case", [*every(3, SHORT), *few(LONG, 0)], ids=lambda c: c.name)
def test_every_case_of_the_matrix_against_the_oracle(case, monkeypatch) -> None:
    dtype = "float16"
    for name, make in STAND_INS.values():
        spec = case.spec(dtype)
        only = "flash_attn_2" if case.D % 8 or case.alibi else name
        only = "flash_attn_4" if case.sinks else only
        if name != only or (case.sinks and case.alibi):
            assert get(name).why_not(spec, H100)
            continue
        inputs = matrix.inputs(case, dtype)
        seg = inputs.segments
        plain, truth = matrix.plain(case, dtype), matrix.truth(case, dtype)
        module = make()
        monkeypatch.setattr(flash, "_loaded", {})
        monkeypatch.setitem(sys.modules, module.__name__, module)
        leaves = [t.detach().requires_grad_() for t in inputs[:3]]
        more: dict[str, Any] = {"segments": seg}
        if case.sinks:
            more["sinks"] = inputs.sinks.detach().requires_grad_()
            leaves.append(more["sinks"])
        if case.alibi:
            more["alibi_slopes"] = inputs.alibi_slopes
        out = BACKENDS[name].attend(*leaves[:3], spec, **more)
        grads = torch.autograd.grad(out, leaves, inputs[3])
        oracle.check(oracle.Result(out.detach(), *grads), plain, truth, getattr(torch, dtype))
        blind = case.masked
        assert not out[:, :blind].any() and not grads[0][:, :blind].any()
        # Queries before all keys that see some are a call of their own.
        assert len(module.calls) == 1 or (case.Tq > case.Tk and case.right != 0)
        for call in module.calls:
            assert ("cu_seqlens_q" in call or "max_seqlen_q" in call) == (seg is not None)


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


# --- segments ---


def segments_of(*rows: str) -> Tensor:
    return torch.tensor([[ord(c) for c in row] for row in rows], dtype=torch.int32)


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("Tq", [1, 3, 7, 12])
def test_no_kernel_is_given_an_empty_sequence(name, Tq, installed) -> None:
    """Grouped heads, one query a row: 2 takes a path that counts sequences by queries."""
    seg = segments_of("aaabbbbbcccc", "abcdefffffff", "aaaaaaaaaaaa")
    q = torch.randn(3, 12, 4, 32).half()
    spec = Spec(4, 2, 32, "float16", segments=True, grad=False)
    out = BACKENDS[name].attend(q[:, 12 - Tq :], q[:, :, :2], q[:, :, 2:], spec, segments=seg)
    truth = oracle.attention(q[:, 12 - Tq :], q[:, :, :2], q[:, :, 2:], out, segments=seg)
    torch.testing.assert_close(out.double(), truth.out, rtol=2e-3, atol=2e-3)


# --- caches ---


def check_cache(name: str, start: list[int], count: list[int], Tq: int, places: int,
                page_size: int | None, window: int | None, device: str = "cpu",
                D: int = 32, **scores: Any) -> None:
    """Tq new tokens a row, of which count[b] are real, after a history of start[b].

    Places that nothing was stored in hold loud numbers. Without page_size the cache is static.
    """
    B, H, Hkv = len(start), 4, 2
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(B, max(start) + Tq, heads, D, generator=draw).to(device, torch.float16)
               for heads in (H, Hkv, Hkv))
    stored = [torch.full((B, places, Hkv, D), loud, dtype=torch.float16, device=device)
              for loud in (9.0, 99.0)]
    for b, n in enumerate(start):
        for t, new in zip(stored, (k, v), strict=True):
            end = min(n + count[b], places)  # this call's tokens are stored, too
            t[b, :end] = new[b, :end]
    fresh = torch.stack([q[b, n : n + Tq] for b, n in enumerate(start)])
    spec = Spec(H, Hkv, D, "float16", window=window, grad=False, page_size=page_size,
                cache="static" if page_size is None else "paged", sinks="sinks" in scores,
                alibi="alibi_slopes" in scores,
                **{n: x for n, x in scores.items() if not isinstance(x, Tensor)})
    more = {n: x for n, x in scores.items() if isinstance(x, Tensor)}
    k_held, v_held, view = filled_cache(*stored, spec)
    with torch.no_grad():
        out = BACKENDS[name].attend(fresh, k_held, v_held, spec, cache=view(start, count), **more)
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
@pytest.mark.parametrize("window, right", few([
    (6, 4), (None, 0), (6, 0), (None, 3), (None, None)], 2))
@pytest.mark.parametrize("paged", [True, False])
def test_caches_are_read(name, asked, window, right, paged, installed) -> None:
    start, count, Tq, places = CACHED[asked]
    page_size = 16 if paged else None
    if paged and name == "flash_attn_2":  # pages of 256: as far from the ends of the pages
        start, places, page_size = [n + 240 * (n // 16) for n in start], 16 * places, 256
    check_cache(name, start, count, Tq, places, page_size, window, right=right)
    assert len(installed[name].calls) == 1


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("page_size", [None, 256])
def test_scale_softcap_and_sinks_with_a_cache(name, page_size, installed) -> None:
    scores: dict[str, Any] = {"scale": 0.4, "softcap": 3.0}
    if name == "flash_attn_2":
        scores["alibi_slopes"] = torch.tensor([0.5, 0.3, 0.1, 0.0])
    if name == "flash_attn_4":
        scores["sinks"] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    check_cache(name, [30, 3, 17], [9, 5, 0], 9, 48, page_size, 6, **scores)


@pytest.mark.parametrize("name", GENERATIONS)
def test_a_row_that_has_ended_runs_past_a_static_cache(name, installed) -> None:
    check_cache(name, [20, 40], [1, 1], 1, 32, None, None)


# --- prebuilt kernels from the hub ---


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """`kernels`, whose get_kernel gives stand-ins; what it was asked."""
    asked: list[Any] = []
    module: Any = ModuleType("kernels")
    module.__spec__ = ModuleSpec("kernels", None)

    def get_kernel(repo_id: str, *, revision: str | None = None, version: int | None = None,
                   trust_remote_code: bool = False) -> ModuleType:
        asked.append((repo_id, revision))
        return flash_attn_2() if repo_id.endswith("flash-attn2") else flash_attn_3()

    module.get_kernel = get_kernel
    monkeypatch.setitem(sys.modules, "kernels", module)
    return asked


@pytest.mark.parametrize("name", ["flash_attn_2", "flash_attn_3"])
def test_the_hub_is_asked_only_if_it_may_be_and_for_a_fixed_commit(name, hub, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # an import of it raises
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    spec, there = Spec(2, 2, 32, "float16"), replace(H100, packages={"kernels": "0.14"})
    _, why_not = admit(name, spec, there)
    assert [w.kind for w in why_not] == ["packages"] and "--attention_hub_kernels" in why_not[0]
    backend, why_not = admit(name, spec, there, Policy(hub_kernels=True))
    assert not why_not and not hub
    for _ in range(2):
        assert probe(backend, spec, "cpu").why == ()
    [(repository, commit)] = hub  # once a process
    assert repository == f"kernels-community/flash-attn{name[-1]}"
    assert len(commit) == 40 and set(commit) <= set("0123456789abcdef")


# --- what is installed ---


def install(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """What pip leaves of a wheel: its files, over those of others."""
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text("flash_attn\n")


@pytest.mark.parametrize("order", ["4", "4 2", "2 4"])
def test_flash_attn_2_and_4_side_by_side(order, tmp_path, monkeypatch) -> None:
    """The wheel of 2.8.3 has an old flash_attn/cute (NovaSky-AI/SkyRL issue 2132), which does not
    import next to what flash-attn-4 needs. Whichever pip wrote last is there; 2 works always. 4
    alone has no flash_attn/__init__.py: an importable namespace."""
    init, cute = "flash_attn/__init__.py", "flash_attn/cute/__init__.py"
    old = {init: "__version__ = '2.8.3'", cute: "import os; os.no"}
    wheels = {"2": ("flash-attn", "2.8.3", old),
              "4": ("flash-attn-4", "4.0.0b27", {cute: "__version__ = '0.0.0'"})}
    for generation in order.split():
        install(tmp_path, *wheels[generation])
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import_version.cache_clear()
    there = replace(H100, packages=None)
    why_2, why_4 = (get(f"flash_attn_{n}").why_not(BF16, there) for n in (2, 4))
    assert (why_2 == []) == ("2" in order)
    if order == "4 2":
        assert "flash-attn 2.8.3" in why_4[0] and "flash-attn-4 4.0.0b27" in why_4[0]
        assert "--force-reinstall" in why_4[0]
    else:
        assert why_4 == [] and there.version_of("flash_attn.cute") == "4.0.0b27"
    for name in ("flash_attn", "flash_attn.cute"):
        sys.modules.pop(name, None)
    import_version.cache_clear()


@pytest.mark.parametrize("generation, capability, grad, runs", [
    (3, (8, 0), True, True), (3, (8, 6), True, False), (3, (9, 0), True, True),
    (4, (8, 6), False, True), (4, (8, 6), True, False), (4, (12, 0), True, True),
    (4, (11, 0), True, True), (4, (7, 5), False, False)])
def test_the_gpus_of_prebuilt_3_and_of_4(generation, capability, grad, runs) -> None:
    """flash-attn3/build.toml of kernels-community; flash_attn/cute/interface.py of 4.0.0b27."""
    here = {"kernels": "0.14", "flash_attn.cute": "4.0.0b27"}
    there = replace(H100, capability=capability, packages=here)
    spec = replace(BF16, grad=grad)
    _, why = admit(f"flash_attn_{generation}", spec, there, Policy(hub_kernels=True))
    assert (not why) == runs, why


# --- the real packages ---


def need(name: str, spec: Spec) -> None:
    """Skip, naming what is missing, or fail if REQUIRE_BACKENDS names the backend."""
    if reasons := get(name).why_not(spec, _need("cuda", name)):
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
                    cache="paged" if paged else "static"))
    check_cache(name, start, count, Tq, places, page_size, window, "cuda", D=64)
