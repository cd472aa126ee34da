"""One decode step through each KV cache of inference/, shown for layer 0.

The cells written are found by comparing the buffers before and after the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention import Resolution
from attention.probing import allowed_error
from inference.cache import DynamicCache, PagedCache, StaticCache, bucket
from model import GPT
from viewer.document import Caches, CacheStep, Refused, token_of
from viewer.maps import off

PAGE_SIZE = 8  # small, so that a short prompt has several pages
AnyCache = DynamicCache | StaticCache | PagedCache


@torch.no_grad()
def caches(model: GPT, ids: list[int], pieces: list[bytes]) -> Caches:
    """The same step with each cache; `pieces`: the bytes of each token id of the tokenizer."""
    predicted = len(ids) < model.config.block_size
    if predicted:
        ids = [*ids, int(last_logits(model, ids)[: len(pieces)].argmax())]
    tokens, want = [token_of(id_, pieces) for id_ in ids], last_logits(model, ids)
    found = [step(kind, model, ids, want) for kind in ("dynamic", "static", "paged")]
    largest, config = float(want.abs().max()), model.config
    # A model rounds more often than one kernel: four times the error of its dtype.
    allowed = allowed_error(0.0, 4 * largest, largest, want.dtype)
    per_layer = 2 * config.kv_heads * config.head_dim * want.element_size()
    return {
        "prompt": tokens[:-1],
        "token": tokens[-1],
        "position": len(ids) - 1,
        "predicted": predicted,
        "bytes_per_token": config.n_layer * per_layer,
        "steps": found,
        "allowed": allowed,
        "agree": all(s["error"] <= allowed for s in found),
    }


def last_logits(model: GPT, ids: list[int]) -> Tensor:
    idx = torch.tensor([ids], device=model.transformer.wte.weight.device)
    return model.head(model.hidden(idx)[0, -1])


def step(kind: str, model: GPT, ids: list[int], want: Tensor) -> CacheStep:
    """Prefill all tokens but the last, decode that one; `want` (V,): logits without a cache."""
    n, config, device = len(ids) - 1, model.config, want.device
    window, most = config.attention_window, config.block_size
    idx = torch.tensor([ids], device=device)
    cache: AnyCache
    if kind == "dynamic":
        cache = DynamicCache(config.n_layer, max_len=most, window=window, device=device)
    elif kind == "static":
        cache = StaticCache(config.n_layer, 1, bucket(n + 1, most), config.kv_heads,
                            config.head_dim, dtype=want.dtype, device=device)  # fmt: skip
    else:
        pages = n // PAGE_SIZE + 5  # of the text, the null page, and three free ones
        cache = PagedCache(config.n_layer, config.kv_heads, config.head_dim, n_pages=pages,
                           page_size=PAGE_SIZE, dtype=want.dtype, device=device)  # fmt: skip
    rows = _used(cache) if isinstance(cache, PagedCache) else []

    def reserve(T: int) -> Any:
        return cache.reserve(rows, [T]) if isinstance(cache, PagedCache) else cache.reserve(T)

    first = reserve(n)
    model.hidden(idx[:, :n], None, first)
    first.advance()
    now = reserve(1)
    table = list(cache.pool.pages(rows[0])) if isinstance(cache, PagedCache) else []
    at, read = _cells(cache, now, n, table)
    # k and v of layer 0, (pages or 1, places, Hkv, D)
    kv = cache.layers[0].kv if isinstance(cache, DynamicCache) else (cache.k[0], cache.v[0])
    assert kv is not None
    buffers = [t.flatten(0, 1) for t in kv]  # (cells, Hkv, D)
    before = [_bits(t) for t in buffers]
    logits = model.head(model.hidden(idx[:, n:], None, now))[0, -1]
    changed = [(old != _bits(t)).flatten(1).any(dim=1) for old, t in zip(before, buffers)]
    holds = [-1] * len(buffers[0])
    for position, c in at.items():
        holds[c] = position
    seen = [c for p, c in at.items() if window is None or p > n - window]
    chosen, _ = model.attention(False, (1, 1), now.kind, now.page_size)
    return {
        "kind": kind,
        "backend": chosen.backend.name,
        "kernels": list(chosen.kernels),
        "refused": refused(chosen),
        "cells": len(holds),
        "holds": holds,
        "read": seen if read is None else read,
        "seen": seen,
        "written": (changed[0] | changed[1]).nonzero()[:, 0].tolist(),
        "bytes_allocated": cache.nbytes,
        "bytes_used": len(at) * 2 * buffers[0][0].nbytes * config.n_layer,
        "page_size": now.page_size,
        "page_table": table,
        "error": float(off(logits, want).max()),
    }


def refused(chosen: Resolution) -> list[Refused]:
    return [{"name": name, "why": list(why)} for name, why in chosen.rejected.items()]


def _used(cache: PagedCache) -> list[int]:
    """A sequence in a used pool: the pages of a fresh one would be in order."""
    pool = cache.pool
    others = [pool.new() for _ in range(pool.n_free)]
    pool.grow(dict.fromkeys(others, 1))
    for other in [*others[::2], *others[1::2]]:
        pool.free(other)
    return [pool.new()]


def _cells(
    cache: AnyCache, now: Any, n: int, table: list[int]
) -> tuple[dict[int, int], list[int] | None]:
    """The cell of each token, and the cells read; None: only the visible ones."""
    if isinstance(cache, PagedCache):
        read = [page * PAGE_SIZE + slot for page in table for slot in range(PAGE_SIZE)]
        return dict(enumerate(read[: n + 1])), read
    if isinstance(cache, StaticCache):
        return {p: p for p in range(n + 1)}, list(range(now.length))
    gone = cache.stored - cache.layers[0].kept  # dropped: outside the window of later tokens
    return {p: p - gone for p in range(gone, n + 1)}, None


def _bits(t: Tensor) -> Tensor:
    # Bytes, because unwritten cells may be NaN, which is not equal to itself.
    return t.clone().contiguous().view(torch.uint8)
