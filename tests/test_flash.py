"""Our calls of the flash-attn packages.

Stand-ins have the documented names of what we pass (others are a TypeError), refuse what the real
functions refuse, and compute their docstrings by `manual` in float64. The real packages run in
test_attention.py on a GPU, and at the end of this file.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import kernels
import oracle
import pytest
import torch
from conftest import every, few
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import machine, needs_cuda
from test_flash_api import SIGNATURES
from torch import Tensor

from attention import BACKENDS, Machine, Policy, Spec, flash, get, probe, sdpa_flash
from attention.check import matrix
from attention.check.matrix import CASES
from attention.machine.system import import_version
from attention.proof import run
from attention.select import admit

# --- the stand-ins ---

# 2.8.3, whose signatures ours have (test_flash_api.py).
FLASH_2 = {name: ", ".join(text.split()) for name, text in SIGNATURES.items()
           if name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")}
COMMON = "softmax_scale=None, causal=False, softcap=0.0, "
RAGGED = "cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
FLASH_3 = {  # hopper/flash_attn_interface.py
    "flash_attn_func": f"q, k, v, {COMMON}window_size=(-1, -1), deterministic=False",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    f"{COMMON}window_size=(-1, -1), deterministic=False",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, "
    f"page_table=None, {COMMON}window_size=(-1, -1)",
}
FLASH_4 = {  # flash_attn/cute/interface.py of 4.0.0b27
    name: f"q, k, v, {more}{COMMON}window_size=(None, None), learnable_sink=None, "
    "deterministic=False" for name, more in (("flash_attn_func", ""), (
        "flash_attn_varlen_func", f"{RAGGED}seqused_q=None, seqused_k=None, page_table=None, "))
}


Sequence = tuple[Tensor, Tensor, Tensor]  # q (Tq, H, D), k and v (Tk, Hkv, D)


def attend(rows: list[Sequence], x: dict[str, Any], unbounded: int | None) -> list[Tensor]:
    """"Query at position i will only attend to keys between [i + seqlen_k - seqlen_q -
    window_size[0], i + seqlen_k - seqlen_q + window_size[1]] inclusive" (docstrings of all three):
    our own convention, rounded once."""
    left, right = (None if n == unbounded else n for n in x["window_size"])
    sinks, slopes = x.get("learnable_sink"), x.get("alibi_slopes")
    H, Hkv, D = rows[0][0].shape[1], *rows[0][1].shape[1:]
    spec = Spec(H, Hkv, D, "float64", None if left is None else left + 1,
                right=0 if x["causal"] else right, scale=x["softmax_scale"],
                softcap=x["softcap"] or None)
    own = [None] * len(rows) if slopes is None else [*slopes.expand(len(rows), H)]
    sinks = None if sinks is None else sinks.double()
    return [oracle.formula(*(t.double() for t in row), spec, sinks=sinks, alibi_slopes=m)[0].to(
        row[0].dtype) for row, m in zip(rows, own, strict=True)]


def check_inputs(x: dict[str, Any], step: int) -> None:
    """The checks of csrc/flash_attn/flash_api.cpp."""
    q, k, v = x["q"], *(x.get(f"{n}_cache", x[n]) for n in "kv")
    sinks, slopes = x.get("learnable_sink"), x.get("alibi_slopes")
    half = torch.float16, torch.bfloat16
    assert q.dtype in half and q.dtype == k.dtype == v.dtype, "only fp16 and bf16, all the same"
    assert {t.stride(-1) for t in (q, k, v)} == {1}, "must have contiguous last dimension"
    assert k.shape == v.shape and q.shape[-1] == k.shape[-1] <= 256 and not q.shape[-1] % step
    assert sinks is None or (sinks.shape == (q.shape[-2],) and sinks.dtype in (*half, torch.float))
    assert slopes is None or (slopes.dtype == torch.float32 and slopes.stride(-1) == 1)
    assert not (x["softcap"] > 0 and x.get("dropout_p")), "Softcapping does not support dropout"


def sequences(x: dict[str, Any], step: int) -> list[Sequence]:
    q, k, v = x["q"], x.get("k_cache", x["k"]), x.get("v_cache", x["v"])
    table = x.get("page_table", x.get("block_table"))
    lengths = x.get("cache_seqlens", x.get("seqused_k"))
    if lengths is not None:  # row b has the first lengths[b] keys of k[b], or of its pages
        assert not torch.is_grad_enabled(), "Note: Does not support backward pass"
        assert lengths.dtype == torch.int32 and lengths.shape == (len(q),)
        assert x.get("cu_seqlens_k") is None, "page_table is not supported with it"
        if table is not None:  # k, v (pages, page_size, Hkv, D)
            assert table.dtype == torch.int32 and table.stride(-1) == 1 and len(table) == len(q)
            assert step > 1 or k.shape[1] % 256 == 0, "block size: 256"
            k, v = (t[table].flatten(1, 2) for t in (k, v))
        assert lengths.max() <= k.shape[1], "keys are read out of bounds"
        return [(q[b], *(t[b, :n] for t in (k, v))) for b, n in enumerate(lengths.tolist())]
    if x.get("cu_seqlens_q") is None:
        assert q.dim() == k.dim() == 4 and len(q) == len(k)
        return [*zip(q, k, v, strict=True)]
    assert q.dim() == k.dim() == 3
    ends = []
    for side, total in (("q", len(q)), ("k", len(k))):
        cu, most = x[f"cu_seqlens_{side}"], x[f"max_seqlen_{side}"]
        assert cu.dtype == torch.int32 and cu.is_contiguous() and isinstance(most, int)
        assert cu[0] == 0 and cu[-1] == total and (cu.diff() > 0).all(), "an empty sequence"
        assert cu.diff().max() <= most, "rows past max_seqlen would not be computed"
        ends.append(itertools.pairwise(cu.tolist()))
    return [(q[a:b], k[c:d], v[c:d]) for (a, b), (c, d) in zip(*ends, strict=True)]


def package(name: str, signatures: dict[str, str], version: str, unbounded: int | None = -1,
            step: int = 8, returns: Any = lambda out: out) -> ModuleType:
    """Functions with these signatures, and `calls`, their arguments but tensors."""
    module: Any = ModuleType(name)
    module.__version__, module.calls = version, []

    def function(signature: inspect.Signature) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)  # TypeError: an unknown argument
            bound.apply_defaults()
            x = bound.arguments
            module.calls.append({n: t for n, t in x.items() if not isinstance(t, Tensor)})
            check_inputs(x, step)
            assert all(n == unbounded or n >= 0 for n in x["window_size"]), x["window_size"]
            outs = attend(sequences(x, step), x, unbounded)
            return returns(torch.cat(outs) if x["q"].dim() == 3 else torch.stack(outs))

        return call

    for title, text in signatures.items():
        setattr(module, title, function(inspect.signature(eval(f"lambda {text}: None"))))
    return module


STAND_INS: dict[str, Callable[[], Any]] = {
    "flash_attn_2": lambda: package("flash_attn", FLASH_2, "2.8.3", step=1),
    "flash_attn_3": lambda: package("flash_attn_interface", FLASH_3, ""),
    "flash_attn_3 of early 2025":  # until ed209409 (July 2025) each gave (out, softmax_lse)
        lambda: package("flash_attn_interface", FLASH_3, "", returns=lambda out: (out, None)),
    "flash_attn_4": lambda: package(
        "flash_attn.cute", FLASH_4, "0.0.0", None, returns=lambda out: (out, None)),
}
GENERATIONS = ("flash_attn_2", "flash_attn_3", "flash_attn_4")
EVERYTHING = {"flash_attn": "2.8.3", "flash_attn_interface": "3.0.0", "flash_attn.cute": "4.0.0b27"}
H100 = Machine("cuda", "NVIDIA H100 80GB HBM3", (9, 0), "2.13.0", packages=EVERYTHING)
BF16 = Spec(12, 12, 64, "bfloat16")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(title: str) -> Any:
        module = STAND_INS[title]()
        monkeypatch.setattr(flash, "_loaded", {})
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return module

    return install


# --- the numbers ---

LONG = [c for c in CASES if c.name == "1025" or c.name.startswith("long")]
SHORT = [c for c in CASES if c not in LONG]


@pytest.mark.parametrize("case", [*every(3, SHORT), *few(LONG, 0)], ids=lambda c: c.name)
def test_every_case_of_the_matrix_against_the_oracle(case, installed) -> None:
    for title in STAND_INS:
        name = title.split()[0]
        only = "flash_attn_2" if case.D % 8 or case.alibi else name
        only = "flash_attn_4" if case.sinks else only
        if name != only or (case.sinks and case.alibi):
            assert get(name).why_not(case.spec("float16"), H100)
            continue
        module = installed(title)
        got = run(BACKENDS[name].attend, matrix.inputs(case, "float16"), case.spec("float16"))
        matrix.compare(got, case, "float16", "cpu")
        # Queries before all keys that see some are a call of their own.
        assert len(module.calls) == 1 or (case.Tq > case.Tk and case.right != 0)
        for call in module.calls:
            assert ("cu_seqlens_q" in call or "max_seqlen_q" in call) == bool(case.segments)


def documented(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor,
               max_q: int, max_k: int, *, scale: float | None = None,
               window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn as PyTorch 2.12 documents it."""
    kernels = torch.nn.attention._cur_sdpa_kernel_backends()
    assert [kernel.name for kernel in kernels] == ["FLASH_ATTENTION"]  # else 2.14 takes cuDNN's
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert query.shape[-1] % 8 == 0, "query should have a headdim multiple of 8"
    return package("", FLASH_2, "").flash_attn_varlen_func(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, scale, False, window_size)


