"""ring: attention over a sequence that N processes share (context parallelism). Course: page 10.

The queries stay; blocks of keys and values move around a ring. O_i is a row's normalized output
over the keys so far, L_i the logsumexp of its scores. Block j adds O_ij and L_ij:

    L_new = log(e^L_i + e^L_ij)
    O_i   = e^(L_i - L_new) O_i + e^(L_ij - L_new) O_ij

Late queries see more keys, so process r holds chunks r and 2 N - 1 - r of 2 N. Each step sends K, V
to r + 1; backward the sums dK, dV follow their block home.

Memory  O(T / N): its own K and V, the current block and the incoming one.
Source  Liu et al. 2023 (arXiv 2310.01889); Brandon et al. 2023 (arXiv 2311.09431)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .caps import Backend, Partial
from .function import attention, not_compiled
from .masks import Pair
from .spec import Spec
from .tiled import wholly_masked

Tile = tuple[slice, slice, int]  # queries, keys, offset


class Ring:
    """Processes of a torch.distributed group that share a sequence; None: this one."""

    def __init__(self, group: Any = None) -> None:
        self.group, self.rank, self.size = group, 0, 1
        if group is not None:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def chunks(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.size - 1 - rank

    def shard(self, t: Tensor, pad: float = 0) -> Tensor:
        """This process's (B, T_r, ...) of t (B, T, ...), padded at the end."""
        c = -(-t.shape[1] // (2 * self.size))  # positions in a chunk
        filling = [0, 0] * (t.dim() - 2) + [0, 2 * self.size * c - t.shape[1]]
        cut = F.pad(t, filling, value=pad).split(c, dim=1)
        return torch.cat([cut[a] for a in self.chunks(self.rank)], dim=1)

    def gather(self, t: Tensor, T: int) -> Tensor:
        """The inverse of shard(): (B, T, ...)."""
        parts = [t.contiguous()]
        if self.size > 1:
            parts = [torch.empty_like(parts[0]) for _ in range(self.size)]
            dist.all_gather(parts, t.contiguous(), group=self.group)
        early, late = zip(*(part.chunk(2, dim=1) for part in parts), strict=True)
        return torch.cat([*early, *late[::-1]], dim=1)[:, :T]

    def positions(self, T_r: int, last: int, device: torch.device | None = None) -> Tensor:
        """Positions (T_r,) int64 of this process's tokens, at most `last`, else ValueError."""
        c = T_r // 2
        if 2 * self.size * (c - 1) > last:
            got = f"{self.size} processes with {T_r} tokens each"
            raise ValueError(f"{got} have more than fit into block_size {last + 1}")
        here = [torch.arange(a * c, (a + 1) * c, device=device) for a in self.chunks(self.rank)]
        return torch.cat(here).clamp(max=last)

    def attend(self, backend: Backend) -> Callable[..., Tensor]:
        """A collective attend() on shards (B, T_r, ...), as caps.Backend."""
        assert backend.partial is not None, f"{backend.name} gives no L"
        return partial(attend, ring=self, kernel=backend.partial)

    def tiles(self, step: int, T_r: int, window: int | None) -> Iterator[Tile]:
        c = T_r // 2
        halves = slice(0, c), slice(c, T_r)
        for I, a in zip(halves, self.chunks(self.rank), strict=True):
            for J, b in zip(halves, self.chunks((self.rank - step) % self.size), strict=True):
                if not wholly_masked(halves[0], halves[0], (a - b) * c, window):
                    yield I, J, (a - b) * c

    def pass_on(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        if self.size == 1:
            return lambda: tensors
        after, before = (
            dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1))
        sent = [t.contiguous() for t in tensors]
        came = [torch.empty_like(t) for t in sent]
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, t, after, self.group) for t in sent]
            + [dist.P2POp(dist.irecv, t, before, self.group) for t in came])

        on = came[0].device  # gloo has no limit of its own
        limit = [self.group._get_backend(on).options._timeout] if on.type == "cpu" else []

        def wait(_until_sent: list[Tensor] = sent) -> list[Tensor]:
            for work in works:
                work.wait(*limit)
            return came

        return wait


