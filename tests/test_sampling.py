"""From logits to a token: the shares of what is drawn, and which tokens may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from inference.sampling import SamplingParams, Uniform, _likeliest, sample_token


def pick(logits: Tensor, u: Tensor | None, **params: Any) -> Tensor:
    return sample_token(logits, u, SamplingParams(**params))


def draw(logits: Tensor, generator: Any, **params: Any) -> Tensor:
    """One token from each row of logits."""
    greedy = params.get("temperature") == 0
    u = None if greedy else Uniform(1, logits.device, generator, block=len(logits))
    return pick(logits, None if u is None else torch.cat(u.left), **params)


def draws(logits: Tensor, n: int = 40_000, **sampling: Any) -> Tensor:
    """How often each token was drawn, as a share."""
    generator = torch.Generator().manual_seed(0)
    drawn = draw(logits.expand(n, -1), generator, **sampling)
    assert drawn.shape == (n,) and drawn.dtype == torch.int64
    return torch.bincount(drawn, minlength=logits.shape[-1]) / n


@pytest.mark.parametrize("sampling, want", [
    ({}, [0.4, 0.3, 0.15, 0.1, 0.05]),
    ({"temperature": 0.5}, [0.16, 0.09, 0.0225, 0.01, 0.0025]),
    ({"temperature": 2.0}, [0.4**0.5, 0.3**0.5, 0.15**0.5, 0.1**0.5, 0.05**0.5]),
    ({"top_k": 2}, [0.4, 0.3, 0, 0, 0]),
    ({"top_k": 5}, [0.4, 0.3, 0.15, 0.1, 0.05]),
    ({"top_k": 9}, [0.4, 0.3, 0.15, 0.1, 0.05]),
    ({"top_p": 0.39}, [0.4, 0, 0, 0, 0]),
    ({"top_p": 0.41}, [0.4, 0.3, 0, 0, 0]),
    ({"top_p": 0.69}, [0.4, 0.3, 0, 0, 0]),
    ({"top_p": 0.71}, [0.4, 0.3, 0.15, 0, 0]),
    ({"top_p": 1.0}, [0.4, 0.3, 0.15, 0.1, 0.05]),
    ({"top_k": 2, "top_p": 0.6}, [0.4, 0.3, 0, 0, 0]),  # 0.4 / 0.7 is less than 0.6
    ({"top_k": 2, "top_p": 0.5}, [0.4, 0, 0, 0, 0]),  # and more than 0.5
])  # fmt: skip
def test_the_shares_of_what_is_drawn(sampling, want) -> None:
    """Shuffled, so that order is no help. Each share is a binomial mean: 5 of its deviations."""
    p = torch.tensor(want) / sum(want)
    order = torch.tensor([3, 0, 4, 2, 1])
    logits = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log()[order] + 7
    got = draws(logits, **sampling)
    assert ((got - p[order]).abs() <= 5 * (p[order] * (1 - p[order]) / 40_000).sqrt()).all()
    assert torch.equal(got > 0, p[order] > 0)  # the set itself is exact


def test_of_equal_logits_no_more_than_k_stay() -> None:
    assert int((draws(torch.zeros(8), top_k=3) > 0).sum()) == 3
    one = draws(torch.tensor([1.0, 2.0, 2.0, 2.0]), top_k=1)
    assert int((one > 0).sum()) == 1 and one[0] == 0


def test_each_row_is_drawn_from_its_own_logits() -> None:
    logits = torch.full((3, 4), -1e9)
    logits[[0, 1, 2], [2, 0, 3]] = 0.0
    for sampling in ({}, {"top_k": 2}, {"top_p": 0.9}, {"temperature": 0}):
        assert draw(logits, None, **sampling).tolist() == [2, 0, 3]


def test_pick_is_the_inverse_of_the_distribution_function() -> None:
    """Steps of u over [0, 1) give each token as often as it is likely, to one step."""
    p = torch.tensor([0.5, 0.0, 0.125, 0.25, 0.125, 0.0], dtype=torch.float64)
    n = 1 << 12
    u = torch.arange(n, dtype=torch.float64) / n
    logits = p.log().float().expand(n, -1)
    drawn = torch.bincount(pick(logits, u), minlength=6)
    assert (drawn - n * p).abs().max() <= 1 and drawn[1] == drawn[5] == 0
    assert pick(logits[:1], torch.tensor([1 - 2.0**-53], dtype=torch.float64)).tolist() == [4]
    assert pick(logits[:1], torch.zeros(1, dtype=torch.float64), top_k=3).tolist() == [0]
    assert pick(logits[:2], None).tolist() == [0, 0]
    backwards = logits[:1].flip(-1)  # a first token of probability 0 is not drawn by u = 0 either
    assert pick(backwards, torch.zeros(1, dtype=torch.float64)).tolist() == [1]


def test_rare_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    """Numbers from ten widths before a token to ten widths behind it: one in 21 is the token."""
    logits = 4 * torch.randn(1, 5000, generator=torch.Generator().manual_seed(0))
    p = logits.softmax(-1)[0].double()
    p /= p.sum()
    upto = p.cumsum(0)
    for token in p.argsort()[500::500].tolist():
        width, low = float(p[token]), float(upto[token] - p[token])
        u = torch.arange(210, dtype=torch.float64) / 10 * width + low - 10 * width
        inside = u[(u >= 0) & (u < 1)]
        hits = int((pick(logits.expand(len(inside), -1), inside) == token).sum())
        assert len(inside) > 100 and 8 <= hits <= 12, (token, width, hits)


def test_top_p_is_that_of_a_full_sort() -> None:
    """The same tokens for every u, whether the nucleus has one token or nearly all of them."""
    draw = torch.Generator().manual_seed(0)
    u = torch.rand(24, dtype=torch.float64, generator=draw)
    u[:2] = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    sizes = set()
    for V in (50, 1000, 40000):
        flat = torch.randn(1, V, generator=draw)
        logits = torch.cat([flat * scale for scale in (0, 0.1, 1, 3, 8)] + [-(flat.abs() ** 3)])
        logits[1, ::3] = -torch.inf
        for top_p in (1e-6, 0.3, 0.9, 1 - 1e-7, 1.0):
            nucleus = torch.tensor(top_p)
            for rows in (logits[:1], logits[3:4], logits):
                probs = rows.softmax(-1)
                some, order = _likeliest(probs, nucleus)
                sizes.add((some.shape[1] == V, len(rows)))
                in_order, _ = probs.sort(dim=-1, descending=True)
                k = some.shape[1]
                assert torch.equal(some, in_order[:, :k])
                assert torch.equal(some, probs.gather(1, order))
                upto = in_order.cumsum(-1, dtype=torch.float64)
                assert k == V or (upto[:, k - 1] >= nucleus).all()  # what is left out is outside
                for x in u.split(len(rows))[: len(u) // len(rows)]:
                    drawn = pick(rows, x, top_p=nucleus)[:, None]
                    kept = torch.where(upto - in_order >= nucleus, 0, upto)
                    at = torch.searchsorted(upto, x[:, None] * kept.amax(-1, keepdim=True),
                                            right=True)  # fmt: skip
                    assert torch.equal(probs.gather(1, drawn), in_order.gather(1, at))
    assert sizes == {(False, 1), (True, 1), (False, 6), (True, 6)}


def test_top_p_reads_nothing_back_but_on_the_cpu(monkeypatch) -> None:
    """On the device "meta" there is nothing to read."""
    logits, u = torch.randn(2, 4000, device="meta"), torch.rand(2, device="meta")
    assert pick(logits, u, top_p=0.9).shape == (2,)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    probs = torch.tensor([[0.5, 0.2, 0.3]] * 2).repeat(1, 100) / 100
    monkeypatch.setattr(Tensor, "__bool__", lambda self: pytest.fail("a value was asked for"))
    assert _likeliest(probs, 0.1)[0].shape == (2, 300)
