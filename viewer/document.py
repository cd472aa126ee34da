"""The document: what explain.py computes, and what the page and the terminal show, as JSON.

It is the contract between the side that computes (maps.py, tiles.py, caches.py, cost.py, ring.py)
and the side that shows (page.py, text.py), which computes no attention of its own.

Short arrays are plain JSON, long ones `Packed`. T is the number of prompt tokens shown, L layers, H
query heads, D the head dimension. Sizes are in bytes, times in seconds.
Layers, heads, tokens and tiles are counted from 0.
"""

from __future__ import annotations

import base64
from typing import TypedDict

import numpy as np
from torch import Tensor


class Packed(TypedDict):
    """An array: base64 of its elements, little endian, the last dimension fastest."""

    dtype: str  # "uint8", "uint16" or "float32", which may hold -Infinity and NaN
    shape: list[int]
    data: str


class Token(TypedDict):
    id: int
    text: str  # its text; bytes that are only part of a character as "<E2 80>"
    label: str  # the same in one line: a space as "␣", a line break as "⏎", a tab as "⇥"


class Refused(TypedDict):
    name: str  # of a backend requested, or tried before the one that ran
    why: list[str]  # every reason


class About(TypedDict):
    """The model, the prompt, and what ran."""

    source: str  # where the weights come from
    tokenizer: str  # "char" or "gpt2"
    n_layer: int  # L
    n_head: int  # H
    n_kv_head: int  # key/value heads; fewer than H: query head h reads h // (H / n_kv_head)
    head_dim: int  # D
    n_embd: int
    block_size: int  # the most tokens that the model takes
    vocab_size: int
    n_params: int
    device: str
    dtype: str  # of the weights, and of q, k and v
    backend: str  # the one that ran
    kernels: list[str]  # what the profiler saw run; empty: its own operators are no named kernel
    announced: str  # the line that the command printed about it
    refused: list[Refused]  # in the order in which they were tried
    torch: str  # version
    prompt: str
    tokens: list[Token]  # T
    segments: list[int] | None  # T numbers, the document of each token; None: one document
    window: int | None  # keys that a query sees, itself included; None: all before it
    layer: int  # what the page begins with
    head: int
    notes: list[str]  # what was cut or left out, and why: a sentence each; show them all


class Agreement(TypedDict):
    """One layer's output from the model's backend, compared with the formula.

    The truth is manual in float64, on this layer's q, k and v in this run.
    """

    error: float  # largest |backend - truth| of all tokens and heads
    allowed: float  # the largest error that counts as agreement, by the probe's policy
    agrees: bool
    manual_error: float  # largest |manual - truth|, manual in the model's dtype
    largest: float  # largest |truth|
    heads: list[float]  # H: `error` of each head


class Maps(TypedDict):
    """P = softmax(Q K^T / sqrt(D)) of every layer and head, by manual in float32."""

    weights: Packed  # (L, H, T (T + 1) / 2) integers, each `weight * levels` rounded. Row i, query
    # i, has the keys 0 .. i and begins at i (i + 1) / 2. What visible() hides is 0.
    levels: int  # 65535 or 255
    rounding: float  # the largest error of rounding to integers: 0.5 / levels
    sum_error: float  # largest |sum of a row - 1| before rounding
    seen: list[list[int]]  # T pairs [first, stop): the keys that query i sees, by visible()
    layers: list[Agreement]  # L


class TileStep(TypedDict):
    """One tile, for all heads of a layer together; the same in every layer."""

    i: int  # block of queries
    j: int  # block of keys
    rows: list[int]  # [first, stop) queries
    cols: list[int]  # [first, stop) keys
    skipped: bool  # wholly masked: nothing is read, nothing computed
    at: int | None  # its place in the arrays of TracedHead; None where skipped
    first: bool  # the first tile of its row that is not skipped: Q_i is read
    last: bool  # the last tile of its row that is not skipped: O_i and L_i are written after it
    read: int  # bytes read at this tile
    written: int
    read_so_far: int  # bytes, this tile included
    written_so_far: int


class ManualStep(TypedDict):
    """One pass of the standard algorithm over main memory, for all heads of a layer together."""

    name: str  # "S = Q K^T", "P = softmax(S)", "O = P V"
    reads: str  # "Q, K"
    writes: str  # "S"
    read: int  # bytes
    written: int
    read_so_far: int
    written_so_far: int


class Beside(TypedDict):
    """What an algorithm gave for one head, beside manual's output from the same q, k and v."""

    layer: int
    head: int
    manual: Packed  # (T, D) float32: manual's output
    difference: float  # largest |output - manual's|
    allowed: float  # as in Agreement, for this layer's output against float64
    error: float  # largest |output - truth|


class TracedHead(Beside):
    """What forward_tiles() did for one head. V: tiles that were visited, in their order.

    The last block of queries or keys may be shorter: what lies beyond it is NaN.
    """

    scores: Packed  # (V, block_m, block_n) float32: S_ij; -Infinity where masked
    m: Packed  # (V, block_m) float32: running maximum after the tile; -Infinity: nothing seen yet
    l: Packed  # (V, block_m) float32: running sum of exp(s - m) after the tile
    rescale: Packed  # (V, block_m) float32: what the old l and O were multiplied by, exp(m - m_new)
    o_norm: Packed  # (V, block_m) float32: Euclidean norm of each row of O_i after the tile
    out: Packed  # (T, D) float32: the output of tiled, O_i / l_i


