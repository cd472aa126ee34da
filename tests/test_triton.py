"""triton_flash.py beyond the matrix of test_attention.py: what is not read, dropout, the operators,
offsets beyond 32 bits. What a compiler says of the kernels is in test_triton_compiled.py.

Without CUDA the kernels run in Triton's interpreter, slowly: the shapes here are small.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import Spec
from attention.check import matrix
from attention.check.matrix import Case
from attention.masks import mask
from attention.proof import run
from attention.triton_flash import attend
from attention.truth import truth

pytest.importorskip("triton", reason="package 'triton' is not installed")
from attention.triton import flash_kernels as triton_kernels

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"  # where the kernels run
pytestmark = [pytest.mark.gpu] * HAS_CUDA
interpreted = pytest.mark.skipif(HAS_CUDA, reason="sets the interpreter's tiles; CUDA has its own")
CI = [pytest.mark.slow, pytest.mark.ci]

def both_passes(tensors: list[Tensor], spec: Spec, call: Any = attend) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]
    out = call(*leaves, spec)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(M: int, N: int) -> None:
        kernels = dict.fromkeys(triton_kernels.KERNELS, (M, N, 1, 1))
        monkeypatch.setattr(triton_kernels, "INTERPRETED", kernels)

    return use


@interpreted
@pytest.mark.parametrize("case", [
    pytest.param(case, id=case.name, marks=CI if n else []) for n, case in enumerate(matrix.cases(
        "window16-48 H1 Hkv1 D16 B1, 48 H1 Hkv1 D16 B1, many-64 H1 Hkv1 D16 B1"))])
def test_tiles_that_no_row_sees_are_not_read(tiles, case: Case) -> None:
    """0 * NaN is NaN: a masked V, or dO, that is read shows in the result."""
    tiles(16, 16)
    T, b, spec, given = case.Tk, 16, case.spec("float32"), matrix.inputs(case, "float32")
    want = run(attend, given, spec)
    sees = mask(T, T, case.window, given.segments, given.q.device)[0, 0]
    skipped = 0
    for block in range(0, T, b):
        rows = slice(block, block + b)
        unseen = ~sees[rows].view(b, -1, b).any(0).any(-1).repeat_interleave(b)
        skipped += int(unseen.sum()) // b
        v = given.v.clone()
        v[:, unseen] = torch.nan
        got = run(attend, given._replace(v=v), spec, times=0)
        assert torch.equal(got.out[:, rows], want.out[:, rows])
    assert skipped > 0
    dout = given.dout.clone()
    dout[:, -b:] = torch.nan  # these rows' gradient reaches only the tiles that they see
    got = run(attend, given._replace(dout=dout), spec)
    far = ~sees[-b:].view(b, -1, b).any(0).any(-1).repeat_interleave(b)
    for name in ("dk", "dv"):
        assert torch.equal(got.tensors[name][:, far], want.tensors[name][:, far])


def test_offsets_beyond_32_bits() -> None:
    """Batch 1 begins 2^31 numbers after batch 0; and rows so far apart that row 256 does.

    The 4 GB are reserved and, but for the pages written, never touched (on a CPU).
    """
    room = torch.empty(2**31 + 2**24, dtype=torch.float16, device=DEVICE)
    far_batch = [room[n * 512 :].as_strided((2, 16, 1, 16), (2**31, 16, 16, 1)) for n in range(4)]
    far_rows = [room[n * 512 :].as_strided((1, 258, 1, 16), (0, 2**23, 16, 1)) for n in range(4)]
    spec = Spec(1, 1, 16, "float16", window=8)
    for tensors in (far_batch, far_rows):
        for t in tensors:
            t.copy_(torch.randn(t.shape))
        near = [t.contiguous() for t in tensors]
        got, want = both_passes(tensors, spec), both_passes(near, spec)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


# --- dropout ---


def revealed(spec: Spec, B: int, seed: int) -> Tensor:
    """M, (B, T, H, T) bool: with q = k = 0 and v the identity, out is M / (1 - p) / (i + 1)."""
    D = spec.head_dim
    zeros = torch.zeros(B, D, spec.n_head, D, device=DEVICE)
    eye = torch.eye(D, device=DEVICE)[None, :, None].expand(B, D, spec.n_head, D)
    torch.manual_seed(seed)
    with torch.no_grad():
        return (attend(zeros, zeros, eye, spec) != 0).cpu()


def test_what_a_tile_has_past_the_last_query_overflows_nowhere() -> None:
    """ALiBi's scores grow with the distance where queries come before every key, and by slopes
    below 0."""
    case = Case("steep", 33, 17, right=9, alibi=True, B=1, H=2, Hkv=2, D=16)
    spec, given = case.spec("float32"), matrix.inputs(case, "float32", DEVICE)
    given = given._replace(alibi_slopes=torch.tensor([9.0, -9.0], device=DEVICE))
    found = both_passes([*given], spec, partial(attend, **given.options))
    for got, want in zip(found, truth(given, spec).tensors.values(), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.ci
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


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
def test_on_cuda_a_large_grid_and_inductor_compute_the_same() -> None:
    q = torch.randn(70_000, 4, 1, 16, device="cuda", dtype=torch.float16)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(q.transpose(1, 2) for _ in range(3)), is_causal=True).transpose(1, 2)
    got = attend(q, q, q, Spec(1, 1, 16, "float16"))
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
    for D in (64, 80, 128):
        q, dout = (torch.randn(2, 300, 4, D, device="cuda", dtype=torch.float16) for _ in range(2))
        tensors, spec = [q, q[:, :, :2], q[:, :, 2:], dout], Spec(4, 2, D, "float16")
        compiled = torch.compile(attend, fullgraph=True)
        results = [both_passes(tensors, spec, call) for call in (attend, compiled)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
