"""Sampling: frequencies and sets of tokens against closed forms."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inference.sampling import Draw, Options, sample_token, uniform

LAST = 1 - 2.0**-53  # the largest number below 1


def pick(logits: Tensor, u: Tensor | list[float] | None, **params: Any) -> Tensor:
    at = torch.tensor(u, dtype=torch.float64) if isinstance(u, list) else u
    draw = Draw.by(Options(logits.shape[-1], None, **params), logits.device)
    return sample_token(logits, draw._replace(u=at))


def counts(logits: Tensor, n: int = 1 << 12, **params: Any) -> Tensor:
    """What evenly spaced u draw."""
    drawn = pick(logits.expand(n, -1), torch.arange(n, dtype=torch.float64) / n, **params)
    assert drawn.shape == (n,) and drawn.dtype == torch.int64
    return torch.bincount(drawn, minlength=logits.shape[-1])


def test_the_numbers_of_a_seed_go_on_without_repeating() -> None:
    """A longer text begins like a shorter one."""
    def numbers(n: int) -> list[float]:
        generator = torch.Generator().manual_seed(1)
        return [float(u) for u in itertools.islice(uniform(torch.device("cpu"), generator), n)]

    found = numbers(300)
    assert len({*found}) == 300 and found[:9] == numbers(9)
    assert 0 <= min(found) < 0.02 < 0.98 < max(found) < 1


P = [0.4, 0.3, 0.15, 0.1, 0.05]


@pytest.mark.parametrize("sampling, want", [
    ({}, P), ({"temperature": 0.5}, [p**2 for p in P]), ({"temperature": 2.0}, [p**0.5 for p in P]),
    ({"temperature": math.inf, "unused": [2]}, [1.0] * 4),  # -inf / inf is no number
    *(({"top_k": k}, P[:k]) for k in (2, 4, 5, 9)),
    *(({"top_p": top_p}, P[:n]) for top_p, n in ((0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3),
                                                 (1.0, 5))),
    ({"top_k": 2, "top_p": 0.6}, P[:2]),  # 0.4 / 0.7 is less than 0.6
    ({"top_k": 2, "top_p": 0.5}, P[:1]),  # and more than 0.5
])
def test_the_shares_of_what_is_drawn(sampling, want) -> None:
    """Each token as often as likely, to one step."""
    p = torch.tensor([*want, *[0.0] * (5 - len(want))]) / sum(want)
    order = torch.tensor([3, 0, 4, 2, 1])
    got = counts(torch.tensor(P).log()[order] + 7, **sampling)
    assert ((got - 2**12 * p[order]).abs() <= 1).all()
    assert torch.equal(got > 0, p[order] > 0)


def test_pick_is_the_inverse_of_the_distribution_function() -> None:
    """Also of a token of 2^-40; none of probability 0 is drawn, by u = 0 either."""
    assert int((counts(torch.zeros(8), top_k=3) > 0).sum()) == 3  # of equal ones no more than k
    logits = torch.tensor([0.5, 0.0, 0.125, 0.25, 0.125, 0.0]).log().expand(2, -1)
    assert counts(logits[:1]).tolist() == [2048, 0, 512, 1024, 512, 0]
    assert pick(logits, [LAST, 0.0]).tolist() == [4, 0] and pick(logits, None)[1] == 0
    assert pick(logits[:1].flip(-1), [0.0]).tolist() == [1]
    near = [0.5 + x * 2**-41 for x in (-1, 0, 1)]
    rare = torch.tensor([[0.0, -40 * math.log(2), 0.0]])
    assert pick(rare.expand(3, -1), near).tolist() == [0, 1, 2]


@given(
    st.lists(st.integers(-(2**20), 2**20), min_size=2, max_size=9, unique=True),
    st.floats(0, 1e-20) | st.sampled_from([1e-39, 1e-44, 5e-324]),
    st.floats(0, 1, exclude_max=True),
)
def test_a_temperature_near_0_takes_the_likeliest(values, temperature, u) -> None:
    logits, likeliest = torch.tensor([values]).float() / 64, [values.index(max(values))]
    assert pick(logits, [u], temperature=temperature).tolist() == likeliest
    assert pick(logits, [u], top_p=max(temperature, 5e-324)).tolist() == likeliest


@pytest.mark.parametrize("V", [50, 9000])
def test_top_p_is_the_nucleus_of_its_definition(V) -> None:
    """The fewest likeliest tokens that sum to top_p, up to rounding at the border."""
    generator = torch.Generator().manual_seed(V)
    flat = torch.randn(1, V, generator=generator)
    logits = torch.cat([flat * scale for scale in (0.1, 1, 3, 8)] + [-(flat.abs() ** 3)])
    logits[1, ::3] = -torch.inf
    for top_p, row in itertools.product((1e-6, 0.3, 0.9), logits):
        p = row.double().softmax(-1)
        likeliest = p.sort(descending=True).values
        before = likeliest.cumsum(0) - likeliest
        least, most = (likeliest[(before < max(top_p + d, 1e-9)).sum() - 1] for d in (1e-5, -1e-5))
        u = [0.0, LAST, *torch.rand(50, generator=generator).tolist()]
        drawn = p[pick(row.expand(52, -1), u, top_p=top_p)]
        assert drawn[0] == pytest.approx(float(p.max()), rel=1e-5)
        assert drawn[1] <= most * (1 + 1e-5) and drawn.min() >= least * (1 - 1e-5)
    logits = torch.stack([-1e-6 * torch.arange(4000.0), torch.arange(4000.0)])
    flat, sharp = pick(logits, [LAST, LAST], top_p=0.9).tolist()  # side by side
    assert 3590 <= flat <= 3600 and sharp >= 3990
