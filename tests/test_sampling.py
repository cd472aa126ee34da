"""From logits to a token: the shares of what is drawn, and which tokens may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core import runtime
from inference.sampling import Options, SamplingParams, Uniform, _likeliest, behind, sample_token


def pick(logits: Tensor, u: Tensor | None, **params: Any) -> Tensor:
    return sample_token(logits, u, SamplingParams.on(logits.device, Options(**params)))


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


@pytest.mark.parametrize("top_p, stay", [(0.25, 1), (0.5, 2), (0.51, 3), (0.75, 3), (0.76, 4)])
def test_of_tokens_that_are_equally_likely_top_p_keeps_no_more_than_it_must(top_p, stay) -> None:
    """Four of a fourth each, which floating point holds exactly."""
    assert int((draws(torch.zeros(4), top_p=top_p) > 0).sum()) == stay


def nucleus_of(p: list[float], top_p: float) -> list[int]:
    """By the definition: the fewest likeliest tokens that together have that mass."""
    kept, mass = [], 0.0
    for token in sorted(range(len(p)), key=p.__getitem__, reverse=True):
        if mass >= top_p:
            break
        kept.append(token)
        mass += p[token]
    return kept


@pytest.mark.parametrize("V", [50, 1000, 9000])
def test_top_p_is_the_nucleus_of_its_definition(V) -> None:
    """Whether it has one token or nearly all of them, and whatever was sorted to find it."""
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
            u = torch.rand(200, dtype=torch.float64, generator=generator)
            drawn = p[sample_token(row.expand(200, -1), u, params)]
            assert (drawn >= least * (1 - 1e-5)).all()
    assert 1 in sizes and max(sizes) > V // 4


def test_a_flat_row_beside_a_sharp_one_has_its_whole_nucleus() -> None:
    """What was sorted is enough for every row, not for some."""
    logits = torch.stack([torch.zeros(1000), torch.arange(1000.0)])
    u = torch.tensor([1 - 2.0**-53] * 2, dtype=torch.float64)
    probs, order = _likeliest(logits.softmax(-1), 0.9)
    assert probs.sum(-1)[0] > 0.9 and order.shape == probs.shape
    many = {int(pick(logits, u * n / 1000, top_p=0.9)[0]) for n in range(1000)}
    assert len(many) >= 899


def test_top_p_reads_nothing_back_but_on_the_cpu(monkeypatch) -> None:
    """On the device "meta" there is nothing to read."""
    logits, u = torch.randn(2, 4000, device="meta"), torch.rand(2, device="meta")
    assert pick(logits, u, top_p=0.9).shape == (2,)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    probs = torch.tensor([[0.5, 0.2, 0.3]] * 2).repeat(1, 100) / 100
    monkeypatch.setattr(Tensor, "__bool__", lambda self: pytest.fail("a value was asked for"))
    assert _likeliest(probs, 0.1)[0].shape == (2, 300)


def test_top_p_looks_further_where_the_likeliest_do_not_sum_to_it() -> None:
    """64 tokens have 0.8951 together, 336 share the rest: some of those are needed to pass 0.9."""
    p = torch.cat([torch.full((64,), 0.8951 / 64), torch.full((336,), 0.1049 / 336)])
    u = torch.tensor([0.9999], dtype=torch.float64)  # of what is kept, near the end
    assert int(pick(p.log()[None], u, top_p=0.9)) >= 64
    assert int(pick(p.log()[None], u, top_p=0.89)) < 64


def test_random_numbers_of_the_host_are_not_waited_for(monkeypatch) -> None:
    """On CUDA a copy from memory that is not pinned would wait for all that was launched."""
    asked: list[Any] = []

    class Host:
        """A tensor of the host."""

        device = torch.device("cpu")

        def pin_memory(self) -> Host:
            asked.append("pinned")
            return self

        def to(self, device: torch.device, non_blocking: bool) -> Host:
            asked.append((device.type, non_blocking))
            return self

    host: Any = Host()
    for name in ("cuda", "mps", "cpu"):
        runtime.to_device(host, torch.device(name))
    assert asked == ["pinned", ("cuda", True), ("mps", False), ("cpu", False)]

    moved: list[torch.Size] = []

    def note(t: Tensor, device: torch.device) -> Tensor:
        moved.append(t.shape)
        return t

    monkeypatch.setattr("inference.sampling.to_device", note)
    uniform = Uniform(3, torch.device("cpu"), torch.Generator(), block=4)
    assert [len(uniform.next()) for _ in range(4)] == [3] * 4 and moved == [(4,)] * 3


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_step_is_read_when_so_many_more_have_been_launched(ahead: int) -> None:
    events: list[tuple[str, int]] = []

    def launch() -> Any:
        for n in range(5):
            events.append(("launched", n))
            yield n

    for n in behind(launch(), ahead):
        events.append(("read", n))
    assert [n for what, n in events if what == "read"] == [*range(5)]
    for n in range(5):
        before = events[: events.index(("read", n))]
        assert before.count(("launched", 4)) or ("launched", n + ahead) == before[-1]
        assert ("launched", min(n + ahead, 4)) in before
