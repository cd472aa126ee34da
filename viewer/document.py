"""The JSON document that explain.py computes and that page.py and text.py show.

Short arrays are plain JSON, long ones `Packed`. T prompt tokens, L layers, H query heads, head
dimension D. Sizes are in bytes, times in seconds. All indices start at 0.
"""

from __future__ import annotations

import base64
from typing import TypedDict

import numpy as np
from torch import Tensor


class Packed(TypedDict):
    """An array: base64 of its elements, little endian, the last dimension fastest."""

    dtype: str  # "uint8", "uint16" or "float32" (with -Infinity and NaN)
    shape: list[int]
    data: str


class Token(TypedDict):
    id: int
    text: str  # bytes of an incomplete character as "<E2 80>"
    label: str  # the same in one line: a space as "␣", a line break as "⏎", a tab as "⇥"


class Refused(TypedDict):
    name: str  # of a backend
    why: list[str]


class About(TypedDict):
    """The model, the prompt, and what ran."""

    source: str  # where the weights come from
    n_layer: int  # L
    n_head: int  # H
    n_kv_head: int  # query head h reads key/value head h // (H / n_kv_head)
    head_dim: int  # D
    n_params: int
    device: str
    dtype: str  # of the weights, and of q, k and v
    backend: str  # the one that ran
    announced: str  # the line that the command prints about it
    refused: list[Refused]  # in the order tried
    prompt: str
    tokens: list[Token]  # T
    segments: list[int] | None  # T, the document of each token; None: one document
    window: int | None  # keys that a query sees, itself included
    layer: int  # shown first
    head: int
    notes: list[str]  # what was left out, and why


class Agreement(TypedDict):
    """One layer's output compared with manual in float64 on the same q, k and v."""

    error: float  # largest |output - float64|
    allowed: float  # by attention.probing.allowed_error
    agrees: bool
    heads: list[float]  # H, the error of each head


class Maps(TypedDict):
    """P = softmax(Q K^T / sqrt(D)) of every layer and head, by manual in float32."""

    weights: Packed  # (L, H, T (T + 1) / 2) integers, round(weight * levels): the lower triangle,
    # row after row
    levels: int  # 65535 or 255
    seen: list[list[int]]  # T pairs [first, stop): the keys that query i sees
    layers: list[Agreement]  # L


class TileStep(TypedDict):
    """One tile, for all heads of a layer together."""

    i: int  # block of queries
    j: int  # block of keys
    rows: list[int]  # [first, stop) queries
    cols: list[int]  # [first, stop) keys
    skipped: bool  # wholly masked
    at: int | None  # index in the arrays of TracedHead; None: skipped
    first: bool  # the first visited tile of its row: reads Q_i
    last: bool  # the last visited tile of its row: O_i and L_i are written
    read: int  # bytes
    written: int
    read_so_far: int  # this tile included
    written_so_far: int


class ManualStep(TypedDict):
    """One pass of the standard algorithm, for all heads of a layer together."""

    name: str  # "S = Q K^T", "P = softmax(S)", "O = P V"
    reads: str  # "Q, K"
    writes: str  # "S"
    read: int  # bytes
    written: int
    read_so_far: int
    written_so_far: int


class Beside(TypedDict):
    """One head's output of an algorithm compared with manual's."""

    layer: int
    head: int
    difference: float  # largest |output - manual|
    allowed: float  # as in Agreement
    error: float  # largest |output - float64|


class TracedHead(Beside):
    """The trace of forward_tiles() for one head. V visited tiles, in order.

    The last block may be shorter: NaN fills the rest.
    """

    scores: Packed  # (V, block_m, block_n) float32: S_ij; -Infinity where masked
    m: Packed  # (V, block_m) float32: running maximum after the tile; -Infinity: no key yet
    l: Packed  # (V, block_m) float32: running sum of exp(s - m)
    rescale: Packed  # (V, block_m) float32: exp(m - m_new), the factor of the old l and O


class Tiles(TypedDict):
    """The trace of attention/tiled.py over the prompt."""

    block_m: int  # rows of a tile, queries
    block_n: int  # columns of a tile, keys
    n_rows: int  # blocks of queries
    n_cols: int  # blocks of keys
    size: int  # bytes an element of q, k, v, out
    fast_memory: int  # bytes on chip for one tile: viewer.cost.fast_memory
    steps: list[TileStep]  # n_rows * n_cols, in order
    manual: list[ManualStep]  # 3
    heads: list[TracedHead]  # of the layer shown first


