"""One decode step through each KV cache, by the caches themselves (inference/).

The model reads the prompt into a cache, then decodes one more token. The caches record what is
stored where; what was written is found by comparing the buffers before and after. Layer 0 stands
for all: every layer has the same cells.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention import Resolution
from inference.cache import DynamicCache, PagedCache, StaticCache, bucket
from model import GPT
from viewer.document import Caches, CacheStep, Refused, token_of
from viewer.maps import off

PAGE_SIZE = 8  # tokens: small, so that a short prompt has several pages
SPARE_PAGES = 3  # pages beyond those that are needed, so that some are free


class Buffer(NamedTuple):
    """A cache in the middle of its decode step: the tokens are reserved, not yet stored."""

    k: Tensor  # (cells, Hkv, D) of layer 0
    v: Tensor
    holds: list[int]  # position of the token in each cell once the step is over; -1: none
    read: list[int]  # cells
    seen: list[int]  # cells


@torch.no_grad()
def caches(model: GPT, ids: list[int], pieces: list[bytes], notes: list[str]) -> Caches:
    """The same step with the dynamic, the static and the paged cache.

    `pieces` are the bytes of each id of the tokenizer; ids beyond them pad the model's vocabulary.
    """
    predicted = len(ids) < model.config.block_size
    if predicted:
        ids = [*ids, int(last_logits(model, ids)[: len(pieces)].argmax())]
    else:
        notes = [*notes, "The prompt fills block_size, so its own last token is the one decoded."]
    tokens, want = [token_of(id_, pieces) for id_ in ids], last_logits(model, ids)
    found = [step(kind, model, ids, want) for kind in ("dynamic", "static", "paged")]
    # In rounding errors of the largest logit: the probe allows a kernel one in its dtype and 32 in
    # float32; a model rounds more often.
    eps = torch.finfo(want.dtype).eps
    allowed = (4 * eps + 32 * min(eps, torch.finfo(torch.float32).eps)) * float(want.abs().max())
    config = model.config
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
        "notes": notes,
    }


def last_logits(model: GPT, ids: list[int]) -> Tensor:
    """(V,) the logits after these tokens, without a cache."""
    idx = torch.tensor([ids], device=model.transformer.wte.weight.device)
    return model.head(model.hidden(idx)[0, -1])


def step(kind: str, model: GPT, ids: list[int], want: Tensor) -> CacheStep:
    """Read all tokens but the last into a cache, then decode that one.

    `want` (V,) are its logits without a cache.
    """
    n, config, device = len(ids) - 1, model.config, want.device
    window, most = config.attention_window, config.block_size
    idx = torch.tensor([ids], device=device)
    cache: Any
    rows: list[int] = []
    if kind == "dynamic":
        cache = DynamicCache(config.n_layer, max_len=most, window=window, device=device)
    elif kind == "static":
        cache = StaticCache(config.n_layer, 1, bucket(n + 1, most), config.kv_heads,
                            config.head_dim, dtype=want.dtype, device=device)  # fmt: skip
    else:
        pages = -(-(n + 1) // PAGE_SIZE) + 1 + SPARE_PAGES
        cache = PagedCache(config.n_layer, config.kv_heads, config.head_dim, n_pages=pages,
                           page_size=PAGE_SIZE, dtype=want.dtype, device=device)  # fmt: skip
        rows = _used(cache)

    def reserve(T: int) -> Any:
        return cache.reserve(rows, [T]) if rows else cache.reserve(T)

    first = reserve(n)
    model.hidden(idx[:, :n], None, first)
    first.advance()
    now = reserve(1)
    buffer = _buffer(kind, cache, now, n, window)
    before = [_bits(t) for t in (buffer.k, buffer.v)]
    logits = model.head(model.hidden(idx[:, n:], None, now))[0, -1]
    changed = torch.zeros(buffer.k.shape[0], dtype=torch.bool)
    for old, new in zip(before, (buffer.k, buffer.v), strict=True):
        changed |= (old != _bits(new)).flatten(1).any(dim=1).cpu()
    chosen, _ = model.attention(False, (1, 1), now.kind, now.page_size)
    used = sum(p >= 0 for p in buffer.holds) * 2 * buffer.k[0].nbytes * config.n_layer
    return {
        "kind": kind,
        "backend": chosen.backend.name,
        "kernels": list(chosen.kernels),
        "refused": refused(chosen),
        "cells": buffer.k.shape[0],
        "holds": buffer.holds,
        "read": buffer.read,
        "seen": buffer.seen,
        "written": changed.nonzero()[:, 0].tolist(),
        "length_before": n,
        "length_after": n + 1,
        "bytes_allocated": cache.nbytes,
        "bytes_used": used,
        "page_size": now.page_size,
        "page_table": list(cache.pool.pages(rows[0])) if kind == "paged" else [],
        "error": float(off(logits, want).max()),
    }


def refused(chosen: Resolution) -> list[Refused]:
    """Every backend that was refused before this one."""
    return [{"name": name, "why": list(why)} for name, why in chosen.rejected.items()]


def _used(cache: PagedCache) -> list[int]:
    """One new sequence in a pool from which other texts have been freed.

    A fresh pool hands out its pages in order, and the page table would show nothing.
    """
    pool = cache.pool
    others = [pool.new() for _ in range(pool.n_free)]
    pool.grow(dict.fromkeys(others, 1))
    for other in [*others[::2], *others[1::2]]:
        pool.free(other)
    return [pool.new()]


def _buffer(kind: str, cache: Any, now: Any, n: int, window: int | None) -> Buffer:
    """What layer 0 holds and will hold, as the cache records it; `now` is the step of token n."""
    first_seen = 0 if window is None else max(0, n + 1 - window)
    # (pages or 1, places, Hkv, D) of layer 0 -> (cells, Hkv, D)
    k, v = (t[0].flatten(0, 1) for t in (cache.k, cache.v))
    if kind == "paged":
        size = now.page_size
        pages = cache.pool.pages(next(iter(now.counts)))
        read = [page * size + slot for page in pages for slot in range(size)]
        at = dict(enumerate(read[: n + 1]))
    elif kind == "static":
        read = list(range(now.length))
        at = {p: p for p in range(n + 1)}
    else:
        gone = cache.stored - cache.kept  # tokens that no later one can see, already dropped
        at = {p: p - gone for p in range(gone, n + 1)}
        read = [c for p, c in at.items() if p >= first_seen]
    holds = [-1] * k.shape[0]
    for position, c in at.items():
        holds[c] = position
    return Buffer(k, v, holds, read, [c for p, c in at.items() if p >= first_seen])


def _bits(t: Tensor) -> Tensor:
    """A copy of the bits to compare with, since unwritten cells may be NaN."""
    return t.clone().contiguous().view(torch.uint8)