class Tiles(TypedDict):
    """The trace of attention/tiled.py over the prompt, tile by tile."""

    block_m: int  # rows of a tile, queries
    block_n: int  # columns of a tile, keys
    n_rows: int  # blocks of queries
    n_cols: int  # blocks of keys
    size: int  # bytes an element of q, k, v, out
    fast_memory: int  # bytes on chip that one tile needs: Q_i, K_j, V_j in the dtype; O_i, S_ij,
    # m_i, l_i in float32
    steps: list[TileStep]  # n_rows * n_cols, in the order of the algorithm
    manual: list[ManualStep]  # 3
    heads: list[TracedHead]  # all heads, or those that a note names
    notes: list[str]  # what was left out, and why


class RingTile(TypedDict):
    """A chunk of queries meets a chunk of keys, in a process of the ring."""

    step: int
    rank: int  # the process
    queries: int  # chunk
    keys: int  # chunk
    masked: bool  # whether some of its entries are


class Played(Beside):
    """The forward pass of attention/ring.py over the prompt, for one head. V: tiles computed.

    2 n chunks of `chunk` positions; those behind the last token are filling.
    """

    n: int  # processes, and steps
    chunk: int
    chunks: list[list[int]]  # n pairs: the chunks of each process
    homes: list[list[int]]  # [step][process]: the process whose keys and values are there
    sent: list[list[int]]  # [step][process]: bytes that it sends on in this step, all heads
    tiles: list[RingTile]  # V, by step, then by process; pairs of chunks that are not here: skipped
    part: Packed  # (V, chunk) float32: L over this tile's keys alone; -Infinity: none is seen
    L: Packed  # (V, chunk) float32: L over all keys so far, this tile's included
    O: Packed  # (V, chunk, D) float32: the output over the same keys, normalised


class CacheStep(TypedDict):
    """One decode step through one cache: what its buffers hold in layer 0, and what is touched.

    Cell c is position c of the buffer; in a paged cache slot c % page_size of page c // page_size.
    """

    kind: str  # "dynamic", "static" or "paged"
    backend: str  # what ran the step
    kernels: list[str]
    refused: list[Refused]
    cells: int  # how many there are
    holds: list[int]  # cells numbers: the position of the token whose k and v are there; -1: none
    read: list[int]  # cells that the backend is given to read
    seen: list[int]  # of these, the cells that the query attends to
    written: list[int]  # cells whose content changed in this step: found by comparing
    length_before: int  # tokens stored before the step
    length_after: int
    bytes_allocated: int  # all layers, keys and values
    bytes_used: int  # of these, what holds tokens
    page_size: int | None  # tokens a page; None: not paged
    page_table: list[int]  # page of tokens 0 .. page_size - 1, of the next ones, ...; empty: none
    error: float  # largest |logits - logits without a cache|, of the decoded token


class Caches(TypedDict):
    """The prompt is read, then one more token is decoded, with each of the three caches."""

    prompt: list[Token]  # the tokens that were read first
    token: Token  # the one that is decoded
    position: int  # where it stands
    predicted: bool  # whether it is the model's likeliest next token, or the last of the prompt
    bytes_per_token: int  # all layers, keys and values
    steps: list[CacheStep]  # dynamic, static, paged
    allowed: float  # the largest `error` that counts as agreement
    agree: bool
    notes: list[str]


class Cost(TypedDict):
    """One pass of attention: what it computes and moves, and the least possible time."""

    flops: int  # FLOPs of the two matmuls
    bytes: int  # to and from main memory
    intensity: float  # FLOPs a byte
    seconds: float  # the larger of flops / peak and bytes / bandwidth: the roofline
    bound: str  # "memory" or "compute"


class CostRow(TypedDict):
    T: int  # tokens
    manual: Cost
    tiled: Cost


class Costs(TypedDict):
    """One layer of this model's attention, forward, batch 1, all heads, as T grows."""

    gpu: str  # whose roofline
    dtype: str  # the dtype assumed there, half precision
    peak: float  # FLOP/s
    peak_source: str
    bandwidth: float  # bytes a second
    bandwidth_source: str
    ridge: float  # FLOPs a byte where the two roofs meet: peak / bandwidth
    block_m: int  # the largest tile that fits into the fast memory assumed
    block_n: int
    fast_memory: int  # bytes on chip that are assumed
    rows: list[CostRow]


class Document(TypedDict):
    about: About
    maps: Maps
    tiles: Tiles
    ring: Played
    caches: Caches
    costs: Costs


LABELS = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}  # characters that cannot be seen


def token_of(id_: int, pieces: list[bytes]) -> Token:
    """A token as it is shown; `pieces` are the bytes of each id (Tokenizer.token_bytes())."""
    piece = pieces[id_]
    try:
        text = piece.decode() if piece else "<end of text>"
    except UnicodeDecodeError:  # a part of a character, or of several
        text = f"<{piece.hex(' ').upper()}>"
    return {"id": id_, "text": text, "label": "".join(LABELS.get(c, c) for c in text)}


def pack(x: Tensor | np.ndarray) -> Packed:
    """An array as JSON can hold it; a float tensor becomes float32."""
    a = x.detach().float().cpu().numpy() if isinstance(x, Tensor) else x
    assert str(a.dtype) in ("uint8", "uint16", "float32"), a.dtype
    data = base64.b64encode(a.astype(a.dtype.newbyteorder("<")).tobytes()).decode()
    return {"dtype": str(a.dtype), "shape": list(a.shape), "data": data}


def unpack(packed: Packed) -> np.ndarray:
    """The array that pack() was given."""
    dtype = np.dtype(packed["dtype"]).newbyteorder("<")
    a = np.frombuffer(base64.b64decode(packed["data"]), dtype)
    return a.reshape(packed["shape"]).astype(packed["dtype"])
