"""triton_flash.py beyond the matrix of test_attention.py: tiles, masks at their borders, dropout,
the operators under torch.compile, offsets beyond 32 bits, and the kernels compiled for real GPUs.

Without CUDA the kernels run in Triton's interpreter, slowly: the shapes here are small.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import BACKENDS, Machine, Spec, oracle, visible
from attention.triton_flash import attend, borders

pytest.importorskip("triton", reason="package 'triton' is not installed")
from attention import triton_kernels
from attention.gpus import SHARED
from attention.triton_kernels import HALF, KERNELS, SINGLE, TILES, Tile, default_tile

HAS_CUDA = torch.cuda.is_available()
interpreted = pytest.mark.skipif(HAS_CUDA, reason="sets the interpreter's tiles; CUDA has its own")

# BLOCK_M, BLOCK_N: square, wide, tall
SHAPES = [(16, 16), (16, 64), (64, 16)]
# Tq, Tk, H, Hkv, D, window, whether there are segments
CASES = {
    "square": (49, 49, 2, 1, 16, None, False),
    "whole-tiles": (64, 64, 1, 1, 16, None, False),
    "chunk": (33, 66, 1, 1, 20, None, False),
    "blind": (70, 35, 1, 1, 16, None, False),
    "window-of-a-tile": (64, 64, 1, 1, 8, 16, False),
    "window-of-a-tile-and-1": (64, 64, 1, 1, 16, 17, False),
    "window-1-chunk": (20, 66, 1, 1, 16, 1, False),
    "segments": (65, 65, 1, 1, 16, None, True),
    "segments-window-chunk-mqa": (40, 70, 2, 1, 16, 21, True),
    "segments-blind": (50, 34, 1, 1, 16, None, True),
}


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(M: int, N: int) -> None:
        monkeypatch.setattr(triton_kernels, "INTERPRETED", dict.fromkeys(KERNELS, (M, N, 1, 1)))

    return use


def draw(case: str, dtype: str = "float32", B: int = 1) -> tuple[list[Tensor], Any, Spec]:
    """q, k, v, the gradient of out; segments; Spec."""
    Tq, Tk, H, Hkv, D, window, segmented = CASES[case]
    generator = torch.Generator().manual_seed(Tq)
    inputs = [
        torch.randn(B, T, h, D, generator=generator).to(getattr(torch, dtype))
        for T, h in ((Tq, H), (Tk, Hkv), (Tk, Hkv), (Tq, H))
    ]
    seg = torch.arange(Tk).div(23, rounding_mode="floor").int().expand(B, Tk) if segmented else None
    return inputs, seg, Spec(H, Hkv, D, dtype, window=window, segments=segmented)


def both_passes(inputs: list[Tensor], seg: Tensor | None, spec: Spec,
                call: Any = attend) -> list[Tensor]:  # fmt: skip
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    out = call(*leaves, spec, segments=seg)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


# --- numbers ---


@interpreted
@pytest.mark.parametrize("M, N", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_every_tile_shape_gives_the_numbers_of_the_oracle(tiles, case, M, N) -> None:
    inputs, seg, spec = draw(case)
    truth = oracle.attention(*inputs, window=spec.window, segments=seg)
    plain = oracle.plain(*inputs, window=spec.window, segments=seg)
    tiles(M, N)
    oracle.check(oracle.Result(*both_passes(inputs, seg, spec)), plain, truth, torch.float32)


@interpreted
def test_the_log_of_the_sum_is_right_and_a_blind_row_has_the_lowest(tiles) -> None:
    inputs, _, spec = draw("blind")
    tiles(16, 16)
    L = triton_kernels.flash_forward(*inputs[:3], None, None, None, None, 0.0)[1]
    q, k = inputs[:2]
    blind = q.shape[1] - k.shape[1]
    scores = torch.einsum("bihd,bjhd->bhij", q[:, blind:], k).double() / spec.head_dim**0.5
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    want = torch.logsumexp(scores, dim=-1) / torch.log(torch.tensor(2.0, dtype=torch.float64))
    torch.testing.assert_close(L[:, :, blind:].double(), want, rtol=1e-6, atol=1e-6)
    assert (L[:, :, :blind] == torch.finfo(torch.float32).min).all()


@interpreted
@pytest.mark.parametrize("case", ["window-of-a-tile", "segments", "whole-tiles"])
def test_tiles_that_no_row_sees_are_not_read(tiles, case) -> None:
    """0 * NaN is NaN: a masked V, or dO, that is read shows in the result."""
    T, b = CASES[case][0], 16
    inputs, seg, spec = draw(case)
    tiles(b, b)
    out, _, dk, dv = both_passes(inputs, seg, spec)
    i = torch.arange(T)
    of_i, of_j = (None, None) if seg is None else (seg[0, :, None], seg[0])
    sees = visible(i[:, None], i, 0, spec.window, of_i, of_j)
    skipped = 0
    for block in range(0, T, b):
        rows = slice(block, block + b)
        tile = [bool(sees[rows, j : j + b].any()) for j in range(0, T, b)]
        unseen = torch.tensor([not tile[j // b] for j in range(T)])
        skipped += tile.count(False)
        poisoned = [t.clone() for t in inputs]
        poisoned[2][:, unseen] = torch.nan
        got = attend(*poisoned[:3], spec, segments=seg)
        assert torch.equal(got[:, rows], out[:, rows])
    assert skipped == {"whole-tiles": 6, "window-of-a-tile": 9, "segments": 15}[case]
    poisoned = [t.clone() for t in inputs]
    last = slice(T // b * b - b, T)  # these rows' gradient reaches only the keys that they see
    poisoned[3][:, last] = torch.nan
    _, _, dk_, dv_ = both_passes(poisoned, seg, spec)
    far = torch.tensor([not sees[last, j // b * b : j // b * b + b].any() for j in range(T)])
    assert torch.equal(dk_[:, far], dk[:, far]) and torch.equal(dv_[:, far], dv[:, far])
    assert far.any() or case == "whole-tiles"


def test_borders_of_segments_by_hand() -> None:
    segments = torch.tensor([[5, 5, 5, 2, 2], [0, 1, 1, 1, 0]], dtype=torch.int32)
    first, last = borders(segments)
    assert first.tolist() == [[0, 0, 0, 3, 3], [0, 1, 1, 1, 4]]
    assert last.tolist() == [[2, 2, 2, 4, 4], [0, 3, 3, 3, 4]]
    assert {first.dtype, last.dtype} == {torch.int32}
    assert first.is_contiguous() and last.is_contiguous()


def test_the_same_bits_each_time_and_contiguous_in_the_layout_of_the_inputs() -> None:
    (q, k, v, dout), _, spec = draw("square")
    q, dout = (t.transpose(1, 3).contiguous().transpose(1, 3) for t in (q, dout))  # D strided
    assert q.stride(3) != 1
    first, second = (both_passes([q, k, v, dout], None, spec) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(t.is_contiguous() for t in first)
    plain = both_passes([t.contiguous() for t in (q, k, v, dout)], None, spec)
    assert all(torch.equal(a, b) for a, b in zip(first, plain, strict=True))


@interpreted
def test_offsets_beyond_32_bits() -> None:
    """Batch 1 begins 2^31 numbers after batch 0; and rows so far apart that row 256 does.

    The 4 GB are reserved and, but for the pages written, never touched.
    """
    room = torch.empty(2**31 + 2**24, dtype=torch.float16)
    far_batch = [room[n * 512 :].as_strided((2, 16, 1, 16), (2**31, 16, 16, 1)) for n in range(4)]
    far_rows = [room[n * 512 :].as_strided((1, 258, 1, 16), (0, 2**23, 16, 1)) for n in range(4)]
    spec = Spec(1, 1, 16, "float16", window=8)
    for tensors in (far_batch, far_rows):
        for t in tensors:
            t.copy_(torch.randn(t.shape))
        near = [t.contiguous() for t in tensors]
        got, want = both_passes(tensors, None, spec), both_passes(near, None, spec)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("stride", [2**23, 2**24 - 1, 2**24, 2**25, 2**30])
def test_what_lies_inside_a_tile_is_reached_in_32_bits(stride) -> None:
    """A tensor whose rows are farther apart is copied. No tile has more than 128 rows."""
    tiles = (t for table in TILES.values() for row in table.values() for t in row)
    rows = max(max(tile[:2]) for tile in tiles)
    x = torch.empty_strided((1, 3, 1, 64), (0, stride, 64, 1), device="meta")
    got = triton_kernels._readable(x)
    farthest = (rows - 1) * got.stride(1) + 127
    assert farthest < 2**31
    assert (got is x) == (stride < 2**24)


def test_a_second_derivative_is_refused() -> None:
    (q, k, v, dout), _, spec = draw("window-1-chunk")
    q.requires_grad_()
    (dq,) = torch.autograd.grad(attend(q, k, v, spec), q, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="flash_backward"):
        dq.sum().backward()


# --- dropout ---


def revealed(spec: Spec, B: int, seed: int) -> Tensor:
    """M, (B, T, H, T) bool: with q = k = 0 and v the identity, out is M / (1 - p) / (i + 1)."""
    D = spec.head_dim
    zeros = torch.zeros(B, D, spec.n_head, D)
    eye = torch.eye(D)[None, :, None].expand(B, D, spec.n_head, D)
    torch.manual_seed(seed)
    with torch.no_grad():
        return attend(zeros, zeros, eye, spec) != 0


@interpreted
def test_the_mask_is_the_same_at_every_tile_shape_forward_and_backward(tiles) -> None:
    spec = Spec(2, 1, 64, "float32", dropout=0.4)
    generator = torch.Generator().manual_seed(4)
    q, k, v, dout = (torch.randn(1, 64, h, 64, generator=generator) for h in (2, 1, 1, 2))
    results, masks = [], []
    for M, N in ((16, 16), (64, 32), (32, 64)):
        tiles(M, N)
        eye = torch.eye(64)[None, :, None]
        torch.manual_seed(9)
        masks.append(attend(q, k, eye, spec) != 0)
        torch.manual_seed(9)
        results.append(both_passes([q, k, v, dout], None, spec))
    assert all(torch.equal(m, masks[0]) for m in masks)

    exact = [t.double().requires_grad_() for t in (q, k, v)]
    i = torch.arange(64)
    scores = torch.einsum("bihd,bjgd->bihj", *exact[:2]) / 8
    scores = scores.masked_fill(~visible(i[:, None], i)[None, :, None], -torch.inf)
    probs = torch.softmax(scores, dim=-1) * masks[0] / 0.6
    want = torch.einsum("bihj,bjgd->bihd", probs, exact[2])
    want_all = [want, *torch.autograd.grad(want, exact, dout.double())]
    for got in results:
        for g, w in zip(got, want_all, strict=True):
            torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=1e-5)


def test_no_two_sequences_heads_rows_or_seeds_share_a_mask() -> None:
    spec = Spec(2, 2, 64, "float32", dropout=0.5)
    mask = torch.cat([revealed(spec, 2, seed) for seed in (1, 2)])  # (4, 64, 2, 64)
    full = mask[:, 32:, :, :32]  # rows that see at least these 32 keys
    rows = {tuple(r.tolist()) for r in full.transpose(1, 2).reshape(-1, 32)}
    assert len(rows) == 4 * 32 * 2  # 256 rows of 32 fair bits: two alike once in 10^5
    share = full.float().mean(dim=(0, 1, 2))  # of each key: 256 draws, 5 standard deviations
    assert ((share - 0.5).abs() < 5 * 0.5 / 256**0.5).all()
    neighbours = (full[..., 1:] == full[..., :-1]).float().mean()
    assert abs(float(neighbours) - 0.5) < 5 * 0.5 / (256 * 31) ** 0.5


@pytest.mark.parametrize("p, least, most", [(0.001, 0, 16), (0.999, 2048 - 16, 2048)])
def test_extreme_rates(p, least, most) -> None:
    """Of 2080 visible entries; the threshold is compared as a signed integer."""
    mask = revealed(Spec(1, 1, 64, "float32", dropout=p), 1, 5)[0, :, 0]
    dropped = int((~mask[torch.ones(64, 64).tril().bool()]).sum())
    assert least <= dropped <= most + 32


@pytest.mark.parametrize("p", [0.001, 0.0137, 0.3])
def test_a_rate_that_is_no_multiple_of_1_256th(p) -> None:
    """Of 2080 visible entries in each of 32 heads: within 5 standard deviations."""
    mask = revealed(Spec(8, 8, 64, "float32", dropout=p), 4, 11)
    dropped = int((~mask.transpose(1, 2)[..., torch.ones(64, 64).tril().bool()]).sum())
    n = 4 * 8 * 2080
    assert abs(dropped - n * p) < 5 * (n * p * (1 - p)) ** 0.5


# --- the operators ---


@pytest.mark.parametrize("case", ["square", "segments-window-chunk-mqa"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_compile_takes_the_call_whole_and_computes_the_same(case, p) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    inputs, seg, spec = draw(case)
    spec = Spec(spec.n_head, spec.n_kv_head, spec.head_dim, spec.dtype, window=spec.window,
                segments=spec.segments, dropout=p, compiled=True)  # fmt: skip

    def layer(q: Tensor, k: Tensor, v: Tensor, spec: Spec, segments: Tensor | None) -> Tensor:
        return 3 * attend(2 * q, k, v, spec, segments=segments)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    results = []
    for call in (layer, compiled):
        torch.manual_seed(0)
        results.append(both_passes(inputs, seg, spec, call))
    assert counter.frame_count == 1
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch._dynamo.reset()


def test_opcheck() -> None:
    inputs, seg, _ = draw("segments-window-chunk-mqa")
    q, k, v, dout = inputs
    first, last = borders(seg)
    seed = torch.tensor([7])
    leaves = [t.requires_grad_() for t in (q, k, v)]
    for args in ((*leaves, None, None, None, None, 0.0), (*leaves, first, last, seed, 21, 0.5)):
        torch.library.opcheck(triton_kernels.flash_forward, args)
    out, L = triton_kernels.flash_forward(q, k, v, first, last, seed, 21, 0.5)
    kept = [t.detach() for t in (dout, q, k, v, out, L)]
    torch.library.opcheck(triton_kernels.flash_backward, (*kept, first, last, seed, 21, 0.5))


def test_importing_attention_imports_no_kernels_and_the_first_call_may_be_compiled() -> None:
    code = """if True:
        import sys, torch, attention
        assert "attention.triton_kernels" not in sys.modules
        from attention import Spec, triton_flash
        call = torch.compile(triton_flash.attend, backend="eager", fullgraph=True)
        q = torch.randn(1, 3, 1, 16, device="cuda" if torch.cuda.is_available() else "cpu")
        spec = Spec(1, 1, 16, "float32")
        want = attention.get("manual").attend(q, q, q, spec)
        torch.testing.assert_close(call(q, q, q, spec), want)
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


