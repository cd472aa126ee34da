from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from course.exercises import SCALE, UNMASKED
from course.exercises.check import Live, Wrong, causal, compare, draws, same
from model import GPTConfig, rope_rates, rotate

LAZY_CASES: list[tuple[list[list[float]], int, float]] = [  # scores, block, threshold
    ([[0, 3, 4, 1, 9]], 1, 8.0),  # by 3, 1 and 5: 9 above the m kept
    ([[0, 20, 21, 50], [0, 1, 2, -math.inf]], 1, 8.0),  # one of two rows grows
    ([[0, 20, 20], [0, 5, 12]], 1, 8.0),  # a row below the threshold keeps its m
    ([[0, 8, 8, 8, 16]], 1, 8.0),  # equal: not more
    ([[0, 1, 1, 2]], 1, 0.0),  # the ordinary online softmax
    ([[5.0 * n for n in range(40)]], 1, 8.0),  # small steps, up to 2^195: past float32
]
LAZY = [
    ("(top > m + threshold)[:, 0]", "torch.ones(T, dtype=torch.bool) & (first > 0)",
     "Rescale only rows whose maximum is more than the threshold above their m"),
    ("top > m + threshold", "top > m", "Rescale only above the threshold"),
    ("int(rows.sum())", "int(rows.any())", "Count the rescaled rows, not the blocks"),
    ("S_j - m)", "S_j - top)", "P is 2^(S - m) with the m that was kept"),
    ("l[rows] *= rescale", "pass", "Rescale l as well as O"),
    ("O[rows] *= rescale", "pass", "Rescale O as well as l"),
    ("m[rows] = top[rows]", "m = top", "Compare the maximum with the m that was kept"),
]


def lazy(answer: ModuleType) -> None:
    draw = torch.Generator().manual_seed(8)
    cases = [(torch.tensor(S, dtype=torch.float32), b, t) for S, b, t in LAZY_CASES]
    cases.append((6 * torch.randn(16, 48, generator=draw), 8, 8.0))
    for S, block, threshold in cases:
        V = torch.randint(1, 9, (S.shape[1], 1), generator=draw).float()
        case = f"S of shape {tuple(S.shape)}, block = {block}, threshold = {threshold}"
        case = f"S = {S.tolist()}, threshold = {threshold}" if S.numel() < 12 else case
        P = torch.exp2(S - S.amax(1, keepdim=True))
        wanted = {"out": P @ V / P.sum(1, keepdim=True), "L": S.amax(1) + P.sum(1).log2(),
                  "rescaled": torch.tensor(count(S, block, threshold))}

        def attend(*inputs: object) -> tuple[object, ...]:
            out, L, rescaled = answer.attend(*inputs)
            return out, L, torch.tensor(int(rescaled))

        compare(attend, [S, V, block, threshold], wanted, case)


def count(S: Tensor, block: int, threshold: float) -> int:
    first, *later = S.split(block, dim=1)
    m, rescaled = first.amax(1), 0
    for S_j in later:
        past = S_j.amax(1) > m + threshold
        m = torch.where(past, S_j.amax(1), m)
        rescaled += int(past.sum())
    return rescaled


PAGED = [
    ("page_table[j // page_size].long()", "j // page_size",
     "The page table says which pages hold the tokens, in which order"),
    ("torch.arange(length)", "torch.arange(-(-length // page_size) * page_size)",
     "Read the last page only up to `length`"),
    ("torch.arange(length)", "torch.arange(length - 1)", "The newest token sees itself, too"),
    (" / math.sqrt(D)", "", SCALE),
]


