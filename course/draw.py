"""The pictures of the course as SVG, drawn from the code that they show.

python -m course.build writes them to course/pictures/. Colours suit a light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

import torch

from attention import Spec, visible
from attention.tiled import blocks
from course.figures.trace import Tile, manual_bytes, tiled_bytes, trace_of
from model import GPTConfig, rope_rates

STYLE = """
text { font: 13px ui-sans-serif, system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 11px } .bold { font-weight: 600 } .middle { text-anchor: middle }
.end { text-anchor: end } .mono { font-family: ui-monospace, monospace; font-size: 12px }
.line { stroke: #8c959f; fill: none } .off { fill: #f1f3f5; stroke: #c8ced4 }
.on { fill: #54aeff; stroke: #0969da } .warm { fill: #ffd580; stroke: #bf8700 }
.green { fill: #aceebb; stroke: #1a7f37 } .box { fill: none; stroke: #8c959f; stroke-width: 1.5 }
.a { stroke: #0969da; fill: none; stroke-width: 2 }
.b { stroke: #bf3989; fill: none; stroke-width: 2 }
.ta { fill: #0969da } .tb { fill: #bf3989 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .line, .box { stroke: #768390 } .off { fill: #22272e; stroke: #444c56 }
  .on { fill: #1f6feb; stroke: #79c0ff } .warm { fill: #9e6a03; stroke: #e3b341 }
  .green { fill: #196c2e; stroke: #56d364 } .a { stroke: #79c0ff } .b { stroke: #f778ba }
  .ta { fill: #79c0ff } .tb { fill: #f778ba }
}
"""


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'role="img">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8" class="line"/></marker></defs>\n'
        f"{body}\n</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" xml:space="preserve">{escape(words)}</text>'


def rect(x: float, y: float, w: float, h: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" class="{kind}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    line = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {line} class="line" marker-end="url(#tip)"/>'


def box(x: float, y: float, w: float, h: float, words: str, kind: str) -> list[str]:
    return [rect(x, y, w, h, kind), text(x + w / 2, y + h / 2 + 4, words, "middle")]


# --- page 1 ---


def token_to_qkv() -> str:
    """A token's vector times three matrices is its query, key and value; the last query reads."""
    words = ["the", "cat", "sat", "down"]
    parts = [text(10, 20, "Each token's vector x becomes q = W_q x, k = W_k x, v = W_v x", "bold")]
    for n, word in enumerate(words):
        x = 20 + 150 * n
        parts += box(x + 20, 36, 90, 26, f"x of {word!r}", "off")
        for m, (name, kind) in enumerate((("q", "warm"), ("k", "on"), ("v", "green"))):
            parts += [*box(x + 45 * m, 92, 38, 26, f"{name}{n}", kind)]
            parts.append(arrow(x + 65, 62, x + 45 * m + 19, 90))
    scores = (0.1, 0.2, 0.6, 0.1)
    parts.append(text(10, 152, "q3 scores every key, and softmax makes weights of the scores.",
                      "bold"))
    parts.append(text(10, 170, "The output is the mean of the values with these weights:", "bold"))
    for n, p in enumerate(scores):
        x = 20 + 150 * n
        parts += [rect(x + 45, 240 - 70 * p, 38, 70 * p, "on"),
                  text(x + 64, 256, f"{p} of v{n}", "small middle")]
    parts.append(text(10, 282, f"out = {' + '.join(f'{p} v{n}' for n, p in enumerate(scores))}",
                      "mono"))
    return svg(630, 294, "From tokens to queries, keys and values", parts)


# --- page 2 ---

MASKS: list[tuple[str, int, int, int | None, int, list[int] | None]] = [
    ("causal", 5, 5, None, 0, None),
    ("3 queries, 5 keys", 3, 5, None, 0, None),
    ("a window of 2", 5, 5, 2, 0, None),
    ("two segments", 5, 5, None, 0, [0, 0, 1, 1, 1]),
    ("2 on each side", 5, 5, 2, 1, None),
]


def masks() -> str:
    """The pairs that visible() allows, for five masks."""
    parts, size = [], 24
    for n, (name, Tq, Tk, window, right, seg) in enumerate(MASKS):
        left = 30 + 170 * n
        parts += [text(left, 18, name, "bold"), text(left, 40, "keys", "small")]
        i, j = torch.arange(Tq)[:, None], torch.arange(Tk)
        segments = None if seg is None else torch.tensor(seg)
        seg_i = None if segments is None else segments[i + Tk - Tq]
        seen = visible(i, j, Tk - Tq, window, seg_i, segments, right)
        for a in range(Tq):
            parts.append(text(left - 6, 64 + size * a, f"q{a}", "small end"))
            for b in range(Tk):
                kind = "on" if seen[a, b] else "off"
                parts.append(rect(left + size * b, 48 + size * a, size - 3, size - 3, kind))
    return svg(870, 180, "Five masks: which keys each query sees", parts)


# --- page 5 and README ---


def frames() -> str:
    """FlashAttention's forward pass in four frames, from tiled.py: the fast memory holds one block
    of Q, K and V, and m, l, O of the queries."""
    T, B = 6, 2
    draw = torch.Generator().manual_seed(28)
    q, k, v = torch.randint(-2, 3, (3, 1, T, 1, 2), generator=draw).float()
    trace, out = trace_of(q, k, v, Spec(1, 1, 2, "float32"), B_r=B, B_c=B)
    row = [t for t in trace if t.i == 2]
    parts: list[str] = []
    for n, tile in enumerate((*row, None)):
        parts += frame(10 + 262 * (n % 2), 10 + 262 * (n // 2), n, tile, row[-1], out, T, B)
    return svg(540, 540, "FlashAttention: Q stays, K and V stream by", parts)


def frame(x: float, y: float, n: int, tile: Tile | None, last: Tile, out: torch.Tensor, T: int,
          B: int) -> list[str]:
    now = tile or last
    parts = [rect(x, y, 254, 254, "box")]
    what = f"{n + 1}. read K_{now.j} and V_{now.j}" if tile else f"{n + 1}. write O / l"
    parts += [text(x + 10, y + 20, what, "bold"), text(x + 10, y + 42, "main memory", "small")]
    for m, name in enumerate("QKVO"):
        for b in range(len(blocks(T, B))):
            used = b == 2 if name in "QO" else b == now.j
            kind = {"Q": "warm", "K": "on", "V": "green", "O": "warm"}[name]
            kind = kind if used and (name == "O") == (tile is None) else "off"
            parts += box(x + 10 + 60 * m + 18 * b, y + 50, 16, 24, "", kind)
        parts.append(text(x + 34 + 60 * m, y + 90, name, "small middle"))
    parts += [rect(x + 10, y + 106, 234, 138, "off"),
              text(x + 18, y + 122, "fast memory: one block of each", "small"),
              arrow(x + 127, y + 92, x + 127, y + 104)]
    parts.append(text(x + 18, y + 144, f"S_2{now.j} = Q_2 K_{now.j}ᵀ/√D", "mono"))
    for a in range(B):
        cells = ["-inf" if s == -math.inf else f"{s:.1f}" for s in now.S[0, 0, a].tolist()]
        parts.append(text(x + 152, y + 144 + 16 * a, " ".join(f"{c:>5}" for c in cells), "mono"))
    if tile is None:
        for a in range(B):
            values = " ".join(f"{o:5.2f}" for o in out[0, 4 + a, 0].tolist())
            parts.append(text(x + 18, y + 186 + 18 * a, f"O / l = {values}", "mono"))
        return parts
    for a in range(B):
        top, sums, O = (t[0, 0, a].tolist() for t in (now.m, now.l, now.O))
        words = " ".join(f"{o:5.2f}" for o in O)
        words = f"m {top:.1f}  l {sums:.2f}  O {words}"
        parts.append(text(x + 18, y + 182 + 18 * a, words, "mono"))
    scale = " ".join(f"{r:.2f}" for r in now.rescale[0, 0].tolist())
    if now.j:
        parts.append(text(x + 18, y + 226, f"old l and O times {scale}", "small"))
    return parts


# --- curves ---

Curve = tuple[str, str, Sequence[tuple[float, float]]]  # class, label, points


def curves(title: str, x_name: str, y_name: str, lines: Sequence[Curve], xs: Sequence[float],
           ys: Sequence[float], log_y: bool = True) -> str:
    """A chart with a logarithmic x axis; xs and ys: the places of the ticks."""
    left, top, w, h = 80, 40, 440, 240

    def px(x: float) -> float:
        return left + w * (math.log(x / xs[0]) / math.log(xs[-1] / xs[0]))

    def py(y: float) -> float:
        share = math.log(y / ys[0]) / math.log(ys[-1] / ys[0]) if log_y else (
            (y - ys[0]) / (ys[-1] - ys[0]))
        return top + h * (1 - share)

    parts = [text(left, 22, title, "bold"), text(left + w, top + h + 40, x_name, "small end"),
             text(left - 70, 22, y_name, "small")]
    for x in xs:
        parts += [f'<path d="M{px(x):.1f} {top}V{top + h}" class="line" opacity=".25"/>',
                  text(px(x), top + h + 18, f"{x:,g}", "small middle")]
    for y in ys:
        parts += [f'<path d="M{left} {py(y):.1f}H{left + w}" class="line" opacity=".25"/>',
                  text(left - 8, py(y) + 4, f"{y:,g}", "small end")]
    for kind, label, points in lines:
        path = "L".join(f"{px(x):.1f} {py(y):.1f}" for x, y in points)
        x, y = points[-1]
        parts += [f'<path d="M{path}" class="{kind}"/>',
                  text(px(x) + 8, py(y) + 4, label, f"small t{kind}")]
    return svg(640, 330, title, parts)


def bytes_moved() -> str:
    """Megabytes between memory and chip for one head, against T: the formula and tiles."""
    spec, manual, tiled = Spec(1, 1, 64, "float32"), [], []
    for T in (256, 512, 1024, 2048, 4096):
        x = torch.zeros(1, T, 1, 64)
        trace, _ = trace_of(x, x, x, spec, B_r=128, B_c=64)
        manual.append((T, sum(manual_bytes(spec, T)) / 1e6))
        tiled.append((T, sum(tiled_bytes(trace, spec, T)) / 1e6))
    return curves("Bytes moved by one head, forward, D = 64, float32", "tokens", "MB",
                  [("b", "manual", manual), ("a", "tiled", tiled)],
                  (256, 512, 1024, 2048, 4096), (0.1, 1, 10, 100, 1000))


def rope_decay() -> str:
    """The score of two equal vectors after RoPE, mean over the pairs, against their distance."""
    def points(theta: float) -> list[tuple[float, float]]:
        config = GPTConfig(n_head=1, n_embd=128, position="rope", rope_theta=theta)
        rates = rope_rates(config, torch.device("cpu"))
        return [(n, float(torch.cos(n * rates).mean()))
                for n in (round(1.2**e) for e in range(60)) if 1 <= n <= 16384]

    lines = [("a", "theta 10,000", points(10000.0)), ("b", "theta 500,000", points(500000.0))]
    return curves("q · k of equal vectors after RoPE, D = 128", "distance in tokens",
                  "of q · k at 0", lines,
                  (1, 16, 256, 4096, 16384), (-0.2, 0, 0.2, 0.4, 0.6, 0.8, 1), log_y=False)


# --- page 10 ---


def ring() -> str:
    """Three rounds of a ring of four: queries stay, keys and values move on."""
    N, parts = 4, [text(10, 20, "Queries stay; each round the keys and values move one process on",
                        "bold")]
    for n in range(3):
        x0, y0, r = 110 + 215 * n, 140, 72
        parts.append(text(x0, 40, f"round {n + 1}", "middle"))
        for rank in range(N):
            angle = 2 * math.pi * rank / N - math.pi / 2
            x, y = x0 + r * math.cos(angle), y0 + r * math.sin(angle)
            parts += [rect(x - 30, y - 22, 60, 44, "box"), rect(x - 26, y - 18, 24, 36, "warm"),
                      text(x - 14, y + 4, f"Q{rank}", "small middle"),
                      rect(x + 2, y - 18, 24, 36, "on"),
                      text(x + 14, y + 4, f"KV{(rank - n) % N}", "small middle")]
        for rank in range(N):
            a, b = (2 * math.pi * (rank + s) / N - math.pi / 2 for s in (0.36, 0.64))
            parts.append(arrow(x0 + r * math.cos(a), y0 + r * math.sin(a),
                               x0 + r * math.cos(b), y0 + r * math.sin(b)))
    return svg(650, 250, "Ring attention", parts)


# --- page 13 ---


def recall() -> str:
    """The state of each variant of the lab, and the part of key-value pairs that it recalls."""
    from course.lab import mqar, report, training

    content, rows = report.record(), []
    for name in dict.fromkeys(row["variant"] for row in content["rows"]):
        runs = [r["recalled"] for r in content["rows"] if r["variant"] == name and "recalled" in r]
        state = training.costs(training.build(name, training.RECALL))["state"]
        rows.append((state, name, runs))
    rows.sort(key=lambda row: (-row[0], report.NAMES.index(row[1])))
    left, top, w, high = 330, 66, 320, 26
    kinds = dict(zip((str(pairs) for pairs, _ in mqar.LEVELS), ("green", "warm", "on")))
    parts = [text(10, 20, f"State after {training.LENGTH} tokens", "bold"),
             text(left, 20, "Values recalled: mean, and range of the seeds", "bold")]
    for n, (pairs, kind) in enumerate(kinds.items()):
        parts += [rect(left + 100 * n, 32, 10, 10, kind),
                  text(left + 15 + 100 * n, 41, f"{pairs} pairs", "small")]
    bottom = top + high * len(rows)
    for share in (0, 25, 50, 75, 100):
        x = left + w * share / 100
        parts += [f'<path d="M{x:g} {top - 8}V{bottom}" class="line" opacity=".25"/>',
                  text(x, bottom + 16, f"{share} %", "small middle")]
    for n, (state, name, runs) in enumerate(rows):
        y = top + high * n
        parts += [text(10, y + 12, report.TITLES[name]),
                  rect(140, y + 2, 100 * state / rows[0][0], 12, "off"),
                  text(left - 20, y + 12, f"{state / 1000:,.1f} kB", "small end")]
        for m, (pairs, kind) in enumerate(kinds.items()):
            values = sorted(run[pairs] for run in runs)
            x0, x, x1 = (left + w * v for v in (values[0], sum(values) / len(values), values[-1]))
            mid = y + 3 + 6 * m
            parts += [f'<path d="M{x0:.1f} {mid + 2.5}H{x1:.1f}" class="line"/>',
                      rect(round(x - 4, 1), mid, 8, 5, kind)]
    return svg(690, bottom + 26, "Recall against the size of the state", parts)


PICTURES: dict[str, Callable[[], str]] = {
    make.__name__: make
    for make in (token_to_qkv, masks, frames, bytes_moved, rope_decay, ring, recall)
}
