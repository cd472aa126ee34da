"""The JSON document of explain.py, which page.py and text.py show.

T tokens, L layers, H query heads of D numbers. Sizes are in bytes.
"""

from __future__ import annotations

import base64
from typing import TypedDict

import numpy as np
from torch import Tensor


class Packed(TypedDict):
    """An array: base64 of its elements, little endian, row by row."""

    dtype: str  # uint8, uint16, float32
    shape: list[int]
    data: str


class Token(TypedDict):
    id: int
    text: str  # bytes of an incomplete character as <E2 80>
    label: str  # with visible spaces and line breaks


class Refused(TypedDict):
    name: str
    why: list[str]


class About(TypedDict):
    """The model, the prompt, and what ran."""

    source: str  # of the weights
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    n_params: int
    device: str
    dtype: str
    backend: str  # that ran
    announced: str  # its description
    refused: list[Refused]
    prompt: str
    tokens: list[Token]
    segments: list[int] | None  # the document of each token
    window: int | None  # keys that a query sees
    layer: int  # shown first
    head: int
    notes: list[str]


class Agreement(TypedDict):
    """One layer's output compared with manual in float64."""

    error: float  # largest difference
    allowed: float
    agrees: bool
    heads: list[float]  # errors


class Maps(TypedDict):
    """P = softmax(Q K^T / sqrt(D)) of every layer and head."""

    weights: Packed  # (L, H, T (T + 1) / 2): the lower triangle of P, times levels
    levels: int  # 65535 or 255
    seen: list[list[int]]  # [first, stop) of each query's keys
    layers: list[Agreement]


class Traffic(TypedDict):
    """Bytes to and from main memory, of all heads of a layer."""

    read: int
    written: int
    read_so_far: int  # this step included
    written_so_far: int


class TileStep(Traffic):
    """One tile of the grid."""

    i: int  # block of queries
    j: int  # block of keys
    rows: list[int]  # [first, stop) queries
    cols: list[int]  # [first, stop) keys
    skipped: bool
    at: int | None  # index in the arrays of TracedHead; None: skipped
    first: bool  # of the row's visited tiles: reads Q_i
    last: bool  # of these: writes O_i and L_i


class ManualStep(Traffic):
    """One pass of the standard algorithm."""

    name: str


class Compared(TypedDict):
    """One head's output compared with manual's."""

    layer: int
    head: int
    difference: float  # from manual in the same dtype, the largest
    error: float  # from manual in float64
    allowed: float


class TracedHead(Compared):
    """forward_tiles() for one head: V visited tiles; NaN fills a shorter last block."""

    scores: Packed  # (V, block_m, block_n); -inf: masked
    m: Packed  # (V, block_m) running maximum; -inf: no key yet
    l: Packed  # (V, block_m) running sum of exp(s - m)
    rescale: Packed  # (V, block_m) factor of the old l and O


class Tiles(TypedDict):
    """attention/tiled.py over the prompt."""

    block_m: int  # queries in a tile
    block_n: int  # keys in a tile
    n_rows: int
    n_cols: int
    size: int  # of an element
    fast_memory: int  # on chip for one tile
    steps: list[TileStep]
    manual: list[ManualStep]
    heads: list[TracedHead]  # of the layer shown first


class CacheStep(TypedDict):
    """One decode step through one cache, in layer 0. Cells are numbered page by page."""

    kind: str  # dynamic, static, paged
    backend: str
    kernels: list[str]
    refused: list[Refused]
    cells: int
    holds: list[int]  # the position of each cell's token; -1: empty
    read: list[int]  # cells passed to the backend
    seen: list[int]  # of these, not masked
    written: list[int]  # whose bytes changed
    bytes_allocated: int  # all layers
    bytes_used: int
    page_size: int | None
    page_table: list[int]
    error: float  # of the logits


class Caches(TypedDict):
    """One decode step after the prompt, with each cache."""

    prompt: list[Token]
    token: Token  # decoded
    position: int
    predicted: bool  # False: the prompt's last token
    bytes_per_token: int
    steps: list[CacheStep]
    allowed: float
    agree: bool


class Document(TypedDict):
    about: About
    maps: Maps
    tiles: Tiles
    caches: Caches


LABELS = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def token_of(id_: int, pieces: list[bytes]) -> Token:
    """A token; `pieces` has the bytes of each id."""
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
