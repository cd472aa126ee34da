"""The JSON document of explain.py: T tokens, L layers, H query heads of D numbers."""

from __future__ import annotations

import base64
from typing import Any, TypedDict

import numpy as np


class Packed(TypedDict):
    dtype: str  # uint8, uint16, float32
    shape: list[int]
    data: str  # base64, little endian, row by row


class Token(TypedDict):
    id: int
    text: str  # bytes of an incomplete character as <E2 80>
    label: str  # with visible spaces and line breaks


class About(TypedDict):
    source: str  # of the weights
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    n_params: int
    device: str
    dtype: str
    backend: str
    announced: str
    refused: list[dict[str, Any]]  # name, and why: a list of reasons
    prompt: str
    tokens: list[Token]
    segments: list[int] | None  # of each token
    windows: list[int | None]  # of each layer, in keys that a query sees
    layer: int
    head: int
    notes: list[str]


class Agreement(TypedDict):
    """A layer's output compared with manual in float64."""

    error: float  # largest difference
    allowed: float
    agrees: bool
    heads: list[float]


class Maps(TypedDict):
    """P = softmax(Q K^T / sqrt(D))."""

    weights: Packed  # (L, H, T (T + 1) / 2): the lower triangle of P, times levels
    levels: int  # 65535 or 255
    seen: list[list[list[int]]]  # of each layer: [first, stop) of each query's keys
    layers: list[Agreement]
    entropy: list[list[float]]  # in nats, of each layer and head: the mean over later queries


class Tiles(TypedDict):
    """Inputs of the recurrence over tiles, for N tokens; C components of D."""

    scores: Packed  # (L, H, N (N + 1) / 2) float32: the lower triangle of S, -inf where masked
    v: Packed  # (L, Hkv, N, C) float32
    out: Packed  # (L, H, N, C) float32


class Document(TypedDict):
    about: About
    maps: Maps
    tiles: Tiles


def token_of(id_: int, pieces: list[bytes]) -> Token:
    """`pieces`: the bytes of each id."""
    piece = pieces[id_]
    try:
        text = piece.decode() if piece else "<end of text>"
    except UnicodeDecodeError:  # part of a character
        text = f"<{piece.hex(' ').upper()}>"
    return {"id": id_, "text": text, "label": text.translate(str.maketrans(" \n\t\r", "␣⏎⇥␍"))}


def pack(a: np.ndarray) -> Packed:
    data = base64.b64encode(a.astype(a.dtype.newbyteorder("<")).tobytes()).decode()
    return {"dtype": str(a.dtype), "shape": list(a.shape), "data": data}


def unpack(packed: Packed) -> np.ndarray:
    a = np.frombuffer(base64.b64decode(packed["data"]), np.dtype(packed["dtype"]).newbyteorder("<"))
    return a.reshape(packed["shape"]).astype(packed["dtype"])