def with_segments(tiles: Iterator[Tile], segments: Tensor | None,
                  keys: Tensor | None = None) -> Iterator[tuple[slice, slice, int, Pair]]:
    """Add segments; queries of a later chunk see only a segment that it continues."""
    for I, J, offset in tiles:
        if segments is None or keys is None:
            yield I, J, offset, None
            continue
        q, k = segments[:, I], keys[:, J]
        if offset > 0:
            continued = q[:, :1] == k[:, -1:]  # (B, 1)
            first = (continued & (q == q[:, :1])).any(0).sum()
            last = (continued & (k == k[:, -1:])).any(0).sum()
            n, m = torch.stack([first, last]).tolist()
            if not n:
                continue
            I, J = slice(I.start, I.start + n), slice(J.stop - m, J.stop)
            q, k, offset = q[:, :n], k[:, -m:], offset - (k.shape[1] - m)
        yield I, J, offset, (q, k)


@not_compiled
def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: Tensor | None = None,
           cache: None = None, ring: Ring, kernel: Partial, **slopes: Tensor) -> Tensor:
    """q (B, T_r, H, D), k and v (B, T_r, Hkv, D)."""
    assert cache is None and not spec.dropout and not spec.sinks  # Caps.lse
    if q.shape[1] != k.shape[1] or q.shape[1] % 2:
        got = f"{q.shape[1]} queries and {k.shape[1]} keys"
        raise ValueError(f"a ring takes parts of two equal chunks (Ring.shard), got {got}")
    if spec.right != 0:
        raise ValueError(f"a ring is causal, got right={spec.right}")
    whole = Partial(
        partial(forward, ring=ring, kernel=kernel), partial(backward, ring=ring, kernel=kernel))
    return attention(q, k, v, spec, kernel=whole, segments=segments, **slopes)[0]


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec, _offset: int, segments: Pair, *,
            ring: Ring, kernel: Partial, **slopes: Tensor) -> tuple[Tensor, Tensor]:
    B, T_r, H, _ = q.shape
    acc = torch.promote_types(q.dtype, torch.float32)
    O = torch.zeros(q.shape, dtype=acc, device=q.device)
    wide = acc if q.device.type == "mps" else torch.float64
    # Finite: before any key L_i - L_new is 0. float64: its rounding moves all of P.
    L = torch.full((B, H, T_r), torch.finfo(wide).min, dtype=wide, device=q.device)
    here = segments[1] if segments else None
    block = [k, v] if here is None else [k, v, here]
    for step in range(ring.size):
        coming = ring.pass_on(block) if step < ring.size - 1 else None
        tiles = ring.tiles(step, T_r, spec.window)
        for I, J, offset, pair in with_segments(tiles, here, *block[2:]):
            K_j, V_j = (t[:, J] for t in block[:2])
            O_ij, L_ij = kernel.forward(q[:, I], K_j, V_j, spec, offset, pair, **slopes)
            new = torch.sigmoid(L_ij - L[..., I]).mT[..., None].to(acc)  # e^(L_ij - L_new)
            old = torch.sigmoid(L[..., I] - L_ij).mT[..., None].to(acc)
            O[:, I] = old * O[:, I] + new * O_ij
            L[..., I] = torch.logaddexp(L[..., I], L_ij.to(wide))
        block = coming() if coming else block
    return O, L.to(acc)


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, L: Tensor, spec: Spec,
             _offset: int, segments: Pair, *, ring: Ring, kernel: Partial,
             **slopes: Tensor) -> tuple[Tensor, ...]:
    dQ = torch.zeros(q.shape, dtype=L.dtype, device=q.device)
    here = segments[1] if segments else None
    block = [k, v] if here is None else [k, v, here]
    sums: Callable[[], list[Tensor]] = list
    for step in range(ring.size):
        coming = ring.pass_on(block) if step < ring.size - 1 else None
        dK, dV = (torch.zeros(t.shape, dtype=L.dtype, device=q.device) for t in (k, v))
        tiles = ring.tiles(step, q.shape[1], spec.window)
        for I, J, offset, pair in with_segments(tiles, here, *block[2:]):
            K_j, V_j = (t[:, J] for t in block[:2])
            of_row = dout[:, I], q[:, I], K_j, V_j, out[:, I], L[..., I]
            dQ_ij, dK_ij, dV_ij = kernel.backward(*of_row, spec, offset, pair, **slopes)
            dQ[:, I] += dQ_ij
            dK[:, J] += dK_ij
            dV[:, J] += dV_ij
        if step:  # from earlier holders of this block
            dK, dV = map(torch.add, (dK, dV), sums())
        sums = ring.pass_on([dK, dV])
        block = coming() if coming else block
    dK, dV = sums()
    return dQ, dK, dV
