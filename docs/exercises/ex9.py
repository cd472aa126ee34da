"""Exercise 9: attention over a page table, and MFU that can be believed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from docs.exercises.check import Wrong, call, same, small

NAMES = ("attend", "mfu")
TASK = """Read from pages; compute MFU

1. attend(q, k_pages, v_pages, page_table, length) gives out (D,): of one head, the attention of the
   newest token of a sequence over all `length` tokens that it has stored, its own included.

       q                   (D,)
       k_pages, v_pages    (n_pages, page_size, D), shared by many sequences
       page_table          (max_pages,) int32: token j of this sequence lies in page
                           page_table[j // page_size], at place j % page_size; 0: it has no page

   What lies behind the length, or in other pages, is another sequence's, or was never written and
   may be NaN.

2. mfu(parameters, positions, n_layer, n_head, head_dim, T, tokens_per_second, peaks, recomputes)
   gives the model FLOPs utilization of training as PaLM and nanoGPT count it, from 0 to 1.

       parameters          of the whole model, `positions` of them in the position embeddings
       T                   tokens in a sequence
       peaks               {"dense": FLOP/s, "sparse": FLOP/s} of the device, from its datasheet
       recomputes          whether the layers are computed again in the backward pass
"""
START = """
import torch


def attend(q, k_pages, v_pages, page_table, length):
    page_size, D = k_pages.shape[1:]
    # which pages, in which order, and how much of the last one?
    k, v = k_pages.flatten(0, 1)[:length], v_pages.flatten(0, 1)[:length]
    P = torch.softmax(k @ q / D**0.5, dim=0)
    return P @ v


def mfu(parameters, positions, n_layer, n_head, head_dim, T, tokens_per_second, peaks, recomputes):
    flops_per_token = 6 * parameters
    return flops_per_token * tokens_per_second / peaks["sparse"]
"""

# A mistake -> the sentence that tells it by its symptom.
MISTAKES = {
    "logical": "That is what pages 0, 1, 2, ... give: the table says which "
    "page holds which tokens, and they may lie in any order",
    "last page whole": "That is what the last page read to its end gives: of it only the places "
    "up to `length` are this sequence's",
    "table whole": "That is what all pages of the table give: where the sequence has no page the "
    "table says 0, and page 0 is nobody's",
    "full pages": "That is what the full pages alone give: the last page is read too, up to "
    "`length`",
    "one less": "That is what the tokens before the newest give: it sees itself too",
    "scale": "That is what scores without 1 / sqrt(D) give",
    "sorted": "That is what the pages in the order of their numbers give: the order of the tokens "
    "is that of the table",
}
RATES = {
    "sparse": "That is against the sparse peak, which only holds for matrices of which half the "
    "numbers are zero in a fixed pattern: here all are dense",
    "6N": "That is 6 N alone: attention's products, 12 L H Q T a token, have no weights and are "
    "not in N",
    "positions": "That counts the position embeddings: they are added, not multiplied, so N "
    "leaves them out",
    "recomputed": "That counts what is computed again (8 N + 16 L H Q T): MFU counts what the "
    "model needs, so that a run cannot raise it by doing more",
    "weights again": "That counts the weights that are used again (8 N): MFU counts what the model "
    "needs, so that a run cannot raise it by doing more",
    "forward": "That is the forward pass alone, 2 N + 4 L H Q T: backward takes twice as much "
    "again",
    "causal": "That is `mfu_causal`, which counts only the pairs of query and key that see each "
    "other, (T + 1) / 2 keys: PaLM's and nanoGPT's figure counts all T",
    "half": "That is with T / 2 keys a query: PaLM's and nanoGPT's figure counts all T",
    "percent": "That is a percentage: a fraction was asked",
}


def check(answer: Any) -> None:
    """Raise Wrong for an answer that is not right."""
    check_pages(answer)
    check_mfu(answer)


def check_pages(answer: Any) -> None:
    # Pages in order of the table; out of order; a full last page; several tokens short of it.
    for table, length in (([1, 0, 0], 4), ([5, 2, 0], 6), ([3, 6, 1], 12), ([4, 5, 2], 9)):
        draw = torch.Generator().manual_seed(length)
        k_pages, v_pages = torch.randint(-3, 4, (2, 7, 4, 2), generator=draw).float()
        q, page_table = torch.tensor([2.0, 1.0]), torch.tensor(table, dtype=torch.int32)
        given = small(page_table=page_table, page_size=4, length=length)
        want = over_pages(q, k_pages, v_pages, page_table, length)
        slips = {
            t: over_pages(q, k_pages, v_pages, page_table, length, s) for s, t in MISTAKES.items()
        }
        got = call(answer.attend, q, k_pages, v_pages, page_table, length)
        same(got, want, "out", given, {t: x for t, x in slips.items() if not x.equal(want)})

        places = torch.full((7, 4), True)
        for j in range(length):
            places[table[j // 4], j % 4] = False
        k_pages[places], v_pages[places] = torch.nan, torch.nan
        got = call(answer.attend, q, k_pages, v_pages, page_table, length)
        if isinstance(got, Tensor) and got.isnan().any():
            raise Wrong(
                "out is right while all pages hold numbers, and NaN once the places that are not "
                f"this sequence's hold NaN, {given}: a probability of 0 does not silence them, "
                "since 0 * NaN is NaN. Do not multiply what lies behind the length"
            )
        same(got, want, "out", given)


def over_pages(q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, length: int,
               slip: str = "") -> Tensor:  # fmt: skip
    """out as it must be, or as it comes out with one of MISTAKES."""
    size, D = k_pages.shape[1:]
    table = page_table.long()
    if slip == "logical":
        table = torch.arange(len(table))
    if slip == "sorted":
        stored = -(-length // size)
        table = torch.cat([table[:stored].sort().values, table[stored:]])
    until = {
        "last page whole": -(-length // size) * size,
        "table whole": len(table) * size,
        "full pages": length // size * size,
        "one less": length - 1,
    }.get(slip, length)
    k, v = (pages[table].flatten(0, 1)[:until] for pages in (k_pages, v_pages))
    return torch.softmax(k @ q / (1 if slip == "scale" else math.sqrt(D)), dim=0) @ v


def check_mfu(answer: Any) -> None:
    from core.flops import datasheet_peak, n_params
    from model import GPTConfig

    gpt2 = GPTConfig(vocab_size=50304, bias=False)
    positions = gpt2.block_size * gpt2.n_embd
    known = {"parameters": n_params(gpt2) + positions, "positions": positions, "n_layer": 12,
             "n_head": 12, "head_dim": 64, "T": 1024}  # fmt: skip
    h100 = datasheet_peak("NVIDIA H100 80GB HBM3", "bfloat16")
    assert h100 is not None
    peaks = {"dense": h100.tflops * 1e12, "sparse": 2 * h100.tflops * 1e12}
    for what, recomputes in (("GPT-2 124M", False), ("GPT-2 124M with recomputation", True)):
        arguments = {
            **known,
            "tokens_per_second": 400_000.0,
            "peaks": peaks,
            "recomputes": recomputes,
        }
        got = call(answer.mfu, **arguments)
        if not isinstance(got, (int, float)):
            raise Wrong(f"mfu() returned {type(got).__name__}, must return a number")
        want = rate(arguments)
        if math.isclose(got, want, rel_tol=1e-6):
            continue
        slips = {text: rate(arguments, slip) for slip, text in RATES.items()}
        why = next((t for t, x in slips.items() if math.isclose(got, x, rel_tol=1e-6)), None)
        raise Wrong(
            f"mfu is {got:.4g}, must be {want:.4g}, for {what}, were it to make 400,000 tokens/s "
            "on an "
            f"H100" + (f". {why}" if why else "")
        )


def rate(given: dict[str, Any], slip: str = "") -> float:
    """MFU as it must be, or as it comes out with one of RATES."""
    N = given["parameters"] - (0 if slip == "positions" else given["positions"])
    T = given["T"]
    keys = {"causal": (T + 1) / 2, "half": T / 2, "6N": 0}.get(slip, T)
    pairs = given["n_layer"] * given["n_head"] * given["head_dim"] * keys
    passes = {"forward": 2, "recomputed": 8}.get(slip, 6)
    flops = passes * (N + 2 * pairs) + (2 * N if slip == "weights again" else 0)
    peak = given["peaks"]["sparse" if slip == "sparse" else "dense"]
    return float(flops * given["tokens_per_second"] / peak) * (100 if slip == "percent" else 1)
