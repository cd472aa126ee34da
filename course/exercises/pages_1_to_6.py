from __future__ import annotations

from collections import Counter
from itertools import product
from types import ModuleType

import torch
from torch import Tensor

from attention.spec import visible
from attention.tiled import blocks, wholly_masked
from course.exercises import ALIGNED, SCALE, UNMASKED
from course.exercises.check import Forbidding, Live, Wrong, causal, compare, draws, reference, same

LOOKUP = [
    ("return e / e.sum()", "return e", "Divide exp(s) by its sum"),
    ("s - s.max()", "s", "Subtract the largest score before exp(), or exp() overflows"),
    ("s - s.max()", "s.clamp(-80, 80)", "Do not clamp: subtract the largest score"),
    (" / math.sqrt(len(q))", "", SCALE),
    ("/ math.sqrt(len(q))", "/ len(q)", "Divide the scores by sqrt(D), not by D"),
    (" @ V", " @ K", "Sum the values, not the keys"),
    ("softmax(K @ q / math.sqrt(len(q)))", "(K @ q / math.sqrt(len(q)))",
     "The weights are the softmax of the scores"),
]


def lookup(answer: ModuleType) -> None:
    names = ("softmax", "log_softmax", "logsumexp", "_softmax")
    with Forbidding(*names, instead="write softmax with exp, sum and max"):
        answer.softmax(torch.tensor([1.0, 2.0]))
    for s in torch.tensor([[1.0, 2, 3], [2, 2, 2], [1000, 1001, 0], [-1000, -1001, -1000]]):
        compare(answer.softmax, [s], {"softmax(s)": s.softmax(0)}, f"s = {s.tolist()}")
    for T, D in ((1, 4), (3, 2), (30, 9)):
        q, K, V = draws(0, (D,), (T, D), (T, D))
        out = reference(q[None], K, V, causal(1, T, T))[0][0]
        compare(answer.attend, [q, K, V], {"attend(q, K, V)": out}, f"T = {T}, D = {D}")


MASKS: list[tuple[int, int, int | None, list[int] | None]] = [  # Tq, Tk, window, segments
    (3, 3, None, None), (3, 5, None, None), (5, 3, None, None), (4, 4, 2, None), (3, 6, 2, None),
    (4, 4, None, [0, 0, 1, 1]), (4, 6, 3, [1, 1, 1, 1, 0, 0]),
]
MASK = [
    ("[:, None] + Tk - Tq", "[:, None]", "Query i stands at position i + Tk - Tq"),
    ("j > i - window", "j >= i - window", "A query is in its window: it sees window - 1 others"),
    ("seen = j <= i", "seen = j < i", "A query sees itself"),
    ("seen = j <= i", "seen = j >= i", "A query sees earlier keys, not later ones"),
    ("return seen", "return ~seen", "True means that the query sees the key"),
    ("segments[i.clamp(min=0)]", "segments[(i - Tk + Tq).clamp(max=Tk - 1)]",
     "The document of query i is that of position i + Tk - Tq"),
    ("seen &= segments[i.clamp(min=0)] == segments", "pass", "Other documents are visible"),
]


def mask(answer: ModuleType) -> None:
    for Tq, Tk, window, seg in MASKS:
        segments = None if seg is None else torch.tensor(seg)
        got = answer.mask(Tq, Tk, window, segments)
        case = f"mask({Tq}, {Tk}, window={window}, segments={seg})"
        says = f"{case} must return a bool tensor ({Tq}, {Tk})"
        assert isinstance(got, Tensor) and (got.dtype, got.shape) == (torch.bool, (Tq, Tk)), says
        i, j = torch.arange(Tq)[:, None], torch.arange(Tk)
        own = (None, None) if segments is None else (segments[(i + Tk - Tq).clamp(min=0)], segments)
        if wrong := torch.nonzero(got != visible(i, j, Tk - Tq, window, *own)).tolist():
            raise Wrong(f"wrong at {wrong[0]}", case, got)