@pytest.mark.parametrize("case", every(2, [
    c for c in SHORT if (c.window or c.segments) and c.Tq <= c.Tk
    and not (c.softcap or c.sinks or c.alibi)]), ids=lambda c: c.name)
def test_sdpa_flash_takes_windows_and_segments_on_cuda(case, monkeypatch) -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", documented)
    got = run(sdpa_flash.varlen, matrix.inputs(case, "float16"), case.spec("float16"))
    matrix.compare(got, case, "float16", "cpu")


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("segments", [None, torch.zeros(1, 3).int()], ids=["dense", "segments"])
def test_deterministic_and_dropout_reach_the_package(name, segments, installed) -> None:
    module, x = installed(name), torch.randn(1, 3, 2, 32).half()
    spec = Spec(2, 2, 32, "float16", dropout=0.25 * (name == "flash_attn_2"), grad=False,
                segments=segments is not None)
    for asked in (True, False):
        torch.use_deterministic_algorithms(asked)
        BACKENDS[name].attend(x, x, x, spec, segments=segments)
        [call] = module.calls[-1:]
        assert (call["deterministic"], call.get("dropout_p", 0)) == (asked, spec.dropout)


# --- caches ---

SCORES: dict[str, dict[str, Tensor]] = {
    "flash_attn_2": {"alibi_slopes": torch.tensor([0.5, 0.3, 0.1, 0.0])}, "flash_attn_3": {},
    "flash_attn_4": {"sinks": torch.tensor([1.0, 2.0, 3.0, 4.0])}}


