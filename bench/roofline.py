"""Rooflines of the parts of a training step.

The roofline is the larger of the time of the FLOPs at peak rate and the time of the bytes at full
bandwidth (Williams, Waterman and Patterson 2009, CACM 52(4)), for perfectly fused kernels. Only a
step that fits into the caches is faster.

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

- linear, head: one matmul forward and two backward. Logits stay on the chip; GELU, biases fused.
- attention: QK^T and PV forward; dV, dP, dQ, dK and QK^T again backward, of 2 C FLOPs per visible
  pair. `keys` is the mean number of keys per query. Exponentials are not counted.
- norms and elementwise: 2 L + 1 norms with the addition before each.
- optimizer: AdamW reads weight, gradient and two moments, and writes all but the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench import Json
from core import flops
from model import GPTConfig

ROOFED = ("linear", "head and loss", "attention", "norms and elementwise", "embedding", "optimizer")
PARTS = (*ROOFED, "data", "gaps", "unattributed")


@dataclass(frozen=True)
class Work:
    """FLOPs and bytes of a part in a step."""

    flops: float
    bytes: float

    def ms(self, tflops: float, bandwidth: float) -> float:
        """Return the roofline in ms; bandwidth in bytes per second."""
        return 1e3 * max(self.flops / (tflops * 1e12), self.bytes / bandwidth)

    def limit(self, tflops: float, bandwidth: float) -> str:
        """Return "FLOPs", "bytes", or "-" without work."""
        if not self.flops and not self.bytes:
            return "-"
        return "FLOPs" if self.flops / (tflops * 1e12) > self.bytes / bandwidth else "bytes"


def work(
    config: GPTConfig, sequences: float, micro: int, dtype: str, clip: bool
) -> dict[str, Work]:
    """Return the work by part, in a step of `sequences` in `micro` micro-batches.

    With context parallelism `sequences` of a rank is fractional.
    """
    T, L, C, V = config.block_size, config.n_layer, config.n_embd, config.vocab_size
    K, N = config.kv_heads * config.head_dim, sequences * config.block_size
    a = 4 if dtype == "float32" else 2
    made = flops.matrices(config)
    W, S = sum(m * n for m, n, _ in made), sum(m + n for m, n, _ in made)
    P = flops.n_params(config)
    P += T * C if config.position == "learned" else 0
    P += 0 if config.tied else V * C
    keys = sum(flops.mean_keys(T, w) for w in config.windows) / config.n_layer
    found = {
        "linear": Work(6 * N * L * W, L * (3 * a * N * S + micro * W * (2 * a + 4))),
        "head and loss": Work(6 * N * V * C, 3 * a * N * C + micro * V * C * (2 * a + 4)),
        "attention": Work(14 * N * L * C * keys, a * N * L * (6 * C + 6 * K)),
        "norms and elementwise": Work(0, 8 * a * N * C * (2 * L + 1)),
        "embedding": Work(0, N * C * (4 + 2 * a) + 8 * C * min(N, V)),
        "optimizer": Work(0, (28 + 4 * clip + 12 * (micro - 1)) * P),
    }
    return {part: found.get(part, Work(0, 0)) for part in PARTS}


def ceiling(
    parts: dict[str, Work],
    config: GPTConfig,
    sequences: int,
    tflops: float,
    bandwidth: float,
    peak: float,
) -> Json:
    """Return ms, tokens_per_s, mfu and mfu_causal of a step at its roofline.

    `mfu` counts masked keys, so it can exceed 1; then it is None.

    Args:
        tflops: rate of matmuls.
        bandwidth: bytes per second.
        peak: TFLOP/s that the MFU refers to.
    """
    ms, T = sum(w.ms(tflops, bandwidth) for w in parts.values()), config.block_size
    of = flops.Peak(peak, "the roofline's")
    return {"ms": ms, **flops.Speed(config, T, sequences * T / (ms / 1e3), of).row()}


def told(found: Json, of: str) -> str:
    return (
        f"if every part ran at its roofline{of}: {found['ms']:,.4g} ms, "
        f"{flops.in_words(found)}, {found['tokens_per_s']:,.0f} tok/s"
    )
