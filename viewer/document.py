"""The JSON document of explain.py: T tokens, L layers, H query heads of D numbers.

Attention maps P = softmax(Q K^T / sqrt(D)) come from q, k and v by hooks: fused kernels never
materialize P.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import attention
from attention import Spec, manual, masks, tiled
from attention.truth import allowed_error
from model import GPT

FINE = 5_000_000  # stored in 16 bits, more in 8
MOST_SCORES = 1_000_000  # stored, 4 MB
COMPONENTS = 4  # of v and out
EARLY = 8  # queries that see few keys: low entropy in any head

Json = dict[str, Any]
Document = Json  # "about" of explain.py, "maps" and "tiles"


def token_of(id_: int, pieces: list[bytes]) -> Json:
    """`pieces`: the bytes of each id."""
    piece = pieces[id_]
    try:
        text = piece.decode() if piece else "<special>"
    except UnicodeDecodeError:  # part of a character
        text = f"<{piece.hex(' ').upper()}>"
    return {
        "id": id_,
        "text": text,  # bytes of an incomplete character as <E2 80>
        "label": text.translate(str.maketrans(" \n\t\r", "␣⏎⇥␍")),
    }


def pack(a: np.ndarray) -> Json:
    return {
        "dtype": str(a.dtype),  # uint8, uint16, float32
        "shape": list(a.shape),
        # Little endian, row by row.
        "data": base64.b64encode(a.astype(a.dtype.newbyteorder("<")).tobytes()).decode(),
    }


def unpack(packed: Json) -> np.ndarray:
    a = np.frombuffer(base64.b64decode(packed["data"]), np.dtype(packed["dtype"]).newbyteorder("<"))
    return a.reshape(packed["shape"]).astype(packed["dtype"])


# --- attention maps ---


@dataclass(frozen=True)
class Call:
    """A layer's attention, of one sequence."""

    q: Tensor  # (1, T, H, D)
    k: Tensor  # (1, T, Hkv, D)
    v: Tensor  # (1, T, Hkv, D)
    out: Tensor  # (1, T, H, D)
    spec: Spec
    options: dict[str, Tensor]  # attend()'s: segments (1, T) int32, alibi_slopes (H,)


@contextmanager
def watched(model: GPT) -> Iterator[list[Call]]:
    """A list to which each layer appends a Call."""
    calls: list[Call] = []

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[object, ...]:
        x, attend, *rest = args

        def noted(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **options: object) -> Tensor:
            out: Tensor = attend(q, k, v, spec, **options)
            tensors = {name: t for name, t in options.items() if isinstance(t, Tensor)}
            calls.append(Call(q, k, v, out, spec, tensors))
            return out

        return x, noted, *rest

    hooks = [block.attn.register_forward_pre_hook(hook) for block in model.transformer.h]
    try:
        yield calls
    finally:
        for h in hooks:
            h.remove()


def maps(calls: list[Call]) -> Json:
    """P = softmax(Q K^T / sqrt(D))."""
    T = calls[0].q.shape[1]
    i, j = torch.tril_indices(T, T)
    P = [weights(call).cpu() for call in calls]
    cells = np.stack([x[:, i, j].numpy() for x in P])
    levels, kind = (65535, np.uint16) if cells.size <= FINE else (255, np.uint8)
    late = slice(min(EARLY, T // 2), None)
    return {
        # (L, H, T (T + 1) / 2): the lower triangle of P, times levels
        "weights": pack(np.rint(cells * levels).astype(kind)),
        "levels": levels,
        "seen": [seen(call) for call in calls],  # [first, stop) of each layer and query
        "layers": [agreement(call) for call in calls],
        # In nats, of each layer and head: the mean over later queries.
        "entropy": [torch.special.entr(x[:, late]).sum(dim=-1).mean(dim=-1).tolist() for x in P],
    }


def tiles(calls: list[Call]) -> Json:
    """Inputs of the recurrence over tiles, for the first N tokens and C of D components."""
    T, H = calls[0].q.shape[1:3]
    pairs = MOST_SCORES // (len(calls) * H)
    N = min(T, (math.isqrt(8 * pairs + 1) - 1) // 2)  # N (N + 1) / 2 pairs
    i, j = torch.tril_indices(N, N)

    def some(tensors: list[Tensor]) -> Json:
        found = [t[0, :N, :, :COMPONENTS].transpose(0, 1).float().cpu() for t in tensors]
        return pack(torch.stack(found).numpy())

    return {
        # (L, H, N (N + 1) / 2) float32: the lower triangle of S, -inf where masked
        "scores": pack(torch.stack([scores(call, N)[:, i, j] for call in calls]).numpy()),
        "v": some([call.v for call in calls]),  # (L, Hkv, N, C) float32
        "out": some([call.out for call in calls]),  # (L, H, N, C) float32
    }


def scores(call: Call, N: int) -> Tensor:
    """S of each head, (H, N, N) float32: tiled's only tile of that size."""
    found: list[Tensor] = []
    options: Json = {name: t.cpu() for name, t in call.options.items()}
    if "segments" in options:
        options["segments"] = (options["segments"][:, :N],) * 2
    q, k, v = (t[:, :N].float().cpu() for t in (call.q, call.k, call.v))
    tiled.forward_tiles(q, k, v, replace(call.spec, dtype="float32"), B_r=N, B_c=N, **options,
                        on_tile=lambda i, j, S, *_: found.append(S.flatten(1, 2)[0]))  # fmt: skip
    return found[0]


def weights(call: Call) -> Tensor:
    """(H, T, T) float32."""
    spec = replace(call.spec, dtype="float32")
    return attention.weights(call.q.float(), call.k.float(), spec, **call.options)[0]


def seen(call: Call) -> list[list[int]]:
    """[first, stop) of the keys that each query sees."""
    T, segments = call.q.shape[1], call.options.get("segments")
    sees = masks.mask(T, T, call.spec.window, segments, call.q.device)[0, 0].cpu()
    first, count = sees.int().argmax(dim=1), sees.sum(dim=1)
    return [[int(a), int(a + n)] for a, n in zip(first, count, strict=True)]


def agreement(call: Call) -> Json:
    """The output compared with manual in float64."""
    device = "cpu" if call.q.device.type == "mps" else call.q.device  # Metal has no float64
    q, k, v = (t.to(device).double() for t in (call.q, call.k, call.v))
    options = {name: t.to(device) for name, t in call.options.items()}
    exact = manual.attend(q, k, v, replace(call.spec, dtype="float64"), **options)
    plain = manual.attend(call.q, call.k, call.v, call.spec, **call.options)
    off, plain_off = ((t.to(device).double() - exact).abs() for t in (call.out, plain))
    error, largest = float(off.max()), float(exact.abs().max())
    allowed = allowed_error(float(plain_off.max()), largest, largest, call.q.dtype)
    heads = off.amax(dim=(0, 1, 3)).tolist()  # (H,)
    # error: the largest difference; heads: of each.
    return {"error": error, "allowed": allowed, "agrees": error <= allowed, "heads": heads}