HEADS = {  # H, Hkv, seen
    "a causal mask": (2, 2, torch.ones(3, 3).tril().bool()),
    "a window": (1, 1, torch.ones(2, 5).tril(3).triu(1).bool()),
    "4 query heads, 2 key/value heads": (4, 2, torch.ones(3, 3).tril().bool()),
    "a query that sees no key": (4, 2, torch.ones(4, 3).tril(-1).bool()),
}
HIDE = "scores.masked_fill(~seen, torch.finfo(scores.dtype).min)"
FORMULA = [
    (" / math.sqrt(D)", "", SCALE),
    ("t.repeat_interleave(H // k.shape[1], dim=1)", "t.repeat(1, H // k.shape[1], 1)",
     "Head h reads head h // (H / Hkv), not h % Hkv"),
    ("dim=-1", "dim=0", "Softmax over the keys, not over the heads"),
    ("~seen", "seen", "The mask is inverted: hide the keys where seen is False"),
    (HIDE, "scores", "Hide the keys before softmax: weights zeroed after it do not sum to 1"),
    (f"    scores = {HIDE}\n    probs = torch.softmax(scores, dim=-1).masked_fill(~seen, 0.0)",
     "    probs = torch.softmax(scores, dim=-1)", "The mask is missing"),
    (".masked_fill(~seen, 0.0)", "", "A query that sees no key must return zeros"),
    ("(scores, dim=-1).masked_fill(~seen, 0.0)", "(scores.masked_fill(~seen, -math.inf), dim=-1)",
     "Softmax of a row of -inf is NaN"),
]