# --- tiles ---


def shared_bytes(kernel: str, tile: Tile, capability: tuple[int, int], head_dim: int,
                 itemsize: int) -> int:  # fmt: skip
    """What the tiles take in shared memory, estimated: those that stay, and each stage's own."""
    M, N, _, stages = tile
    tensor_cores = itemsize == HALF and capability >= (8, 0)
    itemsize = HALF if tensor_cores else SINGLE
    stay, streamed = {"forward": (M, 2 * N), "dq": (2 * M, 2 * N), "dkdv": (2 * N, 2 * M)}[kernel]
    vectors = 2 * M * 4 if kernel == "dkdv" else 0  # L_i and D_i
    through = 0 if tensor_cores else M * N * SINGLE  # P_ij or dS_ij on its way to the next product
    return (
        (stay + stages * streamed) * triton_kernels._padded(head_dim) * itemsize
        + stages * vectors
        + through
    )


def test_every_tile_of_the_tables_is_a_power_of_two_and_fits_its_shared_memory() -> None:
    assert set(TILES) == set(SHARED)
    for capability in TILES:
        for itemsize in (2, 4):
            for head_dim in range(1, 129):
                for kernel in KERNELS:
                    tile = default_tile(kernel, capability, head_dim, itemsize)
                    M, N, warps, stages = tile
                    assert M in (16, 32, 64, 128) and N in (16, 32, 64, 128), tile
                    assert warps in (4, 8) and 1 <= stages <= 4, tile
                    used = shared_bytes(kernel, tile, capability, head_dim, itemsize)
                    assert used <= SHARED[capability], (capability, kernel, tile, head_dim)


