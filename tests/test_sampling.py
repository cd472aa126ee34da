"""Sampling: frequencies and sets of tokens against closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inference.sampling import Options, SamplingParams, sample_token


def pick(logits: Tensor, u: Tensor | None, **params: Any) -> Tensor:
    return sample_token(logits, u, SamplingParams.on(logits.device, Options(**params)))


def draws(logits: Tensor, n: int = 40_000, **sampling: Any) -> Tensor:
    u = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drawn = pick(logits.expand(n, -1), u, **sampling)
    assert drawn.shape == (n,) and drawn.dtype == torch.int64
    return torch.bincount(drawn, minlength=logits.shape[-1]) / n


@pytest.mark.parametrize("sampling, want", [
    ({}, [0.4, 0.3, 0.15, 0.1, 0.05]),
    ({"temperature": 0.5}, [0.16, 0.09, 0.0225, 0.01, 0.0025]),
    ({"temperature": 2.0}, [0.4**0.5, 0.3**0.5, 0.15**0.5, 0.1**0.5, 0.05**0.5]),
    ({"top_k": 2}, [0.4, 0.3, 0, 0, 0]),
    ({"top_k": 4}, [0.4, 0.3, 0.15, 0.1, 0]),
    ({"top_k": 5}, [0.4, 0.3, 0.15, 0.1, 0.05]),
    ({"top_k": 9}, [0.4, 0.3, 0.15, 0.1, 0.05]),
    ({"top_p": 0.39}, [0.4, 0, 0, 0, 0]),
    ({"top_p": 0.41}, [0.4, 0.3, 0, 0, 0]),
    ({"top_p": 0.69}, [0.4, 0.3, 0, 0, 0]),
    ({"top_p": 0.71}, [0.4, 0.3, 0.15, 0, 0]),
    ({"top_p": 1.0}, [0.4, 0.3, 0.15, 0.1, 0.05]),
    ({"top_k": 2, "top_p": 0.6}, [0.4, 0.3, 0, 0, 0]),  # 0.4 / 0.7 is less than 0.6
    ({"top_k": 2, "top_p": 0.5}, [0.4, 0, 0, 0, 0]),  # and more than 0.5
])
def test_the_shares_of_what_is_drawn(sampling, want) -> None:
    """Shuffled tokens; each share is a binomial mean, within 5 standard deviations."""
    p = torch.tensor(want) / sum(want)
    order = torch.tensor([3, 0, 4, 2, 1])
    logits = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log()[order] + 7
    got = draws(logits, **sampling)
    assert ((got - p[order]).abs() <= 5 * (p[order] * (1 - p[order]) / 40_000).sqrt()).all()
    assert torch.equal(got > 0, p[order] > 0)  # the set itself is exact


def test_pick_is_the_inverse_of_the_distribution_function() -> None:
    """Steps of u over [0, 1) give each token as often as it is likely, to one step; a token with a
    probability of 2^-40 too."""
    p = torch.tensor([0.5, 0.0, 0.125, 0.25, 0.125, 0.0], dtype=torch.float64)
    n = 1 << 12
    assert int((draws(torch.zeros(8), top_k=3) > 0).sum()) == 3  # of equal ones no more than k
    u = torch.arange(n, dtype=torch.float64) / n
    logits = p.log().float().expand(n, -1)
    drawn = torch.bincount(pick(logits, u), minlength=6)
    assert (drawn - n * p).abs().max() <= 1 and drawn[1] == drawn[5] == 0
    assert pick(logits[:1], torch.tensor([1 - 2.0**-53], dtype=torch.float64)).tolist() == [4]
    assert pick(logits[:1], torch.zeros(1, dtype=torch.float64), top_k=3).tolist() == [0]
    assert pick(logits[:2], None).tolist() == [0, 0]
    rare = torch.tensor([[0.0, -40 * math.log(2), 0.0]])
    near = 0.5 + torch.tensor([-1, 0, 1], dtype=torch.float64) * 2**-41
    assert pick(rare.expand(3, -1), near).tolist() == [0, 1, 2]
    backwards = logits[:1].flip(-1)  # a first token of probability 0 is not drawn by u = 0 either
    assert pick(backwards, torch.zeros(1, dtype=torch.float64)).tolist() == [1]


@given(
    st.lists(st.integers(-(2**20), 2**20), min_size=2, max_size=9, unique=True),
    st.floats(0, 1e-20) | st.sampled_from([1e-39, 1e-44, 5e-324]),
    st.floats(0, 1, exclude_max=True),
)
def test_a_temperature_near_0_takes_the_likeliest(values, temperature, u) -> None:
    logits, at = torch.tensor([values]).float() / 64, torch.tensor([u], dtype=torch.float64)
    likeliest = [values.index(max(values))]
    assert pick(logits, at, temperature=temperature).tolist() == likeliest
    assert pick(logits, at, top_p=max(temperature, 5e-324)).tolist() == likeliest
    with pytest.raises(ValueError, match="nan"):
        Options(temperature=math.nan)


def nucleus_of(p: list[float], top_p: float) -> list[int]:
    kept, mass = [], 0.0
    for token in sorted(range(len(p)), key=p.__getitem__, reverse=True):
        if mass >= top_p:
            break
        kept.append(token)
        mass += p[token]
    return kept


@pytest.mark.parametrize("V", [50, 9000])
def test_top_p_is_the_nucleus_of_its_definition(V) -> None:
    generator = torch.Generator().manual_seed(V)
    flat = torch.randn(1, V, generator=generator)
    logits = torch.cat([flat * scale for scale in (0.1, 1, 3, 8)] + [-(flat.abs() ** 3)])
    logits[1, ::3] = -torch.inf
    sizes = set()
    for top_p in (1e-6, 0.3, 0.9):
        params = SamplingParams(top_p=torch.tensor(top_p))
        for row in logits:
            p = row.double().softmax(-1)
            # The border, if the sums were rounded one way or the other.
            least, most = (
                p[nucleus_of(p.tolist(), max(top_p + d, 1e-9))[-1]] for d in (1e-5, -1e-5)
            )
            sizes.add(len(nucleus_of(p.tolist(), top_p)))
            ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
            first, last = p[sample_token(row.expand(2, -1), ends, params)].tolist()
            assert first == pytest.approx(float(p.max()), rel=1e-5)
            assert least * (1 - 1e-5) <= last <= most * (1 + 1e-5)
            u = torch.rand(50, dtype=torch.float64, generator=generator)
            drawn = p[sample_token(row.expand(50, -1), u, params)]
            assert (drawn >= least * (1 - 1e-5)).all()
    assert 1 in sizes and max(sizes) > V // 4


def test_a_flat_row_next_to_a_sharp_one_has_its_whole_nucleus() -> None:
    logits = torch.stack([-1e-6 * torch.arange(4000.0), torch.arange(4000.0)])
    u = torch.tensor([1 - 2.0**-53] * 2, dtype=torch.float64)
    flat, sharp = pick(logits, u, top_p=0.9).tolist()
    assert 3590 <= flat <= 3600 and sharp >= 3990
