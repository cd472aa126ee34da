"""Arguments that an error names, kernels that no graph holds, and a check that ends in time."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._dynamo.exc import Unsupported

import attention as fa
from attention.check import command

Q = torch.randn(1, 5, 2, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("value", ["abc", [0.5], torch.ones(2), {}], ids=repr)
@pytest.mark.parametrize("name", ["dropout_p", "softmax_scale", "softcap"])
def test_what_is_no_number_is_named(name, value) -> None:
    with pytest.raises(TypeError, match=name):
        fa.flash_attn_func(Q, Q, Q, **{name: value})


def test_numbers_of_other_libraries_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    want = fa.flash_attn_func(Q, Q, Q, softmax_scale=0.5)
    for scale in (numpy.float32(0.5), torch.tensor(0.5), torch.tensor([0.5])):
        assert torch.equal(fa.flash_attn_func(Q, Q, Q, softmax_scale=scale), want)


@pytest.mark.parametrize("before", ["tiled", "manual"])
def test_a_graph_that_cannot_hold_a_kernel_says_what_to_do(before) -> None:
    """Whether or not another kernel was in it first; with breaks it is right."""
    whole, broken = (
        torch.compile(
            lambda q: fa.flash_attn_func(q, q, q, causal=True), backend="eager", fullgraph=full
        )
        for full in (True, False)
    )
    try:
        fa.use(before)
        if before != "tiled":
            whole(Q)
        fa.use("tiled")
        with pytest.raises(Unsupported, match="fullgraph=False"):
            whole(Q)
        torch.testing.assert_close(broken(Q), fa.flash_attn_func(Q, Q, Q, causal=True))
    finally:
        fa.use()
        torch.compiler.reset()


def test_a_quick_check_ends_in_time(monkeypatch) -> None:
    """By a clock on which each look takes ten seconds: some tests of each dtype, then no more."""
    clock = itertools.count(0, 10)
    monkeypatch.setattr(command.time, "monotonic", lambda: next(clock))
    report = command.check("manual", ["cpu"], quick=True)
    total = report.features["total"]
    assert 0 < total["passed"] < 20 and not total["failed"] and report.code == 0
    assert report.left_out > 1000 and report.untested == []