@pytest.mark.parametrize(
    "capability, like",
    [
        ((8, 7), (8, 6)),
        ((9, 0), (9, 0)),
        ((10, 3), (10, 0)),
        ((11, 0), (10, 0)),
        ((12, 1), (12, 0)),
    ],
)
def test_an_unknown_gpu_takes_the_tiles_of_the_nearest_below(capability, like) -> None:
    for kernel in KERNELS:
        assert default_tile(kernel, capability, 80, 2) == default_tile(kernel, like, 128, 2)


# Compiled to machine code, which Triton can without a GPU: capability, dtype, D, kernel, features
COMPILED = [
    (75, "fp16", 64, "forward", ""),
    (75, "fp16", 128, "dkdv", ""),
    (80, "bf16", 64, "forward", ""),
    (80, "fp32", 64, "dq", ""),
    (86, "bf16", 128, "dkdv", ""),
    (90, "bf16", 64, "forward", ""),
    (90, "bf16", 128, "dq", ""),
    (90, "bf16", 128, "dkdv", "group"),
    (90, "fp16", 80, "dkdv", "window first last seed group"),
    (90, "bf16", 64, "forward", "window first seed"),
    (100, "bf16", 128, "forward", ""),
]
COMPILER = r"""
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attention.triton_kernels import KERNELS, _padded, default_tile

for capability, dtype, head_dim, kernel, features in json.loads(sys.argv[1]):
    fn = KERNELS[kernel]
    M, N, warps, stages = default_tile(
        kernel, divmod(capability, 10), head_dim, 4 if dtype == "fp32" else 2)
    given = {"HEAD_DIM": head_dim, "BLOCK_D": _padded(head_dim), "BLOCK_M": M, "BLOCK_N": N,
             "GROUP": 4 if "group" in features else 1}
    given |= {name: None for name in ("First", "Last", "Seed", "window")
              if name in fn.arg_names and name.lower() not in features}
    types = {"L": "*fp32", "D": "*fp32", "First": "*i32", "Last": "*i32", "Seed": "*i64",
             "tau": "fp32", "keep": "fp32"}
    types |= {name: "*" + dtype for name in ("Q", "K", "V", "O", "dO", "dQ", "dK", "dV")}
    signature = {name: types.get(name, "i32") for name in fn.arg_names}
    # What the launcher finds out: pointers and strides are multiples of 16.
    aligned = [n for n, name in enumerate(fn.arg_names)
               if signature[name][0] == "*" or name[-2:] in ("_b", "_t", "_h")]
    signature |= dict.fromkeys(given, "constexpr")
    aligned = {(n,): [["tt.divisibility", 16]] for n in aligned
               if signature[fn.arg_names[n]] != "constexpr"}
    source = ASTSource(fn, signature, constexprs=given, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = done.asm["ptx"]
    print(json.dumps({"shared": done.metadata.shared, "cubin": len(done.asm["cubin"]),
                      "atomics": bool(re.search(r"\b(atom|red)\.", ptx)),
                      "tensor_cores": sum(ptx.count(x) for x in (
                          "mma.sync", "wgmma.mma_async", "tcgen05.mma"))}), flush=True)
"""


