"""ring.py: one sequence over 1, 2 and 4 processes against the oracle.

Four processes are started once for all tests (`answers`).
"""

from __future__ import annotations

import itertools
from functools import lru_cache
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

HERE = Machine.here("cpu")
INNER = ("tiled", "sdpa_flash")  # the kernels that run on any CPU
# At 4 processes 97 has 7 positions of filling; of 3 and 1 most processes have filling alone.
CASES = matrix.cases("""64, gqa-97, window1-61, window16-90 gqa, window13-96 H3 mqa split,
    packed-97, padded-window20-BHTD-77, rows-packed-97 gqa, scale-33 D20, large-64 D64,
    size3-128 gqa, 3, 1, window16-600 B1 H1 Hkv1 D16""")
OF_THREE = [case for case in CASES if case.name in ("64", "packed-97")]
DTYPES = ("float32", "bfloat16")


def answers(rank: int, n: int) -> dict[tuple[str, int], Any]:
    """By what is asked, and the processes that share a sequence."""
    world, pair = dist.group.WORLD, [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    three, share = dist.new_group([1, 2, 3]), slice(2, 4) if rank > 1 else slice(0, 2)
    four, two = Ring(world), Ring(pair)
    found: dict[tuple[str, int], Any] = {
        ("cases", 4): all_cases(four), ("cases", 2): all_cases(two), ("borders", 4): borders(four),
        ("layers", 4): layers(four), ("layers", 2): layers(two),
        ("models", 2): [trained(two, pair, slice(4), *m) for m in MODELS[2]],
        # Two rings of two, each with its own share of the sequences.
        ("models", 4): [trained(two, world, share, *m) for m in MODELS[4]]}
    return found | ({("cases", 3): all_cases(Ring(three), OF_THREE)} if rank else {})


@lru_cache
def told() -> Any:
    try:
        return run(answers, 4, timeout=300)
    except AssertionError as e:
        return e  # for each of the tests, of one start


def answer(what: str, n: int) -> list[Any]:
    if isinstance(told(), AssertionError):
        raise told()
    return [found[what, n] for found in told() if (what, n) in found]


def place(rank: int, n: int) -> Ring:
    ring = Ring()
    ring.rank, ring.size = rank, n
    return ring


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


# --- numbers ---


def all_cases(ring: Ring, cases: list[Case] = CASES, inner: tuple[str, ...] = INNER,
              dtypes: tuple[str, ...] = DTYPES) -> Any:
    """Equal bits twice, whatever the padding."""
    found = {}
    for name, case, dtype in itertools.product(inner, cases, dtypes):
        inputs = matrix.inputs(case, dtype)[:4]
        got = attention(ring, name, case, inputs, dtype)
        again = attention(ring, name, case, inputs, dtype, pad=3.0)
        assert all(map(torch.equal, got, again)), f"not the same bits: {case.name}"
        found[name, case, dtype] = got
    return found  # by gather(), the same on each process


@pytest.mark.parametrize("n", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4))])
def test_every_case_is_right_whatever_the_number_of_processes(n) -> None:
    by_rank = [all_cases(Ring())] if n == 1 else answer("cases", n)
    if n == 1 and not BACKENDS["triton"].why_not(Spec(1, 1, 16, "float32", lse=True), HERE):
        by_rank.append(all_cases(Ring(), OF_THREE[1:], ("triton",), ("float32",)))
    for found in by_rank:
        for (_, case, dtype), tensors in found.items():
            matrix.compare(Result(*tensors), case, dtype, "cpu")


# --- what an output depends on ---


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


