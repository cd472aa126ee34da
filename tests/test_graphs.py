"""Captured decoding, with the device's part replaced: a graph runs its step again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import few
from test_constrain import ENDS, TOKENS, Vocabulary, by_python, rarely
from test_generate import lively, ragged
from test_model import SHAPES

from core.cpu import int8
from inference import constrain, engine, graphs

pytestmark = pytest.mark.usefixtures("remembered_probes")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The steps that were captured."""
    made: list[Any] = []

    def record(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
        made.append(step)
        return step

    monkeypatch.setattr(graphs, "possible", lambda device: True)
    monkeypatch.setattr(graphs, "record", record)
    yield made


def text(model: Any, n: int = 30, **options: Any) -> list[list[int]]:
    options.setdefault("generator", [torch.Generator().manual_seed(b) for b in range(4)])
    return [t.tolist() for t in engine.generate(model, ragged(), n, **options)]


HOWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0}, "seeds": {}, "top_p": {"top_p": 0.8, "top_k": 9},
    "constraint": {"constraint": True}, "in step": {"logits_processor": rarely},
    "python": {"logits_processor": by_python}, "stop": {"stop": [3, 9]},
}  # fmt: skip


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("shape", few(["llama-window", "plain"]))
def test_captured_tokens_are_those_of_the_eager_static_cache(shape, how, recorded) -> None:
    """In a second call, too, with no further capture; also where texts slide."""
    model, options = lively(**SHAPES[shape]), dict(HOWS[how])
    if "constraint" in options:
        options["constraint"] = constrain.regex("[ab]{3}.*", Vocabulary(TOKENS, ENDS))
    want = text(model, kv_cache="static", **options)
    assert not recorded
    assert text(model, **options) == want
    n = len(recorded)
    assert n == (2 if how == "python" else 1)
    assert text(model, **options) == want
    assert len(recorded) == (2 * n if how == "in step" else n)  # its numbers may have changed


def test_weights_that_moved_are_captured_again(recorded) -> None:
    model, other = lively(), lively(n_head=2)
    before = text(model, temperature=0)
    for n, move in enumerate((
        lambda: model.load_state_dict(other.state_dict(), assign=True),
        lambda: model.to(torch.float64).to(torch.float32),
        lambda: int8.convert(model, model.head_weight),
    ), 2):  # fmt: skip
        move()
        want = text(model, temperature=0, kv_cache="static")
        assert text(model, temperature=0) == want
        assert len(recorded) == n
    with torch.no_grad():  # in place: the graph reads them
        model.transformer.wte.weight.mul_(-1)
    assert text(model, temperature=0) == text(model, temperature=0, kv_cache="static") != before
    assert len(recorded) == n


def test_a_capture_that_fails_is_one_warning_and_eager(recorded, monkeypatch, caplog) -> None:
    def fail(*args: Any) -> Any:
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        finally:
            raise RuntimeError("the end of the capture failed")

    monkeypatch.setattr(graphs, "record", fail)
    model = lively()
    want = text(model, kv_cache="static")
    with caplog.at_level(logging.WARNING):
        assert text(model) == text(model) == want
        text(model, top_k=36)  # another kind of step with the same reason
    (record,) = [r for r in caplog.records if "captur" in r.message]
    assert "not permitted" in record.message and "more" not in record.message