@pytest.mark.parametrize("cases", [
    pytest.param(COMPILED[-3:], id="three"),
    pytest.param(COMPILED[:-3], id="others", marks=pytest.mark.slow)])  # fmt: skip
def test_the_kernels_compile_for_real_gpus(cases) -> None:
    import triton

    if tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 3):
        pytest.skip(f"triton {triton.__version__} has another compiler interface, this is of 3.3")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", COMPILER, json.dumps(cases)],
        capture_output=True, text=True, cwd=root, env=environment | {"PYTHONPATH": root},
    )  # fmt: skip
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (cases[len(results)], done.stderr[-2000:])
    for (capability, dtype, head_dim, kernel, features), got in zip(cases, results, strict=True):
        at = divmod(capability, 10)
        itemsize = 4 if dtype == "fp32" else 2
        tile = default_tile(kernel, at, head_dim, itemsize)
        estimate = shared_bytes(kernel, tile, at, head_dim, itemsize)
        assert 0 < got["shared"] <= SHARED[at], (capability, dtype, head_dim, kernel, got)
        if not features:  # a dropout mask passes through it too; 1024 for Blackwell's barriers
            assert got["shared"] <= estimate + 1024, (at, dtype, head_dim, kernel, got, estimate)
        assert got["cubin"] and not got["atomics"]
        assert bool(got["tensor_cores"]) == (dtype != "fp32" and capability >= 80), (at, dtype)