def cached(name: str, paged: bool, scores: Any = (), **options: Any) -> Spec:
    """2 reads pages of 256."""
    size = {"cache": "paged", "page_size": 256 if name == "flash_attn_2" else 16}
    return Spec(4, 2, 32, "float16", grad=False, sinks="sinks" in scores,
                alibi="alibi_slopes" in scores, **(size if paged else {"cache": "static"}),
                **options)


@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("paged", [True, False])
def test_any_view_of_a_cache(name, paged, installed) -> None:
    module = installed(name)

    @settings(max_examples=15, deadline=None)
    @given(st.data(), st.sampled_from([(None, 0), (6, 0), (6, 4), (None, None)]), st.booleans())
    def check(data, sides, scored) -> None:
        scores = SCORES[name] if scored and sides[1] == 0 else {}
        more = {"scale": 0.4, "softcap": 3.0} if scored else {}
        spec = cached(name, paged, scores, window=sides[0], right=sides[1], **more)
        module.calls.clear()
        oracle.check_view(name, spec, *data.draw(oracle.views(not paged and sides[1] == 0)),
                          **scores)
        assert len(module.calls) == 1

    check()


# --- what is installed ---


@pytest.mark.parametrize("name", ["flash_attn_2", "flash_attn_3"])
def test_the_hub_is_asked_only_if_it_may_be_and_for_a_fixed_commit(name, monkeypatch) -> None:
    calls = kernels.hub_of(monkeypatch, lambda _: STAND_INS[name]())
    monkeypatch.setattr(flash, "_loaded", {})
    spec, there = Spec(2, 2, 32, "float16"), replace(H100, packages={"kernels": "0.14"})
    assert "--attention_hub_kernels" in admit(name, spec, there)[1][0]
    backend, why_not = admit(name, spec, there, Policy(hub_kernels=True))
    assert not why_not and not calls
    assert probe(backend, spec, "cpu").why == probe(backend, spec, "cpu").why == ()
    [(repository, commit)] = calls  # once a process
    assert repository == f"kernels-community/flash-attn{name[-1]}"
    assert re.fullmatch("[0-9a-f]{40}", commit or "")


