"""One decode step through each KV cache of inference/, shown for layer 0."""

from __future__ import annotations

import torch
from torch import Tensor

from attention import Resolution
from attention.probing import allowed_error
from inference import cache as kv
from model import GPT
from viewer.document import Caches, CacheStep, Refused, token_of
from viewer.maps import off

PAGE_SIZE = 8  # small, so that a short prompt has several pages
AnyCache = kv.DynamicCache | kv.StaticCache | kv.PagedCache
AnyStep = kv.DynamicStep | kv.StaticStep | kv.PagedStep


@torch.no_grad()
def caches(model: GPT, ids: list[int], pieces: list[bytes]) -> Caches:
    """The same step with each cache; `pieces`: the bytes of each token id."""
    predicted = len(ids) < model.config.block_size
    if predicted:
        ids = [*ids, int(last_logits(model, ids)[: len(pieces)].argmax())]
    tokens, want = [token_of(id_, pieces) for id_ in ids], last_logits(model, ids)
    steps = [decode(cache, model, ids, want) for cache in empty_caches(model, len(ids), want)]
    largest, config = float(want.abs().max()), model.config
    # A model rounds more often than one kernel: four times the error of its dtype.
    allowed = allowed_error(0.0, 4 * largest, largest, want.dtype)
    return {
        "prompt": tokens[:-1],
        "token": tokens[-1],
        "position": len(ids) - 1,
        "predicted": predicted,
        "bytes_per_token": 2 * config.n_layer * config.kv_heads * config.head_dim * want.itemsize,
        "steps": steps,
        "allowed": allowed,
        "agree": all(s["error"] <= allowed for s in steps),
    }


def last_logits(model: GPT, ids: list[int]) -> Tensor:
    idx = torch.tensor([ids], device=model.transformer.wte.weight.device)
    return model.head(model.hidden(idx)[0, -1])


def empty_caches(model: GPT, n: int, like: Tensor) -> list[AnyCache]:
    """One cache of each kind for n tokens."""
    c, dtype, device = model.config, like.dtype, like.device
    pages = (n - 1) // PAGE_SIZE + 5  # of the text, the null page, and three free ones
    return [
        kv.DynamicCache(c.n_layer, max_len=c.block_size, windows=c.windows, device=device),
        kv.StaticCache(c.n_layer, 1, kv.bucket(n, c.block_size), c.kv_heads, c.head_dim,
                       dtype=dtype, device=device),
        kv.PagedCache(c.n_layer, c.kv_heads, c.head_dim, n_pages=pages, page_size=PAGE_SIZE,
                      dtype=dtype, device=device),
    ]  # fmt: skip


def decode(cache: AnyCache, model: GPT, ids: list[int], want: Tensor) -> CacheStep:
    """Prefill all tokens but the last, decode that one; `want` (V,): logits without a cache."""
    n, window = len(ids) - 1, model.config.windows[0]
    idx = torch.tensor([ids], device=want.device)
    rows = used_pool(cache) if isinstance(cache, kv.PagedCache) else []
    first = cache.reserve(rows, [n]) if isinstance(cache, kv.PagedCache) else cache.reserve(n)
    model.hidden(idx[:, :n], None, first)
    first.advance()
    now = cache.reserve(rows, [1]) if isinstance(cache, kv.PagedCache) else cache.reserve(1)
    table = list(cache.pool.pages(rows[0])) if isinstance(cache, kv.PagedCache) else []
    at, read = cells(now, n, table)
    # k and v of layer 0, (pages or 1, places, Hkv, D)
    held = cache.layers[0].kv if isinstance(cache, kv.DynamicCache) else (cache.k[0], cache.v[0])
    assert held is not None
    buffers = [t.flatten(0, 1) for t in held]  # (cells, Hkv, D)
    before = [as_bytes(t) for t in buffers]
    logits = model.head(model.hidden(idx[:, n:], None, now))[0, -1]
    changed = [(old != as_bytes(t)).flatten(1).any(dim=1) for old, t in zip(before, buffers)]
    holds = [-1] * len(buffers[0])
    for position, c in at.items():
        holds[c] = position
    seen = [c for p, c in at.items() if window is None or p > n - window]
    chosen, _ = model.attention(False, (1, 1), now.kind, now.page_size)
    return {
        "kind": now.kind,
        "backend": chosen.backend.name,
        "kernels": list(chosen.kernels),
        "refused": refused(chosen),
        "cells": len(holds),
        "holds": holds,
        "read": read or seen,
        "seen": seen,
        "written": (changed[0] | changed[1]).nonzero()[:, 0].tolist(),
        "bytes_allocated": cache.nbytes,
        "bytes_used": len(at) * 2 * buffers[0][0].nbytes * model.config.n_layer,
        "page_size": now.page_size,
        "page_table": table,
        "error": float(off(logits, want).max()),
    }


def refused(chosen: Resolution) -> list[Refused]:
    return [{"name": name, "why": list(why)} for name, why in chosen.rejected.items()]


def used_pool(cache: kv.PagedCache) -> list[int]:
    """A sequence in a used pool: the pages of a fresh one would be in order."""
    pool = cache.pool
    others = [pool.new() for _ in range(pool.n_free)]
    pool.grow(dict.fromkeys(others, 1))
    for other in [*others[::2], *others[1::2]]:
        pool.free(other)
    return [pool.new()]


def cells(now: AnyStep, n: int, table: list[int]) -> tuple[dict[int, int], list[int]]:
    """The cell of each token up to n, and all cells that are read; []: those attended to."""
    if isinstance(now, kv.PagedStep):
        read = [page * PAGE_SIZE + slot for page in table for slot in range(PAGE_SIZE)]
        return dict(enumerate(read[: n + 1])), read
    if isinstance(now, kv.StaticStep):
        return {p: p for p in range(n + 1)}, list(range(now.length))
    gone = now.cache.stored - now.cache.layers[0].kept  # dropped: no later token's window
    return {p: p - gone for p in range(gone, n + 1)}, []


def as_bytes(t: Tensor) -> Tensor:
    # Unwritten cells may be NaN, which is not equal to itself.
    return t.clone().contiguous().view(torch.uint8)