def paged(answer: ModuleType) -> None:
    # Pages in order; out of order; a full last page; a last page with one token.
    for table, length in (([1, 0, 0], 4), ([5, 2, 0], 6), ([3, 6, 1], 12), ([4, 5, 2], 9)):
        draw = torch.Generator().manual_seed(length)
        k_pages, v_pages = torch.randn(2, 7, 4, 2, generator=draw)
        q, page_table = torch.tensor([2.0, 1.0]), torch.tensor(table, dtype=torch.int32)
        case = f"page_table = {table}, page_size = 4, length = {length}"
        k, v = (pages[page_table.long()].flatten(0, 1)[:length] for pages in (k_pages, v_pages))
        out = torch.softmax(k @ q / math.sqrt(2), dim=0) @ v
        compare(answer.attend, [q, k_pages, v_pages, page_table, length], {"out": out}, case)
        other = torch.ones(7, 4, dtype=torch.bool)
        for j in range(length):
            other[table[j // 4], j % 4] = False
        k_pages[other] = v_pages[other] = torch.nan
        got = answer.attend(q, k_pages, v_pages, page_table, length)
        says = f"out is NaN if unused places hold NaN, {case}: read nothing behind `length`"
        assert not got.isnan().any(), says


WEIGHTED = "share * O + share_new * O_new"
PROBS = "S - L[:, None]"
DELTA = "(dout * out).sum(dim=1, keepdim=True)"
WHOLE = "L is of the block alone: P = exp(S - L) with the L over ALL keys"
RING = [
    (WEIGHTED, "(O + O_new) / 2", "Weight each by its share, exp(L - L_of_both)"),
    ("torch.logaddexp(L, L_new)", "torch.log(torch.exp(L) + torch.exp(L_new))",
     "exp(L) overflows above 88: use logaddexp"),
    (".nan_to_num()", "", "O is NaN, since -inf - (-inf) is NaN: its share is any finite number"),
    ("torch.logaddexp(L, L_new)", "torch.maximum(L, L_new)", "L is logaddexp of both"),
    (PROBS, "S - S.logsumexp(1, keepdim=True)", WHOLE),
    (DELTA, "(P * dP).sum(dim=1, keepdim=True)",
     "delta is of the block alone: it is rowsum(dout * out), with the out over ALL keys"),
    (f"P * (dP - {DELTA})", "P * dP", "Subtract delta = rowsum(dout * out) from dP"),
    ("P * (dP - (dout", "(dP - (dout", "Multiply dP - delta by P"),
    (".masked_fill(j > i + offset, 0.0)", "", UNMASKED),
    ("j > i + offset", "j > i", "Query i sees key j where j <= i + offset, not j <= i"),
    ("tau * (dS @ k)", "dS @ k", "Scale dq by 1 / sqrt(D)"),
]


def ring(answer: ModuleType) -> None:
    never = -math.inf
    both = torch.tensor([[[1.0], [6.0]], [[5.0], [-2.0]]])  # O and O_new
    for parts in (((1.0, 1.0), (1.0, 3.0)), ((1000.0, -900.0), (1016.0, -916.0)),
                 ((2.0, never), (never, 0.5)), ((never, 1.0), (never, 1.0))):
        L = torch.tensor(parts)
        O = both.masked_fill(L[..., None] == never, 0)
        shares = torch.exp(L - L.logsumexp(0)).nan_to_num()[..., None]
        wanted = {"O": (shares * O).sum(0), "L": L.logsumexp(0)}
        compare(answer.join, [O[0], L[0], O[1], L[1]], wanted,
                f"L = {parts[0]}, L_new = {parts[1]}")
    for Tq, Tk, offset in ((3, 3, 3), (3, 3, 0), (4, 4, 2), (4, 4, -2), (2, 5, 3)):
        # Another process computes the earlier keys' part of dq.
        (q, dout), (k, v), before = draws(10 * Tq + Tk + offset, (2, Tq, 4), (2, Tk, 4), (2, 3, 4))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        S = (q @ k.T / 2).masked_fill(~causal(Tq, Tk, offset), -math.inf)
        whole = torch.cat([q.detach() @ before[0].T / 2, S], dim=1)
        out, L = whole.softmax(1) @ torch.cat([before[1], v]), whole.logsumexp(1)
        want = torch.autograd.grad(out, leaves, dout)
        inputs = [t.detach() for t in (dout, q, k, v, out, L)]
        compare(answer.backward_block, [*inputs, offset], dict(zip(("dq", "dk", "dv"), want)),
                f"Tq = {Tq}, Tk = {Tk}, offset = {offset}")


SPLIT = "a, b = x.chunk(2, dim=1)"
INTERLEAVED = "a, b = x[:, ::2], x[:, 1::2]"
TURN = "a * cos - b * sin, b * cos + a * sin"
COSINES = "\n    cos, sin = torch.cos(angle), torch.sin(angle)\n    return "
TURNED = "rotate(q, torch.arange(Tk - Tq, Tk), theta)"
ROPE = [
    (f"{SPLIT}{COSINES}torch.cat([{TURN}], dim=1)",
     f"{INTERLEAVED}{COSINES}torch.stack([{TURN}], dim=2).flatten(1)",
     "A pair is channels i and i + D / 2, not 2 i and 2 i + 1"),
    (TURN, "a * cos + b * sin, b * cos - a * sin",
     "Turn from the first channel of a pair to the second"),
    (" * theta ** (-torch.arange(0, D, 2) / D)", " * torch.ones(D // 2)",
     "Each pair has its own rate, theta ** (-2 i / D)"),
    (TURN, "a * cos, b * cos", "The sine is missing"),
    ("torch.arange(Tk - Tq, Tk)", "torch.arange(Tq)", "Query i stands at position i + Tk - Tq"),
    (f"{TURNED} @ k.T", f"{TURNED} @ rotate(k, torch.arange(Tk), theta).T",
     "The keys in the cache are rotated already"),
    (TURNED, "q", "Rotate the queries"),
    (" / q.shape[1] ** 0.5", "", SCALE),
]


def rope(answer: ModuleType) -> None:
    draw = torch.Generator().manual_seed(0)
    for D, theta in ((2, 10000.0), (4, 10000.0), (8, 500.0)):
        config = GPTConfig(n_head=1, n_embd=D, position="rope", rope_theta=theta)
        rates = rope_rates(config, torch.device("cpu"))

        def turned(x: Tensor, positions: Tensor, rates: Tensor = rates) -> Tensor:
            angles = positions[:, None, None] * rates
            return rotate(x[:, None], angles.cos(), angles.sin())[:, 0]

        q, k = torch.randn(2, 5, D, generator=draw)
        at = torch.tensor([0, 1, 5, 6, 30])
        case = f"positions = {at.tolist()}, D = {D}, theta = {theta:g}"
        compare(answer.rotate, [q, at, theta], {"rotate()": turned(q, at)}, case)
        near = answer.rotate(q, at, theta) @ answer.rotate(k, at, theta).T
        far = answer.rotate(q, at + 100, theta) @ answer.rotate(k, at + 100, theta).T
        assert torch.allclose(near, far, atol=1e-3), f"q · k changes if all move by 100, {case}"

        keys, q = turned(k, torch.arange(5)), q[:2]
        want = turned(q, torch.arange(2) + 3) @ keys.T / D**0.5
        compare(answer.scores, [q, keys, theta], {"scores()": want},
                f"Tq = 2, Tk = 5, D = {D}, theta = {theta:g}")


PALM = "12 * n_layer * n_head * head_dim * T"
MFU = [
    ('peaks["dense"]', 'peaks["sparse"]', "Divide by the dense peak"),
    (f" + {PALM}", "", f"The products of attention are missing: {PALM}"),
    (" * head_dim * T", " * head_dim", "The products of attention grow with T"),
    ("6 * (", "2 * (", "2 operations for a parameter forward, 4 backward: 6 * parameters"),
    (PALM, PALM.replace("12", "6"), "PaLM and nanoGPT count all T keys, not the visible half"),
    ("(parameters - positions)", "parameters", "Leave out the position embeddings"),
    ("6 * (parameters", "(8 if recomputes else 6) * (parameters",
     "What is recomputed does not count"),
]


def mfu(answer: ModuleType) -> None:
    # GPT-2 medium at 150,000 tokens/s on an H100
    N, positions, pairs, peak = 353_774_592, 1024 * 1024, 24 * 16 * 64 * 1024, 989.4e12
    want = torch.tensor((6 * N + 12 * pairs) * 150_000 / peak)
    for recomputes in (False, True):
        got = answer.mfu(N + positions, positions, 24, 16, 64, 1024, 150_000.0,
                         {"dense": peak, "sparse": 2 * peak}, recomputes)
        same(torch.tensor(float(got)), want, "mfu", f"recomputes={recomputes}")


ABSORBED = 'torch.einsum("hd,hdr->hr", q, A) @ c.T'
OUT = 'torch.einsum("hr,hdr->hd", P @ c, B)'
EXPANDED = "A^T q once instead of A c for every token, and B once for the mean of c"
WIDTH = "A key has D + R channels: divide the scores by sqrt(D + R)"
MLA = [
    (ABSORBED, 'torch.einsum("hd,htd->ht", q, torch.einsum("tr,hdr->htd", c, A))', EXPANDED),
    (OUT, 'torch.einsum("ht,htd->hd", P, torch.einsum("tr,hdr->htd", c, B))', EXPANDED),
    ("(D + R) ** 0.5", "D ** 0.5", WIDTH),
    ("(D + R) ** 0.5", "cache.shape[1] ** 0.5", "Absorbing A does not change the scores"),
    (" / (D + R) ** 0.5", "", WIDTH),
    (" + q_rope @ k_rope.T", "", "The part of the scores that knows positions is missing"),
    ("dim=-1", "dim=0", "Softmax over the tokens, not over the heads"),
    ("P @ c, B)", "P @ c, A)", "The values have a matrix of their own, B"),
    (OUT, "P @ c", "The weighted mean of c has still to be multiplied by B"),
]


def mla(answer: ModuleType) -> None:
    for H, D, R, r, T in ((1, 3, 2, 3, 4), (3, 4, 2, 5, 7), (4, 16, 8, 12, 400)):
        q, q_rope, cache, A, B = draws(0, (H, D), (H, R), (T, r + R), (H, D, r), (H, D, r))
        c, k_rope = cache.split([r, R], dim=1)
        scores = torch.stack([(c @ A[h].T) @ q[h] + k_rope @ q_rope[h] for h in range(H)])
        P = torch.softmax(scores / math.sqrt(D + R), dim=1)
        want = torch.stack([P[h] @ (c @ B[h].T) for h in range(H)])
        case = f"H = {H}, D = {D}, R = {R}, r = {r}, T = {T}"
        inputs = [t.clone() for t in (q, q_rope, cache, A, B)]
        with Live() as live:
            got = answer.attend(*inputs)
        same(got, want, "out", case)
        if T > 100 and live.most >= T * H * D:
            raise Wrong("the tensors that were made hold T H D numbers or more: these are the keys "
                        "or values of every head", case)


CHECKS = {"8": (lazy, LAZY), "9": (paged, PAGED), "10": (ring, RING), "11": (rope, ROPE),
          "12": (mfu, MFU), "13": (mla, MLA)}
