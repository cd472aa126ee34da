"""ring.py: one sequence over 1 to 4 processes, against the oracle and a model without a ring."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run

from attention import BACKENDS, Machine, Ring, Spec
from attention.check import matrix
from attention.check.matrix import Case
from attention.proof import Result
from inference.cache import DynamicCache
from model import GPT, GPTConfig

INNER = ("tiled", "sdpa_flash")  # the kernels that run on any CPU
# At 4 processes 97 has 7 positions of filling; of 3 and 1 most processes have filling alone.
CASES = matrix.cases("""64, gqa-97, window1-61, window16-90 gqa, window13-96 H3 mqa split,
    packed-97, padded-window20-BHTD-77, rows-packed-97 gqa, scale-33 D20, large-64 D64,
    size3-128 gqa, 3, 1, window16-600 B1 H1 Hkv1 D16""")
FEW = [case for case in CASES if case.name in ("64", "packed-97")]


def attention(ring: Ring, name: str, case: Case, inputs: Any, dtype: str, pad: float = 0) -> Any:
    """As without a ring; `pad` fills q, k and v."""
    q, k, v, dout = inputs
    *_, seg, _, slopes = matrix.inputs(case, dtype)
    leaves = [ring.shard(t, pad).detach().requires_grad_() for t in (q, k, v)]
    part = None if seg is None else ring.shard(seg, -1)
    more = {"alibi_slopes": slopes} if case.alibi else {}
    out = ring.attend(BACKENDS[name])(*leaves, case.spec(dtype, lse=True), segments=part, **more)
    grads = torch.autograd.grad(out, leaves, ring.shard(dout))
    return [ring.gather(t, case.Tq) for t in (out.detach(), *grads)]


def numbers(ring: Ring, cases: list[Case] = CASES, inner: tuple[str, ...] = INNER) -> None:
    """Right, and equal bits twice, whatever the padding."""
    dtypes = ["float32", *["bfloat16"] * (inner is INNER)]
    for n, (name, case, dtype) in enumerate(itertools.product(inner, cases, dtypes)):
        inputs = matrix.inputs(case, dtype)[:4]
        got = attention(ring, name, case, inputs, dtype)
        again = attention(ring, name, case, inputs, dtype, pad=3.0)
        assert all(map(torch.equal, got, again)), f"not the same bits: {case.name}"
        if n % ring.size == ring.rank:  # by gather(), the same on each process
            matrix.compare(Result(*got), case, dtype, "cpu")


def borders(ring: Ring, T: int = 29) -> None:
    """A later token moves no earlier output, nor an output before it a gradient, on any process."""
    c = -(-T // (2 * ring.size))
    tokens = sorted({*range(c - 1, T, c), *range(c, T, c), T - 1})
    rows = torch.arange(len(tokens))  # a row of the batch for each
    for name, window in itertools.product(INNER, (None, 5)):
        case = Case("canary", T, T, H=4, B=len(tokens), window=window)
        q, k, v, dout = (t.clone() for t in matrix.inputs(case, "float32")[:4])
        before = attention(ring, name, case, (q, k, v, dout), "float32")[0]
        for b, t in enumerate(tokens):
            dout[b, t:] = 0
        grads = attention(ring, name, case, (q, k, v, dout), "float32")[1:]
        for x in (q, k, v):
            x[rows, tokens] = 3 - x[rows, tokens]
        after = attention(ring, name, case, (q, k, v, dout), "float32")[0]
        moved = (after != before).flatten(2).any(dim=2)
        for b, t in enumerate(tokens):
            last = T - 1 if window is None else min(t + window - 1, T - 1)
            assert moved[b].nonzero().flatten().tolist() == [*range(t, last + 1)], (name, window, t)
            assert not any(x[b, t:].any() for x in grads), (name, window, t)


def layers(ring: Ring) -> None:
    """Two layers, two passes at once: each backward uses its own K and V, and no input is
    overwritten."""
    spec = Spec(2, 2, 16, "float64", lse=True)
    attend = ring.attend(BACKENDS["tiled"])
    draw = torch.Generator().manual_seed(ring.rank)
    calls = [[torch.randn(2, 6, 2, 16, generator=draw, dtype=torch.float64).requires_grad_()
              for _ in range(3)] for _ in range(3)]
    alone = [torch.autograd.grad(attend(*x, spec).square().sum(), x) for x in calls]
    outs = [attend(*x, spec).square().sum() for x in calls]
    mixed = {i: torch.autograd.grad(outs[i], calls[i]) for i in (0, 2, 1)}
    assert all(torch.equal(a, b) for i in range(3) for a, b in zip(alone[i], mixed[i], strict=True))


MODELS: dict[str, dict[str, Any]] = {  # run so
    "compiled": {"attention_backend": "tiled", "position": "alibi"},
    "checkpointing": {"attention_backend": "sdpa_flash", "attention_window": 7, "position": "rope",
                      "qk_norm": True, "tied": False}}


def trained(how: str, ring: Ring | None = None, share: slice = slice(4)) -> list[torch.Tensor]:
    """Loss and gradients of a share of the batch."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=37, vocab_size=50, n_layer=2, n_head=4, n_kv_head=2,
                          n_embd=32, bias=False, **MODELS[how]))
    segments = (torch.arange(37) >= torch.tensor([[9], [20], [21], [36]])).int()
    batch, model.ring = [*torch.randint(50, (2, 4, 37)), segments], ring
    if ring:
        batch = [ring.shard(t[share], pad) for t, pad in zip(batch, (0, -1, -1), strict=True)]
    model.gradient_checkpointing = how == "checkpointing"
    compiled = ring and how == "compiled"
    call: Any = torch.compile(model, backend="aot_eager") if compiled else model
    loss = call(*batch)[1] * (batch[1] >= 0).sum() / (4 * 37)
    loss.backward()
    _, spec, chosen = model.plan(segments=True)[0]
    assert spec.lse == bool(ring) and chosen.backend.name == MODELS[how]["attention_backend"]
    return [loss.detach(), *(p.grad for p in model.parameters())]