@pytest.mark.parametrize("order", ["4", "4 2", "2 4"])
def test_flash_attn_2_and_4_side_by_side(order, tmp_path, monkeypatch) -> None:
    """The wheel of 2.8.3 has an old flash_attn/cute (NovaSky-AI/SkyRL issue 2132), not importable
    next to flash-attn-4: the last one that pip wrote is there, 2 always works. 4 alone is a
    namespace."""
    init, cute = "flash_attn/__init__.py", "flash_attn/cute/__init__.py"
    wheels = {
        "2": ("flash_attn-2.8.3", {init: "__version__ = '2.8.3'", cute: "import os; os.no"}),
        "4": ("flash_attn_4-4.0.0b27", {cute: "__version__ = '0.0.0'"})}
    for wheel, files in (wheels[generation] for generation in order.split()):
        info, (name, version) = f"{wheel}.dist-info", wheel.rsplit("-", 1)
        files |= {f"{info}/METADATA": f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n",
                  f"{info}/top_level.txt": "flash_attn\n"}
        for file, text in files.items():  # what pip leaves of a wheel, over the files of others
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    there = replace(H100, packages=None)
    with mock.patch.dict(sys.modules):
        for name in ("flash_attn", "flash_attn.cute"):
            sys.modules.pop(name, None)
        import_version.cache_clear()
        why_2, why_4 = (get(f"flash_attn_{n}").why_not(BF16, there) for n in (2, 4))
        version = there.version_of("flash_attn.cute")
    import_version.cache_clear()
    assert (why_2 == []) == ("2" in order)
    if order == "4 2":
        assert all(word in why_4[0] for word in ("2.8.3", "4.0.0b27", "pip"))
    else:
        assert why_4 == [] and version == "4.0.0b27"


# --- the real packages ---


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", GENERATIONS)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("paged", [True, False])
def test_real_caches(name, window, paged) -> None:
    spec = replace(cached(name, paged), head_dim=64, window=window)
    if reasons := get(name).why_not(spec, machine("cuda")):
        pytest.skip("; ".join(reasons))
    for rows in ([(0, 20), (0, 7), (0, 13)], [(33, 1), (5, 1), (16, 1)], [(30, 9), (3, 5), (17, 0)],
                 [(300, 4), (303, 1), (304, 0)]):
        oracle.check_view(name, spec, rows, 304, "cuda")
