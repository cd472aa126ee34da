"""ring.py: one sequence over 1, 2 and 4 processes against the oracle, and what it sends and keeps.

To start processes takes most of the time. Three and four are started once, and asked everything
(`answers`): of the three, two are a ring, whose ranks are not the global ones.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import Tensor

from attention import BACKENDS, Machine, Partial, Ring, Spec, sdpa_flash, visible
from attention.check import matrix
from attention.check.matrix import Case, Item
from attention.check.properties import probed
from inference.cache import DynamicCache
from model import GPT, GPTConfig

INNER = ("tiled", "sdpa_flash")  # the kernels that run on any CPU
CASES = [
    Case("64", 64, 64),
    Case("97-gqa", 97, 97, H=4),  # 7 positions of filling at 4 processes
    Case("61-window1", 61, 61, window=1),
    Case("90-window16-gqa", 90, 90, H=4, window=16),
    Case("96-window13-mqa-split", 96, 96, H=3, Hkv=1, window=13, layout="split"),
    Case("97-packed", 97, 97, segments="packed"),
    Case("77-padded-window20-BHTD", 77, 77, window=20, segments="padded", layout="BHTD"),
    Case("97-alibi-packed", 97, 97, H=4, segments="packed", alibi="rows"),
    Case("33-D20-scale", 33, 33, D=20, scale=0.4),
    Case("64-large", 64, 64, D=64, size=30),
    Case("128-gqa-size3", 128, 128, H=4, size=3),
    Case("3", 3, 3),  # most processes have filling alone
    Case("1", 1, 1),
]
OF_THREE = [case for case in CASES if case.name in ("64", "97-packed")]
DTYPES = ("float32", "bfloat16")


def answers(rank: int, n: int) -> dict[str, Any]:
    """All that the tests ask of three processes, of which the last two are a ring; or of four."""
    found: dict[str, Any] = {}
    group = dist.new_group([1, 2]) if n == 3 else dist.group.WORLD
    if n == 4 or rank:
        ring = Ring(group)
        found["cases"] = all_cases(ring) if ring.rank == 0 else all_cases(ring) and None
        found["borders"], found["layers"] = borders(ring), layers(ring)
    if n == 4:  # two rings of two, each with its own share of the sequences
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        share = slice(2, 4) if rank > 1 else slice(0, 2)
        found["models"] = [trained(Ring(pairs[rank // 2]), group, share, *m) for m in MODELS[4]]
    elif rank:
        found["models"] = [trained(ring, group, slice(4), *m) for m in MODELS[2]]
    if n == 3:
        found["of three"] = all_cases(Ring(dist.group.WORLD), OF_THREE)
        found["traffic"] = [traffic(Ring(dist.group.WORLD), *how) for how in TRAFFIC]
    return found


@lru_cache
def told(n: int) -> Any:
    try:
        return run(answers, n, timeout=180)
    except AssertionError as e:
        return e  # for each of the tests, of one start


def answer(n: int, what: str) -> list[Any]:
    """What each process found: rings of 2 are asked in a start of 3 processes."""
    start = {2: 3}.get(n, n)
    if isinstance(told(start), AssertionError):
        raise told(start)
    return [found[what] for found in told(start) if what in found]


def place(rank: int, n: int) -> Ring:
    """A place in a ring that sends nothing."""
    ring = Ring()
    ring.rank, ring.size = rank, n
    return ring


def attention(ring: Ring, name: str, case: Case, inputs: Any, dtype: str, pad: float = 0) -> Any:
    """out, dq, dk, dv, as if there were no ring; `pad` fills up q, k and v."""
    q, k, v, dout = inputs
    *_, seg, _, slopes = matrix.inputs(case, dtype)
    leaves = [ring.shard(t, pad).detach().requires_grad_() for t in (q, k, v)]
    part = None if seg is None else ring.shard(seg, -1)
    more = {"alibi_slopes": slopes} if case.alibi else {}
    out = ring.attend(BACKENDS[name])(*leaves, case.spec(dtype, lse=True), segments=part, **more)
    grads = torch.autograd.grad(out, leaves, ring.shard(dout))
    return [ring.gather(t, case.Tq) for t in (out.detach(), *grads)]


# --- numbers ---


def all_cases(ring: Ring, cases: list[Case] = CASES) -> Any:
    """What each case gives, the same bits twice, whatever the filling is."""
    found = {}
    for name, case, dtype in itertools.product(INNER, cases, DTYPES):
        spec, here = case.spec(dtype, lse=True), Machine.here("cpu")
        assert not BACKENDS[name].why_not(spec, here)
        inputs = matrix.inputs(case, dtype)[:4]
        got = attention(ring, name, case, inputs, dtype)
        again = attention(ring, name, case, inputs, dtype, pad=3.0)
        assert all(map(torch.equal, got, again)), f"not the same bits: {case.name}"
        found[name, case.name, dtype] = got
    return found  # by gather(), the same on each process


@lru_cache
def found(n: int) -> Any:
    """All that a ring of n processes gives."""
    return answer(n, "cases")[0] if n > 1 else all_cases(Ring())


@pytest.mark.parametrize("n", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_case_is_right_whatever_the_number_of_processes(n, name, case) -> None:
    """The bound knows nothing of the number of processes: it is the same at 4 as at 1."""
    for dtype in DTYPES:
        got = oracle.Result(*found(n)[name, case.name, dtype])
        exact, rough = matrix.truth(case, dtype), matrix.plain(case, dtype)
        oracle.check(got, rough, exact, getattr(torch, dtype))


@pytest.mark.slow
def test_three_processes_which_know_the_next_from_the_one_before() -> None:
    by_rank = answer(3, "of three")
    for name, case, dtype in itertools.product(INNER, OF_THREE, DTYPES):
        exact, rough = matrix.truth(case, dtype), matrix.plain(case, dtype)
        for found in by_rank:
            got = oracle.Result(*found[name, case.name, dtype])
            oracle.check(got, rough, exact, getattr(torch, dtype))


# --- what an output depends on ---


def borders(ring: Ring, T: int = 29) -> list[str]:
    """A later token moves no earlier output, nor an output before it a gradient, on any process."""
    wrong, c = [], -(-T // (2 * ring.size))
    tokens = sorted({*range(c - 1, T, c), *range(c, T, c), T - 1})
    rows = torch.arange(len(tokens))  # a row of the batch for each
    for name, window in itertools.product(INNER, (None, 5)):
        case = Case("canary", T, T, H=4, B=len(tokens), window=window)
        q, k, v, dout = matrix.inputs(case, "float32")[:4]
        before = attention(ring, name, case, (q, k, v, dout), "float32")[0]
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[rows, tokens] = 3 - x[rows, tokens]
        after = attention(ring, name, case, (*changed, dout), "float32")[0]
        moved = (after != before).flatten(2).any(dim=2)
        early = dout.clone()
        for b, t in enumerate(tokens):
            early[b, t:] = 0
        grads = attention(ring, name, case, (q, k, v, early), "float32")[1:]
        for b, t in enumerate(tokens):
            last = T - 1 if window is None else min(t + window - 1, T - 1)
            if moved[b].nonzero().flatten().tolist() != list(range(t, last + 1)):
                wrong.append(f"{name}, window {window}: {t} moves {moved[b].tolist()}")
            if any(x[b, t:].any() for x in grads):
                wrong.append(f"{name}, window {window}: gradients from {t} on")
    return wrong


@pytest.mark.parametrize("n", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_nothing_leaks_across_the_borders_of_chunks_and_processes(n) -> None:
    assert not any(answer(n, "borders") if n > 1 else borders(Ring()))


def layers(ring: Ring) -> bool:
    """Two layers, and two passes at once: each backward pass uses the K and V of its own forward,
    though another one came since, and its inputs were overwritten nowhere."""
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
    assert all(answer(n, "layers"))


# --- what is sent, and what is kept ---


TRAFFIC = (31, False, "float32", None), (31, True, "bfloat16", 2)


def traffic(ring: Ring, T: int, segments: bool, dtype: str, window: int | None) -> Any:
    """What this process sends forward and backward, in order with its computations."""
    spec = Spec(4, 2, 16, dtype, window=window, segments=segments, lse=True)
    log: list[Any] = []
    send = dist.batch_isend_irecv

    def counted(ops: list[Any]) -> Any:
        sent = [op.tensor for op in ops if op.op is dist.isend]
        log.append(("send", sum(t.nbytes for t in sent)))
        works = send(ops)
        wait = lambda *limit, w: (log.append(("wait",)), w.wait(*limit))  # noqa: E731
        return [SimpleNamespace(wait=partial(wait, w=w)) for w in works]

    def logged(f: Any) -> Any:
        return lambda *args: (log.append(("compute",)), f(*args))[1]

    tiled = BACKENDS["tiled"]
    assert tiled.partial
    kernel = Partial(logged(tiled.partial.forward), logged(tiled.partial.backward))
    whole = [torch.randn(2, T, h, 16, dtype=getattr(torch, dtype)) for h in (4, 2, 2)]
    q, k, v = (ring.shard(t).requires_grad_() for t in whole)
    seg = ring.shard(torch.zeros(2, T, dtype=torch.int32), -1) if segments else None
    dist.batch_isend_irecv = counted
    out = ring.attend(replace(tiled, partial=kernel))(q, k, v, spec, segments=seg)
    forward, log[:] = list(log), []
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    dist.batch_isend_irecv = send
    return forward, log, q.shape[1]


@pytest.mark.slow
@pytest.mark.parametrize("which", range(len(TRAFFIC)))
def test_bytes_are_those_of_the_docstring_and_sent_while_a_block_is_computed(which) -> None:
    n, B, Hkv, D = 3, 2, 2, 16
    T, segments, dtype, window = TRAFFIC[which]
    for forward, backward, T_r in (found[which] for found in answer(n, "traffic")):
        assert T_r == 2 * -(-T // (2 * n))
        item = torch.finfo(getattr(torch, dtype)).bits // 8
        block = 2 * B * T_r * Hkv * D * item + 4 * B * T_r * segments
        sums = 8 * B * T_r * Hkv * D
        sent = [[e[1] for e in events if e[0] == "send"] for events in (forward, backward)]
        assert sent[0] == [block] * (n - 1)
        assert sorted(sent[1]) == sorted([block] * (n - 1) + [sums] * n)
        if window is None:  # else there are steps at which nothing is computed
            order = [name for name, _ in itertools.groupby(e[0] for e in forward)]
            assert order == [*["send", "compute", "wait"] * 2, "compute"]
            order = [name for name, _ in itertools.groupby(e[0] for e in backward)]
            assert order[:3] == ["send", "compute", "send"]


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


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 5, 9])
def test_every_visible_pair_is_computed_once_and_no_hidden_tile_at_all(n, window) -> None:
    c, times = 3, torch.zeros(6 * n, 6 * n)
    work = []
    for r in range(n):
        at = place(r, n).positions(2 * c, 6 * n)
        for step in range(n):
            keys = place((r - step) % n, n).positions(2 * c, 6 * n)
            for I, J, offset in place(r, n).tiles(step, 2 * c, window):
                i, j = torch.arange(c)[:, None], torch.arange(c)
                seen = visible(i, j, offset, window)
                assert seen.any()
                times[at[I, None], keys[J]] += seen
        work.append(int(times[at].sum()))
    i, j = torch.arange(6 * n)[:, None], torch.arange(6 * n)
    assert torch.equal(times.bool(), visible(i, j, 0, window)) and times.max() == 1
    if window is None:
        assert len(set(work)) == 1, "causal work is even"


# --- sdpa_flash on CUDA: its operators' documented masks, in float64 ---


def _flash(q: Tensor, k: Tensor, v: Tensor, p: float, causal: bool, debug: bool = False, *,
           scale: float) -> Any:
    """aten._scaled_dot_product_flash_attention: (B, H, T, D), causal to the bottom-right corner."""
    assert q.dtype in (torch.float16, torch.bfloat16) and q.shape[3] % 8 == 0 and not (p or debug)
    k, v = (t.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    S = scale * q.double() @ k.mT
    if causal:
        i, j = torch.arange(S.shape[2])[:, None], torch.arange(S.shape[3])
        S = S.masked_fill(j > i + S.shape[3] - S.shape[2], -torch.inf)
    return (S.softmax(dim=-1) @ v).to(q.dtype), S.logsumexp(dim=-1).float(), S, v, k


def _flash_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, L: Tensor,
                    cum_q: None, cum_k: None, max_q: int, max_k: int, p: float, causal: bool,
                    seed: Tensor, offset: Tensor, *, scale: float) -> Any:
    assert (max_q, max_k) == (q.shape[2], k.shape[2]) and out.dtype == dout.dtype == q.dtype
    assert L.dtype == torch.float32 and L.is_contiguous() and L.shape == q.shape[:3]
    S, values, keys = _flash(q, k, v, p, causal, scale=scale)[2:]
    P = (S - L[..., None]).exp()
    D = (dout.double() * out.double()).sum(dim=-1, keepdim=True)
    dS = P * (dout.double() @ values.mT - D)
    group = q.shape[1] // k.shape[1]
    dk, dv = ((x.mT @ y.double()).unflatten(1, (-1, group)).sum(dim=2)
              for x, y in ((scale * dS, q), (P, dout)))
    return tuple(t.to(q.dtype) for t in (scale * dS @ keys, dk, dv))


def test_sdpa_flash_on_cuda_by_stand_ins_of_its_operators(monkeypatch) -> None:
    monkeypatch.setattr(sdpa_flash, "aten", SimpleNamespace(
        _scaled_dot_product_flash_attention=_flash,
        _scaled_dot_product_flash_attention_backward=_flash_backward))

    class OnCuda(Tensor):
        is_cuda, is_cpu = True, False

    def moved(args: Any) -> Any:
        return [x.as_subclass(OnCuda) if isinstance(x, Tensor) else x for x in args]

    def forward(*args: Any) -> Any:
        out, L = sdpa_flash.PARTIAL.forward(*moved(args))
        return out.as_subclass(Tensor), L.as_subclass(Tensor)

    def backward(*args: Any) -> Any:
        return [t.as_subclass(Tensor) for t in sdpa_flash.PARTIAL.backward(*moved(args))]

    backend = replace(BACKENDS["sdpa_flash"], partial=Partial(forward, backward))
    for Hkv, D, scale in ((4, 32, None), (2, 20, None), (1, 64, 0.3)):
        case = Case("50", 50, 50, 4, Hkv, D, scale=scale, lse=True)
        probed(Item(case, "float16", probed, ()).of(backend, case.spec("float16"), "cpu"))


# --- the model ---


def trained(ring: Ring | None, group: Any, share: slice, asked: dict[str, Any],
            checkpointing: bool = False, compiled: bool = False) -> Any:
    """Loss and gradients of one batch, of which this ring has a share, summed over the group."""
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


def test_triton_in_a_ring_takes_packed_texts() -> None:
    case = next(c for c in CASES if c.name == "97-packed")
    if BACKENDS["triton"].why_not(case.spec("float32", lse=True), Machine.here("cpu")):
        pytest.skip("triton cannot run here")
    inputs = matrix.inputs(case, "float32")[:4]
    got = oracle.Result(*attention(Ring(), "triton", case, inputs, "float32"))
    exact, rough = matrix.truth(case, "float32"), matrix.plain(case, "float32")
    oracle.check(got, rough, exact, torch.float32)


@pytest.mark.parametrize("n", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
@pytest.mark.parametrize("which", [0, 1])
def test_a_model_over_rings_has_the_loss_and_the_gradients_of_one_process(n, which) -> None:
    """The second with checkpointing, and at 4, where there are two rings, compiled."""
    asked, *how = MODELS[n][which]
    want = trained(None, None, slice(4), asked)
    if n == 1:
        all_found = [trained(Ring(), None, slice(4), asked, *how)]
    else:
        all_found = [found[which] for found in answer(n, "models")]
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