def models(ring: Ring, group: Any = None, share: slice = slice(4),
           how: str = "checkpointing") -> None:
    """The loss and the gradients, summed over the group, are those of a model without a ring."""
    for got, want in zip(trained(how, ring, share), trained(how), strict=True):
        if group is not None:
            dist.all_reduce(got, group=group)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def relay(rank: int, _: int) -> None:
    world, pair = dist.group.WORLD, [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    three = dist.new_group([1, 2, 3])
    for group in (world, pair):
        numbers(Ring(group))
        layers(Ring(group))
    if rank:
        numbers(Ring(three), FEW)
    borders(Ring(world))
    models(Ring(pair), pair)
    # Two rings of two, each with its own share of the sequences.
    models(Ring(pair), world, slice(2, 4) if rank > 1 else slice(2), "compiled")


@pytest.mark.slow
def test_rings_of_two_three_and_four_processes() -> None:
    run(relay, 4, timeout=300)


@pytest.mark.parametrize("check", [numbers, borders, models])
def test_a_ring_of_one_process(check) -> None:
    check(Ring())


def test_triton_in_a_ring() -> None:
    if why := BACKENDS["triton"].why_not(Spec(1, 1, 16, "float32", lse=True), Machine.here("cpu")):
        pytest.skip("; ".join(why))
    numbers(Ring(), FEW[1:], ("triton",))


@pytest.mark.parametrize("n, T", [(1, 8), (2, 16), (2, 13), (4, 24), (4, 5), (3, 1), (5, 23)])
def test_shards_are_the_zigzag_and_positions_say_where_they_stand(n, T) -> None:
    t = torch.arange(T).expand(2, T)[:, :, None, None] + torch.tensor([0, 100])[:, None]
    c = -(-T // (2 * n))
    for r in range(n):
        ring = Ring()
        ring.rank, ring.size = r, n
        part = ring.shard(t, -7)
        assert part.shape == (2, 2 * c, 2, 1)
        at = torch.tensor([*range(r * c, r * c + c), *range((2 * n - 1 - r) * c, (2 * n - r) * c)])
        assert torch.equal(ring.positions(2 * c, 2 * n * c), at)
        assert torch.equal(ring.positions(2 * c, T - 1), at.clamp(max=T - 1))
        real = at < T
        assert torch.equal(part[:, real], t[:, at[real]]) and (part[:, ~real] == -7).all()
        if c > 1:
            with pytest.raises(ValueError, match=str(2 * n * (c - 1))):
                ring.positions(2 * c, 2 * n * (c - 1) - 1)


def test_a_cache_is_read_without_the_ring() -> None:
    model = GPT(GPTConfig(block_size=8, vocab_size=9, n_layer=1, n_head=2, n_embd=16))
    model.ring = Ring()
    step = DynamicCache([None], 8, (), "cpu").reserve([1])
    assert model.phase().lse and not model.phase(cache=step).lse
    with pytest.raises(ValueError, match=r"12 .* 8"):
        model(torch.zeros(1, 12, dtype=torch.int64))