# --- what is refused ---


@pytest.mark.parametrize(
    "capability, dtype, head_dim, why",
    [
        ((7, 0), "float16", 64, ">= 8.0"),
        ((7, 5), "bfloat16", 64, "not bfloat16"),
        ((9, 0), "float64", 64, "not float64"),
        ((9, 0), "bfloat16", 129, "up to 128"),
        ((7, 5), "float16", 64, None),
        ((8, 9), "bfloat16", 1, None),
        ((12, 0), "float32", 128, None),
    ],
)
def test_what_it_runs_on(capability, dtype, head_dim, why) -> None:
    machine = Machine("cuda", "made up", capability, torch="2.5.0", packages={"triton": "3.1.0"})
    reasons = BACKENDS["triton"].why_not(Spec(4, 2, head_dim, dtype), machine)
    assert (reasons == []) if why is None else (len(reasons) == 1 and why in reasons[0])


def test_a_triton_that_is_missing_or_broken_is_refused_with_its_words() -> None:
    for found, words in (
        ({}, "package 'triton' is not installed (pip install triton)"),
        ({"triton": "ImportError: no libtriton"}, "ImportError: no libtriton"),
    ):
        machine = Machine("cuda", "made up", (9, 0), torch="2.5.0", packages=found)
        (reason,) = BACKENDS["triton"].why_not(Spec(4, 2, 64, "bfloat16"), machine)
        assert words in reason


# --- on CUDA ---


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
class TestOnCuda:
    def test_more_heads_than_a_grid_has_rows(self) -> None:
        q = torch.randn(70_000, 4, 1, 16, device="cuda", dtype=torch.float16)
        want = torch.nn.functional.scaled_dot_product_attention(
            *(q.transpose(1, 2) for _ in range(3)), is_causal=True).transpose(1, 2)  # fmt: skip
        got = attend(q, q, q, Spec(1, 1, 16, "float16"))
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)

    @pytest.mark.parametrize("D", [64, 80, 128])
    def test_inductor_computes_the_same(self, D: int) -> None:
        q, dout = (torch.randn(2, 300, 4, D, device="cuda", dtype=torch.float16) for _ in range(2))
        k, v = q[:, :, :2], q[:, :, 2:]
        spec = Spec(4, 2, D, "float16")
        compiled = torch.compile(attend, fullgraph=True)
        results = [both_passes([q, k, v, dout], None, spec, call) for call in (attend, compiled)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
