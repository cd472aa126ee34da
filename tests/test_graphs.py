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
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from core.cpu import int8
from inference import constrain, engine, graphs, sampling
from inference.cache import StaticCache
from inference.sampling import Options, SamplingParams

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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 5, "top_p": 0.9, "unused": 3}])
def test_a_step_waits_for_nothing(shape, options) -> None:
    """Traced without data: an operator that reads values would be an error, or is listed."""
    model = lively(**SHAPES[shape])
    config = model.config
    constraint = constrain.regex("[ab]{3}.*", Vocabulary(TOKENS, ENDS))
    heads = config.kv_heads, config.head_dim
    cache = StaticCache(config.n_layer, 2, 16, *heads, windows=config.windows)
    cache.reserve(3).advance()
    params = SamplingParams.on(torch.device("cpu"), Options(**options))
    u = None if options.get("temperature") == 0 else torch.rand(2, dtype=torch.float64)

    def step(idx: Tensor, state: Tensor, u: Tensor | None, tokens: Tensor, n: Tensor) -> Any:
        read = model, idx, None, cache.reserve(1), None
        return sampling.next_token(read, (params, constraint, state, u), (rarely, tokens, n))

    tokens, n = torch.zeros(2, 16, dtype=torch.int64), torch.tensor([3, 3])
    args = tokens[:, :1], constraint.start([0, 0], [9, 9]), u, tokens, n
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        faked = [x if x is None else fake.from_tensor(x) for x in args]
        ops = {str(node.target) for node in make_fx(step)(*faked).graph.nodes}
    assert "aten.embedding.default" in ops and any("index_put" in op for op in ops)
    ops.discard("<built-in function getitem>")
    waits = ("item", "nonzero", "_local_scalar_dense", "unique", "masked_select")
    assert not [op for op in ops if any(word in op for word in waits)]
