"""attention/ring.py with threads as processes and queues as the network."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Queue

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import Ring, tiled, views
from viewer.document import Played, RingTile, pack
from viewer.maps import Call, compared

MOST = 16  # processes
Mail = Queue[tuple[int, list[Tensor]]]  # the process that these keys and values began in, and they


class Process(Ring):
    """One process of the ring; records its tiles and the bytes that it sends."""

    def __init__(self, rank: int, mail: list[Mail]) -> None:
        super().__init__()
        self.rank, self.size, self.mail = rank, len(mail), mail
        self.homes = [rank]  # whose keys and values were here, at each step
        self.sent = [0] * len(mail)  # bytes in each step
        self.trace: list[tuple[RingTile, Tensor, Tensor, Tensor]] = []  # with L_ij, L, O

    def pass_on(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        self.sent[len(self.homes) - 1] = sum(t.nbytes for t in tensors)
        self.mail[(self.rank + 1) % self.size].put((self.homes[-1], tensors))

        def wait() -> list[Tensor]:
            home, came = self.mail[self.rank].get(timeout=60)
            self.homes.append(home)
            return came

        return wait

    def on_tile(self, step: int, I: slice, J: slice, L_ij: Tensor, O: Tensor, L: Tensor) -> None:
        a, b = self.chunks(self.rank)[I.start > 0], self.chunks(self.homes[-1])[J.start > 0]
        tile: RingTile = {"step": step, "rank": self.rank, "queries": a, "keys": b, "masked": False}
        self.trace.append(
            (tile, L_ij[0].clone(), L[0, :, I].clone(), O[0, I].transpose(0, 1).clone())
        )


def played(call: Call, n: int) -> tuple[list[Process], Tensor]:
    """The n processes after a forward pass, and the output (1, T, H, D)."""
    mail: list[Mail] = [Queue() for _ in range(n)]
    ring = [Process(rank, mail) for rank in range(n)]
    spec = replace(call.spec, lse=True, grad=False)

    def run(process: Process) -> Tensor:
        q, k, v = (process.shard(t) for t in (call.q, call.k, call.v))
        segments = None if call.segments is None else process.shard(call.segments, -1)
        return process.attend(tiled.BACKEND)(q, k, v, spec, segments=segments)

    with ThreadPoolExecutor(n) as pool:
        parts = list(pool.map(run, ring))
    T_r = parts[0].shape[1]
    where = torch.cat([process.positions(T_r, n * T_r) for process in ring])
    return ring, torch.cat(parts, dim=1)[:, where.argsort()][:, : call.q.shape[1]]


def play(call: Call, n: int, layer: int, head: int) -> Played:
    """The ring over one layer, and (O, L) of one head after each tile."""
    if n > MOST:
        raise ValueError(f"--ring: at most {MOST} processes can be shown, got {n}")
    ring, out = played(call, n)
    trace = [t for process in ring for t in process.trace]
    trace.sort(key=lambda t: (t[0]["step"], t[0]["rank"]))
    part, L, O = (torch.stack(x)[:, head] for x in list(zip(*trace))[1:])
    c, seg, T = L.shape[1], call.segments, call.q.shape[1]
    ids = None if seg is None else F.pad(seg.cpu(), (0, 2 * n * c - T), value=-1)
    seen = views.mask(2 * n * c, 2 * n * c, call.spec.window, ids, torch.device("cpu"))[0, 0]
    whole = seen.unflatten(1, (-1, c)).all(2).unflatten(0, (-1, c)).all(1)  # of a pair of chunks
    return {
        **compared(call, out, layer, head),
        "n": n,
        "chunk": c,
        "chunks": [list(ring[0].chunks(rank)) for rank in range(n)],
        "homes": [list(homes) for homes in zip(*(process.homes for process in ring))],
        "sent": [list(sent) for sent in zip(*(process.sent for process in ring))],
        "tiles": [{**t, "masked": not whole[t["queries"], t["keys"]]} for t, *_ in trace],
        "part": pack(part),
        "L": pack(L.masked_fill(L.eq(torch.finfo(L.dtype).min), -torch.inf)),
        "O": pack(O),
    }
