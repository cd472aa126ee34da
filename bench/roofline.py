"""The parts of a training step, and the least time that each can take: its roofline.

A part takes at least the time of its operations at the device's peak rate, and at least the time of
its bytes at the bandwidth of its memory; the larger of both is its roofline (Williams, Waterman and
Patterson 2009, CACM 52(4)). It is computed from the sizes alone, for what has to be done however
well it is fused. Only a step that fits into the caches can beat the time of its bytes.

N tokens in a step, L layers, C channels, E = H * D = C, K = Hkv * D, V tokens in the vocabulary, P
weights; a: bytes of an activation (2 in half precision, 4 in float32); weights, their gradients and
AdamW's moments are float32. W = C (C + 2 K) + C^2 + 8 C^2: the weights of a layer's matmuls, whose
inputs and outputs together are S = (2 C + 2 K) + 2 C + 5 C + 5 C wide. m: micro-batches in a step.

    part                   FLOPs           bytes
    linear                 6 N L W         L (3 a N S + m W (2 a + 4))
    head and loss          6 N V C         3 a N C + m V C (2 a + 4)
    attention              14 N L C keys   a N L (6 C + 6 K)
    norms and elementwise  -               8 a N C (2 L + 1)
    embedding              -               N C (4 + 2 a) + 8 C min(N, V)
    optimizer              -               28 P, to clip 4 P more, to accumulate 12 P (m - 1) more
    data, gaps             -               -

- linear, head: a matmul forward and two backward, each reading two matrices and writing one. The
  logits never leave the chip. GELU and the biases ride in the matmuls' epilogues.
- attention: QK^T and PV forward; backward those of dV, dP, dQ, dK, and QK^T once more, since no
  scores are stored: 7 matmuls of 2 C FLOPs a pair of query and key; `keys` is the mean number that
  a query sees. Its exponentials take another unit of the chip and are not counted. Bytes: q, k, v
  in and out out, then q, k, v, out and its gradient in, and three gradients out.
- norms and elementwise: each of the 2 L + 1 norms with the addition before it, in one pass forward
  (two tensors read, two written) and one backward (three read, one written).
- optimizer: AdamW reads weight, gradient and two moments, and writes all but the gradient.
- embedding: rows read, their sum written; its gradient read, and added to the rows that occur.
- data: its copy overlaps the computation. gaps: a device that never waits has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from core import flops
from model import GPTConfig

ROOFED = ("linear", "head and loss", "attention", "norms and elementwise", "embedding", "optimizer")
PARTS = (*ROOFED, "data", "gaps", "unattributed")


@dataclass(frozen=True)
class Work:
    """The FLOPs and bytes of a part in a step."""

    flops: float
    bytes: float

    def ms(self, tflops: float, bandwidth: float) -> float:
        """The roofline, milliseconds; bandwidth in bytes a second."""
        return 1e3 * max(self.flops / (tflops * 1e12), self.bytes / bandwidth)

    def limit(self, tflops: float, bandwidth: float) -> str:
        """Which roof limits it: "FLOPs", "bytes", or "-" if it has no work."""
        if not self.flops and not self.bytes:
            return "-"
        return "FLOPs" if self.flops / (tflops * 1e12) > self.bytes / bandwidth else "bytes"


def work(
    config: GPTConfig, sequences: float, micro: int, dtype: str, clip: bool
) -> dict[str, Work]:
    """Part -> its work in a step of `sequences` sequences, cut into `micro` micro-batches.

    A process that shares its sequences with others has a fraction of them.
    """
    T, L, C, V = config.block_size, config.n_layer, config.n_embd, config.vocab_size
    K, N = config.kv_heads * config.head_dim, sequences * config.block_size
    a = 4 if dtype == "float32" else 2
    W = C * (C + 2 * K) + C * C + 8 * C * C
    S = (2 * C + 2 * K) + 2 * C + 5 * C + 5 * C
    P = flops.n_params(config) + T * C
    keys = flops.mean_keys(T, config.attention_window)
    found = {
        "linear": Work(6 * N * L * W, L * (3 * a * N * S + micro * W * (2 * a + 4))),
        "head and loss": Work(6 * N * V * C, 3 * a * N * C + micro * V * C * (2 * a + 4)),
        "attention": Work(14 * N * L * C * keys, a * N * L * (6 * C + 6 * K)),
        "norms and elementwise": Work(0, 8 * a * N * C * (2 * L + 1)),
        "embedding": Work(0, N * C * (4 + 2 * a) + 8 * C * min(N, V)),
        "optimizer": Work(0, (28 + 4 * clip + 12 * (micro - 1)) * P),
    }
    return {part: found.get(part, Work(0, 0)) for part in PARTS}


def ceiling(parts: dict[str, Work], config: GPTConfig, sequences: int, tflops: float,
            bandwidth: float, peak: float) -> dict[str, Any]:  # fmt: skip
    """The step in which every part runs at its roofline: "ms", "tokens_per_s", "mfu", "mfu_causal".

    Where keys are masked `mfu` can be more than 1, and is None: attention does only those it sees.
    Matmuls run at `tflops`, the memory at `bandwidth` bytes a second; `peak` is what the MFU is of.
    """
    ms, T = sum(w.ms(tflops, bandwidth) for w in parts.values()), config.block_size
    of = flops.Peak(peak, "the roofline's")
    return {"ms": ms, **flops.Speed(config, T, sequences * T / (ms / 1e3), of).row()}


def told(found: dict[str, Any], of: str) -> str:
    """A ceiling in words."""
    return (
        f"if every part ran at its roofline{of}: {found['ms']:,.4g} ms, "
        f"{flops.in_words(found)}, {found['tokens_per_s']:,.0f} tok/s"
    )


def lines(parts: dict[str, Work], tflops: float, bandwidth: float) -> list[dict[str, Any]]:
    """A line a part that has work, the longest first."""
    ms = {part: w.ms(tflops, bandwidth) for part, w in parts.items() if w.flops or w.bytes}
    made = []
    for part in sorted(ms, key=ms.__getitem__, reverse=True):
        w = parts[part]
        line = {"part": part, "tflop": w.flops / 1e12, "gb": w.bytes / 1e9, "roofline_ms": ms[part]}
        share = ms[part] / sum(ms.values())
        made.append({**line, "share": share, "limit": w.limit(tflops, bandwidth)})
    return made