@pytest.mark.parametrize("n", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_nothing_leaks_across_the_borders_of_chunks_and_processes(n) -> None:
    assert [None] * n == (answer("borders", n) if n > 1 else [borders(Ring())])


def layers(ring: Ring) -> bool:
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
    return all(torch.equal(a, b) for i in range(3) for a, b in zip(alone[i], mixed[i], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_the_backward_pass_takes_the_keys_of_its_own_forward_pass(n) -> None:
    assert all(answer("layers", n))


# --- without processes ---


@pytest.mark.parametrize("n, T", [(1, 8), (2, 16), (2, 13), (4, 24), (4, 5), (3, 1), (5, 23)])
def test_shards_are_the_zigzag_and_positions_say_where_they_stand(n, T) -> None:
    t = torch.arange(T).expand(2, T)[:, :, None, None] + torch.tensor([0, 100])[:, None]
    c = -(-T // (2 * n))
    for r in range(n):
        ring = place(r, n)
        part = ring.shard(t, -7)
        assert part.shape == (2, 2 * c, 2, 1)
        at = torch.tensor([*range(r * c, r * c + c), *range((2 * n - 1 - r) * c, (2 * n - r) * c)])
        assert torch.equal(ring.positions(2 * c, 2 * n * c), at)
        assert torch.equal(ring.positions(2 * c, T - 1), at.clamp(max=T - 1))
        real = at < T
        assert torch.equal(part[:, real], t[:, at[real]]) and (part[:, ~real] == -7).all()
        if c > 1:
            with pytest.raises(ValueError, match=f"fit into block_size {2 * n * (c - 1)}"):
                ring.positions(2 * c, 2 * n * (c - 1) - 1)


# --- the model ---


def trained(ring: Ring | None, group: Any, share: slice, asked: dict[str, Any],
            checkpointing: bool = False, compiled: bool = False) -> Any:
    """This ring has a share of the batch; summed over the group."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=37, vocab_size=50, n_layer=2, n_head=4, n_kv_head=2,
                          n_embd=32, bias=False, **asked))
    idx, targets = torch.randint(50, (2, 4, 37))
    segments = (torch.arange(37) >= torch.tensor([[9], [20], [21], [36]])).int()
    model.ring = ring
    if ring:
        idx, targets, segments = (
            ring.shard(t[share], pad) for t, pad in ((idx, 0), (targets, -1), (segments, -1))
        )
    model.gradient_checkpointing = checkpointing
    call: Any = model
    if compiled:
        call = torch.compile(model, backend="aot_eager")
    loss = call(idx, targets, segments)[1] * (targets >= 0).sum() / (4 * 37)
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters())]
    if group is not None:
        for t in found:
            dist.all_reduce(t, group=group)
    _, spec, chosen = model.plan(segments=True)[0]
    assert spec.lse == bool(ring) and chosen.backend.name == asked["attention_backend"]
    return found


TILED = {"attention_backend": "tiled"}
WINDOW = {"attention_backend": "sdpa_flash", "attention_window": 7, "position": "rope",
          "qk_norm": True, "tied": False}
MODELS: dict[int, list[Any]] = {  # by processes: what trained() takes last
    1: [(TILED,), ({**WINDOW, "position": "alibi"}, True)],
    2: [(TILED,), (WINDOW, True)],
    4: [(TILED,), (WINDOW, False, True)],
}


@pytest.mark.parametrize("n", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
@pytest.mark.parametrize("which", [0, 1])
def test_a_model_over_rings_has_the_loss_and_the_gradients_of_one_process(n, which) -> None:
    """With checkpointing; two rings compiled."""
    asked, *how = MODELS[n][which]
    want = trained(None, None, slice(4), asked)
    if n == 1:
        all_found = [trained(Ring(), None, slice(4), asked, *how)]
    else:
        all_found = [found[which] for found in answer("models", n)]
    for got in all_found:
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_cache_is_read_without_the_ring() -> None:
    model = GPT(GPTConfig(block_size=8, vocab_size=9, n_layer=1, n_head=2, n_embd=16))
    model.ring = Ring()
    step = DynamicCache(1, max_len=8).reserve(1)
    assert model.phase().lse and not model.phase(cache=step).lse
    with pytest.raises(ValueError, match="1 processes with 12 tokens each have more than fit"):
        model(torch.zeros(1, 12, dtype=torch.int64))