def formula(answer: ModuleType) -> None:
    for case, (H, Hkv, seen) in HEADS.items():
        Tq, Tk = seen.shape
        q, k, v, dout = draws(0, (Tq, H, 4), (Tk, Hkv, 4), (Tk, Hkv, 4), (Tq, H, 4))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        Q, K, V = (t.repeat_interleave(H // t.shape[1], 1).transpose(0, 1) for t in leaves)
        want = reference(Q, K, V, seen)[0].transpose(0, 1)
        with Forbidding("scaled_dot_product_attention", instead="compute the scores yourself"):
            out = answer.attention(*(t.clone() for t in leaves), seen.clone())
        same(out, want, "out", case)
        assert out.requires_grad, "no gradient flows: do not use .detach(), no_grad() or numpy"
        got = torch.autograd.grad(out, leaves, dout, allow_unused=True)
        for name, grad, w in zip(("dq", "dk", "dv"), got, torch.autograd.grad(want, leaves, dout)):
            same(grad, w, name, case)


NEVER = -torch.inf
BLOCKS: dict[str, list[list[list[float]]]] = {  # blocks of scores of two rows
    "a maximum that rises": [[[1, 2], [0, 0]], [[4, 3], [1, 0]]],
    "a maximum that stays": [[[4, 3], [5, 0]], [[0], [2]]],
    "a row without a key in the first block": [[[1, 0], [NEVER, NEVER]], [[2, 0], [-5, -6]]],
    "large scores": [[[100, 200], [-3e4, -4e4]], [[300, 1], [3e4, 2e4]]],
}
MAX = "torch.maximum(m, S.amax(dim=1, keepdim=True))"
ONLINE = [
    ("rescale * l + P.sum(dim=1, keepdim=True), rescale * O + P @ V",
     "P.sum(dim=1, keepdim=True), P @ V", "Keep the old sums: rescale and add"),
    (MAX, "S.amax(dim=1, keepdim=True)", "m is the maximum of all blocks so far"),
    (MAX, "torch.maximum(m, S.amax())", "m is a maximum for each row, not one for the block"),
    ("return m_new", "return m", "Return the new maximum as m"),
    ("rescale * l", "l", "Rescale the old sum l by exp(m - m_new)"),
    ("rescale * O", "O", "Rescale the old sum O by exp(m - m_new)"),
    ("torch.exp(m - m_new)", "torch.exp(m_new - m)", "Rescale by exp(m - m_new), the other way"),
    ("rescale * O + P @ V", "(rescale * O + P @ V) / (rescale * l + P.sum(dim=1, keepdim=True))",
     "Divide by l once, after the last block"),
]


def online(answer: ModuleType) -> None:
    draw = torch.Generator().manual_seed(0)
    for name, case in BLOCKS.items():
        m, l, O = torch.full((2, 1), torch.finfo().min), torch.zeros(2, 1), torch.zeros(2, 3)
        for n, block in enumerate(case, start=1):
            S = torch.tensor(block, dtype=torch.float32)
            V = torch.randn(S.shape[1], 3, generator=draw)
            m_new = torch.maximum(m, S.amax(dim=1, keepdim=True))
            P, rescale = torch.exp(S - m_new), torch.exp(m - m_new)
            want = m_new, rescale * l + P.sum(dim=1, keepdim=True), rescale * O + P @ V
            compare(answer.update, [m, l, O, S, V], dict(zip("mlO", want)),
                    f"block {n} of the case '{name}'")
            m, l, O = want


TILINGS = [  # Tq, Tk, B_r, B_c, large scores
    (4, 4, 2, 2, False), (6, 6, 2, 3, False), (8, 8, 4, 2, False), (7, 7, 3, 2, False),
    (1, 6, 1, 4, False), (3, 10, 2, 4, False), (6, 3, 2, 2, False), (40, 40, 8, 16, False),
    (8, 8, 4, 2, True), (8, 512, 8, 16, False),
]
SEEN = "torch.arange(J.start, J.stop) <= torch.arange(I.start, I.stop)[:, None] + offset"
LATER = "J.start > I.stop - 1 + offset"
DIVIDE = "O / l.masked_fill(l == 0, 1)"
TILES = [
    (SEEN, SEEN.removesuffix(" + offset"), "Query i sees key j where j <= i + offset, not j <= i"),
    (SEEN, f"({SEEN}) | True", "The mask inside the tile is missing"),
    (" / math.sqrt(Q_i.shape[1])", "", SCALE),
    (DIVIDE, "O", "Divide by l after the last tile"),
    (DIVIDE, "O / l", "l is 0 for a query without a visible key"),
    ("rescale * O", "O", "Rescale O by exp(m - m_new)"),
    ("rescale * l", "l", "Rescale l by exp(m - m_new)"),
    (MAX, "torch.maximum(m, S.amax().clamp(min=-1e30))", "m is a maximum for each row"),
    ("m, l, O = m_new", "_, l, O = m_new", "m stays the old maximum: set m = m_new"),
    (LATER, "J.start > I.start + offset",
     "A tile is visible if the LAST query of the block sees its first key"),
]


class Memory:
    """Main memory, and fast memory for a block each."""

    def __init__(self, Tq: int, Tk: int, B_r: int, B_c: int, large: bool, D: int = 4) -> None:
        self.main = dict(zip("QKV", draws(100 * Tq + Tk, (Tq, D), (Tk, D), (Tk, D))))
        if large:  # rows in hundreds, others near 0
            self.main["Q"] *= 400.0 * (torch.arange(Tq)[:, None] % 2)
        self.rows, self.cols = blocks(Tq, B_r), blocks(Tk, B_c)
        self.fast = {n: torch.empty(B, D) for n, B in zip("QKV", (B_r, B_c, B_c))}
        self.loads: Counter[tuple[int, str, int]] = Counter()  # (row of tiles, name, block)
        self.row = -1
        self.out: dict[int, Tensor] = {}

    def load(self, name: str, number: int) -> Tensor:
        self.row = number if name == "Q" else self.row
        assert self.row >= 0, f"load({name!r}, {number}) came before a block of Q"
        self.loads[self.row, name, number] += 1
        block = self.main[name][(self.rows if name == "Q" else self.cols)[number]]
        return self.fast[name][: len(block)].copy_(block)  # overwrites the last block

    def store(self, i: int, O_i: Tensor) -> None:
        assert i not in self.out, f"block {i} of the output is stored twice"
        self.out[i] = O_i.clone()


def tiles(answer: ModuleType) -> None:
    for Tq, Tk, B_r, B_c, large in TILINGS:
        memory, offset = Memory(Tq, Tk, B_r, B_c, large), Tk - Tq
        with Live() as live:
            answer.forward(memory.load, memory.store, [*memory.rows], [*memory.cols], offset)
        case = f"Tq = {Tq}, Tk = {Tk}, B_r = {B_r}, B_c = {B_c}"
        case += ", scores in the hundreds" if large else ""
        Q, K, V = memory.main.values()
        want = reference(Q, K, V, causal(Tq, Tk, offset))[0]
        for i, I in enumerate(memory.rows):
            assert i in memory.out, f"block {i} of the output is not stored, {case}"
            same(memory.out[i], want[I], f"O_{i}", case)
            assert memory.loads[i, "Q", i] == 1, f"load block {i} of Q once, {case}"
            for n, name in product(range(len(memory.cols)), "KV"):
                got = memory.loads[i, name, n]
                need = int(not wholly_masked(I, memory.cols[n], offset, None))
                assert got == need, (
                    f"block {n} of {name} was loaded {got} times for block {i} of Q, expected "
                    f"{need}, {case}. Skip a tile, before loading it, if no query sees a key of it"
                )
        assert Tk < 512 or live.most < B_r * Tk, (
            f"{live.most} numbers were held at one time, {case}: fast memory has room for a few "
            f"tiles of {B_r * B_c}. Do not collect the scores of all keys"
        )


DS = "P * (dP - delta)"
DV = "(P.mT @ dout).sum(dim=0)"
DK = "(dS.mT @ q).sum(dim=0)"
SHARED = "Add the gradients of the R query heads that share k and v"
BACKWARD = [
    (DS, "P * dP", "Subtract delta, the row sums of dout * out, from dP"),
    (DS, "dP - delta", "Multiply dP - delta by P"),
    (DS, "P * (dP - (P * dP).sum(dim=-1, keepdim=True))",
     "delta is a sum over all keys, not over the block: the row sums of dout * out"),
    ("tau * (dS @ k[J])", "dS @ k[J]", "Scale dq by 1 / sqrt(D), since S is scaled"),
    ("tau * (dS.mT @ q)", "(dS.mT @ q)", "Scale dk by 1 / sqrt(D), since S is scaled"),
    ("dq += tau", "dq = tau", "Add the parts of dq of all blocks: dq is overwritten"),
    (DV, "(P.mT @ dout)[0]", SHARED),
    (DK, "(dS.mT @ q)[0]", SHARED),
    (".masked_fill(j > i + Tk - Tq, 0.0)", "", UNMASKED),
    ("j > i + Tk - Tq", "j > i", ALIGNED),
    ("torch.exp(S - L[..., None])", "torch.softmax(S, dim=-1)",
     "P is exp(S - L): softmax of the block leaves out the other keys"),
]


def backward(answer: ModuleType) -> None:
    for R, Tq, Tk, block in ((1, 4, 4, 2), (1, 2, 5, 2), (2, 3, 4, 3), (3, 12, 12, 3)):
        q, k, v, dout = draws(10 * Tq + Tk, (R, Tq, 4), (Tk, 4), (Tk, 4), (R, Tq, 4))
        case = f"R = {R}, Tq = {Tq}, Tk = {Tk}, block = {block}"
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out, L = reference(q, k, v, causal(Tq, Tk, Tk - Tq))
        want = torch.autograd.grad(out, leaves, dout)
        inputs = [t.detach() for t in (q, k, v, out, L, dout)]
        with Live() as made:
            compare(answer.backward, [*inputs, block], dict(zip(("dq", "dk", "dv"), want)), case)
        assert Tk < 12 or made.largest < R * Tq * Tk, (
            f"a tensor of {made.largest} numbers was made, as many as P has, {case}: compute the "
            "scores of one block of keys at a time"
        )


CHECKS = {"1": (lookup, LOOKUP), "2": (mask, MASK), "3": (formula, FORMULA), "4": (online, ONLINE),
          "5": (tiles, TILES), "6": (backward, BACKWARD)}