class RingTile(TypedDict):
    """A chunk of queries with a chunk of keys, in one process of the ring."""

    step: int
    rank: int
    queries: int  # chunk
    keys: int  # chunk
    masked: bool  # partly


class Played(Beside):
    """The forward pass of attention/ring.py for one head: 2 n chunks, V tiles computed."""

    n: int  # processes, and steps
    chunk: int  # positions in a chunk; the last ones may be padding
    chunks: list[list[int]]  # n pairs: the chunks of each process
    homes: list[list[int]]  # [step][process]: the process whose keys and values are there
    sent: list[list[int]]  # [step][process]: bytes sent, all heads
    tiles: list[RingTile]  # V, by step, then by process; other pairs are skipped
    part: Packed  # (V, chunk) float32: L over this tile's keys alone; -Infinity: no key
    L: Packed  # (V, chunk) float32: L over all keys so far
    O: Packed  # (V, chunk, D) float32: the output over the same keys, normalized


class CacheStep(TypedDict):
    """One decode step through one cache, in layer 0.

    Cell c is position c of the buffer; in a paged cache slot c % page_size of page c // page_size.
    """

    kind: str  # "dynamic", "static" or "paged"
    backend: str  # what ran the step
    kernels: list[str]
    refused: list[Refused]
    cells: int
    holds: list[int]  # of each cell, the position of its token; -1: empty
    read: list[int]  # cells passed to the backend
    seen: list[int]  # cells that the query attends to
    written: list[int]  # cells whose bytes changed
    bytes_allocated: int  # all layers, keys and values
    bytes_used: int  # holding tokens
    page_size: int | None  # tokens; None: not paged
    page_table: list[int]
    error: float  # largest |logits - logits without a cache|


class Caches(TypedDict):
    """Prefill of the prompt and one decode step, with each of the three caches."""

    prompt: list[Token]
    token: Token  # decoded
    position: int
    predicted: bool  # the model's likeliest next token; False: the last one of the prompt
    bytes_per_token: int  # all layers, keys and values
    steps: list[CacheStep]  # dynamic, static, paged
    allowed: float
    agree: bool


class Cost(TypedDict):
    """One forward pass of attention under the roofline."""

    flops: int  # of the two matmuls
    bytes: int  # to and from main memory
    intensity: float  # FLOPs a byte
    seconds: float  # max(flops / peak, bytes / bandwidth)
    bound: str  # "memory" or "compute"


class CostRow(TypedDict):
    T: int  # tokens
    manual: Cost
    tiled: Cost


class Costs(TypedDict):
    """One layer of this model's attention, forward, batch 1, all heads, as T grows."""

    gpu: str
    dtype: str  # half precision
    peak: float  # FLOP/s
    peak_source: str
    bandwidth: float  # bytes a second
    bandwidth_source: str
    ridge: float  # peak / bandwidth, FLOPs a byte
    block_m: int  # the largest tile that fits into fast_memory
    block_n: int
    fast_memory: int  # bytes on chip, assumed
    rows: list[CostRow]


class Document(TypedDict):
    about: About
    maps: Maps
    tiles: Tiles
    ring: Played
    caches: Caches
    costs: Costs


LABELS = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def token_of(id_: int, pieces: list[bytes]) -> Token:
    """A token; `pieces`: the bytes of each id (Tokenizer.token_bytes())."""
    piece = pieces[id_]
    try:
        text = piece.decode() if piece else "<end of text>"
    except UnicodeDecodeError:  # part of a character
        text = f"<{piece.hex(' ').upper()}>"
    return {"id": id_, "text": text, "label": "".join(LABELS.get(c, c) for c in text)}


def pack(x: Tensor | np.ndarray) -> Packed:
    """Encode an array for JSON; a float tensor becomes float32."""
    a = x.detach().float().cpu().numpy() if isinstance(x, Tensor) else x
    assert str(a.dtype) in ("uint8", "uint16", "float32"), a.dtype
    data = base64.b64encode(a.astype(a.dtype.newbyteorder("<")).tobytes()).decode()
    return {"dtype": str(a.dtype), "shape": list(a.shape), "data": data}


def unpack(packed: Packed) -> np.ndarray:
    """Decode an array."""
    dtype = np.dtype(packed["dtype"]).newbyteorder("<")
    a = np.frombuffer(base64.b64decode(packed["data"]), dtype)
    return a.reshape(packed["shape"]).astype(packed["dtype"])
